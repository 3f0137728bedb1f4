/* graph_ple.c: order of ops of the hashed n-gram embedding (model 7). With the table on disk the rows
 * were read before the step and are already in ple_e; the n-gram ids still advance on the device. */
#include "engine.h"

int qx_graph_ple(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, float *x,
                 struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_ple_weights *w = &l->ple;
    struct qx_buffers *b = &m->b;
    uint32_t wide = c->hc_count * c->hidden_size;
    QX_RUN(m, ple_ids, (&(struct qx_op_ple_ids){
                           .step = s, .ngram_size = m->hash.ngram_size, .n_heads = m->hash.n_heads,
                           .heads_per_ngram = m->hash.heads_per_ngram, .eos = m->hash.eos,
                           .multiplier = m->mult_dev, .size = m->size_dev, .offset = m->offset_dev,
                           .prev = m->ple_prev, .prev_slot_stride = m->ple_prev_stride,
                           .row = b->ple_row}), err);
    if (m->place != QX_TABLE_DISK) {
        QX_RUN(m, ple_gather, (&(struct qx_op_ple_gather){.table = m->table, .row = b->ple_row,
                                                          .n = s->n_rows * m->hash.n_heads,
                                                          .out = b->ple_e}), err);
    }
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows, .n_weights = 1, .x = b->ple_e,
                                              .x_stride = c->ple_embed_dim, .y_stride = wide,
                                              .w = {w->key}, .y = b->ple_key}), err);
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows, .n_weights = 1, .x = b->ple_e,
                                              .x_stride = c->ple_embed_dim, .y_stride = c->hidden_size,
                                              .w = {w->value}, .y = b->ple_value}), err);
    QX_RUN(m, ple, (&(struct qx_op_ple){
                       .step = s, .n_streams = c->hc_count, .hidden = c->hidden_size,
                       .conv_kernel = c->ple_conv_kernel, .dilation = c->ngram_size, .x = x,
                       .key = b->ple_key, .value = b->ple_value, .norm_key = w->norm_key,
                       .norm_query = w->norm_query, .norm_conv = w->norm_conv, .conv_w = w->conv,
                       .eps = (float)c->rms_norm_eps, .conv_state = m->ple_conv,
                       .conv_slot_stride = m->ple_conv_stride, .scratch = b->scratch}), err);
    return 0;
}
