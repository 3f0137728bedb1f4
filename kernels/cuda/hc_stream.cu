/* hc_stream.cu: hyper-connection with inputs of products rounded to bf16, in two kernels that each hold all
 * of their weights in shared memory before the op before has ended: what is left after it is the way of the
 * activations. The first takes a slice of columns inside one stream and some rows of down (and inject) a
 * block; it needs the whole stream for its norm, with the block's output added on the fly. The second takes
 * some columns of all streams a block: it adds up the slices, multiplies with up, mixes, and is the one that
 * writes the streams back, since there each element belongs to one block.
 *
 * Slices depend on the matrix only, so that a row's bits depend neither on the device nor on the number of
 * rows. */
#include "stream.cuh"

#define HC_THREADS 512u
#define HC_WARPS (HC_THREADS / 32)
#define HC_BATCH 8u /* rows of activations normalised at once */

struct hc_stream_args {
    uint32_t n_rows, group, C, hidden, rank, n_slices, slice; /* slice: k */
    float *x;
    const float *y, *inj_in, *norm;
    float eps;
    stream_w down, inject, up; /* a segment of down and inject is a slice */
    bool has_inject, nv_up;
    uint8_t orders;            /* of activations in the first kernel: 1 plain, 2 of E2M1, 3 both */
    uint32_t tile_rows;        /* rows of down a block */
    uint32_t pr;               /* partial sums: [row][slice][pr], then 1 / rms [row][stream] */
    uint32_t nd;               /* columns a block of the second kernel */
    uint32_t x_pitch16, lo_pitch16;
    uint32_t slot_down, slot_up, slots_down, slots_up; /* bytes of a slot, slots a block */
    float *m, *inj_out, *part, *rs;
};

/* ---- fetching --------------------------------------------------------------------------------- */

