/* load.c: bytes from files to their place. Readers fill one half of a pinned ring while the other half is
 * being uploaded; the table goes straight to where it stays. On host-memory backends weights stay mapped
 * and only what has no mapped form is read. */
#include "bind.h"

#include "alloc.h"
#include "pool.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Pinning memory costs time: small loads get a small ring. */
#define MAX_SLOT_BYTES (16ull << 20)
#define MIN_SLOT_BYTES (64ull << 10)
#define HALF_SLOTS 16

/* Part of a piece inside a slot. */
struct span { uint32_t piece; uint64_t off, size, slot_off; };
struct slot_fill { size_t first_span, n_spans; int rc; struct qx_error err; };

struct loader {
    struct qx_bind *b;
    char *ring;                 /* two halves of n_slots slots */
    uint64_t slot_bytes;
    uint32_t n_slots, half;     /* slots of a half, at most HALF_SLOTS */
    struct span *spans;
    size_t n_spans, cap_spans;
    struct slot_fill fill[HALF_SLOTS];
    const struct qx_model_opts *o;
    uint64_t done, total;
    struct timespec told;
};

static char *slot_of(const struct loader *l, uint64_t i)
{
    return l->ring + ((uint64_t)l->half * l->n_slots + i) * l->slot_bytes;
}

static int by_place(const void *pa, const void *pb)
{
    const struct qx_piece *a = pa, *b = pb;
    if (!a->t != !b->t) {
        return a->t ? 1 : -1;
    }
    if (!a->t) {
        return a->dst < b->dst ? -1 : a->dst > b->dst;
    }
    if (a->t->file != b->t->file) {
        return a->t->file < b->t->file ? -1 : 1;
    }
    uint64_t x = a->t->off + a->off, y = b->t->off + b->off;
    return x < y ? -1 : x > y;
}

static int tell(struct loader *l, uint64_t n, struct qx_error *err)
{
    struct timespec now;
    l->done += n;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double since = (double)(now.tv_sec - l->told.tv_sec) + (double)(now.tv_nsec - l->told.tv_nsec) * 1e-9;
    if (l->o->progress && (since > 0.1 || l->done >= l->total)) {
        l->told = now;
        if (l->o->progress(l->o->user, l->done, l->total)) {
            return qx_fail(err, QX_E_INTERRUPTED, "interrupted", "loading was stopped");
        }
    }
    return 0;
}

/* Device memory of the ring, readers, and the reading and uploading of consecutive batches. */
static void read_slot(void *user, uint64_t i, uint32_t worker)
{
    struct loader *l = user;
    struct slot_fill *f = &l->fill[i];
    (void)worker;
    f->rc = 0;
    for (size_t s = f->first_span; s < f->first_span + f->n_spans && !f->rc; ++s) {
        const struct span *sp = &l->spans[s];
        const struct qx_piece *p = &l->b->pieces[sp->piece];
        char *dst = slot_of(l, i) + sp->slot_off;
        if (p->t) {
            f->rc = qx_ckpt_read(l->b->m->ck, p->t, p->off + sp->off, dst, sp->size, &f->err);
        } else {
            memcpy(dst, (const char *)p->data + sp->off, sp->size);
        }
    }
}

/* Cuts all pieces into spans that fill slots; returns the number of slots through n_slots. */
static int plan_spans(struct loader *l, size_t *first_of_slot, size_t *n_slots, struct qx_error *err)
{
    uint64_t used = l->slot_bytes;
    size_t slots = 0;
    l->n_spans = 0;
    for (uint32_t p = 0; p < l->b->n_pieces; ++p) {
        for (uint64_t off = 0; off < l->b->pieces[p].size;) {
            if (used == l->slot_bytes) {
                if (first_of_slot) {
                    first_of_slot[slots] = l->n_spans;
                }
                ++slots;
                used = 0;
            }
            uint64_t left = l->b->pieces[p].size - off, room = l->slot_bytes - used;
            uint64_t size = left < room ? left : room;
            if (!qx_grow((void **)&l->spans, &l->cap_spans, l->n_spans + 1, sizeof *l->spans)) {
                return qx_fail_nomem(err);
            }
            l->spans[l->n_spans++] = (struct span){p, off, size, used};
            used += size;
            off += size;
        }
    }
    if (first_of_slot) {
        first_of_slot[slots] = l->n_spans;
    }
    *n_slots = slots;
    return 0;
}

