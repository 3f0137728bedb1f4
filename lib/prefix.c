/* prefix.c: see prefix.h. A prefix ends where chunks of everyone can end: its end lies on a page, and at the
 * same place within the prompt kernels' blocks of 64 rows as without it, so that starting from it changes no
 * bit of what is read after it. */
#include "prefix.h"

#include "alloc.h"

#include <string.h>
#include <xxhash.h>

#define PROMPT_BLOCK 64

int qx_prefixes_init(struct qx_prefixes *p, struct qx_model *m, struct qx_error *err)
{
    *p = (struct qx_prefixes){.m = m};
    p->v = qx_calloc(m->budget.n_prefixes + 1u, sizeof *p->v);
    if (!p->v) {
        return qx_fail_nomem(err);
    }
    for (uint32_t i = 0; i < m->budget.n_prefixes; ++i) {
        p->v[i].slot = -1;
    }
    return 0;
}

static void clear(struct qx_model *m, struct qx_prefix *x)
{
    while (x->n_pages) {
        int32_t page = x->pages[--x->n_pages];
        if (--m->page_refs[page] == 0) {
            m->free_pages[m->n_free_pages++] = page;
        }
    }
    if (x->slot >= 0) {
        m->free_slots[m->n_free_slots++] = x->slot;
    }
    if (x->maker) {
        x->maker->at_cut = NULL;
        x->maker->cut = 0;
    }
    qx_free(x->pages);
    qx_free(x->ids);
    *x = (struct qx_prefix){.slot = -1};
}

void qx_prefixes_fini(struct qx_prefixes *p)
{
    for (uint32_t i = 0; p->v && i < p->m->budget.n_prefixes; ++i) {
        p->v[i].maker = NULL;
        clear(p->m, &p->v[i]);
    }
    qx_free(p->v);
    p->v = NULL;
}

static bool begins(const struct qx_prefix *x, const uint32_t *ids, size_t n)
{
    return x->n && n > x->n && XXH3_64bits(ids, x->n * sizeof *ids) == x->hash
           && memcmp(x->ids, ids, x->n * sizeof *ids) == 0;
}

static struct qx_prefix *longest(const struct qx_prefixes *p, const uint32_t *ids, size_t n)
{
    struct qx_prefix *best = NULL;
    for (uint32_t i = 0; i < p->m->budget.n_prefixes; ++i) {
        struct qx_prefix *x = &p->v[i];
        if (!x->maker && (!best || x->n > best->n) && begins(x, ids, n)) {
            best = x;
        }
    }
    return best;
}

bool qx_prefixes_coming(const struct qx_prefixes *p, const uint32_t *ids, size_t n)
{
    const struct qx_prefix *have = longest(p, ids, n);
    for (uint32_t i = 0; i < p->m->budget.n_prefixes; ++i) {
        const struct qx_prefix *x = &p->v[i];
        if (x->maker && (!have || x->n > have->n) && begins(x, ids, n)) {
            return true;
        }
    }
    return false;
}

int qx_prefixes_use(struct qx_prefixes *p, struct qx_line *l, uint64_t *n, struct qx_error *err)
{
    struct qx_model *m = p->m;
    struct qx_seq *s = &m->seqs[l->seq];
    struct qx_prefix *x = longest(p, s->ids, s->n_ids);
    size_t wide = (size_t)m->cfg->hc_count * m->cfg->hidden_size;
    *n = 0;
    if (!x || !m->n_free_pages) {
        return 0;
    }
    x->used = ++p->clock;
    for (uint32_t i = 0; i + 1 < x->n_pages; ++i) {
        s->pages[s->n_pages++] = x->pages[i];
        ++m->page_refs[x->pages[i]];
    }
    m->page_table_dirty = true;
    int rc = qx_seq_reserve(m, l->seq, x->n, err);
    /* The draft head writes the row at the boundary with this sequence's next id: an own page. */
    rc = rc ? rc : qx_seq_copy_page(m, x->pages[x->n_pages - 1], s->pages[x->n_pages - 1], err);
    rc = rc ? rc : qx_seq_copy_slot(m, x->slot, s->slots[0], err);
    if (!rc && m->be->copy(m->q, m->b.hold + (size_t)l->seq * wide,
                           m->b.prefix_hold + (size_t)(x - p->v) * wide, wide * 4)) {
        rc = qx_model_op_failed(m, "copy", -1, err);
    }
    if (!rc) {
        s->cur = s->slots[0];
        s->n_done = *n = x->n;
        s->n_mtp = x->n - 1;
        s->held = true;
    }
    return rc;
}

