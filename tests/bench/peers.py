#!/usr/bin/env python3
"""qx beside other programs on the same GPU in one run: transformers on a slice of four layers of the released widths,
and PyTorch (cuBLASLt, or torch's grouped matrix product) for single operations of equal shape.

usage: peers.py QX_BENCH DIRECTORY [--prompt 2048] [--steps 32] [--ops] [--slice]

Prints two tables. Operations: microseconds of both, bytes moved, share of 4.3 TB/s, ratio (above 1: qx is faster).
torch's (its experts without the shared one) are timed as replays of a recorded graph of 20 calls over matrices that together do not fit the L2 cache; qx's
come from `kerncheck --bench --json` (KERNCHECK in the environment), which goes round several matrices likewise.
"""
import argparse
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / 'oracle'))
import slice as maker  # noqa: E402

HBM = 4.3e12


def timed_graph(call, n=20, repeat=7):
    """Seconds of call(i), median of replays of a graph of n calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(3):
            call(i)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n):
            call(i)
    t = []
    for _ in range(repeat):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        t.append(a.elapsed_time(b) * 1e-3 / n)
    return statistics.median(t)


def torch_ops():
    """{name: (seconds, bytes)} of single operations in bfloat16."""
    dev, dt = 'cuda', torch.bfloat16
    out = {}

    def linear(name, rows, n_out, n_in, copies):
        w = [torch.randn(n_out, n_in, device=dev, dtype=dt) for _ in range(copies)]
        x = torch.randn(rows, n_in, device=dev, dtype=dt)
        y = torch.empty(rows, n_out, device=dev, dtype=dt)
        out[name] = (timed_graph(lambda i: torch.mm(x, w[i % copies].T, out=y)), n_out * n_in * 2 + rows * (n_in + n_out) * 2)
    linear('linear 1 x bf16 [16480, 2560] (GDN inputs)', 1, 16480, 2560, 4)
    linear('linear 1 x bf16 [2560, 6144] (GDN output)', 1, 2560, 6144, 8)
    linear('linear 1 x bf16 [248320, 2560] (head)', 1, 248320, 2560, 1)
    linear('linear 8 x bf16 [16480, 2560]', 8, 16480, 2560, 4)
    linear('linear 8192 x bf16 [16480, 2560]', 8192, 16480, 2560, 1)
    linear('linear 8192 x bf16 [2560, 6144]', 8192, 2560, 6144, 1)

    def moe(name, rows, experts):
        e, h, n, k = 512, 2560, 640, 10
        gu = torch.randn(e, 2 * n, h, device=dev, dtype=dt) * 0.02
        dn = torch.randn(e, h, n, device=dev, dtype=dt) * 0.02
        x = torch.randn(rows, h, device=dev, dtype=dt)
        ids = torch.stack([torch.randperm(e, device=dev)[:k] for _ in range(rows)])
        wt = torch.full((rows, k), 0.1, device=dev, dtype=dt)
        if rows == 1:
            # ten experts by index: gather and batched products, as a short program would do it
            def call(i):
                sel = (ids[0] + 7 * i) % e
                a = torch.bmm(gu[sel], x.expand(k, rows, h).transpose(1, 2)).squeeze(-1)
                g, u = a.chunk(2, -1)
                return wt @ torch.bmm(dn[sel], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        else:
            order = ids.flatten().argsort()
            tok = order // k
            counts = torch.bincount(ids.flatten(), minlength=e)
            offs = counts.cumsum(0).to(torch.int32)
            back = wt.flatten()[order].unsqueeze(1)

            def call(i):
                a = torch._grouped_mm(x[tok], gu.transpose(1, 2), offs=offs)
                g, u = a.chunk(2, -1)
                y = torch._grouped_mm(F.silu(g) * u, dn.transpose(1, 2), offs=offs)
                return torch.zeros_like(x).index_add_(0, tok, y * back)
        used = min(e, experts)
        out[name] = (timed_graph(call, n=4 if rows > 1 else 20), used * 3 * n * h * 2 + rows * h * 4)
    moe('moe 1 rows, 10 of 512, hidden 2560, inter 640+640, bf16', 1, 10)
    moe('moe 8192 rows, 10 of 512, hidden 2560, inter 640+640, bf16', 8192, 512)
    return out


def qx_ops():
    """{op and shape: microseconds} of kerncheck's benches."""
    k = os.environ.get('KERNCHECK')
    out = {}
    for op in ('linear', 'moe') if k else ():
        p = subprocess.run([k, '--bench', '--json', '--op', op], capture_output=True, text=True, check=False)
        for line in p.stdout.splitlines():
            if line.startswith('{'):
                r = json.loads(line)
                out[f"{r['op']} {r['shape']}"] = r['ns'] * 1e-3
    return out


