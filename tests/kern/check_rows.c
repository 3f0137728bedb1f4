/* check_rows.c: cases of embed, pick, decode_rows and ple_gather. */
#include "kern.h"

#include <string.h>

static const uint8_t formats[] = {QX_W_BF16, QX_W_F16, QX_W_F32, QX_W_FP8, QX_W_NVFP4, QX_W_MXFP8, QX_W_FP8_BLOCK};

static void embed(struct kern_ctx *c, int v)
{
    struct qx_weight t = kern_weight(c, formats[v], 100, 320, 1);
    struct qx_step *s = kern_step(c, (struct kern_run[]){{5, 0, 0, -1, 0}, {4, 7, 1, -1, 0}}, 2,
                                  140, NULL); /* some ids are past the table: NaN rows */
    float *x = kern_new(c, 9 * 4 * 320 * 4);
    kern_out(c, "x", 'f', x, 9 * 4 * 320, 1e-30);
    kern_shape(c, "%s [100, 320]", kern_fmt_name(formats[v]));
    KERN_RUN(c, embed, {.step = s, .table = t, .n_streams = 4, .x = x});
}

static void pick(struct kern_ctx *c, int v)
{
    uint32_t w = v ? 1 : 700;
    float *in = kern_f32(c, 10 * w, 1.0f), *out = kern_const(c, 6 * w, 3.0f);
    const int32_t idx[6] = {9, 0, -1, 4, 4, 2};
    kern_out(c, "out", 'f', out, 6 * w, 1e-30);
    kern_shape(c, "width %u", w);
    KERN_RUN(c, pick, {.in = in, .index = kern_put(c, idx, sizeof idx), .n = 6, .width = w, .out = out});
}

/* A table of shards; every code and scale byte value occurs. */
static struct qx_table_desc table(struct kern_ctx *c, uint8_t fmt, uint32_t width, uint32_t shards, uint64_t per)
{
    struct qx_table_desc t = {.rows_per_shard = per, .n_rows = shards * per - 3, .width = width, .global = 0.0123f,
                              .fmt = fmt};
    t.code_stride = fmt == QX_W_NVFP4 ? width / 2 : fmt == QX_W_FP8 ? width : fmt == QX_W_F32 ? width * 4 : width * 2;
    t.scale_stride = fmt == QX_W_NVFP4 ? width / 16 : 0;
    const void *cp[8], *sp[8];
    size_t n = per * t.code_stride, ns = per * t.scale_stride;
    uint8_t *h = malloc(n + ns + 8);
    for (uint32_t s = 0; s < shards; ++s) {
        for (size_t i = 0; i < n; ++i) {
            h[i] = (uint8_t)kern_u64(c);
        }
        for (size_t i = 0; fmt == QX_W_F32 && i < n; i += 4) {
            h[i + 3] &= 0x3f; /* finite */
        }
        cp[s] = kern_put(c, h, n);
        for (size_t i = 0; i < ns; ++i) {
            h[i] = (uint8_t)(i + s);
        }
        sp[s] = ns ? kern_put(c, h, ns) : NULL;
    }
    free(h);
    t.codes = kern_put(c, cp, shards * sizeof *cp);
    t.scale = ns ? kern_put(c, sp, shards * sizeof *sp) : NULL;
    return t;
}

static const int64_t asked[] = {0, 1, 39, 40, 41, 79, 80, 116, 117, 119, -1, 5, 5, 1000000};

static void gather(struct kern_ctx *c, int v)
{
    static const uint8_t f[] = {QX_W_FP8, QX_W_NVFP4, QX_W_BF16, QX_W_F16, QX_W_F32};
    struct qx_table_desc t = table(c, f[v], 160, 3, 40);
    uint32_t n = QX_ARRAY_LEN(asked);
    float *out = kern_new(c, n * 160 * 4);
    kern_out(c, "out", 'f', out, n * 160, 1e-30);
    kern_shape(c, "%s, 3 shards of 40 rows", kern_fmt_name(f[v]));
    KERN_RUN(c, ple_gather, {.table = t, .row = kern_put(c, asked, sizeof asked), .n = n, .out = out});
}

