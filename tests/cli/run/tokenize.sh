# -n 0 is a tokenizer: no weights are read.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
qx run "$SAMPLE" -q -p "In the beginning" -n 0
printf 'In the beginning' | qx run "$SAMPLE" -q --prompt-file - -n 0
qx run "$SAMPLE" -q -p "<|im_start|>" -n 0
mkdir bare
cp "$SAMPLE"/config.json "$SAMPLE"/tokenizer.json bare
cp "$SAMPLE"/*.index.json bare
qx run bare -q -p "In the" -n 0
# every recorded case, through the program
py=/usr/bin/python3
[ -x "$py" ] || py=python3
"$py" - << 'PY'
import json, os, subprocess
sample = os.environ["SAMPLE"]
for i, case in enumerate(json.load(open(sample + "/../tests/data/tokenizer_cases.json"))):
    p = subprocess.run(["qx-run", sample, "-q", "--raw", "--prompt-file", "-", "-n", "0", "--json"],
                       input=case["text"].encode(), capture_output=True)
    ids = json.loads(p.stdout)["prompt_tokens"] if p.returncode == 0 else p.stderr
    if ids != case["ids"]:
        print(f"case {i}: {ids}, wanted {case['ids']}")
PY
