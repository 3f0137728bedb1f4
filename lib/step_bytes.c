/* step_bytes.c: see step_bytes.h. */
#include "step_bytes.h"

#include <string.h>

static double mat_bytes(const struct qx_weight *w)
{
    double n = (double)w->rows * w->cols;
    switch (w->fmt) {
    case QX_W_NVFP4: return n * 0.5625;
    case QX_W_MXFP8: return n * (1.0 + 1.0 / 32);
    case QX_W_FP8: case QX_W_FP8_BLOCK: return n;
    case QX_W_F32: return n * 4;
    case QX_W_NONE: return 0;
    default: return n * 2;
    }
}

static double hc_bytes(const struct qx_model *m, const struct qx_hc_weights *w)
{
    return mat_bytes(&w->down) + mat_bytes(&w->up) + mat_bytes(&w->inject)
           + 4.0 * m->cfg->hc_count * m->cfg->hidden_size;
}

void qx_step_bytes(const struct qx_model *m, uint32_t rows, uint64_t depth, double unique,
                   double expert_bytes, double by_op[QX_OP_COUNT])
{
    const struct qx_config *c = m->cfg;
    memset(by_op, 0, QX_OP_COUNT * sizeof *by_op);
    double elem = m->kv_bf16 ? 2.0 : 4.0, n = (double)depth + 1;
    double attended = n < c->indexer_budget + 3.0 ? n : c->indexer_budget + (double)((uint64_t)n % 4);
    for (uint32_t i = 0; i < c->n_layers; ++i) {
        const struct qx_layer *l = &m->layers[i];
        by_op[QX_OP_hc] += hc_bytes(m, &l->hc_attn) + hc_bytes(m, &l->hc_mlp);
        by_op[QX_OP_moe_route] += mat_bytes(&l->moe.gate);
        by_op[QX_OP_moe] += unique * expert_bytes + mat_bytes(&l->moe.s_gate) + mat_bytes(&l->moe.s_up)
                            + mat_bytes(&l->moe.s_down) + mat_bytes(&l->moe.s_gate_vec);
        if (l->type == QX_LAYER_GDN) {
            by_op[QX_OP_linear] += mat_bytes(&l->gdn.qkv) + mat_bytes(&l->gdn.z) + mat_bytes(&l->gdn.b)
                                   + mat_bytes(&l->gdn.a) + mat_bytes(&l->gdn.out);
            by_op[QX_OP_gdn] += 8.0 * rows * c->gdn_v_heads * c->gdn_k_dim * c->gdn_v_dim;
        } else {
            by_op[QX_OP_linear] += mat_bytes(&l->qsa.q) + mat_bytes(&l->qsa.k) + mat_bytes(&l->qsa.v)
                                   + mat_bytes(&l->qsa.index) + mat_bytes(&l->qsa.o);
            by_op[QX_OP_qsa_attend] += rows * attended * 2 * c->n_kv_heads * c->head_dim * elem;
            if (n > c->indexer_budget + 3.0) {
                by_op[QX_OP_qsa_select] += rows * n / c->indexer_compress_ratio * c->indexer_head_dim * elem;
            }
        }
        if (l->has_ple) {
            by_op[QX_OP_linear] += mat_bytes(&l->ple.key) + mat_bytes(&l->ple.value);
            by_op[QX_OP_ple_gather] += (double)rows * m->hash.n_heads * (double)(m->table.code_stride + m->table.scale_stride);
        }
    }
    by_op[QX_OP_hc] += hc_bytes(m, &m->mixer);
    if (qx_head_by_copy(m, rows)) {
        by_op[QX_OP_head_best] = (double)QX_HEAD_COPY_BYTES(m->head.rows, m->head.cols);
    } else {
        by_op[QX_OP_linear] += mat_bytes(&m->head);
    }
}

static double mat_mads(const struct qx_weight *w)
{
    return w->fmt == QX_W_NONE ? 0.0 : (double)w->rows * w->cols;
}

static double hc_mads(const struct qx_hc_weights *w)
{
    return mat_mads(&w->down) + mat_mads(&w->up) + mat_mads(&w->inject);
}

