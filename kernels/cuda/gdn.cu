/* gdn.cu: Gated DeltaNet core, the recurrence row by row. A cluster of two blocks, a half of the value columns each,
 * takes a fixed number of value heads of the step's runs, so that every multiprocessor has as much of S to read and to
 * write. A warp holds S of 32 keys and 32 columns: a lane eight keys of four columns, whole lines in memory both ways.
 * Sums over keys need one barrier a row: q S is summed beside k S, before S changes, as (S_new)^T q is
 * decay S^T q + (k q) u. S, histories and the numbers of the step are read before the wait (embed stands between them
 * and whatever wrote them). Halves send one another sums of squares for the gated norm.
 *
 * Where the product before it says so (qx_op_linear's late), the inputs are there when its blocks have counted themselves,
 * and the wait, for the gate, comes at the end: so that the recurrence runs beside the gate's product.
 *
 * A block asks for more than half of the shared memory, so that two never share a multiprocessor, and has few enough
 * registers to start beside products that keep theirs by registers (launch_alone of stream.cuh). */
#include "gdn.cuh"
#include "stream.cuh"
#include <stddef.h>

#define GDN_V 64      /* value columns a block */
#define GDN_T 6       /* rows a batch: of one run, or of as many heads of runs of one row */
#define GDN_SETS 2    /* different q and k of a batch of runs of one row */
#define GDN_WINDOW 32 /* rows whose runs are divided among the clusters at a time */
#define GDN_SLOT (GDN_D * GDN_V)

/* A head and row of a batch. t: the row of its run; q: which q and k. */
struct gdn_entry {
    int32_t row, t, slot, to;
    uint32_t head, q;
};

/* TAPS: 4, or 8 for what has more. */
template <int TAPS> struct gdn_smem {
    float qk[GDN_T][2][GDN_D];
    float hist[GDN_SETS][TAPS - 1][2][GDN_D]; /* new history of q and k that replaces the old one in place */
    float vs[GDN_T][GDN_V], os[GDN_T][GDN_V];
    float part[2][4][2][GDN_V];               /* sums over 32 keys of k S and q S, rows in turn */
    float dot[2][4];                          /* of k q */
    float sq[2][2][2][8];                     /* batch, half, 32 columns, row: sums of squares */
    float hist_v[TAPS - 1][GDN_V];
    float gb[GDN_T][2];
    gdn_entry entry[GDN_T];
    uint32_t begin[GDN_SETS + 1];             /* first entries of the sets of q and k, and their end */
    uint32_t n_runs, sets, n, single;         /* of the batch; single: its runs have one row */
    uint32_t replace[GDN_SETS], pad[2];
    struct { int32_t row, len, slot, to; } run[GDN_WINDOW]; /* slots of the first row */
    uint64_t got[2];                          /* batch: barrier for the other half's sums */
    float ring[1];                            /* slots of S, each thread's own 16 bytes every 4 KiB */
};

/* Four floats at a multiple of 8 bytes. */
__device__ __forceinline__ float4 load4(const float *p)
{
    const float2 x = __ldcg((const float2 *)p), y = __ldcg((const float2 *)p + 1);
    return make_float4(x.x, x.y, y.x, y.y);
}
__device__ __forceinline__ void store4(float *p, const float4 &v)
{
    ((float2 *)p)[0] = make_float2(v.x, v.y);
    ((float2 *)p)[1] = make_float2(v.z, v.w);
}

/* Few instructions; off by some 1e-6 where x is large and the result small. */
__device__ __forceinline__ float silu_fast(float x)
{
    return __fdividef(x, 1.0f + __expf(-x));
}

/* Channels ch .. ch + 3 of an entry's row, by a lane. what: 0 q, 1 k, 2 v. Histories and constants are read before
 * the wait, inputs behind it, all of them before the first use. The new history of a kept row goes to its slot or,
 * where that is the old one, to shared memory (stash) until all have read it. first: this block writes that of q, k. */
