/* moe_route.cu: the router. Logits are f32 sums of f32 inputs.
 *
 * route_rows, a BF16 gate of at most 512 experts: each thread holds one chunk of 8 columns of 4 experts in
 * registers, loaded before the wait; one block more a group of rows (these come last, so that they hold no other
 * back) reads the words of the others (common.cuh) and picks, a warp a row. moe_route: any other; the last block of a
 * group of rows picks. In both a row's sums do not depend on the others. */
#include "moe.cuh"
#include "prompt.h"
#include "stream.cuh"
#include "topk.cuh"

struct route_args {
    const float *m;
    uint32_t n_rows, hidden, n_experts, k, tiles;
    bool norm;
    tile_w w;
    float *logits, *weight;
    int32_t *expert;
    unsigned *tickets;
};

static __device__ void route_topk(const route_args &a, uint32_t m0, uint32_t m_rows)
{
    for (uint32_t m = threadIdx.x / 32; m < m_rows; m += blockDim.x / 32) {
        const uint32_t r = m0 + m;
        const float *l = a.logits + (uint64_t)r * a.n_experts;
        int32_t *e = a.expert + (uint64_t)r * a.k;
        float *w = a.weight + (uint64_t)r * a.k;
        warp_route(l, a.n_experts, a.k, a.norm, e, w);
    }
}

template <int NB> __global__ void __launch_bounds__(256) moe_route(const __grid_constant__ route_args a)
{
    extern __shared__ uint4 sm[];
    __shared__ float red[8 * 16 * NB * 8];
    __shared__ bool last;
    pdl_next();
    const uint32_t grp = blockIdx.x / a.tiles, b = blockIdx.x - grp * a.tiles;
    const uint32_t m0 = grp * 8, m_rows = a.n_rows - m0 < 8 ? a.n_rows - m0 : 8;
    const tile_split sp = tile_divide(a.w.tf, a.w.k, 8);
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t row = warp < sp.parts ? b * 16 : a.w.w.rows;
    const src_rows src = {a.m + (uint64_t)m0 * a.hidden, a.hidden, a.hidden};
    QX_TILE_SWITCH(F, a.w.tf,
                   tile_run<F, NB>(red + warp * (16 * NB * 8), a.w, sp, row, warp % sp.parts, src, m_rows, sm,
                                   threadIdx.x, 256, tile_no_ready()))
    __syncthreads();
    const float f = tile_factor(a.w);
    for (uint32_t i = threadIdx.x; i < m_rows * 16; i += 256) {
        const uint32_t m = i / 16, rr = i & 15;
        if (b * 16 + rr < a.n_experts) {
            a.logits[(uint64_t)(m0 + m) * a.n_experts + b * 16 + rr] =
                f * tile_result<NB>(red, sp.parts, rr, m);
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(a.tickets + grp, 1u) == a.tiles - 1;
        if (last) {
            a.tickets[grp] = 0;
        }
    }
    __syncthreads();
    if (last) {
        __threadfence();
        route_topk(a, m0, m_rows);
    }
}

/* ---- a BF16 gate, columns of a thread in registers ---- */

#define RR_EXPERTS 4 /* a block */
#define RR_MAX_EXPERTS 512

struct rr_args {
    const float *m;
    const uint16_t *gate;
    uint32_t n_rows, hidden, n_experts, k, tiles, n_groups;
    bool norm;
    float *weight;
    int32_t *expert;
    uint64_t *words;   /* [row][expert] */
    unsigned *numbers; /* [group] */
};

/* Weights are read once: first to leave L2. */
__device__ __forceinline__ uint4 rr_load(const void *p, uint64_t policy)
{
#if __CUDA_ARCH__ >= 900
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
#else
    return ld_stream(p);
#endif
}

/* The choice for a row whose logits arrive as words. */
template <int EPL>
__device__ __forceinline__ void rr_pick(const rr_args &a, uint32_t row, uint32_t number, uint2 *room, uint32_t lane)
{
    const uint64_t *p = a.words + (uint64_t)row * a.n_experts;
    uint32_t key[EPL];
    bool late;
    do {
        late = false;
#pragma unroll
        for (int i = 0; i < EPL; ++i) {
            const uint32_t e = i * 32 + lane;
            const uint64_t w = word_read(p + e); /* there is room behind the last row's */
            key[i] = e < a.n_experts ? order_key(__uint_as_float((uint32_t)w)) : 0;
            late |= e < a.n_experts && (uint32_t)(w >> 32) != number;
        }
    } while (__any_sync(0xffffffffu, late));
    int32_t *expert = a.expert + (uint64_t)row * a.k;
    float *weight = a.weight + (uint64_t)row * a.k;
    const auto logit = [=](uint32_t e) { return __uint_as_float((uint32_t)word_read(p + e)); };
    if (!warp_pick_few<EPL>(key, logit, a.n_experts, a.k, a.norm, room, expert, weight)) {
        warp_pick<EPL>(key, logit, a.n_experts, a.k, a.norm, expert, weight);
    }
}

/* Sums over the 32 lanes of N values a lane, the same tree for every N: afterwards v[0] of a lane is the sum
 * of value `which` (its low bits are the lane's high bits). */
template <int N> __device__ __forceinline__ uint32_t rr_reduce(float (&v)[N], uint32_t lane)
{
    uint32_t which = 0;
    int n = N;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        if (n > 1) {
            const bool up = lane & (uint32_t)mask;
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                if (i < n / 2) {
                    const float keep = up ? v[i + n / 2] : v[i], give = up ? v[i] : v[i + n / 2];
                    v[i] = keep + __shfl_xor_sync(0xffffffffu, give, mask);
                }
            }
            n /= 2;
            which += up ? (uint32_t)n : 0;
        } else {
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], mask);
        }
    }
    return which;
}

