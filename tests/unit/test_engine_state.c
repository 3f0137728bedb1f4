/* State of sequences: chunks of any size, saving and restoring, causality, resets, non-finite logits.
 * The reference keeps one order of operations, so equality is bit for bit. */
#include "fixture.h"

#include "engine.h"
#include "plan.h"

struct keep { size_t vocab; uint64_t from; float *rows; };
static bool want_from(void *user, uint64_t pos)
{
    return pos >= ((struct keep *)user)->from;
}
static void on_logits(void *user, uint64_t pos, const float *row)
{
    struct keep *k = user;
    memcpy(k->rows + (pos - k->from) * k->vocab, row, k->vocab * 4);
}

static void micro(char out[1024], const char *layout)
{
    const char *data = getenv("QX_TEST_DATA");
    assert_non_null(data);
    snprintf(out, 1024, "%s/micro/%s", data, layout);
}

/* Ids that cross the budget (32 tokens), block ends and end-of-text ids. */
static void make_ids(uint32_t *ids, size_t n)
{
    uint32_t x = 12345;
    for (size_t i = 0; i < n; ++i) {
        x = x * 1664525u + 1013904223u;
        ids[i] = i % 17 == 9 ? 500 : (x >> 16) % 500;
    }
}

#define N_IDS 150

/* Logits of all positions and the digest after consuming ids in chunks. */
static void run_chunks(const char *dir, uint32_t chunk, size_t split, float *logits, uint8_t digest[16])
{
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_error err;
    uint32_t ids[N_IDS];
    o.chunk_rows = chunk;
    o.mtp = true;
    struct fx_model f = fx_open(dir, o);
    struct keep k = {f.info.vocab_size, 0, logits};
    struct qx_gen_hooks h = {.user = &k, .want_logits = want_from, .logits = on_logits};
    make_ids(ids, N_IDS);
    qx_gen_set_hooks(f.g, &h);
    for (size_t at = 0; at < N_IDS; at += split) {
        size_t n = N_IDS - at < split ? N_IDS - at : split;
        fx_ok(qx_gen_prefill(f.g, ids + at, n, NULL, NULL, &err), &err);
    }
    fx_ok(qx_gen_digest(f.g, digest, &err), &err);
    fx_close(&f);
}

static void test_chunks(void **state)
{
    (void)state;
    static const char *const layouts[] = {"mixed", "nvfp4-ple"};
    static const uint32_t chunks[] = {1, 3, 4, 7, 64};
    for (size_t l = 0; l < 2; ++l) {
        char dir[1024];
        micro(dir, layouts[l]);
        float *want = malloc(N_IDS * 512 * 4), *got = malloc(N_IDS * 512 * 4);
        uint8_t dw[16], dg[16];
        run_chunks(dir, 512, N_IDS, want, dw);
        for (size_t i = 0; i < 5; ++i) {
            run_chunks(dir, chunks[i], N_IDS, got, dg);
            assert_memory_equal(got, want, N_IDS * 512 * 4);
            assert_memory_equal(dg, dw, 16);
        }
        run_chunks(dir, 512, 37, got, dg); /* several prefill calls */
        assert_memory_equal(got, want, N_IDS * 512 * 4);
        assert_memory_equal(dg, dw, 16);
        free(got);
        free(want);
    }
}

/* Threads must not change a bit. */
static void test_threads(void **state)
{
    (void)state;
    char dir[1024];
    uint8_t digest[3][16];
    micro(dir, "fp8");
    for (uint32_t t = 1; t <= 3; ++t) {
        struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
        struct qx_error err;
        uint32_t ids[60];
        o.n_threads = t;
        struct fx_model f = fx_open(dir, o);
        make_ids(ids, 60);
        fx_ok(qx_gen_prefill(f.g, ids, 60, NULL, NULL, &err), &err);
        fx_ok(qx_gen_digest(f.g, digest[t - 1], &err), &err);
        fx_close(&f);
    }
    assert_memory_equal(digest[0], digest[1], 16);
    assert_memory_equal(digest[0], digest[2], 16);
}

