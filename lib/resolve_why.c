/* resolve_why.c: the reasons behind one module's format, in the order in which they were consulted.
 */
#include "resolve_impl.h"

#include "json_doc.h"
#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void line_tensor(struct qx_buf *b, const struct qx_ckpt *ck, const char *what,
                        const struct qx_tensor *t)
{
    char shape[96];
    if (!t) {
        return;
    }
    qx_buf_fmt(b, "  %-13s %s %s in ", what, qx_dtype_name((enum qx_dtype)t->dtype),
               qx_shape_text(t->shape, t->n_dims, shape));
    qx_buf_escaped(b, qx_ckpt_file(ck, t->file)->name, strlen(qx_ckpt_file(ck, t->file)->name));
    qx_buf_fmt(b, ", %" PRIu64 " bytes at %" PRIu64 "\n", t->size_bytes, t->off);
}

static void quoted(struct qx_buf *b, const char *s)
{
    qx_buf_chr(b, '\'');
    qx_buf_escaped(b, s, strlen(s));
    qx_buf_chr(b, '\'');
}

static void line_claim(struct qx_buf *b, const struct qx_quant_home *h, const struct qx_claim *c)
{
    qx_buf_fmt(b, "  %s: ", h->file);
    switch (c->kind) {
    case QX_CL_FORMAT:
        qx_buf_fmt(b, "%s, from %s", qx_format_name(c->format), qx_source_name(c->source));
        break;
    case QX_CL_IGNORED:
        qx_buf_fmt(b, "not quantised, from %s", qx_source_name(c->source));
        break;
    case QX_CL_UNKNOWN:
        qx_buf_fmt(b, "an algorithm that is not known, ");
        quoted(b, c->algo_text ? c->algo_text : "");
        break;
    case QX_CL_NONE:
        qx_buf_str(b, "nothing lists it");
        if (h->algo_text[0]) {
            qx_buf_fmt(b, "; the algorithm of the whole model (%s) does not speak about it",
                       h->algo_text);
        }
        break;
    }
    if (c->entry) {
        qx_buf_str(b, ", entry ");
        quoted(b, c->entry);
    }
    qx_buf_chr(b, '\n');
}

static void homes(struct qx_buf *b, const struct qx_resolved *r, const char *name, bool linear,
                  bool table)
{
    bool any = false;
    qx_buf_str(
        b,
        "what the configuration says (own name, then the longest prefix in quantized_layers, then "
        "the ignore list, then the algorithm of the whole model)\n");
    if (table) {
        struct qx_claim c = qx_claim_of_ple_dtype(r->c);
        qx_buf_fmt(b, "  config.json text_config.ple_embedding_dtype: %s\n",
                   c.kind == QX_CL_NONE ? "absent" : c.entry);
    }
    for (int i = 0; i < 2; i++) {
        /* Look-ups mark entries as used, which changes nothing once findings were made. */
        struct qx_quant_home *h = (struct qx_quant_home *)(uintptr_t)qx_resolved_quant(r, i);
        if (!h) {
            continue;
        }
        any = true;
        struct qx_quant_home copy = *h;
        struct qx_claim c =
            table ? qx_claim_of_table(&copy, name) : qx_claim_of(&copy, r->c, name, linear);
        line_claim(b, h, &c);
    }
    if (!any) {
        qx_buf_str(b, "  no quantisation settings\n");
    } else if (qx_resolved_quant(r, 0) && qx_resolved_quant(r, 1)) {
        qx_buf_str(b, "  both homes speak: config.json wins\n");
    }
}

static void result(struct qx_buf *b, enum qx_format format, enum qx_format form, uint32_t group,
                   enum qx_source src, const char *entry)
{
    qx_buf_fmt(b, "result\n  format %s",
               form == QX_F_NONE ? "none that is known" : qx_format_name(form));
    if (form == QX_F_FP8_BLOCK) {
        qx_buf_str(b, " 128x128");
    } else if (group) {
        qx_buf_fmt(b, " in groups of %" PRIu32, group);
    }
    if (form != QX_F_NONE && format == QX_F_NONE) {
        qx_buf_str(b, " (cannot be read: a companion is missing or does not fit)");
    }
    qx_buf_fmt(b, "\n  source %s", qx_source_name(src));
    if (entry) {
        qx_buf_str(b, ", entry ");
        quoted(b, entry);
    }
    qx_buf_chr(b, '\n');
}

