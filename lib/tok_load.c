/* tok_load.c: what lies beside the weights and decides about text: tokenizer, chat template, and the
 * defaults of generation. */
#include "tok.h"

#include "alloc.h"
#include "ckpt.h"
#include "json_doc.h"
#include "qx_build.h"

#include <stdio.h>
#include <string.h>
#if QX_HAVE_SHA256
#include <openssl/evp.h>
#endif

#define MAX_SMALL_BYTES (64u << 20)

/* SHA-256 of the template that chat.c renders (model 12). */
static const uint8_t template_sha256[32] = {
    0xc3, 0xcf, 0x9e, 0x34, 0xab, 0xf4, 0xf9, 0xe3, 0x6c, 0x2d, 0x72, 0x16, 0x5a, 0xa9, 0xc1, 0x32,
    0xd3, 0xe2, 0xa7, 0x25, 0xb6, 0xc2, 0x58, 0x6a, 0xaa, 0x3a, 0x8a, 0xf9, 0xd7, 0xa8, 0x10, 0x41};

int qx_tok_load(struct qx_tok **out, const struct qx_ckpt *ck, struct qx_error *err)
{
    char *text = NULL, *config = NULL;
    size_t n = 0, n_config = 0;
    bool present = false, has_config = false;
    *out = NULL;
    int rc = qx_ckpt_read_small(ck, "tokenizer.json", QX_TOK_MAX_BYTES, &text, &n, &present, err);
    if (rc == 0 && !present) {
        rc = qx_fail(err, QX_E_NOT_FOUND, "tokenizer-missing", "there is no tokenizer.json in '%s'",
                     qx_ckpt_path(ck));
    }
    if (rc == 0) {
        rc = qx_ckpt_read_small(ck, "tokenizer_config.json", QX_TOK_MAX_BYTES, &config, &n_config,
                                &has_config, err);
    }
    if (rc == 0) {
        rc = qx_tok_parse(out, text, n, "tokenizer.json", has_config ? config : NULL, n_config, err);
    }
    qx_free(text);
    qx_free(config);
    return rc;
}

int qx_tok_load_eos(const struct qx_ckpt *ck, int64_t *id, struct qx_error *err)
{
    struct qx_error local = {0};
    struct qx_tok *t = NULL;
    char *config = NULL;
    size_t n = 0;
    bool present = false;
    *id = -1;
    int rc = qx_tok_load(&t, ck, &local);
    if (rc && local.code == QX_E_NOT_FOUND) {
        rc = qx_ckpt_read_small(ck, "tokenizer_config.json", MAX_SMALL_BYTES, &config, &n, &present,
                                &local);
        if (rc == 0 && present) {
            rc = qx_tok_parse(&t, QX_TOK_EMPTY, sizeof QX_TOK_EMPTY - 1, "tokenizer.json", config, n, &local);
        }
    }
    if (rc == 0 && t) {
        *id = qx_tok_eos(t);
    }
    qx_tok_close(t);
    qx_free(config);
    if (rc && err) {
        *err = local;
    }
    return rc;
}

/* ---- chat template --------------------------------------------------------------------------------- */

static bool is_known_template(const char *text, size_t n)
{
#if QX_HAVE_SHA256
    uint8_t md[EVP_MAX_MD_SIZE];
    unsigned md_n = 0;
    return EVP_Digest(text, n, md, &md_n, EVP_sha256(), NULL) == 1 && md_n == sizeof template_sha256 &&
           !memcmp(md, template_sha256, sizeof template_sha256);
#else
    (void)text;
    (void)n;
    (void)template_sha256;
    return false; /* without SHA-256 no template can be recognised; it can be forced */
#endif
}

