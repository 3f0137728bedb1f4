/* Worker threads: every iteration once, whatever the number of threads and the grain. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "name_sort.h"
#include "pool.h"

#define N 10007

struct seen { _Atomic uint32_t count[N]; _Atomic uint32_t bad_worker; uint32_t threads; };

static void visit(void *user, uint64_t i, uint32_t worker)
{
    struct seen *s = user;
    atomic_fetch_add(&s->count[i], 1);
    if (worker >= s->threads) {
        atomic_fetch_add(&s->bad_worker, 1);
    }
}

static void each_once(void **state)
{
    (void)state;
    struct seen *s = malloc(sizeof *s);
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct qx_pool *p;
        assert_int_equal(qx_pool_create(&p, threads, NULL), 0);
        for (uint64_t grain = 0; grain < 5000; grain = grain * 3 + 1) {
            memset(s, 0, sizeof *s);
            s->threads = qx_pool_threads(p);
            qx_pool_run(p, N, grain, visit, s);
            for (int i = 0; i < N; i++) {
                assert_int_equal(s->count[i], 1);
            }
            assert_int_equal(s->bad_worker, 0);
        }
        qx_pool_run(p, 0, 1, visit, s);
        qx_pool_destroy(p);
    }
    memset(s, 0, sizeof *s);
    s->threads = 1;
    qx_pool_run(NULL, N, 7, visit, s);
    assert_int_equal(s->count[N - 1], 1);
    qx_pool_destroy(NULL);
    free(s);
}

static int by_name(const void *a, const void *b)
{
    const struct qx_name_key *x = a, *y = b;
    int c = qx_name_compare(x->p, x->n, y->p, y->n);
    return c ? c : (x->i > y->i) - (x->i < y->i);
}

/* Sorted pieces, equal names, prefixes: the same order as a plain sort, stable. */
static void names_sort(void **state)
{
    (void)state;
    enum { MOST = 3000 };
    static char text[MOST][8];
    static struct qx_name_key v[MOST], tmp[MOST], want[MOST];
    uint32_t seed = 7;
    for (size_t n = 0; n < MOST; n = n * 2 + 1) {
        for (uint32_t pieces = 1; pieces < 40; pieces *= 3) {
            for (size_t i = 0; i < n; i++) {
                seed = seed * 1103515245u + 12345u;
                size_t k = pieces == 1 ? i : i % pieces * 50 + (seed >> 16) % 50;
                int len = 0;
                for (; k || len == 0; k /= 7) {
                    text[i][len++] = (char)('a' + k % 7);
                }
                v[i] = want[i] = (struct qx_name_key){text[i], (uint32_t)len, (uint32_t)i};
            }
            qsort(want, n, sizeof *want, by_name);
            qx_name_sort(v, tmp, n);
            assert_memory_equal(v, want, n * sizeof *v);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_once), cmocka_unit_test(names_sort)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
