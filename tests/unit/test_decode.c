/* The decoding loops: check values of formats 6.3, all codes, and every SIMD set against plain C. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codes.h"
#include "decode.h"
#include "fp8.h"
#include "nvfp4.h"

static void check_values(void **state)
{
    (void)state;
    static const struct { uint8_t byte, odd, scale; uint32_t f32; uint16_t bf16; } nv[] = {
        {0x2b, 0, 0x38, 0xb8512492, 0xb851}, {0x2b, 1, 0x38, 0x380b6db7, 0x380b},
        {0x71, 0, 0x7e, 0x3bf40000, 0x3bf4}, {0x71, 1, 0x7e, 0x3db70000, 0x3db7},
        {0x98, 1, 0x52, 0xb92e4925, 0xb92e}, {0xf7, 1, 0x01, 0xb4d12492, 0xb4d1},
    };
    static const struct { uint8_t byte; float scale; uint32_t f32; uint16_t bf16; } fp[] = {
        {0x38, 0x1.a2p-13f, 0x39510000, 0x3951}, {0x7e, 0x1.a2p-13f, 0x3db6e000, 0x3db7},
        {0xc4, 0x1.a2p-13f, 0xba1cc000, 0xba1d}, {0x7e, 0x1p-17f, 0x3b600000, 0x3b60},
        {0xc4, 0x1p-7f, 0xbcc00000, 0xbcc0},
    };
    for (int level = 0; level < QX_SIMD_COUNT; level++) {
        const struct qx_decode_ops *ops = qx_decode_ops_level((enum qx_simd)level);
        if (ops == NULL) {
            printf("level %d: not on this processor\n", level);
            continue;
        }
        for (size_t i = 0; i < QX_ARRAY_LEN(nv); i++) {
            uint8_t codes[8];
            float out[16];
            uint16_t b[16];
            memset(codes, nv[i].byte, 8);
            ops->nvfp4(codes, &nv[i].scale, qx_f32_from_bits(0x380b6db7), 16, out);
            ops->to_bf16(out, 16, b);
            for (size_t k = nv[i].odd; k < 16; k += 2) {
                assert_int_equal(qx_f32_bits(out[k]), nv[i].f32);
                assert_int_equal(b[k], nv[i].bf16);
            }
        }
        for (size_t i = 0; i < QX_ARRAY_LEN(fp); i++) {
            uint8_t codes[35];
            float out[35];
            uint16_t b[35];
            memset(codes, fp[i].byte, 35);
            ops->fp8(codes, fp[i].scale, 35, out);
            ops->to_bf16(out, 35, b);
            for (size_t k = 0; k < 35; k++) {
                assert_int_equal(qx_f32_bits(out[k]), fp[i].f32);
                assert_int_equal(b[k], fp[i].bf16);
            }
        }
        /* Two roundings, in this order (formats 6.2). */
        uint8_t c3[8], s;
        float out[16];
        memset(c3, 0x33, 8);
        s = 0x0d;
        ops->nvfp4(c3, &s, qx_f32_from_bits(0x3a755555), 16, out);
        assert_int_equal(qx_f32_bits(out[5]), 0x38158000);
        assert_int_equal(qx_f32_to_bf16(out[5]), 0x3816);
        s = 0x0f;
        ops->nvfp4(c3, &s, qx_f32_from_bits(0x38055555), 16, out);
        assert_int_equal(qx_f32_to_bf16(out[5]), 0x35bc);
    }
}

static uint32_t rng_state = 12345;
static uint32_t rng(void)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return rng_state >> 8;
}

/* Equal bits; a NaN equals any NaN of the same sign. */
static void same(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (qx_f32_bits(a[i]) != qx_f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i]))) {
            fail_msg("%s[%zu]: %08x, plain C %08x", what, i, qx_f32_bits(a[i]), qx_f32_bits(b[i]));
        }
    }
}

