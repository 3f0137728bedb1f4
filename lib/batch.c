/* batch.c: many requests over one model: continuous batching. Requests are admitted in order as sequences
 * become free; every round takes all admitted ones. A prefix that the first request shares with others is
 * computed once: its full pages are shared, its state is copied. */
#include "line.h"

#include "alloc.h"

#include <string.h>

struct entry {
    struct qx_request r;        /* ids and stop ids owned */
    struct qx_line line;
    struct qx_error err;
    bool active;
};

/* A prefix computed once: pages it holds, a state slot, and the wide state of its last row. */
struct prefix {
    uint32_t *ids;
    size_t n;
    int32_t *pages;
    uint32_t n_pages;
    int32_t slot;               /* -1: none taken */
    float *hold;                /* device */
};

struct qx_batch {
    struct qx_model *m;
    struct entry **entries;
    size_t n, cap, next;        /* next to admit */
    struct qx_line **lines;     /* [max_seqs] active */
    struct prefix prefix;
    struct qx_batch_stats stats;
};

int qx_batch_create(struct qx_batch **out, struct qx_model *m, struct qx_error *err)
{
    *out = NULL;
    struct qx_batch *b = qx_calloc(1, sizeof *b);
    if (b) {
        b->m = m;
        b->prefix.slot = -1;
        b->lines = qx_calloc(m->budget.max_seqs, sizeof *b->lines);
    }
    if (!b || !b->lines) {
        qx_free(b);
        return qx_fail_nomem(err);
    }
    *out = b;
    return 0;
}

static void entry_free(struct entry *e)
{
    if (e) {
        qx_free((void *)(uintptr_t)e->r.ids);
        qx_free((void *)(uintptr_t)e->r.params.stop_ids);
        qx_free(e);
    }
}

static void prefix_drop(struct qx_batch *b)
{
    struct qx_model *m = b->m;
    while (b->prefix.n_pages) {
        int32_t page = b->prefix.pages[--b->prefix.n_pages];
        if (--m->page_refs[page] == 0) {
            m->free_pages[m->n_free_pages++] = page;
        }
    }
    if (b->prefix.slot >= 0) {
        m->free_slots[m->n_free_slots++] = b->prefix.slot;
    }
    if (b->prefix.hold) {
        m->be->mem_free(m->be, b->prefix.hold);
    }
    qx_free(b->prefix.pages);
    qx_free(b->prefix.ids);
    b->prefix = (struct prefix){.slot = -1};
}

void qx_batch_destroy(struct qx_batch *b)
{
    if (!b) {
        return;
    }
    for (size_t i = 0; i < b->n; ++i) {
        if (b->entries[i] && b->entries[i]->active) {
            qx_seq_close(b->m, b->entries[i]->line.seq);
        }
        entry_free(b->entries[i]);
    }
    prefix_drop(b);
    qx_free(b->entries);
    qx_free(b->lines);
    qx_free(b);
}

int qx_batch_add(struct qx_batch *b, const struct qx_request *r, struct qx_error *err)
{
    for (size_t i = 0; i < r->n_ids; ++i) {
        if (r->ids[i] >= b->m->cfg->vocab_size) {
            return qx_fail(err, QX_E_RANGE, "token-range", "id %u is outside the vocabulary of %u rows",
                           r->ids[i], b->m->cfg->vocab_size);
        }
    }
    if (r->n_ids > b->m->budget.ctx_tokens) {
        return qx_fail(err, QX_E_USAGE, "context-exceeded", "%zu tokens are over the context of %llu",
                       r->n_ids, (unsigned long long)b->m->budget.ctx_tokens);
    }
    struct entry *e = qx_calloc(1, sizeof *e);
    if (!e || !qx_grow((void **)&b->entries, &b->cap, b->n + 1, sizeof *b->entries)) {
        qx_free(e);
        return qx_fail_nomem(err);
    }
    e->r = *r;
    uint32_t *ids = qx_malloc((r->n_ids + 1) * sizeof *ids);
    uint32_t *stop = qx_malloc((r->params.n_stop_ids + 1ull) * sizeof *stop);
    e->r.ids = ids;
    e->r.params.stop_ids = stop;
    if (!ids || !stop) {
        entry_free(e);
        return qx_fail_nomem(err);
    }
    if (r->n_ids) {
        memcpy(ids, r->ids, r->n_ids * sizeof *ids);
    }
    if (r->params.n_stop_ids) {
        memcpy(stop, r->params.stop_ids, r->params.n_stop_ids * sizeof *stop);
    }
    b->entries[b->n++] = e;
    return 0;
}