template <int TAPS>
__device__ __forceinline__ void gdn_conv(const gdn_args &a, const gdn_entry &e, uint32_t what, uint32_t ch, bool active,
                                         bool first, bool wait, float *dst, float *stash, uint32_t stash_pitch)
{
    float4 x[TAPS];
    float w[4][TAPS];
    if (active) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                const int32_t i = (int32_t)a.taps - TAPS + j;
                w[c][j] = i >= 0 ? __ldg(a.conv_w + (uint64_t)(ch + c) * a.taps + i) : 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) {
            const int32_t at = e.t - (TAPS - 1) + j, h = at + (int32_t)a.taps - 1;
            x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at < 0 && h >= 0 && e.slot >= 0) {
                x[j] = load4(a.conv_state + e.slot * a.conv_stride + (uint64_t)h * a.channels + ch);
            }
        }
    }
    if (wait) {
        if (a.done) {
            while (count_acquire(a.done) < a.blocks) {
            }
        } else {
            pdl_wait();
        }
    }
    if (!active) {
        return;
    }
    const float *in = a.in + (uint64_t)e.row * a.in_stride + ch;
#pragma unroll
    for (int j = 0; j < TAPS; ++j) {
        const int32_t back = TAPS - 1 - j;
        if (back == 0 || (e.t >= back && back < (int32_t)a.taps)) {
            x[j] = load4(in - back * (int64_t)a.in_stride);
        }
    }
    float o[4] = {};
#pragma unroll
    for (int j = 0; j < TAPS; ++j) {
        o[0] = fmaf(w[0][j], x[j].x, o[0]);
        o[1] = fmaf(w[1][j], x[j].y, o[1]);
        o[2] = fmaf(w[2][j], x[j].z, o[2]);
        o[3] = fmaf(w[3][j], x[j].w, o[3]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        o[c] = silu_fast(o[c]);
    }
    if (what < 2) {
        float q = fmaf(o[0], o[0], fmaf(o[1], o[1], fmaf(o[2], o[2], o[3] * o[3])));
        q = rsqrtf(warp_sum(q) + 1e-6f);
        q = what == 0 ? q * 0.088388347648318447f /* 1 / sqrt(128) */ : q;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            o[c] *= q;
        }
    }
    *(float4 *)dst = make_float4(o[0], o[1], o[2], o[3]);
    const bool keep = e.to == e.slot && (what < 2 || e.t);
    if (e.to >= 0 && (keep || what == 2 || first)) {
        float *p = keep ? stash : a.conv_state + e.to * a.conv_stride + ch;
        const uint64_t pitch = keep ? stash_pitch : a.channels;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) {
            const int32_t h = j + (int32_t)a.taps - TAPS;
            if (h >= 0) {
                store4(p + (uint64_t)h * pitch, x[j + 1]);
            }
        }
    }
}

