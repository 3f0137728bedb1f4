/* out_dir.c: see out_dir.h. A note is a line with a checksum, so that a torn last line is seen and
 * dropped. */
#include "out_dir.h"

#include "alloc.h"
#include "file_map.h"
#include "file_out.h"
#include "str.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#define MAX_JOURNAL_BYTES (64u << 20)
#define MAX_DEPTH 16

struct qx_out_dir {
    char *target, *part;
    int journal;
    uint64_t journal_bytes;
    bool force;
    struct qx_out_names names;
    char *text; /* the journal as found */
    const char **notes;
    size_t n_notes, cap;
};

static int io_failed(const char *path, int sys, const char *what, struct qx_error *err)
{
    int rc = qx_fail_errno(err, QX_E_WRITE, sys, "write", "cannot %s", what);
    qx_error_at(err, path, NULL, QX_NO_OFF);
    return rc;
}

/* Removes a directory with what is in it; never follows a link. */
static int remove_tree(int at, const char *name, unsigned depth)
{
    if (unlinkat(at, name, 0) == 0 || errno == ENOENT) {
        return 0;
    }
    int fd =
        depth < MAX_DEPTH ? openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    int rc = 0;
    for (struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            rc = remove_tree(fd, e->d_name, depth + 1) != 0 ? -1 : rc;
        }
    }
    closedir(dir);
    return unlinkat(at, name, AT_REMOVEDIR) != 0 ? -1 : rc;
}

static void release(struct qx_out_dir *d)
{
    if (d->journal >= 0) {
        close(d->journal);
    }
    qx_free(d->target);
    qx_free(d->part);
    qx_free(d->text);
    qx_free(d->notes);
    qx_free(d);
}

static uint32_t line_hash(const char *s, size_t n)
{
    return XXH32(s, n, 0);
}

/* Splits the journal into lines "text #hash"; stops at the first that is not whole. */
static int read_notes(struct qx_out_dir *d, struct qx_error *err)
{
    struct stat st;
    if (fstat(d->journal, &st) != 0) {
        return io_failed(d->part, errno, "look at the journal", err);
    }
    size_t n = (uint64_t)st.st_size < MAX_JOURNAL_BYTES ? (size_t)st.st_size : MAX_JOURNAL_BYTES;
    d->text = qx_malloc(n + 1);
    if (d->text == NULL) {
        return qx_fail_nomem(err);
    }
    int rc = qx_file_read(d->journal, d->text, n, 0, err);
    if (rc) {
        qx_error_at(err, d->part, NULL, QX_NO_OFF);
        return rc;
    }
    d->text[n] = 0;
    char *p = d->text;
    for (char *end; (end = strchr(p, '\n')) != NULL; p = end + 1) {
        char want[16];
        char *hash = end - p > 10 ? end - 10 : NULL;
        if (hash == NULL || memcmp(hash, " #", 2) != 0) {
            break;
        }
        snprintf(want, sizeof want, "%08" PRIx32, line_hash(p, (size_t)(hash - p)));
        if (memcmp(hash + 2, want, 8) != 0) {
            break;
        }
        *hash = 0;
        if (!qx_grow((void **)&d->notes, &d->cap, d->n_notes + 1, sizeof *d->notes)) {
            return qx_fail_nomem(err);
        }
        d->notes[d->n_notes++] = p;
        d->journal_bytes = (uint64_t)(end + 1 - d->text);
    }
    return 0;
}

static int append(struct qx_out_dir *d, const char *line, struct qx_error *err)
{
    struct qx_buf b = {0};
    size_t n = strlen(line);
    qx_buf_add(&b, line, n);
    qx_buf_fmt(&b, " #%08" PRIx32 "\n", line_hash(line, n));
    int rc = b.failed ? qx_fail_nomem(err)
                      : qx_pwrite_all(d->journal, b.p, b.n, d->journal_bytes, d->part, err);
    if (rc == 0) {
        d->journal_bytes += b.n;
        rc = fdatasync(d->journal) != 0 ? io_failed(d->part, errno, "sync the journal", err) : 0;
    }
    qx_buf_fini(&b);
    return rc;
}

