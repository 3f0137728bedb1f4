/* quantize_loops.c: the inner loops of quantize.c. The build compiles this file once for every set
 * of instructions, with LANES floats a vector and SET as the name of the set.
 *
 * For NVFP4 a lane is a block, so that a block's error is summed in the same order on every
 * processor and no sum crosses lanes. Multiplications and additions are never fused (build flag),
 * which would change the bytes. */
#include "quantize_loops.h"

#include "codes.h"
#include "fp8.h"
#include "quantize_vec.h"

#include <float.h>
#include <string.h>

#ifndef SET
#define SET c
#endif
#define PARTS 16
#define ALWAYS_INLINE __attribute__((always_inline))

/* Scales tried besides the plain one: codes below (clipping the largest value) and above it (the
 * largest value at 4 instead of 6 and beyond). */
#define BELOW 2
#define ABOVE 6
/* Rounding of the error sums: 16 terms, each within two ulps. A candidate must beat the plain scale
 * by more than this to be sure to be better. */
#define MARGIN 1e-5f

/* Squared error of LANES blocks under scales s, exactly as decoded; the largest error beside it, and
 * (word not NULL) the codes' magnitudes, code k in bits 4 (k % 8) of word k / 8. */
static inline vf blocks_error(const vf *x, vf s, vf inv, float global, vi *word, vf *max)
{
    vf sum = {0}, top = {0};
    vi w[2] = {{0}, {0}}, bits;
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) {
        vf d = x[k] - (e2m1_round(x[k] * inv, &bits) * s) * global;
        sum += d * d;
        top = max_abs(top, d);
        if (word != NULL) {
            vi c = e2m1_code(bits) << (4 * (k % 8));
            w[k / 8] = join(w[k / 8], c, (vi){0} + (int32_t)(15u << (4 * (k % 8))));
        }
    }
    if (word != NULL) {
        word[0] = w[0];
        word[1] = w[1];
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

/* Magnitudes in units of the plain scale for the search; inv: 1 / (plain scale x global). */
static inline void search_units(const vf *m, vf inv, vh *y)
{
    vf unit = inv * 8192.0f;
    for (int k = 0; k < 8; k++) {
        vi a = __builtin_convertvector(vmin(m[2 * k] * unit, splat(65535.0f)), vi);
        vi b = __builtin_convertvector(vmin(m[2 * k + 1] * unit, splat(65535.0f)), vi);
        y[k] = (vh)(a | (b << 16));
    }
}

/* The best scale of LANES blocks whose plain scale is normal; of others some scale. */
static inline vi search_scale(const vh *y, vi plain)
{
    vf least = {0};
    vi mantissa = plain & 7, best = plain;
#pragma GCC unroll 16
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
#if defined(__AVX512F__) && LANES == 16
        __mmask16 better = _mm512_mask_cmp_ps_mask(
            _mm512_cmple_epi32_mask((__m512i)c, _mm512_set1_epi32(0x7e)), (__m512)e, (__m512)least,
            _CMP_LT_OQ);
        best = (vi)_mm512_mask_mov_epi32((__m512i)best, better, (__m512i)c);
        least = (vf)_mm512_mask_mov_ps((__m512)least, better, (__m512)e);
#else
        vi better = (e < least) & (c <= 0x7e);
        best = picki(better, c, best);
        least = pick(better, e, least);
#endif
    }
    return best;
}

