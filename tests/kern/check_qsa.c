/* check_qsa.c: cases of qsa_prepare, qsa_select and qsa_attend over paged caches of both element types. */
#include "kern.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct caches { struct qx_kv kv; size_t n_kv, n_raw, n_pooled; };

/* Caches for n_seqs sequences of max_pages pages, filled, with the pages in a random order. whole: values are
 * whole numbers, so that sums are exact. */
static struct caches make_kv(struct kern_ctx *c, uint32_t n_seqs, uint32_t max_pages, uint32_t page, uint32_t heads,
                             uint32_t dim, uint32_t idim, uint32_t ratio, bool bf16, bool whole)
{
    struct caches k = {.kv = {.page_tokens = page, .max_pages = max_pages, .bf16 = bf16}};
    uint32_t pages = n_seqs * max_pages;
    int32_t *tab = malloc(pages * 4);
    for (uint32_t i = 0; i < pages; ++i) {
        tab[i] = (int32_t)i;
    }
    for (uint32_t i = pages - 1; i > 0; --i) {
        uint32_t j = kern_below(c, i + 1);
        int32_t x = tab[i];
        tab[i] = tab[j];
        tab[j] = x;
    }
    k.kv.page_table = kern_put(c, tab, pages * 4);
    free(tab);
    k.n_kv = (size_t)pages * page * heads * dim;
    k.n_raw = (size_t)pages * page * idim;
    k.n_pooled = (size_t)pages * (page / ratio) * idim;
    size_t n[4] = {k.n_kv, k.n_kv, k.n_raw, k.n_pooled};
    void *p[4];
    for (int i = 0; i < 4; ++i) {
        float *f = malloc(n[i] * 4 + 4);
        uint16_t *b = malloc(n[i] * 2 + 4);
        for (size_t j = 0; j < n[i]; ++j) {
            f[j] = whole ? (float)kern_below(c, 5) - 2.0f : kern_normal(c);
            b[j] = qx_f32_to_bf16(f[j]);
        }
        p[i] = bf16 ? kern_put(c, b, n[i] * 2) : kern_put(c, f, n[i] * 4);
        free(f);
        free(b);
    }
    k.kv.k = p[0];
    k.kv.v = p[1];
    k.kv.raw = p[2];
    k.kv.pooled = p[3];
    return k;
}