def ours_of(name, ours):
    """qx's time of the same shape: the best of its variants; None where there is none."""
    want = name.split(' (')[0]
    return min((v for k, v in ours.items() if k.startswith(want)), default=None)


def table(title, head, rows):
    width = [max(len(str(r[i])) for r in [head] + rows) for i in range(len(head))]
    print(f'\n{title}')
    for r in [head] + rows:
        print('  '.join(str(v).ljust(w) if i == 0 else str(v).rjust(w) for i, (v, w) in enumerate(zip(r, width))))


def ops():
    theirs, ours = torch_ops(), qx_ops()
    rows = []
    for name, (t, n) in theirs.items():
        mine = ours_of(name, ours)
        rows.append([name, f'{t * 1e6:.1f}', f'{100 * n / HBM / t:.0f} %', f'{mine:.1f}' if mine else '-',
                     f'{t * 1e6 / mine:.2f}' if mine else '-'])
    table('single operations', ['operation', 'torch us', 'of 4.3 TB/s', 'qx us', 'ratio'], rows)
    if ours:
        table('all shapes of qx', ['operation', 'us'], [[k, f'{v:.1f}'] for k, v in ours.items()])


def transformers_speed(text, weights, prompt, steps):
    """(prefill tokens/s, decode tokens/s) of transformers in bfloat16 with its default kernels."""
    model = maker.transformers_model(text, weights, torch.bfloat16, 'cuda')
    ids = torch.randint(2, text['vocab_size'], (1, prompt), device='cuda')
    best = {}
    with torch.no_grad():
        for n in (prompt, prompt):  # the first warms up
            torch.cuda.synchronize()
            t = time.perf_counter()
            o = model(input_ids=ids[:, :n], use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            best['prefill'] = n / (time.perf_counter() - t)
        cache, one = o.past_key_values, o.logits.argmax(-1)
        times = []
        for i in range(steps + 4):
            torch.cuda.synchronize()
            t = time.perf_counter()
            o = model(input_ids=one, past_key_values=cache, use_cache=True)
            one = o.logits.argmax(-1)
            torch.cuda.synchronize()
            if i >= 4:
                times.append(time.perf_counter() - t)
        best['decode'] = 1 / statistics.median(times)
    return best


def qx_speed(bench, path, prompt, steps):
    p = subprocess.run([bench, str(path), '--depth', str(prompt), '-n', str(steps), '--prompt', str(prompt), '--repeat', '3',
                        '--json', '-q'], capture_output=True, text=True, check=False)
    if p.returncode:
        sys.exit(f'qx-bench failed: {p.stderr[-400:]}')
    rows = [json.loads(x) for x in p.stdout.splitlines()]
    return {r['kind']: r['tok_s'] for r in rows}


def slices(a):
    rows = []
    text, weights = maker.make('mixed', pathlib.Path(a.directory) / 'mixed', maker.RELEASED, 'cuda')
    theirs = transformers_speed(text, weights, a.prompt, a.steps)
    del weights
    torch.cuda.empty_cache()
    mine = qx_speed(a.qx_bench, pathlib.Path(a.directory) / 'mixed', a.prompt, a.steps)
    for what, label in (('prefill', f'prefill of {a.prompt} tokens'), ('decode', f'decode after {a.prompt} tokens')):
        rows.append([label, f'{theirs[what]:.1f}', f'{mine[what]:.1f}', f'{mine[what] / theirs[what]:.1f}'])
    table('slice of 4 layers, mixed layout: tokens a second', ['', 'transformers bf16', 'qx', 'ratio'], rows)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('qx_bench')
    ap.add_argument('directory')
    ap.add_argument('--prompt', type=int, default=2048)
    ap.add_argument('--steps', type=int, default=32)
    ap.add_argument('--ops', action='store_true', help='only the single operations')
    ap.add_argument('--slice', action='store_true', help='only the slice')
    a = ap.parse_args()
    logging.disable(logging.WARNING)
    import transformers
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}')
    if not a.slice:
        ops()
        torch.cuda.empty_cache()
    if not a.ops:
        slices(a)


if __name__ == '__main__':
    main()
