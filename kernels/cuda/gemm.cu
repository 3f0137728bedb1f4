/* gemm.cu: products with many activation rows. */
#include "gemm.cuh"
#include "tile.cuh"

int gemm_linear(struct qx_queue *q, const struct qx_op_linear *o) { (void)o; return qx_queue_refuse(q, "linear", "x"); }
int gemm_hc(struct qx_queue *q, const struct qx_op_hc *o) { (void)o; return qx_queue_refuse(q, "hc", "x"); }
int gemm_moe(struct qx_queue *q, const struct qx_op_moe *o) { (void)o; return qx_queue_refuse(q, "moe", "x"); }
