#!/bin/sh
# Fuzzes targets, one after another or QX_JOBS beside each other, with what sanitizers see. New inputs are kept in
# build-fuzz/new, findings in build-fuzz/found; exit 1 if there is one. Mended findings belong into tests/fuzz/corpus.
# usage: tools/fuzz.sh [-s SECONDS] [TARGET…]     SECONDS a target (default 60); default: all targets
set -u
cd "$(dirname "$0")/.." || exit 1
. tools/setup.sh
seconds=60
if [ "${1:-}" = -s ]; then
    seconds=${2:?seconds}
    shift 2
fi
if [ $# = 0 ]; then
    # shellcheck disable=SC2046 # names of targets
    set -- $(basename -s .c tests/fuzz/fuzz_*.c | sed 's/^fuzz_//')
fi
dir=build-fuzz
if [ ! -f $dir/build.ninja ]; then
    quietly /dev/stderr env CC=clang meson setup $dir -Dfuzz=true -Dcuda=disabled -Dman=disabled \
        -Db_sanitize=address,undefined -Db_lundef=false -Doptimization=1 >/dev/null || fail "meson failed"
fi
# shellcheck disable=SC2046
ninja -C $dir -j "${QX_JOBS:-2}" $(printf 'tests/fuzz/fuzz_%s ' "$@") >/dev/null || fail "the build failed"
export seconds dir
# shellcheck disable=SC2016 # the inner shell expands
printf '%s\n' "$@" | xargs -P "${QX_JOBS:-2}" -I T sh -c '
    mkdir -p $dir/new/T $dir/found/T
    $dir/tests/fuzz/fuzz_T -max_total_time=$seconds -rss_limit_mb=6000 -timeout=120 -close_fd_mask=3 \
        -print_final_stats=1 -artifact_prefix=$dir/found/T/ $dir/new/T tests/fuzz/corpus/T 2>$dir/new/T.log
    echo "T: $(sed -n "s/stat::number_of_executed_units: *//p" $dir/new/T.log) runs, $(ls $dir/new/T | wc -l) inputs, $(
        ls $dir/found/T | wc -l) findings"'
[ -z "$(find $dir/found -type f)" ] || { find $dir/found -type f; exit 1; }
