/* hub.c: finds the hub's checksums. Reads names, links and the hub's small records, none of the files.
 *
 * In the hub's cache every file is a symbolic link to blobs/ETAG. In a folder that was downloaded into,
 * .cache/huggingface/download/NAME.metadata has the ETAG in its second line. An ETAG is the SHA-256 of a
 * large file (64 digits) or what git calls a small one (40 digits); anything else is no checksum. */
#include "hub.h"

#include "alloc.h"
#include "ckpt.h"
#include "dir_list.h"
#include "manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The last part of a link's target if the part before it is "blobs". */
static bool etag_of_link(int dir, const char *name, char *out, size_t cap)
{
    char target[PATH_MAX];
    static const char blobs[] = "blobs";
    ssize_t n = readlinkat(dir, name, target, sizeof target - 1);
    if (n <= 0) {
        return false;
    }
    target[n] = '\0';
    char *last = strrchr(target, '/');
    if (!last || strlen(last + 1) >= cap) {
        return false;
    }
    *last = '\0';
    const char *up = strrchr(target, '/');
    snprintf(out, cap, "%s", last + 1);
    return strcmp(up ? up + 1 : target, blobs) == 0;
}

/* The second line of the record of a download. */
static bool etag_of_record(int dir, const char *name, char *out, size_t cap)
{
    char path[PATH_MAX], text[1024];
    int n = snprintf(path, sizeof path, ".cache/huggingface/download/%s.metadata", name);
    if (n < 0 || (size_t)n >= sizeof path) {
        return false;
    }
    int fd = openat(dir, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return false;
    }
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) {
        return false;
    }
    text[got] = '\0';
    const char *line = strchr(text, '\n');
    size_t len = line ? strcspn(++line, "\r\n") : 0;
    if (len == 0 || len >= cap) {
        return false;
    }
    memcpy(out, line, len);
    out[len] = '\0';
    return true;
}

static void put_file(struct qx_buf *b, int dir, const char *name)
{
    char etag[2 * QX_DIGEST_MAX + 1];
    uint8_t digest[QX_DIGEST_MAX];
    struct stat st;
    if (name[0] == '.' || fstatat(dir, name, &st, 0) != 0 || !S_ISREG(st.st_mode) ||
        (!etag_of_link(dir, name, etag, sizeof etag) && !etag_of_record(dir, name, etag, sizeof etag))) {
        return;
    }
    enum qx_digest kind = strlen(etag) == 2 * qx_digest_size(QX_DIGEST_SHA256) ? QX_DIGEST_SHA256 : QX_DIGEST_GIT;
    if (qx_digest_parse(etag, kind, digest)) {
        qx_manifest_put_file(b, kind, digest, (uint64_t)st.st_size, name);
    }
}

int qx_hub_list(const struct qx_ckpt *ck, struct qx_buf *b, struct qx_error *err)
{
    const char *dir = qx_ckpt_dir(ck)[0] ? qx_ckpt_dir(ck) : ".";
    struct qx_dir_list l;
    int rc = qx_dir_list_read(&l, dir, err);
    if (rc) {
        return rc;
    }
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        qx_fail_errno(err, QX_E_IO, errno, "unreadable-file", "cannot open the directory");
        rc = qx_error_at(err, dir, NULL, QX_NO_OFF);
    } else {
        qx_manifest_put_head(b);
        size_t empty = b->n;
        for (size_t i = 0; i < l.n; i++) {
            if (!qx_ckpt_is_single_file(ck) || strcmp(l.names[i], qx_ckpt_file(ck, 0)->name) == 0) {
                put_file(b, fd, l.names[i]);
            }
        }
        close(fd);
        if (b->failed) {
            rc = qx_fail_nomem(err);
        } else if (b->n == empty) {
            rc = qx_fail(err, QX_E_NOT_FOUND, "hub-checksums",
                         "no file has a checksum of the hub: no link to blobs/ and nothing in .cache/huggingface");
            qx_error_at(err, dir, NULL, QX_NO_OFF);
        }
    }
    qx_dir_list_fini(&l);
    return rc;
}