/* For the few blocks with smaller plain scales: the same in floats, in units of the block's step. */
static inline vf blocks_estimate(const vf *x, vi c, float global)
{
    vf s = e4m3(c), unit = s * global, inv = reciprocal(s, global), sum = {0};
    for (int k = 0; k < 16; k++) {
        vi bits;
        vf y = x[k] * inv, d = y - e2m1_round(y, &bits);
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

/* LANES blocks on their side: magnitudes, and the signs where their codes' signs will be. */
struct blocks {
    vf m[16], amax;
    vi sign[2];
};

static inline void load_f32(const float *x, struct blocks *b)
{
    turn(x, b->m);
    b->amax = b->m[0] - b->m[0]; /* zeros of the vector type. NOLINT(misc-redundant-expression) */
    b->sign[0] = b->sign[1] = (vi){0};
    for (int k = 0; k < 16; k++) {
        int at = 4 * (k % 8);
        vi u = (vi)((vu)as_i(b->m[k]) >> (28 - at));
        b->sign[k / 8] = join(b->sign[k / 8], u, (vi){0} + (int32_t)(8u << at));
        b->m[k] = vabs(b->m[k]);
        b->amax = vmax(b->m[k], b->amax);
    }
}

/* From E4M3 bytes without NaN, under one scale from 0 to 2^119: the same as load_f32 of their values. */
static inline void load_e4m3(const uint8_t *x, float scale, struct blocks *b)
{
#if defined(__AVX512BW__) && LANES == 16
    /* Register z gets blocks z, z + 4, z + 8, z + 12, so that turning squares of four words within
     * quarters leaves word j of block i in lane i of d[j]. */
    __m512i r[4], d[4], top = _mm512_setzero_si512();
    for (int z = 0; z < 4; z++) {
        const __m128i *p = (const __m128i *)(const void *)(x + 16 * z);
        r[z] = _mm512_inserti32x4(_mm512_castsi128_si512(_mm_loadu_si128(p)), _mm_loadu_si128(p + 4), 1);
        r[z] = _mm512_inserti32x4(r[z], _mm_loadu_si128(p + 8), 2);
        r[z] = _mm512_inserti32x4(r[z], _mm_loadu_si128(p + 12), 3);
    }
    __m512i t0 = _mm512_unpacklo_epi32(r[0], r[1]), t1 = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i t2 = _mm512_unpacklo_epi32(r[2], r[3]), t3 = _mm512_unpackhi_epi32(r[2], r[3]);
    d[0] = _mm512_unpacklo_epi64(t0, t2);
    d[1] = _mm512_unpackhi_epi64(t0, t2);
    d[2] = _mm512_unpacklo_epi64(t1, t3);
    d[3] = _mm512_unpackhi_epi64(t1, t3);
    /* Bytes of one element together, sixteen in a quarter of a register. */
    const __m512i quads = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i magnitude = _mm512_set1_epi8(0x7f);
    const __m512 s = _mm512_set1_ps(scale * 256.0f); /* shifted into F16 a byte is 1/256 of its value */
    vi sign[4];
    for (int j = 0; j < 4; j++) {
        /* Bits 7, 15, 23, 31 to 3, 7, 11, 15. */
        vi u = (vi)_mm512_andnot_si512(magnitude, d[j]) >> 4 & 0x08080808;
        u = (u | u >> 4) & 0x00880088;
        sign[j] = (u | u >> 8) & 0x8888;
        __m512i m = _mm512_and_si512(d[j], magnitude);
        top = _mm512_max_epu8(top, m);
        m = _mm512_permutexvar_epi32(quarters, _mm512_shuffle_epi8(m, quads));
        __m512i lo = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(m)), 7);
        __m512i hi = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(m, 1)), 7);
        vf *out = b->m + 4 * j;
        out[0] = (vf)_mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(lo)), s);
        out[1] = (vf)_mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(lo, 1)), s);
        out[2] = (vf)_mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(hi)), s);
        out[3] = (vf)_mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(hi, 1)), s);
    }
    b->sign[0] = sign[0] | sign[1] << 16;
    b->sign[1] = sign[2] | sign[3] << 16;
    top = _mm512_max_epu8(top, _mm512_srli_epi32(top, 16));
    top = _mm512_max_epu8(top, _mm512_srli_epi32(top, 8));
    b->amax = e4m3((vi)top & 0xff) * scale;
#else
    float v[LANES * 16];
    for (int i = 0; i < LANES * 16; i += LANES) {
        vb bytes;
        memcpy(&bytes, x + i, LANES);
        vf y = e4m3_values(__builtin_convertvector(bytes, vi)) * scale;
        memcpy(v + i, &y, sizeof y);
    }
    load_f32(v, b);
#endif
}

struct block_stats {
    vf sum_sq, err, plain_err, max, plain_max;
};

