/* moe_nv.cu: experts of NVFP4 for three rows of decoding and more in the released widths, beside a shared expert of
 * BF16 or MXFP8; inputs of products are bf16. Its sums are, bit for bit, those of moe_rows.cu, which takes fewer rows.
 *
 * Two launches of one block a multiprocessor. Every warp streams its own tasks through a ring of its own in shared
 * memory, the next steps in flight while one is multiplied.
 *
 * nv_up takes 8 rows of gate and the same 8 of up as the 16 rows of a tensor core tile, so that silu(gate) * up is
 * made where the sums end. A tile's columns are summed in NV_PARTS parts, which are added in their order: by the warp
 * that took the whole tile, or, of the tiles that are left when each warp has had as many as the others, by the warp
 * that ends last of those that took a part.
 *
 * nv_down gives each block 20 output rows; four times four of them, of one or two experts, make a tile, and the
 * experts are weighted and added in slot order at the end. A warp's ring holds a whole task;
 * a step's place is asked for again, for the task after, as soon as it has been read.
 *
 * The shared expert's weights lie in registers before the wait; they are multiplied while the first of the picked
 * experts' are on their way. Columns of a tile are rows of the step that picked the expert. The order of all sums
 * depends on the matrix alone, so a row's bits do not depend on the others.
 *
 * What may be read before the wait: nv_down starts only after every block of nv_up has seen the router end and one has
 * written the list of the picked experts, so that list and the experts' weights are read at once. nv_up reads m at once
 * with `early` set: then the launch before it is the router, which lets others start only after it has seen m. */
#include "moe_nv.cuh"
#include "stream.cuh"

/* ---- gate and up ---- */

struct nv_up_shared {
    uint32_t arrive[64], gen[64]; /* of tiles whose parts are outstanding */
    uint32_t shared_parts;        /* of the shared expert's tile that are there */
    float red[32];
    nv_picks picks;
};

/* A warp's tasks: whole tiles, then parts of those that are left. */
template <int W> struct nv_tasks {
    uint32_t block, warp, whole, n;

    __device__ __forceinline__ nv_tasks(uint32_t b, uint32_t w, uint32_t tiles)
    {
        block = b;
        warp = w;
        const uint32_t mine = b < tiles ? (tiles - b - 1) / gridDim.x + 1 : 0, left = mine % W;
        whole = n = mine / W;
        if (left * NV_PARTS > 3 * W) { /* four rounds of parts, of three steps each, take longer than a tile */
            whole = n = n + (w < left);
        } else if (w < left * NV_PARTS) {
            n += (left * NV_PARTS - w - 1) / W + 1;
        }
    }
    /* The block's tile, and of which expert it is which. */
    __device__ __forceinline__ uint32_t at(uint32_t task, uint32_t &e, uint32_t &tile, uint32_t &part) const
    {
        const uint32_t x = (task - whole) * W + warp, l = task < whole ? task * W + warp : whole * W + x / NV_PARTS;
        const uint32_t u = block + l * gridDim.x;
        part = task < whole ? 0 : x % NV_PARTS;
        e = u / NV_TILES;
        tile = u - e * NV_TILES;
        return l;
    }
};

