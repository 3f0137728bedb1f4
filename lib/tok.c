/* tok.c: a loaded tokenizer in use: lookups and encoding. */
#include "tok.h"

#include "alloc.h"
#include "utf8.h"

#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- ids -------------------------------------------------------------------------------------- */

bool qx_ids_add(struct qx_ids *ids, uint32_t id)
{
    if (ids->n == ids->cap) {
        void *p = ids->v;
        if (!qx_grow(&p, &ids->cap, ids->n + 1, sizeof *ids->v)) {
            return false;
        }
        ids->v = p;
    }
    ids->v[ids->n++] = id;
    return true;
}

void qx_ids_fini(struct qx_ids *ids)
{
    if (ids) {
        qx_free(ids->v);
        memset(ids, 0, sizeof *ids);
    }
}

/* ---- lookup ----------------------------------------------------------------------------------- */

uint64_t qx_tok_text_hash(const char *p, size_t n)
{
    return XXH3_64bits(p, n);
}

uint32_t qx_tok_lookup(const struct qx_tok *t, const char *p, size_t n)
{
    uint64_t h = qx_tok_text_hash(p, n);
    for (uint64_t i = h & t->slot_mask;; i = (i + 1) & t->slot_mask) {
        const struct qx_tok_slot *s = &t->slots[i];
        if (s->id == QX_TOK_NONE) {
            return QX_TOK_NONE;
        }
        if (s->hash == (uint32_t)(h >> 32) && t->entries[s->id].len == n &&
            !memcmp(qx_tok_entry_bytes(t, s->id), p, n)) {
            return s->id;
        }
    }
}

uint64_t qx_tok_pair_hash(uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

const struct qx_merge *qx_tok_merge(const struct qx_tok *t, uint32_t left, uint32_t right)
{
    for (uint64_t i = qx_tok_pair_hash(left, right) & t->merge_mask;; i = (i + 1) & t->merge_mask) {
        const struct qx_merge *m = &t->merges[i];
        if (m->left == QX_TOK_NONE) {
            return NULL;
        }
        if (m->left == left && m->right == right) {
            return m;
        }
    }
}

void qx_tok_close(struct qx_tok *t)
{
    if (t) {
        qx_buf_fini(&t->bytes);
        qx_free(t->entries);
        qx_free(t->slots);
        qx_free(t->merges);
        qx_free(t->added);
        qx_free(t);
    }
}

/* ---- use ---------------------------------------------------------------------------------------- */

/* The longest added token at p, QX_TOK_NONE if there is none: the range of candidates in the sorted
 * list shrinks with every byte. */
static uint32_t added_at(const struct qx_tok *t, const char *p, size_t n)
{
    size_t lo = 0, hi = t->n_added;
    uint32_t best = QX_TOK_NONE;
    for (size_t k = 0; k < n && lo < hi; k++) {
        uint8_t c = (uint8_t)p[k];
        size_t a = lo, b = hi;
        while (a < b) { /* first with byte k >= c; those that end here sort first */
            size_t m = a + (b - a) / 2;
            const struct qx_tok_entry *e = &t->entries[t->added[m]];
            if (e->len <= k || (uint8_t)qx_tok_entry_bytes(t, t->added[m])[k] < c) {
                a = m + 1;
            } else {
                b = m;
            }
        }
        lo = a;
        b = hi;
        while (a < b) { /* first with byte k > c */
            size_t m = a + (b - a) / 2;
            if ((uint8_t)qx_tok_entry_bytes(t, t->added[m])[k] <= c) {
                a = m + 1;
            } else {
                b = m;
            }
        }
        hi = a;
        if (lo < hi && t->entries[t->added[lo]].len == k + 1) {
            best = t->added[lo];
        }
    }
    return best;
}

static int encode_plain(const struct qx_tok *t, struct qx_bpe_work *w, const char *p, size_t n,
                        struct qx_ids *out, struct qx_error *err)
{
    struct qx_buf b = {0};
    int rc = 0;
    if (t->nfc) {
        rc = qx_nfc(p, n, &b, err);
        p = b.p;
        n = b.n;
    }
    for (size_t i = 0; rc == 0 && i < n;) {
        size_t len = t->split ? qx_tok_split(p + i, n - i) : n - i;
        rc = qx_tok_bpe(t, w, p + i, len, out, err);
        i += len;
    }
    qx_buf_fini(&b);
    return rc;
}

int qx_tok_encode(const struct qx_tok *t, const char *text, size_t n, struct qx_ids *out,
                  struct qx_error *err)
{
    size_t begin = 0, i = 0;
    int rc = 0;
    for (size_t k = 0; k < n;) {
        uint32_t c;
        int len = qx_utf8_decode(text + k, n - k, &c);
        if (len <= 0) {
            return qx_fail(err, QX_E_VALUE, "text-utf8", "text is not UTF-8 at byte %zu", k);
        }
        k += (size_t)len;
    }
    struct qx_bpe_work *w = qx_bpe_work_create();
    if (!w) {
        return qx_fail_nomem(err);
    }
    while (rc == 0 && i < n) {
        uint32_t id = added_at(t, text + i, n - i);
        if (id == QX_TOK_NONE) {
            i++;
            continue;
        }
        rc = encode_plain(t, w, text + begin, i - begin, out, err);
        if (rc == 0 && !qx_ids_add(out, id)) {
            rc = qx_fail_nomem(err);
        }
        i += t->entries[id].len;
        begin = i;
    }
    if (rc == 0) {
        rc = encode_plain(t, w, text + begin, n - begin, out, err);
    }
    qx_bpe_work_destroy(w);
    return rc;
}

uint32_t qx_tok_n_ids(const struct qx_tok *t)
{
    return t->n_ids;
}

const char *qx_tok_bytes(const struct qx_tok *t, uint32_t id, size_t *n)
{
    if (id >= t->n_ids || !t->entries[id].present) {
        *n = 0;
        return NULL;
    }
    *n = t->entries[id].len;
    return qx_tok_entry_bytes(t, id);
}

bool qx_tok_is_special(const struct qx_tok *t, uint32_t id)
{
    return id < t->n_ids && t->entries[id].special;
}

int64_t qx_tok_find(const struct qx_tok *t, const char *s, size_t n)
{
    for (uint32_t i = 0; i < t->n_added; i++) {
        uint32_t id = t->added[i];
        if (t->entries[id].len == n && !memcmp(qx_tok_entry_bytes(t, id), s, n)) {
            return id;
        }
    }
    uint32_t id = qx_tok_lookup(t, s, n);
    return id == QX_TOK_NONE ? -1 : (int64_t)id;
}

int64_t qx_tok_eos(const struct qx_tok *t)
{
    return t->eos;
}
