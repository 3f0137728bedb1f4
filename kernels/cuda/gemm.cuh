/* gemm.cuh: products with many activation rows. */
#ifndef QX_CUDA_GEMM_CUH
#define QX_CUDA_GEMM_CUH

#include "common.cuh"

/* Up to this many rows the few-row kernels run. */
#define QX_GEMM_MIN_ROWS 1000000000u

int gemm_linear(struct qx_queue *q, const struct qx_op_linear *o);
int gemm_hc(struct qx_queue *q, const struct qx_op_hc *o);
int gemm_moe(struct qx_queue *q, const struct qx_op_moe *o);

#endif
