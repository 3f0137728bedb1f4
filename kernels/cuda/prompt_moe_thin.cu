/* prompt_moe_thin.cu: NVFP4 experts of prompts that give an expert few rows: the bytes of the weights take the
 * time. A block does a whole entry of the list: gate and up, then down, whose input stays in shared memory.
 *
 * Four warpgroups multiply, each a tile of 64 weight rows at a time: codes are decoded into registers, the A
 * operand; the tokens, at most 32, are the N side. Of three warps more, two fill a ring of tiles' codes and
 * scales, without a stop from entry to entry (bulk copies of row pieces were far slower: a warp issues them one by
 * one); the third gathers the tokens, 256 of K at a time, again for every round of four tiles of gate and up.
 *
 * Codes lie in rows 64 bytes modulo 128 apart: a lane (g, q) takes 16 bytes of row g, codes 32 q .. 32 q + 31 of
 * each 128, and a quarter warp meets no bank twice. Tokens lie in the order this gives (GM_ORD_NV2). */
#include "prompt_moe.cuh"
#include "prompt.h"

enum {
    TH_WG = 4,             /* multiplying warpgroups */
    TH_SLOTS = 6,          /* of the ring of codes */
    TH_PITCH = 320,        /* bytes from row to row of gate and up; down's rows lie as they are */
    TH_CODES = 64 * TH_PITCH,
    TH_SLOT = TH_CODES + 64 * 40,
    TH_BLOCK = PMOE_THIN * 128,  /* tokens of 64 of K */
    TH_B = 4 * TH_BLOCK,         /* a slot of the ring of tokens */
    TH_B_SLOTS = 3,
    TH_MAX_INTER = 640,
    TH_H0 = TH_B_SLOTS * TH_B,
    TH_RING0 = TH_H0 + TH_MAX_INTER / 64 * TH_BLOCK,
    TH_SMEM = TH_RING0 + TH_SLOTS * TH_SLOT + 1024,
    TH_THREADS = 128 * TH_WG + 96
};

__device__ __forceinline__ void multiply_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(TH_WG * 128) : "memory");
}
/* Where the two rings stand. */
struct th_ring {
    uint32_t full, empty, smem; /* barriers of slot 0, 8 bytes each */
    uint32_t slot, phase;
    template <int N> __device__ __forceinline__ void step(uint32_t by)
    {
        slot += by;
        while (slot >= (uint32_t)N) {
            slot -= N;
            phase ^= 1;
        }
    }
};

struct th_shape {
    uint32_t piece, n_pieces;    /* of K of gate and up */
    uint32_t up_tiles, down_tiles;
};
__device__ __forceinline__ th_shape th_shape_of(const pmoe_thin_args &a)
{
    th_shape s;
    s.piece = a.hidden % 512 ? 256 : 512;
    s.n_pieces = a.hidden / s.piece;
    s.up_tiles = a.inter / 32;
    s.down_tiles = a.hidden / 64;
    return s;
}

/* ---- copying -------------------------------------------------------------------------------- */

