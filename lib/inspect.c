/* inspect.c: owns the summary of a checkpoint that `qx inspect` shows: totals, formats by module
 * and component, the table, findings. Works from headers; only the table's scale is read. */
#include "inspect_impl.h"

#include "findings.h"
#include "ple_open.h"
#include "rows.h"
#include "rules.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- small helpers --------------------------------------------------------------------------- */

static const char *or_null(const char *s)
{
    return s && s[0] ? s : NULL;
}

static bool take(struct inspection *x, void **out, size_t n, size_t size)
{
    size_t bytes;
    *out = NULL;
    if (n == 0) {
        return true;
    }
    if (!qx_mul_size(n, size, &bytes)) {
        return false;
    }
    *out = qx_arena_alloc(x->arena, bytes, 16);
    if (*out) {
        memset(*out, 0, bytes);
    }
    return *out != NULL;
}

const char *inspect_keep(struct inspection *x, const char *s)
{
    char *p = s ? qx_arena_strndup(x->arena, s, strlen(s)) : NULL;
    if (s && !p) {
        x->nomem = true;
    }
    return p;
}

/* ---- totals ---------------------------------------------------------------------------------- */

static void count_tensors(struct inspection *x)
{
    struct qx_dtype_total by[QX_DT_COUNT] = {{0}};
    const struct qx_ckpt *ck = x->ck;
    for (size_t i = 0; i < qx_ckpt_n_tensors(ck); i++) {
        const struct qx_tensor *t = qx_ckpt_tensor(ck, i);
        struct qx_name nm;
        qx_layout_parse(&nm, x->c, t->name, t->name_len);
        x->tensors[nm.component]++;
        x->bytes[nm.component] += t->size_bytes;
        by[t->dtype].n_tensors++;
        by[t->dtype].n_elems += t->n_elems;
        by[t->dtype].size_bytes += t->size_bytes;
        x->pub.payload_bytes += t->size_bytes;
        x->present[t->dtype][nm.component] = true;
    }
    x->pub.n_tensors = qx_ckpt_n_tensors(ck);
    size_t n = 0;
    for (size_t d = 0; d < QX_DT_COUNT; d++) {
        if (by[d].n_tensors) {
            by[d].dtype = qx_dtype_name((enum qx_dtype)d);
            x->dtypes[n++] = by[d];
        }
    }
    x->pub.dtypes = x->dtypes;
    x->pub.n_dtypes = n;
    for (size_t i = 0; i < qx_ckpt_n_files(ck); i++) {
        x->pub.file_bytes += qx_ckpt_file(ck, i)->size_bytes;
    }
}

static void add_format(struct inspection *x, enum qx_component c, enum qx_format f,
                       uint64_t modules, uint64_t params, uint64_t bytes, enum qx_source src,
                       bool linear)
{
    struct cell *cell = &x->cells[c][f];
    cell->modules += modules;
    cell->params += params;
    cell->bytes += bytes;
    x->params[c] += params;
    /* Which source stands for a component: that of the linears where there are any, by weight. */
    cell->by_source[linear][src] += bytes ? bytes : 1;
}

static void count_modules(struct inspection *x)
{
    const struct qx_resolved *r = x->r;
    for (size_t i = 0; r && i < qx_resolved_n_modules(r); i++) {
        const struct qx_module *m = qx_resolved_module(r, i);
        uint64_t params = 0;
        if (m->bias) {
            x->params[m->component] += m->bias->n_elems;
        }
        if (!m->weight) {
            continue;
        }
        params = m->weight->n_elems * (m->weight->dtype == QX_DT_U8 && !m->foreign ? 2 : 1);
        uint64_t bytes = m->weight->size_bytes;
        if (qx_format_quantised(m->form) && m->form != QX_F_FP8 && m->scale) {
            bytes += m->scale->size_bytes;
        }
        if (m->form == QX_F_FP8 && m->scale && m->scale->n_elems > 1) {
            bytes += m->scale->size_bytes;
        }
        add_format(x, m->component, m->form, 1, params, bytes, m->source, m->is_linear);
    }
    const struct qx_table *t = r ? qx_resolved_table(r) : NULL;
    if (t && t->present) {
        uint64_t bytes = x->bytes[QX_C_PLE_TABLE];
        bytes -= t->global ? t->global->size_bytes : 0;
        add_format(x, QX_C_PLE_TABLE, t->form, 1, t->n_rows * t->width, bytes, t->source, true);
    }
}

