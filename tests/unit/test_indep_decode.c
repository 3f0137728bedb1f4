/* The second decoder: every elementary code against an expression of the format's words in double, the
 * check values of the format description, and rounding at its edges. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "indep_decode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double value(struct qx_exact x)
{
    double v;
    if (x.nan) {
        return NAN;
    }
    v = x.inf ? INFINITY : ldexp((double)x.mant, x.exp);
    return x.neg ? -v : v;
}

static void same(double got, double want)
{
    if (isnan(want)) {
        assert_true(isnan(got));
    } else {
        assert_true(got == want && signbit(got) == signbit(want));
    }
}

static void test_e4m3(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 256; ++b) {
        unsigned e = b >> 3 & 15, m = b & 7;
        double v = e == 0 ? m / 8.0 * pow(2, -6) : (1 + m / 8.0) * pow(2, (int)e - 7);
        v = b & 0x80 ? -v : v;
        same(value(qx_exact_e4m3(b)), (b & 0x7f) == 0x7f ? NAN : v);
    }
}

static void test_e2m1(void **state)
{
    static const double want[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    (void)state;
    for (unsigned n = 0; n < 16; ++n) {
        same(value(qx_exact_e2m1(n)), n & 8 ? -want[n & 7] : want[n & 7]);
    }
}

static void test_e8m0(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 256; ++b) {
        same(value(qx_exact_e8m0(b)), b == 255 ? NAN : pow(2, (int)b - 127));
    }
}

static void test_e5m2(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 256; ++b) {
        unsigned e = b >> 2 & 31, m = b & 3;
        double v = e == 0    ? m / 4.0 * pow(2, -14)
                   : e == 31 ? (m ? NAN : INFINITY)
                             : (1 + m / 4.0) * pow(2, (int)e - 15);
        same(value(qx_exact_e5m2(b)), b & 0x80 ? -v : v);
    }
}

static void test_f16(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; ++h) {
        unsigned e = h >> 10 & 31, m = h & 1023;
        double v = e == 0    ? m * pow(2, -24)
                   : e == 31 ? (m ? NAN : INFINITY)
                             : (1024 + m) * pow(2, (int)e - 25);
        same(value(qx_exact_f16(h)), h & 0x8000 ? -v : v);
    }
}

static float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint32_t to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

/* f32 in, f32 out: every exponent, mantissas at the edges. */
static void test_f32_identity(void **state)
{
    (void)state;
    for (uint32_t e = 0; e < 256; ++e) {
        static const uint32_t m[] = {0, 1, 2, 0x3fffff, 0x400000, 0x7ffffe, 0x7fffff};
        for (size_t i = 0; i < sizeof m / sizeof *m; ++i) {
            uint32_t u = e << 23 | m[i];
            uint32_t got = qx_exact_to_f32(qx_exact_f32(u));
            if (e == 255 && m[i]) {
                assert_int_equal(got, 0x7fc00000);
            } else {
                assert_int_equal(got, u);
                assert_int_equal(qx_exact_to_f32(qx_exact_f32(u | 0x80000000u)), u | 0x80000000u);
            }
        }
    }
}

/* Products rounded by the processor: double holds a product of two f32 exactly. */
static void test_products(void **state)
{
    uint64_t s = 7;
    (void)state;
    for (int i = 0; i < 200000; ++i) {
        uint32_t a, b;
        double exact;
        s = s * UINT64_C(6364136223846793005) + 1442695040888963407u;
        a = (uint32_t)(s >> 32);
        s = s * UINT64_C(6364136223846793005) + 1442695040888963407u;
        b = (uint32_t)(s >> 32);
        exact = (double)from_bits(a) * (double)from_bits(b);
        if (isnan(exact)) {
            continue;
        }
        assert_int_equal(qx_exact_to_f32(qx_exact_mul(qx_exact_f32(a), qx_exact_f32(b))),
                         to_bits((float)exact));
    }
}

