/* prompt_moe.cu: router and experts for the rows of prompts. Pairs of (row, slot) are sorted by expert; one
 * launch multiplies each expert's gate and up with its rows and leaves silu(gate) up as bf16, one multiplies
 * that with down into a row a pair, and the last adds up a row's pairs in the order of its slots, then the
 * shared expert, which takes the same path with all rows. Where a pair lies among its expert's pairs may
 * differ between runs; what is computed for it does not. */
#include "prompt_moe.cuh"
#include "prompt.h"
#include "topk.cuh"

#define PMOE_MAX_K 16
#define PSORT_BLOCKS 8u /* that sort */
#define PMOE_MAX_EXPERTS 2048
#define PMOE_WIDE 192u  /* widest tile of pairs */
#define PMOE_NARROW 32u /* where the weights' bytes take the time, two blocks a multiprocessor */

/* ---- router --------------------------------------------------------------------------------- */

/* A row a warp. more: NULL, or what is to be added to the logits. */
__global__ void __launch_bounds__(256) pmoe_pick(float *logits, const float *more, uint32_t n_rows, uint32_t n, uint32_t k, bool norm,
                                                 int32_t *expert, float *weight)
{
    pdl_next();
    pdl_wait();
    const uint64_t r = (uint64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (r < n_rows) {
        if (more) {
            constexpr uint32_t U = 8; /* loads in flight */
            for (uint32_t e0 = threadIdx.x & 31; e0 < n; e0 += 32 * U) {
                float x[U];
#pragma unroll
                for (uint32_t i = 0; i < U; ++i) {
                    const uint32_t e = e0 + 32 * i;
                    x[i] = e < n ? __ldcg(logits + r * n + e) + __ldcg(more + r * n + e) : 0.0f;
                }
#pragma unroll
                for (uint32_t i = 0; i < U; ++i) {
                    if (e0 + 32 * i < n) {
                        logits[r * n + e0 + 32 * i] = x[i];
                    }
                }
            }
            __syncwarp();
        }
        warp_route(logits + r * n, n, k, norm, expert + r * k, weight + r * k);
    }
}

int qx_prompt_route(struct qx_queue *q, const struct qx_op_moe_route *o)
{
    if (!o->prompt || o->n_rows <= QX_PROMPT_MIN_ROWS || !qx_prompt_can(q)) {
        return 1;
    }
    const float *more;
    const int r = qx_prompt_logits(q, o, &more);
    return r ? r
             : launch(q, "moe_route", pmoe_pick, dim3((o->n_rows + 7) / 8), dim3(256), 0, o->logits, more, o->n_rows, o->n_experts,
                      o->k, o->norm, o->expert, o->weight);
}

/* ---- sorting -------------------------------------------------------------------------------- */

struct psort_args {
    const int32_t *expert;
    uint32_t pairs, k, n_experts, width;
    const struct qx_weight *w[3];
    uint32_t *row;      /* row of x of each sorted pair; an expert's pairs begin at a multiple of 8 */
    int32_t *at;        /* [pairs] row of a pair's result, without gaps; -1: it has no expert */
    pmoe_ent *list;
    uint32_t *n_list;   /* and a zero behind it */
    int f;
    const float *x;     /* rows to convert meanwhile: [rows, hidden] to m1, and to m2 when not NULL */
    uint32_t rows, hidden;
    uint8_t *m1, *m2;
    int order1, order2;
};

/* Inclusive sum over the block's threads; all call it. */
__device__ uint32_t block_scan(uint32_t v, uint32_t *warp_sums)
{
    const uint32_t lane = threadIdx.x & 31, w = threadIdx.x / 32;
    v = warp_upto(v, lane);
    __syncthreads();
    if (lane == 31) {
        warp_sums[w] = v;
    }
    __syncthreads();
    if (w == 0) {
        uint32_t s = warp_sums[lane];
        s = warp_upto(s, lane);
        warp_sums[lane] = s;
    }
    __syncthreads();
    return v + (w ? warp_sums[w - 1] : 0);
}

__device__ __forceinline__ void emit_as(int order, uint8_t *out, uint32_t b_rows, uint32_t row, uint32_t u, const float (&v)[16])
{
    switch (order) {
    case GM_ORD_BF16: gm_emit<GM_ORD_BF16>(out, b_rows, row, u / 4, u & 3, v); break;
    case GM_ORD_FP8: gm_emit<GM_ORD_FP8>(out, b_rows, row, u / 4, u & 3, v); break;
    case GM_ORD_NV2: gm_emit_nv2(out, b_rows, row, u / 8, u & 7, v); break;
    default: gm_emit<GM_ORD_NV>(out, b_rows, row, u / 4, u & 3, v); break;
    }
}

/* The blocks of the first cluster sort, a share of the pairs each; the others convert. */
__global__ void __launch_bounds__(1024) pmoe_sort(const __grid_constant__ psort_args a)
{
    if (blockIdx.x >= PSORT_BLOCKS) {
        pdl_next();
        pdl_wait();
        const uint32_t units = (a.hidden + 63) / 64 * 4, b_rows = gm_pad8(a.rows);
        const uint64_t n = (uint64_t)a.rows * units, step = (uint64_t)(gridDim.x - PSORT_BLOCKS) * 1024;
        for (uint64_t i = (uint64_t)(blockIdx.x - PSORT_BLOCKS) * 1024 + threadIdx.x; i < n; i += step) {
            const uint32_t row = (uint32_t)(i / units), u = (uint32_t)(i - (uint64_t)row * units);
            float v[16];
            gm_load16(v, a.x + (uint64_t)row * a.hidden, u * 16, a.hidden, true);
            emit_as(a.order1, a.m1, b_rows, row, u, v);
            if (a.m2) {
                emit_as(a.order2, a.m2, b_rows, row, u, v);
            }
        }
        return;
    }
    __shared__ __align__(8) uint32_t count[PMOE_MAX_EXPERTS], next[PMOE_MAX_EXPERTS], sums[32];
    uint32_t *gap = count; /* of rows before an expert, once it is known */
    pdl_next();
    const uint32_t t = threadIdx.x, E = a.n_experts, rank = blockIdx.x;
    const uint32_t share = (a.pairs + PSORT_BLOCKS - 1) / PSORT_BLOCKS, first_pair = rank * share,
                   end = first_pair + share < a.pairs ? first_pair + share : a.pairs;
    for (uint32_t e = t; e < PMOE_MAX_EXPERTS; e += 1024) {
        count[e] = 0;
    }
    __syncthreads();
    pdl_wait();
    constexpr int U = 8;
    for (uint32_t p0 = first_pair; p0 < end; p0 += 1024 * U) {
        int32_t e[U];
#pragma unroll
        for (int i = 0; i < U; ++i) {
            const uint32_t p = p0 + i * 1024 + t;
            e[i] = p < end ? __ldcg(a.expert + p) : -1;
        }
#pragma unroll
        for (int i = 0; i < U; ++i) {
            if ((uint32_t)e[i] < E) {
                atomicAdd(&count[e[i]], 1u);
            }
        }
    }
    cluster_sync();
    /* two experts a thread: of all blocks, and of those before this one */
    const uint32_t e0 = 2 * t;
    uint32_t c0 = 0, c1 = 0, b0 = 0, b1 = 0;
#pragma unroll
    for (uint32_t i = 0; i < PSORT_BLOCKS; ++i) {
        const uint2 c = lds64_at(smem_addr(count + e0), i);
        c0 += c.x, c1 += c.y;
        b0 += i < rank ? c.x : 0, b1 += i < rank ? c.y : 0;
    }
    cluster_sync();
    const uint32_t n0 = (c0 + a.width - 1) / a.width, n1 = (c1 + a.width - 1) / a.width;
    const uint32_t g0 = gm_pad8(c0), g1 = gm_pad8(c1), start = block_scan(g0 + g1, sums) - g0 - g1;
    const uint32_t out = block_scan(c0 + c1, sums) - c0 - c1;
    const uint32_t tile = block_scan(n0 + n1, sums) - n0 - n1;
    next[e0] = start + b0;
    next[e0 + 1] = start + g0 + b1;
    gap[e0] = start - out;
    gap[e0 + 1] = start + g0 - out - c0;
    if (t == 1023 && rank == 0) {
        *a.n_list = tile + n0 + n1;
        a.n_list[1] = 0;
    }
    for (uint32_t j = 0; j < n0 + n1 && t % PSORT_BLOCKS == rank; ++j) {
        const bool second = j >= n0;
        const uint32_t e = e0 + second, c = second ? c1 : c0, n = second ? n1 : n0, i = second ? j - n0 : j;
        const uint32_t per = ((c + n - 1) / n + 7) / 8 * 8, first = i * per;
        pmoe_ent x;
        x.scale_bf16 = 0;
#pragma unroll
        for (int m = 0; m < 3; ++m) {
            const struct qx_weight w = a.w[m][e];
            x.code[m] = (const uint8_t *)w.codes;
            x.scale[m] = (const uint8_t *)w.scale;
            x.factor[m] = gm_factor(a.f, w.global);
            x.row0[m] = w.row0;
            x.scale_bf16 |= (w.scale_bf16 ? 1u : 0u) << m;
        }
        x.start = (second ? start + g0 : start) + (first < c ? first : c);
        x.out = (second ? out + c0 : out) + first;
        x.done = 0;
        x.n = first < c ? (c - first < per ? c - first : per) : 0;
        a.list[tile + j] = x;
    }
    __syncthreads();
    for (uint32_t p0 = first_pair; p0 < end; p0 += 1024 * U) {
        int32_t e[U];
#pragma unroll
        for (int i = 0; i < U; ++i) {
            const uint32_t p = p0 + i * 1024 + t;
            e[i] = p < end ? __ldcg(a.expert + p) : -1;
        }
#pragma unroll
        for (int i = 0; i < U; ++i) {
            const uint32_t p = p0 + i * 1024 + t;
            if ((uint32_t)e[i] < E) {
                const uint32_t d = atomicAdd(&next[e[i]], 1u);
                a.row[d] = p / a.k;
                a.at[p] = (int32_t)(d - gap[e[i]]);
            } else if (p < end) {
                a.at[p] = -1;
            }
        }
    }
}

/* ---- products ------------------------------------------------------------------------------- */

struct pmoe_args {
    gm_common c;
    const pmoe_ent *list; /* NULL: `one` with all rows, `width` at a time */
    const uint32_t *n_list, *row;
    pmoe_ent one;
    uint32_t n_rows, width, m_tiles;
    uint32_t rows, cols, row_bytes, kb; /* of the matrices */
    uint8_t *h;           /* token buffer of h_rows rows, K of down in its order */
    uint32_t h_rows;
    int h_order;
    float *out;           /* [pairs, rows] */
};

template <int F_, int PROMOTE_> struct pmoe_policy : gm_policy {
    static constexpr int F = F_, PROMOTE = PROMOTE_;
    static constexpr bool PIECES = F_ != GM_BF16 && PROMOTE_ == 0;
    using args = pmoe_args;
    struct tile {
        pmoe_ent e;
        uint32_t n, kb, akb, m0;
    };
    static __device__ __forceinline__ uint32_t n_tiles(const args &a)
    {
        return (a.list ? __ldcg(a.n_list) : (a.n_rows + a.width - 1) / a.width) * a.m_tiles;
    }
    static __device__ __forceinline__ tile get(const args &a, uint32_t t)
    {
        tile r;
        const uint32_t i = t / a.m_tiles;
        if (a.list) {
            r.e = pmoe_get(a.list + i);
        } else {
            r.e = a.one;
            r.e.start = r.e.out = i * a.width;
            r.e.n = a.n_rows - r.e.start < a.width ? a.n_rows - r.e.start : a.width;
        }
        r.n = r.e.n;
        r.m0 = t - i * a.m_tiles;
        r.kb = r.akb = a.kb;
        return r;
    }
    static __device__ __forceinline__ float scale_of(const args &a, const tile &t, int m, uint32_t row, uint32_t k128)
    {
        const uint64_t at = (uint64_t)((t.e.row0[m] + row) / 128) * ((a.cols + 127) / 128) + k128;
        return t.e.scale_bf16 >> m & 1 ? bf16_f(__ldg((const uint16_t *)t.e.scale[m] + at))
                              : __ldg((const float *)t.e.scale[m] + at);
    }
};

/* Local rows r and r + 8 of 16 are the gate and the up row of one inner value. */
template <int F_, int PROMOTE_> struct pmoe_up : pmoe_policy<F_, PROMOTE_> {
    using base = pmoe_policy<F_, PROMOTE_>;
    using args = pmoe_args;
    using tile = typename base::tile;
    static constexpr int F = F_;
    static constexpr bool GATHER = true;
    GM_RUN(pmoe_up)
    static __device__ __forceinline__ uint32_t inner(const tile &t, uint32_t r)
    {
        return t.m0 * 64 + (r >> 4) * 8 + (r & 7);
    }
    static __device__ __forceinline__ gm_src a_src(const args &a, const tile &t, uint32_t r)
    {
        gm_src s = {};
        s.base = r & 8 ? t.e.code[1] : t.e.code[0];
        s.row_bytes = a.row_bytes;
        s.pos = inner(t, r);
        s.off = (uint64_t)s.pos * a.row_bytes;
        s.s1 = 8 * a.row_bytes;
        s.s2 = 32 * a.row_bytes;
        s.d1 = 8;
        s.d2 = 32;
        s.lim = a.rows;
        return s;
    }
    static __device__ __forceinline__ const uint8_t *scale_row(const args &a, const tile &t, uint32_t r)
    {
        const uint32_t i = inner(t, r);
        return i < a.rows ? (r & 8 ? t.e.scale[1] : t.e.scale[0]) + (uint64_t)i * (a.cols / (F == GM_NV ? 16 : 32))
                          : nullptr;
    }
    static __device__ __forceinline__ float block_scale(const args &a, const tile &t, uint32_t r, uint32_t k128)
    {
        const uint32_t i = inner(t, r), row = i < a.rows ? i : a.rows - 1;
        return r & 8 ? base::scale_of(a, t, 1, row, k128) : base::scale_of(a, t, 0, row, k128);
    }
    static __device__ __forceinline__ uint64_t b_row(const args &a, const tile &t, uint32_t col)
    {
        return a.row ? __ldcg(a.row + t.e.start + col) : t.e.start + col;
    }
    template <int N>
    static __device__ __forceinline__ void epilogue(const args &a, const tile &t, const float *acc, uint32_t r, uint32_t q)
    {
        const uint32_t i = inner(t, r), k = i & 63;
        /* The lane whose value lies beside this one's: of each pair of lanes one writes the even tokens. */
        const uint32_t other = a.h_order == GM_ORD_NV ? 16 : 4;
        const bool second = a.h_order == GM_ORD_NV ? r & 4 : r & 1;
        const uint32_t pos = gm_pos(a.h_order, k) - (second ? 1 : 0), row = t.e.start + 2 * q + (second ? 1 : 0);
        uint8_t *h = a.h + gm_at(a.h_rows, row, i >> 6, pos >> 3) + (pos & 7) * 2; /* row + 8 j has the same swizzle */
        const float f0 = t.e.factor[0], f1 = t.e.factor[1];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (8 * j < t.n) {
                const float v0 = gm_silu(acc[4 * j] * f0) * (acc[4 * j + 2] * f1);
                const float v1 = gm_silu(acc[4 * j + 1] * f0) * (acc[4 * j + 3] * f1);
                const float got = __shfl_xor_sync(0xffffffffu, second ? v0 : v1, other);
                if (8 * j + 2 * q + (second ? 1 : 0) < t.n) {
                    *(uint32_t *)(h + 1024 * j) = second ? pack_bf16(got, v1) : pack_bf16(v0, got);
                }
            }
        }
    }
};

