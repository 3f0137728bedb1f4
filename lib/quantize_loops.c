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

/* The code of such a magnitude. */
static inline vi e2m1_code(vf r)
{
#if defined(__AVX512F__) && LANES == 16
    const __m512i of = _mm512_setr_epi32(0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7, 0, 0, 0);
    return (vi)_mm512_permutexvar_epi32(_mm512_cvttps_epi32((__m512)(r + r)), of);
#else
    vi low = __builtin_convertvector(r + r, vi);
    return picki(r < 1.0f, low, (as_i(r) >> 22) - 252);
#endif
}

static inline vf reciprocal(vf s, float global)
{
    vf inv = 1.0f / (s * global);
    return pick(inv <= FLT_MAX, inv, splat(0.0f));
}

/* Squared error of LANES blocks under scales s, exactly as decoded; the codes' magnitudes and the
 * largest error beside it. */
static inline vf blocks_error(const vf *x, vf s, vf inv, float global, vf *code, vf *max)
{
    vf sum = {0}, top = {0};
    for (int k = 0; k < 16; k++) {
        code[k] = e2m1_round(x[k] * inv);
        vf d = x[k] - (code[k] * s) * global;
        sum += d * d;
        top = vmax(vabs(d), top);
    }
    *max = top;
    return sum;
}

/* ---- the search --------------------------------------------------------------------------- */

/* Candidates are compared in whole numbers, twice as many a vector as floats and the same on every
 * processor. A block's magnitudes are kept as y = |x| / (plain scale x global) in units of 2^-13; a
 * candidate's are y x (plain scale / its scale) in units of 2^-12, and their distance to the
 * nearest code is squared and summed. Between normal scales the ratio depends only on the plain
 * scale's mantissa and on the distance in codes, and nothing reaches 8 (a scale two codes below
 * clips at 6 what reaches 7.9). How they are rounded here decides only between candidates that are
 * as good as equal: what is written is checked exactly. */
typedef uint16_t vh __attribute__((vector_size(4 * LANES)));
typedef int16_t vsh __attribute__((vector_size(4 * LANES)));

/* Mantissa and octave of the code t above the octave's first, t >= -8. */
#define MANTISSA(t) (8 + ((t) + 8) % 8)
#define OCTAVE(t) (((t) + 8) / 8)
/* 2^15 x plain / candidate for mantissa m and distance d, and the square of candidate / plain. */
#define DENOMINATOR(m, d) (MANTISSA((m) + (d)) << OCTAVE((m) + (d)))
#define RATIO(m, d)                                                                                \
    ((((8u + (m)) * 131072u + DENOMINATOR(m, d)) / (2u * DENOMINATOR(m, d))) * 0x10001u)
#define WEIGHT(m, d)                                                                               \
    ((float)(DENOMINATOR(m, d) * DENOMINATOR(m, d)) / (float)(4 * (8 + (m)) * (8 + (m))))
#define OF_MANTISSAS(f, d) {f(0, d), f(1, d), f(2, d), f(3, d), f(4, d), f(5, d), f(6, d), f(7, d)}
#define OF_ALL(f)                                                                                  \
    {OF_MANTISSAS(f, -2), OF_MANTISSAS(f, -1), OF_MANTISSAS(f, 0), OF_MANTISSAS(f, 1),             \
     OF_MANTISSAS(f, 2),  OF_MANTISSAS(f, 3),  OF_MANTISSAS(f, 4), OF_MANTISSAS(f, 5),             \
     OF_MANTISSAS(f, 6)}
/* A word holds the ratio twice, for the two values of a pair. */
static const uint32_t ratios[BELOW + 1 + ABOVE][8] = OF_ALL(RATIO);
static const float weights[BELOW + 1 + ABOVE][8] = OF_ALL(WEIGHT);

