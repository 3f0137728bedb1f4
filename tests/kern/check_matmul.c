/* check_matmul.c: cases of linear, hc, moe_route and moe: every format, sizes around the edges of tiles, and
 * that a row's bits do not depend on how many rows share the launch. */
#include "kern.h"

#include <math.h>
#include <string.h>

/* Bits of a variant: inputs of products rounded to bf16; rows of a prompt. */
#define ACT_BF16 (1 << 20)
#define PROMPT (1 << 21)
#define TIES (1 << 19)         /* moe_route */
#define OTHER_SHARED (1 << 22) /* moe: a shared expert of MXFP8 beside NVFP4, of BF16 beside others */
/* Error of the warpgroup matrix units' sums over k products: every 16 products are added to the sum in f32, cut
 * instead of rounded, which loses up to 2^-23 of it, always towards zero; half of that on average. */
#define BOUND_CUT(k) (2e-6 + (k) / 16.0 * 0x1p-24)

static const uint8_t formats[] = {QX_W_BF16, QX_W_FP8, QX_W_FP8_BLOCK, QX_W_MXFP8, QX_W_NVFP4, QX_W_F16, QX_W_F32};

/* variant: format + 8 * shape + 128 * kind, + ACT_BF16, + PROMPT */
static void linear(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][3] = {/* rows of x, rows, columns */
        {1, 16, 64}, {1, 100, 2560}, {2, 33, 640}, {3, 17, 320}, {5, 128, 160}, {8, 50, 6144}, {9, 20, 96},
        {17, 130, 256}, {40, 257, 2560}, {200, 129, 640}, {1, 1, 32}, {130, 64, 6144},
        {301, 100, 512}, {1000, 384, 128}, {70, 34, 2560}, {513, 260, 384}};
    bool act = v & ACT_BF16, prompt = v & PROMPT;
    v &= ACT_BF16 - 1;
    uint8_t f = formats[v % 8];
    const uint32_t *s = shapes[v / 8 % 16];
    struct qx_weight w = kern_weight(c, f, s[1], s[2], v / 128);
    float *x = kern_f32(c, (size_t)s[0] * s[2], 1.0f), *y = kern_new(c, (size_t)s[0] * s[1] * 4);
    kern_out(c, "y", 'f', y, (size_t)s[0] * s[1], act && prompt ? BOUND_CUT(s[2]) : 0);
    kern_shape(c, "%u x %s [%u, %u] kind %d%s%s", s[0], kern_fmt_name(f), s[1], s[2], v / 128, act ? ", bf16" : "",
               prompt ? ", prompt" : "");
    KERN_RUN(c, linear, {.act_bf16 = act, .prompt = prompt, .n_rows = s[0], .n_weights = 1, .x = x, .x_stride = s[2], .y_stride = s[1], .w = {w}, .y = y});
}

/* Six matrices of different formats and an output that is added to. */
static void several(struct kern_ctx *c, int v)
{
    static const uint32_t rows[] = {1, 3, 8, 24};
    bool act = v & ACT_BF16;
    v &= ACT_BF16 - 1;
    uint32_t m = rows[v], k = act ? 512 : 256;
    static const uint32_t n[6] = {100, 16, 3, 64, 17, 48};
    struct qx_op_linear a = {.n_rows = m, .n_weights = 6, .acc = true, .act_bf16 = act, .x_stride = k + 4, .y_stride = 260};
    a.x = kern_f32(c, (size_t)m * (k + 4), 1.0f);
    for (int j = 0; j < 6; ++j) {
        a.w[j] = kern_weight(c, formats[j], n[j], k, 0);
    }
    a.y = kern_f32(c, (size_t)m * 260, 1.0f);
    kern_out(c, "y", 'f', a.y, (size_t)m * 260, 0);
    kern_shape(c, "%u rows, six formats, added%s", m, act ? ", bf16" : "");
    KERN_RUN(c, linear, a);
}

/* Four matrices of one format, as those of a layer, over rows that may begin anywhere. variant: format + 8 * rows */
static void alike(struct kern_ctx *c, int v)
{
    static const uint32_t rows[] = {1, 8, 13, 27}, n[] = {300, 7, 1, 130};
    uint32_t m = rows[v / 8 % 4], k = v / 8 % 2 ? 6144 : 2560, off = v / 16 % 2;
    struct qx_op_linear a = {.n_rows = m, .n_weights = 4, .act_bf16 = true, .x_stride = k + off, .y_stride = 441};
    a.x = kern_f32(c, (size_t)m * (k + off) + off, 1.0f) + off;
    for (int j = 0; j < 4; ++j) {
        a.w[j] = kern_weight(c, formats[v % 8], n[j], k, j == 3);
    }
    a.y = kern_f32(c, (size_t)m * 441, 1.0f);
    kern_out(c, "y", 'f', a.y, (size_t)m * 441, 0);
    kern_shape(c, "%u rows, four of %s, %u columns", m, kern_fmt_name(formats[v % 8]), k);
    KERN_RUN(c, linear, a);
}

/* Activations whose runs of 64 differ by up to 2^96, with zeros among them. variant: format + 8 * rows + 64 if long */
static void ranges(struct kern_ctx *c, int v)
{
    static const uint32_t counts[] = {1, 2, 3, 4, 6, 20};
    uint32_t m = counts[v / 8 % 8], k = v / 64 ? 6144 : 2560, n = 70;
    struct qx_weight w = kern_weight(c, formats[v % 8], n, k, 0);
    size_t all = (size_t)m * k;
    float *x = malloc(all * 4);
    for (size_t i = 0; i < all; i += 64) {
        float f = kern_below(c, 8) ? ldexpf(1.0f, (int)kern_below(c, 97) - 48) : 0.0f;
        for (size_t j = i; j < i + 64; ++j) {
            x[j] = f * kern_normal(c);
        }
    }
    struct qx_op_linear a = {.act_bf16 = true, .n_rows = m, .n_weights = 1, .x = kern_put(c, x, all * 4), .x_stride = k,
                             .y_stride = n, .w = {w}, .y = kern_new(c, (size_t)m * n * 4)};
    free(x);
    kern_out(c, "y", 'f', a.y, (size_t)m * n, 0);
    kern_shape(c, "%u x %s [%u, %u], from 2^-48 to 2^48", m, kern_fmt_name(w.fmt), n, k);
    KERN_RUN(c, linear, a);
}

