/* moe_nv.cuh: what gate and up, and down, of NVFP4 experts of the released widths share: sizes, decoding, the list of
 * the experts a step picked, and the shared expert's tiles in registers. Included by moe_nv.cu, whose head comment
 * tells the whole. */
#ifndef QX_CUDA_MOE_NV_CUH
#define QX_CUDA_MOE_NV_CUH

#include "moe_rows.cuh"

#define NV_H 2560u
#define NV_I 640u
#define NV_TILES (NV_I / 8u) /* of gate and up: eight rows of each */
#define NV_PARTS 4u          /* of a tile's columns, each summed by itself */
#define NV_MAX_K 10u
#define NV_D 20u             /* output rows a block of down */
#define NV_QUADS (NV_D / 4u) /* groups of four of them */
#define NV_BLOCKS (NV_H / NV_D)
#define NV_XCOL (NV_H * 2u + 64u) /* bytes from column to column */
#define NV_HCOL (NV_I * 2u)
#define NV_LIST_AT (128u << 10) /* in the workspace; the columns before it take 256 + 8 * 11 * NV_HCOL bytes */
#define NV_MAT_WORDS 6u         /* of an nv_mat and of an mr_cols */
#define NV_COLS_WORDS 5u

struct nv_list;
struct nv_args {
    static constexpr uint32_t hidden = NV_H;
    uint32_t m_rows, k, n_experts;
    bool early;
    const float *m, *weight;
    const int32_t *expert;
    const struct qx_weight *gate, *up, *down;
    const uint8_t *s_codes[3], *s_scale[3]; /* of the shared expert: gate, up, down */
    const uint16_t *s_vec;
    uint8_t *hs; /* [row * (k + 1) + slot] columns of bf16 */
    float *sg;   /* [row] sigmoid of the shared gate */
    float *y;
    struct nv_list *list;
};

/* An expert's matrix. */
struct nv_mat {
    const uint8_t *codes, *scale;
    float factor;
    uint32_t pad;
};

/* ---- products ---- */

/* Where unit u (eight values) of a column lies: so that the four lanes of a row, which take 32 columns each of 128,
 * read side by side. */
__device__ __forceinline__ uint32_t nv_unit(uint32_t u)
{
    return ((u & ~15u) + (u & 3) * 4 + ((u >> 2) & 3)) * 16;
}

/* mr_step_nv of columns in the order of nv_unit. x: the lane's; off: the step's in them. */
template <int NB>
__device__ __forceinline__ void nv_step(float (&acc)[NB][4], const uint4 &a0, const uint4 &a1, uint32_t e0, uint32_t e1,
                                        const uint32_t (&x)[NB], uint32_t off)
{
    mr_step_nv<NB>(acc, a0, a1, e0, e1, [&](int n, int j) { return lds128(x[n] + off + j * 64); });
}

/* ---- the shared expert: steps of 64 bytes a row, all of a part in registers ---- */

template <int TF> struct nv_shared {
    static constexpr int ELEM = TF == TF_BF16 ? 2 : 1;        /* bytes of a code */
    static constexpr int N = 5;                               /* steps of a part */
    static constexpr int PARTS = NV_H * ELEM / 64 / N, D_PARTS = NV_I * ELEM / 64 / N; /* of gate and up, of down */
};

