/* json_doc.c: owns the tree of one JSON text; all nodes and strings live in its arena. The pull
 * reader bounds the depth, so recursion here is bounded too. */
#include "json_doc.h"

#include "alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct builder {
    struct qx_json_pull pull;
    struct qx_arena *arena;
    const char *text, *file;
    size_t n;
    struct qx_findings *fs;
    struct qx_buf path; /* dotted path of the value being built, for findings */
    bool nomem;
};

static char *copy(struct builder *b, const char *s, size_t n)
{
    char *p = qx_arena_alloc(b->arena, n + 1, 1);
    if (!p) {
        b->nomem = true;
        return NULL;
    }
    if (n) {
        memcpy(p, s, n);
    }
    p[n] = '\0';
    return p;
}

static void path_push(struct builder *b, const char *key)
{
    if (b->path.n) {
        qx_buf_chr(&b->path, '.');
    }
    qx_buf_str(&b->path, key);
}

static void path_pop(struct builder *b, size_t n)
{
    if (!b->path.failed) {
        b->path.n = n;
    }
}

static void note_nonfinite(struct builder *b, const struct qx_json *v)
{
    if (!b->fs) {
        return;
    }
    uint64_t line = 0;
    uint64_t col = 0;
    char text[160];
    qx_json_line_col(b->text, b->n, v->off, &line, &col);
    snprintf(text, sizeof text, "line %" PRIu64 " holds the word %s, which is no JSON number", line,
             v->str);
    const char *path = qx_buf_cstr(&b->path);
    struct qx_report r = QX_REPORT("json-nonfinite", QX_NOTE, .file = b->file, .key = path,
                                   .expected = "a finite number", .found = v->str, .text = text);
    r.off = v->off;
    qx_findings_add(b->fs, &r);
}

static int by_key(const void *a, const void *b)
{
    const struct qx_json *x = *(const struct qx_json *const *)a;
    const struct qx_json *y = *(const struct qx_json *const *)b;
    int c = strcmp(x->key, y->key);
    if (c) {
        return c;
    }
    return x->off < y->off ? -1 : x->off > y->off;
}

/* Marks all but the last of equal keys and reports them. Sorting keeps large maps cheap. */
static void find_duplicates(struct builder *b, struct qx_json *o)
{
    if (o->n_children < 2) {
        return;
    }
    struct qx_json **v = qx_calloc(o->n_children, sizeof *v);
    if (!v) {
        b->nomem = true;
        return;
    }
    size_t n = 0;
    for (const struct qx_json *c = o->child; c; c = c->next) {
        v[n++] = (struct qx_json *)(uintptr_t)c;
    }
    qsort(v, n, sizeof(v[0]), by_key);
    for (size_t i = 0; i + 1 < n; i++) {
        if (strcmp(v[i]->key, v[i + 1]->key) != 0) {
            continue;
        }
        v[i]->shadowed = true;
        if (!b->fs) {
            continue;
        }
        bool same = qx_json_equal(v[i], v[i + 1]);
        size_t mark = b->path.n;
        char first[48];
        char second[48];
        char text[256];
        path_push(b, v[i]->key);
        qx_json_brief(v[i], first);
        qx_json_brief(v[i + 1], second);
        if (same) {
            snprintf(text, sizeof text, "the key occurs twice with equal values");
        } else {
            snprintf(text, sizeof text,
                     "the key occurs twice with different values; the last is used");
        }
        const char *path = qx_buf_cstr(&b->path);
        struct qx_report r =
            QX_REPORT("json-duplicate-key", same ? QX_NOTE : QX_ERROR, .file = b->file, .key = path,
                      .expected = first, .found = second, .text = text);
        r.off = v[i + 1]->off;
        qx_findings_add(b->fs, &r);
        path_pop(b, mark);
    }
    qx_free(v);
}

