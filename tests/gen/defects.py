"""The small checkpoint T0 with one named defect for every kind of finding.

    make(kind, directory)  ->  (path, extra arguments of verify)

Each function below writes one checkpoint; its decorator names the kind that `qx verify` must report (as a
finding, or as the error when the configuration cannot be used). NOT_MADE says why a kind has none."""

import json
import os
import pathlib
import struct

import numpy as np

import t0
from t0 import L, NG, PLE, Tensor, bf16, f32, i64

NOT_MADE = {
    "data-absent": "inspect says it; verify says truncated",
    "decode-failed": "the net below the rules: reported when nothing else explains it",
    "file-changed": "needs a writer in the right moment",
    "read-error": "needs a failing disk",
    "unreadable-file": "needs a user without rights; tests may run as root",
}
NOT_MADE.update({f"diff-{w}": "inspect --diff says it, of two checkpoints"
                 for w in ("added", "removed", "dtype", "shape", "values", "config")})
DEFECTS = {}
EXPERT = L + "layers.0.mlp.experts.0."


def defect(kind):
    def add(f):
        DEFECTS[kind] = f
        return f
    return add


def make(kind, directory):
    d = pathlib.Path(directory)
    d.mkdir(parents=True, exist_ok=True)
    got = DEFECTS[kind](d)
    path, args = got if isinstance(got, tuple) else (got or d, [])
    return path, args


# --- ways to write ---------------------------------------------------------------------------

def tensors(kind, change, **how):
    """A defect in the tensors."""
    def f(d):
        c = t0.t0()
        change(c)
        c.write(d, **how)
    DEFECTS[kind] = f


def config(kind, change):
    """A defect in config.json."""
    tensors(kind, lambda c: change(c.config))


def header(kind, entries, data=b"", length=None):
    """A single file with a literal header."""
    def f(d):
        path = d / "x.safetensors"
        t0.write_raw(path, entries, data, length)
        return path
    DEFECTS[kind] = f


def entry(dtype, shape, a, b):
    return {"dtype": dtype, "shape": shape, "data_offsets": [a, b]}


def shard_file(d, content):
    t0.t0().write(d)
    (d / "model-00002-of-00002.safetensors").write_bytes(content)


def rewrite(d, name, change):
    p = d / name
    doc = json.loads(p.read_text())
    change(doc)
    p.write_text(json.dumps(doc))


INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


# --- files and headers -----------------------------------------------------------------------

