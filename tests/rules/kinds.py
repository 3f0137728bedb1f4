#!/usr/bin/python3
"""Every kind of finding is a row of lib/rules.c, and every row is described in qx-rules(7).

    kinds.py SOURCE_ROOT

Walks the sources: the first argument of QX_REPORT, and of every call of a function that has a parameter
`const char *kind` and leads to a finding, the argument in that place. Prints what is missing."""

import glob
import os
import re
import sys

ROOT = sys.argv[1]


def arguments(text, at):
    """Arguments of the call whose opening bracket is at text[at]."""
    out, depth, start, i, quoted = [], 0, at + 1, at, False
    while i < len(text):
        c = text[i]
        if quoted:
            if c == "\\":
                i += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                out.append(text[start:i])
                return out
        elif c == "," and depth == 1:
            out.append(text[start:i])
            start = i + 1
        i += 1
    return out


def literals(arg):
    return re.findall(r'"([a-z0-9][a-z0-9-]*)"', re.sub(r"strcmp\([^()]*\)", "", arg))


def kinds_of_sources():
    found = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "[lc][im][bd]", "*.c"))):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        name = os.path.basename(path)
        if not any(w in text for w in ("QX_REPORT(", "struct qx_report", "qx_findings_add(")):
            continue
        for m in re.finditer(r"\bQX_REPORT\(", text):
            args = arguments(text, m.end() - 1)
            for k in literals(args[0]) if args else []:
                found.setdefault(k, name)
        # Helpers that are told the kind.
        for d in re.finditer(r"\b(\w+)\(([^()]*const char \*kind[^()]*)\)\s*\{", text):
            params = [p.strip() for p in d.group(2).split(",")]
            place = next(i for i, p in enumerate(params) if p.endswith("*kind"))
            if any("struct qx_error" in p for p in params) and "qx_findings" not in d.group(2) \
                    and "findings" not in text[d.start():d.end() + 900]:
                continue
            for c in re.finditer(r"\b%s\(" % d.group(1), text):
                args = arguments(text, c.end() - 1)
                for k in literals(args[place]) if len(args) > place else []:
                    found.setdefault(k, name)
    return found


def table():
    with open(os.path.join(ROOT, "lib", "rules.c"), encoding="utf-8") as f:
        text = f.read()
    body = text[text.index("rules[] = {"):text.index("\n};")]
    return re.findall(r'\{"([^"]+)"', body)


def manual():
    path = os.path.join(ROOT, "man", "qx-rules.7.scd")
    with open(path, encoding="utf-8") as f:
        return set(re.findall(r"^\*([a-z0-9-]+)\* \(", f.read(), re.M))


def main():
    rows, found, described, bad = table(), kinds_of_sources(), manual(), []
    everything = ""
    for path in glob.glob(os.path.join(ROOT, "[lc][im][bd]", "*.c")):
        if not path.endswith("rules.c"):
            with open(path, encoding="utf-8") as f:
                everything += f.read()
    if rows != sorted(set(rows)):
        bad.append("lib/rules.c is not sorted or has a row twice")
    for k, where in sorted(found.items()):
        if k not in rows:
            bad.append(f"'{k}' of {where} is no row of lib/rules.c")
    for k in rows:
        if k not in found and f'"{k}"' not in everything:
            bad.append(f"row '{k}' is reported nowhere")
        if k not in described:
            bad.append(f"row '{k}' has no entry in qx-rules(7)")
    for k in sorted(described - set(rows)):
        bad.append(f"qx-rules(7) describes '{k}', which is no row")
    for line in bad:
        print(line)
    print(f"{len(rows)} rows, {len(found)} kinds in the sources, {len(bad)} problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
