/* archive.c: a directory as a set of seekable zstd files, and back.
 *
 * Every file becomes NAME.zst; qx-archive.json.zst lists names, sizes and XXH3-128 of files and of
 * the tensors in them. Frames are packed and unpacked on all threads and pass in order through one
 * place that hashes and writes, so that memory is a few frames a thread. A finished file is noted
 * in the journal. */
#include "alloc.h"
#include "file_map.h"
#include "file_out.h"
#include "json_doc.h"
#include "json_out.h"
#include "out_dir.h"
#include "pool.h"
#include "qx.h"
#include "resolve.h"
#include "st_header.h"
#include "zseek.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define LIST_NAME "qx-archive.json.zst"
#define MAX_LIST_BYTES (512u << 20)
#define MAX_DEPTH 8
#define SLOTS_PER_THREAD 2
#define MIN_CUT_BYTES (32u * 1024)

struct span {
    const char *name;
    uint64_t off, size;
    uint8_t component;
    char hash[33];
};
struct entry {
    char *name;
    uint64_t size, packed, mtime_ns;
    char hash[33];
    struct span *spans; /* tensors by offset; those that overlap another are left out */
    size_t n_spans;
    struct qx_st_header header;
    bool has_header, done;
};
struct slot {
    uint8_t *raw, *packed;
    uint64_t off;
    size_t n, packed_n;
    uint32_t checksum;
    struct qx_error err;
    int rc;
};
struct work {
    const char *path;
    struct qx_out_dir *dir;
    const struct qx_archive_opts *o;
    struct qx_archive_result *res;
    struct qx_ckpt *ck; /* NULL: no checkpoint, components unknown */
    struct qx_pool *pool;
    struct qx_zseek_packer **packer;
    struct slot *slots;
    size_t n_slots;
    struct entry *e;
    size_t n, cap;
    uint64_t done_bytes, total_bytes;
    uint64_t component_bytes[QX_C_COUNT], component_packed[QX_C_COUNT];
    /* the file at work */
    int fd;
    const struct qx_zseek *z;
    uint64_t off;
    size_t frame0;
};

static void to_hex(XXH128_hash_t h, char out[33])
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, h);
    for (size_t i = 0; i < 16; i++) {
        snprintf(out + 2 * i, 3, "%02x", c.digest[i]);
    }
}

static void work_fini(struct work *w)
{
    for (size_t i = 0; i < w->n; i++) {
        qx_free(w->e[i].name);
        qx_free(w->e[i].spans);
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

static int start_workers(struct work *w, struct qx_error *err)
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

static uint64_t peak(uint32_t threads, uint64_t n_tensors)
{
    uint64_t t = threads > 0 ? threads : (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t slot = QX_ZSEEK_FRAME_BYTES + qx_zseek_bound(QX_ZSEEK_FRAME_BYTES);
    return (24u << 20) + t * (SLOTS_PER_THREAD * slot + (4u << 20)) + n_tensors * 1500;
}

static int tick(struct work *w, struct qx_error *err)
{
    if (w->o->progress != NULL && w->o->progress(w->o->user, w->done_bytes, w->total_bytes) != 0) {
        return qx_fail(err, QX_E_INTERRUPTED, "interrupted",
                       "stopped; the same command goes on where it was");
    }
    return 0;
}

/* ---- what is in the directory ------------------------------------------------------------- */

static int add_file(struct work *w, const char *name, const struct stat *st, struct qx_error *err)
{
    if (!qx_grow((void **)&w->e, &w->cap, w->n + 1, sizeof *w->e)) {
        return qx_fail_nomem(err);
    }
    struct entry *e = &w->e[w->n];
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

/* Regular files below root/rel; links to files are followed, links to folders are not. */
static int list(struct work *w, const char *root, const char *rel, unsigned depth,
                struct qx_error *err)
{
    char path[4096], name[4096];
    snprintf(path, sizeof path, "%s%s%s", root, rel[0] ? "/" : "", rel);
    DIR *dir = opendir(path);
    if (dir == NULL) {
        int rc = qx_fail_errno(err, QX_E_IO, errno, "read", "cannot list the directory");
        qx_error_at(err, path, NULL, QX_NO_OFF);
        return rc;
    }
    int rc = 0;
    for (struct dirent *e = readdir(dir); rc == 0 && e != NULL; e = readdir(dir)) {
        struct stat st, link;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
            strcmp(e->d_name, QX_JOURNAL) == 0) {
            continue;
        }
        int n = snprintf(name, sizeof name, "%s%s%s", rel, rel[0] ? "/" : "", e->d_name);
        if (n < 0 || (size_t)n >= sizeof name - 8 || fstatat(dirfd(dir), e->d_name, &st, 0) != 0) {
            rc = qx_fail_errno(err, QX_E_IO, errno, "read", "cannot look at '%.200s'", e->d_name);
            break;
        }
        if (S_ISREG(st.st_mode)) {
            rc = add_file(w, name, &st, err);
        } else if (S_ISDIR(st.st_mode) && depth < MAX_DEPTH &&
                   fstatat(dirfd(dir), e->d_name, &link, AT_SYMLINK_NOFOLLOW) == 0 &&
                   S_ISDIR(link.st_mode)) {
            rc = list(w, root, name, depth + 1, err);
        }
    }
    closedir(dir);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct entry *)a)->name, ((const struct entry *)b)->name);
}

