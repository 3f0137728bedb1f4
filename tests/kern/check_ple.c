/* check_ple.c: cases of ple_ids and ple. */
#include "kern.h"

#include <string.h>

static const struct { unsigned n; struct kern_run runs[5]; } steps[] = {
    {1, {{1, 0, 0, -1, 3}}},
    {1, {{1, 5, 0, 0, 1}}},
    {1, {{2, 5, 0, 0, 1}}},
    {1, {{3, 5, 0, 0, 2}}},
    {1, {{40, 0, 0, -1, 3}}},
    {5, {{1, 9, 0, 0, 1}, {-1, 0, 0, 0, 0}, {3, 4, 1, 1, 2}, {1, 0, 2, -1, 3}, {12, 5, 3, 3, 1}}},
    {2, {{1100, 0, 0, 0, 1}, {30, 3, 1, 1, 2}}},
};

static void ids(struct kern_ctx *c, int v)
{
    uint32_t slots, heads = 16;
    /* eight ids, one of them the eos: it is in most windows */
    struct qx_step *s = kern_step(c, steps[v].runs, steps[v].n, 8, &slots);
    const uint64_t mult[3] = {23703573157769u, 20109073645365u, 8052911324071u};
    uint64_t size[16], off[16], sum = 0;
    for (int i = 0; i < 16; ++i) {
        size[i] = 20000003u + 20u * (uint64_t)i;
        off[i] = sum;
        sum += size[i];
    }
    int32_t *prev = malloc(slots * 8 + 8);
    for (uint32_t i = 0; i < 2 * slots; ++i) {
        prev[i] = (int32_t)kern_below(c, 8);
    }
    int32_t *st = kern_put(c, prev, slots * 8);
    free(prev);
    int64_t *row = kern_new(c, (size_t)s->n_rows * heads * 8);
    kern_out(c, "row", 'l', row, (size_t)s->n_rows * heads, 0);
    kern_out(c, "prev", 'i', st, 2 * slots, 0);
    kern_shape(c, "%u rows in %u runs", s->n_rows, steps[v].n);
    KERN_RUN(c, ple_ids, {.step = s, .ngram_size = 3, .n_heads = heads, .heads_per_ngram = 8, .eos = 3,
                          .multiplier = kern_put(c, mult, sizeof mult), .size = kern_put(c, size, sizeof size),
                          .offset = kern_put(c, off, sizeof off), .prev = st, .prev_slot_stride = 2, .row = row});
}

static void ple(struct kern_ctx *c, int v)
{
    uint32_t slots, C = 4, H = v == 1 ? 2560 : 72, W = C * H, hist = 9;
    struct qx_step *s = kern_step(c, steps[v].runs, steps[v].n, 8, &slots);
    uint32_t n = s->n_rows;
    struct qx_op_ple a = {.step = s, .n_streams = C, .hidden = H, .conv_kernel = 4, .dilation = 3, .eps = 1e-6f,
                          .conv_slot_stride = (uint64_t)hist * W + 16};
    a.x = kern_f32(c, (size_t)n * W, 2.0f);
    a.key = kern_f32(c, (size_t)n * W, 1.0f);
    a.value = kern_f32(c, (size_t)n * H, 1.0f);
    a.norm_key = kern_f32(c, W, 0.3f);
    a.norm_query = kern_f32(c, W, 0.3f);
    a.norm_conv = kern_f32(c, W, 0.3f);
    a.conv_w = kern_f32(c, (size_t)W * 4, 0.5f);
    a.conv_state = kern_f32(c, slots * a.conv_slot_stride, 1.0f);
    a.scratch = kern_new(c, (size_t)n * 2 * W * 4);
    if (steps[v].n == 1) {
        kern_out(c, "x", 'f', a.x, (size_t)n * W, 0);
    }
    kern_out(c, "conv", 'f', a.conv_state, slots * a.conv_slot_stride, 0);
    kern_shape(c, "%u rows in %u runs, hidden %u", n, steps[v].n, H);
    KERN_RUN(c, ple, a);
}

#define I(i) {"ple_ids", "ids", ids, i, 0}
#define P(i) {"ple", "ple", ple, i, 0}
const struct kern_case kern_cases_ple[] = {I(0), I(1), I(2), I(3), I(4), I(5), I(6), P(0), P(1), P(2), P(3), P(4), P(5),
                                           {0, 0, 0, 0, 0}};
