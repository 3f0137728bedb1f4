/* gdn.cu: Gated DeltaNet core, the recurrence row by row. A cluster takes one key head of a run: two blocks
 * (halves of the value columns) for each of its value heads. A warp holds S of eight columns in registers: a lane
 * eight keys of four columns, so that sums over keys are shuffles and no barrier stands between rows. S goes in and
 * out by way of shared memory: 32 bytes of a row at a time, as registers have it, memory takes at a third of its pace.
 * S and the numbers of the step are read before the wait (embed stands between them and whatever wrote them). The
 * halves send one another sums of squares for the gated norm, and the last S leaves meanwhile; the cluster's barrier,
 * whose arrival and wait lie far apart, orders all reads of a history that is replaced in place before its writing. */
#include "gdn.cuh"
#include "mma.cuh"

#define GDN_V 64   /* value columns a block */
#define GDN_T 8    /* rows a round */
#define GDN_OWN (2 * GDN_D + GDN_V) /* channels a block convolves: q, k, its half of v */

struct gdn_smem {
    float qk[GDN_T][2][GDN_D];
    float vs[GDN_T][GDN_V], os[GDN_T][GDN_V];
    float part[2][2][GDN_T];                 /* round, half, row: sums of squares */
    float gb[GDN_T][2];
    float hist[GDN_MAX_TAPS - 1][GDN_OWN];   /* new history that waits for the barrier */
    int32_t to[GDN_T];
    float state[GDN_D * GDN_V + GDN_D];      /* S: gdn_key */
    uint64_t got[2];                         /* round: barrier for the other half's sums */
};

/* Key k of the block's columns: eight keys later the same column lies in other banks. */
__device__ __forceinline__ uint32_t gdn_key(uint32_t k)
{
    return k * GDN_V + k / 8 * 8;
}

/* *p = v in the shared memory of block `rank` of the cluster, counted by its barrier `bar`. */
__device__ __forceinline__ void cluster_store(float *p, uint64_t *bar, uint32_t rank, float v)
{
#if __CUDA_ARCH__ >= 900
    const uint32_t at = cluster_addr(p, rank), b = cluster_addr(bar, rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(at), "f"(v), "r"(b)
                 : "memory");
#endif
}

/* Convolution of N channels ch, ch + 32, .. of the row `i` rows after the run's first; `own` is the block's number
 * of channel ch. All loads are in flight before the first use. Where the row keeps its history (keep) it is written
 * by the way, to its slot, or, as that is the run's own old one, to shared memory. */
template <int N>
__device__ __forceinline__ void gdn_conv(const gdn_args &a, gdn_smem &s, uint32_t first, int32_t i, uint32_t ch,
                                         uint32_t own, uint32_t channels, int32_t slot, int32_t to, bool keep,
                                         float (&out)[N])
{
#pragma unroll
    for (int e = 0; e < N; ++e) {
        out[e] = 0.0f;
    }
    for (uint32_t j0 = 0; j0 < a.taps; j0 += 4) {
        float p[N][4], w[N][4];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            const int32_t at = i - (int32_t)(a.taps - 1) + (int32_t)(j0 + j);
            const bool in = j0 + j < a.taps, now = at >= 0;
            const float *src = now ? a.in + (uint64_t)(first + at) * a.in_stride
                                   : a.conv_state + slot * a.conv_stride +
                                         (uint64_t)((int32_t)a.taps - 1 + at) * channels;
            const bool has = in && (now || slot >= 0);
#pragma unroll
            for (int e = 0; e < N; ++e) {
                p[e][j] = has ? __ldcg(src + ch + 32 * e) : 0.0f;
                w[e][j] = in ? __ldg(a.conv_w + (uint64_t)(ch + 32 * e) * a.taps + j0 + j) : 0.0f;
            }
        }
#pragma unroll
        for (int e = 0; e < N; ++e) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                out[e] = fmaf(w[e][j], p[e][j], out[e]);
            }
        }
        if (keep) {
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t x = j0 + j;
                if (x == 0 || x >= a.taps) {
                    continue;
                }
#pragma unroll
                for (int e = 0; e < N; ++e) {
                    if (to == slot) {
                        s.hist[x - 1][own + 32 * e] = p[e][j];
                    } else {
                        a.conv_state[to * a.conv_stride + (uint64_t)(x - 1) * channels + ch + 32 * e] = p[e][j];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
        out[e] = silu_f(out[e]);
    }
}

/* Sums over the 16 key parts of a warp (lane bits 1..4) of four columns: lane bits 4 and 3 choose the column
 * whose sum is returned. */
__device__ __forceinline__ float sum_keys(const float (&v)[4], uint32_t lane)
{
    const bool b4 = lane & 16, b3 = lane & 8;
    float x = b4 ? v[2] : v[0], y = b4 ? v[3] : v[1];
    x += __shfl_xor_sync(0xffffffffu, b4 ? v[0] : v[2], 16);
    y += __shfl_xor_sync(0xffffffffu, b4 ? v[1] : v[3], 16);
    float z = b3 ? y : x;
    z += __shfl_xor_sync(0xffffffffu, b3 ? x : y, 8);
    z += __shfl_xor_sync(0xffffffffu, z, 4);
    z += __shfl_xor_sync(0xffffffffu, z, 2);
    return z;
}

/* The block's columns of a state to shared memory, and from there to p, its first key and column; a barrier in
 * between. */
__device__ __forceinline__ void state_to_smem(gdn_smem &s, uint32_t mine, const float (&S)[8][4])
{
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        *(float4 *)(s.state + mine + i * GDN_V) = make_float4(S[i][0], S[i][1], S[i][2], S[i][3]);
    }
}
__device__ __forceinline__ void smem_to_slot(float *p, const gdn_smem &s)
{
#pragma unroll
    for (uint32_t j = 0; j < GDN_D * GDN_V / 4 / 256; ++j) {
        const uint32_t i = j * 256 + threadIdx.x, k = i / (GDN_V / 4), c = i % (GDN_V / 4) * 4;
        *(float4 *)(p + k * GDN_D + c) = *(const float4 *)(s.state + gdn_key(k) + c);
    }
}