static int by_off(const void *pa, const void *pb)
{
    const struct span *a = pa, *b = pb;
    return a->off < b->off ? -1 : a->off > b->off;
}

/* Tensors of a safetensors file, for hashes and components. A file that is none has no spans. */
static int find_spans(struct work *w, struct entry *e, int fd, struct qx_error *err)
{
    size_t n = strlen(e->name);
    if (n < 12 || strcmp(e->name + n - 12, ".safetensors") != 0) {
        return 0;
    }
    struct qx_findings *fs = qx_findings_create();
    if (fs == NULL) {
        return qx_fail_nomem(err);
    }
    int rc = qx_st_header_read(&e->header, fd, e->size, e->name, QX_OPEN_DEFAULT.max_header_bytes,
                               fs, err);
    e->has_header = rc == 0;
    qx_findings_destroy(fs);
    if (rc != 0 || e->header.n_tensors == 0) {
        return rc;
    }
    e->spans = qx_calloc(e->header.n_tensors, sizeof *e->spans);
    if (e->spans == NULL) {
        return qx_fail_nomem(err);
    }
    const struct qx_config *c = w->ck != NULL ? qx_ckpt_config(w->ck) : NULL;
    for (size_t i = 0; i < e->header.n_tensors; i++) {
        const struct qx_tensor *t = &e->header.tensors[i];
        if (t->readable) {
            e->spans[e->n_spans++] = (struct span){
                .name = t->name,
                .off = t->off,
                .size = t->size_bytes,
                .component = c != NULL ? (uint8_t)qx_name_classify(c, t->name).component
                                       : (uint8_t)QX_C_OTHER};
        }
    }
    qsort(e->spans, e->n_spans, sizeof *e->spans, by_off);
    size_t k = 0;
    for (size_t i = 0; i < e->n_spans; i++) {
        if (k == 0 || e->spans[i].off >= e->spans[k - 1].off + e->spans[k - 1].size) {
            e->spans[k++] = e->spans[i];
        }
    }
    e->n_spans = k;
    return 0;
}

/* ---- hashing in passing ------------------------------------------------------------------- */

struct hasher {
    XXH3_state_t *file, *tensor;
    size_t at;
    uint64_t off;
};

static int hasher_init(struct hasher *h, struct qx_error *err)
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

static void hasher_fini(struct hasher *h)
{
    XXH3_freeState(h->file);
    XXH3_freeState(h->tensor);
}

