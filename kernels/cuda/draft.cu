/* draft.cu: what the draft head begins with, and drafts that stay on the device: kept for the next round, and
 * chained into the rows that verify them. */
#include "common.cuh"

#define DI_T 1024u
#define DI_N 10u /* values a thread keeps; wider rows are read twice */

/* Norm of a row that `at` gives, by the whole block; w has the first weights of each thread. */
template <class F>
__device__ __forceinline__ void in_norm(const F &at, const float (&w)[DI_N], const float *weight, uint32_t n, float eps,
                                        float *y)
{
    __shared__ float part[DI_T / 32];
    float v[DI_N], s = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < DI_N; ++k) {
        v[k] = threadIdx.x + k * DI_T < n ? at(threadIdx.x + k * DI_T) : 0.0f;
    }
#pragma unroll
    for (uint32_t k = 0; k < DI_N; ++k) {
        s = fmaf(v[k], v[k], s);
    }
    for (uint32_t i = threadIdx.x + DI_N * DI_T; i < n; i += DI_T) {
        s = fmaf(at(i), at(i), s);
    }
    s = warp_sum(s);
    if ((threadIdx.x & 31) == 0) {
        part[threadIdx.x / 32] = s;
    }
    __syncthreads();
    s = warp_sum(part[threadIdx.x & 31]);
    const float r = 1.0f / sqrtf(s / (float)n + eps);
#pragma unroll
    for (uint32_t k = 0; k < DI_N; ++k) {
        if (threadIdx.x + k * DI_T < n) {
            y[threadIdx.x + k * DI_T] = (v[k] * r) * w[k];
        }
    }
    for (uint32_t i = threadIdx.x + DI_N * DI_T; i < n; i += DI_T) {
        y[i] = (at(i) * r) * (1.0f + __ldg(weight + i));
    }
}

/* Blocks (row, 0) have wide states, (row, 1) embeddings. */
__global__ void __launch_bounds__(DI_T) draft_in_rows(const __grid_constant__ struct qx_op_draft_in a,
                                                      const __grid_constant__ struct qx_step step)
{
    const uint32_t r = blockIdx.x, n = blockIdx.y ? a.table.cols : a.width;
    const float *weight = blockIdx.y ? a.norm_e : a.norm_wide;
    float w[DI_N];
#pragma unroll
    for (uint32_t k = 0; k < DI_N; ++k) {
        w[k] = threadIdx.x + k * DI_T < n ? 1.0f + __ldg(weight + threadIdx.x + k * DI_T) : 0.0f;
    }
    pdl_wait(); /* as in embed_rows: what follows reads the step's numbers before its own wait */
    pdl_next();
    if (blockIdx.y) {
        const int32_t id = __ldcg(step.id + r);
        const bool in = id >= 0 && (uint32_t)id < a.table.rows;
        const auto at = [&](uint32_t i) {
            return in ? weight_at(a.table, (uint32_t)id, i) : __uint_as_float(0x7fc00000u);
        };
        in_norm(at, w, weight, n, a.eps, a.e + (uint64_t)r * n);
        return;
    }
    const float *x = nullptr;
#pragma unroll
    for (int i = 1; i >= 0; --i) {
        const int32_t row = !a.wide[i] ? -1 : a.row[i] ? __ldcg(a.row[i] + r) : (int32_t)r;
        x = row >= 0 ? a.wide[i] + (uint64_t)row * n : x;
    }
    const auto at = [&](uint32_t i) { return x ? __ldcg(x + i) : 0.0f; };
    in_norm(at, w, weight, n, a.eps, a.y + (uint64_t)r * n);
}

extern "C" int qx_cuda_draft_in(struct qx_queue *q, const struct qx_op_draft_in *o)
{
    return launch(q, "draft_in", draft_in_rows, dim3(o->step->n_rows, 2), dim3(DI_T), 0, *o, *o->step);
}

