/* repack_impl.h: a repacking plan as its parts share it.
 *
 * The plan lists every tensor of the output with its source, places each in a file at a fixed offset, and
 * cuts the work into jobs that fill disjoint byte ranges. All of that follows from headers and options
 * alone, so that jobs can run in any order, on any number of threads, and again after a kill. */
#ifndef QX_REPACK_IMPL_H
#define QX_REPACK_IMPL_H

#include "alloc.h"
#include "ckpt.h"
#include "pack.h"
#include "qx.h"
#include "quantize.h"
#include "resolve.h"
#include "rows.h"
#include "st_write.h"

enum rp_source {
    RP_COPY,         /* bytes of a source tensor */
    RP_TABLE_CODES, RP_TABLE_SCALES, RP_TABLE_PACKED,
    RP_TABLE_GLOBAL, /* the table's scale: copied (`from`), or known after the scan */
    RP_EXPERT        /* part of a converted expert */
};

struct rp_tensor {
    const char *name, *dtype;
    const uint64_t *shape;
    uint32_t n_dims;
    uint64_t size;
    enum rp_source source;
    const struct qx_tensor *from;
    uint64_t row0, n_rows;   /* table parts: rows, counted in the source */
    uint32_t file;
    uint64_t off;            /* in its file */
};

struct rp_file {
    const char *name;
    uint64_t size;
    char *header;            /* NULL: all bytes are copied from file `from` */
    size_t header_bytes;
    int32_t from;            /* source file whose bytes are all kept, or -1 */
    uint32_t first, n;       /* its tensors in `order`, by offset */
    uint64_t last_job;       /* no later job touches it */
    uint64_t align;
    bool packed;             /* holds the packed table: metadata is rewritten at the end */
};

enum rp_job_kind { RP_J_COPY, RP_J_BYTES, RP_J_TABLE, RP_J_EXPERT, RP_J_GLOBAL };
struct rp_job {
    enum rp_job_kind kind;
    uint32_t file;           /* destination (codes of J_TABLE) */
    uint64_t off, n;         /* destination range; J_TABLE, J_EXPERT: bytes in all */
    int32_t from;            /* J_COPY: source file */
    uint64_t from_off;
    const void *bytes;       /* J_BYTES */
    uint32_t tensor, tensor2;/* J_TABLE: codes or packed, scales */
    uint64_t row, n_rows;    /* J_TABLE: rows of the destination tensor */
    uint32_t container, expert;
};

/* Where one projection of one expert lies: rows of a module. */
struct rp_proj { const struct qx_module *m; uint64_t row0; };
struct rp_expert { struct rp_proj p[3]; }; /* gate, up, down */
struct rp_container {
    const char *prefix;      /* "...mlp.experts" */
    struct rp_expert *e;
    size_t cap;
    uint32_t n;
    uint64_t inter, hidden;
    bool mtp, convert;
    enum qx_format from, to; /* from: mixed if they differ; to: as it will be stored */
    uint32_t tensor0, per_expert; /* outputs of expert i: tensor0 + i x per_expert ... */
};

struct rp_table {
    bool present, changed, convert; /* changed: laid out anew; convert: also another format */
    struct qx_rows *rows;
    enum qx_format from, to;
    uint32_t width;
    uint64_t src_rows;       /* stored rows of the source */
    uint64_t row0, n_rows;   /* rows of the output: [row0, row0 + n_rows), zeros behind src_rows */
    uint64_t n_shards, rows_per_shard; /* the last shards hold what is left: fewer rows or none */
    bool packed;
    struct qx_pack_info pack;
    uint32_t code_bytes, scale_bytes; /* of an output row */
    uint64_t chunk_rows;
    /* after the scan */
    float global, plain_global;
};

struct rp_text { const char *name; struct qx_buf text; };

struct qx_repack {
    const struct qx_ckpt *ck;
    struct qx_repack_opts o;
    char *target;
    struct qx_arena *arena;
    struct rp_tensor *t;
    size_t n_t, cap_t;
    uint32_t *order;         /* tensors, file after file; [n_t] */
    struct rp_file *f;
    size_t n_f, cap_f;
    struct rp_job *j;
    size_t n_j, cap_j;
    struct rp_container *c;
    size_t n_c, cap_c;
    struct rp_table table;
    struct rp_text small[4];  /* config.json, hf_quant_config.json, index */
    size_t n_small;
    const char **plain_files; /* names copied as they are */
    uint64_t *plain_sizes;
    size_t n_plain, cap_plain, cap_plain_sizes;
    uint64_t n_dropped;
    struct qx_repack_info info;
    struct qx_quant_stats table_stats, expert_stats;
    struct qx_quant_report reports[2];
    char plan_id[33];
    bool quant_changed;
};

/* repack_tensors.c: what the output holds */
int rp_plan_table(struct qx_repack *r, struct qx_error *err);
int rp_plan_experts(struct qx_repack *r, struct qx_error *err);
int rp_plan_copies(struct qx_repack *r, struct qx_error *err);
bool rp_dropped(const struct qx_repack *r, const char *name);
struct rp_tensor *rp_add(struct qx_repack *r, const char *name, const char *dtype, const uint64_t *shape,
                         uint32_t n_dims, uint64_t size, enum rp_source source);
/* repack_files.c: which file holds what, headers, jobs */
int rp_plan_files(struct qx_repack *r, struct qx_error *err);
int rp_plan_jobs(struct qx_repack *r, struct qx_error *err);
/* repack_config.c: the config texts and the index */
int rp_plan_config(struct qx_repack *r, struct qx_error *err);

#endif
