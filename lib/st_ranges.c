/* st_ranges.c: owns nothing. Each entry is checked against its shape, then all together against the
 * file: in file order every byte of the data part must belong to exactly one tensor.
 *
 * A range past the end of the file is blamed on the file (truncated) when it agrees with dtype and
 * shape, and on the range (bad-offsets) when it does not. */
#include "st_ranges.h"

#include "str.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ranges {
    struct qx_st_header *h;
    struct qx_st_entry *e;
    const char *name;
    struct qx_findings *fs;
    uint64_t data_bytes;
    bool any_bad; /* coverage is only judged when all ranges can be believed */
    bool nomem;
};

static void add(struct ranges *r, const char *kind, const char *tensor, uint64_t off, const char *expected,
                const char *found, const char *text)
{
    struct qx_report rep = QX_REPORT(kind, QX_ERROR, .file = r->name, .tensor = tensor,
                                     .expected = expected, .found = found, .text = text, .group = kind);
    rep.off = off;
    if (!qx_findings_add(r->fs, &rep)) {
        r->nomem = true;
    }
}

/* Bytes that dtype and shape ask for; false when they overflow or are not known. */
static bool wanted_bytes(struct qx_st_entry *e, uint64_t *bytes)
{
    uint64_t n = 1;
    bool zero = false, fits = true;
    for (uint8_t i = 0; i < e->t.n_dims; i++) {
        zero |= e->t.shape[i] == 0;
        fits = fits && qx_mul_u64(n, e->t.shape[i], &n);
    }
    if (zero) {
        n = 0;
        fits = true;
    }
    e->t.n_elems = fits ? n : UINT64_MAX;
    return fits && qx_mul_u64(n, qx_dtype_size((enum qx_dtype)e->t.dtype), bytes);
}

static void check_entry(struct ranges *r, struct qx_st_entry *e)
{
    uint64_t want = 0, have = e->end - e->begin;
    char expected[64], found[64], text[200];
    bool shape_ok = !(e->flags & QX_ST_BAD_SHAPE);
    bool known = wanted_bytes(e, &want) && shape_ok;
    bool typed = e->t.dtype != QX_DT_UNKNOWN;
    if (!shape_ok) {
        e->t.n_elems = 0;
    }
    e->t.off = r->h->data_off;
    if (e->flags & QX_ST_BAD_RANGE) {
        r->any_bad = true;
        return;
    }
    e->t.size_bytes = have;
    bool agrees = known && typed && want == have;
    bool inside = e->end <= r->data_bytes;
    /* a range past the end is believed only when it agrees with the shape and has bytes */
    if (!inside && (!agrees || have == 0 || !qx_add_u64(r->h->data_off, e->end, &want))) {
        r->any_bad = true;
        e->flags |= QX_ST_BAD_RANGE;
        snprintf(expected, sizeof expected, "an end of at most %" PRIu64, r->data_bytes);
        snprintf(found, sizeof found, "[%" PRIu64 ", %" PRIu64 "]", e->begin, e->end);
        snprintf(text, sizeof text, "data_offsets end at %" PRIu64 ", the file has %" PRIu64
                 " bytes of data", e->end, r->data_bytes);
        add(r, "bad-offsets", e->t.name, QX_NO_OFF, expected, found, text);
        return;
    }
    e->t.off = r->h->data_off + e->begin;
    if (typed && shape_ok && !agrees) {
        if (known) {
            snprintf(expected, sizeof expected, "%" PRIu64 " bytes", want);
        } else {
            snprintf(expected, sizeof expected, "more than 2^64 bytes");
        }
        snprintf(found, sizeof found, "%" PRIu64 " bytes", have);
        snprintf(text, sizeof text, "shape and dtype ask for %s, data_offsets give %s", expected, found);
        add(r, "size-mismatch", e->t.name, e->t.off, expected, found, text);
    }
    e->t.readable = agrees && inside && !(e->flags & QX_ST_DUPLICATE);
}

static int by_range(const void *pa, const void *pb, void *user)
{
    const struct qx_st_entry *e = user;
    uint32_t a = *(const uint32_t *)pa, b = *(const uint32_t *)pb;
    if (e[a].begin != e[b].begin) {
        return e[a].begin < e[b].begin ? -1 : 1;
    }
    if (e[a].end != e[b].end) {
        return e[a].end < e[b].end ? -1 : 1;
    }
    return (a > b) - (a < b);
}

