/* config.c: turns config.json into struct qx_config: every spelling, range and default in one
 * place. What decides a shape or a result must be present and in range; unknown keys are nobody's
 * business. */
#include "config.h"

#include "config_check.h"
#include "json_doc.h"
#include "qx.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

struct reader {
    const char *file;
    struct qx_findings *fs;
    struct qx_error *err;
    int rc; /* first failure; later getters do nothing */
};

/* One object of the configuration and its dotted path. */
struct section {
    const struct qx_json *o;
    const char *path; /* "" or "text_config." */
};

static void fail_type(struct reader *r, const char *path, const char *key, const struct qx_json *v,
                      const char *expected)
{
    char brief[48];
    if (r->rc) {
        return;
    }
    r->rc = qx_fail(r->err, QX_E_CONFIG, "config-type", "key '%s%s': expected %s, found %s%s%s",
                    path, key, expected, qx_json_type_name(v), v && v->str ? " " : "",
                    v && v->str ? qx_json_brief(v, brief) : "");
    qx_error_at(r->err, r->file, NULL, v ? v->off : QX_NO_OFF);
}

static void fail_value(struct reader *r, const char *path, const char *key, const struct qx_json *v,
                       const char *expected)
{
    char brief[48];
    if (r->rc) {
        return;
    }
    r->rc = qx_fail(r->err, QX_E_CONFIG, "config-value", "key '%s%s': expected %s, found %s", path,
                    key, expected, qx_json_brief(v, brief));
    qx_error_at(r->err, r->file, NULL, v ? v->off : QX_NO_OFF);
}

/* A whole number of any spelling (4, 4.0, 1e7). */
static bool whole(const struct qx_json *v, int64_t *out)
{
    if (!v || v->type != QX_JSON_NUMBER || v->is_nonfinite) {
        return false;
    }
    if (v->is_int) {
        if (!v->negative && v->uint_value > INT64_MAX) {
            return false;
        }
        *out = v->negative ? v->int_value : (int64_t)v->uint_value;
        return true;
    }
    if (v->f64 != floor(v->f64) || fabs(v->f64) > 9007199254740992.0) {
        return false;
    }
    *out = (int64_t)v->f64;
    return true;
}

static bool absent(const struct qx_json *v)
{
    return !v || v->type == QX_JSON_NULL;
}

/* Whole number in [lo, hi]; dflt < 0: required. */
static int64_t get_int(struct reader *r, const struct section *s, const char *key, int64_t lo,
                       int64_t hi, int64_t dflt)
{
    const struct qx_json *v = qx_json_get(s->o, key);
    int64_t x = 0;
    char expected[96];
    if (!v && dflt >= 0) {
        return dflt;
    }
    if (v && v->type == QX_JSON_NULL && dflt >= 0) {
        return dflt;
    }
    if (!v) {
        fail_value(r, s->path, key, NULL, "a number, for this key decides shapes");
        return lo;
    }
    if (!whole(v, &x)) {
        if (v->type == QX_JSON_NUMBER && !v->is_nonfinite) {
            fail_value(r, s->path, key, v, "a whole number");
        } else {
            fail_type(r, s->path, key, v, "a whole number");
        }
        return lo;
    }
    if (x < lo || x > hi) {
        snprintf(expected, sizeof expected, "a whole number from %" PRId64 " to %" PRId64, lo, hi);
        fail_value(r, s->path, key, v, expected);
        return lo;
    }
    return x;
}

static uint32_t get_count(struct reader *r, const struct section *s, const char *key, uint32_t hi)
{
    return (uint32_t)get_int(r, s, key, 1, hi, -1);
}

static double get_f64(struct reader *r, const struct section *s, const char *key, double dflt)
{
    const struct qx_json *v = qx_json_get(s->o, key);
    if (absent(v)) {
        if (isnan(dflt)) {
            fail_value(r, s->path, key, NULL, "a number");
            return 0;
        }
        return dflt;
    }
    if (v->type != QX_JSON_NUMBER || v->is_nonfinite) {
        fail_type(r, s->path, key, v, "a finite number");
        return 0;
    }
    return v->f64;
}

