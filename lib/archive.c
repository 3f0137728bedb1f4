/* archive.c: a directory as a set of seekable zstd files, and back.
 *
 * Every file becomes NAME.zst; qx-archive.json.zst lists names, sizes and XXH3-128 of files and of
 * the tensors in them. Frames are packed and unpacked on all threads and pass in order through one
 * place that hashes and writes, so that memory is a few frames a thread. A finished file is noted
 * in the journal, and so are frames of an unfinished one that are on disk: a later run reads and
 * hashes their content again, but neither packs nor writes them. */
#include "archive_impl.h"

#include "json_out.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_DEPTH 8
#define MIN_CUT_BYTES (32u * 1024)

/* ---- what is in the directory ------------------------------------------------------------- */

/* Regular files below root/rel; links to files are followed, links to folders are not. */
static int list(struct qx_ar_work *w, const char *root, const char *rel, unsigned depth,
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
            rc = qx_ar_add_file(w, name, &st, err);
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
    return strcmp(((const struct qx_ar_entry *)a)->name, ((const struct qx_ar_entry *)b)->name);
}

static int by_off(const void *pa, const void *pb)
{
    const struct qx_ar_span *a = pa, *b = pb;
    return a->off < b->off ? -1 : a->off > b->off;
}

/* Tensors of a safetensors file, for hashes and components. A file that is none has no spans. */
static int find_spans(struct qx_ar_work *w, struct qx_ar_entry *e, int fd, struct qx_error *err)
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
            e->spans[e->n_spans++] = (struct qx_ar_span){
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

/* Shares a frame's packed bytes among the components in it. */
static void count_components(struct qx_ar_work *w, const struct qx_ar_entry *e, uint64_t off,
                             size_t n, size_t packed, size_t *at)
{
    uint64_t rest = n, rest_packed = packed;
    while (*at < e->n_spans && e->spans[*at].off + e->spans[*at].size <= off) {
        ++*at;
    }
    for (size_t i = *at; i < e->n_spans && e->spans[i].off < off + n; i++) {
        const struct qx_ar_span *s = &e->spans[i];
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
    struct qx_ar_work *w = user;
    struct qx_ar_slot *s = &w->slots[i];
    s->rc = qx_file_read(w->fd, s->raw, s->n, s->off, &s->err);
    if (s->rc == 0 && s->known) {
        s->checksum = qx_zseek_checksum(s->raw, s->n);
    } else if (s->rc == 0) {
        s->rc = qx_zseek_pack(w->packer[worker], s->raw, s->n, s->packed, &s->packed_n,
                              &s->checksum, &s->err);
    }
}

/* Length of the frame at off: up to the full size, but cut where another component begins, since
 * what shrinks and what does not should not share a frame. *at is the span to look from. */
static size_t frame_bytes(const struct qx_ar_entry *e, uint64_t off, size_t *at)
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

/* "part I FIRST SIZES": frames FIRST... of file I are on disk. */
static int note_part(struct qx_ar_work *w, struct qx_ar_entry *e, const struct qx_zseek_frame *frames,
                     size_t first, size_t n, struct qx_error *err)
{
    struct qx_buf b = {0};
    int rc = qx_file_out_sync(w->out, err);
    qx_buf_fmt(&b, "part %zu %zu", (size_t)(e - w->e), first);
    for (size_t i = first; i < n; i++) {
        qx_buf_fmt(&b, " %" PRIu32, frames[i].size);
    }
    if (rc == 0) {
        rc = qx_buf_cstr(&b) == NULL ? qx_fail_nomem(err) : qx_out_dir_note(w->dir, b.p, err);
    }
    qx_buf_fini(&b);
    if (rc == 0) {
        e->kept = w->off;
        w->parts = true;
    }
    return rc;
}

static bool take_part(struct qx_ar_work *w, const char *s)
{
    size_t i, first;
    uint32_t size;
    int at = 0;
    if (sscanf(s, "part %zu %zu%n", &i, &first, &at) != 2 || i >= w->n || first > w->e[i].n_known) {
        return false;
    }
    struct qx_ar_entry *e = &w->e[i];
    e->n_known = first;
    for (s += at; sscanf(s, " %" SCNu32 "%n", &size, &at) == 1; s += at) {
        if (!qx_grow((void **)&e->known, &e->cap_known, e->n_known + 1, sizeof *e->known)) {
            return false; /* fewer are known: they are packed again */
        }
        e->known[e->n_known++] = size;
    }
    return true;
}

static int pack_content(struct qx_ar_work *w, struct qx_ar_entry *e, struct qx_error *err)
{
    struct qx_ar_hasher h;
    struct qx_zseek_frame *frames = NULL;
    size_t n_frames = 0, cap = 0, at = 0, span = 0, noted = e->n_known;
    uint64_t noted_off = 0;
    int rc = qx_ar_hasher_init(&h, err);
    for (w->off = 0; rc == 0 && w->off < e->size;) {
        size_t m = 0;
        for (uint64_t off = w->off; m < w->n_slots && off < e->size; m++) {
            w->slots[m].off = off;
            w->slots[m].n = frame_bytes(e, off, &span);
            w->slots[m].known = n_frames + m < e->n_known;
            if (w->slots[m].known) {
                w->slots[m].packed_n = e->known[n_frames + m];
            }
            off += w->slots[m].n;
        }
        qx_pool_run(w->pool, m, 1, pack_slot, w);
        for (size_t i = 0; rc == 0 && i < m; i++) {
            struct qx_ar_slot *s = &w->slots[i];
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
            qx_ar_hasher_add(&h, e, s->raw, s->n);
            count_components(w, e, w->off, s->n, s->packed_n, &at);
            rc = s->known ? 0 : qx_file_out_write(w->out, s->packed, s->packed_n, err);
            w->off += s->n;
            w->done_bytes += s->n;
            if (s->known) {
                noted_off = w->off;
            }
        }
        int stop = rc == 0 ? qx_ar_tick(w, err) : rc;
        if (rc == 0 && n_frames > noted && (stop != 0 || w->off - noted_off >= QX_AR_NOTE_BYTES)) {
            rc = note_part(w, e, frames, noted, n_frames, stop != 0 ? NULL : err);
            noted = n_frames;
            noted_off = w->off;
        }
        rc = stop != 0 ? stop : rc;
    }
    if (rc == 0) {
        struct qx_buf table = {0};
        qx_zseek_put_table(&table, frames, n_frames);
        rc = table.failed ? qx_fail_nomem(err) : qx_file_out_write(w->out, table.p, table.n, err);
        qx_buf_fini(&table);
        qx_ar_to_hex(XXH3_128bits_digest(h.file), e->hash);
    }
    qx_free(frames);
    qx_ar_hasher_fini(&h);
    return rc;
}

/* "file I PACKED HASH components hashes-of-tensors" */
static int note_file(struct qx_ar_work *w, size_t i, struct qx_error *err)
{
    const struct qx_ar_entry *e = &w->e[i];
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

static bool take_note(struct qx_ar_work *w, const char *s)
{
    size_t i;
    uint64_t packed, a, b;
    char hash[33];
    int at = 0;
    if (sscanf(s, "file %zu %" SCNu64 " %32s%n", &i, &packed, hash, &at) != 3 || i >= w->n) {
        return false;
    }
    struct qx_ar_entry *e = &w->e[i];
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

/* What is known of the file at work must be there, frame for frame; otherwise it begins anew. */
static int open_part(struct qx_ar_work *w, struct qx_ar_entry *e, const char *to, struct qx_error *err)
{
    uint64_t packed = 0, content = 0;
    size_t span = 0;
    for (size_t k = 0; k < e->n_known; k++) {
        packed += e->known[k];
        if (content >= e->size) {
            packed = 0;
            break;
        }
        content += frame_bytes(e, content, &span);
    }
    int rc = qx_file_out_resume(&w->out, to, packed, err);
    if (rc == 0 && (packed == 0 || qx_file_out_size(w->out) != packed)) {
        e->n_known = 0;
        content = 0;
    }
    e->kept = rc == 0 ? content : 0;
    w->res->resumed_bytes += e->kept;
    return rc;
}

static int pack_file(struct qx_ar_work *w, size_t i, struct qx_error *err)
{
    struct qx_ar_entry *e = &w->e[i];
    char *from = qx_ar_join(w->path, e->name, ""),
         *to = qx_ar_join(qx_out_dir_part(w->dir), e->name, ".zst");
    uint64_t size;
    int rc =
        from == NULL || to == NULL ? qx_fail_nomem(err) : qx_file_open(from, &w->fd, &size, err);
    if (rc == 0) {
        rc = size == e->size
                 ? qx_ar_make_folders(w, e->name, err)
                 : qx_fail(err, QX_E_IO, "file-changed", "the file has another size now");
        rc = rc == 0 ? open_part(w, e, to, err) : rc;
        rc = rc == 0 ? pack_content(w, e, err) : rc;
        qx_file_close(w->fd);
    }
    if (rc == 0) {
        e->packed = qx_file_out_size(w->out);
    }
    rc = qx_ar_end_file(w, e, rc, err);
    qx_free(from);
    qx_free(to);
    return rc == 0 ? note_file(w, i, err) : rc;
}

static int write_list(struct qx_ar_work *w, struct qx_error *err)
{
    struct qx_json_out o;
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    qx_json_str(&o, "schema", "qx.archive/1");
    qx_json_arr(&o, "files");
    for (size_t i = 0; i < w->n; i++) {
        const struct qx_ar_entry *e = &w->e[i];
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
        char *path = qx_out_dir_join(w->dir, QX_ARCHIVE_LIST);
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

int qx_archive_create(const char *path, const char *target, const struct qx_archive_opts *o,
                      struct qx_archive_result *res, struct qx_error *err)
{
    struct qx_ar_work w = {.path = path, .o = o, .res = res};
    const struct qx_ar_names what = {&w, ".zst"};
    const struct qx_out_names names = {qx_ar_ours, &what};
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
        char *p = qx_ar_join(path, w.e[i].name, "");
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
    res->peak_bytes = qx_ar_peak(o->n_threads, n_tensors);
    res->free_bytes = qx_out_dir_free(target);
    if (rc == 0 && !o->dry_run) {
        qx_ar_plan_id(&w, "archive 1", id);
        rc = qx_out_dir_begin(&w.dir, target, id, &names, o->force, o->resume, err);
        for (size_t i = 0; rc == 0 && i < qx_out_dir_n_notes(w.dir); i++) {
            n_done += take_note(&w, qx_out_dir_note_at(w.dir, i));
            w.parts |= take_part(&w, qx_out_dir_note_at(w.dir, i));
        }
        rc = rc == 0 ? qx_ar_space(&w, err) : rc;
        rc = rc == 0 ? qx_ar_start_workers(&w, err) : rc;
        for (size_t i = 0; rc == 0 && i < w.n; i++) {
            if (w.e[i].done) {
                w.done_bytes += w.e[i].size;
                res->resumed_bytes += w.e[i].size;
            } else {
                rc = pack_file(&w, i, err);
                n_done += rc == 0;
            }
            res->bytes_out += w.e[i].packed;
        }
        rc = rc == 0 ? write_list(&w, err) : rc;
        rc = qx_ar_finish(&w, rc, n_done > 0 || w.parts, err);
        for (size_t c = 0; c < QX_C_COUNT && c < QX_ARRAY_LEN(res->components); c++) {
            if (w.component_bytes[c] > 0) {
                res->components[res->n_components++] =
                    (struct qx_archive_component){qx_component_name((enum qx_component)c),
                                                  w.component_bytes[c], w.component_packed[c]};
            }
        }
    }
    qx_ar_work_fini(&w);
    return rc;
}