/* Builds the value whose first event is current; NULL on error or lack of memory. */
static struct qx_json *build(struct builder *b)
{
    struct qx_json_pull *j = &b->pull;
    struct qx_json *v = qx_arena_alloc(b->arena, sizeof *v, _Alignof(struct qx_json));
    if (!v) {
        b->nomem = true;
        return NULL;
    }
    memset(v, 0, sizeof *v);
    v->type = j->type;
    v->off = j->off;
    switch (j->type) {
    case QX_JSON_NUMBER:
        v->is_int = j->is_int;
        v->negative = j->negative;
        v->is_nonfinite = j->is_nonfinite;
        v->uint_value = j->uint_value;
        v->int_value = j->int_value;
        v->f64 = j->f64;
        /* fall through */
    case QX_JSON_STRING:
        v->str = copy(b, j->text.p, j->text.n);
        v->str_n = j->text.n;
        if (!v->str) {
            return NULL;
        }
        if (v->is_nonfinite) {
            note_nonfinite(b, v);
        }
        return v;
    case QX_JSON_TRUE:
    case QX_JSON_FALSE:
    case QX_JSON_NULL:
        return v;
    case QX_JSON_OBJECT:
    case QX_JSON_ARRAY:
        break;
    default:
        return NULL;
    }
    bool is_object = j->type == QX_JSON_OBJECT;
    const struct qx_json **link = &v->child;
    size_t mark = b->path.n;
    for (;;) {
        enum qx_json_type t = qx_json_next(j);
        char *key = NULL;
        if (t == QX_JSON_OBJECT_END || t == QX_JSON_ARRAY_END) {
            break;
        }
        if (is_object) {
            if (t != QX_JSON_KEY) {
                return NULL;
            }
            key = copy(b, j->text.p, j->text.n);
            if (!key) {
                return NULL;
            }
            path_push(b, key);
            t = qx_json_next(j);
        }
        if (t == QX_JSON_ERROR || t == QX_JSON_END) {
            return NULL;
        }
        struct qx_json *c = build(b);
        if (!c) {
            return NULL;
        }
        if (is_object) {
            path_pop(b, mark);
        }
        c->key = key;
        *link = c;
        link = &c->next;
        v->n_children++;
    }
    if (is_object) {
        find_duplicates(b, v);
    }
    return v;
}

int qx_json_doc_parse(struct qx_json_doc *doc, const char *text, size_t n, const char *file,
                      struct qx_findings *fs, struct qx_error *err)
{
    doc->root = NULL;
    doc->arena = qx_arena_create();
    if (!doc->arena) {
        return qx_fail_nomem(err);
    }
    struct builder b = {.arena = doc->arena, .text = text, .n = n, .file = file, .fs = fs};
    qx_json_pull_init(&b.pull, text, n);
    b.pull.allow_nonfinite = true;
    int rc = 0;
    const struct qx_json *root = NULL;
    if (qx_json_next(&b.pull) != QX_JSON_ERROR) {
        root = build(&b);
    }
    if (root && !b.nomem && qx_json_next(&b.pull) != QX_JSON_END) {
        root = NULL;
    }
    if (b.nomem || b.path.failed || b.pull.err.code == QX_E_NOMEM ||
        (fs && qx_findings_failed(fs))) {
        rc = qx_fail_nomem(err);
    } else if (!root) {
        uint64_t line = 0;
        uint64_t col = 0;
        uint64_t off = b.pull.err.code ? b.pull.err.off : b.pull.off;
        const char *kind = b.pull.err.code ? b.pull.err.kind : "json-syntax";
        qx_json_line_col(text, n, off == QX_NO_OFF ? 0 : off, &line, &col);
        rc = qx_fail(err, QX_E_FORMAT, kind, "%s (line %" PRIu64 ", column %" PRIu64 ")",
                     b.pull.err.code ? b.pull.err.msg : "no JSON value", line, col);
        qx_error_at(err, file, NULL, off);
    }
    qx_json_pull_fini(&b.pull);
    qx_buf_fini(&b.path);
    if (rc) {
        qx_json_doc_fini(doc);
        return rc;
    }
    doc->root = root;
    return 0;
}

