# The rendered prompt, byte for byte, without running anything.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
qx run "$SAMPLE" --template qwen3.8 --show-prompt --no-think --system "You are concise." -p "Hello?"
echo ---
qx run "$SAMPLE" --template qwen3.8 --show-prompt --effort medium --system "You are concise." -p "Hello?"
echo ---
qx run "$SAMPLE" --raw --show-prompt -p "  as it is "
cp -r "$SAMPLE" known
chmod -R u+w known
echo "{{ messages }}" > known/chat_template.jinja
qx run known -p "Hello?" --json 2> err
[ $? = 3 ] || echo "an unknown template is accepted"
for word in --raw "--template qwen3.8"; do grep -qF -- "$word" err || cat err; done
