/* prompt.h: the tiled kernels for rows of prompts, as the ops call them. Each returns 0 when it has enqueued
 * the op, 1 when the op is not for it (the kernels for few rows take it), or a negative code. */
#ifndef QX_CUDA_PROMPT_H
#define QX_CUDA_PROMPT_H

#include "common.cuh"

/* Up to so many rows the kernels for few rows are no slower. */
#define QX_PROMPT_MIN_ROWS 32

/* The device runs code with the warpgroup matrix units, and a block may have the memory that gemm.cuh wants. */
static inline bool qx_prompt_can(const struct qx_queue *q)
{
    return q->has_wgmma && q->smem_max >= 227 * 1024;
}

int qx_prompt_linear(struct qx_queue *q, const struct qx_op_linear *o);
int qx_prompt_hc(struct qx_queue *q, const struct qx_op_hc *o);
int qx_prompt_logits(struct qx_queue *q, const struct qx_op_moe_route *o, const float **more);
int qx_prompt_route(struct qx_queue *q, const struct qx_op_moe_route *o);
int qx_prompt_moe(struct qx_queue *q, const struct qx_op_moe *o);

/* linear.cu: the kernels for few rows. */
int qx_linear_few(struct qx_queue *q, const struct qx_op_linear *o);

#endif
