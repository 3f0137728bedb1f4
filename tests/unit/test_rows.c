/* Rows of the micro checkpoints: by themselves, in any order, through the reference backend, as stored. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "ckpt.h"
#include "resolve.h"
#include "rows.h"

static const char *const names[] = {"bf16", "fp8", "mixed", "nvfp4", "nvfp4-ple"};

/* Rows one by one, backwards with repeats, and by the backend, have equal bytes. */
static void same_any_way(struct qx_rows *r, struct qx_backend *be)
{
    struct qx_error err = {0};
    uint64_t n = qx_rows_count(r), width = qx_rows_width(r);
    n = n < 700 ? n : 700;
    uint64_t *ids = malloc((2 * n + 1) * sizeof *ids);
    float *all = malloc(n * width * sizeof *all + 1), *any = malloc(2 * n * width * sizeof *any + 1);
    uint16_t *half = malloc(n * width * 2 + 1), *half2 = malloc(n * width * 2 + 1);
    assert_int_equal(qx_rows_read_range(r, 0, n, QX_ROW_F32, all, &err), 0);
    for (uint64_t i = 0; i < n; i += 13) {
        assert_int_equal(qx_rows_read(r, &i, 1, QX_ROW_F32, any, &err), 0);
        assert_memory_equal(any, all + i * width, width * sizeof *all);
    }
    for (uint64_t i = 0; i < 2 * n; i++) {
        ids[i] = (n - 1 - i % n) / (1 + i % 3);
    }
    assert_int_equal(qx_rows_read(r, ids, 2 * n, QX_ROW_F32, any, &err), 0);
    for (uint64_t i = 0; i < 2 * n; i++) {
        assert_memory_equal(any + i * width, all + ids[i] * width, width * sizeof *all);
    }
    if (qx_rows_format(r) != QX_F_NONE && qx_rows_format(r) != QX_F_I64) {
        for (uint64_t i = 0; i < n; i++) {
            ids[i] = i;
        }
        assert_int_equal(qx_rows_read_device(r, be, ids, n, QX_ROW_F32, any, &err), 0);
        assert_memory_equal(any, all, n * width * sizeof *all);
        assert_int_equal(qx_rows_read_range(r, 0, n, QX_ROW_BF16, half, &err), 0);
        assert_int_equal(qx_rows_read_device(r, be, ids, n, QX_ROW_BF16, half2, &err), 0);
        assert_memory_equal(half, half2, n * width * 2);
    }
    uint64_t bad = qx_rows_count(r);
    assert_int_equal(qx_rows_read(r, &bad, 1, QX_ROW_F32, any, &err), -QX_E_RANGE);
    assert_string_equal(err.kind, "row-out-of-range");
    free(ids);
    free(all);
    free(any);
    free(half);
    free(half2);
}

static void micro(void **unused)
{
    (void)unused;
    const char *data = getenv("QX_TEST_DATA");
    struct qx_backend *be;
    struct qx_error err = {0};
    if (data == NULL) {
        printf("no QX_TEST_DATA: SKIP\n");
        skip();
    }
    assert_int_equal(qx_backend_cpu_create(&be, 1, &err), 0);
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        char path[512];
        struct qx_ckpt *ck;
        struct qx_rows *r;
        snprintf(path, sizeof path, "%s/micro/%s", data, names[k]);
        assert_int_equal(qx_ckpt_open(&ck, path, &QX_OPEN_DEFAULT, &err), 0);
        assert_int_equal(qx_rows_open_table(&r, ck, &err), 0);
        same_any_way(r, be);
        uint64_t n = qx_rows_count(r), code = qx_rows_raw_bytes(r), scale = qx_rows_scale_bytes(r);
        uint8_t *a = malloc(n * code + 1), *b = malloc(n * code + 1), *s = malloc(n * scale + 1),
                *t = malloc(n * scale + 1);
        assert_int_equal(qx_rows_read_range(r, 0, n, QX_ROW_RAW, a, &err), 0);
        assert_int_equal(qx_rows_read_stored(r, 0, n, b, s, &err), 0);
        assert_memory_equal(a, b, n * code);
        if (scale > 0) {
            assert_int_equal(qx_rows_read_range(r, 0, n, QX_ROW_SCALES, t, &err), 0);
            assert_memory_equal(s, t, n * scale);
        }
        free(a);
        free(b);
        free(s);
        free(t);
        qx_rows_close(r);
        /* One module of every format and component. */
        const struct qx_resolved *res = qx_ckpt_resolved(ck);
        bool seen[QX_F_COUNT][QX_C_COUNT] = {{false}};
        for (size_t i = 0; i < qx_resolved_n_modules(res); i++) {
            const struct qx_module *m = qx_resolved_module(res, i);
            if (m->weight == NULL || seen[m->format][m->component]) {
                continue;
            }
            seen[m->format][m->component] = true;
            assert_int_equal(qx_rows_open_tensor(&r, ck, m->weight->name, &err), 0);
            same_any_way(r, be);
            qx_rows_close(r);
        }
        assert_true(qx_rows_open_tensor(&r, ck, "no.such.tensor", &err) < 0);
        assert_null(r);
        qx_ckpt_close(ck);
    }
    be->destroy(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(micro)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
