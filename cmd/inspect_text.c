/* inspect_text.c: the summary for people. Its form may change between releases; scripts use --json.
 */
#include "inspect.h"

#include "num.h"
#include "str.h"
#include "table.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { FILES_SHOWN = 24, FINDINGS_SHOWN = 20 };

static void out(struct qx_buf *b)
{
    if (!b->failed && b->n) {
        ui_out(b->p, b->n);
    }
    qx_buf_fini(b);
}

static void word(struct qx_buf *b, const char *s)
{
    qx_buf_escaped(b, s, strlen(s));
}

static void label(struct qx_buf *b, const char *s)
{
    qx_buf_fmt(b, "%-13s ", s);
}

static void put_identity(struct qx_buf *b, const struct qx_inspection *in)
{
    char n[32];
    label(b, "model");
    if (!in->type && !in->type_found) {
        qx_buf_str(b, "unknown");
    } else {
        word(b, in->type ? in->type : "unknown");
        if (in->type_found && (!in->type || strcmp(in->type, in->type_found) != 0)) {
            qx_buf_str(b, ", model_type found ");
            word(b, in->type_found);
        }
        if (in->architecture) {
            qx_buf_str(b, ", ");
            word(b, in->architecture);
        }
    }
    qx_buf_chr(b, '\n');
    if (in->has_config) {
        label(b, "geometry");
        qx_buf_fmt(b,
                   "%" PRIu64 " layers (%" PRIu64 " linear, %" PRIu64
                   " full attention), hidden %" PRIu64 ", %" PRIu64 " experts, vocabulary %s\n",
                   in->n_layers, in->n_linear_layers, in->n_full_layers, in->hidden_size,
                   in->n_experts, qx_count_text(in->vocab_size, n));
    }
    label(b, "layout");
    qx_buf_fmt(b, "%s%s\n",
               in->layout       ? in->layout
               : in->has_config ? "none of the published ones"
                                : "unknown",
               in->planned ? " (planned: nothing is stored here)" : "");
    label(b, "quantisation");
    if (!in->has_config) {
        qx_buf_str(b, "unknown: no usable configuration\n");
        return;
    }
    if (!in->quant_file) {
        qx_buf_str(b, "no settings\n");
        return;
    }
    word(b, in->quant_method ? in->quant_method : "no method");
    if (in->quant_algo) {
        qx_buf_chr(b, ' ');
        word(b, in->quant_algo);
    }
    qx_buf_fmt(b, ", from %s", in->quant_file);
    if (in->kv_cache_algo) {
        qx_buf_str(b, ", KV cache ");
        word(b, in->kv_cache_algo);
    }
    qx_buf_chr(b, '\n');
}

static const char *state_text(enum qx_file_state s)
{
    switch (s) {
    case QX_FILE_OK:
        return "";
    case QX_FILE_SHORT:
        return "cut short";
    case QX_FILE_BAD:
        return "header unusable";
    case QX_FILE_MISSING:
        return "missing";
    case QX_FILE_REFUSED:
        return "refused";
    }
    return "";
}

static void put_files(const struct inspect_job *j)
{
    static const struct table_col cols[] = {{"file", false, true},
                                            {"tensors", true, false},
                                            {"bytes", true, false},
                                            {"header", true, false},
                                            {"", false, false}};
    size_t n = qx_ckpt_n_files(j->ck);
    size_t shown = j->ui.verbose || n <= FILES_SHOWN ? n : FILES_SHOWN;
    struct table t;
    char a[32];
    char c[32];
    char h[32];
    table_init(&t, cols, QX_ARRAY_LEN(cols));
    for (size_t i = 0; i < shown; i++) {
        const struct qx_file *f = qx_ckpt_file(j->ck, i);
        table_cell(&t, "%s", f->name);
        table_cell(&t, "%s", qx_count_text(f->n_tensors, a));
        table_cell(&t, "%s", qx_count_text(f->size_bytes, c));
        table_cell(&t, "%s", qx_count_text(f->header_bytes, h));
        table_cell(&t, "%s", state_text(f->state));
    }
    ui_out_str("\n");
    table_print(&t, &j->ui, 0);
    table_fini(&t);
    if (shown < n) {
        struct qx_buf b = {0};
        qx_buf_fmt(&b, "... and %zu more files (-v shows all)\n", n - shown);
        out(&b);
    }
}

