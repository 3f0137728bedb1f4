/* moe_rows.cu: experts for rows of decoding whose inputs of products are bf16.
 *
 * Two launches of one block a multiprocessor. Every warp streams its own tasks, a task being 16 rows of
 * weights and a part of their columns, through a ring of its own in shared memory: 64 bytes of codes of each
 * row a step, the next tasks' steps in flight while this one's are multiplied. moe_rows_up takes 8 rows of
 * gate and the same 8 of up as the 16 rows of a tensor core tile, so that silu(gate) * up is made where the
 * sums end; the parts of a tile are added in their order by the warp that ends last. moe_rows_down gives each
 * block some output rows; four times four of them, of one or two experts, make a tile, and the experts are
 * weighted and added in slot order at the end.
 *
 * Columns of a tile are rows of the step that picked the expert. How a matrix is divided and the order of all
 * sums depend on the matrix alone, so a row's bits do not depend on the others.
 *
 * What may be read before the wait: moe_rows_down starts only after every block of moe_rows_up has seen the
 * router end, so expert numbers and weights are read at once. moe_rows_up reads m at once with `early` set:
 * then the launch before it is the router, which lets others start only after it has seen m. */
#include "moe.cuh"

#define MR_WARPS 16u
#define MR_STEP 1152u /* of a ring: 16 rows x 64 bytes of codes, 16 rows x 8 block scales */
#define MR_PER 5u     /* steps of a part */
#define MR_UNITS 64u  /* tiles whose parts may be outstanding; a power of two */

struct mr_mat {
    struct qx_weight w;
    float factor; /* of the sums */
    uint8_t tf, pad[3];
};

struct mr_cols {
    uint8_t n, item[8]; /* row * (k + 1) + slot */
    uint8_t row[8];
    uint8_t pad[3];
};

/* Division by a number known late, exact for x * d below 2^32. */
struct mr_by {
    uint32_t d, r;
    __device__ __forceinline__ void set(uint32_t v)
    {
        d = v;
        r = v > 1 ? 0xffffffffu / v + 1 : 0;
    }
    __device__ __forceinline__ uint32_t div(uint32_t x) const
    {
        return r ? __umulhi(x, r) : x;
    }
};

