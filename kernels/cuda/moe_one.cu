/* moe_one.cu: down of NVFP4 experts for one and two rows of decoding in the released widths, beside a shared expert of
 * BF16 or MXFP8; inputs of products are bf16. Gate and up are in moe_one_up.cu, of two rows in moe_rows.cu;
 * the sums are, bit for bit, those of moe_nv.cu, which takes more rows.
 *
 * A block has 20 output rows, all of whose weights lie in shared memory before its columns are there (moe_one.cuh). The
 * two halves of its warps take batches of five experts by turns; four times four rows, of one or two experts, make a
 * tile.
 *
 * Instructions that nothing has run since the layer before come from far away, and later still behind queued weights: so
 * before its inputs are there, warps that have nothing else to do run the parts of what follows, each another, on
 * nothing.
 *
 * What is read before the wait: the launch before lets this start only after the picks are known, so expert numbers,
 * weights and the block's count are read at once, and the columns as words. */
#include "moe_one.cuh"
#include "stream.cuh"

#define ONE_HCOL (NV_I * 2u + 64u) /* bytes from column to column: no two meet in a bank */

struct one_args {
    uint32_t k;
    const float *weight;
    const int32_t *expert;
    const struct qx_weight *down;
    const uint8_t *s_codes, *s_scale; /* of the shared expert */
    one_words w;
    float *y;
};

/* An expert's rows of the step; an item is row * k + slot. */
struct one_cols {
    uint32_t v; /* their number, the first item's row, the items: a byte each */

    __device__ __forceinline__ uint32_t n() const { return v & 255; }
    __device__ __forceinline__ uint32_t row() const { return v >> 8 & 255; }
    __device__ __forceinline__ uint32_t item(uint32_t i) const { return v >> (16 + 8 * i) & 255; }
};

/* What a warp runs before its inputs are there: all of what follows by turns. */
#define ONE_ALL 8u

struct one_list {
    const uint8_t *codes[ONE_ITEMS], *scale[ONE_ITEMS];
    float factor[ONE_ITEMS];
    one_cols cols[ONE_ITEMS];
    uint32_t n;
};

/* The experts that the step picked, each once, in the order of its first item, by one warp, of whose lanes each has an
 * item's expert; fill(i, e) for the i-th. */
template <int ROWS, class F>
__device__ __forceinline__ void one_find(uint32_t k, int32_t e, one_list &l, uint32_t lane, const F &fill)
{
    if (ROWS == 1) {
        if (lane < k) {
            l.cols[lane].v = 1 | lane << 16;
            fill(lane, e);
        }
        if (lane == 0) {
            l.n = k;
        }
        return;
    }
    e = lane < ROWS * k ? e : -1 - (int32_t)lane;
    const uint32_t same = __match_any_sync(0xffffffffu, e), below = (1u << lane) - 1;
    const bool fresh = lane < ROWS * k && (same & below) == 0;
    const uint32_t all = __ballot_sync(0xffffffffu, fresh), i = (uint32_t)__popc(all & below);
    if (fresh) {
        const uint32_t other = same & ~(1u << lane);
        l.cols[i].v = (other ? 2u : 1u) | (lane >= k ? 1u << 8 : 0u) | lane << 16 |
                      (uint32_t)(__ffs((int)other) - 1) << 24;
        fill(i, e);
    }
    if (lane == 0) {
        l.n = (uint32_t)__popc(all);
    }
}

/* ---- words ---- */

__device__ __forceinline__ uint32_t one_await(const uint64_t *word, uint32_t number)
{
    uint64_t v;
    do {
        v = word_read(word);
    } while ((uint32_t)(v >> 32) != number);
    return (uint32_t)v;
}
/* The same by a whole warp that may have to wait long: others use the multiprocessor and the L2 meanwhile. */
__device__ __forceinline__ void one_await_calm(const uint64_t *word, uint32_t number)
{
    while ((uint32_t)(word_read(word) >> 32) != number) {
        __nanosleep(100);
    }
}
/* A unit's four words: its values once they are all there. */
__device__ __forceinline__ bool one_read(const uint64_t *unit, uint32_t number, uint4 &v)
{
    uint32_t n[4] = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b64 a, b, c, d;\n"
                 "ld.relaxed.gpu.global.v2.u64 {a, b}, [%8];\n ld.relaxed.gpu.global.v2.u64 {c, d}, [%8 + 16];\n"
                 "mov.b64 {%0, %4}, a;\n mov.b64 {%1, %5}, b;\n mov.b64 {%2, %6}, c;\n mov.b64 {%3, %7}, d;}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w), "=r"(n[0]), "=r"(n[1]), "=r"(n[2]), "=r"(n[3])
                 : "l"(unit)
                 : "memory");
