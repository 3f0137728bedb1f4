/* linear_slot.cuh: rows of a matrix in a slot of the ring times rows of activations, for linear.cu.
 *
 * A "unit" is 128 bytes of codes of a row. Warp w of the eight takes the units w, w + 8, ... of a row and
 * adds the first and the second half of each, and in each half the odd and the even products of the tensor
 * core, apart: four sums a warp, which are added at the end of the row, then the warps' in order. So a row's
 * sum depends on its matrix only, not on its block nor on how many rows of activations there are.
 *
 * Up to eight rows of activations ("narrow"): four rows of the matrix as they lie in memory. A quarter warp
 * reads one row's unit, all banks once whatever the distance of rows. Columns 2 r and 2 r + 1 of the tensor
 * core's B are the halves of row r's unit; the activations that belong to the first half are rows 0 to 7 of
 * A, those of the second half rows 8 to 15; half of the products are of no use and stay unread.
 * More ("wide"): eight rows of the matrix, 64 bytes modulo 128 apart, a half after the other, sixteen rows of
 * activations in A. */
#ifndef QX_CUDA_LINEAR_SLOT_CUH
#define QX_CUDA_LINEAR_SLOT_CUH

#include "stream.cuh"

#define LIN_WARPS 8u     /* that consume */
#define LIN_MAX_SLOTS 16u

/* ---- formats ---------------------------------------------------------------------------------- */

template <int F> struct lin_fmt {
    static constexpr int J = F == TF_BF16 ? 2 : F == TF_NV ? 8 : 4; /* products a 16-byte chunk of codes */
    static constexpr uint32_t XH = J * 2;                          /* eights of activations a half unit */
};
__host__ __device__ inline uint32_t lin_x_half(uint8_t f)
{
    return f == TF_BF16 ? 4 : f == TF_NV ? 16 : 8;
}

/* Activations in shared memory, as A takes them: 16 bytes are two registers of A's rows 0 to 7 and two of its
 * rows 8 to 15, in turns. Narrow: a row of them is one row of input, the two halves of a unit in turns.
 * Wide: rows t and t + 8 of input in turns. */
struct lin_x {
    uint32_t xs;             /* an address in shared memory */
    uint32_t pitch16, n_tok; /* pitch: 64 bytes modulo 128 */
};
__host__ __device__ inline uint32_t lin_x_units(uint32_t k, uint8_t f)
{
    const uint32_t per = lin_x_half(f) * 8 * 2;
    return (k + per - 1) / per;
}
__host__ __device__ inline uint32_t lin_x_pitch16(uint32_t k, uint8_t f, bool wide)
{
    return lin_x_units(k, f) * lin_x_half(f) * (wide ? 4 : 2) + 4;
}
__host__ inline uint32_t lin_x_bytes(uint32_t k, uint8_t f, uint32_t n_tok)
{
    return (n_tok <= 8 ? n_tok : n_tok <= 16 ? 8 : 16) * lin_x_pitch16(k, f, n_tok > 8) * 16;
}
/* Eight values as pairs, in the order in which codes come out of a register. */
template <int F> __device__ __forceinline__ uint4 lin_x_pack(const float4 &a, const float4 &b)
{
    return F == TF_BF16
               ? make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w))
           : F == TF_NV
               ? make_uint4(pack_bf16(a.x, b.x), pack_bf16(a.y, b.y), pack_bf16(a.z, b.z), pack_bf16(a.w, b.w))
               : make_uint4(pack_bf16(a.x, a.z), pack_bf16(a.y, a.w), pack_bf16(b.x, b.z), pack_bf16(b.y, b.w));
}

/* Keeps a value in its register: the compiler would make some anew for every slot. */
__device__ __forceinline__ void lin_keep(uint32_t &v)
{
    v = __shfl_sync(0xffffffffu, v, threadIdx.x & 31);
}

