/* quantize.h: from numbers to NVFP4 and FP8, with scales chosen by search.
 *
 * NVFP4: the global scale is amax / 2688 as everywhere; each block's scale byte is the one among the
 * neighbours of round(amax / 6 / global) whose block has the least squared error. FP8: the scale is the
 * one among the BF16 values around amax / 448 with the least squared error. The plain choice is always
 * among the candidates and is kept unless another is better beyond rounding, so that the result is never
 * worse. All loops give the same bytes whatever the processor; the caller's pieces give the same bytes
 * whatever the number of threads. */
#ifndef QX_QUANTIZE_H
#define QX_QUANTIZE_H

#include "base.h"
#include "decode.h"
#include "error.h"
#include "qx.h"

/* Error of a piece or of all: sums over values; plain_ is what the plain choice would have given. */
struct qx_quant_stats {
    double sum_sq;                     /* of the values themselves */
    double err_sq, plain_err_sq;
    double max_err, plain_max_err;     /* largest |decoded - value| */
    uint64_t n_values, n_rows;
    uint64_t rows_above, plain_rows_above; /* rows with relative RMS error above QX_QUANT_ROW_LIMIT */
};
#define QX_QUANT_ROW_LIMIT 0.1
void qx_quant_stats_add(struct qx_quant_stats *a, const struct qx_quant_stats *b);
double qx_quant_rel_rms(double err_sq, double sum_sq); /* 0 when there is nothing */

/* What the plain scale of a matrix is: F32 amax / 2688, positive and finite also for zeros only. */
float qx_nvfp4_global(float amax);
/* x [n_rows, cols], cols a multiple of 16, finite -> codes [n_rows, cols / 2], scales [n_rows, cols / 16].
 * Adds to *st. search false: the plain scales. */
void qx_nvfp4_quantize(const float *x, size_t n_rows, size_t cols, float global, bool search,
                       uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st);
/* The same by a given set of loops, for tests and benches. */
void qx_nvfp4_quantize_level(enum qx_simd level, const float *x, size_t n_rows, size_t cols, float global,
                             bool search, uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st);
/* The same of E4M3 bytes without NaN under one scale, without decoding them first: nothing differs from
 * qx_nvfp4_quantize of the decoded values. False, and nothing done, for a scale that this way does not
 * know: negative, NaN or above 2^119. */
bool qx_nvfp4_quantize_e4m3(const uint8_t *x, float scale, size_t n_rows, size_t cols, float global,
                            bool search, uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st);
bool qx_nvfp4_quantize_e4m3_level(enum qx_simd level, const uint8_t *x, float scale, size_t n_rows,
                                  size_t cols, float global, bool search, uint8_t *codes, uint8_t *scales,
                                  struct qx_quant_stats *st);

/* Values with how often they occur: the whole of a table in little memory, for tables stored in at most
 * 16 bits a value. Magnitudes only. */
struct qx_histogram { float *value; uint64_t *count; size_t n; };
/* The plain scale: amax / 448 to BF16; positive also for zeros only. */
float qx_fp8_plain_scale(float amax);
/* The BF16 scale with the least squared error over the histogram. */
float qx_fp8_search(const struct qx_histogram *h, float amax);
/* x [n_rows, cols] -> codes under one scale; plain_scale only enters the statistics. */
void qx_fp8_quantize(const float *x, size_t n_rows, size_t cols, float scale, float plain_scale,
                     uint8_t *codes, struct qx_quant_stats *st);

/* A matrix x [rows, cols] -> codes [rows, cols], scales [ceil(rows/128), ceil(cols/128)] as BF16 bits,
 * each block's scale chosen by search or (search false) the plain one. */
int qx_fp8_block_quantize(const float *x, size_t rows, size_t cols, bool search, uint8_t *codes,
                          uint16_t *scales, struct qx_quant_stats *st, struct qx_error *err);

/* Largest magnitude, and whether all are finite. */
float qx_amax(const float *x, size_t n, bool *finite);
/* Largest magnitude as a pattern: of n BF16 or F16 numbers, of n E4M3 bytes. Patterns order as numbers do,
 * infinities and NaN behind all others. */
uint32_t qx_amax_half(const void *p, size_t n);
uint32_t qx_amax_e4m3(const uint8_t *p, size_t n);

#endif
