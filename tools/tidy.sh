#!/bin/sh
# clang-tidy with .clang-tidy over sources in C: those given, or all of lib, cmd and kernels/ref (about ten minutes
# on two cores). Prints remarks only; exit 1 if there are any.
# usage: tools/tidy.sh [FILE…]
set -u
cd "$(dirname "$0")/.." || exit 1
. tools/setup.sh
command -v clang-tidy >/dev/null || fail "clang-tidy is not installed"
[ -f build/compile_commands.json ] || build build || fail "the build failed"
[ $# -gt 0 ] || set -- lib/*.c cmd/*.c kernels/ref/*.c
printf '%s\n' "$@" | xargs -P "${QX_JOBS:-2}" -n 1 clang-tidy -p build --quiet 2>/dev/null || exit 1
