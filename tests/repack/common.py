"""Shared by the repack tests: running the programs, reading what they wrote without them."""
import filecmp
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / 'gen'))
import t0 as gen  # noqa: E402

build = pathlib.Path(sys.argv[1]).resolve()
NG = gen.NG


def run(name, *args, code=0, **kw):
    p = subprocess.run([str(build / ('qx-' + name)), *map(str, args)], capture_output=True, **kw)
    if p.returncode != code:
        sys.exit(f"qx-{name} {' '.join(map(str, args))}: exit {p.returncode}, expected {code}\n"
                 f"{p.stderr.decode(errors='replace')[-2000:]}")
    return p


def repack(src, out, *args, code=0):
    p = run('repack', src, '-o', out, '--json', *args, code=code)
    return json.loads(p.stdout) if p.stdout else None


def check(what, ok):
    if not ok:
        sys.exit(f'{what}: no')


def rows(path, n, dtype='bf16', first=0):
    import io
    return np.load(io.BytesIO(run('decode-rows', path, '--rows', f'{first}-{first + n - 1}', '--dtype', dtype,
                                  '--format', 'npy').stdout))


def header(path):
    with open(path, 'rb') as f:
        n = struct.unpack('<Q', f.read(8))[0]
        return json.loads(f.read(n)), 8 + n


def tensors(directory):
    """name -> (dtype, shape, bytes) of every indexed tensor."""
    d = pathlib.Path(directory)
    index = d / 'model.safetensors.index.json'
    where = json.loads(index.read_text())['weight_map']
    out = {}
    for file in sorted(set(where.values())):
        head, data = header(d / file)
        raw = (d / file).read_bytes()
        for name, t in head.items():
            if name != '__metadata__' and where.get(name) == file:
                a, b = t['data_offsets']
                out[name] = (t['dtype'], t['shape'], raw[data + a:data + b])
    return out


def table(t, n_rows):
    """The whole table decoded from the written bytes, by this file's own arithmetic: f32 [rows, width]."""
    shards = sorted((int(n.split('shard_')[1].split('.')[0]), n) for n in t
                    if '.shard_' in n and n.endswith('.weight'))
    parts = []
    for _, name in shards:
        dtype, shape, raw = t[name]
        if dtype == 'BF16':
            parts.append(gen.bf16_value(np.frombuffer(raw, '<u2')).reshape(shape))
        elif dtype == 'F8_E4M3':
            scale_type, _, s = t[NG + 'weight_scale']
            s = gen.bf16_value(np.frombuffer(s, '<u2'))[0] if scale_type == 'BF16' else np.frombuffer(s, '<f4')[0]
            parts.append((gen.E4M3[np.frombuffer(raw, 'u1')] * np.float64(s)).astype(np.float32).reshape(shape))
        else:
            codes = np.frombuffer(raw, 'u1').reshape(shape)
            pair = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape[0], -1)
            block = gen.E4M3[np.frombuffer(t[name + '_scale'][2], 'u1')].reshape(shape[0], -1)
            glob = np.float64(np.frombuffer(t[NG + 'weight_scale_2'][2], '<f4')[0])
            parts.append((gen.E2M1[pair] * np.repeat(block, 16, axis=1) * glob).astype(np.float32))
    whole = np.concatenate(parts)
    check('rows of the table', whole.shape[0] == n_rows)
    return whole


def same_tree(a, b):
    names = sorted(os.listdir(a))
    check(f'{a} and {b} list the same files', names == sorted(os.listdir(b)))
    for n in names:
        check(f'{n} is equal in {a} and {b}', filecmp.cmp(os.path.join(a, n), os.path.join(b, n), shallow=False))


def clean(path, allow=()):
    """verify finds nothing but what the source had."""
    doc = json.loads(run('verify', path, '--json').stdout)
    extra = [f for f in doc['findings'] if f['kind'] not in allow]
    check(f'verify {path}: {[(f["kind"], f["text"]) for f in extra]}', not extra)
