/* qsa.cu: sparse attention: norms, rope and caches; block scores and selection; attention over the
 * selected blocks in chunks of 32 positions whose partial results are merged in order, so that a row's
 * bits depend on neither batch nor launch. */
#include "qsa.cuh"

/* ---- prepare -------------------------------------------------------------------------------- */

struct prep_args {
    struct qx_step step;
    uint32_t n_heads, n_kv, dim, i_heads, i_dim, ratio;
    const float *in;
    uint64_t stride;
    const float *qn, *kn, *iqn, *ikn;
    float eps;
    struct qx_rope rope;
    struct qx_kv kv;
    float *q, *iq;
};

/* Cosine and sine of pair i at position p, scaled. */
__device__ __forceinline__ float2 rope_pair(const struct qx_rope &rope, uint32_t i, int32_t p)
{
    float2 x;
    sincosf((float)p * __ldg(rope.freq + i), &x.y, &x.x);
    return make_float2(x.x * rope.scale, x.y * rope.scale);
}

/* Norm over n <= 32 N values, lane l holding values l + 32 k, then rope with half as the distance of a pair; w
 * has 1 + weight, rot the pair `lane`'s angle. b: shared memory of the warp, used only where a pair's values lie in
 * different lanes. */
template <int N>
__device__ __forceinline__ void norm_rope(float (&v)[N], const float (&w)[N], uint32_t n, float eps,
                                          const struct qx_rope &rope, int32_t p, float2 rot, float *b, uint32_t lane)
{
    float s = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        s = fmaf(v[k], v[k], s);
    }
    const float r = 1.0f / sqrtf(warp_sum(s) / (float)n + eps);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        v[k] = (v[k] * r) * w[k];
    }
    const uint32_t half = rope.rotary_dim / 2;
    if (half == 32) {
        const float x = v[0], y = v[1];
        v[0] = x * rot.x - y * rot.y;
        v[1] = y * rot.x + x * rot.y;
        return;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        b[lane + 32 * k] = v[k];
    }
    __syncwarp();
    for (uint32_t i = lane; i < half; i += 32) {
        const float2 c = i == lane ? rot : rope_pair(rope, i, p);
        const float x = b[i], y = b[i + half];
        b[i] = x * c.x - y * c.y;
        b[i + half] = y * c.x + x * c.y;
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < N; ++k) {
        v[k] = b[lane + 32 * k];
    }
}

template <int N> __device__ __forceinline__ void load_lanes(float (&v)[N], const float *p, uint32_t n, uint32_t lane)
{
#pragma unroll
    for (int k = 0; k < N; ++k) {
        v[k] = lane + 32 * k < n ? __ldcg(p + lane + 32 * k) : 0.0f;
    }
}

/* A head a warp: queries, keys, values, index queries, the index key. What does not come from this step's
 * projections is read and computed before the wait. */
