#!/usr/bin/env python3
"""Count the tests of a meson run: tally.py TESTLOG.json -> 'PASSED FAILED SKIPPED' on standard output.

A test that counts its own parts (the line 'N passed, N failed, N skipped', or cmocka's) counts as
these; any other as one. What failed or was skipped is shown on standard error.
"""
import json
import re
import sys


def main():
    total = [0, 0, 0]
    with open(sys.argv[1], encoding="utf-8") as f:
        for line in f:
            t = json.loads(line)
            out = (t.get("stdout") or "") + (t.get("stderr") or "")
            counts = re.findall(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", out, re.M)
            units = re.findall(r"^\[  PASSED  \] (\d+) test", out, re.M)
            if t["result"] == "SKIP":
                part = [0, 0, 1]
                print(f"SKIP {t['name']}", file=sys.stderr)
            elif counts:
                part = [int(n or 0) for n in counts[-1]]
            elif t["result"] == "OK":
                part = [int(units[-1]) if units else 1, 0, 0]
            else:
                part = [0, 1, 0]
            if t["result"] not in ("OK", "SKIP"):
                part[1] = max(part[1], 1)
                print(f"FAIL {t['name']} ({t['result']})\n{out[-20000:]}", file=sys.stderr)
            else:
                for note in re.findall(r"^(?:SKIP|part) .*$", out, re.M):
                    print(note, file=sys.stderr)
            total = [a + b for a, b in zip(total, part)]
    print(*total)


main()