__global__ void draft_keep_rows(struct qx_step step, struct qx_op_draft_keep a)
{
    pdl_next();
    pdl_wait();
    const uint32_t d = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y;
    const uint32_t row = (uint32_t)__ldcg(a.row + j), s = (uint32_t)__ldcg(step.seq + row);
    if (d < a.width) {
        a.hold[(uint64_t)s * a.width + d] = __ldcg(a.wide + (uint64_t)row * a.width + d);
    }
    if (d == 0) {
        const int32_t id = __ldcg(a.id + j);
        a.next_id[s] = a.map ? __ldg(a.map + id) : id;
        a.next_prob[s] = __ldcg(a.prob + j);
    }
}

extern "C" int qx_cuda_draft_keep(struct qx_queue *q, const struct qx_op_draft_keep *o)
{
    return launch(q, "draft_keep", draft_keep_rows, dim3((o->width + 255) / 256, o->n), dim3(256), 0,
                  *o->step, *o);
}

__global__ void draft_next_lines(struct qx_step c, struct qx_step s, struct qx_op_draft_next a)
{
    pdl_next();
    pdl_wait();
    const int32_t nth = (int32_t)a.nth;
    for (uint32_t i = threadIdx.x; i < a.n; i += blockDim.x) {
        const int32_t pos = __ldcg(c.pos + i);
        if (pos < 0) {
            continue;
        }
        const int32_t at = a.by_seq ? __ldcg(c.seq + i) : (int32_t)i;
        const int32_t base = __ldcg(a.base + i), count = __ldcg(a.count + i);
        if (nth <= count && !(__ldcg(a.prob + at) < __ldcg(a.min_prob + i))) {
            int32_t id = __ldcg(a.id + at);
            id = a.map ? __ldg(a.map + id) : id;
            s.id[base + nth] = id;
            if (a.told_id) {
                a.told_id[base + nth] = id;
            }
            c.id[i] = id;
            c.pos[i] = nth == count ? -1 : pos + (nth > 1);
            continue;
        }
        c.pos[i] = -1;
        for (int32_t r = base + nth; r <= base + count; ++r) {
            s.pos[r] = -1;
            if (a.told_pos) {
                a.told_pos[r] = -1;
            }
            s.state_out[r] = -1;
            s.first[r] = r;
        }
    }
}

extern "C" int qx_cuda_draft_next(struct qx_queue *q, const struct qx_op_draft_next *o)
{
    return launch(q, "draft_next", draft_next_lines, dim3(1), dim3(o->n < 128 ? 32 : 128), 0, *o->chain,
                  *o->step, *o);
}

/* One warp, a lane a row. */
__global__ void draft_accept_rows(struct qx_step s, struct qx_step f, struct qx_op_draft_accept o)
{
    pdl_next();
    pdl_wait();
    const uint32_t t = threadIdx.x, n = o.n;
    const bool draft = t + 1 < n;
    const int32_t next = draft ? __ldcg(s.id + t + 1) : 0, chosen = t < n ? __ldcg(o.id + t) : 0;
    const int32_t pos0 = __ldcg(s.pos), seq = __ldcg(s.seq);
    const bool stands = draft && __ldcg(s.pos + t + 1) >= 0 && (next == chosen || (int32_t)t < __ldcg(o.forced));
    const uint32_t a = __ffs((int)~__ballot_sync(0xffffffffu, stands)) - 1; /* lane n - 1 never stands */
    const bool kept = t + 1 + a >= n;
    const uint32_t from = kept ? t + 1 + a - n : 0;
    const int32_t last = __shfl_sync(0xffffffffu, chosen, a), behind = __shfl_sync(0xffffffffu, next, from & 31);
    if (t >= n) {
        return;
    }
    f.id[t] = !kept ? 0 : from < a ? behind : last;
    f.pos[t] = kept ? pos0 + (int32_t)from : -1;
    f.seq[t] = seq;
    f.first[t] = kept ? (int32_t)(n - 1 - a) : (int32_t)t;
    f.state_in[t] = -1;
    f.state_out[t] = -1;
    o.src[t] = kept ? (int32_t)from : -1;
    if (t == 0) {
        o.pick[0] = 0;
    }
}

extern "C" int qx_cuda_draft_accept(struct qx_queue *q, const struct qx_op_draft_accept *o)
{
    if (o->n > 32) {
        return qx_queue_refuse(q, "draft_accept", "too many rows");
    }
    return launch(q, "draft_accept", draft_accept_rows, dim3(1), dim3(32), 0, *o->step, *o->feed, *o);
}
