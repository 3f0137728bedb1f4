/* quantize_loops.h: what quantize_loops.c offers, once for every set of instructions. */
#ifndef QX_QUANTIZE_LOOPS_H
#define QX_QUANTIZE_LOOPS_H

#include "quantize.h"

struct qx_quant_loops {
    void (*nvfp4)(const float *x, size_t n_rows, size_t cols, float global, bool search, uint8_t *codes,
                  uint8_t *scales, struct qx_quant_stats *st);
    void (*nvfp4_e4m3)(const uint8_t *x, float scale, size_t n_rows, size_t cols, float global, bool search,
                       uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st);
    void (*fp8)(const float *x, size_t n_rows, size_t cols, float scale, float plain, uint8_t *codes,
                struct qx_quant_stats *st);
    /* Squared error of a block of rows `stride` apart. */
    double (*block)(const float *x, size_t stride, size_t rows, size_t cols, float scale, double *max);
    void (*amax)(const float *x, size_t n, float *amax, bool *finite);
    uint32_t (*amax16)(const uint8_t *p, size_t n);
    uint32_t (*amax8)(const uint8_t *p, size_t n);
};
#define QX_QUANT_LOOPS_(set) qx_quant_loops_##set
#define QX_QUANT_LOOPS(set) QX_QUANT_LOOPS_(set)
extern const struct qx_quant_loops qx_quant_loops_c;
#if defined(__x86_64__)
extern const struct qx_quant_loops qx_quant_loops_avx2, qx_quant_loops_avx512;
#endif

/* What rows add up to while their pieces come in order. */
struct qx_row_sums { size_t blocks_per_row, at; double sum_sq, err, plain; };

static inline void qx_count_row(struct qx_row_sums *r, struct qx_quant_stats *st)
{
    const double limit = QX_QUANT_ROW_LIMIT * QX_QUANT_ROW_LIMIT;
    st->rows_above += r->err > limit * r->sum_sq;
    st->plain_rows_above += r->plain > limit * r->sum_sq;
    st->sum_sq += r->sum_sq;
    st->err_sq += r->err;
    st->plain_err_sq += r->plain;
    st->n_rows++;
    r->at = 0;
    r->sum_sq = r->err = r->plain = 0.0;
}

#endif
