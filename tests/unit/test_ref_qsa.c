/* Sparse attention of the reference: block selection, attention, rotary embedding through the caches. */
#include "ref_ops.h"

enum { HEADS = 4, KV = 2, DIM = 32, IH = 4, ID = 16, RATIO = 4, BUDGET = 3, PT = 8, LEN = 60 };

struct attn {
    struct qx_kv kv;
    int32_t table[8];
    float *in, *q, *iq, *o, *scratch, *scores;
    int32_t block[LEN * BUDGET], n_block[LEN];
    float freq[8], norm[DIM];
    uint64_t stride;
};

static void attn_init(struct attn *a)
{
    memset(a, 0, sizeof *a);
    /* Pages out of order, so that the table is used. */
    for (int i = 0; i < 8; ++i) {
        a->table[i] = (i * 5 + 3) % 8;
    }
    a->stride = 2 * HEADS * DIM + 2 * KV * DIM + (IH + 1) * ID;
    a->kv = (struct qx_kv){.k = zeros(8 * PT * KV * DIM), .v = zeros(8 * PT * KV * DIM),
                           .raw = zeros(8 * PT * ID), .pooled = zeros(8 * PT / RATIO * ID),
                           .page_table = a->table, .page_tokens = PT, .max_pages = 8};
    a->in = randoms(LEN * a->stride, 1.0f);
    a->q = zeros(LEN * HEADS * DIM);
    a->iq = zeros(LEN * IH * ID);
    a->o = zeros(LEN * HEADS * DIM);
    a->scratch = zeros(LEN * HEADS * (DIM + 2) * QX_ATTEND_SPLITS);
    a->scores = zeros(LEN * 16);
    for (int i = 0; i < 8; ++i) {
        a->freq[i] = (float)pow(1e4, -2.0 * i / 16);
    }
}
static void attn_fini(struct attn *a)
{
    free(a->kv.k);
    free(a->kv.v);
    free(a->kv.raw);
    free(a->kv.pooled);
    free(a->in);
    free(a->q);
    free(a->iq);
    free(a->o);
    free(a->scratch);
    free(a->scores);
}

static void attn_prepare(struct attn *a, struct rows *r, uint32_t at)
{
    struct qx_op_qsa_prepare p = {
        .step = &r->s, .n_heads = HEADS, .n_kv_heads = KV, .head_dim = DIM, .i_heads = IH, .i_dim = ID,
        .ratio = RATIO, .in = a->in + at * a->stride, .in_stride = a->stride, .q_norm = a->norm,
        .k_norm = a->norm, .iq_norm = a->norm, .ik_norm = a->norm, .eps = 1e-6f,
        .rope = {a->freq, 16, 1.0f}, .kv = a->kv, .q = a->q + at * HEADS * DIM, .iq = a->iq + at * IH * ID};
    assert_int_equal(be->ops->qsa_prepare(q, &p), 0);
}
static void attn_rest(struct attn *a, struct rows *r, uint32_t at, uint32_t budget)
{
    struct qx_op_qsa_select s = {.step = &r->s, .i_heads = IH, .i_dim = ID, .ratio = RATIO,
                                 .budget_blocks = budget, .iq = a->iq + at * IH * ID, .kv = a->kv,
                                 .max_blocks = 16, .scores = a->scores, .block = a->block + at * BUDGET,
                                 .n_block = a->n_block + at};
    assert_int_equal(be->ops->qsa_select(q, &s), 0);
    struct qx_op_qsa_attend t = {.step = &r->s, .n_heads = HEADS, .n_kv_heads = KV, .head_dim = DIM,
                                 .ratio = RATIO, .budget_blocks = budget, .q = a->q + at * HEADS * DIM,
                                 .in = a->in + at * a->stride, .in_stride = a->stride, .kv = a->kv,
                                 .block = a->block + at * BUDGET, .n_block = a->n_block + at,
                                 .o = a->o + at * HEADS * DIM, .scratch = a->scratch};
    assert_int_equal(be->ops->qsa_attend(q, &t), 0);
}
static size_t kv_row(const struct attn *a, uint32_t pos)
{
    return (size_t)a->table[pos / PT] * PT + pos % PT;
}
static bool selected(const struct attn *a, uint32_t row, int32_t b)
{
    for (int32_t i = 0; i < a->n_block[row]; ++i) {
        if (a->block[row * BUDGET + (uint32_t)i] == b) {
            return true;
        }
    }
    return false;
}

