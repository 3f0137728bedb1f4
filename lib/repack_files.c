/* repack_files.c: places every tensor of the output in a file, lays out the headers and cuts the
 * work into jobs. A source file of which every byte is kept stays what it is; the others are
 * written anew, with what is kept of them in its old order, so that neighbours are copied together.
 */
#include "repack_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_NEW_FILE (5ull << 30)
#define COPY_PIECE (16ull << 20)
#define PAGE 4096u

/* ---- order -------------------------------------------------------------------------------- */

struct key {
    uint32_t group;
    uint64_t a, b;
    uint32_t index;
};

static int by_key(const void *pa, const void *pb)
{
    const struct key *a = pa, *b = pb;
    if (a->group != b->group) {
        return a->group < b->group ? -1 : 1;
    }
    if (a->a != b->a) {
        return a->a < b->a ? -1 : 1;
    }
    if (a->b != b->b) {
        return a->b < b->b ? -1 : 1;
    }
    return a->index < b->index ? -1 : a->index > b->index;
}

/* Copies by source file and offset, then experts, then the table; the last two as they were
 * planned. */
static int sort_tensors(struct qx_repack *r, struct qx_error *err)
{
    struct key *k = qx_calloc(r->n_t + 1, sizeof *k);
    r->order = qx_calloc(r->n_t + 1, sizeof *r->order);
    if (k == NULL || r->order == NULL) {
        qx_free(k);
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; i < r->n_t; i++) {
        const struct rp_tensor *t = &r->t[i];
        k[i].index = (uint32_t)i;
        if (t->source == RP_COPY) {
            k[i].group = 0;
            k[i].a = t->from->file;
            k[i].b = t->from->off;
        } else {
            k[i].group = t->source == RP_EXPERT ? 1 : 2;
        }
    }
    qsort(k, r->n_t, sizeof *k, by_key);
    for (size_t i = 0; i < r->n_t; i++) {
        r->order[i] = k[i].index;
    }
    qx_free(k);
    return 0;
}

/* ---- files -------------------------------------------------------------------------------- */

static struct rp_file *add_file(struct qx_repack *r, size_t first)
{
    if (!qx_grow((void **)&r->f, &r->cap_f, r->n_f + 1, sizeof *r->f)) {
        return NULL;
    }
    struct rp_file *f = &r->f[r->n_f++];
    *f = (struct rp_file){.from = -1, .first = (uint32_t)first, .align = 8};
    return f;
}

/* May a new file begin at this tensor? Parts of one expert, and codes and their scales, stay
 * together. */
static bool can_break(const struct qx_repack *r, uint32_t index)
{
    const struct rp_tensor *t = &r->t[index];
    if (t->source == RP_TABLE_SCALES) {
        return false;
    }
    if (t->source == RP_EXPERT) {
        for (size_t i = 0; i < r->n_c; i++) {
            const struct rp_container *c = &r->c[i];
            if (c->convert && c->per_expert > 0 && index >= c->tensor0 &&
                index < c->tensor0 + c->n * c->per_expert) {
                return (index - c->tensor0) % c->per_expert == 0;
            }
        }
    }
    return true;
}

static bool name_taken(const struct qx_repack *r, size_t n, const char *prefix)
{
    for (size_t i = 0; i < n; i++) {
        if (r->f[i].name != NULL && strncmp(r->f[i].name, prefix, strlen(prefix)) == 0) {
            return true;
        }
    }
    return false;
}

/* PREFIX-00001-of-00003.safetensors for files [a, b). */
static bool name_files(struct qx_repack *r, size_t a, size_t b, const char *stem)
{
    char prefix[64], name[128];
    snprintf(prefix, sizeof prefix, "%s-", stem);
    for (unsigned k = 2; name_taken(r, a, prefix) && k < 1000; k++) {
        snprintf(prefix, sizeof prefix, "%s%u-", stem, k);
    }
    for (size_t i = a; i < b; i++) {
        snprintf(name, sizeof name, "%s%05zu-of-%05zu.safetensors", prefix, i - a + 1, b - a);
        r->f[i].name = qx_arena_strndup(r->arena, name, strlen(name));
        if (r->f[i].name == NULL) {
            return false;
        }
    }
    return true;
}

