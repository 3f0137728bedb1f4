/* moe.cu: experts for few rows, inputs kept to f32, and shapes that moe_nv.cu and moe_rows.cu, which take inputs
 * rounded to bf16, leave. One launch multiplies with gate and up of every picked expert and of the shared one and
 * leaves silu(gate) * up, split for the tensor cores, in the workspace; one multiplies with down, weights, and adds up.
 * Rows of a step that picked the same expert share its weights; a row's sums do not depend on that. */
#include "moe.cuh"
#include "prompt.h"

/* ---- experts -------------------------------------------------------------------------------- */

struct moe_args {
    uint32_t n_rows, k, hidden, inter, s_inter;
    uint32_t kpad;           /* inter or s_inter, rounded up to 128 */
    uint32_t row0;           /* first row of this launch */
    const float *m, *weight;
    const int32_t *expert;
    const struct qx_weight *gate, *up, *down;
    tile_w s_gate, s_up, s_down, s_vec;
    uint4 *hs;               /* [row of the launch, k + 1, 3, kpad / 8] units */
    float *sg;               /* [row of the launch] sigmoid of the shared gate */
    bool act_bf16;
    float *y;
};

/* Rows of the group that picked an expert. */
struct moe_cols {
    uint32_t n;
    uint8_t row[8], slot[8];
};

/* Columns of item i (row i / k, slot i % k); n 0 when an earlier row has the same expert. */
__device__ __forceinline__ void moe_find(moe_cols &c, const int32_t *ex, uint32_t m_rows, uint32_t k,
                                         uint32_t item)
{
    const int32_t e = ex[item];
    c.n = 0;
    const uint32_t r0 = item / k;
    for (uint32_t i = 0; i < m_rows * k; ++i) {
        if (ex[i] == e) {
            if (i < r0 * k) {
                c.n = 0;
                return;
            }
            if (c.n == 0 || c.row[c.n - 1] != i / k) {
                c.row[c.n] = (uint8_t)(i / k);
                c.slot[c.n] = (uint8_t)(i % k);
                ++c.n;
            }
        }
    }
}

struct src_moe {
    const float *x;
    uint32_t hidden;
    bool act_bf16;
    const moe_cols *c;
    __device__ __forceinline__ void load8(uint32_t m, uint32_t k, float (&v)[8]) const
    {
        const src_rows s = {x + (uint64_t)c->row[m] * hidden, hidden, hidden, act_bf16};
        s.load8(0, k, v);
    }
};

/* Half-word of element i of a column in the order of format f. */
__device__ __forceinline__ uint32_t elem_pos(uint8_t f, uint32_t i)
{
    const uint32_t kb = tf_kb(f), u = kb / 32, step = i / kb, rem = i % kb, t = rem / (kb / 4),
                   in = rem % (kb / 4), j = in / 8, e = in & 7;
    const uint32_t pe = f == TF_NV ? (e < 4 ? 2 * e : 2 * (e - 4) + 1) : e;
    return (step * 4 * u + j * 4 + t) * 8 + pe;
}

__device__ __forceinline__ tile_w expert_w(const struct qx_weight *w, uint32_t k)
{
    tile_w t;
    t.w = *w;
    t.col0 = 0;
    t.k = k;
    t.tf = tile_format(t.w, 0, k);
    return t;
}

