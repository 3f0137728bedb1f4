/* rules_scale.c: companions of weights, from headers alone: is every scale there, in the right type and
 * shape, under the usual name. What a weight needs follows from its element type and from what lies beside
 * it (formats 7), not from the configuration; that is asked only whether experts need an input_scale.
 * Owns nothing; missing scales of experts are gathered per layer before they are reported. */
#include "rules.h"

#include "alloc.h"
#include "error.h"
#include "resolve.h"
#include "str.h"

#include <stdio.h>
#include <string.h>

/* Missing companions of one kind in the experts of one layer. */
struct layer_gap {
    bool is_mtp;
    int32_t layer;
    const char *which;             /* static: "input_scale", ... */
    struct qx_u64_set { uint64_t *bits; size_t n_words; } experts;
    char **names;
    size_t n_names, cap_names;
};

struct checker {
    const struct qx_ckpt *ck;
    const struct qx_resolved *res;
    struct qx_findings *fs;
    struct qx_arena *arena;
    struct layer_gap *gap;
    size_t n_gaps, cap_gaps;
    bool has_input_scale[2 * QX_MAX_LAYERS]; /* an expert of the layer has one; MTP layers second */
    bool nomem;
};

static size_t layer_index(const struct qx_module *m)
{
    return m->layer < 0 ? SIZE_MAX : (size_t)m->layer + (m->is_mtp ? QX_MAX_LAYERS : 0);
}

/* ---- small helpers ------------------------------------------------------------------------ */

static const char *file_of(const struct checker *k, const struct qx_tensor *t)
{
    return t ? qx_ckpt_file(k->ck, t->file)->name : NULL;
}

