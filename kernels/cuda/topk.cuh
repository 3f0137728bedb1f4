/* topk.cuh: the experts that a row picks, by one warp. */
#ifndef QX_CUDA_TOPK_CUH
#define QX_CUDA_TOPK_CUH

#include "common.cuh"

__device__ __forceinline__ uint32_t order_key(float f)
{
    const uint32_t u = __float_as_uint(f);
    return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

/* The k largest of n logits by one warp, ties to the lower index. */
template <int EPL>
__device__ void warp_topk(const float *logits, uint32_t n, uint32_t k, bool norm, int32_t *expert,
                          float *weight)
{
    const uint32_t lane = threadIdx.x & 31;
    uint32_t key[EPL];
    float x[EPL];
#pragma unroll
    for (int i = 0; i < EPL; ++i) {
        const uint32_t e = i * 32 + lane;
        x[i] = e < n ? __ldcg(logits + e) : 0.0f;
        key[i] = e < n ? order_key(x[i]) : 0;
    }
    float mine = -INFINITY, top = 0.0f;
    int32_t mine_e = 0;
    for (uint32_t s = 0; s < k; ++s) {
        uint32_t best = 0, at = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < EPL; ++i) {
            if (key[i] > best) {
                best = key[i];
                at = i * 32 + lane;
            }
        }
        const uint32_t b = __reduce_max_sync(0xffffffffu, best);
        uint32_t e = __reduce_min_sync(0xffffffffu, best == b ? at : 0xffffffffu);
        e = e < n ? e : n - 1;
        float v = 0.0f;
#pragma unroll
        for (int i = 0; i < EPL; ++i) {
            if (e == i * 32 + lane) {
                v = x[i];
                key[i] = 0;
            }
        }
        v = __shfl_sync(0xffffffffu, v, e & 31);
        if (s == 0) {
            top = v;
        }
        if (lane == s) {
            mine = v;
            mine_e = (int32_t)e;
        }
    }
    float den = 0.0f;
    if (norm) {
        den = warp_sum(lane < k ? expf(mine - top) : 0.0f);
    } else {
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < EPL; ++i) {
            s += (uint32_t)i * 32 + lane < n ? expf(x[i] - top) : 0.0f;
        }
        den = warp_sum(s);
    }
    if (lane < k) {
        expert[lane] = mine_e;
        weight[lane] = expf(mine - top) / den;
    }
}

/* The router's choice for one row of at most 1024 logits, by one warp. */
__device__ inline void warp_route(const float *logits, uint32_t n, uint32_t k, bool norm, int32_t *expert, float *weight)
{
    if (n <= 128) {
        warp_topk<4>(logits, n, k, norm, expert, weight);
    } else if (n <= 512) {
        warp_topk<16>(logits, n, k, norm, expert, weight);
    } else {
        warp_topk<32>(logits, n, k, norm, expert, weight);
    }
}

#endif
