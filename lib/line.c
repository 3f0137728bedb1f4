/* line.c: see line.h. The order of a round: drafts, the main model's step, acceptance, the draft head's
 * rows of what was kept (model 10.2). Rows that were not kept leave no trace: each wrote its own state
 * slot, and cache positions past the end are written again before they are read. */
#include "line.h"

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

static struct qx_seq *seq_of(struct qx_model *m, const struct qx_line *l)
{
    return &m->seqs[l->seq];
}

int qx_line_start(struct qx_model *m, struct qx_line *l, struct qx_error *err)
{
    const struct qx_sampling *s = &l->p.sampling;
    if (!seq_of(m, l)->n_ids) {
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

static int not_finite(struct qx_model *m, struct qx_line *l, uint64_t pos, struct qx_error *err);

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
    struct qx_seq *s = seq_of(m, l);
    if (id < 0) {
        return not_finite(m, l, s->n_ids, err);
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
    struct qx_seq *s = seq_of(m, l);
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
static int not_finite(struct qx_model *m, struct qx_line *l, uint64_t pos, struct qx_error *err)
{
    struct qx_seq *s = seq_of(m, l);
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
        struct qx_want w = {.scan_layer = &layer};
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

/* ---- drafts ------------------------------------------------------------------------------- */

static uint32_t auto_drafts(struct qx_line *l, uint32_t max)
{
    double best = -1.0;
    uint32_t k = 0;
    ++l->auto_round;
    for (uint32_t i = 0; i <= max; ++i) {
        if (l->auto_n[i] < 4) {
            return i;
        }
        double rate = l->auto_tokens[i] / l->auto_ns[i];
        if (rate > best) {
            best = rate;
            k = i;
        }
    }
    /* Now and then a neighbour, so that a change in the text is noticed. */
    if (l->auto_round % 16 == 0) {
        k = l->auto_round % 32 == 0 ? (k < max ? k + 1 : k) : (k ? k - 1 : k);
    }
    return k;
}

static void auto_note(struct qx_line *l, uint32_t k, double ns, double tokens)
{
    /* The first round of a length pays for warming up; old rounds fade. */
    if (l->auto_n[k]++ == 0) {
        return;
    }
    l->auto_ns[k] = l->auto_ns[k] * 0.9 + ns;
    l->auto_tokens[k] = l->auto_tokens[k] * 0.9 + tokens;
}

/* Drafts this line may use this round: no more than can be handed out. */
static uint32_t want_drafts(struct qx_model *m, struct qx_line *l)
{
    const struct qx_seq *s = seq_of(m, l);
    bool source = s->held || l->has_next || l->p.propose;
    if (l->consume_only || !l->p.draft || s->n_ids != s->n_done + 1 || !s->n_done || !source) {
        return 0;
    }
    uint32_t k = l->p.draft == QX_DRAFT_AUTO ? auto_drafts(l, m->budget.draft_max) : (uint32_t)l->p.draft;
    uint64_t room = m->budget.ctx_tokens - s->n_ids;
    uint64_t left = l->p.n_max - l->stats.n_tokens;
    k = room < k ? (uint32_t)room : k;
    return left <= k ? (uint32_t)left - 1 : k;
}

static void take_draft(struct qx_line *l, uint32_t id, float prob, uint32_t *k)
{
    if (prob < l->p.draft_min_prob) {
        *k = l->n_drafts; /* not believed: the chain ends before it */
        return;
    }
    l->draft_ids[l->n_drafts++] = id;
}

/* Chains of drafts of all lines, one draft head step for each place in the chain. */
static int make_drafts(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    uint32_t cap = m->budget.max_seqs;
    struct qx_row *rows = qx_calloc(cap, sizeof *rows);
    uint32_t *who = qx_calloc(cap, sizeof *who), *all = qx_calloc(cap, sizeof *all);
    uint32_t *k = qx_calloc(cap, sizeof *k);
    int32_t *at = qx_calloc(cap, sizeof *at); /* a line's row in the last draft step; -1: none yet */
    int rc = rows && who && all && k && at ? 0 : qx_fail_nomem(err);
    bool any_held = false;
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        l->n_drafts = 0;
        k[i] = want_drafts(m, l);
        if (k[i] && l->p.propose) {
            uint32_t got = l->p.propose(l->p.user, seq_of(m, l)->n_done, k[i], l->draft_ids);
            l->n_drafts = got < k[i] ? got : k[i];
            k[i] = 0;
        }
        any_held = any_held || (k[i] && !lines[i]->has_next);
    }
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        at[i] = -1;
        all[i] = i;
        rc = k[i] ? qx_seq_reserve(m, l->seq, seq_of(m, l)->n_done + k[i] + 1, err) : 0;
        if (k[i] && l->has_next) {
            /* A chain goes on from its row in the last draft head step, if that is still there. */
            k[i] = any_held || l->next_row < 0 ? 1 : k[i];
            take_draft(l, l->next_id, l->next_prob, &k[i]);
            at[i] = l->next_row;
        }
    }
    /* First drafts that are still to be made come from held rows, one step; then the chains. */
    for (int held = 1; !rc;) {
        uint32_t r = 0;
        for (uint32_t i = 0; i < n; ++i) {
            struct qx_line *l = lines[i];
            struct qx_seq *s = seq_of(m, l);
            if (l->n_drafts >= k[i] || (held && l->n_drafts) || (!held && !l->n_drafts)) {
                continue;
            }
            uint64_t pos = held ? s->n_done - 1 : s->n_done + l->n_drafts - 1;
            uint32_t id = held ? s->ids[s->n_done] : l->draft_ids[l->n_drafts - 1];
            rows[r] = (struct qx_row){.seq = l->seq, .pos = (int32_t)pos, .id = (int32_t)id,
                                      .state_in = -1, .state_out = -1, .src_x = held ? -1 : at[i],
                                      .src_hold = held ? l->seq : -1};
            who[r++] = i;
        }
        if (!r && !held) {
            break;
        }
        struct qx_want w = {.logit_row = all, .n_logits = r, .values = true,
                            .logits_to_host = held && r && lines[who[0]]->hooks
                                              && lines[who[0]]->hooks->want_draft_logits};
        rc = r ? qx_exec_mtp(m, rows, r, !held, &w, err) : 0;
        for (uint32_t j = 0; j < r && !rc; ++j) {
            struct qx_line *l = lines[who[j]];
            struct qx_seq *s = seq_of(m, l);
            at[who[j]] = (int32_t)j;
            take_draft(l, (uint32_t)m->b.host_id[j], m->b.host_prob[j], &k[who[j]]);
            if (held) {
                s->held = false;
                s->n_mtp = s->n_done;
                if (w.logits_to_host && l->hooks->want_draft_logits(l->hooks->user, s->n_done - 1)) {
                    l->hooks->draft_logits(l->hooks->user, s->n_done - 1,
                                           m->b.host_logits + (size_t)j * m->cfg->vocab_size);
                }
            }
        }
        held = 0;
    }
    qx_free(at);
    qx_free(k);
    qx_free(all);
    qx_free(who);
    qx_free(rows);
    return rc;
}

/* ---- the draft head's rows of what was kept ------------------------------------------------ */

struct feed {
    struct qx_model *m;
    struct qx_row *rows;
    struct qx_line **line;      /* [rows] the line of a row whose draft is wanted, else NULL */
    struct qx_line **owner;     /* [rows] */
    uint32_t n;
    struct qx_line **lines;     /* all of the round */
    uint32_t n_lines;
};

static int feed_flush(struct feed *f, struct qx_error *err)
{
    struct qx_model *m = f->m;
    uint32_t *want = qx_calloc(f->n + 1, sizeof *want), n_want = 0;
    bool hooked = false;
    int rc = want ? 0 : qx_fail_nomem(err);
    for (uint32_t i = 0; i < f->n && !rc; ++i) {
        if (f->line[i]) {
            want[n_want++] = i;
        }
        hooked = hooked || (f->owner[i]->hooks && f->owner[i]->hooks->want_draft_logits);
    }
    struct qx_want w = {.logit_row = want, .n_logits = n_want, .values = true};
    if (!rc && f->n) {
        for (uint32_t i = 0; i < f->n_lines; ++i) {
            f->lines[i]->next_row = -1; /* rows of an earlier step are overwritten */
        }
        rc = qx_exec_mtp(m, f->rows, f->n, false, &w, err);
    }
    for (uint32_t j = 0; j < n_want && !rc; ++j) {
        struct qx_line *l = f->line[want[j]];
        l->has_next = true;
        l->next_id = (uint32_t)m->b.host_id[j];
        l->next_prob = m->b.host_prob[j];
        l->next_row = (int32_t)want[j];
    }
    /* Logits for the hooks, in groups that fit. */
    for (uint32_t i = 0; i < f->n && !rc && hooked;) {
        uint32_t g = 0;
        for (; i < f->n && g < m->budget.n_logit_rows; ++i) {
            const struct qx_gen_hooks *h = f->owner[i]->hooks;
            if (h && h->want_draft_logits && h->want_draft_logits(h->user, (uint64_t)f->rows[i].pos)) {
                want[g++] = i;
            }
        }
        struct qx_want wh = {.logit_row = want, .n_logits = g, .values = true, .logits_to_host = true};
        rc = g ? qx_exec_head(m, QX_HEAD_MTP, f->rows, &wh, err) : 0;
        for (uint32_t j = 0; j < g && !rc; ++j) {
            const struct qx_gen_hooks *h = f->owner[want[j]]->hooks;
            h->draft_logits(h->user, (uint64_t)f->rows[want[j]].pos,
                            m->b.host_logits + (size_t)j * m->cfg->vocab_size);
        }
    }
    qx_free(want);
    f->n = 0;
    return rc;
}

static int feed_row(struct feed *f, struct qx_line *l, uint64_t pos, int32_t src_x, bool from_hold,
                    bool draft, struct qx_error *err)
{
    int rc = f->n == f->m->budget.n_rows ? feed_flush(f, err) : 0;
    if (rc) {
        return rc;
    }
    f->rows[f->n] = (struct qx_row){.seq = l->seq, .pos = (int32_t)pos,
                                    .id = (int32_t)seq_of(f->m, l)->ids[pos + 1], .state_in = -1,
                                    .state_out = -1, .src_x = src_x, .src_hold = from_hold ? l->seq : -1};
    f->owner[f->n] = l;
    f->line[f->n++] = draft ? l : NULL;
    return 0;
}

/* Gives the draft head all rows whose next id is known by now. */
static int feed_lines(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    struct feed f = {.m = m, .lines = lines, .n_lines = n};
    f.rows = qx_calloc(m->budget.n_rows, sizeof *f.rows);
    f.line = qx_calloc(m->budget.n_rows, sizeof *f.line);
    f.owner = qx_calloc(m->budget.n_rows, sizeof *f.owner);
    int rc = f.rows && f.line && f.owner ? 0 : qx_fail_nomem(err);
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        struct qx_seq *s = seq_of(m, l);
        l->has_next = false;
        uint64_t first = s->n_done - l->n_kept; /* position of the step's first row */
        if (s->held && s->n_mtp < first) {
            rc = feed_row(&f, l, first - 1, -1, true, false, err);
            s->held = false;
            s->n_mtp = first;
        }
        for (uint32_t j = 0; j < l->n_kept && !rc && first + j + 1 < s->n_ids; ++j) {
            bool draft = !l->done && !l->consume_only && l->p.draft && !l->p.propose
                         && first + j + 2 == s->n_ids;
            rc = feed_row(&f, l, first + j, (int32_t)(l->row0 + j), false, draft, err);
            s->n_mtp = first + j + 1;
        }
    }
    rc = rc ? rc : feed_flush(&f, err);
    qx_free(f.owner);
    qx_free(f.line);
    qx_free(f.rows);
    return rc;
}

/* ---- a round ------------------------------------------------------------------------------ */

struct round {
    struct qx_row *rows;
    uint32_t *logit_row;
    struct qx_sampling *sampling;
    const struct qx_seq **history;
    uint32_t n, n_logits;
    bool logits_to_host;
};

/* Rows of one line: known ids up to `room`, then its drafts. */
static int add_line(struct qx_model *m, struct round *r, struct qx_line *l, uint32_t room,
                    struct qx_error *err)
{
    struct qx_seq *s = seq_of(m, l);
    uint64_t known = s->n_ids - s->n_done;
    l->n_known = (uint32_t)(known < room ? known : room);
    l->n_rows = l->n_known + l->n_drafts;
    l->row0 = r->n;
    l->logit0 = r->n_logits;
    l->n_logits = 0;
    l->n_kept = 0;
    if (!l->n_known) {
        l->n_rows = 0;
        return 0;
    }
    int rc = qx_seq_reserve(m, l->seq, s->n_done + l->n_rows, err);
    if (rc) {
        return rc;
    }
    bool all_known = l->n_known == known;
    uint32_t spare = 0;
    for (uint32_t i = 0; i < l->n_rows; ++i) {
        bool last_known = i + 1 == l->n_known;
        int32_t out = -1;
        if (l->n_drafts && i + 1 >= l->n_known) {
            /* Every row that may become the last keeps its own state. */
            spare += s->slots[spare] == s->cur;
            out = s->slots[spare++];
        } else if (last_known) {
            out = s->cur >= 0 ? s->cur : s->slots[0];
        }
        r->rows[r->n] = (struct qx_row){
            .seq = l->seq, .pos = (int32_t)(s->n_done + i),
            .id = (int32_t)(i < l->n_known ? s->ids[s->n_done + i] : l->draft_ids[i - l->n_known]),
            .state_in = s->cur, .state_out = out, .src_x = -1, .src_hold = -1};
        if (!l->consume_only && all_known && i + 1 >= l->n_known) {
            r->logit_row[r->n_logits] = r->n;
            r->sampling[r->n_logits] = l->p.sampling;
            r->history[r->n_logits++] = s;
            ++l->n_logits;
        }
        ++r->n;
    }
    r->logits_to_host = r->logits_to_host
                        || (l->n_logits && (l->p.n_logprobs || (l->hooks && l->hooks->want_logits)));
    return 0;
}

static void tell_logits(const struct qx_line *l, uint64_t pos, const float *row)
{
    const struct qx_gen_hooks *h = l->hooks;
    if (h && h->logits && h->want_logits && h->want_logits(h->user, pos)) {
        h->logits(h->user, pos, row);
    }
}

/* Logits of rows of a chunk that the hooks want, in groups; chosen ids are only looked at for -1. */
static int chunk_logits(struct qx_model *m, const struct round *r, struct qx_line *l, uint32_t n_rows,
                        struct qx_error *err)
{
    const struct qx_gen_hooks *h = l->hooks;
    uint32_t *want = qx_calloc(m->budget.n_logit_rows, sizeof *want);
    int rc = want ? 0 : qx_fail_nomem(err);
    for (uint32_t i = 0; i < n_rows && !rc;) {
        uint32_t g = 0;
        for (; i < n_rows && g < m->budget.n_logit_rows; ++i) {
            if (h->want_logits(h->user, (uint64_t)r->rows[l->row0 + i].pos)) {
                want[g++] = l->row0 + i;
            }
        }
        struct qx_want w = {.logit_row = want, .n_logits = g, .logits_to_host = true};
        rc = g ? qx_exec_head(m, QX_HEAD_X, r->rows, &w, err) : 0;
        for (uint32_t j = 0; j < g && !rc; ++j) {
            uint64_t pos = (uint64_t)r->rows[want[j]].pos;
            if (m->b.host_id[j] < 0) {
                rc = not_finite(m, l, pos + 1, err);
            } else {
                h->logits(h->user, pos, m->b.host_logits + (size_t)j * m->cfg->vocab_size);
            }
        }
    }
    qx_free(want);
    return rc;
}

/* Keeps what agrees: row i + 1 stands if its id is the one chosen from row i. */
static int accept(struct qx_model *m, const struct round *r, struct qx_line *l, const int32_t *chosen,
                  const float *logits, struct qx_error *err)
{
    struct qx_seq *s = seq_of(m, l);
    uint64_t n_before = l->stats.n_tokens;
    uint32_t i = 0;
    int rc = 0;
    l->n_kept = l->n_known;
    if (l->n_logits) {
        for (;; ++i) {
            const float *row = logits ? logits + (size_t)(l->logit0 + i) * m->cfg->vocab_size : NULL;
            int32_t id = chosen[l->logit0 + i];
            if (id >= 0 && row) {
                tell_logits(l, (uint64_t)r->rows[l->row0 + l->n_known - 1 + i].pos, row);
            }
            if ((rc = qx_line_emit(m, l, id, row, err)) != 0) {
                return rc;
            }
            if (l->done || i == l->n_drafts || l->draft_ids[i] != (uint32_t)id) {
                break;
            }
        }
        l->n_kept += i;
        if (n_before) {
            ++l->stats.rounds;
        }
        l->stats.drafted += l->n_drafts;
        l->stats.accepted += i;
        for (uint32_t j = 0; j < l->n_drafts; ++j) {
            ++l->stats.drafted_at[j];
            l->stats.accepted_at[j] += j < i;
        }
    }
    s->cur = r->rows[l->row0 + l->n_kept - 1].state_out;
    s->n_done += l->n_kept;
    return 0;
}

static int hold_rows(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    bool any = false;
    int32_t *row = qx_malloc(m->budget.max_seqs * sizeof *row);
    if (!row) {
        return qx_fail_nomem(err);
    }
    memset(row, -1, m->budget.max_seqs * sizeof *row);
    for (uint32_t i = 0; i < n; ++i) {
        struct qx_seq *s = seq_of(m, lines[i]);
        if (lines[i]->n_kept && s->n_ids == s->n_done) {
            row[lines[i]->seq] = (int32_t)(lines[i]->row0 + lines[i]->n_kept - 1);
            s->held = true;
            any = true;
        } else if (lines[i]->n_kept && !m->mtp.loaded) {
            s->held = false;
        }
    }
    int rc = any ? qx_exec_hold(m, row, err) : 0;
    qx_free(row);
    return rc;
}

int qx_line_round(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    uint64_t t0 = qx_now_ns();
    struct round r = {0};
    r.rows = qx_calloc(m->budget.n_rows, sizeof *r.rows);
    r.logit_row = qx_calloc(m->budget.n_logit_rows, sizeof *r.logit_row);
    r.sampling = qx_calloc(m->budget.n_logit_rows, sizeof *r.sampling);
    r.history = qx_calloc(m->budget.n_logit_rows, sizeof *r.history);
    int rc = r.rows && r.logit_row && r.sampling && r.history ? 0 : qx_fail_nomem(err);
    if (!rc && m->mtp.loaded) {
        rc = make_drafts(m, lines, n, err);
    }
    /* Lines that decode come first in the count, so that prompts cannot starve them. */
    uint32_t reserved = 0, chunk = m->budget.chunk_rows;
    for (uint32_t i = 0; i < n; ++i) {
        reserved += 1 + lines[i]->n_drafts;
    }
    for (uint32_t i = 0; i < n && !rc; ++i) {
        reserved -= 1 + lines[i]->n_drafts;
        uint32_t left = m->budget.n_rows - r.n - reserved - lines[i]->n_drafts;
        uint32_t room = chunk > r.n ? chunk - r.n : 1;
        rc = add_line(m, &r, lines[i], room < left ? room : left, err);
    }
    const struct qx_gen_hooks *hooks = n == 1 ? lines[0]->hooks : NULL;
    struct qx_want w = {.logit_row = r.logit_row, .n_logits = r.n_logits, .sampling = r.sampling,
                        .history = r.history, .logits_to_host = r.logits_to_host, .hooks = hooks};
    rc = rc ? rc : qx_exec_step(m, r.rows, r.n, &w, err);
    if (!rc) {
        /* Acceptance reads what the step left in host memory; chunks with hooks overwrite it. */
        for (uint32_t i = 0; i < n && !rc; ++i) {
            struct qx_line *l = lines[i];
            rc = accept(m, &r, l, m->b.host_id, r.logits_to_host ? m->b.host_logits : NULL,
                        l->error ? l->error : err);
            if (rc && l->error) {
                l->done = true;
                l->n_kept = 0;
                rc = 0;
            }
        }
        for (uint32_t i = 0; i < n && !rc; ++i) {
            struct qx_line *l = lines[i];
            uint32_t rest = l->n_logits ? l->n_known - 1 : l->n_known;
            if (l->hooks && l->hooks->logits && l->hooks->want_logits && rest) {
                rc = chunk_logits(m, &r, l, rest, err);
            }
        }
    }
    if (!rc && m->mtp.loaded) {
        rc = feed_lines(m, lines, n, err);
    }
    rc = rc ? rc : hold_rows(m, lines, n, err);
    double ns = (double)(qx_now_ns() - t0);
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        if (l->n_logits && l->n_known == 1 && l->p.draft == QX_DRAFT_AUTO) {
            auto_note(l, l->n_drafts, ns, (double)l->n_kept);
        }
        if (l->consume_only && seq_of(m, l)->n_done == seq_of(m, l)->n_ids) {
            l->done = true;
        }
    }
    qx_free(r.history);
    qx_free(r.sampling);
    qx_free(r.logit_row);
    qx_free(r.rows);
    return rc;
}
