/* decode.c: see decode.h.
 *
 * SIMD decoding goes through F16. An E4M3 byte shifted into F16 position is 1/256 of its value, and
 * an E2M1 value is an F16 whose low byte is zero, so that both are one shift or one byte shuffle
 * away from the processor's own exact F16 conversion, denormals included. The factor 256 is put
 * into the scale, which is exact unless it overflows; such scales take the plain loop. */
#include "decode.h"

#include "codes.h"
#include "fp8.h"
#include "nvfp4.h"

static void bf16_c(const void *src, size_t n, float *out)
{
    const uint8_t *p = src;
    for (size_t i = 0; i < n; i++) {
        out[i] = qx_bf16_to_f32(qx_load_u16(p + 2 * i));
    }
}

static void to_bf16_c(const float *src, size_t n, uint16_t *out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = qx_f32_to_bf16(src[i]);
    }
}

static const struct qx_decode_ops ops_c = {
    "c", qx_nvfp4_decode, qx_fp8_decode, qx_mxfp8_decode, qx_fp8_block_decode, bf16_c, to_bf16_c,
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

/* Above this a scale x 256 may be infinite. NaN compares false and also takes the plain loop. */
#define SCALE_LIMIT 0x1p119f
static bool scale_is_plain(float s)
{
    return !(s <= SCALE_LIMIT && s >= -SCALE_LIMIT);
}

#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")))

/* High bytes of the F16 patterns of the sixteen E2M1 codes. */
#define E2M1_F16_HIGH                                                                              \
    0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xb8, (char)0xbc,            \
        (char)0xbe, (char)0xc0, (char)0xc2, (char)0xc4, (char)0xc6

AVX2 static void nvfp4_avx2(const uint8_t *codes, const uint8_t *scales, float global, size_t cols,
                            float *out)
{
    const __m128i lut = _mm_setr_epi8(E2M1_F16_HIGH), low = _mm_set1_epi8(15),
                  zero = _mm_setzero_si128();
    const __m256 g = _mm256_set1_ps(global);
    for (size_t b = 0; b < cols / 16; b++) {
        __m128i c = _mm_loadl_epi64((const __m128i *)(const void *)(codes + 8 * b));
        __m128i lo = _mm_and_si128(c, low), hi = _mm_and_si128(_mm_srli_epi16(c, 4), low);
        __m128i v = _mm_shuffle_epi8(lut, _mm_unpacklo_epi8(lo, hi));
        __m256 s = _mm256_set1_ps(qx_e4m3_table[scales[b]]);
        __m256 a0 = _mm256_cvtph_ps(_mm_unpacklo_epi8(zero, v));
        __m256 a1 = _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, v));
        _mm256_storeu_ps(out + 16 * b, _mm256_mul_ps(_mm256_mul_ps(a0, s), g));
        _mm256_storeu_ps(out + 16 * b + 8, _mm256_mul_ps(_mm256_mul_ps(a1, s), g));
    }
}

/* E4M3 bytes, zero-extended to 16 bits, as F16 patterns of 1/256 of their values; NaN codes as the
 * quiet NaN of their sign. */
AVX2 static inline __m128i e4m3_f16_avx2(__m128i w)
{
    __m128i m = _mm_and_si128(w, _mm_set1_epi16(0x7f));
    __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), w), 8);
    __m128i nan = _mm_cmpeq_epi16(m, _mm_set1_epi16(0x7f));
    __m128i v = _mm_blendv_epi8(_mm_slli_epi16(m, 7), _mm_set1_epi16(0x7e00), nan);
    return _mm_or_si128(v, sign);
}

AVX2 static void fp8_avx2(const uint8_t *codes, float scale, size_t n, float *out)
{
    size_t i = 0;
    if (scale_is_plain(scale)) {
        qx_fp8_decode(codes, scale, n, out);
        return;
    }
    const __m256 s = _mm256_set1_ps(scale * 256.0f);
    for (; i + 8 <= n; i += 8) {
        __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)(codes + i)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(e4m3_f16_avx2(w)), s));
    }
    qx_fp8_decode(codes + i, scale, n - i, out + i);
}

AVX2 static void bf16_avx2(const void *src, size_t n, float *out)
{
    const uint8_t *p = src;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i w =
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p + 2 * i)));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)));
    }
    bf16_c(p + 2 * i, n - i, out + i);
}

AVX2 static void to_bf16_avx2(const float *src, size_t n, uint16_t *out)
{
    size_t i = 0;
    const __m256i one = _mm256_set1_epi32(1), bias = _mm256_set1_epi32(0x7fff);
    for (; i + 8 <= n; i += 8) {
        __m256 f = _mm256_loadu_ps(src + i);
        __m256i u = _mm256_castps_si256(f), h = _mm256_srli_epi32(u, 16);
        __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, bias), _mm256_and_si256(h, one));
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
        r = _mm256_blendv_epi8(_mm256_srli_epi32(r, 16),
                               _mm256_or_si256(h, _mm256_set1_epi32(0x40)), nan);
        __m256i p = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
        _mm_storeu_si128((__m128i *)(void *)(out + i), _mm256_castsi256_si128(p));
    }
    to_bf16_c(src + i, n - i, out + i);
}

