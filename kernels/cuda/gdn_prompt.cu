/* gdn_prompt.cu: Gated DeltaNet for the long runs of a prompt, in the chunked form of the model description
 * on tensor cores. Five kernels: plan (cuts runs into chunks of 64 rows, also behind every row whose state is
 * kept), conv (convolution, norms of q and k, as bf16 terms), intra (per chunk: T = (I + A)^-1 diag(beta) by
 * substitution in f32, P = masked q k^T), scan (per value head and 64 value columns: from chunk to chunk, S in
 * registers) and norm (gated norm, conv history).
 *
 * scan holds S transposed as the accumulators of a product, one warp 16 value columns: accumulators are the
 * next product's left operand without a move, so the warps share nothing but the chunk's matrices, which a
 * fifth warp copies ahead. All f32 operands are two bf16 terms (mma.cuh). A NaN of a row reaches the rows of
 * its chunk before it too. Rows of short runs are left to the recurrent kernel. */
#include "gdn.cuh"
#include "mma.cuh"

enum {
    CH = 64,              /* rows a chunk */
    RP = 264,             /* bf16 from row to row of q and k in shared memory: 128 hi, 128 lo, pad */
    TP = 72,              /* bf16 from row to row of T and P */
    MIN_RUN = 33,         /* rows of the shortest run taken here */
    MAX_RUNS = 2048,
    MAX_WORDS = 2048,     /* of 32 rows */
    MAX_PLAN = 1088,      /* chunks of a step: 65536 / 64 + 64 */
    TAPS = 4
};

/* What intra makes of a chunk and value head. */
struct gdn_tile {
    uint16_t t[2][CH][TP], p[2][CH][TP]; /* hi, lo */
    float grow[CH];                      /* e^Gamma_t */
    float fade[CH];                      /* e^(Gamma_n - Gamma_t), 0 past the chunk's end */
    float total, pad[63];                /* e^Gamma_n */
};

struct gdn_plan {
    uint32_t n_chunks, n_runs, n_short;
    uint32_t pad[61];
    uint8_t zero[512];
    uint32_t mask[MAX_WORDS];
    struct { int32_t row, n, out, run; } chunk[MAX_PLAN];
    struct { int32_t chunk0, first, slot, pad; } run[MAX_RUNS];
};
#define PLAN_BYTES ((size_t)8 << 20) /* the plan and the carried states, before the tiles */
static_assert(sizeof(struct gdn_plan) < ((size_t)1 << 20), "the plan's place");

struct prompt_args {
    gdn_args g;
    uint32_t channels, max_chunks;
    float *conv;            /* [row][channels]: q, k heads as 128 hi, 128 lo bf16; v as f32 */
    struct gdn_plan *plan;
    float *carry;           /* S of the run that goes on in the next segment */
    struct gdn_tile *tile;  /* [chunk of the segment][v head] */
    uint32_t c0, c1;        /* chunks of this segment */
};

/* ---- plan ----------------------------------------------------------------------------------- */

/* First set bit at or after r, at most `limit`. */
__device__ __forceinline__ uint32_t next_bit(const uint32_t *bits, uint32_t r, uint32_t limit)
{
    for (uint32_t w = r / 32; w * 32 < limit; ++w) {
        const uint32_t b = w == r / 32 ? bits[w] & (0xffffffffu << (r & 31)) : bits[w];
        if (b) {
            const uint32_t at = w * 32 + __ffs(b) - 1;
            return at < limit ? at : limit;
        }
    }
    return limit;
}

