/* archive_restore.c: what an archive held, bit for bit. Names of the list may not leave the
 * directory; every frame and every file is checked against its hash before the output is put in
 * place. */
#include "archive_impl.h"

#include "json_doc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_LIST_BYTES (512u << 20)

bool qx_is_archive(const char *path)
{
    struct stat st;
    char *p = qx_ar_join(path, QX_ARCHIVE_LIST, "");
    bool is = p != NULL && stat(p, &st) == 0 && S_ISREG(st.st_mode);
    qx_free(p);
    return is;
}

static int bad_list(struct qx_error *err, const char *what)
{
    int rc = qx_fail(err, QX_E_FORMAT, "archive-list", "%s", what);
    qx_error_at(err, QX_ARCHIVE_LIST, NULL, QX_NO_OFF);
    return rc;
}

static int read_list_text(const char *path, char **text, size_t *n, struct qx_error *err)
{
    char *p = qx_ar_join(path, QX_ARCHIVE_LIST, "");
    int fd = -1;
    uint64_t size;
    struct qx_zseek *z = NULL;
    int rc = p == NULL ? qx_fail_nomem(err) : qx_file_open(p, &fd, &size, err);
    rc = rc == 0 ? qx_zseek_open(&z, fd, size, QX_ARCHIVE_LIST, err) : rc;
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

static int read_list(struct qx_ar_work *w, struct qx_error *err)
{
    char *text = NULL;
    size_t n = 0;
    struct qx_json_doc doc = {0};
    int rc = read_list_text(w->path, &text, &n, err);
    rc = rc == 0 ? qx_json_doc_parse(&doc, text, n, QX_ARCHIVE_LIST, NULL, err) : rc;
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
                qx_error_at(err, QX_ARCHIVE_LIST, NULL, QX_NO_OFF);
                break;
            }
            rc = qx_ar_add_file(w, name->str, &st, err);
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
    struct qx_ar_work *w = user;
    struct qx_ar_slot *s = &w->slots[i];
    (void)worker;
    const struct qx_zseek_frame *f = qx_zseek_frame(w->z, w->frame0 + i);
    s->rc = s->known ? qx_file_out_read(w->out, f->data_off, s->raw, f->data_size, &s->err)
                     : qx_zseek_read_frame(w->z, w->frame0 + i, s->raw, &s->err);
}

/* "some I BYTES": so much of file I is on disk. */
static int note_some(struct qx_ar_work *w, struct qx_ar_entry *e, struct qx_error *err)
{
    char line[64];
    uint64_t n = qx_file_out_size(w->out);
    snprintf(line, sizeof line, "some %zu %" PRIu64, (size_t)(e - w->e), n);
    int rc = qx_file_out_sync(w->out, err);
    rc = rc == 0 ? qx_out_dir_note(w->dir, line, err) : rc;
    if (rc == 0) {
        e->kept = n;
        w->parts = true;
    }
    return rc;
}

/* Goes on behind the frames that are there. */
static int open_part(struct qx_ar_work *w, struct qx_ar_entry *e, const char *to, struct qx_error *err)
{
    bool at_frame = false;
    for (size_t i = 0; !at_frame && i < qx_zseek_n_frames(w->z); i++) {
        at_frame = qx_zseek_frame(w->z, i)->data_off == e->kept;
    }
    int rc = qx_file_out_resume(&w->out, to, at_frame ? e->kept : 0, err);
    e->kept = rc == 0 ? qx_file_out_size(w->out) : 0;
    w->res->resumed_bytes += e->kept;
    return rc;
}

