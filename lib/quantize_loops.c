/* quantize_loops.c: the inner loops of quantize.c. The build compiles this file once for every set
 * of instructions, with LANES floats a vector and SET as the name of the set.
 *
 * For NVFP4 a lane is a block, so that a block's error is summed in the same order on every
 * processor and no sum crosses lanes. Multiplications and additions are never fused (build flag),
 * which would change the bytes. */
#include "quantize_loops.h"

#include "codes.h"
#include "fp8.h"

#include <float.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef LANES
#define LANES 4
#define SET c
#endif
#define PARTS 16

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

/* Lanes of two vectors by index. */
#if defined(__clang__)
static inline vf shuffle_lanes(vf a, vf b, vi at)
{
    vf r;
    for (int j = 0; j < LANES; j++) {
        r[j] = at[j] < LANES ? a[at[j]] : b[at[j] - LANES];
    }
    return r;
}
#define SHUFFLE(a, b, at) shuffle_lanes(a, b, at)
#else
#define SHUFFLE(a, b, at) __builtin_shuffle(a, b, at)
#endif

/* Scales tried besides the plain one: codes below (clipping the largest value) and above it (the
 * largest value at 4 instead of 6 and beyond). */
#define BELOW 2
#define ABOVE 6
/* Rounding of the error sums: 16 terms, each within two ulps. A candidate must beat the plain scale
 * by more than this to be sure to be better. */
#define MARGIN 1e-5f

static inline vf as_f(vi v)
{
    return (vf)v;
}
static inline vi as_i(vf v)
{
    return (vi)v;
}
static inline vf pick(vi mask, vf a, vf b)
{
    return as_f((mask & as_i(a)) | (~mask & as_i(b)));
}
static inline vi picki(vi mask, vi a, vi b)
{
    return (mask & a) | (~mask & b);
}
static inline vf splat(float f)
{
    return f - (vf){0};
}
static inline vf vabs(vf v)
{
    return as_f(as_i(v) & 0x7fffffff);
}

/* Larger and smaller; NaN does not occur (inputs are finite). */
static inline vf vmax(vf a, vf b)
{
#if defined(__AVX512F__) && LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__) && LANES == 4
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return pick(a > b, a, b);
#endif
}
static inline vf vmin(vf a, vf b)
{
#if defined(__AVX512F__) && LANES == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && LANES == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__) && LANES == 4
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return pick(a < b, a, b);
#endif
}
/* The low bytes of the first m lanes. */
static inline void store_bytes(uint8_t *p, vi v, size_t m)
{
#if defined(__AVX512F__) && LANES == 16
    if (m == LANES) {
        _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)v));
        return;
    }
#endif
    for (size_t k = 0; k < m; k++) {
        p[k] = (uint8_t)v[k];
    }
}

/* E4M3 codes 1 to 0x7e as numbers. */
static inline vf e4m3(vi c)
{
    vf small = __builtin_convertvector(c, vf) * 0x1p-9f;
    return pick(c < 8, small, as_f((c << 20) + 0x3c000000));
}

/* The nearest E2M1 magnitude of a >= 0, ties to the even code, at most 6. */
static inline vf e2m1_round(vf a)
{
    /* 1.5 x 2^22 x the power of two below max(a, 1): adding it leaves steps of a half below 2, of 1
     * below 4 and of 2 above. */
    vf magic = as_f((as_i(vmax(a, splat(1.0f))) & 0x7f800000) + ((22 << 23) | 0x400000));
    return vmin((a + magic) - magic, splat(6.0f));
}

static inline vi e2m1_code(vf r)
{
    vi low = __builtin_convertvector(r + r, vi);
    return picki(r < 1.0f, low, (as_i(r) >> 22) - 252);
}

static inline vf reciprocal(vf s, float global)
{
    vf inv = 1.0f / (s * global);
    return pick(inv <= FLT_MAX, inv, splat(0.0f));
}

/* Squared error of LANES blocks under scales c, exactly as decoded; the largest error beside it. */
static inline vf blocks_error(const vf *x, vi c, float global, vf *max)
{
    vf s = e4m3(c), inv = reciprocal(s, global), sum = {0}, top = {0};
    for (int k = 0; k < 16; k++) {
        vf d = x[k] - (e2m1_round(x[k] * inv) * s) * global;
        sum += d * d;
        top = vmax(vabs(d), top);
    }
    *max = top;
    return sum;
}

/* The same up to rounding, in units of the block's step: enough to choose by. The differences are
 * those of any way of rounding to nearest, since at a tie both neighbours are equally far. */