/* Cuts order[a, b) into files of at most `limit` bytes of data (one tensor may be larger). */
static bool cut(struct qx_repack *r, size_t a, size_t b, uint64_t limit)
{
    uint64_t bytes = 0;
    struct rp_file *f = NULL;
    for (size_t i = a; i < b; i++) {
        const struct rp_tensor *t = &r->t[r->order[i]];
        bool alone = t->source == RP_TABLE_PACKED; /* its data begins at a block */
        if (f == NULL || alone ||
            (bytes > 0 && bytes + t->size > limit && can_break(r, r->order[i]))) {
            f = add_file(r, i);
            bytes = 0;
            if (f == NULL) {
                return false;
            }
            f->packed = alone;
            f->align = alone ? QX_PACK_BLOCK_BYTES : 8;
        }
        bytes += t->size;
        f->n++;
        r->t[r->order[i]].file = (uint32_t)(r->n_f - 1);
    }
    return true;
}

static size_t end_of_group(const struct qx_repack *r, size_t a, bool copies)
{
    size_t i = a;
    while (i < r->n_t && (r->t[r->order[i]].source == RP_COPY) == copies &&
           (copies ||
            (r->t[r->order[i]].source == RP_EXPERT) == (r->t[r->order[a]].source == RP_EXPERT))) {
        i++;
    }
    return i;
}

static int keep_files(struct qx_repack *r, size_t end, struct qx_error *err)
{
    struct rp_file *f = NULL;
    uint32_t from = 0;
    for (size_t i = 0; i < end; i++) {
        struct rp_tensor *t = &r->t[r->order[i]];
        if (f == NULL || t->from->file != from) {
            from = t->from->file;
            f = add_file(r, i);
            if (f == NULL) {
                return qx_fail_nomem(err);
            }
            f->name = qx_ckpt_file(r->ck, from)->name;
        }
        f->n++;
        t->file = (uint32_t)(r->n_f - 1);
    }
    for (size_t i = 0; i < r->n_f; i++) {
        const struct rp_tensor *t = &r->t[r->order[r->f[i].first]];
        const struct qx_file *src = qx_ckpt_file(r->ck, t->from->file);
        if (src->state == QX_FILE_OK && src->n_tensors == r->f[i].n) {
            r->f[i].from = (int32_t)t->from->file;
            r->f[i].size = src->size_bytes;
        }
        if (strchr(r->f[i].name, '/') != NULL) {
            return qx_fail(
                err, QX_E_UNSUPPORTED, "unsafe-path",
                "a weight file lies in a folder below the checkpoint; give --max-shard to regroup");
        }
    }
    return 0;
}

/* Ranges of the source that follow each other in the output tensor t, from its start on: calls fn with
 * each range's place in t. Only for tensors whose bytes are kept; false: fn said so. */
typedef bool range_fn(void *user, uint64_t at, uint32_t from, uint64_t from_off, uint64_t n);

static bool is_table_copy(const struct qx_repack *r, const struct rp_tensor *t)
{
    const struct qx_table *src = qx_resolved_table(qx_ckpt_resolved(r->ck));
    return (t->source == RP_TABLE_CODES || t->source == RP_TABLE_SCALES) && !r->table.convert &&
           !r->table.packed && !src->packed_rows;
}

static bool copied_ranges(const struct qx_repack *r, const struct rp_tensor *t, range_fn *fn, void *user)
{
    if (!is_table_copy(r, t)) {
        return t->from == NULL || fn(user, 0, t->from->file, t->from->off, t->size);
    }
    /* Rows of a shard: ranges of the source's shards. */
    const struct qx_table *src = qx_resolved_table(qx_ckpt_resolved(r->ck));
    bool scales = t->source == RP_TABLE_SCALES;
    uint64_t row_bytes = scales ? r->table.scale_bytes : r->table.code_bytes;
    uint64_t row = t->row0, end = t->row0 + t->n_rows, at = 0;
    while (row < end && row < r->table.src_rows) {
        const struct qx_table_shard *s = &src->shards[row / src->rows_per_shard];
        const struct qx_tensor *w = scales ? s->scale : s->weight;
        uint64_t local = row % src->rows_per_shard, n = src->rows_per_shard - local;
        n = n < end - row ? n : end - row;
        if (!fn(user, at, w->file, w->off + local * row_bytes, n * row_bytes)) {
            return false;
        }
        row += n;
        at += n * row_bytes;
    }
    return true;
}

/* Bytes that would be copied from page to page if the data began 8 k bytes later, k the index. */
struct phases {
    uint64_t off;
    uint64_t bytes[PAGE / 8];
};