__global__ void __launch_bounds__(128) qsa_prepare(const __grid_constant__ prep_args a)
{
    constexpr int N = QSA_MAX_DIM / 32;
    constexpr uint32_t OLD = 3; /* a block's keys but its last */
    __shared__ float buf[4][QSA_MAX_DIM];
    pdl_next();
    const uint32_t r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const uint32_t task = blockIdx.y * 4 + warp, k0 = a.n_heads, v0 = k0 + a.n_kv, i0 = v0 + a.n_kv, x0 = i0 + a.i_heads;
    const int32_t pos = __ldcg(a.step.pos + r), seq = __ldcg(a.step.seq + r);
    if (pos < 0 || task > x0) {
        pdl_wait();
        return;
    }
    const bool index = task >= i0;
    const uint32_t n = index ? a.i_dim : a.dim, half = a.rope.rotary_dim / 2;
    const float *norm = task < k0 ? a.qn : task < v0 ? a.kn : task < x0 ? a.iqn : a.ikn;
    const uint32_t n_norm = task < v0 || index ? n : 0; /* values have none */
    float w[N], v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        w[k] = lane + 32 * k < n_norm ? 1.0f + __ldg(norm + lane + 32 * k) : 0.0f;
    }
    /* the index key is turned for its block's first position */
    const bool ends = ((uint32_t)pos + 1) % a.ratio == 0;
    const int32_t at_pos = task == x0 ? pos + 1 - (int32_t)a.ratio : pos;
    const float2 rot = lane < half && (task != x0 || ends) ? rope_pair(a.rope, lane, at_pos) : make_float2(1.0f, 0.0f);
    const uint64_t place = task >= k0 && (task < i0 || task == x0) ? kv_slot(a.kv, seq, (uint32_t)pos) : 0;
    const uint32_t first = (uint32_t)__ldcg(a.step.first + r);
    const uint64_t start = place + 1 - a.ratio; /* a block lies in one page */
    /* raw keys of the block before this row's, all in flight together: of earlier steps here (embed_rows says why
     * they may be read), of this step behind the wait */
    float old[OLD][N];
    const bool kept = task == x0 && ends && a.ratio <= OLD + 1;
    const uint32_t n_old = !kept ? 0 : r - first < a.ratio ? a.ratio - 1 - (r - first) : 0;
#pragma unroll
    for (uint32_t j = 0; j < OLD; ++j) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const uint32_t i = lane + 32 * k;
            old[j][k] = j < n_old && i < n ? kv_get(a.kv, a.kv.raw, (start + j) * a.i_dim + i) : 0.0f;
        }
    }
    pdl_wait();
    const uint32_t kv_at = a.n_heads * 2 * a.dim + (task - k0) * a.dim;
    const uint32_t index_at = (2 * a.n_heads + 2 * a.n_kv) * a.dim + (task - i0) * a.i_dim;
    const float *in = a.in + (uint64_t)r * a.stride + (task < k0 ? task * 2 * a.dim : index ? index_at : kv_at);
    load_lanes(v, in, n, lane);
    if (kept) {
#pragma unroll
        for (uint32_t j = 0; j < OLD; ++j) {
            if (j >= n_old && j + 1 < a.ratio) {
                load_lanes(old[j], in - (uint64_t)(a.ratio - 1 - j) * a.stride, n, lane);
            }
        }
    }
    if (task == x0) {
        float sum[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (lane + 32 * k < n) {
                kv_put(a.kv, a.kv.raw, place * a.i_dim + lane + 32 * k, v[k]);
            }
            sum[k] = 0.0f;
        }
        if (!ends) {
            return;
        }
        /* the block is complete: raw keys of this step's rows from their projections, rounded as the cache
         * rounds them, older ones from the cache */
        if (kept) {
#pragma unroll
            for (uint32_t j = 0; j <= OLD; ++j) {
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const float x = j + 1 < a.ratio && j < OLD ? old[j][k] : v[k]; /* the last is this row's own */
                    sum[k] += j >= a.ratio ? 0.0f : a.kv.bf16 ? bf16_f(to_bf16(x)) : x;
                }
            }
        }
        for (uint32_t j = 0; j < a.ratio && !kept; ++j) {
            const uint32_t back = a.ratio - 1 - j;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const uint32_t i = lane + 32 * k;
                float x = 0.0f;
                if (i < n) {
                    x = r - first >= back ? __ldcg(in - (uint64_t)back * a.stride + i)
                                          : kv_get(a.kv, a.kv.raw, (start + j) * a.i_dim + i);
                }
                sum[k] += a.kv.bf16 ? bf16_f(to_bf16(x)) : x;
            }
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            v[k] = sum[k] / (float)a.ratio;
        }
        norm_rope(v, w, n, a.eps, a.rope, at_pos, rot, buf[warp], lane);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (lane + 32 * k < n) {
                kv_put(a.kv, a.kv.pooled, start / a.ratio * a.i_dim + lane + 32 * k, v[k]);
            }
        }
        return;
    }
    if (task < v0 || index) {
        norm_rope(v, w, n, a.eps, a.rope, pos, rot, buf[warp], lane);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const uint32_t i = lane + 32 * k;
        if (i >= n) {
            continue;
        }
        if (task < k0) {
            a.q[((uint64_t)r * a.n_heads + task) * a.dim + i] = v[k];
        } else if (index) {
            a.iq[((uint64_t)r * a.i_heads + (task - i0)) * a.i_dim + i] = v[k];
        } else if (task < v0) {
            kv_put(a.kv, a.kv.k, (place * a.n_kv + (task - k0)) * a.dim + i, v[k]);
        } else {
            kv_put(a.kv, a.kv.v, (place * a.n_kv + (task - v0)) * a.dim + i, v[k]);
        }
    }
}

