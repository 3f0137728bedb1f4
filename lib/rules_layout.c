/* rules_layout.c: every stored tensor against the table of the family: unknown names, foreign
 * spellings and conventions, places that do not exist, shapes and dtypes. Companions of weights are
 * rules_scale.c's; what is absent is rules_cover.c's. */
#include "rules_impl.h"

#include "alloc.h"
#include "pack.h"
#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *qx_check_file(const struct qx_headers_check *k, const struct qx_tensor *t)
{
    return t ? qx_ckpt_file(k->ck, t->file)->name : NULL;
}

/* ---- names -------------------------------------------------------------------------------------
 */

static void simple(struct qx_headers_check *k, const char *kind, enum qx_severity sev,
                   const struct qx_tensor *t, const char *expected, const char *text,
                   const char *group)
{
    qx_findings_add(k->fs, &QX_REPORT(kind, sev, .file = qx_check_file(k, t), .tensor = t->name,
                                      .expected = expected, .text = text, .group = group));
}

static void respelled(struct qx_headers_check *k, const struct qx_name *nm,
                      const struct qx_tensor *t)
{
    simple(k, "foreign-layout", QX_ERROR, t,
           nm->foreign_shard
               ? "...ngram_embedding.shard_N.weight"
               : "names under model.language_model., lm_head., mtp. and model.visual.",
           nm->foreign_shard
               ? "the table's shards have the names of another program (shards.N); they are "
                 "not read"
               : "the tensors have the prefix of another program; they are not read",
           nm->foreign_shard ? "shards" : "prefix");
    k->foreign_table = k->foreign_table || nm->in_table;
    if (!nm->entry || nm->leaf == QX_LEAF_BIAS) {
        return;
    }
    if (!qx_grow((void **)&k->respelled, &k->respelled_cap, k->n_respelled + 1,
                 sizeof *k->respelled)) {
        k->rc = -(int)QX_E_NOMEM;
        return;
    }
    k->respelled[k->n_respelled++] =
        (struct qx_respelled){nm->entry, nm->layer, nm->expert, nm->is_mtp};
}

static const char *convention_of(const char *leaf)
{
    static const struct {
        const char *leaf, *name;
    } known[] = {
        {"weight_packed", "compressed-tensors"},
        {"weight_global_scale", "compressed-tensors"},
        {"input_global_scale", "compressed-tensors"},
        {"weight_shape", "compressed-tensors"},
        {"weight_zero_point", "compressed-tensors"},
        {"qweight", "GPTQ"},
        {"qzeros", "GPTQ"},
        {"g_idx", "GPTQ"},
        {"scales", "GPTQ or MLX"},
        {"biases", "MLX"},
        {"trellis", "EXL3"},
        {"suh", "EXL3"},
        {"svh", "EXL3"},
        {"mcg", "EXL3"},
        {"mul1", "EXL3"},
        {"head_bias", "EXL3"},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(known); i++) {
        if (strcmp(known[i].leaf, leaf) == 0) {
            return known[i].name;
        }
    }
    return "another program";
}

/* Reported once a convention, with the modules counted: the first foreign tensor of each stands for
 * it. */
static void foreign(struct qx_headers_check *k, const struct qx_name *nm, const struct qx_tensor *t)
{
    char module[256];
    char text[320];
    const struct qx_module *m;
    if (nm->module_len >= sizeof module || nm->in_table) {
        return; /* the table's forms are rules_table.c's */
    }
    memcpy(module, t->name, nm->module_len);
    module[nm->module_len] = '\0';
    m = qx_resolved_find(k->r, module);
    if (m && m->foreign != t) {
        return;
    }
    const char *what = convention_of(nm->leaf_text);
    if (strcmp(what, "GPTQ or MLX") == 0 && m && m->weight) {
        what = "MLX";
    }
    const char *divisor = strcmp(what, "compressed-tensors") == 0
                              ? ", whose global scale is customarily a divisor,"
                              : "";
    snprintf(text, sizeof text,
             "the module is stored in the convention of %s%s and is neither read nor "
             "converted",
             what, divisor);
    qx_findings_add(k->fs, &QX_REPORT("foreign-convention", QX_ERROR, .file = qx_check_file(k, t),
                                      .tensor = t->name, .expected = "weight with its scales",
                                      .found = what, .text = text, .group = what));
}

