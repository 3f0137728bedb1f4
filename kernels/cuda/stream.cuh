/* stream.cuh: weights through a ring of shared memory. One warp of a block, the producer, keeps bulk copies
 * in flight; the others, the consumers, decode from shared memory and multiply on tensor cores. The producer
 * needs nothing that an earlier op writes, so it starts before the op before has ended.
 *
 * Activations are one bf16 term and the A operand of mma.m16n8k16 (16 rows of the step), eight rows of the
 * matrix are B. A "step" is 64 bytes of codes of each of the eight rows: lane (g, q) = (lane / 4, lane % 4)
 * takes the 16-byte chunk q of row g, and activations are read in the order of k that this gives. Rows lie
 * 64 bytes modulo 128 apart, so that a quarter warp meets no bank twice.
 *
 * A row's sum depends on its matrix only: warp w adds the steps w, w + 8, ... of each segment, even and odd
 * halves of a step apart, and the warps' sums are added in order. Neither the block a row falls to nor the
 * number of rows of activations changes a bit. */
#ifndef QX_CUDA_STREAM_CUH
#define QX_CUDA_STREAM_CUH

#include "tile.cuh"

#define STREAM_WARPS 8u    /* consumers */
#define STREAM_ROWS 8u     /* rows of a matrix a slot */
#define STREAM_MAX_SLOTS 16u

/* ---- launching -------------------------------------------------------------------------------- */

/* One block a multiprocessor, and beside it one of the next such kernel, which fetches its weights before
 * this one has ended. Blocks of one kernel must not share a multiprocessor, which the hardware prefers while
 * others are busy with an earlier kernel: so each takes more than half of the shared memory or of the registers
 * (blocks get idle warps for that), as it prefers, and two kernels that follow one another differ. */
__host__ inline bool can_stream(const struct qx_queue *q)
{
    return q->capability >= 90 && q->capability < 120; /* bulk copies, and 227 KiB of shared memory */
}
#define ALONE_SHARED (116u << 10)
#define ALONE_SHARED_LEFT (109u << 10) /* what a block by registers may have */
#define ALONE_REGISTERS 32768u

template <class... P, class... A>
static int launch_alone_by(struct qx_queue *q, const char *name, bool by_registers, void (*kernel)(P...), dim3 grid,
                           unsigned threads, uint32_t smem, A... args)
{
    q->by_registers = q->alone_at && q->alone_at == q->n_launches ? !q->by_registers : by_registers;
    q->alone_at = q->n_launches + 1;
    if (smem > ALONE_SHARED_LEFT) {
        q->by_registers = false;
    }
    if (!q->by_registers) {
        smem = smem > ALONE_SHARED ? smem : ALONE_SHARED;
    } else {
        cudaFuncAttributes f;
        cudaError_t e = cudaFuncGetAttributes(&f, (const void *)kernel);
        if (e != cudaSuccess) {
            return qx_queue_fail(q, e, name);
        }
        const unsigned regs = (unsigned)(f.numRegs + 7) / 8 * 8;
        const unsigned need = (ALONE_REGISTERS / regs + 32) / 32 * 32;
        threads = need > threads && need <= (unsigned)f.maxThreadsPerBlock ? need : threads;
    }
    return launch(q, name, kernel, grid, dim3(threads), smem, args...);
}

template <class... P, class... A>
static int launch_alone(struct qx_queue *q, const char *name, void (*kernel)(P...), dim3 grid, unsigned threads,
                        uint32_t smem, A... args)
{
    return launch_alone_by(q, name, true, kernel, grid, threads, smem, args...);
}

/* ---- barriers and copies -------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bar_init(uint64_t *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void bar_expect(uint64_t *b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bar_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(b)) : "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t *b, uint32_t parity)
{
    asm volatile("{\n .reg .pred p;\n"
                 "again:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 " @p bra done;\n bra again;\n done:\n}" ::"r"(smem_addr(b)),
                 "r"(parity)
                 : "memory");
}
/* Bytes that are read once: first to leave L2. */
__device__ __forceinline__ uint64_t l2_read_once()
{
    uint64_t p;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
/* n: a multiple of 16, as are both addresses. */
__device__ __forceinline__ void bulk_load(void *dst, const void *src, uint32_t n, uint64_t *bar,
                                          uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(smem_addr(dst)),
                 "l"(src), "r"(n), "r"(smem_addr(bar)), "l"(policy)
                 : "memory");
}
#else /* the host does not choose these kernels there */
__device__ __forceinline__ void bar_init(uint64_t *, uint32_t) {}
__device__ __forceinline__ void bar_init_done() {}
__device__ __forceinline__ void bar_expect(uint64_t *, uint32_t) {}
__device__ __forceinline__ void bar_arrive(uint64_t *) {}
__device__ __forceinline__ void bar_wait(uint64_t *, uint32_t) {}
__device__ __forceinline__ uint64_t l2_read_once() { return 0; }
__device__ __forceinline__ void bulk_load(void *, const void *, uint32_t, uint64_t *, uint64_t) {}
#endif

