/* ckpt.c: owns the finished checkpoint: what it holds, found by name, and reading from it. Nothing here
 * changes after open but descriptors and maps made on demand, under a lock. */
#include "ckpt_priv.h"

#include "name_sort.h"
#include "str.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

void qx_ckpt_close(struct qx_ckpt *ck)
{
    if (!ck) {
        return;
    }
    qx_resolved_destroy(ck->resolved);
    for (size_t f = 0; f < ck->n_files; f++) {
        qx_map_close(&ck->priv[f].map);
        qx_file_close(ck->priv[f].fd);
        qx_st_header_fini(&ck->priv[f].header);
    }
    if (ck->lazy) {
        pthread_mutex_destroy(&ck->lazy->lock);
        qx_free(ck->lazy);
    }
    qx_free(ck->absent);
    qx_free(ck->extras);
    qx_free(ck->tensors);
    qx_free(ck->priv);
    qx_free(ck->files);
    qx_index_fini(&ck->index);
    qx_findings_destroy(ck->findings);
    qx_free((void *)(uintptr_t)ck->config_text.text);
    qx_free((void *)(uintptr_t)ck->hf_quant_text.text);
    qx_free(ck->config);
    qx_arena_destroy(ck->arena);
    qx_free(ck);
}

const char *qx_ckpt_path(const struct qx_ckpt *ck)
{
    return ck->path;
}

const char *qx_ckpt_dir(const struct qx_ckpt *ck)
{
    return ck->dir;
}

bool qx_ckpt_is_single_file(const struct qx_ckpt *ck)
{
    return ck->single_file;
}

bool qx_ckpt_is_lone_config(const struct qx_ckpt *ck)
{
    return ck->lone_config;
}

bool qx_ckpt_has_index(const struct qx_ckpt *ck)
{
    return ck->has_index;
}

size_t qx_ckpt_n_files(const struct qx_ckpt *ck)
{
    return ck->n_files;
}

const struct qx_file *qx_ckpt_file(const struct qx_ckpt *ck, size_t i)
{
    return i < ck->n_files ? &ck->files[i] : NULL;
}

size_t qx_ckpt_n_tensors(const struct qx_ckpt *ck)
{
    return ck->n_tensors;
}

const struct qx_tensor *qx_ckpt_tensor(const struct qx_ckpt *ck, size_t i)
{
    return i < ck->n_tensors ? &ck->tensors[i] : NULL;
}

const struct qx_findings *qx_ckpt_findings(const struct qx_ckpt *ck)
{
    return ck->findings;
}

const struct qx_config *qx_ckpt_config(const struct qx_ckpt *ck)
{
    return ck->config;
}

const struct qx_blob *qx_ckpt_config_text(const struct qx_ckpt *ck)
{
    return &ck->config_text;
}

const struct qx_blob *qx_ckpt_hf_quant_text(const struct qx_ckpt *ck)
{
    return &ck->hf_quant_text;
}

const struct qx_resolved *qx_ckpt_resolved(const struct qx_ckpt *ck)
{
    return ck->resolved;
}

size_t qx_ckpt_n_extras(const struct qx_ckpt *ck)
{
    return ck->n_extras;
}

const struct qx_extra *qx_ckpt_extra(const struct qx_ckpt *ck, size_t i)
{
    return i < ck->n_extras ? &ck->extras[i] : NULL;
}

size_t qx_ckpt_n_absent(const struct qx_ckpt *ck)
{
    return ck->n_absent;
}

const struct qx_absent *qx_ckpt_absent(const struct qx_ckpt *ck, size_t i)
{
    return i < ck->n_absent ? &ck->absent[i] : NULL;
}

int qx_ckpt_config_status(const struct qx_ckpt *ck, struct qx_error *err)
{
    if (ck->config) {
        return 0;
    }
    if (err) {
        *err = ck->config_error;
    }
    return -(int)ck->config_error.code;
}