static void finish(struct qx_batch *b, struct entry *e, const struct qx_error *err)
{
    if (e->active) {
        qx_seq_close(b->m, e->line.seq);
        e->active = false;
    }
    ++b->stats.n_done;
    b->stats.n_tokens += e->line.stats.n_tokens;
    if (e->r.on_done) {
        e->r.on_done(e->r.params.user, &e->line.stats, err);
    }
}

/* ---- shared prefix ------------------------------------------------------------------------ */

static size_t common(const struct qx_request *a, const struct qx_request *b)
{
    size_t n = a->n_ids < b->n_ids ? a->n_ids : b->n_ids, i = 0;
    while (i < n && a->ids[i] == b->ids[i]) {
        ++i;
    }
    return i;
}

/* Computes what the next request shares with a later one, in whole pages and short of either's end. */
static int make_prefix(struct qx_batch *b, struct qx_error *err)
{
    struct qx_model *m = b->m;
    size_t best = 0, pt = m->budget.page_tokens;
    const struct qx_request *first = b->next < b->n ? &b->entries[b->next]->r : NULL;
    for (size_t i = b->next + 1; first && i < b->n; ++i) {
        size_t n = common(first, &b->entries[i]->r);
        n = n == first->n_ids || n == b->entries[i]->r.n_ids ? (n ? n - 1 : 0) : n;
        best = n > best ? n : best;
    }
    size_t n = best / pt * pt;
    if (!n || m->n_free_slots <= m->budget.slots_per_seq || m->n_free_pages < n / pt + m->budget.max_pages) {
        return 0;
    }
    struct prefix *p = &b->prefix;
    size_t wide = (size_t)m->cfg->hc_count * m->cfg->hidden_size;
    struct qx_line line = {.consume_only = true, .p = QX_GEN_PARAMS_DEFAULT, .read_to = n};
    struct qx_line *lines = &line;
    int rc = qx_seq_open(m, &line.seq, err);
    if (rc) {
        return rc;
    }
    for (size_t i = 0; i < n && !rc; ++i) {
        rc = qx_seq_push(m, line.seq, first->ids[i], err);
    }
    while (!rc && !line.done) {
        rc = qx_line_round(m, &lines, 1, err);
    }
    struct qx_seq *s = &m->seqs[line.seq];
    p->ids = qx_malloc(n * sizeof *p->ids);
    p->pages = qx_malloc(n / pt * sizeof *p->pages);
    if (!rc && (!p->ids || !p->pages)) {
        rc = qx_fail_nomem(err);
    }
    void *hold = NULL;
    rc = rc ? rc : m->be->mem_alloc(m->be, &hold, wide * 4, err);
    p->hold = hold;
    if (!rc) {
        p->slot = m->free_slots[--m->n_free_slots];
        rc = qx_seq_copy_slot(m, s->cur, p->slot, err);
        rc = rc ? rc : m->be->copy(m->q, p->hold, m->b.hold + (size_t)line.seq * wide, wide * 4);
        memcpy(p->ids, s->ids, n * sizeof *p->ids);
        memcpy(p->pages, s->pages, n / pt * sizeof *p->pages);
        p->n = n;
        for (p->n_pages = 0; p->n_pages < n / pt; ++p->n_pages) {
            ++m->page_refs[p->pages[p->n_pages]];
        }
        b->stats.prefill_tokens += n;
    }
    qx_seq_close(m, line.seq);
    return rc;
}

/* Starts a sequence from the prefix: all pages but the last shared, the last one and the state copied. */
static int use_prefix(struct qx_batch *b, struct entry *e, struct qx_error *err)
{
    struct qx_model *m = b->m;
    const struct prefix *p = &b->prefix;
    struct qx_seq *s = &m->seqs[e->line.seq];
    size_t wide = (size_t)m->cfg->hc_count * m->cfg->hidden_size;
    if (!p->n || e->r.n_ids <= p->n || memcmp(p->ids, e->r.ids, p->n * sizeof *p->ids) != 0) {
        return 0;
    }
    if (!m->n_free_pages) {
        prefix_drop(b);
        return 0;
    }
    for (uint32_t i = 0; i + 1 < p->n_pages; ++i) {
        s->pages[s->n_pages++] = p->pages[i];
        ++m->page_refs[p->pages[i]];
    }
    m->page_table_dirty = true;
    int rc = qx_seq_reserve(m, e->line.seq, p->n, err);
    /* The draft head writes the row at the boundary with this sequence's next id: an own page. */
    rc = rc ? rc : qx_seq_copy_page(m, p->pages[p->n_pages - 1], s->pages[p->n_pages - 1], err);
    rc = rc ? rc : qx_seq_copy_slot(m, p->slot, s->slots[0], err);
    rc = rc ? rc : m->be->copy(m->q, m->b.hold + (size_t)e->line.seq * wide, p->hold, wide * 4);
    if (!rc) {
        s->cur = s->slots[0];
        s->n_done = p->n;
        s->n_mtp = p->n - 1;
        s->held = true;
        b->stats.shared_tokens += p->n;
    }
    return rc;
}

