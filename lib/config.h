/* config.h: the model configuration, typed and complete: all spellings and defaults of model 0 and
 * formats 3 and 10. Unknown keys are kept only for display by the JSON document itself. */
#ifndef QX_CONFIG_H
#define QX_CONFIG_H

#include "base.h"
#include "error.h"
#include "findings.h"

enum qx_layer_type { QX_LAYER_GDN = 0, QX_LAYER_QSA = 1 };

#define QX_MAX_LAYERS 512
#define QX_MAX_NGRAM 8
#define QX_MAX_PLE_HEADS 256

/* Shapes and constants of the text model. Names are those of model 0; all counts > 0 after reading. */
struct qx_config {
    char type_found[64], type[64], architecture[96]; /* as found; understood ("qwen4_exp"); "" if none */
    char text_type_found[64];
    uint32_t vocab_size, hidden_size, n_layers;
    uint8_t layer_type[QX_MAX_LAYERS]; /* enum qx_layer_type */
    uint32_t full_attention_interval;
    uint32_t hc_count, hc_lowrank;
    double rms_norm_eps;
    uint64_t max_position_embeddings;

    uint32_t n_heads, n_kv_heads, head_dim;            /* QSA */
    uint32_t indexer_n_heads, indexer_kv_heads, indexer_head_dim, indexer_compress_ratio, indexer_budget;
    uint32_t rotary_dim;                               /* partial_rotary_factor x head_dim */
    double rope_theta;
    char rope_type[32];                                /* "default", "yarn", or what was found */
    double rope_factor;                                /* yarn; 1 otherwise */
    uint64_t rope_original_max_position;               /* yarn; max_position_embeddings otherwise */
    double yarn_beta_fast, yarn_beta_slow;             /* 32 and 1 unless given */

    uint32_t gdn_k_heads, gdn_v_heads, gdn_k_dim, gdn_v_dim, gdn_conv_kernel;
    char output_gate_type[32];

    uint32_t n_experts, n_experts_per_tok, moe_intermediate_size, shared_expert_intermediate_size;
    bool norm_topk_prob;

    /* PLE: layers are zero-based here, -1 none. n_ple_layers is 0 or 1 in every known checkpoint; the
     * rank of a layer enters the hash (model 7.1). */
    uint32_t n_ple_layers;
    uint32_t ple_layer[8];
    uint32_t ple_embed_dim, ple_conv_kernel, ngram_size, heads_per_ngram;
    uint64_t ngram_vocab_size_base, ngram_divisible_by;
    uint64_t ngram_seed;
    bool ngram_seed_found;
    uint32_t ple_heads;      /* (ngram_size - 1) x heads_per_ngram */
    uint32_t ple_row_width;  /* ple_embed_dim / ple_heads */
    uint64_t split_ngram_parts; /* 0 when absent */
    char ple_embedding_dtype[32]; /* "" when absent */

    uint32_t n_mtp_layers;
    uint32_t eos_token_id;      /* n-gram reset id: element 0 when a list */
    uint32_t text_eos[8], n_text_eos; /* all of text_config.eos_token_id */
    int64_t bos_token_id;       /* -1 when absent or null */
    bool tie_word_embeddings;

    bool has_vision_config;
    bool mentions_mtp;          /* mtp_num_hidden_layers > 0 or an mtp object */
    struct {
        uint32_t depth, hidden_size, in_channels, intermediate_size, num_heads, num_position_embeddings,
            out_hidden_size, patch_size, spatial_merge_size, temporal_patch_size;
    } vision;
};

/* Reads config.json's text (after json_pull validated it). Findings get notes and warnings
 * (architecture-alias, non-finite words, ...). Errors: kinds config-type, config-value, json-*,
 * unsupported-model-type; the key path is in the message. */
int qx_config_parse(struct qx_config *out, const char *text, size_t n, const char *file,
                    struct qx_findings *fs, struct qx_error *err);

/* Is this one of the spellings of the layer type with block-sparse full attention (formats 10)? */
bool qx_config_is_full_attention(const char *layer_type);

/* Context limit in tokens: max_position_embeddings, or with yarn original x factor (model 14). */
uint64_t qx_config_context_limit(const struct qx_config *c);

#endif
