/* verify_decode.c: rows decoded twice. A sample of rows of the n-gram table and of every matrix goes
 * through the ordinary decoder (rows.h, or a device) and through a second one (indep_decode.h, or an
 * external program); any difference is a finding. Matrices are worked on in parallel; what was found is
 * kept per matrix and reported in their order, so that the outcome does not depend on threads. */
#include "verify_impl.h"

#include "alloc.h"
#include "backend.h"
#include "decoder_proc.h"
#include "error.h"
#include "indep_decode.h"
#include "pool.h"
#include "rows.h"
#include "str.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GIVEN_UP 3u /* external decoder: failures before no more tensors are tried */
#define ROWS_AT_ONCE 64u
#define BF16_ROWS 8u
#define RUN 8u /* drawn rows of a matrix lie together in so many: one read each, not eight */

/* One matrix: a module or the table. */
struct job {
    const struct qx_module *module; /* NULL: the table */
    uint64_t n_rows;
    /* outcome */
    bool tried, differs, failed;
    uint64_t compared, n_different, row, col;
    uint32_t first_bits, second_bits; /* f32 or, from an external decoder, bfloat16 */
    bool bits16;
    char why[256];
};

struct decode {
    struct verify *v;
    struct job *jobs;
    size_t n_jobs;
    struct qx_backend *be;   /* NULL: the host's decoder */
    pthread_mutex_t lock;
    uint32_t given_up;
    uint64_t done;
    int rc;
    struct qx_error err;
};

/* ---- which rows --------------------------------------------------------------------------- */

struct row_list { uint64_t *v; size_t n, cap; bool nomem; };

static void row_add(struct row_list *l, uint64_t row, uint64_t n_rows)
{
    if (row >= n_rows || l->nomem) {
        return;
    }
    if (!qx_grow((void **)&l->v, &l->cap, l->n + 1, sizeof *l->v)) {
        l->nomem = true;
        return;
    }
    l->v[l->n++] = row;
}

static int by_value(const void *pa, const void *pb)
{
    uint64_t a = *(const uint64_t *)pa, b = *(const uint64_t *)pb;
    return a < b ? -1 : a > b;
}

static void row_sort(struct row_list *l)
{
    size_t k = 0;
    if (l->n > 1) {
        qsort(l->v, l->n, sizeof *l->v, by_value);
    }
    for (size_t i = 0; i < l->n; ++i) {
        if (k == 0 || l->v[i] != l->v[k - 1]) {
            l->v[k++] = l->v[i];
        }
    }
    l->n = k;
}

/* Both sides of every multiple of 2^31 and 2^32 that an address in `unit`s a row passes: where 32-bit
 * arithmetic would go wrong. Only the first of each: later ones fail alike. */
static void add_wide(struct row_list *l, uint64_t n_rows, uint64_t per_row)
{
    for (unsigned bit = 31; bit <= 32; ++bit) {
        uint64_t row = per_row ? (UINT64_C(1) << bit) / per_row : 0;
        if (row && row < n_rows) {
            row_add(l, row - 1, n_rows);
            row_add(l, row, n_rows);
            row_add(l, row + 1, n_rows);
        }
    }
}

static uint64_t mix(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Sorted rows of a matrix: the ends, both sides of every boundary of `part` rows, wide addresses, and
 * drawn ones, `run` neighbours at a time, up to `want` in all. */
static void choose(struct row_list *l, uint64_t n_rows, uint64_t part, uint64_t n_parts, uint64_t width,
                   uint64_t row_bytes, uint64_t want, uint64_t run, uint64_t seed)
{
    uint64_t state = seed;
    l->n = 0;
    row_add(l, 0, n_rows);
    row_add(l, n_rows - 1, n_rows);
    for (uint64_t i = 1; part && i < n_parts; ++i) {
        row_add(l, i * part - 1, n_rows);
        row_add(l, i * part, n_rows);
    }
    add_wide(l, n_rows, width);
    add_wide(l, n_rows, row_bytes);
    row_sort(l);
    if (want >= n_rows) {
        l->n = 0;
        for (uint64_t i = 0; i < n_rows; ++i) {
            row_add(l, i, n_rows);
        }
        return;
    }
    for (unsigned round = 0; l->n < want && round < 64 && !l->nomem; ++round) {
        for (uint64_t i = l->n; i < want;) {
            uint64_t row = mix(&state) % n_rows;
            for (uint64_t k = 0; k < run && i < want; ++k, ++i) {
                row_add(l, row + k, n_rows);
            }
        }
        row_sort(l);
    }
}

/* Rows whose shard is stored whole. */
static void keep_readable(struct row_list *l, const struct qx_table *t)
{
    size_t k = 0;
    for (size_t i = 0; i < l->n; ++i) {
        uint64_t s = l->v[i] / t->rows_per_shard;
        const struct qx_table_shard *sh = s < t->n_shards ? &t->shards[s] : NULL;
        if (sh && sh->weight && sh->weight->readable && (!sh->scale || sh->scale->readable) &&
            (t->format != QX_F_NVFP4 || sh->scale)) {
            l->v[k++] = l->v[i];
        }
    }
    l->n = k;
}

/* ---- one matrix --------------------------------------------------------------------------- */

static uint64_t name_hash(const char *s)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *s; ++s) {
        h = (h ^ (unsigned char)*s) * UINT64_C(0x100000001b3);
    }
    return h;
}

