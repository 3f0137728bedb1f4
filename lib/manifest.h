/* manifest.h: lists of checksums, per tensor and per file: writing, reading, finding (qx-manifest(5)).
 *
 * qx's own form is text: a first line "qx-manifest 1", then for every weight file its tensors in order of
 * offset, then the file itself, then the other files:
 *   tensor xxh3-128 HEX BYTES DTYPE [D0,D1] OFFSET NAME
 *   file xxh3-128 HEX BYTES NAME
 *   file sha256 HEX BYTES NAME
 *   file git-blob HEX BYTES NAME        (never written by a scan; hub.c)
 * OFFSET counts from the start of the file's data. A tensor line belongs to the next file line. NAME is
 * the rest of the line, with backslash, control characters and DEL written as \xNN.
 * Also read: what sha256sum and xxh128sum write (HEX, space, space or '*', name; a leading backslash
 * for escaped names; "SHA256 (name) = HEX"), hex in either case. */
#ifndef QX_MANIFEST_H
#define QX_MANIFEST_H

#include "base.h"
#include "error.h"
#include "str.h"

/* GIT: what git calls a file, SHA-1 of "blob BYTES", a zero byte and the file. */
enum qx_digest { QX_DIGEST_XXH3_128, QX_DIGEST_SHA256, QX_DIGEST_GIT, QX_DIGEST_COUNT };
#define QX_DIGEST_MAX 32
const char *qx_digest_name(enum qx_digest d);  /* "xxh3-128", "sha256", "git-blob" */
size_t qx_digest_size(enum qx_digest d);       /* bytes: 16, 32, 20 */
/* From exactly as many hexadecimal digits as it has; the rest of out is zero. */
bool qx_digest_parse(const char *hex, enum qx_digest d, uint8_t out[QX_DIGEST_MAX]);
/* Lower-case hex, NUL-terminated. */
void qx_digest_hex(const uint8_t *bytes, size_t n, char out[2 * QX_DIGEST_MAX + 1]);

struct qx_manifest_entry {
    const char *name;
    uint8_t digest[QX_DIGEST_MAX];
    uint8_t kind;               /* enum qx_digest */
    bool is_tensor, has_size;
    uint64_t size_bytes;
    uint64_t off;               /* tensors: from the start of the data */
    const char *dtype, *shape;  /* tensors: text as in the line; else NULL */
    uint32_t file;              /* tensors: index of their file's entry, UINT32_MAX if none */
};

struct qx_manifest;
/* The text stays the caller's. `file` names it in errors: kind manifest-syntax with the line number. An
 * empty list is an error; two different digests of one kind for one name are too. */
int qx_manifest_parse(struct qx_manifest **out, const char *text, size_t n, const char *file,
                      struct qx_error *err);
void qx_manifest_destroy(struct qx_manifest *m);
size_t qx_manifest_count(const struct qx_manifest *m);
const struct qx_manifest_entry *qx_manifest_at(const struct qx_manifest *m, size_t i); /* as listed */
bool qx_manifest_has(const struct qx_manifest *m, bool tensors, enum qx_digest kind);
/* Index of the entry, or SIZE_MAX. */
size_t qx_manifest_find(const struct qx_manifest *m, bool tensor, enum qx_digest kind, const char *name);

/* Writers append whole lines. */
void qx_manifest_put_head(struct qx_buf *b);
void qx_manifest_put_file(struct qx_buf *b, enum qx_digest kind, const uint8_t *digest, uint64_t bytes,
                          const char *name);
void qx_manifest_put_tensor(struct qx_buf *b, const uint8_t *digest, uint64_t bytes, const char *dtype,
                            const uint64_t *shape, uint32_t n_dims, uint64_t off, const char *name);

#endif
