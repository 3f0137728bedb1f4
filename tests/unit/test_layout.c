/* The table of expected tensors: names there and back, shapes of T0 (given in the cases) and of the
 * released geometry (formats 4), and the sizes of formats 1.2 that follow from it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "config_text.h"
#include "layout.h"

static struct qx_config t0(void)
{
    struct qx_config c;
    assert_int_equal(qx_config_parse(&c, t0_text, strlen(t0_text), "config.json", NULL, NULL), 0);
    return c;
}

static struct qx_name parse(const struct qx_config *c, const char *name)
{
    struct qx_name n;
    qx_layout_parse(&n, c, name, strlen(name));
    return n;
}

#define L "model.language_model."

static void test_names(void **state)
{
    static const struct {
        const char *name, *suffix;
        enum qx_component comp;
        enum qx_leaf leaf;
        int32_t layer, expert;
        bool mtp;
    } t[] = {
        {"lm_head.weight", "lm_head", QX_C_LM_HEAD, QX_LEAF_WEIGHT, -1, -1, false},
        {L "embed_tokens.weight", "embed_tokens", QX_C_EMBED, QX_LEAF_WEIGHT, -1, -1, false},
        {L "layers.0.linear_attn.A_log", "linear_attn.A_log", QX_C_LINEAR_ATTN, QX_LEAF_BARE, 0, -1, false},
        {L "layers.3.self_attn.indexer.index_qk_proj.weight_scale", "self_attn.indexer.index_qk_proj",
         QX_C_SELF_ATTN, QX_LEAF_SCALE, 3, -1, false},
        {L "layers.2.mlp.experts.17.up_proj.input_scale", "up_proj", QX_C_EXPERTS, QX_LEAF_INPUT_SCALE, 2,
         17, false},
        {L "layers.2.mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", QX_C_EXPERTS, QX_LEAF_BARE, 2,
         -1, false},
        {L "layers.2.mlp.gate.weight", "mlp.gate", QX_C_ROUTER, QX_LEAF_WEIGHT, 2, -1, false},
        {L "layers.2.mlp.shared_expert_gate.weight", "mlp.shared_expert_gate", QX_C_SHARED_EXPERT,
         QX_LEAF_WEIGHT, 2, -1, false},
        {L "layers.1.ple.conv1d.weight", "ple.conv1d", QX_C_PLE, QX_LEAF_WEIGHT, 1, -1, false},
        {"mtp.layers.0.mlp.experts.1.down_proj.weight_scale_inv", "down_proj", QX_C_MTP,
         QX_LEAF_SCALE_INV, 0, 1, true},
        {"mtp.layers.4.mlp.gate.weight", "mlp.gate", QX_C_MTP, QX_LEAF_WEIGHT, 0, -1, true},
        {"mtp.fc_hidden.weight", "fc_hidden", QX_C_MTP, QX_LEAF_WEIGHT, -1, -1, true},
        {"model.visual.blocks.7.attn.qkv.bias", "attn.qkv", QX_C_VISION, QX_LEAF_BIAS, 7, -1, false},
        {L "layers.0.mlp.experts.0.gate_proj.weight_packed", "gate_proj", QX_C_EXPERTS, QX_LEAF_FOREIGN, 0,
         0, false},
        {L "layers.3.self_attn.k_proj.k_scale", "self_attn.k_proj", QX_C_SELF_ATTN, QX_LEAF_KV_SCALE, 3,
         -1, false},
        {L "layers.0.input_layernorm.weight", NULL, QX_C_OTHER, QX_LEAF_WEIGHT, 0, -1, false},
        {L "layers.0.mlp.experts.0.gate_proj.weight_quantizer._double_scale", NULL, QX_C_EXPERTS,
         QX_LEAF_BARE, 0, 0, false},
        {L "layers.00.mlp.gate.weight", NULL, QX_C_OTHER, QX_LEAF_WEIGHT, -1, -1, false},
        {"something.else", NULL, QX_C_OTHER, QX_LEAF_BARE, -1, -1, false},
        {"", NULL, QX_C_OTHER, QX_LEAF_BARE, -1, -1, false},
        {"model.", NULL, QX_C_OTHER, QX_LEAF_BARE, -1, -1, false},
        {".weight", NULL, QX_C_OTHER, QX_LEAF_WEIGHT, -1, -1, false},
        {"mtp.weight", NULL, QX_C_MTP, QX_LEAF_WEIGHT, -1, -1, true},
        {"lm_head.", NULL, QX_C_LM_HEAD, QX_LEAF_BARE, -1, -1, false},
        {L "layers.1.weight", NULL, QX_C_OTHER, QX_LEAF_WEIGHT, 1, -1, false},
        {L "layers.0.mlp.experts.3.weight", NULL, QX_C_EXPERTS, QX_LEAF_WEIGHT, 0, 3, false},
    };
    struct qx_config c = t0();
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        struct qx_name n = parse(&c, t[i].name);
        if ((n.entry == NULL) != (t[i].suffix == NULL) ||
            (n.entry && strcmp(n.entry->suffix, t[i].suffix) != 0)) {
            fail_msg("%s: entry %s", t[i].name, n.entry ? n.entry->suffix : "none");
        }
        assert_int_equal(n.component, t[i].comp);
        assert_int_equal(n.leaf, t[i].leaf);
        assert_int_equal(n.layer, t[i].layer);
        assert_int_equal(n.expert, t[i].expert);
        assert_int_equal(n.is_mtp, t[i].mtp);
    }
}

static void test_table_and_spellings(void **state)
{
    struct qx_config c = t0();
    struct qx_name n = parse(&c, L "layers.1.ple.ple_embedding.ngram_embedding.shard_12.weight");
    (void)state;
    assert_true(n.in_table && n.shard == 12 && n.spelling == QX_SP_DISK);
    n = parse(&c, L "layers.1.ple.ple_embedding.ngram_embedding.weight_scale");
    assert_true(n.in_table && n.shard == -1 && n.leaf == QX_LEAF_SCALE);
    n = parse(&c, "language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shards.3.weight");
    assert_true(n.in_table && n.foreign_shard && n.shard == 3 && n.spelling == QX_SP_RUNTIME);
    n = parse(&c, L "layers.1.ple.ple_embedding.hashstats_hits");
    assert_true(n.ple_extra);
    n = parse(&c, "model.layers.0.mlp.gate.weight");
    assert_true(n.entry && n.spelling == QX_SP_TEXT);
    n = parse(&c, "language_model.lm_head.weight");
    assert_true(n.entry && n.spelling == QX_SP_RUNTIME);
    n = parse(&c, L "layers.1.ple.ple_embedding.ngram_embedding.shard_99999999999.weight");
    assert_int_equal(n.shard, -1);
}

/* Every entry's own name parses back to it. */
static void test_round_trip(void **state)
{
    struct qx_config c = t0();
    (void)state;
    for (int p = 0; p < QX_P_COUNT; p++) {
        size_t n;
        const struct qx_layout_entry *e = qx_layout_entries((enum qx_place)p, &n);
        for (size_t i = 0; i < n; i++) {
            char name[256];
            qx_layout_tensor(&e[i], false, 1, 1, name);
            assert_ptr_equal(parse(&c, name).entry, &e[i]);
            if (p == QX_P_LAYER || p == QX_P_EXPERT) {
                qx_layout_tensor(&e[i], true, 0, 1, name);
                assert_ptr_equal(parse(&c, name).entry, &e[i]);
            }
        }
    }
}

