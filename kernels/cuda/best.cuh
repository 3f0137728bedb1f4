/* best.cuh: the best of logits by a grid: what arg-max, sampling and the draft head share. */
#ifndef QX_CUDA_BEST_CUH
#define QX_CUDA_BEST_CUH

#include "common.cuh"

/* Larger is better; NaN above everything; equal keys to the lower id. */
__device__ __forceinline__ uint32_t logit_key(float f)
{
    const uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return 0xffffffffu;
    }
    /* both zeros are equal */
    return u == 0x80000000u ? 0x80000000u : (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

/* The logit of a key. */
__device__ __forceinline__ float logit_of(uint32_t key)
{
    return __uint_as_float(key == 0xffffffffu ? 0x7fffffffu : key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct best {
    uint32_t key, id;
};
__device__ __forceinline__ best best_of(best a, best b)
{
    return b.key > a.key || (b.key == a.key && b.id < a.id) ? b : a;
}
/* Takes over what the lane whose number differs in bit i has, where that is better. */
__device__ __forceinline__ void best_across(best &b, int i)
{
    best o;
    o.key = __shfl_xor_sync(0xffffffffu, b.key, i);
    o.id = __shfl_xor_sync(0xffffffffu, b.id, i);
    b = best_of(b, o);
}
static __device__ best block_best(best v, best *sh)
{
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        best_across(v, i);
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        sh[threadIdx.x / 32] = v;
    }
    __syncthreads();
    for (uint32_t i = 0; i < blockDim.x / 32; ++i) {
        v = best_of(v, sh[i]);
    }
    return v;
}

#define SCAN_N 8u /* logits of a thread in flight together */

/* This block's share of a row: its best; v has the first logits of the thread's part. */
__device__ __forceinline__ best scan_best(const float *l, uint32_t vocab, best *sh, float (&v)[SCAN_N])
{
    const uint32_t i0 = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    best b = {0, 0xffffffffu};
#pragma unroll
    for (uint32_t k = 0; k < SCAN_N; ++k) {
        v[k] = i0 + k * step < vocab ? __ldcg(l + i0 + k * step) : 0.0f;
    }
#pragma unroll
    for (uint32_t k = 0; k < SCAN_N; ++k) {
        const best c = {logit_key(v[k]), i0 + k * step};
        b = c.id < vocab ? best_of(b, c) : b;
    }
    for (uint32_t i = i0 + SCAN_N * step; i < vocab; i += step) {
        const best c = {logit_key(__ldcg(l + i)), i};
        b = best_of(b, c);
    }
    return block_best(b, sh);
}

static __device__ float block_sum(float v, float *sh)
{
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        sh[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = 0.0f;
    for (uint32_t i = 0; i < blockDim.x / 32; ++i) {
        v += sh[i];
    }
    return v;
}

/* True in the last block of this row to arrive. */
static __device__ bool last_block(unsigned *ticket)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        if (last) {
            *ticket = 0;
        }
    }
    __syncthreads();
    if (last) {
        __threadfence();
    }
    return last;
}

#endif
