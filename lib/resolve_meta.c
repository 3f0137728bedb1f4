/* resolve_meta.c: what the configuration says about every module, and where that disagrees with
 * what is stored. Storage has decided how a module is read; here only `source`, `entry` and
 * findings follow. */
#include "resolve_impl.h"

#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* ---- claims ---------------------------------------------------------------------------------- */

static struct qx_claim entry_claim(struct qx_quant_entry *e)
{
    struct qx_claim cl = {.kind = QX_CL_UNKNOWN,
                          .source = QX_SRC_MAP,
                          .entry = e->key,
                          .algo_text = e->algo_text,
                          .group_size = e->group_size};
    e->used = true;
    cl.format = qx_algo_format(e->algo);
    if (cl.format != QX_F_NONE) {
        cl.kind = QX_CL_FORMAT;
    }
    return cl;
}

/* Module names can carry the run-time number of the MTP layer; keys were rewritten, so are names
 * here. */
static struct qx_norm module_norm(const struct qx_config *c, const char *name, char buf[320])
{
    size_t n = strlen(name);
    char head[32];
    int h = snprintf(head, sizeof head, "mtp.layers.%" PRIu32 ".", c ? c->n_layers : 0);
    if (name[0] == 'm' && name[1] == 't' && h > 0 && strncmp(name, head, (size_t)h) == 0 &&
        n < 300) {
        snprintf(buf, 320, "mtp.layers.0.%s", name + h);
        name = buf;
        n = strlen(buf);
    }
    return qx_norm_name(name, n);
}

struct qx_claim qx_claim_of(struct qx_quant_home *h, const struct qx_config *c, const char *name,
                            bool is_linear)
{
    struct qx_claim cl = {.kind = QX_CL_NONE, .source = QX_SRC_DEFAULT};
    char buf[320];
    if (!h || h->is_foreign) {
        return cl;
    }
    struct qx_norm m = module_norm(c, name, buf);
    struct qx_quant_entry *e = qx_quant_find_entry(h, m);
    if (e) {
        return entry_claim(e);
    }
    struct qx_quant_pattern *p = qx_quant_find_pattern(h->ignore, h->n_ignore, name, m);
    if (p) {
        cl.kind = QX_CL_IGNORED;
        cl.source = strcmp(h->ignore_key, "modules_to_not_convert") == 0 ? QX_SRC_NOT_CONVERT
                                                                         : QX_SRC_IGNORE;
        cl.entry = p->text;
        return cl;
    }
    cl.format = is_linear ? qx_algo_format(h->algo) : QX_F_NONE;
    if (cl.format != QX_F_NONE) {
        cl.kind = QX_CL_FORMAT;
        cl.algo_text = h->algo_text;
        cl.group_size = h->group_size;
        /* The fp8 method's list of exceptions is not known to be complete (formats U1): but for
         * experts its default confirms what is stored quantised and does not forbid what is plain.
         */
        cl.soft = h->is_fp8_method && !strstr(name, ".mlp.experts.");
    }
    return cl;
}

struct qx_claim qx_claim_of_table(struct qx_quant_home *h, const char *name)
{
    struct qx_claim cl = {.kind = QX_CL_NONE, .source = QX_SRC_DEFAULT};
    if (!h || h->is_foreign) {
        return cl;
    }
    struct qx_norm m = qx_norm_name(name, strlen(name));
    struct qx_quant_pattern *p = qx_quant_find_convert(h, m);
    if (p) {
        cl.kind = QX_CL_FORMAT;
        cl.format = QX_F_FP8;
        cl.source = QX_SRC_CONVERT;
        cl.entry = p->text;
        cl.algo_text = h->method;
        return cl;
    }
    cl = qx_claim_of(h, NULL, name, false);
    if (cl.kind == QX_CL_NONE && h->is_fp8_method) {
        cl.kind = QX_CL_FORMAT;
        cl.format = QX_F_FP8;
        cl.algo_text = h->method;
        cl.soft = true;
    }
    return cl;
}

