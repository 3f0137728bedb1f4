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
import time

import numpy as np

here = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(here.parent / 'repack'), str(here.parent / 'bench')]
from common import check, gen, header, repack, table, tensors  # noqa: E402
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
    # A table too large to stay mapped, nearly all of it a hole: rows in memory are mapped and read in turns.
    config = gen.t0_config()
    config['text_config'].update(ple_embed_dim=640, ngram_vocab_size_base=6750000, split_ngram_parts=1)
    for form, codes_row in (('fp8', 160), ('nvfp4', 80)):
        c = gen.build(config, table=form, sparse_table=True)
        src = work / ('large-' + form)
        names = [n for n in c.tensors if n.startswith(gen.NG + 'shard_0.weight')]
        c.write(src, shards={'model-00001-of-00002.safetensors': [n for n in c.tensors if n not in names],
                             'model-00002-of-00002.safetensors': names})
        head, data = header(src / 'model-00002-of-00002.safetensors')
        n = head[names[0]]['shape'][0]
        ids = rng.integers(0, n, 20000)
        values = rng.integers(0, 100, (len(ids), codes_row), dtype=np.uint8)
        with open(src / 'model-00002-of-00002.safetensors', 'r+b') as f:
            for name in names:
                width = head[name]['shape'][1]
                for r, v in zip(ids[::8], values[::8]):  # the others stay holes
                    f.seek(data + head[name]['data_offsets'][0] + int(r) * width)
                    f.write(v[:width].tobytes())
        again = np.concatenate([ids, ids[::3]])
        (work / 'ids').write_text('\n'.join(map(str, again)))
        forget(src)
        for k in range(3):
            peak = 0
            with open(work / 'rows.npy', 'wb') as o, open(work / 'ids') as i:
                p = subprocess.Popen([str(pathlib.Path(sys.argv[1]) / 'qx-decode-rows'), str(src), '--rows=-',
                                      '--format', 'npy', '-j', str(1 + k)], stdin=i, stdout=o)
                while p.poll() is None:  # wait4 would count what Python had mapped before the exec
                    status = pathlib.Path(f'/proc/{p.pid}/status').read_text()
                    if 'Name:\tqx-decode-rows' in status and 'VmHWM:' in status:
                        peak = max(peak, int(status.split('VmHWM:')[1].split()[0]))
                    time.sleep(0.005)
            check(f'decode-rows {src}', p.returncode == 0)
            got = np.load(work / 'rows.npy')
            check(f'{form}: peak memory {peak} KiB', peak < 192 << 10)
            if k == 0:
                first = got
            check(f'{form}: run {k} gives the same rows', np.array_equal(got, first))
        check(f'{form}: repeated rows', np.array_equal(first[:20000:3], first[20000:]))
        at = rng.integers(0, len(again), 300)
        one = [ask(src, again[i:i + 1])[0] for i in at[:20]]
        check(f'{form}: a row alone is the same row', np.array_equal(np.array(one), first[at[:20]]))
        check(f'{form}: rows that were written are not zero', first[:20000:8].any(axis=1).mean() > 0.99)
print('random rows: ok')
