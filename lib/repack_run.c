/* repack_run.c: carrying out a plan.
 *
 * Jobs are done in waves, in order. What waves have written is synced while the next ones are at work
 * (repack_sync.c), and then a note in the journal says up to which job everything is on disk, with
 * the statistics so far; a later run of the same plan starts behind that note. Never more than
 * REDO_BYTES of work is without a note. Since every job writes the same bytes whenever it runs, the
 * result is the same as that of an uninterrupted run. */
#include "repack_impl.h"

#include "codes.h"
#include "file_map.h"
#include "file_out.h"
#include "num.h"
#include "out_dir.h"
#include "pool.h"
#include "repack_job.h"
#include "repack_sync.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define WAVE_PER_THREAD 8
/* Work between two notes, in bytes read or written, whichever are more (an eighth of what is copied); half
 * of what a kill may cost, because the last note may still be on its way. A wave is a quarter of it. */
#define REDO_BYTES (256ull << 20)
#define WAVE_BYTES (REDO_BYTES / 8)

struct run {
    struct qx_repack *r;
    struct qx_out_dir *dir;
    struct qx_pool *pool;
    int *fd; /* [n_f], -1 closed */
    bool *cloned;
    struct rp_scratch *scratch;   /* [threads] */
    struct qx_quant_stats *stats; /* [wave] */
    uint64_t wave, first;         /* jobs a wave; the wave's first job */
    bool compare;
    uint64_t done_jobs, done_bytes, total_bytes;
    uint64_t unnoted; /* work since the last note that was handed over */
    struct rp_sync *sync;
    pthread_mutex_t lock, copying;
    uint64_t failed_job; /* the first that failed, UINT64_MAX none */
    struct qx_error err;
};

static void do_one(void *user, uint64_t i, uint32_t worker)
{
    struct run *x = user;
    const struct rp_job *j = &x->r->j[x->first + i];
    struct rp_sink sink = {.fd = x->fd, .compare = x->compare, .copying = &x->copying};
    struct qx_error err = {0};
    memset(&x->stats[i], 0, sizeof x->stats[i]);
    if (!x->compare && x->cloned[j->file]) {
        return;
    }
    int rc = rp_do_job(x->r, j, &sink, &x->scratch[worker], &x->stats[i], &err);
    if (rc == 0 && !x->compare && j->kind == RP_J_COPY) {
        rp_sync_begin(x->sync, x->fd[j->file], j->off, j->n);
    }
    if (rc != 0) {
        pthread_mutex_lock(&x->lock);
        if (x->first + i < x->failed_job) {
            x->failed_job = x->first + i;
            x->err = err;
        }
        pthread_mutex_unlock(&x->lock);
    }
}

static int open_file(struct run *x, uint32_t file, struct qx_error *err)
{
    struct rp_file *f = &x->r->f[file];
    if (x->fd[file] >= 0) {
        return 0;
    }
    char *path = qx_out_dir_join(x->dir, f->name);
    if (path == NULL) {
        return qx_fail_nomem(err);
    }
    int rc = 0;
    struct stat st;
    x->fd[file] =
        open(path, (x->compare ? O_RDONLY : O_RDWR | O_CREAT) | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (x->fd[file] < 0 || fstat(x->fd[file], &st) != 0) {
        rc = qx_fail_errno(err, QX_E_WRITE, errno, "write", "cannot open");
    } else if (!x->compare && f->from >= 0 &&
               qx_clone_file(qx_ckpt_fd(x->r->ck, (uint32_t)f->from), x->fd[file])) {
        x->cloned[file] = true;
    } else if (!x->compare && (uint64_t)st.st_size != f->size &&
               ftruncate(x->fd[file], (off_t)f->size) != 0) {
        rc = qx_fail_errno(err, QX_E_WRITE, errno, "write", "cannot set the size of");
    }
    qx_error_at(rc != 0 ? err : NULL, f->name, NULL, QX_NO_OFF);
    qx_free(path);
    return rc;
}

/* The files that a job writes. */
static int open_files(struct run *x, const struct rp_job *j, struct qx_error *err)
{
    const struct qx_repack *r = x->r;
    int rc = open_file(x, j->file, err);
    if (rc == 0 && j->kind == RP_J_TABLE && !r->table.packed && r->table.scale_bytes > 0) {
        rc = open_file(x, r->t[j->tensor2].file, err);
    }
    if (rc == 0 && j->kind == RP_J_EXPERT && r->c[j->container].per_expert == 0) {
        rc = open_file(x, r->t[r->c[j->container].tensor0 + 1].file, err);
    }
    return rc;
}

static void hex(const void *p, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++) {
        snprintf(out + 2 * i, 3, "%02x", ((const uint8_t *)p)[i]);
    }
}

