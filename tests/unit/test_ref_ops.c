/* Properties of the reference ops that the model description promises, checked on the ops themselves:
 * n-gram context, block selection and attention, Gated DeltaNet, hyper-connection, PLE, experts, rotary
 * embedding, sampling. Numbers in comments are those of the list of invariants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "backend.h"
#include "codes.h"
#include "ops.h"
#include "rand.h"

static struct qx_backend *be;
static struct qx_queue *q;
static uint64_t rng = 1;

static int setup(void **state)
{
    (void)state;
    return qx_backend_cpu_create(&be, 2, NULL) || be->queue_create(be, &q, NULL);
}
static int teardown(void **state)
{
    (void)state;
    be->queue_destroy(q);
    be->destroy(be);
    return qx_alloc_live() != 0;
}

static float frand(void)
{
    rng = qx_mix64(rng);
    return (float)((double)(rng >> 11) * 0x1p-53 * 2.0 - 1.0);
}
static float *randoms(size_t n, float scale)
{
    float *p = malloc(n * 4);
    for (size_t i = 0; i < n; ++i) {
        p[i] = frand() * scale;
    }
    return p;
}
static float *zeros(size_t n)
{
    return calloc(n, 4);
}
static struct qx_weight f32_weight(const float *p, uint32_t rows, uint32_t cols)
{
    return (struct qx_weight){.codes = p, .global = 1.0f, .rows = rows, .cols = cols, .fmt = QX_W_F32};
}

/* A step of one run: positions pos0.., states from `in`, the last row's to `out`. */
#define MAX_ROWS 160
struct rows {
    int32_t id[MAX_ROWS], pos[MAX_ROWS], seq[MAX_ROWS], first[MAX_ROWS], in[MAX_ROWS], out[MAX_ROWS];
    struct qx_step s;
};
static struct rows *make_rows(struct rows *r, uint32_t n, int32_t pos0, int32_t in, int32_t out)
{
    for (uint32_t i = 0; i < n; ++i) {
        r->id[i] = 0;
        r->pos[i] = pos0 + (int32_t)i;
        r->seq[i] = 0;
        r->first[i] = 0;
        r->in[i] = in;
        r->out[i] = i + 1 == n ? out : -1;
    }
    r->s = (struct qx_step){n, r->id, r->pos, r->seq, r->first, r->in, r->out};
    return r;
}

static double rel(const float *a, const float *b, size_t n)
{
    double d = 0, s = 0;
    for (size_t i = 0; i < n; ++i) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        s += (double)b[i] * b[i];
    }
    return sqrt(d / (s > 0 ? s : 1));
}

/* ---- 2: n-gram context -------------------------------------------------------------------- */

static void ids_of(const int32_t *ids, uint32_t n, uint32_t chunk, int64_t *row)
{
    static const uint64_t mult[3] = {23703573157769u, 20109073645365u, 8052911324071u};
    static const uint64_t size[16] = {20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069,
                                      20000077, 20000081, 20000093, 20000107, 20000147, 20000153, 20000159,
                                      20000161, 20000171};
    uint64_t offset[16] = {0};
    int32_t prev[2] = {-7, -7};
    for (int i = 1; i < 16; ++i) {
        offset[i] = offset[i - 1] + size[i - 1];
    }
    for (uint32_t at = 0; at < n; at += chunk) {
        struct rows r;
        uint32_t take = n - at < chunk ? n - at : chunk;
        make_rows(&r, take, (int32_t)at, at ? 0 : -1, 0);
        memcpy(r.id, ids + at, take * 4);
        struct qx_op_ple_ids a = {.step = &r.s, .ngram_size = 3, .n_heads = 16, .heads_per_ngram = 8,
                                  .eos = 248044, .multiplier = mult, .size = size, .offset = offset,
                                  .prev = prev, .prev_slot_stride = 2, .row = row + at * 16};
        assert_int_equal(be->ops->ple_ids(q, &a), 0);
    }
}

