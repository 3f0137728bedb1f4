#!/usr/bin/env python3
"""Checkpoints of the released geometry: every header real, the data sparse.

usage: big.py LAYOUT DIRECTORY       LAYOUT: bf16, fp8, mixed, nvfp4, nvfp4-ple

Made in seconds and a few tens of MB of disk: files have their full apparent size but only headers,
scalars and hash buffers are written. Names, dtypes, shapes, file names, header quirks and
configurations follow the five published checkpoints.
"""
import collections
import json
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import t0
from t0 import L, NG, PLE, Tensor

EXPECTED = {  # layout: (tensors, payload bytes, tensors by dtype)
    "bf16": (1658, 359999963128, {"BF16": 1655, "I64": 3}),
    "fp8": (152089, 185502232570, {"BF16": 76694, "F8_E4M3": 75392, "I64": 3}),
    "mixed": (299545, 132639846394, {"BF16": 2966, "F8_E4M3": 75392, "U8": 73728, "F32": 147456, "I64": 3}),
    "nvfp4": (296475, 135156121594, {"BF16": 1432, "F8_E4M3": 73856, "U8": 73728, "F32": 147456, "I64": 3}),
    "nvfp4-ple": (301730, 105798973864, {"BF16": 935, "F8_E4M3": 75886, "U8": 75886, "F32": 149020, "I64": 3}),
}
LAYERS, EXPERTS, HID, WIDE, INTER, VOCAB = 48, 512, 2560, 10240, 640, 248320
SHARDS, SHARD_ROWS, WIDTH = 128, 2500012, 160
MXFP8_PARTS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.in_proj_b",
               "linear_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "self_attn.indexer.index_qk_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj",
               "mlp.shared_expert.down_proj")


