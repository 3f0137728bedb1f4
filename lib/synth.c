/* synth.c: random weights on a device. A few megabytes of random codes of each kind are uploaded once;
 * every matrix is then filled with copies from varying places of them, so no two are alike. */
#include "synth.h"

#include "alloc.h"
#include "codes.h"
#include "plan.h"

#include <math.h>
#include <string.h>

const char qx_released_config[] =
    "{\"architectures\":[\"Qwen4ExpForConditionalGeneration\"],\"model_type\":\"qwen4_exp\",\"text_config\":{"
    "\"bos_token_id\":248044,\"eos_token_id\":248044,\"full_attention_interval\":4,\"hc_count\":4,"
    "\"hc_lowrank\":320,\"head_dim\":256,\"heads_per_ngram\":8,\"hidden_size\":2560,\"indexer_budget\":2048,"
    "\"indexer_compress_ratio\":4,\"indexer_head_dim\":128,\"indexer_kv_heads\":1,\"indexer_n_heads\":4,"
    "\"linear_conv_kernel_dim\":4,\"linear_key_head_dim\":128,\"linear_num_key_heads\":16,"
    "\"linear_num_value_heads\":48,\"linear_value_head_dim\":128,\"make_ngram_vocab_size_divisible_by\":128,"
    "\"max_position_embeddings\":262144,\"model_type\":\"qwen4_exp_text\",\"moe_intermediate_size\":640,"
    "\"mtp_num_hidden_layers\":1,\"ngram_size\":3,\"ngram_vocab_size_base\":20000000,"
    "\"num_attention_heads\":24,\"num_experts\":512,\"num_experts_per_tok\":10,\"num_hidden_layers\":48,"
    "\"num_key_value_heads\":2,\"output_gate_type\":\"sigmoid\",\"partial_rotary_factor\":0.25,"
    "\"ple_conv_kernel_size\":4,\"ple_embed_dim\":2560,\"ple_layer_ids\":[2],\"rms_norm_eps\":1e-06,"
    "\"rope_parameters\":{\"mrope_interleaved\":true,\"mrope_section\":[11,11,10],\"partial_rotary_factor\":"
    "0.25,\"rope_theta\":10000000,\"rope_type\":\"default\"},\"shared_expert_intermediate_size\":640,"
    "\"split_ngram_parts\":128,\"tie_word_embeddings\":false,\"vocab_size\":248320},"
    "\"tie_word_embeddings\":false}";

enum { P_BF16 = 0, P_E4M3, P_NIBBLES, P_SCALE, P_E8M0, P_F32, P_KINDS };
#define POOL_BYTES ((size_t)24 << 20)
#define PIECE_BYTES ((size_t)16 << 20)

struct synth {
    struct qx_model *m;
    char *pool[P_KINDS];
    uint64_t rng, weight_bytes;
    bool counting;             /* only add up bytes */
    uint8_t f_dense, f_expert, f_table, f_a;
};

static uint64_t next(struct synth *s)
{
    uint64_t v = s->rng += 0x9E3779B97F4A7C15u;
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
    return v ^ (v >> 31);
}

static float normal(struct synth *s)
{
    uint64_t v = next(s), w = next(s);
    double t = 0.0;
    for (int i = 0; i < 4; ++i) {
        t += (double)(v >> (16 * i) & 0xffff) + (double)(w >> (16 * i) & 0xffff);
    }
    return (float)((t / 65536.0 - 4.0) * 1.2247448713915890); /* sum of eight uniforms, variance 1 */
}

static int make_pools(struct synth *s, struct qx_error *err)
{
    uint8_t *h = qx_malloc(POOL_BYTES);
    if (!h) {
        return qx_fail_nomem(err);
    }
    int rc = 0;
    for (int k = 0; k < P_KINDS && !rc; ++k) {
        for (size_t i = 0; i < POOL_BYTES; i += 8) {
            uint64_t v = next(s);
            memcpy(h + i, &v, 8);
        }
        for (size_t i = 0; k == P_BF16 && i < POOL_BYTES; i += 2) {
            uint16_t b = qx_f32_to_bf16(0.02f * normal(s));
            memcpy(h + i, &b, 2);
        }
        for (size_t i = 0; k == P_F32 && i < POOL_BYTES; i += 4) {
            float f = 0.1f * normal(s);
            memcpy(h + i, &f, 4);
        }
        for (size_t i = 0; i < POOL_BYTES; ++i) {
            if (k == P_E4M3) {
                h[i] = qx_f32_to_e4m3(normal(s));
            } else if (k == P_SCALE) {
                h[i] = (uint8_t)(0x30 + (h[i] & 15)); /* 0.5 .. 2 */
            } else if (k == P_E8M0) {
                h[i] = (uint8_t)(121 + (h[i] & 1)); /* 2^-6, 2^-5 */
            }
        }
        rc = qx_model_mem(s->m, &s->pool[k], POOL_BYTES, err);
        rc = rc ? rc : s->m->be->upload(s->m->q, s->pool[k], h, POOL_BYTES);
        rc = rc ? rc : s->m->be->wait(s->m->q, err);
    }
    qx_free(h);
    return rc;
}