template <int W, int R> struct nv_up_ring {
    const uint8_t *g, *u, *s;
    uint32_t base, wr, next, left;

    static constexpr uint32_t PART = 32; /* in left: the first step of a part, of three */

    __device__ __forceinline__ void produce(const nv_tasks<W> &t, const nv_mat *mat, uint32_t lane)
    {
        if (left == 0 && next < t.n) {
            uint32_t e, tile, part;
            t.at(next, e, tile, part);
            left = next < t.whole ? NV_TILE_STEPS : PART;
            ++next;
            const nv_mat *m = mat + 2 * e;
            const uint32_t off = (tile * 8 + (lane >> 3)) * (NV_H / 2) + part * (NV_H / 2 / NV_PARTS) + (lane & 7) * 16;
            g = m[0].codes + off;
            u = m[1].codes + off;
            s = m[lane >> 4].scale + ((tile * 8 + ((lane >> 1) & 7)) * (NV_H / 16) + part * (NV_H / 16 / NV_PARTS) +
                                      (lane & 1) * 8);
        }
        if (left) {
            /* chunks 4 to 7 of every second row exchanged with the others, so that no read meets a bank twice */
            const uint32_t d = base + wr, c = d + (lane >> 3) * 128 + (((lane & 7) ^ ((lane >> 1) & 4)) << 4);
            const bool half = left == PART - 2; /* the last step of a part */
            if (!half || (lane & 4) == 0) {
                copy16(c, g, 16);
                copy16(c + 512, g + 4 * (NV_H / 2), 16);
                copy16(c + 1024, u, 16);
                copy16(c + 1536, u + 4 * (NV_H / 2), 16);
            }
            if (!half || (lane & 1) == 0) {
                copy8(d + 2048 + lane * 8, s);
            }
            g += 128;
            u += 128;
            s += 16;
            left = left == PART - 2 ? 0 : left - 1;
        }
        copy_commit();
        wr = wr + NV_STEP == R * NV_STEP ? 0 : wr + NV_STEP;
    }
    __device__ __forceinline__ void begin(const nv_tasks<W> &t, const nv_mat *mat, uint32_t b, uint32_t lane)
    {
        base = b;
        wr = next = left = 0;
#pragma unroll 1
        for (int i = 0; i < R; ++i) {
            produce(t, mat, lane);
        }
    }
};

/* silu(gate) * up of a tile to the items' columns. at: byte of the lane's row in a column. */
__device__ __forceinline__ void nv_finish(const nv_args &a, const float4 &s, float f0, float f1, const mr_cols &col,
                                          uint32_t at, uint32_t q)
{
    const float h0 = silu_f(f0 * s.x) * (f1 * s.z), h1 = silu_f(f0 * s.y) * (f1 * s.w);
    if (2 * q < col.n) {
        *(uint16_t *)(a.hs + at + col.item[2 * q] * NV_HCOL) = to_bf16(h0);
    }
    if (2 * q + 1 < col.n) {
        *(uint16_t *)(a.hs + at + col.item[2 * q + 1] * NV_HCOL) = to_bf16(h1);
    }
}

/* Byte of value g of a unit: in the order 0 4 1 5 2 6 3 7. */
__device__ __forceinline__ uint32_t nv_in_unit(uint32_t g)
{
    return g < 4 ? 4 * g : 4 * (g - 4) + 2;
}