static int unpack_content(struct qx_ar_work *w, struct qx_ar_entry *e, struct qx_error *err)
{
    struct qx_ar_hasher h;
    char hash[33];
    uint64_t kept = e->kept;
    int rc = qx_ar_hasher_init(&h, err);
    size_t n = qx_zseek_n_frames(w->z);
    for (w->frame0 = 0; rc == 0 && w->frame0 < n; w->frame0 += w->n_slots) {
        size_t m = n - w->frame0 < w->n_slots ? n - w->frame0 : w->n_slots;
        for (size_t i = 0; rc == 0 && i < m; i++) {
            w->slots[i].known = qx_zseek_frame(w->z, w->frame0 + i)->data_off < kept;
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
            struct qx_ar_slot *s = &w->slots[i];
            size_t k = qx_zseek_frame(w->z, w->frame0 + i)->data_size;
            if (s->rc != 0) {
                rc = s->rc;
                if (err != NULL) {
                    *err = s->err;
                }
                break;
            }
            qx_ar_hasher_add(&h, e, s->raw, k);
            rc = s->known ? 0 : qx_file_out_write(w->out, s->raw, k, err);
            w->done_bytes += k;
        }
        int stop = rc == 0 ? qx_ar_tick(w, err) : rc;
        uint64_t more = qx_file_out_size(w->out) - e->kept;
        if (rc == 0 && more > 0 && (stop != 0 || more >= QX_AR_NOTE_BYTES)) {
            rc = note_some(w, e, stop != 0 ? NULL : err);
        }
        rc = stop != 0 ? stop : rc;
    }
    if (rc == 0) {
        qx_ar_to_hex(XXH3_128bits_digest(h.file), hash);
        if (strcmp(hash, e->hash) != 0) {
            rc = qx_fail(err, QX_E_FORMAT, "checksum", "expected XXH3-128 %s, found %s", e->hash,
                         hash);
            qx_error_at(err, e->name, NULL, QX_NO_OFF);
            e->kept = 0; /* what is there is of no use to the next run */
        }
    }
    qx_ar_hasher_fini(&h);
    return rc;
}

static int unpack_file(struct qx_ar_work *w, size_t i, struct qx_error *err)
{
    struct qx_ar_entry *e = &w->e[i];
    struct qx_zseek *z = NULL;
    char *from = qx_ar_join(w->path, e->name, ".zst"),
         *to = qx_ar_join(qx_out_dir_part(w->dir), e->name, "");
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
        rc = rc == 0 ? qx_ar_make_folders(w, e->name, err) : rc;
        rc = rc == 0 ? open_part(w, e, to, err) : rc;
        rc = rc == 0 ? unpack_content(w, e, err) : rc;
        qx_zseek_close(z);
        qx_file_close(w->fd);
    }
    rc = qx_ar_end_file(w, e, rc, err);
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
    struct qx_ar_work w = {.path = path, .o = o, .res = res};
    const struct qx_ar_names what = {&w, ""};
    const struct qx_out_names names = {qx_ar_ours, &what};
    char id[33];
    size_t n_done = 0;
    memset(res, 0, sizeof *res);
    int rc = qx_out_dir_check(path, target, err);
    rc = rc == 0 ? read_list(&w, err) : rc;
    res->n_files = w.n;
    res->bytes_out = w.total_bytes;
    res->peak_bytes = qx_ar_peak(o->n_threads, 0);
    res->free_bytes = qx_out_dir_free(target);
    if (rc == 0 && !o->dry_run) {
        qx_ar_plan_id(&w, "restore 1", id);
        rc = qx_out_dir_begin(&w.dir, target, id, &names, o->force, o->resume, err);
        for (size_t i = 0; rc == 0 && i < qx_out_dir_n_notes(w.dir); i++) {
            const char *s = qx_out_dir_note_at(w.dir, i);
            size_t k;
            uint64_t bytes;
            if (sscanf(s, "restored %zu", &k) == 1 && k < w.n) {
                w.e[k].done = true;
                n_done++;
            } else if (sscanf(s, "some %zu %" SCNu64, &k, &bytes) == 2 && k < w.n) {
                w.e[k].kept = bytes;
                w.parts = true;
            }
        }
        rc = rc == 0 ? qx_ar_space(&w, err) : rc;
        rc = rc == 0 ? qx_ar_start_workers(&w, err) : rc;
        for (size_t i = 0; rc == 0 && i < w.n; i++) {
            if (w.e[i].done) {
                w.done_bytes += w.e[i].size;
                res->resumed_bytes += w.e[i].size;
            } else {
                rc = unpack_file(&w, i, err);
                n_done += rc == 0;
            }
        }
        rc = qx_ar_finish(&w, rc, n_done > 0 || w.parts, err);
    }
    qx_ar_work_fini(&w);
    return rc;
}