/* n bytes of a kind in new device memory. */
static int fill(struct synth *s, int kind, uint64_t n, void *out, struct qx_error *err)
{
    char *p = NULL;
    memcpy(out, &p, sizeof p);
    s->weight_bytes += n;
    if (s->counting) {
        return 0;
    }
    int rc = qx_model_mem(s->m, &p, n, err);
    for (uint64_t at = 0; at < n && !rc; at += PIECE_BYTES) {
        uint64_t len = n - at < PIECE_BYTES ? n - at : PIECE_BYTES;
        uint64_t from = next(s) % (POOL_BYTES - len + 1) / 16 * 16;
        if (s->m->be->copy(s->m->q, p + at, s->pool[kind] + from, len)) {
            rc = qx_model_op_failed(s->m, "copy", -1, err);
        }
    }
    memcpy(out, &p, sizeof p);
    return rc;
}

static int vec(struct synth *s, uint64_t n, const float **out, struct qx_error *err)
{
    return fill(s, P_F32, n * 4, out, err);
}

/* `count` matrices of one format, one after another. */
static int mats(struct synth *s, uint8_t fmt, uint32_t count, uint32_t rows, uint32_t cols, struct qx_weight *w,
                struct qx_error *err)
{
    uint64_t n = (uint64_t)rows * cols, code = fmt == QX_W_NVFP4 ? n / 2 : fmt == QX_W_BF16 ? n * 2 : n;
    uint64_t scale = fmt == QX_W_NVFP4 ? n / 16
                     : fmt == QX_W_MXFP8 ? n / 32
                     : fmt == QX_W_FP8_BLOCK ? qx_ceil_div(rows, 128) * qx_ceil_div(cols, 128) * 2 : 0;
    char *codes = NULL, *scales = NULL;
    /* descriptors of single experts need aligned scales */
    uint64_t scale_step = qx_ceil_div(scale, 16) * 16;
    int rc = fill(s, fmt == QX_W_NVFP4 ? P_NIBBLES : fmt == QX_W_BF16 ? P_BF16 : P_E4M3, code * count, &codes, err);
    if (!rc && scale) {
        rc = fill(s, fmt == QX_W_NVFP4 ? P_SCALE : fmt == QX_W_MXFP8 ? P_E8M0 : P_BF16, scale_step * count, &scales,
                  err);
    }
    for (uint32_t i = 0; i < count && w; ++i) {
        w[i] = (struct qx_weight){.codes = codes + i * code, .scale = scale ? scales + i * scale_step : NULL,
                                  .rows = rows, .cols = cols, .fmt = fmt, .scale_bf16 = fmt == QX_W_FP8_BLOCK,
                                  .global = fmt == QX_W_NVFP4 ? 0.006f : fmt == QX_W_FP8 ? 0.02f : 1.0f};
    }
    return rc;
}

static int mat(struct synth *s, uint8_t fmt, uint32_t rows, uint32_t cols, struct qx_weight *w, struct qx_error *err)
{
    return mats(s, fmt, 1, rows, cols, w, err);
}

static int synth_hc(struct synth *s, bool inject, struct qx_hc_weights *w, struct qx_error *err)
{
    const struct qx_config *c = s->m->cfg;
    uint32_t wide = c->hc_count * c->hidden_size;
    QX_TRY(vec(s, wide, &w->norm, err));
    QX_TRY(mat(s, QX_W_BF16, c->hc_lowrank, wide, &w->down, err));
    QX_TRY(mat(s, QX_W_BF16, wide, c->hc_lowrank, &w->up, err));
    return inject ? mat(s, QX_W_BF16, c->hc_count, wide, &w->inject, err) : 0;
}