static bool get_bool(struct reader *r, const struct section *s, const char *key, bool dflt)
{
    const struct qx_json *v = qx_json_get(s->o, key);
    if (absent(v)) {
        return dflt;
    }
    if (v->type != QX_JSON_TRUE && v->type != QX_JSON_FALSE) {
        fail_type(r, s->path, key, v, "a boolean");
    }
    return v->type == QX_JSON_TRUE;
}

/* Copies a string; "" when absent or null. */
static void get_str(struct reader *r, const struct section *s, const char *key, char *out,
                    size_t cap)
{
    const struct qx_json *v = qx_json_get(s->o, key);
    out[0] = '\0';
    if (absent(v)) {
        return;
    }
    if (v->type != QX_JSON_STRING) {
        fail_type(r, s->path, key, v, "a string");
        return;
    }
    snprintf(out, cap, "%s", v->str);
}

static const struct qx_json *get_container(struct reader *r, const struct section *s,
                                           const char *key, enum qx_json_type type)
{
    const struct qx_json *v = qx_json_get(s->o, key);
    if (absent(v)) {
        return NULL;
    }
    if (v->type != type) {
        fail_type(r, s->path, key, v, type == QX_JSON_OBJECT ? "an object" : "a list");
        return NULL;
    }
    return v;
}

/* ---- identity -------------------------------------------------------------------------------- */

struct alias {
    const char *found, *understood;
    bool preview;
};

static const struct alias types[] = {
    {"qwen4_exp", "qwen4_exp", false},
    {"qwen4_exp_text", "qwen4_exp", false},
    {"qwen3_8_flash_next", "qwen4_exp", true},
    {"qwen3_8_flash_next_text", "qwen4_exp", true},
};
static const struct alias architectures[] = {
    {"Qwen4ExpForConditionalGeneration", "qwen4_exp", false},
    {"Qwen4ExpForCausalLM", "qwen4_exp", false},
    {"Qwen3_8FlashNextForConditionalGeneration", "qwen4_exp", true},
    {"Qwen3_8_FlashNextForConditionalGeneration", "qwen4_exp", true},
    {"Qwen3_8FlashNextForCausalLM", "qwen4_exp", true},
    {"Qwen3_8_FlashNextForCausalLM", "qwen4_exp", true},
};

static const struct alias *find_alias(const struct alias *t, size_t n, const char *s)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(t[i].found, s) == 0) {
            return &t[i];
        }
    }
    return NULL;
}

static void note(struct reader *r, const char *kind, enum qx_severity sev, const char *key,
                 const char *expected, const char *found, const char *text)
{
    if (r->fs) {
        qx_findings_add(r->fs, &QX_REPORT(kind, sev, .file = r->file, .key = key,
                                          .expected = expected, .found = found, .text = text));
    }
}

