#!/usr/bin/python3
"""Every rule has a defect that it finds: walks the table of lib/rules.c.

    defects.py BIN SOURCE_ROOT [KIND]...

For each kind the small checkpoint with that defect is made and verified; the kind must be among the findings
(or be the error, when verify cannot go on), with a severity that the table allows. Prints what is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

BIN, ROOT = sys.argv[1], sys.argv[2]
sys.path.insert(0, os.path.join(ROOT, "tests", "gen"))
import defects  # noqa: E402  pylint: disable=wrong-import-position


def table():
    with open(os.path.join(ROOT, "lib", "rules.c"), encoding="utf-8") as f:
        text = f.read()
    body = text[text.index("rules[] = {"):text.index("\n};")]
    word = {"E": "error", "W": "warning", "N": "note"}
    return {i: {word[s.strip()] for s in sev.split("|")}
            for i, sev in re.findall(r'\{"([^"]+)", ([EWN |]+), QX_RO', body)}


def verify(path, args):
    verb = os.path.join(BIN, "qx-verify")
    if args[:1] == ["--manifest-of"]:
        sums = args[1] + ".sums"
        subprocess.run([verb, args[1], "--write-manifest", sums, "-q"], check=True, stdout=subprocess.DEVNULL)
        args = ["--manifest", sums]
    r = subprocess.run([verb, str(path), "--json", "-j2", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       timeout=120, check=False)
    doc = json.loads(r.stdout)
    if doc["schema"] == "qx.error/1":
        return r.returncode, [{"kind": doc["kind"], "severity": "error"}]
    return r.returncode, doc["findings"]


def main():
    rules, bad = table(), []
    wanted = sys.argv[3:] or sorted(rules)
    scratch = tempfile.mkdtemp(prefix="qx-defects-")
    made = 0
    try:
        for kind in wanted:
            if kind not in defects.DEFECTS:
                if kind not in defects.NOT_MADE:
                    bad.append(f"{kind}: tests/gen/defects.py makes none")
                continue
            made += 1
            path, args = defects.make(kind, os.path.join(scratch, kind))
            code, findings = verify(path, args)
            hits = [f for f in findings if f["kind"] == kind]
            seen = ", ".join(sorted({f["severity"] + " " + f["kind"] for f in findings})) or "nothing"
            if not hits:
                bad.append(f"{kind}: not reported; exit {code}, {seen}")
            elif any(f["severity"] not in rules[kind] for f in hits):
                bad.append(f"{kind}: severity not in the table: {seen}")
            elif (code == 0) != all(f["severity"] != "error" for f in findings):
                bad.append(f"{kind}: exit {code} with {seen}")
            shutil.rmtree(os.path.join(scratch, kind))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for kind in sorted(set(defects.DEFECTS) - set(rules)):
        bad.append(f"{kind}: a defect for what is no row")
    for line in bad:
        print(line)
    print(f"{made} defects, {len(rules)} rows, {len(bad)} problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
