/* quantize.c: see quantize.h. The choice of loops, and everything that is not a loop over values.
 */
#include "quantize.h"

#include "alloc.h"
#include "codes.h"
#include "fp8.h"
#include "quantize_loops.h"

#include <float.h>
#include <math.h>
#include <string.h>

static const struct qx_quant_loops *loops_at(enum qx_simd level)
{
    static const struct qx_quant_loops *const set[] = {
        &qx_quant_loops_c,
#if defined(__x86_64__)
        &qx_quant_loops_avx2,
        &qx_quant_loops_avx512,
#endif
    };
    return set[level < QX_ARRAY_LEN(set) ? level : 0];
}
static const struct qx_quant_loops *loops(void)
{
    return loops_at(qx_simd_level());
}

static float inverse(float scale)
{
    float inv = scale > 0.0f ? 1.0f / scale : 0.0f;
    return inv <= FLT_MAX ? inv : 0.0f;
}

void qx_quant_stats_add(struct qx_quant_stats *a, const struct qx_quant_stats *b)
{
    a->sum_sq += b->sum_sq;
    a->err_sq += b->err_sq;
    a->plain_err_sq += b->plain_err_sq;
    a->max_err = b->max_err > a->max_err ? b->max_err : a->max_err;
    a->plain_max_err = b->plain_max_err > a->plain_max_err ? b->plain_max_err : a->plain_max_err;
    a->n_values += b->n_values;
    a->n_rows += b->n_rows;
    a->rows_above += b->rows_above;
    a->plain_rows_above += b->plain_rows_above;
}

double qx_quant_rel_rms(double err_sq, double sum_sq)
{
    return sum_sq > 0.0 ? sqrt(err_sq / sum_sq) : 0.0;
}

float qx_nvfp4_global(float amax)
{
    float g = amax / 2688.0f;
    /* Zeros only: any positive scale. Values so small that the quotient vanishes: the least normal.
     */
    return amax > 0.0f ? (g < FLT_MIN ? FLT_MIN : g) : 1.0f / 2688.0f;
}

void qx_nvfp4_quantize(const float *x, size_t n_rows, size_t cols, float global, bool search,
                       uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st)
{
    loops()->nvfp4(x, n_rows, cols, global, search, codes, scales, st);
}

void qx_nvfp4_quantize_level(enum qx_simd level, const float *x, size_t n_rows, size_t cols,
                             float global, bool search, uint8_t *codes, uint8_t *scales,
                             struct qx_quant_stats *st)
{
    loops_at(level)->nvfp4(x, n_rows, cols, global, search, codes, scales, st);
}

bool qx_nvfp4_quantize_e4m3_level(enum qx_simd level, const uint8_t *x, float scale, size_t n_rows,
                                  size_t cols, float global, bool search, uint8_t *codes,
                                  uint8_t *scales, struct qx_quant_stats *st)
{
    if (!(scale >= 0.0f && scale <= 0x1p119f)) {
        return false;
    }
    loops_at(level)->nvfp4_e4m3(x, scale, n_rows, cols, global, search, codes, scales, st);
    return true;
}

bool qx_nvfp4_quantize_e4m3(const uint8_t *x, float scale, size_t n_rows, size_t cols, float global,
                            bool search, uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st)
{
    return qx_nvfp4_quantize_e4m3_level(qx_simd_level(), x, scale, n_rows, cols, global, search,
                                        codes, scales, st);
}

float qx_fp8_plain_scale(float amax)
{
    if (!(amax > 0.0f)) {
        return 1.0f / 512.0f;
    }
    float s = qx_bf16_to_f32(qx_f32_to_bf16(amax / 448.0f));
    return s < FLT_MIN ? FLT_MIN : s;
}

static double histogram_error(const struct qx_histogram *h, float scale)
{
    double sum = 0.0;
    float inv = inverse(scale);
    for (size_t i = 0; i < h->n; i++) {
        float dec = qx_e4m3_table[qx_f32_to_e4m3(h->value[i] * inv)] * scale;
        double d = (double)dec - (double)h->value[i];
        sum += d * d * (double)h->count[i];
    }
    return sum;
}