/* The runs that begin in rows r0 .. r0 + 31, but for those in `skip`. round: batches of the cluster so far. */
template <int TAPS>
__device__ __forceinline__ void gdn_window(const gdn_args &a, gdn_smem<TAPS> &s, uint32_t r0, uint32_t skip,
                                           bool &waited, bool &last, uint32_t &round)
{
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, n_rows = a.step.n_rows;
    const uint32_t half = blockIdx.x & 1, pair = blockIdx.x >> 1, pairs = gridDim.x >> 1;
    const uint32_t V = a.v_heads, g = a.group, k0 = a.k_heads * GDN_D;
    if (warp == 0) {
        const uint32_t r = r0 + lane;
        const bool in = r < n_rows && !(skip >> lane & 1);
        const int32_t first = in ? __ldcg(a.step.first + r) : -1, pos = in ? __ldcg(a.step.pos + r) : -1;
        const int32_t slot = in ? __ldcg(a.step.state_in + r) : -1, to = in ? __ldcg(a.step.state_out + r) : -1;
        uint32_t u = 0;
        for (uint32_t b = __ballot_sync(0xffffffffu, first == (int32_t)r && pos >= 0); b; b &= b - 1, ++u) {
            const uint32_t l = __ffs(b) - 1, row = r0 + l;
            const uint32_t other = ~(__ballot_sync(0xffffffffu, first == (int32_t)row && pos >= 0) >> l);
            uint32_t len = other ? __ffs(other) - 1 : 32;
            for (bool more = l + len == 32; more; len += more ? 32 : 0) { /* past the window */
                const uint32_t i = row + len + lane;
                const bool end = i >= n_rows || __ldcg(a.step.first + i) != (int32_t)row || __ldcg(a.step.pos + i) < 0;
                const uint32_t e = __ballot_sync(0xffffffffu, end);
                if (e) {
                    len += __ffs(e) - 1;
                    more = false;
                }
            }
            if (lane == l) {
                s.run[u].row = (int32_t)row;
                s.run[u].len = (int32_t)len;
                s.run[u].slot = slot;
                s.run[u].to = to;
            }
        }
        if (lane == 0) {
            s.n_runs = u;
        }
    }
    __syncthreads();
    const uint32_t total = s.n_runs * V;
    uint32_t per = (total + pairs - 1) / pairs;
    per = a.whole ? (per + g - 1) / g * g : per;
    const uint32_t i0 = pair * per, i1 = i0 + per < total ? i0 + per : total;
    /* S: keys key .. key + 7, columns col .. col + 3 */
    const uint32_t cg = warp & 1, kw = warp >> 1, col = cg * 32 + (lane & 7) * 4, key = kw * 32 + (lane >> 3) * 8;
    const uint64_t mine = half * GDN_V + key * GDN_D + col;
    const uint32_t ring = smem_addr(s.ring) + tid * 16;
    const uint64_t once = l2_read_once();
    const auto ask = [&](uint32_t i, uint32_t slot) {
        if (i < i1) {
            const uint32_t u = i / V;
            if (s.run[u].slot >= 0) {
                const float *p = a.s + s.run[u].slot * a.s_stride + (uint64_t)(i - u * V) * GDN_D * GDN_D + mine;
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    copy16_once(ring + slot * (GDN_SLOT * 4) + e * 4096, p + e * GDN_D, once);
                }
            }
        }
        copy_commit();
    };