static void test_ngram(void **state)
{
    (void)state;
    int64_t a[8 * 16], b[8 * 16];
    const int32_t one[] = {9419, 11};
    static const int64_t want1[16] = {2719687, 25344284, 46798474, 76993254, 83021999, 111728594, 124816772,
                                      142320644, 167808581, 183572719, 210276485, 230623202, 241922991,
                                      273548433, 284162581, 317775660};
    ids_of(one, 2, 2, a);
    assert_memory_equal(a + 16, want1, sizeof want1);
    assert_int_equal(a[0], 6783314);
    const int32_t cut[] = {9419, 248044, 11, 1814};
    static const int64_t want2[16] = {13555483, 24877159, 54278900, 63631058, 98394898, 117447587, 136774765,
                                      157274238, 173487882, 192109366, 213364329, 236577563, 258758149,
                                      262164274, 283572184, 312653920};
    ids_of(cut, 4, 4, a);
    assert_memory_equal(a + 32, want2, sizeof want2);
    /* An end of text hides what is before it, its own does not: position 3 shares the pair heads with the
     * same pair elsewhere and not the triple heads. */
    const int32_t plain[] = {9419, 11, 1814};
    ids_of(plain, 3, 3, b);
    assert_memory_equal(a + 48, b + 32, 8 * 8);
    assert_memory_not_equal(a + 56, b + 40, 8 * 8);
    const int32_t mixed[] = {5, 248044, 248044, 7, 8, 248044, 9, 10};
    ids_of(mixed, 8, 8, a);
    for (uint32_t chunk = 1; chunk < 8; ++chunk) {
        ids_of(mixed, 8, chunk, b);
        assert_memory_equal(a, b, sizeof a);
    }
}

/* ---- 3 to 7: sparse attention ------------------------------------------------------------- */

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
            assert_true(rel(a.o + (p * HEADS + h) * DIM, want_o, DIM) < 1e-6);
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

/* ---- 12, 13: Gated DeltaNet --------------------------------------------------------------- */

enum { KH = 2, VH = 4, KD = 16, VD = 8, CH = 2 * KH * KD + VH * VD, ROWS = 150 };

struct gdn {
    float *in, *conv_w, a_log[VH], dt[VH], norm[VD], *conv, *s, *out, *scratch;
    uint64_t stride;
};
static void gdn_init(struct gdn *g)
{
    g->stride = CH + VH * VD + 2 * VH;
    g->in = randoms(ROWS * g->stride, 1.5f);
    g->conv_w = randoms(CH * 4, 0.7f);
    for (int i = 0; i < VH; ++i) {
        g->a_log[i] = frand();
        g->dt[i] = frand();
    }
    for (int i = 0; i < VD; ++i) {
        g->norm[i] = 1.0f + 0.1f * frand();
    }
    g->conv = zeros(8 * 3 * CH);
    g->s = zeros(8 * VH * KD * VD);
    g->out = zeros(ROWS * VH * VD);
    g->scratch = zeros(ROWS * (CH + 2 * VH));
}
static void gdn_fini(struct gdn *g)
{
    free(g->in);
    free(g->conv_w);
    free(g->conv);
    free(g->s);
    free(g->out);
    free(g->scratch);
}
static void gdn_run(struct gdn *g, struct rows *r, uint32_t at, uint32_t chunk)
{
    struct qx_op_gdn a = {.step = &r->s, .k_heads = KH, .v_heads = VH, .k_dim = KD, .v_dim = VD,
                          .conv_kernel = 4, .in = g->in + at * g->stride, .in_stride = g->stride,
                          .conv_w = g->conv_w, .a_log = g->a_log, .dt_bias = g->dt, .norm = g->norm,
                          .eps = 1e-6f, .conv_state = g->conv, .conv_slot_stride = 3 * CH, .s = g->s,
                          .s_slot_stride = VH * KD * VD, .out = g->out + at * VH * VD,
                          .scratch = g->scratch, .chunk = chunk};
    assert_int_equal(be->ops->gdn(q, &a), 0);
}

