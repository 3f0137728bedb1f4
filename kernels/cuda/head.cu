/* head.cu: the largest of a head's logits without reading all of it. A copy in six bits a value gives every logit
 * within a bound that is known for its row; only rows whose logit may be the largest are read as they are stored. The
 * result is that of the whole head; with bounds of 3 % of a row's length that is a few hundred rows of 248,320 where
 * nothing stands out.
 *
 * The copy: tiles of eight rows, in them chunks of 128 columns, each as the lanes of a warp take it. Lane 4 g + q has
 * row g's columns 32 j + 8 q + 0 .. 7, j < 4, as pairs P = 4 j + 0 .. 3 of codes 0 .. 63, which mean (code - 32) / 64
 * of the scale of the row's 64 columns j / 2. In each half of six words: bits 0 to 5 and 6 to 11 of word w are pairs 2 w
 * and 2 w + 1, bits 12 to 15 the low bits of pair 12 + w for w < 4, the high bits of pairs 12 to 15 in turn for w = 4, 5.
 * First all lanes' words 0 to 3, then words 4 and 5, then the scales, a byte each: five bits of exponent, three of
 * fraction. */
#include "best.cuh"
#include "stream.cuh"

#define HB_T 256u
#define HB_BLOCKS 128u /* of eight rows of input, to look for the largest; no more than threads */
#define HB_TOK 8u      /* rows of input a block; no more than warps */
#define HB_CHUNK 784u  /* bytes of 8 x 128 values */
#define HB_BASE 0x30000000u /* of scales: the smallest, over HB_UNIT */
#define HB_UNIT 256.0f

__device__ __forceinline__ float hb_scale(uint32_t code)
{
    return __uint_as_float(code << 20 | HB_BASE);
}

/* ---- the copy --------------------------------------------------------------------------------- */

/* A warp a tile. */
__global__ void __launch_bounds__(256) head_copy_tiles(struct qx_op_head_copy a)
{
    pdl_next();
    pdl_wait();
    const uint32_t tile = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const uint32_t cols = a.from.cols, row = tile * 8 + g, n_chunks = (cols + 127) / 128;
    if (tile * 8 >= a.from.rows) {
        return;
    }
    const uint16_t *from = (const uint16_t *)a.from.codes + (uint64_t)row * cols;
    uint8_t *to = a.codes + (uint64_t)tile * n_chunks * HB_CHUNK;
    float d2 = 0.0f, w2 = 0.0f;
    for (uint32_t c = 0; c < n_chunks; ++c, to += HB_CHUNK) {
        uint32_t word[6] = {}, scales = 0;
#pragma unroll
        for (uint32_t pair = 0; pair < 2; ++pair) { /* of groups of 32: a scale */
            float v[2][8], most = 0.0f;
            bool finite = true;
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                const uint32_t col = c * 128 + pair * 64 + j * 32 + q * 8;
                const uint4 u = row < a.from.rows && col < cols ? ld_stream(from + col) : make_uint4(0, 0, 0, 0);
                const uint32_t p[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    v[j][i] = i & 1 ? bf16_hi(p[i / 2]) : bf16_lo(p[i / 2]);
                    finite = finite && isfinite(v[j][i]);
                    most = fmaxf(most, fabsf(v[j][i]));
                    w2 = fmaf(v[j][i], v[j][i], w2);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            finite = (__ballot_sync(0xffffffffu, finite) >> (lane & ~3u) & 15u) == 15u;
            const uint32_t bits = __float_as_uint(__fdiv_rn(most * 64.0f, 31.0f * HB_UNIT)) + 0xfffffu;
            const uint32_t code = !finite || bits >= HB_BASE + (256u << 20) ? 255
                                  : bits < HB_BASE                          ? 0
                                                                            : (bits - HB_BASE) >> 20;
            const float scale = hb_scale(code) * HB_UNIT;
            scales |= code << (8 * pair);
#pragma unroll
            for (uint32_t k = 0; k < 8; ++k) {
                const uint32_t P = 8 * pair + k;
                uint32_t two = 0;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float y = v[k / 4][k % 4 * 2 + h], r = finite ? rintf(__fdiv_rn(y * 64.0f, scale)) : 0.0f;
                    const float m = fminf(fmaxf(r, -31.0f), 31.0f), d = y - m * (scale * 0x1p-6f);
                    d2 = fmaf(d, d, d2);
                    two |= (uint32_t)((int)m + 32) << (16 * h);
                }
                if (P < 12) {
                    word[P / 2] |= two << (P % 2 * 6);
                } else {
                    word[P - 12] |= (two & 0x000f000fu) << 12;
                    word[4 + (P - 12) / 2] |= (two >> 4 & 0x00030003u) << (12 + P % 2 * 2);
                }
            }
        }
        *(uint4 *)(to + lane * 16) = make_uint4(word[0], word[1], word[2], word[3]);
        *(uint2 *)(to + 512 + lane * 8) = make_uint2(word[4], word[5]);
        if (q == 0) {
            *(uint16_t *)(to + 768 + g * 2) = (uint16_t)scales;
        }
    }
    d2 += __shfl_xor_sync(0xffffffffu, d2, 1);
    d2 += __shfl_xor_sync(0xffffffffu, d2, 2);
    w2 += __shfl_xor_sync(0xffffffffu, w2, 1);
    w2 += __shfl_xor_sync(0xffffffffu, w2, 2);
    if (q == 0 && row < a.from.rows) {
        a.off[row] = sqrtf(d2) * (1.0f + 0x1p-10f) + sqrtf(w2) * 0x1p-13f + 0x1p-30f;
    }
}

