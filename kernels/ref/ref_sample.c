/* ref_sample.c: arg-max, penalties, sampling, and feeding a sampled id back (model 9). */
#include "rand.h"
#include "ref.h"

#include <stdlib.h>
#include <string.h>

/* True when a beats b: larger, NaN largest of all. */
static bool beats(float a, float b)
{
    return a > b || (isnan(a) && !isnan(b));
}

static uint32_t best(const float *l, uint32_t n)
{
    uint32_t b = 0;
    for (uint32_t i = 1; i < n; ++i) {
        if (beats(l[i], l[b])) {
            b = i;
        }
    }
    return b;
}

static void argmax_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_argmax *a = user;
    const float *l = a->logits + r * a->vocab;
    uint32_t b = best(l, a->vocab);
    (void)q;
    a->id[r] = (int32_t)b;
    a->value[r] = l[b];
    if (a->prob) {
        double sum = 0.0;
        for (uint32_t i = 0; i < a->vocab; ++i) {
            sum += exp((double)l[i] - (double)l[b]);
        }
        a->prob[r] = (float)(1.0 / sum);
    }
}

int ref_argmax(struct qx_queue *q, const struct qx_op_argmax *a)
{
    ref_for(q, a->n_rows, (uint64_t)a->vocab * (a->prob ? 16 : 1), argmax_row, (void *)(uintptr_t)a);
    return 0;
}

int ref_penalize(struct qx_queue *q, const struct qx_op_penalize *a)
{
    (void)q;
    for (uint32_t r = 0; r < a->n_rows; ++r) {
        const struct qx_penalty *p = &a->params[r];
        for (uint32_t i = 0; i < a->max_ids; ++i) {
            int32_t id = a->id[(size_t)r * a->max_ids + i];
            if (id < 0) {
                break;
            }
            if ((uint32_t)id >= a->vocab) {
                continue;
            }
            float *l = &a->logits[(size_t)r * a->vocab + (uint32_t)id];
            double v = (double)*l;
            v = v > 0.0 ? v / (double)p->repeat : v * (double)p->repeat;
            v -= (double)p->presence + (double)p->frequency * a->count[(size_t)r * a->max_ids + i];
            *l = (float)v;
        }
    }
    return 0;
}

struct cand { float logit; int32_t id; };

static int by_rank(const void *pa, const void *pb)
{
    const struct cand *a = pa, *b = pb;
    if (a->logit != b->logit) {
        return a->logit > b->logit ? -1 : 1;
    }
    return a->id < b->id ? -1 : a->id > b->id;
}

/* Brings the k best candidates to the front, unordered (quickselect over a total order). */
static void front(struct cand *c, uint32_t n, uint32_t k)
{
    uint32_t lo = 0, hi = n;
    while (hi - lo > 1 && k > lo && k < hi) {
        struct cand pivot = c[lo + (hi - lo) / 2];
        uint32_t i = lo, j = hi - 1;
        for (;;) {
            while (by_rank(&c[i], &pivot) < 0) {
                ++i;
            }
            while (by_rank(&c[j], &pivot) > 0) {
                --j;
            }
            if (i >= j) {
                break;
            }
            struct cand t = c[i];
            c[i++] = c[j];
            c[j--] = t;
        }
        /* [lo, j] not after the pivot, [j + 1, hi) not before it; where both met, c[j] is the pivot. */
        uint32_t left = i == j ? j : j + 1;
        if (k == left || k == j + 1) {
            return;
        }
        if (k < left) {
            hi = left;
        } else {
            lo = j + 1;
        }
    }
}

static int32_t draw(const float *l, uint32_t vocab, const struct qx_sample_params *p, int32_t pos,
                    struct cand *c)
{
    uint32_t b = best(l, vocab);
    if (isnan(l[b]) || (isinf(l[b]) && l[b] > 0)) {
        return -1;
    }
    if (!(p->temperature > 0.0f)) {
        return (int32_t)b;
    }
    for (uint32_t i = 0; i < vocab; ++i) {
        c[i] = (struct cand){l[i], (int32_t)i};
    }
    uint32_t n = vocab;
    if (p->top_k > 0 && (uint32_t)p->top_k < n) {
        front(c, n, (uint32_t)p->top_k);
        n = (uint32_t)p->top_k;
    }
    qsort(c, n, sizeof *c, by_rank);
    double top = (double)c[0].logit, inv = 1.0 / (double)p->temperature, total = 0.0;
    for (uint32_t i = 0; i < n; ++i) {
        total += exp(((double)c[i].logit - top) * inv);
    }
    if (p->top_p < 1.0f) {
        double want = (double)p->top_p * total, sum = 0.0;
        uint32_t i = 0;
        do {
            sum += exp(((double)c[i].logit - top) * inv);
        } while (++i < n && sum < want);
        n = i;
    }
    if (p->min_p > 0.0f) {
        uint32_t i = 1;
        while (i < n && exp(((double)c[i].logit - top) * inv) >= (double)p->min_p) {
            ++i;
        }
        n = i;
    }
    total = 0.0;
    for (uint32_t i = 0; i < n; ++i) {
        total += exp(((double)c[i].logit - top) * inv);
    }
    double u = (double)(qx_rand_u64(p->seed, pos) >> 40) * 0x1p-24 * total, sum = 0.0;
    for (uint32_t i = 0; i < n; ++i) {
        sum += exp(((double)c[i].logit - top) * inv);
        if (sum > u) {
            return c[i].id;
        }
    }
    return c[n - 1].id;
}

static void sample_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_sample *a = user;
    (void)q;
    a->id[r] = draw(a->logits + r * a->vocab, a->vocab, &a->params[r], a->pos[r],
                    (struct cand *)(void *)(a->scratch + r * a->vocab * 2));
}

int ref_sample(struct qx_queue *q, const struct qx_op_sample *a)
{
    ref_for(q, a->n_rows, (uint64_t)a->vocab * 4, sample_row, (void *)(uintptr_t)a);
    if (a->told) {
        memcpy(a->told, a->id, a->n_rows * sizeof *a->id);
    }
    return 0;
}

int ref_advance(struct qx_queue *q, const struct qx_op_advance *a)
{
    uint64_t slot = *a->count % a->ring_len;
    (void)q;
    for (uint32_t r = 0; r < a->step->n_rows; ++r) {
        if (a->step->pos[r] >= 0) {
            a->ring[slot * a->step->n_rows + r] = a->id_new[r];
            a->step->id[r] = a->id_new[r];
            ++a->step->pos[r];
            if (a->spos) {
                ++a->spos[r];
            }
        }
    }
    ++*a->count;
    return 0;
}
