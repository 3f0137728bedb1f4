/* linear_slot.cuh: rows of a matrix of BF16 or NVFP4 in a slot of the ring times rows of activations, for linear.cu;
 * and what linear_bytes.cuh, which does the same for E4M3 codes, shares with it.
 *
 * A "unit" is 128 bytes of codes of a row, a "piece" is half of one. Warp w of eight takes the units w, w + 8, ... of
 * a row; it adds every second piece of its own, and in each the odd and the even products of the tensor core, apart:
 * four sums a warp, which are added at the end of the row, then the warps' in order. So a row's sum depends on its
 * matrix only, not on its block nor on how many rows of activations there are.
 *
 * Up to eight rows of activations ("narrow"): fours of rows of the matrix as they lie in memory. A quarter warp reads
 * one row's unit, all banks once whatever the distance of rows. Columns 2 r and 2 r + 1 of the tensor core's B are the
 * halves of row r's unit; the activations that belong to the first half are rows 0 to 7 of A, those of the second half
 * rows 8 to 15; half of the products are of no use and stay unread.
 * More ("wide"): eight rows of the matrix, 64 bytes modulo 128 apart, a piece after the other, sixteen rows of
 * activations in A. */
#ifndef QX_CUDA_LINEAR_SLOT_CUH
#define QX_CUDA_LINEAR_SLOT_CUH

#include "stream.cuh"

#define LIN_WARPS 8u     /* that consume */
#define LIN_MAX_SLOTS 16u
#define LIN_SHORT 3072u /* bytes of a row of E4M3 codes of which a slot has eight */

/* How shared memory is laid out, with a row's sums. */
enum lin_shape {
    LIN_FOURS,  /* fours of rows a slot, up to eight rows of input */
    LIN_EIGHTS, /* eight rows a slot, of E4M3 codes; up to eight rows of input */
    LIN_EIGHTS_20, /* the same for rows of 20 units, which are a segment */
    LIN_FOURS_48,  /* fours of E4M3 codes for rows of 48 units, which are a segment */
    LIN_W16,    /* wide, up to sixteen rows of input */
    LIN_W32,    /* wide, up to 32 */
};
__host__ __device__ constexpr bool lin_wide_shape(int s) { return s >= LIN_W16; }
__host__ __device__ constexpr bool lin_eights(int s) { return s == LIN_EIGHTS || s == LIN_EIGHTS_20; }
/* Units of all rows, 0 where that differs. */
__host__ __device__ constexpr uint32_t lin_exact(int s) { return s == LIN_EIGHTS_20 ? 20 : s == LIN_FOURS_48 ? 48 : 0; }

/* ---- formats ---------------------------------------------------------------------------------- */

/* Eights of activations a piece: two a product. */
__host__ __device__ constexpr uint32_t lin_x_half(uint8_t f)
{
    return f == TF_BF16 ? 4 : 16;
}
template <int F> struct lin_fmt {
    static constexpr bool BYTES = F == TF_FP8 || F == TF_BLOCK || F == TF_MX; /* codes are E4M3 */
    static constexpr uint32_t XH = lin_x_half(F);
    static constexpr int J = XH / 2; /* products a 16-byte chunk of codes */
};

/* Activations in shared memory, as A takes them: 16 bytes are two registers of A's rows 0 to 7 and two of its
 * rows 8 to 15, in turns. LIN_FOURS: a row of them is one row of input, the two halves of a unit in turns. Wide: rows
 * t and t + 8 of input in turns. E4M3: see linear_bytes.cuh. */