template <int F_, int PROMOTE_> struct pmoe_down : pmoe_policy<F_, PROMOTE_> {
    using base = pmoe_policy<F_, PROMOTE_>;
    using args = pmoe_args;
    using tile = typename base::tile;
    static constexpr int F = F_;
    GM_RUN(pmoe_down)
    static __device__ __forceinline__ uint32_t place(const tile &t, uint32_t r)
    {
        return t.m0 * 128 + gm_place(r);
    }
    static __device__ __forceinline__ gm_src a_src(const args &a, const tile &t, uint32_t r)
    {
        return gm_rows(t.e.code[2], a.row_bytes, place(t, r), a.rows);
    }
    static __device__ __forceinline__ const uint8_t *scale_row(const args &a, const tile &t, uint32_t r)
    {
        const uint32_t m = place(t, r);
        return m < a.rows ? t.e.scale[2] + (uint64_t)m * (a.cols / (F == GM_NV ? 16 : 32)) : nullptr;
    }
    static __device__ __forceinline__ float block_scale(const args &a, const tile &t, uint32_t r, uint32_t k128)
    {
        const uint32_t m = place(t, r);
        return base::scale_of(a, t, 2, m < a.rows ? m : a.rows - 1, k128);
    }
    static __device__ __forceinline__ uint64_t b_row(const args &, const tile &t, uint32_t col)
    {
        return t.e.start + col;
    }
    template <int N>
    static __device__ __forceinline__ void epilogue(const args &a, const tile &t, const float *acc, uint32_t r, uint32_t q)
    {
        const uint32_t m = place(t, r);
        const float f = t.e.factor[2];
        float *p = a.out + (uint64_t)(t.e.out + 2 * q) * a.rows + m;
        if (m >= a.rows) {
            return;
        }
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * j + 2 * q + e < t.n) {
                    /* rows is even and m too */
                    *(float2 *)(p + (uint64_t)(8 * j + e) * a.rows) = make_float2(acc[4 * j + e] * f, acc[4 * j + 2 + e] * f);
                }
            }
        }
    }
};

