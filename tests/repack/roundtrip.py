"""repack: round trips, written bytes decoded independently, archives, threads, refusals.

usage: roundtrip.py BUILD FOLDER...     (folders of checkpoints: the micro set, the sample)
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np

from common import NG, build, check, clean, gen, header, repack, rows, run, same_tree, table, tensors

work = pathlib.Path(tempfile.mkdtemp(prefix='qx-repack-'))
count = 0
# Findings that belong to the input and that no repacking takes away.
NOTES = ('architecture-alias', 'gate-up-scales', 'normalised-names')


def out():
    global count
    count += 1
    return work / f'o{count}'


def n_rows(src):
    return json.loads(run('inspect', src, '--json').stdout)['ple']['rows']


def n_shards(src):
    return json.loads(run('inspect', src, '--json').stdout)['ple']['shards']


def expert_values(t, prefix):
    """Every expert projection of a checkpoint as exact values, by name without the storage's spelling."""
    values = {}
    for name, (dtype, shape, raw) in t.items():
        if '.mlp.experts' not in name:
            continue
        if name.endswith('.gate_up_proj') or (name.endswith('.down_proj') and 'experts.down' in name):
            v = gen.bf16_value(np.frombuffer(raw, '<u2')).reshape(shape).astype(np.float64)
            base = name.rsplit('.', 1)[0]
            for e in range(shape[0]):
                if 'gate_up' in name:
                    half = shape[1] // 2
                    values[f'{base}.{e}.gate_proj'], values[f'{base}.{e}.up_proj'] = v[e, :half], v[e, half:]
                else:
                    values[f'{base}.{e}.down_proj'] = v[e]
        elif name.endswith('.weight'):
            base = name[:-7]
            if dtype == 'BF16':
                values[base] = gen.bf16_value(np.frombuffer(raw, '<u2')).reshape(shape).astype(np.float64)
            elif dtype == 'U8':
                codes = np.frombuffer(raw, 'u1').reshape(shape)
                pair = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape[0], -1)
                block = gen.E4M3[np.frombuffer(t[name + '_scale'][2], 'u1')].reshape(shape[0], -1)
                g = np.float64(np.frombuffer(t[name + '_scale_2'][2], '<f4')[0])
                values[base] = gen.E2M1[pair] * np.repeat(block, 16, axis=1) * g
            else:
                s = gen.bf16_value(np.frombuffer(t[name + '_scale_inv'][2], '<u2'))
                s = s.reshape(-(-shape[0] // 128), -(-shape[1] // 128)).astype(np.float64)
                full = np.repeat(np.repeat(s, 128, axis=0), 128, axis=1)[:shape[0], :shape[1]]
                values[base] = gen.E4M3[np.frombuffer(raw, 'u1').reshape(shape)] * full
    return values


def f32(a):
    return a.astype(np.float32).astype(np.float64)


def tables(src):
    n = n_rows(src)
    before = rows(src, n)
    exact = rows(src, n, 'f32').astype(np.float64)
    # To other numbers of shards and back, every tensor's bytes.
    old = tensors(src)
    empty = next(k for k in range(2, n) if -(-n // -(-n // k)) < k)  # the last shards hold no row
    decoder = f'{sys.executable} {pathlib.Path(__file__).resolve().parent.parent / "decoders/qx_decode.py"}'
    for shards in (1, 2, 3, 5, 7, 8, empty):
        a, b = out(), out()
        repack(src, a, '--table-shards', shards)
        clean(a, NOTES)
        per = -(-n // shards)
        new = tensors(a)
        for i in range(shards):
            check(f'shard {i} of {shards} has the rows that loaders expect',
                  new[f'{NG}shard_{i}.weight'][1][0] == max(0, min(per, n - i * per)))
        check('split_ngram_parts', n_shards(a) == shards and n_rows(a) == n and
              json.loads((a / 'config.json').read_text())['text_config'].get('split_ngram_parts', shards) == shards)
        check(f'{shards} shards change no row', (rows(a, n) == before).all())
        one = [json.loads(run('decode-rows', a, '--json', '--rows', r).stdout) for r in (0, n - 1)]
        check('shard and row in it', [(d['shard'], d['local_row']) for d in one] == [(0, 0), divmod(n - 1, per)])
        run('verify', a, '--level', 'full', '-q', '--decoder', decoder, '-t', NG[:-1])
        if shards == 5:
            run('run', a, '--tokens', '1,2,3', '-n', 2, '--device', 'cpu', '-q')
        repack(a, b, '--table-shards', n_shards(src))
        check(f'{n_shards(src)} -> {shards} -> {n_shards(src)} gives the old tensors', old == tensors(b))
    # Between two counts that do not divide the rows, and of other formats on the way.
    a, b, c = out(), out(), out()
    repack(src, a, '--table-shards', 5, '--table', 'nvfp4')
    repack(a, b, '--table-shards', 7)
    repack(src, c, '--table-shards', 7, '--table', 'nvfp4')
    check('converted and re-sharded in either order', tensors(b) == tensors(c))
    # Rank slices joined again.
    parts = []
    for r in range(7):
        d = out()
        repack(src, d, '--rank', f'{r}/7')
        clean(d, NOTES)
        per = -(-n // 7)
        note = json.loads((d / 'config.json').read_text())['qx_rank']
        check('qx_rank', note['base_row'] == r * per and note['rows'] == per)
        parts.append(rows(d, per))
    joined = np.concatenate(parts)
    check('joined slices are the table', (joined[:n] == before).all() and not joined[n:].any())
    # Row layout and back.
    a, b = out(), out()
    repack(src, a, '--layout', 'row')
    clean(a, NOTES)
    check('row layout changes no row', (rows(a, n) == before).all())
    if any(f.name.startswith('model-ple-table') for f in a.iterdir()):
        f = a / 'model-ple-table-00001-of-00001.safetensors'
        _, data = header(f)
        check('rows begin at a block', data % 4096 == 0)
    repack(a, b, '--table-shards', n_shards(src))
    check('row layout and back gives the old tensors', tensors(b) == old)
    # Other formats: what is written decodes as decode-rows says.
    for to in ('bf16', 'fp8', 'nvfp4'):
        d = out()
        doc = repack(src, d, '--table', to, '--verify')
        clean(d, NOTES)
        t = tensors(d)
        check(f'{to}: decode-rows equals the written bytes',
              (table(t, n) == rows(d, n, 'f32')).all())
        if to == 'bf16':
            check('bf16 is what decode-rows --dtype bf16 gives', (rows(d, n) == before).all())
        for e in doc['errors']:
            got = f32(table(t, n)) - exact
            rel = np.sqrt((got ** 2).sum() / (exact ** 2).sum())
            # The report adds f32 sums of 16 squares: 1e-6 relative each.
            check(f'reported error {e["relative_rms"]} is the measured one {rel}', abs(e['relative_rms'] - rel) <= 1e-5 * rel)
            check('search is never worse', e['relative_rms'] <= e['plain']['relative_rms'])
            print(f'  {src.name} table {e["from"]} -> {e["to"]}: relative RMS {e["relative_rms"]:.5f}, '
                  f'plain {e["plain"]["relative_rms"]:.5f}')
        d2, d3 = out(), out()
        repack(src, d2, '--table', to, '-j', 8)
        repack(src, d3, '--table', to, '-j', 1)
        same_tree(d2, d3)
        p = out()
        plain = repack(src, p, '--table', to, '--plain-scales')
        for e, q in zip(doc['errors'], plain['errors']):
            check('the plain figures are those of --plain-scales',
                  abs(e['plain']['relative_rms'] - q['relative_rms']) <= 1e-6 * q['relative_rms'] + 1e-12)


def experts(src):
    before = expert_values(tensors(src), '')
    for to in ('bf16', 'fp8-block', 'nvfp4'):
        d, d2 = out(), out()
        doc = repack(src, d, '--experts', to, '-j', 1)
        repack(src, d2, '--experts', to, '-j', 8)
        same_tree(d, d2)
        clean(d, NOTES)
        after = expert_values(tensors(d), '')
        check('the same experts', before.keys() == after.keys())
        err = sum(((f32(after[k]) - f32(before[k])) ** 2).sum() for k in before)
        sq = sum((before[k] ** 2).sum() for k in before)
        for e in doc['errors']:
            check('search is never worse', e['relative_rms'] <= e['plain']['relative_rms'])
            if src.name in ('bf16',):
                rel = np.sqrt(err / sq)
                check(f'reported error {e["relative_rms"]} is the measured one {rel}',
                      abs(e['relative_rms'] - rel) <= 1e-5 * rel)
            print(f'  {src.name} experts {e["from"]} -> {e["to"]}: relative RMS {e["relative_rms"]:.5f}, '
                  f'plain {e["plain"]["relative_rms"]:.5f}')
        if to == 'bf16':
            for k in before:
                check(f'{k} is rounded once to f32 and once to bf16',
                      (gen.bf16_bits(before[k]) == gen.bf16_bits(after[k])).all())


def untouched(src):
    """What is not asked for keeps its bytes; dropped parts are gone."""
    d = out()
    repack(src, d, '--table', 'nvfp4', '--drop', 'vision,mtp', '--max-shard', '300KiB')
    clean(d, NOTES)
    old, new = tensors(src), tensors(d)
    for name, t in new.items():
        check(f'{name} is copied bit for bit', name.startswith(NG) or old[name] == t)
    check('nothing of vision and MTP is left', not any(n.startswith(('mtp.', 'model.visual.')) for n in new))
    d = out()
    repack(src, d, '--canonical-names')
    config = json.loads((d / 'config.json').read_text())
    check('canonical names', config['model_type'] == 'qwen4_exp')
    check('canonical names change no tensor', tensors(d) == old)


def archive(src):
    a, b, dry = out(), out(), out()
    run('repack', src, '-o', dry, '--archive', '--dry-run', '-q')
    check('a dry run writes nothing', not dry.exists())
    run('repack', src, '-o', a, '--archive', '-q')
    run('repack', a, '-o', b, '-q')
    files = {os.path.relpath(os.path.join(p, f), src): os.path.join(p, f) for p, _, fs in os.walk(src) for f in fs}
    back = {os.path.relpath(os.path.join(p, f), b): os.path.join(p, f) for p, _, fs in os.walk(b) for f in fs}
    check('the same files come back', files.keys() == back.keys())
    zstd = shutil.which('zstd')
    for name, path in files.items():
        want = pathlib.Path(path).read_bytes()
        check(f'{name} comes back', pathlib.Path(back[name]).read_bytes() == want)
        if zstd:
            got = subprocess.run([zstd, '-dcq', str(a / (name + '.zst'))], capture_output=True, check=True).stdout
            check(f'zstd -d reads {name}', got == want)
    if not zstd:
        print('  no zstd program: SKIP reading with stock zstd')
    # One flipped byte is seen.
    victim = max((p for p in a.rglob('*.zst')), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    broken = out()
    run('repack', a, '-o', broken, '-q', code=3)
    check('nothing is left in place', not broken.exists())


def zeros():
    """Zero rows and blocks stay exact zeros (C26), also in a table of zeros only."""
    c = gen.t0_bf16_table()
    z = work / 'zeros'
    for name in c.match('ngram_embedding.shard_'):
        c.tensors[name] = gen.bf16([15, 32], np.zeros((15, 32)))
    c.write(z)
    for to in ('fp8', 'nvfp4'):
        d = out()
        repack(z, d, '--table', to)
        t = tensors(d)
        check('zeros stay zeros', not rows(d, 60, 'f32').any())
        scale = t[NG + 'weight_scale'] if to == 'fp8' else t[NG + 'weight_scale_2']
        v = gen.bf16_value(np.frombuffer(scale[2], '<u2'))[0] if to == 'fp8' else np.frombuffer(scale[2], '<f4')[0]
        check('a positive scale', np.isfinite(v) and v > 0)
    # A value that is not finite cannot be quantised; the row is named and nothing is left.
    values = np.zeros((15, 32))
    values[7, 3] = np.nan
    c.tensors[NG + 'shard_1.weight'] = gen.bf16([15, 32], values)
    c.write(z)
    for to in ('fp8', 'nvfp4'):
        d = out()
        p = run('repack', z, '-o', d, '--table', to, '--json', code=3)
        doc = json.loads(p.stdout)
        check('payload-nan names row 22', doc['kind'] == 'payload-nan' and 'row 22' in doc['text'])
        check('nothing is left', not d.exists() and not pathlib.Path(str(d) + '.part').exists())
    # FP8: the largest code comes first, so that NaN is met while at work.
    c = gen.build(gen.t0_config())
    name = NG + 'shard_1.weight'
    codes = np.full((15, 32), 0x30, 'u1')
    codes[3, 1], codes[7, 3], codes[9, 0] = 0x7e, 0xff, 0x7f
    check('an FP8 table', c.tensors[name].dtype == 'F8_E4M3' and c.tensors[name].shape == [15, 32])
    f = work / 'fp8-nan'
    c.tensors[name] = gen.Tensor('F8_E4M3', [15, 32], codes.tobytes())
    c.write(f)
    for threads in (1, 2):
        d = out()
        doc = json.loads(run('repack', f, '-o', d, '--table', 'nvfp4', '-j', threads, '--json', code=3).stdout)
        check('payload-nan names row 22', doc['kind'] == 'payload-nan' and 'row 22' in doc['text'])
        check('nothing is left', not d.exists() and not pathlib.Path(str(d) + '.part').exists())


def refusals(src):
    d = out()
    for args in (['--table', 'int5'], ['--experts', 'fp8'], ['--rank', '7/7'], ['--rank', '1'], ['--drop', 'x'],
                 ['--table-shards', str(n_rows(src) + 1)], ['--table-shards', '0'], ['--layout', 'column'],
                 ['--rank', '0/2', '--table-shards', '2'], ['--archive', '--table', 'fp8']):
        p = run('repack', src, '-o', d, '--json', *args, code=2)
        check('exit 2 leaves stdout empty', p.stdout == b'' and len(p.stderr.splitlines()) == 1)
    run('repack', src, '-o', src, '--force', code=2)
    run('repack', src, '-o', src / 'inside', code=2)
    run('repack', src, '-o', d, '-q')
    run('repack', src, '-o', d, '-q', code=2)
    run('repack', src, '-o', d, '-q', '--force')
    before = {p.name: p.stat().st_mtime_ns for p in src.iterdir()}
    check('the input is untouched', before == {p.name: p.stat().st_mtime_ns for p in src.iterdir()})
    missing = out()
    p = run('repack', work / 'no-such', '-o', missing, '--json', code=3)
    check('a missing input is qx.error/1', json.loads(p.stdout)['schema'] == 'qx.error/1')
    part = pathlib.Path(str(missing) + '.part')
    part.mkdir()
    (part / 'precious').write_text('x')
    run('repack', src, '-o', missing, code=2)
    check('a folder that is not ours is left alone', (part / 'precious').read_text() == 'x')


done = 0
try:
    for folder in sys.argv[2:]:
        for src in sorted(pathlib.Path(folder).iterdir()):
            if not (src / 'config.json').exists():
                continue
            print(src)
            for part in (tables, experts, untouched, archive, refusals):
                part(src)
                for d in work.iterdir():
                    shutil.rmtree(d, ignore_errors=True)
            done += 1
    zeros()
finally:
    shutil.rmtree(work, ignore_errors=True)
print(f'{done} checkpoints')
sys.exit(0 if done else 1)