static void put_metadata(const struct inspect_job *j)
{
    struct qx_buf b = {0};
    for (size_t i = 0; i < qx_ckpt_n_files(j->ck); i++) {
        const struct qx_file *f = qx_ckpt_file(j->ck, i);
        if (f->state != QX_FILE_OK && f->state != QX_FILE_SHORT) {
            continue;
        }
        qx_buf_str(&b, i == 0 ? "\n__metadata__ of " : "__metadata__ of ");
        word(&b, f->name);
        qx_buf_str(&b, !f->has_metadata ? ": none\n" : f->n_meta == 0 ? ": empty\n" : "\n");
        for (uint32_t k = 0; k < f->n_meta; k++) {
            qx_buf_str(&b, "  ");
            word(&b, f->meta[k].key);
            qx_buf_str(&b, " = ");
            word(&b, f->meta[k].value);
            qx_buf_chr(&b, '\n');
        }
    }
    out(&b);
}

static void put_dtypes(const struct inspect_job *j)
{
    static const struct table_col cols[] = {{"dtype", false, false},
                                            {"tensors", true, false},
                                            {"elements", true, false},
                                            {"bytes", true, false}};
    struct table t;
    char a[32];
    char e[32];
    char c[32];
    table_init(&t, cols, QX_ARRAY_LEN(cols));
    for (size_t i = 0; i < j->in->n_dtypes; i++) {
        const struct qx_dtype_total *d = &j->in->dtypes[i];
        table_cell(&t, "%s", d->dtype);
        table_cell(&t, "%s", qx_count_text(d->n_tensors, a));
        table_cell(&t, "%s", qx_count_text(d->n_elems, e));
        table_cell(&t, "%s", qx_count_text(d->size_bytes, c));
    }
    ui_out_str("\n");
    table_print(&t, &j->ui, 0);
    table_fini(&t);
}

/* "FP8_BLOCK 128x128", "NVFP4/16" */
static void format_text(const char *format, char out_text[40])
{
    if (!format) {
        snprintf(out_text, 40, "-");
    } else if (strcmp(format, "FP8_BLOCK") == 0) {
        snprintf(out_text, 40, "FP8_BLOCK 128x128");
    } else if (strcmp(format, "NVFP4") == 0 || strcmp(format, "W4A16_NVFP4") == 0) {
        snprintf(out_text, 40, "%s/16", format);
    } else if (strcmp(format, "MXFP8") == 0) {
        snprintf(out_text, 40, "MXFP8/32");
    } else {
        snprintf(out_text, 40, "%s", format);
    }
}

static void put_components(const struct inspect_job *j)
{
    static const struct table_col cols[] = {{"component", false, false}, {"tensors", true, false},
                                            {"parameters", true, false}, {"bytes", true, false},
                                            {"GiB", true, false},        {"format", false, false},
                                            {"source", false, false}};
    const struct qx_inspection *in = j->in;
    struct table t;
    char a[32];
    char p[32];
    char c[32];
    char f[40];
    table_init(&t, cols, QX_ARRAY_LEN(cols));
    for (size_t i = 0; i <= in->n_components; i++) {
        const struct qx_component_total *x = i < in->n_components ? &in->components[i] : NULL;
        uint64_t bytes = x ? x->size_bytes : in->payload_bytes;
        format_text(x ? x->format : NULL, f);
        table_cell(&t, "%s", x ? x->name : "total");
        table_cell(&t, "%s", qx_count_text(x ? x->n_tensors : in->n_tensors, a));
        table_cell(&t, "%s", qx_count_text(x ? x->n_params : in->n_params, p));
        table_cell(&t, "%s", qx_count_text(bytes, c));
        table_cell(&t, "%.3f", (double)bytes / 1073741824.0);
        table_cell(&t, "%s", x ? f : "");
        table_cell(&t, "%s", x ? (x->source ? x->source : "-") : "");
    }
    ui_out_str("\n");
    table_print(&t, &j->ui, 0);
    table_fini(&t);
}

static void put_formats(const struct inspect_job *j)
{
    static const struct table_col cols[] = {{"stored as", false, false},
                                            {"in", false, false},
                                            {"modules", true, false},
                                            {"parameters", true, false},
                                            {"bits/parameter", true, false}};
    const struct qx_inspection *in = j->in;
    struct table t;
    char m[32];
    char p[32];
    char f[40];
    if (in->n_formats == 0) {
        return;
    }
    table_init(&t, cols, QX_ARRAY_LEN(cols));
    for (size_t i = 0; i < in->n_formats; i++) {
        const struct qx_format_total *x = &in->formats[i];
        format_text(x->format, f);
        table_cell(&t, "%s", f);
        table_cell(&t, "%s", x->component);
        table_cell(&t, "%s", qx_count_text(x->n_modules, m));
        table_cell(&t, "%s", qx_count_text(x->n_params, p));
        if (x->n_params) {
            table_cell(&t, "%.2f", (double)x->code_bytes * 8.0 / (double)x->n_params);
        } else {
            table_cell(&t, "-");
        }
    }
    ui_out_str("\n");
    table_print(&t, &j->ui, 0);
    table_fini(&t);
}

