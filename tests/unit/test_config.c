/* The model configuration: values, spellings, defaults, and what is refused with which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "config.h"
#include "config_text.h"

static int parse(struct qx_config *c, const char *text, struct qx_findings *fs, struct qx_error *err)
{
    return qx_config_parse(c, text, strlen(text), "config.json", fs, err);
}

static void test_t0(void **state)
{
    struct qx_config c;
    struct qx_findings *fs = qx_findings_create();
    (void)state;
    assert_int_equal(parse(&c, t0_text, fs, NULL), 0);
    assert_int_equal(qx_findings_count(fs), 0);
    assert_string_equal(c.type, "qwen4_exp");
    assert_int_equal(c.n_layers, 4);
    assert_int_equal(c.layer_type[2], QX_LAYER_GDN);
    assert_int_equal(c.layer_type[3], QX_LAYER_QSA);
    assert_int_equal(c.rotary_dim, 4);
    assert_int_equal(c.n_ple_layers, 1);
    assert_int_equal(c.ple_layer[0], 1);
    assert_int_equal(c.ple_heads, 4);
    assert_int_equal(c.ple_row_width, 32);
    assert_int_equal(c.ngram_seed, 1234);
    assert_false(c.ngram_seed_found);
    assert_int_equal(c.eos_token_id, 2);
    assert_int_equal(c.n_mtp_layers, 1);
    assert_true(c.norm_topk_prob);
    assert_true(c.rms_norm_eps == 1e-06);
    assert_int_equal(qx_config_context_limit(&c), 128);
    qx_findings_destroy(fs);
}

/* Every row changes one spot; kind NULL: still accepted. */
static const struct {
    const char *from, *to, *kind, *says;
} changes[] = {
    {"\"model_type\": \"qwen4_exp\"", "\"model_type\": \"qwen3_next\"", "unsupported-model-type",
     "qwen3_next"},
    {"\"num_hidden_layers\": 4", "\"num_hidden_layers\": \"4\"", "config-type", "num_hidden_layers"},
    {"\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5", "config-value", "layer_types"},
    {"\"hidden_size\": 64", "\"hidden_size\": NaN", "config-type", "hidden_size"},
    {"\"hidden_size\": 64", "\"hidden_size\": 64.0", NULL, NULL},
    {"\"hidden_size\": 64", "\"hidden_size\": 64.5", "config-value", "hidden_size"},
    {"\"hidden_size\": 64", "\"hidden_size\": -64", "config-value", "hidden_size"},
    {"\"hidden_size\": 64,", "", "config-value", "hidden_size"},
    {"\"ple_embed_dim\": 128", "\"ple_embed_dim\": 130", "config-value", "130"},
    {"\"ple_layer_ids\": [2]", "\"ple_layer_ids\": [0]", "config-value", "ple_layer_ids"},
    {"\"ple_layer_ids\": [2]", "\"ple_layer_ids\": [5]", "config-value", "ple_layer_ids"},
    {"\"ple_layer_ids\": [2]", "\"ple_layer_ids\": [2, 2]", "config-value", "ple_layer_ids"},
    {"\"ple_layer_ids\": [2]", "\"ple_layer_ids\": [4]", "config-value", "linear-attention"},
    {"\"ple_layer_ids\": [2]", "\"ple_layer_ids\": []", NULL, NULL},
    {"\"eos_token_id\": 2", "\"eos_token_id\": [2, 3]", NULL, NULL},
    {"\"eos_token_id\": 2", "\"eos_token_id\": \"2\"", "config-type", "eos_token_id"},
    {"\"eos_token_id\": 2", "\"eos_token_id\": null", "config-value", "eos_token_id"},
    {"\"full_attention\"]", "\"qwen_sparse_attention\"]", NULL, NULL},
    {"\"full_attention\"]", "\"sliding_attention\"]", "config-value", "layer_types[3]"},
    {"\"num_experts_per_tok\": 1", "\"num_experts_per_tok\": 3", "config-value", "num_experts_per_tok"},
    {"\"num_key_value_heads\": 1", "\"num_key_value_heads\": 3", "config-value", "num_attention_heads"},
    {"\"indexer_budget\": 8", "\"indexer_budget\": 9", "config-value", "indexer_budget"},
    {"\"output_gate_type\": \"sigmoid\"", "\"output_gate_type\": \"silu\"", "config-value",
     "output_gate_type"},
    {"\"attention_bias\": false", "\"attention_bias\": true", "config-value", "attention_bias"},
    {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0", "config-value", "rms_norm_eps"},
    {"\"rope_theta\": 10000000, \"partial_rotary_factor\": 0.25",
     "\"rope_theta\": 10000000, \"partial_rotary_factor\": 0.5", "config-value", "partial_rotary_factor"},
    {"\"rope_parameters\": {", "\"rope_parameters\": [], \"x\": {", "config-type", "rope_parameters"},
    {"\"text_config\": {", "\"text_config\": 7, \"x\": {", "config-type", "text_config"},
    {"\"mtp_num_hidden_layers\": 1", "\"mtp_num_hidden_layers\": 0", NULL, NULL},
};

static void test_changes(void **state)
{
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(changes); i++) {
        struct qx_config c;
        struct qx_error err = {0};
        char *text = t0_with(changes[i].from, changes[i].to);
        int rc = parse(&c, text, NULL, &err);
        if (!changes[i].kind) {
            if (rc != 0) {
                fail_msg("%s: %s", changes[i].to, err.msg);
            }
        } else {
            if (rc == 0) {
                fail_msg("%s is accepted", changes[i].to);
            }
            assert_string_equal(err.kind, changes[i].kind);
            if (!strstr(err.msg, changes[i].says)) {
                fail_msg("%s: the message does not name %s: %s", changes[i].to, changes[i].says, err.msg);
            }
        }
        free(text);
    }
}

