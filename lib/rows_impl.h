/* rows_impl.h: what rows_open.c fills and rows.c reads: one open row source. */
#ifndef QX_ROWS_IMPL_H
#define QX_ROWS_IMPL_H

#include <stdatomic.h>

#include "pack.h"
#include "rows.h"

struct qx_row_part {
    const struct qx_tensor *weight, *scale;
};

/* What reads took lately, by which the faster way is chosen. */
struct qx_row_times {
    _Atomic uint32_t row_ns[2]; /* a row of a window that was read, that was mapped; 0 not known */
    _Atomic uint32_t n_windows;
};

struct qx_rows {
    const struct qx_ckpt *ck;
    const char *name;
    enum qx_format format; /* QX_F_NONE: plain values of `dtype` */
    enum qx_dtype dtype;
    bool table, packed;
    struct qx_pack_info pack;
    uint64_t n_rows, width, code_bytes, scale_bytes;
    struct qx_row_part *parts;
    _Atomic(const uint8_t *) *maps; /* [2 x n_parts]: mapped weight and scale of a part, NULL not yet */
    uint64_t map_bytes; /* tables up to this size may stay mapped: their pages count as ours */
    struct qx_row_times *times;
    uint32_t n_parts;
    uint64_t rows_per_part;
    float *global; /* [n_global], expert by expert when more than one */
    uint64_t n_global, rows_per_stack;
    float *blocks; /* FP8_BLOCK: [stack, block_rows, block_cols] */
    uint64_t block_rows, block_cols;
};

/* Bytes of a tensor; those of a truncated file as far as they are there. */
int qx_rows_read_at(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t off, void *dst,
                    uint64_t n, struct qx_error *err);

#endif
