/* qsa_prompt.cu: sparse attention for the rows of a prompt, on tensor cores: block scores as products of the
 * index queries' three bf16 terms with the pooled keys (exact products, f32 sums), the choice a row a block,
 * and attention for eight rows and a key head a block. bf16 caches only; what does not fit stays with qsa.cu. */
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
                const uint32_t A = smem_u32(&s.a[0][rg * 16 + (mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
                const uint32_t B = smem_u32(&s.b[buf][ng * 32 + (mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
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

/* ---- attention ------------------------------------------------------------------------------ */

enum {
    AT_ROWS = 8,     /* rows a block: one a warp */
    AT_POS = 16,     /* positions a tile: four blocks */
    AT_P = 264,      /* bf16 from position to position in shared memory */
    AT_STAGES = 8,   /* tiles on the way: a warp fetches one */
    AT_BUDGET = 512, /* blocks of a row at most, beside its tail */
    AT_LIST = AT_ROWS * (AT_BUDGET + 1)
};

struct attend_stage {
    uint16_t k[AT_POS][AT_P], v[AT_POS][AT_P];
};
struct attend_smem {
    union {
        attend_stage stage[AT_STAGES];
        uint32_t map[sizeof(attend_stage) * AT_STAGES / 4]; /* a byte a block of the sequence: bit w for row w */
    };
    uint32_t block[AT_LIST + 4], slot[AT_LIST + 4];         /* chosen by any row: number, place in the cache */
    uint8_t rows[AT_LIST + 4];                              /* by which */
    uint32_t sums[AT_ROWS];
    int32_t pos[AT_ROWS], seq[AT_ROWS];
    uint64_t full[AT_STAGES], empty[AT_STAGES];
};

/* The blocks that rows s0 .. s1 - 1 chose, and their tails, ascending. All threads. Returns how many. */
__device__ uint32_t attend_list(const att_args &a, attend_smem &s, uint32_t r0, uint32_t s0, uint32_t s1, int32_t last)
{
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, words = ((uint32_t)last / 4 + 4) / 4;
    for (uint32_t i = tid; i < words; i += AT_ROWS * 32) {
        s.map[i] = 0;
    }
    __syncthreads();
    if (warp >= s0 && warp < s1 && s.pos[warp] >= 0) {
        const uint32_t n = (uint32_t)__ldcg(a.n_block + r0 + warp), tail = ((uint32_t)s.pos[warp] + 1) / 4;
        const int32_t *list = a.block + (uint64_t)(r0 + warp) * a.budget;
        for (uint32_t i0 = lane; i0 < n; i0 += 256) { /* eight loads in flight */
            uint32_t b[8];
#pragma unroll
            for (uint32_t e = 0; e < 8; ++e) {
                b[e] = i0 + 32 * e < n ? (uint32_t)__ldcg(list + i0 + 32 * e) : 0xffffffffu;
            }
#pragma unroll
            for (uint32_t e = 0; e < 8; ++e) {
                if (b[e] != 0xffffffffu) {
                    atomicOr(&s.map[b[e] / 4], 1u << (b[e] % 4 * 8 + warp));
                }
            }
        }
        if (lane == 0 && ((uint32_t)s.pos[warp] + 1) % 4) {
            atomicOr(&s.map[tail / 4], 1u << (tail % 4 * 8 + warp));
        }
    }
    __syncthreads();
    /* a thread has `per` words in a row, an odd number of them for the banks */
    const uint32_t per = ((words + AT_ROWS * 32 - 1) / (AT_ROWS * 32)) | 1, w0 = tid * per,
                   w1 = w0 + per < words ? w0 + per : words;
    uint32_t count = 0;
    for (uint32_t w = w0; w < w1; ++w) {
        const uint32_t x = s.map[w];
        count += ((x & 0xffu) != 0) + ((x & 0xff00u) != 0) + ((x & 0xff0000u) != 0) + ((x & 0xff000000u) != 0);
    }
    uint32_t v = count;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const uint32_t o = __shfl_up_sync(0xffffffffu, v, i);
        v += lane >= (uint32_t)i ? o : 0;
    }
    if (lane == 31) {
        s.sums[warp] = v;
    }
    __syncthreads();
    uint32_t at = v - count, all = 0;
    for (uint32_t i = 0; i < AT_ROWS; ++i) {
        at += i < warp ? s.sums[i] : 0;
        all += s.sums[i];
    }
    for (uint32_t w = w0; w < w1; ++w) {
        for (uint32_t e = 0; e < 4; ++e) {
            const uint32_t x = s.map[w] >> (8 * e) & 0xffu;
            if (x) {
                s.block[at] = w * 4 + e;
                s.rows[at++] = (uint8_t)x;
            }
        }
    }
    if (tid < 4) {
        s.rows[all + tid] = 0; /* the last tile's rest */
    }
    __syncthreads();
    const int32_t seq = s.seq[s0];
    for (uint32_t i0 = tid; i0 < all; i0 += AT_ROWS * 32 * 8) {
        uint32_t x[8];
#pragma unroll
        for (uint32_t e = 0; e < 8; ++e) {
            const uint32_t i = i0 + AT_ROWS * 32 * e;
            x[e] = i < all ? (uint32_t)kv_slot(a.kv, seq, s.block[i] * 4) : 0;
        }
#pragma unroll
        for (uint32_t e = 0; e < 8; ++e) {
            const uint32_t i = i0 + AT_ROWS * 32 * e;
            if (i < all) {
                s.slot[i] = x[e];
            }
        }
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the map's place is copied into next */
#endif
    __syncthreads();
    return all;
}

/* Eight rows and a key head a block: a warp has a row, whose query heads (at most 16) are the rows of its
 * products. The blocks of positions that any of the rows chose pass through shared memory once, in order, in tiles
 * of four; a warp skips tiles without one of its row's. q and the probabilities are rounded to bf16, sums are f32. */
__global__ void __launch_bounds__(AT_ROWS * 32, 1) qsa_attend_rows(const __grid_constant__ att_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    attend_smem &s = *(attend_smem *)mem;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane / 4, q2 = (lane & 3) * 2, mi = lane / 8;
    if (tid == 0) {
        for (int i = 0; i < AT_STAGES; ++i) {
            bar_init(&s.full[i], 1);
            bar_init(&s.empty[i], AT_ROWS);
        }
        bar_init_done();
    }
    pdl_next();
    pdl_wait();
    const uint32_t G = a.n_heads / a.n_kv, groups = (a.step.n_rows + AT_ROWS - 1) / AT_ROWS;
    uint32_t base = 0; /* tiles so far */
    for (uint32_t item = blockIdx.x; item < groups * a.n_kv; item += gridDim.x) {
        /* the last rows have the most positions: they go first */
        const uint32_t r0 = (groups - 1 - item / a.n_kv) * AT_ROWS, kvh = item % a.n_kv, r = r0 + warp;
        __syncthreads();
        if (tid < AT_ROWS) {
            s.pos[tid] = r0 + tid < a.step.n_rows ? __ldcg(a.step.pos + r0 + tid) : -1;
            s.seq[tid] = r0 + tid < a.step.n_rows ? __ldcg(a.step.seq + r0 + tid) : 0;
        }
        __syncthreads();
        for (uint32_t s0 = 0, s1; s0 < AT_ROWS; s0 = s1) { /* rows of one sequence at a time */
            int32_t last = -1;
            for (s1 = s0; s1 < AT_ROWS && (s.pos[s1] < 0 || s.seq[s1] == s.seq[s0]); ++s1) {
                last = s.pos[s1] > last ? s.pos[s1] : last;
            }
            if (last < 0) {
                s1 = s1 > s0 ? s1 : s0 + 1;
                continue;
            }
            const uint32_t n = attend_list(a, s, r0, s0, s1, last), tiles = (n + 3) / 4;
            const bool mine = warp >= s0 && warp < s1 && s.pos[warp] >= 0;
            const int32_t pos = s.pos[warp];
            /* lanes 0..15 copy keys, 16..31 values, a position each; nothing behind the last row's */
            const uint16_t *src = (const uint16_t *)(lane < 16 ? a.kv.k : a.kv.v) + kvh * ATT_D;
            auto fetch = [&](uint32_t t) {
                const uint32_t st = (base + t) % AT_STAGES, use = (base + t) / AT_STAGES;
                uint32_t e = t * 4 + (lane & 15) / 4;
                e = e < n ? e : n - 1;
                const uint32_t room = (uint32_t)last - s.block[e] * 4, i = lane & 3;
                const uint32_t at = s.slot[e] + (i < room ? i : room);
                bar_wait(&s.empty[st], (use & 1) ^ 1);
                if (lane == 0) {
                    bar_expect(&s.full[st], 2 * AT_POS * ATT_D * 2);
                }
                __syncwarp();
                bulk_load(lane < 16 ? s.stage[st].k[lane] : s.stage[st].v[lane & 15],
                          src + (uint64_t)at * a.n_kv * ATT_D, ATT_D * 2, &s.full[st]);
            };
            const uint32_t own = (warp + AT_STAGES - base % AT_STAGES) % AT_STAGES; /* tiles this warp fetches */
            if (own < tiles) {
                fetch(own);
            }
            uint32_t Q[16][4];
            {
                const float *q0 = a.q + ((uint64_t)r * a.n_heads + kvh * G + g) * ATT_D + q2, *q1 = q0 + 8 * ATT_D;
                const bool has0 = mine && g < G, has1 = mine && g + 8 < G;
#pragma unroll
                for (int kk = 0; kk < 16; ++kk) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float2 x = has0 ? __ldcg((const float2 *)(q0 + kk * 16 + e * 8)) : make_float2(0.0f, 0.0f);
                        const float2 y = has1 ? __ldcg((const float2 *)(q1 + kk * 16 + e * 8)) : make_float2(0.0f, 0.0f);
                        Q[kk][2 * e] = pack_bf16(x.x, x.y);
                        Q[kk][2 * e + 1] = pack_bf16(y.x, y.y);
                    }
                }
            }
            float O[32][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
            for (uint32_t t = 0; t < tiles; ++t) {
                /* refill what all warps left two tiles ago */
                const uint32_t ahead = t + AT_STAGES - 2;
                if (ahead >= AT_STAGES && ahead < tiles && ahead % AT_STAGES == own) {
                    fetch(ahead);
                }
                const uint32_t st = (base + t) % AT_STAGES;
                const uint32_t chosen = *(const uint32_t *)&s.rows[t * 4] >> warp & 0x01010101u;
                /* also for a tile that is skipped: a warp that ran ahead would be counted for one too few */
                bar_wait(&s.full[st], (base + t) / AT_STAGES & 1);
                if (mine && chosen) {
                    const attend_stage &w = s.stage[st];
                    const uint32_t kb = smem_u32(&w.k[(mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
                    const uint32_t vb = smem_u32(&w.v[(mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
                    float S[2][2][4] = {};
#pragma unroll
                    for (int kk = 0; kk < 16; ++kk) {
                        uint32_t b[4];
                        ldsm4(b, kb + kk * 32);
                        mma16(S[kk & 1][0], Q[kk], b[0], b[1]);
                        mma16(S[kk & 1][1], Q[kk], b[2], b[3]);
                    }
                    float p[2][4], top[2] = {m[0], m[1]};
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const uint32_t b = 2 * j + (q2 >> 2);
                        /* positions of the block that the row may see */
                        const int32_t see = chosen >> (8 * b) & 1 ? pos - (int32_t)(s.block[t * 4 + b] * 4 + (q2 & 2)) : -1;
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            /* log2 e / 16 */
                            p[j][e] = see >= (e & 1) ? (S[0][j][e] + S[1][j][e]) * 0.09016844005556021f : -INFINITY;
                            top[e >> 1] = fmaxf(top[e >> 1], p[j][e]);
                        }
                    }
                    float f[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 1));
                        top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], 2));
                        f[e] = exp2f(m[e] - top[e]);
                    }
                    if (__any_sync(0xffffffffu, top[0] != m[0] || top[1] != m[1])) {
#pragma unroll
                        for (int j = 0; j < 32; ++j) {
                            O[j][0] *= f[0];
                            O[j][1] *= f[0];
                            O[j][2] *= f[1];
                            O[j][3] *= f[1];
                        }
                        l[0] *= f[0];
                        l[1] *= f[1];
                        m[0] = top[0];
                        m[1] = top[1];
                    }
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            p[j][e] = exp2f(p[j][e] - m[e >> 1]);
                            l[e >> 1] += p[j][e];
                        }
                    }
                    const uint32_t P[4] = {pack_bf16(p[0][0], p[0][1]), pack_bf16(p[0][2], p[0][3]),
                                           pack_bf16(p[1][0], p[1][1]), pack_bf16(p[1][2], p[1][3])};
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        uint32_t b[4];
                        ldsm4t(b, vb + j * 32);
                        mma16(O[2 * j], P, b[0], b[1]);
                        mma16(O[2 * j + 1], P, b[2], b[3]);
                    }
                    __syncwarp();
                }
                if (lane == 0) {
                    bar_arrive(&s.empty[st]);
                }
            }
            base += tiles;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                l[e] += __shfl_xor_sync(0xffffffffu, l[e], 1);
                l[e] += __shfl_xor_sync(0xffffffffu, l[e], 2);
                if (mine && g + 8 * e < G) {
                    const uint32_t h = kvh * G + g + 8 * e;
                    const float *gate = a.in + (uint64_t)r * a.stride + (2 * h + 1) * ATT_D + q2;
                    float *out = a.o + ((uint64_t)r * a.n_heads + h) * ATT_D + q2;
                    const float inv = 1.0f / l[e];
#pragma unroll
                    for (int j = 0; j < 32; ++j) {
                        const float2 z = __ldcg((const float2 *)(gate + j * 8));
                        *(float2 *)(out + j * 8) = make_float2(O[j][2 * e] * inv * sigmoid_f(z.x),
                                                               O[j][2 * e + 1] * inv * sigmoid_f(z.y));
                    }
                }
            }
            __syncthreads();
        }
    }
}

bool attend_prompt_fits(const struct qx_queue *q, const struct qx_op_qsa_attend *o)
{
    const uintptr_t at = (uintptr_t)o->q | (uintptr_t)o->in | (uintptr_t)o->o | (uintptr_t)o->kv.k | (uintptr_t)o->kv.v;
    return o->prompt && o->act_bf16 && o->kv.bf16 && o->ratio == 4 && o->budget_blocks <= AT_BUDGET &&
           (uint64_t)o->kv.max_pages * o->kv.page_tokens / 4 + 4 <= sizeof(attend_stage) * AT_STAGES &&
           o->n_heads / o->n_kv_heads <= 16 && (at & 15) == 0 && o->in_stride % 2 == 0 && has_bulk(q) &&
           sizeof(attend_smem) <= (size_t)q->smem_max;
}

int attend_prompt(struct qx_queue *q, const att_args &a)
{
    const uint32_t items = (a.step.n_rows + AT_ROWS - 1) / AT_ROWS * a.n_kv;
    return launch(q, "qsa_attend", qsa_attend_rows, dim3(items < (uint32_t)q->n_sm ? items : q->n_sm),
                  dim3(AT_ROWS * 32), sizeof(attend_smem), a);
}
