/* ckpt.h: what lib itself sees of an open checkpoint beyond qx.h. */
#ifndef QX_CKPT_H
#define QX_CKPT_H

#include "base.h"
#include "config.h"
#include "error.h"
#include "findings.h"
#include "qx.h"

struct qx_resolved; /* resolve.h */

/* A small file of the directory, read whole. text is NUL-terminated; n excludes the NUL. */
struct qx_blob { const char *text; size_t n; bool present; };

/* Tensors in headers of the set that are not read: unindexed copies and unindexed names. */
struct qx_extra {
    struct qx_tensor t;      /* where it lies */
    bool superseded;         /* the index gives this name to another file */
};

/* A name in the index that cannot be read: its file is unusable or lacks it. */
struct qx_absent {
    const char *name;
    const char *file;        /* as the index names it */
    bool file_exists, file_usable;
    const char *found_in;    /* another file of the set that has it, or NULL */
};

const char *qx_ckpt_dir(const struct qx_ckpt *ck);
/* NULL when there is none that could be used. */
const struct qx_config *qx_ckpt_config(const struct qx_ckpt *ck);
const struct qx_blob *qx_ckpt_config_text(const struct qx_ckpt *ck);
const struct qx_blob *qx_ckpt_hf_quant_text(const struct qx_ckpt *ck);
/* Formats of all modules; NULL without a config or for a single file. */
const struct qx_resolved *qx_ckpt_resolved(const struct qx_ckpt *ck);

size_t qx_ckpt_n_extras(const struct qx_ckpt *ck);
const struct qx_extra *qx_ckpt_extra(const struct qx_ckpt *ck, size_t i); /* sorted by name */
size_t qx_ckpt_n_absent(const struct qx_ckpt *ck);
const struct qx_absent *qx_ckpt_absent(const struct qx_ckpt *ck, size_t i); /* sorted by name */

/* True when PATH was a config.json alone: no weights are looked for. */
bool qx_ckpt_is_lone_config(const struct qx_ckpt *ck);

/* Finds by name bytes; NULL if absent. Binary search in the sorted array. */
const struct qx_tensor *qx_ckpt_find_n(const struct qx_ckpt *ck, const char *name, size_t n);
/* The tensor, whole and readable, or a failure that says why not: kind as of the finding of opening
 * (shard-missing, truncated, not-safetensors, index-tensor-absent, unsafe-path, ...), or missing-tensor
 * when no file that counts has it. For every command that needs a tensor by name. */
int qx_ckpt_need(const struct qx_ckpt *ck, const char *name, const struct qx_tensor **out,
                 struct qx_error *err);
/* Index of the first tensor whose name is >= prefix. Names with the prefix follow contiguously. */
size_t qx_ckpt_lower_bound(const struct qx_ckpt *ck, const char *prefix, size_t n);

/* Reads a whole small file beside the checkpoint (symlinks followed, name may not leave the
 * directory). present = false and 0 when absent. Caller frees *text with qx_free. */
int qx_ckpt_read_small(const struct qx_ckpt *ck, const char *name, uint64_t max_bytes, char **text,
                       size_t *n, bool *present, struct qx_error *err);
/* An open descriptor of file i for direct reads, owned by the checkpoint; -1 if not usable. */
int qx_ckpt_fd(const struct qx_ckpt *ck, uint32_t file);

#endif