__device__ __forceinline__ void copy16(void *dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Segment s of the rows row .. row + n into slots of slot_bytes. */
__device__ __forceinline__ void hc_fetch(uint8_t *dst, uint32_t slot_bytes, const stream_w &w, uint32_t row,
                                         uint32_t n, uint32_t s, uint32_t tid)
{
    const uint32_t chunks = w.seg / 16;
    for (uint32_t i = tid; i < n * chunks; i += HC_THREADS) {
        const uint32_t r = i / chunks, c = i - r * chunks;
        copy16(dst + (r / 8) * slot_bytes + (r & 7) * w.pitch + c * 16,
               w.codes + (uint64_t)(row + r) * w.row_bytes + s * w.seg + c * 16);
    }
    for (uint32_t i = tid; i < n * w.seg_scale; i += HC_THREADS) {
        const uint32_t r = i / w.seg_scale, c = i - r * w.seg_scale;
        dst[(r / 8) * slot_bytes + 8 * w.pitch + (r & 7) * w.pitch_scale + c] =
            __ldg(w.scale + (uint64_t)(row + r) * w.scale_bytes + s * w.seg_scale + c);
    }
}

/* The slots of a block times the activations: red [slot][warp of eight][TB * 64]. */
template <int F, int TB>
__device__ __forceinline__ void hc_slots(float *red, const stream_w &w, const uint8_t *slots,
                                         uint32_t slot_bytes, uint32_t n_slots, uint32_t row, uint32_t row_step,
                                         uint32_t per, uint32_t s, const stream_x &xs, uint32_t warp,
                                         uint32_t lane)
{
    for (uint32_t i = warp / 8; i < n_slots; i += HC_WARPS / 8) {
        stream_acc<TB> acc = {};
        stream_slot<F, TB>(acc, w, slots + i * slot_bytes, row + i / per * row_step + i % per * 8, s, xs,
                           warp & 7, lane);
        stream_store<TB>(red + (i * 8 + (warp & 7)) * (TB * 64), acc, lane);
    }
}

#define HC_SWITCH(F, format, ...)                                                     \
    switch (format) {                                                                 \
    case TF_BF16: { constexpr int F = TF_BF16; __VA_ARGS__; } break;                  \
    case TF_FP8: { constexpr int F = TF_FP8; __VA_ARGS__; } break;                    \
    case TF_BLOCK: { constexpr int F = TF_BLOCK; __VA_ARGS__; } break;                \
    case TF_MX: { constexpr int F = TF_MX; __VA_ARGS__; } break;                      \
    default: { constexpr int F = TF_NV; __VA_ARGS__; } break;                         \
    }

/* ---- down --------------------------------------------------------------------------------------- */

template <int TB>
__global__ void __maxnreg__(TB == 4 ? 120 : 56) hc_stream_down(const __grid_constant__ hc_stream_args a)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float sums[HC_BATCH][HC_WARPS];
    pdl_next();
    if (threadIdx.x >= HC_THREADS) {
        return; /* there for their registers (launch_alone) */
    }
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    const uint32_t s = blockIdx.x % a.n_slices, tile = blockIdx.x / a.n_slices;
    const uint32_t per = a.n_slices / a.C, c = s / per, p = s - c * per;
    const uint32_t m0 = blockIdx.y * a.group, n_tok = a.n_rows - m0 < a.group ? a.n_rows - m0 : a.group;
    const uint32_t row0 = tile * a.tile_rows;
    const uint32_t n = a.rank - row0 < a.tile_rows ? a.rank - row0 : a.tile_rows, n_slots = (n + 7) / 8;
    const bool inject = a.has_inject && row0 + n == a.rank;
    uint8_t *slots = smem;
    float *red = (float *)(slots + a.slots_down * a.slot_down);
    float *norm = red + a.slots_down * 8 * TB * 64;
    float *raw = norm + a.slice;
    uint4 *xs = (uint4 *)(raw + (a.group < HC_BATCH ? a.group : HC_BATCH) * a.slice);
    uint4 *xn = a.orders == 3 ? xs + a.group * a.x_pitch16 : xs;

    hc_fetch(slots, a.slot_down, a.down, row0, n, s, tid);
    if (inject) {
        hc_fetch(slots + n_slots * a.slot_down, a.slot_down, a.inject, 0, a.C, s, tid);
    }
    for (uint32_t i = tid; i < a.slice / 4; i += HC_THREADS) {
        copy16(norm + i * 4, a.norm + c * a.hidden + p * a.slice + i * 4);
    }
    const uint32_t units = (a.slice + 127) / 128 * 16;
    for (uint32_t i = tid; i < n_tok * (units - a.slice / 8); i += HC_THREADS) {
        const uint32_t w = units - a.slice / 8, t = i / w, u = a.slice / 8 + (i - t * w);
        xs[t * a.x_pitch16 + stream_x_unit(u, a.orders == 2)] = make_uint4(0, 0, 0, 0);
        xn[t * a.x_pitch16 + stream_x_unit(u, a.orders != 1)] = make_uint4(0, 0, 0, 0);
    }
    pdl_wait();

    const uint32_t quads = a.hidden / 4, q0 = p * (a.slice / 4), q1 = q0 + a.slice / 4;
    for (uint32_t t0 = 0; t0 < n_tok; t0 += HC_BATCH) {
        const uint32_t nt = n_tok - t0 < HC_BATCH ? n_tok - t0 : HC_BATCH;
        if (t0) {
            __syncthreads();
        }
#pragma unroll 2
        for (uint32_t t = 0; t < nt; ++t) {
            const uint32_t rc = (m0 + t0 + t) * a.C + c;
            const float4 *x = (const float4 *)(a.x + (uint64_t)rc * a.hidden);
            const float4 *y = a.y ? (const float4 *)(a.y + (uint64_t)(m0 + t0 + t) * a.hidden) : nullptr;
            const float inj = a.y && a.inj_in ? __ldcg(a.inj_in + rc) : 1.0f;
            float sum = 0.0f;
#pragma unroll 2
            for (uint32_t i = tid; i < quads; i += HC_THREADS) {
                float4 v = __ldcg(x + i);
                if (y) {
                    const float4 b = __ldcg(y + i);
                    v.x = fmaf(inj, b.x, v.x), v.y = fmaf(inj, b.y, v.y);
                    v.z = fmaf(inj, b.z, v.z), v.w = fmaf(inj, b.w, v.w);
                }
                sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
                if (i >= q0 && i < q1) {
                    *(float4 *)(raw + t * a.slice + (i - q0) * 4) = v;
                }
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                sums[t][warp] = sum;
            }
        }
        copies_wait();
        __syncthreads();
        const uint32_t eights = a.slice / 8;
        for (uint32_t i = tid; i < nt * eights; i += HC_THREADS) {
            const uint32_t t = i / eights, u = i - t * eights;
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < HC_WARPS; ++w) {
                sum += sums[t][w];
            }
            const float r = 1.0f / sqrtf(sum / (float)a.hidden + a.eps);
            const float4 *v = (const float4 *)(raw + t * a.slice + u * 8), *w = (const float4 *)(norm + u * 8);
            float4 b[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                b[h].x = (v[h].x * r) * (1.0f + w[h].x), b[h].y = (v[h].y * r) * (1.0f + w[h].y);
                b[h].z = (v[h].z * r) * (1.0f + w[h].z), b[h].w = (v[h].w * r) * (1.0f + w[h].w);
            }
            if (a.orders & 1) {
                xs[(t0 + t) * a.x_pitch16 + u] = stream_x_pack(b[0], b[1], false);
            }
            if (a.orders & 2) {
                xn[(t0 + t) * a.x_pitch16 + stream_x_unit(u, true)] = stream_x_pack(b[0], b[1], true);
            }
            if (tile == 0 && p == 0 && u == 0) {
                a.rs[(m0 + t0 + t) * a.C + c] = r;
            }
        }
    }
    __syncthreads();

    const stream_w &w = a.down;
    HC_SWITCH(F, w.tf, {
        const uint4 *x = F == TF_NV ? xn : xs;
        const stream_x v = {x - s * w.seg / 64 * (tf<F>::KB / 8), a.x_pitch16, n_tok};
        hc_slots<F, TB>(red, w, slots, a.slot_down, n_slots, row0, 0, n_slots, s, v, warp, lane);
    })
    if (inject) {
        HC_SWITCH(F, a.inject.tf, {
            const uint4 *x = F == TF_NV ? xn : xs;
            const stream_x v = {x - s * a.inject.seg / 64 * (tf<F>::KB / 8), a.x_pitch16, n_tok};
            hc_slots<F, TB>(red + n_slots * 8 * TB * 64, a.inject, slots + n_slots * a.slot_down, a.slot_down, 1,
                            0, 0, 1, s, v, warp, lane);
        })
    }
    __syncthreads();
    const uint32_t all = n_slots + (inject ? 1 : 0);
    for (uint32_t i = tid; i < n_tok * all * 8; i += HC_THREADS) {
        const uint32_t t = i / (all * 8), j = i - t * (all * 8), slot = j / 8, r = j & 7;
        const bool of_inject = slot == n_slots;
        if (of_inject ? r < a.C : j < n) {
            a.part[((uint64_t)(m0 + t) * a.n_slices + s) * a.pr + (of_inject ? a.rank + r : row0 + j)] =
                (of_inject ? a.inject.factor : w.factor) * stream_sum<TB>(red + slot * (8 * TB * 64), t * 8 + r);
        }
    }
}

