/* linear_bytes.cuh: rows of E4M3 codes in a slot of the ring times rows of activations, for linear.cu.
 *
 * Codes become f16, which one instruction does for two of them, NaN included; activations, rounded to bf16, are f16
 * with a power of two for each unit of 128, so that they keep all bits but those 2^29 below the unit's largest. The
 * matrix units multiply the codes as they are: every block of 32 has a sum of its own, which is then multiplied with
 * its scale and that power of two in f32.
 *
 * A matrix's rows are A. A lane reads 16 codes at once, that is half of a block, so half of the lanes of a product
 * belong to another block than the others: what is B has a column for each of both, with zeros for the other's lanes.
 * In the same way rows that lie 128 bytes modulo 128 apart are read without meeting a bank twice: of a unit odd rows
 * take the second half when even ones take the first, then the other way round, and B has columns for both halves. So a
 * row of activations takes four columns where there are few:
 * - eights of rows (LIN_EIGHTS; rows of at most LIN_SHORT bytes): A's rows 0 to 7 are the matrix's with the halves read
 *   first, rows 8 to 15 the same with the others; two rows of activations a product.
 * - fours (LIN_FOURS): the same with two units, of which A's rows 4 to 7 and 12 to 15 are the second; one row of
 *   activations a product.
 * - up to eight rows of activations: eight rows of the matrix, or four of them, are B. A has each row of activations
 *   twice, with zeros for the other block's lanes.
 * - wide: eight rows of the matrix, 64 bytes modulo 128 apart, are B, sixteen rows of activations A, once a block.
 *
 * Warp w of eight takes the units w, w + 8, ... of a row. A row's sum: blocks in order, apart for every second unit of
 * the warp, half of a unit and block of a half; ((even, first + second block) + (odd, the same)) for either half, both
 * halves, then the warps' in order. So it depends on its matrix only, not on its block nor on how many rows of
 * activations there are. */
#ifndef QX_CUDA_LINEAR_BYTES_CUH
#define QX_CUDA_LINEAR_BYTES_CUH

#include "linear_slot.cuh"

/* ---- activations ------------------------------------------------------------------------------ */

/* In shared memory a row is its units in order, then a factor for each. */
__host__ __device__ inline uint32_t lin_x8_pitch16(uint32_t k)
{
    const uint32_t n = lin_x8_units(k) * 16 + (lin_x8_units(k) + 3) / 4;
    return n | 1; /* of two rows 16 bytes at 0, 32, 64 and 96 are apart */
}

/* Two bf16 times f as f16. */
__device__ __forceinline__ uint32_t lin_f16x2(uint32_t p, float f)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(bf16_hi(p) * f), "f"(bf16_lo(p) * f));
    return r;
}

/* Items are eight values. EVEN: rows and their widths are whole eights. B: items in flight. */
template <bool EVEN, int B, bool SPREAD>
__device__ __forceinline__ void lin_stage_bytes(const lin_x &xs, const float *x, uint64_t stride, uint32_t k,
                                                uint32_t tid, const lin_part<SPREAD> &part)
{
    constexpr uint32_t NT = LIN_WARPS * 32;
    const uint32_t units = lin_x8_units(k), per = units * 16, n = per * xs.n_tok, end = part.end(n);
    const bool one = xs.n_tok == 1;
#pragma unroll 1
    for (uint32_t i0 = part.begin(n) + tid; i0 - (tid & 31) < end; i0 += B * NT) {
        float4 v[B][2];
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * NT, r = one ? 0 : i / per, m = i - r * per;
            lin_load8<EVEN>(v[j], x + (r < xs.n_tok ? r : 0) * stride, m * 8, i < end ? k : 0);
        }
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * NT, r = one ? 0 : i / per, m = i - r * per;
            const uint32_t p[4] = {pack_bf16(v[j][0].x, v[j][0].y), pack_bf16(v[j][0].z, v[j][0].w),
                                   pack_bf16(v[j][1].x, v[j][1].y), pack_bf16(v[j][1].z, v[j][1].w)};
            uint32_t most = 0;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                most = max(most, max(p[e] << 16 & 0x7fff0000u, p[e] & 0x7fff0000u));
            }
