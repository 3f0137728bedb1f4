#!/usr/bin/python3
"""An external decoder for `qx verify --decoder`: rows of stored matrices as bfloat16 bit patterns.

    qx_decode.py PATH TENSOR < row numbers, one a line

answers one line per row: the number, then the row's values as four hex digits each. TENSOR is a weight
tensor, or the module of the n-gram table (`...ple_embedding.ngram_embedding`), whose rows are then those
of all its shards in numeric order.

Needs numpy only. Every value is an exact product in float64: a code has at most 4 significant bits, an
E4M3 scale 4, a global scale 24, together less than the 53 that a float64 holds, and all exponents are
far inside its range. It is then rounded once to float32 and once more to bfloat16, nearest even.
Written from the description of the formats, not from the library's sources."""

import json
import os
import sys

import numpy as np

E2M1 = np.array([s * m for s in (1.0, -1.0) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])


def e4m3(byte):
    """Value of one E4M3 code: bias 7, no infinities, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    value = np.ldexp(mantissa, -9) if exponent == 0 else np.ldexp(8 + mantissa, exponent - 10)
    return -value if sign else value


E4M3 = np.array([e4m3(b) for b in range(256)])
E8M0 = np.array([np.ldexp(1.0, b - 127) if b < 255 else float("nan") for b in range(256)])


def bf16_bits(x):
    """float64 -> float32 -> bfloat16 bit patterns, nearest even both times."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype("<f4").view("<u4").astype(np.uint64)
    up = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0x7FC0, up).astype(np.uint32)


def numbers(raw, dtype):
    """Stored floating numbers as float64."""
    raw = np.frombuffer(raw, np.uint8)
    if dtype == "F8_E4M3":
        return E4M3[raw]
    if dtype == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return raw.view({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float64)


SIZE = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8}


class Tensor:
    def __init__(self, path, base, entry, meta):
        self.path, self.dtype, self.shape, self.meta = path, entry["dtype"], entry["shape"], meta
        self.begin = base + entry["data_offsets"][0]
        self.bytes = entry["data_offsets"][1] - entry["data_offsets"][0]

    def read(self, off, n):
        if off + n > self.bytes:
            raise ValueError(f"bytes {off} to {off + n} of {self.bytes}")
        with open(self.path, "rb") as f:
            f.seek(self.begin + off)
            raw = f.read(n)
        if len(raw) != n:
            raise ValueError(f"{self.path} is too short")
        return raw

    def all(self):
        return numbers(self.read(0, self.bytes), self.dtype)


class Checkpoint:
    """Names to tensors; headers are read when a name in them is asked for."""

    def __init__(self, path):
        self.headers, self.tensors = {}, {}
        index = path if path.endswith(".json") else os.path.join(path, "model.safetensors.index.json")
        if os.path.isfile(path) and not path.endswith(".json"):
            self.map = None
            files = [path]
        elif os.path.isfile(index):
            with open(index, encoding="utf-8") as f:
                self.map = json.load(f)["weight_map"]
            self.dir, files = os.path.dirname(index) or ".", []
        else:
            self.map = None
            files = [os.path.join(path, f) for f in sorted(os.listdir(path)) if f.endswith(".safetensors")]
        for f in files:
            self.header(f)

    def header(self, path):
        if path in self.headers:
            return
        self.headers[path] = True
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            entries = json.loads(f.read(n))
        meta = entries.pop("__metadata__", {})
        for name, entry in entries.items():
            if self.map is None or self.map.get(name) == os.path.relpath(path, self.dir):
                self.tensors[name] = Tensor(path, 8 + n, entry, meta)

    def get(self, name):
        if name not in self.tensors and self.map is not None and name in self.map:
            self.header(os.path.join(self.dir, self.map[name]))
        return self.tensors.get(name)

    def names(self):
        return self.map if self.map is not None else self.tensors


