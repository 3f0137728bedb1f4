/* st_header.h: a safetensors header as a sorted tensor index, with every rule of formats 2 checked.
 *
 * Whatever is wrong with the bytes becomes findings; a header that cannot be used leaves state
 * QX_FILE_BAD and no tensors. Errors are only memory. No length in the file drives an allocation beyond
 * the file's size and the header limit. */
#ifndef QX_ST_HEADER_H
#define QX_ST_HEADER_H

#include "alloc.h"
#include "base.h"
#include "error.h"
#include "findings.h"
#include "qx.h"

struct qx_st_header {
    enum qx_file_state state;   /* OK, SHORT or BAD */
    uint64_t file_bytes, header_bytes, data_off;
    uint64_t n_entries;         /* tensor entries in the header, duplicates included */
    struct qx_tensor *tensors;  /* sorted by name, each name once; `file` is 0 */
    size_t n_tensors;
    bool has_metadata;
    struct qx_meta *meta;       /* in header order; only well-formed pairs */
    uint32_t n_meta;
    struct qx_arena *arena;     /* names, shapes, metadata */
};

/* Reads and parses the header of an open file. `name` is for findings. */
int qx_st_header_read(struct qx_st_header *h, int fd, uint64_t file_bytes, const char *name,
                      uint64_t max_header_bytes, struct qx_findings *fs, struct qx_error *err);
/* Parses the n bytes of JSON that follow the length field of a file of file_bytes >= 8 + n. */
int qx_st_header_parse(struct qx_st_header *h, const char *json, size_t n, uint64_t file_bytes,
                       const char *name, struct qx_findings *fs, struct qx_error *err);
void qx_st_header_fini(struct qx_st_header *h);

/* What the first bytes of a file look like: "a zip archive", "a pickle", "gzip", "GGUF", "HTML", "text",
 * or NULL. With strict only by signatures that no text or header has. */
const char *qx_sniff(const void *bytes, size_t n, bool strict);
/* Parses a Git LFS pointer (formats: three lines); false when the text is none. */
bool qx_lfs_pointer(const char *text, size_t n, char oid_hex[65], uint64_t *size_bytes);

#endif
