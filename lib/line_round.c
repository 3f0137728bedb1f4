/* line_round.c: rounds. Of a step: its rows, the main model, acceptance, the draft head's rows of what was
 * kept. Rows that were not kept leave no trace: each wrote its own state slot, and cache positions past the
 * end are written again before they are read. */
#include "line_impl.h"

#include "alloc.h"

#include <string.h>

/* A step being put together. */
struct step {
    struct qx_row *rows;
    uint32_t *logit_row;
    struct qx_sampling *sampling;
    const struct qx_seq **history;
    struct qx_chain *chain;
    struct qx_line **lines;     /* that have rows in it */
    uint32_t n, n_logits, n_chain, n_lines;
    bool prompt, logits_to_host;
};

static void step_fini(struct step *st)
{
    qx_free(st->lines);
    qx_free(st->chain);
    qx_free(st->history);
    qx_free(st->sampling);
    qx_free(st->logit_row);
    qx_free(st->rows);
}

static int step_init(struct step *st, const struct qx_model *m, bool prompt, struct qx_error *err)
{
    uint32_t logits = m->budget.n_logit_rows, seqs = m->budget.max_seqs;
    *st = (struct step){.prompt = prompt};
    st->rows = qx_malloc(m->budget.n_rows * sizeof *st->rows);
    st->logit_row = qx_malloc(logits * sizeof *st->logit_row);
    st->sampling = qx_malloc(logits * sizeof *st->sampling);
    st->history = qx_malloc(logits * sizeof *st->history);
    st->chain = qx_malloc(seqs * sizeof *st->chain);
    st->lines = qx_malloc(seqs * sizeof *st->lines);
    return st->rows && st->logit_row && st->sampling && st->history && st->chain && st->lines
               ? 0 : qx_fail_nomem(err);
}

/* ---- rows --------------------------------------------------------------------------------- */

static void add_row(struct step *st, const struct qx_line *l, uint64_t pos, uint32_t id, int32_t in, int32_t out)
{
    st->rows[st->n++] = (struct qx_row){.seq = l->seq, .pos = (int32_t)pos, .id = (int32_t)id, .state_in = in,
                                        .state_out = out, .src_x = -1, .src_hold = -1};
}

/* Row `row` gives a token, or the check of a draft. */
static void add_logit(struct step *st, struct qx_line *l, uint32_t row, const struct qx_seq *s)
{
    st->logit_row[st->n_logits] = row;
    st->sampling[st->n_logits] = l->p.sampling;
    st->history[st->n_logits++] = s;
    ++l->n_logits;
    st->logits_to_host = st->logits_to_host || l->p.n_logprobs || (l->hooks && l->hooks->want_logits);
}

static void add_line(struct step *st, struct qx_line *l)
{
    st->lines[st->n_lines++] = l;
    l->row0 = st->n;
    l->logit0 = st->n_logits;
    l->n_logits = 0;
    l->n_kept = 0;
}

/* The pending id and its drafts; pages are there. Every row that may become the last keeps its own state. */
static void add_decode(struct qx_model *m, struct step *st, struct qx_line *l)
{
    struct qx_seq *s = qx_line_seq(m, l);
    uint32_t pending = s->ids[s->n_done], spare = 0;
    add_line(st, l);
    l->n_known = 1;
    for (uint32_t i = 0; i <= l->n_drafts; ++i) {
        int32_t out = s->cur >= 0 ? s->cur : s->slots[0];
        if (l->n_drafts) {
            spare += s->slots[spare] == s->cur;
            out = s->slots[spare++];
        }
        if (!l->consume_only) {
            add_logit(st, l, st->n, s);
        }
        /* Ids of chained drafts are the device's; until then there must be a valid one. */
        add_row(st, l, s->n_done + i, i && !l->chained ? l->draft_ids[i - 1] : pending, s->cur, out);
    }
    if (l->chained && l->n_drafts) {
        st->chain[st->n_chain++] = (struct qx_chain){.seq = l->seq, .row = l->row0, .count = l->n_drafts,
                                                     .min_prob = l->p.draft_min_prob, .forced = l->n_forced};
    }
    l->n_rows = st->n - l->row0;
}

/* End of the chunk that a line reads next. */
static uint64_t chunk_end(const struct qx_model *m, const struct qx_line *l, uint64_t at)
{
    uint64_t chunk = m->budget.chunk_rows, end = l->read_from + ((at - l->read_from) / chunk + 1) * chunk;
    end = l->cut > at && l->cut < end ? l->cut : end;
    return end < l->read_to ? end : l->read_to;
}

static int add_chunk(struct qx_model *m, struct step *st, struct qx_line *l, struct qx_error *err)
{
    struct qx_seq *s = qx_line_seq(m, l);
    uint64_t end = chunk_end(m, l, s->n_done);
    int32_t out = s->cur >= 0 ? s->cur : s->slots[0];
    int rc = qx_seq_reserve(m, l->seq, end, err);
    if (rc) {
        return rc;
    }
    add_line(st, l);
    l->n_drafts = 0;
    l->t_round_ns = 0;
    l->n_rows = l->n_known = (uint32_t)(end - s->n_done);
    for (uint64_t p = s->n_done; p < end; ++p) {
        add_row(st, l, p, s->ids[p], s->cur, p + 1 == end ? out : -1);
    }
    if (end == s->n_ids && !l->consume_only) {
        add_logit(st, l, st->n - 1, s);
    }
    return 0;
}

