/* qsa.cuh: what the kernels of sparse attention share: caches, arguments, and the choice of the best scores. */
#ifndef QX_CUDA_QSA_CUH
#define QX_CUDA_QSA_CUH

#include "common.cuh"

#define QSA_MAX_DIM 256

/* ---- caches --------------------------------------------------------------------------------- */

__device__ __forceinline__ uint64_t kv_slot(const struct qx_kv &kv, int32_t seq, uint32_t p)
{
    const int32_t page = __ldcg(kv.page_table + (uint64_t)seq * kv.max_pages + p / kv.page_tokens);
    return (uint64_t)page * kv.page_tokens + p % kv.page_tokens;
}
__device__ __forceinline__ void kv_put(const struct qx_kv &kv, void *base, uint64_t i, float v)
{
    if (kv.bf16) {
        ((uint16_t *)base)[i] = to_bf16(v);
    } else {
        ((float *)base)[i] = v;
    }
}
__device__ __forceinline__ float kv_get(const struct qx_kv &kv, const void *base, uint64_t i)
{
    return kv.bf16 ? bf16_f(__ldcg((const uint16_t *)base + i)) : __ldcg((const float *)base + i);
}

/* ---- selection ------------------------------------------------------------------------------ */

#define SEL_T 512

struct sel_args {
    struct qx_step step;
    uint32_t i_heads, i_dim, ratio, budget, max_blocks;
    const float *iq;
    struct qx_kv kv;
    float *scores;
    int32_t *block, *n_block;
    unsigned *tickets;
    uint32_t row0;
    uint64_t *words;    /* few rows: of scores */
    unsigned *launches; /* [row of the launch] with these words */
    uint64_t *picks;    /* words of the picks, [row][QX_PICK_BLOCKS]; or NULL */
    unsigned *number;   /* [row] of launches with these */
    uint32_t place;
};

/* A block's score of the indexer (6.2) in all of eight lanes that each have a part of every head's product. */
template <int H> __device__ __forceinline__ float index_score(float (&s)[H])
{
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        s[h] += __shfl_xor_sync(0xffffffffu, s[h], 1);
        s[h] += __shfl_xor_sync(0xffffffffu, s[h], 2);
        s[h] += __shfl_xor_sync(0xffffffffu, s[h], 4);
        sum += s[h] > 0.0f || isnan(s[h]) ? s[h] : 0.0f;
    }
    return sum;
}

