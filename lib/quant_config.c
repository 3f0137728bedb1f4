/* quant_config.c: owns the reading of quantisation settings and the matching of their names. Values
 * of the wrong type are errors here; what the settings claim is judged against storage in
 * resolve.c. */
#include "quant_config.h"

#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- vocabulary ------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    enum qx_algo algo;
    enum qx_format format;
    uint32_t group; /* the only group size of the format; 0: has none */
} algos[] = {
    {"NVFP4", QX_A_NVFP4, QX_F_NVFP4, 16},
    {"W4A16_NVFP4", QX_A_W4A16_NVFP4, QX_F_W4A16_NVFP4, 16},
    {"FP8", QX_A_FP8, QX_F_FP8, 0},
    {"FP8_BLOCK_SCALES", QX_A_FP8_BLOCK, QX_F_FP8_BLOCK, 128},
    {"FP8_PB_WO", QX_A_FP8_BLOCK, QX_F_FP8_BLOCK, 128},
    {"MXFP8", QX_A_MXFP8, QX_F_MXFP8, 32},
    {"MIXED_PRECISION", QX_A_MIXED, QX_F_NONE, 0},
};

enum qx_algo qx_algo_parse(const char *s)
{
    if (!s || s[0] == '\0') {
        return QX_A_NONE;
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(algos); i++) {
        if (strcasecmp(algos[i].name, s) == 0) {
            return algos[i].algo;
        }
    }
    return QX_A_UNKNOWN;
}

enum qx_format qx_algo_format(enum qx_algo a)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(algos); i++) {
        if (algos[i].algo == a) {
            return algos[i].format;
        }
    }
    return QX_F_NONE;
}

const char *qx_algo_names(void)
{
    return "NVFP4, W4A16_NVFP4, FP8, FP8_BLOCK_SCALES, FP8_PB_WO, MXFP8, MIXED_PRECISION";
}

static uint32_t group_of(enum qx_algo a)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(algos); i++) {
        if (algos[i].algo == a) {
            return algos[i].group;
        }
    }
    return 0;
}

/* ---- names ----------------------------------------------------------------------------------- */

static bool starts(const char *s, size_t n, const char *lit)
{
    size_t m = strlen(lit);
    return n >= m && memcmp(s, lit, m) == 0;
}

static bool is_or_below(const char *s, size_t n, const char *lit)
{
    size_t m = strlen(lit);
    return starts(s, n, lit) && (n == m || s[m] == '.' || s[m] == '*');
}

struct qx_norm qx_norm_name(const char *s, size_t n)
{
    static const struct {
        const char *text;
        bool disk;
    } heads[] = {
        {"model.language_model.model.", false},
        {"model.language_model.", true},
        {"language_model.model.", false},
        {"language_model.", false},
        {"model.", false},
    };
    struct qx_norm r = {s, n, QX_PART_ANY, false};
    if (is_or_below(s, n, "mtp")) {
        r.part = QX_PART_MTP;
        return r;
    }
    if (is_or_below(s, n, "lm_head")) {
        r.part = QX_PART_HEAD;
        return r;
    }
    if (is_or_below(s, n, "visual")) {
        r.part = QX_PART_VISION;
        r.stripped = true;
        return r;
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(heads); i++) {
        size_t m = strlen(heads[i].text);
        if (!starts(s, n, heads[i].text)) {
            continue;
        }
        struct qx_norm in = {s + m, n - m, QX_PART_TEXT, !heads[i].disk};
        if (is_or_below(in.p, in.n, "mtp")) {
            in.part = QX_PART_MTP;
        } else if (is_or_below(in.p, in.n, "lm_head")) {
            in.part = QX_PART_HEAD;
        } else if (is_or_below(in.p, in.n, "visual")) {
            in.part = QX_PART_VISION;
            in.stripped = strcmp(heads[i].text, "model.") != 0;
        }
        return in;
    }
    return r;
}

static int norm_cmp(struct qx_norm a, struct qx_norm b)
{
    size_t n = a.n < b.n ? a.n : b.n;
    int c = n ? memcmp(a.p, b.p, n) : 0;
    return c ? c : (a.n < b.n ? -1 : a.n > b.n);
}

static int entry_cmp(const void *a, const void *b)
{
    const struct qx_quant_entry *x = a;
    const struct qx_quant_entry *y = b;
    int c = norm_cmp(x->norm, y->norm);
    /* The name that tensors have goes before an alias of it. */
    return c ? c : (x->mtp_alias ? 1 : 0) - (y->mtp_alias ? 1 : 0);
}

