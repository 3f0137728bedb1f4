/* rules_impl.h: shared by the files that check names, shapes and coverage from headers alone. */
#ifndef QX_RULES_IMPL_H
#define QX_RULES_IMPL_H

#include "layout.h"
#include "quant_config.h"
#include "resolve.h"
#include "rules.h"

/* A module of the family stored under another spelling of the prefix; it is named, not read, and
 * its absence under the right name is no finding of its own. */
struct qx_respelled {
    const struct qx_layout_entry *entry;
    int32_t layer, expert;
    bool is_mtp;
};

struct qx_headers_check {
    const struct qx_ckpt *ck;
    const struct qx_config *c;
    const struct qx_resolved *r;
    struct qx_findings *fs;
    struct qx_respelled *respelled;
    size_t n_respelled, respelled_cap;
    bool foreign_table; /* table shards under other names were met */
    bool any_mtp, any_vision;
    uint32_t vision_depth; /* highest block + 1 */
    int rc;                /* QX_E_NOMEM */
};

const char *qx_check_file(const struct qx_headers_check *k, const struct qx_tensor *t);
/* rules_cover.c: every expected tensor is stored in one form. */
void qx_check_coverage(struct qx_headers_check *k);
/* rules_table.c: shards, rows, forms of the n-gram table. */
void qx_check_table(struct qx_headers_check *k);

#endif