static void shape_text(const uint64_t *shape, size_t n, char out[96])
{
    size_t at = 1;
    out[0] = '[';
    out[1] = '\0';
    for (size_t i = 0; i < n && at < 72; ++i) {
        at += (size_t)snprintf(out + at, 96 - at, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
    }
    snprintf(out + at, 96 - at, "]");
}

static bool is_float_scale(uint8_t dtype)
{
    return dtype == QX_DT_BF16 || dtype == QX_DT_F16 || dtype == QX_DT_F32;
}

static bool is_plain(uint8_t dtype)
{
    return is_float_scale(dtype) || dtype == QX_DT_F64;
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Is a name in the index but its tensor not readable for want of its file? Reported on opening. */
static bool is_absent(const struct qx_ckpt *ck, const char *name)
{
    size_t lo = 0, hi = qx_ckpt_n_absent(ck);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(qx_ckpt_absent(ck, mid)->name, name) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < qx_ckpt_n_absent(ck) && strcmp(qx_ckpt_absent(ck, lo)->name, name) == 0;
}

static const struct qx_extra *find_extra(const struct qx_ckpt *ck, const char *name)
{
    size_t lo = 0, hi = qx_ckpt_n_extras(ck);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(qx_ckpt_extra(ck, mid)->t.name, name) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < qx_ckpt_n_extras(ck) && strcmp(qx_ckpt_extra(ck, lo)->t.name, name) == 0
               ? qx_ckpt_extra(ck, lo)
               : NULL;
}

static void add(struct checker *k, struct qx_report r)
{
    if (!qx_findings_add(k->fs, &r)) {
        k->nomem = true;
    }
}

/* ---- missing ------------------------------------------------------------------------------ */

static struct layer_gap *gap_of(struct checker *k, const struct qx_module *m, const char *which)
{
    struct layer_gap *g;
    for (size_t i = k->n_gaps; i > 0; --i) {
        g = &k->gap[i - 1];
        if (g->is_mtp == m->is_mtp && g->layer == m->layer && strcmp(g->which, which) == 0) {
            return g;
        }
    }
    if (!qx_grow((void **)&k->gap, &k->cap_gaps, k->n_gaps + 1, sizeof *k->gap)) {
        k->nomem = true;
        return NULL;
    }
    g = &k->gap[k->n_gaps++];
    *g = (struct layer_gap){.is_mtp = m->is_mtp, .layer = m->layer, .which = which};
    return g;
}

static void gap_add(struct checker *k, const struct qx_module *m, const char *which, const char *name)
{
    struct layer_gap *g = gap_of(k, m, which);
    size_t word = (size_t)m->expert / 64;
    if (!g) {
        return;
    }
    if (word >= g->experts.n_words) {
        size_t cap = g->experts.n_words;
        if (!qx_grow((void **)&g->experts.bits, &cap, word + 1, sizeof *g->experts.bits)) {
            k->nomem = true;
            return;
        }
        memset(g->experts.bits + g->experts.n_words, 0,
               (cap - g->experts.n_words) * sizeof *g->experts.bits);
        g->experts.n_words = cap;
    }
    g->experts.bits[word] |= UINT64_C(1) << (m->expert % 64);
    if (!qx_grow((void **)&g->names, &g->cap_names, g->n_names + 1, sizeof *g->names) ||
        !(g->names[g->n_names] = qx_arena_strndup(k->arena, name, strlen(name)))) {
        k->nomem = true;
        return;
    }
    ++g->n_names;
}

/* `which` as in the name, e.g. "weight_scale_2"; `also` another accepted name or NULL. */
static void missing(struct checker *k, const char *module, const struct qx_module *m,
                    const struct qx_tensor *weight, const char *which, const char *also)
{
    char name[640], group[128];
    struct qx_buf text = {0};
    const struct qx_extra *x;
    snprintf(name, sizeof name, "%s.%s", module, which);
    if (is_absent(k->ck, name)) {
        return;
    }
    if (also) {
        char other[640];
        snprintf(other, sizeof other, "%s.%s", module, also);
        if (is_absent(k->ck, other)) {
            return;
        }
    }
    x = find_extra(k->ck, name);
    if (m && m->expert >= 0 && !x) {
        gap_add(k, m, which, name);
        return;
    }
    qx_buf_fmt(&text, "'%s' has no %s", weight ? weight->name : module, which);
    if (also) {
        qx_buf_fmt(&text, " (nor %s)", also);
    }
    if (x) {
        qx_buf_fmt(&text, "; an unindexed copy lies in %s and is not used",
                   qx_ckpt_file(k->ck, x->t.file)->name);
    } else {
        qx_buf_str(&text, "; no value is assumed");
    }
    snprintf(group, sizeof group, "missing|%s|%d|%s", which, x != NULL, last_part(module));
    add(k, QX_REPORT("missing-scale", QX_ERROR, .file = file_of(k, weight), .tensor = name,
                     .expected = which, .found = x ? "only in an unindexed tensor" : "absent",
                     .text = qx_buf_cstr(&text), .group = m ? group : NULL));
    qx_buf_fini(&text);
}

/* "0-3, 7" of a bit set, cut after a while; returns how many bits are set. */
static uint64_t set_text(const struct qx_u64_set *s, struct qx_buf *b)
{
    uint64_t n = 0, max = (uint64_t)s->n_words * 64, i = 0;
    unsigned shown = 0;
    while (i < max) {
        uint64_t from = i;
        if (!(s->bits[i / 64] >> (i % 64) & 1u)) {
            ++i;
            continue;
        }
        while (i < max && (s->bits[i / 64] >> (i % 64) & 1u)) {
            ++i;
        }
        n += i - from;
        if (++shown > 12) {
            qx_buf_str(b, shown == 13 ? ", ..." : "");
        } else if (i - from == 1) {
            qx_buf_fmt(b, "%s%llu", shown > 1 ? ", " : "", (unsigned long long)from);
        } else {
            qx_buf_fmt(b, "%s%llu-%llu", shown > 1 ? ", " : "", (unsigned long long)from,
                       (unsigned long long)(i - 1));
        }
    }
    return n;
}

/* Experts of a layer that are stored at all. */
static uint64_t experts_of(const struct checker *k, bool is_mtp, int32_t layer)
{
    uint64_t n = 0;
    int32_t last = -1;
    for (size_t i = 0; i < qx_resolved_n_modules(k->res); ++i) {
        const struct qx_module *m = qx_resolved_module(k->res, i);
        if (m->expert >= 0 && m->layer == layer && m->is_mtp == is_mtp && m->weight &&
            m->expert != last) {
            ++n;
            last = m->expert;
        }
    }
    return n;
}

static void report_gaps(struct checker *k)
{
    for (size_t i = 0; i < k->n_gaps; ++i) {
        struct layer_gap *g = &k->gap[i];
        struct qx_buf list = {0}, text = {0};
        char group[96];
        uint64_t n = set_text(&g->experts, &list);
        qx_buf_fmt(&text, "%slayer %d: %s missing for %llu of %llu experts (%s)", g->is_mtp ? "mtp " : "",
                   g->layer, g->which, (unsigned long long)n,
                   (unsigned long long)experts_of(k, g->is_mtp, g->layer),
                   list.n ? qx_buf_cstr(&list) : "");
        snprintf(group, sizeof group, "gap|%d|%d|%s", g->is_mtp, g->layer, g->which);
        for (size_t j = 0; j < g->n_names; ++j) {
            add(k, QX_REPORT("missing-scale", QX_ERROR, .tensor = g->names[j], .expected = g->which,
                             .found = "absent", .text = qx_buf_cstr(&text), .group = group));
        }
        qx_buf_fini(&list);
        qx_buf_fini(&text);
    }
}

/* ---- type and shape ----------------------------------------------------------------------- */

static void wrong(struct checker *k, const char *kind, const struct qx_module *m,
                  const struct qx_tensor *t, const char *expected, const char *found, const char *of)
{
    char group[160];
    struct qx_buf text = {0};
    snprintf(group, sizeof group, "%s|%s|%s|%s|%d|%d|%s", kind, expected, found, last_part(t->name),
             m ? m->layer : -1, m ? m->is_mtp : 0, m ? last_part(m->name) : "");
    qx_buf_fmt(&text, "'%s' is %s, expected %s%s%s", t->name, found, expected, of ? " for " : "",
               of ? of : "");
    add(k, QX_REPORT(kind, QX_ERROR, .file = file_of(k, t), .tensor = t->name,
                     .expected = expected, .found = found, .text = qx_buf_cstr(&text),
                     .group = m ? group : NULL));
    qx_buf_fini(&text);
}

static void wrong_shape(struct checker *k, const struct qx_module *m, const struct qx_tensor *t,
                        const uint64_t *want, size_t n_want, const char *of)
{
    char expected[96], found[96];
    shape_text(want, n_want, expected);
    shape_text(t->shape, t->n_dims, found);
    wrong(k, "scale-shape", m, t, expected, found, of);
}

static bool shape_is(const struct qx_tensor *t, const uint64_t *want, size_t n)
{
    if (t->n_dims != n) {
        return false;
    }
    for (size_t i = 0; i < n; ++i) {
        if (t->shape[i] != want[i]) {
            return false;
        }
    }
    return true;
}

/* One number for the whole tensor: [], [1], [1,1]; for fused experts also one an expert. */
static void check_scalar(struct checker *k, const struct qx_module *m, const struct qx_tensor *t,
                         uint64_t stacked)
{
    bool each = stacked > 1 && t->n_elems == stacked && t->n_dims >= 1 && t->shape[0] == stacked;
    if (!is_float_scale(t->dtype)) {
        wrong(k, "scale-dtype", m, t, "F32, BF16 or F16", qx_dtype_name(t->dtype), "a scale of one number");
    } else if (t->n_elems != 1 && !each) {
        char found[96];
        shape_text(t->shape, t->n_dims, found);
        wrong(k, "scale-shape", m, t, "one element", found, NULL);
    }
}

/* ---- the forms ---------------------------------------------------------------------------- */

/* Last two dimensions of a weight and what stands before them. */
static bool matrix(const struct qx_tensor *w, uint64_t *stacked, uint64_t *rows, uint64_t *cols)
{
    if (w->n_dims < 2 || w->n_dims > 3) {
        return false;
    }
    *stacked = w->n_dims == 3 ? w->shape[0] : 1;
    *rows = w->shape[w->n_dims - 2];
    *cols = w->shape[w->n_dims - 1];
    return true;
}

/* Expected scale shape: [rows, cols], with the stack in front for a 3-D weight. */
static size_t want_shape(const struct qx_tensor *w, uint64_t rows, uint64_t cols, uint64_t want[3])
{
    size_t n = 0;
    if (w->n_dims == 3) {
        want[n++] = w->shape[0];
    }
    want[n++] = rows;
    want[n++] = cols;
    return n;
}

/* Does an expert without input_scale lack one? Yes when the configuration asks for 4-bit activations,
 * or says nothing and another expert has one. */
static bool needs_input_scale(const struct checker *k, const struct qx_module *m)
{
    if (m->claimed == QX_F_NVFP4) {
        return true;
    }
    return m->claimed == QX_F_NONE && m->expert >= 0 && layer_index(m) < 2 * QX_MAX_LAYERS &&
           k->has_input_scale[layer_index(m)];
}

static void check_nvfp4(struct checker *k, const struct qx_module *m)
{
    uint64_t stacked, rows, bytes, cols, want[3];
    if (!matrix(m->weight, &stacked, &rows, &bytes) || !qx_mul_u64(bytes, 2, &cols)) {
        return;
    }
    if (!m->scale) {
        missing(k, m->name, m, m->weight, "weight_scale", NULL);
    } else if (m->scale->dtype != QX_DT_F8_E4M3) {
        wrong(k, "scale-dtype", m, m->scale, "F8_E4M3", qx_dtype_name(m->scale->dtype),
              "blocks of 16 values");
    } else if (cols % 16 == 0) {
        size_t n = want_shape(m->weight, rows, cols / 16, want);
        if (!shape_is(m->scale, want, n)) {
            wrong_shape(k, m, m->scale, want, n, "blocks of 16 values");
        }
    }
    if (!m->scale_2) {
        missing(k, m->name, m, m->weight, "weight_scale_2", NULL);
    } else {
        check_scalar(k, m, m->scale_2, stacked);
    }
    if (m->input_scale) {
        check_scalar(k, m, m->input_scale, stacked);
    } else if (needs_input_scale(k, m)) {
        missing(k, m->name, m, m->weight, "input_scale", NULL);
    }
}

static void check_block(struct checker *k, const struct qx_module *m, uint64_t rows, uint64_t cols,
                        bool inv_name)
{
    uint64_t want[3], b = qx_ceil_div(rows, 128), a = qx_ceil_div(cols, 128);
    size_t n = want_shape(m->weight, b, a, want);
    const struct qx_tensor *s = m->scale;
    uint64_t four[4] = {b, 1, a, 1};
    char group[128];
    if (shape_is(s, want, n)) {
        /* as it should be */
    } else if (m->weight->n_dims == 2 && shape_is(s, four, 4)) {
        char found[96];
        struct qx_buf text = {0};
        shape_text(s->shape, s->n_dims, found);
        qx_buf_fmt(&text, "block scales are stored with four dimensions %s and read as [%llu,%llu]", found,
                   (unsigned long long)b, (unsigned long long)a);
        snprintf(group, sizeof group, "4d|%d|%d|%d", m->component, m->layer, m->is_mtp);
        add(k, QX_REPORT("scale-4d", QX_NOTE, .file = file_of(k, s), .tensor = s->name, .found = found,
                         .text = qx_buf_cstr(&text), .group = group));
        qx_buf_fini(&text);
    } else if (b == 1 && a == 1 && s->n_elems == 1) {
        /* one block: any shape of one element says the same */
    } else {
        wrong_shape(k, m, s, want, n, "blocks of 128 x 128");
        return;
    }
    if (!inv_name) {
        struct qx_buf text = {0};
        qx_buf_str(&text, "block scales are named weight_scale instead of weight_scale_inv; they are used");
        add(k, QX_REPORT("scale-name-variant", QX_WARNING, .file = file_of(k, s), .tensor = s->name,
                         .expected = "weight_scale_inv", .found = "weight_scale",
                         .text = qx_buf_cstr(&text), .group = "scale-name-variant"));
        qx_buf_fini(&text);
    }
}

static void check_fp8(struct checker *k, const struct qx_module *m)
{
    uint64_t stacked, rows, cols, want[3];
    const struct qx_tensor *s = m->scale;
    bool inv;
    if (!matrix(m->weight, &stacked, &rows, &cols)) {
        return;
    }
    if (m->claimed == QX_F_NVFP4 || m->claimed == QX_F_W4A16_NVFP4) {
        return; /* weight-dtype says it all */
    }
    if (!s) {
        bool block = m->claimed == QX_F_FP8_BLOCK;
        bool known = block || m->claimed == QX_F_FP8 || m->claimed == QX_F_MXFP8;
        missing(k, m->name, m, m->weight, block ? "weight_scale_inv" : "weight_scale",
                known && !block ? NULL : block ? "weight_scale" : "weight_scale_inv");
        return;
    }
    inv = qx_str_ends(s->name, ".weight_scale_inv") || qx_str_ends(s->name, "_scale_inv");
    if (s->dtype == QX_DT_U8 || s->dtype == QX_DT_F8_E8M0) {
        size_t n = want_shape(m->weight, rows, qx_ceil_div(cols, 32), want);
        if (s->n_elems == 1 && m->claimed != QX_F_MXFP8 && rows * cols > 32) {
            wrong(k, "scale-dtype", m, s, "F32, BF16 or F16", qx_dtype_name(s->dtype), NULL);
        } else if (!shape_is(s, want, n)) {
            wrong_shape(k, m, s, want, n, "groups of 32 values");
        }
    } else if (!is_float_scale(s->dtype)) {
        wrong(k, "scale-dtype", m, s, inv ? "BF16, F16 or F32" : "BF16, F16, F32 or U8",
              qx_dtype_name(s->dtype), NULL);
    } else if (inv || (s->n_elems > 1 && !(stacked > 1 && s->n_elems == stacked && s->n_dims == 1))) {
        check_block(k, m, rows, cols, inv);
    }
    if (m->input_scale) {
        check_scalar(k, m, m->input_scale, stacked);
    }
}

static void unused(struct checker *k, const char *module, const struct qx_tensor *weight,
                   const struct qx_tensor *s)
{
    struct qx_buf text = {0};
    if (!s) {
        return;
    }
    qx_buf_fmt(&text, "'%s' is stored as %s: its %s is not used, values are not multiplied by it", module,
               qx_dtype_name(weight->dtype), last_part(s->name));
    add(k, QX_REPORT("unused-scale", QX_WARNING, .file = file_of(k, s), .tensor = s->name,
                     .text = qx_buf_cstr(&text), .group = last_part(s->name)));
    qx_buf_fini(&text);
}

static void check_module(struct checker *k, const struct qx_module *m)
{
    const struct qx_tensor *first = m->scale     ? m->scale
                                    : m->scale_2 ? m->scale_2
                                                 : m->input_scale;
    if (m->foreign) {
        return; /* companions of another convention: foreign-convention says it */
    }
    if (!m->weight) {
        char name[640];
        snprintf(name, sizeof name, "%s.weight", m->name);
        if (first && !is_absent(k->ck, name) && !is_absent(k->ck, m->name)) {
            struct qx_buf text = {0};
            qx_buf_fmt(&text, "'%s' is the scale of a weight that is not stored", first->name);
            add(k, QX_REPORT("scale-without-weight", QX_ERROR, .file = file_of(k, first),
                             .tensor = first->name, .expected = name, .found = "absent",
                             .text = qx_buf_cstr(&text), .group = last_part(m->name)));
            qx_buf_fini(&text);
        }
        return;
    }
    if (m->weight->dtype == QX_DT_U8) {
        check_nvfp4(k, m);
    } else if (m->weight->dtype == QX_DT_F8_E4M3) {
        check_fp8(k, m);
        unused(k, m->name, m->weight, m->scale_2);
    } else if (is_plain(m->weight->dtype)) {
        unused(k, m->name, m->weight, m->scale);
        unused(k, m->name, m->weight, m->scale_2);
        unused(k, m->name, m->weight, m->input_scale);
    }
    unused(k, m->name, m->weight, m->other_scale);
}

/* ---- the table ---------------------------------------------------------------------------- */

static void check_table(struct checker *k, const struct qx_table *t)
{
    const struct qx_tensor *first = NULL;
    uint64_t want[2];
    if (!t || !t->present || t->packed_rows) {
        return;
    }
    for (uint32_t i = 0; i < t->n_shards && !first; ++i) {
        first = t->shards[i].weight;
    }
    if (!first || first->n_dims != 2) {
        return;
    }
    if (is_plain(first->dtype)) {
        static const char *const leaf[] = {"weight_scale", "weight_scale_2", "weight_scale_inv"};
        for (size_t i = 0; i < QX_ARRAY_LEN(leaf); ++i) {
            char name[640];
            snprintf(name, sizeof name, "%s.%s", t->module, leaf[i]);
            unused(k, t->module, first, qx_ckpt_find(k->ck, name));
        }
        for (uint32_t i = 0; i < t->n_shards; ++i) {
            if (t->shards[i].weight) {
                unused(k, t->shards[i].weight->name, t->shards[i].weight, t->shards[i].scale);
            }
        }
        return;
    }
    if (first->dtype == QX_DT_F8_E4M3 && first->shape[1] == t->width) {
        if (!t->global) {
            missing(k, t->module, NULL, first, "weight_scale", NULL);
        } else {
            check_scalar(k, NULL, t->global, 1);
        }
    } else if (first->dtype == QX_DT_U8 && first->shape[1] == t->width / 2 && t->width % 16 == 0) {
        if (!t->global) {
            missing(k, t->module, NULL, first, "weight_scale_2", NULL);
        } else {
            check_scalar(k, NULL, t->global, 1);
        }
        for (uint32_t i = 0; i < t->n_shards; ++i) {
            const struct qx_table_shard *s = &t->shards[i];
            if (!s->weight || s->weight->n_dims != 2 || s->weight->dtype != QX_DT_U8) {
                continue;
            }
            want[0] = s->weight->shape[0];
            want[1] = t->width / 16;
            if (!s->scale) {
                char module[640];
                snprintf(module, sizeof module, "%s.shard_%u", t->module, i);
                missing(k, module, NULL, s->weight, "weight_scale", NULL);
            } else if (s->scale->dtype != QX_DT_F8_E4M3) {
                wrong(k, "scale-dtype", NULL, s->scale, "F8_E4M3", qx_dtype_name(s->scale->dtype),
                      "blocks of 16 values");
            } else if (!shape_is(s->scale, want, 2)) {
                wrong_shape(k, NULL, s->scale, want, 2, "blocks of 16 values");
            }
        }
    }
}

int qx_rules_scale_headers(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err)
{
    struct checker k = {.ck = ck, .res = qx_ckpt_resolved(ck), .fs = fs};
    int rc = 0;
    if (!k.res) {
        return 0;
    }
    k.arena = qx_arena_create();
    if (!k.arena) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < qx_resolved_n_modules(k.res); ++i) {
        const struct qx_module *m = qx_resolved_module(k.res, i);
        if (m->input_scale && m->expert >= 0 && layer_index(m) < QX_ARRAY_LEN(k.has_input_scale)) {
            k.has_input_scale[layer_index(m)] = true;
        }
    }
    for (size_t i = 0; i < qx_resolved_n_modules(k.res); ++i) {
        check_module(&k, qx_resolved_module(k.res, i));
    }
    check_table(&k, qx_resolved_table(k.res));
    report_gaps(&k);
    for (size_t i = 0; i < k.n_gaps; ++i) {
        qx_free(k.gap[i].experts.bits);
        qx_free(k.gap[i].names);
    }
    qx_free(k.gap);
    qx_arena_destroy(k.arena);
    if (k.nomem || qx_findings_failed(fs)) {
        rc = qx_fail_nomem(err);
    }
    return rc;
}