/* Eight values from e on, zeros after k. */
template <bool EVEN>
__device__ __forceinline__ void lin_load8(float4 (&v)[2], const float *x, uint32_t e, uint32_t k)
{
    if constexpr (EVEN) {
        v[0] = v[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (e < k) {
            v[0] = __ldcg((const float4 *)(x + e));
            v[1] = __ldcg((const float4 *)(x + e) + 1);
        }
    } else {
        float f[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            f[i] = e + i < k ? __ldcg(x + e + i) : 0.0f;
        }
        v[0] = make_float4(f[0], f[1], f[2], f[3]);
        v[1] = make_float4(f[4], f[5], f[6], f[7]);
    }
}

/* EVEN: rows and their widths are whole eights. B: pairs of eights in flight. */
template <int F, bool WIDE, bool EVEN, int B>
__device__ __forceinline__ void lin_stage_by(const lin_x &xs, const float *x, uint64_t stride, uint32_t k, uint32_t tid)
{
    constexpr uint32_t NT = LIN_WARPS * 32, XH = lin_fmt<F>::XH, JH = lin_fmt<F>::J / 2;
    const uint32_t per = lin_x_units(k, F) * XH * (WIDE ? 2 : 1); /* pairs a row */
    const uint32_t n = per * (!WIDE ? xs.n_tok : xs.n_tok <= 16 ? 8 : 16);
#pragma unroll 1
    for (uint32_t i0 = tid; i0 < n; i0 += B * NT) {
        float4 v[B][2][2];
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * NT, r = i / per, c = i - r * per, h = c / XH, m = c - h * XH;
            const uint32_t t0 = WIDE ? (r & 8) * 2 + (r & 7) : r, t1 = WIDE ? t0 + 8 : t0, last = xs.n_tok - 1;
            const uint32_t e0 = (WIDE ? c : h * 2 * XH + m) * 8, e1 = WIDE ? e0 : e0 + XH * 8, end = i < n ? k : 0;
            lin_load8<EVEN>(v[j][0], x + (t0 < last ? t0 : last) * stride, e0, end);
            lin_load8<EVEN>(v[j][1], x + (t1 < last ? t1 : last) * stride, e1, end);
        }
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * NT, r = i / per, c = i - r * per, h = c / XH, m = c - h * XH;
            if (i < n) {
                const uint4 a = lin_x_pack<F>(v[j][0][0], v[j][0][1]), b = lin_x_pack<F>(v[j][1][0], v[j][1][1]);
                const uint32_t d = xs.xs + (r * xs.pitch16 + (h * JH + m % JH) * 8 + m / JH) * 16;
                sts128(d, make_uint4(a.x, b.x, a.y, b.y));
                sts128(d + 64, make_uint4(a.z, b.z, a.w, b.w));
            }
        }
    }
}

/* The consumers copy rows of k values, rounded to bf16, zeros after k. */
template <int F, bool WIDE>
__device__ __noinline__ void lin_stage(lin_x xs, const float *x, uint64_t stride, uint32_t k, uint32_t tid)
{
    if (((((uintptr_t)x | stride * 4) & 15) | (k & 7)) == 0) {
        lin_stage_by<F, WIDE, true, F == TF_BF16 && !WIDE ? 2 : 3>(xs, x, stride, k, tid);
    } else {
        lin_stage_by<F, WIDE, false, 1>(xs, x, stride, k, tid);
    }
}

/* ---- decoding --------------------------------------------------------------------------------- */

/* Four E4M3 codes as the bf16 pairs (0,2) (1,3), to be multiplied with 2^120: seven bits of a code are placed
 * as exponent and fraction of bf16. NaN codes come out as 480. */
__device__ __forceinline__ void lin_place(uint32_t w, uint32_t &even, uint32_t &odd)
{
    uint32_t s; /* each code's sign; every second is then hidden by the other bits */
    asm("and.b32 %0, %1, 0x80808080;" : "=r"(s) : "r"(w)); /* the compiler would mask both results apart */
    asm("lop3.b32 %0, %1, 0x07f007f0, %2, 0xe2;" : "=r"(even) : "r"(w << 4), "r"(s << 8));
    asm("lop3.b32 %0, %1, 0x07f007f0, %2, 0xe2;" : "=r"(odd) : "r"(w >> 4), "r"(s));
}

#define LIN_LARGE 134u
/* A chunk's bf16 pairs, two a product. scale: MX: E8M0 code; NV: two E4M3 codes. bad: gets bits of 0x80808080 for
 * NaN codes of E4M3. */
