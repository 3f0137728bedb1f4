/* check_gdn.c: cases of gdn: runs of every length class, in place and to own slots, idle rows, batches. */
#include "kern.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The same rows among sixteen, the others idle, from the same states: must leave the same bits. */
static void among_more(struct kern_ctx *c, const struct qx_op_gdn *a, const struct kern_run *runs, unsigned n,
                       uint32_t slots, float *conv, float *s)
{
    struct kern_run more[22];
    unsigned m = n;
    memcpy(more, runs, n * sizeof *runs);
    for (uint32_t r = a->step->n_rows; r < 16; ++r) {
        more[m++] = (struct kern_run){-1, 0, 0, -1, 0};
    }
    struct qx_op_gdn b = *a;
    b.step = kern_step(c, more, m, 100, NULL);
    float *in = malloc((size_t)16 * a->in_stride * 4);
    if (!in) {
        abort();
    }
    memset(in, 0, (size_t)16 * a->in_stride * 4);
    kern_fetch(c, in, a->in, (size_t)a->step->n_rows * a->in_stride * 4);
    b.in = kern_put(c, in, (size_t)16 * a->in_stride * 4);
    free(in);
    b.conv_state = conv;
    b.s = s;
    b.out = kern_new(c, (size_t)16 * a->v_heads * 128 * 4);
    b.scratch = kern_new(c, (size_t)16 * (a->in_stride + 2) * 4);
    size_t row = (size_t)a->v_heads * 128, r = 0;
    for (unsigned i = 0; i < n; ++i) {
        size_t len = runs[i].len < 0 ? 1 : (size_t)runs[i].len;
        if (runs[i].len > 0) {
            if (i == 0 || r == 0) {
                KERN_SAME(c, gdn, a->out + r * row, b.out + r * row, len * row * 4, b);
            } else {
                kern_same(c, a->out + r * row, b.out + r * row, len * row * 4);
            }
        }
        r += len;
    }
    kern_same(c, a->s, b.s, slots * a->s_slot_stride * 4);
    kern_same(c, a->conv_state, b.conv_state, slots * a->conv_slot_stride * 4);
}

static float *copy_of(struct kern_ctx *c, const float *p, size_t n)
{
    float *h = malloc(n * 4);
    if (!h) {
        abort();
    }
    kern_fetch(c, h, p, n * 4);
    float *d = kern_put(c, h, n * 4);
    free(h);
    return d;
}