__global__ void __launch_bounds__(1024) gdn_plan_rows(const __grid_constant__ prompt_args a)
{
    __shared__ uint32_t brk[MAX_WORDS], beg[MAX_WORDS], keep[MAX_WORDS], any[MAX_WORDS / 32 + 1];
    __shared__ uint64_t sums[32];
    __shared__ uint32_t left;
    pdl_next();
    pdl_wait();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, n = a.g.step.n_rows;
    const uint32_t words = (n + 31) / 32;
    struct gdn_plan *plan = a.plan;
    for (uint32_t w = warp; w < words; w += 32) {
        const uint32_t r = w * 32 + lane;
        const bool in = r < n, live = in && __ldcg(a.g.step.pos + r) >= 0;
        const bool starts = live && __ldcg(a.g.step.first + r) == (int32_t)r;
        const uint32_t b = __ballot_sync(0xffffffffu, !live || starts), s = __ballot_sync(0xffffffffu, starts),
                       k = __ballot_sync(0xffffffffu, live && __ldcg(a.g.step.state_out + r) >= 0);
        if (lane == 0) {
            brk[w] = b;
            beg[w] = s;
            keep[w] = k;
        }
    }
    if (tid < 128) {
        ((uint32_t *)plan->zero)[tid] = 0;
        left = 0;
    }
    __syncthreads();
    for (uint32_t w = warp; w * 32 < words; w += 32) {
        const uint32_t b = __ballot_sync(0xffffffffu, w * 32 + lane < words && brk[w * 32 + lane]);
        if (lane == 0) {
            any[w] = b;
        }
    }
    __syncthreads();
    const uint32_t per = (words + 1023) / 1024, w0 = tid * per, w1 = w0 + per < words ? w0 + per : words;
    uint64_t at = 0; /* runs << 32 | chunks, first counted, then where to write */
    bool fits = true;
    for (int pass = 0; pass < 2; ++pass) {
        uint64_t count = at;
        for (uint32_t w = w0; w < w1; ++w) {
            uint32_t taken = 0, cuts = brk[w] | 1;
            while (cuts) { /* pieces of the word between cuts lie in one run, or in none */
                const uint32_t i = __ffs(cuts) - 1, r = w * 32 + i, bit = 1u << i;
                cuts &= cuts - 1;
                if ((brk[w] & bit) && !(beg[w] & bit)) {
                    continue;
                }
                const uint32_t first = beg[w] & bit ? r : (uint32_t)__ldcg(a.g.step.first + r);
                /* the run's end: the next break, found by words that have any */
                const uint32_t piece = cuts ? w * 32 + __ffs(cuts) - 1 : (w + 1) * 32;
                uint32_t end = piece;
                if (!cuts && w + 1 < words) {
                    const uint32_t x = next_bit(any, w + 1, words);
                    end = x < words ? next_bit(brk, x * 32, n) : n;
                }
                end = end < n ? end : n;
                if (end - first < MIN_RUN) {
                    continue;
                }
                const uint32_t mask = (piece - r == 32 ? 0xffffffffu : (1u << (piece - r)) - 1) << i;
                taken |= mask;
                if (r == first) {
                    if (pass && fits) {
                        const uint32_t run = (uint32_t)(count >> 32);
                        plan->run[run].chunk0 = (int32_t)(uint32_t)count;
                        plan->run[run].first = (int32_t)first;
                        plan->run[run].slot = __ldcg(a.g.step.state_in + first);
                    }
                    count += (uint64_t)1 << 32;
                }
                /* chunks begin at every 64th row and behind each kept state */
                const uint32_t at64 = (first + (r - first + CH - 1) / CH * CH) - w * 32;
                uint32_t starts = keep[w] << 1 | (w ? keep[w - 1] >> 31 : 0);
                starts = (r == first ? starts & ~bit : starts) | (at64 < 32 ? 1u << at64 : 0);
                for (starts &= mask; starts; starts &= starts - 1) {
                    if (pass && fits) {
                        const uint32_t x = w * 32 + __ffs(starts) - 1;
                        const uint32_t room = CH - (x - first) % CH, most = end - x < room ? end - x : room;
                        const uint32_t k = next_bit(keep, x, x + most), rows = k < x + most ? k + 1 - x : most;
                        const uint32_t c = (uint32_t)count;
                        plan->chunk[c].row = (int32_t)x;
                        plan->chunk[c].n = (int32_t)rows;
                        plan->chunk[c].out = __ldcg(a.g.step.state_out + x + rows - 1);
                        plan->chunk[c].run = (int32_t)((uint32_t)(count >> 32) - 1);
                    }
                    ++count;
                }
            }
            if (pass) {
                taken = fits ? taken : 0;
                plan->mask[w] = taken;
                const uint32_t rest = ~(brk[w] & ~beg[w]) & ~taken; /* rows that are not idle */
                if (rest) {
                    atomicAdd(&left, __popc(rest));
                }
            }
        }
        if (pass) {
            __syncthreads();
            if (tid == 0) {
                plan->n_short = left;
            }
            break;
        }
        /* exclusive sum over the threads */
        uint64_t v = count;
#pragma unroll
        for (int i = 1; i < 32; i <<= 1) {
            const uint64_t o = __shfl_up_sync(0xffffffffu, v, i);
            v += lane >= (uint32_t)i ? o : 0;
        }
        if (lane == 31) {
            sums[warp] = v;
        }
        __syncthreads();
        uint64_t before = 0, total = 0;
        for (uint32_t i = 0; i < 32; ++i) {
            before += i < warp ? sums[i] : 0;
            total += sums[i];
        }
        at = before + v - count;
        fits = (uint32_t)total <= a.max_chunks && (total >> 32) <= MAX_RUNS;
        if (tid == 0) {
            plan->n_chunks = fits ? (uint32_t)total : 0;
            plan->n_runs = fits ? (uint32_t)(total >> 32) : 0;
        }
    }
}

/* ---- conv ----------------------------------------------------------------------------------- */

enum { CONV_R = 16 }; /* rows a warp */

/* 128 channels a warp: a head of q, of k, or of v; a lane four of them. Also keeps the history of a run's
 * first rows, which has entries of the old one. */