/* N steps of two rows from `first` on; c0, c1, s0, s1: rows of codes and scales. */
template <int TF, int N> struct nv_part {
    uint4 a[N], b[N];

    __device__ __forceinline__ void load(const uint8_t *c0, const uint8_t *c1, uint32_t first, uint32_t t)
    {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            a[i] = ld_stream(c0 + (first + i) * 64 + t * 16);
            b[i] = ld_stream(c1 + (first + i) * 64 + t * 16);
        }
    }
    /* col: a lane's column, in the order of nv_unit or of mr_unit */
    template <bool NV = false>
    __device__ __forceinline__ void run(float (&acc)[4], const uint8_t *col, const uint8_t *s0, const uint8_t *s1,
                                        uint32_t first, uint32_t t) const
    {
        uint8_t m[TF == TF_MX ? N : 1], n[TF == TF_MX ? N : 1];
#pragma unroll
        for (int i = 0; TF == TF_MX && i < N; ++i) {
            m[i] = __ldg(s0 + (first + i) * 2 + t / 2);
            n[i] = __ldg(s1 + (first + i) * 2 + t / 2);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            uint32_t lo[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, hi[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
            const uint32_t bs = first + i;
#pragma unroll
            for (int j = 0; j < 4; ++j) { /* decoded here, not before a loop around this */
                asm volatile("" : "+r"(lo[j]), "+r"(hi[j]));
            }
            if (TF == TF_BF16) {
                const uint4 x = *(const uint4 *)(col + (NV ? nv_unit(bs * 4 + t) : mr_unit(bs * 4 + t)));
                mr_mma_bf16(acc, lo, hi, x);
            } else {
                mr_step_mx(acc, lo, hi, e8m0_f(m[i]), e8m0_f(n[i]), [&](int j) {
                    const uint32_t u = bs * 8 + 2 * t + j;
                    return *(const uint4 *)(col + (NV ? nv_unit(u) : mr_unit(u)));
                });
            }
        }
    }
};

/* ---- the experts a step picked ---- */

/* What up tells down. */
struct nv_list {
    uint32_t n, pad[3];
    nv_mat mat[8 * NV_MAX_K];
    mr_cols cols[8 * NV_MAX_K];
};
static_assert(sizeof(nv_mat) == NV_MAT_WORDS * 4 && sizeof(mr_cols) == NV_COLS_WORDS * 4, "");
static_assert(256 + 8 * (NV_MAX_K + 1) * NV_HCOL <= NV_LIST_AT, "");

struct nv_picks {
    uint32_t before[4], n;
};

__device__ __forceinline__ void nv_fill(nv_mat &m, const struct qx_weight &w)
{
    m.codes = (const uint8_t *)w.codes;
    m.scale = (const uint8_t *)w.scale;
    m.factor = w.global * 0x1p26f;
}

/* Each expert once, in the order of its first item, with the rows that picked it; fill(i, e): what is to be had of
 * expert e, the i-th. mask: [n_experts] bytes, zero; rank the same, whatever it holds. By all threads, at least 128;
 * complete after the caller's next barrier. */
template <class F>
__device__ __forceinline__ void nv_unique(const nv_args &a, uint32_t *mask, uint8_t *rank, mr_cols *cols, nv_picks &p,
                                          const F &fill)
{
    const uint32_t items = a.m_rows * a.k, tid = threadIdx.x;
    const int32_t e = tid < items ? __ldcg(a.expert + tid) : 0;
    if (a.m_rows == 1) {
        if (tid < items) {
            cols[tid].n = 1;
            cols[tid].item[0] = (uint8_t)tid;
            cols[tid].row[0] = 0;
            fill(tid, e);
        }
        if (tid == 0) {
            p.n = items;
        }
        return;
    }
    const uint32_t row = tid / a.k, word = (uint32_t)e >> 2, shift = ((uint32_t)e & 3) * 8;
    if (tid < items) {
        atomicOr(&mask[word], 1u << (row + shift));
    }
    __syncthreads();
    uint32_t rows = 0;
    bool fresh = false;
    if (tid < 128) {
        rows = tid < items ? (mask[word] >> shift) & 0xff : 0;
        fresh = rows && (rows & ((1u << row) - 1)) == 0;
        const uint32_t b = __ballot_sync(0xffffffffu, fresh);
        if ((tid & 31) == 0) {
            p.before[tid / 32] = (uint32_t)__popc(b);
        }
        __syncwarp();
        if (fresh) { /* its warp and its number there */
            rank[e] = (uint8_t)(tid / 32 * 32 + (uint32_t)__popc(b & ((1u << (tid & 31)) - 1)));
        }
    }
    __syncthreads();
    if (tid < items) {
        uint32_t r = rank[e] & 31;
        for (uint32_t w = 0; w < rank[e] / 32u; ++w) {
            r += p.before[w];
        }
        const uint32_t c = (uint32_t)__popc(rows & ((1u << row) - 1));
        cols[r].item[c] = (uint8_t)(row * (a.k + 1) + (tid - row * a.k));
        cols[r].row[c] = (uint8_t)row;
        if (fresh) {
            cols[r].n = (uint8_t)__popc(rows);
            fill(r, e);
        }
    }
    if (tid == 0) {
        p.n = p.before[0] + p.before[1] + p.before[2] + p.before[3];
    }
}

#endif
