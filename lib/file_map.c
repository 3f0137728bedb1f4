/* file_map.c: owns nothing but maps between open and close. Sizes are compared with what fstat says,
 * never trusted from the content of a file. */
#include "file_map.h"

#include "alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int qx_file_open(const char *path, int *fd, uint64_t *size_bytes, struct qx_error *err)
{
    *fd = -1;
    *size_bytes = 0;
    /* O_NONBLOCK: a pipe of this name must not hang us before fstat can refuse it. */
    int f = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    if (f < 0 || fstat(f, &st) != 0) {
        int sys = errno;
        bool absent = sys == ENOENT || sys == ENOTDIR;
        if (f >= 0) {
            close(f);
        }
        return qx_fail_errno(err, absent ? QX_E_NOT_FOUND : QX_E_IO, sys,
                             absent ? "not-found" : "unreadable-file", "cannot open");
    }
    if (!S_ISREG(st.st_mode)) {
        close(f);
        return qx_fail(err, QX_E_IO, "not-a-file", "is %s, expected a regular file",
                       S_ISDIR(st.st_mode) ? "a directory" : "a device or pipe");
    }
    *fd = f;
    *size_bytes = (uint64_t)st.st_size;
    return 0;
}

void qx_file_close(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

int qx_file_read(int fd, void *dst, uint64_t n, uint64_t off, struct qx_error *err)
{
    char *p = dst;
    while (n) {
        size_t piece = n < ((uint64_t)1 << 30) ? (size_t)n : (size_t)1 << 30;
        ssize_t got = pread(fd, p, piece, (off_t)off);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            int rc = qx_fail_errno(err, QX_E_IO, errno, "read-error", "cannot read %" PRIu64 " bytes", n);
            qx_error_at(err, NULL, NULL, off);
            return rc;
        }
        if (got == 0) {
            int rc = qx_fail(err, QX_E_IO, "file-changed",
                             "file ends at %" PRIu64 ", %" PRIu64 " bytes short: it was cut while in use",
                             off, n);
            qx_error_at(err, NULL, NULL, off);
            return rc;
        }
        p += got;
        off += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return 0;
}

int qx_file_read_all(const char *path, uint64_t max_bytes, char **text, size_t *n, struct qx_error *err)
{
    int fd;
    uint64_t size;
    *text = NULL;
    *n = 0;
    int rc = qx_file_open(path, &fd, &size, err);
    if (rc) {
        return rc;
    }
    if (size > max_bytes || size >= SIZE_MAX) {
        close(fd);
        return qx_fail(err, QX_E_FORMAT, "too-large", "has %" PRIu64 " bytes, at most %" PRIu64 " are read",
                       size, max_bytes);
    }
    char *p = qx_malloc((size_t)size + 1);
    rc = p ? qx_file_read(fd, p, size, 0, err) : qx_fail_nomem(err);
    close(fd);
    if (rc) {
        qx_free(p);
        return rc;
    }
    p[size] = '\0';
    *text = p;
    *n = (size_t)size;
    return 0;
}

int qx_file_check_size(int fd, uint64_t size_bytes, struct qx_error *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return qx_fail_errno(err, QX_E_IO, errno, "read-error", "cannot examine");
    }
    if ((uint64_t)st.st_size < size_bytes) {
        return qx_fail(err, QX_E_IO, "file-changed", "file has %" PRIu64 " bytes, had %" PRIu64
                       " when opened: it was cut while in use", (uint64_t)st.st_size, size_bytes);
    }
    return 0;
}

int qx_map_open(struct qx_map *m, int fd, uint64_t size_bytes, struct qx_error *err)
{
    *m = (struct qx_map){0};
    int rc = qx_file_check_size(fd, size_bytes, err);
    if (rc) {
        return rc;
    }
    void *p = mmap(NULL, (size_t)size_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        return qx_fail_errno(err, QX_E_IO, errno, "read-error", "cannot map %" PRIu64 " bytes", size_bytes);
    }
    *m = (struct qx_map){p, size_bytes};
    return 0;
}

void qx_map_close(struct qx_map *m)
{
    if (m && m->p) {
        munmap((void *)(uintptr_t)m->p, (size_t)m->size_bytes);
        *m = (struct qx_map){0};
    }
}

bool qx_name_stays_inside(const char *name, size_t n)
{
    if (n == 0 || name[0] == '/' || memchr(name, '\0', n)) {
        return false;
    }
    for (size_t i = 0; i < n;) {
        const char *slash = memchr(name + i, '/', n - i);
        size_t len = slash ? (size_t)(slash - (name + i)) : n - i;
        if (len == 2 && name[i] == '.' && name[i + 1] == '.') {
            return false;
        }
        i += len + 1;
    }
    return name[n - 1] != '/';
}
