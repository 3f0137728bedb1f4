/* moe_one_up.cu: gate and up of NVFP4 experts for one row of decoding in the released widths, beside a shared expert
 * of BF16 or MXFP8; inputs of products are bf16. Down is in moe_one.cu; the sums are, bit for bit, those of moe_rows.cu
 * and moe_nv.cu, which take more rows.
 *
 * A task is 8 rows of gate and the same 8 of up, the 16 rows of a tensor core tile, and a quarter of their columns:
 * five steps of 64 bytes a row. A warp has two tasks at most. It asks for the first one's steps as soon as it knows the
 * picks, each warp for itself, and for a step of the second whenever it has read one; quarters of a tile are added in
 * their order by the warp that ends last. The first blocks have a tile of the shared expert each, multiplied before the
 * picks are known.
 *
 * What is read before the wait: m with `early` set, since then the launch before is the router, which lets others start
 * only after it has seen m; the block's count of launches, which only gate and up write. */
#include "moe_one.cuh"
#include "stream.cuh"

#define UP_WARPS 16u
#define UP_RING ONE_STEPS
#define UP_TASKS 28u  /* of a block, at most */
#define UP_SCALES 80u /* bytes of a row of MXFP8's */
#define UP_SUM 16u    /* bytes of four sums, */
#define UP_SUMS 128u  /* of eight rows */
#define UP_RUNS 40u   /* of the shared expert, at most */
#define UP_ROW (NV_H / 2)
#define UP_ROW_SCALES (NV_H / 16)
static_assert((NV_MAX_K * NV_TILES + NV_BLOCKS - 1) / NV_BLOCKS * NV_PARTS <= UP_TASKS &&
                  UP_TASKS <= 2 * UP_WARPS,
              "");
static_assert(NV_H / 32 == UP_SCALES, "");

struct one_up_args {
    uint32_t k, n_experts;
    bool early;
    const float *m;
    const int32_t *expert;
    const struct qx_weight *gate, *up, *down;
    const uint8_t *s_codes[2], *s_scale[2]; /* of the shared expert: gate, up */
    const uint16_t *s_vec;
    one_words w;
    mr_by blocks;
};

struct one_up_shared {
    uint32_t arrive[UP_TASKS / NV_PARTS];
    float red[UP_WARPS], gate;
};

/* The rows of a warp's task, and what the lane copies of them. */
struct one_task {
    const uint8_t *c[2], *s; /* chunk q of rows g of gate and of up; scales of row `lane` of the sixteen */
    float f;                 /* factor of up where the lane is odd, else of gate */
};

/* Step i of a task. */
__device__ __forceinline__ void up_ask(const one_task &t, uint32_t i, uint32_t to, uint32_t lane)
{
    copy16(to + lane * 16, t.c[0] + i * 64, 16);
    copy16(to + 512 + lane * 16, t.c[1] + i * 64, 16);
    if (lane < 16) {
        copy8(to + 1024 + lane * 8, t.s + i * 8);
    }
}

/* How many came before; what they and this warp wrote before is seen by whom comes last. */
__device__ __forceinline__ uint32_t up_arrive(uint32_t *count)
{
    uint32_t old = 0;
#if __CUDA_ARCH__ >= 700
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(smem_addr(count)) : "memory");
#endif
    return old;
}

