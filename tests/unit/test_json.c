/* The pull reader and the writer: what RFC 8259 accepts and refuses, exact integers, positions, depth; and
 * that what one writes the other reads back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "json_out.h"
#include "json_pull.h"

/* Events as letters: { } [ ] k s n t f 0 . ! */
static const char *events(const char *text, size_t n, bool words, char *out, size_t cap,
                          struct qx_error *err)
{
    static const char letters[] = ".{}[]ksntf0!";
    struct qx_json_pull j;
    size_t at = 0;
    char *copy = malloc(n ? n : 1); /* exact size, so that a sanitizer sees a read past the end */
    memcpy(copy, text, n);
    qx_json_pull_init(&j, copy, n);
    j.allow_nonfinite = words;
    for (;;) {
        enum qx_json_type t = qx_json_next(&j);
        assert_true(at + 1 < cap);
        out[at++] = letters[t];
        if (t == QX_JSON_END || t == QX_JSON_ERROR) {
            break;
        }
    }
    out[at] = '\0';
    *err = j.err;
    qx_json_pull_fini(&j);
    free(copy);
    return out;
}

static void grammar(void **state)
{
    (void)state;
    static const struct { const char *text, *events, *kind; uint64_t off; } rows[] = {
        {"{}", "{}.", NULL, 0},
        {"[]", "[].", NULL, 0},
        {" {\"a\" : [1, true,false ,null,\"x\"] }\r\n", "{k[ntf0s]}.", NULL, 0},
        {"1", "n.", NULL, 0},
        {"\"\"", "s.", NULL, 0},
        {"-0", "n.", NULL, 0},
        {"1e2", "n.", NULL, 0},
        {"0.5E-3", "n.", NULL, 0},
        {"", "!", "json-syntax", 0},
        {"  ", "!", "json-syntax", 2},
        {"{", "{!", "json-syntax", 1},
        {"[1,]", "[n!", "json-syntax", 3},
        {"[,1]", "[!", "json-syntax", 1},
        {"{\"a\":1,}", "{kn!", "json-syntax", 7},
        {"{\"a\" 1}", "{!", "json-syntax", 5},
        {"{a:1}", "{!", "json-syntax", 1},
        {"[1 2]", "[n!", "json-syntax", 3},
        {"[1}", "[n!", "json-syntax", 2},
        {"{}x", "{}!", "json-syntax", 2},
        {"{}{}", "{}!", "json-syntax", 2},
        {"01", "!", "json-syntax", 0},
        {"-", "!", "json-syntax", 0},
        {"1.", "!", "json-syntax", 0},
        {".5", "!", "json-syntax", 0},
        {"1e", "!", "json-syntax", 0},
        {"+1", "!", "json-syntax", 0},
        {"0x10", "n!", "json-syntax", 1},
        {"tru", "!", "json-syntax", 0},
        {"NaN", "!", "json-syntax", 0},
        {"\"a", "!", "json-syntax", 0},
        {"\"\\x\"", "!", "json-syntax", 1},
        {"\"\\u12g4\"", "!", "json-syntax", 1},
        {"\"\\", "!", "json-syntax", 1},
        {"\"a\nb\"", "!", "json-syntax", 2},
        {"\"\xff\"", "!", "json-utf8", 1},
        {"\"\xc0\x80\"", "!", "json-utf8", 1},
        {"\"\xed\xa0\x80\"", "!", "json-utf8", 1},
        {"\"\xe2\x82\"", "!", "json-utf8", 1},
        {"\"\\ud800\"", "!", "json-utf8", 1},
        {"\"\\udc00\"", "!", "json-utf8", 1},
        {"\"\\ud83d\\u0041\"", "!", "json-utf8", 1},
        {"\"\\ud83d\\ude00\"", "s.", NULL, 0},
        {"\xef\xbb\xbf{}", "!", "json-bom", 0},
        {"// c\n{}", "!", "json-syntax", 0},
        {"'a'", "!", "json-syntax", 0},
        {"\xff", "!", "json-syntax", 0},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        char out[64];
        struct qx_error err;
        assert_string_equal(events(rows[i].text, strlen(rows[i].text), false, out, sizeof out, &err),
                            rows[i].events);
        if (rows[i].kind) {
            assert_string_equal(err.kind, rows[i].kind);
            assert_int_equal(err.off, rows[i].off);
        }
    }
    char out[64];
    struct qx_error err;
    assert_string_equal(events("[NaN,Infinity,-Infinity,-1]", 27, true, out, sizeof out, &err), "[nnnn].");
    assert_string_equal(events("[-Inf]", 6, true, out, sizeof out, &err), "[!");
}

