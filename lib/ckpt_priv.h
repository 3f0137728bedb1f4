/* ckpt_priv.h: the inside of struct qx_ckpt, shared by ckpt.c (the finished object), ckpt_open.c (finding
 * and reading files) and ckpt_join.c (index against headers). Nobody else includes it. */
#ifndef QX_CKPT_PRIV_H
#define QX_CKPT_PRIV_H

#include "alloc.h"
#include "ckpt.h"
#include "file_map.h"
#include "index_json.h"
#include "pool.h"
#include "resolve.h"
#include "st_header.h"

#include <pthread.h>
#include <sys/types.h>

/* One file beyond what qx.h shows. */
struct ckpt_file {
    struct qx_st_header header; /* its tensors move to the checkpoint's lists after joining */
    char *path;                 /* to open it by (arena) */
    int fd;                     /* -1: not open (unusable, or opened on demand) */
    dev_t dev;
    ino_t ino;
    uint64_t n_indexed;         /* tensors that the index places here */
    bool indexed;               /* the index names it */
    bool reported;              /* a finding says that it is missing */
    struct qx_map map;          /* under lazy->lock */
};

/* What may change after open, under its lock: descriptors and maps made on demand. */
struct ckpt_lazy {
    pthread_mutex_t lock;
    struct ckpt_file *files;
};

struct qx_ckpt {
    struct qx_arena *arena; /* names that no header or index owns */
    const char *path, *dir;
    bool single_file, lone_config, has_index;
    const char *index_name; /* relative to dir */
    struct qx_index index;
    struct qx_file *files;  /* sorted by name */
    struct ckpt_file *priv; /* same order */
    size_t n_files;
    struct qx_tensor *tensors;
    size_t n_tensors;
    struct qx_extra *extras;
    size_t n_extras;
    struct qx_absent *absent;
    size_t n_absent;
    struct qx_findings *findings;
    struct qx_blob config_text, hf_quant_text;
    struct qx_config *config;      /* NULL when not usable */
    struct qx_error config_error;  /* why */
    struct qx_resolved *resolved;
    struct ckpt_lazy *lazy;
};

/* Fills tensors, extras and absent from headers and index, with the findings of their agreement.
 * 0 or out of memory. */
int ckpt_join(struct qx_ckpt *ck, struct qx_error *err);

#endif