struct lin_x {
    uint32_t xs;             /* an address in shared memory */
    uint32_t pitch16, n_tok; /* pitch: 64 bytes modulo 128 */
    uint32_t n_units;        /* of E4M3 codes */
};
__host__ __device__ inline uint32_t lin_x_units(uint32_t k, uint8_t f)
{
    const uint32_t per = lin_x_half(f) * 8 * 2;
    return (k + per - 1) / per;
}
/* Of E4M3 codes. */
__host__ __device__ inline uint32_t lin_x8_units(uint32_t k)
{
    return (k + 127) / 128;
}
__host__ __device__ inline uint32_t lin_x_pitch16(uint32_t k, uint8_t f, bool wide)
{
    return lin_x_units(k, f) * lin_x_half(f) * (wide ? 4 : 2) + 4;
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

/* Who stages which items of a block's activations. In pairs of blocks each stages a half for both, which halves what
 * L2 has to send. */
template <bool SPREAD> struct lin_part {
    uint32_t peer, rank; /* peer: where the other block of the pair keeps its activations; 0: none */
    uint32_t bar;        /* that block's barrier */
    __device__ __forceinline__ uint32_t half(uint32_t n) const { return min((n + 31) / 32 * 16, n); }
    __device__ __forceinline__ uint32_t begin(uint32_t n) const { return SPREAD && peer ? rank * half(n) : 0; }
    __device__ __forceinline__ uint32_t end(uint32_t n) const { return SPREAD && peer && rank == 0 ? half(n) : n; }
    __device__ __forceinline__ void store(const lin_x &xs, uint32_t d, const uint4 &v) const
    {
        sts128(d, v);
        if (SPREAD && peer) {
            send128(d - xs.xs + peer, v, bar);
        }
    }
    __device__ __forceinline__ void store(const lin_x &xs, uint32_t d, float v) const
    {
        sts_f32(d, v);
        if (SPREAD && peer) {
            send32(d - xs.xs + peer, __float_as_uint(v), bar);
        }
    }
};
/* Items of 32 bytes; of E4M3 codes of 16, and a factor of four for each sixteen. */
template <int F, int SHAPE> __device__ __forceinline__ uint32_t lin_items(uint32_t n_tok, uint32_t k)
{
    if (lin_fmt<F>::BYTES) {
        return lin_x8_units(k) * 16 * n_tok;
    }
    const uint32_t rows = lin_wide_shape(SHAPE) ? (n_tok <= 16 ? 8 : 16) : n_tok;
    return lin_x_units(k, F) * lin_fmt<F>::XH * (lin_wide_shape(SHAPE) ? 2 : 1) * rows;
}
template <int F> __device__ __forceinline__ uint32_t lin_item_bytes(uint32_t n)
{
    return lin_fmt<F>::BYTES ? n * 16 + n / 16 * 4 : n * 32;
}
/* EVEN: rows and their widths are whole eights. B: pairs of eights in flight. */
template <int F, int SHAPE, bool EVEN, int B, bool SPREAD>
__device__ __forceinline__ void lin_stage_by(const lin_x &xs, const float *x, uint64_t stride, uint32_t k, uint32_t tid,
                                             const lin_part<SPREAD> &part)
{
    constexpr bool WIDE = lin_wide_shape(SHAPE);
    constexpr uint32_t NT = LIN_WARPS * 32, XH = lin_fmt<F>::XH, JH = lin_fmt<F>::J / 2;
    const uint32_t per = lin_x_units(k, F) * XH * (WIDE ? 2 : 1); /* pairs a row */
    const uint32_t n = lin_items<F, SHAPE>(xs.n_tok, k);
    const uint32_t end = part.end(n);
    const bool one = !lin_wide_shape(SHAPE) && xs.n_tok == 1;
#pragma unroll 1
    for (uint32_t i0 = part.begin(n) + tid; i0 < end; i0 += B * NT) {
        float4 v[B][2][2];
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * NT, r = one ? 0 : i / per, c = i - r * per, h = c / XH, m = c - h * XH;
            const uint32_t t0 = WIDE ? (r & 8) * 2 + (r & 7) : r, t1 = WIDE ? t0 + 8 : t0, last = xs.n_tok - 1;
            const uint32_t e0 = (WIDE ? c : h * 2 * XH + m) * 8, e1 = WIDE ? e0 : e0 + XH * 8, stop = i < end ? k : 0;
            lin_load8<EVEN>(v[j][0], x + (t0 < last ? t0 : last) * stride, e0, stop);
            lin_load8<EVEN>(v[j][1], x + (t1 < last ? t1 : last) * stride, e1, stop);
        }
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * NT, r = one ? 0 : i / per, c = i - r * per, h = c / XH, m = c - h * XH;
            if (i < end) {
                const uint4 a = stream_x_pack(v[j][0][0], v[j][0][1], F == TF_NV);
                const uint4 b = stream_x_pack(v[j][1][0], v[j][1][1], F == TF_NV);
                const uint32_t d = xs.xs + (r * xs.pitch16 + (h * JH + m % JH) * 8 + m / JH) * 16;
                part.store(xs, d, make_uint4(a.x, b.x, a.y, b.y));
                part.store(xs, d + 64, make_uint4(a.z, b.z, a.w, b.w));
            }
        }
    }
}