/* ---- what a step gave --------------------------------------------------------------------- */

static void tell_logits(const struct qx_line *l, uint64_t pos, const float *row)
{
    const struct qx_gen_hooks *h = l->hooks;
    if (h && h->logits && h->want_logits && h->want_logits(h->user, pos)) {
        h->logits(h->user, pos, row);
    }
}

/* Logits of rows of a chunk that the hooks want, in groups; chosen ids are only looked at for -1. */
static int chunk_logits(struct qx_model *m, const struct step *st, struct qx_line *l, uint32_t n_rows,
                        struct qx_error *err)
{
    const struct qx_gen_hooks *h = l->hooks;
    uint32_t *want = qx_calloc(m->budget.n_logit_rows, sizeof *want);
    int rc = want ? 0 : qx_fail_nomem(err);
    for (uint32_t i = 0; i < n_rows && !rc;) {
        uint32_t g = 0;
        for (; i < n_rows && g < m->budget.n_logit_rows; ++i) {
            if (h->want_logits(h->user, (uint64_t)st->rows[l->row0 + i].pos)) {
                want[g++] = l->row0 + i;
            }
        }
        struct qx_want w = {.logit_row = want, .n_logits = g, .logits_to_host = true};
        rc = g ? qx_exec_head(m, QX_HEAD_X, st->rows, &w, err) : 0;
        for (uint32_t j = 0; j < g && !rc; ++j) {
            uint64_t pos = (uint64_t)st->rows[want[j]].pos;
            if (m->b.host_id[j] < 0) {
                rc = qx_line_not_finite(m, l, pos + 1, err);
            } else {
                h->logits(h->user, pos, m->b.host_logits + (size_t)j * m->cfg->vocab_size);
            }
        }
    }
    qx_free(want);
    return rc;
}

