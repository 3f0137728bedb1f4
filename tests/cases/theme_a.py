"""A. Configuration and quantization."""
import re
import struct

import numpy as np

import t0
from harness import need, same
from t0 import L, NG, Tensor, bf16, f32

EXPERTS = [f"{L}layers.{n}.mlp.experts" for n in range(4)]
MTP_EXPERTS = "mtp.layers.0.mlp.experts"


def a02_ckpt():
    config = t0.t0_config()
    quant = config["quantization_config"]
    quant["quant_algo"] = "NVFP4"
    del quant["quantized_layers"]
    quant["ignore"] = quant["ignore"] + ["*.ple.*", "mtp*"]
    config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
    return t0.build(config, mtp_experts="bf16")


def a01(q):
    """Three formats in one checkpoint."""
    d = q.write(t0.t0())
    doc = q.inspect(d).doc
    same("layout", doc["model"]["layout"], "mixed")
    mods = {m["module"]: m for m in doc["quantization"]["modules"]}
    for m in EXPERTS:
        same(m, [mods[m][k] for k in ("format", "group_size", "source")], ["NVFP4", 16, "map"])
    same("table", [mods[NG[:-1]][k] for k in ("format", "source")], ["FP8", "map"])
    same("MTP experts", [mods[MTP_EXPERTS][k] for k in ("format", "group_size", "source")], ["FP8_BLOCK", 128, "map"])
    rest = [m for n, m in mods.items() if n not in EXPERTS + [NG[:-1], MTP_EXPERTS]]
    need(rest, "the BF16 linears are not among the modules")
    for m in rest:
        same(m["module"], [m["format"], m["source"]], ["BF16", "ignore"])
    q.run("inspect", d).says("NVFP4", "FP8", "map", "ignore", where="out")
    q.verify(d).clean()


def a02(q):
    """PLE excluded by the ignore list but stored as FP8."""
    d = q.write(a02_ckpt())
    doc = q.inspect(d).doc
    mods = {m["module"]: m for m in doc["quantization"]["modules"]}
    same("table", [mods[NG[:-1]][k] for k in ("format", "source")], ["FP8", "ple_embedding_dtype"])
    for m in EXPERTS:
        same(m, [mods[m][k] for k in ("format", "source")], ["NVFP4", "default"])
    comp = {c["name"]: c for c in doc["components"]}
    same("ple_table", [comp["ple_table"][k] for k in ("format", "source")], ["FP8", "ple_embedding_dtype"])
    q.verify(d).clean()


def a03(q):
    """quant_algo MIXED_PRECISION taken for 'not FP4'."""
    c = t0.t0()
    need("format" not in c.quant, "T0 has a top-level format key")
    d = q.write(c)
    doc = q.inspect(d).doc
    for m in EXPERTS:
        hits = [x for x in doc["quantization"]["modules"] if x["module"].startswith(m)]
        same(f"entries of {m}", [x["module"] for x in hits], [m])
        same(m, [hits[0][k] for k in ("format", "entry")], ["NVFP4", m])
    comp = {c["name"]: c for c in doc["components"]}
    same("expert tensors", comp["experts"]["tensors"], 4 * 2 * 3 * 4)
    why = q.run("inspect", d, "--why", f"{L}layers.2.mlp.experts.1.up_proj.weight")
    why.says("NVFP4", f"{L}layers.2.mlp.experts", "config.json", where="out")


def a04(q):
    """Layer 0 has no full attention."""
    d = q.write(t0.t0())
    q.verify(d).clean()
    comp = {c["name"]: c["tensors"] for c in q.inspect(d).doc["components"]}
    same("linear attention tensors", comp["linear_attn"], 3 * 9)
    same("full attention tensors", comp["self_attn"], 9)
    text = q.run("inspect", d).text
    need(re.search(r"\b3 linear", text) and re.search(r"\b1 full", text),
         f"the text does not say 3 linear and 1 full attention layer:\n{text}")