/* A directory without a journal of ours is not ours to fill or remove. */
static bool only_journal(const char *path)
{
    DIR *dir = opendir(path);
    bool only = dir != NULL;
    for (struct dirent *e = only ? readdir(dir) : NULL; e != NULL; e = readdir(dir)) {
        only = only && (e->d_name[0] == '.' &&
                        (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
                         strcmp(e->d_name, QX_JOURNAL) == 0));
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return only;
}

static int open_journal(struct qx_out_dir *d, const char *plan, bool resume, struct qx_error *err)
{
    char *path = qx_out_dir_join(d, QX_JOURNAL), first[128];
    if (path == NULL) {
        return qx_fail_nomem(err);
    }
    int rc = 0;
    snprintf(first, sizeof first, "qx-journal 1 %.80s", plan);
    for (int attempt = 0; attempt < 2; attempt++) {
        if (mkdir(d->part, 0777) != 0 && errno != EEXIST) {
            rc = io_failed(d->part, errno, "create the directory", err);
            break;
        }
        d->journal = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (d->journal < 0) {
            rc = io_failed(path, errno, "create the journal", err);
            break;
        }
        if (flock(d->journal, LOCK_EX | LOCK_NB) != 0) {
            rc = qx_fail(err, QX_E_USAGE, "busy", "another run is at work on '%.300s'", d->part);
            break;
        }
        rc = read_notes(d, err);
        if (rc != 0) {
            break;
        }
        bool fresh = d->n_notes == 0, same = !fresh && strcmp(d->notes[0], first) == 0;
        if (resume && same) {
            memmove(d->notes, d->notes + 1, (d->n_notes - 1) * sizeof *d->notes);
            d->n_notes--;
            if (ftruncate(d->journal, (off_t)d->journal_bytes) != 0) {
                rc = io_failed(path, errno, "mend the journal", err);
            }
            break;
        }
        if (resume && !fresh) {
            rc = qx_fail(
                err, QX_E_USAGE, "plan-differs",
                "'%.200s' holds the unfinished output of another plan (other options or another "
                "input); give --no-resume to start again",
                d->part);
            break;
        }
        if (attempt == 0 && !fresh) {
            /* Start again from nothing. */
            close(d->journal);
            d->journal = -1;
            qx_free(d->text);
            qx_free(d->notes);
            d->text = NULL;
            d->notes = NULL;
            d->n_notes = d->cap = 0;
            d->journal_bytes = 0;
            if (remove_tree(AT_FDCWD, d->part, 0) != 0) {
                rc = io_failed(d->part, errno, "remove the unfinished output", err);
                break;
            }
            continue;
        }
        if (!only_journal(d->part)) {
            rc = qx_fail(err, QX_E_USAGE, "exists", "'%.300s' exists and holds other files",
                         d->part);
            break;
        }
        d->journal_bytes = 0;
        rc = ftruncate(d->journal, 0) != 0 ? io_failed(path, errno, "start the journal", err)
                                           : append(d, first, err);
        break;
    }
    qx_free(path);
    return rc;
}

static bool is_ours(const struct qx_out_dir *d, const char *name, bool is_dir, bool unfinished)
{
    size_t n = strlen(name);
    if (strcmp(name, QX_JOURNAL) == 0 || d->names.ours(d->names.user, name, is_dir)) {
        return true;
    }
    if (!unfinished || is_dir || n < 6 || n >= PATH_MAX || strcmp(name + n - 5, ".part") != 0) {
        return false;
    }
    char whole[PATH_MAX]; /* a file that is renamed when it is complete */
    memcpy(whole, name, n - 5);
    whole[n - 5] = 0;
    return d->names.ours(d->names.user, whole, false);
}

/* Nothing but what the plan writes may be in the part: it would be put in place with the rest.
 * name: of the folder at fd relative to the part, "" for the part itself. */
static int only_ours(const struct qx_out_dir *d, int fd, const char *name, bool unfinished,
                     struct qx_error *err)
{
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        int rc = io_failed(d->part, errno, "list the directory", err);
        if (fd >= 0) {
            close(fd);
        }
        return rc;
    }
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(dir)) != NULL;) {
        char path[PATH_MAX];
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        int n = snprintf(path, sizeof path, "%s%s%s", name, name[0] != 0 ? "/" : "", e->d_name);
        bool is_dir = fstatat(fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
        if (n < 0 || (size_t)n >= sizeof path || !is_ours(d, path, is_dir, unfinished)) {
            rc = qx_fail(err, QX_E_USAGE, "foreign-file",
                         "'%.200s' holds '%.200s', which is not of this output: move it elsewhere",
                         d->part, path);
            qx_error_at(err, d->part, NULL, QX_NO_OFF);
        } else if (is_dir) {
            rc = only_ours(d, openat(fd, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
                           path, unfinished, err);
        }
    }
    closedir(dir);
    return rc;
}

static int check_names(const struct qx_out_dir *d, bool unfinished, struct qx_error *err)
{
    return only_ours(d, open(d->part, O_RDONLY | O_DIRECTORY | O_CLOEXEC), "", unfinished, err);
}

/* Replacing removes a whole tree: only one that is empty or that qx could have written. */
static bool may_replace(const char *target)
{
    static const char *const marks[] = {"config.json", QX_ARCHIVE_LIST};
    struct stat st;
    DIR *dir = lstat(target, &st) == 0 && S_ISDIR(st.st_mode) ? opendir(target) : NULL;
    if (dir == NULL) {
        return lstat(target, &st) != 0 || !S_ISDIR(st.st_mode);
    }
    bool empty = true, marked = false;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        empty = empty && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0);
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(marks); i++) {
        marked = marked || fstatat(dirfd(dir), marks[i], &st, 0) == 0;
    }
    closedir(dir);
    return empty || marked;
}

