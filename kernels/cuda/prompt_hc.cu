/* prompt_hc.cu: the hyper-connection for the rows of prompts. One pass over the streams adds the block's
 * output, normalises, and leaves bf16 rows; a product with down and inject leaves the inner values; a
 * product with up, whose tiles hold the four streams of the same elements, gates and adds up the streams,
 * normalised again from f32, in its epilogue. */
#include "gemm.cuh"
#include "prompt.h"

#define PHC_STREAMS 4

/* ---- write-back and norms ------------------------------------------------------------------- */

struct phc_norm_args {
    float *x;
    const float *y, *inj, *norm;
    float eps;
    uint32_t hidden, b_rows, n_blocks, lo_blocks, rank; /* blocks of 64 elements */
    uint8_t *n, *lo;      /* token buffers */
    float *rs;
};

/* A row a block. */
__global__ void __launch_bounds__(256) phc_norm(const __grid_constant__ phc_norm_args a)
{
    extern __shared__ float4 phc_sm[];
    __shared__ float part[8][PHC_STREAMS];
    pdl_next();
    pdl_wait();
    const uint64_t r = blockIdx.x;
    const uint32_t t = threadIdx.x, h4 = a.hidden / 4;
    float4 *x = (float4 *)(a.x + r * PHC_STREAMS * a.hidden);
    float f[PHC_STREAMS], sum[PHC_STREAMS];
#pragma unroll
    for (int c = 0; c < PHC_STREAMS; ++c) {
        f[c] = a.inj ? __ldcg(a.inj + r * PHC_STREAMS + c) : 1.0f;
        sum[c] = 0.0f;
    }
    for (uint32_t i = t; i < h4; i += 256) {
        float4 v[PHC_STREAMS], y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < PHC_STREAMS; ++c) {
            v[c] = __ldcg(x + c * h4 + i);
        }
        if (a.y) {
            y = __ldcg((const float4 *)(a.y + r * a.hidden) + i);
        }
#pragma unroll
        for (int c = 0; c < PHC_STREAMS; ++c) {
            if (a.y) {
                v[c].x = fmaf(f[c], y.x, v[c].x);
                v[c].y = fmaf(f[c], y.y, v[c].y);
                v[c].z = fmaf(f[c], y.z, v[c].z);
                v[c].w = fmaf(f[c], y.w, v[c].w);
                x[c * h4 + i] = v[c];
            }
            phc_sm[c * h4 + i] = v[c];
            sum[c] = fmaf(v[c].x, v[c].x, fmaf(v[c].y, v[c].y, fmaf(v[c].z, v[c].z, fmaf(v[c].w, v[c].w, sum[c]))));
        }
    }
#pragma unroll
    for (int c = 0; c < PHC_STREAMS; ++c) {
        sum[c] = warp_sum(sum[c]);
        if ((t & 31) == 0) {
            part[t / 32][c] = sum[c];
        }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < PHC_STREAMS; ++c) {
        float s = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            s += part[w][c];
        }
        f[c] = 1.0f / sqrtf(s / (float)a.hidden + a.eps);
        if (t == (uint32_t)c) {
            a.rs[r * PHC_STREAMS + c] = f[c];
        }
    }
    for (uint32_t i = t; i < h4; i += 256) {
#pragma unroll
        for (int c = 0; c < PHC_STREAMS; ++c) {
            const float4 v = phc_sm[c * h4 + i], w = __ldg((const float4 *)(a.norm + c * a.hidden) + i);
            const uint32_t k = c * a.hidden + 4 * i;
            *(uint2 *)(a.n + gm_at(a.b_rows, (uint32_t)r, k >> 6, k >> 3 & 7) + (k & 4) * 2) = make_uint2(pack_bf16((v.x * f[c]) * (1.0f + w.x), (v.y * f[c]) * (1.0f + w.y)),
                                       pack_bf16((v.z * f[c]) * (1.0f + w.z), (v.w * f[c]) * (1.0f + w.w)));
        }
    }
    /* zeros behind the rows */
    for (uint32_t k = PHC_STREAMS * a.hidden + 8 * t; k < a.n_blocks * 64; k += 2048) {
        *(uint4 *)(a.n + gm_at(a.b_rows, (uint32_t)r, k >> 6, k >> 3 & 7)) = make_uint4(0, 0, 0, 0);
    }
    for (uint32_t k = a.rank + 8 * t; k < a.lo_blocks * 64; k += 2048) {
        *(uint4 *)(a.lo + gm_at(a.b_rows, (uint32_t)r, k >> 6, k >> 3 & 7)) = make_uint4(0, 0, 0, 0);
    }
}