struct qx_quant_entry *qx_quant_find_entry(const struct qx_quant_home *h, struct qx_norm m)
{
    while (h->n_entries && m.n) {
        size_t lo = 0;
        size_t hi = h->n_entries;
        while (lo < hi) {
            size_t mid = lo + (hi - lo) / 2;
            if (norm_cmp(h->entries[mid].norm, m) < 0) {
                lo = mid + 1;
            } else {
                hi = mid;
            }
        }
        if (lo < h->n_entries && norm_cmp(h->entries[lo].norm, m) == 0) {
            return &h->entries[lo];
        }
        const char *dot = memrchr(m.p, '.', m.n);
        m.n = dot ? (size_t)(dot - m.p) : 0;
    }
    return NULL;
}

/* Glob over two byte ranges: '*' any run, '?' one character. */
static bool glob(const char *p, const char *pe, const char *s, const char *se)
{
    const char *star = NULL;
    const char *mark = NULL;
    while (s < se) {
        if (p < pe && (*p == '?' || *p == *s) && *p != '*') {
            p++;
            s++;
        } else if (p < pe && *p == '*') {
            star = p++;
            mark = s;
        } else if (star) {
            p = star + 1;
            s = ++mark;
        } else {
            return false;
        }
    }
    while (p < pe && *p == '*') {
        p++;
    }
    return p == pe;
}

static bool covers(const struct qx_norm *a, struct qx_norm m)
{
    return a->n <= m.n && memcmp(a->p, m.p, a->n) == 0 && (a->n == m.n || m.p[a->n] == '.');
}

struct qx_quant_pattern *qx_quant_find_pattern(struct qx_quant_pattern *list, size_t n,
                                               const char *name, struct qx_norm m)
{
    const char *end = m.p + m.n;
    for (size_t i = 0; i < n; i++) {
        struct qx_quant_pattern *p = &list[i];
        bool same_part = p->norm.part == m.part;
        bool hit;
        if (p->is_glob) {
            hit = glob(p->text, p->text + strlen(p->text), name, end) ||
                  (same_part && glob(p->norm.p, p->norm.p + p->norm.n, m.p, end));
        } else {
            hit = same_part && covers(&p->norm, m);
        }
        if (hit) {
            p->used = true;
            return p;
        }
    }
    return NULL;
}

