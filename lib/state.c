/* state.c: working buffers, recurrent states in slots, caches in pages, and the sequences that own them.
 * Everything is allocated here at load and only handed round later. Sizes come from budget.c; a
 * difference between the two would show in qx_model_info and is tested. */
#include "engine.h"

#include "alloc.h"

#include <string.h>

/* Takes n elements of device memory into *p. */
#define TAKE(p, n)                                                                      \
    do {                                                                                \
        if ((rc = qx_model_mem(m, &(p), (uint64_t)(n) * sizeof *(p), err)) != 0) {      \
            return rc;                                                                  \
        }                                                                               \
    } while (0)

static void step_arrays(struct qx_step *s, int32_t **p, uint64_t rows)
{
    int32_t **member[] = {&s->id, &s->pos, &s->seq, &s->first, &s->state_in, &s->state_out};
    for (size_t i = 0; i < QX_ARRAY_LEN(member); ++i) {
        *member[i] = *p;
        *p += rows;
    }
}

static int alloc_ctl(struct qx_model *m, struct qx_ctl *c, uint64_t rows, struct qx_error *err)
{
    const struct qx_budget *g = &m->budget;
    uint64_t logits = g->n_logit_rows, seqs = g->max_seqs;
    /* 8-byte members first. */
    uint64_t params = logits * sizeof(struct qx_sample_params);
    c->n_bytes = qx_ctl_bytes(rows, logits, seqs);
    int rc = qx_model_host_mem_mapped(m, &c->host, &c->host_dev, c->n_bytes, err);
    rc = rc ? rc : qx_model_mem(m, &c->dev, c->n_bytes, err);
    if (rc) {
        return rc;
    }
    for (int side = 0; side < 2; ++side) {
        char *base = side ? c->dev : c->host;
        struct qx_step *s = side ? &c->step : &c->step_host;
        int32_t *p = (int32_t *)(void *)(base + params);
        *(side ? &c->params : &c->params_host) = (struct qx_sample_params *)(void *)base;
        step_arrays(s, &p, rows);
        *(side ? &c->src_x : &c->src_x_host) = p;
        *(side ? &c->src_hold : &c->src_hold_host) = p + rows;
        p += 2 * rows;
        *(side ? &c->hold : &c->hold_host) = p;
        p += seqs;
        *(side ? &c->pick : &c->pick_host) = p;
        *(side ? &c->spos : &c->spos_host) = p + logits;
        p += 2 * logits;
        step_arrays(side ? &c->chain : &c->chain_host, &p, seqs);
        *(side ? &c->base : &c->base_host) = p;
        *(side ? &c->count : &c->count_host) = p + seqs;
        *(side ? &c->least : &c->least_host) = (float *)(void *)(p + 2 * seqs);
        *(side ? &c->forced : &c->forced_host) = p + 3 * seqs;
    }
    return 0;
}

