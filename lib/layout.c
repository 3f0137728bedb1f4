/* layout.c: owns the table of expected tensors and the parsing of names. Knows nothing of what is
 * stored. Every number of formats 4 is a formula over the configuration here. */
#include "layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum dim {
    D_NONE,
    D_ONE,
    D_VOCAB,
    D_HIDDEN,
    D_WIDE,
    D_LOWRANK,
    D_HC,
    D_EXPERTS,
    D_MOE,
    D_MOE2,
    D_SHARED,
    D_GDN_QKV,
    D_GDN_V,
    D_GDN_VHEADS,
    D_GDN_VDIM,
    D_GDN_CONV,
    D_Q2,
    D_KV,
    D_Q,
    D_HEAD,
    D_INDEX,
    D_INDEX_DIM,
    D_PLE,
    D_PLE_CONV,
    D_NGRAM,
    D_PLE_HEADS,
    D_V,
    D_V3,
    D_V_IN,
    D_V_TIME,
    D_V_PATCH,
    D_V_POS,
    D_V_MLP,
    D_V_MERGE,
    D_V_OUT
};

/* clang-format off */
static uint64_t dim_of(enum dim d, const struct qx_config *c)
{
    const uint64_t vm = c->vision.spatial_merge_size;
    switch (d) {
    case D_NONE: return 0;
    case D_ONE: return 1;
    case D_VOCAB: return c->vocab_size;
    case D_HIDDEN: return c->hidden_size;
    case D_WIDE: return (uint64_t)c->hc_count * c->hidden_size;
    case D_LOWRANK: return c->hc_lowrank;
    case D_HC: return c->hc_count;
    case D_EXPERTS: return c->n_experts;
    case D_MOE: return c->moe_intermediate_size;
    case D_MOE2: return 2 * (uint64_t)c->moe_intermediate_size;
    case D_SHARED: return c->shared_expert_intermediate_size;
    case D_GDN_QKV:
        return 2 * (uint64_t)c->gdn_k_heads * c->gdn_k_dim +
               (uint64_t)c->gdn_v_heads * c->gdn_v_dim;
    case D_GDN_V: return (uint64_t)c->gdn_v_heads * c->gdn_v_dim;
    case D_GDN_VHEADS: return c->gdn_v_heads;
    case D_GDN_VDIM: return c->gdn_v_dim;
    case D_GDN_CONV: return c->gdn_conv_kernel;
    case D_Q2: return 2 * (uint64_t)c->n_heads * c->head_dim;
    case D_KV: return (uint64_t)c->n_kv_heads * c->head_dim;
    case D_Q: return (uint64_t)c->n_heads * c->head_dim;
    case D_HEAD: return c->head_dim;
    case D_INDEX:
        return ((uint64_t)c->indexer_n_heads + c->indexer_kv_heads) * c->indexer_head_dim;
    case D_INDEX_DIM: return c->indexer_head_dim;
    case D_PLE: return c->ple_embed_dim;
    case D_PLE_CONV: return c->ple_conv_kernel;
    case D_NGRAM: return c->ngram_size;
    case D_PLE_HEADS: return c->ple_heads;
    case D_V: return c->vision.hidden_size;
    case D_V3: return 3 * (uint64_t)c->vision.hidden_size;
    case D_V_IN: return c->vision.in_channels;
    case D_V_TIME: return c->vision.temporal_patch_size;
    case D_V_PATCH: return c->vision.patch_size;
    case D_V_POS: return c->vision.num_position_embeddings;
    case D_V_MLP: return c->vision.intermediate_size;
    case D_V_MERGE: return vm * vm * c->vision.hidden_size;
    case D_V_OUT: return c->vision.out_hidden_size;
    }
    return 0;
}

#define LIN(s, p, w, comp, r, k) {s, p, w, QX_K_LINEAR, comp, false, false, 2, {r, k}}
#define LINB(s, p, comp, r, k) {s, p, QX_W_ALWAYS, QX_K_LINEAR, comp, false, true, 2, {r, k}}
#define VEC(s, p, w, comp, r) {s, p, w, QX_K_PLAIN, comp, false, false, 1, {r}}
#define VECB(s, p, comp, r) {s, p, QX_W_ALWAYS, QX_K_PLAIN, comp, false, true, 1, {r}}

static const struct qx_layout_entry root_entries[] = {
    LIN("lm_head", QX_P_ROOT, QX_W_ALWAYS, QX_C_LM_HEAD, D_VOCAB, D_HIDDEN),
};