static void hasher_add(struct hasher *h, struct entry *e, const uint8_t *p, size_t n)
{
    XXH3_128bits_update(h->file, p, n);
    uint64_t end = h->off + n;
    while (h->at < e->n_spans) {
        struct span *s = &e->spans[h->at];
        uint64_t from = s->off > h->off ? s->off : h->off, stop = s->off + s->size;
        if (from > end || (from == end && stop > end)) {
            break;
        }
        uint64_t to = stop < end ? stop : end;
        XXH3_128bits_update(h->tensor, p + (from - h->off), (size_t)(to - from));
        if (stop > end) {
            break;
        }
        to_hex(XXH3_128bits_digest(h->tensor), s->hash);
        XXH3_128bits_reset(h->tensor);
        h->at++;
    }
    h->off = end;
}

/* Shares a frame's packed bytes among the components in it. */
static void count_components(struct work *w, const struct entry *e, uint64_t off, size_t n,
                             size_t packed, size_t *at)
{
    uint64_t rest = n, rest_packed = packed;
    while (*at < e->n_spans && e->spans[*at].off + e->spans[*at].size <= off) {
        ++*at;
    }
    for (size_t i = *at; i < e->n_spans && e->spans[i].off < off + n; i++) {
        const struct span *s = &e->spans[i];
        uint64_t a = s->off > off ? s->off : off;
        uint64_t b = s->off + s->size < off + n ? s->off + s->size : off + n;
        uint64_t share = packed * (b - a) / n;
        w->component_bytes[s->component] += b - a;
        w->component_packed[s->component] += share;
        rest -= b - a;
        rest_packed -= share;
    }
    w->component_bytes[QX_C_OTHER] += rest;
    w->component_packed[QX_C_OTHER] += rest_packed;
}

/* ---- creating ----------------------------------------------------------------------------- */

static void pack_slot(void *user, uint64_t i, uint32_t worker)
{
    struct work *w = user;
    struct slot *s = &w->slots[i];
    s->rc = qx_file_read(w->fd, s->raw, s->n, s->off, &s->err);
    if (s->rc == 0) {
        s->rc = qx_zseek_pack(w->packer[worker], s->raw, s->n, s->packed, &s->packed_n,
                              &s->checksum, &s->err);
    }
}

static char *join(const char *a, const char *b, const char *c)
{
    size_t n = strlen(a) + strlen(b) + strlen(c) + 2;
    char *p = qx_malloc(n);
    if (p != NULL) {
        snprintf(p, n, "%s/%s%s", a, b, c);
    }
    return p;
}

/* Makes the folders of a name inside the part. */
static int make_folders(struct work *w, const char *name, struct qx_error *err)
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

/* Length of the frame at off: up to the full size, but cut where another component begins, since
 * what shrinks and what does not should not share a frame. *at is the span to look from. */
static size_t frame_bytes(const struct entry *e, uint64_t off, size_t *at)
{
    uint64_t end = e->size - off < QX_ZSEEK_FRAME_BYTES ? e->size : off + QX_ZSEEK_FRAME_BYTES;
    while (*at < e->n_spans && e->spans[*at].off + e->spans[*at].size <= off) {
        ++*at;
    }
    for (size_t i = *at + 1; i < e->n_spans && e->spans[i].off < end; i++) {
        if (e->spans[i].component != e->spans[i - 1].component &&
            e->spans[i].off >= off + MIN_CUT_BYTES) {
            return (size_t)(e->spans[i].off - off);
        }
    }
    return (size_t)(end - off);
}

