/* verify_impl.h: what the parts of qx_verify_run share. */
#ifndef QX_VERIFY_IMPL_H
#define QX_VERIFY_IMPL_H

#include "findings.h"
#include "qx.h"
#include "resolve.h"
#include "scan.h"

/* Why an item is looked at. ref is the module, or the table shard, or nothing. */
enum verify_role {
    ROLE_PLAIN,        /* any tensor: values only */
    ROLE_WEIGHT,       /* weight of module ref */
    ROLE_SHARD,        /* weight of table shard ref */
    ROLE_SCALE,        /* module ref: one number for a tensor, or FP8 blocks */
    ROLE_SCALE_2, ROLE_INPUT_SCALE,
    ROLE_BLOCK_SCALE,  /* module ref: NVFP4 blocks */
    ROLE_E8M0,         /* module ref: MXFP8 groups */
    ROLE_TABLE_GLOBAL,
    ROLE_TABLE_BLOCK   /* table shard ref: NVFP4 blocks */
};

struct verify {
    const struct qx_ckpt *ck;
    const struct qx_resolved *res; /* NULL for a single file */
    const struct qx_verify_opts *o;
    struct qx_findings *fs;
    struct qx_verify_stats stats;
    struct qx_scan_item *items;
    size_t n_items, cap_items;
    struct qx_scan_file *files;    /* the checkpoint's first, same indexes; then others of the directory */
    size_t n_files, cap_files;
    uint64_t zero_pieces;          /* rules_value.c: reads of codes below zero scales that are left */
    struct qx_arena *arena;        /* names of the other files */
};

/* Adds a finding; false only when out of memory (remembered by the list too). */
bool verify_add(struct verify *v, struct qx_report r);
const char *verify_file(const struct verify *v, const struct qx_tensor *t);

/* rules_value.c */
/* Items for the level: scales, and at level full everything that is stored and readable. */
int qx_values_gather(struct verify *v, struct qx_error *err);
/* Findings from the filled items, and about the constants of the n-gram hash. */
int qx_values_report(struct verify *v, struct qx_error *err);

/* verify_decode.c: rows decoded twice and compared. */
int qx_verify_decode(struct verify *v, struct qx_error *err);

/* verify_manifest.c: compares with and writes checksum lists. */
struct verify_manifest;
int verify_manifest_open(struct verify_manifest **out, struct verify *v, struct qx_error *err);
void verify_manifest_scan(struct verify_manifest *m, struct qx_scan *s); /* sets what is to be hashed */
void verify_manifest_tensor(struct verify_manifest *m, const struct qx_scan_item *it, const uint8_t *digest);
void verify_manifest_file(struct verify_manifest *m, size_t file,
                          const uint8_t *const digest[QX_DIGEST_COUNT]);
int verify_manifest_report(struct verify_manifest *m, struct qx_error *err);
void verify_manifest_close(struct verify_manifest *m);

#endif
