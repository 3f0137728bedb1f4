/* ple_hash.h: the constants and row ids of the n-gram table (model 7.1, 7.2; formats 5.1). */
#ifndef QX_PLE_HASH_H
#define QX_PLE_HASH_H

#include "config.h"

struct qx_ple_hash {
    uint32_t ngram_size, n_heads, heads_per_ngram; /* n_heads = (ngram_size - 1) x heads_per_ngram */
    uint64_t multiplier[QX_MAX_NGRAM];             /* [ngram_size] */
    uint64_t size[QX_MAX_PLE_HEADS], offset[QX_MAX_PLE_HEADS]; /* [n_heads] */
    uint64_t n_rows;        /* sum of sizes */
    uint64_t n_rows_padded; /* next multiple of make_ngram_vocab_size_divisible_by */
    uint32_t eos;           /* n-gram reset id */
};

/* Computes everything for PLE layer rank `rank` (0 for the first). QX_E_CONFIG when the numbers
 * overflow or make no sense. */
int qx_ple_hash_init(struct qx_ple_hash *h, const struct qx_config *c, uint32_t rank,
                     struct qx_error *err);

/* Rows of one token. prev[0] is the token before it, prev[1] the one before that, ...
 * [ngram_size - 1]; where the sequence has no such token pass h->eos. rows: [n_heads]. */
void qx_ple_rows(const struct qx_ple_hash *h, uint32_t token, const uint32_t *prev, uint64_t *rows);

#endif
