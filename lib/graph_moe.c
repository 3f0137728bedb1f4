/* graph_moe.c: order of ops of a mixture of experts (model 8). */
#include "engine.h"

int qx_graph_moe(struct qx_model *m, const struct qx_layer *l, uint32_t n_rows, const float *in, float *y,
                 struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_moe_weights *w = &l->moe;
    struct qx_buffers *b = &m->b;
    QX_RUN(m, moe_route, (&(struct qx_op_moe_route){
                             .n_rows = n_rows, .hidden = c->hidden_size, .n_experts = c->n_experts,
                             .k = c->n_experts_per_tok, .norm = c->norm_topk_prob, .m = in,
                             .gate = w->gate, .logits = b->route_logits, .expert = b->expert,
                             .weight = b->route, .prompt = m->prompt}), err);
    QX_RUN(m, moe, (&(struct qx_op_moe){
                       .n_rows = n_rows, .k = c->n_experts_per_tok, .m = in, .expert = b->expert,
                       .weight = b->route,
                       .experts = {.gate = w->gates, .up = w->ups, .down = w->downs,
                                   .n_experts = c->n_experts, .hidden = c->hidden_size,
                                   .inter = c->moe_intermediate_size, .fmt = w->expert_fmt},
                       .s_gate = w->s_gate, .s_up = w->s_up, .s_down = w->s_down,
                       .s_gate_vec = w->s_gate_vec, .s_inter = c->shared_expert_intermediate_size, .y = y,
                       .scratch = b->scratch, .iscratch = b->iscratch, .act_bf16 = m->act_bf16,
                       .prompt = m->prompt}), err);
    return 0;
}