static void test_preview_names(void **state)
{
    struct qx_config c;
    struct qx_findings *fs = qx_findings_create();
    char *text = t0_with("\"Qwen4ExpForConditionalGeneration\"], \"model_type\": \"qwen4_exp\"",
                         "\"Qwen3_8FlashNextForConditionalGeneration\"], \"model_type\": "
                         "\"qwen3_8_flash_next\"");
    (void)state;
    assert_int_equal(parse(&c, text, fs, NULL), 0);
    assert_string_equal(c.type, "qwen4_exp");
    assert_string_equal(c.type_found, "qwen3_8_flash_next");
    assert_int_equal(qx_findings_count(fs), 1);
    assert_string_equal(qx_findings_at(fs, 0)->kind, "architecture-alias");
    assert_int_equal(qx_findings_at(fs, 0)->severity, QX_NOTE);
    qx_findings_destroy(fs);
    free(text);
}

static void test_words_and_duplicates(void **state)
{
    struct qx_config c;
    struct qx_findings *fs = qx_findings_create();
    char *text = t0_with("\"hc_count\": 4", "\"hc_count\": 4, \"hc_count\": 4, \"time_step_limit\": [0.0, "
                                            "Infinity], \"seed\": 7, \"seed\": 8");
    (void)state;
    assert_int_equal(parse(&c, text, fs, NULL), 0);
    qx_findings_sort(fs);
    assert_int_equal(qx_findings_count(fs), 3);
    assert_string_equal(qx_findings_at(fs, 0)->kind, "json-duplicate-key");
    assert_int_equal(qx_findings_at(fs, 0)->severity, QX_ERROR);
    assert_string_equal(qx_findings_at(fs, 0)->key, "text_config.seed");
    assert_int_equal(qx_findings_count_severity(fs, QX_NOTE), 2);
    assert_int_equal(c.ngram_seed, 8); /* the last wins */
    qx_findings_destroy(fs);
    free(text);
}

static void test_yarn(void **state)
{
    struct qx_config c;
    char *text = t0_with("\"rope_type\": \"default\"", "\"rope_type\": \"yarn\", \"factor\": 4, "
                                                       "\"original_max_position_embeddings\": 64");
    (void)state;
    assert_int_equal(parse(&c, text, NULL, NULL), 0);
    assert_int_equal(qx_config_context_limit(&c), 256);
    assert_true(c.yarn_beta_fast == 32 && c.yarn_beta_slow == 1);
    free(text);
}

static void test_broken_json(void **state)
{
    static const struct {
        const char *text, *kind;
    } bad[] = {
        {"", "json-syntax"}, {"[]", "config-type"}, {"{\"a\":", "json-syntax"},
        {"\xef\xbb\xbf{}", "json-bom"}, {"{}", "unsupported-model-type"},
        {"{\"model_type\": 7}", "config-type"}, {"{\"model_type\": \"qwen4_exp\"}", "config-type"},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(bad); i++) {
        struct qx_config c;
        struct qx_error err = {0};
        assert_true(parse(&c, bad[i].text, NULL, &err) < 0);
        assert_string_equal(err.kind, bad[i].kind);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_t0),
        cmocka_unit_test(test_changes),
        cmocka_unit_test(test_preview_names),
        cmocka_unit_test(test_words_and_duplicates),
        cmocka_unit_test(test_yarn),
        cmocka_unit_test(test_broken_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
