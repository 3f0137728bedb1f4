/* fit.c: the memory plan of `qx inspect --fit`: stored bytes by component, and what the engine
 * takes beside them as plan.c computes it, the same numbers that `qx run` obeys. */
#include "inspect_impl.h"

#include "backend.h"
#include "plan.h"

#include <stdio.h>
#include <string.h>

/* Static names, as parts are handed out without owner. */
static const char *weight_name(enum qx_component c)
{
    static const char *const names[QX_C_COUNT] = {
        "weights embed",
        "weights lm_head",
        "weights hyper_connections",
        "weights linear_attn",
        "weights self_attn",
        "weights router",
        "weights shared_expert",
        "weights experts",
        "weights ple",
        "ple_table",
        "weights mtp",
        "weights vision",
        "weights other",
    };
    return names[c];
}

int qx_fit(struct qx_fit *out, const struct qx_ckpt *ck, const struct qx_inspection *i,
           const struct qx_fit_request *r, struct qx_error *err)
{
    const struct inspection *x = (const struct inspection *)i;
    const struct qx_table *t = x->r ? qx_resolved_table(x->r) : NULL;
    memset(out, 0, sizeof *out);
    if (!x->c) {
        int rc = qx_ckpt_config_status(ck, err);
        return rc ? rc
                  : qx_fail(err, QX_E_CONFIG, "config-missing", "a plan needs the configuration");
    }
    if (i->n_tensors == 0 && qx_ckpt_n_files(ck) > 0) {
        return qx_fail(err, QX_E_FORMAT, "no-weights",
                       "no tensor of the files here can be read ('qx verify' says why); --layout "
                       "NAME plans from the configuration alone");
    }
    if (i->n_tensors == 0) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "there are no weights here; say for which layout to plan with --layout");
    }
    struct qx_plan_request q = {.table = r->table,
                                .device_bytes = r->device_bytes,
                                .ctx_tokens = r->ctx_tokens,
                                .max_seqs = r->n_streams ? r->n_streams : 1,
                                .draft_max = r->draft,
                                .mtp = r->draft > 0 && i->has_mtp,
                                .kv_bf16 = true,
                                .workspace_bytes = QX_CUDA_WORKSPACE_BYTES,
                                .packed_table = t && t->packed_rows};
    for (int c = 0; c < QX_C_COUNT; c++) {
        bool placed =
            c != QX_C_PLE_TABLE && c != QX_C_VISION && c != QX_C_OTHER && (c != QX_C_MTP || q.mtp);
        if (!placed || x->bytes[c] == 0) {
            continue;
        }
        q.weight_bytes += x->bytes[c];
        out->parts[out->n_parts++] =
            (struct qx_plan_part){weight_name((enum qx_component)c), "device", x->bytes[c]};
    }
    q.table_bytes = x->bytes[QX_C_PLE_TABLE];
    struct qx_plan p;
    int rc = qx_plan_make(&p, x->c, &q, err);
    if (rc) {
        return rc;
    }
    for (uint32_t k = 0; k < p.n_parts; k++) {
        if (strcmp(p.parts[k].name, "weights") != 0 && out->n_parts < QX_ARRAY_LEN(out->parts)) {
            out->parts[out->n_parts++] = p.parts[k];
        }
    }
    out->device_bytes = r->device_bytes;
    out->needed_bytes = p.device_bytes;
    out->host_bytes = p.host_bytes;
    out->ctx_tokens = p.budget.ctx_tokens;
    out->table = p.table;
    out->fits = p.fits;
    snprintf(out->advice, sizeof out->advice, "%s", p.advice);
    return 0;
}
