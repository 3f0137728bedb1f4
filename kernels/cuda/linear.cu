/* linear.cu: y = W x for up to six matrices that share their input. With inputs rounded to bf16 the weights
 * stream through shared memory (stream.cuh): a block a multiprocessor, each with an equal share of the bytes
 * as whole rows, all of them times up to 32 rows of input at once. Precise inputs, odd widths and plain
 * floating formats take tiles (tile.cuh) of eight rows of input a block. */
#include "prompt.h"
#include "stream.cuh"

/* ---- streaming -------------------------------------------------------------------------------- */

struct lin_stream {
    const float *x;
    float *y;
    uint64_t x_stride, y_stride;
    uint32_t n_rows, n_weights, k, group; /* group: rows of input a block */
    uint32_t slot_bytes, n_slots, x_pitch16, lead;
    bool acc, nv;
    stream_w w[QX_LINEAR_MAX];
    uint32_t off[QX_LINEAR_MAX];
    uint32_t cost[QX_LINEAR_MAX];   /* of a row, in bytes / 16 */
    uint64_t begin[QX_LINEAR_MAX + 1]; /* cost of all matrices before */
};

/* The first row of matrix j at or behind a place in the sum of costs. */
__device__ __forceinline__ uint32_t lin_bound(const lin_stream &a, uint32_t j, uint64_t p)
{
    if (p <= a.begin[j]) {
        return 0;
    }
    const uint64_t r = (p - a.begin[j] + a.cost[j] - 1) / a.cost[j];
    return r < a.w[j].rows ? (uint32_t)r : a.w[j].rows;
}

/* What the consumers of a block share. */
struct lin_block {
    stream_ring ring;
    stream_x xs;
    float *red;
    uint32_t buf, m0;
    bool warm; /* the next tile is not one yet */
};

/* Rows r0 .. r1 of matrix j. The very first pass multiplies what happens to be in shared memory and stores
 * nothing: it brings the instructions here before the op before has ended. */
template <int F, int TB>
__device__ __forceinline__ void lin_matrix(const lin_stream &a, uint32_t j, uint32_t r0, uint32_t r1,
                                           lin_block &b, uint32_t warp, uint32_t lane)
{
    const stream_w &w = a.w[j];
    uint32_t row = r0;
    while (row < r1) {
        stream_acc<TB> acc = {};
        for (uint32_t s = 0; s < w.n_seg; ++s) {
            if (!b.warm) {
                bar_wait(b.ring.full + b.ring.slot, b.ring.phase);
            }
            stream_slot<F, TB>(acc, w, b.ring.base + b.ring.slot * b.ring.slot_bytes, row, s, b.xs, warp, lane);
            if (b.warm) {
                break;
            }
            __syncwarp();
            if (lane == 0) {
                bar_arrive(b.ring.empty + b.ring.slot);
            }
            b.ring.next();
        }
        float *rb = b.red + b.buf * (STREAM_WARPS * TB * 64);
        stream_store<TB>(rb + warp * (TB * 64), acc, lane);
        consumers_sync();
        const uint32_t n = b.warm ? 0 : r1 - row < STREAM_ROWS ? r1 - row : STREAM_ROWS;
        for (uint32_t i = threadIdx.x; i < b.xs.n_tok * 8; i += STREAM_WARPS * 32) {
            const float v = w.factor * stream_sum<TB>(rb, i);
            if ((i & 7) < n) {
                float *y = a.y + (b.m0 + i / 8) * a.y_stride + a.off[j] + row + (i & 7);
                *y = a.acc ? __ldcg(y) + v : v;
            }
        }
        b.buf ^= 1; /* the other buffer is free: all have passed the barrier behind reading it */
        if (b.warm) {
            b.warm = false;
            pdl_wait();
            stream_stage((uint4 *)b.xs.xs, a.x_pitch16, a.x + b.m0 * a.x_stride, a.x_stride, b.xs.n_tok, a.k, a.nv,
                         threadIdx.x, STREAM_WARPS * 32);
            consumers_sync();
        } else {
            row += STREAM_ROWS;
        }
    }
}

