/* rows.c: see rows.h.
 *
 * A call sorts its rows, drops repeats, and reads runs of neighbouring rows together (a gap of up
 * to a page costs less than another call), so that memory is bounded by the span buffer whatever is
 * asked. What a row decodes to does not depend on the other rows of the call. */
#include "rows_impl.h"

#include "alloc.h"
#include "ckpt.h"
#include "codes.h"
#include "decode.h"
#include "fp8.h"
#include "pool.h"
#include "read_queue.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SPAN_BYTES (256u * 1024)
#define GAP_BYTES 4096u

uint64_t qx_rows_count(const struct qx_rows *r)
{
    return r->n_rows;
}

uint64_t qx_rows_width(const struct qx_rows *r)
{
    return r->width;
}

enum qx_format qx_rows_format(const struct qx_rows *r)
{
    return r->format;
}

uint64_t qx_rows_raw_bytes(const struct qx_rows *r)
{
    return r->code_bytes;
}

uint64_t qx_rows_scale_bytes(const struct qx_rows *r)
{
    return r->scale_bytes;
}

float qx_rows_global(const struct qx_rows *r)
{
    return r->global != NULL ? r->global[0] : 1.0f;
}

void qx_rows_place(const struct qx_rows *r, uint64_t row, int64_t *shard, uint64_t *local_row)
{
    *shard = r->table ? (int64_t)(row / r->rows_per_part) : -1;
    *local_row = r->table ? row % r->rows_per_part : row;
}

/* ---- decoding ----------------------------------------------------------------------------- */

static void plain_row(enum qx_dtype dt, const uint8_t *p, uint64_t n, float *out)
{
    size_t size = qx_dtype_size(dt);
    for (uint64_t i = 0; i < n; i++, p += size) {
        uint64_t u = 0;
        memcpy(&u, p, size); /* little-endian host, as everywhere */
        switch (dt) {
        case QX_DT_I8:
            out[i] = (float)(int8_t)u;
            break;
        case QX_DT_I16:
            out[i] = (float)(int16_t)u;
            break;
        case QX_DT_I32:
            out[i] = (float)(int32_t)u;
            break;
        case QX_DT_I64:
            out[i] = (float)(int64_t)u;
            break;
        case QX_DT_F8_E4M3:
            out[i] = qx_e4m3_table[u & 0xff];
            break;
        case QX_DT_F8_E5M2:
            out[i] = qx_e5m2_to_f32((uint8_t)u);
            break;
        case QX_DT_F8_E8M0:
            out[i] = qx_e8m0_to_f32((uint8_t)u);
            break;
        case QX_DT_F16:
            out[i] = qx_f16_to_f32((uint16_t)u);
            break;
        case QX_DT_F64: {
            double d;
            memcpy(&d, &u, 8);
            out[i] = (float)d;
            break;
        }
        default: /* BOOL and the unsigned integers */
            out[i] = (float)u;
            break;
        }
    }
}

static void decode_row(const struct qx_rows *r, const struct qx_decode_ops *ops, uint64_t row,
                       const uint8_t *codes, const uint8_t *scales, float *out)
{
    uint64_t stack = r->n_global > 1 ? row / r->rows_per_stack : 0;
    switch (r->format) {
    case QX_F_BF16:
        ops->bf16(codes, r->width, out);
        break;
    case QX_F_F16:
        plain_row(QX_DT_F16, codes, r->width, out);
        break;
    case QX_F_F32:
        memcpy(out, codes, r->width * sizeof(float));
        break;
    case QX_F_FP8:
        ops->fp8(codes, r->global[stack], r->width, out);
        break;
    case QX_F_FP8_BLOCK: {
        uint64_t e = row / r->rows_per_stack, local = row % r->rows_per_stack;
        ops->fp8_block(codes,
                       r->blocks + (e * r->block_rows + local / QX_FP8_BLOCK_SIDE) * r->block_cols,
                       r->width, out);
        break;
    }
    case QX_F_MXFP8:
        ops->mxfp8(codes, scales, r->width, out);
        break;
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        ops->nvfp4(codes, scales, r->global[stack], r->width, out);
        break;
    default:
        if (r->dtype == QX_DT_BF16) {
            ops->bf16(codes, r->width, out);
        } else if (r->dtype == QX_DT_F32) {
            memcpy(out, codes, r->width * sizeof(float));
        } else {
            plain_row(r->dtype, codes, r->width, out);
        }
        break;
    }
}