struct mr_args {
    uint32_t m_rows, k, hidden, inter, s_inter, n_experts;
    uint32_t x_col, h_col; /* bytes from column to column */
    bool early;
    const float *m, *weight;
    const int32_t *expert;
    const struct qx_weight *gate, *up, *down;
    struct qx_weight s_gate, s_up, s_down, s_vec;
    uint8_t *hs; /* [row * (k + 1) + slot] columns of bf16 */
    float *sg;   /* [row] sigmoid of the shared gate */
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

/* ---- asynchronous copies ---- */

__device__ __forceinline__ void cp16(uint32_t dst, const void *src, bool on)
{
    const uint32_t n = on ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void cp8(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void cp_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* What a lane copies next: chunk t of rows g and g + 8, and lanes below 16 the scales of row `lane`. */
struct mr_feed {
    const uint8_t *c[2], *s;
    int32_t left[2]; /* bytes of the row from the lane's chunk on */
    uint32_t at, end;
};

/* A warp's ring. Each consumed step is one produced step, empty when the tasks are all in. */
template <int R, class Job> struct mr_ring {
    uint8_t *base;
    uint32_t rd, wr, next, n;
    mr_feed f;

    __device__ __forceinline__ void produce(const Job &job, uint32_t lane)
    {
        while (f.at == f.end && next < n) {
            job.feed(next, f, lane);
            next += MR_WARPS;
        }
        if (f.at < f.end) {
            const uint32_t d = (uint32_t)__cvta_generic_to_shared(base) + wr * MR_STEP, off = f.at * 64;
            cp16(d + lane * 16, f.c[0] + off, (int32_t)off < f.left[0]);
            cp16(d + 512 + lane * 16, f.c[1] + off, (int32_t)off < f.left[1]);
            if (f.s && lane < 16) {
                cp8(d + 1024 + lane * 8, f.s + f.at * 8);
            }
            ++f.at;
        }
        cp_commit();
        wr = wr + 1 == R ? 0 : wr + 1;
    }
    __device__ __forceinline__ void begin(const Job &job, uint8_t *b, uint32_t first, uint32_t tasks, uint32_t lane)
    {
        base = b;
        rd = wr = 0;
        next = first;
        n = tasks;
        f.at = f.end = 0;
#pragma unroll 1
        for (int i = 0; i < R; ++i) {
            produce(job, lane);
        }
    }
};

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

template <int NB, bool SHARED>
__device__ __forceinline__ void mr_step(float (&acc)[NB][4], uint8_t tf, const uint4 &a0, const uint4 &a1,
                                        uint32_t e0, uint32_t e1, const mr_side<NB> &x, uint32_t s, uint32_t lane)
{
    const uint32_t t = lane & 3;
    const uint32_t lo[4] = {a0.x, a0.y, a0.z, a0.w}, hi[4] = {a1.x, a1.y, a1.z, a1.w};
    if (tf == TF_NV) {
        const float2 sl = e4m3x2_f((uint16_t)e0), sh = e4m3x2_f((uint16_t)e1);
        const uint32_t l[2] = {nv_scale(sl.x), nv_scale(sl.y)}, h[2] = {nv_scale(sh.x), nv_scale(sh.y)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t p[4], r[4];
            mr_dec_nv(lo[j], l[j / 2], p);
            mr_dec_nv(hi[j], h[j / 2], r);
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const uint4 b = mr_b<SHARED>(x.b[n] + (x.bs[n] + s) * 256 + t * 64 + ((j ^ t) << 4));
                mma_bf16(acc[n], p[0], r[0], p[1], r[1], b.x, b.y);
                mma_bf16(acc[n], p[2], r[2], p[3], r[3], b.z, b.w);
            }
        }
    } else if (tf == TF_BF16) {
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            const uint32_t bs = x.bs[n] + s;
            const uint4 b = mr_b<SHARED>(x.b[n] + bs * 64 + ((t ^ (bs & 3)) << 4));
            mma_bf16(acc[n], __byte_perm(lo[0], lo[2], 0x5410), __byte_perm(hi[0], hi[2], 0x5410),
                     __byte_perm(lo[0], lo[2], 0x7632), __byte_perm(hi[0], hi[2], 0x7632), b.x, b.y);
            mma_bf16(acc[n], __byte_perm(lo[1], lo[3], 0x5410), __byte_perm(hi[1], hi[3], 0x5410),
                     __byte_perm(lo[1], lo[3], 0x7632), __byte_perm(hi[1], hi[3], 0x7632), b.z, b.w);
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
            dec_fp8(__byte_perm(lo[2 * j], lo[2 * j + 1], 0x5140), m0, p[0], p[1]);
            dec_fp8(__byte_perm(lo[2 * j], lo[2 * j + 1], 0x7362), m0, p[2], p[3]);
            dec_fp8(__byte_perm(hi[2 * j], hi[2 * j + 1], 0x5140), m1, r[0], r[1]);
            dec_fp8(__byte_perm(hi[2 * j], hi[2 * j + 1], 0x7362), m1, r[2], r[3]);
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const uint32_t bs = x.bs[n] + s;
                const uint4 b = mr_b<SHARED>(x.b[n] + bs * 128 + (((2 * t + j) ^ ((2 * bs + (t >> 1)) & 3)) << 4));
                mma_bf16(part[n], p[0], r[0], p[1], r[1], b.x, b.y);
                mma_bf16(part[n], p[2], r[2], p[3], r[3], b.z, b.w);
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

/* n steps of the ring. */
template <int R, int NB, bool SHARED, class Job>
__device__ __forceinline__ void mr_run(float (&acc)[NB][4], mr_ring<R, Job> &ring, const Job &job, uint8_t tf,
                                       const mr_side<NB> &x, uint32_t n, uint32_t lane)
{
#pragma unroll 1
    for (uint32_t s = 0; s < n; ++s) {
        cp_wait<R - 1>();
        __syncwarp();
        const uint8_t *p = ring.base + ring.rd * MR_STEP;
        ring.rd = ring.rd + 1 == R ? 0 : ring.rd + 1;
        const uint4 a0 = *(const uint4 *)(p + lane * 16), a1 = *(const uint4 *)(p + 512 + lane * 16);
        const uint32_t e0 = *(const uint16_t *)(p + 1024 + lane * 2), e1 = *(const uint16_t *)(p + 1088 + lane * 2);
        __syncwarp();
        ring.produce(job, lane);
        mr_step<NB, SHARED>(acc, tf, a0, a1, e0, e1, x, s, lane);
    }
}

/* ---- matrices ---- */

__device__ __forceinline__ void mr_fill(mr_mat &m, const struct qx_weight &w, uint32_t k)
{
    m.w = w;
    uint8_t f = tile_format(w, 0, k);
    if (f == TF_NV && (w.cols % 128 != 0 || ((uintptr_t)w.scale & 7) != 0)) {
        f = TF_GEN;
    }
    m.tf = f;
    m.factor = f == TF_NV ? w.global * 0x1p26f : f == TF_FP8 ? w.global : 1.0f;
}

struct mr_div {
    uint32_t steps, per, parts;
};
/* Columns in at most max_parts parts. */
__device__ __forceinline__ mr_div mr_divide(uint8_t tf, uint32_t k, uint32_t max_parts)
{
    mr_div d;
    d.steps = (k + tf_kb(tf) - 1) / tf_kb(tf);
    if (tf == TF_GEN) {
        d.per = d.steps;
        d.parts = 1;
        return d;
    }
    d.per = (d.steps + max_parts - 1) / max_parts;
    d.per = d.per < MR_PER ? MR_PER : d.per;
    d.per = d.per < d.steps ? d.per : d.steps;
    d.parts = (d.steps + d.per - 1) / d.per;
    return d;
}

/* Columns in as many equal segments as there may be, at most 4, none below MR_PER steps. */
__device__ __forceinline__ uint32_t mr_segments(uint8_t tf, uint32_t k)
{
    const uint32_t steps = (k + tf_kb(tf) - 1) / tf_kb(tf);
    for (uint32_t n = 4; n > 1 && tf != TF_GEN; --n) {
        if (steps % n == 0 && steps / n >= MR_PER) {
            return n;
        }
    }
    return 1;
}

__device__ __forceinline__ const uint8_t *mr_scale_row(const mr_mat &m, uint32_t r)
{
    const struct qx_weight &w = m.w;
    return (const uint8_t *)w.scale +
           (m.tf == TF_BLOCK
                ? (uint64_t)((w.row0 + r) / 128) * ((w.cols + 127) / 128) * (w.scale_bf16 ? 2 : 4)
                : (uint64_t)r * (w.cols / (m.tf == TF_NV ? 16 : 32)));
}

template <bool SHARED> __device__ __forceinline__ float mr_col_at(const uint8_t *col, uint32_t k)
{
    const uint16_t *p = (const uint16_t *)(col + mr_elem(k));
    return bf16_f(SHARED ? *p : __ldcg(p));
}

/* The experts a step picked, each once, in the order of their first row, and the rows' columns. All threads;
 * ex: [128] in shared memory, 16 bytes aligned; rank: [128]. n_uniq is set after the call's last barrier. */
__device__ void mr_unique(const mr_args &a, int32_t *ex, uint8_t *rank, mr_cols *cols, int32_t *uniq,
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

/* ---- gate and up ---- */

struct mr_up_job {
    const mr_mat *mat; /* gate and up of one expert after the other */
    mr_by parts, tiles;
    uint32_t rows, k, block, grid;

    /* Tile of the task: expert, tile, part. */
    __device__ __forceinline__ void where(uint32_t task, uint32_t &e, uint32_t &tile, uint32_t &part) const
    {
        const uint32_t j = parts.div(task), u = block + j * grid;
        part = task - j * parts.d;
        e = tiles.div(u);
        tile = u - e * tiles.d;
    }
    __device__ __forceinline__ void feed(uint32_t task, mr_feed &f, uint32_t lane) const
    {
        uint32_t e, tile, part;
        where(task, e, tile, part);
        const mr_mat *m = mat + 2 * e;
        const uint8_t tf = m->tf;
        const mr_div d = mr_divide(tf, k, MR_WARPS);
        f.at = f.end = 0;
        if (tf == TF_GEN || part >= d.parts) {
            return;
        }
        const uint32_t s0 = part * d.per, bytes = (uint32_t)weight_row_bytes(m->w.fmt, k);
        f.end = d.steps - s0 < d.per ? d.steps - s0 : d.per;
        const uint32_t r0 = tile * 8 + (lane >> 2), r = r0 < rows ? r0 : rows - 1, off = s0 * 64 + (lane & 3) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            f.c[i] = (const uint8_t *)m[i].w.codes + (uint64_t)r * bytes + off;
            f.left[i] = (int32_t)bytes - (int32_t)off;
        }
        f.s = nullptr;
        if (tf == TF_NV) {
            const uint32_t q0 = tile * 8 + (lane & 7), q = q0 < rows ? q0 : rows - 1;
            f.s = mr_scale_row(m[(lane >> 3) & 1], q) + s0 * 8;
        }
    }
};

struct mr_up_shared {
    uint32_t arrive[MR_UNITS], gen[MR_UNITS];
    uint32_t n_uniq, parts;
};

template <int R> struct mr_up_ctx {
    uint8_t *ring, *xs;
    float4 *part; /* [warp][lane] */
    mr_up_shared *sh;
    uint32_t units_done; /* tiles of this block in earlier phases */
    uint32_t prev;       /* the warp's last tile + 1 */
};

/* Sums of a matrix of no fast format: 16 rows, n columns. */
__device__ __noinline__ float4 mr_up_plain(const mr_mat *m, uint32_t tile, uint32_t rows, uint32_t k,
                                           const uint8_t *xs, uint32_t x_col, const mr_cols &c)
{
    const uint32_t lane = threadIdx.x & 31;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32_t r = 0; r < 16; ++r) {
        const uint32_t at = tile * 8 + (r & 7);
        for (uint32_t j = 0; j < c.n && at < rows; ++j) {
            const uint8_t *x = xs + c.row[j] * x_col;
            float s = 0.0f;
            for (uint32_t i = lane; i < k; i += 32) {
                s = fmaf(weight_at(m[r >> 3].w, at, i), mr_col_at<true>(x, i), s);
            }
            s = warp_sum(s);
            if (lane == (r & 7) * 4 + (j >> 1)) {
                float *p = (r >> 3) ? ((j & 1) ? &v.w : &v.z) : ((j & 1) ? &v.y : &v.x);
                *p = s;
            }
        }
    }
    return v;
}

template <int R>
__device__ __forceinline__ void mr_up_phase(const mr_args &a, mr_up_ctx<R> &x, mr_ring<R, mr_up_job> &ring,
                                            const mr_up_job &job, const mr_cols *cols, uint32_t n_tasks,
                                            uint32_t warp, uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll 1
    for (uint32_t task = warp; task < n_tasks; task += MR_WARPS) {
        uint32_t e, tile, part;
        job.where(task, e, tile, part);
        const mr_mat *m = job.mat + 2 * e;
        const uint8_t tf = m->tf;
        const mr_div d = mr_divide(tf, job.k, MR_WARPS);
        if (part >= d.parts) {
            continue;
        }
        const mr_cols &c = cols[e];
        float acc[1][4] = {};
        if (tf == TF_GEN) {
            const float4 v = mr_up_plain(m, tile, job.rows, job.k, x.xs, a.x_col, c);
            acc[0][0] = v.x, acc[0][1] = v.y, acc[0][2] = v.z, acc[0][3] = v.w;
        } else {
            const uint32_t s0 = part * d.per, n = d.steps - s0 < d.per ? d.steps - s0 : d.per;
            mr_side<1> side = {};
            side.b[0] = x.xs + c.row[g < c.n ? g : 0] * a.x_col;
            side.bs[0] = s0;
            side.qs[0] = side.qs[1] = s0;
            if (tf == TF_BLOCK || tf == TF_MX) {
                const uint32_t r = tile * 8 + g < job.rows ? tile * 8 + g : job.rows - 1;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    side.q[i] = mr_scale_row(m[i], r);
                    side.q_bf16[i] = m[i].w.scale_bf16;
                }
            }
            mr_run<R, 1, true>(acc, ring, job, tf, side, n, lane);
        }
        /* the place for a warp's part is free when its last tile has been summed */
        const uint32_t unit = x.units_done + job.parts.div(task);
        if (x.prev) {
            volatile uint32_t *gen = &x.sh->gen[(x.prev - 1) & (MR_UNITS - 1)];
            while (*gen != (x.prev - 1) / MR_UNITS + 1) {
            }
        }
        x.prev = unit + 1;
        x.part[warp * 32 + lane] = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
        __threadfence_block();
        __syncwarp();
        uint32_t old = 0;
        if (lane == 0) {
            old = atomicAdd(&x.sh->arrive[unit & (MR_UNITS - 1)], 1u);
        }
        old = __shfl_sync(0xffffffffu, old, 0);
        if (old != d.parts - 1) {
            continue;
        }
        __threadfence_block();
        float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (uint32_t i = 0; i < d.parts; ++i) {
            const float4 v = x.part[((task - part + i) & (MR_WARPS - 1)) * 32 + lane];
            s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
        }
        const uint32_t at = tile * 8 + g;
        const float f0 = m[0].factor, f1 = m[1].factor;
        float h0 = silu_f(f0 * s.x) * (f1 * s.z), h1 = silu_f(f0 * s.y) * (f1 * s.w);
        if (at >= job.rows) {
            h0 = h1 = 0.0f;
        }
        uint8_t *h = a.hs + mr_elem(at);
        if (2 * q < c.n) {
            *(uint16_t *)(h + (uint64_t)c.item[2 * q] * a.h_col) = to_bf16(h0);
        }
        if (2 * q + 1 < c.n) {
            *(uint16_t *)(h + (uint64_t)c.item[2 * q + 1] * a.h_col) = to_bf16(h1);
        }
        __syncwarp();
        if (lane == 0) {
            x.sh->arrive[unit & (MR_UNITS - 1)] = 0;
            __threadfence_block();
            *(volatile uint32_t *)&x.sh->gen[unit & (MR_UNITS - 1)] = unit / MR_UNITS + 1;
        }
    }
}

/* Rows of m as bf16 columns; zeros to the end of the last run of 128. */
__device__ __forceinline__ void mr_stage_x(const mr_args &a, uint8_t *xs)
{
    const uint32_t units = (a.hidden + 127) / 128 * 16;
    for (uint32_t i = threadIdx.x; i < a.m_rows * units; i += MR_WARPS * 32) {
        const uint32_t r = i / units, u = i - r * units;
        const src_rows src = {a.m, a.hidden, a.hidden};
        float v[8];
        src.load8(r, u * 8, v);
        *(uint4 *)(xs + r * a.x_col + mr_unit(u)) = make_uint4(pack_bf16(v[0], v[4]), pack_bf16(v[1], v[5]),
                                                               pack_bf16(v[2], v[6]), pack_bf16(v[3], v[7]));
    }
}

template <int R> __global__ void __launch_bounds__(MR_WARPS * 32, 2)
    moe_rows_up(const __grid_constant__ mr_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ mr_up_shared sh;
    __shared__ mr_up_job job;
    __shared__ int4 ex[32];
    __shared__ uint8_t rank[128];
    __shared__ float red[MR_WARPS];
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, items = a.m_rows * a.k;
    mr_up_ctx<R> x;
    x.ring = (uint8_t *)sm4 + warp * (R * MR_STEP);
    x.xs = (uint8_t *)sm4 + MR_WARPS * R * MR_STEP;
    x.part = (float4 *)(x.xs + a.m_rows * a.x_col);
    x.sh = &sh;
    x.units_done = x.prev = 0;
    mr_mat *mat = (mr_mat *)(x.part + MR_WARPS * 32);
    mr_cols *cols = (mr_cols *)(mat + 2 * (items + 1));
    int32_t *uniq = (int32_t *)(cols + items + 1);

    /* what is known before the wait: the shared expert's weights */
    if (tid < MR_UNITS) {
        sh.arrive[tid] = sh.gen[tid] = 0;
    }
    if (tid == 0) {
        mr_fill(mat[0], a.s_gate, a.hidden);
        mr_fill(mat[1], a.s_up, a.hidden);
        if (mat[0].tf != mat[1].tf) {
            mat[0].tf = mat[1].tf = TF_GEN;
            mat[0].factor = mat[1].factor = 1.0f;
        }
        cols[0].n = (uint8_t)a.m_rows;
        for (uint32_t m = 0; m < a.m_rows; ++m) {
            cols[0].item[m] = (uint8_t)(m * (a.k + 1) + a.k);
            cols[0].row[m] = (uint8_t)m;
        }
        sh.parts = 1;
        job.mat = mat;
        job.rows = a.s_inter;
        job.k = a.hidden;
        job.block = blockIdx.x;
        job.grid = gridDim.x;
        job.tiles.set((a.s_inter + 7) / 8);
        job.parts.set(mr_divide(mat[0].tf, a.hidden, MR_WARPS).parts);
    }
    __syncthreads();
    uint32_t units = blockIdx.x < job.tiles.d ? (job.tiles.d - blockIdx.x - 1) / gridDim.x + 1 : 0;
    mr_ring<R, mr_up_job> ring;
    ring.begin(job, x.ring, warp, units * job.parts.d, lane);
    {
        /* the experts' descriptors, cold since the last step, to the L2 */
        const uint32_t lines = (uint32_t)((a.n_experts * sizeof(struct qx_weight) + 127) / 128);
        for (uint32_t i = blockIdx.x * MR_WARPS * 32 + tid; i < 3 * lines; i += gridDim.x * MR_WARPS * 32) {
            const struct qx_weight *w = i < lines ? a.gate : i < 2 * lines ? a.up : a.down;
            const uint32_t off = (i - i / lines * lines) * 128;
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const uint8_t *)w + off));
        }
    }
    if (!a.early) {
        pdl_wait();
        pdl_next();
    }
    mr_stage_x(a, x.xs);
    __syncthreads();
    mr_up_phase<R>(a, x, ring, job, cols, units * job.parts.d, warp, lane);
    x.units_done = units;
    /* the shared expert's gate, a row a block from the last on: f32 */
    for (uint32_t m = gridDim.x - 1 - blockIdx.x; m < a.m_rows; m += gridDim.x) {
        const float *v = a.m + (uint64_t)m * a.hidden;
        float s = 0.0f;
        if (a.s_vec.fmt == QX_W_BF16) {
            const uint16_t *w = (const uint16_t *)a.s_vec.codes;
#pragma unroll 5
            for (uint32_t i = tid; i < a.hidden; i += MR_WARPS * 32) {
                s = fmaf(bf16_f(__ldg(w + i)), __ldcg(v + i), s);
            }
        } else {
            for (uint32_t i = tid; i < a.hidden; i += MR_WARPS * 32) {
                s = fmaf(weight_at(a.s_vec, 0, i), __ldcg(v + i), s);
            }
        }
        s = warp_sum(s);
        if (lane == 0) {
            red[warp] = s;
        }
        __syncthreads();
        if (tid == 0) {
            s = red[0];
            for (uint32_t i = 1; i < MR_WARPS; ++i) {
                s += red[i];
            }
            a.sg[m] = sigmoid_f(s);
        }
        __syncthreads();
    }
    /* zeros after the end of the columns, which the last steps of down read */
    if (blockIdx.x == gridDim.x - 1) {
        const uint32_t end = (a.h_col - 64) / 2, n = (a.m_rows * (a.k + 1));
        for (uint32_t c = warp; c < n; c += MR_WARPS) {
            const uint32_t from = ((c + 1) % (a.k + 1) == 0 ? a.s_inter : a.inter) + 7;
            for (uint32_t i = from / 8 * 8 + lane; i < end; i += 32) {
                *(uint16_t *)(a.hs + (uint64_t)c * a.h_col + mr_elem(i)) = 0;
            }
        }
    }
    /* the picked experts */
    if (a.early) {
        pdl_wait();
        pdl_next();
    }
    __syncthreads(); /* the first phase's table is no longer read */
    mr_unique(a, (int32_t *)ex, rank, cols, uniq, &sh.n_uniq);
    const uint32_t n_uniq = sh.n_uniq;
    if (tid < n_uniq) {
        const uint32_t e = (uint32_t)uniq[tid];
        mr_mat &g = mat[2 * tid], &u = mat[2 * tid + 1];
        mr_fill(g, a.gate[e], a.hidden);
        mr_fill(u, a.up[e], a.hidden);
        if (g.tf != u.tf) {
            g.tf = u.tf = TF_GEN;
            g.factor = u.factor = 1.0f;
        }
        atomicMax(&sh.parts, mr_divide(g.tf, a.hidden, MR_WARPS).parts);
    }
    __syncthreads();
    if (tid == 0) {
        /* from the last block on: the first have the shared expert's tiles */
        job.block = gridDim.x - 1 - blockIdx.x;
        job.rows = a.inter;
        job.tiles.set((a.inter + 7) / 8);
        job.parts.set(sh.parts);
    }
    __syncthreads();
    const uint32_t total = n_uniq * job.tiles.d;
    units = job.block < total ? (total - job.block - 1) / gridDim.x + 1 : 0;
    cp_wait<0>();
    ring.begin(job, x.ring, warp, units * job.parts.d, lane);
    mr_up_phase<R>(a, x, ring, job, cols, units * job.parts.d, warp, lane);
}