def a05(q):
    """Shell globs in the ignore list."""
    for glob in ("*.self_attn.?_proj", "*.self_attn.??_proj"):
        c = a02_ckpt()
        c.quant["ignore"] = [e for e in c.quant["ignore"] if e not in ("*.self_attn.*", "*.linear_attn.*")] + [
            glob, "*.self_attn.indexer.*", "*.linear_attn.*"]
        d = q.write(c)
        if glob == "*.self_attn.?_proj":
            q.verify(d).clean()
            q.run("inspect", d, "--why", f"{L}layers.3.self_attn.q_proj").says(glob, where="out")
        else:
            r = q.verify(d, code=1)
            r.one("quantized-but-plain", count=4)
            r.only("quantized-but-plain")


def a06(q):
    """Empty, null and absent ignore lists."""
    for ignore in ([], None, "absent"):
        c = t0.t0()
        c.tensors["lm_head.weight"] = Tensor("F8_E4M3", [32, 64], b"\x38" * 2048)
        c.tensors["lm_head.weight_scale"] = f32([], 0.02)
        c.quant["quantized_layers"]["lm_head"] = {"quant_algo": "FP8"}
        if ignore == "absent":
            del c.quant["ignore"]
        else:
            c.quant["ignore"] = ignore
        d = q.write(c)
        q.verify(d).clean()
        mods = q.resolved(d)
        same("lm_head", [mods["lm_head"][k] for k in ("format", "source")], ["FP8", "map"])
        for m in mods.values():
            if m["format"] == "BF16":
                same(m["module"], m["source"], "default")


def a07(q):
    """Not excluded, but stored BF16."""
    c = t0.t0()
    m = f"{L}layers.2.mlp.experts.1.down_proj"
    c.drop(m + ".")
    c.tensors[m + ".weight"] = bf16([64, 32], np.random.default_rng(1).normal(0, 0.1, [64, 32]))
    r = q.verify(q.write(c), code=1)
    f = r.one("quantized-but-plain", says=[m, "BF16", "ignore"])
    need(m in f["text"] or f["tensor"] and m in f["tensor"], "the module is not named")
    r.only("quantized-but-plain")


def a08(q):
    """Two homes for the quantization block."""
    def nested(quant):
        return {"producer": {"name": "modelopt", "version": "0.46.0"},
                "quantization": {"quant_algo": quant["quant_algo"], "kv_cache_quant_algo": None, "group_size": 16,
                                 "exclude_modules": quant["ignore"], "quantized_layers": quant["quantized_layers"]}}

    def table(d):
        return {k: (v["format"], v["group_size"], v["source"]) for k, v in q.resolved(d).items()}

    flat, hf, both, apart = t0.t0(), t0.t0(), t0.t0(), t0.t0()
    hf.files["hf_quant_config.json"] = nested(hf.config.pop("quantization_config"))
    both.files["hf_quant_config.json"] = nested(both.quant)
    other = nested(t0.t0_config()["quantization_config"])
    other["quantization"]["quantized_layers"][MTP_EXPERTS]["quant_algo"] = "FP8_PB_WO"
    other["quantization"]["quantized_layers"][EXPERTS[0]]["quant_algo"] = "FP8"
    apart.files["hf_quant_config.json"] = other
    dirs = [q.write(c) for c in (flat, hf, both, apart)]
    want = table(dirs[0])
    for d, source in zip(dirs, ("config.json", "hf_quant_config.json", "config.json", "config.json")):
        same("resolved table", table(d), want)
        same("quantization.source", q.inspect(d).doc["quantization"]["source"], source)
    for d in dirs[:3]:
        q.verify(d).clean()
    r = q.verify(dirs[3])
    same("counts", r.doc["counts"], {"error": 0, "warning": 1, "note": 0})
    whole = str(r.findings)
    for text in ("config.json", "hf_quant_config.json", "NVFP4", "FP8", EXPERTS[0]):
        need(text in whole, f"the warning does not mention {text}: {whole}")


def a09(q):
    """Preview architecture names."""
    base = q.write(t0.t0())
    want = q.inspect(base).doc
    for arch in ("Qwen3_8FlashNextForConditionalGeneration", "Qwen3_8_FlashNextForConditionalGeneration"):
        c = t0.t0()
        c.config.update(model_type="qwen3_8_flash_next", architectures=[arch])
        d = q.write(c)
        r = q.verify(d)
        r.one("architecture-alias", "note", says=arch if arch in str(r.findings) else "qwen3_8_flash_next")
        r.only("architecture-alias")
        doc = q.inspect(d).doc
        same("model", [doc["model"][k] for k in ("type", "type_found", "architecture")],
             ["qwen4_exp", "qwen3_8_flash_next", arch])
        for key in ("tensors", "components", "quantization", "ple", "mtp", "files"):
            same(key, doc[key], want[key])


