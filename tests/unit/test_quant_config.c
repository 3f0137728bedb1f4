/* Quantisation settings of every producer: layouts of the block, names that drift, globs, lists, types. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "quant_config.h"
#include "resolve_impl.h"

struct home {
    struct qx_json_doc doc;
    struct qx_arena *arena;
    struct qx_quant_home h;
    struct qx_config c;
    int rc;
    struct qx_error err;
};

static void read_home(struct home *x, const char *text)
{
    memset(x, 0, sizeof *x);
    x->c.n_layers = 4;
    x->arena = qx_arena_create();
    assert_int_equal(qx_json_doc_parse(&x->doc, text, strlen(text), "q.json", NULL, NULL), 0);
    x->rc = qx_quant_home_read(&x->h, x->doc.root, "q.json", "", &x->c, x->arena, NULL, &x->err);
}

static void drop(struct home *x)
{
    qx_json_doc_fini(&x->doc);
    qx_arena_destroy(x->arena);
}

#define L "model.language_model.layers."

static void test_norm_names(void **state)
{
    static const struct {
        const char *name, *rest;
        enum qx_part part;
        bool stripped;
    } t[] = {
        {L "0.mlp.gate", "layers.0.mlp.gate", QX_PART_TEXT, false},
        {"language_model.model.layers.0.mlp.gate", "layers.0.mlp.gate", QX_PART_TEXT, true},
        {"model.layers.0.mlp.gate", "layers.0.mlp.gate", QX_PART_TEXT, true},
        {"model.language_model.model.layers.0.x", "layers.0.x", QX_PART_TEXT, true},
        {"lm_head", "lm_head", QX_PART_HEAD, false},
        {"language_model.lm_head", "lm_head", QX_PART_HEAD, true},
        {"mtp.fc_hidden", "mtp.fc_hidden", QX_PART_MTP, false},
        {"model.mtp.*", "mtp.*", QX_PART_MTP, true},
        {"model.visual.blocks.0", "visual.blocks.0", QX_PART_VISION, false},
        {"visual.blocks.0", "visual.blocks.0", QX_PART_VISION, true},
        {"*.mlp.gate", "*.mlp.gate", QX_PART_ANY, false},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        struct qx_norm n = qx_norm_name(t[i].name, strlen(t[i].name));
        assert_int_equal(n.n, strlen(t[i].rest));
        assert_memory_equal(n.p, t[i].rest, n.n);
        assert_int_equal(n.part, t[i].part);
        assert_int_equal(n.stripped, t[i].stripped);
    }
}

static void test_algorithms(void **state)
{
    (void)state;
    assert_int_equal(qx_algo_parse("nvfp4"), QX_A_NVFP4);
    assert_int_equal(qx_algo_parse("FP8_PB_WO"), QX_A_FP8_BLOCK);
    assert_int_equal(qx_algo_parse("fp8_block_scales"), QX_A_FP8_BLOCK);
    assert_int_equal(qx_algo_parse("W4A16_AWQ"), QX_A_UNKNOWN);
    assert_int_equal(qx_algo_parse(""), QX_A_NONE);
    assert_int_equal(qx_algo_format(QX_A_MIXED), QX_F_NONE);
}

static const char modelopt[] =
    "{\"quantization\": {\"quant_algo\": \"MIXED_PRECISION\", \"exclude_modules\": [\"lm_head\","
    " \"*.self_attn.?_proj\", \"*.mlp.gate*\", \"model.visual*\", \"model.embed_tokens\"],"
    " \"quantized_layers\": {"
    "\"" L "0.mlp.experts\": {\"quant_algo\": \"NVFP4\", \"group_size\": 16},"
    "\"" L "0.mlp.experts.1.up_proj\": {\"quant_algo\": \"FP8\"},"
    "\"model.layers.1.mlp.experts\": {\"quant_algo\": \"MXFP8\", \"group_size\": 32},"
    "\"mtp.layers.4.mlp.experts\": {\"quant_algo\": \"FP8_PB_WO\", \"group_size\": 128}}}}";

static enum qx_format claimed(struct home *x, const char *name)
{
    struct qx_claim c = qx_claim_of(&x->h, &x->c, name, true);
    return c.kind == QX_CL_FORMAT ? c.format : QX_F_NONE;
}

static void test_map_and_globs(void **state)
{
    struct home x;
    (void)state;
    read_home(&x, modelopt);
    assert_int_equal(x.rc, 0);
    assert_int_equal(x.h.n_entries, 4);
    /* the longest prefix decides; prefixes drift; the run-time number of the MTP layer is an alias */
    assert_int_equal(claimed(&x, L "0.mlp.experts.0.up_proj"), QX_F_NVFP4);
    assert_int_equal(claimed(&x, L "0.mlp.experts.1.up_proj"), QX_F_FP8);
    assert_int_equal(claimed(&x, L "0.mlp.experts.10.up_proj"), QX_F_NVFP4);
    assert_int_equal(claimed(&x, L "1.mlp.experts.0.up_proj"), QX_F_MXFP8);
    assert_int_equal(claimed(&x, "mtp.layers.0.mlp.experts.0.up_proj"), QX_F_FP8_BLOCK);
    assert_int_equal(claimed(&x, L "2.mlp.experts.0.up_proj"), QX_F_NONE);
    assert_int_equal(claimed(&x, L "0.mlp.expertsx.0.up_proj"), QX_F_NONE);
    /* "*.mlp.gate*" covers mlp.gate and not mlp.experts.7.gate_proj */
    assert_int_equal(qx_claim_of(&x.h, &x.c, L "2.mlp.gate", true).kind, QX_CL_IGNORED);
    assert_int_equal(qx_claim_of(&x.h, &x.c, L "2.mlp.experts.7.gate_proj", true).kind, QX_CL_NONE);
    assert_int_equal(qx_claim_of(&x.h, &x.c, L "3.self_attn.q_proj", true).kind, QX_CL_IGNORED);
    assert_int_equal(qx_claim_of(&x.h, &x.c, L "3.self_attn.qk_proj", true).kind, QX_CL_NONE);
    assert_int_equal(qx_claim_of(&x.h, &x.c, "lm_head", true).kind, QX_CL_IGNORED);
    assert_int_equal(qx_claim_of(&x.h, &x.c, "model.language_model.embed_tokens", false).kind,
                     QX_CL_IGNORED);
    assert_int_equal(qx_claim_of(&x.h, &x.c, "model.visual.merger.linear_fc1", true).kind, QX_CL_IGNORED);
    drop(&x);
}

