/* inspect_impl.h: the private side of struct qx_inspection. */
#ifndef QX_INSPECT_IMPL_H
#define QX_INSPECT_IMPL_H

#include "alloc.h"
#include "config.h"
#include "layout.h"
#include "ple_hash.h"
#include "quant_config.h"
#include "resolve_impl.h"

/* Modules of one component in one format. */
struct cell {
    uint64_t modules, params, bytes;
    uint64_t by_source[2][QX_SRC_STORAGE + 1]; /* [is linear][source] bytes */
};

struct inspection {
    struct qx_inspection pub; /* first: the public pointer is this object's */
    const struct qx_ckpt *ck;
    const struct qx_config *c;
    const struct qx_resolved *r;
    struct qx_arena *arena;
    struct qx_config identity;
    struct qx_ple_hash hash;
    uint64_t tensors[QX_C_COUNT], bytes[QX_C_COUNT], params[QX_C_COUNT];
    bool present[QX_DT_COUNT][QX_C_COUNT];
    struct cell cells[QX_C_COUNT][QX_F_COUNT];
    struct qx_dtype_total dtypes[QX_DT_COUNT];
    struct qx_component_total components[QX_C_COUNT];
    struct qx_format_total *formats;
    struct qx_module_info *modules;
    size_t modules_cap;
    const char *remarks[4];
    struct qx_findings *findings;
    bool nomem;
};

const char *inspect_keep(struct inspection *x, const char *s);
/* Does the file end with its header? */
bool inspect_is_cut(const struct qx_ckpt *ck, const char *file);
/* inspect_plan.c: fills totals as a released layout would have them for this configuration. */
int inspect_plan_layout(struct inspection *x, const char *layout, struct qx_error *err);

#endif
