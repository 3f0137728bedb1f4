"""decode-rows against the expected rows of the fixtures: every dtype and format, bit for bit.

usage: fixtures.py BUILD FIXTURES...   (folders that hold checkpoints with expected/)
"""
import json
import os
import subprocess
import sys

import numpy as np

build, roots = sys.argv[1], sys.argv[2:]
program = os.path.join(build, 'qx-decode-rows')


def run(*args):
    p = subprocess.run([program, *args], capture_output=True)
    assert p.returncode == 0, (args, p.returncode, p.stderr.decode())
    return p.stdout


def npy(b):
    import io
    return np.load(io.BytesIO(b))


checked = 0
for root in roots:
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        file = os.path.join(path, 'expected', 'expected.json')
        if not os.path.exists(file):
            continue
        exp = json.load(open(file))
        rows = exp['table_rows']
        bits = np.load(os.path.join(path, 'expected', 'table_rows_bf16_bits.npy'))
        exact = np.load(os.path.join(path, 'expected', 'table_rows_f64.npy'))
        arg = ','.join(map(str, rows))
        f32 = npy(run(path, '--rows', arg, '--format', 'npy'))
        assert f32.dtype == np.float32 and f32.shape == exact.shape
        # One rounding of the exact value.
        assert (f32 == exact.astype(np.float32)).all(), name
        bf16 = npy(run(path, '--rows', arg, '--format', 'npy', '--dtype', 'bf16'))
        zero = (bits & 0x7fff) == 0
        assert ((bf16 == bits) | (zero & ((bf16 & 0x7fff) == 0))).all(), name
        lines = run(path, '--rows', arg, '--format', 'hex').decode().splitlines()
        for row, line, want in zip(rows, lines, bf16):
            assert line == f'{row} ' + ' '.join(f'{v:04x}' for v in want)
        for i, line in enumerate(run(path, '--rows', arg, '--json').decode().splitlines()):
            d = json.loads(line)
            assert list(d)[0] == 'schema' and d['schema'] == 'qx.rows/1' and d['row'] == rows[i]
            assert (np.array(d['values'], dtype=np.float32) == f32[i]).all()
        text = run(path, '--rows', arg).decode().splitlines()
        assert len(text) == len(rows)
        for line, want in zip(text, f32):
            assert (np.array(line.split(': ')[1].split(), dtype=np.float32) == want).all()
        for prompt, p in exp['prompts'].items():
            a, b = p['ple_row_positions']
            want = np.load(os.path.join(path, 'expected', prompt + '.ple_rows.npy'))
            out = run(path, '--tokens', ','.join(map(str, p['tokens'])), '--json').decode()
            got = {}
            for line in out.splitlines():
                d = json.loads(line)
                got[d['position'], d['head']] = d['row']
            assert all(got[a + i, h] == want[i, h] for i in range(b - a) for h in range(want.shape[1]))
        checked += 1
print(f'{checked} checkpoints')
sys.exit(0 if checked else 1)
