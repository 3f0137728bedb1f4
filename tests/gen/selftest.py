#!/usr/bin/env python3
"""The generators make what the specification counts."""
import collections
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import t0


def check(what, found, wanted):
    if found != wanted:
        sys.exit(f"selftest.py: {what}: found {found}, expected {wanted}")


c = t0.t0()
by = collections.Counter(t.dtype for t in c.tensors.values())
size = collections.Counter()
for t in c.tensors.values():
    size[t.dtype] += t.n_bytes
    check("bytes", len(t.data), t.n_bytes)
check("T0 tensors", len(c.tensors), 244)
check("T0 bytes", c.payload, 633870)
check("T0 by dtype", dict(by), {"BF16": 135, "U8": 24, "F8_E4M3": 34, "F32": 48, "I64": 3})
check("T0 bytes by dtype", dict(size), {"BF16": 591734, "U8": 24576, "F8_E4M3": 17280, "F32": 192, "I64": 88})
check("T0 mtp", sum(n.startswith("mtp.") for n in c.tensors), 41)
n = t0.t0_nvfp4()
check("T0-NVFP4", (len(n.tensors), n.payload), (248, 633032))
check("multipliers", t0.hash_multipliers(248320, 3), [23703573157769, 20109073645365, 8052911324071])
check("T0 multipliers", t0.hash_multipliers(32, 3),
      [256496738022509279, 251627398771002343, 55314113489879221])
sizes, offsets, rows, width = t0.table_geometry(c.text)
check("T0 table", (sizes, offsets, rows, width), ([11, 13, 17, 19], [0, 11, 24, 41], 60, 32))
check("primes", t0.primes_from(20000000, 16)[-1], 20000171)
big = t0.sparse_table_t0()
check("sparse rows", big.tensors[t0.NG + "shard_0.weight"].shape, [27000132, 160])
with tempfile.TemporaryDirectory() as d:
    c.write(d)
    back = {}
    for f in pathlib.Path(d).glob("*.safetensors"):
        back.update(t0.read_safetensors(f))
    check("round trip", {k: v.data for k, v in back.items()} == {k: v.data for k, v in c.tensors.items()}, True)