static void gdn(struct kern_ctx *c, int v)
{
    static const struct { uint32_t kh, vh; unsigned n; struct kern_run runs[8]; bool prompt; uint32_t taps; } t[] = {
        {2, 4, 1, {{1, 0, 0, -1, 3}}},
        {1, 3, 1, {{1, 9, 0, 0, 1}}},
        {16, 48, 1, {{1, 9, 0, 0, 1}}},
        {2, 6, 1, {{2, 9, 0, 0, 1}}},
        {2, 4, 1, {{5, 9, 0, 0, 2}}},
        {2, 4, 1, {{70, 0, 0, -1, 3}}},
        {1, 3, 1, {{33, 3, 0, 0, 1}}},
        {2, 4, 6, {{1, 9, 0, 0, 1}, {-1, 0, 0, 0, 0}, {3, 4, 1, 1, 2}, {1, 0, 2, -1, 3}, {9, 0, 3, 3, 1}, {1, 5, 4, 4, 1}}},
        {1, 2, 2, {{300, 0, 0, -1, 3}, {280, 0, 1, -1, 2}}},
        {2, 2, 3, {{1, 1, 0, 0, 1}, {1, 1, 1, 1, 1}, {1, 1, 2, 2, 1}}},
        {1, 4, 1, {{17, 0, 0, -1, 2}}},
        {16, 48, 1, {{130, 0, 0, 0, 1}}},
        /* long runs in chunks: whole and broken ones, in place, every state kept, short runs and idle rows between */
        {2, 4, 1, {{300, 0, 0, -1, 3}}, true},
        {1, 2, 2, {{320, 0, 0, -1, 3}, {281, 7, 1, 1, 1}}, true},
        {2, 6, 6, {{1, 9, 0, 0, 1}, {-1, 0, 0, 0, 0}, {33, 9, 3, 3, 1}, {3, 4, 1, 1, 2}, {70, 0, 2, -1, 0}, {32, 5, 4, 4, 1}},
         true},
        {2, 4, 1, {{37, 9, 0, 0, 2}}, true},
        {1, 4, 1, {{65, 9, 0, 0, 1}}, true},
        {16, 48, 1, {{130, 0, 0, 0, 1}}, true},
        {2, 2, 1, {{2100, 0, 0, 0, 1}}, true},
        {2, 2, 1, {{130, 9, 0, 0, 2}}, true}, /* more pieces than are planned for: recurrent */
        {2, 6, 3, {{3, 9, 0, 0, 2}, {1, 9, 1, 1, 3}, {12, 0, 2, -1, 3}}},
        {16, 48, 1, {{8192, 0, 0, -1, 3}}, true}, /* timed */
        {16, 48, 1, {{1, 9, 0, 0, 1}}},
        {16, 48, 4, {{1, 9, 0, 0, 1}, {1, 9, 1, 1, 1}, {1, 9, 2, 2, 1}, {1, 9, 3, 3, 1}}},
        {16, 48, 1, {{4, 9, 0, 0, 2}}},
        {16, 48, 1, {{2, 9, 0, 0, 2}}},
        {16, 48, 2, {{1, 9, 0, 0, 1}, {1, 9, 1, 1, 1}}},
        {16, 48, 8, {{1, 9, 0, 0, 1}, {1, 9, 1, 1, 1}, {1, 9, 2, 2, 1}, {1, 9, 3, 3, 1},
                     {1, 9, 4, 4, 1}, {1, 9, 5, 5, 1}, {1, 9, 6, 6, 1}, {1, 9, 7, 7, 1}}},
        /* up to eight rows: in place, to own slots, without a state, more heads than multiprocessors, odd groups */
        {16, 48, 8, {{1, 9, 0, 0, 1}, {1, 9, 1, 1, 1}, {1, 9, 2, 2, 3}, {1, 9, 3, 3, 1},
                     {1, 9, 4, -1, 1}, {1, 9, 5, 5, 1}, {-1, 0, 0, 0, 0}, {1, 9, 6, 6, 1}}},
        {16, 48, 2, {{4, 9, 0, 0, 2}, {4, 0, 1, -1, 2}}},
        {3, 3, 3, {{2, 9, 0, 0, 1}, {5, 9, 1, 1, 1}, {1, 0, 2, -1, 3}}},
        {5, 20, 3, {{3, 9, 0, 0, 1}, {-1, 0, 0, 0, 0}, {4, 9, 1, 1, 1}}},
        {16, 48, 1, {{8, 9, 0, 0, 2}}},
        /* other numbers of taps; runs that begin in the first rows and end behind the 32nd; more rows times key heads
         * than there are tickets; runs of one row whose heads fill several batches */
        {2, 6, 4, {{1, 9, 0, 0, 1}, {7, 9, 1, 1, 1}, {2, 0, 2, -1, 3}, {9, 9, 3, 3, 2}}, .taps = 6},
        {1, 3, 3, {{1, 9, 0, 0, 1}, {3, 9, 1, 1, 1}, {2, 0, 2, -1, 3}}, .taps = 3},
        {2, 2, 2, {{5, 9, 0, 0, 1}, {1, 9, 1, 1, 1}}, .taps = 1},
        {2, 4, 5, {{30, 9, 0, 0, 1}, {5, 9, 1, 1, 1}, {1, 9, 2, 2, 1}, {33, 9, 3, 3, 3}, {1, 9, 4, 4, 1}}},
        {64, 64, 3, {{150, 9, 0, 0, 1}, {106, 9, 1, 1, 3}, {1, 9, 2, 2, 1}}},
        {16, 48, 6, {{1, 9, 0, 0, 1}, {1, 9, 1, 1, 1}, {1, 9, 2, 2, 1}, {1, 9, 3, 3, 1}, {1, 9, 4, 4, 1}, {1, 9, 5, 5, 1}}},
        {16, 48, 5, {{1, 9, 0, 0, 1}, {1, 9, 1, 1, 1}, {1, 9, 2, 2, 1}, {1, 9, 3, 3, 1}, {4, 9, 4, 4, 2}}},
    };
    enum { LAYERS = 8 };
    uint32_t taps = t[v].taps ? t[v].taps : 4;
    uint32_t kh = t[v].kh, vh = t[v].vh, ch = 2 * kh * 128 + vh * 128, width = ch + vh * 128 + 2 * vh, slots;
    struct qx_step *s = kern_step(c, t[v].runs, t[v].n, 100, &slots);
    uint32_t n = s->n_rows;
    struct qx_op_gdn a = {.step = s, .k_heads = kh, .v_heads = vh, .k_dim = 128, .v_dim = 128, .conv_kernel = taps,
                          .in_stride = width, .eps = 1e-6f, .chunk = 0, .prompt = t[v].prompt};
    a.in = kern_f32(c, (size_t)n * width, 1.0f);
    a.conv_w = kern_f32(c, (size_t)ch * taps, 0.5f);
    a.a_log = kern_f32(c, vh, 0.5f);
    a.dt_bias = kern_f32(c, vh, 1.0f);
    a.norm = kern_f32(c, 128, 1.0f);
    a.conv_slot_stride = (uint64_t)(taps - 1) * ch + 8;
    a.s_slot_stride = (uint64_t)vh * 128 * 128 + 4;
    a.conv_state = kern_f32(c, slots * a.conv_slot_stride, 1.0f);
    a.s = kern_f32(c, slots * a.s_slot_stride, 0.3f);
    a.out = kern_const(c, (size_t)n * vh * 128, 0.0f);
    a.scratch = kern_new(c, (size_t)n * (ch + 2 * vh) * 4);
    /* rows of idle runs hold whatever: compare per run only where rows are not idle */
    uint32_t r = 0;
    static char names[8][8];
    for (unsigned i = 0; i < t[v].n; ++i) {
        int len = t[v].runs[i].len;
        snprintf(names[i], sizeof names[i], "out%u", i);
        if (len > 0) {
            kern_out(c, names[i], 'f', a.out + (size_t)r * vh * 128, (size_t)len * vh * 128, 0);
        }
        r += (uint32_t)(len < 0 ? 1 : len);
    }
    kern_out(c, "conv", 'f', a.conv_state, slots * a.conv_slot_stride, 1e-30);
    kern_out(c, "s", 'f', a.s, slots * a.s_slot_stride, 0);
    kern_shape(c, "%u rows in %u runs, heads %u/%u%s", n, t[v].n, kh, vh, t[v].prompt ? ", prompt" : "");
    c->bytes = (uint64_t)n * (width + vh * 128) * 4 + 2ull * t[v].n * vh * 128 * 128 * 4;
    if (c->repeats && n <= 8) { /* timed as a step has them, layer after layer */
        struct qx_op_gdn l[LAYERS];
        for (int i = 0; i < LAYERS; ++i) {
            l[i] = a;
            if (i) {
                l[i].conv_state = kern_f32(c, slots * a.conv_slot_stride, 1.0f);
                l[i].s = kern_f32(c, slots * a.s_slot_stride, 0.3f);
            }
        }
        kern_begin(c);
        for (unsigned i = 0; i < c->repeats && !c->rc; ++i) {
            c->rc = c->be->ops->gdn(c->q, &l[i % LAYERS]);
        }
        kern_end(c);
        return;
    }
    const bool check = !c->repeats && !t[v].prompt && n <= 8;
    float *conv = check ? copy_of(c, a.conv_state, slots * a.conv_slot_stride) : NULL;
    float *state = check ? copy_of(c, a.s, slots * a.s_slot_stride) : NULL;
    KERN_RUN(c, gdn, a);
    if (check) {
        among_more(c, &a, t[v].runs, t[v].n, slots, conv, state);
    }
    const struct kern_run *first = &t[v].runs[0];
    if (!t[v].prompt && (t[v].n > 1 || first->len > 1) && first->len > 0 && first->out != 1) {
        /* the first run alone: its rows, then without its last */
        struct qx_step one = *s;
        one.n_rows = (uint32_t)(t[v].n > 1 ? first->len : first->len - 1);
        struct qx_op_gdn b = a;
        b.step = &one;
        b.out = kern_new(c, (size_t)one.n_rows * vh * 128 * 4);
        KERN_SAME(c, gdn, a.out, b.out, (size_t)one.n_rows * vh * 128 * 4, b);
    }
}