/* A row's bits are the same whatever the number of rows: counts those of y that differ. variant as linear */
static void same_bits(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][2] = {{100, 2560}, {700, 6144}, {1100, 512}};
    static const uint32_t counts[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 39};
    bool act = v & ACT_BF16;
    v &= ACT_BF16 - 1;
    const uint32_t *s = shapes[v / 8], all = 40;
    struct qx_weight w = kern_weight(c, formats[v % 8], s[0], s[1], 0);
    struct qx_op_linear a = {.n_rows = all, .n_weights = 1, .act_bf16 = act, .x_stride = s[1], .y_stride = s[0], .w = {w}};
    const float *x = kern_f32(c, (size_t)all * s[1], 1.0f);
    a.x = x;
    a.y = kern_new(c, (size_t)all * s[0] * 4);
    size_t n = (size_t)all * s[0];
    uint32_t *whole = malloc(n * 4), *part = malloc(n * 4);
    int32_t bad = 0;
    kern_shape(c, "%s [%u, %u]%s", kern_fmt_name(w.fmt), s[0], s[1], act ? ", bf16" : "");
    KERN_RUN(c, linear, a);
    kern_fetch(c, whole, a.y, n * 4);
    for (size_t i = 0; i < QX_ARRAY_LEN(counts) && !c->rc; ++i) {
        uint32_t first = (all - counts[i]) / 2;
        a.n_rows = counts[i];
        a.x = x + (size_t)first * s[1];
        a.y = kern_new(c, (size_t)counts[i] * s[0] * 4);
        KERN_RUN(c, linear, a);
        kern_fetch(c, part, a.y, (size_t)counts[i] * s[0] * 4);
        for (size_t j = 0; j < (size_t)counts[i] * s[0]; ++j) {
            bad += part[j] != whole[(size_t)first * s[0] + j];
        }
    }
    free(whole);
    free(part);
    kern_out(c, "bits that differ", 'i', kern_put(c, &bad, 4), 1, 0);
}

void kern_chain(struct kern_ctx *c, int (*enqueue)(struct kern_ctx *c, unsigned i, void *user), void *user)
{
    void *g = NULL;
    uint64_t nodes;
    bool graph = c->be->graph_begin && c->be->graph_begin(c->q, &c->err) == 0;
    for (unsigned i = 0; graph && i < c->repeats && !c->rc; ++i) {
        c->rc = enqueue(c, i, user);
    }
    if (graph) {
        int rc = c->be->graph_end(c->q, &g, &nodes, &c->err);
        c->rc = c->rc ? c->rc : rc;
    }
    for (int pass = 0; pass < 2 && !c->rc; ++pass) {
        kern_begin(c);
        if (graph) {
            c->rc = c->be->graph_launch(c->q, g);
        } else {
            for (unsigned i = 0; i < c->repeats && !c->rc; ++i) {
                c->rc = enqueue(c, i, user);
            }
        }
        kern_end(c);
    }
    c->be->graph_destroy(c->be, g);
}

struct qx_weight kern_large_weight(struct kern_ctx *c, uint8_t fmt, uint32_t rows, uint32_t cols)
{
    uint32_t few = rows < 1024 ? rows : 1024;
    struct qx_weight one = kern_weight(c, fmt, few, cols, 0), w = one;
    uint64_t code = kern_weight_bytes(&(struct qx_weight){.fmt = fmt == QX_W_NVFP4 || fmt == QX_W_MXFP8 ? QX_W_FP8 : fmt,
                                                          .rows = few, .cols = cols});
    code = fmt == QX_W_NVFP4 ? code / 2 : code;
    uint64_t scale = kern_weight_bytes(&one) - code;
    uint32_t parts = (rows + few - 1) / few;
    uint8_t *codes = kern_new(c, code * parts), *scales = scale ? kern_new(c, scale * parts) : NULL;
    for (uint32_t i = 0; i < parts; ++i) {
        c->be->copy(c->q, codes + i * code, one.codes, code);
        if (scale) {
            c->be->copy(c->q, scales + i * scale, one.scale, scale);
        }
    }
    w.codes = codes;
    w.scale = scale ? scales : w.scale;
    w.rows = rows;
    if (fmt == QX_W_FP8_BLOCK) {
        w.rows = rows;
        w.scale_bf16 = 0;
        w.row0 = 0;
        w.scale = kern_f32(c, (size_t)(rows + 127) / 128 * ((cols + 127) / 128), 1.0f);
    }
    return w;
}

struct chain { struct qx_op_linear lin; struct qx_weight w[8]; struct qx_op_hc hc[5]; uint32_t n; };

static int chain_linear(struct kern_ctx *c, unsigned i, void *user)
{
    struct chain *x = user;
    x->lin.w[0] = x->w[i % x->n];
    return c->be->ops->linear(c->q, &x->lin);
}
static int chain_hc(struct kern_ctx *c, unsigned i, void *user)
{
    struct chain *x = user;
    return c->be->ops->hc(c->q, &x->hc[i % x->n]);
}

/* The linears of a layer of the released model, one after another, several layers' weights so that none
 * comes from L2. variant: format + 8 * shape + 64 * rows */