def a10(q):
    """Unknown model type."""
    c = t0.t0()
    c.config["model_type"] = "qwen3_next"
    d = q.write(c)
    for command, args in (("verify", []), ("run", ["--tokens", "5", "-n", "1"])):
        q.fails(command, d, *args, kind="unsupported-model-type", says=["qwen3_next", "qwen4_exp"])
    r = q.inspect(d)
    r.one("unsupported-model-type", "warning", says=["qwen3_next", "qwen4_exp"])
    same("files", len(r.doc["files"]), 2)
    same("tensors", r.doc["tensors"]["count"], 244)
    q.run("inspect", d).says("model-00001-of-00002.safetensors", "unsupported-model-type")


def a11(q):
    """config.json not copied."""
    c = t0.t0()
    c.config = None
    d = q.write(c)
    q.fails("verify", d, kind="config-missing", says=[d.name])
    r = q.inspect(d)
    same("tensors", r.doc["tensors"]["count"], 244)
    same("files", len(r.doc["files"]), 2)
    q.run("inspect", d).says("unknown", "model-00001-of-00002.safetensors")
    q.verify(d / "model-00001-of-00002.safetensors").clean()


def a12(q):
    """architectures is null."""
    c = t0.t0()
    c.config["architectures"] = None
    r = q.verify(q.write(c))
    same("counts", r.doc["counts"], {"error": 0, "warning": 0, "note": 1})
    del c.config["model_type"]
    d = q.write(c)
    q.fails("verify", d, kind="unsupported-model-type")
    q.inspect(d)


def a13(q):
    """An algorithm name the program does not know."""
    c = t0.t0()
    c.quant["quantized_layers"][EXPERTS[2]]["quant_algo"] = "W4A16_AWQ"
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("unknown-quant-algo", says=["W4A16_AWQ", EXPERTS[2]])
    r.only("unknown-quant-algo", severities=("error",))
    mods = [m for n, m in q.resolved(d).items() if n.startswith(EXPERTS[2])]
    need(mods and all(m["format"] != "BF16" for m in mods), f"layer 2 reported as BF16: {mods}")

    # every known name, in either case of letters
    for upper in (True, False):
        c = t0.t0()
        layers = c.quant["quantized_layers"]
        c.tensors["lm_head.weight"] = Tensor("F8_E4M3", [32, 64], b"\x38" * 2048)
        c.tensors["lm_head.weight_scale"] = Tensor("U8", [32, 2], bytes([120]) * 64)
        layers["lm_head"] = {"quant_algo": "MXFP8", "group_size": 32}
        for name in c.match(EXPERTS[3] + "."):
            if name.endswith("input_scale"):
                del c.tensors[name]
        layers[EXPERTS[3]]["quant_algo"] = "W4A16_NVFP4"
        layers[MTP_EXPERTS]["quant_algo"] = "FP8_PB_WO" if upper else "fp8_block_scales"
        if not upper:
            for entry in layers.values():
                entry["quant_algo"] = entry["quant_algo"].lower()
            c.quant["quant_algo"] = "mixed_precision"
        d = q.write(c)
        q.verify(d).clean()
        mods = q.resolved(d)
        same("formats", [mods[m]["format"] for m in ("lm_head", EXPERTS[3], MTP_EXPERTS)],
             ["MXFP8", "W4A16_NVFP4", "FP8_BLOCK"])


def a14(q):
    """Wrong container types in the config."""
    for key, value in (("quantized_layers", ["x"]), ("ignore", "lm_head"), ("num_hidden_layers", "4")):
        c = t0.t0()
        (c.text if key == "num_hidden_layers" else c.quant)[key] = value
        q.fails("verify", q.write(c), kind="config-type", says=[key])


