/* qsa_few.cu: sparse attention for the few rows of decoding: many blocks a row, each a fixed part of it, so that
 * a row's bits do not depend on the others.
 *
 * Selection: scores by eight lanes a pooled key; where there can be no more than 4,096 keys they go to the memory of a
 * cluster's first block, else to global memory, where the last block to finish finds them; one block makes the cut.
 * Attention (bf16 caches, rounded queries): a cluster of eight blocks a row and key head, its warps by turns tiles of
 * 16 positions on tensor cores, sums in registers; warps and then blocks are merged through shared memory. Blocks of
 * many rows fit a multiprocessor by twos: of blocks with one to themselves a device of 132 holds 15 such clusters, and
 * eight rows have 16. Numbers of the step and pages are read before the wait (embed stands between them and whatever
 * wrote them). */
#include "mma.cuh"
#include "qsa.cuh"
#include <stddef.h>

/* ---- selection ------------------------------------------------------------------------------ */

enum {
    FS_T = 1024,
    FS_KEYS = FS_T / 8,              /* a block and turn */
    FS_CL = 8,                       /* blocks a cluster */
    FS_NEAR = FS_CL * FS_KEYS * 4,   /* pooled keys that one cluster takes at most */
    FS_MAX = 33,
    FS_BINS = 2048
};

struct cut_smem {
    uint32_t hist[FS_BINS];
    uint32_t sums[32];
    uint32_t lo, hi, bin, left, count;
};

/* Sum over the threads before this one. */
__device__ __forceinline__ uint32_t sum_before(uint32_t v, uint32_t *sums)
{
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    uint32_t s = v;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const uint32_t o = __shfl_up_sync(0xffffffffu, s, i);
        s += lane >= (uint32_t)i ? o : 0;
    }
    if (lane == 31) {
        sums[warp] = s;
    }
    __syncthreads();
    uint32_t w = lane < warp ? sums[lane] : 0;
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        w += __shfl_xor_sync(0xffffffffu, w, i);
    }
    return w + s - v;
}

/* The k largest of n <= 33792 scores, ties to the lower number, ascending. All threads of one block. keys: the
 * scores' bits but for signs (they are >= 0 or NaN, so bits order them), zeros up to a multiple of 1,024. Loops are
 * not unrolled far: this code comes from device memory, as the weights of a token push it out of L2, and its size is
 * what it costs. */