/* The codes' copying warps: `warp` 0 of gate, 1 of up. */
__device__ void th_codes(const pmoe_thin_args &a, th_ring r, uint32_t warp, uint32_t lane, uint32_t n_list)
{
    const th_shape s = th_shape_of(a);
    const uint64_t policy = read_once();
    const uint32_t row_bytes = a.hidden / 2, row_scales = a.hidden / 16, part = s.piece / 2, part_scales = s.piece / 16;
    const uint32_t units = part / 16, rows = 32 / units, row = lane / units, u = lane % units; /* of 16 bytes */
    const uint32_t to_codes = (warp * 32 + row) * TH_PITCH + u * 16, to_scales = TH_CODES + (warp * 32 + lane) * 32;
    for (uint32_t i = blockIdx.x; i < n_list; i += gridDim.x) {
        const pmoe_ent *e = a.list + i;
        if (__ldcg(&e->n) == 0) {
            continue;
        }
        const uint8_t *codes = (const uint8_t *)__ldcg((const uint64_t *)&e->code[warp]) + (uint64_t)row * row_bytes + u * 16;
        const uint8_t *scales = (const uint8_t *)__ldcg((const uint64_t *)&e->scale[warp]) + (uint64_t)lane * row_scales;
        const uint8_t *down = (const uint8_t *)__ldcg((const uint64_t *)&e->code[2]);
        const uint8_t *down_scales = (const uint8_t *)__ldcg((const uint64_t *)&e->scale[2]);
        for (uint32_t t0 = 0; t0 < s.up_tiles; t0 += TH_WG) {
            for (uint32_t p = 0; p < s.n_pieces; ++p) {
                for (uint32_t t = t0; t < t0 + TH_WG && t < s.up_tiles; ++t) {
                    const uint32_t full = r.full + 8 * r.slot, to = r.smem + r.slot * TH_SLOT;
                    const uint8_t *c = codes + (uint64_t)(t * 32) * row_bytes + p * part;
                    const uint8_t *sc = scales + (uint64_t)(t * 32) * row_scales + p * part_scales;
                    bar_wait(r.empty + 8 * r.slot, r.phase ^ 1);
#pragma unroll 8
                    for (uint32_t j = 0; j < units; ++j) {
                        copy16_once(to + to_codes + j * rows * TH_PITCH, c + (uint64_t)(j * rows) * row_bytes, policy);
                    }
                    copy16(to + to_scales, sc, 16);
                    if (part_scales > 16) {
                        copy16(to + to_scales + 16, sc + 16, 16);
                    }
                    copy_arrive(full);
                    if (warp + lane == 0) { /* in the announcement's place */
                        bar_arrive(full);
                    }
                    r.step<TH_SLOTS>(1);
                }
            }
        }
        for (uint32_t t = 0; t < s.down_tiles; ++t) {
            const uint32_t full = r.full + 8 * r.slot, to = r.smem + r.slot * TH_SLOT;
            bar_wait(r.empty + 8 * r.slot, r.phase ^ 1);
            if (warp + lane == 0) {
                bar_expect(full, 64 * (a.inter / 2 + a.inter / 16));
                copy_bulk_once(to, down + (uint64_t)t * 64 * (a.inter / 2), 64 * (a.inter / 2), full, policy);
                copy_bulk_once(to + TH_CODES, down_scales + (uint64_t)t * 64 * (a.inter / 16), 64 * (a.inter / 16), full,
                               policy);
            }
            copy_arrive(full);
            r.step<TH_SLOTS>(1);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ void th_tokens(const pmoe_thin_args &a, th_ring r, uint32_t lane, uint32_t n_list)
{
    const th_shape s = th_shape_of(a);
    const uint32_t rounds = (s.up_tiles + TH_WG - 1) / TH_WG, parts = a.hidden / 256, b = lane / 8, u = lane & 7;
    const uint8_t *m = a.m + (uint64_t)b * a.m_rows * 128;
    for (uint32_t i = blockIdx.x; i < n_list; i += gridDim.x) {
        const uint32_t n = __ldcg(&a.list[i].n), start = __ldcg(&a.list[i].start);
        if (n == 0) {
            continue;
        }
        const uint32_t mine = lane < n ? __ldcg(a.row + start + lane) : 0;
        for (uint32_t k = 0; k < rounds; ++k) {
            for (uint32_t p = 0; p < parts; ++p) {
                const uint32_t full = r.full + 8 * r.slot, to = r.smem + r.slot * TH_B + b * TH_BLOCK;
                bar_wait(r.empty + 8 * r.slot, r.phase ^ 1);
#pragma unroll 4
                for (uint32_t j = 0; j < n; ++j) {
                    const uint32_t row = __shfl_sync(0xffffffffu, mine, j);
                    copy16(to + j * 128 + ((u ^ (j & 7)) * 16),
                           m + ((uint64_t)p * 4 * a.m_rows + row) * 128 + ((u ^ (row & 7)) * 16), 16);
                }
                copy_arrive(full);
                r.step<TH_B_SLOTS>(1);
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- multiplying ---------------------------------------------------------------------------- */

/* 32 of K: word x of row g, y of the other one, their scales; tokens at b. What was multiplied before is done at
 * the return. */
template <int N>
__device__ __forceinline__ void th_part(float *acc, uint32_t (&f)[2][4], uint32_t x, uint32_t y, uint32_t p0, uint32_t p1,
                                        uint64_t b, bool first)
{
    gm_nibbles(f[0], f[1], 0, x, p0);
    gm_nibbles(f[0], f[1], 1, y, p1);
    wg_fence();
    wg<N>::rs(acc, f[0], b, !first);
    wg<N>::rs(acc, f[1], b + 2, 1);
    wg_commit();
    wg_wait<1>();
}

/* 128 of K of rows at c0 and c1, scales at s0 and s1. */
template <int N>
__device__ __forceinline__ void th_step(float *acc, uint32_t (&f)[2][2][4], uint32_t c0, uint32_t c1, uint32_t s0, uint32_t s1,
                                        uint32_t b, bool first)
{
    const uint4 x = lds128(c0), y = lds128(c1);
    float2 u = e4m3x2_f((uint16_t)lds16(s0)), v = e4m3x2_f((uint16_t)lds16(s1));
    /* the scale carries 2^100: what is left is 2^-26 */
    u.x *= 0x1p100f, u.y *= 0x1p100f, v.x *= 0x1p100f, v.y *= 0x1p100f;
    uint32_t p0 = pack_bf16(u.x, u.x), p1 = pack_bf16(v.x, v.x);
    const uint64_t d = wg_desc(b), d2 = wg_desc(b + TH_BLOCK);
    th_part<N>(acc, f[0], x.x, y.x, p0, p1, d, first);
    th_part<N>(acc, f[1], x.y, y.y, p0, p1, d + 4, false);
    p0 = pack_bf16(u.y, u.y), p1 = pack_bf16(v.y, v.y);
    th_part<N>(acc, f[0], x.z, y.z, p0, p1, d2, false);
    th_part<N>(acc, f[1], x.w, y.w, p0, p1, d2 + 4, false);
}

/* Up to N tokens of an entry. r: the ring of codes at the entry's first slot, b: that of tokens. */
template <int N>
__device__ __forceinline__ void th_entry(const pmoe_thin_args &a, const th_shape &s, const pmoe_ent &e, th_ring &r, th_ring &b,
                                         uint32_t h)
{
    const uint32_t w = threadIdx.x / 32, lane = threadIdx.x & 31, wgi = w / 4, g = lane >> 2, q = lane & 3;
    const uint32_t ww = w & 3;
    const uint32_t per = s.piece / 256, parts = a.hidden / 256;
    {
        const uint32_t c = (ww * 8 + g) * TH_PITCH + q * 16, sc = TH_CODES + (ww * 8 + g) * 32 + q * 2;
        for (uint32_t t0 = 0; t0 < s.up_tiles; t0 += TH_WG) {
            const uint32_t in = s.up_tiles - t0 < TH_WG ? s.up_tiles - t0 : TH_WG;
            if (wgi >= in) { /* no tile: the tokens pass by */
                for (uint32_t p = 0; p < parts; ++p) {
                    bar_wait(b.full + 8 * b.slot, b.phase);
                    if (lane == 0) {
                        bar_arrive(b.empty + 8 * b.slot);
                    }
                    b.template step<TH_B_SLOTS>(1);
                }
                r.template step<TH_SLOTS>(in * s.n_pieces);
                continue;
            }
            uint32_t f[2][2][4];
            float acc[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                acc[i] = 0.0f;
            }
            r.template step<TH_SLOTS>(wgi);
            uint32_t prev = 0;
            for (uint32_t p = 0; p < s.n_pieces; ++p) {
                bar_wait(r.full + 8 * r.slot, r.phase);
                const uint32_t st = r.smem + r.slot * TH_SLOT;
                for (uint32_t o = 0; o < per; ++o) {
                    bar_wait(b.full + 8 * b.slot, b.phase);
                    fence_async();
                    const uint32_t at = b.smem + b.slot * TH_B;
                    const bool first = p + o == 0;
                    const uint32_t k = st + c + o * 128, ks = st + sc + o * 16;
                    th_step<N>(acc, f, k, k + 32 * TH_PITCH, ks, ks + 32 * 32, at, first);
                    if (!first && lane == 0) { /* what was multiplied before this step is done */
                        bar_arrive(b.empty + 8 * prev);
                    }
                    th_step<N>(acc, f, k + 64, k + 64 + 32 * TH_PITCH, ks + 8, ks + 8 + 32 * 32, at + 2 * TH_BLOCK, false);
                    prev = b.slot;
                    b.template step<TH_B_SLOTS>(1);
                }
                __syncwarp();
                if (lane == 0) {
                    bar_arrive(r.empty + 8 * r.slot);
                }
                r.template step<TH_SLOTS>(p + 1 < s.n_pieces ? in : in - wgi);
            }
            wg_wait<0>();
            wg_pin<N / 2>(acc);
            if (lane == 0) {
                bar_arrive(b.empty + 8 * prev);
            }
            const uint32_t i = (t0 + wgi) * 32 + ww * 8 + g, k = i & 127, x = k & 31, p = (x >> 3) * 4 + (x & 3);
            const uint32_t to = h + ((i >> 7) * 2 + (p >> 3)) * TH_BLOCK + (2 * (k >> 5) + ((x >> 2) & 1)) * 2;
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
#pragma unroll
                for (int o = 0; o < 2; ++o) {
                    const uint32_t col = 8 * j + 2 * q + o;
                    const float v = gm_silu(acc[4 * j + o] * e.factor[0]) * (acc[4 * j + 2 + o] * e.factor[1]);
                    sts16(to + col * 128 + (((p & 7) ^ (col & 7)) * 16), (uint16_t)pack_bf16(v, v));
                }
            }
        }
    }
    fence_async();
    multiply_sync();
    const uint32_t pitch = a.inter / 2, pitch_s = a.inter / 16;
    const uint32_t c = (ww * 16 + g) * pitch + q * 16, sc = TH_CODES + (ww * 16 + g) * pitch_s + q * 2;
    const uint32_t mine = wgi < s.down_tiles ? wgi : s.down_tiles;
    r.template step<TH_SLOTS>(mine);
    for (uint32_t t = wgi; t < s.down_tiles; t += TH_WG) {
        uint32_t f[2][2][4];
        float acc[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            acc[i] = 0.0f;
        }
        bar_wait(r.full + 8 * r.slot, r.phase);
        const uint32_t st = r.smem + r.slot * TH_SLOT;
        for (uint32_t k = 0; k < a.inter / 128; ++k) {
            const uint32_t x = st + c + k * 64, xs = st + sc + k * 8;
            th_step<N>(acc, f, x, x + 8 * pitch, xs, xs + 8 * pitch_s, h + k * 2 * TH_BLOCK, k == 0);
        }
        __syncwarp();
        if (lane == 0) {
            bar_arrive(r.empty + 8 * r.slot);
        }
        r.template step<TH_SLOTS>(t + TH_WG < s.down_tiles ? TH_WG : s.down_tiles - t);
        wg_wait<0>();
        wg_pin<N / 2>(acc);
        float *out = a.out + (uint64_t)(e.out + 2 * q) * a.hidden + t * 64 + ww * 16 + g;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int o = 0; o < 2; ++o) {
                if (8 * j + 2 * q + o < e.n) {
                    float *y = out + (uint64_t)(8 * j + o) * a.hidden;
                    y[0] = acc[4 * j + o] * e.factor[2];
                    y[8] = acc[4 * j + 2 + o] * e.factor[2];
                }
            }
        }
    }
    multiply_sync(); /* before the next entry's values take this one's place */
}

__global__ void __launch_bounds__(TH_THREADS, 1) pmoe_thin_kernel(const __grid_constant__ pmoe_thin_args a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t th_sm[];
    __shared__ uint64_t bars[2 * (TH_SLOTS + TH_B_SLOTS)];
    pdl_next();
    const uint32_t base = (smem_addr(th_sm) + 1023u) & ~1023u;
    th_ring r = {smem_addr(bars), smem_addr(bars + TH_SLOTS), base + TH_RING0, 0, 0};
    th_ring b = {smem_addr(bars + 2 * TH_SLOTS), smem_addr(bars + 2 * TH_SLOTS + TH_B_SLOTS), base, 0, 0};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < TH_SLOTS; ++i) {
            bar_init(r.full + 8 * i, 65); /* two warps' copies, and the announcement of the bulk ones */
            bar_init(r.empty + 8 * i, 4);
        }
        for (uint32_t i = 0; i < TH_B_SLOTS; ++i) {
            bar_init(b.full + 8 * i, 32);
            bar_init(b.empty + 8 * i, TH_WG * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    const uint32_t n_list = __ldcg(a.n_list);
    const uint32_t lane = threadIdx.x & 31;
    if (threadIdx.x >= TH_WG * 128 + 64) {
        th_tokens(a, b, lane, n_list);
    } else if (threadIdx.x >= TH_WG * 128) {
        th_codes(a, r, threadIdx.x / 32 - TH_WG * 4, lane, n_list);
    } else {
        const th_shape s = th_shape_of(a);
        for (uint32_t i = blockIdx.x; i < n_list; i += gridDim.x) {
            const pmoe_ent e = pmoe_get(a.list + i);
            if (e.n == 0) {
                continue;
            }
            if (e.n <= 24) {
                th_entry<24>(a, s, e, r, b, base + TH_H0);
            } else {
                th_entry<32>(a, s, e, r, b, base + TH_H0);
            }
        }
    }
#else
    (void)a;
#endif
}

bool pmoe_thin_takes(uint32_t hidden, uint32_t inter)
{
    return hidden % 256 == 0 && inter % 128 == 0 && inter <= TH_MAX_INTER;
}

int pmoe_thin(struct qx_queue *q, pmoe_thin_args a)
{
    const uint32_t n = a.most < (uint32_t)q->n_sm ? a.most : (uint32_t)q->n_sm;
    return launch(q, "moe", pmoe_thin_kernel, dim3(n), dim3(TH_THREADS), TH_SMEM, a);
}
