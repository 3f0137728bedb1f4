#!/usr/bin/env python3
"""qx against transformers on a slice of the released widths with random weights (slice.py).

usage: full_width.py QX_RUN BLOCKS DIRECTORY [--layouts mixed,nvfp4-ple] [--prompts 17,700,3000] [--small]
                     [--device cuda]

Needs torch and a transformers with qwen4_exp; exits 77 without. --small --device cpu tries a small geometry here.

For each layout and prompt: logits of transformers in float32 (the reference) and bfloat16, of qx as it is and with
--precise, at the same positions. Demanded, as relative L2 against the reference:
  qx as it is is no further than transformers in bfloat16;
  qx --precise is within 1e-3 (sums of other order; a row whose routing or selection stood on a tie is set aside,
  at most one row in twenty).
The selected blocks of the sparse layer, at positions beyond the budget, against a selection computed in float32 from
what transformers' indexer saw: with --precise every block chosen differently must have a score within 1e-3 of the
last one taken, relative to the spread of the scores; as it is the share of equal blocks must be no lower than
transformers' own in bfloat16, less one in a hundred.
"""
import argparse
import gc
import json
import logging
import math
import pathlib
import subprocess
import sys
import time

try:
    import numpy as np
    import torch
    import transformers.models.qwen4_exp  # noqa: F401
except ImportError as missing:
    print(f'skipped: {missing}')
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import slice as maker  # noqa: E402


