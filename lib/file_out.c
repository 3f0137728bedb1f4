/* file_out.c: see file_out.h. */
#include "file_out.h"

#include "alloc.h"
#include "file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BUFFER_BYTES (256u * 1024)

struct qx_file_out {
    char *path, *part;
    int fd;
    char *buf;
    size_t n;
    uint64_t written; /* behind the buffer's content */
    bool failed;
};

static int write_failed(const char *path, int sys, struct qx_error *err)
{
    int rc = qx_fail_errno(err, QX_E_WRITE, sys, "write", "cannot write");
    qx_error_at(err, path, NULL, QX_NO_OFF);
    return rc;
}

int qx_pwrite_all(int fd, const void *p, size_t n, uint64_t off, const char *path,
                  struct qx_error *err)
{
    const char *c = p;
    while (n > 0) {
        ssize_t k = pwrite(fd, c, n, (off_t)off);
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k <= 0) {
            return write_failed(path, k < 0 ? errno : ENOSPC, err);
        }
        c += k;
        n -= (size_t)k;
        off += (uint64_t)k;
    }
    return 0;
}

int qx_sync_parent(const char *path, struct qx_error *err)
{
    /* No heap: this runs after a rename that succeeded, and memory must not make it fail. */
    char dir[PATH_MAX] = ".";
    const char *slash = strrchr(path, '/');
    if (slash != NULL) {
        size_t n = slash == path ? 1 : (size_t)(slash - path);
        if (n >= sizeof dir) {
            return 0; /* the kernel would not have taken such a path */
        }
        memcpy(dir, path, n);
        dir[n] = 0;
    }
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Some filesystems cannot sync a directory; that is not a failure of the write. */
    int rc = 0;
    if (fd < 0) {
        rc = write_failed(dir, errno, err);
    } else {
        if (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) {
            rc = write_failed(dir, errno, err);
        }
        close(fd);
    }
    return rc;
}

static void release(struct qx_file_out *f)
{
    if (f->fd >= 0) {
        close(f->fd);
    }
    qx_free(f->path);
    qx_free(f->part);
    qx_free(f->buf);
    qx_free(f);
}

static int start(struct qx_file_out **out, const char *path, bool force, uint64_t keep,
                 struct qx_error *err)
{
    *out = NULL;
    struct stat st;
    if (!force && lstat(path, &st) == 0) {
        int rc =
            qx_fail(err, QX_E_USAGE, "exists", "'%.300s' exists; give --force to replace it", path);
        qx_error_at(err, path, NULL, QX_NO_OFF);
        return rc;
    }
    /* The rename would put a file in the place of /dev/null, for everyone on the machine. */
    bool in_dev = strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0;
    if (stat(path, &st) == 0 && ((!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) || in_dev)) {
        int rc = qx_fail(err, QX_E_USAGE, "exists",
                         "'%.200s' is a device, pipe or socket; an output is a file of its own", path);
        qx_error_at(err, path, NULL, QX_NO_OFF);
        return rc;
    }
    struct qx_file_out *f = qx_calloc(1, sizeof *f);
    if (f == NULL) {
        return qx_fail_nomem(err);
    }
    size_t n = strlen(path);
    f->fd = -1;
    f->path = qx_strdup(path);
    f->part = qx_malloc(n + 6);
    f->buf = qx_malloc(BUFFER_BYTES);
    if (f->path == NULL || f->part == NULL || f->buf == NULL) {
        release(f);
        return qx_fail_nomem(err);
    }
    memcpy(f->part, path, n);
    memcpy(f->part + n, ".part", 6);
    f->fd = open(f->part, O_RDWR | O_CREAT | (keep == 0 ? O_TRUNC : 0) | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (f->fd >= 0 && keep > 0) {
        f->written = fstat(f->fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size >= keep ? keep : 0;
    }
    if (f->fd < 0 || (keep > 0 && ftruncate(f->fd, (off_t)f->written) != 0)) {
        int rc = write_failed(f->part, errno, err);
        release(f);
        return rc;
    }
    *out = f;
    return 0;
}

int qx_file_out_create(struct qx_file_out **out, const char *path, bool force, struct qx_error *err)
{
    return start(out, path, force, 0, err);
}

int qx_file_out_resume(struct qx_file_out **out, const char *path, uint64_t keep, struct qx_error *err)
{
    return start(out, path, true, keep, err);
}

static int flush(struct qx_file_out *f, struct qx_error *err)
{
    int rc = qx_pwrite_all(f->fd, f->buf, f->n, f->written, f->part, err);
    f->failed = f->failed || rc != 0;
    f->written += f->n;
    f->n = 0;
    return rc;
}

int qx_file_out_write(struct qx_file_out *f, const void *p, size_t n, struct qx_error *err)
{
    int rc = 0;
    if (f->failed) {
        return write_failed(f->part, EIO, err);
    }
    if (f->n + n > BUFFER_BYTES) {
        rc = flush(f, err);
    }
    if (rc == 0 && n >= BUFFER_BYTES) {
        rc = qx_pwrite_all(f->fd, p, n, f->written, f->part, err);
        f->failed = rc != 0;
        f->written += n;
    } else if (rc == 0) {
        memcpy(f->buf + f->n, p, n);
        f->n += n;
    }
    return rc;
}

int qx_file_out_rewrite(struct qx_file_out *f, uint64_t off, const void *p, size_t n,
                        struct qx_error *err)
{
    int rc = flush(f, err);
    return rc == 0 ? qx_pwrite_all(f->fd, p, n, off, f->part, err) : rc;
}

int qx_file_out_sync(struct qx_file_out *f, struct qx_error *err)
{
    int rc = f->failed ? write_failed(f->part, EIO, err) : flush(f, err);
    if (rc == 0 && fdatasync(f->fd) != 0) {
        rc = write_failed(f->part, errno, err);
        f->failed = true;
    }
    return rc;
}

int qx_file_out_read(const struct qx_file_out *f, uint64_t off, void *dst, size_t n, struct qx_error *err)
{
    int rc = qx_file_read(f->fd, dst, n, off, err);
    qx_error_at(rc != 0 ? err : NULL, f->part, NULL, off);
    return rc;
}

uint64_t qx_file_out_size(const struct qx_file_out *f)
{
    return f->written + f->n;
}

int qx_file_out_commit(struct qx_file_out *f, struct qx_error *err)
{
    int rc = f->failed ? write_failed(f->part, EIO, err) : flush(f, err);
    if (rc == 0 && fsync(f->fd) != 0) {
        rc = write_failed(f->part, errno, err);
    }
    if (rc == 0 && rename(f->part, f->path) != 0) {
        rc = write_failed(f->path, errno, err);
    }
    if (rc == 0) {
        rc = qx_sync_parent(f->path, err);
    } else {
        unlink(f->part);
    }
    release(f);
    return rc;
}

void qx_file_out_leave(struct qx_file_out *f)
{
    if (f != NULL) {
        release(f);
    }
}

void qx_file_out_abort(struct qx_file_out *f)
{
    if (f != NULL) {
        unlink(f->part);
        release(f);
    }
}

int qx_file_out_small(const char *path, const void *p, size_t n, struct qx_error *err)
{
    struct qx_file_out *f;
    int rc = qx_file_out_create(&f, path, true, err);
    if (rc != 0) {
        return rc;
    }
    rc = qx_file_out_write(f, p, n, err);
    if (rc != 0) {
        qx_file_out_abort(f);
        return rc;
    }
    return qx_file_out_commit(f, err);
}