def a15(q):
    """Block-FP8 scale under the wrong name."""
    c = t0.t0_160()
    base = q.write(c)
    names = [n for n in c.match(MTP_EXPERTS) if n.endswith(".weight_scale_inv")]
    for n in names:
        c.rename(n, n.removesuffix("_inv"))
    d = q.write(c)
    r = q.verify(d)
    r.one("scale-name-variant", "warning", count=6)
    r.only("scale-name-variant")
    weight = MTP_EXPERTS + ".1.down_proj.weight"
    same("decoded values", q.values(d, 63, "--tensor", weight), q.values(base, 63, "--tensor", weight))
    for n in names:
        del c.tensors[n.removesuffix("_inv")]
    r = q.verify(q.write(c), code=1)
    r.some("missing-scale", says=[MTP_EXPERTS])
    r.only("missing-scale")


def a16(q):
    """4-D block scales."""
    c = t0.t0_160()
    base = q.write(c)
    for n in c.match("weight_scale_inv"):
        c.tensors[n].shape = [1, 1, 1, 2] if "down" in n else [2, 1, 1, 1]
        if "down" in n:
            c.tensors[n].shape = [1, 1, 2, 1]
    d = q.write(c)
    r = q.verify(d)
    need(r.doc["counts"]["error"] == 0 and r.doc["counts"]["warning"] == 0, r.seen())
    need(1 <= len(r.findings) <= 3, f"expected one note a module group:\n{r.seen()}")
    for proj in ("gate_proj", "down_proj"):
        weight = f"{MTP_EXPERTS}.0.{proj}.weight"
        same(proj, q.values(d, 30, "--tensor", weight), q.values(base, 30, "--tensor", weight))
    for shape in ([160, 1], [160]):
        c = t0.t0_160()
        for e in (0, 1):
            c.tensors[f"{MTP_EXPERTS}.{e}.gate_proj.weight_scale_inv"] = bf16(shape, 0.1)
        r = q.verify(q.write(c), code=1)
        r.some("scale-shape", says=["gate_proj.weight_scale_inv", "[2,1]"])
        r.only("scale-shape", severities=("error",))


def a17(q):
    """One-element scales come in three shapes."""
    tables = []
    for shape in ([], [1], [1, 1]):
        c = t0.t0()
        for n in c.tensors:
            if n.endswith((".weight_scale_2", ".input_scale")) or n == NG + "weight_scale":
                c.tensors[n].shape = shape
        d = q.write(c)
        q.verify(d).clean()
        tables.append(q.rows(d, "--rows", "0-59"))
        text = q.run("inspect", d, "--tensors", NG + "weight_scale").text
        shown = "".join(text.split())
        need(str(shape).replace(" ", "") in shown, f"shape {shape} is not shown:\n{text}")
    same("decoded rows", tables[1:], tables[:1] * 2)


def a18(q):
    """Some experts have no input_scale."""
    c = t0.t0()
    for proj in ("gate_proj", "up_proj", "down_proj"):
        del c.tensors[f"{EXPERTS[2]}.1.{proj}.input_scale"]
    d = q.write(c)
    r = q.verify(d, code=1)
    f = r.one("missing-scale")
    need("layer 2: input_scale missing for 1 of 2 experts (1)" in f["text"], f["text"])
    r.only("missing-scale", severities=("error", "warning"))
    g = q.generate(d, "--tokens", "5", "-n", "2", "--greedy", "--ignore-eos")
    need("input_scale missing for 1 of 2 experts (1)" in g.err, f"run does not warn: {g.err}")
    same("tokens", len(g.doc["tokens"]), 2)


def a19(q):
    """weight_scale_2 missing."""
    c = t0.t0()
    name = f"{EXPERTS[0]}.0.up_proj.weight_scale_2"
    del c.tensors[name]
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("missing-scale", says=[name])
    r.only("missing-scale", severities=("error",))
    q.fails("run", d, "--tokens", "5", "-n", "1", says=["weight_scale_2"])


def a20(q):
    """Global scale is zero."""
    name = f"{EXPERTS[1]}.1.down_proj."
    c = t0.t0()
    c.tensors[name + "weight_scale_2"] = f32([], 0.0)
    r = q.verify(q.write(c), code=1)
    r.one("scale-zero", says=[name + "weight_scale_2"])
    r.only("scale-zero", severities=("error", "warning"))
    c.tensors[name + "weight"].data = bytes(c.tensors[name + "weight"].n_bytes)
    r = q.verify(q.write(c))
    r.one("scale-zero", "warning")
    # block scales: a warning over codes, nothing over zeros
    c = t0.t0()
    scale = c.tensors[name + "weight_scale"].array().copy()
    scale[3, 1] = 0
    c.tensors[name + "weight_scale"].set(scale)
    r = q.verify(q.write(c))
    same("counts", [r.doc["counts"][k] for k in ("error", "warning")], [0, 1])
    codes = c.tensors[name + "weight"].array().copy()
    codes[3, 8:16] = 0
    c.tensors[name + "weight"].set(codes)
    q.verify(q.write(c)).clean()


