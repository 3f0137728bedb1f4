/* hc_stream.cu: hyper-connection of the released width with BF16 matrices and inputs of products rounded to bf16, in
 * one kernel of a block a multiprocessor, all of which run at once. A block holds ten rows of down in one stream's
 * columns and all of up for twenty columns of m; four more hold inject, a stream each. All of it is in shared memory
 * before the op before has ended, and what is left is a chain of latencies: hence a thread has few instructions, and
 * sizes are constants.
 *
 * First a block normalises its stream and multiplies with down or inject; then it needs what the others found. Sums
 * travel as words of a value and the number of this launch (common.cuh), which readers poll: no barrier, and no
 * fence, since a word says by itself that it has arrived. The number comes from a counter that the last block moves
 * on when it has seen words of every block, none of which reads it again. Streams are written back behind the
 * sums too, since other blocks read them until then; 1 / rms comes from the last block to read a stream.
 *
 * More than one row: two blocks of a stream are a cluster, each normalises half of the rows and reads half of the
 * sums and sends both what comes of it (st.async), since L2 bounds what all blocks together read.
 *
 * Blocks that poll hold their multiprocessors, so all have to be there: as many multiprocessors as blocks, by twos
 * that a cluster can have, and no other such kernel at the same time (one queue of a device does a model's steps).
 *
 * Sums depend on the matrices only: of a row of down in a stream warp w adds the pairs of steps w, w + HC_WARPS, ..,
 * of a row of up one warp adds all, four quarters of a pair apart, so that a row's bits do not depend on the
 * number of rows. */
#include "stream.cuh"

#define HC_C 4u
#define HC_HIDDEN 2560u
#define HC_RANK 320u
#define HC_WARPS 10u
#define HC_THREADS (HC_WARPS * 32)
#define HC_QUADS (HC_HIDDEN / 4 / HC_THREADS) /* of four columns of a stream a thread */
#define HC_ROWS 10u                           /* of down a block */
#define HC_TILES (HC_RANK / HC_ROWS)
#define HC_ND 20u                             /* columns of m a block */
#define HC_GROUP 8u                           /* rows of activations multiplied at once */
#define HC_PAIR 128u                          /* bytes of a pair of steps */
#define HC_PITCH (HC_HIDDEN * 2 + 64)
#define HC_LO_PITCH (HC_RANK * 2 + 64)
#define HC_WORDS_ROW (HC_RANK + HC_C + 4)     /* of a row and stream: sums of down, of inject, 1 / rms */
/* bytes of shared memory: down, up, and for each row of a group its input, inner values and sums of warps */
#define HC_UP (HC_ROWS * HC_PITCH)
#define HC_XS (HC_UP + HC_C * HC_ND * HC_RANK * 2)
#define HC_ROW_BYTES (HC_PITCH + HC_LO_PITCH + HC_WARPS * 16 * 4)
static_assert(HC_QUADS * 4 * HC_THREADS == HC_HIDDEN && HC_RANK == HC_THREADS && HC_TILES * HC_ROWS == HC_RANK &&
                  HC_C * HC_ND == 8 * HC_WARPS && HC_TILES * HC_C * HC_ND == HC_HIDDEN,
              "what the roles of threads and blocks rest on");

struct hc_stream_args {
    uint32_t n_rows, group; /* group: rows a block has room for at once */
    float *x;
    const float *y, *inj_in, *norm;
    float eps;
    const uint8_t *down, *inject, *up;
    float *m, *inj_out;
    uint64_t *words;
    unsigned *number;
};