static int pack_content(struct work *w, struct entry *e, struct qx_file_out *out,
                        struct qx_error *err)
{
    struct hasher h;
    struct qx_zseek_frame *frames = NULL;
    size_t n_frames = 0, cap = 0, at = 0, span = 0;
    int rc = hasher_init(&h, err);
    for (w->off = 0; rc == 0 && w->off < e->size;) {
        size_t m = 0;
        for (uint64_t off = w->off; m < w->n_slots && off < e->size; m++) {
            w->slots[m].off = off;
            w->slots[m].n = frame_bytes(e, off, &span);
            off += w->slots[m].n;
        }
        qx_pool_run(w->pool, m, 1, pack_slot, w);
        for (size_t i = 0; rc == 0 && i < m; i++) {
            struct slot *s = &w->slots[i];
            if (s->rc != 0) {
                rc = s->rc;
                if (err != NULL) {
                    *err = s->err;
                }
                qx_error_at(err, e->name, NULL, w->off);
                break;
            }
            if (!qx_grow((void **)&frames, &cap, n_frames + 1, sizeof *frames)) {
                rc = qx_fail_nomem(err);
                break;
            }
            frames[n_frames++] = (struct qx_zseek_frame){.size = (uint32_t)s->packed_n,
                                                         .data_size = (uint32_t)s->n,
                                                         .checksum = s->checksum};
            hasher_add(&h, e, s->raw, s->n);
            count_components(w, e, w->off, s->n, s->packed_n, &at);
            rc = qx_file_out_write(out, s->packed, s->packed_n, err);
            w->off += s->n;
            w->done_bytes += s->n;
        }
        rc = rc == 0 ? tick(w, err) : rc;
    }
    if (rc == 0) {
        struct qx_buf table = {0};
        qx_zseek_put_table(&table, frames, n_frames);
        rc = table.failed ? qx_fail_nomem(err) : qx_file_out_write(out, table.p, table.n, err);
        qx_buf_fini(&table);
        to_hex(XXH3_128bits_digest(h.file), e->hash);
    }
    qx_free(frames);
    hasher_fini(&h);
    return rc;
}

/* "file I PACKED HASH components hashes-of-tensors" */
static int note_file(struct work *w, size_t i, struct qx_error *err)
{
    const struct entry *e = &w->e[i];
    struct qx_buf b = {0};
    qx_buf_fmt(&b, "file %zu %" PRIu64 " %s", i, e->packed, e->hash);
    for (size_t c = 0; c < QX_C_COUNT; c++) {
        qx_buf_fmt(&b, " %" PRIu64 " %" PRIu64, w->component_bytes[c], w->component_packed[c]);
    }
    for (size_t k = 0; k < e->n_spans; k++) {
        qx_buf_chr(&b, ' ');
        qx_buf_str(&b, e->spans[k].hash[0] ? e->spans[k].hash : "-");
    }
    int rc = qx_buf_cstr(&b) == NULL ? qx_fail_nomem(err) : qx_out_dir_note(w->dir, b.p, err);
    qx_buf_fini(&b);
    return rc;
}

static bool take_note(struct work *w, const char *s)
{
    size_t i;
    uint64_t packed, a, b;
    char hash[33];
    int at = 0;
    if (sscanf(s, "file %zu %" SCNu64 " %32s%n", &i, &packed, hash, &at) != 3 || i >= w->n) {
        return false;
    }
    struct entry *e = &w->e[i];
    s += at;
    for (size_t c = 0; c < QX_C_COUNT; c++) {
        if (sscanf(s, " %" SCNu64 " %" SCNu64 "%n", &a, &b, &at) != 2) {
            return false;
        }
        w->component_bytes[c] = a;
        w->component_packed[c] = b;
        s += at;
    }
    for (size_t k = 0; k < e->n_spans; k++) {
        if (sscanf(s, " %32s%n", e->spans[k].hash, &at) != 1) {
            return false;
        }
        s += at;
    }
    memcpy(e->hash, hash, sizeof e->hash);
    e->packed = packed;
    e->done = true;
    return true;
}

static int pack_file(struct work *w, size_t i, struct qx_error *err)
{
    struct entry *e = &w->e[i];
    struct qx_file_out *out = NULL;
    char *from = join(w->path, e->name, ""), *to = join(qx_out_dir_part(w->dir), e->name, ".zst");
    uint64_t size;
    int rc =
        from == NULL || to == NULL ? qx_fail_nomem(err) : qx_file_open(from, &w->fd, &size, err);
    if (rc == 0) {
        rc = size == e->size
                 ? make_folders(w, e->name, err)
                 : qx_fail(err, QX_E_IO, "file-changed", "the file has another size now");
        rc = rc == 0 ? qx_file_out_create(&out, to, true, err) : rc;
        rc = rc == 0 ? pack_content(w, e, out, err) : rc;
        qx_file_close(w->fd);
    }
    if (out != NULL && rc == 0) {
        e->packed = qx_file_out_size(out);
        rc = qx_file_out_commit(out, err);
    } else if (out != NULL) {
        qx_file_out_abort(out);
    }
    qx_free(from);
    qx_free(to);
    return rc == 0 ? note_file(w, i, err) : rc;
}