/* ---- adding up ------------------------------------------------------------------------------ */

struct psum_args {
    const float *m, *weight, *pair, *shared;
    const int32_t *at;
    struct qx_weight vec;
    float *y;
    uint32_t k, hidden;
};

__global__ void __launch_bounds__(256) pmoe_sum(const __grid_constant__ psum_args a)
{
    __shared__ float part[8];
    pdl_next();
    pdl_wait();
    const uint64_t r = blockIdx.x;
    const uint32_t t = threadIdx.x, h4 = a.hidden / 4;
    const float4 *pair[PMOE_MAX_K];
    float w[PMOE_MAX_K];
#pragma unroll
    for (int j = 0; j < PMOE_MAX_K; ++j) {
        const int32_t at = j < (int)a.k ? __ldcg(a.at + r * a.k + j) : -1;
        pair[j] = at >= 0 ? (const float4 *)(a.pair + (uint64_t)at * a.hidden) : nullptr;
        w[j] = at >= 0 ? __ldcg(a.weight + r * a.k + j) : 0.0f;
    }
    float dot = 0.0f;
    for (uint32_t i = t; i < h4; i += 256) {
        const float4 m = __ldcg((const float4 *)(a.m + r * a.hidden) + i);
        if (a.vec.fmt == QX_W_BF16) {
            const uint2 v = __ldg((const uint2 *)a.vec.codes + i);
            dot = fmaf(m.x, bf16_lo(v.x), dot);
            dot = fmaf(m.y, bf16_hi(v.x), dot);
            dot = fmaf(m.z, bf16_lo(v.y), dot);
            dot = fmaf(m.w, bf16_hi(v.y), dot);
        } else {
            dot = fmaf(m.x, weight_at(a.vec, 0, 4 * i), dot);
            dot = fmaf(m.y, weight_at(a.vec, 0, 4 * i + 1), dot);
            dot = fmaf(m.z, weight_at(a.vec, 0, 4 * i + 2), dot);
            dot = fmaf(m.w, weight_at(a.vec, 0, 4 * i + 3), dot);
        }
    }
    dot = warp_sum(dot);
    if ((t & 31) == 0) {
        part[t / 32] = dot;
    }
    __syncthreads();
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        s += part[i];
    }
    s = sigmoid_f(s);
    for (uint32_t i = t; i < h4; i += 256) {
        float4 v[PMOE_MAX_K], y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 sh = __ldcg((const float4 *)(a.shared + r * a.hidden) + i);
#pragma unroll
        for (int j = 0; j < PMOE_MAX_K; ++j) {
            v[j] = pair[j] ? __ldcs(pair[j] + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int j = 0; j < PMOE_MAX_K; ++j) {
            if (pair[j]) {
                y.x = fmaf(w[j], v[j].x, y.x);
                y.y = fmaf(w[j], v[j].y, y.y);
                y.z = fmaf(w[j], v[j].z, y.z);
                y.w = fmaf(w[j], v[j].w, y.w);
            }
        }
        y.x = fmaf(s, sh.x, y.x);
        y.y = fmaf(s, sh.y, y.y);
        y.z = fmaf(s, sh.z, y.z);
        y.w = fmaf(s, sh.w, y.w);
        ((float4 *)(a.y + r * a.hidden))[i] = y;
    }
}