static void out_of_range(struct qx_headers_check *k, const struct qx_tensor *t, const char *kind,
                         const char *what, int32_t found, uint32_t n, const char *key)
{
    char expected[48];
    char got[24];
    char text[160];
    snprintf(expected, sizeof expected, "0 to %" PRIu32, n ? n - 1 : 0);
    snprintf(got, sizeof got, "%" PRId32, found);
    snprintf(text, sizeof text, "%s %" PRId32 " does not exist: %s is %" PRIu32, what, found, key,
             n);
    qx_findings_add(k->fs,
                    &QX_REPORT(kind, QX_ERROR, .file = qx_check_file(k, t), .tensor = t->name,
                               .expected = expected, .found = got, .text = text, .group = got));
}

static bool leaf_fits(const struct qx_name *nm)
{
    const struct qx_layout_entry *e = nm->entry;
    if (nm->leaf == QX_LEAF_BIAS) {
        return e->bias;
    }
    if (e->kind == QX_K_FUSED) {
        return true;
    }
    if (nm->leaf == QX_LEAF_WEIGHT) {
        return !e->bare;
    }
    if (nm->leaf == QX_LEAF_BARE) {
        return e->bare;
    }
    return true;
}

static void unexpected(struct qx_headers_check *k, const struct qx_name *nm,
                       const struct qx_tensor *t)
{
    if (nm->component == QX_C_MTP) {
        simple(k, "mtp-extra", QX_WARNING, t, NULL,
               "the MTP head has no such tensor; it is not read", "mtp");
    } else if (nm->component == QX_C_VISION) {
        simple(k, "vision-extra", QX_WARNING, t, NULL,
               "the vision tower has no such tensor; it is not "
               "read",
               "vision");
    } else {
        simple(k, "unexpected-tensor", QX_WARNING, t, NULL,
               "the model family has no such tensor; it is not read", "all");
    }
}

static void check_name(struct qx_headers_check *k, const struct qx_tensor *t)
{
    struct qx_name nm;
    const struct qx_config *c = k->c;
    qx_layout_parse(&nm, c, t->name, t->name_len);
    k->any_mtp = k->any_mtp || (nm.is_mtp && nm.spelling == QX_SP_DISK);
    if (nm.component == QX_C_VISION) {
        k->any_vision = true;
        if (nm.layer >= 0 && nm.layer < 4096 && (uint32_t)nm.layer >= k->vision_depth) {
            k->vision_depth = (uint32_t)nm.layer + 1;
        }
    }
    if (nm.ple_extra) {
        simple(k, "ple-extra", QX_NOTE, t, NULL,
               "bookkeeping of training beside the table; ignored", "all");
    } else if (nm.foreign_shard || ((nm.spelling == QX_SP_RUNTIME || nm.spelling == QX_SP_TEXT) &&
                                    (nm.entry || nm.in_table))) {
        respelled(k, &nm, t);
    } else if (nm.leaf == QX_LEAF_KV_SCALE) {
        simple(k, "unused-kv-scale", QX_NOTE, t, NULL, "a scale of the key-value cache; not used",
               "all");
    } else if (nm.leaf == QX_LEAF_FOREIGN) {
        foreign(k, &nm, t);
    } else if (nm.in_table) {
        bool here = c->n_ple_layers > 0 && nm.layer == (int32_t)c->ple_layer[0];
        bool shard = nm.shard >= 0 && (nm.leaf == QX_LEAF_WEIGHT || nm.leaf == QX_LEAF_SCALE);
        bool scale = nm.shard < 0 && (nm.leaf == QX_LEAF_SCALE || nm.leaf == QX_LEAF_SCALE_2);
        if (here && shard && nm.shard >= QX_MAX_TABLE_SHARDS) {
            char found[24];
            snprintf(found, sizeof found, "%" PRId64, nm.shard);
            qx_findings_add(k->fs,
                            &QX_REPORT("ple-split-mismatch", QX_ERROR, .file = qx_check_file(k, t),
                                       .tensor = t->name, .expected = "numbers below 1048576",
                                       .found = found,
                                       .text = "no table has so many shards; it is not read"));
        } else if (!here || (!shard && !scale && strcmp(nm.leaf_text, QX_PACK_LEAF) != 0)) {
            unexpected(k, &nm, t);
        }
    } else if (!nm.entry) {
        unexpected(k, &nm, t);
    } else if (nm.entry->kind == QX_K_UNUSED) {
        simple(k, "unused-tensor", QX_NOTE, t, NULL,
               "some conversions carry this tensor; nothing uses it", nm.entry->suffix);
    } else if (nm.component != QX_C_VISION && nm.layer >= 0 && !nm.is_mtp &&
               (uint32_t)nm.layer >= c->n_layers) {
        out_of_range(k, t, "layer-range", "layer", nm.layer, c->n_layers, "num_hidden_layers");
    } else if (nm.is_mtp && nm.layer >= 0 && c->n_mtp_layers > 0 &&
               (uint32_t)nm.layer >= c->n_mtp_layers) {
        out_of_range(k, t, "layer-range", "MTP layer", nm.layer, c->n_mtp_layers,
                     "mtp_num_hidden_layers");
    } else if (nm.expert >= 0 && (uint32_t)nm.expert >= c->n_experts) {
        out_of_range(k, t, "expert-range", "expert", nm.expert, c->n_experts, "num_experts");
    } else if (nm.entry->kind == QX_K_FUSED && nm.leaf == QX_LEAF_WEIGHT &&
               qx_ckpt_find_n(k->ck, t->name, nm.module_len)) {
        simple(k, "two-forms", QX_ERROR, t, "one tensor",
               "the module is stored twice, with and without "
               "'.weight'; only one can be read",
               "fused");
    } else if (!leaf_fits(&nm) ||
               !qx_layout_applies(nm.entry, c, nm.is_mtp, nm.layer < 0 ? 0 : (uint32_t)nm.layer)) {
        unexpected(k, &nm, t);
    }
}

