/* Edits of single members: all other bytes stay. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "json_edit.h"

enum what { SET, REMOVE };

static void edits(void **unused)
{
    (void)unused;
    static const struct { const char *in; enum what what; const char *path, *value, *out; } cases[] = {
        {"{\"a\": 1, \"b\": 2}", SET, "a", "7", "{\"a\": 7, \"b\": 2}"},
        {"{\"a\": 1e-06, \"b\": {\"c\": [1, {}]}}", SET, "b/c", "null", "{\"a\": 1e-06, \"b\": {\"c\": null}}"},
        {"{\n  \"a\": 1,\n  \"b\": 2\n}\n", SET, "c", "{}", "{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": {}\n}\n"},
        {"{}", SET, "c", "1", "{\"c\": 1}"},
        {"{\"a\":1}", SET, "c", "1", "{\"a\":1, \"c\": 1}"},
        {"{\"t\": {\n    \"x\": 1\n  }}", SET, "t/y", "2", "{\"t\": {\n    \"x\": 1,\n    \"y\": 2\n  }}"},
        {"{\"a\": 1, \"b\": 2, \"c\": 3}", REMOVE, "b", NULL, "{\"a\": 1, \"c\": 3}"},
        {"{\"a\": 1, \"b\": 2}", REMOVE, "a", NULL, "{\"b\": 2}"},
        {"{\"a\": 1, \"b\": 2}", REMOVE, "b", NULL, "{\"a\": 1}"},
        {"{\"a\": 1}", REMOVE, "a", NULL, "{}"},
        {"{\"a\": 1}", REMOVE, "x/y", NULL, "{\"a\": 1}"},
        {"{\"a\": Infinity, \"b\": 2}", SET, "b", "3", "{\"a\": Infinity, \"b\": 3}"},
        {"{\"\\u0061\": 1}", SET, "a", "2", "{\"\\u0061\": 2}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct qx_buf b = {0};
        qx_buf_str(&b, cases[i].in);
        bool ok = cases[i].what == SET ? qx_json_edit_set(&b, cases[i].path, cases[i].value)
                                       : qx_json_edit_remove(&b, cases[i].path);
        assert_true(ok);
        assert_string_equal(qx_buf_cstr(&b), cases[i].out);
        qx_buf_fini(&b);
    }
}

static void refusals(void **unused)
{
    (void)unused;
    struct qx_buf b = {0};
    struct qx_view v;
    qx_buf_str(&b, "{\"a\": [1], \"b\": \"x\"}");
    assert_false(qx_json_edit_set(&b, "a/b", "1"));
    assert_false(qx_json_edit_set(&b, "c/b", "1"));
    assert_true(qx_json_edit_find(&b, "b", &v));
    assert_int_equal(v.n, 3);
    assert_false(qx_json_edit_find(&b, "c", &v));
    qx_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(edits),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
