/* Drafts never change the text: greedy and sampled, real, perfect and wrong drafts, 1 to 8 a round, over
 * block ends and the attention budget; and after every round the state is that of plain decoding, bit for
 * bit. Sampling with drafts keeps the distribution. */
#include "fixture.h"

static void micro(char out[1024], const char *layout)
{
    const char *data = getenv("QX_TEST_DATA");
    assert_non_null(data);
    snprintf(out, 1024, "%s/micro/%s", data, layout);
}

#define N_NEW 48
struct plain { uint32_t ids[N_NEW]; uint8_t digest[N_NEW + 1][16]; size_t n; };

static int on_token(void *user, const struct qx_token *t)
{
    struct plain *p = user;
    p->ids[p->n++] = t->id;
    return 0;
}

static void prompt_ids(uint32_t *ids, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; ++i) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (seed >> 16) % 500;
    }
}

/* Plain text, one token a call, with the digest after each. */
static void run_plain(struct fx_model *f, const uint32_t *ids, size_t n, struct qx_sampling s,
                      struct plain *out)
{
    struct qx_error err;
    struct qx_gen_params p = QX_GEN_PARAMS_DEFAULT;
    p.n_max = 1;
    p.sampling = s;
    p.on_token = on_token;
    p.user = out;
    out->n = 0;
    fx_ok(qx_gen_reset(f->g, &err), &err);
    fx_ok(qx_gen_prefill(f->g, ids, n, NULL, NULL, &err), &err);
    for (size_t i = 0; i < N_NEW; ++i) {
        fx_ok(qx_gen_digest(f->g, out->digest[i], &err), &err);
        fx_ok(qx_gen_generate(f->g, &p, NULL, &err), &err);
    }
    fx_ok(qx_gen_digest(f->g, out->digest[N_NEW], &err), &err);
}

enum source { REAL, PERFECT, WRONG, MIXED };
struct proposer { struct plain got; const struct plain *plain; size_t n_prompt; enum source from; uint32_t n; };

/* Drafts to follow the pending id at `pos`. */
static uint32_t propose(void *user, uint64_t pos, uint32_t k, uint32_t *ids)
{
    struct proposer *p = user;
    for (uint32_t i = 0; i < k; ++i) {
        size_t at = (size_t)pos - p->n_prompt + 1 + i;
        uint32_t right = at < N_NEW ? p->plain->ids[at] : 0;
        bool lie = p->from == WRONG || (p->from == MIXED && (p->n++ * 7) % 5 < 2);
        ids[i] = lie ? (right + 1) % 512 : right;
    }
    return k;
}

static void check_drafts(struct fx_model *f, const uint32_t *ids, size_t n, struct qx_sampling s,
                         const struct plain *want, int32_t k, enum source from)
{
    struct qx_error err;
    struct qx_gen_stats st;
    struct proposer p = {.plain = want, .n_prompt = n, .from = from};
    struct qx_gen_params gp = QX_GEN_PARAMS_DEFAULT;
    gp.sampling = s;
    gp.draft = k;
    gp.on_token = on_token;
    gp.user = &p;
    gp.propose = from == REAL ? NULL : propose;
    uint64_t drafted = 0, accepted = 0;
    fx_ok(qx_gen_reset(f->g, &err), &err);
    fx_ok(qx_gen_prefill(f->g, ids, n, NULL, NULL, &err), &err);
    /* Calls of a few tokens, so that the state is seen between rounds. */
    for (size_t call = 0; p.got.n < N_NEW; ++call) {
        size_t left = N_NEW - p.got.n, ask = call % 3 == 2 ? 17 : (size_t)k + 1;
        gp.n_max = ask < left ? ask : left;
        fx_ok(qx_gen_generate(f->g, &gp, &st, &err), &err);
        drafted += st.drafted;
        accepted += st.accepted;
        /* A round waits for the device once; penalties need the drafts on the host first. */
        assert_true(st.waits <= st.rounds * (s.repeat_penalty != 1.0f ? 2 : 1));
        uint8_t digest[16];
        fx_ok(qx_gen_digest(f->g, digest, &err), &err);
        /* The last id is pending: consumed are all but that one. */
        assert_memory_equal(digest, want->digest[p.got.n], 16);
    }
    assert_memory_equal(p.got.ids, want->ids, sizeof want->ids);
    assert_true(drafted > 0);
    if (from == PERFECT) {
        assert_int_equal(accepted, drafted);
    } else if (from == WRONG) {
        assert_int_equal(accepted, 0);
    }
}

