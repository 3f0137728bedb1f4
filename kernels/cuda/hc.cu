/* hc.cu: hyper-connection module. With BF16 matrices of the released width and inputs of products rounded to bf16
 * it is that of hc_stream.cu; here are the write-back alone and, for everything else, two kernels on tiles. The first
 * normalises the streams (with the block's output added on the fly) and multiplies with the down and inject matrices,
 * a stream and 16 rows a block; the second adds up the streams, multiplies with the up matrix, mixes, and is the one
 * that writes the streams back, since there each element belongs to one block. */
#include "prompt.h"
#include "tile.cuh"

#define HC_MAX_STREAMS 8

/* hc_stream.cu; done: false when the op is not one for it. */
int hc_streamed(struct qx_queue *q, const struct qx_op_hc *o, bool *done);

struct hc_args {
    uint32_t n_rows, C, hidden, rank, n_groups;
    float *x;
    const float *y, *inj_in, *norm;
    float eps;
    tile_w down[HC_MAX_STREAMS]; /* a slice of columns a stream */
    tile_w inject[HC_MAX_STREAMS];
    tile_w up;
    bool has_inject, act_bf16;
    uint32_t tiles_down, pr; /* partial sums: [row][stream][pr], then r [row][stream] */
    float *m, *inj_out, *part, *rs;
    uint32_t save_off;       /* bytes of shared memory before the saved streams */
    uint32_t lo_off;         /* and before the second kernel's inner values */
    bool save;
};

/* x + inj y of one element. */
__device__ __forceinline__ float hc_new(float x, float y, float inj)
{
    return fmaf(inj, y, x);
}