static int write_list(struct work *w, struct qx_error *err)
{
    struct qx_json_out o;
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    qx_json_str(&o, "schema", "qx.archive/1");
    qx_json_arr(&o, "files");
    for (size_t i = 0; i < w->n; i++) {
        const struct entry *e = &w->e[i];
        qx_json_obj(&o, NULL);
        qx_json_str(&o, "name", e->name);
        qx_json_u64(&o, "bytes", e->size);
        qx_json_str(&o, "xxh3", e->hash);
        qx_json_u64(&o, "packed_bytes", e->packed);
        if (e->n_spans > 0) {
            qx_json_arr(&o, "tensors");
            for (size_t k = 0; k < e->n_spans; k++) {
                qx_json_obj(&o, NULL);
                qx_json_str(&o, "name", e->spans[k].name);
                qx_json_u64(&o, "offset", e->spans[k].off);
                qx_json_u64(&o, "bytes", e->spans[k].size);
                qx_json_str(&o, "xxh3", e->spans[k].hash[0] ? e->spans[k].hash : NULL);
                qx_json_obj_end(&o);
            }
            qx_json_arr_end(&o);
        }
        qx_json_obj_end(&o);
    }
    qx_json_arr_end(&o);
    qx_json_obj_end(&o);
    qx_buf_chr(&o.buf, '\n');
    int rc = o.buf.failed ? qx_fail_nomem(err) : 0;
    struct qx_buf all = {0};
    struct qx_zseek_frame *frames = NULL;
    size_t n_frames = 0, cap = 0;
    for (size_t at = 0; rc == 0 && at < o.buf.n; at += QX_ZSEEK_FRAME_BYTES) {
        size_t n = o.buf.n - at < QX_ZSEEK_FRAME_BYTES ? o.buf.n - at : QX_ZSEEK_FRAME_BYTES,
               packed;
        uint32_t sum;
        rc = qx_zseek_pack(w->packer[0], o.buf.p + at, n, w->slots[0].packed, &packed, &sum, err);
        if (rc == 0 && !qx_grow((void **)&frames, &cap, n_frames + 1, sizeof *frames)) {
            rc = qx_fail_nomem(err);
        }
        if (rc == 0) {
            frames[n_frames++] = (struct qx_zseek_frame){
                .size = (uint32_t)packed, .data_size = (uint32_t)n, .checksum = sum};
            qx_buf_add(&all, w->slots[0].packed, packed);
        }
    }
    if (rc == 0) {
        qx_zseek_put_table(&all, frames, n_frames);
        char *path = qx_out_dir_join(w->dir, LIST_NAME);
        rc = all.failed || path == NULL ? qx_fail_nomem(err)
                                        : qx_file_out_small(path, all.p, all.n, err);
        w->res->bytes_out += all.n;
        qx_free(path);
    }
    qx_free(frames);
    qx_buf_fini(&all);
    qx_json_out_fini(&o);
    return rc;
}

static void plan_id(const struct work *w, const char *what, char out[33])
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
    to_hex(XXH3_128bits_digest(s), out);
    XXH3_freeState(s);
}

static int finish(struct work *w, int rc, bool keep, struct qx_error *err)
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

static int no_space(uint64_t need, uint64_t have, struct qx_error *err)
{
    return qx_fail(err, QX_E_NOSPACE, "no-space",
                   "the output may need %" PRIu64 " bytes, %" PRIu64 " are free", need, have);
}

