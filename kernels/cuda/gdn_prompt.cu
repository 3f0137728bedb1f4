/* gdn_prompt.cu: Gated DeltaNet for the long runs of a prompt, in the chunked form of the model description
 * on tensor cores. Five kernels: plan (cuts runs into chunks of 64 rows, also behind every row whose state is
 * kept), conv (convolution, norms of q and k, as bf16 terms), intra and scan (gdn_chunks.cu), and norm (gated norm,
 * conv history). A NaN of a row reaches the rows of its chunk before it too. Rows of short runs are left to the
 * recurrent kernel. */
#include "gdn_prompt.cuh"

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
        v = warp_upto(v, lane);
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

/* ---- norm ----------------------------------------------------------------------------------- */

/* Whether row r is of a run that the chunked kernels take. */
__device__ __forceinline__ bool taken(const prompt_args &a, uint32_t r)
{
    return __ldcg(a.plan->mask + r / 32) >> (r & 31) & 1;
}

/* A row and value head a warp; then the history of rows that keep a state (from the third on: entries of the
 * step's own rows only), each written by the blocks of up to eight rows. */
__global__ void __launch_bounds__(256) gdn_norm_rows(const __grid_constant__ prompt_args a)
{
    constexpr uint32_t AT_ONCE = 3, KEEP = 8;
    pdl_next();
    pdl_wait();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = blockIdx.x;
    const uint32_t k = r + lane;
    uint32_t keep = __ballot_sync(0xffffffffu, lane < KEEP && k < a.g.step.n_rows && taken(a, k) &&
                                                   __ldcg(a.g.step.state_out + k) >= 0 &&
                                                   (int32_t)k - __ldcg(a.g.step.first + k) >= 2);
    if (taken(a, r)) {
        const float *in = a.g.in + (uint64_t)r * a.g.in_stride + a.channels;
        const float4 w = __ldg((const float4 *)a.g.norm + lane);
        for (uint32_t h0 = warp; h0 < a.g.v_heads; h0 += 8 * AT_ONCE) {
            float4 x[AT_ONCE], z[AT_ONCE];
#pragma unroll
            for (uint32_t i = 0; i < AT_ONCE; ++i) {
                const uint32_t h = h0 + 8 * i < a.g.v_heads ? h0 + 8 * i : h0;
                x[i] = __ldcg((const float4 *)(a.g.out + ((uint64_t)r * a.g.v_heads + h) * GDN_D) + lane);
                z[i] = __ldcg((const float4 *)(in + h * GDN_D) + lane);
            }
#pragma unroll
            for (uint32_t i = 0; i < AT_ONCE; ++i) {
                const uint32_t h = h0 + 8 * i;
                if (h >= a.g.v_heads) {
                    break;
                }
                const float q = warp_sum(fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, fmaf(x[i].z, x[i].z, x[i].w * x[i].w))));
                const float f = 1.0f / sqrtf(q / (float)GDN_D + a.g.eps);
                *((float4 *)(a.g.out + ((uint64_t)r * a.g.v_heads + h) * GDN_D) + lane) =
                    make_float4(x[i].x * f * w.x * sigmoid_f(z[i].x), x[i].y * f * w.y * sigmoid_f(z[i].y),
                                x[i].z * f * w.z * sigmoid_f(z[i].z), x[i].w * f * w.w * sigmoid_f(z[i].w));
            }
        }
    }
    for (; keep; keep &= keep - 1) {
        const uint32_t part = __ffs(keep) - 1, row = r + part, parts = row < KEEP ? row + 1 : KEEP;
        const uint32_t c4 = a.channels / 4, all = 3 * c4;
        float4 *d = (float4 *)(a.g.conv_state + __ldcg(a.g.step.state_out + row) * a.g.conv_stride);
#pragma unroll 4
        for (uint32_t i = part * all / parts + threadIdx.x; i < (part + 1) * all / parts; i += 256) {
            const uint32_t j = i / c4, ch = i - j * c4;
            d[i] = __ldcg((const float4 *)(a.g.in + (uint64_t)(row - 2 + j) * a.g.in_stride) + ch);
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
           gdn_chunks_fit(q);
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
        r = gdn_chunks(q, a);
    }
    return r ? r : launch(q, "gdn", gdn_norm_rows, dim3(n), dim3(256), 0, a);
}
