"""Speed and memory of qx repack on synthetic tables, beside cp of the same bytes in the same run.

usage: bench_repack.py BUILD DIRECTORY [MIB]      DIRECTORY on the disk to be measured
Every figure is the best of three: the page cache holds the input. repack syncs what it writes; cp does not, so it
is timed by itself and followed by a sync of the file system, in turns with repack. GB/s of a core is of processor
time, user and system, so that what else runs on the machine counts less.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tables  # noqa: E402

build, work = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
mib = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
out = work / 'bench-out'


def once(args, after=None):
    """Seconds, processor seconds, peak KiB."""
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(['sync', '-f', str(work)], check=True)
    start = time.monotonic()
    p = subprocess.Popen(args, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(p.pid, 0)
    if status:
        sys.exit(f'{args}: status {status}')
    if after:
        subprocess.run(after, check=True)
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss


def best(runs):
    return tuple(min(r[i] for r in runs) for i in range(3))


def line(what, threads, n, r):
    print(f'{what},{threads},{n},{r[0]:.3f},{n / r[0] / 1e9:.3f},{n / r[1] / 1e9:.3f},{r[2] / 1024:.0f}', flush=True)


def size(d):
    return sum(p.stat().st_size for p in pathlib.Path(d).iterdir())


print('what,threads,input bytes,seconds,GB/s input,GB/s input of a core,peak MiB')
for form in ('bf16', 'fp8'):
    src = work / f'bench-{form}'
    if not src.exists():
        tables.make(src, mib, form)
    n = size(src)
    subprocess.run(['sh', '-c', f'cat {src}/* > /dev/null'], check=True)
    for j in (1, 2):
        args = [str(build / 'qx-repack'), str(src), '-o', str(out), '-q', '-j', str(j), '--table', 'nvfp4']
        line(f'{form} to nvfp4', j, n, best([once(args) for _ in range(3)]))
    if form == 'bf16':
        copy = ['cp', '-r', str(src), str(out)]
        ways = {'re-shard 1 to 3': ([str(build / 'qx-repack'), str(src), '-o', str(out), '-q', '--table-shards', '3'],),
                'copy': ([str(build / 'qx-repack'), str(src), '-o', str(out), '-q'],),
                'cp -r and sync': (copy, ['sync', '-f', str(work)]), 'cp -r without sync': (copy,)}
        runs = {w: [] for w in ways}
        for _ in range(3):
            for w, args in ways.items():
                runs[w].append(once(*args))
        for w, r in runs.items():
            line(w, 2 if 'cp' not in w else 1, n, best(r))
    shutil.rmtree(out, ignore_errors=True)