/* The block's tile of the shared expert, a part a warp; the warp that ends last adds them. */
template <int TF>
__device__ __forceinline__ void nv_up_shared_tile(const nv_args &a, nv_up_shared &sh,
                                                  const nv_part<TF, nv_shared<TF>::N> &w, const uint8_t *xs,
                                                  float4 *parts, uint32_t warp, uint32_t lane)
{
    using S = nv_shared<TF>;
    const uint32_t g = lane >> 2, q = lane & 3, r = blockIdx.x * 8 + g;
    float acc[4] = {};
    w.template run<true>(acc, xs + (g < a.m_rows ? g : 0) * NV_XCOL, a.s_scale[0] + r * (NV_H / 32),
                         a.s_scale[1] + r * (NV_H / 32), warp * S::N, q);
    parts[warp * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __threadfence_block();
    __syncwarp();
    uint32_t old = 0;
    if (lane == 0) {
        old = atomicAdd(&sh.shared_parts, 1u);
    }
    old = __shfl_sync(0xffffffffu, old, 0);
    if (old != S::PARTS - 1) {
        return;
    }
    __threadfence_block();
    float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (uint32_t i = 0; i < (uint32_t)S::PARTS; ++i) {
        const float4 v = parts[i * 32 + lane];
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    uint8_t *h = a.hs + mr_unit(blockIdx.x) + nv_in_unit(g);
    if (2 * q < a.m_rows) {
        *(uint16_t *)(h + (2 * q * (a.k + 1) + a.k) * NV_HCOL) = to_bf16(silu_f(s.x) * s.z);
    }
    if (2 * q + 1 < a.m_rows) {
        *(uint16_t *)(h + ((2 * q + 1) * (a.k + 1) + a.k) * NV_HCOL) = to_bf16(silu_f(s.y) * s.w);
    }
}
template <int W, int R, int TF>
__device__ __forceinline__ void nv_up_picked(const nv_args &a, nv_up_shared &sh, uint32_t ring_at, const uint8_t *xs,
                                             float4 *parts, const nv_mat *mat, const mr_cols *cols,
                                             const nv_part<TF, nv_shared<TF>::N> &w, bool mine, uint32_t warp,
                                             uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    /* from the last block on: the first have the shared expert's tiles */
    const nv_tasks<W> tasks(gridDim.x - 1 - blockIdx.x, warp, sh.picks.n * NV_TILES);
    nv_up_ring<W, R> ring;
    ring.begin(tasks, mat, ring_at + warp * (R * NV_STEP), lane);
    if (mine) {
        nv_up_shared_tile<TF>(a, sh, w, xs, parts + W * 32, warp, lane);
    }
    uint32_t rd = 0, prev = 0;
    const uint32_t codes = ring.base + g * 128 + q * 16, scales = ring.base + 2048 + g * 16 + q * 2;
    const uint32_t first_half = (g & 1) * 64, second_half = 64 - first_half;
    const uint32_t x0 = smem_addr(xs) + q * 16;
#pragma unroll 1
    for (uint32_t task = 0; task < tasks.n; ++task) {
        uint32_t e, tile, part;
        const uint32_t l = tasks.at(task, e, tile, part);
        const bool whole = task < tasks.whole;
        const mr_cols &col = cols[e];
        uint32_t x[1] = {x0 + col.row[g < col.n ? g : 0] * NV_XCOL + part * (NV_H * 2 / NV_PARTS)};
        float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float acc[1][4] = {};
        const auto add = [&]() {
            s.x += acc[0][0], s.y += acc[0][1], s.z += acc[0][2], s.w += acc[0][3];
            acc[0][0] = acc[0][1] = acc[0][2] = acc[0][3] = 0.0f;
        };
        const auto step = [&](uint32_t at, uint32_t sc, uint32_t off) {
            nv_step<1>(acc, lds128(at), lds128(at + 1024), lds16(sc), lds16(sc + 128), x, off);
        };
#pragma unroll 1
        for (uint32_t i = 0, n = whole ? NV_TILE_STEPS : 3; i < n; ++i) {
            copy_wait<R - 1>();
            __syncwarp();
            step(codes + first_half + rd, scales + rd, 0);
            if (i == 2 || i == 7) {
                add();
            }
            if (whole || i != 2) {
                step(codes + second_half + rd, scales + 8 + rd, 256);
            }
            if (i == 4 || i == 9) {
                add();
            }
            x[0] += 512;
            rd = rd + NV_STEP == R * NV_STEP ? 0 : rd + NV_STEP;
            __syncwarp();
            ring.produce(tasks, mat, lane);
        }
        if (!whole) {
            /* the place for a warp's part is free when its last tile has been summed */
            const uint32_t unit = l - tasks.whole * W;
            if (prev) {
                volatile uint32_t *gen = &sh.gen[(prev - 1) & 63];
                while (*gen == 0) {
                }
            }
            prev = unit + 1;
            parts[warp * 32 + lane] = s;
            __threadfence_block();
            __syncwarp();
            uint32_t old = 0;
            if (lane == 0) {
                old = atomicAdd(&sh.arrive[unit & 63], 1u);
            }
            old = __shfl_sync(0xffffffffu, old, 0);
            if (old != NV_PARTS - 1) {
                continue;
            }
            __threadfence_block();
            s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const uint32_t first = ((task - tasks.whole) * W + warp - part) % W; /* who had the first part */
#pragma unroll
            for (uint32_t i = 0; i < NV_PARTS; ++i) {
                const float4 v = parts[(first + i < W ? first + i : first + i - W) * 32 + lane];
                s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
            }
        }
        nv_finish(a, s, mat[2 * e].factor, mat[2 * e + 1].factor, col, nv_unit(tile) + nv_in_unit(g), q);
        if (!whole) {
            __syncwarp();
            if (lane == 0) {
                __threadfence_block();
                *(volatile uint32_t *)&sh.gen[(l - tasks.whole * W) & 63] = 1;
            }
        }
    }
}

/* Rows of m as bf16 columns in the order of nv_unit. */
template <int W> __device__ __forceinline__ void nv_stage(const nv_args &a, uint8_t *xs)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, n = a.m_rows * (NV_H / 256);
#pragma unroll 1
    for (uint32_t b0 = warp; b0 < n; b0 += 2 * W) { /* two runs of 256 in flight */
        float4 v[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t b = b0 + i * W;
            const float4 *m = (const float4 *)(a.m + ((b < n ? b : b0) * 32 + lane) * 8);
            v[i][0] = __ldcg(m);
            v[i][1] = __ldcg(m + 1);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t b = b0 + i * W, r = b / (NV_H / 256), u = (b - r * (NV_H / 256)) * 32 + lane;
            if (b < n) {
                *(uint4 *)(xs + r * NV_XCOL + nv_unit(u)) = stream_x_pack(v[i][0], v[i][1], true);
            }
        }
    }
}

/* sigmoid of the shared expert's gate in f32, a row a block from the last on. */
template <int W> __device__ __forceinline__ void nv_shared_gate(const nv_args &a, float *red)
{
    const uint32_t tid = threadIdx.x, m = gridDim.x - 1 - blockIdx.x;
    if (m >= a.m_rows) {
        return;
    }
    const float *v = a.m + (uint64_t)m * NV_H;
    float s = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < NV_H; i += 512) { /* as many threads whatever W */
        if (tid < 512) {
            s = fmaf(bf16_f(__ldg(a.s_vec + i + tid)), __ldcg(v + i + tid), s);
        }
    }
    mr_gate_end(s, red, a.sg, m);
}

