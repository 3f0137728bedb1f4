/* budget.h: how much memory the engine takes besides weights, from the configuration alone: the numbers
 * of the memory plan and the sizes that are then allocated, computed once. Sizes are model 15. */
#ifndef QX_BUDGET_H
#define QX_BUDGET_H

#include "base.h"
#include "config.h"
#include "error.h"

struct qx_budget {
    /* asked for, defaults applied */
    uint64_t ctx_tokens;
    uint32_t chunk_rows, max_seqs, draft_max;
    bool mtp, kv_bf16;
    /* derived */
    uint32_t n_rows;            /* rows a step can have */
    uint32_t n_logit_rows;      /* rows of logits, and of a decode step, that a step can have */
    uint32_t n_feed_rows;       /* rows the draft head can get after a decode step */
    uint32_t page_tokens, max_pages, n_pages; /* pages of a sequence and in all */
    uint32_t n_slots, slots_per_seq;
    uint32_t n_prefixes;        /* states of prefixes that sequences share (batch.c), a slot each */
    uint32_t budget_blocks, max_blocks;
    uint32_t proj_width, mixed_width;
    uint64_t scratch_floats, iscratch_ints;
    /* bytes */
    uint64_t slot_bytes;        /* all recurrent states of one slot */
    uint64_t page_bytes;        /* one page of all caches */
    uint64_t state_bytes, kv_bytes, scratch_bytes; /* scratch: activations and logits */
    uint64_t host_bytes;        /* pinned host memory */
};

/* Bytes of a control block (engine.h) of `rows` rows. */
uint64_t qx_ctl_bytes(uint64_t rows, uint64_t logit_rows, uint64_t seqs);

/* ctx 0: min(limit, 32768); chunk 0: 512; max_seqs 0: 1. Errors: context-exceeded (QX_E_USAGE), sizes
 * that overflow (QX_E_PLAN). */
int qx_budget_init(struct qx_budget *b, const struct qx_config *c, uint64_t ctx_tokens,
                   uint32_t chunk_rows, uint32_t max_seqs, uint32_t n_prefixes, uint32_t draft_max, bool mtp,
                   bool kv_bf16, struct qx_error *err);

#endif