/* ---- down ---- */

/* A block has nq groups of four output rows. Of a matrix cut into sp segments of columns, block b of four rows
 * is segment b / nb, group b % nb (nb >= 4; groups from nq on are empty); four blocks make a task. */
struct mr_list {
    const mr_mat *mat;
    const mr_cols *cols;
    uint32_t n_mat, k;
    mr_by nb, sp;
};

struct mr_down_job {
    mr_list l[2]; /* the shared expert's, then the picked ones' */
    uint32_t first; /* tasks of l[0] */
    uint32_t d0, nq, hidden;

    struct block {
        uint32_t e, seg, row;
        bool empty;
    };
    __device__ __forceinline__ block of(const mr_list &t, uint32_t b) const
    {
        block r;
        const uint32_t s = t.nb.div(b), quad = b - s * t.nb.d;
        r.e = t.sp.div(s);
        r.seg = s - r.e * t.sp.d;
        r.row = d0 + quad * 4;
        r.empty = r.e >= t.n_mat || quad >= nq;
        r.e = r.empty ? 0 : r.e;
        return r;
    }
    __device__ __forceinline__ void feed(uint32_t task, mr_feed &f, uint32_t lane) const
    {
        const mr_list &t = l[task >= first];
        const uint32_t b0 = 4 * (task >= first ? task - first : task);
        const uint8_t tf = t.mat[of(t, b0).e].tf;
        f.at = f.end = 0;
        if (tf == TF_GEN) {
            return;
        }
        const mr_div d = mr_divide(tf, t.k, t.sp.d);
        f.end = d.per;
        f.s = nullptr;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const block b = of(t, b0 + 2 * i + (lane >> 4));
            const mr_mat &m = t.mat[b.e];
            const uint32_t bytes = (uint32_t)weight_row_bytes(m.w.fmt, t.k);
            const uint32_t r = b.row + ((lane >> 2) & 3), off = b.seg * d.per * 64 + (lane & 3) * 16;
            f.c[i] = (const uint8_t *)m.w.codes + (b.empty ? 0 : (uint64_t)(r < hidden ? r : hidden - 1) * bytes + off);
            f.left[i] = b.empty ? 0 : (int32_t)bytes - (int32_t)off;
        }
        if (tf == TF_NV) {
            const block b = of(t, b0 + ((lane >> 2) & 3));
            const uint32_t r = b.row + (lane & 3);
            f.s = mr_scale_row(t.mat[b.e], b.empty ? 0 : r < hidden ? r : hidden - 1) + b.seg * d.per * 8;
        }
    }
};