#pragma unroll 1
    for (uint32_t e = 0; e < a.slots; ++e) {
        ask(i0 + e, e);
    }
    uint32_t at = 0, buf = 0; /* slot of the next item */
    for (uint32_t i = i0, t0 = 0; i < i1; ++round) {
        if (warp == 0) { /* the batch */
            const uint32_t j = i + lane, u0 = i / V, len = (uint32_t)s.run[u0].len, set0 = i / g;
            const bool single = len == 1;
            uint32_t n = len - t0 < GDN_T ? len - t0 : GDN_T, sets = 1, u = u0, set = 0;
            if (single) {
                u = j < i1 ? j / V : u0;
                set = j / g - set0;
                const bool in = lane < GDN_T && j < i1 && s.run[u].len == 1 && set < GDN_SETS;
                n = __ffs(~__ballot_sync(0xffffffffu, in)) - 1;
                sets = __shfl_sync(0xffffffffu, set, n - 1) + 1;
            }
            if (lane < n) {
                gdn_entry &e = s.entry[lane];
                e.t = (int32_t)(single ? 0 : t0 + lane);
                e.row = s.run[u].row + e.t;
                e.slot = s.run[u].slot;
                e.to = e.t == 0 ? s.run[u].to : __ldcg(a.step.state_out + e.row);
                e.head = (single ? j : i) - u * V;
                e.q = single ? set : lane;
            }
            if (lane <= sets) {
                s.begin[lane] = lane == 0 ? 0 : lane == sets ? n : (set0 + lane) * g - i;
            }
            if (lane == 0) {
                s.n = n;
                s.sets = sets;
                s.single = single;
            }
        }
        __syncthreads();
        const uint32_t n = s.n, sets = s.sets;
        const bool single = s.single, ends = single || t0 + n == (uint32_t)s.run[i / V].len;
        /* q and k by turns, then v of two entries a warp; the last warp has the gates as well */
        const uint32_t n_qk = 2 * (single ? sets : n), n_tasks = n_qk + (n + 1) / 2, what = warp & 1;
        const bool gate = warp == 7 && lane < n;
        if (gate) { /* to registers here they would be spilled, which waits for them */
            prefetch_l2(a.a_log + s.entry[lane].head);
            prefetch_l2(a.dt_bias + s.entry[lane].head);
        }
        const bool first = !waited;
        if (first) {
            cluster_wait();
        }
#pragma unroll 1
        for (uint32_t x = warp; x < n_tasks || x == warp; x += 8) {
            const uint32_t idx = x >> 1, own = (lane & 15) * 4;
            const bool qk = x < n_qk;
            uint32_t e = qk ? (single ? s.begin[idx] : idx) : (x - n_qk) * 2 + (lane >> 4);
            const bool active = e < n;
            e = active ? e : 0;
            const gdn_entry &en = s.entry[e];
            gdn_conv<TAPS>(a, en, qk ? what : 2,
                           qk ? what * k0 + en.head / g * GDN_D + lane * 4
                              : 2 * k0 + en.head * GDN_D + half * GDN_V + own,
                           active, half == 0 && en.head % g == 0, !waited,
                           qk ? &s.qk[idx][what][lane * 4] : &s.vs[e][own],
                           qk ? &s.hist[single ? idx : 0][0][what][lane * 4] : &s.hist_v[0][own],
                           qk ? 2 * GDN_D : GDN_V);
            waited = true;
        }
        if (gate) {
            const gdn_entry &e = s.entry[lane];
            const float *p = a.in + (uint64_t)e.row * a.in_stride + a.channels + V * GDN_D + e.head;
            const float gb = __ldcg(p), ga = __ldcg(p + V), a_log = __ldg(a.a_log + e.head), dt = __ldg(a.dt_bias + e.head);
            s.gb[lane][0] = expf(-expf(a_log) * softplus_f(ga + dt));
            s.gb[lane][1] = sigmoid_f(gb);
        }
        __syncthreads();
        if (first && a.done && tid == 0) {
            last = atomicAdd(a.done + 1, 1u) == gridDim.x - 1;
        }
        /* Who is the last to have read a history that is to be replaced in place? Its reads lie before the barrier. */
        uint32_t heads = 0, seen = 0;
        unsigned *ticket = NULL;
        if (warp == 7 && lane < sets) {
            const gdn_entry &e = s.entry[single ? s.begin[lane] : n - 1];
            if (e.slot >= 0 && e.to == e.slot) {
                heads = single ? s.begin[lane + 1] - s.begin[lane] : 1;
                ticket = a.tickets + (e.row - e.t) * (int32_t)a.k_heads + e.head / g;
                seen = a.whole ? half == 0 && (e.head + heads) % g == 0 ? 2 * g - heads : 0 : atomicAdd(ticket, heads);
            }
        }
        uint64_t *got = &s.got[round & 1];
        if (tid == 0) {
            bar_expect(got, 8 * n);
        }
        float S[8][4];
        for (uint32_t e = 0; e < n; ++e) {
            const gdn_entry &en = s.entry[e];
            if (single || e == 0) {
                if (a.slots == 1) {
                    copy_wait<0>();
                } else {
                    copy_wait<2>();
                }
                const bool has = t0 || en.slot >= 0;
#pragma unroll
                for (int h = 0; h < 8; ++h) {
                    const uint4 x = has ? lds128(ring + at * (GDN_SLOT * 4) + h * 4096) : make_uint4(0, 0, 0, 0);
                    S[h][0] = __uint_as_float(x.x), S[h][1] = __uint_as_float(x.y);
                    S[h][2] = __uint_as_float(x.z), S[h][3] = __uint_as_float(x.w);
                }
            }
            const uint32_t qi = en.q;
            float kk[8], sk[4] = {}, sq[4] = {}, dot = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 x = *(const float4 *)&s.qk[qi][1][key + 4 * h];
                const float4 y = *(const float4 *)&s.qk[qi][0][key + 4 * h];
                const float q[4] = {y.x, y.y, y.z, y.w};
                kk[4 * h] = x.x, kk[4 * h + 1] = x.y, kk[4 * h + 2] = x.z, kk[4 * h + 3] = x.w;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    dot = fmaf(kk[4 * h + b], q[b], dot);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        sk[c] = fmaf(S[4 * h + b][c], kk[4 * h + b], sk[c]);
                        sq[c] = fmaf(S[4 * h + b][c], q[b], sq[c]);
                    }
                }
            }
            if (ends && (single || e == 0)) { /* what lay in the slot has been used */
                ask(i + e * single + a.slots, at);
                at = at + 1 == a.slots ? 0 : at + 1;
            }
            const bool b4 = lane & 16, b3 = lane & 8;