/* The same for the released sizes (heads of 256, index heads of 128, pairs 32 apart, four keys a block, bf16 caches) in
 * little code: it comes from device memory, where weights are queued. */
enum { PR_D = 256, PR_ID = 128, PR_RATIO = 4 };

/* Not by ld.global.nc, which the assembler puts behind pdl_wait. */
template <class T> __device__ __forceinline__ T prep_load(const T *p)
{
    static_assert(sizeof(T) == 4, "");
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return *(const T *)&v;
}

__device__ __forceinline__ float prep_round(float x)
{
    return bf16_lo(pack_bf16(x, 0.0f));
}
__device__ __forceinline__ void prep_put(uint16_t *p, float x)
{
    *p = (uint16_t)pack_bf16(x, 0.0f);
}

__global__ void __launch_bounds__(128) qsa_prepare_sized(const __grid_constant__ prep_args a)
{
    pdl_next();
    const uint32_t r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const uint32_t k0 = a.n_heads, v0 = k0 + a.n_kv, i0 = v0 + a.n_kv, x0 = i0 + a.i_heads;
    const uint32_t task = blockIdx.y * 4 + warp;
    const int32_t pos = prep_load(a.step.pos + r), seq = prep_load(a.step.seq + r), first = prep_load(a.step.first + r);
    const bool index = task >= i0, key = task == x0, plain = task >= v0 && !index; /* values have no norm */
    const bool cached = task >= k0 && (!index || key);
    const float freq = prep_load(a.rope.freq + lane);
    const float *norm = task < k0 ? a.qn : task < v0 ? a.kn : task < x0 ? a.iqn : a.ikn;
    const uint32_t in_at = task < k0 ? task * 2 * PR_D
                           : index   ? (2 * a.n_heads + 2 * a.n_kv) * PR_D + (task - i0) * PR_ID
                                     : a.n_heads * 2 * PR_D + (task - k0) * PR_D;
    const float *in = a.in + (uint64_t)r * a.stride + in_at + lane;
    float w[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        w[k] = plain || (k >= 4 && index) ? 0.0f : prep_load(norm + lane + 32 * k);
    }
    if (pos < 0 || task > x0) {
        pdl_wait();
        return;
    }
    int32_t page = 0;
    if (cached) {
        page = prep_load(a.kv.page_table + (uint64_t)seq * a.kv.max_pages + (uint32_t)pos / a.kv.page_tokens);
    }
    /* Of a block that ends here the raw keys before this row's: of earlier steps here (embed_rows says why they may be
     * read), of this step behind the wait. A block lies in one page. */
    const bool ends = ((uint32_t)pos + 1) % PR_RATIO == 0;
    const uint32_t n_old = r - (uint32_t)first < PR_RATIO - 1 ? PR_RATIO - 1 - (r - (uint32_t)first) : 0;
    const uint64_t place = (uint64_t)page * a.kv.page_tokens + (uint32_t)pos % a.kv.page_tokens;
    uint16_t *raw = (uint16_t *)a.kv.raw + place * PR_ID + lane;
    uint16_t old[3][4] = {};
    if (key && ends) {
#pragma unroll
        for (int j = 0; j < 3; ++j) {
            if (j < (int)n_old) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    old[j][k] = __ldcg(raw + (j - (PR_RATIO - 1)) * PR_ID + 32 * k);
                }
            }
        }
    }
    float2 rot;
    /* the index key is turned for its block's first position */
    sincosf((float)(key ? pos + 1 - PR_RATIO : pos) * freq, &rot.y, &rot.x);
    rot.x *= a.rope.scale;
    rot.y *= a.rope.scale;
    pdl_wait();
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        v[k] = k >= 4 && index ? 0.0f : __ldcg(in + 32 * k);
    }
    if (key) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            prep_put(raw + 32 * k, v[k]);
        }
        if (!ends) {
            return;
        }
        float sum[4] = {};