static void test_gdn_forms(void **state)
{
    (void)state;
    struct gdn g;
    struct rows r;
    gdn_init(&g);
    size_t n_out = ROWS * VH * VD, n_s = VH * KD * VD;
    float *out = malloc(n_out * 4), *s = malloc(n_s * 4);
    gdn_run(&g, make_rows(&r, ROWS, 0, -1, 0), 0, 0);
    memcpy(out, g.out, n_out * 4);
    memcpy(s, g.s, n_s * 4);
    for (uint32_t chunk = 2; chunk <= 64; chunk = chunk * 2 + 1) {
        gdn_run(&g, make_rows(&r, ROWS, 0, -1, 0), 0, chunk);
        assert_true(rel(g.out, out, n_out) < 1e-5);
        assert_true(rel(g.s, s, n_s) < 1e-5);
    }
    /* Token by token, in place and through changing slots, gives the same bits as one run. */
    for (uint32_t i = 0; i < ROWS; ++i) {
        int32_t in = i ? (int32_t)((i - 1) % 5) + 1 : -1, to = (int32_t)(i % 5) + 1;
        gdn_run(&g, make_rows(&r, 1, (int32_t)i, in, to), i, 0);
    }
    assert_memory_equal(g.out, out, n_out * 4);
    assert_memory_equal(g.s + ((ROWS - 1) % 5 + 1) * n_s, s, n_s * 4);
    /* A run whose rows each keep their own state, as in verifying drafts: every slot is what a run that
     * ends there gives. */
    make_rows(&r, 4, 0, -1, 4);
    for (int i = 0; i < 4; ++i) {
        r.out[i] = i + 1;
    }
    gdn_run(&g, &r, 0, 0);
    for (uint32_t n = 1; n <= 4; ++n) {
        gdn_run(&g, make_rows(&r, n, 0, -1, 7), 0, 0);
        assert_memory_equal(g.s + 7 * n_s, g.s + n * n_s, n_s * 4);
        assert_memory_equal(g.conv + 7 * 3 * CH, g.conv + n * 3 * CH, 3 * CH * 4);
    }
    /* A run that keeps nothing: the same outputs, no slot touched. */
    float *slots = malloc(8 * n_s * 4);
    memcpy(slots, g.s, 8 * n_s * 4);
    memset(g.out, 0, n_out * 4);
    gdn_run(&g, make_rows(&r, ROWS, 0, -1, -1), 0, 0);
    assert_memory_equal(g.out, out, n_out * 4);
    assert_memory_equal(g.s, slots, 8 * n_s * 4);
    free(slots);
    free(s);
    free(out);
    gdn_fini(&g);
}