template <int TB>
__global__ void __maxnreg__(TB == 4 ? 128 : 104) linear_stream(const __grid_constant__ lin_stream a)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint64_t bars[2 * STREAM_MAX_SLOTS];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const uint32_t m0 = blockIdx.y * a.group, n_tok = a.n_rows - m0 < a.group ? a.n_rows - m0 : a.group;
    float *red = (float *)(smem + a.n_slots * a.slot_bytes);
    uint4 *x = (uint4 *)(red + 2 * STREAM_WARPS * TB * 64);
    lin_block b = {{smem, bars, bars + STREAM_MAX_SLOTS, a.slot_bytes, a.n_slots, 0, 0},
                   {x, a.x_pitch16, n_tok}, red, 0, m0, true};
    ring_init(b.ring, threadIdx.x);
    const uint64_t total = a.begin[a.n_weights];
    const uint64_t p0 = total * blockIdx.x / gridDim.x, p1 = total * (blockIdx.x + 1) / gridDim.x;
    if (warp > STREAM_WARPS) {
        return; /* there for their registers (launch_alone) */
    }
    if (warp == STREAM_WARPS) {
        const uint64_t policy = l2_read_once();
        uint32_t left = 0;
        for (uint32_t j = 0; j < a.n_weights; ++j) {
            left += (lin_bound(a, j, p1) - lin_bound(a, j, p0) + STREAM_ROWS - 1) / STREAM_ROWS * a.w[j].n_seg;
        }
        /* The next op's blocks come when this one has little left to ask for: so its weights follow these
         * without a gap, instead of competing with them and leaving the end to latencies alone. */
        if (left <= a.lead) {
            pdl_next();
        }
        for (uint32_t j = 0; j < a.n_weights; ++j) {
            const uint32_t r0 = lin_bound(a, j, p0), r1 = lin_bound(a, j, p1);
            for (uint32_t row = r0; row < r1; row += STREAM_ROWS) {
                const uint32_t n = r1 - row < STREAM_ROWS ? r1 - row : STREAM_ROWS;
                for (uint32_t s = 0; s < a.w[j].n_seg; ++s) {
                    ring_fill(b.ring, a.w[j], row, n, s, policy, lane);
                    if (--left == a.lead) {
                        pdl_next();
                    }
                }
            }
        }
        pdl_wait();
        return;
    }
    for (uint32_t j = 0; j < a.n_weights; ++j) {
        const uint32_t r0 = lin_bound(a, j, p0), r1 = lin_bound(a, j, p1);
        if (r0 < r1) {
            switch (a.w[j].tf) {
            case TF_BF16: lin_matrix<TF_BF16, TB>(a, j, r0, r1, b, warp, lane); break;
            case TF_FP8: lin_matrix<TF_FP8, TB>(a, j, r0, r1, b, warp, lane); break;
            case TF_BLOCK: lin_matrix<TF_BLOCK, TB>(a, j, r0, r1, b, warp, lane); break;
            case TF_MX: lin_matrix<TF_MX, TB>(a, j, r0, r1, b, warp, lane); break;
            default: lin_matrix<TF_NV, TB>(a, j, r0, r1, b, warp, lane); break;
            }
        }
    }
    if (b.warm) {
        pdl_wait(); /* a block without rows */
    }
}

#define LIN_SEG 2560u            /* bytes of a row at once */
#define LIN_SHARED_MAX (224u << 10)
#define LIN_LEAD 6u              /* slots left to ask for when the next op may start */
#define LIN_RING (96u << 10)
#define LIN_RING_MIN (64u << 10)