void qx_rows_decode_stored(const struct qx_rows *r, uint64_t row0, uint64_t n, const void *codes,
                           const void *scales, float *out)
{
    const struct qx_decode_ops *ops = qx_decode_ops();
    bool one = r->n_global <= 1;
    if (r->format == QX_F_BF16) {
        ops->bf16(codes, n * r->width, out);
    } else if (r->format == QX_F_FP8 && one) {
        ops->fp8(codes, r->global[0], n * r->width, out);
    } else if (r->format == QX_F_NVFP4 && one) {
        ops->nvfp4(codes, scales, r->global[0], n * r->width, out); /* rows are whole blocks */
    } else {
        for (uint64_t i = 0; i < n; i++) {
            decode_row(r, ops, row0 + i, (const uint8_t *)codes + i * r->code_bytes,
                       r->scale_bytes > 0 ? (const uint8_t *)scales + i * r->scale_bytes : NULL,
                       out + i * r->width);
        }
    }
}

struct want {
    uint64_t row;
    uint32_t at;
};

/* Sorts by row, equal rows in order of arrival: a radix sort by bytes that differ. */
static void sort_wants(struct want *a, struct want *tmp, size_t n)
{
    uint64_t differ = 0;
    for (size_t i = 1; i < n; i++) {
        differ |= a[i].row ^ a[0].row;
    }
    for (unsigned shift = 0; shift < 64 && differ >> shift != 0; shift += 8) {
        size_t count[257] = {0};
        if ((differ >> shift & 0xff) == 0) {
            continue;
        }
        for (size_t i = 0; i < n; i++) {
            count[(a[i].row >> shift & 0xff) + 1]++;
        }
        for (size_t k = 0; k < 256; k++) {
            count[k + 1] += count[k];
        }
        for (size_t i = 0; i < n; i++) {
            tmp[count[a[i].row >> shift & 0xff]++] = a[i];
        }
        memcpy(a, tmp, n * sizeof *a);
    }
}

struct reader {
    const struct qx_rows *r;
    const struct qx_decode_ops *ops;
    enum qx_row_dtype dtype;
    uint8_t *out;
    size_t out_bytes; /* of one row */
    uint8_t *codes, *scales;
    float *row;         /* one row, for bf16 output */
    uint64_t span_rows; /* rows whose codes fit into the buffer */
    struct qx_read_queue *queue; /* from here on: made when first needed */
    struct flight *flight;
    uint8_t *group;
};

static uint64_t code_off(const struct qx_rows *r, uint64_t local)
{
    return r->packed ? qx_pack_row_off(&r->pack, local) : local * r->code_bytes;
}

/* Why the shard that holds this row cannot be read. */
static int shard_missing(const struct qx_rows *r, uint64_t row, struct qx_error *err)
{
    const struct qx_tensor *t;
    struct qx_error why = {0};
    char name[400];
    snprintf(name, sizeof name, "%s.shard_%" PRIu64 ".weight", r->name, row / r->rows_per_part);
    if (qx_ckpt_need(r->ck, name, &t, &why) != 0 && strcmp(why.kind, "missing-tensor") != 0) {
        if (err != NULL) {
            *err = why;
        }
        return -(int)why.code;
    }
    int rc = qx_fail(err, QX_E_MISSING, "ple-shard-missing",
                     "shard %" PRIu64 " of the table is missing, which holds row %" PRIu64,
                     row / r->rows_per_part, row);
    qx_error_at(err, NULL, r->name, QX_NO_OFF);
    return rc;
}

