/* config_text.h: the configuration of the cases' small checkpoint T0, and a way to change one spot of it. */
#ifndef QX_TEST_CONFIG_TEXT_H
#define QX_TEST_CONFIG_TEXT_H

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const char t0_text[] =
    "{\"architectures\": [\"Qwen4ExpForConditionalGeneration\"], \"model_type\": \"qwen4_exp\","
    " \"tie_word_embeddings\": false, \"text_config\": {\"model_type\": \"qwen4_exp_text\","
    " \"vocab_size\": 32, \"bos_token_id\": 2, \"eos_token_id\": 2, \"hidden_size\": 64,"
    " \"num_hidden_layers\": 4, \"full_attention_interval\": 4, \"layer_types\": [\"linear_attention\","
    " \"linear_attention\", \"linear_attention\", \"full_attention\"], \"hc_count\": 4, \"hc_lowrank\": 8,"
    " \"rms_norm_eps\": 1e-06, \"hidden_act\": \"silu\", \"max_position_embeddings\": 128,"
    " \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 16, \"attention_bias\": false,"
    " \"partial_rotary_factor\": 0.25, \"rope_parameters\": {\"rope_type\": \"default\","
    " \"rope_theta\": 10000000, \"partial_rotary_factor\": 0.25}, \"indexer_n_heads\": 2,"
    " \"indexer_kv_heads\": 1, \"indexer_head_dim\": 8, \"indexer_compress_ratio\": 4,"
    " \"indexer_budget\": 8, \"linear_num_key_heads\": 2, \"linear_num_value_heads\": 6,"
    " \"linear_key_head_dim\": 8, \"linear_value_head_dim\": 16, \"linear_conv_kernel_dim\": 4,"
    " \"output_gate_type\": \"sigmoid\", \"num_experts\": 2, \"num_experts_per_tok\": 1,"
    " \"moe_intermediate_size\": 32, \"shared_expert_intermediate_size\": 96, \"ple_layer_ids\": [2],"
    " \"ple_embed_dim\": 128, \"ple_conv_kernel_size\": 4, \"ngram_size\": 3, \"heads_per_ngram\": 2,"
    " \"ngram_vocab_size_base\": 10, \"make_ngram_vocab_size_divisible_by\": 4, \"split_ngram_parts\": 4,"
    " \"mtp_num_hidden_layers\": 1}}";

/* T0's text with `from` replaced by `to`; free() it. */
static inline char *t0_with(const char *from, const char *to)
{
    const char *p = strstr(t0_text, from);
    assert(p != NULL);
    size_t at = (size_t)(p - t0_text);
    size_t n = strlen(t0_text) - strlen(from) + strlen(to);
    char *s = malloc(n + 1);
    assert(s != NULL);
    memcpy(s, t0_text, at);
    memcpy(s + at, to, strlen(to));
    strcpy(s + at + strlen(to), p + strlen(from));
    return s;
}

#endif