/* ---- up ----------------------------------------------------------------------------------------- */

template <int TB>
__global__ void __maxnreg__(TB == 4 ? 120 : 56) hc_stream_up(const __grid_constant__ hc_stream_args a)
{
    extern __shared__ __align__(128) uint8_t smem[];
    pdl_next();
    if (threadIdx.x >= HC_THREADS) {
        return; /* there for their registers (launch_alone) */
    }
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    const uint32_t m0 = blockIdx.y * a.group, n_tok = a.n_rows - m0 < a.group ? a.n_rows - m0 : a.group;
    const uint32_t d0 = blockIdx.x * a.nd, nd = a.hidden - d0 < a.nd ? a.hidden - d0 : a.nd;
    const uint32_t per = (nd + 7) / 8; /* slots a stream */
    const stream_w &w = a.up;
    uint8_t *slots = smem;
    float *red = (float *)(slots + a.slots_up * a.slot_up);
    float *n = red + a.slots_up * 8 * TB * 64; /* [row][stream][nd] */
    uint4 *xs = (uint4 *)(n + (a.group * a.C * a.nd + 3) / 4 * 4);

    for (uint32_t c = 0; c < a.C; ++c) {
        hc_fetch(slots + c * per * a.slot_up, a.slot_up, w, c * a.hidden + d0, nd, 0, tid);
    }
    const uint32_t units = (a.rank + 127) / 128 * 16, pad = units - a.rank / 8;
    for (uint32_t i = tid; i < n_tok * pad; i += HC_THREADS) {
        const uint32_t t = i / pad, u = a.rank / 8 + (i - t * pad);
        xs[t * a.lo_pitch16 + stream_x_unit(u, a.nv_up)] = make_uint4(0, 0, 0, 0);
    }
    pdl_wait();

    /* the normalised elements, from the last thread on: the first ones are busy with the sums */
    for (uint32_t i = HC_THREADS - 1 - tid; i < n_tok * a.C * nd; i += HC_THREADS) {
        const uint32_t t = i / (a.C * nd), j = i - t * (a.C * nd), c = j / nd, d = d0 + (j - c * nd);
        const uint32_t rc = (m0 + t) * a.C + c;
        float *xp = a.x + (uint64_t)rc * a.hidden + d;
        const float r = __ldcg(a.rs + rc), g = __ldg(a.norm + c * a.hidden + d);
        float v = __ldcg(xp);
        if (a.y) {
            v = fmaf(a.inj_in ? __ldcg(a.inj_in + rc) : 1.0f, __ldcg(a.y + (uint64_t)(m0 + t) * a.hidden + d), v);
            *xp = v;
        }
        n[i] = (v * r) * (1.0f + g);
    }
    for (uint32_t i = tid; i < n_tok * a.rank; i += HC_THREADS) {
        const uint32_t t = i / a.rank, k = i - t * a.rank;
        const float *p = a.part + (uint64_t)(m0 + t) * a.n_slices * a.pr + k;
        float v = 0.0f;
#pragma unroll 16
        for (uint32_t s = 0; s < a.n_slices; ++s) {
            v += __ldcg(p + s * a.pr);
        }
        const uint32_t e = k & 7, at = a.nv_up ? (e & 3) * 2 + e / 4 : e;
        ((uint16_t *)(xs + t * a.lo_pitch16 + stream_x_unit(k / 8, a.nv_up)))[at] = to_bf16(silu_f(v / (float)a.C));
    }
    if (blockIdx.x == 0 && a.has_inject) {
        for (uint32_t i = tid; i < n_tok * a.C; i += HC_THREADS) {
            const uint32_t t = i / a.C, c = i - t * a.C;
            const float *p = a.part + (uint64_t)(m0 + t) * a.n_slices * a.pr + a.rank + c;
            float v = 0.0f;
#pragma unroll 16
            for (uint32_t s = 0; s < a.n_slices; ++s) {
                v += __ldcg(p + s * a.pr);
            }
            a.inj_out[(m0 + t) * a.C + c] = 2.0f * sigmoid_f(v / (float)a.C);
        }
    }
    copies_wait();
    __syncthreads();

    const stream_x v = {xs, a.lo_pitch16, n_tok};
    HC_SWITCH(F, w.tf,
              hc_slots<F, TB>(red, w, slots, a.slot_up, a.C * per, d0, a.hidden, per, 0, v, warp, lane))
    __syncthreads();
    for (uint32_t i = tid; i < n_tok * a.C * nd; i += HC_THREADS) {
        const uint32_t t = i / (a.C * nd), j = i - t * (a.C * nd), c = j / nd, d = j - c * nd;
        const float u = w.factor * stream_sum<TB>(red + (c * per + d / 8) * (8 * TB * 64), t * 8 + (d & 7));
        n[i] *= sigmoid_f(u);
    }
    __syncthreads();
    for (uint32_t i = tid; i < n_tok * nd; i += HC_THREADS) {
        const uint32_t t = i / nd, d = i - t * nd;
        float s = 0.0f;
        for (uint32_t c = 0; c < a.C; ++c) {
            s += n[(t * a.C + c) * nd + d];
        }
        a.m[(uint64_t)(m0 + t) * a.hidden + d0 + d] = s / (float)a.C;
    }
}

