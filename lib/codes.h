/* codes.h: elementary codes, formats 6.1: E4M3 (finite), E5M2, E8M0, E2M1, BF16, F16, to and from f32.
 * Decoding is exact. Encoding rounds to nearest even and saturates; NaN stays NaN where the code has
 * one. Header-only so that loops can inline them; kernels/ref uses the same functions. */
#ifndef QX_CODES_H
#define QX_CODES_H

#include "base.h"
#include <string.h>

static inline uint32_t qx_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float qx_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline float qx_bf16_to_f32(uint16_t b)
{
    return qx_f32_from_bits((uint32_t)b << 16);
}
/* Nearest even; a NaN keeps its sign and becomes quiet. */
static inline uint16_t qx_f32_to_bf16(float f)
{
    uint32_t u = qx_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 16) | 0x40u);
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline uint16_t qx_load_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}
static inline float qx_load_f32(const void *p)
{
    float v;
    memcpy(&v, p, 4);
    return v;
}

extern const float qx_e4m3_table[256]; /* 0x7f and 0xff are NaN */
extern const float qx_e2m1_table[16];  /* 8 is -0 */
/* 2^(b-127); 0xff is NaN. b = 0 is 2^-127, a denormal of f32 and exact. */
float qx_e8m0_to_f32(uint8_t b);
float qx_e5m2_to_f32(uint8_t b);
float qx_f16_to_f32(uint16_t h);
/* Nearest even, saturating at 448; NaN gives 0x7f with the sign. */
uint8_t qx_f32_to_e4m3(float f);
/* Nearest, ties to even code, saturating at 6; NaN gives 0. */
uint8_t qx_f32_to_e2m1(float f);

#endif
