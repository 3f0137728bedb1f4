/* archive_work.c: see archive_impl.h. */
#include "archive_impl.h"
#include "num.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SLOTS_PER_THREAD 2

void qx_ar_to_hex(XXH128_hash_t h, char out[33])
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, h);
    for (size_t i = 0; i < 16; i++) {
        snprintf(out + 2 * i, 3, "%02x", c.digest[i]);
    }
}

void qx_ar_work_fini(struct qx_ar_work *w)
{
    for (size_t i = 0; i < w->n; i++) {
        qx_free(w->e[i].name);
        qx_free(w->e[i].spans);
        qx_free(w->e[i].known);
        if (w->e[i].has_header) {
            qx_st_header_fini(&w->e[i].header);
        }
    }
    qx_free(w->e);
    for (size_t i = 0; w->slots != NULL && i < w->n_slots; i++) {
        qx_free(w->slots[i].raw);
        qx_free(w->slots[i].packed);
    }
    qx_free(w->slots);
    for (uint32_t i = 0; w->packer != NULL && i < qx_pool_threads(w->pool); i++) {
        qx_zseek_packer_destroy(w->packer[i]);
    }
    qx_free(w->packer);
    qx_pool_destroy(w->pool);
    qx_ckpt_close(w->ck);
}

int qx_ar_start_workers(struct qx_ar_work *w, struct qx_error *err)
{
    int rc = qx_pool_create(&w->pool, w->o->n_threads, err);
    if (rc != 0) {
        return rc;
    }
    uint32_t threads = qx_pool_threads(w->pool);
    w->n_slots = (size_t)threads * SLOTS_PER_THREAD;
    w->slots = qx_calloc(w->n_slots, sizeof *w->slots);
    w->packer = qx_calloc(threads, sizeof *w->packer);
    bool ok = w->slots != NULL && w->packer != NULL;
    for (size_t i = 0; ok && i < w->n_slots; i++) {
        w->slots[i].packed = qx_malloc(qx_zseek_bound(QX_ZSEEK_FRAME_BYTES));
        w->slots[i].raw = qx_malloc(QX_ZSEEK_FRAME_BYTES);
        ok = w->slots[i].packed != NULL && w->slots[i].raw != NULL;
    }
    for (uint32_t i = 0; ok && i < threads; i++) {
        w->packer[i] = qx_zseek_packer_create();
        ok = w->packer[i] != NULL;
    }
    return ok ? 0 : qx_fail_nomem(err);
}

