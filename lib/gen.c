/* gen.c: one sequence as the caller sees it: prefill, generate, flush, reset. */
#include "line.h"
#include "step_bytes.h"

#include "alloc.h"

#include <string.h>

struct qx_gen {
    struct qx_model *m;
    int32_t seq;
    bool has_hooks;
    struct qx_gen_hooks hooks;
};

int qx_gen_create(struct qx_gen **out, struct qx_model *m, struct qx_error *err)
{
    *out = NULL;
    struct qx_gen *g = qx_calloc(1, sizeof *g);
    if (!g) {
        return qx_fail_nomem(err);
    }
    g->m = m;
    int rc = qx_seq_open(m, &g->seq, err);
    if (rc) {
        qx_free(g);
        return rc;
    }
    *out = g;
    return 0;
}

void qx_gen_destroy(struct qx_gen *g)
{
    if (g) {
        qx_seq_close(g->m, g->seq);
        qx_free(g);
    }
}

struct qx_seq *qx_gen_seq(struct qx_gen *g, struct qx_model **m, int32_t *seq)
{
    *m = g->m;
    *seq = g->seq;
    return &g->m->seqs[g->seq];
}

void qx_gen_set_hooks(struct qx_gen *g, const struct qx_gen_hooks *hooks)
{
    g->has_hooks = hooks != NULL;
    if (hooks) {
        g->hooks = *hooks;
    }
}

uint64_t qx_gen_n_tokens(const struct qx_gen *g)
{
    return g->m->seqs[g->seq].n_ids;
}

const uint32_t *qx_gen_tokens(const struct qx_gen *g)
{
    return g->m->seqs[g->seq].ids;
}

static int check_usable(const struct qx_gen *g, struct qx_error *err)
{
    return g->m->seqs[g->seq].broken
               ? qx_fail(err, QX_E_USAGE, "usage", "the sequence was left by an error; reset it first") : 0;
}

/* Consumes all known ids: a prompt's in chunks, the last generated one as any other. */
static int consume(struct qx_gen *g, bool prompt, int (*progress)(void *user, uint64_t done, uint64_t total),
                   void *user, struct qx_error *err)
{
    struct qx_seq *s = &g->m->seqs[g->seq];
    struct qx_line line = {.seq = g->seq, .consume_only = true, .p = QX_GEN_PARAMS_DEFAULT,
                           .read_from = s->n_done, .read_to = prompt ? s->n_ids : 0,
                           .hooks = g->has_hooks ? &g->hooks : NULL};
    struct qx_line *lines = &line;
    uint64_t first = s->n_done, total = s->n_ids - first;
    while (s->n_done < s->n_ids) {
        int rc = qx_line_round(g->m, &lines, 1, err);
        if (rc) {
            return rc;
        }
        if (progress && progress(user, s->n_done - first, total)) {
            s->n_ids = s->n_done; /* what was not consumed is forgotten */
            return qx_fail(err, QX_E_INTERRUPTED, "interrupted", "reading the prompt was stopped");
        }
    }
    return 0;
}

int qx_gen_prefill(struct qx_gen *g, const uint32_t *ids, size_t n,
                   int (*progress)(void *user, uint64_t done, uint64_t total), void *user,
                   struct qx_error *err)
{
    struct qx_seq *s = &g->m->seqs[g->seq];
    int rc = check_usable(g, err);
    if (rc) {
        return rc;
    }
    if (n > g->m->budget.ctx_tokens || s->n_ids + n > g->m->budget.ctx_tokens) {
        return qx_fail(err, QX_E_USAGE, "context-exceeded",
                       "%llu tokens and %zu more are over the context of %llu",
                       (unsigned long long)s->n_ids, n, (unsigned long long)g->m->budget.ctx_tokens);
    }
    for (size_t i = 0; i < n; ++i) {
        if (ids[i] >= g->m->cfg->vocab_size) {
            return qx_fail(err, QX_E_RANGE, "token-range", "id %u is outside the vocabulary of %u rows",
                           ids[i], g->m->cfg->vocab_size);
        }
    }
    size_t before = s->n_ids;
    for (size_t i = 0; i < n && !rc; ++i) {
        rc = qx_seq_push(g->m, g->seq, ids[i], err);
    }
    if (rc) {
        s->n_ids = before;
        return rc;
    }
    return consume(g, true, progress, user, err);
}

int qx_gen_flush(struct qx_gen *g, struct qx_error *err)
{
    int rc = check_usable(g, err);
    return rc ? rc : consume(g, false, NULL, NULL, err);
}

int qx_gen_reset(struct qx_gen *g, struct qx_error *err)
{
    (void)err;
    qx_seq_reset(g->m, g->seq);
    return 0;
}

/* Of a step of one row without drafts. */
static int step_bytes(struct qx_model *m, uint64_t depth, uint64_t *out, struct qx_error *err)
{
    double expert, by_op[QX_OP_COUNT], sum = 0;
    int rc = qx_expert_bytes(m, &expert, err);
    if (rc) {
        return rc;
    }
    qx_step_bytes(m, 1, depth, m->cfg->n_experts_per_tok, expert, by_op);
    for (int i = 0; i < QX_OP_COUNT; ++i) {
        sum += by_op[i];
    }
    *out = (uint64_t)sum;
    return 0;
}

int qx_gen_generate(struct qx_gen *g, const struct qx_gen_params *p, struct qx_gen_stats *stats,
                    struct qx_error *err)
{
    struct qx_seq *s = &g->m->seqs[g->seq];
    struct qx_line line = {.seq = g->seq, .p = *p, .read_from = s->n_done,
                           .read_to = s->n_ids > s->n_done + 1 ? s->n_ids : 0, .hooks = g->has_hooks ? &g->hooks : NULL};
    struct qx_line *lines = &line;
    int rc = check_usable(g, err);
    rc = rc ? rc : qx_line_start(g->m, &line, err);
    if (!rc && !p->n_max) {
        line.done = true;
        line.stats.reason = QX_STOP_LENGTH;
    } else if (!rc && s->n_ids >= g->m->budget.ctx_tokens) {
        line.done = true;
        line.stats.reason = QX_STOP_CONTEXT;
    }
    if (!rc && !line.done && s->n_ids == s->n_done) {
        rc = qx_line_first(g->m, &line, err);
    }
    while (!rc && !line.done) {
        rc = qx_line_can_free(g->m, &lines, 1) ? qx_line_free(g->m, &lines, 1, err)
                                               : qx_line_round(g->m, &lines, 1, err);
    }
    qx_line_count(g->m, &line);
    if (!rc) {
        rc = step_bytes(g->m, s->n_done, &line.stats.bytes_per_step, err);
    }
    if (stats) {
        *stats = line.stats;
    }
    return rc;
}
