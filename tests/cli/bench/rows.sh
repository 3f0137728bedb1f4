# Rounds of drafts and a workload with a shared prefix: what a row says, and that a plot is not replaced.
command -v qx-bench > /dev/null || { echo "qx-bench is not built" >&2; exit 77; }
run() { qx bench "$SAMPLE" --device cpu "$@"; }
run --shared 128 --prompt 5 -n 3 --streams 2 --json > load 2> err || cat err
run --draft 2 --accept 2.5 -n 4 --depth 16 --repeat 1 --json --svg p.svg > rounds 2> err || cat err
run -n 1 --depth 8 --repeat 1 --svg p.svg > out 2> err && echo "the plot was replaced"
grep -q "exists" err || cat err
run --draft 2 --accept 4 -n 1 --depth 8 > out 2> err && echo "4 tokens of 3 rows"
py=/usr/bin/python3
[ -x "$py" ] || py=python3
"$py" - << 'PY'
import json
load, = map(json.loads, open("load"))
if load["kind"] != "workload" or load["shared_tokens"] != 256 or not load["ttft_s"] < load["latency_s"]:
    print(load)
row, = [r for r in map(json.loads, open("rounds")) if r["kind"] == "round"]
if row["steps"] != 4 or row["waits"] > 4 or not 2.499 < row["tok_s"] * row["step_ms"] / 1e3 <= 3:  # some are right by chance
    print(row)
PY