def a21(q):
    """Global scale kept as a divisor under another name."""
    c = t0.t0()
    m = f"{EXPERTS[0]}.0.gate_proj."
    c.rename(m + "weight", m + "weight_packed")
    c.rename(m + "weight_scale_2", m + "weight_global_scale")
    c.tensors[m + "weight_global_scale"] = f32([1], 3584.0)
    del c.tensors[m + "input_scale"]
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("foreign-convention", says=[m + "weight", "compressed-tensors"])
    r.only("foreign-convention", severities=("error",))
    q.fails("run", d, "--tokens", "5", "-n", "1", kind="foreign-convention", says=[m[:-1]])
    q.fails("decode-rows", d, "--tensor", m + "weight_packed", "--rows", "0", says=["weight_packed"])


def a22(q):
    """Block scale has half the columns."""
    c = t0.t0()
    name = f"{EXPERTS[1]}.0.gate_proj.weight_scale"
    c.tensors[name] = Tensor("F8_E4M3", [32, 2], b"\x38" * 64)
    r = q.verify(q.write(c), code=1)
    f = r.one("scale-shape", says=[name])
    same("expected, found", ["".join(f[k].split()) for k in ("expected", "found")], ["[32,4]", "[32,2]"])
    r.only("scale-shape", severities=("error",))


def a23(q):
    """Quantizer internals leaked into the file."""
    c = t0.t0()
    for m in EXPERTS:
        for e in (0, 1):
            c.tensors[f"{m}.{e}.gate_proj.weight_quantizer._double_scale"] = f32([1], 7.0)
    base, d = q.write(t0.t0()), q.write(c)
    r = q.verify(d)
    f = r.one("unexpected-tensor", "warning", count=8)
    need(f["examples"] and all("_double_scale" in e for e in f["examples"]), f"examples: {f['examples']}")
    r.only("unexpected-tensor")
    weight = f"{EXPERTS[0]}.0.gate_proj.weight"
    same("values", q.values(d, 5, "--tensor", weight), q.values(base, 5, "--tensor", weight))


def a24(q):
    """Block scale has the wrong dtype."""
    name = f"{EXPERTS[2]}.0.up_proj.weight_scale"
    for dtype, data in (("F8_E5M2", b"\x3c" * 128), ("F32", struct.pack("<f", 1) * 128), ("U8", b"\x38" * 128)):
        c = t0.t0()
        c.tensors[name] = Tensor(dtype, [32, 4], data)
        r = q.verify(q.write(c), code=1)
        f = r.one("scale-dtype", says=[name])
        same("expected, found", [f["expected"], f["found"]], ["F8_E4M3", dtype])
        r.only("scale-dtype", severities=("error",))


def a25(q):
    """Labelled NVFP4, stored FP8."""
    good = q.write(t0.t0())
    q.run("inspect", good).says("4.50", where="out")
    c = t0.t0()
    for m in EXPERTS:
        for e in (0, 1):
            c.tensors[f"{m}.{e}.gate_proj.weight"] = Tensor("F8_E4M3", [32, 64], b"\x38" * 2048)
    d = q.write(c)
    r = q.verify(d, code=1)
    hits = r.some("weight-dtype", says=["gate_proj"])
    same("grouped count", sum(f["count"] for f in hits), 8)
    need(len(hits) <= 4, f"not grouped:\n{r.seen()}")
    same("expected, found", [hits[0]["expected"], hits[0]["found"]], ["U8", "F8_E4M3"])
    text = q.run("inspect", d).text
    need(re.search(r"\b8\.[4-9]\d?\b", text), f"no group of about 8.50 bits a parameter:\n{text}")