struct qx_claim qx_claim_of_ple_dtype(const struct qx_config *c)
{
    static const struct {
        const char *word;
        enum qx_format format;
    } words[] = {
        {"float8_e4m3fn", QX_F_FP8}, {"nvfp4", QX_F_NVFP4}, {"bfloat16", QX_F_BF16},
        {"float16", QX_F_F16},       {"float32", QX_F_F32},
    };
    struct qx_claim cl = {.kind = QX_CL_NONE, .source = QX_SRC_PLE_DTYPE};
    if (c->ple_embedding_dtype[0] == '\0') {
        return cl;
    }
    cl.kind = QX_CL_UNKNOWN;
    cl.entry = cl.algo_text = c->ple_embedding_dtype;
    for (size_t i = 0; i < QX_ARRAY_LEN(words); i++) {
        if (strcasecmp(words[i].word, c->ple_embedding_dtype) == 0) {
            cl.kind = QX_CL_FORMAT;
            cl.format = words[i].format;
        }
    }
    return cl;
}

/* ---- reading both homes ---------------------------------------------------------------------- */

static int read_home(struct qx_resolved *r, int i, const struct qx_blob *b, const char *file,
                     const char *member, struct qx_findings *fs, struct qx_error *err)
{
    struct qx_json_doc doc;
    struct qx_quant_home *h = &r->home[i];
    char path[64];
    h->method = h->algo_text = h->kv_cache = "";
    if (!b || !b->present) {
        return 0;
    }
    /* Duplicate keys of config.json were reported when the configuration was read. */
    int rc = qx_json_doc_parse(&doc, b->text, b->n, file, i ? fs : NULL, err);
    if (rc) {
        return rc;
    }
    const struct qx_json *o = doc.root;
    snprintf(path, sizeof path, "%s%s", member ? member : "", member ? "." : "");
    if (member) {
        const struct qx_json *mlx = qx_json_get(doc.root, "quantization");
        o = qx_json_get(doc.root, member);
        if (!o && mlx && mlx->type == QX_JSON_OBJECT && qx_json_get(mlx, "bits")) {
            qx_findings_add(fs, &QX_REPORT("foreign-convention", QX_ERROR, .file = file,
                                           .key = "quantization", .expected = "quantization_config",
                                           .found = "MLX",
                                           .text = "the settings are those of MLX; its "
                                                   "tensors are named, not read"));
        }
    }
    /* Only the home that decides says what is wrong with its group sizes. */
    rc = qx_quant_home_read(h, o, file, path, r->c, r->arena,
                            i == 0 || !r->home[0].present ? fs : NULL, err);
    if (!rc && !member && h->present && h->method[0] == '\0' && h->algo_text[0] == '\0' &&
        h->n_entries == 0 && h->n_ignore == 0) {
        h->present = false;
    }
    qx_json_doc_fini(&doc);
    return rc;
}

static bool is_modelopt(const char *method)
{
    static const char *const names[] = {"modelopt", "modelopt_fp4", "modelopt_fp8",
                                        "modelopt_mixed"};
    for (size_t i = 0; i < QX_ARRAY_LEN(names); i++) {
        if (strcasecmp(names[i], method) == 0) {
            return true;
        }
    }
    return false;
}

static void report_method(struct qx_resolved *r, struct qx_findings *fs)
{
    struct qx_quant_home *h = r->used;
    char text[256];
    if (!h) {
        return;
    }
    if (h->is_foreign) {
        snprintf(text, sizeof text,
                 "quant_method '%s' is another convention; its tensors are named, not "
                 "read",
                 h->method);
        qx_findings_add(fs, &QX_REPORT("foreign-convention", QX_ERROR, .file = h->file,
                                       .key = "quant_method", .expected = "modelopt or fp8",
                                       .found = h->method, .text = text));
    } else if (h->method[0] && !h->is_fp8_method && !is_modelopt(h->method)) {
        snprintf(text, sizeof text, "quant_method '%s' is not known; known are modelopt and fp8",
                 h->method);
        qx_findings_add(fs, &QX_REPORT("unknown-quant-method", QX_ERROR, .file = h->file,
                                       .key = "quant_method", .expected = "modelopt or fp8",
                                       .found = h->method, .text = text));
    }
    if (h->algo == QX_A_UNKNOWN) {
        snprintf(text, sizeof text, "quant_algo '%s' is not known; known are %s", h->algo_text,
                 qx_algo_names());
        qx_findings_add(fs, &QX_REPORT("unknown-quant-algo", QX_ERROR, .file = h->file,
                                       .key = "quant_algo", .expected = qx_algo_names(),
                                       .found = h->algo_text, .text = text));
    }
    for (size_t i = 0; i < h->n_entries; i++) {
        const struct qx_quant_entry *e = &h->entries[i];
        if (e->algo != QX_A_UNKNOWN && e->algo != QX_A_NONE && e->algo != QX_A_MIXED) {
            continue;
        }
        const char *found = e->algo_text[0] ? e->algo_text : "nothing";
        snprintf(text, sizeof text, "the map gives '%.100s' the algorithm '%s', which is not known",
                 e->key, found);
        qx_findings_add(fs, &QX_REPORT("unknown-quant-algo", QX_ERROR, .file = h->file,
                                       .key = e->key, .tensor = e->key, .expected = qx_algo_names(),
                                       .found = found, .text = text, .group = found));
    }
    if (h->n_normalised) {
        char n[24];
        snprintf(n, sizeof n, "%" PRIu32, h->n_normalised);
        snprintf(text, sizeof text,
                 "%s names of the settings use another prefix than the tensors and "
                 "were matched after removing it",
                 n);
        qx_findings_add(fs, &QX_REPORT("normalised-names", QX_NOTE, .file = h->file,
                                       .key = h->ignore_key, .found = n, .text = text));
    }
}

