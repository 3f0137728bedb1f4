/* index_json.c: owns the parsed index. Linear in its size: file names are found through a hash table,
 * tensor names are sorted once. */
#include "index_json.h"

#include "file_map.h"
#include "json_pull.h"
#include "name_sort.h"
#include "st_header.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct parser {
    struct qx_index *x;
    struct qx_json_pull j;
    const char *file;
    struct qx_findings *fs;
    size_t cap_entries, cap_files;
    uint32_t *slots; /* hash table of files: index + 1, 0 empty */
    size_t n_slots;
    uint32_t last_file; /* neighbours in the map mostly share a file */
    bool has_map, reported, nomem;
};

static void report(struct parser *p, const char *kind, enum qx_severity severity, const char *key,
                   uint64_t off, const char *expected, const char *found, const char *group,
                   const char *text)
{
    struct qx_report r = QX_REPORT(kind, severity, .file = p->file, .key = key, .expected = expected,
                                   .found = found, .text = text, .group = group);
    r.off = off;
    if (!qx_findings_add(p->fs, &r)) {
        p->nomem = true;
    }
}

static char *keep(struct parser *p, struct qx_view v)
{
    char *s = qx_arena_strndup(p->x->arena, v.p, v.n);
    if (!s) {
        p->nomem = true;
    }
    return s;
}

static size_t slot_of(const struct parser *p, const char *name, size_t n)
{
    size_t mask = p->n_slots - 1, i = (size_t)XXH3_64bits(name, n) & mask;
    while (p->slots[i]) {
        const char *have = p->x->files[p->slots[i] - 1].name;
        if (strlen(have) == n && memcmp(have, name, n) == 0) {
            break;
        }
        i = (i + 1) & mask;
    }
    return i;
}

static bool grow_slots(struct parser *p)
{
    if (p->x->n_files * 2 < p->n_slots) {
        return true;
    }
    size_t n = p->n_slots ? p->n_slots * 2 : 256;
    uint32_t *slots = qx_calloc(n, sizeof *slots);
    if (!slots) {
        p->nomem = true;
        return false;
    }
    qx_free(p->slots);
    p->slots = slots;
    p->n_slots = n;
    for (size_t i = 0; i < p->x->n_files; i++) {
        p->slots[slot_of(p, p->x->files[i].name, strlen(p->x->files[i].name))] = (uint32_t)i + 1;
    }
    return true;
}

/* Index of the file with this name, added when new. */
static bool file_of(struct parser *p, struct qx_view name, uint32_t *out)
{
    struct qx_index *x = p->x;
    if (x->n_files) {
        const char *last = x->files[p->last_file].name;
        if (strlen(last) == name.n && memcmp(last, name.p, name.n) == 0) {
            *out = p->last_file;
            return true;
        }
    }
    if (!grow_slots(p)) {
        return false;
    }
    size_t at = slot_of(p, name.p, name.n);
    if (!p->slots[at]) {
        void *v = x->files;
        char *copy = keep(p, name);
        if (!copy || !qx_grow(&v, &p->cap_files, x->n_files + 1, sizeof *x->files)) {
            p->nomem = true;
            return false;
        }
        x->files = v;
        x->files[x->n_files++] = (struct qx_index_file){
            .name = copy, .unsafe = !qx_name_stays_inside(name.p, name.n)};
        p->slots[at] = (uint32_t)x->n_files;
    }
    *out = p->last_file = p->slots[at] - 1;
    return true;
}

static bool read_map(struct parser *p)
{
    struct qx_index *x = p->x;
    if (p->has_map) {
        report(p, "json-duplicate-key", QX_ERROR, "weight_map", p->j.off, "one map", "two", NULL,
               "the index has weight_map twice");
    }
    enum qx_json_type t = qx_json_next(&p->j);
    if (t != QX_JSON_OBJECT) {
        if (t != QX_JSON_ERROR) {
            report(p, "index-format", QX_ERROR, "weight_map", p->j.off, "an object", NULL, NULL,
                   "weight_map of the index is no object");
            p->reported = true;
        }
        return t != QX_JSON_ERROR && qx_json_skip(&p->j);
    }
    p->has_map = true;
    while ((t = qx_json_next(&p->j)) == QX_JSON_KEY) {
        struct qx_index_entry e = {.name_len = (uint32_t)p->j.text.n};
        e.name = keep(p, p->j.text);
        t = qx_json_next(&p->j);
        if (!e.name || t == QX_JSON_ERROR) {
            return false;
        }
        if (t != QX_JSON_STRING) {
            report(p, "index-format", QX_ERROR, e.name, p->j.off, "a file name", NULL, "value",
                   "weight_map gives no file name for this tensor");
            if (!qx_json_skip(&p->j)) {
                return false;
            }
            continue;
        }
        void *v = x->entries;
        if (!file_of(p, p->j.text, &e.file) ||
            !qx_grow(&v, &p->cap_entries, x->n_entries + 1, sizeof *x->entries)) {
            p->nomem = true;
            return false;
        }
        x->entries = v;
        x->entries[x->n_entries++] = e;
    }
    return t == QX_JSON_OBJECT_END;
}

