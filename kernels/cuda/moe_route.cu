/* moe_route.cu: the router. Logits are f32 sums of f32 inputs.
 *
 * route_rows, a BF16 gate of at most 512 experts: a block has a quarter of the columns of 16 experts, in registers
 * before the wait, and multiplies them with up to eight rows as three bf16 terms each; sums leave the matrix units
 * after 64 columns. One block more a row (these come last, so that they hold no other back) reads the words of the
 * others (common.cuh) and picks. moe_route: any other; the last block of a group of rows picks. In both a row's sums
 * do not depend on the others. */
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

#define RR_EXPERTS 16u /* a block */
#define RR_PARTS 4u    /* of the columns, a block each */
#define RR_COLS 64u    /* a warp */
#define RR_ROWS 8u     /* at once */
#define RR_MAX_EXPERTS 512u
#define RR_MAX_HIDDEN (RR_PARTS * RR_COLS * 16)
#define RR_WORDS (RR_MAX_EXPERTS * RR_PARTS) /* a row */
#define RR_LAUNCH 32u                        /* the most rows a launch */
#define RR_SHARED (70u << 10)                /* asked for: two blocks do not begin beside one of the op before */
static_assert(RR_LAUNCH * RR_WORDS <= QX_ROUTE_WORDS && RR_LAUNCH < QX_N_NUMBERS && RR_MAX_EXPERTS <= 2 * 256, "");

struct rr_args {
    const float *m;
    const uint16_t *gate;
    uint32_t n_rows, hidden, n_experts, k, tiles, n_groups;
    bool norm;
    float *weight;
    int32_t *expert;
    uint64_t *words;   /* [row][expert][part] */
    unsigned *numbers; /* [row] */
};

/* Weights are read once: first to leave L2. Not by ld.global.nc, which the assembler puts behind pdl_wait. */
__device__ __forceinline__ uint2 rr_load(const void *p, uint64_t policy)
{
    uint2 v = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p), "l"(policy)
                 : "memory");
#else
    v = __ldg((const uint2 *)p);
#endif
    return v;
}

/* Two values as three terms of bf16 that add up to them. */
__device__ __forceinline__ void rr_split(float x, float y, uint32_t (&t)[3])
{
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        t[i] = pack_bf16(x, y);
        x -= bf16_lo(t[i]);
        y -= bf16_hi(t[i]);
    }
}

/* The choice for a row whose logits arrive as words. */
template <int EPL>
__device__ __forceinline__ void rr_pick(const rr_args &a, const float *logits, uint2 *room, int32_t *expert,
                                        float *weight)
{
    const uint32_t lane = threadIdx.x;
    uint32_t key[EPL];
#pragma unroll
    for (int i = 0; i < EPL; ++i) {
        const uint32_t e = i * 32 + lane;
        key[i] = e < a.n_experts ? order_key(logits[e]) : 0;
    }
    const auto logit = [=](uint32_t e) { return logits[e]; };
    if (!warp_pick_few<EPL>(key, logit, a.n_experts, a.k, a.norm, room, expert, weight)) {
        warp_pick<EPL>(key, logit, a.n_experts, a.k, a.norm, expert, weight);
    }
}