static void shape(const struct qx_config *c, const char *name, unsigned n_dims, const uint64_t *want)
{
    uint64_t got[QX_LAYOUT_MAX_DIMS];
    struct qx_name n = parse(c, name);
    assert_non_null(n.entry);
    assert_int_equal(n.entry->n_dims, n_dims);
    assert_true(qx_layout_shape(n.entry, c, got));
    for (unsigned i = 0; i < n_dims; i++) {
        assert_int_equal(got[i], want[i]);
    }
}
#define SHAPE(c, name, ...)                                                                             \
    shape(c, name, QX_ARRAY_LEN(((uint64_t[]){__VA_ARGS__})), (uint64_t[]){__VA_ARGS__})

static void test_shapes(void **state)
{
    struct qx_config c = t0();
    (void)state;
    SHAPE(&c, L "hyper_connection_mixer.hc_norm.weight", 256);
    SHAPE(&c, L "hyper_connection_mixer.input_mix_weight_down.weight", 8, 256);
    SHAPE(&c, L "layers.0.attn_hyper_connection.block_inject_weight.weight", 4, 256);
    SHAPE(&c, L "layers.0.linear_attn.in_proj_qkv.weight", 128, 64);
    SHAPE(&c, L "layers.0.linear_attn.conv1d.weight", 128, 1, 4);
    SHAPE(&c, L "layers.0.linear_attn.out_proj.weight", 64, 96);
    SHAPE(&c, L "layers.3.self_attn.q_proj.weight", 64, 64);
    SHAPE(&c, L "layers.3.self_attn.o_proj.weight", 64, 32);
    SHAPE(&c, L "layers.3.self_attn.indexer.index_qk_proj.weight", 24, 64);
    SHAPE(&c, L "layers.1.ple.key_proj.weight", 256, 128);
    SHAPE(&c, L "layers.1.ple.value_proj.weight", 64, 128);
    SHAPE(&c, L "layers.1.ple.ple_embedding.ngram_heads_offsets", 4);
    SHAPE(&c, "mtp.pre_fc_norm_hidden.weight", 256);
    SHAPE(&c, "mtp.layers.0.mlp.experts.gate_up_proj", 2, 64, 64);
    uint64_t s[QX_LAYOUT_MAX_DIMS];
    /* no vision configuration: the shape is not known */
    assert_false(qx_layout_shape(parse(&c, "model.visual.pos_embed.weight").entry, &c, s));
    assert_true(qx_layout_applies(parse(&c, L "layers.3.self_attn.q_proj.weight").entry, &c, false, 3));
    assert_false(qx_layout_applies(parse(&c, L "layers.0.self_attn.q_proj.weight").entry, &c, false, 0));
    assert_true(qx_layout_applies(parse(&c, "mtp.layers.0.self_attn.q_proj.weight").entry, &c, true, 0));
    assert_false(qx_layout_applies(parse(&c, L "layers.0.ple.conv1d.weight").entry, &c, false, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_table_and_spellings),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_shapes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