template <int F>
__device__ __forceinline__ void lin_decode(uint32_t (&p)[2 * lin_fmt<F>::J], const uint4 &v, uint32_t scale,
                                           uint32_t &bad)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    if constexpr (F == TF_BF16) {
        p[0] = v.x, p[1] = v.y, p[2] = v.z, p[3] = v.w;
    } else if constexpr (F == TF_NV) {
        const float2 sf = e4m3x2_f((uint16_t)scale);
        const uint32_t s0 = nv_scale(sf.x), s1 = nv_scale(sf.y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t o[4];
            dec_nv(w[i], i < 2 ? s0 : s1, o);
            p[4 * i] = o[0], p[4 * i + 1] = o[1], p[4 * i + 2] = o[2], p[4 * i + 3] = o[3];
        }
    } else {
        /* 2^120 x the scale in one factor, where that is a bf16; else see lin_decode_large */
        const uint32_t s = F == TF_MX && scale <= LIN_LARGE ? scale * 0x00800080u + 0x3c003c00u : 0x7b807b80u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bad |= (w[i] & 0x7f7f7f7fu) + 0x01010101u;
            lin_place(w[i], p[2 * i], p[2 * i + 1]);
            p[2 * i] = mul_bf16x2(p[2 * i], s);
            p[2 * i + 1] = mul_bf16x2(p[2 * i + 1], s);
        }
    }
}
/* The rest of it for MX scales above LIN_LARGE. */
__device__ __forceinline__ void lin_decode_large(uint32_t (&p)[8], uint32_t scale)
{
    if (scale > LIN_LARGE) {
        const uint32_t e = e8m0_pair(scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            p[i] = mul_bf16x2(p[i], e);
        }
    }
}

/* ---- slots ------------------------------------------------------------------------------------ */

/* A lane's scale codes of its chunk: half `p` of the unit whose scales begin at sc, chunk q. */
template <int F> __device__ __forceinline__ uint32_t lin_scale(uint32_t sc, uint32_t p, uint32_t q)
{
    return F == TF_MX ? lds8(sc + p * 2 + q / 2) : F == TF_NV ? lds16(sc + p * 8 + q * 2) : 0;
}
/* Scale bytes a unit. */
template <int F> struct lin_unit_scale {
    static constexpr uint32_t N = F == TF_MX ? 4 : F == TF_NV ? 16 : 0;
};

/* The scale of FP8 blocks for row r, unit u. */
__device__ __forceinline__ float lin_block_scale(const stream_w &w, uint32_t r, uint32_t u)
{
    const uint32_t row = r < w.rows ? r : w.rows - 1;
    const uint64_t i = (uint64_t)((w.row0 + row) / 128) * w.scale_cols + u;
    return w.scale_bf16 ? bf16_f(__ldg((const uint16_t *)w.scale + i)) : __ldg((const float *)w.scale + i);
}

/* Blocks of four rows a slot, whose decoding fills each other's waits. */
template <int F> struct lin_tiles {
    static constexpr int N = F == TF_BF16 ? 1 : 2;
};
template <int T> struct lin_narrow {
    float c[T][2][4];
    uint32_t bad[T];
};

