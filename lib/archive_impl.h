/* archive_impl.h: what making an archive and restoring one share: the list of files, the workers,
 * hashing in passing. */
#ifndef QX_ARCHIVE_IMPL_H
#define QX_ARCHIVE_IMPL_H

#include "alloc.h"
#include "ckpt.h"
#include "error.h"
#include "file_map.h"
#include "file_out.h"
#include "out_dir.h"
#include "pool.h"
#include "qx.h"
#include "resolve.h"
#include "st_header.h"
#include "zseek.h"

#include <sys/stat.h>
#include <xxhash.h>

struct qx_ar_span {
    const char *name;
    uint64_t off, size;
    uint8_t component;
    char hash[33];
};
struct qx_ar_entry {
    char *name;
    uint64_t size, packed, mtime_ns;
    char hash[33];
    struct qx_ar_span *spans; /* tensors by offset; those that overlap another are left out */
    size_t n_spans;
    struct qx_st_header header;
    bool has_header, done;
    /* Of an unfinished file, on disk: its frames' packed sizes (archive), bytes of content (restore). */
    uint32_t *known;
    size_t n_known, cap_known;
    uint64_t kept;
};
struct qx_ar_slot {
    uint8_t *raw, *packed;
    uint64_t off;
    size_t n, packed_n;
    bool known; /* written before: only read and hashed */
    uint32_t checksum;
    struct qx_error err;
    int rc;
};
struct qx_ar_work {
    const char *path;
    struct qx_out_dir *dir;
    const struct qx_archive_opts *o;
    struct qx_archive_result *res;
    struct qx_ckpt *ck; /* NULL: no checkpoint, components unknown */
    struct qx_pool *pool;
    struct qx_zseek_packer **packer;
    struct qx_ar_slot *slots;
    size_t n_slots;
    struct qx_ar_entry *e;
    size_t n, cap;
    uint64_t done_bytes, total_bytes;
    uint64_t component_bytes[QX_C_COUNT], component_packed[QX_C_COUNT];
    /* the file at work */
    int fd;
    const struct qx_zseek *z;
    uint64_t off;
    size_t frame0;
    struct qx_file_out *out;
    bool parts; /* notes of an unfinished file are in the journal */
};

/* An unfinished file is synced and noted each time that this much content was added to it. */
#define QX_AR_NOTE_BYTES (32u << 20)

struct qx_ar_hasher {
    XXH3_state_t *file, *tensor;
    size_t at;
    uint64_t off;
};

void qx_ar_to_hex(XXH128_hash_t h, char out[33]);
void qx_ar_work_fini(struct qx_ar_work *w);
int qx_ar_start_workers(struct qx_ar_work *w, struct qx_error *err);
uint64_t qx_ar_peak(uint32_t threads, uint64_t n_tensors);
int qx_ar_tick(struct qx_ar_work *w, struct qx_error *err);
int qx_ar_add_file(struct qx_ar_work *w, const char *name, const struct stat *st,
                   struct qx_error *err);
int qx_ar_hasher_init(struct qx_ar_hasher *h, struct qx_error *err);
void qx_ar_hasher_fini(struct qx_ar_hasher *h);
void qx_ar_hasher_add(struct qx_ar_hasher *h, struct qx_ar_entry *e, const uint8_t *p, size_t n);
char *qx_ar_join(const char *a, const char *b, const char *c);
int qx_ar_make_folders(struct qx_ar_work *w, const char *name, struct qx_error *err);
void qx_ar_plan_id(const struct qx_ar_work *w, const char *what, char out[33]);
int qx_ar_finish(struct qx_ar_work *w, int rc, bool keep, struct qx_error *err);
/* Names of an archive (suffix ".zst") or of what is restored from it (""). */
struct qx_ar_names {
    const struct qx_ar_work *w;
    const char *suffix;
};
bool qx_ar_ours(const void *names, const char *name, bool is_dir);
/* What is still to be written must fit. */
int qx_ar_space(const struct qx_ar_work *w, struct qx_error *err);
/* Ends the file at work: in place when rc is 0, else left for the next run if that knows of it, or removed. */
int qx_ar_end_file(struct qx_ar_work *w, const struct qx_ar_entry *e, int rc, struct qx_error *err);

#endif
