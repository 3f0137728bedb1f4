/* ple.cu: row ids of the hashed n-gram table, and the PLE block on the wide state. */
#include "common.cuh"

/* ---- ids ------------------------------------------------------------------------------------ */

struct ids_args {
    struct qx_step step;
    uint32_t ngram, n_heads, per, eos;
    const uint64_t *mult, *size, *offset;
    int32_t *prev;
    uint64_t stride;
    int64_t *row;
};

/* The id j places before row r of the run that begins at `first`. */
__device__ __forceinline__ int32_t id_before(const ids_args &a, uint32_t r, uint32_t first, int32_t slot,
                                             uint32_t j)
{
    if (r - first >= j) {
        return __ldcg(a.step.id + r - j);
    }
    return slot < 0 ? (int32_t)a.eos : a.prev[slot * a.stride + (j - (r - first) - 1)];
}

/* One block, so that barriers can keep reads of a slot before its overwriting. */
__global__ void __launch_bounds__(1024) ple_ids(const __grid_constant__ ids_args a)
{
    pdl_next();
    pdl_wait();
    const uint32_t n = a.step.n_rows;
    for (uint64_t i = threadIdx.x; i < (uint64_t)n * a.n_heads; i += blockDim.x) {
        const uint32_t r = (uint32_t)(i / a.n_heads), h = (uint32_t)(i % a.n_heads);
        int64_t out = -1;
        if (__ldcg(a.step.pos + r) >= 0) {
            const uint32_t first = (uint32_t)__ldcg(a.step.first + r);
            const int32_t slot = __ldcg(a.step.state_in + r);
            const uint32_t order = 2 + h / a.per;
            uint64_t x = (uint64_t)__ldcg(a.step.id + r) * a.mult[0];
            int32_t c = 0;
            for (uint32_t j = 1; j < order; ++j) {
                /* an eos in the window hides everything before it */
                c = j > 1 && c == (int32_t)a.eos ? c : id_before(a, r, first, slot, j);
                x ^= (uint64_t)c * a.mult[j];
            }
            out = (int64_t)(x % a.size[h] + a.offset[h]);
        }
        a.row[i] = out;
    }
    /* a step without history to keep: nothing below reads or writes */
    __syncthreads();
    const uint32_t hist = a.ngram - 1;
    for (uint32_t r = threadIdx.x; r < n; r += blockDim.x) {
        if (__ldcg(a.step.first + r) != (int32_t)r || __ldcg(a.step.pos + r) < 0) {
            continue;
        }
        /* the first rows of a run, whose window reaches into the slot, in order */
        int32_t old[8];
        const int32_t slot = __ldcg(a.step.state_in + r);
        for (uint32_t j = 0; j < hist; ++j) {
            old[j] = slot < 0 ? (int32_t)a.eos : a.prev[slot * a.stride + j];
        }
        for (uint32_t i = r; i < n && i < r + hist && __ldcg(a.step.first + i) == (int32_t)r; ++i) {
            const int32_t to = __ldcg(a.step.state_out + i);
            if (to >= 0 && __ldcg(a.step.pos + i) >= 0) {
                for (uint32_t j = 0; j < hist; ++j) {
                    a.prev[to * a.stride + j] =
                        i - r >= j ? __ldcg(a.step.id + i - j) : old[j - (i - r) - 1];
                }
            }
        }
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < n; r += blockDim.x) {
        const int32_t to = __ldcg(a.step.state_out + r);
        if (to >= 0 && __ldcg(a.step.pos + r) >= 0 && r - (uint32_t)__ldcg(a.step.first + r) >= hist) {
            for (uint32_t j = 0; j < hist; ++j) {
                a.prev[to * a.stride + j] = __ldcg(a.step.id + r - j);
            }
        }
    }
}

extern "C" int qx_cuda_ple_ids(struct qx_queue *q, const struct qx_op_ple_ids *o)
{
    if (o->ngram_size < 2 || o->ngram_size > 8) {
        return qx_queue_refuse(q, "ple_ids", "n-gram size outside 2..8");
    }
    ids_args a = {*o->step, o->ngram_size, o->n_heads, o->heads_per_ngram, o->eos, o->multiplier,
                  o->size,  o->offset,     o->prev,    o->prev_slot_stride, o->row};
    return launch(q, "ple_ids", ple_ids, dim3(o->step->n_rows ? 1 : 0), dim3(o->step->n_rows > 16 ? 1024 : 128),
                  0, a);
}

