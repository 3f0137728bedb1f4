/* fp8.h: E4M3 with one scale, with a scale per 128 x 128 block, and with an E8M0 scale per 32 columns
 * (formats 6.2), in plain C. The reference that the SIMD versions are held to. */
#ifndef QX_FP8_H
#define QX_FP8_H

#include "base.h"

#define QX_FP8_BLOCK_SIDE 128u
#define QX_MXFP8_BLOCK 32u

/* out[i] = e4m3(codes[i]) x scale, rounded once. */
void qx_fp8_decode(const uint8_t *codes, float scale, size_t n, float *out);
/* One row under block scales: scales [ceil(cols / 128)] is the row of scales that governs it. */
void qx_fp8_block_decode(const uint8_t *codes, const float *scales, size_t cols, float *out);
/* scales [ceil(cols / 32)] are E8M0 bytes. */
void qx_mxfp8_decode(const uint8_t *codes, const uint8_t *scales, size_t cols, float *out);

/* codes[i] = x[i] / scale to the nearest E4M3 code, ties to even, saturating; a scale that is not a
 * positive finite number gives zeros. Signs of zeros are kept. Returns the squared error. */
double qx_fp8_encode(const float *x, float scale, size_t n, uint8_t *codes);

#endif