int qx_archive_create(const char *path, const char *target, const struct qx_archive_opts *o,
                      struct qx_archive_result *res, struct qx_error *err)
{
    struct work w = {.path = path, .o = o, .res = res};
    struct stat st;
    char id[33];
    size_t n_done = 0;
    memset(res, 0, sizeof *res);
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        int rc = qx_fail(err, QX_E_NOT_FOUND, "not-found",
                         "an archive is made of a directory: there is none");
        qx_error_at(err, path, NULL, QX_NO_OFF);
        return rc;
    }
    int rc = qx_out_dir_check(path, target, err);
    rc = rc == 0 ? list(&w, path, "", 0, err) : rc;
    if (rc == 0) {
        /* Only to name components: any directory can be archived. */
        if (qx_ckpt_open(&w.ck, path, &QX_OPEN_DEFAULT, NULL) == -(int)QX_E_NOMEM) {
            rc = qx_fail_nomem(err);
        }
        qsort(w.e, w.n, sizeof *w.e, by_name);
    }
    uint64_t n_tensors = 0;
    for (size_t i = 0; rc == 0 && i < w.n; i++) {
        char *p = join(path, w.e[i].name, "");
        uint64_t size;
        int fd = -1;
        rc = p == NULL ? qx_fail_nomem(err) : qx_file_open(p, &fd, &size, err);
        rc = rc == 0 ? find_spans(&w, &w.e[i], fd, err) : rc;
        qx_file_close(fd);
        qx_free(p);
        w.total_bytes += w.e[i].size;
        n_tensors += w.e[i].n_spans;
        res->bytes_out += o->dry_run ? qx_zseek_bound(w.e[i].size) + 4096 : 0;
    }
    res->n_files = w.n;
    res->bytes_in = w.total_bytes;
    res->peak_bytes = peak(o->n_threads, n_tensors);
    res->free_bytes = qx_out_dir_free(target);
    if (rc == 0 && !o->dry_run) {
        plan_id(&w, "archive 1", id);
        rc = w.total_bytes > res->free_bytes ? no_space(w.total_bytes, res->free_bytes, err) : 0;
        rc = rc == 0 ? qx_out_dir_begin(&w.dir, target, id, o->force, o->resume, err) : rc;
        rc = rc == 0 ? start_workers(&w, err) : rc;
        for (size_t i = 0; rc == 0 && i < qx_out_dir_n_notes(w.dir); i++) {
            n_done += take_note(&w, qx_out_dir_note_at(w.dir, i));
        }
        for (size_t i = 0; rc == 0 && i < w.n; i++) {
            if (w.e[i].done) {
                w.done_bytes += w.e[i].size;
            } else {
                rc = pack_file(&w, i, err);
                n_done += rc == 0;
            }
            res->bytes_out += w.e[i].packed;
        }
        rc = rc == 0 ? write_list(&w, err) : rc;
        rc = finish(&w, rc, n_done > 0, err);
        for (size_t c = 0; c < QX_C_COUNT && c < QX_ARRAY_LEN(res->components); c++) {
            if (w.component_bytes[c] > 0) {
                res->components[res->n_components++] =
                    (struct qx_archive_component){qx_component_name((enum qx_component)c),
                                                  w.component_bytes[c], w.component_packed[c]};
            }
        }
    }
    work_fini(&w);
    return rc;
}

/* ---- restoring ---------------------------------------------------------------------------- */

bool qx_is_archive(const char *path)
{
    struct stat st;
    char *p = join(path, LIST_NAME, "");
    bool is = p != NULL && stat(p, &st) == 0 && S_ISREG(st.st_mode);
    qx_free(p);
    return is;
}

static int bad_list(struct qx_error *err, const char *what)
{
    int rc = qx_fail(err, QX_E_FORMAT, "archive-list", "%s", what);
    qx_error_at(err, LIST_NAME, NULL, QX_NO_OFF);
    return rc;
}

static int read_list_text(const char *path, char **text, size_t *n, struct qx_error *err)
{
    char *p = join(path, LIST_NAME, "");
    int fd = -1;
    uint64_t size;
    struct qx_zseek *z = NULL;
    int rc = p == NULL ? qx_fail_nomem(err) : qx_file_open(p, &fd, &size, err);
    rc = rc == 0 ? qx_zseek_open(&z, fd, size, LIST_NAME, err) : rc;
    if (rc == 0 && qx_zseek_content_bytes(z) > MAX_LIST_BYTES) {
        rc = bad_list(err, "the list is larger than 512 MiB");
    }
    if (rc == 0) {
        *n = (size_t)qx_zseek_content_bytes(z);
        *text = qx_malloc(*n + 1);
        rc = *text == NULL ? qx_fail_nomem(err) : qx_zseek_read(z, 0, *text, *n, err);
        if (rc == 0) {
            (*text)[*n] = 0;
        }
    }
    qx_zseek_close(z);
    qx_file_close(fd);
    qx_free(p);
    return rc;
}