__device__ __forceinline__ void up_put(uint32_t at, const float (&v)[4])
{
    sts128(at, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
}
/* PARTS in their order, each of N sums. */
template <uint32_t PARTS, uint32_t N> __device__ __forceinline__ float4 up_sum(uint32_t at)
{
    float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (uint32_t i = 0; i < PARTS; ++i) {
        float4 p = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (uint32_t j = 0; j < N; ++j) {
            const uint4 v = lds128(at + (i * N + j) * UP_SUMS);
            p.x += __uint_as_float(v.x), p.y += __uint_as_float(v.y);
            p.z += __uint_as_float(v.z), p.w += __uint_as_float(v.w);
        }
        s.x += p.x, s.y += p.y, s.z += p.z, s.w += p.w;
    }
    return s;
}

/* Sums of a tile's rows g and g + 8 to the words of a column; by whole warps. */
__device__ __forceinline__ void up_post(const float4 &s, float f0, float f1, const one_words &w, uint32_t column,
                                        uint32_t tile, uint32_t number, uint32_t lane)
{
    const float h = silu_f(f0 * s.x) * (f1 * s.z);
    const float o = __shfl_down_sync(0xffffffffu, h, 16); /* a word has the values of rows g and g + 4 */
    if (lane < 16 && (lane & 3) == 0) {
        word_post(w.unit(column, tile) + (lane >> 2), __uint_as_float(pack_bf16(h, o)), number);
    }
}

template <int TF> __global__ void __launch_bounds__(UP_WARPS * 32, 2)
    one_up(const __grid_constant__ one_up_args a)
{
    using S = nv_shared<TF>;
    /* the shared expert's steps that are summed without a stop; a warp takes every sixteenth run */
    constexpr uint32_t RUN = TF == TF_MX ? 1 : ONE_STEPS, RUNS = S::PARTS * (ONE_STEPS / RUN), S_ROW = NV_H * S::ELEM;
    extern __shared__ __align__(128) uint4 sm4[];
    __shared__ one_up_shared sh;
    const uint32_t tid = threadIdx.x, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t warp = __shfl_sync(0xffffffffu, tid / 32, 0); /* known to be the same in all lanes */
    const uint32_t ring = smem_addr(sm4) + warp * (UP_RING * MR_STEP);
    const uint32_t xs = smem_addr(sm4) + UP_WARPS * UP_RING * MR_STEP, scales = xs + NV_XCOL;
    /* four sums a row g: of the shared expert's parts, of tasks */
    const uint32_t shared = scales + 16 * UP_SCALES, sums = shared + UP_RUNS * UP_SUMS;
    const bool has = blockIdx.x < NV_TILES;
    if (has) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint8_t *c = a.s_codes[h] + (blockIdx.x * 8 + g) * S_ROW + warp * (RUN * 64) + q * 16;
#pragma unroll
            for (uint32_t i = 0; i < UP_RING; ++i) {
                const uint32_t u = i / RUN * UP_WARPS + warp, from = i / RUN * (UP_WARPS * RUN) + i % RUN;
                if (u < RUNS) {
                    copy16(ring + i * MR_STEP + h * 512 + lane * 16, c + from * 64, 16);
                }
            }
        }
        if (TF == TF_MX && tid < 16 * (UP_SCALES / 16)) {
            const uint32_t r = tid / (UP_SCALES / 16), i = tid - r * (UP_SCALES / 16);
            copy16(scales + tid * 16, a.s_scale[r / 8] + (blockIdx.x * 8 + r % 8) * UP_SCALES + i * 16, 16);
        }
    }
    copy_commit();
    const uint32_t line = blockIdx.x * 4 + tid;
    if (tid < 4 && line < moe_lines(a)) {
        moe_fetch_line(a, line);
    }
    if (tid < UP_TASKS / NV_PARTS) {
        sh.arrive[tid] = 0;
    }
    if (!a.early) {
        pdl_wait();
        pdl_next();
    }
    const uint32_t number = __ldcg(a.w.numbers + blockIdx.x) + 1;
    if (tid < NV_H / 8) {
        const float4 *m = (const float4 *)(a.m + tid * 8);
        const float4 u = __ldcg(m), v = __ldcg(m + 1);
        sts128(xs + mr_unit(tid), make_uint4(pack_bf16(u.x, v.x), pack_bf16(u.y, v.y), pack_bf16(u.z, v.z),
                                             pack_bf16(u.w, v.w)));
    }
    if (blockIdx.x == NV_TILES) { /* the shared expert's gate */
        float s = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < NV_H / (UP_WARPS * 32); ++i) {
            const uint32_t j = tid + i * (UP_WARPS * 32);
            s = fmaf(bf16_f(__ldg(a.s_vec + j)), __ldcg(a.m + j), s);
        }
        mr_gate_end(s, sh.red, &sh.gate, 0);
        if (tid == 0) {
            word_post(a.w.gate(0), sh.gate, number);
        }
    }
    copy_wait<0>();
    __syncthreads();
    if (has) {
#pragma unroll 1
        for (uint32_t u = warp, p = ring + lane * 16; u < RUNS; u += UP_WARPS, p += MR_STEP) {
            float acc[4] = {};
            one_shared<TF, MR_STEP, RUN>(acc, p, p + 512, scales + g * UP_SCALES + u * 2 + q / 2,
                                         scales + (8 + g) * UP_SCALES + u * 2 + q / 2, xs, u * RUN, q);
            if (q == 0) {
                up_put(shared + (u * 8 + g) * UP_SUM, acc);
            }
        }
        __syncthreads();
        if (warp == UP_WARPS - 1) {
            up_post(up_sum<S::PARTS, ONE_STEPS / RUN>(shared + g * UP_SUM), 1.0f, 1.0f, a.w, ONE_ITEMS, blockIdx.x,
                    number, lane);
        }
    }
    if (a.early) {
        pdl_wait();
    }
    const int32_t e = lane < a.k ? __ldcg(a.expert + lane) : 0;
    /* from the last block on: the first have the shared expert's tiles */
    const uint32_t block = gridDim.x - 1 - blockIdx.x;
    const uint32_t n_tasks = a.blocks.div(a.k * NV_TILES - block + gridDim.x - 1) * NV_PARTS;
    const auto where = [&](uint32_t task, uint32_t &tile) { /* the item, and its tile */
        const uint32_t u = block + task / NV_PARTS * gridDim.x, i = u / NV_TILES;
        tile = u - i * NV_TILES;
        return i;
    };
    const auto find = [&](uint32_t task) {
        one_task t;
        uint32_t tile;
        const int32_t x = __shfl_sync(0xffffffffu, e, (int)where(task, tile));
        const struct qx_weight *gate = a.gate + x, *up = a.up + x;
        const uint32_t at = (tile * 8 + g) * UP_ROW + task % NV_PARTS * (ONE_STEPS * 64) + q * 16;
        t.c[0] = (const uint8_t *)__ldg((const unsigned long long *)&gate->codes) + at;
        t.c[1] = (const uint8_t *)__ldg((const unsigned long long *)&up->codes) + at;
        t.s = (const uint8_t *)__ldg((const unsigned long long *)&(lane & 8 ? up : gate)->scale) +
              (tile * 8 + (lane & 7)) * UP_ROW_SCALES + task % NV_PARTS * (ONE_STEPS * 8);
        t.f = __ldg(&(lane & 1 ? up : gate)->global) * 0x1p26f;
        return t;
    };
    one_task next = {};
    float f = 0.0f;
    if (warp < n_tasks) {
        const one_task first = find(warp);
        f = first.f;
        if (warp + UP_WARPS < n_tasks) {
            next = find(warp + UP_WARPS);
        }
#pragma unroll
        for (uint32_t i = 0; i < ONE_STEPS; ++i) {
            up_ask(first, i, ring + i * MR_STEP, lane);
            copy_commit();
        }
    }
    if (a.early) {
        pdl_next();
    }