int qx_out_dir_begin(struct qx_out_dir **out, const char *target, const char *plan,
                     const struct qx_out_names *names, bool force, bool resume, struct qx_error *err)
{
    *out = NULL;
    struct stat st;
    if (!force && lstat(target, &st) == 0) {
        int rc = qx_fail(err, QX_E_USAGE, "exists", "'%.300s' exists; give --force to replace it",
                         target);
        qx_error_at(err, target, NULL, QX_NO_OFF);
        return rc;
    }
    if (!may_replace(target)) {
        int rc = qx_fail(err, QX_E_USAGE, "exists",
                         "'%.300s' holds neither a checkpoint nor an archive: not replaced", target);
        qx_error_at(err, target, NULL, QX_NO_OFF);
        return rc;
    }
    struct qx_out_dir *d = qx_calloc(1, sizeof *d);
    if (d == NULL) {
        return qx_fail_nomem(err);
    }
    size_t n = strlen(target);
    while (n > 1 && target[n - 1] == '/') {
        n--;
    }
    d->journal = -1;
    d->force = force;
    d->names = *names;
    d->target = qx_strndup(target, n);
    d->part = qx_malloc(n + 6);
    int rc = d->target == NULL || d->part == NULL ? qx_fail_nomem(err) : 0;
    if (rc == 0) {
        memcpy(d->part, target, n);
        memcpy(d->part + n, ".part", 6);
        rc = open_journal(d, plan, resume, err);
        rc = rc == 0 ? check_names(d, true, err) : rc;
    }
    if (rc != 0) {
        release(d);
        return rc;
    }
    *out = d;
    return 0;
}

const char *qx_out_dir_part(const struct qx_out_dir *d)
{
    return d->part;
}

char *qx_out_dir_join(const struct qx_out_dir *d, const char *name)
{
    size_t a = strlen(d->part), b = strlen(name);
    char *p = qx_malloc(a + b + 2);
    if (p != NULL) {
        memcpy(p, d->part, a);
        p[a] = '/';
        memcpy(p + a + 1, name, b + 1);
    }
    return p;
}

size_t qx_out_dir_n_notes(const struct qx_out_dir *d)
{
    return d->n_notes;
}

const char *qx_out_dir_note_at(const struct qx_out_dir *d, size_t i)
{
    return d->notes[i];
}

int qx_out_dir_note(struct qx_out_dir *d, const char *line, struct qx_error *err)
{
    return append(d, line, err);
}

static int put_in_place(struct qx_out_dir *d, struct qx_error *err)
{
    struct stat st;
    if (lstat(d->target, &st) != 0) {
        return rename(d->part, d->target) != 0 ? io_failed(d->target, errno, "rename", err) : 0;
    }
    if (!d->force) {
        return qx_fail(err, QX_E_USAGE, "exists", "'%.300s' has appeared meanwhile", d->target);
    }
    /* Exchange, so that there is a whole directory at every moment. */
    if (renameat2(AT_FDCWD, d->part, AT_FDCWD, d->target, RENAME_EXCHANGE) == 0) {
        return remove_tree(AT_FDCWD, d->part, 0) != 0
                   ? io_failed(d->part, errno, "remove the replaced output", err)
                   : 0;
    }
    size_t cap = strlen(d->target) + sizeof ".old";
    char *old = qx_malloc(cap);
    if (old == NULL) {
        return qx_fail_nomem(err);
    }
    snprintf(old, cap, "%s.old", d->target);
    int rc = 0;
    if (rename(d->target, old) != 0 || rename(d->part, d->target) != 0) {
        rc = io_failed(d->target, errno, "rename", err);
    } else if (remove_tree(AT_FDCWD, old, 0) != 0) {
        rc = io_failed(old, errno, "remove the replaced output", err);
    }
    qx_free(old);
    return rc;
}

