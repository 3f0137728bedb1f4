/* quant_config.h: the quantisation settings of every producer as one description (formats 8): a
 * flat block in config.json, a nested or top-level one in hf_quant_config.json, ModelOpt maps and
 * globs, the fp8 method's lists. Nothing here looks at tensors. */
#ifndef QX_QUANT_CONFIG_H
#define QX_QUANT_CONFIG_H

#include "alloc.h"
#include "config.h"
#include "json_doc.h"

enum qx_algo {
    QX_A_NONE = 0, /* absent */
    QX_A_NVFP4,
    QX_A_W4A16_NVFP4,
    QX_A_FP8,
    QX_A_FP8_BLOCK,
    QX_A_MXFP8,
    QX_A_MIXED,
    QX_A_UNKNOWN /* text says what */
};
/* Known in either case of letters; FP8_PB_WO and FP8_BLOCK_SCALES are one. */
enum qx_algo qx_algo_parse(const char *s);
enum qx_format qx_algo_format(enum qx_algo a); /* QX_F_NONE for none, mixed, unknown */
const char *qx_algo_names(void);               /* for messages */

/* Which part of the model a normalised name is in: names of different parts never match. */
enum qx_part { QX_PART_TEXT, QX_PART_HEAD, QX_PART_MTP, QX_PART_VISION, QX_PART_ANY };

/* A module name without its drifting prefix (formats 10): a suffix of the name. */
struct qx_norm {
    const char *p;
    size_t n;
    enum qx_part part;
    bool stripped; /* another spelling than disk */
};
struct qx_norm qx_norm_name(const char *s, size_t n);

/* One key of quantized_layers. */
struct qx_quant_entry {
    const char *key;     /* as written */
    struct qx_norm norm; /* mtp.layers.<num_hidden_layers> rewritten to mtp.layers.0 */
    bool mtp_alias;
    enum qx_algo algo;
    const char *algo_text; /* "" when absent */
    uint32_t group_size;   /* 0 when absent or null */
    bool used;             /* set by lookups: some stored module was found under it */
};

/* One name or glob of ignore, exclude_modules, modules_to_not_convert or modules_to_convert. */
struct qx_quant_pattern {
    const char *text; /* as written */
    struct qx_norm norm;
    bool is_glob;
    bool used;
};

/* One target of config_groups: the same claim in the words of compressed-tensors. */
struct qx_quant_target {
    const char *group, *text; /* "group_0", the module name as written */
    struct qx_norm norm;
    enum qx_format format; /* QX_F_NONE: the group's numbers say none that is known */
};

struct qx_quant_home {
    bool present;
    const char *file;               /* "config.json" or "hf_quant_config.json" */
    const char *method;             /* quant_method, "" when absent */
    const char *algo_text;          /* quant_algo at the top, "" when absent */
    const char *kv_cache;           /* kv_cache_quant_algo, "" when absent or null */
    enum qx_algo algo;              /* for fp8: FP8_BLOCK or FP8 by weight_block_size */
    bool is_fp8_method, is_foreign; /* foreign: a method of another convention, such as gptq */
    uint32_t group_size, block_rows, block_cols; /* 0 when absent */
    struct qx_quant_entry *entries;              /* sorted by normalised key */
    struct qx_quant_entry **order;               /* as written */
    size_t n_entries;
    struct qx_quant_pattern *ignore; /* ignore, exclude_modules or modules_to_not_convert */
    size_t n_ignore;
    struct qx_quant_pattern *convert; /* modules_to_convert: suffixes */
    size_t n_convert;
    const char *ignore_key;          /* which key the list had */
    struct qx_quant_target *targets; /* of all config_groups that name modules */
    size_t n_targets;
    uint32_t n_normalised; /* names written with another prefix than tensors have */
};

/* Reads the block `o` (quantization_config, or the whole of hf_quant_config.json) into out; strings
 * go to the arena. Errors (QX_E_CONFIG): config-type with the key path. Findings: group-size notes
 * and unsupported-group-size errors of entries. fs may be NULL. */
int qx_quant_home_read(struct qx_quant_home *out, const struct qx_json *o, const char *file,
                       const char *path, const struct qx_config *c, struct qx_arena *arena,
                       struct qx_findings *fs, struct qx_error *err);

/* The entry of quantized_layers that governs a module: its own name, else the longest dotted
 * prefix. */
struct qx_quant_entry *qx_quant_find_entry(const struct qx_quant_home *h, struct qx_norm m);
/* The first pattern of a list that covers the module (name: full module name as stored,
 * NUL-terminated). A plain name covers itself and everything below it. */
struct qx_quant_pattern *qx_quant_find_pattern(struct qx_quant_pattern *list, size_t n,
                                               const char *name, struct qx_norm m);
/* The first of modules_to_convert that is the module or a dotted suffix of it. */
struct qx_quant_pattern *qx_quant_find_convert(const struct qx_quant_home *h, struct qx_norm m);

#endif