int qx_resolve_read_homes(struct qx_resolved *r, struct qx_findings *fs, struct qx_error *err)
{
    struct qx_error e;
    int rc =
        read_home(r, 0, qx_ckpt_config_text(r->ck), "config.json", "quantization_config", fs, err);
    if (rc) {
        return rc;
    }
    rc = read_home(r, 1, qx_ckpt_hf_quant_text(r->ck), "hf_quant_config.json", NULL, fs, &e);
    if (rc == -(int)QX_E_NOMEM) {
        return qx_fail_nomem(err);
    }
    if (rc) {
        r->home[1].present = false;
        struct qx_report rep =
            QX_REPORT(e.kind, QX_ERROR, .file = "hf_quant_config.json", .text = e.msg);
        rep.off = e.off;
        qx_findings_add(fs, &rep);
    }
    r->used = r->home[0].present ? &r->home[0] : r->home[1].present ? &r->home[1] : NULL;
    report_method(r, fs);
    return 0;
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* The module's container for grouping: ...mlp.experts for an expert, else the module itself. */
static void container_of(const char *name, char out[256])
{
    const char *p = strstr(name, ".mlp.experts.");
    size_t n = p ? (size_t)(p - name) + 12 : strlen(name);
    n = n < 255 ? n : 255;
    memcpy(out, name, n);
    out[n] = '\0';
}

static const char *file_of(const struct qx_resolved *r, const struct qx_tensor *t)
{
    return t ? qx_ckpt_file(r->ck, t->file)->name : NULL;
}

static void report_plain(struct qx_resolved *r, struct qx_findings *fs, const char *module,
                         const struct qx_tensor *w, const struct qx_claim *cl)
{
    char group[96];
    char text[480];
    const char *stored = qx_dtype_name((enum qx_dtype)w->dtype);
    const char *home = cl->source == QX_SRC_PLE_DTYPE ? "config.json"
                       : r->used                      ? r->used->file
                                                      : NULL;
    snprintf(group, sizeof group, "%s %s %s", qx_format_name(cl->format),
             qx_source_name(cl->source), stored);
    if (cl->source == QX_SRC_DEFAULT || cl->source == QX_SRC_MAP) {
        snprintf(text, sizeof text,
                 "%s claims %s (%s%s%.120s) and the module is stored plain as %s; %s "
                 "'%.160s' would cover it",
                 home ? home : "the configuration", qx_format_name(cl->format),
                 qx_source_name(cl->source), cl->entry ? " " : "", cl->entry ? cl->entry : "",
                 stored,
                 cl->source == QX_SRC_MAP ? "no map entry for it and an ignore entry"
                                          : "the ignore entry",
                 module);
    } else {
        snprintf(text, sizeof text,
                 "%s claims %s (%s '%.120s') and the module is stored plain as %s",
                 home ? home : "the configuration", qx_format_name(cl->format),
                 qx_source_name(cl->source), cl->entry ? cl->entry : "", stored);
    }
    qx_findings_add(fs, &QX_REPORT("quantized-but-plain", QX_ERROR, .file = file_of(r, w),
                                   .tensor = module, .key = cl->entry,
                                   .expected = qx_format_name(cl->format), .found = stored,
                                   .text = text, .group = group));
}

static void report_other(struct qx_resolved *r, struct qx_findings *fs, const char *module,
                         const struct qx_tensor *w, enum qx_format form, const struct qx_claim *cl)
{
    char group[128];
    char text[400];
    enum qx_dtype want = qx_format_weight_dtype(cl->format);
    bool dtype = want != (enum qx_dtype)w->dtype;
    const char *expected = dtype ? qx_dtype_name(want) : qx_format_name(cl->format);
    const char *found = dtype ? qx_dtype_name((enum qx_dtype)w->dtype) : qx_format_name(form);
    /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): who has a weight has a module */
    const char *proj = strrchr(module, '.');
    snprintf(group, sizeof group, "%s %s %s %.60s", expected, found, qx_source_name(cl->source),
             proj ? proj : module);
    snprintf(text, sizeof text,
             "the configuration claims %s (%s%s%.160s), stored is %s with weight %s",
             qx_format_name(cl->format), qx_source_name(cl->source), cl->entry ? " " : "",
             cl->entry ? cl->entry : "", form == QX_F_NONE ? "no known form" : qx_format_name(form),
             qx_dtype_name((enum qx_dtype)w->dtype));
    qx_findings_add(fs,
                    &QX_REPORT(dtype ? "weight-dtype" : "format-mismatch", QX_ERROR,
                               .file = file_of(r, w), .tensor = w->name, .key = cl->entry,
                               .expected = expected, .found = found, .text = text, .group = group));
}

