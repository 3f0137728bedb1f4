/* line.c: a line's start, the tokens it hands out, and where a value stopped being finite. Rounds are in
 * line_round.c. See line.h. */
#include "line_impl.h"

#include "alloc.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

uint64_t qx_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

struct qx_seq *qx_line_seq(struct qx_model *m, const struct qx_line *l)
{
    return &m->seqs[l->seq];
}

int qx_line_start(struct qx_model *m, struct qx_line *l, struct qx_error *err)
{
    const struct qx_sampling *s = &l->p.sampling;
    if (!qx_line_seq(m, l)->n_ids) {
        return qx_fail(err, QX_E_USAGE, "empty-prompt", "there is nothing to continue: the prompt is empty");
    }
    if (l->p.draft > (int32_t)m->budget.draft_max || l->p.draft < QX_DRAFT_AUTO) {
        return qx_fail(err, QX_E_USAGE, "usage", "%d drafts a round asked for, the model was loaded for %u",
                       l->p.draft, m->budget.draft_max);
    }
    if (l->p.draft == QX_DRAFT_AUTO && !m->budget.draft_max) {
        l->p.draft = 0;
    }
    if (!(s->temperature >= 0.0f) || !(s->top_p > 0.0f) || !(s->min_p >= 0.0f) || s->top_k < 0
        || !(s->repeat_penalty > 0.0f) || !isfinite(s->presence_penalty) || !isfinite(s->frequency_penalty)
        || l->p.n_logprobs > 64) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "sampling values out of range (temperature >= 0, top-p > 0, min-p >= 0, top-k >= 0, "
                       "repeat penalty > 0, at most 64 log-probabilities)");
    }
    l->t_start_ns = qx_now_ns();
    return 0;
}

/* ---- handing out -------------------------------------------------------------------------- */

static bool is_stop(const struct qx_line *l, uint32_t id)
{
    for (uint32_t i = 0; i < l->p.n_stop_ids; ++i) {
        if (l->p.stop_ids[i] == id) {
            return true;
        }
    }
    return false;
}

static int by_logprob(const void *pa, const void *pb)
{
    const struct qx_logprob *a = pa, *b = pb;
    return a->logprob != b->logprob ? (a->logprob > b->logprob ? -1 : 1) : a->id < b->id ? -1 : 1;
}

/* Log-probability of t and the n best of a row of logits. */
static void logprobs(const float *row, uint32_t vocab, struct qx_token *t, struct qx_logprob *top,
                     uint32_t n)
{
    float max = row[0];
    for (uint32_t i = 1; i < vocab; ++i) {
        max = row[i] > max ? row[i] : max;
    }
    double sum = 0.0;
    for (uint32_t i = 0; i < vocab; ++i) {
        sum += exp((double)row[i] - (double)max);
    }
    double norm = (double)max + log(sum);
    uint32_t have = 0;
    for (uint32_t i = 0; i < vocab; ++i) {
        if (have < n) {
            top[have++] = (struct qx_logprob){i, row[i]};
            if (have == n) {
                qsort(top, n, sizeof *top, by_logprob);
            }
        } else if (n && row[i] > top[n - 1].logprob) {
            uint32_t at = n - 1;
            while (at && top[at - 1].logprob < row[i]) {
                top[at] = top[at - 1];
                --at;
            }
            top[at] = (struct qx_logprob){i, row[i]};
        }
    }
    if (have < n) {
        qsort(top, have, sizeof *top, by_logprob);
    }
    for (uint32_t i = 0; i < have; ++i) {
        top[i].logprob = (float)((double)top[i].logprob - norm);
    }
    t->logprob = (float)((double)row[t->id] - norm);
    t->top = top;
    t->n_top = have;
}

void qx_line_count(const struct qx_model *m, struct qx_line *l)
{
    if (l->stats.n_tokens && !l->counted) {
        l->counted = true;
        l->stats.decode_ns = qx_now_ns() - l->t_first_ns;
        l->stats.waits = m->be->n_waits - l->stats.waits;
        l->stats.allocs = m->be->n_allocs - l->stats.allocs;
    }
}