static void bench_linear(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][3] = {{16480, 2560, 3}, {2560, 6144, 6}, {13952, 2560, 3}, {248320, 2560, 1},
                                         {1056, 2560, 8}, {1056, 6144, 8}};
    const uint32_t *s = shapes[v / 8 % 8], m = (uint32_t)v / 64;
    uint8_t f = formats[v % 8];
    struct chain x = {.n = s[2]};
    for (uint32_t i = 0; i < s[2]; ++i) {
        x.w[i] = kern_large_weight(c, f, s[0], s[1]);
    }
    x.lin = (struct qx_op_linear){.n_rows = m, .n_weights = 1, .act_bf16 = true, .x_stride = s[1], .y_stride = s[0]};
    x.lin.x = kern_f32(c, (size_t)m * s[1], 1.0f);
    x.lin.y = kern_new(c, (size_t)m * s[0] * 4);
    kern_shape(c, "%u x %s [%u, %u]", m, kern_fmt_name(f), s[0], s[1]);
    c->bytes = kern_weight_bytes(&x.w[0]);
    kern_chain(c, chain_linear, &x);
}

/* Odd widths and odd addresses take the slow path. */
static void odd(struct kern_ctx *c, int v)
{
    uint32_t k = v ? 50 : 72, m = 3;
    struct qx_weight w = kern_weight(c, v ? QX_W_BF16 : QX_W_FP8, 21, k, 0);
    float *x = kern_f32(c, (size_t)m * k, 1.0f), *y = kern_new(c, (size_t)m * 21 * 4);
    kern_out(c, "y", 'f', y, (size_t)m * 21, 0);
    kern_shape(c, "%s [21, %u]", kern_fmt_name(w.fmt), k);
    KERN_RUN(c, linear, {.n_rows = m, .n_weights = 1, .x = x, .x_stride = k, .y_stride = 21, .w = {w}, .y = y});
}

/* variant: format + 8 * shape, + ACT_BF16, + PROMPT */
static void hc(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][5] = {/* rows, streams, hidden, rank, with inject and write-back */
        {1, 4, 64, 16, 3}, {1, 4, 2560, 320, 3}, {3, 4, 256, 32, 1}, {8, 4, 640, 80, 3}, {2, 4, 2560, 320, 2},
        {11, 4, 128, 16, 3}, {5, 2, 384, 48, 3}, {30, 4, 256, 32, 3},
        {140, 4, 2560, 320, 3}, {45, 4, 104, 24, 2}, {301, 4, 640, 80, 3},
        {1, 4, 2560, 320, 0}, {3, 4, 2560, 320, 1}, {4, 4, 2560, 320, 3}, {9, 4, 2560, 320, 3}, {110, 4, 2560, 320, 3}};
    bool act = v & ACT_BF16, prompt = v & PROMPT;
    v &= ACT_BF16 - 1;
    const uint32_t *s = shapes[v / 8];
    uint8_t f = formats[v % 8];
    uint32_t n = s[0], C = s[1], H = s[2], R = s[3];
    struct qx_op_hc a = {.n_rows = n, .n_streams = C, .hidden = H, .rank = R, .eps = 1e-6f, .act_bf16 = act,
                         .prompt = prompt};
    a.x = kern_f32(c, (size_t)n * C * H, 2.0f);
    a.norm = kern_f32(c, (size_t)C * H, 0.2f);
    a.down = kern_weight(c, f, R, C * H, 0);
    a.up = kern_weight(c, f == QX_W_NVFP4 && R % 32 ? QX_W_BF16 : f == QX_W_MXFP8 && R % 32 ? QX_W_BF16 : f, C * H, R, 0);
    if (s[4] & 1) {
        a.inject = kern_weight(c, QX_W_BF16, C, C * H, 0);
        a.inj_out = kern_new(c, (size_t)n * C * 4);
        kern_out(c, "inj", 'f', a.inj_out, (size_t)n * C, act ? BOUND_ROUNDED : 0);
    }
    if (s[4] & 2) {
        a.y = kern_f32(c, (size_t)n * H, 1.0f);
        a.inj_in = kern_f32(c, (size_t)n * C, 1.0f);
    }
    a.m = kern_new(c, (size_t)n * H * 4);
    a.scratch = kern_new(c, (size_t)n * (C * H + R) * 4);
    kern_out(c, "m", 'f', a.m, (size_t)n * H, act ? BOUND_ROUNDED : 0);
    kern_out(c, "x", 'f', a.x, (size_t)n * C * H, 0);
    kern_shape(c, "%u rows, %u x %u, rank %u, %s%s%s", n, C, H, R, kern_fmt_name(f), act ? ", bf16" : "",
               prompt ? ", prompt" : "");
    KERN_RUN(c, hc, a);
}

/* The mixers of some layers one after another. variant: format + 8 * rows */
static void bench_hc(struct kern_ctx *c, int v)
{
    const uint32_t n = (uint32_t)v / 8, C = 4, H = 2560, R = 320, sets = 5;
    uint8_t f = formats[v % 8];
    struct chain ch = {.n = sets};
    struct qx_op_hc *a = ch.hc;
    for (uint32_t i = 0; i < sets; ++i) {
        a[i] = (struct qx_op_hc){.n_rows = n, .n_streams = C, .hidden = H, .rank = R, .eps = 1e-6f, .act_bf16 = true};
        a[i].x = i ? a[0].x : kern_f32(c, (size_t)n * C * H, 2.0f);
        a[i].y = i ? a[0].y : kern_f32(c, (size_t)n * H, 1e-3f);
        a[i].inj_in = i ? a[i - 1].inj_out : kern_f32(c, (size_t)n * C, 1.0f);
        a[i].inj_out = kern_new(c, (size_t)n * C * 4);
        a[i].norm = kern_f32(c, (size_t)C * H, 0.2f);
        a[i].down = kern_large_weight(c, f, R, C * H);
        a[i].up = kern_large_weight(c, f, C * H, R);
        a[i].inject = kern_weight(c, QX_W_BF16, C, C * H, 0);
        a[i].m = i ? a[0].m : kern_new(c, (size_t)n * H * 4);
        a[i].scratch = i ? a[0].scratch : kern_new(c, (size_t)n * (C * H + R) * 4);
    }
    kern_shape(c, "%u rows, %u x %u, rank %u, %s", n, C, H, R, kern_fmt_name(f));
    c->bytes = kern_weight_bytes(&a[0].down) + kern_weight_bytes(&a[0].up) + kern_weight_bytes(&a[0].inject);
    kern_chain(c, chain_hc, &ch);
}