static int upload_half(struct loader *l, uint32_t n, struct qx_error *err)
{
    struct qx_model *m = l->b->m;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; ++i) {
        const struct slot_fill *f = &l->fill[i];
        if (f->rc) {
            if (err) {
                *err = f->err;
            }
            return f->rc;
        }
        for (size_t s = f->first_span; s < f->first_span + f->n_spans; ++s) {
            const struct span *sp = &l->spans[s];
            const struct qx_piece *p = &l->b->pieces[sp->piece];
            if (m->be->upload(m->q, l->b->arena + p->dst + sp->off, slot_of(l, i) + sp->slot_off, sp->size)) {
                return qx_model_op_failed(m, "upload", -1, err);
            }
            sum += sp->size;
            l->b->read_bytes += p->t ? sp->size : 0;
        }
    }
    return tell(l, sum, err);
}

static int stream_pieces(struct loader *l, struct qx_pool *pool, struct qx_error *err)
{
    struct qx_model *m = l->b->m;
    size_t n_slots = 0, *first = NULL;
    int rc = plan_spans(l, NULL, &n_slots, err);
    if (!rc && (first = qx_malloc((n_slots + 1) * sizeof *first)) == NULL) {
        rc = qx_fail_nomem(err);
    }
    rc = rc ? rc : plan_spans(l, first, &n_slots, err);
    for (size_t s = 0; s < n_slots && !rc; s += l->n_slots) {
        uint32_t n = (uint32_t)(n_slots - s < l->n_slots ? n_slots - s : l->n_slots);
        for (uint32_t i = 0; i < n; ++i) {
            l->fill[i] = (struct slot_fill){.first_span = first[s + i],
                                            .n_spans = first[s + i + 1] - first[s + i]};
        }
        qx_pool_run(pool, n, 1, read_slot, l);
        rc = m->be->wait(m->q, err); /* the other half is on the device now */
        rc = rc ? rc : upload_half(l, n, err);
        l->half ^= 1;
    }
    if (!rc) {
        rc = m->be->wait(m->q, err);
    }
    qx_free(first);
    return rc;
}

static uint32_t reader_threads(const struct qx_model_opts *o)
{
    return o->n_threads ? o->n_threads : 16; /* readers wait for storage: more than processors is fine */
}

static int open_ring(struct loader *l, struct qx_pool **pool, const struct qx_model_opts *o, uint64_t n_bytes,
                     struct qx_error *err)
{
    l->slot_bytes = MIN_SLOT_BYTES;
    while (l->slot_bytes < MAX_SLOT_BYTES && l->slot_bytes * HALF_SLOTS < n_bytes) {
        l->slot_bytes *= 2;
    }
    uint64_t slots = qx_ceil_div(n_bytes, l->slot_bytes);
    l->n_slots = slots > HALF_SLOTS ? HALF_SLOTS : slots ? (uint32_t)slots : 1;
    struct qx_backend *be = l->b->m->be;
    void *ring, *dev;
    int rc = be->host_alloc(be, &ring, &dev, 2 * l->n_slots * l->slot_bytes, err);
    if (!rc) {
        l->ring = ring;
        rc = qx_pool_create(pool, reader_threads(o), err);
    }
    return rc;
}

static void close_ring(struct loader *l, struct qx_pool *pool)
{
    struct qx_backend *be = l->b->m->be;
    qx_pool_destroy(pool);
    if (l->ring) {
        be->wait(l->b->m->q, NULL);
        be->host_free(be, l->ring);
    }
    qx_free(l->spans);
}

