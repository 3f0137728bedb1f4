/* st_ranges.h: the rules about byte ranges of one header (formats 2, rule 3). */
#ifndef QX_ST_RANGES_H
#define QX_ST_RANGES_H

#include "st_header.h"

enum { QX_ST_BAD_SHAPE = 1, QX_ST_BAD_RANGE = 2, QX_ST_DUPLICATE = 4 };

struct qx_st_entry {
    struct qx_tensor t;
    uint64_t begin, end; /* data_offsets; 0 with QX_ST_BAD_RANGE */
    uint8_t flags;
};

/* Fills n_elems, off, size_bytes and readable of every entry, sets h->state to SHORT for a cut file, and
 * reports bad-offsets, size-mismatch, overlap, hole, trailing-bytes and truncated. False: no memory. */
bool qx_st_check_ranges(struct qx_st_header *h, struct qx_st_entry *entries, size_t n, const char *name,
                        struct qx_findings *fs);

#endif
