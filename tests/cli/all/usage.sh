# Wrong command lines of every program: exit 2, one line on stderr that names what is wrong, nothing on
# stdout, with --json neither.
check() { # what must be named, then the command line
    local names=$1 rc lines
    shift
    for json in '' --json; do
        # shellcheck disable=SC2086
        "$@" $json > out 2> err < /dev/null
        rc=$?
        lines=$(wc -l < err)
        if [ $rc != 2 ] || [ -s out ] || [ "$lines" != 1 ] || ! grep -qF -- "$names" err; then
            echo "'$* $json': exit $rc, $lines lines on stderr, $(wc -c < out) bytes on stdout: $(head -2 err)"
        fi
    done
}
for name in $(qx help | sed -n '/^Commands:/,/^$/s/^  \([a-z-]*\) .*/\1/p'); do
    command -v "qx-$name" > /dev/null || { echo "qx-$name is not built"; continue; }
    check --wrong qx-"$name" x --wrong
    check -Z qx-"$name" x -Z
    case $name in
    bench) check "give either" qx "$name" ;; # PATH or --geometry
    *) check missing qx "$name" ;;
    esac
    check extra qx "$name" a b extra
    check --verbose=1 qx-"$name" x --verbose=1 2> /dev/null | grep -v "verbose" # a switch takes no value
    check "--color" qx-"$name" x --color --wrong
    check "MiB" qx-"$name" x --threads 2MiB
    # the value is missing: last word of the line
    qx-"$name" x --threads > out 2> err
    [ $? = 2 ] && [ ! -s out ] && grep -qF -- "--threads" err || echo "qx-$name --threads: $(cat err)"
done
check inspekt qx inspekt
check "'inspect'" qx inspekt
check --wrong qx --wrong
check extra qx help inspect extra
check nonsense qx help nonsense
check "--drop" qx repack x -o y --drop=
check "--decoder" qx verify x --decoder=