/* The consumers copy rows of k values, rounded to bf16, zeros after k. */
template <int F, int SHAPE, bool SPREAD>
__device__ __noinline__ void lin_stage(lin_x xs, const float *x, uint64_t stride, uint32_t k, uint32_t tid,
                                       lin_part<SPREAD> part)
{
    const bool even = ((((uintptr_t)x | stride * 4) & 15) | (k & 7)) == 0;
    if (even) {
        lin_stage_by<F, SHAPE, true, F == TF_BF16 && !lin_wide_shape(SHAPE) ? 2 : 3>(xs, x, stride, k, tid, part);
    } else {
        lin_stage_by<F, SHAPE, false, 1>(xs, x, stride, k, tid, part);
    }
}

/* ---- decoding --------------------------------------------------------------------------------- */

/* A chunk's bf16 pairs, two a product. scale: NV: two E4M3 codes. */
template <int F>
__device__ __forceinline__ void lin_decode(uint32_t (&p)[2 * lin_fmt<F>::J], const uint4 &v, uint32_t scale)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    if constexpr (F == TF_BF16) {
        p[0] = v.x, p[1] = v.y, p[2] = v.z, p[3] = v.w;
    } else {
        const float2 sf = e4m3x2_f((uint16_t)scale);
        const uint32_t s0 = nv_scale(sf.x), s1 = nv_scale(sf.y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t o[4];
            dec_nv(w[i], i < 2 ? s0 : s1, o);
            p[4 * i] = o[0], p[4 * i + 1] = o[1], p[4 * i + 2] = o[2], p[4 * i + 3] = o[3];
        }
    }
}

/* A row of MX codes times a row of activations where sums of blocks, or their factors, are not finite. */
static __device__ __noinline__ float lin_mx_row(const uint8_t *codes, const uint8_t *scale, const float *x, uint32_t k)
{
    float sum[8] = {};
#pragma unroll 1
    for (uint32_t i = 0; i < k; i += 8) {
        const uint2 c = __ldg((const uint2 *)(codes + i));
        const float s = e8m0_f(__ldg(scale + i / 32));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float v = e4m3_f((uint8_t)((j < 4 ? c.x : c.y) >> (8 * (j & 3)))) * s;
            sum[j] = fmaf(v, bf16_f(to_bf16(__ldcg(x + i + j))), sum[j]);
        }
    }
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* ---- slots ------------------------------------------------------------------------------------ */

/* A lane's scale codes of its chunk: chunk q of the piece whose scales begin at sc. */
template <int F> __device__ __forceinline__ uint32_t lin_scale(uint32_t sc, uint32_t q)
{
    return F == TF_NV ? lds16(sc + q * 2) : 0;
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

/* LIN_FOURS: fours of rows a slot; two where decoding is long, to fill each other's waits. */
template <int F> struct lin_tiles {
    static constexpr int N = F == TF_NV ? 2 : 1;
};
template <int T> struct lin_narrow {
    float c[T][2][4];
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
        r.scale[t] = lin_scale<F>(sc + t * 4 * w.pitch_scale + p * (lin_unit_scale<F>::N / 2), q);
    }
#pragma unroll
    for (int i = 0; i < lin_fmt<F>::J; ++i) {
        r.x[i] = lds128(x + i * 64);
    }
}
template <int F>
__device__ __forceinline__ void lin_unit(lin_narrow<lin_tiles<F>::N> &acc, const lin_regs<F> &r)
{
    constexpr int J = lin_fmt<F>::J;
#pragma unroll
    for (int t = 0; t < lin_tiles<F>::N; ++t) {
        uint32_t p[2 * J];
        lin_decode<F>(p, r.v[t], r.scale[t]);
#pragma unroll
        for (int i = 0; i < J; ++i) {
            mma_bf16(acc.c[t][i & 1], r.x[i].x, r.x[i].y, r.x[i].z, r.x[i].w, p[2 * i], p[2 * i + 1]);
        }
    }
}

