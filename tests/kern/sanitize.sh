#!/bin/sh
# kerncheck's suites under compute-sanitizer, op by op and tool by tool, several at a time; needs a GPU.
# usage: sanitize.sh KERNCHECK [SECONDS [OP…]]
# SECONDS: limit of one op with one tool (default 120). A line each; exit 1 if anything was found or a limit was passed.
# Memcheck takes a read past the end for one of the next buffer unless they lie apart: hence its padding.
# Racecheck takes most: the cases of an op are shared out among four runs.
# Initcheck knows what the host copied and set; kerncheck fills its buffers, so what it finds lies in an op's workspace.
set -u
kerncheck=$1
limit=${2:-120}
[ $# -lt 2 ] || shift
shift
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; exit 77; }
ops=$*
[ -n "$ops" ] || ops=$("$kerncheck" --list | sed 's,/.*,,' | sort -u)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2016 # the inner shell expands
for tool in racecheck memcheck initcheck; do
    for op in $ops; do
        if [ "$tool" = racecheck ]; then
            for part in 0 1 2 3; do
                echo "$tool $op $part/4"
            done
        else
            echo "$tool $op 0/1"
        fi
    done
done | xargs -P "${QX_JOBS:-6}" -L 1 sh -c '
    log=$0/$3-$4-${5%/*}
    start=$(date +%s)
    [ "$3" = memcheck ] && padding="--padding 4096" || padding=
    timeout "$2" compute-sanitizer --tool "$3" $padding --error-exitcode 9 "$1" --op "$4" --part "$5" --most "${QX_MOST:-0}" >"$log" 2>&1
    rc=$?
    took=$(($(date +%s) - start))
    cases=$(sed -n "s/^\([0-9]* cases\), 0 failed.*/\1/p" "$log")
    case $rc in
    0) echo "ok   $3 $4 $5: ${cases:-?}, $took s" ;;
    124) echo "SLOW $3 $4 $5: not done in $2 s" ;;
    *) echo "FAIL $3 $4 $5: exit $rc"; grep -v "^\$" "$log" | head -30 ;;
    esac
    [ $rc = 0 ]
' "$logs" "$kerncheck" "$limit" || exit 1