static int alloc_buffers(struct qx_model *m, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_budget *g = &m->budget;
    struct qx_buffers *b = &m->b;
    uint64_t rows = g->n_rows, logits = g->n_logit_rows, h = c->hidden_size;
    uint64_t wide = c->hc_count * h;
    int rc;
    TAKE(b->x, rows * wide);
    TAKE(b->hx, logits * wide);
    TAKE(b->y, rows * h);
    TAKE(b->m, rows * h);
    TAKE(b->e, rows * h);
    TAKE(b->e2, rows * h);
    TAKE(b->inj_a, rows * c->hc_count);
    TAKE(b->inj_b, rows * c->hc_count);
    TAKE(b->proj, rows * g->proj_width);
    TAKE(b->mixed, rows * g->mixed_width);
    TAKE(b->q, rows * c->n_heads * c->head_dim);
    TAKE(b->iq, rows * c->indexer_n_heads * c->indexer_head_dim);
    TAKE(b->scratch, g->scratch_floats);
    TAKE(b->scores, rows * g->max_blocks);
    TAKE(b->block, rows * g->budget_blocks);
    TAKE(b->n_block, rows);
    TAKE(b->expert, rows * c->n_experts_per_tok);
    TAKE(b->route, rows * c->n_experts_per_tok);
    TAKE(b->route_logits, rows * c->n_experts);
    TAKE(b->iscratch, g->iscratch_ints);
    if (m->has_ple) {
        TAKE(b->ple_row, rows * c->ple_heads);
        TAKE(b->ple_e, rows * c->ple_embed_dim);
        TAKE(b->ple_key, rows * wide);
        TAKE(b->ple_value, rows * h);
        if (m->place == QX_TABLE_DISK
            && (rc = qx_model_host_mem(m, &b->host_ple_e, rows * c->ple_embed_dim * 4, err)) != 0) {
            return rc;
        }
    }
    if (m->mtp.loaded) {
        TAKE(b->mx, rows * wide);
        TAKE(b->mhold, g->max_seqs * wide);
        TAKE(b->next_id, g->max_seqs);
        TAKE(b->next_prob, g->max_seqs);
    }
    TAKE(b->hold, g->max_seqs * wide);
    TAKE(b->prefix_hold, g->n_prefixes * wide);
    TAKE(b->h, logits * h);
    TAKE(b->logits, logits * c->vocab_size);
    TAKE(b->sample_scratch, logits * c->vocab_size * 2);
    TAKE(b->out_id, logits);
    TAKE(b->out_value, logits);
    TAKE(b->out_prob, logits);
    rc = qx_model_host_mem_mapped(m, &b->host_id, &b->told_id, logits * 4, err);
    rc = rc ? rc : qx_model_host_mem_mapped(m, &b->host_drafts, &b->told_drafts, logits * 8, err);
    rc = rc ? rc : qx_model_host_mem_mapped(m, &b->ring_host, &b->ring, 4ull * QX_RING * g->max_seqs, err);
    rc = rc ? rc : qx_model_host_mem_mapped(m, &b->count_host, &b->count, sizeof *b->count, err);
    rc = rc ? rc : alloc_ctl(m, &m->ctl, logits, err);
    rc = rc ? rc : alloc_ctl(m, &m->pctl, rows, err);
    if (!rc && m->mtp.loaded) {
        rc = alloc_ctl(m, &m->mctl, g->n_feed_rows, err);
        rc = rc ? rc : alloc_ctl(m, &m->mpctl, rows, err);
    }
    return rc;
}

