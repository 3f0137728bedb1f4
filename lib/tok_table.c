/* tok_table.c: from what was read to flat tables. Texts of all tokens lie in one buffer in their byte
 * form; both hash tables hold ids only, so loading allocates a handful of blocks whatever the
 * vocabulary's size. */
#include "tok_loader.h"

#include "alloc.h"
#include "utf8.h"

#include <string.h>

/* Ids may have gaps, but a small file must not make a large table. */
#define MAX_ID_GAP (1u << 20)

/* Text of a vocabulary entry as bytes: the printable alphabet of byte-level BPE undone. Entries that do
 * not use it (or tokenizers that do not) keep their own bytes. */
static void vocab_bytes(const struct qx_tok_loader *l, const char *p, size_t n, struct qx_buf *out)
{
    size_t start = out->n;
    for (size_t i = 0; l->byte_level && i < n;) {
        uint32_t c;
        int len = qx_utf8_decode(p + i, n - i, &c);
        if (len <= 0 || c >= QX_ARRAY_LEN(l->byte_of) || l->byte_of[c] < 0) {
            out->n = start;
            break;
        }
        qx_buf_chr(out, (char)l->byte_of[c]);
        i += (size_t)len;
    }
    if (out->n == start) {
        qx_buf_add(out, p, n);
    }
}

static uint64_t table_size(uint64_t n)
{
    uint64_t size = 16;
    while (size < 2 * n) {
        size *= 2;
    }
    return size;
}