static const struct qx_layout_entry text_entries[] = {
    {"embed_tokens", QX_P_TEXT, QX_W_ALWAYS, QX_K_PLAIN, QX_C_EMBED, false, false, 2,
     {D_VOCAB, D_HIDDEN}},
    VEC("hyper_connection_mixer.hc_norm", QX_P_TEXT, QX_W_ALWAYS, QX_C_HYPER, D_WIDE),
    LIN("hyper_connection_mixer.input_mix_weight_down", QX_P_TEXT, QX_W_ALWAYS, QX_C_HYPER,
        D_LOWRANK,
        D_WIDE),
    LIN("hyper_connection_mixer.input_mix_weight_up", QX_P_TEXT, QX_W_ALWAYS, QX_C_HYPER, D_WIDE,
        D_LOWRANK),
    {"hyper_connection_mixer.block_inject_weight", QX_P_TEXT, QX_W_ALWAYS, QX_K_UNUSED, QX_C_HYPER,
     false, false, 2, {D_HC, D_WIDE}},
};

static const struct qx_layout_entry layer_entries[] = {
    VEC("attn_hyper_connection.hc_norm", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER, D_WIDE),
    LIN("attn_hyper_connection.input_mix_weight_down", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER,
        D_LOWRANK,
        D_WIDE),
    LIN("attn_hyper_connection.input_mix_weight_up", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER, D_WIDE,
        D_LOWRANK),
    LIN("attn_hyper_connection.block_inject_weight", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER, D_HC,
        D_WIDE),
    VEC("mlp_hyper_connection.hc_norm", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER, D_WIDE),
    LIN("mlp_hyper_connection.input_mix_weight_down", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER,
        D_LOWRANK,
        D_WIDE),
    LIN("mlp_hyper_connection.input_mix_weight_up", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER, D_WIDE,
        D_LOWRANK),
    LIN("mlp_hyper_connection.block_inject_weight", QX_P_LAYER, QX_W_ALWAYS, QX_C_HYPER, D_HC,
        D_WIDE),
    LIN("linear_attn.in_proj_qkv", QX_P_LAYER, QX_W_GDN, QX_C_LINEAR_ATTN, D_GDN_QKV, D_HIDDEN),
    LIN("linear_attn.in_proj_z", QX_P_LAYER, QX_W_GDN, QX_C_LINEAR_ATTN, D_GDN_V, D_HIDDEN),
    LIN("linear_attn.in_proj_a", QX_P_LAYER, QX_W_GDN, QX_C_LINEAR_ATTN, D_GDN_VHEADS, D_HIDDEN),
    LIN("linear_attn.in_proj_b", QX_P_LAYER, QX_W_GDN, QX_C_LINEAR_ATTN, D_GDN_VHEADS, D_HIDDEN),
    {"linear_attn.conv1d", QX_P_LAYER, QX_W_GDN, QX_K_PLAIN, QX_C_LINEAR_ATTN, false, false, 3,
     {D_GDN_QKV, D_ONE, D_GDN_CONV}},
    {"linear_attn.A_log", QX_P_LAYER, QX_W_GDN, QX_K_PLAIN, QX_C_LINEAR_ATTN, true, false, 1,
     {D_GDN_VHEADS}},
    {"linear_attn.dt_bias", QX_P_LAYER, QX_W_GDN, QX_K_PLAIN, QX_C_LINEAR_ATTN, true, false, 1,
     {D_GDN_VHEADS}},
    VEC("linear_attn.norm", QX_P_LAYER, QX_W_GDN, QX_C_LINEAR_ATTN, D_GDN_VDIM),
    LIN("linear_attn.out_proj", QX_P_LAYER, QX_W_GDN, QX_C_LINEAR_ATTN, D_HIDDEN, D_GDN_V),
    LIN("self_attn.q_proj", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_Q2, D_HIDDEN),
    LIN("self_attn.k_proj", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_KV, D_HIDDEN),
    LIN("self_attn.v_proj", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_KV, D_HIDDEN),
    LIN("self_attn.o_proj", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_HIDDEN, D_Q),
    VEC("self_attn.q_norm", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_HEAD),
    VEC("self_attn.k_norm", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_HEAD),
    LIN("self_attn.indexer.index_qk_proj", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_INDEX, D_HIDDEN),
    VEC("self_attn.indexer.q_layernorm", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_INDEX_DIM),
    VEC("self_attn.indexer.k_layernorm", QX_P_LAYER, QX_W_QSA, QX_C_SELF_ATTN, D_INDEX_DIM),
    LIN("mlp.gate", QX_P_LAYER, QX_W_ALWAYS, QX_C_ROUTER, D_EXPERTS, D_HIDDEN),
    LIN("mlp.shared_expert.gate_proj", QX_P_LAYER, QX_W_ALWAYS, QX_C_SHARED_EXPERT, D_SHARED,
        D_HIDDEN),
    LIN("mlp.shared_expert.up_proj", QX_P_LAYER, QX_W_ALWAYS, QX_C_SHARED_EXPERT, D_SHARED,
        D_HIDDEN),
    LIN("mlp.shared_expert.down_proj", QX_P_LAYER, QX_W_ALWAYS, QX_C_SHARED_EXPERT, D_HIDDEN,
        D_SHARED),
    LIN("mlp.shared_expert_gate", QX_P_LAYER, QX_W_ALWAYS, QX_C_SHARED_EXPERT, D_ONE, D_HIDDEN),
    {"mlp.experts.gate_up_proj", QX_P_LAYER, QX_W_ALWAYS, QX_K_FUSED, QX_C_EXPERTS, true, false, 3,
     {D_EXPERTS, D_MOE2, D_HIDDEN}},
    {"mlp.experts.down_proj", QX_P_LAYER, QX_W_ALWAYS, QX_K_FUSED, QX_C_EXPERTS, true, false, 3,
     {D_EXPERTS, D_HIDDEN, D_MOE}},
    LIN("ple.key_proj", QX_P_LAYER, QX_W_PLE, QX_C_PLE, D_WIDE, D_PLE),
    LIN("ple.value_proj", QX_P_LAYER, QX_W_PLE, QX_C_PLE, D_HIDDEN, D_PLE),
    VEC("ple.norm_key", QX_P_LAYER, QX_W_PLE, QX_C_PLE, D_WIDE),
    VEC("ple.norm_query", QX_P_LAYER, QX_W_PLE, QX_C_PLE, D_WIDE),
    VEC("ple.norm_conv", QX_P_LAYER, QX_W_PLE, QX_C_PLE, D_WIDE),
    {"ple.conv1d", QX_P_LAYER, QX_W_PLE, QX_K_PLAIN, QX_C_PLE, false, false, 3,
     {D_WIDE, D_ONE, D_PLE_CONV}},
    {"ple.ple_embedding.layer_multipliers", QX_P_LAYER, QX_W_PLE, QX_K_BUFFER, QX_C_PLE, true,
        false, 1,
     {D_NGRAM}},
    {"ple.ple_embedding.ngram_heads_vocab_sizes", QX_P_LAYER, QX_W_PLE, QX_K_BUFFER, QX_C_PLE, true,
     false, 1, {D_PLE_HEADS}},
    {"ple.ple_embedding.ngram_heads_offsets", QX_P_LAYER, QX_W_PLE, QX_K_BUFFER, QX_C_PLE,
        true, false,
     1, {D_PLE_HEADS}},
};