/* 16 rows of a matrix (row g in a0, row g + 8 in a1 of lane (g, q)) times rows of activations, a pair of steps. */
__device__ __forceinline__ void hc_pair(float (&c)[4][4], const uint4 &a0, const uint4 &a1, const uint4 &x, uint32_t i)
{
    mma_bf16(c[2 * i], a0.x, a1.x, a0.y, a1.y, x.x, x.y);
    mma_bf16(c[2 * i + 1], a0.z, a1.z, a0.w, a1.w, x.z, x.w);
}
/* A quarter warp that wants nothing costs nothing. */
__device__ __forceinline__ uint4 hc_read(const uint8_t *p, bool in)
{
    return in ? *(const uint4 *)p : make_uint4(0, 0, 0, 0);
}
/* A pair of steps of a row of up: odd rows are read in the other order, so that a quarter warp meets no bank twice. */
__device__ __forceinline__ void hc_load(uint4 (&w)[2], const uint8_t *row, bool odd)
{
    const uint4 a = *(const uint4 *)(row + (odd ? 64 : 0)), b = *(const uint4 *)(row + (odd ? 0 : 64));
    w[0] = odd ? b : a;
    w[1] = odd ? a : b;
}
__device__ __forceinline__ float hc_sum(const float (&c)[4][4], int e)
{
    return (c[0][e] + c[1][e]) + (c[2][e] + c[3][e]);
}
__device__ __forceinline__ float hc_sigmoid(float v)
{
    return __fdividef(1.0f, 1.0f + __expf(-v));
}
__device__ __forceinline__ bool hc_late(uint64_t w, uint32_t number)
{
    return (uint32_t)(w >> 32) != number;
}
__device__ __forceinline__ bool hc_late(const uint64_t (&w)[HC_C], uint32_t number)
{
    return hc_late(w[0], number) || hc_late(w[1], number) || hc_late(w[2], number) || hc_late(w[3], number);
}
__device__ __forceinline__ float hc_value(uint64_t w)
{
    return __uint_as_float((uint32_t)w);
}

/* Of the sums of all streams. */
__device__ __forceinline__ float hc_mean(const uint64_t (&w)[HC_C])
{
    return ((hc_value(w[0]) + hc_value(w[1])) + (hc_value(w[2]) + hc_value(w[3]))) * (1.0f / HC_C);
}