/* ---- the block ------------------------------------------------------------------------------ */

struct ple_args {
    struct qx_step step;
    uint32_t C, hidden, kernel, dil;
    float *x;
    const float *key, *value, *norm_key, *norm_query, *norm_conv, *conv_w;
    float eps;
    float *conv_state;
    uint64_t stride;
    float *G, *F; /* [n_rows, C * hidden] */
};

/* A stream of a row a block: gate, G and F. All four sums in one pass: norms are factors. */
__global__ void __launch_bounds__(256) ple_gate(const __grid_constant__ ple_args a)
{
    __shared__ float part[4][8];
    pdl_next();
    pdl_wait();
    const uint32_t c = blockIdx.x, r = blockIdx.y, W = a.C * a.hidden;
    const float *k = a.key + (uint64_t)r * W + c * a.hidden, *x = a.x + (uint64_t)r * W + c * a.hidden;
    const float *v = a.value + (uint64_t)r * a.hidden;
    const float *wk = a.norm_key + c * a.hidden, *wq = a.norm_query + c * a.hidden;
    float s[4] = {};
    for (uint32_t i = threadIdx.x; i < a.hidden; i += 256) {
        const float kk = __ldcg(k + i), xx = __ldcg(x + i), vv = __ldcg(v + i);
        s[0] = fmaf(kk, kk, s[0]);
        s[1] = fmaf(xx, xx, s[1]);
        s[2] = fmaf(kk * (1.0f + __ldg(wk + i)), xx * (1.0f + __ldg(wq + i)), s[2]);
        s[3] = fmaf(vv, vv, s[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        s[j] = warp_sum(s[j]);
        if ((threadIdx.x & 31) == 0) {
            part[j][threadIdx.x / 32] = s[j];
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        s[j] = 0.0f;
        for (int i = 0; i < 8; ++i) {
            s[j] += part[j][i];
        }
    }
    const float h = (float)a.hidden;
    const float rk = 1.0f / sqrtf(s[0] / h + a.eps), rq = 1.0f / sqrtf(s[1] / h + a.eps);
    const float d = s[2] * rk * rq / sqrtf(h);
    const float t = d == 0.0f ? 0.0f : copysignf(sqrtf(fmaxf(fabsf(d), 1e-6f)), d);
    const float gate = isnan(d) ? d : sigmoid_f(t);
    const float rg = 1.0f / sqrtf(gate * gate * s[3] / h + a.eps);
    for (uint32_t i = threadIdx.x; i < a.hidden; i += 256) {
        const float g = gate * __ldcg(v + i);
        const uint64_t at = (uint64_t)r * W + c * a.hidden + i;
        a.G[at] = g;
        a.F[at] = (g * rg) * (1.0f + __ldg(a.norm_conv + c * a.hidden + i));
    }
}

/* x += G + silu(conv over F) of a channel of row r, `in` rows after its run's first; old: the run's history. */
__device__ __forceinline__ void ple_conv_at(const ple_args &a, uint32_t r, uint32_t in, uint32_t ch, const float *old)
{
    const uint32_t W = a.C * a.hidden, hist = (a.kernel - 1) * a.dil;
    float y = 0.0f;
    for (uint32_t j = 0; j < a.kernel; ++j) {
        const uint32_t o = a.dil * (a.kernel - 1 - j);
        const float f = o <= in ? __ldcg(a.F + (uint64_t)(r - o) * W + ch)
                                : old ? old[(uint64_t)(hist - o + in) * W] : 0.0f;
        y = fmaf(__ldg(a.conv_w + (uint64_t)ch * a.kernel + j), f, y);
    }
    const uint64_t at = (uint64_t)r * W + ch;
    a.x[at] = __ldcg(a.x + at) + (__ldcg(a.G + at) + silu_f(y));
}
/* The history after the row to slot `to`. */
__device__ __forceinline__ void ple_keep_at(const ple_args &a, uint32_t r, uint32_t in, uint32_t ch, const float *old, int32_t to)
{
    const uint32_t W = a.C * a.hidden, hist = (a.kernel - 1) * a.dil;
    /* ascending: in place an entry is read before it is overwritten */
    float *s = a.conv_state + to * a.stride + ch;
    for (uint32_t i = 0; i < hist; ++i) {
        const uint32_t back = hist - 1 - i;
        s[(uint64_t)i * W] = back <= in ? __ldcg(a.F + (uint64_t)(r - back) * W + ch)
                                        : old ? old[(uint64_t)(i + in + 1) * W] : 0.0f;
    }
}
__device__ __forceinline__ const float *ple_old(const ple_args &a, uint32_t first, uint32_t ch)
{
    const int32_t slot = __ldcg(a.step.state_in + first);
    return slot < 0 ? nullptr : a.conv_state + slot * a.stride + ch;
}

/* A channel of a run a thread, row after row; at most `most` rows of a run. CONV: the rows' values too, else only
 * the slots. */
template <bool CONV> __global__ void __launch_bounds__(256) ple_runs(const __grid_constant__ ple_args a, uint32_t most)
{
    pdl_next();
    pdl_wait();
    const uint32_t W = a.C * a.hidden, ch = blockIdx.x * 256 + threadIdx.x, n = a.step.n_rows;
    if (ch >= W) {
        return;
    }
    for (uint32_t first = blockIdx.y; first < n; first += gridDim.y) {
        if (__ldcg(a.step.first + first) != (int32_t)first || __ldcg(a.step.pos + first) < 0) {
            continue;
        }
        const float *old = ple_old(a, first, ch);
        for (uint32_t r = first; r < n && r - first < most && __ldcg(a.step.first + r) == (int32_t)first; ++r) {
            if (__ldcg(a.step.pos + r) < 0) {
                continue;
            }
            if (CONV) {
                ple_conv_at(a, r, r - first, ch, old);
            }
            const int32_t to = __ldcg(a.step.state_out + r);
            if (to >= 0) {
                ple_keep_at(a, r, r - first, ch, old, to);
            }
        }
    }
}

/* Rows of long runs: the values of all rows at once, which only read the slots; the slots after the first rows of
 * runs, which read old ones (ple_runs); then those after later rows (KEEP). */
template <bool KEEP> __global__ void __launch_bounds__(256) ple_rows(const __grid_constant__ ple_args a)
{
    pdl_next();
    pdl_wait();
    const uint32_t W = a.C * a.hidden, ch = blockIdx.x * 256 + threadIdx.x, n = a.step.n_rows;
    const uint32_t hist = (a.kernel - 1) * a.dil;
    if (ch >= W) {
        return;
    }
    for (uint32_t r = blockIdx.y; r < n; r += gridDim.y) {
        if (__ldcg(a.step.pos + r) < 0) {
            continue;
        }
        const uint32_t first = (uint32_t)__ldcg(a.step.first + r), in = r - first;
        if (!KEEP) {
            ple_conv_at(a, r, in, ch, in < hist ? ple_old(a, first, ch) : nullptr);
        } else if (in >= hist) {
            const int32_t to = __ldcg(a.step.state_out + r);
            if (to >= 0) {
                ple_keep_at(a, r, in, ch, nullptr, to);
            }
        }
    }
}

extern "C" int qx_cuda_ple(struct qx_queue *q, const struct qx_op_ple *o)
{
    const uint32_t n = o->step->n_rows;
    if (n == 0) {
        return 0;
    }
    const uint64_t W = (uint64_t)o->n_streams * o->hidden;
    ple_args a = {*o->step,    o->n_streams,  o->hidden,     o->conv_kernel,
                  o->dilation, o->x,          o->key,        o->value,
                  o->norm_key, o->norm_query, o->norm_conv,  o->conv_w,
                  o->eps,      o->conv_state, o->conv_slot_stride, o->scratch,
                  o->scratch + n * W};
    if (n > 65535) {
        return qx_queue_refuse(q, "ple", "more than 65535 rows");
    }
    int r = launch(q, "ple", ple_gate, dim3(o->n_streams, n), dim3(256), 0, a);
    const unsigned columns = (unsigned)((W + 255) / 256);
    if (n < 64) {
        return r ? r : launch(q, "ple", ple_runs<true>, dim3(columns, n), dim3(256), 0, a, n);
    }
    r = r ? r : launch(q, "ple", ple_rows<false>, dim3(columns, n), dim3(256), 0, a);
    r = r ? r : launch(q, "ple", ple_runs<false>, dim3(columns, n), dim3(256), 0, a, (o->conv_kernel - 1) * o->dilation);
    return r ? r : launch(q, "ple", ple_rows<true>, dim3(columns, n), dim3(256), 0, a);
}
