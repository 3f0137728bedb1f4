#!/usr/bin/env python3
"""Logits, greedy tokens and draft arg-max of qx-run on a device against a folder of fixtures.

usage: fixtures.py BIN FIXTURES [--device cuda] [--jobs N] [--only GLOB]

Bounds (relative L2 of all wanted logits): 1e-3 with --precise, which keeps f32 activations and caches. Without,
caches and the inputs of products are bfloat16 (2^-9 a rounding, a few per layer, four layers): 2e-2 for the trained
fixtures; 1e-1 for those of random weights, where a router's near tie may fall the other way and a row then gets
another expert (the C reference with the same roundings has the same 7.4e-2 at most).
Arg-max must agree wherever the gap between the best two logits exceeds the error met. Chunked prefill, token by
token and whole prompts must agree within the same bound; two runs give the same bits.
"""
import argparse, concurrent.futures, fnmatch, json, os, subprocess, sys, tempfile
import numpy as np

ap = argparse.ArgumentParser()
ap.add_argument('bin'); ap.add_argument('fixtures')
ap.add_argument('--device', default='cuda'); ap.add_argument('--jobs', type=int, default=4)
ap.add_argument('--only', default='*')
A = ap.parse_args()
TMP = tempfile.mkdtemp()


def run(path, tokens, extra, tag):
    f = os.path.join(TMP, tag + '.npy')
    cmd = [os.path.join(A.bin, 'qx-run'), path, '--device', A.device, '--tokens', ','.join(map(str, tokens)),
           '--ctx', '2048', '--json', '-q', '--greedy', '--ignore-eos', '--force', '--logits', f] + extra
    p = subprocess.run(cmd, capture_output=True, text=True, timeout=300)
    if p.returncode:
        raise RuntimeError(' '.join(cmd[-6:]) + ': ' + p.stderr[-300:] + p.stdout[-300:])
    return np.load(f), json.loads(p.stdout.splitlines()[-1])


def rel(a, b):
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


def one(job):
    folder, name, e = job
    path = os.path.join(A.fixtures, folder)
    want = np.load(os.path.join(path, 'expected', name + '.logits.npy'))
    pos = ','.join(map(str, e['logit_positions']))
    out, ok = [], True
    rounded = 1e-1 if folder.startswith('micro') else 2e-2
    for mode, extra, bound in (('f32', ['--precise'], 1e-3), ('f32 chunk 7', ['--precise', '--chunk', '7'], 1e-3),
                               ('bf16', [], rounded), ('bf16 chunk 64', ['--chunk', '64'], rounded)):
        tag = f'{folder}.{name}.{mode}'.replace('/', '_').replace(' ', '_')
        got, _ = run(path, e['tokens'], extra + ['-n', '0', '--positions', pos], tag)
        err = rel(got, want)
        gap = np.sort(want, axis=1)
        gap = gap[:, -1] - gap[:, -2]
        worst = np.abs(got - want).max(axis=1)
        flips = int(((got.argmax(1) != want.argmax(1)) & (gap > 2 * worst)).sum())
        good = err <= bound and flips == 0
        if mode == 'bf16':
            again, _ = run(path, e['tokens'], extra + ['-n', '0', '--positions', pos], tag + '2')
            good = good and np.array_equal(again.view(np.uint32), got.view(np.uint32))
        ok = ok and good
        out.append(f'{mode} {err:.1e}{"" if good else " BAD"}')
    g = e.get('greedy', [])
    if not g:
        return ok, f'{folder}/{name}: ' + ', '.join(out)
    _, j = run(path, e['tokens'], ['--precise', '-n', str(len(g))], f'{folder}.{name}.g'.replace('/', '_'))
    same = 0
    while same < len(g) and j['tokens'][same] == g[same]:
        same += 1
    close = same == len(g) or e['greedy_gap'][same] < 1e-3
    out.append(f'greedy {same}/{len(g)}{"" if close else " BAD"}')
    return ok and close, f'{folder}/{name}: ' + ', '.join(out)


jobs = []
for family in ('micro', 'trained'):
    d = os.path.join(A.fixtures, family)
    for lay in sorted(os.listdir(d)) if os.path.isdir(d) else []:
        exp = os.path.join(d, lay, 'expected', 'expected.json')
        if os.path.exists(exp) and fnmatch.fnmatch(f'{family}/{lay}', A.only):
            e = json.load(open(exp))
            jobs += [(f'{family}/{lay}', n, p) for n, p in e['prompts'].items()]
bad = 0
with concurrent.futures.ThreadPoolExecutor(A.jobs) as ex:
    for f in [ex.submit(one, j) for j in jobs]:
        try:
            ok, text = f.result()
        except Exception as x:
            ok, text = False, f'failed: {x}'
        bad += not ok
        print('ok  ' if ok else 'FAIL', text, flush=True)
print(f'{len(jobs)} prompts, {bad} failed')
sys.exit(bad != 0)