static void put_list(struct qx_buf *b, const char *what, const uint64_t *v, uint32_t n)
{
    label(b, "");
    qx_buf_fmt(b, "%s", what);
    for (uint32_t i = 0; i < n; i++) {
        qx_buf_fmt(b, " %" PRIu64, v[i]);
    }
    qx_buf_chr(b, '\n');
}

static void put_ple(struct qx_buf *b, const struct qx_inspection *in)
{
    const struct qx_ple_info *p = &in->ple;
    char n[32];
    char m[32];
    if (!p->present) {
        return;
    }
    label(b, "n-gram table");
    qx_buf_fmt(b,
               "layer %" PRIu32 ", %s, %s rows (%s addressed) of %" PRIu32 " = %" PRIu32
               " / %" PRIu32 " heads",
               p->layer_index, p->form ? p->form : "no readable form", qx_count_text(p->n_rows, n),
               qx_count_text(p->n_rows_used, m), p->row_width, p->embed_dim, p->n_heads);
    if (p->n_shards) {
        qx_buf_fmt(b, ", %" PRIu32 " shards of %s", p->n_shards,
                   qx_count_text(p->rows_per_shard, n));
        if (p->rows_per_shard && p->n_rows % p->rows_per_shard) {
            qx_buf_fmt(b, ", the last of %s", qx_count_text(p->n_rows % p->rows_per_shard, n));
        }
    }
    qx_buf_chr(b, '\n');
    if (p->scale_tensor) {
        label(b, "");
        qx_buf_fmt(b, "scale %s ", p->scale_dtype);
        if (p->has_scale) {
            qx_buf_fmt(b, "%.9g", p->scale);
        } else {
            qx_buf_str(b, "(cannot be read)");
        }
        qx_buf_chr(b, '\n');
    }
    put_list(b, "head sizes ", p->head_sizes, p->n_heads);
    put_list(b, "multipliers", p->multipliers, p->ngram_size);
}

static void put_finding(struct qx_buf *b, const struct ui *ui, const struct qx_finding *f)
{
    static const char *const severity[] = {"note", "warning", "error"};
    static const enum ui_style style[] = {UI_DIM, UI_YELLOW, UI_RED};
    qx_buf_fmt(b, "%s%s%s %s: ", ui_style(ui->color_out, style[f->severity]), severity[f->severity],
               ui_style(ui->color_out, UI_PLAIN), f->kind);
    word(b, f->text ? f->text : "");
    const char *const place[] = {f->tensor, f->tensor ? NULL : f->key, f->file};
    const char *sep = " (";
    for (size_t i = 0; i < QX_ARRAY_LEN(place); i++) {
        if (place[i] && place[i][0]) {
            qx_buf_str(b, sep);
            word(b, place[i]);
            sep = ", ";
        }
    }
    if (f->count > 1) {
        qx_buf_fmt(b, "%s%" PRIu64 " in all", sep, f->count);
        sep = ", ";
    }
    qx_buf_str(b, sep[0] == ',' ? ")\n" : "\n");
}

static void put_findings(struct qx_buf *b, const struct inspect_job *j)
{
    const struct qx_findings *fs = j->in->findings;
    size_t n = qx_findings_count(fs);
    if (n) {
        qx_buf_chr(b, '\n');
    }
    for (size_t i = 0; i < n;) {
        const struct qx_finding *f = qx_findings_at(fs, i);
        size_t end = i;
        while (end < n && strcmp(qx_findings_at(fs, end)->kind, f->kind) == 0 &&
               qx_findings_at(fs, end)->severity == f->severity) {
            end++;
        }
        size_t shown = j->ui.verbose || end - i <= FINDINGS_SHOWN ? end : i + FINDINGS_SHOWN - 1;
        for (size_t k = i; k < shown; k++) {
            put_finding(b, &j->ui, qx_findings_at(fs, k));
        }
        if (shown < end) {
            qx_buf_fmt(b, "... and %zu more of %s\n", end - shown, f->kind);
        }
        i = end;
    }
}

/* What lies on the host counts, too, where host and device share one memory. */
static void put_shared(struct qx_buf *b, const struct qx_fit *f)
{
    uint64_t all = f->needed_bytes + f->host_bytes, table = 0;
    char n[32];
    qx_buf_fmt(b, ", %s on the host", qx_size_text(f->host_bytes, n));
    qx_buf_fmt(b, " (%s where both are one memory", qx_size_text(all, n));
    for (uint32_t i = 0; i < f->n_parts; i++) {
        if (strcmp(f->parts[i].name, "ple_table") == 0 && strcmp(f->parts[i].place, "host") == 0) {
            table = f->parts[i].size_bytes;
        }
    }
    if (f->fits && all > f->device_bytes) {
        qx_buf_str(b, ": too much there");
        if (table && all - table <= f->device_bytes) {
            qx_buf_fmt(b, "; --table disk takes %s", qx_size_text(all - table, n));
        }
    }
    qx_buf_chr(b, ')');
}

