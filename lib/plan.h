/* plan.h: whether a model fits: sizes of weights and table, what the engine takes (budget.h), and what a
 * device and the host have. One function gives the plan that `run` obeys and `inspect --fit` prints. */
#ifndef QX_PLAN_H
#define QX_PLAN_H

#include "budget.h"

struct qx_plan_request {
    uint64_t weight_bytes, table_bytes;  /* as placed; table 0: none */
    enum qx_table_place table;
    bool packed_table;                   /* prefers disk on the cpu */
    bool host_device;                    /* the device is host memory (cpu) */
    uint64_t workspace_bytes;            /* of the device's queue (backend.h), and of synth.c's pools */
    uint64_t device_bytes;               /* limit or memory of the device; 0: not limited */
    uint64_t host_bytes;                 /* memory of the host; 0: not limited */
    uint64_t ctx_tokens;                 /* 0: the default */
    uint32_t chunk_rows;                 /* 0: 512, less where that makes the plan fit, down to 16 */
    uint32_t max_seqs, draft_max;
    bool mtp, kv_bf16;
    uint64_t draft_head_bytes;           /* a copy of some rows of the head, 0: none */
    uint64_t head_copy_bytes;           /* of a copy of the head that only saves time: made where there is room */
};

struct qx_plan {
    struct qx_budget budget;
    enum qx_table_place table;           /* never AUTO */
    struct qx_plan_part parts[12];       /* names and places are static strings */
    uint32_t n_parts;
    uint64_t device_bytes;               /* needed on the device */
    uint64_t host_bytes;                 /* needed on the host beside it: table, pinned memory */
    uint64_t available_bytes;            /* the request's device_bytes */
    bool fits;
    bool head_copy;                      /* there is room for it */
    uint64_t max_ctx;                    /* largest context that fits with this table place, 0: none */
    char advice[256];                    /* what to change, "" when it fits */
};

/* Errors only for requests that make no sense (context-exceeded, usage); not fitting is fits = false. */
int qx_plan_make(struct qx_plan *p, const struct qx_config *c, const struct qx_plan_request *r,
                 struct qx_error *err);
/* The error of a plan that does not fit: QX_E_PLAN, "memory-plan", with every part, total, available
 * and advice. */
int qx_plan_fail(const struct qx_plan *p, struct qx_error *err);

#endif
