/* scan.h: one pass over the bytes of a checkpoint: each byte is read once, looked at and, if asked for,
 * hashed, with many reads in flight and in memory that does not grow with the checkpoint's payload. */
#ifndef QX_SCAN_H
#define QX_SCAN_H

#include "ckpt.h"
#include "manifest.h"
#include "scan_loops.h"

/* A tensor to look at. The first five are the caller's; the rest is filled. */
struct qx_scan_item {
    const struct qx_tensor *t;  /* readable */
    uint32_t file;              /* index into qx_scan.files */
    uint8_t kind;               /* enum qx_scan_kind */
    uint8_t role;               /* the caller's own, as is ref */
    uint32_t ref;
    bool nonzero;               /* filled from here on: a byte is not zero */
    bool bad;                   /* not looked at, or not whole: overlap or read error */
    uint64_t n[QX_SCAN_CLASSES];     /* elements by class, bit order of QX_SCAN_IS_ */
    uint64_t first[QX_SCAN_CLASSES]; /* the first such element; meaningless when n is 0 */
    uint64_t value;             /* first 8 bytes or fewer, little-endian: the bits of a scalar */
};

struct qx_scan_file {
    const char *name;           /* relative to the checkpoint's directory */
    bool skip;                  /* must not be opened */
    bool no_digest[QX_DIGEST_COUNT]; /* of those that the pass makes, not of this file */
    uint64_t size_bytes;        /* filled on opening */
    bool absent;                /* filled: could not be opened */
    bool bad;                   /* filled: a read failed; no digest was delivered */
};

struct qx_scan {
    const struct qx_ckpt *ck;
    struct qx_scan_file *files;
    size_t n_files;
    struct qx_scan_item *items;
    size_t n_items;             /* sorted by (file, off) by qx_scan_run */
    bool whole_files;           /* every byte of every file; else only what items cover */
    bool bulk;                  /* nearly everything is read: past the page cache unless it is there */
    bool hash_tensors;
    bool digest[QX_DIGEST_COUNT]; /* of files; needs whole_files */
    uint32_t n_threads;         /* that compute; 0: all processors. More may wait for reads */
    void *user;
    /* Called in order of file and offset (tensors without bytes last in their file), one at a time, from
     * any thread; digests are bytes. */
    void (*on_tensor)(void *user, const struct qx_scan_item *it, const uint8_t *digest);
    /* digest[kind] is NULL for kinds not asked for, of all files or of this one. */
    void (*on_file)(void *user, size_t file, const uint8_t *const digest[QX_DIGEST_COUNT]);
    /* A read failed: len bytes from off are unknown. The pass goes on. */
    void (*on_bad)(void *user, size_t file, uint64_t off, uint64_t len, int sys);
    /* True stops the pass with QX_E_INTERRUPTED. May be NULL. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    uint64_t read_bytes;        /* filled */
};
int qx_scan_run(struct qx_scan *s, struct qx_error *err);

#endif