static inline vf blocks_estimate(const vf *x, vi c, float global)
{
    vf s = e4m3(c), unit = s * global, inv = reciprocal(s, global), sum = {0};
#if defined(__AVX512F__) && LANES == 16
    /* Four times the value, cut to an integer, finds the nearest code in a table: all midpoints are
     * multiples of a quarter. */
    const __m512 low = _mm512_setr_ps(0, 2, 2, 4, 4, 6, 6, 8, 8, 8, 12, 12, 12, 12, 16, 16);
    const __m512 high =
        _mm512_setr_ps(16, 16, 16, 16, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24);
    const __m512i last = _mm512_set1_epi32(31);
    __m512 inv4 = (__m512)(inv * 4.0f);
    for (int k = 0; k < 16; k++) {
        __m512 y = _mm512_mul_ps((__m512)x[k], inv4);
        __m512i at = _mm512_min_epi32(_mm512_cvttps_epi32(y), last);
        vf d = (vf)y - (vf)_mm512_permutex2var_ps(low, at, high);
        sum += d * d;
    }
    sum *= 0.0625f;
#else
    for (int k = 0; k < 16; k++) {
        vf y = x[k] * inv, d = y - e2m1_round(y);
        sum += d * d;
    }
#endif
    return sum * (unit * unit);
}

/* Index vectors of turn(): from two rows of a square, what each gets of the other's corner. */
#define UP(j, s) ((j) & (s) ? LANES + ((j) ^ (s)) : (j))
#define DOWN(j, s) ((j) & (s) ? LANES + (j) : (j) | (s))
#define ROW4(f, j, s) f(j, s), f(j + 1, s), f(j + 2, s), f(j + 3, s)
#if LANES == 16
#define ROW(f, s) ROW4(f, 0, s), ROW4(f, 4, s), ROW4(f, 8, s), ROW4(f, 12, s)
#elif LANES == 8
#define ROW(f, s) ROW4(f, 0, s), ROW4(f, 4, s)
#else
#define ROW(f, s) ROW4(f, 0, s)
#endif
#define SWAP_CORNERS(r, s)                                                                         \
    for (int i = 0; i < LANES; i++) {                                                              \
        if ((i & (s)) == 0) {                                                                      \
            vf a = (r)[i], b = (r)[i | (s)];                                                       \
            (r)[i] = SHUFFLE(a, b, ((vi){ROW(UP, s)}));                                            \
            (r)[i | (s)] = SHUFFLE(a, b, ((vi){ROW(DOWN, s)}));                                    \
        }                                                                                          \
    }

/* x [LANES][16] -> m [16][lane]: squares of LANES x LANES are turned by swapping ever larger
 * corners. */
static inline void turn(const float *x, vf *m)
{
    for (int h = 0; h < 16 / LANES; h++) {
        vf *r = m + h * LANES;
        for (int b = 0; b < LANES; b++) {
            memcpy(&r[b], x + b * 16 + h * LANES, sizeof *r);
        }
        SWAP_CORNERS(r, 1)
        SWAP_CORNERS(r, 2)
#if LANES > 4
        SWAP_CORNERS(r, 4)
#endif
#if LANES > 8
        SWAP_CORNERS(r, 8)
#endif
    }
}

struct block_stats {
    vf sum_sq, err, plain_err, max, plain_max;
};

/* The plain scale: amax / (6 global) to E4M3, at least 1. */
static inline vi plain_scale(vf amax, float global)
{
    vf want = amax / (6.0f * global);
    vi u = as_i(want);
    vi small = as_i(want + 24576.0f) & 0xf;
    vi large = ((u + 0x7ffff + ((u >> 20) & 1)) >> 20) - (120 << 3);
    vi plain = picki(want < 0x1p-6f, small, large);
    plain = picki(want >= 448.0f, plain * 0 + 0x7e, plain);
    plain = picki(plain > 0x7e, plain * 0 + 0x7e, plain);
    return picki(plain < 1, plain * 0 + 1, plain);
}