struct mr_down_out {
    float *res;  /* [row * k + slot][rd], then [row][sp][rd] of the shared expert */
    uint32_t rd, k, items, sp;
    __device__ __forceinline__ float *at(uint32_t item, uint32_t m, uint32_t seg) const
    {
        const uint32_t slot = item - m * (k + 1);
        return res + (slot < k ? m * k + slot : items + m * sp + seg) * rd;
    }
};

/* A task of no fast format. */
__device__ __noinline__ void mr_down_plain(const mr_down_job &job, const mr_list &t, uint32_t b0, const uint8_t *hs,
                                           uint32_t h_col, const mr_down_out &out)
{
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t r = 0; r < 16; ++r) {
        const mr_down_job::block b = job.of(t, b0 + r / 4);
        const uint32_t row = b.row + (r & 3);
        if (b.empty || row >= job.hidden) {
            continue;
        }
        const mr_cols &c = t.cols[b.e];
        for (uint32_t j = 0; j < c.n; ++j) {
            const uint8_t *h = hs + (uint64_t)c.item[j] * h_col;
            float s = 0.0f;
            for (uint32_t i = lane; i < t.k; i += 32) {
                s = fmaf(weight_at(t.mat[b.e].w, row, i), mr_col_at<false>(h, i), s);
            }
            s = warp_sum(s);
            if (lane == 0) {
                out.at(c.item[j], c.row[j], b.seg)[row - job.d0] = s;
            }
        }
    }
}