/* The one quantised format of a component, the plain one if there is none, mixed if several. */
static enum qx_format component_format(const struct inspection *x, enum qx_component c)
{
    enum qx_format found = QX_F_NONE;
    for (int quantised = 1; quantised >= 0 && found == QX_F_NONE; quantised--) {
        for (int f = QX_F_BF16; f < QX_F_MIXED; f++) {
            if (f == QX_F_I64 || qx_format_quantised((enum qx_format)f) != (quantised == 1) ||
                x->cells[c][f].modules == 0) {
                continue;
            }
            found = found == QX_F_NONE ? (enum qx_format)f : QX_F_MIXED;
        }
    }
    if (found == QX_F_NONE && x->cells[c][QX_F_I64].modules) {
        found = QX_F_I64;
    }
    return found;
}

static enum qx_source component_source(const struct inspection *x, enum qx_component c,
                                       enum qx_format f)
{
    uint64_t w[QX_SRC_STORAGE + 1] = {0};
    for (int linear = 1; linear >= 0; linear--) {
        uint64_t best = 0;
        enum qx_source src = QX_SRC_DEFAULT;
        memset(w, 0, sizeof w);
        for (int g = QX_F_BF16; g < QX_F_MIXED; g++) {
            bool counts = f == QX_F_MIXED ? qx_format_quantised((enum qx_format)g) : g == (int)f;
            for (int s = 0; counts && s <= QX_SRC_STORAGE; s++) {
                w[s] += x->cells[c][g].by_source[linear][s];
            }
        }
        for (int s = 0; s <= QX_SRC_STORAGE; s++) {
            if (w[s] > best) {
                best = w[s];
                src = (enum qx_source)s;
            }
        }
        if (best) {
            return src;
        }
    }
    return QX_SRC_DEFAULT;
}

static void fill_components(struct inspection *x)
{
    size_t n = 0;
    size_t k = 0;
    for (int c = 0; c < QX_C_COUNT; c++) {
        if (x->tensors[c] == 0) {
            continue;
        }
        struct qx_component_total *t = &x->components[n++];
        enum qx_format f = component_format(x, (enum qx_component)c);
        t->name = qx_component_name((enum qx_component)c);
        t->n_tensors = x->tensors[c];
        t->size_bytes = x->bytes[c];
        t->n_params = x->params[c];
        x->pub.n_params += t->n_params;
        if (f != QX_F_NONE) {
            t->format = qx_format_name(f);
            t->source = qx_source_name(component_source(x, (enum qx_component)c, f));
        }
        if (c == QX_C_MTP) {
            x->pub.has_mtp = true;
            x->pub.mtp_format = t->format;
        }
        for (int g = QX_F_BF16; g < QX_F_MIXED; g++) {
            const struct cell *cell = &x->cells[c][g];
            if (cell->modules) {
                x->formats[k++] =
                    (struct qx_format_total){t->name, qx_format_name((enum qx_format)g),
                                             cell->modules, cell->params, cell->bytes};
            }
        }
    }
    x->pub.components = x->components;
    x->pub.n_components = n;
    x->pub.formats = x->formats;
    x->pub.n_formats = k;
}

/* ---- modules --------------------------------------------------------------------------------- */

static bool shown(const struct qx_module *m)
{
    if (m->form == QX_F_NONE || m->spelling != QX_SP_DISK) {
        return false;
    }
    return m->is_linear || m->component == QX_C_EMBED || qx_format_quantised(m->form);
}

static bool agree(const struct qx_module *a, const struct qx_module *b)
{
    return a->form == b->form && a->source == b->source && a->group_size == b->group_size &&
           (a->entry == b->entry || (a->entry && b->entry && strcmp(a->entry, b->entry) == 0));
}

static void put_module(struct inspection *x, const char *name, enum qx_format f, uint32_t group,
                       enum qx_source src, const char *entry, uint64_t members)
{
    if (!qx_grow((void **)&x->modules, &x->modules_cap, x->pub.n_modules + 1, sizeof *x->modules)) {
        x->nomem = true;
        return;
    }
    x->modules[x->pub.n_modules++] = (struct qx_module_info){
        name, qx_format_name(f), qx_source_name(src), entry, group, members};
}

