/* nvfp4.c: see nvfp4.h. */
#include "nvfp4.h"

#include "codes.h"

#include <math.h>

void qx_nvfp4_decode(const uint8_t *codes, const uint8_t *scales, float global, size_t cols,
                     float *out)
{
    for (size_t b = 0; b < cols / QX_NVFP4_BLOCK; b++) {
        float s = qx_e4m3_table[scales[b]];
        for (size_t k = 0; k < QX_NVFP4_BLOCK / 2; k++) {
            uint8_t c = codes[b * 8 + k];
            out[b * 16 + 2 * k] = (qx_e2m1_table[c & 15] * s) * global;
            out[b * 16 + 2 * k + 1] = (qx_e2m1_table[c >> 4] * s) * global;
        }
    }
}

double qx_nvfp4_encode_block(const float *x, float global, uint8_t scale, uint8_t *codes)
{
    float s = qx_e4m3_table[scale & 0x7f];
    float unit = s * global;
    float inv = unit > 0.0f ? 1.0f / unit : 0.0f;
    double sum = 0.0;
    if (!isfinite(inv)) {
        inv = 0.0f;
    }
    for (size_t k = 0; k < QX_NVFP4_BLOCK; k++) {
        float v = isnan(x[k]) ? 0.0f : x[k];
        uint8_t c = qx_f32_to_e2m1(v * inv);
        c = (c & 7) == 0 ? 0 : c;
        codes[k / 2] = (uint8_t)(k % 2 == 0 ? c : codes[k / 2] | (uint8_t)(c << 4));
        double d = (double)((qx_e2m1_table[c] * s) * global) - (double)v;
        sum += d * d;
    }
    return sum;
}

uint8_t qx_nvfp4_amax_scale(const float *x, float global)
{
    float amax = 0.0f;
    for (size_t k = 0; k < QX_NVFP4_BLOCK; k++) {
        float a = fabsf(x[k]);
        amax = a > amax ? a : amax;
    }
    if (!(amax > 0.0f) || !(global > 0.0f)) {
        return 0;
    }
    uint8_t s = qx_f32_to_e4m3(amax / (6.0f * global));
    return s == 0 ? 1 : s;
}