template <int R, int NB, bool SHARED>
__device__ __forceinline__ void mr_down_task(mr_ring<R, mr_down_job> &ring, const mr_down_job &job, const mr_list &t,
                                             uint32_t b0, const uint8_t *hs, uint32_t h_col, const mr_down_out &out,
                                             uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    const mr_down_job::block first = job.of(t, b0);
    const uint8_t tf = t.mat[first.e].tf;
    const mr_div d = mr_divide(tf, t.k, t.sp.d);
    const uint32_t s0 = t.nb.div(b0), s1 = t.nb.div(b0 + 3);
    const bool two = s1 != s0 && s1 < t.n_mat * t.sp.d;
    const mr_cols &c0 = t.cols[first.e], &c1 = t.cols[two ? t.sp.div(s1) : first.e];
    const uint32_t seg1 = two ? s1 - t.sp.div(s1) * t.sp.d : first.seg;
    const uint32_t n0 = c0.n, n1 = two ? c1.n : 0;
    mr_side<NB> side = {};
#pragma unroll
    for (int n = 0; n < NB; ++n) {
        const uint32_t j = NB == 1 ? g : g + (n ? n0 : 0); /* two blocks: one an expert */
        const bool mine = NB == 1 || n == 0 ? j < n0 : false;
        const bool other = !mine && j - n0 < n1;
        const uint32_t item = mine ? c0.item[j] : other ? c1.item[j - n0] : n ? c1.item[0] : c0.item[0];
        side.b[n] = hs + (uint64_t)item * h_col;
        side.bs[n] = (mine || (!other && !n) ? first.seg : seg1) * d.per;
    }
    const mr_down_job::block bl[2] = {job.of(t, b0 + (lane >> 4)), job.of(t, b0 + 2 + (lane >> 4))};
    if (tf == TF_BLOCK || tf == TF_MX) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t r = bl[i].row + (g & 3);
            side.q[i] = mr_scale_row(t.mat[bl[i].e], bl[i].empty ? 0 : r < job.hidden ? r : job.hidden - 1);
            side.qs[i] = bl[i].seg * d.per;
            side.q_bf16[i] = t.mat[bl[i].e].w.scale_bf16;
        }
    }
    float acc[NB][4] = {};
    mr_run<R, NB, SHARED>(acc, ring, job, tf, side, d.per, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (bl[i].empty) {
            continue;
        }
        const bool second = two && t.nb.div(b0 + 2 * i + (lane >> 4)) != s0;
        const uint32_t at = bl[i].row + (g & 3) - job.d0;
        const float f = t.mat[bl[i].e].factor;
        const mr_cols &c = second ? c1 : c0;
#pragma unroll
        for (int z = 0; z < 2; ++z) {
            const uint32_t col = 2 * q + z, j = NB == 1 && second ? col - n0 : col;
            if (j < c.n) {
                const float v = NB == 2 && second ? acc[NB - 1][2 * i + z] : acc[0][2 * i + z];
                out.at(c.item[j], c.row[j], bl[i].seg)[at] = f * v;
            }
        }
    }
}

