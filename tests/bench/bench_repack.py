"""Speed and memory of qx repack on synthetic tables, beside cp of the same bytes in the same run.

usage: bench_repack.py BUILD DIRECTORY [MIB]      DIRECTORY on the disk to be measured
Every figure is the best of three: the page cache holds the input; output is synced (cp: followed by sync).
"""
import pathlib
import resource
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tables  # noqa: E402

build, work = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
mib = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
out = work / 'bench-out'


def timed(args, after=None):
    best, peak = 1e9, 0
    for _ in range(3):
        shutil.rmtree(out, ignore_errors=True)
        start = time.monotonic()
        p = subprocess.Popen(args, stdout=subprocess.DEVNULL)
        _, status, usage = __import__('os').wait4(p.pid, 0)
        if status:
            sys.exit(f'{args}: status {status}')
        if after:
            subprocess.run(after, check=True)
        best, peak = min(best, time.monotonic() - start), max(peak, usage.ru_maxrss)
    return best, peak


def size(d):
    return sum(p.stat().st_size for p in pathlib.Path(d).iterdir())


print('what,threads,input bytes,seconds,GB/s input,peak MiB')
for form in ('bf16', 'fp8'):
    src = work / f'bench-{form}'
    if not src.exists():
        tables.make(src, mib, form)
    n = size(src)
    subprocess.run(['sh', '-c', f'cat {src}/* > /dev/null'], check=True)
    for j in (1, 2):
        for what, extra in ((f'{form} to nvfp4', ['--table', 'nvfp4']),):
            t, m = timed([str(build / 'qx-repack'), str(src), '-o', str(out), '-q', '-j', str(j), *extra])
            print(f'{what},{j},{n},{t:.3f},{n / t / 1e9:.3f},{m / 1024:.0f}', flush=True)
    if form == 'bf16':
        t, m = timed([str(build / 'qx-repack'), str(src), '-o', str(out), '-q', '--table-shards', '2'])
        print(f're-shard,2,{n},{t:.3f},{n / t / 1e9:.3f},{m / 1024:.0f}', flush=True)
        t, m = timed(['cp', '-r', str(src), str(out)], ['sync', '-f', str(work)])
        print(f'cp -r and sync,1,{n},{t:.3f},{n / t / 1e9:.3f},{m / 1024:.0f}', flush=True)
        t, m = timed(['cp', '-r', str(src), str(out)])
        print(f'cp -r without sync,1,{n},{t:.3f},{n / t / 1e9:.3f},{m / 1024:.0f}', flush=True)
    shutil.rmtree(out, ignore_errors=True)
