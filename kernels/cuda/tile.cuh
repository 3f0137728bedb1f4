/* tile.cuh: 16 rows of a stored matrix times up to 8 activation rows on tensor cores, weights read once
 * and decoded in registers, activations kept to f32 precision.
 *
 * An activation is split into three bf16 terms (hi + mid + lo, 24 bits) that become columns of the mma's
 * B operand: column 3 m + t is term t of row m. A weight of BF16, E4M3 x 2^n or E2M1 x E4M3 is exact in
 * bf16; what is not (per-tensor and 128x128 scales) is applied to the f32 sums. Every column is summed
 * independently and the split of K among warps depends on the matrix only, so a row's bits do not depend
 * on how many rows share the launch.
 *
 * One warp takes 16 rows and a range of "steps"; a step is 64 bytes of codes of each row. Lane (g, t) =
 * (lane / 4, lane % 4) loads the 16-byte chunk t of rows g and g + 8; the order of k inside a step is
 * whatever that gives, and the activations are stored in shared memory in the same order. */
#ifndef QX_CUDA_TILE_CUH
#define QX_CUDA_TILE_CUH

#include "common.cuh"

enum { TF_GEN = 0, TF_BF16, TF_FP8, TF_BLOCK, TF_MX, TF_NV };

template <int F> struct tf {
    /* elements a step; 16-byte units of B a lane and step; steps loaded at once */
    static constexpr int KB = F == TF_NV ? 128 : (F == TF_FP8 || F == TF_BLOCK || F == TF_MX) ? 64 : 32;
    static constexpr int U = KB / 32;
};

/* A slice of a matrix: rows row0.. and columns col0 .. col0 + k. */
struct tile_w {
    struct qx_weight w;
    uint32_t col0, k;
    uint8_t tf;
};

__host__ __device__ inline uint64_t weight_row_bytes(uint8_t fmt, uint64_t cols)
{
    return fmt == QX_W_NVFP4 ? cols / 2
                             : (fmt == QX_W_BF16 || fmt == QX_W_F16) ? cols * 2
                                                                     : fmt == QX_W_F32 ? cols * 4 : cols;
}

/* Which path a slice takes: the fast one needs 16-byte chunks that lie whole inside a row. */
__host__ __device__ inline uint8_t tile_format(const struct qx_weight &w, uint32_t col0, uint32_t k)
{
    const bool al = ((uintptr_t)w.codes & 15) == 0;
    switch (w.fmt) {
    case QX_W_BF16: return al && w.cols % 8 == 0 && col0 % 8 == 0 && k % 8 == 0 ? TF_BF16 : TF_GEN;
    case QX_W_FP8: return al && w.cols % 16 == 0 && col0 % 16 == 0 && k % 16 == 0 ? TF_FP8 : TF_GEN;
    case QX_W_FP8_BLOCK:
        return al && w.cols % 16 == 0 && col0 % 128 == 0 && k % 16 == 0 ? TF_BLOCK : TF_GEN;
    case QX_W_MXFP8: return al && w.cols % 32 == 0 && col0 % 32 == 0 && k % 32 == 0 ? TF_MX : TF_GEN;
    case QX_W_NVFP4:
        return al && ((uintptr_t)w.scale & 1) == 0 && w.cols % 32 == 0 && col0 % 32 == 0 && k % 32 == 0
                   ? TF_NV : TF_GEN;
    default: return TF_GEN;
    }
}