static bool count_phase(void *user, uint64_t at, uint32_t from, uint64_t from_off, uint64_t n)
{
    struct phases *p = user;
    uint64_t pad = (from_off - (p->off + at)) % PAGE;
    (void)from;
    if (pad % 8 == 0) {
        p->bytes[pad / 8] += n;
    }
    return true;
}

/* What to put behind the header so that most of what is copied lies in its pages as it does in the source:
 * the system then copies whole pages, not two parts of each. Small files stay as they are. */
static uint64_t page_padding(const struct qx_repack *r, const struct rp_file *f)
{
    struct phases p = {0};
    size_t best = 0;
    for (uint32_t i = 0; i < f->n; i++) {
        const struct rp_tensor *t = &r->t[r->order[f->first + i]];
        p.off = t->off;
        if (t->source == RP_COPY || is_table_copy(r, t)) {
            (void)copied_ranges(r, t, count_phase, &p);
        }
    }
    for (size_t i = 1; i < QX_ARRAY_LEN(p.bytes); i++) {
        best = p.bytes[i] > p.bytes[best] ? i : best;
    }
    return p.bytes[best] - p.bytes[0] >= COPY_PIECE ? best * 8 : 0;
}

static int file_header(struct qx_repack *r, struct rp_file *f, struct qx_error *err)
{
    struct qx_st_tensor *st = qx_calloc((size_t)f->n + 1, sizeof *st);
    struct qx_st_pair meta[64];
    size_t n_meta = 0;
    char pack[320];
    if (st == NULL) {
        return qx_fail_nomem(err);
    }
    for (uint32_t i = 0; i < f->n; i++) {
        const struct rp_tensor *t = &r->t[r->order[f->first + i]];
        st[i] = (struct qx_st_tensor){.name = t->name,
                                      .dtype = t->dtype,
                                      .shape = t->shape,
                                      .n_dims = t->n_dims,
                                      .size_bytes = t->size};
    }
    const struct rp_tensor *first = &r->t[r->order[f->first]];
    if (first->source == RP_COPY && r->o.max_shard_bytes == 0) {
        const struct qx_file *src = qx_ckpt_file(r->ck, first->from->file);
        for (uint32_t i = 0; i < src->n_meta && n_meta < QX_ARRAY_LEN(meta); i++) {
            if (strcmp(src->meta[i].key, QX_PACK_KEY) != 0) {
                meta[n_meta++] = (struct qx_st_pair){src->meta[i].key, src->meta[i].value};
            }
        }
    } else {
        meta[n_meta++] = (struct qx_st_pair){"format", "pt"};
    }
    if (f->packed) {
        /* Scale and hash are filled in at the end: the text keeps its length. */
        struct qx_pack_info p = r->table.pack;
        p.has_global = r->table.to == QX_F_FP8 || r->table.to == QX_F_NVFP4;
        qx_pack_print(&p, pack);
        meta[n_meta++] = (struct qx_st_pair){QX_PACK_KEY, pack};
    }
    struct qx_buf b = {0};
    int rc = qx_st_header(&b, st, f->n, meta, n_meta, f->align, &f->size, err);
    uint64_t pad = 0;
    for (uint32_t i = 0; rc == 0 && i < f->n; i++) {
        r->t[r->order[f->first + i]].off = st[i].off;
    }
    if (rc == 0 && !f->packed) {
        pad = page_padding(r, f);
        rc = qx_st_header_pad(&b, pad) ? 0 : qx_fail_nomem(err);
        f->size += pad;
    }
    if (rc == 0) {
        f->header = qx_arena_alloc(r->arena, b.n + 1, 8);
        if (f->header == NULL) {
            rc = qx_fail_nomem(err);
        } else {
            memcpy(f->header, b.p, b.n);
            f->header_bytes = b.n;
        }
        for (uint32_t i = 0; i < f->n; i++) {
            r->t[r->order[f->first + i]].off += pad;
        }
    }
    qx_buf_fini(&b);
    qx_free(st);
    return rc;
}