#pragma unroll
        for (int j = 0; j < 3; ++j) { /* of this step's rows from their projections, rounded as the cache rounds them */
            if (j >= (int)n_old) {
                const float *p = in - (uint64_t)(PR_RATIO - 1 - j) * a.stride;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    sum[k] += prep_round(__ldcg(p + 32 * k));
                }
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    sum[k] += bf16_f(old[j][k]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            v[k] = (sum[k] + prep_round(v[k])) * (1.0f / PR_RATIO);
        }
    }
    if (!plain) {
        float s = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            s = fmaf(v[k], v[k], s);
        }
        const float f = rsqrtf(warp_sum(s) * (index ? 1.0f / PR_ID : 1.0f / PR_D) + a.eps);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            v[k] = v[k] * f * (1.0f + w[k]);
        }
        const float x = v[0], y = v[1];
        v[0] = x * rot.x - y * rot.y;
        v[1] = y * rot.x + x * rot.y;
    }
    if (cached) {
        uint16_t *to = (uint16_t *)(task < v0 ? a.kv.k : task < i0 ? a.kv.v : a.kv.pooled) + lane +
                       (key         ? place / PR_RATIO * PR_ID
                        : task < v0 ? (place * a.n_kv + (task - k0)) * PR_D
                                    : (place * a.n_kv + (task - v0)) * PR_D);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (k < 4 || !index) {
                prep_put(to + 32 * k, v[k]);
            }
        }
    } else {
        float *to = lane + (index ? a.iq + ((uint64_t)r * a.i_heads + (task - i0)) * PR_ID
                                  : a.q + ((uint64_t)r * a.n_heads + task) * PR_D);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (k < 4 || !index) {
                to[32 * k] = v[k];
            }
        }
    }
}

extern "C" int qx_cuda_qsa_prepare(struct qx_queue *q, const struct qx_op_qsa_prepare *o)
{
    if (o->head_dim > QSA_MAX_DIM || o->i_dim > QSA_MAX_DIM || o->rope.rotary_dim > o->i_dim) {
        return qx_queue_refuse(q, "qsa_prepare", "head dimensions above 256");
    }
    prep_args a = {*o->step, o->n_heads, o->n_kv_heads, o->head_dim, o->i_heads, o->i_dim, o->ratio,
                   o->in,    o->in_stride, o->q_norm,   o->k_norm,   o->iq_norm, o->ik_norm, o->eps,
                   o->rope,  o->kv,      o->q,          o->iq};
    const uint32_t tasks = o->n_heads + 2 * o->n_kv_heads + o->i_heads + 1;
    if (o->head_dim == PR_D && o->i_dim == PR_ID && o->rope.rotary_dim == 64 && o->ratio == PR_RATIO && o->kv.bf16) {
        return launch(q, "qsa_prepare", qsa_prepare_sized, dim3(o->step->n_rows, (tasks + 3) / 4), dim3(128), 0, a);
    }
    return launch(q, "qsa_prepare", qsa_prepare, dim3(o->step->n_rows, (tasks + 3) / 4), dim3(128), 0, a);
}

/* ---- selection ------------------------------------------------------------------------------ */