int qx_out_dir_commit(struct qx_out_dir *d, struct qx_error *err)
{
    char *journal = qx_out_dir_join(d, QX_JOURNAL);
    int rc = journal == NULL ? qx_fail_nomem(err) : check_names(d, false, err);
    if (rc == 0 && unlink(journal) != 0) {
        rc = io_failed(journal, errno, "remove the journal", err);
    }
    rc = rc == 0 ? qx_sync_parent(journal, err) : rc;
    rc = rc == 0 ? put_in_place(d, err) : rc;
    rc = rc == 0 ? qx_sync_parent(d->target, err) : rc;
    qx_free(journal);
    release(d);
    return rc;
}

void qx_out_dir_keep(struct qx_out_dir *d)
{
    if (d != NULL) {
        release(d);
    }
}

void qx_out_dir_discard(struct qx_out_dir *d)
{
    if (d != NULL) {
        remove_tree(AT_FDCWD, d->part, 0);
        release(d);
    }
}

static bool lies_in(const char *path, const char *dir)
{
    size_t n = strlen(dir);
    return strncmp(path, dir, n) == 0 && (path[n] == '/' || path[n] == 0 || strcmp(dir, "/") == 0);
}

/* True when replacing the directory at target would take the input with it: target holds dir, or a
 * file that a link in dir names, as the blobs of a hub's cache are. */
static bool holds_input(const char *target, const char *dir)
{
    char file[PATH_MAX], real[PATH_MAX];
    bool holds = lies_in(dir, target);
    DIR *d = holds ? NULL : opendir(dir);
    for (struct dirent *e; d != NULL && !holds && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        int n = snprintf(file, sizeof file, "%s/%s", dir, e->d_name);
        holds = n > 0 && (size_t)n < sizeof file && realpath(file, real) != NULL && lies_in(real, target);
    }
    if (d != NULL) {
        closedir(d);
    }
    return holds;
}

int qx_out_dir_check(const char *dir, const char *target, struct qx_error *err)
{
    char in[PATH_MAX], out[PATH_MAX], parent[PATH_MAX];
    size_t n = strlen(target);
    while (n > 1 && target[n - 1] == '/') {
        n--;
    }
    if (n == 0 || n >= PATH_MAX - 8) {
        return qx_fail(err, QX_E_USAGE, "usage", "the output's name is %s",
                       n == 0 ? "empty" : "too long");
    }
    memcpy(parent, target, n);
    parent[n] = 0;
    struct stat st;
    if (stat(parent, &st) == 0 && !S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) {
        return qx_fail(err, QX_E_USAGE, "exists", "'%.200s' is a device, pipe or socket", target);
    }
    if (realpath(dir, in) == NULL) {
        return 0;
    }
    bool same = realpath(parent, out) != NULL && strcmp(in, out) == 0;
    bool holds = !same && realpath(parent, out) != NULL && holds_input(out, in);
    memcpy(parent + n, ".part", 6); /* unfinished output, which --no-resume removes */
    holds = holds || (realpath(parent, out) != NULL && holds_input(out, in));
    parent[n] = 0;
    if (holds) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "the output '%.200s' holds files of the input, which is never changed", target);
    }
    char *slash = strrchr(parent, '/');
    const char *up = slash == NULL ? "." : slash == parent ? "/" : parent;
    if (slash != NULL && slash != parent) {
        *slash = 0;
    }
    if (realpath(up, out) == NULL) {
        int rc = qx_fail_errno(err, QX_E_WRITE, errno, "write", "the output's folder cannot be used");
        qx_error_at(err, up, NULL, QX_NO_OFF);
        return rc;
    }
    if (same || lies_in(out, in)) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "the output '%.200s' is the input or lies in it, which is "
                       "never changed",
                       target);
    }
    return 0;
}

