"""C. The n-gram (PLE) table."""
import json
import re
import zlib

import numpy as np

import big
import t0
from harness import need, same
from t0 import L, NG, PLE, Tensor, bf16, f32, i64

MIB = 1 << 20
BUF = PLE + "ple_embedding."
PUBLISHED = [20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077, 20000081, 20000093,
             20000107, 20000147, 20000153, 20000159, 20000161, 20000171]


def rows_of(records, heads=4):
    """decode-rows --tokens: the rows of every position, in head order."""
    out = []
    for i, r in enumerate(records):
        same("position, head", [r["position"], r["head"]], [i // heads, i % heads])
        if i % heads == 0:
            out.append([])
        out[-1].append(r["row"])
    return out


def lone_config(q, config=None):
    d = q.path()
    d.mkdir()
    t0.write_json(d / "config.json", config or big.config("bf16"))
    return d


def c01(q):
    """Hash seed that is not in the config."""
    c = t0.t0()
    need("seed" not in c.text, "T0 has a seed")
    same("T0", q.inspect(q.write(c)).doc["ple"]["multipliers"],
         [256496738022509279, 251627398771002343, 55314113489879221])
    same("published", q.inspect(lone_config(q)).doc["ple"]["multipliers"],
         [23703573157769, 20109073645365, 8052911324071])


def c02(q):
    """Stored constants differ from the computed ones."""
    c = t0.t0()
    m = t0.hash_multipliers(32, 3)
    c.tensors[BUF + "layer_multipliers"] = i64([3], [m[0], m[1] + 2, m[2]])
    d = q.write(c)
    r = q.verify(d, code=1)
    f = r.one("hash-constants-mismatch", says=["layer_multipliers", m[1] + 2, m[1], "1"])
    need(re.search(r"(used?|looked up)\b.*stored|stored.*\bused?\b", f["text"]), f"the text does not say which values are used: {f['text']}")
    r.only("hash-constants-mismatch", severities=("error",))
    got = rows_of(q.rows(d, "--tokens", "5,7"))
    sizes, offsets = [11, 13, 17, 19], [0, 11, 24, 41]
    b = (7 * m[0]) ^ (5 * (m[1] + 2))
    want = [b % sizes[h] + offsets[h] if h < 2 else (b ^ (2 * m[2])) % sizes[h] + offsets[h] for h in range(4)]
    same("rows by the stored values", got[1], want)
    c = t0.t0()
    c.tensors[BUF + "ngram_heads_offsets"] = i64([4], [0, 11, 25, 41])
    r = q.verify(q.write(c), code=1)
    r.one("hash-constants-mismatch", says=["ngram_heads_offsets", "25", "24", "2"])
    c = t0.t0()
    for name, values in (("layer_multipliers", [1, 2, 3]), ("ngram_heads_offsets", offsets),
                         ("ngram_heads_vocab_sizes", sizes)):
        c.tensors[BUF + name] = Tensor("I32", [len(values)], np.array(values, "<i4"))
    r = q.verify(q.write(c), code=1)
    r.some("dtype", says=["I64", "I32"])
    c = t0.t0()
    for name in ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"):
        del c.tensors[BUF + name]
    d = q.write(c)
    r = q.verify(d)
    same("counts", [r.doc["counts"][k] for k in ("error", "warning")], [0, 0])
    need(r.doc["counts"]["note"] >= 1, "no note about the missing constants")
    same("rows", rows_of(q.rows(d, "--tokens", "5,7,9"))[0], [8, 17, 37, 48])


def c03(q):
    """Table geometry from consecutive primes."""
    ple = q.inspect(lone_config(q)).doc["ple"]
    same("head sizes", ple["head_sizes"], PUBLISHED)
    same("rows", [sum(ple["head_sizes"]), ple["rows"], ple["row_width"]], [320001446, 320001536, 160])
    d = q.write(t0.t0())
    ple = q.inspect(d).doc["ple"]
    same("T0", [ple["head_sizes"], ple["rows"], ple["shards"], ple["layer_index"]], [[11, 13, 17, 19], 60, 4, 1])
    q.run("inspect", d).says("60", "11", "19", where="out")
    c = t0.t0()
    c.tensors[NG + "shard_1.weight"] = Tensor("F8_E4M3", [14, 32], b"\x38" * 14 * 32)
    r = q.verify(q.write(c), code=1)
    need(any(f["severity"] == "error" and "shard_1" in str(f) for f in r.findings), r.seen())


def c04(q):
    """Not a rolling polynomial hash."""
    d = q.write(t0.t0())
    same("rows", rows_of(q.rows(d, "--tokens", "5,7,9")), [[8, 17, 37, 48], [10, 17, 37, 47], [5, 18, 28, 54]])


def c05(q):
    """End-of-sequence cuts the history."""
    got = rows_of(q.rows(q.write(t0.t0()), "--tokens", "5,7,2,9,4"))
    same("9 and 4", got[3:], [[2, 11, 37, 59], [3, 12, 25, 43]])


def c06(q):
    """Chunking does not change ids."""
    d = q.write(t0.t0())
    ids = [5, 7, 2, 9, 4, 5, 7]
    whole = rows_of(q.rows(d, "--tokens", ",".join(map(str, ids))))
    seen = {}
    for cuts in range(64):
        edges = [0] + [i + 1 for i in range(6) if cuts >> i & 1] + [7]
        got = []
        for a, b in zip(edges, edges[1:]):
            if (a, b) not in seen:
                history = ["--history", ",".join(map(str, ids[:a]))] if a else []
                seen[a, b] = rows_of(q.rows(d, "--tokens", ",".join(map(str, ids[a:b])), *history))
            got += seen[a, b]
        same(f"cuts at {edges}", got, whole)


def c07(q):
    """Placeholder and foreign token ids."""
    d = q.write(t0.t0())
    for value in ("-1", "32", "4294967295", "18446744073709551615"):
        r = q.run("decode-rows", d, f"--tokens=5,{value}", code=2)
        r.silent().says("token-out-of-range", value, "1", where="err")
    for value in ("1e3", ""):
        q.run("decode-rows", d, f"--tokens={value}", code=2).silent().says("usage", where="err")


def c08(q):
    """Head ranges must stay inside the table."""
    c = t0.t0()
    c.tensors[BUF + "ngram_heads_offsets"] = i64([4], [0, 11, 24, 52])
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("ple-range", says=["3", "52", "19", "60"])
    r.only("ple-range", "hash-constants-mismatch", severities=("error",))
    q.fails("decode-rows", d, "--tokens", "5,7", kind="ple-range")


def c09(q):
    """Shard order is numeric."""
    config = t0.t0_config()
    config["text_config"]["split_ngram_parts"] = 12
    c = t0.build(config)
    c.tensors[NG + "weight_scale"] = bf16([1], 1.0)
    for s in range(12):
        c.tensors[f"{NG}shard_{s}.weight"].data = bytes([0x30 + s]) * 160
    names = sorted(c.tensors, key=lambda n: zlib.crc32(n.encode()))
    c.tensors = {n: c.tensors[n] for n in names}
    d = q.write(c)
    q.verify(d).clean()
    for row, shard, local, value in ((12, 2, 2, 0.625), (50, 10, 0, 1.25)):
        r = q.rows(d, "--rows", str(row))[0]
        same(f"row {row}", [r["shard"], r["local_row"], r["values"]], [shard, local, [value] * 32])


def c10(q):
    """Foreign shard naming."""
    c = t0.t0()
    for s in range(4):
        c.rename(f"{NG}shard_{s}.weight",
                 f"language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shards.{s}.weight")
    d = q.write(c)
    r = q.verify(d, code=1)
    r.one("foreign-layout", count=4, says=["shards."])
    need(sum("shards." in str(f) for f in r.findings) == 1, f"the names are reported twice:\n{r.seen()}")
    q.fails("decode-rows", d, "--rows", "0")
    q.fails("run", d, "--tokens", "5", "-n", "1")


def c11(q):
    """Missing table shards."""
    c = t0.t0()
    del c.tensors[NG + "shard_2.weight"]
    d = q.write(c)
    r = q.verify(d, code=1)
    f = r.one("ple-shard-missing", says="2")
    r.only("ple-shard-missing", severities=("error",))
    need("2" in f["text"], f["text"])
    codes = c.tensors[NG + "shard_1.weight"].array()[14]
    same("row 29", q.values(d, 29), [float(v) for v in t0.E4M3[codes] * 0.25])
    q.fails("decode-rows", d, "--rows", "30", kind="ple-shard-missing")
    c = t0.t0()
    c.drop(NG + "shard_")
    r = q.verify(q.write(c), code=1)
    r.one("ple-shard-missing", says="0-3")


def c12(q):
    """split_ngram_parts absent."""
    c = t0.t0()
    del c.text["split_ngram_parts"]
    d = q.write(c)
    r = q.verify(d)
    same("counts", r.doc["counts"], {"error": 0, "warning": 0, "note": 1})
    same("shards", q.inspect(d).doc["ple"]["shards"], 4)
    same("rows", len(q.rows(d, "--rows", "0-59")), 60)
    c = t0.t0()
    c.text["split_ngram_parts"] = 5
    r = q.verify(q.write(c), code=1)
    r.one("ple-split-mismatch", says=["5", "4"])


def c13(q):
    """Row width is per head."""
    d = q.write(t0.t0())
    same("width", q.inspect(d).doc["ple"]["row_width"], 32)
    q.run("inspect", d).says("32", "128", where="out")
    q.run("inspect", lone_config(q)).says("160", "2560", where="out")
    c = t0.t0()
    c.text["ple_embed_dim"] = 130
    q.fails("verify", q.write(c), kind="config-value", says=["ple_embed_dim", "130"])


def c14(q):
    """PLE layer ids count from one."""
    q.verify(q.write(t0.t0())).clean()
    for ids in ([0], [5], [2, 2]):
        c = t0.t0()
        c.text["ple_layer_ids"] = ids
        q.fails("verify", q.write(c), kind="config-value", says=["ple_layer_ids"])


def c15(q):
    """Bookkeeping tensors beside the table."""
    c = t0.t0()
    c.tensors[BUF + "hashstats_hits"] = i64([4], [1, 2, 3, 4])
    c.tensors[BUF + "token_lookup"] = Tensor("I32", [32], np.arange(32, dtype="<i4"))
    r = q.verify(q.write(c))
    hits = r.some("ple-extra", "note", says=["hashstats_hits"])
    same("count", sum(f["count"] for f in hits), 2)
    r.only("ple-extra")


def c16(q):
    """FP8 codes decode exactly."""
    c = t0.t0()
    rows = c.tensors[NG + "shard_0.weight"].array().copy()
    rows[0, :7] = [0x38, 0x7E, 0x01, 0xB8, 0x80, 0x7F, 0xFF]
    c.tensors[NG + "shard_0.weight"].set(rows)
    d = q.write(c)
    r = q.run("decode-rows", d, "--rows", "0", json=True)
    v = r.docs[0]["values"]
    same("row 0", v[:5], [0.25, 112, 0.00048828125, -0.25, 0])
    need(re.search(r"-0\.25, ?-0(\.0)?, ?\"NaN\"", r.text), f"code 80 is not -0: {r.text[:200]}")
    same("NaN codes", v[5:7], ["NaN", "NaN"])
    q.run("decode-rows", d, "--rows", "0").says("NaN", where="out")
    out = q.path("row.npy")
    q.run("decode-rows", d, "--rows", "0", "--format", "npy", "-o", out)
    a = np.load(out)
    same("npy", [a.shape, str(a.dtype), int(np.isnan(a).sum())], [(1, 32), "float32", 2])
    c = t0.t0()
    c.tensors[NG + "shard_1.weight"].set(np.resize(np.arange(256, dtype=np.uint8), [15, 32]))
    d = q.write(c)
    want = np.float32(t0.E4M3 * 0.25)
    devices = ["cpu"] + (["cuda"] if q.has_gpu() else [])
    if len(devices) == 1:
        q.part_skipped("no GPU: --device cuda not compared")
    for device in devices:
        out = q.path(f"all-{device}.npy")
        q.run("decode-rows", d, "--rows", "15-22", "--format", "npy", "-o", out, "--device", device)
        a = np.load(out).reshape(-1)
        need(np.array_equal(np.isnan(a), np.isnan(want)), f"{device}: NaN codes differ")
        keep = ~np.isnan(want)
        need(np.array_equal(a[keep].view(np.uint32), want[keep].view(np.uint32)), f"{device}: codes differ")


def c17(q):
    """Scanning a table for NaN codes."""
    c = t0.t0()
    for s, row, col, code in ((2, 1, 5, 0x7F), (3, 14, 31, 0xFF), (0, 0, 0, 0x80), (0, 0, 1, 0x7E)):
        a = c.tensors[f"{NG}shard_{s}.weight"].array().copy()
        a[row, col] = code
        c.tensors[f"{NG}shard_{s}.weight"].set(a)
    r = q.verify(q.write(c), "--level", "full", code=1)
    f = r.one("payload-nan", count=2, says=["31", "5", "shard_2"])
    need(f["offset"] is not None, f"no offset: {f}")
    r.only("payload-nan", severities=("error",))
    c = t0.t0()
    for name, bits in (("lm_head.weight", 0x7FC0), (L + "layers.0.mlp.gate.weight", 0xFF80)):
        a = c.tensors[name].array().copy()
        a[1, 3] = bits
        c.tensors[name].set(a)
    r = q.verify(q.write(c), "--level", "full", code=1)
    hits = [f for f in r.findings if f["severity"] == "error"]
    need("lm_head.weight" in str(hits) and "mlp.gate.weight" in str(hits), r.seen())


def c18(q):
    """Packed rows: low nibble first."""
    c = t0.t0_nvfp4()
    w, s = NG + "shard_1.weight", NG + "shard_1.weight_scale"
    a, b = c.tensors[w].array().copy(), c.tensors[s].array().copy()
    a[2] = 0
    a[2, 0], a[2, 1], a[2, 8] = 0x21, 0xF8, 0x07
    b[2] = [0x40, 0x38]
    c.tensors[w].set(a)
    c.tensors[s].set(b)
    c.tensors[NG + "weight_scale_2"] = f32([1], 0.25)
    d = q.write(c)
    r = q.rows(d, "--rows", "17")[0]
    want = [0.25, 0.5, -0.0, -3.0] + [0.0] * 12 + [1.5] + [0.0] * 15
    same("row 17", r["values"], want)
    same("place", [r["shard"], r["local_row"]], [1, 2])


def sparse(q):
    d = q.path()
    t0.write_sparse_table(d)
    return d


def c19(q):
    """Rows far beyond 32 bits."""
    d = sparse(q)
    ids = [13421772, 13421773, 13421774, 26843545, 26843546, 26843547]
    for r in q.rows(d, "--rows", ",".join(map(str, ids))):
        same(f"row {r['row']}", r["values"], [0.25 if r["row"] in (13421773, 26843546) else 0.0] * 160)
    same("rows", q.inspect(d).doc["ple"]["rows"], 27000132)


def c20(q):
    """Row id out of range."""
    d = q.write(t0.t0())
    for ids, kind in (("0,60", "row-out-of-range"), ("-1", "row-out-of-range"), ("4294967296", "row-out-of-range"),
                      ("1.5", "usage"), ("abc", "usage")):
        for json_too in (False, True):
            r = q.run("decode-rows", d, f"--rows={ids}", code=2, json=json_too)
            r.silent().says(kind, where="err")
            if kind == "row-out-of-range":      # a negative id is refused before the table is opened
                r.says(ids.split(",")[-1], "0" if ids == "-1" else "59", where="err")


def c21(q):
    """Padding rows are readable but marked."""
    config = t0.t0_config()
    config["text_config"]["make_ngram_vocab_size_divisible_by"] = 8
    d = q.write(t0.build(config))
    same("rows", q.inspect(d).doc["ple"]["rows"], 64)
    q.verify(d).clean()
    r = q.run("decode-rows", d, "--rows", "60-63", json=True)
    same("rows", len(r.docs), 4)
    need("padding-row" in r.err, f"no note: {r.err}")
    r = q.run("decode-rows", d, "--rows", "0-59", json=True)
    need("padding-row" not in r.err, r.err)
    q.run("decode-rows", d, "--rows", "64", code=2).says("row-out-of-range", where="err")


def c22(q):
    """Decoding does not load the table."""
    d = sparse(q)
    table = d / "model-00002-of-00002.safetensors"
    q.drop_cache(table)
    ids = ",".join(str(i * 2699999) for i in range(10))
    r = q.run("decode-rows", d, "--rows", ids, json=True, measure=True)
    same("rows", len(r.docs), 10)
    need(r.peak < 64 * MIB, f"peak memory {r.peak}")
    need(q.resident(table) < MIB, f"{q.resident(table)} bytes of the table came into memory")


def c23(q):
    """Random reads, not read-ahead."""
    d = sparse(q)
    table = d / "model-00002-of-00002.safetensors"
    rng = np.random.default_rng(23)
    ids = rng.integers(0, 27000132, 3072)
    ids = rng.permutation(np.concatenate([ids, rng.choice(ids, 1024)]))
    ids[7], ids[4000] = 13421773, 26843546
    listed = q.path("ids.txt")
    listed.write_text("\n".join(map(str, ids)))
    q.drop_cache(table)
    out = q.path("rows.npy")
    q.run("decode-rows", d, "--rows", f"@{listed}", "--format", "npy", "-o", out)
    need(q.resident(table) <= 4096 * 8192, f"{q.resident(table)} bytes came into memory for 4096 rows")
    a = np.load(out)
    same("shape", a.shape, (4096, 160))
    same("rows with values", sorted(set(np.nonzero(a.any(axis=1))[0].tolist()) & {7, 4000}), [7, 4000])
    for i in (7, 8, 4000):
        q.run("decode-rows", d, "--rows", str(ids[i]), "--format", "npy", "-o", q.path(f"one{i}.npy"))
        need(np.load(q.path(f"one{i}.npy")).tobytes() == a[i].tobytes(), f"row {ids[i]} differs when asked for alone")
    tokens = [q.generate(d, "--tokens", "5,7,9", "-n", "8", "--greedy", "--ignore-eos", "--table", t).doc["tokens"]
              for t in ("host", "disk")]
    same("tokens from host and disk", tokens[0], tokens[1])


def c24(q):
    """Repack in bounded memory."""
    d = sparse(q)
    out = q.path()
    dry = q.run("repack", d, "-o", out, "--table-shards", "2", "--dry-run", json=True)
    stated = find_number(dry.doc, "peak")
    need(stated is not None, f"--dry-run does not state the peak memory: {dry.doc}")
    need(not out.exists(), "--dry-run wrote something")
    r = q.run("repack", d, "-o", out, "--table-shards", "2", json=True, measure=True, timeout=300)
    need(r.peak < 256 * MIB, f"peak memory {r.peak}")
    need(r.peak <= stated, f"peak memory {r.peak}, stated {stated}")
    same("a far row", q.values(out, 26843546), [0.25] * 160)
    g = q.generate(d, "--tokens", "5", "-n", "2", "--ignore-eos", "--table", "disk", "--device-memory", "64MiB")
    need(g.doc["memory"]["planned_bytes"] <= 64 * MIB, f"planned {g.doc['memory']}")


def find_number(doc, word):
    """The first integer whose key has word in it, anywhere in a document."""
    items = doc.items() if isinstance(doc, dict) else enumerate(doc) if isinstance(doc, list) else ()
    for k, v in items:
        if word in str(k) and isinstance(v, int):
            return v
        inner = find_number(v, word)
        if inner is not None:
            return inner
    return None


def c25(q):
    """Repack round trip."""
    for make in (t0.t0, t0.t0_nvfp4):
        d = q.write(make())
        want = [(r["row"], r["values"]) for r in q.rows(d, "--rows", "0-59")]

        def table(path, rows="0-59"):
            return [(r["row"], r["values"]) for r in q.rows(path, "--rows", rows)]

        for args in (["--table-shards", "3"], ["--layout", "row"]):
            out = q.path()
            q.run("repack", d, "-o", out, *args)
            same(f"rows after {args}", table(out), want)
            q.verify(out).only(severities=("error", "warning"))
        joined = []
        for rank in range(7):
            out = q.path()
            q.run("repack", d, "-o", out, "--rank", f"{rank}/7")
            part = table(out, "0-8")
            note = json.loads((out / "config.json").read_text())
            need("qx_rank" in json.dumps(note), "no qx_rank in the config")
            joined += [(len(joined) + i, v) for i, (_, v) in enumerate(part)]
        same("ranks joined", joined[:60], want)
        same("padding of the last rank", [v for _, v in joined[60:]], [[0.0] * 32] * 3)
        archive, back = q.path(), q.path()
        q.run("repack", d, "-o", archive, "--archive")
        q.run("repack", archive, "-o", back)
        for f in sorted(d.iterdir()):
            need((back / f.name).read_bytes() == f.read_bytes(), f"{f.name} differs after archive and back")
        same("files", sorted(f.name for f in back.iterdir()), sorted(f.name for f in d.iterdir()))
        out = q.path()
        q.run("repack", d, "-o", out, "--table", "bf16")
        hexes = [[r["hex"] for r in q.rows(p, "--rows", "0-59", "--dtype", "bf16")] for p in (d, out)]
        same("--table bf16", hexes[1], hexes[0])
        q.verify(out).only(severities=("error", "warning"))
        q.run("repack", d, "-o", q.path(), "--table", "int5", code=2).says("int5", where="err")


def c26(q):
    """All-zero rows when requantizing."""
    c = t0.t0_bf16_table()
    zero = Tensor("BF16", [15, 32], bytes(15 * 32 * 2))
    a = c.tensors[NG + "shard_0.weight"].array().copy()
    a[3:8] = 0
    c.tensors[NG + "shard_0.weight"].set(a)
    a = c.tensors[NG + "shard_1.weight"].array().copy()
    a[5, 16:] = 0
    c.tensors[NG + "shard_1.weight"].set(a)
    d = q.write(c)
    for s in range(4):
        c.tensors[f"{NG}shard_{s}.weight"] = zero
    all_zero = q.write(c)
    for form in ("fp8", "nvfp4"):
        out = q.path()
        q.run("repack", d, "-o", out, "--table", form)
        q.verify(out, "--level", "full").only(severities=("error",))
        for r in q.rows(out, "--rows", "3-7"):
            same(f"{form} row {r['row']}", [abs(v) for v in r["values"]], [0.0] * 32)
        same(f"{form} block of row 20", [abs(v) for v in q.values(out, 20)[16:]], [0.0] * 16)
        need("NaN" not in str(q.rows(out, "--rows", "0-59")), f"{form}: NaN in the table")
        out = q.path()
        q.run("repack", all_zero, "-o", out, "--table", form)
        need(q.inspect(out).doc["ple"]["scale"] > 0, f"{form}: the scale of a table of zeros is not positive")
        need(all(v == 0 for r in q.rows(out, "--rows", "0-59") for v in r["values"]), f"{form}: not all zero")


def c27(q):
    """Find the table by tensor name."""
    c = t0.t0()
    want = q.rows(q.write(c), "--rows", "0-59")
    named = {NG + "shard_0.weight": "a", NG + "shard_2.weight": "a", NG + "shard_1.weight": "b",
             NG + "shard_3.weight": "b", NG + "weight_scale": "c"}
    plan = {}
    for n in c.tensors:
        plan.setdefault(f"{named.get(n, 'b')}.safetensors", []).append(n)
    d = q.write(c, shards=plan)
    q.verify(d).clean()
    same("rows", q.rows(d, "--rows", "0-59"), want)