static void why_module(struct qx_buf *b, const struct qx_resolved *r, const struct qx_module *m)
{
    const struct qx_ckpt *ck = r->ck;
    qx_buf_str(b, "module ");
    quoted(b, m->name);
    qx_buf_fmt(b, "\n  component %s%s\n", qx_component_name(m->component),
               m->is_linear ? ", a linear"
               : m->layout  ? ", no linear"
                            : ", not of the model family");
    qx_buf_str(b, "what is stored\n");
    line_tensor(b, ck, "weight", m->weight);
    line_tensor(b, ck, m->scale_is_inv ? "scale_inv" : "scale", m->scale);
    line_tensor(b, ck, "other scale", m->other_scale);
    line_tensor(b, ck, "scale_2", m->scale_2);
    line_tensor(b, ck, "input_scale", m->input_scale);
    line_tensor(b, ck, "bias", m->bias);
    line_tensor(b, ck, "foreign", m->foreign);
    if (!m->weight) {
        qx_buf_str(b, "  no weight\n");
    } else {
        qx_buf_fmt(b, "  by dtype, shape and companions: %s",
                   m->form == QX_F_NONE ? "no known form" : qx_format_name(m->form));
        if (m->scale_variant) {
            qx_buf_str(b, " (block scales under the name weight_scale)");
        }
        qx_buf_chr(b, '\n');
    }
    homes(b, r, m->name, m->is_linear, false);
    result(b, m->format, m->form, m->group_size, m->source, m->entry);
    if (m->is_mtp && m->expert >= 0 && m->form == QX_F_FP8_BLOCK) {
        qx_buf_str(
            b,
            "remark\n  loaders that ignore quantized_layers take MTP experts for BF16: they drop "
            "the scales, and acceptance of drafts falls to about 1.6 tokens a round\n");
    }
}

static void why_table(struct qx_buf *b, const struct qx_resolved *r)
{
    const struct qx_table *t = &r->table;
    qx_buf_str(b, "n-gram table ");
    quoted(b, t->module);
    qx_buf_fmt(b,
               "\n  component ple_table\nwhat is stored\n  %" PRIu32 " shards of %" PRIu64
               " rows (%" PRIu64 " in all), %" PRIu32 " columns\n",
               t->n_shards, t->rows_per_shard, t->n_rows, t->width);
    for (uint32_t i = 0; t->shards && i < t->n_shards; i++) {
        if (t->shards[i].weight) {
            line_tensor(b, r->ck, "first shard", t->shards[i].weight);
            line_tensor(b, r->ck, "its scale", t->shards[i].scale);
            break;
        }
    }
    line_tensor(b, r->ck, "packed rows", t->packed);
    line_tensor(b, r->ck, "one scale", t->global);
    if (t->foreign) {
        qx_buf_fmt(b, "  the form of another convention: %s\n", t->foreign);
    }
    qx_buf_fmt(b, "  by dtype, shape and companions: %s\n",
               t->form == QX_F_NONE ? "no known form" : qx_format_name(t->form));
    homes(b, r, t->module, false, true);
    result(b, t->format, t->form, qx_format_group(t->form), t->source, t->entry);
    if (t->source == QX_SRC_MAP && qx_format_quantised(t->form)) {
        qx_buf_str(b, "remark\n  only quantized_layers declares the format: loaders that look at "
                      "ple_embedding_dtype alone take the codes for BF16 or drop the scale\n");
    }
}

/* A container such as ...mlp.experts: its members, counted by format. */
static bool why_container(struct qx_buf *b, const struct qx_resolved *r, const char *name)
{
    size_t n = strlen(name);
    uint64_t count[QX_F_COUNT] = {0};
    uint64_t total = 0;
    const struct qx_module *first = NULL;
    for (size_t i = 0; i < r->n; i++) {
        const struct qx_module *m = &r->modules[i];
        if (strncmp(m->name, name, n) == 0 && m->name[n] == '.') {
            first = first ? first : m;
            count[m->form]++;
            total++;
        }
    }
    if (!first) {
        return false;
    }
    qx_buf_str(b, "container ");
    quoted(b, name);
    qx_buf_fmt(b, " of %" PRIu64 " modules:", total);
    for (int f = 0; f < QX_F_COUNT; f++) {
        if (count[f]) {
            qx_buf_fmt(b, " %" PRIu64 " %s", count[f],
                       f == QX_F_NONE ? "unknown" : qx_format_name((enum qx_format)f));
        }
    }
    qx_buf_str(b, "\nits first member:\n");
    why_module(b, r, first);
    return true;
}

