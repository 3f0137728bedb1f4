/* ref_ops.h: what the tests of the reference ops share: the backend, seeded values, steps of one run. Numbers
 * in the tests' comments are those of the model description's list of invariants. */
#ifndef QX_TEST_REF_OPS_H
#define QX_TEST_REF_OPS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "backend.h"
#include "codes.h"
#include "ops.h"
#include "rand.h"
#include "rel.h"

static struct qx_backend *be;
static struct qx_queue *q;
static uint64_t rng = 1;

static inline int setup(void **state)
{
    (void)state;
    return qx_backend_cpu_create(&be, 2, NULL) || be->queue_create(be, &q, NULL);
}
static inline int teardown(void **state)
{
    (void)state;
    be->queue_destroy(q);
    be->destroy(be);
    return qx_alloc_live() != 0;
}

static inline float frand(void)
{
    rng = qx_mix64(rng);
    return (float)((double)(rng >> 11) * 0x1p-53 * 2.0 - 1.0);
}
static inline float *randoms(size_t n, float scale)
{
    float *p = malloc(n * 4);
    for (size_t i = 0; i < n; ++i) {
        p[i] = frand() * scale;
    }
    return p;
}
static inline float *zeros(size_t n)
{
    return calloc(n, 4);
}
static inline struct qx_weight f32_weight(const float *p, uint32_t rows, uint32_t cols)
{
    return (struct qx_weight){.codes = p, .global = 1.0f, .rows = rows, .cols = cols, .fmt = QX_W_F32};
}

/* A step of one run: positions pos0.., states from `in`, the last row's to `out`. */
#define MAX_ROWS 160
struct rows {
    int32_t id[MAX_ROWS], pos[MAX_ROWS], seq[MAX_ROWS], first[MAX_ROWS], in[MAX_ROWS], out[MAX_ROWS];
    struct qx_step s;
};
static inline struct rows *make_rows(struct rows *r, uint32_t n, int32_t pos0, int32_t in, int32_t out)
{
    for (uint32_t i = 0; i < n; ++i) {
        r->id[i] = 0;
        r->pos[i] = pos0 + (int32_t)i;
        r->seq[i] = 0;
        r->first[i] = 0;
        r->in[i] = in;
        r->out[i] = i + 1 == n ? out : -1;
    }
    r->s = (struct qx_step){n, r->id, r->pos, r->seq, r->first, r->in, r->out};
    return r;
}

#endif