__device__ __forceinline__ uint32_t score_key(float f)
{
    const uint32_t u = __float_as_uint(f);
    return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

/* Inclusive sum over the block's threads; returns this thread's, total in *all. */
__device__ __forceinline__ uint32_t block_scan(uint32_t v, uint32_t *warp_sums, uint32_t *all)
{
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    v = warp_upto(v, lane);
    __syncthreads();
    if (lane == 31) {
        warp_sums[warp] = v;
    }
    __syncthreads();
    uint32_t before = 0, total = 0;
    for (uint32_t i = 0; i < SEL_T / 32; ++i) {
        before += i < warp ? warp_sums[i] : 0;
        total += warp_sums[i];
    }
    *all = total;
    return v + before;
}

/* The `k` largest of n scores, ties to the lower number, ascending. All threads of one block. */
__device__ __forceinline__ void select_blocks(const float *score, uint32_t n, uint32_t k, int32_t *out)
{
    __shared__ uint32_t hist[2048];
    __shared__ uint32_t sums[SEL_T / 32];
    __shared__ uint32_t s_bin, s_left;
    const uint32_t tid = threadIdx.x;
    uint32_t prefix = 0, have = 0, left = k;
    /* the key of the k-th largest, eleven, eleven and ten bits at a time */
    const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    for (int pass = 0; pass < 3; ++pass) {
        for (uint32_t i = tid; i < 2048; i += SEL_T) {
            hist[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = tid * 4; i < n; i += SEL_T * 4) {
            float4 s = make_float4(0, 0, 0, 0);
            if (i + 4 <= n && ((uintptr_t)score & 15) == 0) {
                s = __ldcg((const float4 *)(score + i));
            } else {
                s.x = __ldcg(score + i);
                s.y = i + 1 < n ? __ldcg(score + i + 1) : 0.0f;
                s.z = i + 2 < n ? __ldcg(score + i + 2) : 0.0f;
                s.w = i + 3 < n ? __ldcg(score + i + 3) : 0.0f;
            }
            const float v[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t key = score_key(v[e]);
                if (i + e < n && (have == 0 || (key >> (32 - have)) == prefix)) {
                    atomicAdd(&hist[(key >> shift[pass]) & ((1u << width[pass]) - 1)], 1u);
                }
            }
        }
        __syncthreads();
        /* thread t owns bins 2047 - 4t .. 2044 - 4t: counts from the top */
        uint32_t h[4], sum = 0, total;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            h[e] = hist[2047 - (tid * 4 + e)];
            sum += h[e];
        }
        const uint32_t incl = block_scan(sum, sums, &total);
        uint32_t above = incl - sum;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (above < left && above + h[e] >= left) {
                s_bin = 2047 - (tid * 4 + e);
                s_left = left - above;
            }
            above += h[e];
        }
        __syncthreads();
        prefix = (prefix << width[pass]) | s_bin;
        have += width[pass];
        left = s_left;
        __syncthreads();
    }
    /* `left` of those equal to the key are taken, lowest numbers first */
    const uint32_t per = ((n + SEL_T - 1) / SEL_T + 3) / 4 * 4, b0 = tid * per,
                   b1 = b0 + per < n ? b0 + per : n;
    uint32_t gt = 0, eq = 0, all;
    for (uint32_t i = b0; i < b1; ++i) {
        const uint32_t key = score_key(__ldcg(score + i));
        gt += key > prefix;
        eq += key == prefix;
    }
    const uint32_t eq_before = block_scan(eq, sums, &all) - eq;
    const uint32_t take = eq_before >= left ? 0 : left - eq_before < eq ? left - eq_before : eq;
    uint32_t at = block_scan(gt + take, sums, &all) - (gt + take), taken = 0;
    for (uint32_t i = b0; i < b1; ++i) {
        const uint32_t key = score_key(__ldcg(score + i));
        if (key > prefix || (key == prefix && taken++ < take)) {
            out[at++] = (int32_t)i;
        }
    }
}

/* ---- attention ------------------------------------------------------------------------------ */

#define ATT_D 256   /* head dimension */
#define ATT_P 32    /* positions a chunk */

struct att_args {
    struct qx_step step;
    uint32_t n_heads, n_kv, ratio, budget, chunks;
    const float *q, *in;
    uint64_t stride;
    struct qx_kv kv;
    const int32_t *block, *n_block;
    float *o;
    uint32_t row0;
    float *part; /* [row of the launch, kv head, chunk, group, ATT_D + 2] */
    uint64_t *words;  /* few rows: what blocks tell each other, and [0] launches, [1] blocks that are done */
    unsigned *number;
    const uint64_t *picks; /* words of the selection right before; or NULL */
    const unsigned *pick_number;
    uint32_t place;
};

/* Number of attended positions of row r, and the index-th of them. */
__device__ __forceinline__ uint32_t att_count(const att_args &a, uint32_t r, int32_t pos)
{
    return (uint32_t)__ldcg(a.n_block + r) * a.ratio + ((uint32_t)pos + 1) % a.ratio;
}

/* The kernels for many rows (qsa_prompt.cu), where they can take the op. */
bool select_prompt_fits(const struct qx_queue *q, const struct qx_op_qsa_select *o);
int select_prompt(struct qx_queue *q, const struct qx_op_qsa_select *o);
bool attend_prompt_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o);
int attend_prompt(struct qx_queue *q, const att_args &a);

/* The kernels for few rows (qsa_few.cu), where they can take the op. */
bool select_few_fits(const struct qx_queue *q, const struct qx_op_qsa_select *o);
int select_few(struct qx_queue *q, const struct qx_op_qsa_select *o);
bool attend_few_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o);
int attend_few(struct qx_queue *q, const struct qx_op_qsa_attend *o, const att_args &a);

#endif