static void read_identity(struct reader *r, struct qx_config *c, const struct section *top)
{
    const struct qx_json *a = get_container(r, top, "architectures", QX_JSON_ARRAY);
    const struct qx_json *first = qx_json_each(a, NULL);
    get_str(r, top, "model_type", c->type_found, sizeof c->type_found);
    if (first) {
        if (first->type != QX_JSON_STRING) {
            fail_type(r, "architectures", "[0]", first, "a string");
            return;
        }
        snprintf(c->architecture, sizeof c->architecture, "%s", first->str);
    }
    const struct alias *type = find_alias(types, QX_ARRAY_LEN(types), c->type_found);
    const struct alias *arch =
        find_alias(architectures, QX_ARRAY_LEN(architectures), c->architecture);
    if (r->rc) {
        return;
    }
    if (c->type_found[0] == '\0' && !arch) {
        r->rc =
            qx_fail(r->err, QX_E_UNSUPPORTED, "unsupported-model-type",
                    "neither model_type nor architectures says which model this is; supported is "
                    "model_type 'qwen4_exp' (or its preview name 'qwen3_8_flash_next')");
        qx_error_at(r->err, r->file, NULL, QX_NO_OFF);
        return;
    }
    if (c->type_found[0] != '\0' && !type) {
        r->rc =
            qx_fail(r->err, QX_E_UNSUPPORTED, "unsupported-model-type",
                    "model_type '%s' is not supported; supported are 'qwen4_exp' and its preview "
                    "name 'qwen3_8_flash_next'",
                    c->type_found);
        qx_error_at(r->err, r->file, NULL, QX_NO_OFF);
        return;
    }
    snprintf(c->type, sizeof c->type, "qwen4_exp");
    if (!type) {
        note(r, "model-type-missing", QX_NOTE, "model_type", "qwen4_exp", NULL,
             "model_type is absent; the architecture names the model");
    }
    if (c->architecture[0] == '\0') {
        note(r, "architecture-missing", QX_NOTE, "architectures",
             "Qwen4ExpForConditionalGeneration", NULL,
             "architectures names none; model_type decides");
    } else if (!arch) {
        note(r, "architecture-unknown", QX_WARNING, "architectures",
             "Qwen4ExpForConditionalGeneration", c->architecture,
             "the architecture is not one of this model's; model_type decides");
    }
    if ((type && type->preview) || (arch && arch->preview)) {
        char found[192];
        char text[384];
        snprintf(found, sizeof found, "%s%s%s", c->type_found,
                 c->type_found[0] && c->architecture[0] ? ", " : "", c->architecture);
        snprintf(text, sizeof text,
                 "preview names (%s) are read as qwen4_exp, "
                 "Qwen4ExpForConditionalGeneration",
                 found);
        note(r, "architecture-alias", QX_NOTE,
             type && type->preview ? "model_type" : "architectures", "qwen4_exp", found, text);
    }
}

static void read_text_type(struct reader *r, struct qx_config *c, const struct section *s)
{
    static const char *const known[] = {"qwen4_exp_text", "qwen3_8_flash_next_text", "qwen4_exp",
                                        "qwen3_8_flash_next"};
    get_str(r, s, "model_type", c->text_type_found, sizeof c->text_type_found);
    if (c->text_type_found[0] == '\0') {
        return;
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(known); i++) {
        if (strcmp(known[i], c->text_type_found) == 0) {
            return;
        }
    }
    note(r, "text-model-type", QX_WARNING, "text_config.model_type", "qwen4_exp_text",
         c->text_type_found, "the text part claims another model type; the top level decides");
}

/* ---- the text model -------------------------------------------------------------------------- */

bool qx_config_is_full_attention(const char *layer_type)
{
    static const char *const qsa[] = {"full_attention", "qwen_sparse_attention",
                                      "deepseek_sparse_attention", "hybrid_indexed"};
    for (size_t i = 0; i < QX_ARRAY_LEN(qsa); i++) {
        if (strcmp(layer_type, qsa[i]) == 0) {
            return true;
        }
    }
    return false;
}

