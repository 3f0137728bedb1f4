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
};

/* log(1 + e^x), x itself where that is the nearest f32. */
__device__ __forceinline__ float softplus_f(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* Input of channel ch `i` rows after the run's first (negative: from the slot). */
__device__ __forceinline__ float gdn_p(const gdn_args &a, uint32_t first, int32_t i, uint32_t ch,
                                       uint32_t channels, int32_t slot)
{
    if (i >= 0) {
        return __ldcg(a.in + (uint64_t)(first + i) * a.in_stride + ch);
    }
    return slot < 0 ? 0.0f
                    : __ldcg(a.conv_state + slot * a.conv_stride +
                             (uint64_t)((int32_t)a.taps - 1 + i) * channels + ch);
}

/* Whether the chunked kernels can take this op's long runs; they leave the rest to the recurrent one and
 * set *a's bit mask for it. */
bool gdn_prompt_fits(struct qx_queue *q, const struct qx_op_gdn *o);
int gdn_prompt(struct qx_queue *q, const struct qx_op_gdn *o, gdn_args *a);

#endif