__host__ __device__ inline uint32_t tf_kb(uint8_t f)
{
    return f == TF_NV ? 128 : (f == TF_FP8 || f == TF_BLOCK || f == TF_MX) ? 64 : 32;
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* ---- decoding a 16-byte chunk --------------------------------------------------------------- */

/* Four E4M3 codes x s as two bf16 pairs, exact for a power of two s. */
__device__ __forceinline__ void dec_fp8(uint32_t w, float s, uint32_t &p0, uint32_t &p1)
{
    const float2 a = e4m3x2_f((uint16_t)w), b = e4m3x2_f((uint16_t)(w >> 16));
    p0 = pack_bf16(a.x * s, a.y * s);
    p1 = pack_bf16(b.x * s, b.y * s);
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* Eight E2M1 codes as the pairs (0,4) (1,5) (2,6) (3,7) of bf16, times the scale pair s, which carries
 * 2^100: the codes are placed as bf16 with bias 126, the result is value x 2^-26. */
__device__ __forceinline__ void dec_nv(uint32_t w, uint32_t s, uint32_t (&p)[4])
{
    p[0] = mul_bf16x2(((w << 12) & 0x80008000u) | ((w << 6) & 0x01c001c0u), s);
    p[1] = mul_bf16x2(((w << 8) & 0x80008000u) | ((w << 2) & 0x01c001c0u), s);
    p[2] = mul_bf16x2(((w << 4) & 0x80008000u) | ((w >> 2) & 0x01c001c0u), s);
    p[3] = mul_bf16x2((w & 0x80008000u) | ((w >> 6) & 0x01c001c0u), s);
}
__device__ __forceinline__ uint32_t nv_scale(float s)
{
    const float v = s * 0x1p100f;
    return pack_bf16(v, v);
}

/* ---- activations ---------------------------------------------------------------------------- */

/* Eight values to three 16-byte units (hi, mid, lo). nv: in the order 0 4 1 5 2 6 3 7. */
__device__ __forceinline__ void split3(const float (&v)[8], bool nv, uint4 (&u)[3])
{
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        a[i] = nv ? v[(i & 1) ? 4 + i / 2 : i / 2] : v[i];
    }
#pragma unroll
    for (int t = 0; t < 3; ++t) {
        uint32_t p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = pack_bf16(a[2 * i], a[2 * i + 1]);
            const float l = bf16_lo(p[i]), h = bf16_hi(p[i]);
            /* an infinity has no remainder */
            a[2 * i] = fabsf(l) == __uint_as_float(0x7f800000u) ? 0.0f : a[2 * i] - l;
            a[2 * i + 1] = fabsf(h) == __uint_as_float(0x7f800000u) ? 0.0f : a[2 * i + 1] - h;
        }
        u[t] = make_uint4(p[0], p[1], p[2], p[3]);
    }
}

/* Where unit (step, t, j) of a column lies, in units. */
template <int F> __device__ __forceinline__ uint32_t unit_pos(uint32_t step, uint32_t t, uint32_t j)
{
    return step * (4 * tf<F>::U) + j * 4 + t;
}

/* Bytes from column to column for so many units: 64 modulo 128, so that a quarter warp's 16-byte reads
 * meet no bank twice. */
__host__ __device__ inline uint32_t col_stride(uint32_t units)
{
    return (units * 16 + 63) / 128 * 128 + 64;
}

/* Eight values rounded to bf16: then only the first of the three terms is not zero. */
__device__ __forceinline__ void round8(float (&v)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const uint32_t p = pack_bf16(v[i], v[i + 1]);
        v[i] = bf16_lo(p);
        v[i + 1] = bf16_hi(p);
    }
}

/* Rows of activations in memory. load8: elements k .. k+7 of row m, zero past n. */
struct src_rows {
    const float *x;
    uint64_t stride;
    uint32_t n;
    bool act_bf16;
    __device__ __forceinline__ void load8(uint32_t m, uint32_t k, float (&v)[8]) const
    {
        const float *p = x + m * stride + k;
        if (k + 8 <= n && ((uintptr_t)p & 15) == 0) {
            const float4 a = __ldcg((const float4 *)p), b = __ldcg((const float4 *)p + 1);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] = k + i < n ? __ldcg(p + i) : 0.0f;
            }
        }
        if (act_bf16) {
            round8(v);
        }
    }
};

/* All threads of the block store columns of m rows for steps [s0, s1) of each of the `parts` ranges that
 * begin at part * per (parts 1: one range). Local step of part p: p * (s1 - s0) + (step - s0). */
template <int F, class Src>
__device__ void stage_b(uint4 *xs, uint32_t cs16, const Src &src, uint32_t m_rows, uint32_t parts,
                        uint32_t per, uint32_t s0, uint32_t s1, uint32_t tid, uint32_t nt)
{
    constexpr uint32_t UB = 4 * tf<F>::U;
    const uint32_t span = s1 - s0, units = parts * span * UB;
    for (uint32_t i = tid; i < m_rows * units; i += nt) {
        const uint32_t m = i / units, u = i - m * units;
        const uint32_t ls = u / UB, rem = u - ls * UB;
        const uint32_t part = ls / span;
        const uint32_t step = part * per + s0 + (ls - part * span);
        /* neighbouring threads take neighbouring units of memory */
        const uint32_t t = rem / tf<F>::U, j = rem - t * tf<F>::U;
        float v[8];
        src.load8(m, step * tf<F>::KB + t * (tf<F>::KB / 4) + j * 8, v);
        uint4 o[3];
        split3(v, F == TF_NV, o);
        uint4 *d = xs + (3 * m) * cs16 + ls * UB + j * 4 + t;
        d[0] = o[0];
        d[cs16] = o[1];
        d[2 * cs16] = o[2];
    }
}