static void test_gdn_limits(void **state)
{
    (void)state;
    struct gdn g;
    struct rows r;
    gdn_init(&g);
    size_t n_s = VH * KD * VD;
    /* beta = 0: the state only decays. */
    for (uint32_t i = 0; i < 3; ++i) {
        for (uint32_t h = 0; h < VH; ++h) {
            g.in[i * g.stride + CH + VH * VD + h] = i ? -1e4f : 1.0f;
        }
    }
    gdn_run(&g, make_rows(&r, 1, 0, -1, 0), 0, 0);
    float *s0 = malloc(n_s * 4);
    memcpy(s0, g.s, n_s * 4);
    gdn_run(&g, make_rows(&r, 2, 1, 0, 0), 1, 0);
    for (uint32_t h = 0; h < VH; ++h) {
        double decay = 1.0;
        for (uint32_t i = 1; i < 3; ++i) {
            double x = (double)g.in[i * g.stride + CH + VH * VD + VH + h] + g.dt[h];
            decay *= exp(-exp(g.a_log[h]) * log1p(exp(x)));
        }
        for (size_t k = 0; k < KD * VD; ++k) {
            assert_true(fabs(g.s[h * KD * VD + k] - decay * s0[h * KD * VD + k]) < 1e-6);
        }
    }
    /* g = 0, beta = 1 and the same key twice: the second value replaces the first, o = v (q . k). With
     * taps (0,0,0,1) the convolution is silu of the input. */
    for (uint32_t c = 0; c < CH; ++c) {
        for (uint32_t j = 0; j < 4; ++j) {
            g.conv_w[c * 4 + j] = j == 3;
        }
    }
    for (uint32_t i = 0; i < 2; ++i) {
        float *in = g.in + i * g.stride;
        memcpy(in + KH * KD, g.in + KH * KD, KH * KD * 4);
        for (uint32_t h = 0; h < VH; ++h) {
            in[CH + VH * VD + h] = 1e4f;
            in[CH + VH * VD + VH + h] = -1e4f;
        }
    }
    gdn_run(&g, make_rows(&r, 2, 0, -1, 0), 0, 0);
    const float *in = g.in + g.stride;
    for (uint32_t h = 0; h < VH; ++h) {
        double qk = 0, qq = 0, kk = 0, v[VD], sq = 0, o[VD];
        for (uint32_t i = 0; i < KD; ++i) {
            double qi = in[h / 2 * KD + i], ki = in[KH * KD + h / 2 * KD + i];
            qi /= 1 + exp(-qi);
            ki /= 1 + exp(-ki);
            qk += qi * ki;
            qq += qi * qi;
            kk += ki * ki;
        }
        qk /= sqrt(qq + 1e-6) * sqrt(kk + 1e-6) * sqrt(KD);
        for (uint32_t d = 0; d < VD; ++d) {
            v[d] = in[2 * KH * KD + h * VD + d];
            v[d] /= 1 + exp(-v[d]);
            o[d] = v[d] * qk;
            sq += o[d] * o[d] / VD;
        }
        float want[VD];
        for (uint32_t d = 0; d < VD; ++d) {
            want[d] = (float)(o[d] / sqrt(sq + 1e-6) * g.norm[d] / (1 + exp(-(double)in[CH + h * VD + d])));
        }
        assert_true(rel(g.out + VH * VD + h * VD, want, VD) < 1e-4);
    }
    /* 13: scaling post-conv q or k changes nothing but through eps. silu(x) is near x for large x. */
    float *base = malloc(VH * VD * 4);
    for (uint32_t c = 0; c < 2 * KH * KD; ++c) {
        g.in[c] = 40.0f + 20.0f * frand();
    }
    gdn_run(&g, make_rows(&r, 1, 0, -1, 0), 0, 0);
    memcpy(base, g.out, VH * VD * 4);
    for (uint32_t c = 0; c < KH * KD; ++c) {
        g.in[c] *= 3.0f;
        g.in[KH * KD + c] *= 0.75f;
    }
    gdn_run(&g, make_rows(&r, 1, 0, -1, 0), 0, 0);
    assert_true(rel(g.out, base, VH * VD) < 1e-5);
    free(base);
    free(s0);
    gdn_fini(&g);
}

/* ---- 14, 15: hyper-connection ------------------------------------------------------------- */