static void test_save_restore(void **state)
{
    (void)state;
    char dir[1024];
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_error err;
    uint32_t ids[80];
    micro(dir, "bf16");
    o.mtp = true;
    o.max_seqs = 2;
    struct fx_model f = fx_open(dir, o);
    struct qx_gen *other;
    struct qx_snapshot *snap;
    uint8_t before[16], after[16], later[2][16];
    float row[3][512];
    struct keep k = {512, 78, row[0]};
    struct qx_gen_hooks h = {.user = &k, .want_logits = want_from, .logits = on_logits};
    make_ids(ids, 80);
    fx_ok(qx_gen_create(&other, f.m, &err), &err);
    fx_ok(qx_gen_prefill(f.g, ids, 78, NULL, NULL, &err), &err);
    fx_ok(qx_gen_save(f.g, &snap, &err), &err);
    fx_ok(qx_gen_digest(f.g, before, &err), &err);
    qx_gen_set_hooks(f.g, &h);
    fx_ok(qx_gen_prefill(f.g, ids + 78, 1, NULL, NULL, &err), &err);
    fx_ok(qx_gen_digest(f.g, later[0], &err), &err);

    k.rows = row[1];
    fx_ok(qx_gen_prefill(other, ids + 3, 40, NULL, NULL, &err), &err); /* to be overwritten */
    fx_ok(qx_gen_restore(other, snap, &err), &err);
    fx_ok(qx_gen_digest(other, after, &err), &err);
    assert_memory_equal(before, after, 16);
    qx_gen_set_hooks(other, &h);
    fx_ok(qx_gen_prefill(other, ids + 78, 1, NULL, NULL, &err), &err);
    fx_ok(qx_gen_digest(other, later[1], &err), &err);
    assert_memory_equal(row[0], row[1], sizeof row[0]);
    assert_memory_equal(later[0], later[1], 16);

    /* A reset sequence remembers nothing. */
    k.rows = row[2];
    fx_ok(qx_gen_reset(f.g, &err), &err);
    fx_ok(qx_gen_prefill(f.g, ids, 79, NULL, NULL, &err), &err);
    assert_memory_equal(row[0], row[2], sizeof row[0]);
    qx_snapshot_destroy(snap);
    qx_gen_destroy(other);
    fx_close(&f);
}

/* What comes after a position never changes its logits, also inside one chunk. */
static void test_causal(void **state)
{
    (void)state;
    char dir[1024];
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_error err;
    uint32_t ids[60];
    float *a = malloc(60 * 512 * 4), *b = malloc(60 * 512 * 4);
    micro(dir, "mixed");
    struct fx_model f = fx_open(dir, o);
    struct keep k = {512, 0, a};
    struct qx_gen_hooks h = {.user = &k, .want_logits = want_from, .logits = on_logits};
    make_ids(ids, 60);
    qx_gen_set_hooks(f.g, &h);
    fx_ok(qx_gen_prefill(f.g, ids, 60, NULL, NULL, &err), &err);
    for (size_t p = 1; p < 60; p += 7) {
        uint32_t changed[60];
        memcpy(changed, ids, sizeof ids);
        for (size_t i = p; i < 60; ++i) {
            changed[i] = (ids[i] + 1 + (uint32_t)i) % 500;
        }
        k.rows = b;
        fx_ok(qx_gen_reset(f.g, &err), &err);
        fx_ok(qx_gen_prefill(f.g, changed, 60, NULL, NULL, &err), &err);
        assert_memory_equal(a, b, p * 512 * 4);
        assert_memory_not_equal(a + p * 512, b + p * 512, 512 * 4);
    }
    fx_close(&f);
    free(b);
    free(a);
}

/* Requests that cannot be served are refused and leave the sequence as it was. */
static void test_refusals(void **state)
{
    (void)state;
    char dir[1024];
    struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
    struct qx_error err;
    struct qx_gen_stats st;
    struct qx_gen_params p = QX_GEN_PARAMS_DEFAULT;
    struct qx_gen *extra;
    uint32_t ids[64];
    micro(dir, "bf16");
    o.ctx_tokens = 64;
    struct fx_model f = fx_open(dir, o);
    assert_int_equal(f.info.ctx_tokens, 64);
    assert_int_equal(qx_gen_create(&extra, f.m, &err), -QX_E_PLAN);
    assert_null(extra);
    assert_int_equal(qx_gen_generate(f.g, &p, &st, &err), -QX_E_USAGE);
    make_ids(ids, 64);
    fx_ok(qx_gen_prefill(f.g, ids, 60, NULL, NULL, &err), &err);
    assert_int_equal(qx_gen_prefill(f.g, ids, 5, NULL, NULL, &err), -QX_E_USAGE);
    assert_string_equal(err.kind, "context-exceeded");
    ids[2] = 512;
    assert_int_equal(qx_gen_prefill(f.g, ids, 3, NULL, NULL, &err), -QX_E_RANGE);
    assert_string_equal(err.kind, "token-range");
    assert_int_equal(qx_gen_n_tokens(f.g), 60);
    fx_ok(qx_gen_generate(f.g, &p, &st, &err), &err); /* until the context ends */
    assert_int_equal(st.n_tokens, 4);
    assert_int_equal(st.reason, QX_STOP_CONTEXT);
    p.draft = 1;
    assert_int_equal(qx_gen_generate(f.g, &p, &st, &err), -QX_E_USAGE);
    fx_close(&f);

    struct qx_open how = QX_OPEN_DEFAULT;
    struct qx_ckpt *ck;
    struct qx_model *m;
    fx_ok(qx_ckpt_open(&ck, dir, &how, &err), &err);
    o = QX_MODEL_OPTS_DEFAULT;
    o.device = "cpu";
    o.device_memory_bytes = 256 << 10;
    assert_int_equal(qx_model_load(&m, ck, &o, &err), -QX_E_PLAN);
    assert_string_equal(err.kind, "memory-plan");
    assert_non_null(strstr(err.msg, "no context fits"));
    assert_null(m);
    o.device_memory_bytes = 0;
    o.ctx_tokens = 4097;
    assert_int_equal(qx_model_load(&m, ck, &o, &err), -QX_E_USAGE);
    assert_string_equal(err.kind, "context-exceeded");
    qx_ckpt_close(ck);
}