static int alloc_states(struct qx_model *m, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    const struct qx_budget *g = &m->budget;
    uint64_t channels = 2ull * c->gdn_k_heads * c->gdn_k_dim + (uint64_t)c->gdn_v_heads * c->gdn_v_dim;
    int rc;
    m->gdn_s = qx_calloc(m->n_gdn + 1, sizeof *m->gdn_s);
    m->gdn_conv = qx_calloc(m->n_gdn + 1, sizeof *m->gdn_conv);
    m->kv = qx_calloc(m->n_qsa + 1, sizeof *m->kv);
    if (!m->gdn_s || !m->gdn_conv || !m->kv) {
        return qx_fail_nomem(err);
    }
    m->gdn_s_stride = (uint64_t)c->gdn_v_heads * c->gdn_k_dim * c->gdn_v_dim;
    m->gdn_conv_stride = (c->gdn_conv_kernel - 1) * channels;
    for (uint32_t i = 0; i < m->n_gdn; ++i) {
        TAKE(m->gdn_s[i], g->n_slots * m->gdn_s_stride);
        TAKE(m->gdn_conv[i], g->n_slots * m->gdn_conv_stride);
    }
    if (m->has_ple) {
        m->ple_conv_stride = (uint64_t)(c->ple_conv_kernel - 1) * c->ngram_size * c->hc_count
                             * c->hidden_size;
        m->ple_prev_stride = c->ngram_size;
        TAKE(m->ple_conv, g->n_slots * m->ple_conv_stride);
        TAKE(m->ple_prev, g->n_slots * m->ple_prev_stride);
    }
    uint64_t elem = m->kv_bf16 ? 2 : 4, rows = (uint64_t)g->n_pages * g->page_tokens;
    uint64_t kv = rows * c->n_kv_heads * c->head_dim * elem, raw = rows * c->indexer_head_dim * elem;
    for (uint32_t i = 0; i < m->n_qsa + (m->mtp.loaded ? 1 : 0); ++i) {
        struct qx_kv_layer *l = &m->kv[i];
        rc = qx_model_mem(m, &l->k, kv, err);
        rc = rc ? rc : qx_model_mem(m, &l->v, kv, err);
        rc = rc ? rc : qx_model_mem(m, &l->raw, raw, err);
        rc = rc ? rc : qx_model_mem(m, &l->pooled, raw / c->indexer_compress_ratio, err);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

static int alloc_seqs(struct qx_model *m, struct qx_error *err)
{
    const struct qx_budget *g = &m->budget;
    int rc;
    TAKE(m->page_table_dev, g->n_pages);
    if ((rc = qx_model_host_mem(m, &m->page_table_host, 4ull * g->n_pages, err)) != 0) {
        return rc;
    }
    m->free_pages = qx_calloc(g->n_pages, sizeof *m->free_pages);
    m->page_refs = qx_calloc(g->n_pages, sizeof *m->page_refs);
    m->free_slots = qx_calloc(g->n_slots, sizeof *m->free_slots);
    m->seqs = qx_calloc(g->max_seqs, sizeof *m->seqs);
    if (!m->free_pages || !m->page_refs || !m->free_slots || !m->seqs) {
        return qx_fail_nomem(err);
    }
    /* Taken from the end, so that the first sequence gets the lowest numbers. */
    for (uint32_t i = 0; i < g->n_pages; ++i) {
        m->free_pages[i] = (int32_t)(g->n_pages - 1 - i);
    }
    for (uint32_t i = 0; i < g->n_slots; ++i) {
        m->free_slots[i] = (int32_t)(g->n_slots - 1 - i);
    }
    m->n_free_pages = g->n_pages;
    m->n_free_slots = g->n_slots;
    for (uint32_t i = 0; i < g->max_seqs; ++i) {
        m->seqs[i].pages = m->page_table_host + (size_t)i * g->max_pages;
    }
    m->page_table_dirty = true;
    return 0;
}

int qx_state_alloc(struct qx_model *m, struct qx_error *err)
{
    int rc = alloc_buffers(m, err);
    rc = rc ? rc : alloc_states(m, err);
    return rc ? rc : alloc_seqs(m, err);
}

void qx_state_free(struct qx_model *m)
{
    if (m->seqs) {
        for (uint32_t i = 0; i < m->budget.max_seqs; ++i) {
            qx_free(m->seqs[i].ids);
        }
    }
    qx_free(m->seqs);
    qx_free(m->free_slots);
    qx_free(m->page_refs);
    qx_free(m->free_pages);
    qx_free(m->kv);
    qx_free(m->gdn_conv);
    qx_free(m->gdn_s);
}

/* ---- sequences ---------------------------------------------------------------------------- */

int qx_seq_open(struct qx_model *m, int32_t *seq, struct qx_error *err)
{
    for (uint32_t i = 0; i < m->budget.max_seqs; ++i) {
        struct qx_seq *s = &m->seqs[i];
        if (s->used) {
            continue;
        }
        s->used = true;
        for (s->n_slots = 0; s->n_slots < m->budget.slots_per_seq; ++s->n_slots) {
            s->slots[s->n_slots] = m->free_slots[--m->n_free_slots];
        }
        *seq = (int32_t)i;
        qx_seq_reset(m, (int32_t)i);
        return 0;
    }
    return qx_fail(err, QX_E_PLAN, "memory-plan", "all %u sequences planned for are in use",
                   m->budget.max_seqs);
}

void qx_seq_reset(struct qx_model *m, int32_t seq)
{
    struct qx_seq *s = &m->seqs[seq];
    while (s->n_pages) {
        int32_t page = s->pages[--s->n_pages];
        if (--m->page_refs[page] == 0) {
            m->free_pages[m->n_free_pages++] = page;
        }
    }
    s->cur = -1;
    s->n_done = s->n_mtp = 0;
    s->n_ids = 0;
    s->held = s->broken = false;
}

void qx_seq_close(struct qx_model *m, int32_t seq)
{
    struct qx_seq *s = &m->seqs[seq];
    qx_seq_reset(m, seq);
    while (s->n_slots) {
        m->free_slots[m->n_free_slots++] = s->slots[--s->n_slots];
    }
    s->used = false;
}

int qx_seq_reserve(struct qx_model *m, int32_t seq, uint64_t n_tokens, struct qx_error *err)
{
    struct qx_seq *s = &m->seqs[seq];
    uint64_t need = qx_ceil_div(n_tokens, m->budget.page_tokens);
    while (s->n_pages < need) {
        if (s->n_pages == m->budget.max_pages || !m->n_free_pages) {
            return qx_fail(err, QX_E_PLAN, "memory-plan", "no cache page left for token %llu",
                           (unsigned long long)n_tokens);
        }
        int32_t page = m->free_pages[--m->n_free_pages];
        m->page_refs[page] = 1;
        s->pages[s->n_pages++] = page;
        m->page_table_dirty = true;
    }
    return 0;
}

int qx_seq_push(struct qx_model *m, int32_t seq, uint32_t id, struct qx_error *err)
{
    struct qx_seq *s = &m->seqs[seq];
    if (!qx_grow((void **)&s->ids, &s->cap_ids, s->n_ids + 1, sizeof *s->ids)) {
        return qx_fail_nomem(err);
    }
    s->ids[s->n_ids++] = id;
    return 0;
}

static int copy_part(struct qx_model *m, void *base, uint64_t size, int32_t from, int32_t to)
{
    return m->be->copy(m->q, (char *)base + size * (uint64_t)to, (char *)base + size * (uint64_t)from, size);
}

int qx_seq_copy_slot(struct qx_model *m, int32_t from, int32_t to, struct qx_error *err)
{
    int rc = 0;
    for (uint32_t i = 0; i < m->n_gdn; ++i) {
        rc |= copy_part(m, m->gdn_s[i], 4 * m->gdn_s_stride, from, to);
        rc |= copy_part(m, m->gdn_conv[i], 4 * m->gdn_conv_stride, from, to);
    }
    if (m->has_ple) {
        rc |= copy_part(m, m->ple_conv, 4 * m->ple_conv_stride, from, to);
        rc |= copy_part(m, m->ple_prev, 4 * m->ple_prev_stride, from, to);
    }
    return rc ? qx_model_op_failed(m, "copy", rc, err) : 0;
}

int qx_seq_copy_page(struct qx_model *m, int32_t from, int32_t to, struct qx_error *err)
{
    const struct qx_config *c = m->cfg;
    uint64_t elem = m->kv_bf16 ? 2 : 4, pt = m->budget.page_tokens;
    uint64_t kv = pt * c->n_kv_heads * c->head_dim * elem, raw = pt * c->indexer_head_dim * elem;
    int rc = 0;
    for (uint32_t i = 0; i < m->n_qsa + (m->mtp.loaded ? 1 : 0); ++i) {
        rc |= copy_part(m, m->kv[i].k, kv, from, to);
        rc |= copy_part(m, m->kv[i].v, kv, from, to);
        rc |= copy_part(m, m->kv[i].raw, raw, from, to);
        rc |= copy_part(m, m->kv[i].pooled, raw / c->indexer_compress_ratio, from, to);
    }
    return rc ? qx_model_op_failed(m, "copy", rc, err) : 0;
}
