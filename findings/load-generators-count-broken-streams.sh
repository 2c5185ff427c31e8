#!/usr/bin/env bash
# guidellm 0.8.1 and AIPerf 0.13.0, in front of an engine that sends a token each 50 ms, asked for answers of 20 tokens.
#
# Expected: an answer that ends after 5 tokens, without finish reason and `data: [DONE]`, has failed, and so has one in
# which the engine reports an error, as vLLM does when its engine dies under a stream. An answer that ends by itself after
# 5 tokens has 5 tokens.
#
# Seen: guidellm counts the short stream as successful, and where an engine sends no usage it takes the number of tokens
# that was asked for: 20, so that ITL is a fifth of the truth and the broken engine looks five times as fast. AIPerf
# counts both broken streams as successful, the one with the engine's error, too, and reports no error.
#
# generator  the engine's stream             counted as successful  tokens each  ITL
# guidellm   whole, with usage               all                    20           50 ms
# guidellm   whole, 5 tokens, without usage  all                    20           11 ms
# guidellm   ends after 5 tokens             all                    20           11 ms
# guidellm   error after 5 tokens            none
# aiperf     whole, with usage               all                    20           50 ms
# aiperf     ends after 5 tokens             all                    5            50 ms
# aiperf     error after 5 tokens            all                    5            50 ms
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
WHOLE, SHORT, ENDS, REPORTS = "whole, with usage", "whole, 5 tokens, without usage", "ends after 5 tokens", "error after 5 tokens"
NUM, ASKED, SENT = 4, 20, 5
USAGE = {"prompt_tokens": 30, "completion_tokens": ASKED, "total_tokens": 30 + ASKED}
ERROR = {"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}}


class Engine(BaseHTTPRequestHandler):
    """Streams as its server's `stream` says."""

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

    def send(self, value):
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def chunk(self, delta=None, finish_reason=None, usage=None):
        choices = [] if usage else [{"index": 0, "delta": delta or {}, "finish_reason": finish_reason}]
        about = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        self.send({**about, "choices": choices, **({"usage": usage} if usage else {})})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        stream = self.server.stream
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk({"role": "assistant", "content": ""})
        for _ in range(ASKED if stream == WHOLE else SENT):
            time.sleep(0.05)
            self.chunk({"content": "a"})
        if stream in (WHOLE, SHORT):
            self.chunk(finish_reason="stop")
        if stream == WHOLE:
            self.chunk(usage=USAGE)
        if stream == REPORTS:
            self.send(ERROR)
        if stream != ENDS:
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
    """Share of successful requests, tokens of each, ITL in ms."""
    out = folder / "report.json"
    run("guidellm", "run", "--backend", f"kind=openai_http,target={url},model=m", "--profile", "kind=synchronous",
        "--constraint", f"kind=max_requests,count={NUM}", "--tokenizer", f"kind=hf_auto,model={folder / 'one'}",
        "--data", f"kind=synthetic_text,prompt_tokens=30,output_tokens={ASKED}", "--output", f"kind=json,path={out}",
        "--disable-progress")
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    mean = [metrics[name]["successful"]["mean"] for name in ("output_token_count", "inter_token_latency_ms")]
    totals = metrics["request_totals"]
    return totals["successful"] / totals["total"], *mean


def aiperf():
    out = folder / f"aiperf-{time.time_ns()}"
    run("aiperf", "profile", "--model", "m", "--tokenizer", str(folder / "one"), "--url", url, "--endpoint-type", "chat",
        "--streaming", "--request-count", str(NUM), "--concurrency", "1", "--synthetic-input-tokens-mean", "30",
        "--output-tokens-mean", str(ASKED), "--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", str(out))
    (path,) = out.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    num_failed = report.get("error_request_count", {}).get("avg", 0.0)
    mean = [report[name]["avg"] for name in ("output_sequence_length", "inter_token_latency")]
    return 1 - num_failed / NUM, *mean


EXPECTED = {
    (guidellm, WHOLE): (1, 20, True), (guidellm, SHORT): (1, 20, False), (guidellm, ENDS): (1, 20, False),
    (guidellm, REPORTS): (0, 0, False), (aiperf, WHOLE): (1, 20, True), (aiperf, ENDS): (1, 5, True),
    (aiperf, REPORTS): (1, 5, True),
}
"""Share of successful requests, tokens of each, and whether ITL is the engine's or longer."""
as_seen = True
for (generator, engine.stream), expected in EXPECTED.items():
    share, tokens, itl_ms = generator()
    print(f"{generator.__name__:10} {engine.stream:31} {share:5.0%}  {tokens:2g} tokens each  ITL {itl_ms:.0f} ms", flush=True)
    as_seen &= (share, tokens, itl_ms > 45) == expected
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with guidellm 0.8.1 and AIPerf 0.13.0")
PYTHON
echo "as seen"
