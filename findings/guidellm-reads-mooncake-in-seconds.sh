#!/usr/bin/env bash
# guidellm 0.8.1 (`--data kind=mooncake`, `--profile kind=replay`) and AIPerf 0.13.0 (`--custom-dataset-type mooncake_trace`),
# each with the same trace in Mooncake's format, whose `timestamp` is in milliseconds (as the traces' authors and AIPerf say).
#
# Expected: both read the published traces of Mooncake, so that requests at 0, 500, 1,000 ... 2,500 come within 2.5 s.
#
# Seen: guidellm takes the timestamps for seconds, though it names the format and the paper: the second request is due
# after 500 s, and an hour of the public trace would take 41 days. Nothing warns; with a limit of duration the report is of
# the requests at 0 alone. `time_scale=0.001` in `--data` gives the trace's own pace. Prompts are as expected in both: lengths
# are exact, and equal hash ids give equal tokens, block by block.
#
# generator                        arrivals within 15 s, seconds after the first
# aiperf                           0 0.5 1 1.5 2 2.5
# guidellm                         0
# guidellm with time_scale=0.001   0 0.5 1 1.5 2 2.5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for package in guidellm==0.8.1 aiperf==0.13.0; do
    python3 -m venv "$folder/${package%%=*}"
    "$folder/${package%%=*}/bin/pip" install -q "$package"
done

HF_HOME=$folder/hf HF_HUB_OFFLINE=1 "$folder/guidellm/bin/python" - "$folder" <<'PYTHON'
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
BLOCK, NUM, LIMIT_S = 512, 6, 15
TRACE = [
    {"timestamp": 500 * i, "input_length": 2 * BLOCK + 100, "output_length": 1, "hash_ids": [0, 1, 2 + i]}
    for i in range(NUM)
]


class Engine(BaseHTTPRequestHandler):
    """Streams one token; notes when a chat came, and its text."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        data = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        came_s = time.monotonic()
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        self.server.came.append((came_s, text))
        about = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        choice = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        events = [{**about, "choices": [choice]}, {**about, "choices": [], "usage": usage}]
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


# A tokenizer of bytes, as a repository in the hub's folder, from which AIPerf takes it.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate([*letters, "</s>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
repository = folder / "hf/hub/models--some--bytes"
(repository / "refs").mkdir(parents=True)
(repository / "refs/main").write_text("0" * 40)
snapshot = repository / "snapshots" / ("0" * 40)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(snapshot)
trace = folder / "trace.jsonl"
trace.write_text("".join(json.dumps(row) + "\n" for row in TRACE))

engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
engine.daemon_threads = True
engine.handle_error = lambda *about: None
threading.Thread(target=engine.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{engine.server_port}"


def replay(program, *words):
    """Seconds at which requests came after the first, to half a second, and the tokens of their prompts."""
    engine.came = []
    with open(folder / "log", "a") as log:
        done = subprocess.run([folder / program / "bin" / program, *words], stdout=log, stderr=log, cwd=folder)
    if done.returncode:
        sys.exit(f"{program} failed:\n{(folder / 'log').read_text()[-3000:]}")
    came = sorted(engine.came)
    fast = PreTrainedTokenizerFast.from_pretrained(snapshot)
    return [round(2 * (at - came[0][0])) / 2 for at, _ in came], [fast(text)["input_ids"] for _, text in came]


def guidellm(**more):
    data = {"kind": "mooncake", "source": {"kind": "json_file", "path": str(trace)}, **more}
    return replay(
        "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=m", "--profile", "kind=replay",
        "--tokenizer", f"kind=hf_auto,model={snapshot}", "--data", json.dumps(data), "--constraint",
        f"kind=max_duration,seconds={LIMIT_S}", "--output", f"kind=json,path={folder / 'report.json'}",
        "--disable-progress",
    )


def aiperf():
    return replay(
        "aiperf", "profile", "--model", "m", "--tokenizer", "some/bytes", "--url", url, "--endpoint-type", "chat",
        "--streaming", "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule",
        "--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder / "artifacts"),
    )


found = {"aiperf": aiperf(), "guidellm": guidellm(), "guidellm with time_scale=0.001": guidellm(time_scale=0.001)}
for name, (arrivals, prompts) in found.items():
    print(f"{name:<32} {' '.join(f'{at:g}' for at in arrivals)}; {len(prompts)} prompts of {len(prompts[0])} tokens")
DUE = [i / 2 for i in range(NUM)]


def in_pace(arrivals):
    return len(arrivals) == NUM and all(abs(at - due) <= 1 for at, due in zip(arrivals, DUE))


def shared(prompts):
    return all(len(ids) == TRACE[0]["input_length"] and ids[: 2 * BLOCK] == prompts[0][: 2 * BLOCK] for ids in prompts)


as_seen = in_pace(found["aiperf"][0]) and len(found["guidellm"][0]) == 1
as_seen &= in_pace(found["guidellm with time_scale=0.001"][0]) and all(shared(prompts) for _, prompts in found.values())
sys.stdout.flush()
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with guidellm 0.8.1 and AIPerf 0.13.0")
PYTHON
echo "as seen"