static void test_hc(void **state)
{
    (void)state;
    enum { C = 4, H = 24, RANK = 6, N = 3 };
    float *x = randoms(N * C * H, 2.0f), *norm = randoms(C * H, 0.3f), *down = randoms(RANK * C * H, 0.3f);
    float *up = zeros(C * H * RANK), *inject = zeros(C * C * H), *y = randoms(N * H, 1.0f);
    float *m = zeros(N * H), *inj = zeros(N * C), *scratch = zeros(N * (C * H + RANK));
    struct qx_op_hc a = {.n_rows = N, .n_streams = C, .hidden = H, .rank = RANK, .x = x, .norm = norm,
                         .down = f32_weight(down, RANK, C * H), .up = f32_weight(up, C * H, RANK),
                         .inject = f32_weight(inject, C, C * H), .eps = 1e-6f, .m = m, .inj_out = inj,
                         .scratch = scratch};
    assert_int_equal(be->ops->hc(q, &a), 0);
    for (int r = 0; r < N; ++r) {
        for (int d = 0; d < H; ++d) {
            double sum = 0;
            for (int c = 0; c < C; ++c) {
                double sq = 0;
                for (int i = 0; i < H; ++i) {
                    sq += (double)x[(r * C + c) * H + i] * x[(r * C + c) * H + i] / H;
                }
                sum += x[(r * C + c) * H + d] / sqrt(sq + 1e-6) * (1 + (double)norm[c * H + d]);
            }
            assert_true(fabs(m[r * H + d] - sum / C / 2) < 1e-6); /* U = 0: gate 0.5, m = mean(n) / 2 */
        }
        for (int c = 0; c < C; ++c) {
            assert_true(inj[r * C + c] == 1.0f); /* J = 0: inj is 1 exactly */
        }
    }
    float *before = malloc(N * C * H * 4);
    memcpy(before, x, N * C * H * 4);
    a.y = y;
    a.inj_in = inj;
    a.m = NULL;
    assert_int_equal(be->ops->hc(q, &a), 0);
    for (int i = 0; i < N * C * H; ++i) {
        assert_true(x[i] == before[i] + y[i / (C * H) * H + i % H]);
    }
    /* Equal streams with equal weights stay equal. */
    for (int i = 0; i < N * C * H; ++i) {
        x[i] = x[i / (C * H) * (C * H) + i % H];
        norm[i % (C * H)] = norm[i % H];
    }
    for (int i = 0; i < C * C * H; ++i) {
        inject[i] = 0.2f * (float)((i * 7) % 5);
    }
    for (int c = 1; c < C; ++c) {
        memcpy(inject + c * C * H, inject, C * H * 4);
    }
    float inj2[N * C];
    a.inj_out = inj2;
    a.m = m;
    assert_int_equal(be->ops->hc(q, &a), 0);
    for (int i = 0; i < N * C * H; ++i) {
        assert_true(x[i] == x[i / (C * H) * (C * H) + i % H]);
    }
    for (int i = 0; i < N * C; ++i) {
        assert_true(inj2[i] == inj2[i / C * C]);
    }
    free(before);
    free(scratch);
    free(inj);
    free(m);
    free(y);
    free(inject);
    free(up);
    free(down);
    free(norm);
    free(x);
}

/* ---- 16: PLE ------------------------------------------------------------------------------ */

static void test_ple(void **state)
{
    (void)state;
    enum { C = 4, H = 16, N = 20, W = C * H };
    float *x = randoms(N * W, 1.0f), *key = zeros(N * W), *value = zeros(N * H), *norm = randoms(W, 0.2f);
    float *conv = randoms(W * 4, 0.5f), *st = zeros(4 * 9 * W), *scratch = zeros(N * 2 * W);
    float *x0 = malloc(N * W * 4), *x1 = malloc(N * W * 4);
    struct rows r;
    struct qx_op_ple a = {.step = &r.s, .n_streams = C, .hidden = H, .conv_kernel = 4, .dilation = 3, .x = x,
                          .key = key, .value = value, .norm_key = norm, .norm_query = norm,
                          .norm_conv = norm, .conv_w = conv, .eps = 1e-6f, .conv_state = st,
                          .conv_slot_stride = 9 * W, .scratch = scratch};
    memcpy(x0, x, N * W * 4);
    make_rows(&r, N, 0, -1, 0);
    assert_int_equal(be->ops->ple(q, &a), 0);
    assert_memory_equal(x, x0, N * W * 4); /* nothing looked up: nothing changes */
    /* No convolution: x grows by the gated value alone, gate 0.5 where key and query do not meet. */
    for (int i = 0; i < N * H; ++i) {
        value[i] = frand();
    }
    memset(conv, 0, W * 4 * 4);
    assert_int_equal(be->ops->ple(q, &a), 0);
    for (int i = 0; i < N * W; ++i) {
        assert_true(fabsf(x[i] - (x0[i] + 0.5f * value[i / W * H + i % H])) < 1e-6f);
    }
    /* Chunks of any size: the same bits and the same history. */
    float *k2 = randoms(N * W, 1.0f), *c2 = randoms(W * 4, 0.5f);
    a.conv_w = c2;
    for (uint32_t chunk = N; chunk >= 1; chunk = chunk == N ? 7 : chunk - 1) {
        memcpy(x, x0, N * W * 4);
        for (uint32_t at = 0; at < N; at += chunk) {
            uint32_t n = N - at < chunk ? N - at : chunk;
            make_rows(&r, n, (int32_t)at, at ? 1 : -1, 1);
            a.x = x + at * W;
            a.key = k2 + at * W;
            a.value = value + at * H;
            assert_int_equal(be->ops->ple(q, &a), 0);
        }
        if (chunk == N) {
            memcpy(x1, x, N * W * 4);
            memcpy(st + 2 * 9 * W, st + 9 * W, 9 * W * 4);
        }
        assert_memory_equal(x, x1, N * W * 4);
        assert_memory_equal(st + 2 * 9 * W, st + 9 * W, 9 * W * 4);
    }
    free(c2);
    free(k2);
    free(x1);
    free(x0);
    free(scratch);
    free(st);
    free(conv);
    free(norm);
    free(value);
    free(key);
    free(x);
}