/* ---- host --------------------------------------------------------------------------------------- */

/* A matrix in segments of k columns, all of which a block reads at once. */
static bool make_slice_w(const struct qx_weight &w, uint32_t k, stream_w *s)
{
    *s = stream_whole(w);
    const uint32_t unit = s->tf == TF_NV || s->tf == TF_MX ? 32 : s->tf == TF_BF16 ? 8 : 16;
    if (s->tf == TF_GEN || k % unit || (k < w.cols && k % 64)) {
        return false;
    }
    s->seg = (uint32_t)weight_row_bytes(w.fmt, k);
    s->n_seg = w.cols / k;
    const uint32_t per = stream_per_scale(s->tf);
    s->seg_scale = per ? k / per : 0;
    s->pitch = (s->seg + 63) / 128 * 128 + 64;
    s->pitch_scale = (s->seg_scale + 15) / 16 * 16;
    return true;
}

static uint32_t smem_down(const hc_stream_args &a, uint32_t tb)
{
    const uint32_t batch = a.group < HC_BATCH ? a.group : HC_BATCH;
    return a.slots_down * (a.slot_down + 8 * tb * 64 * 4) + a.slice * 4 * (1 + batch) +
           (a.orders == 3 ? 2 : 1) * a.group * a.x_pitch16 * 16;
}
static uint32_t smem_up(const hc_stream_args &a, uint32_t tb)
{
    return a.slots_up * (a.slot_up + 8 * tb * 64 * 4) + (a.group * a.C * a.nd + 3) / 4 * 16 +
           a.group * a.lo_pitch16 * 16;
}

