/* moe_rows.cu: experts for rows of decoding whose inputs of products are bf16, but for what
 * moe_nv.cu and moe_one_up.cu take.
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
#include "moe_one.cuh"
#include "stream.cuh"

/* ---- gate and up ---- */

template <int FAST, bool ROUTED> struct mr_up_job {
    const mr_args &a;
    const mr_mat *mat; /* gate and up of one expert after the other */
    uint32_t block;

    __device__ __forceinline__ const mr_cut &cut() const
    {
        return ROUTED ? a.up_r : a.up_s;
    }
    /* Tile of the task: expert, tile, part. */
    __device__ __forceinline__ void where(uint32_t task, uint32_t &e, uint32_t &tile, uint32_t &part) const
    {
        const mr_by &parts = ROUTED ? a.parts_r : a.parts_s, &tiles = ROUTED ? a.tiles_r : a.tiles_s;
        const uint32_t j = parts.div(task), u = block + j * gridDim.x;
        part = task - j * parts.d;
        e = ROUTED ? tiles.div(u) : 0;
        tile = u - e * tiles.d;
    }
    __device__ __forceinline__ uint32_t steps(uint32_t part) const
    {
        const mr_cut &c = cut();
        const uint32_t left = (c.bytes + 63) / 64 - part * c.per;
        return FAST || left > c.per ? c.per : left;
    }
    __device__ __forceinline__ void feed(uint32_t task, mr_feed &f, uint32_t lane) const
    {
        uint32_t e, tile, part;
        where(task, e, tile, part);
        const mr_cut &c = cut();
        const mr_mat *m = mat + 2 * e;
        const uint32_t r = tile * 8 + (lane >> 2), off = part * c.per * 64 + (lane & 3) * 16;
        f.n = steps(part);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            f.c[i] = m[i].codes + ((uint64_t)r * c.bytes + off);
            f.left[i] = (int32_t)c.bytes - (int32_t)off;
        }
        f.s = nullptr;
        if ((FAST ? (int)ROUTED : c.tf == TF_NV) && lane < 16) {
            f.s = m[lane >> 3].scale + ((uint64_t)(tile * 8 + (lane & 7)) * c.s_bytes + part * c.per * 8);
        }
    }
};

struct mr_up_shared {
    uint32_t arrive[MR_UNITS], gen[MR_UNITS];
    uint32_t n_uniq;
};

struct mr_up_ctx {
    uint8_t *ring, *xs;
    float4 *part; /* [warp][lane] */
    mr_up_shared *sh;
    uint32_t number;     /* of the launch, where columns go as words */
    uint32_t units_done; /* tiles of this block in earlier phases */
    uint32_t prev;       /* the warp's last tile + 1 */
};

