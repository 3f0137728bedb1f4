"""E. Behaviour of the program."""
import hashlib
import json
import os
import re
import shutil
import struct

import numpy as np

import big
import t0
from harness import need, same
from t0 import L, bf16

MIB = 1 << 20
COMMANDS = ("inspect", "verify", "decode-rows", "repack", "run", "bench")


def e01(q):
    """JSON means only JSON on standard output."""
    c = t0.t0()
    d = q.write(c)
    lines = q.path("batch.jsonl")
    lines.write_text('{"id": "a", "tokens": [5, 7], "max_tokens": 3}\n{"id": "b", "tokens": [9], "max_tokens": 2}\n')
    jobs = (("inspect", [d]), ("verify", [d]), ("decode-rows", [d, "--rows", "0-3"]),
            ("repack", [d, "-o", "OUT", "--table-shards", "2"]),
            ("run", [d, "--tokens", "5,7", "-n", "3", "--ignore-eos", "--device", "cpu"]),
            ("run", [d, "--batch", lines, "--ignore-eos", "--device", "cpu"]))
    for command, args in jobs:
        for quiet in ([], ["-q"]):
            out = q.path()
            r = q.run(command, *[out if a == "OUT" else a for a in args], *quiet, json=True)
            need(r.docs and r.out.endswith(b"\n"), f"{command}: no document")
            if quiet:
                same(f"{command} -q: standard error", r.err, "")
    same("batch", sorted(x["id"] for x in q.run("run", d, "--batch", lines, "--device", "cpu", json=True).docs),
         ["a", "b"])
    r = q.run("bench", d, "-n", "4", "--repeat", "1", json=True, code=(0, 4))
    if r.code == 4:
        q.part_skipped("bench: no device here")


def e02(q):
    """Totals per format."""
    d = q.write(t0.t0())
    doc = q.inspect(d).doc
    t = doc["tensors"]
    same("totals", [t["count"], t["payload_bytes"]], [244, 633870])
    same("by dtype", {k: (v["tensors"], v["bytes"]) for k, v in t["by_dtype"].items()},
         {"BF16": (135, 591734), "U8": (24, 24576), "F8_E4M3": (34, 17280), "F32": (48, 192), "I64": (3, 88)})
    same("components", [sum(c[k] for c in doc["components"]) for k in ("tensors", "bytes")], [244, 633870])
    same("files", sum(f["tensors"] for f in doc["files"]), 244)
    for f in doc["files"]:
        path = d / f["name"]
        same(f["name"], [f["bytes"], f["header_bytes"]],
             [path.stat().st_size, struct.unpack("<Q", path.read_bytes()[:8])[0]])
    q.run("inspect", d).says("244", where="out")
    need(re.search(r"633[ ,.']?870", q.run("inspect", d).text), "the total bytes are not printed")
    need("param" in q.run("inspect", d).text.lower(), "parameters are not printed")


def e03(q):
    """Metadata is shown."""
    c = t0.t0()
    c.metadata = {"format": "pt", "epoch": "240", "odd": "a\u001b[31mb\n"}
    r = q.run("inspect", q.write(c), "-v")
    r.says("format", "pt", "epoch", "240", "odd", where="out")
    need("\x1b" not in r.text, "metadata is not escaped")