/* The word of each lane's mantissa. */
static inline vi by_mantissa(const void *of8, vi mantissa)
{
#if defined(__AVX512F__) && LANES == 16
    __m256i half = _mm256_loadu_si256((const __m256i *)of8);
    return (vi)_mm512_permutexvar_epi32((__m512i)mantissa, _mm512_broadcast_i64x4(half));
#elif defined(__AVX2__) && LANES == 8
    return (vi)_mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)of8),
                                           (__m256i)mantissa);
#else
    int32_t word[8];
    vi r;
    memcpy(word, of8, sizeof word);
    for (int j = 0; j < LANES; j++) {
        r[j] = word[mantissa[j]];
    }
    return r;
#endif
}

static inline vh mul_high(vh a, vh b)
{
#if defined(__AVX512BW__) && LANES == 16
    return (vh)_mm512_mulhi_epu16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && LANES == 8
    return (vh)_mm256_mulhi_epu16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && LANES == 4
    return (vh)_mm_mulhi_epu16((__m128i)a, (__m128i)b);
#else
    vh r;
    for (int j = 0; j < 2 * LANES; j++) {
        r[j] = (uint16_t)((uint32_t)a[j] * b[j] >> 16);
    }
    return r;
#endif
}

/* The sum of both squares of each pair. */
static inline vi squares(vsh d)
{
#if defined(__AVX512BW__) && LANES == 16
    return (vi)_mm512_madd_epi16((__m512i)d, (__m512i)d);
#elif defined(__AVX2__) && LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)d, (__m256i)d);
#elif defined(__SSE2__) && LANES == 4
    return (vi)_mm_madd_epi16((__m128i)d, (__m128i)d);
#else
    vi r;
    for (int j = 0; j < LANES; j++) {
        r[j] = d[2 * j] * d[2 * j] + d[2 * j + 1] * d[2 * j + 1];
    }
    return r;
#endif
}

/* The code nearest to y < 8, both in units of 2^-12; at a tie the upper one. Seen are the quarters:
 * all midpoints are multiples of one. */
static inline vh nearest(vh y)
{
#if defined(__AVX512BW__) && LANES == 16
#define C4(c) (c) * 2048, (c) * 2048, (c) * 2048, (c) * 2048
    const __m512i code = (__m512i)(vsh){0 * 2048, 1 * 2048, 1 * 2048, 2 * 2048, 2 * 2048, 3 * 2048,
                                        3 * 2048, 4 * 2048, 4 * 2048, 4 * 2048, C4(6), 8 * 2048,
                                        8 * 2048, C4(8), C4(12), C4(12), C4(12)};
#undef C4
    return (vh)_mm512_permutexvar_epi16((__m512i)(y >> 10), code);
#elif defined(__AVX2__) && LANES == 8
    /* Twice the code; from 3.5 on 8, and 4 more from 5 on. */
    const __m256i twice = _mm256_setr_epi8(0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 6, 6, 6, 6, 8, 8, 0, 1, 1, 2,
                                           2, 3, 3, 4, 4, 4, 6, 6, 6, 6, 8, 8);
    __m256i at = _mm256_srli_epi16((__m256i)y, 10);
    __m256i top = _mm256_and_si256(_mm256_cmpgt_epi16(at, _mm256_set1_epi16(19)),
                                   _mm256_set1_epi16(4));
    __m256i r = _mm256_shuffle_epi8(twice, _mm256_min_epi16(at, _mm256_set1_epi16(15)));
    return (vh)_mm256_slli_epi16(_mm256_add_epi16(r, top), 11);
#else
    /* Steps of a half below 1.75, of one below 3.5, of two above. */
    vh a = (y + 1024) & 0xf800, b = (y + 2048) & 0xf000, c = (y + 4096) & 0xe000;
    vh one = (vh)(y >= 7168), two = (vh)(y >= 14336), most = (vh)(y >= 20480);
    c = (c & ~most) | (most & 24576);
    return (a & ~one) | (b & one & ~two) | (c & two);
#endif
}

/* The best scale of LANES blocks whose plain scale is normal; of others some scale. m: magnitudes,
 * inv: 1 / (plain scale x global). */
