/* prompt_linear.cu: y = W x for the rows of prompts, and the conversion of rows to bf16 that every product
 * of a prompt starts from. Matrices of one format are one launch; formats without a tiled kernel go to the
 * kernels for few rows. */
#include "gemm.cuh"
#include "prompt.h"

/* ---- rows to bf16 --------------------------------------------------------------------------- */

template <int ORD, int TERMS>
__global__ void __launch_bounds__(256) gm_convert(const float *x, uint64_t x_stride, uint32_t rows, uint32_t k,
                                                  uint32_t units, uint8_t *out, bool vec)
{
    pdl_next();
    pdl_wait();
    const uint64_t n = (uint64_t)rows * units;
    const uint32_t b_rows = gm_pad8(rows);
    for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (uint64_t)gridDim.x * 256) {
        const uint32_t row = (uint32_t)(i / units), u = (uint32_t)(i - (uint64_t)row * units);
        float v[16];
        gm_load16(v, x + row * x_stride, u * 16, k, vec);
#pragma unroll
        for (int t = 0; t < TERMS; ++t) {
            gm_emit<ORD>(out, b_rows, row, t * (units / 4) + u / 4, u & 3, v);
            if (t + 1 < TERMS) {
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const float h = bf16_lo(pack_bf16(v[j], 0.0f));
                    /* an infinity has no remainder */
                    v[j] = fabsf(h) == __uint_as_float(0x7f800000u) ? 0.0f : v[j] - h;
                }
            }
        }
    }
}

int qx_gm_convert(struct qx_queue *q, const char *name, const float *x, uint64_t x_stride, uint32_t rows, uint32_t k,
                  int order, uint32_t terms, void *out)
{
    const uint32_t units = (k + 63) / 64 * 4;
    const uint64_t blocks = ((uint64_t)rows * units + 255) / 256;
    const dim3 grid((unsigned)(blocks < 8192 ? blocks : 8192)), block(256);
    const bool vec = ((uintptr_t)x & 15) == 0 && x_stride % 4 == 0;
    uint8_t *o = (uint8_t *)out;
    if (terms == 3) {
        return launch(q, name, gm_convert<GM_ORD_BF16, 3>, grid, block, 0, x, x_stride, rows, k, units, o, vec);
    }
    switch (order) {
    case GM_ORD_FP8: return launch(q, name, gm_convert<GM_ORD_FP8, 1>, grid, block, 0, x, x_stride, rows, k, units, o, vec);
    case GM_ORD_NV: return launch(q, name, gm_convert<GM_ORD_NV, 1>, grid, block, 0, x, x_stride, rows, k, units, o, vec);
    default: return launch(q, name, gm_convert<GM_ORD_BF16, 1>, grid, block, 0, x, x_stride, rows, k, units, o, vec);
    }
}

/* ---- the product ---------------------------------------------------------------------------- */

struct plin_mat {
    const uint8_t *codes, *scale;
    uint32_t rows, cols, row_bytes, row0;
    uint32_t scale_bf16;
    float factor;
    uint64_t off;       /* column of y */
    uint32_t m0;        /* first tile of rows */
};
struct plin_args {
    gm_common c;
    float *y;
    uint64_t y_stride;
    uint32_t n_rows, n_mats, m_tiles, n_tiles, width, kb, akb, group;
    uint32_t parts, part_kb; /* of K, each with sums of its own; blocks of one */
    uint64_t part_at;   /* from the sums of one to those of the next */
    bool acc, pairs;    /* pairs: two neighbouring elements of y may be written at once */
    plin_mat w[QX_LINEAR_MAX];
};