int rp_plan_files(struct qx_repack *r, struct qx_error *err)
{
    int rc = sort_tensors(r, err);
    if (rc != 0) {
        return rc;
    }
    if (r->n_t == 0) {
        return qx_fail(err, QX_E_USAGE, "usage", "nothing would be left in the output");
    }
    bool ok = true;
    if (r->o.max_shard_bytes > 0) {
        ok = cut(r, 0, r->n_t, r->o.max_shard_bytes) && name_files(r, 0, r->n_f, "model");
    } else {
        size_t end = end_of_group(r, 0, true);
        int kept = end > 0 ? keep_files(r, end, err) : 0;
        if (kept != 0) {
            return kept;
        }
        while (ok && end < r->n_t) {
            size_t begin = end, first = r->n_f;
            bool experts = r->t[r->order[begin]].source == RP_EXPERT;
            end = end_of_group(r, begin, false);
            ok = cut(r, begin, end, DEFAULT_NEW_FILE) &&
                 name_files(r, first, r->n_f, experts ? "model-experts" : "model-ple-table");
        }
    }
    if (!ok) {
        return qx_fail_nomem(err);
    }
    for (size_t i = 0; rc == 0 && i < r->n_f; i++) {
        struct rp_file *f = &r->f[i];
        if (f->from < 0) {
            rc = file_header(r, f, err);
        } else {
            for (uint32_t k = 0; k < f->n; k++) {
                struct rp_tensor *t = &r->t[r->order[f->first + k]];
                t->off = t->from->off;
            }
        }
        r->info.bytes_out += f->size;
    }
    return rc;
}

/* ---- jobs --------------------------------------------------------------------------------- */

static struct rp_job *add_job(struct qx_repack *r, enum rp_job_kind kind, uint32_t file,
                              uint64_t off, uint64_t n)
{
    if (!qx_grow((void **)&r->j, &r->cap_j, r->n_j + 1, sizeof *r->j)) {
        return NULL;
    }
    r->f[file].last_job = r->n_j;
    struct rp_job *j = &r->j[r->n_j++];
    *j = (struct rp_job){.kind = kind, .file = file, .off = off, .n = n, .from = -1};
    return j;
}

/* Pieces end at multiples of their size in the destination: the system copies some pages at a time, which
 * then stay together in its cache. */
static uint64_t piece_at(uint64_t off)
{
    return COPY_PIECE - off % COPY_PIECE;
}

static bool copy_jobs(struct qx_repack *r, uint32_t file, uint64_t off, uint32_t from,
                      uint64_t from_off, uint64_t n)
{
    if (n == 0) {
        return true;
    }
    /* Continues the job before it? */
    struct rp_job *last = r->n_j > 0 ? &r->j[r->n_j - 1] : NULL;
    if (last != NULL && last->kind == RP_J_COPY && last->file == file &&
        last->off + last->n == off && last->from == (int32_t)from &&
        last->from_off + last->n == from_off && last->n < piece_at(last->off)) {
        uint64_t left = piece_at(last->off) - last->n, k = left < n ? left : n;
        last->n += k;
        off += k;
        from_off += k;
        n -= k;
    }
    while (n > 0) {
        uint64_t k = n < piece_at(off) ? n : piece_at(off);
        struct rp_job *j = add_job(r, RP_J_COPY, file, off, k);
        if (j == NULL) {
            return false;
        }
        j->from = (int32_t)from;
        j->from_off = from_off;
        off += k;
        from_off += k;
        n -= k;
    }
    return true;
}

struct place {
    struct qx_repack *r;
    const struct rp_tensor *t;
};

static bool copy_range_jobs(void *user, uint64_t at, uint32_t from, uint64_t from_off, uint64_t n)
{
    const struct place *p = user;
    return copy_jobs(p->r, p->t->file, p->t->off + at, from, from_off, n);
}

static bool table_jobs(struct qx_repack *r, uint32_t index)
{
    const struct rp_tensor *t = &r->t[index];
    const struct rp_table *tab = &r->table;
    if (is_table_copy(r, t)) {
        return copied_ranges(r, t, copy_range_jobs, &(struct place){r, t});
    }
    if (t->source == RP_TABLE_SCALES) {
        return true; /* written with the codes */
    }
    uint64_t rows = tab->packed ? tab->n_rows : t->n_rows;
    for (uint64_t row = 0; row < rows; row += tab->chunk_rows) {
        uint64_t n = rows - row < tab->chunk_rows ? rows - row : tab->chunk_rows;
        struct rp_job *j =
            add_job(r, RP_J_TABLE, t->file, 0, n * (tab->code_bytes + tab->scale_bytes));
        if (j == NULL) {
            return false;
        }
        j->tensor = index;
        j->tensor2 = index + 1;
        j->row = row;
        j->n_rows = n;
        if (!tab->packed && tab->scale_bytes > 0) {
            r->f[r->t[index + 1].file].last_job = r->n_j - 1;
        }
    }
    return true;
}