static const struct qx_layout_entry expert_entries[] = {
    {"gate_proj", QX_P_EXPERT, QX_W_ALWAYS, QX_K_EXPERT, QX_C_EXPERTS, false, false, 2,
     {D_MOE, D_HIDDEN}},
    {"up_proj", QX_P_EXPERT, QX_W_ALWAYS, QX_K_EXPERT, QX_C_EXPERTS, false, false, 2, {D_MOE,
        D_HIDDEN}},
    {"down_proj", QX_P_EXPERT, QX_W_ALWAYS, QX_K_EXPERT, QX_C_EXPERTS, false, false, 2,
     {D_HIDDEN, D_MOE}},
    {"gate_up_proj", QX_P_EXPERT, QX_W_ALWAYS, QX_K_EXPERT, QX_C_EXPERTS, false, false, 2,
     {D_MOE2, D_HIDDEN}},
};

static const struct qx_layout_entry mtp_entries[] = {
    LIN("fc_embedding", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_HIDDEN, D_HIDDEN),
    LIN("fc_hidden", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_HIDDEN, D_HIDDEN),
    VEC("pre_fc_norm_embedding", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_HIDDEN),
    VEC("pre_fc_norm_hidden", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_WIDE),
    VEC("hyper_connection_mixer.hc_norm", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_WIDE),
    LIN("hyper_connection_mixer.input_mix_weight_down", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_LOWRANK,
        D_WIDE),
    LIN("hyper_connection_mixer.input_mix_weight_up", QX_P_MTP, QX_W_ALWAYS, QX_C_MTP, D_WIDE,
        D_LOWRANK),
    {"hyper_connection_mixer.block_inject_weight", QX_P_MTP, QX_W_ALWAYS, QX_K_UNUSED,
        QX_C_MTP, false,
     false, 2, {D_HC, D_WIDE}},
};