static bool same_f32(uint32_t a, uint32_t b)
{
    bool nan_a = (a & 0x7fffffffu) > 0x7f800000u, nan_b = (b & 0x7fffffffu) > 0x7f800000u;
    return a == b || (nan_a && nan_b) || ((a | b) << 1) == 0; /* zeros of either sign are one number */
}

static bool same_bf16(uint16_t a, uint16_t b)
{
    return same_f32((uint32_t)a << 16, (uint32_t)b << 16);
}

static void note_difference(struct job *j, uint64_t row, uint64_t col, uint32_t first, uint32_t second,
                            bool bits16)
{
    if (!j->differs || row < j->row || (row == j->row && col < j->col)) {
        j->row = row;
        j->col = col;
        j->first_bits = first;
        j->second_bits = second;
        j->bits16 = bits16;
    }
    j->differs = true;
    ++j->n_different;
}

static int first_decoder(struct decode *d, const struct qx_rows *r, const uint64_t *rows, size_t n,
                         enum qx_row_dtype dtype, void *dst, struct qx_error *err)
{
    int rc;
    if (!d->be) {
        return qx_rows_read(r, rows, n, dtype, dst, err);
    }
    pthread_mutex_lock(&d->lock); /* one device, one queue at a time */
    rc = qx_rows_read_device(r, d->be, rows, n, dtype, dst, err);
    pthread_mutex_unlock(&d->lock);
    return rc;
}

struct space {
    struct qx_indep_work work;
    struct row_list rows;
    uint32_t *f1, *f2;
    uint16_t *h1, *h2;
    size_t cap_f1, cap_f2, cap_h1, cap_h2;
};

static bool make_room(struct space *s, uint64_t n, uint64_t width)
{
    uint64_t all;
    return qx_mul_u64(n, width, &all) && all < SIZE_MAX / 8 && width < SIZE_MAX / 8 &&
           qx_grow((void **)&s->f1, &s->cap_f1, (size_t)all, 4) &&
           qx_grow((void **)&s->h1, &s->cap_h1, (size_t)all, 2) &&
           qx_grow((void **)&s->f2, &s->cap_f2, (size_t)width, 4) &&
           qx_grow((void **)&s->h2, &s->cap_h2, (size_t)all, 2);
}