/* The matrices in `which` (all of one order of activations). */
static int linear_streamed(struct qx_queue *q, const struct qx_op_linear *o, unsigned which, bool nv)
{
    lin_stream a = {};
    a.x = o->x;
    a.y = o->y;
    a.x_stride = o->x_stride;
    a.y_stride = o->y_stride;
    a.n_rows = o->n_rows;
    a.acc = o->acc;
    a.nv = nv;
    a.k = o->w[0].cols;
    uint32_t off = 0;
    for (uint32_t j = 0; j < o->n_weights; off += o->w[j].rows, ++j) {
        if (!(which >> j & 1)) {
            continue;
        }
        const uint32_t i = a.n_weights++;
        make_stream_w(o->w[j], LIN_SEG, &a.w[i]);
        a.off[i] = off;
        a.cost[i] = (a.w[i].bytes + a.w[i].scale_bytes + 15) / 16;
        a.begin[i + 1] = a.begin[i] + (uint64_t)a.cost[i] * a.w[i].rows;
        const uint32_t slot = stream_slot_bytes(a.w[i]);
        a.slot_bytes = slot > a.slot_bytes ? slot : a.slot_bytes;
    }
    a.x_pitch16 = stream_x_pitch16(a.k);
    const uint32_t x_row = a.x_pitch16 * 16, red8 = 2 * STREAM_WARPS * 64 * 4;
    uint32_t group = o->n_rows < 32 ? o->n_rows : 32;
    while (group > 1 && group * x_row + (group + 7) / 8 * red8 + LIN_RING_MIN / 2 > LIN_SHARED_MAX) {
        group = group > 8 ? (group - 1) / 8 * 8 : group - 1;
    }
    const uint32_t n_groups = (o->n_rows + group - 1) / group;
    group = (o->n_rows + n_groups - 1) / n_groups;
    a.group = group;
    const uint32_t tb = group <= 8 ? 1 : group <= 16 ? 2 : 4;
    const uint32_t fixed = group * x_row + tb * red8;
    uint32_t ring = fixed + LIN_RING_MIN <= ALONE_SHARED_LEFT ? ALONE_SHARED_LEFT - fixed : LIN_SHARED_MAX - fixed;
    ring = ring > LIN_RING ? LIN_RING : ring;
    a.n_slots = ring / a.slot_bytes;
    a.n_slots = a.n_slots > STREAM_MAX_SLOTS ? STREAM_MAX_SLOTS : a.n_slots;
    if (a.n_slots == 0) {
        return qx_queue_refuse(q, "linear", "a row of input is too long for shared memory");
    }
    const uint32_t smem = a.n_slots * a.slot_bytes + fixed;
    a.lead = LIN_LEAD;
    const dim3 grid((unsigned)q->n_sm, n_groups);
    const unsigned threads = STREAM_WARPS * 32 + 32;
    return tb == 1   ? launch_alone(q, "linear", linear_stream<1>, grid, threads, smem, a)
           : tb == 2 ? launch_alone(q, "linear", linear_stream<2>, grid, threads, smem, a)
                     : launch_alone(q, "linear", linear_stream<4>, grid, threads, smem, a);
}

/* ---- tiles ------------------------------------------------------------------------------------ */

struct lin_args {
    const float *x;
    float *y;
    uint64_t x_stride, y_stride;
    uint32_t n_rows, n_weights, n_groups;
    bool acc, act_bf16;
    tile_w w[QX_LINEAR_MAX];
    uint32_t off[QX_LINEAR_MAX];
    uint32_t block0[QX_LINEAR_MAX + 1];
};

/* FMT: the format of all matrices, or -1 when they differ. */
template <int NB, int FMT>
__global__ void __launch_bounds__(256, NB == 1 ? 3 : 2) linear_tiles(const __grid_constant__ lin_args a)
{
    extern __shared__ uint4 sm[];
    __shared__ float red[8 * 16 * NB * 8];
    pdl_next();
    const uint32_t b = blockIdx.x / a.n_groups, grp = blockIdx.x - b * a.n_groups;
    uint32_t j = 0;
    while (j + 1 < a.n_weights && b >= a.block0[j + 1]) {
        ++j;
    }
    const tile_w &w = a.w[j];
    const tile_split sp = tile_divide(w.tf, w.k, 8);
    const uint32_t warp = threadIdx.x / 32, tiles = 8 / sp.parts;
    const uint32_t row = ((b - a.block0[j]) * tiles + warp / sp.parts) * 16;
    const uint32_t m0 = grp * 8;
    const uint32_t m_rows = a.n_rows - m0 < 8 ? a.n_rows - m0 : 8;
    const src_rows src = {a.x + m0 * a.x_stride, a.x_stride, w.k, a.act_bf16};
    if constexpr (FMT >= 0) {
        tile_run<FMT, NB>(red + warp * (16 * NB * 8), w, sp, row, warp % sp.parts, src, m_rows, sm, threadIdx.x,
                          256, tile_no_ready());
    } else {
        QX_TILE_SWITCH(F, w.tf,
                       tile_run<F, NB>(red + warp * (16 * NB * 8), w, sp, row, warp % sp.parts, src, m_rows, sm,
                                       threadIdx.x, 256, tile_no_ready()))
    }
    __syncthreads();
    const float f = tile_factor(w);
    for (uint32_t i = threadIdx.x; i < tiles * 16 * m_rows; i += 256) {
        const uint32_t m = i / (tiles * 16), r = i - m * (tiles * 16);
        const uint32_t tile = r / 16;
        const uint32_t out = (b - a.block0[j]) * tiles * 16 + r;
        if (out < w.w.rows) {
            const float v =
                f * tile_result<NB>(red + tile * sp.parts * (16 * NB * 8), sp.parts, r & 15, m);
            float *y = a.y + (m0 + m) * a.y_stride + a.off[j] + out;
            *y = a.acc ? __ldcg(y) + v : v;
        }
    }
}