static void prepare(struct kern_ctx *c, int v)
{
    static const struct { uint32_t heads, kvh; unsigned n; struct kern_run runs[4]; bool bf16; } t[] = {
        {4, 2, 1, {{1, 0, 0, -1, 0}}, false},
        {24, 2, 1, {{1, 63, 0, -1, 0}}, true},
        {4, 2, 1, {{13, 2, 0, -1, 0}}, false},
        {4, 2, 1, {{13, 1, 1, -1, 0}}, true},
        {4, 2, 4, {{1, 3, 0, -1, 0}, {-1, 0, 0, -1, 0}, {6, 30, 1, -1, 0}, {1, 7, 2, -1, 0}}, false},
        {2, 1, 1, {{60, 0, 0, -1, 0}}, true},
        {24, 2, 1, {{1, 4095, 0, -1, 0}}, true}, /* timed from here on */
        {24, 2, 1, {{2048, 6144, 0, -1, 0}}, true},
        {24, 2, 4, {{1, 3, 0, -1, 0}, {-1, 0, 0, -1, 0}, {6, 30, 1, -1, 0}, {3, 5, 2, -1, 0}}, true},
    };
    uint32_t nh = t[v].heads, kvh = t[v].kvh, D = 256, ih = 4, id = 128;
    uint32_t width = nh * 2 * D + 2 * kvh * D + (ih + 1) * id;
    struct qx_step *s = kern_step(c, t[v].runs, t[v].n, 100, NULL);
    struct caches k = make_kv(c, 3, v < 6 || v == 8 ? 4 : 512, 16, kvh, D, id, 4, t[v].bf16, false);
    float fr[32];
    for (int i = 0; i < 32; ++i) {
        fr[i] = (float)pow(1e7, -2.0 * i / 64.0);
    }
    struct qx_op_qsa_prepare a = {.step = s, .n_heads = nh, .n_kv_heads = kvh, .head_dim = D, .i_heads = ih, .i_dim = id,
                                  .ratio = 4, .in_stride = width, .eps = 1e-6f, .kv = k.kv};
    a.in = kern_f32(c, (size_t)s->n_rows * width, 1.5f);
    a.q_norm = kern_f32(c, D, 0.3f);
    a.k_norm = kern_f32(c, D, 0.3f);
    a.iq_norm = kern_f32(c, id, 0.3f);
    a.ik_norm = kern_f32(c, id, 0.3f);
    a.rope = (struct qx_rope){.freq = kern_put(c, fr, sizeof fr), .rotary_dim = 64, .scale = v == 2 ? 1.1f : 1.0f};
    a.q = kern_const(c, (size_t)s->n_rows * nh * D, 0.0f);
    a.iq = kern_const(c, (size_t)s->n_rows * ih * id, 0.0f);
    if (t[v].n == 1) {
        kern_out(c, "q", 'f', a.q, (size_t)s->n_rows * nh * D, 0);
        kern_out(c, "iq", 'f', a.iq, (size_t)s->n_rows * ih * id, 0);
    }
    char type = t[v].bf16 ? 'b' : 'f';
    /* a value half way between two bfloat16 may round either way: few do, each by 2^-8 */
    double bound = t[v].bf16 ? 2e-4 : 0.0;
    kern_out(c, "k", type, k.kv.k, k.n_kv, bound);
    kern_out(c, "v", type, k.kv.v, k.n_kv, 1e-30);
    kern_out(c, "raw", type, k.kv.raw, k.n_raw, 1e-30);
    kern_out(c, "pooled", type, k.kv.pooled, k.n_pooled, bound);
    kern_shape(c, "%u rows, heads %u/%u, %s caches", s->n_rows, nh, kvh, t[v].bf16 ? "bf16" : "f32");
    KERN_RUN(c, qsa_prepare, a);
}