static void report_undeclared(struct qx_resolved *r, struct qx_findings *fs, const char *module,
                              const struct qx_tensor *w, enum qx_format form,
                              const struct qx_claim *cl)
{
    char group[128];
    char text[400];
    char container[256];
    const char *says = cl->kind == QX_CL_IGNORED ? "ignored" : "nothing";
    if (r->used && r->used->is_foreign) {
        return; /* what its settings declare is not understood */
    }
    container_of(module, container);
    snprintf(group, sizeof group, "%s %s", qx_format_name(form), says);
    if (cl->kind == QX_CL_IGNORED) {
        snprintf(text, sizeof text,
                 "stored as %s, but the settings only say that it is ignored ('%.160s')"
                 "; it is read as stored",
                 qx_format_name(form), cl->entry ? cl->entry : "");
    } else {
        snprintf(text, sizeof text, "stored as %s, but no setting says so; it is read as stored",
                 qx_format_name(form));
    }
    qx_findings_add(fs, &QX_REPORT("undeclared-format", QX_WARNING, .file = file_of(r, w),
                                   .tensor = module, .key = cl->entry, .expected = "a declaration",
                                   .found = qx_format_name(form), .text = text, .group = group));
}

static bool same_format(enum qx_format a, enum qx_format b)
{
    return a == b;
}

static void compare_module(struct qx_resolved *r, struct qx_findings *fs, struct qx_module *m,
                           const struct qx_claim *cl)
{
    m->source = QX_SRC_STORAGE;
    m->entry = cl->entry;
    if (!m->weight || m->foreign || !m->layout) { /* none that is read: other rules name it */
        m->source = cl->kind == QX_CL_NONE ? QX_SRC_DEFAULT : cl->source;
        return;
    }
    bool quantised = qx_format_quantised(m->form);
    bool plain = m->form != QX_F_NONE && !quantised;
    switch (cl->kind) {
    case QX_CL_FORMAT:
        if (same_format(cl->format, m->form)) {
            m->source = cl->source;
        } else if (cl->soft && plain) {
            m->source = QX_SRC_DEFAULT;
        } else if (plain) {
            report_plain(r, fs, m->name, m->weight, cl);
        } else {
            report_other(r, fs, m->name, m->weight, m->form, cl);
        }
        break;
    case QX_CL_IGNORED:
        m->source = quantised ? QX_SRC_STORAGE : cl->source;
        if (quantised) {
            report_undeclared(r, fs, m->name, m->weight, m->form, cl);
        }
        break;
    case QX_CL_NONE:
        m->source = quantised ? QX_SRC_STORAGE : QX_SRC_DEFAULT;
        if (quantised && m->spelling == QX_SP_DISK) {
            report_undeclared(r, fs, m->name, m->weight, m->form, cl);
        }
        break;
    case QX_CL_UNKNOWN:
        break; /* reported with the entry */
    }
}