__global__ void __launch_bounds__(256) gdn_conv_rows(const __grid_constant__ prompt_args a)
{
    pdl_next();
    pdl_wait();
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, n = a.g.step.n_rows;
    const uint32_t head = blockIdx.x * 8 + warp, r0 = blockIdx.y * CONV_R;
    const uint32_t word = __ldcg(a.plan->mask + r0 / 32) >> (r0 & 31) & 0xffffu;
    if (head * GDN_D >= a.channels || word == 0) {
        return;
    }
    const uint32_t ch = head * GDN_D + lane * 4;
    float4 w[TAPS];
    {
        float t[16];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                t[c * 4 + j] = __ldg(a.g.conv_w + (uint64_t)(ch + c) * TAPS + j);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            w[j] = make_float4(t[j], t[4 + j], t[8 + j], t[12 + j]);
        }
    }
    const float *in = a.g.in + ch;
    float4 x[CONV_R + 3];
#pragma unroll
    for (int i = 0; i < CONV_R + 3; ++i) {
        const int32_t r = (int32_t)r0 + i - 3;
        x[i] = r >= 0 && r < (int32_t)n ? __ldcg((const float4 *)(in + (uint64_t)r * a.g.in_stride))
                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const int32_t my_first = lane < CONV_R && r0 + lane < n ? __ldcg(a.g.step.first + r0 + lane) : 0;
#pragma unroll
    for (int i = 0; i < CONV_R; ++i) {
        if (!(word >> i & 1)) {
            continue;
        }
        const uint32_t r = r0 + i, first = (uint32_t)__shfl_sync(0xffffffffu, my_first, i);
        float4 p[3] = {x[i], x[i + 1], x[i + 2]};
        if (r - first < 3) {
            const int32_t slot = __ldcg(a.g.step.state_in + first);
#pragma unroll
            for (int j = 0; j < 3; ++j) {
                const int32_t back = (int32_t)(r - first) + j - 3; /* rows from the run's first */
                if (back < 0) {
                    p[j] = slot < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                                    : __ldcg((const float4 *)(a.g.conv_state + slot * a.g.conv_stride +
                                                              (uint64_t)(3 + back) * a.channels + ch));
                }
            }
            const int32_t to = r - first < 2 ? __ldcg(a.g.step.state_out + r) : -1;
            if (to >= 0) {
                float *d = a.g.conv_state + to * a.g.conv_stride + ch;
                *(float4 *)d = p[1];
                *(float4 *)(d + a.channels) = p[2];
                *(float4 *)(d + 2 * (uint64_t)a.channels) = x[i + 3];
            }
        }
        float y[4];
#define QX_TAP(e, m)                                                                                     \
    y[e] = silu_f(fmaf(w[3].m, x[i + 3].m, fmaf(w[2].m, p[2].m, fmaf(w[1].m, p[1].m, w[0].m * p[0].m))))
        QX_TAP(0, x);
        QX_TAP(1, y);
        QX_TAP(2, z);
        QX_TAP(3, w);
#undef QX_TAP
        float *out = a.conv + (uint64_t)r * a.channels + head * GDN_D;
        if (head >= 2 * a.g.k_heads) {
            *(float4 *)(out + lane * 4) = make_float4(y[0], y[1], y[2], y[3]);
            continue;
        }
        float s = fmaf(y[0], y[0], fmaf(y[1], y[1], fmaf(y[2], y[2], y[3] * y[3])));
        s = 1.0f / sqrtf(warp_sum(s) + 1e-6f);
        if (head < a.g.k_heads) {
            s *= 0.088388347648318447f; /* 1 / sqrt(128) */
        }
        uint32_t h0, l0, h1, l1;
        split2(y[0] * s, y[1] * s, h0, l0);
        split2(y[2] * s, y[3] * s, h1, l1);
        *((uint2 *)out + lane) = make_uint2(h0, h1);
        *((uint2 *)out + 32 + lane) = make_uint2(l0, l1);
    }
}

/* ---- intra ---------------------------------------------------------------------------------- */

#define GP 68 /* floats from row to row of the products */

struct intra_smem {
    union {
        uint16_t qk[2][CH][RP];      /* q, k */
        float a[4][CH][GP];          /* A of each value head */
    };
    float g[2][CH][GP];              /* k k^T, q k^T */
    double gamma[4][CH];
    float beta[4][CH];
};

/* Column `col` of (I + A)^-1 for rows from B0 (A strictly lower, zero above the column), times beta. */
template <int B0>
__device__ __forceinline__ void solve(const float (*A)[GP], const float *beta, uint16_t (*t)[CH][TP], uint32_t lane)
{
    constexpr int N = CH - B0;
    float c[N];
    const int col = (int)lane;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k + 4 <= i; k += 4) {
            const float4 v = *(const float4 *)&A[B0 + i][B0 + k];
            s[0] = fmaf(v.x, c[k], s[0]);
            s[1] = fmaf(v.y, c[k + 1], s[1]);
            s[2] = fmaf(v.z, c[k + 2], s[2]);
            s[3] = fmaf(v.w, c[k + 3], s[3]);
        }
#pragma unroll
        for (int k = i / 4 * 4; k < i; ++k) {
            s[k & 3] = fmaf(A[B0 + i][B0 + k], c[k], s[k & 3]);
        }
        c[i] = (i == col ? 1.0f : 0.0f) - ((s[0] + s[1]) + (s[2] + s[3]));
    }
    const float b = beta[B0 + col];
    const uint32_t odd = lane & 1;
