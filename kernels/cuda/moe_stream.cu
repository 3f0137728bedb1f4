/* moe_stream.cu: experts for rows of decoding, NVFP4 experts beside a shared one of MXFP8.
 *
 * Two launches whose weights flow through rings of shared memory in pieces of whole rows.
 *
 * moe_stream_up: a block a multiprocessor, items go to the blocks in turn. An item is some rows of gate and the
 * same of up, so that silu(gate) * up is made where the sums end. One warp copies, ten multiply, one adds up. A
 * multiplying warp has runs of 128 columns of its own (number warp, warp + 10), whose activations stay in its
 * registers; all ten take part in every item. The shared expert's items come first: they wait for nothing.
 *
 * moe_stream_down: a block has some output rows. A warp takes every eighth of the picked experts; the shared
 * expert's columns are divided among the warps. At the end the experts are weighted and added in slot order, the
 * shared one last.
 *
 * Columns of a product are rows of the step. How a matrix is divided and the order of all sums depend on the
 * matrix alone, so a row's bits do not depend on the others.
 *
 * What may be read before the wait: moe_stream_up reads m at once with `early` set: then the launch before it is
 * the router, which lets others start only after it has seen m. moe_stream_down starts beside it and reads what
 * the router picked when the flag says that the router has ended. Blocks of both fit into a multiprocessor. */
#include "moe_stream.cuh"

/* ---- gate and up ---- */

template <int F>
__device__ __forceinline__ void ms_load_x(uint32_t (&x)[MS_RUNS][16], const ms_args &a, uint32_t warp, uint32_t lane)
{
    const uint32_t g = lane >> 2, t = lane & 3;
#pragma unroll
    for (uint32_t i = 0; i < MS_RUNS; ++i) {
        const uint32_t run = warp + i * MS_CONS;
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f), v = u;
            if (g < a.m_rows && run * MS_RUN < a.hidden) {
                const float4 *p = (const float4 *)(a.m + (uint64_t)g * a.hidden + run * MS_RUN + ms_unit_k<F>(j, t));
                u = __ldcg(p);
                v = __ldcg(p + 1);
            }
            const uint4 q = stream_x_pack(u, v, F == TF_NV);
            x[i][4 * j] = q.x, x[i][4 * j + 1] = q.y, x[i][4 * j + 2] = q.z, x[i][4 * j + 3] = q.w;
        }
    }
}

/* A warp's part of one item. */
template <int F>
__device__ __forceinline__ float4 ms_item(const uint8_t *slot, const uint32_t (&x)[MS_RUNS][16], uint32_t hidden,
                                          uint32_t warp, uint32_t lane)
{
    const uint32_t rows = ms_item_rows(F), rb = ms_row_bytes(F, hidden), sb = ms_scale_bytes(F, hidden);
    const uint32_t g = (lane >> 2) & (rows - 1), t = lane & 3;
    const uint32_t run_bytes = ms_row_bytes(F, MS_RUN), run_scale = ms_scale_bytes(F, MS_RUN);
    const uint8_t *c = slot + g * rb + warp * run_bytes, *s = slot + 2 * rows * rb + g * sb + warp * run_scale;
    float acc[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < MS_RUNS; ++i) {
        if ((warp + i * MS_CONS) * MS_RUN < hidden) {
            const uint8_t *d = c + i * MS_CONS * run_bytes, *e = s + i * MS_CONS * run_scale;
            ms_run_up<F>(acc, d, d + rows * rb, e, e + rows * sb, x[i], t);
        }
    }
    return make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
}

