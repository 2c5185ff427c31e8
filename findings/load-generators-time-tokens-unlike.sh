#!/usr/bin/env bash
# guidellm 0.8.1 and AIPerf 0.13.0, in front of an engine that sends the first of 20 tokens after 1 s and the others 50 ms apart,
# but for one gap of 1 s in each answer (a preemption, or another request's long prefill).
#
# Expected: TPOT is the time after the first token over the tokens after it, (E2E - TTFT) / (n - 1), 100 ms here, and ITL is the gap
# between two tokens, so that its p99 shows the gap of a second, as in vLLM's own `bench serve` and in evalscope (1.14.1, tried
# apart: TPOT 103 ms, p99 of ITL 1,004 ms).
#
# Seen: guidellm's TPOT is the whole latency over the tokens, TTFT included: half as long again here, and several times TPOT where
# prompts are long and answers short. It grows with the queue, and whoever takes it for an
# SLO or for the time of a simulator's decode step counts the wait and the prefill twice. And ITL, in both, is the mean of a request, so that its percentiles are
# those of requests' means, and no percentile shows that answers stood still: guidellm's "p99 ITL" and AIPerf's are vLLM's p99
# of TPOT. The gaps are in AIPerf's `inter_chunk_latency`; guidellm has no metric of them.
#
#            TPOT mean    ITL p99    ITL max    inter_chunk_latency max
# guidellm   147 ms       106 ms     106 ms     -
# aiperf     -            114 ms     114 ms     1,008 ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for package in guidellm==0.8.1 aiperf==0.13.0; do
    python3 -m venv "$folder/${package%%=*}"
    "$folder/${package%%=*}/bin/pip" install -q "$package"
done

"$folder/guidellm/bin/python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = Path(sys.argv[1])
NUM, TOKENS, FIRST_S, GAP_S, LONG_S = 10, 20, 1.0, 0.05, 1.0
TPOT_MS = 1e3 * ((TOKENS - 2) * GAP_S + LONG_S) / (TOKENS - 1)
ABOUT = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 30, "completion_tokens": TOKENS, "total_tokens": 30 + TOKENS}


class Engine(BaseHTTPRequestHandler):
    """Streams its tokens, one of them late."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def head(self, kind, *header):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header(*header)
        self.end_headers()

    def do_GET(self):
        data = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}).encode()
        self.head("application/json", "Content-Length", str(len(data)))
        self.wfile.write(data)

    def send(self, value):
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.head("text/event-stream", "Transfer-Encoding", "chunked")
        for token in range(TOKENS):
            time.sleep(FIRST_S if token == 0 else LONG_S if token == TOKENS // 2 else GAP_S)
            self.send({**ABOUT, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
        self.send({**ABOUT, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self.send({**ABOUT, "choices": [], "usage": USAGE})
        self.send("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate([*letters, "</s>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder / "one")
engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
engine.daemon_threads = True
engine.handle_error = lambda *about: None  # AIPerf resets its connections
threading.Thread(target=engine.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{engine.server_port}"


def run(program, *words):
    with open(folder / "log", "a") as log:
        subprocess.run([folder / program / "bin" / program, *words], stdout=log, stderr=log, check=True, cwd=folder)


def guidellm():
    """Mean TPOT, p99 and maximum of ITL, in ms."""
    out = folder / "report.json"
    run("guidellm", "run", "--backend", f"kind=openai_http,target={url},model=m", "--profile", "kind=synchronous",
        "--constraint", f"kind=max_requests,count={NUM}", "--tokenizer", f"kind=hf_auto,model={folder / 'one'}",
        "--data", f"kind=synthetic_text,prompt_tokens=30,output_tokens={TOKENS}", "--output", f"kind=json,path={out}",
        "--disable-progress")
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    tpot, itl = (metrics[name]["successful"] for name in ("time_per_output_token_ms", "inter_token_latency_ms"))
    return tpot["mean"], itl["percentiles"]["p99"], itl["max"]


def aiperf():
    """p99 and maximum of ITL, and the maximum of the latency between chunks, in ms."""
    out = folder / "aiperf-report"
    run("aiperf", "profile", "--model", "m", "--tokenizer", str(folder / "one"), "--url", url, "--endpoint-type", "chat",
        "--streaming", "--request-count", str(NUM), "--concurrency", "1", "--synthetic-input-tokens-mean", "30",
        "--output-tokens-mean", str(TOKENS), "--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", str(out))
    (path,) = out.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    return report["inter_token_latency"]["p99"], report["inter_token_latency"]["max"], report["inter_chunk_latency"]["max"]


tpot_ms, *guidellm_itl_ms = guidellm()
*aiperf_itl_ms, chunk_ms = aiperf()
print(f"the engine: TPOT {TPOT_MS:.0f} ms, longest gap {1e3 * LONG_S:.0f} ms")
print(f"guidellm: TPOT mean {tpot_ms:.0f} ms; ITL p99 {guidellm_itl_ms[0]:.0f} ms, max {guidellm_itl_ms[1]:.0f} ms")
print(f"aiperf: ITL p99 {aiperf_itl_ms[0]:.0f} ms, max {aiperf_itl_ms[1]:.0f} ms; inter_chunk_latency max {chunk_ms:.0f} ms")
sys.stdout.flush()
as_seen = tpot_ms > TPOT_MS + 0.8e3 * FIRST_S / TOKENS and chunk_ms > 0.9e3 * LONG_S
as_seen &= all(0.95 * TPOT_MS < each < 2 * TPOT_MS for each in (*guidellm_itl_ms, *aiperf_itl_ms))
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with guidellm 0.8.1 and AIPerf 0.13.0")
PYTHON
echo "as seen"