static bool read_metadata(struct parser *p)
{
    enum qx_json_type t = qx_json_next(&p->j);
    if (t != QX_JSON_OBJECT) {
        return t != QX_JSON_ERROR && qx_json_skip(&p->j);
    }
    while ((t = qx_json_next(&p->j)) == QX_JSON_KEY) {
        bool total = p->j.text.n == 10 && memcmp(p->j.text.p, "total_size", 10) == 0;
        t = qx_json_next(&p->j);
        if (total && t == QX_JSON_NUMBER && !p->j.negative &&
            (p->j.is_int || (p->j.f64 < 9007199254740992.0 && p->j.f64 == (double)(uint64_t)p->j.f64))) {
            p->x->has_total = true;
            p->x->total_size = p->j.is_int ? p->j.uint_value : (uint64_t)p->j.f64;
        } else if (total && t != QX_JSON_NULL && t != QX_JSON_ERROR) {
            report(p, "total-size", QX_WARNING, "metadata.total_size", p->j.off, "a number of bytes", NULL,
                   NULL, "metadata.total_size of the index is no count of bytes");
        }
        if (!qx_json_skip(&p->j)) {
            return false;
        }
    }
    return t == QX_JSON_OBJECT_END;
}

static bool read_top(struct parser *p)
{
    enum qx_json_type t = qx_json_next(&p->j);
    if (t == QX_JSON_ERROR) {
        return false;
    }
    if (t != QX_JSON_OBJECT) {
        report(p, "index-format", QX_ERROR, NULL, p->j.off, "an object with weight_map", NULL, NULL,
               "the index is no JSON object");
        p->reported = true;
        return true;
    }
    while ((t = qx_json_next(&p->j)) == QX_JSON_KEY) {
        struct qx_view k = p->j.text;
        bool ok = k.n == 10 && memcmp(k.p, "weight_map", 10) == 0 ? read_map(p)
                  : k.n == 8 && memcmp(k.p, "metadata", 8) == 0  ? read_metadata(p)
                                                                 : qx_json_skip(&p->j);
        if (!ok) {
            return false;
        }
    }
    return t == QX_JSON_OBJECT_END && qx_json_next(&p->j) == QX_JSON_END;
}

static int compare_files(const void *a, const void *b, void *user)
{
    const struct qx_index_file *f = user;
    return strcmp(f[*(const uint32_t *)a].name, f[*(const uint32_t *)b].name);
}

static bool sort_files(struct parser *p)
{
    struct qx_index *x = p->x;
    size_t n = x->n_files;
    if (n == 0) {
        return true;
    }
    bool ok = false;
    uint32_t *order = qx_malloc(n * sizeof *order), *place = qx_malloc(n * sizeof *place);
    struct qx_index_file *sorted = qx_malloc(n * sizeof *sorted);
    if (order && place && sorted) {
        for (size_t i = 0; i < n; i++) {
            order[i] = (uint32_t)i;
        }
        qsort_r(order, n, sizeof *order, compare_files, x->files);
        for (size_t i = 0; i < n; i++) {
            sorted[i] = x->files[order[i]];
            place[order[i]] = (uint32_t)i;
        }
        for (size_t i = 0; i < x->n_entries; i++) {
            x->entries[i].file = place[x->entries[i].file];
        }
        struct qx_index_file *old = x->files;
        x->files = sorted;
        sorted = old;
        ok = true;
    }
    qx_free(sorted);
    qx_free(place);
    qx_free(order);
    return ok;
}

static void report_twice(struct parser *p, const struct qx_index_entry *a, const struct qx_index_entry *b)
{
    struct qx_buf key = {0};
    bool same = a->file == b->file;
    qx_buf_str(&key, "weight_map.");
    qx_buf_str(&key, b->name);
    const char *k = qx_buf_cstr(&key);
    p->nomem |= !k;
    report(p, "json-duplicate-key", same ? QX_NOTE : QX_ERROR, k ? k : b->name, QX_NO_OFF,
           p->x->files[a->file].name, p->x->files[b->file].name, same ? "same" : "different",
           same ? "the index names this tensor twice, with the same file"
                : "the index names this tensor twice, with different files; the last counts");
    qx_buf_fini(&key);
}

