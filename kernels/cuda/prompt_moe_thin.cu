/* prompt_moe_thin.cu: NVFP4 experts of prompts that give an expert few rows: the bytes of the weights take the
 * time. One launch, whose work is rounds of four tiles of 64 weight rows with all tokens of an entry, at most 64: first
 * those of gate and up, whose values go to a buffer, then those of down, each once the entry's values are complete.
 * Blocks take the next round as they go.
 *
 * Four warpgroups multiply, each a tile: codes are decoded into registers, the A operand, while the products of those
 * before are under way; the tokens are the N side. Of four warps more, two fill a ring of tiles' codes and scales, 256
 * of K a slot, without a stop from round to round (bulk copies of row pieces are far slower: a warp issues them one by
 * one); the others gather the tokens. The first of them also takes the rounds and tells the others.
 *
 * A lane (g, q) takes 16 bytes of row g, codes 32 q .. 32 q + 31 of each 128; odd rows' halves of 64 bytes have
 * changed places, so that a quarter warp meets no bank twice. Tokens lie in the order this gives (GM_ORD_NV2). */
#include "prompt_moe.cuh"
#include "prompt.h"

enum {
    TH_WG = 4,                   /* multiplying warpgroups */
    TH_PIECE = 256,              /* of K a slot */
    TH_CODES = 64 * TH_PIECE / 2,
    TH_SCALES = TH_PIECE / 16,   /* bytes a row */
    TH_SLOT = TH_CODES + 64 * TH_SCALES,
    TH_SLOTS = 13,               /* of the ring of codes */
    TH_BLOCK = PMOE_THIN * 128,  /* tokens of 64 of K */
    TH_B = TH_PIECE / 64 * TH_BLOCK, /* a slot of the ring of tokens */
    TH_B_SLOTS = 3,
    TH_ROUNDS = 4,               /* told ahead */
    TH_READERS = TH_WG * 4 + 4,  /* warps that are told */
    TH_SMEM = TH_B_SLOTS * TH_B + TH_SLOTS * TH_SLOT + 1024,
    TH_THREADS = 128 * TH_WG + 128
};
static_assert(TH_SMEM <= 226 << 10, "fits");

/* Where a ring stands. */
struct th_ring {
    uint32_t full, empty, smem; /* barriers of slot 0, 8 bytes each */
    uint32_t slot, phase;
    /* by at most N */
    template <int N> __device__ __forceinline__ void step(uint32_t by)
    {
        slot += by;
        if (slot >= (uint32_t)N) {
            slot -= N;
            phase ^= 1;
        }
    }
};

/* Widths known when this is compiled, so that rows lie at fixed distances: addresses worked out row by row kept the
 * copying warps busier than they could be. 0: any. */
template <uint32_t HIDDEN, uint32_t INTER> struct th_width {
    static __device__ __forceinline__ uint32_t hidden(const pmoe_thin_args &a)
    {
        return HIDDEN ? HIDDEN : a.hidden;
    }
    static __device__ __forceinline__ uint32_t inter(const pmoe_thin_args &a)
    {
        return INTER ? INTER : a.inter;
    }
};

/* What the rounds of up and of down have in common: round x is round x % rounds of entry x / rounds. */
struct th_work {
    uint32_t rounds, tiles;
    uint32_t k, pieces; /* of K */
};
template <class S, bool DOWN> __device__ __forceinline__ th_work th_shape(const pmoe_thin_args &a)
{
    th_work w;
    w.tiles = DOWN ? S::hidden(a) / 64 : S::inter(a) / 32;
    w.rounds = (w.tiles + TH_WG - 1) / TH_WG;
    w.k = DOWN ? S::inter(a) : S::hidden(a);
    w.pieces = (w.k + TH_PIECE - 1) / TH_PIECE;
    return w;
}