def e04(q):
    """Headers are enough."""
    d = q.write(t0.t0())
    headers = 0
    for path in d.glob("*.safetensors"):
        n = struct.unpack("<Q", path.read_bytes()[:8])[0]
        os.truncate(path, 8 + n)
        headers += n
    r = q.inspect(d)
    r.some("data-absent", "note")
    same("tensors", r.doc["tensors"]["count"], 244)
    q.verify(d, code=1).some("truncated")
    whole = q.write(t0.t0())
    with open(whole / "model-00001-of-00002.safetensors", "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    r = q.run("inspect", whole, json=True, measure=True)
    others = sum(p.stat().st_size for p in whole.glob("*.json"))
    need(r.rchar <= headers + others + 2 * 65536 + 65536, f"{r.rchar} bytes read, headers are {headers}")


def e05(q):
    """Check all, then report."""
    c = t0.t0()
    gone = L + "layers.0.mlp.experts.0.up_proj.weight_scale_2"
    del c.tensors[gone]
    name = L + "layers.3.self_attn.q_proj.weight"
    c.tensors[name] = bf16([32, 64], np.random.default_rng(0).normal(0, 0.1, [32, 64]))
    d = q.write(c)
    path = d / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    r = q.verify(d, code=1)
    same("errors", r.doc["counts"]["error"], 3)
    for kind in ("missing-scale", "shape", "truncated"):
        r.one(kind)
    order = [f["severity"] for f in r.findings]
    same("errors first", order, sorted(order, key=["error", "warning", "note"].index))


def e06(q):
    """Thousands of names do not help."""
    config = t0.t0_config()
    config["text_config"]["num_experts"] = 512
    c = t0.build(config)
    for n in [n for n in c.match("layers.2.mlp.experts.") if n.endswith(".input_scale")]:
        del c.tensors[n]
    d = q.write(c)
    r = q.verify(d, code=1)
    f = r.one("missing-scale", count=1536)
    need(1 <= len(f["examples"]) <= 20, f"examples: {len(f['examples'])}")
    text = q.run("verify", d, code=1)
    lines = [ln for ln in (text.text + text.err).splitlines() if "input_scale" in ln]
    need(1 <= len(lines) <= 20, f"{len(lines)} lines about input_scale")
    need(re.search(r"and [\d,]+ more", text.text + text.err), f"no '... and N more':\n{text.text}")


def e07(q):
    """Explain a missing tensor."""
    name = L + "hyper_connection_mixer.hc_norm.weight"
    for way in (1, 2, 3):
        c = t0.t0()
        plan = dict(c.split(3))
        home = next(f for f, names in plan.items() if name in names)
        weight_map = {n: f for f, names in plan.items() for n in names}
        count = len(plan[home])
        if way == 2:
            plan[home] = [n for n in plan[home] if n != name]
            count -= 1
        if way == 3:
            del weight_map[name]
        d = q.path()
        c.write(d, shards=plan, index=weight_map)
        if way == 1:
            (d / home).unlink()
        r = q.verify(d, code=1)
        whole = json.dumps(r.findings)
        need(home in whole, f"({way}) the file is not named:\n{r.seen()}")
        if way == 1:
            r.one("shard-missing", says=[home, count])
        elif way == 2:
            f = r.one("index-tensor-absent", says=[name, home])
            need(str(count) in f["text"], f"({way}) the number of tensors in the file is not told: {f['text']}")
        else:
            hits = [f for f in r.findings if f["severity"] == "error"]
            need(any(name in str(f) and "unindexed" in str(f) and home in str(f) for f in hits),
                 f"({way}) it is not said that an unindexed copy exists:\n{r.seen()}")
        q.fails("run", d, "--tokens", "5", "-n", "1", "--device", "cpu")


def e08(q):
    """Checksums."""
    d = q.write(t0.t0(), shards=3)
    files = sorted(p.name for p in d.glob("*.safetensors"))
    sums = {f: hashlib.sha256((d / f).read_bytes()).hexdigest() for f in files}
    listed = q.path("sums.txt")
    listed.write_text(f"{sums[files[0]].upper()} *{files[0]}\n{sums[files[1]]}  {files[1]}\n")
    whole = q.path("whole.xxh")
    q.run("verify", d, "--write-manifest", whole)
    q.verify(d, "--manifest", whole).only(severities=("error", "warning"))
    path = d / files[1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    r = q.verify(d, "--manifest", listed, code=1)
    f = r.one("checksum", says=[files[1], sums[files[1]], hashlib.sha256(raw).hexdigest()])
    same("expected, found", [f["expected"], f["found"]], [sums[files[1]], hashlib.sha256(raw).hexdigest()])
    r.one("checksum-missing", "note", says=files[2])
    need(files[0] not in json.dumps([x for x in r.findings if x["kind"].startswith("checksum")]),
         "a good file is repeated")
    r = q.verify(d, "--manifest", whole, code=1)
    hits = r.some("checksum", says=files[1])
    need(any(h["tensor"] for h in hits) or any("." in str(h["examples"]) for h in hits), f"no tensor named:\n{r.seen()}")
    r = q.run("verify", d, "--manifest", listed, "--progress", "always", code=1)
    need("B" in r.err, f"no progress: {r.err}")


def e09(q):
    """How much memory will it take."""
    d = q.write(t0.t0())
    fit = q.inspect(d, "--fit", "128GiB", "--ctx", "128").doc["fit"]
    same("fits", [fit["fits"], fit["device_bytes"]], [True, 128 << 30])
    names = " ".join(p["name"].lower() for p in fit["parts"])
    for word in ("ple", "kv"):
        need(word in names, f"no part {word}: {names}")
    for layout, table, scale in (("mixed", 51200245760, 2), ("nvfp4-ple", 28800138240, 4), ("bf16", 102400491520, 0)):
        d = q.path()
        big.make(layout, d)
        r = q.run("inspect", d, "--fit", "128GiB", "--ctx", "32768", json=True, measure=True)
        same(f"{layout}: table bytes", r.doc["ple"]["bytes"] - scale, table)
        fit = r.doc["fit"]
        need(any(table <= p["bytes"] <= table + 4096 for p in fit["parts"]), f"{layout}: no part of {table} bytes")
        need(any("weights" in p["name"] or "expert" in p["name"] for p in fit["parts"]), f"parts: {fit['parts']}")
        same(f"{layout}: fits", fit["fits"], fit["needed_bytes"] <= fit["device_bytes"])
        shutil.rmtree(d)


def e10(q):
    """Progress for people and for machines."""
    d = q.write(t0.t0())
    r = q.run("verify", d, "--level", "full")
    need("\x1b" not in r.err and "\r" not in r.err and len(r.err.splitlines()) <= 20, f"noise: {r.err!r}")
    r = q.run("verify", d, "--level", "full", "--progress", "always")
    need("\x1b" not in r.err and len(r.err.splitlines()) <= 100, f"noise: {r.err!r}")
    need(r.err.strip(), "--progress always prints nothing")


def e11(q):
    """Outputs appear whole."""
    d = q.write(t0.t0())

    def sums():
        return {p.name: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in d.iterdir()}

    before = sums()
    out = q.path("fresh")
    q.run("repack", d, "-o", out, "--table-shards", "2")
    same("source", sums(), before)
    first = {p.name: p.read_bytes() for p in out.iterdir()}
    need(not [p for p in q.dir.iterdir() if p.name.endswith(".part")], "a .part is left")
    q.run("repack", d, "-o", out, "--table-shards", "3", code=2).says("--force", where="err")
    same("refused: the destination", {p.name: p.read_bytes() for p in out.iterdir()}, first)
    q.run("repack", d, "-o", out, "--table-shards", "3", "--force")
    same("shards", q.inspect(out).doc["ple"]["shards"], 3)
    same("source", sums(), before)
    need(not [p for p in q.dir.iterdir() if p.name.endswith(".part")], "a .part is left")


def e12(q):
    """Usage errors."""
    d = q.write(t0.t0())
    wrong = {"inspect": [[], ["--nonsense"], [d, "--fit"], [d, d]],
             "verify": [[], [d, "--nonsense"], [d, "--level"], [d, d], [d, "--level", "deep"]],
             "decode-rows": [[], [d, "--nonsense"], [d, "--rows"], [d, d, "--rows", "1"]],
             "repack": [[], [d, "--nonsense"], [d, "-o"], [d, d, "-o", "x"], [d]],
             "run": [[], [d, "--nonsense"], [d, "--tokens"], [d, d], [d, "-p", "x", "--tokens", "5"]],
             "bench": [["--nonsense"], ["--layout"], [d, d]]}
    for command, lines in wrong.items():
        for args in lines:
            for json_too in (False, True):
                r = q.run(command, *args, code=2, json=json_too)
                same("lines of the message", len([x for x in r.err.splitlines() if x.strip()]), 1)
                if args and str(args[-1]).startswith("--"):
                    need(args[-1] in r.err, f"{args[-1]} is not named: {r.err}")
        r = q.run(command, "--help")
        need(r.out and not r.err, f"{command} --help")
        q.run(command, "-h")
        q.run(command, "--version")
        if command != "bench":
            args = {"decode-rows": ["--rows", "0"], "repack": ["-o", "x"], "run": ["--tokens", "5"]}.get(command, [])
            gone = q.path("no-such")
            r = q.fails(command, gone, *args, says=["no-such"])
            need(r.err, "no message on standard error")
    r = q.run("qx", "nonsense", code=2)
    same("lines of the message", len(r.err.splitlines()), 1)
    need("nonsense" in r.err, r.err)
    q.run("qx", "verfy", d, code=2).says("verify", where="err")
    same("through qx", q.run("qx", "inspect", d, "--json").out, q.run("inspect", d, json=True).out)
    for command in COMMANDS:
        need(command in q.run("qx", "help").text, f"qx help does not list {command}")


def e13(q):
    """Same input, same output."""
    d = q.dir / "same"
    outs = []
    for order in (False, True):
        c = t0.t0()
        c.write(d, shards=4, reverse=order)
        (d / "zz.txt").write_text("x") if order else None
        (d / "zz.txt").unlink(missing_ok=True)
        outs.append([q.run(*args).out for args in
                     (("inspect", d), ("inspect", d, "--json"), ("inspect", d, "--tensors"), ("verify", d),
                      ("verify", d, "--json"), ("verify", d, "--level", "full", "--json"),
                      ("decode-rows", d, "--rows", "0-59"))])
        shutil.rmtree(d)
    for i, (a, b) in enumerate(zip(*outs)):
        need(a == b, f"output {i} differs between runs:\n{a[:400]!r}\n{b[:400]!r}")
    need(not re.search(rb"\b20\d\d-\d\d-\d\d", outs[0][4]), "a date in the report")
