/* scan_loops.h: does a run of stored elements hold anything that deserves a closer look? Fast loops for
 * reading every byte of a checkpoint; what they find is then looked at element by element. */
#ifndef QX_SCAN_LOOPS_H
#define QX_SCAN_LOOPS_H

#include "base.h"

/* What elements may not be. "zero" is only asked for where zero means something. */
enum qx_scan_kind {
    QX_SCAN_NONE,        /* any bytes: only whether all are zero */
    QX_SCAN_E4M3,        /* NaN codes 7f, ff */
    QX_SCAN_E5M2,        /* NaN, infinity */
    QX_SCAN_E8M0,        /* ff, and beyond plausible */
    QX_SCAN_BLOCK_SCALE, /* E4M3 of NVFP4 blocks: NaN, sign bit, zero */
    QX_SCAN_F16, QX_SCAN_BF16, QX_SCAN_F32, QX_SCAN_F64,                 /* NaN, infinity */
    QX_SCAN_SCALE_F16, QX_SCAN_SCALE_BF16, QX_SCAN_SCALE_F32, QX_SCAN_SCALE_F64, /* sign, zero, range too */
    QX_SCAN_COUNT
};

uint32_t qx_scan_elem_size(enum qx_scan_kind k); /* bytes */

/* Classes of an element; a set bit is a reason for a finding. */
#define QX_SCAN_IS_NAN 1u
#define QX_SCAN_IS_INF 2u
#define QX_SCAN_IS_SIGNED 4u  /* sign bit set (scales only, and only of finite numbers) */
#define QX_SCAN_IS_ZERO 8u    /* value zero (scales only) */
#define QX_SCAN_IS_HUGE 16u   /* 2^12 or more (scales only): times any code's largest value beyond all weights */
#define QX_SCAN_IS_TINY 32u   /* below 2^-41, not zero (scales in floating types only) */
#define QX_SCAN_CLASSES 6u
unsigned qx_scan_classify(enum qx_scan_kind k, const void *elem);

/* n bytes from p (a whole number of elements, any alignment). Bit 0: a byte is not zero. Bit 1: some
 * element may have a class (a hint that is never missing when there is one). */
#define QX_SCAN_NONZERO 1u
#define QX_SCAN_SUSPECT 2u
unsigned qx_scan_block(enum qx_scan_kind k, const void *p, size_t n);

#endif