void qx_json_doc_fini(struct qx_json_doc *doc)
{
    if (doc) {
        qx_arena_destroy(doc->arena);
        doc->arena = NULL;
        doc->root = NULL;
    }
}

const struct qx_json *qx_json_each(const struct qx_json *o, const struct qx_json *prev)
{
    if (!o || (o->type != QX_JSON_OBJECT && o->type != QX_JSON_ARRAY)) {
        return NULL;
    }
    const struct qx_json *c = prev ? prev->next : o->child;
    while (c && c->shadowed) {
        c = c->next;
    }
    return c;
}

const struct qx_json *qx_json_get(const struct qx_json *o, const char *key)
{
    if (!o || o->type != QX_JSON_OBJECT) {
        return NULL;
    }
    for (const struct qx_json *c = qx_json_each(o, NULL); c; c = qx_json_each(o, c)) {
        if (strcmp(c->key, key) == 0) {
            return c;
        }
    }
    return NULL;
}

const char *qx_json_type_name(const struct qx_json *v)
{
    if (!v) {
        return "nothing";
    }
    switch (v->type) {
    case QX_JSON_OBJECT:
        return "an object";
    case QX_JSON_ARRAY:
        return "a list";
    case QX_JSON_STRING:
        return "a string";
    case QX_JSON_NUMBER:
        return v->is_nonfinite ? "a non-finite number" : "a number";
    case QX_JSON_TRUE:
    case QX_JSON_FALSE:
        return "a boolean";
    case QX_JSON_NULL:
        return "null";
    default:
        return "nothing";
    }
}

static bool number_equal(const struct qx_json *a, const struct qx_json *b)
{
    if (a->is_nonfinite || b->is_nonfinite) {
        return a->is_nonfinite && b->is_nonfinite && strcmp(a->str, b->str) == 0;
    }
    if (a->is_int && b->is_int) {
        return a->negative == b->negative &&
               (a->negative ? a->int_value == b->int_value : a->uint_value == b->uint_value);
    }
    return a->f64 == b->f64;
}

bool qx_json_equal(const struct qx_json *a, const struct qx_json *b)
{
    if (!a || !b || a->type != b->type) {
        return a == b;
    }
    if (a->type == QX_JSON_STRING) {
        return a->str_n == b->str_n && memcmp(a->str, b->str, a->str_n) == 0;
    }
    if (a->type == QX_JSON_NUMBER) {
        return number_equal(a, b);
    }
    if (a->type == QX_JSON_ARRAY) {
        const struct qx_json *x = a->child;
        const struct qx_json *y = b->child;
        for (; x && y; x = x->next, y = y->next) {
            if (!qx_json_equal(x, y)) {
                return false;
            }
        }
        return !x && !y;
    }
    if (a->type == QX_JSON_OBJECT) {
        size_t n = 0;
        for (const struct qx_json *x = qx_json_each(a, NULL); x; x = qx_json_each(a, x), n++) {
            if (!qx_json_equal(x, qx_json_get(b, x->key))) {
                return false;
            }
        }
        for (const struct qx_json *y = qx_json_each(b, NULL); y; y = qx_json_each(b, y)) {
            n--;
        }
        return n == 0;
    }
    return true;
}

const char *qx_json_brief(const struct qx_json *v, char out[48])
{
    if (v && v->type == QX_JSON_STRING) {
        snprintf(out, 48, v->str_n > 40 ? "\"%.40s...\"" : "\"%.40s\"", v->str);
    } else if (v && v->type == QX_JSON_NUMBER) {
        snprintf(out, 48, "%.47s", v->str);
    } else if (v && v->type == QX_JSON_TRUE) {
        snprintf(out, 48, "true");
    } else if (v && v->type == QX_JSON_FALSE) {
        snprintf(out, 48, "false");
    } else {
        const struct qx_json *algo = qx_json_get(v, "quant_algo");
        if (algo && algo->type == QX_JSON_STRING) {
            snprintf(out, 48, "{quant_algo %.30s}", algo->str);
        } else {
            snprintf(out, 48, "%s", qx_json_type_name(v));
        }
    }
    return out;
}
