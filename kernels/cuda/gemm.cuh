/* gemm.cuh: the tiled matrix product for the rows of prompts on sm_90a: D[weight rows, tokens] on the
 * warpgroup matrix units, weights as the A operand (128 rows a tile), tokens as the N side.
 *
 * A block has three warpgroups. The first copies (cp.async): a stage holds 64 columns of K: the codes of
 * the tile's 128 weight rows as stored, and the tokens as bf16 in the 128-byte swizzle. The other two
 * take 64 weight rows each: BF16 weights go from shared memory to the matrix units as they are; codes are
 * decoded once a stage into registers (exact in bf16: E2M1 x E4M3, E4M3 x 2^n; what is not exact is
 * applied to the f32 sums). Blocks are persistent; the stages run on across tiles.
 *
 * The tokens come from a buffer of bf16 rows (gm_at) that a conversion or an epilogue has written: rows of a
 * multiple of 64 elements, zero behind K, each 64 in the order that the decoder gives (gm_pos). A tile's rows
 * are one bulk copy a stage, or gathered. In every format a lane (g, q) = (lane / 4, lane % 4) decodes the 16 codes
 * 16 q .. 16 q + 15 of a row.
 *
 * What is multiplied is a policy P:
 *   F, PROMOTE (K blocks after which sums are added to a second set in f32, 0: never), GATHER
 *   args: has gm_common c; tile: has n (tokens, at most N), kb (K blocks), akb (those of the weights)
 *   n_tiles(a), get(a, t): tile t
 *   a_src(a, tile, r): where local row r < 64 and those after it come from
 *   scale_row(a, tile, r): scales of local row r, NULL when there is none
 *   b_row(a, tile, col): row of the token buffer; without GATHER row col is b_row(0) + col, b_row(0) a
 *   multiple of 8
 *   block_scale(a, tile, r, k128): FP8_BLOCK, factor of local row r
 *   first_block(tile): K block that the tile's kb blocks begin at
 *   SIDE: bytes that side_copy(a, tile, smem) brings for each tile, ahead of it; run() waits for them (gm_side)
 *   epilogue<N>(a, tile, acc, r, q): sums of local rows r and r + 8 as the matrix unit lays them out
 * Invariant: a token's sums depend on its own values only, not on its column or the tile's width. */
#ifndef QX_CUDA_GEMM_CUH
#define QX_CUDA_GEMM_CUH

#include "async.cuh"
#include "wgmma.cuh"

enum gm_fmt { GM_BF16, GM_FP8, GM_MX, GM_NV, GM_BLOCK, GM_NONE };
/* Order of K inside a block of 64: as it is; as lanes decode bytes; as they decode nibbles. NV2: inside two blocks,
 * as lanes decode 32 nibbles of 128. */
enum gm_order { GM_ORD_BF16, GM_ORD_FP8, GM_ORD_NV, GM_ORD_NV2 };

#define GM_SMEM (226u * 1024u)       /* of one block a multiprocessor */
#define GM_SMEM_HALF (112u * 1024u)  /* of two */
#define GM_MAX_STAGES 24

__host__ __device__ constexpr int gm_code_bytes(int f)
{
    return f == GM_BF16 ? 128 : f == GM_NV ? 32 : 64;
}
__host__ __device__ constexpr bool gm_has_scales(int f)
{
    return f == GM_NV || f == GM_MX;
}
__host__ __device__ constexpr int gm_order_of(int f)
{
    return f == GM_BF16 ? GM_ORD_BF16 : f == GM_NV ? GM_ORD_NV : GM_ORD_FP8;
}
__host__ __device__ constexpr uint32_t gm_stage_bytes(int f, int nmax)
{
    return (uint32_t)(nmax * 128 + 128 * gm_code_bytes(f) + (gm_has_scales(f) ? 512 : 0) + 1023) / 1024 * 1024;
}

