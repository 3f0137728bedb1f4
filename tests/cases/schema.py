"""The JSON documents of qx, as qx-json(5) promises them, and a strict reader.

check(document) raises SchemaError for a missing key, a wrong type or an unknown schema; keys beyond
those listed are allowed, since keys may be added within a number.
"""
import json

KINDS = ("embed", "lm_head", "hyper_connections", "linear_attn", "self_attn", "router", "shared_expert", "experts",
         "ple", "ple_table", "mtp", "vision", "other")
FORMATS = ("BF16", "F16", "F32", "I64", "FP8", "FP8_BLOCK", "MXFP8", "NVFP4", "W4A16_NVFP4", "mixed")
SOURCES = ("map", "ple_embedding_dtype", "modules_to_convert", "ignore", "modules_to_not_convert", "default", "storage")
LAYOUTS = ("bf16", "fp8", "nvfp4-ple", "mixed", "nvfp4")


class SchemaError(Exception):
    pass


class Or:
    """One of several forms; None stands for null."""

    def __init__(self, *forms):
        self.forms = forms


class Enum:
    def __init__(self, *values):
        self.values = values


class ListOf:
    def __init__(self, form):
        self.form = form


class MapOf:
    def __init__(self, form):
        self.form = form


class Open:
    """Any value, but the key is there."""


U = "count"        # integer >= 0
F = "number"       # integer or float, or one of the three words
S = "string"
B = "bool"
N = None


def form_fails(value, form, at):
    """Why value is not of form, or None."""
    if isinstance(form, Open):
        return None
    if isinstance(form, Or):
        why = [form_fails(value, f, at) for f in form.forms]
        return None if None in why else why[0]
    if isinstance(form, Enum):
        return None if value in form.values else f"{at}: {value!r} is none of {form.values}"
    if isinstance(form, ListOf):
        if not isinstance(value, list):
            return f"{at}: {type(value).__name__} where a list is due"
        for i, v in enumerate(value):
            why = form_fails(v, form.form, f"{at}[{i}]")
            if why:
                return why
        return None
    if isinstance(form, MapOf):
        if not isinstance(value, dict):
            return f"{at}: {type(value).__name__} where an object is due"
        for k, v in value.items():
            why = form_fails(v, form.form, f"{at}.{k}")
            if why:
                return why
        return None
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return f"{at}: {type(value).__name__} where an object is due"
        for k, f in form.items():
            if k not in value:
                return f"{at}: no key {k!r}"
            why = form_fails(value[k], f, f"{at}.{k}")
            if why:
                return why
        return None
    if form is None:
        return None if value is None else f"{at}: {value!r} where null is due"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    good = {"count": is_int and value >= 0,
            "number": is_int or isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity"),
            "string": isinstance(value, str), "bool": isinstance(value, bool)}[form]
    return None if good else f"{at}: {value!r} is no {form}"


FINDING = {"kind": S, "severity": Enum("error", "warning", "note"), "file": Or(S, N), "tensor": Or(S, N),
           "key": Or(S, N), "offset": Or(U, N), "expected": Or(S, N), "found": Or(S, N), "text": S, "count": U,
           "examples": ListOf(S)}
FIT = {"device_bytes": U, "needed_bytes": U, "fits": B, "parts": ListOf({"name": S, "bytes": U, "place": S}),
       "advice": Open()}
