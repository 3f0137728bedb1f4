"""D. Generation."""
import json
import os
import re
import subprocess

import numpy as np

import t0
from harness import Fail, need, same
from t0 import L, NG, Tensor, bf16

MIB = 1 << 20


def ids(n, seed=0, vocab=32):
    """n token ids, none of them the end-of-text id 2."""
    r = np.random.default_rng(seed).integers(3, vocab, n)
    return ",".join(map(str, r))


def logits(q, d, tokens, *args):
    out = q.path("logits.npy")
    q.generate(d, "--tokens", tokens, "-n", "0", "--logits", out, "--force", *args)
    return np.load(out)


def rel(a, b):
    return float(np.linalg.norm(a.astype(np.float64) - b) / max(np.linalg.norm(b.astype(np.float64)), 1e-300))


def d01(q):
    """Stop on every stop id."""
    for eos, n, text in (([3, 2], 4, "GHI"), (3, 4, "GHI"), ([2], 6, "GHIJ")):
        c = t0.t0_chain()
        c.files["tokenizer.json"] = t0.tokenizer()
        c.files["generation_config.json"] = {"eos_token_id": eos}
        d = q.write(c)
        doc = q.generate(d, "-p", "F", "--raw", "--greedy").doc
        same("tokens", doc["tokens"], t0.CHAIN[1:1 + n])
        same("prompt, text, reason", [doc["prompt_tokens"], doc["text"], doc["stop_reason"]], [[5], text, "stop"])
        same("printed", q.run("run", d, "-p", "F", "--raw", "--greedy", "--device", "cpu").text.rstrip("\n"), text)


def d02(q):
    """No generation_config."""
    c = t0.t0_chain()
    c.files["tokenizer.json"] = t0.tokenizer()
    c.files["tokenizer_config.json"] = {"eos_token": "<|mid|>"}
    d = q.write(c)
    for start, last in ((8, 3), (9, 2)):
        r = q.generate(d, "--tokens", str(start), "--greedy")
        same("tokens", [r.doc["tokens"], r.doc["stop_reason"], r.doc["text"]], [[last], "stop", None])
        need(re.search(r"stop[^\n]*\b2\b[^\n]*\b3\b|stop[^\n]*\b3\b[^\n]*\b2\b", r.err),
             f"the stop ids 2 and 3 are not in the summary: {r.err}")
        need("note" in r.err, f"no note about the disagreement: {r.err}")