int qx_line_emit(struct qx_model *m, struct qx_line *l, int32_t id, const float *row,
                 struct qx_error *err)
{
    struct qx_seq *s = qx_line_seq(m, l);
    if (id < 0) {
        return qx_line_not_finite(m, l, s->n_ids, err);
    }
    int rc = qx_seq_push(m, l->seq, (uint32_t)id, err);
    if (rc) {
        return rc;
    }
    if (l->stats.n_tokens++ == 0) {
        l->t_first_ns = qx_now_ns();
        l->stats.ttft_ns = l->t_first_ns - l->t_start_ns;
        l->stats.waits = m->be->n_waits; /* bases until the end */
        l->stats.allocs = m->be->n_allocs;
    }
    struct qx_logprob top[64];
    struct qx_token t = {.id = (uint32_t)id, .pos = s->n_ids - 1, .is_stop = is_stop(l, (uint32_t)id),
                         .logprob = NAN};
    if (row && l->p.n_logprobs) {
        logprobs(row, m->cfg->vocab_size, &t, top, l->p.n_logprobs);
    }
    bool caller = l->p.on_token && l->p.on_token(l->p.user, &t);
    if (t.is_stop) {
        l->stats.reason = QX_STOP_ID;
    } else if (caller) {
        l->stats.reason = QX_STOP_CALLER;
    } else if (l->stats.n_tokens >= l->p.n_max) {
        l->stats.reason = QX_STOP_LENGTH;
    } else if (s->n_ids >= m->budget.ctx_tokens) {
        l->stats.reason = QX_STOP_CONTEXT;
    } else {
        return 0;
    }
    l->done = true;
    qx_line_count(m, l);
    return 0;
}

int qx_line_first(struct qx_model *m, struct qx_line *l, struct qx_error *err)
{
    struct qx_seq *s = qx_line_seq(m, l);
    const struct qx_row row = {.seq = l->seq, .pos = (int32_t)s->n_done - 1};
    const uint32_t zero = 0;
    const struct qx_seq *history = s;
    struct qx_want w = {.logit_row = &zero, .n_logits = 1, .sampling = &l->p.sampling, .history = &history,
                        .logits_to_host = l->p.n_logprobs > 0};
    int rc = qx_exec_head(m, QX_HEAD_HOLD, &row, &w, err);
    return rc ? rc : qx_line_emit(m, l, m->b.host_id[0], m->b.host_logits, err);
}

/* ---- finding where a value stopped being finite ------------------------------------------- */

/* Replays the sequence from its start with every layer looked at. The sequence is unusable afterwards:
 * it is only left by an error. */
int qx_line_not_finite(struct qx_model *m, struct qx_line *l, uint64_t pos, struct qx_error *err)
{
    struct qx_seq *s = qx_line_seq(m, l);
    int32_t layer = (int32_t)m->cfg->n_layers + 1;
    uint64_t n = pos < s->n_ids ? pos : s->n_ids, first = 0;
    /* Not beside other lines: the step's wide states are still needed. */
    struct qx_row *rows = l->error ? NULL : qx_calloc(m->budget.n_rows, sizeof *rows);
    bool searched = rows != NULL;
    int32_t state = -1;
    l->done = true;
    while (rows && first < n && layer > (int32_t)m->cfg->n_layers) {
        uint32_t take = (uint32_t)(n - first < m->budget.chunk_rows ? n - first : m->budget.chunk_rows);
        for (uint32_t i = 0; i < take; ++i) {
            rows[i] = (struct qx_row){.seq = l->seq, .pos = (int32_t)(first + i),
                                      .id = (int32_t)s->ids[first + i], .state_in = state,
                                      .state_out = i + 1 == take ? s->slots[0] : -1};
        }
        struct qx_want w = {.prompt = true, .scan_layer = &layer};
        if (qx_exec_step(m, rows, take, &w, NULL)) {
            break;
        }
        state = s->slots[0];
        first += take;
    }
    qx_free(rows);
    s->cur = -1;
    s->n_done = 0;
    s->broken = true;
    char where[64] = "the final mixer or the head";
    if (!searched) {
        snprintf(where, sizeof where, "a layer not searched for");
    } else if (layer <= (int32_t)m->cfg->n_layers) {
        snprintf(where, sizeof where, "layer %d", layer);
    }
    return qx_fail(err, QX_E_VALUE, "non-finite-logits",
                   "logits for token %llu (step %llu) are not finite; first seen in %s",
                   (unsigned long long)pos, (unsigned long long)l->stats.n_tokens, where);
}
