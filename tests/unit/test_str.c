/* Buffers, escaping for display, globs, distances. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "alloc.h"
#include "str.h"

static void escapes(void **state)
{
    (void)state;
    static const struct { const char *in; size_t n; const char *out; } rows[] = {
        {"plain name.0", 12, "plain name.0"},
        {"a\nb\tc\rd", 7, "a\\nb\\tc\\rd"},
        {"\x1b[31m", 5, "\\x1b[31m"},
        {"a\0b", 3, "a\\x00b"},
        {"\x7f", 1, "\\x7f"},
        {"\xff", 1, "\\xff"},
        {"\xc3\xa9", 2, "\xc3\xa9"},
        {"\xc2\x9b", 2, "\\u{9b}"},
        {"\xe2\x80\xae", 3, "\\u{202e}"},
        {"\xed\xa0\x80", 3, "\\xed\\xa0\\x80"},
        {"\xe2\x82", 2, "\\xe2\\x82"},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        struct qx_buf b = {0};
        qx_buf_escaped(&b, rows[i].in, rows[i].n);
        assert_string_equal(qx_buf_cstr(&b), rows[i].out);
        qx_buf_fini(&b);
    }
}

static void remembers_failure(void **state)
{
    (void)state;
    struct qx_buf b = {0};
    qx_buf_str(&b, "kept");
    qx_alloc_fail_at(1, true);
    for (int i = 0; i < 100; i++) {
        qx_buf_str(&b, "more than fits");
    }
    qx_alloc_fail_at(0, false);
    assert_true(b.failed);
    assert_memory_equal(b.p, "kept", 4);
    qx_buf_chr(&b, 'x');
    assert_null(qx_buf_cstr(&b));
    qx_buf_fini(&b);
}

static void formats_long_text(void **state)
{
    (void)state;
    struct qx_buf b = {0};
    char wide[1001];
    memset(wide, 'w', 1000);
    wide[1000] = '\0';
    qx_buf_fmt(&b, "<%s>", wide);
    assert_int_equal(b.n, 1002);
    assert_int_equal(strlen(qx_buf_cstr(&b)), 1002);
    qx_buf_fini(&b);
}

static void globs(void **state)
{
    (void)state;
    static const struct { const char *pattern, *text; bool match; } rows[] = {
        {"*", "", true}, {"", "", true}, {"", "a", false}, {"a*", "abc", true}, {"*.mlp.gate", "x.mlp.gate", true},
        {"*.mlp.gate", "x.mlp.gate_proj", false}, {"a?c", "abc", true}, {"a?c", "ac", false},
        {"a?c", "a\xc3\xa9" "c", true}, {"*hyper*", "l.attn_hyper_connection.x", true}, {"a**b", "ab", true},
        {"*a*b*c", "xxaxxbxxc", true}, {"*a*b*c", "xxaxxcxxb", false}, {"[a]", "a", false}, {"[a]", "[a]", true},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        assert_int_equal(qx_glob_match(rows[i].pattern, rows[i].text), rows[i].match);
    }
    /* would take 2^30 steps with naive backtracking */
    char text[31] = {0};
    memset(text, 'a', 30);
    assert_false(qx_glob_match("*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b", text));
}

static void distances(void **state)
{
    (void)state;
    static const struct { const char *a, *b; unsigned d; } rows[] = {
        {"", "", 0}, {"abc", "abc", 0}, {"abc", "ab", 1}, {"verfiy", "verify", 1}, {"inspect", "insect", 1},
        {"run", "bench", 4}, {"", "abc", 3}};
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        assert_int_equal(qx_str_distance(rows[i].a, rows[i].b), rows[i].d);
        assert_int_equal(qx_str_distance(rows[i].b, rows[i].a), rows[i].d);
    }
    assert_true(qx_str_starts("abc", "ab") && !qx_str_starts("a", "ab"));
    assert_true(qx_str_ends("abc", "bc") && !qx_str_ends("c", "bc"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(escapes), cmocka_unit_test(remembers_failure),
                                       cmocka_unit_test(formats_long_text), cmocka_unit_test(globs),
                                       cmocka_unit_test(distances)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