template <int R, int FAST, bool ROUTED>
__device__ __forceinline__ void mr_up_phase(const mr_args &a, mr_up_ctx &x,
                                            mr_ring<R, FAST, mr_up_job<FAST, ROUTED>> &ring,
                                            const mr_up_job<FAST, ROUTED> &job, const mr_cols *cols,
                                            uint32_t n_tasks, uint32_t warp, uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    const mr_cut &c = job.cut();
    const uint8_t tf = FAST ? (uint8_t)(ROUTED ? TF_NV : FAST) : c.tf;
#pragma unroll 1
    for (uint32_t task = warp; task < n_tasks; task += MR_WARPS) {
        uint32_t e, tile, part;
        job.where(task, e, tile, part);
        const mr_mat *m = job.mat + 2 * e;
        const mr_cols &col = cols[e];
        float acc[1][4] = {};
        mr_side<1> side = {};
        side.b[0] = x.xs + col.row[g < col.n ? g : 0] * a.x_col;
        side.bs[0] = side.qs[0] = side.qs[1] = part * c.per;
        if (tf == TF_BLOCK || tf == TF_MX) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                side.q[i] = mr_scale_row(m[i], c, tile * 8 + g);
                side.q_bf16[i] = m[i].scale_bf16;
            }
        }
        mr_run<R, FAST, 1, true>(acc, ring, job, tf, side, job.steps(part), lane);
        /* the place for a warp's part is free when its last tile has been summed */
        const uint32_t parts = c.parts, unit = x.units_done + (ROUTED ? a.parts_r : a.parts_s).div(task);
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
        if (old != parts - 1) {
            continue;
        }
        __threadfence_block();
        float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (uint32_t i = 0; i < parts; ++i) {
            const float4 v = x.part[((task - part + i) & (MR_WARPS - 1)) * 32 + lane];
            s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
        }
        const float f0 = m[0].factor, f1 = m[1].factor;
        const float h0 = silu_f(f0 * s.x) * (f1 * s.z), h1 = silu_f(f0 * s.y) * (f1 * s.w);
        if (FAST) {
            /* a word of rows g and g + 4, of the one or two columns that lanes with q = 0 have */
            const float o0 = __shfl_down_sync(0xffffffffu, h0, 16), o1 = __shfl_down_sync(0xffffffffu, h1, 16);
            if (lane < 16 && q == 0) {
#pragma unroll
                for (uint32_t z = 0; z < ONE_ROWS; ++z) {
                    if (z < col.n) { /* items: row * k + slot, then the shared expert's */
                        const uint32_t column = ROUTED ? col.item[z] - col.row[z] : ONE_ITEMS + col.row[z];
                        word_post(one_words{a.words, a.numbers}.unit(column, tile) + g, __uint_as_float(z ? pack_bf16(h1, o1) : pack_bf16(h0, o0)),
                                  x.number);
                    }
                }
            }
        } else {
            uint8_t *h = a.hs + mr_elem(tile * 8 + g);
            if (2 * q < col.n) {
                *(uint16_t *)(h + col.item[2 * q] * a.h_col) = to_bf16(h0);
            }
            if (2 * q + 1 < col.n) {
                *(uint16_t *)(h + col.item[2 * q + 1] * a.h_col) = to_bf16(h1);
            }
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
    for (uint32_t r = 0; r < a.m_rows; ++r) {
        const src_rows src = {a.m + (uint64_t)r * a.hidden, a.hidden, a.hidden};
        for (uint32_t u = threadIdx.x; u < units; u += MR_WARPS * 32) {
            float v[8];
            src.load8(0, u * 8, v);
            *(uint4 *)(xs + r * a.x_col + mr_unit(u)) = make_uint4(pack_bf16(v[0], v[4]), pack_bf16(v[1], v[5]),
                                                                   pack_bf16(v[2], v[6]), pack_bf16(v[3], v[7]));
        }
    }
}

/* sigmoid of the shared expert's gate in f32, a row a block from the last on. */
template <int FAST> __device__ __forceinline__ void mr_shared_gate(const mr_args &a, float *red, uint32_t number)
{
    const uint32_t tid = threadIdx.x;
    for (uint32_t m = gridDim.x - 1 - blockIdx.x; m < a.m_rows; m += gridDim.x) {
        const float *v = a.m + (uint64_t)m * a.hidden;
        const uint16_t *w = (const uint16_t *)a.s_vec.codes;
        float s = 0.0f;
#pragma unroll 5
        for (uint32_t i = tid; i < a.hidden; i += MR_WARPS * 32) {
            s = fmaf(bf16_f(__ldg(w + i)), __ldcg(v + i), s);
        }
        mr_gate_end(s, red, a.sg, m);
        if (FAST && tid == 0) {
            word_post(one_words{a.words, a.numbers}.gate(m), a.sg[m], number);
        }
        __syncthreads();
    }
}