uint64_t qx_ar_peak(uint32_t threads, uint64_t n_tensors)
{
    uint64_t t = threads > 0 ? threads : (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t slot = QX_ZSEEK_FRAME_BYTES + qx_zseek_bound(QX_ZSEEK_FRAME_BYTES);
    return (24u << 20) + t * (SLOTS_PER_THREAD * slot + (4u << 20)) + n_tensors * 1500;
}

int qx_ar_tick(struct qx_ar_work *w, struct qx_error *err)
{
    if (w->o->progress != NULL && w->o->progress(w->o->user, w->done_bytes, w->total_bytes) != 0) {
        return qx_fail(err, QX_E_INTERRUPTED, "interrupted",
                       "stopped; the same command goes on where it was");
    }
    return 0;
}

int qx_ar_add_file(struct qx_ar_work *w, const char *name, const struct stat *st,
                   struct qx_error *err)
{
    if (!qx_grow((void **)&w->e, &w->cap, w->n + 1, sizeof *w->e)) {
        return qx_fail_nomem(err);
    }
    struct qx_ar_entry *e = &w->e[w->n];
    memset(e, 0, sizeof *e);
    e->name = qx_strdup(name);
    e->size = (uint64_t)st->st_size;
    e->mtime_ns = (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec;
    if (e->name == NULL) {
        return qx_fail_nomem(err);
    }
    w->n++;
    return 0;
}

int qx_ar_hasher_init(struct qx_ar_hasher *h, struct qx_error *err)
{
    memset(h, 0, sizeof *h);
    h->file = XXH3_createState();
    h->tensor = XXH3_createState();
    if (h->file == NULL || h->tensor == NULL) {
        return qx_fail_nomem(err);
    }
    XXH3_128bits_reset(h->file);
    XXH3_128bits_reset(h->tensor);
    return 0;
}

void qx_ar_hasher_fini(struct qx_ar_hasher *h)
{
    XXH3_freeState(h->file);
    XXH3_freeState(h->tensor);
}

void qx_ar_hasher_add(struct qx_ar_hasher *h, struct qx_ar_entry *e, const uint8_t *p, size_t n)
{
    XXH3_128bits_update(h->file, p, n);
    uint64_t end = h->off + n;
    while (h->at < e->n_spans) {
        struct qx_ar_span *s = &e->spans[h->at];
        uint64_t from = s->off > h->off ? s->off : h->off, stop = s->off + s->size;
        if (from > end || (from == end && stop > end)) {
            break;
        }
        uint64_t to = stop < end ? stop : end;
        XXH3_128bits_update(h->tensor, p + (from - h->off), (size_t)(to - from));
        if (stop > end) {
            break;
        }
        qx_ar_to_hex(XXH3_128bits_digest(h->tensor), s->hash);
        XXH3_128bits_reset(h->tensor);
        h->at++;
    }
    h->off = end;
}

char *qx_ar_join(const char *a, const char *b, const char *c)
{
    size_t n = strlen(a) + strlen(b) + strlen(c) + 2;
    char *p = qx_malloc(n);
    if (p != NULL) {
        snprintf(p, n, "%s/%s%s", a, b, c);
    }
    return p;
}

/* Makes the folders of a name inside the part. */
int qx_ar_make_folders(struct qx_ar_work *w, const char *name, struct qx_error *err)
{
    int rc = 0;
    for (const char *p = strchr(name, '/'); rc == 0 && p != NULL; p = strchr(p + 1, '/')) {
        char *copy = qx_strndup(name, (size_t)(p - name)),
             *path = copy ? qx_out_dir_join(w->dir, copy) : NULL;
        if (path == NULL) {
            rc = qx_fail_nomem(err);
        } else if (mkdir(path, 0777) != 0 && errno != EEXIST) {
            rc = qx_fail_errno(err, QX_E_WRITE, errno, "write", "cannot create a folder");
            qx_error_at(err, path, NULL, QX_NO_OFF);
        }
        qx_free(copy);
        qx_free(path);
    }
    return rc;
}

void qx_ar_plan_id(const struct qx_ar_work *w, const char *what, char out[33])
{
    XXH3_state_t *s = XXH3_createState();
    memset(out, '0', 32);
    out[32] = 0;
    if (s == NULL) {
        return;
    }
    XXH3_128bits_reset(s);
    XXH3_128bits_update(s, what, strlen(what) + 1);
    for (size_t i = 0; i < w->n; i++) {
        uint64_t v[2] = {w->e[i].size, w->e[i].mtime_ns};
        XXH3_128bits_update(s, w->e[i].name, strlen(w->e[i].name) + 1);
        XXH3_128bits_update(s, v, sizeof v);
        XXH3_128bits_update(s, w->e[i].hash, 33);
    }
    qx_ar_to_hex(XXH3_128bits_digest(s), out);
    XXH3_freeState(s);
}

int qx_ar_finish(struct qx_ar_work *w, int rc, bool keep, struct qx_error *err)
{
    if (w->dir == NULL) {
        return rc;
    }
    if (rc == 0) {
        return qx_out_dir_commit(w->dir, err);
    }
    if (keep) {
        qx_out_dir_keep(w->dir);
    } else {
        qx_out_dir_discard(w->dir);
    }
    return rc;
}

int qx_ar_space(const struct qx_ar_work *w, struct qx_error *err)
{
    uint64_t need = w->total_bytes, have = w->res->free_bytes;
    for (size_t i = 0; i < w->n; i++) {
        const struct qx_ar_entry *e = &w->e[i];
        uint64_t there = e->done ? e->size : e->kept;
        need -= there < need ? there : need;
    }
    if (need > have) {
        char n[32], h[32];
        return qx_fail(err, QX_E_NOSPACE, "no-space", "the output may need %s more, %s are free",
                       qx_size_text(need, n), qx_size_text(have, h));
    }
    return 0;
}

int qx_ar_end_file(struct qx_ar_work *w, const struct qx_ar_entry *e, int rc, struct qx_error *err)
{
    struct qx_file_out *out = w->out;
    w->out = NULL;
    if (out == NULL) {
        return rc;
    }
    if (rc == 0) {
        return qx_file_out_commit(out, err);
    }
    if (e->kept > 0) {
        qx_file_out_leave(out);
    } else {
        qx_file_out_abort(out);
    }
    return rc;
}

bool qx_ar_ours(const void *names, const char *name, bool is_dir)
{
    const struct qx_ar_names *k = names;
    size_t n = strlen(name), s = strlen(k->suffix);
    if (s > 0 && !is_dir && strcmp(name, QX_ARCHIVE_LIST) == 0) {
        return true;
    }
    for (size_t i = 0; i < k->w->n; i++) {
        const char *e = k->w->e[i].name;
        size_t m = strlen(e);
        bool same = is_dir ? m > n && memcmp(e, name, n) == 0 && e[n] == '/'
                           : m + s == n && memcmp(e, name, m) == 0 && strcmp(name + m, k->suffix) == 0;
        if (same) {
            return true;
        }
    }
    return false;
}
