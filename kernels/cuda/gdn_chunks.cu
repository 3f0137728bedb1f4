/* gdn_chunks.cu: the chunks of a prompt's runs (gdn_prompt.cu). intra makes, per chunk, T = (I + A)^-1 diag(beta) by
 * substitution in f32 and P = masked q k^T; scan goes, per value head and 64 value columns, from chunk to chunk, S in
 * registers.
 *
 * scan holds S transposed as the accumulators of a product, one warp 16 value columns: accumulators are the
 * next product's left operand without a move, so the warps share nothing but the chunk's matrices, which a
 * fifth warp copies ahead. All f32 operands are two bf16 terms (mma.cuh). */
#include "gdn_prompt.cuh"

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
        sum = warp_upto(sum, lane);
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
        const uint32_t A = smem_addr(&s.qk[which ? 0 : 1][m * 16 + (mi & 1) * 8 + (lane & 7)][(mi >> 1) * 8]);
        const uint32_t B = smem_addr(&s.qk[1][(mi >> 1) * 8 + (lane & 7)][(mi & 1) * 8]);
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

/* Two tiles of sums as a left operand. */
__device__ __forceinline__ void split8(const float (&x)[4], const float (&y)[4], uint32_t (&hi)[4], uint32_t (&lo)[4])
{
    split2(x[0], x[1], hi[0], lo[0]);
    split2(x[2], x[3], hi[1], lo[1]);
    split2(y[0], y[1], hi[2], lo[2]);
    split2(y[2], y[3], hi[3], lo[3]);
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
            const uint32_t kb = smem_addr(&gs.k[rowsel][colsel]), qb = smem_addr(&gs.q[rowsel][colsel]);
            float X[8][4] = {}, O[8][4] = {};
            bar_wait(&s.full[st], it >> 1 & 1);
            /* X = (k S)^T, O = (q S)^T */
#pragma unroll
            for (int kk = 0; kk < 8; ++kk) {
                uint32_t hi[4], lo[4];
                split8(S[2 * kk], S[2 * kk + 1], hi, lo);
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
            const uint32_t tb = smem_addr(&gs.tile.t[0][rowsel][colsel]), pb = smem_addr(&gs.tile.p[0][rowsel][colsel]);
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
                split8(Y[2 * kk], Y[2 * kk + 1], hi, lo);
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
            const uint32_t ktb = smem_addr(&gs.k[trow][tcol]);
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

/* ---- host ----------------------------------------------------------------------------------- */

bool gdn_chunks_fit(const struct qx_queue *q)
{
    return sizeof(intra_smem) <= (size_t)q->smem_max && sizeof(scan_smem) <= (size_t)q->smem_max;
}

int gdn_chunks(struct qx_queue *q, const prompt_args &a)
{
    const int r = launch(q, "gdn", gdn_intra, dim3(2 * q->n_sm), dim3(256), sizeof(intra_smem), a);
    return r ? r : launch(q, "gdn", gdn_scan, dim3(q->n_sm), dim3(160), sizeof(scan_smem), a);
}
