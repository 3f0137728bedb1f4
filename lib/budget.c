/* budget.c: see budget.h. */
#include "budget.h"

#include "ops.h"
#include "qx.h"

static uint64_t max2(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Saturating product and sum: an overflow becomes UINT64_MAX and is refused at the end. */
static uint64_t mul(uint64_t a, uint64_t b)
{
    uint64_t r;
    return qx_mul_u64(a, b, &r) ? r : UINT64_MAX;
}
static uint64_t add(uint64_t a, uint64_t b)
{
    uint64_t r;
    return qx_add_u64(a, b, &r) ? r : UINT64_MAX;
}

uint64_t qx_ctl_bytes(uint64_t rows, uint64_t logit_rows, uint64_t seqs)
{
    return add(mul(logit_rows, sizeof(struct qx_sample_params) + 8), mul(4, add(mul(8, rows), mul(11, seqs))));
}

int qx_budget_init(struct qx_budget *b, const struct qx_config *c, uint64_t ctx_tokens,
                   uint32_t chunk_rows, uint32_t max_seqs, uint32_t n_prefixes, uint32_t draft_max, bool mtp,
                   bool kv_bf16, struct qx_error *err)
{
    uint64_t limit = qx_config_context_limit(c);
    if (ctx_tokens > limit) {
        return qx_fail(err, QX_E_USAGE, "context-exceeded",
                       "a context of %llu tokens is over the model's limit of %llu",
                       (unsigned long long)ctx_tokens, (unsigned long long)limit);
    }
    if (draft_max > QX_DRAFT_MAX) {
        return qx_fail(err, QX_E_USAGE, "usage", "at most %d drafts a round, asked for %u", QX_DRAFT_MAX,
                       draft_max);
    }
    *b = (struct qx_budget){.kv_bf16 = kv_bf16, .draft_max = draft_max};
    b->mtp = (mtp || draft_max > 0) && c->n_mtp_layers > 0;
    b->ctx_tokens = ctx_tokens ? ctx_tokens : limit < 32768 ? limit : 32768;
    b->max_seqs = max_seqs ? max_seqs : 1;
    b->chunk_rows = chunk_rows ? chunk_rows : 512;
    if (b->chunk_rows > b->ctx_tokens) {
        b->chunk_rows = (uint32_t)b->ctx_tokens;
    }
    if (b->ctx_tokens > INT32_MAX / 2 || b->max_seqs > 4096 || b->chunk_rows > 65536) {
        return qx_fail(err, QX_E_USAGE, "usage",
                       "context %llu, sequences %u or chunk %u is larger than the engine counts",
                       (unsigned long long)b->ctx_tokens, b->max_seqs, b->chunk_rows);
    }

    b->n_logit_rows = b->max_seqs * (draft_max + 1);
    b->n_rows = (uint32_t)max2(b->chunk_rows, b->n_logit_rows);
    if (b->mtp) {
        b->n_rows += b->max_seqs; /* rows the draft head is still owed from the step before */
    }
    b->n_feed_rows = b->n_logit_rows + b->max_seqs;
    uint32_t ratio = c->indexer_compress_ratio;
    b->page_tokens = ratio * 16;
    b->max_pages = (uint32_t)qx_ceil_div(b->ctx_tokens, b->page_tokens);
    b->n_pages = b->max_pages * b->max_seqs;
    b->slots_per_seq = draft_max ? draft_max + 2 : 1;
    b->n_prefixes = n_prefixes;
    b->n_slots = b->slots_per_seq * b->max_seqs + n_prefixes;
    b->budget_blocks = c->indexer_budget / ratio;
    b->max_blocks = (uint32_t)(b->ctx_tokens / ratio + 1);

    uint64_t wide = mul(c->hc_count, c->hidden_size), rows = b->n_rows, logit_rows = b->n_logit_rows;
    uint64_t channels = 2ull * c->gdn_k_heads * c->gdn_k_dim + (uint64_t)c->gdn_v_heads * c->gdn_v_dim;
    uint64_t values = (uint64_t)c->gdn_v_heads * c->gdn_v_dim;
    uint64_t heads = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    uint64_t n_gdn = 0, n_qsa = b->mtp ? 1 : 0;
    for (uint32_t i = 0; i < c->n_layers; ++i) {
        n_gdn += c->layer_type[i] == QX_LAYER_GDN;
        n_qsa += c->layer_type[i] == QX_LAYER_QSA;
    }
    uint64_t history = c->n_ple_layers ? (uint64_t)(c->ple_conv_kernel - 1) * c->ngram_size : 0;

    b->slot_bytes = add(mul(n_gdn, mul(4, add(mul(values, c->gdn_k_dim),
                                              mul(c->gdn_conv_kernel - 1, channels)))),
                        add(mul(history, mul(wide, 4)), c->n_ple_layers ? 4ull * c->ngram_size : 0));
    uint64_t per_token = 2 * kv + c->indexer_head_dim;
    b->page_bytes = mul(mul(n_qsa, kv_bf16 ? 2 : 4),
                        add(mul(b->page_tokens, per_token), 16ull * c->indexer_head_dim));
    b->state_bytes = mul(b->slot_bytes, b->n_slots);
    b->kv_bytes = add(mul(b->page_bytes, b->n_pages), 4ull * b->n_pages);

    uint64_t qsa_proj = 2 * heads + 2 * kv + (uint64_t)(c->indexer_n_heads + 1) * c->indexer_head_dim;
    uint64_t gdn_proj = channels + values + 2ull * c->gdn_v_heads;
    b->proj_width = (uint32_t)max2(qsa_proj, gdn_proj);
    b->mixed_width = (uint32_t)max2(values, heads);
    uint64_t pairs = mul(rows, c->n_experts_per_tok);
    uint64_t scratch = mul(rows, wide + c->hc_lowrank);
    scratch = max2(scratch, mul(rows, channels + 2ull * c->gdn_v_heads));
    scratch = max2(scratch, mul(mul(rows, c->n_heads), (c->head_dim + 2ull) * QX_ATTEND_SPLITS));
    scratch = max2(scratch, add(mul(pairs, (uint64_t)c->moe_intermediate_size + c->hidden_size),
                                mul(rows, (uint64_t)c->shared_expert_intermediate_size + c->hidden_size + 1)));
    scratch = max2(scratch, c->n_ple_layers ? mul(rows, 2 * wide) : 0);
    scratch = max2(scratch, b->mtp ? mul(rows, wide) : 0);
    scratch = max2(scratch, mul(logit_rows, 1024));
    b->scratch_floats = scratch;
    b->iscratch_ints = pairs + 3ull * c->n_experts + 8;

    uint64_t per_row = wide + 4ull * c->hidden_size + 2ull * c->hc_count + b->proj_width + b->mixed_width
                       + heads + (uint64_t)c->indexer_n_heads * c->indexer_head_dim + b->max_blocks
                       + b->budget_blocks + 1 + 2ull * c->n_experts_per_tok + c->n_experts;
    if (b->mtp) {
        per_row += 2 * wide;
    }
    if (c->n_ple_layers) {
        per_row += 2ull * c->ple_heads + c->ple_embed_dim + wide + c->hidden_size;
    }
    uint64_t per_logit = wide + c->hidden_size + 3ull * c->vocab_size + 8;
    uint64_t seqs = b->max_seqs, ctl = add(qx_ctl_bytes(rows, logit_rows, seqs),
                                           qx_ctl_bytes(logit_rows, logit_rows, seqs));
    uint64_t by_seq = wide;
    if (b->mtp) {
        ctl = add(ctl, add(qx_ctl_bytes(rows, logit_rows, seqs), qx_ctl_bytes(b->n_feed_rows, logit_rows, seqs)));
        by_seq = 2 * wide + 2;
    }
    /* Lists of penalties are made when first asked for. */
    uint64_t ids = b->ctx_tokens < c->vocab_size ? b->ctx_tokens : c->vocab_size;
    uint64_t lists = mul(logit_rows, add(mul(ids, 8), sizeof(struct qx_penalty)));
    uint64_t constants = 2ull * c->rotary_dim + (c->n_ple_layers ? 8ull * c->ngram_size + 16ull * c->ple_heads : 0);
    b->scratch_bytes = add(mul(4, add(add(mul(rows, per_row), mul(logit_rows, per_logit)),
                                      add(b->scratch_floats, b->iscratch_ints))),
                           add(add(ctl, mul(add(mul(seqs, by_seq), mul(n_prefixes, wide)), 4)), add(lists, constants)));
    b->host_bytes = add(add(ctl, lists), add(4ull * b->n_pages, add(mul(logit_rows, 12), mul(seqs, 64))));
    if (b->scratch_bytes == UINT64_MAX || b->state_bytes == UINT64_MAX || b->kv_bytes == UINT64_MAX) {
        return qx_fail(err, QX_E_PLAN, "memory-plan", "the sizes of this plan overflow 64 bits");
    }
    return 0;
}
