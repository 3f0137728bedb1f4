/* sample.cu: arg-max, penalties, sampling, and feeding the sampled id back, all on the device.
 *
 * Sampling orders candidates by logit, ties to the lower id. With at most 1024 of them (top-k) they are
 * collected, sorted and summed in that order. Without top-k the cut and the drawn token are found by
 * descending through histograms of probability mass in fixed point, which no order of atomics changes. */
#include "best.cuh"
#include "rand.h"

#define BEST_BLOCKS 64

/* ---- arg-max -------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(256) argmax_rows(struct qx_op_argmax a, unsigned *tickets)
{
    __shared__ best sh[8];
    __shared__ float fs[8];
    pdl_next();
    pdl_wait();
    const uint32_t r = blockIdx.y;
    const float *l = a.logits + (uint64_t)r * a.vocab;
    float *part = a.scratch + (uint64_t)r * 256 * 4 + blockIdx.x * 4;
    float x[SCAN_N];
    best b = scan_best(l, a.vocab, sh, x);
    float s = 0.0f, top = b.id < a.vocab ? __ldcg(l + b.id) : 0.0f;
    if (a.prob) {
        const uint32_t i0 = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256;
#pragma unroll
        for (uint32_t k = 0; k < SCAN_N; ++k) {
            s += i0 + k * step < a.vocab ? expf(x[k] - top) : 0.0f;
        }
        for (uint32_t i = i0 + SCAN_N * step; i < a.vocab; i += step) {
            s += expf(__ldcg(l + i) - top);
        }
        s = block_sum(s, fs);
    }
    if (threadIdx.x == 0) {
        part[0] = __uint_as_float(b.key);
        part[1] = __uint_as_float(b.id);
        part[2] = s;
        part[3] = top;
    }
    if (!last_block(tickets + r)) {
        return;
    }
    part = a.scratch + (uint64_t)r * 256 * 4;
    b.key = 0;
    b.id = 0xffffffffu;
    if (threadIdx.x < gridDim.x) {
        b.key = __float_as_uint(__ldcg(part + threadIdx.x * 4));
        b.id = __float_as_uint(__ldcg(part + threadIdx.x * 4 + 1));
    }
    b = block_best(b, sh);
    const float v = __ldcg(l + b.id);
    s = 0.0f;
    if (a.prob && threadIdx.x < gridDim.x && __float_as_uint(__ldcg(part + threadIdx.x * 4 + 1)) < a.vocab) {
        s = __ldcg(part + threadIdx.x * 4 + 2) * expf(__ldcg(part + threadIdx.x * 4 + 3) - v);
    }
    s = block_sum(s, fs);
    if (threadIdx.x == 0) {
        a.id[r] = (int32_t)b.id;
        a.value[r] = v;
        if (a.prob) {
            a.prob[r] = 1.0f / s;
        }
    }
}

extern "C" int qx_cuda_argmax(struct qx_queue *q, const struct qx_op_argmax *o)
{
    if (o->n_rows > QX_N_TICKETS) {
        return qx_queue_refuse(q, "argmax", "too many rows");
    }
    return launch(q, "argmax", argmax_rows, dim3(o->n_rows == 1 ? 128 : 32, o->n_rows), dim3(256), 0, *o,
                  q->tickets);
}

/* ---- penalties ------------------------------------------------------------------------------ */