#pragma unroll
            for (int c = 0; c < 4; ++c) { /* k where bit 4 of the lane is clear */
                const float x = b4 ? sq[c] : sk[c], y = b4 ? sk[c] : sq[c];
                sk[c] = x + __shfl_xor_sync(0xffffffffu, y, 16);
            }
            const float x0 = b3 ? sk[2] : sk[0], x1 = b3 ? sk[3] : sk[1];
            const float y0 = __shfl_xor_sync(0xffffffffu, b3 ? sk[0] : sk[2], 8);
            const float y1 = __shfl_xor_sync(0xffffffffu, b3 ? sk[1] : sk[3], 8);
            *(float2 *)&s.part[buf][kw][lane >> 4][col + (b3 ? 2 : 0)] = make_float2(x0 + y0, x1 + y1);
            dot += __shfl_xor_sync(0xffffffffu, dot, 16);
            dot += __shfl_xor_sync(0xffffffffu, dot, 8);
            if (cg == 0 && lane == 0) {
                s.dot[buf][kw] = dot;
            }
            __syncthreads();
            const float decay = s.gb[e][0], beta = s.gb[e][1];
            if (warp >> 1 == (e & 3)) {
                const uint32_t c = cg * 32 + lane;
                const auto &p = s.part[buf];
                const float ks = (p[0][0][c] + p[1][0][c]) + (p[2][0][c] + p[3][0][c]);
                const float qs = (p[0][1][c] + p[1][1][c]) + (p[2][1][c] + p[3][1][c]);
                const float d = (s.dot[buf][0] + s.dot[buf][1]) + (s.dot[buf][2] + s.dot[buf][3]);
                const float o = fmaf(d, beta * (s.vs[e][c] - decay * ks), decay * qs);
                s.os[e][c] = o;
                const float q = warp_sum(o * o);
                if (lane == 0) {
                    s.sq[round & 1][half][cg][e] = q;
                    send32(cluster_addr(&s.sq[round & 1][half][cg][e], half ^ 1), __float_as_uint(q),
                           cluster_addr(got, half ^ 1));
                }
            }
            float u4[4];
            {
                const float4 p0 = *(const float4 *)&s.part[buf][0][0][col];
                const float4 p1 = *(const float4 *)&s.part[buf][1][0][col];
                const float4 p2 = *(const float4 *)&s.part[buf][2][0][col];
                const float4 p3 = *(const float4 *)&s.part[buf][3][0][col];
                const float4 v = *(const float4 *)&s.vs[e][col];
                u4[0] = beta * (v.x - decay * ((p0.x + p1.x) + (p2.x + p3.x)));
                u4[1] = beta * (v.y - decay * ((p0.y + p1.y) + (p2.y + p3.y)));
                u4[2] = beta * (v.z - decay * ((p0.z + p1.z) + (p2.z + p3.z)));
                u4[3] = beta * (v.w - decay * ((p0.w + p1.w) + (p2.w + p3.w)));
            }
            buf ^= 1;
            const int32_t dest = en.to;
            float *p = a.s + dest * (int64_t)a.s_stride + (uint64_t)en.head * GDN_D * GDN_D + mine;
