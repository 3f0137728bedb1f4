/* qsa_attend_prompt.cu: sparse attention for the rows of a prompt on the warpgroup matrix units: eight rows and a
 * key head a block. bf16 caches only; what does not fit stays with qsa.cu.
 *
 * Two warpgroups multiply: a warp has a row, whose query heads (at most 16) are its part of the 64 rows of a
 * product. The blocks of positions that any of the rows chose pass through shared memory once, in order, in tiles
 * of 64 positions, which a third warpgroup gathers; what a row did not choose is masked, and a warpgroup skips
 * tiles without one of its rows'. q and the probabilities are rounded to bf16, sums are f32. */
#include "async.cuh"
#include "qsa.cuh"
#include "wgmma.cuh"

enum {
    AT_ROWS = 8,
    AT_POS = 64,                 /* positions a tile */
    AT_BLOCKS = AT_POS / 4,
    AT_STAGES = 2,
    AT_BUDGET = 512,             /* blocks of a row at most, beside its tail */
    AT_LIST = AT_ROWS * (AT_BUDGET + 1),
    AT_PANEL = AT_POS * 128,     /* 64 columns of a tile's keys or values */
    AT_TILE = ATT_D / 64 * AT_PANEL,
    AT_Q_PANEL = AT_ROWS * 16 * 128,
    AT_Q = ATT_D / 64 * AT_Q_PANEL,
    AT_MAX_BLOCKS = 65536        /* of a sequence */
};

struct at_smem {
    union {
        uint8_t tile[2 * AT_STAGES][AT_TILE]; /* keys, values of each stage */
        uint32_t map[2 * AT_STAGES * AT_TILE / 4]; /* a byte a block of the sequence: bit w for row w */
    };
    uint8_t q[AT_Q];
    uint8_t rows[AT_LIST + 24];               /* by which rows a block was chosen */
    uint32_t slot[AT_LIST];                   /* its place in the cache */
    uint16_t block[AT_LIST];                  /* its number */
    uint32_t sums[AT_ROWS], n;
    int32_t pos[AT_ROWS], seq[AT_ROWS], last;
    uint64_t full[2 * AT_STAGES], empty[2 * AT_STAGES];
};
static_assert(sizeof(struct at_smem) <= 226u << 10, "fits beside what the system takes");
static_assert(AT_MAX_BLOCKS <= 2 * AT_STAGES * AT_TILE, "a byte a block");

__device__ __forceinline__ void rows_sync()
{
    bar_sync_some<256>(1);
}
/* The blocks that rows s0 .. s1 - 1 chose, and their tails, ascending. All multiplying threads; the list is
 * theirs at the return. Returns how many. */
__device__ uint32_t attend_list(const att_args &a, at_smem &s, uint32_t r0, uint32_t s0, uint32_t s1, int32_t last)
{
    const uint32_t tid = threadIdx.x - 128, warp = tid / 32, lane = tid & 31, words = ((uint32_t)last / 4 + 4) / 4;
    for (uint32_t i = tid; i < words; i += AT_ROWS * 32) {
        s.map[i] = 0;
    }
    rows_sync();
    if (warp >= s0 && warp < s1 && s.pos[warp] >= 0) {
        const uint32_t n = (uint32_t)__ldcg(a.n_block + r0 + warp), tail = ((uint32_t)s.pos[warp] + 1) / 4;
        const int32_t *list = a.block + (uint64_t)(r0 + warp) * a.budget;
        for (uint32_t i0 = lane; i0 < n; i0 += 256) { /* eight loads in flight */
            uint32_t b[8];
#pragma unroll
            for (uint32_t e = 0; e < 8; ++e) {
                b[e] = i0 + 32 * e < n ? (uint32_t)__ldcg(list + i0 + 32 * e) : 0xffffffffu;
            }
#pragma unroll
            for (uint32_t e = 0; e < 8; ++e) {
                if (b[e] != 0xffffffffu) {
                    atomicOr(&s.map[b[e] / 4], 1u << (b[e] % 4 * 8 + warp));
                }
            }
        }
        if (lane == 0 && ((uint32_t)s.pos[warp] + 1) % 4) {
            atomicOr(&s.map[tail / 4], 1u << (tail % 4 * 8 + warp));
        }
    }
    rows_sync();
    /* a thread has `per` words in a row, an odd number of them for the banks */
    const uint32_t per = ((words + AT_ROWS * 32 - 1) / (AT_ROWS * 32)) | 1, w0 = tid * per,
                   w1 = w0 + per < words ? w0 + per : words;
    uint32_t count = 0;
    for (uint32_t w = w0; w < w1; ++w) {
        const uint32_t x = s.map[w];
        count += ((x & 0xffu) != 0) + ((x & 0xff00u) != 0) + ((x & 0xff0000u) != 0) + ((x & 0xff000000u) != 0);
    }
    uint32_t v = count;
    v = warp_upto(v, lane);
    if (lane == 31) {
        s.sums[warp] = v;
    }
    rows_sync();
    uint32_t at = v - count, all = 0;
    for (uint32_t i = 0; i < AT_ROWS; ++i) {
        at += i < warp ? s.sums[i] : 0;
        all += s.sums[i];
    }
    for (uint32_t w = w0; w < w1; ++w) {
        for (uint32_t e = 0; e < 4; ++e) {
            const uint32_t x = s.map[w] >> (8 * e) & 0xffu;
            if (x) {
                s.block[at] = (uint16_t)(w * 4 + e);
                s.rows[at++] = (uint8_t)x;
            }
        }
    }
    if (tid < AT_BLOCKS) {
        s.rows[all + tid] = 0; /* the last tile's rest */
    }
    rows_sync();
    const int32_t seq = s.seq[s0];
    for (uint32_t i0 = tid; i0 < all; i0 += AT_ROWS * 32 * 8) {
        uint32_t x[8];
#pragma unroll
        for (uint32_t e = 0; e < 8; ++e) {
            const uint32_t i = i0 + AT_ROWS * 32 * e;
            x[e] = i < all ? (uint32_t)kv_slot(a.kv, seq, s.block[i] * 4) : 0;
        }
#pragma unroll
        for (uint32_t e = 0; e < 8; ++e) {
            const uint32_t i = i0 + AT_ROWS * 32 * e;
            if (i < all) {
                s.slot[i] = x[e];
            }
        }
    }
    return all;
}