/* Where element k < 64 of a block lies. */
__host__ __device__ inline uint32_t gm_pos(int order, uint32_t k)
{
    const uint32_t q = k >> 4, r = k & 15;
    if (order == GM_ORD_FP8) {
        return (r >> 2) * 16 + ((r >> 1) & 1) * 8 + 2 * q + (r & 1);
    }
    if (order == GM_ORD_NV) {
        const uint32_t p = (r >> 3) * 4 + (r & 3);
        return (p >> 1) * 16 + (p & 1) * 8 + 2 * q + ((r >> 2) & 1);
    }
    return k;
}

/* The format of a weight for these kernels; GM_NONE: the kernels for few rows take it. */
__host__ inline int gm_format(const struct qx_weight &w)
{
    if ((uintptr_t)w.codes & 15 || w.rows == 0) {
        return GM_NONE;
    }
    switch (w.fmt) {
    case QX_W_BF16: return w.cols % 8 ? GM_NONE : GM_BF16;
    case QX_W_FP8: return w.cols % 16 ? GM_NONE : GM_FP8;
    case QX_W_FP8_BLOCK: return w.cols % 16 ? GM_NONE : GM_BLOCK;
    case QX_W_MXFP8: return w.cols % 128 || (uintptr_t)w.scale & 3 ? GM_NONE : GM_MX;
    case QX_W_NVFP4: return w.cols % 64 || (uintptr_t)w.scale & 3 ? GM_NONE : GM_NV;
    default: return GM_NONE;
    }
}
/* What remains to multiply the sums with. */
__host__ __device__ inline float gm_factor(int f, float global)
{
    return f == GM_NV ? global * 0x1p26f : f == GM_FP8 ? global : 1.0f;
}

struct gm_common {
    const uint8_t *b;     /* token rows, gm_at */
    uint32_t b_rows;      /* rows of its blocks, a multiple of 8 */
    uint32_t n_stages;
};

/* Rows of the token buffer lie as the matrix units take them from shared memory: blocks of 64 elements of K, in
 * each all rows of 128 bytes in the 128-byte swizzle. Where the 16-byte unit u < 8 of a row's block lies. */
__host__ __device__ inline uint64_t gm_at(uint32_t b_rows, uint32_t row, uint32_t block, uint32_t u)
{
    return ((uint64_t)block * b_rows + row) * 128 + ((u ^ (row & 7)) * 16);
}
__host__ __device__ inline uint32_t gm_pad8(uint32_t rows)
{
    return (rows + 7) & ~7u;
}

/* Row at group G of 16 (G < 8): offset off + (G & 3) s1 + (G >> 2) s2 bytes from base, inside when
 * pos + (G & 3) d1 + (G >> 2) d2 < lim. From position `split` on rows come from base2. */
struct gm_src {
    const uint8_t *base, *base2;
    uint64_t off;
    uint32_t s1, s2, pos, d1, d2, lim, row_bytes, split;
};

/* Local rows r and r + 8 of 16 are neighbours in the matrix, so that a lane has two to write. */
__device__ __forceinline__ uint32_t gm_place(uint32_t r)
{
    return (r & ~15u) + 2 * (r & 7) + ((r >> 3) & 1);
}
/* Rows of a matrix in this order, local row r being row `pos`. */
__device__ __forceinline__ gm_src gm_rows(const uint8_t *base, uint32_t row_bytes, uint32_t pos, uint32_t lim)
{
    gm_src s = {};
    s.base = base;
    s.row_bytes = row_bytes;
    s.pos = pos;
    s.off = (uint64_t)pos * row_bytes;
    s.s1 = 16 * row_bytes;
    s.s2 = 64 * row_bytes;
    s.d1 = 16;
    s.d2 = 64;
    s.lim = lim;
    return s;
}

