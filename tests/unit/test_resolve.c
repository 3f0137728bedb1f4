/* Resolution of the micro checkpoints: every component's format and source, the table, and the plan that
 * needs no weights, against the published sizes (formats 1.2). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "ckpt.h"
#include "resolve.h"

struct want {
    const char *layout;
    struct { const char *component, *format, *source; } c[13];
};

static const struct want wants[] = {
    {"bf16", {{"experts", "BF16", "default"}, {"ple_table", "BF16", "default"}, {"mtp", "BF16", "default"},
              {"ple", "BF16", "default"}, {"vision", "BF16", "default"}}},
    {"fp8", {{"experts", "FP8_BLOCK", "default"}, {"ple_table", "FP8", "modules_to_convert"},
             {"mtp", "FP8_BLOCK", "default"}, {"lm_head", "BF16", "modules_to_not_convert"},
             {"embed", "BF16", "modules_to_not_convert"}, {"router", "BF16", "modules_to_not_convert"},
             {"hyper_connections", "BF16", "modules_to_not_convert"},
             {"linear_attn", "BF16", "modules_to_not_convert"}, {"vision", "BF16", "default"}}},
    {"mixed", {{"experts", "NVFP4", "map"}, {"ple_table", "FP8", "map"}, {"mtp", "FP8_BLOCK", "map"},
               {"embed", "BF16", "ignore"}, {"ple", "BF16", "default"}, {"vision", "BF16", "ignore"},
               {"self_attn", "BF16", "ignore"}}},
    {"nvfp4", {{"experts", "NVFP4", "default"}, {"ple_table", "FP8", "ple_embedding_dtype"},
               {"mtp", "BF16", "ignore"}, {"ple", "BF16", "ignore"}, {"lm_head", "BF16", "ignore"}}},
    {"nvfp4-ple", {{"experts", "NVFP4", "map"}, {"ple_table", "NVFP4", "ple_embedding_dtype"},
                   {"mtp", "W4A16_NVFP4", "map"}, {"linear_attn", "MXFP8", "map"},
                   {"self_attn", "MXFP8", "map"}, {"shared_expert", "MXFP8", "map"},
                   {"vision", "mixed", "map"}, {"embed", "BF16", "default"}}},
};

static struct qx_ckpt *open_micro(const char *layout)
{
    const char *base = getenv("QX_TEST_DATA");
    char path[1024];
    struct qx_ckpt *ck = NULL;
    struct qx_error err = {0};
    snprintf(path, sizeof path, "%s/micro/%s", base ? base : ".", layout);
    if (qx_ckpt_open(&ck, path, NULL, &err) != 0) {
        fail_msg("%s: %s", path, err.msg);
    }
    return ck;
}

static void test_micro(void **state)
{
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(wants); i++) {
        struct qx_ckpt *ck = open_micro(wants[i].layout);
        struct qx_inspection *in = NULL;
        assert_int_equal(qx_inspect(&in, ck, NULL, NULL), 0);
        assert_non_null(in->layout);
        assert_string_equal(in->layout, wants[i].layout);
        assert_int_equal(qx_findings_count_severity(in->findings, QX_ERROR), 0);
        assert_int_equal(in->ple.n_shards, 5);
        assert_int_equal(in->ple.n_rows, 640);
        assert_int_equal(in->ple.n_rows_used, 618);
        uint64_t tensors = 0;
        uint64_t bytes = 0;
        for (size_t k = 0; k < in->n_components; k++) {
            tensors += in->components[k].n_tensors;
            bytes += in->components[k].size_bytes;
        }
        assert_int_equal(tensors, in->n_tensors);
        assert_int_equal(bytes, in->payload_bytes);
        for (size_t w = 0; w < QX_ARRAY_LEN(wants[i].c) && wants[i].c[w].component; w++) {
            bool found = false;
            for (size_t k = 0; k < in->n_components; k++) {
                const struct qx_component_total *c = &in->components[k];
                if (strcmp(c->name, wants[i].c[w].component) != 0) {
                    continue;
                }
                found = true;
                if (strcmp(c->format, wants[i].c[w].format) != 0 ||
                    strcmp(c->source, wants[i].c[w].source) != 0) {
                    fail_msg("%s %s: %s from %s, expected %s from %s", wants[i].layout, c->name, c->format,
                             c->source, wants[i].c[w].format, wants[i].c[w].source);
                }
            }
            assert_true(found);
        }
        qx_inspection_free(in);
        qx_ckpt_close(ck);
    }
}

static void test_modules(void **state)
{
    struct qx_ckpt *ck = open_micro("mixed");
    const struct qx_resolved *r = qx_ckpt_resolved(ck);
    (void)state;
    assert_non_null(r);
    for (size_t i = 1; i < qx_resolved_n_modules(r); i++) {
        assert_true(strcmp(qx_resolved_module(r, i - 1)->name, qx_resolved_module(r, i)->name) < 0);
    }
    const struct qx_module *m = qx_resolved_find(r, "mtp.layers.0.mlp.experts.3.down_proj");
    assert_non_null(m);
    assert_int_equal(m->format, QX_F_FP8_BLOCK);
    assert_int_equal(m->rows, 64);
    assert_int_equal(m->cols, 160);
    assert_true(m->scale_is_inv && m->scale && m->is_linear && m->is_mtp);
    assert_string_equal(m->entry, "mtp.layers.0.mlp.experts");
    m = qx_resolved_find(r, "model.language_model.layers.2.mlp.experts.0.gate_proj");
    assert_non_null(m);
    assert_int_equal(m->format, QX_F_NVFP4);
    assert_int_equal(m->cols, 64);
    assert_true(m->scale && m->scale_2 && m->input_scale);
    assert_null(qx_resolved_find(r, "no.such.module"));
    char *text = NULL;
    assert_int_equal(qx_inspect_why(ck, "model.language_model.layers.2.mlp.experts", &text, NULL), 0);
    assert_non_null(strstr(text, "NVFP4"));
    qx_text_free(text);
    struct qx_error err = {0};
    assert_true(qx_inspect_why(ck, "no.such.module", &text, &err) < 0);
    assert_null(text);
    qx_ckpt_close(ck);
}

/* The released configuration, as far as sizes depend on it (formats 3.2, 3.3). */
static const char released[] =
    "{\"architectures\": [\"Qwen4ExpForConditionalGeneration\"], \"model_type\": \"qwen4_exp\","
    " \"text_config\": {\"vocab_size\": 248320, \"eos_token_id\": 248044, \"hidden_size\": 2560,"
    " \"num_hidden_layers\": 48, \"full_attention_interval\": 4, \"hc_count\": 4, \"hc_lowrank\": 320,"
    " \"rms_norm_eps\": 1e-06, \"max_position_embeddings\": 262144, \"num_attention_heads\": 24,"
    " \"num_key_value_heads\": 2, \"head_dim\": 256, \"rope_parameters\": {\"rope_theta\": 1e7,"
    " \"partial_rotary_factor\": 0.25}, \"indexer_n_heads\": 4, \"indexer_kv_heads\": 1,"
    " \"indexer_head_dim\": 128, \"indexer_compress_ratio\": 4, \"indexer_budget\": 2048,"
    " \"linear_num_key_heads\": 16, \"linear_num_value_heads\": 48, \"linear_key_head_dim\": 128,"
    " \"linear_value_head_dim\": 128, \"linear_conv_kernel_dim\": 4, \"num_experts\": 512,"
    " \"num_experts_per_tok\": 10, \"moe_intermediate_size\": 640,"
    " \"shared_expert_intermediate_size\": 640, \"ple_layer_ids\": [2], \"ple_embed_dim\": 2560,"
    " \"ple_conv_kernel_size\": 4, \"ngram_size\": 3, \"heads_per_ngram\": 8,"
    " \"ngram_vocab_size_base\": 20000000, \"make_ngram_vocab_size_divisible_by\": 128,"
    " \"split_ngram_parts\": 128, \"mtp_num_hidden_layers\": 1}, \"vision_config\": {\"depth\": 27,"
    " \"hidden_size\": 1152, \"in_channels\": 3, \"intermediate_size\": 4304, \"num_heads\": 16,"
    " \"num_position_embeddings\": 2304, \"out_hidden_size\": 2560, \"patch_size\": 16,"
    " \"spatial_merge_size\": 2, \"temporal_patch_size\": 2}}";