/* ---- copying -------------------------------------------------------------------------------- */

/* One side (keys or values) of tile t: four warps, a position's row at a time. */
__device__ __forceinline__ void at_gather(const at_smem &s, uint32_t to, const uint8_t *src, uint64_t row_bytes, uint32_t t)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, n = s.n;
    const uint32_t panel = to + (lane >> 3) * AT_PANEL;
#pragma unroll 8
    for (uint32_t i = 0; i < AT_POS / 4; ++i) {
        const uint32_t p = warp * (AT_POS / 4) + i; /* nothing behind the last row's position */
        uint32_t e = t * AT_BLOCKS + p / 4;
        e = e < n ? e : n - 1;
        const uint32_t room = (uint32_t)s.last - s.block[e] * 4u, o = p & 3;
        const uint64_t at = s.slot[e] + (o < room ? o : room);
        copy16(panel + p * 128 + (((lane & 7) ^ (p & 7)) * 16), src + at * row_bytes + lane * 16, 16);
    }
}

__device__ __forceinline__ void at_produce(const att_args &a, at_smem &s, uint32_t kvh, uint32_t &it)
{
    const uint64_t row_bytes = (uint64_t)a.n_kv * ATT_D * 2;
    const uint8_t *k = (const uint8_t *)a.kv.k + kvh * ATT_D * 2, *v = (const uint8_t *)a.kv.v + kvh * ATT_D * 2;
    const uint32_t tiles = (s.n + AT_BLOCKS - 1) / AT_BLOCKS;
    for (uint32_t t = 0; t < tiles; ++t, ++it) {
        const uint32_t st = it % AT_STAGES, use = it / AT_STAGES & 1;
#pragma unroll
        for (uint32_t side = 0; side < 2; ++side) {
            const uint32_t x = 2 * st + side;
            bar_wait(smem_addr(&s.empty[x]), use ^ 1);
            at_gather(s, smem_addr(s.tile[x]), side ? v : k, row_bytes, t);
            copy_arrive(smem_addr(&s.full[x]));
        }
    }
}

/* ---- multiplying ---------------------------------------------------------------------------- */

/* The row's queries as bf16; zeros where there are none. */
__device__ __forceinline__ void at_queries(const att_args &a, at_smem &s, uint32_t r, uint32_t kvh, bool mine)
{
    const uint32_t warp = threadIdx.x / 32 - 4, lane = threadIdx.x & 31, G = a.n_heads / a.n_kv;
    uint8_t *to = s.q + (lane >> 3) * AT_Q_PANEL + warp * 16 * 128;
#pragma unroll 4
    for (uint32_t h = 0; h < 16; ++h) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), y = x;
        if (mine && h < G) {
            const float4 *q = (const float4 *)(a.q + ((uint64_t)r * a.n_heads + kvh * G + h) * ATT_D) + lane * 2;
            x = __ldcg(q);
            y = __ldcg(q + 1);
        }
        *(uint4 *)(to + h * 128 + (((lane & 7) ^ (h & 7)) * 16)) =
            make_uint4(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
    }
}

/* Scores of a tile become probabilities as the A operand; m, l and what was summed before follow. chosen: the
 * tile's blocks, four a word, a bit a row. */