/* The warps' parts of a slot: of each the lanes that have rows of the step. */
__device__ __forceinline__ uint32_t ms_part_lanes(uint32_t m_rows)
{
    return (m_rows + 1) / 2;
}
__device__ __forceinline__ float4 ms_sum_parts(const float4 *p, uint32_t step)
{
    float4 s = *p;
#pragma unroll
    for (uint32_t w = 1; w < MS_CONS; ++w) {
        const float4 v = p[w * step];
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    return s;
}

struct ms_ring {
    uint8_t *base;
    float4 *part; /* [slot][warp][row][pair of columns] */
    uint64_t *full, *done, *empty;
    uint32_t slot, n;
};

/* Two pieces of codes and, with sb, two of scales, by the lanes of one warp. */
__device__ __forceinline__ void ms_put(const ms_ring &r, ms_at &at, const uint8_t *src, uint32_t cb, uint32_t sb,
                                       uint64_t policy, uint32_t lane)
{
    bar_wait(r.empty + at.slot, at.phase ^ 1);
    if (lane == 0) {
        bar_expect(r.full + at.slot, 2 * (cb + sb));
    }
    __syncwarp();
    if (lane < (sb ? 4u : 2u)) {
        bulk_load(r.base + at.slot * r.slot + (lane < 2 ? lane * cb : 2 * cb + (lane - 2) * sb), src,
                  lane < 2 ? cb : sb, r.full + at.slot, policy);
    }
    at.next(r.n);
}

__device__ __forceinline__ void ms_store_h(uint8_t *h, uint32_t h_col, uint32_t col, uint32_t at, float gate, float up)
{
    *(uint16_t *)(h + (uint64_t)col * h_col + at) = to_bf16(silu_f(gate) * up);
}

/* sigmoid of the shared expert's gate in f32 for one row, by a warp. */
__device__ __forceinline__ void ms_shared_gate(const ms_args &a, uint32_t m, uint32_t lane)
{
    const float4 *v = (const float4 *)(a.m + (uint64_t)m * a.hidden);
    const uint2 *w = (const uint2 *)a.s_vec;
    float s = 0.0f;
#pragma unroll 5
    for (uint32_t i = lane; i < a.hidden / 4; i += 32) {
        const float4 x = __ldcg(v + i);
        const uint2 c = __ldg(w + i);
        s = fmaf(bf16_lo(c.x), x.x, s);
        s = fmaf(bf16_hi(c.x), x.y, s);
        s = fmaf(bf16_lo(c.y), x.z, s);
        s = fmaf(bf16_hi(c.y), x.w, s);
    }
    s = warp_sum(s);
    if (lane == 0) {
        a.sg[m] = sigmoid_f(s);
    }
}

/* A warp's part of the ring's next item, handed to the warp that adds up. */
template <int F>
__device__ __forceinline__ void ms_multiply(const ms_ring &ring, ms_at &at, const ms_args &a,
                                            const uint32_t (&x)[MS_RUNS][16], uint32_t warp, uint32_t lane)
{
    const uint32_t lanes = ms_part_lanes(a.m_rows), g = lane >> 2, t = lane & 3;
    bar_wait(ring.full + at.slot, at.phase);
    const float4 p = ms_item<F>(ring.base + at.slot * a.slot, x, a.hidden, warp, lane);
    if (t < lanes) {
        ring.part[((at.slot * MS_CONS + warp) * 8 + g) * lanes + t] = p;
    }
    __syncwarp();
    if (lane == 0) {
        bar_arrive(ring.done + at.slot);
    }
    at.next(a.n_slots);
}

#define MS_MAX_SLOTS 16u

__global__ void __maxnreg__(96) moe_stream_up(const __grid_constant__ ms_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ uint64_t full[MS_MAX_SLOTS], done[MS_MAX_SLOTS], empty[MS_MAX_SLOTS], known;
    __shared__ uint32_t tab[MS_MAX_EXPERTS];
    __shared__ uint32_t n_uniq_s;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, b = blockIdx.x, grid = gridDim.x;
    const uint32_t lanes = ms_part_lanes(a.m_rows), step = 8 * lanes, g = lane >> 2, t = lane & 3;
    ms_ring ring = {(uint8_t *)sm4, (float4 *)((uint8_t *)sm4 + a.n_slots * a.slot), full, done, empty, a.slot,
                    a.n_slots};
    ms_pair *mat = (ms_pair *)(ring.part + a.n_slots * MS_CONS * step);
    ms_pick *pick = (ms_pick *)(mat + a.m_rows * a.k);
    int32_t *uniq = (int32_t *)(pick + 128);
    if (tid < a.n_slots) {
        bar_init(full + tid, 1);
        bar_init(done + tid, MS_CONS);
        bar_init(empty + tid, 1);
    }
    if (tid == 0) {
        bar_init(&known, 1);
        if (!a.early) {
            pdl_wait();
        }
        if (b == 0) {
            ms_set(a.flag, 0); /* before any block of moe_stream_down starts */
            __threadfence();   /* a launch lets nobody see what was stored before it */
        }
        pdl_next();
    }
    bar_init_done();
    fence_async();
    __syncthreads();
    const uint32_t n_s = b < a.items_s ? (a.items_s - b - 1) / grid + 1 : 0;
    const uint32_t j0 = (b + grid - a.items_s % grid) % grid; /* the shared expert's items came before */
    constexpr uint32_t ROWS_S = 4;
    ms_at at = {0, 0};
    if (warp < MS_CONS) {
        if (!a.early) {
            pdl_wait();
        }
        uint32_t x[MS_RUNS][16];
        ms_load_x<TF_MX>(x, a, warp, lane);
#pragma unroll 1
        for (uint32_t i = 0; i < n_s; ++i) {
            ms_multiply<TF_MX>(ring, at, a, x, warp, lane);
        }
        /* a load that is asked for behind the picked experts' weights would come after them */
        ms_load_x<TF_NV>(x, a, warp, lane);
        uint32_t n_uniq = a.k;
        if (a.m_rows > 1) {
            bar_wait(&known, 0);
            n_uniq = n_uniq_s;
        }
        const uint32_t total = n_uniq * a.tiles_r.d;
#pragma unroll 1
        for (uint32_t j = j0; j < total; j += grid) {
            ms_multiply<TF_NV>(ring, at, a, x, warp, lane);
        }
    } else if (warp == MS_CONS) {
        const uint64_t policy = l2_read_once();
        const uint32_t z = lane & 1;
        {
            const uint32_t rb = ms_row_bytes(TF_MX, a.hidden), sb = ms_scale_bytes(TF_MX, a.hidden);
            const ms_shared_w &w = z ? a.s_up : a.s_gate;
#pragma unroll 1
            for (uint32_t i = 0; i < n_s; ++i) {
                const uint64_t row = (uint64_t)(b + i * grid) * ROWS_S;
                ms_put(ring, at, lane < 2 ? w.codes + row * rb : w.scale + row * sb, ROWS_S * rb, ROWS_S * sb, policy,
                       lane);
            }
        }
        pdl_wait();
        if (b == 0 && lane == 0) {
            ms_set(a.flag, 1);
        }
        const uint32_t n_uniq = ms_picks(a, tab, pick, uniq, lane);
        for (uint32_t i = lane; i < n_uniq; i += 32) {
            const struct qx_weight *w0 = a.gate + uniq[i], *w1 = a.up + uniq[i];
            ms_pair p;
            p.codes[0] = (const uint8_t *)w0->codes;
            p.codes[1] = (const uint8_t *)w1->codes;
            p.scale[0] = (const uint8_t *)w0->scale;
            p.scale[1] = (const uint8_t *)w1->scale;
            p.factor[0] = w0->global * 0x1p26f;
            p.factor[1] = w1->global * 0x1p26f;
            mat[i] = p;
        }
        __syncwarp();
        if (lane == 0) {
            n_uniq_s = n_uniq;
            bar_arrive(&known);
        }
        const uint32_t rb = a.hidden / 2, sb = a.hidden / 16, total = n_uniq * a.tiles_r.d;
#pragma unroll 1
        for (uint32_t j = j0; j < total; j += grid) {
            const uint32_t u = a.tiles_r.div(j);
            const uint64_t row = (uint64_t)(j - u * a.tiles_r.d) * 8;
            ms_put(ring, at, lane < 2 ? mat[u].codes[z] + row * rb : mat[u].scale[z] + row * sb, 8 * rb, 8 * sb, policy,
                   lane);
        }
    } else {
        const uint32_t lines = moe_lines(a);
        for (uint32_t i = b * 4 + lane; lane < 4 && i < lines; i += grid * 4) {
            moe_fetch_line(a, i);
        }
        if (!a.early) {
            pdl_wait();
        }
        for (uint32_t m = grid - 1 - b; m < a.m_rows; m += grid) {
            ms_shared_gate(a, m, lane);
        }
        uint32_t total = n_s, i = 0, j = j0;
        bool shared = true;
        /* items of the shared expert, then the picked ones' */
#pragma unroll 1
        for (;;) {
            if (shared && i == total) {
                shared = false;
                bar_wait(&known, 0);
                total = n_uniq_s * a.tiles_r.d;
            }
            if (!shared && j >= total) {
                break;
            }
            const uint32_t u = shared ? 0 : a.tiles_r.div(j), c = 2 * t;
            float f0 = a.s_gate.factor, f1 = a.s_up.factor;
            uint32_t p0 = c < a.m_rows ? a.k : 0xff, p1 = c + 1 < a.m_rows ? a.k : 0xff, h;
            if (shared) {
                h = ms_elem<TF_MX>((b + i * grid) * ROWS_S + g);
                if (g >= ROWS_S) {
                    p0 = p1 = 0xff;
                }
            } else {
                const uint32_t p = *(const uint16_t *)&pick[u].slot[c];
                p0 = p & 0xff;
                p1 = p >> 8;
                f0 = mat[u].factor[0];
                f1 = mat[u].factor[1];
                h = ms_elem<TF_NV>((j - u * a.tiles_r.d) * 8 + g);
            }
            bar_wait(done + at.slot, at.phase);
            float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (t < lanes) {
                s = ms_sum_parts(ring.part + at.slot * MS_CONS * step + g * lanes + t, step);
            }
            __syncwarp();
            if (lane == 0) {
                bar_arrive(empty + at.slot);
            }
            at.next(a.n_slots);
            if (p0 != 0xff) {
                ms_store_h(a.hs, a.h_col, c * (a.k + 1) + p0, h, f0 * s.x, f1 * s.z);
            }
            if (p1 != 0xff) {
                ms_store_h(a.hs, a.h_col, (c + 1) * (a.k + 1) + p1, h, f0 * s.y, f1 * s.w);
            }
            if (shared) {
                ++i;
            } else {
                j += grid;
            }
        }
        pdl_wait();
    }
}

/* ---- down ---- */

struct ms_mat {
    const uint8_t *codes, *scale;
    float factor;
};

/* Units J0 .. J1 of a run of a column; zeros where there is none. */
template <int J0, int J1> __device__ __forceinline__ void ms_load_h(uint32_t (&x)[16], const uint8_t *col, uint32_t run,
                                                                    uint32_t t)
{
#pragma unroll
    for (int j = J0; j < J1; ++j) {
        const uint4 v = col ? __ldcg((const uint4 *)(col + run * 256 + j * 64 + t * 16)) : make_uint4(0, 0, 0, 0);
        x[4 * j] = v.x, x[4 * j + 1] = v.y, x[4 * j + 2] = v.z, x[4 * j + 3] = v.w;
    }
}

/* Columns of the picked experts in shared memory lie so far apart that two do not meet in a bank. */
__host__ __device__ inline uint32_t ms_h_pitch(uint32_t inter)
{
    return inter * 2 + 64;
}
#define MS_MAX_H (2u * 3u) /* loads of 16 bytes a lane for two columns */
#define MS_MAX_DSLOTS 32u

/* Up to two columns of an expert: rows of the step in `rows`, lowest first. */
__device__ __forceinline__ void ms_ask_h(uint4 (&q)[MS_MAX_H], const ms_args &a, const ms_pick &p, uint32_t rows,
                                         uint32_t lane)
{
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
        if (rows && c < a.d_cols) {
            const uint32_t m = __ffs(rows) - 1;
            const uint4 *h = (const uint4 *)(a.hs + (uint64_t)(m * (a.k + 1) + p.slot[m]) * a.h_col);
#pragma unroll
            for (uint32_t i = 0; i < 3; ++i) {
                if (lane + 32 * i < a.inter / 8) {
                    q[3 * c + i] = __ldcg(h + lane + 32 * i);
                }
            }
        }
        rows &= rows - 1;
    }
}
__device__ __forceinline__ void ms_put_h(uint8_t *hb, const uint4 (&q)[MS_MAX_H], const ms_args &a, uint32_t lane)
{
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
        if (c < a.d_cols) {
#pragma unroll
            for (uint32_t i = 0; i < 3; ++i) {
                if (lane + 32 * i < a.inter / 8) {
                    ((uint4 *)(hb + c * ms_h_pitch(a.inter)))[lane + 32 * i] = q[3 * c + i];
                }
            }
        }
    }
}
/* The rows that picked an expert. */
__device__ __forceinline__ uint32_t ms_rows(const ms_pick &p, uint32_t lane)
{
    return __ballot_sync(0xffffffffu, p.slot[lane & 7] != 0xff) & 0xff;
}