#endif
    return n[0] == number && n[1] == number && n[2] == number && n[3] == number;
}

/* ---- down ---- */

/* An expert's rows and scales of a block; two batches of experts at once, each for half of the warps. */
#define ONE_ROWS_BYTES (NV_D * NV_I / 2)
#define ONE_EXPERT (ONE_ROWS_BYTES + NV_D * NV_I / 16)
#define ONE_BATCH 5u
#define ONE_DOWN_WARPS 16u
#define ONE_HALF (ONE_DOWN_WARPS / 2)

struct one_down_shared {
    uint64_t bar, full[2];
    one_list l;
    float weight[ONE_ITEMS], gate[ONE_ROWS];
};

template <int TF, int ROWS> __global__ void __maxnreg__(64) one_down(const __grid_constant__ one_args a)
{
    using S = nv_shared<TF>;
    /* the last warps have the shared expert: groups of four rows of each part of its columns, four groups a task */
    constexpr uint32_t W = ONE_DOWN_WARPS, GROUPS = S::D_PARTS * NV_QUADS, SW = (GROUPS + 3) / 4;
    constexpr uint32_t S_ROW = NV_I * S::ELEM, S_SCALE = TF == TF_MX ? NV_I / 32 : 0;
    static_assert(NV_D * (S_ROW + S_SCALE) <= 2 * ONE_BATCH * ONE_EXPERT, "");
    extern __shared__ uint4 sm4[];
    __shared__ one_down_shared sh;
    pdl_next();
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const uint32_t items = ROWS * a.k, d0 = blockIdx.x * NV_D;
    float *res = (float *)sm4; /* [item][NV_D], then [row][part][NV_D] */
    const uint32_t hs = smem_addr(sm4) + (items + ROWS * S::D_PARTS) * (NV_D * 4), hx = hs + items * ONE_HCOL;
    const uint32_t rows = hx + ROWS * ONE_HCOL;
    unsigned *count = a.w.numbers + QX_MOE_BLOCKS + blockIdx.x;
    const uint32_t number = __ldcg(count) + 1;
    if (tid < ONE_ITEMS) {
        sh.l.cols[tid].v = 1; /* for those who run on nothing */
    }
    if (tid == 0) {
        bar_init(&sh.bar, 1);
        bar_init(&sh.full[0], 1);
        bar_init(&sh.full[1], 1);
        bar_init_done();
        bar_expect(&sh.bar, NV_D * (S_ROW + S_SCALE));
        bulk_load(rows, a.s_codes + d0 * S_ROW, NV_D * S_ROW, smem_addr(&sh.bar), l2_read_once());
        if (TF == TF_MX) {
            bulk_load(rows + NV_D * S_ROW, a.s_scale + d0 * S_SCALE, NV_D * S_SCALE, smem_addr(&sh.bar), l2_read_once());
        }
    }
    __syncthreads();
    const bool shared = warp >= W - SW;
    if (shared) {
#pragma unroll 1
        for (uint32_t i = tid - (W - SW) * 32; i < ROWS * ONE_UNITS; i += SW * 32) {
            const uint32_t c = i / ONE_UNITS, u = i - c * ONE_UNITS;
            uint4 v;
            while (!one_read(a.w.unit(ONE_ITEMS + c, u), number, v)) {
                __nanosleep(100);
            }
            sts128(hx + c * ONE_HCOL + mr_unit(u), v);
        }
        if (tid >= W * 32 - ROWS) {
            sh.gate[W * 32 - 1 - tid] = __uint_as_float(one_await(a.w.gate(W * 32 - 1 - tid), number));
        }
        bar_sync_some<SW * 32>(3);
        /* part j of a task's one or two takes columns j * ROWS and on of the products */
        const uint32_t s0 = (W - 1 - warp) * 4, first = s0 / NV_QUADS, b = g < 2 * ROWS ? g : 0, j = b / ROWS;
        const uint32_t part = first + j < (uint32_t)S::D_PARTS ? first + j : first;
        uint32_t at[2], r[2], p[2], z[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t b = s0 + 2 * i + (g >> 2), v = b < GROUPS ? b : GROUPS - 1;
            at[i] = v / NV_QUADS;
            r[i] = (v - at[i] * NV_QUADS) * 4 + (g & 3);
            p[i] = rows + r[i] * S_ROW + at[i] * (ONE_STEPS * 64) + q * 16;
            z[i] = rows + NV_D * S_ROW + r[i] * S_SCALE + at[i] * (ONE_STEPS * 2) + q / 2;
        }
        float acc[4] = {};
        bar_wait(&sh.bar, 0);
        one_shared<TF, 64>(acc, p[0], p[1], z[0], z[1], hx + (b - j * ROWS) * ONE_HCOL, part * ONE_STEPS, q);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t o = 2 * q + (i & 1), k = o / ROWS;
            if (s0 + 2 * (i / 2) + (g >> 2) < GROUPS && o < 2 * ROWS && at[i / 2] == first + k) {
                res[(items + (o - k * ROWS) * S::D_PARTS + first + k) * NV_D + r[i / 2]] = acc[i];
            }
        }
    } else if (warp == 0) {
        const int32_t e = lane < items ? __ldcg(a.expert + lane) : 0;
        one_find<ROWS>(a.k, e, sh.l, lane, [&](uint32_t i, int32_t e) {
            sh.l.codes[i] = (const uint8_t *)a.down[e].codes + d0 * (NV_I / 2);
            sh.l.scale[i] = (const uint8_t *)a.down[e].scale + d0 * (NV_I / 16);
            sh.l.factor[i] = a.down[e].global * 0x1p26f;
        });
    } else if (warp == 1 && lane < items) {
        sh.weight[lane] = __ldcg(a.weight + lane);
    }
    const uint32_t half = warp / ONE_HALF, w = warp % ONE_HALF, at = rows + half * (ONE_BATCH * ONE_EXPERT);
    /* the picked experts; the other warps run this on nothing first */
