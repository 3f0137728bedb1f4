/* plan.c: see plan.h. */
#include "plan.h"

#include "num.h"

#include <stdio.h>
#include <string.h>

static uint64_t sat_add(uint64_t a, uint64_t b)
{
    uint64_t r;
    return qx_add_u64(a, b, &r) ? r : UINT64_MAX;
}

static void part(struct qx_plan *p, const char *name, const char *place, uint64_t n_bytes, uint64_t *sum)
{
    if (n_bytes) {
        p->parts[p->n_parts++] = (struct qx_plan_part){name, place, n_bytes};
        if (sum) {
            *sum = sat_add(*sum, n_bytes);
        }
    }
}

/* The plan for one table place, context and chunk. */
static int attempt(struct qx_plan *p, const struct qx_config *c, const struct qx_plan_request *r,
                   enum qx_table_place table, uint64_t ctx, uint32_t chunk, uint32_t prefixes,
                   struct qx_error *err)
{
    memset(p, 0, sizeof *p);
    int rc = qx_budget_init(&p->budget, c, ctx, chunk, r->max_seqs, prefixes, r->draft_max, r->mtp, r->kv_bf16, err);
    if (rc) {
        return rc;
    }
    p->table = table;
    p->available_bytes = r->device_bytes;
    part(p, "weights", "device", r->weight_bytes, &p->device_bytes);
    part(p, "ple_table", table == QX_TABLE_DEVICE ? "device" : table == QX_TABLE_HOST ? "host" : "disk",
         r->table_bytes,
         table == QX_TABLE_DEVICE ? &p->device_bytes : table == QX_TABLE_HOST ? &p->host_bytes : NULL);
    part(p, "draft_head", "device", r->draft_head_bytes, &p->device_bytes);
    part(p, "kv_cache", "device", p->budget.kv_bytes, &p->device_bytes);
    part(p, "states", "device", p->budget.state_bytes, &p->device_bytes);
    part(p, "scratch", "device", p->budget.scratch_bytes, &p->device_bytes);
    part(p, "workspace", "device", r->workspace_bytes, &p->device_bytes);
    part(p, "pinned", "host", p->budget.host_bytes, &p->host_bytes);
    p->fits = (!r->device_bytes || p->device_bytes <= r->device_bytes)
              && (!r->host_bytes || r->host_device || p->host_bytes <= r->host_bytes);
    return 0;
}

/* Several prefixes where many sequences may share them and memory allows it, else one. */
#define PREFIXES 4

/* Rows of a prefill step when none are asked for: on a device a step reads all experts, whose time only thousands
 * of rows hide; on the host there is nothing to win. */
enum { CHUNK_DEVICE = 8192, CHUNK_HOST = 512 };

/* The same, with the largest chunk that fits when none was asked for. */
static int attempt_chunks(struct qx_plan *p, const struct qx_config *c, const struct qx_plan_request *r,
                          enum qx_table_place table, uint64_t ctx, struct qx_error *err)
{
    uint32_t chunk = r->chunk_rows ? r->chunk_rows : r->host_device ? CHUNK_HOST : CHUNK_DEVICE;
    uint32_t prefixes = r->max_seqs > 1 ? PREFIXES : 1;
    int rc = attempt(p, c, r, table, ctx, chunk, prefixes, err);
    for (; !rc && !p->fits && !r->chunk_rows && chunk > CHUNK_HOST; chunk /= 2) {
        rc = attempt(p, c, r, table, ctx, chunk / 2, prefixes, err);
    }
    if (!rc && !p->fits && prefixes > 1) {
        rc = attempt(p, c, r, table, ctx, chunk, 1, err);
    }
    for (chunk /= 2; !rc && !p->fits && !r->chunk_rows && chunk >= 16; chunk /= 2) {
        rc = attempt(p, c, r, table, ctx, chunk, 1, err);
    }
    return rc;
}

static uint64_t largest_ctx(const struct qx_config *c, const struct qx_plan_request *r,
                            enum qx_table_place table)
{
    struct qx_plan p;
    uint64_t lo = 0, hi = qx_config_context_limit(c) + 1; /* lo fits (0: none known), hi does not */
    while (hi - lo > 1) {
        uint64_t mid = lo + (hi - lo) / 2;
        if (!attempt_chunks(&p, c, r, table, mid, NULL) && p.fits) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return lo;
}

int qx_plan_make(struct qx_plan *p, const struct qx_config *c, const struct qx_plan_request *r,
                 struct qx_error *err)
{
    enum qx_table_place order[3] = {QX_TABLE_DEVICE, QX_TABLE_HOST, QX_TABLE_DISK};
    uint32_t first = 0, last = 2;
    if (r->table != QX_TABLE_AUTO) {
        first = last = (uint32_t)r->table - QX_TABLE_DEVICE;
    } else if (r->host_device) {
        /* Mapped files need no place of their own: a table in host memory costs the plan nothing. */
        first = last = r->packed_table ? 2 : 1;
    }
    for (uint32_t i = first; i <= last; ++i) {
        int rc = attempt_chunks(p, c, r, order[i], r->ctx_tokens, err);
        if (rc) {
            return rc;
        }
        if (p->fits) {
            break;
        }
    }
    p->max_ctx = p->fits ? p->budget.ctx_tokens : largest_ctx(c, r, p->table);
    if (p->fits) {
        uint64_t with = sat_add(p->device_bytes, r->head_copy_bytes);
        p->head_copy = r->head_copy_bytes && with <= r->device_bytes;
        if (p->head_copy) {
            part(p, "head_copy", "device", r->head_copy_bytes, &p->device_bytes);
        }
        return 0;
    }
    if (p->max_ctx) {
        snprintf(p->advice, sizeof p->advice, "the largest context that fits is %llu tokens (--ctx %llu)",
                 (unsigned long long)p->max_ctx, (unsigned long long)p->max_ctx);
    } else {
        snprintf(p->advice, sizeof p->advice, "no context fits");
    }
    size_t n = strlen(p->advice);
    if (p->table == QX_TABLE_DEVICE && r->table_bytes) {
        snprintf(p->advice + n, sizeof p->advice - n,
                 "; move the table with --table host or --table disk");
    } else if (p->table == QX_TABLE_HOST && r->table_bytes && !r->host_device) {
        snprintf(p->advice + n, sizeof p->advice - n, "; move the table with --table disk");
    } else if (!p->max_ctx) {
        snprintf(p->advice + n, sizeof p->advice - n,
                 "; nothing can be moved off the device, weights and states alone are too large");
    }
    return 0;
}

int qx_plan_fail(const struct qx_plan *p, struct qx_error *err)
{
    char text[400], size[32];
    size_t n = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < p->n_parts && n < sizeof text; ++i) {
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %s on %s", i ? ", " : "", p->parts[i].name,
                              qx_size_text(p->parts[i].size_bytes, size), p->parts[i].place);
    }
    char total[32], avail[32];
    return qx_fail(err, QX_E_PLAN, "memory-plan",
                   "%s for %llu tokens of context; total %s on the device, available %s; %s", text,
                   (unsigned long long)p->budget.ctx_tokens, qx_size_text(p->device_bytes, total),
                   qx_size_text(p->available_bytes, avail), p->advice);
}
