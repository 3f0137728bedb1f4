# A PATH that does not exist: exit 3, one message, with --json one qx.error/1 object.
try() {
    command -v "qx-$1" > /dev/null || return 0
    qx "$@" > out 2> err
    rc=$?
    [ $rc = 3 ] && [ ! -s out ] && [ "$(wc -l < err)" = 1 ] || echo "$*: exit $rc, $(cat err)"
    qx "$@" --json > out 2> err
    rc=$?
    [ $rc = 3 ] && [ "$(wc -l < out)" = 1 ] && [ "$(wc -l < err)" = 1 ] || echo "$* --json: exit $rc, $(cat err)"
    grep -q '^{"schema": "qx.error/1", "kind": "not-found"' out || echo "$* --json: $(cat out)"
}
try inspect /nonexistent/x
try verify /nonexistent/x
try decode-rows /nonexistent/x --rows 1
try repack /nonexistent/x -o "$PWD/new"
try run /nonexistent/x -p text
