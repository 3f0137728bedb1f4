/* Properties of the reference ops that the model description promises, checked on the ops themselves: n-gram
 * context, hyper-connection, PLE, experts, sampling, products of stored forms. */
#include "ref_ops.h"

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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ngram), cmocka_unit_test(test_hc),
                                       cmocka_unit_test(test_ple), cmocka_unit_test(test_moe),
                                       cmocka_unit_test(test_sample), cmocka_unit_test(test_linear_forms)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
