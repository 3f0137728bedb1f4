/* layout.h: the tensors of the model family as a table (formats 4): name, shape from the
 * configuration, component, kind. And the way back: any tensor name to its row of the table,
 * without allocation. */
#ifndef QX_LAYOUT_H
#define QX_LAYOUT_H

#include "config.h"
#include "resolve.h"

/* Where in the tree an entry lives; the part of the name before its suffix. */
enum qx_place {
    QX_P_ROOT,   /* "" : lm_head */
    QX_P_TEXT,   /* model.language_model. */
    QX_P_LAYER,  /* model.language_model.layers.N. and mtp.layers.N. */
    QX_P_EXPERT, /* <layer>mlp.experts.E. */
    QX_P_MTP,    /* mtp. */
    QX_P_VISION, /* model.visual. */
    QX_P_VBLOCK, /* model.visual.blocks.B. */
    QX_P_COUNT
};

enum qx_when { QX_W_ALWAYS, QX_W_GDN, QX_W_QSA, QX_W_PLE };

enum qx_kind {
    QX_K_LINEAR, /* may be stored in any quantised form */
    QX_K_PLAIN,  /* norms, convolutions, embeddings: BF16, F16 or F32 */
    QX_K_BUFFER, /* I64 */
    QX_K_FUSED,  /* all experts of a layer in one tensor; one of the forms of experts */
    QX_K_EXPERT, /* one projection of one expert */
    QX_K_UNUSED  /* met in conversions, read by nobody */
};

#define QX_LAYOUT_MAX_DIMS 5

struct qx_layout_entry {
    const char *suffix; /* module name after the place's prefix */
    uint8_t place, when, kind, component;
    bool bare; /* the tensor has the module's name, without ".weight" */
    bool bias; /* and there is a ".bias" of the first dimension */
    uint8_t n_dims;
    uint8_t dim[QX_LAYOUT_MAX_DIMS]; /* ids for qx_layout_dim */
};

/* All entries of a place, *n of them. */
const struct qx_layout_entry *qx_layout_entries(enum qx_place place, size_t *n);
/* Shape of an entry for a configuration: false when a needed number is unknown (0). */
bool qx_layout_shape(const struct qx_layout_entry *e, const struct qx_config *c,
                     uint64_t shape[QX_LAYOUT_MAX_DIMS]);

/* Table shards with higher numbers are refused: a number must not decide how much is allocated. */
#define QX_MAX_TABLE_SHARDS (1 << 20)

/* The last part of a tensor name. */
enum qx_leaf {
    QX_LEAF_BARE, /* the whole name is the module */
    QX_LEAF_WEIGHT,
    QX_LEAF_BIAS,
    QX_LEAF_SCALE,
    QX_LEAF_SCALE_INV,
    QX_LEAF_SCALE_2,
    QX_LEAF_INPUT_SCALE,
    QX_LEAF_KV_SCALE, /* k_scale, v_scale */
    QX_LEAF_FOREIGN   /* of another convention: weight_packed, qweight, trellis, ... */
};

/* Spelling of the part before the layers (formats 10). Only QX_SP_DISK is read. */
enum qx_spelling {
    QX_SP_DISK,    /* model.language_model., lm_head, mtp., model.visual. */
    QX_SP_RUNTIME, /* language_model.model., model.language_model.model., language_model.lm_head,
                      visual. */
    QX_SP_TEXT,    /* model.layers., model.embed_tokens, ... */
    QX_SP_NONE     /* none of these */
};

struct qx_name {
    const struct qx_layout_entry *entry; /* NULL: no tensor of the family */
    uint8_t component;                   /* enum qx_component */
    uint8_t leaf;                        /* enum qx_leaf */
    uint8_t spelling;                    /* enum qx_spelling */
    bool is_mtp;
    bool mtp_alias;     /* spelled mtp.layers.<num_hidden_layers> */
    bool in_table;      /* at or below ...ple_embedding.ngram_embedding */
    bool ple_extra;     /* hashstats_*, token_lookup */
    bool foreign_shard; /* a table shard under another name (shards.N) */
    int32_t layer, expert;
    int64_t shard;         /* table shard number, -1 none */
    uint32_t module_len;   /* bytes of the name that are the module's */
    const char *leaf_text; /* into the name */
};
/* One pass over the name, no allocation. c may be NULL (then no aliases). */
void qx_layout_parse(struct qx_name *out, const struct qx_config *c, const char *name, size_t n);

/* Module name of an entry, e.g. for messages and look-ups. Returns out. */
const char *qx_layout_module(const struct qx_layout_entry *e, bool is_mtp, uint32_t layer,
                             uint32_t index, char out[256]);
/* Tensor name of the entry's weight, e.g. with ".weight" unless bare. */
const char *qx_layout_tensor(const struct qx_layout_entry *e, bool is_mtp, uint32_t layer,
                             uint32_t index, char out[256]);
/* Does this entry belong to that layer? */
bool qx_layout_applies(const struct qx_layout_entry *e, const struct qx_config *c, bool is_mtp,
                       uint32_t layer);
/* "[160, 32]" */
const char *qx_shape_text(const uint64_t *shape, size_t n, char out[96]);

#endif
