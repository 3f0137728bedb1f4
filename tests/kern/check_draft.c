/* check_draft.c: cases of draft_in, draft_keep, draft_next, draft_accept, head_copy and head_best. */
#include "kern.h"

#include <math.h>

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

/* v: shape + 8 * kind of weights */
static void copy(struct kern_ctx *c, int v)
{
    static const uint32_t sh[][2] = {{100, 2560}, {33, 32}, {7, 96}, {65, 320}, {2, 520}};
    uint32_t rows = sh[v % 8][0], cols = sh[v % 8][1];
    size_t n = QX_HEAD_COPY_BYTES(rows, cols);
    uint8_t *codes = kern_new(c, n);
    float *off = kern_new(c, rows * 4);
    kern_out(c, "codes", 'h', codes, n / 2, 0);
    kern_out(c, "off", 'f', off, rows, 1e-5);
    kern_shape(c, "[%u, %u] kind %d", rows, cols, v / 8);
    KERN_RUN(c, head_copy, {.from = kern_weight(c, QX_W_BF16, rows, cols, v / 8), .codes = codes, .off = off});
}

static size_t best_scratch(uint32_t n, uint32_t rows)
{
    return (size_t)n * (rows / 8 + 16 < 1280 ? rows / 8 + 16 : 1280) * 4;
}

/* v: shape + 8 * kind of weights; 64: the last row of input has a NaN; 128: as sampling */
static void best(struct kern_ctx *c, int v)
{
    static const uint32_t sh[][3] = {{1, 512, 64}, {3, 5000, 2560}, {1, 40000, 512}, {2, 70000, 32},
                                     {5, 1, 96}, {1, 248320, 160}, {19, 3000, 328}, {8, 700, 6144}};
    uint32_t n = sh[v % 8][0], rows = sh[v % 8][1], cols = sh[v % 8][2];
    bool sampled = v & 128;
    struct qx_weight w = kern_weight(c, QX_W_BF16, rows, cols, v / 8 % 8);
    float *x = kern_f32(c, (size_t)n * cols, 1.0f), *off = kern_new(c, rows * 4);
    float *l = kern_new(c, (size_t)n * rows * 4), *scratch = kern_new(c, best_scratch(n, rows));
    uint8_t *codes = kern_new(c, QX_HEAD_COPY_BYTES(rows, cols));
    const float nan = NAN;
    if (c->as == 120) {
        return; /* not for such */
    }
    c->rc = v & 64 ? c->be->upload(c->q, x + (size_t)n * cols - 7, &nan, 4) || c->be->wait(c->q, NULL) : 0;
    int32_t *id = kern_new(c, n * 4), *told = sampled ? kern_new(c, n * 4) : NULL, n_differ = 0;
    float *val = sampled ? NULL : kern_new(c, n * 4), *prob = sampled ? NULL : kern_new(c, n * 4);
    kern_out(c, "id", 'i', id, n, 0);
    if (sampled) {
        kern_out(c, "told", 'i', told, n, 0);
    } else {
        kern_out(c, "value", 'f', val, n, 3e-6);
        kern_out(c, "prob", 'f', prob, n, v / 8 % 8 == 1 || rows == 1 ? 0.5 : 0.02); /* logits far apart, or one */
    }
    kern_shape(c, "%u x [%u, %u] kind %d%s%s", n, rows, cols, v / 8 % 8, v & 64 ? ", NaN" : "",
               sampled ? ", sampled" : "");
    const struct qx_op_head_copy cp = {.from = w, .codes = codes, .off = off};
    c->rc = c->rc ? c->rc : c->be->ops->head_copy(c->q, &cp) || c->be->wait(c->q, NULL);
    if (c->rc) {
        return;
    }
    KERN_RUN(c, head_best, {.n_rows = n, .head = w, .codes = codes, .off = off, .x = x, .near = l, .id = id,
                            .value = val, .prob = prob, .finite = sampled, .told = told, .scratch = scratch});
    const struct qx_op_linear ln = {.act_bf16 = true, .n_rows = n, .n_weights = 1, .x = x, .x_stride = cols,
                                    .y_stride = rows, .w = {w}, .y = l};
    c->rc = c->rc ? c->rc : c->be->ops->linear(c->q, &ln);
    if (c->rc || c->repeats || sampled) {
        return;
    }
    int32_t ids[19];
    uint32_t got[19], want;
    kern_fetch(c, ids, id, n * 4);
    kern_fetch(c, got, val, n * 4);
    for (uint32_t i = 0; i < n; ++i) {
        kern_fetch(c, &want, l + (size_t)i * rows + ids[i], 4);
        n_differ += got[i] != want && !(v & 64) && v / 8 % 8 != 3;
    }
    kern_out(c, "values that are not linear's", 'i', kern_put(c, &n_differ, 4), 1, 0);
}