template <int F_, int PROMOTE_> struct plin : gm_policy {
    static constexpr int F = F_, PROMOTE = PROMOTE_;
    static constexpr bool GATHER = false;
    using args = plin_args;
    struct tile {
        uint32_t n, kb, akb, col0, row0, j, part, k0;
    };
    GM_RUN(plin)
    static __device__ __forceinline__ uint32_t first_block(const tile &t)
    {
        return t.k0;
    }
    static __device__ __forceinline__ uint32_t n_tiles(const args &a)
    {
        return a.m_tiles * a.n_tiles * a.parts;
    }
    /* Tiles of `group` columns run along all rows before the next columns: those running at one time share
     * weights and tokens in L2. */
    static __device__ __forceinline__ tile get(const args &a, uint32_t t)
    {
        tile r;
        r.part = PROMOTE ? t / (a.m_tiles * a.n_tiles) : 0;
        t -= r.part * a.m_tiles * a.n_tiles;
        const uint32_t full = a.group * a.m_tiles, grp = t / full, rem = t - grp * full;
        const uint32_t left = a.n_tiles - grp * a.group, size = left < a.group ? left : a.group;
        const uint32_t m = rem / size, n = grp * a.group + (rem - m * size);
        r.j = 0;
        while (r.j + 1 < a.n_mats && m >= a.w[r.j + 1].m0) {
            ++r.j;
        }
        r.row0 = (m - a.w[r.j].m0) * 128;
        r.col0 = n * a.width;
        r.n = a.n_rows - r.col0 < a.width ? a.n_rows - r.col0 : a.width;
        r.k0 = r.part * a.part_kb;
        r.kb = a.kb - r.k0 < a.part_kb ? a.kb - r.k0 : a.part_kb;
        r.akb = a.akb;
        return r;
    }
    static __device__ __forceinline__ gm_src a_src(const args &a, const tile &t, uint32_t r)
    {
        const plin_mat &w = a.w[t.j];
        return gm_rows(w.codes, w.row_bytes, t.row0 + gm_place(r), w.rows);
    }
    static __device__ __forceinline__ const uint8_t *scale_row(const args &a, const tile &t, uint32_t r)
    {
        const plin_mat &w = a.w[t.j];
        const uint32_t m = t.row0 + gm_place(r);
        return m < w.rows ? w.scale + (uint64_t)m * (w.cols / (F == GM_NV ? 16 : 32)) : nullptr;
    }
    static __device__ __forceinline__ float block_scale(const args &a, const tile &t, uint32_t r, uint32_t k128)
    {
        const plin_mat &w = a.w[t.j];
        const uint32_t m = t.row0 + gm_place(r), row = m < w.rows ? m : w.rows - 1;
        const uint64_t at = (uint64_t)((w.row0 + row) / 128) * ((w.cols + 127) / 128) + k128;
        return w.scale_bf16 ? bf16_f(__ldg((const uint16_t *)w.scale + at)) : __ldg((const float *)w.scale + at);
    }
    static __device__ __forceinline__ uint32_t b_row(const args &, const tile &t, uint32_t col)
    {
        return t.col0 + col;
    }
    template <int N>
    static __device__ __forceinline__ void epilogue(const args &a, const tile &t, const float *acc, uint32_t r,
                                                    uint32_t q)
    {
        const plin_mat &w = a.w[t.j];
        const uint32_t m = t.row0 + gm_place(r);
        float *y = a.y + t.part * a.part_at + (uint64_t)(t.col0 + 2 * q) * a.y_stride + w.off + m;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * j + 2 * q + e < t.n) {
                    float *p = y + (uint64_t)(8 * j + e) * a.y_stride;
                    float v0 = acc[4 * j + e] * w.factor, v1 = acc[4 * j + 2 + e] * w.factor;
                    if (a.acc) {
                        v0 += m < w.rows ? __ldcg(p) : 0.0f;
                        v1 += m + 1 < w.rows ? __ldcg(p + 1) : 0.0f;
                    }
                    if (a.pairs && m + 1 < w.rows) {
                        *(float2 *)p = make_float2(v0, v1);
                    } else {
                        if (m < w.rows) {
                            p[0] = v0;
                        }
                        if (m + 1 < w.rows) {
                            p[1] = v1;
                        }
                    }
                }
            }
        }
    }
};

