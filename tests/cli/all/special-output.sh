# A pipe or device is never replaced by an output, --force or not.
kept() { # the command line
    command -v "qx-$1" > out || return 0
    rm -f pipe; mkfifo pipe; timeout 20 qx "$@" > out 2> err
    rc=$?
    [ $rc = 2 ] && [ -p pipe ] && grep -q "device, pipe or socket" err || echo "$*: exit $rc: $(cat err)"
}
kept decode-rows "$SAMPLE" --rows 0 -o pipe --force
kept verify "$SAMPLE" --write-manifest pipe --force
kept inspect "$SAMPLE" --stats '*A_log' --svg pipe --force
kept run "$SAMPLE" --tokens 5 -n 1 --logits pipe --force -q
kept repack "$SAMPLE" -o pipe --force -q
[ ! -e pipe.part ] || echo "pipe.part is left"
