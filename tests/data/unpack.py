#!/usr/bin/env python3
"""Assemble the micro checkpoints, byte for byte, from their deduplicated form.

usage: unpack.py DESTINATION [STAMP]

Makes DESTINATION/micro/LAYOUT/… and DESTINATION/tokenizer_cases.json. Every file is checked
against its SHA-256; a file that is already there and right is left alone. STAMP is touched last.
"""
import hashlib
import json
import lzma
import pathlib
import shutil
import sys


def main():
    here = pathlib.Path(__file__).resolve().parent
    out = pathlib.Path(sys.argv[1])
    recipe = json.loads((here / "micro.recipe.json").read_text())
    store = lzma.decompress((here / "micro.store.xz").read_bytes())
    for name, entry in recipe.items():
        path = out / "micro" / name
        data = b"".join(store[off:off + n] for off, n in entry["parts"])
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            sys.exit(f"unpack.py: {name}: the stored parts do not give the recorded SHA-256")
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    shutil.copyfile(here / "tokenizer_cases.json", out / "tokenizer_cases.json")
    if len(sys.argv) > 2:
        pathlib.Path(sys.argv[2]).touch()


main()