static void read_layer_types(struct reader *r, struct qx_config *c, const struct section *s)
{
    c->full_attention_interval = (uint32_t)get_int(r, s, "full_attention_interval", 1, 4096, 4);
    const struct qx_json *l = get_container(r, s, "layer_types", QX_JSON_ARRAY);
    if (r->rc) {
        return;
    }
    if (!l) {
        for (uint32_t i = 0; i < c->n_layers; i++) {
            c->layer_type[i] =
                (i + 1) % c->full_attention_interval == 0 ? QX_LAYER_QSA : QX_LAYER_GDN;
        }
        return;
    }
    if (l->n_children != c->n_layers) {
        r->rc =
            qx_fail(r->err, QX_E_CONFIG, "config-value",
                    "key '%slayer_types': expected %" PRIu32 " entries (num_hidden_layers), found "
                    "%zu",
                    s->path, c->n_layers, l->n_children);
        qx_error_at(r->err, r->file, NULL, l->off);
        return;
    }
    uint32_t i = 0;
    for (const struct qx_json *v = l->child; v; v = v->next, i++) {
        char key[48];
        snprintf(key, sizeof key, "layer_types[%" PRIu32 "]", i);
        if (v->type != QX_JSON_STRING) {
            fail_type(r, s->path, key, v, "a string");
            return;
        }
        bool full = qx_config_is_full_attention(v->str);
        c->layer_type[i] = full ? QX_LAYER_QSA : QX_LAYER_GDN;
        if (!full && strcmp(v->str, "linear_attention") != 0) {
            fail_value(r, s->path, key, v, "linear_attention or full_attention");
            return;
        }
    }
}

static void read_rope(struct reader *r, struct qx_config *c, const struct section *s)
{
    struct section rope = {get_container(r, s, "rope_parameters", QX_JSON_OBJECT), ""};
    if (!rope.o) {
        rope.o = get_container(r, s, "rope_scaling", QX_JSON_OBJECT);
    }
    static const char path[] = "text_config.rope_parameters.";
    rope.path = path;
    double none = nan("");
    bool nested = !absent(qx_json_get(rope.o, "partial_rotary_factor"));
    double f = get_f64(r, nested ? &rope : s, "partial_rotary_factor", none);
    if (!r->rc && nested && !absent(qx_json_get(s->o, "partial_rotary_factor"))) {
        double other = get_f64(r, s, "partial_rotary_factor", f);
        if (!r->rc && other != f) {
            fail_value(r, s->path, "partial_rotary_factor",
                       qx_json_get(s->o, "partial_rotary_factor"),
                       "the value of rope_parameters.partial_rotary_factor");
        }
    }
    nested = !absent(qx_json_get(rope.o, "rope_theta"));
    c->rope_theta = get_f64(r, nested ? &rope : s, "rope_theta", none);
    get_str(r, &rope, qx_json_get(rope.o, "rope_type") ? "rope_type" : "type", c->rope_type,
            sizeof c->rope_type);
    if (c->rope_type[0] == '\0') {
        snprintf(c->rope_type, sizeof c->rope_type, "default");
    }
    c->rope_factor = 1;
    c->rope_original_max_position = c->max_position_embeddings;
    c->yarn_beta_fast = get_f64(r, &rope, "beta_fast", 32);
    c->yarn_beta_slow = get_f64(r, &rope, "beta_slow", 1);
    if (strcmp(c->rope_type, "yarn") == 0) {
        c->rope_factor = get_f64(r, &rope, "factor", none);
        c->rope_original_max_position =
            (uint64_t)get_int(r, &rope, "original_max_position_embeddings", 1, INT64_C(1) << 40,
                              (int64_t)c->max_position_embeddings);
        if (!r->rc && !(c->rope_factor >= 1 && c->rope_factor <= 1e6)) {
            fail_value(r, rope.path, "factor", qx_json_get(rope.o, "factor"), "1 or more");
        }
    }
    if (r->rc) {
        return;
    }
    double dim = f * c->head_dim;
    if (!(f > 0 && f <= 1) || dim != floor(dim) || fmod(dim, 2) != 0) {
        r->rc = qx_fail(r->err, QX_E_CONFIG, "config-value",
                        "key 'partial_rotary_factor': %g of head_dim %" PRIu32
                        " is not an even number of dimensions",
                        f, c->head_dim);
        qx_error_at(r->err, r->file, NULL, QX_NO_OFF);
        return;
    }
    c->rotary_dim = (uint32_t)dim;
    if (c->rotary_dim > c->indexer_head_dim) {
        r->rc = qx_fail(r->err, QX_E_CONFIG, "config-value",
                        "key 'indexer_head_dim': expected at least the %" PRIu32
                        " rotated dimensions, found %" PRIu32,
                        c->rotary_dim, c->indexer_head_dim);
        qx_error_at(r->err, r->file, NULL, QX_NO_OFF);
        return;
    }
    if (!(c->rope_theta > 0)) {
        fail_value(r, "", "rope_theta", qx_json_get(rope.o, "rope_theta"), "a positive number");
    }
}