__device__ __forceinline__ void at_softmax(const at_smem &s, const float (&S)[32], uint32_t (&P)[4][4], float (&O)[128],
                                           float (&m)[2], float (&l)[2], const uint32_t (&chosen)[4], uint32_t row, int32_t pos,
                                           uint32_t t, uint32_t q)
{
    const uint32_t sh = (q >> 1) * 8 + row, end = t * AT_BLOCKS + AT_BLOCKS - 1;
    const bool tail = (uint32_t)s.block[end < s.n ? end : s.n - 1] * 4u + 3u > (uint32_t)pos; /* the row's end may lie in here */
    float p[32], top[2] = {m[0], m[1]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        int32_t see = chosen[j / 2] >> (sh + (j & 1) * 16) & 1 ? 3 : -1;
        if (tail && see > 0) {
            see = pos - (int32_t)(s.block[t * AT_BLOCKS + 2 * j + (q >> 1)] * 4u + (q & 1) * 2);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            /* log2 e / 16 */
            p[4 * j + e] = see >= (e & 1) ? S[4 * j + e] * 0.09016844005556021f : -INFINITY;
            top[e >> 1] = fmaxf(top[e >> 1], p[4 * j + e]);
        }
    }
    float f[2], base[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 1));
        top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 2));
        base[e] = top[e] == -INFINITY ? 0.0f : top[e]; /* no position of the row so far */
        f[e] = exp2f(m[e] - base[e]);
    }
    if (__any_sync(0xffffffffu, top[0] != m[0] || top[1] != m[1])) {
#pragma unroll
        for (int j = 0; j < 128; j += 4) {
            O[j] *= f[0];
            O[j + 1] *= f[0];
            O[j + 2] *= f[1];
            O[j + 3] *= f[1];
        }
        l[0] *= f[0];
        l[1] *= f[1];
        m[0] = top[0];
        m[1] = top[1];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            p[4 * j + e] = exp2f(p[4 * j + e] - base[e >> 1]);
            l[e >> 1] += p[4 * j + e];
        }
        P[j / 2][(j & 1) * 2] = pack_bf16(p[4 * j], p[4 * j + 1]);
        P[j / 2][(j & 1) * 2 + 1] = pack_bf16(p[4 * j + 2], p[4 * j + 3]);
    }
}

__device__ __forceinline__ void at_consume(const att_args &a, at_smem &s, uint32_t r, uint32_t kvh, bool mine, uint32_t &it)
{
    const uint32_t warp = threadIdx.x / 32 - 4, wgi = warp / 4, lane = threadIdx.x & 31, g = lane / 4, q = lane & 3;
    const uint32_t n = s.n, tiles = (n + AT_BLOCKS - 1) / AT_BLOCKS, G = a.n_heads / a.n_kv;
    const int32_t pos = mine ? s.pos[warp] : -1;
    const uint32_t group = 0x0f0f0f0fu << (4 * wgi);
    const uint64_t dq = wg_desc(smem_addr(s.q) + wgi * 64 * 128);
    float O[128], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        O[i] = 0.0f;
    }
    for (uint32_t t = 0; t < tiles; ++t, ++it) {
        const uint32_t st = it % AT_STAGES, use = it / AT_STAGES & 1, k = 2 * st, v = k + 1;
        uint32_t chosen[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            chosen[i] = *(const uint32_t *)(s.rows + t * AT_BLOCKS + 4 * i);
        }
        /* also for a tile that is skipped: who ran ahead would be counted for one too few */
        bar_wait(smem_addr(&s.full[k]), use);
        if ((chosen[0] | chosen[1] | chosen[2] | chosen[3]) & group) {
            float S[32];
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                S[i] = 0.0f;
            }
            fence_async();
            const uint64_t dk = wg_desc(smem_addr(s.tile[k]));
            wg_fence();
#pragma unroll
            for (int i = 0; i < ATT_D / 16; ++i) {
                wg<64>::ss(S, dq + (i / 4) * (AT_Q_PANEL / 16) + (i & 3) * 2, dk + (i / 4) * (AT_PANEL / 16) + (i & 3) * 2, i > 0);
            }
            wg_commit();
            wg_wait<0>();
            wg_pin<32>(S);
            if (lane == 0) {
                bar_arrive(smem_addr(&s.empty[k]));
            }
            uint32_t P[4][4];
            at_softmax(s, S, P, O, m, l, chosen, warp, pos, t, q);
            bar_wait(smem_addr(&s.full[v]), use);
            fence_async();
            const uint64_t dv = wg_desc_rows(smem_addr(s.tile[v]), AT_PANEL);
            wg_pin<128>(O);
            wg_fence();
#pragma unroll
            for (int i = 0; i < AT_POS / 16; ++i) {
                wg<256>::rs_rows(O, P[i], dv + i * (16 * 128 / 16), 1);
            }
            wg_commit();
            wg_wait<0>();
            wg_pin<128>(O);
        } else {
            if (lane == 0) {
                bar_arrive(smem_addr(&s.empty[k]));
            }
            bar_wait(smem_addr(&s.full[v]), use);
        }
        if (lane == 0) {
            bar_arrive(smem_addr(&s.empty[v]));
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        l[e] += __shfl_xor_sync(0xffffffffu, l[e], 1);
        l[e] += __shfl_xor_sync(0xffffffffu, l[e], 2);
        if (mine && g + 8 * e < G) {
            const uint32_t h = kvh * G + g + 8 * e;
            const float *gate = a.in + (uint64_t)r * a.stride + (2 * h + 1) * ATT_D + 2 * q;
            float *out = a.o + ((uint64_t)r * a.n_heads + h) * ATT_D + 2 * q;
            const float inv = 1.0f / l[e];
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                const float2 z = __ldcg((const float2 *)(gate + j * 8));
                *(float2 *)(out + j * 8) = make_float2(O[4 * j + 2 * e] * inv * sigmoid_f(z.x),
                                                       O[4 * j + 2 * e + 1] * inv * sigmoid_f(z.y));
            }
        }
    }
}

