/* exec.c: one step: rows in, wide states and chosen ids out. Fills a control block (exec_fill.c), uploads it,
 * and runs the ops of a step, from the third step of a shape on as one recorded graph where the backend has
 * them. Owns no state of sequences; what a row reads and writes is in the row.
 *
 * A round of drafts is one step here: the draft head's chain fills the rows that the main model verifies on
 * the device, and the host waits once, for the ids chosen from them. The draft head's rows of what was kept
 * follow without a wait, for one sequence in the same graph, so that the host prepares the next step beside them;
 * the id they choose stays on the device and begins the next chain. */
#include "exec_impl.h"

#include "alloc.h"

#include <math.h>
#include <string.h>

#define GRAPH_MAX_ROWS 64

/* STEP_CHAIN: the drafts of a step alone, for a host that must know them before the step. */
enum step_kind { STEP_MAIN = 0, STEP_MTP, STEP_CHAIN, STEP_FREE, STEP_HEAD_X, STEP_HEAD_HOLD, STEP_HEAD_MTP };

/* What a step's list of ops depends on. */
struct step_plan {
    enum step_kind kind;
    uint32_t n_rows, n_logits;
    bool all_rows;       /* logits of every row: no picking */
    bool prompt;
    bool logits_to_host;
    bool penalties;
    bool greedy;         /* only the largest logits are wanted, and the head's copy is there to find them */
    uint32_t n_chain, n_drafts; /* lines with drafts to make first, and the most of one */
    bool feed;           /* what the step keeps goes to the draft head at once */
    bool again;          /* the device has the control block of an earlier step, which is to do */
};

int qx_exec_wait(struct qx_model *m, struct qx_error *err)
{
    m->ctl.in_flight = m->pctl.in_flight = m->mctl.in_flight = m->mpctl.in_flight = false;
    return m->be->wait(m->q, err);
}

/* The ids chosen from n rows, which the device writes to the host's memory: seen some microseconds before a wait
 * for the device ends, and everything before them is done. */
static int see_ids(struct qx_model *m, uint32_t n, struct qx_error *err)
{
    uint32_t i = 0;
    for (uint32_t spins = 0; spins < 1u << 24 && i < n; ++spins) {
        i += __atomic_load_n(&m->b.host_id[i], __ATOMIC_ACQUIRE) != QX_UNTOLD;
    }
    if (i < n) { /* long, or failed */
        return qx_exec_wait(m, err);
    }
    ++m->be->n_waits;
    m->ctl.in_flight = m->pctl.in_flight = m->mctl.in_flight = m->mpctl.in_flight = false;
    return 0;
}

/* The control block's host image, free to write to. */
static int claim(struct qx_model *m, struct qx_ctl *c, struct qx_error *err)
{
    return c->in_flight ? qx_exec_wait(m, err) : 0;
}