static void read_ple(struct reader *r, struct qx_config *c, const struct section *s)
{
    const struct qx_json *l = get_container(r, s, "ple_layer_ids", QX_JSON_ARRAY);
    get_str(r, s, "ple_embedding_dtype", c->ple_embedding_dtype, sizeof c->ple_embedding_dtype);
    c->ngram_seed = 1234;
    if (!l || l->n_children == 0 || r->rc) {
        return;
    }
    if (l->n_children > QX_ARRAY_LEN(c->ple_layer)) {
        fail_value(r, s->path, "ple_layer_ids", l, "at most 8 layers");
        return;
    }
    for (const struct qx_json *v = l->child; v; v = v->next) {
        int64_t id = 0;
        char expected[96];
        if (!whole(v, &id)) {
            fail_type(r, s->path, "ple_layer_ids", v, "whole numbers");
            return;
        }
        snprintf(expected, sizeof expected, "layers counted from 1 to %" PRIu32 ", each once",
                 c->n_layers);
        bool ok = id >= 1 && id <= (int64_t)c->n_layers;
        uint32_t at = c->n_ple_layers;
        for (uint32_t i = 0; ok && i < c->n_ple_layers; i++) {
            ok = c->ple_layer[i] != (uint32_t)id - 1;
        }
        if (!ok) {
            fail_value(r, s->path, "ple_layer_ids", v, expected);
            return;
        }
        /* Kept sorted: a layer's rank is its place in this order (model 7.1). */
        for (; at > 0 && c->ple_layer[at - 1] > (uint32_t)id - 1; at--) {
            c->ple_layer[at] = c->ple_layer[at - 1];
        }
        c->ple_layer[at] = (uint32_t)id - 1;
        c->n_ple_layers++;
        if (c->layer_type[id - 1] != QX_LAYER_GDN) {
            fail_value(r, s->path, "ple_layer_ids", v, "a linear-attention layer");
            return;
        }
    }
    c->ple_embed_dim = get_count(r, s, "ple_embed_dim", 1u << 24);
    c->ple_conv_kernel = get_count(r, s, "ple_conv_kernel_size", 64);
    c->ngram_size = (uint32_t)get_int(r, s, "ngram_size", 2, QX_MAX_NGRAM, -1);
    c->heads_per_ngram = get_count(r, s, "heads_per_ngram", QX_MAX_PLE_HEADS);
    c->ngram_vocab_size_base =
        (uint64_t)get_int(r, s, "ngram_vocab_size_base", 1, INT64_C(1) << 56, -1);
    c->ngram_divisible_by =
        (uint64_t)get_int(r, s, "make_ngram_vocab_size_divisible_by", 1, INT64_C(1) << 40, -1);
    c->split_ngram_parts = (uint64_t)get_int(r, s, "split_ngram_parts", 1, 1 << 20, 0);
    const struct qx_json *seed = qx_json_get(s->o, "seed");
    c->ngram_seed_found = !absent(seed);
    if (seed && seed->type == QX_JSON_NUMBER && seed->is_int && !seed->negative) {
        c->ngram_seed = seed->uint_value;
    } else {
        c->ngram_seed = (uint64_t)get_int(r, s, "seed", 0, INT64_MAX, 1234);
    }
    if (r->rc) {
        return;
    }
    uint64_t heads = (uint64_t)(c->ngram_size - 1) * c->heads_per_ngram;
    if (heads > QX_MAX_PLE_HEADS) {
        fail_value(r, s->path, "heads_per_ngram", qx_json_get(s->o, "heads_per_ngram"),
                   "at most 256 heads over all orders");
        return;
    }
    c->ple_heads = (uint32_t)heads;
    if (c->ple_embed_dim % c->ple_heads != 0) {
        r->rc = qx_fail(r->err, QX_E_CONFIG, "config-value",
                        "key '%sple_embed_dim': expected a multiple of the %" PRIu32
                        " n-gram heads, found %" PRIu32,
                        s->path, c->ple_heads, c->ple_embed_dim);
        qx_error_at(r->err, r->file, NULL, QX_NO_OFF);
        return;
    }
    c->ple_row_width = c->ple_embed_dim / c->ple_heads;
}

