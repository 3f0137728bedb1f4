#!/bin/bash
# What users see. usage: run.sh BIN_DIR [NAME...]
#
# Each COMMAND/CASE.sh runs in an empty folder with the built programs first in PATH and $SAMPLE set to
# the sample checkpoint. Expected: exit 0 and silence, or what lies beside it:
#   CASE.exit                 the exit status
#   CASE.stdout, CASE.stderr  the exact bytes
#   CASE.stdout.re, .stderr.re   lines of extended regular expressions, each of which some line matches
# Exit 77 skips a case.
set -u
bin=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
export PATH=$bin:$PATH SAMPLE=$here/../../sample LC_ALL=C TERM=xterm
unset QX_FAKE_TTY QX_DEVICE QX_THREADS NO_COLOR COLUMNS
passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

differs() { # stream, actual file, case base
    if [ -e "$3.$1.re" ]; then
        while IFS= read -r re; do
            grep -Eq -- "$re" "$2" || { echo "no line of $1 matches: $re"; return 0; }
        done < "$3.$1.re"
        return 1
    fi
    expected=/dev/null
    [ -e "$3.$1" ] && expected=$3.$1
    cmp -s "$expected" "$2" && return 1
    echo "$1 differs:"
    diff "$expected" "$2" | head -20
    return 0
}

for case in "$here"/*/*.sh; do
    name=${case#"$here"/}
    base=${case%.sh}
    if [ $# -gt 0 ]; then
        wanted=no
        for w in "$@"; do case $name in *"$w"*) wanted=yes ;; esac; done
        [ $wanted = yes ] || continue
    fi
    rm -rf "$work/d"
    mkdir "$work/d"
    (cd "$work/d" && bash "$case") > "$work/out" 2> "$work/err" < /dev/null
    rc=$?
    if [ $rc = 77 ]; then
        skipped=$((skipped + 1))
        echo "SKIP $name: $(head -1 "$work/err")"
        continue
    fi
    want=0
    [ -e "$base.exit" ] && want=$(cat "$base.exit")
    report=
    [ $rc = "$want" ] || report="exit status $rc, wanted $want"$'\n'"$(tail -5 "$work/err")"
    d=$(differs stdout "$work/out" "$base") && report="$report"$'\n'"$d"
    d=$(differs stderr "$work/err" "$base") && report="$report"$'\n'"$d"
    if [ -n "$report" ]; then
        failed=$((failed + 1))
        echo "FAIL $name"
        while IFS= read -r line; do echo "    $line"; done <<< "$report"
    else
        passed=$((passed + 1))
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