template <int HEADS> __global__ void __launch_bounds__(SEL_T) qsa_select(const __grid_constant__ sel_args a)
{
    __shared__ float iq[HEADS * QSA_MAX_DIM];
    __shared__ bool last;
    pdl_next();
    pdl_wait();
    const uint32_t r = blockIdx.y, tid = threadIdx.x, lane = tid & 31;
    const int32_t pos = __ldcg(a.step.pos + r);
    if (pos < 0) {
        if (blockIdx.x == 0 && tid == 0) {
            a.n_block[r] = 0;
        }
        return;
    }
    const uint32_t nb = ((uint32_t)pos + 1) / a.ratio;
    int32_t *out = a.block + (uint64_t)r * a.budget;
    if (nb <= a.budget) {
        if (blockIdx.x == 0) {
            for (uint32_t i = tid; i < nb; i += SEL_T) {
                out[i] = (int32_t)i;
            }
            if (tid == 0) {
                a.n_block[r] = (int32_t)nb;
            }
        }
        return;
    }
    for (uint32_t i = tid; i < HEADS * a.i_dim; i += SEL_T) {
        iq[i] = __ldcg(a.iq + (uint64_t)r * HEADS * a.i_dim + i);
    }
    __syncthreads();
    const int32_t seq = __ldcg(a.step.seq + r);
    /* eight lanes a block of positions; lane l has dims 4 l .. 4 l + 3 of each 32 */
    const uint32_t l = lane & 7, per_page = a.kv.page_tokens / a.ratio;
    float *score = a.scores + (uint64_t)r * a.max_blocks;
    const uint32_t step = gridDim.x * (SEL_T / 8);
    const uint32_t rounds = (nb + step - 1) / step;
    for (uint32_t i = 0; i < rounds; ++i) {
        const uint32_t b = i * step + blockIdx.x * (SEL_T / 8) + tid / 8;
        float s[HEADS] = {};
        if (b < nb) {
            const int32_t page =
                __ldcg(a.kv.page_table + (uint64_t)seq * a.kv.max_pages + b / per_page);
            const uint64_t at = ((uint64_t)page * per_page + b % per_page) * a.i_dim;
            for (uint32_t d = l * 4; d < a.i_dim; d += 32) {
                float4 k;
                if (a.kv.bf16) {
                    const uint2 p = __ldcg((const uint2 *)((const uint16_t *)a.kv.pooled + at + d));
                    k = make_float4(bf16_lo(p.x), bf16_hi(p.x), bf16_lo(p.y), bf16_hi(p.y));
                } else {
                    k = __ldcg((const float4 *)((const float *)a.kv.pooled + at + d));
                }
#pragma unroll
                for (int h = 0; h < HEADS; ++h) {
                    const float4 v = *(const float4 *)&iq[h * a.i_dim + d];
                    s[h] = fmaf(v.x, k.x, s[h]);
                    s[h] = fmaf(v.y, k.y, s[h]);
                    s[h] = fmaf(v.z, k.z, s[h]);
                    s[h] = fmaf(v.w, k.w, s[h]);
                }
            }
        }
        const float sum = index_score(s);
        if (l == 0 && b < nb) {
            score[b] = sum;
        }
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        last = atomicAdd(a.tickets + r, 1u) == gridDim.x - 1;
        if (last) {
            a.tickets[r] = 0;
            a.n_block[r] = (int32_t)a.budget;
        }
    }
    __syncthreads();
    if (last) {
        __threadfence();
        select_blocks(score, nb, a.budget, out);
    }
}

