/* Against expected results of independent implementations: logits, wide states, table rows, draft logits
 * and greedy tokens of every fixture, in every layout. Bound: 1e-5 relative L2, what two float32
 * pipelines differ by (an exact float64 implementation differs by 4e-6). */
#include "config.h"
#include "ckpt.h"
#include "fixture.h"

#define BOUND 1e-5

struct collect {
    struct fx_model *f;
    size_t vocab, wide, n;          /* n prompt ids */
    float *logits;                  /* [n, vocab] */
    float *draft;                   /* [n - 1, vocab] */
    bool *has_draft;
    float *streams;                 /* [layers, 2, wide] last two positions */
    int64_t *rows;                  /* [n, heads] */
    uint32_t heads;
    size_t n_blocks;                /* calls of on_blocks */
};

static bool want_all(void *user, uint64_t pos)
{
    return pos < ((struct collect *)user)->n;
}
static void on_logits(void *user, uint64_t pos, const float *row)
{
    struct collect *c = user;
    memcpy(c->logits + pos * c->vocab, row, c->vocab * 4);
}
static bool want_draft(void *user, uint64_t pos)
{
    return pos + 1 < ((struct collect *)user)->n;
}
static void on_draft(void *user, uint64_t pos, const float *row)
{
    struct collect *c = user;
    assert_false(c->has_draft[pos]); /* once a position */
    c->has_draft[pos] = true;
    memcpy(c->draft + pos * c->vocab, row, c->vocab * 4);
}
static bool want_streams(void *user, uint64_t pos)
{
    struct collect *c = user;
    return pos + 2 >= c->n && pos < c->n;
}
static void on_streams(void *user, uint32_t layer, uint64_t pos, const float *x)
{
    struct collect *c = user;
    memcpy(c->streams + ((size_t)layer * 2 + (pos + 2 - c->n)) * c->wide, x, c->wide * 4);
}
static void on_rows(void *user, uint64_t pos, const int64_t *rows, uint32_t heads)
{
    struct collect *c = user;
    c->heads = heads;
    memcpy(c->rows + pos * heads, rows, heads * sizeof *rows);
}

/* Complete blocks of keys only, ascending, and all of them as long as the budget holds them. */
static void on_blocks(void *user, uint32_t layer, uint64_t pos, const int32_t *block, uint32_t n)
{
    struct collect *c = user;
    const struct qx_config *cfg = qx_ckpt_config(c->f->ck);
    uint64_t complete = (pos + 1) / cfg->indexer_compress_ratio, budget = cfg->indexer_budget / cfg->indexer_compress_ratio;
    assert_int_equal(cfg->layer_type[layer], QX_LAYER_QSA);
    assert_int_equal(n, complete < budget ? complete : budget);
    for (uint32_t i = 0; i < n; ++i) {
        assert_true(block[i] > (i ? block[i - 1] : -1) && (uint64_t)block[i] < complete);
    }
    ++c->n_blocks;
}

struct greedy { uint32_t *ids; size_t n; };
static int on_token(void *user, const struct qx_token *t)
{
    struct greedy *g = user;
    g->ids[g->n++] = t->id;
    return 0;
}

static void near(const char *what, const char *dir, const char *prompt, double rel)
{
    if (!(rel <= BOUND)) {
        print_error("%s, prompt %s: %s differ by %.3g\n", dir, prompt, what, rel);
        fail();
    }
}