template <int NR> __global__ void __maxnreg__(64) route_rows(const __grid_constant__ rr_args a)
{
    constexpr int N = RR_EXPERTS * NR; /* value e * NR + row */
    __shared__ float red[16][N];
    __shared__ uint2 room[16][32];
    const bool picks = blockIdx.x >= a.tiles * a.n_groups;
    const uint32_t grp = picks ? blockIdx.x - a.tiles * a.n_groups : blockIdx.x / a.tiles;
    const uint32_t b = blockIdx.x - grp * a.tiles, m0 = grp * NR;
    const uint32_t m_rows = a.n_rows - m0 < NR ? a.n_rows - m0 : NR;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    if (picks) {
        pdl_wait();
        pdl_next();
        const uint32_t number = __ldcg(a.numbers + grp) + 1;
        for (uint32_t m = warp; m < m_rows; m += blockDim.x / 32) {
            if (a.n_experts <= 128) {
                rr_pick<4>(a, m0 + m, number, room[warp], lane);
            } else {
                rr_pick<RR_MAX_EXPERTS / 32>(a, m0 + m, number, room[warp], lane);
            }
            __syncwarp();
        }
        __syncthreads();
        if (tid == 0) {
            a.numbers[grp] = number;
        }
        return;
    }
    const bool in = tid * 8 < a.hidden;
    const uint64_t policy = l2_read_once();
    uint4 w[RR_EXPERTS];
#pragma unroll
    for (int e = 0; e < RR_EXPERTS; ++e) {
        const uint32_t r = b * RR_EXPERTS + e;
        w[e] = in && r < a.n_experts ? rr_load(a.gate + (uint64_t)r * a.hidden + tid * 8, policy)
                                     : make_uint4(0, 0, 0, 0);
    }
    pdl_wait();
    pdl_next();
    const uint32_t number = __ldcg(a.numbers + grp) + 1;
    float v[N];
#pragma unroll
    for (int m = 0; m < NR; ++m) {
        float x[8] = {};
        if (in) {
            const float4 *p = (const float4 *)(a.m + (uint64_t)(m0 + (m < (int)m_rows ? m : 0)) * a.hidden + tid * 8);
            const float4 p0 = __ldcg(p), p1 = __ldcg(p + 1);
            x[0] = p0.x, x[1] = p0.y, x[2] = p0.z, x[3] = p0.w;
            x[4] = p1.x, x[5] = p1.y, x[6] = p1.z, x[7] = p1.w;
        }
#pragma unroll
        for (int e = 0; e < RR_EXPERTS; ++e) {
            const uint32_t u[4] = {w[e].x, w[e].y, w[e].z, w[e].w};
            float s = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s = fmaf(bf16_lo(u[i]), x[2 * i], s);
                s = fmaf(bf16_hi(u[i]), x[2 * i + 1], s);
            }
            v[e * NR + m] = s;
        }
    }
    const uint32_t which = rr_reduce<N>(v, lane);
    if ((lane & (32 / N - 1)) == 0) {
        red[warp][which] = v[0];
    }
    __syncthreads();
    if (tid < N) {
        float s = red[0][tid];
        for (uint32_t i = 1; i < blockDim.x / 32; ++i) {
            s += red[i][tid];
        }
        const uint32_t e = b * RR_EXPERTS + tid / NR, m = tid % NR;
        if (e < a.n_experts && m < m_rows) {
            word_post(a.words + (uint64_t)(m0 + m) * a.n_experts + e, s, number);
        }
    }
}