extern "C" int qx_cuda_qsa_select(struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    const uint32_t n = o->step->n_rows;
    if (select_prompt_fits(q, o)) {
        return select_prompt(q, o);
    }
    if (select_few_fits(q, o)) {
        return select_few(q, o);
    }
    if (n > QX_N_TICKETS || o->i_dim % 32 || o->i_dim > QSA_MAX_DIM) {
        return qx_queue_refuse(q, "qsa_select", "index dimension no multiple of 32, or too many rows");
    }
    sel_args a = {*o->step, o->i_heads, o->i_dim, o->ratio,   o->budget_blocks, o->max_blocks, o->iq, o->kv,
                  o->scores, o->block,  o->n_block, q->tickets};
    uint32_t blocks = (o->max_blocks + SEL_T / 8 - 1) / (SEL_T / 8);
    const uint32_t most = n == 1 ? (uint32_t)q->n_sm : n <= 8 ? 32 : 4;
    blocks = o->max_blocks <= o->budget_blocks ? 1 : blocks < most ? blocks : most;
    const dim3 grid(blocks ? blocks : 1, n);
    switch (o->i_heads) {
    case 1: return launch(q, "qsa_select", qsa_select<1>, grid, dim3(SEL_T), 0, a);
    case 2: return launch(q, "qsa_select", qsa_select<2>, grid, dim3(SEL_T), 0, a);
    case 4: return launch(q, "qsa_select", qsa_select<4>, grid, dim3(SEL_T), 0, a);
    case 8: return launch(q, "qsa_select", qsa_select<8>, grid, dim3(SEL_T), 0, a);
    default: return qx_queue_refuse(q, "qsa_select", "index heads other than 1, 2, 4, 8");
    }
}

/* ---- attention ------------------------------------------------------------------------------ */