/* ---- shapes and dtypes --------------------------------------------------------------------------
 */

static bool shape_equal(const struct qx_tensor *t, const uint64_t *want, unsigned n)
{
    bool same = t->n_dims == n;
    for (unsigned i = 0; same && i < n; i++) {
        same = t->shape[i] == want[i];
    }
    return same;
}

static void check_shape(struct qx_headers_check *k, const struct qx_layout_entry *e,
                        const struct qx_tensor *t, const uint64_t *want, unsigned n)
{
    char expected[96];
    char found[96];
    char text[320];
    char group[260];
    if (shape_equal(t, want, n)) {
        return;
    }
    qx_shape_text(want, n, expected);
    qx_shape_text(t->shape, t->n_dims, found);
    snprintf(text, sizeof text, "the shape is %s, the configuration makes it %s", found, expected);
    snprintf(group, sizeof group, "%s %s %s", e->suffix, expected, found);
    qx_findings_add(k->fs,
                    &QX_REPORT("shape", QX_ERROR, .file = qx_check_file(k, t), .tensor = t->name,
                               .expected = expected, .found = found, .text = text, .group = group));
}

static bool is_plain_float(enum qx_dtype t)
{
    return t == QX_DT_BF16 || t == QX_DT_F16 || t == QX_DT_F32;
}

static void wrong_dtype(struct qx_headers_check *k, const char *kind,
                        const struct qx_layout_entry *e, const struct qx_tensor *t,
                        const char *expected)
{
    char text[200];
    char group[128];
    const char *found = qx_dtype_name((enum qx_dtype)t->dtype);
    snprintf(text, sizeof text, "the dtype is %s, expected %s", found, expected);
    snprintf(group, sizeof group, "%s %s", e->suffix, found);
    qx_findings_add(k->fs,
                    &QX_REPORT(kind, QX_ERROR, .file = qx_check_file(k, t), .tensor = t->name,
                               .expected = expected, .found = found, .text = text, .group = group));
}

static void check_dtype(struct qx_headers_check *k, const struct qx_module *m)
{
    const struct qx_tensor *w = m->weight;
    enum qx_dtype t = (enum qx_dtype)w->dtype;
    if (t == QX_DT_UNKNOWN) {
        return; /* unknown-dtype says it */
    }
    switch ((enum qx_kind)m->layout->kind) {
    case QX_K_BUFFER:
        if (t != QX_DT_I64) {
            wrong_dtype(k, "dtype", m->layout, w, "I64");
        }
        break;
    case QX_K_PLAIN:
        if (!is_plain_float(t)) {
            wrong_dtype(k, "dtype", m->layout, w, "BF16, F16 or F32");
        }
        break;
    case QX_K_UNUSED:
        break;
    default:
        /* With a claim the comparison of metadata and storage has said it. */
        if ((m->form == QX_F_NONE || m->form == QX_F_I64) &&
            (m->claimed == QX_F_NONE || m->claim_soft)) {
            wrong_dtype(k, "weight-dtype", m->layout, w, "BF16, F16, F32, F8_E4M3 or U8");
        }
        break;
    }
}