static void drafts_of(const char *layout, struct qx_sampling s, size_t n)
{
    char dir[1024];
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    uint32_t ids[64];
    micro(dir, layout);
    o.draft_max = 8;
    o.draft_vocab = n == 22 ? 200 : 0; /* drafts from a part of the vocabulary, now and then */
    struct fx_model f = fx_open(dir, o);
    struct plain *want = malloc(sizeof *want);
    prompt_ids(ids, n, (uint32_t)n + 7);
    run_plain(&f, ids, n, s, want);
    for (int32_t k = 1; k <= 8; k += s.temperature > 0.0f ? 3 : 1) {
        for (int from = REAL; from <= MIXED; ++from) {
            check_drafts(&f, ids, n, s, want, k, (enum source)from);
        }
    }
    check_drafts(&f, ids, n, s, want, QX_DRAFT_AUTO, REAL);
    free(want);
    fx_close(&f);
}

static void test_greedy(void **state)
{
    (void)state;
    struct qx_sampling s = QX_SAMPLING_GREEDY;
    drafts_of("mixed", s, 3);      /* crosses the budget of 32 positions, block ends at every offset */
    drafts_of("nvfp4-ple", s, 22);
    drafts_of("bf16", s, 1);
}

static void test_sampled(void **state)
{
    (void)state;
    struct qx_sampling s = QX_SAMPLING_GREEDY;
    s.temperature = 0.9f;
    s.top_k = 20;
    s.top_p = 0.9f;
    s.seed = 77;
    drafts_of("mixed", s, 5);
    s.repeat_penalty = 1.3f;
    s.frequency_penalty = 0.2f;
    drafts_of("mixed", s, 5);
}

/* The first two tokens after one prompt over many seeds, with a draft proposed for the second: their joint
 * distribution against the exact one. Chi-square over cells pooled to an expected count of 10 or more,
 * p > 0.01. QX_SEEDS=20000 is the full test; the default keeps ordinary runs short. */
enum { TOP = 8 };
struct last { float row[512]; };
static bool want_any(void *user, uint64_t pos)
{
    (void)user;
    return pos >= 6;
}
static void keep_last(void *user, uint64_t pos, const float *row)
{
    (void)pos;
    memcpy(((struct last *)user)->row, row, 512 * 4);
}

/* The TOP best ids and their probabilities among themselves. */
static void top_of(const float *row, uint32_t id[TOP], double p[TOP])
{
    float l[512];
    double sum = 0;
    memcpy(l, row, sizeof l);
    for (int i = 0; i < TOP; ++i) {
        id[i] = (uint32_t)fx_argmax(l, 512);
        p[i] = exp((double)l[id[i]] - (double)row[id[0]]);
        sum += p[i];
        l[id[i]] = -INFINITY;
    }
    for (int i = 0; i < TOP; ++i) {
        p[i] /= sum;
    }
}

/* Drafts that are sometimes right: one of the three likeliest second tokens. */
struct guess { struct plain got; uint32_t first[TOP], second[TOP][TOP]; uint64_t seed; };
static int on_guess_token(void *user, const struct qx_token *t)
{
    return on_token(&((struct guess *)user)->got, t);
}
static uint32_t propose_likely(void *user, uint64_t pos, uint32_t k, uint32_t *ids)
{
    struct guess *g = user;
    (void)pos;
    (void)k;
    for (int a = 0; a < TOP; ++a) {
        if (g->first[a] == g->got.ids[0]) {
            ids[0] = g->second[a][g->seed % 3];
        }
    }
    return 1;
}

