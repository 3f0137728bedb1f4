# shellcheck shell=sh disable=SC2034
# Sourced by try.sh and check.sh from the top folder: installs what is missing, builds into build/.
# Quiet when all is well.

QX_BUILD_PACKAGES="gcc libc6-dev meson ninja-build pkg-config python3 python3-numpy libzstd-dev libcjson-dev
libxxhash-dev libutf8proc-dev libcmocka-dev liburing-dev libedit-dev libssl-dev"
QX_CHECK_PACKAGES="clang shellcheck scdoc mandoc zstd binutils git"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# have PACKAGE: installed, by Debian's own word.
have() {
    dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'
}

# need PACKAGE…: installs the missing ones as root or with sudo, else prints the one line to run.
need() {
    command -v dpkg-query >/dev/null 2>&1 || fail "not a Debian system: install the likes of: $*"
    missing=""
    for p in "$@"; do
        have "$p" || missing="$missing $p"
    done
    [ -z "$missing" ] && return 0
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo"
    else
        fail "missing packages; run: sudo apt-get install$missing"
    fi
    log=$(mktemp)
    echo "installing:$missing"
    # shellcheck disable=SC2086 # the lists are words
    if ! { $as_root apt-get update && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y \
            --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -20 "$log" >&2
        fail "apt-get failed for:$missing"
    fi
    rm -f "$log"
}

# quietly LOG COMMAND…: its output is shown only when it fails.
quietly() {
    out=$1
    shift
    "$@" >"$out" 2>&1 || { tail -40 "$out" >&2; return 1; }
}

# build DIRECTORY [MESON OPTION…]: configure once, then compile.
build() {
    dir=$1
    shift
    if [ ! -f "$dir/build.ninja" ]; then
        rm -rf "$dir"
        quietly "${TMPDIR:-/tmp}/qx-setup.$$" meson setup "$dir" "$@" || return 1
        rm -f "${TMPDIR:-/tmp}/qx-setup.$$"
    fi
    quietly "$dir/build.log" ninja -C "$dir" -j "${QX_JOBS:-2}"
}

say_cuda() {
    if [ -z "$(command -v nvcc)" ] && [ ! -x /usr/local/cuda/bin/nvcc ]; then
        echo "note: no nvcc here: built without GPU kernels; everything runs on the CPU"
    fi
}