/* ---- running ------------------------------------------------------------------------------ */

static int admit(struct qx_batch *b, uint32_t *n_lines, struct qx_error *err)
{
    struct qx_model *m = b->m;
    while (b->next < b->n && *n_lines < m->budget.max_seqs) {
        struct entry *e = b->entries[b->next];
        struct qx_error why;
        e->line = (struct qx_line){.p = e->r.params, .error = &e->err, .read_to = e->r.n_ids};
        int rc = qx_seq_open(m, &e->line.seq, &why);
        if (rc) {
            if (*n_lines) {
                return 0; /* other objects hold sequences: go on with those at hand */
            }
            if (err) {
                *err = why;
            }
            return rc;
        }
        e->active = true;
        ++b->next;
        for (size_t i = 0; i < e->r.n_ids && !rc; ++i) {
            rc = qx_seq_push(m, e->line.seq, e->r.ids[i], &why);
        }
        rc = rc ? rc : qx_line_start(m, &e->line, &why);
        rc = rc ? rc : use_prefix(b, e, &why);
        if (rc) {
            finish(b, e, &why);
            continue;
        }
        if (!e->r.params.n_max || e->r.n_ids >= m->budget.ctx_tokens) {
            e->line.stats.reason = e->r.params.n_max ? QX_STOP_CONTEXT : QX_STOP_LENGTH;
            finish(b, e, NULL);
            continue;
        }
        b->stats.prefill_tokens += e->r.n_ids - m->seqs[e->line.seq].n_done;
        b->lines[(*n_lines)++] = &e->line;
    }
    return 0;
}

static struct entry *entry_of(struct qx_line *l)
{
    return (struct entry *)(void *)((char *)l - offsetof(struct entry, line));
}

/* Pages a request can come to hold: its prompt, what it may generate, and a round of drafts. */
static uint64_t pages_at_most(const struct qx_model *m, const struct qx_request *r)
{
    uint64_t tokens;
    if (!qx_add_u64(r->n_ids, r->params.n_max, &tokens) ||
        !qx_add_u64(tokens, m->budget.draft_max + 1ull, &tokens) || tokens > m->budget.ctx_tokens) {
        return m->budget.max_pages;
    }
    return qx_ceil_div(tokens, m->budget.page_tokens);
}

/* Pages are planned for max_seqs sequences and no prefix beside them: when those at work could need the
 * pages that only the prefix holds, it goes. What they share stays with them. */
static void make_room(struct qx_batch *b, uint32_t n_lines)
{
    struct qx_model *m = b->m;
    uint64_t need = 0;
    for (uint32_t i = 0; i < n_lines; ++i) {
        uint64_t most = pages_at_most(m, &entry_of(b->lines[i])->r);
        uint32_t held = m->seqs[b->lines[i]->seq].n_pages;
        need += most > held ? most - held : 0;
    }
    if (b->prefix.n && need > m->n_free_pages) {
        prefix_drop(b);
    }
}

int qx_batch_run(struct qx_batch *b, struct qx_error *err)
{
    uint64_t t0 = qx_now_ns(), steps0 = b->m->n_steps;
    uint32_t n = 0;
    prefix_drop(b);
    int rc = make_prefix(b, err);
    while (!rc && (b->next < b->n || n)) {
        rc = admit(b, &n, err);
        if (rc || !n) {
            break;
        }
        make_room(b, n);
        rc = qx_line_can_free(b->m, b->lines, n) ? qx_line_free(b->m, b->lines, n, err)
                                                 : qx_line_round(b->m, b->lines, n, err);
        uint32_t kept = 0;
        for (uint32_t i = 0; i < n && !rc; ++i) {
            struct entry *e = entry_of(b->lines[i]);
            if (b->lines[i]->done) {
                finish(b, e, e->err.code ? &e->err : NULL);
            } else {
                b->lines[kept++] = b->lines[i];
            }
        }
        n = rc ? n : kept;
    }
    for (uint32_t i = 0; i < n && rc; ++i) {
        finish(b, entry_of(b->lines[i]), err);
    }
    for (size_t i = 0; i < b->next; ++i) {
        entry_free(b->entries[i]); /* done: their memory must not grow with the number of requests */
        b->entries[i] = NULL;
    }
    if (b->next) {
        memmove(b->entries, b->entries + b->next, (b->n - b->next) * sizeof *b->entries);
    }
    b->n -= b->next;
    b->next = 0;
    b->stats.steps += b->m->n_steps - steps0;
    b->stats.elapsed_ns += qx_now_ns() - t0;
    return rc;
}

void qx_batch_stats(const struct qx_batch *b, struct qx_batch_stats *out)
{
    *out = b->stats;
}
