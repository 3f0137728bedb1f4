/* rules.c: the table of findings. Sorted by id; a kind has more than one severity where the contract makes
 * it depend on the case. */
#include "rules.h"

#include <stdlib.h>
#include <string.h>

static const char *const origin_name[QX_RO_COUNT] = {
    [QX_RO_CONTAINER] = "container", [QX_RO_CONFIG] = "config", [QX_RO_QUANT] = "quantisation",
    [QX_RO_LAYOUT] = "layout", [QX_RO_SCALE] = "scales", [QX_RO_VALUE] = "values",
    [QX_RO_DECODE] = "decoding", [QX_RO_MANIFEST] = "manifest",
    [QX_RO_DIFF] = "differences", [QX_RO_TEXT] = "text"};

#define E QX_SEV_ERROR
#define W QX_SEV_WARNING
#define N QX_SEV_NOTE

static const struct qx_rule rules[] = {
    {"all-zero", W | N, QX_RO_VALUE, "every byte of a tensor is zero"},
    {"architecture-alias", N, QX_RO_CONFIG,
     "the configuration uses the preview names of the architecture"},
    {"architecture-missing", N, QX_RO_CONFIG, "architectures names no class"},
    {"architecture-unknown", W, QX_RO_CONFIG, "architectures names a class of no known model"},
    {"bad-offsets", E, QX_RO_CONTAINER, "data_offsets are no two ordered counts inside the data"},
    {"bad-shape", E, QX_RO_CONTAINER, "a shape is no list of counts"},
    {"checksum", E, QX_RO_MANIFEST, "a listed file or tensor is different or absent"},
    {"checksum-missing", N, QX_RO_MANIFEST, "a file or tensor is there but not listed"},
    {"config-missing", E, QX_RO_CONFIG, "there is no config.json"},
    {"config-type", E, QX_RO_CONFIG, "a key of the configuration has the wrong type"},
    {"config-value", E | W | N, QX_RO_CONFIG,
     "a setting of the configuration cannot be, contradicts another, or is unusual"},
    {"data-absent", N, QX_RO_CONTAINER, "a file ends right after its header"},
    {"decode-failed", E, QX_RO_DECODE,
     "a stored matrix could not be decoded though the rules found nothing wrong"},
    {"decode-mismatch", E, QX_RO_DECODE, "two decoders give different values for a row"},
    {"decoder-failed", E, QX_RO_DECODE, "the external decoder did not answer as agreed"},
    {"diff-added", N, QX_RO_DIFF, "a tensor is only in the second checkpoint"},
    {"diff-config", N, QX_RO_DIFF, "a key of the configuration is different"},
    {"diff-dtype", N, QX_RO_DIFF, "a tensor has another element type"},
    {"diff-removed", N, QX_RO_DIFF, "a tensor is only in the first checkpoint"},
    {"diff-shape", N, QX_RO_DIFF, "a tensor has another shape"},
    {"diff-values", N, QX_RO_DIFF, "a tensor has other bytes"},
    {"dtype", E, QX_RO_LAYOUT, "a tensor has an element type that it cannot have"},
    {"duplicate-tensor", E, QX_RO_CONTAINER, "a tensor name occurs twice"},
    {"entry-without-module", W | N, QX_RO_QUANT, "an entry of the settings names no stored module"},
    {"expert-range", E, QX_RO_LAYOUT, "an expert's number is beyond num_experts"},
    {"file-changed", E, QX_RO_CONTAINER, "a file is another one than when it was opened"},
    {"file-too-short", E, QX_RO_CONTAINER, "a file is too short to hold a header length"},
    {"foreign-convention", E, QX_RO_QUANT, "tensors of another quantisation convention"},
    {"foreign-layout", E, QX_RO_LAYOUT, "tensors are spelt as another program names them"},
    {"format-mismatch", E, QX_RO_QUANT,
     "the configuration claims another format than the one stored"},
    {"gate-up-scales", N, QX_RO_SCALE,
     "gate and up projection of an expert have different weight_scale_2"},
    {"group-size-indivisible", E, QX_RO_LAYOUT, "groups do not divide the columns of a weight"},
    {"group-size-missing", N, QX_RO_QUANT, "an entry gives no group_size"},
    {"hash-constants-mismatch", E, QX_RO_VALUE,
     "a stored constant of the n-gram hash is not the computed one"},
    {"hash-constants-missing", N, QX_RO_LAYOUT, "the constants of the n-gram hash are not stored"},
    {"header-json", E, QX_RO_CONTAINER, "the header is no valid JSON object"},
    {"header-length", E, QX_RO_CONTAINER, "the header length does not fit the file"},
    {"header-too-large", E, QX_RO_CONTAINER, "the header is larger than the limit"},
    {"header-utf8", E, QX_RO_CONTAINER, "the header is not valid UTF-8"},
    {"hole", E, QX_RO_CONTAINER, "bytes between tensors belong to none"},
    {"index-format", E, QX_RO_CONTAINER, "the index is no map from tensor names to file names"},
    {"index-stale", E, QX_RO_CONTAINER, "no file that the index names exists"},
    {"index-tensor-absent", E, QX_RO_CONTAINER,
     "the index names a file for a tensor that the file does not hold"},
    {"json-bom", E, QX_RO_CONFIG, "a JSON file starts with a byte-order mark"},
    {"json-duplicate-key", E | N, QX_RO_CONFIG, "a key occurs twice"},
    {"json-nonfinite", N, QX_RO_CONFIG, "a configuration holds the words NaN or Infinity"},
    {"json-syntax", E, QX_RO_CONFIG, "a JSON file breaks the rules of JSON"},
    {"json-too-deep", E, QX_RO_CONFIG, "a JSON text is nested too deeply"},
    {"json-utf8", E, QX_RO_CONFIG, "a JSON file is not valid UTF-8"},
    {"layer-range", E, QX_RO_LAYOUT, "a layer's number is beyond the configuration's"},
    {"lfs-pointer", E, QX_RO_CONTAINER, "a Git LFS pointer lies where a file should be"},
    {"manifest-layout", N, QX_RO_MANIFEST,
     "tensors lie in other files than when the list was written"},
    {"metadata-type", E, QX_RO_CONTAINER, "__metadata__ is no map from strings to strings"},
    {"missing-scale", E, QX_RO_SCALE, "a quantised weight lacks one of its scales"},
    {"missing-tensor", E, QX_RO_LAYOUT, "a tensor that the model needs is not there"},
    {"model-type-missing", N, QX_RO_CONFIG, "model_type is absent"},
    {"mtp-absent", N, QX_RO_LAYOUT, "the configuration mentions a draft head that is not stored"},
    {"mtp-extra", W, QX_RO_LAYOUT, "a tensor under mtp. that the draft head does not have"},
    {"mtp-incomplete", E, QX_RO_LAYOUT, "part of the draft head is missing"},
    {"mtp-undeclared", N, QX_RO_LAYOUT,
     "a draft head is stored that the configuration does not mention"},
    {"no-weights", E, QX_RO_CONTAINER, "the directory holds no safetensors file"},
    {"normalised-names", N, QX_RO_QUANT,
     "settings spell modules with another prefix than the tensors"},
    {"not-safetensors", E, QX_RO_CONTAINER, "a file is of another kind"},
    {"overlap", E, QX_RO_CONTAINER, "two tensors share bytes"},
    {"payload-nan", E, QX_RO_VALUE, "stored values are NaN or infinite"},
    {"ple-extra", N, QX_RO_LAYOUT, "bookkeeping tensors beside the n-gram table"},
    {"ple-form-mixed", E, QX_RO_LAYOUT, "shards of the n-gram table are stored in different forms"},
    {"ple-range", E, QX_RO_VALUE, "a head of the n-gram table reaches outside the table"},
    {"ple-shard-missing", E, QX_RO_LAYOUT, "shards of the n-gram table are missing"},
    {"ple-split-inferred", N, QX_RO_LAYOUT, "split_ngram_parts is absent"},
    {"ple-split-mismatch", E, QX_RO_LAYOUT, "split_ngram_parts is not the number of stored shards"},
    {"quant-conflict", W, QX_RO_QUANT, "two settings contradict each other"},
    {"quantized-but-plain", E, QX_RO_QUANT,
     "the configuration claims a quantised format for a module that is stored plain"},
    {"read-error", E, QX_RO_CONTAINER, "bytes of a file could not be read"},
    {"rope-unsupported", W, QX_RO_CONFIG, "the scaling of positions is not known"},
    {"scale-4d", N, QX_RO_SCALE, "block scales are stored with four dimensions"},
    {"scale-dtype", E, QX_RO_SCALE, "a scale has an element type that its form does not have"},
    {"scale-name-variant", W, QX_RO_SCALE, "block scales are stored under the name weight_scale"},
    {"scale-negative", E, QX_RO_SCALE, "a scale has its sign bit set"},
    {"scale-not-finite", E, QX_RO_SCALE, "a scale is NaN or infinite"},
    {"scale-range", W, QX_RO_SCALE, "a scale is too large or too small for any weight"},
    {"scale-shape", E, QX_RO_SCALE, "a scale has a shape that does not fit its weight"},
    {"scale-without-weight", E, QX_RO_SCALE, "a scale is stored but its weight is not"},
    {"scale-zero", E | W, QX_RO_SCALE, "a scale is zero"},
    {"shape", E, QX_RO_LAYOUT, "a tensor has another shape than the configuration gives"},
    {"shard-missing", E, QX_RO_CONTAINER,
     "a file of the set is not there, or is a link that leads nowhere"},
    {"size-mismatch", E, QX_RO_CONTAINER,
     "a byte range does not have the size that type and shape give"},
    {"stray-file", W, QX_RO_CONTAINER, "a safetensors file that the index does not name"},
    {"superseded-copies", W, QX_RO_CONTAINER,
     "an indexed file holds tensors that the index gives to another file"},
    {"template-unknown", N, QX_RO_TEXT, "the chat template is not one that qx renders"},
    {"text-model-type", W, QX_RO_CONFIG,
     "text_config claims another model type than the top level"},
    {"tokenizer-missing", N, QX_RO_TEXT, "parts of a tokenizer are there but no tokenizer.json"},
    {"tokenizer-unsupported", E, QX_RO_TEXT, "the tokenizer has a setting that qx does not do"},
    {"tokenizer-value", E, QX_RO_TEXT, "the tokenizer's content cannot be"},
    {"tokenizer-vocab", W, QX_RO_TEXT, "the tokenizer has ids that the model does not have"},
    {"too-large", E, QX_RO_CONFIG, "a small JSON file is larger than any such file"},
    {"total-size", W, QX_RO_CONTAINER,
     "the index declares another total size than the tensors have"},
    {"trailing-bytes", E, QX_RO_CONTAINER, "bytes follow the last tensor of a file"},
    {"truncated", E, QX_RO_CONTAINER, "a file ends before its last tensor does"},
    {"two-forms", E, QX_RO_LAYOUT, "experts are stored both fused and one by one"},
    {"undeclared-format", W, QX_RO_QUANT, "a module is stored quantised but no setting says so"},
    {"unexpected-tensor", W, QX_RO_LAYOUT, "a tensor that the model family does not have"},
    {"unindexed-tensor", W, QX_RO_CONTAINER,
     "an indexed file holds tensors that the index does not name"},
    {"unknown-dtype", E, QX_RO_CONTAINER, "an element type is not known"},
    {"unknown-quant-algo", E, QX_RO_QUANT,
     "the configuration names an algorithm that qx does not know"},
    {"unknown-quant-method", E, QX_RO_QUANT, "quant_method is not known"},
    {"unreadable-file", E, QX_RO_CONTAINER, "a file exists but cannot be read"},
    {"unsafe-path", E, QX_RO_CONTAINER, "a file name of the index leaves the directory"},
    {"unsupported-group-size", E, QX_RO_QUANT,
     "an entry gives a group_size that its format does not have"},
    {"unsupported-model-type", E | W, QX_RO_CONFIG, "the model type is none that qx knows"},
    {"unsupported-ple-dtype", E, QX_RO_QUANT,
     "ple_embedding_dtype names a form of the table that qx does not read"},
    {"unused-kv-scale", N, QX_RO_LAYOUT, "scales of a key-value cache"},
    {"unused-scale", W, QX_RO_SCALE, "a scale lies beside a weight that is not quantised"},
    {"unused-tensor", N, QX_RO_LAYOUT, "a tensor that some conversions carry and nothing uses"},
    {"vision-absent", N, QX_RO_LAYOUT,
     "the configuration describes a vision tower that is not stored"},
    {"vision-extra", W, QX_RO_LAYOUT, "a tensor under model.visual. that the tower does not have"},
    {"vision-incomplete", E, QX_RO_LAYOUT, "part of the vision tower is missing"},
    {"weight-dtype", E, QX_RO_QUANT,
     "a weight has an element type that its claimed format does not have"},
};

const struct qx_rule *qx_rules_table(size_t *n)
{
    *n = QX_ARRAY_LEN(rules);
    return rules;
}

static int by_id(const void *id, const void *rule)
{
    return strcmp(id, ((const struct qx_rule *)rule)->id);
}

const struct qx_rule *qx_rule_find(const char *id)
{
    return bsearch(id, rules, QX_ARRAY_LEN(rules), sizeof rules[0], by_id);
}

const char *qx_rule_origin_name(enum qx_rule_origin o)
{
    return origin_name[o];
}