#pragma unroll 1
    for (uint32_t pass = shared || warp < 2 ? 1 : 0; pass < 2; ++pass) {
        const uint32_t what = pass ? ONE_ALL : warp % 3;
        if (pass) {
            __syncthreads();
        }
        const uint32_t n = pass ? sh.l.n : ONE_BATCH * 2;
        const auto ask = [&](uint32_t batch) { /* an expert a warp */
            const uint32_t e0 = batch * ONE_BATCH, left = n - e0 < ONE_BATCH ? n - e0 : ONE_BATCH;
            const uint32_t bar = smem_addr(&sh.full[half]), to = at + w * ONE_EXPERT;
            if (lane == 0 && w < left) {
                if (w == 0) {
                    bar_expect(bar, left * ONE_EXPERT);
                }
                bulk_load(to, sh.l.codes[e0 + w], ONE_ROWS_BYTES, bar, l2_read_once());
                bulk_load(to + ONE_ROWS_BYTES, sh.l.scale[e0 + w], ONE_EXPERT - ONE_ROWS_BYTES, bar, l2_read_once());
            }
        };
        if (pass && half * ONE_BATCH < n) {
            ask(half);
        }
        uint32_t phase = 0;
#pragma unroll 1
        for (uint32_t batch = half; batch * ONE_BATCH < n; batch += 2) {
            const uint32_t e0 = batch * ONE_BATCH, left = n - e0 < ONE_BATCH ? n - e0 : ONE_BATCH;
            if (what == ONE_ALL || what == 0) {
#pragma unroll 1
                for (uint32_t i0 = w * 32, units = left * (ROWS * ONE_UNITS); i0 < units; i0 += W * 32) {
                    const uint32_t i = i0 + lane;
                    uint4 v[2];
                    uint32_t c[2], u[2];
#pragma unroll
                    for (uint32_t h = 0; h < 2; ++h) { /* past the end: the last */
                        const uint32_t j = i + h * (W * 16) < units ? i + h * (W * 16) : units - 1;
                        c[h] = j / ONE_UNITS;
                        u[h] = j - c[h] * ONE_UNITS;
                        if (ROWS == 1) {
                            c[h] += e0;
                        } else { /* of an expert with one item that twice */
                            const one_cols col = sh.l.cols[e0 + c[h] / 2];
                            c[h] = col.item(c[h] % 2 < col.n() ? c[h] % 2 : 0);
                        }
                    }
                    if (pass) { /* one request a warp until the first is there */
                        const uint64_t *z = a.w.unit(c[1], u[1]);
                        one_await_calm((const uint64_t *)__shfl_sync(0xffffffffu, (unsigned long long)z, 31), number);
                    }
                    bool late;
                    do {
                        const bool there = one_read(a.w.unit(c[0], u[0]), number, v[0]);
                        late = !one_read(a.w.unit(c[1], u[1]), number, v[1]) || !there;
                    } while (late && pass);
#pragma unroll
                    for (uint32_t h = 0; h < 2; ++h) {
                        if (pass && i + h * (W * 16) < units) {
                            sts128(hs + c[h] * ONE_HCOL + nv_unit(u[h]), v[h]);
                        }
                    }
                }
            }
            if (pass) {
                bar_sync_some<ONE_HALF * 32>(1 + half);
                bar_wait(&sh.full[half], phase);
                phase ^= 1;
            }
            const uint32_t groups = left * NV_QUADS, b0 = 4 * w;
            if ((what == ONE_ALL && b0 < groups) || what == 1) {
                const uint32_t last = b0 + 3 < groups ? b0 + 3 : groups - 1, i0 = b0 / NV_QUADS, i1 = last / NV_QUADS;
                const one_cols c0 = sh.l.cols[e0 + i0], c1 = sh.l.cols[e0 + i1];
                const uint32_t n0 = ROWS == 1 ? 1 : c0.n(), n1 = i1 == i0 ? 0 : ROWS == 1 ? 1 : c1.n();
                /* columns: the first expert's, then the second's */
                const bool other = g >= n0 && g - n0 < n1;
                const uint32_t j = other ? g - n0 : g < n0 ? g : 0;
                uint32_t x[1] = {hs + q * 16 + (ROWS == 1 ? e0 + (other ? i1 : i0) : (other ? c1 : c0).item(j)) * ONE_HCOL};
                uint32_t p[2], z[2];
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    const uint32_t b = b0 + 2 * i + (g >> 2), v = b < groups ? b : groups - 1, e = v / NV_QUADS;
                    const uint32_t r = (v - e * NV_QUADS) * 4 + (g & 3), to = (pass ? at : hs) + e * ONE_EXPERT;
                    p[i] = to + r * (NV_I / 2) + q * 16;
                    z[i] = to + ONE_ROWS_BYTES + r * (NV_I / 16) + q * 2;
                }
                float acc[1][4] = {};
                uint4 v0 = lds128(p[0]), v1 = lds128(p[1]);
                uint32_t f0 = lds16(z[0]), f1 = lds16(z[1]);
#pragma unroll 1
                for (uint32_t s = 0; s < ONE_STEPS; ++s) { /* the next step's codes come meanwhile */
                    const uint32_t on = s + 1 < ONE_STEPS;
                    p[0] += on * 64, p[1] += on * 64, z[0] += on * 8, z[1] += on * 8;
                    const uint4 w0 = lds128(p[0]), w1 = lds128(p[1]);
                    const uint32_t g0 = lds16(z[0]), g1 = lds16(z[1]);
                    nv_step<1>(acc, v0, v1, f0, f1, x, 0);
                    v0 = w0, v1 = w1, f0 = g0, f1 = g1;
                    x[0] += 256;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t b = b0 + 2 * i + (g >> 2), e = b / NV_QUADS;
                    const bool second = e != i0;
                    const float f = sh.l.factor[e0 + (e <= i1 ? e : i1)];
#pragma unroll
                    for (int z = 0; z < 2; ++z) {
                        const uint32_t o = 2 * q + z - (second ? n0 : 0);
                        if (pass && b < groups && o < (second ? n1 : n0)) {
                            const uint32_t item = ROWS == 1 ? e0 + e : (second ? c1 : c0).item(o);
                            res[item * NV_D + (b - e * NV_QUADS) * 4 + (g & 3)] = f * acc[0][2 * i + z];
                        }
                    }
                }
            }
            if (!pass) {
                break;
            }
            if ((batch + 2) * ONE_BATCH < n) {
                bar_sync_some<ONE_HALF * 32>(1 + half);
                ask(batch + 2);
            }
        }
        if (pass) {
            __syncthreads();
        }
        if (what == ONE_ALL || what == 2) {
            const uint32_t i = pass ? tid : lane;
            if (i < ROWS * NV_D) {
                const uint32_t o = i / NV_D, d = i - o * NV_D;
                const float *sums = pass ? res : (const float *)((uint8_t *)sm4 + (hs - smem_addr(sm4)));
                float s = 0.0f, v = 0.0f;
#pragma unroll 5
                for (uint32_t k = 0; k < a.k; ++k) {
                    s = fmaf(sh.weight[o * a.k + k], sums[(o * a.k + k) * NV_D + d], s);
                }
#pragma unroll
                for (uint32_t p = 0; p < (uint32_t)S::D_PARTS; ++p) {
                    v += sums[(items + o * S::D_PARTS + p) * NV_D + d];
                }
                if (pass) {
                    a.y[o * NV_H + d0 + d] = fmaf(sh.gate[o], v, s);
                }
            }
        }
    }
    pdl_wait();
    if (tid == 0) {
        *count = number;
    }
}