/* ---- the op --------------------------------------------------------------------------------- */

template <int F, int PROMOTE>
static int pmoe_products(struct qx_queue *q, const pmoe_args &up, const pmoe_args &down, uint64_t n_ent, bool thin)
{
    constexpr int W = PROMOTE ? 128 : F == GM_BF16 ? 128 : PMOE_WIDE;
    const uint64_t tu = n_ent * up.m_tiles, td = n_ent * down.m_tiles;
    if (thin) {
        const int r = gm_launch<pmoe_up<F, PROMOTE>, 2, PMOE_NARROW>(q, "moe", up, tu);
        return r ? r : gm_launch<pmoe_down<F, PROMOTE>, 2, PMOE_NARROW>(q, "moe", down, td);
    }
    const int r = gm_launch<pmoe_up<F, PROMOTE>, 1, W>(q, "moe", up, tu);
    return r ? r : gm_launch<pmoe_down<F, PROMOTE>, 1, W>(q, "moe", down, td);
}

static uint32_t pmoe_width(int f, bool thin)
{
    return thin ? PMOE_NARROW : f == GM_BF16 || f == GM_BLOCK ? 128 : PMOE_WIDE;
}

static int pmoe_run(struct qx_queue *q, int f, const pmoe_args &up, const pmoe_args &down, uint64_t n_ent, bool thin)
{
    switch (f) {
    case GM_BF16: return pmoe_products<GM_BF16, 0>(q, up, down, n_ent, thin);
    case GM_FP8: return pmoe_products<GM_FP8, 0>(q, up, down, n_ent, thin);
    case GM_MX: return pmoe_products<GM_MX, 0>(q, up, down, n_ent, thin);
    case GM_NV: return pmoe_products<GM_NV, 0>(q, up, down, n_ent, thin);
    default: return pmoe_products<GM_BLOCK, 2>(q, up, down, n_ent, thin);
    }
}

