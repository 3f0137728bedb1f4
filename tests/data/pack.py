#!/usr/bin/env python3
"""Pack directories of checkpoints into tests/data/micro.recipe.json and micro.store.xz.

usage: pack.py SOURCE_DIRECTORY        (rewrites the two files beside this script)

The five micro checkpoints are one model in five layouts, so most of their tensors are the same
bytes. Every file is cut into parts (the header, each tensor, each whole small file); a part is
stored once however many files hold it. unpack.py puts the files together again.
"""
import hashlib
import json
import lzma
import pathlib
import struct
import sys


def parts_of(path):
    """The bytes of one file, cut where a repetition in another file may start or end."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return [data]
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    cuts = {0, 8 + n, len(data)}
    for name, entry in header.items():
        if name != "__metadata__":
            cuts.update(8 + n + off for off in entry["data_offsets"])
    cuts = sorted(cuts)
    return [data[a:b] for a, b in zip(cuts, cuts[1:])]


def main():
    source = pathlib.Path(sys.argv[1])
    here = pathlib.Path(__file__).resolve().parent
    store = bytearray()
    where = {}
    files = {}
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        runs = []
        for part in parts_of(path):
            if not part:
                continue
            key = hashlib.sha256(part).digest()
            if key not in where:
                where[key] = len(store)
                store += part
            off = where[key]
            if runs and runs[-1][0] + runs[-1][1] == off:
                runs[-1][1] += len(part)
            else:
                runs.append([off, len(part)])
        files[path.relative_to(source).as_posix()] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "parts": runs}
    (here / "micro.store.xz").write_bytes(lzma.compress(bytes(store), preset=9))
    with open(here / "micro.recipe.json", "w", encoding="ascii") as f:
        f.write("{\n" + ",\n".join(
            json.dumps(k) + ": " + json.dumps(v, separators=(",", ":")) for k, v in files.items())
            + "\n}\n")
    print(f"{len(files)} files, {len(store)} bytes of distinct parts")


main()
