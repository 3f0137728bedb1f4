/* indep_decode.h: the second decoder. Rows of stored matrices as numbers, derived from the arithmetic of
 * the formats with integers only; it shares no table and no code with codes.c, nvfp4.c, fp8.c, rows.c or
 * any kernel, so that a mistake in one shows as a difference. Slow by design. */
#ifndef QX_INDEP_DECODE_H
#define QX_INDEP_DECODE_H

#include "resolve.h"

/* An exact number (-1)^neg x mant x 2^exp, or NaN or infinity. */
struct qx_exact {
    bool neg, nan, inf;
    uint64_t mant;
    int exp;
};

/* Elementary codes (formats 6.1) and plain element types. */
struct qx_exact qx_exact_e4m3(unsigned byte);
struct qx_exact qx_exact_e5m2(unsigned byte);
struct qx_exact qx_exact_e8m0(unsigned byte);
struct qx_exact qx_exact_e2m1(unsigned nibble);
struct qx_exact qx_exact_bf16(unsigned bits);
struct qx_exact qx_exact_f16(unsigned bits);
struct qx_exact qx_exact_f32(uint32_t bits);
/* Exact product; the mantissas' bits must add up to at most 64. */
struct qx_exact qx_exact_mul(struct qx_exact a, struct qx_exact b);
/* Nearest even to f32 bits, subnormals included; overflow is infinity, NaN is 0x7fc00000 with sign. */
uint32_t qx_exact_to_f32(struct qx_exact x);
/* f32 bits rounded to bfloat16 bits, nearest even. */
uint16_t qx_exact_f32_to_bf16(uint32_t bits);

/* What to decode: one module, or one shard after another of the n-gram table. */
struct qx_indep {
    const struct qx_ckpt *ck;
    enum qx_format format;
    uint64_t rows, cols;          /* addressable rows and values a row */
    const struct qx_module *module; /* NULL for the table */
    const struct qx_table *table;   /* NULL for a module */
    const struct qx_tensor *global; /* FP8 weight_scale, NVFP4 weight_scale_2; NULL for others */
    uint32_t global_code;         /* its bits when it is one number; else one is read for each expert */
    uint64_t block_bytes, rows_per_block; /* packed table; 0 otherwise */
    uint64_t serial;              /* tells matrices apart in a qx_indep_work; never 0 */
};

/* Prepares; fails with QX_E_MISSING or QX_E_QUANT when a part is missing or does not fit. The module
 * or table must outlive d. Nothing to free. */
int qx_indep_module(struct qx_indep *d, const struct qx_ckpt *ck, const struct qx_module *m,
                    struct qx_error *err);
int qx_indep_table(struct qx_indep *d, const struct qx_ckpt *ck, const struct qx_table *t,
                   struct qx_error *err);

/* Working memory of one thread; zeroed is ready. Remembers results of (code, scale) pairs of the matrix
 * it last worked for, because the integer arithmetic is slow and pairs repeat. */
#define QX_INDEP_MEMO 4096u
struct qx_indep_window {
    const struct qx_tensor *t;        /* whose bytes [off, off + n) are in `bytes`; NULL: none */
    uint64_t off, n;
    uint8_t *bytes;
    size_t cap;
};
struct qx_indep_work {
    uint64_t ahead;                   /* the caller's: so many rows after this one are wanted next, so that
                                         they are read together */
    struct qx_indep_window codes, scales;
    uint64_t serial;                  /* of the matrix remembered; 0 none */
    uint32_t global_code;             /* and of its global scale */
    uint64_t key[QX_INDEP_MEMO];      /* 0: free */
    uint32_t value[QX_INDEP_MEMO];
    bool ready[256];                  /* block scales whose 16 codes are all there */
};
void qx_indep_work_fini(struct qx_indep_work *w);

/* One row as f32 bits and bfloat16 bits (may be NULL), cols each. Rows of a fused [E, R, C] are
 * addressed as e x R + r. */
int qx_indep_row(const struct qx_indep *d, uint64_t row, uint32_t *f32_bits, uint16_t *bf16_bits,
                 struct qx_indep_work *w, struct qx_error *err);

#endif
