/* st_header.c: owns the reading of one header: length field, JSON, entries. Rules about ranges (overlap,
 * hole, truncation) are in st_ranges.c. Entries are checked one by one and all problems are reported; a
 * tensor with a problem is listed but not readable. */
#include "st_header.h"

#include "dtype.h"
#include "file_map.h"
#include "json_pull.h"
#include "name_sort.h"
#include "num.h"
#include "st_ranges.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_DIMS 64

struct reader {
    struct qx_st_header *h;
    struct qx_json_pull j;
    const char *json, *name;
    struct qx_findings *fs;
    struct qx_st_entry *entries;
    size_t n, cap, meta_cap;
    uint64_t dims[MAX_DIMS];
    bool nomem;
};

/* One finding a file and kind: the first gives the details, the rest count. */
static void report(struct reader *r, const char *kind, const char *tensor, const char *key, uint64_t off,
                   const char *expected, const char *found, const char *text)
{
    char group[64];
    snprintf(group, sizeof group, "%s", key ? "key" : "tensor");
    struct qx_report rep = QX_REPORT(kind, QX_ERROR, .file = r->name, .tensor = tensor, .key = key,
                                     .expected = expected, .found = found, .text = text, .group = group);
    rep.off = off;
    if (!qx_findings_add(r->fs, &rep)) {
        r->nomem = true;
    }
}

/* The source text of the value that began at `begin` and ended at the reader's position. */
static const char *source_text(struct reader *r, uint64_t begin, char out[96])
{
    size_t n = (size_t)(r->j.p - r->json) - (size_t)begin;
    struct qx_buf b = {0};
    qx_buf_escaped(&b, r->json + begin, n > 70 ? 70 : n);
    const char *s = qx_buf_cstr(&b);
    r->nomem |= !s;
    snprintf(out, 96, "%.80s%s", s ? s : "", n > 70 ? "..." : "");
    qx_buf_fini(&b);
    return out;
}

static char *keep(struct reader *r, struct qx_view v)
{
    char *p = qx_arena_strndup(r->h->arena, v.p, v.n);
    if (!p) {
        r->nomem = true;
    }
    return p;
}

static void add_meta(struct reader *r, const char *key, struct qx_view value)
{
    void *p = r->h->meta;
    if (!qx_grow(&p, &r->meta_cap, (size_t)r->h->n_meta + 1, sizeof *r->h->meta)) {
        r->nomem = true;
        return;
    }
    r->h->meta = p;
    const char *v = keep(r, value);
    if (v) {
        r->h->meta[r->h->n_meta++] = (struct qx_meta){key, v};
    }
}

static int compare_meta(const void *a, const void *b)
{
    return strcmp((*(const struct qx_meta *const *)a)->key, (*(const struct qx_meta *const *)b)->key);
}

static void check_meta_duplicates(struct reader *r)
{
    size_t n = r->h->n_meta;
    if (n < 2) {
        return;
    }
    const struct qx_meta **v = qx_malloc(n * sizeof(*v));
    if (!v) {
        r->nomem = true;
        return;
    }
    for (size_t i = 0; i < n; i++) {
        v[i] = &r->h->meta[i];
    }
    qsort(v, n, sizeof(*v), compare_meta);
    for (size_t i = 1; i < n; i++) {
        if (strcmp(v[i - 1]->key, v[i]->key) == 0) {
            report(r, "json-duplicate-key", NULL, v[i]->key, QX_NO_OFF, "one value", v[i]->value,
                   "the header's __metadata__ gives this key twice");
        }
    }
    qx_free(v);
}

