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