static void check_group(struct qx_headers_check *k, const struct qx_module *m)
{
    uint32_t g = m->form == QX_F_FP8_BLOCK ? 0 : m->group_size;
    char text[256];
    char expected[64];
    char found[32];
    char group[300];
    char where[48];
    if (g == 0 || m->cols % g == 0) {
        return;
    }
    if (m->layer < 0) {
        snprintf(where, sizeof where, "the module");
    } else {
        snprintf(where, sizeof where, "%slayer %" PRId32, m->is_mtp ? "MTP " : "", m->layer);
    }
    snprintf(expected, sizeof expected, "a multiple of %" PRIu32, g);
    snprintf(found, sizeof found, "%" PRIu64, m->cols);
    snprintf(text, sizeof text,
             "%s: %s has %" PRIu64 " columns, which groups of %" PRIu32 " (%s) do not "
             "divide",
             where, m->layout->suffix, m->cols, g, qx_format_name(m->form));
    snprintf(group, sizeof group, "%s %s %s %" PRIu64, where, m->layout->suffix,
             qx_format_name(m->form), m->cols);
    qx_findings_add(k->fs,
                    &QX_REPORT("group-size-indivisible", QX_ERROR,
                               .file = qx_check_file(k, m->weight), .tensor = m->weight->name,
                               .expected = expected, .found = found, .text = text, .group = group));
}

static void check_module(struct qx_headers_check *k, const struct qx_module *m)
{
    const struct qx_layout_entry *e = m->layout;
    uint64_t want[QX_LAYOUT_MAX_DIMS];
    bool here = m->component == QX_C_VISION || m->layer < 0 ||
                qx_layout_applies(e, k->c, m->is_mtp, (uint32_t)m->layer);
    if (m->spelling != QX_SP_DISK || !here || !qx_layout_shape(e, k->c, want)) {
        return;
    }
    if (m->bias) {
        check_shape(k, e, m->bias, want, 1);
        if (!is_plain_float((enum qx_dtype)m->bias->dtype) && m->bias->dtype != QX_DT_UNKNOWN) {
            wrong_dtype(k, "dtype", e, m->bias, "BF16, F16 or F32");
        }
    }
    if (!m->weight || m->foreign) {
        return;
    }
    check_dtype(k, m);
    bool packed = m->weight->dtype == QX_DT_U8 && e->kind != QX_K_PLAIN && e->kind != QX_K_BUFFER;
    if (packed && want[e->n_dims - 1] % 2 == 0) {
        want[e->n_dims - 1] /= 2;
    }
    check_shape(k, e, m->weight, want, e->n_dims);
    if (m->is_linear) {
        check_group(k, m);
    }
}

/* ---- all ---------------------------------------------------------------------------------------
 */

static bool has_kind(const struct qx_findings *fs, const char *kind)
{
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        if (strcmp(qx_findings_at(fs, i)->kind, kind) == 0) {
            return true;
        }
    }
    return false;
}

int qx_rules_headers(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err)
{
    struct qx_headers_check k = {
        .ck = ck, .c = qx_ckpt_config(ck), .r = qx_ckpt_resolved(ck), .fs = fs};
    if (!k.c || !k.r || qx_ckpt_is_single_file(ck) || qx_ckpt_is_lone_config(ck)) {
        return 0;
    }
    for (size_t i = 0; i < qx_ckpt_n_tensors(ck); i++) {
        check_name(&k, qx_ckpt_tensor(ck, i));
    }
    for (size_t i = 0; i < qx_resolved_n_modules(k.r); i++) {
        const struct qx_module *m = qx_resolved_module(k.r, i);
        if (m->layout) {
            check_module(&k, m);
        }
    }
    /* An index of another split names no file that exists: then everything is absent, and said
     * once. */
    if (!has_kind(qx_ckpt_findings(ck), "index-stale")) {
        qx_check_coverage(&k);
        qx_check_table(&k);
    }
    qx_free(k.respelled);
    return k.rc || qx_findings_failed(fs) ? qx_fail_nomem(err) : 0;
}
