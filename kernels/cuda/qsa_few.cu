/* qsa_few.cu: sparse attention for the few rows of decoding: many blocks a row, each a fixed part of it, so that
 * a row's bits do not depend on the others.
 *
 * Selection: scores by eight lanes a pooled key; the last block to finish a row finds the cut with all scores in
 * registers. Attention (bf16 caches, rounded queries): a warp 16 positions on tensor cores; a cluster of eight
 * blocks merges its 24 parts through its shared memories, each block a slice of the heads; the last cluster of a
 * row and key head to finish a slice merges the clusters' parts. Numbers of the step and pages are read before
 * the wait (embed stands between them and whatever wrote them). */
#include "mma.cuh"
#include "qsa.cuh"

/* ---- selection ------------------------------------------------------------------------------ */

enum { FS_T = 1024, FS_KEYS = FS_T / 8, FS_MAX = 33, FS_BINS = 2048 };

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

/* The k largest of n <= 33792 scores, ties to the lower number, ascending. All threads of one block. Scores are
 * >= 0 or NaN. keys: shared memory for (n + 1023) / 1024 * 1024 of them. Loops are not unrolled far: this code comes
 * from device memory, as the weights of a token push it out of L2, and its size is what it costs. */
__device__ __forceinline__ void cut_blocks(cut_smem &s, uint32_t *keys, const float *score, uint32_t n, uint32_t k,
                                           int32_t *out)
{
    const uint32_t tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    const uint32_t per = ((n + 1023) / 1024) * 32, base = warp * per + lane; /* a warp has `per` in a row */
    const uint32_t J = per / 32;
    uint32_t lo = 0xffffffffu, hi = 0;
    uint32_t *key = keys + base; /* the thread's j-th: key[32 j] */
    for (uint32_t j0 = 0; j0 < J; j0 += 4) {
        float x[4];
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            const uint32_t i = base + (j0 + e) * 32;
            x[e] = i < n && j0 + e < J ? __ldcg(score + i) : 0.0f;
        }
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            if (j0 + e < J) {
                /* bits order them; 0 is the score zero, and what is past the end never counts */
                const uint32_t v = __float_as_uint(x[e]) & 0x7fffffffu;
                key[(j0 + e) * 32] = v;
                lo = v && v < lo ? v : lo;
                hi = v > hi ? v : hi;
            }
        }
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
    __shared__ bool last;
    extern __shared__ uint32_t keys[];
    pdl_next();
    const uint32_t r = blockIdx.y, tid = threadIdx.x, l = tid & 7;
    const int32_t pos = __ldcg(a.step.pos + r), seq = __ldcg(a.step.seq + r);
    const uint32_t nb = pos < 0 ? 0 : ((uint32_t)pos + 1) / a.ratio, per_page = a.kv.page_tokens / a.ratio;
    const uint32_t first = blockIdx.x * FS_KEYS + tid / 8, step = gridDim.x * FS_KEYS;
    int32_t page = first < nb ? __ldcg(a.kv.page_table + (uint64_t)seq * a.kv.max_pages + first / per_page) : 0;
    const uint16_t *pooled = (const uint16_t *)a.kv.pooled;
    if (first < nb && nb > a.budget && (l & 3) == 0) {
        prefetch_l2(pooled + ((uint64_t)page * per_page + first % per_page) * 128 + l * 16);
    }
    pdl_wait();
    if (nb <= a.budget) {
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
    if (blockIdx.x * FS_KEYS >= nb) {
        return;
    }
    if (tid < 128) {
        ((float4 *)iq)[tid] = __ldcg((const float4 *)(a.iq + (uint64_t)r * 512) + tid);
    }
    float *score = a.scores + (uint64_t)r * a.max_blocks;
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
            score[b] = sum;
        }
    }
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
    if (last) {
        __threadfence();
        cut_blocks(cut, keys, score, nb, a.budget, a.block + (uint64_t)r * a.budget);
    }
}

static uint32_t select_few_bytes(const struct qx_op_qsa_select *o)
{
    return (o->max_blocks + FS_T - 1) / FS_T * FS_T * 4;
}