/* A barrier of the consumers only. */
__device__ __forceinline__ void consumers_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(STREAM_WARPS * 32) : "memory");
}

/* ---- a matrix as it streams ------------------------------------------------------------------ */

struct stream_w {
    const uint8_t *codes, *scale;
    uint32_t row_bytes, scale_bytes; /* from row to row; scale_bytes only of what streams (MX, NV) */
    uint32_t bytes;                  /* code bytes of a row that are read */
    uint32_t seg, n_seg;             /* bytes of a segment, segments of a row; the last may be shorter */
    uint32_t seg_scale;              /* scale bytes of a segment */
    uint32_t pitch, pitch_scale;     /* of rows in shared memory */
    uint32_t rows, row0, scale_cols; /* scale_cols: of FP8_BLOCK */
    float factor;
    uint8_t tf, scale_bf16;
};

/* k a scale that streams beside the codes; 0: none does. */
__host__ inline uint32_t stream_per_scale(uint8_t f)
{
    return f == TF_MX ? 32 : f == TF_NV ? 16 : 0;
}
/* All of w but how it is cut into segments, where it has a format for streaming. */
__host__ inline stream_w stream_whole(const struct qx_weight &w)
{
    stream_w s = {};
    s.tf = tile_format(w, 0, w.cols);
    const uint32_t per = stream_per_scale(s.tf);
    s.codes = (const uint8_t *)w.codes;
    s.scale = (const uint8_t *)w.scale;
    s.row_bytes = s.bytes = (uint32_t)weight_row_bytes(w.fmt, w.cols);
    s.scale_bytes = per ? w.cols / per : 0;
    s.rows = w.rows;
    s.row0 = w.row0;
    s.scale_cols = (w.cols + 127) / 128;
    s.factor = s.tf == TF_NV ? w.global * 0x1p26f : s.tf == TF_FP8 ? w.global : 1.0f;
    s.scale_bf16 = w.scale_bf16;
    return s;
}

/* False: not a matrix for streaming (odd widths and formats). */
__host__ inline bool make_stream_w(const struct qx_weight &w, uint32_t seg_max, stream_w *s)
{
    *s = stream_whole(w);
    if (s->tf == TF_GEN || w.rows == 0) {
        return false;
    }
    const uint32_t per = stream_per_scale(s->tf);
    if (per && (w.cols % (per * 16) || ((uintptr_t)w.scale & 15))) {
        return false;
    }
    /* the largest equal segments of whole steps for all warps, else the largest */
    const uint32_t scale_unit = per ? (s->tf == TF_NV ? per * 16 / 2 : per * 16) : 64; /* bytes of 16 scales */
    s->seg = 0;
    for (uint32_t n = seg_max / 512 * 512; n >= 1024; n -= 512) {
        if (s->bytes % n == 0 && n % scale_unit == 0) {
            s->seg = n;
            break;
        }
    }
    if (!s->seg) {
        s->seg = seg_max / 512 * 512;
        s->seg = s->seg < s->bytes ? s->seg : s->bytes;
    }
    s->n_seg = (s->bytes + s->seg - 1) / s->seg;
    s->seg_scale = per ? (s->tf == TF_NV ? s->seg * 2 : s->seg) / per : 0;
    s->pitch = (s->seg + 63) / 128 * 128 + 64;
    s->pitch_scale = s->seg_scale;
    return true;
}
__host__ __device__ inline uint32_t stream_slot_bytes(const stream_w &w)
{
    return STREAM_ROWS * (w.pitch + w.pitch_scale);
}