template <int R, int FAST> __global__ void __launch_bounds__(MR_WARPS * 32, 2)
    moe_rows_up(const __grid_constant__ mr_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ mr_up_shared sh;
    __shared__ int4 ex[32];
    __shared__ uint8_t rank[128];
    __shared__ float red[MR_WARPS];
    __shared__ mr_mat s_mat[2];
    __shared__ mr_cols s_cols;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, items = a.m_rows * a.k;
    mr_up_ctx x;
    x.ring = (uint8_t *)sm4 + warp * (R * MR_STEP);
    x.xs = (uint8_t *)sm4 + MR_WARPS * R * MR_STEP;
    x.part = (float4 *)(x.xs + a.m_rows * a.x_col);
    x.sh = &sh;
    x.units_done = x.prev = 0;
    mr_mat *mat = (mr_mat *)(x.part + MR_WARPS * 32);
    mr_cols *cols = (mr_cols *)(mat + 2 * items);
    int32_t *uniq = (int32_t *)(cols + items);

    /* what is known before the wait: the shared expert's weights */
    if (tid < MR_UNITS) {
        sh.arrive[tid] = sh.gen[tid] = 0;
    }
    if (tid < 2) {
        mr_fill(s_mat[tid], tid ? a.s_up : a.s_gate);
    }
    if (tid < a.m_rows) {
        s_cols.item[tid] = (uint8_t)(tid * (a.k + 1) + a.k);
        s_cols.row[tid] = (uint8_t)tid;
    }
    if (tid == 0) {
        s_cols.n = (uint8_t)a.m_rows;
    }
    __syncthreads();
    uint32_t units = blockIdx.x < a.tiles_s.d ? (a.tiles_s.d - blockIdx.x - 1) / gridDim.x + 1 : 0;
    {
        const mr_up_job<FAST, false> job = {a, s_mat, blockIdx.x};
        mr_ring<R, FAST, mr_up_job<FAST, false>> ring;
        ring.begin(job, x.ring, warp, units * a.parts_s.d, lane);
        const uint32_t lines = moe_lines(a), line = blockIdx.x * 4 + tid;
        if (tid < 4 && line < lines) {
            moe_fetch_line(a, line);
        }
        if (!a.early) {
            pdl_wait();
            pdl_next();
        }
        x.number = FAST ? __ldcg(a.numbers + blockIdx.x) + 1 : 0;
        mr_stage_x(a, x.xs);
        __syncthreads();
        mr_up_phase<R, FAST, false>(a, x, ring, job, &s_cols, units * a.parts_s.d, warp, lane);
        x.units_done = units;
        copy_wait<0>();
    }
    mr_shared_gate<FAST>(a, red, x.number);
    /* zeros after the end of the columns, which the last steps of down read */
    if (!FAST && blockIdx.x == gridDim.x - 1) {
        const uint32_t end = (a.h_col - 64) / 2, n = (a.m_rows * (a.k + 1));
        for (uint32_t c = warp; c < n; c += MR_WARPS) {
            for (uint32_t i = ((c + 1) % (a.k + 1) == 0 ? a.s_inter : a.inter) + lane; i < end; i += 32) {
                *(uint16_t *)(a.hs + (uint64_t)c * a.h_col + mr_elem(i)) = 0;
            }
        }
    }
    /* the picked experts */
    if (a.early) {
        pdl_wait();
        pdl_next();
    }
    uint32_t n_uniq = a.k;
    if (a.m_rows == 1) {
        if (tid < 2 * a.k) {
            const int32_t e = __ldcg(a.expert + tid / 2);
            mr_fill(mat[tid], ((tid & 1) ? a.up : a.gate)[e]);
            cols[tid / 2].n = 1;
            cols[tid / 2].item[0] = (uint8_t)(tid / 2);
            cols[tid / 2].row[0] = 0;
        }
    } else {
        mr_unique(a, (int32_t *)ex, rank, cols, uniq, &sh.n_uniq);
        n_uniq = sh.n_uniq;
        if (tid < 2 * n_uniq) {
            mr_fill(mat[tid], ((tid & 1) ? a.up : a.gate)[uniq[tid / 2]]);
        }
    }
    __syncthreads();
    /* from the last block on: the first have the shared expert's tiles */
    const mr_up_job<FAST, true> job = {a, mat, gridDim.x - 1 - blockIdx.x};
    const uint32_t total = n_uniq * a.tiles_r.d;
    units = job.block < total ? (total - job.block - 1) / gridDim.x + 1 : 0;
    mr_ring<R, FAST, mr_up_job<FAST, true>> ring;
    ring.begin(job, x.ring, warp, units * a.parts_r.d, lane);
    mr_up_phase<R, FAST, true>(a, x, ring, job, cols, units * a.parts_r.d, warp, lane);
    if (FAST && tid == 0) {
        a.numbers[blockIdx.x] = x.number;
    }
}

/* ---- down ---- */

/* A block has nq >= 4 groups of four output rows. Of a matrix cut into parts of columns, group b of a list is
 * part b / nq of the list's matrices, rows b % nq; four groups make a task. */
struct mr_down_job {
    const mr_args &a;
    const mr_mat *mat; /* [0] the shared expert's, then the picked ones' */
    uint32_t first;    /* tasks of the shared expert */
    uint32_t n_uniq, d0;
    mr_by nq;