bool select_few_fits(const struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    return o->step->n_rows <= 64 && o->i_heads == 4 && o->i_dim == 128 && o->kv.bf16 &&
           o->max_blocks <= FS_T * FS_MAX && select_few_bytes(o) + 16 * 1024 <= (uint32_t)q->smem_max &&
           (((uintptr_t)o->iq | (uintptr_t)o->kv.pooled) & 15) == 0;
}

int select_few(struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    sel_args a = {*o->step, o->i_heads, o->i_dim, o->ratio,   o->budget_blocks, o->max_blocks, o->iq, o->kv,
                  o->scores, o->block,  o->n_block, q->tickets};
    const uint32_t n = o->step->n_rows, need = (o->max_blocks + FS_KEYS - 1) / FS_KEYS;
    const uint32_t most = n == 1 ? (uint32_t)q->n_sm : n <= 4 ? 64 : n <= 16 ? 16 : 8;
    const uint32_t blocks = o->max_blocks <= o->budget_blocks ? 1 : need < most ? need : most;
    return launch(q, "qsa_select", qsa_select_few, dim3(blocks, n), dim3(FS_T),
                  select_few_bytes(o), a);
}

/* ---- attention ------------------------------------------------------------------------------ */

enum {
    FA_WARPS = 3,
    FA_POS = 16,                     /* positions a warp */
    FA_CL = 8,                       /* blocks a cluster */
    FA_SPAN = FA_WARPS * FA_POS,     /* positions a block */
    FA_PARTS = FA_CL * FA_WARPS,
    FA_P = 264,                      /* elements from row to row in shared memory */
    FA_PAGES = 768,
    FA_HEADS = 3                     /* heads of a block's slice at most */
};

union few_warp {
    struct { uint16_t k[FA_POS][FA_P], v[FA_POS][FA_P]; } in;
    float o[16][FA_P]; /* head, dimension: the warp's sums */
};
struct few_smem {
    few_warp w[FA_WARPS];
    float m[FA_WARPS][16], l[FA_WARPS][16];   /* largest exponent and sum of the warp's positions */
    float2 ml[FA_HEADS][FA_PARTS];            /* those of the whole cluster for the heads of this block's slice */
    uint64_t full[FA_WARPS];
    int32_t pages[FA_PAGES];
    bool last;
};

__device__ __forceinline__ float peer_f(const void *p, uint32_t rank)
{
    float v = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_addr(p, rank)) : "memory");
#endif
    return v;
}
__device__ __forceinline__ float4 peer_f4(const void *p, uint32_t rank)
{
    float4 v = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(cluster_addr(p, rank))
                 : "memory");
#endif
    return v;
}

