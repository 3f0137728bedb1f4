/* exec_fill.c: what a step reads besides weights: its control block, the lists of penalties, and table rows
 * that lie on disk. See exec.c. */
#include "exec_impl.h"

#include "alloc.h"

#include <string.h>

/* ---- control block ------------------------------------------------------------------------ */

void qx_fill_rows(const struct qx_model *m, struct qx_ctl *c, const struct qx_row *rows, uint32_t n)
{
    struct qx_step *s = &c->step_host;
    for (uint32_t i = 0; i < n; ++i) {
        s->id[i] = rows[i].id;
        s->pos[i] = rows[i].pos;
        s->seq[i] = rows[i].seq;
        s->state_in[i] = rows[i].state_in;
        s->state_out[i] = rows[i].state_out;
        s->first[i] = i && rows[i].seq == rows[i - 1].seq && rows[i].pos == rows[i - 1].pos + 1
                          ? s->first[i - 1] : (int32_t)i;
        c->src_x_host[i] = rows[i].src_x;
        c->src_hold_host[i] = rows[i].src_hold;
    }
    s->n_rows = c->step.n_rows = n;
    for (uint32_t i = 0; i < m->budget.max_seqs; ++i) {
        c->hold_host[i] = -1;
    }
}

void qx_fill_logit_rows(struct qx_ctl *c, const struct qx_row *rows, const struct qx_want *w)
{
    for (uint32_t i = 0; i < w->n_logits; ++i) {
        const struct qx_sampling *s = w->sampling ? &w->sampling[i] : NULL;
        c->pick_host[i] = (int32_t)w->logit_row[i];
        c->spos_host[i] = rows[w->logit_row[i]].pos + 1;
        c->params_host[i] = (struct qx_sample_params){
            .temperature = s ? s->temperature : 0.0f,
            .top_p = s ? s->top_p : 1.0f,
            .min_p = s ? s->min_p : 0.0f,
            .top_k = s ? s->top_k : 0,
            .seed = s ? s->seed : 0,
        };
    }
}

/* Chains go on from the first draft, which the device has: its row gives the second one. */
void qx_fill_chains(struct qx_ctl *c, const struct qx_row *rows, const struct qx_want *w)
{
    struct qx_step *s = &c->chain_host;
    for (uint32_t i = 0; i < w->n_chain; ++i) {
        const struct qx_chain *h = &w->chain[i];
        s->id[i] = 0;
        s->pos[i] = rows[h->row].pos;
        s->seq[i] = h->seq;
        s->first[i] = (int32_t)i;
        s->state_in[i] = s->state_out[i] = -1;
        c->base_host[i] = (int32_t)h->row;
        c->count_host[i] = (int32_t)h->count;
        c->least_host[i] = h->min_prob;
        c->forced_host[i] = (int32_t)h->forced;
    }
    s->n_rows = c->chain.n_rows = w->n_chain;
}

/* ---- penalties ---------------------------------------------------------------------------- */

static bool has_penalty(const struct qx_sampling *s)
{
    return s->temperature >= 0.0f
           && (s->repeat_penalty != 1.0f || s->presence_penalty != 0.0f || s->frequency_penalty != 0.0f);
}

bool qx_want_penalties(const struct qx_want *w)
{
    for (uint32_t i = 0; w->sampling && w->history && i < w->n_logits; ++i) {
        if (has_penalty(&w->sampling[i])) {
            return true;
        }
    }
    return false;
}

uint32_t qx_penalty_ids(const struct qx_model *m)
{
    uint64_t n = m->budget.ctx_tokens;
    return n < m->cfg->vocab_size ? (uint32_t)n : m->cfg->vocab_size;
}