template <int W, int R, int TF> __global__ void __maxnreg__(64) nv_up(const __grid_constant__ nv_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ nv_up_shared sh;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, items = a.m_rows * a.k;
    uint8_t *xs = (uint8_t *)sm4 + W * R * NV_STEP;
    float4 *parts = (float4 *)(xs + a.m_rows * NV_XCOL); /* of the picked experts, then of the shared one */
    nv_mat *mat = (nv_mat *)(parts + (W + nv_shared<TF>::PARTS) * 32);
    mr_cols *cols = (mr_cols *)(mat + 2 * items);
    uint32_t *mask = (uint32_t *)(cols + items);
    uint8_t *rank = (uint8_t *)mask + (a.n_experts + 3) / 4 * 4;

    /* what is known before the wait: the shared expert's weights */
    using S = nv_shared<TF>;
    const bool mine = blockIdx.x < NV_TILES && warp < (uint32_t)S::PARTS;
    nv_part<TF, S::N> w;
    if (mine) {
        const uint32_t r = blockIdx.x * 8 + lane / 4;
        w.load(a.s_codes[0] + r * (NV_H * S::ELEM), a.s_codes[1] + r * (NV_H * S::ELEM), warp * S::N, lane & 3);
        if (TF == TF_MX) {
            prefetch_l2(a.s_scale[0] + r * (NV_H / 32));
            prefetch_l2(a.s_scale[1] + r * (NV_H / 32));
        }
    }
    const uint32_t lines = moe_lines(a), line = blockIdx.x * 4 + tid;
    if (tid < 4 && line < lines) {
        moe_fetch_line(a, line);
    }
    if (tid < 64) {
        sh.arrive[tid] = sh.gen[tid] = 0;
    }
    if (tid == 0) {
        sh.shared_parts = 0;
    }
    for (uint32_t i = tid; i < (a.n_experts + 3) / 4; i += W * 32) {
        mask[i] = 0;
    }
    if (!a.early) {
        pdl_wait();
    }
    nv_stage<W>(a, xs);
    nv_shared_gate<W>(a, sh.red);
    __syncthreads();
    if (a.early) {
        pdl_wait();
    }
    const bool tells = blockIdx.x == NV_TILES; /* the first without a tile of the shared expert */
    if (!tells) {
        pdl_next();
    }
    nv_unique(a, mask, rank, cols, sh.picks, [&](uint32_t i, int32_t e) {
        nv_fill(mat[2 * i], a.gate[e]);
        nv_fill(mat[2 * i + 1], a.up[e]);
        if (tells) {
            nv_fill(a.list->mat[i], a.down[e]);
        }
    });
    __syncthreads();
    if (tells) {
        for (uint32_t i = tid; i < sh.picks.n * (uint32_t)(sizeof(mr_cols) / 4); i += W * 32) {
            ((uint32_t *)a.list->cols)[i] = ((const uint32_t *)cols)[i];
        }
        if (tid == 0) {
            a.list->n = sh.picks.n;
        }
        __threadfence();
        __syncthreads();
        pdl_next();
    }
    nv_up_picked<W, R, TF>(a, sh, smem_addr(sm4), xs, parts, mat, cols, w, mine, warp, lane);
}

