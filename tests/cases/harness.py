"""What a case needs: a folder of its own, runs of the programs, and assertions that say what was seen.

Every run is checked for what holds always: no death by signal, an exit status of the contract, JSON
that is valid and of its schema, no raw control bytes on standard output.
"""
import ctypes
import json
import mmap
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "gen"))
sys.path.insert(0, str(HERE))
import schema  # noqa: E402

MANY = ("decode-rows", "bench")      # answer in JSON lines
MEASURE = """
import os, sys
pid = os.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
io = {}
try:
    io = dict(l.split(": ") for l in open("/proc/%d/io" % pid).read().splitlines())
except OSError:
    pass
_, status, use = os.wait4(pid, 0)
open(sys.argv[1], "w").write("%d %s %f" % (use.ru_maxrss * 1024, io.get("rchar", -1), use.ru_utime + use.ru_stime))
os._exit(os.waitstatus_to_exitcode(status) & 255)
"""


class Skip(Exception):
    pass


class Fail(Exception):
    pass


def need(condition, what):
    if not condition:
        raise Fail(what)


def mentions(hay, text):
    """hay has text, blanks aside ([32,4] and [32, 4] are one)."""
    return "".join(str(text).split()) in "".join(hay.split())


def same(what, found, wanted):
    if found != wanted:
        raise Fail(f"{what}: found {found!r}, expected {wanted!r}")


class Result:
    def __init__(self, args, code, out, err):
        self.args, self.code, self.out = args, code, out
        self.err = err.decode("utf-8", "replace")
        self.docs, self.peak, self.rchar, self.cpu_s = [], None, None, None

    @property
    def doc(self):
        if len(self.docs) != 1:
            raise Fail(f"{self.line()}: {len(self.docs)} documents, expected one\n{self.tail()}")
        return self.docs[0]

    @property
    def text(self):
        return self.out.decode("utf-8")

    def line(self):
        return " ".join(str(a) for a in self.args)

    def tail(self):
        out = self.out[-3000:].decode("utf-8", "replace")
        return f"  exit {self.code}\n  stderr: {self.err[-1500:]}\n  stdout: {out}"

    # --- findings ------------------------------------------------------------------------

    @property
    def findings(self):
        d = self.doc
        return d["findings"] if d["schema"] == "qx.verify/1" else d["warnings"]

    def found(self, kind, severity=None):
        return [f for f in self.findings if f["kind"] == kind and severity in (None, f["severity"])]

    def one(self, kind, severity="error", count=None, says=()):
        """Exactly one finding of this kind and severity; it mentions every text in says."""
        hits = self.found(kind, severity)
        if len(hits) != 1:
            raise Fail(f"{self.line()}: {len(hits)} findings {kind} ({severity}), expected one\n{self.seen()}")
        f = hits[0]
        if count is not None and f["count"] != count:
            raise Fail(f"{self.line()}: {kind}: count {f['count']}, expected {count}\n{self.seen()}")
        whole = json.dumps(f, ensure_ascii=False)
        for text in ([says] if isinstance(says, str) else says):
            if not mentions(whole, text):
                raise Fail(f"{self.line()}: {kind} does not mention {text!r}: {whole}")
        return f

    def some(self, kind, severity="error", says=()):
        """At least one finding of this kind; together they mention every text in says."""
        hits = self.found(kind, severity)
        if not hits:
            raise Fail(f"{self.line()}: no finding {kind} ({severity})\n{self.seen()}")
        whole = json.dumps(hits, ensure_ascii=False)
        for text in ([says] if isinstance(says, str) else says):
            if not mentions(whole, text):
                raise Fail(f"{self.line()}: {kind} does not mention {text!r}: {whole}")
        return hits

    def only(self, *kinds, severities=("error", "warning", "note")):
        """No finding of these severities but of the given kinds."""
        extra = [f for f in self.findings if f["severity"] in severities and f["kind"] not in kinds]
        if extra:
            raise Fail(f"{self.line()}: findings beyond {kinds}:\n{self.seen()}")
        return self

    def clean(self):
        return self.only()

    def seen(self):
        if not self.docs:
            return self.tail()
        return "\n".join(f"    {f['severity']} {f['kind']} x{f['count']} file={f['file']} tensor={f['tensor']} "
                         f"key={f['key']} expected={f['expected']} found={f['found']}: {f['text']}"
                         for f in self.findings) or "    (no finding)"

    def says(self, *texts, where="both"):
        """Text output or messages mention every text."""
        hay = {"both": self.text + self.err, "out": self.text, "err": self.err}[where]
        for text in texts:
            if not mentions(hay, text):
                raise Fail(f"{self.line()}: {where} does not mention {text!r}\n{self.tail()}")
        return self

    def silent(self):
        if self.out:
            raise Fail(f"{self.line()}: standard output is not empty\n{self.tail()}")
        return self