/* Bytes that the rows w[0..n) of one part lie in: of codes (with scales when packed) and of scales.
 */
struct extent {
    uint64_t code_off, code_n, scale_off, scale_n;
};

static struct extent extent_of(const struct reader *rd, const struct want *w, size_t n)
{
    const struct qx_rows *r = rd->r;
    uint64_t first = w[0].row % r->rows_per_part, last = w[n - 1].row % r->rows_per_part;
    struct extent e = {code_off(r, first), 0, first * r->scale_bytes, 0};
    if (rd->dtype != QX_ROW_SCALES || r->packed) {
        e.code_n =
            code_off(r, last) + r->code_bytes + (r->packed ? r->scale_bytes : 0) - e.code_off;
    }
    if (r->scale_bytes > 0 && rd->dtype != QX_ROW_RAW && !r->packed) {
        e.scale_n = (last - first + 1) * r->scale_bytes;
    }
    return e;
}

/* Decodes w[0..n), distinct or equal rows of one part, from the bytes of their extent. */
static void decode_span(const struct reader *rd, const struct want *w, size_t n,
                        const uint8_t *code_p, const uint8_t *scale_p)
{
    const struct qx_rows *r = rd->r;
    uint64_t first = w[0].row % r->rows_per_part, begin = code_off(r, first);
    for (size_t i = 0; i < n; i++) {
        uint8_t *out = rd->out + w[i].at * rd->out_bytes;
        if (i > 0 && w[i].row == w[i - 1].row) {
            memcpy(out, rd->out + w[i - 1].at * rd->out_bytes, rd->out_bytes);
            continue;
        }
        uint64_t local = w[i].row % r->rows_per_part;
        const uint8_t *codes = code_p + (code_off(r, local) - begin);
        const uint8_t *sc = r->packed          ? codes + r->code_bytes
                            : scale_p != NULL ? scale_p + (local - first) * r->scale_bytes
                                              : NULL;
        if (rd->dtype == QX_ROW_RAW) {
            memcpy(out, codes, rd->out_bytes);
        } else if (rd->dtype == QX_ROW_SCALES) {
            if (sc != NULL) { /* a format without scales has none to give */
                memcpy(out, sc, rd->out_bytes);
            }
        } else if (rd->dtype == QX_ROW_F32) {
            decode_row(r, rd->ops, w[i].row, codes, sc, (float *)(void *)out);
        } else {
            decode_row(r, rd->ops, w[i].row, codes, sc, rd->row);
            rd->ops->to_bf16(rd->row, r->width, (uint16_t *)(void *)out);
        }
    }
}

/* Reads and decodes one span by itself. */
static int read_span(struct reader *rd, const struct want *w, size_t n, struct qx_error *err)
{
    const struct qx_rows *r = rd->r;
    const struct qx_row_part *p = &r->parts[w[0].row / r->rows_per_part];
    struct extent e = extent_of(rd, w, n);
    if (p->weight == NULL) {
        return shard_missing(r, w[0].row, err);
    }
    int rc =
        e.code_n > 0 ? qx_rows_read_at(r->ck, p->weight, e.code_off, rd->codes, e.code_n, err) : 0;
    if (rc == 0 && e.scale_n > 0) {
        rc = qx_rows_read_at(r->ck, p->scale, e.scale_off, rd->scales, e.scale_n, err);
    }
    if (rc == 0) {
        decode_span(rd, w, n, rd->codes, rd->scales);
    }
    return rc;
}

/* The first k of w[0..n) that are read together: neighbours of one part. */
static size_t span_of(const struct reader *rd, const struct want *w, size_t n)
{
    const struct qx_rows *r = rd->r;
    uint64_t gap = r->packed ? 0 : GAP_BYTES / (r->code_bytes + r->scale_bytes + 1);
    uint64_t part = w[0].row / r->rows_per_part, limit = w[0].row + rd->span_rows - 1;
    size_t k = 1;
    while (k < n && w[k].row <= limit && w[k].row - w[k - 1].row <= gap + 1 &&
           w[k].row / r->rows_per_part == part) {
        k++;
    }
    return k;
}

