/* The table of findings: sorted, unique, in one style; each id is found; every severity is one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "rules.h"

#include <ctype.h>
#include <string.h>

static void test_table(void **state)
{
    size_t n;
    const struct qx_rule *r = qx_rules_table(&n);
    (void)state;
    assert_true(n > 60);
    for (size_t i = 0; i < n; ++i) {
        size_t len = strlen(r[i].text);
        if (i) {
            assert_true(strcmp(r[i - 1].id, r[i].id) < 0);
        }
        assert_ptr_equal(qx_rule_find(r[i].id), &r[i]);
        for (const char *p = r[i].id; *p; ++p) {
            assert_true(islower((unsigned char)*p) || isdigit((unsigned char)*p) || *p == '-');
        }
        assert_true(len > 10 && r[i].text[len - 1] != '.');
        assert_false(isspace((unsigned char)r[i].text[0]));
        assert_true(r[i].severities > 0 && r[i].severities < 8);
        assert_true(r[i].origin < QX_RO_COUNT);
        assert_true(strlen(qx_rule_origin_name(r[i].origin)) > 0);
    }
    assert_null(qx_rule_find("no-such-rule"));
    assert_null(qx_rule_find(""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_table)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
