/* exec.c: one step: rows in, wide states and chosen ids out. Fills a control block, uploads it, and runs
 * the ops of a step, from the third step of a shape on as one recorded graph where the backend has them.
 * Owns no state of sequences; what a row reads and writes is in the row. */
#include "engine.h"

#include "alloc.h"

#include <math.h>
#include <string.h>

#define GRAPH_MAX_ROWS 64

enum step_kind { STEP_MAIN = 0, STEP_MTP, STEP_CHAIN, STEP_FREE, STEP_HEAD_X, STEP_HEAD_HOLD, STEP_HEAD_MTP };

/* What a step's list of ops depends on. */
struct step_plan {
    enum step_kind kind;
    uint32_t n_rows, n_logits;
    bool all_rows;       /* logits of every row: no picking */
    bool prompt;
    bool logits_to_host, values;
    bool penalties;
    uint32_t vocab;      /* rows of the head */
};

/* ---- control block ------------------------------------------------------------------------ */

static void fill_rows(const struct qx_model *m, struct qx_ctl *c, const struct qx_row *rows, uint32_t n)
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

static void fill_logit_rows(struct qx_ctl *c, const struct qx_row *rows, const struct qx_want *w)
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

/* ---- penalties ---------------------------------------------------------------------------- */

static bool has_penalty(const struct qx_sampling *s)
{
    return s->temperature >= 0.0f
           && (s->repeat_penalty != 1.0f || s->presence_penalty != 0.0f || s->frequency_penalty != 0.0f);
}

static bool want_penalties(const struct qx_want *w)
{
    for (uint32_t i = 0; w->sampling && w->history && i < w->n_logits; ++i) {
        if (has_penalty(&w->sampling[i])) {
            return true;
        }
    }
    return false;
}

static uint32_t penalty_ids(const struct qx_model *m)
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

