/* Gated DeltaNet of the reference: recurrent and chunked form, its limits. */
#include "ref_ops.h"

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
        assert_true(rel_l2(g.out, out, n_out) < 1e-5);
        assert_true(rel_l2(g.s, s, n_s) < 1e-5);
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
        assert_true(rel_l2(g.out + VH * VD + h * VD, want, VD) < 1e-4);
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
    assert_true(rel_l2(g.out, base, VH * VD) < 1e-5);
    free(base);
    free(s0);
    gdn_fini(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gdn_forms), cmocka_unit_test(test_gdn_limits)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