/* ---- down ---- */

/* Of four rows each: group b of the block is rows b % NV_QUADS of expert b / NV_QUADS; four groups make a task. */
template <int W> struct nv_down_ring {
    const uint8_t *c0, *c1;
    uint32_t base, next, odd;

    /* codes: the steps of a task, 16 rows x 64 bytes each; block scales: two tasks of 16 rows x 40 */
    static constexpr uint32_t STEPS = NV_I / 128, SCALES = NV_I / 16 * 16, BYTES = STEPS * 1024 + 2 * SCALES;

    /* The next task's rows, and its block scales at once. */
    __device__ __forceinline__ void locate(const nv_mat *mat, uint32_t groups, uint32_t d0, uint32_t lane)
    {
        const auto row = [&](uint32_t b, uint32_t &r) -> const nv_mat & { /* of a group past the end: the last */
            b = b < groups ? b : groups - 1;
            const uint32_t s = b / NV_QUADS;
            r = d0 + (b - s * NV_QUADS) * 4;
            return mat[s];
        };
        uint32_t r;
        const nv_mat &m0 = row(next * 4 + (lane >> 4), r);
        c0 = m0.codes + ((r + ((lane >> 2) & 3)) * (NV_I / 2) + (lane & 3) * 16);
        const nv_mat &m1 = row(next * 4 + 2 + (lane >> 4), r);
        c1 = m1.codes + ((r + ((lane >> 2) & 3)) * (NV_I / 2) + (lane & 3) * 16);
        const uint32_t z = lane / 10, d = base + STEPS * 1024 + odd;
        const nv_mat &m2 = row(next * 4 + z, r);
        copy16(d + lane * 16, m2.scale + (r * (NV_I / 16) + (lane - z * 10) * 16), 16);
        if (lane < 8) {
            const nv_mat &m3 = row(next * 4 + 3, r);
            copy16(d + 512 + lane * 16, m3.scale + (r * (NV_I / 16) + (lane + 2) * 16), 16);
        }
        odd ^= SCALES;
        next += W;
    }
    /* Its step s. */
    __device__ __forceinline__ void produce(uint32_t s, bool more, uint32_t lane)
    {
        if (more) {
            copy16(base + s * 1024 + lane * 16, c0 + s * 64, 16);
            copy16(base + s * 1024 + lane * 16 + 512, c1 + s * 64, 16);
        }
        copy_commit();
    }
};