static const struct qx_layout_entry vision_entries[] = {
    {"patch_embed.proj", QX_P_VISION, QX_W_ALWAYS, QX_K_PLAIN, QX_C_VISION, false, true, 5,
     {D_V, D_V_IN, D_V_TIME, D_V_PATCH, D_V_PATCH}},
    {"pos_embed", QX_P_VISION, QX_W_ALWAYS, QX_K_PLAIN, QX_C_VISION, false, false, 2, {D_V_POS,
        D_V}},
    VECB("merger.norm", QX_P_VISION, QX_C_VISION, D_V),
    LINB("merger.linear_fc1", QX_P_VISION, QX_C_VISION, D_V_MERGE, D_V_MERGE),
    LINB("merger.linear_fc2", QX_P_VISION, QX_C_VISION, D_V_OUT, D_V_MERGE),
};

static const struct qx_layout_entry vblock_entries[] = {
    VECB("norm1", QX_P_VBLOCK, QX_C_VISION, D_V),
    VECB("norm2", QX_P_VBLOCK, QX_C_VISION, D_V),
    LINB("attn.qkv", QX_P_VBLOCK, QX_C_VISION, D_V3, D_V),
    LINB("attn.proj", QX_P_VBLOCK, QX_C_VISION, D_V, D_V),
    LINB("mlp.linear_fc1", QX_P_VBLOCK, QX_C_VISION, D_V_MLP, D_V),
    LINB("mlp.linear_fc2", QX_P_VBLOCK, QX_C_VISION, D_V, D_V_MLP),
};

/* clang-format on */
static const struct {
    const struct qx_layout_entry *e;
    size_t n;
} places[QX_P_COUNT] = {
    [QX_P_ROOT] = {root_entries, QX_ARRAY_LEN(root_entries)},
    [QX_P_TEXT] = {text_entries, QX_ARRAY_LEN(text_entries)},
    [QX_P_LAYER] = {layer_entries, QX_ARRAY_LEN(layer_entries)},
    [QX_P_EXPERT] = {expert_entries, QX_ARRAY_LEN(expert_entries)},
    [QX_P_MTP] = {mtp_entries, QX_ARRAY_LEN(mtp_entries)},
    [QX_P_VISION] = {vision_entries, QX_ARRAY_LEN(vision_entries)},
    [QX_P_VBLOCK] = {vblock_entries, QX_ARRAY_LEN(vblock_entries)},
};

const struct qx_layout_entry *qx_layout_entries(enum qx_place place, size_t *n)
{
    *n = places[place].n;
    return places[place].e;
}

bool qx_layout_shape(const struct qx_layout_entry *e, const struct qx_config *c,
                     uint64_t shape[QX_LAYOUT_MAX_DIMS])
{
    for (unsigned i = 0; i < e->n_dims; i++) {
        shape[i] = dim_of((enum dim)e->dim[i], c);
        if (shape[i] == 0) {
            return false;
        }
    }
    return true;
}

bool qx_layout_applies(const struct qx_layout_entry *e, const struct qx_config *c, bool is_mtp,
                       uint32_t layer)
{
    switch ((enum qx_when)e->when) {
    case QX_W_ALWAYS:
        return true;
    case QX_W_GDN:
        return !is_mtp && layer < c->n_layers && c->layer_type[layer] == QX_LAYER_GDN;
    case QX_W_QSA:
        return is_mtp || (layer < c->n_layers && c->layer_type[layer] == QX_LAYER_QSA);
    case QX_W_PLE:
        for (uint32_t i = 0; !is_mtp && i < c->n_ple_layers; i++) {
            if (c->ple_layer[i] == layer) {
                return true;
            }
        }
        return false;
    }
    return false;
}