static void read_ids(struct reader *r, struct qx_config *c, const struct section *s)
{
    const struct qx_json *v = qx_json_get(s->o, "eos_token_id");
    const struct qx_json *e = v && v->type == QX_JSON_ARRAY ? qx_json_each(v, NULL) : v;
    for (; !absent(e) && c->n_text_eos < QX_ARRAY_LEN(c->text_eos);
         e = v->type == QX_JSON_ARRAY ? e->next : NULL) {
        int64_t id = 0;
        if (!whole(e, &id)) {
            fail_type(r, s->path, "eos_token_id", e, "a token id or a list of them");
            return;
        }
        if (id < 0 || id > UINT32_MAX) {
            fail_value(r, s->path, "eos_token_id", e, "a token id");
            return;
        }
        c->text_eos[c->n_text_eos++] = (uint32_t)id;
    }
    if (c->n_text_eos == 0 && c->n_ple_layers > 0) {
        fail_value(r, s->path, "eos_token_id", v, "the id that resets the n-gram history");
        return;
    }
    if (c->n_text_eos > 0) {
        c->eos_token_id = c->text_eos[0];
        if (c->eos_token_id >= c->vocab_size) {
            char brief[48];
            note(r, "config-value", QX_WARNING, "text_config.eos_token_id",
                 "an id below vocab_size", qx_json_brief(v, brief),
                 "the n-gram reset id is no token of the vocabulary");
        }
    }
    c->bos_token_id = -1;
    const struct qx_json *b = qx_json_get(s->o, "bos_token_id");
    if (!absent(b)) {
        c->bos_token_id = get_int(r, s, "bos_token_id", 0, UINT32_MAX, -1);
    }
}

static void read_mtp(struct reader *r, struct qx_config *c, const struct section *s)
{
    struct section mtp = {get_container(r, s, "mtp", QX_JSON_OBJECT), "text_config.mtp."};
    int64_t nested = get_int(r, &mtp, "num_hidden_layers", 0, 64, 0);
    c->n_mtp_layers = (uint32_t)get_int(r, s, "mtp_num_hidden_layers", 0, 64, nested);
    c->mentions_mtp = c->n_mtp_layers > 0 || mtp.o;
    if (mtp.o && !absent(qx_json_get(mtp.o, "num_hidden_layers")) && nested != c->n_mtp_layers) {
        fail_value(r, mtp.path, "num_hidden_layers", qx_json_get(mtp.o, "num_hidden_layers"),
                   "the value of mtp_num_hidden_layers");
    }
}

static void need_multiple(struct reader *r, const struct section *s, const char *key,
                          uint32_t value, const char *of, uint32_t divisor)
{
    if (!r->rc && (divisor == 0 || value % divisor != 0)) {
        r->rc = qx_fail(r->err, QX_E_CONFIG, "config-value",
                        "key '%s%s': expected a multiple of %s %" PRIu32 ", found %" PRIu32,
                        s->path, key, of, divisor, value);
        qx_error_at(r->err, r->file, NULL, QX_NO_OFF);
    }
}

