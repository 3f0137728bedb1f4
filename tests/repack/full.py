"""A full disk is RESOURCE (exit 4), nothing half-written is in place, and with room the run goes on.

usage: full.py BUILD CHECKPOINT     exits 77 where no small tmpfs can be mounted
"""
import pathlib
import subprocess
import sys
import tempfile

from common import check, repack, run, same_tree

src = pathlib.Path(sys.argv[2])
size = sum(p.stat().st_size for p in src.iterdir() if p.is_file())
with tempfile.TemporaryDirectory(prefix='qx-full-') as tmp:
    disk, whole = pathlib.Path(tmp) / 'disk', pathlib.Path(tmp) / 'whole'
    disk.mkdir()
    small = f'size={size // 2 // 4096 * 4}k'
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', small, 'tmpfs', str(disk)], capture_output=True).returncode:
        print('SKIP: mounting a tmpfs is not permitted here')
        sys.exit(77)
    try:
        repack(src, whole, '--table-shards', 1)
        # The plan sees that it does not fit.
        p = run('repack', src, '-o', disk / 'out', '--table-shards', 1, '--json', code=4)
        check('no-space is said', b'no-space' in p.stdout)
        check('nothing is there', not list(disk.iterdir()))
        # The disk fills up while at work: the check is passed, then the room is taken away.
        subprocess.run(['mount', '-o', f'remount,size={size * 3}', str(disk)], check=True)
        filler = disk / 'filler'
        import threading
        import time

        def fill():
            while not (disk / 'out.part').exists():
                time.sleep(0.0002)
            try:
                with open(filler, 'wb') as f:
                    while True:
                        f.write(bytes(1 << 16))
            except OSError:
                pass
        t = threading.Thread(target=fill)
        t.start()
        import json
        from common import build
        p = subprocess.run([str(build / 'qx-repack'), str(src), '-o', str(disk / 'out'), '--table-shards', '1',
                            '--json'], capture_output=True)
        t.join()
        if p.returncode == 0:
            print('the run was faster than the filling: only the check before was tested')
        else:
            check(f'exit 4, not {p.returncode}', p.returncode == 4)
            check('a RESOURCE error', json.loads(p.stdout)['schema'] == 'qx.error/1')
            check('nothing is in place', not (disk / 'out').exists())
            filler.unlink()
            run('repack', src, '-o', disk / 'out', '--table-shards', 1)
            same_tree(whole, disk / 'out')
            print('full disk while at work: exit 4, then resumed with the same bytes')
    finally:
        subprocess.run(['umount', str(disk)], check=False)