SCHEMAS = {
    "qx.inspect/1": {
        "path": S,
        "model": {"type": Or(S, N), "type_found": Or(S, N), "architecture": Or(S, N),
                  "layout": Or(Enum(*LAYOUTS), N), "layers": Or(U, N), "hidden_size": Or(U, N),
                  "experts": Or(U, N), "vocab_size": Or(U, N)},
        "files": ListOf({"name": S, "bytes": U, "header_bytes": Or(U, N), "tensors": Or(U, N)}),
        "tensors": {"count": U, "payload_bytes": U, "by_dtype": MapOf({"tensors": U, "bytes": U})},
        "components": ListOf({"name": Enum(*KINDS), "tensors": U, "bytes": U, "format": Or(S, N), "source": Or(S, N)}),
        "quantization": Or({"method": Or(S, N), "algo": Or(S, N), "source": Or(S, N),
                            "modules": ListOf({"module": S, "format": Enum(*FORMATS), "group_size": Or(U, N),
                                               "source": Enum(*SOURCES), "entry": Or(S, N)})}, N),
        "ple": Or({"layer_index": U, "rows": U, "row_width": U, "form": Or(S, N), "shards": Or(U, N), "bytes": Or(U, N),
                   "scale": Or(F, N), "head_sizes": ListOf(U), "multipliers": ListOf(U)}, N),
        "mtp": Or({"present": B, "format": Or(S, N)}, N),
        "warnings": ListOf(FINDING), "fit": Or(FIT, N)},
    "qx.diff/1": {"path": S, "other": S, "equal": B, "differences": ListOf(FINDING)},
    "qx.verify/1": {
        "path": S, "status": Enum("ok", "findings"), "level": Enum("headers", "scales", "full"),
        "checked": {"files": U, "tensors": U, "bytes": U, "rows": U},
        "counts": {"error": U, "warning": U, "note": U}, "findings": ListOf(FINDING)},
    "qx.rows/1": {"tensor": S, "row": U, "shard": Or(U, N), "local_row": U, "token": Or(U, N), "position": Or(U, N),
                  "head": Or(U, N)},
    "qx.repack/1": {"path": S, "output": S, "mode": Enum("repack", "archive", "restore"), "dry_run": B,
                    "plan": {"bytes_in": U, "bytes_out": U, "files": U, "peak_memory_bytes": U, "free_bytes": U}},
    "qx.run/1": {
        "prompt_tokens": ListOf(U), "tokens": ListOf(U), "text": Or(S, N),
        "stop_reason": Enum("stop", "length", "context", "interrupted"),
        "timing": {"load_s": F, "ttft_s": Or(F, N), "prefill_tok_s": Or(F, N), "decode_tok_s": Or(F, N)},
        "draft": Or({"k": U, "rounds": U, "accepted": U, "acceptance_length": Or(F, N)}, N),
        "memory": {"host_peak_bytes": U, "device_peak_bytes": Or(U, N), "planned_bytes": Or(U, N)},
        "logit_positions": Or(ListOf(U), N)},
    "qx.bench/1": {"kind": Enum("decode", "prefill", "round", "workload", "op")},
    "qx.error/1": {"kind": S, "text": S, "file": Or(S, N), "tensor": Or(S, N), "offset": Or(U, N)},
}


def strict_loads(text):
    """JSON with nothing bent: no duplicate keys, no NaN words, valid UTF-8, no raw control bytes."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")

    def pairs(items):
        keys = [k for k, _ in items]
        if len(set(keys)) != len(keys):
            raise SchemaError(f"duplicate key in {keys}")
        return dict(items)

    def word(w):
        raise SchemaError(f"bare word {w}")

    return json.loads(text, object_pairs_hook=pairs, parse_constant=word, strict=True)


def check(doc):
    if not isinstance(doc, dict) or not doc:
        raise SchemaError(f"no object: {doc!r}")
    if next(iter(doc)) != "schema":
        raise SchemaError(f"first key is {next(iter(doc))!r}, not 'schema'")
    form = SCHEMAS.get(doc["schema"])
    if form is None:
        raise SchemaError(f"unknown schema {doc['schema']!r}")
    why = form_fails(doc, form, doc["schema"])
    if why:
        raise SchemaError(why)
    if doc["schema"] == "qx.rows/1" and ("values" in doc) == ("hex" in doc):
        raise SchemaError("a row has either values or hex")
    if doc["schema"] == "qx.verify/1":
        for severity, n in doc["counts"].items():
            listed = sum(f["severity"] == severity for f in doc["findings"])
            if (n == 0) != (listed == 0):
                raise SchemaError(f"counts.{severity} is {n} with {listed} findings")
        if (doc["status"] == "findings") != (doc["counts"]["error"] > 0):
            raise SchemaError(f"status {doc['status']} with {doc['counts']['error']} errors")
    if doc["schema"] == "qx.inspect/1":
        names = [f["name"] for f in doc["files"]]
        if names != sorted(names):
            raise SchemaError("files are not sorted by name")


def documents(text):
    """Every document of a --json output: one a line, each checked. The output ends in a newline."""
    if not text.endswith(b"\n"):
        raise SchemaError("no newline at the end")
    whole = text.decode("utf-8")
    try:
        docs = [strict_loads(whole)]
    except json.JSONDecodeError:
        docs = [strict_loads(line) for line in whole.splitlines()]
    for d in docs:
        check(d)
    return docs
