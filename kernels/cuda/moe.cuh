/* moe.cuh: what the files of the mixture of experts share. */
#ifndef QX_CUDA_MOE_CUH
#define QX_CUDA_MOE_CUH

#include "async.cuh"
#include "tile.cuh"

#define MOE_MAX_K 15

/* Rows of decoding with bf16 inputs (moe_rows.cu); 1: not for these formats and shapes. */
int qx_moe_rows(struct qx_queue *q, const struct qx_op_moe *o);
/* Three and more in the released widths, to the same bits (moe_nv.cu). */
int qx_moe_nv(struct qx_queue *q, const struct qx_op_moe *o);

/* Line i of the experts' descriptors, cold since the last step, to the L2. */
template <class A> __device__ __forceinline__ void moe_fetch_line(const A &a, uint32_t i)
{
    prefetch_l2((const uint8_t *)a.gate + i * 128);
    prefetch_l2((const uint8_t *)a.up + i * 128);
    prefetch_l2((const uint8_t *)a.down + i * 128);
}
template <class A> __device__ __forceinline__ uint32_t moe_lines(const A &a)
{
    return (uint32_t)((a.n_experts * sizeof(struct qx_weight) + 127) / 128);
}

/* What differs between the launches of an op, eight rows each: rows from r on. early: the launch before is the router
 * of this m, which lets others start only after it has seen m. */
template <class A> static void moe_take_rows(A &a, const struct qx_queue *q, const struct qx_op_moe *o, uint32_t r)
{
    a.m_rows = o->n_rows - r < 8 ? o->n_rows - r : 8;
    a.m = o->m + (uint64_t)r * a.hidden;
    a.expert = o->expert + (uint64_t)r * a.k;
    a.weight = o->weight + (uint64_t)r * a.k;
    a.y = o->y + (uint64_t)r * a.hidden;
    a.early = r == 0 && q->routed.m == o->m && q->routed.at == q->n_launches;
}

#endif
