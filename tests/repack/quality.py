"""What repacking costs in text: loss on a fixed passage before and after, measured through --logits.

usage: quality.py BUILD CHECKPOINT     a checkpoint with a tokenizer, such as the trained BF16 sample

The passage is the opening of Bunyan's Pilgrim's Progress (1678, public domain), which no sample was trained on.
"""
import pathlib
import json
import shutil
import sys
import tempfile

import numpy as np

from common import check, repack, run

PASSAGE = """As I walked through the wilderness of this world, I lighted on a certain place where was a den, and I laid me
down in that place to sleep: and, as I slept, I dreamed a dream. I dreamed, and behold, I saw a man clothed with rags,
standing in a certain place, with his face from his own house, a book in his hand, and a great burden upon his back. I
looked, and saw him open the book, and read therein; and, as he read, he wept, and trembled; and, not being able longer
to contain, he brake out with a lamentable cry, saying, What shall I do? In this plight, therefore, he went home and
restrained himself as long as he could, that his wife and children should not perceive his distress; but he could not be
silent long, because that his trouble increased. Wherefore at length he brake his mind to his wife and children; and thus
he began to talk to them: O my dear wife, said he, and you the children of my bowels, I, your dear friend, am in myself
undone by reason of a burden that lieth hard upon me; moreover, I am for certain informed that this our city will be
burned with fire from heaven.""".replace('\n', ' ')

src = pathlib.Path(sys.argv[2])
work = pathlib.Path(tempfile.mkdtemp(prefix='qx-quality-'))


def loss(path):
    file = work / 'logits.npy'
    file.unlink(missing_ok=True)
    n = len(json.loads(run('run', path, '-p', PASSAGE, '--raw', '-n', 0, '--json').stdout)['prompt_tokens'])
    doc = json.loads(run('run', path, '-p', PASSAGE, '--raw', '-n', 0, '--json', '--device', 'cpu', '--logits', file,
                         '--positions', f'0-{n - 2}').stdout)
    x = np.load(file).astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    logp = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    ids = doc['prompt_tokens']
    return -np.mean([logp[i, ids[i + 1]] for i in range(n - 1)]), n


try:
    base, n = loss(src)
    print(f'passage of {n} tokens; loss of {src.name} as it is: {base:.4f} nats a token')
    for args in (['--table', 'fp8'], ['--table', 'nvfp4', '--plain-scales'], ['--table', 'nvfp4'],
                 ['--experts', 'fp8-block', '--plain-scales'], ['--experts', 'fp8-block'],
                 ['--experts', 'nvfp4', '--plain-scales'], ['--experts', 'nvfp4'],
                 ['--table', 'nvfp4', '--experts', 'nvfp4', '--plain-scales'],
                 ['--table', 'nvfp4', '--experts', 'nvfp4']):
        out = work / 'out'
        doc = repack(src, out, *args)
        after, _ = loss(out)
        errors = ', '.join(f'{e["name"]} rel. RMS {e["relative_rms"]:.5f} (plain {e["plain"]["relative_rms"]:.5f}), '
                           f'{e["bits_per_weight"]:.3f} bits' for e in doc['errors'])
        print(f'{" ".join(args):58} {after:.4f} ({after - base:+.4f})  {errors}')
        check('the text still makes sense: loss within 3 percent', after < base * 1.03)
        shutil.rmtree(out)
finally:
    shutil.rmtree(work, ignore_errors=True)
