/* nvfp4.h: the NVFP4 format in plain C: E2M1 codes, an E4M3 scale per 16 columns, one F32 scale for the
 * whole matrix (formats 6.2). Even columns lie in the low nibble. This is the reference that the SIMD
 * versions of decode.c and quantize.c are held to. */
#ifndef QX_NVFP4_H
#define QX_NVFP4_H

#include "base.h"

#define QX_NVFP4_BLOCK 16u

/* codes [cols / 2], scales [cols / 16], out [cols]; cols a multiple of 16. out = e2m1 x e4m3 (exact) x
 * global, rounded once. */
void qx_nvfp4_decode(const uint8_t *codes, const uint8_t *scales, float global, size_t cols, float *out);

/* One block: x [16] to codes [8] under a given scale byte (0x00 to 0x7e). Each code is the nearest of
 * x / (e4m3 x global) with ties to the even code; a zero or absent divisor gives zero codes. Signs of
 * zeros are dropped, NaN becomes 0. Returns the squared error of the decoded block, summed in order. */
double qx_nvfp4_encode_block(const float *x, float global, uint8_t scale, uint8_t *codes);

/* The scale byte of plain round-to-nearest: amax / (6 x global) rounded to E4M3, at least the smallest
 * positive scale when amax is not zero, and 0 when it is. */
uint8_t qx_nvfp4_amax_scale(const float *x, float global);

#endif
