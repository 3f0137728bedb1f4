/* bench_load.c: a workload of requests through the batch, as a caller would run it. */
#include "bench.h"

#include "alloc.h"
#include "line.h"

#include <string.h>

struct load_request {
    uint32_t *ids;
    uint64_t start_ns, first_ns, last_ns, n_tokens, ttft_ns;
    struct qx_error err;
    bool failed;
};

static int on_token(void *user, const struct qx_token *t)
{
    struct load_request *r = user;
    (void)t;
    r->last_ns = qx_now_ns();
    r->first_ns = r->n_tokens++ ? r->first_ns : r->last_ns;
    return 0;
}

static void on_done(void *user, const struct qx_gen_stats *stats, const struct qx_error *err)
{
    struct load_request *r = user;
    r->ttft_ns = stats->ttft_ns;
    r->start_ns = r->first_ns - stats->ttft_ns;
    r->failed = err != NULL;
    if (err) {
        r->err = *err;
    }
}

/* Ids that are the same for all up to `shared`, then of request i alone. */
static int add(struct qx_batch *b, const struct qx_model *m, struct load_request *r, uint32_t i, uint64_t shared,
               uint64_t own, uint64_t output, struct qx_error *err)
{
    r->ids = qx_malloc((shared + own) * sizeof *r->ids);
    if (!r->ids) {
        return qx_fail_nomem(err);
    }
    for (uint64_t k = 0; k < shared + own; ++k) {
        uint64_t x = k < shared ? k * 2654435761u : (k + 1) * 40503u + i * 7919u + 1;
        r->ids[k] = (uint32_t)((x >> 3) % m->cfg->vocab_size);
    }
    r->ids[shared] = i; /* they part here */
    struct qx_request q = {.ids = r->ids, .n_ids = shared + own, .params = QX_GEN_PARAMS_DEFAULT, .on_done = on_done};
    q.params.n_max = output;
    q.params.on_token = on_token;
    q.params.user = r;
    return qx_batch_add(b, &q, err);
}

static void summarize(const struct load_request *r, struct qx_bench_load *out)
{
    uint64_t begin = UINT64_MAX, end = 0, tokens = 0;
    double n = out->streams;
    out->first_s = 1e-9 * (double)r[0].ttft_ns;
    for (uint32_t i = 1; i <= out->streams; ++i) {
        double ttft = 1e-9 * (double)r[i].ttft_ns, all = 1e-9 * (double)(r[i].last_ns - r[i].start_ns);
        out->ttft_mean_s += ttft / n;
        out->ttft_max_s = ttft > out->ttft_max_s ? ttft : out->ttft_max_s;
        out->latency_mean_s += all / n;
        out->latency_max_s = all > out->latency_max_s ? all : out->latency_max_s;
        if (r[i].n_tokens > 1) {
            out->stream_tok_s += (double)(r[i].n_tokens - 1) / (1e-9 * (double)(r[i].last_ns - r[i].first_ns)) / n;
        }
        begin = r[i].start_ns < begin ? r[i].start_ns : begin;
        end = r[i].last_ns > end ? r[i].last_ns : end;
        tokens += r[i].n_tokens;
    }
    out->total_tok_s = (double)tokens / (1e-9 * (double)(end - begin));
}

int qx_bench_workload(struct qx_model *m, uint32_t streams, uint64_t shared, uint64_t suffix, uint64_t output,
                      struct qx_bench_load *out, struct qx_error *err)
{
    *out = (struct qx_bench_load){.streams = streams, .shared = shared, .suffix = suffix, .output = output};
    if (!streams || !suffix || !output || streams >= m->cfg->vocab_size) {
        return qx_fail(err, QX_E_USAGE, "usage", "a workload has streams, a suffix and an output of at least one");
    }
    struct qx_batch *b = NULL;
    struct load_request *r = qx_calloc(streams + 1u, sizeof *r);
    int rc = r ? qx_batch_create(&b, m, err) : qx_fail_nomem(err);
    for (uint32_t i = 0; i <= streams && !rc; ++i) {
        rc = add(b, m, &r[i], i, shared, i ? suffix : 1, i ? output : 1, err);
    }
    rc = rc ? rc : qx_batch_run(b, err);
    for (uint32_t i = 0; r && i <= streams; ++i) {
        if (!rc && r[i].failed) {
            rc = -(int)r[i].err.code;
            if (err) {
                *err = r[i].err;
            }
        }
        qx_free(r[i].ids);
    }
    if (!rc) {
        struct qx_batch_stats st;
        qx_batch_stats(b, &st);
        out->shared_tokens = st.shared_tokens;
        summarize(r, out);
    }
    qx_batch_destroy(b);
    qx_free(r);
    return rc;
}