static bool sort_entries(struct parser *p)
{
    struct qx_index *x = p->x;
    size_t n = x->n_entries;
    bool sorted = true;
    for (size_t i = 1; i < n && sorted; i++) {
        const struct qx_index_entry *a = &x->entries[i - 1], *b = &x->entries[i];
        sorted = qx_name_compare(a->name, a->name_len, b->name, b->name_len) < 0;
    }
    if (sorted) {
        return true;
    }
    bool ok = false;
    struct qx_name_key *keys = qx_malloc(n * sizeof *keys), *tmp = qx_malloc(n * sizeof *tmp);
    struct qx_index_entry *out = qx_malloc(n * sizeof *out);
    if (keys && tmp && out) {
        for (size_t i = 0; i < n; i++) {
            keys[i] = (struct qx_name_key){x->entries[i].name, x->entries[i].name_len, (uint32_t)i};
        }
        qx_name_sort(keys, tmp, n);
        size_t m = 0;
        for (size_t i = 0; i < n; i++) {
            const struct qx_index_entry *e = &x->entries[keys[i].i];
            if (m && qx_name_compare(out[m - 1].name, out[m - 1].name_len, e->name, e->name_len) == 0) {
                report_twice(p, &out[m - 1], e);
                m--;
            }
            out[m++] = *e;
        }
        struct qx_index_entry *old = x->entries;
        x->entries = out;
        x->n_entries = m;
        out = old;
        ok = true;
    }
    qx_free(out);
    qx_free(tmp);
    qx_free(keys);
    return ok;
}

static void report_unsafe(struct parser *p)
{
    struct qx_index *x = p->x;
    for (size_t i = 0; i < x->n_entries; i++) {
        struct qx_index_file *f = &x->files[x->entries[i].file];
        if (f->unsafe && f->n_tensors == 0) { /* the first tensor of a file stands for all */
            struct qx_report r = QX_REPORT("unsafe-path", QX_ERROR, .file = p->file,
                                           .tensor = x->entries[i].name, .key = "weight_map",
                                           .expected = "a name inside the directory", .found = f->name,
                                           .text = "the index gives a file name that leaves the "
                                                   "directory; it is not opened");
            if (!qx_findings_add(p->fs, &r)) {
                p->nomem = true;
            }
        }
        f->n_tensors++;
    }
}

static void report_json_error(struct parser *p, const char *text, size_t n)
{
    const struct qx_error *e = &p->j.err;
    if (e->code == QX_E_NOMEM) {
        p->nomem = true;
        return;
    }
    uint64_t line, col, size;
    char msg[640], oid[65];
    if (qx_lfs_pointer(text, n, oid, &size)) {
        snprintf(msg, sizeof msg, "a Git LFS pointer instead of the index; it promises %" PRIu64
                 " bytes with sha256 %s (run git lfs pull)", size, oid);
        report(p, "lfs-pointer", QX_ERROR, NULL, QX_NO_OFF, NULL, "a pointer file", NULL, msg);
        return;
    }
    qx_json_line_col(text, n, e->off, &line, &col);
    snprintf(msg, sizeof msg, "the index is not valid JSON: %s (line %" PRIu64 ", column %" PRIu64 ")",
             e->msg, line, col);
    report(p, e->kind, QX_ERROR, NULL, e->off, NULL, NULL, NULL, msg);
}

int qx_index_parse(struct qx_index *x, const char *text, size_t n, const char *file,
                   struct qx_findings *fs, struct qx_error *err)
{
    *x = (struct qx_index){0};
    x->arena = qx_arena_create();
    if (!x->arena || n >= UINT32_MAX) {
        qx_arena_destroy(x->arena);
        x->arena = NULL;
        return qx_fail_nomem(err);
    }
    struct parser p = {.x = x, .file = file, .fs = fs};
    qx_json_pull_init(&p.j, text, n);
    bool whole = read_top(&p);
    if (!whole && !p.nomem) {
        report_json_error(&p, text, n);
    }
    qx_json_pull_fini(&p.j);
    if (whole && !p.has_map && !p.reported && !p.nomem) {
        report(&p, "index-format", QX_ERROR, "weight_map", QX_NO_OFF, "an object", "absent", NULL,
               "the index has no weight_map");
    }
    x->usable = whole && p.has_map;
    if (x->usable && !p.nomem && !(sort_files(&p) && sort_entries(&p))) {
        p.nomem = true;
    }
    if (x->usable && !p.nomem) {
        report_unsafe(&p);
    }
    qx_free(p.slots);
    if (p.nomem) {
        qx_index_fini(x);
        return qx_fail_nomem(err);
    }
    if (!x->usable) {
        x->n_entries = x->n_files = 0;
    }
    return 0;
}

void qx_index_fini(struct qx_index *x)
{
    if (x) {
        qx_free(x->entries);
        qx_free(x->files);
        qx_arena_destroy(x->arena);
        *x = (struct qx_index){0};
    }
}
