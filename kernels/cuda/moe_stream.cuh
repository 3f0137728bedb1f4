/* moe_stream.cuh: what gate and up, and down, of experts that flow through rings of shared memory share: sizes,
 * runs of columns on the tensor cores, and the list of the experts a step picked. Included by moe_stream.cu, whose
 * head comment tells the whole. */
#ifndef QX_CUDA_MOE_STREAM_CUH
#define QX_CUDA_MOE_STREAM_CUH

#include "moe_rows.cuh"
#include "stream.cuh"

#define MS_CONS 10u             /* warps that multiply with gate and up */
#define MS_THREADS 384u
#define MS_DOWN 8u              /* warps of down */
#define MS_RUN 128u             /* columns of a run */
#define MS_RUNS 2u              /* of a warp */
#define MS_ROWS 24u             /* output rows a block of down, at most */
#define MS_MAX_ITEMS 120u       /* picks of eight rows */

struct ms_shared_w {
    const uint8_t *codes, *scale;
    float factor;
};

struct ms_args {
    uint32_t m_rows, k, hidden, inter, s_inter, n_experts;
    uint32_t items_s; /* of the shared expert */
    uint32_t slot, n_slots;
    uint32_t rpb, d_slot, d_slots, d_cols; /* down: rows a block; slots; columns a warp takes at a time */
    uint32_t h_col;                        /* bytes of a column */
    mr_by tiles_r;
    bool early;
    const float *m, *weight;
    const int32_t *expert;
    const struct qx_weight *gate, *up, *down;
    ms_shared_w s_gate, s_up, s_down;
    const uint16_t *s_vec;
    uint8_t *hs; /* [row * (k + 1) + slot] columns of bf16 */
    float *sg;   /* [row] sigmoid of the shared gate */
    float *y;
    uint32_t *flag; /* 1: the router has ended */
};

/* An expert: the slot of each row of the step that picked it, 0xff: did not. */
struct ms_pick {
    uint8_t slot[8];
};
struct ms_pair {
    const uint8_t *codes[2], *scale[2];
    float factor[2];
};

__host__ __device__ inline uint32_t ms_row_bytes(int f, uint32_t k)
{
    return f == TF_NV ? k / 2 : k;
}
__host__ __device__ inline uint32_t ms_scale_bytes(int f, uint32_t k)
{
    return f == TF_NV ? k / 16 : k / 32;
}
/* Rows of gate an item. */
__host__ __device__ inline uint32_t ms_item_rows(int f)
{
    return f == TF_NV ? 8 : 4;
}

/* ---- columns: 16-byte units of eight bf16; unit j of lane t of a run of 128 ---- */

template <int F> __device__ __forceinline__ uint32_t ms_unit_k(uint32_t j, uint32_t t)
{
    return F == TF_NV ? 32 * t + 8 * j : 64 * (j / 2) + 16 * t + 8 * (j & 1);
}
/* Byte of element i of a column in memory: unit j of lane t is number 4 j + t of its run. */
template <int F> __device__ __forceinline__ uint32_t ms_elem(uint32_t i)
{
    const uint32_t in = i & 127, e = i & 7;
    const uint32_t t = F == TF_NV ? in / 32 : in / 16 & 3;
    const uint32_t j = F == TF_NV ? in / 8 & 3 : in / 64 * 2 + (in / 8 & 1);
    return i / 128 * 256 + (4 * j + t) * 16 + (F != TF_NV ? 2 * e : e < 4 ? 4 * e : 4 * (e - 4) + 2);
}

/* ---- one run of 128 columns ---- */

__device__ __forceinline__ uint4 ms_lds(const uint8_t *p)
{
    return *(const uint4 *)p;
}

/* 16 rows as A: row g of gate and of up. c, s: codes and scales of the run, of the lane's row. */
template <int F>
__device__ __forceinline__ void ms_run_up(float (&acc)[2][4], const uint8_t *c0, const uint8_t *c1, const uint8_t *s0,
                                          const uint8_t *s1, const uint32_t (&x)[16], uint32_t t)
{
    if (F == TF_NV) {
        const uint4 a = ms_lds(c0 + t * 16), b = ms_lds(c1 + t * 16);
        const float2 sa = e4m3x2_f(*(const uint16_t *)(s0 + t * 2)), sb = e4m3x2_f(*(const uint16_t *)(s1 + t * 2));
        const uint32_t la[2] = {nv_scale(sa.x), nv_scale(sa.y)}, lb[2] = {nv_scale(sb.x), nv_scale(sb.y)};
        const uint32_t wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t p[4], r[4];
            mr_dec_nv(wa[j], la[j / 2], p);
            mr_dec_nv(wb[j], lb[j / 2], r);
            mma_bf16(acc[0], p[0], r[0], p[1], r[1], x[4 * j], x[4 * j + 1]);
            mma_bf16(acc[1], p[2], r[2], p[3], r[3], x[4 * j + 2], x[4 * j + 3]);
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t p[8], r[8];
            dec_e4m3x16(ms_lds(c0 + h * 64 + t * 16), e8m0_pair(s0[2 * h + t / 2]), p);
            dec_e4m3x16(ms_lds(c1 + h * 64 + t * 16), e8m0_pair(s1[2 * h + t / 2]), r);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int i = 8 * h + 4 * j;
                mma_bf16(acc[0], p[4 * j], r[4 * j], p[4 * j + 1], r[4 * j + 1], x[i], x[i + 1]);
                mma_bf16(acc[1], p[4 * j + 2], r[4 * j + 2], p[4 * j + 3], r[4 * j + 3], x[i + 2], x[i + 3]);
            }
        }
    }
}

