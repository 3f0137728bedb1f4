/* rows.h: rows of any stored matrix, through any storage and quantisation, as numbers.
 *
 * A row's f32 value is the exact product of code and scales rounded once to f32 (for NVFP4 e2m1 x e4m3
 * is exact and is then multiplied by the global scale); its bf16 value is that f32 rounded once more,
 * both nearest even (formats 6.2). Opening and reading are public: qx.h. */
#ifndef QX_ROWS_H
#define QX_ROWS_H

#include "resolve.h"

/* The same on the threads of a pool (NULL: this one), for large requests. */
struct qx_pool; /* pool.h */
int qx_rows_read_pool(const struct qx_rows *r, struct qx_pool *pool, const uint64_t *rows, size_t n,
                      enum qx_row_dtype dtype, void *dst, struct qx_error *err);
/* The same for rows [row0, row0 + n). */
int qx_rows_read_range(const struct qx_rows *r, uint64_t row0, uint64_t n, enum qx_row_dtype dtype,
                       void *dst, struct qx_error *err);
/* As the table is stored, for loaders: rows [row0, row0 + n) split into codes [n, raw_bytes] and block
 * scales [n, qx_rows_scale_bytes] (scales may be NULL when there are none). Also of packed tables. */
int qx_rows_read_stored(const struct qx_rows *r, uint64_t row0, uint64_t n, void *codes, void *scales,
                        struct qx_error *err);
/* Rows [row0, row0 + n) read so, as f32 [n, width]: the values that qx_rows_read gives. */
void qx_rows_decode_stored(const struct qx_rows *r, uint64_t row0, uint64_t n, const void *codes,
                           const void *scales, float *out);
uint64_t qx_rows_scale_bytes(const struct qx_rows *r); /* block-scale bytes a row: NVFP4, MXFP8; else 0 */
/* The one scale of FP8 and NVFP4; 1 for formats that have none. For fused experts that of expert 0. */
float qx_rows_global(const struct qx_rows *r);

/* The same rows decoded by a backend's decode_rows (f32 or bf16 only): codes and scales are read as above,
 * sent to the device in pieces of bounded size, decoded there and copied back. Equal bits. */
struct qx_backend; /* backend.h */
int qx_rows_read_device(const struct qx_rows *r, struct qx_backend *be, const uint64_t *rows, size_t n,
                        enum qx_row_dtype dtype, void *dst, struct qx_error *err);

/* Fails as "table-missing", or with why the file that should hold the table's first shard cannot be used. */
int qx_fail_no_table(const struct qx_ckpt *ck, struct qx_error *err);

/* A scale of one element, widened exactly from BF16, F16 or F32: kinds scale-dtype, scale-shape. */
int qx_read_scalar(const struct qx_ckpt *ck, const struct qx_tensor *t, float *out, struct qx_error *err);

#endif