static int read_list(struct work *w, struct qx_error *err)
{
    char *text = NULL;
    size_t n = 0;
    struct qx_json_doc doc = {0};
    int rc = read_list_text(w->path, &text, &n, err);
    rc = rc == 0 ? qx_json_doc_parse(&doc, text, n, LIST_NAME, NULL, err) : rc;
    if (rc == 0) {
        const struct qx_json *schema = qx_json_get(doc.root, "schema"),
                             *files = qx_json_get(doc.root, "files");
        if (schema == NULL || schema->type != QX_JSON_STRING ||
            strcmp(schema->str, "qx.archive/1") != 0 || files == NULL ||
            files->type != QX_JSON_ARRAY) {
            rc = bad_list(err, "this is no list of a qx archive of version 1");
        }
        for (const struct qx_json *f = NULL; rc == 0 && (f = qx_json_each(files, f)) != NULL;) {
            const struct qx_json *name = qx_json_get(f, "name"), *size = qx_json_get(f, "bytes"),
                                 *hash = qx_json_get(f, "xxh3");
            struct stat st = {0};
            if (name == NULL || name->type != QX_JSON_STRING || size == NULL || !size->is_int ||
                size->negative || hash == NULL || hash->type != QX_JSON_STRING ||
                hash->str_n != 32) {
                rc = bad_list(err, "an entry lacks its name, size or hash");
                break;
            }
            if (!qx_name_stays_inside(name->str, name->str_n) || strlen(name->str) != name->str_n) {
                rc = qx_fail(err, QX_E_FORMAT, "unsafe-path", "'%.200s' leaves the directory",
                             name->str);
                qx_error_at(err, LIST_NAME, NULL, QX_NO_OFF);
                break;
            }
            rc = add_file(w, name->str, &st, err);
            if (rc == 0) {
                w->e[w->n - 1].size = size->uint_value;
                memcpy(w->e[w->n - 1].hash, hash->str, 33);
                w->total_bytes += size->uint_value;
            }
        }
        qx_json_doc_fini(&doc);
    }
    qx_free(text);
    return rc;
}

static void unpack_slot(void *user, uint64_t i, uint32_t worker)
{
    struct work *w = user;
    struct slot *s = &w->slots[i];
    (void)worker;
    s->rc = qx_zseek_read_frame(w->z, w->frame0 + i, s->raw, &s->err);
}

static int unpack_content(struct work *w, struct entry *e, struct qx_file_out *out,
                          struct qx_error *err)
{
    struct hasher h;
    char hash[33];
    int rc = hasher_init(&h, err);
    size_t n = qx_zseek_n_frames(w->z);
    for (w->frame0 = 0; rc == 0 && w->frame0 < n; w->frame0 += w->n_slots) {
        size_t m = n - w->frame0 < w->n_slots ? n - w->frame0 : w->n_slots;
        for (size_t i = 0; rc == 0 && i < m; i++) {
            if (qx_zseek_frame(w->z, w->frame0 + i)->data_size > QX_ZSEEK_FRAME_BYTES) {
                rc = qx_fail(err, QX_E_FORMAT, "seek-table",
                             "a frame is larger than an archive's frames are");
                qx_error_at(err, e->name, NULL, QX_NO_OFF);
            }
        }
        if (rc != 0) {
            break;
        }
        qx_pool_run(w->pool, m, 1, unpack_slot, w);
        for (size_t i = 0; rc == 0 && i < m; i++) {
            struct slot *s = &w->slots[i];
            size_t k = qx_zseek_frame(w->z, w->frame0 + i)->data_size;
            if (s->rc != 0) {
                rc = s->rc;
                if (err != NULL) {
                    *err = s->err;
                }
                break;
            }
            hasher_add(&h, e, s->raw, k);
            rc = qx_file_out_write(out, s->raw, k, err);
            w->done_bytes += k;
        }
        rc = rc == 0 ? tick(w, err) : rc;
    }
    if (rc == 0) {
        to_hex(XXH3_128bits_digest(h.file), hash);
        if (strcmp(hash, e->hash) != 0) {
            rc = qx_fail(err, QX_E_FORMAT, "checksum", "expected XXH3-128 %s, found %s", e->hash,
                         hash);
            qx_error_at(err, e->name, NULL, QX_NO_OFF);
        }
    }
    hasher_fini(&h);
    return rc;
}