static void numbers(void **state)
{
    (void)state;
    static const struct { const char *text; bool is_int, negative; uint64_t u; int64_t i; double d; } rows[] = {
        {"0", true, false, 0, 0, 0},
        {"-0", true, true, 0, 0, -0.0},
        {"18446744073709551615", true, false, UINT64_MAX, 0, 18446744073709551615.0},
        {"18446744073709551616", false, false, 0, 0, 18446744073709551616.0},
        {"-9223372036854775808", true, true, 0, INT64_MIN, -9223372036854775808.0},
        {"9007199254740993", true, false, 9007199254740993, 9007199254740993, 9007199254740993.0},
        {"1e2", false, false, 0, 0, 100},
        {"10000000.0", false, false, 0, 0, 1e7},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        struct qx_json_pull j;
        qx_json_pull_init(&j, rows[i].text, strlen(rows[i].text));
        assert_int_equal(qx_json_next(&j), QX_JSON_NUMBER);
        assert_int_equal(j.is_int, rows[i].is_int);
        assert_int_equal(j.negative, rows[i].negative);
        assert_true(j.uint_value == rows[i].u && j.int_value == rows[i].i && j.f64 == rows[i].d);
        assert_int_equal(qx_json_next(&j), QX_JSON_END);
        qx_json_pull_fini(&j);
    }
    struct qx_json_pull j;
    qx_json_pull_init(&j, "-1e999", 6);
    assert_int_equal(qx_json_next(&j), QX_JSON_NUMBER);
    assert_true(j.is_nonfinite && j.f64 < 0 && isinf(j.f64));
    qx_json_pull_fini(&j);
}

static void strings_and_skip(void **state)
{
    (void)state;
    static const char text[] = "{\"\\u0061\\n\":{\"x\":[[1],{}]},\"z\":\"\\ud83d\\ude00\\u0000!\"}";
    struct qx_json_pull j;
    qx_json_pull_init(&j, text, sizeof text - 1);
    assert_int_equal(qx_json_next(&j), QX_JSON_OBJECT);
    assert_int_equal(qx_json_next(&j), QX_JSON_KEY);
    assert_true(j.text.n == 2 && memcmp(j.text.p, "a\n", 2) == 0);
    assert_true(qx_json_skip(&j));
    assert_int_equal(qx_json_next(&j), QX_JSON_KEY);
    assert_true(j.text.n == 1 && j.text.p[0] == 'z');
    assert_int_equal(qx_json_next(&j), QX_JSON_STRING);
    assert_int_equal(j.text.n, 6);
    assert_memory_equal(j.text.p, "\xf0\x9f\x98\x80\0!", 6);
    assert_int_equal(qx_json_next(&j), QX_JSON_OBJECT_END);
    assert_int_equal(qx_json_next(&j), QX_JSON_END);
    assert_int_equal(qx_json_next(&j), QX_JSON_END);
    qx_json_pull_fini(&j);
}

