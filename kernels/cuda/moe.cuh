/* moe.cuh: what the files of the mixture of experts share. */
#ifndef QX_CUDA_MOE_CUH
#define QX_CUDA_MOE_CUH

#include "tile.cuh"

#define MOE_MAX_K 15

/* Rows of decoding with bf16 inputs (moe_rows.cu); 1: not for these formats and shapes. */
int qx_moe_rows(struct qx_queue *q, const struct qx_op_moe *o);
/* The same for NVFP4 experts of usual widths beside a shared one of MXFP8 (moe_stream.cu). */
int qx_moe_stream(struct qx_queue *q, const struct qx_op_moe *o);

#endif