struct gm_pipe {
    uint32_t full, empty; /* barriers in shared memory, 8 bytes each */
    uint32_t smem;        /* stages */
    uint32_t n, stage, phase;
    uint32_t side, side_bars, side_slot, side_phase; /* two slots; barriers: full, full, empty, empty */
    __device__ __forceinline__ void next()
    {
        if (++stage == n) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void side_next()
    {
        side_slot ^= 1;
        side_phase ^= side_slot ^ 1;
    }
};

/* ---- copying -------------------------------------------------------------------------------- */

template <class P, int NMAX, int KS>
__device__ __forceinline__ void gm_produce(const typename P::args &a, gm_pipe p)
{
    constexpr int CB = gm_code_bytes(P::F), CPR = CB / 16;
    constexpr uint32_t A0 = NMAX * 128, S0 = A0 + 128 * CB, PART = gm_stage_bytes(P::F, NMAX);
    constexpr int NB = (NMAX + 15) / 16;
    const uint32_t t = threadIdx.x, r0 = t / CPR, ch = t % CPR, br = t / 8, bc = t % 8;
    const uint32_t da = A0 + (CB == 128 ? r0 * 128 + ((ch ^ (r0 & 7)) * 16) : r0 * CB + ch * 16);
    const uint32_t db = br * 128 + ((bc ^ (br & 7)) * 16);
    const uint32_t total = P::n_tiles(a);
    uint32_t at = blockIdx.x;
    if (at >= total) {
        return;
    }
    typename P::tile tl = P::get(a, at);
    for (;;) {
        at += gridDim.x;
        /* the next tile's description is on its way while this one is copied */
        const typename P::tile then = P::get(a, at < total ? at : at - gridDim.x);
        if constexpr (P::SIDE > 0) {
            bar_wait(p.side_bars + 16 + 8 * p.side_slot, p.side_phase ^ 1);
            P::side_copy(a, tl, p.side + p.side_slot * P::SIDE);
            copy_arrive(p.side_bars + 8 * p.side_slot);
            p.side_next();
        }
        const gm_src s = P::a_src(a, tl, r0);
        const uint8_t *ap = s.base + s.off + ch * 16;
        uint32_t in = 0; /* rows inside */
#pragma unroll
        for (int i = 0; i < CPR; ++i) {
            const uint32_t G = i * (8 / CPR);
            in |= s.pos + (G & 3) * s.d1 + (G >> 2) * s.d2 < s.lim ? 1u << i : 0u;
        }
        const uint8_t *sp = gm_has_scales(P::F) ? P::scale_row(a, tl, t) : nullptr;
        const uint64_t block = (uint64_t)a.c.b_rows * 128;
        const uint32_t k0 = P::first_block(tl);
        const uint8_t *bp = a.c.b + k0 * block + (P::GATHER ? 0 : (uint64_t)P::b_row(a, tl, 0) * 128);
        uint32_t boff[P::GATHER ? NB : 1];
        if (P::GATHER) {
#pragma unroll
            for (int i = 0; i < NB; ++i) {
                boff[P::GATHER ? i : 0] =
                    br + i * 16 < tl.n ? (uint32_t)gm_at(a.c.b_rows, (uint32_t)P::b_row(a, tl, br + i * 16), 0, bc) : 0;
            }
        }
        uint32_t ka = k0 % tl.akb;
        for (uint32_t kb = 0; kb < tl.kb; kb += KS) {
            const uint32_t full = p.full + 8 * p.stage, st = p.smem + p.stage * (PART * KS);
            bar_wait(p.empty + 8 * p.stage, p.phase ^ 1);
            if (!P::GATHER && t == 0) {
                bar_expect(full, gm_pad8(tl.n) * 128 * (KS == 1 || kb + 1 == tl.kb ? 1 : KS));
            }
#pragma unroll
            for (int h = 0; h < KS; ++h) {
                if (h && kb + h >= tl.kb) {
                    break;
                }
                const uint32_t sh = st + h * PART;
                const bool kin = ka * CB + ch * 16 < s.row_bytes;
#pragma unroll
                for (int i = 0; i < CPR; ++i) {
                    const uint32_t G = i * (8 / CPR);
                    const uint8_t *src = ap + (G & 3) * s.s1 + (G >> 2) * s.s2;
                    if (P::SPLIT) {
                        const uint32_t pos = s.pos + (G & 3) * s.d1 + (G >> 2) * s.d2;
                        src = pos < s.split ? src
                                            : s.base2 + (uint64_t)(pos - s.split) * s.row_bytes + ch * 16;
                    }
                    const bool v = kin && (in >> i & 1);
                    copy16(sh + da + i * 2048, v ? src + ka * CB : a.c.b, v ? 16 : 0);
                }
                if (gm_has_scales(P::F)) {
                    const uint32_t so = P::F == GM_NV ? ka * 4 : ka / 2 * 4;
                    copy4(sh + S0 + t * 4, sp ? sp + so : a.c.b, sp ? 4 : 0);
                }
                if (P::GATHER) {
#pragma unroll
                    for (int i = 0; i < NB; ++i) {
                        if (i * 16 < (int)tl.n && br + i * 16 < tl.n) {
                            copy16(sh + db + i * 2048, bp + boff[P::GATHER ? i : 0], 16);
                        }
                    }
                } else if (t == 0) {
                    bulk_load(sh, bp, gm_pad8(tl.n) * 128, full);
                }
                bp += block;
                ka = ka + 1 == tl.akb ? 0 : ka + 1;
            }
            copy_arrive(full);
            p.next();
        }
        if (at >= total) {
            break;
        }
        tl = then;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* silu and sigmoid to a few units of f32. */
__device__ __forceinline__ float gm_sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ __forceinline__ float gm_silu(float x)
{
    return x * gm_sigmoid(x);
}

/* ---- decoding ------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t gm_mul2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* Eight E2M1 codes of a row as A registers of two K steps, times the two values of s: a nibble becomes bf16 with a
 * bias of 126. The product of a nibble and two powers of two puts sign and magnitude, the mask keeps one of each. */
__device__ __forceinline__ void gm_nibbles(uint32_t (&a0)[4], uint32_t (&a1)[4], int row, uint32_t x, uint32_t s)
{
    const uint32_t y = x >> 8;
    a0[row] = gm_mul2(((x & 0x000f000fu) * 0x1040u) & 0x81c081c0u, s);
    a0[row + 2] = gm_mul2(((x & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, s);
    a1[row] = gm_mul2(((y & 0x000f000fu) * 0x1040u) & 0x81c081c0u, s);
    a1[row + 2] = gm_mul2(((y & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, s);
}

/* Rows r and r + 8 of the stage's codes as A fragments of four K steps. */
template <int F>
__device__ __forceinline__ void gm_decode(uint32_t (&a)[4][4], uint32_t codes, uint32_t scales, uint32_t r,
                                          uint32_t q, uint32_t kb)
{
    if (F == GM_NV) {
        const uint2 c0 = lds64(codes + r * 32 + q * 8), c1 = lds64(codes + r * 32 + 256 + q * 8);
        const uint32_t s = __byte_perm(lds32(scales + r * 4), lds32(scales + r * 4 + 32), q | (4 + q) << 4);
        const float2 f = e4m3x2_f((uint16_t)s);
        /* the scale carries 2^100: what is left is 2^-26 */
        const uint32_t s0 = pack_bf16(f.x * 0x1p100f, f.x * 0x1p100f),
                       s1 = pack_bf16(f.y * 0x1p100f, f.y * 0x1p100f);
        gm_nibbles(a[0], a[1], 0, c0.x, s0);
        gm_nibbles(a[0], a[1], 1, c1.x, s1);
        gm_nibbles(a[2], a[3], 0, c0.y, s0);
        gm_nibbles(a[2], a[3], 1, c1.y, s1);
    } else {
        const uint4 c0 = lds128(codes + r * 64 + q * 16), c1 = lds128(codes + r * 64 + 512 + q * 16);
        const uint32_t x[4] = {c0.x, c0.y, c0.z, c0.w}, y[4] = {c1.x, c1.y, c1.z, c1.w};
        float s0 = 1.0f, s1 = 1.0f;
        if (F == GM_MX) {
            const uint32_t sh = (kb & 1) * 16 + (q >> 1) * 8;
            s0 = e8m0_f((uint8_t)(lds32(scales + r * 4) >> sh));
            s1 = e8m0_f((uint8_t)(lds32(scales + r * 4 + 32) >> sh));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 u = e4m3x2_f((uint16_t)x[j]), v = e4m3x2_f((uint16_t)(x[j] >> 16));
            const float2 m = e4m3x2_f((uint16_t)y[j]), n = e4m3x2_f((uint16_t)(y[j] >> 16));
            a[j][0] = F == GM_MX ? pack_bf16(u.x * s0, u.y * s0) : pack_bf16(u.x, u.y);
            a[j][1] = F == GM_MX ? pack_bf16(m.x * s1, m.y * s1) : pack_bf16(m.x, m.y);
            a[j][2] = F == GM_MX ? pack_bf16(v.x * s0, v.y * s0) : pack_bf16(v.x, v.y);
            a[j][3] = F == GM_MX ? pack_bf16(n.x * s1, n.y * s1) : pack_bf16(n.x, n.y);
        }
    }
}

/* ---- one tile of one warpgroup -------------------------------------------------------------- */

/* The first N of a stage's tokens. */
template <int N> __device__ __forceinline__ void gm_multiply(float *d, const uint32_t (&a)[4][4], uint64_t db, bool first)
{
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        wg<N>::rs(d, a[j], db + 2 * j, j > 0 || !first);
    }
}

/* One K block of a stage: decode where needed, multiply into d, commit. */
template <class P, int N>
__device__ __forceinline__ void gm_step(float *d, uint32_t (&a)[4][4], uint32_t st, uint32_t wgi, uint32_t r,
                                        uint32_t q, uint32_t kb, bool first, uint32_t n)
{
    constexpr uint32_t A0 = N * 128, S0 = A0 + 128 * gm_code_bytes(P::F);
    if (P::F != GM_BF16) {
        gm_decode<P::F>(a, st + A0, st + S0, r, q, kb);
    }
    const uint64_t db = wg_desc(st), da = wg_desc(st + A0 + wgi * 8192);
    wg_fence();
    if constexpr (P::F == GM_BF16) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            wg<N>::ss(d, da + 2 * j, db + 2 * j, j > 0 || !first);
        }
    } else if constexpr (P::PIECES && N == 192) {
        if (n > 160) {
            if (n > 176) {
                gm_multiply<192>(d, a, db, first);
            } else {
                gm_multiply<176>(d, a, db, first);
            }
        } else if (n > 128) {
            if (n > 144) {
                gm_multiply<160>(d, a, db, first);
            } else {
                gm_multiply<144>(d, a, db, first);
            }
        } else if (n > 64) {
            if (n > 96) {
                gm_multiply<128>(d, a, db, first);
            } else {
                gm_multiply<96>(d, a, db, first);
            }
        } else {
            gm_multiply<64>(d, a, db, first);
        }
    } else {
        gm_multiply<N>(d, a, db, first);
    }
    wg_commit();
}

/* Waits for the pipe's stage; its address. */
template <class P> __device__ __forceinline__ uint32_t gm_stage(const gm_pipe &p, uint32_t bytes)
{
    bar_wait(p.full + 8 * p.stage, p.phase);
    if (P::F == GM_BF16 || P::GATHER) {
        fence_async(); /* bulk copies need none */
    }
    return p.smem + p.stage * bytes;
}

template <class P, int N, int KS>
__device__ __forceinline__ void gm_tile(const typename P::args &a, const typename P::tile &tl, gm_pipe &p)
{
    const uint32_t w = threadIdx.x / 32 - 4, lane = threadIdx.x & 31;
    const uint32_t wgi = w / 4, r = w * 16 + (lane >> 2), q = lane & 3;
    float acc[N / 2];
    uint32_t fa[2][4][4];
    uint32_t prev = 0;
    /* set here so that no register is taken between tiles; the first stage overwrites */
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        acc[i] = 0.0f;
    }
    constexpr uint32_t PART = gm_stage_bytes(P::F, N);
    if constexpr (P::PROMOTE == 0) {
        uint32_t kb = 0;
        for (; kb + 1 < tl.kb; kb += 2) {
            uint32_t st = gm_stage<P>(p, PART * KS);
            gm_step<P, N>(acc, fa[0], st, wgi, r, q, kb, kb == 0, tl.n);
            wg_wait<1>();
            if (kb && lane == 0) {
                bar_arrive(p.empty + 8 * prev);
            }
            if (KS == 1) {
                prev = p.stage;
                p.next();
                st = gm_stage<P>(p, PART) - PART;
            }
            gm_step<P, N>(acc, fa[1], st + PART, wgi, r, q, kb + 1, false, tl.n);
            wg_wait<1>();
            if (KS == 1 && lane == 0) {
                bar_arrive(p.empty + 8 * prev);
            }
            prev = p.stage;
            p.next();
        }
        if (kb < tl.kb) {
            gm_step<P, N>(acc, fa[0], gm_stage<P>(p, PART * KS), wgi, r, q, kb, kb == 0, tl.n);
            wg_wait<1>();
            if (kb && lane == 0) {
                bar_arrive(p.empty + 8 * prev);
            }
            prev = p.stage;
            p.next();
        }
        wg_wait<0>();
        wg_pin<N / 2>(acc);
        if (lane == 0) {
            bar_arrive(p.empty + 8 * prev);
        }
    } else {
        float part[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            part[i] = 0.0f;
        }
        for (uint32_t k0 = 0; k0 < tl.kb; k0 += P::PROMOTE) {
            float s0 = 1.0f, s1 = 1.0f;
            if (P::F == GM_BLOCK) {
                s0 = P::block_scale(a, tl, r, k0 / 2);
                s1 = P::block_scale(a, tl, r + 8, k0 / 2);
            }
#pragma unroll
            for (int i = 0; i < P::PROMOTE; ++i) {
                if (i == 0 || k0 + i < tl.kb) {
                    gm_step<P, N>(part, fa[i & 1], gm_stage<P>(p, PART), wgi, r, q, k0 + i, i == 0, tl.n);
                    if (i == 0) {
                        prev = p.stage;
                        p.next();
                    }
                }
            }
            wg_wait<0>();
            wg_pin<N / 2>(part);
            if (lane == 0) {
                bar_arrive(p.empty + 8 * prev);
                if (P::PROMOTE > 1 && k0 + 1 < tl.kb) {
                    bar_arrive(p.empty + 8 * p.stage);
                }
            }
            if (P::PROMOTE > 1 && k0 + 1 < tl.kb) {
                p.next();
            }
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                acc[i] = fmaf(i & 2 ? s1 : s0, part[i], acc[i]);
            }
        }
    }
    P::template epilogue<N>(a, tl, acc, r, q);
}

/* K blocks a stage: two where little else is done with a block. */
template <class P, int BLOCKS> __host__ __device__ constexpr int gm_blocks()
{
    return BLOCKS == 2 && P::PROMOTE == 0 && P::F != GM_BF16 ? 2 : 1;
}

/* BLOCKS a multiprocessor; N: width of the tiles. */
template <class P, int BLOCKS, int N>
__global__ void __launch_bounds__(384, BLOCKS) gm_kernel(const __grid_constant__ typename P::args a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t gm_sm[];
    __shared__ uint64_t bars[2 * GM_MAX_STAGES + 4];
    pdl_next();
    gm_pipe p;
    p.full = smem_addr(bars);
    p.empty = p.full + 8 * GM_MAX_STAGES;
    p.smem = (smem_addr(gm_sm) + 1023u) & ~1023u;
    p.n = a.c.n_stages;
    p.stage = p.phase = 0;
    p.side = p.smem + p.n * gm_stage_bytes(P::F, P::template cols<N>()) * gm_blocks<P, BLOCKS>();
    p.side_bars = p.full + 16 * GM_MAX_STAGES;
    p.side_slot = p.side_phase = 0;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < p.n; ++i) {
            bar_init(p.full + 8 * i, P::GATHER ? 128 : 129); /* copying threads, and the bulk copy */
            bar_init(p.empty + 8 * i, 8);
        }
        for (uint32_t i = 0; P::SIDE > 0 && i < 2; ++i) {
            bar_init(p.side_bars + 8 * i, 128);
            bar_init(p.side_bars + 16 + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    if (threadIdx.x < 128) {
        if (BLOCKS == 1) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
        }
        gm_produce<P, P::template cols<N>(), gm_blocks<P, BLOCKS>()>(a, p);
    } else {
        if (BLOCKS == 1) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
        }
        const uint32_t total = P::n_tiles(a);
        uint32_t at = blockIdx.x;
        if (at < total) {
            typename P::tile tl = P::get(a, at);
            for (;;) {
                at += gridDim.x;
                const typename P::tile then = P::get(a, at < total ? at : at - gridDim.x);
                P::template run<N, gm_blocks<P, BLOCKS>()>(a, tl, p);
                if (at >= total) {
                    break;
                }
                tl = then;
            }
        }
    }
#else
    (void)a;
#endif
}

/* What most policies have in common. SPLIT: rows may come from a second matrix. PIECES: tiles of many
 * widths, of which only what is needed is multiplied; else all tiles are multiplied at their full width. */
struct gm_policy {
    static constexpr bool SPLIT = false, PIECES = false, GATHER = false;
    static constexpr int PROMOTE = 0;
    static constexpr uint32_t SIDE = 0;
    template <int N> static __host__ __device__ constexpr int cols() { return N; }
    template <class T> static __device__ __forceinline__ uint32_t first_block(const T &) { return 0; }
};
#define GM_RUN(P)                                                                                        \
    template <int N, int KS>                                                                             \
    static __device__ __forceinline__ void run(const args &a, const tile &tl, gm_pipe &p)               \
    {                                                                                                    \
        gm_tile<P, N, KS>(a, tl, p);                                                                        \
    }

/* Launches with as many stages as fit. */
template <class P, int BLOCKS, int N>
static int gm_launch(struct qx_queue *q, const char *name, typename P::args a, uint64_t tiles)
{
    constexpr uint32_t stage = gm_stage_bytes(P::F, P::template cols<N>()) * gm_blocks<P, BLOCKS>(),
                       have = BLOCKS == 1 ? GM_SMEM : GM_SMEM_HALF;
    constexpr uint32_t left = have - 1024 - 2 * P::SIDE;
    a.c.n_stages = left / stage < GM_MAX_STAGES ? left / stage : GM_MAX_STAGES;
    const uint64_t most = (uint64_t)q->n_sm * BLOCKS;
    return launch(q, name, gm_kernel<P, BLOCKS, N>, dim3((unsigned)(tiles < most ? tiles : most)), dim3(384),
                  a.c.n_stages * stage + 2 * P::SIDE + 1024, a);
}

/* The width of tiles whose waves over the multiprocessors waste least. Narrow tiles load more a product. */
__host__ static inline uint32_t gm_width(const struct qx_queue *q, uint32_t n_rows, uint32_t m_tiles, uint32_t most)
{
    static const uint32_t widths[] = {256, 192, 128, 64};
    uint32_t best = 64;
    double least = 1e30;
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t w = widths[i];
        if (w > most) {
            continue;
        }
        const uint64_t tiles = (uint64_t)m_tiles * ((n_rows + w - 1) / w);
        const double waves = (double)((tiles + q->n_sm - 1) / q->n_sm), cost = waves * (w + (w < 256 ? 40 : 32));
        if (cost < least * 0.98) {
            least = cost;
            best = w;
        }
    }
    return best;
}