static void select_(struct kern_ctx *c, int v)
{
    static const struct { unsigned n; struct kern_run runs[4]; uint32_t budget, seqs, pages; bool bf16, whole, prompt; }
        t[] = {
        {1, {{1, 2, 0, -1, 0}}, 8, 1, 4, false, true},
        {1, {{1, 63, 0, -1, 0}}, 8, 1, 4, false, true},
        {1, {{70, 0, 1, -1, 0}}, 8, 2, 8, true, true},
        {1, {{1, 16000, 0, -1, 0}}, 512, 1, 1024, true, true},
        {1, {{3, 15001, 0, -1, 0}}, 512, 1, 1024, true, false},
        {4, {{1, 99, 0, -1, 0}, {-1, 0, 0, -1, 0}, {6, 30, 1, -1, 0}, {1, 7, 2, -1, 0}}, 8, 3, 8, false, true},
        {1, {{20, 2040, 0, -1, 0}}, 512, 1, 160, true, true},
        {1, {{1, 131071, 0, -1, 0}}, 512, 1, 8192, true, true},
        /* many rows: ties, f32 sums, several sequences in a tile, rows with and without scores */
        {1, {{70, 0, 1, -1, 0}}, 8, 2, 8, true, true, true},
        {1, {{40, 9001, 0, -1, 0}}, 512, 1, 1024, true, true, true},
        {1, {{33, 15001, 0, -1, 0}}, 512, 1, 1024, true, false, true},
        {4, {{20, 99, 0, -1, 0}, {-1, 0, 0, -1, 0}, {60, 30, 1, -1, 0}, {9, 7, 2, -1, 0}}, 8, 3, 16, true, true, true},
        {1, {{20, 2040, 0, -1, 0}}, 512, 1, 160, true, true, true},
        /* few rows: all scores zero but few, one row of several, the longest in registers */
        {1, {{1, 2200, 0, -1, 0}}, 512, 1, 160, true, true},
        {4, {{5, 2990, 0, -1, 0}, {-1, 0, 0, -1, 0}, {1, 40, 1, -1, 0}, {1, 9000, 2, -1, 0}}, 512, 3, 600, true, false},
        {1, {{2, 131069, 0, -1, 0}}, 512, 1, 8192, true, true},
        {1, {{1, 135000, 0, -1, 0}}, 512, 1, 8500, true, false},
        {1, {{1, 4095, 0, -1, 0}}, 512, 1, 256, true, false}, /* timed from here on */
        {1, {{1, 32767, 0, -1, 0}}, 512, 1, 2048, true, false},
        {1, {{1, 131071, 0, -1, 0}}, 512, 1, 8192, true, false},
        {1, {{2048, 6144, 0, -1, 0}}, 512, 1, 512, true, false, true},
        {1, {{512, 130560, 0, -1, 0}}, 512, 1, 8192, true, false, true},
        {4, {{1, 4095, 0, -1, 0}, {1, 4095, 1, -1, 0}, {1, 4095, 2, -1, 0}, {1, 4095, 3, -1, 0}}, 512, 4, 256, true, false},
        {1, {{2, 8000, 0, -1, 0}}, 512, 1, 8192, true, false}, /* few keys, room for many */
    };
    uint32_t ih = 4, id = 128, budget = t[v].budget, page = 16;
    struct qx_step *s = kern_step(c, t[v].runs, t[v].n, 100, NULL);
    struct caches k = make_kv(c, t[v].seqs, t[v].pages, page, 1, 4, id, 4, t[v].bf16, t[v].whole);
    uint32_t n = s->n_rows, cap = t[v].pages * page / 4;
    float *h = malloc((size_t)n * ih * id * 4);
    for (size_t i = 0; i < (size_t)n * ih * id; ++i) {
        h[i] = t[v].whole ? (float)kern_below(c, 3) - 1.0f : kern_normal(c);
        h[i] = t[v].whole && i % id >= 6 ? 0.0f : h[i]; /* few values: many ties */
    }
    float *iq = kern_put(c, h, (size_t)n * ih * id * 4);
    free(h);
    int32_t *block = kern_new(c, (size_t)n * budget * 4), *nb = kern_new(c, n * 4);
    /* entries past n_block are not written; compare what is: all of a row when it is full */
    int32_t *zero = calloc((size_t)n * budget, 4);
    if (c->be->upload(c->q, block, zero, (size_t)n * budget * 4) || c->be->wait(c->q, NULL)) {
        c->rc = -1;
    }
    free(zero);
    kern_out(c, "block", 'i', block, (size_t)n * budget, 0);
    if (t[v].n == 1) {
        kern_out(c, "n_block", 'i', nb, n, 0);
    }
    kern_shape(c, "%u rows to position %d, budget %u%s%s", n, t[v].runs[0].pos0 + t[v].runs[0].len - 1, budget,
               t[v].whole ? ", ties" : "", t[v].prompt ? ", prompt" : "");
    struct qx_op_qsa_select a = {.step = s, .i_heads = ih, .i_dim = id, .ratio = 4, .budget_blocks = budget, .iq = iq,
                                 .kv = k.kv, .max_blocks = cap, .scores = kern_new(c, (size_t)n * cap * 4),
                                 .block = block, .n_block = nb, .prompt = t[v].prompt};
    KERN_RUN(c, qsa_select, a);
}