struct qx_quant_pattern *qx_quant_find_convert(const struct qx_quant_home *h, struct qx_norm m)
{
    for (size_t i = 0; i < h->n_convert; i++) {
        struct qx_quant_pattern *p = &h->convert[i];
        size_t n = p->norm.n;
        if (p->is_glob ? glob(p->norm.p, p->norm.p + n, m.p, m.p + m.n)
                       : n <= m.n && memcmp(m.p + m.n - n, p->norm.p, n) == 0 &&
                             (n == m.n || m.p[m.n - n - 1] == '.')) {
            p->used = true;
            return p;
        }
    }
    return NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

struct qreader {
    const char *file, *path;
    const struct qx_config *c;
    struct qx_arena *arena;
    struct qx_findings *fs;
    struct qx_error *err;
    int rc;
};

static void type_error(struct qreader *r, const char *key, const struct qx_json *v,
                       const char *expected)
{
    char brief[48];
    if (!r->rc) {
        r->rc = qx_fail(r->err, QX_E_CONFIG, "config-type", "key '%s%s': expected %s, found %s%s%s",
                        r->path, key, expected, qx_json_type_name(v), v->str ? " " : "",
                        v->str ? qx_json_brief(v, brief) : "");
        qx_error_at(r->err, r->file, NULL, v->off);
    }
}

static const char *keep(struct qreader *r, const char *s, size_t n)
{
    char *p = qx_arena_strndup(r->arena, s, n);
    if (!p && !r->rc) {
        r->rc = qx_fail_nomem(r->err);
    }
    return p ? p : "";
}

static const char *read_word(struct qreader *r, const struct qx_json *o, const char *key)
{
    const struct qx_json *v = qx_json_get(o, key);
    if (!v || v->type == QX_JSON_NULL) {
        return "";
    }
    if (v->type != QX_JSON_STRING) {
        type_error(r, key, v, "a string");
        return "";
    }
    return keep(r, v->str, v->str_n);
}

/* A group or block size: 0 when absent or null, else a positive whole number. */
static uint32_t read_size(struct qreader *r, const struct qx_json *v, const char *key)
{
    if (!v || v->type == QX_JSON_NULL) {
        return 0;
    }
    bool ok = v->type == QX_JSON_NUMBER && !v->is_nonfinite && v->f64 >= 1 && v->f64 <= 1e9 &&
              v->f64 == (double)(uint32_t)v->f64;
    if (!ok) {
        type_error(r, key, v, "a positive whole number");
        return 0;
    }
    return (uint32_t)v->f64;
}

static void read_patterns(struct qreader *r, struct qx_quant_home *h, const struct qx_json *o,
                          const char *key, struct qx_quant_pattern **out, size_t *n_out)
{
    const struct qx_json *v = qx_json_get(o, key);
    if (!v || v->type == QX_JSON_NULL || r->rc) {
        return;
    }
    if (v->type != QX_JSON_ARRAY) {
        type_error(r, key, v, "a list");
        return;
    }
    size_t bytes = 0;
    struct qx_quant_pattern *list = NULL;
    if (qx_mul_size(v->n_children, sizeof *list, &bytes)) {
        list = qx_arena_alloc(r->arena, bytes, _Alignof(struct qx_quant_pattern));
    }
    if (!list) {
        r->rc = qx_fail_nomem(r->err);
        return;
    }
    size_t n = 0;
    for (const struct qx_json *e = v->child; e; e = e->next) {
        char where[96];
        if (e->type != QX_JSON_STRING) {
            snprintf(where, sizeof where, "%s[%zu]", key, n);
            type_error(r, where, e, "a string");
            return;
        }
        const char *s = keep(r, e->str, e->str_n);
        struct qx_norm norm = qx_norm_name(s, strlen(s));
        list[n++] = (struct qx_quant_pattern){s, norm, strpbrk(s, "*?") != NULL, false};
        h->n_normalised += norm.stripped;
    }
    *out = list;
    *n_out = n;
}

/* mtp.layers.<num_hidden_layers> names the MTP layer by its number at run time. */
static void rewrite_mtp(struct qreader *r, struct qx_quant_entry *e)
{
    char head[48];
    if (e->norm.part != QX_PART_MTP || !r->c || r->c->n_layers == 0) {
        return;
    }
    int n = snprintf(head, sizeof head, "mtp.layers.%" PRIu32, r->c->n_layers);
    if (n <= 0 || !is_or_below(e->norm.p, e->norm.n, head)) {
        return;
    }
    struct qx_buf b = {0};
    qx_buf_str(&b, "mtp.layers.0");
    qx_buf_add(&b, e->norm.p + n, e->norm.n - (size_t)n);
    if (b.failed) {
        r->rc = qx_fail_nomem(r->err);
    } else {
        e->norm.n = b.n;
        e->norm.p = keep(r, b.p, b.n);
        e->mtp_alias = true;
    }
    qx_buf_fini(&b);
}

static void check_group(struct qreader *r, const char *key, const struct qx_quant_entry *e)
{
    uint32_t want = group_of(e->algo);
    char path[300];
    char expected[16];
    char found[16];
    char text[200];
    if (want == 0 || !r->fs || e->group_size == want) {
        return;
    }
    snprintf(path, sizeof path, "%squantized_layers.%s.group_size", r->path, key);
    snprintf(expected, sizeof expected, "%" PRIu32, want);
    if (e->group_size == 0) {
        snprintf(text, sizeof text,
                 "the entry gives no group_size; %s has groups of %" PRIu32 " only", e->algo_text,
                 want);
        qx_findings_add(r->fs,
                        &QX_REPORT("group-size-missing", QX_NOTE, .file = r->file, .key = path,
                                   .expected = expected, .text = text, .group = e->algo_text));
        return;
    }
    snprintf(found, sizeof found, "%" PRIu32, e->group_size);
    snprintf(text, sizeof text,
             "%s is declared with groups of %" PRIu32 "; it has groups of %" PRIu32 " only",
             e->algo_text, e->group_size, want);
    qx_findings_add(r->fs, &QX_REPORT("unsupported-group-size", QX_ERROR, .file = r->file,
                                      .key = path, .expected = expected, .found = found,
                                      .text = text, .group = e->algo_text));
}

static void read_entries(struct qreader *r, struct qx_quant_home *h, const struct qx_json *o)
{
    const struct qx_json *m = qx_json_get(o, "quantized_layers");
    size_t bytes = 0;
    if (!m || m->type == QX_JSON_NULL || r->rc) {
        return;
    }
    if (m->type != QX_JSON_OBJECT) {
        type_error(r, "quantized_layers", m, "an object");
        return;
    }
    if (m->n_children == 0 || !qx_mul_size(m->n_children, sizeof *h->entries, &bytes)) {
        return;
    }
    h->entries = qx_arena_alloc(r->arena, bytes, _Alignof(struct qx_quant_entry));
    h->order = qx_arena_alloc(r->arena, m->n_children * sizeof *h->order, sizeof(void *));
    if (!h->entries || !h->order) {
        r->rc = qx_fail_nomem(r->err);
        return;
    }
    size_t n = 0;
    for (const struct qx_json *v = qx_json_each(m, NULL); v && !r->rc; v = qx_json_each(m, v)) {
        char key[300];
        snprintf(key, sizeof key, "quantized_layers.%s", v->key);
        if (v->type != QX_JSON_OBJECT) {
            type_error(r, key, v, "an object");
            return;
        }
        struct qx_quant_entry *e = &h->entries[n++];
        *e = (struct qx_quant_entry){.key = keep(r, v->key, strlen(v->key))};
        e->norm = qx_norm_name(e->key, strlen(e->key));
        h->n_normalised += e->norm.stripped;
        rewrite_mtp(r, e);
        struct qreader in = *r;
        char path[400];
        snprintf(path, sizeof path, "%s%s.", r->path, key);
        in.path = path;
        e->algo_text = read_word(&in, v, "quant_algo");
        e->algo = qx_algo_parse(e->algo_text);
        e->group_size = read_size(&in, qx_json_get(v, "group_size"), "group_size");
        r->rc = in.rc;
        check_group(r, v->key, e);
    }
    h->n_entries = n;
    if (n > 1) {
        qsort(h->entries, n, sizeof(h->entries[0]), entry_cmp);
    }
    for (size_t i = 0; i < n; i++) {
        h->order[i] = &h->entries[i];
    }
}

static double number_of(const struct qx_json *o, const char *key)
{
    const struct qx_json *v = qx_json_get(o, key);
    return v && v->type == QX_JSON_NUMBER && !v->is_nonfinite ? v->f64 : 0;
}

/* The format that a group's numbers describe. */
static enum qx_format group_format(const struct qx_json *group)
{
    const struct qx_json *w = qx_json_get(group, "weights");
    const struct qx_json *type = qx_json_get(w, "type");
    double bits = number_of(w, "num_bits");
    double size = number_of(w, "group_size");
    if (!type || type->type != QX_JSON_STRING || strcmp(type->str, "float") != 0) {
        return QX_F_NONE;
    }
    if (bits == 4 && size == 16) {
        return qx_json_get(group, "input_activations") ? QX_F_NVFP4 : QX_F_W4A16_NVFP4;
    }
    if (bits == 8) {
        return size == 0     ? QX_F_FP8
               : size == 32  ? QX_F_MXFP8
               : size == 128 ? QX_F_FP8_BLOCK
                             : QX_F_NONE;
    }
    return QX_F_NONE;
}

/* config_groups repeat what quantized_layers says; their shape is not required to be known. */
static void read_groups(struct qreader *r, struct qx_quant_home *h, const struct qx_json *o)
{
    const struct qx_json *groups = qx_json_get(o, "config_groups");
    size_t n = 0;
    size_t bytes = 0;
    for (const struct qx_json *g = qx_json_each(groups, NULL); g; g = qx_json_each(groups, g)) {
        const struct qx_json *t = qx_json_get(g, "targets");
        n += t ? t->n_children : 0;
    }
    if (n == 0 || r->rc || !qx_mul_size(n, sizeof *h->targets, &bytes)) {
        return;
    }
    h->targets = qx_arena_alloc(r->arena, bytes, _Alignof(struct qx_quant_target));
    if (!h->targets) {
        r->rc = qx_fail_nomem(r->err);
        return;
    }
    for (const struct qx_json *g = qx_json_each(groups, NULL); g; g = qx_json_each(groups, g)) {
        const struct qx_json *t = qx_json_get(g, "targets");
        for (const struct qx_json *v = qx_json_each(t, NULL); v; v = qx_json_each(t, v)) {
            /* "Linear" and regular expressions name kinds of modules, not modules. */
            if (v->type != QX_JSON_STRING || !strchr(v->str, '.') ||
                strncmp(v->str, "re:", 3) == 0) {
                continue;
            }
            const char *s = keep(r, v->str, v->str_n);
            h->targets[h->n_targets++] =
                (struct qx_quant_target){g->key ? keep(r, g->key, strlen(g->key)) : "", s,
                                         qx_norm_name(s, strlen(s)), group_format(g)};
        }
    }
}

static void read_method(struct qreader *r, struct qx_quant_home *h, const struct qx_json *o)
{
    static const char *const foreign[] = {"gptq", "auto-round",   "awq", "compressed-tensors",
                                          "exl3", "bitsandbytes", "hqq", "aqlm",
                                          "mlx"};
    h->method = read_word(r, o, "quant_method");
    h->algo_text = read_word(r, o, "quant_algo");
    h->kv_cache = read_word(r, o, "kv_cache_quant_algo");
    h->algo = qx_algo_parse(h->algo_text);
    h->group_size = read_size(r, qx_json_get(o, "group_size"), "group_size");
    for (size_t i = 0; i < QX_ARRAY_LEN(foreign); i++) {
        h->is_foreign = h->is_foreign || strcasecmp(h->method, foreign[i]) == 0;
    }
    h->is_fp8_method = strcasecmp(h->method, "fp8") == 0;
    const struct qx_json *b = qx_json_get(o, "weight_block_size");
    if (b && b->type != QX_JSON_NULL) {
        if (b->type != QX_JSON_ARRAY || b->n_children != 2) {
            type_error(r, "weight_block_size", b, "a list of two numbers");
            return;
        }
        h->block_rows = read_size(r, b->child, "weight_block_size[0]");
        h->block_cols = read_size(r, b->child->next, "weight_block_size[1]");
        if (r->fs && !r->rc && (h->block_rows != 128 || h->block_cols != 128)) {
            char found[48];
            char path[96];
            snprintf(found, sizeof found, "[%" PRIu32 ", %" PRIu32 "]", h->block_rows,
                     h->block_cols);
            snprintf(path, sizeof path, "%sweight_block_size", r->path);
            qx_findings_add(r->fs, &QX_REPORT("unsupported-group-size", QX_ERROR, .file = r->file,
                                              .key = path, .expected = "[128, 128]", .found = found,
                                              .text = "block FP8 has blocks of 128 x 128 only"));
        }
    }
    if (h->is_fp8_method && h->algo == QX_A_NONE) {
        h->algo = b && b->type == QX_JSON_ARRAY ? QX_A_FP8_BLOCK : QX_A_FP8;
        h->algo_text = "";
    }
}

int qx_quant_home_read(struct qx_quant_home *out, const struct qx_json *o, const char *file,
                       const char *path, const struct qx_config *c, struct qx_arena *arena,
                       struct qx_findings *fs, struct qx_error *err)
{
    char full[96];
    snprintf(full, sizeof full, "%s", path);
    struct qreader r = {.file = file, .path = full, .c = c, .arena = arena, .fs = fs, .err = err};
    memset(out, 0, sizeof *out);
    out->method = out->algo_text = out->kv_cache = "";
    out->ignore_key = "ignore";
    if (!o || o->type == QX_JSON_NULL) {
        return 0;
    }
    out->file = file;
    if (o->type != QX_JSON_OBJECT) {
        type_error(&r, "", o, "an object");
        return r.rc;
    }
    /* hf_quant_config.json nests its block; a later revision has the same keys at the top. */
    const struct qx_json *in = qx_json_get(o, "quantization");
    if (in && in->type != QX_JSON_NULL) {
        if (in->type != QX_JSON_OBJECT) {
            type_error(&r, "quantization", in, "an object");
            return r.rc;
        }
        snprintf(full, sizeof full, "%squantization.", path);
        o = in;
    }
    out->present = true;
    read_method(&r, out, o);
    read_entries(&r, out, o);
    read_groups(&r, out, o);
    static const char *const lists[] = {"ignore", "exclude_modules", "modules_to_not_convert"};
    for (size_t i = 0; i < QX_ARRAY_LEN(lists) && out->n_ignore == 0; i++) {
        read_patterns(&r, out, o, lists[i], &out->ignore, &out->n_ignore);
        if (out->n_ignore) {
            out->ignore_key = lists[i];
        }
    }
    read_patterns(&r, out, o, "modules_to_convert", &out->convert, &out->n_convert);
    if (!r.rc && fs && qx_findings_failed(fs)) {
        r.rc = qx_fail_nomem(err);
    }
    return r.rc;
}