static int route_rows_run(struct qx_queue *q, const struct qx_op_moe_route *o)
{
    rr_args a = {};
    a.gate = (const uint16_t *)o->gate.codes;
    a.hidden = o->hidden;
    a.n_experts = o->n_experts;
    a.k = o->k;
    a.norm = o->norm;
    a.words = q->route_words;
    a.numbers = q->numbers + 1;
    a.tiles = (o->n_experts + RR_EXPERTS - 1) / RR_EXPERTS;
    const dim3 block((o->hidden / 8 + 31) / 32 * 32);
    uint32_t most = (QX_ROUTE_WORDS - RR_MAX_EXPERTS) / o->n_experts / 8 * 8;
    most = most < (QX_N_NUMBERS - 1) * 8 ? most : (QX_N_NUMBERS - 1) * 8;
    int r = 0;
    for (uint32_t at = 0; at < o->n_rows && !r; at += most) {
        a.n_rows = o->n_rows - at < most ? o->n_rows - at : most;
        a.m = o->m + (uint64_t)at * o->hidden;
        a.weight = o->weight + (uint64_t)at * o->k;
        a.expert = o->expert + (uint64_t)at * o->k;
        const uint32_t nr = a.n_rows <= 1 ? 1 : a.n_rows <= 2 ? 2 : a.n_rows <= 4 ? 4 : 8;
        a.n_groups = (a.n_rows + nr - 1) / nr;
        const dim3 grid((a.tiles + 1) * a.n_groups);
        switch (nr) {
        case 1: r = launch(q, "moe_route", route_rows<1>, grid, block, 0, a); break;
        case 2: r = launch(q, "moe_route", route_rows<2>, grid, block, 0, a); break;
        case 4: r = launch(q, "moe_route", route_rows<4>, grid, block, 0, a); break;
        default: r = launch(q, "moe_route", route_rows<8>, grid, block, 0, a); break;
        }
    }
    if (!r) {
        q->routed.at = q->n_launches;
        q->routed.m = o->m;
    }
    return r;
}

/* ---- the op ---- */

extern "C" int qx_cuda_moe_route(struct qx_queue *q, const struct qx_op_moe_route *o)
{
    if (o->n_rows == 0) {
        return 0;
    }
    if (o->n_experts > 1024 || o->k > 32 || o->k > o->n_experts) {
        return qx_queue_refuse(q, "moe_route", "more than 1024 experts or 32 picked");
    }
    const int taken = qx_prompt_route(q, o);
    if (taken <= 0) {
        return taken;
    }
    const struct qx_weight &g = o->gate;
    if (g.fmt == QX_W_BF16 && ((uintptr_t)g.codes & 15) == 0 && ((uintptr_t)o->m & 15) == 0 && o->hidden % 8 == 0 &&
        o->hidden <= 4096 && o->n_experts <= RR_MAX_EXPERTS) {
        return route_rows_run(q, o);
    }
    route_args a = {};
    a.m = o->m;
    a.n_rows = o->n_rows;
    a.hidden = o->hidden;
    a.n_experts = o->n_experts;
    a.k = o->k;
    a.norm = o->norm;
    a.w = make_tile_w(o->gate, 0, o->hidden);
    a.logits = o->logits;
    a.weight = o->weight;
    a.expert = o->expert;
    a.tickets = q->tickets;
    a.tiles = (o->n_experts + 15) / 16;
    const uint32_t groups = (o->n_rows + 7) / 8, m = o->n_rows < 8 ? o->n_rows : 8;
    if (groups > QX_N_TICKETS) {
        return qx_queue_refuse(q, "moe_route", "too many rows");
    }
    const int nb = tile_nb(m);
    const uint32_t smem = tile_x_bytes(a.w.tf, nb, tile_divide(a.w.tf, o->hidden, 8), m);
    const dim3 grid(a.tiles * groups);
    switch (nb) {
    case 1: return launch(q, "moe_route", moe_route<1>, grid, dim3(256), smem, a);
    case 2: return launch(q, "moe_route", moe_route<2>, grid, dim3(256), smem, a);
    default: return launch(q, "moe_route", moe_route<3>, grid, dim3(256), smem, a);
    }
}

