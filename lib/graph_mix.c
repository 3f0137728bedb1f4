/* graph_mix.c: order of ops around the blocks: embedding, hyper-connections, layers, head, draft head
 * (model 3, 4, 5, 9, 10.1). Nothing numeric. */
#include "engine.h"

int qx_graph_embed(struct qx_model *m, const struct qx_step *s, uint32_t n_streams, float *x,
                   struct qx_error *err)
{
    QX_RUN(m, embed, (&(struct qx_op_embed){.step = s, .table = m->embed, .n_streams = n_streams, .x = x}),
           err);
    return 0;
}

static struct qx_op_hc hc_args(const struct qx_model *m, uint32_t n_rows, float *x,
                               const struct qx_pending *p)
{
    return (struct qx_op_hc){
        .n_rows = n_rows,
        .n_streams = m->cfg->hc_count,
        .hidden = m->cfg->hidden_size,
        .rank = m->cfg->hc_lowrank,
        .x = x,
        .y = p->y,
        .inj_in = p->inj,
        .eps = (float)m->cfg->rms_norm_eps,
        .scratch = m->b.scratch,
        .act_bf16 = m->act_bf16,
        .prompt = m->prompt,
    };
}

int qx_graph_hc(struct qx_model *m, const struct qx_hc_weights *w, uint32_t n_rows, float *x,
                struct qx_pending *pending, float *mixed, float *inj, struct qx_error *err)
{
    struct qx_op_hc a = hc_args(m, n_rows, x, pending);
    a.norm = w->norm;
    a.down = w->down;
    a.up = w->up;
    a.inject = w->inject;
    a.m = mixed;
    a.inj_out = inj;
    QX_RUN(m, hc, &a, err);
    *pending = (struct qx_pending){0};
    return 0;
}

int qx_graph_flush(struct qx_model *m, uint32_t n_rows, float *x, struct qx_pending *pending,
                   struct qx_error *err)
{
    if (pending->y) {
        struct qx_op_hc a = hc_args(m, n_rows, x, pending);
        QX_RUN(m, hc, &a, err);
        *pending = (struct qx_pending){0};
    }
    return 0;
}

int qx_graph_head(struct qx_model *m, const struct qx_hc_weights *mixer, uint32_t n_rows, float *x,
                  struct qx_pending *pending, const int32_t *pick, uint32_t n_logits,
                  const struct qx_weight *head, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    float *from = x;
    int rc;
    m->prompt = false; /* few rows, whatever the step was */
    if (pick) {
        /* The whole step's write-back first, then only the wanted rows through the mixer. */
        if ((rc = qx_graph_flush(m, n_rows, x, pending, err)) != 0) {
            return rc;
        }
        from = m->b.hx;
        QX_RUN(m, pick, (&(struct qx_op_pick){.in = x, .index = pick, .n = n_logits,
                                              .width = c->hc_count * c->hidden_size, .out = from}), err);
    }
    if ((rc = qx_graph_hc(m, mixer, n_logits, from, pending, m->b.h, NULL, err)) != 0 || !head) {
        return rc;
    }
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = n_logits, .n_weights = 1, .x = m->b.h,
                                              .x_stride = c->hidden_size, .y_stride = head->rows, .w = {*head},
                                              .y = m->b.logits}), err);
    return 0;
}

int qx_graph_layer(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, const struct qx_step *tail,
                   float *x, struct qx_pending *pending, uint32_t kv_index, struct qx_error *err)
{
    struct qx_buffers *b = &m->b;
    uint32_t n = tail ? tail->n_rows : s->n_rows, at = s->n_rows - n, C = m->cfg->hc_count, h = m->cfg->hidden_size;
    int rc;
    if (l->has_ple) {
        if ((rc = qx_graph_flush(m, s->n_rows, x, pending, err)) != 0
            || (rc = qx_graph_ple(m, l, s, x, err)) != 0) {
            return rc;
        }
    }
    /* inj_a and inj_b alternate: a hyper-connection reads the one before it and writes its own. */
    if ((rc = qx_graph_hc(m, &l->hc_attn, s->n_rows, x, pending, b->m, b->inj_a, err)) != 0) {
        return rc;
    }
    rc = l->type == QX_LAYER_GDN ? qx_graph_gdn(m, l, s, b->m, b->y, err)
                                 : qx_graph_attn(m, l, s, tail, kv_index, b->m, b->y, err);
    if (rc) {
        return rc;
    }
    *pending = (struct qx_pending){b->y, b->inj_a + (uint64_t)at * C};
    if ((rc = qx_graph_hc(m, &l->hc_mlp, n, x + (uint64_t)at * C * h, pending, b->m, b->inj_b, err)) != 0
        || (rc = qx_graph_moe(m, l, n, b->m, b->y, err)) != 0) {
        return rc;
    }
    *pending = (struct qx_pending){b->y, b->inj_b};
    return 0;
}

int qx_graph_layers(struct qx_model *m, const struct qx_step *s, struct qx_pending *pending,
                    int (*after)(void *user, uint32_t layer, struct qx_error *err), void *user,
                    struct qx_error *err)
{
    int rc = qx_graph_embed(m, s, m->cfg->hc_count, m->b.x, err);
    for (uint32_t i = 0; i < m->cfg->n_layers && !rc; ++i) {
        const struct qx_layer *l = &m->layers[i];
        rc = qx_graph_layer(m, l, s, NULL, m->b.x, pending, l->kind_index, err);
        if (!rc && after) {
            rc = qx_graph_flush(m, s->n_rows, m->b.x, pending, err);
            rc = rc ? rc : after(user, i, err);
        }
    }
    return rc;
}

int qx_graph_mtp(struct qx_model *m, const struct qx_step *s, const struct qx_step *tail,
                 const struct qx_wide_rows *wide, float *out, struct qx_pending *pending, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_mtp *t = &m->mtp;
    struct qx_buffers *b = &m->b;
    QX_RUN(m, draft_in, (&(struct qx_op_draft_in){.step = s, .table = m->embed, .width = c->hc_count * c->hidden_size,
                                                  .wide = {wide->from[0], wide->from[1]},
                                                  .row = {wide->row[0], wide->row[1]},
                                                  .norm_e = t->norm_embedding, .norm_wide = t->norm_hidden,
                                                  .eps = (float)c->rms_norm_eps, .e = b->e2, .y = b->scratch}), err);
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows, .n_weights = 1, .x = b->e2,
                                              .x_stride = c->hidden_size, .y_stride = c->hidden_size,
                                              .w = {t->fc_embedding}, .y = b->e}), err);
    /* The same matrix for each stream. */
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows * c->hc_count, .n_weights = 1,
                                              .x = b->scratch, .x_stride = c->hidden_size,
                                              .y_stride = c->hidden_size, .w = {t->fc_hidden},
                                              .y = out}), err);
    *pending = (struct qx_pending){b->e, NULL};
    return qx_graph_layer(m, &t->layer, s, tail, out, pending, m->n_qsa, err);
}
