# -h, --help and --version of every program: exit 0, on stdout, silent on stderr; the first line is the
# synopsis; -h is the shorter one; every listed option is in --help.
programs="qx"
for name in $(qx help | sed -n '/^Commands:/,/^$/s/^  \([a-z-]*\) .*/\1/p'); do
    command -v "qx-$name" > /dev/null && programs="$programs qx-$name"
done
for p in $programs; do
    for o in -h --help --version -V; do
        "$p" $o > "out$o" 2> err || echo "$p $o: exit $?"
        [ -s err ] && echo "$p $o: $(cat err)"
        [ -s "out$o" ] || echo "$p $o says nothing"
    done
    cmp -s out-V out--version || echo "$p: -V and --version differ"
    head -1 out--version | grep -Eq "^$p [0-9]+\.[0-9]+\.[0-9]+ \(commit " || echo "$p: $(head -1 out--version)"
    grep -q "zstd" out--version || echo "$p --version names no libraries"
    [ "$p" = qx ] && continue
    head -1 out-h | grep -q "^qx ${p#qx-} " || echo "$p -h begins with: $(head -1 out-h)"
    [ "$(head -1 out-h)" = "$(head -1 out--help)" ] || echo "$p: -h and --help begin differently"
    [ "$(wc -l < out-h)" -lt "$(wc -l < out--help)" ] || echo "$p: -h is not shorter than --help"
    grep -q "^Examples:" out-h || echo "$p -h has no examples"
    "$p" --list-options | cut -f1 | tr ',' '\n' | while read -r o; do
        grep -qE -- "(^|[ ,])$o([ ,[]|\$)" out--help || echo "$p --help does not list $o"
    done
    qx "${p#qx-}" --version | cmp -s - out--version || echo "qx ${p#qx-} differs from $p"
    qx help "${p#qx-}" | cmp -s - out--help || echo "qx help ${p#qx-} differs from $p --help"
done