double qx_prompt_flops(const struct qx_model *m, uint64_t n_tokens)
{
    const struct qx_config *c = m->cfg;
    double n = (double)n_tokens, most = c->indexer_budget + 3.0, mads = 0.0; /* of one token */
    /* Positions attended to, and blocks scored, summed over the prompt. */
    double attended = n <= most ? n * (n + 1) / 2 : most * (most + 1) / 2 + (n - most) * most;
    double scored = n <= most ? 0.0 : (n * n - most * most) / 2 / c->indexer_compress_ratio, sums = 0.0;
    double expert = 3.0 * c->moe_intermediate_size * c->hidden_size;
    for (uint32_t i = 0; i < c->n_layers; ++i) {
        const struct qx_layer *l = &m->layers[i];
        mads += hc_mads(&l->hc_attn) + hc_mads(&l->hc_mlp) + mat_mads(&l->moe.gate) + c->n_experts_per_tok * expert
                + mat_mads(&l->moe.s_gate) + mat_mads(&l->moe.s_up) + mat_mads(&l->moe.s_down)
                + mat_mads(&l->moe.s_gate_vec);
        if (l->type == QX_LAYER_GDN) {
            mads += mat_mads(&l->gdn.qkv) + mat_mads(&l->gdn.z) + mat_mads(&l->gdn.b) + mat_mads(&l->gdn.a)
                    + mat_mads(&l->gdn.out) + 3.0 * c->gdn_v_heads * c->gdn_k_dim * c->gdn_v_dim;
        } else {
            mads += mat_mads(&l->qsa.q) + mat_mads(&l->qsa.k) + mat_mads(&l->qsa.v) + mat_mads(&l->qsa.index)
                    + mat_mads(&l->qsa.o);
            sums += 2.0 * c->n_heads * c->head_dim * attended + (double)c->indexer_n_heads * c->indexer_head_dim * scored;
        }
        if (l->has_ple) {
            mads += mat_mads(&l->ple.key) + mat_mads(&l->ple.value);
        }
    }
    return 2.0 * (n * mads + sums + hc_mads(&m->mixer) + mat_mads(&m->head));
}

int qx_expert_bytes(struct qx_model *m, double *out, struct qx_error *err)
{
    struct qx_weight w[3];
    const struct qx_moe_weights *e = &m->layers[0].moe;
    if (m->be->download(m->q, &w[0], e->gates, sizeof *w) || m->be->download(m->q, &w[1], e->ups, sizeof *w)
        || m->be->download(m->q, &w[2], e->downs, sizeof *w)) {
        return qx_model_op_failed(m, "download", -1, err);
    }
    int rc = m->be->wait(m->q, err);
    *out = mat_bytes(&w[0]) + mat_bytes(&w[1]) + mat_bytes(&w[2]);
    return rc;
}

void qx_draft_bytes(const struct qx_model *m, double expert_bytes, double by_op[QX_OP_COUNT])
{
    const struct qx_layer *l = &m->mtp.layer;
    memset(by_op, 0, QX_OP_COUNT * sizeof *by_op);
    by_op[QX_OP_hc] = hc_bytes(m, &l->hc_attn) + hc_bytes(m, &l->hc_mlp) + hc_bytes(m, &m->mtp.mixer);
    by_op[QX_OP_linear] = mat_bytes(&m->mtp.fc_embedding) + mat_bytes(&m->mtp.fc_hidden) + mat_bytes(&l->qsa.q)
                          + mat_bytes(&l->qsa.k) + mat_bytes(&l->qsa.v) + mat_bytes(&l->qsa.index)
                          + mat_bytes(&l->qsa.o);
    if (!m->draft_map && qx_head_by_copy(m, 1)) {
        by_op[QX_OP_head_best] = (double)QX_HEAD_COPY_BYTES(m->head.rows, m->head.cols);
    } else {
        by_op[QX_OP_linear] += mat_bytes(&m->draft_head);
    }
    by_op[QX_OP_moe_route] = mat_bytes(&l->moe.gate);
    by_op[QX_OP_moe] = m->cfg->n_experts_per_tok * expert_bytes + mat_bytes(&l->moe.s_gate) + mat_bytes(&l->moe.s_up)
                       + mat_bytes(&l->moe.s_down) + mat_bytes(&l->moe.s_gate_vec);
}
