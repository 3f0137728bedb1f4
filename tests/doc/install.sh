#!/bin/sh
# The installed package: only qx.h, a library that shows qx.h's functions alone, a pkg-config file with
# which an example builds and reads the row that decode-rows prints, pages and programs in place.
# usage: install.sh BUILD SOURCE
set -eu
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
ok() { passed=$((passed + 1)); }
bad() {
    echo "FAIL $*"
    exit 1
}

DESTDIR=$work/root meson install -C "$build" --no-rebuild --quiet >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
prefix=$work/root$(meson introspect "$build" --buildoptions |
    python3 -c 'import json,sys; print(next(o["value"] for o in json.load(sys.stdin) if o["name"] == "prefix"))')

headers=$(find "$prefix/include" -type f | wc -l)
if [ "$headers" != 1 ] || [ ! -f "$prefix/include/qx.h" ]; then
    bad "installed headers: $(find "$prefix/include" -type f)"
fi
ok
lib=$(find "$prefix" -name 'libqx.so.0' | head -1)
[ -n "$lib" ] || bad "no libqx.so.0"
ok
for s in $(nm -D --defined-only "$lib" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}'); do
    grep -q "\\b$s\\b" "$source/lib/qx.h" || bad "the library shows $s, which qx.h does not declare"
done
ok
for p in qx qx-inspect qx-verify qx-decode-rows qx-run; do
    [ -x "$prefix/bin/$p" ] || bad "no program $p"
done
ok

for f in bash-completion/completions/qx.bash zsh/site-functions/_qx fish/vendor_completions.d/qx.fish; do
    [ -s "$prefix/share/$f" ] || bad "no completion $f"
done
ok

pc=$(dirname "$(find "$prefix" -name libqx.pc | head -1)")
flags=$(PKG_CONFIG_PATH=$pc PKG_CONFIG_SYSROOT_DIR=$work/root pkg-config --cflags --libs libqx)
# shellcheck disable=SC2086 # flags are words
cc -std=c11 -Wall -Wextra -Werror "$source/examples/read_row.c" $flags -o "$work/read_row"
ok
LD_LIBRARY_PATH=$(dirname "$lib") "$work/read_row" "$source/sample" 17 >"$work/mine"
"$prefix/bin/qx-decode-rows" "$source/sample" --rows 17 --format jsonl >"$work/theirs"
python3 - "$work/mine" "$work/theirs" <<'PY'
import json, struct, sys


def f32(x):  # both print just enough digits to read the same f32 back
    return struct.unpack("f", struct.pack("f", float(x)))[0]


mine = [f32(x) for x in open(sys.argv[1]).read().split(":", 1)[1].split()]
theirs = [f32(x) for x in json.loads(open(sys.argv[2]).read())["values"]]
if mine != theirs:
    sys.exit(f"the example reads {mine[:4]}…, decode-rows {theirs[:4]}…")
PY
ok
"$prefix/bin/qx" verify "$source/sample" -q >/dev/null || bad "the installed qx does not find its siblings"
ok
echo "$passed passed, 0 failed, 0 skipped"