static void attend(struct kern_ctx *c, int v)
{
    enum { EXACT, PROMPT, FEW };
    static const struct { uint32_t heads, kvh, budget; unsigned n; struct kern_run runs[3]; uint32_t pages; bool bf16; int mode; }
        t[] = {
            {4, 2, 8, 1, {{1, 0, 0, -1, 0}}, 4, false},
            {24, 2, 512, 1, {{1, 2600, 0, -1, 0}}, 200, true},
            {4, 2, 8, 1, {{60, 0, 0, -1, 0}}, 4, false},
            {4, 2, 8, 1, {{64, 0, 0, -1, 0}}, 4, true},
            {24, 2, 512, 1, {{3, 2047, 0, -1, 0}}, 200, true},
            {6, 1, 64, 2, {{1, 299, 0, -1, 0}, {2, 77, 1, -1, 0}}, 20, false},
            {24, 2, 512, 1, {{40, 2500, 0, -1, 0}}, 200, true},
            {12, 1, 512, 1, {{140, 0, 0, -1, 0}}, 20, true},
            /* many rows, queries and probabilities rounded */
            {24, 2, 512, 1, {{40, 2500, 0, -1, 0}}, 200, true, PROMPT},
            {12, 1, 512, 1, {{140, 0, 0, -1, 0}}, 20, true, PROMPT},
            {6, 1, 64, 3, {{30, 299, 0, -1, 0}, {-1, 0, 0, -1, 0}, {40, 77, 1, -1, 0}}, 40, true, PROMPT},
            {32, 2, 8, 1, {{64, 0, 0, -1, 0}}, 4, true, PROMPT},
            {4, 2, 8, 1, {{64, 0, 0, -1, 0}}, 4, false, PROMPT},
            {4, 2, 8, 1, {{1, 0, 0, -1, 0}}, 4, true, FEW},
            {24, 2, 512, 1, {{1, 2600, 0, -1, 0}}, 200, true, FEW},
            {24, 2, 512, 1, {{5, 2047, 0, -1, 0}}, 200, true, FEW},
            {6, 1, 64, 3, {{3, 299, 0, -1, 0}, {-1, 0, 0, -1, 0}, {2, 77, 1, -1, 0}}, 40, true, FEW},
            {32, 2, 8, 1, {{64, 0, 0, -1, 0}}, 4, true, FEW},
            {24, 2, 512, 2, {{20, 2500, 0, -1, 0}, {11, 380, 1, -1, 0}}, 200, true, FEW},
            {24, 2, 512, 1, {{1, 4095, 0, -1, 0}}, 256, true, FEW}, /* timed from here on */
            {24, 2, 512, 3, {{2, 4094, 0, -1, 0}, {1, 4095, 1, -1, 0}, {1, 4095, 1, -1, 0}}, 256, true, FEW},
            {24, 2, 512, 1, {{2048, 6144, 0, -1, 0}}, 512, true, PROMPT},
            {24, 2, 512, 1, {{2048, 0, 0, -1, 0}}, 512, true, PROMPT},
        };
    const bool prompt = t[v].mode == PROMPT, act = t[v].mode != EXACT;
    uint32_t nh = t[v].heads, kvh = t[v].kvh, D = 256, budget = t[v].budget, width = nh * 2 * D + 8;
    struct qx_step *s = kern_step(c, t[v].runs, t[v].n, 100, NULL);
    struct caches k = make_kv(c, 2, t[v].pages, 16, kvh, D, 4, 4, t[v].bf16, false);
    uint32_t n = s->n_rows, r = 0;
    int32_t *block = calloc((size_t)n * budget, 4), *nb = calloc(n, 4);
    for (unsigned i = 0; i < t[v].n; ++i) {
        r += t[v].runs[i].len < 0;
        for (int j = 0; j < t[v].runs[i].len; ++j, ++r) {
            uint32_t all = (uint32_t)(t[v].runs[i].pos0 + j + 1) / 4, take = all < budget ? all : budget, got = 0;
            for (uint32_t b = 0; b < all; ++b) { /* a random ascending choice */
                if (kern_below(c, all - b) < take - got) {
                    block[r * budget + got++] = (int32_t)b;
                }
            }
            nb[r] = (int32_t)take;
        }
    }
    float *o = kern_new(c, (size_t)n * nh * D * 4);
    /* A rounded q moves a score by about 2^-9 of its spread (1 here), so each weight by as much at random; a rounded
     * weight by 2^-9 at most again: 1.3e-3 of a mean of independent values. Three times that is allowed. */
    double bound = act ? 4e-3 : 0.0;
    for (unsigned i = 0, r0 = 0; i < t[v].n; ++i) { /* outputs of idle rows may be anything */
        static char names[3][8];
        uint32_t len = t[v].runs[i].len < 0 ? 1 : (uint32_t)t[v].runs[i].len;
        snprintf(names[i], sizeof names[i], "o%u", i);
        if (t[v].runs[i].len > 0) {
            kern_out(c, names[i], 'f', o + (size_t)r0 * nh * D, (size_t)len * nh * D, bound);
        }
        r0 += len;
    }
    kern_shape(c, "%u rows to position %d, heads %u/%u, budget %u, %s%s", n, t[v].runs[0].pos0 + t[v].runs[0].len - 1, nh,
               kvh, budget, t[v].bf16 ? "bf16" : "f32", prompt ? ", prompt" : act ? ", rounded" : "");
    struct qx_op_qsa_attend a = {.step = s, .n_heads = nh, .n_kv_heads = kvh, .head_dim = D, .ratio = 4,
                                 .budget_blocks = budget, .in_stride = width, .kv = k.kv, .o = o,
                                 .act_bf16 = act, .prompt = prompt};
    a.q = kern_f32(c, (size_t)n * nh * D, 1.0f);
    a.in = kern_f32(c, (size_t)n * width, 1.0f);
    a.block = kern_put(c, block, (size_t)n * budget * 4);
    a.n_block = kern_put(c, nb, n * 4);
    a.scratch = kern_new(c, (size_t)n * nh * (D + 2) * QX_ATTEND_SPLITS * 4);
    free(block);
    free(nb);
    KERN_RUN(c, qsa_attend, a);
    if (!prompt && n > 1 && t[v].runs[0].len > 1) { /* the second row alone */
        struct qx_step one = *s;
        struct qx_op_qsa_attend b = a;
        one.n_rows = 1;
        one.pos += 1;
        one.seq += 1;
        b.step = &one;
        b.q += (size_t)nh * D;
        b.in += width;
        b.block += budget;
        b.n_block += 1;
        b.o = kern_new(c, (size_t)nh * D * 4);
        KERN_SAME(c, qsa_attend, o + (size_t)nh * D, b.o, (size_t)nh * D * 4, b);
    }
}

