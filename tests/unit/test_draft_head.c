/* A smaller draft head: its rows decode to what the head's do, in every stored format (FP8_BLOCK: rounded to
 * bf16); which rows: the given ones, the lowest, or the most frequent of a text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "codes.h"
#include "engine.h"

enum { ROWS = 300, COLS = 256 };

static uint8_t byte_at(uint32_t i, bool finite)
{
    uint8_t b = (uint8_t)((i * 2654435761u) >> 21);
    return finite ? (uint8_t)(b & 0xf7) : b; /* no exponent and mantissa of all ones: no NaN */
}

/* A head of a format with arbitrary codes; the caller frees both arrays. */
static struct qx_weight head(uint8_t fmt)
{
    struct qx_weight w = {.global = fmt == QX_W_FP8 || fmt == QX_W_NVFP4 ? 0.37f : 1.0f, .rows = ROWS, .cols = COLS,
                          .fmt = fmt};
    uint8_t *codes = malloc((size_t)ROWS * COLS * 4), *scale = malloc((size_t)ROWS * COLS);
    assert_true(codes && scale);
    for (uint32_t i = 0; i < ROWS * COLS * 4; ++i) {
        codes[i] = byte_at(i, fmt != QX_W_NVFP4);
    }
    for (uint32_t i = 0; i < ROWS * COLS; ++i) {
        scale[i] = fmt == QX_W_MXFP8 ? (uint8_t)(120 + i % 12) : byte_at(i * 3, true) & 0x7f;
    }
    if (fmt == QX_W_FP8_BLOCK) {
        for (uint32_t i = 0; i < 32; ++i) {
            float f = 0.25f + (float)i;
            memcpy(scale + 4 * i, &f, 4);
        }
    }
    w.codes = codes;
    w.scale = fmt == QX_W_F32 || fmt == QX_W_F16 || fmt == QX_W_BF16 || fmt == QX_W_FP8 ? NULL : scale;
    if (!w.scale) {
        free(scale);
    }
    return w;
}

static struct qx_model *model(uint8_t fmt)
{
    struct qx_error err;
    struct qx_model *m = qx_calloc(1, sizeof *m);
    assert_non_null(m);
    assert_int_equal(qx_backend_cpu_create(&m->be, 1, &err), 0);
    assert_int_equal(m->be->queue_create(m->be, &m->q, &err), 0);
    m->head = head(fmt);
    m->mtp.loaded = true;
    return m;
}

static void end(struct qx_model *m)
{
    free((void *)(uintptr_t)m->head.codes);
    free((void *)(uintptr_t)m->head.scale);
    qx_model_free(m);
}

static void rows_of(struct qx_model *m, struct qx_weight w, const int64_t *row, uint32_t n, bool bf16, void *out)
{
    const struct qx_op_decode_rows a = {.weight = w, .row = row, .n = n, .bf16 = bf16, .out = out};
    assert_int_equal(m->be->ops->decode_rows(m->q, &a), 0);
}

static void check_rows(struct qx_model *m, const uint32_t *ids, uint32_t n)
{
    bool rounded = m->head.fmt == QX_W_FP8_BLOCK;
    int64_t *at = malloc(n * sizeof *at), *from = malloc(n * sizeof *from);
    void *want = malloc((size_t)n * COLS * 4), *got = malloc((size_t)n * COLS * 4);
    assert_int_equal(m->draft_head.rows, n);
    for (uint32_t i = 0; i < n; ++i) {
        at[i] = i;
        from[i] = ids[i];
        assert_int_equal(m->draft_map[i], ids[i]);
    }
    rows_of(m, m->head, from, n, rounded, want);
    rows_of(m, m->draft_head, at, n, rounded, got);
    assert_memory_equal(got, want, (size_t)n * COLS * (rounded ? 2 : 4));
    uint64_t bytes = qx_draft_head_bytes(&m->head, n);
    assert_true(m->info.device_bytes <= bytes);
    free(got);
    free(want);
    free(from);
    free(at);
}

static void test_formats(void **state)
{
    (void)state;
    static const uint8_t formats[] = {QX_W_F32, QX_W_F16, QX_W_BF16, QX_W_FP8, QX_W_FP8_BLOCK, QX_W_MXFP8, QX_W_NVFP4};
    static const uint32_t list[] = {299, 5, 128, 5, 127, 9999, 0, 64}, sorted[] = {0, 5, 64, 127, 128, 299};
    for (size_t i = 0; i < sizeof formats; ++i) {
        struct qx_error err;
        struct qx_model *m = model(formats[i]);
        struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
        o.draft_ids = list;
        o.n_draft_ids = 8;
        assert_int_equal(qx_draft_head_init(m, &o, &err), 0);
        check_rows(m, sorted, 6);
        assert_int_equal(qx_model_learn_drafts(m, list, 1, &err), 0); /* they were given: nothing is learned */
        check_rows(m, sorted, 6);
        end(m);
    }
}

static void test_learned(void **state)
{
    (void)state;
    struct qx_error err;
    struct qx_model *m = model(QX_W_BF16);
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    static const uint32_t low[] = {0, 1, 2, 3}, text[] = {7, 200, 7, 9, 200, 7, 9, 50, 50}, best[] = {7, 9, 50, 200};
    static const uint32_t little[] = {250, 250, 2}, filled[] = {0, 1, 2, 250};
    o.draft_vocab = 4;
    assert_int_equal(qx_draft_head_init(m, &o, &err), 0);
    check_rows(m, low, 4);
    assert_int_equal(qx_model_learn_drafts(m, text, 9, &err), 0);
    check_rows(m, best, 4);
    assert_int_equal(qx_model_learn_drafts(m, little, 3, &err), 0);
    check_rows(m, filled, 4);
    end(m);
    /* All ids, or more: the head itself. */
    m = model(QX_W_BF16);
    o.draft_vocab = ROWS;
    assert_int_equal(qx_draft_head_init(m, &o, &err), 0);
    assert_ptr_equal(m->draft_head.codes, m->head.codes);
    assert_null(m->draft_map);
    end(m);
    /* No id of the vocabulary. */
    m = model(QX_W_BF16);
    static const uint32_t none[] = {4000};
    o = QX_MODEL_OPTS_DEFAULT;
    o.draft_ids = none;
    o.n_draft_ids = 1;
    assert_true(qx_draft_head_init(m, &o, &err) < 0);
    assert_int_equal(err.code, QX_E_USAGE);
    end(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_formats), cmocka_unit_test(test_learned)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
