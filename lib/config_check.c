/* config_check.c: settings that can be read but do not go together, or that no published checkpoint
 * has. Nothing here stops a reader: the configuration is used as it stands. */
#include "config_check.h"

#include "qx.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct checker {
    const struct qx_config *c;
    const struct qx_json *top, *text;
    const char *file;
    struct qx_findings *fs;
};

static void say(const struct checker *k, enum qx_severity sev, const char *kind, const char *key,
                const char *expected, const char *found, const char *text)
{
    qx_findings_add(k->fs, &QX_REPORT(kind, sev, .file = k->file, .key = key, .expected = expected,
                                      .found = found, .text = text));
}

static const struct qx_json *number(const struct qx_json *o, const char *key)
{
    const struct qx_json *v = qx_json_get(o, key);
    return v && v->type == QX_JSON_NUMBER && !v->is_nonfinite ? v : NULL;
}

static void check_rope(const struct checker *k)
{
    const struct qx_config *c = k->c;
    const struct qx_json *rope = qx_json_get(k->text, "rope_parameters");
    const struct qx_json *sections = qx_json_get(rope, "mrope_section");
    const struct qx_json *mtp = number(qx_json_get(k->text, "mtp"), "rope_theta");
    char expected[48];
    char found[48];
    if (strcmp(c->rope_type, "default") != 0 && strcmp(c->rope_type, "yarn") != 0) {
        say(k, QX_WARNING, "rope-unsupported", "text_config.rope_parameters.rope_type",
            "default or yarn", c->rope_type,
            "qx run knows no such scaling of positions and refuses it");
    }
    if (mtp && mtp->f64 != c->rope_theta) {
        snprintf(expected, sizeof expected, "%.9g", c->rope_theta);
        snprintf(found, sizeof found, "%.9g", mtp->f64);
        say(k, QX_WARNING, "config-value", "text_config.mtp.rope_theta", expected, found,
            "the MTP layer has another rope_theta than the layers it drafts for; theirs is used");
    }
    if (sections && sections->type == QX_JSON_ARRAY) {
        double sum = 0;
        for (const struct qx_json *v = sections->child; v; v = v->next) {
            sum += v->type == QX_JSON_NUMBER && !v->is_nonfinite ? v->f64 : -1e9;
        }
        uint32_t half = c->rotary_dim / 2;
        if (sum != half) {
            snprintf(expected, sizeof expected, "a sum of %" PRIu32, half);
            snprintf(found, sizeof found, "%.9g", sum);
            say(k, QX_WARNING, "config-value", "text_config.rope_parameters.mrope_section",
                expected, found,
                "the sections do not add up to the rotated pairs; text does not need them");
        }
    }
}

static void check_layers(const struct checker *k)
{
    const struct qx_config *c = k->c;
    const struct qx_json *mtp = qx_json_get(k->text, "mtp");
    const struct qx_json *types = qx_json_get(mtp, "layer_types");
    if (qx_json_get(k->text, "layer_types") && number(k->text, "full_attention_interval")) {
        bool same = true;
        for (uint32_t i = 0; i < c->n_layers; i++) {
            bool full = (i + 1) % c->full_attention_interval == 0;
            same = same && full == (c->layer_type[i] == QX_LAYER_QSA);
        }
        if (!same) {
            char found[24];
            snprintf(found, sizeof found, "%" PRIu32, c->full_attention_interval);
            say(k, QX_WARNING, "config-value", "text_config.full_attention_interval",
                "the interval of layer_types", found,
                "layer_types and full_attention_interval disagree; the list is used");
        }
    }
    if (types && types->type == QX_JSON_ARRAY) {
        bool full = types->n_children == c->n_mtp_layers;
        for (const struct qx_json *v = types->child; v; v = v->next) {
            full = full && v->type == QX_JSON_STRING && qx_config_is_full_attention(v->str);
        }
        if (!full) {
            say(k, QX_WARNING, "config-value", "text_config.mtp.layer_types",
                "full_attention for each MTP layer", NULL,
                "the MTP head is known with full attention only; it is read so");
        }
    }
    const struct qx_json *own = qx_json_get(k->text, "mtp_use_dedicated_embeddings");
    if (own && own->type == QX_JSON_TRUE) {
        say(k, QX_WARNING, "config-value", "text_config.mtp_use_dedicated_embeddings", "false",
            "true",
            "an MTP head with embeddings of its own is not known; the shared ones are used");
    }
    const struct qx_json *a = qx_json_get(k->top, "tie_word_embeddings");
    const struct qx_json *b = qx_json_get(k->text, "tie_word_embeddings");
    if (a && b && k->top != k->text && a->type != b->type) {
        say(k, QX_WARNING, "config-value", "text_config.tie_word_embeddings",
            a->type == QX_JSON_TRUE ? "true" : "false", b->type == QX_JSON_TRUE ? "true" : "false",
            "the two settings of tie_word_embeddings disagree; the one at the top is used");
    }
}

/* Constants that every published checkpoint shares, whatever its size: another value is legal,
 * changes every result, and cannot be seen in the weights. */
static void check_unusual(const struct checker *k)
{
    const struct qx_config *c = k->c;
    char found[48];
    if (c->rms_norm_eps != 1e-6) {
        snprintf(found, sizeof found, "%.9g", c->rms_norm_eps);
        say(k, QX_NOTE, "config-value", "text_config.rms_norm_eps", "1e-06", found,
            "unusual: every published checkpoint has 1e-06");
    }
    if (c->rope_theta != 1e7) {
        snprintf(found, sizeof found, "%.9g", c->rope_theta);
        say(k, QX_NOTE, "config-value", "text_config.rope_parameters.rope_theta", "10000000", found,
            "unusual: every published checkpoint has 10000000");
    }
    if (c->indexer_compress_ratio != 4) {
        snprintf(found, sizeof found, "%" PRIu32, c->indexer_compress_ratio);
        say(k, QX_NOTE, "config-value", "text_config.indexer_compress_ratio", "4", found,
            "unusual: every published checkpoint has 4");
    }
    if (!c->norm_topk_prob) {
        say(k, QX_NOTE, "config-value", "text_config.norm_topk_prob", "true", "false",
            "unusual: in every published checkpoint the router's weights are normalised");
    }
    if (c->n_text_eos && c->bos_token_id >= 0 && (uint64_t)c->bos_token_id != c->eos_token_id) {
        char expected[48];
        snprintf(expected, sizeof expected, "%" PRId64 " (bos_token_id)", c->bos_token_id);
        snprintf(found, sizeof found, "%" PRIu32, c->eos_token_id);
        say(k, QX_NOTE, "config-value", "text_config.eos_token_id", expected, found,
            "unusual: in every published checkpoint the id that resets the n-gram history is also "
            "bos_token_id");
    }
}

void qx_config_check(const struct qx_config *c, const struct qx_json *top,
                     const struct qx_json *text, const char *file, struct qx_findings *fs)
{
    struct checker k = {c, top, text, file, fs};
    if (fs) {
        check_rope(&k);
        check_layers(&k);
        check_unusual(&k);
    }
}
