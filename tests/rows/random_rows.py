"""Many random rows at once, from a cold and from a warm page cache, equal the written bytes decoded here, and
are the same whatever else is asked for with them.

usage: random.py BUILD
"""
import io
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

here = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(here.parent / 'repack'), str(here.parent / 'bench')]
from common import check, repack, run, table, tensors  # noqa: E402
import tables  # noqa: E402


def ask(path, rows, *args):
    p = subprocess.run([str(pathlib.Path(sys.argv[1]) / 'qx-decode-rows'), str(path), '--rows=-', '--format', 'npy',
                        *args], input='\n'.join(map(str, rows)).encode(), capture_output=True)
    check(f'decode-rows {path}: {p.stderr.decode()}', p.returncode == 0)
    return np.load(io.BytesIO(p.stdout))


def forget(path):
    for f in pathlib.Path(path).iterdir():
        fd = os.open(f, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


with tempfile.TemporaryDirectory(prefix='qx-rows-', dir='/var/tmp') as tmp:
    work = pathlib.Path(tmp)
    rng = np.random.default_rng(3)
    for form in ('bf16', 'fp8', 'nvfp4'):
        src = work / form
        tables.make(src, 12, form)
        t = tensors(src)
        name = next(n for n in t if n.endswith('shard_0.weight'))
        n = t[name][1][0]
        whole = table(t, n)
        ids = rng.integers(0, n, 6000)
        ids = np.concatenate([ids, rng.choice(ids, 2000), [0, n - 1, n - 1, 0]])
        packed = work / (form + '-row')
        repack(src, packed, '--layout', 'row')
        for path in (src, packed):
            forget(path)
            cold = ask(path, ids)
            warm = ask(path, ids)
            check(f'{path}: cold rows', (cold == whole[ids]).all())
            check(f'{path}: warm rows', (warm == whole[ids]).all())
            few = ask(path, ids[:40])
            check(f'{path}: a row alone is the same row', (few == whole[ids[:40]]).all())
            raw = ask(path, ids, '--dtype', 'raw')
            codes = np.frombuffer(t[name][2], 'u1').reshape(n, -1)
            check(f'{path}: raw codes', (raw == codes[ids]).all())
print('random rows: ok')
