"""B. Files: damaged, unusual, large."""
import json
import os
import struct

import numpy as np

import t0
from harness import need, same
from t0 import L, NG, Tensor

MIB = 1 << 20


def entry(dtype, shape, a, b):
    return {"dtype": dtype, "shape": shape, "data_offsets": [a, b]}


def bare(q, header, data=b"", length=None, name=None):
    """One safetensors file from a literal header."""
    path = q.path(name or f"f{q.n}.safetensors")
    q.n += 1
    t0.write_raw(path, header, data, length)
    return path


def four(q, change=None, **how):
    c = t0.t0()
    return q.write(c, shards=4, **how)


def shard(d, k, n=4):
    return d / f"model-{k:05d}-of-{n:05d}.safetensors"


def index_of(d):
    return json.loads((d / "model.safetensors.index.json").read_text())


def set_index(d, index):
    t0.write_json(d / "model.safetensors.index.json", index)


def b01(q):
    """LFS pointer instead of weights."""
    d = four(q)
    oid = "0123456789abcdef" * 4
    shard(d, 2).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 400001920\n")
    r = q.verify(d, code=1)
    r.one("lfs-pointer", says=["400001920", oid, shard(d, 2).name])
    r.only("lfs-pointer", severities=("error",))
    same("files checked", r.doc["checked"]["files"] >= 3, True)
    q.fails("run", d, "--tokens", "5", "-n", "1", kind="lfs-pointer")
    t0.write_raw(shard(d, 3), {"x": entry("F32", [1], 0, 4)}, b"\0\0")       # the others are still checked
    r = q.verify(d, code=1)
    r.some("lfs-pointer")
    r.some("truncated", says=shard(d, 3).name)


def b02(q):
    """Shard cut short."""
    c = t0.t0()
    # the table's last shard is at the file's end, so that a row can be hit or not
    last = NG + "shard_3.weight"
    t = c.tensors.pop(last)
    c.tensors[last] = t
    d = q.write(c, shards=1, index=False)
    path = d / "model.safetensors"
    os.truncate(path, path.stat().st_size - 37)
    r = q.verify(d, code=1)
    r.one("truncated", says=["37", last, "model.safetensors"])
    r.only("truncated", severities=("error",))
    q.fails("run", d, "--tokens", "5", "-n", "1", kind="truncated")
    q.fails("repack", d, "-o", q.path(), "--table-shards", "2", kind="truncated")
    q.fails("decode-rows", d, "--rows", "59", says=["truncated"])
    codes = c.tensors[NG + "shard_0.weight"].array()[3]
    same("an intact row", q.values(d, 3), [float(v) for v in t0.E4M3[codes] * 0.25])


def b03(q):
    """Dangling links."""
    for target in ("../blobs/no-such-blob", None):
        d = four(q)
        path = shard(d, 3)
        path.unlink()
        path.symlink_to(target or path.name)
        r = q.verify(d, code=1)
        f = r.one("shard-missing", says=[path.name])
        if target:
            need(f"dangling link -> {target}" in f["text"], f["text"])
        r.only("shard-missing", severities=("error",))
        same("files listed", len(q.inspect(d).doc["files"]) >= 3, True)


def b04(q):
    """Index names a shard that is not there."""
    d = four(q)
    name = shard(d, 3).name
    count = sum(f == name for f in index_of(d)["weight_map"].values())
    shard(d, 3).unlink()
    r = q.verify(d, code=1)
    r.one("shard-missing", says=[name, count])
    r.only("shard-missing", severities=("error",))
    q.fails("run", d, "--tokens", "5", "-n", "1", kind="shard-missing", says=[name])


def b05(q):
    """Index maps a tensor to a shard that lacks it."""
    name = "mtp.fc_hidden.weight"
    for elsewhere in (False, True):
        c = t0.t0()
        t = c.tensors.pop(name)
        plan = dict(c.split(4))
        first, last = list(plan)[0], list(plan)[3]
        index = {n: f for f, names in plan.items() for n in names}
        if elsewhere:
            c.tensors[name] = t
            plan[first] = plan[first] + [name]
        index[name] = last
        d = q.write(c, shards=plan, index=index, total_size=c.payload)
        r = q.verify(d, code=1)
        r.one("index-tensor-absent", says=[name, last] + ([first] if elsewhere else []))
        r.only("index-tensor-absent", severities=("error",))


