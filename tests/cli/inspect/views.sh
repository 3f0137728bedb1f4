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
qx inspect "$SAMPLE" --fit 0 2> err
echo "exit $?"