/* The sums of a block beside each other, those of block b at BESIDE(b). */
#if defined(__AVX512F__) && LANES == 16
#define BESIDE(b) ((b) % 4 * 4 + (b) / 4)
#else
#define BESIDE(b) (b)
#endif
static inline void lay_beside(const struct block_stats *st, float (*out)[4])
{
#if defined(__AVX512F__) && LANES == 16
    __m512 a = (__m512)st->sum_sq, b = (__m512)st->err, c = (__m512)st->plain_err;
    __m512 ac[2] = {_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c)};
    __m512 b0[2] = {_mm512_unpacklo_ps(b, b), _mm512_unpackhi_ps(b, b)};
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_ps(out[4 * i], i % 2 == 0 ? _mm512_unpacklo_ps(ac[i / 2], b0[i / 2])
                                                : _mm512_unpackhi_ps(ac[i / 2], b0[i / 2]));
    }
#else
    for (int i = 0; i < LANES; i++) {
        out[i][0] = st->sum_sq[i];
        out[i][1] = out[i][3] = st->err[i];
        out[i][2] = st->plain_err[i];
    }
#endif
}
typedef float v4f __attribute__((vector_size(16)));
typedef double v4d __attribute__((vector_size(32)));

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

/* LANES blocks on their way. What depends on what came before is done for GROUPS of them in turn, so
 * that the processor has others to go on with while one waits. */
#define GROUPS 8
struct group {
    struct blocks in;
    struct block_stats st;
    vh y[8];
    vi plain, best;
    vf inv;
};

static inline void plain_choice(struct group *g, float global, bool search)
{
    const vf *m = g->in.m;
    g->st.sum_sq = m[0] - m[0]; /* as above. NOLINT(misc-redundant-expression) */
    for (int k = 0; k < 16; k++) {
        g->st.sum_sq += m[k] * m[k];
    }
    g->plain = g->best = plain_scale(g->in.amax, global);
    vf scale = e4m3(g->plain);
    g->inv = reciprocal(scale, global);
    if (search) {
        g->st.plain_err = blocks_error(m, scale, g->inv, global, NULL, &g->st.plain_max);
        search_units(m, g->inv, g->y);
    }
}

static inline void search_choice(struct group *g, float global)
{
    vi zero = g->in.amax == 0.0f, small = (g->plain < 16) & ~zero;
    vi best = search_scale(g->y, g->plain);
    if (any(small)) {
        best = picki(small, search_small(g->in.m, g->plain, global), best);
    }
    g->best = picki(zero, g->plain, best);
}

static inline void final_choice(struct group *g, float global, bool search, uint8_t *codes,
                                uint8_t *scales)
{
    const vf *m = g->in.m;
    struct block_stats *st = &g->st;
    vi word[2], best = g->best;
    vf s = e4m3(best);
    st->err = blocks_error(m, s, reciprocal(s, global), global, word, &st->max);
    if (!search) {
        st->plain_err = st->err;
        st->plain_max = st->max;
    } else {
        vi worse = (best != g->plain) & ~(st->err < st->plain_err * (1.0f - MARGIN));
        if (any(worse)) {
            vi other[2];
            best = picki(worse, g->plain, best);
            (void)blocks_error(m, e4m3(g->plain), g->inv, global, other, &s);
            word[0] = picki(worse, other[0], word[0]);
            word[1] = picki(worse, other[1], word[1]);
            st->err = pick(worse, st->plain_err, st->err);
            st->max = pick(worse, st->plain_max, st->max);
        }
    }
    best &= g->in.amax > 0.0f;
    /* Code 0 has no sign: 7 more reach bit 3 of any other. Bytes lie as in the words. */
    int32_t turn_back[2][LANES];
    for (int h = 0; h < 2; h++) {
        word[h] = join(word[h], g->in.sign[h], word[h] + 0x77777777);
    }
    memcpy(turn_back, word, sizeof turn_back);
    for (int i = 0; i < LANES; i++) {
        memcpy(codes + 8 * i, &turn_back[0][i], 4);
        memcpy(codes + 8 * i + 4, &turn_back[1][i], 4);
    }
    store_bytes(scales, best, LANES);
}

struct nvfp4_sums {
    struct qx_row_sums rows;
    v4d row;
    vf max, plain_max;
};