/* ---- many small spans --------------------------------------------------------------------- */

/* Rows whose pages are not in memory are read with many reads in flight at once. Others of a table
 * that is small for this machine are decoded straight from a map. Of a large table a map's pages are given back window by
 * window, since they would count as this process's memory; then a map is faster than a call a span
 * where the page cache holds large pieces, and slower where it holds single pages, so both are
 * timed and the faster one is used. All of that only decides the speed. */
#define MANY 1024u
#define GROUP 256u
#define GROUP_BYTES (1u << 20)
#define PROBES 8u
#define WINDOW 256u
#define LOOK_AGAIN 64u /* every so many windows the slower way is timed again */
#define AROUND_BYTES 65536u /* a fault maps what is in memory around it, up to this */

static const uint8_t *mapped(const struct qx_rows *r, uint64_t part, bool scale)
{
    _Atomic(const uint8_t *) *slot = &r->maps[2 * part + scale];
    const uint8_t *p = atomic_load_explicit(slot, memory_order_acquire);
    if (p == NULL) {
        const struct qx_tensor *t = scale ? r->parts[part].scale : r->parts[part].weight;
        p = t != NULL && t->readable && t->size_bytes > 0 ? qx_ckpt_map(r->ck, t, NULL) : NULL;
        if (p != NULL) {
            /* A page that is missing after all is read alone, without its neighbours. */
            uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)p & ~(page - 1);
            (void)madvise((void *)begin, (uintptr_t)p + t->size_bytes - begin, MADV_RANDOM);
        }
        atomic_store_explicit(slot, p, memory_order_release);
    }
    return p;
}

/* mincore tells of pages in the cache and reads none (for files of others it may say yes always,
 * which costs speed only: a fault then reads one page). */
static bool in_memory(const struct reader *rd, const struct want *w, size_t n)
{
    const struct qx_rows *r = rd->r;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < PROBES; i++) {
        const struct want *x = &w[n * i / PROBES];
        const uint8_t *p = mapped(r, x->row / r->rows_per_part, false);
        struct extent e = extent_of(rd, x, 1);
        unsigned char there = 0;
        if (p == NULL ||
            mincore((void *)((uintptr_t)(p + e.code_off) & ~(page - 1)), page, &there) != 0 ||
            (there & 1) == 0) {
            return false;
        }
    }
    return true;
}

static bool is_small(const struct qx_rows *r)
{
    return r->n_rows <= r->map_bytes / (r->code_bytes + r->scale_bytes + 1);
}

/* Unmaps the pages around [first, end) of a tensor mapped at p; they stay in the cache. */
static void give_back(const uint8_t *p, uint64_t size, uint64_t first, uint64_t end)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), lo = (uintptr_t)p & ~(page - 1),
              hi = ((uintptr_t)p + size + page - 1) & ~(page - 1),
              a = ((uintptr_t)p + first) & ~(uintptr_t)(AROUND_BYTES - 1),
              b = ((uintptr_t)p + end + AROUND_BYTES) & ~(uintptr_t)(AROUND_BYTES - 1);
    a = a > lo ? a : lo;
    b = b < hi ? b : hi;
    (void)madvise((void *)a, b - a, MADV_DONTNEED);
}

/* Spans of one part, the first at w[0] and the last at w[n - 1], are decoded: their pages go. */
static void done_with(const struct reader *rd, const struct want *w, size_t n)
{
    const struct qx_rows *r = rd->r;
    uint64_t part = w[0].row / r->rows_per_part;
    struct extent a = extent_of(rd, w, 1), b = extent_of(rd, w + n - 1, 1);
    const uint8_t *c = mapped(r, part, false), *s = a.scale_n > 0 ? mapped(r, part, true) : NULL;
    if (c != NULL) {
        give_back(c, r->parts[part].weight->size_bytes, a.code_off, b.code_off + b.code_n);
    }
    if (s != NULL) {
        give_back(s, r->parts[part].scale->size_bytes, a.scale_off, b.scale_off + b.scale_n);
    }
}