#pragma unroll
            for (int e = 1; e < 16; e <<= 1) {
                most = max(most, __shfl_xor_sync(0xffffffffu, most, e));
            }
            /* its largest is then from 2^14 to 2^15; of what is not finite in f32 nothing is left but that */
            const uint32_t up = min(268u - (most >> 23), 253u);
            const float f = __uint_as_float(up << 23);
            if (i < end) {
                const uint32_t row = xs.xs + r * xs.pitch16 * 16;
                part.store(xs, row + m * 16,
                           make_uint4(lin_f16x2(p[0], f), lin_f16x2(p[1], f), lin_f16x2(p[2], f), lin_f16x2(p[3], f)));
                if (m % 16 == 0) {
                    part.store(xs, row + per * 16 + m / 4, __uint_as_float((254u - up) << 23));
                }
            }
        }
    }
}

template <bool SPREAD>
__device__ __noinline__ void lin_stage8(lin_x xs, const float *x, uint64_t stride, uint32_t k, uint32_t tid,
                                        lin_part<SPREAD> part)
{
    if (((((uintptr_t)x | stride * 4) & 15) | (k & 7)) == 0) {
        lin_stage_bytes<true, 3>(xs, x, stride, k, tid, part);
    } else {
        lin_stage_bytes<false, 1>(xs, x, stride, k, tid, part);
    }
}