/* ---- names ----------------------------------------------------------------------------------- */

static const struct {
    const char *text;
    uint8_t n, leaf;
} leaves[] = {
#define LEAF(s, l)                                                                                 \
    {                                                                                              \
        s, sizeof(s) - 1, l                                                                        \
    }
    LEAF("weight", QX_LEAF_WEIGHT),
    LEAF("weight_scale", QX_LEAF_SCALE),
    LEAF("weight_scale_2", QX_LEAF_SCALE_2),
    LEAF("input_scale", QX_LEAF_INPUT_SCALE),
    LEAF("weight_scale_inv", QX_LEAF_SCALE_INV),
    LEAF("bias", QX_LEAF_BIAS),
    LEAF("k_scale", QX_LEAF_KV_SCALE),
    LEAF("v_scale", QX_LEAF_KV_SCALE),
    LEAF("weight_packed", QX_LEAF_FOREIGN),
    LEAF("weight_global_scale", QX_LEAF_FOREIGN),
    LEAF("input_global_scale", QX_LEAF_FOREIGN),
    LEAF("weight_shape", QX_LEAF_FOREIGN),
    LEAF("weight_zero_point", QX_LEAF_FOREIGN),
    LEAF("qweight", QX_LEAF_FOREIGN),
    LEAF("qzeros", QX_LEAF_FOREIGN),
    LEAF("scales", QX_LEAF_FOREIGN),
    LEAF("g_idx", QX_LEAF_FOREIGN),
    LEAF("biases", QX_LEAF_FOREIGN),
    LEAF("trellis", QX_LEAF_FOREIGN),
    LEAF("suh", QX_LEAF_FOREIGN),
    LEAF("svh", QX_LEAF_FOREIGN),
    LEAF("mcg", QX_LEAF_FOREIGN),
    LEAF("mul1", QX_LEAF_FOREIGN),
    LEAF("head_bias", QX_LEAF_FOREIGN),
#undef LEAF
};

/* A cursor over the rest of a name. */
struct cur {
    const char *p, *end;
};

static bool eat(struct cur *c, const char *lit, size_t n)
{
    if ((size_t)(c->end - c->p) < n || memcmp(c->p, lit, n) != 0) {
        return false;
    }
    c->p += n;
    return true;
}
#define EAT(c, lit) eat(c, lit, sizeof(lit) - 1)

static bool begins(const struct cur *c, const char *lit)
{
    size_t n = strlen(lit);
    return (size_t)(c->end - c->p) >= n && memcmp(c->p, lit, n) == 0;
}

/* Canonical decimal followed by '.' or the end; the dot is eaten. */
static bool eat_index(struct cur *c, int64_t *out)
{
    const char *p = c->p;
    int64_t v = 0;
    while (p < c->end && *p >= '0' && *p <= '9') {
        v = v * 10 + (*p - '0');
        if (p - c->p > 8) {
            return false;
        }
        p++;
    }
    if (p == c->p || (p - c->p > 1 && *c->p == '0') || (p < c->end && *p != '.')) {
        return false;
    }
    c->p = p < c->end ? p + 1 : p;
    *out = v;
    return true;
}

static const struct qx_layout_entry *find_entry(enum qx_place place, const char *s, size_t n)
{
    for (size_t i = 0; i < places[place].n; i++) {
        const struct qx_layout_entry *e = &places[place].e[i];
        if (strncmp(e->suffix, s, n) == 0 && e->suffix[n] == '\0') {
            return e;
        }
    }
    return NULL;
}

static enum qx_component component_of_layer_part(const struct cur *c)
{
    static const struct {
        const char *head;
        enum qx_component comp;
    } heads[] = {
        {"mlp.experts.", QX_C_EXPERTS},
        {"mlp.shared_expert", QX_C_SHARED_EXPERT},
        {"mlp.gate.", QX_C_ROUTER},
        {"linear_attn.", QX_C_LINEAR_ATTN},
        {"self_attn.", QX_C_SELF_ATTN},
        {"attn_hyper_connection.", QX_C_HYPER},
        {"mlp_hyper_connection.", QX_C_HYPER},
        {"ple.ple_embedding.ngram_embedding.", QX_C_PLE_TABLE},
        {"ple.", QX_C_PLE},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(heads); i++) {
        if (begins(c, heads[i].head)) {
            return heads[i].comp;
        }
    }
    return QX_C_OTHER;
}