static void need_word(struct reader *r, const struct section *s, const char *key, const char *word)
{
    char found[64];
    get_str(r, s, key, found, sizeof found);
    if (!r->rc && found[0] && strcmp(found, word) != 0) {
        fail_value(r, s->path, key, qx_json_get(s->o, key), word);
    }
}

static void read_text(struct reader *r, struct qx_config *c, const struct section *s)
{
    read_text_type(r, c, s);
    c->vocab_size = get_count(r, s, "vocab_size", 1u << 30);
    c->hidden_size = get_count(r, s, "hidden_size", 1u << 24);
    c->n_layers = get_count(r, s, "num_hidden_layers", QX_MAX_LAYERS);
    c->hc_count = get_count(r, s, "hc_count", 64);
    c->hc_lowrank = get_count(r, s, "hc_lowrank", 1u << 20);
    c->rms_norm_eps = get_f64(r, s, "rms_norm_eps", nan(""));
    if (!r->rc && !(c->rms_norm_eps > 0 && c->rms_norm_eps < 1)) {
        fail_value(r, s->path, "rms_norm_eps", qx_json_get(s->o, "rms_norm_eps"),
                   "a number between 0 and 1");
    }
    c->max_position_embeddings =
        (uint64_t)get_int(r, s, "max_position_embeddings", 1, INT64_C(1) << 40, -1);
    c->n_heads = get_count(r, s, "num_attention_heads", 1u << 16);
    c->n_kv_heads = get_count(r, s, "num_key_value_heads", 1u << 16);
    c->head_dim = get_count(r, s, "head_dim", 1u << 16);
    need_multiple(r, s, "num_attention_heads", c->n_heads, "num_key_value_heads", c->n_kv_heads);
    c->indexer_n_heads = get_count(r, s, "indexer_n_heads", 1u << 16);
    c->indexer_kv_heads = (uint32_t)get_int(r, s, "indexer_kv_heads", 1, 1, 1);
    c->indexer_head_dim = get_count(r, s, "indexer_head_dim", 1u << 16);
    c->indexer_compress_ratio = get_count(r, s, "indexer_compress_ratio", 1u << 16);
    c->indexer_budget = get_count(r, s, "indexer_budget", 1u << 30);
    need_multiple(r, s, "indexer_budget", c->indexer_budget, "indexer_compress_ratio",
                  c->indexer_compress_ratio);
    c->gdn_k_heads = get_count(r, s, "linear_num_key_heads", 1u << 16);
    c->gdn_v_heads = get_count(r, s, "linear_num_value_heads", 1u << 16);
    c->gdn_k_dim = get_count(r, s, "linear_key_head_dim", 1u << 16);
    c->gdn_v_dim = get_count(r, s, "linear_value_head_dim", 1u << 16);
    c->gdn_conv_kernel = get_count(r, s, "linear_conv_kernel_dim", 64);
    need_multiple(r, s, "linear_num_value_heads", c->gdn_v_heads, "linear_num_key_heads",
                  c->gdn_k_heads);
    get_str(r, s, "output_gate_type", c->output_gate_type, sizeof c->output_gate_type);
    if (c->output_gate_type[0] == '\0') {
        snprintf(c->output_gate_type, sizeof c->output_gate_type, "sigmoid");
    }
    need_word(r, s, "output_gate_type", "sigmoid");
    need_word(r, s, "hidden_act", "silu");
    if (get_bool(r, s, "attention_bias", false)) {
        fail_value(r, s->path, "attention_bias", qx_json_get(s->o, "attention_bias"), "false");
    }
    c->n_experts = get_count(r, s, "num_experts", 1u << 16);
    c->n_experts_per_tok = get_count(r, s, "num_experts_per_tok", 1u << 16);
    if (!r->rc && c->n_experts_per_tok > c->n_experts) {
        fail_value(r, s->path, "num_experts_per_tok", qx_json_get(s->o, "num_experts_per_tok"),
                   "at most num_experts");
    }
    c->moe_intermediate_size = get_count(r, s, "moe_intermediate_size", 1u << 24);
    c->shared_expert_intermediate_size =
        get_count(r, s, "shared_expert_intermediate_size", 1u << 24);
    c->norm_topk_prob = get_bool(r, s, "norm_topk_prob", true);
    if (r->rc) {
        return;
    }
    read_layer_types(r, c, s);
    read_rope(r, c, s);
    if (r->rc) {
        return;
    }
    read_ple(r, c, s);
    read_ids(r, c, s);
    read_mtp(r, c, s);
}

