#!/usr/bin/env bash
# AIPerf 0.13.0, synthetic prompts, `--request-rate 25`: once with `--request-count 600`, once with `--benchmark-duration 24`.
#
# Expected: the same load, as 24 s at 25/s are some 600 requests; how a run ends says nothing of its prompts. Synthetic prompts are
# random, so that an engine with a prefix cache (vLLM, SGLang: on by default) computes each of them whole, as in guidellm,
# where every request has a prompt of its own however the run ends.
#
# Seen: a run that is bounded by a count makes as many prompts as requests, one that is bounded by time makes 100
# (`--num-dataset-entries`) and sends them again and again. In 24 s four of five requests find their whole prompt in the cache, and
# mean TTFT is a fifth of the other run's; in ten minutes it would be 99 of 100. The longer a run is, the faster the engine
# looks: TTFT, the highest rate within an SLO and the engine's prefill throughput come out several times too good.
#
# engine with a prefix cache, 1 ms of prefill for each token that is not cached; prompts of 500 tokens
#                          requests    different prompts    prompt tokens cached    mean TTFT in AIPerf's report
# --request-count 600      600         600                   0%                     506 ms
# --benchmark-duration 24  548         100                  82%                      99 ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q aiperf==0.13.0

HF_HOME=$folder/hf HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = Path(sys.argv[1])
RATE, DURATION_S, PROMPT_TOKENS, BLOCK, PREFILL_S = 25, 24, 500, 20, 1e-3
RUNS = {"count": ("--request-count", str(RATE * DURATION_S)), "time": ("--benchmark-duration", str(DURATION_S))}
ABOUT = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
EVENTS = [{**ABOUT, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
          {**ABOUT, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]},
          {**ABOUT, "choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 2, "total_tokens": 502}}]


class Engine(BaseHTTPRequestHandler):
    """Streams two tokens after the prefill of what its prefix cache, by blocks of letters, has not seen."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}', "application/json")

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        prompt = content if isinstance(content, str) else "".join(part["text"] for part in content)
        starts = [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        cached = BLOCK * sum(start in self.server.seen for start in starts)
        time.sleep(PREFILL_S * (len(prompt) - cached))
        self.server.seen.update(starts)
        self.server.prompts.append((prompt, cached))
        lines = [f"data: {json.dumps(each)}\n\n" for each in EVENTS] + ["data: [DONE]\n\n"]
        self.reply("".join(lines).encode(), "text/event-stream")

    def reply(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def run(engine, *words):
    """Mean TTFT in AIPerf's report, in ms."""
    out = folder / f"artifacts-{time.time_ns()}"
    command = [folder / "venv/bin/aiperf", "profile", "--model", "m", "--tokenizer", "some/letters", "--endpoint-type", "chat"]
    command += ["--url", f"http://127.0.0.1:{engine.server_port}", "--streaming", "--request-rate", str(RATE), *words]
    command += ["--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", "2", "--ui-type", "none"]
    command += ["--no-gpu-telemetry", "--artifact-dir", str(out)]
    with open(folder / "log", "w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, cwd=folder, timeout=300)
    if done.returncode:
        sys.exit(f"AIPerf failed:\n{(folder / 'log').read_text()[-3000:]}")
    (report,) = out.rglob("profile_export_aiperf.json")
    return json.loads(report.read_text())["time_to_first_token"]["avg"]


# A tokenizer of bytes, as a repository in the hub's folder, from which AIPerf takes it.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate([*letters, "</s>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
repository = folder / "hf/hub/models--some--letters"
(repository / "refs").mkdir(parents=True)
(repository / "refs/main").write_text("0" * 40)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
fast.save_pretrained(repository / "snapshots" / ("0" * 40))

seen = {}
for name, words in RUNS.items():
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    engine.daemon_threads, engine.seen, engine.prompts = True, set(), []
    engine.handle_error = lambda *about: None  # AIPerf resets its connections
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    ttft_ms = run(engine, *words)
    num, different = len(engine.prompts), len({prompt for prompt, _ in engine.prompts})
    cached = sum(each for _, each in engine.prompts) / sum(len(prompt) for prompt, _ in engine.prompts)
    print(f"{' '.join(words)}: {num} requests, {different} different prompts, {cached:.0%} of prompt tokens cached, "
          f"mean TTFT {ttft_ms:.0f} ms", flush=True)
    seen[name] = (num, different, ttft_ms)
    engine.shutdown()

num, different, ttft_ms = seen["count"]
as_seen = num == different == RATE * DURATION_S
num, different, timed_ms = seen["time"]
as_seen &= different == 100 and num > 300 and timed_ms < ttft_ms / 2
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with AIPerf 0.13.0")
PYTHON
echo "as seen"
