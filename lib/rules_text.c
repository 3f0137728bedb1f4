/* rules_text.c: the files beside the weights that decide about text: tokenizer, chat template, generation
 * defaults, and the small JSON files that other programs read. Each goes through the loader that `run`
 * uses, so that what passes here is not refused there. A checkpoint of weights alone has none of them,
 * which is usual and no finding. */
#include "rules.h"

#include "alloc.h"
#include "json_doc.h"
#include "qx_build.h"
#include "st_header.h"
#include "str.h"
#include "tok.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_OTHER_BYTES (64u << 20)

static int add(struct qx_findings *fs, struct qx_report r, struct qx_error *err)
{
    return qx_findings_add(fs, &r) ? 0 : qx_fail_nomem(err);
}

/* An error of a loader as a finding. Errors that are not the checkpoint's are returned. */
static int refuse(struct qx_findings *fs, const char *name, struct qx_error *e, struct qx_error *err)
{
    const char *file = e->file[0] ? e->file : name;
    if (e->code == QX_E_NOMEM) {
        return qx_fail_nomem(err);
    }
    struct qx_report r = QX_REPORT(e->kind, QX_ERROR, .file = file, .text = e->msg);
    r.off = e->off;
    if (e->code == QX_E_NOT_FOUND) {
        r.kind = "shard-missing";
        r.expected = "a file";
        r.found = "a link that leads nowhere";
    } else if (strcmp(e->kind, "not-a-file") == 0) {
        r.kind = "unreadable-file";
    }
    return add(fs, r, err);
}

/* A text of the directory. Not read when it is absent, or when its absence of content is said. */
struct text { char *p; size_t n; bool present; };

static int open_text(struct text *t, const struct qx_ckpt *ck, struct qx_findings *fs, const char *name,
                     uint64_t max_bytes, struct qx_error *err)
{
    struct qx_error e = {0};
    char oid[65], found[96];
    uint64_t size;
    int rc = qx_ckpt_read_small(ck, name, max_bytes, &t->p, &t->n, &t->present, &e);
    if (rc) {
        t->present = false;
        return refuse(fs, name, &e, err);
    }
    if (t->present && qx_lfs_pointer(t->p, t->n, oid, &size)) {
        snprintf(found, sizeof found, "%" PRIu64 " bytes with sha256 %.16s...", size, oid);
        qx_free(t->p);
        *t = (struct text){0};
        return add(fs, QX_REPORT("lfs-pointer", QX_ERROR, .file = name, .expected = "the file", .found = found,
                                 .text = "a Git LFS pointer instead of the file (run git lfs pull)"), err);
    }
    return 0;
}

/* ---- tokenizer ---------------------------------------------------------------------------- */

static int check_ids(const struct qx_tok *t, uint64_t vocab, struct qx_findings *fs, struct qx_error *err)
{
    char expected[48], found[48], text[200];
    if (qx_tok_n_ids(t) <= vocab) {
        return 0;
    }
    snprintf(expected, sizeof expected, "ids below %" PRIu64, vocab);
    snprintf(found, sizeof found, "ids up to %" PRIu32, qx_tok_n_ids(t) - 1);
    snprintf(text, sizeof text, "the tokenizer has ids up to %" PRIu32 ", the model %" PRIu64 " rows: a text "
             "with such a token cannot be run", qx_tok_n_ids(t) - 1, vocab);
    return add(fs, QX_REPORT("tokenizer-vocab", QX_WARNING, .file = "tokenizer.json", .expected = expected,
                             .found = found, .text = text), err);
}

static int check_tokenizer(const struct qx_ckpt *ck, const struct qx_config *c, struct qx_findings *fs,
                           struct qx_error *err)
{
    static const char *const parts[] = {"tokenizer_config.json", "vocab.json", "merges.txt"};
    struct text main = {0}, config = {0};
    struct qx_tok *t = NULL;
    struct qx_error e = {0};
    size_t before = qx_findings_count(fs);
    int rc = open_text(&main, ck, fs, "tokenizer.json", QX_TOK_MAX_BYTES, err);
    rc = rc ? rc : open_text(&config, ck, fs, "tokenizer_config.json", QX_TOK_MAX_BYTES, err);
    if (rc == 0 && qx_findings_count(fs) == before && (main.present || config.present) &&
        qx_tok_parse(&t, main.present ? main.p : QX_TOK_EMPTY, main.present ? main.n : sizeof QX_TOK_EMPTY - 1,
                     "tokenizer.json", config.present ? config.p : NULL, config.n, &e) != 0) {
        rc = refuse(fs, "tokenizer.json", &e, err);
    }
    if (rc == 0 && t && main.present) {
        rc = check_ids(t, c->vocab_size, fs, err);
    }
    for (size_t i = 0; rc == 0 && !main.present && qx_findings_count(fs) == before &&
                       i < QX_ARRAY_LEN(parts); i++) {
        struct text other = {0};
        if (qx_ckpt_read_small(ck, parts[i], QX_TOK_MAX_BYTES, &other.p, &other.n, &other.present, &e) != 0) {
            rc = e.code == QX_E_NOMEM ? qx_fail_nomem(err) : 0;
        } else if (other.present) {
            char text[160];
            snprintf(text, sizeof text, "there is %s but no tokenizer.json: prompts can only be given as ids",
                     parts[i]);
            rc = add(fs, QX_REPORT("tokenizer-missing", QX_NOTE, .file = "tokenizer.json", .found = parts[i],
                                   .text = text), err);
        }
        qx_free(other.p);
    }
    qx_tok_close(t);
    qx_free(main.p);
    qx_free(config.p);
    return rc;
}

