#!/usr/bin/python3
"""What verify says of the files for text against what run does with them: seeded damage.

    text.py BIN SOURCE_ROOT [SEED [COUNT]]

T0 gets a tokenizer, its config, generation defaults, and files that only others read; of the first three each
is cut or gets one byte changed. When `qx run` refuses the checkpoint (3), verify must find an error in the
file that run names; when verify finds no error, run must not refuse. Cuts of the other files are errors, too;
nothing is said of the sound set, nor of a set without these files."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

BIN, ROOT = sys.argv[1], sys.argv[2]
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
COUNT = int(sys.argv[4]) if len(sys.argv) > 4 else 60
sys.path.insert(0, os.path.join(ROOT, "tests", "gen"))
import t0  # noqa: E402  pylint: disable=wrong-import-position

READ = {"tokenizer.json": lambda: t0.tokenizer(merges=(("A", "B"),), pieces={31: b"AB"}),
        "tokenizer_config.json": lambda: {"eos_token": "<|end|>", "added_tokens_decoder": {
            "2": {"content": "<|end|>", "special": True, "lstrip": False}}},
        "generation_config.json": lambda: {"eos_token_id": [2], "do_sample": True, "temperature": 0.7, "top_k": 20,
                                           "top_p": 0.95}}
OTHER = {"preprocessor_config.json": {"size": {"longest_edge": 16777216}}, "special_tokens_map.json": {"eos": "x"},
         "vocab.json": {"A": 0}}


def verify(d):
    r = subprocess.run([os.path.join(BIN, "qx-verify"), d, "--level", "headers", "--json"], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, timeout=60, check=False)
    return r.returncode, json.loads(r.stdout)["findings"]


def run(d):
    """Exit status and message of everything that run reads for text, without any arithmetic."""
    r = subprocess.run([os.path.join(BIN, "qx-run"), d, "-p", "ABBA", "--raw", "-n", "0", "--device", "cpu"],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False)
    return r.returncode, r.stderr.decode(errors="replace").strip()


def main():
    rng, bad, found, quiet = random.Random(SEED), [], 0, 0
    scratch = tempfile.mkdtemp(prefix="qx-text-")
    d = os.path.join(scratch, "t0")
    try:
        os.mkdir(d)
        t0.t0().write(d)
        if verify(d) != (0, []):
            bad.append("without files for text: " + str(verify(d)))
        sound = {n: json.dumps(f(), indent=1, ensure_ascii=False).encode() for n, f in READ.items()}
        sound.update({n: json.dumps(c).encode() for n, c in OTHER.items()})
        for n, b in sound.items():
            with open(os.path.join(d, n), "wb") as f:
                f.write(b)
        if verify(d) != (0, []) or run(d)[0] != 0:
            bad.append(f"the sound set: {verify(d)}, run {run(d)}")
        for i in range(COUNT):
            name = sorted(READ)[i % 3] if i % 6 else rng.choice(sorted(OTHER))
            b = bytearray(sound[name])
            if i % 4 == 0 or name in OTHER:
                b = b[:rng.randrange(len(b) - 1)]
                what = f"{name} cut at {len(b)}"
            else:
                at = rng.randrange(len(b))
                b[at] = rng.choice([c for c in range(256) if c != b[at]])
                what = f"{name} byte {at}: {sound[name][at]:02x} -> {b[at]:02x}"
            with open(os.path.join(d, name), "wb") as f:
                f.write(b)
            code, findings = verify(d)
            errors = [f for f in findings if f["severity"] == "error"]
            ran, said = run(d)
            if (ran == 3 or name in OTHER) and not any(f["file"] == name for f in errors):
                bad.append(f"{what}: run {ran} {said}; verify {code} {findings}")
            elif code == 0 and ran not in (0, 2):
                bad.append(f"{what}: verify finds no error, run {ran} {said}")
            elif any(f["kind"].startswith("json-") and f["offset"] is None for f in errors):
                bad.append(f"{what}: no place: {errors}")
            found += code == 1
            quiet += code == 0
            with open(os.path.join(d, name), "wb") as f:
                f.write(sound[name])
    finally:
        shutil.rmtree(scratch)
    for line in bad:
        print(line)
    print(f"{COUNT} changes: {found} found, {quiet} without consequence, {len(bad)} wrong")
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
