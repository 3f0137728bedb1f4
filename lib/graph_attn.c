/* graph_attn.c: order of ops of a sparse attention block (model 6.2). */
#include "engine.h"

int qx_graph_attn(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, const struct qx_step *tail,
                  uint32_t kv_index, const float *in, float *y, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_qsa_weights *w = &l->qsa;
    struct qx_buffers *b = &m->b;
    uint64_t width = (uint64_t)w->q.rows + w->k.rows + w->v.rows + w->index.rows;
    const struct qx_kv_layer *cache = &m->kv[kv_index];
    const struct qx_step *rest = tail ? tail : s;
    uint64_t at = s->n_rows - rest->n_rows; /* the first row that more than its keys and values is wanted of */
    const float *iq = b->iq + at * c->indexer_n_heads * c->indexer_head_dim;
    struct qx_kv kv = {.k = cache->k, .v = cache->v, .raw = cache->raw, .pooled = cache->pooled,
                       .page_table = m->page_table_dev, .page_tokens = m->budget.page_tokens,
                       .max_pages = m->budget.max_pages, .bf16 = m->kv_bf16};
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows, .n_weights = 4, .x = in,
                                              .x_stride = c->hidden_size, .y_stride = width,
                                              .w = {w->q, w->k, w->v, w->index}, .y = b->proj}), err);
    QX_RUN(m, qsa_prepare, (&(struct qx_op_qsa_prepare){
                               .step = s, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads,
                               .head_dim = c->head_dim, .i_heads = c->indexer_n_heads,
                               .i_dim = c->indexer_head_dim, .ratio = c->indexer_compress_ratio,
                               .in = b->proj, .in_stride = width, .q_norm = w->q_norm,
                               .k_norm = w->k_norm, .iq_norm = w->iq_norm, .ik_norm = w->ik_norm,
                               .eps = (float)c->rms_norm_eps, .rope = m->rope, .kv = kv, .q = b->q,
                               .iq = b->iq}), err);
    QX_RUN(m, qsa_select, (&(struct qx_op_qsa_select){
                              .step = rest, .i_heads = c->indexer_n_heads, .i_dim = c->indexer_head_dim,
                              .ratio = c->indexer_compress_ratio, .budget_blocks = m->budget.budget_blocks,
                              .iq = iq, .kv = kv, .max_blocks = m->budget.max_blocks,
                              .scores = b->scores, .block = b->block, .n_block = b->n_block,
                              .prompt = m->prompt}), err);
    QX_RUN(m, qsa_attend, (&(struct qx_op_qsa_attend){
                              .step = rest, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads,
                              .head_dim = c->head_dim, .ratio = c->indexer_compress_ratio,
                              .budget_blocks = m->budget.budget_blocks, .q = b->q + at * c->n_heads * c->head_dim,
                              .in = b->proj + at * width, .in_stride = width, .kv = kv, .block = b->block,
                              .n_block = b->n_block, .o = b->mixed, .scratch = b->scratch, .act_bf16 = m->act_bf16,
                              .prompt = m->prompt}), err);
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = rest->n_rows, .n_weights = 1, .x = b->mixed,
                                              .x_stride = (uint64_t)c->n_heads * c->head_dim,
                                              .y_stride = c->hidden_size, .w = {w->o}, .y = y}), err);
    return 0;
}