/* The plan is what gets allocated, to within 2 %. */
static void test_plan(void **state)
{
    (void)state;
    char dir[1024];
    micro(dir, "mixed");
    for (int i = 0; i < 4; ++i) {
        struct qx_model_opts o = QX_MODEL_OPTS_DEFAULT;
        o.ctx_tokens = i & 1 ? 4096 : 100;
        o.draft_max = i & 2 ? 3 : 0;
        o.max_seqs = i == 3 ? 4 : 1;
        struct fx_model f = fx_open(dir, o);
        double plan = (double)f.info.planned_device_bytes, got = (double)f.info.device_peak_bytes;
        if (fabs(got - plan) > 0.02 * plan) {
            print_error("planned %.0f, allocated %.0f\n", plan, got);
            fail();
        }
        fx_close(&f);
    }
}

static struct qx_gen_stats generate(struct fx_model *f, uint64_t n, float presence)
{
    struct qx_error err;
    struct qx_gen_params p = QX_GEN_PARAMS_DEFAULT;
    struct qx_gen_stats st;
    uint32_t ids[20];
    make_ids(ids, 20);
    p.n_max = n;
    p.sampling.temperature = 0.7f;
    p.sampling.presence_penalty = presence;
    fx_ok(qx_gen_reset(f->g, &err), &err);
    fx_ok(qx_gen_prefill(f->g, ids, 20, NULL, NULL, &err), &err);
    fx_ok(qx_gen_generate(f->g, &p, &st, &err), &err);
    assert_int_equal(st.n_tokens, n);
    return st;
}

/* Plain decoding never waits for the device and takes no memory of it; penalties need the host each step,
 * which shows that the counts count. */
static void test_no_host_in_the_loop(void **state)
{
    (void)state;
    char dir[1024];
    micro(dir, "mixed");
    struct fx_model f = fx_open(dir, QX_MODEL_OPTS_DEFAULT);
    struct qx_gen_stats st = generate(&f, 50, 0.0f);
    assert_int_equal(st.waits, 0);
    assert_int_equal(st.allocs, 0);
    uint64_t waits = f.m->be->n_waits, allocs = f.m->be->n_allocs;
    st = generate(&f, 50, 0.5f);
    assert_true(st.waits >= 49);
    assert_true(f.m->be->n_waits - waits >= st.waits);
    assert_int_equal(f.m->be->n_allocs - allocs, 2); /* the lists of penalties, once */
    st = generate(&f, 50, 0.5f);
    assert_int_equal(st.allocs, 0);
    fx_close(&f);
}

/* The plan of the configuration alone, made for a GPU, has the queue's workspace as a part. */
static void test_workspace(void **state)
{
    (void)state;
    char dir[1024];
    micro(dir, "mixed");
    struct fx_model f = fx_open(dir, QX_MODEL_OPTS_DEFAULT);
    struct qx_plan_request r = {.weight_bytes = 1000, .table = QX_TABLE_DEVICE, .max_seqs = 1};
    struct qx_plan without, with;
    assert_int_equal(qx_plan_make(&without, f.m->cfg, &r, NULL), 0);
    r.workspace_bytes = QX_CUDA_WORKSPACE_BYTES;
    assert_int_equal(qx_plan_make(&with, f.m->cfg, &r, NULL), 0);
    assert_int_equal(with.device_bytes, without.device_bytes + QX_CUDA_WORKSPACE_BYTES);
    assert_int_equal(with.n_parts, without.n_parts + 1);
    r.device_bytes = with.device_bytes;
    r.ctx_tokens = without.budget.ctx_tokens;
    assert_int_equal(qx_plan_make(&with, f.m->cfg, &r, NULL), 0);
    assert_true(with.fits);
    r.device_bytes -= 1;
    r.chunk_rows = without.budget.chunk_rows;
    assert_int_equal(qx_plan_make(&with, f.m->cfg, &r, NULL), 0);
    assert_false(with.fits);
    fx_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks),   cmocka_unit_test(test_threads),  cmocka_unit_test(test_save_restore),
        cmocka_unit_test(test_causal),   cmocka_unit_test(test_refusals), cmocka_unit_test(test_plan),
        cmocka_unit_test(test_no_host_in_the_loop), cmocka_unit_test(test_workspace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
