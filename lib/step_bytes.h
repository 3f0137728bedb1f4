/* step_bytes.h: the bytes that a step must move through the device's memory: what qx bench divides by for
 * the floor, and what qx run states as its share of the bandwidth. Weights once, states and caches as
 * far as the step touches them. */
#ifndef QX_STEP_BYTES_H
#define QX_STEP_BYTES_H

#include "engine.h"
#include "ops.h"

/* Bytes of one routed expert (gate, up, down) of layer 0; reads its description from the device. */
int qx_expert_bytes(struct qx_model *m, double *out, struct qx_error *err);
/* What each op of a decode step of `rows` rows at `depth` tokens of context must read and write, by op.
 * `unique`: experts a layer. */
void qx_step_bytes(const struct qx_model *m, uint32_t rows, uint64_t depth, double unique,
                   double expert_bytes, double by_op[QX_OP_COUNT]);
/* The same of one draft: a row of the draft head, with its vocabulary. */
void qx_draft_bytes(const struct qx_model *m, double expert_bytes, double by_op[QX_OP_COUNT]);
/* Operations (a product and its sum are two) that reading a prompt of n tokens needs: matrices of every token,
 * the head of the last one alone, attention to at most the budget, scores of all blocks beyond it. */
double qx_prompt_flops(const struct qx_model *m, uint64_t n_tokens);

#endif
