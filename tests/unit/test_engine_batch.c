/* Batches: every sequence's text is what it is alone, whatever runs beside it; prompts are read in chunks
 * between the others' steps; a shared prefix is computed once; nothing is left behind. */
#include "fixture.h"

#include "alloc.h"

#define MAX_REQ 64

static void micro(char out[1024], const char *layout)
{
    const char *data = getenv("QX_TEST_DATA");
    assert_non_null(data);
    snprintf(out, 1024, "%s/micro/%s", data, layout);
}

struct text { uint32_t ids[64]; size_t n; enum qx_stop_reason reason; int done; };
static int on_token(void *user, const struct qx_token *t)
{
    struct text *x = user;
    assert_true(x->n < 64);
    x->ids[x->n++] = t->id;
    return 0;
}
static void on_done(void *user, const struct qx_gen_stats *st, const struct qx_error *err)
{
    struct text *x = user;
    assert_null(err);
    assert_int_equal(st->n_tokens, x->n);
    x->reason = st->reason;
    ++x->done;
}

struct job { uint32_t ids[200]; size_t n; struct qx_gen_params p; };

/* shared: groups of requests that begin alike; 0: none do. */
static void make_job(struct job *j, uint32_t i, uint32_t shared, int32_t draft)
{
    uint32_t x = i * 77 + 5;
    memset(j, 0, sizeof *j);
    j->n = 1 + (i * 13) % 90;
    for (size_t k = 0; k < j->n; ++k) {
        x = x * 1664525u + 1013904223u;
        j->ids[k] = (x >> 16) % 500;
    }
    if (shared) {
        memmove(j->ids + 100, j->ids, j->n * 4);
        for (uint32_t k = 0; k < 100; ++k) {
            j->ids[k] = (k * 31 + i % shared * 7) % 499;
        }
        j->n += 100;
    }
    j->p = QX_GEN_PARAMS_DEFAULT;
    j->p.n_max = 1 + (i * 7) % 24;
    j->p.draft = draft;
    if (i % 3 == 1) {
        j->p.sampling.temperature = 1.0f;
        j->p.sampling.top_k = 20;
        j->p.sampling.seed = i;
    }
}

static void alone(const char *dir, const struct job *j, struct text *out, struct fx_model *f)
{
    struct qx_error err;
    struct qx_gen_stats st;
    struct qx_gen_params p = j->p;
    (void)dir;
    p.draft = 0;
    p.on_token = on_token;
    p.user = out;
    fx_ok(qx_gen_reset(f->g, &err), &err);
    fx_ok(qx_gen_prefill(f->g, j->ids, j->n, NULL, NULL, &err), &err);
    fx_ok(qx_gen_generate(f->g, &p, &st, &err), &err);
    out->reason = st.reason;
}

static void check_batch(uint32_t n_req, uint32_t shared, int32_t draft, uint32_t n_seqs, uint32_t chunk)
{
    char dir[1024];
    struct qx_error err;
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct job *jobs = calloc(MAX_REQ, sizeof *jobs);
    struct text *want = calloc(MAX_REQ, sizeof *want), *got = calloc(MAX_REQ, sizeof *got);
    struct qx_batch *b;
    struct qx_batch_stats st;
    micro(dir, "mixed");
    o.ctx_tokens = 256;
    /* Chunks change no bit on the cpu; elsewhere they must be the same ones. */
    o.chunk_rows = getenv("QX_TEST_DEVICE") ? chunk : 0;
    struct fx_model f = fx_open(dir, o);
    for (uint32_t i = 0; i < n_req; ++i) {
        make_job(&jobs[i], i, shared, draft);
        alone(dir, &jobs[i], &want[i], &f);
    }
    fx_close(&f);

    o.max_seqs = n_seqs;
    o.chunk_rows = chunk;
    o.draft_max = (uint32_t)draft;
    f = fx_open(dir, o);
    qx_gen_destroy(f.g);
    f.g = NULL;
    fx_ok(qx_batch_create(&b, f.m, &err), &err);
    for (uint32_t i = 0; i < n_req; ++i) {
        struct qx_request r = {.ids = jobs[i].ids, .n_ids = jobs[i].n, .params = jobs[i].p,
                               .on_done = on_done};
        r.params.on_token = on_token;
        r.params.user = &got[i];
        fx_ok(qx_batch_add(b, &r, &err), &err);
    }
    fx_ok(qx_batch_run(b, &err), &err);
    qx_batch_stats(b, &st);
    assert_int_equal(st.n_done, n_req);
    for (uint32_t i = 0; i < n_req; ++i) {
        assert_int_equal(got[i].done, 1);
        assert_int_equal(got[i].n, want[i].n);
        assert_memory_equal(got[i].ids, want[i].ids, want[i].n * 4);
        assert_int_equal(got[i].reason, want[i].reason);
    }
    if (shared) {
        /* One page of 64 of the 100 common ids, read by the first of each group. */
        assert_int_equal(st.shared_tokens, (n_req - shared) * 64);
    }
    qx_batch_destroy(b);
    fx_close(&f);
    free(got);
    free(want);
    free(jobs);
}

static void test_mixed(void **state)
{
    (void)state;
    check_batch(64, 0, 0, 7, 16);
}
static void test_drafts(void **state)
{
    (void)state;
    check_batch(24, 0, 2, 5, 32);
}
static void test_prefix(void **state)
{
    (void)state;
    check_batch(16, 1, 0, 6, 64);
    check_batch(8, 1, 1, 4, 64);
    check_batch(18, 3, 0, 5, 16);
}

/* Many short sequences through few slots: pages, slots and memory all come back. */
static void test_leaks(void **state)
{
    (void)state;
    const char *asked = getenv("QX_SEQS");
    uint32_t total = asked ? (uint32_t)strtoul(asked, NULL, 10) : 160;
    char dir[1024];
    struct qx_error err;
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_batch *b;
    micro(dir, "bf16");
    o.max_seqs = 8;
    o.ctx_tokens = 64;
    struct fx_model f = fx_open(dir, o);
    qx_gen_destroy(f.g);
    f.g = NULL;
    fx_ok(qx_batch_create(&b, f.m, &err), &err);
    uint64_t live = 0;
    for (uint32_t round = 0; round < total / 40; ++round) {
        struct text got[40] = {{{0}, 0, 0, 0}};
        for (uint32_t i = 0; i < 40; ++i) {
            uint32_t ids[3] = {i, round % 500, 7};
            struct qx_request r = {.ids = ids, .n_ids = 1 + i % 3, .params = QX_GEN_PARAMS_DEFAULT,
                                   .on_done = on_done};
            r.params.n_max = i % 3;
            r.params.on_token = on_token;
            r.params.user = &got[i];
            fx_ok(qx_batch_add(b, &r, &err), &err);
        }
        fx_ok(qx_batch_run(b, &err), &err);
        for (uint32_t i = 0; i < 40; ++i) {
            assert_int_equal(got[i].n, i % 3);
            assert_int_equal(got[i].done, 1);
        }
        if (round == 1) {
            live = qx_alloc_live();
        }
    }
    assert_int_equal(qx_alloc_live(), live);
    qx_batch_destroy(b);
    fx_ok(qx_gen_create(&f.g, f.m, &err), &err); /* a sequence is free again */
    fx_close(&f);
    assert_int_equal(qx_alloc_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_mixed), cmocka_unit_test(test_drafts),
                                       cmocka_unit_test(test_prefix), cmocka_unit_test(test_leaks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
