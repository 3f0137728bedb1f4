/* head.cu: the arg-max of a head that is read in half its size. A copy in MXFP8 gives every logit within a bound that
 * is known for its row; only rows whose logit may be the largest are read as they are stored. The result is that of
 * the whole head; with bounds of 3 % of a row's length that is a few hundred rows of 248,320 where nothing stands out. */
#include "best.cuh"
#include "tile.cuh"

#define HB_T 256u
#define HB_BLOCKS 128u /* of a row of input; no more than threads */
#define HB_PART 8u     /* floats a block leaves in scratch for a row of input */
#define HB_TOK 8u      /* rows of input a block; no more than warps */

/* ---- the copy --------------------------------------------------------------------------------- */

/* A warp a row; four lanes a group of 32. */
__global__ void __launch_bounds__(256) head_copy_rows(struct qx_op_head_copy a)
{
    pdl_next();
    pdl_wait();
    const uint32_t r = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31, cols = a.from.cols;
    if (r >= a.from.rows) {
        return;
    }
    const uint4 *from = (const uint4 *)((const uint16_t *)a.from.codes + (uint64_t)r * cols);
    float d2 = 0.0f, w2 = 0.0f;
    for (uint32_t c0 = 0; c0 < cols; c0 += 256) { /* all lanes go on together */
        const uint32_t c = c0 + lane * 8;
        const bool in = c < cols;
        const uint4 u = in ? ld_stream(from + c / 8) : make_uint4(0, 0, 0, 0);
        const uint32_t p[4] = {u.x, u.y, u.z, u.w};
        float v[8], most = 0.0f;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] = bf16_lo(p[i]);
            v[2 * i + 1] = bf16_hi(p[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            finite = finite && isfinite(v[i]);
            most = fmaxf(most, fabsf(v[i]));
            w2 = fmaf(v[i], v[i], w2);
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        uint32_t mask = __ballot_sync(0xffffffffu, finite);
        finite = (mask >> (lane & ~3u) & 15u) == 15u;
        int e = most > 0.0f ? ilogbf(most) - 8 : -127;
        e += most > ldexpf(448.0f, e);
        e = e < -127 ? -127 : e;
        uint32_t code[2] = {};
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            uint16_t two;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(ldexpf(v[i + 1], -e)), "f"(ldexpf(v[i], -e)));
            two = finite ? two : 0;
            code[i / 4] |= (uint32_t)two << (i % 4 * 8);
            const float2 near = e4m3x2_f(two);
            const float d0 = v[i] - ldexpf(near.x, e), d1 = v[i + 1] - ldexpf(near.y, e);
            d2 = fmaf(d0, d0, fmaf(d1, d1, d2));
        }
        if (in) {
            *(uint2 *)(a.codes + (uint64_t)r * cols + c) = make_uint2(code[0], code[1]);
            if ((lane & 3) == 0) {
                a.scale[(uint64_t)r * (cols / 32) + c / 32] = finite ? (uint8_t)(e + 127) : 255;
            }
        }
    }
    d2 = warp_sum(d2);
    w2 = warp_sum(w2);
    if (lane == 0) {
        a.off[r] = sqrtf(d2) * (1.0f + 0x1p-10f) + sqrtf(w2) * 0x1p-13f;
    }
}

extern "C" int qx_cuda_head_copy(struct qx_queue *q, const struct qx_op_head_copy *o)
{
    return launch(q, "head_copy", head_copy_rows, dim3((o->from.rows + 7) / 8), dim3(256), 0, *o);
}

/* ---- the largest ------------------------------------------------------------------------------ */

__device__ __forceinline__ float rounded(float v)
{
    return bf16_f(to_bf16(v));
}

/* This block's share of the copy's logits of a row of input: the largest, and the sum of exp(logit - largest). The
 * head's own logit there is one that the largest cannot be below. */
