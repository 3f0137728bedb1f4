# A file that is no checkpoint is refused, not shown as an empty one.
echo '{"model": {"vocab": {}}}' > tokenizer.json
qx inspect tokenizer.json > out 2> err
echo "$? $(wc -c < out) $(grep -o not-a-checkpoint err)"
qx inspect tokenizer.json --json 2> err | grep -o '"kind": "[a-z-]*"'
qx verify tokenizer.json > out 2> err
echo "$? $(grep -o not-a-checkpoint err)"
cp "$SAMPLE/config.json" lone.json
qx inspect lone.json > out
echo "$? $(grep -c '^model' out)"
# There is nothing to verify in a configuration; that must not pass for a sound checkpoint.
qx verify lone.json > out 2> err
echo "$? $(wc -c < out) $(grep -o 'give its directory' err)"
# Folders of a hub's cache above the checkpoint, and names on a hub.
mkdir -p models--o--n/snapshots/1234 models--o--n/blobs
cp "$SAMPLE/config.json" models--o--n/snapshots/1234
for p in models--o--n models--o--n/snapshots; do
    qx inspect "$p" 2>&1 | grep -o "did you mean '.*'"
done
for p in owner/name https://hub/owner/name models--o--n/name ./owner/name; do
    qx inspect "$p" 2>&1 | grep -c 'downloaded first' || true
done
