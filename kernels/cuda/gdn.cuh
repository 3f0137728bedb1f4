/* gdn.cuh: what the kernels of Gated DeltaNet share: their arguments and the reading of the history. */
#ifndef QX_CUDA_GDN_CUH
#define QX_CUDA_GDN_CUH

#include "common.cuh"

#define GDN_D 128 /* key and value head dimension */
#define GDN_MAX_TAPS 8

struct gdn_args {
    struct qx_step step;
    uint32_t k_heads, v_heads, group, taps;
    const float *in;
    uint64_t in_stride;
    const float *conv_w, *a_log, *dt_bias, *norm;
    float eps;
    float *conv_state;
    uint64_t conv_stride;
    float *s;
    uint64_t s_stride;
    float *out;
    /* prompts only: bit r set: row r belongs to a run that the chunked kernels take */
    const uint32_t *chunked;
    const uint32_t *n_short; /* and how many rows it does not take */
    unsigned *tickets;
    uint32_t channels;
    uint32_t slots;          /* of S in shared memory */
    unsigned *done;          /* NULL, or the blocks of the launch before whose part of `in` but the gate is there */
    unsigned blocks;         /* and how many they are */
    bool whole;              /* all heads of a key head in one cluster, as there are too few tickets */
};

/* log(1 + e^x), x itself where that is the nearest f32. */
__device__ __forceinline__ float softplus_f(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* Whether the chunked kernels can take this op's long runs; they leave the rest to the recurrent one and
 * tell it by *a which that is. */
bool gdn_prompt_fits(struct qx_queue *q, const struct qx_op_gdn *o);
int gdn_prompt(struct qx_queue *q, const struct qx_op_gdn *o, gdn_args *a);

#endif