static int read_mapped(struct reader *rd, const struct want *w, size_t n, struct qx_error *err)
{
    const struct qx_rows *r = rd->r;
    bool small = is_small(r);
    size_t begin = 0;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < n;) {
        size_t k = span_of(rd, w + i, n - i);
        uint64_t part = w[i].row / r->rows_per_part;
        struct extent e = extent_of(rd, w + i, k);
        const uint8_t *c = mapped(r, part, false),
                      *s = e.scale_n > 0 ? mapped(r, part, true) : NULL;
        if (c == NULL || (e.scale_n > 0 && s == NULL)) {
            rc = read_span(rd, w + i, k, err);
        } else {
            decode_span(rd, w + i, k, c + e.code_off, s != NULL ? s + e.scale_off : NULL);
        }
        i += k;
        if (!small && rc == 0 && (i == n || w[i].row / r->rows_per_part != part)) {
            done_with(rd, w + begin, i - begin);
            begin = i;
        }
    }
    return rc;
}

struct flight {
    struct qx_read reads[2 * GROUP];
    struct {
        const struct want *w;
        size_t n;
        const uint8_t *codes, *scales;
    } span[GROUP];
};

static int read_in_flight(struct reader *rd, const struct want *w, size_t n, struct qx_error *err)
{
    const struct qx_rows *r = rd->r;
    int rc = 0;
    if (rd->queue == NULL) {
        rd->flight = rd->flight != NULL ? rd->flight : qx_malloc(sizeof *rd->flight);
        rd->group = rd->group != NULL ? rd->group : qx_malloc(GROUP_BYTES);
        rc = rd->flight == NULL || rd->group == NULL
                 ? qx_fail_nomem(err)
                 : qx_read_queue_create(&rd->queue, GROUP, false, err);
    }
    struct flight *f = rd->flight;
    uint8_t *buf = rd->group;
    for (size_t i = 0; rc == 0 && i < n;) {
        size_t m = 0, n_reads = 0, used = 0;
        while (i < n && m < GROUP) {
            size_t k = span_of(rd, w + i, n - i);
            const struct qx_row_part *p = &r->parts[w[i].row / r->rows_per_part];
            struct extent e = extent_of(rd, w + i, k);
            bool plain =
                p->weight != NULL && p->weight->readable && (e.scale_n == 0 || p->scale->readable);
            if (!plain || e.code_n + e.scale_n > GROUP_BYTES / 4) {
                rc = read_span(rd, w + i, k, err); /* large, or it will say what is wrong */
                i += k;
                if (rc != 0) {
                    break;
                }
                continue;
            }
            if (used + e.code_n + e.scale_n > GROUP_BYTES) {
                break;
            }
            f->span[m].w = w + i;
            f->span[m].n = k;
            f->span[m].codes = buf + used;
            f->span[m].scales = buf + used + e.code_n;
            if (e.code_n > 0) {
                f->reads[n_reads++] = (struct qx_read){.fd = qx_ckpt_fd(r->ck, p->weight->file),
                                                       .off = p->weight->off + e.code_off,
                                                       .dst = buf + used,
                                                       .n = e.code_n};
            }
            if (e.scale_n > 0) {
                f->reads[n_reads++] = (struct qx_read){.fd = qx_ckpt_fd(r->ck, p->scale->file),
                                                       .off = p->scale->off + e.scale_off,
                                                       .dst = buf + used + e.code_n,
                                                       .n = e.scale_n};
            }
            used += e.code_n + e.scale_n;
            i += k;
            m++;
        }
        bool whole = rc == 0 && qx_read_queue_all(rd->queue, f->reads, n_reads, NULL) == 0;
        for (size_t k = 0; rc == 0 && k < m; k++) {
            if (whole) {
                decode_span(rd, f->span[k].w, f->span[k].n, f->span[k].codes, f->span[k].scales);
            } else {
                rc = read_span(rd, f->span[k].w, f->span[k].n,
                               err); /* the one that fails says why */
            }
        }
    }
    return rc;
}