__global__ void __maxnreg__(104) moe_stream_down(const __grid_constant__ ms_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ uint64_t full[MS_MAX_DSLOTS], s_full, known;
    __shared__ uint32_t tab[MS_MAX_EXPERTS];
    __shared__ uint32_t n_uniq_s;
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, items = a.m_rows * a.k, k1 = a.k + 1;
    const uint32_t g = lane >> 2, t = lane & 3;
    const uint32_t d0 = blockIdx.x * a.rpb, nr = a.hidden - d0 < a.rpb ? a.hidden - d0 : a.rpb;
    const uint32_t rb_s = ms_row_bytes(TF_MX, a.s_inter), sb_s = ms_scale_bytes(TF_MX, a.s_inter);
    const uint32_t rb = a.inter / 2, sb = a.inter / 16;
    uint8_t *ring = (uint8_t *)sm4, *sh = ring + a.d_slots * a.d_slot, *sh_scale = sh + a.rpb * rb_s;
    uint8_t *hb = sh_scale + (a.rpb * sb_s + 15) / 16 * 16;
    ms_mat *mat = (ms_mat *)(hb + MS_DOWN * a.d_cols * ms_h_pitch(a.inter));
    ms_pick *pick = (ms_pick *)(mat + items);
    int32_t *uniq = (int32_t *)(pick + 128);
    float *wt = (float *)(uniq + items), *res = wt + items; /* [row * k + slot][rpb], then [row][warp][rpb] */
    const uint64_t policy = l2_read_once();
    if (tid == 0) {
        for (uint32_t i = 0; i < a.d_slots; ++i) {
            bar_init(full + i, 1);
        }
        bar_init(&s_full, 1);
        bar_init(&known, 1);
        bar_init_done();
        fence_async();
        bar_expect(&s_full, nr * (rb_s + sb_s));
        bulk_load(sh, a.s_down.codes + (uint64_t)d0 * rb_s, nr * rb_s, &s_full, policy);
        if (sb_s) {
            bulk_load(sh_scale, a.s_down.scale + (uint64_t)d0 * sb_s, nr * sb_s, &s_full, policy);
        }
    }
    __syncthreads();
    hb += warp * a.d_cols * ms_h_pitch(a.inter);
    uint32_t c_at[3], s_at[3], cs_at[3], ss_at[3]; /* the lane's rows */
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
        const uint32_t r = i * 8 + g < nr ? i * 8 + g : nr - 1;
        c_at[i] = r * rb;
        s_at[i] = r * sb;
        cs_at[i] = r * rb_s;
        ss_at[i] = r * sb_s;
    }
    const bool third = nr > 16;
    const uint32_t runs = a.inter / MS_RUN;
    uint32_t n_uniq = 1;
    auto ask = [&](uint32_t u, uint32_t slot) {
        if (lane == 0) {
            bar_expect(full + slot, nr * (rb + sb));
        }
        __syncwarp();
        if (lane < 2) {
            bulk_load(ring + slot * a.d_slot + (lane ? a.rpb * rb : 0), lane ? mat[u].scale : mat[u].codes,
                      nr * (lane ? sb : rb), full + slot, policy);
        }
    };
    uint32_t rows = 0;
    if (warp == 0) {
        if (lane == 0) {
            while (ms_get(a.flag) == 0) {
            }
        }
        __syncwarp();
        n_uniq = ms_picks(a, tab, pick, uniq, lane);
        for (uint32_t i = lane; i < n_uniq; i += 32) {
            const struct qx_weight *w = a.down + uniq[i];
            ms_mat m;
            m.codes = (const uint8_t *)w->codes + (uint64_t)d0 * rb;
            m.scale = (const uint8_t *)w->scale + (uint64_t)d0 * sb;
            m.factor = w->global * 0x1p26f;
            mat[i] = m;
        }
        __syncwarp();
        if (lane == 0) {
            n_uniq_s = n_uniq;
            bar_arrive(&known);
        }
    } else {
        bar_wait(&known, 0);
        n_uniq = n_uniq_s;
    }
