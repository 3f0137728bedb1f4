/* moe_nv.cu: experts of NVFP4 for three rows of decoding and more in the released widths, beside a shared expert of
 * BF16 or MXFP8; inputs of products are bf16. Its sums are, bit for bit, those of moe_rows.cu, which takes fewer rows.
 *
 * Two launches of one block a multiprocessor. In both one warp asks for weights by bulk copies into slots of shared
 * memory, and the others take them from there.
 *
 * nv_up takes 8 rows of gate and the same 8 of up, contiguous both, as the 16 rows of a tensor core tile, so that
 * silu(gate) * up is made where the sums end. A tile's columns are summed in NV_PARTS parts, a warp each, which are
 * added in their order.
 *
 * nv_down gives each block 20 output rows, contiguous of every expert; four times four of them, of one or two experts,
 * make a tile, and the experts are weighted and added in slot order at the end.
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

#define NV_GROUPS 4u /* of NV_PARTS warps, which take a tile together */
#define NV_SLOTS 5u
#define NV_CODES (8u * NV_H / 2u) /* of a tile, of gate or of up; contiguous */
#define NV_SCALES (8u * NV_H / 16u)
#define NV_SLOT (2u * (NV_CODES + NV_SCALES))
#define NV_MOST_TILES (8u * NV_MAX_K * NV_TILES / NV_BLOCKS) /* a block */
#define NV_UP_WARPS (NV_GROUPS * NV_PARTS + 1u) /* the last one asks for the tiles */

/* A barrier of its own for each tile: groups pass over tiles, so one that tells phases apart by their parity would not
 * tell the next tile in a slot from the one before. */
struct nv_up_shared {
    uint64_t full[NV_MOST_TILES], empty[NV_SLOTS];
    uint32_t shared_parts;
    float red[32];
    nv_picks picks;
};

/* The block's tile l. */
__device__ __forceinline__ void nv_up_ask(uint32_t bars, uint32_t slots, const nv_mat *mat, uint32_t block, uint32_t l,
                                          uint32_t lane)
{
    const uint32_t slot = l % NV_SLOTS, u = block + l * gridDim.x, e = u / NV_TILES, tile = u - e * NV_TILES;
    const uint32_t bar = bars + l * 8, to = slots + slot * NV_SLOT;
    if (lane == 0) {
        bar_expect(bar, NV_SLOT);
    }
    __syncwarp();
    if (lane < 4) { /* codes of gate and up, their block scales */
        const nv_mat &m = mat[2 * e + (lane & 1)];
        const bool codes = lane < 2;
        bulk_load(to + (codes ? lane * NV_CODES : 2 * NV_CODES + (lane & 1) * NV_SCALES),
                  codes ? m.codes + tile * NV_CODES : m.scale + tile * NV_SCALES, codes ? NV_CODES : NV_SCALES, bar);
    }
}

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
__device__ __forceinline__ void nv_up_shared_tile(const nv_args &a, uint32_t *there,
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
        old = atomicAdd(there, 1u);
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
/* Rows of m as bf16 columns in the order of nv_unit. */
__device__ __forceinline__ void nv_stage(const nv_args &a, uint8_t *xs)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, n = a.m_rows * (NV_H / 256);
#pragma unroll 1
    for (uint32_t b0 = warp; b0 < n; b0 += 2 * NV_UP_WARPS) { /* two runs of 256 in flight */
        float4 v[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t b = b0 + i * NV_UP_WARPS;
            const float4 *m = (const float4 *)(a.m + ((b < n ? b : b0) * 32 + lane) * 8);
            v[i][0] = __ldcg(m);
            v[i][1] = __ldcg(m + 1);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t b = b0 + i * NV_UP_WARPS, r = b / (NV_H / 256), u = (b - r * (NV_H / 256)) * 32 + lane;
            if (b < n) {
                *(uint4 *)(xs + r * NV_XCOL + nv_unit(u)) = stream_x_pack(v[i][0], v[i][1], true);
            }
        }
    }
}

