#!/usr/bin/python3
"""Seeded damage to the micro checkpoints: is each change found?

    mutate.py BIN READ_ALL DATA [--seed N] [--bytes N] [--fields N] [--manifest N] [-v]

Three runs:
  bytes     single bytes replaced in headers, JSON files, scales and hash buffers;
  fields    single fields of config.json and hf_quant_config.json changed;
  manifest  single bytes of any file replaced, with a manifest: every one must be found, the file named,
            and the tensor too when the byte is a tensor's.

A change of the first two runs is in one of these classes, and the test fails if it is in none:
  found      verify ends with 1 or 3, or reports a finding that it did not report before;
  no effect  `inspect --json`, everything that READ_ALL decodes, and what `run` computes are as before: logits
             of 71 positions, those of the draft head, and the tokens that follow with the defaults for stopping;
  results    something of that is different and nothing in the checkpoint tells: a scale now has another value
             that a scale may have, or a number of the configuration that only the arithmetic uses (listed
             below) another that it may have. Nothing else in the files can tell: a block's codes are relative to
             its scale and hold no trace of it, scales of neighbours differ by orders of magnitude in sound
             checkpoints (the low byte of a wider one by less than a percent), and no sum over them is stored. What
             was there before is known from outside only. So the test demands that both ways to
             know it find the change: a manifest, which names the file, and the tensor if the byte is one's, and the
             checksums that a download from a hub leaves (--hub), which name the file. They are listed and counted."""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

LAYOUTS = ("bf16", "fp8", "mixed", "nvfp4", "nvfp4-ple")
# Keys that nothing stored depends on: another value that they may have changes results only.
ARITHMETIC = {"text_config." + k for k in (
    "eos_token_id", "bos_token_id", "pad_token_id", "indexer_budget", "max_position_embeddings", "norm_topk_prob",
    "num_experts_per_tok", "rms_norm_eps", "rope_parameters.rope_theta", "rope_theta", "hidden_act",
    "rope_parameters.partial_rotary_factor", "partial_rotary_factor", "indexer_compress_ratio")} | {"eos_token_id"}
# 72 of the 512 ids, one of them the id that starts the n-gram hash afresh.
PROMPT = [500 if i == 40 else (i * i * 31 + i * 7 + 3) % 500 for i in range(72)]
SCALE = re.compile(r"(weight_scale|weight_scale_inv|weight_scale_2|input_scale)$")
BUFFER = re.compile(r"(layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes)$")


