#!/usr/bin/env python3
"""Write the version script of libqx: exports.py QX_H API_MAJOR OUT. What qx.h marks QX_API, nothing else."""
import re
import sys

header, major, out = sys.argv[1:4]
with open(header, encoding="utf-8") as f:
    text = re.sub(r"/\*.*?\*/", "", f.read(), flags=re.S)
names = sorted(set(re.findall(r"^QX_API\b[^;]*?\b(qx_\w+)\s*\(", text, re.M)))
if not names:
    sys.exit(f"exports.py: no QX_API function in {header}")
with open(out, "w", encoding="ascii") as f:
    f.write("LIBQX_%s {\nglobal:\n%slocal:\n    *;\n};\n" % (major, "".join(f"    {n};\n" for n in names)))
