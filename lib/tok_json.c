/* tok_json.c: reads tokenizer.json and tokenizer_config.json. What qx does not do is refused here by its
 * setting's name; nothing is skipped that would change ids. */
#include "tok_loader.h"

#include "alloc.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char split_expression[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

int qx_tok_bad(struct qx_tok_loader *l, const char *kind, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    qx_fail(l->err, !strcmp(kind, "tokenizer-unsupported") ? QX_E_UNSUPPORTED : QX_E_CONFIG, kind, "%s",
            text);
    return qx_error_at(l->err, l->file, NULL, l->at ? l->at_base + l->at->off : QX_NO_OFF);
}

int qx_tok_json_error(struct qx_tok_loader *l, const struct qx_json_pull *j, uint64_t base)
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

static int wrong(struct qx_tok_loader *l, struct qx_json_pull *j, const char *key, const char *want)
{
    if (j->type == QX_JSON_ERROR) {
        return qx_tok_json_error(l, j, 0);
    }
    return qx_tok_bad(l, "tokenizer-value", "'%s' is not %s", key, want);
}

static bool key_is(const struct qx_json_pull *j, const char *name)
{
    return j->text.n == strlen(name) && !memcmp(j->text.p, name, j->text.n);
}

static int add_loaded(struct qx_tok_loader *l, struct qx_tok_loaded e)
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

static int read_id(struct qx_tok_loader *l, const struct qx_json_pull *j, const char *what, uint32_t *id)
{
    if (j->type != QX_JSON_NUMBER || !j->is_int || j->negative || j->uint_value >= INT32_MAX) {
        return qx_tok_bad(l, "tokenizer-value", "the id of %s is not a token id", what);
    }
    *id = (uint32_t)j->uint_value;
    return 0;
}

static int read_vocab(struct qx_tok_loader *l, struct qx_json_pull *j)
{
    if (qx_json_next(j) != QX_JSON_OBJECT) {
        return wrong(l, j, "model.vocab", "an object");
    }
    l->has_vocab = true;
    while (qx_json_next(j) == QX_JSON_KEY) {
        /* Kept as written; converted once the pre-tokenizer is known, which may come later. */
        struct qx_tok_loaded e = {.off = l->t->bytes.n, .len = (uint32_t)j->text.n};
        if (j->text.n > UINT32_MAX) {
            return qx_tok_bad(l, "tokenizer-value", "a token is longer than 4 GiB");
        }
        qx_buf_add(&l->t->bytes, j->text.p, j->text.n);
        qx_json_next(j);
        int rc = j->type == QX_JSON_ERROR ? qx_tok_json_error(l, j, 0) : read_id(l, j, "a token", &e.id);
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

/* A key whose value is not needed: passed over, but refused when it is one of the n settings `must_be_off`
 * and is not null, false, 0 or "". `prefix` names it in the message. */
static int skip_off(struct qx_tok_loader *l, struct qx_json_pull *j, const char *const must_be_off[], size_t n,
                    const char *prefix)
{
    size_t i = 0;
    while (i < n && !key_is(j, must_be_off[i])) {
        i++;
    }
    if (i == n) {
        return qx_json_skip(j) ? 0 : qx_tok_json_error(l, j, 0);
    }
    qx_json_next(j);
    if (j->type == QX_JSON_ERROR) {
        return qx_tok_json_error(l, j, 0);
    }
    if (j->type == QX_JSON_NULL || j->type == QX_JSON_FALSE ||
        (j->type == QX_JSON_STRING && j->text.n == 0) || (j->type == QX_JSON_NUMBER && j->f64 == 0)) {
        return 0;
    }
    return qx_tok_bad(l, "tokenizer-unsupported", "%s%s is set", prefix, must_be_off[i]);
}

static int read_model(struct qx_tok_loader *l, struct qx_json_pull *j)
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
                return qx_tok_bad(l, "tokenizer-unsupported", "model.type is '%.*s', supported is 'BPE'",
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
                return qx_tok_json_error(l, j, 0);
            }
            l->merges_end = j->p;
        } else if (key_is(j, "ignore_merges")) {
            l->t->ignore_merges = qx_json_next(j) == QX_JSON_TRUE;
        } else {
            rc = skip_off(l, j, must_be_off, QX_ARRAY_LEN(must_be_off), "model.");
        }
        if (rc) {
            return rc;
        }
        if (j->type == QX_JSON_ERROR) {
            return qx_tok_json_error(l, j, 0);
        }
    }
    return j->type == QX_JSON_OBJECT_END ? 0 : wrong(l, j, "model", "an object");
}