static int synth_moe(struct synth *s, struct qx_moe_weights *w, struct qx_error *err)
{
    const struct qx_config *c = s->m->cfg;
    uint32_t E = c->n_experts, h = c->hidden_size, I = c->moe_intermediate_size,
             S = c->shared_expert_intermediate_size;
    struct qx_weight *d = qx_malloc(3 * (size_t)E * sizeof *d), *dev = NULL;
    if (!d) {
        return qx_fail_nomem(err);
    }
    int rc = mats(s, s->f_expert, E, I, h, d, err);
    rc = rc ? rc : mats(s, s->f_expert, E, I, h, d + E, err);
    rc = rc ? rc : mats(s, s->f_expert, E, h, I, d + 2 * E, err);
    if (!rc && !s->counting) {
        rc = qx_model_mem(s->m, &dev, 3 * (size_t)E * sizeof *d, err);
        rc = rc ? rc : s->m->be->upload(s->m->q, dev, d, 3 * (size_t)E * sizeof *d);
        rc = rc ? rc : s->m->be->wait(s->m->q, err);
        w->gates = dev;
        w->ups = dev + E;
        w->downs = dev + 2 * E;
        w->expert_fmt = s->f_expert;
    }
    qx_free(d);
    QX_TRY(rc);
    QX_TRY(mat(s, QX_W_BF16, E, h, &w->gate, err));
    QX_TRY(mat(s, s->f_dense, S, h, &w->s_gate, err));
    QX_TRY(mat(s, s->f_dense, S, h, &w->s_up, err));
    QX_TRY(mat(s, s->f_dense, h, S, &w->s_down, err));
    return mat(s, QX_W_BF16, 1, h, &w->s_gate_vec, err);
}

static int synth_layer(struct synth *s, struct qx_layer *l, struct qx_error *err)
{
    const struct qx_config *c = s->m->cfg;
    uint32_t h = c->hidden_size, values = c->gdn_v_heads * c->gdn_v_dim,
             channels = 2 * c->gdn_k_heads * c->gdn_k_dim + values, heads = c->n_heads * c->head_dim,
             kv = c->n_kv_heads * c->head_dim, wide = c->hc_count * h;
    QX_TRY(synth_hc(s, true, &l->hc_attn, err));
    QX_TRY(synth_hc(s, true, &l->hc_mlp, err));
    QX_TRY(synth_moe(s, &l->moe, err));
    if (l->type == QX_LAYER_GDN) {
        QX_TRY(mat(s, s->f_dense, channels, h, &l->gdn.qkv, err));
        QX_TRY(mat(s, s->f_dense, values, h, &l->gdn.z, err));
        QX_TRY(mat(s, s->f_dense, c->gdn_v_heads, h, &l->gdn.b, err));
        QX_TRY(mat(s, s->f_dense, c->gdn_v_heads, h, &l->gdn.a, err));
        QX_TRY(mat(s, s->f_dense, h, values, &l->gdn.out, err));
        QX_TRY(vec(s, (uint64_t)channels * c->gdn_conv_kernel, &l->gdn.conv, err));
        QX_TRY(vec(s, c->gdn_v_heads, &l->gdn.a_log, err));
        QX_TRY(vec(s, c->gdn_v_heads, &l->gdn.dt_bias, err));
        QX_TRY(vec(s, c->gdn_v_dim, &l->gdn.norm, err));
    } else {
        QX_TRY(mat(s, s->f_dense, 2 * heads, h, &l->qsa.q, err));
        QX_TRY(mat(s, s->f_dense, kv, h, &l->qsa.k, err));
        QX_TRY(mat(s, s->f_dense, kv, h, &l->qsa.v, err));
        QX_TRY(mat(s, s->f_dense, (c->indexer_n_heads + 1) * c->indexer_head_dim, h, &l->qsa.index, err));
        QX_TRY(mat(s, s->f_dense, h, heads, &l->qsa.o, err));
        QX_TRY(vec(s, c->head_dim, &l->qsa.q_norm, err));
        QX_TRY(vec(s, c->head_dim, &l->qsa.k_norm, err));
        QX_TRY(vec(s, c->indexer_head_dim, &l->qsa.iq_norm, err));
        QX_TRY(vec(s, c->indexer_head_dim, &l->qsa.ik_norm, err));
    }
    if (l->has_ple) {
        QX_TRY(mat(s, s->f_dense, wide, c->ple_embed_dim, &l->ple.key, err));
        QX_TRY(mat(s, s->f_dense, h, c->ple_embed_dim, &l->ple.value, err));
        QX_TRY(vec(s, wide, &l->ple.norm_key, err));
        QX_TRY(vec(s, wide, &l->ple.norm_query, err));
        QX_TRY(vec(s, wide, &l->ple.norm_conv, err));
        QX_TRY(vec(s, (uint64_t)wide * c->ple_conv_kernel, &l->ple.conv, err));
    }
    return 0;
}

