"""F. The micro checkpoints and the sample against independently computed results; released geometry."""
import json
import os
import pathlib
import shutil

import numpy as np

import big
from harness import ROOT, Skip, need, same

MIB = 1 << 20


def micro(q, layout):
    for base in (os.environ.get("QX_TEST_DATA"), q.bin / "tests" / "data"):
        d = pathlib.Path(base or ".") / "micro" / layout
        if (d / "config.json").exists():
            return d
    raise Skip("the micro checkpoints are not assembled (ninja makes them)")


def shared(*parts):
    base = pathlib.Path(os.environ.get("QX_SHARED", ROOT.parent / "shared")) / "fixtures" / pathlib.Path(*parts)
    if not base.exists():
        raise Skip(f"no {'/'.join(parts)} fixture here")
    return base


def rel(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def against_expected(q, d, expected):
    """Table rows, n-gram rows, logits, drafts and greedy tokens equal the expected ones."""
    e = json.loads((expected / "expected.json").read_text())
    rows = ",".join(map(str, e["table_rows"]))
    got = [[int(h, 16) for h in r["hex"].split()] if " " in r["hex"] else
           [int(r["hex"][i:i + 4], 16) for i in range(0, len(r["hex"]), 4)]
           for r in q.rows(d, "--rows", rows, "--dtype", "bf16")]
    need(np.array_equal(np.array(got), np.load(expected / "table_rows_bf16_bits.npy")), "table rows differ")
    for name, p in e["prompts"].items():
        tokens = ",".join(map(str, p["tokens"]))
        a, b = p["ple_row_positions"]
        want = np.load(expected / f"{name}.ple_rows.npy")
        records = q.rows(d, "--tokens", tokens)
        heads = want.shape[1]
        ids = np.array([r["row"] for r in records]).reshape(-1, heads)[a:b]
        need(np.array_equal(ids, want), f"{name}: n-gram rows differ")
        want = np.load(expected / f"{name}.logits.npy")
        out, drafts = q.path("l.npy"), q.path("m.npy")
        positions = ",".join(map(str, p["logit_positions"]))
        q.generate(d, "--tokens", tokens, "-n", "0", "--logits", out, "--force", "--positions", positions)
        got = np.load(out)
        need(got.shape == want.shape and rel(got, want) < 1e-5, f"{name}: logits differ by {rel(got, want)}")
        file = expected / f"{name}.draft_logits.npy"
        if file.exists():
            want = np.load(file)
            last = len(p["tokens"]) - 2
            q.generate(d, "--tokens", tokens, "-n", "0", "--draft-logits", drafts, "--force", "--positions",
                       ",".join(str(last - len(want) + 1 + i) for i in range(len(want))))
            got = np.load(drafts)
            need(got.shape == want.shape and rel(got, want) < 1e-5, f"{name}: draft logits differ by {rel(got, want)}")
        if "greedy" not in p:
            continue
        doc = q.generate(d, "--tokens", tokens, "-n", str(len(p["greedy"])), "--greedy", "--ignore-eos").doc
        for i, (x, y, gap) in enumerate(zip(doc["tokens"], p["greedy"], p["greedy_gap"])):
            if gap <= 1e-4:
                break
            same(f"{name}: greedy token {i}", x, y)


def sound(q, d, layout):
    r = q.verify(d)
    if layout == "nvfp4-ple":
        r.one("stray-file", "warning")
        r.only("stray-file", severities=("error", "warning"))
    else:
        r.only(severities=("error", "warning"))
    same("layout", q.inspect(d).doc["model"]["layout"], layout)


def case(q, layout):
    d = micro(q, layout)
    sound(q, d, layout)
    against_expected(q, d, d / "expected")


def f01(q):
    """micro/bf16."""
    case(q, "bf16")


def f02(q):
    """micro/fp8."""
    case(q, "fp8")


def f03(q):
    """micro/mixed."""
    case(q, "mixed")


def f04(q):
    """micro/nvfp4."""
    case(q, "nvfp4")


def f05(q):
    """micro/nvfp4-ple."""
    case(q, "nvfp4-ple")


def f06(q):
    """The sample: sound, and it continues scripture."""
    d = ROOT / "sample"
    sound(q, d, "mixed")
    r = q.run("run", d, "-p", "In the beginning", "-n", "40", "--greedy", "--device", "cpu")
    words = set(r.text.lower().split())
    need(len(words & {"the", "and", "of", "god", "lord", "heaven", "earth", "was", "in", "to"}) >= 4,
         f"not in kind: {r.text!r}")


def trained(q, layout):
    d = shared("trained", layout)
    sound(q, d, layout)
    against_expected(q, d, d / "expected")


def f07(q):
    """trained/mixed."""
    trained(q, "mixed")


def f08(q):
    """trained/bf16."""
    trained(q, "bf16")


def f09(q):
    """trained/nvfp4-ple."""
    trained(q, "nvfp4-ple")


def sanitized(q):
    """Built with a sanitizer: slow, and hungry for memory."""
    options = q.bin / "meson-info" / "intro-buildoptions.json"
    return options.exists() and any(o["name"] == "b_sanitize" and o["value"] != "none"
                                    for o in json.loads(options.read_text()))


def released(q, layout, inspect_s=1.5, verify_s=2.0):
    """Sparse checkpoint of the released geometry: counts, time and memory of inspect and verify."""
    d = q.path()
    big.make(layout, d)
    count, payload, by = big.EXPECTED[layout]
    # Processor time, since other work may share the processors: two of them give twice the wall time.
    slow = 8 if sanitized(q) else 1
    r = q.run("inspect", d, json=True, measure=True)
    same("tensors", [r.doc["tensors"]["count"], r.doc["tensors"]["payload_bytes"]], [count, payload])
    same("by dtype", {k: v["tensors"] for k, v in r.doc["tensors"]["by_dtype"].items()}, by)
    same("layout", r.doc["model"]["layout"], layout)
    need(slow > 1 or r.peak < 400 * MIB, f"inspect: peak memory {r.peak / MIB:.0f} MiB")
    need(r.cpu_s < 2 * inspect_s * slow, f"inspect took {r.cpu_s:.2f} s of processor time")
    r = q.run("verify", d, "--level", "headers", json=True, measure=True)
    need(slow > 1 or r.peak < 500 * MIB, f"verify: peak memory {r.peak / MIB:.0f} MiB")
    need(r.cpu_s < 2 * verify_s * slow, f"verify took {r.cpu_s:.2f} s of processor time")
    r.only(severities=("error", "warning"))
    shutil.rmtree(d)


def f11(q):
    """Released geometry, bf16."""
    released(q, "bf16")


def f12(q):
    """Released geometry, fp8."""
    released(q, "fp8")


def f13(q):
    """Released geometry, mixed."""
    released(q, "mixed")


def f14(q):
    """Released geometry, nvfp4."""
    released(q, "nvfp4")


def f15(q):
    """Released geometry, nvfp4-ple."""
    released(q, "nvfp4-ple")