/* ---- products --------------------------------------------------------------------------------- */

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/* Four codes: the first two, the others. */
__device__ __forceinline__ void lin_codes4(uint32_t w, uint32_t &lo, uint32_t &hi)
{
    asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(lo), "=r"(hi)
        : "r"(w));
}
/* 16 bytes where `in`, else what v is. */
__device__ __forceinline__ void lds128_if(uint4 &v, uint32_t p, bool in)
{
    asm volatile("{.reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "r"(p), "r"((uint32_t)in));
}

/* What the sums of a unit's blocks are multiplied with: by their scales ... */
struct lin_scales {
    float s0, s1;
};
/* codes: of MX, the two blocks'. row, u: where the scale of FP8 blocks is. A code of 255 comes out as infinite, which
 * leaves a row that is summed anew (lin_mx_row). */
template <int F>
__device__ __forceinline__ lin_scales lin_scales_of(uint32_t codes, const stream_w &w, uint32_t row, uint32_t u)
{
    lin_scales r = {1.0f, 1.0f};
    if constexpr (F == TF_MX) {
        r.s0 = __uint_as_float(max(codes << 23 & 0x7f800000u, 0x00400000u));
        r.s1 = __uint_as_float(max(codes << 15 & 0x7f800000u, 0x00400000u));
    } else if constexpr (F == TF_BLOCK) {
        r.s0 = r.s1 = lin_block_scale(w, row, u);
    }
    return r;
}

/* Sums of G groups of rows of activations. E: every second unit of a warp apart; fours have them in other lanes. */
template <int G, int E> struct lin_sums {
    float c[E][G][4];
};
template <int SHAPE, int NT>
using lin_sums_of = lin_sums<lin_eights(SHAPE) ? (NT + 1) / 2 : NT, lin_eights(SHAPE) ? 2 : 1>;

/* Where a lane finds what it needs, in a slot of this matrix and in the activations. NT: 1, 2 or 4 of these at most. */
template <int F, int SHAPE, int NT> struct lin_lane8 {
    static constexpr bool EIGHTS = lin_eights(SHAPE);
    static constexpr int G = EIGHTS ? (NT + 1) / 2 : NT;
    static constexpr uint32_t SU = lin_unit_scale<F>::N;
    uint32_t c, other;   /* its codes; from one half to the other */
    uint32_t sc;         /* scales */
    uint32_t x[EIGHTS ? G : 1], f[EIGHTS ? G : 1]; /* activations, factors; of fours of the first row */
    uint32_t x_row, row; /* bytes of a row of activations; the lane's row of the slot */
    uint32_t n_tok;
    bool mine;           /* the block of its column is that of its codes */
    __device__ __forceinline__ lin_lane8(const stream_w &w, const lin_x &xs, uint32_t warp, uint32_t lane)
    {
        constexpr uint32_t R = EIGHTS ? 8 : 4;
        const uint32_t g = lane >> 2, q = lane & 3, u = EIGHTS ? warp : warp + g / 4 * LIN_WARPS, last = xs.n_tok - 1;
        row = EIGHTS ? g : g & 3;
        c = row * w.pitch + u * 128 + (g & 1) * 64 + q * 16;
        other = g & 1 ? 0u - 64 : 64;
        sc = R * w.pitch + row * w.pitch_scale + u * SU + (F == TF_MX ? (q & 1) * 2 : 0);
        x_row = xs.pitch16 * 16;
        n_tok = xs.n_tok;
        mine = (g & 1) == (q >> 1);
        const uint32_t factors = xs.xs + xs.n_units * 256 + u * 4;
        if constexpr (EIGHTS) {
#pragma unroll
            for (int i = 0; i < G; ++i) {
                x[i] = xs.xs + min(2 * i + g / 4, last) * x_row + u * 256 + (g >> 1 & 1) * 128 + q * 32;
                f[i] = factors + min(2 * i + q / 2, last) * x_row;
                lin_keep(x[i]);
            }
        } else {
            x[0] = xs.xs + u * 256 + (g >> 1 & 1) * 128 + q * 32;
            f[0] = factors;
            lin_keep(x[0]);
        }
        lin_keep(c);
    }
};

/* acc += a unit's products, of fours two units'. v: codes, first those of the half that is its row's first; at: bytes
 * of activations from the lane's first unit on; in: the lane has such a unit. */
template <int F, int SHAPE, int NT, int G, int E>
__device__ __forceinline__ void lin_unit8(lin_sums<G, E> &acc, const int e, const uint4 (&v)[2], const lin_scales &s,
                                          const lin_lane8<F, SHAPE, NT> &l, uint32_t at, bool in)
{
    uint32_t a[4][4];
    const uint32_t w0[4] = {v[0].x, v[0].y, v[0].z, v[0].w}, w1[4] = {v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        lin_codes4(w0[i], a[i][0], a[i][2]);
        lin_codes4(w1[i], a[i][1], a[i][3]);
    }
#pragma unroll
    for (int t = 0; t < G; ++t) {
        const uint32_t skip = lin_eights(SHAPE) ? 0 : min((uint32_t)t, l.n_tok - 1) * l.x_row;
        const uint32_t x = l.x[lin_eights(SHAPE) ? t : 0] + skip + at;
        const uint32_t f = l.f[lin_eights(SHAPE) ? t : 0] + skip + at / 64;
        uint4 b0 = make_uint4(0, 0, 0, 0), b1 = b0;
        lds128_if(b0, x, l.mine && in);
        lds128_if(b1, x + 16, l.mine && in);
        const float factor = in ? lds_f32(f) : 0.0f;
        float p[4] = {};
        mma_f16(p, a[0][0], a[0][1], a[0][2], a[0][3], b0.x, b0.y);
        mma_f16(p, a[1][0], a[1][1], a[1][2], a[1][3], b0.z, b0.w);
        mma_f16(p, a[2][0], a[2][1], a[2][2], a[2][3], b1.x, b1.y);
        mma_f16(p, a[3][0], a[3][1], a[3][2], a[3][3], b1.z, b1.w);
        const float s0 = s.s0 * factor, s1 = s.s1 * factor;
        acc.c[e][t][0] = fmaf(s0, p[0], acc.c[e][t][0]);
        acc.c[e][t][1] = fmaf(s1, p[1], acc.c[e][t][1]);
        acc.c[e][t][2] = fmaf(s0, p[2], acc.c[e][t][2]);
        acc.c[e][t][3] = fmaf(s1, p[3], acc.c[e][t][3]);
    }
}

/* N units of a slot, of fours twice as many, that are all the warp has of it: once they are in registers it gives the
 * slot back. u: the lane's first unit of the row. */
template <int F, int SHAPE, int NT, int N, int G, int E>
__device__ __forceinline__ void lin_batch8(lin_sums<G, E> &acc, const stream_w &w, uint32_t c, uint32_t sc, uint32_t x,
                                           const lin_lane8<F, SHAPE, NT> &l, uint32_t row, uint32_t u, uint32_t empty,
                                           uint32_t lane)
{
    constexpr uint32_t STEP = lin_eights(SHAPE) ? LIN_WARPS : 2 * LIN_WARPS; /* units */
    uint4 v[N][2];
    uint32_t codes[N] = {};
    const auto get = [&](int i) {
        v[i][0] = lds128(c + i * STEP * 128);
        v[i][1] = lds128(c + l.other + i * STEP * 128);
        if constexpr (F == TF_MX) {
            codes[i] = lds16(sc + i * STEP * 4);
        }
    };
    get(0);
    get(1);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const lin_scales s = lin_scales_of<F>(codes[i], w, row + l.row, u + i * STEP);
        lin_unit8<F, SHAPE, NT>(acc, E == 2 ? i & 1 : 0, v[i], s, l, x + i * STEP * 256, true);
        if (i + 2 < N) {
            get(i + 2);
        }
        if (i + 3 == N || (N == 2 && i == 0)) {
            lin_release(empty, lane);
        }
    }
}

