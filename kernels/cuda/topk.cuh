/* topk.cuh: the experts that a row picks, by one warp. */
#ifndef QX_CUDA_TOPK_CUH
#define QX_CUDA_TOPK_CUH

#include "common.cuh"

__device__ __forceinline__ uint32_t order_key(float f)
{
    const uint32_t u = __float_as_uint(f);
    return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

__device__ __forceinline__ float order_value(uint32_t key)
{
    return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

/* Sum of exp(logit(e) - top) of all n by one warp. */
template <class R> __device__ __forceinline__ float warp_exp_sum(const R &logit, uint32_t n, float top)
{
    float s = 0.0f;
#pragma unroll 1
    for (uint32_t e = threadIdx.x & 31; e < n; e += 32) {
        s += expf(logit(e) - top);
    }
    return warp_sum(s);
}

/* One warp: the k largest of logits, ties to the lower index; key[i] of a lane is order_key of logit i * 32 + lane,
 * 0 where there is none. */
template <int EPL, class R>
__device__ __forceinline__ void warp_pick(uint32_t (&key)[EPL], const R &logit, uint32_t n, uint32_t k, bool norm,
                                          int32_t *expert, float *weight)
{
    const uint32_t lane = threadIdx.x & 31;
    float mine = -INFINITY, top = 0.0f;
    int32_t mine_e = 0;
    for (uint32_t s = 0; s < k; ++s) {
        uint32_t best = 0, at = EPL; /* of the lane */
#pragma unroll
        for (int i = 0; i < EPL; ++i) {
            if (key[i] > best) {
                best = key[i];
                at = i;
            }
        }
        const uint32_t b = __reduce_max_sync(0xffffffffu, best);
        const uint32_t at_least = __reduce_min_sync(0xffffffffu, best == b ? at * 32 + lane : 0xffffffffu);
        const uint32_t e = at_least < n ? at_least : n - 1;
        const float v = order_value(b);
        top = s == 0 ? v : top;
#pragma unroll
        for (int i = 0; i < EPL; ++i) {
            key[i] = best == b && at == (uint32_t)i && e % 32 == lane ? 0 : key[i];
        }
        if (lane == s) {
            mine = v;
            mine_e = (int32_t)e;
        }
    }
    const float den = norm ? warp_sum(lane < k ? expf(mine - top) : 0.0f) : warp_exp_sum(logit, n, top);
    if (lane < k) {
        expert[lane] = mine_e;
        weight[lane] = expf(mine - top) / den;
    }
}

/* The same faster: those that reach the k-th largest of the lanes' largest are few and hold the k largest, whose
 * places are counted. room: 32 pairs of shared memory of this warp. False: they are not few. */
template <int EPL, class R>
__device__ __forceinline__ bool warp_pick_few(const uint32_t (&key)[EPL], const R &logit, uint32_t n, uint32_t k,
                                              bool norm, uint2 *room, int32_t *expert, float *weight)
{
    const uint32_t lane = threadIdx.x & 31;
    uint32_t most = 0, before = 0;
#pragma unroll
    for (int i = 0; i < EPL; ++i) {
        most = key[i] > most ? key[i] : most;
    }
#pragma unroll
    for (uint32_t j = 0; j < 32; ++j) {
        const uint32_t o = __shfl_sync(0xffffffffu, most, j);
        before += o > most || (o == most && j < lane);
    }
    const uint32_t least = __reduce_max_sync(0xffffffffu, before == k - 1 ? most : 0);
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < EPL; ++i) {
        const bool in = key[i] >= least && key[i];
        const uint32_t who = __ballot_sync(0xffffffffu, in), at = count + __popc(who & ((1u << lane) - 1));
        if (in && at < 32) {
            room[at] = make_uint2(key[i], i * 32 + lane);
        }
        count += __popc(who);
    }
    __syncwarp();
    if (count < k || count > 32) {
        return false;
    }
    const uint2 mine = lane < count ? room[lane] : make_uint2(0, 0xffffffffu);
    uint32_t place = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
        const uint2 o = room[j];
        place += o.x > mine.x || (o.x == mine.x && o.y < mine.y);
    }
    const float top = order_value(__reduce_max_sync(0xffffffffu, most)), v = expf(order_value(mine.x) - top);
    const bool picked = lane < count && place < k;
    const float all = norm ? warp_sum(picked ? v : 0.0f) : warp_exp_sum(logit, n, top);
    if (picked) {
        expert[place] = (int32_t)mine.y;
        weight[place] = v / all;
    }
    return true;
}

template <int EPL>
__device__ __forceinline__ void warp_topk(const float *logits, uint32_t n, uint32_t k, bool norm, int32_t *expert,
                                          float *weight)
{
    uint32_t key[EPL];
#pragma unroll
    for (int i = 0; i < EPL; ++i) {
        const uint32_t e = i * 32 + (threadIdx.x & 31);
        key[i] = e < n ? order_key(__ldcg(logits + e)) : 0;
    }
    warp_pick<EPL>(key, [=](uint32_t e) { return __ldcg(logits + e); }, n, k, norm, expert, weight);
}

/* The router's choice for one row of at most 1024 logits, by one warp. */
__device__ inline void warp_route(const float *logits, uint32_t n, uint32_t k, bool norm, int32_t *expert,
                                  float *weight)
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
