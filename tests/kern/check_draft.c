/* check_draft.c: cases of draft_in, draft_keep and draft_next. */
#include "kern.h"

static void in(struct kern_ctx *c, int v)
{
    static const struct { uint8_t fmt; uint32_t hidden, width; } sh[] = {
        {QX_W_BF16, 2560, 10240}, {QX_W_FP8, 32, 128}, {QX_W_BF16, 1, 5}, {QX_W_F32, 11000, 22000}, {QX_W_BF16, 96, 384}};
    uint32_t h = sh[v].hidden, n = sh[v].width;
    struct qx_step *s = kern_step(c, (struct kern_run[]){{4, 3, 2, -1, 0}, {2, 8, 4, -1, 0}}, 2,
                                  140, NULL); /* some ids are past the table: NaN rows */
    const int32_t from[6] = {2, -1, 0, -1, 4, 4}, held[6] = {1, 3, -1, -1, 0, 2};
    float *e = kern_new(c, (size_t)6 * h * 4), *y = kern_new(c, (size_t)6 * n * 4);
    kern_out(c, "e", 'f', e, (size_t)6 * h, 0);
    kern_out(c, "y", 'f', y, (size_t)6 * n, 0);
    kern_shape(c, "6 rows of %u, %u", h, n);
    /* the last takes its rows as they come */
    KERN_RUN(c, draft_in, {.step = s, .table = kern_weight(c, sh[v].fmt, 100, h, 0), .width = n,
                           .wide = {kern_f32(c, 6 * n, v == 2 ? 1e-4f : 3.0f), v < 4 ? kern_f32(c, 4 * n, 1.0f) : NULL},
                           .row = {v < 4 ? kern_put(c, from, sizeof from) : NULL,
                                   v < 4 ? kern_put(c, held, sizeof held) : NULL},
                           .norm_e = kern_f32(c, h, 0.3f), .norm_wide = kern_f32(c, n, 0.3f), .eps = 1e-6f, .e = e,
                           .y = y});
}

static void keep(struct kern_ctx *c, int v)
{
    struct qx_step *s = kern_step(c, (struct kern_run[]){{3, 3, 2, -1, 0}, {1, 9, 0, -1, 0}, {2, 8, 4, -1, 0}},
                                  3, 50, NULL);
    const int32_t row[3] = {2, 3, 5}, id[3] = {7, 0, 3}, map[8] = {90, 91, 92, 3, 4, 95, 96, 7777};
    const float prob[3] = {0.5f, 0.25f, 1.0f};
    uint32_t width = v ? 300 : 64, n = v ? 3 : 2;
    float *hold = kern_f32(c, 5 * width, 1.0f), *p = kern_f32(c, 5, 1.0f);
    int32_t *next = kern_new(c, 20);
    kern_out(c, "hold", 'f', hold, 5 * width, 0);
    kern_out(c, "next_id", 'i', next, 5, 0);
    kern_out(c, "next_prob", 'f', p, 5, 0);
    kern_shape(c, "%u of 6 rows x %u", n, width);
    KERN_RUN(c, draft_keep, {.step = s, .n = n, .width = width, .row = kern_put(c, row, sizeof row),
                             .wide = kern_f32(c, 6 * width, 1.0f), .id = kern_put(c, id, sizeof id),
                             .prob = kern_put(c, prob, sizeof prob),
                             .map = v ? kern_put(c, map, sizeof map) : NULL, .hold = hold, .next_id = next,
                             .next_prob = p});
}

/* Four lines of 3, 1, 2 and 4 drafts: one that goes on, one that is done, one below its limit, one that had
 * ended before. */
static void next(struct kern_ctx *c, int v)
{
    struct qx_step *s = kern_step(c, (struct kern_run[]){{4, 3, 2, 0, 2}, {2, 9, 0, 1, 2}, {3, 8, 1, 2, 2},
                                                         {5, 20, 3, 3, 2}}, 4, 50, NULL);
    struct qx_step *ch = kern_step(c, (struct kern_run[]){{1, 3, 2, -1, 0}, {1, 9, 0, -1, 0}, {1, 8, 1, -1, 0},
                                                          {-1, 0, 3, -1, 0}}, 4, 50, NULL);
    const int32_t base[4] = {0, 4, 6, 9}, count[4] = {3, 1, 2, 4}, id[4] = {7, 0, 3, 5};
    const int32_t map[8] = {90, 91, 92, 3, 4, 95, 96, 7777};
    const float prob[4] = {0.5f, 0.25f, 0.1f, 0.9f}, least[4] = {0.0f, 0.0f, v & 1 ? 0.3f : 0.0f, 0.0f};
    const struct qx_step *both[2] = {ch, s};
    for (int i = 0; i < 2; ++i) {
        uint32_t n = both[i]->n_rows;
        kern_out(c, i ? "id" : "chain id", 'i', both[i]->id, n, 0);
        kern_out(c, i ? "pos" : "chain pos", 'i', both[i]->pos, n, 0);
        kern_out(c, i ? "first" : "chain first", 'i', both[i]->first, n, 0);
        kern_out(c, i ? "state_out" : "chain state_out", 'i', both[i]->state_out, n, 0);
    }
    const int32_t untold[28] = {9, 8, 7, 6, 5};
    int32_t *told = kern_put(c, untold, sizeof untold); /* not all of it is written */
    kern_out(c, "told", 'i', told, 28, 0);
    kern_shape(c, "draft %d of 4 lines", 1 + v / 2);
    KERN_RUN(c, draft_next, {.chain = ch, .step = s, .n = 4, .nth = 1 + (uint32_t)v / 2,
                             .base = kern_put(c, base, sizeof base), .count = kern_put(c, count, sizeof count),
                             .min_prob = kern_put(c, least, sizeof least), .id = kern_put(c, id, sizeof id),
                             .prob = kern_put(c, prob, sizeof prob),
                             .map = v & 2 ? kern_put(c, map, sizeof map) : NULL, .by_seq = v < 2,
                             .told_id = v < 4 ? told : NULL, .told_pos = v < 4 ? told + 14 : NULL});
}

#define N(i) {"draft_next", "draft_next", next, i, 0}
#define I(i) {"draft_in", "draft_in", in, i, 0}
const struct kern_case kern_cases_draft[] = {
    I(0), I(1), I(2), I(3), I(4),
    {"draft_keep", "draft_keep", keep, 0, 0}, {"draft_keep", "draft_keep", keep, 1, 0},
    N(0), N(1), N(2), N(3), N(4), N(5), {0, 0, 0, 0, 0}};