/* A unit that may end within the row, or lie behind it; of fours two. left: bytes from its begin to the end. */
template <int F, int SHAPE, int NT, int G, int E>
__device__ __forceinline__ void lin_one8(lin_sums<G, E> &acc, const int e, const stream_w &w, uint32_t c, uint32_t sc,
                                         uint32_t x, const lin_lane8<F, SHAPE, NT> &l, uint32_t row, uint32_t u,
                                         int left, uint32_t lane)
{
    const int first = (int)((lane >> 2 & 1) * 64 + (lane & 3) * 16);
    uint4 v[2] = {};
    lds128_if(v[0], c, left > first);
    lds128_if(v[1], c + l.other, left > first + (int)l.other);
    lin_scales s = {0.0f, 0.0f};
    if (left > 0) {
        s = lin_scales_of<F>(F == TF_MX ? lds16(sc) : 0, w, row + l.row, u);
    }
    lin_unit8<F, SHAPE, NT>(acc, e, v, s, l, x, left > 0);
}

/* acc += the warp's share of a slot: n bytes of each row from byte `at` of the rows on, whole LIN_WARPS pairs of units
 * there; the slot is given back. */
template <int F, int SHAPE, int NT, int G, int E>
__device__ __forceinline__ void lin_slot(lin_sums<G, E> &acc, const stream_w &w, uint32_t slot, uint32_t row,
                                         uint32_t at, uint32_t n, const lin_lane8<F, SHAPE, NT> &l, uint32_t empty,
                                         uint32_t warp, uint32_t lane)
{
    constexpr uint32_t W = LIN_WARPS;
    uint32_t c = slot + l.c, sc = slot + l.sc, x = at * 2;
    if constexpr (lin_eights(SHAPE)) {
        uint32_t u = at / 128 + warp;
        if (lin_exact(SHAPE)) {
            if (warp < 4) {
                lin_batch8<F, SHAPE, NT, 3>(acc, w, c, sc, x, l, row, u, empty, lane);
            } else {
                lin_batch8<F, SHAPE, NT, 2>(acc, w, c, sc, x, l, row, u, empty, lane);
            }
            return;
        }
        int left = (int)n - (int)(warp * 128);
#pragma unroll 1
        for (; left > 0; left -= 2 * W * 128, c += 2 * W * 128, sc += 2 * W * l.SU, x += 2 * W * 256, u += 2 * W) {
            lin_one8<F, SHAPE, NT>(acc, 0, w, c, sc, x, l, row, u, left, lane);
            if (left > (int)(W * 128)) {
                lin_one8<F, SHAPE, NT>(acc, 1, w, c + W * 128, sc + W * l.SU, x + W * 256, l, row, u + W,
                                       left - (int)(W * 128), lane);
            }
        }
    } else {
        uint32_t u = warp + lane / 16 * W;
        if (lin_exact(SHAPE)) {
            lin_batch8<F, SHAPE, NT, 3>(acc, w, c, sc, x, l, row, at / 128 + u, empty, lane);
            return;
        }
        int left = (int)n - (int)(warp * 128), mine = (int)n - (int)(u * 128);
        u += at / 128;
#pragma unroll 1
        for (; left > 0; left -= 2 * W * 128, mine -= 2 * W * 128, c += 2 * W * 128, sc += 2 * W * l.SU,
                         x += 2 * W * 256, u += 2 * W) {
            lin_one8<F, SHAPE, NT>(acc, 0, w, c, sc, x, l, row, u, mine, lane);
        }
    }
    lin_release(empty, lane);
}