/* ---- one warp, 16 rows, a range of steps ---------------------------------------------------- */

template <int F, int PB> struct tile_regs {
    uint4 a[PB][2];
    float s[F == TF_BLOCK || F == TF_MX ? PB : 1][2];
    uint16_t e[F == TF_NV ? PB : 1][2];
};

/* Row pointers of a lane. */
struct tile_ptr {
    const uint8_t *c[2];
    const uint8_t *s[2];
    uint32_t bytes; /* code bytes of the slice */
};

template <int F> __device__ __forceinline__ tile_ptr tile_rows(const tile_w &w, uint32_t row, uint32_t lane)
{
    tile_ptr p;
    const uint32_t g = lane >> 2;
    p.bytes = (uint32_t)weight_row_bytes(w.w.fmt, w.k);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t r = row + g + 8 * i;
        r = r < w.w.rows ? r : w.w.rows - 1;
        p.c[i] = (const uint8_t *)w.w.codes + (uint64_t)r * weight_row_bytes(w.w.fmt, w.w.cols) +
                 weight_row_bytes(w.w.fmt, w.col0) + (lane & 3) * 16;
        if (F == TF_NV) {
            p.s[i] = (const uint8_t *)w.w.scale + (uint64_t)r * (w.w.cols / 16) + w.col0 / 16 +
                     (lane & 3) * 2;
        } else if (F == TF_MX) {
            p.s[i] = (const uint8_t *)w.w.scale + (uint64_t)r * (w.w.cols / 32) + w.col0 / 32 +
                     (lane & 3) / 2;
        } else if (F == TF_BLOCK) {
            p.s[i] = (const uint8_t *)w.w.scale +
                     ((uint64_t)((w.w.row0 + r) / 128) * ((w.w.cols + 127) / 128) + w.col0 / 128) *
                         (w.w.scale_bf16 ? 2 : 4);
        } else {
            p.s[i] = nullptr;
        }
    }
    return p;
}

template <int F, int PB>
__device__ __forceinline__ void tile_load(tile_regs<F, PB> &t, const int i, const tile_ptr &p,
                                          bool scale_bf16, uint32_t s, uint32_t end, uint32_t lane)
{
    const bool in = s < end && s * 64 + (lane & 3) * 16 < p.bytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        t.a[i][h] = in ? ld_stream(p.c[h] + s * 64) : make_uint4(0, 0, 0, 0);
        if (F == TF_NV) {
            t.e[i][h] = in ? __ldg((const uint16_t *)(p.s[h] + s * 8)) : 0;
        } else if (F == TF_MX) {
            t.s[i][h] = in ? e8m0_f(__ldg(p.s[h] + s * 2)) : 0.0f;
        } else if (F == TF_BLOCK) {
            t.s[i][h] = !in ? 0.0f
                            : scale_bf16 ? bf16_f(__ldg((const uint16_t *)p.s[h] + s / 2))
                                         : __ldg((const float *)p.s[h] + s / 2);
        }
    }
}

/* Where B comes from: columns in shared memory ... */
struct b_shared {
    const uint4 *xs;
    uint32_t cs16, n_cols;
    __device__ __forceinline__ uint4 operator()(int n, uint32_t g, uint32_t pos) const
    {
        const uint32_t c = n * 8 + g;
        return c < n_cols ? xs[c * cs16 + pos] : make_uint4(0, 0, 0, 0);
    }
};
/* ... or a pointer to global memory a column block for this lane, NULL for none. */
template <int NB> struct b_global {
    const uint4 *p[NB];
    __device__ __forceinline__ uint4 operator()(int n, uint32_t, uint32_t pos) const
    {
        return p[n] ? __ldcg(p[n] + pos) : make_uint4(0, 0, 0, 0);
    }
};

