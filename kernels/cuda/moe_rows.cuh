/* moe_rows.cuh: what gate and up, and down, of experts for rows of decoding share: matrices and columns as
 * they are cut, the ring through which a warp streams its tasks, one step on the tensor cores, and the list of
 * the experts a step picked. Included by moe_rows.cu, whose head comment tells the whole. */
#ifndef QX_CUDA_MOE_ROWS_CUH
#define QX_CUDA_MOE_ROWS_CUH

#include "async.cuh"
#include "moe.cuh"

#define MR_WARPS 16u
#define MR_STEP 1152u /* of a ring: 16 rows x 64 bytes of codes, 16 rows x 8 block scales */
#define MR_PER 5u     /* steps of a part */
#define MR_UNITS 64u  /* tiles whose parts may be outstanding; a power of two */

struct mr_cols {
    uint8_t n, item[8]; /* row * (k + 1) + slot */
    uint8_t row[8];
    uint8_t pad[3];
};

/* Division by a number known late, exact for x * d below 2^32. */
struct mr_by {
    uint32_t d, r;
    __host__ __device__ __forceinline__ void set(uint32_t v)
    {
        d = v;
        r = v > 1 ? 0xffffffffu / v + 1 : 0;
    }
    __device__ __forceinline__ uint32_t div(uint32_t x) const
    {
        return r ? __umulhi(x, r) : x;
    }
};

/* How the columns of a matrix are cut, the same for all of a list. */
struct mr_cut {
    uint32_t k, bytes, s_bytes; /* columns; bytes of a row and of its block scales in the ring (NVFP4) */
    uint32_t per, parts;        /* steps of a part, parts */
    uint8_t tf;
};

struct mr_mat {
    const uint8_t *codes, *scale;
    float factor; /* of the sums */
    uint32_t row0;
    uint8_t scale_bf16, pad[7];
};

struct mr_args {
    uint32_t m_rows, k, hidden, inter, s_inter, n_experts;
    uint32_t x_col, h_col; /* bytes from column to column */
    mr_cut up_s, up_r, down_s, down_r; /* of the shared expert and of the picked ones */
    mr_by parts_s, parts_r, tiles_s, tiles_r; /* of the tasks of gate and up */
    bool early;
    const float *m, *weight;
    const int32_t *expert;
    const struct qx_weight *gate, *up, *down;
    struct qx_weight s_gate, s_up, s_down, s_vec;
    uint8_t *hs; /* [row * (k + 1) + slot] columns of bf16 */
    float *sg;   /* [row] sigmoid of the shared gate */
    uint64_t *words; /* where columns go as words (moe_one.cuh) */
    unsigned *numbers;
    float *y;
};

/* ---- columns: bf16 in 16-byte units of 8, inside a unit in the order 0 4 1 5 2 6 3 7, the units of a run
 * of 16 exchanged so that no format's reads meet a bank twice ---- */

__host__ __device__ inline uint32_t mr_col_bytes(uint32_t k)
{
    return (k + 127) / 128 * 256 + 64;
}
__device__ __forceinline__ uint32_t mr_unit(uint32_t u)
{
    return (u ^ ((u >> 2) & 3)) * 16;
}
__device__ __forceinline__ uint32_t mr_elem(uint32_t k)
{
    const uint32_t e = k & 7;
    return mr_unit(k >> 3) + (e < 4 ? 2 * e : 2 * (e - 4) + 1) * 2;
}

template <bool SHARED> __device__ __forceinline__ uint4 mr_b(const uint8_t *p)
{
    return SHARED ? *(const uint4 *)p : __ldcg((const uint4 *)p);
}

/* Zeros instead of what lies at src, unless `on`. */
__device__ __forceinline__ void mr_copy16(uint32_t dst, const void *src, bool on)
{
    const uint32_t n = on ? 16 : 0;
    copy16(dst, src, n);
}

/* ---- one step: 16 rows x 64 bytes of codes with NB blocks of 8 columns ---- */

/* Eight E2M1 codes as pairs (0,4) (1,5) (2,6) (3,7): each nibble multiplied to where its sign and its other
 * bits belong in a bf16 of bias 126; s carries 2^100 (tile.cuh). */
