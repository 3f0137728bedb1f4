/* qsa_prompt.cu: sparse attention for the rows of a prompt, on tensor cores: block scores as products of the
 * index queries' three bf16 terms with the pooled keys (exact products, f32 sums), the choice a row a block.
 * bf16 caches only; what does not fit stays with qsa.cu. */
#include "mma.cuh"
#include "qsa.cuh"

/* ---- scores --------------------------------------------------------------------------------- */

enum {
    SC_ROWS = 32,  /* rows a block */
    SC_N = 128,    /* pooled keys a tile */
    SC_D = 128,    /* index dimension */
    SC_P = 136,    /* bf16 from row to row in shared memory */
    SC_HEADS = 4,
    SC_SPLIT = 4   /* blocks that share the tiles of the same rows */
};

struct score_smem {
    uint16_t a[3][SC_HEADS * SC_ROWS][SC_P]; /* term; head, row */
    uint16_t b[2][SC_N][SC_P];
    int32_t pos[SC_ROWS], seq[SC_ROWS];
};

/* Pooled keys t * SC_N .. of a sequence, at most nb of them; the rest repeats the last. */
__device__ __forceinline__ void score_keys(const sel_args &a, score_smem &s, uint32_t buf, int32_t seq, uint32_t t,
                                           uint32_t nb)
{
    const uint32_t per_page = a.kv.page_tokens / a.ratio;
    const uint32_t k = threadIdx.x / 2, u0 = threadIdx.x & 1;
    uint32_t b = t * SC_N + k;
    b = b < nb ? b : nb - 1;
    const int32_t page = __ldcg(a.kv.page_table + (uint64_t)seq * a.kv.max_pages + b / per_page);
    const uint16_t *p = (const uint16_t *)a.kv.pooled + ((uint64_t)page * per_page + b % per_page) * SC_D;
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) {
        copy16(&s.b[buf][k][(u * 2 + u0) * 8], p + (u * 2 + u0) * 8);
    }
    copy_commit();
}

