#!/usr/bin/env python3
"""The n-gram table of the released size on the device, on the host and on disk: the same tokens, and memory as planned.

usage: placements.py QX_RUN DIRECTORY [--layout nvfp4-ple] [--device cuda] [--ctx 8192] [-n 64] [--layers 4]
                     [--experts 16] [--only-make]

Makes (or takes) a sparse checkpoint of the released widths and table in DIRECTORY (tests/gen/big.py) with few layers
and experts, and fills what tokens depend on with random values: the whole table, the PLE projections, embedding, head
and the last mixer; the layers stay zero. Generates from one prompt with each placement and demands equal tokens that
are not all alike, device memory within 2 % of the plan or 256 MiB, and no wait and no allocation in decoding with the
table on the device or the host. The table of nvfp4-ple takes 29 GB of DIRECTORY (and, placed on the host, of memory),
that of mixed 51 GB. Memory is counted for the whole device: nothing else may run on it (--only-make needs no device).
A file DIRECTORY.filled says that DIRECTORY is whole and may be taken, whatever --layout, --layers and --experts say then.
"""
import argparse
import collections
import functools
import json
import multiprocessing
import os
import pathlib
import struct
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / 'gen'))
import big  # noqa: E402
from t0 import L, NG, PLE  # noqa: E402

BLOCK = 32 << 20


@functools.cache
def pattern(kind):
    """BLOCK bytes of one kind: BF16 of deviation 0.02, E4M3 without NaN, block scales 0.5 to 2, a
    global scale of NVFP4, or any nibbles."""
    g = np.random.default_rng(len(kind))
    if kind == 'bf16':
        return ((g.standard_normal(BLOCK // 2, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype('<u2').tobytes()
    b = g.integers(0, 256, BLOCK, dtype=np.uint8)
    if kind == 'scale':
        b = 0x30 + (b & 15)
    elif kind == 'global':
        b = np.full(BLOCK // 4, 0.05, '<f4')
    elif kind == 'e4m3':
        b = np.where(b & 0x7f == 0x7f, 0, b).astype(np.uint8)
    return b.tobytes()


def kind_of(name, dtype):
    if name == NG + 'weight_scale_2':
        return 'global'
    if name.startswith(NG + 'shard_'):
        return {'U8': 'nibbles', 'BF16': 'bf16'}.get(dtype, 'scale' if name.endswith('_scale') else 'e4m3')
    wanted = (PLE + 'key_proj', PLE + 'value_proj', L + 'embed_tokens', 'lm_head', L + 'hyper_connection_mixer.input')
    return 'bf16' if dtype == 'BF16' and name.startswith(wanted) else None


def fill(job):
    path, start, size, kind, turn = job
    data = np.frombuffer(pattern(kind), np.uint8)
    with open(path, 'r+b', buffering=0) as f:
        for at in range(0, size, BLOCK):
            turn = (turn * 1103515245 + 12345) % (1 << 31)          # every block begins elsewhere in the pattern
            shift = turn % (BLOCK // 2) * 2
            n = min(BLOCK, size - at)
            f.seek(start + at)
            f.write(np.concatenate((data[shift:], data[:shift]))[:n].tobytes())


def jobs(directory):
    todo = []
    for path in sorted(directory.glob('*.safetensors')):
        with open(path, 'rb') as f:
            (n,) = struct.unpack('<Q', f.read(8))
            head = json.loads(f.read(n))
        for name, t in head.items():
            kind = kind_of(name, t.get('dtype', ''))
            if kind and 'data_offsets' in t:
                a, b = t['data_offsets']
                todo.append((path, 8 + n + a, b - a, kind, len(todo) + 1))
    return todo


def make(a):
    big.LAYERS, big.EXPERTS = a.layers, a.experts
    t, _ = big.tensors(a.layout)
    big.EXPECTED[a.layout] = (len(t), sum(x.n_bytes for x in t.values()),
                              dict(collections.Counter(x.dtype for x in t.values())))
    big.make(a.layout, a.directory)


def generate(a, tokens, extra):
    cmd = [a.qx_run, str(a.directory), '--device', a.device, '--tokens', ','.join(map(str, tokens)), '-n', str(a.n),
           '--greedy', '--ignore-eos', '--json', '-q'] + extra
    p = subprocess.run(cmd, capture_output=True, text=True, check=False)
    if p.returncode:
        sys.exit(f'{" ".join(extra)}: exit {p.returncode}: {p.stderr[-400:]}{p.stdout[-400:]}')
    return json.loads(p.stdout.splitlines()[-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('qx_run')
    ap.add_argument('directory', type=pathlib.Path)
    ap.add_argument('--layout', default='nvfp4-ple')
    ap.add_argument('--device', default='cuda')
    ap.add_argument('--ctx', type=int, default=8192)
    ap.add_argument('--layers', type=int, default=4)
    ap.add_argument('--experts', type=int, default=16)
    ap.add_argument('-n', type=int, default=64)
    ap.add_argument('--only-make', action='store_true')
    a = ap.parse_args()
    start = time.time()
    filled = a.directory.with_name(a.directory.name + '.filled')
    if not (filled.exists() and (a.directory / 'config.json').exists()):
        make(a)
        with multiprocessing.Pool(min(12, os.cpu_count())) as pool:
            pool.map(fill, jobs(a.directory), chunksize=1)
        filled.touch()
        print(f'made in {time.time() - start:.1f} s', flush=True)
    if a.only_make:
        return 0
    tokens = [int(v) for v in np.random.default_rng(5).integers(2, 248000, 48)]
    ok, first = True, None
    for table in ('device', 'host', 'disk'):
        start = time.time()
        j = generate(a, tokens, ['--table', table, '--ctx', str(a.ctx)])
        t, m, got = j['timing'], j['memory'], j['tokens']
        first = first or got
        off = m['device_used_bytes'] - m['planned_bytes']
        waits, allocs = t['decode_waits'], t['decode_allocations']
        good = (got == first and len(set(got)) > a.n // 8 and abs(off) <= max(m['planned_bytes'] / 50, 256 << 20)
                and (table == 'disk' or waits == allocs == 0))
        ok = ok and good
        print(f'table on {table} ({time.time() - start:.1f} s): {len(got)} tokens, {len(set(got))} different, '
              f'{"equal" if got == first else "NOT EQUAL"}; {m["device_used_bytes"] / 2**30:.2f} GiB used, '
              f'{m["planned_bytes"] / 2**30:.2f} planned ({off / 2**20:+.0f} MiB), host {m["host_peak_bytes"] / 2**30:.2f} GiB; '
              f'{waits} waits and {allocs} allocations in decoding' + ('' if good else '  BAD'), flush=True)
    return 0 if ok else 1


if __name__ == '__main__':
    sys.exit(main())