/* After the key __metadata__. False on a JSON error. */
static bool read_metadata(struct reader *r)
{
    char found[96];
    if (r->h->has_metadata) {
        report(r, "json-duplicate-key", NULL, "__metadata__", 8 + r->j.off, "one object", NULL,
               "the header has __metadata__ twice");
    }
    r->h->has_metadata = true;
    enum qx_json_type t = qx_json_next(&r->j);
    if (t == QX_JSON_ERROR) {
        return false;
    }
    if (t != QX_JSON_OBJECT) {
        uint64_t begin = r->j.off;
        if (!qx_json_skip(&r->j)) {
            return false;
        }
        report(r, "metadata-type", NULL, "__metadata__", 8 + begin, "an object of strings",
               source_text(r, begin, found), "__metadata__ is no object");
        return true;
    }
    while ((t = qx_json_next(&r->j)) == QX_JSON_KEY) {
        const char *key = keep(r, r->j.text);
        t = qx_json_next(&r->j);
        if (t == QX_JSON_ERROR || !key) {
            return false;
        }
        if (t == QX_JSON_STRING) {
            add_meta(r, key, r->j.text);
            continue;
        }
        uint64_t begin = r->j.off;
        if (!qx_json_skip(&r->j)) {
            return false;
        }
        report(r, "metadata-type", NULL, key, 8 + begin, "a string", source_text(r, begin, found),
               "a value of __metadata__ is no string");
    }
    return t == QX_JSON_OBJECT_END;
}

/* Reads an array of counts into r->dims. False on a JSON error; *ok tells whether it was one. */
static bool read_counts(struct reader *r, size_t most, size_t *n, bool *ok, uint64_t *begin)
{
    *n = 0;
    *ok = false;
    enum qx_json_type t = qx_json_next(&r->j);
    *begin = r->j.off;
    if (t != QX_JSON_ARRAY) {
        return t != QX_JSON_ERROR && qx_json_skip(&r->j);
    }
    *ok = true;
    uint32_t inside = r->j.depth;
    for (;;) {
        t = qx_json_next(&r->j);
        if (t == QX_JSON_ERROR) {
            return false;
        }
        if (t == QX_JSON_ARRAY_END && r->j.depth < inside) {
            return true;
        }
        if (t != QX_JSON_NUMBER || !r->j.is_int || r->j.negative || *n == most) {
            *ok = false;
        } else {
            r->dims[(*n)++] = r->j.uint_value;
        }
    }
}

static bool read_dtype(struct reader *r, struct qx_st_entry *e)
{
    char found[96], text[160];
    enum qx_json_type t = qx_json_next(&r->j);
    uint64_t begin = r->j.off;
    if (t == QX_JSON_ERROR || !qx_json_skip(&r->j)) {
        return false;
    }
    e->t.dtype = QX_DT_UNKNOWN;
    if (t == QX_JSON_STRING) {
        e->t.dtype = (uint8_t)qx_dtype_from_text(r->j.text.p, r->j.text.n);
    }
    if (e->t.dtype == QX_DT_UNKNOWN) {
        source_text(r, begin, found);
        snprintf(text, sizeof text, "dtype %s is not known; the tensor is never read", found);
        report(r, "unknown-dtype", e->t.name, NULL, 8 + begin, "BF16, F16, F32, F8_E4M3, U8, ...", found,
               text);
    }
    return true;
}

static bool read_shape(struct reader *r, struct qx_st_entry *e)
{
    char found[96];
    size_t n;
    uint64_t begin;
    bool ok;
    if (!read_counts(r, MAX_DIMS, &n, &ok, &begin)) {
        return false;
    }
    if (!ok) {
        e->flags |= QX_ST_BAD_SHAPE;
        report(r, "bad-shape", e->t.name, NULL, 8 + begin, "an array of counts (at most 64)",
               source_text(r, begin, found), "shape is no array of whole numbers from 0 up");
        return true;
    }
    uint64_t *shape = qx_arena_alloc(r->h->arena, n * sizeof *shape, _Alignof(uint64_t));
    if (!shape) {
        r->nomem = true;
        return false;
    }
    memcpy(shape, r->dims, n * sizeof *shape);
    e->t.shape = shape;
    e->t.n_dims = (uint8_t)n;
    return true;
}