static bool unhex(const char *s, void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned v;
        if (sscanf(s + 2 * i, "%2x", &v) != 1) {
            return false;
        }
        ((uint8_t *)p)[i] = (uint8_t)v;
    }
    return true;
}

#define STATS_HEX (2 * sizeof(struct qx_quant_stats))

/* What is written so far is synced and noted, while the work goes on. Waits if the note before is
 * still on its way. */
static int note_progress(struct run *x, struct qx_error *err)
{
    char a[STATS_HEX + 1], b[STATS_HEX + 1], line[2 * STATS_HEX + 64];
    hex(&x->r->table_stats, sizeof x->r->table_stats, a);
    hex(&x->r->expert_stats, sizeof x->r->expert_stats, b);
    snprintf(line, sizeof line, "done %" PRIu64 " %" PRIu64 " %s %s", x->done_jobs, x->done_bytes,
             a, b);
    x->unnoted = 0;
    return rp_sync_note(x->sync, x->fd, x->r->n_f, line, err);
}

/* A file of which nothing more is written. */
static int end_file(struct run *x, size_t i, struct qx_error *err)
{
    int fd = x->fd[i];
    x->fd[i] = -1;
    if (x->compare) {
        close(fd);
        return 0;
    }
    return rp_sync_close(x->sync, fd, x->r->f[i].name, err);
}

/* The work of a job: bytes read or written. Copies take an eighth of the time or less. */
static uint64_t job_bytes(const struct qx_repack *r, const struct rp_job *j)
{
    const struct rp_table *t = &r->table;
    uint64_t in = j->kind == RP_J_TABLE
                      ? j->n_rows * (qx_rows_raw_bytes(t->rows) + qx_rows_scale_bytes(t->rows))
                      : 0;
    return j->kind == RP_J_COPY ? j->n / 8 : in > j->n ? in : j->n;
}

/* Takes up the notes of an earlier run. True when the scan is known. */
static bool take_notes(struct run *x)
{
    struct qx_repack *r = x->r;
    bool scanned = false;
    for (size_t i = 0; i < qx_out_dir_n_notes(x->dir); i++) {
        const char *s = qx_out_dir_note_at(x->dir, i);
        uint64_t jobs, bytes;
        uint32_t g, p;
        int at = 0;
        struct qx_quant_stats a, b;
        if (sscanf(s, "scan %" SCNx32 " %" SCNx32, &g, &p) == 2) {
            r->table.global = qx_f32_from_bits(g);
            r->table.plain_global = qx_f32_from_bits(p);
            scanned = true;
        } else if (sscanf(s, "done %" SCNu64 " %" SCNu64 " %n", &jobs, &bytes, &at) == 2 &&
                   jobs <= r->n_j && strlen(s + at) == 2 * STATS_HEX + 1 &&
                   unhex(s + at, &a, sizeof a) && unhex(s + at + STATS_HEX + 1, &b, sizeof b)) {
            x->done_jobs = jobs;
            x->done_bytes = bytes;
            r->table_stats = a;
            r->expert_stats = b;
        }
    }
    /* Files of finished jobs must be there as they were left. */
    for (uint64_t i = 0; i < x->done_jobs; i++) {
        const struct rp_file *f = &r->f[r->j[i].file];
        struct stat st;
        char *path =
            i == 0 || r->j[i].file != r->j[i - 1].file ? qx_out_dir_join(x->dir, f->name) : NULL;
        bool ok = path == NULL || (stat(path, &st) == 0 && (uint64_t)st.st_size == f->size);
        qx_free(path);
        if (!ok) {
            x->done_jobs = x->done_bytes = 0;
            memset(&r->table_stats, 0, sizeof r->table_stats);
            memset(&r->expert_stats, 0, sizeof r->expert_stats);
            break;
        }
    }
    r->info.resumed_bytes = x->done_bytes;
    return scanned;
}