#pragma unroll
    for (int i = 0; i < N; i += 2) { /* an even lane writes row i of its pair of columns, an odd one row i + 1 */
        const float mine = (odd ? c[i + 1] : c[i]) * b, other = (odd ? c[i] : c[i + 1]) * b;
        const float got = __shfl_xor_sync(0xffffffffu, other, 1);
        uint32_t hi, lo;
        split2(odd ? got : mine, odd ? mine : got, hi, lo);
        *(uint32_t *)&t[0][B0 + i + odd][B0 + (col & ~1)] = hi;
        *(uint32_t *)&t[1][B0 + i + odd][B0 + (col & ~1)] = lo;
    }
}

__device__ void intra_chunk(const prompt_args &a, intra_smem &s, uint32_t c, uint32_t kh)
{
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, group = a.g.group;
    const uint32_t row = (uint32_t)__ldcg(&a.plan->chunk[c].row), n = (uint32_t)__ldcg(&a.plan->chunk[c].n);
    struct gdn_tile *tile = a.tile + (uint64_t)(c - a.c0) * a.g.v_heads + kh * group;
    /* q and k rows: 32 units of 16 bytes each */
    for (uint32_t i = tid; i < 2 * CH * 32; i += 256) {
        const uint32_t m = i / (CH * 32), r = i / 32 % CH, u = i % 32;
        if (r < n) {
            copy16(&s.qk[m][r][u * 8],
                   (const uint4 *)(a.conv + (uint64_t)(row + r) * a.channels + (m * a.g.k_heads + kh) * GDN_D) + u);
        } else {
            *(uint4 *)&s.qk[m][r][u * 8] = make_uint4(0, 0, 0, 0);
        }
    }
    copy_commit();
    if (warp < group) {
        /* gates of one value head: rows lane * 2 and lane * 2 + 1 */
        const uint32_t h = kh * group + warp, b0 = a.channels + a.g.v_heads * GDN_D + h;
        const float rate = -expf(__ldg(a.g.a_log + h)), bias = __ldg(a.g.dt_bias + h);
        double g[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t r = lane * 2 + e;
            g[e] = 0.0;
            float beta = 0.0f;
            if (r < n) {
                const float *in = a.g.in + (uint64_t)(row + r) * a.g.in_stride + b0;
                g[e] = (double)(rate * softplus_f(__ldcg(in + a.g.v_heads) + bias));
                beta = sigmoid_f(__ldcg(in));
            }
            s.beta[warp][r] = beta;
        }
        double sum = g[0] + g[1];
#pragma unroll
        for (int i = 1; i < 32; i <<= 1) {
            const double o = __shfl_up_sync(0xffffffffu, sum, i);
            sum += lane >= (uint32_t)i ? o : 0.0;
        }
        s.gamma[warp][lane * 2 + 1] = sum;
        s.gamma[warp][lane * 2] = sum - g[1];
        const double last = __shfl_sync(0xffffffffu, sum, 31);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t r = lane * 2 + e;
            const double v = e ? sum : sum - g[1];
            tile[warp].grow[r] = expf((float)v);
            tile[warp].fade[r] = r < n ? expf((float)(last - v)) : 0.0f;
        }
        if (lane == 0) {
            tile[warp].total = expf((float)last);
        }
    }
    copy_wait<0>();
    __syncthreads();
    { /* warp (m, which): rows 16 m .. of k k^T or q k^T, columns up to the diagonal */
        const uint32_t m = warp & 3, which = warp / 4, mi = lane / 8;
        float acc[8][4] = {};
        const uint32_t A = smem_u32(&s.qk[which ? 0 : 1][m * 16 + (mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
        const uint32_t B = smem_u32(&s.qk[1][(mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            uint32_t hi[4], lo[4];
            ldsm4(hi, A + kk * 32);
            ldsm4(lo, A + 256 + kk * 32);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j <= (int)m) {
                    uint32_t bh[4], bl[4];
                    ldsm4(bh, B + j * 16 * RP * 2 + kk * 32);
                    ldsm4(bl, B + j * 16 * RP * 2 + 256 + kk * 32);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        mma16(acc[2 * j + e], hi, bh[2 * e], bh[2 * e + 1]);
                        mma16(acc[2 * j + e], lo, bh[2 * e], bh[2 * e + 1]);
                        mma16(acc[2 * j + e], hi, bl[2 * e], bl[2 * e + 1]);
                    }
                }
            }
        }
        const uint32_t r = m * 16 + lane / 4, q = (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j <= 2 * (int)m + 1) {
                *(float2 *)&s.g[which][r][j * 8 + q] = make_float2(acc[j][0], acc[j][1]);
                *(float2 *)&s.g[which][r + 8][j * 8 + q] = make_float2(acc[j][2], acc[j][3]);
            }
        }
    }
    __syncthreads();
    /* A and P where they can be other than zero: 16 x 16 blocks on and below the diagonal */
#pragma unroll 4
    for (uint32_t i = warp; i < group * CH; i += 8) {
        const uint32_t h = i / CH, t = i % CH, col = lane * 2;
        if (col < (t / 16 + 1) * 16) {
            const double gt = s.gamma[h][t];
            const float b = s.beta[h][t];
            float av[2], pv[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t x = col + e;
                const float f = x <= t ? expf((float)(gt - s.gamma[h][x])) : 0.0f;
                av[e] = x < t ? b * s.g[0][t][x] * f : 0.0f;
                pv[e] = x <= t ? s.g[1][t][x] * f : 0.0f;
            }
            *(float2 *)&s.a[h][t][col] = make_float2(av[0], av[1]);
            uint32_t hi, lo;
            split2(pv[0], pv[1], hi, lo);
            *(uint32_t *)&tile[h].p[0][t][col] = hi;
            *(uint32_t *)&tile[h].p[1][t][col] = lo;
        }
    }
    __syncthreads();
    if (warp < 2 * group) {
        const uint32_t h = warp >> 1;
        if (warp & 1) {
            solve<32>(s.a[h], s.beta[h], tile[h].t, lane);
        } else {
            solve<0>(s.a[h], s.beta[h], tile[h].t, lane);
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(256, 2) gdn_intra(const __grid_constant__ prompt_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    pdl_next();
    pdl_wait();
    const uint32_t all = __ldcg(&a.plan->n_chunks), c1 = a.c1 < all ? a.c1 : all;
    for (uint64_t i = (uint64_t)a.c0 * a.g.k_heads + blockIdx.x; i < (uint64_t)c1 * a.g.k_heads; i += gridDim.x) {
        intra_chunk(a, *(intra_smem *)mem, (uint32_t)(i / a.g.k_heads), (uint32_t)(i % a.g.k_heads));
    }
}

/* ---- scan ----------------------------------------------------------------------------------- */

struct scan_stage {
    uint16_t k[CH][RP], q[CH][RP];
    struct gdn_tile tile;
};
struct scan_smem {
    struct scan_stage stage[2];
    uint64_t full[2], empty[2];
};

struct scan_item {
    uint32_t head, half, first, c0, c1;
    int32_t slot;
    bool from_start, to_end;
};
__device__ __forceinline__ scan_item scan_get(const prompt_args &a, uint32_t i, uint32_t n_runs, uint32_t all)
{
    const uint32_t per = a.g.v_heads * 2, run = i / per;
    scan_item x;
    x.head = i % per / 2;
    x.half = i & 1;
    const uint32_t c0 = (uint32_t)__ldcg(&a.plan->run[run].chunk0);
    const uint32_t c1 = run + 1 < n_runs ? (uint32_t)__ldcg(&a.plan->run[run + 1].chunk0) : all;
    x.first = (uint32_t)__ldcg(&a.plan->run[run].first);
    x.slot = __ldcg(&a.plan->run[run].slot);
    x.from_start = c0 >= a.c0;
    x.to_end = c1 <= a.c1;
    x.c0 = x.from_start ? c0 : a.c0;
    x.c1 = x.to_end ? c1 : a.c1;
    return x;
}

__device__ void scan_copy(const prompt_args &a, scan_smem &s, uint32_t lane, uint32_t n_runs, uint32_t all)
{
    uint32_t it = 0;
    for (uint32_t i = blockIdx.x; i < n_runs * a.g.v_heads * 2; i += gridDim.x) {
        const scan_item x = scan_get(a, i, n_runs, all);
        const uint32_t kh = x.head / a.g.group;
        for (uint32_t c = x.c0; c < x.c1; ++c, ++it) {
            const uint32_t st = it & 1;
            const uint32_t row = (uint32_t)__ldcg(&a.plan->chunk[c].row), n = (uint32_t)__ldcg(&a.plan->chunk[c].n);
            scan_stage &g = s.stage[st];
            bar_wait(&s.empty[st], (it >> 1 & 1) ^ 1);
            if (lane == 0) {
                bar_expect(&s.full[st], 2 * CH * 512 + (uint32_t)sizeof(struct gdn_tile));
                bulk_load(&g.tile, a.tile + (uint64_t)(c - a.c0) * a.g.v_heads + x.head,
                          (uint32_t)sizeof(struct gdn_tile), &s.full[st]);
            }
            __syncwarp();
#pragma unroll
            for (uint32_t e = 0; e < 2; ++e) {
                const uint32_t r = lane + 32 * e;
                const float *q = a.conv + (uint64_t)(row + r) * a.channels + kh * GDN_D;
                bulk_load(g.q[r], r < n ? (const void *)q : a.plan->zero, 512, &s.full[st]);
                bulk_load(g.k[r], r < n ? (const void *)(q + a.g.k_heads * GDN_D) : a.plan->zero, 512, &s.full[st]);
            }
        }
    }
}

/* d += a b over 16 columns of b' n-tiles 2 j, 2 j + 1, both operands in two terms. */
__device__ __forceinline__ void mma_terms(float (&d0)[4], float (&d1)[4], const uint32_t (&hi)[4],
                                          const uint32_t (&lo)[4], const uint32_t (&bh)[4], const uint32_t (&bl)[4])
{
    mma16(d0, hi, bh[0], bh[1]);
    mma16(d1, hi, bh[2], bh[3]);
    mma16(d0, lo, bh[0], bh[1]);
    mma16(d1, lo, bh[2], bh[3]);
    mma16(d0, hi, bl[0], bl[1]);
    mma16(d1, hi, bl[2], bl[3]);
}

__device__ void scan_run(const prompt_args &a, scan_smem &s, uint32_t n_runs, uint32_t all)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, q2 = (lane & 3) * 2, mi = lane / 8;
    const uint32_t rowsel = ((mi >> 1) * 8 + (lane & 7)), colsel = (mi & 1) * 8; /* B as stored */
    const uint32_t trow = ((mi & 1) * 8 + (lane & 7)), tcol = (mi >> 1) * 8;     /* B transposed */
    uint32_t it = 0;
    for (uint32_t i = blockIdx.x; i < n_runs * a.g.v_heads * 2; i += gridDim.x) {
        const scan_item x = scan_get(a, i, n_runs, all);
        if (x.c0 >= x.c1) {
            continue;
        }
        const uint32_t v = x.half * 64 + warp * 16 + g; /* this lane's columns: v and v + 8 */
        const uint64_t head_at = (uint64_t)x.head * GDN_D * GDN_D;
        float S[16][4], V[8][4];
        {
            const float *p = x.from_start ? a.g.s + x.slot * a.g.s_stride + head_at : a.carry + head_at;
            const bool has = !x.from_start || x.slot >= 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    S[j][e] = has ? __ldcg(p + (uint64_t)(j * 8 + q2 + (e & 1)) * GDN_D + v + (e >> 1) * 8) : 0.0f;
                }
            }
        }
        const float *vs = a.conv + (uint64_t)2 * a.g.k_heads * GDN_D + x.head * GDN_D + v;
        uint32_t row = (uint32_t)__ldcg(&a.plan->chunk[x.c0].row), n = (uint32_t)__ldcg(&a.plan->chunk[x.c0].n);
#define QX_LOAD_V()                                                                                      \
    _Pragma("unroll") for (int j = 0; j < 8; ++j) {                                                      \
        _Pragma("unroll") for (int e = 0; e < 4; ++e) {                                                  \
            const uint32_t t = j * 8 + q2 + (e & 1);                                                     \
            V[j][e] = t < n ? __ldcg(vs + (uint64_t)(row + t) * a.channels + (e >> 1) * 8) : 0.0f;       \
        }                                                                                                \
    }
        QX_LOAD_V()
        for (uint32_t c = x.c0; c < x.c1; ++c, ++it) {
            const uint32_t st = it & 1, cur_row = row, cur_n = n;
            const int32_t to = __ldcg(&a.plan->chunk[c].out);
            scan_stage &gs = s.stage[st];
            const uint32_t kb = smem_u32(&gs.k[rowsel][colsel]), qb = smem_u32(&gs.q[rowsel][colsel]);
            float X[8][4] = {}, O[8][4] = {};
            bar_wait(&s.full[st], it >> 1 & 1);
            /* X = (k S)^T, O = (q S)^T */
#pragma unroll
            for (int kk = 0; kk < 8; ++kk) {
                uint32_t hi[4], lo[4];
                split2(S[2 * kk][0], S[2 * kk][1], hi[0], lo[0]);
                split2(S[2 * kk][2], S[2 * kk][3], hi[1], lo[1]);
                split2(S[2 * kk + 1][0], S[2 * kk + 1][1], hi[2], lo[2]);
                split2(S[2 * kk + 1][2], S[2 * kk + 1][3], hi[3], lo[3]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32_t bh[4], bl[4];
                    ldsm4(bh, kb + j * 16 * RP * 2 + kk * 32);
                    ldsm4(bl, kb + j * 16 * RP * 2 + kk * 32 + 256);
                    mma_terms(X[2 * j], X[2 * j + 1], hi, lo, bh, bl);
                    ldsm4(bh, qb + j * 16 * RP * 2 + kk * 32);
                    ldsm4(bl, qb + j * 16 * RP * 2 + kk * 32 + 256);
                    mma_terms(O[2 * j], O[2 * j + 1], hi, lo, bh, bl);
                }
            }
            /* X = v - e^Gamma k S, as left operand */
            uint32_t xh[4][4], xl[4][4];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 w = *(const float2 *)&gs.tile.grow[j * 8 + q2];
                split2(fmaf(-w.x, X[j][0], V[j][0]), fmaf(-w.y, X[j][1], V[j][1]), xh[j / 2][(j & 1) * 2],
                       xl[j / 2][(j & 1) * 2]);
                split2(fmaf(-w.x, X[j][2], V[j][2]), fmaf(-w.y, X[j][3], V[j][3]), xh[j / 2][(j & 1) * 2 + 1],
                       xl[j / 2][(j & 1) * 2 + 1]);
                O[j][0] *= w.x;
                O[j][1] *= w.y;
                O[j][2] *= w.x;
                O[j][3] *= w.y;
            }
            if (c + 1 < x.c1) { /* the next chunk's values travel meanwhile */
                row = (uint32_t)__ldcg(&a.plan->chunk[c + 1].row);
                n = (uint32_t)__ldcg(&a.plan->chunk[c + 1].n);
                QX_LOAD_V()
            }
            /* V' = T X */
            float Y[8][4] = {};
            const uint32_t tb = smem_u32(&gs.tile.t[0][rowsel][colsel]), pb = smem_u32(&gs.tile.p[0][rowsel][colsel]);
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
                for (int j = kk; j < 4; ++j) {
                    uint32_t bh[4], bl[4];
                    ldsm4(bh, tb + j * 16 * TP * 2 + kk * 32);
                    ldsm4(bl, tb + j * 16 * TP * 2 + kk * 32 + CH * TP * 2);
                    mma_terms(Y[2 * j], Y[2 * j + 1], xh[kk], xl[kk], bh, bl);
                }
            }
            /* O += P V' */
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
                uint32_t hi[4], lo[4];
                split2(Y[2 * kk][0], Y[2 * kk][1], hi[0], lo[0]);
                split2(Y[2 * kk][2], Y[2 * kk][3], hi[1], lo[1]);
                split2(Y[2 * kk + 1][0], Y[2 * kk + 1][1], hi[2], lo[2]);
                split2(Y[2 * kk + 1][2], Y[2 * kk + 1][3], hi[3], lo[3]);
#pragma unroll
                for (int j = kk; j < 4; ++j) {
                    uint32_t bh[4], bl[4];
                    ldsm4(bh, pb + j * 16 * TP * 2 + kk * 32);
                    ldsm4(bl, pb + j * 16 * TP * 2 + kk * 32 + CH * TP * 2);
                    mma_terms(O[2 * j], O[2 * j + 1], hi, lo, bh, bl);
                }
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint32_t t = j * 8 + q2 + (e & 1);
                    if (t < cur_n) {
                        a.g.out[((uint64_t)(cur_row + t) * a.g.v_heads + x.head) * GDN_D + v + (e >> 1) * 8] = O[j][e];
                    }
                }
            }
            /* S = e^Gamma_n S + k^T e^(Gamma_n - Gamma) V' */
            const float total = gs.tile.total;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    S[j][e] *= total;
                }
            }
            const uint32_t ktb = smem_u32(&gs.k[trow][tcol]);
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
                uint32_t hi[4], lo[4];
                const float2 f0 = *(const float2 *)&gs.tile.fade[kk * 16 + q2],
                             f1 = *(const float2 *)&gs.tile.fade[kk * 16 + 8 + q2];
                split2(Y[2 * kk][0] * f0.x, Y[2 * kk][1] * f0.y, hi[0], lo[0]);
                split2(Y[2 * kk][2] * f0.x, Y[2 * kk][3] * f0.y, hi[1], lo[1]);
                split2(Y[2 * kk + 1][0] * f1.x, Y[2 * kk + 1][1] * f1.y, hi[2], lo[2]);
                split2(Y[2 * kk + 1][2] * f1.x, Y[2 * kk + 1][3] * f1.y, hi[3], lo[3]);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    uint32_t bh[4], bl[4];
                    ldsm4t(bh, ktb + kk * 16 * RP * 2 + j * 32);
                    ldsm4t(bl, ktb + kk * 16 * RP * 2 + j * 32 + 256);
                    mma_terms(S[2 * j], S[2 * j + 1], hi, lo, bh, bl);
                }
            }
            __syncwarp();
            if (lane == 0) {
                bar_arrive(&s.empty[st]);
            }
            if (to >= 0 || (c + 1 == x.c1 && !x.to_end)) {
                float *p = to >= 0 ? a.g.s + to * a.g.s_stride + head_at : a.carry + head_at;
#pragma unroll
                for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            p[(uint64_t)(j * 8 + q2 + (e & 1)) * GDN_D + v + (e >> 1) * 8] = S[j][e];
                        }
                    }
                    if (to < 0 || !(c + 1 == x.c1 && !x.to_end)) {
                        break;
                    }
                    p = a.carry + head_at;
                }
            }
        }