__global__ void penalize_rows(struct qx_op_penalize a)
{
    pdl_next();
    pdl_wait();
    const uint32_t r = blockIdx.x;
    const struct qx_penalty p = a.params[r];
    const int32_t *ids = a.id + (uint64_t)r * a.max_ids;
    __shared__ uint32_t end;
    if (threadIdx.x == 0) {
        end = a.max_ids;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.max_ids; i += blockDim.x) {
        if (__ldcg(ids + i) < 0) {
            atomicMin(&end, i);
            break;
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < end; i += blockDim.x) {
        const int32_t id = __ldcg(ids + i);
        if ((uint32_t)id < a.vocab) {
            float *l = a.logits + (uint64_t)r * a.vocab + id;
            double v = (double)__ldcg(l);
            v = v > 0.0 ? v / (double)p.repeat : v * (double)p.repeat;
            v -= (double)p.presence + (double)p.frequency * __ldcg(a.count + (uint64_t)r * a.max_ids + i);
            *l = (float)v;
        }
    }
}

extern "C" int qx_cuda_penalize(struct qx_queue *q, const struct qx_op_penalize *o)
{
    return launch(q, "penalize", penalize_rows, dim3(o->n_rows), dim3(256), 0, *o);
}

/* ---- sampling ------------------------------------------------------------------------------- */

#define SMP_T 512
#define SMP_SORT 1024

struct smp_shared {
    union {
        struct {
            float logit[SMP_SORT];
            uint32_t id[SMP_SORT];
        } c;
        unsigned long long mass[2048];
        uint32_t hist[2048];
    } u;
    uint32_t n, bin, left;
    unsigned long long before;
    int32_t out;
};

/* The key of the k-th largest logit, and how many of its equals belong to the first k. */
__device__ void kth_key(const float *l, uint32_t vocab, uint32_t k, smp_shared *s, uint32_t *key,
                        uint32_t *equals)
{
    const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    uint32_t prefix = 0, have = 0, left = k;
    for (int p = 0; p < 3; ++p) {
        for (uint32_t i = threadIdx.x; i < 2048; i += SMP_T) {
            s->u.hist[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < vocab; i += SMP_T) {
            const uint32_t c = logit_key(__ldcg(l + i));
            if (have == 0 || (c >> (32 - have)) == prefix) {
                atomicAdd(&s->u.hist[(c >> shift[p]) & ((1u << width[p]) - 1)], 1u);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            /* a lane owns 64 bins, from the top */
            const uint32_t b0 = 2047 - threadIdx.x * 64;
            uint32_t sum = 0;
            for (uint32_t i = 0; i < 64; ++i) {
                sum += s->u.hist[b0 - i];
            }
            uint32_t incl = sum;
            for (int i = 1; i < 32; i <<= 1) {
                const uint32_t o = __shfl_up_sync(0xffffffffu, incl, i);
                incl += threadIdx.x >= (uint32_t)i ? o : 0;
            }
            uint32_t above = incl - sum;
            if (above < left && incl >= left) {
                for (uint32_t i = 0; i < 64; ++i) {
                    const uint32_t h = s->u.hist[b0 - i];
                    if (above + h >= left) {
                        s->bin = b0 - i;
                        s->left = left - above;
                        break;
                    }
                    above += h;
                }
            }
        }
        __syncthreads();
        prefix = (prefix << width[p]) | s->bin;
        have += width[p];
        left = s->left;
        __syncthreads();
    }
    *key = prefix;
    *equals = left;
}

/* The count-th (from 1) lowest id whose key is `key`. One warp. */
__device__ uint32_t nth_equal(const float *l, uint32_t vocab, uint32_t key, uint32_t count)
{
    const uint32_t lane = threadIdx.x & 31;
    uint32_t seen = 0;
    for (uint32_t i0 = 0; i0 < vocab; i0 += 32) {
        const bool is = i0 + lane < vocab && logit_key(__ldcg(l + i0 + lane)) == key;
        uint32_t m = __ballot_sync(0xffffffffu, is);
        if (seen + __popc(m) >= count) {
            for (uint32_t j = 1; j < count - seen; ++j) {
                m &= m - 1;
            }
            return i0 + __ffs(m) - 1;
        }
        seen += __popc(m);
    }
    return vocab - 1;
}

/* At most SMP_SORT candidates: collect, sort, cut, draw. */
__device__ void draw_sorted(const float *l, uint32_t vocab, const struct qx_sample_params &p, double u,
                            uint32_t k, smp_shared *s)
{
    uint32_t key, equals;
    kth_key(l, vocab, k, s, &key, &equals);
    /* ids up to the last equal one that is in */
    __shared__ uint32_t last_equal;
    if (threadIdx.x < 32) {
        const uint32_t e = nth_equal(l, vocab, key, equals);
        if (threadIdx.x == 0) {
            last_equal = e;
            s->n = 0;
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < vocab; i += SMP_T) {
        const float v = __ldcg(l + i);
        const uint32_t c = logit_key(v);
        if (c > key || (c == key && i <= last_equal)) {
            const uint32_t at = atomicAdd(&s->n, 1u);
            if (at < SMP_SORT) {
                s->u.c.logit[at] = v;
                s->u.c.id[at] = i;
            }
        }
    }
    __syncthreads();
    const uint32_t n = s->n < SMP_SORT ? s->n : SMP_SORT;
    for (uint32_t i = n + threadIdx.x; i < SMP_SORT; i += SMP_T) {
        s->u.c.logit[i] = -INFINITY;
        s->u.c.id[i] = 0xffffffffu;
    }
    __syncthreads();
    for (uint32_t size = 2; size <= SMP_SORT; size <<= 1) {
        for (uint32_t d = size / 2; d; d >>= 1) {
            for (uint32_t t = threadIdx.x; t < SMP_SORT / 2; t += SMP_T) {
                const uint32_t i = (t / d) * 2 * d + t % d, j = i + d;
                const uint32_t ka = logit_key(s->u.c.logit[i]), kb = logit_key(s->u.c.logit[j]);
                const bool after = ka < kb || (ka == kb && s->u.c.id[i] > s->u.c.id[j]);
                if (after == ((i & size) == 0)) {
                    const float f = s->u.c.logit[i];
                    const uint32_t g = s->u.c.id[i];
                    s->u.c.logit[i] = s->u.c.logit[j];
                    s->u.c.id[i] = s->u.c.id[j];
                    s->u.c.logit[j] = f;
                    s->u.c.id[j] = g;
                }
            }
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) {
        const double top = (double)s->u.c.logit[0], inv = 1.0 / (double)p.temperature;
        double total = 0.0;
        uint32_t m = n;
        for (uint32_t i = 0; i < n; ++i) {
            total += exp(((double)s->u.c.logit[i] - top) * inv);
        }
        if (p.top_p < 1.0f) {
            const double want = (double)p.top_p * total;
            double sum = 0.0;
            uint32_t i = 0;
            do {
                sum += exp(((double)s->u.c.logit[i] - top) * inv);
            } while (++i < m && sum < want);
            m = i;
        }
        if (p.min_p > 0.0f) {
            uint32_t i = 1;
            while (i < m && exp(((double)s->u.c.logit[i] - top) * inv) >= (double)p.min_p) {
                ++i;
            }
            m = i;
        }
        total = 0.0;
        for (uint32_t i = 0; i < m; ++i) {
            total += exp(((double)s->u.c.logit[i] - top) * inv);
        }
        double sum = 0.0;
        uint32_t i = 0;
        for (; i + 1 < m; ++i) {
            sum += exp(((double)s->u.c.logit[i] - top) * inv);
            if (sum > u * total) {
                break;
            }
        }
        s->out = (int32_t)s->u.c.id[i];
    }
}

/* Probability relative to the largest, in units of 2^-44. */
__device__ __forceinline__ unsigned long long mass_of(float l, double top, double inv)
{
    return (unsigned long long)(exp(((double)l - top) * inv) * 0x1p44 + 0.5);
}

/* The candidate (in order) at which the cumulative mass first reaches `want` (strictly exceeds it with
 * `over`): its key and its number among its equals, from 1. Candidates whose key is below `floor_key`
 * do not exist; of those with it only the first floor_n do. *upto: mass up to and with it. */
__device__ void at_mass(const float *l, uint32_t vocab, double top, double inv, unsigned long long want,
                        bool over, uint32_t floor_key, uint32_t floor_n, smp_shared *s, uint32_t *key,
                        uint32_t *nth, unsigned long long *upto)
{
    const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    uint32_t prefix = 0, have = 0;
    unsigned long long before = 0;
    for (int p = 0; p < 3; ++p) {
        for (uint32_t i = threadIdx.x; i < 2048; i += SMP_T) {
            s->u.mass[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < vocab; i += SMP_T) {
            const float v = __ldcg(l + i);
            const uint32_t c = logit_key(v);
            if (c >= floor_key && (have == 0 || (c >> (32 - have)) == prefix)) {
                atomicAdd(&s->u.mass[(c >> shift[p]) & ((1u << width[p]) - 1)], mass_of(v, top, inv));
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t lowest = 2048;
            unsigned long long sum = before;
            s->bin = 2048;
            for (int b = (1 << width[p]) - 1; b >= 0; --b) {
                const unsigned long long m = s->u.mass[b];
                if (m) {
                    lowest = (uint32_t)b;
                    s->before = sum;
                }
                sum += m;
                if (m && (over ? sum > want : sum >= want)) {
                    s->bin = (uint32_t)b;
                    break;
                }
            }
            if (s->bin == 2048) {
                s->bin = lowest < 2048 ? lowest : 0; /* all of it: the last one */
            }
        }
        __syncthreads();
        before = s->before;
        prefix = (prefix << width[p]) | s->bin;
        have += width[p];
        __syncthreads();
    }
    /* equals have equal mass: which of them */
    const uint32_t u = (prefix & 0x80000000u) ? prefix & 0x7fffffffu : ~prefix;
    const unsigned long long one = mass_of(__uint_as_float(u), top, inv);
    unsigned long long n = 1;
    if (one && want > before) {
        const unsigned long long d = want - before;
        n = over ? d / one + 1 : d / one + (d % one != 0);
    }
    if (threadIdx.x == 0) {
        s->n = 0;
    }
    __syncthreads();
    uint32_t c = 0;
    for (uint32_t i = threadIdx.x; i < vocab; i += SMP_T) {
        c += logit_key(__ldcg(l + i)) == prefix;
    }
    if (c) {
        atomicAdd(&s->n, c);
    }
    __syncthreads();
    uint32_t most = s->n;
    most = prefix == floor_key && floor_n < most ? floor_n : most;
    n = n < 1 ? 1 : n > most ? most : n;
    __syncthreads();
    *key = prefix;
    *nth = (uint32_t)n;
    *upto = before + n * one;
}

__device__ void draw_mass(const float *l, uint32_t vocab, const struct qx_sample_params &p, double u,
                          float top_logit, smp_shared *s)
{
    const double top = (double)top_logit, inv = 1.0 / (double)p.temperature;
    uint32_t key = 0, nth = 0xffffffffu;
    unsigned long long total;
    if (p.top_k > 0 && (uint32_t)p.top_k < vocab) {
        kth_key(l, vocab, (uint32_t)p.top_k, s, &key, &nth);
    }
    uint32_t k2, n2;
    at_mass(l, vocab, top, inv, ~0ull, false, key, nth, s, &k2, &n2, &total);
    if (p.top_p < 1.0f) {
        const double want = (double)p.top_p * (double)total;
        at_mass(l, vocab, top, inv, (unsigned long long)ceil(want), false, key, nth, s, &k2, &n2, &total);
        key = k2;
        nth = n2;
    }
    if (p.min_p > 0.0f) {
        /* the lowest key that is still probable enough; the largest always stays */
        __shared__ uint32_t low;
        if (threadIdx.x == 0) {
            low = logit_key(top_logit);
        }
        __syncthreads();
        uint32_t mine = 0xffffffffu;
        for (uint32_t i = threadIdx.x; i < vocab; i += SMP_T) {
            const float v = __ldcg(l + i);
            if (exp(((double)v - top) * inv) >= (double)p.min_p) {
                mine = min(mine, logit_key(v));
            }
        }
        atomicMin(&low, mine);
        __syncthreads();
        if (low > key) {
            key = low;
            nth = 0xffffffffu;
        }
        at_mass(l, vocab, top, inv, ~0ull, false, key, nth, s, &k2, &n2, &total);
    }
    at_mass(l, vocab, top, inv, (unsigned long long)floor(u * (double)total), true, key, nth, s, &k2, &n2,
            &total);
    if (threadIdx.x < 32) {
        const uint32_t id = nth_equal(l, vocab, k2, n2);
        if (threadIdx.x == 0) {
            s->out = (int32_t)id;
        }
    }
}

__device__ __forceinline__ void tell(const struct qx_op_sample &a, uint32_t r, int32_t id)
{
    a.id[r] = id;
    if (a.told) {
        __threadfence_system();
        *(volatile int32_t *)(a.told + r) = id;
    }
}

__global__ void __launch_bounds__(SMP_T) sample_rows(struct qx_op_sample a, unsigned *tickets)
{
    __shared__ smp_shared s;
    __shared__ best sh[SMP_T / 32];
    pdl_next();
    pdl_wait();
    const uint32_t r = blockIdx.y;
    const float *l = a.logits + (uint64_t)r * a.vocab;
    float *part = a.scratch + (uint64_t)r * a.vocab * 2;
    float first[SCAN_N];
    best b = scan_best(l, a.vocab, sh, first);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            part[blockIdx.x * 2] = __uint_as_float(b.key);
            part[blockIdx.x * 2 + 1] = __uint_as_float(b.id);
        }
        if (!last_block(tickets + r)) {
            return;
        }
        b.key = 0;
        b.id = 0xffffffffu;
        if (threadIdx.x < gridDim.x) {
            b.key = __float_as_uint(__ldcg(part + threadIdx.x * 2));
            b.id = __float_as_uint(__ldcg(part + threadIdx.x * 2 + 1));
        }
        b = block_best(b, sh);
    }
    const struct qx_sample_params p = a.params[r];
    const float top = __ldcg(l + b.id);
    if (isnan(top) || top == INFINITY) {
        if (threadIdx.x == 0) {
            tell(a, r, -1);
        }
        return;
    }
    if (!(p.temperature > 0.0f)) {
        if (threadIdx.x == 0) {
            tell(a, r, (int32_t)b.id);
        }
        return;
    }
    const double u = (double)(qx_rand_u64(p.seed, __ldcg(a.pos + r)) >> 40) * 0x1p-24;
    if (p.top_k > 0 && p.top_k <= SMP_SORT && (uint32_t)p.top_k < a.vocab) {
        draw_sorted(l, a.vocab, p, u, (uint32_t)p.top_k, &s);
    } else if (a.vocab <= SMP_SORT) {
        draw_sorted(l, a.vocab, p, u, p.top_k > 0 && (uint32_t)p.top_k < a.vocab ? (uint32_t)p.top_k : a.vocab,
                    &s);
    } else {
        draw_mass(l, a.vocab, p, u, top, &s);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tell(a, r, s.out);
    }
}

extern "C" int qx_cuda_sample(struct qx_queue *q, const struct qx_op_sample *o)
{
    if (o->n_rows > QX_N_TICKETS) {
        return qx_queue_refuse(q, "sample", "too many rows");
    }
    const uint32_t blocks = o->vocab <= 4096 ? 1 : BEST_BLOCKS;
    return launch(q, "sample", sample_rows, dim3(blocks, o->n_rows), dim3(SMP_T), 0, *o, q->tickets);
}

/* ---- feeding back --------------------------------------------------------------------------- */

__global__ void advance_rows(struct qx_step step, const int32_t *id_new, int32_t *spos, int32_t *ring,
                             uint32_t len, uint64_t *count)
{
    pdl_next();
    pdl_wait();
    const uint64_t at = *(volatile uint64_t *)count;
    for (uint32_t r = threadIdx.x; r < step.n_rows; r += blockDim.x) {
        if (__ldcg(step.pos + r) >= 0) {
            const int32_t id = __ldcg(id_new + r);
            ring[(at % len) * step.n_rows + r] = id;
            step.id[r] = id;
            step.pos[r] = __ldcg(step.pos + r) + 1;
            if (spos) {
                spos[r] = __ldcg(spos + r) + 1;
            }
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile uint64_t *)count = at + 1;
    }
}

extern "C" int qx_cuda_advance(struct qx_queue *q, const struct qx_op_advance *o)
{
    return launch(q, "advance", advance_rows, dim3(1), dim3(128), 0, *o->step, o->id_new, o->spos, o->ring,
                  o->ring_len, o->count);
}