extern "C" int qx_cuda_head_copy(struct qx_queue *q, const struct qx_op_head_copy *o)
{
    return launch(q, "head_copy", head_copy_tiles, dim3((o->from.rows + 63) / 64), dim3(256), 0, *o);
}

/* ---- logits of the copy ----------------------------------------------------------------------- */

#define HN_WARPS 16u
#define HN_SLOTS 2u /* of a warp */
#define HN_SEG 4u   /* chunks a slot */

struct hn_args {
    const uint8_t *codes;
    const uint16_t *head;
    const float *x;
    float *near, *parts; /* parts: [row of input][block] of 4 */
    uint32_t rows, cols, n, n_chunks, pitch;
};

__device__ __forceinline__ void hn_sync()
{
    bar_sync_some<HN_WARPS * 32>(1);
}

/* Codes at bits 0 to 5 of both halves as bf16 1 + code / 64. */
__device__ __forceinline__ uint32_t hn_pair(uint32_t w, int shift)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, 0x007e007e, %2, 0xea;" : "=r"(r) : "r"(shift < 0 ? w << 1 : w >> shift), "r"(0x3f803f80u));
    return r;
}

/* d = c + a b. Rows 0 to 7 of A are words 0 and 2 of eight activations, rows 8 to 15 words 1 and 3; half of the result
 * is of no use. */
__device__ __forceinline__ void hn_mma(float (&d)[4], const uint4 &a, uint32_t b0, uint32_t b1, const float (&c)[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* acc += a chunk at p times 128 activations of a row of input at x; less: -3/2 of their sums by 64, twice each, and two
 * zeros. */
__device__ __forceinline__ void hn_chunk(float (&acc)[2], uint32_t p, uint32_t x, uint32_t less, uint32_t lane)
{
    const uint4 w = lds128(p + lane * 16);
    const uint2 e = lds64(p + 512 + lane * 8);
    const uint32_t scales = lds32(p + 768 + (lane & 3) * 4); /* of rows 2 q and 2 q + 1 */
    const uint32_t word[6] = {w.x, w.y, w.z, w.w, e.x, e.y};
    uint32_t b[16];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        b[2 * i] = hn_pair(word[i], -1);
        b[2 * i + 1] = hn_pair(word[i], 5);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t high = word[4 + i / 2] >> (i & 1 ? 9 : 7);
        asm("lop3.b32 %0, %1, 0x001e001e, %2, 0xea;" : "=r"(b[12 + i]) : "r"(word[i] >> 11), "r"(0x3f803f80u));
        asm("lop3.b32 %0, %1, 0x00600060, %2, 0xea;" : "=r"(b[12 + i]) : "r"(high), "r"(b[12 + i]));
    }
    const uint32_t s[2][2] = {{scales << 20, scales << 4}, {scales << 12, scales >> 4}}; /* [64 columns][row] */
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint4 l = lds128(less + j * 16), f = lds128(x + j * 128), h = lds128(x + j * 128 + 64);
        const float c[4] = {__uint_as_float(l.x), __uint_as_float(l.y), __uint_as_float(l.z), __uint_as_float(l.w)};
        float u[4], v[4];
        hn_mma(u, f, b[8 * j], b[8 * j + 2], c);
        hn_mma(v, f, b[8 * j + 1], b[8 * j + 3], c);
        hn_mma(u, h, b[8 * j + 4], b[8 * j + 6], u);
        hn_mma(v, h, b[8 * j + 5], b[8 * j + 7], v);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            acc[i] = fmaf(__uint_as_float((s[j][i] & 0x0ff00000u) | HB_BASE), u[i] + v[2 + i], acc[i]);
        }
    }
}

