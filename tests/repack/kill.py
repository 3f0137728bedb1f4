"""repack killed at random times, then resumed: the output is that of an uninterrupted run, byte for byte.

usage: kill.py BUILD [KILLS [MIB]]     (default 5 kills of a table of 64 MiB; the long form: 50 2048)
"""
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from common import NG, build, check, gen, run, same_tree

kills = int(sys.argv[2]) if len(sys.argv) > 2 else 5
mib = int(sys.argv[3]) if len(sys.argv) > 3 else 64
work = pathlib.Path(tempfile.mkdtemp(prefix='qx-kill-', dir='/var/tmp'))


def big_table(path):
    """T0 with a BF16 table of about `mib` MiB: width 160, random rows."""
    config = gen.t0_config()
    n = mib * 1024 * 1024 // 320
    config['text_config'].update(ple_embed_dim=640, ngram_vocab_size_base=n // 4, split_ngram_parts=1)
    c = gen.build(config, table='bf16', sparse_table=True)
    name = NG + 'shard_0.weight'
    c.write(path, shards={'model-00001-of-00002.safetensors': [x for x in c.tensors if x != name],
                          'model-00002-of-00002.safetensors': [name]})
    from common import header
    file = path / 'model-00002-of-00002.safetensors'
    head, data = header(file)
    a, b = head[name]['data_offsets']
    rng = np.random.default_rng(1)
    with open(file, 'r+b') as f:
        f.seek(data)
        for at in range(a, b, 16 << 20):
            m = min(16 << 20, b - at) // 2
            # Finite BF16: exponents of values around 2^-6 to 2^0.
            v = rng.integers(0, 1 << 16, m, dtype=np.uint16)
            f.write(((v & 0x807f) | (((v >> 7) % 7 + 121).astype(np.uint16) << 7)).astype('<u2').tobytes())


def arguments(out):
    return ['-o', str(out), '--table', 'nvfp4', '-q']


try:
    src = work / 'src'
    big_table(src)
    print('table ready', flush=True)
    whole = work / 'whole'
    start = time.monotonic()
    run('repack', src, *arguments(whole))
    took = time.monotonic() - start
    print(f'uninterrupted: {took:.2f} s', flush=True)
    random.seed(7)
    caught = resumed = 0
    most = 0
    foreign = False
    # A kill costs at most 256 MiB of input and the wave at work (repack_run.c), here as output.
    bound = (256 + 48 << 20) * 90 // 320
    for k in range(kills):
        out = work / 'out'
        p = subprocess.Popen([str(build / 'qx-repack'), str(src), *arguments(out)], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
        time.sleep(random.uniform(0, took * 0.95))
        p.send_signal(signal.SIGKILL)
        p.communicate()
        caught += p.returncode == -signal.SIGKILL
        # What is in place now is whole: it is compared below without another run.
        part = pathlib.Path(str(out) + '.part')
        resumed += part.exists()
        if not out.exists() and part.exists() and not foreign:
            # A file of somebody else in the part does not become part of the output.
            foreign = True
            (part / 'mine.txt').write_text('x')
            q = run('repack', src, *arguments(out), code=2)
            check('foreign-file', b'foreign-file' in q.stderr and b'mine.txt' in q.stderr)
            check('it is left alone', (part / 'mine.txt').read_text() == 'x' and not out.exists())
            (part / 'mine.txt').unlink()
        if not out.exists():
            # What the killed run had written, in whole pages.
            table = part / 'model-ple-table-00001-of-00001.safetensors'
            written = table.stat().st_blocks * 512 if table.exists() else 0
            doc = json.loads(run('repack', src, *arguments(out), '--json').stdout)
            most = max(most, written - doc['resumed_bytes'])
            check(f'of {written} bytes written {doc["resumed_bytes"]} were kept',
                  written - doc['resumed_bytes'] <= bound)
        same_tree(whole, out)
        check('no part is left', not part.exists())
        shutil.rmtree(out)
        if (k + 1) % 10 == 0:
            print(f'{k + 1} kills', flush=True)
    # Copies, archives and what they held, the same; what was on disk and noted is not written again: 32 MiB of
    # content between the notes of archives, and the frames at work.
    packed, shards = work / 'packed', work / 'shards'
    run('repack', src, '-o', packed, '--archive', '-q')
    run('repack', src, '-o', shards, '--table-shards', 3, '-q')
    for what, begin, done, most_again, extra in (('archive', src, packed, 64 << 20, ['--archive']),
                                                 ('restore', packed, src, 64 << 20, []),
                                                 ('re-shard', src, shards, 1 << 60, ['--table-shards', '3'])):
        start = time.monotonic()
        run('repack', begin, '-o', work / 'timed', '-q', *extra)
        took_this = time.monotonic() - start
        same_tree(done, work / 'timed')
        shutil.rmtree(work / 'timed')
        again = taken = 0
        for k in range(max(kills // 5, 3)):
            out = work / 'out'
            p = subprocess.Popen([str(build / 'qx-repack'), str(begin), '-o', str(out), '-q', *extra],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            time.sleep(random.uniform(took_this * 0.3, took_this * 0.95))
            p.send_signal(signal.SIGINT if k == 0 else signal.SIGKILL)
            p.communicate()
            part = pathlib.Path(str(out) + '.part')
            if not out.exists():
                written = sum(f.stat().st_blocks * 512 for f in part.iterdir()) if part.exists() else 0
                doc = json.loads(run('repack', begin, '-o', out, '--json', *extra).stdout)
                taken = max(taken, doc['resumed_bytes'])
                again = max(again, written - doc['resumed_bytes'])
                check(f'{what}: of {written} bytes written {doc["resumed_bytes"]} were kept',
                      written - doc['resumed_bytes'] <= most_again)
            same_tree(done, out)
            shutil.rmtree(out)
        print(f'{what}: up to {taken / 2**20:.0f} MiB taken over, {again / 2**20:.0f} MiB written again', flush=True)
    # Another plan does not go on with this part; without --resume it starts again.
    p = subprocess.Popen([str(build / 'qx-repack'), str(src), *arguments(work / 'out')],
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(took * 0.6)
    p.send_signal(signal.SIGINT)
    p.communicate()
    if p.returncode == -signal.SIGINT:
        check('an interrupt leaves a part', (work / 'out.part').exists())
        q = run('repack', src, '-o', work / 'out', '--table', 'fp8', code=2)
        check('plan-differs', b'plan-differs' in q.stderr)
        run('repack', src, *arguments(work / 'out'))
        same_tree(whole, work / 'out')
    else:
        print('SKIP interrupt: the run had ended')
    print(f'{kills} kills, {caught} while at work, {resumed} left a part: all ended with the same bytes; '
          f'at most {most / 2**20:.0f} MiB of output were written again')
finally:
    shutil.rmtree(work, ignore_errors=True)
