/* fp8.c: see fp8.h. */
#include "fp8.h"

#include "codes.h"

#include <math.h>

void qx_fp8_decode(const uint8_t *codes, float scale, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = qx_e4m3_table[codes[i]] * scale;
    }
}

void qx_fp8_block_decode(const uint8_t *codes, const float *scales, size_t cols, float *out)
{
    for (size_t c = 0; c < cols; c += QX_FP8_BLOCK_SIDE) {
        size_t n = cols - c < QX_FP8_BLOCK_SIDE ? cols - c : QX_FP8_BLOCK_SIDE;
        qx_fp8_decode(codes + c, scales[c / QX_FP8_BLOCK_SIDE], n, out + c);
    }
}

void qx_mxfp8_decode(const uint8_t *codes, const uint8_t *scales, size_t cols, float *out)
{
    for (size_t c = 0; c < cols; c += QX_MXFP8_BLOCK) {
        size_t n = cols - c < QX_MXFP8_BLOCK ? cols - c : QX_MXFP8_BLOCK;
        qx_fp8_decode(codes + c, qx_e8m0_to_f32(scales[c / QX_MXFP8_BLOCK]), n, out + c);
    }
}

double qx_fp8_encode(const float *x, float scale, size_t n, uint8_t *codes)
{
    float inv = scale > 0.0f ? 1.0f / scale : 0.0f;
    double sum = 0.0;
    if (!isfinite(inv)) {
        inv = 0.0f;
    }
    for (size_t i = 0; i < n; i++) {
        codes[i] = qx_f32_to_e4m3(x[i] * inv);
        double d = (double)(qx_e4m3_table[codes[i]] * scale) - (double)x[i];
        sum += d * d;
    }
    return sum;
}
