#!/usr/bin/env bash
# inference-perf 0.7.0, `load: {type: constant, stages: [{rate: R, duration: T}]}`, its default type.
# (It needs Python 3.12 or later: `PYTHON=...` names it where `python3` is older.)
#
# Expected: requests at even gaps of 1/R, as guidellm's `constant` has them: a server that is never asked
# for more than it can do makes no queue, and latencies are those of the engine, without waits that come from the load.
#
# Seen: the gaps are random draws of an exponential distribution, only scaled so that their sum is T. That is a Poisson load
# whose number of requests is fixed; `type: poisson` draws that number, too, for each second. Every "constant" run has the
# queues of Poisson arrivals: at a server that is busy 70% of the time, which even gaps would never let wait, requests wait
# as long as they are served, and a planner or simulator that reads `constant` in the report's config and assumes even
# gaps takes these waits for the engine's own time.
#
# 400 requests, 20/s for 20 s, by the times in inference-perf's own report (`start_time`)
#            deviation of the gaps over their mean    mean wait at one server of 35 ms each
# even gaps  0                                        0 ms
# constant   0.99                                     38 ms
# poisson    0.91                                     36 ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in "${PYTHON:-python3}" python3.12 python3.13; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then break; fi
done
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q inference-perf==0.7.0

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean, pstdev

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = Path(sys.argv[1])
RATE, DURATION_S, SERVICE_S = 20, 20, 0.7 / 20
ABOUT = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}
EVENTS = [{**ABOUT, "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]},
          {**ABOUT, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}}]


class Engine(BaseHTTPRequestHandler):
    """Streams one token at once."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}', "application/json")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        lines = [f"data: {json.dumps(each)}\n\n" for each in EVENTS] + ["data: [DONE]\n\n"]
        self.reply("".join(lines).encode(), "text/event-stream")

    def reply(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def run(kind):
    """Gaps between the requests' starts, in seconds."""
    out = folder / kind
    config = {
        "load": {"type": kind, "stages": [{"rate": RATE, "duration": DURATION_S}], "num_workers": 1},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "m", "base_url": f"http://127.0.0.1:{engine.server_port}"},
        "tokenizer": {"pretrained_model_name_or_path": str(folder / "letters")},
        "data": {"type": "mock"},
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": True}},
        "storage": {"local_storage": {"path": str(out)}},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    with open(folder / "log", "w") as log:
        command = [folder / "venv/bin/inference-perf", "--config_file", folder / "config.yaml"]
        done = subprocess.run(command, stdout=log, stderr=log, cwd=folder, timeout=300)
    if done.returncode:
        sys.exit(f"inference-perf failed:\n{(folder / 'log').read_text()[-3000:]}")
    (report,) = out.rglob("per_request_lifecycle_metrics.json")
    times = sorted(each["start_time"] for each in json.loads(report.read_text()))
    return [later - earlier for earlier, later in zip(times, times[1:])]


def mean_wait_s(gaps):
    """Mean time in the queue of one server that takes `SERVICE_S` for each request (Lindley's recursion)."""
    waits = [0.0]
    for gap in gaps:
        waits.append(max(0.0, waits[-1] + SERVICE_S - gap))
    return mean(waits)


letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate([*letters, "</s>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder / "letters")
engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
engine.daemon_threads = True
threading.Thread(target=engine.serve_forever, daemon=True).start()

as_seen = True
for kind in ("constant", "poisson"):
    gaps = run(kind)
    spread, wait_s = pstdev(gaps) / mean(gaps), mean_wait_s(gaps)
    print(f"{kind}: {len(gaps) + 1} requests, mean gap {1e3 * mean(gaps):.1f} ms, deviation over mean {spread:.2f}, "
          f"mean wait at one server of {1e3 * SERVICE_S:.0f} ms: {1e3 * wait_s:.0f} ms")
    as_seen &= len(gaps) > RATE * DURATION_S / 2 and 0.8 < spread < 1.25 and wait_s > 0.01
sys.stdout.flush()
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with inference-perf 0.7.0")
PYTHON
echo "as seen"