/* All logits of the copy, for up to eight rows of input: a block a multiprocessor, a tile a warp, each warp with a ring
 * of its own that it fills itself. At the end, for every row of input, the head's own logit of the block's best row:
 * the largest cannot be below it; and the square of the input's length. */
__global__ void __maxnreg__(72) head_near(const __grid_constant__ hn_args a)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint64_t bars[HN_WARPS * HN_SLOTS];
    __shared__ best red[HN_WARPS][HB_TOK];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    if (warp >= HN_WARPS) {
        pdl_wait(); /* there for their registers (launch_alone) */
        return;
    }
    const uint32_t n_tiles = (a.rows + 7) / 8, n_seg = (a.n_chunks + HN_SEG - 1) / HN_SEG;
    const uint32_t t0 = (uint32_t)((uint64_t)n_tiles * blockIdx.x / gridDim.x);
    const uint32_t t1 = (uint32_t)((uint64_t)n_tiles * (blockIdx.x + 1) / gridDim.x);
    const uint32_t ring = smem_addr(smem) + warp * (HN_SLOTS * HN_SEG * HB_CHUNK);
    const uint32_t bar = smem_addr(bars + warp * HN_SLOTS);
    if (lane == 0) {
#pragma unroll
        for (uint32_t i = 0; i < HN_SLOTS; ++i) {
            bar_init(bar + i * 8, 1);
        }
        bar_init_done();
        fence_async();
    }
    __syncwarp();
    const uint64_t policy = l2_read_once();
    uint32_t left = t0 + warp < t1 ? (t1 - t0 - warp + HN_WARPS - 1) / HN_WARPS * n_seg : 0; /* slots to ask for */
    uint32_t ask_slot = 0, ask_seg = 0;
    const uint8_t *src = a.codes + (uint64_t)(t0 + warp) * a.n_chunks * HB_CHUNK;
    const auto ask = [&] {
        const uint32_t at = ask_seg * HN_SEG, n = (a.n_chunks - at < HN_SEG ? a.n_chunks - at : HN_SEG) * HB_CHUNK;
        if (lane == 0) {
            bar_expect(bar + ask_slot * 8, n);
            bulk_load(ring + ask_slot * (HN_SEG * HB_CHUNK), src, n, bar + ask_slot * 8, policy);
        }
        src += n;
        ask_slot = ask_slot + 1 == HN_SLOTS ? 0 : ask_slot + 1;
        if (++ask_seg == n_seg) {
            ask_seg = 0;
            src += (uint64_t)(HN_WARPS - 1) * a.n_chunks * HB_CHUNK;
        }
        if (--left == HN_SLOTS) {
            pdl_next();
        }
    };
    if (left <= HN_SLOTS) {
        pdl_next();
    }