static void test_fp8_method(void **state)
{
    struct home x;
    (void)state;
    read_home(&x, "{\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128],"
                  " \"modules_to_not_convert\": [\"lm_head\", \"" L "0.mlp.gate\"],"
                  " \"modules_to_convert\": [\"ple.ple_embedding.ngram_embedding\"]}");
    assert_int_equal(x.rc, 0);
    assert_int_equal(x.h.algo, QX_A_FP8_BLOCK);
    assert_int_equal(claimed(&x, L "0.mlp.experts.0.up_proj"), QX_F_FP8_BLOCK);
    assert_int_equal(qx_claim_of(&x.h, &x.c, L "0.mlp.gate", true).source, QX_SRC_NOT_CONVERT);
    struct qx_claim t = qx_claim_of_table(&x.h, L "1.ple.ple_embedding.ngram_embedding");
    assert_int_equal(t.kind, QX_CL_FORMAT);
    assert_int_equal(t.format, QX_F_FP8); /* one scale, though the method has blocks */
    assert_int_equal(t.source, QX_SRC_CONVERT);
    drop(&x);
}

static void test_top_level_block(void **state)
{
    struct home x;
    (void)state;
    read_home(&x, "{\"producer\": {}, \"quant_algo\": \"NVFP4\", \"ignore\": null}");
    assert_int_equal(x.rc, 0);
    assert_true(x.h.present);
    assert_int_equal(claimed(&x, L "0.mlp.gate"), QX_F_NVFP4);
    assert_int_equal(qx_claim_of(&x.h, &x.c, L "0.linear_attn.norm", false).kind, QX_CL_NONE);
    drop(&x);
}

static void test_types(void **state)
{
    static const char *const bad[] = {
        "[]",
        "{\"quantized_layers\": [\"x\"]}",
        "{\"quantized_layers\": {\"a\": 7}}",
        "{\"quantized_layers\": {\"a\": {\"quant_algo\": 4}}}",
        "{\"quantized_layers\": {\"a\": {\"quant_algo\": \"NVFP4\", \"group_size\": \"16\"}}}",
        "{\"quantized_layers\": {\"a\": {\"quant_algo\": \"NVFP4\", \"group_size\": 0}}}",
        "{\"quantized_layers\": {\"a\": {\"quant_algo\": \"NVFP4\", \"group_size\": -16}}}",
        "{\"ignore\": \"lm_head\"}",
        "{\"ignore\": [7]}",
        "{\"quantization\": 7}",
        "{\"quant_method\": \"fp8\", \"weight_block_size\": [128]}",
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(bad); i++) {
        struct home x;
        read_home(&x, bad[i]);
        if (x.rc == 0) {
            fail_msg("%s is accepted", bad[i]);
        }
        assert_string_equal(x.err.kind, "config-type");
        drop(&x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm_names),
        cmocka_unit_test(test_algorithms),
        cmocka_unit_test(test_map_and_globs),
        cmocka_unit_test(test_fp8_method),
        cmocka_unit_test(test_top_level_block),
        cmocka_unit_test(test_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