/* LANES blocks at x [LANES][16]. */
static inline void nvfp4_lanes(const float *x, float global, bool search, uint8_t *codes,
                               uint8_t *scales, struct block_stats *st)
{
    vf m[16], amax = {0}, sum_sq = {0};
    vi sign[16];
    turn(x, m);
    for (int k = 0; k < 16; k++) {
        sign[k] = (as_i(m[k]) >> 28) & 8;
        m[k] = vabs(m[k]);
        amax = vmax(m[k], amax);
        sum_sq += m[k] * m[k];
    }
    vi plain = plain_scale(amax, global), best = plain;
    vf plain_err = blocks_error(m, plain, global, &st->plain_max), best_err = plain_err;
    st->max = st->plain_max;
    if (search) {
        vf least = blocks_estimate(m, plain, global), max;
        for (int d = -BELOW; d <= ABOVE; d++) {
            if (d == 0) {
                continue;
            }
            vi c = plain + d;
            c = picki(c < 1, plain, picki(c > 0x7e, plain, c));
            vf e = blocks_estimate(m, c, global);
            vi better = e < least;
            best = picki(better, c, best);
            least = pick(better, e, least);
        }
        best_err = blocks_error(m, best, global, &max);
        vi keep = best_err < plain_err * (1.0f - MARGIN);
        best = picki(keep, best, plain);
        best_err = pick(keep, best_err, plain_err);
        st->max = pick(keep, max, st->plain_max);
    }
    vi zero = amax == 0.0f;
    st->err = best_err;
    st->plain_err = plain_err;
    st->sum_sq = sum_sq;
    best = picki(zero, best * 0, best);
    vf inv = reciprocal(e4m3(best), global);
    inv = pick(zero, splat(0.0f), inv);
    /* Eight bytes a block: codes 2k and 2k + 1 are byte k, four bytes a word. */
    vi word[2] = {{0}, {0}};
    for (int k = 0; k < 16; k++) {
        vi c = e2m1_code(e2m1_round(m[k] * inv));
        c = picki(c == 0, c, c | sign[k]);
        word[k / 8] |= c << (4 * (k % 8));
    }
    int32_t turn_back[2][LANES];
    memcpy(turn_back, word, sizeof turn_back);
    for (int b = 0; b < LANES; b++) {
        memcpy(codes + 8 * b, &turn_back[0][b], 4);
        memcpy(codes + 8 * b + 4, &turn_back[1][b], 4);
    }
    store_bytes(scales, best, LANES);
}

static void nvfp4_all(const float *x, size_t n_rows, size_t cols, float global, bool search,
                      uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st)
{
    size_t n = n_rows * (cols / 16);
    struct qx_row_sums rows = {.blocks_per_row = cols / 16};
    vf max = {0}, plain_max = {0};
    for (size_t b = 0; b < n; b += LANES) {
        size_t m = n - b < LANES ? n - b : LANES;
        struct block_stats bs;
        if (m == LANES) {
            nvfp4_lanes(x + b * 16, global, search, codes + b * 8, scales + b, &bs);
        } else {
            float pad[LANES * 16] = {0};
            uint8_t pad_codes[LANES * 8], pad_scales[LANES];
            memcpy(pad, x + b * 16, m * 16 * sizeof *x);
            nvfp4_lanes(pad, global, search, pad_codes, pad_scales, &bs);
            memcpy(codes + b * 8, pad_codes, m * 8);
            memcpy(scales + b, pad_scales, m);
        }
        max = vmax(bs.max, max);
        plain_max = vmax(bs.plain_max, plain_max);
        float sums[3][LANES];
        memcpy(sums[0], &bs.sum_sq, sizeof sums[0]);
        memcpy(sums[1], &bs.err, sizeof sums[1]);
        memcpy(sums[2], &bs.plain_err, sizeof sums[2]);
        for (size_t i = 0; i < m; i++) {
            rows.sum_sq += (double)sums[0][i];
            rows.err += (double)sums[1][i];
            rows.plain += (double)sums[2][i];
            if (++rows.at == rows.blocks_per_row) {
                qx_count_row(&rows, st);
            }
        }
    }
    for (int k = 0; k < LANES; k++) {
        st->max_err = (double)max[k] > st->max_err ? (double)max[k] : st->max_err;
        st->plain_max_err =
            (double)plain_max[k] > st->plain_max_err ? (double)plain_max[k] : st->plain_max_err;
    }
    st->n_values += n * 16;
}

/* Largest magnitude among half-precision patterns, and among bytes, as integers: both order as
 * numbers do, with infinities and NaN the largest. */
static uint32_t amax16_all(const uint8_t *p, size_t n)
{
    uint16_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, p + 2 * i, 2);
        v &= 0x7fff;
        top = v > top ? v : top;
    }
    return top;
}

static uint32_t amax8_all(const uint8_t *p, size_t n)
{
    uint8_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint8_t v = p[i] & 0x7f;
        top = v > top ? v : top;
    }
    return top;
}

