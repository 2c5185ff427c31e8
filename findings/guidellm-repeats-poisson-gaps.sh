#!/usr/bin/env bash
# guidellm 0.8.1, `--profile kind=poisson,rate=R`.
#
# Expected: Poisson arrivals: gaps between requests are independent draws of one exponential distribution, as queueing
# formulas, simulators and planners assume of such a run.
#
# Seen: requests come from ten worker processes, and each has a generator of its own with the SAME seed (42). All draw the same
# gaps, and the schedule adds up the draws of all: each gap comes ten times, nearly always in a row. 400 requests have 40
# different gaps: stretches of ten requests at many times the rate, then pauses. A server that is busy 70% of the time
# had 2 to 17 times the queue of a Poisson load in four runs (how the ten interleave differs), so that latencies near
# saturation are worse than the same engine's in production. `random_seed` of the profile is one seed for all ten, too.
#
# 400 requests at 20/s, by the times in guidellm's own report (`targeted_start`)
# gaps of different length                   41 of 399, each up to ten times
# mean rate                                  21.6/s
# mean wait at one server of 35 ms each      511 ms; with Poisson arrivals at 20/s 41 ms (20 seeds: 25 to 66)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q guidellm==0.8.1

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean, quantiles

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = Path(sys.argv[1])
NUM, RATE, SERVICE_S = 400, 20.0, 0.7 / 20.0
ABOUT = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
EVENTS = [{**ABOUT, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
          {**ABOUT, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
          {**ABOUT, "choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 1, "total_tokens": 31}}]


class Engine(BaseHTTPRequestHandler):
    """Streams one token at once."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
        self.reply(json.dumps(models).encode(), "application/json")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        lines = [f"data: {json.dumps(each)}\n\n" for each in EVENTS] + ["data: [DONE]\n\n"]
        self.reply("".join(lines).encode(), "text/event-stream")


letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate([*letters, "</s>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder / "one")
engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
engine.daemon_threads = True
threading.Thread(target=engine.serve_forever, daemon=True).start()

report = folder / "report.json"
command = [folder / "venv/bin/guidellm", "run", "--disable-progress", "--profile", f"kind=poisson,rate={RATE:g}"]
command += ["--backend", f"kind=openai_http,target=http://127.0.0.1:{engine.server_port},model=m"]
command += ["--constraint", f"kind=max_requests,count={NUM}", "--tokenizer", f"kind=hf_auto,model={folder / 'one'}"]
command += ["--data", "kind=synthetic_text,prompt_tokens=30,output_tokens=1", "--output", f"kind=json,path={report}"]
with open(folder / "log", "w") as log:
    subprocess.run(command, stdout=log, stderr=log, check=True, cwd=folder, timeout=300)
requests = json.loads(report.read_text())["benchmarks"][0]["requests"]["successful"]
times = sorted(each["info"]["timings"]["targeted_start"] for each in requests)
times = [time for time in times if time > times[-1] - 3600]  # on a loaded machine one of them may have none
gaps = [later - earlier for earlier, later in zip(times, times[1:])]


def mean_wait_s(gaps):
    """Mean time in the queue of one server that takes `SERVICE_S` for each request (Lindley's recursion)."""
    waits = [0.0]
    for gap in gaps:
        waits.append(max(0.0, waits[-1] + SERVICE_S - gap))
    return mean(waits)


def poisson(seed):
    draw = random.Random(seed)
    return [draw.expovariate(RATE) for _ in gaps]


lengths = Counter(round(gap, 5) for gap in gaps)
waits_s = sorted(mean_wait_s(poisson(seed)) for seed in range(20))
print(f"gaps of different length: {len(lengths)} of {len(gaps)}; most often {max(lengths.values())} times")
print(f"mean rate: {len(gaps) / (times[-1] - times[0]):.1f}/s")
print(f"mean wait at one server of {1e3 * SERVICE_S:.1f} ms: {1e3 * mean_wait_s(gaps):.0f} ms; with Poisson arrivals "
      f"{1e3 * mean(waits_s):.0f} ms [{1e3 * waits_s[0]:.0f}, {1e3 * waits_s[-1]:.0f}]")
sys.stdout.flush()
raise SystemExit(0 if len(gaps) > NUM / 2 and len(lengths) < NUM / 2 and max(lengths.values()) >= 5 else "CHANGED: not what was seen with 0.8.1")
PYTHON
echo "as seen"