static int against_library(struct decode *d, struct job *j, const struct qx_rows *r, struct space *s,
                           struct qx_error *err)
{
    struct qx_indep in;
    uint64_t width = qx_rows_width(r);
    int rc = j->module ? qx_indep_module(&in, d->v->ck, j->module, err)
                       : qx_indep_table(&in, d->v->ck, qx_resolved_table(d->v->res), err);
    if (rc == 0 && (in.cols != width || in.rows != qx_rows_count(r))) {
        rc = qx_fail(err, QX_E_FORMAT, "decode-failed",
                     "the decoders see %" PRIu64 " x %" PRIu64 " and %" PRIu64 " x %" PRIu64,
                     qx_rows_count(r), width, in.rows, in.cols);
    }
    for (size_t at = 0; rc == 0 && at < s->rows.n; at += ROWS_AT_ONCE) {
        size_t n = s->rows.n - at < ROWS_AT_ONCE ? s->rows.n - at : ROWS_AT_ONCE;
        const uint64_t *rows = s->rows.v + at;
        size_t n16;
        if (!make_room(s, n, width)) {
            return qx_fail_nomem(err);
        }
        rc = first_decoder(d, r, rows, n, QX_ROW_F32, s->f1, err);
        /* bfloat16 is f32 rounded once more: a few rows of each batch show whether that is done right. */
        n16 = n < BF16_ROWS ? n : BF16_ROWS;
        rc = rc ? rc : first_decoder(d, r, rows, n16, QX_ROW_BF16, s->h1, err);
        for (size_t i = 0; rc == 0 && i < n; ++i) {
            size_t last = i;
            while (last + 1 < n && rows[last + 1] == rows[last] + 1) {
                ++last;
            }
            s->work.ahead = last - i;
            rc = qx_indep_row(&in, rows[i], s->f2, i < n16 ? s->h2 : NULL, &s->work, err);
            bool equal = rc == 0 && memcmp(s->f1 + i * width, s->f2, width * sizeof *s->f2) == 0 &&
                         (i >= n16 || memcmp(s->h1 + i * width, s->h2, width * sizeof *s->h2) == 0);
            for (uint64_t c = 0; rc == 0 && !equal && c < width; ++c) {
                uint32_t a = s->f1[i * width + c], b = s->f2[c];
                if (!same_f32(a, b)) {
                    note_difference(j, rows[i], c, a, b, false);
                } else if (i < n16 && !same_bf16(s->h1[i * width + c], s->h2[c])) {
                    note_difference(j, rows[i], c, s->h1[i * width + c], s->h2[c], true);
                }
            }
            j->compared += rc == 0;
        }
    }
    return rc;
}

static int against_program(struct decode *d, struct job *j, const struct qx_rows *r, struct space *s,
                           struct qx_error *err)
{
    uint64_t width = qx_rows_width(r);
    const char *name = j->module ? j->module->weight->name : qx_resolved_table(d->v->res)->module;
    int rc;
    if (!make_room(s, s->rows.n, width)) {
        return qx_fail_nomem(err);
    }
    rc = first_decoder(d, r, s->rows.v, s->rows.n, QX_ROW_BF16, s->h1, err);
    if (rc) {
        return rc;
    }
    rc = qx_decoder_proc(d->v->o->decoder, qx_ckpt_path(d->v->ck), name, s->rows.v, s->rows.n, width,
                         d->v->o->decoder_timeout_ms ? d->v->o->decoder_timeout_ms : 60000, s->h2, j->why,
                         err);
    if (rc > 0) {
        j->failed = true;
        pthread_mutex_lock(&d->lock);
        ++d->given_up;
        pthread_mutex_unlock(&d->lock);
        return 0;
    }
    for (size_t i = 0; rc == 0 && i < s->rows.n; ++i) {
        for (uint64_t c = 0; c < width; ++c) {
            uint16_t a = s->h1[i * width + c], b = s->h2[i * width + c];
            if (!same_bf16(a, b)) {
                note_difference(j, s->rows.v[i], c, a, b, true);
            }
        }
        ++j->compared;
    }
    return rc;
}

/* Errors of the checkpoint stay with the job; others end the whole. */
static void decode_one(struct decode *d, struct job *j, struct space *s)
{
    const struct qx_verify_opts *o = d->v->o;
    const struct qx_table *t = qx_resolved_table(d->v->res);
    struct qx_rows *r = NULL;
    struct qx_error e = {0};
    bool last = false;
    int rc;
    pthread_mutex_lock(&d->lock);
    last = d->rc != 0 || d->given_up >= MAX_GIVEN_UP;
    pthread_mutex_unlock(&d->lock);
    if (last) {
        return;
    }
    rc = j->module ? qx_rows_open_tensor(&r, d->v->ck, j->module->weight->name, &e)
                   : qx_rows_open_table(&r, d->v->ck, &e);
    if (rc == 0 && qx_rows_count(r) > 0 && qx_rows_width(r) > 0) {
        j->tried = true;
        choose(&s->rows, qx_rows_count(r), j->module ? 0 : t->rows_per_shard, j->module ? 0 : t->n_shards,
               qx_rows_width(r), qx_rows_raw_bytes(r), o->sample_rows, j->module ? RUN : 1,
               o->seed ^ name_hash(j->module ? j->module->name : "table"));
        if (!j->module && !t->packed_rows) {
            keep_readable(&s->rows, t);
        }
        if (s->rows.nomem) {
            rc = qx_fail_nomem(&e);
        } else if (s->rows.n) {
            rc = o->decoder ? against_program(d, j, r, s, &e) : against_library(d, j, r, s, &e);
        }
    }
    qx_rows_close(r);
    if (rc != 0 && e.code < QX_E_NOMEM && e.code != QX_E_INTERRUPTED && e.code != QX_E_USAGE) {
        j->failed = true;
        snprintf(j->why, sizeof j->why, "%s: %.200s", e.kind ? e.kind : "", e.msg);
        rc = 0;
    }
    pthread_mutex_lock(&d->lock);
    if (rc != 0 && d->rc == 0) {
        d->rc = rc;
        d->err = e;
    }
    ++d->done;
    if (d->rc == 0 && o->progress && o->progress(o->user, "decoding", d->done, d->n_jobs)) {
        d->rc = qx_fail(&d->err, QX_E_INTERRUPTED, "interrupted", "stopped");
    }
    pthread_mutex_unlock(&d->lock);
}

