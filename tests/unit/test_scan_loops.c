/* The loops that look at every byte: against the element-wise rule, for every code, place and length. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "scan_loops.h"

#include <math.h>
#include <string.h>

static void check(enum qx_scan_kind k, const uint8_t *p, size_t n)
{
    unsigned size = qx_scan_elem_size(k), f = qx_scan_block(k, p, n), any = 0, nonzero = 0;
    for (size_t i = 0; i < n; i += size) {
        any |= qx_scan_classify(k, p + i);
    }
    for (size_t i = 0; i < n; ++i) {
        nonzero |= p[i];
    }
    assert_int_equal(!!(f & QX_SCAN_NONZERO), !!nonzero);
    if (any) {
        assert_true(f & QX_SCAN_SUSPECT); /* never missed */
    } else if (k < QX_SCAN_SCALE_F16) {
        assert_false(f & QX_SCAN_SUSPECT); /* and exact for the fast kinds */
    }
}

/* One special element among harmless ones, at every place of runs of every length up to 200 bytes. */
static void test_places(void **state)
{
    uint8_t buf[256 + 3];
    (void)state;
    for (int k = 0; k < QX_SCAN_COUNT; ++k) {
        unsigned size = qx_scan_elem_size((enum qx_scan_kind)k);
        for (size_t n = size; n <= 200; n += size * 3) {
            for (size_t at = 0; at < n; at += size) {
                uint8_t *p = buf + at % 4; /* any alignment */
                memset(buf, 0x11, sizeof buf);
                check((enum qx_scan_kind)k, p, n);
                memset(p + at, 0xff, size);
                check((enum qx_scan_kind)k, p, n);
                memset(buf, 0, sizeof buf);
                check((enum qx_scan_kind)k, p, n);
                p[at] = 1;
                check((enum qx_scan_kind)k, p, n);
            }
        }
    }
}

static void test_codes(void **state)
{
    uint8_t b[64];
    (void)state;
    for (int k = 0; k < QX_SCAN_COUNT; ++k) {
        unsigned size = qx_scan_elem_size((enum qx_scan_kind)k);
        for (unsigned v = 0; v < (size == 1 ? 256u : 65536u); ++v) {
            for (unsigned i = 0; i < sizeof b; ++i) {
                b[i] = 0x21;
            }
            b[16 + size - 1] = (uint8_t)(size == 1 ? v : v >> 8);
            if (size > 1) {
                b[16 + size - 2] = (uint8_t)v;
            }
            check((enum qx_scan_kind)k, b, sizeof b);
        }
    }
}

static void test_classes(void **state)
{
    static const struct { enum qx_scan_kind k; uint64_t v; unsigned want; } c[] = {
        {QX_SCAN_E4M3, 0x7f, QX_SCAN_IS_NAN},
        {QX_SCAN_E4M3, 0xff, QX_SCAN_IS_NAN},
        {QX_SCAN_E4M3, 0x80, 0},
        {QX_SCAN_E4M3, 0x7e, 0},
        {QX_SCAN_E8M0, 0xff, QX_SCAN_IS_NAN},
        {QX_SCAN_E8M0, 0x00, 0},
        {QX_SCAN_E5M2, 0x7c, QX_SCAN_IS_INF},
        {QX_SCAN_E5M2, 0xfd, QX_SCAN_IS_NAN},
        {QX_SCAN_BLOCK_SCALE, 0x00, QX_SCAN_IS_ZERO},
        {QX_SCAN_BLOCK_SCALE, 0x80, QX_SCAN_IS_ZERO | QX_SCAN_IS_SIGNED},
        {QX_SCAN_BLOCK_SCALE, 0x7f, QX_SCAN_IS_NAN},
        {QX_SCAN_BLOCK_SCALE, 0xb8, QX_SCAN_IS_SIGNED},
        {QX_SCAN_BLOCK_SCALE, 0x01, 0},
        {QX_SCAN_BF16, 0x7f80, QX_SCAN_IS_INF},
        {QX_SCAN_BF16, 0xff81, QX_SCAN_IS_NAN},
        {QX_SCAN_BF16, 0x8000, 0},
        {QX_SCAN_F16, 0x7c00, QX_SCAN_IS_INF},
        {QX_SCAN_F16, 0x7bff, 0},
        {QX_SCAN_F32, 0x7f800001, QX_SCAN_IS_NAN},
        {QX_SCAN_F32, 0x7f7fffff, 0},
        {QX_SCAN_F64, UINT64_C(0x7ff0000000000000), QX_SCAN_IS_INF},
        {QX_SCAN_SCALE_F32, 0x80000000, QX_SCAN_IS_SIGNED | QX_SCAN_IS_ZERO},
        {QX_SCAN_SCALE_F32, 0x3f800000, 0},
        {QX_SCAN_SCALE_BF16, 0xbf80, QX_SCAN_IS_SIGNED},
        {QX_SCAN_SCALE_BF16, 0xffc0, QX_SCAN_IS_NAN},
        {QX_SCAN_SCALE_F16, 0x0000, QX_SCAN_IS_ZERO},
        {QX_SCAN_NONE, 0xff, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof c / sizeof *c; ++i) {
        uint8_t b[8];
        for (int k = 0; k < 8; ++k) {
            b[k] = (uint8_t)(c[i].v >> (8 * k));
        }
        assert_int_equal(qx_scan_classify(c[i].k, b), c[i].want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_classes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