/* ---- down and inject ------------------------------------------------------------------------ */

struct phc_args {
    gm_common c;
    const uint8_t *down, *inject, *up;
    uint32_t n_rows, hidden, rank, n_inject, width, m_tiles, n_tiles, kb;
    uint32_t splits, per;   /* parts of K of the first product, blocks a part */
    uint8_t *lo;
    float *part;            /* [splits, n_rows, rank + n_inject] when there are more than one */
    float *inj_out, *m;
    const float *x, *norm, *rs;
};

/* Values m, m + 1 of a row of the first product. */
__device__ __forceinline__ void phc_inner(const phc_args &a, uint32_t row, uint32_t m, float v0, float v1)
{
    v0 *= 1.0f / PHC_STREAMS;
    v1 *= 1.0f / PHC_STREAMS;
    if (m < a.rank) {
        *(uint32_t *)(a.lo + gm_at(a.c.b_rows, row, m >> 6, m >> 3 & 7) + (m & 7) * 2) = pack_bf16(gm_silu(v0), gm_silu(v1));
    } else {
        *(float2 *)(a.inj_out + (uint64_t)row * PHC_STREAMS + (m - a.rank)) = make_float2(2.0f * sigmoid_f(v0), 2.0f * sigmoid_f(v1));
    }
}

/* Adds up the parts of K in order. */
__global__ void __launch_bounds__(256) phc_parts(const __grid_constant__ phc_args a)
{
    pdl_next();
    pdl_wait();
    const uint32_t pairs = (a.rank + a.n_inject) / 2;
    const uint64_t n = (uint64_t)a.n_rows * pairs;
    for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (uint64_t)gridDim.x * 256) {
        float2 s = make_float2(0.0f, 0.0f);
        for (uint32_t p = 0; p < a.splits; ++p) {
            const float2 v = __ldcg((const float2 *)a.part + p * n + i);
            s.x += v.x;
            s.y += v.y;
        }
        const uint32_t row = (uint32_t)(i / pairs);
        phc_inner(a, row, 2 * (uint32_t)(i - (uint64_t)row * pairs), s.x, s.y);
    }
}

struct phc_down : gm_policy {
    static constexpr int F = GM_BF16;
    static constexpr bool SPLIT = true;
    using args = phc_args;
    struct tile {
        uint32_t n, kb, akb, row0, col0, k0, split;
    };
    GM_RUN(phc_down)
    static __device__ __forceinline__ uint32_t n_tiles(const args &a)
    {
        return a.m_tiles * a.n_tiles * a.splits;
    }
    static __device__ __forceinline__ uint32_t first_block(const tile &t)
    {
        return t.k0;
    }
    static __device__ __forceinline__ tile get(const args &a, uint32_t t)
    {
        tile r;
        const uint32_t tiles = a.m_tiles * a.n_tiles;
        r.split = t / tiles;
        t -= r.split * tiles;
        const uint32_t n = t / a.m_tiles;
        r.row0 = (t - n * a.m_tiles) * 128;
        r.k0 = r.split * a.per;
        r.col0 = n * a.width;
        r.n = a.n_rows - r.col0 < a.width ? a.n_rows - r.col0 : a.width;
        r.kb = a.kb - r.k0 < a.per ? a.kb - r.k0 : a.per;
        r.akb = a.kb;
        return r;
    }
    static __device__ __forceinline__ gm_src a_src(const args &a, const tile &t, uint32_t r)
    {
        gm_src s = gm_rows(a.down, PHC_STREAMS * a.hidden * 2, t.row0 + gm_place(r), a.rank + a.n_inject);
        s.base2 = a.inject;
        s.split = a.rank;
        return s;
    }
    static __device__ __forceinline__ const uint8_t *scale_row(const args &, const tile &, uint32_t)
    {
        return nullptr;
    }
    static __device__ __forceinline__ uint32_t b_row(const args &, const tile &t, uint32_t col)
    {
        return t.col0 + col;
    }
    template <int N>
    static __device__ __forceinline__ void epilogue(const args &a, const tile &t, const float *acc, uint32_t r, uint32_t q)
    {
        const uint32_t m = t.row0 + gm_place(r); /* even, as the rank is */
        float *part = a.part + ((uint64_t)t.split * a.n_rows + t.col0) * (a.rank + a.n_inject) + m;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t col = 8 * j + 2 * q + e;
                if (col < t.n && m < a.rank + a.n_inject) {
                    const float v0 = acc[4 * j + e], v1 = acc[4 * j + 2 + e];
                    if (a.splits > 1) {
                        *(float2 *)(part + (uint64_t)col * (a.rank + a.n_inject)) = make_float2(v0, v1);
                    } else {
                        phc_inner(a, t.col0 + col, m, v0, v1);
                    }
                }
            }
        }
    }
};