/* ---- 17: experts -------------------------------------------------------------------------- */

static void test_moe(void **state)
{
    (void)state;
    enum { E = 8, K = 3, H = 32, I = 20, S = 12, N = 5 };
    float *m = randoms(N * H, 1.0f), *gate = randoms(E * H, 1.0f), *logits = zeros(N * E), w[N * K], w2[N * K];
    float *g = randoms(E * I * H, 0.3f), *u = randoms(E * I * H, 0.3f), *d = randoms(E * H * I, 0.3f);
    float *sg = randoms(S * H, 0.3f), *su = randoms(S * H, 0.3f), *sd = randoms(H * S, 0.3f);
    float *sv = randoms(H, 0.3f), *y = zeros(N * H), *y2 = zeros(N * H);
    float *scratch = zeros(N * (K * (I + H) + S + H + 1));
    int32_t expert[N * K], expert2[N * K], isc[N * K + 3 * E + 8];
    struct qx_op_moe_route r = {.n_rows = N, .hidden = H, .n_experts = E, .k = K, .norm = true, .m = m,
                                .gate = f32_weight(gate, E, H), .logits = logits, .expert = expert,
                                .weight = w};
    assert_int_equal(be->ops->moe_route(q, &r), 0);
    for (int i = 0; i < N; ++i) {
        double sum = 0;
        for (int k = 0; k < K; ++k) {
            sum += w[i * K + k];
            assert_true(k == 0 || w[i * K + k] <= w[i * K + k - 1]);
        }
        assert_true(fabs(sum - 1) < 1e-6);
    }
    struct qx_weight gw[E], uw[E], dw[E];
    for (int e = 0; e < E; ++e) {
        gw[e] = f32_weight(g + e * I * H, I, H);
        uw[e] = f32_weight(u + e * I * H, I, H);
        dw[e] = f32_weight(d + e * H * I, H, I);
    }
    struct qx_op_moe a = {.n_rows = N, .k = K, .m = m, .expert = expert, .weight = w,
                          .experts = {gw, uw, dw, E, H, I}, .s_gate = f32_weight(sg, S, H),
                          .s_up = f32_weight(su, S, H), .s_down = f32_weight(sd, H, S),
                          .s_gate_vec = f32_weight(sv, 1, H), .s_inter = S, .y = y, .scratch = scratch,
                          .iscratch = isc};
    assert_int_equal(be->ops->moe(q, &a), 0);
    /* Permuting experts with their router rows changes nothing. */
    float *gate2 = malloc(E * H * 4);
    struct qx_weight gw2[E], uw2[E], dw2[E];
    for (int e = 0; e < E; ++e) {
        int p = (e * 3 + 1) % E;
        memcpy(gate2 + p * H, gate + e * H, H * 4);
        gw2[p] = gw[e];
        uw2[p] = uw[e];
        dw2[p] = dw[e];
    }
    r.gate = f32_weight(gate2, E, H);
    r.expert = expert2;
    r.weight = w2;
    assert_int_equal(be->ops->moe_route(q, &r), 0);
    a.experts = (struct qx_experts){gw2, uw2, dw2, E, H, I};
    a.expert = expert2;
    a.weight = w2;
    a.y = y2;
    assert_int_equal(be->ops->moe(q, &a), 0);
    assert_memory_equal(w, w2, sizeof w);
    assert_memory_equal(y, y2, N * H * 4);
    /* The shared expert is there even if the routed sum is zero. */
    memset(w2, 0, sizeof w2);
    assert_int_equal(be->ops->moe(q, &a), 0);
    double sum = 0;
    for (int i = 0; i < N * H; ++i) {
        sum += fabs((double)y2[i]);
    }
    assert_true(sum > 0.01);
    free(gate2);
    free(scratch);
    free(y2);
    free(y);
    free(sv);
    free(sd);
    free(su);
    free(sg);
    free(d);
    free(u);
    free(g);
    free(logits);
    free(gate);
    free(m);
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

/* ---- sampling ----------------------------------------------------------------------------- */

static int32_t draw(const float *l, uint32_t n, struct qx_sample_params p, int32_t pos)
{
    int32_t id;
    float scratch[64];
    struct qx_op_sample a = {.n_rows = 1, .vocab = n, .logits = l, .params = &p, .pos = &pos, .id = &id,
                             .scratch = scratch};
    assert_int_equal(be->ops->sample(q, &a), 0);
    return id;
}

static void test_sample(void **state)
{
    (void)state;
    float l[8] = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f, 0.5f, 2.5f, -2.0f};
    struct qx_sample_params p = {.temperature = 0.0f, .top_p = 1.0f};
    assert_int_equal(draw(l, 8, p, 0), 1); /* lowest id on ties */
    p.temperature = 1.0f;
    /* Frequencies of 40,000 draws against the distribution: five standard deviations. */
    for (int mode = 0; mode < 4; ++mode) {
        p.top_k = mode == 1 ? 3 : 0;
        p.top_p = mode == 2 ? 0.7f : 1.0f;
        p.min_p = mode == 3 ? 0.3f : 0.0f;
        static const int rank[8] = {1, 3, 6, 2, 0, 5, 4, 7};
        double w[8] = {0}, sum = 0, total = 0;
        for (int i = 0; i < 8; ++i) {
            total += exp((double)l[i] - 3.0);
        }
        for (int i = 0; i < 8; ++i) {
            double e = exp((double)l[rank[i]] - 3.0);
            bool in = mode == 1 ? i < 3 : mode == 2 ? sum < 0.7 * total : mode == 3 ? e >= (double)p.min_p : true;
            sum += e;
            w[rank[i]] = in ? e : 0;
        }
        sum = 0;
        for (int i = 0; i < 8; ++i) {
            sum += w[i];
        }
        int count[8] = {0}, n = 40000;
        for (int i = 0; i < n; ++i) {
            p.seed = (uint64_t)i / 8;
            ++count[draw(l, 8, p, i % 8)];
        }
        for (int i = 0; i < 8; ++i) {
            double want = n * w[i] / sum, sd = sqrt(want * (1 - w[i] / sum));
            assert_true(fabs(count[i] - want) <= 5 * sd + 0.5);
        }
    }
    /* Not finite: no token. */
    l[4] = NAN;
    assert_int_equal(draw(l, 8, p, 0), -1);
    l[4] = INFINITY;
    p.temperature = 0;
    assert_int_equal(draw(l, 8, p, 0), -1);
    l[4] = -INFINITY;
    assert_int_equal(draw(l, 8, p, 0), 1);

    int32_t ids[4] = {1, 4, -1, 0}, counts[4] = {2, 1, 0, 0};
    float v[5] = {0, 3.0f, 0, 0, -2.0f};
    struct qx_penalty pen = {.repeat = 2.0f, .presence = 0.25f, .frequency = 0.5f};
    struct qx_op_penalize a = {.n_rows = 1, .vocab = 5, .max_ids = 4, .params = &pen, .id = ids,
                               .count = counts, .logits = v};
    assert_int_equal(be->ops->penalize(q, &a), 0);
    assert_true(v[0] == 0.0f && v[1] == 1.5f - 1.25f && v[4] == -4.0f - 0.75f);
}

