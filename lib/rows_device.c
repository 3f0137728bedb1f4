/* rows_device.c: rows decoded by a backend. Only the rows asked for go to the device, as a small
 * table of their own, so that device memory is bounded by the piece size whatever the table. */
#include "rows_impl.h"

#include "alloc.h"
#include "backend.h"
#include "fp8.h"
#include "ops.h"

#include <string.h>

#define PIECE_BYTES (8u << 20)

struct device_buf {
    struct qx_backend *be;
    void *p;
};

static int get(struct device_buf *b, struct qx_backend *be, size_t n, struct qx_error *err)
{
    b->be = be;
    return be->mem_alloc(be, &b->p, n + 16, err);
}

static void put(struct device_buf *b)
{
    if (b->p != NULL) {
        b->be->mem_free(b->be, b->p);
    }
}

static uint8_t weight_format(const struct qx_rows *r)
{
    switch (r->format) {
    case QX_F_BF16:
        return QX_W_BF16;
    case QX_F_F16:
        return QX_W_F16;
    case QX_F_F32:
        return QX_W_F32;
    case QX_F_FP8:
        return QX_W_FP8;
    case QX_F_FP8_BLOCK:
        return QX_W_FP8_BLOCK;
    case QX_F_MXFP8:
        return QX_W_MXFP8;
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        return QX_W_NVFP4;
    default:
        return r->dtype == QX_DT_BF16  ? QX_W_BF16
               : r->dtype == QX_DT_F16 ? QX_W_F16
               : r->dtype == QX_DT_F32 ? QX_W_F32
                                       : QX_W_NONE;
    }
}

struct piece {
    const struct qx_rows *r;
    struct qx_backend *be;
    struct qx_queue *q;
    uint8_t fmt;
    uint8_t *codes, *scales; /* host */
    struct device_buf d_codes, d_scales, d_rows, d_tables, d_out, d_blocks;
    int64_t *ids; /* host */
    size_t max_rows, out_bytes;
    bool bf16;
};

/* Rows [0, n) of the piece with one scale, from host row i on the device: one launch. */
static int launch(struct piece *p, size_t i, size_t n, float global, const void *scale,
                  uint32_t row0)
{
    const struct qx_rows *r = p->r;
    struct qx_op_decode_rows a = {.row = p->d_rows.p, .n = (uint32_t)n, .bf16 = p->bf16};
    const uint8_t *codes = (const uint8_t *)p->d_codes.p + i * r->code_bytes;
    a.out = (uint8_t *)p->d_out.p + i * p->out_bytes;
    if (p->fmt == QX_W_MXFP8 || p->fmt == QX_W_FP8_BLOCK) {
        a.weight = (struct qx_weight){.codes = codes,
                                      .scale = scale,
                                      .global = 1.0f,
                                      .rows = (uint32_t)n,
                                      .cols = (uint32_t)r->width,
                                      .row0 = row0,
                                      .fmt = p->fmt};
    } else {
        const void *ptrs[2] = {codes, scale};
        int rc = p->be->upload(p->q, p->d_tables.p, ptrs, sizeof ptrs);
        rc = rc == 0 ? p->be->wait(p->q, NULL) : rc; /* ptrs is on the stack */
        if (rc != 0) {
            return rc;
        }
        a.table = (struct qx_table_desc){
            .codes = p->d_tables.p,
            .scale = scale != NULL ? (const void *const *)p->d_tables.p + 1 : NULL,
            .rows_per_shard = n,
            .n_rows = n,
            .code_stride = r->code_bytes,
            .scale_stride = r->scale_bytes,
            .width = (uint32_t)r->width,
            .global = global,
            .fmt = p->fmt};
    }
    return p->be->ops->decode_rows(p->q, &a);
}