template <int W, int NB>
__device__ __forceinline__ void nv_down_task(nv_down_ring<W> &ring, uint32_t scales, uint32_t n_tasks,
                                             const nv_mat *mat, const mr_cols *cols, uint32_t groups, uint32_t d0,
                                             uint32_t b0, const uint8_t *hs, float *res, uint32_t lane)
{
    using RING = nv_down_ring<W>;
    const uint32_t g = lane >> 2, q = lane & 3;
    const uint32_t e0 = b0 / NV_QUADS, last = b0 + 3 < groups ? b0 + 3 : groups - 1, e1 = last / NV_QUADS;
    const uint32_t n0 = cols[e0].n, n1 = e1 != e0 ? cols[e1].n : 0;
    uint32_t x[NB];
#pragma unroll
    for (int n = 0; n < NB; ++n) {
        /* one block of columns: the first expert's, then the second's; two: one each */
        const bool other = NB == 2 ? n == 1 : g >= n0 && g - n0 < n1;
        const uint32_t j = NB == 2 ? (g < (n ? n1 : n0) ? g : 0) : other ? g - n0 : g < n0 ? g : 0;
        x[n] = smem_addr(hs) + q * 16 + cols[other ? e1 : e0].item[j] * NV_HCOL;
    }
    float acc[NB][4] = {};
    scales += g * (NV_I / 16) + q * 2;
    const bool more = ring.next < n_tasks;
    const uint32_t at = ring.base + lane * 16;
    copy_wait<RING::STEPS - 1>();
    __syncwarp();
    if (more) {
        ring.locate(mat, groups, d0, lane);
    }
#pragma unroll
    for (uint32_t s = 0; s < RING::STEPS; ++s) {
        if (s) {
            copy_wait<RING::STEPS - 1>();
        }
        const uint4 a0 = lds128(at + s * 1024), a1 = lds128(at + s * 1024 + 512);
        const uint32_t v0 = lds16(scales + s * 8), v1 = lds16(scales + s * 8 + 8 * (NV_I / 16));
        ring.produce(s, more, lane);
        nv_step<NB>(acc, a0, a1, v0, v1, x, s * 256);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t b = b0 + 2 * i + (g >> 2), e = b / NV_QUADS;
        const bool second = e != e0;
        const float f = mat[e <= e1 ? e : e1].factor;
#pragma unroll
        for (int z = 0; z < 2; ++z) {
            const uint32_t j = 2 * q + z - (NB == 1 && second ? n0 : 0);
            if (b < groups && j < (second ? n1 : n0)) {
                const uint32_t item = cols[e].item[j] - cols[e].row[j]; /* row * k + slot */
                const uint32_t at = item * NV_D + (b - e * NV_QUADS) * 4 + (g & 3);
                res[at] = f * acc[NB == 2 && second ? NB - 1 : 0][2 * i + z];
            }
        }
    }
}