def b06(q):
    """Same name in two shards."""
    one = f"{L}layers.0.mlp.experts.0.gate_proj.weight"
    up = f"{L}layers.0.mlp.experts.0.up_proj.weight"
    c = t0.t0()
    c.tensors[one] = Tensor("U8", [32, 32], b"\x11" * 1024)
    plan = dict(c.split(2))
    first = next(f for f, names in plan.items() if one in names)
    holder = next(f for f, names in plan.items() if up in names)
    plan[holder] = [n for n in plan[holder] if n != up]
    overlay = "model-overlay-00001.safetensors"

    def make(where, index=True):
        d = q.path()
        weight_map = {n: f for f, names in plan.items() for n in names}
        weight_map[up], weight_map[one] = overlay, where
        c.write(d, shards=plan, index=weight_map if index else False)
        t0.write_safetensors(d / overlay, {one: Tensor("U8", [32, 32], b"\x22" * 1024), up: c.tensors[up]})
        return d

    scale = float(c.tensors[f"{L}layers.0.mlp.experts.0.gate_proj.weight_scale_2"].array())
    blocks = c.tensors[f"{L}layers.0.mlp.experts.0.gate_proj.weight_scale"].array()[0]
    for where, code in ((overlay, 1.0), (first, 0.5)):
        d = make(where)
        r = q.verify(d)
        r.one("superseded-copies", "warning", count=1)
        r.only("superseded-copies")
        want = np.repeat(np.float32(t0.E4M3[blocks] * code * scale), 16)
        same(f"row 0 from {where}", q.values(d, 0, "--tensor", one), [float(v) for v in want])
    r = q.verify(make(first, index=False), code=1)
    r.one("duplicate-tensor", says=[one, first, overlay])
    third = next(f for f in plan if f != first)
    r = q.verify(make(third), code=1)
    r.one("index-tensor-absent", says=[one, first, overlay])


def b07(q):
    """Stray single file beside an indexed set."""
    c = t0.t0()
    d = q.write(c)
    base = q.rows(d, "--rows", "0-59")
    other = {n: Tensor(t.dtype, t.shape, bytes(t.n_bytes)) for n, t in c.tensors.items()}
    t0.write_safetensors(d / "model.safetensors", other)
    (d / "notes.bin").write_bytes(b"anything")
    r = q.verify(d)
    r.one("stray-file", "warning", says=["model.safetensors", (d / "model.safetensors").stat().st_size])
    r.only("stray-file")
    same("rows", q.rows(d, "--rows", "0-59"), base)


def b08(q):
    """No index: gaps in shard numbering."""
    c = t0.t0()
    mtp = [n for n in c.tensors if n.startswith("mtp.")]
    side = t0.Ckpt(None, {n: c.tensors.pop(n) for n in mtp})
    d = q.write(c, shards=4, index=False)
    t0.write_safetensors(d / "mtp-extra.safetensors", side.tensors)
    q.verify(d).clean()
    same("tensors", q.inspect(d).doc["tensors"]["count"], 244)
    shard(d, 3).unlink()
    r = q.verify(d, code=1)
    r.one("shard-missing", says=["3"])


def b09(q):
    """A small middle shard is normal."""
    for words in (2250, 1, 2250, 500):
        q.verify(bare(q, {"w": entry("F32", [words], 0, 4 * words)}, struct.pack("<f", 0.5) * words)).clean()
    c = t0.t0()
    lone = f"{L}layers.1.mlp.experts.0.up_proj.weight_scale_2"
    names = [n for n in c.tensors if n != lone]
    plan = {f"model-{k:05d}-of-00004.safetensors": part for k, part in
            ((1, names[:110]), (2, [lone]), (3, names[110:210]), (4, names[210:]))}
    q.verify(q.write(c, shards=plan)).clean()