/* The sums of the first n blocks of a group. */
static inline void add_sums(struct nvfp4_sums *a, const struct block_stats *bs, size_t n,
                            struct qx_quant_stats *st)
{
    float sums[LANES][4];
    lay_beside(bs, sums);
    a->max = vmax(bs->max, a->max);
    a->plain_max = vmax(bs->plain_max, a->plain_max);
    for (size_t i = 0; i < n; i++) {
        v4f one;
        memcpy(&one, sums[BESIDE(i)], sizeof one);
        a->row += __builtin_convertvector(one, v4d);
        if (++a->rows.at == a->rows.blocks_per_row) {
            a->rows.sum_sq = a->row[0];
            a->rows.err = a->row[1];
            a->rows.plain = a->row[2];
            qx_count_row(&a->rows, st);
            a->row = (v4d){0};
        }
    }
}

/* n groups of blocks of floats (x) or of E4M3 bytes under one scale (bytes). */
ALWAYS_INLINE static inline void nvfp4_groups(struct group *g, size_t n, const float *x,
                                              const uint8_t *bytes, float bytes_scale, float global,
                                              bool search, uint8_t *codes, uint8_t *scales)
{
    for (size_t i = 0; i < n; i++) {
        if (x != NULL) {
            load_f32(x + i * LANES * 16, &g[i].in);
        } else {
            load_e4m3(bytes + i * LANES * 16, bytes_scale, &g[i].in);
        }
    }
    for (size_t i = 0; i < n; i++) {
        plain_choice(&g[i], global, search);
    }
    for (size_t i = 0; search && i < n; i++) {
        search_choice(&g[i], global);
    }
    for (size_t i = 0; i < n; i++) {
        final_choice(&g[i], global, search, codes + i * LANES * 8, scales + i * LANES);
    }
}

ALWAYS_INLINE static inline void nvfp4_all(const float *x, const uint8_t *bytes, float bytes_scale,
                                           size_t n_rows, size_t cols, float global, bool search,
                                           uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st)
{
    size_t n = n_rows * (cols / 16), b = 0;
    struct nvfp4_sums sums = {.rows = {.blocks_per_row = cols / 16}};
    struct group g[GROUPS];
    for (; b + LANES <= n;) {
        size_t k = (n - b) / LANES < GROUPS ? (n - b) / LANES : GROUPS;
        nvfp4_groups(g, k, x != NULL ? x + b * 16 : NULL, x != NULL ? NULL : bytes + b * 16,
                     bytes_scale, global, search, codes + b * 8, scales + b);
        for (size_t i = 0; i < k; i++) {
            add_sums(&sums, &g[i].st, LANES, st);
        }
        b += k * LANES;
    }
    if (b < n) {
        size_t m = n - b;
        float pad[LANES * 16] = {0};
        uint8_t pad_bytes[LANES * 16] = {0}, pad_codes[LANES * 8], pad_scales[LANES];
        if (x != NULL) {
            memcpy(pad, x + b * 16, m * 16 * sizeof *x);
        } else {
            memcpy(pad_bytes, bytes + b * 16, m * 16);
        }
        nvfp4_groups(g, 1, x != NULL ? pad : NULL, pad_bytes, bytes_scale, global, search,
                     pad_codes, pad_scales);
        memcpy(codes + b * 8, pad_codes, m * 8);
        memcpy(scales + b, pad_scales, m);
        add_sums(&sums, &g[0].st, m, st);
    }
    for (int k = 0; k < LANES; k++) {
        st->max_err = (double)sums.max[k] > st->max_err ? (double)sums.max[k] : st->max_err;
        st->plain_max_err = (double)sums.plain_max[k] > st->plain_max_err ? (double)sums.plain_max[k]
                                                                         : st->plain_max_err;
    }
    st->n_values += n * 16;
}

static void nvfp4_f32(const float *x, size_t n_rows, size_t cols, float global, bool search,
                      uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st)
{
    nvfp4_all(x, NULL, 0.0f, n_rows, cols, global, search, codes, scales, st);
}

static void nvfp4_e4m3(const uint8_t *x, float scale, size_t n_rows, size_t cols, float global,
                       bool search, uint8_t *codes, uint8_t *scales, struct qx_quant_stats *st)
{
    nvfp4_all(NULL, x, scale, n_rows, cols, global, search, codes, scales, st);
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

const struct qx_quant_loops QX_QUANT_LOOPS(SET) = {
    nvfp4_f32, nvfp4_e4m3, fp8_all, fp8_block_error, amax_all, amax16_all, amax8_all,
};
