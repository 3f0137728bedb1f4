# A conversation on a real terminal: turns, Ctrl-C during an answer, commands, leaving; and SIGINT outside
# of chat.
command -v qx-run > /dev/null || { echo "qx-run is not built" >&2; exit 77; }
py=/usr/bin/python3
[ -x "$py" ] || py=python3
command -v "$py" > /dev/null || { echo "no python3" >&2; exit 77; }
cat > chat.py << 'PY'
import json, os, pty, re, select, signal, subprocess, sys, time

sample = os.environ["SAMPLE"]


class Terminal:
    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvp("qx-run", ["qx-run", sample, "--device", "cpu", *args])
        self.seen = b""

    def until(self, pattern, seconds=30):
        """Reads until the new output matches; returns it."""
        end = time.time() + seconds
        while time.time() < end:
            m = re.search(pattern, self.seen, re.S)
            if m:
                out, self.seen = self.seen[:m.end()], self.seen[m.end():]
                return out
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:
                    data = b""
                if not data:
                    break
                self.seen += data
        print(f"no {pattern} in {self.seen[-400:]!r}")
        return b""

    def send(self, text):
        # The prompt is written before the terminal is switched; what is typed in between is echoed twice,
        # and an end of input is lost.
        time.sleep(0.7)
        os.write(self.fd, text.encode())

    def leave(self):
        end = time.time() + 20
        while time.time() < end:
            try:
                if select.select([self.fd], [], [], 0.1)[0] and not os.read(self.fd, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


# turns, a command, an unknown one, /reset, /exit
t = Terminal("-n", "6", "--greedy")
t.until(rb"/help lists commands.*> ")
t.send("In the beginning\n")
first = t.until(rb"> ")
t.send("/stats\n")
t.until(rb"1 turns; \d+ tokens of 4096.*> ")
t.send("/nonsense\n")
t.until(rb"unknown command '/nonsense'.*> ")
# characters beyond ASCII are read and edited as characters: three typed, one erased
t.send("/\u00e9\u65e5\u00fc\x7f\n")
t.until("unknown command '/\u00e9\u65e5'.*> ".encode())
t.send("/reset\n")
t.until(rb"a new conversation.*> ")
t.send("In the beginning\n")
again = t.until(rb"> ")
def words(b):
    b = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\r", b"", b)
    return b.split(b"beginning", 1)[-1].strip()
if not words(first) or words(first) != words(again):
    print(f"after /reset: {words(first)!r}, {words(again)!r}")
t.send("/exit\n")
code = t.leave()
if code:
    print(f"/exit ends with {code}")

# Ctrl-C stops the answer, at the prompt it leaves
t = Terminal("--ignore-eos", "--seed", "3")
t.until(rb"> ")
t.send("And the\n")
t.until(rb"And the\r?\n.{40}")
t.send("\x03")
t.until(rb"stopped.*> ")
t.send("/stats\n")
t.until(rb"1 turns.*> ")
t.send("\x03")
code = t.leave()
if code:
    print(f"Ctrl-C at the prompt ends with {code}")

# end of input leaves
t = Terminal()
t.until(rb"> ")
t.send("\x04")
code = t.leave()
if code:
    print(f"end of input ends with {code}")

# elsewhere: what there is, then death by the signal
for args in ([], ["--json"]):
    p = subprocess.Popen(["qx-run", sample, "--device", "cpu", "--tokens", "5,6", "--ignore-eos", *args],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if args:
        time.sleep(1)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=30)
        doc = json.loads(out)
        if doc["stop_reason"] != "interrupted" or not doc["tokens"]:
            print(f"interrupted: {doc['stop_reason']}, {len(doc['tokens'])} tokens")
    else:
        p.stdout.read1(20)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=30)
        if b"interrupted" not in err:
            print(err.decode())
    if p.returncode != -signal.SIGINT:
        print(f"SIGINT ends with {p.returncode}")
PY
"$py" chat.py