static int fill_penalties(struct qx_model *m, const struct qx_row *rows, const struct qx_want *w,
                          struct qx_error *err)
{
    uint32_t max_ids = penalty_ids(m), n = m->budget.n_logit_rows;
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
static int read_table_rows(struct qx_model *m, const struct qx_row *rows, uint32_t n, struct qx_error *err)
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

/* ---- the ops of a step -------------------------------------------------------------------- */

struct step_watch {
    struct qx_model *m;
    const struct qx_row *rows;
    uint32_t n;
    const struct qx_want *w;
    float *x; /* host copy of the wide states; NULL: not wanted */
};

static bool finite_row(const float *x, size_t n)
{
    for (size_t i = 0; i < n; ++i) {
        if (!isfinite(x[i])) {
            return false;
        }
    }
    return true;
}

/* Selected blocks of the layer that just ran. */
static int tell_blocks(const struct step_watch *t, uint32_t layer, struct qx_error *err)
{
    struct qx_model *m = t->m;
    const struct qx_gen_hooks *h = t->w->hooks;
    uint32_t width = m->budget.budget_blocks;
    int32_t *host = qx_malloc((size_t)t->n * (width + 1u) * sizeof *host);
    if (!host) {
        return qx_fail_nomem(err);
    }
    int32_t *count = host + (size_t)t->n * width;
    int rc = m->be->download(m->q, host, m->b.block, (size_t)t->n * width * sizeof *host);
    rc = rc ? rc : m->be->download(m->q, count, m->b.n_block, t->n * sizeof *count);
    rc = rc ? qx_model_op_failed(m, "download", rc, err) : m->be->wait(m->q, err);
    for (uint32_t r = 0; r < t->n && !rc; ++r) {
        if (h->want_blocks(h->user, (uint64_t)t->rows[r].pos)) {
            h->blocks(h->user, layer, (uint64_t)t->rows[r].pos, host + (size_t)r * width, (uint32_t)count[r]);
        }
    }
    qx_free(host);
    return rc;
}

static int after_layer(void *user, uint32_t layer, struct qx_error *err)
{
    struct step_watch *t = user;
    struct qx_model *m = t->m;
    const struct qx_gen_hooks *h = t->w->hooks;
    size_t wide = (size_t)m->cfg->hc_count * m->cfg->hidden_size;
    if (h && h->blocks && h->want_blocks && m->layers[layer].type == QX_LAYER_QSA) {
        int told = tell_blocks(t, layer, err);
        if (told) {
            return told;
        }
    }
    if (!t->x) {
        return 0;
    }
    if (m->be->download(m->q, t->x, m->b.x, t->n * wide * 4)) {
        return qx_model_op_failed(m, "download", -1, err);
    }
    int rc = m->be->wait(m->q, err);
    if (rc) {
        return rc;
    }
    for (uint32_t r = 0; r < t->n; ++r) {
        uint64_t pos = (uint64_t)t->rows[r].pos;
        if (h && h->streams && h->want_streams && h->want_streams(h->user, pos)) {
            h->streams(h->user, layer, pos, t->x + r * wide);
        }
        if (t->w->scan_layer && *t->w->scan_layer > (int32_t)layer && !finite_row(t->x + r * wide, wide)) {
            *t->w->scan_layer = (int32_t)layer;
        }
    }
    return 0;
}

static int pick_rows(struct qx_model *m, const float *in, const int32_t *index, uint32_t n, float *out,
                     struct qx_error *err)
{
    QX_RUN(m, pick, (&(struct qx_op_pick){.in = in, .index = index, .n = n,
                                          .width = m->cfg->hc_count * m->cfg->hidden_size, .out = out}),
           err);
    return 0;
}

/* Ids from logits, and everything the host wants to see. */
static int choose(struct qx_model *m, const struct step_plan *p, const struct qx_ctl *c,
                  struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    uint32_t vocab = p->vocab;
    int rc = 0;
    if (p->logits_to_host) {
        rc |= m->be->download(m->q, b->host_logits, b->logits, (size_t)p->n_logits * vocab * 4);
    }
    if (p->values) {
        QX_RUN(m, argmax, (&(struct qx_op_argmax){.n_rows = p->n_logits, .vocab = vocab,
                                                  .logits = b->logits, .id = b->out_id,
                                                  .value = b->out_value, .prob = b->out_prob,
                                                  .scratch = b->scratch}), err);
        rc |= m->be->download(m->q, b->host_value, b->out_value, p->n_logits * 4ull);
        rc |= m->be->download(m->q, b->host_prob, b->out_prob, p->n_logits * 4ull);
    } else {
        if (p->penalties) {
            uint32_t max_ids = penalty_ids(m), n = m->budget.n_logit_rows;
            const int32_t *counts = b->pen_dev + (size_t)n * max_ids;
            QX_RUN(m, penalize, (&(struct qx_op_penalize){
                                    .n_rows = p->n_logits, .vocab = vocab, .max_ids = max_ids,
                                    .params = (const void *)(counts + (size_t)n * max_ids),
                                    .id = b->pen_dev, .count = counts, .logits = b->logits}), err);
        }
        QX_RUN(m, sample, (&(struct qx_op_sample){.n_rows = p->n_logits, .vocab = vocab,
                                                  .logits = b->logits, .params = c->params,
                                                  .pos = c->spos, .id = b->out_id,
                                                  .scratch = b->sample_scratch}), err);
    }
    if (p->kind == STEP_FREE) {
        QX_RUN(m, advance, (&(struct qx_op_advance){.step = &c->step, .id_new = b->out_id, .spos = c->spos,
                                                    .ring = b->ring, .ring_len = QX_RING,
                                                    .count = b->count}), err);
    } else {
        rc |= m->be->download(m->q, b->host_id, b->out_id, p->n_logits * 4ull);
    }
    return rc ? qx_model_op_failed(m, "download", rc, err) : 0;
}

/* Mixer and head alone, of rows that an earlier step left behind. */
static int head_ops(struct qx_model *m, const struct step_plan *p, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    struct qx_pending none = {0};
    const float *from = p->kind == STEP_HEAD_X ? b->x : p->kind == STEP_HEAD_HOLD ? b->hold : b->mx;
    int rc = m->be->upload(m->q, m->ctl.dev, m->ctl.host, m->ctl.n_bytes);
    if (rc) {
        return qx_model_op_failed(m, "upload", rc, err);
    }
    rc = pick_rows(m, from, m->ctl.pick, p->n_logits, b->hx, err);
    rc = rc ? rc : qx_graph_head(m, p->kind == STEP_HEAD_MTP ? &m->mtp.mixer : &m->mixer, p->n_logits,
                                 b->hx, &none, NULL, p->n_logits, p->vocab, err);
    return rc ? rc : choose(m, p, &m->ctl, err);
}

static int run_ops(struct qx_model *m, const struct step_plan *p, struct step_watch *watch,
                   struct qx_error *err)
{
    if (p->kind >= STEP_HEAD_X) {
        return head_ops(m, p, err);
    }
    bool is_main = p->kind == STEP_MAIN || p->kind == STEP_FREE;
    struct qx_ctl *c = is_main ? &m->ctl : &m->mctl;
    struct qx_buffers *b = &m->b;
    struct qx_pending pending = {0};
    c->step.n_rows = p->n_rows;
    m->prompt = p->prompt;
    int rc = p->kind == STEP_FREE ? 0 : m->be->upload(m->q, c->dev, c->host, c->n_bytes);
    if (!rc && p->kind == STEP_MAIN && m->has_ple && m->place == QX_TABLE_DISK) {
        rc = m->be->upload(m->q, b->ple_e, b->host_ple_e, (size_t)p->n_rows * m->cfg->ple_embed_dim * 4);
    }
    if (rc) {
        return qx_model_op_failed(m, "upload", rc, err);
    }
    float *x = b->x;
    const struct qx_hc_weights *mixer = &m->mixer;
    if (is_main) {
        rc = qx_graph_layers(m, &c->step, &pending, watch ? after_layer : NULL, watch, err);
    } else {
        rc = pick_rows(m, p->kind == STEP_CHAIN ? b->mx : b->x, c->src_x, p->n_rows, b->my, err);
        if (!rc && p->kind == STEP_MTP) {
            rc = pick_rows(m, b->hold, c->src_hold, p->n_rows, b->my, err);
        }
        x = b->mx;
        mixer = &m->mtp.mixer;
        rc = rc ? rc : qx_graph_mtp(m, &c->step, b->my, x, &pending, err);
    }
    if (rc) {
        return rc;
    }
    if (p->n_logits) {
        rc = qx_graph_head(m, mixer, p->n_rows, x, &pending, p->all_rows ? NULL : c->pick, p->n_logits,
                           p->vocab, err);
        rc = rc ? rc : choose(m, p, c, err);
    } else {
        rc = qx_graph_flush(m, p->n_rows, x, &pending, err);
    }
    return rc;
}

/* Runs the step's ops at once, or records and replays them. */
static int run_step(struct qx_model *m, const struct step_plan *p, struct step_watch *watch,
                    struct qx_error *err)
{
    struct qx_backend *be = m->be;
    if (!be->graph_begin || watch || p->penalties || p->n_rows > GRAPH_MAX_ROWS) {
        return run_ops(m, p, watch, err);
    }
    struct qx_graph_key key = {p->kind, p->n_rows, p->n_logits,
                               (uint32_t)p->all_rows | (uint32_t)p->logits_to_host << 1
                                   | (uint32_t)p->values << 2 | (uint32_t)p->prompt << 3};
    struct qx_graph *g = NULL;
    for (uint32_t i = 0; i < m->n_graphs && !g; ++i) {
        g = memcmp(&m->graphs[i].key, &key, sizeof key) == 0 ? &m->graphs[i] : NULL;
    }
    if (!g) {
        if (m->n_graphs == QX_MAX_GRAPHS) {
            return run_ops(m, p, NULL, err);
        }
        g = &m->graphs[m->n_graphs++];
        *g = (struct qx_graph){.key = key};
    }
    if (!g->graph) {
        if (++g->n_seen < 3) {
            return run_ops(m, p, NULL, err); /* shapes that occur once or twice are not worth recording */
        }
        int rc = be->graph_begin(m->q, err);
        rc = rc ? rc : run_ops(m, p, NULL, err);
        struct qx_error ignored;
        int end = be->graph_end(m->q, &g->graph, &g->n_nodes, rc ? &ignored : err);
        if (rc || end) {
            return rc ? rc : end;
        }
    }
    int rc = be->graph_launch(m->q, g->graph);
    return rc ? qx_model_op_failed(m, "graph", rc, err) : 0;
}

static int upload_pages(struct qx_model *m, struct qx_error *err)
{
    if (m->page_table_dirty) {
        if (m->be->upload(m->q, m->page_table_dev, m->page_table_host, 4ull * m->budget.n_pages)) {
            return qx_model_op_failed(m, "upload", -1, err);
        }
        m->page_table_dirty = false;
    }
    return 0;
}

static int need_host_logits(struct qx_model *m, const struct qx_want *w, struct qx_error *err)
{
    if (!w->logits_to_host || m->b.host_logits) {
        return 0;
    }
    return qx_model_host_mem(m, &m->b.host_logits,
                             (uint64_t)m->budget.n_logit_rows * m->cfg->vocab_size * 4, err);
}

static struct step_plan make_plan(const struct qx_model *m, enum step_kind kind, uint32_t n,
                                  const struct qx_want *w)
{
    bool draft = (kind == STEP_MTP || kind == STEP_CHAIN) && !w->logits_to_host;
    struct step_plan p = {.vocab = draft && m->draft_vocab ? m->draft_vocab : m->cfg->vocab_size,
                          .kind = kind, .prompt = n > GRAPH_MAX_ROWS, .n_rows = n, .n_logits = w->n_logits, .all_rows = w->n_logits == n,
                          .logits_to_host = w->logits_to_host && w->n_logits, .values = w->values,
                          .penalties = want_penalties(w)};
    return p;
}

static int tell_ple_rows(struct qx_model *m, const struct qx_row *rows, uint32_t n,
                         const struct qx_gen_hooks *h, struct qx_error *err)
{
    uint32_t heads = m->hash.n_heads;
    int64_t *host = qx_malloc((size_t)n * heads * sizeof *host);
    if (!host) {
        return qx_fail_nomem(err);
    }
    int rc = m->be->download(m->q, host, m->b.ple_row, (size_t)n * heads * sizeof *host);
    rc = rc ? qx_model_op_failed(m, "download", rc, err) : m->be->wait(m->q, err);
    for (uint32_t r = 0; r < n && !rc; ++r) {
        if (h->want_ple_rows(h->user, (uint64_t)rows[r].pos)) {
            h->ple_rows(h->user, (uint64_t)rows[r].pos, host + (size_t)r * heads, heads);
        }
    }
    qx_free(host);
    return rc;
}

int qx_exec_step(struct qx_model *m, const struct qx_row *rows, uint32_t n, const struct qx_want *w,
                 struct qx_error *err)
{
    const struct qx_gen_hooks *h = w->hooks;
    bool wide = w->scan_layer || (h && h->streams && h->want_streams);
    bool watched = wide || (h && h->blocks && h->want_blocks);
    fill_rows(m, &m->ctl, rows, n);
    fill_logit_rows(&m->ctl, rows, w);
    int rc = upload_pages(m, err);
    rc = rc ? rc : need_host_logits(m, w, err);
    struct step_plan p = make_plan(m, STEP_MAIN, n, w);
    if (!rc && p.penalties) {
        rc = fill_penalties(m, rows, w, err);
    }
    if (!rc && m->has_ple && m->place == QX_TABLE_DISK) {
        rc = read_table_rows(m, rows, n, err);
    }
    if (rc) {
        return rc;
    }
    struct step_watch watch = {m, rows, n, w, NULL};
    if (wide) {
        watch.x = qx_malloc((size_t)n * m->cfg->hc_count * m->cfg->hidden_size * 4);
        if (!watch.x) {
            return qx_fail_nomem(err);
        }
    }
    rc = run_step(m, &p, watched ? &watch : NULL, err);
    rc = rc ? rc : m->be->wait(m->q, err);
    qx_free(watch.x);
    if (!rc && m->has_ple && h && h->ple_rows && h->want_ple_rows) {
        rc = tell_ple_rows(m, rows, n, h, err);
    }
    ++m->n_steps;
    return rc;
}

int qx_exec_free_start(struct qx_model *m, const struct qx_row *rows, uint32_t n, const struct qx_want *w,
                       struct qx_error *err)
{
    fill_rows(m, &m->ctl, rows, n);
    fill_logit_rows(&m->ctl, rows, w);
    *m->b.count_host = 0;
    int rc = upload_pages(m, err);
    if (!rc && m->be->upload(m->q, m->ctl.dev, m->ctl.host, m->ctl.n_bytes)) {
        rc = qx_model_op_failed(m, "upload", -1, err);
    }
    return rc;
}

int qx_exec_free_launch(struct qx_model *m, uint32_t n, struct qx_error *err)
{
    struct step_plan p = {.kind = STEP_FREE, .n_rows = n, .n_logits = n, .all_rows = true,
                          .vocab = m->cfg->vocab_size};
    ++m->n_steps;
    return run_step(m, &p, NULL, err);
}

const int32_t *qx_exec_free_ids(struct qx_model *m, uint32_t n, uint64_t i)
{
    uint64_t done = __atomic_load_n(m->b.count_host, __ATOMIC_ACQUIRE);
    return done > i ? m->b.ring_host + i % QX_RING * n : NULL;
}

int qx_exec_mtp(struct qx_model *m, const struct qx_row *rows, uint32_t n, bool chain,
                const struct qx_want *w, struct qx_error *err)
{
    fill_rows(m, &m->mctl, rows, n);
    fill_logit_rows(&m->mctl, rows, w);
    int rc = upload_pages(m, err);
    rc = rc ? rc : need_host_logits(m, w, err);
    struct step_plan p = make_plan(m, chain ? STEP_CHAIN : STEP_MTP, n, w);
    rc = rc ? rc : run_step(m, &p, NULL, err);
    return rc ? rc : m->be->wait(m->q, err);
}

int qx_exec_head(struct qx_model *m, enum qx_head_source from, const struct qx_row *rows,
                 const struct qx_want *w, struct qx_error *err)
{
    static const enum step_kind kinds[3] = {STEP_HEAD_X, STEP_HEAD_HOLD, STEP_HEAD_MTP};
    fill_logit_rows(&m->ctl, rows, w);
    if (from == QX_HEAD_HOLD) {
        for (uint32_t i = 0; i < w->n_logits; ++i) {
            m->ctl.pick_host[i] = rows[w->logit_row[i]].seq;
        }
    }
    struct step_plan p = make_plan(m, kinds[from], w->n_logits, w);
    int rc = need_host_logits(m, w, err);
    if (!rc && p.penalties) {
        rc = fill_penalties(m, rows, w, err);
    }
    rc = rc ? rc : run_step(m, &p, NULL, err);
    return rc ? rc : m->be->wait(m->q, err);
}

int qx_exec_hold(struct qx_model *m, const int32_t *row_of_seq, struct qx_error *err)
{
    struct qx_ctl *c = &m->ctl;
    memcpy(c->hold_host, row_of_seq, 4ull * m->budget.max_seqs);
    if (m->be->upload(m->q, c->hold, c->hold_host, 4ull * m->budget.max_seqs)) {
        return qx_model_op_failed(m, "upload", -1, err);
    }
    int rc = pick_rows(m, m->b.x, c->hold, m->budget.max_seqs, m->b.hold, err);
    return rc ? rc : m->be->wait(m->q, err); /* the control block is rewritten by the next step */
}