#undef QX_LOAD_V
    }
}

__global__ void __launch_bounds__(160, 1) gdn_scan(const __grid_constant__ prompt_args a)
{
    extern __shared__ __align__(128) uint8_t mem[];
    scan_smem &s = *(scan_smem *)mem;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            bar_init(&s.full[i], 1);
            bar_init(&s.empty[i], 4);
        }
        bar_init_done();
    }
    __syncthreads();
    pdl_next();
    pdl_wait();
    const uint32_t n_runs = __ldcg(&a.plan->n_runs), all = __ldcg(&a.plan->n_chunks);
    if (threadIdx.x >= 128) {
        scan_copy(a, s, threadIdx.x - 128, n_runs, all);
    } else {
        scan_run(a, s, n_runs, all);
    }
}

/* ---- norm ----------------------------------------------------------------------------------- */

/* A row and value head a warp; then the history of rows that keep a state (from the third on: entries of the
 * step's own rows only). */
__global__ void __launch_bounds__(256) gdn_norm_rows(const __grid_constant__ prompt_args a)
{
    pdl_next();
    pdl_wait();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = blockIdx.x;
    if (!(__ldcg(a.plan->mask + r / 32) >> (r & 31) & 1)) {
        return;
    }
    const float *in = a.g.in + (uint64_t)r * a.g.in_stride;
    const float4 w = __ldg((const float4 *)a.g.norm + lane);
    for (uint32_t h = warp; h < a.g.v_heads; h += 8) {
        float4 *o = (float4 *)(a.g.out + ((uint64_t)r * a.g.v_heads + h) * GDN_D) + lane;
        const float4 x = __ldcg(o), z = __ldcg((const float4 *)(in + a.channels + h * GDN_D) + lane);
        const float q = warp_sum(fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w))));
        const float f = 1.0f / sqrtf(q / (float)GDN_D + a.g.eps);
        *o = make_float4(x.x * f * w.x * sigmoid_f(z.x), x.y * f * w.y * sigmoid_f(z.y),
                         x.z * f * w.z * sigmoid_f(z.z), x.w * f * w.w * sigmoid_f(z.w));
    }
    const int32_t to = __ldcg(a.g.step.state_out + r);
    if (to >= 0 && (int32_t)r - __ldcg(a.g.step.first + r) >= 2) {
        float4 *d = (float4 *)(a.g.conv_state + to * a.g.conv_stride);
        const uint32_t c4 = a.channels / 4;
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < 3 * c4; i += 256) {
            const uint32_t j = i / c4, ch = i - j * c4;
            d[i] = __ldcg((const float4 *)(a.g.in + (uint64_t)(r - 2 + j) * a.g.in_stride) + ch);
        }
    }
}

