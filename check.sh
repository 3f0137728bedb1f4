#!/bin/sh
# Every check: builds with gcc and clang without warnings, all tests, sanitizers, scripts, manual.
# Quiet when all is well but for skips; the last line is 'N passed, N failed, N skipped'.
# usage: ./check.sh [--quick]     --quick: only build/ and its tests
set -u
cd "$(dirname "$0")" || exit 1
. tools/setup.sh

# shellcheck disable=SC2086 # lists of words
need $QX_BUILD_PACKAGES $QX_CHECK_PACKAGES
passed=0 failed=0 skipped=0

# step NAME COMMAND…: counts as one test; its output is shown when it fails.
step() {
    name=$1
    shift
    log=$(mktemp)
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        tail -60 "$log"
    fi
    rm -f "$log"
}

# tests DIRECTORY ARGUMENT…: meson's tests, counted one by one.
tests() {
    dir=$1
    shift
    meson test -C "$dir" --no-rebuild --num-processes "${QX_JOBS:-2}" --timeout-multiplier 3 "$@" >"$dir/test.log" 2>&1
    code=$?
    counts=$(python3 tools/tally.py "$dir/meson-logs/testlog.json") || { tail -40 "$dir/test.log"; counts="0 1 0"; }
    # shellcheck disable=SC2086 # three numbers
    set -- $counts
    [ "$code" = 0 ] || [ "$2" -gt 0 ] || { tail -40 "$dir/test.log"; set -- "$1" 1 "$3"; }
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

# Cases of tests/cli are pieces that its bash runner reads; they have no first line of their own.
check_scripts() {
    git ls-files '*.sh' .ci/run | grep -v '^tests/cli/.*/' | xargs shellcheck -x &&
        git ls-files 'tests/cli/*/*.sh' | xargs shellcheck -s bash
}

check_manual() {
    found=0
    for page in build/man/*.[1-9]; do
        [ -f "$page" ] || continue
        found=$((found + 1))
        # scdoc begins sections with a paragraph macro that mandoc skips; every other remark counts
        mandoc -T lint -W warning "$page" | grep -v 'skipping paragraph macro' && return 1
    done
    [ "$found" -gt 0 ] || { echo "no page in build/man"; return 1; }
}

build build || fail "the build failed"
say_cuda
tests build
if [ "${1:-}" != --quick ]; then
    step "gcc, -Werror, no CUDA" build build-gcc -Dwerror=true -Dcuda=disabled
    step "clang, -Werror, no CUDA" env CC=clang sh -c '. tools/setup.sh; build build-clang -Dwerror=true -Dcuda=disabled'
    step "sanitizer build" build build-san -Db_sanitize=address,undefined -Db_lundef=false -Dcuda=disabled
    tests build-san --suite unit --suite B --timeout-multiplier 10
    if [ -n "$(command -v nvcc)" ] || [ -x /usr/local/cuda/bin/nvcc ]; then
        step "CUDA code for another architecture" tools/cuda_archs.sh 120a
    fi
    step "scripts (shellcheck)" check_scripts
    step "manual (mandoc -T lint)" check_manual
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