/* acc += step i of t x columns; ls: the step's number in B. */
template <int F, int PB, int NB, class B>
__device__ __forceinline__ void tile_mma(float (&acc)[NB][4], const tile_regs<F, PB> &t, const int i,
                                         const B &bl, uint32_t ls, uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    float part[F == TF_BLOCK ? NB : 1][4] = {};
    uint4 b[NB][tf<F>::U];
#pragma unroll
    for (int n = 0; n < NB; ++n) {
#pragma unroll
        for (int j = 0; j < tf<F>::U; ++j) {
            b[n][j] = bl(n, g, unit_pos<F>(ls, q, j));
        }
    }
    const uint32_t lo[4] = {t.a[i][0].x, t.a[i][0].y, t.a[i][0].z, t.a[i][0].w};
    const uint32_t hi[4] = {t.a[i][1].x, t.a[i][1].y, t.a[i][1].z, t.a[i][1].w};
    if (F == TF_BF16) {
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            mma_bf16(acc[n], lo[0], hi[0], lo[1], hi[1], b[n][0].x, b[n][0].y);
            mma_bf16(acc[n], lo[2], hi[2], lo[3], hi[3], b[n][0].z, b[n][0].w);
        }
    } else if (F == TF_NV) {
        const float2 sl = e4m3x2_f(t.e[F == TF_NV ? i : 0][0]), sh = e4m3x2_f(t.e[F == TF_NV ? i : 0][1]);
        const uint32_t l0 = nv_scale(sl.x), l1 = nv_scale(sl.y), h0 = nv_scale(sh.x),
                       h1 = nv_scale(sh.y);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t a[4], c[4];
            dec_nv(lo[j], j < 2 ? l0 : l1, a);
            dec_nv(hi[j], j < 2 ? h0 : h1, c);
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const uint4 &bb = b[n][tf<F>::U == 4 ? j : 0];
                mma_bf16(acc[n], a[0], c[0], a[1], c[1], bb.x, bb.y);
                mma_bf16(acc[n], a[2], c[2], a[3], c[3], bb.z, bb.w);
            }
        }
    } else {
        const float sl = F == TF_MX ? t.s[F == TF_MX ? i : 0][0] : 1.0f;
        const float sh = F == TF_MX ? t.s[F == TF_MX ? i : 0][1] : 1.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t a0, a1, c0, c1;
            dec_fp8(lo[j], sl, a0, a1);
            dec_fp8(hi[j], sh, c0, c1);
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const uint4 &bb = b[n][tf<F>::U > 1 ? j / 2 : 0];
                mma_bf16(F == TF_BLOCK ? part[F == TF_BLOCK ? n : 0] : acc[n], a0, c0, a1, c1,
                         (j & 1) ? bb.z : bb.x, (j & 1) ? bb.w : bb.y);
            }
        }
        if (F == TF_BLOCK) {
            /* all lanes of a row share its scale, but a lane past the row's end has none: take it from
             * the first of the four, whose chunk is inside */
            const float s0 = __shfl_sync(0xffffffffu, t.s[F == TF_BLOCK ? i : 0][0], lane & ~3u);
            const float s1 = __shfl_sync(0xffffffffu, t.s[F == TF_BLOCK ? i : 0][1], lane & ~3u);
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                acc[n][0] = fmaf(s0, part[F == TF_BLOCK ? n : 0][0], acc[n][0]);
                acc[n][1] = fmaf(s0, part[F == TF_BLOCK ? n : 0][1], acc[n][1]);
                acc[n][2] = fmaf(s1, part[F == TF_BLOCK ? n : 0][2], acc[n][2]);
                acc[n][3] = fmaf(s1, part[F == TF_BLOCK ? n : 0][3], acc[n][3]);
            }
        }
    }
}

/* What is left to multiply sums with. */
__device__ __forceinline__ float tile_factor(const tile_w &w)
{
    return w.tf == TF_NV ? w.w.global * 0x1p26f : w.tf == TF_FP8 ? w.w.global : 1.0f;
}