static int best_again(struct kern_ctx *c, unsigned i, void *user)
{
    (void)i;
    return c->be->ops->head_best(c->q, user);
}

static void head_speed(struct kern_ctx *c, int n_rows)
{
    uint32_t n = (uint32_t)n_rows, rows = 248320, cols = 2560;
    struct qx_weight w = kern_large_weight(c, QX_W_BF16, rows, cols);
    size_t bytes = QX_HEAD_COPY_BYTES(rows, cols);
    uint8_t *codes = kern_new(c, bytes);
    float *off = kern_new(c, rows * 4);
    const struct qx_op_head_copy cp = {.from = w, .codes = codes, .off = off};
    c->rc = c->be->ops->head_copy(c->q, &cp) || c->be->wait(c->q, NULL);
    struct qx_op_head_best a = {.n_rows = n, .head = w, .codes = codes, .off = off,
                                .x = kern_f32(c, (size_t)n * cols, 1.0f), .near = kern_new(c, (size_t)n * rows * 4), .id = kern_new(c, n * 4),
                                .finite = true, .scratch = kern_new(c, best_scratch(n, rows))};
    c->bytes = bytes;
    kern_shape(c, "the released head, %u rows", n);
    kern_chain(c, best_again, &a);
}

/* v: rows - 1 + 16 * drafts that stand + 256 * forced + 4096 * idle rows at the end */
static void accept(struct kern_ctx *c, int v)
{
    uint32_t n = (uint32_t)(v & 15) + 1, stand = (uint32_t)(v >> 4 & 15), idle = (uint32_t)(v >> 12);
    struct kern_run runs[16] = {{(int)(n - idle), 9, 2, 0, 2}};
    for (uint32_t i = 0; i < idle; ++i) {
        runs[1 + i] = (struct kern_run){-1, 0, 2, -1, 0};
    }
    struct qx_step *s = kern_step(c, runs, 1 + idle, 50, NULL);
    struct qx_step *f = kern_step(c, (struct kern_run[]){{(int)n, 3, 1, 0, 1}}, 1, 50, NULL);
    int32_t ids[17], forced = v >> 8 & 15;
    kern_fetch(c, ids, s->id, n * 4);
    for (uint32_t i = 0; i + 1 < n; ++i) {
        ids[i] = i < stand ? ids[i + 1] : ids[i + 1] + 1;
    }
    ids[n - 1] = 7;
    int32_t *src = kern_new(c, n * 4), *pick = kern_new(c, 4);
    int32_t *const out[7] = {f->id, f->pos, f->seq, f->first, f->state_in, f->state_out, src};
    static const char *const names[7] = {"id", "pos", "seq", "first", "state_in", "state_out", "src"};
    for (int i = 0; i < 7; ++i) {
        kern_out(c, names[i], 'i', out[i], n, 0);
    }
    kern_out(c, "pick", 'i', pick, 1, 0);
    kern_shape(c, "%u rows, %u idle, %u drafts stand, %d forced", n, idle, stand, forced);
    KERN_RUN(c, draft_accept, {.step = s, .feed = f, .n = n, .id = kern_put(c, ids, n * 4),
                               .forced = kern_put(c, &forced, 4), .src = src, .pick = pick});
}

#define A(i) {"draft_accept", "draft_accept", accept, i, 0}
#define C(i) {"head_copy", "head_copy", copy, i, 0}
#define B(i) {"head_best", "head_best", best, i, 0}
#define N(i) {"draft_next", "draft_next", next, i, 0}
#define I(i) {"draft_in", "draft_in", in, i, 0}
const struct kern_case kern_cases_draft[] = {
    A(0), A(1), A(1 + 16), A(3), A(3 + 16), A(3 + 48), A(8 + 64), A(8 + 128), A(3 + 256), A(3 + 16 + 512),
    A(8 + 48 + 256), A(3 + 48 + 4096), A(3 + 32 + 8192), A(4 + 256 + 4 * 4096), A(4 + 3 * 256 + 2 * 4096),
    C(0), C(1), C(2), C(3), C(4), C(8), C(24), C(25),
    B(0), B(1), B(2), B(3), B(4), B(5), B(6), B(7), B(8), B(9), B(24), B(26), B(64), B(65), B(128), B(129), B(135),
    B(128 + 24), B(128 + 64), B(128 + 65),
    {"head_best", "head_best", head_speed, 1, 1}, {"head_best", "head_best", head_speed, 4, 1},
    {"head_best", "head_best", head_speed, 8, 1},
    I(0), I(1), I(2), I(3), I(4),
    {"draft_keep", "draft_keep", keep, 0, 0}, {"draft_keep", "draft_keep", keep, 1, 0},
    N(0), N(1), N(2), N(3), N(4), N(5), {0, 0, 0, 0, 0}};