#pragma unroll 1
    for (uint32_t i = 0; i < HN_SLOTS && left; ++i) {
        ask();
    }
    pdl_wait();
    const uint32_t xs = smem_addr(smem) + HN_WARPS * HN_SLOTS * HN_SEG * HB_CHUNK, less = xs + a.n * a.pitch;
    const uint32_t eights = a.n_chunks * 16;
#pragma unroll 3
    for (uint32_t i0 = warp * 32; i0 < a.n * eights; i0 += HN_WARPS * 32) { /* all lanes go on together */
        const uint32_t i = i0 + lane, t = i / eights, e = i - t * eights;
        const bool in = t < a.n;
        float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f), v = u;
        if (in && e * 8 < a.cols) {
            const float4 *x = (const float4 *)(a.x + (uint64_t)t * a.cols + e * 8);
            u = __ldcg(x);
            v = __ldcg(x + 1);
        }
        const uint4 r = make_uint4(pack_bf16(u.x, u.y), pack_bf16(u.z, u.w), pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        if (in) {
            sts128(xs + t * a.pitch + e * 16, r);
        }
        float s = ((bf16_lo(r.x) + bf16_hi(r.x)) + (bf16_lo(r.y) + bf16_hi(r.y))) +
                  ((bf16_lo(r.z) + bf16_hi(r.z)) + (bf16_lo(r.w) + bf16_hi(r.w)));
        s += __shfl_xor_sync(0xffffffffu, s, 1); /* eight lanes have 64 values of one row */
        s += __shfl_xor_sync(0xffffffffu, s, 2);
        s += __shfl_xor_sync(0xffffffffu, s, 4);
        if (in && (e & 7) == 0) {
            const uint32_t l = __float_as_uint(-1.5f * s);
            sts128(less + (t * eights + e) * 2, make_uint4(l, l, 0, 0));
        }
    }
    hn_sync();
    const uint32_t tok = g < a.n ? g : a.n - 1;
    const uint32_t x = xs + tok * a.pitch + q * 16, sums = less + tok * eights * 2;
    best b = {0, 0xffffffffu};
    uint32_t slot = 0, phase = 0;
#pragma unroll 1
    for (uint32_t tile = t0 + warp; tile < t1; tile += HN_WARPS) {
        float acc[2] = {};
#pragma unroll 1
        for (uint32_t s = 0, c = 0; s < n_seg; ++s) {
            const uint32_t p = ring + slot * (HN_SEG * HB_CHUNK), n = a.n_chunks - c < HN_SEG ? a.n_chunks - c : HN_SEG;
            bar_wait(bar + slot * 8, phase);
            if (n == HN_SEG) {
#pragma unroll
                for (uint32_t i = 0; i < HN_SEG; ++i) {
                    hn_chunk(acc, p + i * HB_CHUNK, x + (c + i) * 256, sums + (c + i) * 32, lane);
                }
            } else {
#pragma unroll 1
                for (uint32_t i = 0; i < n; ++i) {
                    hn_chunk(acc, p + i * HB_CHUNK, x + (c + i) * 256, sums + (c + i) * 32, lane);
                }
            }
            c += n;
            __syncwarp();
            if (left) {
                ask();
            }
            if (++slot == HN_SLOTS) {
                slot = 0;
                phase ^= 1;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = tile * 8 + 2 * q + i;
            if (row < a.rows && g < a.n) {
                const float v = acc[i] * HB_UNIT;
                a.near[(uint64_t)g * a.rows + row] = v;
                const best o = {logit_key(v), row};
                b = best_of(b, o);
            }
        }
    }
#pragma unroll
    for (int i = 1; i < 4; i <<= 1) {
        best_across(b, i);
    }
    if (q == 0) {
        red[warp][g] = b;
    }
    hn_sync();
    if (warp >= a.n) {
        return;
    }
    b = red[lane & (HN_WARPS - 1)][warp];
#pragma unroll
    for (int i = 1; i < (int)HN_WARPS; i <<= 1) {
        best_across(b, i);
    }
    const bool any = b.id < a.rows;
    const uint4 *w = (const uint4 *)(a.head + (uint64_t)(any ? b.id : 0) * a.cols);
    float dot = 0.0f, len = 0.0f;
#pragma unroll 5
    for (uint32_t c = lane; c < a.cols / 8; c += 32) {
        const uint4 u = ld_stream(w + c), f = lds128(xs + warp * a.pitch + c * 16);
        const uint32_t uu[4] = {u.x, u.y, u.z, u.w}, ff[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            dot = fmaf(bf16_lo(uu[i]), bf16_lo(ff[i]), fmaf(bf16_hi(uu[i]), bf16_hi(ff[i]), dot));
            len = fmaf(bf16_lo(ff[i]), bf16_lo(ff[i]), fmaf(bf16_hi(ff[i]), bf16_hi(ff[i]), len));
        }
    }
    dot = warp_sum(dot);
    len = warp_sum(len);
    if (lane == 0) {
        *(float2 *)(a.parts + ((uint64_t)warp * gridDim.x + blockIdx.x) * 4) = make_float2(any ? dot : -INFINITY, len);
    }
}