/* Arguments for matrices of one format: inner width I, K blocks, rows of h. */
static void pmoe_shape(pmoe_args &up, pmoe_args &down, int f, uint32_t hidden, uint32_t inter)
{
    up.rows = inter;
    up.cols = hidden;
    up.row_bytes = (uint32_t)((uint64_t)hidden * gm_code_bytes(f) / 64);
    up.kb = (hidden + 63) / 64;
    up.m_tiles = (inter + 63) / 64;
    up.h_order = gm_order_of(f);
    down.rows = hidden;
    down.cols = inter;
    down.row_bytes = (uint32_t)((uint64_t)inter * gm_code_bytes(f) / 64);
    down.kb = (inter + 63) / 64;
    down.m_tiles = (hidden + 127) / 128;
}

/* A matrix of the experts, of which only the shape and the common format are known here. */
static int pmoe_format(const struct qx_experts *x)
{
    struct qx_weight w = {};
    w.rows = 1;
    w.fmt = x->fmt;
    w.cols = x->hidden;
    const int f = gm_format(w);
    w.cols = x->inter;
    return gm_format(w) == f ? f : GM_NONE;
}

int qx_prompt_moe(struct qx_queue *q, const struct qx_op_moe *o)
{
    const struct qx_experts *x = &o->experts;
    if (!o->prompt || !o->act_bf16 || o->n_rows <= QX_PROMPT_MIN_ROWS || !qx_prompt_can(q) || o->k > PMOE_MAX_K ||
        x->n_experts > PMOE_MAX_EXPERTS || x->hidden % 8 || (uintptr_t)o->m & 15) {
        return 1;
    }
    const int f = pmoe_format(x), fs = gm_format(o->s_gate);
    if (f == GM_NONE || fs == GM_NONE || gm_format(o->s_up) != fs || gm_format(o->s_down) != fs) {
        return 1;
    }
    const bool whole = f == GM_NV && pmoe_thin_takes(x->hidden, x->inter); /* few rows: prompt_moe_thin.cu */
    const bool two = whole || gm_order_of(f) != gm_order_of(fs); /* orders of the rows of m */
    pmoe_args up = {}, down = {}, s_up = {}, s_down = {};
    pmoe_shape(up, down, f, x->hidden, x->inter);
    pmoe_shape(s_up, s_down, fs, x->hidden, o->s_inter);
    const uint64_t m_row = up.kb * 128ull, h_row = down.kb * 128ull, sh_row = s_down.kb * 128ull;
    const uint64_t per_row = m_row * (two ? 2 : 1) + o->k * (h_row + 8) + sh_row;
    const uint64_t lists = x->n_experts * (sizeof(pmoe_ent) + 8 * (h_row + 4)) + 8 * (2 * m_row + sh_row) + 4096;
    const uint64_t per_ent = (o->k * sizeof(pmoe_ent) + PMOE_NARROW - 1) / PMOE_NARROW + 1;
    uint64_t fit = (QX_WS_BYTES - lists) / (per_row + per_ent) / 256 * 256;
    if (QX_WS_BYTES < lists || fit == 0) {
        return 1;
    }
    for (uint64_t r0 = 0; r0 < o->n_rows; r0 += fit) {
        const uint32_t rows = (uint32_t)(o->n_rows - r0 < fit ? o->n_rows - r0 : fit), pairs = rows * o->k,
                       h_rows = pairs + 8 * (pairs < x->n_experts ? pairs : x->n_experts);
        const bool thin = pairs / x->n_experts < 28;
        const uint32_t width = whole && thin ? PMOE_THIN : pmoe_width(f, thin);
        uint8_t *at = q->ws;
        auto take = [&](uint64_t n) {
            uint8_t *p = at;
            at += (n + 255) / 256 * 256;
            return p;
        };
        uint8_t *m1 = take(gm_pad8(rows) * m_row), *m2 = two ? take(gm_pad8(rows) * m_row) : m1;
        uint8_t *h = take(h_rows * h_row), *sh = take(gm_pad8(rows) * sh_row);
        psort_args s = {};
        s.row = (uint32_t *)take(h_rows * 4ull);
        s.at = (int32_t *)take(pairs * 4ull);
        s.n_list = (uint32_t *)take(8);
        s.list = (pmoe_ent *)take(0);
        s.expert = o->expert + r0 * o->k;
        s.pairs = pairs;
        s.k = o->k;
        s.n_experts = x->n_experts;
        s.width = width;
        s.w[0] = x->gate;
        s.w[1] = x->up;
        s.w[2] = x->down;
        s.f = f;
        const float *m = o->m + r0 * x->hidden;
        s.x = m;
        s.rows = rows;
        s.hidden = x->hidden;
        s.m1 = m1;
        s.m2 = two ? m2 : nullptr;
        s.order1 = whole && thin ? GM_ORD_NV2 : gm_order_of(f);
        s.order2 = gm_order_of(fs);
        const uint64_t units = ((uint64_t)rows * up.kb * 4 + 1023) / 1024, most_units = 2 * (uint64_t)q->n_sm;
        const uint64_t convert = ((units < most_units ? units : most_units) + PSORT_BLOCKS - 1) / PSORT_BLOCKS * PSORT_BLOCKS;
        int r = launch_cluster(q, "moe", pmoe_sort, dim3((unsigned)(PSORT_BLOCKS + convert)), dim3(1024), 0, PSORT_BLOCKS, s);
        /* the shared expert */
        float *pair = o->scratch, *shared = o->scratch + (uint64_t)pairs * x->hidden;
        s_up.one.code[0] = (const uint8_t *)o->s_gate.codes;
        s_up.one.code[1] = (const uint8_t *)o->s_up.codes;
        s_up.one.code[2] = (const uint8_t *)o->s_down.codes;
        s_up.one.scale[0] = (const uint8_t *)o->s_gate.scale;
        s_up.one.scale[1] = (const uint8_t *)o->s_up.scale;
        s_up.one.scale[2] = (const uint8_t *)o->s_down.scale;
        s_up.one.factor[0] = gm_factor(fs, o->s_gate.global);
        s_up.one.factor[1] = gm_factor(fs, o->s_up.global);
        s_up.one.factor[2] = gm_factor(fs, o->s_down.global);
        s_up.one.row0[0] = o->s_gate.row0;
        s_up.one.row0[1] = o->s_up.row0;
        s_up.one.row0[2] = o->s_down.row0;
        s_up.one.scale_bf16 = (o->s_gate.scale_bf16 ? 1 : 0) | (o->s_up.scale_bf16 ? 2 : 0) | (o->s_down.scale_bf16 ? 4 : 0);
        s_down.one = s_up.one;
        const bool few = rows <= 512;
        s_up.n_rows = s_down.n_rows = rows;
        s_up.width = s_down.width = pmoe_width(fs, few);
        s_up.c.b = m2;
        s_up.h = sh;
        s_down.c.b = sh;
        s_up.c.b_rows = s_up.h_rows = s_down.c.b_rows = gm_pad8(rows);
        s_down.out = shared;
        r = r ? r : pmoe_run(q, fs, s_up, s_down, (rows + s_up.width - 1) / s_up.width, few);
        /* the picked ones */
        up.list = down.list = s.list;
        up.n_list = down.n_list = s.n_list;
        up.row = s.row;
        up.c.b = m1;
        up.h = h;
        down.c.b = h;
        up.c.b_rows = gm_pad8(rows);
        up.h_rows = down.c.b_rows = h_rows;
        down.out = pair;
        const uint64_t most = pairs / width + (pairs < x->n_experts ? pairs : x->n_experts);
        if (whole && thin) {
            pmoe_thin_args t = {};
            t.list = s.list;
            t.n_list = s.n_list;
            t.row = s.row;
            t.taken = s.n_list + 1;
            t.m = m1;
            t.m_rows = gm_pad8(rows);
            t.hidden = x->hidden;
            t.inter = x->inter;
            t.h = h;
            t.h_rows = h_rows;
            t.out = pair;
            r = r ? r : pmoe_thin(q, t);
        } else {
            r = r ? r : pmoe_run(q, f, up, down, most, thin);
        }
        psum_args z = {};
        z.m = m;
        z.weight = o->weight + r0 * o->k;
        z.pair = pair;
        z.shared = shared;
        z.at = s.at;
        z.vec = o->s_gate_vec;
        z.y = o->y + r0 * x->hidden;
        z.k = o->k;
        z.hidden = x->hidden;
        r = r ? r : launch(q, "moe", pmoe_sum, dim3(rows), dim3(256), 0, z);
        if (r) {
            return r;
        }
    }
    return 0;
}