static bool read_offsets(struct reader *r, struct qx_st_entry *e)
{
    char found[96];
    size_t n;
    uint64_t begin;
    bool ok;
    if (!read_counts(r, 2, &n, &ok, &begin)) {
        return false;
    }
    if (!ok || n != 2 || r->dims[0] > r->dims[1]) {
        e->flags |= QX_ST_BAD_RANGE;
        report(r, "bad-offsets", e->t.name, NULL, 8 + begin, "[begin, end] with begin <= end",
               source_text(r, begin, found), "data_offsets is no byte range");
        return true;
    }
    e->begin = r->dims[0];
    e->end = r->dims[1];
    return true;
}

enum { GOT_DTYPE = 1, GOT_SHAPE = 2, GOT_OFFSETS = 4 };

static void report_absent_fields(struct reader *r, struct qx_st_entry *e, unsigned got)
{
    if (!(got & GOT_DTYPE)) {
        report(r, "unknown-dtype", e->t.name, NULL, QX_NO_OFF, "a dtype", "absent", "entry has no dtype");
    }
    if (!(got & GOT_SHAPE)) {
        e->flags |= QX_ST_BAD_SHAPE;
        report(r, "bad-shape", e->t.name, NULL, QX_NO_OFF, "a shape", "absent", "entry has no shape");
    }
    if (!(got & GOT_OFFSETS)) {
        e->flags |= QX_ST_BAD_RANGE;
        report(r, "bad-offsets", e->t.name, NULL, QX_NO_OFF, "data_offsets", "absent",
               "entry has no data_offsets");
    }
}

/* Fields of an entry after its '{'. False on a JSON error. */
static bool read_fields(struct reader *r, struct qx_st_entry *e)
{
    unsigned got = 0;
    enum qx_json_type t;
    static const uint64_t no_dims[1];
    e->t.shape = no_dims;
    while ((t = qx_json_next(&r->j)) == QX_JSON_KEY) {
        struct qx_view k = r->j.text;
        unsigned field = 0;
        if (k.n == 5 && memcmp(k.p, "dtype", 5) == 0) {
            field = GOT_DTYPE;
        } else if (k.n == 5 && memcmp(k.p, "shape", 5) == 0) {
            field = GOT_SHAPE;
        } else if (k.n == 12 && memcmp(k.p, "data_offsets", 12) == 0) {
            field = GOT_OFFSETS;
        }
        if (got & field) {
            e->flags |= QX_ST_DUPLICATE; /* which value is meant is anybody's guess: not readable */
            report(r, "json-duplicate-key", e->t.name, NULL, 8 + r->j.off, "one value a field", NULL,
                   "the entry gives a field twice");
        }
        got |= field;
        bool ok = field == GOT_DTYPE     ? read_dtype(r, e)
                  : field == GOT_SHAPE   ? read_shape(r, e)
                  : field == GOT_OFFSETS ? read_offsets(r, e)
                                         : qx_json_skip(&r->j);
        if (!ok || r->nomem) {
            return false;
        }
    }
    if (t != QX_JSON_OBJECT_END) {
        return false;
    }
    if (got != (GOT_DTYPE | GOT_SHAPE | GOT_OFFSETS)) {
        report_absent_fields(r, e, got);
    }
    return true;
}

static bool read_entry(struct reader *r)
{
    void *p = r->entries;
    if (!qx_grow(&p, &r->cap, r->n + 1, sizeof *r->entries)) {
        r->nomem = true;
        return false;
    }
    r->entries = p;
    struct qx_st_entry *e = &r->entries[r->n];
    *e = (struct qx_st_entry){0};
    uint64_t off = r->j.off;
    e->t.name_len = (uint32_t)r->j.text.n; /* a header has less than 4 GiB */
    e->t.name = keep(r, r->j.text);
    if (!e->t.name) {
        return false;
    }
    enum qx_json_type t = qx_json_next(&r->j);
    if (t == QX_JSON_OBJECT) {
        if (!read_fields(r, e)) {
            return false;
        }
        r->n++;
        return true;
    }
    char found[96];
    uint64_t begin = r->j.off;
    if (t == QX_JSON_ERROR || !qx_json_skip(&r->j)) {
        return false;
    }
    report(r, "header-json", e->t.name, NULL, 8 + off, "an object with dtype, shape, data_offsets",
           source_text(r, begin, found), "header entry is no object");
    return true;
}

