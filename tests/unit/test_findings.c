/* Lists of findings: grouping, order, copies, memory that runs out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "findings.h"

static void groups_and_order(void **state)
{
    (void)state;
    struct qx_findings *fs = qx_findings_create();
    char name[32];
    for (int i = 0; i < 1000; i++) {
        snprintf(name, sizeof name, "tensor.%d", i);
        assert_true(qx_findings_add(fs, &QX_REPORT("missing-scale", QX_ERROR, .tensor = name, .text = "t",
                                                   .group = i % 2 ? "odd" : "even")));
    }
    assert_true(qx_findings_add(fs, &QX_REPORT("a-note", QX_NOTE, .text = "t", .file = "f")));
    assert_true(qx_findings_add(fs, &QX_REPORT("stray-file", QX_WARNING, .text = "t", .file = "b")));
    assert_true(qx_findings_add(fs, &QX_REPORT("stray-file", QX_WARNING, .text = "t", .file = "a")));
    assert_true(qx_findings_add(fs, &QX_REPORT("missing-scale", QX_WARNING, .text = "t", .tensor = "w", .group = "odd")));
    qx_findings_sort(fs);
    assert_int_equal(qx_findings_count(fs), 6);
    assert_int_equal(qx_findings_count_severity(fs, QX_ERROR), 2);
    assert_int_equal(qx_findings_count_severity(fs, QX_WARNING), 3);
    const struct qx_finding *f = qx_findings_at(fs, 0);
    assert_string_equal(f->tensor, "tensor.0");
    assert_int_equal(f->count, 500);
    assert_int_equal(f->n_examples, QX_MAX_EXAMPLES);
    assert_string_equal(f->examples[4], "tensor.8");
    assert_string_equal(qx_findings_at(fs, 3)->file, "a");
    assert_string_equal(qx_findings_at(fs, 4)->file, "b");
    assert_string_equal(qx_findings_at(fs, 5)->kind, "a-note");
    assert_null(qx_findings_at(fs, 6));
    assert_true(qx_findings_set_text(fs, 5, "new"));
    assert_string_equal(qx_findings_at(fs, 5)->text, "new");
    qx_findings_destroy(fs);
}

static void append_merges(void **state)
{
    (void)state;
    struct qx_findings *a = qx_findings_create(), *b = qx_findings_create();
    qx_findings_add(a, &QX_REPORT("k", QX_ERROR, .text = "t", .tensor = "a1", .group = "g"));
    qx_findings_add(b, &QX_REPORT("k", QX_ERROR, .text = "t", .tensor = "b1", .group = "g"));
    qx_findings_add(b, &QX_REPORT("k", QX_ERROR, .text = "t", .tensor = "b2", .group = "g", .count = 7));
    qx_findings_add(b, &QX_REPORT("k", QX_ERROR, .text = "t", .tensor = "c"));
    assert_true(qx_findings_append(a, b));
    qx_findings_destroy(b);
    assert_int_equal(qx_findings_count(a), 2);
    const struct qx_finding *f = qx_findings_at(a, 0);
    assert_int_equal(f->count, 9);
    assert_int_equal(f->n_examples, 3);
    assert_string_equal(f->examples[2], "b2");
    qx_findings_destroy(a);
}

static void runs_out_of_memory(void **state)
{
    (void)state;
    uint64_t before = qx_alloc_live();
    for (uint64_t n = 1; n < 60; n++) {
        qx_alloc_fail_at(n, false);
        struct qx_findings *fs = qx_findings_create();
        bool ok = fs != NULL;
        char name[64];
        for (int i = 0; i < 200 && fs; i++) {
            snprintf(name, sizeof name, "a.rather.long.name.of.a.tensor.%d", i);
            ok = qx_findings_add(fs, &QX_REPORT("k", QX_ERROR, .text = "t", .tensor = name, .group = name)) && ok;
        }
        qx_alloc_fail_at(0, false);
        assert_true(!fs || qx_findings_failed(fs) == !ok);
        qx_findings_destroy(fs);
        assert_int_equal(qx_alloc_live(), before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(groups_and_order), cmocka_unit_test(append_merges),
                                       cmocka_unit_test(runs_out_of_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