/* The same for a mixer: bits of m, x and inj. variant: format + 8 * shape */
static void hc_same_bits(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][3] = {{2560, 320, 4}, {256, 64, 4}, {640, 32, 3}}, counts[] = {1, 2, 3, 8, 9, 17, 33};
    const uint32_t *s = shapes[v / 8], all = 40, H = s[0], R = s[1], C = s[2];
    uint8_t f = formats[v % 8];
    struct qx_op_hc a = {.n_streams = C, .hidden = H, .rank = R, .eps = 1e-6f, .act_bf16 = true};
    const float *x = kern_f32(c, (size_t)all * C * H, 2.0f), *y = kern_f32(c, (size_t)all * H, 1.0f),
                *inj = kern_f32(c, (size_t)all * C, 1.0f);
    a.norm = kern_f32(c, (size_t)C * H, 0.2f);
    a.down = kern_weight(c, f, R, C * H, 0);
    a.up = kern_weight(c, f, C * H, R, 0);
    a.inject = kern_weight(c, QX_W_BF16, C, C * H, 0);
    a.scratch = kern_new(c, (size_t)all * (C * H + R) * 4);
    size_t nx = (size_t)C * H, nm = H;
    uint32_t *whole = malloc(all * (nx + nm + C) * 4), *part = malloc(all * (nx + nm + C) * 4);
    int32_t bad = 0;
    kern_shape(c, "%s, %u x %u, rank %u", kern_fmt_name(f), C, H, R);
    for (size_t i = 0; i <= QX_ARRAY_LEN(counts) && !c->rc; ++i) {
        uint32_t n = i ? counts[i - 1] : all, first = (all - n) / 2;
        uint32_t *out = i ? part : whole;
        a.n_rows = n;
        a.x = kern_new(c, n * nx * 4);
        c->be->copy(c->q, a.x, x + first * nx, n * nx * 4);
        a.y = y + (size_t)first * H;
        a.inj_in = inj + (size_t)first * C;
        a.m = kern_new(c, n * nm * 4);
        a.inj_out = kern_new(c, (size_t)n * C * 4);
        KERN_RUN(c, hc, a);
        kern_fetch(c, out, a.x, n * nx * 4);
        kern_fetch(c, out + n * nx, a.m, n * nm * 4);
        kern_fetch(c, out + n * (nx + nm), a.inj_out, (size_t)n * C * 4);
        const uint32_t *w = whole;
        for (int part_of = 0; part_of < 3 && i; ++part_of) {
            size_t len = part_of == 0 ? nx : part_of == 1 ? nm : C;
            for (size_t j = 0; j < n * len; ++j) {
                bad += out[j] != w[first * len + j];
            }
            out += n * len;
            w += all * len;
        }
    }
    free(whole);
    free(part);
    kern_out(c, "bits that differ", 'i', kern_put(c, &bad, 4), 1, 0);
}

static void hc_write(struct kern_ctx *c, int v)
{
    uint32_t n = 5, C = 4, H = 96;
    float *x = kern_f32(c, n * C * H, 1.0f);
    kern_out(c, "x", 'f', x, n * C * H, 0);
    KERN_RUN(c, hc, {.n_rows = n, .n_streams = C, .hidden = H, .x = x, .y = kern_f32(c, n * H, 1.0f),
                     .inj_in = v ? kern_f32(c, n * C, 1.0f) : NULL});
}

static void route(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][4] = {{1, 512, 10, 2560}, {8, 512, 10, 2560}, {3, 4, 2, 64}, {20, 8, 3, 256},
                                         {2, 700, 12, 128}, {5, 512, 10, 256},
                                         {70, 512, 10, 2560}, {300, 68, 6, 192}, {130, 512, 10, 64}};
    bool prompt = v & PROMPT, ties = v & TIES;
    v &= TIES - 1;
    const uint32_t *s = shapes[v];
    uint32_t n = s[0], E = s[1], k = s[2], H = s[3];
    struct qx_weight g = kern_weight(c, QX_W_BF16, E, H, 0);
    float *m = kern_f32(c, (size_t)n * H, 1.0f);
    if (ties) { /* whole numbers, exact in any order of sums */
        int16_t *h = malloc((size_t)E * H * 2);
        for (size_t i = 0; i < (size_t)E * H; ++i) {
            h[i] = (int16_t)qx_f32_to_bf16(i % H < 3 ? (float)kern_below(c, 3) : 0.0f);
        }
        g.codes = kern_put(c, h, (size_t)E * H * 2);
        free(h);
        m = kern_const(c, (size_t)n * H, 1.0f);
    }
    int32_t *e = kern_new(c, (size_t)n * k * 4);
    float *w = kern_new(c, (size_t)n * k * 4);
    kern_out(c, "expert", 'i', e, (size_t)n * k, 0);
    kern_out(c, "weight", 'f', w, (size_t)n * k, 1e-5); /* an error of a logit enters the exponent as it is */
    kern_shape(c, "%u rows, %u of %u, hidden %u%s", n, k, E, H, ties ? ", ties" : "");
    struct qx_op_moe_route a = {.n_rows = n, .hidden = H, .n_experts = E, .k = k, .norm = v % 2 == 0, .m = m, .gate = g,
                                .logits = kern_new(c, (size_t)n * E * 4), .expert = e, .weight = w, .prompt = prompt};
    KERN_RUN(c, moe_route, a);
    if (prompt || n > 20) {
        return;
    }
    /* each row alone: the same bits */
    struct qx_op_moe_route b = a;
    b.n_rows = 1;
    b.expert = kern_new(c, (size_t)n * k * 4);
    b.weight = kern_new(c, (size_t)n * k * 4);
    for (uint32_t r = 0; r < n; ++r) {
        c->rc = c->rc ? c->rc : c->be->ops->moe_route(c->q, &b);
        b.m += H;
        b.expert += k;
        b.weight += k;
    }
    kern_same(c, w, b.weight - (size_t)n * k, (size_t)n * k * 4);
    kern_same(c, e, b.expert - (size_t)n * k, (size_t)n * k * 4);
}