/* ---- the largest ------------------------------------------------------------------------------ */

struct hb_args {
    struct qx_op_head_best o;
    uint32_t n_parts; /* blocks of head_near */
    unsigned *tickets;
};

/* Shared memory: activations as bf16 [HB_TOK][pitch], then the rows to look at. */
struct hb_shared {
    float low[HB_TOK], len[HB_TOK];
    float red[HB_T / 32][HB_TOK][8]; /* [warp][row of input][row of the head] */
    uint32_t list[HB_T * SCAN_N], n_list;
    bool all[HB_TOK];
};

/* Eight rows of the head (fewer: the last again) times the rows of input, summed as linear.cu sums (linear_slot.cuh):
 * so a logit has the same bits there and here. */
__device__ __forceinline__ void hb_rows(const struct qx_op_head_best &a, hb_shared &s, const uint8_t *xs,
                                        uint32_t pitch, const uint32_t *list, uint32_t n)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const uint32_t bytes = a.head.cols * 2;
    const uint8_t *w = (const uint8_t *)a.head.codes + (uint64_t)list[g < n ? g : n - 1] * bytes;
    const uint8_t *x = xs + g * pitch;
    float c[2][2][4] = {};
#pragma unroll 1
    for (uint32_t u = warp; u * 128 < bytes; u += 5 * 8) {
        uint4 v[5][2];
#pragma unroll
        for (uint32_t i = 0; i < 10; ++i) {
            const uint32_t at = (u + i / 2 * 8) * 128 + i % 2 * 64 + q * 16;
            v[i / 2][i % 2] = at < bytes ? ld_stream(w + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < 10; ++i) {
            const uint32_t at = (u + i / 2 * 8) * 128 + i % 2 * 64 + q * 16;
            const uint4 f = at < bytes ? *(const uint4 *)(x + at) : make_uint4(0, 0, 0, 0), &b = v[i / 2][i % 2];
            mma_bf16(c[i % 2][0], f.x, 0, f.y, 0, b.x, b.y);
            mma_bf16(c[i % 2][1], f.z, 0, f.w, 0, b.z, b.w);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        s.red[warp][g][2 * q + i] = (c[0][0][i] + c[0][1][i]) + (c[1][0][i] + c[1][1][i]);
    }
}

/* Rows that may have the largest logit of any of up to eight rows of input. */
__global__ void __launch_bounds__(HB_T) head_pick(const __grid_constant__ hb_args args)
{
    extern __shared__ __align__(16) uint8_t xs[];
    __shared__ hb_shared s;
    const struct qx_op_head_best &a = args.o;
    const uint32_t rows = a.head.rows, cols = a.head.cols, step = gridDim.x * HB_T, pitch = cols * 2 + 16;
    const uint32_t i0 = blockIdx.x * HB_T + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const uint32_t m0 = blockIdx.y * HB_TOK, n = a.n_rows - m0 < HB_TOK ? a.n_rows - m0 : HB_TOK;
    const uint32_t per = 4 * args.n_parts + 4 * gridDim.x; /* floats of scratch a row of input */
    const float *l = a.near + (uint64_t)m0 * rows, *x = a.x + (uint64_t)m0 * cols;
    const float *parts = a.scratch + (uint64_t)m0 * per;
    float *mine = a.scratch + (uint64_t)m0 * per + (uint64_t)n * 4 * args.n_parts;
    float off[SCAN_N];
#pragma unroll
    for (uint32_t k = 0; k < SCAN_N; ++k) { /* nothing writes these any more */
        off[k] = i0 + k * step < rows ? __ldg(a.off + i0 + k * step) : 0.0f;
    }
    pdl_next();
    pdl_wait();
    float v[SCAN_N]; /* of the first row of input */
#pragma unroll
    for (uint32_t k = 0; k < SCAN_N; ++k) {
        v[k] = i0 + k * step < rows ? __ldcg(l + i0 + k * step) : 0.0f;
    }
    if (warp < n) { /* a warp a row of input */
        float low = -INFINITY;
        bool nan = false;
#pragma unroll 5
        for (uint32_t i = lane; i < args.n_parts; i += 32) {
            const float p = __ldcg(parts + (warp * args.n_parts + i) * 4);
            nan = nan || p != p;
            low = fmaxf(low, p);
        }
        low = warp_max(low);
        nan = __any_sync(0xffffffffu, nan);
        if (lane == 0) {
            s.low[warp] = low;
            s.len[warp] = sqrtf(__ldcg(parts + warp * args.n_parts * 4 + 1)) * 1.0001f;
            s.all[warp] = nan; /* then all rows are looked at */
        }
    }
#pragma unroll 3
    for (uint32_t i = threadIdx.x; i < n * (cols / 4); i += HB_T) { /* products of other rows are not looked at */
        const uint32_t t = i / (cols / 4), c = i - t * (cols / 4);
        const float4 f = __ldcg((const float4 *)(x + (uint64_t)t * cols) + c);
        *(uint2 *)(xs + t * pitch + c * 8) = make_uint2(pack_bf16(f.x, f.y), pack_bf16(f.z, f.w));
    }
    best b = {0, 0xffffffffu}; /* thread 8 t + j: of row t of input */
    float sum[HB_TOK] = {};
#pragma unroll 1
    for (uint32_t at = i0; at - threadIdx.x < rows; at += SCAN_N * step) {
        if (threadIdx.x == 0) {
            s.n_list = 0;
        }
        __syncthreads();
        uint32_t may = 0;
#pragma unroll
        for (uint32_t t = 0; t < HB_TOK; ++t) {
            if (t >= n) {
                break;
            }
            const float low = s.low[t], len = s.len[t];
            const bool all = s.all[t];
            if (t || at != i0) {
#pragma unroll
                for (uint32_t k = 0; k < SCAN_N; ++k) {
                    const uint32_t i = at + k * step;
                    v[k] = i < rows ? __ldcg(l + (uint64_t)t * rows + i) : 0.0f;
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < SCAN_N; ++k) {
                const uint32_t i = at + k * step;
                const float o = at == i0 ? off[k] : i < rows ? __ldg(a.off + i) : 0.0f;
                may |= i < rows && (all || !(fmaf(o, len, v[k]) < low)) ? 1u << k : 0;
                sum[t] += a.prob && i < rows ? expf(v[k] - low) : 0.0f;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < SCAN_N; ++k) {
            if (may >> k & 1) {
                s.list[atomicAdd(&s.n_list, 1u)] = at + k * step;
            }
        }
        __syncthreads();
        const uint32_t n_list = s.n_list;
#pragma unroll 1
        for (uint32_t j = 0; j < n_list; j += 8) {
            const uint32_t k = n_list - j < 8 ? n_list - j : 8;
            hb_rows(a, s, xs, pitch, s.list + j, k);
            __syncthreads();
            if (threadIdx.x < HB_TOK * 8 && (threadIdx.x & 7) < k) {
                const uint32_t t = threadIdx.x / 8, r = threadIdx.x & 7;
                float y = s.red[0][t][r];
#pragma unroll
                for (uint32_t i = 1; i < HB_T / 32; ++i) {
                    y += s.red[i][t][r];
                }
                const best c = {logit_key(y), s.list[j + r]};
                b = best_of(b, c);
            }
            __syncthreads();
        }
    }
    if (threadIdx.x < HB_TOK * 8) {
#pragma unroll
        for (int i = 4; i; i >>= 1) {
            best_across(b, i);
        }
    }
    if (a.prob) {
#pragma unroll
        for (uint32_t t = 0; t < HB_TOK; ++t) {
            const float w = warp_sum(sum[t]);
            if (lane == 0) {
                s.red[warp][t][0] = w;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < HB_TOK * 8 && (threadIdx.x & 7) == 0 && threadIdx.x / 8 < n) {
        const uint32_t t = threadIdx.x / 8;
        float all = 0.0f;
        for (uint32_t i = 0; i < HB_T / 32 && a.prob; ++i) {
            all += s.red[i][t][0];
        }
        *(float4 *)(mine + (t * gridDim.x + blockIdx.x) * 4) =
            make_float4(__uint_as_float(b.key), __uint_as_float(b.id), all, 0.0f);
    }
    if (!last_block(args.tickets + blockIdx.y) || warp >= n) {
        return;
    }
    b = {0, 0xffffffffu};
    float total = 0.0f;
#pragma unroll 4
    for (uint32_t i = lane; i < gridDim.x; i += 32) {
        const float4 p = __ldcg((const float4 *)(mine + (warp * gridDim.x + i) * 4));
        const best o = {__float_as_uint(p.x), __float_as_uint(p.y)};
        b = best_of(b, o);
        total += p.z;
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        best_across(b, i);
    }
    total = warp_sum(total);
    if (lane == 0) {
        const uint32_t m = m0 + warp;
        const float value = logit_of(b.key);
        const bool no = a.finite && (value != value || value == INFINITY);
        const int32_t id = no ? -1 : (int32_t)b.id;
        a.id[m] = id;
        if (a.prob) {
            a.value[m] = value;
            a.prob[m] = expf(value - s.low[warp]) / total;
        }
        if (a.told) {
            __threadfence_system();
            *(volatile int32_t *)(a.told + m) = id;
        }
    }
}

extern "C" int qx_cuda_head_best(struct qx_queue *q, const struct qx_op_head_best *o)
{
    const uint32_t rows = o->head.rows, cols = o->head.cols, groups = (o->n_rows + HB_TOK - 1) / HB_TOK;
    const uint32_t need = (rows + HB_T - 1) / HB_T, blocks = need < HB_BLOCKS ? need : HB_BLOCKS;
    const uint32_t streams = (rows + 63) / 64 < (uint32_t)q->n_sm ? (rows + 63) / 64 : (uint32_t)q->n_sm;
    const uint32_t n_chunks = (cols + 127) / 128, per = 4 * streams + 4 * blocks;
    if (!can_stream(q)) {
        return qx_queue_refuse(q, "head_best", "needs a device that streams");
    }
    for (uint32_t m = 0; m < o->n_rows; m += HB_TOK) {
        hn_args a = {};
        a.codes = o->codes;
        a.head = (const uint16_t *)o->head.codes;
        a.x = o->x + (uint64_t)m * cols;
        a.near = o->near + (uint64_t)m * rows;
        a.parts = o->scratch + (uint64_t)m * per;
        a.rows = rows;
        a.cols = cols;
        a.n = o->n_rows - m < HB_TOK ? o->n_rows - m : HB_TOK;
        a.n_chunks = n_chunks;
        a.pitch = n_chunks * 256 + 64;
        const uint32_t smem = HN_WARPS * HN_SLOTS * HN_SEG * HB_CHUNK + a.n * (a.pitch + n_chunks * 32);
        const int r = launch_alone(q, "head_best", true, 1, head_near, dim3(streams), HN_WARPS * 32, smem, a);
        if (r) {
            return r;
        }
    }
    const hb_args b = {*o, streams, q->tickets};
    return launch(q, "head_best", head_pick, dim3(blocks, groups), dim3(HB_T), HB_TOK * (cols * 2 + 16), b);
}