@defect("lfs-pointer")
def _(d):
    shard_file(d, b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n")


@defect("truncated")
def _(d):
    t0.t0().write(d)
    os.truncate(d / SECOND, (d / SECOND).stat().st_size - 37)


@defect("trailing-bytes")
def _(d):
    t0.t0().write(d)
    with open(d / SECOND, "ab") as f:
        f.write(b"1234")


@defect("shard-missing")
def _(d):
    t0.t0().write(d)
    (d / SECOND).unlink()


@defect("index-stale")
def _(d):
    t0.t0().write(d)
    for i, p in enumerate(sorted(d.glob("*.safetensors"))):
        p.rename(d / f"other-{i}.safetensors")


@defect("index-tensor-absent")
def _(d):
    t0.t0().write(d)
    rewrite(d, INDEX, lambda x: x["weight_map"].update({"lm_head.weight": SECOND}))


@defect("index-format")
def _(d):
    t0.t0().write(d)
    (d / INDEX).write_text('{"weight_map": []}')


@defect("duplicate-tensor")
def _(d):
    c = t0.t0()
    c.write(d, index=False)
    t0.write_safetensors(d / "again.safetensors", {"lm_head.weight": c.tensors["lm_head.weight"]})


@defect("superseded-copies")
def _(d):
    c = t0.t0()
    plan = dict(c.split(2))
    index = {n: f for f, names in plan.items() for n in names}
    plan[SECOND] = plan[SECOND] + ["lm_head.weight"]
    c.write(d, shards=plan, index=index)


@defect("unindexed-tensor")
def _(d):
    c = t0.t0()
    c.tensors["leftover"] = f32([1], 1.0)
    plan = dict(c.split(2))
    c.write(d, shards=plan, index={n: f for f, names in plan.items() for n in names if n != "leftover"})


@defect("stray-file")
def _(d):
    t0.t0().write(d)
    t0.write_safetensors(d / "stray.safetensors", {"x": f32([1], 1.0)})


@defect("total-size")
def _(d):
    t0.t0().write(d, total_size=1)


@defect("not-safetensors")
def _(d):
    shard_file(d, b"PK\x03\x04" + b"\1" * 4000)


@defect("file-too-short")
def _(d):
    shard_file(d, b"1234567")


@defect("header-length")
def _(d):
    shard_file(d, struct.pack("<Q", 1 << 40) + b"{}" * 100)


@defect("header-too-large")
def _(d):
    t0.t0().write(d)
    return d, ["--max-header", "1024"]


@defect("no-weights")
def _(d):
    t0.t0().write(d, index=False)
    for p in d.glob("*.safetensors"):
        p.unlink()


header("header-json", b"{nonsense")
header("header-utf8", b'{"\xff": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4)
header("bad-offsets", {"x": entry("F32", [1], 4, 0)}, b"\0" * 4)
header("bad-shape", {"x": entry("F32", [-1], 0, 4)}, b"\0" * 4)
header("size-mismatch", {"x": entry("F32", [2], 0, 4)}, b"\0" * 4)
header("unknown-dtype", {"x": entry("F9_X", [4], 0, 4)}, b"\0" * 4)
header("overlap", {"x": entry("F32", [2], 0, 8), "y": entry("F32", [1], 4, 8)}, b"\0" * 8)
header("hole", {"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 8, 12)}, b"\0" * 12)
header("metadata-type", {"__metadata__": {"n": 0}, "x": entry("F32", [1], 0, 4)}, b"\0" * 4)


@defect("unsafe-path")
def _(d):
    t0.t0().write(d)
    rewrite(d, INDEX, lambda x: x["weight_map"].update({"lm_head.weight": "../x.safetensors"}))


# --- configuration ---------------------------------------------------------------------------

@defect("json-bom")
def _(d):
    t0.t0().write(d)
    (d / INDEX).write_bytes(b"\xef\xbb\xbf" + (d / INDEX).read_bytes())


@defect("json-too-deep")
def _(d):
    t0.t0().write(d)
    (d / "config.json").write_bytes(b"[" * 100000)


@defect("json-syntax")
def _(d):
    t0.t0().write(d)
    (d / "config.json").write_bytes(b"{,}")


@defect("json-utf8")
def _(d):
    t0.t0().write(d)
    (d / "config.json").write_bytes(b'{"\xff": 1}')


@defect("json-duplicate-key")
def _(d):
    t0.t0().write(d)
    text = (d / INDEX).read_text()
    at = text.index('"lm_head.weight"')
    (d / INDEX).write_text(text[:at] + '"lm_head.weight": "elsewhere.safetensors", ' + text[at:])


@defect("json-nonfinite")
def _(d):
    t0.t0().write(d)
    text = (d / "config.json").read_text()
    at = text.index("{") + 1
    (d / "config.json").write_text(text[:at] + '"time_step_limit": [0.0, Infinity], ' + text[at:])


@defect("config-missing")
def _(d):
    t0.t0().write(d)
    (d / "config.json").unlink()


@defect("too-large")
def _(d):
    t0.t0().write(d)
    with open(d / "config.json", "ab") as f:
        f.truncate(200 << 20)


config("config-type", lambda x: x["text_config"].update(num_hidden_layers="4"))
config("config-value", lambda x: x["text_config"].update(ple_embed_dim=130))
config("unsupported-model-type", lambda x: x.update(model_type="qwen3_next"))
config("architecture-alias", lambda x: x.update(model_type="qwen3_8_flash_next"))
config("architecture-missing", lambda x: x.update(architectures=None))
config("architecture-unknown", lambda x: x.update(architectures=["SomethingElse"]))
config("model-type-missing", lambda x: x.pop("model_type"))
config("text-model-type", lambda x: x["text_config"].update(model_type="llama"))
config("rope-unsupported", lambda x: x["text_config"]["rope_parameters"].update(rope_type="longrope"))


# --- text ------------------------------------------------------------------------------------

def text_files(kind, change, name="tokenizer.json"):
    """A defect in a file beside the weights; `change` gets a sound tokenizer and returns what is written."""
    def f(d):
        t0.t0().write(d)
        t0.write_json(d / name, change(t0.tokenizer()))
    DEFECTS[kind] = f


def with_merge(t):
    t["model"]["merges"].append(["A", "~"])
    return t


def lowercase(t):
    t["normalizer"] = {"type": "Lowercase"}
    return t


text_files("tokenizer-value", with_merge)
text_files("tokenizer-unsupported", lowercase)
text_files("tokenizer-vocab", lambda t: t0.tokenizer(vocab=33))
text_files("tokenizer-missing", lambda t: {"eos_token": "x"}, "tokenizer_config.json")


@defect("template-unknown")
def _(d):
    t0.t0().write(d)
    (d / "chat_template.jinja").write_text("{{ messages }}")


# --- quantisation settings -------------------------------------------------------------------

def plain_expert(c):
    for s in ("weight_scale", "weight_scale_2", "input_scale"):
        del c.tensors[EXPERT + "down_proj." + s]
    c.tensors[EXPERT + "down_proj.weight"] = bf16([64, 32], np.ones((64, 32)))


def hf_quant(c, change):
    quant = {"quant_algo": "MIXED_PRECISION", "exclude_modules": c.quant["ignore"],
             "quantized_layers": json.loads(json.dumps(c.quant["quantized_layers"]))}
    change(quant["quantized_layers"])
    c.files["hf_quant_config.json"] = {"producer": {"name": "modelopt", "version": "0"}, "quantization": quant}


def map_entry(x):
    return x["quantization_config"]["quantized_layers"]


FIRST = L + "layers.0.mlp.experts"
tensors("quantized-but-plain", plain_expert)
config("undeclared-format", lambda x: map_entry(x).pop(NG[:-1]))
config("format-mismatch", lambda x: map_entry(x).update({"mtp.layers.0.mlp.experts": {"quant_algo": "MXFP8", "group_size": 32}}))
config("unknown-quant-algo", lambda x: map_entry(x)[FIRST].update(quant_algo="W4A16_AWQ"))
config("unknown-quant-method", lambda x: x["quantization_config"].update(quant_method="something"))
tensors("quant-conflict", lambda c: hf_quant(c, lambda m: m[FIRST].update(quant_algo="FP8")))
config("entry-without-module", lambda x: map_entry(x).update({L + "layers.0.mlp.nothing": {"quant_algo": "FP8"}}))
config("group-size-missing", lambda x: map_entry(x)[FIRST].pop("group_size"))
config("unsupported-group-size", lambda x: map_entry(x)[FIRST].update(group_size=32))
config("normalised-names", lambda x: x["quantization_config"]["ignore"].append("model.embed_tokens"))


def all_gates_fp8(c):
    for n in c.match("gate_proj.weight"):
        if ".experts." in n and n.endswith(".weight") and not n.startswith("mtp."):
            c.tensors[n] = Tensor("F8_E4M3", [32, 64], b"\x38" * 2048)


tensors("weight-dtype", all_gates_fp8)


@defect("unsupported-ple-dtype")
def _(d):
    c = t0.t0()
    c.config["text_config"]["ple_embedding_dtype"] = "nf4"
    del map_entry(c.config)[NG[:-1]]
    c.drop("ngram_embedding.weight_scale")
    for k in range(4):
        c.tensors[NG + f"shard_{k}.weight"] = Tensor("U8", [15, 20], b"\x11" * 300)
    c.write(d)


def compressed_tensors(c):
    m = EXPERT + "gate_proj."
    for s in ("weight", "weight_scale_2", "input_scale"):
        t = c.tensors.pop(m + s)
        if s == "weight":
            c.tensors[m + "weight_packed"] = t
    c.tensors[m + "weight_global_scale"] = f32([1], 3584.0)


tensors("foreign-convention", compressed_tensors)


# --- layout ----------------------------------------------------------------------------------

def without(part):
    return lambda c: c.drop(part)


def with_tensor(name, t):
    return lambda c: c.tensors.__setitem__(name, t)


ONE = f32([1], 1.0)
tensors("scale-range", with_tensor(EXPERT + "up_proj.weight_scale_2", f32([], 1e30)))
tensors("missing-tensor", without("layers.0.linear_attn.A_log"))
tensors("unexpected-tensor", with_tensor(L + "something.weight", ONE))
tensors("shape", with_tensor(L + "layers.3.self_attn.q_proj.weight", bf16([32, 64], np.ones((32, 64)))))
tensors("dtype", with_tensor(PLE + "ple_embedding.layer_multipliers", Tensor("I32", [3], b"\1" * 12)))
tensors("expert-range", with_tensor(L + "layers.0.mlp.experts.7.gate_proj.weight", Tensor("U8", [32, 32], b"\1" * 1024)))
tensors("layer-range", with_tensor(L + "layers.9.mlp.gate.weight", bf16([2, 64], np.ones((2, 64)))))
tensors("two-forms", with_tensor(L + "layers.0.mlp.experts.gate_up_proj", bf16([2, 64, 64], np.ones((2, 64, 64)))))
tensors("mtp-absent", without("mtp."))
tensors("mtp-extra", with_tensor("mtp.something.weight", ONE))
tensors("mtp-incomplete", without("mtp.fc_hidden"))
config("mtp-undeclared", lambda x: x["text_config"].update(mtp_num_hidden_layers=0))
VISION = {"model_type": "qwen4_exp_vision", "depth": 1, "hidden_size": 16, "in_channels": 3, "intermediate_size": 32,
          "num_heads": 2, "num_position_embeddings": 4, "out_hidden_size": 64, "patch_size": 2, "spatial_merge_size": 2,
          "temporal_patch_size": 2}
config("vision-absent", lambda x: x.update(vision_config=VISION))
tensors("vision-incomplete", with_tensor("model.visual.pos_embed.weight", bf16([4, 16], np.ones((4, 16)))))
tensors("vision-extra", with_tensor("model.visual.something.weight", ONE))
tensors("unused-tensor", with_tensor(L + "hyper_connection_mixer.block_inject_weight.weight", bf16([4, 256], np.ones((4, 256)))))
tensors("unused-kv-scale", with_tensor(L + "layers.3.self_attn.k_proj.k_scale", ONE))
tensors("ple-extra", with_tensor(PLE + "ple_embedding.hashstats_hits", i64([4], [0] * 4)))
tensors("ple-form-mixed", with_tensor(NG + "shard_2.weight", bf16([15, 32], np.ones((15, 32)))))
tensors("ple-shard-missing", without("ngram_embedding.shard_2."))
config("ple-split-inferred", lambda x: x["text_config"].pop("split_ngram_parts"))
config("ple-split-mismatch", lambda x: x["text_config"].update(split_ngram_parts=5))
tensors("hash-constants-missing", without("ple_embedding.layer_multipliers"))


@defect("group-size-indivisible")
def _(d):
    text = t0.t0_config()
    text["text_config"]["moe_intermediate_size"] = 40
    c = t0.t0()
    c.config = text
    for n in list(c.tensors):
        t = c.tensors[n]
        if ".mlp.experts." not in n or n.startswith("mtp."):
            continue
        if n.endswith("down_proj.weight"):
            c.tensors[n] = Tensor("U8", [64, 20], b"\x11" * 1280)
        elif n.endswith(".weight"):
            c.tensors[n] = Tensor("U8", [40, 32], b"\x11" * 1280)
        elif n.endswith("weight_scale") and "down_proj" not in n:
            c.tensors[n] = Tensor("F8_E4M3", [40, 4], b"\x38" * 160)
    c.write(d)


@defect("foreign-layout")
def _(d):
    c = t0.t0()
    for k in range(4):
        c.rename(NG + f"shard_{k}.weight", "language_model.model.layers.1.ple.ple_embedding.ngram_embedding."
                 f"shards.{k}.weight")
    c.write(d)


# --- scales and values -----------------------------------------------------------------------

SCALE_2 = EXPERT + "up_proj.weight_scale_2"
BLOCKS = EXPERT + "up_proj.weight_scale"


def first_byte(name, value):
    def change(c):
        t = c.tensors[name]
        a = t.array().copy()
        a.reshape(-1)[0] = value
        t.set(a)
    return change


tensors("missing-scale", without("layers.0.mlp.experts.0.up_proj.weight_scale_2"))
tensors("scale-shape", with_tensor(BLOCKS, Tensor("F8_E4M3", [32, 2], b"\x38" * 64)))
tensors("scale-dtype", with_tensor(BLOCKS, Tensor("F8_E5M2", [32, 4], b"\x38" * 128)))
tensors("scale-without-weight", without("layers.0.mlp.experts.0.up_proj.weight\0"))
tensors("scale-zero", with_tensor(SCALE_2, f32([], 0.0)))
tensors("scale-not-finite", with_tensor(SCALE_2, f32([], float("inf"))))
tensors("scale-negative", with_tensor(SCALE_2, f32([], -1.0)))


@defect("scale-without-weight")
def _(d):
    c = t0.t0()
    del c.tensors[EXPERT + "up_proj.weight"]
    c.write(d)


@defect("scale-name-variant")
def _(d):
    c = t0.t0_160()
    for n in c.match("mtp.layers.0.mlp.experts."):
        if n.endswith("weight_scale_inv"):
            c.rename(n, n[:-len("_inv")])
    c.write(d)


@defect("scale-4d")
def _(d):
    c = t0.t0_160()
    n = "mtp.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"
    c.tensors[n] = Tensor("BF16", [2, 1, 1, 1], bytes(c.tensors[n].data))
    c.write(d)


@defect("unused-scale")
def _(d):
    c = t0.t0_bf16_table()
    c.tensors[NG + "weight_scale"] = bf16([1], [0.5])
    c.write(d)


@defect("gate-up-scales")
def _(d):
    c = t0.t0()
    c.tensors[SCALE_2] = f32([], 0.125)
    c.tensors[EXPERT + "gate_proj.weight_scale_2"] = f32([], 0.25)
    c.write(d)


@defect("hash-constants-mismatch")
def _(d):
    c = t0.t0()
    m = t0.hash_multipliers(32, 3)
    c.tensors[PLE + "ple_embedding.layer_multipliers"] = i64([3], [m[0], m[1] + 2, m[2]])
    c.write(d)


@defect("ple-range")
def _(d):
    c = t0.t0()
    c.tensors[PLE + "ple_embedding.ngram_heads_offsets"] = i64([4], [0, 11, 24, 52])
    c.write(d)


@defect("payload-nan")
def _(d):
    c = t0.t0()
    first_byte(NG + "shard_1.weight", 0x7F)(c)
    c.write(d)
    return d, ["--level", "full"]


@defect("all-zero")
def _(d):
    c = t0.t0()
    c.tensors["lm_head.weight"] = bf16([32, 64], np.zeros((32, 64)))
    c.write(d)
    return d, ["--level", "full"]


# --- decoding and manifests ------------------------------------------------------------------

@defect("decode-mismatch")
def _(d):
    """A decoder that answers zeros."""
    t0.t0().write(d)
    script = d / "zeros.sh"
    script.write_text("#!/bin/sh\nwhile read r; do printf '%s' $r; i=0; while [ $i -lt 32 ]; do printf ' 0000'; "
                      "i=$((i+1)); done; echo; done\n")
    script.chmod(0o755)
    return d, ["--decoder", str(script)]


@defect("decoder-failed")
def _(d):
    t0.t0().write(d)
    return d, ["--decoder", "false #"]


def sums(d, text):
    (d / "SUMS").write_text(text)
    return d, ["--manifest", str(d / "SUMS")]


@defect("checksum")
def _(d):
    t0.t0().write(d)
    return sums(d, "0" * 64 + "  " + SECOND + "\n")


@defect("checksum-missing")
def _(d):
    t0.t0().write(d)
    return sums(d, "0" * 64 + "  " + SECOND + "\n")


@defect("manifest-layout")
def _(d):
    """A list of tensors that say where they lay before; digests are filled in by the test's own qx."""
    c = t0.t0()
    c.write(d / "before", shards=3)
    c.write(d / "after", shards=2)
    return d / "after", ["--manifest-of", str(d / "before")]