/* Any format, element by element: rows row .. row+15, f32 sums, result as if in the first term. */
template <int NB>
__device__ void tile_generic(float *red, const tile_w &w, uint32_t row, const uint4 *xs, uint32_t cs16,
                             uint32_t n_cols, uint32_t step, uint32_t end, uint32_t ls, uint32_t lane)
{
    for (uint32_t r = 0; r < 16; ++r) {
        for (uint32_t c = 0; c < NB * 8; c += 3) {
            float sum = 0.0f;
            if (row + r < w.w.rows && c < n_cols) {
                for (uint32_t s = step; s < end; ++s) {
                    const uint32_t k = s * 32 + lane;
                    if (k < w.k) {
                        const uint32_t e = ((ls + (s - step)) * 4 + lane / 8) * 8 + (lane & 7);
                        const float x = (bf16_f(((const uint16_t *)(xs + c * cs16))[e]) +
                                         bf16_f(((const uint16_t *)(xs + (c + 1) * cs16))[e])) +
                                        bf16_f(((const uint16_t *)(xs + (c + 2) * cs16))[e]);
                        sum = fmaf(weight_at(w.w, row + r, w.col0 + k), x, sum);
                    }
                }
            }
            sum = warp_sum(sum);
            if (lane < 3 && c + lane < NB * 8) {
                red[r * (NB * 8) + c + lane] += lane == 0 ? sum : 0.0f;
            }
        }
    }
}

template <int NB>
__device__ __forceinline__ void tile_store(float *red, const float (&acc)[NB][4], uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
        *(float2 *)(red + g * (NB * 8) + n * 8 + 2 * q) = make_float2(acc[n][0], acc[n][1]);
        *(float2 *)(red + (g + 8) * (NB * 8) + n * 8 + 2 * q) = make_float2(acc[n][2], acc[n][3]);
    }
}

/* The sum of row r, activation row m over `parts` warps' results (each 16 x NB*8, one after another). */
template <int NB>
__device__ __forceinline__ float tile_result(const float *red, uint32_t parts, uint32_t r, uint32_t m)
{
    float s = 0.0f;
    for (uint32_t p = 0; p < parts; ++p) {
        const float *c = red + (p * 16 + r) * (NB * 8) + 3 * m;
        s += (c[0] + c[1]) + c[2];
    }
    return s;
}

/* How K is divided: warps a tile and steps a warp. Depends on the matrix only. */
struct tile_split {
    uint32_t steps, parts, per;
};
__host__ __device__ inline tile_split tile_divide(uint8_t f, uint32_t k, uint32_t max_parts)
{
    tile_split s;
    const uint32_t kb = tf_kb(f);
    s.steps = (k + kb - 1) / kb;
    s.parts = s.steps >= 32 ? 8 : s.steps >= 16 ? 4 : s.steps >= 8 ? 2 : 1;
    if (s.parts > max_parts) {
        s.parts = max_parts;
    }
    s.per = (s.steps + s.parts - 1) / s.parts;
    if (f == TF_BLOCK) {
        s.per = (s.per + 1) & ~1u;
    }
    return s;
}

/* n8 blocks for m activation rows. */
__host__ __device__ inline int tile_nb(uint32_t m)
{
    return m <= 2 ? 1 : m <= 5 ? 2 : 3;
}

/* Steps loaded at once. */
template <int F, int NB> struct tile_pb {
    static constexpr int V = F == TF_GEN ? 1
                             : F == TF_BF16 ? 5
                             : F == TF_NV ? (NB == 1 ? 3 : 2)
                                          : (NB == 3 ? 3 : 5);
};
__host__ __device__ inline uint32_t tile_pb_of(uint8_t f, int nb)
{
    return f == TF_GEN ? 1 : f == TF_BF16 ? 5 : f == TF_NV ? (nb == 1 ? 3 : 2)
                                                           : (nb == 3 ? 3 : 5);
}

/* Steps a part whose activations are in shared memory at one time, and the bytes of that. */
#define QX_TILE_X_BYTES (72u * 1024u)
__host__ __device__ inline uint32_t tile_stage_steps(uint8_t f, int nb, const tile_split &s)
{
    const uint32_t m = nb == 1 ? 2 : nb == 2 ? 5 : 8; /* the most rows, whatever a group has */
    const uint32_t step_bytes = 3 * m * s.parts * tf_kb(f) * 2, pb = tile_pb_of(f, nb);
    uint32_t n = QX_TILE_X_BYTES / step_bytes;
    n = n >= s.per ? s.per : n / pb * pb;
    return n < pb ? (pb < s.per ? pb : s.per) : n;
}
__host__ __device__ inline uint32_t tile_stage_stride(uint8_t f, const tile_split &s, uint32_t steps)
{
    return col_stride(s.parts * steps * (tf_kb(f) / 8));
}
__host__ inline uint32_t tile_x_bytes(uint8_t f, int nb, const tile_split &s, uint32_t m)
{
    return 3 * m * tile_stage_stride(f, s, tile_stage_steps(f, nb, s));
}