/* Lists modules; the experts of a layer as one line when they agree. Modules are sorted by name, so
 * the experts of a layer follow one another. */
static void fill_modules(struct inspection *x)
{
    size_t n = x->r ? qx_resolved_n_modules(x->r) : 0;
    const struct qx_table *t = x->r ? qx_resolved_table(x->r) : NULL;
    bool table_due = t && t->present && t->form != QX_F_NONE;
    for (size_t i = 0; i < n;) {
        const struct qx_module *m = qx_resolved_module(x->r, i);
        if (table_due && strcmp(t->module, m->name) < 0) {
            put_module(x, t->module, t->form, qx_format_group(t->form), t->source, t->entry, 1);
            table_due = false;
        }
        const char *p = strstr(m->name, ".mlp.experts.");
        if (!p) {
            if (shown(m)) {
                put_module(x, m->name, m->form, m->group_size, m->source, m->entry, 1);
            }
            i++;
            continue;
        }
        size_t len = (size_t)(p - m->name) + 13;
        const struct qx_module *first = NULL;
        bool same = true;
        size_t end = i;
        uint64_t members = 0;
        for (; end < n; end++) {
            const struct qx_module *o = qx_resolved_module(x->r, end);
            if (strncmp(o->name, m->name, len) != 0) {
                break;
            }
            if (shown(o)) {
                first = first ? first : o;
                same = same && agree(first, o);
                members++;
            }
        }
        if (first && same) {
            char name[256];
            snprintf(name, sizeof name, "%.*s", (int)(len - 1), m->name);
            put_module(x, inspect_keep(x, name), first->form, first->group_size, first->source,
                       first->entry, members);
        } else {
            for (size_t k = i; k < end; k++) {
                const struct qx_module *o = qx_resolved_module(x->r, k);
                if (shown(o)) {
                    put_module(x, o->name, o->form, o->group_size, o->source, o->entry, 1);
                }
            }
        }
        i = end;
    }
    if (table_due) {
        put_module(x, t->module, t->form, qx_format_group(t->form), t->source, t->entry, 1);
    }
    x->pub.modules = x->modules;
}

/* ---- table, layout, remarks ------------------------------------------------------------------ */

static void fill_ple(struct inspection *x)
{
    struct qx_ple_info *p = &x->pub.ple;
    const struct qx_config *c = x->c;
    const struct qx_table *t = x->r ? qx_resolved_table(x->r) : NULL;
    if (!c || c->n_ple_layers == 0) {
        return;
    }
    if (!t || !t->present || qx_ple_hash_open(&x->hash, x->ck, NULL) != 0) {
        if (qx_ple_hash_init(&x->hash, c, 0, NULL) != 0) {
            return;
        }
    }
    p->present = true;
    p->layer_index = c->ple_layer[0];
    p->row_width = c->ple_row_width;
    p->embed_dim = c->ple_embed_dim;
    p->n_heads = x->hash.n_heads;
    p->ngram_size = x->hash.ngram_size;
    p->n_rows_used = x->hash.n_rows;
    p->head_sizes = x->hash.size;
    p->head_offsets = x->hash.offset;
    p->multipliers = x->hash.multiplier;
    p->n_rows = x->hash.n_rows_padded;
    p->n_shards = c->split_ngram_parts <= UINT32_MAX ? (uint32_t)c->split_ngram_parts : 0;
    p->rows_per_shard = p->n_shards ? qx_ceil_div(p->n_rows, p->n_shards) : 0;
    if (!t || !t->present) {
        return;
    }
    p->n_rows = t->n_rows;
    p->n_shards = t->n_shards;
    p->rows_per_shard = t->rows_per_shard;
    p->size_bytes = x->bytes[QX_C_PLE_TABLE];
    p->form = t->form == QX_F_NONE ? NULL : qx_format_name(t->form);
    if (t->global) {
        float scale;
        p->scale_dtype = qx_dtype_name((enum qx_dtype)t->global->dtype);
        p->scale_tensor = t->global->name;
        if (qx_read_scalar(x->ck, t->global, &scale, NULL) == 0) {
            p->has_scale = true;
            p->scale = scale;
        }
    }
}