def b10(q):
    """Index from another split."""
    c = t0.t0()
    d = q.path()
    names = list(c.tensors)
    index = {n: f"a-{1 + i % 4:05d}-of-00004.safetensors" for i, n in enumerate(names)}
    c.write(d, shards={"b-00001-of-00002.safetensors": names[:100], "b-00002-of-00002.safetensors": names[100:]},
            index=index)
    r = q.verify(d, code=1)
    f = r.one("index-stale")
    need("none of the 4 files named by the index exist; 2 other safetensors files present" in f["text"], f["text"])
    need(len(r.findings) <= 3, f"one finding was asked for:\n{r.seen()}")


def b11(q):
    """total_size is wrong."""
    c = t0.t0()
    q.verify(q.write(c)).clean()
    d = q.write(c)
    files = sum(p.stat().st_size for p in d.glob("*.safetensors"))
    set_index(d, {"metadata": {"total_size": files}, "weight_map": index_of(d)["weight_map"]})
    r = q.verify(d)
    f = r.one("total-size", "warning", says=[files, c.payload])
    need("file" in f["text"], f["text"])
    r.only("total-size")
    d = q.write(c, total_size=c.payload + 1)
    r = q.verify(d)
    files = sum(p.stat().st_size for p in d.glob("*.safetensors"))
    r.one("total-size", "warning", says=[c.payload + 1, c.payload, files])
    r.only("total-size")
    set_index(d, {"weight_map": index_of(d)["weight_map"]})
    q.verify(d).clean()


def b12(q):
    """Not a safetensors file at all."""
    for head, word in ((b"PK\x03\x04", "zip"), (b"\x80\x02", "pickle"), (b"\x1f\x8b", "gzip"), (b"GGUF", "GGUF"),
                       (b"<!DOCTYPE html>", "HTML")):
        data = head + b"\x01" * 4000
        path = q.path(f"{word}.safetensors")
        path.write_bytes(data)
        r = q.verify(path, code=1)
        r.one("not-safetensors", says=[word])
        q.fails("decode-rows", path, "--tensor", "w", "--rows", "0", kind="not-safetensors", says=[word])
        c = t0.t0()
        d = q.write(c, shards=3)
        shard(d, 2, 3).write_bytes(data)
        r = q.verify(d, code=1)
        r.one("not-safetensors", says=[word, shard(d, 2, 3).name])
        r.only("not-safetensors", severities=("error",))
        doc = q.inspect(d).doc
        need(doc["tensors"]["count"] > 50, "the rest is not shown")
        q.fails("run", d, "--tokens", "5", "-n", "1", kind="not-safetensors")
        q.fails("repack", d, "-o", q.path(), "--table-shards", "2", kind="not-safetensors")


def b13(q):
    """Header length beyond the file."""
    header = json.dumps({"w": entry("F32", [1], 0, 4)}).encode()
    for length in (1 << 40, 1 << 63, 8 + len(header) + 4 - 7):
        path = bare(q, header, b"\0\0\x80\x3f", length)
        r = q.verify(path, code=1, measure=True)
        r.one("header-length", says=[length])
        need(r.peak < 64 * MIB, f"peak memory {r.peak}")


def b14(q):
    """Large but honest headers."""
    n = 300000
    head = {f"model.layers.{i // 1000}.some.module.name.of.ordinary.length.{i}.weight": entry("U8", [1], i, i + 1)
            for i in range(n)}
    path = bare(q, head, b"\x01" * n)
    need(path.stat().st_size > 25 * MIB, "the header is too small for the case")
    r = q.run("inspect", path, json=True, measure=True, timeout=10)
    same("tensors", r.doc["tensors"]["count"], n)
    need(r.peak < 1 << 30, f"peak memory {r.peak}")
    small = json.dumps({"w": entry("F32", [1], 0, 4)}).encode()
    path = bare(q, small + b" " * (100000001 - len(small)), b"\0\0\x80\x3f")
    r = q.verify(path, code=1)
    r.one("header-too-large", says=["100000000", "100000001", "--"])
    path.unlink()
    path = bare(q, small + b" " * (100000000 - len(small)), b"\0\0\x80\x3f")
    q.verify(path).clean()