class Case:
    """The programs in bin_dir and a fresh folder."""

    def __init__(self, bin_dir, folder):
        self.bin, self.dir = pathlib.Path(bin_dir).resolve(), pathlib.Path(folder)
        self.n, self.notes = 0, []

    def part_skipped(self, why):
        """A part of the case cannot run here: said aloud, the rest counts."""
        self.notes.append(why)

    def path(self, name=None):
        if name is None:
            self.n += 1
            name = f"d{self.n}"
        return self.dir / name

    def write(self, ckpt, name=None, **how):
        return ckpt.write(self.path(name), **how)

    def run(self, command, *args, code=0, json=False, stdin=b"", measure=False, timeout=120, env=None, cwd=None):
        program = self.bin / f"qx-{command}" if command != "qx" else self.bin / "qx"
        if not program.exists():
            raise Skip(f"no {program.name} in {self.bin}")
        argv = [str(program)] + [str(a) for a in args] + (["--json"] if json else [])
        full = argv
        report = self.dir / "measured"
        if measure:
            full = [sys.executable, "-S", "-E", "-c", MEASURE, str(report)] + argv
            # meson has malloc write a pattern: buffers that nobody touches would count as used
            env = {k: v for k, v in (os.environ if env is None else env).items() if k != "MALLOC_PERTURB_"}
        try:
            p = subprocess.run(full, input=stdin, capture_output=True, timeout=timeout, env=env,
                               cwd=cwd or self.dir,
                               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
        except subprocess.TimeoutExpired:
            raise Fail(f"{' '.join(argv)}: still running after {timeout} s") from None
        r = Result([f"qx-{command}" if command != "qx" else "qx"] + list(args) + (["--json"] if json else []),
                   p.returncode, p.stdout, p.stderr)
        if measure and report.exists():
            peak, rchar, cpu = report.read_text().split()
            r.peak, r.rchar, r.cpu_s = int(peak), int(rchar), float(cpu)
        if p.returncode < 0 or p.returncode > 127:
            raise Fail(f"{r.line()}: ended by a signal\n{r.tail()}")
        if "Sanitizer" in r.err or "runtime error:" in r.err:
            raise Fail(f"{r.line()}: a sanitizer spoke\n{r.err[-4000:]}")
        wanted = code if isinstance(code, tuple) else (code,)
        if code is not None and p.returncode not in wanted:
            raise Fail(f"{r.line()}: exit {p.returncode}, expected {code}\n{r.tail()}")
        if p.returncode == 2:
            r.silent()
        if any(b < 32 and b not in (9, 10, 13) or b == 127 for b in p.stdout) and "raw-bytes" not in (env or {}) \
                and command in ("inspect", "verify"):
            raise Fail(f"{r.line()}: raw control bytes on standard output\n{r.tail()}")
        if json and p.returncode != 2 and (p.stdout or command not in MANY):
            try:
                r.docs = schema.documents(p.stdout)
            except (schema.SchemaError, ValueError) as e:
                raise Fail(f"{r.line()}: {e}\n{r.tail()}") from None
            if len(r.docs) > 1 and command not in MANY and "--batch" not in args:
                raise Fail(f"{r.line()}: {len(r.docs)} documents, expected one")
            failed = any(d["schema"] == "qx.error/1" for d in r.docs)
            if failed != (p.returncode >= 3):
                raise Fail(f"{r.line()}: qx.error/1 {'with' if failed else 'missing at'} exit {p.returncode}\n"
                           f"{r.tail()}")
        return r

    # --- the usual questions -------------------------------------------------------------

    def verify(self, path, *args, code=0, **how):
        return self.run("verify", path, *args, code=code, json=True, **how)

    def inspect(self, path, *args, code=0, **how):
        return self.run("inspect", path, *args, code=code, json=True, **how)

    def fails(self, command, path, *args, code=3, kind=None, says=(), **how):
        """The command ends with this code; with --json it says why in a qx.error/1 object."""
        r = self.run(command, path, *args, code=code, json=True, **how)
        if code >= 3:
            d = r.docs[0] if command in MANY else r.doc
            kinds = kind if isinstance(kind, tuple) else (kind,)
            if kind and d["kind"] not in kinds:
                raise Fail(f"{r.line()}: error of kind {d['kind']!r}, expected {kind!r}: {d['text']}")
            hay = json.dumps(d, ensure_ascii=False) + r.err
        else:
            hay = r.err
            if kind and not any(k in hay for k in (kind if isinstance(kind, tuple) else (kind,))):
                raise Fail(f"{r.line()}: the message does not name {kind}: {hay}")
        for text in ([says] if isinstance(says, str) else says):
            if not mentions(hay, text):
                raise Fail(f"{r.line()}: the error does not mention {text!r}: {hay}")
        return r

    def rows(self, path, *args, code=0, **how):
        """decode-rows as a list of records."""
        return self.run("decode-rows", path, *args, code=code, json=True, **how).docs

    def values(self, path, row, *args, **how):
        return [float(np.float32(v)) for v in self.rows(path, "--rows", str(row), *args, **how)[0]["values"]]

    def generate(self, path, *args, code=0, **how):
        return self.run("run", path, *args, "--device", "cpu", code=code, json=True, **how)

    def resolved(self, path):
        """inspect's modules, by module name."""
        return {m["module"]: m for m in self.inspect(path).doc["quantization"]["modules"]}

    def has_gpu(self):
        return shutil.which("nvidia-smi") is not None and subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True).returncode == 0

    def resident(self, path):
        """Bytes of a file in the page cache."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                              ctypes.c_long]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        size, page = os.path.getsize(path), os.sysconf("SC_PAGE_SIZE")
        pages = -(-size // page)
        present = (ctypes.c_ubyte * pages)()
        with open(path, "rb") as f:
            at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, f.fileno(), 0)
            fails = libc.mincore(at, size, present)
            libc.munmap(at, size)
        if fails:
            raise Skip("no mincore here")
        return page * sum(b & 1 for b in bytes(present))

    def drop_cache(self, path):
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