template <int R, bool SHARED> __global__ void __launch_bounds__(MR_WARPS * 32, 2)
    moe_rows_down(const __grid_constant__ mr_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ uint32_t n_uniq_s, mixed;
    __shared__ mr_down_job job;
    __shared__ int4 ex[32];
    __shared__ uint8_t rank[128];
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, items = a.m_rows * a.k;
    uint8_t *hs = (uint8_t *)sm4 + MR_WARPS * R * MR_STEP;
    mr_mat *mat = (mr_mat *)(hs + (SHARED ? a.m_rows * (a.k + 1) * a.h_col : 0)); /* [0] the shared expert's */
    mr_cols *cols = (mr_cols *)(mat + items + 1);
    int32_t *uniq = (int32_t *)(cols + items + 1);
    float *wt = (float *)(uniq + items);
    mr_down_out out;
    out.res = wt + items;
    const uint32_t quads = (a.hidden + 3) / 4;
    const uint32_t q0 = (uint32_t)((uint64_t)blockIdx.x * quads / gridDim.x),
                   q1 = (uint32_t)((uint64_t)(blockIdx.x + 1) * quads / gridDim.x);
    if (tid == 0) {
        mr_fill(mat[0], a.s_down, a.s_inter);
        cols[0].n = (uint8_t)a.m_rows;
        for (uint32_t m = 0; m < a.m_rows; ++m) {
            cols[0].item[m] = (uint8_t)(m * (a.k + 1) + a.k);
            cols[0].row[m] = (uint8_t)m;
        }
        mixed = 0;
    }
    if (tid < items) {
        wt[tid] = __ldcg(a.weight + tid);
    }
    mr_unique(a, (int32_t *)ex, rank, cols + 1, uniq, &n_uniq_s);
    const uint32_t n_uniq = n_uniq_s;
    if (tid < n_uniq) {
        mr_fill(mat[1 + tid], a.down[uniq[tid]], a.inter);
    }
    __syncthreads();
    if (tid < n_uniq && mat[1 + tid].tf != mat[1].tf) {
        mixed = 1;
    }
    __syncthreads();
    if (tid == 0) {
        job.d0 = q0 * 4;
        job.nq = q1 - q0;
        job.hidden = a.hidden;
        const uint32_t nb4 = (job.nq + 3) & ~3u, nb = job.nq < 4 ? 4 : job.nq;
        job.l[0].mat = mat;
        job.l[0].cols = cols;
        job.l[0].n_mat = 1;
        job.l[0].nb.set(nb);
        job.l[0].k = a.s_inter;
        job.l[0].sp.set(mr_segments(mat[0].tf, a.s_inter));
        job.l[1].mat = mat + 1;
        job.l[1].cols = cols + 1;
        job.l[1].n_mat = n_uniq;
        job.l[1].nb.set(mixed ? nb4 : nb);
        job.l[1].k = a.inter;
        job.l[1].sp.set(1);
        job.first = (job.l[0].sp.d * nb + 3) / 4;
    }
    __syncthreads();
    const uint32_t n_tasks = job.first + (n_uniq * job.l[1].nb.d + 3) / 4;
    out.rd = (quads / gridDim.x + 1) * 4;
    out.k = a.k;
    out.items = items;
    out.sp = job.l[0].sp.d;
    mr_ring<R, mr_down_job> ring;
    ring.begin(job, (uint8_t *)sm4 + warp * (R * MR_STEP), warp, n_tasks, lane);
    pdl_wait();
    if (SHARED) {
        const uint32_t n = a.m_rows * (a.k + 1) * a.h_col / 16;
        for (uint32_t i = tid; i < n; i += MR_WARPS * 32) {
            ((uint4 *)hs)[i] = __ldcg((const uint4 *)a.hs + i);
        }
        __syncthreads();
    }
    const uint8_t *h = SHARED ? hs : a.hs;
#pragma unroll 1
    for (uint32_t task = warp; task < n_tasks; task += MR_WARPS) {
        const mr_list &t = job.l[task >= job.first];
        const uint32_t b0 = 4 * (task >= job.first ? task - job.first : task);
        const uint32_t e0 = job.of(t, b0).e, s1 = t.nb.div(b0 + 3);
        if (t.mat[e0].tf == TF_GEN) {
            mr_down_plain(job, t, b0, a.hs, a.h_col, out);
        } else if (s1 == t.nb.div(b0) || s1 >= t.n_mat * t.sp.d ||
                   t.cols[e0].n + t.cols[t.sp.div(s1)].n <= 8) {
            mr_down_task<R, 1, SHARED>(ring, job, t, b0, h, a.h_col, out, lane);
        } else {
            mr_down_task<R, 2, SHARED>(ring, job, t, b0, h, a.h_col, out, lane);
        }
    }
    __syncthreads();
    for (uint32_t i = tid; i < a.m_rows * job.nq * 4; i += MR_WARPS * 32) {
        const uint32_t m = i / (job.nq * 4), r = i - m * (job.nq * 4);
        if (job.d0 + r < a.hidden) {
            float s = 0.0f, v = 0.0f;
            for (uint32_t k = 0; k < a.k; ++k) {
                s = fmaf(wt[m * a.k + k], out.res[(m * a.k + k) * out.rd + r], s);
            }
            for (uint32_t p = 0; p < out.sp; ++p) {
                v += out.res[(items + m * out.sp + p) * out.rd + r];
            }
            a.y[(uint64_t)m * a.hidden + job.d0 + r] = fmaf(__ldcg(a.sg + m), v, s);
        }
    }
}