def a26(q):
    """Columns not a multiple of the group."""
    config = t0.t0_config()
    config["text_config"]["moe_intermediate_size"] = 40
    r = q.verify(q.write(t0.build(config)), "--level", "headers", code=1)
    hits = r.some("group-size-indivisible", says=["40", "16", "down_proj"])
    need(any("layer" in f["text"] for f in hits), f"the layer is not named:\n{r.seen()}")
    r.only("group-size-indivisible", severities=("error",))


def a27(q):
    """PLE scalar scale stored BF16."""
    for dtype, data in (("BF16", b"\x51\x39"), ("F32", struct.pack("<f", 0.00019931793212890625)),
                        ("F16", np.float16(0.0002).tobytes())):
        c = t0.t0()
        c.tensors[NG + "weight_scale"] = Tensor(dtype, [1], data)
        d = q.write(c)
        q.verify(d).clean()
        scale = 0.00019931793212890625 if dtype != "F16" else float(np.float16(0.0002))
        same("ple.scale", q.inspect(d).doc["ple"]["scale"], scale)
        q.run("inspect", d).says(dtype, where="out")
        codes = c.tensors[NG + "shard_0.weight"].array()[0]
        same("row 0", q.values(d, 0), [float(np.float32(v * scale)) for v in t0.E4M3[codes]])
    for dtype, data in (("U8", b"\x38"), ("I32", b"\1\0\0\0")):
        c = t0.t0()
        c.tensors[NG + "weight_scale"] = Tensor(dtype, [1], data)
        r = q.verify(q.write(c), code=1)
        r.one("scale-dtype", says=[dtype, "ngram_embedding.weight_scale"])
        r.only("scale-dtype", severities=("error",))


def a28(q):
    """FP8 table without its scale."""
    c = t0.t0()
    del c.tensors[NG + "weight_scale"]
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("missing-scale", says=["ngram_embedding"])
    r.only("missing-scale", severities=("error",))
    q.fails("decode-rows", d, "--rows", "0", says=["scale"])
    q.fails("run", d, "--tokens", "5", "-n", "1", says=["scale"])
    q.inspect(d)


def a29(q):
    """A scale on a table that needs none."""
    c = t0.t0_bf16_table()
    for s in range(4):
        c.tensors[f"{NG}shard_{s}.weight"] = bf16([15, 32], 1.0)
    c.tensors[NG + "weight_scale"] = bf16([1], 0.5)
    d = q.write(c)
    r = q.verify(d)
    r.one("unused-scale", "warning")
    r.only("unused-scale")
    same("row 0", q.values(d, 0), [1.0] * 32)


def a30(q):
    """Packed NVFP4 table."""
    c = t0.t0_nvfp4()
    d = q.write(c)
    q.verify(d).clean()
    ple = q.inspect(d).doc["ple"]
    same("ple", [ple[k] for k in ("form", "row_width", "rows", "shards")], ["NVFP4", 32, 60, 4])
    for name in (NG + "weight_scale_2", NG + "shard_2.weight_scale"):
        c = t0.t0_nvfp4()
        del c.tensors[name]
        r = q.verify(q.write(c), code=1)
        r.one("missing-scale", says=[name])
        r.only("missing-scale", severities=("error",))


def a31(q):
    """Unknown ple_embedding_dtype."""
    c = t0.t0_bf16_table()
    c.text["ple_embedding_dtype"] = "nf4"
    for s in range(4):
        c.tensors[f"{NG}shard_{s}.weight"] = Tensor("U8", [15, 20], bytes(range(1, 251)) + bytes(range(1, 51)))
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("unsupported-ple-dtype", says=["nf4", "float8_e4m3fn", "nvfp4"])
    r.only("unsupported-ple-dtype", severities=("error",))
    need(q.inspect(d).doc["ple"]["form"] != "BF16", "read as BF16")


def a32(q):
    """group_size null or odd."""
    for value in ("absent", None, 32, -16, 0, "16"):
        c = t0.t0()
        for m in EXPERTS:
            if value == "absent":
                del c.quant["quantized_layers"][m]["group_size"]
            else:
                c.quant["quantized_layers"][m]["group_size"] = value
        d = q.write(c)
        if value in ("absent", None):
            r = q.verify(d)
            same("counts", [r.doc["counts"][k] for k in ("error", "warning")], [0, 0])
            need(r.doc["counts"]["note"] >= 1, "no note about the group size")
        elif value == 32:
            r = q.verify(d, code=1)
            r.some("unsupported-group-size", says=["32", "16"])
            r.only("unsupported-group-size", severities=("error",))
        else:
            q.fails("verify", d, kind="config-type", says=["group_size"])


