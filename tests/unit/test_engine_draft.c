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
    struct fx_model f = fx_open(dir, o);
    struct plain *want = malloc(sizeof *want);
    prompt_ids(ids, n, (uint32_t)n + 7);
    run_plain(&f, ids, n, s, want);
    for (int32_t k = 1; k <= 8; ++k) {
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

/* Two tokens after one prompt over many seeds: the joint distribution with one-hot drafts against the
 * exact one. Chi-square over cells pooled to an expected count of 10 or more, p > 0.01. */
static void test_distribution(void **state)
{
    (void)state;
    enum { SEEDS = 20000, TOP = 8 };
    char dir[1024];
    struct qx_error err;
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_snapshot *snap;
    uint32_t ids[7];
    micro(dir, "mixed");
    o.draft_max = 1;
    o.n_threads = 1;
    struct fx_model f = fx_open(dir, o);
    prompt_ids(ids, 7, 3);
    fx_ok(qx_gen_prefill(f.g, ids, 7, NULL, NULL, &err), &err);
    fx_ok(qx_gen_save(f.g, &snap, &err), &err);

    struct qx_gen_params p = QX_GEN_PARAMS_DEFAULT;
    struct plain *got = calloc(1, sizeof *got);
    p.n_max = 2;
    p.sampling.temperature = 1.0f;
    p.sampling.top_k = TOP;
    p.on_token = on_token;
    p.user = got;
    static uint32_t count[2][512 * 512];
    memset(count, 0, sizeof count);
    for (int mode = 0; mode < 2; ++mode) {
        p.draft = mode;
        for (uint64_t seed = 0; seed < SEEDS; ++seed) {
            /* Different seeds for the two, so that they are independent samples. */
            p.sampling.seed = seed * 2 + (uint64_t)mode;
            got->n = 0;
            fx_ok(qx_gen_restore(f.g, snap, &err), &err);
            fx_ok(qx_gen_generate(f.g, &p, NULL, &err), &err);
            ++count[mode][got->ids[0] * 512 + got->ids[1]];
        }
    }
    /* Two-sample chi-square with equal sizes: sum (a - b)^2 / (a + b), cells pooled to a mean of 10. */
    double chi = 0.0, pa = 0.0, pb = 0.0;
    int cells = 0;
    for (size_t i = 0; i < 512 * 512; ++i) {
        pa += count[0][i];
        pb += count[1][i];
        if (pa + pb >= 20.0) {
            chi += (pa - pb) * (pa - pb) / (pa + pb);
            ++cells;
            pa = pb = 0.0;
        }
    }
    double df = cells - 1;
    /* Wilson and Hilferty: the cube root of chi^2 / df is near normal; 2.326 is its 0.99 quantile. */
    double z = (cbrt(chi / df) - (1.0 - 2.0 / (9.0 * df))) / sqrt(2.0 / (9.0 * df));
    print_message("chi-square %.1f over %d cells, z %.2f\n", chi, cells, z);
    assert_true(cells >= 10);
    assert_true(z < 2.326);
    free(got);
    qx_snapshot_destroy(snap);
    fx_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_greedy), cmocka_unit_test(test_sampled),
                                       cmocka_unit_test(test_distribution)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