static void report_overlap(struct ranges *r, const struct qx_st_entry *a, const struct qx_st_entry *b)
{
    char found[160];
    struct qx_buf text = {0};
    uint64_t end = a->end < b->end ? a->end : b->end;
    snprintf(found, sizeof found, "[%" PRIu64 ", %" PRIu64 "] and [%" PRIu64 ", %" PRIu64 "]", a->begin,
             a->end, b->begin, b->end);
    qx_buf_fmt(&text, "%s and %s share the data bytes %" PRIu64 " to %" PRIu64, a->t.name, b->t.name,
               b->begin, end);
    const char *s = qx_buf_cstr(&text);
    r->nomem |= !s;
    add(r, "overlap", b->t.name, b->t.off, "ranges of their own", found, s ? s : "");
    qx_buf_fini(&text);
}

static void report_hole(struct ranges *r, const struct qx_st_entry *next, uint64_t begin, uint64_t n)
{
    char found[96], text[200];
    snprintf(found, sizeof found, "%" PRIu64 " bytes from %" PRIu64, n, begin);
    snprintf(text, sizeof text, "%" PRIu64 " bytes at data offset %" PRIu64 " belong to no tensor", n,
             begin);
    add(r, "hole", next->t.name, r->h->data_off + begin, "tensors without gaps", found, text);
}

static void report_truncated(struct ranges *r, const struct qx_st_entry *first, uint64_t hit,
                             uint64_t end)
{
    char expected[64], found[64];
    struct qx_buf text = {0};
    uint64_t missing = end - r->data_bytes;
    snprintf(expected, sizeof expected, "%" PRIu64 " bytes", r->h->data_off + end);
    snprintf(found, sizeof found, "%" PRIu64 " bytes", r->h->file_bytes);
    qx_buf_fmt(&text, "file is %" PRIu64 " bytes short; %" PRIu64 " tensor%s hit, first %s", missing, hit,
               hit == 1 ? "" : "s", first->t.name);
    if (r->data_bytes == 0) {
        qx_buf_str(&text, " (no data at all after the header)");
    }
    const char *s = qx_buf_cstr(&text);
    r->nomem |= !s;
    add(r, "truncated", first->t.name, r->h->file_bytes, expected, found, s ? s : "");
    qx_buf_fini(&text);
    r->h->state = QX_FILE_SHORT;
}

/* Entries in file order: overlaps, holes, what lies beyond the end. */
static void sweep(struct ranges *r, const uint32_t *order, size_t n)
{
    uint64_t end = 0, hit = 0;
    const struct qx_st_entry *owner = NULL, *first = NULL;
    for (size_t i = 0; i < n; i++) {
        const struct qx_st_entry *e = &r->e[order[i]];
        if (e->begin < end && e->end > e->begin) {
            report_overlap(r, owner, e);
        } else if (e->begin > end && !r->any_bad) {
            report_hole(r, e, end, e->begin - end);
        }
        if (e->end > r->data_bytes) {
            hit++;
            first = first ? first : e;
        }
        if (e->end > end) {
            end = e->end;
            owner = e;
        }
    }
    if (first) {
        report_truncated(r, first, hit, end);
    } else if (end < r->data_bytes && !r->any_bad) {
        char found[96], text[160];
        snprintf(found, sizeof found, "%" PRIu64 " bytes from %" PRIu64, r->data_bytes - end, end);
        snprintf(text, sizeof text, "%" PRIu64 " bytes follow the last tensor", r->data_bytes - end);
        add(r, "trailing-bytes", NULL, r->h->data_off + end, "nothing after the last tensor", found, text);
    }
}

bool qx_st_check_ranges(struct qx_st_header *h, struct qx_st_entry *entries, size_t n, const char *name,
                        struct qx_findings *fs)
{
    struct ranges r = {.h = h, .e = entries, .name = name, .fs = fs,
                       .data_bytes = h->file_bytes - h->data_off};
    uint32_t *order = qx_malloc(n * sizeof *order);
    if (!order) {
        return false;
    }
    size_t m = 0;
    bool sorted = true;
    for (size_t i = 0; i < n; i++) {
        check_entry(&r, &entries[i]);
        if (entries[i].flags & QX_ST_BAD_RANGE) {
            continue;
        }
        order[m++] = (uint32_t)i;
        sorted = sorted && (m < 2 || by_range(&order[m - 2], &order[m - 1], entries) < 0);
    }
    if (!sorted) {
        qsort_r(order, m, sizeof *order, by_range, entries);
    }
    sweep(&r, order, m);
    qx_free(order);
    return !r.nomem;
}
