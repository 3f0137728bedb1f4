/* resolve.h: how each module of a checkpoint is stored and what the configuration says about it.
 *
 * Storage decides the format (dtype, shape, companions: formats 5.2, 7); metadata is then compared
 * and gives `source` and `entry`. Findings about disagreement are made here (quantized-but-plain,
 * undeclared-format, unknown-quant-algo, ...); those about missing or wrong companions are made in
 * the rule files from the same modules. */
#ifndef QX_RESOLVE_H
#define QX_RESOLVE_H

#include "ckpt.h"

enum qx_component {
    QX_C_EMBED,
    QX_C_LM_HEAD,
    QX_C_HYPER,
    QX_C_LINEAR_ATTN,
    QX_C_SELF_ATTN,
    QX_C_ROUTER,
    QX_C_SHARED_EXPERT,
    QX_C_EXPERTS,
    QX_C_PLE,
    QX_C_PLE_TABLE,
    QX_C_MTP,
    QX_C_VISION,
    QX_C_OTHER,
    QX_C_COUNT
};
const char *qx_component_name(enum qx_component c); /* "embed", ... */

enum qx_source { /* what confirmed a format; order is that of cli.md */
                 QX_SRC_MAP,
                 QX_SRC_PLE_DTYPE,
                 QX_SRC_CONVERT,
                 QX_SRC_IGNORE,
                 QX_SRC_NOT_CONVERT,
                 QX_SRC_DEFAULT,
                 QX_SRC_STORAGE
};
const char *qx_source_name(enum qx_source s); /* "map", "ple_embedding_dtype", ... */

struct qx_layout_entry; /* layout.h */

/* One matrix (or stack of expert matrices) with its companions. Tensor pointers are owned by the
 * checkpoint, NULL where not stored. */
struct qx_module {
    const char *name; /* module name as stored, e.g. "...mlp.experts.7.up_proj" */
    enum qx_component component;
    enum qx_format format;  /* as stored; QX_F_NONE when it cannot be read: a companion is missing
                               or has another shape or type than the format wants */
    enum qx_format form;    /* the same without that condition: what weight, companions and, where
                               these leave it open, the configuration make of it */
    enum qx_format claimed; /* format that the configuration positively claims, QX_F_NONE none */
    bool claim_soft;        /* claimed only by a whole-model default that may be wrong for it */
    bool scale_is_inv;      /* `scale` is stored as weight_scale_inv */
    bool scale_variant;     /* block scale stored under the name weight_scale */
    const struct qx_layout_entry *layout; /* its row in layout.h; NULL: no module of the family */
    const struct qx_tensor
        *foreign; /* a tensor of another convention (weight_packed, ...) or NULL */
    const struct qx_tensor
        *other_scale; /* weight_scale or weight_scale_inv beside the one used, or NULL */
    const struct qx_tensor *bias;
    uint8_t spelling; /* enum qx_spelling */
    enum qx_source source;
    const char *entry; /* the entry that decided (map key, glob), or NULL */
    int32_t layer;     /* decoder or MTP layer, -1 none */
    int32_t expert;    /* -1: not an expert, or all fused */
    bool is_mtp;
    bool is_linear;      /* a linear by the model's own table (norms are not) */
    uint32_t group_size; /* 16, 32, 128, or 0 */
    uint64_t rows, cols; /* of the logical matrix [out, in]; for fused experts of one expert */
    uint64_t n_stacked;  /* experts in a fused [E, out, in] tensor, else 1 */
    const struct qx_tensor *weight, *scale, *scale_2,
        *input_scale; /* scale: block, tensor or group scale */
};

/* Element type of the codes of a format; QX_DT_UNKNOWN for QX_F_NONE and QX_F_MIXED. */
enum qx_dtype qx_format_weight_dtype(enum qx_format f);

struct qx_resolved;
size_t qx_resolved_n_modules(const struct qx_resolved *r);
const struct qx_module *qx_resolved_module(const struct qx_resolved *r,
                                           size_t i); /* sorted by name */
const struct qx_module *qx_resolved_find(const struct qx_resolved *r, const char *module);

/* The n-gram table: shards in numeric order. format QX_F_NONE when it cannot be read. */
struct qx_table_shard {
    const struct qx_tensor *weight, *scale; /* scale: NVFP4 block scales */
};
struct qx_table {
    bool present;
    const char *module;    /* "...ple_embedding.ngram_embedding" */
    enum qx_format format; /* BF16, F16, F32, FP8, NVFP4; QX_F_NONE when it cannot be read */
    enum qx_format form;   /* the same though scales are missing or wrong */
    const char *foreign;   /* what it is when of another convention ("NF4", ...), else NULL */
    const struct qx_tensor *packed; /* the tensor of packed_rows, or NULL */
    enum qx_source source;
    const char *entry;
    uint32_t width;  /* columns of the logical row */
    uint64_t n_rows; /* stored rows, padding included */
    uint64_t rows_per_shard; /* of every shard but those at the end: qx_table_shard_rows */
    uint32_t n_shards; /* as many as the rows need when the configuration tells, else by the highest
                          number seen or listed + 1; absent ones have weight NULL */
    const struct qx_table_shard *shards;
    const struct qx_tensor
        *global;       /* FP8 weight_scale or NVFP4 weight_scale_2, NULL if none stored */
    bool is_slice;     /* one rank's rows only (qx_rank in config.json) */
    uint64_t row_base; /* first row held when this is a slice, else 0 */
    bool packed_rows;  /* qx's own row layout: see pack.h */
};
const struct qx_table *qx_resolved_table(const struct qx_resolved *r);
/* Rows of shard i: rows_per_shard, what is left for the last, 0 behind it. So do all loaders count:
 * rows_per_shard = ceil(rows / shards), row r is row r mod it of shard r div it. */
uint64_t qx_table_shard_rows(const struct qx_table *t, uint64_t i);

/* The two homes of quantisation settings and the one that decides (NULL: none); quant_config.h. */
struct qx_quant_home;
const struct qx_quant_home *qx_resolved_quant(const struct qx_resolved *r, int home);
const struct qx_quant_home *qx_resolved_quant_used(const struct qx_resolved *r);

/* Builds all of this from the headers and the two config texts of ck (qx_ckpt_config must be set).
 * Findings of metadata against storage go to fs. An error of kind config-type or json-* means that
 * config.json cannot be used; trouble in hf_quant_config.json is a finding. */
int qx_resolve(struct qx_resolved **out, const struct qx_ckpt *ck, struct qx_findings *fs,
               struct qx_error *err);
void qx_resolved_destroy(struct qx_resolved *r);

/* Everything consulted to decide how one tensor or module is read, as lines of text into *text (to
 * be freed with qx_free). QX_E_NOT_FOUND when neither exists. */
int qx_resolved_why(const struct qx_ckpt *ck, const char *name, char **text, struct qx_error *err);

/* Component and kind of any tensor name of this model family (also prefix spellings of formats 10).
 */
struct qx_name_info {
    enum qx_component component;
    int32_t layer, expert;
    bool is_mtp;
    bool known; /* the family has a tensor of this name or it is a known companion */
};
struct qx_name_info qx_name_classify(const struct qx_config *c, const char *name);

#endif