def b15(q):
    """Same tensor twice in one header."""
    for second in ('"a.weight"', '"\\u0061.weight"'):
        text = ('{"a.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                + second + ':{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}')
        r = q.verify(bare(q, text, b"\0" * 8), code=1)
        r.one("duplicate-tensor", says=["a.weight"])


def b16(q):
    """Two tensors share bytes."""
    for second, span in (((0, 16), ("0", "16")), ((8, 24), ("8", "16"))):
        r = q.verify(bare(q, {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], *second)}, b"\0" * second[1]),
                     code=1)
        r.one("overlap", says=["a", "b", *span])


def b17(q):
    """Unclaimed bytes between tensors."""
    one = struct.pack("<4f", 1, 2, 3, 4)
    variants = (("hole", {"a": entry("F32", [1, 4], 0, 16), "b": entry("F32", [1, 4], 24, 40)},
                 one + b"\0" * 8 + one, ("16", "8")),
                ("hole", {"a": entry("F32", [1, 4], 8, 24)}, b"\0" * 8 + one, ("0", "8")),
                ("trailing-bytes", {"a": entry("F32", [1, 4], 0, 16)}, one + b"\0" * 4, ("4",)))
    for kind, header, data, numbers in variants:
        path = bare(q, header, data)
        r = q.verify(path, code=1)
        r.one(kind, says=numbers)
        r.only(kind, severities=("error",))
        q.inspect(path)
        same("values", q.values(path, 0, "--tensor", "a"), [1, 2, 3, 4])


def b18(q):
    """Header order is not file order."""
    header = '{"b":{"dtype":"F32","shape":[4],"data_offsets":[16,32]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    path = bare(q, header, struct.pack("<8f", *range(1, 9)))
    q.verify(path).clean()
    other = bare(q, {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 16, 32)}, struct.pack("<8f", *range(1, 9)))
    lines = [q.run("inspect", p, "--tensors").text.replace(p.name, "F") for p in (path, other)]
    pick = [[ln.split()[0] for ln in t.splitlines() if ln.split() and ln.split()[0] in ("a", "b")] for t in lines]
    same("order of the list", pick[0], pick[1])
    same("both listed", sorted(pick[0]), ["a", "b"])


def b19(q):
    """Begin after end, end past the data."""
    for offsets in ("[16,0]", "[0,9223372036854775808]", "[0]", "[0,4,8]", '["0","4"]'):
        text = '{"w":{"dtype":"F32","shape":[1],"data_offsets":' + offsets + "}}"
        r = q.verify(bare(q, text, b"\0" * 4), code=1)
        value = offsets.strip("[]").split(",")[0].strip('"')
        r.one("bad-offsets", says=["w", "9223372036854775808" if "922" in offsets else value])


def b20(q):
    """Shape does not fit the byte range."""
    for shape, size, wanted in (([1000, 1000], 4, 4000000), ([1], 8, 4)):
        path = bare(q, {"w": entry("F32", shape, 0, size)}, b"\0" * size)
        r = q.verify(path, code=1)
        r.one("size-mismatch", says=["w", wanted, size])
        q.fails("decode-rows", path, "--tensor", "w", "--rows", "0")


def b21(q):
    """Dimensions that are not counts."""
    for shape in ("[-1]", "[1.5]", '["4"]', "[1e2]", "[true]", "{}"):
        text = '{"w":{"dtype":"F32","shape":' + shape + ',"data_offsets":[0,4]}}'
        r = q.verify(bare(q, text, b"\0" * 4), code=1)
        r.one("bad-shape", says=["w"] + ([] if shape == "{}" else [shape.strip('[]"').strip('"')]))


def b22(q):
    """Unknown dtype text."""
    path = bare(q, {"w": entry("F9_X", [4], 0, 16), "v": entry("F32", [1, 4], 16, 32)}, b"\0" * 16 + struct.pack("<4f", 1, 2, 3, 4))
    r = q.verify(path, code=1)
    r.one("unknown-dtype", says=["w", "F9_X"])
    r.only("unknown-dtype", severities=("error",))
    same("the other tensor", q.values(path, 0, "--tensor", "v"), [1, 2, 3, 4])
    r = q.verify(bare(q, {"w": entry("F9_X", [4], 0, 64)}, b"\0" * 16), code=1)
    r.one("unknown-dtype", says=["F9_X"])
    need(any(f["kind"] in ("bad-offsets", "truncated") for f in r.findings), f"the range is not checked:\n{r.seen()}")


