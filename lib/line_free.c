/* line_free.c: decoding without the host in the loop: steps that feed themselves on the device, launched
 * one ahead, their ids collected behind. */
#include "line.h"

#include "alloc.h"

bool qx_line_can_free(const struct qx_model *m, struct qx_line *const *lines, uint32_t n)
{
    bool can = n > 0 && !m->mtp.loaded && !(m->has_ple && m->place == QX_TABLE_DISK);
    for (uint32_t i = 0; i < n && can; ++i) {
        const struct qx_line *l = lines[i];
        const struct qx_seq *s = &m->seqs[l->seq];
        const struct qx_sampling *p = &l->p.sampling;
        can = !l->consume_only && !l->hooks && !l->p.n_logprobs && l->stats.n_tokens && s->cur >= 0
              && s->n_ids == s->n_done + 1 && p->repeat_penalty == 1.0f && p->presence_penalty == 0.0f
              && p->frequency_penalty == 0.0f;
    }
    return can;
}

/* Steps that no line can stop before by its limits. */
static uint64_t steps_left(const struct qx_model *m, const struct qx_line *l)
{
    uint64_t room = m->budget.ctx_tokens - m->seqs[l->seq].n_ids, left = l->p.n_max - l->stats.n_tokens;
    return room < left ? room : left;
}

static int free_start(struct qx_model *m, struct qx_line **lines, uint32_t n, uint64_t steps,
                      struct qx_error *err)
{
    struct qx_row *rows = qx_calloc(n, sizeof *rows);
    uint32_t *all = qx_calloc(n, sizeof *all);
    struct qx_sampling *sampling = qx_calloc(n, sizeof *sampling);
    int rc = rows && all && sampling ? 0 : qx_fail_nomem(err);
    for (uint32_t i = 0; i < n && !rc; ++i) {
        struct qx_seq *s = &m->seqs[lines[i]->seq];
        rc = qx_seq_reserve(m, lines[i]->seq, s->n_done + steps, err);
        rows[i] = (struct qx_row){.seq = lines[i]->seq, .pos = (int32_t)s->n_done,
                                  .id = (int32_t)s->ids[s->n_done], .state_in = s->cur, .state_out = s->cur,
                                  .src_x = -1, .src_hold = -1};
        all[i] = i;
        sampling[i] = lines[i]->p.sampling;
    }
    struct qx_want w = {.logit_row = all, .n_logits = n, .sampling = sampling};
    rc = rc ? rc : qx_exec_free_start(m, rows, n, &w, err);
    qx_free(sampling);
    qx_free(all);
    qx_free(rows);
    return rc;
}

/* Waits for step i and hands its ids out; lines that are done already keep theirs. */
static int collect(struct qx_model *m, struct qx_line **lines, uint32_t n, uint64_t i, bool *any_done,
                   struct qx_error *err)
{
    const int32_t *ids;
    for (uint32_t spins = 0; !(ids = qx_exec_free_ids(m, n, i)); ++spins) {
        if (spins == 1u << 24) {
            /* Long past any step: waiting brings out a failure of the device, or the step's end. */
            int rc = qx_exec_wait(m, err);
            if (rc || !qx_exec_free_ids(m, n, i)) {
                return rc ? rc : qx_fail(err, QX_E_DEVICE, "device", "a decode step did not report its ids");
            }
        }
    }
    for (uint32_t j = 0; j < n; ++j) {
        struct qx_line *l = lines[j];
        if (l->done) {
            l->overrun = true; /* this step consumed its last id */
            continue;
        }
        ++l->stats.rounds;
        /* The step consumed every id known before it. */
        m->seqs[l->seq].n_done = m->seqs[l->seq].n_ids;
        int rc = qx_line_emit(m, l, ids[j], NULL, l->error ? l->error : err);
        if (rc && !l->error) {
            return rc;
        }
        *any_done = *any_done || l->done;
    }
    return 0;
}

int qx_line_free(struct qx_model *m, struct qx_line **lines, uint32_t n, struct qx_error *err)
{
    uint64_t steps = UINT64_MAX;
    for (uint32_t i = 0; i < n; ++i) {
        uint64_t left = steps_left(m, lines[i]);
        steps = left < steps ? left : steps;
    }
    steps = steps < 512 ? steps : 512; /* pages are reserved ahead: not for a whole context at once */
    /* One step ahead of what was read where launching does not wait: the device never idles. */
    uint64_t ahead = m->be->graph_begin ? 2 : 1, launched = 0, read = 0;
    bool any_done = false;
    int rc = free_start(m, lines, n, steps, err);
    while (!rc && read < steps && (!any_done || read < launched)) {
        while (!rc && !any_done && launched < steps && launched < read + ahead) {
            rc = qx_exec_free_launch(m, n, err);
            launched += rc == 0;
        }
        rc = rc ? rc : collect(m, lines, n, read, &any_done, err);
        ++read;
    }
    int waited = qx_exec_wait(m, rc ? NULL : err);
    rc = rc ? rc : waited;
    /* A line that stopped one step early has consumed its last id too: its wide state is held, as after
     * a prompt. */
    int32_t *row = rc ? NULL : qx_malloc(m->budget.max_seqs * sizeof *row);
    if (!rc && !row) {
        return qx_fail_nomem(err);
    }
    bool hold = false;
    for (uint32_t i = 0; i < m->budget.max_seqs && row; ++i) {
        row[i] = -1;
    }
    for (uint32_t i = 0; i < n && row; ++i) {
        struct qx_seq *s = &m->seqs[lines[i]->seq];
        s->held = false;
        if (lines[i]->overrun) {
            s->n_done = s->n_ids;
            row[lines[i]->seq] = (int32_t)i;
            s->held = hold = true;
        }
    }
    rc = hold ? qx_exec_hold(m, row, err) : rc;
    qx_free(row);
    return rc;
}