static void compare_table(struct qx_resolved *r, struct qx_findings *fs)
{
    struct qx_table *t = &r->table;
    struct qx_claim by_dtype = qx_claim_of_ple_dtype(r->c);
    if (by_dtype.kind == QX_CL_UNKNOWN) {
        char text[256];
        snprintf(text, sizeof text,
                 "ple_embedding_dtype '%s' is not supported; supported are "
                 "float8_e4m3fn, nvfp4, bfloat16, float16, float32",
                 by_dtype.entry);
        qx_findings_add(fs,
                        &QX_REPORT("unsupported-ple-dtype", QX_ERROR, .file = "config.json",
                                   .tensor = t->module, .key = "text_config.ple_embedding_dtype",
                                   .expected = "float8_e4m3fn, nvfp4, bfloat16, float16, float32",
                                   .found = by_dtype.entry, .text = text));
    }
    struct qx_claim cl[2] = {by_dtype, qx_claim_of_table(r->used, t->module ? t->module : "")};
    const struct qx_tensor *w = t->packed;
    for (uint32_t i = 0; i < t->n_shards && !w && t->shards; i++) {
        w = t->shards[i].weight;
    }
    if (!t->present || !t->module || !w || t->foreign || t->packed_rows) {
        t->source = cl[0].kind == QX_CL_FORMAT ? cl[0].source : cl[1].source;
        t->entry = cl[0].kind == QX_CL_FORMAT ? cl[0].entry : cl[1].entry;
        return;
    }
    bool quantised = qx_format_quantised(t->form);
    bool confirmed = false;
    t->source = quantised || t->form == QX_F_NONE ? QX_SRC_STORAGE : QX_SRC_DEFAULT;
    for (int i = 0; i < 2; i++) {
        if (cl[i].kind != QX_CL_FORMAT) {
            continue;
        }
        if (cl[i].format == t->form) {
            if (!confirmed) {
                t->source = cl[i].source;
                t->entry = cl[i].entry;
            }
            confirmed = true;
        } else if (t->form != QX_F_NONE && !quantised) {
            if (qx_format_quantised(cl[i].format) && !cl[i].soft) {
                report_plain(r, fs, t->module, w, &cl[i]);
            } else if (!cl[i].soft) {
                report_other(r, fs, t->module, w, t->form, &cl[i]);
            }
        } else if (!cl[i].soft) {
            report_other(r, fs, t->module, w, t->form, &cl[i]);
        }
    }
    if (!confirmed && cl[1].kind == QX_CL_IGNORED && !quantised && t->form != QX_F_NONE) {
        t->source = cl[1].source;
        t->entry = cl[1].entry;
    }
    if (!confirmed && quantised && cl[0].kind == QX_CL_NONE &&
        (cl[1].kind == QX_CL_NONE || cl[1].kind == QX_CL_IGNORED)) {
        t->entry = cl[1].entry;
        report_undeclared(r, fs, t->module, w, t->form, &cl[1]);
    }
}

/* What a claim amounts to, so that the two homes can be compared. */
static const char *claim_text(const struct qx_claim *c, char out[64])
{
    if (c->kind == QX_CL_FORMAT) {
        uint32_t g = c->group_size ? c->group_size : qx_format_group(c->format);
        if (g) {
            snprintf(out, 64, "%s, groups of %" PRIu32, qx_format_name(c->format), g);
        } else {
            snprintf(out, 64, "%s", qx_format_name(c->format));
        }
    } else if (c->kind == QX_CL_UNKNOWN) {
        snprintf(out, 64, "%.60s", c->algo_text && c->algo_text[0] ? c->algo_text : "nothing");
    } else {
        snprintf(out, 64, "not quantised");
    }
    return out;
}

static void compare_homes(struct qx_resolved *r, struct qx_findings *fs, const char *name,
                          const struct qx_claim *a, const struct qx_claim *b)
{
    char x[64];
    char y[64];
    char container[256];
    char group[480];
    char text[480];
    claim_text(a, x);
    claim_text(b, y);
    if (strcmp(x, y) == 0) {
        return;
    }
    container_of(name, container);
    snprintf(group, sizeof group, "%s|%s|%s", container, x, y);
    snprintf(text, sizeof text, "%s says %s, %s says %s for '%.200s'; config.json wins",
             r->home[0].file, x, r->home[1].file, y, container);
    qx_findings_add(fs, &QX_REPORT("quant-conflict", QX_WARNING, .file = r->home[1].file,
                                   .key = container, .expected = x, .found = y, .text = text,
                                   .group = group));
}

