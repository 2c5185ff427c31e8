#!/usr/bin/env bash
# vllm-router 0.1.17 with `--max-concurrent-requests 2`, in front of one engine; eight requests at the same instant.
#
# Expected: two at a time reach the engine, streamed or not. The others wait in the router's queue (`--queue-size`, 100 by
# default) until one of the two has ended, at most `--queue-timeout-secs` (60 by default), and all eight are answered.
#
# Seen: streams are not limited. A place is given back when the headers of the answer come, which is before its first token,
# so that all eight streams are at the engine at once. Answers that are not streamed are limited, but most of those that
# wait are refused with 408 long before the 60 s, while the two are still being answered: the longest wait of a queued
# request is that of the token bucket for its next token (half a second here: `--rate-limit-tokens-per-second` is
# the limit itself unless set), not the timeout.
# (smg 1.13.0 has the same flags; its help says that a place is held for the whole stream. Not tried here.)
#
# eight streams of 2 s:          8 answered; most at the engine at once: 8
# eight whole answers of 2 s:    3 or fewer answered, 5 or more refused with 408, all before the first answer
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vllm-router==0.1.17

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
NUM, LIMIT, ANSWER_S = 8, 2, 2.0
EVENT = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
         "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
WHOLE = {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
         "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def read_message(reader):
    """First line and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")), 0)
    return head[0], await reader.readexactly(length)


class Engine:
    """Answers after `ANSWER_S`, or streams one token at once and its end then; knows how many it answered together."""

    def __init__(self):
        self.now = self.most = 0

    async def serve(self, reader, writer):
        try:
            while True:
                line, body = await read_message(reader)
                if "/v1/chat/completions " in line:
                    await self.answer(json.loads(body).get("stream"), writer)
                elif line.startswith("GET /v1/models"):
                    self.write(writer, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]})
                else:
                    self.write(writer, {}, "200 OK" if line.startswith("GET /health") else "404 Not Found")
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    def write(self, writer, value, status="200 OK"):
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def answer(self, is_stream, writer):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if not is_stream:
                await asyncio.sleep(ANSWER_S)
                return self.write(writer, WHOLE)
            data = f"data: {json.dumps(EVENT)}\n\n".encode()
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(ANSWER_S)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        finally:
            self.now -= 1


async def ask(port, is_stream):
    """Status, and seconds until it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": is_stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    began = time.monotonic()
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    came_s = time.monotonic() - began
    await reader.read()
    writer.close()
    return status, came_s


async def is_up(port):
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200" in line


async def trial(is_stream):
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port, url = free_port(), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    command = [folder / "venv/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--max-concurrent-requests", str(LIMIT), "--worker-urls", url]
    with open(folder / "router.log", "a") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(900):
            if await is_up(port):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)  # the bucket is full again
        answers = await asyncio.gather(*(ask(port, is_stream) for _ in range(NUM)))
    finally:
        router.terminate()
        router.wait(30)
        server.close()
    return answers, engine.most


streams, most = asyncio.run(trial(True))
num = sum(status == 200 for status, _ in streams)
print(f"{NUM} streams of {ANSWER_S:g} s: {num} answered; most at the engine at once: {most}")
whole, _ = asyncio.run(trial(False))
refused = [came_s for status, came_s in whole if status == 408]
num_answered = sum(status == 200 for status, _ in whole)
print(f"{NUM} whole answers of {ANSWER_S:g} s: {num_answered} answered, {len(refused)} refused with 408, after "
      f"{max(refused, default=0):.1f} s at most")
as_seen = num == NUM == most and num_answered + len(refused) == NUM and len(refused) >= 5 and max(refused) < ANSWER_S
sys.stdout.flush()
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with 0.1.17")
PYTHON
echo "as seen"