/* chat_template of tokenizer_config.json: a text, or a list of {name, template} with a "default". */
static int template_in_config(const struct qx_ckpt *ck, char **text, size_t *n, struct qx_error *err)
{
    char *config = NULL;
    size_t n_config = 0;
    bool present = false;
    struct qx_json_doc doc;
    int rc = qx_ckpt_read_small(ck, "tokenizer_config.json", MAX_SMALL_BYTES, &config, &n_config,
                                &present, err);
    if (rc || !present) {
        return rc;
    }
    rc = qx_json_doc_parse(&doc, config, n_config, "tokenizer_config.json", NULL, err);
    if (rc == 0) {
        const struct qx_json *v = qx_json_get(doc.root, "chat_template"), *e = NULL;
        if (v && v->type == QX_JSON_ARRAY) {
            const struct qx_json *list = v;
            v = NULL;
            while ((e = qx_json_each(list, e))) {
                const struct qx_json *name = qx_json_get(e, "name");
                if (name && name->type == QX_JSON_STRING && !strcmp(name->str, "default")) {
                    v = qx_json_get(e, "template");
                }
            }
        }
        if (v && v->type == QX_JSON_STRING) {
            *text = qx_strndup(v->str, v->str_n);
            *n = v->str_n;
            rc = *text ? 0 : qx_fail_nomem(err);
        }
        qx_json_doc_fini(&doc);
    }
    qx_free(config);
    return rc;
}

int qx_chat_template(const struct qx_ckpt *ck, enum qx_template *which, char **text, struct qx_error *err)
{
    char *found = NULL;
    size_t n = 0;
    bool present = false;
    *which = QX_TEMPLATE_NONE;
    if (text) {
        *text = NULL;
    }
    int rc = qx_ckpt_read_small(ck, "chat_template.jinja", MAX_SMALL_BYTES, &found, &n, &present, err);
    if (rc == 0 && !present) {
        rc = template_in_config(ck, &found, &n, err);
        present = found != NULL;
    }
    if (rc == 0 && present) {
        *which = is_known_template(found, n) ? QX_TEMPLATE_QWEN38 : QX_TEMPLATE_UNKNOWN;
    }
    if (rc == 0 && text) {
        *text = found;
    } else {
        qx_free(found);
    }
    return rc;
}

/* ---- generation_config.json ------------------------------------------------------------------------ */

static int type_error(const char *key, const char *want, const struct qx_json *v, struct qx_error *err)
{
    char brief[48];
    qx_fail(err, QX_E_CONFIG, "config-type", "'%s' is %s, wanted %s", key, qx_json_brief(v, brief), want);
    return qx_error_at(err, "generation_config.json", NULL, v->off);
}

static bool is_given(const struct qx_json *v)
{
    return v && v->type != QX_JSON_NULL;
}

static int read_number(const struct qx_json *root, const char *key, double lo, double hi, double *out,
                       struct qx_error *err)
{
    const struct qx_json *v = qx_json_get(root, key);
    if (!is_given(v)) {
        return 0;
    }
    if (v->type != QX_JSON_NUMBER || v->is_nonfinite || v->f64 < lo || v->f64 > hi) {
        char want[80];
        snprintf(want, sizeof want, "a number from %g to %g", lo, hi);
        return type_error(key, want, v, err);
    }
    *out = v->f64;
    return 0;
}

static int add_stop(struct qx_gen_defaults *d, const struct qx_json *v, struct qx_error *err)
{
    if (v->type != QX_JSON_NUMBER || !v->is_int || v->negative || v->uint_value >= INT32_MAX) {
        return type_error("eos_token_id", "token ids", v, err);
    }
    for (uint32_t i = 0; i < d->n_stop_ids; i++) {
        if (d->stop_ids[i] == v->uint_value) {
            return 0;
        }
    }
    if (d->n_stop_ids == QX_STOP_IDS_MAX) {
        return qx_fail(err, QX_E_CONFIG, "config-value", "more than %d stop ids", QX_STOP_IDS_MAX);
    }
    d->stop_ids[d->n_stop_ids++] = (uint32_t)v->uint_value;
    return 0;
}