static void read_vision(struct reader *r, struct qx_config *c, const struct section *top)
{
    struct section v = {get_container(r, top, "vision_config", QX_JSON_OBJECT), "vision_config."};
    if (!v.o) {
        return;
    }
    const struct {
        const char *key;
        uint32_t *to;
    } field[] = {
        {"depth", &c->vision.depth},
        {"hidden_size", &c->vision.hidden_size},
        {"in_channels", &c->vision.in_channels},
        {"intermediate_size", &c->vision.intermediate_size},
        {"num_heads", &c->vision.num_heads},
        {"num_position_embeddings", &c->vision.num_position_embeddings},
        {"out_hidden_size", &c->vision.out_hidden_size},
        {"patch_size", &c->vision.patch_size},
        {"spatial_merge_size", &c->vision.spatial_merge_size},
        {"temporal_patch_size", &c->vision.temporal_patch_size},
    };
    c->has_vision_config = true;
    for (size_t i = 0; i < QX_ARRAY_LEN(field); i++) {
        *field[i].to = (uint32_t)get_int(r, &v, field[i].key, 1, 1 << 24, 0);
    }
}

int qx_config_parse(struct qx_config *out, const char *text, size_t n, const char *file,
                    struct qx_findings *fs, struct qx_error *err)
{
    struct qx_json_doc doc;
    struct qx_config c;
    memset(out, 0, sizeof *out);
    memset(&c, 0, sizeof c);
    c.bos_token_id = -1;
    int rc = qx_json_doc_parse(&doc, text, n, file, fs, err);
    if (rc) {
        return rc;
    }
    struct reader r = {.file = file, .fs = fs, .err = err};
    struct section top = {doc.root, ""};
    if (doc.root->type != QX_JSON_OBJECT) {
        fail_type(&r, "", "(top level)", doc.root, "an object");
        goto out;
    }
    read_identity(&r, &c, &top);
    /* What was found is kept even when the model is not supported, so that it can be shown. */
    memcpy(out, &c, sizeof c);
    if (r.rc) {
        goto out;
    }
    struct section s = {get_container(&r, &top, "text_config", QX_JSON_OBJECT), "text_config."};
    if (!s.o && !r.rc) {
        /* A text-only export keeps the text keys at the top. */
        if (qx_json_get(doc.root, "hidden_size")) {
            s = top;
        } else {
            fail_type(&r, "", "text_config", qx_json_get(doc.root, "text_config"), "an object");
        }
    }
    if (r.rc) {
        goto out;
    }
    read_text(&r, &c, &s);
    c.tie_word_embeddings =
        get_bool(&r, &top, "tie_word_embeddings", get_bool(&r, &s, "tie_word_embeddings", false));
    read_vision(&r, &c, &top);
    if (!r.rc) {
        memcpy(out, &c, sizeof c);
        qx_config_check(&c, doc.root, s.o, file, fs);
        if (fs && qx_findings_failed(fs)) {
            r.rc = qx_fail_nomem(err);
        }
    }
out:
    qx_json_doc_fini(&doc);
    return r.rc;
}

uint64_t qx_config_context_limit(const struct qx_config *c)
{
    if (strcmp(c->rope_type, "yarn") == 0) {
        double limit = floor((double)c->rope_original_max_position * c->rope_factor);
        return limit < 9e18 ? (uint64_t)limit : UINT64_MAX;
    }
    return c->max_position_embeddings;
}