def b23(q):
    """Power-of-two scale dtype."""
    t, want = {}, {}
    for dtype, size in t0.ITEM_BYTES.items():
        t["t_" + dtype] = Tensor(dtype, [16], bytes(range(1, 17)) * size if dtype not in ("BOOL",) else b"\1" * 16)
        if dtype in ("F16", "BF16", "F32", "F64", "C64"):
            t["t_" + dtype].data = b"\x11" * 16 * size
        want[dtype] = {"tensors": 1, "bytes": 16 * size}
    path = q.path("all.safetensors")
    t0.write_safetensors(path, t)
    q.verify(path).clean()
    r = q.inspect(path)
    r.clean()
    got = r.doc["tensors"]
    same("by dtype", {k: {x: v[x] for x in ("tensors", "bytes")} for k, v in got["by_dtype"].items()}, want)
    same("payload", got["payload_bytes"], 16 * sum(t0.ITEM_BYTES.values()))


def b24(q):
    """Scalars."""
    path = bare(q, {"s": entry("F32", [], 0, 4)}, struct.pack("<f", 0.25))
    q.verify(path).clean()
    same("tensors", q.inspect(path).doc["tensors"]["count"], 1)


def b25(q):
    """Tensors with a zero dimension."""
    path = bare(q, {"a": entry("F32", [4], 0, 16), "z": entry("F32", [0, 4], 16, 16)}, struct.pack("<4f", 1, 2, 3, 4))
    q.verify(path).clean()
    same("tensors", q.inspect(path).doc["tensors"]["count"], 2)
    q.run("inspect", path, "--tensors").says("z", where="out")


def b26(q):
    """Empty metadata block."""
    c = t0.t0()
    c.metadata = {}
    d = q.write(c)
    q.verify(d).clean()
    q.run("inspect", d, "-v").says("__metadata__", where="out")


def b27(q):
    """Metadata with a number in it."""
    one = entry("F32", [1], 0, 4)
    for meta, key in (({"n": 0, "ok": "x"}, "n"), (one, "shape")):
        path = bare(q, {"__metadata__": meta, "w": one}, struct.pack("<f", 1))
        r = q.verify(path, code=1)
        r.some("metadata-type", says=[key])
        r.only("metadata-type", severities=("error",))
        same("tensors", q.inspect(path).doc["tensors"]["count"], 1)


def b28(q):
    """A file with metadata and no tensors."""
    path = bare(q, {"__metadata__": {"k": "v"}})
    q.verify(path).clean()
    same("tensors", q.inspect(path).doc["tensors"]["count"], 0)


def b29(q):
    """Header of odd length, data unaligned."""
    c = t0.t0()
    base = q.rows(q.write(c), "--rows", "0-59")
    tokens = None
    for k in range(1, 8):
        c = t0.t0()
        c.pad = 0
        plan = dict(c.split(2))
        d = q.path()
        c.write(d, shards=plan)
        for f, names in plan.items():       # pad each header to 8j + k
            text, _ = t0.header_bytes({n: c.tensors[n] for n in names}, c.metadata, 0)
            t0.write_safetensors(d / f, {n: c.tensors[n] for n in names}, c.metadata, (k - len(text)) % 8)
            same("header length", struct.unpack("<Q", (d / f).read_bytes()[:8])[0] % 8, k)
        q.verify(d).clean()
        same("rows", q.rows(d, "--rows", "0-59"), base)
        if k in (1, 7):
            got = q.generate(d, "--tokens", "5,7", "-n", "4", "--greedy", "--ignore-eos").doc["tokens"]
            tokens = tokens or got
            same("tokens", got, tokens)