/* Inside ple.ple_embedding.: shards, buffers and what else was met there. */
static void parse_ple_embedding(struct qx_name *o, struct cur c)
{
    if (begins(&c, "hashstats_") || begins(&c, "token_lookup") ||
        begins(&c, "ngram_embedding.hashstats_") || begins(&c, "ngram_embedding.token_lookup")) {
        o->ple_extra = true;
        o->component = QX_C_PLE;
        return;
    }
    if (!EAT(&c, "ngram_embedding.")) {
        return;
    }
    o->in_table = true;
    o->component = QX_C_PLE_TABLE;
    if (EAT(&c, "shards.")) {
        o->foreign_shard = true;
        eat_index(&c, &o->shard);
    } else if (EAT(&c, "shard_")) {
        if (!eat_index(&c, &o->shard)) {
            o->shard = -1;
        }
    }
}

static void parse_layer(struct qx_name *o, struct cur c, const char *module_end)
{
    int64_t e = -1;
    o->component = (uint8_t)component_of_layer_part(&c);
    struct cur x = c;
    if (EAT(&x, "mlp.experts.") && eat_index(&x, &e)) {
        o->expert = (int32_t)e;
        if (x.p <= module_end) {
            o->entry = find_entry(QX_P_EXPERT, x.p, (size_t)(module_end - x.p));
        }
    } else if (c.p <= module_end) {
        o->entry = find_entry(QX_P_LAYER, c.p, (size_t)(module_end - c.p));
    }
    x = c;
    if (EAT(&x, "ple.ple_embedding.")) {
        parse_ple_embedding(o, x);
    }
    if (o->entry) {
        o->component = o->entry->component;
    }
    if (o->is_mtp) {
        o->component = QX_C_MTP;
    }
}

void qx_layout_parse(struct qx_name *o, const struct qx_config *cfg, const char *name, size_t n)
{
    struct cur c = {name, name + n};
    int64_t layer = -1;
    *o = (struct qx_name){.component = QX_C_OTHER,
                          .spelling = QX_SP_DISK,
                          .layer = -1,
                          .expert = -1,
                          .shard = -1,
                          .module_len = (uint32_t)n};
    const char *dot = memrchr(name, '.', n);
    o->leaf_text = dot ? dot + 1 : name;
    if (dot) {
        size_t ln = (size_t)(c.end - dot - 1);
        for (size_t i = 0; i < QX_ARRAY_LEN(leaves); i++) {
            if (leaves[i].n == ln && memcmp(leaves[i].text, dot + 1, ln) == 0) {
                o->leaf = leaves[i].leaf;
                o->module_len = (uint32_t)(dot - name);
                break;
            }
        }
    }
    const char *module_end = name + o->module_len;
    bool text = false;
    if (EAT(&c, "model.language_model.")) {
        text = true;
        if (EAT(&c, "model.")) {
            o->spelling = QX_SP_RUNTIME;
        }
    } else if (EAT(&c, "language_model.")) {
        o->spelling = QX_SP_RUNTIME;
        text = EAT(&c, "model.");
    } else if (EAT(&c, "model.")) {
        if (EAT(&c, "visual.")) {
            goto vision;
        }
        if (!begins(&c, "mtp.")) {
            text = true;
            o->spelling = QX_SP_TEXT;
        } else {
            o->spelling = QX_SP_RUNTIME;
        }
    } else if (EAT(&c, "visual.")) {
        o->spelling = QX_SP_RUNTIME;
        goto vision;
    }
    if (text) {
        if (EAT(&c, "layers.") && eat_index(&c, &layer)) {
            o->layer = (int32_t)layer;
            parse_layer(o, c, module_end);
            if (o->component == QX_C_OTHER && o->spelling == QX_SP_TEXT) {
                o->spelling = QX_SP_NONE;
            }
            return;
        }
        if (c.p <= module_end) {
            o->entry = find_entry(QX_P_TEXT, c.p, (size_t)(module_end - c.p));
        }
        if (o->entry) {
            o->component = o->entry->component;
        } else if (begins(&c, "hyper_connection_mixer.")) {
            o->component = QX_C_HYPER;
        } else if (begins(&c, "embed_tokens.")) {
            o->component = QX_C_EMBED;
        } else if (o->spelling != QX_SP_DISK) {
            o->spelling = QX_SP_NONE;
        }
        return;
    }
    if (EAT(&c, "mtp.")) {
        o->component = QX_C_MTP;
        o->is_mtp = true;
        if (EAT(&c, "layers.") && eat_index(&c, &layer)) {
            if (cfg && layer == (int64_t)cfg->n_layers && layer >= (int64_t)cfg->n_mtp_layers) {
                o->mtp_alias = true;
                layer = 0;
            }
            o->layer = (int32_t)layer;
            parse_layer(o, c, module_end);
        } else if (c.p <= module_end) {
            o->entry = find_entry(QX_P_MTP, c.p, (size_t)(module_end - c.p));
        }
        return;
    }
    if (begins(&c, "lm_head.")) {
        o->component = QX_C_LM_HEAD;
        o->entry = find_entry(QX_P_ROOT, c.p, c.p <= module_end ? (size_t)(module_end - c.p) : 0);
        return;
    }
    o->spelling = QX_SP_NONE;
    return;
vision:
    o->component = QX_C_VISION;
    if (EAT(&c, "blocks.") && eat_index(&c, &layer)) {
        o->layer = (int32_t)layer;
        if (c.p <= module_end) {
            o->entry = find_entry(QX_P_VBLOCK, c.p, (size_t)(module_end - c.p));
        }
    } else if (c.p <= module_end) {
        o->entry = find_entry(QX_P_VISION, c.p, (size_t)(module_end - c.p));
    }
}