#pragma unroll 1
    for (uint32_t u = warp; u < n_uniq && u < a.d_slots; u += MS_DOWN) {
        ask(u, u);
    }
    if (tid < items) {
        wt[tid] = __ldcg(a.weight + tid);
    }
    pdl_wait();
    uint4 q[MS_MAX_H] = {};
    if (warp < n_uniq) {
        rows = ms_rows(pick[warp], lane);
        ms_ask_h(q, a, pick[warp], rows, lane);
    }
    /* the shared expert's columns: two units of lanes a warp in turn */
    const uint32_t pieces = a.s_inter / MS_RUN * 2;
    const uint8_t *col = g < a.m_rows ? a.hs + (uint64_t)(g * k1 + a.k) * a.h_col : nullptr;
    float acc[2][4] = {};
    uint32_t x[16];
    bar_wait(&s_full, 0);
#pragma unroll 1
    for (uint32_t p = warp; p < pieces; p += MS_DOWN) {
        const uint32_t run = p / 2;
        const uint8_t *c = sh + run * ms_row_bytes(TF_MX, MS_RUN), *s = sh_scale + run * ms_scale_bytes(TF_MX, MS_RUN);
        if ((p & 1) == 0) {
            ms_load_h<0, 2>(x, col, run, t);
            ms_run_down<TF_MX, 0, 2>(acc, third, c, cs_at, s, ss_at, x, t);
        } else {
            ms_load_h<2, 4>(x, col, run, t);
            ms_run_down<TF_MX, 2, 4>(acc, third, c, cs_at, s, ss_at, x, t);
        }
    }
    float *d[2];
