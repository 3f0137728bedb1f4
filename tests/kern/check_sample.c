/* check_sample.c: cases of argmax, penalize, sample and advance. */
#include "kern.h"

#include <math.h>
#include <string.h>

/* kind: 0 random, 1 few distinct values (ties), 2 all equal, 3 a NaN, 4 -infinity in most places */
static float *logits(struct kern_ctx *c, uint32_t n, uint32_t vocab, int kind)
{
    float *h = malloc((size_t)n * vocab * 4);
    for (size_t i = 0; i < (size_t)n * vocab; ++i) {
        h[i] = kind == 1   ? (float)kern_below(c, 7)
               : kind == 2 ? 1.5f
               : kind == 4 && kern_below(c, 20) ? -INFINITY : 4.0f * kern_normal(c);
    }
    if (kind == 3) {
        h[vocab / 2] = NAN;
        h[vocab / 2 + 5] = NAN;
    }
    float *p = kern_put(c, h, (size_t)n * vocab * 4);
    free(h);
    return p;
}

static void argmax(struct kern_ctx *c, int v)
{
    static const uint32_t vocabs[] = {512, 1, 248320, 1000, 2048};
    uint32_t n = v % 3 == 0 ? 1 : 5, vocab = vocabs[v % 5];
    int32_t *id = kern_new(c, n * 4);
    float *val = kern_new(c, n * 4), *prob = kern_new(c, n * 4);
    kern_out(c, "id", 'i', id, n, 0);
    kern_out(c, "value", 'f', val, n, 1e-30);
    kern_out(c, "prob", 'f', prob, n, 1e-5);
    kern_shape(c, "%u x %u kind %d", n, vocab, v / 5);
    KERN_RUN(c, argmax, {.n_rows = n, .vocab = vocab, .logits = logits(c, n, vocab, v / 5), .id = id, .value = val,
                         .prob = prob, .scratch = kern_new(c, n * 256 * 4 * 4)});
}

static void penalize(struct kern_ctx *c, int v)
{
    uint32_t n = 3, vocab = 1000, max = v ? 700 : 5;
    float *l = logits(c, n, vocab, 0);
    int32_t *id = malloc((size_t)n * max * 4), *count = malloc((size_t)n * max * 4);
    for (uint32_t r = 0; r < n; ++r) {
        uint32_t start = kern_below(c, vocab), len = r == 1 ? 0 : r == 2 ? max : max / 2;
        for (uint32_t i = 0; i < max; ++i) {
            id[r * max + i] = i < len ? (int32_t)((start + 3 * i) % vocab) : -1;
            count[r * max + i] = (int32_t)kern_below(c, 9) + 1;
        }
    }
    const struct qx_penalty p[3] = {{1.3f, 0.0f, 0.0f}, {1.3f, 0.5f, 0.2f}, {0.9f, 0.25f, 0.125f}};
    kern_out(c, "logits", 'f', l, (size_t)n * vocab, 0);
    KERN_RUN(c, penalize, {.n_rows = n, .vocab = vocab, .max_ids = max, .params = kern_put(c, p, sizeof p),
                           .id = kern_put(c, id, (size_t)n * max * 4), .count = kern_put(c, count, (size_t)n * max * 4),
                           .logits = l});
    free(id);
    free(count);
}

static void sample(struct kern_ctx *c, int v)
{
    static const uint32_t vocabs[] = {512, 3000, 248320, 40000};
    uint32_t vocab = vocabs[v % 4], n = vocab > 100000 ? 12 : 24;
    struct qx_sample_params p[24];
    int32_t pos[24];
    for (uint32_t i = 0; i < n; ++i) {
        static const int32_t ks[] = {0, 20, 1, 1024, 1025, 5, 0, 300};
        static const float ps[] = {0.95f, 1.0f, 0.5f, 0.99f, 0.1f};
        p[i] = (struct qx_sample_params){.temperature = i % 7 == 6 ? 0.0f : 0.3f + 0.2f * (float)(i % 5),
                                         .top_p = ps[i % 5], .min_p = i % 3 == 2 ? 0.02f : 0.0f, .top_k = ks[i % 8],
                                         .seed = kern_u64(c)};
        pos[i] = (int32_t)kern_below(c, 100000);
    }
    int32_t *id = kern_new(c, n * 4), *told = v & 1 ? kern_new(c, n * 4) : NULL;
    kern_out(c, "id", 'i', id, n, 0);
    if (told) {
        kern_out(c, "told", 'i', told, n, 0);
    }
    kern_shape(c, "%u x %u kind %d", n, vocab, v / 4);
    KERN_RUN(c, sample, {.n_rows = n, .vocab = vocab, .logits = logits(c, n, vocab, v / 4),
                         .params = kern_put(c, p, n * sizeof *p), .pos = kern_put(c, pos, n * 4), .id = id,
                         .told = told,
                         .scratch = kern_new(c, (size_t)n * vocab * 8)});
}

static void advance(struct kern_ctx *c, int v)
{
    (void)v;
    struct qx_step *s = kern_step(c, (struct kern_run[]){{1, 3, 0, -1, 0}, {-1, 0, 0, -1, 0}, {1, 8, 1, -1, 0}}, 3, 50, NULL);
    const int32_t nw[3] = {7, 8, 9}, ring[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    const uint64_t count = 6;
    int32_t *r = kern_put(c, ring, sizeof ring);
    uint64_t *n = kern_put(c, &count, 8);
    kern_out(c, "ring", 'i', r, 12, 0);
    kern_out(c, "count", 'l', n, 1, 0);
    kern_out(c, "id", 'i', s->id, 3, 0);
    kern_out(c, "pos", 'i', s->pos, 3, 0);
    KERN_RUN(c, advance, {.step = s, .id_new = kern_put(c, nw, sizeof nw), .ring = r, .ring_len = 4, .count = n});
}

#define A(i) {"argmax", "argmax", argmax, i, 0}
#define S(i) {"sample", "sample", sample, i, 0}
const struct kern_case kern_cases_sample[] = {
    A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8), A(9), A(10), A(12), A(14), A(15), A(17), A(19), A(22), A(24),
    {"penalize", "penalize", penalize, 0, 0}, {"penalize", "penalize", penalize, 1, 0},
    S(0), S(1), S(2), S(3), S(4), S(5), S(6), S(8), S(9), S(12), S(13), S(16), S(17), S(18),
    {"advance", "advance", advance, 0, 0}, {0, 0, 0, 0, 0}};