static int read_file(const struct qx_json *root, struct qx_gen_defaults *d, struct qx_error *err)
{
    double temperature = 1, top_k = 0, top_p = 1, min_p = 0, repeat = 1;
    const struct qx_json *v, *e = NULL;
    if (root->type != QX_JSON_OBJECT) {
        return type_error("generation_config.json", "an object", root, err);
    }
    int rc = read_number(root, "temperature", 0, 1e6, &temperature, err);
    rc = rc ? rc : read_number(root, "top_k", 0, INT32_MAX, &top_k, err);
    rc = rc ? rc : read_number(root, "top_p", 0, 1, &top_p, err);
    rc = rc ? rc : read_number(root, "min_p", 0, 1, &min_p, err);
    rc = rc ? rc : read_number(root, "repetition_penalty", 1e-6, 1e6, &repeat, err);
    if (rc) {
        return rc;
    }
    d->sampling.temperature = (float)temperature;
    d->sampling.top_k = (int32_t)top_k;
    d->sampling.top_p = (float)top_p;
    d->sampling.min_p = (float)min_p;
    d->sampling.repeat_penalty = (float)repeat;
    v = qx_json_get(root, "do_sample");
    if (is_given(v)) {
        if (v->type != QX_JSON_TRUE && v->type != QX_JSON_FALSE) {
            return type_error("do_sample", "true or false", v, err);
        }
        d->sample = v->type == QX_JSON_TRUE;
    } else {
        d->sample = is_given(qx_json_get(root, "temperature")) || is_given(qx_json_get(root, "top_k")) ||
                    is_given(qx_json_get(root, "top_p"));
    }
    v = qx_json_get(root, "eos_token_id");
    if (!is_given(v)) {
        return 0;
    }
    d->stop_source = "generation_config.json";
    if (v->type != QX_JSON_ARRAY) {
        return add_stop(d, v, err);
    }
    while ((e = qx_json_each(v, e))) {
        rc = add_stop(d, e, err);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

/* No stop ids in the file: those of the configuration and the tokenizer together. A tokenizer that is
 * missing or wrong names none here; whoever needs it reports it. */
static int stop_ids_elsewhere(const struct qx_ckpt *ck, struct qx_gen_defaults *d, struct qx_error *err)
{
    struct qx_error local = {0};
    const struct qx_config *c = qx_ckpt_config(ck);
    int64_t eos = -1;
    bool known = false;
    for (uint32_t i = 0; c && i < c->n_text_eos && d->n_stop_ids < QX_STOP_IDS_MAX; i++) {
        d->stop_ids[d->n_stop_ids++] = c->text_eos[i];
    }
    d->stop_source = d->n_stop_ids ? "config.json" : "nothing";
    int rc = qx_tok_load_eos(ck, &eos, &local);
    if (rc && local.code == QX_E_NOMEM) {
        if (err) {
            *err = local;
        }
        return rc;
    }
    if (rc || eos < 0) {
        return 0;
    }
    for (uint32_t i = 0; i < d->n_stop_ids; i++) {
        known = known || d->stop_ids[i] == (uint32_t)eos;
    }
    d->stop_disagrees = !known && d->n_stop_ids > 0;
    d->stop_source = d->n_stop_ids ? "config.json and tokenizer_config.json" : "tokenizer_config.json";
    if (!known && d->n_stop_ids < QX_STOP_IDS_MAX) {
        d->stop_ids[d->n_stop_ids++] = (uint32_t)eos;
    }
    return 0;
}

int qx_gen_defaults_read(const struct qx_ckpt *ck, struct qx_gen_defaults *out, struct qx_error *err)
{
    char *text = NULL;
    size_t n = 0;
    struct qx_json_doc doc;
    memset(out, 0, sizeof *out);
    out->sampling = (struct qx_sampling){.temperature = 1, .top_p = 1, .repeat_penalty = 1};
    int rc = qx_ckpt_read_small(ck, "generation_config.json", MAX_SMALL_BYTES, &text, &n,
                                &out->has_file, err);
    if (rc == 0 && out->has_file) {
        rc = qx_json_doc_parse(&doc, text, n, "generation_config.json", NULL, err);
        if (rc == 0) {
            rc = read_file(doc.root, out, err);
            qx_json_doc_fini(&doc);
        }
    }
    qx_free(text);
    if (rc == 0 && !out->stop_source) {
        rc = stop_ids_elsewhere(ck, out, err);
    }
    return rc;
}