struct loop { struct decode *d; struct space *space; };

static void loop_item(void *user, uint64_t i, uint32_t worker)
{
    struct loop *l = user;
    decode_one(l->d, &l->d->jobs[i], &l->space[worker]);
}

/* ---- all ---------------------------------------------------------------------------------- */

/* Everything stored that belongs to it is there and whole; what is not has been reported. */
static bool whole(const struct qx_module *m)
{
    const struct qx_tensor *t[3] = {m->weight, m->scale, m->scale_2};
    if (!m->weight || m->format == QX_F_NONE || m->format == QX_F_I64 || m->weight->n_dims < 2 ||
        m->weight->n_elems == 0) {
        return false;
    }
    for (int i = 0; i < 3; ++i) {
        if (t[i] && !t[i]->readable) {
            return false;
        }
    }
    return true;
}

static bool wanted(const struct qx_verify_opts *o, const char *name)
{
    return !o->decode_glob || qx_glob_match(o->decode_glob, name);
}

static bool plain(enum qx_format f)
{
    return f == QX_F_BF16 || f == QX_F_F16 || f == QX_F_F32;
}

/* An external program is started for what is quantised and for the table only: a plain matrix is not
 * decoded but read, and starting a program for each would take hours. */
static int gather(struct decode *d, struct qx_error *err)
{
    const struct qx_resolved *res = d->v->res;
    const struct qx_table *t = qx_resolved_table(res);
    size_t n = qx_resolved_n_modules(res);
    d->jobs = qx_calloc(n + 1, sizeof *d->jobs);
    if (!d->jobs) {
        return qx_fail_nomem(err);
    }
    if (t && t->present && t->format != QX_F_NONE && t->n_rows && t->rows_per_shard &&
        (!t->global || t->global->readable) && (t->global || plain(t->format)) &&
        (!t->packed_rows || (t->packed && t->packed->readable)) && wanted(d->v->o, t->module)) {
        ++d->n_jobs;
    }
    for (size_t i = 0; i < n; ++i) {
        const struct qx_module *m = qx_resolved_module(res, i);
        if (whole(m) && wanted(d->v->o, m->weight->name) && m->component != QX_C_PLE_TABLE && (!d->v->o->decoder || !plain(m->format))) {
            d->jobs[d->n_jobs++].module = m;
        }
    }
    if (d->v->o->decode_glob && d->n_jobs == 0) {
        return qx_fail(err, QX_E_NOT_FOUND, "tensor-missing", "'%.300s' matches nothing that can be decoded",
                       d->v->o->decode_glob);
    }
    return 0;
}

