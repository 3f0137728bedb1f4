/* manifest.c: the text of checksum lists, read and written. Owns a parsed list: an array in the order of
 * the lines, names and texts in an arena, and an array of indexes sorted by (tensor, kind, name).
 * Computing and comparing digests is left to verify.c. */
#include "manifest.h"

#include "alloc.h"
#include "num.h"

#include <stdlib.h>
#include <string.h>

struct qx_manifest {
    struct qx_arena *arena;
    struct qx_manifest_entry *e;
    size_t n, cap;
    uint32_t *sorted;
    bool has[2][QX_DIGEST_COUNT];
};

static const struct { const char *name; size_t size; } digests[QX_DIGEST_COUNT] = {
    {"xxh3-128", 16}, {"sha256", 32}, {"git-blob", 20}};

const char *qx_digest_name(enum qx_digest d)
{
    return digests[d].name;
}

size_t qx_digest_size(enum qx_digest d)
{
    return digests[d].size;
}

void qx_digest_hex(const uint8_t *bytes, size_t n, char out[2 * QX_DIGEST_MAX + 1])
{
    static const char digit[] = "0123456789abcdef";
    size_t k = 0;
    for (size_t i = 0; i < n && i < QX_DIGEST_MAX; ++i) {
        out[k++] = digit[bytes[i] >> 4];
        out[k++] = digit[bytes[i] & 15];
    }
    out[k] = '\0';
}

/* ---- writing ------------------------------------------------------------------------------ */

static void put_name(struct qx_buf *b, const char *s)
{
    for (; *s; ++s) {
        unsigned char c = (unsigned char)*s;
        if (c < 0x20 || c == 0x7f || c == '\\') {
            qx_buf_fmt(b, "\\x%02x", c);
        } else {
            qx_buf_chr(b, *s);
        }
    }
    qx_buf_chr(b, '\n');
}

void qx_manifest_put_head(struct qx_buf *b)
{
    qx_buf_str(b, "qx-manifest 1\n");
}

void qx_manifest_put_file(struct qx_buf *b, enum qx_digest kind, const uint8_t *digest, uint64_t bytes,
                          const char *name)
{
    char hex[2 * QX_DIGEST_MAX + 1];
    qx_digest_hex(digest, qx_digest_size(kind), hex);
    qx_buf_fmt(b, "file %s %s %llu ", qx_digest_name(kind), hex, (unsigned long long)bytes);
    put_name(b, name);
}