static const struct qx_module *module_of_tensor(const struct qx_resolved *r, const char *name)
{
    struct qx_name nm;
    char module[512];
    qx_layout_parse(&nm, r->c, name, strlen(name));
    if (nm.module_len >= sizeof module) {
        return NULL;
    }
    memcpy(module, name, nm.module_len);
    module[nm.module_len] = '\0';
    return qx_resolved_find(r, module);
}

static void why_unresolved(struct qx_buf *b, const struct qx_ckpt *ck, const struct qx_tensor *t,
                           const char *why)
{
    qx_buf_str(b, "tensor ");
    quoted(b, t->name);
    qx_buf_chr(b, '\n');
    line_tensor(b, ck, "stored", t);
    qx_buf_fmt(b, "  %s\n", why);
}

/* Names that are listed or lie somewhere, but are not read. */
static bool why_elsewhere(struct qx_buf *b, const struct qx_ckpt *ck, const char *name)
{
    for (size_t i = 0; i < qx_ckpt_n_absent(ck); i++) {
        const struct qx_absent *a = qx_ckpt_absent(ck, i);
        if (strcmp(a->name, name) == 0) {
            quoted(b, name);
            qx_buf_str(b, "\n  the index gives it to ");
            quoted(b, a->file);
            qx_buf_fmt(b, ", which %s\n",
                       !a->file_exists   ? "does not exist"
                       : !a->file_usable ? "cannot be read"
                                         : "does not hold it");
            if (a->found_in) {
                qx_buf_fmt(b, "  a copy lies in %s and is not read\n", a->found_in);
            }
            return true;
        }
    }
    for (size_t i = 0; i < qx_ckpt_n_extras(ck); i++) {
        const struct qx_extra *e = qx_ckpt_extra(ck, i);
        if (strcmp(e->t.name, name) == 0) {
            why_unresolved(b, ck, &e->t,
                           e->superseded ? "the index gives the name to another file"
                                         : "the index does not list it: it is not read");
            return true;
        }
    }
    return false;
}

int qx_resolved_why(const struct qx_ckpt *ck, const char *name, char **text, struct qx_error *err)
{
    const struct qx_resolved *r = qx_ckpt_resolved(ck);
    const struct qx_tensor *t = qx_ckpt_find(ck, name);
    struct qx_buf b = {0};
    struct qx_name nm;
    bool found = true;
    *text = NULL;
    qx_layout_parse(&nm, qx_ckpt_config(ck), name, strlen(name));
    const struct qx_module *m = r ? qx_resolved_find(r, name) : NULL;
    m = m || !r ? m : module_of_tensor(r, name);
    bool table = r && r->table.present && nm.in_table && !nm.foreign_shard &&
                 strncmp(name, r->table.module, strlen(r->table.module)) == 0;
    table = table || (r && r->table.present && strcmp(name, r->table.module) == 0);
    if (t) {
        qx_buf_str(&b, "tensor ");
        quoted(&b, t->name);
        qx_buf_chr(&b, '\n');
        line_tensor(&b, ck, "stored", t);
    }
    if (table) {
        why_table(&b, r);
    } else if (m) {
        why_module(&b, r, m);
    } else if (t) {
        qx_buf_str(&b, r ? "  belongs to no module that is read\n"
                         : "  without a usable configuration nothing says how it is read\n");
    } else {
        found = (r && why_container(&b, r, name)) || why_elsewhere(&b, ck, name);
    }
    if (b.failed) {
        qx_buf_fini(&b);
        return qx_fail_nomem(err);
    }
    if (!found) {
        qx_buf_fini(&b);
        int rc = qx_fail(err, QX_E_NOT_FOUND, "tensor-not-found",
                         "neither a tensor, a module nor a container has the name '%.300s'", name);
        qx_error_at(err, NULL, name, QX_NO_OFF);
        return rc;
    }
    const char *s = qx_buf_cstr(&b);
    *text = s ? qx_strdup(s) : NULL;
    qx_buf_fini(&b);
    return *text ? 0 : qx_fail_nomem(err);
}

int qx_inspect_why(const struct qx_ckpt *ck, const char *name, char **text, struct qx_error *err)
{
    return qx_resolved_why(ck, name, text, err);
}
