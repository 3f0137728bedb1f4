/* Elementary codes: every code both ways, every midpoint, neighbours of every midpoint. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "codes.h"

static void e4m3(void **state)
{
    (void)state;
    for (int i = 0; i < 256; i++) {
        int e = (i >> 3) & 15, m = i & 7;
        double v = e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10);
        if ((i & 0x7f) == 0x7f) {
            assert_true(isnan(qx_e4m3_table[i]));
        } else {
            assert_true((double)qx_e4m3_table[i] == (i < 128 ? v : -v));
        }
        assert_int_equal(qx_f32_to_e4m3(qx_e4m3_table[i]), i);
    }
    for (int i = 0; i < 126; i++) {
        float mid = (qx_e4m3_table[i] + qx_e4m3_table[i + 1]) / 2;
        assert_int_equal(qx_f32_to_e4m3(mid), i % 2 ? i + 1 : i);
        assert_int_equal(qx_f32_to_e4m3(-mid), (i % 2 ? i + 1 : i) | 0x80);
        assert_int_equal(qx_f32_to_e4m3(nextafterf(mid, 1e9f)), i + 1);
        assert_int_equal(qx_f32_to_e4m3(nextafterf(mid, 0.0f)), i);
    }
    assert_int_equal(qx_f32_to_e4m3(1e30f), 0x7e);
    assert_int_equal(qx_f32_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(qx_f32_to_e4m3(NAN), 0x7f);
}

static void e2m1(void **state)
{
    (void)state;
    for (int i = 0; i < 16; i++) {
        assert_int_equal(qx_f32_to_e2m1(qx_e2m1_table[i]), i);
    }
    for (int i = 0; i < 7; i++) {
        float mid = (qx_e2m1_table[i] + qx_e2m1_table[i + 1]) / 2;
        assert_int_equal(qx_f32_to_e2m1(mid), i % 2 ? i + 1 : i);
        assert_int_equal(qx_f32_to_e2m1(-mid), (i % 2 ? i + 1 : i) | 8);
        assert_int_equal(qx_f32_to_e2m1(nextafterf(mid, 1e9f)), i + 1);
        assert_int_equal(qx_f32_to_e2m1(nextafterf(mid, 0.0f)), i);
    }
    assert_int_equal(qx_f32_to_e2m1(100.0f), 7);
    assert_int_equal(qx_f32_to_e2m1(NAN), 0);
}

static void others(void **state)
{
    (void)state;
    assert_true(qx_e8m0_to_f32(127) == 1.0f);
    assert_true(qx_e8m0_to_f32(0) == 0x1p-127f);
    assert_true(qx_e8m0_to_f32(254) == 0x1p127f);
    assert_true(isnan(qx_e8m0_to_f32(255)));
    assert_true(qx_f16_to_f32(0x0001) == 0x1p-24f);
    assert_true(qx_f16_to_f32(0x8000) == 0.0f && signbit(qx_f16_to_f32(0x8000)));
    assert_true(qx_f16_to_f32(0x7bff) == 65504.0f);
    assert_true(isinf(qx_f16_to_f32(0xfc00)));
    assert_true(isnan(qx_f16_to_f32(0x7c01)));
    assert_true(qx_e5m2_to_f32(0x7b) == 57344.0f);
    assert_int_equal(qx_f32_to_bf16(qx_f32_from_bits(0x3f808000)), 0x3f80);
    assert_int_equal(qx_f32_to_bf16(qx_f32_from_bits(0x3f818000)), 0x3f82);
    assert_int_equal(qx_f32_to_bf16(qx_f32_from_bits(0x7f800001)), 0x7fc0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3),
        cmocka_unit_test(e2m1),
        cmocka_unit_test(others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