    struct group {
        uint32_t s, e, part, row; /* number of the part in its list; matrix, part, first row */
        bool empty;
    };
    __device__ __forceinline__ group of(bool shared, uint32_t b) const
    {
        group r;
        r.s = nq.div(b);
        r.row = d0 + (b - r.s * nq.d) * 4;
        r.empty = r.s >= (shared ? a.down_s.parts : n_uniq);
        r.e = shared ? 0 : r.empty ? 1 : 1 + r.s; /* an empty group reads another's rows */
        r.part = shared && !r.empty ? r.s : 0;
        return r;
    }
    __device__ __forceinline__ void feed(uint32_t task, mr_feed &f, uint32_t lane) const
    {
        const bool shared = task < first;
        const mr_cut &c = shared ? a.down_s : a.down_r;
        const uint32_t b0 = 4 * (shared ? task : task - first);
        f.n = c.per;
        f.s = nullptr;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const group b = of(shared, b0 + 2 * i + (lane >> 4));
            const uint32_t r = b.row + ((lane >> 2) & 3), off = b.part * c.per * 64 + (lane & 3) * 16;
            f.c[i] = mat[b.e].codes + ((uint64_t)r * c.bytes + off); /* of an empty group: any row */
            f.left[i] = (int32_t)c.bytes - (int32_t)off;
        }
        if (c.tf == TF_NV && lane < 16) {
            const group b = of(shared, b0 + (lane >> 2));
            f.s = mat[b.e].scale + ((uint64_t)(b.row + (lane & 3)) * c.s_bytes + b.part * c.per * 8);
        }
    }
};

/* One task up to where the columns are needed, and the rest. */
template <int R, int NB, bool SHARED, bool SH_EXPERT> struct mr_down_task {
    mr_side<NB> side;
    int32_t at[2][2]; /* where in res a lane's sums go, < 0: nowhere */
    float f[2];

    __device__ __forceinline__ void prepare(const mr_args &a, const mr_down_job &job, const mr_cols *cols,
                                            uint32_t b0, const uint8_t *hs, uint32_t rd, uint32_t lane)
    {
        const uint32_t g = lane >> 2, q = lane & 3, items = a.m_rows * a.k;
        const mr_cut &c = SH_EXPERT ? a.down_s : a.down_r;
        const uint8_t tf = c.tf;
        const auto b1 = job.of(SH_EXPERT, b0), b2 = job.of(SH_EXPERT, b0 + 3);
        const bool two = b2.s != b1.s && !b2.empty;
        const mr_cols &c0 = cols[b1.e], &c1 = cols[b2.e];
        const uint32_t n0 = c0.n, n1 = two ? c1.n : 0;
        side = {};
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            /* one block of columns: the first matrix's, then the second's; two: one each */
            const bool other = NB == 2 ? n == 1 : g >= n0 && g - n0 < n1;
            const uint32_t j = NB == 2 ? (g < (n ? n1 : n0) ? g : 0) : other ? g - n0 : g < n0 ? g : 0;
            side.b[n] = hs + (other && two ? c1 : c0).item[j] * a.h_col;
            side.bs[n] = (other && two ? b2 : b1).part * c.per;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto b = job.of(SH_EXPERT, b0 + 2 * i + (lane >> 4));
            const mr_mat &m = job.mat[b.e];
            const uint32_t r = b.row + (g & 3);
            if (tf == TF_BLOCK || tf == TF_MX) {
                side.q[i] = mr_scale_row(m, c, r);
                side.qs[i] = b.part * c.per;
                side.q_bf16[i] = m.scale_bf16;
            }
            f[i] = m.factor;
            const bool second = b.s != b1.s;
#pragma unroll
            for (int z = 0; z < 2; ++z) {
                const uint32_t j = 2 * q + z - (NB == 1 && second ? n0 : 0);
                const mr_cols &cc = second ? c1 : c0;
                at[i][z] = -1;
                if (!b.empty && j < cc.n) {
                    const uint32_t row = cc.row[j];
                    const uint32_t line = SH_EXPERT ? items + row * a.down_s.parts + b.part
                                                    : cc.item[j] - row; /* row * k + slot */
                    at[i][z] = (int32_t)(line * rd + r - job.d0) | (NB == 2 && second ? 0x40000000 : 0);
                }
            }
        }
    }
    __device__ __forceinline__ void run(const mr_args &a, mr_ring<R, TF_GEN, mr_down_job> &ring,
                                        const mr_down_job &job, float *res, uint32_t lane)
    {
        const mr_cut &c = SH_EXPERT ? a.down_s : a.down_r;
        const uint8_t tf = c.tf;
        float acc[NB][4] = {};
        mr_run<R, TF_GEN, NB, SHARED>(acc, ring, job, tf, side, c.per, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int z = 0; z < 2; ++z) {
                if (at[i][z] >= 0) {
                    const bool second = NB == 2 && (at[i][z] & 0x40000000);
                    res[at[i][z] & 0x3fffffff] = f[i] * acc[second ? NB - 1 : 0][2 * i + z];
                }
            }
        }
    }
};

