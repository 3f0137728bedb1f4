/* ref.h: what the files of the reference backend share: the queue, loops over workers, and dot products
 * of stored rows. Sums are doubles in a fixed set of partial sums, so that results depend neither on
 * threads, nor on the number of rows of a step, nor on the processor. */
#ifndef QX_REF_H
#define QX_REF_H

#include "backend.h"
#include "base.h"
#include "codes.h"
#include "ops.h"
#include "pool.h"

#include <math.h>

#define REF_BLOCK 4  /* rows of a matrix decoded together */
#define REF_TILE 32  /* input rows that share one decoding */
#define REF_SEG 512  /* columns decoded at a time; a multiple of every group length */

struct qx_queue {
    struct qx_backend *be;
    struct qx_pool *pool;
    double (*dot)(const float *a, const float *b, uint32_t n);
};

/* fn(user, i) for i in [0, n), on the workers when n x cost (multiply-adds) is worth waking them. */
typedef void (*ref_fn)(const struct qx_queue *q, void *user, uint64_t i);
void ref_for(const struct qx_queue *q, uint64_t n, uint64_t cost, ref_fn fn, void *user);

/* sum_i a[i] b[i]: sixteen partial sums, element i to sum i mod 16, then pairwise. */
double ref_dot_plain(const float *a, const float *b, uint32_t n);
double ref_dot_avx2(const float *a, const float *b, uint32_t n);

/* Columns [c0, c0 + n) of row r without the factors that are constant over the segment, exact in f32;
 * returns those factors. c0 is a multiple of ref_seg_len. */
uint32_t ref_seg_len(const struct qx_weight *w);
double ref_decode_seg(const struct qx_weight *w, uint32_t r, uint32_t c0, uint32_t n, float *out);

/* acc[j][i] = row (r0 + j) of w . x row of index i, for nr <= REF_BLOCK rows and nx <= REF_TILE inputs.
 * Input i is x + (idx ? idx[i] / div : i) * stride; with bf16 its values are rounded first. */
void ref_block(const struct qx_queue *q, const struct qx_weight *w, uint32_t r0, uint32_t nr,
               const float *x, uint64_t stride, const int32_t *idx, uint32_t div, uint32_t nx, bool bf16,
               double acc[REF_BLOCK][REF_TILE]);

/* y[i, :] (+)= w x[i, :] on the workers. */
void ref_matmul(const struct qx_queue *q, const struct qx_weight *w, const float *x, uint64_t x_stride,
                uint32_t n_rows, float *y, uint64_t y_stride, bool acc, bool bf16);

/* One element of a stored row of a table. */
void ref_table_row(const struct qx_table_desc *t, int64_t row, float *out);

/* y = x * rsqrt(mean(x^2) + eps) * (1 + w), each value rounded once. */
void ref_zrms(const struct qx_queue *q, const float *x, const float *w, uint32_t n, double eps, float *y);
/* Half-split rotation of the first rotary_dim values, in place (model 2). */
void ref_rope(const struct qx_rope *rope, int64_t pos, float *x);

static inline double ref_sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}
static inline double ref_silu(double x)
{
    return x / (1.0 + exp(-x));
}

/* One element of a cache that is f32 or bf16. */
static inline float ref_kv_get(const void *p, size_t i, bool bf16)
{
    return bf16 ? qx_bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}
static inline void ref_kv_put(void *p, size_t i, bool bf16, float v)
{
    if (bf16) {
        ((uint16_t *)p)[i] = qx_f32_to_bf16(v);
    } else {
        ((float *)p)[i] = v;
    }
}
/* Row of the caches [page, page_tokens] that holds position pos of sequence slot seq. */
static inline size_t ref_kv_row(const struct qx_kv *kv, int32_t seq, int64_t pos)
{
    size_t page = (size_t)kv->page_table[(size_t)seq * kv->max_pages + (size_t)pos / kv->page_tokens];
    return page * kv->page_tokens + (size_t)pos % kv->page_tokens;
}

#define OP(name, bound) int ref_##name(struct qx_queue *q, const struct qx_op_##name *a);
#include "ops.def"
#undef OP

#endif