int qx_load_pieces(struct qx_bind *b, const struct qx_model_opts *o, struct qx_error *err)
{
    if (!b->n_pieces) {
        return 0;
    }
    struct loader l = {.b = b, .o = o, .total = b->weight_bytes};
    l.total += b->m->place == QX_TABLE_DISK ? 0 : b->table_bytes;
    struct qx_pool *pool = NULL;
    qsort(b->pieces, b->n_pieces, sizeof *b->pieces, by_place);
    int rc = open_ring(&l, &pool, o, b->weight_bytes, err);
    rc = rc ? rc : stream_pieces(&l, pool, err);
    close_ring(&l, pool);
    return rc;
}

/* ---- table -------------------------------------------------------------------------------- */

struct table_read {
    struct loader *l;
    const struct qx_rows *rows;
    uint64_t row0, per_slot, n_rows; /* of the batch; of the table */
    uint64_t code_bytes, scale_bytes;
    char *codes, *scales;       /* where the table stays; host place only */
    int rc[HALF_SLOTS];
    struct qx_error err[HALF_SLOTS];
};

static uint64_t rows_in(const struct table_read *t, uint64_t i)
{
    uint64_t row = t->row0 + i * t->per_slot;
    return row >= t->n_rows ? 0 : t->n_rows - row < t->per_slot ? t->n_rows - row : t->per_slot;
}

static void read_table_slot(void *user, uint64_t i, uint32_t worker)
{
    struct table_read *t = user;
    uint64_t row = t->row0 + i * t->per_slot, n = rows_in(t, i);
    (void)worker;
    char *codes = t->codes ? t->codes + row * t->code_bytes : slot_of(t->l, i);
    char *scales = t->scales ? t->scales + row * t->scale_bytes : slot_of(t->l, i) + n * t->code_bytes;
    t->rc[i] = n ? qx_rows_read_stored(t->rows, row, n, codes, t->scale_bytes ? scales : NULL, &t->err[i])
                 : 0;
}

static int stream_table(struct table_read *t, struct qx_pool *pool, char *dev_codes, char *dev_scales,
                        struct qx_error *err)
{
    struct qx_model *m = t->l->b->m;
    for (t->row0 = 0; t->row0 < t->n_rows; t->row0 += t->l->n_slots * t->per_slot) {
        qx_pool_run(pool, t->l->n_slots, 1, read_table_slot, t);
        int rc = m->be->wait(m->q, err);
        uint64_t sum = 0;
        for (uint64_t i = 0; i < t->l->n_slots && !rc; ++i) {
            uint64_t row = t->row0 + i * t->per_slot, n = rows_in(t, i);
            if (t->rc[i]) {
                if (err) {
                    *err = t->err[i];
                }
                return t->rc[i];
            }
            sum += n * (t->code_bytes + t->scale_bytes);
            if (n && dev_codes) {
                const char *from = slot_of(t->l, i);
                rc = m->be->upload(m->q, dev_codes + row * t->code_bytes, from, n * t->code_bytes);
                if (!rc && t->scale_bytes) {
                    rc = m->be->upload(m->q, dev_scales + row * t->scale_bytes, from + n * t->code_bytes,
                                       n * t->scale_bytes);
                }
                rc = rc ? qx_model_op_failed(m, "upload", rc, err) : 0;
            }
        }
        t->l->b->read_bytes += sum;
        rc = rc ? rc : tell(t->l, sum, err);
        if (rc) {
            return rc;
        }
        t->l->half ^= 1;
    }
    return m->be->wait(m->q, err);
}

