/* Strict numbers, lists, sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "num.h"

static void integers(void **state)
{
    (void)state;
    static const struct { const char *s; bool ok; uint64_t v; } rows[] = {
        {"0", true, 0}, {"18446744073709551615", true, UINT64_MAX}, {"18446744073709551616", false, 0},
        {"99999999999999999999999", false, 0}, {"", false, 0}, {"-1", false, 0}, {"+1", false, 0}, {" 1", false, 0},
        {"1 ", false, 0}, {"0x10", false, 0}, {"007", true, 7}};
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        uint64_t v = 0;
        assert_int_equal(qx_parse_u64(rows[i].s, strlen(rows[i].s), &v), rows[i].ok);
        assert_true(!rows[i].ok || v == rows[i].v);
    }
    int64_t n;
    assert_true(qx_parse_i64("-9223372036854775808", 20, &n) && n == INT64_MIN);
    assert_false(qx_parse_i64("-9223372036854775809", 20, &n));
    assert_true(qx_parse_i64("9223372036854775807", 19, &n) && n == INT64_MAX);
    assert_false(qx_parse_i64("9223372036854775808", 19, &n));
    double d;
    assert_true(qx_parse_f64("1e-06", 5, &d) && d == 1e-06);
    assert_true(qx_parse_f64("10000000.0", 10, &d) && d == 1e7);
    assert_false(qx_parse_f64("0x1p3", 5, &d) || qx_parse_f64("nan", 3, &d) || qx_parse_f64("inf", 3, &d) ||
                 qx_parse_f64("1e999", 5, &d) || qx_parse_f64("1,5", 3, &d) || qx_parse_f64("1 ", 2, &d));
}

static void sizes(void **state)
{
    (void)state;
    static const struct { const char *s; bool ok; uint64_t v; } rows[] = {
        {"4096", true, 4096}, {"64K", true, 65536}, {"64KiB", true, 65536}, {"2G", true, (uint64_t)2 << 30},
        {"2GiB", true, (uint64_t)2 << 30}, {"128GiB", true, (uint64_t)128 << 30}, {"1T", true, (uint64_t)1 << 40},
        {"2GB", false, 0}, {"1MB", false, 0}, {"", false, 0}, {"G", false, 0}, {"1.5G", false, 0}, {"-1", false, 0},
        {"99999999999P", false, 0}, {"10kib", false, 0}, {"12B", true, 12}};
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        uint64_t v = 0;
        struct qx_error e = {0};
        int rc = qx_parse_size(rows[i].s, &v, &e);
        assert_int_equal(rc == 0, rows[i].ok);
        assert_true(rows[i].ok ? v == rows[i].v : e.code == QX_E_USAGE);
    }
    struct qx_error e = {0};
    uint64_t v;
    qx_parse_size("2GB", &v, &e);
    assert_non_null(strstr(e.msg, "2GiB"));
    char out[32];
    assert_string_equal(qx_size_text(0, out), "0 B");
    assert_string_equal(qx_size_text(1023, out), "1023 B");
    assert_string_equal(qx_size_text(1024, out), "1.00 KiB");
    assert_string_equal(qx_size_text(51200245762, out), "47.68 GiB");
    assert_string_equal(qx_size_text((uint64_t)1024 * 1024 - 1, out), "1.00 MiB");
    assert_string_equal(qx_count_text(0, out), "0");
    assert_string_equal(qx_count_text(999, out), "999");
    assert_string_equal(qx_count_text(1000, out), "1,000");
    assert_string_equal(qx_count_text(UINT64_MAX, out), "18,446,744,073,709,551,615");
}

static void lists(void **state)
{
    (void)state;
    static const struct { const char *s; enum qx_code code; size_t n; uint64_t first, last; } rows[] = {
        {"7", QX_OK, 1, 7, 7}, {"3-9", QX_OK, 7, 3, 9}, {"1,5,9-12", QX_OK, 6, 1, 12}, {"9,9,3", QX_OK, 3, 9, 3},
        {"5-5", QX_OK, 1, 5, 5}, {"9-3", QX_E_USAGE, 0, 0, 0}, {"", QX_E_USAGE, 0, 0, 0},
        {"1,,2", QX_E_USAGE, 0, 0, 0}, {"1,", QX_E_USAGE, 0, 0, 0}, {"x", QX_E_USAGE, 0, 0, 0},
        {"-1", QX_E_RANGE, 0, 0, 0}, {"1,-2", QX_E_RANGE, 0, 0, 0}, {"1-", QX_E_USAGE, 0, 0, 0},
        {"0-18446744073709551615", QX_E_USAGE, 0, 0, 0}, {"0-16777216", QX_E_USAGE, 0, 0, 0},
        {"18446744073709551615", QX_OK, 1, UINT64_MAX, UINT64_MAX}};
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        struct qx_u64_list l;
        struct qx_error e = {0};
        int rc = qx_parse_list(rows[i].s, "row-out-of-range", &l, &e);
        assert_int_equal(rc, -(int)rows[i].code);
        assert_int_equal(l.n, rows[i].n);
        if (l.n) {
            assert_true(l.v[0] == rows[i].first && l.v[l.n - 1] == rows[i].last);
        }
        qx_u64_list_fini(&l);
    }
    struct qx_u64_list l;
    assert_int_equal(qx_parse_list_text(" 1\n2,3\t4-6 \r\n", 13, "k", &l, NULL), 0);
    assert_int_equal(l.n, 6);
    qx_u64_list_fini(&l);
    assert_int_equal(qx_parse_list_text("", 0, "k", &l, NULL), 0);
    assert_int_equal(l.n, 0);
    assert_int_equal(qx_parse_list_text("1 two", 5, "k", &l, NULL), -(int)QX_E_USAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(integers), cmocka_unit_test(sizes), cmocka_unit_test(lists)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