__global__ void __launch_bounds__(HB_T) head_near(struct qx_op_head_best a)
{
    __shared__ best sh[HB_T / 32];
    __shared__ float fs[HB_T / 32];
    pdl_next();
    pdl_wait();
    const uint32_t m = blockIdx.y, rows = a.head.rows, cols = a.head.cols, step = gridDim.x * HB_T;
    const uint32_t i0 = blockIdx.x * HB_T + threadIdx.x;
    const float *l = a.near + (uint64_t)m * rows, *x = a.x + (uint64_t)m * cols;
    float v[SCAN_N], s = 0.0f;
    const best b = scan_best(l, rows, sh, v);
    const bool any = b.id < rows;
    const float top = any ? __ldcg(l + b.id) : 0.0f;
    float dot = 0.0f;
    if (any) {
        const uint4 *w = (const uint4 *)((const uint16_t *)a.head.codes + (uint64_t)b.id * cols);
        for (uint32_t c = threadIdx.x; c < cols / 8; c += HB_T) {
            const uint4 u = ld_stream(w + c);
            const float4 f = __ldcg((const float4 *)x + 2 * c), g = __ldcg((const float4 *)x + 2 * c + 1);
            dot = fmaf(bf16_lo(u.x), rounded(f.x), fmaf(bf16_hi(u.x), rounded(f.y), dot));
            dot = fmaf(bf16_lo(u.y), rounded(f.z), fmaf(bf16_hi(u.y), rounded(f.w), dot));
            dot = fmaf(bf16_lo(u.z), rounded(g.x), fmaf(bf16_hi(u.z), rounded(g.y), dot));
            dot = fmaf(bf16_lo(u.w), rounded(g.z), fmaf(bf16_hi(u.w), rounded(g.w), dot));
        }
    }
    if (a.prob) {
#pragma unroll
        for (uint32_t k = 0; k < SCAN_N; ++k) {
            s += i0 + k * step < rows ? expf(v[k] - top) : 0.0f;
        }
        for (uint32_t i = i0 + SCAN_N * step; i < rows; i += step) {
            s += expf(__ldcg(l + i) - top);
        }
        s = block_sum(s, fs);
    }
    dot = block_sum(dot, fs);
    if (threadIdx.x == 0) {
        float *part = a.scratch + ((uint64_t)m * gridDim.x + blockIdx.x) * HB_PART;
        *(float4 *)part = make_float4(any ? dot : -INFINITY, top, any ? s : 0.0f, 0.0f);
    }
}

/* Shared memory: activations as bf16 [HB_TOK][pitch], then the rows to look at. */
struct hb_shared {
    float low[HB_TOK], len[HB_TOK];
    float red[HB_T / 32][HB_TOK][8]; /* [warp][row of input][row of the head] */
    uint32_t list[HB_T * SCAN_N], n_list;
    bool all[HB_TOK];
};

/* Eight rows of the head (fewer: the last again) times the rows of input, summed as linear.cu sums (linear_slot.cuh):
 * so a logit has the same bits there and here. */
__device__ __forceinline__ void hb_rows(const struct qx_op_head_best &a, hb_shared &s, const uint8_t *xs, uint32_t pitch,
                                        const uint32_t *list, uint32_t n)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const uint32_t bytes = a.head.cols * 2;
    const uint8_t *w = (const uint8_t *)a.head.codes + (uint64_t)list[g < n ? g : n - 1] * bytes;
    const uint8_t *x = xs + g * pitch;
    float c[2][2][4] = {};