static void test_plan_before_download(void **state)
{
    static const struct {
        const char *layout;
        uint64_t tensors, bytes;
    } t[] = {
        {"bf16", 1658, 359999963128},
        {"fp8", 152089, 185502232570},
        {"mixed", 299545, 132639846394},
        {"nvfp4", 296475, 135156121594},
        {"nvfp4-ple", 301730, 105798973864},
    };
    char path[] = "/tmp/qx-plan-XXXXXX.json";
    int fd = mkstemps(path, 5);
    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(write(fd, released, strlen(released)), strlen(released));
    close(fd);
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        struct qx_ckpt *ck = NULL;
        struct qx_inspection *in = NULL;
        struct qx_error err = {0};
        assert_int_equal(qx_ckpt_open(&ck, path, NULL, &err), 0);
        if (qx_inspect(&in, ck, t[i].layout, &err) != 0) {
            fail_msg("%s", err.msg);
        }
        assert_true(in->planned);
        assert_int_equal(in->n_tensors, t[i].tensors);
        assert_int_equal(in->payload_bytes, t[i].bytes);
        struct qx_fit fit;
        struct qx_fit_request r = {.device_bytes = UINT64_C(128) << 30, .ctx_tokens = 32768};
        assert_int_equal(qx_fit(&fit, ck, in, &r, NULL), 0);
        uint64_t sum = 0;
        for (uint32_t k = 0; k < fit.n_parts; k++) {
            sum += strcmp(fit.parts[k].place, "device") == 0 ? fit.parts[k].size_bytes : 0;
        }
        assert_int_equal(sum, fit.needed_bytes);
        assert_int_equal(fit.fits, fit.needed_bytes <= fit.device_bytes);
        qx_inspection_free(in);
        qx_ckpt_close(ck);
    }
    struct qx_ckpt *ck = NULL;
    struct qx_inspection *in = NULL;
    struct qx_error err = {0};
    assert_int_equal(qx_ckpt_open(&ck, path, NULL, NULL), 0);
    assert_true(qx_inspect(&in, ck, "int5", &err) < 0);
    assert_int_equal(err.code, QX_E_USAGE);
    qx_ckpt_close(ck);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_micro),
        cmocka_unit_test(test_modules),
        cmocka_unit_test(test_plan_before_download),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