#pragma unroll
            for (int h = 0; h < 8; ++h) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    S[h][c] = fmaf(kk[h], u4[c], decay * S[h][c]);
                }
                if (dest >= 0) {
                    __stcs((float4 *)(p + h * GDN_D), make_float4(S[h][0], S[h][1], S[h][2], S[h][3]));
                }
            }
        }
        /* for the output: asked for where S leaves registers free, there when the other half's sums are */
        const float norm = __ldg(a.norm + half * GDN_V + tid % GDN_V);
        if (a.done) {
            pdl_wait(); /* for the gate */
        }
        float z[2];
#pragma unroll
        for (uint32_t y = 0; y < 2; ++y) {
            const uint32_t t = tid / GDN_V + 4 * y;
            z[y] = t < n ? __ldcg(a.in + (uint64_t)s.entry[t].row * a.in_stride + a.channels + s.entry[t].head * GDN_D +
                                  half * GDN_V + tid % GDN_V) : 0.0f;
        }
        if (!ends) { /* until the run's next batch */
#pragma unroll
            for (int h = 0; h < 8; ++h) {
                sts128(ring + at * (GDN_SLOT * 4) + h * 4096,
                       make_uint4(__float_as_uint(S[h][0]), __float_as_uint(S[h][1]), __float_as_uint(S[h][2]),
                                  __float_as_uint(S[h][3])));
            }
        }
        if (warp == 7 && lane < sets) {
            const bool last = heads && seen + heads == 2 * g;
            s.replace[lane] = last;
            if (last && !a.whole) {
                *ticket = 0;
            }
        }
        __syncthreads();
        bar_wait(got, round >> 1 & 1);
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t t = tid / GDN_V + 4 * e, c = tid % GDN_V;
            if (t < n) {
                const float q = (s.sq[round & 1][0][0][t] + s.sq[round & 1][0][1][t]) +
                                (s.sq[round & 1][1][0][t] + s.sq[round & 1][1][1][t]);
                const float f = rsqrtf(q * (1.0f / GDN_D) + a.eps);
                a.out[((uint64_t)s.entry[t].row * V + s.entry[t].head) * GDN_D + half * GDN_V + c] =
                    s.os[t][c] * f * norm * __fdividef(1.0f, 1.0f + __expf(-z[e]));
            }
        }
        for (uint32_t d = 0; d < sets; ++d) {
            if (!s.replace[d]) {
                continue;
            }
            const gdn_entry &e = s.entry[s.begin[d]];
            float *p = a.conv_state + e.slot * a.conv_stride + e.head / g * GDN_D;
            for (uint32_t x = tid; x < (a.taps - 1) * 64; x += 256) {
                const uint32_t h = x / 64, w = x / 32 & 1, l = x % 32 * 4;
                store4(p + (uint64_t)h * a.channels + w * k0 + l, *(const float4 *)&s.hist[d][h][w][l]);
            }
        }
        if (!single && ends && s.entry[n - 1].to >= 0 && s.entry[n - 1].to == s.entry[0].slot) {
            float *p = a.conv_state + s.entry[0].slot * a.conv_stride + 2 * k0 + s.entry[0].head * GDN_D + half * GDN_V;
            for (uint32_t x = tid; x < (a.taps - 1) * 16; x += 256) {
                const uint32_t h = x / 16, l = x % 16 * 4;
                store4(p + (uint64_t)h * a.channels + l, *(const float4 *)&s.hist_v[h][l]);
            }
        }
        __syncthreads();
        if (single) {
            i += n;
        } else {
            t0 = ends ? 0 : t0 + n;
            i += ends;
        }
    }
    copy_wait<0>();
    __syncthreads(); /* the runs have been read */
}