static void depth(void **state)
{
    (void)state;
    char text[2 * QX_JSON_MAX_DEPTH + 3];
    for (int over = 0; over < 2; over++) {
        size_t d = QX_JSON_MAX_DEPTH + (size_t)over, n = 0;
        memset(text, '[', d);
        memset(text + d, ']', d);
        struct qx_json_pull j;
        qx_json_pull_init(&j, text, 2 * d);
        enum qx_json_type t;
        while ((t = qx_json_next(&j)) != QX_JSON_END && t != QX_JSON_ERROR) {
            n++;
        }
        assert_int_equal(t, over ? QX_JSON_ERROR : QX_JSON_END);
        if (over) {
            assert_string_equal(j.err.kind, "json-too-deep");
            assert_int_equal(j.err.off, QX_JSON_MAX_DEPTH);
            assert_int_equal(qx_json_next(&j), QX_JSON_ERROR); /* final */
        } else {
            assert_int_equal(n, 2 * d);
        }
        qx_json_pull_fini(&j);
    }
    uint64_t line, col;
    qx_json_line_col("ab\ncd\n\nx", 8, 7, &line, &col);
    assert_true(line == 4 && col == 1);
    qx_json_line_col("ab\ncd", 5, 4, &line, &col);
    assert_true(line == 2 && col == 2);
    qx_json_line_col("", 0, 0, &line, &col);
    assert_true(line == 1 && col == 1);
}

static void writes(void **state)
{
    (void)state;
    struct qx_json_out o;
    qx_json_out_init(&o, false);
    qx_json_obj(&o, NULL);
    qx_json_str(&o, "schema", "x/1");
    qx_json_str(&o, "none", NULL);
    qx_json_arr(&o, "a");
    qx_json_u64(&o, NULL, UINT64_MAX);
    qx_json_i64(&o, NULL, INT64_MIN);
    qx_json_f64(&o, NULL, 0.1);
    qx_json_f64(&o, NULL, NAN);
    qx_json_f64(&o, NULL, -INFINITY);
    qx_json_f32(&o, NULL, 0.1f);
    qx_json_bool(&o, NULL, true);
    qx_json_arr_end(&o);
    qx_json_obj(&o, "empty");
    qx_json_obj_end(&o);
    qx_json_strn(&o, "e", "\"\\\n\x01\x7f\xff\xc2\x85\xc3\xa9", 10);
    qx_json_obj_end(&o);
    assert_string_equal(qx_buf_cstr(&o.buf),
                        "{\"schema\": \"x/1\", \"none\": null, \"a\": [18446744073709551615, "
                        "-9223372036854775808, 0.1, \"NaN\", \"-Infinity\", 0.1, true], \"empty\": {}, "
                        "\"e\": \"\\\"\\\\\\n\\u0001\\u007f\xef\xbf\xbd\\u0085\xc3\xa9\"}");
    qx_json_out_fini(&o);
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    qx_json_arr(&o, "a");
    qx_json_u64(&o, NULL, 1);
    qx_json_u64(&o, NULL, 2);
    qx_json_arr_end(&o);
    qx_json_obj_end(&o);
    assert_string_equal(qx_buf_cstr(&o.buf), "{\n  \"a\": [\n    1,\n    2\n  ]\n}");
    qx_json_out_fini(&o);
}

static void floats_read_back(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int i = 0; i < 20000; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        double d;
        float f;
        memcpy(&d, &seed, 8);
        uint32_t high = (uint32_t)(seed >> 32);
        memcpy(&f, &high, 4);
        if (!isfinite(d) || !isfinite(f)) {
            continue;
        }
        struct qx_json_out o;
        qx_json_out_init(&o, false);
        qx_json_arr(&o, NULL);
        qx_json_f64(&o, NULL, d);
        qx_json_f32(&o, NULL, f);
        qx_json_arr_end(&o);
        struct qx_json_pull j;
        qx_json_pull_init(&j, o.buf.p, o.buf.n);
        assert_int_equal(qx_json_next(&j), QX_JSON_ARRAY);
        assert_int_equal(qx_json_next(&j), QX_JSON_NUMBER);
        assert_true(j.f64 == d);
        assert_int_equal(qx_json_next(&j), QX_JSON_NUMBER);
        assert_true((float)j.f64 == f);
        assert_int_equal(qx_json_next(&j), QX_JSON_ARRAY_END);
        qx_json_pull_fini(&j);
        qx_json_out_fini(&o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grammar), cmocka_unit_test(numbers),        cmocka_unit_test(strings_and_skip),
        cmocka_unit_test(depth),   cmocka_unit_test(writes),         cmocka_unit_test(floats_read_back)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
