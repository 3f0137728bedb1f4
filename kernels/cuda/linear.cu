/* linear.cu: y = W x for up to six matrices that share their input. With inputs rounded to bf16 the weights
 * stream through a ring of shared memory: a block a multiprocessor, each with an equal share of the bytes as
 * whole rows, all of them times up to 32 rows of input at once. One warp, the producer, keeps bulk copies in
 * flight; the others, the consumers, decode and multiply (linear_slot.cuh, linear_bytes.cuh). Precise inputs, odd
 * widths and plain floating formats take tiles (tile.cuh) of eight rows of input a block. */
#include "prompt.h"
#include "linear_bytes.cuh"

#include <float.h>
#include <type_traits>

/* ---- streaming -------------------------------------------------------------------------------- */

struct lin_stream {
    const float *x;
    float *y;
    uint64_t x_stride, y_stride;
    uint32_t n_rows, n_weights, k;
    uint32_t group, n_groups; /* rows of input a block; groups side by side, so that L2 has what one of them read */
    uint32_t slot_bytes, n_slots, x_pitch16, lead;
    uint32_t pause;   /* nanoseconds from a block's start to its first copy */
    uint32_t pending; /* products of four rows whose warps' sums are added up together */
    uint32_t late;    /* matrices from this on come behind the others; a block counts itself in `done` between them */
    unsigned *done;
    bool acc, pairs; /* pairs: of blocks, see lin_part */
    stream_w w[QX_LINEAR_MAX];
    uint32_t off[QX_LINEAR_MAX];
    uint32_t cost[QX_LINEAR_MAX];   /* of a row, in bytes / 16 */
    uint32_t begin[QX_LINEAR_MAX + 1]; /* cost of all matrices before, of the late ones of the late ones before */
    uint32_t share, share_late;     /* of a block */
};

/* R: rows of a slot. NT: the most rows of input, where it matters. */
template <int F, int SHAPE, int NT, bool BYTES = lin_fmt<F>::BYTES, bool WIDE = lin_wide_shape(SHAPE)> struct lin_kind {
    static constexpr uint32_t R = 4 * lin_tiles<F>::N;
    using acc = lin_narrow<lin_tiles<F>::N>;
    using lane = lin_lane<F, SHAPE>;
};
template <int F, int SHAPE, int NT> struct lin_kind<F, SHAPE, NT, true, false> {
    static constexpr uint32_t R = lin_eights(SHAPE) ? 8 : 4;
    static constexpr bool FEW = NT <= 4;
    using acc = std::conditional_t<FEW, lin_sums_of<SHAPE, NT>, lin_cols<lin_eights(SHAPE)>>;
    using lane = std::conditional_t<FEW, lin_lane8<F, SHAPE, NT>, lin_lane8_cols<F, SHAPE>>;
};
template <int F, int SHAPE, int NT, bool BYTES> struct lin_kind<F, SHAPE, NT, BYTES, true> {
    static constexpr uint32_t R = 8;
    static constexpr int NM = SHAPE == LIN_W32 ? 2 : 1;
    using acc = std::conditional_t<BYTES, lin_wide8<NM>, lin_wide<NM>>;
    using lane = std::conditional_t<BYTES, lin_lane8_wide<F, NM>, lin_lane_wide<F, NM>>;
};

/* The first row of matrix j at or behind a place in the sum of costs. */
__device__ __forceinline__ uint32_t lin_bound(const lin_stream &a, uint32_t j, uint32_t p)
{
    const uint32_t r = p <= a.begin[j] ? 0 : (p - a.begin[j] + a.cost[j] - 1) / a.cost[j];
    return r < a.w[j].rows ? r : a.w[j].rows;
}

