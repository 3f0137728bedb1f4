#!/bin/sh
# Compiles every CUDA file for architectures that the ordinary build leaves out, without optimizing: guards of
# code for one architecture alone show here. Nothing is linked or kept.
# usage: tools/cuda_archs.sh [ARCH…]     ARCH: 90a 100a 120a 121a ptx (default: all but 90a)
set -u
cd "$(dirname "$0")/.." || exit 1
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || { echo "no nvcc"; exit 77; }
[ $# -gt 0 ] || set -- 100a 120a 121a ptx
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# shellcheck disable=SC2016 # the inner shell expands
for arch in "$@"; do
    code="arch=compute_$arch,code=sm_$arch"
    [ "$arch" != ptx ] || code="arch=compute_90,code=compute_90"
    for f in kernels/cuda/*.cu; do
        echo "$code $f"
    done
done | xargs -P "${QX_JOBS:-2}" -L 1 sh -c '
    name=$(echo "$3-$2" | tr "/=," ___)
    "$1" -c "$3" -o "$0/$name.o" -std=c++17 -O0 -Xcicc -O0 -Xptxas -O0 -Xcompiler -fPIC,-Wall -Werror all-warnings \
        -I lib -I kernels -gencode "$2" >"$0/$name.log" 2>&1 || { echo "FAIL $2 $3"; cat "$0/$name.log"; exit 255; }
' "$out" "$nvcc"