AVX512 static void nvfp4_avx512(const uint8_t *codes, const uint8_t *scales, float global,
                                size_t cols, float *out)
{
    const __m128i lut = _mm_setr_epi8(E2M1_F16_HIGH), low = _mm_set1_epi8(15);
    const __m512 g = _mm512_set1_ps(global);
    for (size_t b = 0; b < cols / 16; b++) {
        __m128i c = _mm_loadl_epi64((const __m128i *)(const void *)(codes + 8 * b));
        __m128i lo = _mm_and_si128(c, low), hi = _mm_and_si128(_mm_srli_epi16(c, 4), low);
        __m128i v = _mm_shuffle_epi8(lut, _mm_unpacklo_epi8(lo, hi));
        __m512 a = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(v), 8));
        __m512 s = _mm512_set1_ps(qx_e4m3_table[scales[b]]);
        _mm512_storeu_ps(out + 16 * b, _mm512_mul_ps(_mm512_mul_ps(a, s), g));
    }
}

AVX512 static void fp8_avx512(const uint8_t *codes, float scale, size_t n, float *out)
{
    size_t i = 0;
    if (scale_is_plain(scale)) {
        qx_fp8_decode(codes, scale, n, out);
        return;
    }
    const __m512 s = _mm512_set1_ps(scale * 256.0f);
    const __m256i mag = _mm256_set1_epi16(0x7f), quiet = _mm256_set1_epi16(0x7e00);
    for (; i + 16 <= n; i += 16) {
        __m256i w =
            _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(codes + i)));
        __m256i m = _mm256_and_si256(w, mag);
        __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(mag, w), 8);
        __mmask16 nan = _mm256_cmpeq_epi16_mask(m, mag);
        __m256i v = _mm256_mask_mov_epi16(_mm256_slli_epi16(m, 7), nan, quiet);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(v, sign)), s));
    }
    qx_fp8_decode(codes + i, scale, n - i, out + i);
}

AVX512 static void bf16_avx512(const void *src, size_t n, float *out)
{
    const uint8_t *p = src;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i w =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(p + 2 * i)));
        _mm512_storeu_ps(out + i, _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)));
    }
    bf16_c(p + 2 * i, n - i, out + i);
}

AVX512 static void to_bf16_avx512(const float *src, size_t n, uint16_t *out)
{
    size_t i = 0;
    const __m512i one = _mm512_set1_epi32(1), bias = _mm512_set1_epi32(0x7fff);
    for (; i + 16 <= n; i += 16) {
        __m512 f = _mm512_loadu_ps(src + i);
        __m512i u = _mm512_castps_si512(f), h = _mm512_srli_epi32(u, 16);
        __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, bias), _mm512_and_si512(h, one));
        __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
        r = _mm512_mask_or_epi32(_mm512_srli_epi32(r, 16), nan, h, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtepi32_epi16(r));
    }
    to_bf16_c(src + i, n - i, out + i);
}

#define BLOCKED(suffix, ATTR)                                                                      \
    ATTR static void mxfp8_##suffix(const uint8_t *codes, const uint8_t *scales, size_t cols,      \
                                    float *out)                                                    \
    {                                                                                              \
        for (size_t c = 0; c < cols; c += QX_MXFP8_BLOCK) {                                        \
            size_t n = cols - c < QX_MXFP8_BLOCK ? cols - c : QX_MXFP8_BLOCK;                      \
            fp8_##suffix(codes + c, qx_e8m0_to_f32(scales[c / QX_MXFP8_BLOCK]), n, out + c);       \
        }                                                                                          \
    }                                                                                              \
    ATTR static void block_##suffix(const uint8_t *codes, const float *scales, size_t cols,        \
                                    float *out)                                                    \
    {                                                                                              \
        for (size_t c = 0; c < cols; c += QX_FP8_BLOCK_SIDE) {                                     \
            size_t n = cols - c < QX_FP8_BLOCK_SIDE ? cols - c : QX_FP8_BLOCK_SIDE;                \
            fp8_##suffix(codes + c, scales[c / QX_FP8_BLOCK_SIDE], n, out + c);                    \
        }                                                                                          \
    }
BLOCKED(avx2, AVX2)
BLOCKED(avx512, AVX512)

static const struct qx_decode_ops ops_avx2 = {
    "avx2", nvfp4_avx2, fp8_avx2, mxfp8_avx2, block_avx2, bf16_avx2, to_bf16_avx2,
};
static const struct qx_decode_ops ops_avx512 = {
    "avx512", nvfp4_avx512, fp8_avx512, mxfp8_avx512, block_avx512, bf16_avx512, to_bf16_avx512,
};

/* Not every compiler's __builtin_cpu_supports knows this name. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

enum qx_simd qx_simd_level(void)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        return QX_SIMD_AVX512;
    }
    return __builtin_cpu_supports("avx2") && has_f16c() ? QX_SIMD_AVX2 : QX_SIMD_C;
}

const struct qx_decode_ops *qx_decode_ops_level(enum qx_simd level)
{
    if (level > qx_simd_level()) {
        return NULL;
    }
    return level == QX_SIMD_AVX512 ? &ops_avx512 : level == QX_SIMD_AVX2 ? &ops_avx2 : &ops_c;
}
#else
enum qx_simd qx_simd_level(void)
{
    return QX_SIMD_C;
}

const struct qx_decode_ops *qx_decode_ops_level(enum qx_simd level)
{
    return level == QX_SIMD_C ? &ops_c : NULL;
}
#endif

const struct qx_decode_ops *qx_decode_ops(void)
{
    return qx_decode_ops_level(qx_simd_level());
}