/* variant: format + 8 * shape, + ACT_BF16, + PROMPT, + OTHER_SHARED */
static void moe(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][6] = {/* rows, experts, k, hidden, inter, shared inter */
        {1, 8, 3, 256, 128, 128}, {1, 4, 2, 64, 160, 32}, {2, 24, 10, 2560, 640, 640}, {8, 16, 4, 256, 192, 64},
        {5, 6, 6, 128, 96, 96}, {13, 8, 3, 256, 128, 128}, {70, 8, 3, 256, 128, 128}, {300, 16, 4, 512, 160, 64},
        {8, 24, 10, 2560, 640, 640}, {1, 24, 10, 2560, 640, 640},
        {40, 24, 10, 512, 128, 128}, /* many experts of few rows: gaps in the order of a prompt's pairs */
        {150, 24, 4, 2560, 640, 640}, {100, 20, 4, 768, 384, 64}, {90, 20, 4, 512, 640, 64}, {400, 9, 3, 256, 128, 128}};
    bool act = v & ACT_BF16, prompt = v & PROMPT, other = v & OTHER_SHARED;
    v &= ACT_BF16 - 1;
    const uint32_t *s = shapes[v / 8];
    uint8_t f = formats[v % 8];
    uint32_t n = s[0], E = s[1], k = s[2], H = s[3], I = s[4], S = s[5];
    struct qx_weight w[3][32];
    for (uint32_t e = 0; e < E; ++e) {
        w[0][e] = kern_weight(c, f, I, H, 0);
        w[1][e] = kern_weight(c, f, I, H, 0);
        w[2][e] = kern_weight(c, f, H, I, 0);
    }
    struct qx_op_moe a = {.n_rows = n, .k = k, .s_inter = S, .act_bf16 = act, .prompt = prompt};
    a.experts = (struct qx_experts){.n_experts = E, .hidden = H, .inter = I, .fmt = f};
    a.experts.gate = kern_put(c, w[0], E * sizeof w[0][0]);
    a.experts.up = kern_put(c, w[1], E * sizeof w[0][0]);
    a.experts.down = kern_put(c, w[2], E * sizeof w[0][0]);
    int32_t *e = malloc((size_t)n * k * 4);
    float *g = malloc((size_t)n * k * 4);
    for (uint32_t r = 0; r < n; ++r) {
        for (uint32_t j = 0; j < k; ++j) {
            bool again;
            do {
                /* a crowd at the first experts: many rows share them, some have none */
                e[r * k + j] = (int32_t)(kern_below(c, E) * kern_below(c, E) / E);
                e[r * k + j] = kern_below(c, 4) ? e[r * k + j] : (int32_t)kern_below(c, E);
                again = false;
                for (uint32_t i = 0; i < j; ++i) {
                    again = again || e[r * k + i] == e[r * k + j];
                }
            } while (again);
            g[r * k + j] = fabsf(kern_uniform(c));
        }
    }
    a.expert = kern_put(c, e, (size_t)n * k * 4);
    a.weight = kern_put(c, g, (size_t)n * k * 4);
    free(e);
    free(g);
    a.m = kern_f32(c, (size_t)n * H, 1.0f);
    uint8_t fs = f == QX_W_NVFP4 ? (other ? QX_W_MXFP8 : QX_W_BF16) : other ? QX_W_BF16 : f;
    kern_moe_rest(c, &a, fs);
    /* MXFP8 of the generator: codes of 17 binades, scales of 8: few values carry a sum, and a rounding that falls the
     * other way shows as a larger part of it (an unrounded input would show as 3e-3) */
    kern_out(c, "y", 'f', a.y, (size_t)n * H, !act ? 0 : fs == QX_W_MXFP8 ? 1e-3 : BOUND_ROUNDED);
    kern_shape(c, "%u rows, %u of %u, hidden %u, inter %u+%u, %s and %s%s%s", n, k, E, H, I, S, kern_fmt_name(f), kern_fmt_name(fs),
               act ? ", bf16" : "", prompt ? ", prompt" : "");
    KERN_RUN(c, moe, a);
    if (prompt || n > 16) {
        return;
    }
    /* each row alone: the same bits */
    uint32_t n_differ = 0;
    float *y = malloc((size_t)2 * n * H * 4);
    struct qx_op_moe b = a;
    b.n_rows = 1;
    b.y = kern_new(c, (size_t)n * H * 4);
    for (uint32_t r = 0; r < n && y; ++r) {
        c->rc = c->rc ? c->rc : c->be->ops->moe(c->q, &b);
        b.m += H;
        b.y += H;
        b.expert += k;
        b.weight += k;
    }
    kern_fetch(c, y, a.y, (size_t)n * H * 4);
    kern_fetch(c, y + (size_t)n * H, b.y - (size_t)n * H, (size_t)n * H * 4);
    for (size_t i = 0; i < (size_t)n * H; ++i) {
        n_differ += memcmp(y + i, y + (size_t)n * H + i, 4) != 0;
    }
    kern_out(c, "values of a row that differ alone", 'i', kern_put(c, &n_differ, 4), 1, 0);
    free(y);
}

/* ---- speed, released shapes ---- */

