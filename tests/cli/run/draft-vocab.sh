# Fewer ids for drafts, by number or from a file, never change the text; files that cannot be are named.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
say() { qx run "$SAMPLE" -q --device cpu -p "In the beginning" --raw -n 12 --greedy "$@" 2> err || echo "$*: $(cat err)"; }
say > plain
echo "1172 258 1812, 5 6 7 999999" > ids
: > none
for v in 64 5000 ids @ids; do
    say --draft 2 --draft-vocab $v > text
    cmp -s plain text || echo "--draft-vocab $v: $(cat text)"
done
bad() { # what must be named, the value
    qx run "$SAMPLE" --tokens 5 -n 1 --draft 1 --draft-vocab "$2" > out 2> err && echo "$2: accepted"
    grep -q "$1" err || echo "$2: $(cat err)"
}
bad "cannot read list of ids 'missing'" missing
bad "no ids" none
echo "1 x" > ids
bad "usage" ids
# Notes about the checkpoint come after what is wrong with the prompt.
qx run "$SAMPLE" --prompt-file missing > out 2> err && echo accepted
if [ "$(wc -l < err)" != 1 ] || ! grep -q "cannot read prompt file 'missing'" err; then
    cat err
fi
# Files of logits are replaced only with --force.
say --logits l.npy > out
qx run "$SAMPLE" -q --device cpu --tokens 5 -n 1 --logits l.npy > out 2> err && echo replaced
grep -q exists err || cat err
say --logits l.npy --force > out