class Checkpoint:
    """A sound checkpoint, what it gives, and copies of it with one file replaced."""

    def __init__(self, path, tools, scratch):
        self.path, self.tools, self.scratch = path, tools, scratch
        self.files = sorted(f for f in os.listdir(path) if os.path.isfile(os.path.join(path, f)))
        self.weights = [f for f in self.files if f.endswith(".safetensors")]
        self.headers = {}
        for f in self.weights:
            with open(os.path.join(path, f), "rb") as h:
                n = int.from_bytes(h.read(8), "little")
                self.headers[f] = (n, json.loads(h.read(n)))
        index = os.path.join(path, "model.safetensors.index.json")
        with open(index, encoding="utf-8") as h:
            self.map = json.load(h)["weight_map"]
        self.copy = os.path.join(scratch, os.path.basename(path))
        records = os.path.join(self.copy, ".cache", "huggingface", "download")
        os.makedirs(records)
        for f in self.files:
            os.symlink(os.path.join(path, f), os.path.join(self.copy, f))
            with open(os.path.join(records, f + ".metadata"), "w", encoding="ascii") as h:
                h.write("0" * 40 + "\n" + self.etag(f) + "\n1700000000.5\n")
        self.code, self.findings = self.verify()
        self.inspected, self.read, self.ran = self.results()
        if self.ran[0] != 0:
            raise SystemExit(f"{path} does not run: {self.ran}")
        self.manifest = os.path.join(scratch, os.path.basename(path) + ".sums")
        subprocess.run([tools.qx("verify"), self.copy, "--write-manifest", self.manifest], check=True,
                       stdout=subprocess.DEVNULL)

    def etag(self, name):
        """What a hub calls a file: SHA-256 of a large one, git's id of a small one."""
        data = self.content(name)
        if name in self.weights:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def verify(self, *args):
        r = subprocess.run([self.tools.qx("verify"), self.copy, "--json", "-j2", *args], timeout=120,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        if r.returncode not in (0, 1, 3):
            raise SystemExit(f"verify ended with {r.returncode}: {r.stderr.decode(errors='replace')}")
        doc = json.loads(r.stdout)
        if doc["schema"] == "qx.error/1":
            return r.returncode, [doc]
        return r.returncode, doc["findings"]

    def results(self):
        """What readers get: the text of inspect --json (the path is the same in every copy), and a hash."""
        i = subprocess.run([self.tools.qx("inspect"), self.copy, "--json"], timeout=120, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, check=False)
        r = subprocess.run([self.tools.read_all, self.copy], timeout=120, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, check=False)
        return i.stdout, (r.returncode, r.stdout), self.run()

    def run(self):
        """What run computes: exit status, hashes of logits, tokens and why they end."""
        out = [os.path.join(self.scratch, n) for n in ("logits.npy", "draft.npy")]
        for f in out:
            if os.path.exists(f):
                os.unlink(f)
        r = subprocess.run([self.tools.qx("run"), self.copy, "--tokens", ",".join(map(str, PROMPT)), "-n", "6",
                            "--greedy", "--logits", out[0], "--draft-logits", out[1], "--positions",
                            f"0-{len(PROMPT) - 2}", "--device", "cpu", "--json", "-q"], timeout=120,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        hashes = []
        for f in out:
            if not os.path.exists(f):
                hashes.append(None)
                continue
            with open(f, "rb") as h:
                hashes.append(hashlib.sha256(h.read()).hexdigest())
        doc = json.loads(r.stdout) if r.returncode == 0 else {}
        return r.returncode, hashes, doc.get("tokens"), doc.get("stop_reason")

    def with_file(self, name, content):
        at = os.path.join(self.copy, name)
        os.unlink(at)
        with open(at, "wb") as h:
            h.write(content)

    def restore(self, name):
        at = os.path.join(self.copy, name)
        os.unlink(at)
        os.symlink(os.path.join(self.path, name), at)

    def content(self, name):
        with open(os.path.join(self.path, name), "rb") as h:
            return bytearray(h.read())

    def tensor_at(self, name, off):
        """Indexed tensor whose bytes hold this offset of the file, or None."""
        if name not in self.headers:
            return None
        n, header = self.headers[name]
        for t, e in header.items():
            if t != "__metadata__" and e["data_offsets"][0] <= off - 8 - n < e["data_offsets"][1]:
                return t if self.map.get(t) == name else None
        return None

    def bytes_of(self, pattern):
        """(file, offset) of all bytes of tensors whose names match."""
        out = []
        for f, (n, header) in self.headers.items():
            for t, e in header.items():
                if t != "__metadata__" and pattern.search(t) and self.map.get(t) == f:
                    out += [(f, 8 + n + i) for i in range(*e["data_offsets"])]
        return out


class Tools:
    def __init__(self, directory, read_all):
        self.directory, self.read_all = directory, read_all

    def qx(self, name):
        return os.path.join(self.directory, "qx-" + name)


def key(f):
    return json.dumps({k: f.get(k) for k in ("kind", "severity", "file", "tensor", "key", "text")}, sort_keys=True)


def names(findings, what, value):
    return any(f["kind"] == "checksum" and (f.get(what) == value or value in (f.get("examples") or []))
               for f in findings)


def judge(c, file, tensor, path=None):
    """Class of the change that c's copy now holds, or None; and what verify said first."""
    code, findings = c.verify()
    before = {key(f) for f in c.findings}
    new = [f for f in findings if key(f) not in before]
    if code != 0 or new:
        return "found", (new or findings)[0]["kind"]
    inspected, read, ran = c.results()
    changed = [what for what, a, b in (("inspect", inspected, c.inspected), ("decoded values", read, c.read),
                                       ("run", ran, c.ran)) if a != b]
    if not changed:
        return "no effect", ""
    what = " and ".join(changed)
    if not (tensor and SCALE.search(tensor)) and path not in ARITHMETIC:
        return None, what + " changed"
    if ran[0] != 0:
        return None, f"run ends with {ran[0]}, verify finds nothing"
    _, listed = c.verify("--manifest", c.manifest)
    if not names(listed, "file", file) or not (tensor is None or names(listed, "tensor", tensor)):
        return None, what + " changed, not found with a manifest either"
    _, listed = c.verify("--hub")
    if not names(listed, "file", file):
        return None, what + " changed, not found with the hub's checksums"
    return "results", what + " changed; found with a manifest, and with the hub's checksums"


def leaves(node, path=()):
    if isinstance(node, dict):
        for k, v in node.items():
            yield from leaves(v, path + (k,))
    elif not (isinstance(node, list) and len(node) > 8):
        yield path, node


def changed(v, rng):
    if isinstance(v, bool):
        return not v
    if isinstance(v, int):
        return rng.choice([v + 1, v - 1, v * 2 + 1, -v - 1, str(v)])
    if isinstance(v, float):
        return v * 2
    if isinstance(v, str):
        return v + "x"
    if isinstance(v, list):
        return v[:-1] if v else [1]
    return 1


def run_bytes(checkpoints, n, rng, count, note):
    for i in range(n):
        c = rng.choice(checkpoints)
        kind = ("header", "json", "scale", "buffer")[i % 4]
        places = {"header": lambda: rng.choice([(f, o) for f in c.weights for o in range(8 + c.headers[f][0])]),
                  "json": lambda: rng.choice([(f, o) for f in c.files if f.endswith(".json")
                                              for o in range(len(c.content(f)))]),
                  "scale": lambda: rng.choice(c.bytes_of(SCALE) or c.bytes_of(BUFFER)),
                  "buffer": lambda: rng.choice(c.bytes_of(BUFFER))}
        file, off = places[kind]()
        data = c.content(file)
        old = data[off]
        data[off] = rng.choice([b for b in range(256) if b != old])
        c.with_file(file, bytes(data))
        verdict, what = judge(c, file, c.tensor_at(file, off))
        c.restore(file)
        count(f"bytes, {kind}", verdict)
        note(verdict, f"{os.path.basename(c.path)} {file} byte {off}: {old:02x} -> {data[off]:02x} "
             f"({c.tensor_at(file, off) or kind})", what)


def run_fields(checkpoints, n, rng, count, note):
    choices = []
    for c in checkpoints:
        for f in ("config.json", "hf_quant_config.json"):
            if f in c.files:
                choices += [(c, f, p) for p, _ in leaves(json.loads(c.content(f)))]
    for c, f, path in rng.sample(choices, min(n, len(choices))):
        doc = json.loads(c.content(f))
        node = doc
        for k in path[:-1]:
            node = node[k]
        old = node[path[-1]]
        node[path[-1]] = changed(old, rng)
        c.with_file(f, json.dumps(doc, indent=2).encode())
        verdict, what = judge(c, f, None, ".".join(map(str, path)))
        c.restore(f)
        count("fields", verdict)
        note(verdict, f"{os.path.basename(c.path)} {f} {'.'.join(path)}: {old!r} -> {node[path[-1]]!r}", what)


def run_manifest(checkpoints, n, rng, count, note):
    for _ in range(n):
        c = rng.choice(checkpoints)
        file = rng.choices(c.files, [os.path.getsize(os.path.join(c.path, f)) + 1000 for f in c.files])[0]
        data = c.content(file)
        if not data:
            continue
        off = rng.randrange(len(data))
        old = data[off]
        data[off] = rng.choice([b for b in range(256) if b != old])
        c.with_file(file, bytes(data))
        code, findings = c.verify("--manifest", c.manifest)
        c.restore(file)
        tensor = c.tensor_at(file, off)
        # An unusable config.json ends verify before anything is read; then its error names the file.
        named = names(findings, "file", file) or (code == 3 and file in (findings[0].get("file") or ""))
        ok = code in (1, 3) and named and (tensor is None or names(findings, "tensor", tensor))
        count("manifest", "found" if ok else None)
        note("found" if ok else None, f"{os.path.basename(c.path)} {file} byte {off} ({tensor or 'no tensor'})",
             f"exit {code}, " + ", ".join(sorted({f['kind'] for f in findings})))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("bin")
    p.add_argument("read_all")
    p.add_argument("data")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--bytes", type=int, default=200)
    p.add_argument("--fields", type=int, default=40)
    p.add_argument("--manifest", type=int, default=200)
    p.add_argument("-v", "--verbose", action="store_true")
    a = p.parse_args()
    if not os.path.isdir(os.path.join(a.data, "micro")):
        print("no micro checkpoints in", a.data)
        return 77
    counts, bad = {}, []

    def count(run, verdict):
        counts.setdefault(run, {}).setdefault(verdict, 0)
        counts[run][verdict] += 1

    def note(verdict, text, what):
        if verdict is None:
            bad.append(f"{text}: {what}")
        if a.verbose or verdict in (None, "results"):
            print(f"{verdict or 'MISSED':10} {text}: {what}", flush=True)

    scratch = tempfile.mkdtemp(prefix="qx-mutate-")
    try:
        tools = Tools(a.bin, a.read_all)
        checkpoints = [Checkpoint(os.path.join(os.path.abspath(a.data), "micro", l), tools, scratch) for l in LAYOUTS]
        for c in checkpoints:
            if c.code != 0:
                print(f"{c.path} is not sound to begin with: {c.findings}")
                return 1
        run_bytes(checkpoints, a.bytes, random.Random(a.seed), count, note)
        run_fields(checkpoints, a.fields, random.Random(a.seed + 1), count, note)
        run_manifest(checkpoints, a.manifest, random.Random(a.seed + 2), count, note)
    finally:
        shutil.rmtree(scratch)
    for run, c in counts.items():
        print(f"{run}: " + ", ".join(f"{n} {v or 'MISSED'}" for v, n in sorted(c.items(), key=lambda x: str(x[0]))))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