/* ---- tokens to bf16 ------------------------------------------------------------------------- */

/* Elements k .. k + 15 of a row of n; past its end zero. vec: 16-byte loads are allowed. */
__device__ __forceinline__ void gm_load16(float (&v)[16], const float *row, uint32_t k, uint32_t n, bool vec)
{
    if (vec && k + 16 <= n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 f = __ldcg((const float4 *)(row + k) + j);
            v[4 * j] = f.x, v[4 * j + 1] = f.y, v[4 * j + 2] = f.z, v[4 * j + 3] = f.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            v[j] = k + j < n ? __ldcg(row + k + j) : 0.0f;
        }
    }
}

/* Quarter q of a row's block of 64 into the token buffer; four lanes, STEP apart, hold the quarters. NV2: q takes
 * turns with the block: see gm_emit_nv2. */
template <int ORD, int STEP = 1>
__device__ __forceinline__ void gm_emit(uint8_t *out, uint32_t b_rows, uint32_t row, uint32_t block, uint32_t q,
                                        const float (&v)[16])
{
    uint32_t w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int lo = ORD == GM_ORD_NV ? j / 4 * 8 + j % 4 : 2 * j;
        w[j] = pack_bf16(v[lo], v[ORD == GM_ORD_NV ? lo + 4 : lo + 1]);
    }
    if (ORD == GM_ORD_BF16) {
        *(uint4 *)(out + gm_at(b_rows, row, block, 2 * q)) = make_uint4(w[0], w[1], w[2], w[3]);
        *(uint4 *)(out + gm_at(b_rows, row, block, 2 * q + 1)) = make_uint4(w[4], w[5], w[6], w[7]);
        return;
    }
    /* pair j of the four lanes is one 16-byte unit: lane q gathers units q and q + 4 */
    const uint32_t mask = __activemask();
    uint32_t o[2][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t to = q ^ s;
            const uint32_t v01 = to & 1 ? w[4 * h + 1] : w[4 * h], v23 = to & 1 ? w[4 * h + 3] : w[4 * h + 2];
            const uint32_t got = __shfl_xor_sync(mask, to & 2 ? v23 : v01, s * STEP);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (to == (uint32_t)c) {
                    o[h][c] = got;
                }
            }
        }
    }
    *(uint4 *)(out + gm_at(b_rows, row, block, q)) = make_uint4(o[0][0], o[0][1], o[0][2], o[0][3]);
    *(uint4 *)(out + gm_at(b_rows, row, block, q + 4)) = make_uint4(o[1][0], o[1][1], o[1][2], o[1][3]);
}

/* Eighth u of a row's blocks 2 pair and 2 pair + 1, eight neighbouring lanes. */
__device__ __forceinline__ void gm_emit_nv2(uint8_t *out, uint32_t b_rows, uint32_t row, uint32_t pair, uint32_t u,
                                            const float (&v)[16])
{
    gm_emit<GM_ORD_NV, 2>(out, b_rows, row, 2 * pair + (u & 1), u >> 1, v);
}

/* Rows of f32 to a token buffer of gm_pad8(rows) rows in `order`, zero up to a multiple of 64; terms 3: hi, mid
 * and lo parts, each of as many blocks, one after another. */
int qx_gm_convert(struct qx_queue *q, const char *name, const float *x, uint64_t x_stride, uint32_t rows,
                  uint32_t k, int order, uint32_t terms, void *out);

#endif