#pragma unroll 1
    for (uint32_t u = warp; u * 128 < bytes; u += 5 * 8) {
        uint4 v[5][2];
#pragma unroll
        for (uint32_t i = 0; i < 10; ++i) {
            const uint32_t at = (u + i / 2 * 8) * 128 + i % 2 * 64 + q * 16;
            v[i / 2][i % 2] = at < bytes ? ld_stream(w + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < 10; ++i) {
            const uint32_t at = (u + i / 2 * 8) * 128 + i % 2 * 64 + q * 16;
            const uint4 f = at < bytes ? *(const uint4 *)(x + at) : make_uint4(0, 0, 0, 0), &b = v[i / 2][i % 2];
            mma_bf16(c[i % 2][0], f.x, 0, f.y, 0, b.x, b.y);
            mma_bf16(c[i % 2][1], f.z, 0, f.w, 0, b.z, b.w);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        s.red[warp][g][2 * q + i] = (c[0][0][i] + c[0][1][i]) + (c[1][0][i] + c[1][1][i]);
    }
}

/* Rows that may have the largest logit of any of up to eight rows of input. */
__global__ void __launch_bounds__(HB_T) head_pick(struct qx_op_head_best a, unsigned *tickets)
{
    extern __shared__ __align__(16) uint8_t xs[];
    __shared__ hb_shared s;
    __shared__ best sh[HB_T / 32];
    __shared__ float fs[HB_T / 32];
    const uint32_t rows = a.head.rows, cols = a.head.cols, step = gridDim.x * HB_T, pitch = cols * 2 + 16;
    const uint32_t i0 = blockIdx.x * HB_T + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const uint32_t m0 = blockIdx.y * HB_TOK, n = a.n_rows - m0 < HB_TOK ? a.n_rows - m0 : HB_TOK;
    const float *l = a.near + (uint64_t)m0 * rows, *x = a.x + (uint64_t)m0 * cols;
    float *parts = a.scratch + (uint64_t)m0 * gridDim.x * HB_PART;
    float off[SCAN_N];
#pragma unroll
    for (uint32_t k = 0; k < SCAN_N; ++k) { /* nothing writes these any more */
        off[k] = i0 + k * step < rows ? __ldg(a.off + i0 + k * step) : 0.0f;
    }
    pdl_next();
    pdl_wait();
    { /* a warp a row of input */
        float sum = 0.0f, low = -INFINITY;
        bool nan = false;
        for (uint32_t c = lane * 4; c < cols; c += 128) {
            const float4 f = warp < n ? __ldcg((const float4 *)(x + (uint64_t)warp * cols + c))
                                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const uint2 p = make_uint2(pack_bf16(f.x, f.y), pack_bf16(f.z, f.w));
            *(uint2 *)(xs + warp * pitch + c * 2) = p;
            sum = fmaf(bf16_lo(p.x), bf16_lo(p.x), fmaf(bf16_hi(p.x), bf16_hi(p.x), sum));
            sum = fmaf(bf16_lo(p.y), bf16_lo(p.y), fmaf(bf16_hi(p.y), bf16_hi(p.y), sum));
        }
        for (uint32_t i = lane; i < gridDim.x && warp < n; i += 32) {
            const float v = __ldcg(parts + (warp * gridDim.x + i) * HB_PART);
            nan = nan || v != v;
            low = fmaxf(low, v);
        }
        sum = warp_sum(sum);
        low = warp_max(low);
        nan = __any_sync(0xffffffffu, nan);
        if (lane == 0) {
            s.low[warp] = low;
            s.len[warp] = sqrtf(sum) * 1.0001f;
            s.all[warp] = nan;
        }
    }
    best b = {0, 0xffffffffu}; /* thread 8 t + j: of row t of input */
#pragma unroll 1
    for (uint32_t at = i0; at - threadIdx.x < rows; at += SCAN_N * step) {
        if (threadIdx.x == 0) {
            s.n_list = 0;
        }
        __syncthreads();
        uint32_t may = 0;
#pragma unroll 1
        for (uint32_t t = 0; t < n; ++t) {
            const float low = s.low[t], len = s.len[t];
            const bool all = s.all[t];
            float v[SCAN_N];
#pragma unroll
            for (uint32_t k = 0; k < SCAN_N; ++k) {
                const uint32_t i = at + k * step;
                v[k] = i < rows ? __ldcg(l + (uint64_t)t * rows + i) : 0.0f;
            }
#pragma unroll
            for (uint32_t k = 0; k < SCAN_N; ++k) {
                const uint32_t i = at + k * step;
                const float o = at == i0 ? off[k] : i < rows ? __ldg(a.off + i) : 0.0f;
                may |= i < rows && (all || !(fmaf(o, len, v[k]) < low)) ? 1u << k : 0;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < SCAN_N; ++k) {
            if (may >> k & 1) {
                s.list[atomicAdd(&s.n_list, 1u)] = at + k * step;
            }
        }
        __syncthreads();
        const uint32_t n_list = s.n_list;
#pragma unroll 1
        for (uint32_t j = 0; j < n_list; j += 8) {
            const uint32_t k = n_list - j < 8 ? n_list - j : 8;
            hb_rows(a, s, xs, pitch, s.list + j, k);
            __syncthreads();
            if (threadIdx.x < HB_TOK * 8 && (threadIdx.x & 7) < k) {
                const uint32_t t = threadIdx.x / 8, r = threadIdx.x & 7;
                float v = s.red[0][t][r];
#pragma unroll
                for (uint32_t i = 1; i < HB_T / 32; ++i) {
                    v += s.red[i][t][r];
                }
                const best c = {logit_key(v), s.list[j + r]};
                b = best_of(b, c);
            }
            __syncthreads();
        }
    }
    if (threadIdx.x < HB_TOK * 8) {
#pragma unroll
        for (int i = 4; i; i >>= 1) {
            best o;
            o.key = __shfl_xor_sync(0xffffffffu, b.key, i);
            o.id = __shfl_xor_sync(0xffffffffu, b.id, i);
            b = best_of(b, o);
        }
        if ((threadIdx.x & 7) == 0 && threadIdx.x / 8 < n) {
            float *part = parts + (threadIdx.x / 8 * gridDim.x + blockIdx.x) * HB_PART;
            part[4] = __uint_as_float(b.key);
            part[5] = __uint_as_float(b.id);
        }
    }
    if (!last_block(tickets + blockIdx.y)) {
        return;
    }
    for (uint32_t t = 0; t < n; ++t) {
        const float *part = parts + (t * gridDim.x + threadIdx.x) * HB_PART;
        b = {0, 0xffffffffu};
        float top = 0.0f, sum = 0.0f;
        if (threadIdx.x < gridDim.x) {
            b.key = __float_as_uint(__ldcg(part + 4));
            b.id = __float_as_uint(__ldcg(part + 5));
            top = __ldcg(part + 1);
            sum = __ldcg(part + 2);
        }
        b = block_best(b, sh);
        const float value = logit_of(b.key);
        if (a.prob) {
            sum = block_sum(sum > 0.0f || sum != sum ? sum * expf(top - value) : 0.0f, fs);
        }
        if (threadIdx.x == 0) {
            const uint32_t m = m0 + t;
            const bool no = a.finite && (value != value || value == INFINITY);
            const int32_t id = no ? -1 : (int32_t)b.id;
            a.id[m] = id;
            if (a.prob) {
                a.value[m] = value;
                a.prob[m] = 1.0f / sum;
            }
            if (a.told) {
                __threadfence_system();
                *(volatile int32_t *)(a.told + m) = id;
            }
        }
    }
}

extern "C" int qx_cuda_head_best(struct qx_queue *q, const struct qx_op_head_best *o)
{
    const uint32_t groups = (o->n_rows + HB_TOK - 1) / HB_TOK;
    if (groups > QX_N_TICKETS) {
        return qx_queue_refuse(q, "head_best", "too many rows");
    }
    const uint32_t need = (o->head.rows + HB_T - 1) / HB_T, blocks = need < HB_BLOCKS ? need : HB_BLOCKS;
    const int r = launch(q, "head_best", head_near, dim3(blocks, o->n_rows), dim3(HB_T), 0, *o);
    return r ? r : launch(q, "head_best", head_pick, dim3(blocks, groups), dim3(HB_T), HB_TOK * (o->head.cols * 2 + 16),
                          *o, q->tickets);
}