int qx_ckpt_require(const struct qx_ckpt *ck, struct qx_error *err)
{
    if (!ck->single_file) {
        int rc = qx_ckpt_config_status(ck, err);
        if (rc) {
            return rc;
        }
    }
    for (size_t i = 0; i < qx_findings_count(ck->findings); i++) {
        const struct qx_finding *f = qx_findings_at(ck->findings, i);
        bool decides = f->file && ((ck->index_name && strcmp(f->file, ck->index_name) == 0) ||
                                   strcmp(f->file, "hf_quant_config.json") == 0);
        if (!decides || f->severity != QX_ERROR) {
            continue;
        }
        /* static names of the kinds after which such a file says nothing that could be relied on */
        static const char *const fatal[] = {"json-bom", "json-syntax", "json-utf8", "json-too-deep",
                                            "index-format", "lfs-pointer", "unreadable-file"};
        for (size_t k = 0; k < QX_ARRAY_LEN(fatal); k++) {
            if (strcmp(f->kind, fatal[k]) == 0) {
                int rc = qx_fail(err, QX_E_FORMAT, fatal[k], "%s", f->text ? f->text : "unusable");
                qx_error_at(err, f->file, NULL, f->off);
                return rc;
            }
        }
    }
    return 0;
}

size_t qx_ckpt_lower_bound(const struct qx_ckpt *ck, const char *prefix, size_t n)
{
    size_t lo = 0, hi = ck->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct qx_tensor *t = &ck->tensors[mid];
        if (qx_name_compare(t->name, t->name_len, prefix, n) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

const struct qx_tensor *qx_ckpt_find_n(const struct qx_ckpt *ck, const char *name, size_t n)
{
    size_t i = qx_ckpt_lower_bound(ck, name, n);
    if (i == ck->n_tensors) {
        return NULL;
    }
    const struct qx_tensor *t = &ck->tensors[i];
    return t->name_len == n && memcmp(t->name, name, n) == 0 ? t : NULL;
}

const struct qx_tensor *qx_ckpt_find(const struct qx_ckpt *ck, const char *name)
{
    return qx_ckpt_find_n(ck, name, strlen(name));
}

/* Opens file i again when its descriptor was not kept, and checks that it is still the same file. */
static int file_fd(const struct qx_ckpt *ck, uint32_t i, int *fd, struct qx_error *err)
{
    struct ckpt_file *p = &ck->lazy->files[i];
    int rc = 0;
    pthread_mutex_lock(&ck->lazy->lock);
    if (p->fd < 0) {
        uint64_t size;
        struct stat st;
        int f;
        rc = qx_file_open(p->path, &f, &size, err);
        if (!rc && (fstat(f, &st) != 0 || st.st_dev != p->dev || st.st_ino != p->ino ||
                    size < ck->files[i].size_bytes)) {
            qx_file_close(f);
            rc = qx_fail(err, QX_E_IO, "file-changed", "is another file than at open");
        }
        if (!rc) {
            p->fd = f;
        }
    }
    *fd = p->fd;
    pthread_mutex_unlock(&ck->lazy->lock);
    return rc;
}

static bool usable(const struct qx_ckpt *ck, uint32_t file)
{
    return file < ck->n_files &&
           (ck->files[file].state == QX_FILE_OK || ck->files[file].state == QX_FILE_SHORT);
}

int qx_ckpt_fd(const struct qx_ckpt *ck, uint32_t file)
{
    int fd = -1;
    return usable(ck, file) && file_fd(ck, file, &fd, NULL) == 0 ? fd : -1;
}

static int check_range(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t off, uint64_t n,
                       struct qx_error *err)
{
    uint64_t end, file_end;
    int rc = 0;
    if (!usable(ck, t->file)) {
        rc = qx_fail(err, QX_E_FORMAT, "unreadable-file", "its file cannot be read");
    } else if (!t->readable && (!qx_add_u64(off, n, &end) || end > t->size_bytes)) {
        /* The shape is asked for, and the header gives the tensor another number of bytes. */
        rc = qx_fail(err, QX_E_FORMAT, "size-mismatch",
                     "its header gives it %" PRIu64 " bytes, its shape needs more", t->size_bytes);
    } else if (!qx_add_u64(off, n, &end) || end > t->size_bytes) {
        rc = qx_fail(err, QX_E_RANGE, "range", "bytes %" PRIu64 " to %" PRIu64 " are asked for, the tensor has %"
                     PRIu64, off, off + n, t->size_bytes);
    } else if (!qx_add_u64(t->off, end, &file_end) || file_end > ck->files[t->file].size_bytes) {
        rc = qx_fail(err, QX_E_FORMAT, ck->files[t->file].state == QX_FILE_SHORT ? "truncated" : "bad-offsets",
                     "bytes end at %" PRIu64 " of a file of %" PRIu64, t->off + end,
                     ck->files[t->file].size_bytes);
    }
    if (rc) {
        qx_error_at(err, t->file < ck->n_files ? ck->files[t->file].name : NULL, t->name, QX_NO_OFF);
    }
    return rc;
}

int qx_ckpt_read(const struct qx_ckpt *ck, const struct qx_tensor *t, uint64_t off, void *dst,
                 uint64_t size_bytes, struct qx_error *err)
{
    int fd;
    int rc = check_range(ck, t, off, size_bytes, err);
    if (rc) {
        return rc;
    }
    rc = file_fd(ck, t->file, &fd, err);
    if (!rc) {
        rc = qx_file_read(fd, dst, size_bytes, t->off + off, err);
    }
    if (rc) {
        qx_error_at(err, ck->files[t->file].name, t->name, QX_NO_OFF);
    }
    return rc;
}

const void *qx_ckpt_map(const struct qx_ckpt *ck, const struct qx_tensor *t, struct qx_error *err)
{
    int fd;
    if (check_range(ck, t, 0, t->size_bytes, err)) {
        return NULL;
    }
    int rc = file_fd(ck, t->file, &fd, err);
    const unsigned char *p = NULL;
    if (!rc) {
        struct ckpt_file *f = &ck->lazy->files[t->file];
        uint64_t size = ck->files[t->file].size_bytes;
        pthread_mutex_lock(&ck->lazy->lock);
        rc = f->map.p ? qx_file_check_size(fd, size, err) : qx_map_open(&f->map, fd, size, err);
        p = rc ? NULL : f->map.p + t->off;
        pthread_mutex_unlock(&ck->lazy->lock);
    }
    if (rc) {
        qx_error_at(err, ck->files[t->file].name, t->name, QX_NO_OFF);
    }
    return p;
}

int qx_ckpt_read_small(const struct qx_ckpt *ck, const char *name, uint64_t max_bytes, char **text,
                       size_t *n, bool *present, struct qx_error *err)
{
    *text = NULL;
    *n = 0;
    *present = false;
    if (!qx_name_stays_inside(name, strlen(name))) {
        int rc = qx_fail(err, QX_E_FORMAT, "unsafe-path", "the name leaves the checkpoint's directory");
        qx_error_at(err, name, NULL, QX_NO_OFF);
        return rc;
    }
    struct qx_buf path = {0};
    qx_buf_fmt(&path, "%s/%s", ck->dir, name);
    const char *p = qx_buf_cstr(&path);
    struct stat st;
    int rc = 0;
    if (!p) {
        rc = qx_fail_nomem(err);
    } else if (lstat(p, &st) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        rc = 0;
    } else {
        rc = qx_file_read_all(p, max_bytes, text, n, err);
        *present = rc == 0;
    }
    qx_buf_fini(&path);
    if (rc) {
        qx_error_at(err, name, NULL, QX_NO_OFF);
    }
    return rc;
}