/* What a lane needs of a unit. */
template <int F> struct lin_regs {
    static constexpr int T = lin_tiles<F>::N;
    uint4 v[T], x[lin_fmt<F>::J];
    uint32_t scale[T];
};
/* c: the lane's chunk, sc: scales of its row's unit, x: activations of its token for the unit. */
template <int F>
__device__ __forceinline__ void lin_load(lin_regs<F> &r, const stream_w &w, uint32_t c, uint32_t sc, uint32_t x,
                                         uint32_t p, uint32_t q)
{
#pragma unroll
    for (int t = 0; t < lin_tiles<F>::N; ++t) {
        r.v[t] = lds128(c + t * 4 * w.pitch);
        r.scale[t] = lin_scale<F>(sc + t * 4 * w.pitch_scale, p, q);
    }
#pragma unroll
    for (int i = 0; i < lin_fmt<F>::J; ++i) {
        r.x[i] = lds128(x + i * 64);
    }
}
template <int F>
__device__ __forceinline__ void lin_unit(lin_narrow<lin_tiles<F>::N> &acc, const stream_w &w, const lin_regs<F> &r,
                                         uint32_t row, uint32_t u, uint32_t lane)
{
    constexpr int J = lin_fmt<F>::J;
    constexpr int T = lin_tiles<F>::N;
    uint32_t p[T][2 * J];
    bool large = false;
#pragma unroll
    for (int t = 0; t < T; ++t) {
        lin_decode<F>(p[t], r.v[t], r.scale[t], acc.bad[t]);
        large = large || (F == TF_MX && r.scale[t] > LIN_LARGE);
    }
    if constexpr (F == TF_MX) {
        if (large) {
#pragma unroll
            for (int t = 0; t < T; ++t) {
                lin_decode_large(p[t], r.scale[t]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
        float part[2][4] = {};
        const float f = F == TF_BLOCK ? lin_block_scale(w, row + t * 4 + (lane & 3), u) : 1.0f;
#pragma unroll
        for (int i = 0; i < J; ++i) {
            mma_bf16(F == TF_BLOCK ? part[i & 1] : acc.c[t][i & 1], r.x[i].x, r.x[i].y, r.x[i].z, r.x[i].w, p[t][2 * i],
                     p[t][2 * i + 1]);
        }
        if (F == TF_BLOCK) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                acc.c[t][i][0] = fmaf(f, part[i][0], acc.c[t][i][0]);
                acc.c[t][i][3] = fmaf(f, part[i][3], acc.c[t][i][3]);
            }
        }
    }
}

/* Where a lane finds what it needs, in a slot of this matrix and in the activations. */
template <int F> struct lin_lane {
    uint32_t c, sc, x;
    __device__ __forceinline__ lin_lane(const stream_w &w, const lin_x &xs, uint32_t warp, uint32_t lane)
    {
        const uint32_t g = lane >> 2, r = g >> 1, p = g & 1, q = lane & 3, t = g < xs.n_tok ? g : xs.n_tok - 1;
        c = r * w.pitch + p * 64 + q * 16 + warp * 128;
        sc = 4 * lin_tiles<F>::N * w.pitch + r * w.pitch_scale + warp * lin_unit_scale<F>::N;
        x = xs.xs + (t * xs.pitch16 + q) * 16 + warp * (lin_fmt<F>::XH * 32);
        lin_keep(c);
        lin_keep(x);
    }
};

/* acc += the warp's units of a slot: n bytes of each row from byte `at` of the rows on. */
template <int F>
__device__ __forceinline__ void lin_slot(lin_narrow<lin_tiles<F>::N> &acc, const stream_w &w, uint32_t slot,
                                         uint32_t row, uint32_t at, uint32_t n, const lin_lane<F> &l, uint32_t warp,
                                         uint32_t lane)
{
    constexpr uint32_t XB = lin_fmt<F>::XH * 32 /* bytes of activations a unit */, SU = lin_unit_scale<F>::N;
    constexpr uint32_t S = LIN_WARPS;
    const uint32_t p = lane >> 2 & 1, q = lane & 3;
    uint32_t u = warp, c = slot + l.c, sc = slot + l.sc, x = l.x + at / 128 * XB;
    const uint32_t full = n / 128;
    lin_regs<F> a;
    if (F == TF_BF16) {
#pragma unroll 1
        for (; u + S < full; u += 2 * S, c += 256 * S, x += 2 * S * XB) {
            lin_regs<F> b;
            lin_load(a, w, c, 0, x, p, q);
            lin_load(b, w, c + 128 * S, 0, x + S * XB, p, q);
            lin_unit(acc, w, a, row, 0, lane);
            lin_unit(acc, w, b, row, 0, lane);
        }
    }
#pragma unroll 1
    for (; u < full; u += S, c += 128 * S, x += S * XB, sc += S * SU) {
        lin_load(a, w, c, sc, x, p, q);
        lin_unit(acc, w, a, row, at / 128 + u, lane);
    }
    if ((n & 127) && u == full) {
        const bool in = p * 64 + q * 16 < (n & 127);
        lin_load(a, w, c, sc, x, p, q);
#pragma unroll
        for (int t = 0; t < lin_tiles<F>::N; ++t) {
            a.v[t] = in ? a.v[t] : make_uint4(0, 0, 0, 0);
            a.scale[t] = in ? a.scale[t] : 0;
        }
        lin_unit(acc, w, a, row, at / 128 + u, lane);
    }
}

/* A warp's result: [rows of activations][4 rows of the matrix]; `step` bytes from one four rows to the next. */
template <int T>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_narrow<T> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
#pragma unroll
    for (int t = 0; t < T; ++t) {
        const uint32_t nan = __ballot_sync(0xffffffffu, acc.bad[t] & 0x80808080u) >> (8 * (lane & 3)) & 0xff;
        const float s = (acc.c[t][0][0] + acc.c[t][1][0]) + (acc.c[t][0][3] + acc.c[t][1][3]);
        if (lane / 4 < n_tok) {
            sts_f32(red + t * step + lane * 4, nan ? __uint_as_float(0x7fc00000u) : s);
        }
    }
}

template <int NM> struct lin_wide { /* NM: blocks of sixteen rows of activations */
    float c[2][2][NM][4];           /* [half][product][block] */
    uint32_t bad;
};

