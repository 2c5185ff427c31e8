#!/usr/bin/env bash
# vllm-router 0.1.17 and smg 1.13.0 (the SGLang gateway's successor), their HTTP routers.
#
# Expected: a router reads the model and the prompt, and passes the body on; what it means is between client and engine.
# Fields that a router does not know reach the engine, which refuses them or not.
#
# Seen: both parse a body into types of their own and write it anew. Unknown fields of the body itself are kept, those within
# it (of messages, parts, tools, stream options) are left out, without a word, and known ones are renamed or refused:
#
# sent, and read by vLLM or SGLang                           vllm-router 0.1.17           smg 1.13.0
# assistant message with `reasoning_content`                 sent as `reasoning`          kept
# assistant message with `reasoning`                         kept                         sent as `reasoning_content`
# assistant message with both, as older vLLMs answer         `reasoning` alone            400, duplicate field
# stream_options.continuous_usage_stats                      left out                     kept
# tools[0].function.strict                                   left out                     kept
# tools[0].function without parameters (OpenAI: optional)    422, missing field           parameters: {} added
# image part with `uuid` (vLLM's key of cached images)       kept                         left out
# response_format of type structural_tag (vLLM, SGLang)      422, unknown variant         400, unknown variant
# completions with a prompt of token ids                     kept                         400
# unknown field of the body                                  kept                         kept
#
# vllm-router also adds fields of SGLang's (no_stop_trim, separate_reasoning, return_hidden_states ...) to what it sends to vLLM.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vllm-router==0.1.17 smg==1.13.0

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder = Path(sys.argv[1])
received = []


class Engine(BaseHTTPRequestHandler):
    """Keeps the bodies that it gets, and answers all alike."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, data, kind="application/json", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path in ("/health", "/v1/models"):
            models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
            self.reply(json.dumps(models).encode())
        else:
            self.reply(b"{}", status=404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        received.append(body)
        choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "text": "a", "finish_reason": "stop"}
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        if body.get("stream"):
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
            self.reply(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
        else:
            self.reply(json.dumps(whole).encode())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port, body):
    path = "completions" if "prompt" in body else "chat/completions"
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


USER = {"role": "user", "content": "hi"}


def said(**more):
    return {"messages": [USER, {"role": "assistant", "content": "a", **more}, USER]}


def assistant(body):
    return {key: value for key, value in body["messages"][1].items() if key.startswith("reasoning")}


def tool(**more):
    return {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", **more}}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "image-1"}
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f>"]}
SCHEMA = {"type": "object", "properties": {}}
CASES = {  # body, what of it is shown of what the engine gets
    "reasoning_content": (said(reasoning_content="r"), assistant),
    "reasoning": (said(reasoning="r"), assistant),
    "both": (said(reasoning="r", reasoning_content="r"), assistant),
    "continuous usage": (
        {"messages": [USER], "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        lambda body: sorted(body["stream_options"]),
    ),
    "strict": (tool(strict=True, parameters=SCHEMA), lambda body: sorted(body["tools"][0]["function"])),
    "no parameters": (tool(), lambda body: sorted(body["tools"][0]["function"])),
    "uuid": (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        lambda body: sorted(body["messages"][0]["content"][0]),
    ),
    "structural_tag": ({"messages": [USER], "response_format": TAG}, lambda body: body["response_format"]["type"]),
    "token ids": ({"prompt": [1, 2, 3]}, lambda body: body["prompt"]),
    "unknown": ({"messages": [USER], "unknown": {"key": 1}}, lambda body: body["unknown"]),
}
SEEN = {
    "vllm-router": {
        "reasoning_content": {"reasoning": "r"},
        "reasoning": {"reasoning": "r"},
        "both": {"reasoning": "r"},
        "continuous usage": ["include_usage"],
        "strict": ["name", "parameters"],
        "no parameters": 422,
        "uuid": ["image_url", "type", "uuid"],
        "structural_tag": 422,
        "token ids": [1, 2, 3],
        "unknown": {"key": 1},
    },
    "smg": {
        "reasoning_content": {"reasoning_content": "r"},
        "reasoning": {"reasoning_content": "r"},
        "both": 400,
        "continuous usage": ["continuous_usage_stats", "include_usage"],
        "strict": ["name", "parameters", "strict"],
        "no parameters": ["name", "parameters"],
        "uuid": ["image_url", "type"],
        "structural_tag": 400,
        "token ids": 400,
        "unknown": {"key": 1},
    },
}

engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
engine.daemon_threads = True
threading.Thread(target=engine.serve_forever, daemon=True).start()
engine_url = f"http://127.0.0.1:{engine.server_port}"


def seen_by_engine(start):
    port = free_port()
    command = [folder / "venv/bin" / start[0], *start[1:], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--worker-urls", engine_url]
    with open(folder / "router.log", "a") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(240):  # smg takes half a minute to accept a worker
            try:
                if post(port, {"model": "m", "messages": [USER]}) == 200:
                    break
            except OSError:
                pass
            time.sleep(0.5)
        else:
            sys.exit(f"{start[0]} does not start")
        seen = {}
        for name, (body, shown) in CASES.items():
            del received[:]
            status = post(port, {"model": "m", **body})
            seen[name] = shown(received[0]) if received else status
        del received[:]
        post(port, {"model": "m", "messages": [USER]})
        return seen, sorted(set(received[0]) - {"model", "messages"})
    finally:
        router.terminate()
        router.wait(60)


as_seen = True
for start in (["vllm-router"], ["smg", "launch"]):
    seen, added = seen_by_engine(start)
    for name, value in seen.items():
        same = value == SEEN[start[0]][name]
        as_seen &= same
        print(f"{start[0]:12} {name:18} {json.dumps(value)}{'' if same else '   CHANGED: ' + json.dumps(SEEN[start[0]][name])}")
    print(f"{start[0]:12} adds to each chat: {', '.join(added)}")
raise SystemExit(0 if as_seen else "CHANGED: not what was seen")
PYTHON
echo "as seen"
