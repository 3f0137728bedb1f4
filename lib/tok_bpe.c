/* tok_bpe.c: merges of one piece. Symbols are a linked list over positions; candidate pairs lie in a
 * heap ordered by rank, then position, and are checked again when taken, since their sides may have
 * merged with others meanwhile. */
#include "tok.h"

#include "alloc.h"
#include "utf8.h"

#include <string.h>

struct symbol { uint32_t id; uint32_t prev, next; }; /* indexes; QX_TOK_NONE at the ends, id too if gone */
struct cand { uint32_t rank, at, left, right; };

struct qx_bpe_work {
    struct symbol *sym;
    size_t sym_cap;
    struct cand *heap;
    size_t heap_cap, n_heap;
};

struct qx_bpe_work *qx_bpe_work_create(void)
{
    return qx_calloc(1, sizeof(struct qx_bpe_work));
}

void qx_bpe_work_destroy(struct qx_bpe_work *w)
{
    if (w) {
        qx_free(w->sym);
        qx_free(w->heap);
        qx_free(w);
    }
}

static bool before(const struct cand *a, const struct cand *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static bool push(struct qx_bpe_work *w, struct cand c)
{
    void *p = w->heap;
    if (w->n_heap == w->heap_cap) {
        if (!qx_grow(&p, &w->heap_cap, w->n_heap + 1, sizeof *w->heap)) {
            return false;
        }
        w->heap = p;
    }
    size_t i = w->n_heap++;
    while (i > 0 && before(&c, &w->heap[(i - 1) / 2])) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = c;
    return true;
}

static struct cand pop(struct qx_bpe_work *w)
{
    struct cand top = w->heap[0], last = w->heap[--w->n_heap];
    size_t i = 0;
    for (;;) {
        size_t k = 2 * i + 1;
        if (k >= w->n_heap) {
            break;
        }
        if (k + 1 < w->n_heap && before(&w->heap[k + 1], &w->heap[k])) {
            k++;
        }
        if (!before(&w->heap[k], &last)) {
            break;
        }
        w->heap[i] = w->heap[k];
        i = k;
    }
    if (w->n_heap) {
        w->heap[i] = last;
    }
    return top;
}

static bool consider(const struct qx_tok *t, struct qx_bpe_work *w, uint32_t at)
{
    uint32_t next = at == QX_TOK_NONE ? QX_TOK_NONE : w->sym[at].next;
    if (next == QX_TOK_NONE) {
        return true;
    }
    const struct qx_merge *m = qx_tok_merge(t, w->sym[at].id, w->sym[next].id);
    return !m || push(w, (struct cand){m->rank, at, m->left, m->right});
}

/* Fills w->sym with the piece's bytes or characters. */
static int first_symbols(const struct qx_tok *t, struct qx_bpe_work *w, const char *p, size_t n,
                         uint32_t *n_sym, struct qx_error *err)
{
    void *grown = w->sym;
    uint32_t k = 0;
    if (n >= QX_TOK_NONE) {
        return qx_fail(err, QX_E_RANGE, "text-too-long", "a word of %zu bytes is too long", n);
    }
    if (w->sym_cap < n && !qx_grow(&grown, &w->sym_cap, n, sizeof *w->sym)) {
        return qx_fail_nomem(err);
    }
    w->sym = grown;
    for (size_t i = 0; i < n; k++) {
        uint32_t id, c;
        int len = t->byte_level ? 1 : qx_utf8_decode(p + i, n - i, &c);
        len = len > 0 ? len : 1;
        id = t->byte_level ? t->byte_id[(uint8_t)p[i]] : qx_tok_lookup(t, p + i, (size_t)len);
        if (id == QX_TOK_NONE) {
            return qx_fail(err, QX_E_VALUE, "text-no-token",
                           "the tokenizer has no token for byte 0x%02x of the text", (uint8_t)p[i]);
        }
        w->sym[k] = (struct symbol){id, k - 1, k + 1}; /* k - 1 wraps to QX_TOK_NONE at 0 */
        i += (size_t)len;
    }
    w->sym[k - 1].next = QX_TOK_NONE;
    *n_sym = k;
    return 0;
}

int qx_tok_bpe(const struct qx_tok *t, struct qx_bpe_work *w, const char *p, size_t n,
               struct qx_ids *out, struct qx_error *err)
{
    uint32_t n_sym = 0;
    if (n == 0) {
        return 0;
    }
    if (t->ignore_merges) {
        uint32_t id = qx_tok_lookup(t, p, n);
        if (id != QX_TOK_NONE) {
            return qx_ids_add(out, id) ? 0 : qx_fail_nomem(err);
        }
    }
    int rc = first_symbols(t, w, p, n, &n_sym, err);
    if (rc) {
        return rc;
    }
    w->n_heap = 0;
    for (uint32_t i = 0; i + 1 < n_sym; i++) {
        if (!consider(t, w, i)) {
            return qx_fail_nomem(err);
        }
    }
    while (w->n_heap) {
        struct cand c = pop(w);
        struct symbol *a = &w->sym[c.at];
        if (a->id != c.left || a->next == QX_TOK_NONE || w->sym[a->next].id != c.right) {
            continue;
        }
        const struct qx_merge *m = qx_tok_merge(t, c.left, c.right);
        struct symbol *b = &w->sym[a->next];
        a->id = m->id;
        a->next = b->next;
        b->id = QX_TOK_NONE;
        if (a->next != QX_TOK_NONE) {
            w->sym[a->next].prev = c.at;
        }
        if (!consider(t, w, a->prev) || !consider(t, w, c.at)) {
            return qx_fail_nomem(err);
        }
    }
    for (uint32_t i = 0; i != QX_TOK_NONE; i = w->sym[i].next) {
        if (!qx_ids_add(out, w->sym[i].id)) {
            return qx_fail_nomem(err);
        }
    }
    return 0;
}