template <int W, int TF, bool MANY> __global__ void __maxnreg__(64) nv_down(const __grid_constant__ nv_args a)
{
    using S = nv_shared<TF>;
    extern __shared__ uint4 sm4[];
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t items = a.m_rows * a.k, d0 = blockIdx.x * NV_D;
    uint8_t *hs = (uint8_t *)sm4 + W * nv_down_ring<W>::BYTES;
    nv_mat *mat = (nv_mat *)(hs + a.m_rows * (a.k + 1) * NV_HCOL);
    mr_cols *cols = (mr_cols *)(mat + items);
    float *wt = (float *)(cols + items), *res = wt + items; /* [row * k + slot][NV_D], then [row][part][NV_D] */
    if (tid < items) {
        wt[tid] = __ldcg(a.weight + tid);
    }
    const uint32_t n_picks = __ldcg(&a.list->n);
    for (uint32_t i = tid; i < items * (NV_MAT_WORDS + NV_COLS_WORDS); i += W * 32) {
        const uint32_t c = i - items * NV_MAT_WORDS;
        if (i < items * NV_MAT_WORDS) {
            ((uint32_t *)mat)[i] = __ldcg((const uint32_t *)a.list->mat + i);
        } else {
            ((uint32_t *)cols)[c] = __ldcg((const uint32_t *)a.list->cols + c);
        }
    }
    __syncthreads();
    const uint32_t groups = n_picks * NV_QUADS, n_tasks = (groups + 3) / 4;
    nv_down_ring<W> ring;
    ring.base = smem_addr(sm4) + warp * nv_down_ring<W>::BYTES;
    ring.odd = 0;
    ring.next = warp;
    const bool any = warp < n_tasks;
    if (any) {
        ring.locate(mat, groups, d0, lane);
    }
#pragma unroll
    for (uint32_t s = 0; s < nv_down_ring<W>::STEPS; ++s) {
        ring.produce(s, any, lane);
    }
    /* the shared expert by the last warps: groups of four rows of each part of its columns */
    const uint32_t s0 = (W - 1 - warp) * 4, s_groups = S::D_PARTS * NV_QUADS;
    const auto where = [&](uint32_t i, uint32_t &part) { /* the lane's row of the i-th half */
        const uint32_t b = s0 + 2 * i + (g >> 2), v = b < s_groups ? b : s_groups - 1;
        part = v / NV_QUADS;
        return (v - part * NV_QUADS) * 4 + (g & 3);
    };
    nv_part<TF, S::N> w;
    if (s0 < s_groups) {
        uint32_t p0, p1;
        const uint32_t r0 = d0 + where(0, p0), r1 = d0 + where(1, p1);
        w.load(a.s_codes[2] + (r0 * (NV_I * S::ELEM) + p0 * (S::N * 64)),
               a.s_codes[2] + (r1 * (NV_I * S::ELEM) + p1 * (S::N * 64)), 0, q);
        if (TF == TF_MX) {
            prefetch_l2(a.s_scale[2] + r0 * (NV_I / 32));
        }
    }
    pdl_wait();
    for (uint32_t i = tid, n = a.m_rows * (a.k + 1) * (NV_HCOL / 16); i < n; i += W * 32) {
        copy16(smem_addr(hs) + i * 16, a.hs + i * 16, 16);
    }
    copy_commit();
    const float sg = tid < a.m_rows * NV_D ? __ldcg(a.sg + tid / NV_D) : 0.0f; /* 8 NV_D are no more than threads */
    copy_wait<0>();
    __syncthreads();
    if (s0 < s_groups) {
        /* the four groups are of one part or of two that follow one another */
        const uint32_t first = s0 / NV_QUADS, last = (s0 + 3 < s_groups ? s0 + 3 : s_groups - 1) / NV_QUADS;
#pragma unroll 1
        for (uint32_t p = first; p <= last; ++p) {
            float acc[4] = {};
            uint32_t at[2], row[2];
            row[0] = where(0, at[0]);
            row[1] = where(1, at[1]);
            const uint8_t *col = hs + ((g < a.m_rows ? g : 0) * (a.k + 1) + a.k) * NV_HCOL;
            const uint8_t *s = a.s_scale[2] + d0 * (NV_I / 32);
            w.run(acc, col, s + row[0] * (NV_I / 32), s + row[1] * (NV_I / 32), p * S::N, q);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t m = 2 * q + (i & 1);
                if (s0 + 2 * (i / 2) + (g >> 2) < s_groups && at[i / 2] == p && m < a.m_rows) {
                    res[(items + m * S::D_PARTS + p) * NV_D + row[i / 2]] = acc[i];
                }
            }
        }
    }
    uint32_t odd = 0;
#pragma unroll 1
    for (uint32_t task = warp; task < n_tasks; task += W) {
        const uint32_t b0 = 4 * task, e0 = b0 / NV_QUADS, e1 = (b0 + 3 < groups ? b0 + 3 : groups - 1) / NV_QUADS;
        const uint32_t scales = ring.base + nv_down_ring<W>::STEPS * 1024 + odd;
        if (MANY && e1 != e0 && cols[e0].n + cols[e1].n > 8) {
            nv_down_task<W, 2>(ring, scales, n_tasks, mat, cols, groups, d0, b0, hs, res, lane);
        } else {
            nv_down_task<W, 1>(ring, scales, n_tasks, mat, cols, groups, d0, b0, hs, res, lane);
        }
        odd ^= nv_down_ring<W>::SCALES;
    }
    __syncthreads();
    if (tid < a.m_rows * NV_D) {
        const uint32_t m = tid / NV_D, r = tid - m * NV_D;
        float s = 0.0f, v = 0.0f;
#pragma unroll 5
        for (uint32_t k = 0; k < a.k; ++k) {
            s = fmaf(wt[m * a.k + k], res[(m * a.k + k) * NV_D + r], s);
        }
#pragma unroll
        for (uint32_t p = 0; p < (uint32_t)S::D_PARTS; ++p) {
            v += res[(items + m * S::D_PARTS + p) * NV_D + r];
        }
        a.y[(uint64_t)m * NV_H + d0 + r] = fmaf(sg, v, s);
    }
}