uint64_t qx_out_dir_free(const char *target)
{
    char up[PATH_MAX];
    struct statvfs v;
    size_t n = strlen(target);
    while (n > 1 && target[n - 1] == '/') {
        n--;
    }
    while (n > 0 && target[n - 1] != '/') {
        n--;
    }
    if (n >= sizeof up) {
        return UINT64_MAX;
    }
    memcpy(up, n == 0 ? "." : target, n == 0 ? 1 : n);
    up[n == 0 ? 1 : n] = 0;
    return statvfs(up, &v) == 0 ? (uint64_t)v.f_bavail * v.f_frsize : UINT64_MAX;
}

/* ---- copying ------------------------------------------------------------------------------ */

static int copy_failed(int sys, bool reading, const char *src_name, const char *dst_name,
                       struct qx_error *err)
{
    int rc = reading && sys == 0 ? qx_fail(err, QX_E_FORMAT, "truncated", "the file ends too early")
                                 : qx_fail_errno(err, reading ? QX_E_IO : QX_E_WRITE, sys,
                                                 reading ? "read" : "write", "cannot %s",
                                                 reading ? "read" : "write");
    qx_error_at(err, reading ? src_name : dst_name, NULL, QX_NO_OFF);
    return rc;
}

static int copy_by_hand(int src, uint64_t src_off, int dst, uint64_t dst_off, uint64_t n,
                        const char *src_name, const char *dst_name, struct qx_error *err)
{
    size_t cap = n < (1u << 20) ? (size_t)n : 1u << 20;
    char *buf = qx_malloc(cap + 1);
    int rc = buf == NULL ? qx_fail_nomem(err) : 0;
    while (rc == 0 && n > 0) {
        ssize_t k = pread(src, buf, n < cap ? (size_t)n : cap, (off_t)src_off);
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k <= 0) {
            rc = copy_failed(k < 0 ? errno : 0, true, src_name, dst_name, err);
            break;
        }
        rc = qx_pwrite_all(dst, buf, (size_t)k, dst_off, dst_name, err);
        src_off += (uint64_t)k;
        dst_off += (uint64_t)k;
        n -= (uint64_t)k;
    }
    qx_free(buf);
    return rc;
}

static int copy_data(int src, uint64_t src_off, int dst, uint64_t dst_off, uint64_t n,
                     const char *src_name, const char *dst_name, struct qx_error *err)
{
    while (n > 0) {
        off_t a = (off_t)src_off, b = (off_t)dst_off;
        size_t want = n < (64u << 20) ? (size_t)n : 64u << 20;
        ssize_t k = copy_file_range(src, &a, dst, &b, want, 0);
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k < 0 && (errno == EXDEV || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP ||
                      errno == EBADF || errno == EPERM)) {
            return copy_by_hand(src, src_off, dst, dst_off, n, src_name, dst_name, err);
        }
        if (k < 0) {
            return copy_failed(errno, errno == EIO, src_name, dst_name, err);
        }
        if (k == 0) {
            return copy_failed(0, true, src_name, dst_name, err);
        }
        src_off += (uint64_t)k;
        dst_off += (uint64_t)k;
        n -= (uint64_t)k;
    }
    return 0;
}

int qx_copy_range(int src, uint64_t src_off, int dst, uint64_t dst_off, uint64_t n,
                  const char *src_name, const char *dst_name, struct qx_error *err)
{
    int rc = 0;
    while (rc == 0 && n > 0) {
        off_t data = lseek(src, (off_t)src_off, SEEK_DATA);
        uint64_t skip = 0, k = n;
        if (data < 0 && errno == ENXIO) {
            struct stat st;
            if (fstat(src, &st) != 0 || (uint64_t)st.st_size < src_off + n) {
                return copy_failed(0, true, src_name, dst_name, err);
            }
            return 0; /* a hole to the end */
        }
        if (data >= 0) {
            skip = (uint64_t)data - src_off < n ? (uint64_t)data - src_off : n;
            off_t hole = lseek(src, data, SEEK_HOLE);
            k = hole > data && (uint64_t)(hole - data) < n - skip ? (uint64_t)(hole - data)
                                                                  : n - skip;
        }
        rc = copy_data(src, src_off + skip, dst, dst_off + skip, k, src_name, dst_name, err);
        src_off += skip + k;
        dst_off += skip + k;
        n -= skip + k;
    }
    return rc;
}

bool qx_clone_file(int src, int dst)
{
    return ioctl(dst, FICLONE, src) == 0;
}