template <int G> __global__ void __launch_bounds__(256) qsa_attend(const __grid_constant__ att_args a)
{
    __shared__ __align__(16) float q[G][ATT_D];
    __shared__ __align__(16) float sc[ATT_P][(G + 3) / 4 * 4];
    __shared__ uint64_t at[ATT_P];
    pdl_next();
    pdl_wait();
    const uint32_t chunk = blockIdx.x, kvh = blockIdx.y, r = a.row0 + blockIdx.z;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    const int32_t pos = __ldcg(a.step.pos + r);
    if (pos < 0) {
        return;
    }
    const uint32_t n = att_count(a, r, pos);
    if (chunk * ATT_P >= n) {
        return;
    }
    const uint32_t cnt = n - chunk * ATT_P < ATT_P ? n - chunk * ATT_P : ATT_P;
    for (uint32_t i = tid; i < G * ATT_D / 4; i += 256) {
        const uint32_t h = i / (ATT_D / 4);
        ((float4 *)q)[i] = __ldcg((const float4 *)(a.q + ((uint64_t)r * a.n_heads + kvh * G + h) * ATT_D) +
                                  (i - h * (ATT_D / 4)));
    }
    if (tid < ATT_P) {
        const uint32_t i = chunk * ATT_P + tid, nb = (uint32_t)__ldcg(a.n_block + r);
        uint32_t p = 0;
        if (tid < cnt) {
            p = i < nb * a.ratio
                    ? (uint32_t)__ldcg(a.block + (uint64_t)r * a.budget + i / a.ratio) * a.ratio + i % a.ratio
                    : ((uint32_t)pos + 1) / a.ratio * a.ratio + (i - nb * a.ratio);
        }
        at[tid] = tid < cnt ? (kv_slot(a.kv, __ldcg(a.step.seq + r), p) * a.n_kv + kvh) * ATT_D : 0;
    }
    __syncthreads();
    /* scores: a warp takes positions warp, warp + 8, ..; a lane eight dims */
    float k[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t p = warp + 8 * i;
        if (p < cnt) {
            if (a.kv.bf16) {
                const uint4 v = __ldcg((const uint4 *)((const uint16_t *)a.kv.k + at[p]) + lane);
                k[i][0] = bf16_lo(v.x), k[i][1] = bf16_hi(v.x), k[i][2] = bf16_lo(v.y);
                k[i][3] = bf16_hi(v.y), k[i][4] = bf16_lo(v.z), k[i][5] = bf16_hi(v.z);
                k[i][6] = bf16_lo(v.w), k[i][7] = bf16_hi(v.w);
            } else {
                const float4 *s = (const float4 *)((const float *)a.kv.k + at[p]) + 2 * lane;
                const float4 u = __ldcg(s), v = __ldcg(s + 1);
                k[i][0] = u.x, k[i][1] = u.y, k[i][2] = u.z, k[i][3] = u.w;
                k[i][4] = v.x, k[i][5] = v.y, k[i][6] = v.z, k[i][7] = v.w;
            }
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                k[i][e] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < G; ++h) {
        const float4 u = *(const float4 *)&q[h][lane * 8], v = *(const float4 *)&q[h][lane * 8 + 4];
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[i] = fmaf(u.x, k[i][0], fmaf(u.y, k[i][1], fmaf(u.z, k[i][2], u.w * k[i][3])));
            s[i] = fmaf(v.x, k[i][4], fmaf(v.y, k[i][5], fmaf(v.z, k[i][6], fmaf(v.w, k[i][7], s[i]))));
        }
        /* four sums over the warp: halve the number of values twice, then finish one a lane */
        const bool b4 = lane & 16, b3 = lane & 8;
        float x0 = b4 ? s[2] : s[0], x1 = b4 ? s[3] : s[1];
        x0 += __shfl_xor_sync(0xffffffffu, b4 ? s[0] : s[2], 16);
        x1 += __shfl_xor_sync(0xffffffffu, b4 ? s[1] : s[3], 16);
        float x = b3 ? x1 : x0;
        x += __shfl_xor_sync(0xffffffffu, b3 ? x0 : x1, 8);
        x += __shfl_xor_sync(0xffffffffu, x, 4);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        if ((lane & 7) == 0) {
            const uint32_t p = warp + 8 * ((b4 ? 2 : 0) + (b3 ? 1 : 0));
            sc[p][h] = p < cnt ? x * 0.0625f : -INFINITY;
        }
    }
    __syncthreads();
    float *part = a.part + (((uint64_t)blockIdx.z * a.n_kv + kvh) * a.chunks + chunk) * G * (ATT_D + 2);
    for (uint32_t h = warp; h < G; h += 8) {
        const float s = sc[lane][h];
        const float m = warp_max(s);
        const bool nan = __any_sync(0xffffffffu, isnan(s));
        const float e = nan ? __uint_as_float(0x7fc00000u) : expf(s - m);
        const float l = warp_sum(e);
        sc[lane][h] = lane < cnt ? e : 0.0f;
        if (lane == 0) {
            part[h * (ATT_D + 2) + ATT_D] = m;
            part[h * (ATT_D + 2) + ATT_D + 1] = l;
        }
    }
    __syncthreads();
    float o[G] = {};
#pragma unroll 8
    for (uint32_t p = 0; p < cnt; ++p) {
        const float v = a.kv.bf16 ? bf16_f(__ldcg((const uint16_t *)a.kv.v + at[p] + tid))
                                  : __ldcg((const float *)a.kv.v + at[p] + tid);
#pragma unroll
        for (int h = 0; h < G; ++h) {
            o[h] = fmaf(sc[p][h], v, o[h]);
        }
    }
#pragma unroll
    for (int h = 0; h < G; ++h) {
        part[h * (ATT_D + 2) + tid] = o[h];
    }
}