static bool expert_jobs(struct qx_repack *r, uint32_t index)
{
    for (size_t i = 0; i < r->n_c; i++) {
        const struct rp_container *c = &r->c[i];
        uint32_t n = !c->convert ? 0 : c->per_expert > 0 ? c->n * c->per_expert : 2;
        if (index < c->tensor0 || index >= c->tensor0 + n) {
            continue;
        }
        bool fused = c->per_expert == 0;
        uint32_t at = index - c->tensor0, first = fused ? 0 : at / c->per_expert, last = first + 1;
        if (fused ? at != 0 : at % c->per_expert != 0) {
            return true;
        }
        last = fused ? c->n : last;
        for (uint32_t e = first; e < last; e++) {
            uint64_t bytes = 0;
            if (fused) {
                bytes = 6 * c->inter * c->hidden;
            }
            for (uint32_t k = 0; !fused && k < c->per_expert; k++) {
                bytes += r->t[index + k].size;
            }
            struct rp_job *j = add_job(r, RP_J_EXPERT, r->t[index].file, 0, bytes);
            if (j == NULL) {
                return false;
            }
            j->container = (uint32_t)i;
            j->expert = e;
        }
        if (fused) {
            r->f[r->t[index + 1].file].last_job = r->n_j - 1;
        }
        return true;
    }
    return true;
}

/* Memory of one worker at most. */
static uint64_t worker_bytes(const struct qx_repack *r)
{
    uint64_t most = 2u << 20, bytes;
    const struct rp_table *t = &r->table;
    if (t->changed) {
        uint64_t src_row = qx_rows_raw_bytes(t->rows) + qx_rows_scale_bytes(t->rows);
        bytes =
            t->chunk_rows * (4 * (uint64_t)t->width + src_row + t->code_bytes + t->scale_bytes) +
            (3u << 20) + (t->packed ? 2 * t->chunk_rows * (t->code_bytes + t->scale_bytes) : 0);
        most = bytes > most ? bytes : most;
    }
    for (size_t i = 0; i < r->n_c; i++) {
        if (r->c[i].convert) {
            bytes = r->c[i].inter * r->c[i].hidden * (3 * 4 + 3 * 2) + (2u << 20);
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}

int rp_plan_jobs(struct qx_repack *r, struct qx_error *err)
{
    bool ok = true;
    for (size_t i = 0; ok && i < r->n_f; i++) {
        struct rp_file *f = &r->f[i];
        if (f->from >= 0) {
            ok = copy_jobs(r, (uint32_t)i, 0, (uint32_t)f->from, 0, f->size);
            continue;
        }
        struct rp_job *h = add_job(r, RP_J_BYTES, (uint32_t)i, 0, f->header_bytes);
        ok = h != NULL;
        if (ok) {
            h->bytes = f->header;
        }
        for (uint32_t k = 0; ok && k < f->n; k++) {
            uint32_t index = r->order[f->first + k];
            const struct rp_tensor *t = &r->t[index];
            struct rp_job *j;
            switch (t->source) {
            case RP_COPY:
                ok = copy_jobs(r, t->file, t->off, t->from->file, t->from->off, t->size);
                break;
            case RP_TABLE_GLOBAL:
                if (t->from != NULL) {
                    ok = copy_jobs(r, t->file, t->off, t->from->file, t->from->off, t->size);
                } else {
                    j = add_job(r, RP_J_GLOBAL, t->file, t->off, t->size);
                    ok = j != NULL;
                }
                break;
            case RP_EXPERT:
                ok = expert_jobs(r, index);
                break;
            default:
                ok = table_jobs(r, index);
                break;
            }
        }
    }
    if (!ok) {
        return qx_fail_nomem(err);
    }
    uint64_t names = 0, threads = r->o.n_threads;
    for (size_t i = 0; i < r->n_t; i++) {
        names += strlen(r->t[i].name);
    }
    /* The process itself, the input's names (twice: headers and resolved modules), the output's,
     * its headers and index, and the workers. */
    r->info.peak_bytes = (24u << 20) + qx_ckpt_n_tensors(r->ck) * 700 +
                         r->n_t * 408 + 8 * names + r->n_j * sizeof *r->j +
                         (threads > 0 ? threads : 1) * worker_bytes(r);
    return 0;
}
