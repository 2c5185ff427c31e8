#!/usr/bin/env bash
# vllm-router 0.1.17, its default policy `cache_aware`.
#
# Expected: as in the SGLang router, from which it was forked, and as its page on load balancing says: the router keeps a tree
# of the texts that it has sent to each engine, and sends a prompt to the engine that has most of it. It works in front of any
# engine with OpenAI's API, and asks the engines nothing for it.
#
# Seen: the router matches token ids, which it gets from the engines. Each chat is first sent, whole, to
# `/v1/chat/completions/render` of ALL engines (completions to `/v1/completions/render`), and to their `/tokenize` where that
# fails: three POSTs for each request with two engines, five where nothing answers them. Engines that serve neither
# get no prefix routing, and nothing says so but a counter (outcome="missing_tokens") and a line of the debug log: a prompt
# that one engine has just computed goes to the other one as soon as both are idle.
#
# engines with /render:    P computed by B, then asked again while both are idle: B B B; POSTs beside 5 chats: A 5, B 5
# engines without:         P computed by B, then asked again while both are idle: A A A; POSTs beside 5 chats: A 10, B 10
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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine(ThreadingHTTPServer):
    """Says its name as its answer; streams last until `release` is set."""

    daemon_threads = True

    def __init__(self, name, renders):
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.renders = name, renders
        self.chats, self.others, self.release = [], [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            self.reply({})
        elif self.path == "/v1/models":
            self.reply({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]})
        else:
            self.reply({"detail": "Not Found"}, 404)

    def do_POST(self):
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            engine.others.append(self.path)
            if engine.renders and self.path.endswith("/render"):
                text = "".join(f"{m['role']}: {m['content']}" for m in body["messages"])
                self.reply({"request_id": "r", "model": "m", "token_ids": [ord(each) for each in text]})
            else:
                self.reply({"detail": "Not Found"}, 404)
            return
        engine.chats.append(body["messages"][0]["content"])
        if body.get("stream"):
            engine.release.wait(60)
        choice = {"index": 0, "message": {"role": "assistant", "content": engine.name}, "finish_reason": "stop"}
        self.reply({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def ask(port, text, stream=False):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=90) as answer:
        return answer.read().decode()


def until(is_so, what):
    end = time.monotonic() + 90
    while not is_so():
        if time.monotonic() > end:
            sys.exit(f"no {what} within 90 s")
        time.sleep(0.05)


def is_up(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
    except OSError:
        return False
    return True


def trial(renders):
    """Where P goes when both are idle, and where everything else goes then, by the router's first choice A."""
    engines = [Engine(name, renders) for name in ("one", "two")]
    port = free_port()
    command = [folder / "venv/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *(engine.url for engine in engines)]
    with open(folder / "router.log", "a") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: is_up(port), "router")
        occupying = threading.Thread(target=ask, args=(port, " ".join(f"q{i}" for i in range(300)), True))
        occupying.start()
        until(lambda: any(engine.chats for engine in engines), "first chat")
        first = next(engine for engine in engines if engine.chats)
        prompt = " ".join(f"p{i * i}" for i in range(300))
        ask(port, prompt)  # to the other one, by load
        other = next(engine for engine in engines if engine is not first)
        if prompt not in other.chats:
            sys.exit("CHANGED: a prompt that no engine has does not go to the idle one")
        first.release.set()
        occupying.join()
        time.sleep(0.5)
        before = len(other.chats)
        for _ in range(3):
            ask(port, prompt)
        again = "B" * (len(other.chats) - before)
        again += "A" * (3 - len(again))
        return again, (len(first.others), len(other.others)), sorted({*first.others, *other.others})
    finally:
        router.terminate()
        router.wait(30)


seen = {}
for renders in (True, False):
    again, posts, paths = seen[renders] = trial(renders)
    print(f"engines {'with' if renders else 'without'} /render: P, computed by B, goes to {again} while both are idle")
    print(f"    POSTs beside the 5 chats: A {posts[0]}, B {posts[1]}: {', '.join(paths)}")
ok = seen[True][:2] == ("BBB", (5, 5)) and seen[False][:2] == ("AAA", (10, 10))
raise SystemExit(0 if ok else "CHANGED: not what was seen with vllm-router 0.1.17")
PYTHON
echo "as seen"