/* ---- up and mix ----------------------------------------------------------------------------- */

/* A tile: four streams of 32 elements, N tokens a warpgroup. Local row r + 64 h: stream 2 h + (r >> 3 & 1), so
 * that a lane holds the four streams of one element. The tile's part of x comes through shared memory: a line of 32
 * elements a token and stream, whose four groups of eight lie in an order that tokens 2 q apart do not share, so
 * that a warp meets no bank twice. */
struct phc_up : gm_policy {
    static constexpr int F = GM_BF16;
    using args = phc_args;
    struct tile {
        uint32_t n, kb, akb, d0, col0;
    };
    static constexpr uint32_t TOKENS = 128, SIDE = TOKENS * PHC_STREAMS * 128;
    template <int N> static __host__ __device__ constexpr int cols() { return 2 * N; }
    static __device__ __forceinline__ uint32_t side_at(uint32_t token, uint32_t c, uint32_t group)
    {
        return (token * PHC_STREAMS + c) * 128 + (group ^ (token >> 1 & 3)) * 32;
    }
    static __device__ __forceinline__ void side_copy(const args &a, const tile &t, uint32_t to)
    {
        const uint32_t u = threadIdx.x & 7, line = threadIdx.x / 8, c = line & 3;
        if (t.d0 + u * 4 >= a.hidden) {
            return;
        }
        const float *x = a.x + ((uint64_t)t.col0 * PHC_STREAMS + c) * a.hidden + t.d0 + u * 4;
#pragma unroll 8
        for (uint32_t token = line / 4; token < t.n; token += 4) {
            copy16(to + side_at(token, c, u >> 1) + (u & 1) * 16, x + (uint64_t)token * PHC_STREAMS * a.hidden, 16);
        }
    }
    static __device__ __forceinline__ uint32_t n_tiles(const args &a)
    {
        return a.m_tiles * a.n_tiles;
    }
    static __device__ __forceinline__ tile get(const args &a, uint32_t t)
    {
        tile r;
        const uint32_t n = t / a.m_tiles;
        r.d0 = (t - n * a.m_tiles) * 32;
        r.col0 = n * a.width;
        r.n = a.n_rows - r.col0 < a.width ? a.n_rows - r.col0 : a.width;
        r.kb = r.akb = a.kb;
        return r;
    }
    static __device__ __forceinline__ gm_src a_src(const args &a, const tile &t, uint32_t r)
    {
        gm_src s = {};
        s.base = a.up;
        s.row_bytes = a.rank * 2;
        s.pos = t.d0 + (r >> 4) * 8 + (r & 7);
        s.off = ((uint64_t)((r >> 3) & 1) * a.hidden + s.pos) * s.row_bytes;
        s.s1 = 8 * s.row_bytes;
        s.s2 = 2 * a.hidden * s.row_bytes;
        s.d1 = 8;
        s.lim = a.hidden;
        return s;
    }
    static __device__ __forceinline__ const uint8_t *scale_row(const args &, const tile &, uint32_t)
    {
        return nullptr;
    }
    static __device__ __forceinline__ uint32_t b_row(const args &, const tile &t, uint32_t col)
    {
        return t.col0 + col;
    }
    template <int N, int KS> static __device__ __forceinline__ void run(const args &a, const tile &t, gm_pipe &p)
    {
        constexpr uint32_t A0 = 2 * N * 128, STAGE = gm_stage_bytes(F, 2 * N);
        const uint32_t w = threadIdx.x / 32 - 4, lane = threadIdx.x & 31, wgi = w / 4, g = lane >> 2, q = lane & 3;
        const uint32_t d = t.d0 + (w & 3) * 8 + g, c0 = wgi * N + 2 * q;
        float4 rs[N / 8][2];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                rs[j][e] = c0 + j * 8 + e < t.n ? __ldcg((const float4 *)a.rs + t.col0 + c0 + j * 8 + e)
                                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
        float wn[PHC_STREAMS];
#pragma unroll
        for (int c = 0; c < PHC_STREAMS; ++c) {
            wn[c] = d < a.hidden ? 1.0f + __ldg(a.norm + c * a.hidden + d) : 0.0f;
        }
        float acc[2][N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            acc[0][i] = acc[1][i] = 0.0f;
        }
        uint32_t prev = 0;
        for (uint32_t kb = 0; kb < t.kb; ++kb) {
            const uint32_t st = p.smem + p.stage * STAGE;
            bar_wait(p.full + 8 * p.stage, p.phase);
            fence_async();
            const uint64_t db = wg_desc(st + wgi * N * 128), da = wg_desc(st + A0);
            wg_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                wg<N>::ss(acc[0], da + 2 * j, db + 2 * j, kb > 0 || j > 0);
                wg<N>::ss(acc[1], da + 512 + 2 * j, db + 2 * j, kb > 0 || j > 0);
            }
            wg_commit();
            wg_wait<1>();
            if (kb && lane == 0) {
                bar_arrive(p.empty + 8 * prev);
            }
            prev = p.stage;
            p.next();
        }
        wg_wait<0>();
        wg_pin<N / 2>(acc[0]);
        wg_pin<N / 2>(acc[1]);
        if (lane == 0) {
            bar_arrive(p.empty + 8 * prev);
        }
        bar_wait(p.side_bars + 8 * p.side_slot, p.side_phase);
        const uint32_t x = p.side + p.side_slot * SIDE + g * 4;
        float *m = a.m + (uint64_t)(t.col0 + c0) * a.hidden + d;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t col = j * 8 + e;
                const float r[PHC_STREAMS] = {rs[j][e].x, rs[j][e].y, rs[j][e].z, rs[j][e].w};
                float s = 0.0f;
#pragma unroll
                for (int c = 0; c < PHC_STREAMS; ++c) {
                    const float v = __uint_as_float(lds32(x + side_at(c0 + col, c, w & 3)));
                    s = fmaf(gm_sigmoid(acc[c >> 1][4 * j + (c & 1) * 2 + e]), (v * r[c]) * wn[c], s);
                }
                if (c0 + col < t.n && d < a.hidden) {
                    m[(uint64_t)col * a.hidden] = s / PHC_STREAMS;
                }
            }
        }
        __syncwarp();
        if (lane == 0) {
            bar_arrive(p.side_bars + 16 + 8 * p.side_slot);
        }
        p.side_next();
    }
};