__global__ void __maxnreg__(64) route_rows(const __grid_constant__ rr_args a)
{
    __shared__ union {
        float red[RR_MAX_HIDDEN / RR_PARTS / RR_COLS][RR_EXPERTS * RR_ROWS]; /* of a warp */
        struct {
            float logits[RR_MAX_EXPERTS];
            uint2 room[32];
            int32_t expert[32]; /* of the choice among nothing */
            float weight[32];
        };
    } s;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t n_sums = a.tiles * RR_PARTS * a.n_groups;
    if (blockIdx.x >= n_sums) {
        const uint32_t row = blockIdx.x - n_sums;
        const uint64_t *p = a.words + row * RR_WORDS;
        for (uint32_t e = tid; e < a.n_experts; e += blockDim.x) {
            s.logits[e] = (float)e;
        }
        /* first the choice among these, for its instructions, which else come one after another behind the words */
#pragma unroll 1
        for (uint32_t pass = 0; pass < 2; ++pass) {
            uint32_t number = 0;
            if (pass) {
                pdl_wait();
                pdl_next();
                number = __ldcg(a.numbers + row) + 1;
                uint64_t w[2][RR_PARTS];
                bool late;
                do {
                    late = false;
#pragma unroll
                    for (uint32_t j = 0; j < 2; ++j) {
                        const uint32_t e = tid + j * blockDim.x;
#pragma unroll
                        for (uint32_t i = 0; i < RR_PARTS; ++i) {
                            w[j][i] = e < a.n_experts ? word_read(p + e * RR_PARTS + i) : (uint64_t)number << 32;
                        }
                    }
#pragma unroll
                    for (uint32_t i = 0; i < 2 * RR_PARTS; ++i) {
                        late |= (uint32_t)(w[i / RR_PARTS][i % RR_PARTS] >> 32) != number;
                    }
                } while (late);
                __syncthreads(); /* the first choice is made */
#pragma unroll
                for (uint32_t j = 0; j < 2; ++j) {
                    const uint32_t e = tid + j * blockDim.x;
                    if (e < a.n_experts) {
                        s.logits[e] =
                            (__uint_as_float((uint32_t)w[j][0]) + __uint_as_float((uint32_t)w[j][1])) +
                            (__uint_as_float((uint32_t)w[j][2]) + __uint_as_float((uint32_t)w[j][3]));
                    }
                }
            }
            __syncthreads();
            if (tid < 32) {
                int32_t *expert = pass ? a.expert + row * a.k : s.expert;
                float *weight = pass ? a.weight + row * a.k : s.weight;
                if (a.n_experts <= 128) {
                    rr_pick<4>(a, s.logits, s.room, expert, weight);
                } else {
                    rr_pick<RR_MAX_EXPERTS / 32>(a, s.logits, s.room, expert, weight);
                }
            } else if (tid == 32 && pass) {
                a.numbers[row] = number; /* every block has read it, whose words are here */
            }
        }
        return;
    }
    /* the lane's columns: four of each 16 of the warp's; rows g and g + 8 of the tile */
    const uint32_t grp = blockIdx.x / (a.tiles * RR_PARTS), b = blockIdx.x - grp * (a.tiles * RR_PARTS);
    const uint32_t part = b % RR_PARTS, e0 = b / RR_PARTS * RR_EXPERTS, m0 = grp * RR_ROWS;
    const uint32_t m_rows = a.n_rows - m0 < RR_ROWS ? a.n_rows - m0 : RR_ROWS;
    const uint32_t k0 = part * (blockDim.x / 32 * RR_COLS) + warp * RR_COLS + q * 4;
    const uint64_t policy = l2_read_once();
    uint2 w[2][4];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t e = e0 + g + 8 * h;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t k = k0 + i * 16;
            w[h][i] = e < a.n_experts && k < a.hidden ? rr_load(a.gate + e * a.hidden + k, policy) : make_uint2(0, 0);
        }
    }
    pdl_wait();
    pdl_next();
    float4 x[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t k = k0 + i * 16;
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (g < m_rows && k < a.hidden) {
            x[i] = __ldcg((const float4 *)(a.m + (uint64_t)(m0 + g) * a.hidden + k));
        }
    }
    const uint32_t m = tid % RR_ROWS, e = e0 + tid / RR_ROWS;
    const bool posts = tid < RR_EXPERTS * RR_ROWS && m < m_rows && e < a.n_experts;
    const uint32_t number = posts ? __ldcg(a.numbers + m0 + m) + 1 : 0;
    float c[3][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        uint32_t lo[3], hi[3];
        rr_split(x[i].x, x[i].y, lo);
        rr_split(x[i].z, x[i].w, hi);
#pragma unroll
        for (int t = 0; t < 3; ++t) {
            mma_bf16(c[t], w[0][i].x, w[1][i].x, w[0][i].y, w[1][i].y, lo[t], hi[t]);
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
        *(float2 *)&s.red[warp][(g + 8 * h) * RR_ROWS + 2 * q] =
            make_float2((c[2][2 * h] + c[1][2 * h]) + c[0][2 * h],
                        (c[2][2 * h + 1] + c[1][2 * h + 1]) + c[0][2 * h + 1]);
    }
    __syncthreads();
    if (posts) {
        float sum = s.red[0][tid];
        for (uint32_t i = 1; i < blockDim.x / 32; ++i) {
            sum += s.red[i][tid];
        }
        word_post(a.words + ((m0 + m) * RR_MAX_EXPERTS + e) * RR_PARTS + part, sum, number);
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
    const uint32_t warps = (o->hidden + RR_PARTS * RR_COLS - 1) / (RR_PARTS * RR_COLS);
    const dim3 block((warps < 8 ? 8 : warps) * 32); /* two experts a thread where picks are made */
    int r = 0;
    for (uint32_t at = 0; at < o->n_rows && !r; at += RR_LAUNCH) {
        a.n_rows = o->n_rows - at < RR_LAUNCH ? o->n_rows - at : RR_LAUNCH;
        a.m = o->m + (uint64_t)at * o->hidden;
        a.weight = o->weight + (uint64_t)at * o->k;
        a.expert = o->expert + (uint64_t)at * o->k;
        a.n_groups = (a.n_rows + RR_ROWS - 1) / RR_ROWS;
        r = launch(q, "moe_route", route_rows, dim3(a.tiles * RR_PARTS * a.n_groups + a.n_rows), block, RR_SHARED, a);
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
        o->hidden <= RR_MAX_HIDDEN && o->n_experts <= RR_MAX_EXPERTS) {
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