template <bool COPY> __device__ __forceinline__ void at_items(const att_args &a, at_smem &s)
{
    const uint32_t tid = threadIdx.x, groups = (a.step.n_rows + AT_ROWS - 1) / AT_ROWS;
    uint32_t it = 0; /* tiles so far */
    for (uint32_t item = blockIdx.x; item < groups * a.n_kv; item += gridDim.x) {
        /* the last rows have the most positions: they go first */
        const uint32_t r0 = (groups - 1 - item / a.n_kv) * AT_ROWS, kvh = item % a.n_kv;
        __syncthreads();
        if (tid < AT_ROWS) {
            s.pos[tid] = r0 + tid < a.step.n_rows ? __ldcg(a.step.pos + r0 + tid) : -1;
            s.seq[tid] = r0 + tid < a.step.n_rows ? __ldcg(a.step.seq + r0 + tid) : 0;
        }
        __syncthreads();
        for (uint32_t s0 = 0, s1; s0 < AT_ROWS; s0 = s1) { /* rows of one sequence at a time */
            int32_t last = -1;
            for (s1 = s0; s1 < AT_ROWS && (s.pos[s1] < 0 || s.seq[s1] == s.seq[s0]); ++s1) {
                last = s.pos[s1] > last ? s.pos[s1] : last;
            }
            if (last < 0) {
                s1 = s1 > s0 ? s1 : s0 + 1;
                continue;
            }
            if (COPY) {
                __syncthreads();
                at_produce(a, s, kvh, it);
            } else {
                const uint32_t warp = tid / 32 - 4, r = r0 + warp;
                const bool mine = warp >= s0 && warp < s1 && s.pos[warp] >= 0;
                const uint32_t n = attend_list(a, s, r0, s0, s1, last);
                at_queries(a, s, r, kvh, mine);
                if (tid == 128) {
                    s.n = n;
                    s.last = last;
                }
                fence_async();
                __syncthreads();
                at_consume(a, s, r, kvh, mine, it);
            }
            __syncthreads();
        }
    }
}

__global__ void __launch_bounds__(384, 1) qsa_attend_rows(const __grid_constant__ att_args a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t mem[];
    at_smem &s = *(at_smem *)mem;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * AT_STAGES; ++i) {
            bar_init(smem_addr(&s.full[i]), 128);
            bar_init(smem_addr(&s.empty[i]), AT_ROWS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    pdl_next();
    pdl_wait();
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        at_items<true>(a, s);
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        at_items<false>(a, s);
    }
#else
    (void)a;
#endif
}

bool attend_prompt_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o)
{
    const uintptr_t at = (uintptr_t)o->q | (uintptr_t)o->in | (uintptr_t)o->o | (uintptr_t)o->kv.k | (uintptr_t)o->kv.v;
    return o->prompt && o->act_bf16 && o->kv.bf16 && o->ratio == 4 && o->budget_blocks <= AT_BUDGET &&
           (uint64_t)o->kv.max_pages * o->kv.page_tokens / 4 <= AT_MAX_BLOCKS && o->n_heads / o->n_kv_heads <= 16 &&
           (at & 15) == 0 && o->in_stride % 2 == 0 && q->has_wgmma && sizeof(at_smem) <= (size_t)q->smem_max;
}

int attend_prompt(struct qx_queue *q, const att_args &a)
{
    const uint32_t items = (a.step.n_rows + AT_ROWS - 1) / AT_ROWS * a.n_kv;
    return launch(q, "qsa_attend", qsa_attend_rows, dim3(items < (uint32_t)q->n_sm ? items : q->n_sm), dim3(384),
                  sizeof(at_smem), a);
}