/* The ring: slots with a barrier for "full" and one for "empty" each. */
struct stream_ring {
    uint8_t *base;
    uint64_t *full, *empty;
    uint32_t slot_bytes, n_slots;
    uint32_t slot, phase; /* the next slot; each side counts for itself */
    __device__ __forceinline__ void next()
    {
        if (++slot == n_slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* All threads, before anything else of the ring. */
__device__ __forceinline__ void ring_init(stream_ring &r, uint32_t tid)
{
    if (tid < r.n_slots) {
        bar_init(r.full + tid, 1);
        bar_init(r.empty + tid, STREAM_WARPS);
    }
    bar_init_done();
    __syncthreads();
}

/* The producer warp: rows row .. row + n of w, segment s, into the next slot. */
__device__ __forceinline__ void ring_fill(stream_ring &r, const stream_w &w, uint32_t row, uint32_t n,
                                          uint32_t s, uint64_t policy, uint32_t lane)
{
    const uint32_t at = s * w.seg, bytes = w.bytes - at < w.seg ? w.bytes - at : w.seg;
    const uint32_t sat = s * w.seg_scale;
    const uint32_t sbytes = w.seg_scale ? (w.scale_bytes - sat < w.seg_scale ? w.scale_bytes - sat : w.seg_scale)
                                        : 0;
    bar_wait(r.empty + r.slot, r.phase ^ 1);
    if (lane == 0) {
        bar_expect(r.full + r.slot, n * (bytes + sbytes));
    }
    __syncwarp();
    uint8_t *d = r.base + r.slot * r.slot_bytes;
    if (lane < n) {
        bulk_load(d + lane * w.pitch, w.codes + (uint64_t)(row + lane) * w.row_bytes + at, bytes,
                  r.full + r.slot, policy);
    } else if (sbytes && w.n_seg == 1) {
        if (lane == 8) { /* rows of scales lie one after another on both sides */
            bulk_load(d + STREAM_ROWS * w.pitch, w.scale + (uint64_t)row * w.scale_bytes, n * sbytes,
                      r.full + r.slot, policy);
        }
    } else if (sbytes && lane >= 8 && lane - 8 < n) {
        bulk_load(d + STREAM_ROWS * w.pitch + (lane - 8) * w.pitch_scale,
                  w.scale + (uint64_t)(row + lane - 8) * w.scale_bytes + sat, sbytes, r.full + r.slot, policy);
    }
    r.next();
}

/* ---- activations ------------------------------------------------------------------------------ */

/* Shared activations: token t's 16-byte units (eight k) at xs[t * pitch16 + unit]. With nv set the values of
 * a unit and the units of a step lie as decoded E2M1 codes need them. */
struct stream_x {
    const uint4 *xs;
    uint32_t pitch16, n_tok;
};
__host__ __device__ inline uint32_t stream_x_pitch16(uint32_t k)
{
    const uint32_t units = (k + 127) / 128 * 16;
    return (units + 3) / 8 * 8 + 4;
}
__device__ __forceinline__ uint32_t stream_x_unit(uint32_t u, bool nv)
{
    return nv ? (u & ~15u) + (u & 3) * 4 + ((u >> 2) & 3) : u;
}
__device__ __forceinline__ uint4 stream_x_pack(const float4 &a, const float4 &b, bool nv)
{
    return nv ? make_uint4(pack_bf16(a.x, b.x), pack_bf16(a.y, b.y), pack_bf16(a.z, b.z), pack_bf16(a.w, b.w))
              : make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
}

/* nt threads copy n_tok rows of k values, rounded to bf16, zeros after k. */
__device__ __forceinline__ void stream_stage(uint4 *xs, uint32_t pitch16, const float *x, uint64_t stride,
                                             uint32_t n_tok, uint32_t k, bool nv, uint32_t tid, uint32_t nt)
{
    const uint32_t units = (k + 127) / 128 * 16;
    const bool wide = (((uintptr_t)x | stride * 4) & 15) == 0;
    constexpr int B = 3; /* loads of so many units in flight */
    const uint32_t n = n_tok * units;
    for (uint32_t i0 = tid; i0 < n; i0 += B * nt) {
        float4 a[B], b[B];
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * nt, t = i / units, e = (i - t * units) * 8;
            a[j] = b[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < n) {
                const float *p = x + t * stride + e;
                if (wide && e + 8 <= k) {
                    a[j] = __ldcg((const float4 *)p);
                    b[j] = __ldcg((const float4 *)p + 1);
                } else if (e < k) {
                    float v[8];
#pragma unroll
                    for (int q = 0; q < 8; ++q) {
                        v[q] = e + q < k ? __ldcg(p + q) : 0.0f;
                    }
                    a[j] = make_float4(v[0], v[1], v[2], v[3]);
                    b[j] = make_float4(v[4], v[5], v[6], v[7]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < B; ++j) {
            const uint32_t i = i0 + j * nt, t = i / units, u = i - t * units;
            if (i < n) {
                xs[t * pitch16 + stream_x_unit(u, nv)] = stream_x_pack(a[j], b[j], nv);
            }
        }
    }
}

/* ---- decoding E4M3 without conversions -------------------------------------------------------- */

/* Four codes as bf16 pairs (0,1) (2,3), to be multiplied with 2^120: the seven bits of a code are placed as
 * exponent and fraction of bf16. NaN codes come out as 480. */
__device__ __forceinline__ void place_e4m3(uint32_t w, uint32_t &p0, uint32_t &p1)
{
    const uint32_t a = __byte_perm(w, 0, 0x1404), b = __byte_perm(w, 0, 0x3424);
    p0 = (a & 0x80008000u) | ((a >> 4) & 0x07f007f0u);
    p1 = (b & 0x80008000u) | ((b >> 4) & 0x07f007f0u);
}
/* Sixteen codes x s (a bf16 pair of a power of two or NaN): p[2 i], p[2 i + 1] of word i. */
template <bool SCALED>
__device__ __forceinline__ void dec_e4m3x16(const uint4 &v, uint32_t s, uint32_t (&p)[8])
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    uint32_t nan = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        nan |= (w[i] & 0x7f7f7f7fu) + 0x01010101u;
        place_e4m3(w[i], p[2 * i], p[2 * i + 1]);
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
            p[j] = mul_bf16x2(p[j], 0x7b807b80u);
            if (SCALED) {
                p[j] = mul_bf16x2(p[j], s);
            }
        }
    }
    if (nan & 0x80808080u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            dec_fp8(w[i], SCALED ? bf16_lo(s) : 1.0f, p[2 * i], p[2 * i + 1]);
        }
    }
}
/* An E8M0 code as a bf16 pair. */
__device__ __forceinline__ uint32_t e8m0_pair(uint32_t c)
{
    const uint32_t b = c == 0xff ? 0x7fc0u : c == 0 ? 0x0040u : c << 7;
    return b * 0x10001u;
}

/* ---- one slot ---------------------------------------------------------------------------------- */

/* Sums of a warp: TB blocks of eight rows of activations; [0] and [1] are the two halves of a step. */
template <int TB> struct stream_acc {
    static constexpr int NM = (TB + 1) / 2;
    float c[2][NM][4];
};

template <int TB>
__device__ __forceinline__ void stream_mma(float (&c)[stream_acc<TB>::NM][4], const uint4 (&x)[TB], int half,
                                           uint32_t b0, uint32_t b1)
{
#pragma unroll
    for (int i = 0; i < stream_acc<TB>::NM; ++i) {
        const uint4 &l = x[2 * i];
        const uint32_t h0 = 2 * i + 1 < TB ? (half ? x[2 * i + 1 < TB ? 2 * i + 1 : 0].z
                                                   : x[2 * i + 1 < TB ? 2 * i + 1 : 0].x) : 0u;
        const uint32_t h1 = 2 * i + 1 < TB ? (half ? x[2 * i + 1 < TB ? 2 * i + 1 : 0].w
                                                   : x[2 * i + 1 < TB ? 2 * i + 1 : 0].y) : 0u;
        mma_bf16(c[i], half ? l.z : l.x, h0, half ? l.w : l.y, h1, b0, b1);
    }
}

template <int TB>
__device__ __forceinline__ void stream_x_load(uint4 (&x)[TB], const stream_x &xs, uint32_t unit, uint32_t g)
{
#pragma unroll
    for (int i = 0; i < TB; ++i) {
        const uint32_t t = i * 8 + g;
        x[i] = t < xs.n_tok ? xs.xs[t * xs.pitch16 + unit] : make_uint4(0, 0, 0, 0);
    }
}

/* acc += the warp's steps of segment s, which lies at `slot`. row: the matrix row of the slot's first. */
template <int F, int TB>
__device__ __forceinline__ void stream_slot(stream_acc<TB> &acc, const stream_w &w, const uint8_t *slot,
                                            uint32_t row, uint32_t s, const stream_x &xs, uint32_t warp,
                                            uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
    const uint32_t at = s * w.seg, bytes = w.bytes - at < w.seg ? w.bytes - at : w.seg;
    const uint32_t steps = (bytes + 63) / 64;
    const uint8_t *c = slot + g * w.pitch + q * 16;
    const uint8_t *sc = slot + STREAM_ROWS * w.pitch + g * w.pitch_scale;
    constexpr uint32_t UNITS = tf<F>::KB / 8; /* units of activations a step */
    const uint32_t u0 = at / 64 * UNITS;
    uint64_t block_row = 0;
    if (F == TF_BLOCK) {
        const uint32_t r = row + g < w.rows ? row + g : w.rows - 1;
        block_row = (uint64_t)((w.row0 + r) / 128) * w.scale_cols;
    }
#pragma unroll 2
    for (uint32_t st = warp; st < steps; st += STREAM_WARPS) {
        const bool in = st * 64 + q * 16 < bytes;
        const uint4 v = in ? *(const uint4 *)(c + st * 64) : make_uint4(0, 0, 0, 0);
        const uint32_t u = u0 + st * UNITS;
        if (F == TF_BF16) {
            uint4 x[TB];
            stream_x_load<TB>(x, xs, u + q, g);
            stream_mma<TB>(acc.c[0], x, 0, v.x, v.y);
            stream_mma<TB>(acc.c[1], x, 1, v.z, v.w);
        } else if (F == TF_NV) {
            const uint32_t e = *(const uint16_t *)(sc + st * 8 + q * 2);
            const float2 sf = e4m3x2_f((uint16_t)(in ? e : 0));
            const uint32_t s0 = nv_scale(sf.x), s1 = nv_scale(sf.y);
            const uint32_t vv[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint4 x[TB];
                stream_x_load<TB>(x, xs, u + j * 4 + q, g);
                uint32_t p[4];
                dec_nv(vv[j], j < 2 ? s0 : s1, p);
                stream_mma<TB>(acc.c[0], x, 0, p[0], p[1]);
                stream_mma<TB>(acc.c[1], x, 1, p[2], p[3]);
            }
        } else {
            uint32_t p[8];
            dec_e4m3x16<F == TF_MX>(v, F == TF_MX ? e8m0_pair(in ? sc[st * 2 + q / 2] : 0) : 0, p);
            stream_acc<TB> part = {};
            float b0 = 1.0f, b1 = 1.0f;
            if (F == TF_BLOCK) {
                /* the accumulator's columns are the rows 2 q and 2 q + 1 */
                const uint64_t i = block_row + (at + st * 64) / 128;
                const float b = w.scale_bf16 ? bf16_f(__ldg((const uint16_t *)w.scale + i))
                                             : __ldg((const float *)w.scale + i);
                b0 = __shfl_sync(0xffffffffu, b, q * 8);
                b1 = __shfl_sync(0xffffffffu, b, q * 8 + 4);
            }
            stream_acc<TB> &to = F == TF_BLOCK ? part : acc;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint4 x[TB];
                stream_x_load<TB>(x, xs, u + 2 * q + j, g);
                stream_mma<TB>(to.c[0], x, 0, p[4 * j], p[4 * j + 1]);
                stream_mma<TB>(to.c[1], x, 1, p[4 * j + 2], p[4 * j + 3]);
            }
            if (F == TF_BLOCK) {
#pragma unroll
                for (int i = 0; i < stream_acc<TB>::NM; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        acc.c[h][i][0] = fmaf(b0, part.c[h][i][0], acc.c[h][i][0]);
                        acc.c[h][i][1] = fmaf(b1, part.c[h][i][1], acc.c[h][i][1]);
                        acc.c[h][i][2] = fmaf(b0, part.c[h][i][2], acc.c[h][i][2]);
                        acc.c[h][i][3] = fmaf(b1, part.c[h][i][3], acc.c[h][i][3]);
                    }
                }
            }
        }
    }
}

/* Floats of one warp's result: [TB * 8 rows of activations][8 rows of the matrix]. */
template <int TB>
__device__ __forceinline__ void stream_store(float *red, const stream_acc<TB> &acc, uint32_t lane)
{
    const uint32_t g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int i = 0; i < TB; ++i) {
        const int h = (i & 1) * 2;
        *(float2 *)(red + (i * 8 + g) * 8 + 2 * q) =
            make_float2(acc.c[0][i / 2][h] + acc.c[1][i / 2][h], acc.c[0][i / 2][h + 1] + acc.c[1][i / 2][h + 1]);
    }
}
/* The sum over the warps of result i. */
template <int TB> __device__ __forceinline__ float stream_sum(const float *red, uint32_t i)
{
    float s = red[i];
#pragma unroll
    for (uint32_t w = 1; w < STREAM_WARPS; ++w) {
        s += red[w * (TB * 64) + i];
    }
    return s;
}

#endif