/* variant: format + 8 * shape; rows of a prompt */
static void linear_speed(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][3] = {{8192, 16480, 2560}, {8192, 2560, 6144}, {1024, 16480, 2560}, {1024, 2560, 6144},
                                         {8192, 320, 10240}};
    const uint32_t *s = shapes[v / 8];
    struct qx_weight w = kern_weight(c, formats[v % 8], s[1], s[2], 0);
    float *x = kern_f32(c, (size_t)s[0] * s[2], 1.0f), *y = kern_new(c, (size_t)s[0] * s[1] * 4);
    kern_shape(c, "%u x %s [%u, %u], prompt", s[0], kern_fmt_name(w.fmt), s[1], s[2]);
    c->bytes = kern_weight_bytes(&w) + (uint64_t)s[0] * (s[1] + s[2]) * 4;
    KERN_RUN(c, linear, {.act_bf16 = true, .prompt = true, .n_rows = s[0], .n_weights = 1, .x = x, .x_stride = s[2], .y_stride = s[1], .w = {w}, .y = y});
}

static void hc_speed(struct kern_ctx *c, int n_rows)
{
    uint32_t n = (uint32_t)n_rows, C = 4, H = 2560, R = 320;
    struct qx_op_hc a = {.n_rows = n, .n_streams = C, .hidden = H, .rank = R, .eps = 1e-6f, .act_bf16 = true, .prompt = true};
    a.x = kern_f32(c, (size_t)n * C * H, 2.0f);
    a.norm = kern_f32(c, (size_t)C * H, 0.2f);
    a.down = kern_weight(c, QX_W_BF16, R, C * H, 0);
    a.up = kern_weight(c, QX_W_BF16, C * H, R, 0);
    a.inject = kern_weight(c, QX_W_BF16, C, C * H, 0);
    a.inj_out = kern_new(c, (size_t)n * C * 4);
    a.y = kern_f32(c, (size_t)n * H, 1e-3f);
    a.inj_in = kern_const(c, (size_t)n * C, 1.0f);
    a.m = kern_new(c, (size_t)n * H * 4);
    a.scratch = kern_new(c, (size_t)n * (C * H + R) * 4);
    c->bytes = (uint64_t)n * H * (4 * C * 2 + 8) + kern_weight_bytes(&a.down) * 2;
    kern_shape(c, "%u rows, prompt", n);
    KERN_RUN(c, hc, a);
}

static void route_speed(struct kern_ctx *c, int n_rows)
{
    uint32_t n = (uint32_t)n_rows, E = 512, k = 10, H = 2560;
    struct qx_weight g = kern_weight(c, QX_W_BF16, E, H, 0);
    c->bytes = kern_weight_bytes(&g) + (uint64_t)n * H * 4;
    kern_shape(c, "%u rows, prompt", n);
    KERN_RUN(c, moe_route, {.n_rows = n, .hidden = H, .n_experts = E, .k = k, .norm = true, .m = kern_f32(c, (size_t)n * H, 1.0f),
                            .gate = g, .logits = kern_new(c, (size_t)n * E * 4), .expert = kern_new(c, (size_t)n * k * 4),
                            .weight = kern_new(c, (size_t)n * k * 4), .prompt = true});
}

/* variant: format + 8 * (rows / 256) */
static void moe_speed(struct kern_ctx *c, int v)
{
    uint32_t n = (uint32_t)(v / 8) * 256, E = 512, k = 10, H = 2560, I = 640;
    struct qx_weight all[3] = {kern_weight(c, formats[v % 8], E * I, H, 0), kern_weight(c, formats[v % 8], E * I, H, 0),
                               kern_weight(c, formats[v % 8], E * H, I, 0)};
    struct qx_weight *w = malloc(3 * (size_t)E * sizeof *w);
    for (uint32_t e = 0; e < E; ++e) {
        w[e] = kern_weight_rows(&all[0], e * I, I);
        w[E + e] = kern_weight_rows(&all[1], e * I, I);
        w[2 * E + e] = kern_weight_rows(&all[2], e * H, H);
    }
    const struct qx_weight *dev = kern_put(c, w, 3 * (size_t)E * sizeof *w);
    free(w);
    int32_t *e = malloc((size_t)n * k * 4);
    for (uint32_t i = 0; i < n * k; ++i) {
        e[i] = i % k ? (int32_t)(((uint32_t)e[i - 1] + 1 + kern_below(c, E / k)) % E) : (int32_t)kern_below(c, E);
    }
    struct qx_op_moe a = {.n_rows = n, .k = k, .s_inter = I, .act_bf16 = true, .prompt = true};
    a.experts = (struct qx_experts){dev, dev + E, dev + 2 * E, E, H, I, formats[v % 8]};
    a.expert = kern_put(c, e, (size_t)n * k * 4);
    free(e);
    a.weight = kern_const(c, (size_t)n * k, 0.1f);
    a.m = kern_f32(c, (size_t)n * H, 1.0f);
    kern_moe_rest(c, &a, QX_W_BF16);
    c->bytes = kern_weight_bytes(&all[0]) * 3 + (uint64_t)n * H * 8;
    kern_shape(c, "%u rows, %u of %u, %s, prompt", n, k, E, kern_fmt_name(formats[v % 8]));
    KERN_RUN(c, moe, a);
}

#define L(f, s, k) {"linear", "linear", linear, (f) + 8 * (s) + 128 * (k), 0}
#define LB(s) L(ACT_BF16 + 0, s, 0), L(ACT_BF16 + 1, s, 0), L(ACT_BF16 + 2, s, 0), L(ACT_BF16 + 3, s, 0), L(ACT_BF16 + 4, s, 0)
#define LP(s) L(ACT_BF16 + PROMPT + 0, s, 0), L(ACT_BF16 + PROMPT + 1, s, 0), L(ACT_BF16 + PROMPT + 2, s, 0), \
    L(ACT_BF16 + PROMPT + 3, s, 0), L(ACT_BF16 + PROMPT + 4, s, 0)
