# The views beside the summary: differences with their exit codes, a plan that fits and one that does not,
# the plan before a download, statistics with their SVG, and what is refused.
cp -r "$SAMPLE" other
chmod -R u+w other
qx inspect "$SAMPLE" --diff other --values -q && echo "equal"
/usr/bin/python3 - <<'PY'
import json
c = json.load(open("other/config.json"))
c["text_config"]["num_experts_per_tok"] = 1
json.dump(c, open("other/config.json", "w"))
f = open("other/model-00002-of-00005.safetensors", "r+b")
f.seek(-1, 2)
b = f.read(1)
f.seek(-1, 2)
f.write(bytes([b[0] ^ 1]))
PY
qx inspect "$SAMPLE" --diff other --values -q > differences.txt
echo "exit $?: $(cut -d' ' -f1 differences.txt | sort | tr '\n' ' ')"

fits() { # fits ARGUMENTS: what a plan answers
    qx inspect "$@" --json | /usr/bin/python3 -c 'import json, sys; print(json.load(sys.stdin)["fit"]["fits"])'
}
fits "$SAMPLE" --fit 1GiB --ctx 1024
fits "$SAMPLE" --fit 64KiB --ctx 1024
fits "$SAMPLE/config.json" --layout nvfp4-ple --fit 1GiB --ctx 1024

qx inspect "$SAMPLE" --stats '*layers.0.mlp.experts.0.up_proj.weight_scale' --svg scales.svg | head -1
/usr/bin/python3 -c 'import xml.dom.minidom as x; print(x.parse("scales.svg").documentElement.tagName)'

qx inspect "$SAMPLE" --why mtp.layers.0.mlp.experts.0.up_proj | grep -A1 '^result'
qx inspect "$SAMPLE" --why nothing.of.this.name 2> err
echo "exit $?"
qx inspect "$SAMPLE" --values 2> err
echo "exit $?"
for a in "0" "1GiB --ctx 0" "1GiB --streams 0"; do
    # shellcheck disable=SC2086
    qx inspect "$SAMPLE" --fit $a 2> err
    echo "exit $?"
done

# A plan counts what the checkpoint itself does.
count() { qx inspect "$@" | sed -n 's/^tensors *//p' | head -1; }
[ "$(count "$SAMPLE")" = "$(count "$SAMPLE/config.json" --layout mixed)" ] || echo "planned: $(count "$SAMPLE/config.json" --layout mixed)"

# A lone config.json has no modules that its map could miss; files that cannot be read are no lone config.
qx inspect "$SAMPLE/config.json" --layout mixed | grep entry-without-module
mkdir damaged
cp "$SAMPLE/config.json" damaged
head -c 64 /dev/zero > damaged/model.safetensors
qx inspect damaged --fit 1GiB 2> err
echo "exit $?: $(cut -d" " -f2 err)"

# An archive is called one.
qx repack "$SAMPLE" -o archive --archive -q > /dev/null
qx inspect archive 2> err
echo "exit $?: $(grep -o 'an archive' err)"

# A shape that its byte range cannot hold is damage of the input, not a wrong command line.
/usr/bin/python3 - <<'PY'
import json, struct
h = json.dumps({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 0]}}).encode()
open("empty.safetensors", "wb").write(struct.pack("<Q", len(h)) + h)
PY
qx inspect empty.safetensors --stats a 2> err
echo "exit $?: $(cut -d" " -f2 err)"