static void test_attention(void **state)
{
    (void)state;
    struct attn a, b;
    struct rows r;
    attn_init(&a);
    attn_prepare(&a, make_rows(&r, LEN, 0, -1, -1), 0);
    attn_rest(&a, &r, 0, BUDGET);
    for (uint32_t p = 0; p < LEN; ++p) {
        uint32_t n = p + 1, nb = n / RATIO, want = nb < BUDGET ? nb : BUDGET;
        assert_int_equal(a.n_block[p], want); /* 3: size = 4 min(budget, n div 4) + n mod 4 with the tail */
        for (uint32_t i = 0; i < want; ++i) {
            int32_t blk = a.block[p * BUDGET + i];
            assert_true(blk >= 0 && (uint32_t)blk < nb);
            assert_true(i == 0 || a.block[p * BUDGET + i - 1] < blk);
        }
        /* 5: nothing left out scores more than anything taken; ties go to the lower block. */
        double lowest = INFINITY, best_out = -1.0;
        int32_t lowest_at = -1, out_at = -1;
        for (int32_t k = 0; k < (int32_t)nb; ++k) {
            double s = 0;
            const float *key = (const float *)a.kv.pooled + kv_row(&a, (uint32_t)k * RATIO) / RATIO * ID;
            for (int h = 0; h < IH; ++h) {
                double d = 0;
                for (int i = 0; i < ID; ++i) {
                    d += (double)a.iq[(p * IH + (uint32_t)h) * ID + (uint32_t)i] * key[i];
                }
                s += d > 0 ? d : 0;
            }
            s = (double)(float)s;
            if (selected(&a, p, k)) {
                if (s <= lowest) {
                    lowest = s;
                    lowest_at = k;
                }
            } else if (s > best_out) {
                best_out = s;
                out_at = k;
            }
        }
        assert_true(best_out < lowest + 1e-6);
        if (best_out == lowest) {
            assert_true(lowest_at < out_at);
        }
        /* Attention over exactly that set, computed the plain way. */
        for (uint32_t h = 0; h < HEADS; ++h) {
            double w[LEN], sum = 0, max = -INFINITY, o[DIM] = {0};
            for (uint32_t j = 0; j <= p; ++j) {
                bool in = j >= nb * RATIO || selected(&a, p, (int32_t)(j / RATIO));
                const float *key = (const float *)a.kv.k + (kv_row(&a, j) * KV + h / 2) * DIM;
                w[j] = -INFINITY;
                if (in) {
                    w[j] = 0;
                    for (uint32_t i = 0; i < DIM; ++i) {
                        w[j] += (double)a.q[(p * HEADS + h) * DIM + i] * key[i] / sqrt(DIM);
                    }
                }
                max = w[j] > max ? w[j] : max;
            }
            for (uint32_t j = 0; j <= p; ++j) {
                w[j] = exp(w[j] - max);
                sum += w[j];
            }
            float want_o[DIM];
            for (uint32_t i = 0; i < DIM; ++i) {
                for (uint32_t j = 0; j <= p; ++j) {
                    o[i] += w[j] / sum * ((const float *)a.kv.v)[(kv_row(&a, j) * KV + h / 2) * DIM + i];
                }
                double gate = a.in[p * a.stride + (2 * h + 1) * DIM + i];
                want_o[i] = (float)(o[i] / (1 + exp(-gate)));
            }
            assert_true(rel_l2(a.o + (p * HEADS + h) * DIM, want_o, DIM) < 1e-6);
        }
    }

    /* 6: an unselected block's values have no influence, a selected one's have. */
    float before[HEADS * DIM];
    make_rows(&r, 1, LEN - 1, -1, -1);
    memcpy(before, a.o + (LEN - 1) * HEADS * DIM, sizeof before);
    for (int32_t blk = 0; blk < LEN / RATIO; ++blk) {
        float *v = (float *)a.kv.v + kv_row(&a, (uint32_t)blk * RATIO) * KV * DIM, old = v[3];
        v[3] += 5.0f;
        attn_rest(&a, &r, LEN - 1, BUDGET);
        bool same = memcmp(before, a.o + (LEN - 1) * HEADS * DIM, sizeof before) == 0;
        assert_int_equal(same, !selected(&a, LEN - 1, blk));
        v[3] = old;
    }

    /* 7: pooled keys and outputs do not depend on where chunks end. 4: and within the budget the set is
     * every position, so that a larger budget changes nothing. */
    uint64_t keep = rng;
    for (uint32_t chunk = 1; chunk < 9; ++chunk) {
        rng = 1;
        attn_init(&b);
        memcpy(b.in, a.in, LEN * a.stride * 4);
        for (uint32_t at = 0; at < LEN; at += chunk) {
            uint32_t n = LEN - at < chunk ? LEN - at : chunk;
            make_rows(&r, n, (int32_t)at, -1, -1);
            attn_prepare(&b, &r, at);
            attn_rest(&b, &r, at, BUDGET);
        }
        assert_memory_equal(a.kv.pooled, b.kv.pooled, LEN / RATIO * ID * 4);
        attn_rest(&a, make_rows(&r, LEN, 0, -1, -1), 0, BUDGET);
        assert_memory_equal(a.o, b.o, LEN * HEADS * DIM * 4);
        attn_fini(&b);
    }
    rng = keep;
    attn_fini(&a);
}