/* ---- launching ---- */

static uint32_t nv_up_smem(const nv_args &a, uint32_t warps, uint32_t ring, uint32_t parts)
{
    const uint32_t items = a.m_rows * a.k, bytes = (a.n_experts + 3) / 4 * 4;
    return (uint32_t)(warps * ring * NV_STEP + a.m_rows * NV_XCOL + (warps + parts) * 512 +
                      items * (2 * sizeof(nv_mat) + sizeof(mr_cols)) + 2 * bytes);
}
static uint32_t nv_down_smem(const nv_args &a, uint32_t warps, uint32_t ring_bytes, uint32_t parts)
{
    const uint32_t items = a.m_rows * a.k;
    return (uint32_t)(warps * ring_bytes + a.m_rows * (a.k + 1) * NV_HCOL +
                      items * (sizeof(nv_mat) + sizeof(mr_cols) + 4) + (items + parts * a.m_rows) * NV_D * 4);
}

/* The warps of up: as many as the router's block leaves registers for. */
template <int TF> static int nv_run(struct qx_queue *q, const nv_args &a)
{
    const int warps_up = 20, ring = 2, warps = 16;
    uint32_t su = nv_up_smem(a, warps_up, ring, nv_shared<TF>::PARTS);
    su = su > ALONE_SHARED ? su : ALONE_SHARED; /* its tasks are divided as if each had a multiprocessor */
    const uint32_t sd = nv_down_smem(a, warps, nv_down_ring<warps>::BYTES, nv_shared<TF>::D_PARTS);
    const dim3 up((unsigned)q->n_sm), down(NV_BLOCKS);
    const int r = launch(q, "moe", nv_up<warps_up, ring, TF>, up, dim3(warps_up * 32), su, a);
    if (r) {
        return r;
    }
    return a.m_rows <= 4 ? launch(q, "moe", nv_down<warps, TF, false>, down, dim3(warps * 32), sd, a)
                         : launch(q, "moe", nv_down<warps, TF, true>, down, dim3(warps * 32), sd, a);
}

int qx_moe_nv(struct qx_queue *q, const struct qx_op_moe *o)
{
    const uint8_t f = o->s_gate.fmt;
    if (o->n_rows < 3 || o->experts.fmt != QX_W_NVFP4 || o->experts.hidden != NV_H || o->experts.inter != NV_I ||
        o->s_inter != NV_I || !o->act_bf16 || o->k > NV_MAX_K || o->experts.n_experts > 1024 ||
        (f != QX_W_BF16 && f != QX_W_MXFP8) || o->s_up.fmt != f || o->s_down.fmt != f ||
        o->s_gate_vec.fmt != QX_W_BF16 || !mr_aligned(o->s_gate) || !mr_aligned(o->s_up) || !mr_aligned(o->s_down) ||
        ((uintptr_t)o->m & 15) || !can_stream(q) || q->n_sm < (int)NV_BLOCKS) {
        return 1;
    }
    nv_args a = {};
    a.k = o->k;
    a.n_experts = o->experts.n_experts;
    a.gate = o->experts.gate;
    a.up = o->experts.up;
    a.down = o->experts.down;
    const struct qx_weight *const s[3] = {&o->s_gate, &o->s_up, &o->s_down};
    for (int i = 0; i < 3; ++i) {
        a.s_codes[i] = (const uint8_t *)s[i]->codes;
        a.s_scale[i] = (const uint8_t *)s[i]->scale;
    }
    a.s_vec = (const uint16_t *)o->s_gate_vec.codes;
    a.sg = (float *)q->ws;
    a.hs = q->ws + 256;
    a.list = (nv_list *)(q->ws + NV_LIST_AT);
    for (uint32_t r = 0; r < o->n_rows; r += 8) {
        moe_take_rows(a, q, o, r);
        const int e = f == QX_W_BF16 ? nv_run<TF_BF16>(q, a) : nv_run<TF_MX>(q, a);
        if (e) {
            return e;
        }
    }
    return 0;
}