template <int R, bool SHARED, bool MANY> __global__ void __launch_bounds__(MR_WARPS * 32, 2)
    moe_rows_down(const __grid_constant__ mr_args a)
{
    extern __shared__ uint4 sm4[];
    __shared__ uint32_t n_uniq_s;
    __shared__ int4 ex[32];
    __shared__ uint8_t rank[128];
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, items = a.m_rows * a.k;
    uint8_t *hs = (uint8_t *)sm4 + MR_WARPS * R * MR_STEP;
    mr_mat *mat = (mr_mat *)(hs + (SHARED ? a.m_rows * (a.k + 1) * a.h_col : 0)); /* [0] the shared expert's */
    mr_cols *cols = (mr_cols *)(mat + items + 1);
    int32_t *uniq = (int32_t *)(cols + items + 1);
    float *wt = (float *)(uniq + items), *res = wt + items; /* [row * k + slot][rd], then [row][part][rd] */
    const uint32_t quads = a.hidden / 4;
    const uint32_t q0 = (uint32_t)((uint64_t)blockIdx.x * quads / gridDim.x),
                   q1 = (uint32_t)((uint64_t)(blockIdx.x + 1) * quads / gridDim.x);
    const uint32_t nq = q1 - q0, rd = (quads / gridDim.x + 1) * 4;
    if (tid == 0) {
        mr_fill(mat[0], a.s_down);
        cols[0].n = (uint8_t)a.m_rows;
    }
    if (tid < a.m_rows) {
        cols[0].item[tid] = (uint8_t)(tid * (a.k + 1) + a.k);
        cols[0].row[tid] = (uint8_t)tid;
    }
    if (tid < items) {
        wt[tid] = __ldcg(a.weight + tid);
    }
    mr_unique(a, (int32_t *)ex, rank, cols + 1, uniq, &n_uniq_s);
    const uint32_t n_uniq = n_uniq_s;
    if (tid < n_uniq) {
        mr_fill(mat[1 + tid], a.down[uniq[tid]]);
    }
    __syncthreads();
    mr_by by;
    by.set(nq);
    const mr_down_job job = {a, mat, (a.down_s.parts * nq + 3) / 4, n_uniq, q0 * 4, by};
    const uint32_t n_tasks = job.first + (n_uniq * nq + 3) / 4;
    mr_ring<R, TF_GEN, mr_down_job> ring;
    ring.begin(job, (uint8_t *)sm4 + warp * (R * MR_STEP), warp, n_tasks, lane);
    const uint8_t *h = SHARED ? hs : a.hs;
    bool waited = false;
    /* what a task needs of the other launch, once: the columns */
    auto wait = [&]() {
        if (!waited) {
            waited = true;
            pdl_wait();
            if (SHARED) {
                const uint32_t n = a.m_rows * (a.k + 1) * a.h_col / 16;
#pragma unroll 2
                for (uint32_t i = tid; i < n; i += MR_WARPS * 32) {
                    ((uint4 *)hs)[i] = __ldcg((const uint4 *)a.hs + i);
                }
                __syncthreads();
            }
        }
    };
    uint32_t task = warp;
#pragma unroll 1
    for (; task < job.first; task += MR_WARPS) {
        if (MANY) {
            mr_down_task<R, 2, SHARED, true> t;
            t.prepare(a, job, cols, 4 * task, h, rd, lane);
            wait();
            t.run(a, ring, job, res, lane);
        } else {
            mr_down_task<R, 1, SHARED, true> t;
            t.prepare(a, job, cols, 4 * task, h, rd, lane);
            wait();
            t.run(a, ring, job, res, lane);
        }
    }
#pragma unroll 1
    for (; task < n_tasks; task += MR_WARPS) {
        const uint32_t b0 = 4 * (task - job.first);
        bool wide = false;
        if (MANY) {
            const auto b1 = job.of(false, b0), b2 = job.of(false, b0 + 3);
            wide = !b2.empty && b2.s != b1.s && cols[b1.e].n + cols[b2.e].n > 8;
        }
        if (MANY && wide) {
            mr_down_task<R, 2, SHARED, false> t;
            t.prepare(a, job, cols, b0, h, rd, lane);
            wait();
            t.run(a, ring, job, res, lane);
        } else {
            mr_down_task<R, 1, SHARED, false> t;
            t.prepare(a, job, cols, b0, h, rd, lane);
            wait();
            t.run(a, ring, job, res, lane);
        }
    }
    wait();
    __syncthreads();
    for (uint32_t i = tid; i < a.m_rows * rd; i += MR_WARPS * 32) {
        const uint32_t m = i / rd, r = i - m * rd;
        if (r < nq * 4) {
            float s = 0.0f, v = 0.0f;
#pragma unroll 5
            for (uint32_t k = 0; k < a.k; ++k) {
                s = fmaf(wt[m * a.k + k], res[(m * a.k + k) * rd + r], s);
            }
            for (uint32_t p = 0; p < a.down_s.parts; ++p) {
                v += res[(items + m * a.down_s.parts + p) * rd + r];
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
                      items * (2 * sizeof(mr_mat) + sizeof(mr_cols) + 4));
}

static uint32_t down_smem(const mr_args &a, uint32_t grid, uint32_t ring, bool shared)
{
    const uint32_t items = a.m_rows * a.k, rd = (a.hidden / 4 / grid + 1) * 4;
    return (uint32_t)(MR_WARPS * ring * MR_STEP + (shared ? a.m_rows * (a.k + 1) * a.h_col : 0) +
                      (items + 1) * (sizeof(mr_mat) + sizeof(mr_cols)) + items * 8 +
                      (items + 4 * a.m_rows) * rd * 4);
}

/* At least 16 output rows a block. */
static uint32_t down_grid(const struct qx_queue *q, uint32_t hidden)
{
    const uint32_t most = hidden / 16;
    return most < (uint32_t)q->n_sm ? most : (uint32_t)q->n_sm;
}

/* Cuts k columns of a format into parts for gate and up, or segments for down; tf TF_GEN: does not fit. */
static mr_cut cut_of(uint8_t fmt, uint32_t k, uint32_t max_parts, bool even)
{
    mr_cut c = {};
    c.k = k;
    c.tf = fmt == QX_W_NVFP4 && k % 128 == 0                                   ? TF_NV
           : fmt == QX_W_BF16 && k % 8 == 0                                    ? TF_BF16
           : fmt == QX_W_FP8 && k % 16 == 0                                    ? TF_FP8
           : fmt == QX_W_FP8_BLOCK && k % 16 == 0                              ? TF_BLOCK
           : fmt == QX_W_MXFP8 && k % 32 == 0                                  ? TF_MX
                                                                               : TF_GEN;
    c.bytes = (uint32_t)weight_row_bytes(fmt, k);
    c.s_bytes = c.tf == TF_NV ? k / 16 : 0;
    const uint32_t steps = (c.bytes + 63) / 64;
    c.parts = 1;
    c.per = steps;
    if (even) { /* as many equal ones as there may be, none below MR_PER steps */
        for (uint32_t n = max_parts; n > 1; --n) {
            if (steps % n == 0 && steps / n >= MR_PER) {
                c.parts = n;
                c.per = steps / n;
                break;
            }
        }
    } else {
        c.per = (steps + max_parts - 1) / max_parts;
        c.per = c.per < MR_PER ? MR_PER : c.per;
        c.per = c.per < steps ? c.per : steps;
        c.parts = (steps + c.per - 1) / c.per;
    }
    return c;
}

static bool make_args(mr_args &a, struct qx_queue *q, const struct qx_op_moe *o)
{
    a.k = o->k;
    a.hidden = o->experts.hidden;
    a.inter = o->experts.inter;
    a.n_experts = o->experts.n_experts;
    a.s_inter = o->s_inter;
    if (q->smem_max < (int)MR_SMEM_MAX || !o->act_bf16 || o->k > MOE_MAX_K || a.hidden % 16 || a.inter % 8 ||
        a.s_inter % 8 || a.inter > 32768 ||
        o->s_gate.fmt != o->s_up.fmt || o->s_gate_vec.fmt != QX_W_BF16 || !mr_aligned(o->s_gate) ||
        !mr_aligned(o->s_up) || !mr_aligned(o->s_down)) {
        return false;
    }
    a.up_s = cut_of(o->s_gate.fmt, a.hidden, MR_WARPS, false);
    a.up_r = cut_of(o->experts.fmt, a.hidden, MR_WARPS, false);
    a.down_s = cut_of(o->s_down.fmt, a.s_inter, 4, true);
    a.down_r = cut_of(o->experts.fmt, a.inter, 1, true);
    if (a.up_s.tf == TF_GEN || a.up_r.tf == TF_GEN || a.down_s.tf == TF_GEN || a.down_r.tf == TF_GEN) {
        return false;
    }
    a.parts_s.set(a.up_s.parts);
    a.parts_r.set(a.up_r.parts);
    a.tiles_s.set(a.s_inter / 8);
    a.tiles_r.set(a.inter / 8);
    a.x_col = mr_col_bytes(a.hidden);
    a.h_col = mr_col_bytes(a.inter > a.s_inter ? a.inter : a.s_inter);
    mr_args m = a;
    m.m_rows = 8; /* whatever n_rows: a row's bits must not depend on it */
    const uint32_t grid = down_grid(q, a.hidden);
    if (up_smem(m, 3) > MR_SMEM_MAX || down_smem(m, grid, 3, false) > MR_SMEM_MAX) {
        return false;
    }
    m.m_rows = 1;
    return up_smem(m, 5) <= MR_SMEM_MAX && down_smem(m, grid, 5, true) <= MR_SMEM_MAX;
}

/* Gate and up. FAST: of two rows that moe_one.cu takes. */
template <int R, int FAST> static int run_up(struct qx_queue *q, const mr_args &a)
{
    const uint32_t shared = up_smem(a, R);
    /* its tasks are divided as if each block had a multiprocessor */
    return launch(q, "moe", moe_rows_up<R, FAST>, dim3((unsigned)q->n_sm), dim3(MR_WARPS * 32),
                  shared > ALONE_SHARED ? shared : ALONE_SHARED, a);
}

static int run_rows(struct qx_queue *q, const mr_args &a)
{
    /* one row: a ring of five steps, the columns in shared memory; both launches fit into a multiprocessor */
    const uint32_t ring = a.m_rows == 1 ? 5 : 3, grid = down_grid(q, a.hidden);
    const bool in = down_smem(a, grid, ring, true) <= MR_SMEM_MAX;
    const dim3 blocks(grid), block(MR_WARPS * 32);
    const uint32_t sd = down_smem(a, grid, ring, in);
    const int r = ring == 5 ? run_up<5, TF_GEN>(q, a) : run_up<3, TF_GEN>(q, a);
    if (r) {
        return r;
    }
    if (ring == 5) {
        return launch(q, "moe", moe_rows_down<5, true, false>, blocks, block, sd, a);
    }
    if (in) {
        return a.m_rows <= 4 ? launch(q, "moe", moe_rows_down<3, true, false>, blocks, block, sd, a)
                             : launch(q, "moe", moe_rows_down<3, true, true>, blocks, block, sd, a);
    }
    return launch(q, "moe", moe_rows_down<3, false, true>, blocks, block, sd, a);
}

int qx_moe_rows(struct qx_queue *q, const struct qx_op_moe *o)
{
    const bool one = qx_moe_one_takes(q, o);
    if (one && o->n_rows == 1) {
        return qx_moe_one(q, o);
    }
    mr_args a = {};
    if (!make_args(a, q, o)) {
        return 1;
    }
    a.gate = o->experts.gate;
    a.up = o->experts.up;
    a.down = o->experts.down;
    a.s_gate = o->s_gate;
    a.s_up = o->s_up;
    a.s_down = o->s_down;
    a.s_vec = o->s_gate_vec;
    a.sg = (float *)q->ws;
    a.hs = q->ws + 256;
    a.words = q->moe_words;
    a.numbers = q->numbers + QX_MOE_NUMBERS;
    if (one) {
        moe_take_rows(a, q, o, 0);
        const int e = a.up_s.tf == TF_BF16 ? run_up<3, TF_BF16>(q, a) : run_up<3, TF_MX>(q, a);
        return e ? e : qx_moe_one_down(q, o, {a.words, a.numbers});
    }
    for (uint32_t r = 0; r < o->n_rows; r += 8) {
        moe_take_rows(a, q, o, r);
        const int e = run_rows(q, a);
        if (e) {
            return e;
        }
    }
    return 0;
}
