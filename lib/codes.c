/* codes.c: the elementary codes of formats 6.1: decode tables and the rounding encoders. The tables
 * are exact: every value of these codes is a binary fraction that the shortest decimal below names.
 */
#include "codes.h"

#include <math.h>

const float qx_e4m3_table[256] = {
    0.0f,         0.001953125f,  0.00390625f,  0.005859375f,  0.0078125f,   0.009765625f,
    0.01171875f,  0.013671875f,  0.015625f,    0.017578125f,  0.01953125f,  0.021484375f,
    0.0234375f,   0.025390625f,  0.02734375f,  0.029296875f,  0.03125f,     0.03515625f,
    0.0390625f,   0.04296875f,   0.046875f,    0.05078125f,   0.0546875f,   0.05859375f,
    0.0625f,      0.0703125f,    0.078125f,    0.0859375f,    0.09375f,     0.1015625f,
    0.109375f,    0.1171875f,    0.125f,       0.140625f,     0.15625f,     0.171875f,
    0.1875f,      0.203125f,     0.21875f,     0.234375f,     0.25f,        0.28125f,
    0.3125f,      0.34375f,      0.375f,       0.40625f,      0.4375f,      0.46875f,
    0.5f,         0.5625f,       0.625f,       0.6875f,       0.75f,        0.8125f,
    0.875f,       0.9375f,       1.0f,         1.125f,        1.25f,        1.375f,
    1.5f,         1.625f,        1.75f,        1.875f,        2.0f,         2.25f,
    2.5f,         2.75f,         3.0f,         3.25f,         3.5f,         3.75f,
    4.0f,         4.5f,          5.0f,         5.5f,          6.0f,         6.5f,
    7.0f,         7.5f,          8.0f,         9.0f,          10.0f,        11.0f,
    12.0f,        13.0f,         14.0f,        15.0f,         16.0f,        18.0f,
    20.0f,        22.0f,         24.0f,        26.0f,         28.0f,        30.0f,
    32.0f,        36.0f,         40.0f,        44.0f,         48.0f,        52.0f,
    56.0f,        60.0f,         64.0f,        72.0f,         80.0f,        88.0f,
    96.0f,        104.0f,        112.0f,       120.0f,        128.0f,       144.0f,
    160.0f,       176.0f,        192.0f,       208.0f,        224.0f,       240.0f,
    256.0f,       288.0f,        320.0f,       352.0f,        384.0f,       416.0f,
    448.0f,       NAN,           -0.0f,        -0.001953125f, -0.00390625f, -0.005859375f,
    -0.0078125f,  -0.009765625f, -0.01171875f, -0.013671875f, -0.015625f,   -0.017578125f,
    -0.01953125f, -0.021484375f, -0.0234375f,  -0.025390625f, -0.02734375f, -0.029296875f,
    -0.03125f,    -0.03515625f,  -0.0390625f,  -0.04296875f,  -0.046875f,   -0.05078125f,
    -0.0546875f,  -0.05859375f,  -0.0625f,     -0.0703125f,   -0.078125f,   -0.0859375f,
    -0.09375f,    -0.1015625f,   -0.109375f,   -0.1171875f,   -0.125f,      -0.140625f,
    -0.15625f,    -0.171875f,    -0.1875f,     -0.203125f,    -0.21875f,    -0.234375f,
    -0.25f,       -0.28125f,     -0.3125f,     -0.34375f,     -0.375f,      -0.40625f,
    -0.4375f,     -0.46875f,     -0.5f,        -0.5625f,      -0.625f,      -0.6875f,
    -0.75f,       -0.8125f,      -0.875f,      -0.9375f,      -1.0f,        -1.125f,
    -1.25f,       -1.375f,       -1.5f,        -1.625f,       -1.75f,       -1.875f,
    -2.0f,        -2.25f,        -2.5f,        -2.75f,        -3.0f,        -3.25f,
    -3.5f,        -3.75f,        -4.0f,        -4.5f,         -5.0f,        -5.5f,
    -6.0f,        -6.5f,         -7.0f,        -7.5f,         -8.0f,        -9.0f,
    -10.0f,       -11.0f,        -12.0f,       -13.0f,        -14.0f,       -15.0f,
    -16.0f,       -18.0f,        -20.0f,       -22.0f,        -24.0f,       -26.0f,
    -28.0f,       -30.0f,        -32.0f,       -36.0f,        -40.0f,       -44.0f,
    -48.0f,       -52.0f,        -56.0f,       -60.0f,        -64.0f,       -72.0f,
    -80.0f,       -88.0f,        -96.0f,       -104.0f,       -112.0f,      -120.0f,
    -128.0f,      -144.0f,       -160.0f,      -176.0f,       -192.0f,      -208.0f,
    -224.0f,      -240.0f,       -256.0f,      -288.0f,       -320.0f,      -352.0f,
    -384.0f,      -416.0f,       -448.0f,      -NAN,
};

const float qx_e2m1_table[16] = {
    0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
};

float qx_e8m0_to_f32(uint8_t b)
{
    if (b == 0xff) {
        return qx_f32_from_bits(0x7fc00000u);
    }
    /* 2^-127 lies below the smallest normal: half of it is its bit pattern as a denormal. */
    return qx_f32_from_bits(b == 0 ? 0x00400000u : (uint32_t)b << 23);
}

float qx_e5m2_to_f32(uint8_t b)
{
    /* E5M2 is the upper byte of an F16. */
    return qx_f16_to_f32((uint16_t)((uint16_t)b << 8));
}

float qx_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exp = (h >> 10) & 31u, man = h & 0x3ffu;
    if (exp == 31) {
        return qx_f32_from_bits(sign | 0x7f800000u | (man << 13));
    }
    if (exp == 0) {
        float v = (float)man * 0x1p-24f;
        return qx_f32_from_bits(qx_f32_bits(v) | sign);
    }
    return qx_f32_from_bits(sign | ((exp + 112) << 23) | (man << 13));
}

uint8_t qx_f32_to_e4m3(float f)
{
    uint32_t u = qx_f32_bits(f), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return (uint8_t)(sign | 0x7fu);
    }
    if (a >= 0x43e00000u) { /* 448 and up */
        return (uint8_t)(sign | 0x7eu);
    }
    if (a < 0x3c800000u) { /* below 2^-6: multiples of 2^-9 */
        /* Adding 1.5 x 2^14 leaves a unit of 2^-9 in the last place, so the addition itself rounds
         * to nearest even. */
        float r = qx_f32_from_bits(a) + 24576.0f;
        return (uint8_t)(sign | (qx_f32_bits(r) & 0xfu));
    }
    a += 0x7ffffu + ((a >> 20) & 1u);
    a = (a >> 20) - (120u << 3);
    return (uint8_t)(sign | (a > 0x7eu ? 0x7eu : a));
}

uint8_t qx_f32_to_e2m1(float f)
{
    uint32_t u = qx_f32_bits(f), sign = (u >> 28) & 8u;
    float a = qx_f32_from_bits(u & 0x7fffffffu);
    if (!(a >= 0.0f)) {
        return 0;
    }
    /* Midpoints 0.25 0.75 1.25 1.75 2.5 3.5 5: a tie goes to the even code, so the comparison is
     * strict where the lower code is even. */
    uint32_t c = (uint32_t)(a > 0.25f) + (uint32_t)(a >= 0.75f) + (uint32_t)(a > 1.25f) +
                 (uint32_t)(a >= 1.75f) + (uint32_t)(a > 2.5f) + (uint32_t)(a >= 3.5f) +
                 (uint32_t)(a > 5.0f);
    return (uint8_t)(sign | c);
}
