#!/usr/bin/env bash
# vllm-router 0.1.17 and smg 1.13.0, in front of an engine that sends the head of a streamed answer at once and its first token
# after 4 s (a queue, or a long prefill), as servers that stream through Starlette's StreamingResponse do.
#
# Expected: a client that closes its connection ends its request: the router closes its connection to the engine, and the
# engine takes the request out of its queue. Both routers come from the SGLang router.
#
# Seen: smg does, at any time. vllm-router notices that a client has left when it next has something to send to it. So an
# engine goes on with a request that nobody waits for until its first token, for as long as the queue is: clients that
# give up after a time limit and ask again multiply the load of an overloaded engine. Before the engine's head, and for
# answers that are not streamed, vllm-router closes at once, too.
#
# the client leaves                                  the engine sees it: vllm-router    smg
# a stream, after 0.5 s, after the engine's head     at the first token, 4 s            at once
# a stream, after 0.5 s, before the engine's head    at once                            at once
# a whole answer, after 0.5 s                        at once                            at once
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vllm-router==0.1.17 smg==1.13.0

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
FIRST_TOKEN_S, LEAVES_S = 4.0, 0.5
CASES = {"stream, after the head": (True, True), "stream, before the head": (True, False), "whole answer": (False, False)}
EVENT = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
         "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    """Answers chats from `FIRST_TOKEN_S` on; knows after how many seconds the router closed its connection."""

    def __init__(self):
        self.sends_head_first, self.closed_after_s = False, asyncio.Queue()

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                lengths = [int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")]
                body = await reader.readexactly(lengths[0] if lengths else 0)
                if "/v1/chat/completions " in head[0]:
                    return await self.chat(json.loads(body), reader, writer)
                models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
                known = head[0].startswith(("GET /v1/models", "GET /health"))
                data = json.dumps(models if known else {}).encode()
                status = "200 OK" if known else "404 Not Found"
                kind = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(kind.encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def chat(self, body, reader, writer):
        began = time.monotonic()
        answer = asyncio.create_task(self.answer(body.get("stream"), writer))
        await reader.read(1)
        self.closed_after_s.put_nowait(time.monotonic() - began)
        answer.cancel()

    async def answer(self, is_stream, writer):
        if is_stream and self.sends_head_first:
            writer.write(HEAD)
        await asyncio.sleep(FIRST_TOKEN_S)
        if is_stream and not self.sends_head_first:
            writer.write(HEAD)
        data = f"data: {json.dumps(EVENT)}\n\n".encode()
        for _ in range(20 if is_stream else 0):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await asyncio.sleep(0.1)
        writer.close()


async def is_up(port):
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200" in line


async def leave(port, is_stream):
    """Asks, and closes the connection after `LEAVES_S`."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": is_stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    await asyncio.sleep(LEAVES_S)
    writer.close()


async def trial(program):
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port, url = free_port(), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    command = [folder / "venv/bin" / program[0], *program[1:], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--worker-urls", url]
    with open(folder / "router.log", "a") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    closed_after_s = {}
    try:
        for _ in range(900):
            if await is_up(port):
                break
            await asyncio.sleep(0.1)
        for case, (is_stream, engine.sends_head_first) in CASES.items():
            await leave(port, is_stream)
            closed_after_s[case] = await asyncio.wait_for(engine.closed_after_s.get(), 30)
    finally:
        router.terminate()
        router.wait(30)
        server.close()
    return closed_after_s


seen = {}
for program in (["vllm-router"], ["smg", "launch"]):
    for case, seconds in asyncio.run(trial(program)).items():
        print(f"{program[0]}: {case}: the engine's connection was closed after {seconds:.1f} s")
        seen[program[0], case] = seconds >= FIRST_TOKEN_S
sys.stdout.flush()
late = [case for case, is_late in seen.items() if is_late]
raise SystemExit(0 if late == [("vllm-router", "stream, after the head")] else "CHANGED: not what was seen with 0.1.17")
PYTHON
echo "as seen"