template <int F> static int plin_widths(struct qx_queue *q, const char *name, const plin_args &a, uint64_t tiles)
{
    switch (a.width) {
    case 64: return gm_launch<plin<F, 0>, 1, 64>(q, name, a, tiles);
    case 128: return gm_launch<plin<F, 0>, 1, 128>(q, name, a, tiles);
    case 192: return gm_launch<plin<F, 0>, 1, 192>(q, name, a, tiles);
    default: return gm_launch<plin<F, 0>, 1, 256>(q, name, a, tiles);
    }
}

static int plin_launch(struct qx_queue *q, const char *name, int f, bool promote, plin_args a)
{
    a.width = gm_width(q, a.n_rows, a.m_tiles, f == GM_BLOCK || promote ? 128 : 256);
    a.n_tiles = (a.n_rows + a.width - 1) / a.width;
    a.group = a.n_tiles < 16 ? a.n_tiles : 16;
    a.parts = a.parts ? a.parts : 1;
    a.part_kb = (a.kb + a.parts - 1) / a.parts;
    const uint64_t tiles = (uint64_t)a.m_tiles * a.n_tiles * a.parts;
    if (promote) {
        return a.width == 64 ? gm_launch<plin<GM_BF16, 1>, 1, 64>(q, name, a, tiles)
                             : gm_launch<plin<GM_BF16, 1>, 1, 128>(q, name, a, tiles);
    }
    switch (f) {
    case GM_BF16: return plin_widths<GM_BF16>(q, name, a, tiles);
    case GM_FP8: return plin_widths<GM_FP8>(q, name, a, tiles);
    case GM_MX: return plin_widths<GM_MX>(q, name, a, tiles);
    case GM_NV: return plin_widths<GM_NV>(q, name, a, tiles);
    default:
        return a.width == 64 ? gm_launch<plin<GM_BLOCK, 2>, 1, 64>(q, name, a, tiles)
                             : gm_launch<plin<GM_BLOCK, 2>, 1, 128>(q, name, a, tiles);
    }
}

static void plin_add(plin_args &a, const struct qx_weight &w, int f, uint64_t off)
{
    plin_mat &m = a.w[a.n_mats++];
    m.codes = (const uint8_t *)w.codes;
    m.scale = (const uint8_t *)w.scale;
    m.rows = w.rows;
    m.cols = w.cols;
    m.row_bytes = (uint32_t)((uint64_t)w.cols * gm_code_bytes(f) / 64);
    m.row0 = w.row0;
    m.scale_bf16 = w.scale_bf16;
    m.factor = gm_factor(f, w.global);
    m.off = off;
    m.m0 = a.m_tiles;
    a.m_tiles += (w.rows + 127) / 128;
}