template <int TAPS> __global__ void __maxnreg__(112) gdn_core(const __grid_constant__ gdn_args a)
{
    extern __shared__ __align__(16) uint8_t mem[];
    gdn_smem<TAPS> &s = *(gdn_smem<TAPS> *)mem;
    const uint32_t lane = threadIdx.x & 31, windows = (a.step.n_rows + GDN_WINDOW - 1) / GDN_WINDOW;
    bool waited = false, last = false; /* last: all blocks have passed the first wait when this one has */
    pdl_next();
    if (a.chunked) {
        pdl_wait();
        if (__ldcg(a.n_short) == 0) {
            return;
        }
    }
    if (threadIdx.x < GDN_V / 32) {
        prefetch_l2(a.norm + (blockIdx.x & 1) * GDN_V + threadIdx.x * 32);
    }
    if (threadIdx.x == 0) {
        bar_init(&s.got[0], 1);
        bar_init(&s.got[1], 1);
        bar_init_done();
    }
    cluster_arrive_relaxed(); /* its wait, before the first batch: the other block's shared memory may be written */
    uint32_t round = 0;
    for (uint32_t w0 = 0; w0 < windows; w0 += 32) {
        const uint32_t skip = a.chunked && w0 + lane < windows ? __ldcg(a.chunked + w0 + lane) : 0;
        for (uint32_t b = __ballot_sync(0xffffffffu, w0 + lane < windows && skip != 0xffffffffu); b; b &= b - 1) {
            const uint32_t w = __ffs(b) - 1;
            gdn_window<TAPS>(a, s, (w0 + w) * GDN_WINDOW, __shfl_sync(0xffffffffu, skip, w), waited, last, round);
        }
    }
    if (!waited) {
        cluster_wait();
        pdl_wait();
        last = a.done && threadIdx.x == 0 && atomicAdd(a.done + 1, 1u) == gridDim.x - 1;
    }
    if (last) {
        a.done[0] = a.done[1] = 0;
    }
}

template <int TAPS> static int gdn_few(struct qx_queue *q, gdn_args &a)
{
    const uint32_t fixed = (uint32_t)offsetof(gdn_smem<TAPS>, ring);
    /* where a prompt's long runs are others' work there is little to do here, and little is to be in the way */
    a.slots = !a.chunked && fixed + 3 * GDN_SLOT * 4 <= (uint32_t)q->smem_max ? 3 : 1;
    const uint32_t smem = fixed + a.slots * GDN_SLOT * 4;
    const uint32_t most = (uint32_t)q->n_sm / 2, pairs = a.v_heads * (a.step.n_rows < most ? a.step.n_rows : most);
    return launch_cluster(q, "gdn", gdn_core<TAPS>, dim3(2 * (pairs < most ? pairs : most)), dim3(256),
                          a.slots == 1 || smem > ALONE_SHARED ? smem : ALONE_SHARED, 2, a);
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
    if ((((uintptr_t)o->in | (uintptr_t)o->conv_state) & 7) || o->in_stride % 2 || o->conv_slot_stride % 2) {
        return qx_queue_refuse(q, "gdn", "rows that do not begin at a multiple of 8 bytes");
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
    a.whole = (uint64_t)n * o->k_heads > QX_N_TICKETS;
    a.tickets = q->tickets;
    a.channels = (2 * o->k_heads + o->v_heads) * GDN_D;
    if (q->late.y == o->in && q->late.at == q->n_launches) {
        a.done = q->late_done;
        a.blocks = q->late.blocks;
        q->late.y = NULL;
    }
    if (gdn_prompt_fits(q, o)) {
        if (a.done) {
            return qx_queue_refuse(q, "gdn", "a prompt's rows whose gate comes late");
        }
        const int r = gdn_prompt(q, o, &a);
        if (r) {
            return r;
        }
    }
    return o->conv_kernel <= 4 ? gdn_few<4>(q, a) : gdn_few<8>(q, a);
}
