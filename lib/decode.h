/* decode.h: decoding loops of the stored formats, chosen once at run time by what the processor can do.
 * All versions give the same bits for every code and every scale. */
#ifndef QX_DECODE_H
#define QX_DECODE_H

#include "base.h"

enum qx_simd { QX_SIMD_C, QX_SIMD_AVX2, QX_SIMD_AVX512, QX_SIMD_COUNT };

/* Contracts as in nvfp4.h and fp8.h. Sources need no alignment; out is aligned as its type. */
struct qx_decode_ops {
    const char *name; /* "c", "avx2", "avx512" */
    void (*nvfp4)(const uint8_t *codes, const uint8_t *scales, float global, size_t cols, float *out);
    void (*fp8)(const uint8_t *codes, float scale, size_t n, float *out);
    void (*mxfp8)(const uint8_t *codes, const uint8_t *scales, size_t cols, float *out);
    void (*fp8_block)(const uint8_t *codes, const float *scales, size_t cols, float *out);
    void (*bf16)(const void *src, size_t n, float *out);      /* little-endian BF16, widened */
    void (*to_bf16)(const float *src, size_t n, uint16_t *out); /* qx_f32_to_bf16 of each */
};

/* The fastest set that this processor runs. */
const struct qx_decode_ops *qx_decode_ops(void);
enum qx_simd qx_simd_level(void);
/* A given set, NULL when this processor or build has none: for tests and benches. */
const struct qx_decode_ops *qx_decode_ops_level(enum qx_simd level);

#endif