int qx_prompt_linear(struct qx_queue *q, const struct qx_op_linear *o)
{
    if (!o->prompt || !o->act_bf16 || o->n_rows <= QX_PROMPT_MIN_ROWS || !qx_prompt_can(q)) {
        return 1;
    }
    const uint32_t k = o->w[0].cols;
    const uint64_t stride = (uint64_t)((k + 63) / 64) * 128;
    const uint64_t fit = QX_WS_BYTES / stride / 256 * 256;
    int f[QX_LINEAR_MAX];
    uint32_t n_fast = 0;
    for (uint32_t j = 0; j < o->n_weights; ++j) {
        f[j] = o->w[j].cols == k ? gm_format(o->w[j]) : GM_NONE;
        n_fast += f[j] != GM_NONE;
    }
    if (n_fast == 0 || fit == 0) {
        return 1;
    }
    uint64_t off = 0;
    for (uint32_t j = 0; j < o->n_weights; ++j) {
        if (f[j] == GM_NONE) {
            struct qx_op_linear one = *o;
            one.n_weights = 1;
            one.w[0] = o->w[j];
            one.y = o->y + off;
            const int r = qx_linear_few(q, &one);
            if (r) {
                return r;
            }
        }
        off += o->w[j].rows;
    }
    const bool pairs = ((uintptr_t)o->y & 7) == 0 && o->y_stride % 2 == 0;
    for (uint64_t r0 = 0; r0 < o->n_rows; r0 += fit) {
        const uint32_t rows = (uint32_t)(o->n_rows - r0 < fit ? o->n_rows - r0 : fit);
        int have = -1; /* the order the workspace is in */
        for (int g = 0; g < GM_NONE; ++g) {
            plin_args a = {};
            bool even = true;
            off = 0;
            for (uint32_t j = 0; j < o->n_weights; ++j) {
                if (f[j] == g) {
                    plin_add(a, o->w[j], g, off);
                    even = even && off % 2 == 0;
                }
                off += o->w[j].rows;
            }
            if (a.n_mats == 0) {
                continue;
            }
            if (have != gm_order_of(g)) {
                have = gm_order_of(g);
                const int r = qx_gm_convert(q, "linear", o->x + r0 * o->x_stride, o->x_stride, rows, k, have, 1, q->ws);
                if (r) {
                    return r;
                }
            }
            a.c.b = q->ws;
            a.c.b_rows = gm_pad8(rows);
            a.y = o->y + r0 * o->y_stride;
            a.y_stride = o->y_stride;
            a.n_rows = rows;
            a.kb = a.akb = (k + 63) / 64;
            a.acc = o->acc;
            a.pairs = pairs && even;
            const int r = plin_launch(q, "linear", g, false, a);
            if (r) {
                return r;
            }
        }
    }
    return 0;
}

/* ---- router --------------------------------------------------------------------------------- */

/* Logits in f32 precision: the rows as three bf16 terms, one after another along K, and sums that leave the
 * matrix unit after every 64 products. Where the tiles are fewer than the multiprocessors, K is cut in two, and what is
 * to be added to the logits lies at *more. */
int qx_prompt_logits(struct qx_queue *q, const struct qx_op_moe_route *o, const float **more)
{
    *more = nullptr;
    const uint64_t stride = (uint64_t)((o->hidden + 63) / 64) * 128 * 3;
    const uint64_t fit = QX_WS_BYTES / stride / 256 * 256;
    if (gm_format(o->gate) != GM_BF16 || o->gate.cols != o->hidden || fit == 0) {
        return 1;
    }
    for (uint64_t r0 = 0; r0 < o->n_rows; r0 += fit) {
        const uint32_t rows = (uint32_t)(o->n_rows - r0 < fit ? o->n_rows - r0 : fit);
        int r = qx_gm_convert(q, "moe_route", o->m + r0 * o->hidden, o->hidden, rows, o->hidden, GM_ORD_BF16, 3, q->ws);
        if (r) {
            return r;
        }
        plin_args a = {};
        plin_add(a, o->gate, GM_BF16, 0);
        a.c.b = q->ws;
        a.c.b_rows = gm_pad8(rows);
        a.y = o->logits + r0 * o->n_experts;
        a.y_stride = o->n_experts;
        a.n_rows = rows;
        a.akb = (o->hidden + 63) / 64;
        a.kb = 3 * a.akb;
        a.pairs = ((uintptr_t)a.y & 7) == 0 && o->n_experts % 2 == 0;
        const uint64_t used = (gm_pad8(rows) * stride + 255) / 256 * 256, all = (uint64_t)rows * o->n_experts * 4;
        if (rows == o->n_rows && used + all <= QX_WS_BYTES && 2 * a.m_tiles * ((rows + 63) / 64) <= (uint32_t)q->n_sm &&
            ((uintptr_t)a.y & 3) == 0) {
            float *second = (float *)((uint8_t *)q->ws + used);
            a.parts = 2;
            a.part_at = (uint64_t)(((intptr_t)second - (intptr_t)a.y) / 4);
            *more = second;
        }
        r = plin_launch(q, "moe_route", GM_BF16, true, a);
        if (r) {
            return r;
        }
    }
    return 0;
}