/* ---- launching ---- */

bool qx_moe_one_takes(const struct qx_queue *q, const struct qx_op_moe *o)
{
    const uint8_t f = o->s_gate.fmt;
    return o->n_rows <= ONE_ROWS && o->experts.fmt == QX_W_NVFP4 && o->experts.hidden == NV_H &&
           o->experts.inter == NV_I && o->s_inter == NV_I && o->act_bf16 && o->k <= NV_MAX_K &&
           (f == QX_W_BF16 || f == QX_W_MXFP8) && o->s_up.fmt == f && o->s_down.fmt == f &&
           o->s_gate_vec.fmt == QX_W_BF16 && mr_aligned(o->s_gate) && mr_aligned(o->s_up) && mr_aligned(o->s_down) &&
           ((uintptr_t)o->m & 15) == 0 && can_stream(q) && q->smem_max >= (int)ALONE_SHARED &&
           q->n_sm >= (int)NV_BLOCKS && q->n_sm <= (int)QX_MOE_BLOCKS;
}

template <int TF, int ROWS> static int one_run(struct qx_queue *q, const one_args &a)
{
    const uint32_t items = ROWS * a.k;
    const uint32_t smem = (items + ROWS * nv_shared<TF>::D_PARTS) * (NV_D * 4) + (items + ROWS) * ONE_HCOL +
                          2 * ONE_BATCH * ONE_EXPERT;
    return launch(q, "moe", one_down<TF, ROWS>, dim3(NV_BLOCKS), dim3(ONE_DOWN_WARPS * 32), smem, a);
}

int qx_moe_one_down(struct qx_queue *q, const struct qx_op_moe *o, const one_words &w)
{
    one_args a = {};
    a.k = o->k;
    a.weight = o->weight;
    a.expert = o->expert;
    a.down = o->experts.down;
    a.s_codes = (const uint8_t *)o->s_down.codes;
    a.s_scale = (const uint8_t *)o->s_down.scale;
    a.w = w;
    a.y = o->y;
    if (o->s_down.fmt == QX_W_BF16) {
        return o->n_rows == 1 ? one_run<TF_BF16, 1>(q, a) : one_run<TF_BF16, 2>(q, a);
    }
    return o->n_rows == 1 ? one_run<TF_MX, 1>(q, a) : one_run<TF_MX, 2>(q, a);
}