/* The run that begins at row `first`. round: of the block, over all its runs. */
__device__ __forceinline__ void gdn_run(const gdn_args &a, gdn_smem &s, uint32_t first, uint32_t kh, uint32_t rank,
                                        bool &waited, uint32_t &round)
{
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, n_rows = a.step.n_rows;
    const uint32_t vh = kh * a.group + rank / 2, half = rank & 1;
    const uint32_t k0 = a.k_heads * GDN_D, v0 = 2 * k0, channels = v0 + a.v_heads * GDN_D;
    const uint32_t z0 = channels, b0 = z0 + a.v_heads * GDN_D, a0 = b0 + a.v_heads;
    const uint32_t c0[3] = {kh * GDN_D, k0 + kh * GDN_D, v0 + vh * GDN_D + half * GDN_V};
    const int32_t slot = __ldcg(a.step.state_in + first);
    uint32_t len = 0; /* of the run */
    for (uint32_t i = first + 1;; i += 32) {
        const uint32_t r = i + lane;
        const uint32_t b = __ballot_sync(0xffffffffu, r >= n_rows || __ldcg(a.step.first + r) != (int32_t)first ||
                                                          __ldcg(a.step.pos + r) < 0);
        if (b) {
            len = i + __ffs(b) - 1 - first;
            break;
        }
    }
    /* S: keys kp * 8 + i, columns v .. v + 3 */
    const uint32_t kp = lane >> 1, col = warp * 8 + (lane & 1) * 4, mine = gdn_key(kp * 8) + col;
    const uint64_t block = (uint64_t)vh * GDN_D * GDN_D + half * GDN_V;
    float S[8][4];
    if (slot >= 0) {
#pragma unroll
        for (uint32_t j = 0; j < GDN_D * GDN_V / 4 / 256; ++j) {
            const uint32_t i = j * 256 + tid, k = i / (GDN_V / 4), c = i % (GDN_V / 4) * 4;
            copy16(s.state + gdn_key(k) + c, a.s + slot * a.s_stride + block + k * GDN_D + c);
        }
    }
    copy_commit();
    if (!waited) {
        if (tid < 10 * a.taps) { /* lines of the history and of the taps */
            const uint32_t j = tid / 10, l = tid % 10;
            const uint32_t ch = c0[l < 4 ? 0 : l < 8 ? 1 : 2] + (l < 8 ? l & 3 : l - 8) * 32;
            prefetch_l2(a.conv_w + (uint64_t)ch * a.taps + j * 32);
            if (slot >= 0 && j + 1 < a.taps) {
                prefetch_l2(a.conv_state + slot * a.conv_stride + (uint64_t)j * channels + ch);
            }
        }
        pdl_wait();
        waited = true;
    }
    int32_t last_to = -1;
    for (uint32_t t0 = 0; t0 < len; t0 += GDN_T, ++round) {
        const uint32_t n = len - t0 < GDN_T ? len - t0 : GDN_T;
        if (t0) {
            __syncthreads();
        }
        float z[2];
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t t = tid / GDN_V + 4 * e;
            z[e] = t < n ? __ldcg(a.in + (uint64_t)(first + t0 + t) * a.in_stride + z0 + vh * GDN_D + half * GDN_V +
                                  tid % GDN_V) : 0.0f;
        }
        if (tid < n) {
            s.to[tid] = __ldcg(a.step.state_out + first + t0 + tid);
        }
        for (uint32_t task = warp; task < 3 * n; task += 8) {
            const uint32_t t = task / 3, what = task - 3 * t;
            const int32_t i = (int32_t)(t0 + t), to = __ldcg(a.step.state_out + first + t0 + t);
            if (what < 2) {
                float x[4], q = 0.0f;
                gdn_conv<4>(a, s, first, i, c0[what] + lane, what * GDN_D + lane, channels, slot, to,
                            to >= 0 && rank == 0, x);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    q = fmaf(x[e], x[e], q);
                }
                q = 1.0f / sqrtf(warp_sum(q) + 1e-6f);
                if (what == 0) {
                    q *= 0.088388347648318447f; /* 1 / sqrt(128) */
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s.qk[t][what][e * 32 + lane] = x[e] * q;
                }
            } else {
                const float *row = a.in + (uint64_t)(first + i) * a.in_stride;
                const float ga = __ldcg(row + a0 + vh), gb = __ldcg(row + b0 + vh);
                float x[2];
                gdn_conv<2>(a, s, first, i, c0[2] + lane, 2 * GDN_D + lane, channels, slot, to, to >= 0, x);
                s.vs[t][lane] = x[0];
                s.vs[t][lane + 32] = x[1];
                if (lane == 0) {
                    s.gb[t][0] = expf(-expf(__ldg(a.a_log + vh)) * softplus_f(ga + __ldg(a.dt_bias + vh)));
                    s.gb[t][1] = sigmoid_f(gb);
                }
            }
        }
        if (t0 == 0) {
            copy_wait<0>();
        }
        __syncthreads();
        if (t0 == 0) {
            cluster_arrive_relaxed(); /* the history has been read */
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 x = slot < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *(const float4 *)(s.state + mine + i * GDN_V);
                S[i][0] = x.x, S[i][1] = x.y, S[i][2] = x.z, S[i][3] = x.w;
            }
        }
        for (uint32_t t = 0; t < n; ++t) {
            const float decay = s.gb[t][0], beta = s.gb[t][1];
            float k[8], q[8], u[4], sum[4] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 x = *(const float4 *)&s.qk[t][1][kp * 8 + 4 * h], y = *(const float4 *)&s.qk[t][0][kp * 8 + 4 * h];
                k[4 * h] = x.x, k[4 * h + 1] = x.y, k[4 * h + 2] = x.z, k[4 * h + 3] = x.w;
                q[4 * h] = y.x, q[4 * h + 1] = y.y, q[4 * h + 2] = y.z, q[4 * h + 3] = y.w;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sum[c] = fmaf(S[i][c], k[i], sum[c]);
                }
            }
            const uint32_t my = (lane & 1) * 4 + (lane >> 4 & 1) * 2 + (lane >> 3 & 1); /* the column of sum_keys */
            const float delta = beta * (s.vs[t][warp * 8 + my] - decay * sum_keys(sum, lane));
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                u[c] = __shfl_sync(0xffffffffu, delta, (lane & 1) | (c >> 1) << 4 | (c & 1) << 3);
                sum[c] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    S[i][c] = fmaf(k[i], u[c], decay * S[i][c]);
                    sum[c] = fmaf(S[i][c], q[i], sum[c]);
                }
            }
            const float o = sum_keys(sum, lane);
            if ((lane & 6) == 0) {
                s.os[t][warp * 8 + my] = o;
            }
            const int32_t to = s.to[t];
            if (t0 + t + 1 == len) {
                last_to = to; /* with the norm, below */
            } else if (to >= 0) {
                __syncthreads(); /* what lay there has left */
                state_to_smem(s, mine, S);
                __syncthreads();
                smem_to_slot(a.s + to * a.s_stride + block, s);
            }
        }
        const bool ends = t0 + n == len && last_to >= 0;
        if (ends) {
            if (len > 1) {
                __syncthreads();
            }
            state_to_smem(s, mine, S);
        }
        __syncthreads();
        uint64_t *got = &s.got[round & 1];
        if (warp < n) {
            const float x = s.os[warp][lane], y = s.os[warp][lane + 32];
            const float q = warp_sum(fmaf(x, x, y * y));
            if (lane == 0) {
                s.part[round & 1][half][warp] = q;
                if (warp == 0) {
                    bar_expect(got, 4 * n);
                }
                cluster_store(&s.part[round & 1][half][warp], got, rank ^ 1, q);
            }
        }
        if (ends) {
            smem_to_slot(a.s + last_to * a.s_stride + block, s);
        }
        __syncthreads();
        bar_wait(got, round >> 1 & 1);
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t t = tid / GDN_V + 4 * e, c = tid % GDN_V;
            if (t < n) {
                const float q = s.part[round & 1][0][t] + s.part[round & 1][1][t];
                const float f = 1.0f / sqrtf(q / (float)GDN_D + a.eps);
                a.out[((uint64_t)(first + t0 + t) * a.v_heads + vh) * GDN_D + half * GDN_V + c] =
                    s.os[t][c] * f * __ldg(a.norm + half * GDN_V + c) * sigmoid_f(z[e]);
            }
        }
    }
    cluster_wait();
    if (last_to >= 0 && last_to == slot) {
        for (uint32_t i = rank == 0 ? tid : 2 * GDN_D + tid; i < GDN_OWN; i += 256) {
            const uint32_t part = i / GDN_D, ch = c0[part] + i - part * GDN_D;
            for (uint32_t j = 0; j + 1 < a.taps; ++j) {
                a.conv_state[slot * a.conv_stride + (uint64_t)j * channels + ch] = s.hist[j][i];
            }
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(256, 2) gdn_core(const __grid_constant__ gdn_args a)
{
    extern __shared__ __align__(16) uint8_t mem[];
    gdn_smem &s = *(gdn_smem *)mem;
    const uint32_t cs = a.group * 2, kh = blockIdx.x / cs, rank = blockIdx.x - kh * cs, lane = threadIdx.x & 31;
    bool waited = false;
    pdl_next();
    if (a.chunked) {
        pdl_wait();
        waited = true;
        if (__ldcg(a.n_short) == 0) {
            return;
        }
    }
    if (threadIdx.x == 0) {
        bar_init(&s.got[0], 1);
        bar_init(&s.got[1], 1);
        bar_init_done();
    }
    cluster_arrive_relaxed();
    cluster_wait(); /* all blocks have begun: their shared memory may be written */
    uint32_t round = 0;
    for (uint32_t r0 = blockIdx.y; r0 < a.step.n_rows; r0 += gridDim.y * 32) {
        /* which of the block's next 32 rows begin a run: the same answer in all warps of the cluster */
        const uint32_t r = r0 + lane * gridDim.y;
        const bool begins = r < a.step.n_rows && __ldcg(a.step.first + r) == (int32_t)r &&
                            __ldcg(a.step.pos + r) >= 0 &&
                            !(a.chunked && (__ldcg(a.chunked + r / 32) >> (r & 31) & 1));
        for (uint32_t b = __ballot_sync(0xffffffffu, begins); b; b &= b - 1) {
            gdn_run(a, s, r0 + (__ffs(b) - 1) * gridDim.y, kh, rank, waited, round);
        }
    }
    if (!waited) {
        pdl_wait();
    }
}

extern "C" int qx_cuda_gdn(struct qx_queue *q, const struct qx_op_gdn *o)
{
    if (o->step->n_rows == 0) {
        return 0;
    }
    if (o->k_dim != GDN_D || o->v_dim != GDN_D) {
        return qx_queue_refuse(q, "gdn", "head dimensions other than 128");
    }
    if (o->k_heads == 0 || o->v_heads % o->k_heads || o->v_heads / o->k_heads > 4) {
        return qx_queue_refuse(q, "gdn", "more than 4 value heads a key head");
    }
    if (o->conv_kernel < 1 || o->conv_kernel > GDN_MAX_TAPS) {
        return qx_queue_refuse(q, "gdn", "more than 8 taps");
    }
    if (o->s_slot_stride % 4 || ((uintptr_t)o->s & 15)) {
        return qx_queue_refuse(q, "gdn", "a state that does not begin at a multiple of 16 bytes");
    }
    gdn_args a = {};
    a.step = *o->step;
    a.k_heads = o->k_heads;
    a.v_heads = o->v_heads;
    a.group = o->v_heads / o->k_heads;
    a.taps = o->conv_kernel;
    a.in = o->in;
    a.in_stride = o->in_stride;
    a.conv_w = o->conv_w;
    a.a_log = o->a_log;
    a.dt_bias = o->dt_bias;
    a.norm = o->norm;
    a.eps = o->eps;
    a.conv_state = o->conv_state;
    a.conv_stride = o->conv_slot_stride;
    a.s = o->s;
    a.s_stride = o->s_slot_stride;
    a.out = o->out;
    const uint32_t n = o->step->n_rows;
    if (gdn_prompt_fits(q, o)) {
        const int r = gdn_prompt(q, o, &a);
        if (r) {
            return r;
        }
    }
    const uint32_t most = a.chunked ? 8 : 64;
    return launch_cluster(q, "gdn", gdn_core, dim3(o->k_heads * a.group * 2, n < most ? n : most), dim3(256),
                          sizeof(gdn_smem), a.group * 2, a);
}