template <int NB> __global__ void __launch_bounds__(256, NB == 1 ? 3 : 2) moe_up(const __grid_constant__ moe_args a)
{
    extern __shared__ uint4 sm[];
    __shared__ float red[8 * 16 * NB * 8];
    __shared__ moe_cols cols;
    __shared__ int32_t ex[8 * MOE_MAX_K];
    const uint32_t grp = blockIdx.y, m0 = grp * 8;
    const uint32_t left = a.n_rows - a.row0 - m0, m_rows = left < 8 ? left : 8;
    const uint32_t tiles = a.kpad / 16, items = m_rows * a.k;
    /* the shared expert has the most bytes a block: it goes first */
    const uint32_t bid = gridDim.x - 1 - blockIdx.x;
    const uint32_t item = bid / tiles, tile = bid - item * tiles;
    const float *x = a.m + (uint64_t)(a.row0 + m0) * a.hidden;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    /* the next op (down) reads what the router picked before it waits: it may start only after this op
     * has seen the router end */
    const uint32_t n_items = (a.n_rows - a.row0 < 8 ? a.n_rows - a.row0 : 8) * a.k;
    if (bid == (n_items + 1) * tiles) {
        /* the shared expert's gate: a dot product a row, the whole block at it */
        pdl_wait();
        pdl_next();
        for (uint32_t m = 0; m < m_rows; ++m) {
            float s = 0.0f;
#pragma unroll 10
            for (uint32_t i = tid; i < a.hidden; i += 256) {
                s = fmaf(weight_at(a.s_vec.w, 0, i), __ldcg(x + (uint64_t)m * a.hidden + i), s);
            }
            s = warp_sum(s);
            if (lane == 0) {
                red[warp] = s;
            }
            __syncthreads();
            if (tid == 0) {
                s = 0.0f;
                for (uint32_t i = 0; i < 8; ++i) {
                    s += red[i];
                }
                a.sg[m0 + m] = sigmoid_f(s);
            }
            __syncthreads();
        }
        return;
    }
    const bool shared = item == n_items;
    tile_w w = shared ? (warp < 4 ? a.s_gate : a.s_up) : a.s_gate;
    uint8_t fmt = TF_GEN, fdown = a.s_down.tf;
    uint32_t rows = a.s_inter;
    int32_t e = 0;
    if (shared) {
        fmt = a.s_gate.tf == a.s_up.tf ? a.s_gate.tf : (uint8_t)TF_GEN;
        if (tid == 0) {
            cols.n = m_rows;
            for (uint32_t m = 0; m < m_rows; ++m) {
                cols.row[m] = (uint8_t)m;
                cols.slot[m] = (uint8_t)a.k;
            }
        }
    } else {
        pdl_wait();
        if (item >= items) {
            pdl_next();
            return;
        }
        e = __ldcg(a.expert + (uint64_t)(a.row0 + m0) * a.k + item);
        if (m_rows == 1) {
            if (tid == 0) {
                cols.n = 1;
                cols.row[0] = 0;
                cols.slot[0] = (uint8_t)item;
            }
        } else {
            for (uint32_t i = tid; i < items; i += 256) {
                ex[i] = __ldcg(a.expert + (uint64_t)(a.row0 + m0) * a.k + i);
            }
            __syncthreads();
            if (tid == 0) {
                moe_find(cols, ex, m_rows, a.k, item);
            }
        }
        w = expert_w((warp < 4 ? a.gate : a.up) + e, a.hidden);
        const tile_w other = expert_w((warp < 4 ? a.up : a.gate) + e, a.hidden);
        fmt = w.tf == other.tf ? w.tf : (uint8_t)TF_GEN;
        fdown = expert_w(a.down + e, a.inter).tf;
        rows = a.inter;
    }
    __syncthreads();
    if (cols.n == 0) {
        pdl_next();
        return;
    }
    w.tf = fmt;
    const tile_split sp = tile_divide(fmt, a.hidden, 4);
    const bool work = warp % 4 < sp.parts;
    const uint32_t row = work ? tile * 16 : w.w.rows;
    const src_moe src = {x, a.hidden, a.act_bf16, &cols};
    auto ready = [&]() { pdl_next(); };
    QX_TILE_SWITCH(F, fmt,
                   tile_run<F, NB>(red + warp * (16 * NB * 8), w, sp, row, (warp % 4) % sp.parts, src, cols.n,
                                   sm, tid, 256, ready))
    __syncthreads();
    /* factors of gate and up; read again, since each warp holds only one of them */
    const tile_w wg = shared ? a.s_gate : expert_w(a.gate + e, a.hidden);
    const tile_w wu = shared ? a.s_up : expert_w(a.up + e, a.hidden);
    tile_w fg = wg, fu = wu;
    fg.tf = fu.tf = fmt;
    const float f0 = tile_factor(fg), f1 = tile_factor(fu);
    const uint32_t hp = a.kpad / 8;
    for (uint32_t i = tid; i < cols.n * 16; i += 256) {
        const uint32_t c = i / 16, rr = i & 15, at = tile * 16 + rr;
        float h = 0.0f;
        if (at < rows) {
            const float g = f0 * tile_result<NB>(red, sp.parts, rr, c);
            const float u = f1 * tile_result<NB>(red + 4 * (16 * NB * 8), sp.parts, rr, c);
            h = silu_f(g) * u;
            h = a.act_bf16 ? bf16_f(to_bf16(h)) : h;
        }
        uint16_t *d = (uint16_t *)(a.hs + ((uint64_t)(m0 + cols.row[c]) * (a.k + 1) + cols.slot[c]) * 3 * hp);
        const uint32_t p = elem_pos(fdown, at);
#pragma unroll
        for (int t = 0; t < 3; ++t) {
            const uint16_t b = to_bf16(h);
            d[t * hp * 8 + p] = b;
            const float v = bf16_f(b);
            h = fabsf(v) == INFINITY ? 0.0f : h - v;
        }
    }
}