/* ---- launching ---- */

#define MR_SMEM_MAX (222u * 1024u)

static uint32_t up_smem(const mr_args &a, uint32_t ring)
{
    const uint32_t items = a.m_rows * a.k;
    return (uint32_t)(MR_WARPS * ring * MR_STEP + a.m_rows * a.x_col + MR_WARPS * 512 +
                      (items + 1) * (2 * sizeof(mr_mat) + sizeof(mr_cols)) + items * 4);
}

static uint32_t down_smem(const mr_args &a, uint32_t grid, uint32_t ring, bool shared)
{
    const uint32_t items = a.m_rows * a.k, rd = ((a.hidden + 3) / 4 / grid + 1) * 4;
    return (uint32_t)(MR_WARPS * ring * MR_STEP + (shared ? a.m_rows * (a.k + 1) * a.h_col : 0) +
                      (items + 1) * (sizeof(mr_mat) + sizeof(mr_cols)) + items * 8 + (items + 4 * a.m_rows) * rd * 4);
}

/* At least 16 output rows a block. */
static uint32_t down_grid(const struct qx_queue *q, uint32_t hidden)
{
    const uint32_t most = hidden < 16 ? 1 : hidden / 16;
    return most < (uint32_t)q->n_sm ? most : (uint32_t)q->n_sm;
}