/* Mapped shards as they are: host-memory backends. */
static int map_table(struct qx_bind *b, struct qx_error *err)
{
    struct qx_model *m = b->m;
    const struct qx_table *t = qx_resolved_table(b->r);
    const void **codes = NULL, **scales = NULL;
    int rc = qx_model_mem(m, &codes, t->n_shards * sizeof *codes, err);
    rc = rc ? rc : qx_model_mem(m, &scales, t->n_shards * sizeof *scales, err);
    for (uint32_t i = 0; i < t->n_shards && !rc; ++i) {
        codes[i] = scales[i] = NULL;
        if (qx_table_shard_rows(t, i) == 0) {
            continue; /* no row is looked for there */
        }
        codes[i] = qx_ckpt_map(m->ck, t->shards[i].weight, err);
        scales[i] = t->shards[i].scale ? qx_ckpt_map(m->ck, t->shards[i].scale, err) : NULL;
        rc = !codes[i] || (t->shards[i].scale && !scales[i]) ? -(int)(err ? err->code : QX_E_IO) : 0;
    }
    m->table.codes = codes;
    m->table.scale = m->table.fmt == QX_W_NVFP4 ? scales : NULL;
    m->table.rows_per_shard = t->rows_per_shard;
    return rc;
}

int qx_load_table(struct qx_bind *b, const struct qx_model_opts *o, struct qx_error *err)
{
    struct qx_model *m = b->m;
    const struct qx_table *t = qx_resolved_table(b->r);
    struct qx_rows *rows = NULL;
    int rc = qx_rows_open_table(&rows, m->ck, err);
    if (rc) {
        return rc;
    }
    m->table.global = qx_rows_global(rows);
    struct table_read tr = {.rows = rows, .n_rows = t->n_rows, .code_bytes = qx_rows_raw_bytes(rows),
                            .scale_bytes = qx_rows_scale_bytes(rows)};
    m->table.code_stride = tr.code_bytes;
    m->table.scale_stride = tr.scale_bytes;
    if (m->place == QX_TABLE_DISK) {
        m->table_rows = rows;
        return 0;
    }
    if (m->be->host_memory && !t->packed_rows) {
        rc = map_table(b, err);
        qx_rows_close(rows);
        return rc;
    }

    struct loader l = {.b = b, .o = o, .done = b->weight_bytes, .total = b->weight_bytes + b->table_bytes};
    struct qx_pool *pool = NULL;
    char *codes = NULL, *scales = NULL, *base[2] = {NULL, NULL};
    uint64_t n_codes = t->n_rows * tr.code_bytes, n_scales = t->n_rows * tr.scale_bytes;
    bool on_device = m->place == QX_TABLE_DEVICE && !m->be->host_memory;
    tr.l = &l;
    rc = open_ring(&l, &pool, o, b->table_bytes, err);
    tr.per_slot = l.slot_bytes / (tr.code_bytes + tr.scale_bytes);
    if (!rc && !tr.per_slot) {
        rc = qx_fail(err, QX_E_UNSUPPORTED, "table-format", "rows of the n-gram table are larger than %llu bytes",
                     (unsigned long long)l.slot_bytes);
    }
    if (!rc && on_device) {
        rc = qx_model_mem(m, &codes, n_codes, err);
        rc = rc || !n_scales ? rc : qx_model_mem(m, &scales, n_scales, err);
        rc = rc ? rc : stream_table(&tr, pool, codes, scales, err);
    } else if (!rc) {
        rc = qx_model_host_mem_mapped(m, &tr.codes, &codes, n_codes, err);
        rc = rc || !n_scales ? rc : qx_model_host_mem_mapped(m, &tr.scales, &scales, n_scales, err);
        rc = rc ? rc : stream_table(&tr, pool, NULL, NULL, err);
    }
    close_ring(&l, pool);
    qx_rows_close(rows);
    if (rc) {
        return rc;
    }
    /* One shard of all rows; its addresses in device memory. */
    base[0] = codes;
    base[1] = scales;
    char **dev = NULL;
    rc = qx_model_mem(m, &dev, sizeof base, err);
    if (!rc && m->be->upload(m->q, dev, base, sizeof base)) {
        rc = qx_model_op_failed(m, "upload", -1, err);
    }
    rc = rc ? rc : m->be->wait(m->q, err);
    m->table.codes = (const void *const *)(const void *)dev;
    m->table.scale = n_scales ? (const void *const *)(const void *)(dev + 1) : NULL;
    m->table.rows_per_shard = t->n_rows;
    return rc;
}