static int read_spans(struct reader *rd, const struct want *w, size_t n, struct qx_error *err)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < n;) {
        size_t k = span_of(rd, w + i, n - i);
        rc = read_span(rd, w + i, k, err);
        i += k;
    }
    return rc;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A window of a large table in memory, in the way that took less time lately. */
static int read_timed(struct reader *rd, const struct want *w, size_t n, struct qx_error *err)
{
    struct qx_row_times *t = rd->r->times;
    uint32_t ns[2] = {atomic_load_explicit(&t->row_ns[0], memory_order_relaxed),
                      atomic_load_explicit(&t->row_ns[1], memory_order_relaxed)};
    uint32_t k = atomic_fetch_add_explicit(&t->n_windows, 1, memory_order_relaxed);
    bool map = ns[1] == 0 || (ns[0] != 0 && ns[1] < ns[0]);
    map = map != (k % LOOK_AGAIN == LOOK_AGAIN - 1);
    uint64_t start = now_ns();
    int rc = map ? read_mapped(rd, w, n, err) : read_spans(rd, w, n, err);
    uint64_t each = (now_ns() - start) / n + 1, old = ns[map];
    each = old == 0 ? each : (3 * old + each) / 4;
    atomic_store_explicit(&t->row_ns[map], each < UINT32_MAX ? (uint32_t)each : UINT32_MAX,
                          memory_order_relaxed);
    return rc;
}

static int read_wants(struct reader *rd, const struct want *w, size_t n, struct qx_error *err)
{
    const struct qx_rows *r = rd->r;
    size_t spans = 0;
    int rc = 0;
    for (size_t i = 0; r->maps != NULL && n >= MANY && i < n && spans <= n / 8;) {
        i += span_of(rd, w + i, n - i);
        spans++;
    }
    for (size_t i = 0, m; rc == 0 && spans > n / 8 && i < n; i += m) {
        m = n - i < WINDOW ? n - i : WINDOW;
        while (m < n - i && w[i + m].row == w[i + m - 1].row) {
            m++;
        }
        rc = !in_memory(rd, w + i, m) ? read_in_flight(rd, w + i, m, err)
             : is_small(r)            ? read_mapped(rd, w + i, m, err)
                                      : read_timed(rd, w + i, m, err);
    }
    if (spans > n / 8) {
        return rc;
    }
    return rc == 0 ? read_spans(rd, w, n, err) : rc;
}

/* ---- whole requests ----------------------------------------------------------------------- */

static int reader_init(struct reader *rd, struct qx_error *err)
{
    const struct qx_rows *r = rd->r;
    uint64_t row_bytes = r->code_bytes + (r->packed ? r->scale_bytes : 0), buffer = SPAN_BYTES;
    if (r->packed) {
        rd->span_rows = (SPAN_BYTES / r->pack.block_bytes - 1) * r->pack.rows_per_block;
    } else {
        buffer = row_bytes > SPAN_BYTES ? row_bytes : SPAN_BYTES;
        rd->span_rows = row_bytes > 0 ? buffer / row_bytes : 1;
    }
    rd->codes = qx_malloc(buffer);
    rd->scales = qx_malloc(rd->span_rows * r->scale_bytes + 1);
    rd->row = rd->dtype == QX_ROW_BF16 ? qx_malloc(r->width * sizeof(float) + 1) : NULL;
    bool ok =
        rd->codes != NULL && rd->scales != NULL && (rd->dtype != QX_ROW_BF16 || rd->row != NULL);
    return ok ? 0 : qx_fail_nomem(err);
}

static void reader_fini(struct reader *rd)
{
    qx_read_queue_destroy(rd->queue);
    qx_free(rd->flight);
    qx_free(rd->group);
    qx_free(rd->codes);
    qx_free(rd->scales);
    qx_free(rd->row);
}

