/* config.json: an accepted configuration has counts that the rest of the program may rely on, whatever
 * else the text says; and its quantisation settings can be looked up. */
#include "fuzz.h"

#include "config.h"
#include "json_doc.h"
#include "quant_config.h"

static void check_shapes(const struct qx_config *c)
{
    CHECK(c->vocab_size && c->hidden_size && c->n_layers && c->n_layers <= QX_MAX_LAYERS);
    CHECK(c->hc_count && c->n_heads && c->n_kv_heads && c->head_dim && c->n_experts && c->n_experts_per_tok);
    CHECK(c->n_experts_per_tok <= c->n_experts && c->rotary_dim <= c->head_dim);
    CHECK(c->gdn_k_heads && c->gdn_v_heads && c->gdn_v_heads % c->gdn_k_heads == 0);
    CHECK(c->indexer_compress_ratio && c->rms_norm_eps > 0);
    CHECK(c->n_ple_layers <= 8 && c->ple_heads <= QX_MAX_PLE_HEADS && c->ngram_size <= QX_MAX_NGRAM);
    for (uint32_t i = 0; i < c->n_ple_layers; i++) {
        CHECK(c->ple_layer[i] < c->n_layers);
    }
    if (c->n_ple_layers) {
        CHECK(c->ple_heads && c->ple_row_width && c->ple_row_width * c->ple_heads == c->ple_embed_dim);
    }
    CHECK(memchr(c->type, 0, sizeof c->type) && memchr(c->type_found, 0, sizeof c->type_found));
    CHECK(memchr(c->rope_type, 0, sizeof c->rope_type) && qx_config_context_limit(c) > 0);
}

static void check_quant(const char *text, size_t n, const struct qx_config *c)
{
    struct qx_json_doc doc;
    struct qx_findings *fs = qx_findings_create();
    struct qx_arena *arena = qx_arena_create();
    struct qx_quant_home home = {0};
    CHECK(fs && arena);
    if (qx_json_doc_parse(&doc, text, n, "config.json", NULL, NULL) == 0) {
        const struct qx_json *q = qx_json_get(doc.root, "quantization_config");
        struct qx_error err = {0};
        if (q && qx_quant_home_read(&home, q, "config.json", "quantization_config", c, arena, fs, &err) == 0) {
            static const char *const names[] = {"model.language_model.layers.0.mlp.experts.0.gate_proj", "lm_head",
                                                "mtp.layers.0.mlp.experts", ""};
            for (size_t i = 0; i < QX_ARRAY_LEN(names); i++) {
                struct qx_norm m = qx_norm_name(names[i], strlen(names[i]));
                const struct qx_quant_entry *e = qx_quant_find_entry(&home, m);
                CHECK(!e || (e >= home.entries && e < home.entries + home.n_entries));
                (void)qx_quant_find_pattern(home.ignore, home.n_ignore, names[i], m);
            }
        }
        qx_json_doc_fini(&doc);
    }
    qx_arena_destroy(arena);
    qx_findings_destroy(fs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    char *text = fuzz_copy(data, size);
    struct qx_findings *fs = qx_findings_create();
    struct qx_config c;
    struct qx_error err = {0};
    memset(&c, 0, sizeof c);
    CHECK(fs);
    int rc = qx_config_parse(&c, text, size, "config.json", fs, &err);
    CHECK(rc == 0 || (rc == -(int)err.code && err.kind && err.msg[0]));
    if (rc == 0) {
        check_shapes(&c);
        check_quant(text, size, &c);
    }
    qx_findings_destroy(fs);
    free(text);
    CHECK(qx_alloc_live() == live);
    return 0;
}
