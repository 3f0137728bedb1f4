/* check_moe.c: the router and the experts one behind the other, as a layer of the model calls them. */
#include "kern.h"

#include <math.h>
#include <string.h>

/* of a shared expert of MXFP8 (check_matmul.c) */
#define BOUND_MXFP8 1e-3
#define DISTINCT 24u

enum { RANDOM, TIES, SAME_ROWS, N_MODES };

/* Gate, up and down of E experts, the same ones again after every DISTINCT. */
static void experts(struct kern_ctx *c, struct qx_op_moe *a, uint8_t fmt, uint32_t E, uint32_t H, uint32_t I)
{
    uint32_t n = E < DISTINCT ? E : DISTINCT;
    struct qx_weight all[3] = {kern_weight(c, fmt, n * I, H, 0), kern_weight(c, fmt, n * I, H, 0),
                               kern_weight(c, fmt, n * H, I, 0)};
    struct qx_weight *w = malloc(3 * (size_t)E * sizeof *w);
    for (uint32_t e = 0; e < E; ++e) {
        w[e] = kern_weight_rows(&all[0], e % n * I, I);
        w[E + e] = kern_weight_rows(&all[1], e % n * I, I);
        w[2 * E + e] = kern_weight_rows(&all[2], e % n * H, H);
        w[e].global *= 1.0f + (float)(e % 7) / 8.0f;
    }
    const struct qx_weight *dev = kern_put(c, w, 3 * (size_t)E * sizeof *w);
    free(w);
    a->experts = (struct qx_experts){dev, dev + E, dev + 2 * E, E, H, I, fmt};
}

static int both(struct kern_ctx *c, const struct qx_op_moe_route *r, const struct qx_op_moe *a)
{
    int rc = c->be->ops->moe_route(c->q, r);
    return rc ? rc : c->be->ops->moe(c->q, a);
}

/* variant: shape + 8 * rows + 512 * mode, + 4096 for inputs that are not rounded, + OTHER_SHARED for a shared expert of
 * MXFP8 */
#define OTHER_SHARED 8192
static void layer(struct kern_ctx *c, int v)
{
    static const uint32_t shapes[][4] = {/* experts, k, hidden, inter */
        {512, 10, 2560, 640}, {12, 4, 1280, 256}, {24, 10, 3840, 128}, {300, 8, 5120, 384}, {24, 3, 256, 128},
        {16, 15, 2560, 128}, {512, 10, 2560, 128},
        {24, 10, 2560, 640}};
    const uint32_t *s = shapes[v % 8], n = (uint32_t)v / 8 % 64, mode = (uint32_t)v / 512 % 8;
    const uint32_t E = s[0], k = s[1], H = s[2], I = s[3];
    bool act = !(v & 4096), other = v & OTHER_SHARED;
    struct qx_op_moe_route r = {.n_rows = n, .hidden = H, .n_experts = E, .k = k, .norm = v % 3 != 0};
    struct qx_op_moe a = {.n_rows = n, .k = k, .s_inter = I, .act_bf16 = act};
    r.gate = kern_weight(c, QX_W_BF16, E, H, 0);
    a.m = r.m = kern_f32(c, (size_t)n * H, 1.0f);
    if (mode == TIES) { /* whole numbers: exact in any order of sums */
        uint16_t *h = malloc((size_t)E * H * 2);
        for (size_t i = 0; i < (size_t)E * H; ++i) {
            h[i] = qx_f32_to_bf16(i % H < 3 ? (float)kern_below(c, 3) : 0.0f);
        }
        r.gate.codes = kern_put(c, h, (size_t)E * H * 2);
        free(h);
        a.m = r.m = kern_const(c, (size_t)n * H, 1.0f);
    } else if (mode == SAME_ROWS) { /* pairs of rows are equal, so that they pick the same experts */
        float *x = malloc((size_t)n * H * 4);
        for (size_t i = 0; i < (size_t)n * H; ++i) {
            x[i] = i / H % 2 ? x[i - H] : kern_normal(c);
        }
        a.m = r.m = kern_put(c, x, (size_t)n * H * 4);
        free(x);
    }
    r.logits = kern_new(c, (size_t)n * E * 4);
    r.expert = kern_new(c, (size_t)n * k * 4);
    r.weight = kern_new(c, (size_t)n * k * 4);
    experts(c, &a, QX_W_NVFP4, E, H, I);
    a.expert = r.expert;
    a.weight = r.weight;
    kern_moe_rest(c, &a, other ? QX_W_MXFP8 : QX_W_BF16);
    kern_shape(c, "%u rows, %u of %u, hidden %u, inter %u%s%s%s", n, k, E, H, I,
               mode == TIES ? ", ties" : mode == SAME_ROWS ? ", equal rows" : "", act ? ", bf16" : "",
               other ? ", MXFP8 shared" : "");
    kern_out(c, "expert", 'i', r.expert, (size_t)n * k, 0);
    kern_out(c, "weight", 'f', r.weight, (size_t)n * k, 1e-5);
    kern_out(c, "y", 'f', a.y, (size_t)n * H, !act ? 0 : other ? BOUND_MXFP8 : BOUND_ROUNDED);
    kern_begin(c);
    c->rc = both(c, &r, &a);
    kern_end(c);
    /* the same with the ops apart, and each row alone */
    struct qx_op_moe b = a;
    b.y = kern_new(c, (size_t)n * H * 4);
    c->rc = c->rc ? c->rc : c->be->ops->moe(c->q, &b);
    kern_same(c, a.y, b.y, (size_t)n * H * 4);
    struct qx_op_moe_route t = r;
    t.expert = kern_new(c, (size_t)n * k * 4);
    t.weight = kern_new(c, (size_t)n * k * 4);
    b.y = kern_new(c, (size_t)n * H * 4);
    int32_t *e0 = t.expert;
    float *w0 = t.weight, *y0 = b.y;
    t.n_rows = b.n_rows = 1;
    for (uint32_t i = 0; i < n && !c->rc; ++i) {
        b.m = t.m = r.m + (size_t)i * H;
        b.expert = t.expert = e0 + (size_t)i * k;
        b.weight = t.weight = w0 + (size_t)i * k;
        t.logits = r.logits + (size_t)i * E;
        b.y = y0 + (size_t)i * H;
        c->rc = both(c, &t, &b);
    }
    kern_same(c, a.y, y0, (size_t)n * H * 4);
    kern_same(c, r.expert, e0, (size_t)n * k * 4);
    kern_same(c, r.weight, w0, (size_t)n * k * 4);
}