/* Around halves of subnormals and the largest number. */
static void test_edges(void **state)
{
    (void)state;
    struct qx_exact half = {.mant = 1, .exp = -150}, more = {.mant = 3, .exp = -151},
                    one_half = {.mant = 3, .exp = -150}, huge = {.mant = 0x1ffffff, .exp = 103},
                    below = {.mant = 0x1fffffe, .exp = 103}, tiny = {.mant = 1, .exp = -4000};
    assert_int_equal(qx_exact_to_f32(half), 0);
    assert_int_equal(qx_exact_to_f32(more), 1);
    assert_int_equal(qx_exact_to_f32(one_half), 2);
    assert_int_equal(qx_exact_to_f32(huge), 0x7f800000);
    assert_int_equal(qx_exact_to_f32(below), 0x7f7fffff);
    assert_int_equal(qx_exact_to_f32(tiny), 0);
    assert_int_equal(qx_exact_f32_to_bf16(0x3f808000), 0x3f80); /* tie to even */
    assert_int_equal(qx_exact_f32_to_bf16(0x3f818000), 0x3f82);
    assert_int_equal(qx_exact_f32_to_bf16(0x3f808001), 0x3f81);
    assert_int_equal(qx_exact_f32_to_bf16(0x7f7fffff), 0x7f80);
    assert_int_equal(qx_exact_f32_to_bf16(0xff800000), 0xff80);
    assert_int_equal(qx_exact_f32_to_bf16(0x7f800001), 0x7fc0);
    assert_int_equal(qx_exact_f32_to_bf16(0x00008000), 0x0000);
    assert_int_equal(qx_exact_f32_to_bf16(0x80018000), 0x8002);
}

/* Formats 6.3 and the two cases of double rounding in 6.2. */
static void test_check_values(void **state)
{
    static const struct { unsigned code, scale; uint32_t global, f32; unsigned bf16; } nvfp4[] = {
        {0x2b & 15, 0x38, 0x380B6DB7, 0xB8512492, 0xB851}, {0x2b >> 4, 0x38, 0x380B6DB7, 0x380B6DB7, 0x380B},
        {0x71 & 15, 0x7e, 0x380B6DB7, 0x3BF40000, 0x3BF4}, {0x71 >> 4, 0x7e, 0x380B6DB7, 0x3DB70000, 0x3DB7},
        {0x98 >> 4, 0x52, 0x380B6DB7, 0xB92E4925, 0xB92E}, {0xf7 >> 4, 0x01, 0x380B6DB7, 0xB4D12492, 0xB4D1},
        {3, 0x0d, 0x3A755555, 0x38158000, 0x3816},
    };
    static const struct { unsigned code, scale; uint32_t f32; unsigned bf16; } fp8[] = {
        {0x38, 0x3951, 0x39510000, 0x3951}, {0x7e, 0x3951, 0x3DB6E000, 0x3DB7},
        {0xc4, 0x3951, 0xBA1CC000, 0xBA1D}};
    static const struct { unsigned code, scale; uint32_t f32; unsigned bf16; } mx[] = {
        {0x7e, 110, 0x3B600000, 0x3B60}, {0xc4, 120, 0xBCC00000, 0xBCC0}};
    (void)state;
    for (size_t i = 0; i < sizeof nvfp4 / sizeof *nvfp4; ++i) {
        uint32_t f = qx_exact_to_f32(qx_exact_mul(qx_exact_mul(qx_exact_e2m1(nvfp4[i].code),
                                                               qx_exact_e4m3(nvfp4[i].scale)),
                                                  qx_exact_f32(nvfp4[i].global)));
        assert_int_equal(f, nvfp4[i].f32);
        assert_int_equal(qx_exact_f32_to_bf16(f), nvfp4[i].bf16);
    }
    for (size_t i = 0; i < sizeof fp8 / sizeof *fp8; ++i) {
        uint32_t f = qx_exact_to_f32(qx_exact_mul(qx_exact_e4m3(fp8[i].code), qx_exact_bf16(fp8[i].scale)));
        assert_int_equal(f, fp8[i].f32);
        assert_int_equal(qx_exact_f32_to_bf16(f), fp8[i].bf16);
    }
    for (size_t i = 0; i < sizeof mx / sizeof *mx; ++i) {
        uint32_t f = qx_exact_to_f32(qx_exact_mul(qx_exact_e4m3(mx[i].code), qx_exact_e8m0(mx[i].scale)));
        assert_int_equal(f, mx[i].f32);
        assert_int_equal(qx_exact_f32_to_bf16(f), mx[i].bf16);
    }
    uint32_t f = qx_exact_to_f32(qx_exact_mul(qx_exact_mul(qx_exact_e2m1(3), qx_exact_e4m3(0x0f)),
                                              qx_exact_f32(0x38055555)));
    assert_int_equal(qx_exact_f32_to_bf16(f), 0x35BC);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e4m3),         cmocka_unit_test(test_e2m1),
        cmocka_unit_test(test_e8m0),         cmocka_unit_test(test_e5m2),
        cmocka_unit_test(test_f16),          cmocka_unit_test(test_f32_identity),
        cmocka_unit_test(test_products),     cmocka_unit_test(test_edges),
        cmocka_unit_test(test_check_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
