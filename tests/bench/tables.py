"""Checkpoints with a large table of random rows for the benches: T0 with width 160.

usage: tables.py DIRECTORY MIB [FORMAT...]      formats bf16, fp8, nvfp4 (default all); folder names are those
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / 'gen'))
import t0 as gen  # noqa: E402


def make(directory, mib, form):
    config = gen.t0_config()
    bytes_row = {'bf16': 320, 'fp8': 160, 'nvfp4': 90}[form]
    config['text_config'].update(ple_embed_dim=640, ngram_vocab_size_base=mib * (1 << 20) // bytes_row // 4,
                                 split_ngram_parts=1)
    c = gen.build(config, table=form, sparse_table=True)
    d = pathlib.Path(directory)
    names = [gen.NG + 'shard_0.weight'] + ([gen.NG + 'shard_0.weight_scale'] if form == 'nvfp4' else [])
    plan = {'model-00001-of-00002.safetensors': [n for n in c.tensors if n not in names],
            'model-00002-of-00002.safetensors': names}
    c.write(d, shards=plan)
    import json
    import struct
    file = d / 'model-00002-of-00002.safetensors'
    rng = np.random.default_rng(1)
    with open(file, 'r+b') as f:
        n = struct.unpack('<Q', f.read(8))[0]
        head = json.loads(f.read(n))
        for name in names:
            a, b = head[name]['data_offsets']
            f.seek(8 + n + a)
            while a < b:
                m = min(8 << 20, b - a)
                v = rng.integers(0, 1 << 16, m // 2 + 1, dtype=np.uint16)
                if form == 'bf16':  # finite, of magnitudes 2^-6 to 1
                    raw = ((v & 0x807f) | (((v >> 7) % 7 + 121).astype(np.uint16) << 7)).astype('<u2').tobytes()
                elif name.endswith('scale'):
                    raw = (v.view('u1') % 32 + 40).astype('u1').tobytes()
                elif form == 'fp8':  # no NaN codes
                    u = v.view('u1')
                    raw = np.where((u & 0x7f) == 0x7f, u - 1, u).astype('u1').tobytes()
                else:
                    raw = v.tobytes()
                f.write(raw[:m])
                a += m


if __name__ == '__main__':
    for form in sys.argv[3:] or ['bf16', 'fp8', 'nvfp4']:
        make(pathlib.Path(sys.argv[1]) / form, int(sys.argv[2]), form)