template <int F, int NB>
__device__ __forceinline__ void down_run(float *red, const tile_w &w, uint32_t row, const b_global<NB> &b,
                                         const uint4 *const *cols, const uint32_t n, uint32_t lane,
                                         bool wait)
{
    constexpr int PB = tile_pb<F, NB>::V;
    const uint32_t steps = (w.k + tf<F>::KB - 1) / tf<F>::KB;
    if (F == TF_GEN) {
        if (wait) {
            pdl_wait();
        }
        for (uint32_t r = 0; r < 16; ++r) {
            for (uint32_t c = 0; c < n; ++c) {
                const uint16_t *x = (const uint16_t *)cols[c];
                float s = 0.0f;
                for (uint32_t k = lane; k < w.k && row + r < w.w.rows; k += 32) {
                    s = fmaf(weight_at(w.w, row + r, k), bf16_f(__ldcg(x + elem_pos(TF_GEN, k))), s);
                }
                s = warp_sum(s);
                if (lane == 0) {
                    red[r * (NB * 8) + c] = s;
                }
            }
        }
        return;
    }
    tile_regs<F, PB> t;
    const tile_ptr p = tile_rows<F>(w, row, lane);
#pragma unroll
    for (int i = 0; i < PB; ++i) {
        tile_load<F, PB>(t, i, p, w.w.scale_bf16, i, steps, lane);
    }
    if (wait) {
        pdl_wait();
    }
    float acc[NB][4] = {};
    for (uint32_t s = 0; s < steps; s += PB) {
#pragma unroll
        for (int i = 0; i < PB; ++i) {
            if (s + i < steps) {
                tile_mma<F, PB, NB>(acc, t, i, b, s + i, lane);
                tile_load<F, PB>(t, i, p, w.w.scale_bf16, s + i + PB, steps, lane);
            }
        }
    }
    tile_store<NB>(red, acc, lane);
}

