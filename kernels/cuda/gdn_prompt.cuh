/* gdn_prompt.cuh: what the kernels of Gated DeltaNet for prompts share: the plan of chunks, the chunks' matrices. */
#ifndef QX_CUDA_GDN_PROMPT_CUH
#define QX_CUDA_GDN_PROMPT_CUH

#include "gdn.cuh"
#include "mma.cuh"

enum {
    CH = 64,              /* rows a chunk */
    RP = 264,             /* bf16 from row to row of q and k in shared memory: 128 hi, 128 lo, pad */
    TP = 72,              /* bf16 from row to row of T and P */
    MIN_RUN = 33,         /* rows of the shortest run taken here */
    MAX_RUNS = 2048,
    MAX_WORDS = 2048,     /* of 32 rows */
    MAX_PLAN = 1088,      /* chunks of a step: 65536 / 64 + 64 */
    TAPS = 4
};

/* What intra makes of a chunk and value head. */
struct gdn_tile {
    uint16_t t[2][CH][TP], p[2][CH][TP]; /* hi, lo */
    float grow[CH];                      /* e^Gamma_t */
    float fade[CH];                      /* e^(Gamma_n - Gamma_t), 0 past the chunk's end */
    float total, pad[63];                /* e^Gamma_n */
};

struct gdn_plan {
    uint32_t n_chunks, n_runs, n_short;
    uint32_t pad[61];
    uint8_t zero[512];
    uint32_t mask[MAX_WORDS];
    struct { int32_t row, n, out, run; } chunk[MAX_PLAN];
    struct { int32_t chunk0, first, slot, pad; } run[MAX_RUNS];
};
#define PLAN_BYTES ((size_t)8 << 20) /* the plan and the carried states, before the tiles */
static_assert(sizeof(struct gdn_plan) < ((size_t)1 << 20), "the plan's place");

struct prompt_args {
    gdn_args g;
    uint32_t channels, max_chunks;
    float *conv;            /* [row][channels]: q, k heads as 128 hi, 128 lo bf16; v as f32 */
    struct gdn_plan *plan;
    float *carry;           /* S of the run that goes on in the next segment */
    struct gdn_tile *tile;  /* [chunk of the segment][v head] */
    uint32_t c0, c1;        /* chunks of this segment */
};

/* gdn_chunks.cu: a segment of chunks, c0 .. c1 - 1. */
bool gdn_chunks_fit(const struct qx_queue *q);
int gdn_chunks(struct qx_queue *q, const prompt_args &a);

#endif