#pragma unroll 1
    for (uint32_t task = warp; task < n_tasks; task += UP_WARPS) {
        uint32_t tile;
        const uint32_t item = where(task, tile), part = task % NV_PARTS;
        const bool more = task + UP_WARPS < n_tasks;
        float acc[1][4] = {};
        uint32_t x = xs + part * (ONE_STEPS * 256) + q * 80, p = ring;
#pragma unroll 1
        for (uint32_t s = 0; s < ONE_STEPS; ++s) {
            copy_wait<(int)UP_RING - 1>();
            __syncwarp();
            const uint4 a0 = lds128(p + lane * 16), a1 = lds128(p + 512 + lane * 16);
            const uint32_t e0 = lds16(p + 1024 + lane * 2), e1 = lds16(p + 1088 + lane * 2);
            __syncwarp();
            if (more) {
                up_ask(next, s, p, lane);
            }
            copy_commit();
            p += MR_STEP;
            mr_step_nv<1>(acc, a0, a1, e0, e1, [&](int, int j) { return lds128(x ^ (uint32_t)j << 4); });
            x += 256;
        }
        if (q == 0) {
            up_put(sums + (task * 8 + g) * UP_SUM, acc[0]);
        }
        __syncwarp();
        uint32_t old = 0;
        if (lane == 0) {
            old = up_arrive(&sh.arrive[task / NV_PARTS]);
        }
        old = __shfl_sync(0xffffffffu, old, 0);
        if (old == NV_PARTS - 1) {
            const float f0 = __shfl_sync(0xffffffffu, f, 0), f1 = __shfl_sync(0xffffffffu, f, 1);
            const uint32_t first = sums + ((task - part) * 8 + g) * UP_SUM;
            up_post(up_sum<NV_PARTS, 1>(first), f0, f1, a.w, item, tile, number, lane);
        }
        f = next.f;
    }
    if (tid == 0) {
        a.w.numbers[blockIdx.x] = number;
    }
}

/* ---- launching ---- */

template <int TF> static int up_run(struct qx_queue *q, const one_up_args &a)
{
    static_assert(UP_WARPS * UP_RING * MR_STEP + NV_XCOL + 16 * UP_SCALES + (UP_RUNS + UP_TASKS) * UP_SUMS <=
                      ALONE_SHARED,
                  "");
    /* its tasks are divided as if each block had a multiprocessor */
    return launch(q, "moe", one_up<TF>, dim3((unsigned)q->n_sm), dim3(UP_WARPS * 32), ALONE_SHARED, a);
}

int qx_moe_one(struct qx_queue *q, const struct qx_op_moe *o)
{
    one_up_args a = {};
    a.k = o->k;
    a.n_experts = o->experts.n_experts;
    a.early = q->routed.m == o->m && q->routed.at == q->n_launches;
    a.m = o->m;
    a.expert = o->expert;
    a.gate = o->experts.gate;
    a.up = o->experts.up;
    a.down = o->experts.down;
    a.s_codes[0] = (const uint8_t *)o->s_gate.codes;
    a.s_codes[1] = (const uint8_t *)o->s_up.codes;
    a.s_scale[0] = (const uint8_t *)o->s_gate.scale;
    a.s_scale[1] = (const uint8_t *)o->s_up.scale;
    a.s_vec = (const uint16_t *)o->s_gate_vec.codes;
    a.w = {q->moe_words, q->numbers + QX_MOE_NUMBERS};
    a.blocks.set((uint32_t)q->n_sm);
    const int r = o->s_gate.fmt == QX_W_BF16 ? up_run<TF_BF16>(q, a) : up_run<TF_MX>(q, a);
    return r ? r : qx_moe_one_down(q, o, a.w);
}