template <int NB> __global__ void __launch_bounds__(512) moe_down(const __grid_constant__ moe_args a)
{
    extern __shared__ float dsm[];
    __shared__ int32_t ex[8 * MOE_MAX_K];
    __shared__ float wt[8 * MOE_MAX_K];
    __shared__ uint8_t uniq[8 * MOE_MAX_K];
    __shared__ uint32_t n_uniq;
    pdl_next();
    const uint32_t d0 = blockIdx.x * 16, m0 = blockIdx.y * 8;
    const uint32_t left = a.n_rows - a.row0 - m0, m_rows = left < 8 ? left : 8;
    const uint32_t tid = threadIdx.x, nt = blockDim.x, warp = tid / 32, lane = tid & 31;
    const uint32_t items = m_rows * a.k, k1 = a.k + 1;
    float *red = dsm + warp * (16 * NB * 8);
    float *res = dsm + nt / 32 * (16 * NB * 8); /* [row, slot, 16] */
    for (uint32_t i = tid; i < items; i += nt) {
        ex[i] = __ldcg(a.expert + (uint64_t)(a.row0 + m0) * a.k + i);
        wt[i] = __ldcg(a.weight + (uint64_t)(a.row0 + m0) * a.k + i);
    }
    if (tid == 0) {
        n_uniq = 0;
    }
    __syncthreads();
    if (m_rows == 1) {
        if (tid < items) {
            uniq[tid] = (uint8_t)tid;
        }
        if (tid == 0) {
            n_uniq = items;
        }
    } else if (warp == 0) {
        uint32_t n = 0;
        for (uint32_t i0 = 0; i0 < items; i0 += 32) {
            const uint32_t i = i0 + lane;
            bool first = i < items;
            for (uint32_t j = 0; first && j < i / a.k * a.k; ++j) {
                first = ex[j] != ex[i];
            }
            const uint32_t b = __ballot_sync(0xffffffffu, first);
            if (first) {
                uniq[n + __popc(b & ((1u << lane) - 1))] = (uint8_t)i;
            }
            n += __popc(b);
        }
        if (lane == 0) {
            n_uniq = n;
        }
    }
    __syncthreads();
    bool wait = true;
    const uint32_t hp = a.kpad / 8;
    for (uint32_t it = warp; it < n_uniq + 1; it += nt / 32) {
        moe_cols c;
        tile_w w;
        if (it == 0) { /* the shared expert first: it has the most bytes */
            w = a.s_down;
            c.n = m_rows;
            for (uint32_t m = 0; m < m_rows; ++m) {
                c.row[m] = (uint8_t)m;
                c.slot[m] = (uint8_t)a.k;
            }
        } else {
            const uint32_t i = uniq[it - 1];
            if (m_rows == 1) {
                c.n = 1;
                c.row[0] = 0;
                c.slot[0] = (uint8_t)i;
            } else {
                moe_find(c, ex, m_rows, a.k, i);
            }
            w = expert_w(a.down + ex[i], a.inter);
        }
        b_global<NB> b;
        const uint32_t g = lane >> 2;
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            const uint32_t col = n * 8 + g, m = col / 3;
            b.p[n] = m < c.n ? a.hs + (((uint64_t)(m0 + c.row[m < 8 ? m : 0]) * k1 + c.slot[m < 8 ? m : 0]) * 3 +
                                       (col - 3 * m)) * hp
                             : nullptr;
        }
        QX_TILE_SWITCH(F, w.tf, {
            if (F == TF_GEN) {
                const uint4 *cols[8 * 3];
                for (uint32_t m = 0; m < c.n; ++m) {
                    for (uint32_t t = 0; t < 3; ++t) {
                        cols[3 * m + t] =
                            a.hs + (((uint64_t)(m0 + c.row[m]) * k1 + c.slot[m]) * 3 + t) * hp;
                    }
                }
                down_run<F, NB>(red, w, d0, b, cols, 3 * c.n, lane, wait);
            } else {
                down_run<F, NB>(red, w, d0, b, nullptr, 3 * c.n, lane, wait);
            }
        })
        wait = false;
        __syncwarp();
        const float f = tile_factor(w);
        for (uint32_t i = lane; i < c.n * 16; i += 32) {
            const uint32_t m = i / 16, r = i & 15;
            const float *v = red + r * (NB * 8) + 3 * m;
            res[(c.row[m] * k1 + c.slot[m]) * 16 + r] = f * ((v[0] + v[1]) + v[2]);
        }
        __syncwarp();
    }
    pdl_wait();
    __syncthreads();
    for (uint32_t i = tid; i < m_rows * 16; i += nt) {
        const uint32_t m = i / 16, r = i & 15;
        if (d0 + r < a.hidden) {
            float s = 0.0f;
            for (uint32_t k = 0; k < a.k; ++k) {
                s = fmaf(wt[m * a.k + k], res[(m * k1 + k) * 16 + r], s);
            }
            s = fmaf(__ldcg(a.sg + m0 + m), res[(m * k1 + a.k) * 16 + r], s);
            a.y[(uint64_t)(a.row0 + m0 + m) * a.hidden + d0 + r] = s;
        }
    }
}