static int report_job(struct decode *d, const struct job *j, struct qx_error *err)
{
    const struct qx_table *t = qx_resolved_table(d->v->res);
    const char *name = j->module ? j->module->weight->name : t->module;
    const char *file = j->module ? verify_file(d->v, j->module->weight) : NULL;
    const char *who = d->v->o->decoder ? "the external decoder" : "the independent decoder";
    struct qx_buf text = {0};
    char group[96], a[32], b[32];
    bool ok = true;
    if (j->failed && !d->v->o->decoder && qx_findings_count_severity(d->v->fs, QX_ERROR) > 0) {
        return 0; /* what makes it undecodable has been said; this is the net below the rules */
    }
    if (j->failed) {
        const char *kind = d->v->o->decoder ? "decoder-failed" : "decode-failed";
        qx_buf_fmt(&text, "'%s': %s", name, j->why);
        ok = verify_add(d->v, QX_REPORT(kind, QX_ERROR, .file = file, .tensor = name,
                                        .text = qx_buf_cstr(&text), .group = kind));
    } else if (j->differs) {
        snprintf(a, sizeof a, j->bits16 ? "%04x" : "%08x", j->first_bits);
        snprintf(b, sizeof b, j->bits16 ? "%04x" : "%08x", j->second_bits);
        qx_buf_fmt(&text, "row %" PRIu64 " column %" PRIu64 " of '%s' is %s by the ordinary decoder and %s by "
                   "%s (%s); %" PRIu64 " values of %" PRIu64 " rows differ", j->row, j->col, name, a, b, who,
                   j->bits16 ? "bfloat16" : "f32", j->n_different, j->compared);
        snprintf(group, sizeof group, "differs|%d|%d", j->module ? (int)j->module->format : -1,
                 j->module ? (int)j->module->component : -1);
        ok = verify_add(d->v, QX_REPORT("decode-mismatch", QX_ERROR, .file = file, .tensor = name,
                                        .expected = b, .found = a, .text = qx_buf_cstr(&text),
                                        .group = group));
    }
    qx_buf_fini(&text);
    return ok ? 0 : qx_fail_nomem(err);
}

static int open_device(struct decode *d, struct qx_error *err)
{
    const char *dev = d->v->o->device;
    if (!dev || strcmp(dev, "cpu") == 0) {
        return 0;
    }
    if (strncmp(dev, "cuda", 4) == 0 && (dev[4] == '\0' || dev[4] == ':')) {
        return qx_backend_cuda_create(&d->be, dev[4] ? atoi(dev + 5) : 0, err);
    }
    return qx_fail(err, QX_E_USAGE, "usage", "device '%s' is none of cpu, cuda, cuda:N", dev);
}

/* Rows far apart, or no such plan any more: whether the kernel should read ahead. */
static void advise(const struct verify *v, int advice)
{
    for (size_t i = 0; i < qx_ckpt_n_files(v->ck); ++i) {
        int fd = qx_ckpt_fd(v->ck, (uint32_t)i);
        if (fd >= 0) {
            (void)posix_fadvise(fd, 0, 0, advice);
        }
    }
}

int qx_verify_decode(struct verify *v, struct qx_error *err)
{
    struct decode d = {.v = v};
    struct qx_pool *pool = NULL;
    struct loop l = {.d = &d};
    uint32_t n_spaces = 1;
    int rc = open_device(&d, err);
    if (rc) {
        return rc;
    }
    pthread_mutex_init(&d.lock, NULL);
    rc = gather(&d, err);
    if (rc == 0) {
        rc = qx_pool_create(&pool, v->o->n_threads, err);
    }
    if (rc == 0) {
        n_spaces = qx_pool_threads(pool);
        l.space = qx_calloc(n_spaces, sizeof *l.space);
        rc = l.space ? 0 : qx_fail_nomem(err);
    }
    if (rc == 0) {
        advise(v, POSIX_FADV_RANDOM);
        qx_pool_run(pool, d.n_jobs, 1, loop_item, &l);
        advise(v, POSIX_FADV_NORMAL);
        rc = d.rc;
        if (rc && err) {
            *err = d.err;
        }
    }
    for (size_t i = 0, failed = 0; rc == 0 && i < d.n_jobs; ++i) {
        /* Which of the last tensors were still tried depends on threads; what is reported must not. */
        if (v->o->decoder && d.jobs[i].failed && ++failed > MAX_GIVEN_UP) {
            continue;
        }
        v->stats.rows += d.jobs[i].compared;
        rc = report_job(&d, &d.jobs[i], err);
    }
    for (uint32_t i = 0; l.space && i < n_spaces; ++i) {
        qx_indep_work_fini(&l.space[i].work);
        qx_free(l.space[i].rows.v);
        qx_free(l.space[i].f1);
        qx_free(l.space[i].f2);
        qx_free(l.space[i].h1);
        qx_free(l.space[i].h2);
    }
    qx_free(l.space);
    qx_pool_destroy(pool);
    qx_free(d.jobs);
    pthread_mutex_destroy(&d.lock);
    if (d.be) {
        d.be->destroy(d.be);
    }
    return rc;
}