/* config_groups and quantized_layers of one home say the same thing twice. */
static void compare_groups(const struct qx_quant_home *h, struct qx_findings *fs)
{
    for (size_t i = 0; i < h->n_targets; i++) {
        const struct qx_quant_target *t = &h->targets[i];
        const struct qx_quant_entry *e = qx_quant_find_entry(h, t->norm);
        enum qx_format f = e ? qx_algo_format(e->algo) : QX_F_NONE;
        char group[160];
        char text[400];
        bool fp4 = (f == QX_F_NVFP4 || f == QX_F_W4A16_NVFP4) &&
                   (t->format == QX_F_NVFP4 || t->format == QX_F_W4A16_NVFP4);
        if (f == QX_F_NONE || f == t->format || fp4) {
            continue;
        }
        const char *says =
            t->format == QX_F_NONE ? "numbers of no known format" : qx_format_name(t->format);
        snprintf(group, sizeof group, "%.60s %s %s", t->group, e->algo_text, says);
        snprintf(text, sizeof text,
                 "config_groups.%.60s has %s for '%.160s', quantized_layers says %s; the "
                 "map is used",
                 t->group, says, t->text, e->algo_text);
        qx_findings_add(fs, &QX_REPORT("quant-conflict", QX_WARNING, .file = h->file,
                                       .key = t->text, .expected = e->algo_text, .found = says,
                                       .text = text, .group = group));
    }
}

/* Full names of modules that stay plain, of parts that are stored: one that is no module was mistyped or
 * damaged. A glob, or a name below one that is listed, may well match nothing. */
static void report_unused_exceptions(const struct qx_resolved *r, struct qx_findings *fs)
{
    const struct qx_quant_home *h = r->used;
    bool part[QX_PART_ANY + 1] = {false};
    if (!h->ignore_key || strcmp(h->ignore_key, "modules_to_not_convert") != 0) {
        return;
    }
    for (size_t i = 0; i < r->n; i++) {
        part[qx_norm_name(r->modules[i].name, strlen(r->modules[i].name)).part] = true;
    }
    for (size_t i = 0; i < h->n_ignore; i++) {
        const struct qx_quant_pattern *p = &h->ignore[i];
        char text[400];
        if (p->used || p->is_glob || !part[p->norm.part] ||
            qx_quant_find_pattern(h->ignore, i, p->text, p->norm)) {
            continue;
        }
        snprintf(text, sizeof text, "modules_to_not_convert names '%.200s', which no stored module is",
                 p->text);
        qx_findings_add(fs, &QX_REPORT("entry-without-module", QX_NOTE, .file = h->file, .key = p->text,
                                       .expected = "a stored module", .found = "none", .text = text,
                                       .group = "not_convert"));
    }
}

static void report_unused_entries(struct qx_resolved *r, struct qx_findings *fs)
{
    struct qx_quant_home *h = r->used;
    char text[400];
    /* Where nothing is stored, as beside a lone config.json, every entry would be reported. */
    if (!h || h->is_foreign || r->n == 0) {
        return;
    }
    for (size_t i = 0; i < h->n_entries; i++) {
        const struct qx_quant_entry *e = &h->entries[i];
        /* An alias of a name that is listed too is found under that name only. */
        bool twin = i > 0 && e->norm.n == h->entries[i - 1].norm.n &&
                    memcmp(e->norm.p, h->entries[i - 1].norm.p, e->norm.n) == 0;
        if (twin) {
            const struct qx_quant_entry *o = &h->entries[i - 1];
            if (o->algo != e->algo) {
                snprintf(text, sizeof text, "'%.120s' and '%.120s' name one module, with %s and %s",
                         o->key, e->key, o->algo_text, e->algo_text);
                qx_findings_add(fs, &QX_REPORT("quant-conflict", QX_WARNING, .file = h->file,
                                               .key = e->key, .expected = o->algo_text,
                                               .found = e->algo_text, .text = text));
            }
            continue;
        }
        if (e->used || e->mtp_alias) {
            continue;
        }
        snprintf(text, sizeof text, "the map entry '%.200s' (%s) names no stored module", e->key,
                 e->algo_text);
        qx_findings_add(fs, &QX_REPORT("entry-without-module", QX_WARNING, .file = h->file,
                                       .key = e->key, .expected = "a stored module",
                                       .found = "none", .text = text, .group = h->file));
    }
    report_unused_exceptions(r, fs);
    for (size_t i = 0; i < h->n_convert; i++) {
        if (!h->convert[i].used) {
            snprintf(text, sizeof text,
                     "modules_to_convert names '%.200s', which no stored module is",
                     h->convert[i].text);
            qx_findings_add(fs, &QX_REPORT("entry-without-module", QX_WARNING, .file = h->file,
                                           .key = h->convert[i].text, .expected = "a stored module",
                                           .found = "none", .text = text, .group = "convert"));
        }
    }
}