float qx_fp8_search(const struct qx_histogram *h, float amax)
{
    float plain = qx_fp8_plain_scale(amax), best = plain;
    double best_err = histogram_error(h, plain) * (1.0 - 1e-9);
    uint16_t bits = qx_f32_to_bf16(plain);
    /* An octave down, where large values clip but small ones are finer, and a little up. */
    for (int d = -128; d <= 24; d++) {
        int b = bits + d;
        if (d == 0 || b < 0x0080 || b >= 0x7f80) {
            continue;
        }
        float s = qx_bf16_to_f32((uint16_t)b);
        double e = histogram_error(h, s);
        if (e < best_err) {
            best_err = e;
            best = s;
        }
    }
    return best;
}

void qx_fp8_quantize(const float *x, size_t n_rows, size_t cols, float scale, float plain_scale,
                     uint8_t *codes, struct qx_quant_stats *st)
{
    loops()->fp8(x, n_rows, cols, scale, plain_scale, codes, st);
}

int qx_fp8_block_quantize(const float *x, size_t rows, size_t cols, bool search, uint8_t *codes,
                          uint16_t *scales, struct qx_quant_stats *st, struct qx_error *err)
{
    const struct qx_quant_loops *l = loops();
    size_t block_cols = (size_t)qx_ceil_div(cols, QX_FP8_BLOCK_SIDE);
    double *row = qx_calloc(3 * QX_FP8_BLOCK_SIDE, sizeof *row);
    if (row == NULL) {
        return qx_fail_nomem(err);
    }
    for (size_t r0 = 0; r0 < rows; r0 += QX_FP8_BLOCK_SIDE) {
        size_t nr = rows - r0 < QX_FP8_BLOCK_SIDE ? rows - r0 : QX_FP8_BLOCK_SIDE;
        memset(row, 0, 3 * QX_FP8_BLOCK_SIDE * sizeof *row);
        for (size_t c0 = 0; c0 < cols; c0 += QX_FP8_BLOCK_SIDE) {
            size_t nc = cols - c0 < QX_FP8_BLOCK_SIDE ? cols - c0 : QX_FP8_BLOCK_SIDE;
            const float *p = x + r0 * cols + c0;
            float amax = 0.0f, a;
            bool finite;
            for (size_t r = 0; r < nr; r++) {
                l->amax(p + r * cols, nc, &a, &finite);
                amax = a > amax ? a : amax;
            }
            float plain = qx_fp8_plain_scale(amax), best = plain;
            double max, e = l->block(p, cols, nr, nc, plain, &st->plain_max_err);
            double best_err = e * (1.0 - 1e-5);
            uint16_t bits = qx_f32_to_bf16(plain);
            /* The mantissa decides where values fall between codes: a coarse look over an octave.
             */
            for (int d = -112; search && amax > 0.0f && d <= 16; d += 8) {
                int b = bits + d;
                if (d == 0 || b < 0x0080 || b >= 0x7f80) {
                    continue;
                }
                max = 0.0;
                e = l->block(p, cols, nr, nc, qx_bf16_to_f32((uint16_t)b), &max);
                if (e < best_err) {
                    best_err = e;
                    best = qx_bf16_to_f32((uint16_t)b);
                }
            }
            scales[r0 / QX_FP8_BLOCK_SIDE * block_cols + c0 / QX_FP8_BLOCK_SIDE] =
                qx_f32_to_bf16(best);
            for (size_t r = 0; r < nr; r++) {
                struct qx_quant_stats one = {0};
                l->fp8(p + r * cols, 1, nc, best, plain, codes + (r0 + r) * cols + c0, &one);
                row[3 * r] += one.sum_sq;
                row[3 * r + 1] += one.err_sq;
                row[3 * r + 2] += one.plain_err_sq;
                st->max_err = one.max_err > st->max_err ? one.max_err : st->max_err;
            }
        }
        for (size_t r = 0; r < nr; r++) {
            struct qx_row_sums sums = {
                .sum_sq = row[3 * r], .err = row[3 * r + 1], .plain = row[3 * r + 2]};
            qx_count_row(&sums, st);
        }
    }
    st->n_values += rows * cols;
    qx_free(row);
    return 0;
}

float qx_amax(const float *x, size_t n, bool *finite)
{
    float a;
    loops()->amax(x, n, &a, finite);
    return a;
}

uint32_t qx_amax_half(const void *p, size_t n)
{
    return loops()->amax16(p, n);
}

uint32_t qx_amax_e4m3(const uint8_t *p, size_t n)
{
    return loops()->amax8(p, n);
}
