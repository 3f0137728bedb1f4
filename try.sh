#!/bin/sh
# Installs what is missing, builds, and runs the main job on the sample checkpoint.
set -eu
cd "$(dirname "$0")"
. tools/setup.sh

# shellcheck disable=SC2086 # a list of words
need $QX_BUILD_PACKAGES
build build || fail "the build failed"
say_cuda

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}
show build/qx inspect sample
show build/qx verify sample
printf '\n$ build/qx decode-rows sample --text "the LORD" | cut -c -100\n'
build/qx decode-rows sample --text "the LORD" | cut -c -100
printf '\n$ build/qx run sample -p "In the beginning" -n 60 --seed 7\n'
build/qx run sample -p "In the beginning" -n 60 --seed 7