__device__ __forceinline__ void mr_dec_nv(uint32_t w, uint32_t s, uint32_t (&p)[4])
{
    const uint32_t v = w >> 8;
    p[0] = mul_bf16x2(((w & 0x000f000fu) * 0x1040u) & 0x81c081c0u, s);
    p[1] = mul_bf16x2(((w & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, s);
    p[2] = mul_bf16x2(((v & 0x000f000fu) * 0x1040u) & 0x81c081c0u, s);
    p[3] = mul_bf16x2(((v & 0x00f000f0u) * 0x0104u) & 0x81c081c0u, s);
}

/* acc += 16 rows, decoded as p (the lane's row) and r (the row eight on), x the columns b. */
__device__ __forceinline__ void mr_mma(float (&acc)[4], const uint32_t (&p)[4], const uint32_t (&r)[4], const uint4 &b)
{
    mma_bf16(acc, p[0], r[0], p[1], r[1], b.x, b.y);
    mma_bf16(acc, p[2], r[2], p[3], r[3], b.z, b.w);
}
/* A step of BF16. */
__device__ __forceinline__ void mr_mma_bf16(float (&acc)[4], const uint32_t (&lo)[4], const uint32_t (&hi)[4],
                                            const uint4 &b)
{
    mma_bf16(acc, __byte_perm(lo[0], lo[2], 0x5410), __byte_perm(hi[0], hi[2], 0x5410),
             __byte_perm(lo[0], lo[2], 0x7632), __byte_perm(hi[0], hi[2], 0x7632), b.x, b.y);
    mma_bf16(acc, __byte_perm(lo[1], lo[3], 0x5410), __byte_perm(hi[1], hi[3], 0x5410),
             __byte_perm(lo[1], lo[3], 0x7632), __byte_perm(hi[1], hi[3], 0x7632), b.z, b.w);
}
/* Half j of a row's step of E4M3, times a power of two. */
__device__ __forceinline__ void mr_dec_bytes(const uint32_t (&w)[4], int j, float scale, uint32_t (&p)[4])
{
    dec_fp8(__byte_perm(w[2 * j], w[2 * j + 1], 0x5140), scale, p[0], p[1]);
    dec_fp8(__byte_perm(w[2 * j], w[2 * j + 1], 0x7362), scale, p[2], p[3]);
}

/* Where the columns of a lane are, the step each begins at, and for the formats whose scales are not in
 * the ring the scale rows of the lane's two rows. */
template <int NB> struct mr_side {
    const uint8_t *b[NB];
    uint32_t bs[NB];
    const uint8_t *q[2];
    uint32_t qs[2];
    bool q_bf16[2];
};

__device__ __forceinline__ float mr_block_scale(const uint8_t *q, uint32_t i, bool bf16)
{
    return bf16 ? bf16_f(__ldg((const uint16_t *)q + i)) : __ldg((const float *)q + i);
}

/* A step of NVFP4: 16 rows x 128 columns. a0, a1: a lane's codes of its two rows; e0, e1: their two block scales each;
 * column(n, j): the j-th 16 bytes of its n-th column. */
template <int NB, class C>
__device__ __forceinline__ void mr_step_nv(float (&acc)[NB][4], const uint4 &a0, const uint4 &a1, uint32_t e0,
                                           uint32_t e1, const C &column)
{
    const float2 sl = e4m3x2_f((uint16_t)e0), su = e4m3x2_f((uint16_t)e1);
    const uint32_t lo[4] = {a0.x, a0.y, a0.z, a0.w}, hi[4] = {a1.x, a1.y, a1.z, a1.w};
    const uint32_t l[2] = {nv_scale(sl.x), nv_scale(sl.y)}, h[2] = {nv_scale(su.x), nv_scale(su.y)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t p[4], r[4];
        mr_dec_nv(lo[j], l[j / 2], p);
        mr_dec_nv(hi[j], h[j / 2], r);
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            mr_mma(acc[n], p, r, column(n, j));
        }
    }
}

/* A step of MXFP8, half a block of each row a lane. lo, hi: its codes of its two rows; m0, m1: their scales; column(j):
 * the j-th 16 bytes of its column. */
template <class C>
__device__ __forceinline__ void mr_step_mx(float (&acc)[4], const uint32_t (&lo)[4], const uint32_t (&hi)[4], float m0,
                                           float m1, const C &column)
{
    float part[4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint32_t p[4], r[4];
        mr_dec_bytes(lo, j, m0, p);
        mr_dec_bytes(hi, j, m1, r);
        mr_mma(part, p, r, column(j));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        acc[j] += part[j];
    }
}

template <int NB, bool SHARED>
__device__ __forceinline__ void mr_step(float (&acc)[NB][4], uint8_t tf, const uint4 &a0, const uint4 &a1,
                                        uint32_t e0, uint32_t e1, const mr_side<NB> &x, uint32_t s, uint32_t lane)
{
    const uint32_t t = lane & 3;
    const uint32_t lo[4] = {a0.x, a0.y, a0.z, a0.w}, hi[4] = {a1.x, a1.y, a1.z, a1.w};
    if (tf == TF_NV) {
        mr_step_nv<NB>(acc, a0, a1, e0, e1, [&](int n, int j) {
            return mr_b<SHARED>(x.b[n] + (x.bs[n] + s) * 256 + t * 64 + ((j ^ t) << 4));
        });
    } else if (tf == TF_BF16) {
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            const uint32_t bs = x.bs[n] + s;
            const uint4 b = mr_b<SHARED>(x.b[n] + bs * 64 + ((t ^ (bs & 3)) << 4));
            mr_mma_bf16(acc[n], lo, hi, b);
        }
    } else {
        float part[NB][4] = {};
        float s0 = 1.0f, s1 = 1.0f, m0 = 1.0f, m1 = 1.0f;
        if (tf == TF_BLOCK) {
            s0 = mr_block_scale(x.q[0], (x.qs[0] + s) / 2, x.q_bf16[0]);
            s1 = mr_block_scale(x.q[1], (x.qs[1] + s) / 2, x.q_bf16[1]);
        } else if (tf == TF_MX) {
            m0 = e8m0_f(__ldg(x.q[0] + (x.qs[0] + s) * 2 + t / 2));
            m1 = e8m0_f(__ldg(x.q[1] + (x.qs[1] + s) * 2 + t / 2));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32_t p[4], r[4];
            mr_dec_bytes(lo, j, m0, p);
            mr_dec_bytes(hi, j, m1, r);
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const uint32_t bs = x.bs[n] + s;
                const uint4 b = mr_b<SHARED>(x.b[n] + bs * 128 + (((2 * t + j) ^ ((2 * bs + (t >> 1)) & 3)) << 4));
                mr_mma(part[n], p, r, b);
            }
        }
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            acc[n][0] = fmaf(s0, part[n][0], acc[n][0]);
            acc[n][1] = fmaf(s0, part[n][1], acc[n][1]);
            acc[n][2] = fmaf(s1, part[n][2], acc[n][2]);
            acc[n][3] = fmaf(s1, part[n][3], acc[n][3]);
        }
    }
}