/* ---- speed, released shapes ---- */

#define SPEED_LAYERS 8u

struct speed {
    struct qx_op_moe_route r[SPEED_LAYERS];
    struct qx_op_moe a[SPEED_LAYERS];
    uint32_t n, hidden, what;
};

static int speed_run(struct kern_ctx *c, unsigned i, void *user)
{
    struct speed *s = user;
    struct qx_op_moe_route *r = &s->r[i % SPEED_LAYERS];
    struct qx_op_moe *a = &s->a[i % SPEED_LAYERS];
    int rc = s->what & 1 ? c->be->ops->moe_route(c->q, r) : 0;
    return rc || !(s->what & 2) ? rc : c->be->ops->moe(c->q, a);
}

/* variant: rows + 64 * (1 the router, 2 the experts, 3 both). Eight layers share 512 experts, of which each picks
 * its own; gates and shared experts are their own. */
static void speed(struct kern_ctx *c, int v)
{
    static struct speed s;
    const uint32_t n = (uint32_t)v % 64, E = 512, k = 10, H = 2560, I = 640;
    s.n = n;
    s.what = (uint32_t)v / 64;
    struct qx_weight all[3] = {kern_large_weight(c, QX_W_NVFP4, E * I, H), kern_large_weight(c, QX_W_NVFP4, E * I, H),
                               kern_large_weight(c, QX_W_NVFP4, E * H, I)};
    struct qx_weight *w = malloc(3 * (size_t)E * sizeof *w);
    for (uint32_t e = 0; e < E; ++e) {
        w[e] = kern_weight_rows(&all[0], e * I, I);
        w[E + e] = kern_weight_rows(&all[1], e * I, I);
        w[2 * E + e] = kern_weight_rows(&all[2], e * H, H);
    }
    uint8_t *taken = malloc(E);
    uint32_t unique = 0;
    for (uint32_t l = 0; l < SPEED_LAYERS; ++l) {
        const struct qx_weight *dev = kern_put(c, w, 3 * (size_t)E * sizeof *w);
        struct qx_op_moe_route *r = &s.r[l];
        struct qx_op_moe *a = &s.a[l];
        int32_t *e = malloc((size_t)n * k * 4);
        for (uint32_t i = 0; i < n * k; ++i) {
            e[i] = i % k ? (int32_t)(((uint32_t)e[i - 1] + 1 + kern_below(c, E / k)) % E) : (int32_t)kern_below(c, E);
        }
        memset(taken, 0, E);
        for (uint32_t i = 0; i < n * k; ++i) {
            unique += !taken[e[i]]++;
        }
        *r = (struct qx_op_moe_route){.n_rows = n, .hidden = H, .n_experts = E, .k = k, .norm = true};
        r->m = kern_f32(c, (size_t)n * H, 1.0f);
        r->gate = kern_large_weight(c, QX_W_BF16, E, H);
        r->logits = kern_new(c, (size_t)n * E * 4);
        r->expert = kern_put(c, e, (size_t)n * k * 4);
        r->weight = kern_const(c, (size_t)n * k, 0.1f);
        free(e);
        *a = (struct qx_op_moe){.n_rows = n, .k = k, .m = r->m, .expert = r->expert, .weight = r->weight, .s_inter = I,
                                .act_bf16 = true, .experts = {dev, dev + E, dev + 2 * E, E, H, I, QX_W_NVFP4}};
        a->s_gate = kern_large_weight(c, QX_W_BF16, I, H);
        a->s_up = kern_large_weight(c, QX_W_BF16, I, H);
        a->s_down = kern_large_weight(c, QX_W_BF16, H, I);
        a->s_gate_vec = kern_weight(c, QX_W_BF16, 1, H, 0);
        a->y = kern_new(c, (size_t)n * H * 4);
    }
    free(taken);
    free(w);
    const uint64_t gate = kern_weight_bytes(&s.r[0].gate), shared = kern_weight_bytes(&s.a[0].s_gate) * 3,
                   one = (kern_weight_bytes(&all[0]) + kern_weight_bytes(&all[1]) + kern_weight_bytes(&all[2])) / E;
    c->bytes = (s.what & 1 ? gate : 0) + (s.what & 2 ? shared + one * unique / SPEED_LAYERS : 0);
    kern_shape(c, "%u rows, %s", n, s.what == 1 ? "router" : s.what == 2 ? "experts" : "router and experts");
    kern_chain(c, speed_run, &s);
}