__device__ __forceinline__ void cut_blocks(cut_smem &s, const uint32_t *keys, uint32_t n, uint32_t k, int32_t *out)
{
    const uint32_t tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    const uint32_t per = ((n + 1023) / 1024) * 32, base = warp * per + lane; /* a warp has `per` in a row */
    const uint32_t J = per / 32;
    uint32_t lo = 0xffffffffu, hi = 0;
    const uint32_t *key = keys + base; /* the thread's j-th: key[32 j] */
#pragma unroll 1
    for (uint32_t j = 0; j < J; ++j) {
        const uint32_t v = key[j * 32];
        lo = v && v < lo ? v : lo; /* 0 is the score zero, and what is past the end, which never counts */
        hi = v > hi ? v : hi;
    }
    if (tid == 0) {
        s.lo = 0xffffffffu;
        s.hi = 0;
    }
    __syncthreads();
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    if (lane == 0) {
        atomicMin(&s.lo, lo);
        atomicMax(&s.hi, hi);
    }
    __syncthreads();
    lo = s.lo;
    hi = s.hi;
    /* bins of 2^shift keys from lo; bin 0 of the first pass holds the zeros, which need no count */
    uint32_t cut = 0, left = k, shift = 0, range = hi >= lo ? hi - lo : 0;
    bool done = hi == 0;
    while (!done) {
        shift = range >> 11 ? 32 - __clz(range >> 11) : 0;
        s.hist[tid] = 0;
        s.hist[tid + FS_T] = 0;
        __syncthreads();
#pragma unroll 1
        for (uint32_t j = 0; j < J; ++j) {
            const uint32_t v = key[j * 32];
            if (v >= lo && v - lo <= range) {
                atomicAdd(&s.hist[(v - lo) >> shift], 1u);
            }
        }
        __syncthreads();
        /* thread t has bins 2047 - 2 t and 2046 - 2 t: counts from the top */
        const uint32_t h0 = s.hist[2047 - 2 * tid], h1 = s.hist[2046 - 2 * tid];
        if (tid == 0) {
            s.bin = 0xffffffffu;
        }
        const uint32_t above = sum_before(h0 + h1, s.sums);
        if (above < left && above + h0 >= left) {
            s.bin = 2047 - 2 * tid;
            s.left = left - above;
            s.count = h0;
        } else if (above + h0 < left && above + h0 + h1 >= left) {
            s.bin = 2046 - 2 * tid;
            s.left = left - above - h0;
            s.count = h1;
        }
        if (tid == FS_T - 1) {
            s.hi = above + h0 + h1;
        }
        __syncthreads();
        if (s.bin == 0xffffffffu) { /* fewer above zero than wanted: zeros fill up */
            left -= s.hi;
            cut = 0;
            done = true;
        } else {
            left = s.left;
            lo += s.bin << shift;
            cut = lo;
            if (shift == 0) {
                done = true;
            } else if (s.count == left) { /* the whole bin */
                cut = lo - 1;
                left = 0;
                done = true;
            }
            range = (1u << shift) - 1;
        }
        __syncthreads();
    }
    uint32_t gt = 0, eq = 0;
#pragma unroll 1
    for (uint32_t j = 0; j < J; ++j) {
        gt += __popc(__ballot_sync(0xffffffffu, key[j * 32] > cut));
        eq += __popc(__ballot_sync(0xffffffffu, key[j * 32] == cut && base + j * 32 < n));
    }
    if (lane == 0) {
        s.sums[warp] = gt << 16 | eq;
    }
    __syncthreads();
    uint32_t g = lane < warp ? s.sums[lane] : 0, e = g & 0xffffu;
    g >>= 16;
    g = __reduce_add_sync(0xffffffffu, g);
    e = __reduce_add_sync(0xffffffffu, e);
    const uint32_t below = (1u << lane) - 1;
#pragma unroll 1
    for (uint32_t j = 0; j < J; ++j) {
        const bool is_gt = key[j * 32] > cut, is_eq = key[j * 32] == cut && base + j * 32 < n;
        const uint32_t gm = __ballot_sync(0xffffffffu, is_gt), em = __ballot_sync(0xffffffffu, is_eq);
        const uint32_t e_at = e + __popc(em & below);
        if (is_gt || (is_eq && e_at < left)) {
            out[g + __popc(gm & below) + (e_at < left ? e_at : left)] = (int32_t)(base + j * 32);
        }
        g += __popc(gm);
        e += __popc(em);
    }
}

