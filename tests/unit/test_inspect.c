/* The views of qx inspect: differences, statistics, plots; and that memory that runs out at any place
 * gives an error and no leak. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "plot.h"
#include "qx.h"

static const char *micro(const char *layout)
{
    static char path[1024];
    const char *base = getenv("QX_TEST_DATA");
    snprintf(path, sizeof path, "%s/micro/%s", base ? base : ".", layout);
    return path;
}

static struct qx_ckpt *open_micro(const char *layout)
{
    struct qx_ckpt *ck = NULL;
    assert_int_equal(qx_ckpt_open(&ck, micro(layout), NULL, NULL), 0);
    return ck;
}

static size_t count_kind(const struct qx_findings *fs, const char *kind)
{
    size_t n = 0;
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        n += strcmp(qx_findings_at(fs, i)->kind, kind) == 0;
    }
    return n;
}

static void test_diff(void **state)
{
    struct qx_ckpt *a = open_micro("mixed");
    struct qx_ckpt *b = open_micro("nvfp4");
    struct qx_findings *fs = NULL;
    (void)state;
    assert_int_equal(qx_ckpt_diff(&fs, a, a, true, NULL), 0);
    assert_int_equal(qx_findings_count(fs), 0);
    qx_findings_free(fs);
    assert_int_equal(qx_ckpt_diff(&fs, a, b, false, NULL), 0);
    /* 12 block-FP8 modules of the MTP experts with their scales against two fused tensors */
    assert_int_equal(count_kind(fs, "diff-removed"), 24);
    assert_int_equal(count_kind(fs, "diff-added"), 2);
    assert_int_equal(count_kind(fs, "diff-dtype"), 0);
    assert_true(count_kind(fs, "diff-config") > 0);
    qx_findings_free(fs);
    qx_ckpt_close(b);
    b = open_micro("bf16");
    assert_int_equal(qx_ckpt_diff(&fs, a, b, true, NULL), 0);
    assert_int_equal(count_kind(fs, "diff-dtype"), 5); /* the table's shards */
    qx_findings_free(fs);
    qx_ckpt_close(a);
    qx_ckpt_close(b);
}

static void test_stats(void **state)
{
    struct qx_ckpt *ck = open_micro("mixed");
    struct qx_value_stats s;
    struct qx_error err = {0};
    uint64_t sum = 0;
    (void)state;
    assert_int_equal(qx_tensor_stats(ck, "model.language_model.layers.1.ple.ple_embedding."
                                         "ngram_heads_vocab_sizes", &s, NULL), 0);
    assert_int_equal(s.n, 2);
    assert_true(s.min == 307 && s.max == 311 && s.mean == 309);
    assert_int_equal(qx_tensor_stats(ck, "model.language_model.layers.0.mlp.experts.0.up_proj.weight", &s,
                                     NULL), 0);
    assert_int_equal(s.n, 160 * 64); /* the unpacked matrix */
    assert_int_equal(s.n_nan + s.n_inf, 0);
    assert_true(s.min < 0 && s.max > 0 && s.amax == fmax(-s.min, s.max));
    for (size_t i = 0; i < QX_STATS_BINS; i++) {
        sum += s.bin[i];
    }
    assert_int_equal(sum, s.n);
    assert_true(qx_tensor_stats(ck, "no.such.tensor", &s, &err) < 0);
    assert_int_equal(err.code, QX_E_NOT_FOUND);
    qx_ckpt_close(ck);
}

static void test_plots(void **state)
{
    static const uint64_t v[8] = {0, 1, 2, 4, 8, 4, 1, 0};
    static const uint64_t zero[4] = {0};
    static const double x[3] = {1, 10, 100};
    static const double y[3] = {3, NAN, 1};
    static const char *const names[1] = {"a <b>"};
    struct qx_buf b = {0};
    struct qx_svg svg;
    (void)state;
    qx_plot_spark(&b, v, 8, true);
    assert_string_equal(qx_buf_cstr(&b), " .:=@=. "); /* eight heights: 1/8 is the lowest, all the last */
    qx_buf_fini(&b);
    qx_plot_spark(&b, zero, 4, false);
    assert_string_equal(qx_buf_cstr(&b), "    ");
    qx_buf_fini(&b);
    qx_plot_bars(&b, v, 8, 0, 8, 4, 10, true);
    assert_string_equal(qx_buf_cstr(&b), "           0             1  #\n"
                                         "           2             6  #####\n"
                                         "           4            12  ##########\n"
                                         "           6             1  #\n");
    qx_buf_fini(&b);
    qx_svg_begin(&svg, "title & more", 3);
    qx_svg_bars(&svg, "bars", v, 8, 0, 8);
    qx_svg_bars(&svg, "nothing", zero, 4, 0, 1);
    qx_svg_lines(&svg, "lines", "x", "y", names, x, y, 1, 3, true);
    qx_svg_end(&svg);
    const char *text = qx_buf_cstr(&svg.buf);
    assert_non_null(text);
    assert_non_null(strstr(text, "title &amp; more"));
    assert_non_null(strstr(text, "a &lt;b&gt;"));
    assert_null(strstr(text, "nan"));
    assert_string_equal(text + strlen(text) - 7, "</svg>\n");
    qx_buf_fini(&svg.buf);
}

/* Everything inspect does on one checkpoint; 0 or the code of the first failure. */
static int all_of_it(struct qx_error *err)
{
    struct qx_open how = QX_OPEN_DEFAULT;
    struct qx_ckpt *ck = NULL;
    struct qx_inspection *in = NULL;
    char *why = NULL;
    how.n_threads = 1; /* allocations in a fixed order */
    int rc = qx_ckpt_open(&ck, micro("mixed"), &how, err);
    rc = rc ? rc : qx_inspect(&in, ck, NULL, err);
    rc = rc ? rc : qx_inspect_why(ck, "model.language_model.layers.0.mlp.experts", &why, err);
    qx_text_free(why);
    qx_inspection_free(in);
    qx_ckpt_close(ck);
    return rc;
}

static void test_memory_runs_out(void **state)
{
    struct qx_error err = {0};
    uint64_t live = qx_alloc_live();
    (void)state;
    assert_int_equal(all_of_it(&err), 0);
    assert_int_equal(qx_alloc_live(), live);
    uint64_t total = 1000000; /* allocations of one run, found by the first pass */
    for (int sticky = 1; sticky >= 0; sticky--) {
        uint64_t step = 1;
        for (uint64_t n = 1; n <= total; n += step) {
            qx_alloc_fail_at(n, sticky == 1);
            memset(&err, 0, sizeof err);
            int rc = all_of_it(&err);
            qx_alloc_fail_at(0, false);
            assert_int_equal(qx_alloc_live(), live);
            if (rc == 0 && sticky) {
                total = n; /* past the last one */
                break;
            }
            if (rc != 0) {
                assert_int_equal(err.code, QX_E_NOMEM);
            }
            step = n < 300 ? 1 : n / 97;
        }
    }
    assert_true(total > 100 && total < 1000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_diff),
        cmocka_unit_test(test_stats),
        cmocka_unit_test(test_plots),
        cmocka_unit_test(test_memory_runs_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