#define HC_SHARED_MAX (220u << 10)

int hc_streamed(struct qx_queue *q, const struct qx_op_hc *o, bool *done)
{
    hc_stream_args a = {};
    *done = false;
    if (!can_stream(q) || o->hidden % 64 || o->rank % 8) {
        return 0;
    }
    a.n_rows = o->n_rows;
    a.C = o->n_streams;
    a.hidden = o->hidden;
    a.rank = o->rank;
    a.x = o->x;
    a.y = o->y;
    a.inj_in = o->inj_in;
    a.norm = o->norm;
    a.eps = o->eps;
    a.m = o->m;
    a.inj_out = o->inj_out;
    a.has_inject = o->inject.fmt != QX_W_NONE && o->inj_out;
    const uint32_t per = o->hidden % 512 == 0 ? 4 : o->hidden % 256 == 0 ? 2 : 1;
    a.n_slices = per * o->n_streams;
    a.slice = o->hidden / per;
    a.pr = (o->rank + o->n_streams + 7) / 8 * 8;
    a.part = o->scratch;
    a.rs = o->scratch + (uint64_t)o->n_rows * a.n_slices * a.pr;
    if (!make_slice_w(o->down, a.slice, &a.down) || !make_slice_w(o->up, o->rank, &a.up) ||
        (a.has_inject && (!make_slice_w(o->inject, a.slice, &a.inject) || o->n_streams > 8)) ||
        a.n_slices * a.pr + a.C > a.C * o->hidden + o->rank) {
        return 0;
    }
    a.orders = a.down.tf == TF_NV ? 2 : 1;
    a.slot_down = stream_slot_bytes(a.down);
    if (a.has_inject) {
        const uint32_t b = stream_slot_bytes(a.inject);
        a.orders |= a.inject.tf == TF_NV ? 2 : 1;
        a.slot_down = b > a.slot_down ? b : a.slot_down;
    }
    a.nv_up = a.up.tf == TF_NV;
    a.slot_up = stream_slot_bytes(a.up);
    const uint32_t sm = (uint32_t)q->n_sm, tiles = a.n_slices < sm ? sm / a.n_slices : 1;
    a.tile_rows = (o->rank + tiles - 1) / tiles;
    a.slots_down = (a.tile_rows + 7) / 8 + (a.has_inject ? 1 : 0);
    a.nd = (o->hidden + sm - 1) / sm;
    a.slots_up = a.C * ((a.nd + 7) / 8);
    a.x_pitch16 = stream_x_pitch16(a.slice);
    a.lo_pitch16 = stream_x_pitch16(o->rank);
    uint32_t tb = 0;
    for (a.group = o->n_rows < 32 ? o->n_rows : 32;; a.group = a.group > 16 ? 16 : a.group > 8 ? 8 : a.group - 1) {
        tb = a.group <= 8 ? 1 : a.group <= 16 ? 2 : 4;
        if (a.group == 0) {
            return 0;
        }
        if (smem_down(a, tb) <= HC_SHARED_MAX && smem_up(a, tb) <= HC_SHARED_MAX) {
            break;
        }
    }
    *done = true;
    const uint32_t n_groups = (o->n_rows + a.group - 1) / a.group;
    const dim3 g1(a.n_slices * ((o->rank + a.tile_rows - 1) / a.tile_rows), n_groups);
    const dim3 g2((o->hidden + a.nd - 1) / a.nd, n_groups);
    int r = tb == 1   ? launch_alone(q, "hc", hc_stream_down<1>, g1, HC_THREADS, smem_down(a, tb), a)
            : tb == 2 ? launch_alone(q, "hc", hc_stream_down<2>, g1, HC_THREADS, smem_down(a, tb), a)
                      : launch_alone(q, "hc", hc_stream_down<4>, g1, HC_THREADS, smem_down(a, tb), a);
    if (r) {
        return r;
    }
    return tb == 1   ? launch_alone(q, "hc", hc_stream_up<1>, g2, HC_THREADS, smem_up(a, tb), a)
           : tb == 2 ? launch_alone(q, "hc", hc_stream_up<2>, g2, HC_THREADS, smem_up(a, tb), a)
                     : launch_alone(q, "hc", hc_stream_up<4>, g2, HC_THREADS, smem_up(a, tb), a);
}