/* Where a lane finds what it needs, in a slot of this matrix and in the activations. */
template <int F, int SHAPE> struct lin_lane {
    uint32_t c, sc, x;
    __device__ __forceinline__ lin_lane(const stream_w &w, const lin_x &xs, uint32_t warp, uint32_t lane)
    {
        constexpr uint32_t XB = lin_fmt<F>::XH * 32, SU = lin_unit_scale<F>::N; /* bytes a unit */
        const uint32_t g = lane >> 2, r = g >> 1, p = g & 1, q = lane & 3, t = g < xs.n_tok ? g : xs.n_tok - 1;
        x = xs.xs + (t * xs.pitch16 + q) * 16;
        c = r * w.pitch + p * 64 + q * 16 + warp * 128;
        sc = 4 * lin_tiles<F>::N * w.pitch + r * w.pitch_scale + warp * SU;
        x += warp * XB;
        lin_keep(c);
        lin_keep(x);
    }
};

/* The warp needs the slot no more. empty: its barrier. */
__device__ __forceinline__ void lin_release(uint32_t empty, uint32_t lane)
{
    __syncwarp();
    if (lane == 0) {
        bar_arrive(empty);
    }
}

/* N units of BF16 that are all the warp has of a slot: once they are in registers it gives the slot back. */
template <int N>
__device__ __forceinline__ void lin_plain(lin_narrow<1> &acc, uint32_t c, uint32_t x, uint32_t empty, uint32_t lane)
{
    constexpr uint32_t J = lin_fmt<TF_BF16>::J, XB = lin_fmt<TF_BF16>::XH * 32;
    uint4 v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        v[i] = lds128(c + i * (128 * LIN_WARPS));
    }
    lin_release(empty, lane);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t p[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (uint32_t k = 0; k < J; ++k) {
            const uint4 a = lds128(x + i * (LIN_WARPS * XB) + k * 64);
            mma_bf16(acc.c[0][k & 1], a.x, a.y, a.z, a.w, p[2 * k], p[2 * k + 1]);
        }
    }
}

template <int F, int T>
__device__ __forceinline__ void lin_slot(lin_narrow<T> &acc, const stream_w &w, uint32_t slot, uint32_t row,
                                         uint32_t at, uint32_t n, const lin_lane<F, LIN_FOURS> &l, uint32_t empty,
                                         uint32_t warp, uint32_t lane)
{
    constexpr uint32_t XB = lin_fmt<F>::XH * 32 /* bytes of activations a unit */, SU = lin_unit_scale<F>::N;
    constexpr uint32_t S = LIN_WARPS;
    const uint32_t p = lane >> 2 & 1, q = lane & 3;
    uint32_t u = warp, c = slot + l.c, sc = slot + l.sc, x = l.x + at / 128 * XB;
    const uint32_t full = n / 128;
    if constexpr (F == TF_BF16) {
        if (n == 6 * 128 * S) {
            lin_plain<6>(acc, c, x, empty, lane);
            return;
        }
        if (n == 5 * 128 * S) {
            lin_plain<5>(acc, c, x, empty, lane);
            return;
        }
    }
    lin_regs<F> a;
#pragma unroll 1
    for (; u < full; u += S, c += 128 * S, x += S * XB, sc += S * SU) {
        lin_load(a, w, c, sc, x, p, q);
        lin_unit<F>(acc, a);
    }
    if ((n & 127) && u == full) {
        const bool in = p * 64 + q * 16 < (n & 127);
        lin_load(a, w, c, sc, x, p, q);
#pragma unroll
        for (int t = 0; t < lin_tiles<F>::N; ++t) {
            a.v[t] = in ? a.v[t] : make_uint4(0, 0, 0, 0);
            a.scale[t] = in ? a.scale[t] : 0;
        }
        lin_unit<F>(acc, a);
    }
    lin_release(empty, lane);
}