/* A warp's result: [rows of activations][4 rows of the matrix]; `step` bytes from one four rows to the next. */
template <int G, int E>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_sums<G, E> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    const bool second = (g ^ q) & 1;
#pragma unroll
    for (int t = 0; t < G; ++t) {
        const float(&c)[4] = acc.c[0][t];
        float v = second ? c[2] + c[3] : c[0] + c[1];
        if constexpr (E == 2) {
            const float(&d)[4] = acc.c[E - 1][t];
            v += second ? d[2] + d[3] : d[0] + d[1];
        } else {
            v += __shfl_xor_sync(0xffffffffu, v, 18); /* the second unit of the same row and half */
        }
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        const uint32_t tok = E == 2 ? 2 * t + q / 2 : t;
        if ((E == 2 ? (q & 1) == 0 : lane < 16 && q == 0) && tok < n_tok) {
            sts_f32(red + g / 4 * step + (tok * 4 + g % 4) * 4, v);
        }
    }
}

/* ---- up to eight rows of activations ---------------------------------------------------------- */

template <bool EIGHTS> struct lin_cols {
    float c[2][2][4]; /* [every second unit][half][block of 32, one of two rows] */
};

/* Where a lane finds what it needs. Rows that lie 128 bytes modulo 128 apart are read without meeting a bank twice:
 * odd ones the second half of a unit first. */
template <int F, int SHAPE> struct lin_lane8_cols {
    static constexpr uint32_t R = lin_eights(SHAPE) ? 8 : 4, SU = lin_unit_scale<F>::N;
    uint32_t c, other;    /* its codes; from one half to the other */
    uint32_t sc, sc_step; /* the scales of its sums' first row, of the second */
    uint32_t x, f;        /* activations, their factors */
    uint32_t row;         /* its sums' first row of the slot */
    bool odd, low;        /* low: its codes are of a half's first block */
    __device__ __forceinline__ lin_lane8_cols(const stream_w &w, const lin_x &xs, uint32_t warp, uint32_t lane)
    {
        const uint32_t g = lane >> 2, q = lane & 3, t = min(g, xs.n_tok - 1) * xs.pitch16 * 16;
        odd = g & 1;
        low = q < 2;
        row = 2 * q & (R - 1);
        c = (g & (R - 1)) * w.pitch + warp * 128 + (g & 1) * 64 + q * 16;
        other = odd ? 0u - 64 : 64;
        sc = R * w.pitch + row * w.pitch_scale + warp * SU;
        sc_step = w.pitch_scale;
        x = xs.xs + t + warp * 256 + q * 32;
        f = xs.xs + t + xs.n_units * 256 + warp * 4;
        lin_keep(c);
        lin_keep(x);
    }
};

/* acc += N units of a warp, one after the other. c, sc: in the slot; x: bytes of activations from the lane's on; u:
 * the first unit; left: bytes from its begin to the row's end. last: the slot is given back once they are read. */