#define LS(s) L(0, s, 0), L(1, s, 0), L(2, s, 0), L(3, s, 0), L(4, s, 0), L(5, s, 0), L(6, s, 0)
#define LK(k) L(0, 1, k), L(1, 1, k), L(2, 1, k), L(3, 1, k), L(4, 1, k), L(0, 8, k), L(1, 8, k), L(2, 8, k), L(3, 8, k), L(4, 8, k)
#define H(f, s) {"hc", "hc", hc, (f) + 8 * (s), 0}
#define M(f, s) {"moe", "moe", moe, (f) + 8 * (s), 0}
#define A(f, m) {"linear", "alike", alike, (f) + 8 * (m), 0}
#define B(f, s, m) {"linear", "same", same_bits, (f) + 8 * (s), 0}
#define LSAME(s) B(ACT_BF16 + 0, s, 0), B(ACT_BF16 + 1, s, 0), B(ACT_BF16 + 2, s, 0), B(ACT_BF16 + 3, s, 0), B(ACT_BF16 + 4, s, 0)
#define LBENCH(f, m) {"linear", "layers", bench_linear, (f) + 64 * (m), 1}, {"linear", "layers", bench_linear, (f) + 8 + 64 * (m), 1}
#define LRANGE(m) {"linear", "ranges", ranges, 1 + 8 * (m), 0}, {"linear", "ranges", ranges, 2 + 8 * (m), 0}, \
    {"linear", "ranges", ranges, 3 + 8 * (m), 0}