__global__ void __launch_bounds__(FS_T) qsa_select_few(const __grid_constant__ sel_args a)
{
    __shared__ __align__(16) float iq[4 * 128];
    __shared__ cut_smem cut;
    __shared__ uint64_t full;
    __shared__ bool last;
    extern __shared__ uint32_t keys[];
    pdl_next();
    const uint32_t r = blockIdx.y, tid = threadIdx.x, l = tid & 7;
    const int32_t pos = __ldcg(a.step.pos + r), seq = __ldcg(a.step.seq + r);
    const uint32_t nb = pos < 0 ? 0 : ((uint32_t)pos + 1) / a.ratio, per_page = a.kv.page_tokens / a.ratio;
    if (nb <= a.budget) {
        pdl_wait();
        if (blockIdx.x == 0) {
            for (uint32_t i = tid; i < nb; i += FS_T) {
                a.block[(uint64_t)r * a.budget + i] = (int32_t)i;
            }
            if (tid == 0) {
                a.n_block[r] = (int32_t)nb;
            }
        }
        return;
    }
    const uint32_t first = blockIdx.x * FS_KEYS + tid / 8, step = gridDim.x * FS_KEYS;
    int32_t page = first < nb ? __ldcg(a.kv.page_table + (uint64_t)seq * a.kv.max_pages + first / per_page) : 0;
    const uint16_t *pooled = (const uint16_t *)a.kv.pooled;
    if (first < nb && (l & 3) == 0) {
        prefetch_l2(pooled + ((uint64_t)page * per_page + first % per_page) * 128 + l * 16);
    }
    if (a.near) {
        if (blockIdx.x == 0) {
            if (tid == 0) {
                bar_init(&full, 1);
                bar_init_done();
                bar_expect(&full, nb * 4);
            }
            if (nb + tid < (nb + FS_T - 1) / FS_T * FS_T) {
                keys[nb + tid] = 0;
            }
        }
        cluster_arrive_relaxed();
        cluster_wait();
    }
    pdl_wait();
    if (blockIdx.x * FS_KEYS >= nb) {
        return;
    }
    if (tid < 128) {
        ((float4 *)iq)[tid] = __ldcg((const float4 *)(a.iq + (uint64_t)r * 512) + tid);
    }
    float *score = a.scores + (uint64_t)r * a.max_blocks;
    const uint32_t to = a.near ? cluster_addr(keys, 0) : 0, bar = a.near ? cluster_addr(&full, 0) : 0;
    bool synced = false;
    for (uint32_t b0 = 0; blockIdx.x * FS_KEYS + b0 < nb; b0 += step) {
        const uint32_t b = first + b0;
        uint4 k[2] = {};
        if (b < nb) {
            if (b0) {
                page = __ldcg(a.kv.page_table + (uint64_t)seq * a.kv.max_pages + b / per_page);
            }
            const uint4 *p = (const uint4 *)(pooled + ((uint64_t)page * per_page + b % per_page) * 128) + l;
            k[0] = __ldcg(p);
            k[1] = __ldcg(p + 8);
        }
        if (!synced) {
            __syncthreads();
            synced = true;
        }
        float s[4] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float x[8] = {bf16_lo(k[j].x), bf16_hi(k[j].x), bf16_lo(k[j].y), bf16_hi(k[j].y),
                                bf16_lo(k[j].z), bf16_hi(k[j].z), bf16_lo(k[j].w), bf16_hi(k[j].w)};
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const float4 u = *(const float4 *)&iq[h * 128 + j * 64 + l * 8],
                             v = *(const float4 *)&iq[h * 128 + j * 64 + l * 8 + 4];
                s[h] = fmaf(u.x, x[0], fmaf(u.y, x[1], fmaf(u.z, x[2], fmaf(u.w, x[3], s[h]))));
                s[h] = fmaf(v.x, x[4], fmaf(v.y, x[5], fmaf(v.z, x[6], fmaf(v.w, x[7], s[h]))));
            }
        }
        const float sum = index_score(s);
        if (l == 0 && b < nb) {
            if (a.near) {
                send32(to + b * 4, __float_as_uint(sum) & 0x7fffffffu, bar);
            } else {
                score[b] = sum;
            }
        }
    }
    if (a.near) {
        if (blockIdx.x) {
            return;
        }
        bar_wait(&full, 0);
        if (tid == 0) {
            a.n_block[r] = (int32_t)a.budget;
        }
    } else {
        __threadfence();
        __syncthreads();
        if (tid == 0) {
            const uint32_t need = (nb + FS_KEYS - 1) / FS_KEYS, active = need < gridDim.x ? need : gridDim.x;
            last = atomicAdd(a.tickets + r, 1u) == active - 1;
            if (last) {
                a.tickets[r] = 0;
                a.n_block[r] = (int32_t)a.budget;
            }
        }
        __syncthreads();
        if (!last) {
            return;
        }
        __threadfence();
        for (uint32_t i0 = tid; i0 < (nb + FS_T - 1) / FS_T * FS_T; i0 += 4 * FS_T) {
            float x[4];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                x[e] = i0 + e * FS_T < nb ? __ldcg(score + i0 + e * FS_T) : 0.0f;
            }
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                if (i0 + e * FS_T < (nb + FS_T - 1) / FS_T * FS_T) {
                    keys[i0 + e * FS_T] = __float_as_uint(x[e]) & 0x7fffffffu;
                }
            }
        }
        __syncthreads();
    }
    cut_blocks(cut, keys, nb, a.budget, a.block + (uint64_t)r * a.budget);
}