/* The three ops one after the other, as a step has them, must leave the bits that they leave with a wait between. */
static void chain(struct kern_ctx *c, int v)
{
    static const struct { uint32_t heads, kvh, budget; unsigned n; struct kern_run runs[8]; uint32_t seqs, pages, real; } t[] = {
        {24, 2, 512, 1, {{1, 2600, 0, -1, 0}}, 1, 48, 0},
        {24, 2, 512, 1, {{4, 4101, 0, -1, 0}}, 1, 72, 0},
        {24, 2, 512, 3, {{3, 3001, 0, -1, 0}, {-1, 0, 0, -1, 0}, {2, 77, 1, -1, 0}}, 2, 60, 0},
        {6, 1, 64, 2, {{1, 299, 0, -1, 0}, {7, 1022, 1, -1, 0}}, 2, 20, 0},
        {24, 2, 512, 1, {{2, 34010, 0, -1, 0}}, 1, 540, 40},
        {24, 2, 512, 8, {{1, 3000, 0, -1, 0}, {1, 2999, 1, -1, 0}, {1, 40, 2, -1, 0}, {1, 2047, 3, -1, 0},
                         {1, 2048, 4, -1, 0}, {1, 2051, 5, -1, 0}, {1, 0, 6, -1, 0}, {1, 3003, 7, -1, 0}}, 8, 48, 0},
        {24, 2, 512, 1, {{1, 4095, 0, -1, 0}}, 1, 65, 0}, /* timed from here on */
        {24, 2, 512, 1, {{1, 32767, 0, -1, 0}}, 1, 513, 200},
        {24, 2, 512, 1, {{1, 131071, 0, -1, 0}}, 1, 2049, 200},
        {24, 2, 512, 1, {{4, 4092, 0, -1, 0}}, 1, 65, 0},
        {24, 2, 512, 8, {{1, 4095, 0, -1, 0}, {1, 4095, 1, -1, 0}, {1, 4095, 2, -1, 0}, {1, 4095, 3, -1, 0},
                         {1, 4095, 4, -1, 0}, {1, 4095, 5, -1, 0}, {1, 4095, 6, -1, 0}, {1, 4095, 7, -1, 0}}, 8, 65, 0},
        {24, 2, 512, 2, {{9, 3001, 0, -1, 0}, {3, 1500, 1, -1, 0}}, 2, 60, 0}, /* more than a launch takes */
    };
    uint32_t nh = t[v].heads, kvh = t[v].kvh, D = 256, ih = 4, id = 128, budget = t[v].budget, page = 64;
    uint32_t width = nh * 2 * D + 2 * kvh * D + (ih + 1) * id;
    struct qx_step *s = kern_step(c, t[v].runs, t[v].n, 100, NULL);
    uint32_t n = s->n_rows, pages = t[v].real ? t[v].real : t[v].pages, cap = t[v].pages * page / 4;
    struct caches k = make_kv(c, t[v].seqs, pages, page, kvh, D, id, 4, true, false);
    if (t[v].real) { /* a long context in few pages, the last of which is written */
        int32_t *tab = malloc(t[v].pages * 4);
        for (uint32_t i = 0; i < t[v].pages; ++i) {
            tab[i] = (int32_t)(i + 2 < t[v].pages ? i % (pages - 2) : pages - t[v].pages + i);
        }
        k.kv.page_table = kern_put(c, tab, t[v].pages * 4);
        k.kv.max_pages = t[v].pages;
        free(tab);
    }
    float fr[32];
    for (int i = 0; i < 32; ++i) {
        fr[i] = (float)pow(1e7, -2.0 * i / 64.0);
    }
    struct qx_op_qsa_prepare p = {.step = s, .n_heads = nh, .n_kv_heads = kvh, .head_dim = D, .i_heads = ih, .i_dim = id,
                                  .ratio = 4, .in_stride = width, .eps = 1e-6f, .kv = k.kv};
    p.in = kern_f32(c, (size_t)n * width, 1.5f);
    p.q_norm = kern_f32(c, D, 0.3f);
    p.k_norm = kern_f32(c, D, 0.3f);
    p.iq_norm = kern_f32(c, id, 0.3f);
    p.ik_norm = kern_f32(c, id, 0.3f);
    p.rope = (struct qx_rope){.freq = kern_put(c, fr, sizeof fr), .rotary_dim = 64, .scale = 1.0f};
    size_t on = (size_t)n * nh * D, bn = (size_t)n * budget;
    p.q = kern_const(c, on, 0.0f);
    p.iq = kern_const(c, (size_t)n * ih * id, 0.0f);
    int32_t *zero = calloc(bn, 4), *block[2], *nb[2];
    float *o[2];
    for (int i = 0; i < 2; ++i) {
        block[i] = kern_put(c, zero, bn * 4);
        nb[i] = kern_put(c, zero, n * 4);
        o[i] = kern_const(c, on, 0.0f);
    }
    free(zero);
    kern_out(c, "n_block", 'i', nb[0], n, 0);
    kern_shape(c, "%u rows to position %d, heads %u/%u", n, t[v].runs[0].pos0 + t[v].runs[0].len - 1, nh, kvh);
    struct qx_op_qsa_select e = {.step = s, .i_heads = ih, .i_dim = id, .ratio = 4, .budget_blocks = budget, .iq = p.iq,
                                 .kv = k.kv, .max_blocks = cap, .scores = kern_new(c, (size_t)n * cap * 4)};
    struct qx_op_qsa_attend a = {.step = s, .n_heads = nh, .n_kv_heads = kvh, .head_dim = D, .ratio = 4,
                                 .budget_blocks = budget, .q = p.q, .in = p.in, .in_stride = width, .kv = k.kv,
                                 .act_bf16 = true};
    a.scratch = kern_new(c, (size_t)n * nh * (D + 2) * QX_ATTEND_SPLITS * 4);
    const struct qx_ops *ops = c->be->ops;
    kern_begin(c);
    for (int i = 0; i < (c->repeats ? 1 : 2) && !c->rc; ++i) {
        e.block = block[i];
        e.n_block = nb[i];
        a.block = block[i];
        a.n_block = nb[i];
        a.o = o[i];
        for (unsigned j = 0; j < (c->repeats ? c->repeats : 1) && !c->rc; ++j) {
            c->rc = ops->qsa_prepare(c->q, &p);
            c->rc = c->rc ? c->rc : i == 0 ? 0 : c->be->wait(c->q, &c->err);
            c->rc = c->rc ? c->rc : ops->qsa_select(c->q, &e);
            c->rc = c->rc ? c->rc : i == 0 ? 0 : c->be->wait(c->q, &c->err);
            c->rc = c->rc ? c->rc : ops->qsa_attend(c->q, &a);
        }
    }
    kern_end(c);
    if (!c->repeats) {
        uint32_t r = 0;
        for (unsigned i = 0; i < t[v].n; ++i) {
            uint32_t len = t[v].runs[i].len < 0 ? 1 : (uint32_t)t[v].runs[i].len;
            if (t[v].runs[i].len > 0) {
                kern_same(c, block[0] + (size_t)r * budget, block[1] + (size_t)r * budget, (size_t)len * budget * 4);
                kern_same(c, o[0] + (size_t)r * nh * D, o[1] + (size_t)r * nh * D, (size_t)len * nh * D * 4);
            }
            r += len;
        }
    }
}