static int synth_all(struct synth *s, struct qx_error *err)
{
    struct qx_model *m = s->m;
    const struct qx_config *c = m->cfg;
    s->weight_bytes = 0;
    QX_TRY(mat(s, QX_W_BF16, c->vocab_size, c->hidden_size, &m->embed, err));
    QX_TRY(mat(s, QX_W_BF16, c->vocab_size, c->hidden_size, &m->head, err));
    QX_TRY(synth_hc(s, false, &m->mixer, err));
    for (uint32_t i = 0; i < c->n_layers; ++i) {
        QX_TRY(synth_layer(s, &m->layers[i], err));
    }
    if (m->mtp.loaded) {
        struct qx_mtp *t = &m->mtp;
        QX_TRY(mat(s, QX_W_BF16, c->hidden_size, c->hidden_size, &t->fc_embedding, err));
        QX_TRY(mat(s, QX_W_BF16, c->hidden_size, c->hidden_size, &t->fc_hidden, err));
        QX_TRY(vec(s, c->hidden_size, &t->norm_embedding, err));
        QX_TRY(vec(s, (uint64_t)c->hc_count * c->hidden_size, &t->norm_hidden, err));
        QX_TRY(synth_hc(s, false, &t->mixer, err));
        QX_TRY(synth_layer(s, &t->layer, err));
    }
    return 0;
}

static int synth_table(struct synth *s, uint64_t n_rows, struct qx_error *err)
{
    struct qx_model *m = s->m;
    struct qx_table_desc *t = &m->table;
    uint32_t w = m->cfg->ple_row_width;
    t->fmt = s->f_table;
    t->width = w;
    t->global = 0.02f;
    t->n_rows = t->rows_per_shard = n_rows;
    t->code_stride = t->fmt == QX_W_NVFP4 ? w / 2 : t->fmt == QX_W_BF16 ? 2 * w : w;
    t->scale_stride = t->fmt == QX_W_NVFP4 ? w / 16 : 0;
    char *base[2] = {NULL, NULL};
    uint64_t n = n_rows * t->code_stride;
    if (m->place == QX_TABLE_HOST && !m->be->host_memory) {
        char *host = NULL;
        QX_TRY(qx_model_host_mem_mapped(m, &host, &base[0], n + n_rows * t->scale_stride, err));
        memset(host, 0x31, n + n_rows * t->scale_stride);
        base[1] = base[0] + n;
    } else {
        QX_TRY(fill(s, t->fmt == QX_W_NVFP4 ? P_NIBBLES : t->fmt == QX_W_BF16 ? P_BF16 : P_E4M3, n, &base[0], err));
        if (t->scale_stride) {
            QX_TRY(fill(s, P_SCALE, n_rows * t->scale_stride, &base[1], err));
        }
    }
    char **dev = NULL;
    QX_TRY(qx_model_mem(m, &dev, sizeof base, err));
    if (m->be->upload(m->q, dev, base, sizeof base)) {
        return qx_model_op_failed(m, "upload", -1, err);
    }
    t->codes = (const void *const *)(const void *)dev;
    t->scale = t->scale_stride ? (const void *const *)(const void *)(dev + 1) : NULL;
    return m->be->wait(m->q, err);
}