/* ---- asynchronous copies: a warp's ring ---- */

/* What a lane copies next: chunk t of rows g and g + 8, and lanes below 16 the scales of row `lane`. */
struct mr_feed {
    const uint8_t *c[2], *s; /* s NULL: no scales */
    int32_t left[2];         /* bytes of the row from the lane's chunk on; not kept with FAST */
    uint32_t n;              /* steps */
};

/* Each consumed step is one produced step, empty when the tasks are all in. FAST: TF_GEN, or rows are whole steps of
 * NVFP4 and, of the shared expert, of this format. */
template <int R, int FAST, class Job> struct mr_ring {
    uint8_t *base;
    uint32_t rd, wr, next, n;
    mr_feed f;

    __device__ __forceinline__ void produce(const Job &job, uint32_t lane)
    {
        if (f.n == 0 && next < n) {
            job.feed(next, f, lane);
            next += MR_WARPS;
        }
        if (f.n) {
            const uint32_t d = smem_addr(base) + wr * MR_STEP;
            mr_copy16(d + lane * 16, f.c[0], FAST || f.left[0] > 0);
            mr_copy16(d + 512 + lane * 16, f.c[1], FAST || f.left[1] > 0);
            f.c[0] += 64;
            f.c[1] += 64;
            if (!FAST) {
                f.left[0] -= 64;
                f.left[1] -= 64;
            }
            if (f.s) {
                copy8(d + 1024 + lane * 8, f.s);
                f.s += 8;
            }
            --f.n;
        }
        copy_commit();
        wr = wr + 1 == R ? 0 : wr + 1;
    }
    __device__ __forceinline__ void begin(const Job &job, uint8_t *b, uint32_t first, uint32_t tasks, uint32_t lane)
    {
        base = b;
        rd = wr = 0;
        next = first;
        n = tasks;
        f.n = 0;
#pragma unroll 1
        for (int i = 0; i < R; ++i) {
            produce(job, lane);
        }
    }
};

/* n steps of the ring. */
template <int R, int FAST, int NB, bool SHARED, class Job>
__device__ __forceinline__ void mr_run(float (&acc)[NB][4], mr_ring<R, FAST, Job> &ring, const Job &job, uint8_t tf,
                                       const mr_side<NB> &x, uint32_t n, uint32_t lane)
{
#pragma unroll 1
    for (uint32_t s = 0; s < n; ++s) {
        copy_wait<R - 1>();
        __syncwarp();
        const uint8_t *p = ring.base + ring.rd * MR_STEP;
        ring.rd = ring.rd + 1 == R ? 0 : ring.rd + 1;
        const uint4 a0 = *(const uint4 *)(p + lane * 16), a1 = *(const uint4 *)(p + 512 + lane * 16);
        uint32_t e0 = 0, e1 = 0;
        if (tf == TF_NV) {
            e0 = *(const uint16_t *)(p + 1024 + lane * 2);
            e1 = *(const uint16_t *)(p + 1088 + lane * 2);
        }
        __syncwarp();
        ring.produce(job, lane);
        mr_step<NB, SHARED>(acc, tf, a0, a1, e0, e1, x, s, lane);
    }
}