#define L(shape, rows, mode) {"moe", "layer", layer, (shape) + 8 * (rows) + 512 * (mode), 0}
#define LS(shape, mode) L(shape, 1, mode), L(shape, 2, mode), L(shape, 5, mode), L(shape, 8, mode)
#define S(rows) {"moe", "rows", speed, (rows) + 128, 1}, {"moe", "rows", speed, (rows) + 192, 1}, \
    {"moe", "rows", speed, (rows) + 64, 1}
const struct kern_case kern_cases_moe[] = {
    LS(0, RANDOM), LS(1, RANDOM), LS(2, RANDOM), LS(3, RANDOM), LS(5, RANDOM), LS(4, RANDOM), LS(6, SAME_ROWS),
    LS(1, SAME_ROWS),
    LS(7, RANDOM), LS(7, SAME_ROWS), LS(OTHER_SHARED + 7, RANDOM), L(7, 3, RANDOM), L(7, 4, RANDOM), L(7, 6, TIES),
    L(7, 7, RANDOM), L(7, 9, RANDOM), L(7, 13, SAME_ROWS), L(7, 24, RANDOM), L(0, 3, RANDOM), L(0, 4, SAME_ROWS),
    L(0, 16, RANDOM), L(OTHER_SHARED + 7, 3, RANDOM), L(OTHER_SHARED + 0, 4, RANDOM), L(7, 3, RANDOM + 8),
    LS(OTHER_SHARED + 0, RANDOM), LS(OTHER_SHARED + 5, RANDOM), LS(OTHER_SHARED + 6, SAME_ROWS),
    L(OTHER_SHARED + 6, 13, RANDOM), L(OTHER_SHARED + 6, 32, RANDOM), LS(6, TIES), LS(1, TIES), L(6, 3, RANDOM),
    L(6, 4, RANDOM), L(6, 6, RANDOM), L(6, 7, RANDOM), L(6, 9, RANDOM), L(6, 13, RANDOM), L(6, 16, SAME_ROWS), L(6, 24, RANDOM), L(6, 32, RANDOM), L(1, 32, SAME_ROWS),
    L(6, 3, RANDOM + 8), L(4, 2, RANDOM + 8), S(1), S(2), S(4), S(8), S(16), S(32), {0, 0, 0, 0, 0}};