/* Chunks in order, then the output gate. */
__global__ void __launch_bounds__(256) qsa_merge(const __grid_constant__ att_args a)
{
    extern __shared__ float w[];
    pdl_next();
    pdl_wait();
    const uint32_t h = blockIdx.x, r = a.row0 + blockIdx.y, G = a.n_heads / a.n_kv, kvh = h / G, d = threadIdx.x;
    const int32_t pos = __ldcg(a.step.pos + r);
    float *out = a.o + ((uint64_t)r * a.n_heads + h) * ATT_D + d;
    if (pos < 0) {
        *out = 0.0f;
        return;
    }
    const uint32_t n = (att_count(a, r, pos) + ATT_P - 1) / ATT_P;
    const uint64_t cs = (uint64_t)G * (ATT_D + 2);
    const float *part = a.part + ((uint64_t)blockIdx.y * a.n_kv + kvh) * a.chunks * cs +
                        (uint64_t)(h - kvh * G) * (ATT_D + 2);
    for (uint32_t c = d; c < n; c += 256) {
        w[c] = __ldcg(part + c * cs + ATT_D);
    }
    __syncthreads();
    float m = -INFINITY;
    for (uint32_t c = 0; c < n; ++c) {
        m = fmaxf(m, w[c]);
    }
    float o = 0.0f, l = 0.0f;
#pragma unroll 8
    for (uint32_t c = 0; c < n; ++c) {
        const float f = expf(w[c] - m);
        o = fmaf(f, __ldcg(part + c * cs + d), o);
        l = fmaf(f, __ldcg(part + c * cs + ATT_D + 1), l);
    }
    const float gate = __ldcg(a.in + (uint64_t)r * a.stride + (2 * h + 1) * ATT_D + d);
    *out = o / l * sigmoid_f(gate);
}

template <int G> static int attend(struct qx_queue *q, att_args a, uint32_t n)
{
    const uint64_t row = (uint64_t)a.n_heads * a.chunks * (ATT_D + 2) * 4;
    uint64_t slab = QX_WS_BYTES / row;
    slab = slab > 32768 ? 32768 : slab;
    a.part = (float *)q->ws;
    for (a.row0 = 0; a.row0 < n; a.row0 += (uint32_t)slab) {
        const uint32_t rows = n - a.row0 < slab ? n - a.row0 : (uint32_t)slab;
        int r = launch(q, "qsa_attend", qsa_attend<G>, dim3(a.chunks, a.n_kv, rows), dim3(256), 0, a);
        r = r ? r : launch(q, "qsa_attend", qsa_merge, dim3(a.n_heads, rows), dim3(256), a.chunks * 4, a);
        if (r) {
            return r;
        }
    }
    return 0;
}

extern "C" int qx_cuda_qsa_attend(struct qx_queue *q, const struct qx_op_qsa_attend *o)
{
    if (o->step->n_rows == 0) {
        return 0;
    }
    if (o->head_dim != ATT_D || o->n_kv_heads == 0 || o->n_heads % o->n_kv_heads) {
        return qx_queue_refuse(q, "qsa_attend", "head dimension other than 256");
    }
    att_args a = {};
    a.step = *o->step;
    a.n_heads = o->n_heads;
    a.n_kv = o->n_kv_heads;
    a.ratio = o->ratio;
    a.budget = o->budget_blocks;
    a.chunks = (o->budget_blocks * o->ratio + o->ratio - 1 + ATT_P - 1) / ATT_P;
    a.q = o->q;
    a.in = o->in;
    a.stride = o->in_stride;
    a.kv = o->kv;
    a.block = o->block;
    a.n_block = o->n_block;
    a.o = o->o;
    if (attend_prompt_fits(q, o)) {
        return attend_prompt(q, a);
    }
    if (attend_few_fits(q, o)) {
        return attend_few(q, o, a);
    }
    switch (o->n_heads / o->n_kv_heads) {
    case 1: return attend<1>(q, a, o->step->n_rows);
    case 2: return attend<2>(q, a, o->step->n_rows);
    case 3: return attend<3>(q, a, o->step->n_rows);
    case 4: return attend<4>(q, a, o->step->n_rows);
    case 6: return attend<6>(q, a, o->step->n_rows);
    case 8: return attend<8>(q, a, o->step->n_rows);
    case 12: return attend<12>(q, a, o->step->n_rows);
    case 16: return attend<16>(q, a, o->step->n_rows);
    default: return qx_queue_refuse(q, "qsa_attend", "query heads a key head other than 1, 2, 3, 4, 6, 8, 12, 16");
    }
}
