# Colour: --color wins, else only on a terminal, not with NO_COLOR or TERM=dumb. Meaning never hangs on it.
esc=$(printf '\033')
has() { # wanted yes or no, what, then the command
    local want=$1 what=$2 got=no
    shift 2
    env "$@" > out 2> err
    grep -q "$esc" out err && got=yes
    [ $got = "$want" ] || echo "$what: escape sequences: $got, wanted $want"
    sed "s/$esc\[[0-9;]*m//g" out > plain
    [ -e first ] || cp plain first
    cmp -s first plain || echo "$what: the text differs"
}
has no "piped" qx inspect "$SAMPLE"
has yes "always" qx inspect "$SAMPLE" --color always
has no "never on a terminal" QX_FAKE_TTY=out,err COLUMNS=500 qx inspect "$SAMPLE" --color never
has yes "terminal" QX_FAKE_TTY=out,err COLUMNS=500 qx inspect "$SAMPLE"
has no "NO_COLOR" QX_FAKE_TTY=out,err COLUMNS=500 NO_COLOR=1 qx inspect "$SAMPLE"
has yes "empty NO_COLOR" QX_FAKE_TTY=out,err COLUMNS=500 NO_COLOR= qx inspect "$SAMPLE"
has no "dumb" QX_FAKE_TTY=out,err COLUMNS=500 TERM=dumb qx inspect "$SAMPLE"
has yes "--color over NO_COLOR" NO_COLOR=1 qx inspect "$SAMPLE" --color always