/* The ring, by addresses in shared memory: slots, a barrier for "full" each, and one for "empty" each behind those. */
struct lin_ring {
    uint32_t base, full;
    uint32_t slot, phase; /* the next slot; each side counts for itself */
    __device__ __forceinline__ void next(uint32_t n_slots)
    {
        if (++slot == n_slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* A barrier of the consumers only. */
__device__ __forceinline__ void consumers_sync()
{
    bar_sync_some<LIN_WARPS * 32>(1);
}

/* The consumers have written all that is not late; one warp more waits for that. */
__device__ __forceinline__ void late_arrive()
{
    asm volatile("bar.arrive 2, %0;" ::"n"(LIN_WARPS * 32 + 32) : "memory");
}
__device__ __forceinline__ void late_sync()
{
    bar_sync_some<LIN_WARPS * 32 + 32>(2);
}

__device__ __forceinline__ uint64_t now_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* What the consumers of a block share. */
struct lin_block {
    lin_ring ring;
    lin_x xs;
    uint32_t red, buf, m0;
};

/* Rows r0 .. r1 of matrix j. */
template <int F, int SHAPE, int NT>
__device__ __forceinline__ void lin_matrix(const lin_stream &a, uint32_t j, uint32_t r0, uint32_t r1,
                                           lin_block &b, uint32_t warp, uint32_t lane)
{
    constexpr uint32_t R = lin_kind<F, SHAPE, NT>::R;
    const stream_w &w = a.w[j];
    const uint32_t part = b.xs.n_tok * 16; /* bytes a warp and four rows */
    const typename lin_kind<F, SHAPE, NT>::lane at_lane(w, b.xs, warp, lane);
    const uint32_t n_seg = lin_exact(SHAPE) ? 1 : w.n_seg, seg = w.seg, bytes = w.bytes;
    uint32_t row = r0, first = r0, n_tiles = 0;
    while (row < r1) {
        typename lin_kind<F, SHAPE, NT>::acc acc = {};
#pragma unroll 1
        for (uint32_t s = 0, at = 0; s < n_seg; ++s, at += seg) {
            bar_wait(b.ring.full + b.ring.slot * 8, b.ring.phase);
            lin_slot(acc, w, b.ring.base + b.ring.slot * a.slot_bytes, row, at, bytes - at < seg ? bytes - at : seg,
                        at_lane, b.ring.full + (b.ring.slot + LIN_MAX_SLOTS) * 8, warp, lane);
            b.ring.next(a.n_slots);
        }
        const uint32_t red = b.red + b.buf * (a.pending * LIN_WARPS * part);
        lin_store(red + (n_tiles * LIN_WARPS + warp) * part, LIN_WARPS * part, acc, b.xs.n_tok, lane);
        n_tiles += R / 4;
        row += R;
        if (n_tiles < a.pending && row < r1) {
            continue;
        }
        consumers_sync();
        const uint32_t rows = r1 - first < n_tiles * 4 ? r1 - first : n_tiles * 4;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < b.xs.n_tok * rows; i += LIN_WARPS * 32) {
            const uint32_t t = i / rows, r = i - t * rows, p = red + r / 4 * (LIN_WARPS * part) + (t * 4 + r % 4) * 4;
            float *y = a.y + (b.m0 + t) * a.y_stride + a.off[j] + first + r;
            float v = lds_f32(p);
#pragma unroll
            for (uint32_t i = 1; i < LIN_WARPS; ++i) {
                v += lds_f32(p + i * part);
            }
            if constexpr (F == TF_MX) {
                if (!(fabsf(v) <= FLT_MAX)) {
                    const uint64_t row = first + r;
                    v = lin_mx_row(w.codes + row * w.row_bytes, w.scale + row * w.scale_bytes,
                                   a.x + (b.m0 + t) * a.x_stride, a.k);
                }
            }
            v *= w.factor;
            *y = a.acc ? __ldcg(y) + v : v;
        }
        b.buf ^= 1; /* the other buffer is free: all have passed the barrier behind reading it */
        first = row;
        n_tiles = 0;
    }
}

/* The producer warp's part of matrix w: rows row .. r1. A slot is R rows of a segment; whole rows are one copy,
 * since asking for one takes a warp 100 ns whatever its size. */
template <uint32_t R>
__device__ __forceinline__ void lin_produce(lin_ring &r, const lin_stream &a, const stream_w &w, uint32_t row,
                                            uint32_t r1, uint32_t &left, uint32_t lead, uint64_t policy,
                                            uint32_t lane)
{
    const uint32_t row_bytes = w.row_bytes, scale_bytes = w.scale_bytes, pitch = w.pitch;
    const uint8_t *src = w.codes + (uint64_t)row * row_bytes, *scale = w.scale + (uint64_t)row * scale_bytes;
    if (w.n_seg == 1 && pitch == row_bytes) {
#pragma unroll 1
        for (; row < r1; row += R, src += R * row_bytes, scale += R * scale_bytes) {
            const uint32_t n = r1 - row < R ? r1 - row : R;
            const uint32_t full = r.full + r.slot * 8, d = r.base + r.slot * a.slot_bytes;
            bar_wait(r.full + (r.slot + LIN_MAX_SLOTS) * 8, r.phase ^ 1);
            if (lane == 0) {
                bar_expect(full, n * (row_bytes + scale_bytes));
                bulk_load(d, src, n * row_bytes, full, policy);
                if (scale_bytes) {
                    bulk_load(d + R * pitch, scale, n * scale_bytes, full, policy);
                }
            }
            __syncwarp();
            r.next(a.n_slots);
            if (--left == lead) {
                pdl_next();
            }
        }
        return;
    }
    const uint32_t seg = w.seg, seg_scale = w.seg_scale, bytes = w.bytes, n_seg = w.n_seg, pitch_scale = w.pitch_scale;
    src += (uint64_t)lane * row_bytes;
    scale += (uint64_t)(lane & 7) * scale_bytes;
#pragma unroll 1
    for (; row < r1; row += R, src += R * row_bytes, scale += R * scale_bytes) {
        const uint32_t n = r1 - row < R ? r1 - row : R;
#pragma unroll 1
        for (uint32_t s = 0, at = 0, sat = 0; s < n_seg; ++s, at += seg, sat += seg_scale) {
            const uint32_t c = bytes - at < seg ? bytes - at : seg;
            const uint32_t k = seg_scale == 0 ? 0 : scale_bytes - sat < seg_scale ? scale_bytes - sat : seg_scale;
            const uint32_t full = r.full + r.slot * 8, d = r.base + r.slot * a.slot_bytes;
            bar_wait(r.full + (r.slot + LIN_MAX_SLOTS) * 8, r.phase ^ 1);
            if (lane == 0) {
                bar_expect(full, n * (c + k));
            }
            __syncwarp();
            if (lane < n) {
                bulk_load(d + lane * pitch, src + at, c, full, policy);
            } else if (k && lane >= 8 && lane - 8 < n) {
                bulk_load(d + R * pitch + (lane - 8) * pitch_scale, scale + sat, k, full, policy);
            }
            r.next(a.n_slots);
            if (--left == lead) {
                pdl_next();
            }
        }
    }
}

/* One kernel a format keeps each small. SPREAD: with groups side by side or pairs of blocks. */
template <int F, int SHAPE, bool SPREAD, int NT = 8>
__global__ void __maxnreg__(SHAPE == LIN_W32 ? 168 : SHAPE == LIN_W16 ? 128 : F == TF_BF16 ? 72 : 96)
    linear_stream(const __grid_constant__ lin_stream a)
{
    constexpr uint32_t R = lin_kind<F, SHAPE, NT>::R;
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint64_t bars[2 * LIN_MAX_SLOTS], staged;
    __shared__ uint2 share[QX_LINEAR_MAX]; /* rows of each matrix that are this block's */
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const bool pairs = SPREAD && a.pairs;
    uint32_t m0 = blockIdx.y * a.group, part = blockIdx.x; /* part: of the matrices */
    if constexpr (SPREAD) {
        const uint32_t in = pairs ? 2 : 1, u = blockIdx.x / in; /* all of a pair are of one group */
        m0 = (blockIdx.y * a.n_groups + u % a.n_groups) * a.group;
        part = u / a.n_groups * in + blockIdx.x % in;
        if (m0 >= a.n_rows) {
            pdl_next();
            pdl_wait();
            return;
        }
    }
    const uint32_t n_tok = a.n_rows - m0 < a.group ? a.n_rows - m0 : a.group;
    if (threadIdx.x < a.n_slots) {
        bar_init(bars + threadIdx.x, 1);
        bar_init(bars + LIN_MAX_SLOTS + threadIdx.x, LIN_WARPS);
    }
    if (SPREAD && threadIdx.x == LIN_MAX_SLOTS) {
        bar_init(&staged, 1);
    }
    if (threadIdx.x < a.n_weights) {
        const uint32_t n = threadIdx.x < a.late ? a.share : a.share_late, p = n * part;
        share[threadIdx.x] = make_uint2(lin_bound(a, threadIdx.x, p), lin_bound(a, threadIdx.x, p + n));
    }
    bar_init_done();
    fence_async();
    __syncthreads();
    if (pairs) {
        cluster_arrive_relaxed();
    }
    if (warp > LIN_WARPS) {
        pdl_wait(); /* there for their registers until all blocks have their places (launch_alone) */
        if (a.late < a.n_weights && warp == LIN_WARPS + 1) {
            late_sync();
            if (lane == 0) {
                count_release(a.done);
            }
        }
        return;
    }
    const uint32_t base = smem_addr(smem), x = base + a.n_slots * a.slot_bytes;
    lin_ring ring = {base, smem_addr(bars), 0, 0};
    lin_keep(ring.base);
    lin_keep(ring.full);
    if (warp == LIN_WARPS) {
        const uint64_t policy = SPREAD && a.n_groups > 1 ? l2_as_usual() : l2_read_once();
        uint32_t left = 0, lead = a.lead;
#pragma unroll 1
        for (uint32_t j = 0; j < a.n_weights; ++j) {
            const uint32_t n = (share[j].y - share[j].x + R - 1) / R * a.w[j].n_seg;
            left += n;
            lead += j >= a.late ? n : 0;
        }
        /* The next op's blocks come when this one has little left to ask for, but for what comes late: so its weights
         * follow these without a gap, instead of competing with them and leaving the end to latencies alone. */
        if (left <= lead) {
            pdl_next();
        }
        if (!SPREAD && a.pause) {
            for (const uint64_t t = now_ns(); now_ns() - t < a.pause;) {
                __nanosleep(100);
            }
        }
#pragma unroll 1
        for (uint32_t j = 0; j < a.n_weights; ++j) {
            if (share[j].x < share[j].y) {
                lin_produce<R>(ring, a, a.w[j], share[j].x, share[j].y, left, lead, policy, lane);
            }
        }
        pdl_wait();
        return;
    }
    constexpr uint32_t x_rows = SHAPE == LIN_W32 ? 16 : 8;
    lin_block b = {ring, {x, a.x_pitch16, n_tok, lin_x8_units(a.k)},
                   x + (lin_wide_shape(SHAPE) && !lin_fmt<F>::BYTES ? x_rows : a.group) * a.x_pitch16 * 16, 0, m0};
    lin_part<SPREAD> who = {};
    if (pairs) {
        who.rank = cluster_rank();
        who.peer = cluster_addr(x, who.rank ^ 1);
        who.bar = cluster_addr(&staged, who.rank ^ 1);
        cluster_wait(); /* the other block has begun */
    }
    pdl_wait();
    if constexpr (lin_fmt<F>::BYTES) {
        lin_stage8(b.xs, a.x + m0 * a.x_stride, a.x_stride, a.k, threadIdx.x, who);
    } else {
        lin_stage<F, SHAPE>(b.xs, a.x + m0 * a.x_stride, a.x_stride, a.k, threadIdx.x, who);
    }
    if (pairs && threadIdx.x == 0) { /* what the other block stages */
        const uint32_t n = lin_items<F, SHAPE>(n_tok, a.k);
        bar_expect(&staged, lin_item_bytes<F>(n - (who.end(n) - who.begin(n))));
    }
    consumers_sync(); /* what this one does */
    if (pairs) {
        bar_wait_sent(smem_addr(&staged), 0);
    }
#pragma unroll 1
    for (uint32_t j = 0; j < a.n_weights; ++j) {
        if (j == a.late) {
            late_arrive();
        }
        if (share[j].x < share[j].y) {
            lin_matrix<F, SHAPE, NT>(a, j, share[j].x, share[j].y, b, warp, lane);
        }
    }
}

#define LIN_SEG 6144u            /* the most bytes of a row at once, for up to eight rows of input */
#define LIN_SEG_WIDE 2560u       /* the same for more */
#define LIN_SHARED_MAX (224u << 10)
#define LIN_PAIRS 4u             /* rows of input from which blocks stage them in pairs */
#define LIN_GROUPS 4u            /* groups of rows of input side by side */
#define LIN_LEAD 3u              /* slots left to ask for when the next op may start */
#define LIN_PAUSE 2500u          /* behind a mixer, whose small loads else queue behind what is asked for here */
#define LIN_RING (88u << 10)
#define LIN_RING_MIN (56u << 10)

/* False: not a matrix for streaming (odd widths and formats). seg_max: bytes of a row a slot, in whole KiB. */
static bool make_lin_w(const struct qx_weight &w, bool wide, uint32_t seg_max, stream_w *s)
{
    *s = stream_whole(w);
    const uint32_t per = stream_per_scale(s->tf);
    if (s->tf == TF_GEN || w.rows == 0 || (per && (w.cols % (per * 16) || ((uintptr_t)w.scale & 15)))) {
        return false;
    }
    s->n_seg = (s->bytes + seg_max - 1) / seg_max;
    if (s->n_seg > 1) {
        const uint32_t to = s->tf == TF_NV || s->tf == TF_BF16 ? 1024 : 2048; /* as many units or pairs a warp */
        s->seg = ((s->bytes + s->n_seg - 1) / s->n_seg + to - 1) / to * to;
        s->n_seg = (s->bytes + s->seg - 1) / s->seg;
    } else {
        s->seg = s->bytes;
    }
    s->seg_scale = per ? (s->tf == TF_NV ? s->seg * 2 : s->seg) / per : 0;
    s->pitch = wide ? (s->seg + 63) / 128 * 128 + 64 : s->seg;
    s->pitch_scale = s->seg_scale;
    return true;
}

/* The most fours of rows whose sums wait: the more, the less often warps wait for one another. */
static uint32_t lin_pending(uint32_t n_tok)
{
    return n_tok == 1 ? 32 : n_tok == 2 ? 16 : n_tok <= 8 ? 8 : n_tok <= 16 ? 4 : 2;
}
/* Shared memory of as many sums, which have two places in turn. */
static uint32_t lin_sum_bytes(uint32_t fours, uint32_t n_tok)
{
    return 2 * fours * LIN_WARPS * n_tok * 16;
}
template <int F> static uint32_t lin_pitch16(uint32_t k, bool wide)
{
    return lin_fmt<F>::BYTES ? lin_x8_pitch16(k) : lin_x_pitch16(k, F, wide);
}
template <int F> static uint32_t lin_x_bytes(uint32_t k, uint32_t n_tok)
{
    const uint32_t rows = lin_fmt<F>::BYTES || n_tok <= 8 ? n_tok : n_tok <= 16 ? 8 : 16;
    return rows * lin_pitch16<F>(k, n_tok > 8) * 16;
}
/* Activations and the fewest sums: of E4M3 codes, whose slots may be eight rows, those of two slots. */
template <int F> static uint32_t lin_fixed_bytes(uint32_t k, uint32_t n_tok)
{
    const uint32_t most = lin_pending(n_tok), few = F == TF_BF16 ? 2 : 4;
    return lin_x_bytes<F>(k, n_tok) + lin_sum_bytes(n_tok <= 8 ? few : most, n_tok);
}

/* The matrices in `which`, all of format F. late: those of them that come behind the others. */
template <int F>
static int linear_streamed(struct qx_queue *q, const struct qx_op_linear *o, unsigned which, unsigned late)
{
    lin_stream a = {};
    a.x = o->x;
    a.y = o->y;
    a.x_stride = o->x_stride;
    a.y_stride = o->y_stride;
    a.n_rows = o->n_rows;
    a.acc = o->acc;
    a.k = o->w[0].cols;
    uint32_t group = o->n_rows < 32 ? o->n_rows : 32;
    while (group > 1 && lin_fixed_bytes<F>(a.k, group) + LIN_RING_MIN > LIN_SHARED_MAX) {
        group = group > 8 ? (group - 1) / 8 * 8 : group - 1;
    }
    const uint32_t n_groups = (o->n_rows + group - 1) / group;
    a.group = (o->n_rows + n_groups - 1) / n_groups;
    const bool wide = a.group > 8;
    a.x_pitch16 = lin_pitch16<F>(a.k, wide);
    /* of E4M3 codes the recurrence beside it costs more than it hides */
    late = F == TF_BF16 && n_groups == 1 && !wide ? late : 0;
    uint64_t total[2] = {};
    for (unsigned behind = 0; behind < 2; ++behind) {
        uint32_t off = 0;
        a.late = behind ? a.n_weights : 0;
        for (uint32_t j = 0; j < o->n_weights; off += o->w[j].rows, ++j) {
            if (!((behind ? which & late : which & ~late) >> j & 1)) {
                continue;
            }
            const uint32_t i = a.n_weights++;
            make_lin_w(o->w[j], wide, wide ? LIN_SEG_WIDE : LIN_SEG, &a.w[i]);
            a.off[i] = off;
            a.cost[i] = (a.w[i].bytes + a.w[i].scale_bytes + 15) / 16;
            a.begin[i] = (uint32_t)total[behind];
            total[behind] += (uint64_t)a.cost[i] * a.w[i].rows;
        }
    }
    const stream_w &w = a.w[0]; /* the others have rows as long */
    const bool eights = lin_fmt<F>::BYTES && w.bytes <= LIN_SHORT;
    const uint32_t slot_rows = wide || eights ? 8 : lin_kind<F, LIN_FOURS, 8>::R;
    a.slot_bytes = (slot_rows * (w.pitch + w.pitch_scale) + 127) / 128 * 128;
    a.pairs = a.group >= LIN_PAIRS && q->n_sm % 2 == 0;
    const unsigned in = a.pairs ? 2 : 1, waves = (n_groups + LIN_GROUPS - 1) / LIN_GROUPS;
    a.n_groups = (n_groups + waves - 1) / waves;
    const unsigned n_blocks = (unsigned)q->n_sm / (in * a.n_groups) * in; /* of a group */
    a.share = (uint32_t)((total[0] + n_blocks - 1) / n_blocks);
    a.share_late = (uint32_t)((total[1] + n_blocks - 1) / n_blocks);
    a.done = q->late_done;
    if (total[0] + 3ull * a.share > UINT32_MAX || total[1] + 3ull * a.share_late > UINT32_MAX) {
        return qx_queue_refuse(q, "linear", "matrices of 64 GiB");
    }
    /* What neighbours leave, with the sums in what the slots leave of it; or what is best for it alone. */
    const uint32_t x_bytes = lin_x_bytes<F>(a.k, a.group), fixed = lin_fixed_bytes<F>(a.k, a.group);
    const uint32_t whole = x_bytes + lin_sum_bytes(lin_pending(a.group), a.group);
    const bool beside = fixed + LIN_RING_MIN <= ALONE_SHARED_LEFT;
    const uint32_t alone = whole + LIN_RING < LIN_SHARED_MAX ? whole + LIN_RING : LIN_SHARED_MAX;
    const uint32_t most = beside ? ALONE_SHARED_LEFT : alone;
    a.n_slots = (most - (beside ? fixed : whole)) / a.slot_bytes;
    a.n_slots = a.n_slots > LIN_MAX_SLOTS ? LIN_MAX_SLOTS : a.n_slots;
    if (a.n_slots == 0) {
        return qx_queue_refuse(q, "linear", "a row of input is too long for shared memory");
    }
    const uint32_t fours = slot_rows / 4, left = most - x_bytes - a.n_slots * a.slot_bytes;
    a.pending = left / lin_sum_bytes(fours, a.group) * fours;
    a.pending = a.pending < lin_pending(a.group) ? a.pending : lin_pending(a.group);
    const uint32_t smem = x_bytes + a.n_slots * a.slot_bytes + lin_sum_bytes(a.pending, a.group);
    a.lead = LIN_LEAD;
    a.pause = F == TF_BF16 && q->mixer_at == q->n_launches ? LIN_PAUSE : 0;
    const dim3 grid((unsigned)q->n_sm, waves);
    const unsigned threads = LIN_WARPS * 32 + (late ? 64 : 32);
    q->late.y = late ? o->y : NULL;
    q->late.at = q->n_launches + 1;
    q->late.blocks = grid.x;
    const auto start = [&](auto kernel) {
        return launch_alone(q, "linear", F == TF_BF16, in, kernel, grid, threads, smem, a);
    };
    if (wide) {
        return a.group <= 16 ? start(linear_stream<F, LIN_W16, true>) : start(linear_stream<F, LIN_W32, true>);
    }
    const bool spread = a.pairs || n_groups > 1;
    if constexpr (lin_fmt<F>::BYTES) {
        const bool few = !spread && a.group <= 2;
        if constexpr (F == TF_MX) {
            if (w.bytes == 20 * 128) {
                return few              ? start(linear_stream<F, LIN_EIGHTS_20, false, 2>)
                       : a.group <= 4 ? start(linear_stream<F, LIN_EIGHTS_20, true, 4>)
                                      : start(linear_stream<F, LIN_EIGHTS_20, true>);
            }
            if (w.bytes == 48 * 128) {
                return few && a.group == 1 ? start(linear_stream<F, LIN_FOURS_48, false, 1>)
                       : few               ? start(linear_stream<F, LIN_FOURS_48, false, 2>)
                       : a.group <= 4      ? start(linear_stream<F, LIN_FOURS_48, true, 4>)
                                           : start(linear_stream<F, LIN_FOURS_48, true>);
            }
        }
        if (eights) {
            return few ? start(linear_stream<F, LIN_EIGHTS, false, 2>) : start(linear_stream<F, LIN_EIGHTS, true>);
        }
        return few ? start(linear_stream<F, LIN_FOURS, false, 2>) : start(linear_stream<F, LIN_FOURS, true>);
    } else {
        return spread ? start(linear_stream<F, LIN_FOURS, true>) : start(linear_stream<F, LIN_FOURS, false>);
    }
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
    unsigned tiled = 0, streamed[TF_NV + 1] = {};
    for (uint32_t j = 0; j < o->n_weights; ++j) {
        stream_w w;
        if (!o->act_bf16 || !can_stream(q) || !make_lin_w(o->w[j], false, LIN_SEG, &w)) {
            tiled |= o->w[j].rows ? 1u << j : 0;
        } else {
            streamed[w.tf] |= 1u << j;
        }
    }
    int r = 0;
    for (int f = TF_BF16; f <= TF_NV && !r; ++f) {
        /* late ones only of the last launch: its blocks have seen the others end when they count themselves */
        unsigned after = tiled;
        for (int g = f + 1; g <= TF_NV; ++g) {
            after |= streamed[g];
        }
        const unsigned late = o->prompt || after || o->late & ~streamed[f] ? 0 : o->late;
        QX_TILE_SWITCH(F, streamed[f] ? f : TF_GEN,
                       if constexpr (F != TF_GEN) { r = linear_streamed<F>(q, o, streamed[F], late); })
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
    if (q->late.y) {
        return qx_queue_refuse(q, "linear", "results that come late and no op behind them that knows");
    }
    const int r = qx_prompt_linear(q, o);
    return r <= 0 ? r : qx_linear_few(q, o);
}