template <int NB> static int moe_launch(struct qx_queue *q, const moe_args &a, uint32_t rows)
{
    const uint32_t m = rows < 8 ? rows : 8, groups = (rows + 7) / 8;
    /* the activations of any format must fit: the formats of experts are known on the device only */
    uint32_t smem = 0;
    for (uint8_t f = TF_GEN; f <= TF_NV; ++f) {
        const uint32_t x = tile_x_bytes(f, NB, tile_divide(f, a.hidden, 4), m);
        smem = x > smem ? x : smem;
    }
    const dim3 g1((m * a.k + 1) * (a.kpad / 16) + 1, groups);
    int r = launch(q, "moe", moe_up<NB>, g1, dim3(256), smem, a);
    if (r) {
        return r;
    }
    const uint32_t warps = a.k + 1;
    const uint32_t sd = (warps * 16 * NB * 8 + m * (a.k + 1) * 16) * 4;
    return launch(q, "moe", moe_down<NB>, dim3((a.hidden + 15) / 16, groups), dim3(32 * warps), sd, a);
}

extern "C" int qx_cuda_moe(struct qx_queue *q, const struct qx_op_moe *o)
{
    if (o->n_rows == 0) {
        return 0;
    }
    const int taken = qx_prompt_moe(q, o);
    if (taken <= 0) {
        return taken;
    }
    if (o->k > MOE_MAX_K) {
        return qx_queue_refuse(q, "moe", "more than 15 experts a token");
    }
    const int nv = qx_moe_nv(q, o);
    if (nv <= 0) {
        return nv;
    }
    const int rows = qx_moe_rows(q, o);
    if (rows <= 0) {
        return rows;
    }
    moe_args a = {};
    a.n_rows = o->n_rows;
    a.k = o->k;
    a.act_bf16 = o->act_bf16;
    a.hidden = o->experts.hidden;
    a.inter = o->experts.inter;
    a.s_inter = o->s_inter;
    const uint32_t widest = a.inter > a.s_inter ? a.inter : a.s_inter;
    a.kpad = (widest + 127) / 128 * 128;
    a.m = o->m;
    a.weight = o->weight;
    a.expert = o->expert;
    a.gate = o->experts.gate;
    a.up = o->experts.up;
    a.down = o->experts.down;
    a.s_gate = make_tile_w(o->s_gate, 0, a.hidden);
    a.s_up = make_tile_w(o->s_up, 0, a.hidden);
    a.s_down = make_tile_w(o->s_down, 0, a.s_inter);
    a.s_vec = make_tile_w(o->s_gate_vec, 0, a.hidden);
    a.y = o->y;
    const uint64_t row_units = (uint64_t)(a.k + 1) * 3 * (a.kpad / 8);
    a.hs = (uint4 *)q->ws;
    /* as many rows a launch as the workspace holds */
    uint64_t slab = (QX_WS_BYTES - 65536 * 4) / (row_units * 16) / 8 * 8;
    slab = slab > 65528 ? 65528 : slab;
    a.sg = (float *)(q->ws + QX_WS_BYTES - 65536 * 4);
    for (a.row0 = 0; a.row0 < o->n_rows; a.row0 += (uint32_t)slab) {
        const uint64_t left = o->n_rows - a.row0;
        const uint32_t rows = (uint32_t)(left < slab ? left : slab);
        moe_args b = a;
        b.n_rows = a.row0 + rows;
        int r;
        switch (tile_nb(rows < 8 ? rows : 8)) {
        case 1: r = moe_launch<1>(q, b, rows); break;
        case 2: r = moe_launch<2>(q, b, rows); break;
        default: r = moe_launch<3>(q, b, rows); break;
        }
        if (r) {
            return r;
        }
    }
    return 0;
}