/* sigmoid of the shared expert's gate in f32, a row a block from the last on. */
__device__ __forceinline__ void nv_shared_gate(const nv_args &a, float *red)
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

/* The rest of the list for down, which starts after this. */
__device__ __forceinline__ void nv_tell(const nv_args &a, const mr_cols *cols, uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n * NV_COLS_WORDS; i += NV_UP_WARPS * 32) {
        ((uint32_t *)a.list->cols)[i] = ((const uint32_t *)cols)[i];
    }
    if (threadIdx.x == 0) {
        a.list->n = n;
    }
    __threadfence();
    __syncthreads();
    pdl_next();
}

/* MANY: more than four rows. */
template <int TF, bool MANY> __global__ void __maxnreg__(64) nv_up(const __grid_constant__ nv_args a)
{
    using S = nv_shared<TF>;
    extern __shared__ __align__(128) uint4 sm4[];
    __shared__ nv_up_shared sh;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t items = a.m_rows * a.k, block = gridDim.x - 1 - blockIdx.x;
    uint8_t *xs = (uint8_t *)sm4 + NV_SLOTS * NV_SLOT;
    float4 *parts = (float4 *)(xs + a.m_rows * NV_XCOL); /* of the shared expert; then [2][group][part][g][2] */
    nv_mat *mat = (nv_mat *)(parts + 16 * 32);
    mr_cols *cols = (mr_cols *)(mat + 2 * items);
    uint32_t *mask = (uint32_t *)(cols + items);
    uint8_t *rank = (uint8_t *)mask + (a.n_experts + 3) / 4 * 4;
    const uint32_t slots = smem_addr(sm4), full = smem_addr(sh.full), empty = smem_addr(sh.empty);

    const bool mine = blockIdx.x < NV_TILES && warp < (uint32_t)S::PARTS;
    nv_part<TF, S::N> w;
    if (mine) {
        const uint32_t r = blockIdx.x * 8 + g;
        w.load(a.s_codes[0] + r * (NV_H * S::ELEM), a.s_codes[1] + r * (NV_H * S::ELEM), warp * S::N, q);
        if (TF == TF_MX) {
            prefetch_l2(a.s_scale[0] + r * (NV_H / 32));
            prefetch_l2(a.s_scale[1] + r * (NV_H / 32));
        }
    }
    const uint32_t lines = moe_lines(a), line = blockIdx.x * 4 + tid;
    if (tid < 4 && line < lines) {
        moe_fetch_line(a, line);
    }
    if (tid < NV_MOST_TILES) {
        bar_init(full + tid * 8, 1);
        if (tid < NV_SLOTS) {
            bar_init(empty + tid * 8, NV_PARTS);
        }
        bar_init_done();
    }
    if (tid == 0) {
        sh.shared_parts = 0;
    }
    for (uint32_t i = tid; i < (a.n_experts + 3) / 4; i += NV_UP_WARPS * 32) {
        mask[i] = 0;
    }
    if (!a.early) {
        pdl_wait();
    }
    nv_stage(a, xs);
    nv_shared_gate(a, sh.red);
    __syncthreads();
    if (a.early) {
        pdl_wait();
    }
    const bool tells = blockIdx.x == NV_TILES;
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
    const uint32_t tiles = sh.picks.n * NV_TILES, n = block < tiles ? (tiles - block - 1) / gridDim.x + 1 : 0;
    if (warp == NV_UP_WARPS - 1) {
        for (uint32_t l = 0; l < n && l < NV_SLOTS; ++l) {
            nv_up_ask(full, slots, mat, block, l, lane);
        }
    }
    if (tells) {
        nv_tell(a, cols, sh.picks.n);
    }
    if (warp == NV_UP_WARPS - 1) {
#pragma unroll 1
        for (uint32_t l = NV_SLOTS; l < n; ++l) {
            bar_wait(empty + l % NV_SLOTS * 8, (l / NV_SLOTS - 1) & 1);
            nv_up_ask(full, slots, mat, block, l, lane);
        }
        return;
    }
    if (mine) {
        nv_up_shared_tile<TF>(a, &sh.shared_parts, w, xs, parts, warp, lane);
    }
    bar_sync_some<NV_GROUPS * NV_PARTS * 32>(NV_GROUPS + 1);
    const uint32_t group = warp / NV_PARTS, part = warp % NV_PARTS;
    const uint32_t x0 = smem_addr(xs) + q * 16 + part * (NV_H * 2 / NV_PARTS);
    const uint32_t at = slots + g * (NV_H / 2) + part * (NV_H / 2 / NV_PARTS) + q * 16;
    const uint32_t st = slots + 2 * NV_CODES + g * (NV_H / 16) + part * (NV_H / 16 / NV_PARTS) + q * 2;
    uint32_t odd = 0;
#pragma unroll 1
    for (uint32_t l = group; l < n; l += NV_GROUPS) {
        const uint32_t u = block + l * gridDim.x, e = u / NV_TILES, tile = u - e * NV_TILES;
        const mr_cols &col = cols[e];
        const uint32_t x[1] = {x0 + col.row[g < col.n ? g : 0] * NV_XCOL};
        const uint32_t slot = l % NV_SLOTS, c = at + slot * NV_SLOT, sc = st + slot * NV_SLOT;
        float acc[1][4] = {};
        bar_wait(full + l * 8, 0);
#pragma unroll 1
        for (uint32_t i = 0; i < 5; ++i) {
            nv_step<1>(acc, lds128(c + i * 64), lds128(c + NV_CODES + i * 64), lds16(sc + i * 8),
                       lds16(sc + NV_SCALES + i * 8), x, i * 256);
        }
        __syncwarp();
        if (lane == 0) {
            bar_arrive(empty + slot * 8);
        }
        /* sums of four columns in two places by turns, of eight in one */
        constexpr uint32_t LANES = MANY ? 32 : 16;
        float4 *p = parts + (MANY ? 0 : odd * (NV_GROUPS * NV_PARTS * LANES)) + group * (NV_PARTS * LANES) +
                    (MANY ? lane : g * 2 + q);
        odd ^= 1;
        if (MANY) {
            bar_sync_some<NV_PARTS * 32>(group + 1);
        }
        if (MANY || q < 2) {
            p[part * LANES] = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
        }
        bar_sync_some<NV_PARTS * 32>(group + 1);
        if ((l / NV_GROUPS) % NV_PARTS == part && (MANY || q < 2)) {
            float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (uint32_t i = 0; i < NV_PARTS; ++i) {
                const float4 v = p[i * LANES];
                s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
            }
            nv_finish(a, s, mat[2 * e].factor, mat[2 * e + 1].factor, col, nv_unit(tile) + nv_in_unit(g), q);
        }
    }
}

