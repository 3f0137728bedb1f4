/* bench.h: speed of a model on its device, against what its memory allows. */
#ifndef QX_BENCH_H
#define QX_BENCH_H

#include "engine.h"

/* Bytes a second that reading reaches on the device: copies of a large buffer, read and write counted;
 * 0 where there is not enough memory for it. */
double qx_bench_bandwidth(struct qx_model *m);

struct qx_bench_row {
    uint32_t streams;
    uint64_t depth;            /* context filled before */
    uint64_t prompt;           /* prefill: tokens; 0: decode */
    uint32_t n_runs;
    uint32_t drafts;           /* a round of so many drafts: then a step is a round; 0: plain decode */
    double median_s, low_s, high_s; /* a step, or the whole prompt */
    double bytes;              /* that a step must move; of a prompt: all weights that it needs, once */
    double flops;              /* that a prompt must do; 0: not counted */
    double unique_experts;     /* a layer, mean over the layers of the last step; 0: not counted */
    uint64_t n_nodes;          /* kernels and copies of a recorded step */
    uint64_t n_steps;          /* decode steps timed */
    uint64_t n_waits, n_allocs;/* while they ran: times the host waited for the device, and took memory of it */
};

/* Decodes `n` tokens at `depth` on `streams` sequences, `repeat` times. The caches hold random values. */
int qx_bench_decode(struct qx_model *m, uint32_t streams, uint64_t depth, uint32_t n, uint32_t repeat,
                    struct qx_bench_row *out, struct qx_error *err);
/* Rounds of k drafts on one sequence at `depth`: the draft head's chain, the step that verifies k + 1 rows,
 * and the draft head's rows of what was kept. Random weights accept hardly anything: read the time of a
 * round, and divide by it what an acceptance length would give. `n` rounds a run. */
int qx_bench_drafts(struct qx_model *m, uint32_t k, uint64_t depth, uint32_t n, uint32_t repeat,
                    struct qx_bench_row *out, struct qx_error *err);
/* Prefills one prompt of n random ids, `repeat` times, in chunks of the plan. */
int qx_bench_prefill(struct qx_model *m, uint64_t n, uint32_t repeat, struct qx_bench_row *out,
                     struct qx_error *err);

/* Every op of a decode step alone, over all layers, as one recorded graph: time of a step's share. */
struct qx_bench_op { const char *name; double s, bytes; uint64_t n_nodes; };
int qx_bench_ops(struct qx_model *m, uint32_t streams, uint64_t depth, struct qx_bench_op out[QX_OP_COUNT],
                 struct qx_error *err);

#endif