/* B: rows of activations whose loads are in flight at once. PAIR: more than one row. */
template <int B, bool PAIR>
__global__ void __maxnreg__(B == 4 ? 96 : 64) hc_stream(const __grid_constant__ hc_stream_args a)
{
    constexpr bool ONE = B == 1 && !PAIR;
    /* pairs of up in registers before its input is there; no value that is being loaded may be spilled, since that
     * waits for it */
    constexpr uint32_t EARLY = B == 2 ? 1 : 2;
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint64_t bars[4]; /* weights of down, of up; the other block's rows of inputs, of inner values */
    __shared__ float4 sums[2][B][3]; /* of a warp each */
    __shared__ uint4 before;                /* x: the number of the launch before */
    __shared__ float norm_up[8 * HC_WARPS]; /* of the block's rows of up */
    pdl_next();
    const uint32_t tid = threadIdx.x, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t warp = __shfl_sync(0xffffffffu, tid / 32, 0); /* the compiler sees that lanes agree */
    if (tid >= HC_THREADS) {
        __syncthreads(); /* the one before the weights are asked for, which else waits until these warps have ended */
        pdl_wait(); /* there for their registers until all blocks have their places (launch_alone) */
        return;
    }
    /* a pair has two tiles of one stream; the blocks of inject come last and do all rows themselves */
    const uint32_t rank = blockIdx.x & 1, pair = blockIdx.x / 2;
    const bool of_inject = pair >= HC_TILES / 2 * HC_C, shares = PAIR && !of_inject;
    const uint32_t tile = of_inject ? HC_TILES : pair / HC_C * 2 + rank, c = (of_inject ? blockIdx.x : pair) % HC_C;
    const bool posts_r = a.inject ? of_inject : PAIR ? pair < HC_C : tile == 0;
    const uint32_t row0 = tile * HC_ROWS, n = of_inject ? HC_C : HC_ROWS, d0 = blockIdx.x * HC_ND;
    const uint32_t n_rows = ONE ? 1 : a.n_rows, group = ONE ? 1 : a.group;
    uint8_t *xs = smem + HC_XS, *lo = xs + group * HC_PITCH;
    float *red = (float *)(lo + group * HC_LO_PITCH);

    if (tid == 0) {
        bar_init(bars, 1);
        bar_init(bars + 1, 1);
        bar_init(bars + 2, 1);
        bar_init(bars + 3, 1);
        bar_init_done();
        fence_async();
        bar_expect(bars, n * HC_HIDDEN * 2);
        bar_expect(bars + 1, HC_C * HC_ND * HC_RANK * 2);
    }
    if (tid < 8 * HC_WARPS && !of_inject) {
        copy4(smem_addr(norm_up + tid), a.norm + tid / HC_ND * HC_HIDDEN + d0 + tid % HC_ND, 4);
    }
    copy_commit();
    float4 norm[HC_QUADS]; /* asked for before the weights, behind which it would come */
#pragma unroll
    for (uint32_t h = 0; h < HC_QUADS; ++h) {
        norm[h] = __ldg((const float4 *)(a.norm + c * HC_HIDDEN) + tid + h * HC_THREADS);
    }
    __syncthreads();
    if (shares) {
        cluster_arrive_relaxed(); /* the barriers are made (bar_init_done), before anything arrives there */
    }
    const uint32_t peer_xs = cluster_addr(xs, rank ^ 1), peer_lo = cluster_addr(lo, rank ^ 1);
    const uint32_t peer_bars = cluster_addr(bars, rank ^ 1);
    if (lane == 0) {
        const uint64_t policy = l2_read_once();
        const uint8_t *from = of_inject ? a.inject : a.down + row0 * HC_C * HC_HIDDEN * 2;
        if (warp < n) {
            bulk_load(smem + warp * HC_PITCH, from + (warp * HC_C + c) * (HC_HIDDEN * 2), HC_HIDDEN * 2, bars, policy);
        }
        if (warp < HC_C && !of_inject) {
            bulk_load(smem + HC_UP + warp * (HC_ND * HC_RANK * 2), a.up + (warp * HC_HIDDEN + d0) * (HC_RANK * 2),
                      HC_ND * HC_RANK * 2, bars + 1, policy);
        }
    }
    pdl_wait();
    if (tid == 0) { /* by a register, its warp would wait for it before it asks for what is behind */
        copy16(&before, a.number);
    }
    copy_commit();
#pragma unroll
    for (uint32_t h = 0; h < HC_QUADS; ++h) {
        norm[h].x += 1.0f, norm[h].y += 1.0f, norm[h].z += 1.0f, norm[h].w += 1.0f;
    }

    /* ---- down ---- */
    uint32_t turn = 0;
    bool met = false;
#pragma unroll 1
    for (uint32_t m0 = 0; m0 < n_rows; m0 += HC_GROUP) {
        const uint32_t n_tok = ONE ? 1 : n_rows - m0 < HC_GROUP ? n_rows - m0 : HC_GROUP;
        const uint32_t half = (n_tok + 1) / 2, t_end = shares && rank == 0 ? half : n_tok,
                       t_begin = shares && rank ? half : 0;
        if (shares && m0) {
            cluster_sync(); /* the other is through with the group before */
        }
        if (shares && tid == 0) {
            bar_expect(bars + 2, (rank ? half : n_tok - half) * (HC_HIDDEN * 2));
        }
#pragma unroll 1
        for (uint32_t t0 = t_begin; t0 < t_end; t0 += B, turn ^= 1) {
            float4 v[B][HC_QUADS];
#pragma unroll
            for (int j = 0; j < B; ++j) {
                const uint32_t r = m0 + (t0 + j < t_end ? t0 + j : t0);
                const float4 *x = (const float4 *)(a.x + (r * HC_C + c) * HC_HIDDEN) + tid;
#pragma unroll
                for (uint32_t h = 0; h < HC_QUADS; ++h) {
                    v[j][h] = __ldcg(x + h * HC_THREADS);
                }
            }
            if (a.y) {
                float4 y[B][HC_QUADS];
                float f[B];
#pragma unroll
                for (int j = 0; j < B; ++j) {
                    const uint32_t r = m0 + (t0 + j < t_end ? t0 + j : t0);
                    const float4 *p = (const float4 *)(a.y + r * HC_HIDDEN) + tid;
                    f[j] = a.inj_in ? __ldcg(a.inj_in + r * HC_C + c) : 1.0f;
#pragma unroll
                    for (uint32_t h = 0; h < HC_QUADS; ++h) {
                        y[j][h] = __ldcg(p + h * HC_THREADS);
                    }
                }
#pragma unroll
                for (int j = 0; j < B; ++j) {
#pragma unroll
                    for (uint32_t h = 0; h < HC_QUADS; ++h) {
                        v[j][h].x = fmaf(f[j], y[j][h].x, v[j][h].x);
                        v[j][h].y = fmaf(f[j], y[j][h].y, v[j][h].y);
                        v[j][h].z = fmaf(f[j], y[j][h].z, v[j][h].z);
                        v[j][h].w = fmaf(f[j], y[j][h].w, v[j][h].w);
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < B; ++j) {
                float s[HC_QUADS];
#pragma unroll
                for (uint32_t h = 0; h < HC_QUADS; ++h) {
                    const float4 &u = v[j][h];
                    s[h] = fmaf(u.x, u.x, u.y * u.y) + fmaf(u.z, u.z, u.w * u.w);
                }
                static_assert(HC_QUADS == 2, "");
                const float all = warp_sum(s[0] + s[1]);
                if (lane == 0) {
                    ((float *)sums[turn][j])[warp] = all;
                }
            }
            copy_wait<0>();
            __syncthreads();
            if (shares && !met) {
                cluster_wait();
                met = true;
            }
#pragma unroll
            for (int j = 0; j < B; ++j) {
                const float4 s0 = sums[turn][j][0], s1 = sums[turn][j][1], s2 = sums[turn][j][2];
                const float s = ((s0.x + s0.y) + (s0.z + s0.w)) + ((s1.x + s1.y) + (s1.z + s1.w)) + (s2.x + s2.y);
                const float r = rsqrtf(fmaf(s, 1.0f / HC_HIDDEN, a.eps));
                const uint32_t t = t0 + j;
                if (t < t_end) {
#pragma unroll
                    for (uint32_t h = 0; h < HC_QUADS; ++h) {
                        const float4 &u = v[j][h];
                        const uint32_t at = t * HC_PITCH + (tid + h * HC_THREADS) * 8;
                        const uint2 b = make_uint2(pack_bf16((u.x * r) * norm[h].x, (u.y * r) * norm[h].y),
                                                   pack_bf16((u.z * r) * norm[h].z, (u.w * r) * norm[h].w));
                        *(uint2 *)(xs + at) = b;
                        if (shares) {
                            send64(peer_xs + at, b, peer_bars + 16);
                        }
                    }
                    if (posts_r && tid == 0) {
                        word_post(a.words + ((m0 + t) * HC_C + c) * HC_WORDS_ROW + HC_RANK + HC_C, r, before.x + 1);
                    }
                }
            }
        }
        if (shares && !met) {
            cluster_wait();
            met = true;
        }
        __syncthreads();
        if (shares) {
            bar_wait(bars + 2, m0 / HC_GROUP & 1);
        }
        if (m0 == 0) {
            bar_wait(bars, 0);
        }
        {
            float acc[4][4] = {};
            const uint8_t *w = smem + g * HC_PITCH + warp * HC_PAIR + q * 16;
            const uint8_t *x = xs + g * HC_PITCH + warp * HC_PAIR + q * 16;
            const bool two = g + 8 < HC_ROWS, in = g < n_tok;
#pragma unroll
            for (uint32_t p = 0; p < HC_HIDDEN * 2 / HC_PAIR; p += HC_WARPS) {
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    const uint32_t at = p * HC_PAIR + i * 64;
                    hc_pair(acc, *(const uint4 *)(w + at), hc_read(w + 8 * HC_PITCH + at, two), hc_read(x + at, in), i);
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (2 * q + (e & 1) < n_tok) {
                    red[(warp * group + 2 * q + (e & 1)) * 16 + g + e / 2 * 8] = hc_sum(acc, e);
                }
            }
        }
        __syncthreads();
        const uint32_t t = tid / 16, r = tid % 16;
        if (t < n_tok && r < n) {
            float s[HC_WARPS];
#pragma unroll
            for (uint32_t w = 0; w < HC_WARPS; ++w) {
                s[w] = red[(w * group + t) * 16 + r];
            }
#pragma unroll
            for (uint32_t w = 1; w < HC_WARPS; ++w) {
                s[0] += s[w];
            }
            word_post(a.words + ((m0 + t) * HC_C + c) * HC_WORDS_ROW + row0 + r, s[0], before.x + 1);
        }
    }

    /* ---- up and mix ---- */
    const uint32_t number = before.x + 1;
#pragma unroll 1
    for (uint32_t m0 = 0; m0 < n_rows && !of_inject; m0 += HC_GROUP) {
        const uint32_t n_tok = ONE ? 1 : n_rows - m0 < HC_GROUP ? n_rows - m0 : HC_GROUP;
        const uint32_t half = (n_tok + 1) / 2, t_end = PAIR && rank == 0 ? half : n_tok;
        if (PAIR && m0) {
            cluster_sync(); /* the other is through with the group before */
        }
        if (PAIR && tid == 0) {
            bar_expect(bars + 3, (rank ? half : n_tok - half) * (HC_RANK * 2));
        }
        /* the lane's element of the streams: row warp * 8 + g of the block's part of up */
        const uint32_t own_c = (warp * 8 + g) / HC_ND, own_d = d0 + (warp * 8 + g) % HC_ND;
        float v[2], y[2], f[2];
        uint64_t r[2];
        const uint64_t *words = a.words + m0 * HC_C * HC_WORDS_ROW;
        const uint64_t *rp = words + (2 * q * HC_C + own_c) * HC_WORDS_ROW + HC_RANK + HC_C;
#pragma unroll
        for (uint32_t e = 0; e < (ONE ? 1 : 2); ++e) {
            const uint32_t t = 2 * q + e;
            if (t < n_tok) {
                v[e] = __ldcg(a.x + ((m0 + t) * HC_C + own_c) * HC_HIDDEN + own_d);
                y[e] = a.y ? __ldcg(a.y + (m0 + t) * HC_HIDDEN + own_d) : 0.0f;
                f[e] = a.y && a.inj_in ? __ldcg(a.inj_in + (m0 + t) * HC_C + own_c) : 1.0f;
                r[e] = word_read(rp + e * HC_C * HC_WORDS_ROW);
            }
        }
        if (m0 == 0) {
            bar_wait(bars + 1, 0);
        }
        uint4 w[EARLY][2];
        const uint8_t *up = smem + HC_UP + (warp * 8 + g) * (HC_RANK * 2) + q * 16;
#pragma unroll
        for (uint32_t p = 0; p < EARLY; ++p) {
            hc_load(w[p], up + p * HC_PAIR, g & 1);
        }
        if (!PAIR && m0) {
            __syncthreads(); /* the group before is through with what it shares with this one */
        }
#pragma unroll 1
        for (uint32_t t0 = PAIR && rank ? half : 0; t0 < t_end; t0 += B) {
            uint64_t d[B][HC_C];
            bool late;
            do {
                late = false;
#pragma unroll
                for (int b = 0; b < B; ++b) {
                    const uint64_t *p = words + (t0 + b < t_end ? t0 + b : t0) * HC_C * HC_WORDS_ROW + tid;
#pragma unroll
                    for (uint32_t s = 0; s < HC_C; ++s) {
                        d[b][s] = word_read(p + s * HC_WORDS_ROW);
                    }
                }
#pragma unroll
                for (int b = 0; b < B; ++b) {
#pragma unroll
                    for (uint32_t s = 0; s < HC_C; ++s) {
                        late |= hc_late(d[b][s], number);
                    }
                }
            } while (late);
#pragma unroll
            for (int b = 0; b < B; ++b) {
                const float s = hc_mean(d[b]);
                const uint32_t t = t0 + b, at = t * HC_LO_PITCH + tid * 2;
                const uint16_t v16 = __bfloat16_as_ushort(__float2bfloat16_rn(s * hc_sigmoid(s)));
                const uint32_t next = PAIR ? __shfl_down_sync(0xffffffffu, v16, 1) : 0;
                if (t < t_end) {
                    *(uint16_t *)(lo + at) = v16;
                    if (PAIR && !(tid & 1)) {
                        send32(peer_lo + at, v16 | next << 16, peer_bars + 24);
                    }
                }
            }
        }
        __syncthreads();
        if (PAIR) {
            bar_wait(bars + 3, m0 / HC_GROUP & 1);
        }
        float acc[4][4] = {};
        const uint8_t *x = lo + g * HC_LO_PITCH + q * 16;
        const bool in = g < n_tok;
#pragma unroll
        for (uint32_t p = 0; p < HC_RANK * 2 / HC_PAIR; ++p) {
            if (p >= EARLY) {
                hc_load(w[p % EARLY], up + p * HC_PAIR, g & 1);
            }
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                hc_pair(acc, w[p % EARLY][i], make_uint4(0, 0, 0, 0), hc_read(x + p * HC_PAIR + i * 64, in), i);
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < (ONE ? 1 : 2); ++e) {
            const uint32_t t = 2 * q + e;
            if (t < n_tok) {
                while (hc_late(r[e], number)) {
                    r[e] = word_read(rp + e * HC_C * HC_WORDS_ROW);
                }
                const float u = a.y ? fmaf(f[e], y[e], v[e]) : v[e];
                if (a.y) {
                    a.x[((m0 + t) * HC_C + own_c) * HC_HIDDEN + own_d] = u;
                }
                red[t * (8 * HC_WARPS) + warp * 8 + g] =
                    (u * hc_value(r[e])) * (1.0f + norm_up[warp * 8 + g]) * hc_sigmoid(hc_sum(acc, e));
            }
        }
        __syncthreads();
        const uint32_t t = tid / HC_ND, j = tid % HC_ND;
        if (t < n_tok) {
            const float *p = red + t * (8 * HC_WARPS) + j;
            const float s = (p[0] + p[HC_ND]) + (p[2 * HC_ND] + p[3 * HC_ND]);
            a.m[(m0 + t) * HC_HIDDEN + d0 + j] = s * (1.0f / HC_C);
        }
    }

    /* The last block has seen a word of every block when the number moves on: they read it before they post one. */
    if (blockIdx.x == gridDim.x - 1) {
        if (of_inject) {
            if (tid < HC_C * HC_TILES) {
                const uint64_t *p = a.words + ((n_rows - 1) * HC_C + tid % HC_C) * HC_WORDS_ROW;
                while (hc_late(word_read(p + tid / HC_C * HC_ROWS), number)) {
                }
            }
            for (uint32_t i = HC_THREADS - 1 - tid; i < n_rows * HC_C; i += HC_THREADS) {
                const uint64_t *p = a.words + i / HC_C * (HC_C * HC_WORDS_ROW) + HC_RANK + i % HC_C;
                uint64_t d[HC_C];
                do {
#pragma unroll
                    for (uint32_t s = 0; s < HC_C; ++s) {
                        d[s] = word_read(p + s * HC_WORDS_ROW);
                    }
                } while (hc_late(d, number));
                a.inj_out[i] = 2.0f * hc_sigmoid(hc_mean(d));
            }
            __syncthreads();
        }
        if (tid == 0) {
            *a.number = number;
        }
    }
}

/* ---- host --------------------------------------------------------------------------------------- */

static bool hc_is_plain(const struct qx_weight &w)
{
    return w.fmt == QX_W_BF16 && ((uintptr_t)w.codes & 15) == 0;
}

int hc_streamed(struct qx_queue *q, const struct qx_op_hc *o, bool *done)
{
    hc_stream_args a = {};
    const bool inject = o->inject.fmt != QX_W_NONE && o->inj_out;
    const dim3 grid(HC_C * (HC_TILES + (inject ? 1 : 0)));
    *done = can_stream(q) && o->hidden == HC_HIDDEN && o->rank == HC_RANK && o->n_streams == HC_C &&
            (unsigned)q->n_sm >= grid.x && hc_is_plain(o->down) && hc_is_plain(o->up) &&
            (!inject || hc_is_plain(o->inject));
    if (!*done) {
        return 0;
    }
    a.norm = o->norm;
    a.eps = o->eps;
    a.down = (const uint8_t *)o->down.codes;
    a.inject = inject ? (const uint8_t *)o->inject.codes : nullptr;
    a.up = (const uint8_t *)o->up.codes;
    a.words = q->words;
    a.number = q->numbers;
    a.group = o->n_rows < HC_GROUP ? o->n_rows : HC_GROUP;
    const uint32_t smem = HC_XS + a.group * HC_ROW_BYTES, most = QX_HC_WORDS / (HC_C * HC_WORDS_ROW);
    for (uint32_t r = 0; r < o->n_rows; r += most) {
        a.n_rows = o->n_rows - r < most ? o->n_rows - r : most;
        a.x = o->x + (uint64_t)r * HC_C * HC_HIDDEN;
        a.y = o->y ? o->y + (uint64_t)r * HC_HIDDEN : nullptr;
        a.inj_in = o->inj_in ? o->inj_in + r * HC_C : nullptr;
        a.m = o->m + (uint64_t)r * HC_HIDDEN;
        a.inj_out = inject ? o->inj_out + r * HC_C : nullptr;
        const uint32_t n = a.n_rows, pair = n > 1 ? 2 : 1;
        const int e = launch_alone(q, "hc", false, pair,
                                   n == 1   ? hc_stream<1, false>
                                   : n == 2 ? hc_stream<1, true>
                                   : n <= 4 ? hc_stream<2, true>
                                            : hc_stream<4, true>,
                                   grid, HC_THREADS, smem, a);
        if (e) {
            return e;
        }
    }
    q->mixer_at = q->n_launches;
    return 0;
}