/* ---- down ---- */

/* Of four rows each: group b of the block is rows b % NV_QUADS of expert b / NV_QUADS; four groups make a task, so that
 * two tasks take of an expert. An expert's rows of the block lie in a slot: codes, then block scales. */
#define NV_D_CODES (NV_D * NV_I / 2u)
#define NV_D_SCALES (NV_D * NV_I / 16u)
#define NV_D_SLOT (NV_D_CODES + NV_D_SCALES)
#define NV_D_WARPS 16u /* and one that asks */

template <int NB>
__device__ __forceinline__ void nv_down_task(uint32_t slot0, uint32_t slot1, const nv_mat *mat, const mr_cols *cols,
                                             uint32_t groups, uint32_t b0, const uint8_t *hs, float *res, uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    const uint32_t e0 = b0 / NV_QUADS, last = b0 + 3 < groups ? b0 + 3 : groups - 1, e1 = last / NV_QUADS;
    const uint32_t n0 = cols[e0].n, n1 = e1 != e0 ? cols[e1].n : 0;
    uint32_t x[NB], at[2], scales[2];
#pragma unroll
    for (int n = 0; n < NB; ++n) {
        /* one block of columns: the first expert's, then the second's; two: one each */
        const bool other = NB == 2 ? n == 1 : g >= n0 && g - n0 < n1;
        const uint32_t j = NB == 2 ? (g < (n ? n1 : n0) ? g : 0) : other ? g - n0 : g < n0 ? g : 0;
        x[n] = smem_addr(hs) + q * 16 + cols[other ? e1 : e0].item[j] * NV_HCOL;
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) { /* of a group past the end: the last */
        const uint32_t b = b0 + 2 * i + (g >> 2) < last ? b0 + 2 * i + (g >> 2) : last;
        const bool second = b >= (e0 + 1) * NV_QUADS;
        const uint32_t slot = second ? slot1 : slot0, r = (b - (second ? e1 : e0) * NV_QUADS) * 4 + (g & 3);
        at[i] = slot + r * (NV_I / 2) + q * 16;
        scales[i] = slot + NV_D_CODES + r * (NV_I / 16) + q * 2;
    }
    float acc[NB][4] = {};
#pragma unroll
    for (uint32_t s = 0; s < NV_I / 128; ++s) {
        nv_step<NB>(acc, lds128(at[0] + s * 64), lds128(at[1] + s * 64), lds16(scales[0] + s * 8),
                    lds16(scales[1] + s * 8), x, s * 256);
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
                const uint32_t to = item * NV_D + (b - e * NV_QUADS) * 4 + (g & 3);
                res[to] = f * acc[NB == 2 && second ? NB - 1 : 0][2 * i + z];
            }
        }
    }
}