#define LBK(k) L(ACT_BF16 + 0, 1, k), L(ACT_BF16 + 1, 1, k), L(ACT_BF16 + 2, 1, k), L(ACT_BF16 + 3, 1, k), L(ACT_BF16 + 4, 1, k)
const struct kern_case kern_cases_matmul[] = {
    LBENCH(0, 1), LBENCH(0, 2), LBENCH(0, 4), LBENCH(0, 8), LBENCH(0, 16), LBENCH(0, 32), LBENCH(1, 1), LBENCH(2, 1),
    LBENCH(3, 1), LBENCH(4, 1), LBENCH(3, 8), LBENCH(4, 8), {"linear", "layers", bench_linear, 16 + 64, 1},
    {"linear", "layers", bench_linear, 32 + 64, 1}, {"linear", "layers", bench_linear, 40 + 64, 1},
    {"linear", "layers", bench_linear, 24 + 64, 1}, {"linear", "layers", bench_linear, 24 + 64 * 8, 1},
    LRANGE(0), LRANGE(1), LRANGE(2), LRANGE(3), LRANGE(4), LRANGE(5), LRANGE(8), LRANGE(9), LRANGE(10), LRANGE(11), LRANGE(12),
    LRANGE(13), LSAME(0), LSAME(1), LSAME(2), B(0, 0, 0), B(4, 0, 0), LBK(1), LBK(2), LBK(3), LB(9), LB(11),
    A(0, 0), A(1, 3), A(2, 1), A(3, 0), A(3, 1), A(3, 2), A(4, 0), A(4, 3), A(0, 1), A(0, 2), A(0, 3),
    {"linear", "several", several, ACT_BF16 + 0, 0}, {"linear", "several", several, ACT_BF16 + 1, 0},
    {"linear", "several", several, ACT_BF16 + 2, 0}, {"linear", "several", several, ACT_BF16 + 3, 0},
    LS(0), LS(1), LS(2), LS(3), LS(4), LS(5), LS(6), LS(7), LS(8), LS(9), LS(10), LS(11), LK(1), LK(2), LK(3),
    LB(0), LB(1), LB(2), LB(3), LB(5), LB(6), LB(7), LB(8), LP(1), LP(6), LP(8), LP(9), LP(11), LP(12), LP(13), LP(14), LP(15), L(PROMPT + 0, 9, 0), L(PROMPT + 4, 9, 0),
    {"linear", "several", several, 0, 0}, {"linear", "several", several, 1, 0}, {"linear", "several", several, 2, 0},
    {"linear", "several", several, 3, 0}, {"linear", "odd", odd, 0, 0}, {"linear", "odd", odd, 1, 0},
    H(0, 0), H(0, 1), H(0, 2), H(0, 3), H(0, 4), H(0, 5), H(0, 6), H(0, 7), H(1, 1), H(2, 1), H(3, 1), H(4, 1), H(5, 2),
    H(6, 3), H(3, 3), H(4, 7), H(1, 7), H(2, 7), H(3, 7), H(6, 7),
    {"hc", "same", hc_same_bits, 0, 0}, {"hc", "same", hc_same_bits, 3, 0}, {"hc", "same", hc_same_bits, 4, 0},
    {"hc", "same", hc_same_bits, 8, 0}, {"hc", "same", hc_same_bits, 9, 0}, {"hc", "same", hc_same_bits, 10, 0},
    {"hc", "same", hc_same_bits, 12, 0}, {"hc", "same", hc_same_bits, 16, 0}, {"hc", "same", hc_same_bits, 18, 0},
    {"hc", "layers", bench_hc, 8, 1}, {"hc", "layers", bench_hc, 16, 1}, {"hc", "layers", bench_hc, 32, 1},
    {"hc", "layers", bench_hc, 64, 1}, {"hc", "layers", bench_hc, 128, 1}, {"hc", "layers", bench_hc, 256, 1},
    {"hc", "layers", bench_hc, 8 + 3, 1}, {"hc", "layers", bench_hc, 8 + 4, 1},
    H(ACT_BF16, 2), H(ACT_BF16 + 1, 1), H(ACT_BF16 + 2, 1), H(ACT_BF16 + 4, 1), H(ACT_BF16 + 5, 2), H(ACT_BF16 + 6, 3),
    H(ACT_BF16 + 3, 3), H(ACT_BF16 + 1, 3), H(ACT_BF16 + 2, 3), H(ACT_BF16, 5), H(ACT_BF16, 6), H(ACT_BF16, 7),
    H(ACT_BF16 + 3, 7), H(ACT_BF16 + 4, 7), H(ACT_BF16 + 2, 7),
    H(ACT_BF16, 4), H(ACT_BF16, 11), H(ACT_BF16, 12), H(ACT_BF16, 13), H(ACT_BF16, 14), H(ACT_BF16, 15),
    H(ACT_BF16, 0), H(ACT_BF16, 1), H(ACT_BF16 + 3, 1), H(ACT_BF16, 3), H(ACT_BF16, 4), H(ACT_BF16 + PROMPT, 5),
    H(ACT_BF16 + PROMPT, 7), H(ACT_BF16 + PROMPT + 3, 7), H(ACT_BF16 + PROMPT, 8), H(ACT_BF16 + PROMPT, 9), H(ACT_BF16 + PROMPT, 10), H(PROMPT, 7),
    {"hc", "write", hc_write, 0, 0}, {"hc", "write", hc_write, 1, 0},
    {"moe_route", "route", route, 0, 0}, {"moe_route", "route", route, 1, 0}, {"moe_route", "route", route, 2, 0},
    {"moe_route", "route", route, 3, 0}, {"moe_route", "route", route, 4, 0}, {"moe_route", "route", route, 5, 0},
    {"moe_route", "route", route, PROMPT + 6, 0}, {"moe_route", "route", route, PROMPT + 7, 0}, {"moe_route", "ties", route, PROMPT + TIES + 7, 0},
    {"moe_route", "ties", route, TIES + 0, 0}, {"moe_route", "ties", route, TIES + 1, 0}, {"moe_route", "ties", route, TIES + 5, 0},
    {"moe_route", "route", route, 6, 0}, {"moe_route", "route", route, 7, 0}, {"moe_route", "route", route, 8, 0},
    M(0, 0), M(1, 0), M(2, 0), M(3, 0), M(4, 0), M(5, 0), M(6, 0), M(0, 1), M(1, 1), M(2, 1), M(3, 1), M(4, 1),
    M(4, 2), M(2, 2), M(0, 3), M(2, 3), M(4, 3), M(0, 4), M(3, 4), M(4, 4), M(0, 5), M(4, 5), M(6, 5), M(0, 6), M(1, 6),
    M(2, 6), M(3, 6), M(4, 6), M(6, 6), M(4, 7), M(0, 7), M(2, 7),
    M(ACT_BF16 + 1, 0), M(ACT_BF16 + 3, 0), M(ACT_BF16 + 0, 1), M(ACT_BF16 + 1, 1), M(ACT_BF16 + 2, 1), M(ACT_BF16 + 3, 1),
    M(ACT_BF16 + 5, 1), M(ACT_BF16 + 6, 3), M(ACT_BF16 + 0, 2), M(ACT_BF16 + 1, 2), M(ACT_BF16 + 3, 2), M(ACT_BF16 + 0, 3),
    M(ACT_BF16 + 3, 3), M(ACT_BF16 + 0, 4), M(ACT_BF16 + 2, 4), M(ACT_BF16 + 4, 5), M(ACT_BF16 + 2, 5), M(ACT_BF16 + 4, 8),
    M(ACT_BF16 + 2, 8), M(ACT_BF16 + 0, 8), M(ACT_BF16 + 4, 9),
    M(ACT_BF16 + 0, 0), M(ACT_BF16 + 4, 0), M(ACT_BF16 + 4, 1), M(ACT_BF16 + 4, 2), M(ACT_BF16 + 2, 2), M(ACT_BF16 + 4, 3),
    M(ACT_BF16 + 2, 3), M(ACT_BF16 + 4, 4), M(ACT_BF16 + PROMPT + 4, 5), M(ACT_BF16 + PROMPT + 0, 6), M(ACT_BF16 + PROMPT + 2, 6),
    M(ACT_BF16 + PROMPT + 4, 6), M(ACT_BF16 + PROMPT + 4, 7), M(ACT_BF16 + PROMPT + 0, 7), M(ACT_BF16 + PROMPT + 2, 7),
    M(PROMPT + 4, 7),
    M(OTHER_SHARED + 4, 0), M(OTHER_SHARED + 2, 5), M(ACT_BF16 + OTHER_SHARED + 4, 2), M(ACT_BF16 + OTHER_SHARED + 4, 5),
    M(ACT_BF16 + OTHER_SHARED + 4, 8), M(ACT_BF16 + OTHER_SHARED + 4, 9), M(ACT_BF16 + OTHER_SHARED + 2, 8),
    M(ACT_BF16 + OTHER_SHARED + 2, 9), M(ACT_BF16 + PROMPT + OTHER_SHARED + 4, 6), M(ACT_BF16 + PROMPT + OTHER_SHARED + 2, 6),
    M(ACT_BF16 + PROMPT + 4, 10), M(ACT_BF16 + PROMPT + 0, 10), M(ACT_BF16 + PROMPT + OTHER_SHARED + 4, 10),
    M(ACT_BF16 + PROMPT + 1, 10), M(ACT_BF16 + PROMPT + 3, 10),
    M(ACT_BF16 + PROMPT + 4, 11), M(ACT_BF16 + PROMPT + 4, 12), M(ACT_BF16 + PROMPT + 4, 13),
    M(ACT_BF16 + PROMPT + 4, 14), M(ACT_BF16 + PROMPT + 1, 14), M(ACT_BF16 + PROMPT + 3, 14), M(ACT_BF16 + PROMPT + 0, 14),
    {"linear", "prompt", linear_speed, 0, 1}, {"linear", "prompt", linear_speed, 8, 1}, {"linear", "prompt", linear_speed, 16, 1},
    {"linear", "prompt", linear_speed, 3, 1},
    {"linear", "prompt", linear_speed, 24, 1}, {"hc", "prompt", hc_speed, 8192, 1}, {"hc", "prompt", hc_speed, 1024, 1},
    {"moe_route", "prompt", route_speed, 8192, 1}, {"moe_route", "prompt", route_speed, 1024, 1},
    {"moe", "prompt", moe_speed, 4 + 8 * 32, 1}, {"moe", "prompt", moe_speed, 4 + 8 * 4, 1}, {"moe", "prompt", moe_speed, 4 + 8, 1},
    {0, 0, 0, 0, 0}};