def positions(n):
    """What is compared: everything of short prompts; else the start, both sides of the budget, and the end."""
    if n <= 64:
        return list(range(n))
    return sorted({*range(8), *range(n - 8, n), *range(0, n, max(1, n // 48)), *(range(2046, 2056) if n > 2056 else ())})


class Theirs:
    """transformers in one dtype, and what its sparse layer selects."""

    def __init__(self, text, weights, dtype, device):
        attention = 'eager' if dtype == torch.float32 else 'sdpa'
        self.model = maker.transformers_model(text, weights, dtype, device, attn_implementation=attention,
                                              experts_implementation='eager')
        self.device, self.text = device, text
        self.indexer = next(x.self_attn.indexer for x in self.model.model.layers if hasattr(x, 'self_attn'))
        self.indexer.register_forward_hook(self.seen, with_kwargs=True)

    def seen(self, module, args, kwargs, out):
        names = ('hidden_states', 'position_embeddings', 'attention_mask', 'past_key_values')
        got = {**dict(zip(names, args)), **kwargs}
        mask = out if out.dtype == torch.bool else out == 0
        self.mask = mask[0, 0]
        self.hidden, self.cos_sin = got['hidden_states'], got['position_embeddings']

    def logits(self, ids, pos):
        out = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False,
                         logits_to_keep=torch.tensor(pos, device=self.device))
        return out.logits[0].float().cpu().numpy()

    def chosen(self, first):
        """[positions, complete blocks] bool: selected by the mask; partial blocks left out."""
        ratio = self.text['indexer_compress_ratio']
        n = self.mask.shape[0] // ratio * ratio
        return self.mask[first:, :n].unflatten(-1, (-1, ratio)).all(-1).cpu().numpy()

    def scores(self, first):
        """Scores of all blocks at positions from `first` on, computed here in float32."""
        t, ix = self.text, self.indexer
        heads, dim, ratio = t['indexer_n_heads'], t['indexer_head_dim'], t['indexer_compress_ratio']
        h = self.hidden[0].float()
        qk = torch.nn.functional.linear(h, ix.index_qk_proj.weight.float())
        q, k = qk[first:, :heads * dim].unflatten(-1, (heads, dim)), qk[:, heads * dim:]

        def norm(x, w):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + t['rms_norm_eps']) * (1 + w.float())

        def turn(x, cos, sin):
            d = cos.shape[-1]
            a, b = x[..., :d], x[..., d:]
            half = torch.cat((-a[..., d // 2:], a[..., :d // 2]), -1)
            return torch.cat((a * cos + half * sin, b), -1)
        cos, sin = (x[0].float() for x in self.cos_sin)
        n = h.shape[0] // ratio
        pooled = norm(k[:n * ratio].unflatten(0, (n, ratio)).mean(1), ix.k_layernorm.weight)
        pooled = turn(pooled, cos[:n * ratio:ratio], sin[:n * ratio:ratio])
        q = turn(norm(q, ix.q_layernorm.weight), cos[first:, None], sin[first:, None])
        s = torch.relu(torch.einsum('phd,bd->phb', q, pooled)).sum(1) / math.sqrt(dim)
        pos = torch.arange(first, h.shape[0], device=s.device)
        known = torch.arange(n, device=s.device)[None] < ((pos + 1) // ratio)[:, None]
        return torch.where(known, s, float('-inf')).cpu().numpy()


def rel(a, b):
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def rows_rel(a, b):
    return np.linalg.norm(a.astype(np.float64) - b, axis=1) / np.linalg.norm(b.astype(np.float64), axis=1)


def qx_logits(a, path, tokens, pos, extra, work):
    out = work / 'qx.npy'
    out.unlink(missing_ok=True)
    cmd = [a.qx_run, str(path), '--device', a.device, '--tokens', '@' + str(tokens), '--ctx', '3072', '-n', '0',
           '--json', '-q', '--logits', str(out), '--positions', ','.join(map(str, pos))] + extra
    p = subprocess.run(cmd, capture_output=True, text=True, check=False)
    if p.returncode:
        sys.exit(f'qx failed ({p.returncode}): {p.stderr[-500:]}{p.stdout[-500:]}')
    return np.load(out), json.loads(p.stdout.splitlines()[-1])


def qx_blocks(a, path, tokens, first, n_blocks, extra):
    p = subprocess.run([a.blocks, str(path), a.device, str(tokens), str(first)] + extra, capture_output=True, text=True,
                       check=False)
    if p.returncode:
        sys.exit(f'blocks failed ({p.returncode}): {p.stderr[-500:]}')
    rows = {}
    for line in p.stdout.splitlines():
        v = list(map(int, line.split()))
        m = np.zeros(n_blocks, bool)
        m[v[2:]] = True
        rows[v[1]] = m
    return np.array([rows[k] for k in sorted(rows)])


def share(a, b):
    return float((a & b).sum() / b.sum())


def compare_blocks(a, path, tokens, n, ref, half, first, say):
    """True if the selections agree as the head of this file demands."""
    want, score = ref
    budget = want.sum(1)
    best = np.sort(score, 1)
    edge = np.array([r[len(r) - k] for r, k in zip(best, budget)])
    spread = np.nanmax(np.where(np.isfinite(score), score, np.nan), 1) - edge
    ok = True
    for mode, extra in (('precise', ['precise']), ('default', [])):
        got = qx_blocks(a, path, tokens, first, want.shape[1], extra)
        if got.shape != want.shape or not np.array_equal(got.sum(1), budget):
            say(f'  blocks {mode}: counts differ')
            return False
        off = np.abs(score - edge[:, None]) / spread[:, None]
        worst = float(off[got != want].max()) if (got != want).any() else 0.0
        same = share(got, want)
        good = worst <= 1e-3 if mode == 'precise' else same >= half - 0.01
        ok = ok and good
        say(f'  blocks at {len(want)} positions, {mode}: {100 * same:.3f} % equal, rows all equal '
            f'{100 * float((got == want).all(1).mean()):.1f} %, farthest from the edge {worst:.1e}'
            + ('' if mode == 'precise' else f' (transformers bf16 {100 * half:.3f} % equal)')
            + ('' if good else '  BAD'))
    return ok


def one_layout(layout, a, g, work):
    t = time.time()
    path = work / layout
    text, weights = maker.make(layout, path, g, a.device)
    print(f'{layout}: slice made in {time.time() - t:.1f} s', flush=True)
    budget, vocab = g['budget'], g['vocab']
    prompts = {n: [int(v) for v in np.random.default_rng(n).integers(2, vocab, n)] for n in a.lengths}
    first = budget + 4
    res = {}
    for dtype in (torch.float32, torch.bfloat16):
        t = time.time()
        theirs = Theirs(text, weights, dtype, a.device)
        for n, ids in prompts.items():
            r = {'logits': theirs.logits(ids, positions(n))}
            if n > first:
                r['chosen'] = theirs.chosen(first)
                r['scores'] = theirs.scores(first)
            res[dtype, n] = r
        print(f'  transformers {str(dtype)[6:]}: {time.time() - t:.1f} s', flush=True)
        del theirs
        gc.collect()
        if a.device != 'cpu':
            torch.cuda.empty_cache()
    del weights
    gc.collect()
    if a.device != 'cpu':
        torch.cuda.empty_cache()
    ok = True
    for n, ids in prompts.items():
        tokens = work / f'tokens-{n}'
        tokens.write_text(' '.join(map(str, ids)))
        want, half = res[torch.float32, n]['logits'], res[torch.bfloat16, n]['logits']
        plain, _ = qx_logits(a, path, tokens, positions(n), [], work)
        precise, j = qx_logits(a, path, tokens, positions(n), ['--precise'], work)
        r = rows_rel(precise, want)
        steady = r <= 1e-3
        e_half, e_plain, e_precise = rel(half, want), rel(plain, want), rel(precise[steady], want[steady])
        good = (e_plain <= e_half or a.device == 'cpu') and e_precise <= 1e-3 and steady.mean() >= 0.95
        ok = ok and good
        print(f'{layout} prompt {n}, {len(r)} positions: relative L2 against float32: transformers bf16 {e_half:.2e}, '
              f'qx {e_plain:.2e}, qx --precise {e_precise:.2e} (median row {np.median(r):.1e}, {int((~steady).sum())} set aside); '
              f'arg-max equal: bf16 {np.mean(half.argmax(1) == want.argmax(1)):.2f}, qx '
              f'{np.mean(plain.argmax(1) == want.argmax(1)):.2f}; logits rms {np.sqrt(np.mean(want ** 2)):.2f}'
              + ('' if good else '  BAD'), flush=True)
        if n > first:
            ref = res[torch.float32, n]
            same = share(res[torch.bfloat16, n]['chosen'], ref['chosen'])
            ok = compare_blocks(a, path, tokens, n, (ref['chosen'], ref['scores']), same, first, print) and ok
    return ok


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('qx_run')
    ap.add_argument('blocks')
    ap.add_argument('directory')
    ap.add_argument('--layouts', default='mixed,nvfp4-ple')
    ap.add_argument('--prompts', default='17,700,3000')
    ap.add_argument('--device', default='cuda')
    ap.add_argument('--small', action='store_true')
    a = ap.parse_args()
    logging.disable(logging.WARNING)
    a.lengths = [int(x) for x in a.prompts.split(',')]
    torch.set_grad_enabled(False)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    work = pathlib.Path(a.directory)
    work.mkdir(parents=True, exist_ok=True)
    g = maker.SMALL if a.small else maker.RELEASED
    ok = [one_layout(layout, a, g, work) for layout in a.layouts.split(',')]
    print('all within bounds' if all(ok) else 'OUT OF BOUNDS')
    return 0 if all(ok) else 1


if __name__ == '__main__':
    sys.exit(main())