#define C(i, ...) {"qsa_attend", "chain", chain, i, __VA_ARGS__}
#define P(i, ...) {"qsa_prepare", "prepare", prepare, i, __VA_ARGS__}
#define S(i, ...) {"qsa_select", "select", select_, i, __VA_ARGS__}
#define A(i, ...) {"qsa_attend", "attend", attend, i, __VA_ARGS__}
const struct kern_case kern_cases_qsa[] = {
    P(0, 0), P(1, 0), P(2, 0), P(3, 0), P(4, 0), P(5, 0), P(6, 1), P(7, 1), P(8, 0),
    S(0, 0), S(1, 0), S(2, 0), S(3, 0), S(4, 0), S(5, 0), S(6, 0), S(7, 0), S(8, 0), S(9, 0), S(10, 0), S(11, 0), S(12, 0),
    S(13, 0), S(14, 0), S(15, 0), S(16, 0), S(17, 1), S(18, 1), S(19, 1), S(20, 1), S(21, 1), S(22, 1), S(23, 0),
    A(0, 0), A(1, 0), A(2, 0), A(3, 0), A(4, 0), A(5, 0), A(6, 0), A(7, 0), A(8, 0), A(9, 0), A(10, 0), A(11, 0), A(12, 0),
    A(13, 0), A(14, 0), A(15, 0), A(16, 0), A(17, 0), A(18, 0), A(19, 1), A(20, 1), A(21, 1), A(22, 1),
    C(0, 0), C(1, 0), C(2, 0), C(3, 0), C(4, 0), C(5, 0), C(6, 1), C(7, 1), C(8, 1), C(9, 1), C(10, 1), C(11, 0),
    {0, 0, 0, 0, 0}};