static inline vi search_scale(const vf *m, vi plain, vf inv)
{
    vh y[8];
    vf unit = inv * 8192.0f, least = {0};
    vi mantissa = plain & 7, best = plain;
    for (int k = 0; k < 8; k++) {
        vi a = __builtin_convertvector(vmin(m[2 * k] * unit, splat(65535.0f)), vi);
        vi b = __builtin_convertvector(vmin(m[2 * k + 1] * unit, splat(65535.0f)), vi);
        y[k] = (vh)(a | (b << 16));
    }
    for (int i = 0; i <= BELOW + ABOVE; i++) {
        /* The plain scale is looked at first. */
        int d = i == 0 ? 0 : i <= BELOW ? i - 1 - BELOW : i - BELOW;
        vh ratio = (vh)by_mantissa(ratios[d + BELOW], mantissa);
        vi sum = {0}, c = plain + d;
        for (int k = 0; k < 8; k++) {
            vh v = mul_high(y[k], ratio);
            sum += squares((vsh)(v - nearest(v)));
        }
        vf e = __builtin_convertvector(sum, vf) *
               (vf)by_mantissa(weights[d + BELOW], mantissa);
        if (d == 0) {
            least = e;
            continue;
        }
        vi better = (e < least) & (c <= 0x7e);
        best = picki(better, c, best);
        least = pick(better, e, least);
    }
    return best;
}

/* For the few blocks with smaller plain scales: the same in floats, in units of the block's step. */
static inline vf blocks_estimate(const vf *x, vi c, float global)
{
    vf s = e4m3(c), unit = s * global, inv = reciprocal(s, global), sum = {0};
    for (int k = 0; k < 16; k++) {
        vf y = x[k] * inv, d = y - e2m1_round(y);
        sum += d * d;
    }
    return sum * (unit * unit);
}

static inline vi search_small(const vf *m, vi plain, float global)
{
    vf least = blocks_estimate(m, plain, global);
    vi best = plain;
    for (int d = -BELOW; d <= ABOVE; d++) {
        vi c = plain + d;
        c = picki(c < 1, plain, c);
        vf e = blocks_estimate(m, c, global);
        vi better = e < least;
        best = picki(better, c, best);
        least = pick(better, e, least);
    }
    return best;
}

static inline bool any(vi mask)
{
#if defined(__AVX512F__) && LANES == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__) && LANES == 8
    return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
#else
    int32_t r = 0;
    for (int j = 0; j < LANES; j++) {
        r |= mask[j];
    }
    return r != 0;
#endif
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
    vi plain = plain_scale(amax, global), best = plain, zero = amax == 0.0f;
    vf scale = e4m3(plain), inv = reciprocal(scale, global), code[16];
    vf plain_err = blocks_error(m, scale, inv, global, code, &st->plain_max), best_err = plain_err;
    st->max = st->plain_max;
    if (search) {
        vi small = (plain < 16) & ~zero;
        vf max, other[16];
        best = search_scale(m, plain, inv);
        if (any(small)) {
            best = picki(small, search_small(m, plain, global), best);
        }
        best = picki(zero, plain, best);
        scale = e4m3(best);
        best_err = blocks_error(m, scale, reciprocal(scale, global), global, other, &max);
        vi keep = best_err < plain_err * (1.0f - MARGIN);
        best = picki(keep, best, plain);
        best_err = pick(keep, best_err, plain_err);
        st->max = pick(keep, max, st->plain_max);
        for (int k = 0; k < 16; k++) {
            code[k] = pick(keep, other[k], code[k]);
        }
    }
    st->err = best_err;
    st->plain_err = plain_err;
    st->sum_sq = sum_sq;
    best = picki(zero, best * 0, best);
    /* Eight bytes a block: codes 2k and 2k + 1 are byte k, four bytes a word. */
    vi word[2] = {{0}, {0}};
    for (int k = 0; k < 16; k++) {
        vi c = e2m1_code(code[k]);
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