/* A round: tiles t0 .. t0 + in - 1 of entry i, which has n tokens from row `start` on. in 0: there is none left. */
struct th_round {
    uint32_t in, t0, n, start, out, i, down;
    float factor[3];
};
struct th_told {
    th_round round[TH_ROUNDS];
    uint64_t full[TH_ROUNDS], empty[TH_ROUNDS];
};
/* Waits for the next one, which stays until th_done. */
__device__ __forceinline__ const th_round &th_next(const th_told &told, const th_ring &at)
{
    bar_wait(at.full + 8 * at.slot, at.phase);
    return told.round[at.slot];
}
__device__ __forceinline__ void th_done(th_ring &at)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        bar_arrive(at.empty + 8 * at.slot);
    }
    at.step<TH_ROUNDS>(1);
}
/* Round x, or the end, to those who wait for it. One warp. */
template <class S>
__device__ __forceinline__ void th_tell(const pmoe_thin_args &a, uint32_t n_list, th_told &told, const th_ring &at, uint32_t x)
{
    th_work w = th_shape<S, false>(a);
    th_round r = {};
    r.down = x >= n_list * w.rounds;
    if (r.down) {
        x -= n_list * w.rounds;
        w = th_shape<S, true>(a);
    }
    if (x < n_list * w.rounds) {
        r.i = x / w.rounds;
        r.t0 = (x - r.i * w.rounds) * TH_WG;
        r.in = w.tiles - r.t0 < TH_WG ? w.tiles - r.t0 : TH_WG;
        const pmoe_ent *e = a.list + r.i;
        r.n = __ldcg(&e->n);
        r.start = __ldcg(&e->start);
        r.out = __ldcg(&e->out);
#pragma unroll
        for (int j = 0; j < 3; ++j) {
            r.factor[j] = __ldcg(&e->factor[j]);
        }
    }
    bar_wait(at.empty + 8 * at.slot, at.phase ^ 1);
    if ((threadIdx.x & 31) == 0) {
        told.round[at.slot] = r;
        bar_arrive(at.full + 8 * at.slot);
    }
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void add_release(uint32_t *p, uint32_t v)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* ---- copying -------------------------------------------------------------------------------- */

/* Warp 0 copies the tiles' rows of gate, 1 those of up; of down each half of them. */
template <class S, bool DOWN>
__device__ __forceinline__ void th_codes(const pmoe_thin_args &a, const th_round &rd, th_ring &r, uint32_t warp, uint64_t policy)
{
    const th_work w = th_shape<S, DOWN>(a);
    const uint32_t lane = threadIdx.x & 31, row = lane / 8, u = lane & 7; /* units of 16 bytes */
    const uint32_t row_bytes = w.k / 2, row_scales = w.k / 16;
    const uint32_t to_codes = (warp * 32 + row) * (TH_PIECE / 2) + ((u ^ (row & 1) * 4) * 16); /* row + 4 j: the same parity */
    const uint32_t to_scales = TH_CODES + (warp * 32 + lane) * TH_SCALES;
    const pmoe_ent *e = a.list + rd.i;
    const uint32_t m = DOWN ? 2 : warp;
    const uint64_t first = DOWN ? rd.t0 * 64 + warp * 32 : rd.t0 * 32;
    const uint8_t *codes = (const uint8_t *)__ldcg((const uint64_t *)&e->code[m]) + (first + row) * row_bytes + u * 16;
    const uint8_t *scales = (const uint8_t *)__ldcg((const uint64_t *)&e->scale[m]) + (first + lane) * row_scales;
    for (uint32_t p = 0; p < w.pieces; ++p) {
        const bool whole = !DOWN || p * TH_PIECE + TH_PIECE <= w.k;
        const uint8_t *c = codes + p * (TH_PIECE / 2), *sc = scales + p * TH_SCALES;
        for (uint32_t t = 0; t < rd.in; ++t) {
            const uint32_t to = r.smem + r.slot * TH_SLOT;
            bar_wait(r.empty + 8 * r.slot, r.phase ^ 1);
            if (whole || u < 4) {
#pragma unroll
                for (uint32_t j = 0; j < 8; ++j) {
                    copy16_once(to + to_codes + j * 4 * (TH_PIECE / 2), c + j * 4 * row_bytes, policy);
                }
            }
            if (!DOWN) {
                copy16(to + to_scales, sc, 16);
            } else { /* rows of scales need not begin at multiples of 16 */
                copy8(to + to_scales, sc);
                if (whole) {
                    copy8(to + to_scales + 8, sc + 8);
                }
            }
            copy_arrive(r.full + 8 * r.slot);
            r.step<TH_SLOTS>(1);
            c += (uint64_t)(DOWN ? 64 : 32) * row_bytes;
            sc += (DOWN ? 64 : 32) * row_scales;
        }
    }
}
/* Warp 0 also takes the rounds. */
template <class S> __device__ void th_copy_codes(const pmoe_thin_args &a, th_told &told, th_ring at, th_ring r, uint32_t warp)
{
    const uint64_t policy = l2_read_once();
    const uint32_t n_list = __ldcg(a.n_list);
    uint32_t x = blockIdx.x;
    for (;;) {
        if (warp == 0) {
            th_tell<S>(a, n_list, told, at, x);
        }
        const th_round rd = th_next(told, at);
        th_done(at);
        if (rd.in == 0) {
            break;
        }
        if (warp == 0) { /* the one after it, on its way while this one is copied */
            x = (threadIdx.x & 31) == 0 ? gridDim.x + atomicAdd(a.taken, 1u) : 0;
        }
        if (rd.n && rd.down) {
            th_codes<S, true>(a, rd, r, warp, policy);
        } else if (rd.n) {
            th_codes<S, false>(a, rd, r, warp, policy);
        }
        x = __shfl_sync(0xffffffffu, x, 0);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Two warps, every other token each. */
template <class S, bool DOWN>
__device__ __forceinline__ void th_tokens(const pmoe_thin_args &a, uint32_t n, uint32_t start, th_ring &r, uint32_t warp)
{
    const uint32_t k = DOWN ? S::inter(a) : S::hidden(a), pieces = (k + TH_PIECE - 1) / TH_PIECE;
    const uint32_t lane = threadIdx.x & 31, b = lane / 8, u = lane & 7, rows = DOWN ? a.h_rows : a.m_rows;
    const uint8_t *from = (DOWN ? a.h : a.m) + (uint64_t)b * rows * 128;
    const uint32_t mine = 2 * lane + warp; /* the lane-th token of this warp */
    const uint32_t row_of = mine >= n ? 0 : DOWN ? start + mine : __ldcg(a.row + start + mine);
    for (uint32_t p = 0; p < pieces; ++p) {
        const uint32_t to = r.smem + r.slot * TH_B + b * TH_BLOCK;
        const uint8_t *s = from + (uint64_t)p * (TH_PIECE / 64) * rows * 128;
        const bool in = p * TH_PIECE + b * 64 < k;
        bar_wait(r.empty + 8 * r.slot, r.phase ^ 1);
#pragma unroll 4
        for (uint32_t j = 0; 2 * j + warp < n; ++j) {
            const uint32_t row = __shfl_sync(0xffffffffu, row_of, j), col = 2 * j + warp;
            if (in) {
                copy16(to + col * 128 + ((u ^ (col & 7)) * 16), s + (uint64_t)row * 128 + ((u ^ (row & 7)) * 16), 16);
            }
        }
        copy_arrive(r.full + 8 * r.slot);
        r.step<TH_B_SLOTS>(1);
    }
}
template <class S> __device__ void th_copy_tokens(const pmoe_thin_args &a, th_told &told, th_ring at, th_ring r, uint32_t warp)
{
    for (;;) {
        const th_round &rd = th_next(told, at);
        const uint32_t in = rd.in, n = rd.n, start = rd.start, down = rd.down;
        const uint32_t *done = &a.list[rd.i].done;
        th_done(at);
        if (in == 0) {
            break;
        }
        if (n && down) {
            /* all rounds of up are taken by then, and who has taken one waits for nobody */
            const uint32_t need = S::inter(a) / 32 * 4;
            while (load_acquire(done) < need) {
                __nanosleep(64);
            }
            th_tokens<S, true>(a, n, start, r, warp);
        } else if (n) {
            th_tokens<S, false>(a, n, start, r, warp);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- multiplying ---------------------------------------------------------------------------- */

/* 32 of K: words x of row g, y of the other one, their scales; tokens at d. The products before these are done at the
 * return, these under way: f is theirs until then. */
template <int N>
__device__ __forceinline__ void th_part(float *acc, uint32_t (&f)[2][4], uint32_t x, uint32_t y, uint32_t p0, uint32_t p1,
                                        uint64_t d, bool first)
{
    gm_nibbles(f[0], f[1], 0, x, p0);
    gm_nibbles(f[0], f[1], 1, y, p1);
    wg_fence();
    wg<N>::rs(acc, f[0], d, !first);
    wg<N>::rs(acc, f[1], d + 2, 1);
    wg_commit();
    wg_wait<1>();
}

/* 128 of K of rows at c0 and c1, scales at s0 and s1. */
template <int N>
__device__ __forceinline__ void th_step(float *acc, uint32_t (&f)[2][2][4], uint32_t c0, uint32_t c1, uint32_t s0, uint32_t s1,
                                        uint64_t d, bool first)
{
    const uint4 x = lds128(c0), y = lds128(c1);
    float2 u = e4m3x2_f((uint16_t)lds16(s0)), v = e4m3x2_f((uint16_t)lds16(s1));
    /* the scale carries 2^100: what is left is 2^-26 */
    u.x *= 0x1p100f, u.y *= 0x1p100f, v.x *= 0x1p100f, v.y *= 0x1p100f;
    uint32_t p0 = pack_bf16(u.x, u.x), p1 = pack_bf16(v.x, v.x);
    th_part<N>(acc, f[0], x.x, y.x, p0, p1, d, first);
    th_part<N>(acc, f[1], x.y, y.y, p0, p1, d + 4, false);
    p0 = pack_bf16(u.y, u.y), p1 = pack_bf16(v.y, v.y);
    d += TH_BLOCK / 16;
    th_part<N>(acc, f[0], x.z, y.z, p0, p1, d, false);
    th_part<N>(acc, f[1], x.w, y.w, p0, p1, d + 4, false);
}

/* The same for every lane, and known to be. */
__device__ __forceinline__ uint32_t uniform(uint32_t v)
{
    return __shfl_sync(0xffffffffu, v, 0);
}

/* silu(gate) up of inner value i to its place in the rows of h. Of each pair of lanes one writes the even tokens. */
template <int N>
__device__ __forceinline__ void th_put_up(const pmoe_thin_args &a, const th_round &rd, const float *acc, uint32_t i,
                                          uint32_t q)
{
    const uint32_t k = i & 127, x = k & 31, p = (x >> 3) * 4 + (x & 3);
    const bool second = x & 4;
    const uint32_t row = rd.start + 2 * q + (second ? 1 : 0);
    uint8_t *h = a.h + gm_at(a.h_rows, row, (i >> 7) * 2 + (p >> 3), p & 7) + (k >> 5) * 4; /* row + 8 j: the same swizzle */
    const float f0 = rd.factor[0], f1 = rd.factor[1];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        if (8 * j < rd.n) {
            const float v0 = gm_silu(acc[4 * j] * f0) * (acc[4 * j + 2] * f1);
            const float v1 = gm_silu(acc[4 * j + 1] * f0) * (acc[4 * j + 3] * f1);
            const float got = __shfl_xor_sync(0xffffffffu, second ? v0 : v1, 16);
            if (8 * j + 2 * q + (second ? 1 : 0) < rd.n) {
                *(uint32_t *)(h + 1024 * j) = second ? pack_bf16(got, v1) : pack_bf16(v0, got);
            }
        }
    }
}

template <class S, int N>
__device__ __forceinline__ void th_put_down(const pmoe_thin_args &a, const th_round &rd, const float *acc, uint32_t m,
                                            uint32_t q)
{
    const float f = rd.factor[2];
    float *out = a.out + (uint64_t)(rd.out + 2 * q) * S::hidden(a) + m;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int o = 0; o < 2; ++o) {
            if (8 * j + 2 * q + o < rd.n) {
                float *y = out + (uint64_t)(8 * j + o) * S::hidden(a);
                y[0] = acc[4 * j + o] * f;
                y[8] = acc[4 * j + 2 + o] * f;
            }
        }
    }
}

/* A tile of a round, up to N tokens; rings at the round's first slots. */
template <class S, bool DOWN, int N>
__device__ __forceinline__ void th_tile(const pmoe_thin_args &a, const th_round &rd, th_ring &r, th_ring &b)
{
    const uint32_t k_all = DOWN ? S::inter(a) : S::hidden(a), pieces = (k_all + TH_PIECE - 1) / TH_PIECE, in = rd.in;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, wgi = warp / 4, ww = warp & 3, g = lane >> 2, q = lane & 3;
    /* rows: of gate, 32 further those of up; or of down, and eight further */
    constexpr uint32_t OTHER = DOWN ? 8 : 32;
    const uint32_t row = ww * (DOWN ? 16 : 8) + g;
    const uint32_t c = r.smem + row * (TH_PIECE / 2) + q * 16 + (g & 1) * 64, sc = r.smem + TH_CODES + row * TH_SCALES + q * 2;
    float acc[N / 2];
    uint32_t f[2][2][4];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        acc[i] = 0.0f;
    }
    r.step<TH_SLOTS>(wgi);
    uint32_t prev = 0;
    for (uint32_t p = 0; p < pieces; ++p) {
        bar_wait(r.full + 8 * r.slot, r.phase);
        bar_wait(b.full + 8 * b.slot, b.phase);
        fence_async();
        const uint64_t d = wg_desc(uniform(b.smem + b.slot * TH_B));
        const uint32_t k = c + r.slot * TH_SLOT, ks = sc + r.slot * TH_SLOT;
        th_step<N>(acc, f, k, k + OTHER * (TH_PIECE / 2), ks, ks + OTHER * TH_SCALES, d, p == 0);
        if (p && lane == 0) { /* its last products are done */
            bar_arrive(b.empty + 8 * prev);
        }
        if (!DOWN || p * TH_PIECE + 128 < k_all) {
            th_step<N>(acc, f, k ^ 64, (k ^ 64) + OTHER * (TH_PIECE / 2), ks + 8, ks + 8 + OTHER * TH_SCALES, d + 2 * TH_BLOCK / 16,
                       false);
        }
        __syncwarp();
        if (lane == 0) {
            bar_arrive(r.empty + 8 * r.slot);
        }
        prev = b.slot;
        b.step<TH_B_SLOTS>(1);
        r.step<TH_SLOTS>(p + 1 < pieces ? in : in - wgi);
    }
    wg_wait<0>();
    wg_pin<N / 2>(acc);
    if (lane == 0) {
        bar_arrive(b.empty + 8 * prev);
    }
    if (DOWN) {
        th_put_down<S, N>(a, rd, acc, (rd.t0 + wgi) * 64 + ww * 16 + g, q);
    } else {
        th_put_up<N>(a, rd, acc, (rd.t0 + wgi) * 32 + ww * 8 + g, q);
        __syncwarp();
        if (lane == 0) {
            add_release(&a.list[rd.i].done, 1);
        }
    }
}

/* The block's rounds of up, or those of down, which come after them. */
template <class S, bool DOWN>
__device__ __forceinline__ void th_multiply(const pmoe_thin_args &a, th_told &told, th_ring &at, th_ring &r, th_ring &b)
{
    const uint32_t wgi = threadIdx.x / 128, pieces = ((DOWN ? S::inter(a) : S::hidden(a)) + TH_PIECE - 1) / TH_PIECE;
    for (;;) {
        const th_round &rd = th_next(told, at);
        if (rd.in == 0 || rd.down != DOWN) {
            break;
        }
        if (wgi >= rd.in) { /* no tile: the tokens pass by */
            for (uint32_t p = 0; p < pieces && rd.n; ++p) {
                bar_wait(b.full + 8 * b.slot, b.phase);
                if ((threadIdx.x & 31) == 0) {
                    bar_arrive(b.empty + 8 * b.slot);
                }
                b.step<TH_B_SLOTS>(1);
                r.step<TH_SLOTS>(rd.in);
            }
        } else if (rd.n == 0) {
            ; /* an entry that the cutting left without rows */
        } else if (rd.n <= 24) {
            th_tile<S, DOWN, 24>(a, rd, r, b);
        } else if (rd.n <= 32) {
            th_tile<S, DOWN, 32>(a, rd, r, b);
        } else if (rd.n <= 48) {
            th_tile<S, DOWN, 48>(a, rd, r, b);
        } else {
            th_tile<S, DOWN, PMOE_THIN>(a, rd, r, b);
        }
        th_done(at);
    }
}

template <class S> __global__ void __launch_bounds__(TH_THREADS, 1) pmoe_thin_kernel(const __grid_constant__ pmoe_thin_args a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t th_sm[];
    __shared__ uint64_t bars[2 * (TH_SLOTS + TH_B_SLOTS)];
    __shared__ th_told told;
    pdl_next();
    const uint32_t base = (smem_addr(th_sm) + 1023u) & ~1023u;
    th_ring r = {smem_addr(bars), smem_addr(bars + TH_SLOTS), base + TH_B_SLOTS * TH_B, 0, 0};
    th_ring b = {smem_addr(bars + 2 * TH_SLOTS), smem_addr(bars + 2 * TH_SLOTS + TH_B_SLOTS), base, 0, 0};
    th_ring at = {smem_addr(told.full), smem_addr(told.empty), 0, 0, 0};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < TH_SLOTS; ++i) {
            bar_init(r.full + 8 * i, 64); /* two warps' copies */
            bar_init(r.empty + 8 * i, 4);
        }
        for (uint32_t i = 0; i < TH_B_SLOTS; ++i) {
            bar_init(b.full + 8 * i, 64);
            bar_init(b.empty + 8 * i, TH_WG * 4);
        }
        for (uint32_t i = 0; i < TH_ROUNDS; ++i) {
            bar_init(at.full + 8 * i, 1);
            bar_init(at.empty + 8 * i, TH_READERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    const uint32_t warp = threadIdx.x / 32;
    if (warp >= TH_WG * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (warp >= TH_WG * 4 + 2) {
            th_copy_tokens<S>(a, told, at, b, warp - (TH_WG * 4 + 2));
        } else {
            th_copy_codes<S>(a, told, at, r, warp - TH_WG * 4);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        th_multiply<S, false>(a, told, at, r, b);
        th_multiply<S, true>(a, told, at, r, b);
    }
#else
    (void)a;
#endif
}

bool pmoe_thin_takes(uint32_t hidden, uint32_t inter)
{
    return hidden % TH_PIECE == 0 && inter % 128 == 0;
}

int pmoe_thin(struct qx_queue *q, const pmoe_thin_args &a)
{
    const dim3 grid(q->n_sm), block(TH_THREADS);
    return a.hidden == 2560 && a.inter == 640 ? launch(q, "moe", pmoe_thin_kernel<th_width<2560, 640>>, grid, block, TH_SMEM, a)
                                              : launch(q, "moe", pmoe_thin_kernel<th_width<0, 0>>, grid, block, TH_SMEM, a);
}