void qx_manifest_put_tensor(struct qx_buf *b, const uint8_t *digest, uint64_t bytes, const char *dtype,
                            const uint64_t *shape, uint32_t n_dims, uint64_t off, const char *name)
{
    char hex[2 * QX_DIGEST_MAX + 1];
    qx_digest_hex(digest, qx_digest_size(QX_DIGEST_XXH3_128), hex);
    qx_buf_fmt(b, "tensor %s %s %llu %s [", qx_digest_name(QX_DIGEST_XXH3_128), hex,
               (unsigned long long)bytes, dtype);
    for (uint32_t i = 0; i < n_dims; ++i) {
        qx_buf_fmt(b, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
    }
    qx_buf_fmt(b, "] %llu ", (unsigned long long)off);
    put_name(b, name);
}

/* ---- reading ------------------------------------------------------------------------------ */

struct cursor { const char *p, *end; };

static int hex_value(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Exactly 2 x size hex digits and nothing hexadecimal after them. */
static bool take_hex(struct cursor *c, size_t size, uint8_t *out)
{
    if ((size_t)(c->end - c->p) < 2 * size) {
        return false;
    }
    for (size_t i = 0; i < size; ++i) {
        int hi = hex_value(c->p[2 * i]), lo = hex_value(c->p[2 * i + 1]);
        if (hi < 0 || lo < 0) {
            return false;
        }
        out[i] = (uint8_t)(hi << 4 | lo);
    }
    c->p += 2 * size;
    return c->p == c->end || hex_value(*c->p) < 0;
}

bool qx_digest_parse(const char *hex, enum qx_digest d, uint8_t out[QX_DIGEST_MAX])
{
    struct cursor c = {hex, hex + strlen(hex)};
    memset(out, 0, QX_DIGEST_MAX);
    return take_hex(&c, qx_digest_size(d), out) && c.p == c.end;
}

static bool take_word(struct cursor *c, struct qx_view *w)
{
    const char *s = c->p;
    while (c->p < c->end && *c->p != ' ') {
        ++c->p;
    }
    w->p = s;
    w->n = (size_t)(c->p - s);
    if (c->p == c->end || w->n == 0) {
        return false;
    }
    ++c->p;
    return true;
}

static bool word_is(struct qx_view w, const char *s)
{
    return w.n == strlen(s) && memcmp(w.p, s, w.n) == 0;
}

enum line_result { LINE_OK, LINE_BAD, LINE_NOMEM };

/* A name as written: \xNN and the escapes of sha256sum: \\, \n, \r. A NUL cannot be part of it. */
static enum line_result unescape(struct qx_arena *a, const char *s, size_t n, const char **name)
{
    char *out = qx_arena_alloc(a, n + 1, 1);
    size_t k = 0;
    if (!out) {
        return LINE_NOMEM;
    }
    for (size_t i = 0; i < n; ++i) {
        if (s[i] != '\\' || i + 1 >= n) {
            out[k++] = s[i];
        } else if (s[i + 1] == 'x' && i + 3 < n && hex_value(s[i + 2]) >= 0 && hex_value(s[i + 3]) >= 0) {
            out[k++] = (char)(hex_value(s[i + 2]) << 4 | hex_value(s[i + 3]));
            i += 3;
        } else {
            char e = s[++i];
            out[k++] = e == 'n' ? '\n' : e == 'r' ? '\r' : e;
        }
    }
    out[k] = '\0';
    *name = out;
    return k == 0 || memchr(out, '\0', k) ? LINE_BAD : LINE_OK;
}

/* "./name" is "name", as lists made with find or a glob spell it. */
static const char *plain_name(const char *s)
{
    while (s[0] == '.' && s[1] == '/') {
        s += 2;
    }
    return s;
}

static bool push(struct qx_manifest *m, const struct qx_manifest_entry *e)
{
    if (m->n >= UINT32_MAX || !qx_grow((void **)&m->e, &m->cap, m->n + 1, sizeof *m->e)) {
        return false;
    }
    m->e[m->n++] = *e;
    m->has[e->is_tensor][e->kind] = true;
    return true;
}

static bool take_u64(struct cursor *c, uint64_t *v)
{
    struct qx_view w;
    return take_word(c, &w) && qx_parse_u64(w.p, w.n, v);
}

/* A line of qx's own form. */
static enum line_result own_line(struct qx_manifest *m, struct cursor c)
{
    struct qx_manifest_entry e = {.file = UINT32_MAX, .has_size = true};
    struct qx_view what, algo, w;
    if (!take_word(&c, &what) || !take_word(&c, &algo)) {
        return LINE_BAD;
    }
    e.is_tensor = word_is(what, "tensor");
    if (!e.is_tensor && !word_is(what, "file")) {
        return LINE_BAD;
    }
    for (e.kind = 0; e.kind < QX_DIGEST_COUNT && !word_is(algo, digests[e.kind].name); ++e.kind) {
    }
    if (e.kind == QX_DIGEST_COUNT || !take_hex(&c, digests[e.kind].size, e.digest) || c.p == c.end ||
        *c.p++ != ' ' || !take_u64(&c, &e.size_bytes)) {
        return LINE_BAD;
    }
    if (e.is_tensor) {
        if (!take_word(&c, &w)) {
            return LINE_BAD;
        }
        e.dtype = qx_arena_strndup(m->arena, w.p, w.n);
        if (!take_word(&c, &w) || w.p[0] != '[' || w.p[w.n - 1] != ']') {
            return LINE_BAD;
        }
        e.shape = qx_arena_strndup(m->arena, w.p, w.n);
        if (!take_u64(&c, &e.off)) {
            return LINE_BAD;
        }
        if (!e.dtype || !e.shape) {
            return LINE_NOMEM;
        }
    }
    if (c.p == c.end) {
        return LINE_BAD;
    }
    enum line_result r = unescape(m->arena, c.p, (size_t)(c.end - c.p), &e.name);
    return r != LINE_OK || push(m, &e) ? r : LINE_NOMEM;
}

/* "HEX  name", "HEX *name", "\HEX  name", "SHA256 (name) = HEX". */
static enum line_result sum_line(struct qx_manifest *m, struct cursor c)
{
    struct qx_manifest_entry e = {.file = UINT32_MAX};
    static const char tag[] = "SHA256 (";
    bool escaped = c.p < c.end && *c.p == '\\';
    const char *name;
    size_t n;
    if ((size_t)(c.end - c.p) > sizeof tag && memcmp(c.p, tag, sizeof tag - 1) == 0) {
        const char *close = c.end - 64 - 4;
        struct cursor h = {c.end - 64, c.end};
        name = c.p + sizeof tag - 1;
        if (close <= name || memcmp(close, ") = ", 4) != 0 || !take_hex(&h, 32, e.digest)) {
            return LINE_BAD;
        }
        e.kind = QX_DIGEST_SHA256;
        n = (size_t)(close - name);
    } else {
        struct cursor at = {c.p + escaped, c.end};
        if (take_hex(&at, 32, e.digest)) {
            e.kind = QX_DIGEST_SHA256;
        } else {
            at.p = c.p + escaped;
            if (!take_hex(&at, 16, e.digest)) {
                return LINE_BAD;
            }
            e.kind = QX_DIGEST_XXH3_128;
        }
        if (at.end - at.p < 3 || at.p[0] != ' ' || (at.p[1] != ' ' && at.p[1] != '*')) {
            return LINE_BAD;
        }
        name = at.p + 2;
        n = (size_t)(at.end - name);
    }
    if (escaped) {
        enum line_result r = unescape(m->arena, name, n, &e.name);
        if (r != LINE_OK) {
            return r;
        }
    } else if (n == 0 || memchr(name, '\0', n)) {
        return LINE_BAD;
    } else if (!(e.name = qx_arena_strndup(m->arena, name, n))) {
        return LINE_NOMEM;
    }
    e.name = plain_name(e.name);
    return !e.name[0] ? LINE_BAD : push(m, &e) ? LINE_OK : LINE_NOMEM;
}

static int order(const struct qx_manifest_entry *a, const struct qx_manifest_entry *b)
{
    if (a->is_tensor != b->is_tensor) {
        return a->is_tensor - b->is_tensor;
    }
    return a->kind != b->kind ? a->kind - b->kind : strcmp(a->name, b->name);
}

static int by_key(const void *pa, const void *pb, void *user)
{
    const struct qx_manifest *m = user;
    uint32_t a = *(const uint32_t *)pa, b = *(const uint32_t *)pb;
    int c = order(&m->e[a], &m->e[b]);
    return c ? c : a < b ? -1 : a > b;
}

static int finish(struct qx_manifest *m, const char *file, struct qx_error *err)
{
    size_t pending = 0;
    m->sorted = qx_calloc(m->n ? m->n : 1, sizeof *m->sorted);
    if (!m->sorted) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < m->n; ++i) {
        m->sorted[i] = (uint32_t)i;
        if (!m->e[i].is_tensor) {
            for (; pending < i; ++pending) {
                if (m->e[pending].is_tensor) {
                    m->e[pending].file = (uint32_t)i;
                }
            }
            pending = i + 1;
        }
    }
    qsort_r(m->sorted, m->n, sizeof *m->sorted, by_key, m);
    for (size_t i = 1; i < m->n; ++i) {
        const struct qx_manifest_entry *a = &m->e[m->sorted[i - 1]], *b = &m->e[m->sorted[i]];
        if (order(a, b) == 0 && memcmp(a->digest, b->digest, sizeof a->digest) != 0) {
            qx_fail(err, QX_E_FORMAT, "manifest-syntax", "'%s' is listed twice with different digests",
                    b->name);
            return qx_error_at(err, file, NULL, QX_NO_OFF);
        }
    }
    return 0;
}

int qx_manifest_parse(struct qx_manifest **out, const char *text, size_t n, const char *file,
                      struct qx_error *err)
{
    static const char magic[] = "qx-manifest ";
    struct qx_manifest *m = qx_calloc(1, sizeof *m);
    const char *p = text, *end = text + n;
    unsigned long long line = 0;
    bool own = n >= sizeof magic - 1 && memcmp(text, magic, sizeof magic - 1) == 0;
    int rc;
    *out = NULL;
    if (!m || !(m->arena = qx_arena_create())) {
        qx_free(m);
        return qx_fail_nomem(err);
    }
    while (p < end) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        struct cursor c = {p, nl ? nl : end};
        enum line_result r = LINE_OK;
        p = nl ? nl + 1 : end;
        ++line;
        if (c.end > c.p && c.end[-1] == '\r') {
            --c.end;
        }
        if (own && line == 1) {
            if (c.end - c.p != sizeof magic || c.end[-1] != '1') {
                rc = qx_fail(err, QX_E_UNSUPPORTED, "manifest-syntax",
                             "version of the manifest is not 1: '%.*s'",
                             (int)(c.end - c.p < 60 ? c.end - c.p : 60), c.p);
                goto fail;
            }
            continue;
        }
        if (c.p == c.end || *c.p == '#') {
            continue;
        }
        r = memchr(c.p, '\0', (size_t)(c.end - c.p)) ? LINE_BAD : own ? own_line(m, c) : sum_line(m, c);
        if (r == LINE_NOMEM) {
            rc = qx_fail_nomem(err);
            goto fail;
        }
        if (r == LINE_BAD) {
            rc = qx_fail(err, QX_E_FORMAT, "manifest-syntax",
                         "line %llu is no line of a checksum list", line);
            qx_error_at(err, file, NULL, (uint64_t)(c.p - text));
            goto fail;
        }
    }
    if (m->n == 0) {
        rc = qx_fail(err, QX_E_FORMAT, "manifest-syntax", "no checksum in the list");
        qx_error_at(err, file, NULL, QX_NO_OFF);
        goto fail;
    }
    rc = finish(m, file, err);
    if (rc) {
        goto fail;
    }
    *out = m;
    return 0;
fail:
    qx_manifest_destroy(m);
    return rc;
}

void qx_manifest_destroy(struct qx_manifest *m)
{
    if (m) {
        qx_free(m->sorted);
        qx_free(m->e);
        qx_arena_destroy(m->arena);
        qx_free(m);
    }
}

size_t qx_manifest_count(const struct qx_manifest *m)
{
    return m->n;
}

const struct qx_manifest_entry *qx_manifest_at(const struct qx_manifest *m, size_t i)
{
    return &m->e[i];
}

bool qx_manifest_has(const struct qx_manifest *m, bool tensors, enum qx_digest kind)
{
    return m->has[tensors][kind];
}

size_t qx_manifest_find(const struct qx_manifest *m, bool tensor, enum qx_digest kind, const char *name)
{
    struct qx_manifest_entry key = {.name = name, .kind = (uint8_t)kind, .is_tensor = tensor};
    size_t lo = 0, hi = m->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (order(&m->e[m->sorted[mid]], &key) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < m->n && order(&m->e[m->sorted[lo]], &key) == 0 ? m->sorted[lo] : SIZE_MAX;
}