static void fill_layout(struct inspection *x)
{
    enum qx_format experts = component_format(x, QX_C_EXPERTS);
    enum qx_format mtp = component_format(x, QX_C_MTP);
    enum qx_format table = component_format(x, QX_C_PLE_TABLE);
    const struct qx_quant_home *q = x->r ? qx_resolved_quant_used(x->r) : NULL;
    bool any = false;
    for (int c = 0; c < QX_C_COUNT; c++) {
        for (int f = 0; f < QX_F_MIXED; f++) {
            any = any || (qx_format_quantised((enum qx_format)f) && x->cells[c][f].modules);
        }
    }
    if (!x->r || x->pub.n_tensors == 0) {
        return;
    }
    if (!any) {
        x->pub.layout = "bf16";
    } else if (experts == QX_F_FP8_BLOCK) {
        x->pub.layout = "fp8";
    } else if (experts == QX_F_NVFP4 && table == QX_F_NVFP4) {
        x->pub.layout = "nvfp4-ple";
    } else if (experts == QX_F_NVFP4 && table == QX_F_FP8) {
        bool mixed = mtp == QX_F_FP8_BLOCK || (q && q->algo == QX_A_MIXED);
        x->pub.layout = mixed ? "mixed" : "nvfp4";
    }
}

static void remark(struct inspection *x, const char *text)
{
    if (x->pub.n_remarks < QX_ARRAY_LEN(x->remarks)) {
        x->remarks[x->pub.n_remarks++] = text;
    }
    x->pub.remarks = x->remarks;
}

/* The two situations in which other loaders go wrong without a message (formats 8.2, model 16). */
static void fill_remarks(struct inspection *x)
{
    const struct qx_table *t = x->r ? qx_resolved_table(x->r) : NULL;
    if (!t) {
        return;
    }
    if (t->present && qx_format_quantised(t->form) && t->source == QX_SRC_MAP) {
        remark(
            x,
            "the n-gram table's format is declared by quantized_layers alone: a loader that looks "
            "only at ple_embedding_dtype takes its codes for BF16 or drops its scale");
    }
    for (size_t i = 0; i < qx_resolved_n_modules(x->r); i++) {
        const struct qx_module *m = qx_resolved_module(x->r, i);
        if (m->is_mtp && m->expert >= 0 && m->form == QX_F_FP8_BLOCK && m->source == QX_SRC_MAP) {
            remark(
                x,
                "the MTP experts are block FP8 and only the map says so: a loader that ignores the "
                "map drops their scales, and acceptance of drafts falls to about 1.6 tokens a "
                "round");
            break;
        }
    }
}

/* ---- findings -------------------------------------------------------------------------------- */

static int fill_findings(struct inspection *x, struct qx_error *err)
{
    const struct qx_findings *opened = qx_ckpt_findings(x->ck);
    struct qx_error why = {0};
    bool usable = qx_ckpt_is_single_file(x->ck) || qx_ckpt_config_status(x->ck, &why) == 0;
    x->findings = qx_findings_create();
    if (!x->findings) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < qx_findings_count(opened); i++) {
        const struct qx_finding *f = qx_findings_at(opened, i);
        /* What stops other commands is here a warning: the files are shown all the same. */
        bool lower =
            !usable && f->severity == QX_ERROR && why.kind && strcmp(why.kind, f->kind) == 0;
        enum qx_severity sev = lower ? QX_WARNING : f->severity;
        /* A file cut right after its header is all that this command needs. */
        bool cut = strcmp(f->kind, "truncated") == 0 && f->file && inspect_is_cut(x->ck, f->file);
        struct qx_report r = QX_REPORT(
            cut ? "data-absent" : f->kind, cut ? QX_NOTE : sev, .file = f->file,
            .tensor = f->tensor, .key = f->key, .expected = f->expected, .found = f->found,
            .text = cut ? "the file ends with its header: tensors are listed, "
                          "their data is absent"
                        : f->text,
            .count = f->count);
        r.off = f->off;
        qx_findings_add(x->findings, &r);
    }
    if (x->r && !x->pub.planned && qx_ckpt_n_files(x->ck) > 0) {
        int rc = qx_rules_headers(x->ck, x->findings, err);
        rc = rc ? rc : qx_rules_scale_headers(x->ck, x->findings, err);
        if (rc) {
            return rc;
        }
    }
    if (qx_findings_failed(x->findings)) {
        return qx_fail_nomem(err);
    }
    qx_findings_sort(x->findings);
    x->pub.findings = x->findings;
    return 0;
}