static void report_json_error(struct reader *r)
{
    const struct qx_error *e = &r->j.err;
    if (e->code == QX_E_NOMEM) {
        r->nomem = true;
        return;
    }
    const char *kind = strcmp(e->kind, "json-utf8") == 0       ? "header-utf8"
                       : strcmp(e->kind, "json-too-deep") == 0 ? "json-too-deep"
                                                               : "header-json";
    char text[600];
    snprintf(text, sizeof text, "header is not the JSON it must be: %s", e->msg);
    report(r, kind, NULL, NULL, 8 + e->off, NULL, NULL, text);
}

/* True when the whole header is a JSON object. */
static bool read_top(struct reader *r)
{
    enum qx_json_type t = qx_json_next(&r->j);
    if (t == QX_JSON_ERROR) {
        return false;
    }
    if (t != QX_JSON_OBJECT) {
        report(r, "header-json", NULL, NULL, 8, "a JSON object", NULL, "header is no JSON object");
        r->h->state = QX_FILE_BAD;
        return true;
    }
    while ((t = qx_json_next(&r->j)) == QX_JSON_KEY) {
        bool meta = r->j.text.n == 12 && memcmp(r->j.text.p, "__metadata__", 12) == 0;
        if (!(meta ? read_metadata(r) : read_entry(r)) || r->nomem) {
            return false;
        }
    }
    return t == QX_JSON_OBJECT_END && qx_json_next(&r->j) == QX_JSON_END;
}

/* Sorts entries by name into h->tensors, each name once; the first of equal names stays. */
static bool sort_tensors(struct reader *r)
{
    size_t n = r->n;
    if (n == 0) {
        return true;
    }
    bool ok = false;
    struct qx_name_key *keys = qx_malloc(n * sizeof *keys), *tmp = qx_malloc(n * sizeof *tmp);
    struct qx_tensor *out = qx_malloc(n * sizeof *out);
    if (!keys || !tmp || !out) {
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        keys[i] = (struct qx_name_key){r->entries[i].t.name, r->entries[i].t.name_len, (uint32_t)i};
    }
    qx_name_sort(keys, tmp, n);
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const struct qx_tensor *t = &r->entries[keys[i].i].t;
        if (m && qx_name_compare(out[m - 1].name, out[m - 1].name_len, t->name, t->name_len) == 0) {
            out[m - 1].readable = false;
            report(r, "duplicate-tensor", t->name, NULL, QX_NO_OFF, "one entry a name", NULL,
                   "the header names this tensor twice; neither is read");
            continue;
        }
        out[m++] = *t;
    }
    r->h->tensors = out;
    r->h->n_tensors = m;
    out = NULL;
    ok = !r->nomem;
done:
    qx_free(out);
    qx_free(tmp);
    qx_free(keys);
    return ok;
}

static void reset(struct qx_st_header *h, uint64_t file_bytes)
{
    *h = (struct qx_st_header){.state = QX_FILE_BAD, .file_bytes = file_bytes};
}

int qx_st_header_parse(struct qx_st_header *h, const char *json, size_t n, uint64_t file_bytes,
                       const char *name, struct qx_findings *fs, struct qx_error *err)
{
    reset(h, file_bytes);
    h->header_bytes = n;
    h->data_off = 8 + (uint64_t)n;
    h->arena = qx_arena_create();
    if (!h->arena) {
        return qx_fail_nomem(err);
    }
    h->state = QX_FILE_OK;
    struct reader r = {.h = h, .json = json, .name = name, .fs = fs};
    qx_json_pull_init(&r.j, json, n);
    bool whole = read_top(&r);
    if (!whole && !r.nomem) {
        report_json_error(&r);
    }
    qx_json_pull_fini(&r.j);
    if (!whole || h->state == QX_FILE_BAD) {
        h->state = QX_FILE_BAD;
        h->n_meta = 0;
        h->has_metadata = false;
    } else {
        h->n_entries = r.n;
        check_meta_duplicates(&r);
        if (!r.nomem && (!qx_st_check_ranges(h, r.entries, r.n, name, fs) || !sort_tensors(&r))) {
            r.nomem = true;
        }
    }
    qx_free(r.entries);
    if (r.nomem || qx_findings_failed(fs)) {
        qx_st_header_fini(h);
        return qx_fail_nomem(err);
    }
    return 0;
}