/* A product whose gate's part comes late, and the recurrence behind it: the bits of one after the other. Twice, since the
 * count between them has to be made ready again. */
static void late(struct kern_ctx *c, int v)
{
    static const struct { uint32_t kh, vh, rows, k; uint8_t fmt, rest; bool precise; } t[] = {
        {2, 4, 1, 256, QX_W_BF16, QX_W_BF16}, {16, 48, 1, 512, QX_W_BF16, QX_W_BF16}, {16, 48, 4, 512, QX_W_BF16, QX_W_BF16},
        {2, 6, 8, 512, QX_W_BF16, QX_W_BF16}, {16, 48, 1, 512, QX_W_MXFP8, QX_W_MXFP8}, {2, 4, 3, 512, QX_W_MXFP8, QX_W_BF16},
        {2, 4, 2, 512, QX_W_BF16, QX_W_MXFP8}, {2, 4, 9, 512, QX_W_BF16, QX_W_BF16}, {1, 3, 1, 512, QX_W_NVFP4, QX_W_NVFP4},
        {2, 4, 1, 256, QX_W_BF16, QX_W_BF16, true}, {1, 1, 1, 512, QX_W_FP8, QX_W_FP8},
    };
    uint32_t kh = t[v].kh, vh = t[v].vh, n = t[v].rows, ch = (2 * kh + vh) * 128, width = ch + vh * 128 + 2 * vh, slots;
    struct kern_run runs[9];
    for (uint32_t i = 0; i < n; ++i) {
        runs[i] = (struct kern_run){1, 9, (int)i, (int)i, 1};
    }
    struct qx_step *s = kern_step(c, runs, n, 100, &slots);
    struct qx_op_linear l = {.n_rows = n, .n_weights = 4, .x_stride = t[v].k, .y_stride = width, .act_bf16 = !t[v].precise};
    const uint32_t rows[4] = {ch, vh * 128, vh, vh};
    for (unsigned i = 0; i < 4; ++i) {
        l.w[i] = kern_weight(c, i < 2 ? t[v].fmt : t[v].rest, rows[i], t[v].k, 0);
    }
    l.x = kern_f32(c, (size_t)n * t[v].k, 1.0f);
    l.y = kern_new(c, (size_t)n * width * 4);
    struct qx_op_gdn a = {.step = s, .k_heads = kh, .v_heads = vh, .k_dim = 128, .v_dim = 128, .conv_kernel = 4,
                          .in = l.y, .in_stride = width, .eps = 1e-6f};
    a.conv_w = kern_f32(c, (size_t)ch * 4, 0.5f);
    a.a_log = kern_f32(c, vh, 0.5f);
    a.dt_bias = kern_f32(c, vh, 1.0f);
    a.norm = kern_f32(c, 128, 1.0f);
    a.conv_slot_stride = (uint64_t)3 * ch;
    a.s_slot_stride = (uint64_t)vh * 128 * 128;
    a.scratch = kern_new(c, (size_t)n * (ch + 2 * vh) * 4);
    struct { float *y, *out, *conv, *s; } r[2];
    r[0].conv = kern_f32(c, slots * a.conv_slot_stride, 1.0f);
    r[0].s = kern_f32(c, slots * a.s_slot_stride, 0.3f);
    r[1].conv = copy_of(c, r[0].conv, slots * a.conv_slot_stride);
    r[1].s = copy_of(c, r[0].s, slots * a.s_slot_stride);
    for (unsigned i = 0; i < 2; ++i) {
        r[i].y = i ? kern_new(c, (size_t)n * width * 4) : l.y;
        r[i].out = kern_new(c, (size_t)n * vh * 128 * 4);
    }
    kern_out(c, "y", 'f', l.y, (size_t)n * width, 0);
    kern_shape(c, "%u rows, heads %u/%u, %s, the rest %s%s", n, kh, vh, kern_fmt_name(t[v].fmt), kern_fmt_name(t[v].rest),
               t[v].precise ? ", precise" : "");
    KERN_RUN(c, linear, l);
    for (unsigned round = 0; round < 4 && !c->rc && !c->repeats; ++round) {
        const unsigned i = round & 1;
        l.y = r[i].y;
        l.late = i ? 1u << 1 : 0;
        a.in = l.y;
        a.out = r[i].out;
        a.conv_state = r[i].conv;
        a.s = r[i].s;
        c->rc = c->be->ops->linear(c->q, &l);
        c->rc = c->rc ? c->rc : c->be->ops->gdn(c->q, &a);
        if (i && !c->rc) {
            kern_same(c, r[0].y, r[1].y, (size_t)n * width * 4);
            kern_same(c, r[0].out, r[1].out, (size_t)n * vh * 128 * 4);
            kern_same(c, r[0].conv, r[1].conv, slots * a.conv_slot_stride * 4);
            kern_same(c, r[0].s, r[1].s, slots * a.s_slot_stride * 4);
        }
    }
}

#define G(i) {"gdn", "gdn", gdn, i, false}
#define B(i) {"gdn", "gdn", gdn, i, true}
#define L(i) {"linear", "late", late, i, false}
const struct kern_case kern_cases_gdn[] = {G(0), G(1), G(2), G(3), G(4), G(5), G(6), G(7), G(8), G(9), G(10), G(11),
                                           G(12), G(13), G(14), G(15), G(16), G(17), G(18), G(19), G(20),
                                           B(21), B(22), B(23), B(24), B(25), B(26), B(27),
                                           G(28), G(29), G(30), G(31), G(32), G(33), G(34), G(35), G(36), G(37), G(38),
                                           G(39), L(0), L(1), L(2), L(3), L(4), L(5), L(6), L(7), L(8), L(9), L(10),
                                           {0, 0, 0, 0, 0}};