/* Keeps what agrees: row i + 1 stands if its id is the one chosen from row i. */
static int accept(struct qx_model *m, const struct step *st, struct qx_line *l, struct qx_error *err)
{
    struct qx_seq *s = qx_line_seq(m, l);
    const struct qx_row *row0 = st->rows + l->row0, *drafts = row0 + l->n_known;
    uint64_t n_before = l->stats.n_tokens;
    uint32_t i = 0;
    l->n_kept = l->n_known;
    if (l->chained && l->n_drafts) {
        uint32_t made = 0;
        while (made < l->n_drafts && drafts[made].pos >= 0) {
            ++made; /* those not believed are idle rows */
        }
        l->n_drafts = made;
    }
    if (l->n_logits) {
        for (;; ++i) {
            const float *row = st->logits_to_host ? m->b.host_logits + (size_t)(l->logit0 + i) * m->cfg->vocab_size
                                                  : NULL;
            int32_t id = i < l->n_forced && i < l->n_drafts ? drafts[i].id : m->b.host_id[l->logit0 + i];
            if (id >= 0 && row) {
                tell_logits(l, (uint64_t)row0[l->n_known - 1 + i].pos, row);
            }
            int rc = qx_line_emit(m, l, id, row, err);
            if (rc) {
                return rc;
            }
            if (l->done || i == l->n_drafts || drafts[i].id != id) {
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
    s->cur = row0[l->n_kept - 1].state_out;
    s->n_done += l->n_kept;
    return 0;
}

/* Lines whose ids are all consumed keep the wide state of the last one. */
static int hold_rows(struct qx_model *m, const struct step *st, struct qx_error *err)
{
    bool any = false;
    int32_t *row = qx_malloc(m->budget.max_seqs * sizeof *row);
    if (!row) {
        return qx_fail_nomem(err);
    }
    memset(row, -1, m->budget.max_seqs * sizeof *row);
    for (uint32_t i = 0; i < st->n_lines; ++i) {
        struct qx_line *l = st->lines[i];
        struct qx_seq *s = qx_line_seq(m, l);
        if (l->n_kept && s->n_ids == s->n_done) {
            row[l->seq] = (int32_t)(l->row0 + l->n_kept - 1);
            s->held = true;
            any = true;
        } else if (l->n_kept && !m->mtp.loaded) {
            s->held = false;
        }
    }
    int rc = any ? qx_exec_hold(m, row, err) : 0;
    qx_free(row);
    return rc;
}

static int run_step(struct qx_model *m, struct step *st, const struct qx_gen_hooks *hooks, struct qx_error *err)
{
    struct qx_want w = {.prompt = st->prompt, .chain = st->chain, .n_chain = st->n_chain,
                        .logit_row = st->logit_row, .n_logits = st->n_logits, .sampling = st->sampling,
                        .history = st->history, .logits_to_host = st->logits_to_host, .hooks = hooks};
    /* Of one line the device itself sees what it keeps; a row held from before would come first. */
    bool fed = false;
    w.feed = m->mtp.loaded && st->n_chain == 1 && st->n_lines == 1 && st->lines[0]->n_drafts
             && st->n == st->lines[0]->n_drafts + 1 && !st->lines[0]->hooks && !qx_line_seq(m, st->lines[0])->held;
    w.fed = &fed;
    int rc = qx_exec_step(m, st->rows, st->n, &w, err);
    /* Acceptance reads what the step left in host memory; chunks with hooks overwrite it. */
    for (uint32_t i = 0; i < st->n_lines && !rc; ++i) {
        struct qx_line *l = st->lines[i];
        rc = accept(m, st, l, l->error ? l->error : err);
        if (rc && l->error) {
            l->done = true;
            l->n_kept = 0;
            rc = 0;
        }
    }
    for (uint32_t i = 0; i < st->n_lines && !rc; ++i) {
        struct qx_line *l = st->lines[i];
        uint32_t rest = l->n_logits ? l->n_known - 1 : l->n_known;
        if (l->hooks && l->hooks->logits && l->hooks->want_logits && rest) {
            rc = chunk_logits(m, st, l, rest, err);
        }
    }
    for (uint32_t i = 0; i < st->n_lines && !rc; ++i) {
        struct qx_line *l = st->lines[i];
        if (l->at_cut && l->n_kept && qx_line_seq(m, l)->n_done == l->cut) {
            rc = l->at_cut(l->cut_user, l, err);
        }
    }
    if (!rc && m->mtp.loaded) {
        rc = qx_line_feed(m, st->lines, st->n_lines, st->prompt, fed, err);
    }
    rc = rc ? rc : hold_rows(m, st, err);
    for (uint32_t i = 0; i < st->n_lines && !rc; ++i) {
        struct qx_line *l = st->lines[i];
        if (l->consume_only && qx_line_seq(m, l)->n_done == qx_line_seq(m, l)->n_ids) {
            l->done = true;
        }
    }
    return rc;
}

/* ---- rounds ------------------------------------------------------------------------------- */

static bool reads(struct qx_model *m, const struct qx_line *l)
{
    return qx_line_seq(m, l)->n_done < l->read_to;
}

static int decode_step(struct qx_model *m, struct step *st, struct qx_line **lines, uint32_t n, bool alone,
                       struct qx_error *err)
{
    int rc = 0;
    for (uint32_t i = 0; i < n; ++i) {
        if (!reads(m, lines[i])) {
            st->lines[st->n_lines++] = lines[i];
        }
    }
    uint32_t n_decode = st->n_lines;
    if (!n_decode) {
        return 0;
    }
    if (m->mtp.loaded) {
        rc = qx_line_plan_drafts(m, st->lines, n_decode, err);
    }
    st->n_lines = 0;
    for (uint32_t i = 0; i < n_decode && !rc; ++i) {
        struct qx_line *l = st->lines[i]; /* add_decode writes the same place */
        if (!m->mtp.loaded) {
            l->n_drafts = 0;
            rc = qx_seq_reserve(m, l->seq, qx_line_seq(m, l)->n_done + 1, err);
        }
        if (!rc) {
            add_decode(m, st, l);
        }
    }
    rc = rc ? rc : run_step(m, st, n == 1 ? lines[0]->hooks : NULL, err);
    uint64_t t = qx_now_ns();
    for (uint32_t i = 0; i < n_decode && !rc; ++i) {
        struct qx_line *l = st->lines[i];
        if (l->p.draft == QX_DRAFT_AUTO && l->t_round_ns && alone) {
            qx_line_auto_note(l, l->n_rows - 1, (double)(t - l->t_round_ns), (double)l->n_kept);
        }
        l->t_round_ns = t;
    }
    return rc;
}

static int prompt_step(struct qx_model *m, struct step *st, struct qx_line **lines, uint32_t n,
                       struct qx_error *err)
{
    int rc = 0;
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        uint64_t at = qx_line_seq(m, l)->n_done;
        if (!l->done && reads(m, l) && st->n + (chunk_end(m, l, at) - at) <= m->budget.chunk_rows) {
            rc = add_chunk(m, st, l, err);
        }
    }
    return rc || !st->n ? rc : run_step(m, st, n == 1 ? lines[0]->hooks : NULL, err);
}

int qx_line_round(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    bool any_reads = false;
    for (uint32_t i = 0; i < n; ++i) {
        any_reads = any_reads || reads(m, lines[i]);
    }
    struct step st;
    int rc = step_init(&st, m, false, err);
    rc = rc ? rc : decode_step(m, &st, lines, n, !any_reads, err);
    step_fini(&st);
    if (rc || !any_reads) {
        return rc;
    }
    rc = step_init(&st, m, true, err);
    rc = rc ? rc : prompt_step(m, &st, lines, n, err);
    step_fini(&st);
    return rc;
}