/* ---- chat template ------------------------------------------------------------------------ */

static int check_template(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err)
{
    enum qx_template which = QX_TEMPLATE_NONE;
    struct text t = {0};
    struct qx_error e = {0};
    size_t before = qx_findings_count(fs);
    int rc = open_text(&t, ck, fs, "chat_template.jinja", MAX_OTHER_BYTES, err);
    bool own = t.present;
    qx_free(t.p);
    if (rc || qx_findings_count(fs) != before) {
        return rc;
    }
    /* One that hides in tokenizer_config.json: what is wrong with that file has been said. */
    if (qx_chat_template(ck, &which, NULL, &e) != 0) {
        return own || e.code == QX_E_NOMEM ? refuse(fs, "chat_template.jinja", &e, err) : 0;
    }
    if (which != QX_TEMPLATE_UNKNOWN || !QX_HAVE_SHA256) {
        return 0;
    }
    return add(fs, QX_REPORT("template-unknown", QX_NOTE,
                             .file = own ? "chat_template.jinja" : "tokenizer_config.json",
                             .text = "the chat template is not the one that qx renders: run needs --raw or "
                                     "--template"), err);
}

/* ---- generation defaults ------------------------------------------------------------------ */

static int check_generation(const struct qx_ckpt *ck, const struct qx_config *c, struct qx_findings *fs,
                            struct qx_error *err)
{
    static const char name[] = "generation_config.json";
    struct text t = {0};
    struct qx_json_doc doc = {0};
    struct qx_gen_defaults d;
    struct qx_error e = {0};
    int rc = open_text(&t, ck, fs, name, MAX_OTHER_BYTES, err);
    if (rc || !t.present) {
        return rc;
    }
    /* First for keys given twice and words that are no numbers, which the loader passes over. */
    rc = qx_json_doc_parse(&doc, t.p, t.n, name, fs, &e);
    qx_json_doc_fini(&doc);
    qx_free(t.p);
    if (rc || qx_gen_defaults_read(ck, &d, &e) != 0) {
        return refuse(fs, name, &e, err);
    }
    for (uint32_t i = 0; i < d.n_stop_ids && strcmp(d.stop_source, name) == 0; i++) {
        char text[160], found[24], expected[48];
        if (d.stop_ids[i] < c->vocab_size) {
            continue;
        }
        snprintf(found, sizeof found, "%" PRIu32, d.stop_ids[i]);
        snprintf(expected, sizeof expected, "ids below %" PRIu64, (uint64_t)c->vocab_size);
        snprintf(text, sizeof text, "stop id %" PRIu32 " is beyond the vocabulary and can never come",
                 d.stop_ids[i]);
        rc = add(fs, QX_REPORT("config-value", QX_WARNING, .file = name, .key = "eos_token_id",
                               .expected = expected, .found = found, .text = text), err);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

/* ---- files of others ---------------------------------------------------------------------- */

/* JSON of the usual names that qx itself does not read: only that it is whole. */
static int check_others(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err)
{
    static const char *const names[] = {
        "added_tokens.json", "chat_template.json", "preprocessor_config.json", "processor_config.json",
        "special_tokens_map.json", "video_preprocessor_config.json", "vocab.json"};
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < QX_ARRAY_LEN(names); i++) {
        struct text t = {0};
        struct qx_json_pull j;
        rc = open_text(&t, ck, fs, names[i], MAX_OTHER_BYTES, err);
        if (rc || !t.present) {
            continue;
        }
        qx_json_pull_init(&j, t.p, t.n);
        j.allow_nonfinite = true;
        do {
            qx_json_next(&j);
        } while (j.type != QX_JSON_END && j.type != QX_JSON_ERROR);
        if (j.type == QX_JSON_ERROR) {
            struct qx_error e = j.err;
            uint64_t line = 0, col = 0;
            qx_json_line_col(t.p, t.n, e.off == QX_NO_OFF ? 0 : e.off, &line, &col);
            if (e.code != QX_E_NOMEM) {
                qx_fail(&e, j.err.code, j.err.kind, "%s (line %" PRIu64 ", column %" PRIu64 ")", j.err.msg,
                        line, col);
                qx_error_at(&e, names[i], NULL, j.err.off);
            }
            rc = refuse(fs, names[i], &e, err);
        }
        qx_json_pull_fini(&j);
        qx_free(t.p);
    }
    return rc;
}

int qx_rules_text(const struct qx_ckpt *ck, struct qx_findings *fs, struct qx_error *err)
{
    const struct qx_config *c = qx_ckpt_config(ck);
    if (!c || qx_ckpt_is_single_file(ck) || qx_ckpt_is_lone_config(ck)) {
        return 0;
    }
    int rc = check_tokenizer(ck, c, fs, err);
    rc = rc ? rc : check_template(ck, fs, err);
    rc = rc ? rc : check_generation(ck, c, fs, err);
    return rc ? rc : check_others(ck, fs, err);
}