__global__ void __launch_bounds__(256, 1) qsa_score_rows(const __grid_constant__ sel_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    score_smem &s = *(score_smem *)mem;
    pdl_next();
    pdl_wait();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, n = a.step.n_rows;
    const uint32_t groups = (n + SC_ROWS - 1) / SC_ROWS, mi = lane / 8;
    const uint32_t rg = warp & 1, ng = warp >> 1;
    for (uint32_t item = blockIdx.x; item < groups * SC_SPLIT; item += gridDim.x) {
        /* the last rows have the most keys: they go first */
        const uint32_t r0 = (groups - 1 - item / SC_SPLIT) * SC_ROWS, split = item % SC_SPLIT;
        __syncthreads();
        if (tid < SC_ROWS) {
            s.pos[tid] = r0 + tid < n ? __ldcg(a.step.pos + r0 + tid) : -1;
            s.seq[tid] = r0 + tid < n ? __ldcg(a.step.seq + r0 + tid) : 0;
        }
        __syncthreads();
        bool any = false;
        for (uint32_t i = 0; i < SC_ROWS; ++i) {
            any |= s.pos[i] >= 0 && ((uint32_t)s.pos[i] + 1) / a.ratio > a.budget;
        }
        if (!any) {
            continue;
        }
        for (uint32_t i = tid; i < SC_HEADS * SC_ROWS * (SC_D / 4); i += 256) {
            const uint32_t u = i % (SC_D / 4), h = i / (SC_D / 4) % SC_HEADS, r = i / (SC_D / 4 * SC_HEADS);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (r0 + r < n) {
                v = __ldcg((const float4 *)(a.iq + ((uint64_t)(r0 + r) * SC_HEADS + h) * SC_D) + u);
            }
            float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int t = 0; t < 3; ++t) {
                const uint32_t p0 = pack_bf16(x[0], x[1]), p1 = pack_bf16(x[2], x[3]);
                *(uint2 *)&s.a[t][h * SC_ROWS + r][u * 4] = make_uint2(p0, p1);
                x[0] -= bf16_lo(p0), x[1] -= bf16_hi(p0), x[2] -= bf16_lo(p1), x[3] -= bf16_hi(p1);
            }
        }
        /* rows of one sequence at a time */
        for (uint32_t s0 = 0; s0 < SC_ROWS;) {
            const int32_t seq = s.seq[s0];
            uint32_t s1 = s0, nb = 0;
            for (; s1 < SC_ROWS && (s.seq[s1] == seq || s.pos[s1] < 0); ++s1) {
                const uint32_t b = s.pos[s1] < 0 ? 0 : ((uint32_t)s.pos[s1] + 1) / a.ratio;
                nb = b > nb ? b : nb;
            }
            const uint32_t tiles = nb > a.budget ? (nb + SC_N - 1) / SC_N : 0;
            __syncthreads();
            if (split < tiles) {
                score_keys(a, s, 0, seq, split, nb);
            }
            uint32_t buf = 0;
            for (uint32_t t = split; t < tiles; t += SC_SPLIT, buf ^= 1) {
                if (t + SC_SPLIT < tiles) {
                    score_keys(a, s, buf ^ 1, seq, t + SC_SPLIT, nb);
                    copy_wait<1>();
                } else {
                    copy_wait<0>();
                }
                __syncthreads();
                float acc[SC_HEADS][4][4] = {};
                const uint32_t A = smem_addr(&s.a[0][rg * 16 + (mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
                const uint32_t B = smem_addr(&s.b[buf][ng * 32 + (mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
#pragma unroll 2
                for (int kk = 0; kk < SC_D / 16; ++kk) {
                    uint32_t b0[4], b1[4];
                    ldsm4(b0, B + kk * 32);
                    ldsm4(b1, B + 16 * SC_P * 2 + kk * 32);
#pragma unroll
                    for (int h = 0; h < SC_HEADS; ++h) {
#pragma unroll
                        for (int x = 0; x < 3; ++x) {
                            uint32_t f[4];
                            ldsm4(f, A + (x * SC_HEADS + h) * SC_ROWS * SC_P * 2 + kk * 32);
                            mma16(acc[h][0], f, b0[0], b0[1]);
                            mma16(acc[h][1], f, b0[2], b0[3]);
                            mma16(acc[h][2], f, b1[0], b1[1]);
                            mma16(acc[h][3], f, b1[2], b1[3]);
                        }
                    }
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint32_t row = rg * 16 + lane / 4 + (e >> 1) * 8;
                    const uint32_t mine = s.pos[row] < 0 || row < s0 || row >= s1
                                              ? 0 : ((uint32_t)s.pos[row] + 1) / a.ratio;
                    float *out = a.scores + (uint64_t)(r0 + row) * a.max_blocks;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const uint32_t b = t * SC_N + ng * 32 + j * 8 + (lane & 3) * 2 + (e & 1);
                        float sum = 0.0f;
#pragma unroll
                        for (int h = 0; h < SC_HEADS; ++h) {
                            const float v = acc[h][j][e];
                            sum += v > 0.0f || isnan(v) ? v : 0.0f;
                        }
                        if (b < mine) {
                            out[b] = sum;
                        }
                    }
                }
                __syncthreads();
            }
            s0 = s1;
        }
    }
}

__global__ void __launch_bounds__(SEL_T) qsa_pick_rows(const __grid_constant__ sel_args a)
{
    pdl_next();
    pdl_wait();
    const uint32_t r = blockIdx.x;
    const int32_t pos = __ldcg(a.step.pos + r);
    const uint32_t nb = pos < 0 ? 0 : ((uint32_t)pos + 1) / a.ratio;
    int32_t *out = a.block + (uint64_t)r * a.budget;
    if (threadIdx.x == 0) {
        a.n_block[r] = (int32_t)(nb < a.budget ? nb : a.budget);
    }
    if (nb > a.budget) {
        select_blocks(a.scores + (uint64_t)r * a.max_blocks, nb, a.budget, out);
        return;
    }
    for (uint32_t i = threadIdx.x; i < nb; i += SEL_T) {
        out[i] = (int32_t)i;
    }
}

bool select_prompt_fits(const struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    return o->prompt && o->step->n_rows >= 16 && o->i_heads == SC_HEADS && o->i_dim == SC_D && o->kv.bf16 &&
           sizeof(score_smem) <= (size_t)q->smem_max && (((uintptr_t)o->iq | (uintptr_t)o->kv.pooled) & 15) == 0;
}

int select_prompt(struct qx_queue *q, const struct qx_op_qsa_select *o)
{
    sel_args a = {*o->step, o->i_heads, o->i_dim, o->ratio,   o->budget_blocks, o->max_blocks, o->iq, o->kv,
                  o->scores, o->block,  o->n_block, q->tickets};
    if (o->max_blocks > o->budget_blocks) {
        const int r = launch(q, "qsa_select", qsa_score_rows, dim3(q->n_sm), dim3(256), sizeof(score_smem), a);
        if (r) {
            return r;
        }
    }
    return launch(q, "qsa_select", qsa_pick_rows, dim3(o->step->n_rows), dim3(SEL_T), 0, a);
}