/* Output rows of a block as A: a tile of 16 and one of eight, of which the lane has the rows at c[0], c[1] and
 * c[2]. Units J0 .. J1 of the run. */
template <int F, int J0, int J1>
__device__ __forceinline__ void ms_run_down(float (&acc)[2][4], bool third, const uint8_t *c, const uint32_t (&c_at)[3],
                                            const uint8_t *s, const uint32_t (&s_at)[3], const uint32_t (&x)[16],
                                            uint32_t t)
{
    if (F == TF_NV) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i && !third) {
                break;
            }
            uint4 v[2];
            uint32_t l[2][2];
#pragma unroll
            for (int h = 0; h < 2 - i; ++h) {
                v[h] = ms_lds(c + c_at[2 * i + h] + t * 16);
                const float2 f = e4m3x2_f(*(const uint16_t *)(s + s_at[2 * i + h] + t * 2));
                l[h][0] = nv_scale(f.x);
                l[h][1] = nv_scale(f.y);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t p[4], r[4] = {};
                mr_dec_nv(j == 0 ? v[0].x : j == 1 ? v[0].y : j == 2 ? v[0].z : v[0].w, l[0][j / 2], p);
                if (i == 0) {
                    mr_dec_nv(j == 0 ? v[1].x : j == 1 ? v[1].y : j == 2 ? v[1].z : v[1].w, l[1][j / 2], r);
                }
                mma_bf16(acc[i], p[0], r[0], p[1], r[1], x[4 * j], x[4 * j + 1]);
                mma_bf16(acc[i], p[2], r[2], p[3], r[3], x[4 * j + 2], x[4 * j + 3]);
            }
        }
    } else {
#pragma unroll
        for (int h = J0 / 2; h < J1 / 2; ++h) {
            uint32_t p[3][8];
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                dec_e4m3x16(ms_lds(c + c_at[i] + h * 64 + t * 16), e8m0_pair((s + s_at[i])[2 * h + t / 2]), p[i]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int k = 8 * h + 2 * j;
                mma_bf16(acc[0], p[0][2 * j], p[1][2 * j], p[0][2 * j + 1], p[1][2 * j + 1], x[k], x[k + 1]);
                mma_bf16(acc[1], p[2][2 * j], 0, p[2][2 * j + 1], 0, x[k], x[k + 1]);
            }
        }
    }
}

/* Sums of a lane to where they are added up: rows of the step 2 t and 2 t + 1, d[z] NULL: not wanted. */
__device__ __forceinline__ void ms_store_down(float *const (&d)[2], const float (&acc)[2][4], float f, uint32_t g,
                                              uint32_t nr)
{
#pragma unroll
    for (int z = 0; z < 2; ++z) {
        if (d[z]) {
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                if (8 * i + g < nr) {
                    d[z][8 * i + g] = f * acc[i / 2][2 * (i & 1) + z];
                }
            }
        }
    }
}

/* ---- the experts a step picked ---- */

#define MS_MAX_EXPERTS 1024u

/* Each once, in the order of their first row; one warp. tab: a word an expert. */
__device__ __forceinline__ uint32_t ms_picks(const ms_args &a, uint32_t *tab, ms_pick *pick, int32_t *uniq,
                                             uint32_t lane)
{
    const uint32_t items = a.m_rows * a.k;
    if (a.m_rows == 1) {
        if (lane < items) {
            uniq[lane] = __ldcg(a.expert + lane);
            *(uint2 *)&pick[lane] = make_uint2(0xffffff00u | lane, 0xffffffffu);
        }
        __syncwarp();
        return items;
    }
    constexpr uint32_t N = (MS_MAX_ITEMS + 31) / 32;
    int32_t e[N];
    uint32_t rank[N];
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        e[i] = lane + 32 * i < items ? __ldcg(a.expert + lane + 32 * i) : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        *(uint2 *)&pick[lane + 32 * i] = make_uint2(0xffffffffu, 0xffffffffu);
        if (e[i] >= 0) {
            tab[e[i]] = 0xffffffffu;
        }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        if (e[i] >= 0) {
            atomicMin(tab + e[i], lane + 32 * i);
        }
    }
    __syncwarp();
    uint32_t n = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const bool fresh = e[i] >= 0 && tab[e[i]] == lane + 32 * i;
        const uint32_t b = __ballot_sync(0xffffffffu, fresh);
        rank[i] = fresh ? n + __popc(b & ((1u << lane) - 1)) : 0xffffffffu;
        n += __popc(b);
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        if (rank[i] != 0xffffffffu) {
            tab[e[i]] = rank[i];
            uniq[rank[i]] = e[i];
        }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        if (e[i] >= 0) {
            const uint32_t item = lane + 32 * i, m = item / a.k;
            pick[tab[e[i]]].slot[m] = (uint8_t)(item - m * a.k);
        }
    }
    __syncwarp();
    return n;
}

__device__ __forceinline__ void ms_set(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t ms_get(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* A ring's next slot, counted by each side for itself. */
struct ms_at {
    uint32_t slot, phase;
    __device__ __forceinline__ void next(uint32_t n)
    {
        if (++slot == n) {
            slot = 0;
            phase ^= 1;
        }
    }
};

#endif