template <int F, int NM>
__device__ __forceinline__ void lin_half(lin_wide<NM> &acc, const int half, const stream_w &w, const uint4 &v,
                                         uint32_t scale, const uint32_t (&x)[NM], uint32_t off, uint32_t row,
                                         uint32_t u, uint32_t lane)
{
    constexpr int J = lin_fmt<F>::J;
    uint32_t p[2 * J];
    lin_decode<F>(p, v, scale, acc.bad);
    if constexpr (F == TF_MX) {
        lin_decode_large(p, scale);
    }
    float b0 = 1.0f, b1 = 1.0f;
    if (F == TF_BLOCK) {
        b0 = lin_block_scale(w, row + (lane & 3) * 2, u);
        b1 = lin_block_scale(w, row + (lane & 3) * 2 + 1, u);
    }
#pragma unroll
    for (int m = 0; m < NM; ++m) {
        float part[2][4] = {};
#pragma unroll
        for (int i = 0; i < J / 2; ++i) {
            const uint4 a = lds128(x[m] + off + i * 128), b = lds128(x[m] + off + i * 128 + 64);
            mma_bf16(F == TF_BLOCK ? part[0] : acc.c[half][0][m], a.x, a.y, a.z, a.w, p[4 * i], p[4 * i + 1]);
            mma_bf16(F == TF_BLOCK ? part[1] : acc.c[half][1][m], b.x, b.y, b.z, b.w, p[4 * i + 2], p[4 * i + 3]);
        }
        if (F == TF_BLOCK) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    acc.c[half][i][m][e] = fmaf(e & 1 ? b1 : b0, part[i][e], acc.c[half][i][m][e]);
                }
            }
        }
    }
}

template <int F, int NM> struct lin_lane_wide {
    lin_x xs;
    __device__ __forceinline__ lin_lane_wide(const stream_w &, const lin_x &x, uint32_t, uint32_t) : xs(x) {}
};

template <int F, int NM>
__device__ __forceinline__ void lin_slot(lin_wide<NM> &acc, const stream_w &w, uint32_t slot, uint32_t row,
                                         uint32_t at, uint32_t n, const lin_lane_wide<F, NM> &l, uint32_t warp,
                                         uint32_t lane)
{
    const lin_x &xs = l.xs;
    constexpr uint32_t XB = lin_fmt<F>::XH * 64, SU = lin_unit_scale<F>::N;
    const uint32_t g = lane >> 2, q = lane & 3, u0 = at / 128;
    const uint32_t c = slot + g * w.pitch + q * 16;
    const uint32_t sc = slot + 8 * w.pitch + g * w.pitch_scale;
    uint32_t x[NM];
#pragma unroll
    for (int i = 0; i < NM; ++i) {
        x[i] = xs.xs + ((i * 8 + g) * xs.pitch16 + q) * 16 + u0 * XB;
    }
    for (uint32_t u = warp; u * 128 < n; u += LIN_WARPS) {
#pragma unroll
        for (uint32_t p = 0; p < 2; ++p) {
            const bool in = u * 128 + p * 64 + q * 16 < n;
            const uint4 v = in ? lds128(c + u * 128 + p * 64) : make_uint4(0, 0, 0, 0);
            lin_half<F, NM>(acc, p, w, v, in ? lin_scale<F>(sc + u * SU, p, q) : 0, x, u * XB + p * (XB / 2), row,
                            u0 + u, lane);
        }
    }
}

template <int NM>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_wide<NM> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    const uint32_t nan = __ballot_sync(0xffffffffu, acc.bad & 0x80808080u) >> (8 * q);
#pragma unroll
    for (int m = 0; m < NM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 s;
            s.x = (acc.c[0][0][m][2 * h] + acc.c[0][1][m][2 * h]) + (acc.c[1][0][m][2 * h] + acc.c[1][1][m][2 * h]);
            s.y = (acc.c[0][0][m][2 * h + 1] + acc.c[0][1][m][2 * h + 1]) +
                  (acc.c[1][0][m][2 * h + 1] + acc.c[1][1][m][2 * h + 1]);
            s.x = nan & 0x0f ? __uint_as_float(0x7fc00000u) : s.x;
            s.y = nan & 0xf0 ? __uint_as_float(0x7fc00000u) : s.y;
            if (m * 16 + h * 8 + g < n_tok) {
                const uint32_t d = red + q / 2 * step + ((m * 16 + h * 8 + g) * 4 + (2 * q & 3)) * 4;
                sts_f32(d, s.x);
                sts_f32(d + 4, s.y);
            }
        }
    }
}

#endif