/* ---- the shared expert's gate ---- */

/* The gate of a row from the sums of 512 threads, by all threads of a block of as many or more. red: a float a warp. */
__device__ __forceinline__ void mr_gate_end(float s, float *red, float *gate, uint32_t m)
{
    const uint32_t tid = threadIdx.x;
    s = warp_sum(s);
    if ((tid & 31) == 0) {
        red[tid / 32] = s;
    }
    __syncthreads();
    if (tid == 0) {
        s = red[0];
        for (uint32_t i = 1; i < 16; ++i) {
            s += red[i];
        }
        gate[m] = sigmoid_f(s);
    }
}

/* ---- matrices ---- */

/* Codes, and scales where copies of 16 bytes bring them, begin at multiples of 16 bytes. */
__host__ inline bool mr_aligned(const struct qx_weight &w)
{
    return ((uintptr_t)w.codes & 15) == 0 && (w.fmt == QX_W_FP8_BLOCK || ((uintptr_t)w.scale & 15) == 0);
}

__device__ __forceinline__ void mr_fill(mr_mat &m, const struct qx_weight &w)
{
    m.codes = (const uint8_t *)w.codes;
    m.scale = (const uint8_t *)w.scale;
    m.factor = w.fmt == QX_W_NVFP4 ? w.global * 0x1p26f : w.fmt == QX_W_FP8 ? w.global : 1.0f;
    m.row0 = w.row0;
    m.scale_bf16 = w.scale_bf16;
}

/* The scale row of formats whose scales do not go through the ring. */
__device__ __forceinline__ const uint8_t *mr_scale_row(const mr_mat &m, const mr_cut &c, uint32_t r)
{
    return m.scale + (c.tf == TF_BLOCK ? (uint64_t)((m.row0 + r) / 128) * ((c.k + 127) / 128) * (m.scale_bf16 ? 2 : 4)
                                       : (uint64_t)r * (c.k / 32));
}

/* The experts a step picked, each once, in the order of their first row, and the rows' columns. All threads;
 * ex: [128] in shared memory, 16 bytes aligned; rank: [128]. n_uniq is set after the call's last barrier. */
static __device__ void mr_unique(const mr_args &a, int32_t *ex, uint8_t *rank, mr_cols *cols, int32_t *uniq,
                                 uint32_t *n_uniq)
{
    const uint32_t items = a.m_rows * a.k, tid = threadIdx.x;
    if (a.m_rows == 1) {
        if (tid < items) {
            uniq[tid] = __ldcg(a.expert + tid);
            cols[tid].n = 1;
            cols[tid].item[0] = (uint8_t)tid;
            cols[tid].row[0] = 0;
        }
        *n_uniq = items;
        __syncthreads();
        return;
    }
    __shared__ uint32_t before[4], count[128];
    int32_t e = -1;
    if (tid < 128) {
        e = tid < items ? __ldcg(a.expert + tid) : -1 - (int32_t)tid;
        ex[tid] = e;
        count[tid] = 0;
    }
    __syncthreads();
    const uint32_t m = tid / a.k, row0 = m * a.k;
    uint32_t first = tid, c = 0;
    bool fresh = false;
    if (tid < 128) {
        for (uint32_t j = 0; j < items; j += 4) {
            const int4 v = *(const int4 *)(ex + j);
            const int32_t x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                if (x[i] == e && j + i < row0) {
                    first = first < j + i ? first : j + i;
                    ++c;
                }
            }
        }
        fresh = tid < items && c == 0;
        const uint32_t b = __ballot_sync(0xffffffffu, fresh);
        rank[tid] = (uint8_t)__popc(b & ((1u << (tid & 31)) - 1));
        if ((tid & 31) == 0) {
            before[tid / 32] = (uint32_t)__popc(b);
        }
    }
    __syncthreads();
    if (tid < items) {
        uint32_t r = rank[first];
        for (uint32_t w = 0; w < first / 32; ++w) {
            r += before[w];
        }
        cols[r].item[c] = (uint8_t)(m * (a.k + 1) + (tid - row0));
        cols[r].row[c] = (uint8_t)m;
        atomicAdd(&count[r], 1u);
        if (fresh) {
            uniq[r] = e;
        }
    }
    if (tid == 0) {
        *n_uniq = before[0] + before[1] + before[2] + before[3];
    }
    __syncthreads();
    if (tid < *n_uniq) {
        cols[tid].n = (uint8_t)count[tid];
    }
    __syncthreads();
}

#endif
