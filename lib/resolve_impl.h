/* resolve_impl.h: shared by resolve.c (storage), resolve_meta.c (metadata) and resolve_why.c
 * (reasons). */
#ifndef QX_RESOLVE_IMPL_H
#define QX_RESOLVE_IMPL_H

#include "alloc.h"
#include "layout.h"
#include "quant_config.h"
#include "resolve.h"

struct qx_resolved {
    const struct qx_ckpt *ck;
    const struct qx_config *c;
    struct qx_arena *arena;
    struct qx_module *modules;
    size_t n, cap;
    struct qx_table table;
    struct qx_table_shard *shards;
    struct qx_quant_home home[2]; /* config.json, hf_quant_config.json */
    struct qx_quant_home *used;   /* NULL: no settings */
};

enum qx_claim_kind {
    QX_CL_NONE, /* nothing lists the module */
    QX_CL_IGNORED,
    QX_CL_FORMAT,
    QX_CL_UNKNOWN /* listed with an algorithm that is not known */
};
/* What one home of the settings says about a module. */
struct qx_claim {
    enum qx_claim_kind kind;
    enum qx_format format;
    enum qx_source source;
    const char *entry; /* key or pattern as written, NULL for a default */
    const char *algo_text;
    uint32_t group_size;
    bool soft;
};
/* name: full module name, NUL-terminated. is_linear: a default algorithm of the whole model
 * applies. */
struct qx_claim qx_claim_of(struct qx_quant_home *h, const struct qx_config *c, const char *name,
                            bool is_linear);
/* The table: without ple_embedding_dtype, which is no part of a home. */
struct qx_claim qx_claim_of_table(struct qx_quant_home *h, const char *name);
/* ple_embedding_dtype: kind NONE when absent. */
struct qx_claim qx_claim_of_ple_dtype(const struct qx_config *c);

/* resolve.c: the form of a module, given what is claimed. */
void qx_module_decide(struct qx_module *m, const struct qx_claim *claim);
bool qx_format_quantised(enum qx_format f);
uint32_t qx_format_group(enum qx_format f);

/* resolve_meta.c: reads both homes, then sets claims, decides every module and compares. */
int qx_resolve_read_homes(struct qx_resolved *r, struct qx_findings *fs, struct qx_error *err);
int qx_resolve_claims(struct qx_resolved *r, struct qx_findings *fs, struct qx_error *err);

#endif
