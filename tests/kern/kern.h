/* kern.h: what the files of kerncheck share. A case is a function that builds its inputs from the seed,
 * runs one op on the context's backend and names its outputs. The harness runs it on the reference and
 * twice on the backend under test, and compares: exactly, by relative L2, or as bfloat16. Every buffer
 * has guard bytes around it; outputs start poisoned. */
#ifndef QX_TESTS_KERN_H
#define QX_TESTS_KERN_H

#include "backend.h"
#include "base.h"
#include "codes.h"
#include "ops.h"

#include <stdlib.h>

enum { KERN_GUARD = 256, KERN_MAX_BUFS = 240, KERN_MAX_OUTS = 12 };

struct kern_out {
    const char *name;
    char type;       /* 'f' f32 by bound, 'b' bf16 by bound, 'i' 32-bit exact, 'l' 64-bit exact, 'h' 16-bit exact */
    size_t n;        /* elements */
    double bound;
    void *data;      /* host copy */
    const void *dev; /* on the backend until the op has run */
};
struct kern_buf { uint8_t *base; size_t n; };

struct kern_ctx {
    struct qx_backend *be;
    struct qx_queue *q;
    uint64_t rng;
    bool guards_off;  /* bench */
    unsigned as;      /* a capability whose variants are tested, 0: the device's */
    unsigned repeats; /* bench: how often kern_run runs the op */
    double ns;        /* bench: time of one run */
    struct kern_buf bufs[KERN_MAX_BUFS];
    unsigned n_bufs;
    struct kern_out outs[KERN_MAX_OUTS];
    unsigned n_outs;
    char shape[256];  /* for messages */
    int rc;           /* of the op */
    struct qx_error err;
    uint64_t bytes;   /* bench: bytes that must be read and written */
};

/* Cases: name, the op they test, a number for variants. */
struct kern_case {
    const char *op, *name;
    void (*fn)(struct kern_ctx *c, int variant);
    int variant;
    bool bench;       /* too large for checking; only timed */
};
extern const struct kern_case kern_cases_matmul[], kern_cases_moe[], kern_cases_rows[], kern_cases_gdn[], kern_cases_qsa[],
    kern_cases_ple[], kern_cases_sample[],
    kern_cases_draft[];

/* ---- numbers ---- */
uint64_t kern_u64(struct kern_ctx *c);
uint32_t kern_below(struct kern_ctx *c, uint32_t n);
float kern_uniform(struct kern_ctx *c);               /* [-1, 1) */
float kern_normal(struct kern_ctx *c);

/* ---- buffers: device memory, filled from host memory, freed by the harness ---- */
void *kern_new(struct kern_ctx *c, size_t n_bytes);   /* poisoned with 0xa5 */
void *kern_put(struct kern_ctx *c, const void *src, size_t n_bytes);
float *kern_f32(struct kern_ctx *c, size_t n, float scale);      /* normal values */
float *kern_const(struct kern_ctx *c, size_t n, float v);
void kern_fetch(struct kern_ctx *c, void *dst, const void *dev, size_t n);

/* A random stored matrix of a format. kind: 0 ordinary, 1 every code (no NaN), 2 with zero scales, 3 a NaN
 * code or scale in row 1. */
struct qx_weight kern_weight(struct kern_ctx *c, uint8_t fmt, uint32_t rows, uint32_t cols, int kind);
/* A matrix as large as those of the released model, from a few random megabytes. */
struct qx_weight kern_large_weight(struct kern_ctx *c, uint8_t fmt, uint32_t rows, uint32_t cols);
const char *kern_fmt_name(uint8_t fmt);
/* Rows row .. row + n of a matrix, as a slice of it. */
struct qx_weight kern_weight_rows(const struct qx_weight *w, uint32_t row, uint32_t n);
uint64_t kern_weight_bytes(const struct qx_weight *w);
/* What a case of experts has beside its picks: the shared expert of that format (its gate BF16), results, scratch. */
void kern_moe_rest(struct kern_ctx *c, struct qx_op_moe *a, uint8_t fmt);

/* Runs of rows of a step: len rows from position pos0 of sequence seq. out: 0 none, 1 the last row to
 * state_in's slot, 2 every row to its own slot, 3 the last row to its own slot. len < 0: one idle row. */
struct kern_run { int len, pos0, seq, state_in, out; };
struct qx_step *kern_step(struct kern_ctx *c, const struct kern_run *runs, unsigned n, uint32_t vocab,
                          uint32_t *n_slots);

/* ---- bounds ---- */
/* Error of a product whose inputs are computed values rounded to bf16: where kernel and reference, each
 * within 1e-6, lie on two sides of a rounding boundary (a share of 2e-6 / 2^-8 of the values), they differ by
 * 2^-8: 2^-8 sqrt(5e-4) = 9e-5 of the whole; twice that. */
#define BOUND_ROUNDED 1.8e-4

/* ---- running ---- */
#define KERN_RUN(c, op, ...)                                                          \
    do {                                                                              \
        if ((c)->be->ops->op == NULL) {                                               \
            (c)->rc = -1;                                                             \
            break;                                                                    \
        }                                                                             \
        const struct qx_op_##op args_ = __VA_ARGS__;                                  \
        kern_begin(c);                                                                \
        for (unsigned i_ = 0; i_ < ((c)->repeats ? (c)->repeats : 1) && !(c)->rc; ++i_) { \
            (c)->rc = (c)->be->ops->op((c)->q, &args_);                               \
        }                                                                             \
        kern_end(c);                                                                  \
    } while (0)
/* Runs the op again, on fewer rows and to `b`: must give the same n bytes there as lie at `a`. Not timed. */
#define KERN_SAME(c, op, a, b, n, ...)                                                \
    do {                                                                              \
        if (!(c)->rc && !(c)->repeats) {                                              \
            const struct qx_op_##op again_ = __VA_ARGS__;                             \
            (c)->rc = (c)->be->ops->op((c)->q, &again_);                              \
            kern_same((c), (a), (b), (n));                                            \
        }                                                                             \
    } while (0)
void kern_same(struct kern_ctx *c, const void *a, const void *b, size_t n);
/* Times what `enqueue` does with i = 0 .. repeats - 1, recorded as a graph where the backend has them, as a
 * step of the model is. */
void kern_chain(struct kern_ctx *c, int (*enqueue)(struct kern_ctx *c, unsigned i, void *user), void *user);
void kern_begin(struct kern_ctx *c);
void kern_end(struct kern_ctx *c);

void kern_shape(struct kern_ctx *c, const char *fmt, ...) QX_PRINTF(2, 3);
/* Outputs, before KERN_RUN. bound 0: the op's own. */
void kern_out(struct kern_ctx *c, const char *name, char type, const void *dev, size_t n, double bound);

#endif