/* A warp's result: [rows of activations][4 rows of the matrix]; `step` bytes from one four rows to the next. */
template <int T>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_narrow<T> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
#pragma unroll
    for (int t = 0; t < T; ++t) {
        const float s = (acc.c[t][0][0] + acc.c[t][1][0]) + (acc.c[t][0][3] + acc.c[t][1][3]);
        if (lane / 4 < n_tok) {
            sts_f32(red + t * step + lane * 4, s);
        }
    }
}

template <int NM> struct lin_wide { /* NM: blocks of sixteen rows of activations */
    float c[2][2][NM][4];           /* [half][product][block] */
};

template <int F, int NM>
__device__ __forceinline__ void lin_half(lin_wide<NM> &acc, const int half, const uint4 &v, uint32_t scale,
                                         const uint32_t (&x)[NM], uint32_t off)
{
    constexpr int J = lin_fmt<F>::J;
    uint32_t p[2 * J];
    lin_decode<F>(p, v, scale);
#pragma unroll
    for (int m = 0; m < NM; ++m) {
#pragma unroll
        for (int i = 0; i < J / 2; ++i) {
            const uint4 a = lds128(x[m] + off + i * 128), b = lds128(x[m] + off + i * 128 + 64);
            mma_bf16(acc.c[half][0][m], a.x, a.y, a.z, a.w, p[4 * i], p[4 * i + 1]);
            mma_bf16(acc.c[half][1][m], b.x, b.y, b.z, b.w, p[4 * i + 2], p[4 * i + 3]);
        }
    }
}

template <int F, int NM> struct lin_lane_wide {
    lin_x xs;
    __device__ __forceinline__ lin_lane_wide(const stream_w &, const lin_x &x, uint32_t, uint32_t) : xs(x) {}
};

template <int F, int NM>
__device__ __forceinline__ void lin_slot(lin_wide<NM> &acc, const stream_w &w, uint32_t slot, uint32_t row,
                                         uint32_t at, uint32_t n, const lin_lane_wide<F, NM> &l, uint32_t empty,
                                         uint32_t warp, uint32_t lane)
{
    const lin_x &xs = l.xs;
    constexpr uint32_t XB = lin_fmt<F>::XH * 32, SU = lin_unit_scale<F>::N / 2, W = LIN_WARPS;
    const uint32_t g = lane >> 2, q = lane & 3, j0 = at / 64;
    const uint32_t c = slot + g * w.pitch + q * 16;
    const uint32_t sc = slot + 8 * w.pitch + g * w.pitch_scale;
    uint32_t x[NM];
#pragma unroll
    for (int i = 0; i < NM; ++i) {
        x[i] = xs.xs + ((i * 8 + g) * xs.pitch16 + q) * 16 + j0 * XB;
    }
    for (uint32_t i = 2 * warp; i * 64 < n; i += 2 * W) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t j = i + h;
            if (j * 64 < n) {
                const bool in = j * 64 + q * 16 < n;
                const uint4 v = in ? lds128(c + j * 64) : make_uint4(0, 0, 0, 0);
                const uint32_t scale = in ? lin_scale<F>(sc + j * SU, q) : 0;
                lin_half<F, NM>(acc, h, v, scale, x, j * XB);
            }
        }
    }
    lin_release(empty, lane);
}

template <int NM>
__device__ __forceinline__ void lin_store(uint32_t red, uint32_t step, const lin_wide<NM> &acc, uint32_t n_tok,
                                          uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < NM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 s;
            s.x = (acc.c[0][0][m][2 * h] + acc.c[0][1][m][2 * h]) + (acc.c[1][0][m][2 * h] + acc.c[1][1][m][2 * h]);
            s.y = (acc.c[0][0][m][2 * h + 1] + acc.c[0][1][m][2 * h + 1]) +
                  (acc.c[1][0][m][2 * h + 1] + acc.c[1][1][m][2 * h + 1]);
            if (m * 16 + h * 8 + g < n_tok) {
                const uint32_t d = red + q / 2 * step + ((m * 16 + h * 8 + g) * 4 + (2 * q & 3)) * 4;
                sts_f32(d, s.x);
                sts_f32(d + 4, s.y);
            }
        }
    }
}

#endif