const char *qx_layout_module(const struct qx_layout_entry *e, bool is_mtp, uint32_t layer,
                             uint32_t index, char out[256])
{
    const char *head = is_mtp ? "mtp." : "model.language_model.";
    switch ((enum qx_place)e->place) {
    case QX_P_ROOT:
        snprintf(out, 256, "%s", e->suffix);
        break;
    case QX_P_TEXT:
        snprintf(out, 256, "model.language_model.%s", e->suffix);
        break;
    case QX_P_LAYER:
        snprintf(out, 256, "%slayers.%" PRIu32 ".%s", head, layer, e->suffix);
        break;
    case QX_P_EXPERT:
        snprintf(out, 256, "%slayers.%" PRIu32 ".mlp.experts.%" PRIu32 ".%s", head, layer, index,
                 e->suffix);
        break;
    case QX_P_MTP:
        snprintf(out, 256, "mtp.%s", e->suffix);
        break;
    case QX_P_VISION:
        snprintf(out, 256, "model.visual.%s", e->suffix);
        break;
    case QX_P_VBLOCK:
        snprintf(out, 256, "model.visual.blocks.%" PRIu32 ".%s", layer, e->suffix);
        break;
    case QX_P_COUNT:
        out[0] = '\0';
        break;
    }
    return out;
}

const char *qx_layout_tensor(const struct qx_layout_entry *e, bool is_mtp, uint32_t layer,
                             uint32_t index, char out[256])
{
    qx_layout_module(e, is_mtp, layer, index, out);
    size_t n = strlen(out);
    if (!e->bare && n + 8 < 256) {
        memcpy(out + n, ".weight", 8);
    }
    return out;
}

const char *qx_shape_text(const uint64_t *shape, size_t n, char out[96])
{
    size_t at = 0;
    out[at++] = '[';
    for (size_t i = 0; i < n && at < 70; i++) {
        int w = snprintf(out + at, 96 - at, "%s%" PRIu64, i ? ", " : "", shape[i]);
        at += w > 0 ? (size_t)w : 0;
        if (i == 7 && n > 8) {
            w = snprintf(out + at, 96 - at, ", ...");
            at += w > 0 ? (size_t)w : 0;
            break;
        }
    }
    snprintf(out + at, 96 - at, "]");
    return out;
}

struct qx_name_info qx_name_classify(const struct qx_config *c, const char *name)
{
    struct qx_name n;
    qx_layout_parse(&n, c, name, strlen(name));
    bool layer_ok = !c || n.layer < 0 || n.component == QX_C_VISION || n.is_mtp ||
                    n.layer < (int32_t)c->n_layers;
    return (struct qx_name_info){
        .component = (enum qx_component)n.component,
        .layer = n.component == QX_C_VISION ? -1 : n.layer,
        .expert = n.expert,
        .is_mtp = n.is_mtp,
        .known = layer_ok && ((n.entry && n.leaf != QX_LEAF_FOREIGN) ||
                              (n.in_table && !n.foreign_shard && n.leaf != QX_LEAF_FOREIGN)),
    };
}