/* ---- host ----------------------------------------------------------------------------------- */

bool gdn_prompt_fits(struct qx_queue *q, const struct qx_op_gdn *o)
{
    const uint64_t channels = (2ull * o->k_heads + o->v_heads) * GDN_D;
    const uintptr_t a = (uintptr_t)o->in | (uintptr_t)o->scratch | (uintptr_t)o->conv_state | (uintptr_t)o->out |
                        (uintptr_t)o->norm;
    return o->prompt && o->step->n_rows >= MIN_RUN && o->step->n_rows <= MAX_WORDS * 32 && o->conv_kernel == TAPS &&
           (a & 15) == 0 && o->in_stride % 4 == 0 && o->conv_slot_stride % 4 == 0 &&
           o->v_heads * GDN_D * GDN_D * 4 + ((size_t)1 << 20) <= PLAN_BYTES && channels < (1u << 24) && has_bulk(q) &&
           sizeof(intra_smem) <= (size_t)q->smem_max && sizeof(scan_smem) <= (size_t)q->smem_max;
}

int gdn_prompt(struct qx_queue *q, const struct qx_op_gdn *o, gdn_args *g)
{
    const uint32_t n = o->step->n_rows;
    prompt_args a = {};
    a.plan = (struct gdn_plan *)q->ws;
    a.carry = (float *)(q->ws + ((size_t)1 << 20));
    a.tile = (struct gdn_tile *)(q->ws + PLAN_BYTES);
    g->chunked = a.plan->mask;
    g->n_short = &a.plan->n_short;
    a.g = *g;
    a.channels = (2 * o->k_heads + o->v_heads) * GDN_D;
    a.max_chunks = n / CH + 32 < MAX_PLAN ? n / CH + 32 : MAX_PLAN;
    a.conv = o->scratch;
    const uint32_t cap = (uint32_t)((QX_WS_BYTES - PLAN_BYTES) / sizeof(struct gdn_tile) / o->v_heads);
    int r = launch(q, "gdn", gdn_plan_rows, dim3(1), dim3(1024), 0, a);
    r = r ? r : launch(q, "gdn", gdn_conv_rows, dim3((a.channels / GDN_D + 7) / 8, (n + CONV_R - 1) / CONV_R),
                       dim3(256), 0, a);
    for (a.c0 = 0; a.c0 < a.max_chunks && !r; a.c0 += cap) {
        a.c1 = a.c0 + cap;
        r = launch(q, "gdn", gdn_intra, dim3(2 * q->n_sm), dim3(256), sizeof(intra_smem), a);
        r = r ? r : launch(q, "gdn", gdn_scan, dim3(q->n_sm), dim3(160), sizeof(scan_smem), a);
    }
    return r ? r : launch(q, "gdn", gdn_norm_rows, dim3(n), dim3(256), 0, a);
}