#pragma unroll
    for (uint32_t z = 0; z < 2; ++z) {
        d[z] = 2 * t + z < a.m_rows ? res + (items + (2 * t + z) * MS_DOWN + warp) * a.rpb : nullptr;
    }
    ms_store_down(d, acc, 1.0f, g, nr);
    ms_put_h(hb, q, a, lane);
    __syncwarp();
    ms_at at = {warp < a.d_slots ? warp : 0, 0};
#pragma unroll 1
    for (uint32_t u = warp; u < n_uniq; u += MS_DOWN) {
        const uint32_t v = u + MS_DOWN;
        uint32_t rows_next = 0;
        uint4 q[MS_MAX_H] = {};
        if (v < n_uniq) {
            rows_next = ms_rows(pick[v], lane);
            ms_ask_h(q, a, pick[v], rows_next, lane);
        }
        bar_wait(full + at.slot, at.phase);
        const uint8_t *c = ring + at.slot * a.d_slot, *s = c + a.rpb * rb;
        const uint8_t *h = hb + (g && a.d_cols > 1 ? ms_h_pitch(a.inter) : 0) + t * 16;
#pragma unroll 1
        for (;;) {
            float acc[2][4] = {};
#pragma unroll 1
            for (uint32_t run = 0; run < runs; ++run) {
                uint32_t x[16];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint4 w = ms_lds(h + run * 256 + j * 64);
                    x[4 * j] = w.x, x[4 * j + 1] = w.y, x[4 * j + 2] = w.z, x[4 * j + 3] = w.w;
                }
                ms_run_down<TF_NV, 0, 4>(acc, third, c + run * 64, c_at, s + run * 8, s_at, x, t);
            }
            float *d[2] = {nullptr, nullptr};
            if (t == 0) {
                const uint32_t r1 = rows & (rows - 1), m0 = __ffs(rows) - 1, m1 = __ffs(r1) - 1;
                d[0] = res + (m0 * a.k + pick[u].slot[m0]) * a.rpb;
                d[1] = r1 && a.d_cols > 1 ? res + (m1 * a.k + pick[u].slot[m1]) * a.rpb : nullptr;
            }
            ms_store_down(d, acc, mat[u].factor, g, nr);
            rows &= rows - 1;
            if (a.d_cols > 1) {
                rows &= rows - 1;
            }
            if (!rows) {
                break;
            }
            /* more rows picked it than a warp takes at a time */
            uint4 more[MS_MAX_H] = {};
            ms_ask_h(more, a, pick[u], rows, lane);
            __syncwarp();
            ms_put_h(hb, more, a, lane);
            __syncwarp();
        }
        __syncwarp();
        if (u + a.d_slots < n_uniq) {
            ask(u + a.d_slots, at.slot);
        }
        ms_put_h(hb, q, a, lane);
        __syncwarp();
        rows = rows_next;
        at.slot += MS_DOWN;
        if (at.slot >= a.d_slots) {
            at.slot -= a.d_slots;
            at.phase ^= 1;
        }
    }
    __syncthreads();
    for (uint32_t i = tid; i < a.m_rows * nr; i += MS_DOWN * 32) {
        const uint32_t m = i / nr, r = i - m * nr;
        const float gate = __ldcg(a.sg + m);
        float s = 0.0f, v = 0.0f;
#pragma unroll 5
        for (uint32_t k = 0; k < a.k; ++k) {
            s = fmaf(wt[m * a.k + k], res[(m * a.k + k) * a.rpb + r], s);
        }
#pragma unroll
        for (uint32_t w = 0; w < MS_DOWN; ++w) {
            v += res[(items + m * MS_DOWN + w) * a.rpb + r];
        }
        a.y[(uint64_t)m * a.hidden + d0 + r] = fmaf(gate, a.s_down.factor * v, s);
    }
}

