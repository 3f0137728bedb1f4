#!/usr/bin/env python3
"""The manual agrees with the programs: manual.py BUILD SOURCE

For every command: SYNOPSIS equals the usage lines of -h; every option of --list-options is described
in the page and every option of the page exists; the examples run. qx-json(5) names every schema, and
its samples are valid. Ends with 'N passed, N failed, N skipped'.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

build, source = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
sys.path.insert(0, str(source / "tests" / "cases"))
sys.path.insert(0, str(source / "tests" / "gen"))
import schema  # noqa: E402
import t0      # noqa: E402

COMMANDS = ("inspect", "verify", "decode-rows", "repack", "run", "bench")
tally = {"passed": 0, "failed": 0, "skipped": 0}


def check(good, what):
    tally["passed" if good else "failed"] += 1
    if not good:
        print("FAIL " + what)


def skip(what):
    tally["skipped"] += 1
    print("SKIP " + what)


def plain(line):
    """scdoc text without its marks."""
    line = re.sub(r"(?<![A-Za-z0-9\\])_([^_]+)_(?![A-Za-z0-9])", r"\1", line)
    return re.sub(r"\\(.)", r"\1", line.replace("*", "")).strip()


def section(page, name):
    m = re.search(rf"^# {name}\n(.*?)(?=^# |\Z)", page, re.M | re.S)
    return m.group(1) if m else ""


def run(*argv, **how):
    return subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=300, **how)


def usage_lines(text):
    """The lines of -h up to the first blank one."""
    return [" ".join(ln.split()) for ln in text.split("\n\n", 1)[0].splitlines()]


def folder(work):
    """What the examples need: T0 and the sample under the names that the pages use."""
    (work / "sample").symlink_to(source / "sample")
    (work / "ckpt").symlink_to(source / "sample")
    return work


def examples(page):
    """Indented command lines of EXAMPLES that begin with '$ '; lines ending in a backslash go on."""
    text = section(page, "EXAMPLES").replace("\\\n", " ")
    return [re.sub(r"\\([*_`])", r"\1", ln.strip()[2:]) for ln in text.splitlines() if ln.strip().startswith("$ ")]


def main():
    for name in COMMANDS:
        program, path = build / f"qx-{name}", source / "man" / f"qx-{name}.1.scd"
        if not program.exists():
            skip(f"qx-{name} is not built")
            continue
        if not path.exists():
            check(False, f"no page for qx-{name}")
            continue
        page = path.read_text()
        shown = usage_lines(run(program, "-h").stdout)
        told = [" ".join(plain(ln).split()) for ln in section(page, "SYNOPSIS").splitlines() if ln.strip()]
        told = [ln.removesuffix("++").strip() for ln in told]
        check(shown == told, f"qx-{name}: -h says {shown}, SYNOPSIS says {told}")
        listed = set(re.findall(r"--[a-z][a-z0-9-]*", run(program, "--list-options").stdout))
        listed = {o for o in listed if not (o.startswith("--no-") and "--" + o[5:] in listed)}
        described = set(re.findall(r"--[a-z][a-z0-9-]*",
                                   "\n".join(ln for ln in section(page, "OPTIONS").splitlines() if ln.startswith("*-"))))
        described |= set(re.findall(r"--[a-z][a-z0-9-]*", section(page, "GENERAL OPTIONS")))
        described = {o for o in described if not (o.startswith("--no-") and "--" + o[5:] in described)}
        check(listed <= described | {"--list-options"}, f"qx-{name}: not in the page: {sorted(listed - described)}")
        check({o for o in described if not o.startswith("--no-")} <= listed | {"--help", "--version", "--list-options"},
              f"qx-{name}: only in the page: {sorted(described - listed)}")
        for command in examples(page):
            with tempfile.TemporaryDirectory() as work:
                p = run("sh", "-c", command, cwd=folder(pathlib.Path(work)),
                        env={"PATH": f"{build}:/usr/bin:/bin", "HOME": work})
                fine = p.returncode == 0 or (p.returncode == 4 and name == "bench")
                check(fine, f"qx-{name}: example '{command}' ends with {p.returncode}: {p.stderr[-500:]}")
    page = (source / "man" / "qx-json.5.scd").read_text() if (source / "man" / "qx-json.5.scd").exists() else ""
    for name in schema.SCHEMAS:
        check(f"{name}" in page, f"qx-json(5) does not describe {name}")
    samples = re.findall(r"```\n(.*?)```", page, re.S)
    for text in samples:
        try:
            for doc in schema.documents(" ".join(text.split()).encode() + b"\n"):
                tally["passed"] += 1
        except (schema.SchemaError, ValueError) as e:
            check(False, f"qx-json(5): a sample is not valid: {e}: {text[:200]}")
    print(f"{tally['passed']} passed, {tally['failed']} failed, {tally['skipped']} skipped")
    return 1 if tally["failed"] else 0


sys.exit(main())