bool inspect_is_cut(const struct qx_ckpt *ck, const char *file)
{
    for (size_t i = 0; i < qx_ckpt_n_files(ck); i++) {
        const struct qx_file *f = qx_ckpt_file(ck, i);
        if (strcmp(f->name, file) == 0) {
            return f->state == QX_FILE_SHORT && f->size_bytes == f->data_off;
        }
    }
    return false;
}

/* ---- all
 * ------------------------------------------------------------------------------------------------
 */

static void fill_identity(struct inspection *x)
{
    const struct qx_blob *b = qx_ckpt_config_text(x->ck);
    if (x->c) {
        x->identity = *x->c;
    } else if (!qx_ckpt_is_single_file(x->ck) && b && b->present) {
        /* A configuration that cannot be used still says what it is. */
        qx_config_parse(&x->identity, b->text, b->n, "config.json", NULL, NULL);
    }
    x->pub.has_config = x->c != NULL;
    x->pub.type = or_null(x->identity.type);
    x->pub.type_found = or_null(x->identity.type_found);
    x->pub.architecture = or_null(x->identity.architecture);
    if (!x->c) {
        return;
    }
    x->pub.n_layers = x->c->n_layers;
    for (uint32_t i = 0; i < x->c->n_layers; i++) {
        *(x->c->layer_type[i] == QX_LAYER_QSA ? &x->pub.n_full_layers : &x->pub.n_linear_layers) +=
            1;
    }
    x->pub.hidden_size = x->c->hidden_size;
    x->pub.n_experts = x->c->n_experts;
    x->pub.vocab_size = x->c->vocab_size;
    const struct qx_quant_home *q = x->r ? qx_resolved_quant_used(x->r) : NULL;
    if (q) {
        x->pub.quant_method = or_null(q->method);
        x->pub.quant_algo = or_null(q->algo_text);
        x->pub.quant_file = q->file;
        x->pub.kv_cache_algo = or_null(q->kv_cache);
    }
}

int qx_inspect(struct qx_inspection **out, const struct qx_ckpt *ck, const char *layout,
               struct qx_error *err)
{
    *out = NULL;
    struct inspection *x = qx_calloc(1, sizeof *x);
    if (!x) {
        return qx_fail_nomem(err);
    }
    void *p = NULL;
    int rc = 0;
    x->ck = ck;
    x->c = qx_ckpt_config(ck);
    x->r = qx_ckpt_resolved(ck);
    x->arena = qx_arena_create();
    if (!x->arena || !take(x, &p, QX_C_COUNT * QX_F_COUNT, sizeof *x->formats)) {
        rc = qx_fail_nomem(err);
        goto out;
    }
    x->formats = p;
    fill_identity(x);
    if (qx_ckpt_n_tensors(ck) == 0 && layout) {
        rc = inspect_plan_layout(x, layout, err);
        if (rc) {
            goto out;
        }
    } else {
        count_tensors(x);
        count_modules(x);
        fill_modules(x);
    }
    fill_components(x);
    fill_ple(x);
    if (x->pub.planned) {
        x->pub.ple.size_bytes = x->bytes[QX_C_PLE_TABLE];
        x->pub.ple.form = qx_format_name(component_format(x, QX_C_PLE_TABLE));
    } else {
        fill_layout(x);
        fill_remarks(x);
    }
    rc = x->nomem ? qx_fail_nomem(err) : fill_findings(x, err);
out:
    if (rc) {
        qx_inspection_free(&x->pub);
        return rc;
    }
    *out = &x->pub;
    return 0;
}

void qx_inspection_free(struct qx_inspection *i)
{
    struct inspection *x = (struct inspection *)i; /* pub is the first member */
    if (x) {
        qx_findings_destroy(x->findings);
        qx_free(x->modules);
        qx_arena_destroy(x->arena);
        qx_free(x);
    }
}