void qx_st_header_fini(struct qx_st_header *h)
{
    if (h) {
        qx_free(h->tensors);
        qx_free(h->meta);
        qx_arena_destroy(h->arena);
        *h = (struct qx_st_header){.state = QX_FILE_BAD};
    }
}

const char *qx_sniff(const void *bytes, size_t n, bool strict)
{
    static const struct { const char *magic; size_t n; const char *what; } signs[] = {
        {"PK\x03\x04", 4, "a zip archive (an old PyTorch checkpoint?)"},
        {"\x1f\x8b", 2, "gzip"},
        {"GGUF", 4, "GGUF"},
        {"\x28\xb5\x2f\xfd", 4, "zstd"},
        {"\x80\x02", 2, "a pickle (an old PyTorch checkpoint?)"},
        {"\x80\x03", 2, "a pickle (an old PyTorch checkpoint?)"},
        {"\x80\x04", 2, "a pickle (an old PyTorch checkpoint?)"},
        {"\x80\x05", 2, "a pickle (an old PyTorch checkpoint?)"},
        {"\x93NUMPY", 6, "a numpy array"},
        {"\x89HDF", 4, "HDF5"},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(signs); i++) {
        if (n >= signs[i].n && memcmp(bytes, signs[i].magic, signs[i].n) == 0) {
            return signs[i].what;
        }
    }
    const unsigned char *b = bytes;
    if (strict || n < 8) {
        return NULL;
    }
    if ((n >= 9 && strncasecmp((const char *)b, "<!doctype", 9) == 0) ||
        strncasecmp((const char *)b, "<html", 5) == 0) {
        return "HTML (an error page instead of the file?)";
    }
    size_t printable = 0;
    while (printable < n && ((b[printable] >= 0x20 && b[printable] < 0x7f) || b[printable] == '\n' ||
                             b[printable] == '\r' || b[printable] == '\t')) {
        printable++;
    }
    if (printable < n) {
        return NULL;
    }
    while (n && (*b == ' ' || *b == '\n' || *b == '\r' || *b == '\t')) {
        b++;
        n--;
    }
    return n && *b == '{' ? "JSON text" : "text";
}

bool qx_lfs_pointer(const char *text, size_t n, char oid_hex[65], uint64_t *size_bytes)
{
    static const char version[] = "version https://git-lfs.github.com/spec/";
    if (n < sizeof version - 1 || memcmp(text, version, sizeof version - 1) != 0) {
        return false;
    }
    oid_hex[0] = '\0';
    *size_bytes = 0;
    static const char oid[] = "oid sha256:", size[] = "size ";
    for (const char *line = text, *end = text + n; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t len = stop ? (size_t)(stop - line) : (size_t)(end - line);
        if (len && line[len - 1] == '\r') {
            len--;
        }
        if (len > sizeof oid - 1 && memcmp(line, oid, sizeof oid - 1) == 0) {
            size_t hex = len - (sizeof oid - 1);
            snprintf(oid_hex, 65, "%.*s", hex > 64 ? 64 : (int)hex, line + sizeof oid - 1);
        } else if (len > sizeof size - 1 && memcmp(line, size, sizeof size - 1) == 0) {
            (void)qx_parse_u64(line + sizeof size - 1, len - (sizeof size - 1), size_bytes);
        }
        line = stop ? stop + 1 : end;
    }
    return true;
}

static int plain_finding(struct qx_findings *fs, const char *kind, const char *name, const char *expected,
                         const char *found, const char *text, struct qx_error *err)
{
    struct qx_report r = QX_REPORT(kind, QX_ERROR, .file = name, .expected = expected, .found = found,
                                   .text = text);
    return qx_findings_add(fs, &r) ? 0 : qx_fail_nomem(err);
}

