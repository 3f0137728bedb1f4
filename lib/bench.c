/* bench.c: decode and prefill steps of a model, timed through the same calls that generation makes. */
#include "bench.h"

#include "alloc.h"
#include "line.h"
#include "step_bytes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double qx_bench_bandwidth(struct qx_model *m)
{
    /* Beyond any cache; a GPU needs several copies to hide what it costs to start one. */
    bool host = m->be->host_memory;
    const size_t n = host ? (size_t)1 << 28 : (size_t)1 << 30;
    const int copies = host ? 1 : 8;
    char *a = NULL, *b = NULL;
    double best = 0.0;
    if (m->be->mem_alloc(m->be, (void **)&a, n, NULL) == 0 && m->be->mem_alloc(m->be, (void **)&b, n, NULL) == 0) {
        for (int i = 0; i < 6; ++i) {
            if (m->be->wait(m->q, NULL)) {
                break;
            }
            double t0 = now_s();
            int rc = 0;
            for (int j = 0; j < copies; ++j) {
                rc |= m->be->copy(m->q, b, a, n);
            }
            if (rc || m->be->wait(m->q, NULL)) {
                break;
            }
            double r = 2.0 * copies * (double)n / (now_s() - t0);
            best = r > best ? r : best;
        }
    }
    m->be->mem_free(m->be, a);
    m->be->mem_free(m->be, b);
    return best;
}

/* ---- rows --------------------------------------------------------------------------------- */

struct bench_seqs { int32_t seq[64]; int32_t id[64]; uint32_t n; };

static int open_seqs(struct qx_model *m, uint32_t n, uint64_t tokens, struct bench_seqs *b, struct qx_error *err)
{
    memset(b, 0, sizeof *b);
    if (n > 64) {
        return qx_fail(err, QX_E_USAGE, "usage", "at most 64 streams");
    }
    int rc = 0;
    while (b->n < n && !rc) {
        rc = qx_seq_open(m, &b->seq[b->n], err);
        if (!rc) {
            rc = qx_seq_reserve(m, b->seq[b->n], tokens, err);
            b->id[b->n] = (int32_t)((1000003u * (b->n + 1)) % m->cfg->vocab_size);
            ++b->n;
        }
    }
    return rc;
}

static void close_seqs(struct qx_model *m, struct bench_seqs *b)
{
    for (uint32_t i = 0; i < b->n; ++i) {
        qx_seq_close(m, b->seq[i]);
    }
}

/* n decode steps of all streams from a position on, as generation runs them: each step feeds the next on
 * the device, launched one ahead of what the host has read. */
static int decode_steps(struct qx_model *m, struct bench_seqs *b, uint64_t pos, uint32_t n,
                        struct qx_bench_row *count, struct qx_error *err)
{
    struct qx_row rows[64];
    uint32_t logit[64];
    for (uint32_t i = 0; i < b->n; ++i) {
        int32_t slot = m->seqs[b->seq[i]].slots[0];
        rows[i] = (struct qx_row){.seq = b->seq[i], .pos = (int32_t)pos, .id = b->id[i], .state_in = slot,
                                  .state_out = slot, .src_x = -1, .src_hold = -1};
        logit[i] = i;
    }
    struct qx_want w = {.logit_row = logit, .n_logits = b->n};
    int rc = qx_exec_free_start(m, rows, b->n, &w, err);
    uint64_t waits = m->be->n_waits, allocs = m->be->n_allocs;
    uint32_t launched = 0, ahead = m->be->graph_begin ? 2 : 1;
    for (uint32_t read = 0; read < n && !rc; ++read) {
        while (launched < n && launched < read + ahead && !rc) {
            rc = qx_exec_free_launch(m, b->n, err);
            ++launched;
        }
        const int32_t *ids;
        for (uint64_t spins = 0; !rc && !(ids = qx_exec_free_ids(m, b->n, read)); ++spins) {
            rc = spins == 1u << 24 ? m->be->wait(m->q, err) : 0;
        }
        for (uint32_t i = 0; i < b->n && !rc; ++i) {
            if (ids[i] < 0) {
                rc = qx_fail(err, QX_E_VALUE, "non-finite-logits", "logits of stream %u are not finite", i);
            }
            b->id[i] = ids[i] < 0 ? 0 : ids[i];
        }
    }
    if (count) { /* all ids are here: what waits now waits for nothing that a token needs */
        count->n_steps += n;
        count->n_waits += m->be->n_waits - waits;
        count->n_allocs += m->be->n_allocs - allocs;
    }
    int waited = m->be->wait(m->q, rc ? NULL : err);
    return rc ? rc : waited;
}

