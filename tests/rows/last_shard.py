"""decode-rows when the table's last shard is missing or cannot be read: rows in it fail for that reason, exit 3, rows
elsewhere are decoded, rows behind it are out of range, exit 2.

usage: last_shard.py BUILD
"""
import json
import pathlib
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent / 'repack'))
from common import check, gen, run  # noqa: E402

NAME = gen.NG + 'shard_3.weight'
FILES = ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')


def make(path, parts=4):
    c = gen.build(gen.t0_config())
    c.write(path, shards={FILES[0]: [n for n in c.tensors if n != NAME], FILES[1]: [NAME]})
    if parts is None:
        config = json.loads((path / 'config.json').read_text())
        del config['text_config']['split_ngram_parts']
        (path / 'config.json').write_text(json.dumps(config))
    return path


def index(path, change):
    p = path / 'model.safetensors.index.json'
    doc = json.loads(p.read_text())
    change(doc['weight_map'])
    p.write_text(json.dumps(doc))


def expect(path, kind, known=True):
    doc = json.loads(run('decode-rows', path, '--rows', '44', '--json').stdout)
    check('a row of a present shard', (doc['shard'], doc['local_row']) == (2, 14))
    for row in ('45', '59', '3,59'):
        p = run('decode-rows', path, '--rows', row, '--json', code=3 if known else 2)
        if known:
            doc = json.loads(p.stdout.splitlines()[-1])
            check(f'{path.name}: row {row} gives {doc["kind"]}, expected {kind}',
                  doc['schema'] == 'qx.error/1' and doc['kind'] == kind)
    run('decode-rows', path, '--rows', '60', '--json', code=2)


with tempfile.TemporaryDirectory(prefix='qx-last-') as tmp:
    work = pathlib.Path(tmp)
    for parts in (4, None):
        # The index names a file that is not there; one cut short; one that is no safetensors file.
        d = make(work / f'gone-{parts}', parts)
        (d / FILES[1]).unlink()
        expect(d, 'shard-missing')
        d = make(work / f'short-{parts}', parts)
        raw = (d / FILES[1]).read_bytes()
        (d / FILES[1]).write_bytes(raw[:-100])
        p = run('decode-rows', d, '--rows', '59', '--json', code=3)
        doc = json.loads(p.stdout)
        check(f'truncated: {doc}', doc['kind'] == 'truncated')
        d = make(work / f'other-{parts}', parts)
        (d / FILES[1]).write_bytes(b'GGUF' + bytes(100))
        expect(d, 'not-safetensors')
        # Nothing knows of it but the configuration, if that.
        d = make(work / f'unknown-{parts}', parts)
        index(d, lambda m: m.pop(NAME))
        (d / FILES[1]).unlink()
        expect(d, 'ple-shard-missing', known=parts is not None)
print('last shard: ok')