/* One element of added_tokens; `id` is preset for tokenizer_config.json, where it is the key. */
static int read_added_token(struct qx_tok_loader *l, struct qx_json_pull *j, int64_t id)
{
    static const char *const must_be_off[] = {"lstrip", "rstrip", "single_word"};
    struct qx_tok_loaded e = {.added = true, .in_config = id >= 0};
    bool has_content = false;
    if (j->type != QX_JSON_OBJECT) {
        return wrong(l, j, "added_tokens", "a list of objects");
    }
    while (qx_json_next(j) == QX_JSON_KEY) {
        if (key_is(j, "id")) {
            qx_json_next(j);
            uint32_t v = 0;
            int rc = j->type == QX_JSON_ERROR ? qx_tok_json_error(l, j, 0)
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
            int rc = skip_off(l, j, must_be_off, QX_ARRAY_LEN(must_be_off), "an added token: ");
            if (rc) {
                return rc;
            }
        }
        if (j->type == QX_JSON_ERROR) {
            return qx_tok_json_error(l, j, 0);
        }
    }
    if (j->type != QX_JSON_OBJECT_END) {
        return wrong(l, j, "added_tokens", "a list of objects");
    }
    if (!has_content || id < 0) {
        return qx_tok_bad(l, "tokenizer-value", "an added token has no %s", has_content ? "id" : "content");
    }
    e.id = (uint32_t)id;
    return add_loaded(l, e);
}

static int read_added(struct qx_tok_loader *l, struct qx_json_pull *j)
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
static int read_stage(struct qx_tok_loader *l, struct qx_json_pull *j, bool pre, int depth)
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
            return qx_tok_json_error(l, j, 0);
        }
        if (j->type == QX_JSON_ERROR) {
            return qx_tok_json_error(l, j, 0);
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
            return qx_tok_bad(l, "tokenizer-unsupported",
                       "the pre-tokenizer's split expression is not the one of this family");
        }
        l->t->split = true;
        return 0;
    }
    if (pre && !strcmp(type, "ByteLevel")) {
        if (add_prefix || use_regex) {
            return qx_tok_bad(l, "tokenizer-unsupported", "pre-tokenizer ByteLevel with %s",
                       add_prefix ? "add_prefix_space" : "use_regex");
        }
        l->byte_level = true;
        return 0;
    }
    return qx_tok_bad(l, "tokenizer-unsupported", "%s of type '%s'", pre ? "pre-tokenizer" : "normalizer", type);
}

int qx_tok_read_json(struct qx_tok_loader *l, size_t n)
{
    struct qx_json_pull j;
    int rc = 0;
    qx_json_pull_init(&j, l->text, n);
    l->at = &j;
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
            rc = qx_tok_json_error(l, &j, 0);
        }
    }
    if (rc == 0 && (j.type != QX_JSON_OBJECT_END || qx_json_next(&j) != QX_JSON_END)) {
        rc = wrong(l, &j, l->file, "a JSON object");
    }
    if (rc == 0 && (!l->has_model || !l->has_vocab)) {
        rc = qx_tok_bad(l, "tokenizer-value", "there is no '%s'", l->has_model ? "model.vocab" : "model");
    }
    if (rc == 0 && l->t->bytes.failed) {
        rc = qx_fail_nomem(l->err);
    }
out:
    l->at = NULL;
    qx_json_pull_fini(&j);
    return rc;
}

int qx_tok_read_config(struct qx_tok_loader *l, const char *text, size_t n, struct qx_buf *eos)
{
    struct qx_json_pull j;
    int rc = 0;
    l->text = text;
    qx_json_pull_init(&j, text, n);
    l->at = &j;
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
                    rc = qx_tok_bad(l, "tokenizer-value", "added_tokens_decoder has a key that is no id");
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
            rc = qx_tok_json_error(l, &j, 0);
        }
    }
    if (rc == 0 && (j.type != QX_JSON_OBJECT_END || qx_json_next(&j) != QX_JSON_END)) {
        rc = wrong(l, &j, l->file, "a JSON object");
    }
out:
    l->at = NULL;
    qx_json_pull_fini(&j);
    return rc;
}
