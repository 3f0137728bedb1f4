#!/bin/sh
# qx.h compiles alone, as C11 and as C++11, without a warning.
# usage: header.sh SOURCE
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-Wall -Wextra -Wpedantic -Werror -fsyntax-only"
printf '#include <qx.h>\nint main(void) { return QX_OK; }\n' >"$work/a.c"
# shellcheck disable=SC2086 # flags are words
cc -std=c11 $flags -I "$1/lib" "$work/a.c"
if command -v c++ >/dev/null 2>&1; then
    cp "$work/a.c" "$work/a.cc"
    sed -i 's/(void)/()/' "$work/a.cc"
    # shellcheck disable=SC2086
    c++ -std=c++11 $flags -I "$1/lib" "$work/a.cc"
    echo "2 passed, 0 failed, 0 skipped"
else
    echo "SKIP header in C++: no c++ here"
    echo "1 passed, 0 failed, 1 skipped"
fi
