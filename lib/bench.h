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
    double tokens;             /* kept a round */
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
 * and the draft head's rows of what was kept. Random weights accept hardly anything: `accept` tokens a round
 * on average, 1 to k + 1, are kept whatever was chosen. `n` rounds a run. */
int qx_bench_drafts(struct qx_model *m, uint32_t k, double accept, uint64_t depth, uint32_t n, uint32_t repeat,
                    struct qx_bench_row *out, struct qx_error *err);
/* Prefills one prompt of n random ids, `repeat` times, in chunks of the plan. */
int qx_bench_prefill(struct qx_model *m, uint64_t n, uint32_t repeat, struct qx_bench_row *out,
                     struct qx_error *err);

/* A workload as published: `streams` requests of a shared prefix, read once, and `suffix` ids of their own,
 * each continued by `output` tokens. A first request brings the prefix; the others begin when it is there. */
struct qx_bench_load {
    uint32_t streams;
    uint64_t shared, suffix, output;
    double first_s;             /* the first request's time to its first token: the prefix read, and one id */
    double ttft_mean_s, ttft_max_s;       /* of the others, from their start to their first token */
    double latency_mean_s, latency_max_s; /* to their last token */
    double stream_tok_s;        /* tokens a second of one of them after its first, mean */
    double total_tok_s;         /* tokens of all a second, from the first start to the last token */
    uint64_t shared_tokens;     /* that were not read again */
};
/* The model needs streams + 1 sequences. */
int qx_bench_workload(struct qx_model *m, uint32_t streams, uint64_t shared, uint64_t suffix, uint64_t output,
                      struct qx_bench_load *out, struct qx_error *err);

/* Every op of a decode step alone, over all layers, as one recorded graph: time of a step's share. The last
 * is all of them together. */
struct qx_bench_op { const char *name; double s, bytes; uint64_t n_nodes; };
int qx_bench_ops(struct qx_model *m, uint32_t streams, uint64_t depth, struct qx_bench_op out[QX_OP_COUNT + 1],
                 struct qx_error *err);
/* The same of a round as qx_bench_drafts runs them: of the verification, and of the k drafts. *round_s: both,
 * with nothing that the host does between rounds. */
int qx_bench_round_ops(struct qx_model *m, uint32_t k, double accept, uint64_t depth,
                       struct qx_bench_op check[QX_OP_COUNT + 1], struct qx_bench_op drafts[QX_OP_COUNT + 1],
                       double *round_s, struct qx_error *err);

#endif