template <int F, int SHAPE, int N>
__device__ __forceinline__ void lin_units8(lin_cols<lin_eights(SHAPE)> &acc, const stream_w &w, uint32_t c,
                                           uint32_t sc, uint32_t x, const lin_lane8_cols<F, SHAPE> &l, uint32_t row,
                                           uint32_t u, int left, bool last, uint32_t empty, uint32_t lane)
{
    constexpr uint32_t W = LIN_WARPS, SU = lin_unit_scale<F>::N;
    uint4 v[N][2];
    uint32_t codes[N][2] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if constexpr (lin_exact(SHAPE) != 0) {
            v[n][0] = lds128(c + n * W * 128);
            v[n][1] = lds128(c + n * W * 128 + l.other);
        } else {
            const int first = (int)(n * W * 128 + (lane >> 2 & 1) * 64 + (lane & 3) * 16);
            v[n][0] = v[n][1] = make_uint4(0, 0, 0, 0);
            lds128_if(v[n][0], c + n * W * 128, left > first);
            lds128_if(v[n][1], c + n * W * 128 + l.other, left > first + (int)l.other);
        }
        if constexpr (F == TF_MX) {
            codes[n][0] = lds32(sc + n * W * SU);
            codes[n][1] = lds32(sc + n * W * SU + l.sc_step);
        }
    }
    if (last) {
        lin_release(empty, lane);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float factor = lds_f32(l.f + x / 64 + n * W * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 k = l.odd ? v[n][1 - h] : v[n][h];
            const uint4 x0 = lds128(l.x + x + n * W * 256 + h * 128), x1 = lds128(l.x + x + n * W * 256 + h * 128 + 16);
            const uint32_t xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w}, ks[4] = {k.x, k.y, k.z, k.w};
            float p[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t b0, b1;
                lin_codes4(ks[i], b0, b1);
                mma_f16(p, l.low ? xs[2 * i] : 0, l.low ? 0 : xs[2 * i], l.low ? xs[2 * i + 1] : 0,
                        l.low ? 0 : xs[2 * i + 1], b0, b1);
            }
            const lin_scales sa = lin_scales_of<F>(codes[n][0] >> h * 16, w, row + l.row, u + n * W);
            const lin_scales sb = lin_scales_of<F>(codes[n][1] >> h * 16, w, row + l.row + 1, u + n * W);
            float(&d)[4] = acc.c[n][h];
            d[0] = fmaf(sa.s0 * factor, p[0], d[0]);
            d[1] = fmaf(sb.s0 * factor, p[1], d[1]);
            d[2] = fmaf(sa.s1 * factor, p[2], d[2]);
            d[3] = fmaf(sb.s1 * factor, p[3], d[3]);
        }
    }
}

template <int F, int SHAPE>
__device__ __forceinline__ void lin_slot(lin_cols<lin_eights(SHAPE)> &acc, const stream_w &w, uint32_t slot,
                                         uint32_t row, uint32_t at, uint32_t n, const lin_lane8_cols<F, SHAPE> &l,
                                         uint32_t empty, uint32_t warp, uint32_t lane)
{
    constexpr uint32_t W = LIN_WARPS;
    uint32_t c = slot + l.c, sc = slot + l.sc, x = at * 2, u = at / 128 + warp;
    int left = (int)n - (int)(warp * 128);
    if (left <= 0) {
        lin_release(empty, lane);
    }
#pragma unroll 1
    for (; left > 0; left -= 2 * W * 128, c += 2 * W * 128, sc += 2 * W * l.SU, x += 2 * W * 256, u += 2 * W) {
        if (left > (int)(W * 128)) {
            lin_units8<F, SHAPE, 2>(acc, w, c, sc, x, l, row, u, left, left <= (int)(2 * W * 128), empty, lane);
        } else {
            lin_units8<F, SHAPE, 1>(acc, w, c, sc, x, l, row, u, left, true, empty, lane);
        }
    }
}

template <bool EIGHTS>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_cols<EIGHTS> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float v[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            v[h] = (acc.c[0][h][i] + acc.c[0][h][2 + i]) + (acc.c[1][h][i] + acc.c[1][h][2 + i]);
        }
        if (g < n_tok && (EIGHTS || q < 2)) {
            sts_f32(red + q / 2 * step + (g * 4 + (2 * q & 3) + i) * 4, v[0] + v[1]);
        }
    }
}

/* ---- wide ------------------------------------------------------------------------------------- */

template <int NM> struct lin_wide8 {  /* NM: blocks of sixteen rows of activations */
    float c[2][2][NM][2][4];          /* [every second unit][half][block of rows][block of 32] */
};

template <int F, int NM> struct lin_lane8_wide {
    uint32_t c, sc, x, f, x_row, last;
    __device__ __forceinline__ lin_lane8_wide(const stream_w &w, const lin_x &xs, uint32_t warp, uint32_t lane)
    {
        const uint32_t g = lane >> 2, q = lane & 3;
        c = g * w.pitch + q * 16 + warp * 128;
        sc = 8 * w.pitch + 2 * q * w.pitch_scale + warp * lin_unit_scale<F>::N;
        x = xs.xs + q * 32 + warp * 256;
        f = xs.xs + xs.n_units * 256 + warp * 4;
        x_row = xs.pitch16 * 16;
        last = xs.n_tok - 1;
    }
};