/* 16 positions of a row and key head: sums relative to the warp's largest exponent, to shared memory. */
__device__ void few_warp_part(const att_args &a, few_smem &s, uint32_t r, uint32_t kvh, uint32_t warp, uint32_t lane,
                              uint32_t i0, uint32_t n)
{
    const uint32_t g = lane / 4, q2 = (lane & 3) * 2, mi = lane / 8, G = a.n_heads / a.n_kv;
    few_warp &w = s.w[warp];
    uint32_t Q[16][4];
    {
        const float *q0 = a.q + ((uint64_t)r * a.n_heads + kvh * G + g) * ATT_D + q2, *q1 = q0 + 8 * ATT_D;
#pragma unroll
        for (int kk = 0; kk < 16; ++kk) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float2 x = g < G ? __ldcg((const float2 *)(q0 + kk * 16 + e * 8)) : make_float2(0.0f, 0.0f);
                const float2 y = g + 8 < G ? __ldcg((const float2 *)(q1 + kk * 16 + e * 8)) : make_float2(0.0f, 0.0f);
                Q[kk][2 * e] = pack_bf16(x.x, x.y);
                Q[kk][2 * e + 1] = pack_bf16(y.x, y.y);
            }
        }
    }
    bar_wait(&s.full[warp], 0);
    const uint32_t kb = smem_addr(&w.in.k[(mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
    const uint32_t vb = smem_addr(&w.in.v[(mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
    float S[4][2][4] = {};
#pragma unroll
    for (int kk = 0; kk < 16; ++kk) {
        uint32_t b[4];
        ldsm4(b, kb + kk * 32);
        mma16(S[kk & 3][0], Q[kk], b[0], b[1]);
        mma16(S[kk & 3][1], Q[kk], b[2], b[3]);
    }
    float p[2][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const bool in = i0 + j * 8 + q2 + (e & 1) < n;
            /* log2 e / 16 */
            p[j][e] = in ? ((S[0][j][e] + S[1][j][e]) + (S[2][j][e] + S[3][j][e])) * 0.09016844005556021f : -INFINITY;
            m[e >> 1] = fmaxf(m[e >> 1], p[j][e]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        m[e] = fmaxf(m[e], __shfl_xor_sync(0xffffffffu, m[e], 1));
        m[e] = fmaxf(m[e], __shfl_xor_sync(0xffffffffu, m[e], 2));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            p[j][e] = exp2f(p[j][e] - m[e >> 1]);
            l[e >> 1] += p[j][e];
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        l[e] += __shfl_xor_sync(0xffffffffu, l[e], 1);
        l[e] += __shfl_xor_sync(0xffffffffu, l[e], 2);
        if (q2 == 0) {
            s.m[warp][g + 8 * e] = m[e];
            s.l[warp][g + 8 * e] = l[e];
        }
    }
    const uint32_t P[4] = {pack_bf16(p[0][0], p[0][1]), pack_bf16(p[0][2], p[0][3]), pack_bf16(p[1][0], p[1][1]),
                           pack_bf16(p[1][2], p[1][3])};
    float O[32][4] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        uint32_t b[4];
        ldsm4t(b, vb + j * 32);
        mma16(O[2 * j], P, b[0], b[1]);
        mma16(O[2 * j + 1], P, b[2], b[3]);
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        if (g + 8 * e < G) {
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                *(float2 *)&w.o[g + 8 * e][j * 8 + q2] = make_float2(O[j][2 * e], O[j][2 * e + 1]);
            }
        }
    }
}

__global__ void __launch_bounds__(FA_WARPS * 32) qsa_attend_few(const __grid_constant__ att_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    few_smem &s = *(few_smem *)mem;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    const uint32_t rank = blockIdx.x % FA_CL, cl = blockIdx.x / FA_CL, kvh = blockIdx.y, r = blockIdx.z;
    const uint32_t G = a.n_heads / a.n_kv;
    pdl_next();
    const int32_t pos = __ldcg(a.step.pos + r), seq = __ldcg(a.step.seq + r);
    if (lane == 0) {
        bar_init(&s.full[warp], 1);
        bar_init_done();
    }
    const int32_t *table = a.kv.page_table + (uint64_t)seq * a.kv.max_pages;
    const uint32_t pages = pos < 0 ? 0 : (uint32_t)pos / a.kv.page_tokens + 1;
    for (uint32_t i = tid; i < pages && pages <= FA_PAGES; i += FA_WARPS * 32) {
        s.pages[i] = __ldcg(table + i);
    }
    pdl_wait();
    if (pos < 0) { /* idle: finite all the same */
        for (uint32_t i = (cl * FA_CL + rank) * FA_WARPS * 32 + tid; i < G * ATT_D; i += gridDim.x * FA_WARPS * 32) {
            a.o[((uint64_t)r * a.n_heads + kvh * G) * ATT_D + i] = 0.0f;
        }
        return;
    }
    const uint32_t i0 = (cl * FA_CL + rank) * FA_SPAN + warp * FA_POS, mine = i0 + (lane & 15);
    const uint32_t nb = (uint32_t)__ldcg(a.n_block + r);
    const int32_t listed = mine / 4 < a.budget ? __ldcg(a.block + (uint64_t)r * a.budget + mine / 4) : 0;
    const uint32_t n = nb * 4 + ((uint32_t)pos + 1) % 4, used = (n + FA_SPAN * FA_CL - 1) / (FA_SPAN * FA_CL);
    if (cl >= used) {
        return;
    }
    /* the slice of the heads that this block merges: a float4 a thread and turn */
    const uint32_t slice = G * (ATT_D / 4) / FA_CL, f0 = rank * slice;
    __syncthreads();
    if (i0 < n) {
        /* lanes 0..15 copy keys, 16..31 values; past the end the row's own position */
        uint32_t p = (uint32_t)pos;
        if (mine < n) {
            p = mine / 4 < nb ? (uint32_t)listed * 4 + mine % 4 : ((uint32_t)pos + 1) / 4 * 4 + (mine - nb * 4);
        }
        const uint32_t at = p / a.kv.page_tokens;
        const uint64_t slot = (uint64_t)(pages <= FA_PAGES ? s.pages[at] : __ldcg(table + at)) * a.kv.page_tokens +
                              p % a.kv.page_tokens;
        few_warp &w = s.w[warp];
        if (lane == 0) {
            bar_expect(&s.full[warp], 2 * FA_POS * ATT_D * 2);
        }
        __syncwarp();
        bulk_load(lane < 16 ? w.in.k[lane] : w.in.v[lane & 15],
                  (const uint16_t *)(lane < 16 ? a.kv.k : a.kv.v) + (slot * a.n_kv + kvh) * ATT_D, ATT_D * 2,
                  &s.full[warp]);
        few_warp_part(a, s, r, kvh, warp, lane, i0, n);
    }
    cluster_arrive();
    cluster_wait();
    /* parts of the cluster in the order of positions */
    const uint32_t rest = n - cl * FA_SPAN * FA_CL, parts = rest < FA_SPAN * FA_CL ? (rest + FA_POS - 1) / FA_POS : FA_PARTS;
    const uint32_t h0 = f0 / (ATT_D / 4), h1 = (f0 + slice - 1) / (ATT_D / 4);
    for (uint32_t i = tid; i < (h1 - h0 + 1) * FA_PARTS; i += FA_WARPS * 32) {
        const uint32_t h = h0 + i / FA_PARTS, c = i % FA_PARTS;
        s.ml[h - h0][c] = c < parts ? make_float2(peer_f(&s.m[c % FA_WARPS][h], c / FA_WARPS),
                                                  peer_f(&s.l[c % FA_WARPS][h], c / FA_WARPS))
                                    : make_float2(-INFINITY, 0.0f);
    }
    const uint64_t pair = (uint64_t)r * a.n_kv + kvh;
    const uint32_t f_all = G * (ATT_D / 4), clusters = gridDim.x / FA_CL;
    float4 *part = (float4 *)a.part + pair * clusters * f_all;
    float2 *ml = (float2 *)((float4 *)a.part + (uint64_t)gridDim.z * a.n_kv * clusters * f_all) + pair * clusters * f_all;
    const float *gates = a.in + (uint64_t)r * a.stride + kvh * G * 2 * ATT_D;
    float4 *out = (float4 *)(a.o + ((uint64_t)r * a.n_heads + kvh * G) * ATT_D);
    for (uint32_t f1 = f0; f1 < f0 + slice; f1 += FA_WARPS * 32) {
        const uint32_t f = f1 + tid, h = f / (ATT_D / 4), d = f % (ATT_D / 4) * 4;
        const bool mine_f = f < f0 + slice;
        float4 y[FA_PARTS]; /* all parts on their way together */
#pragma unroll
        for (uint32_t c = 0; c < FA_PARTS; ++c) {
            y[c] = mine_f && c < parts ? peer_f4(&s.w[c % FA_WARPS].o[h][d], c / FA_WARPS) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        if (f1 == f0) {
            __syncthreads();
        }
        if (!mine_f) {
            continue;
        }
        float m = -INFINITY, l = 0.0f;
#pragma unroll
        for (uint32_t c = 0; c < FA_PARTS; ++c) {
            m = fmaxf(m, s.ml[h - h0][c].x);
        }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (uint32_t c = 0; c < FA_PARTS; ++c) {
            const float2 v = s.ml[h - h0][c];
            const float e = c < parts ? exp2f(v.x - m) : 0.0f;
            l = fmaf(e, v.y, l);
            x.x = fmaf(e, y[c].x, x.x);
            x.y = fmaf(e, y[c].y, x.y);
            x.z = fmaf(e, y[c].z, x.z);
            x.w = fmaf(e, y[c].w, x.w);
        }
        if (used > 1) {
            part[(uint64_t)cl * f_all + f] = x;
            ml[(uint64_t)cl * f_all + f] = make_float2(m, l);
        } else {
            const float4 z = __ldcg((const float4 *)(gates + (2 * h + 1) * ATT_D + d));
            out[f] = make_float4(x.x / l * sigmoid_f(z.x), x.y / l * sigmoid_f(z.y), x.z / l * sigmoid_f(z.z),
                                 x.w / l * sigmoid_f(z.w));
        }
    }
    cluster_arrive(); /* no block's shared memory goes before all have read it */
    if (used > 1) {
        __threadfence();
        __syncthreads();
        if (tid == 0) {
            unsigned *t = a.tickets + pair * FA_CL + rank;
            s.last = atomicAdd(t, 1u) == used - 1;
            if (s.last) {
                *t = 0;
            }
        }
        __syncthreads();
        if (s.last) {
            __threadfence();
            for (uint32_t f = f0 + tid; f < f0 + slice; f += FA_WARPS * 32) {
                const uint32_t h = f / (ATT_D / 4), d = f % (ATT_D / 4) * 4;
                const float4 z = __ldcg((const float4 *)(gates + (2 * h + 1) * ATT_D + d));
                float m = -INFINITY, l = 0.0f;
                float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 6
                for (uint32_t c = 0; c < used; ++c) {
                    const float2 v = __ldcg(ml + (uint64_t)c * f_all + f);
                    const float4 y = __ldcg(part + (uint64_t)c * f_all + f);
                    const float top = fmaxf(m, v.x), e0 = exp2f(m - top), e1 = exp2f(v.x - top);
                    m = top;
                    l = l * e0 + v.y * e1;
                    x.x = x.x * e0 + y.x * e1;
                    x.y = x.y * e0 + y.y * e1;
                    x.z = x.z * e0 + y.z * e1;
                    x.w = x.w * e0 + y.w * e1;
                }
                out[f] = make_float4(x.x / l * sigmoid_f(z.x), x.y / l * sigmoid_f(z.y), x.z / l * sigmoid_f(z.z),
                                     x.w / l * sigmoid_f(z.w));
            }
        }
    }
    cluster_wait();
}

bool attend_few_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o)
{
    const uintptr_t at = (uintptr_t)o->q | (uintptr_t)o->in | (uintptr_t)o->o | (uintptr_t)o->kv.k | (uintptr_t)o->kv.v;
    return o->act_bf16 && o->kv.bf16 && o->ratio == 4 && o->n_heads / o->n_kv_heads <= 16 && (at & 15) == 0 &&
           o->in_stride % 4 == 0 && o->step->n_rows <= 64 && o->step->n_rows * o->n_kv_heads * FA_CL <= QX_N_TICKETS &&
           has_bulk(q);
}

int attend_few(struct qx_queue *q, const att_args &args)
{
    att_args a = args;
    const uint32_t most = a.budget * 4 + 3, clusters = (most + FA_SPAN * FA_CL - 1) / (FA_SPAN * FA_CL);
    a.part = (float *)q->ws;
    a.tickets = q->tickets;
    if ((uint64_t)a.step.n_rows * a.n_heads * (ATT_D / 4) * clusters * 24 > QX_WS_BYTES) {
        return qx_queue_refuse(q, "qsa_attend", "too many rows and blocks at once");
    }
    return launch_cluster(q, "qsa_attend", qsa_attend_few, dim3(clusters * FA_CL, a.n_kv, a.step.n_rows),
                          dim3(FA_WARPS * 32), sizeof(few_smem), FA_CL, a);
}