static int upload_ctl(struct qx_model *m, struct qx_ctl *c, struct qx_error *err)
{
    int rc = m->be->upload_mapped(m->q, c->dev, c->host_dev, c->n_bytes);
    return rc ? qx_model_op_failed(m, "upload", rc, err) : 0;
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
    rc = rc ? qx_model_op_failed(m, "download", rc, err) : qx_exec_wait(m, err);
    for (uint32_t r = 0; r < t->n && !rc; ++r) {
        if (t->rows[r].pos >= 0 && h->want_blocks(h->user, (uint64_t)t->rows[r].pos)) {
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
    int rc = qx_exec_wait(m, err);
    if (rc) {
        return rc;
    }
    for (uint32_t r = 0; r < t->n; ++r) {
        uint64_t pos = (uint64_t)t->rows[r].pos;
        if (t->rows[r].pos < 0) {
            continue;
        }
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
    uint32_t vocab = m->head.rows;
    int rc = 0;
    if (p->logits_to_host) {
        rc |= m->be->download(m->q, b->host_logits, b->logits, (size_t)p->n_logits * vocab * 4);
    }
    if (p->penalties) {
        uint32_t max_ids = qx_penalty_ids(m), n = m->budget.n_logit_rows;
        const int32_t *counts = b->pen_dev + (size_t)n * max_ids;
        QX_RUN(m, penalize, (&(struct qx_op_penalize){
                                .n_rows = p->n_logits, .vocab = vocab, .max_ids = max_ids,
                                .params = (const void *)(counts + (size_t)n * max_ids),
                                .id = b->pen_dev, .count = counts, .logits = b->logits}), err);
    }
    int32_t *told = p->kind == STEP_FREE ? NULL : b->told_id;
    if (p->greedy) {
        rc = qx_graph_best(m, p->n_logits, false, told, err);
        if (rc) {
            return rc;
        }
    } else {
        QX_RUN(m, sample, (&(struct qx_op_sample){.n_rows = p->n_logits, .vocab = vocab, .logits = b->logits,
                                                  .params = c->params, .pos = c->spos, .id = b->out_id, .told = told,
                                                  .scratch = b->sample_scratch}), err);
    }
    if (p->kind == STEP_FREE) {
        QX_RUN(m, advance, (&(struct qx_op_advance){.step = &c->step, .id_new = b->out_id, .spos = c->spos,
                                                    .ring = b->ring, .ring_len = QX_RING,
                                                    .count = b->count}), err);
    }
    return rc ? qx_model_op_failed(m, "download", rc, err) : 0;
}

/* Mixer and head alone, of rows that an earlier step left behind. */
static int head_ops(struct qx_model *m, const struct step_plan *p, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    struct qx_pending none = {0};
    const float *from = p->kind == STEP_HEAD_X ? b->x : p->kind == STEP_HEAD_HOLD ? b->hold : b->mx;
    int rc = upload_ctl(m, &m->ctl, err);
    rc = rc ? rc : pick_rows(m, from, m->ctl.pick, p->n_logits, b->hx, err);
    rc = rc ? rc : qx_graph_head(m, p->kind == STEP_HEAD_MTP ? &m->mtp.mixer : &m->mixer, p->n_logits,
                                 b->hx, &none, NULL, p->n_logits, p->greedy ? NULL : &m->head, err);
    return rc ? rc : choose(m, p, &m->ctl, err);
}

/* The draft head's layer and, for n_logits rows, the drafts it chooses, with their probabilities. tail: as in
 * qx_graph_layer, the rows that choose; else pick says which. */
static int draft_ops(struct qx_model *m, const struct qx_step *s, const struct qx_step *tail,
                     const struct qx_wide_rows *wide, const int32_t *pick, uint32_t n_logits, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    struct qx_pending pending = {0};
    uint32_t n = tail ? tail->n_rows : s->n_rows;
    float *x = b->mx + (uint64_t)(s->n_rows - n) * m->cfg->hc_count * m->cfg->hidden_size;
    int rc = qx_graph_mtp(m, s, tail, wide, b->mx, &pending, err);
    if (rc || !n_logits) {
        return rc ? rc : qx_graph_flush(m, n, x, &pending, err);
    }
    /* The whole head, or those of its rows that were chosen for drafts. */
    bool copy = !m->draft_map && qx_head_by_copy(m, n_logits);
    rc = qx_graph_head(m, &m->mtp.mixer, n, x, &pending, pick, n_logits, copy ? NULL : &m->draft_head, err);
    if (rc || copy) {
        return rc ? rc : qx_graph_best(m, n_logits, true, NULL, err);
    }
    QX_RUN(m, argmax, (&(struct qx_op_argmax){.n_rows = n_logits, .vocab = m->draft_head.rows,
                                              .logits = b->logits, .id = b->out_id, .value = b->out_value,
                                              .prob = b->out_prob, .scratch = b->scratch}), err);
    return 0;
}

/* Keeps n drafts just chosen, and the wide states that go with them, for the next chain. */
static int keep_drafts(struct qx_model *m, const struct qx_step *s, uint32_t n, const int32_t *row, const float *wide,
                       struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    QX_RUN(m, draft_keep, (&(struct qx_op_draft_keep){
                              .step = s, .n = n, .width = m->cfg->hc_count * m->cfg->hidden_size, .row = row,
                              .wide = wide, .id = b->out_id, .prob = b->out_prob, .map = m->draft_map,
                              .hold = b->mhold, .next_id = b->next_id, .next_prob = b->next_prob}), err);
    return 0;
}

/* Rows that the draft head is owed. */
static int mtp_ops(struct qx_model *m, const struct step_plan *p, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    struct qx_ctl *c = p->prompt ? &m->mpctl : &m->mctl;
    c->step.n_rows = p->n_rows;
    int rc = p->again ? 0 : upload_ctl(m, c, err);
    struct qx_wide_rows wide = {{b->x, b->hold}, {c->src_x, c->src_hold}};
    rc = rc ? rc : draft_ops(m, &c->step, NULL, &wide, p->all_rows ? NULL : c->pick, p->n_logits, err);
    return rc || !p->n_logits ? rc : keep_drafts(m, &c->step, p->n_logits, c->pick, b->mx, err);
}

/* The same for a step of one line that has just been verified, without the host: it finds out for itself what was
 * kept. Only the last row kept chooses a draft. */
static int feed_ops(struct qx_model *m, const struct step_plan *p, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    struct qx_ctl *c = &m->mctl;
    struct qx_step *s = &c->step, tail;
    uint32_t last = p->n_rows - 1;
    s->n_rows = p->n_rows;
    tail = (struct qx_step){.n_rows = 1, .id = s->id + last, .pos = s->pos + last, .seq = s->seq + last,
                            .first = c->pick, .state_in = s->state_in + last, .state_out = s->state_out + last};
    QX_RUN(m, draft_accept, (&(struct qx_op_draft_accept){.step = &m->ctl.step, .feed = s, .n = p->n_rows,
                                                          .id = b->out_id, .forced = m->ctl.forced, .src = c->src_x,
                                                          .pick = c->pick}), err);
    struct qx_wide_rows wide = {{b->x, NULL}, {c->src_x, NULL}};
    int rc = draft_ops(m, s, &tail, &wide, NULL, 1, err);
    const float *x = b->mx + (uint64_t)last * m->cfg->hc_count * m->cfg->hidden_size;
    return rc ? rc : keep_drafts(m, &tail, 1, c->pick, x, err);
}

/* Drafts of a step's lines, one draft head step for each place in the chains but the first. */
static int chain_ops(struct qx_model *m, const struct step_plan *p, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    struct qx_ctl *c = &m->ctl;
    c->chain.n_rows = p->n_chain;
    for (uint32_t nth = 1; nth <= p->n_drafts; ++nth) {
        bool first = nth == 1;
        QX_RUN(m, draft_next, (&(struct qx_op_draft_next){
                                  .chain = &c->chain, .step = &c->step, .n = p->n_chain, .nth = nth,
                                  .base = c->base, .count = c->count, .min_prob = c->least,
                                  .id = first ? b->next_id : b->out_id,
                                  .prob = first ? b->next_prob : b->out_prob,
                                  .map = first ? NULL : m->draft_map, .by_seq = first, .told_id = b->told_drafts,
                                  .told_pos = b->told_drafts + m->budget.n_logit_rows}), err);
        if (nth < p->n_drafts) {
            /* Every row's state is its line's before it, which the last head step left in the same row. */
            struct qx_wide_rows wide = {{first ? b->mhold : b->mx, NULL}, {first ? c->chain.seq : NULL, NULL}};
            int rc = draft_ops(m, &c->chain, NULL, &wide, NULL, p->n_chain, err);
            if (rc) {
                return rc;
            }
        }
    }
    return 0;
}

static int run_ops(struct qx_model *m, const struct step_plan *p, struct step_watch *watch,
                   struct qx_error *err)
{
    m->prompt = p->prompt;
    if (p->kind >= STEP_HEAD_X) {
        return head_ops(m, p, err);
    }
    if (p->kind == STEP_MTP) {
        return mtp_ops(m, p, err);
    }
    struct qx_ctl *c = p->prompt ? &m->pctl : &m->ctl;
    struct qx_buffers *b = &m->b;
    struct qx_pending pending = {0};
    c->step.n_rows = p->n_rows;
    int rc = p->kind == STEP_FREE || p->again ? 0 : upload_ctl(m, c, err);
    rc = rc || !p->n_chain ? rc : chain_ops(m, p, err);
    if (rc || p->kind == STEP_CHAIN) {
        return rc;
    }
    if (p->kind == STEP_MAIN && m->has_ple && m->place == QX_TABLE_DISK
        && m->be->upload(m->q, b->ple_e, b->host_ple_e, (size_t)p->n_rows * m->cfg->ple_embed_dim * 4)) {
        return qx_model_op_failed(m, "upload", -1, err);
    }
    rc = qx_graph_layers(m, &c->step, &pending, watch ? after_layer : NULL, watch, err);
    if (rc || !p->n_logits) {
        return rc ? rc : qx_graph_flush(m, p->n_rows, b->x, &pending, err);
    }
    rc = qx_graph_head(m, &m->mixer, p->n_rows, b->x, &pending, p->all_rows ? NULL : c->pick, p->n_logits,
                       p->greedy ? NULL : &m->head, err);
    rc = rc ? rc : choose(m, p, c, err);
    return rc || !p->feed ? rc : feed_ops(m, p, err);
}

/* ---- graphs ------------------------------------------------------------------------------- */

static struct qx_graph *graph_of(struct qx_model *m, const struct step_plan *p)
{
    struct qx_graph_key key = {p->kind, p->n_rows, p->n_logits,
                               (uint32_t)p->all_rows | (uint32_t)p->logits_to_host << 1 | (uint32_t)p->feed << 2
                                   | (uint32_t)p->greedy << 3,
                               p->n_chain,
                               p->n_drafts};
    struct qx_graph *oldest = &m->graphs[0];
    for (uint32_t i = 0; i < m->n_graphs; ++i) {
        struct qx_graph *g = &m->graphs[i];
        if (memcmp(&g->key, &key, sizeof key) == 0) {
            return g;
        }
        oldest = g->last_used < oldest->last_used ? g : oldest;
    }
    if (m->n_graphs < QX_MAX_GRAPHS) {
        oldest = &m->graphs[m->n_graphs++];
    } else if (oldest->graph) {
        if (qx_exec_wait(m, NULL)) {
            return NULL;
        }
        m->be->graph_destroy(m->be, oldest->graph);
    }
    *oldest = (struct qx_graph){.key = key};
    return oldest;
}

int qx_exec_record(struct qx_model *m, int (*ops)(struct qx_model *m, const void *user, struct qx_error *err),
                   const void *user, void **graph, uint64_t *n_nodes, struct qx_error *err)
{
    *graph = NULL;
    QX_TRY(m->be->graph_begin(m->q, err));
    int rc = ops(m, user, err);
    struct qx_error ignored;
    int end = m->be->graph_end(m->q, graph, n_nodes, rc ? &ignored : err);
    rc = rc ? rc : end;
    if (rc) {
        m->be->graph_destroy(m->be, *graph);
        *graph = NULL;
    }
    return rc;
}

static int record_step(struct qx_model *m, const void *user, struct qx_error *err)
{
    return run_ops(m, user, NULL, err);
}

/* Runs the step's ops at once, or records and replays them. */
static int run_step(struct qx_model *m, const struct step_plan *p, struct step_watch *watch,
                    struct qx_error *err)
{
    struct qx_backend *be = m->be;
    if (!be->graph_begin || watch || p->penalties || p->prompt || p->n_rows > GRAPH_MAX_ROWS) {
        return run_ops(m, p, watch, err);
    }
    struct qx_graph *g = graph_of(m, p);
    if (!g) {
        return run_ops(m, p, NULL, err);
    }
    g->last_used = ++m->n_runs;
    if (!g->graph) {
        if (++g->n_seen < 3) {
            return run_ops(m, p, NULL, err); /* shapes that occur once or twice are not worth recording */
        }
        QX_TRY(qx_exec_record(m, record_step, p, &g->graph, &g->n_nodes, err));
    }
    int rc = be->graph_launch(m->q, g->graph);
    return rc ? qx_model_op_failed(m, "graph", rc, err) : 0;
}

int qx_exec_round_ops(struct qx_model *m, uint32_t k, enum qx_round_part part, bool upload, struct qx_error *err)
{
    bool all = part == QX_ROUND_ALL, chain = part != QX_ROUND_CHECK;
    struct step_plan p = {.kind = part == QX_ROUND_DRAFTS ? STEP_CHAIN : STEP_MAIN, .n_rows = k + 1, .n_logits = k + 1,
                          .all_rows = true, .n_chain = chain, .n_drafts = chain ? k : 0, .feed = all,
                          .greedy = qx_head_by_copy(m, k + 1), .again = !upload};
    int rc = run_ops(m, &p, NULL, err);
    return rc || part != QX_ROUND_DRAFTS ? rc : feed_ops(m, &p, err);
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

static struct step_plan make_plan(const struct qx_model *m, enum step_kind kind, uint32_t n, const struct qx_want *w)
{
    struct step_plan p = {.kind = kind, .n_rows = n, .n_logits = w->n_logits, .all_rows = w->n_logits == n,
                          .prompt = w->prompt, .logits_to_host = w->logits_to_host && w->n_logits,
                          .penalties = kind != STEP_MTP && qx_want_penalties(w), .n_chain = w->n_chain};
    p.greedy = kind != STEP_MTP && qx_head_by_copy(m, w->n_logits) && !p.penalties && !p.logits_to_host;
    for (uint32_t i = 0; w->sampling && i < w->n_logits; ++i) {
        p.greedy = p.greedy && !(w->sampling[i].temperature > 0.0f);
    }
    for (uint32_t i = 0; i < w->n_chain; ++i) {
        p.n_drafts = w->chain[i].count > p.n_drafts ? w->chain[i].count : p.n_drafts;
    }
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
    rc = rc ? qx_model_op_failed(m, "download", rc, err) : qx_exec_wait(m, err);
    for (uint32_t r = 0; r < n && !rc; ++r) {
        if (rows[r].pos >= 0 && h->want_ple_rows(h->user, (uint64_t)rows[r].pos)) {
            h->ple_rows(h->user, (uint64_t)rows[r].pos, host + (size_t)r * heads, heads);
        }
    }
    qx_free(host);
    return rc;
}

/* What the chains fill in and take away. */
static void expect_drafts(struct qx_model *m, const struct qx_row *rows, uint32_t n)
{
    for (uint32_t r = 0; r < n; ++r) {
        m->b.host_drafts[r] = rows[r].id;
        m->b.host_drafts[m->budget.n_logit_rows + r] = rows[r].pos;
    }
}

/* Takes it over. */
static void read_drafts(const struct qx_model *m, struct qx_row *rows, const struct qx_want *w)
{
    const int32_t *id = m->b.host_drafts, *pos = id + m->budget.n_logit_rows;
    for (uint32_t i = 0; i < w->n_chain; ++i) {
        for (uint32_t r = w->chain[i].row + 1; r <= w->chain[i].row + w->chain[i].count; ++r) {
            rows[r].id = id[r];
            rows[r].pos = pos[r];
            rows[r].state_out = pos[r] < 0 ? -1 : rows[r].state_out;
        }
    }
}

/* Chains apart from the step, and then its control block once more with the drafts in it. */
static int drafts_first(struct qx_model *m, struct step_plan *p, struct qx_row *rows, uint32_t n,
                        const struct qx_want *w, struct qx_error *err)
{
    struct step_plan chain = {.kind = STEP_CHAIN, .n_rows = n, .n_chain = p->n_chain, .n_drafts = p->n_drafts};
    int rc = run_step(m, &chain, NULL, err);
    rc = rc ? rc : qx_exec_wait(m, err);
    if (!rc) {
        read_drafts(m, rows, w);
        qx_fill_rows(m, &m->ctl, rows, n);
    }
    p->n_chain = p->n_drafts = 0;
    return rc;
}

int qx_exec_step(struct qx_model *m, struct qx_row *rows, uint32_t n, const struct qx_want *w,
                 struct qx_error *err)
{
    const struct qx_gen_hooks *h = w->hooks;
    bool wide = w->scan_layer || (h && h->streams && h->want_streams);
    bool watched = wide || (h && h->blocks && h->want_blocks);
    bool on_disk = m->has_ple && m->place == QX_TABLE_DISK;
    struct qx_ctl *c = w->prompt ? &m->pctl : &m->ctl;
    struct step_plan p = make_plan(m, STEP_MAIN, n, w);
    int rc = claim(m, c, err);
    if (rc) {
        return rc;
    }
    qx_fill_rows(m, c, rows, n);
    qx_fill_logit_rows(c, rows, w);
    qx_fill_chains(c, rows, w);
    rc = upload_pages(m, err);
    rc = rc ? rc : need_host_logits(m, w, err);
    bool drafts = p.n_chain > 0, apart = drafts && (p.penalties || on_disk || watched);
    p.feed = w->feed && !apart;
    if (drafts) {
        expect_drafts(m, rows, n);
    }
    if (!rc && apart) {
        rc = drafts_first(m, &p, rows, n, w, err);
    }
    if (!rc && p.penalties) {
        rc = qx_fill_penalties(m, rows, w, err);
    }
    if (!rc && on_disk) {
        rc = qx_fill_table_rows(m, rows, n, err);
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
    bool see = p.n_logits && !p.prompt && !p.logits_to_host && !watched;
    for (uint32_t i = 0; i < p.n_logits; ++i) {
        m->b.host_id[i] = QX_UNTOLD;
    }
    rc = run_step(m, &p, watched ? &watch : NULL, err);
    rc = rc ? rc : see ? see_ids(m, p.n_logits, err) : qx_exec_wait(m, err);
    qx_free(watch.x);
    if (!rc && drafts && !apart) {
        read_drafts(m, rows, w);
    }
    if (!rc && m->has_ple && h && h->ple_rows && h->want_ple_rows) {
        rc = tell_ple_rows(m, rows, n, h, err);
    }
    if (w->fed) {
        *w->fed = p.feed;
    }
    ++m->n_steps;
    return rc;
}

int qx_exec_free_start(struct qx_model *m, const struct qx_row *rows, uint32_t n, const struct qx_want *w,
                       struct qx_error *err)
{
    int rc = claim(m, &m->ctl, err);
    if (rc) {
        return rc;
    }
    qx_fill_rows(m, &m->ctl, rows, n);
    qx_fill_logit_rows(&m->ctl, rows, w);
    m->free_greedy = make_plan(m, STEP_FREE, n, w).greedy;
    *m->b.count_host = 0;
    m->ctl.in_flight = true; /* steps go on, only read behind */
    rc = upload_pages(m, err);
    return rc ? rc : upload_ctl(m, &m->ctl, err);
}

int qx_exec_free_launch(struct qx_model *m, uint32_t n, struct qx_error *err)
{
    struct step_plan p = {.kind = STEP_FREE, .n_rows = n, .n_logits = n, .all_rows = true,
                          .greedy = m->free_greedy};
    ++m->n_steps;
    return run_step(m, &p, NULL, err);
}

const int32_t *qx_exec_free_ids(struct qx_model *m, uint32_t n, uint64_t i)
{
    uint64_t done = __atomic_load_n(m->b.count_host, __ATOMIC_ACQUIRE);
    return done > i ? m->b.ring_host + i % QX_RING * n : NULL;
}

int qx_exec_mtp(struct qx_model *m, const struct qx_row *rows, uint32_t n, const struct qx_want *w,
                struct qx_error *err)
{
    struct qx_ctl *c = w->prompt ? &m->mpctl : &m->mctl;
    int rc = claim(m, c, err);
    if (rc) {
        return rc;
    }
    qx_fill_rows(m, c, rows, n);
    qx_fill_logit_rows(c, rows, w);
    rc = upload_pages(m, err);
    struct step_plan p = make_plan(m, STEP_MTP, n, w);
    c->in_flight = true;
    return rc ? rc : run_step(m, &p, NULL, err);
}

int qx_exec_head(struct qx_model *m, enum qx_head_source from, const struct qx_row *rows,
                 const struct qx_want *w, struct qx_error *err)
{
    static const enum step_kind kinds[3] = {STEP_HEAD_X, STEP_HEAD_HOLD, STEP_HEAD_MTP};
    int rc = claim(m, &m->ctl, err);
    if (rc) {
        return rc;
    }
    qx_fill_logit_rows(&m->ctl, rows, w);
    if (from == QX_HEAD_HOLD) {
        for (uint32_t i = 0; i < w->n_logits; ++i) {
            m->ctl.pick_host[i] = rows[w->logit_row[i]].seq;
        }
    }
    struct step_plan p = make_plan(m, kinds[from], w->n_logits, w);
    rc = need_host_logits(m, w, err);
    if (!rc && p.penalties) {
        rc = qx_fill_penalties(m, rows, w, err);
    }
    rc = rc ? rc : run_step(m, &p, NULL, err);
    return rc ? rc : qx_exec_wait(m, err);
}

int qx_exec_hold(struct qx_model *m, const int32_t *row_of_seq, struct qx_error *err)
{
    struct qx_ctl *c = &m->ctl;
    int rc = claim(m, c, err);
    if (rc) {
        return rc;
    }
    memcpy(c->hold_host, row_of_seq, 4ull * m->budget.max_seqs);
    if (m->be->upload(m->q, c->hold, c->hold_host, 4ull * m->budget.max_seqs)) {
        return qx_model_op_failed(m, "upload", -1, err);
    }
    c->in_flight = true;
    return pick_rows(m, m->b.x, c->hold, m->budget.max_seqs, m->b.hold, err);
}