def b30(q):
    """Offsets beyond 4 GiB."""
    path = q.path("big.safetensors")
    t0.write_safetensors(path, {"zeros": Tensor("U8", [5368709120]),
                                "late": Tensor("F32", [1, 2], struct.pack("<2f", 0.25, 3.0))})
    same("late", q.values(path, 0, "--tensor", "late"), [0.25, 3.0])
    q.run("inspect", path, "--tensors").says("5368709120", "5368709128", where="out")
    q.verify(path).clean()


def b31(q):
    """Byte-order mark in JSON files."""
    def full():
        c = t0.t0_chain()
        quant = c.quant
        c.files["hf_quant_config.json"] = {"quantization": {
            "quant_algo": quant["quant_algo"], "exclude_modules": quant["ignore"],
            "quantized_layers": quant["quantized_layers"]}}
        c.files["generation_config.json"] = {"eos_token_id": [2], "do_sample": False}
        c.files["tokenizer.json"] = t0.tokenizer()
        c.files["tokenizer_config.json"] = {"eos_token": "<|end|>"}
        return q.write(c)

    def mark(path):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    d = full()
    mark(d / "config.json")
    q.fails("verify", d, kind="json-bom", says="config.json")
    q.fails("decode-rows", d, "--rows", "0", kind="json-bom")
    q.fails("repack", d, "-o", q.path(), "--table-shards", "2", kind="json-bom")
    q.fails("run", d, "--tokens", "5", "-n", "1", kind="json-bom")
    same("files", len(q.inspect(d).doc["files"]), 2)
    for name in ("model.safetensors.index.json", "hf_quant_config.json"):
        d = full()
        mark(d / name)
        r = q.verify(d, code=1)
        r.one("json-bom", says=name)
        q.fails("decode-rows", d, "--rows", "0", kind="json-bom")
        q.fails("repack", d, "-o", q.path(), "--table-shards", "2", kind="json-bom")
        q.fails("run", d, "--tokens", "5", "-n", "1", kind="json-bom")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        d = full()
        mark(d / name)
        args = ["-p", "F"] if "tokenizer" in name else ["--tokens", "5"]
        q.fails("run", d, *args, "-n", "1", kind="json-bom", says=name)
    d = full()
    path = d / "model-00001-of-00002.safetensors"
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    path.write_bytes(struct.pack("<Q", n + 3) + b"\xef\xbb\xbf" + raw[8:])
    q.verify(d, code=1).one("header-json", says=path.name)
    d = full()
    for path in d.glob("*.json"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    q.verify(d).clean()
    q.generate(d, "-p", "F", "--raw", "--greedy", "-n", "2")


def b32(q):
    """Infinity and NaN words in config files."""
    c = t0.t0()
    c.text["time_step_limit"] = [0.0, float("inf")]
    c.files["generation_config.json"] = '{"eos_token_id": [2], "some_limit": -Infinity}'
    d = q.write(c)
    r = q.verify(d)
    same("counts", [r.doc["counts"][k] for k in ("error", "warning")], [0, 0])
    need(r.doc["counts"]["note"] >= 1, "no note")
    need(any("time_step_limit" in str(f) and "line" in f["text"] for f in r.findings), r.seen())
    q.generate(d, "--tokens", "5", "-n", "1")
    c = t0.t0()
    c.text["hidden_size"] = float("nan")
    q.fails("verify", q.write(c), kind="config-type", says=["hidden_size"])


def b33(q):
    """Deep nesting."""
    c = t0.t0()
    c.config = b"[" * 1000000
    d = q.write(c)
    q.fails("verify", d, kind="json-too-deep")
    q.inspect(d)
    text = '{"w":' * 100000 + "1" + "}" * 100000
    q.verify(bare(q, text), code=1).one("json-too-deep")
    c = t0.t0()
    nested = []
    for _ in range(60):
        nested = [nested]
    c.text["unknown_key"] = nested
    q.verify(q.write(c)).clean()


def b34(q):
    """Text that is not UTF-8."""
    text = b'{"a\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    r = q.verify(bare(q, text, b"\0\0\x80\x3f"), code=1)
    f = r.one("header-utf8")
    need("3" in f["text"] or f["offset"] in (3, 11), f"the position is not told: {f}")
    text = '{"a\\u0000\\u001b[31m":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path = bare(q, text, b"\0\0\x80\x3f")
    q.verify(path).clean()
    for args in (["--tensors"], ["-v"], []):
        r = q.run("inspect", path, *args)
        need("\x1b" not in r.text + r.err and "\0" not in r.text + r.err, "raw control bytes")
    q.run("inspect", path, "--tensors").says("\\", where="out")


def b35(q):
    """Shard names that leave the directory."""
    outside = q.path("other")
    outside.mkdir()
    c = t0.t0()
    t0.write_safetensors(outside / "x.safetensors", {"lm_head.weight": c.tensors["lm_head.weight"]})
    for name in ("../other/x.safetensors", str(outside / "x.safetensors"), "a/../../other/x.safetensors"):
        plan = dict(c.split(2))
        weight_map = {n: f for f, names in plan.items() for n in names}
        weight_map["lm_head.weight"] = name
        d = q.path()
        c.write(d, shards=plan, index=weight_map)
        r = q.verify(d, code=1)
        r.one("unsafe-path", says=[name])
        q.fails("run", d, "--tokens", "5", "-n", "1", kind="unsafe-path")
        for f in q.inspect(d).doc["files"]:
            need("other" not in f["name"] or not f["tensors"] and not f["bytes"], f"the file was opened: {f}")


def b36(q):
    """Empty and tiny files."""
    for data, kind in ((b"", "file-too-short"), (b"\0" * 7, "file-too-short"), (b"\0" * 8, "header-length"),
                       (struct.pack("<Q", 1) + b"x", "header-json")):
        path = q.path(f"tiny{len(data)}.safetensors")
        path.write_bytes(data)
        r = q.verify(path, code=1)
        r.one(kind, says=[len(data)] if kind == "file-too-short" else [])
        r.only(kind, severities=("error",))


def b37(q):
    """Trailing spaces in the header are padding."""
    base = q.rows(q.write(t0.t0()), "--rows", "0-59")
    for pad in (0, 1, 7, 4000):
        c = t0.t0()
        c.pad = pad
        d = q.write(c)
        q.verify(d).clean()
        same("rows", q.rows(d, "--rows", "0-59"), base)


def b38(q):
    """File names are free."""
    c = t0.t0()
    table = [n for n in c.tensors if n.startswith(NG)]
    rest = [n for n in c.tensors if not n.startswith(NG)]
    want = q.inspect(q.write(c)).doc
    for plan in ({"model-plefp8-00001.safetensors": table, "weights.safetensors": rest},
                 {"everything.safetensors": list(c.tensors)}):
        for index in (True, False):
            d = q.write(c, shards=plan, index=index)
            q.verify(d).clean()
            doc = q.inspect(d).doc
            for key in ("components", "quantization", "ple"):
                same(key, doc[key], want[key])
            for f in plan:
                q.verify(d / f).clean()


def b39(q):
    """Duplicate keys in config files."""
    m = L + "layers.0.mlp.experts"
    good = '"%s": {"quant_algo": "NVFP4", "group_size": 16}' % m
    text = json.dumps(t0.t0_config())
    need(good in text, "the map's text is not as expected")
    for second, code in ((good.replace("NVFP4", "FP8"), 1), (good, 0)):
        c = t0.t0()
        c.config = text.replace(good, good + ", " + second)
        r = q.verify(q.write(c), code=code)
        r.one("json-duplicate-key", "error" if code else "note", says=[m])
    c = t0.t0()
    text = json.dumps({"weight_map": {n: f for f, names in c.split(2) for n in names}})
    one = '"lm_head.weight": "model-00001-of-00002.safetensors"'
    need(one in text, "the index's text is not as expected")
    for second, code in ((one.replace("00001-of", "00002-of"), 1), (one, 0)):
        d = q.write(c, index=False)
        (d / "model.safetensors.index.json").write_text(text.replace(one, one + ", " + second))
        r = q.verify(d, code=code)
        r.one("json-duplicate-key", "error" if code else "note", says=["lm_head.weight"])
