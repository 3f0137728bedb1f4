# A batch gives each request the text that it has alone, in the order of the file, whatever they share.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
py=/usr/bin/python3
[ -x "$py" ] || py=python3
"$py" - << 'PY'
import json, os, subprocess

sample = os.environ["SAMPLE"]


def run(*args, stdin=None):
    p = subprocess.run(["qx-run", sample, "--device", "cpu", "--greedy", "--json", "-q", *args],
                       input=stdin, capture_output=True, text=True)
    return p.returncode, [json.loads(x) for x in p.stdout.splitlines()], p.stderr


shared = "And it came to pass in those days, that the LORD spake unto Moses, saying, " * 3
requests = [{"id": "first", "prompt": shared + "Speak", "max_tokens": 5},
            {"id": 2, "prompt": "In the beginning", "max_tokens": 9},
            {"prompt": shared + "unto", "max_tokens": 12},
            {"id": "ids", "tokens": [5, 6, 7], "max_tokens": 3},
            {"id": "last", "prompt": shared + "Go", "max_tokens": 1}]
alone = []
for q in requests:
    how = ["-p", q["prompt"]] if "prompt" in q else ["--tokens", ",".join(map(str, q["tokens"]))]
    alone.append(run(*how, "-n", str(q["max_tokens"]))[1][0])
lines = "\n".join(json.dumps(q) for q in requests) + "\n"
for streams in ("1", "2", "3", "8"):
    rc, docs, err = run("--batch", "-", "--streams", streams, stdin=lines)
    if rc or err or len(docs) != 5:
        print(f"streams {streams}: exit {rc}, {len(docs)} answers, {err}")
        continue
    if [d["id"] for d in docs] != ["first", 2, 3, "ids", "last"]:
        print([d["id"] for d in docs])
    for d, a in zip(docs, alone):
        for key in ("prompt_tokens", "tokens", "stop_reason"):
            if d[key] != a[key]:
                print(f"streams {streams}, {d['id']}: {key} {d[key]}, alone {a[key]}")
# turns of a conversation that share their beginning
rc, docs, err = run("--batch", "-", "--template", "qwen3.8", "-n", "2", stdin="\n".join(json.dumps(
    {"messages": [{"role": "user", "content": c}]}) for c in ("one", "two", "three")))
if rc or any(len(d["tokens"]) != 2 for d in docs):
    print(rc, docs, err)
# what is wrong in a line is told with its number, before anything runs
for bad, word in (('{"prompt": 5}', "prompt"), ("{", "line 2"), ('{"prompt": "a", "tokens": [1]}', "exactly one"),
                  ('{"tokens": [2048]}', "2048"), ('{"tokens": [5], "max_tokens": 5000}', "context-exceeded"),
                  ('{"messages": []}', "template"), ('{"id": [], "prompt": "x"}', "id"), ("[]", "object")):
    rc, docs, err = run("--batch", "-", stdin='{"prompt": "x"}\n' + bad)
    if rc not in (2, 3) or "line 2" not in err or word not in err or (rc == 3) != (len(docs) == 1):
        print(f"{bad}: exit {rc}, {docs}, {err}")
PY
