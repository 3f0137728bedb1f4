/* line_draft.c: which drafts a line gets, and the draft head's rows of what was kept (model 10.2). The drafts
 * themselves are made and used on the device (exec.c); the host only says how many. */
#include "line_impl.h"

#include "alloc.h"

#include <string.h>

/* ---- how many ----------------------------------------------------------------------------- */

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

void qx_line_auto_note(struct qx_line *l, uint32_t k, double ns, double tokens)
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
    const struct qx_seq *s = qx_line_seq(m, l);
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

/* ---- the draft head's rows of what was kept ------------------------------------------------ */

struct feed {
    struct qx_model *m;
    struct qx_row *rows;
    struct qx_line **owner;     /* [rows] */
    uint32_t *want, n_want;     /* rows that give their lines' next draft */
    uint32_t n;
    bool prompt;
};

static int feed_init(struct feed *f, struct qx_model *m, bool prompt, struct qx_error *err)
{
    *f = (struct feed){.m = m, .prompt = prompt};
    f->rows = qx_malloc(m->budget.n_rows * sizeof *f->rows);
    f->owner = qx_malloc(m->budget.n_rows * sizeof *f->owner);
    f->want = qx_malloc(m->budget.n_logit_rows * sizeof *f->want);
    return f->rows && f->owner && f->want ? 0 : qx_fail_nomem(err);
}

static void feed_fini(struct feed *f)
{
    qx_free(f->want);
    qx_free(f->owner);
    qx_free(f->rows);
}

/* Logits for the hooks, in groups that fit. */
static int tell_hooks(struct feed *f, struct qx_error *err)
{
    struct qx_model *m = f->m;
    int rc = 0;
    for (uint32_t i = 0; i < f->n && !rc;) {
        uint32_t g = 0;
        for (; i < f->n && g < m->budget.n_logit_rows; ++i) {
            const struct qx_gen_hooks *h = f->owner[i]->hooks;
            if (h && h->want_draft_logits && h->want_draft_logits(h->user, (uint64_t)f->rows[i].pos)) {
                f->want[g++] = i;
            }
        }
        struct qx_want w = {.logit_row = f->want, .n_logits = g, .logits_to_host = true};
        rc = g ? qx_exec_head(m, QX_HEAD_MTP, f->rows, &w, err) : 0;
        for (uint32_t j = 0; j < g && !rc; ++j) {
            const struct qx_gen_hooks *h = f->owner[f->want[j]]->hooks;
            h->draft_logits(h->user, (uint64_t)f->rows[f->want[j]].pos,
                            m->b.host_logits + (size_t)j * m->cfg->vocab_size);
        }
    }
    return rc;
}

/* Enqueues what was gathered; the host waits only for hooks. */
static int feed_run(struct feed *f, struct qx_error *err)
{
    if (!f->n) {
        return 0;
    }
    struct qx_want w = {.prompt = f->prompt, .logit_row = f->want, .n_logits = f->n_want};
    bool hooked = false;
    int rc = qx_exec_mtp(f->m, f->rows, f->n, &w, err);
    for (uint32_t i = 0; i < f->n; ++i) {
        hooked = hooked || (f->owner[i]->hooks && f->owner[i]->hooks->want_draft_logits);
    }
    return rc || !hooked ? rc : tell_hooks(f, err);
}

/* One row: the wide state at pos and the id behind it. `draft`: its draft is the line's next. */
static void feed_row(struct feed *f, struct qx_line *l, uint64_t pos, int32_t src_x, bool draft)
{
    f->rows[f->n] = (struct qx_row){.seq = l->seq, .pos = (int32_t)pos,
                                    .id = (int32_t)qx_line_seq(f->m, l)->ids[pos + 1], .state_in = -1,
                                    .state_out = -1, .src_x = src_x, .src_hold = src_x < 0 ? l->seq : -1};
    f->owner[f->n] = l;
    if (draft) {
        f->want[f->n_want++] = f->n;
        l->has_next = true;
    }
    ++f->n;
}

/* The held row, if the id behind it is known. */
static void feed_held(struct feed *f, struct qx_line *l, bool draft)
{
    struct qx_seq *s = qx_line_seq(f->m, l);
    feed_row(f, l, s->n_mtp, -1, draft);
    s->held = false;
    ++s->n_mtp;
}

int qx_line_plan_drafts(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    struct feed f;
    int rc = feed_init(&f, m, false, err);
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        struct qx_seq *s = qx_line_seq(m, l);
        l->n_drafts = want_drafts(m, l);
        l->chained = l->n_drafts && !l->p.propose;
        if (l->n_drafts && l->p.propose) {
            uint32_t got = l->p.propose(l->p.user, s->n_done, l->n_drafts, l->draft_ids);
            l->n_drafts = got < l->n_drafts ? got : l->n_drafts;
        }
        /* Pages first: nothing may change them behind what is enqueued. */
        rc = qx_seq_reserve(m, l->seq, s->n_done + 1 + l->n_drafts, err);
    }
    for (uint32_t i = 0; i < n && !rc; ++i) {
        if (lines[i]->chained && !lines[i]->has_next) {
            feed_held(&f, lines[i], true);
        }
    }
    rc = rc ? rc : feed_run(&f, err);
    feed_fini(&f);
    return rc;
}

int qx_line_feed(struct qx_model *m, struct qx_line **lines, uint32_t n, bool prompt, bool fed, struct qx_error *err)
{
    struct feed f;
    int rc = feed_init(&f, m, prompt, err);
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_line *l = lines[i];
        struct qx_seq *s = qx_line_seq(m, l);
        uint64_t first = s->n_done - l->n_kept; /* position of the step's first row */
        if (!l->n_kept) {
            continue;
        }
        l->has_next = false;
        if (s->held && s->n_mtp < first) {
            feed_held(&f, l, false);
        }
        for (uint32_t j = 0; j < l->n_kept && first + j + 1 < s->n_ids; ++j) {
            bool draft = !l->done && !l->consume_only && l->p.draft && !l->p.propose
                         && first + j + 2 == s->n_ids;
            feed_row(&f, l, first + j, (int32_t)(l->row0 + j), draft);
            s->n_mtp = first + j + 1;
        }
    }
    rc = rc || fed ? rc : feed_run(&f, err);
    feed_fini(&f);
    return rc;
}