static void check_prompt(const char *dir, struct fx_model *f, const cJSON *p, double worst[4])
{
    struct qx_error err;
    const char *name = p->string;
    size_t n;
    uint32_t *ids = fx_ids(cJSON_GetObjectItem(p, "tokens"), &n);
    struct collect c = {.f = f, .vocab = f->info.vocab_size, .n = n,
                        .wide = f->info.n_streams * f->info.hidden_size};
    c.logits = malloc(n * c.vocab * 4);
    c.draft = malloc(n * c.vocab * 4);
    c.has_draft = calloc(n, 1);
    c.streams = malloc(f->info.n_layers * 2 * c.wide * 4);
    c.rows = calloc(n * 256, 8);
    struct qx_gen_hooks h = {.user = &c, .want_logits = want_all, .logits = on_logits,
                             .want_draft_logits = want_draft, .draft_logits = on_draft,
                             .want_streams = want_streams, .streams = on_streams,
                             .want_ple_rows = want_all, .ple_rows = on_rows,
                             .want_blocks = want_all, .blocks = on_blocks};
    fx_ok(qx_gen_reset(f->g, &err), &err);
    qx_gen_set_hooks(f->g, &h);
    fx_ok(qx_gen_prefill(f->g, ids, n, NULL, NULL, &err), &err);
    qx_gen_set_hooks(f->g, NULL);
    assert_true(c.n_blocks > 0 && c.n_blocks % n == 0);

    struct npy a;
    assert_true(npy_load(&a, "%s/expected/%s.logits.npy", dir, name));
    const cJSON *at = cJSON_GetObjectItem(p, "logit_positions")->child;
    for (size_t i = 0; i < a.shape[0]; ++i, at = at->next) {
        double rel = rel_l2(c.logits + (size_t)at->valuedouble * c.vocab, (float *)a.data + i * c.vocab,
                            c.vocab);
        near("logits", dir, name, rel);
        worst[0] = rel > worst[0] ? rel : worst[0];
    }
    free(a.data);
    double gap = cJSON_GetObjectItem(p, "top2_gap_min")->valuedouble;
    size_t i = 0;
    for (const cJSON *e = cJSON_GetObjectItem(p, "argmax")->child; e && gap > 1e-4; e = e->next, ++i) {
        assert_int_equal(fx_argmax(c.logits + i * c.vocab, c.vocab), (size_t)e->valuedouble);
    }
    for (uint64_t l = 0; l < f->info.n_layers; ++l) {
        if (!npy_load(&a, "%s/expected/%s.streams.%llu.npy", dir, name, (unsigned long long)l)) {
            break;
        }
        size_t first = n < 2 ? 1 : 0;
        double rel = rel_l2(c.streams + (l * 2 + first) * c.wide, a.data, a.n);
        near("streams", dir, name, rel);
        worst[1] = rel > worst[1] ? rel : worst[1];
        free(a.data);
    }
    assert_true(npy_load(&a, "%s/expected/%s.ple_rows.npy", dir, name));
    size_t row0 = (size_t)cJSON_GetArrayItem(cJSON_GetObjectItem(p, "ple_row_positions"), 0)->valuedouble;
    assert_int_equal(a.shape[1], c.heads);
    assert_memory_equal(c.rows + row0 * c.heads, a.data, a.n * 8);
    free(a.data);
    if (npy_load(&a, "%s/expected/%s.draft_logits.npy", dir, name)) {
        size_t first = n - 1 - a.shape[0];
        double rel = rel_l2(c.draft + first * c.vocab, a.data, a.n);
        near("draft logits", dir, name, rel);
        worst[2] = rel > worst[2] ? rel : worst[2];
        free(a.data);
        i = 0;
        size_t wrong = 0;
        for (const cJSON *e = cJSON_GetObjectItem(p, "draft_argmax")->child; e; e = e->next, ++i) {
            assert_true(c.has_draft[i]);
            const float *row = c.draft + i * c.vocab;
            size_t best = fx_argmax(row, c.vocab), want = (size_t)e->valuedouble;
            wrong += best != want && row[best] - row[want] > 1e-4f;
        }
        assert_int_equal(wrong, 0);
    }

    const cJSON *greedy = cJSON_GetObjectItem(p, "greedy"), *gaps = cJSON_GetObjectItem(p, "greedy_gap");
    if (greedy) {
        uint32_t got[64];
        struct greedy g = {got, 0};
        struct qx_gen_params gp = QX_GEN_PARAMS_DEFAULT;
        struct qx_gen_stats st;
        gp.n_max = (uint64_t)cJSON_GetArraySize(greedy);
        gp.on_token = on_token;
        gp.user = &g;
        fx_ok(qx_gen_generate(f->g, &gp, &st, &err), &err);
        assert_int_equal(g.n, gp.n_max);
        assert_int_equal(st.reason, QX_STOP_LENGTH);
        for (i = 0; i < g.n; ++i) {
            if (cJSON_GetArrayItem(gaps, (int)i)->valuedouble <= 1e-4) {
                break; /* another exact implementation may go on differently */
            }
            assert_int_equal(got[i], (uint32_t)cJSON_GetArrayItem(greedy, (int)i)->valuedouble);
        }
    }
    free(c.rows);
    free(c.streams);
    free(c.has_draft);
    free(c.draft);
    free(c.logits);
    free(ids);
}

static void test_expected(void **state)
{
    (void)state;
    char dirs[16][1024];
    size_t n = fx_folders(dirs);
    assert_true(n > 0);
    for (size_t i = 0; i < n; ++i) {
        double worst[4] = {0};
        struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
        o.mtp = true;
        o.table = i % 3 == 0 ? QX_TABLE_DISK : QX_TABLE_AUTO; /* rows read before each step, or mapped */
        struct fx_model f = fx_open(dirs[i], o);
        char path[1100];
        snprintf(path, sizeof path, "%s/expected/expected.json", dirs[i]);
        cJSON *e = fx_json(path);
        for (const cJSON *p = cJSON_GetObjectItem(e, "prompts")->child; p; p = p->next) {
            check_prompt(dirs[i], &f, p, worst);
        }
        cJSON_Delete(e);
        fx_close(&f);
        print_message("%s: logits %.2g, streams %.2g, drafts %.2g\n", dirs[i], worst[0], worst[1], worst[2]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_expected)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
