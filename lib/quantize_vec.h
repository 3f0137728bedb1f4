/* quantize_vec.h: vectors of LANES numbers for quantize_loops.c, and the two number formats on them. Plain C
 * that compilers know how to make vectors of, with the processor's own instruction where they do not. */
#ifndef QX_QUANTIZE_VEC_H
#define QX_QUANTIZE_VEC_H

#include "base.h"

#include <float.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef LANES
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

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

/* E4M3 codes 0 to 0x7e as numbers. */
static inline vf e4m3(vi c)
{
    vf small = __builtin_convertvector(c, vf) * 0x1p-9f;
    return pick(c < 8, small, as_f((c << 20) + 0x3c000000));
}

static inline vf e4m3_values(vi c)
{
    vf v = e4m3(c & 0x7f);
    return as_f(as_i(v) | ((c & 0x80) << 24));
}

/* Bits of v under the mask joined to r. */
static inline vi join(vi r, vi v, vi mask)
{
#if defined(__AVX512F__) && LANES == 16
    return (vi)_mm512_ternarylogic_epi32((__m512i)r, (__m512i)v, (__m512i)mask, 0xf8);
#else
    return r | (v & mask);
#endif
}

/* The larger of a >= 0 and |b|. */
static inline vf max_abs(vf a, vf b)
{
#if defined(__AVX512DQ__) && LANES == 16
    return (vf)_mm512_range_ps((__m512)a, (__m512)b, 0xb);
#else
    return vmax(vabs(b), a);
#endif
}

/* The nearest E2M1 magnitude of a >= 0, ties to the even code, at most 6. A number is added that leaves
 * steps of a half below 2, of 1 below 4 and of 2 above; the last bits of *sum count the steps. */
static inline vf e2m1_round(vf a, vi *sum)
{
    vf y = vmin(a, splat(6.0f)), magic;
#if (defined(__AVX512F__) && LANES == 16) || (defined(__AVX2__) && LANES == 8)
/* Three halves of 2^22 steps, and two more where steps are 1, four where they are 2: then *sum counts
 * codes. By the whole part of y. */
#define E2M1_MAGIC(set)                                                                            \
    set(0x1.8p22f, 0x1.8p22f, 0x1.800004p23f, 0x1.800004p23f, 0x1.800008p24f, 0x1.800008p24f,      \
        0x1.800008p24f, 0x1.800008p24f)
#if LANES == 16
    const __m512 of = _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(E2M1_MAGIC(_mm256_setr_ps))));
    magic = (vf)_mm512_permutexvar_ps(_mm512_cvttps_epi32((__m512)y), of);
#else
    magic = (vf)_mm256_permutevar8x32_ps(E2M1_MAGIC(_mm256_setr_ps), _mm256_cvttps_epi32((__m256)y));
#endif
#else
    /* 1.25 x 2^22 and three more, times the power of two: six steps more than there are. */
    magic = as_f((as_i(vmax(y, splat(1.0f))) & 0x7f800000) + ((22 << 23) | 0x200006));
#endif
    vf r = y + magic;
    *sum = as_i(r);
    return r - magic;
}

/* The code of such a magnitude is in the last four bits. */
static inline vi e2m1_code(vi sum)
{
#if (defined(__AVX512F__) && LANES == 16) || (defined(__AVX2__) && LANES == 8)
    return sum;
#else
    /* The exponent adds as much as the code is ahead of the count. */
    return sum + (sum >> 22);
#endif
}

static inline vf reciprocal(vf s, float global)
{
    vf inv = 1.0f / (s * global);
    return pick(inv <= FLT_MAX, inv, splat(0.0f));
}

#endif