static uint32_t select_few_bytes(const struct qx_op_qsa_select *o)
{
    return (o->max_blocks + FS_T - 1) / FS_T * FS_T * 4;
}

bool select_few_fits(const struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    return o->step->n_rows <= 64 && o->i_heads == 4 && o->i_dim == 128 && o->kv.bf16 &&
           o->max_blocks <= FS_T * FS_MAX && select_few_bytes(o) + 16 * 1024 <= (uint32_t)q->smem_max &&
           (((uintptr_t)o->iq | (uintptr_t)o->kv.pooled) & 15) == 0 && has_bulk(q);
}

int select_few(struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    sel_args a = {*o->step, o->i_heads, o->i_dim, o->ratio,   o->budget_blocks, o->max_blocks, o->iq, o->kv,
                  o->scores, o->block,  o->n_block, q->tickets, o->max_blocks <= FS_NEAR};
    const uint32_t n = o->step->n_rows, need = (o->max_blocks + FS_KEYS - 1) / FS_KEYS;
    if (a.near) {
        return launch_cluster(q, "qsa_select", qsa_select_few, dim3(FS_CL, n), dim3(FS_T), select_few_bytes(o), FS_CL,
                              a);
    }
    const uint32_t most = n == 1 ? (uint32_t)q->n_sm : n <= 4 ? 64 : n <= 16 ? 16 : 8;
    return launch(q, "qsa_select", qsa_select_few, dim3(need < most ? need : most, n), dim3(FS_T), select_few_bytes(o),
                  a);
}

/* ---- attention ------------------------------------------------------------------------------ */

enum {
    FA_CL = 8,                       /* blocks a cluster */
    FA_WARPS = 4,
    FA_T = FA_WARPS * 32,
    FA_POS = 16,                     /* positions a tile */
    FA_TURN = FA_CL * FA_WARPS,      /* tiles a turn of all warps of the cluster */
    FA_P = 264,                      /* elements from row to row in shared memory */
    FA_PAGES = 768,
    FA_HEADS = 16
};
static_assert(FA_HEADS * (ATT_D / 4) / FA_CL <= FA_T, "a thread has at most one float4 of the merge");

union few_tile {
    uint16_t in[2][FA_POS][FA_P]; /* keys, values */
    float o[FA_HEADS][FA_P];      /* head, dimension: the warp's sums, and in that of warp 0 then the block's */
};
struct few_smem {
    uint16_t q[FA_HEADS][FA_P];
    float m[FA_WARPS + 1][FA_HEADS], l[FA_WARPS + 1][FA_HEADS]; /* largest exponent, sum; last: of the block */
    int32_t pages[FA_PAGES];
    few_tile t[1]; /* a warp each, and a second one where the launch has room for it */
};

/* A tile's part in the sums of a warp, m and l as exponents of two: its probabilities from its keys, then its values.
 * n: positions of the tile that count. */