bool qx_moe_rows_fit(struct qx_queue *q, const struct qx_op_moe *o)
{
    const uint32_t grid = down_grid(q, o->experts.hidden);
    mr_args a = {};
    a.m_rows = o->n_rows < 8 ? o->n_rows : 8;
    a.k = o->k;
    a.hidden = o->experts.hidden;
    a.x_col = mr_col_bytes(a.hidden);
    a.h_col = mr_col_bytes(o->experts.inter > o->s_inter ? o->experts.inter : o->s_inter);
    mr_args one = a;
    one.m_rows = 1;
    return o->act_bf16 && o->k <= MOE_MAX_K && up_smem(a, 3) <= MR_SMEM_MAX &&
           down_smem(a, grid, 3, false) <= MR_SMEM_MAX && down_smem(one, grid, 5, true) <= MR_SMEM_MAX;
}

int qx_moe_rows(struct qx_queue *q, const struct qx_op_moe *o)
{
    mr_args a = {};
    a.k = o->k;
    a.hidden = o->experts.hidden;
    a.inter = o->experts.inter;
    a.n_experts = o->experts.n_experts;
    a.s_inter = o->s_inter;
    a.x_col = mr_col_bytes(a.hidden);
    a.h_col = mr_col_bytes(a.inter > a.s_inter ? a.inter : a.s_inter);
    a.gate = o->experts.gate;
    a.up = o->experts.up;
    a.down = o->experts.down;
    a.s_gate = o->s_gate;
    a.s_up = o->s_up;
    a.s_down = o->s_down;
    a.s_vec = o->s_gate_vec;
    a.sg = (float *)q->ws;
    a.hs = q->ws + 256;
    const uint32_t grid = (uint32_t)q->n_sm, dgrid = down_grid(q, a.hidden);
    for (uint32_t r = 0; r < o->n_rows; r += 8) {
        a.m_rows = o->n_rows - r < 8 ? o->n_rows - r : 8;
        a.m = o->m + (uint64_t)r * a.hidden;
        a.expert = o->expert + (uint64_t)r * a.k;
        a.weight = o->weight + (uint64_t)r * a.k;
        a.y = o->y + (uint64_t)r * a.hidden;
        a.early = r == 0 && q->routed.m == o->m && q->routed.at == q->n_launches;
        /* a ring of five steps where both launches fit into one multiprocessor */
        const uint32_t ring = a.m_rows <= 1 ? 5 : 3;
        const bool in = down_smem(a, dgrid, ring, true) <= MR_SMEM_MAX;
        const dim3 block(MR_WARPS * 32);
        const uint32_t su = up_smem(a, ring), sd = down_smem(a, dgrid, ring, in);
        int e = ring == 5 ? launch(q, "moe", moe_rows_up<5>, dim3(grid), block, su, a)
                          : launch(q, "moe", moe_rows_up<3>, dim3(grid), block, su, a);
        if (!e) {
            e = ring == 5 ? launch(q, "moe", moe_rows_down<5, true>, dim3(dgrid), block, sd, a)
                : in      ? launch(q, "moe", moe_rows_down<3, true>, dim3(dgrid), block, sd, a)
                          : launch(q, "moe", moe_rows_down<3, false>, dim3(dgrid), block, sd, a);
        }
        if (e) {
            return e;
        }
    }
    return 0;
}