/* ---- 21: rotary embedding, through the caches --------------------------------------------- */

static void test_rope(void **state)
{
    (void)state;
    struct attn a;
    struct rows r;
    attn_init(&a);
    for (uint32_t i = 1; i < LEN; ++i) {
        memcpy(a.in + i * a.stride, a.in, a.stride * 4); /* the same token everywhere */
    }
    attn_prepare(&a, make_rows(&r, LEN, 0, -1, -1), 0);
    const float *k0 = (const float *)a.kv.k + kv_row(&a, 0) * KV * DIM;
    for (uint32_t p = 0; p < LEN; ++p) {
        const float *k = (const float *)a.kv.k + kv_row(&a, p) * KV * DIM;
        for (uint32_t i = 0; i < 8; ++i) {
            double n0 = (double)k0[i] * k0[i] + (double)k0[i + 8] * k0[i + 8];
            double n = (double)k[i] * k[i] + (double)k[i + 8] * k[i + 8];
            assert_true(fabs(n - n0) < 1e-5); /* the length of a pair stays */
        }
        assert_memory_equal(k + 16, k0 + 16, 16 * 4); /* unrotated dimensions stay */
    }
    /* q . k depends on the difference of positions only. */
    for (uint32_t diff = 0; diff < 9; ++diff) {
        double first = 0;
        for (uint32_t p = 0; p + diff < LEN; p += 11) {
            const float *k = (const float *)a.kv.k + kv_row(&a, p) * KV * DIM;
            const float *qq = a.q + (p + diff) * HEADS * DIM;
            double dot = 0;
            for (uint32_t i = 0; i < DIM; ++i) {
                dot += (double)qq[i] * k[i];
            }
            first = p ? first : dot;
            assert_true(fabs(dot - first) < 2e-4 * DIM);
        }
    }
    attn_fini(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_attention), cmocka_unit_test(test_rope)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
