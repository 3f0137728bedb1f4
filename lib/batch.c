/* batch.c: many requests over one model: continuous batching. Requests are admitted in order as sequences
 * become free; every round takes all admitted ones. A prefix that a request shares with others is read once
 * (prefix.c). */
#include "prefix.h"

#include "alloc.h"

#include <string.h>

struct entry {
    struct qx_request r;        /* ids and stop ids owned */
    struct qx_line line;
    struct qx_error err;
    bool active;
};

struct qx_batch {
    struct qx_model *m;
    struct entry **entries;
    size_t n, cap, next;        /* next to admit */
    struct qx_line **lines;     /* [max_seqs] active */
    struct qx_prefixes prefixes;
    struct qx_batch_stats stats;
};

int qx_batch_create(struct qx_batch **out, struct qx_model *m, struct qx_error *err)
{
    *out = NULL;
    struct qx_batch *b = qx_calloc(1, sizeof *b);
    if (b) {
        b->m = m;
        b->lines = qx_calloc(m->budget.max_seqs, sizeof *b->lines);
    }
    int rc = b && b->lines ? qx_prefixes_init(&b->prefixes, m, err) : qx_fail_nomem(err);
    if (rc) {
        qx_free(b ? b->lines : NULL);
        qx_free(b);
        return rc;
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
    qx_prefixes_fini(&b->prefixes);
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
        qx_prefixes_forget(&b->prefixes, &e->line);
        qx_seq_close(b->m, e->line.seq);
        e->active = false;
    }
    ++b->stats.n_done;
    b->stats.n_tokens += e->line.stats.n_tokens;
    if (e->r.on_done) {
        e->r.on_done(e->r.params.user, &e->line.stats, err);
    }
}

/* ---- shared prefixes ---------------------------------------------------------------------- */

/* Requests behind the next one that are looked at for a common beginning. */
#define LOOK_AHEAD 256

static size_t common(const struct qx_request *a, const struct qx_request *b)
{
    size_t n = a->n_ids < b->n_ids ? a->n_ids : b->n_ids, i = 0;
    while (i < n && a->ids[i] == b->ids[i]) {
        ++i;
    }
    return i;
}

/* The most that the next request shares with a later one, short of either's end. */
static size_t shared_ids(const struct qx_batch *b)
{
    const struct qx_request *first = &b->entries[b->next]->r;
    size_t best = 0, end = b->n - b->next > LOOK_AHEAD ? b->next + LOOK_AHEAD : b->n;
    for (size_t i = b->next + 1; i < end; ++i) {
        const struct qx_request *r = &b->entries[i]->r;
        size_t n = common(first, r);
        n = n == first->n_ids || n == r->n_ids ? (n ? n - 1 : 0) : n;
        best = n > best ? n : best;
    }
    return best;
}

/* ---- running ------------------------------------------------------------------------------ */

static int admit(struct qx_batch *b, uint32_t *n_lines, struct qx_error *err)
{
    struct qx_model *m = b->m;
    while (b->next < b->n && *n_lines < m->budget.max_seqs) {
        struct entry *e = b->entries[b->next];
        struct qx_error why;
        if (*n_lines && qx_prefixes_coming(&b->prefixes, e->r.ids, e->r.n_ids)) {
            return 0; /* what it begins with is being read: it starts from there, in a moment */
        }
        size_t shared = shared_ids(b);
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
        uint64_t from_prefix = 0;
        rc = rc ? rc : qx_prefixes_use(&b->prefixes, &e->line, &from_prefix, &why);
        b->stats.shared_tokens += from_prefix;
        if (rc) {
            finish(b, e, &why);
            continue;
        }
        if (!e->r.params.n_max || e->r.n_ids >= m->budget.ctx_tokens) {
            e->line.stats.reason = e->r.params.n_max ? QX_STOP_CONTEXT : QX_STOP_LENGTH;
            finish(b, e, NULL);
            continue;
        }
        qx_prefixes_make(&b->prefixes, &e->line, shared);
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
 * pages that only prefixes hold, those go, the least used first. What sequences share stays with them. */
static void make_room(struct qx_batch *b, uint32_t n_lines)
{
    struct qx_model *m = b->m;
    uint64_t need = 0;
    for (uint32_t i = 0; i < n_lines; ++i) {
        uint64_t most = pages_at_most(m, &entry_of(b->lines[i])->r);
        uint32_t held = m->seqs[b->lines[i]->seq].n_pages;
        need += most > held ? most - held : 0;
    }
    while (need > m->n_free_pages && qx_prefixes_drop(&b->prefixes)) {
    }
}

int qx_batch_run(struct qx_batch *b, struct qx_error *err)
{
    uint64_t t0 = qx_now_ns(), steps0 = b->m->n_steps;
    uint32_t n = 0;
    int rc = 0;
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
    while (qx_prefixes_drop(&b->prefixes)) {
        /* others may want the pages now */
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