class Matrix:
    """One stored matrix [.., rows, columns] and what multiplies it; local rows e x R + r."""

    def __init__(self, weight, scale, scale_inv, scale_2):
        self.weight, self.factor = weight, None
        self.rows = weight.shape[-2] if len(weight.shape) > 1 else 1
        last = weight.shape[-1] if weight.shape else 1
        stack = weight.shape[0] if len(weight.shape) == 3 else 1
        self.packed = weight.dtype == "U8"
        self.columns = last * 2 if self.packed else last
        if len(weight.shape) > 3 or weight.dtype not in SIZE:
            raise ValueError(f"cannot decode {weight.dtype} {weight.shape}")
        self.row_bytes = last * SIZE[weight.dtype]
        self.scale, self.group, self.block = None, 0, None
        if self.packed:
            if scale is None or scale_2 is None:
                raise ValueError("weight_scale or weight_scale_2 is missing")
            self.scale, self.group, self.table, self.factor = scale, 16, E4M3, scale_2.all()
        elif weight.dtype == "F8_E4M3":
            blocks = (-(-self.rows // 128), -(-self.columns // 128))
            if scale is not None and scale.dtype in ("U8", "F8_E8M0"):
                self.scale, self.group, self.table = scale, 32, E8M0
            elif scale_inv is not None or (scale is not None and np.prod(scale.shape) > max(stack, 1)):
                values = (scale_inv or scale).all()
                if values.size != stack * blocks[0] * blocks[1]:
                    raise ValueError("block scales do not fit")
                self.block = values.reshape(stack * blocks[0], blocks[1])
                self.block_rows = blocks[0]
            elif scale is not None:
                self.factor = scale.all()
            else:
                raise ValueError("its scale is missing")

    def row(self, r):
        raw = np.frombuffer(self.weight.read(r * self.row_bytes, self.row_bytes), np.uint8)
        if self.packed:
            x = E2M1[np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)]
        else:
            x = numbers(raw.tobytes(), self.weight.dtype)
        if self.scale is not None:
            n = -(-self.columns // self.group)
            s = self.table[np.frombuffer(self.scale.read(r * n, n), np.uint8)]
            x = x * np.repeat(s, self.group)[: self.columns]
        if self.block is not None:
            e, local = divmod(r, self.rows)
            x = x * np.repeat(self.block[e * self.block_rows + local // 128], 128)[: self.columns]
        if self.factor is not None:
            x = x * self.factor[r // self.rows if self.factor.size > 1 else 0]
        return x


class RowLayout:
    """The table in qx's own layout: blocks of whole rows, each its codes and then its block scales."""

    def __init__(self, tensor, module, get):
        fields = dict(f.split("=", 1) for f in tensor.meta["qx-pack"].replace(";", " ").split() if "=" in f)
        form, self.columns = fields["format"], int(fields["width"])
        self.block = int(fields["block_bytes"])
        self.tensor, self.count, self.factor = tensor, int(fields["rows"]), 1.0
        self.dtype = {"FP8": "F8_E4M3"}.get(form, form)
        self.packed = form == "NVFP4"
        self.codes = self.columns // 2 if self.packed else self.columns * SIZE[self.dtype]
        self.scales = self.columns // 16 if self.packed else 0
        self.per_block = self.block // (self.codes + self.scales)
        if form in ("FP8", "NVFP4"):
            self.factor = get(module + (".weight_scale_2" if self.packed else ".weight_scale")).all()[0]

    def row(self, r):
        if r >= self.count:
            raise ValueError(f"row {r} of {self.count}")
        at = r // self.per_block * self.block + r % self.per_block * (self.codes + self.scales)
        raw = self.tensor.read(at, self.codes + self.scales)
        if not self.packed:
            return numbers(raw, self.dtype) * self.factor
        codes = np.frombuffer(raw[: self.codes], np.uint8)
        x = E2M1[np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)]
        return x * np.repeat(E4M3[np.frombuffer(raw[self.codes :], np.uint8)], 16) * self.factor


class Table:
    """Shards of the n-gram table as one matrix."""

    def __init__(self, module, ckpt):
        shards, prefix = {}, module + ".shard_"
        for name in ckpt.names():
            if name.startswith(prefix) and name.endswith(".weight"):
                shards[int(name[len(prefix) : -len(".weight")])] = name
        if not shards:
            raise ValueError("there is no such tensor and no such table")
        self.shards, self.open, self.get = shards, {}, ckpt.get
        self.scale, self.scale_2 = ckpt.get(module + ".weight_scale"), ckpt.get(module + ".weight_scale_2")
        self.per_shard = ckpt.get(shards[min(shards)]).shape[0]

    def row(self, r):
        k, local = divmod(r, self.per_shard)
        if k not in self.open:
            weight = self.get(self.shards[k])
            scale = self.get(self.shards[k][: -len("weight")] + "weight_scale") or self.scale
            self.open[k] = Matrix(weight, scale, None, self.scale_2)
        return self.open[k].row(local)


def find(path, name):
    ckpt = Checkpoint(path)
    weight = ckpt.get(name)
    if weight is not None and ".shard_" in name:
        table = name[: name.rindex(".shard_")]
        base = name[: -len("weight")]
        return Matrix(weight, ckpt.get(base + "weight_scale") or ckpt.get(table + ".weight_scale"), None,
                      ckpt.get(table + ".weight_scale_2"))
    if weight is not None:
        base = name[: -len("weight")] if name.endswith(".weight") else name + "."
        return Matrix(weight, *(ckpt.get(base + s) for s in ("weight_scale", "weight_scale_inv",
                                                             "weight_scale_2")))
    packed = ckpt.get(name + ".packed_rows")
    if packed is not None:
        return RowLayout(packed, name, ckpt.get)
    return Table(name, ckpt)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: qx_decode.py PATH TENSOR < rows")
    matrix = find(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        row = int(line)
        print(row, " ".join(f"{v:04x}" for v in bf16_bits(matrix.row(row))), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError) as e:
        sys.exit(f"qx_decode.py: {e}")
