"""The small checkpoint T0 of the acceptance cases, its variants, and writers for damaged files.

A Ckpt is a model in memory: a config, tensors by name, further files. Tests change any of these
and write the result:

    c = t0()
    c.config["text_config"]["hidden_size"] = 65
    del c.tensors["lm_head.weight"]
    c.write(directory, shards=4)

Contents depend only on the tensor's name, so that variants share all bytes that they can share.
"""
import copy
import json
import pathlib
import struct
import zlib

import numpy as np

ITEM_BYTES = {"F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "BF16": 2, "F16": 2,
              "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8}
PLAIN = {"F16": "<f2", "F32": "<f4", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
         "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F64": "<f8"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
IGNORE = ["lm_head", "*.embed_tokens", "*hyper_connection*", "*.linear_attn.*", "*.self_attn.*", "*.mlp.gate",
          "*.mlp.shared_expert.*", "*.mlp.shared_expert_gate", "*.ple.key_proj", "*.ple.value_proj", "*.ple.norm_*",
          "*.ple.conv1d", "mtp.fc_*", "mtp.pre_fc_norm_*"]
L = "model.language_model."
PLE = L + "layers.1.ple."
NG = PLE + "ple_embedding.ngram_embedding."


# --- numbers ---------------------------------------------------------------------------------

def bf16_bits(values):
    """float -> bfloat16 bit patterns: to f32 first, then nearest even."""
    u = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2")


def bf16_value(bits):
    return (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_value(byte):
    """Exact value of one E4M3 (finite) code, from the format's arithmetic."""
    s, e, m = byte >> 7, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    v = m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    return -v if s else v


E4M3 = np.array([e4m3_value(b) for b in range(256)])


def mix64(v):
    mask = (1 << 64) - 1
    v = (v + 0x9E3779B97F4A7C15) & mask
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & mask
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & mask
    return v ^ (v >> 31)


def hash_multipliers(vocab, n, seed=1234, rank=0):
    half = ((2 ** 63 - 1) // vocab) // 2
    base = seed + 10007 * rank
    return [2 * (mix64((base + 0x9E3779B97F4A7C15 * (i + 1)) % 2 ** 64) % half) + 1 for i in range(n)]


def primes_from(start, count):
    found, x = [], max(start, 2)
    while len(found) < count:
        if all(x % p for p in range(2, int(x ** 0.5) + 1)):
            found.append(x)
        x += 1
    return found


# --- tensors and files -----------------------------------------------------------------------

class Tensor:
    """dtype, shape and bytes; bytes may be None for a hole (a sparse file of zeros)."""

    def __init__(self, dtype, shape, data=None):
        self.dtype, self.shape = dtype, list(shape)
        if isinstance(data, np.ndarray):
            data = data.tobytes()
        self.data = data

    @property
    def n_bytes(self):
        n = ITEM_BYTES[self.dtype]
        for d in self.shape:
            n *= d
        return n

    def array(self):
        """The elements as stored: codes for 8-bit floats, bit patterns for BF16."""
        kind = {"BF16": "<u2"}.get(self.dtype) or PLAIN.get(self.dtype, "u1")
        return np.frombuffer(bytearray(self.data), dtype=kind).reshape(self.shape)

    def set(self, array):
        self.data = np.ascontiguousarray(array).tobytes()
        assert len(self.data) == self.n_bytes, (len(self.data), self.n_bytes)

    def copy(self):
        return Tensor(self.dtype, self.shape, self.data)


def bf16(shape, values):
    return Tensor("BF16", shape, bf16_bits(np.broadcast_to(np.asarray(values, np.float32), shape)))


def f32(shape, values):
    return Tensor("F32", shape, np.ascontiguousarray(np.broadcast_to(np.float32(values), shape)).astype("<f4"))


def i64(shape, values):
    return Tensor("I64", shape, np.asarray(values, dtype="<i8").reshape(shape))


def header_bytes(tensors, metadata=None, pad=None):
    """Header JSON of tensors laid out one after another. pad: None for a multiple of 8, else spaces."""
    head, off = {}, 0
    if metadata is not None:
        head["__metadata__"] = metadata
    for name, t in tensors.items():
        head[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [off, off + t.n_bytes]}
        off += t.n_bytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * ((-len(text)) % 8 if pad is None else pad), off


def write_safetensors(path, tensors, metadata=None, pad=None, header_order=None):
    """Write tensors in their order; a tensor without bytes becomes a hole of the file."""
    text, total = header_bytes(tensors, metadata, pad)
    if header_order:
        entries = json.loads(text)
        text = json.dumps({k: entries[k] for k in header_order}).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        start, off = 8 + len(text), 0
        for t in tensors.values():
            if t.data is not None:
                f.seek(start + off)
                f.write(t.data)
            off += t.n_bytes
        f.truncate(start + total)


def write_raw(path, header, data=b"", length=None):
    """A safetensors file from a literal header (bytes, text or object); length overrides the field."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, e in json.loads(raw[8:8 + n]).items():
        if name != "__metadata__":
            a, b = e["data_offsets"]
            out[name] = Tensor(e["dtype"], e["shape"], raw[8 + n + a:8 + n + b])
    return out


# --- the checkpoint --------------------------------------------------------------------------

class Ckpt:
    def __init__(self, config, tensors):
        self.config = config            # dict, or bytes to be written as they are, or None for no file
        self.tensors = tensors          # name -> Tensor, in file order
        self.files = {}                 # further files: name -> bytes, text or object written as JSON
        self.metadata = {"format": "pt"}
        self.pad = None

    def copy(self):
        other = Ckpt(copy.deepcopy(self.config), {k: t.copy() for k, t in self.tensors.items()})
        other.files, other.metadata, other.pad = copy.deepcopy(self.files), self.metadata, self.pad
        return other

    @property
    def text(self):
        return self.config["text_config"]

    @property
    def quant(self):
        return self.config["quantization_config"]

    @property
    def payload(self):
        return sum(t.n_bytes for t in self.tensors.values())

    def match(self, part):
        return [n for n in self.tensors if part in n]

    def drop(self, part):
        gone = self.match(part)
        for n in gone:
            del self.tensors[n]
        return gone

    def rename(self, old, new):
        """Rename one tensor in place (order kept)."""
        self.tensors = {(new if n == old else n): t for n, t in self.tensors.items()}

    def split(self, shards):
        """Contiguous runs of about equal size: [(file name, [names])]."""
        names, total = list(self.tensors), self.payload
        runs, at, done = [[] for _ in range(shards)], 0, 0
        for n in names:
            while at < shards - 1 and done >= total * (at + 1) / shards:
                at += 1
            runs[at].append(n)
            done += self.tensors[n].n_bytes
        if shards == 1:
            return [("model.safetensors", runs[0])]
        return [(f"model-{i + 1:05d}-of-{shards:05d}.safetensors", r) for i, r in enumerate(runs)]

    def write(self, directory, shards=2, index=True, total_size=None, reverse=False):
        """shards: a count, or {file: [names]}. index: True, False or a weight_map to write instead."""
        d = pathlib.Path(directory)
        d.mkdir(parents=True, exist_ok=True)
        if self.config is not None:
            write_json(d / "config.json", self.config)
        plan = list(shards.items()) if isinstance(shards, dict) else self.split(shards)
        weight_map = {n: f for f, names in plan for n in names}
        for f, names in (reversed(plan) if reverse else plan):
            write_safetensors(d / f, {n: self.tensors[n] for n in names}, self.metadata, self.pad)
        if index is not False:
            if isinstance(index, dict):
                weight_map = index
            write_json(d / "model.safetensors.index.json",
                       {"metadata": {"total_size": self.payload if total_size is None else total_size},
                        "weight_map": weight_map})
        for name, content in self.files.items():
            write_json(d / name, content)
        return d


def write_json(path, content):
    if isinstance(content, bytes):
        pathlib.Path(path).write_bytes(content)
    elif isinstance(content, str):
        pathlib.Path(path).write_text(content, encoding="utf-8")
    else:
        pathlib.Path(path).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def t0_config():
    experts = {f"{L}layers.{n}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for n in range(4)}
    layers = {f"{L}layers.0.mlp.experts": experts[f"{L}layers.0.mlp.experts"],
              f"{L}layers.1.mlp.experts": experts[f"{L}layers.1.mlp.experts"],
              NG[:-1]: {"quant_algo": "FP8"},
              f"{L}layers.2.mlp.experts": experts[f"{L}layers.2.mlp.experts"],
              f"{L}layers.3.mlp.experts": experts[f"{L}layers.3.mlp.experts"],
              "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}}
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen4_exp_text", "dtype": "bfloat16", "vocab_size": 32, "bos_token_id": 2,
            "eos_token_id": 2, "pad_token_id": None, "hidden_size": 64, "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "hc_count": 4, "hc_lowrank": 8, "rms_norm_eps": 1e-06, "hidden_act": "silu",
            "max_position_embeddings": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "attention_bias": False, "partial_rotary_factor": 0.25,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                                "mrope_section": [1, 1, 0], "mrope_interleaved": True},
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_compress_ratio": 4,
            "indexer_budget": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid",
            "mamba_ssm_dtype": "float32", "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "ple_layer_ids": [2],
            "ple_embed_dim": 128, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2,
            "ngram_vocab_size_base": 10, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 4,
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": False},
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                                "quantized_layers": layers, "ignore": list(IGNORE)}}


def table_geometry(text):
    """(head sizes, offsets, stored rows, row width) from a text_config."""
    heads = text["heads_per_ngram"] * (text["ngram_size"] - 1)
    sizes = primes_from(text["ngram_vocab_size_base"], heads)
    offsets = [sum(sizes[:h]) for h in range(heads)]
    div = text["make_ngram_vocab_size_divisible_by"]
    return sizes, offsets, -(-sum(sizes) // div) * div, text["ple_embed_dim"] // heads


class Filler:
    """Random contents, seeded by the tensor's name alone."""

    def __init__(self, seed):
        self.seed = seed

    def rng(self, name):
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name, shape, scale):
        return bf16(shape, self.rng(name).normal(0, scale, shape))

    def fp8(self, name, shape):
        """E4M3 codes of ordinary size: no NaN, both signs, no zero."""
        r = self.rng(name)
        return Tensor("F8_E4M3", shape, (r.integers(0x20, 0x48, shape) | (r.integers(0, 2, shape) << 7)).astype("u1"))

    def fp4(self, name, rows, cols):
        return Tensor("U8", [rows, cols // 2], self.rng(name).integers(0, 256, [rows, cols // 2]).astype("u1"))

    def block_scale(self, name, rows, groups):
        return Tensor("F8_E4M3", [rows, groups], self.rng(name).integers(0x28, 0x50, [rows, groups]).astype("u1"))

    def scalar(self, name, low, high):
        return f32([], self.rng(name).uniform(low, high))


def build(config, table="fp8", seed=0, sparse_table=False, experts="nvfp4", mtp_experts="fp8-block"):
    """All tensors that config asks for. table: fp8, nvfp4, bf16. experts: nvfp4 or bf16 (fused)."""
    x = config["text_config"]
    fill = Filler(seed)
    t = {}
    hid, hc = x["hidden_size"], x["hc_count"]
    wide, low = hid * hc, x["hc_lowrank"]
    inter, sh, n_exp = x["moe_intermediate_size"], x["shared_expert_intermediate_size"], x["num_experts"]
    heads, kv, hd = x["num_attention_heads"], x["num_key_value_heads"], x["head_dim"]
    ih, ihd = x["indexer_n_heads"], x["indexer_head_dim"]
    lk, lv = x["linear_num_key_heads"], x["linear_num_value_heads"]
    lkd, lvd = x["linear_key_head_dim"], x["linear_value_head_dim"]

    def lin(name, out, inn):
        t[name] = fill.normal(name, [out, inn], inn ** -0.5)

    def vec(name, n, scale=0.1):
        t[name] = fill.normal(name, [n], scale)

    def mixer(p, inject):
        vec(p + "hc_norm.weight", wide)
        lin(p + "input_mix_weight_down.weight", low, wide)
        lin(p + "input_mix_weight_up.weight", wide, low)
        if inject:
            lin(p + "block_inject_weight.weight", hc, wide)

    def attention(p):
        lin(p + "q_proj.weight", 2 * heads * hd, hid)
        lin(p + "k_proj.weight", kv * hd, hid)
        lin(p + "v_proj.weight", kv * hd, hid)
        lin(p + "o_proj.weight", hid, heads * hd)
        vec(p + "q_norm.weight", hd)
        vec(p + "k_norm.weight", hd)
        lin(p + "indexer.index_qk_proj.weight", (ih + x["indexer_kv_heads"]) * ihd, hid)
        vec(p + "indexer.q_layernorm.weight", ihd)
        vec(p + "indexer.k_layernorm.weight", ihd)

    def gdn(p):
        conv = 2 * lk * lkd + lv * lvd
        lin(p + "in_proj_qkv.weight", conv, hid)
        lin(p + "in_proj_z.weight", lv * lvd, hid)
        lin(p + "in_proj_a.weight", lv, hid)
        lin(p + "in_proj_b.weight", lv, hid)
        t[p + "conv1d.weight"] = fill.normal(p + "conv1d.weight", [conv, 1, x["linear_conv_kernel_dim"]], 0.5)
        t[p + "A_log"] = bf16([lv], np.log(fill.rng(p + "A_log").uniform(1, 8, lv)))
        t[p + "dt_bias"] = fill.normal(p + "dt_bias", [lv], 0.5)
        t[p + "norm.weight"] = bf16([lvd], 1 + 0.1 * fill.rng(p + "norm").normal(size=lvd))
        lin(p + "out_proj.weight", hid, lv * lvd)

    def mlp(p):
        lin(p + "gate.weight", n_exp, hid)
        lin(p + "shared_expert_gate.weight", 1, hid)
        lin(p + "shared_expert.gate_proj.weight", sh, hid)
        lin(p + "shared_expert.up_proj.weight", sh, hid)
        lin(p + "shared_expert.down_proj.weight", hid, sh)

    def fused(p):
        for name, shape in (("gate_up_proj", [n_exp, 2 * inter, hid]), ("down_proj", [n_exp, hid, inter])):
            t[p + name] = fill.normal(p + name, shape, shape[2] ** -0.5)

    def nvfp4_experts(p):
        for e in range(n_exp):
            for proj, (o, i) in (("gate_proj", (inter, hid)), ("up_proj", (inter, hid)), ("down_proj", (hid, inter))):
                q = f"{p}{e}.{proj}."
                t[q + "weight"] = fill.fp4(q, o, i)
                t[q + "weight_scale"] = fill.block_scale(q + "s", o, i // 16)
                # gate and up of one expert share their scalars, as exporters write them
                shared = f"{p}{e}." + ("gate_up" if proj != "down_proj" else proj)
                t[q + "weight_scale_2"] = fill.scalar(shared + ".s2", 0.02, 0.06)
                t[q + "input_scale"] = fill.scalar(shared + ".in", 0.001, 0.004)

    def block_experts(p):
        for e in range(n_exp):
            for proj, (o, i) in (("gate_proj", (inter, hid)), ("up_proj", (inter, hid)), ("down_proj", (hid, inter))):
                q = f"{p}{e}.{proj}."
                t[q + "weight"] = fill.fp8(q, [o, i])
                shape = [-(-o // 128), -(-i // 128)]
                t[q + "weight_scale_inv"] = bf16(shape, fill.rng(q + "s").uniform(0.05, 0.15, shape))

    lin("lm_head.weight", x["vocab_size"], hid)
    lin(L + "embed_tokens.weight", x["vocab_size"], hid)
    mixer(L + "hyper_connection_mixer.", False)
    for n, kind in enumerate(x["layer_types"]):
        p = f"{L}layers.{n}."
        mixer(p + "attn_hyper_connection.", True)
        mixer(p + "mlp_hyper_connection.", True)
        gdn(p + "linear_attn.") if kind == "linear_attention" else attention(p + "self_attn.")
        mlp(p + "mlp.")
        {"nvfp4": nvfp4_experts, "bf16": fused}[experts](p + "mlp.experts.")
        if n == x["ple_layer_ids"][0] - 1:
            ple(t, x, fill, f"{p}ple.", table, sparse_table)
    if x.get("mtp_num_hidden_layers"):
        lin("mtp.fc_embedding.weight", hid, hid)
        lin("mtp.fc_hidden.weight", hid, hid)
        vec("mtp.pre_fc_norm_embedding.weight", hid)
        vec("mtp.pre_fc_norm_hidden.weight", wide)
        mixer("mtp.hyper_connection_mixer.", False)
        mixer("mtp.layers.0.attn_hyper_connection.", True)
        mixer("mtp.layers.0.mlp_hyper_connection.", True)
        attention("mtp.layers.0.self_attn.")
        mlp("mtp.layers.0.mlp.")
        {"fp8-block": block_experts, "bf16": fused}[mtp_experts]("mtp.layers.0.mlp.experts.")
    return Ckpt(config, t)


def ple(t, x, fill, p, table, sparse):
    hid, wide = x["hidden_size"], x["hidden_size"] * x["hc_count"]
    sizes, offsets, rows, width = table_geometry(x)
    for name, out, inn in (("key_proj", wide, x["ple_embed_dim"]), ("value_proj", hid, x["ple_embed_dim"])):
        t[p + name + ".weight"] = fill.normal(p + name, [out, inn], inn ** -0.5)
    for name in ("norm_key", "norm_query", "norm_conv"):
        t[p + name + ".weight"] = fill.normal(p + name, [wide], 0.1)
    t[p + "conv1d.weight"] = fill.normal(p + "conv1d", [wide, 1, x["ple_conv_kernel_size"]], 0.5)
    q = p + "ple_embedding."
    mult = hash_multipliers(x["vocab_size"], x["ngram_size"], x.get("seed", 1234))
    t[q + "layer_multipliers"] = i64([len(mult)], mult)
    t[q + "ngram_heads_offsets"] = i64([len(sizes)], offsets)
    t[q + "ngram_heads_vocab_sizes"] = i64([len(sizes)], sizes)
    g = q + "ngram_embedding."
    parts = x["split_ngram_parts"]
    per = rows // parts
    for s in range(parts):
        w = f"{g}shard_{s}."
        shape = [per, width if table != "nvfp4" else width // 2]
        dtype = {"fp8": "F8_E4M3", "nvfp4": "U8", "bf16": "BF16"}[table]
        if sparse:
            t[w + "weight"] = Tensor(dtype, shape)
        elif table == "fp8":
            t[w + "weight"] = fill.fp8(w, shape)
        elif table == "nvfp4":
            t[w + "weight"] = fill.fp4(w, per, width)
        else:
            t[w + "weight"] = fill.normal(w, shape, 0.5)
        if table == "nvfp4":
            t[w + "weight_scale"] = (Tensor("F8_E4M3", [per, width // 16]) if sparse else
                                     fill.block_scale(w + "s", per, width // 16))
    if table == "fp8":
        t[g + "weight_scale"] = bf16([1], 0.25)
    elif table == "nvfp4":
        t[g + "weight_scale_2"] = f32([1], 0.05)


def t0(seed=0):
    return build(t0_config(), seed=seed)


def t0_nvfp4(seed=0):
    config = t0_config()
    config["text_config"]["ple_embedding_dtype"] = "nvfp4"
    del config["quantization_config"]["quantized_layers"][NG[:-1]]
    return build(config, table="nvfp4", seed=seed)


def t0_bf16_table(seed=0):
    config = t0_config()
    del config["quantization_config"]["quantized_layers"][NG[:-1]]
    return build(config, table="bf16", seed=seed)


def t0_160(seed=0):
    config = t0_config()
    config["text_config"]["moe_intermediate_size"] = 160
    return build(config, seed=seed)


CHAIN = [5, 6, 7, 8, 3, 9, 2]


def t0_chain(chain=None, seed=0):
    """T0 whose greedy continuation is forced: after token a of the chain comes the next one."""
    c = t0(seed)
    for name, t in c.tensors.items():
        part = name.removeprefix(L)
        layer = name.startswith(L + "layers.")
        zero = (layer and any(k in part for k in ("linear_attn.out_proj.", "self_attn.o_proj.", ".down_proj.",
                                                  "ple.value_proj.")) and part.endswith(".weight")
                or part in ("hyper_connection_mixer.hc_norm.weight",
                            "hyper_connection_mixer.input_mix_weight_up.weight"))
        if zero:
            t.data = bytes(t.n_bytes)
    vocab, hid = c.tensors["lm_head.weight"].shape
    embed, head = np.zeros((vocab, hid), np.float32), np.zeros((vocab, hid), np.float32)
    embed[np.arange(vocab), np.arange(vocab)] = 1
    steps = chain or CHAIN
    for a, b in zip(steps, steps[1:]):
        head[b, a] = 1
    c.tensors[L + "embed_tokens.weight"] = bf16([vocab, hid], embed)
    c.tensors["lm_head.weight"] = bf16([vocab, hid], head)
    return c


def byte_alphabet():
    """The printable alphabet of byte-level BPE: byte -> character."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table = {b: chr(b) for b in keep}
    free = 256
    for b in range(256):
        if b not in table:
            table[b] = chr(free)
            free += 1
    return table


def tokenizer(pieces=None, special=None, vocab=32, merges=()):
    """A byte-level tokenizer.json: id i is the letter chr(65 + i) unless pieces (id -> bytes) says otherwise.
    special: id -> text of special added tokens."""
    alphabet = byte_alphabet()
    special = {2: "<|end|>", 3: "<|mid|>"} if special is None else special
    pieces = pieces or {}
    table = {}
    for i in range(vocab):
        if i not in special:
            raw = pieces.get(i, bytes([65 + i]))
            table["".join(alphabet[b] for b in raw)] = i
    added = [{"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, s in special.items()]
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": table, "merges": [list(m) for m in merges]}}


def sparse_table_t0():
    """T0 with a table of 27,000,132 rows of width 160 in one shard; two rows written (case C19)."""
    config = t0_config()
    config["text_config"].update(ple_embed_dim=640, ngram_vocab_size_base=6750000, split_ngram_parts=1)
    c = build(config, table="fp8", sparse_table=True)
    return c


def write_sparse_table(directory):
    c = sparse_table_t0()
    name = NG + "shard_0.weight"
    plan = {"model-00001-of-00002.safetensors": [n for n in c.tensors if n != name],
            "model-00002-of-00002.safetensors": [name]}
    c.write(directory, shards=plan)
    path = pathlib.Path(directory) / "model-00002-of-00002.safetensors"
    with open(path, "r+b") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        for row in (13421773, 26843546):
            f.seek(8 + n + row * 160)
            f.write(b"\x38" * 160)
    return c


if __name__ == "__main__":
    import sys
    kinds = {"t0": t0, "t0-nvfp4": t0_nvfp4, "t0-160": t0_160, "t0-chain": t0_chain, "t0-bf16": t0_bf16_table}
    if len(sys.argv) != 3 or sys.argv[1] not in [*kinds, "t0-sparse"]:
        sys.exit(f"usage: t0.py {'|'.join([*kinds, 't0-sparse'])} DIRECTORY")
    if sys.argv[1] == "t0-sparse":
        write_sparse_table(sys.argv[2])
    else:
        kinds[sys.argv[1]]().write(sys.argv[2])