__host__ __device__ constexpr uint32_t nv_down_slots(bool many)
{
    return many ? 14 : 20;
}

/* MANY: more than four rows. */
template <int TF, bool MANY> __global__ void __maxnreg__(64) nv_down(const __grid_constant__ nv_args a)
{
    using S = nv_shared<TF>;
    constexpr uint32_t W = NV_D_WARPS, SLOTS = nv_down_slots(MANY);
    extern __shared__ __align__(128) uint4 sm4[];
    __shared__ uint64_t bars[8 * NV_MAX_K + SLOTS]; /* an expert is there; a slot is free */
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t items = a.m_rows * a.k, d0 = blockIdx.x * NV_D;
    uint8_t *hs = (uint8_t *)sm4 + SLOTS * NV_D_SLOT;
    nv_mat *mat = (nv_mat *)(hs + a.m_rows * (a.k + 1) * NV_HCOL);
    mr_cols *cols = (mr_cols *)(mat + items);
    float *wt = (float *)(cols + items), *res = wt + items; /* [row * k + slot][NV_D], then [row][part][NV_D] */
    const uint32_t n_picks = __ldcg(&a.list->n);
    if (tid < items) {
        wt[tid] = __ldcg(a.weight + tid);
    }
    for (uint32_t i = tid; i < items * (NV_MAT_WORDS + NV_COLS_WORDS); i += (W + 1) * 32) {
        const uint32_t c = i - items * NV_MAT_WORDS;
        if (i < items * NV_MAT_WORDS) {
            ((uint32_t *)mat)[i] = __ldcg((const uint32_t *)a.list->mat + i);
        } else {
            ((uint32_t *)cols)[c] = __ldcg((const uint32_t *)a.list->cols + c);
        }
    }
    const uint32_t slots = smem_addr(sm4), full = smem_addr(bars), free_ = full + 8 * NV_MAX_K * 8;
    if (tid < 8 * NV_MAX_K) {
        bar_init(full + tid * 8, 1);
        if (tid < SLOTS) {
            bar_init(free_ + tid * 8, 2);
        }
        bar_init_done();
    }
    __syncthreads();
    if (warp == W) {
        for (uint32_t e = 0; e < n_picks; ++e) {
            const uint32_t slot = e % SLOTS, bar = full + e * 8, to = slots + slot * NV_D_SLOT;
            if (e >= SLOTS) {
                bar_wait(free_ + slot * 8, (e / SLOTS - 1) & 1);
            }
            if (lane == 0) {
                bar_expect(bar, NV_D_SLOT);
            }
            __syncwarp();
            if (lane < 2) {
                bulk_load(lane ? to + NV_D_CODES : to,
                          lane ? mat[e].scale + d0 * (NV_I / 16) : mat[e].codes + d0 * (NV_I / 2),
                          lane ? NV_D_SCALES : NV_D_CODES, bar);
            }
        }
        return;
    }
    const uint32_t groups = n_picks * NV_QUADS, n_tasks = (groups + 3) / 4;
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
    bar_sync_some<W * 32>(1);
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
#pragma unroll 1
    for (uint32_t task = warp; task < n_tasks; task += W) {
        const uint32_t b0 = 4 * task, e0 = b0 / NV_QUADS, e1 = (b0 + 3 < groups ? b0 + 3 : groups - 1) / NV_QUADS;
        const uint32_t i0 = e0 % SLOTS, i1 = e1 % SLOTS;
        bar_wait(full + e0 * 8, 0);
        bar_wait(full + e1 * 8, 0);
        const uint32_t s0 = slots + i0 * NV_D_SLOT, s1 = slots + i1 * NV_D_SLOT;
        if (MANY && e1 != e0 && cols[e0].n + cols[e1].n > 8) {
            nv_down_task<2>(s0, s1, mat, cols, groups, b0, hs, res, lane);
        } else {
            nv_down_task<1>(s0, s1, mat, cols, groups, b0, hs, res, lane);
        }
        __syncwarp();
        if (lane < 2 && (lane == 0 || e1 != e0)) {
            bar_arrive(free_ + (lane ? i1 : i0) * 8);
        }
    }
    bar_sync_some<W * 32>(1);
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

static uint32_t nv_up_smem(const nv_args &a)
{
    const uint32_t items = a.m_rows * a.k, bytes = (a.n_experts + 3) / 4 * 4;
    return (uint32_t)(NV_SLOTS * NV_SLOT + a.m_rows * NV_XCOL + 16 * 512 +
                      items * (2 * sizeof(nv_mat) + sizeof(mr_cols)) + 2 * bytes);
}
static uint32_t nv_down_smem(const nv_args &a, uint32_t parts)
{
    const uint32_t items = a.m_rows * a.k;
    return (uint32_t)(nv_down_slots(a.m_rows > 4) * NV_D_SLOT + a.m_rows * (a.k + 1) * NV_HCOL +
                      items * (sizeof(nv_mat) + sizeof(mr_cols) + 4) + (items + parts * a.m_rows) * NV_D * 4);
}

template <int TF> static int nv_run(struct qx_queue *q, const nv_args &a)
{
    const uint32_t su = nv_up_smem(a), sd = nv_down_smem(a, nv_shared<TF>::D_PARTS);
    const dim3 up((unsigned)q->n_sm), down(NV_BLOCKS), u(NV_UP_WARPS * 32), d((NV_D_WARPS + 1) * 32);
    const int r = a.m_rows <= 4 ? launch(q, "moe", nv_up<TF, false>, up, u, su, a)
                                : launch(q, "moe", nv_up<TF, true>, up, u, su, a);
    if (r) {
        return r;
    }
    return a.m_rows <= 4 ? launch(q, "moe", nv_down<TF, false>, down, d, sd, a)
                         : launch(q, "moe", nv_down<TF, true>, down, d, sd, a);
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