def a33(q):
    """MTP sidecar is not 'unrecognised'."""
    c = t0.t0()
    c.tensors[L + "layers.3.self_attn.k_proj.k_scale"] = f32([1], 1.0)
    c.tensors[L + "layers.3.self_attn.v_proj.v_scale"] = f32([1], 1.0)
    for name, shape in (("pos_embed.weight", [4, 8]), ("patch_embed.proj.bias", [8]), ("merger.norm.weight", [8])):
        c.tensors["model.visual." + name] = bf16(shape, 0.5)
    c.tensors["something.entirely.different"] = f32([2], 0.5)
    d = q.write(c)
    doc = q.inspect(d).doc
    comp = {x["name"]: x["tensors"] for x in doc["components"]}
    same("tensors", [sum(comp.values()), doc["tensors"]["count"]], [250, 250])
    same("mtp, vision, other", [comp[k] for k in ("mtp", "vision", "other")], [41, 3, 1])
    r = q.verify(d, code=1)
    f = r.one("unexpected-tensor", "warning", count=1)
    need("mtp." not in str(f), "an mtp tensor is called unexpected")
    r.some("unused-kv-scale", "note")
    r.some("vision-incomplete")
    r.only("vision-incomplete", "unexpected-tensor", "unused-kv-scale")


def a34(q):
    """MTP experts in block FP8."""
    c = t0.t0()
    d = q.write(c)
    doc = q.inspect(d).doc
    same("mtp", doc["mtp"]["format"], "FP8_BLOCK")
    q.run("inspect", d).says("128x128", where="out")
    q.verify(d).clean()
    name = MTP_EXPERTS + ".1.down_proj.weight_scale_inv"
    del c.tensors[name]
    r = q.verify(q.write(c), code=1)
    r.one("missing-scale", says=[name])
    r.only("missing-scale", severities=("error",))
    for layer, severity in ((4, None), (48, "warning")):
        c = t0.t0()
        c.quant["quantized_layers"][f"mtp.layers.{layer}.mlp.experts"] = {"quant_algo": "FP8_BLOCK_SCALES",
                                                                          "group_size": 128}
        r = q.verify(q.write(c))
        if severity is None:
            r.clean()
        else:
            same("counts", r.doc["counts"], {"error": 0, "warning": 1, "note": 0})
            need("mtp.layers.48.mlp.experts" in str(r.findings), r.seen())


def a35(q):
    """A fused tensor's one scale counts for all parts."""
    c = t0.t0()
    m = f"{EXPERTS[0]}.0."
    c.drop(m + "gate_proj.")
    c.drop(m + "up_proj.")
    blocks = np.full([64, 4], 0x38, np.uint8)
    blocks[63] = 0x40
    c.tensors[m + "gate_up_proj.weight"] = Tensor("U8", [64, 32], b"\x22" * 2048)
    c.tensors[m + "gate_up_proj.weight_scale"] = Tensor("F8_E4M3", [64, 4], blocks)
    c.tensors[m + "gate_up_proj.weight_scale_2"] = f32([], 0.5)
    c.tensors[m + "gate_up_proj.input_scale"] = f32([], 0.002)
    d = q.write(c)
    r = q.verify(d)
    need(r.doc["counts"]["warning"] == 0, r.seen())
    for row, value in ((0, 0.5), (63, 1.0)):
        same(f"row {row}", q.values(d, row, "--tensor", m + "gate_up_proj.weight"), [value] * 64)


def a36(q):
    """Attention query is twice as wide."""
    q.verify(q.write(t0.t0())).clean()
    c = t0.t0()
    name = L + "layers.3.self_attn.q_proj.weight"
    c.tensors[name] = bf16([32, 64], np.random.default_rng(0).normal(0, 0.1, [32, 64]))
    r = q.verify(q.write(c), code=1)
    f = r.one("shape", says=[name])
    same("expected, found", ["".join(f[k].split()) for k in ("expected", "found")], ["[64,64]", "[32,64]"])
    r.only("shape", severities=("error",))
