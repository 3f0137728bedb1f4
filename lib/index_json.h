/* index_json.h: the shard index file (formats 2, "Index") as two sorted lists. Its agreement with the
 * shards is judged in ckpt_join.c. */
#ifndef QX_INDEX_JSON_H
#define QX_INDEX_JSON_H

#include "alloc.h"
#include "base.h"
#include "error.h"
#include "findings.h"

struct qx_index_entry { const char *name; uint32_t name_len; uint32_t file; };
struct qx_index_file { const char *name; uint64_t n_tensors; bool unsafe; };

struct qx_index {
    bool usable;                     /* parsed to the end and has a weight_map */
    struct qx_index_entry *entries;  /* sorted by name, each name once (the last given counts) */
    size_t n_entries;
    struct qx_index_file *files;     /* sorted by name */
    size_t n_files;
    bool has_total;
    uint64_t total_size;             /* metadata.total_size */
    struct qx_arena *arena;
};

/* Findings: json-bom, json-syntax, json-utf8, json-too-deep, lfs-pointer, index-format,
 * json-duplicate-key (error when two files differ, note when equal), unsafe-path for names that leave
 * the directory (marked unsafe, never to be opened), total-size when it is no count. Errors: memory. */
int qx_index_parse(struct qx_index *x, const char *text, size_t n, const char *file,
                   struct qx_findings *fs, struct qx_error *err);
void qx_index_fini(struct qx_index *x);

#endif