/* Without an input_scale of its own an expert is still one of W4A4 when its siblings have one: then
 * the scale is missing, not the format another. Siblings follow each other in the list. */
static void settle_siblings(struct qx_resolved *r)
{
    size_t i = 0;
    while (i < r->n) {
        const char *p =
            r->modules[i].expert >= 0 ? strstr(r->modules[i].name, ".mlp.experts.") : NULL;
        if (!p) {
            i++;
            continue;
        }
        size_t n = (size_t)(p - r->modules[i].name) + 13;
        size_t end = i;
        bool any = false;
        while (end < r->n && strncmp(r->modules[end].name, r->modules[i].name, n) == 0) {
            any = any || (r->modules[end].form == QX_F_NVFP4 && r->modules[end].input_scale);
            end++;
        }
        for (size_t k = i; k < end && any; k++) {
            struct qx_module *m = &r->modules[k];
            if (m->form == QX_F_W4A16_NVFP4 && m->claimed != QX_F_W4A16_NVFP4) {
                m->format = m->format == m->form ? QX_F_NVFP4 : m->format;
                m->form = QX_F_NVFP4;
            }
        }
        i = end;
    }
}

int qx_resolve_claims(struct qx_resolved *r, struct qx_findings *fs, struct qx_error *err)
{
    bool both = r->home[0].present && r->home[1].present;
    struct qx_claim *claims = qx_calloc(r->n ? r->n : 1, sizeof *claims);
    if (!claims) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < r->n; i++) {
        struct qx_module *m = &r->modules[i];
        claims[i] = qx_claim_of(r->used, r->c, m->name, m->is_linear);
        if (both && (m->is_linear || claims[i].kind == QX_CL_FORMAT)) {
            struct qx_claim other = qx_claim_of(&r->home[1], r->c, m->name, m->is_linear);
            compare_homes(r, fs, m->name, &claims[i], &other);
        }
        qx_module_decide(m, &claims[i]);
    }
    settle_siblings(r);
    for (size_t i = 0; i < r->n; i++) {
        compare_module(r, fs, &r->modules[i], &claims[i]);
    }
    qx_free(claims);
    if (r->c->n_ple_layers > 0) {
        compare_table(r, fs);
        if (both && r->table.module) {
            struct qx_claim a = qx_claim_of_table(&r->home[0], r->table.module);
            struct qx_claim b = qx_claim_of_table(&r->home[1], r->table.module);
            compare_homes(r, fs, r->table.module, &a, &b);
        }
    }
    report_unused_entries(r, fs);
    if (r->used) {
        compare_groups(r->used, fs);
    }
    if (both && r->home[0].algo != r->home[1].algo && r->home[0].algo != QX_A_NONE &&
        r->home[1].algo != QX_A_NONE) {
        char text[256];
        snprintf(text, sizeof text, "%s says quant_algo %.40s, %s says %.40s; config.json wins",
                 r->home[0].file,
                 r->home[0].algo_text[0] ? r->home[0].algo_text : r->home[0].method,
                 r->home[1].file, r->home[1].algo_text);
        qx_findings_add(fs, &QX_REPORT("quant-conflict", QX_WARNING, .file = r->home[1].file,
                                       .key = "quant_algo", .expected = r->home[0].algo_text,
                                       .found = r->home[1].algo_text, .text = text));
    }
    return qx_findings_failed(fs) ? qx_fail_nomem(err) : 0;
}
