#!/usr/bin/env bash
# vllm-router 0.1.17, policies `consistent_hash` and `sticky_least_loaded`.
#
# Expected, and said by its page on load balancing: the key of a request is its header X-Session-ID (X-User-ID ...), else
# `session_params`, `user`, `session_id` or `user_id` of its body, else a hash of the whole body. So chats without a session
# spread over the engines, and those of one `user` (OpenAI's own field) stay together.
#
# Seen: of chats only the headers and `session_params` count. All others have the same key, whatever their messages
# and their `user` are: one engine gets all of them. Of completions the prompt is the key, and `user` counts as little.
#
# policy               40 requests, all different        engines: one / the other (seen once; the zeros and the split stay)
# consistent_hash      chats                             40 / 0
# consistent_hash      chats, each of another `user`     40 / 0
# consistent_hash      chats, each with X-Session-ID     19 / 21
# consistent_hash      completions                       19 / 21
# consistent_hash      one prompt, each of another user  40 / 0
# sticky_least_loaded  (the same five)                   40 / 0, 40 / 0, 20 / 20, 22 / 18, 40 / 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vllm-router==0.1.17

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder = Path(sys.argv[1])


class Engine(BaseHTTPRequestHandler):
    """Answers with its port."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        said = str(self.server.server_port)
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "text": said, "finish_reason": "stop"}
        self.reply({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, body, headers):
    path = "chat/completions" if "messages" in body else "completions"
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}",
        json.dumps({"model": "m", **body}).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


CASES = {
    "chats": lambda i: (chat(f"{i} is the question"), {}),
    "chats, each of another `user`": lambda i: ({**chat(f"{i} is the question"), "user": f"user-{i}"}, {}),
    "chats, each with X-Session-ID": lambda i: (chat("a question"), {"X-Session-ID": f"session-{i}"}),
    "completions": lambda i: ({"prompt": f"{i} is the question"}, {}),
    "one prompt, each of another user": lambda i: ({"prompt": "a question", "user": f"user-{i}"}, {}),
}
SPREAD = {"chats, each with X-Session-ID", "completions"}

engines = [ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in range(2)]
for engine in engines:
    engine.daemon_threads = True
    threading.Thread(target=engine.serve_forever, daemon=True).start()
as_seen = True
for policy in ("consistent_hash", "sticky_least_loaded"):
    port = free_port()
    command = [folder / "venv/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(free_port()), "--worker-urls"]
    command += [f"http://127.0.0.1:{engine.server_port}" for engine in engines]
    with open(folder / "router.log", "a") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(900):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            sys.exit("the router does not start")
        for name, of in CASES.items():
            said = [ask(port, *of(i)) for i in range(40)]
            shares = sorted((said.count(each) for each in {*said, said[0]}), reverse=True)
            print(f"{policy:20} {name:33} {' / '.join(map(str, shares if len(shares) > 1 else [*shares, 0]))}")
            as_seen &= len(shares) == 2 and shares[1] >= 2 if name in SPREAD else shares == [40]
    finally:
        router.terminate()
        router.wait(30)
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with vllm-router 0.1.17")
PYTHON
echo "as seen"