static int unpack_file(struct work *w, size_t i, struct qx_error *err)
{
    struct entry *e = &w->e[i];
    struct qx_file_out *out = NULL;
    struct qx_zseek *z = NULL;
    char *from = join(w->path, e->name, ".zst"), *to = join(qx_out_dir_part(w->dir), e->name, "");
    char note[64];
    uint64_t size = 0;
    int rc =
        from == NULL || to == NULL ? qx_fail_nomem(err) : qx_file_open(from, &w->fd, &size, err);
    if (rc == 0) {
        rc = qx_zseek_open(&z, w->fd, size, e->name, err);
        if (rc == 0 && qx_zseek_content_bytes(z) != e->size) {
            rc = qx_fail(err, QX_E_FORMAT, "size-mismatch",
                         "expected %" PRIu64 " bytes, found %" PRIu64, e->size,
                         qx_zseek_content_bytes(z));
            qx_error_at(err, e->name, NULL, QX_NO_OFF);
        }
        w->z = z;
        rc = rc == 0 ? make_folders(w, e->name, err) : rc;
        rc = rc == 0 ? qx_file_out_create(&out, to, true, err) : rc;
        rc = rc == 0 ? unpack_content(w, e, out, err) : rc;
        qx_zseek_close(z);
        qx_file_close(w->fd);
    }
    if (out != NULL && rc == 0) {
        rc = qx_file_out_commit(out, err);
    } else if (out != NULL) {
        qx_file_out_abort(out);
    }
    qx_free(from);
    qx_free(to);
    w->res->bytes_in += size;
    if (rc == 0) {
        snprintf(note, sizeof note, "restored %zu", i);
        rc = qx_out_dir_note(w->dir, note, err);
    }
    return rc;
}

int qx_archive_restore(const char *path, const char *target, const struct qx_archive_opts *o,
                       struct qx_archive_result *res, struct qx_error *err)
{
    struct work w = {.path = path, .o = o, .res = res};
    char id[33];
    size_t n_done = 0;
    memset(res, 0, sizeof *res);
    int rc = qx_out_dir_check(path, target, err);
    rc = rc == 0 ? read_list(&w, err) : rc;
    res->n_files = w.n;
    res->bytes_out = w.total_bytes;
    res->peak_bytes = peak(o->n_threads, 0);
    res->free_bytes = qx_out_dir_free(target);
    if (rc == 0 && !o->dry_run) {
        plan_id(&w, "restore 1", id);
        rc = w.total_bytes > res->free_bytes ? no_space(w.total_bytes, res->free_bytes, err) : 0;
        rc = rc == 0 ? qx_out_dir_begin(&w.dir, target, id, o->force, o->resume, err) : rc;
        rc = rc == 0 ? start_workers(&w, err) : rc;
        for (size_t i = 0; rc == 0 && i < qx_out_dir_n_notes(w.dir); i++) {
            size_t k;
            if (sscanf(qx_out_dir_note_at(w.dir, i), "restored %zu", &k) == 1 && k < w.n) {
                w.e[k].done = true;
                n_done++;
            }
        }
        for (size_t i = 0; rc == 0 && i < w.n; i++) {
            if (w.e[i].done) {
                w.done_bytes += w.e[i].size;
            } else {
                rc = unpack_file(&w, i, err);
                n_done += rc == 0;
            }
        }
        rc = finish(&w, rc, n_done > 0, err);
    }
    work_fini(&w);
    return rc;
}