static int progress(struct run *x, struct qx_error *err)
{
    const struct qx_repack_opts *o = &x->r->o;
    if (o->progress != NULL && o->progress(o->user, x->done_bytes, x->total_bytes) != 0) {
        return qx_fail(err, QX_E_INTERRUPTED, "interrupted",
                       "stopped; the same command goes on where it was");
    }
    return 0;
}

static int scan_tick(void *user)
{
    struct run *x = user;
    return x->r->o.progress != NULL ? x->r->o.progress(x->r->o.user, x->done_bytes, x->total_bytes)
                                    : 0;
}

/* Copies go one at a time: a wave of nothing else needs no other threads. */
static void run_wave(struct run *x, uint64_t n)
{
    bool copies = !x->compare;
    for (uint64_t i = 0; copies && i < n; i++) {
        copies = x->r->j[x->first + i].kind == RP_J_COPY;
    }
    if (!copies) {
        qx_pool_run(x->pool, n, 1, do_one, x);
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        do_one(x, i, 0);
    }
}

static int do_jobs(struct run *x, struct qx_error *err)
{
    struct qx_repack *r = x->r;
    int rc = progress(x, err);
    while (rc == 0 && x->done_jobs < r->n_j) {
        uint64_t n = 0, work = 0;
        x->first = x->done_jobs;
        while (rc == 0 && n < x->wave && x->first + n < r->n_j && work < WAVE_BYTES) {
            rc = open_files(x, &r->j[x->first + n], err);
            work += job_bytes(r, &r->j[x->first + n++]);
        }
        if (rc != 0) {
            break;
        }
        run_wave(x, n);
        if (x->failed_job != UINT64_MAX) {
            if (err != NULL) {
                *err = x->err;
            }
            rc = -(int)x->err.code;
            break;
        }
        for (uint64_t i = 0; i < n; i++) {
            const struct rp_job *j = &r->j[x->first + i];
            if (!x->compare) {
                qx_quant_stats_add(j->kind == RP_J_EXPERT ? &r->expert_stats : &r->table_stats,
                                   &x->stats[i]);
            }
            x->done_bytes += j->n;
        }
        x->unnoted += work;
        x->done_jobs += n;
        for (size_t i = r->j[x->first].file; rc == 0 && i < r->n_f; i++) {
            if (x->fd[i] >= 0 && r->f[i].last_job < x->done_jobs) {
                rc = end_file(x, i, err);
            }
        }
        if (rc == 0 && !x->compare &&
            (x->unnoted + WAVE_BYTES >= REDO_BYTES / 2 ||
             (x->unnoted >= REDO_BYTES / 4 && rp_sync_idle(x->sync)))) {
            rc = note_progress(x, err);
        }
        rc = rc == 0 ? progress(x, err) : rc;
    }
    if (rc == -QX_E_INTERRUPTED && !x->compare) {
        (void)note_progress(x, NULL);
    }
    if (!x->compare) {
        int wait = rp_sync_wait(x->sync, rc == 0 ? err : NULL);
        rc = rc == 0 ? wait : rc;
    }
    return rc;
}

