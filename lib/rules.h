/* rules.h: every kind of finding, once, as a table, and the functions that look for them.
 *
 * A kind that any part of qx reports as a finding is a row of the table (tests walk the sources and
 * compare); qx-rules(7) has an entry for each. Finders only append to `fs`; they return 0 however bad
 * the checkpoint is, and an error only when the question could not be answered (memory, a read that
 * fails for other reasons than the checkpoint's content). */
#ifndef QX_RULES_H
#define QX_RULES_H

#include "ckpt.h"

enum qx_rule_origin {
    QX_RO_CONTAINER, /* st_header.c, index_json.c, ckpt.c: files and headers */
    QX_RO_CONFIG,    /* config.c and JSON of all small files */
    QX_RO_QUANT,     /* quant_config.c, resolve.c: metadata against storage */
    QX_RO_LAYOUT,    /* rules_layout.c: names, shapes, dtypes of the family */
    QX_RO_SCALE,     /* rules_scale.c: companions and their values */
    QX_RO_VALUE,     /* rules_value.c: values of weights and buffers */
    QX_RO_DECODE,    /* decoding twice */
    QX_RO_MANIFEST,  /* checksums */
    QX_RO_TEXT,      /* rules_text.c: tokenizer, chat template, generation defaults */
    QX_RO_DIFF,      /* inspect --diff: what two checkpoints do not share */
    QX_RO_COUNT
};

#define QX_SEV(s) (1u << (s))
#define QX_SEV_NOTE QX_SEV(QX_NOTE)
#define QX_SEV_WARNING QX_SEV(QX_WARNING)
#define QX_SEV_ERROR QX_SEV(QX_ERROR)

struct qx_rule {
    const char *id;             /* the finding's kind */
    unsigned severities;        /* QX_SEV_ bits that it can have */
    enum qx_rule_origin origin;
    const char *text;           /* one line, lower case, no full stop */
};

const struct qx_rule *qx_rules_table(size_t *n); /* sorted by id */
const struct qx_rule *qx_rule_find(const char *id); /* NULL if there is none */
const char *qx_rule_origin_name(enum qx_rule_origin o);

/* All that follows from names, shapes, dtypes and configs but companions of weights: expected tensors
 * (missing, unexpected, shape, dtype, weight-dtype, group-size-indivisible), MTP and vision parts,
 * table shards and split, metadata against storage, foreign conventions. Needs a usable config; for a
 * single file appends nothing. Findings of opening (qx_ckpt_findings) are not repeated. */
int qx_rules_headers(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err);

/* Companions of quantised weights from headers alone: missing-scale, scale-shape, scale-dtype,
 * scale-name-variant, scale-4d, unused-scale. A tensor that the index lists but whose file is missing or
 * lacks it is left to the finding of opening. */
int qx_rules_scale_headers(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err);

/* The files beside the weights that `run` reads for text, through its own loaders, and whether other small
 * JSON files of usual names are whole: json-..., tokenizer-..., template-unknown, config-type and
 * config-value of generation_config.json. Nothing for a single file or without a usable config. */
int qx_rules_text(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err);

#endif