/* A sorted piece on several threads: each part begins with another row than the part before ends
 * with, so that repeats stay together and parts write different outputs. */
#define PARTS 64u
struct shared_piece {
    struct reader *rd; /* [threads] */
    const struct want *w;
    size_t begin[PARTS + 1];
    int rc[PARTS];
    struct qx_error err[PARTS];
};

static void read_part(void *user, uint64_t i, uint32_t worker)
{
    struct shared_piece *s = user;
    size_t n = s->begin[i + 1] - s->begin[i];
    s->rc[i] = n > 0 ? read_wants(&s->rd[worker], s->w + s->begin[i], n, &s->err[i]) : 0;
}

static int read_shared(struct shared_piece *s, struct qx_pool *pool, const struct want *w, size_t n,
                       struct qx_error *err)
{
    s->w = w;
    for (size_t i = 0; i <= PARTS; i++) {
        size_t at = n * i / PARTS;
        while (at > 0 && at < n && w[at].row == w[at - 1].row) {
            at++;
        }
        s->begin[i] = at;
    }
    qx_pool_run(pool, PARTS, 1, read_part, s);
    for (size_t i = 0; i < PARTS; i++) {
        if (s->rc[i] != 0) {
            if (err != NULL) {
                *err = s->err[i];
            }
            return s->rc[i];
        }
    }
    return 0;
}

static int check_rows(const struct qx_rows *r, const uint64_t *rows, size_t n, struct qx_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (rows[i] >= r->n_rows) {
            int rc = qx_fail(err, QX_E_RANGE, "row-out-of-range",
                             "row %" PRIu64 " is out of range: there are rows 0 to %" PRIu64,
                             rows[i], r->n_rows - 1);
            qx_error_at(err, NULL, r->name, QX_NO_OFF);
            return rc;
        }
    }
    return 0;
}

int qx_rows_read_pool(const struct qx_rows *r, struct qx_pool *pool, const uint64_t *rows, size_t n,
                      enum qx_row_dtype dtype, void *dst, struct qx_error *err)
{
    int rc = check_rows(r, rows, n, err);
    uint32_t threads = pool != NULL && n >= 4 * MANY ? qx_pool_threads(pool) : 1;
    if (rc != 0) {
        return rc;
    }
    /* Pieces of the request bound the memory of sorting. */
    size_t piece = n < 65536 ? n : 65536;
    struct want *w = qx_malloc((piece + 1) * 2 * sizeof *w);
    struct reader *rd = qx_calloc(threads, sizeof *rd);
    struct shared_piece *shared = threads > 1 ? qx_malloc(sizeof *shared) : NULL;
    rc = w == NULL || rd == NULL || (threads > 1 && shared == NULL) ? qx_fail_nomem(err) : 0;
    size_t out_bytes = dtype == QX_ROW_RAW      ? r->code_bytes
                       : dtype == QX_ROW_SCALES ? r->scale_bytes
                                                : r->width * (dtype == QX_ROW_F32 ? 4 : 2);
    for (uint32_t k = 0; rc == 0 && k < threads; k++) {
        rd[k] =
            (struct reader){.r = r, .ops = qx_decode_ops(), .dtype = dtype, .out_bytes = out_bytes};
        rc = reader_init(&rd[k], err);
    }
    for (size_t i = 0; rc == 0 && i < n; i += piece) {
        size_t m = n - i < piece ? n - i : piece;
        bool sorted = true;
        for (size_t k = 0; k < m; k++) {
            w[k] = (struct want){rows[i + k], (uint32_t)k};
            sorted = sorted && (k == 0 || w[k - 1].row <= w[k].row);
        }
        if (!sorted) {
            sort_wants(w, w + piece, m);
        }
        for (uint32_t k = 0; k < threads; k++) {
            rd[k].out = (uint8_t *)dst + i * out_bytes;
        }
        if (threads > 1) {
            shared->rd = rd;
            rc = read_shared(shared, pool, w, m, err);
        } else {
            rc = read_wants(&rd[0], w, m, err);
        }
    }
    for (uint32_t k = 0; rd != NULL && k < threads; k++) {
        reader_fini(&rd[k]);
    }
    qx_free(shared);
    qx_free(rd);
    qx_free(w);
    return rc;
}