/* E4M3 codes of LANES values x inv, to nearest even, saturating. */
static inline vi e4m3_codes(vf y)
{
    vi u = as_i(y), sign = (u >> 24) & 0x80, a = u & 0x7fffffff;
    vf f = as_f(a);
    vi small = as_i(f + 24576.0f) & 0xf;
    vi large = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120 << 3);
    vi c = picki(f < 0x1p-6f, small, large);
    c = picki(f >= 448.0f, c * 0 + 0x7e, c);
    c = picki(c > 0x7e, c * 0 + 0x7e, c);
    return c | sign;
}

static inline vf e4m3_values(vi c)
{
    vf v = e4m3(c & 0x7f);
    return as_f(as_i(v) | ((c & 0x80) << 24));
}

/* One row: codes (may be NULL), and error sums. PARTS partial sums whatever LANES is, so that every
 * processor adds in the same order. */
static inline void fp8_row(const float *x, size_t n, float scale, float inv, uint8_t *codes,
                           double *err, double *max, double *sum_sq)
{
    vf e[PARTS / LANES] = {0}, top = {0}, sq[PARTS / LANES] = {0};
    for (size_t i = 0; i < n; i += PARTS) {
        for (size_t p = 0; p < PARTS / LANES; p++) {
            size_t at = i + p * LANES;
            if (at >= n) {
                break;
            }
            vf v = {0};
            size_t m = n - at < LANES ? n - at : LANES;
            if (m == LANES) {
                memcpy(&v, x + at, sizeof v);
            } else {
                memcpy(&v, x + at, m * sizeof *x);
            }
            vi c = e4m3_codes(v * inv);
            vf d = e4m3_values(c) * scale - v;
            e[p] += d * d;
            top = vmax(vabs(d), top);
            sq[p] += v * v;
            if (codes != NULL) {
                store_bytes(codes + at, c, m);
            }
        }
    }
    *err = *sum_sq = 0.0;
    for (int k = 0; k < PARTS; k++) {
        *err += (double)e[k / LANES][k % LANES];
        *sum_sq += (double)sq[k / LANES][k % LANES];
    }
    for (int k = 0; k < LANES; k++) {
        *max = (double)top[k] > *max ? (double)top[k] : *max;
    }
}

static float inverse(float scale)
{
    float inv = scale > 0.0f ? 1.0f / scale : 0.0f;
    return inv <= FLT_MAX ? inv : 0.0f;
}

static void fp8_all(const float *x, size_t n_rows, size_t cols, float scale, float plain,
                    uint8_t *codes, struct qx_quant_stats *st)
{
    struct qx_row_sums rows = {0};
    for (size_t r = 0; r < n_rows; r++) {
        double sq;
        fp8_row(x + r * cols, cols, scale, inverse(scale), codes + r * cols, &rows.err,
                &st->max_err, &rows.sum_sq);
        if (plain == scale) {
            rows.plain = rows.err;
            st->plain_max_err = st->max_err > st->plain_max_err ? st->max_err : st->plain_max_err;
        } else {
            fp8_row(x + r * cols, cols, plain, inverse(plain), NULL, &rows.plain,
                    &st->plain_max_err, &sq);
        }
        qx_count_row(&rows, st);
    }
    st->n_values += n_rows * cols;
}

/* Squared error of a 128 x 128 block, rows of `stride`. */
static double fp8_block_error(const float *x, size_t stride, size_t rows, size_t cols, float scale,
                              double *max)
{
    double sum = 0.0, e, sq;
    for (size_t r = 0; r < rows; r++) {
        fp8_row(x + r * stride, cols, scale, inverse(scale), NULL, &e, max, &sq);
        sum += e;
    }
    return sum;
}

static void amax_all(const float *x, size_t n, float *amax, bool *finite)
{
    vi top = {0};
    int32_t a = 0;
    for (size_t i = 0; i < n; i += LANES) {
        vi v = {0};
        memcpy(&v, x + i, (n - i < LANES ? n - i : LANES) * sizeof *x);
        v &= 0x7fffffff; /* magnitudes order as integers; infinities and NaN are the largest */
        top = picki(v > top, v, top);
    }
    for (int k = 0; k < LANES; k++) {
        a = top[k] > a ? top[k] : a;
    }
    *finite = a < 0x7f800000;
    *amax = qx_f32_from_bits((uint32_t)a);
}

const struct qx_quant_loops QX_QUANT_LOOPS(SET) = {nvfp4_all, fp8_all,    fp8_block_error,
                                                   amax_all,  amax16_all, amax8_all};