static void alphabet(struct qx_tok_loader *l)
{
    int next = 256;
    memset(l->byte_of, -1, sizeof l->byte_of);
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        l->byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* Entries by id, with base tokens in their byte form, and the hash table of base tokens. */
static int build_vocab(struct qx_tok_loader *l)
{
    struct qx_tok *t = l->t;
    struct qx_buf bytes = {0};
    if (l->max_id >= 8 * l->n + MAX_ID_GAP) {
        return qx_tok_bad(l, "tokenizer-value", "token id %u in a tokenizer of %zu tokens", l->max_id, l->n);
    }
    uint64_t size = table_size(l->n);
    t->n_ids = l->n ? l->max_id + 1 : 0;
    t->entries = qx_calloc(t->n_ids ? t->n_ids : 1, sizeof *t->entries);
    t->slots = qx_malloc(size * sizeof *t->slots);
    t->added = qx_calloc(l->n - l->n_base + 1, sizeof *t->added);
    if (!t->entries || !t->slots || !t->added) {
        return qx_fail_nomem(l->err);
    }
    memset(t->slots, 0xff, size * sizeof *t->slots);
    t->slot_mask = size - 1;
    for (size_t i = 0; i < l->n; i++) {
        const struct qx_tok_loaded *e = &l->list[i];
        struct qx_tok_entry *x = &t->entries[e->id];
        uint64_t off = bytes.n;
        if (e->added) {
            /* Replaces a base token of the same id in text; ids stay unique in the list. */
            if (x->added) {
                if (x->len != e->len || !bytes.p ||
                    memcmp(bytes.p + x->off, t->bytes.p + e->off, e->len) != 0) {
                    qx_buf_fini(&bytes);
                    l->file = e->in_config ? QX_TOK_CONFIG : l->file;
                    return qx_tok_bad(l, "tokenizer-value", "two added tokens have the id %u", e->id);
                }
                x->special = x->special || e->special;
                continue;
            }
            qx_buf_add(&bytes, t->bytes.p + e->off, e->len);
        } else {
            if (x->present && !x->added) {
                qx_buf_fini(&bytes);
                return qx_tok_bad(l, "tokenizer-value", "two tokens have the id %u", e->id);
            }
            vocab_bytes(l, t->bytes.p + e->off, e->len, &bytes);
        }
        if (bytes.failed) {
            qx_buf_fini(&bytes);
            return qx_fail_nomem(l->err);
        }
        *x = (struct qx_tok_entry){.off = off, .len = (uint32_t)(bytes.n - off), .present = true,
                                   .special = e->special, .added = e->added};
        if (e->added) {
            t->added[t->n_added++] = e->id;
            continue;
        }
        uint64_t h = qx_tok_text_hash(bytes.p + off, x->len), s = h & t->slot_mask;
        while (t->slots[s].id != QX_TOK_NONE) {
            s = (s + 1) & t->slot_mask;
        }
        t->slots[s] = (struct qx_tok_slot){(uint32_t)(h >> 32), e->id};
    }
    qx_buf_fini(&t->bytes);
    t->bytes = bytes;
    for (unsigned b = 0; b < 256; b++) {
        char c = (char)b;
        t->byte_id[b] = qx_tok_lookup(t, &c, 1);
    }
    return 0;
}

/* Base tokens must come before added ones in the list, so that an added token with the id of a base
 * token wins whatever the order in the file. */
static int order_base_first(struct qx_tok_loader *l)
{
    struct qx_tok_loaded *sorted = qx_malloc((l->n + 1) * sizeof *sorted);
    size_t k = 0;
    if (!sorted) {
        return qx_fail_nomem(l->err);
    }
    for (int added = 0; added < 2; added++) {
        for (size_t i = 0; i < l->n; i++) {
            if (l->list[i].added == (added != 0)) {
                sorted[k++] = l->list[i];
            }
        }
    }
    qx_free(l->list);
    l->list = sorted;
    l->cap = l->n + 1;
    return 0;
}

static int add_merge(struct qx_tok_loader *l, const char *a, size_t na, const char *b, size_t nb, uint64_t rank)
{
    struct qx_tok *t = l->t;
    l->tmp.n = 0;
    vocab_bytes(l, a, na, &l->tmp);
    size_t na2 = l->tmp.n;
    vocab_bytes(l, b, nb, &l->tmp);
    if (l->tmp.failed) {
        return qx_fail_nomem(l->err);
    }
    struct qx_merge m = {.left = qx_tok_lookup(t, l->tmp.p, na2),
                         .right = qx_tok_lookup(t, l->tmp.p + na2, l->tmp.n - na2),
                         .rank = (uint32_t)rank,
                         .id = qx_tok_lookup(t, l->tmp.p, l->tmp.n)};
    if (m.left == QX_TOK_NONE || m.right == QX_TOK_NONE || m.id == QX_TOK_NONE || rank >= INT32_MAX) {
        return qx_tok_bad(l, "tokenizer-value", "merge %llu uses a token that is not in the vocabulary",
                   (unsigned long long)rank);
    }
    void *p = l->pairs;
    if (!qx_grow(&p, &l->pairs_cap, l->n_pairs + 1, sizeof *l->pairs)) {
        return qx_fail_nomem(l->err);
    }
    l->pairs = p;
    l->pairs[l->n_pairs++] = m;
    return 0;
}

/* Merges are pairs ["a", "b"] or texts "a b". */
static int read_merges(struct qx_tok_loader *l)
{
    struct qx_json_pull j;
    struct qx_buf a = {0};
    int rc = 0;
    uint64_t rank = 0, base = (uint64_t)(l->merges_begin - l->text);
    qx_json_pull_init(&j, l->merges_begin, (size_t)(l->merges_end - l->merges_begin));
    l->at = &j;
    l->at_base = base;
    qx_json_next(&j);
    while (rc == 0 && qx_json_next(&j) != QX_JSON_ARRAY_END) {
        if (j.type == QX_JSON_STRING) {
            const char *space = memchr(j.text.p, ' ', j.text.n);
            if (!space) {
                rc = qx_tok_bad(l, "tokenizer-value", "merge %llu has no space", (unsigned long long)rank);
                break;
            }
            size_t n = (size_t)(space - j.text.p);
            rc = add_merge(l, j.text.p, n, space + 1, j.text.n - n - 1, rank);
        } else if (j.type == QX_JSON_ARRAY) {
            bool pair = false;
            a.n = 0;
            if (qx_json_next(&j) == QX_JSON_STRING) {
                qx_buf_add(&a, j.text.p, j.text.n);
                if (a.failed) {
                    rc = qx_fail_nomem(l->err);
                } else if (qx_json_next(&j) == QX_JSON_STRING) {
                    rc = add_merge(l, a.p ? a.p : "", a.n, j.text.p, j.text.n, rank);
                    pair = qx_json_next(&j) == QX_JSON_ARRAY_END;
                }
            }
            if (rc == 0 && !pair) {
                rc = qx_tok_bad(l, "tokenizer-value", "merge %llu is not a pair", (unsigned long long)rank);
            }
        } else {
            rc = j.type == QX_JSON_ERROR
                     ? qx_tok_json_error(l, &j, base)
                     : qx_tok_bad(l, "tokenizer-value", "merge %llu is not a pair", (unsigned long long)rank);
        }
        rank++;
    }
    l->at = NULL;
    l->at_base = 0;
    qx_buf_fini(&a);
    qx_json_pull_fini(&j);
    return rc;
}

static int build_merges(struct qx_tok_loader *l)
{
    struct qx_tok *t = l->t;
    int rc = l->merges_begin ? read_merges(l) : 0;
    if (rc) {
        return rc;
    }
    uint64_t size = table_size(l->n_pairs);
    t->merges = qx_malloc(size * sizeof *t->merges);
    if (!t->merges) {
        return qx_fail_nomem(l->err);
    }
    memset(t->merges, 0xff, size * sizeof *t->merges);
    t->merge_mask = size - 1;
    for (size_t i = 0; i < l->n_pairs; i++) {
        const struct qx_merge *m = &l->pairs[i];
        uint64_t s = qx_tok_pair_hash(m->left, m->right) & t->merge_mask;
        while (t->merges[s].left != QX_TOK_NONE &&
               (t->merges[s].left != m->left || t->merges[s].right != m->right)) {
            s = (s + 1) & t->merge_mask;
        }
        t->merges[s] = *m; /* a pair given twice: the later rank counts, as in other implementations */
    }
    return 0;
}

static int compare_bytes(const struct qx_tok *t, uint32_t a, uint32_t b)
{
    size_t na = t->entries[a].len, nb = t->entries[b].len;
    int c = memcmp(qx_tok_entry_bytes(t, a), qx_tok_entry_bytes(t, b), na < nb ? na : nb);
    return c ? c : na < nb ? -1 : na > nb;
}

/* Heap sort: qsort has no user pointer in C11 and a static one would not be thread safe. */
static void sift(const struct qx_tok *t, uint32_t *v, size_t i, size_t n)
{
    for (;;) {
        size_t k = 2 * i + 1;
        if (k >= n) {
            return;
        }
        if (k + 1 < n && compare_bytes(t, v[k], v[k + 1]) < 0) {
            k++;
        }
        if (compare_bytes(t, v[i], v[k]) >= 0) {
            return;
        }
        uint32_t x = v[i];
        v[i] = v[k];
        v[k] = x;
        i = k;
    }
}

static void sort_added(struct qx_tok *t)
{
    size_t n = t->n_added;
    for (size_t i = n / 2; i-- > 0;) {
        sift(t, t->added, i, n);
    }
    for (size_t m = n; m-- > 1;) {
        uint32_t x = t->added[0];
        t->added[0] = t->added[m];
        t->added[m] = x;
        sift(t, t->added, 0, m);
    }
}

int qx_tok_parse(struct qx_tok **out, const char *text, size_t n, const char *file, const char *config,
                 size_t n_config, struct qx_error *err)
{
    struct qx_error local = {0};
    struct qx_buf eos = {0};
    struct qx_tok_loader *l = qx_calloc(1, sizeof *l);
    struct qx_tok *t = qx_calloc(1, sizeof *t);
    int rc = 0;
    *out = NULL;
    if (!l || !t) {
        qx_free(l);
        qx_free(t);
        return qx_fail_nomem(err);
    }
    l->t = t;
    l->file = file;
    l->text = text;
    l->err = err ? err : &local;
    alphabet(l);
    rc = qx_tok_read_json(l, n);
    if (rc == 0 && config) {
        l->file = QX_TOK_CONFIG;
        rc = qx_tok_read_config(l, config, n_config, &eos);
        l->file = file;
        l->text = text;
    }
    if (rc == 0 && (t->bytes.failed || eos.failed)) {
        rc = qx_fail_nomem(l->err);
    }
    rc = rc ? rc : order_base_first(l);
    rc = rc ? rc : build_vocab(l);
    rc = rc ? rc : build_merges(l);
    if (rc == 0) {
        t->byte_level = l->byte_level;
        sort_added(t);
        t->eos = eos.n ? qx_tok_find(t, eos.p, eos.n) : -1;
    }
    qx_buf_fini(&eos);
    qx_buf_fini(&l->tmp);
    qx_free(l->list);
    qx_free(l->pairs);
    qx_free(l);
    if (rc) {
        qx_tok_close(t);
        return rc;
    }
    *out = t;
    return 0;
}
