#!/usr/bin/env python3
"""Run acceptance cases: tests/cases/run.py [GLOB…] --bin build/ [-j N] [--keep] [--list]

A case is a function named by its number (a01 … e13). GLOB selects by name, without regard to letter
case: 'b*' 'c1?'. Failures are printed with what was seen; the last line is the count.
"""
import argparse
import fnmatch
import importlib
import multiprocessing
import pathlib
import re
import shutil
import sys
import tempfile
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402

THEMES = {"a": "theme_a", "b": "theme_b", "c": "theme_c", "d": "theme_d", "e": "theme_e", "f": "fixtures"}


def cases():
    out = {}
    for letter, theme in THEMES.items():
        module = importlib.import_module(theme)
        for name in dir(module):
            if re.fullmatch(letter + r"\d\d", name):
                out[name] = getattr(module, name)
    return dict(sorted(out.items()))


def one(job):
    name, bin_dir, keep = job
    folder = tempfile.mkdtemp(prefix=f"qx-{name}-")
    start = time.monotonic()
    case = harness.Case(bin_dir, folder)
    try:
        cases()[name](case)
        verdict, why = "pass", "; ".join(case.notes)
    except harness.Skip as e:
        verdict, why = "skip", str(e)
    except harness.Fail as e:
        verdict, why = "fail", str(e)
    except Exception:  # a mistake in the case itself, or output of a shape it did not expect
        verdict, why = "fail", traceback.format_exc()
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return name, verdict, why, time.monotonic() - start, folder


def main():
    p = argparse.ArgumentParser()
    p.add_argument("globs", nargs="*", default=["*"])
    p.add_argument("--bin", default="build")
    p.add_argument("-j", type=int, default=1)
    p.add_argument("--keep", action="store_true", help="keep the folders of the cases")
    p.add_argument("--list", action="store_true")
    p.add_argument("-v", action="store_true", help="a line a case")
    a = p.parse_args()
    wanted = [n for n in cases() if any(fnmatch.fnmatch(n, g.lower()) for g in a.globs)]
    if a.list:
        for n in wanted:
            print(f"{n}  {(cases()[n].__doc__ or '').splitlines()[0]}")
        return 0
    if not wanted:
        sys.exit(f"run.py: no case matches {' '.join(a.globs)}")
    tally = {"pass": 0, "fail": 0, "skip": 0}
    jobs = [(n, a.bin, a.keep) for n in wanted]
    with multiprocessing.Pool(max(1, a.j)) as pool:
        for name, verdict, why, seconds, folder in pool.imap(one, jobs):
            tally[verdict] += 1
            title = (cases()[name].__doc__ or "").splitlines()[0]
            if verdict == "fail":
                print(f"FAIL {name.upper()} {title}\n  {why}" + (f"\n  kept: {folder}" if a.keep else ""), flush=True)
            elif verdict == "skip":
                print(f"SKIP {name.upper()} {title}: {why}", flush=True)
            elif why:
                print(f"part {name.upper()} {title}: skipped: {why}", flush=True)
            elif a.v:
                print(f"ok   {name.upper()} {title} ({seconds:.2f} s)", flush=True)
    print(f"{tally['pass']} passed, {tally['fail']} failed, {tally['skip']} skipped")
    return 1 if tally["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