static int run_piece(struct piece *p, const uint64_t *rows, size_t n, void *dst,
                     struct qx_error *err)
{
    const struct qx_rows *r = p->r;
    struct qx_backend *be = p->be;
    int rc = qx_rows_read(r, rows, n, QX_ROW_RAW, p->codes, err);
    if (rc == 0 && r->scale_bytes > 0) {
        rc = qx_rows_read(r, rows, n, QX_ROW_SCALES, p->scales, err);
    }
    if (rc != 0) {
        return rc;
    }
    rc = be->upload(p->q, p->d_codes.p, p->codes, n * r->code_bytes);
    if (rc == 0 && r->scale_bytes > 0) {
        rc = be->upload(p->q, p->d_scales.p, p->scales, n * r->scale_bytes);
    }
    uint64_t per_stack = r->rows_per_stack > 0 ? r->rows_per_stack : UINT64_MAX;
    for (size_t i = 0; rc == 0 && i < n;) {
        uint64_t stack = rows[i] / per_stack;
        size_t k = i + 1;
        const void *scale =
            r->scale_bytes > 0 ? (uint8_t *)p->d_scales.p + i * r->scale_bytes : NULL;
        uint32_t row0 = 0;
        if (p->fmt == QX_W_FP8_BLOCK) {
            /* Rows that follow each other keep their place in the 128-row blocks. */
            while (k < n && rows[k] == rows[k - 1] + 1 && rows[k] / per_stack == stack) {
                k++;
            }
            row0 = (uint32_t)(rows[i] % per_stack);
            scale = (float *)p->d_blocks.p + stack * r->block_rows * r->block_cols;
        } else {
            while (k < n && (r->n_global <= 1 || rows[k] / per_stack == stack)) {
                k++;
            }
        }
        float global = r->n_global > 0 ? r->global[r->n_global > 1 ? stack : 0] : 1.0f;
        rc = launch(p, i, k - i, global, scale, row0);
        i = k;
    }
    rc = rc == 0 ? be->download(p->q, dst, p->d_out.p, n * p->out_bytes) : rc;
    if (rc != 0) {
        int e = be->queue_error(p->q, err);
        return e != 0
                   ? e
                   : qx_fail(err, QX_E_DEVICE, "device", "%s cannot decode these rows", be->name);
    }
    return be->wait(p->q, err);
}

int qx_rows_read_device(const struct qx_rows *r, struct qx_backend *be, const uint64_t *rows,
                        size_t n, enum qx_row_dtype dtype, void *dst, struct qx_error *err)
{
    struct piece p = {.r = r, .be = be, .fmt = weight_format(r), .bf16 = dtype == QX_ROW_BF16};
    if (p.fmt == QX_W_NONE || dtype == QX_ROW_RAW || be->ops->decode_rows == NULL) {
        return qx_fail(err, QX_E_UNSUPPORTED, "device", "%s does not decode %s", be->name,
                       p.fmt == QX_W_NONE ? qx_dtype_name(r->dtype) : "this output");
    }
    p.out_bytes = r->width * (p.bf16 ? 2 : 4);
    p.max_rows = PIECE_BYTES / (p.out_bytes + 1) + 1;
    p.max_rows = p.max_rows < n ? p.max_rows : n;
    p.codes = qx_malloc(p.max_rows * r->code_bytes + 1);
    p.scales = qx_malloc(p.max_rows * r->scale_bytes + 1);
    p.ids = qx_malloc(p.max_rows * sizeof *p.ids + 1);
    size_t blocks = r->blocks != NULL ? r->n_rows / (r->rows_per_stack ? r->rows_per_stack : 1) *
                                            r->block_rows * r->block_cols * sizeof(float)
                                      : 0;
    int rc = p.codes == NULL || p.scales == NULL || p.ids == NULL ? qx_fail_nomem(err) : 0;
    rc = rc == 0 ? be->queue_create(be, &p.q, err) : rc;
    rc = rc == 0 ? get(&p.d_codes, be, p.max_rows * r->code_bytes, err) : rc;
    rc = rc == 0 ? get(&p.d_scales, be, p.max_rows * r->scale_bytes, err) : rc;
    rc = rc == 0 ? get(&p.d_rows, be, p.max_rows * sizeof *p.ids, err) : rc;
    rc = rc == 0 ? get(&p.d_tables, be, 2 * sizeof(void *), err) : rc;
    rc = rc == 0 ? get(&p.d_out, be, p.max_rows * p.out_bytes, err) : rc;
    rc = rc == 0 && blocks > 0 ? get(&p.d_blocks, be, blocks, err) : rc;
    if (rc == 0) {
        for (size_t i = 0; i < p.max_rows; i++) {
            p.ids[i] = (int64_t)i;
        }
        rc = be->upload(p.q, p.d_rows.p, p.ids, p.max_rows * sizeof *p.ids);
        rc = rc == 0 && blocks > 0 ? be->upload(p.q, p.d_blocks.p, r->blocks, blocks) : rc;
        if (rc != 0) {
            rc = be->queue_error(p.q, err);
        }
    }
    for (size_t i = 0; rc == 0 && i < n; i += p.max_rows) {
        size_t m = n - i < p.max_rows ? n - i : p.max_rows;
        rc = run_piece(&p, rows + i, m, (uint8_t *)dst + i * p.out_bytes, err);
    }
    put(&p.d_codes);
    put(&p.d_scales);
    put(&p.d_rows);
    put(&p.d_tables);
    put(&p.d_out);
    put(&p.d_blocks);
    if (p.q != NULL) {
        be->queue_destroy(p.q);
    }
    qx_free(p.codes);
    qx_free(p.scales);
    qx_free(p.ids);
    return rc;
}