def d03(q):
    """Thinking switched off."""
    c = t0.t0()
    c.files["tokenizer.json"] = t0.tokenizer()
    c.files["chat_template.jinja"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    d = q.write(c)
    q.fails("run", d, "-p", "Hello?", "--device", "cpu", says=["--raw", "--template qwen3.8"])
    base = ["-p", "Hello?", "--system", "You are concise.", "--template", "qwen3.8", "--show-prompt"]
    head = ("<|im_start|>system\nYou are concise.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n")
    r = q.run("run", d, *base, "--no-think")
    same("no thinking", r.text, head + "\n</think>\n\n")
    r = q.run("run", d, *base, "--effort", "medium")
    same("medium", r.text, head)


def d04(q):
    """Characters split over tokens."""
    c = t0.t0_chain([5, 6, 7, 2])
    c.files["tokenizer.json"] = t0.tokenizer(pieces={6: b"\xf0\x9f", 7: b"\x98\x80"})
    d = q.write(c)
    doc = q.generate(d, "-p", "F", "--raw", "--greedy").doc
    same("tokens, text", [doc["tokens"], doc["text"]], [[6, 7, 2], "\U0001F600"])
    p = subprocess.Popen([str(q.bin / "qx-run"), str(d), "-p", "F", "--raw", "--greedy", "--device", "cpu", "-q"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pieces = []
    while True:
        piece = os.read(p.stdout.fileno(), 65536)
        if not piece:
            break
        pieces.append(piece)
    p.wait()
    same("bytes", b"".join(pieces).rstrip(b"\n"), "\U0001F600".encode())
    for piece in pieces:
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError:
            raise Fail(f"a flushed piece is not UTF-8: {piece!r}") from None
    # cut off inside the character: the bytes stay available
    doc = q.generate(d, "-p", "F", "--raw", "--greedy", "-n", "1").doc
    same("tokens", doc["tokens"], [6])
    need("text_base64" in doc, f"no text_base64 for bytes that are no text: {doc}")


def d05(q):
    """Prompt plus output exceeds the context."""
    c = t0.t0()
    c.text["max_position_embeddings"] = 64
    d = q.write(c)
    prompt = ["--tokens", ids(60), "--ignore-eos", "--greedy"]
    r = q.run("run", d, *prompt, "-n", "5", "--device", "cpu", code=2)
    r.silent().says("context-exceeded", "60", "5", "64", where="err")
    a = q.generate(d, *prompt, "-n", "4").doc
    b = q.generate(d, *prompt).doc
    same("-n 4", [len(a["tokens"]), a["stop_reason"]], [4, "length"])
    same("no -n", [b["tokens"], b["stop_reason"]], [a["tokens"], "context"])


def d06(q):
    """Chunked prefill equals one pass."""
    d = q.write(t0.t0())
    runs = []
    for chunk in (1, 3, 16, 40):
        out = q.path(f"l{chunk}.npy")
        doc = q.generate(d, "--tokens", ids(40), "-n", "16", "--greedy", "--ignore-eos", "--chunk", str(chunk),
                         "--logits", out).doc
        runs.append((doc["tokens"], np.load(out)))
    for tokens, got in runs[:-1]:
        same("tokens", tokens, runs[-1][0])
        need(got.shape == (16, 32) and rel(got, runs[-1][1]) < 1e-5, f"logits differ by {rel(got, runs[-1][1])}")


def d07(q):
    """Speculation does not change greedy text."""
    d = q.write(t0.t0())
    for seed in range(5):
        prompt = ["--tokens", ids(8 + 14 * seed, seed), "-n", "64", "--greedy", "--ignore-eos"]
        plain, draft = (q.generate(d, *prompt, "--draft", k).doc for k in ("0", "1"))
        same(f"prompt {seed}", draft["tokens"], plain["tokens"])
        same("k", draft["draft"]["k"], 1)
        need(draft["draft"]["rounds"] > 0 and draft["draft"]["accepted"] >= 0, f"no counts: {draft['draft']}")


def value_probe(q, budget):
    """T0 reduced so that only layer 3's attention looks back, keys depend on the first half of an
    embedding and values on the second. Token t + 14 has token t's keys and the opposite value."""
    config = t0.t0_config()
    config["text_config"]["indexer_budget"] = budget
    c = t0.build(config)
    for name, t in c.tensors.items():
        if name.startswith(L) and (name.endswith(("linear_attn.out_proj.weight", "ple.value_proj.weight"))
                                   or ".down_proj." in name):
            t.data = bytes(t.n_bytes)
        if "layers.3.attn_hyper_connection." in name and ("hc_norm" in name or "mix_weight_up" in name):
            t.data = bytes(t.n_bytes)
    rng = np.random.default_rng(8)
    embed = np.ones((32, 64), np.float32)
    embed[4:18, :32] = rng.choice([-1, 1], (14, 32))
    embed[18:32, :32] = embed[4:18, :32]
    embed[4:18, 32:] = rng.choice([-1, 1], (14, 32))
    embed[18:32, 32:] = -embed[4:18, 32:]
    c.tensors[L + "embed_tokens.weight"] = bf16([32, 64], embed)
    p = L + "layers.3.self_attn."
    for part, half in (("q_proj", 0), ("k_proj", 0), ("indexer.index_qk_proj", 0), ("v_proj", 1)):
        w = c.tensors[f"{p}{part}.weight"].array().copy()
        w[:, 32 * (1 - half):32 * (2 - half)] = 0
        c.tensors[f"{p}{part}.weight"].set(w)
    return q.write(c)


def influential(q, d, tokens):
    """Positions before the last whose value changes the last logits."""
    base = logits(q, d, ",".join(map(str, tokens)))
    out = []
    for p in range(len(tokens) - 1):
        other = list(tokens)
        other[p] += 14
        if logits(q, d, ",".join(map(str, other))).tobytes() != base.tobytes():
            out.append(p)
    return out


def d08(q):
    """Sparse attention is really used."""
    d = value_probe(q, 8)
    tokens = np.random.default_rng(40).integers(4, 18, 42).tolist()
    for n in (40, 41):
        got = influential(q, d, tokens[:n])
        blocks = {p // 4 for p in got}
        complete = n // 4
        tail = n % 4
        chosen = sorted(b for b in blocks if b < complete)
        same(f"context {n}: chosen blocks", len(chosen), 2)
        want = sorted(p for b in chosen for p in range(4 * b, 4 * b + 4) if p != n - 1)
        want += [p for p in range(4 * complete, n - 1)]
        same(f"context {n}: positions with influence (tail {tail})", got, want)


def d09(q):
    """Below the budget sparse equals dense."""
    sparse, dense = value_probe(q, 8), value_probe(q, 4096)
    tokens = np.random.default_rng(41).integers(4, 18, 15).tolist()
    for n in range(1, 16):
        got = influential(q, sparse, tokens[:n])
        if n <= 11:
            same(f"context {n}: influence", got, list(range(n - 1)))
            text = ",".join(map(str, tokens[:n]))
            need(rel(logits(q, sparse, text), logits(q, dense, text)) < 1e-6, f"context {n} differs from dense")
        else:
            last = 1 if n % 4 == 0 and 2 in {p // 4 for p in got} else (1 if n % 4 else 0)
            same(f"context {n}: positions attended", len(got) + last, 8 + n % 4)
    full = q.write(t0.t0())
    config = t0.t0_config()
    config["text_config"]["indexer_budget"] = 4096
    other = q.write(t0.build(config))
    for n in (1, 4, 11):
        need(rel(logits(q, full, ids(n, 5)), logits(q, other, ids(n, 5))) < 1e-6, f"T0, context {n}")


def d10(q):
    """Non-finite logits stop the run."""
    c = t0.t0()
    name = L + "hyper_connection_mixer.hc_norm.weight"
    a = c.tensors[name].array().copy()
    a[17] = 0x7FC0
    c.tensors[name].set(a)
    d = q.write(c)
    q.fails("run", d, "--tokens", "5,7", "-n", "3", "--greedy", "--device", "cpu", kind="non-finite-logits",
            says=["0"])


def d11(q):
    """It does not fit: say so first."""
    d = q.write(t0.t0())
    r = q.fails("run", d, "--tokens", "5", "-n", "1", "--device-memory", "256KiB", code=4, kind="memory-plan")
    low = r.err.lower() + json.dumps(r.doc).lower()
    for word in ("weights", "kv", "scratch", "total", "context"):
        need(word in low, f"the plan does not mention {word}: {r.err}")
    need(re.search(r"no context|none", low), f"it is not said that no context fits: {r.err}")
    fit = q.inspect(d, "--fit", "256KiB", "--ctx", "128").doc["fit"]
    same("fit", [fit["fits"], fit["device_bytes"]], [False, 256 << 10])
    c = t0.t0()
    c.text["max_position_embeddings"] = 1048576
    d = q.write(c)
    r = q.fails("run", d, "--tokens", "5", "-n", "1", "--ctx", "1048576", "--device-memory", "32MiB", code=4,
                kind="memory-plan")
    numbers = [int(n) for n in re.findall(r"\d{3,}", r.err + r.doc["text"])]
    need(any(1000 < n < 1048576 for n in numbers), f"no context that fits is suggested: {r.err}")
    fit = q.inspect(d, "--fit", "32MiB", "--ctx", "1048576").doc["fit"]
    same("fits", fit["fits"], False)
    need(fit["needed_bytes"] > 64 * MIB, f"needed {fit['needed_bytes']}")
    same("sum of parts on the device", sum(p["bytes"] for p in fit["parts"] if p["place"] == "device"),
         fit["needed_bytes"])


def d12(q):
    """Control tokens are not shown."""
    c = t0.t0_chain([5, 3, 6, 2])
    c.files["tokenizer.json"] = t0.tokenizer()
    c.files["generation_config.json"] = {"eos_token_id": [2]}
    d = q.write(c)
    args = ["-p", "F", "--raw", "--greedy"]
    doc = q.generate(d, *args).doc
    same("tokens, text", [doc["tokens"], doc["text"]], [[3, 6, 2], "G"])
    same("printed", q.run("run", d, *args, "--device", "cpu").text.rstrip("\n"), "G")
    r = q.run("run", d, *args, "--special", "--device", "cpu")
    need(r.text.startswith("<|mid|>G"), f"--special: {r.text!r}")


def d13(q):
    """Draft statistics."""
    d = q.write(t0.t0())
    r = q.generate(d, "--tokens", "5,7,9", "-n", "32", "--ignore-eos", "--draft", "1", "--greedy")
    draft, timing = r.doc["draft"], r.doc["timing"]
    same("k", draft["k"], 1)
    same("tokens", len(r.doc["tokens"]), 32)
    need(abs(draft["acceptance_length"] - 32 / draft["rounds"]) < 1e-3, f"acceptance length: {draft}")
    need(any("position" in k or isinstance(v, list) for k, v in draft.items()), f"no per-position acceptance: {draft}")
    need(timing["prefill_tok_s"] > 0 and timing["decode_tok_s"] > 0, f"rates: {timing}")
    need("accept" in r.err and "tok" in r.err, f"no statistics on standard error: {r.err}")


def d14(q):
    """Loading shows progress and reads once."""
    config = t0.t0_config()
    c = t0.t0()
    config["text_config"]["vocab_size"] = c.text["vocab_size"] = rows = 1900000
    for name in ("lm_head.weight", L + "embed_tokens.weight"):
        c.tensors[name] = Tensor("BF16", [rows, 64])
    m = t0.hash_multipliers(rows, 3)
    c.tensors[t0.PLE + "ple_embedding.layer_multipliers"] = t0.i64([3], m)
    d = q.write(c)
    need(c.payload > 480 * 1000 * 1000, f"payload {c.payload}")
    r = q.run("run", d, "--tokens", "5", "-n", "1", "--greedy", "--ignore-eos", "--device", "cpu", "--progress",
              "always", json=True, measure=True)
    need(re.search(r"[KMG]i?B", r.err) and "/s" in r.err, f"no progress with bytes and rate: {r.err}")
    need(r.rchar < 1.05 * c.payload + 4 * MIB, f"{r.rchar} bytes read of {c.payload}")


def d15(q):
    """Table smaller than the device is not required."""
    config = t0.t0_config()
    config["text_config"].update(ngram_vocab_size_base=524400, split_ngram_parts=4)
    c = t0.build(config, sparse_table=True)
    need(c.tensors[NG + "shard_0.weight"].n_bytes * 4 >= 64 * MIB, "the table is too small")
    d = q.write(c)
    base = ["--tokens", "5,7", "-n", "3", "--greedy", "--ignore-eos", "--device-memory", "32MiB"]
    disk, host = (q.generate(d, *base, "--table", place).doc for place in ("disk", "host"))
    same("tokens", disk["tokens"], host["tokens"])
    need(disk["memory"]["planned_bytes"] <= 32 * MIB, f"planned {disk['memory']}")
    q.fails("run", d, *base, "--table", "device", code=4, kind="memory-plan")


def d16(q):
    """Larger context than trained."""
    c = t0.t0()
    c.text["max_position_embeddings"] = 64
    d = q.write(c)
    one = ["--tokens", "5", "-n", "1", "--device", "cpu"]
    q.run("run", d, *one, "--ctx", "65", code=2).silent().says("context-exceeded", "65", "64", where="err")
    q.run("run", d, *one, "--ctx", "64", json=True)
    rope = c.text["rope_parameters"]
    rope.update(rope_type="yarn", factor=4, original_max_position_embeddings=64)
    c.text["max_position_embeddings"] = 256
    d = q.write(c)
    q.run("run", d, *one, "--ctx", "256", json=True)
    q.run("run", d, *one, "--ctx", "257", code=2).silent().says("context-exceeded", "257", "256", where="err")
    rope["rope_type"] = "longrope"
    q.fails("run", q.write(c), *one, kind="rope-unsupported", says=["longrope"])


def d17(q):
    """Sampling defaults come from the checkpoint."""
    c = t0.t0()
    c.files["generation_config.json"] = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95,
                                         "eos_token_id": [2]}
    d = q.write(c)
    base = ["--tokens", "5,7", "-n", "24", "--ignore-eos"]
    runs = [q.generate(d, *base, "--seed", "7") for _ in range(2)]
    same("same seed", runs[0].doc["tokens"], runs[1].doc["tokens"])
    for text in ("20", "0.95", "7"):
        need(re.search(rf"(?<![\d.]){re.escape(text)}(?![\d])", runs[0].err), f"{text} is not shown: {runs[0].err}")
    other = q.generate(d, *base, "--seed", "7", "--temperature", "0.25", "--top-k", "5", "--top-p", "0.5")
    for text in ("0.25", "5", "0.5"):
        need(text in other.err, f"{text} is not shown: {other.err}")
    greedy = q.generate(d, *base, "--temperature", "0").doc["tokens"]
    same("temperature 0 is greedy", greedy, q.generate(d, *base, "--greedy").doc["tokens"])
