# -n 0 is a tokenizer: no weights are read.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
qx run "$SAMPLE" -q -p "In the beginning" -n 0
printf 'In the beginning' | qx run "$SAMPLE" -q --prompt-file - -n 0
qx run "$SAMPLE" -q -p "<|im_start|>" -n 0
mkdir bare
cp "$SAMPLE"/config.json "$SAMPLE"/tokenizer.json bare
cp "$SAMPLE"/*.index.json bare
qx run bare -q -p "In the" -n 0