def text_config():
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(LAYERS)]
    return {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 248044, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "hc_count": 4, "hc_lowrank": 320, "head_dim": 256,
        "heads_per_ngram": 8, "hidden_act": "silu", "hidden_size": HID, "indexer_budget": 2048,
        "indexer_compress_ratio": 4, "indexer_head_dim": 128, "indexer_kv_heads": 1, "indexer_n_heads": 4,
        "initializer_range": 0.02, "layer_types": kinds, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "make_ngram_vocab_size_divisible_by": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "model_type": "qwen4_exp_text", "moe_intermediate_size": INTER,
        "mtp": {"hybrid": True, "layer_types": ["full_attention"], "mtp_use_hidden_state_from_layer": None,
                "num_hidden_layers": 1, "rope_theta": 10000000},
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "ngram_size": 3,
        "ngram_vocab_size_base": 20000000, "num_attention_heads": 24, "num_experts": EXPERTS,
        "num_experts_per_tok": 10, "num_hidden_layers": LAYERS, "num_key_value_heads": 2,
        "output_gate_type": "sigmoid", "output_router_logits": False, "pad_token_id": None,
        "partial_rotary_factor": 0.25, "ple_conv_kernel_size": 4, "ple_embed_dim": 2560, "ple_layer_ids": [2],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 640, "split_ngram_parts": SHARDS,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": VOCAB}


def config(layout):
    preview = layout == "nvfp4-ple"
    c = {"architectures": ["Qwen3_8FlashNextForConditionalGeneration" if preview else
                           "Qwen4ExpForConditionalGeneration"],
         "image_token_id": 248056, "language_model_only": False,
         "model_type": "qwen3_8_flash_next" if preview else "qwen4_exp", "text_config": text_config(),
         "tie_word_embeddings": False, "transformers_version": "5.8.0.dev0", "video_token_id": 248057,
         "vision_config": {
             "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
             "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
             "model_type": "qwen3_5_vision" if preview else "qwen4_exp", "num_heads": 16,
             "num_position_embeddings": 2304, "out_hidden_size": HID, "patch_size": 16, "spatial_merge_size": 2,
             "temporal_patch_size": 2},
         "vision_end_token_id": 248054, "vision_start_token_id": 248053}
    if preview:
        c["text_config"]["model_type"] = "qwen3_8_flash_next_text"
        c["text_config"]["ple_embedding_dtype"] = "nvfp4"
        c["text_config"]["intermediate_size"] = 12288
    if layout == "nvfp4":
        c["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
    return c


def order():
    """Layer numbers in text order, as exporters list them."""
    return sorted(range(LAYERS), key=str)


def quantization(layout, linears):
    """(quantization_config, hf_quant_config) or None for each."""
    if layout == "bf16":
        return None, None
    if layout == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_per_tensor": False,
                "act_per_tensor": False, "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", L + "embed_tokens"] + sorted(linears),
                "modules_to_convert": ["ple.ple_embedding.ngram_embedding"]}, None
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    producer = {"name": "modelopt", "version": "0.46.0"}
    if layout == "nvfp4":
        ignore = ["model.embed_tokens", "mtp.*", "model.mtp.*", "*.self_attn.*", "*.linear_attn.*", "*.mlp.gate*",
                  "*.mlp.shared_expert.*", "*.mlp.shared_expert_gate*", "*hyper_connection*", "*.ple.*",
                  "model.visual.*", L + "embed_tokens", "lm_head"]
        return ({"config_groups": {"group_0": {"input_activations": four, "weights": four, "targets": ["Linear"]}},
                 "ignore": ignore, "quant_algo": "NVFP4", "producer": producer, "quant_method": "modelopt"},
                {"producer": producer,
                 "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ignore}})
    layers = {}
    if layout == "mixed":
        for n in order():
            layers[f"{L}layers.{n}.mlp.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
            if n == 1:
                layers[NG[:-1]] = {"quant_algo": "FP8"}
        layers["mtp.layers.0.mlp.experts"] = {"quant_algo": "FP8_PB_WO", "group_size": 128}
        ignore = ["lm_head", L + "embed_tokens", L + "hyper_connection_mixer*"]
        for n in order():
            attn = "self_attn*" if n % 4 == 3 else "linear_attn*"
            ignore += [f"{L}layers.{n}.{k}" for k in ("attn_hyper_connection*", attn, "mlp.gate",
                                                     "mlp.shared_expert*", "mlp.shared_expert_gate",
                                                     "mlp_hyper_connection*")]
        ignore.append("model.visual*")
        hf = {k: dict(v) for k, v in layers.items()}
        hf["mtp.layers.0.mlp.experts"]["quant_algo"] = "FP8_BLOCK_SCALES"
        return ({"ignore": ignore, "quant_algo": "MIXED_PRECISION", "producer": producer, "quant_method": "modelopt",
                 "quantized_layers": layers},
                {"producer": producer,
                 "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "group_size": 16,
                                  "exclude_modules": ignore, "quantized_layers": hf}})
    for m in linears:
        if m.endswith(MXFP8_PARTS) and not m.startswith("mtp."):
            layers[m] = {"quant_algo": "MXFP8", "group_size": 32}
    for n in order():
        layers[f"{L}layers.{n}.mlp.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    for b in range(27):
        v = f"model.visual.blocks.{b}."
        for part in ("attn.qkv", "attn.proj", "mlp.linear_fc1"):
            layers[v + part] = {"quant_algo": "MXFP8", "group_size": 32}
        layers[v + "mlp.linear_fc2"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    for part in ("linear_fc1", "linear_fc2"):
        layers["model.visual.merger." + part] = {"quant_algo": "MXFP8", "group_size": 32}
    for n in (0, LAYERS):
        layers[f"mtp.layers.{n}.mlp.experts"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    return ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "producer": producer,
             "quantized_layers": layers},
            {"producer": producer, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})


def put_mxfp8(t, module, out, inn):
    t[module + ".weight"] = Tensor("F8_E4M3", [out, inn])
    t[module + ".weight_scale"] = Tensor("U8", [out, -(-inn // 32)])


def put_nvfp4(t, module, out, inn, input_scale):
    t[module + ".weight"] = Tensor("U8", [out, inn // 2])
    t[module + ".weight_scale"] = Tensor("F8_E4M3", [out, inn // 16])
    t[module + ".weight_scale_2"] = Tensor("F32", [], ONE)
    if input_scale:
        t[module + ".input_scale"] = Tensor("F32", [], ONE)


def put_block(t, module, out, inn):
    t[module + ".weight"] = Tensor("F8_E4M3", [out, inn])
    t[module + ".weight_scale_inv"] = Tensor("BF16", [-(-out // 128), -(-inn // 128)])


ONE = struct.pack("<f", 2.0 ** -12)
BF16_SCALE = struct.pack("<H", 0x3951)


def experts(t, p, form):
    if form == "bf16":
        t[p + "gate_up_proj"] = Tensor("BF16", [EXPERTS, 2 * INTER, HID])
        t[p + "down_proj"] = Tensor("BF16", [EXPERTS, HID, INTER])
        return
    put = {"fp8": put_block, "nvfp4": lambda *a: put_nvfp4(*a, True), "w4": lambda *a: put_nvfp4(*a, False)}[form]
    for e in range(EXPERTS):
        for proj in ("gate_proj", "up_proj"):
            put(t, f"{p}{e}.{proj}", INTER, HID)
        put(t, f"{p}{e}.down_proj", HID, INTER)


def tensors(layout):
    """Every tensor of a layout and the names of its BF16 or MXFP8 linear modules."""
    t, linears = {}, []
    mx = layout == "nvfp4-ple"

    def lin(module, out, inn):
        linears.append(module)
        if mx and module.endswith(MXFP8_PARTS) and not module.startswith("mtp."):
            put_mxfp8(t, module, out, inn)
        else:
            t[module + ".weight"] = Tensor("BF16", [out, inn])

    def vec(name, *shape):
        t[name] = Tensor("BF16", shape)

    def mixer(p, inject):
        vec(p + "hc_norm.weight", WIDE)
        lin(p + "input_mix_weight_down", 320, WIDE)
        lin(p + "input_mix_weight_up", WIDE, 320)
        if inject:
            lin(p + "block_inject_weight", 4, WIDE)

    def attention(p):
        for m, o, i in (("q_proj", 12288, HID), ("k_proj", 512, HID), ("v_proj", 512, HID), ("o_proj", HID, 6144),
                        ("indexer.index_qk_proj", 640, HID)):
            lin(p + m, o, i)
        for m, n in (("q_norm", 256), ("k_norm", 256), ("indexer.q_layernorm", 128), ("indexer.k_layernorm", 128)):
            vec(p + m + ".weight", n)

    def gdn(p):
        for m, o, i in (("in_proj_qkv", WIDE, HID), ("in_proj_z", 6144, HID), ("in_proj_a", 48, HID),
                        ("in_proj_b", 48, HID), ("out_proj", HID, 6144)):
            lin(p + m, o, i)
        vec(p + "conv1d.weight", WIDE, 1, 4)
        vec(p + "A_log", 48)
        vec(p + "dt_bias", 48)
        vec(p + "norm.weight", 128)

    def mlp(p):
        lin(p + "gate", EXPERTS, HID)
        lin(p + "shared_expert.gate_proj", INTER, HID)
        lin(p + "shared_expert.up_proj", INTER, HID)
        lin(p + "shared_expert.down_proj", HID, INTER)
        lin(p + "shared_expert_gate", 1, HID)

    t["lm_head.weight"] = Tensor("BF16", [VOCAB, HID])
    t[L + "embed_tokens.weight"] = Tensor("BF16", [VOCAB, HID])
    mixer(L + "hyper_connection_mixer.", False)
    form = {"bf16": "bf16", "fp8": "fp8"}.get(layout, "nvfp4")
    for n in range(LAYERS):
        p = f"{L}layers.{n}."
        mixer(p + "attn_hyper_connection.", True)
        mixer(p + "mlp_hyper_connection.", True)
        attention(p + "self_attn.") if n % 4 == 3 else gdn(p + "linear_attn.")
        mlp(p + "mlp.")
        experts(t, p + "mlp.experts.", form)
    table(t, layout)
    linears += [PLE + "key_proj", PLE + "value_proj"]
    for m in ("mtp.fc_embedding", "mtp.fc_hidden"):
        lin(m, HID, HID)
    vec("mtp.pre_fc_norm_embedding.weight", HID)
    vec("mtp.pre_fc_norm_hidden.weight", WIDE)
    mixer("mtp.hyper_connection_mixer.", False)
    mixer("mtp.layers.0.attn_hyper_connection.", True)
    mixer("mtp.layers.0.mlp_hyper_connection.", True)
    attention("mtp.layers.0.self_attn.")
    mlp("mtp.layers.0.mlp.")
    experts(t, "mtp.layers.0.mlp.experts.",
            {"bf16": "bf16", "nvfp4": "bf16", "fp8": "fp8", "mixed": "fp8", "nvfp4-ple": "w4"}[layout])
    vision(t, mx)
    return t, linears


def table(t, layout):
    t[PLE + "key_proj.weight"] = Tensor("BF16", [WIDE, 2560])
    t[PLE + "value_proj.weight"] = Tensor("BF16", [HID, 2560])
    for name in ("norm_key", "norm_query", "norm_conv"):
        t[PLE + name + ".weight"] = Tensor("BF16", [WIDE])
    t[PLE + "conv1d.weight"] = Tensor("BF16", [WIDE, 1, 4])
    sizes = t0.primes_from(20000000, 16)
    q = PLE + "ple_embedding."
    t[q + "layer_multipliers"] = t0.i64([3], t0.hash_multipliers(VOCAB, 3))
    t[q + "ngram_heads_vocab_sizes"] = t0.i64([16], sizes)
    t[q + "ngram_heads_offsets"] = t0.i64([16], [sum(sizes[:h]) for h in range(16)])
    for s in range(SHARDS):
        w = f"{NG}shard_{s}."
        if layout == "bf16":
            t[w + "weight"] = Tensor("BF16", [SHARD_ROWS, WIDTH])
        elif layout == "nvfp4-ple":
            t[w + "weight"] = Tensor("U8", [SHARD_ROWS, WIDTH // 2])
            t[w + "weight_scale"] = Tensor("F8_E4M3", [SHARD_ROWS, WIDTH // 16])
        else:
            t[w + "weight"] = Tensor("F8_E4M3", [SHARD_ROWS, WIDTH])
    if layout == "nvfp4-ple":
        t[NG + "weight_scale_2"] = Tensor("F32", [1], struct.pack("<I", 0x380B6DB7))
    elif layout != "bf16":
        t[NG + "weight_scale"] = Tensor("BF16", [1], BF16_SCALE)


def vision(t, mx):
    v = "model.visual."

    def pair(module, out, inn, form="mxfp8"):
        if not mx:
            t[module + ".weight"] = Tensor("BF16", [out, inn])
        elif form == "w4":
            put_nvfp4(t, module, out, inn, False)
        else:
            put_mxfp8(t, module, out, inn)
        t[module + ".bias"] = Tensor("BF16", [out])

    def norm(module):
        t[module + ".weight"] = Tensor("BF16", [1152])
        t[module + ".bias"] = Tensor("BF16", [1152])

    t[v + "patch_embed.proj.weight"] = Tensor("BF16", [1152, 3, 2, 16, 16])
    t[v + "patch_embed.proj.bias"] = Tensor("BF16", [1152])
    t[v + "pos_embed.weight"] = Tensor("BF16", [2304, 1152])
    for b in range(27):
        p = f"{v}blocks.{b}."
        norm(p + "norm1")
        norm(p + "norm2")
        pair(p + "attn.qkv", 3456, 1152)
        pair(p + "attn.proj", 1152, 1152)
        pair(p + "mlp.linear_fc1", 4304, 1152)
        pair(p + "mlp.linear_fc2", 1152, 4304, "w4")
    norm(v + "merger.norm")
    pair(v + "merger.linear_fc1", 4608, 4608)
    pair(v + "merger.linear_fc2", HID, 4608)


def layer_of(name):
    rest = name.removeprefix(L + "layers.")
    return int(rest.split(".", 1)[0]) if rest is not name and rest != name else None


def plan(layout, names):
    """File of every tensor, after the published splits: {file: [names]}."""
    files = collections.OrderedDict()

    def put(f, n):
        files.setdefault(f, []).append(n)

    for n in names:
        layer, expert = layer_of(n), ".mlp.experts." in n
        shard = int(n[len(NG) + 6:].split(".")[0]) if n.startswith(NG + "shard_") else None
        if layout in ("bf16", "fp8"):
            if shard is not None:
                k = 5 + (shard + 2) // 4
            elif n == "lm_head.weight":
                k = 131
            elif n.startswith(L + "embed_tokens"):
                k = 130
            elif n.startswith("mtp."):
                k = 60 if expert else 61
            elif layer is None:
                k = 1
            else:
                k = (2 + 2 * layer if layer < 2 else 34 + 2 * layer) + (0 if "gate" in n and expert else 1)
            put(f"model-{k:05d}-of-00131.safetensors", n)
        elif layout == "mixed":
            if n.startswith(NG) or (n.startswith("mtp.") and expert):
                put("model-fp8-mtp-ple.safetensors", n)
            elif n.startswith("mtp."):
                put("model-00010-of-00010.safetensors", n)
            else:
                put(f"model-{1 if layer is None else 1 + layer * 9 // 48:05d}-of-00010.safetensors", n)
        elif layout == "nvfp4":
            if expert and layer is not None:
                a = int(n.split(".experts.")[1].split(".")[0]) // 128 * 128
                put(f"layer-{layer:05d}-experts-{a:04d}-{a + 127:04d}.safetensors", n)
            elif n.startswith(NG):
                k = 9 if shard is None else shard // 13
                put(f"model-plefp8-{k:05d}.safetensors", n)
            else:
                k = (12 if n in ("lm_head.weight", L + "embed_tokens.weight") else
                     10 if n.startswith("mtp.") else 11 if layer and layer > 24 else 1)
                put(f"model-bf16-{k:05d}.safetensors", n)
        else:
            if n.endswith(".input_scale"):
                put("model-inputscales.safetensors", n)
            elif n.startswith("mtp."):
                put("model-00034-of-00034.safetensors", n)
            elif shard is not None:
                put(f"model-{min(1 + (shard + 6) // 7, 19):05d}-of-00034.safetensors", n)
            elif layer is None or n.startswith(NG):
                put("model-00001-of-00034.safetensors", n)
            else:
                put(f"model-{19 + layer * 15 // 48:05d}-of-00034.safetensors", n)
    return files


def make(layout, directory):
    d = pathlib.Path(directory)
    d.mkdir(parents=True, exist_ok=True)
    t, linears = tensors(layout)
    count, payload, by = EXPECTED[layout]
    found = (len(t), sum(x.n_bytes for x in t.values()), dict(collections.Counter(x.dtype for x in t.values())))
    if found != (count, payload, by):
        sys.exit(f"big.py: {layout}: made {found}, the specification counts {(count, payload, by)}")
    conf = config(layout)
    quant, hf = quantization(layout, linears)
    if quant:
        conf["quantization_config"] = quant
    t0.write_json(d / "config.json", conf)
    if hf:
        t0.write_json(d / "hf_quant_config.json", hf)
    t0.write_json(d / "generation_config.json",
                  {"bos_token_id": 248044, "do_sample": True, "eos_token_id": [248046, 248044],
                   "pad_token_id": 248044, "temperature": 1.0, "top_k": 20, "top_p": 0.95})
    files = plan(layout, t)
    for f, names in files.items():
        names.sort(key=lambda n: t[n].data is None)     # what is written lies together: few blocks on disk
        t0.write_safetensors(d / f, {n: t[n] for n in names},
                             None if f.startswith("model-00010-of") else {"format": "pt"},
                             pad=0 if f.startswith("model-00001") and layout in ("fp8", "nvfp4-ple") else None)
    weight_map = {n: f for f, names in files.items() for n in names}
    with open(d / "model.safetensors.index.json", "w", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": payload}, "weight_map": weight_map}, f, indent=2)
    return t


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in EXPECTED:
        sys.exit(f"usage: big.py {'|'.join(EXPECTED)} DIRECTORY")
    make(sys.argv[1], sys.argv[2])