static void put_fit(const struct inspect_job *j)
{
    static const struct table_col cols[] = {
        {"part", false, false}, {"place", false, false}, {"bytes", true, false}, {"", true, false}};
    const struct qx_fit *f = j->fit;
    struct table t;
    struct qx_buf b = {0};
    char n[32];
    char m[32];
    table_init(&t, cols, QX_ARRAY_LEN(cols));
    for (uint32_t i = 0; i < f->n_parts; i++) {
        table_cell(&t, "%s", f->parts[i].name);
        table_cell(&t, "%s", f->parts[i].place);
        table_cell(&t, "%s", qx_count_text(f->parts[i].size_bytes, n));
        table_cell(&t, "%s", qx_size_text(f->parts[i].size_bytes, m));
    }
    ui_out_str("\n");
    table_print(&t, &j->ui, 0);
    table_fini(&t);
    label(&b, "fit");
    qx_buf_fmt(&b, "%s: %s of %s on the device for %" PRIu64 " tokens of context",
               f->fits ? "yes" : "no", qx_size_text(f->needed_bytes, n),
               qx_size_text(f->device_bytes, m), f->ctx_tokens);
    if (f->host_bytes) {
        put_shared(&b, f);
    }
    if (f->advice[0]) {
        qx_buf_fmt(&b, "; %s", f->advice);
    }
    qx_buf_chr(&b, '\n');
    out(&b);
}

/* Without --fit: what a plan would begin with. */
static void put_fit_hint(struct qx_buf *b, const struct qx_inspection *in)
{
    uint64_t table = 0;
    uint64_t weights = 0;
    char n[32];
    char m[32];
    for (size_t i = 0; i < in->n_components; i++) {
        const struct qx_component_total *c = &in->components[i];
        if (strcmp(c->name, "ple_table") == 0) {
            table = c->size_bytes;
        } else if (strcmp(c->name, "vision") != 0 && strcmp(c->name, "mtp") != 0 &&
                   strcmp(c->name, "other") != 0) {
            weights += c->size_bytes;
        }
    }
    if (!in->has_config || in->n_tensors == 0) {
        return;
    }
    label(b, "memory");
    qx_buf_fmt(b, "weights %s, n-gram table %s; --fit DEVICE says whether it fits\n",
               qx_size_text(weights, n), qx_size_text(table, m));
}

void inspect_print_text(const struct inspect_job *j)
{
    const struct qx_inspection *in = j->in;
    struct qx_buf b = {0};
    char n[32];
    char m[32];
    label(&b, "path");
    word(&b, j->path);
    qx_buf_chr(&b, '\n');
    put_identity(&b, in);
    if (!in->planned) {
        label(&b, "files");
        qx_buf_fmt(&b, "%zu%s, %s bytes\n", qx_ckpt_n_files(j->ck),
                   qx_ckpt_has_index(j->ck) ? " named by the index" : "",
                   qx_count_text(in->file_bytes, n));
    }
    label(&b, "tensors");
    qx_buf_fmt(&b, "%s, ", qx_count_text(in->n_tensors, n));
    qx_buf_fmt(&b, "%s bytes (%s), ", qx_count_text(in->payload_bytes, n),
               qx_size_text(in->payload_bytes, m));
    qx_buf_fmt(&b, "%s parameters\n", qx_count_text(in->n_params, n));
    put_ple(&b, in);
    label(&b, "MTP head");
    char f[40];
    format_text(in->mtp_format, f);
    qx_buf_fmt(&b, "%s\n", in->has_mtp ? f : "none");
    out(&b);
    if (!in->planned) {
        put_files(j);
        if (j->ui.verbose) {
            put_metadata(j);
        }
        put_dtypes(j);
    }
    put_components(j);
    put_formats(j);
    memset(&b, 0, sizeof b);
    for (size_t i = 0; i < in->n_remarks; i++) {
        qx_buf_str(&b, i == 0 ? "\n" : "");
        qx_buf_fmt(&b, "remark: %s\n", in->remarks[i]);
    }
    put_findings(&b, j);
    if (!j->fit) {
        qx_buf_chr(&b, '\n');
        put_fit_hint(&b, in);
    }
    out(&b);
    if (j->fit) {
        put_fit(j);
    }
}