static int formats(struct synth *s, const char *layout, struct qx_error *err)
{
    static const struct { const char *name; uint8_t dense, expert, table; } t[] = {
        {"mixed", QX_W_BF16, QX_W_NVFP4, QX_W_FP8},   {"nvfp4", QX_W_BF16, QX_W_NVFP4, QX_W_FP8},
        {"nvfp4-ple", QX_W_MXFP8, QX_W_NVFP4, QX_W_NVFP4}, {"fp8", QX_W_BF16, QX_W_FP8_BLOCK, QX_W_FP8},
        {"bf16", QX_W_BF16, QX_W_BF16, QX_W_BF16}};
    for (size_t i = 0; i < QX_ARRAY_LEN(t); ++i) {
        if (strcmp(layout, t[i].name) == 0) {
            s->f_dense = t[i].dense;
            s->f_expert = t[i].expert;
            s->f_table = t[i].table;
            return 0;
        }
    }
    return qx_fail(err, QX_E_USAGE, "usage", "unknown layout '%s'", layout);
}

static int make(struct synth *s, const struct qx_model_opts *o, struct qx_error *err)
{
    struct qx_model *m = s->m;
    struct qx_device_info info;
    uint64_t n_rows = 0;
    QX_TRY(qx_model_describe(m, err));
    QX_TRY(qx_model_open_device(m, o, err));
    QX_TRY(qx_model_open_queue(m, err));
    m->kv_bf16 = m->act_bf16 = !m->be->host_memory && !o->precise;
    m->mtp.loaded = (o->mtp || o->draft_max) && m->cfg->n_mtp_layers > 0;
    s->counting = true;
    QX_TRY(synth_all(s, err));
    s->counting = false;
    if (m->has_ple) {
        n_rows = qx_ceil_div(m->hash.offset[m->hash.n_heads - 1] + m->hash.size[m->hash.n_heads - 1], 128) * 128;
    }
    uint64_t w = m->cfg->ple_row_width;
    QX_TRY(m->be->info(m->be, &info, err));
    struct qx_plan_request r = {
        .weight_bytes = s->weight_bytes,
        .table_bytes = n_rows * (s->f_table == QX_W_NVFP4 ? w / 2 + w / 16 : s->f_table == QX_W_BF16 ? 2 * w : w),
        /* Nothing is mapped from a file here: on the cpu, too, weights and table take memory. */
        .table = o->table, .host_device = false,
        .device_bytes = o->device_memory_bytes ? o->device_memory_bytes : m->be->host_memory ? info.memory_free_bytes : m->free_at_open,
        .workspace_bytes = m->be->queue_bytes + P_KINDS * POOL_BYTES, /* the pools stay, too */
        .host_bytes = qx_host_memory_bytes(), .ctx_tokens = o->ctx_tokens,
        .chunk_rows = o->chunk_rows, .max_seqs = o->max_seqs, .draft_max = o->draft_max, .mtp = m->mtp.loaded,
        .kv_bf16 = m->kv_bf16,
        .draft_head_bytes = m->mtp.loaded ? qx_draft_head_bytes(&m->head, qx_draft_head_rows(o, m->cfg->vocab_size))
                                          : 0,
        .head_copy_bytes = qx_head_copy_bytes(m, &info)};
    struct qx_plan plan;
    QX_TRY(qx_plan_make(&plan, m->cfg, &r, err));
    if (!plan.fits) {
        return qx_plan_fail(&plan, err);
    }
    if (plan.table == QX_TABLE_DISK) {
        return qx_fail(err, QX_E_USAGE, "usage", "random weights have no table on disk");
    }
    qx_model_take_plan(m, &plan, &info);
    m->info.weight_bytes = r.weight_bytes + r.table_bytes;
    QX_TRY(make_pools(s, err));
    QX_TRY(synth_all(s, err));
    if (m->has_ple) {
        QX_TRY(synth_table(s, n_rows, err));
    }
    QX_TRY(qx_model_constants(m, err));
    QX_TRY(qx_state_alloc(m, err));
    QX_TRY(qx_draft_head_init(m, o, err));
    QX_TRY(qx_head_copy_init(m, err));
    return m->be->wait(m->q, err);
}

int qx_synth_create(struct qx_model **out, const struct qx_config *cfg, const char *layout,
                    const struct qx_model_opts *opts, struct qx_error *err)
{
    *out = NULL;
    struct synth s = {.rng = 20250101};
    int rc = formats(&s, layout, err);
    if (rc) {
        return rc;
    }
    s.m = qx_calloc(1, sizeof *s.m);
    if (!s.m) {
        return qx_fail_nomem(err);
    }
    s.m->cfg = cfg;
    rc = make(&s, opts, err);
    if (rc) {
        qx_model_free(s.m);
        return rc;
    }
    *out = s.m;
    return 0;
}