/* ---- launching ---- */

#define MS_SMEM_MAX (222u * 1024u)

static uint32_t ms_up_smem(const ms_args &a, uint32_t slots)
{
    const uint32_t items = a.m_rows * a.k;
    return (uint32_t)(slots * (a.slot + MS_CONS * 128 * ((a.m_rows + 1) / 2)) + items * (sizeof(ms_pair) + 4) +
                      128 * sizeof(ms_pick));
}
static uint32_t ms_down_smem(const ms_args &a, uint32_t slots)
{
    const uint32_t items = a.m_rows * a.k;
    return (uint32_t)(slots * a.d_slot + a.rpb * ms_row_bytes(TF_MX, a.s_inter) +
                      (a.rpb * ms_scale_bytes(TF_MX, a.s_inter) + 15) / 16 * 16 +
                      MS_DOWN * a.d_cols * ms_h_pitch(a.inter) +
                      items * (sizeof(ms_mat) + 8) + 128 * sizeof(ms_pick) + (items + MS_DOWN * a.m_rows) * a.rpb * 4);
}

static ms_shared_w ms_shared(const struct qx_weight &w)
{
    return {(const uint8_t *)w.codes, (const uint8_t *)w.scale, 1.0f};
}

int qx_moe_stream(struct qx_queue *q, const struct qx_op_moe *o)
{
    ms_args a = {};
    a.k = o->k;
    a.hidden = o->experts.hidden;
    a.inter = o->experts.inter;
    a.s_inter = o->s_inter;
    a.n_experts = o->experts.n_experts;
    const auto whole = [](const void *p) { return ((uintptr_t)p & 15) == 0; };
    if (!can_stream(q) || !o->act_bf16 || o->experts.fmt != QX_W_NVFP4 || o->s_gate.fmt != QX_W_MXFP8 ||
        o->s_up.fmt != QX_W_MXFP8 || o->s_down.fmt != QX_W_MXFP8 || o->s_gate_vec.fmt != QX_W_BF16 ||
        a.hidden % MS_RUN || a.inter % MS_RUN || a.s_inter % MS_RUN || a.hidden > MS_RUN * MS_RUNS * MS_CONS ||
        a.k * 8 > MS_MAX_ITEMS || a.n_experts > MS_MAX_EXPERTS || a.inter > 768 || !whole(o->m) ||
        !whole(o->s_gate_vec.codes) || !whole(o->s_gate.codes) || !whole(o->s_up.codes) || !whole(o->s_down.codes) ||
        !whole(o->s_gate.scale) || !whole(o->s_up.scale) || !whole(o->s_down.scale)) {
        return 1;
    }
    a.items_s = a.s_inter / ms_item_rows(TF_MX);
    a.tiles_r.set(a.inter / 8);
    const uint32_t slot_s = 2 * ms_item_rows(TF_MX) * (ms_row_bytes(TF_MX, a.hidden) + ms_scale_bytes(TF_MX, a.hidden));
    a.slot = 16 * (a.hidden / 2 + a.hidden / 16);
    a.slot = (a.slot > slot_s ? a.slot : slot_s) / 128 * 128 + 128;
    a.rpb = (a.hidden / 4 + (uint32_t)q->n_sm - 1) / (uint32_t)q->n_sm * 4;
    a.d_slot = a.rpb * (a.inter / 2 + a.inter / 16);
    a.d_slot = (a.d_slot + 127) / 128 * 128;
    a.h_col = (a.inter > a.s_inter ? a.inter : a.s_inter) * 2;
    a.gate = o->experts.gate;
    a.up = o->experts.up;
    a.down = o->experts.down;
    a.s_gate = ms_shared(o->s_gate);
    a.s_up = ms_shared(o->s_up);
    a.s_down = ms_shared(o->s_down);
    a.s_vec = (const uint16_t *)o->s_gate_vec.codes;
    a.sg = (float *)q->ws;
    a.flag = (uint32_t *)(q->ws + 128);
    a.hs = q->ws + 256;
    ms_args most = a;
    most.m_rows = 8; /* whatever n_rows: a row's bits must not depend on it */
    most.d_cols = 2;
    if (a.rpb > MS_ROWS || ms_up_smem(most, 2) > MS_SMEM_MAX || ms_down_smem(most, MS_DOWN) > MS_SMEM_MAX) {
        return 1;
    }
    for (uint32_t r = 0; r < o->n_rows; r += 8) {
        moe_take_rows(a, q, o, r);
        /* beside one another on a multiprocessor */
        a.n_slots = 4;
        while (a.n_slots > 2 && ms_up_smem(a, a.n_slots) > MS_SMEM_MAX) {
            --a.n_slots;
        }
        a.d_cols = a.m_rows > 1 ? 2 : 1;
        a.d_slots = a.m_rows == 1 && a.k > MS_DOWN ? a.k : MS_DOWN;
        if (ms_down_smem(a, a.d_slots) > MS_SMEM_MAX) {
            a.d_slots = MS_DOWN;
        }
        const uint32_t su = ms_up_smem(a, a.n_slots), sd = ms_down_smem(a, a.d_slots);
        const dim3 g2((a.hidden + a.rpb - 1) / a.rpb);
        int e = launch(q, "moe", moe_stream_up, dim3((unsigned)q->n_sm), dim3(MS_THREADS), su, a);
        if (!e) {
            e = launch(q, "moe", moe_stream_down, g2, dim3(MS_DOWN * 32), sd, a);
        }
        if (e) {
            return e;
        }
    }
    return 0;
}
