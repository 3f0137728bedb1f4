/* Heap hooks and arena: failing on demand, counting, alignment. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "alloc.h"

static void fails_on_demand(void **state)
{
    (void)state;
    uint64_t before = qx_alloc_live();
    qx_alloc_fail_at(2, false);
    void *a = qx_malloc(1), *b = qx_malloc(1), *c = qx_calloc(1, 1);
    assert_non_null(a);
    assert_null(b);
    assert_non_null(c);
    qx_alloc_fail_at(1, true);
    assert_null(qx_malloc(1));
    assert_null(qx_realloc(a, 100));
    assert_null(qx_strdup("x"));
    qx_alloc_fail_at(0, false);
    assert_int_equal(qx_alloc_live(), before + 2);
    qx_free(a);
    qx_free(c);
    qx_free(NULL);
    assert_int_equal(qx_alloc_live(), before);
}

static void refuses_overflow(void **state)
{
    (void)state;
    assert_null(qx_calloc(SIZE_MAX / 2, 3));
    void *p = NULL;
    size_t cap = 0;
    assert_false(qx_grow(&p, &cap, SIZE_MAX / 2, 16));
    assert_null(p);
    assert_int_equal(cap, 0);
    struct qx_arena *a = qx_arena_create();
    assert_null(qx_arena_alloc(a, SIZE_MAX - 8, 8));
    assert_non_null(qx_arena_alloc(a, 8, 8));
    qx_arena_destroy(a);
}

static void grows(void **state)
{
    (void)state;
    uint64_t *v = NULL;
    size_t cap = 0;
    for (size_t i = 0; i < 1000; i++) {
        void *p = v;
        assert_true(qx_grow(&p, &cap, i + 1, sizeof *v));
        v = p;
        v[i] = i * i;
    }
    for (size_t i = 0; i < 1000; i++) {
        assert_int_equal(v[i], i * i);
    }
    qx_free(v);
}

static void arena_pieces(void **state)
{
    (void)state;
    uint64_t before = qx_alloc_live();
    struct qx_arena *a = qx_arena_create();
    char *p[300];
    for (size_t i = 0; i < 300; i++) { /* sizes around every chunk boundary, small and large */
        size_t n = i * i * 7 % 9000, align = (size_t)1 << i % 5;
        p[i] = qx_arena_alloc(a, n + 1, align);
        assert_non_null(p[i]);
        assert_int_equal((uintptr_t)p[i] % align, 0);
        memset(p[i], (int)(i & 0xff), n + 1);
    }
    for (size_t i = 0; i < 300; i++) {
        size_t n = i * i * 7 % 9000;
        for (size_t k = 0; k <= n; k++) {
            assert_int_equal((unsigned char)p[i][k], i & 0xff);
        }
    }
    char *s = qx_arena_strndup(a, "abcdef", 3);
    assert_string_equal(s, "abc");
    qx_arena_destroy(a);
    qx_arena_destroy(NULL);
    assert_int_equal(qx_alloc_live(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(fails_on_demand), cmocka_unit_test(refuses_overflow),
                                       cmocka_unit_test(grows), cmocka_unit_test(arena_pieces)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