/* The matrices in `which`. */
static int linear_tiled(struct qx_queue *q, const struct qx_op_linear *o, unsigned which)
{
    lin_args a = {};
    a.x = o->x;
    a.y = o->y;
    a.x_stride = o->x_stride;
    a.y_stride = o->y_stride;
    a.n_rows = o->n_rows;
    a.acc = o->acc;
    a.act_bf16 = o->act_bf16;
    a.n_groups = (o->n_rows + 7) / 8;
    const uint32_t m = o->n_rows < 8 ? o->n_rows : 8;
    const int nb = tile_nb(m);
    uint32_t off = 0, blocks = 0, smem = 0;
    for (uint32_t j = 0; j < o->n_weights; off += o->w[j].rows, ++j) {
        if (!(which >> j & 1)) {
            continue;
        }
        const uint32_t i = a.n_weights++;
        a.w[i] = make_tile_w(o->w[j], 0, o->w[j].cols);
        a.off[i] = off;
        a.block0[i] = blocks;
        const tile_split sp = tile_divide(a.w[i].tf, a.w[i].k, 8);
        const uint32_t rows = 8 / sp.parts * 16;
        blocks += (o->w[j].rows + rows - 1) / rows;
        const uint32_t x = tile_x_bytes(a.w[i].tf, nb, sp, m);
        smem = x > smem ? x : smem;
    }
    a.block0[a.n_weights] = blocks;
    const dim3 grid(blocks * a.n_groups);
    int same = a.w[0].tf;
    for (uint32_t j = 1; j < a.n_weights; ++j) {
        same = a.w[j].tf == same ? same : -1;
    }
    switch (same == TF_BF16 || same == TF_MX ? nb * 8 + same : nb * 8) {
    case 8 + TF_BF16: return launch(q, "linear", linear_tiles<1, TF_BF16>, grid, dim3(256), smem, a);
    case 16 + TF_BF16: return launch(q, "linear", linear_tiles<2, TF_BF16>, grid, dim3(256), smem, a);
    case 24 + TF_BF16: return launch(q, "linear", linear_tiles<3, TF_BF16>, grid, dim3(256), smem, a);
    case 8 + TF_MX: return launch(q, "linear", linear_tiles<1, TF_MX>, grid, dim3(256), smem, a);
    case 16 + TF_MX: return launch(q, "linear", linear_tiles<2, TF_MX>, grid, dim3(256), smem, a);
    case 24 + TF_MX: return launch(q, "linear", linear_tiles<3, TF_MX>, grid, dim3(256), smem, a);
    case 8: return launch(q, "linear", linear_tiles<1, -1>, grid, dim3(256), smem, a);
    case 16: return launch(q, "linear", linear_tiles<2, -1>, grid, dim3(256), smem, a);
    default: return launch(q, "linear", linear_tiles<3, -1>, grid, dim3(256), smem, a);
    }
}

int qx_linear_few(struct qx_queue *q, const struct qx_op_linear *o)
{
    unsigned tiled = 0, plain = 0, nv = 0;
    for (uint32_t j = 0; j < o->n_weights; ++j) {
        stream_w w;
        if (!o->act_bf16 || !can_stream(q) || !make_stream_w(o->w[j], LIN_SEG, &w)) {
            tiled |= o->w[j].rows ? 1u << j : 0;
        } else if (w.tf == TF_NV) {
            nv |= 1u << j;
        } else {
            plain |= 1u << j;
        }
    }
    int r = 0;
    if (plain) {
        r = linear_streamed(q, o, plain, false);
    }
    if (nv && !r) {
        r = linear_streamed(q, o, nv, true);
    }
    if (tiled && !r) {
        r = linear_tiled(q, o, tiled);
    }
    return r;
}

extern "C" int qx_cuda_linear(struct qx_queue *q, const struct qx_op_linear *o)
{
    if (o->n_rows == 0 || o->n_weights == 0) {
        return 0;
    }
    const int r = qx_prompt_linear(q, o);
    return r <= 0 ? r : qx_linear_few(q, o);
}