/* The line is at the end of the prefix, its last step's wide states still there. */
static int leave(void *user, struct qx_line *l, struct qx_error *err)
{
    struct qx_prefixes *p = user;
    struct qx_model *m = p->m;
    struct qx_seq *s = &m->seqs[l->seq];
    struct qx_prefix *x = p->v;
    size_t wide = (size_t)m->cfg->hc_count * m->cfg->hidden_size;
    while (x->maker != l) {
        ++x; /* a line has one exactly while it has a cut */
    }
    x->maker = NULL;
    l->at_cut = NULL;
    l->cut = 0;
    x->slot = m->free_slots[--m->n_free_slots];
    int rc = qx_seq_copy_slot(m, s->cur, x->slot, err);
    if (!rc && m->be->copy(m->q, m->b.prefix_hold + (size_t)(x - p->v) * wide,
                           m->b.x + (size_t)(l->row0 + l->n_kept - 1) * wide, wide * 4)) {
        rc = qx_model_op_failed(m, "copy", -1, err);
    }
    for (uint64_t n = x->n / m->budget.page_tokens; x->n_pages < n; ++x->n_pages) {
        x->pages[x->n_pages] = s->pages[x->n_pages];
        ++m->page_refs[x->pages[x->n_pages]];
    }
    return rc;
}

/* The empty place, or the least recently used one. */
static struct qx_prefix *place(struct qx_prefixes *p)
{
    struct qx_prefix *best = NULL;
    for (uint32_t i = 0; i < p->m->budget.n_prefixes; ++i) {
        struct qx_prefix *x = &p->v[i];
        if (!x->maker && (!best || x->used < best->used)) {
            best = x;
        }
    }
    return best;
}

void qx_prefixes_make(struct qx_prefixes *p, struct qx_line *l, size_t shared)
{
    struct qx_model *m = p->m;
    const struct qx_seq *s = &m->seqs[l->seq];
    size_t pt = m->budget.page_tokens, n = shared / pt * pt;
    while (n && (n - l->read_from) % m->budget.chunk_rows % PROMPT_BLOCK) {
        n -= pt;
    }
    struct qx_prefix *x = n > s->n_done ? place(p) : NULL;
    if (!x) {
        return;
    }
    clear(m, x);
    x->ids = qx_malloc(n * sizeof *x->ids);
    x->pages = qx_malloc(n / pt * sizeof *x->pages);
    if (!x->ids || !x->pages || m->n_free_slots == 0) {
        clear(m, x); /* it only saves work */
        return;
    }
    memcpy(x->ids, s->ids, n * sizeof *x->ids);
    x->n = n;
    x->hash = XXH3_64bits(x->ids, n * sizeof *x->ids);
    x->used = ++p->clock;
    x->maker = l;
    l->cut = n;
    l->at_cut = leave;
    l->cut_user = p;
}

void qx_prefixes_forget(struct qx_prefixes *p, const struct qx_line *l)
{
    for (uint32_t i = 0; i < p->m->budget.n_prefixes; ++i) {
        if (p->v[i].maker == l) {
            clear(p->m, &p->v[i]);
        }
    }
}

bool qx_prefixes_drop(struct qx_prefixes *p)
{
    struct qx_prefix *best = NULL;
    for (uint32_t i = 0; i < p->m->budget.n_prefixes; ++i) {
        struct qx_prefix *x = &p->v[i];
        if (x->n && !x->maker && (!best || x->used < best->used)) {
            best = x;
        }
    }
    if (best) {
        clear(p->m, best);
    }
    return best != NULL;
}