/* Scale and hash go into the packed table's header. */
static int finish_packed(struct run *x, struct qx_error *err)
{
    struct qx_repack *r = x->r;
    struct rp_table *t = &r->table;
    for (size_t i = 0; i < r->n_f; i++) {
        struct rp_file *f = &r->f[i];
        if (!f->packed || !t->changed) {
            continue;
        }
        char before[320], after[320];
        const struct rp_tensor *p = &r->t[r->order[f->first]];
        struct qx_pack_info info = t->pack;
        info.has_global = t->to == QX_F_FP8 || t->to == QX_F_NVFP4;
        qx_pack_print(&info, before);
        if (info.has_global) {
            info.global_bits = qx_f32_bits(t->convert ? t->global : qx_rows_global(t->rows));
        }
        int rc = open_file(x, (uint32_t)i, err);
        XXH3_state_t *s = XXH3_createState();
        size_t cap = 1u << 20;
        char *buf = qx_malloc(cap);
        rc = rc == 0 && (s == NULL || buf == NULL) ? qx_fail_nomem(err) : rc;
        if (rc == 0) {
            XXH3_128bits_reset(s);
        }
        for (uint64_t k = 0; rc == 0 && k < p->size; k += cap) {
            size_t n = p->size - k < cap ? (size_t)(p->size - k) : cap;
            rc = qx_file_read(x->fd[i], buf, n, p->off + k, err);
            if (rc != 0) {
                qx_error_at(err, f->name, NULL, p->off + k);
                break;
            }
            XXH3_128bits_update(s, buf, n);
        }
        if (rc == 0) {
            XXH128_canonical_t c;
            XXH128_canonicalFromHash(&c, XXH3_128bits_digest(s));
            memcpy(info.xxh3, c.digest, 16);
            info.has_hash = true;
            qx_pack_print(&info, after);
            char *hit = memmem(f->header, f->header_bytes, before, strlen(before));
            if (hit != NULL && strlen(before) == strlen(after)) {
                memcpy(hit, after, strlen(after));
            }
            rc = qx_pwrite_all(x->fd[i], f->header, f->header_bytes, 0, f->name, err);
            rc = rc == 0 ? end_file(x, i, err) : rc;
        }
        qx_free(buf);
        XXH3_freeState(s);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int copy_plain(struct run *x, const char *name, uint64_t size, struct qx_error *err)
{
    char *to = qx_out_dir_join(x->dir, name);
    size_t n = strlen(qx_ckpt_dir(x->r->ck)) + strlen(name) + 2;
    char *from = qx_malloc(n);
    if (to == NULL || from == NULL) {
        qx_free(to);
        qx_free(from);
        return qx_fail_nomem(err);
    }
    snprintf(from, n, "%s/%s", qx_ckpt_dir(x->r->ck), name);
    int a = open(from, O_RDONLY | O_CLOEXEC),
        b = open(to, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    int rc = 0;
    if (a < 0 || b < 0) {
        rc = qx_fail_errno(err, a < 0 ? QX_E_IO : QX_E_WRITE, errno, a < 0 ? "read" : "write",
                           "cannot open");
    } else if (!qx_clone_file(a, b)) {
        rc = ftruncate(b, (off_t)size) != 0
                 ? qx_fail_errno(err, QX_E_WRITE, errno, "write", "cannot write")
                 : qx_copy_range(a, 0, b, 0, size, name, name, err);
    }
    if (rc == 0 && fsync(b) != 0) {
        rc = qx_fail_errno(err, QX_E_WRITE, errno, "write", "cannot sync");
    }
    qx_error_at(rc != 0 ? err : NULL, name, NULL, QX_NO_OFF);
    if (a >= 0) {
        close(a);
    }
    if (b >= 0) {
        close(b);
    }
    qx_free(to);
    qx_free(from);
    return rc;
}

static int write_small(struct run *x, struct qx_error *err)
{
    struct qx_repack *r = x->r;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < r->n_plain; i++) {
        rc = copy_plain(x, r->plain_files[i], r->plain_sizes[i], err);
    }
    for (size_t i = 0; rc == 0 && i < r->n_small; i++) {
        char *path = qx_out_dir_join(x->dir, r->small[i].name);
        rc = path == NULL ? qx_fail_nomem(err)
                          : qx_file_out_small(path, r->small[i].text.p, r->small[i].text.n, err);
        qx_free(path);
    }
    return rc;
}

static void report(struct qx_quant_report *q, const char *name, enum qx_format from,
                   enum qx_format to, const struct qx_quant_stats *s, double bits)
{
    *q = (struct qx_quant_report){.name = name,
                                  .from = qx_format_name(from),
                                  .to = qx_format_name(to),
                                  .n_values = s->n_values,
                                  .n_rows = s->n_rows,
                                  .rel_rms = qx_quant_rel_rms(s->err_sq, s->sum_sq),
                                  .plain_rel_rms = qx_quant_rel_rms(s->plain_err_sq, s->sum_sq),
                                  .max_err = s->max_err,
                                  .plain_max_err = s->plain_max_err,
                                  .row_limit = QX_QUANT_ROW_LIMIT,
                                  .rows_above = s->rows_above,
                                  .plain_rows_above = s->plain_rows_above,
                                  .bits_per_weight = bits};
}

static void make_reports(struct qx_repack *r)
{
    struct rp_table *t = &r->table;
    r->info.reports = r->reports;
    if (t->changed && t->convert) {
        report(&r->reports[r->info.n_reports++], "ple_table", t->from, t->to, &r->table_stats,
               8.0 * (t->code_bytes + t->scale_bytes) / t->width);
    }
    enum qx_format from = QX_F_NONE, to = QX_F_NONE;
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->n_c; i++) {
        const struct rp_container *c = &r->c[i];
        if (c->convert) {
            from = from == QX_F_NONE || from == c->from ? c->from : QX_F_MIXED;
            to = c->to == QX_F_NVFP4 ? QX_F_W4A16_NVFP4 : c->to;
            uint32_t n = c->per_expert > 0 ? c->n * c->per_expert : 2;
            for (uint32_t k = 0; k < n; k++) {
                bytes += r->t[c->tensor0 + k].size;
            }
        }
    }
    if (to != QX_F_NONE) {
        double n = (double)(r->expert_stats.n_values > 0 ? r->expert_stats.n_values : 1);
        report(&r->reports[r->info.n_reports++], "experts", from, to, &r->expert_stats,
               8.0 * (double)bytes / n);
    }
}

static int space(struct run *x, struct qx_error *err)
{
    struct qx_repack *r = x->r;
    uint64_t have = qx_out_dir_free(r->target), need = r->info.bytes_out, there = 0;
    for (size_t i = 0; i < r->n_f; i++) {
        struct stat st;
        char *path = qx_out_dir_join(x->dir, r->f[i].name);
        if (path == NULL) {
            return qx_fail_nomem(err);
        }
        if (stat(path, &st) == 0) {
            there += (uint64_t)st.st_blocks * 512;
        }
        qx_free(path);
    }
    for (size_t i = 0; i < r->n_plain; i++) {
        need += r->plain_sizes[i];
    }
    for (size_t i = 0; i < r->n_small; i++) {
        need += r->small[i].text.n;
    }
    need -= there < need ? there : need;
    r->info.free_bytes = have;
    /* Holes of the input stay holes: what is copied takes no more room than it has there. */
    uint64_t sparse = 0;
    for (size_t i = 0; i < qx_ckpt_n_files(r->ck); i++) {
        struct stat st;
        int fd = qx_ckpt_fd(r->ck, (uint32_t)i);
        if (fd >= 0 && fstat(fd, &st) == 0 && (uint64_t)st.st_size > (uint64_t)st.st_blocks * 512) {
            sparse += (uint64_t)st.st_size - (uint64_t)st.st_blocks * 512;
        }
    }
    bool copies_holes = !(r->table.changed && r->table.convert);
    need -= copies_holes ? (sparse < need ? sparse : need) : 0;
    if (need > have) {
        char n[32], h[32];
        return qx_fail(err, QX_E_NOSPACE, "no-space", "the output needs %s more, %s are free", qx_size_text(need, n),
                       qx_size_text(have, h));
    }
    return 0;
}

static int run_all(struct run *x, struct qx_error *err)
{
    struct qx_repack *r = x->r;
    bool scanned = take_notes(x);
    int rc = space(x, err);
    if (rc == 0 && r->table.changed && r->table.convert && r->table.to != QX_F_BF16 && !scanned) {
        rc = rp_scan_table(r, x->pool, scan_tick, x, err);
        if (rc == 0) {
            char line[64];
            snprintf(line, sizeof line, "scan %08" PRIx32 " %08" PRIx32,
                     qx_f32_bits(r->table.global), qx_f32_bits(r->table.plain_global));
            rc = qx_out_dir_note(x->dir, line, err);
        }
    }
    rc = rc == 0 ? do_jobs(x, err) : rc;
    rc = rc == 0 ? finish_packed(x, err) : rc;
    rc = rc == 0 ? write_small(x, err) : rc;
    rc = rc == 0 ? rp_sync_wait(x->sync, err) : rc;
    if (rc == 0 && r->o.verify) {
        x->compare = true;
        x->done_jobs = x->done_bytes = 0;
        rc = do_jobs(x, err);
    }
    return rc;
}

/* Does the plan write this name? */
static bool ours(const void *user, const char *name, bool is_dir)
{
    const struct qx_repack *r = user;
    bool found = false;
    for (size_t i = 0; !found && i < r->n_f; i++) {
        found = strcmp(r->f[i].name, name) == 0;
    }
    for (size_t i = 0; !found && i < r->n_plain; i++) {
        found = strcmp(r->plain_files[i], name) == 0;
    }
    for (size_t i = 0; !found && i < r->n_small; i++) {
        found = strcmp(r->small[i].name, name) == 0;
    }
    return found && !is_dir;
}

int qx_repack_run(struct qx_repack *r, struct qx_error *err)
{
    struct run x = {.r = r,
                    .failed_job = UINT64_MAX,
                    .lock = PTHREAD_MUTEX_INITIALIZER,
                    .copying = PTHREAD_MUTEX_INITIALIZER};
    const struct qx_out_names names = {ours, r};
    int rc = qx_out_dir_begin(&x.dir, r->target, r->plan_id, &names, r->o.force, r->o.resume, err);
    if (rc != 0) {
        return rc;
    }
    rc = qx_pool_create(&x.pool, r->o.n_threads, err);
    rc = rc == 0 ? rp_sync_create(&x.sync, x.dir, err) : rc;
    uint32_t threads = x.pool != NULL ? qx_pool_threads(x.pool) : 1;
    x.wave = (uint64_t)threads * WAVE_PER_THREAD;
    x.fd = qx_calloc(r->n_f + 1, sizeof *x.fd);
    x.cloned = qx_calloc(r->n_f + 1, sizeof *x.cloned);
    x.scratch = qx_calloc(threads, sizeof *x.scratch);
    x.stats = qx_calloc(x.wave, sizeof *x.stats);
    if (rc == 0 && (x.fd == NULL || x.cloned == NULL || x.scratch == NULL || x.stats == NULL)) {
        rc = qx_fail_nomem(err);
    }
    for (size_t i = 0; x.fd != NULL && i < r->n_f; i++) {
        x.fd[i] = -1;
    }
    for (size_t i = 0; i < r->n_j; i++) {
        x.total_bytes += r->j[i].n;
    }
    rc = rc == 0 ? run_all(&x, err) : rc;
    rp_sync_destroy(x.sync);
    for (size_t i = 0; x.fd != NULL && i < r->n_f; i++) {
        if (x.fd[i] >= 0) {
            close(x.fd[i]);
        }
    }
    for (uint32_t i = 0; x.scratch != NULL && i < threads; i++) {
        rp_scratch_fini(&x.scratch[i]);
    }
    qx_free(x.fd);
    qx_free(x.cloned);
    qx_free(x.scratch);
    qx_free(x.stats);
    qx_pool_destroy(x.pool);
    if (rc == 0) {
        rc = qx_out_dir_commit(x.dir, err);
        if (rc == 0) {
            make_reports(r);
        }
    } else if ((x.done_jobs > 0 && rc != -QX_E_VALUE) || rc == -QX_E_INTERRUPTED) {
        qx_out_dir_keep(x.dir);
    } else {
        qx_out_dir_discard(x.dir);
    }
    return rc;
}