/* Normalised elements of one stream of the group's rows. */
struct src_hc {
    const float *x, *y, *inj, *norm; /* of the group's first row and of the stream */
    uint32_t C, hidden;
    bool act_bf16;
    const float *r;    /* shared [m] */
    const float *save; /* shared [m][hidden] or NULL */
    __device__ __forceinline__ void raw8(uint32_t m, uint32_t k, float (&v)[8]) const
    {
        const float *p = x + (uint64_t)m * C * hidden + k;
        const float f = inj ? __ldcg(inj + m * C) : 1.0f;
        if (k + 8 <= hidden && (hidden & 3) == 0) {
            const float4 a = __ldcg((const float4 *)p), b = __ldcg((const float4 *)p + 1);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
            if (y) {
                const float4 *yp = (const float4 *)(y + (uint64_t)m * hidden + k);
                const float4 c = __ldcg(yp), d = __ldcg(yp + 1);
                v[0] = hc_new(v[0], c.x, f), v[1] = hc_new(v[1], c.y, f);
                v[2] = hc_new(v[2], c.z, f), v[3] = hc_new(v[3], c.w, f);
                v[4] = hc_new(v[4], d.x, f), v[5] = hc_new(v[5], d.y, f);
                v[6] = hc_new(v[6], d.z, f), v[7] = hc_new(v[7], d.w, f);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] = 0.0f;
                if (k + i < hidden) {
                    v[i] = __ldcg(p + i);
                    if (y) {
                        v[i] = hc_new(v[i], __ldcg(y + (uint64_t)m * hidden + k + i), f);
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void load8(uint32_t m, uint32_t k, float (&v)[8]) const
    {
        if (save && k + 8 <= hidden && (hidden & 3) == 0) {
            const float4 *p = (const float4 *)(save + m * hidden + k);
            const float4 a = p[0], b = p[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            raw8(m, k, v);
        }
        const float s = r[m];
        if (k + 8 <= hidden && (hidden & 3) == 0) {
            const float4 a = __ldg((const float4 *)(norm + k)), b = __ldg((const float4 *)(norm + k) + 1);
            v[0] = (v[0] * s) * (1.0f + a.x), v[1] = (v[1] * s) * (1.0f + a.y);
            v[2] = (v[2] * s) * (1.0f + a.z), v[3] = (v[3] * s) * (1.0f + a.w);
            v[4] = (v[4] * s) * (1.0f + b.x), v[5] = (v[5] * s) * (1.0f + b.y);
            v[6] = (v[6] * s) * (1.0f + b.z), v[7] = (v[7] * s) * (1.0f + b.w);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] = k + i < hidden ? (v[i] * s) * (1.0f + __ldg(norm + k + i)) : 0.0f;
            }
        }
        if (act_bf16) {
            round8(v);
        }
    }
};

/* 1 / rms of every row's stream, in an order of sums that does not depend on the number of rows. */
__device__ void hc_rms(const src_hc &s, uint32_t m_rows, float eps, float *units, float *save, float *r,
                       uint32_t tid, uint32_t nt)
{
    const uint32_t n = (s.hidden + 7) / 8;
    for (uint32_t i = tid; i < m_rows * n; i += nt) {
        const uint32_t m = i / n, k = (i - m * n) * 8;
        float v[8], q = 0.0f;
        s.raw8(m, k, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            q = fmaf(v[e], v[e], q);
        }
        units[i] = q;
        if (save && k + 8 <= s.hidden) {
            float4 *d = (float4 *)(save + m * s.hidden + k);
            d[0] = make_float4(v[0], v[1], v[2], v[3]);
            d[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    __syncthreads();
    for (uint32_t m = tid / 32; m < m_rows; m += nt / 32) {
        float q = 0.0f;
        for (uint32_t u = tid & 31; u < n; u += 32) {
            q += units[m * n + u];
        }
        q = warp_sum(q);
        if ((tid & 31) == 0) {
            r[m] = 1.0f / sqrtf(q / (float)s.hidden + eps);
        }
    }
    __syncthreads();
}

template <int NB> __global__ void __launch_bounds__(256, 2) hc_down(const __grid_constant__ hc_args a)
{
    extern __shared__ uint4 sm[];
    __shared__ float red[8 * 16 * NB * 8];
    __shared__ float r[8];
    pdl_next();
    const uint32_t tiles = a.tiles_down + (a.has_inject ? 1 : 0);
    const uint32_t b = blockIdx.x / a.n_groups, grp = blockIdx.x - b * a.n_groups;
    const uint32_t c = b / tiles, tile = b - c * tiles;
    const bool inj = tile == a.tiles_down;
    const tile_w &w = inj ? a.inject[c] : a.down[c];
    const uint32_t m0 = grp * 8, m_rows = a.n_rows - m0 < 8 ? a.n_rows - m0 : 8;
    src_hc src;
    src.x = a.x + ((uint64_t)m0 * a.C + c) * a.hidden;
    src.y = a.y ? a.y + (uint64_t)m0 * a.hidden : nullptr;
    src.inj = a.inj_in ? a.inj_in + m0 * a.C + c : nullptr;
    src.norm = a.norm + c * a.hidden;
    src.C = a.C;
    src.hidden = a.hidden;
    src.act_bf16 = a.act_bf16;
    src.r = r;
    float *units = (float *)((uint8_t *)sm + a.save_off);
    float *save = a.save ? units + 8 * ((a.hidden + 7) / 8) : nullptr;
    src.save = save;
    const tile_split sp = tile_divide(w.tf, w.k, 8);
    const uint32_t warp = threadIdx.x / 32;
    /* one tile a block: warps beyond the parts only stage */
    const uint32_t row = warp < sp.parts ? (inj ? 0 : tile * 16) : w.w.rows;
    auto ready = [&]() { hc_rms(src, m_rows, a.eps, units, save, r, threadIdx.x, 256); };
    QX_TILE_SWITCH(F, w.tf,
                   tile_run<F, NB>(red + warp * (16 * NB * 8), w, sp, row, warp % sp.parts, src, m_rows, sm,
                                   threadIdx.x, 256, ready))
    __syncthreads();
    const float f = tile_factor(w);
    for (uint32_t i = threadIdx.x; i < 16 * m_rows; i += 256) {
        const uint32_t m = i / 16, rr = i & 15, out = (inj ? 0 : tile * 16) + rr;
        if (out < w.w.rows) {
            a.part[((uint64_t)(m0 + m) * a.C + c) * a.pr + (inj ? a.rank : 0) + out] =
                f * tile_result<NB>(red, sp.parts, rr, m);
        }
    }
    if (tile == 0 && threadIdx.x < m_rows) {
        a.rs[(m0 + threadIdx.x) * a.C + c] = r[threadIdx.x];
    }
}

/* silu(down n / C), streams added in order. */
struct src_lo {
    const float *part; /* of the group's first row */
    uint32_t C, pr, rank;
    __device__ __forceinline__ float sum(uint32_t m, uint32_t k) const
    {
        float s = 0.0f;
        for (uint32_t c = 0; c < C; ++c) {
            s += __ldcg(part + ((uint64_t)m * C + c) * pr + k);
        }
        return s;
    }
    const float *lo; /* shared [m][rank], made by all threads before staging */
    bool act_bf16;
    __device__ __forceinline__ float value(uint32_t m, uint32_t k) const
    {
        float p[HC_MAX_STREAMS], s = 0.0f;
#pragma unroll
        for (uint32_t c = 0; c < HC_MAX_STREAMS; ++c) {
            p[c] = c < C ? __ldcg(part + ((uint64_t)m * C + c) * pr + k) : 0.0f;
        }
#pragma unroll
        for (uint32_t c = 0; c < HC_MAX_STREAMS; ++c) {
            s += p[c];
        }
        return silu_f(s / (float)C);
    }
    __device__ __forceinline__ void load8(uint32_t m, uint32_t k, float (&v)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = k + i < rank ? lo[m * rank + k + i] : 0.0f;
        }
        if (act_bf16) {
            round8(v);
        }
    }
};

template <int NB> __global__ void __launch_bounds__(256, 2) hc_up(const __grid_constant__ hc_args a)
{
    extern __shared__ uint4 sm[];
    __shared__ float red[8 * 16 * NB * 8];
    __shared__ float nv[8 * HC_MAX_STREAMS * 16];
    pdl_next();
    const uint32_t b = blockIdx.x / a.n_groups, grp = blockIdx.x - b * a.n_groups;
    const uint32_t d0 = b * 16, m0 = grp * 8, m_rows = a.n_rows - m0 < 8 ? a.n_rows - m0 : 8;
    const tile_w &w = a.up;
    const tile_split sp = tile_divide(w.tf, w.k, a.C <= 4 ? 2 : 1);
    const uint32_t warp = threadIdx.x / 32, nt = blockDim.x;
    float *lo = (float *)((uint8_t *)sm + a.lo_off);
    const src_lo src = {a.part + (uint64_t)m0 * a.C * a.pr, a.C, a.pr, a.rank, lo, a.act_bf16};
    const uint32_t c = warp / sp.parts;
    auto ready = [&]() {
        for (uint32_t i = threadIdx.x; i < m_rows * a.rank; i += nt) {
            const uint32_t m = i / a.rank;
            lo[i] = src.value(m, i - m * a.rank);
        }
        for (uint32_t i = threadIdx.x; i < m_rows * a.C * 16; i += nt) {
            const uint32_t m = i / (a.C * 16), s = i / 16 % a.C, d = d0 + (i & 15);
            float n = 0.0f;
            if (d < a.hidden) {
                const uint32_t rc = (m0 + m) * a.C + s;
                float *xp = a.x + (uint64_t)rc * a.hidden + d;
                float v = __ldcg(xp);
                if (a.y) {
                    v = hc_new(v, __ldcg(a.y + (uint64_t)(m0 + m) * a.hidden + d),
                               a.inj_in ? __ldcg(a.inj_in + rc) : 1.0f);
                    *xp = v;
                }
                n = (v * __ldcg(a.rs + rc)) * (1.0f + __ldg(a.norm + s * a.hidden + d));
            }
            nv[i] = n;
        }
        if (b == 0 && a.has_inject) {
            for (uint32_t i = threadIdx.x; i < m_rows * a.C; i += nt) {
                const uint32_t m = i / a.C, s = i - m * a.C;
                a.inj_out[(m0 + m) * a.C + s] = 2.0f * sigmoid_f(src.sum(m, a.rank + s) / (float)a.C);
            }
        }
        __syncthreads();
    };
    QX_TILE_SWITCH(F, w.tf,
                   tile_run<F, NB>(red + warp * (16 * NB * 8), w, sp, c * a.hidden + d0, warp % sp.parts,
                                   src, m_rows, sm, threadIdx.x, nt, ready))
    __syncthreads();
    const float f = tile_factor(w);
    for (uint32_t i = threadIdx.x; i < m_rows * 16; i += nt) {
        const uint32_t m = i / 16, rr = i & 15;
        if (d0 + rr < a.hidden) {
            float s = 0.0f;
            for (uint32_t k = 0; k < a.C; ++k) {
                const float u =
                    f * tile_result<NB>(red + k * sp.parts * (16 * NB * 8), sp.parts, rr, m);
                s = fmaf(sigmoid_f(u), nv[(m * a.C + k) * 16 + rr], s);
            }
            a.m[(uint64_t)(m0 + m) * a.hidden + d0 + rr] = s / (float)a.C;
        }
    }
}

/* Only the write-back. */
__global__ void hc_write(float *x, const float *y, const float *inj, uint32_t C, uint32_t hidden,
                         uint64_t n)
{
    pdl_next();
    pdl_wait();
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (uint64_t)gridDim.x * blockDim.x) {
        const uint64_t rc = i / hidden;
        x[i] = hc_new(__ldcg(x + i), __ldcg(y + rc / C * hidden + i % hidden), inj ? __ldcg(inj + rc) : 1.0f);
    }
}

extern "C" int qx_cuda_hc(struct qx_queue *q, const struct qx_op_hc *o)
{
    if (o->n_rows == 0) {
        return 0;
    }
    const int taken = qx_prompt_hc(q, o);
    if (taken <= 0) {
        return taken;
    }
    if (o->n_streams > HC_MAX_STREAMS) {
        return qx_queue_refuse(q, "hc", "more than 8 streams");
    }
    if (!o->m) {
        if (!o->y) {
            return 0;
        }
        const uint64_t n = (uint64_t)o->n_rows * o->n_streams * o->hidden;
        const uint64_t blocks = (n + 255) / 256;
        return launch(q, "hc", hc_write, dim3((unsigned)(blocks < 4096 ? blocks : 4096)), dim3(256), 0, o->x,
                      o->y, o->inj_in, o->n_streams, o->hidden, n);
    }
    if (o->act_bf16) {
        bool done;
        const int r = hc_streamed(q, o, &done);
        if (done || r) {
            return r;
        }
    }
    hc_args a = {};
    a.act_bf16 = o->act_bf16;
    a.n_rows = o->n_rows;
    a.C = o->n_streams;
    a.hidden = o->hidden;
    a.rank = o->rank;
    a.x = o->x;
    a.y = o->y;
    a.inj_in = o->inj_in;
    a.norm = o->norm;
    a.eps = o->eps;
    a.m = o->m;
    a.inj_out = o->inj_out;
    a.has_inject = o->inject.fmt != QX_W_NONE && o->inj_out;
    a.n_groups = (o->n_rows + 7) / 8;
    a.tiles_down = (o->rank + 15) / 16;
    a.pr = (o->rank + o->n_streams + 7) / 8 * 8;
    a.part = o->scratch;
    a.rs = o->scratch + (uint64_t)o->n_rows * a.C * a.pr;
    if (a.pr + 1 > o->hidden) {
        return qx_queue_refuse(q, "hc", "rank too large for its scratch memory");
    }
    const uint32_t m = o->n_rows < 8 ? o->n_rows : 8;
    const int nb = tile_nb(m);
    uint32_t smem = 0;
    for (uint32_t c = 0; c < a.C; ++c) {
        a.down[c] = make_tile_w(o->down, c * o->hidden, o->hidden);
        uint32_t x = tile_x_bytes(a.down[c].tf, nb, tile_divide(a.down[c].tf, o->hidden, 8), m);
        smem = x > smem ? x : smem;
        if (a.has_inject) {
            a.inject[c] = make_tile_w(o->inject, c * o->hidden, o->hidden);
            x = tile_x_bytes(a.inject[c].tf, nb, tile_divide(a.inject[c].tf, o->hidden, 8), m);
            smem = x > smem ? x : smem;
        }
    }
    a.save_off = (smem + 15) / 16 * 16;
    a.save = m <= 2 && o->hidden % 8 == 0 && m * o->hidden * 4 <= 24 * 1024;
    smem = a.save_off + 8 * ((o->hidden + 7) / 8) * 4 + (a.save ? m * o->hidden * 4 : 0);
    a.up = make_tile_w(o->up, 0, o->rank);
    const tile_split su = tile_divide(a.up.tf, o->rank, a.C <= 4 ? 2 : 1);
    a.lo_off = (tile_x_bytes(a.up.tf, nb, su, m) + 15) / 16 * 16;
    const uint32_t smem_up = a.lo_off + m * o->rank * 4;
    const dim3 g1(a.C * (a.tiles_down + (a.has_inject ? 1 : 0)) * a.n_groups);
    const dim3 g2((o->hidden + 15) / 16 * a.n_groups), b2(32 * a.C * su.parts);
    int r;
    switch (nb) {
    case 1:
        r = launch(q, "hc", hc_down<1>, g1, dim3(256), smem, a);
        return r ? r : launch(q, "hc", hc_up<1>, g2, b2, smem_up, a);
    case 2:
        r = launch(q, "hc", hc_down<2>, g1, dim3(256), smem, a);
        return r ? r : launch(q, "hc", hc_up<2>, g2, b2, smem_up, a);
    default:
        r = launch(q, "hc", hc_down<3>, g1, dim3(256), smem, a);
        return r ? r : launch(q, "hc", hc_up<3>, g2, b2, smem_up, a);
    }
}