static void simd_equals_c(void **state)
{
    (void)state;
    static const uint32_t scales[] = {0x3f800000, 0x380b6db7, 0x00000001, 0x00400000, 0x7f7fffff,
                                      0x7b000000, 0x7b800001, 0x7f800000, 0x7fc00000, 0x0,
                                      0xbf800000, 0x3a755555};
    uint8_t all[512 + 3], nib[512], sc[64];
    float a[1024], b[1024];
    for (size_t i = 0; i < sizeof all; i++) {
        all[i] = (uint8_t)i;
    }
    const struct qx_decode_ops *c = qx_decode_ops_level(QX_SIMD_C);
    for (int level = 1; level < QX_SIMD_COUNT; level++) {
        const struct qx_decode_ops *ops = qx_decode_ops_level((enum qx_simd)level);
        if (ops == NULL) {
            continue;
        }
        for (size_t k = 0; k < QX_ARRAY_LEN(scales); k++) {
            float s = qx_f32_from_bits(scales[k]);
            for (size_t off = 0; off < 3; off++) {
                for (size_t n = 0; n <= 512; n += n < 40 ? 1 : 59) {
                    c->fp8(all + off, s, n, a);
                    ops->fp8(all + off, s, n, b);
                    same(b, a, n, "fp8");
                }
            }
            for (int block = 0; block < 256; block += 4) {
                for (size_t i = 0; i < 512; i++) {
                    nib[i] = (uint8_t)rng();
                }
                for (size_t i = 0; i < 64; i++) {
                    sc[i] = (uint8_t)(block + (int)(i % 4));
                }
                c->nvfp4(nib, sc, s, 1024, a);
                ops->nvfp4(nib, sc, s, 1024, b);
                same(b, a, 1024, "nvfp4");
                c->mxfp8(all, sc, 112, a);
                ops->mxfp8(all, sc, 112, b);
                same(b, a, 112, "mxfp8");
            }
        }
        float fs[4] = {0.5f, 3.1e-5f, 1e30f, 7.0f};
        c->fp8_block(all, fs, 500, a);
        ops->fp8_block(all, fs, 500, b);
        same(b, a, 500, "fp8_block");
        for (uint32_t hi = 0; hi < 0x10000; hi += 64) {
            uint16_t h[67], ra[67], rb[67];
            for (size_t i = 0; i < 67; i++) {
                h[i] = (uint16_t)(hi + i);
                a[i] = qx_f32_from_bits(((hi + (uint32_t)i) << 16) ^ (i % 3 == 0 ? 0x8000 : rng() & 0xffff));
            }
            c->to_bf16(a, 67, ra);
            ops->to_bf16(a, 67, rb);
            assert_memory_equal(ra, rb, sizeof ra);
            c->bf16(h, 67, a);
            ops->bf16(h, 67, b);
            assert_memory_equal(a, b, 67 * sizeof(float));
        }
    }
}

static void nvfp4_encode(void **state)
{
    (void)state;
    float x[16], y[16];
    uint8_t codes[8];
    for (int i = 0; i < 16; i++) {
        x[i] = qx_e2m1_table[i] * 0.25f;
    }
    uint8_t s = qx_nvfp4_amax_scale(x, 0.5f); /* 1.5 / 3 = 0.5 */
    assert_int_equal(s, 0x30);
    assert_true(qx_nvfp4_encode_block(x, 0.5f, s, codes) == 0.0);
    qx_nvfp4_decode(codes, &s, 0.5f, 16, y);
    for (int i = 0; i < 16; i++) {
        assert_true(x[i] == y[i]);
    }
    memset(x, 0, sizeof x);
    assert_int_equal(qx_nvfp4_amax_scale(x, 0.5f), 0);
    assert_true(qx_nvfp4_encode_block(x, 0.5f, 0, codes) == 0.0);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(codes[i], 0);
    }
    x[3] = 1e-30f; /* far below the smallest scale: no zero scale over a value that is not zero */
    assert_int_equal(qx_nvfp4_amax_scale(x, 0.5f), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_values),
        cmocka_unit_test(simd_equals_c),
        cmocka_unit_test(nvfp4_encode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