/* Mean number of different experts that a layer's rows picked, over the layers of one more step. */
static int count_experts(struct qx_model *m, const struct bench_seqs *b, double *out, struct qx_error *err)
{
    uint32_t k = m->cfg->n_experts_per_tok, n = b->n * k, total = 0;
    int32_t *e = qx_malloc(n * sizeof *e);
    uint8_t *seen = qx_malloc(m->cfg->n_experts);
    struct qx_pending pending = {0};
    int rc = e && seen ? qx_graph_embed(m, &m->ctl.step, m->cfg->hc_count, m->b.x, err) : qx_fail_nomem(err);
    for (uint32_t l = 0; l < m->cfg->n_layers && !rc; ++l) {
        const struct qx_layer *ly = &m->layers[l];
        rc = qx_graph_layer(m, ly, &m->ctl.step, NULL, m->b.x, &pending, ly->kind_index, err);
        if (!rc && m->be->download(m->q, e, m->b.expert, n * sizeof *e)) {
            rc = qx_model_op_failed(m, "download", -1, err);
        }
        rc = rc ? rc : m->be->wait(m->q, err);
        memset(seen, 0, m->cfg->n_experts);
        for (uint32_t i = 0; i < n && !rc; ++i) {
            if ((uint32_t)e[i] < m->cfg->n_experts) {
                total += !seen[e[i]];
                seen[e[i]] = 1;
            }
        }
    }
    *out = (double)total / m->cfg->n_layers;
    qx_free(e);
    qx_free(seen);
    return rc;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void summarize(double *t, uint32_t n, struct qx_bench_row *out)
{
    qsort(t, n, sizeof *t, by_value);
    out->n_runs = n;
    out->median_s = n % 2 ? t[n / 2] : 0.5 * (t[n / 2 - 1] + t[n / 2]);
    out->low_s = t[0];
    out->high_s = t[n - 1];
}

int qx_bench_decode(struct qx_model *m, uint32_t streams, uint64_t depth, uint32_t n, uint32_t repeat,
                    struct qx_bench_row *out, struct qx_error *err)
{
    *out = (struct qx_bench_row){.streams = streams, .depth = depth};
    repeat = repeat < 1 ? 1 : repeat > 64 ? 64 : repeat;
    struct bench_seqs b;
    double t[64], expert = 0.0, by_op[QX_OP_COUNT];
    int rc = open_seqs(m, streams, depth + n + 8, &b, err);
    rc = rc ? rc : decode_steps(m, &b, depth, 6, NULL, err); /* warm, and recorded */
    for (uint32_t r = 0; r < repeat && !rc; ++r) {
        double t0 = now_s();
        rc = decode_steps(m, &b, depth, n, out, err);
        t[r] = (now_s() - t0) / n;
    }
    if (!rc) {
        summarize(t, repeat, out);
        for (uint32_t i = 0; i < m->n_graphs; ++i) {
            if (m->graphs[i].graph && m->graphs[i].key.n_rows == streams
                && m->graphs[i].n_nodes > out->n_nodes) {
                out->n_nodes = m->graphs[i].n_nodes;
            }
        }
        rc = count_experts(m, &b, &out->unique_experts, err);
    }
    rc = rc ? rc : qx_expert_bytes(m, &expert, err);
    if (!rc) {
        qx_step_bytes(m, streams, depth + n / 2, out->unique_experts, expert, by_op);
        for (int i = 0; i < QX_OP_COUNT; ++i) {
            out->bytes += by_op[i];
        }
    }
    close_seqs(m, &b);
    return rc;
}

/* ---- rounds of drafts --------------------------------------------------------------------- */

/* The line's sequence as if it had read `depth` ids and chosen the next. */
static int enter_rounds(struct qx_model *m, struct qx_line *line, uint64_t depth, uint32_t seed, struct qx_error *err)
{
    struct qx_seq *s = &m->seqs[line->seq];
    int rc = 0;
    s->n_ids = 0;
    for (uint64_t i = 0; i <= depth && !rc; ++i) {
        rc = qx_seq_push(m, line->seq, (uint32_t)((i * 2654435761u + seed) % m->cfg->vocab_size), err);
    }
    s->n_done = depth;
    s->n_mtp = depth - 1;
    s->held = true;
    s->cur = s->slots[0];
    line->done = line->has_next = false;
    return rc;
}

/* Round number i of those that keep `accept` tokens on average. */
static int one_round(struct qx_model *m, struct qx_line *line, double accept, uint32_t i, struct qx_error *err)
{
    line->n_forced = (uint32_t)((accept - 1.0) * (i + 1)) - (uint32_t)((accept - 1.0) * i);
    return qx_line_round(m, &line, 1, err);
}

/* Experts that so many independent draws touch, of a layer. */
static double unique_experts(const struct qx_model *m, double rows)
{
    double miss = 1.0 - (double)m->cfg->n_experts_per_tok / m->cfg->n_experts;
    return m->cfg->n_experts * (1.0 - pow(miss, rows));
}

/* What a round's verification and its drafts must move, by op; returns the experts of the verification. */
static double round_bytes(const struct qx_model *m, uint32_t k, uint64_t depth, double expert,
                          double check[QX_OP_COUNT], double drafts[QX_OP_COUNT])
{
    double unique = unique_experts(m, k + 1.0);
    qx_step_bytes(m, k + 1, depth, unique, expert, check);
    qx_draft_bytes(m, expert, drafts);
    for (int i = 0; i < QX_OP_COUNT; ++i) {
        drafts[i] *= k;
    }
    return unique;
}

static uint64_t within_ctx(const struct qx_model *m, uint64_t tokens)
{
    return tokens < m->budget.ctx_tokens ? tokens : m->budget.ctx_tokens;
}

static int can_draft(const struct qx_model *m, uint32_t k, double accept, uint64_t depth, struct qx_error *err)
{
    if (!(accept >= 1.0) || accept > k + 1.0) {
        return qx_fail(err, QX_E_USAGE, "usage", "%u drafts a round keep 1 to %u tokens", k, k + 1);
    }
    if (!m->mtp.loaded || k > m->budget.draft_max || !depth) {
        return qx_fail(err, QX_E_USAGE, "usage", "%u drafts a round need a draft head and some context", k);
    }
    return 0;
}

int qx_bench_drafts(struct qx_model *m, uint32_t k, double accept, uint64_t depth, uint32_t n, uint32_t repeat,
                    struct qx_bench_row *out, struct qx_error *err)
{
    *out = (struct qx_bench_row){.streams = 1, .depth = depth, .drafts = k};
    repeat = repeat < 1 ? 1 : repeat > 64 ? 64 : repeat;
    double t[64], expert = 0.0, check[QX_OP_COUNT], drafts[QX_OP_COUNT];
    struct bench_seqs b;
    uint64_t tokens_kept = 0;
    QX_TRY(can_draft(m, k, accept, depth, err));
    int rc = open_seqs(m, 1, within_ctx(m, depth + (uint64_t)(repeat + 1) * n * (k + 1) + 8), &b, err);
    struct qx_line line = {.seq = b.n ? b.seq[0] : 0, .p = QX_GEN_PARAMS_DEFAULT};
    line.p.draft = (int32_t)k;
    for (uint32_t r = 0; r <= repeat && !rc; ++r) { /* the first is the warm-up */
        rc = enter_rounds(m, &line, depth, r, err);
        uint64_t waits = m->be->n_waits, allocs = m->be->n_allocs, before = line.stats.n_tokens;
        double t0 = now_s();
        uint32_t rounds = 0;
        for (; !rc && rounds < n && !line.done; ++rounds) {
            rc = one_round(m, &line, accept, rounds, err);
        }
        out->n_waits += r ? m->be->n_waits - waits : 0;
        out->n_allocs += r ? m->be->n_allocs - allocs : 0;
        rc = rc ? rc : qx_exec_wait(m, err); /* the draft head's last rows */
        if (r && !rc) {
            t[r - 1] = (now_s() - t0) / rounds;
            out->n_steps += rounds;
            tokens_kept += line.stats.n_tokens - before;
        }
    }
    rc = rc ? rc : qx_expert_bytes(m, &expert, err);
    if (!rc) {
        summarize(t, repeat, out);
        for (uint32_t i = 0; i < m->n_graphs; ++i) {
            const struct qx_graph *g = &m->graphs[i];
            if (g->graph && g->key.n_drafts == k && g->n_nodes > out->n_nodes) {
                out->n_nodes = g->n_nodes;
            }
        }
        out->tokens = out->n_steps ? (double)tokens_kept / (double)out->n_steps : 1.0;
        out->unique_experts = round_bytes(m, k, depth, expert, check, drafts);
        for (int i = 0; i < QX_OP_COUNT; ++i) {
            out->bytes += check[i] + drafts[i];
        }
    }
    close_seqs(m, &b);
    return rc;
}

int qx_bench_prefill(struct qx_model *m, uint64_t n, uint32_t repeat, struct qx_bench_row *out,
                     struct qx_error *err)
{
    *out = (struct qx_bench_row){.streams = 1, .prompt = n};
    repeat = repeat < 1 ? 1 : repeat > 64 ? 64 : repeat;
    struct bench_seqs b;
    double t[64], expert = 0.0, by_op[QX_OP_COUNT];
    uint32_t chunk = m->budget.chunk_rows;
    struct qx_row *rows = qx_malloc(chunk * sizeof *rows);
    int rc = rows ? open_seqs(m, 1, n, &b, err) : qx_fail_nomem(err);
    if (!rows) {
        return rc;
    }
    for (uint32_t r = 0; r <= repeat && !rc; ++r) { /* the first is the warm-up */
        int32_t slot = b.n ? m->seqs[b.seq[0]].slots[0] : 0;
        double t0 = now_s();
        for (uint64_t done = 0; done < n && !rc;) {
            uint32_t len = n - done < chunk ? (uint32_t)(n - done) : chunk;
            for (uint32_t i = 0; i < len; ++i) {
                uint64_t p = done + i;
                rows[i] = (struct qx_row){.seq = b.seq[0], .pos = (int32_t)p,
                                          .id = (int32_t)((p * 2654435761u + r * 977u) % m->cfg->vocab_size),
                                          .state_in = done ? slot : -1, .state_out = i + 1 == len ? slot : -1,
                                          .src_x = -1, .src_hold = -1};
            }
            uint32_t last = len - 1;
            struct qx_want w = {.prompt = true, .logit_row = &last, .n_logits = done + len == n ? 1 : 0};
            rc = qx_exec_step(m, rows, len, &w, err);
            done += len;
        }
        if (r) {
            t[r - 1] = now_s() - t0;
        }
    }
    rc = rc ? rc : qx_expert_bytes(m, &expert, err);
    if (!rc) {
        summarize(t, repeat, out);
        /* the weights once, with the experts that so many independent draws touch; caches are nothing beside them */
        out->unique_experts = unique_experts(m, (double)n);
        qx_step_bytes(m, 0, 0, out->unique_experts, expert, by_op);
        for (int i = 0; i < QX_OP_COUNT; ++i) {
            out->bytes += by_op[i];
        }
        out->flops = qx_prompt_flops(m, n);
    }
    close_seqs(m, &b);
    qx_free(rows);
    return rc;
}

/* ---- ops ---------------------------------------------------------------------------------- */

#define OP(name, bound)                                                              \
    static int skip_##name(struct qx_queue *q, const struct qx_op_##name *a)         \
    {                                                                                \
        (void)q;                                                                     \
        (void)a;                                                                     \
        return 0;                                                                    \
    }
#include "ops.def"
#undef OP

/* A table in which only one op does anything. */
static struct qx_ops only(const struct qx_ops *all, int op)
{
    struct qx_ops o = {
#define OP(name, bound) skip_##name,
#include "ops.def"
#undef OP
    };
    int i = 0;
#define OP(name, bound)                    \
    if (i++ == op) {                       \
        o.name = all->name;                \
    }
#include "ops.def"
#undef OP
    return o;
}

/* Time of one run of a recorded graph, which it destroys. */
static int time_graph(struct qx_model *m, void *graph, double *s, struct qx_error *err)
{
    int rc = 0;
    for (int r = 0; r < 3 && !rc; ++r) {
        rc = m->be->graph_launch(m->q, graph);
    }
    rc = rc ? qx_model_op_failed(m, "graph", rc, err) : m->be->wait(m->q, err);
    double t0 = now_s();
    for (int r = 0; r < 20 && !rc; ++r) {
        rc = m->be->graph_launch(m->q, graph);
    }
    rc = rc ? rc : m->be->wait(m->q, err);
    *s = (now_s() - t0) / 20;
    m->be->graph_destroy(m->be, graph);
    return rc;
}

/* What is recorded op by op: a decode step of n rows, or a part of a round. */
struct op_list { uint32_t n, k; bool round, whole; enum qx_round_part part; };

static int issue(struct qx_model *m, const void *user, struct qx_error *err)
{
    const struct op_list *l = user;
    if (l->round) {
        return qx_exec_round_ops(m, l->k, l->part, l->whole, err);
    }
    struct qx_pending pending = {0};
    QX_TRY(qx_graph_layers(m, &m->ctl.step, &pending, NULL, NULL, err));
    bool copy = qx_head_by_copy(m, l->n);
    QX_TRY(qx_graph_head(m, &m->mixer, l->n, m->b.x, &pending, NULL, l->n, copy ? NULL : &m->head, err));
    if (copy) {
        return qx_graph_best(m, l->n, false, NULL, err);
    }
    QX_RUN(m, sample, (&(struct qx_op_sample){.n_rows = l->n, .vocab = m->cfg->vocab_size, .logits = m->b.logits,
                                              .params = m->ctl.params, .pos = m->ctl.spos, .id = m->b.out_id,
                                              .scratch = m->b.sample_scratch}), err);
    return 0;
}

/* Every op of the list alone, then all of them. */
static int time_ops(struct qx_model *m, struct op_list l, const double by_op[QX_OP_COUNT],
                    struct qx_bench_op out[QX_OP_COUNT + 1], struct qx_error *err)
{
    const struct qx_ops *all = m->be->ops;
    struct qx_bench_op copies = {0}; /* what is recorded beside ops */
    int rc = 0;
    for (int i = -1; i <= QX_OP_COUNT && !rc; ++i) {
        struct qx_ops one = only(all, i);
        struct qx_bench_op *o = i < 0 ? &copies : &out[i];
        void *g = NULL;
        bool whole = i == QX_OP_COUNT;
        *o = (struct qx_bench_op){.name = whole ? "all" : i < 0 ? NULL : qx_op_names[i],
                                  .bytes = whole || i < 0 ? 0.0 : by_op[i]};
        for (int j = 0; whole && j < QX_OP_COUNT; ++j) {
            o->bytes += by_op[j];
        }
        m->be->ops = whole ? all : &one;
        m->alone = !whole;
        l.whole = whole;
        rc = qx_exec_record(m, issue, &l, &g, &o->n_nodes, err);
        m->be->ops = all;
        m->alone = false;
        bool beside = i >= 0 && !whole;
        if (!rc && o->n_nodes > (beside ? copies.n_nodes : 0)) {
            rc = time_graph(m, g, &o->s, err);
        } else {
            m->be->graph_destroy(m->be, g);
        }
        if (beside) {
            o->n_nodes -= copies.n_nodes;
            o->s -= o->n_nodes ? copies.s : 0.0;
        }
    }
    return rc;
}

int qx_bench_ops(struct qx_model *m, uint32_t streams, uint64_t depth, struct qx_bench_op out[QX_OP_COUNT + 1],
                 struct qx_error *err)
{
    struct bench_seqs b;
    double expert = 0.0, by_op[QX_OP_COUNT];
    if (!m->be->graph_begin) {
        return qx_fail(err, QX_E_UNSUPPORTED, "usage", "--kernels needs a device with recorded graphs");
    }
    int rc = open_seqs(m, streams, depth + 8, &b, err);
    rc = rc ? rc : decode_steps(m, &b, depth, 1, NULL, err); /* leaves the control block as a step has it */
    rc = rc ? rc : qx_expert_bytes(m, &expert, err);
    if (!rc) {
        qx_step_bytes(m, streams, depth, unique_experts(m, streams), expert, by_op);
        rc = time_ops(m, (struct op_list){.n = streams}, by_op, out, err);
    }
    close_seqs(m, &b);
    return rc;
}

int qx_bench_round_ops(struct qx_model *m, uint32_t k, double accept, uint64_t depth,
                       struct qx_bench_op check[QX_OP_COUNT + 1], struct qx_bench_op drafts[QX_OP_COUNT + 1],
                       double *round_s, struct qx_error *err)
{
    struct bench_seqs b;
    double expert = 0.0, by_check[QX_OP_COUNT], by_draft[QX_OP_COUNT];
    if (!m->be->graph_begin) {
        return qx_fail(err, QX_E_UNSUPPORTED, "usage", "--kernels needs a device with recorded graphs");
    }
    QX_TRY(can_draft(m, k, accept, depth, err));
    int rc = open_seqs(m, 1, within_ctx(m, depth + 8 * (k + 1)), &b, err);
    struct qx_line line = {.seq = b.n ? b.seq[0] : 0, .p = QX_GEN_PARAMS_DEFAULT};
    line.p.draft = (int32_t)k;
    rc = rc ? rc : enter_rounds(m, &line, depth, 0, err);
    for (uint32_t i = 0; i < 3 && !rc && !line.done; ++i) { /* leave the control blocks as a round has them */
        rc = one_round(m, &line, accept, i, err);
    }
    rc = rc ? rc : qx_exec_wait(m, err);
    rc = rc ? rc : qx_expert_bytes(m, &expert, err);
    struct op_list l = {.round = true, .k = k, .part = QX_ROUND_CHECK};
    if (!rc) {
        round_bytes(m, k, depth, expert, by_check, by_draft);
        rc = time_ops(m, l, by_check, check, err);
        l.part = QX_ROUND_DRAFTS;
        rc = rc ? rc : time_ops(m, l, by_draft, drafts, err);
    }
    void *g = NULL;
    l.part = QX_ROUND_ALL;
    l.whole = true;
    rc = rc ? rc : qx_exec_record(m, issue, &l, &g, NULL, err);
    rc = rc ? rc : time_graph(m, g, round_s, err);
    close_seqs(m, &b);
    return rc;
}