static int report_lfs(struct qx_findings *fs, const char *name, const char *oid, uint64_t size,
                      struct qx_error *err)
{
    char text[256], expected[128];
    snprintf(expected, sizeof expected, "%" PRIu64 " bytes, sha256 %s", size, oid);
    snprintf(text, sizeof text, "a Git LFS pointer instead of the file; it promises %" PRIu64
             " bytes with sha256 %s (run git lfs pull)", size, oid);
    return plain_finding(fs, "lfs-pointer", name, expected, "a pointer file", text, err);
}

static int report_foreign(struct qx_findings *fs, const char *name, const char *what, struct qx_error *err)
{
    char text[160];
    snprintf(text, sizeof text, "not a safetensors file; it looks like %s", what);
    return plain_finding(fs, "not-safetensors", name, "a safetensors file", what, text, err);
}

int qx_st_header_read(struct qx_st_header *h, int fd, uint64_t file_bytes, const char *name,
                      uint64_t max_header_bytes, struct qx_findings *fs, struct qx_error *err)
{
    reset(h, file_bytes);
    unsigned char head[512];
    size_t head_n = file_bytes < sizeof head ? (size_t)file_bytes : sizeof head;
    char text[256], found[64], expected[64], oid[65];
    struct qx_error io;
    uint64_t size, n = 0;
    if (qx_file_read(fd, head, head_n, 0, &io)) {
        return plain_finding(fs, io.kind, name, NULL, NULL, io.msg, err);
    }
    if (qx_lfs_pointer((const char *)head, head_n, oid, &size)) {
        return report_lfs(fs, name, oid, size, err);
    }
    if (file_bytes < 8) {
        const char *what = qx_sniff(head, head_n, true);
        if (what) {
            return report_foreign(fs, name, what, err);
        }
        snprintf(found, sizeof found, "%" PRIu64 " bytes", file_bytes);
        snprintf(text, sizeof text, "file has %" PRIu64 " bytes, too few for the 8 of a header length",
                 file_bytes);
        return plain_finding(fs, "file-too-short", name, "8 bytes or more", found, text, err);
    }
    for (int i = 7; i >= 0; i--) {
        n = n << 8 | head[i];
    }
    h->header_bytes = n;
    bool fits = n > 0 && n <= file_bytes - 8;
    if (!fits || (head_n > 8 && head[8] != '{')) {
        const char *what = qx_sniff(head, head_n, fits);
        if (what) {
            h->header_bytes = 0;
            return report_foreign(fs, name, what, err);
        }
    }
    if (!fits) {
        snprintf(found, sizeof found, "%" PRIu64, n);
        snprintf(expected, sizeof expected, "1 to %" PRIu64, file_bytes - 8);
        snprintf(text, sizeof text, "header length says %" PRIu64 " bytes, the file has %" PRIu64
                 " after the length field", n, file_bytes - 8);
        h->header_bytes = 0;
        return plain_finding(fs, "header-length", name, expected, found, text, err);
    }
    if (n > max_header_bytes || n >= UINT32_MAX) {
        snprintf(found, sizeof found, "%" PRIu64 " bytes", n);
        snprintf(expected, sizeof expected, "at most %" PRIu64 " bytes", max_header_bytes);
        snprintf(text, sizeof text, "header has %" PRIu64 " bytes, the limit is %" PRIu64
                 "; --max-header SIZE raises it", n, max_header_bytes);
        return plain_finding(fs, "header-too-large", name, expected, found, text, err);
    }
    char *json = qx_malloc((size_t)n);
    if (!json) {
        return qx_fail_nomem(err);
    }
    int rc;
    if (qx_file_read(fd, json, n, 8, &io)) {
        rc = plain_finding(fs, io.kind, name, NULL, NULL, io.msg, err);
    } else {
        rc = qx_st_header_parse(h, json, (size_t)n, file_bytes, name, fs, err);
    }
    qx_free(json);
    return rc;
}
