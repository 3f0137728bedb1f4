/* gdn.cu: Gated DeltaNet core. A cluster takes one key head: two blocks (halves of the value columns) for
 * each of its value heads. Each block computes the convolutions it needs for eight rows at a time, then
 * runs the recurrence with its part of S in registers: a lane holds 32 keys of one column, so no barrier
 * is needed between rows. The gated norm and the conv history follow after a cluster barrier, which also
 * orders all reads of the old history before its overwriting. */
#include "gdn.cuh"

#define GDN_V 64   /* value columns a block */
#define GDN_T 8    /* rows a round */

__device__ __forceinline__ void cluster_barrier()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* N channels ch, ch + 32, ..: all loads in flight before the first use. */
template <int N>
__device__ __forceinline__ void gdn_conv(const gdn_args &a, uint32_t first, int32_t i, uint32_t ch,
                                         uint32_t channels, int32_t slot, float (&out)[N])
{
    float p[N][4], w[N][4];
#pragma unroll
    for (int e = 0; e < N; ++e) {
        out[e] = 0.0f;
    }
    for (uint32_t j0 = 0; j0 < a.taps; j0 += 4) {
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
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
        out[e] = silu_f(out[e]);
    }
}

__device__ void gdn_run(const gdn_args &a, uint32_t first, uint32_t kh, uint32_t rank,
                        float (&qk)[GDN_T][2][GDN_D], float (&vs)[GDN_T][GDN_V], float (&gb)[GDN_T][2],
                        int *end, int32_t *to_slot, uint32_t *mask)
{
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31;
    const uint32_t vh = kh * a.group + rank / 2, half = rank & 1;
    const uint32_t k0 = a.k_heads * GDN_D, v0 = 2 * k0, channels = v0 + a.v_heads * GDN_D;
    const uint32_t z0 = channels, b0 = z0 + a.v_heads * GDN_D, a0 = b0 + a.v_heads;
    const int32_t slot = __ldcg(a.step.state_in + first);
    /* the run's end */
    if (tid == 0) {
        *end = (int)a.step.n_rows;
    }
    __syncthreads();
    for (uint32_t i = first + 1 + tid; i < a.step.n_rows; i += 256) {
        if (__ldcg(a.step.first + i) != (int32_t)first || __ldcg(a.step.pos + i) < 0) {
            atomicMin(end, (int)i);
            break;
        }
    }
    __syncthreads();
    const uint32_t len = (uint32_t)*end - first;

    const uint32_t kp = lane >> 3, col = warp * 8 + (lane & 7), v = half * GDN_V + col;
    float S[32];
    {
        const float *p = a.s + slot * a.s_stride + (uint64_t)vh * GDN_D * GDN_D + v;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const uint32_t k = (i / 4) * 16 + kp * 4 + (i & 3);
            S[i] = slot < 0 ? 0.0f : __ldcg(p + k * GDN_D);
        }
    }
    for (uint32_t t0 = 0; t0 < len; t0 += GDN_T) {
        const uint32_t n = len - t0 < GDN_T ? len - t0 : GDN_T;
        if (t0) {
            __syncthreads();
        }
        if (tid < n) {
            to_slot[tid] = __ldcg(a.step.state_out + first + t0 + tid);
        }
        for (uint32_t task = warp; task < 3 * n; task += 8) {
            const uint32_t t = task / 3, what = task - 3 * t;
            const int32_t i = (int32_t)(t0 + t);
            if (what < 2) {
                const uint32_t c0 = (what ? k0 : 0) + kh * GDN_D;
                float x[4], q = 0.0f;
                gdn_conv<4>(a, first, i, c0 + lane, channels, slot, x);
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
                    qk[t][what][e * 32 + lane] = x[e] * q;
                }
            } else {
                const uint32_t c0 = v0 + vh * GDN_D + half * GDN_V;
                float x[2];
                gdn_conv<2>(a, first, i, c0 + lane, channels, slot, x);
                vs[t][lane] = x[0];
                vs[t][lane + 32] = x[1];
                if (lane == 0) {
                    const float *row = a.in + (uint64_t)(first + i) * a.in_stride;
                    const float x = __ldcg(row + a0 + vh) + __ldg(a.dt_bias + vh);
                    gb[t][0] = expf(-expf(__ldg(a.a_log + vh)) * softplus_f(x));
                    gb[t][1] = sigmoid_f(__ldcg(row + b0 + vh));
                }
            }
        }
        __syncthreads();
        for (uint32_t t = 0; t < n; ++t) {
            const float decay = gb[t][0], beta = gb[t][1];
            float kS = 0.0f;
            float4 kk[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                kk[i] = *(const float4 *)&qk[t][1][i * 16 + kp * 4];
                kS = fmaf(S[4 * i], kk[i].x, kS);
                kS = fmaf(S[4 * i + 1], kk[i].y, kS);
                kS = fmaf(S[4 * i + 2], kk[i].z, kS);
                kS = fmaf(S[4 * i + 3], kk[i].w, kS);
            }
            kS += __shfl_xor_sync(0xffffffffu, kS, 8);
            kS += __shfl_xor_sync(0xffffffffu, kS, 16);
            const float u = beta * (vs[t][col] - decay * kS);
            float o = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 qq = *(const float4 *)&qk[t][0][i * 16 + kp * 4];
                S[4 * i] = fmaf(kk[i].x, u, decay * S[4 * i]);
                S[4 * i + 1] = fmaf(kk[i].y, u, decay * S[4 * i + 1]);
                S[4 * i + 2] = fmaf(kk[i].z, u, decay * S[4 * i + 2]);
                S[4 * i + 3] = fmaf(kk[i].w, u, decay * S[4 * i + 3]);
                o = fmaf(S[4 * i], qq.x, o);
                o = fmaf(S[4 * i + 1], qq.y, o);
                o = fmaf(S[4 * i + 2], qq.z, o);
                o = fmaf(S[4 * i + 3], qq.w, o);
            }
            o += __shfl_xor_sync(0xffffffffu, o, 8);
            o += __shfl_xor_sync(0xffffffffu, o, 16);
            const uint32_t r = first + t0 + t;
            if (kp == 0) {
                a.out[((uint64_t)r * a.v_heads + vh) * GDN_D + v] = o;
            }
            const int32_t to = to_slot[t];
            if (to >= 0) {
                float *p = a.s + to * a.s_stride + (uint64_t)vh * GDN_D * GDN_D + v;
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    p[((i / 4) * 16 + kp * 4 + (i & 3)) * GDN_D] = S[i];
                }
            }
        }
    }
    __threadfence();
    cluster_barrier();
    /* gated norm: a row and value head a warp */
    const uint32_t warps = a.group * 2 * 8;
    for (uint32_t i = rank * 8 + warp; i < len * a.group; i += warps) {
        const uint32_t r = first + i / a.group, h = kh * a.group + i % a.group;
        float *o = a.out + ((uint64_t)r * a.v_heads + h) * GDN_D;
        const float *z = a.in + (uint64_t)r * a.in_stride + z0 + h * GDN_D;
        float x[4], q = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[e] = __ldcg(o + e * 32 + lane);
            q = fmaf(x[e], x[e], q);
        }
        q = 1.0f / sqrtf(warp_sum(q) / (float)GDN_D + a.eps);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            o[e * 32 + lane] =
                x[e] * q * __ldg(a.norm + e * 32 + lane) * sigmoid_f(__ldcg(z + e * 32 + lane));
        }
    }
    /* history of the rows that have a slot, in order: a channel a thread, so that in place (last row) the
     * old entries have been read; the cluster's first block has the head's q and k too */
    const uint32_t own = rank == 0 ? GDN_V + 2 * GDN_D : GDN_V;
    for (uint32_t t0 = 0; t0 < len; t0 += 256) {
        const bool has = t0 + tid < len && __ldcg(a.step.state_out + first + t0 + tid) >= 0;
        const uint32_t b = __ballot_sync(0xffffffffu, has);
        __syncthreads();
        if (lane == 0) {
            mask[warp] = b;
        }
        __syncthreads();
        for (uint32_t i = tid; i < own; i += 256) {
            const uint32_t ch = i < GDN_V ? v0 + vh * GDN_D + half * GDN_V + i
                                : i < GDN_V + GDN_D ? kh * GDN_D + (i - GDN_V)
                                                    : k0 + kh * GDN_D + (i - GDN_V - GDN_D);
            for (uint32_t w = 0; w < 8; ++w) {
                for (uint32_t bits = mask[w]; bits; bits &= bits - 1) {
                    const uint32_t t = t0 + w * 32 + __ffs(bits) - 1;
                    const int32_t to = __ldcg(a.step.state_out + first + t);
                    /* ascending: an entry is read before it is overwritten in place */
                    for (uint32_t j = 0; j + 1 < a.taps; ++j) {
                        const int32_t at = (int32_t)t + 1 - (int32_t)(a.taps - 1) + (int32_t)j;
                        a.conv_state[to * a.conv_stride + (uint64_t)j * channels + ch] =
                            gdn_p(a, first, at, ch, channels, slot);
                    }
                }
            }
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(256) gdn_core(const __grid_constant__ gdn_args a)
{
    __shared__ __align__(16) float qk[GDN_T][2][GDN_D];
    __shared__ float vs[GDN_T][GDN_V];
    __shared__ float gb[GDN_T][2];
    __shared__ int end;
    __shared__ int32_t to_slot[GDN_T];
    __shared__ uint32_t mask[8], hist_mask[8];
    pdl_next();
    pdl_wait();
    const uint32_t cs = a.group * 2, kh = blockIdx.x / cs, rank = blockIdx.x - kh * cs;
    for (uint32_t r0 = blockIdx.y; r0 < a.step.n_rows; r0 += gridDim.y * 256) {
        /* which of the block's next 256 candidate rows begin a run: the same answer in all blocks of the
         * cluster */
        const uint32_t r = r0 + threadIdx.x * gridDim.y;
        const bool begins = r < a.step.n_rows && __ldcg(a.step.first + r) == (int32_t)r &&
                            __ldcg(a.step.pos + r) >= 0;
        const uint32_t b = __ballot_sync(0xffffffffu, begins);
        if ((threadIdx.x & 31) == 0) {
            mask[threadIdx.x / 32] = b;
        }
        __syncthreads();
        for (uint32_t w = 0; w < 8; ++w) {
            for (uint32_t bits = mask[w]; bits; bits &= bits - 1) {
                const uint32_t f = r0 + (w * 32 + __ffs(bits) - 1) * gridDim.y;
                if (!a.chunked || !(__ldcg(a.chunked + f / 32) >> (f & 31) & 1)) {
                    gdn_run(a, f, kh, rank, qk, vs, gb, &end, to_slot, hist_mask);
                }
            }
        }
        __syncthreads();
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
    /* blocks hold a multiprocessor each: beside the chunked kernels few are wanted, most of them idle */
    const uint32_t most = !a.chunked ? 64 : n < 1024 ? 16 : 2;
    return launch_cluster(q, "gdn", gdn_core, dim3(o->k_heads * a.group * 2, n < most ? n : most), dim3(256), 0,
                          a.group * 2, a);
}
