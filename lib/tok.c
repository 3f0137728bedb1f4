/* tok.c: reading tokenizer.json into flat tables, and encoding a text with them.
 *
 * Texts of all tokens lie in one buffer in their byte form; both hash tables hold ids only, so loading
 * allocates a handful of blocks whatever the vocabulary's size. */
#include "tok.h"

#include "alloc.h"
#include "json_pull.h"
#include "utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* Ids may have gaps, but a small file must not make a large table. */
#define MAX_ID_GAP (1u << 20)

static const char split_expression[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

struct loaded { uint64_t off; uint32_t len, id; bool special, added; };

struct loader {
    struct qx_tok *t;
    const char *file, *text;
    struct qx_error *err;
    struct loaded *list;
    size_t n, cap;
    uint32_t max_id;
    uint64_t n_base;
    struct qx_merge *pairs; /* left, right hold byte offsets' ids once resolved */
    size_t n_pairs, pairs_cap;
    const char *merges_begin, *merges_end;
    bool has_vocab, has_model, byte_level;
    int16_t byte_of[512];   /* code point -> byte, -1 */
    struct qx_buf tmp;
};

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

static const char *entry_bytes(const struct qx_tok *t, uint32_t id)
{
    return t->bytes.p + t->entries[id].off;
}

uint32_t qx_tok_lookup(const struct qx_tok *t, const char *p, size_t n)
{
    uint64_t h = XXH3_64bits(p, n);
    for (uint64_t i = h & t->slot_mask;; i = (i + 1) & t->slot_mask) {
        const struct qx_tok_slot *s = &t->slots[i];
        if (s->id == QX_TOK_NONE) {
            return QX_TOK_NONE;
        }
        if (s->hash == (uint32_t)(h >> 32) && t->entries[s->id].len == n &&
            !memcmp(entry_bytes(t, s->id), p, n)) {
            return s->id;
        }
    }
}

static uint64_t pair_hash(uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

const struct qx_merge *qx_tok_merge(const struct qx_tok *t, uint32_t left, uint32_t right)
{
    for (uint64_t i = pair_hash(left, right) & t->merge_mask;; i = (i + 1) & t->merge_mask) {
        const struct qx_merge *m = &t->merges[i];
        if (m->left == QX_TOK_NONE) {
            return NULL;
        }
        if (m->left == left && m->right == right) {
            return m;
        }
    }
}

/* ---- reading tokenizer.json --------------------------------------------------------------------- */

static int bad(struct loader *l, const char *kind, const char *fmt, ...) QX_PRINTF(3, 4);
static int bad(struct loader *l, const char *kind, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    qx_fail(l->err, !strcmp(kind, "tokenizer-unsupported") ? QX_E_UNSUPPORTED : QX_E_CONFIG, kind, "%s",
            text);
    return qx_error_at(l->err, l->file, NULL, QX_NO_OFF);
}

static int json_error(struct loader *l, const struct qx_json_pull *j, uint64_t base)
{
    if (l->err) {
        *l->err = j->err;
        if (l->err->off != QX_NO_OFF) {
            l->err->off += base;
        }
    }
    qx_error_at(l->err, l->file, NULL, QX_NO_OFF);
    return -(int)j->err.code;
}

static int wrong(struct loader *l, struct qx_json_pull *j, const char *key, const char *want)
{
    if (j->type == QX_JSON_ERROR) {
        return json_error(l, j, 0);
    }
    return bad(l, "tokenizer-value", "'%s' is not %s", key, want);
}

static bool key_is(const struct qx_json_pull *j, const char *name)
{
    return j->text.n == strlen(name) && !memcmp(j->text.p, name, j->text.n);
}

/* Text of a vocabulary entry as bytes: the printable alphabet of byte-level BPE undone. Entries that do
 * not use it (or tokenizers that do not) keep their own bytes. */
static void vocab_bytes(const struct loader *l, const char *p, size_t n, struct qx_buf *out)
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

static int add_loaded(struct loader *l, struct loaded e)
{
    void *p = l->list;
    if (!qx_grow(&p, &l->cap, l->n + 1, sizeof *l->list)) {
        return qx_fail_nomem(l->err);
    }
    l->list = p;
    l->list[l->n++] = e;
    l->max_id = e.id > l->max_id ? e.id : l->max_id;
    return 0;
}

static int read_id(struct loader *l, const struct qx_json_pull *j, const char *what, uint32_t *id)
{
    if (j->type != QX_JSON_NUMBER || !j->is_int || j->negative || j->uint_value >= INT32_MAX) {
        return bad(l, "tokenizer-value", "the id of %s is not a token id", what);
    }
    *id = (uint32_t)j->uint_value;
    return 0;
}

static int read_vocab(struct loader *l, struct qx_json_pull *j)
{
    if (qx_json_next(j) != QX_JSON_OBJECT) {
        return wrong(l, j, "model.vocab", "an object");
    }
    l->has_vocab = true;
    while (qx_json_next(j) == QX_JSON_KEY) {
        /* Kept as written; converted once the pre-tokenizer is known, which may come later. */
        struct loaded e = {.off = l->t->bytes.n, .len = (uint32_t)j->text.n};
        if (j->text.n > UINT32_MAX) {
            return bad(l, "tokenizer-value", "a token is longer than 4 GiB");
        }
        qx_buf_add(&l->t->bytes, j->text.p, j->text.n);
        qx_json_next(j);
        int rc = j->type == QX_JSON_ERROR ? json_error(l, j, 0) : read_id(l, j, "a token", &e.id);
        if (!rc) {
            rc = add_loaded(l, e);
        }
        if (rc) {
            return rc;
        }
        l->n_base++;
    }
    return j->type == QX_JSON_OBJECT_END ? 0 : wrong(l, j, "model.vocab", "an object of ids");
}

/* True when the value about to be read is null, false, 0 or "". */
static bool is_off(struct qx_json_pull *j)
{
    qx_json_next(j);
    return j->type == QX_JSON_NULL || j->type == QX_JSON_FALSE ||
           (j->type == QX_JSON_STRING && j->text.n == 0) || (j->type == QX_JSON_NUMBER && j->f64 == 0);
}

static int read_model(struct loader *l, struct qx_json_pull *j)
{
    static const char *const must_be_off[] = {"dropout", "continuing_subword_prefix",
                                              "end_of_word_suffix", "byte_fallback"};
    if (qx_json_next(j) != QX_JSON_OBJECT) {
        return wrong(l, j, "model", "an object");
    }
    l->has_model = true;
    while (qx_json_next(j) == QX_JSON_KEY) {
        int rc = 0;
        if (key_is(j, "type")) {
            qx_json_next(j);
            if (j->type == QX_JSON_STRING && !key_is(j, "BPE")) {
                return bad(l, "tokenizer-unsupported", "model.type is '%.*s', supported is 'BPE'",
                           (int)(j->text.n < 100 ? j->text.n : 100), j->text.p);
            }
        } else if (key_is(j, "vocab")) {
            rc = read_vocab(l, j);
        } else if (key_is(j, "merges")) {
            qx_json_next(j);
            l->merges_begin = l->text + j->off;
            if (j->type != QX_JSON_ARRAY) {
                return wrong(l, j, "model.merges", "a list");
            }
            if (!qx_json_skip(j)) {
                return json_error(l, j, 0);
            }
            l->merges_end = j->p;
        } else if (key_is(j, "ignore_merges")) {
            l->t->ignore_merges = qx_json_next(j) == QX_JSON_TRUE;
        } else {
            bool known = false;
            for (size_t i = 0; i < QX_ARRAY_LEN(must_be_off) && !known; i++) {
                if (key_is(j, must_be_off[i])) {
                    known = true;
                    if (!is_off(j) && j->type != QX_JSON_ERROR) {
                        return bad(l, "tokenizer-unsupported", "model.%s is set", must_be_off[i]);
                    }
                }
            }
            if (!known && !qx_json_skip(j)) {
                return json_error(l, j, 0);
            }
        }
        if (rc) {
            return rc;
        }
        if (j->type == QX_JSON_ERROR) {
            return json_error(l, j, 0);
        }
    }
    return j->type == QX_JSON_OBJECT_END ? 0 : wrong(l, j, "model", "an object");
}

/* One element of added_tokens; `id` is preset for tokenizer_config.json, where it is the key. */
static int read_added_token(struct loader *l, struct qx_json_pull *j, int64_t id)
{
    static const char *const must_be_off[] = {"lstrip", "rstrip", "single_word"};
    struct loaded e = {.added = true};
    bool has_content = false;
    if (j->type != QX_JSON_OBJECT) {
        return wrong(l, j, "added_tokens", "a list of objects");
    }
    while (qx_json_next(j) == QX_JSON_KEY) {
        if (key_is(j, "id")) {
            qx_json_next(j);
            uint32_t v = 0;
            int rc = j->type == QX_JSON_ERROR ? json_error(l, j, 0)
                                              : read_id(l, j, "an added token", &v);
            if (rc) {
                return rc;
            }
            id = v;
        } else if (key_is(j, "content")) {
            if (qx_json_next(j) != QX_JSON_STRING || j->text.n == 0 || j->text.n > 65536) {
                return wrong(l, j, "content", "the text of an added token");
            }
            e.off = l->t->bytes.n;
            e.len = (uint32_t)j->text.n;
            qx_buf_add(&l->t->bytes, j->text.p, j->text.n);
            has_content = true;
        } else if (key_is(j, "special")) {
            e.special = qx_json_next(j) == QX_JSON_TRUE;
        } else {
            bool known = false;
            for (size_t i = 0; i < QX_ARRAY_LEN(must_be_off) && !known; i++) {
                if (key_is(j, must_be_off[i])) {
                    known = true;
                    if (!is_off(j) && j->type != QX_JSON_ERROR) {
                        return bad(l, "tokenizer-unsupported", "an added token has '%s' set",
                                   must_be_off[i]);
                    }
                }
            }
            if (!known && !qx_json_skip(j)) {
                return json_error(l, j, 0);
            }
        }
        if (j->type == QX_JSON_ERROR) {
            return json_error(l, j, 0);
        }
    }
    if (j->type != QX_JSON_OBJECT_END) {
        return wrong(l, j, "added_tokens", "a list of objects");
    }
    if (!has_content || id < 0) {
        return bad(l, "tokenizer-value", "an added token has no %s", has_content ? "id" : "content");
    }
    e.id = (uint32_t)id;
    return add_loaded(l, e);
}

static int read_added(struct loader *l, struct qx_json_pull *j)
{
    if (qx_json_next(j) == QX_JSON_NULL) {
        return 0;
    }
    if (j->type != QX_JSON_ARRAY) {
        return wrong(l, j, "added_tokens", "a list");
    }
    while (qx_json_next(j) != QX_JSON_ARRAY_END) {
        int rc = read_added_token(l, j, -1);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

/* A normalizer or pre-tokenizer: an object with a type, or null. Sequences are walked. */
static int read_stage(struct loader *l, struct qx_json_pull *j, bool pre, int depth)
{
    char type[32] = "", regex[sizeof split_expression + 8] = "";
    bool add_prefix = false, use_regex = true, invert = false, isolated = true, too_long = false;
    if (j->type == QX_JSON_NULL) {
        return 0;
    }
    if (j->type != QX_JSON_OBJECT || depth > 4) {
        return wrong(l, j, pre ? "pre_tokenizer" : "normalizer", "an object");
    }
    while (qx_json_next(j) == QX_JSON_KEY) {
        if (key_is(j, "type")) {
            qx_json_next(j);
            snprintf(type, sizeof type, "%.*s", (int)(j->text.n < 31 ? j->text.n : 31), j->text.p);
        } else if (key_is(j, "pretokenizers") || key_is(j, "normalizers")) {
            if (qx_json_next(j) != QX_JSON_ARRAY) {
                return wrong(l, j, "pretokenizers", "a list");
            }
            while (qx_json_next(j) != QX_JSON_ARRAY_END) {
                int rc = read_stage(l, j, pre, depth + 1);
                if (rc) {
                    return rc;
                }
            }
        } else if (key_is(j, "pattern")) {
            if (qx_json_next(j) != QX_JSON_OBJECT) {
                return wrong(l, j, "pattern", "an object");
            }
            while (qx_json_next(j) == QX_JSON_KEY) {
                bool is_regex = key_is(j, "Regex");
                qx_json_next(j);
                if (is_regex && j->type == QX_JSON_STRING) {
                    too_long = j->text.n >= sizeof regex;
                    snprintf(regex, sizeof regex, "%.*s", too_long ? 0 : (int)j->text.n, j->text.p);
                }
            }
        } else if (key_is(j, "behavior")) {
            qx_json_next(j);
            isolated = j->type == QX_JSON_STRING && key_is(j, "Isolated");
        } else if (key_is(j, "invert")) {
            invert = qx_json_next(j) == QX_JSON_TRUE;
        } else if (key_is(j, "add_prefix_space")) {
            add_prefix = qx_json_next(j) == QX_JSON_TRUE;
        } else if (key_is(j, "use_regex")) {
            use_regex = qx_json_next(j) != QX_JSON_FALSE;
        } else if (!qx_json_skip(j)) {
            return json_error(l, j, 0);
        }
        if (j->type == QX_JSON_ERROR) {
            return json_error(l, j, 0);
        }
    }
    if (j->type != QX_JSON_OBJECT_END) {
        return wrong(l, j, pre ? "pre_tokenizer" : "normalizer", "an object");
    }
    if (!strcmp(type, "Sequence")) {
        return 0;
    }
    if (!pre && !strcmp(type, "NFC")) {
        l->t->nfc = true;
        return 0;
    }
    if (pre && !strcmp(type, "Split")) {
        if (strcmp(regex, split_expression) != 0 || invert || !isolated) {
            return bad(l, "tokenizer-unsupported",
                       "the pre-tokenizer's split expression is not the one of this family");
        }
        l->t->split = true;
        return 0;
    }
    if (pre && !strcmp(type, "ByteLevel")) {
        if (add_prefix || use_regex) {
            return bad(l, "tokenizer-unsupported", "pre-tokenizer ByteLevel with %s",
                       add_prefix ? "add_prefix_space" : "use_regex");
        }
        l->byte_level = true;
        return 0;
    }
    return bad(l, "tokenizer-unsupported", "%s of type '%s'", pre ? "pre-tokenizer" : "normalizer", type);
}

static int read_top(struct loader *l, size_t n)
{
    struct qx_json_pull j;
    int rc = 0;
    qx_json_pull_init(&j, l->text, n);
    if (qx_json_next(&j) != QX_JSON_OBJECT) {
        rc = wrong(l, &j, l->file, "a JSON object");
        goto out;
    }
    while (rc == 0 && qx_json_next(&j) == QX_JSON_KEY) {
        if (key_is(&j, "model")) {
            rc = read_model(l, &j);
        } else if (key_is(&j, "added_tokens")) {
            rc = read_added(l, &j);
        } else if (key_is(&j, "normalizer") || key_is(&j, "pre_tokenizer")) {
            bool pre = key_is(&j, "pre_tokenizer");
            qx_json_next(&j);
            rc = read_stage(l, &j, pre, 0);
        } else if (!qx_json_skip(&j)) {
            rc = json_error(l, &j, 0);
        }
    }
    if (rc == 0 && (j.type != QX_JSON_OBJECT_END || qx_json_next(&j) != QX_JSON_END)) {
        rc = wrong(l, &j, l->file, "a JSON object");
    }
    if (rc == 0 && (!l->has_model || !l->has_vocab)) {
        rc = bad(l, "tokenizer-value", "there is no '%s'", l->has_model ? "model.vocab" : "model");
    }
    if (rc == 0 && l->t->bytes.failed) {
        rc = qx_fail_nomem(l->err);
    }
out:
    qx_json_pull_fini(&j);
    return rc;
}

/* added_tokens_decoder and eos_token of tokenizer_config.json. */
static int read_config(struct loader *l, const char *text, size_t n, struct qx_buf *eos)
{
    struct qx_json_pull j;
    int rc = 0;
    l->text = text;
    qx_json_pull_init(&j, text, n);
    if (qx_json_next(&j) != QX_JSON_OBJECT) {
        rc = wrong(l, &j, l->file, "a JSON object");
        goto out;
    }
    while (rc == 0 && qx_json_next(&j) == QX_JSON_KEY) {
        if (key_is(&j, "added_tokens_decoder")) {
            if (qx_json_next(&j) != QX_JSON_OBJECT) {
                rc = wrong(l, &j, "added_tokens_decoder", "an object");
                break;
            }
            while (rc == 0 && qx_json_next(&j) == QX_JSON_KEY) {
                uint64_t id = 0;
                for (size_t i = 0; i < j.text.n && id <= INT32_MAX; i++) {
                    bool digit = j.text.p[i] >= '0' && j.text.p[i] <= '9';
                    id = digit ? id * 10 + (uint64_t)(j.text.p[i] - '0') : UINT64_MAX / 2;
                }
                if (j.text.n == 0 || id >= INT32_MAX) {
                    rc = bad(l, "tokenizer-value", "added_tokens_decoder has a key that is no id");
                    break;
                }
                qx_json_next(&j);
                rc = read_added_token(l, &j, (int64_t)id);
            }
        } else if (key_is(&j, "eos_token")) {
            qx_json_next(&j);
            if (j.type == QX_JSON_STRING) {
                qx_buf_add(eos, j.text.p, j.text.n);
            } else if (j.type == QX_JSON_OBJECT) {
                while (qx_json_next(&j) == QX_JSON_KEY) {
                    bool content = key_is(&j, "content");
                    qx_json_next(&j);
                    if (content && j.type == QX_JSON_STRING) {
                        qx_buf_add(eos, j.text.p, j.text.n);
                    }
                }
            }
        } else if (!qx_json_skip(&j)) {
            rc = json_error(l, &j, 0);
        }
    }
    if (rc == 0 && (j.type != QX_JSON_OBJECT_END || qx_json_next(&j) != QX_JSON_END)) {
        rc = wrong(l, &j, l->file, "a JSON object");
    }
out:
    qx_json_pull_fini(&j);
    return rc;
}

/* ---- tables ------------------------------------------------------------------------------------- */

static uint64_t table_size(uint64_t n)
{
    uint64_t size = 16;
    while (size < 2 * n) {
        size *= 2;
    }
    return size;
}

static void alphabet(struct loader *l)
{
    int next = 256;
    memset(l->byte_of, -1, sizeof l->byte_of);
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        l->byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* Entries by id, with base tokens in their byte form, and the hash table of base tokens. */
static int build_vocab(struct loader *l)
{
    struct qx_tok *t = l->t;
    struct qx_buf bytes = {0};
    if (l->max_id >= 8 * l->n + MAX_ID_GAP) {
        return bad(l, "tokenizer-value", "token id %u in a tokenizer of %zu tokens", l->max_id, l->n);
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
        const struct loaded *e = &l->list[i];
        struct qx_tok_entry *x = &t->entries[e->id];
        uint64_t off = bytes.n;
        if (e->added) {
            /* Replaces a base token of the same id in text; ids stay unique in the list. */
            if (x->added) {
                if (x->len != e->len || memcmp(bytes.p + x->off, t->bytes.p + e->off, e->len) != 0) {
                    qx_buf_fini(&bytes);
                    return bad(l, "tokenizer-value", "two added tokens have the id %u", e->id);
                }
                x->special = x->special || e->special;
                continue;
            }
            qx_buf_add(&bytes, t->bytes.p + e->off, e->len);
        } else {
            if (x->present && !x->added) {
                qx_buf_fini(&bytes);
                return bad(l, "tokenizer-value", "two tokens have the id %u", e->id);
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
        uint64_t h = XXH3_64bits(bytes.p + off, x->len), s = h & t->slot_mask;
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
static int order_base_first(struct loader *l)
{
    struct loaded *sorted = qx_malloc((l->n + 1) * sizeof *sorted);
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

static int add_merge(struct loader *l, const char *a, size_t na, const char *b, size_t nb, uint64_t rank)
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
        return bad(l, "tokenizer-value", "merge %llu uses a token that is not in the vocabulary",
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
static int read_merges(struct loader *l)
{
    struct qx_json_pull j;
    struct qx_buf a = {0};
    int rc = 0;
    uint64_t rank = 0, base = (uint64_t)(l->merges_begin - l->text);
    qx_json_pull_init(&j, l->merges_begin, (size_t)(l->merges_end - l->merges_begin));
    qx_json_next(&j);
    while (rc == 0 && qx_json_next(&j) != QX_JSON_ARRAY_END) {
        if (j.type == QX_JSON_STRING) {
            const char *space = memchr(j.text.p, ' ', j.text.n);
            if (!space) {
                rc = bad(l, "tokenizer-value", "merge %llu has no space", (unsigned long long)rank);
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
                rc = bad(l, "tokenizer-value", "merge %llu is not a pair", (unsigned long long)rank);
            }
        } else {
            rc = j.type == QX_JSON_ERROR
                     ? json_error(l, &j, base)
                     : bad(l, "tokenizer-value", "merge %llu is not a pair", (unsigned long long)rank);
        }
        rank++;
    }
    qx_buf_fini(&a);
    qx_json_pull_fini(&j);
    return rc;
}

static int build_merges(struct loader *l)
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
        uint64_t s = pair_hash(m->left, m->right) & t->merge_mask;
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
    int c = memcmp(entry_bytes(t, a), entry_bytes(t, b), na < nb ? na : nb);
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
    struct loader *l = qx_calloc(1, sizeof *l);
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
    rc = read_top(l, n);
    if (rc == 0 && config) {
        l->file = "tokenizer_config.json";
        rc = read_config(l, config, n_config, &eos);
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
            if (e->len <= k || (uint8_t)entry_bytes(t, t->added[m])[k] < c) {
                a = m + 1;
            } else {
                b = m;
            }
        }
        lo = a;
        b = hi;
        while (a < b) { /* first with byte k > c */
            size_t m = a + (b - a) / 2;
            if ((uint8_t)entry_bytes(t, t->added[m])[k] <= c) {
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
    return entry_bytes(t, id);
}

bool qx_tok_is_special(const struct qx_tok *t, uint32_t id)
{
    return id < t->n_ids && t->entries[id].special;
}

int64_t qx_tok_find(const struct qx_tok *t, const char *s, size_t n)
{
    for (uint32_t i = 0; i < t->n_added; i++) {
        uint32_t id = t->added[i];
        if (t->entries[id].len == n && !memcmp(entry_bytes(t, id), s, n)) {
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