/* acc += a unit. c, sc, x: bytes from the lane's first one on; left: from its begin to the row's end. */
template <int F, int NM>
__device__ __forceinline__ void lin_unit8_wide(float (&acc)[2][NM][2][4], const stream_w &w, uint32_t slot, uint32_t c,
                                               uint32_t sc, uint32_t x, const lin_lane8_wide<F, NM> &l, uint32_t row,
                                               uint32_t u, int left, uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint4 v = make_uint4(0, 0, 0, 0);
        lds128_if(v, slot + l.c + c + h * 64, left > (int)(h * 64 + q * 16));
        const uint32_t at = slot + l.sc + sc + h * 2;
        const lin_scales sa = lin_scales_of<F>(F == TF_MX ? lds16(at) : 0, w, row + 2 * q, u);
        const lin_scales sb = lin_scales_of<F>(F == TF_MX ? lds16(at + w.pitch_scale) : 0, w, row + 2 * q + 1, u);
        uint32_t b[4][2];
        lin_codes4(v.x, b[0][0], b[0][1]);
        lin_codes4(v.y, b[1][0], b[1][1]);
        lin_codes4(v.z, b[2][0], b[2][1]);
        lin_codes4(v.w, b[3][0], b[3][1]);
#pragma unroll
        for (int m = 0; m < NM; ++m) {
            const uint32_t r0 = min(m * 16 + g, l.last) * l.x_row, r1 = min(m * 16 + 8 + g, l.last) * l.x_row;
            const float f0 = lds_f32(l.f + x / 64 + r0), f1 = lds_f32(l.f + x / 64 + r1);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float p[4] = {};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint4 a0 = make_uint4(0, 0, 0, 0), a1 = a0;
                    lds128_if(a0, l.x + x + r0 + h * 128 + i * 16, (int)(q / 2) == k);
                    lds128_if(a1, l.x + x + r1 + h * 128 + i * 16, (int)(q / 2) == k);
                    mma_f16(p, a0.x, a1.x, a0.y, a1.y, b[2 * i][0], b[2 * i][1]);
                    mma_f16(p, a0.z, a1.z, a0.w, a1.w, b[2 * i + 1][0], b[2 * i + 1][1]);
                }
                const float s0 = k ? sa.s1 : sa.s0, s1 = k ? sb.s1 : sb.s0;
                float(&d)[4] = acc[h][m][k];
                d[0] = fmaf(s0 * f0, p[0], d[0]);
                d[1] = fmaf(s1 * f0, p[1], d[1]);
                d[2] = fmaf(s0 * f1, p[2], d[2]);
                d[3] = fmaf(s1 * f1, p[3], d[3]);
            }
        }
    }
}

template <int F, int NM>
__device__ __forceinline__ void lin_slot(lin_wide8<NM> &acc, const stream_w &w, uint32_t slot, uint32_t row,
                                         uint32_t at, uint32_t n, const lin_lane8_wide<F, NM> &l, uint32_t empty,
                                         uint32_t warp, uint32_t lane)
{
    constexpr uint32_t W = LIN_WARPS, SU = lin_unit_scale<F>::N;
    uint32_t u = at / 128 + warp, x = at * 2;
    int left = (int)n - (int)(warp * 128);
#pragma unroll 1
    for (uint32_t i = 0; left > 0; i += 2 * W, left -= 2 * W * 128, u += 2 * W, x += 2 * W * 256) {
        lin_unit8_wide<F, NM>(acc.c[0], w, slot, i * 128, i * SU, x, l, row, u, left, lane);
        if (left > (int)(W * 128)) {
            lin_unit8_wide<F, NM>(acc.c[1], w, slot, (i + W) * 128, (i + W) * SU, x + W * 256, l, row, u + W,
                                  left - (int)(W * 128), lane);
        }
    }
    lin_release(empty, lane);
}

template <int NM>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_wide8<NM> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < NM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                v[h] = (acc.c[0][h][m][0][i] + acc.c[0][h][m][1][i]) + (acc.c[1][h][m][0][i] + acc.c[1][h][m][1][i]);
            }
            const uint32_t tok = m * 16 + i / 2 * 8 + g;
            if (tok < n_tok) {
                sts_f32(red + q / 2 * step + (tok * 4 + (2 * q & 3) + i % 2) * 4, v[0] + v[1]);
            }
        }
    }
}

#endif