/* ---- the op --------------------------------------------------------------------------------- */

int qx_prompt_hc(struct qx_queue *q, const struct qx_op_hc *o)
{
    const bool inject = o->inject.fmt != QX_W_NONE && o->inj_out;
    const uint32_t wide = PHC_STREAMS * o->hidden;
    if (!o->prompt || !o->act_bf16 || !o->m || o->n_rows <= QX_PROMPT_MIN_ROWS || !qx_prompt_can(q) ||
        o->n_streams != PHC_STREAMS || o->hidden % 8 || o->rank % 8 || gm_format(o->down) != GM_BF16 ||
        gm_format(o->up) != GM_BF16 || (inject && gm_format(o->inject) != GM_BF16) ||
        wide * 4 > (uint32_t)q->smem_max / 2 || ((uintptr_t)o->scratch & 15) || ((uintptr_t)o->inj_out & 7)) {
        return 1;
    }
    const uint32_t n_blocks = (wide + 63) / 64, lo_blocks = (o->rank + 63) / 64, b_rows = gm_pad8(o->n_rows);
    const uint64_t rows = o->n_rows, need = b_rows * 128ull * (n_blocks + lo_blocks) + (rows * PHC_STREAMS * 4 + 15) / 16 * 16;
    if (need > rows * (wide + o->rank) * 4ull) {
        return 1;
    }
    phc_norm_args a = {};
    a.x = o->x;
    a.y = o->y;
    a.inj = o->inj_in;
    a.norm = o->norm;
    a.eps = o->eps;
    a.hidden = o->hidden;
    a.b_rows = b_rows;
    a.n_blocks = n_blocks;
    a.lo_blocks = lo_blocks;
    a.rank = o->rank;
    a.n = (uint8_t *)o->scratch;
    a.lo = a.n + b_rows * 128ull * n_blocks;
    a.rs = (float *)(a.lo + b_rows * 128ull * lo_blocks);
    int r = launch(q, "hc", phc_norm, dim3(o->n_rows), dim3(256), wide * 4, a);
    if (r) {
        return r;
    }
    phc_args p = {};
    p.c.b = a.n;
    p.c.b_rows = b_rows;
    p.down = (const uint8_t *)o->down.codes;
    p.inject = (const uint8_t *)o->inject.codes;
    p.up = (const uint8_t *)o->up.codes;
    p.n_rows = o->n_rows;
    p.hidden = o->hidden;
    p.rank = o->rank;
    p.n_inject = inject ? PHC_STREAMS : 0;
    p.kb = n_blocks;
    p.m_tiles = (o->rank + p.n_inject + 127) / 128;
    p.width = gm_width(q, o->n_rows, p.m_tiles, 256);
    /* K in parts where the tiles are too few for the multiprocessors */
    uint32_t splits = 1;
    uint64_t least = ((uint64_t)p.m_tiles * ((o->n_rows + p.width - 1) / p.width) + q->n_sm - 1) / q->n_sm * n_blocks *
                     (p.width + 40) * 4 / 5;
    const uint64_t have = (rows * (wide + o->rank) * 4ull - need) / (rows * (o->rank + p.n_inject) * 4ull);
    for (uint32_t w = 64; w <= 256; w += 64) {
        for (uint32_t s = 2; s <= 8 && s <= have && s <= n_blocks; ++s) {
            const uint32_t per = (n_blocks + s - 1) / s, n = (n_blocks + per - 1) / per;
            const uint64_t tiles = (uint64_t)p.m_tiles * ((o->n_rows + w - 1) / w) * n;
            const uint64_t cost = (tiles + q->n_sm - 1) / q->n_sm * per * (w + 40);
            if (cost < least) {
                least = cost;
                splits = n;
                p.width = w;
            }
        }
    }
    p.splits = splits;
    p.per = (n_blocks + splits - 1) / splits;
    p.part = (float *)((uint8_t *)o->scratch + need);
    p.n_tiles = (o->n_rows + p.width - 1) / p.width;
    p.lo = a.lo;
    p.inj_out = o->inj_out;
    p.m = o->m;
    p.x = o->x;
    p.norm = o->norm;
    p.rs = a.rs;
    const uint64_t tiles = (uint64_t)p.m_tiles * p.n_tiles * p.splits;
    switch (p.width) {
    case 64: r = gm_launch<phc_down, 1, 64>(q, "hc", p, tiles); break;
    case 128: r = gm_launch<phc_down, 1, 128>(q, "hc", p, tiles); break;
    case 192: r = gm_launch<phc_down, 1, 192>(q, "hc", p, tiles); break;
    default: r = gm_launch<phc_down, 1, 256>(q, "hc", p, tiles); break;
    }
    if (!r && p.splits > 1) {
        const uint64_t n = (rows * ((o->rank + p.n_inject) / 2) + 255) / 256;
        r = launch(q, "hc", phc_parts, dim3((unsigned)(n < 4096 ? n : 4096)), dim3(256), 0, p);
    }
    if (r) {
        return r;
    }
    p.c.b = a.lo;
    p.kb = lo_blocks;
    p.m_tiles = (o->hidden + 31) / 32;
    p.width = phc_up::TOKENS;
    p.n_tiles = (o->n_rows + p.width - 1) / p.width;
    return gm_launch<phc_up, 1, 64>(q, "hc", p, (uint64_t)p.m_tiles * p.n_tiles);
}
