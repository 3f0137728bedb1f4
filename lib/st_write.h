/* st_write.h: headers of safetensors files, and the shard index. */
#ifndef QX_ST_WRITE_H
#define QX_ST_WRITE_H

#include "base.h"
#include "error.h"
#include "qx.h"
#include "str.h"

struct qx_st_tensor {
    const char *name;
    const char *dtype;        /* text of the header */
    const uint64_t *shape;
    uint32_t n_dims;
    uint64_t size_bytes;
    uint64_t off;             /* out: file offset */
};
struct qx_st_pair { const char *key, *value; };

/* The length field and JSON of a file that holds the tensors in this order, padded with spaces so that
 * the data begins at a multiple of `align` (a power of two, at least 8). Fills in off. *file_bytes gets
 * the size of the whole file. */
int qx_st_header(struct qx_buf *out, struct qx_st_tensor *t, size_t n, const struct qx_st_pair *meta,
                 size_t n_meta, uint64_t align, uint64_t *file_bytes, struct qx_error *err);

/* n spaces more behind a header's JSON: the data begins n bytes later. False: no memory. */
bool qx_st_header_pad(struct qx_buf *header, uint64_t n);

/* model.safetensors.index.json: names must be sorted. */
struct qx_st_place { const char *tensor, *file; };
int qx_st_index(struct qx_buf *out, const struct qx_st_place *p, size_t n, uint64_t total_bytes,
                struct qx_error *err);

#endif