/* The whole product of one warp: its part of K of rows row .. row+15 into red [16][NB*8]. All threads of
 * the block call it together with the same matrix shape, since they stage the activations together.
 * Weights are loaded before pdl_wait, activations after; `ready` runs between (all threads). A warp with
 * nothing to do passes row >= w.rows (it still stages). */
template <int F, int NB, class Src, class Ready>
__device__ __forceinline__ void tile_run(float *red, const tile_w &w, const tile_split &sp, uint32_t row,
                                         uint32_t part, const Src &src, uint32_t m_rows, uint4 *xs,
                                         uint32_t tid, uint32_t nt, const Ready &ready)
{
    constexpr int PB = tile_pb<F, NB>::V;
    const uint32_t lane = tid & 31;
    const uint32_t begin = part * sp.per;
    const uint32_t lim = row < w.w.rows ? (begin + sp.per < sp.steps ? begin + sp.per : sp.steps) : 0;
    tile_regs<F, PB> t;
    tile_ptr p;
    if (F != TF_GEN) {
        p = tile_rows<F>(w, row, lane);
#pragma unroll
        for (int i = 0; i < PB; ++i) {
            tile_load<F, PB>(t, i, p, w.w.scale_bf16, begin + i, lim, lane);
        }
    }
    pdl_wait();
    ready();
    const uint32_t cap = tile_stage_steps(F, NB, sp);
    const uint32_t cs16 = tile_stage_stride(F, sp, cap) / 16;
    const b_shared bl = {xs, cs16, 3 * m_rows};
    float acc[NB][4] = {};
    if (F == TF_GEN) {
        for (uint32_t i = lane; i < 16 * NB * 8; i += 32) {
            red[i] = 0.0f;
        }
        __syncwarp();
    }
    for (uint32_t p0 = 0; p0 < sp.per; p0 += cap) {
        const uint32_t p1 = p0 + cap < sp.per ? p0 + cap : sp.per;
        if (p0) {
            __syncthreads();
        }
        stage_b<F>(xs, cs16, src, m_rows, sp.parts, sp.per, p0, p1, tid, nt);
        __syncthreads();
        const uint32_t l0 = part * (p1 - p0);
        if (F == TF_GEN) {
            const uint32_t e = begin + p1 < lim ? begin + p1 : lim;
            if (begin + p0 < e) {
                tile_generic<NB>(red, w, row, xs, cs16, 3 * m_rows, begin + p0, e, l0, lane);
            }
        } else {
            for (uint32_t b = p0; b < p1; b += PB) {
#pragma unroll
                for (int i = 0; i < PB; ++i) {
                    const uint32_t s = begin + b + i;
                    if (b + i < p1 && s < lim) {
                        tile_mma<F, PB, NB>(acc, t, i, bl, l0 + (b - p0) + i, lane);
                        tile_load<F, PB>(t, i, p, w.w.scale_bf16, s + PB, lim, lane);
                    }
                }
            }
        }
    }
    if (F != TF_GEN) {
        tile_store<NB>(red, acc, lane);
    }
}

struct tile_no_ready {
    __device__ __forceinline__ void operator()() const {}
};

/* Runs the code with the constant F for the slice's format. */
#define QX_TILE_SWITCH(F, format, ...)                            switch (format) {                                             case TF_BF16: { constexpr int F = TF_BF16; __VA_ARGS__; } break;        case TF_FP8: { constexpr int F = TF_FP8; __VA_ARGS__; } break;          case TF_BLOCK: { constexpr int F = TF_BLOCK; __VA_ARGS__; } break;      case TF_MX: { constexpr int F = TF_MX; __VA_ARGS__; } break;            case TF_NV: { constexpr int F = TF_NV; __VA_ARGS__; } break;            default: { constexpr int F = TF_GEN; __VA_ARGS__; } break;              }

__host__ inline tile_w make_tile_w(const struct qx_weight &w, uint32_t col0, uint32_t k)
{
    tile_w t;
    t.w = w;
    t.col0 = col0;
    t.k = k;
    t.tf = tile_format(w, col0, k);
    return t;
}

#endif
