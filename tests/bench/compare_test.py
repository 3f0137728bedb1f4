"""tests/bench/compare with made-up measurements: what is a regression, and what is a mistake of the caller."""
import json
import pathlib
import subprocess
import sys
import tempfile

COMPARE = pathlib.Path(__file__).resolve().parent / 'compare'
BAD = 0


def row(fraction, kind='decode', streams=1, depth=4096, prompt=0, device='NVIDIA H200', layout='mixed', draft=0):
    return {'schema': 'qx.bench/1', 'kind': kind, 'device': device, 'layout': layout, 'streams': streams, 'depth': depth,
            'prompt': prompt, 'draft': draft, 'tok_s': 1.0, 'floor_fraction': fraction}


def op(name, fraction):
    return {'schema': 'qx.bench/1', 'kind': 'op', 'op': name, 'floor_fraction': fraction}


def text(*rows):
    return ''.join(json.dumps(r) + '\n' for r in rows)


def run(*args, stdin=''):
    p = subprocess.run([sys.executable, str(COMPARE), *map(str, args)], input=stdin, capture_output=True, text=True,
                       check=False)
    return p.returncode, p.stdout, p.stderr


def expect(what, got, code, *words):
    global BAD
    rc, out, err = got
    if rc != code or not all(w in out + err for w in words):
        BAD += 1
        print(f'FAIL {what}: exit {rc}, wanted {code} with {words}\n{out}{err}')


with tempfile.TemporaryDirectory() as d:
    base = pathlib.Path(d) / 'base.json'
    first = text(row(0.5), row(0.4, streams=4), row(0.2, kind='prefill', prompt=8192), op('moe', 0.3), op('hc', 0.2))
    expect('no baseline yet', run('--baseline', base, stdin=first), 2, str(base))
    expect('update', run('--baseline', base, '--update', stdin=first), 0)
    stored = json.loads(base.read_text())
    rows = stored['devices']['NVIDIA H200']
    if rows.get('mixed decode streams 1 depth 4096') != 0.5 or rows.get(
            'mixed decode streams 1 depth 4096 op moe') != 0.3 or len(rows) != 5:
        BAD += 1
        print('FAIL stored', rows)
    expect('the same', run('--baseline', base, '--all', stdin=first), 0, 'same')
    expect('within', run('--baseline', base, stdin=text(row(0.4851))), 0, 'same', '-3.0 %')
    expect('just worse', run('--baseline', base, stdin=text(row(0.4849))), 1, 'WORSE')
    expect('looser', run('--baseline', base, '--tolerance', '5', stdin=text(row(0.4849))), 0)
    expect('better', run('--baseline', base, stdin=text(row(0.6))), 0, 'better', '+20.0 %')
    expect('one op worse', run('--baseline', base, stdin=text(row(0.5), op('moe', 0.25))), 1, 'WORSE', 'op moe')
    expect('new row', run('--baseline', base, stdin=text(row(0.5), row(0.1, depth=131072))), 0, 'new', '131072')
    expect('missing row', run('--baseline', base, '--all', stdin=text(row(0.5))), 1, 'MISSING')
    expect('other device', run('--baseline', base, stdin=text(row(0.1, device='cpu'))), 2, 'not in the baseline')
    expect('unknown rows only', run('--baseline', base, stdin=text(row(0.1, layout='fp8'))), 2, 'nothing to compare')
    expect('nothing', run('--baseline', base), 2, 'no measurement')
    expect('not JSON', run('--baseline', base, stdin='tok/s 260\n'), 2, '-:1')
    expect('other schema', run('--baseline', base, stdin=json.dumps({'schema': 'qx.run/1'}) + '\n'), 2, 'schema')
    expect('a fraction of zero', run('--baseline', base, stdin=text(row(0.0))), 2, 'fraction')
    files = []
    for i, f in enumerate((0.500, 0.505, 0.495, 0.498, 0.502)):
        files.append(pathlib.Path(d) / f'run{i}')
        files[-1].write_text(text(row(f)))
    expect('five runs', run('--baseline', base, *files), 0, '0.5000')
    files[0].write_text(text(row(0.52)))
    expect('runs that differ', run('--baseline', base, *files), 1, 'SPREAD')
    expect('update keeps the rest', run('--baseline', base, '--update', *files[1:]), 0)
    rows = json.loads(base.read_text())['devices']['NVIDIA H200']
    if len(rows) != 5 or rows['mixed decode streams 1 depth 4096'] != 0.5:
        BAD += 1
        print('FAIL kept', rows)
    small = dict(row(0.7), geometry='some/where/slice.json')
    expect('another geometry is another measurement', run('--baseline', base, '--update', stdin=text(small)), 0)
    rows = json.loads(base.read_text())['devices']['NVIDIA H200']
    if rows.get('slice.json mixed decode streams 1 depth 4096') != 0.7 or rows['mixed decode streams 1 depth 4096'] != 0.5:
        BAD += 1
        print('FAIL geometry', rows)
    base.write_text('{"schema": "other/1", "devices": {}}')
    expect('no baseline of ours', run('--baseline', base, stdin=first), 2, 'other/1')
sys.exit(1 if BAD else 0)