__device__ __forceinline__ void few_keys(const few_smem &s, const uint16_t (*k)[FA_P], uint32_t lane, uint32_t n,
                                         float (&m)[2], float (&l)[2], float (&O)[32][4], uint32_t (&P)[4])
{
    const uint32_t q2 = (lane & 3) * 2, mi = lane / 8;
    const uint32_t qa = smem_addr(&s.q[(mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
    const uint32_t kb = smem_addr(&k[(mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
    float S[2][2][4] = {};
#pragma unroll
    for (int kk = 0; kk < 16; ++kk) {
        uint32_t a[4], b[4];
        ldsm4(a, qa + kk * 32);
        ldsm4(b, kb + kk * 32);
        mma16(S[kk & 1][0], a, b[0], b[1]);
        mma16(S[kk & 1][1], a, b[2], b[3]);
    }
    float p[2][4], top[2] = {m[0], m[1]};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const bool in = j * 8 + q2 + (e & 1) < n;
            /* log2 e / 16 */
            p[j][e] = in ? (S[0][j][e] + S[1][j][e]) * 0.09016844005556021f : -INFINITY;
            top[e >> 1] = fmaxf(top[e >> 1], p[j][e]);
        }
    }
    float f[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 1));
        top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 2));
        f[e] = m[e] == top[e] ? 1.0f : exp2f(m[e] - top[e]);
        m[e] = top[e];
        l[e] *= f[e];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            p[j][e] = exp2f(p[j][e] - top[e >> 1]);
            l[e >> 1] += p[j][e];
        }
    }
    if (__any_sync(0xffffffffu, f[0] != 1.0f || f[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            O[j][0] *= f[0], O[j][1] *= f[0];
            O[j][2] *= f[1], O[j][3] *= f[1];
        }
    }
    P[0] = pack_bf16(p[0][0], p[0][1]), P[1] = pack_bf16(p[0][2], p[0][3]);
    P[2] = pack_bf16(p[1][0], p[1][1]), P[3] = pack_bf16(p[1][2], p[1][3]);
}
__device__ __forceinline__ void few_values(const uint16_t (*v)[FA_P], uint32_t lane, const uint32_t (&P)[4],
                                           float (&O)[32][4])
{
    const uint32_t mi = lane / 8, vb = smem_addr(&v[(mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        uint32_t b[4];
        ldsm4t(b, vb + j * 32);
        mma16(O[2 * j], P, b[0], b[1]);
        mma16(O[2 * j + 1], P, b[2], b[3]);
    }
}

/* The oldest half of a tile that is on its way is there. */
__device__ __forceinline__ void few_landed(bool deep)
{
    if (deep) {
        copy_wait<3>();
    } else {
        copy_wait<1>();
    }
    __syncwarp();
}

/* Tile number t of a row belongs to block t % FA_CL, there to warp t / FA_CL % FA_WARPS. */
__global__ void __launch_bounds__(FA_T, 2) qsa_attend_few(const __grid_constant__ att_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    few_smem &s = *(few_smem *)mem;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    const uint32_t rank = blockIdx.x, kvh = blockIdx.y, r = blockIdx.z;
    const uint32_t G = a.n_heads / a.n_kv;
    pdl_next();
    const int32_t pos = __ldcg(a.step.pos + r), seq = __ldcg(a.step.seq + r);
    const int32_t *table = a.kv.page_table + (uint64_t)seq * a.kv.max_pages;
    const uint32_t pages = pos < 0 ? 0 : (uint32_t)pos / a.kv.page_tokens + 1;
    for (uint32_t i = tid; i < pages && pages <= FA_PAGES; i += FA_T) {
        s.pages[i] = __ldcg(table + i);
    }
    for (uint32_t i = tid; i < (FA_HEADS - G) * FA_P / 2; i += FA_T) {
        ((uint32_t *)s.q[G])[i] = 0;
    }
    __syncthreads();
    pdl_wait();
    if (pos < 0) { /* idle: finite all the same */
        for (uint32_t i = rank * FA_T + tid; i < G * ATT_D; i += FA_CL * FA_T) {
            a.o[((uint64_t)r * a.n_heads + kvh * G) * ATT_D + i] = 0.0f;
        }
        return;
    }
    const int32_t *list = a.block + (uint64_t)r * a.budget;
    const uint32_t i0 = (rank + warp * FA_CL) * FA_POS + (lane & 15); /* the lane's position of the warp's first tile */
    const auto listed = [&](uint32_t turn) {
        const uint32_t b = (i0 + turn * FA_TURN * FA_POS) / 4;
        return b < a.budget ? __ldcg(list + b) : 0;
    };
    int32_t block = listed(0), after = listed(1);
    const uint32_t nb = (uint32_t)__ldcg(a.n_block + r);
    const float4 *q4 = (const float4 *)(a.q + ((uint64_t)r * a.n_heads + kvh * G) * ATT_D);
    constexpr uint32_t NQ = (FA_HEADS * ATT_D / 4 + FA_T - 1) / FA_T;
    float4 q[NQ];
#pragma unroll
    for (uint32_t e = 0; e < NQ; ++e) {
        const uint32_t i = e * FA_T + tid;
        q[e] = i < G * (ATT_D / 4) ? __ldcg(q4 + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const uint32_t n = nb * 4 + ((uint32_t)pos + 1) % 4;
    uint32_t slot = 0; /* of the lane's position of the tile to be asked for */
    bool some = false; /* that tile has any */
    const auto find = [&](uint32_t turn) {
        const uint32_t at = i0 + turn * FA_TURN * FA_POS;
        some = at - (lane & 15) < n;
        if (some) {
            /* past the end the row's own position */
            uint32_t p = (uint32_t)pos;
            if (at < n) {
                p = at / 4 < nb ? (uint32_t)block * 4 + at % 4 : ((uint32_t)pos + 1) / 4 * 4 + (at - nb * 4);
            }
            const uint32_t page = p / a.kv.page_tokens;
            slot = (uint32_t)(pages <= FA_PAGES ? s.pages[page] : __ldcg(table + page)) * a.kv.page_tokens +
                   p % a.kv.page_tokens;
        }
        block = after;
        after = listed(turn + 2);
    };
    const auto ask = [&](uint32_t turn, uint32_t what) {
        if (some) {
            few_tile &t = s.t[warp + (a.deep ? turn & 1 : 0) * FA_WARPS];
            const uint16_t *p = (const uint16_t *)(what ? a.kv.v : a.kv.k) + kvh * ATT_D + lane * 8;
            const uint32_t dst = smem_addr(&t.in[what][0][lane * 8]);
#pragma unroll
            for (uint32_t e = 0; e < FA_POS; ++e) {
                const uint32_t of = __shfl_sync(0xffffffffu, slot, e);
                copy16(dst + e * (FA_P * 2), p + (uint64_t)of * (a.n_kv * ATT_D), 16);
            }
        }
        copy_commit();
    };
    const uint32_t ahead = a.deep ? 2 : 1;
    for (uint32_t turn = 0; turn < ahead; ++turn) {
        find(turn);
        ask(turn, 0);
        ask(turn, 1);
    }
#pragma unroll
    for (uint32_t e = 0; e < NQ; ++e) {
        const uint32_t i = e * FA_T + tid, h = i / (ATT_D / 4), d = i % (ATT_D / 4) * 4;
        if (h < G) {
            *(uint2 *)&s.q[h][d] = make_uint2(pack_bf16(q[e].x, q[e].y), pack_bf16(q[e].z, q[e].w));
        }
    }
    /* the slice of the heads that this block merges in the end: a float4 a thread */
    const uint32_t slice = G * (ATT_D / 4) / FA_CL, f0 = rank * slice;
    const float *gates = a.in + (uint64_t)r * a.stride + kvh * G * 2 * ATT_D;
    float4 z = {};
    if (tid < slice) {
        const uint32_t f = f0 + tid;
        z = __ldcg((const float4 *)(gates + (2 * (f / (ATT_D / 4)) + 1) * ATT_D) + f % (ATT_D / 4));
    }
    __syncthreads();
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, O[32][4] = {};
    const uint32_t first = i0 - (lane & 15);
#pragma unroll 1
    for (uint32_t turn = 0; first + turn * FA_TURN * FA_POS < n; ++turn) {
        const few_tile &t = s.t[warp + (a.deep ? turn & 1 : 0) * FA_WARPS];
        uint32_t P[4];
        find(turn + ahead);
        few_landed(a.deep);
        few_keys(s, t.in[0], lane, n - (first + turn * FA_TURN * FA_POS), m, l, O, P);
        __syncwarp();
        ask(turn + ahead, 0);
        few_landed(a.deep);
        few_values(t.in[1], lane, P, O);
        __syncwarp();
        ask(turn + ahead, 1);
    }
    {
        const uint32_t g = lane / 4, q2 = (lane & 3) * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            l[e] += __shfl_xor_sync(0xffffffffu, l[e], 1);
            l[e] += __shfl_xor_sync(0xffffffffu, l[e], 2);
            if (q2 == 0) {
                s.m[warp][g + 8 * e] = m[e];
                s.l[warp][g + 8 * e] = l[e];
            }
            if (g + 8 * e < G) {
#pragma unroll
                for (int j = 0; j < 32; ++j) {
                    *(float2 *)&s.t[warp].o[g + 8 * e][j * 8 + q2] = make_float2(O[j][2 * e], O[j][2 * e + 1]);
                }
            }
        }
    }
    __syncthreads();
    for (uint32_t f = tid; f < G * (ATT_D / 4); f += FA_T) { /* the block's warps in order */
        const uint32_t h = f / (ATT_D / 4), d = f % (ATT_D / 4) * 4;
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < FA_WARPS; ++w) {
            top = fmaxf(top, s.m[w][h]);
        }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (uint32_t w = 0; w < FA_WARPS; ++w) {
            const float4 y = *(const float4 *)&s.t[w].o[h][d];
            const float e = s.m[w][h] == -INFINITY ? 0.0f : exp2f(s.m[w][h] - top);
            sum = fmaf(e, s.l[w][h], sum);
            x.x = fmaf(e, y.x, x.x), x.y = fmaf(e, y.y, x.y);
            x.z = fmaf(e, y.z, x.z), x.w = fmaf(e, y.w, x.w);
        }
        *(float4 *)&s.t[0].o[h][d] = x;
        if (d == 0) {
            s.m[FA_WARPS][h] = top;
            s.l[FA_WARPS][h] = sum;
        }
    }
    cluster_arrive();
    cluster_wait();
    float4 *out = (float4 *)(a.o + ((uint64_t)r * a.n_heads + kvh * G) * ATT_D);
    if (tid < slice) { /* the cluster's blocks in order */
        const uint32_t f = f0 + tid, h = f / (ATT_D / 4), d = f % (ATT_D / 4) * 4;
        float pm[FA_CL], pl[FA_CL];
        float4 y[FA_CL];
#pragma unroll
        for (uint32_t b = 0; b < FA_CL; ++b) {
            pm[b] = lds_f32_at(&s.m[FA_WARPS][h], b);
            pl[b] = lds_f32_at(&s.l[FA_WARPS][h], b);
            y[b] = lds_f128_at(&s.t[0].o[h][d], b);
        }
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (uint32_t b = 0; b < FA_CL; ++b) {
            top = fmaxf(top, pm[b]);
        }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (uint32_t b = 0; b < FA_CL; ++b) {
            const float e = pm[b] == -INFINITY ? 0.0f : exp2f(pm[b] - top);
            sum = fmaf(e, pl[b], sum);
            x.x = fmaf(e, y[b].x, x.x), x.y = fmaf(e, y[b].y, x.y);
            x.z = fmaf(e, y[b].z, x.z), x.w = fmaf(e, y[b].w, x.w);
        }
        out[f] = make_float4(x.x / sum * sigmoid_f(z.x), x.y / sum * sigmoid_f(z.y), x.z / sum * sigmoid_f(z.z),
                             x.w / sum * sigmoid_f(z.w));
    }
    cluster_arrive_relaxed(); /* no block's shared memory goes before all have read it */
    cluster_wait();
}

static uint32_t attend_few_bytes(bool deep)
{
    return (uint32_t)(offsetof(few_smem, t) + (deep ? 2 : 1) * FA_WARPS * sizeof(few_tile));
}

bool attend_few_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o)
{
    const uintptr_t at = (uintptr_t)o->q | (uintptr_t)o->in | (uintptr_t)o->o | (uintptr_t)o->kv.k | (uintptr_t)o->kv.v;
    return o->act_bf16 && o->kv.bf16 && o->ratio == 4 && o->n_heads / o->n_kv_heads <= FA_HEADS && (at & 15) == 0 &&
           o->in_stride % 4 == 0 && o->step->n_rows <= 64 && has_bulk(q) &&
           attend_few_bytes(false) <= (uint32_t)q->smem_max;
}

/* Two tiles a warp while each block can have a multiprocessor to itself. */
int attend_few(struct qx_queue *q, const att_args &args)
{
    att_args a = args;
    a.deep = a.step.n_rows * a.n_kv < (uint32_t)q->n_sm / FA_CL && attend_few_bytes(true) <= (uint32_t)q->smem_max;
    return launch_cluster(q, "qsa_attend", qsa_attend_few, dim3(FA_CL, a.n_kv, a.step.n_rows), dim3(FA_T),
                          attend_few_bytes(a.deep), FA_CL, a);
}
