/* graph_gdn.c: order of ops of a Gated DeltaNet block (model 6.1). */
#include "engine.h"

int qx_graph_gdn(struct qx_model *m, const struct qx_layer *l, const struct qx_step *s, const float *in,
                 float *y, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_gdn_weights *w = &l->gdn;
    uint64_t width = (uint64_t)w->qkv.rows + w->z.rows + w->b.rows + w->a.rows;
    uint32_t values = c->gdn_v_heads * c->gdn_v_dim;
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows, .n_weights = 4, .x = in,
                                              .x_stride = c->hidden_size, .y_stride = width,
                                              .w = {w->qkv, w->z, w->b, w->a},
                                              .late = m->alone ? 0 : 1u << 1, .y = m->b.proj}), err);
    QX_RUN(m, gdn, (&(struct qx_op_gdn){
                       .step = s, .k_heads = c->gdn_k_heads, .v_heads = c->gdn_v_heads,
                       .k_dim = c->gdn_k_dim, .v_dim = c->gdn_v_dim, .conv_kernel = c->gdn_conv_kernel,
                       .in = m->b.proj, .in_stride = width, .conv_w = w->conv, .a_log = w->a_log,
                       .dt_bias = w->dt_bias, .norm = w->norm, .eps = (float)c->rms_norm_eps,
                       .conv_state = m->gdn_conv[l->kind_index], .conv_slot_stride = m->gdn_conv_stride,
                       .s = m->gdn_s[l->kind_index], .s_slot_stride = m->gdn_s_stride,
                       .out = m->b.mixed, .scratch = m->b.scratch, .chunk = m->gdn_chunk,
                       .prompt = m->prompt}), err);
    QX_RUN(m, linear, (&(struct qx_op_linear){.act_bf16 = m->act_bf16, .prompt = m->prompt,
                                              .n_rows = s->n_rows, .n_weights = 1, .x = m->b.mixed,
                                              .x_stride = values, .y_stride = c->hidden_size,
                                              .w = {w->out}, .y = y}), err);
    return 0;
}