int qx_rows_read(const struct qx_rows *r, const uint64_t *rows, size_t n, enum qx_row_dtype dtype,
                 void *dst, struct qx_error *err)
{
    return qx_rows_read_pool(r, NULL, rows, n, dtype, dst, err);
}

int qx_rows_read_range(const struct qx_rows *r, uint64_t row0, uint64_t n, enum qx_row_dtype dtype,
                       void *dst, struct qx_error *err)
{
    uint64_t ids[1024];
    size_t bytes = dtype == QX_ROW_RAW      ? r->code_bytes
                   : dtype == QX_ROW_SCALES ? r->scale_bytes
                                            : r->width * (dtype == QX_ROW_F32 ? 4 : 2);
    int rc = 0;
    for (uint64_t i = 0; rc == 0 && i < n; i += QX_ARRAY_LEN(ids)) {
        size_t m = n - i < QX_ARRAY_LEN(ids) ? (size_t)(n - i) : QX_ARRAY_LEN(ids);
        for (size_t k = 0; k < m; k++) {
            ids[k] = row0 + i + k;
        }
        rc = qx_rows_read(r, ids, m, dtype, (uint8_t *)dst + i * bytes, err);
    }
    return rc;
}

int qx_rows_read_stored(const struct qx_rows *r, uint64_t row0, uint64_t n, void *codes,
                        void *scales, struct qx_error *err)
{
    uint64_t end;
    if (!qx_add_u64(row0, n, &end) || end > r->n_rows) {
        return qx_fail(err, QX_E_RANGE, "row-out-of-range",
                       "rows %" PRIu64 " to %" PRIu64 " are out of range: there are %" PRIu64, row0,
                       row0 + n, r->n_rows);
    }
    uint8_t *c = codes, *s = scales;
    uint8_t *block = NULL;
    int rc = 0;
    if (r->packed) {
        block = qx_malloc(r->pack.block_bytes);
        rc = block == NULL ? qx_fail_nomem(err) : 0;
    }
    for (uint64_t row = row0; rc == 0 && row < end;) {
        const struct qx_row_part *p = &r->parts[row / r->rows_per_part];
        uint64_t local = row % r->rows_per_part, step = r->rows_per_part - local;
        if (p->weight == NULL) {
            rc = shard_missing(r, row, err);
            break;
        }
        if (r->packed) {
            step = r->pack.rows_per_block - local % r->pack.rows_per_block;
            step = step < end - row ? step : end - row;
            uint64_t each = r->code_bytes + r->scale_bytes;
            rc = qx_rows_read_at(r->ck, p->weight, code_off(r, local), block, step * each, err);
            for (uint64_t i = 0; rc == 0 && i < step; i++) {
                memcpy(c + i * r->code_bytes, block + i * each, r->code_bytes);
                if (r->scale_bytes > 0 && s != NULL) {
                    memcpy(s + i * r->scale_bytes, block + i * each + r->code_bytes,
                           r->scale_bytes);
                }
            }
        } else {
            step = step < end - row ? step : end - row;
            rc = qx_rows_read_at(r->ck, p->weight, local * r->code_bytes, c, step * r->code_bytes,
                                 err);
            if (rc == 0 && r->scale_bytes > 0 && s != NULL) {
                rc = qx_rows_read_at(r->ck, p->scale, local * r->scale_bytes, s,
                                     step * r->scale_bytes, err);
            }
        }
        row += step;
        c += step * r->code_bytes;
        s = s != NULL ? s + step * r->scale_bytes : NULL;
    }
    qx_free(block);
    return rc;
}