/* Lists of one logit row: distinct ids among the last ones up to the row, with counts. */
static void penalty_row(const struct qx_model *m, const struct qx_row *rows, uint32_t row,
                        const struct qx_seq *h, const struct qx_sampling *s, int32_t *ids, int32_t *counts,
                        uint32_t max_ids, uint32_t *seen)
{
    uint64_t end = (uint64_t)rows[row].pos + 1;
    uint64_t start = s->penalty_last_n && end > s->penalty_last_n ? end - s->penalty_last_n : 0;
    uint32_t n = 0;
    for (uint64_t p = start; p < end; ++p) {
        uint32_t id = p < h->n_ids ? h->ids[p]
                                   : (uint32_t)rows[row - (uint32_t)((uint64_t)rows[row].pos - p)].id;
        if (id >= m->cfg->vocab_size) {
            continue;
        }
        if (seen[id]) {
            ++counts[seen[id] - 1];
        } else if (n < max_ids) {
            ids[n] = (int32_t)id;
            counts[n] = 1;
            seen[id] = ++n;
        }
    }
    for (uint32_t i = 0; i < n; ++i) {
        seen[ids[i]] = 0;
    }
    if (n < max_ids) {
        ids[n] = -1;
    }
}

int qx_fill_penalties(struct qx_model *m, const struct qx_row *rows, const struct qx_want *w,
                          struct qx_error *err)
{
    uint32_t max_ids = qx_penalty_ids(m), n = m->budget.n_logit_rows;
    size_t ints = 2 * (size_t)n * max_ids + 3 * (size_t)n;
    int rc = 0;
    if (!m->b.pen_host) {
        rc = qx_model_host_mem(m, &m->b.pen_host, ints * 4, err);
        rc = rc ? rc : qx_model_mem(m, &m->b.pen_dev, ints * 4, err);
    }
    uint32_t *seen = rc ? NULL : qx_calloc(m->cfg->vocab_size, sizeof *seen);
    if (!seen) {
        return rc ? rc : qx_fail_nomem(err);
    }
    int32_t *ids = m->b.pen_host, *counts = ids + (size_t)n * max_ids;
    struct qx_penalty *params = (struct qx_penalty *)(void *)(counts + (size_t)n * max_ids);
    for (uint32_t i = 0; i < w->n_logits; ++i) {
        const struct qx_sampling *s = &w->sampling[i];
        params[i] = (struct qx_penalty){s->repeat_penalty, s->presence_penalty, s->frequency_penalty};
        if (has_penalty(s) && w->history[i]) {
            penalty_row(m, rows, w->logit_row[i], w->history[i], s, ids + (size_t)i * max_ids,
                        counts + (size_t)i * max_ids, max_ids, seen);
        } else {
            ids[(size_t)i * max_ids] = -1;
        }
    }
    qx_free(seen);
    if (m->be->upload(m->q, m->b.pen_dev, m->b.pen_host, ints * 4)) {
        return qx_model_op_failed(m, "upload", -1, err);
    }
    return 0;
}

/* ---- table on disk ------------------------------------------------------------------------ */

/* Reads the table rows of a step into pinned memory; the ids are those the device computes too. */
int qx_fill_table_rows(struct qx_model *m, const struct qx_row *rows, uint32_t n, struct qx_error *err)
{
    uint32_t heads = m->hash.n_heads;
    uint64_t *ids = qx_malloc((size_t)n * heads * sizeof *ids);
    if (!ids) {
        return qx_fail_nomem(err);
    }
    for (uint32_t r = 0; r < n; ++r) {
        uint32_t prev[QX_MAX_NGRAM];
        const struct qx_seq *s = &m->seqs[rows[r].seq];
        for (uint32_t j = 1; j < m->hash.ngram_size; ++j) {
            int64_t p = (int64_t)rows[r].pos - j;
            bool in_step = r >= j && rows[r - j].seq == rows[r].seq && rows[r - j].pos == p;
            prev[j - 1] = p < 0 ? m->hash.eos : in_step ? (uint32_t)rows[r - j].id
                                                        : s->ids[p];
        }
        qx_ple_rows(&m->hash, (uint32_t)rows[r].id, prev, ids + (size_t)r * heads);
    }
    int rc = qx_rows_read(m->table_rows, ids, (size_t)n * heads, QX_ROW_F32, m->b.host_ple_e, err);
    qx_free(ids);
    return rc;
}