/* One shard of more than 4 GiB, of which only the rows asked for are ever written. */
static void gather_far(struct kern_ctx *c, int v)
{
    (void)v;
    uint64_t rows = 30000000;
    uint8_t *p = kern_new(c, rows * 160);
    const int64_t ask[] = {0, 26843545, 26843546, 29999999, 13421773, -5};
    uint8_t h[160];
    for (unsigned i = 0; i < 5; ++i) {
        for (unsigned j = 0; j < 160; ++j) {
            h[j] = (uint8_t)kern_u64(c);
        }
        if (c->be->upload(c->q, p + (uint64_t)ask[i] * 160, h, 160) || c->be->wait(c->q, NULL)) {
            c->rc = -1;
        }
    }
    const void *cp[1] = {p};
    struct qx_table_desc t = {.rows_per_shard = rows, .n_rows = rows, .width = 160, .global = 0.5f, .fmt = QX_W_FP8,
                              .code_stride = 160, .codes = kern_put(c, cp, sizeof cp)};
    float *out = kern_new(c, 6 * 160 * 4);
    kern_out(c, "out", 'f', out, 6 * 160, 1e-30);
    kern_shape(c, "fp8, rows past 4 GiB");
    KERN_RUN(c, ple_gather, {.table = t, .row = kern_put(c, ask, sizeof ask), .n = 6, .out = out});
}

static void decode(struct kern_ctx *c, int v)
{
    bool bf16 = v & 1;
    uint8_t f = formats[v / 2];
    int64_t ask[] = {0, 5, 99, 3, 50};
    void *out = kern_new(c, 5 * 320 * 4);
    kern_out(c, "out", bf16 ? 'b' : 'f', out, 5 * 320, 1e-30);
    kern_shape(c, "%s to %s", kern_fmt_name(f), bf16 ? "bf16" : "f32");
    struct qx_weight w = kern_weight(c, f, 100, 320, 1);
    KERN_RUN(c, decode_rows, {.weight = w, .row = kern_put(c, ask, sizeof ask), .n = 5, .bf16 = bf16, .out = out});
}

static void decode_table(struct kern_ctx *c, int v)
{
    struct qx_table_desc t = table(c, v & 1 ? QX_W_NVFP4 : QX_W_FP8, 160, 3, 40);
    uint32_t n = QX_ARRAY_LEN(asked);
    void *out = kern_new(c, n * 160 * 4);
    kern_out(c, "out", v & 2 ? 'b' : 'f', out, n * 160, 1e-30);
    kern_shape(c, "table %s to %s", v & 1 ? "nvfp4" : "fp8", v & 2 ? "bf16" : "f32");
    KERN_RUN(c, decode_rows, {.table = t, .row = kern_put(c, asked, sizeof asked), .n = n, .bf16 = (v & 2) != 0,
                              .out = out});
}

const struct kern_case kern_cases_rows[] = {
#define FIVE(op, fn) {op, #fn, fn, 0, 0}, {op, #fn, fn, 1, 0}, {op, #fn, fn, 2, 0}, {op, #fn, fn, 3, 0}, {op, #fn, fn, 4, 0}
    FIVE("embed", embed), {"embed", "embed", embed, 5, 0}, {"embed", "embed", embed, 6, 0},
    {"pick", "pick", pick, 0, 0}, {"pick", "pick", pick, 1, 0},
    FIVE("ple_gather", gather), {"ple_gather", "far", gather_far, 0, 0},
    FIVE("decode_rows", decode), {"decode_rows", "decode", decode, 5, 0}, {"decode_rows", "decode", decode, 6, 0},
    {"decode_rows", "decode", decode, 7, 0}, {"decode_rows", "decode", decode, 8, 0},
    {"decode_rows", "decode", decode, 9, 0}, {"decode_rows", "decode", decode, 10, 0},
    {"decode_rows", "decode", decode, 12, 0},
    {"decode_rows", "table", decode_table, 0, 0}, {"decode_rows", "table", decode_table, 1, 0},
    {"decode_rows", "table", decode_table, 2, 0}, {"decode_rows", "table", decode_table, 3, 0},
    {0, 0, 0, 0, 0}};
