# Command lines that contradict themselves or ask for what cannot be.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
no() { # what must be named, then the arguments
    local names=$1
    shift
    qx run "$SAMPLE" --json "$@" > out 2> err < /dev/null
    rc=$?
    [ $rc = 2 ] && [ ! -s out ] && grep -qF -- "$names" err || echo "$*: exit $rc: $(tail -1 err)"
}
no "there is no prompt"
no "exclude" --tokens 5 -p x
no "exclude" --tokens 5 --raw
no "only one" -p x --prompt-file y
no token-range --tokens 2048 -n 1
no token-range --tokens -3 -n 1
no "lists no ids" --tokens @/dev/null -n 1
no context-exceeded --tokens 5 -n 4096
no context-exceeded --tokens 5 -n 2 --ctx 4097
no context-exceeded --tokens 5 -n 18446744073709551615
no position-range --tokens 5,6 -n 2 --logits l.npy --positions 4
no position-range --tokens 5,6 -n 2 --draft-logits l.npy --positions 3
no position-range --tokens 5,6 -n 0 --logits l.npy --positions 2
no "needs --logits" --tokens 5 --positions 1
echo precious > config.json
no "exists" --tokens 5 -n 1 --logits config.json
no "exists" --tokens 5,6 -n 1 --draft-logits config.json
grep precious config.json > /dev/null && rm config.json
no "same file" --tokens 5 --logits l.npy --draft-logits l.npy
no "write files" --tokens 5 -n 1 --logits -
no "needs --template" -p x --system y
no "'--system' needs" -p x --system y --no-think
no "options of the chat template" -p x --raw --effort low
no "high" -p x --effort high
no "9" -p x --draft 9
no "gpu" -p x --device gpu
no "--streams" -p x --streams 2
no "--top-p" -p x --top-p 1.5
no "--seed" -p x --seed y
no "--stop" -p x --stop ""
no "empty" -p ""
ls