/* ---- stored forms ------------------------------------------------------------------------- */

/* 22: a product on stored codes equals that on decoded rows, in every form, ragged sizes included, and
 * does not depend on how many rows are computed with it. */
static void test_linear_forms(void **state)
{
    (void)state;
    enum { R = 133, C = 416, N = 37 };
    uint8_t *codes = malloc(R * C * 4), *scale = malloc(R * C);
    float *x = randoms(N * C, 1.0f), *y = zeros(N * R), *y1 = zeros(R), *row = malloc(C * 4);
    static const uint8_t forms[] = {QX_W_F32, QX_W_F16, QX_W_BF16, QX_W_FP8, QX_W_FP8_BLOCK, QX_W_MXFP8,
                                    QX_W_NVFP4};
    for (size_t f = 0; f < sizeof forms; ++f) {
        for (size_t i = 0; i < R * C * 4; ++i) {
            rng = qx_mix64(rng);
            codes[i] = (uint8_t)(rng & 0xbf); /* no NaN, no large exponents in any of the forms */
        }
        for (size_t i = 0; i < R * C; ++i) {
            rng = qx_mix64(rng);
            scale[i] = (uint8_t)(forms[f] == QX_W_MXFP8 ? 120 + rng % 10 : 0x30 + rng % 16);
        }
        if (forms[f] == QX_W_F32) {
            memcpy(codes, x, R * 4);
            for (size_t i = 0; i < R * C; ++i) {
                ((float *)(void *)codes)[i] = frand();
            }
        }
        struct qx_weight w = {.codes = codes, .scale = scale, .global = 0.37f, .rows = R, .cols = C,
                              .fmt = forms[f], .scale_bf16 = 1, .row0 = forms[f] == QX_W_FP8_BLOCK ? 60 : 0};
        struct qx_op_linear a = {.n_rows = N, .n_weights = 1, .x = x, .x_stride = C, .y_stride = R, .w = {w},
                                 .y = y};
        assert_int_equal(be->ops->linear(q, &a), 0);
        for (int64_t r = 0; r < R; ++r) {
            struct qx_op_decode_rows d = {.weight = w, .row = &r, .n = 1, .out = row};
            assert_int_equal(be->ops->decode_rows(q, &d), 0);
            for (uint32_t i = 0; i < N; i += 9) {
                double sum = 0, mag = 0;
                for (uint32_t c = 0; c < C; ++c) {
                    sum += (double)row[c] * x[i * C + c];
                    mag += fabs((double)row[c] * x[i * C + c]);
                }
                assert_true(fabs(y[i * R + r] - sum) <= 1e-6 * mag);
            }
        }
        for (uint32_t i = 0; i < N; i += 12) {
            a.n_rows = 1;
            a.x = x + i * C;
            a.y = y1;
            assert_int_equal(be->ops->linear(q, &a), 0);
            assert_memory_equal(y1, y + i * R, R * 4);
        }
    }
    free(row);
    free(y1);
    free(y);
    free(x);
    free(scale);
    free(codes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ngram), cmocka_unit_test(test_attention), cmocka_unit_test(test_gdn_forms),
        cmocka_unit_test(test_gdn_limits), cmocka_unit_test(test_hc), cmocka_unit_test(test_ple),
        cmocka_unit_test(test_moe), cmocka_unit_test(test_rope), cmocka_unit_test(test_sample),
        cmocka_unit_test(test_linear_forms),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