static void test_distribution(void **state)
{
    (void)state;
    const char *asked = getenv("QX_SEEDS");
    uint64_t seeds = asked ? strtoull(asked, NULL, 10) : 1500, drafted = 0, accepted = 0;
    char dir[1024];
    struct qx_error err;
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_snapshot *snap;
    struct last last;
    struct qx_gen_hooks h = {.user = &last, .want_logits = want_any, .logits = keep_last};
    uint32_t ids[7];
    double p1[TOP], p2[TOP][TOP];
    uint64_t count[TOP][TOP] = {{0}};
    micro(dir, "mixed");
    o.draft_max = 1;
    o.n_threads = 1;
    struct fx_model f = fx_open(dir, o);
    struct guess *g = calloc(1, sizeof *g);
    prompt_ids(ids, 7, 3);
    qx_gen_set_hooks(f.g, &h);
    fx_ok(qx_gen_prefill(f.g, ids, 7, NULL, NULL, &err), &err);
    fx_ok(qx_gen_save(f.g, &snap, &err), &err);
    top_of(last.row, g->first, p1);
    for (int i = 0; i < TOP; ++i) {
        fx_ok(qx_gen_restore(f.g, snap, &err), &err);
        fx_ok(qx_gen_prefill(f.g, &g->first[i], 1, NULL, NULL, &err), &err);
        top_of(last.row, g->second[i], p2[i]);
    }
    qx_gen_set_hooks(f.g, NULL);

    struct qx_gen_stats st;
    struct qx_gen_params p = QX_GEN_PARAMS_DEFAULT;
    p.n_max = 3; /* the last one only makes room for a draft */
    p.sampling.temperature = 1.0f;
    p.sampling.top_k = TOP;
    p.draft = 1;
    p.on_token = on_guess_token;
    p.propose = propose_likely;
    p.user = g;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
        p.sampling.seed = g->seed = seed;
        g->got.n = 0;
        fx_ok(qx_gen_restore(f.g, snap, &err), &err);
        fx_ok(qx_gen_generate(f.g, &p, &st, &err), &err);
        drafted += st.drafted;
        accepted += st.accepted;
        int a = 0, b = 0;
        while (a < TOP && g->first[a] != g->got.ids[0]) {
            ++a;
        }
        assert_true(a < TOP);
        while (b < TOP && g->second[a][b] != g->got.ids[1]) {
            ++b;
        }
        assert_true(b < TOP);
        ++count[a][b];
    }
    assert_int_equal(drafted, seeds);
    assert_true(accepted > seeds / 20);
    double chi = 0, want = 0, have = 0;
    int cells = 0;
    for (int i = 0; i < TOP * TOP; ++i) {
        want += (double)seeds * p1[i / TOP] * p2[i / TOP][i % TOP];
        have += (double)count[i / TOP][i % TOP];
        if (want >= 10.0) {
            chi += (have - want) * (have - want) / want;
            want = have = 0;
            ++cells;
        }
    }
    /* Wilson and Hilferty: the cube root of chi^2 / df is near normal; 2.326 is its 0.99 quantile. */
    double df = cells - 1, z = (cbrt(chi / df) - (1.0 - 2.0 / (9.0 * df))) / sqrt(2.0 / (9.0 * df));
    print_message("%llu seeds, %llu drafts accepted: chi-square %.1f over %d cells, z %.2f\n",
                  (unsigned long long)seeds, (unsigned long long)accepted, chi, cells, z);
    assert_true(cells >= 10);
    assert_true(z < 2.326);
    free(g);
    qx_snapshot_destroy(snap);
    fx_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_greedy), cmocka_unit_test(test_sampled),
                                       cmocka_unit_test(test_distribution)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
