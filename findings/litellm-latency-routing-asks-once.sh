#!/usr/bin/env bash
# LiteLLM 1.110.2, its Router with `routing_strategy: latency-based-routing`, two engines, one four times as fast as the other.
#
# Expected: the router learns which engine is faster, and sends most requests to it; an engine that seemed slow is tried again, or
# its latency is compared with that of like requests.
#
# Seen: one request of each engine decides, however unlike the two are. What is compared is the whole time over the tokens of the
# answer, so that an answer of one token makes an engine look as slow as its TTFT is long, and of streams the TTFT, whatever
# the prompt's length was. The engine that looks slower is not asked again, and keeps its one sample, until the
# other one looks slower still or samples expire (`ttl`, an hour unless set).
# The slow engine gets all requests if the first request of the fast one was a short answer or a long prompt, and latencies
# are four times what the fleet could do. The engine that was asked first loses whichever it is.
#
# first request              the others                    asked first    later requests: to the first / to the second
# whole, 1 token             whole, 100 tokens             the fast one    0 / 40
# whole, 1 token             whole, 100 tokens             the slow one    0 / 40
# stream, prompt of 2,000    streams, prompts of 20        the fast one    0 / 40
# stream, prompt of 2,000    streams, prompts of 20        the slow one    0 / 40
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q litellm==1.110.2

cat > "$folder/trial.py" <<'PYTHON'
import asyncio
import json
import sys

import litellm

IS_STREAM, FIRST_IS_FAST = sys.argv[1] == "stream", sys.argv[2] == "fast"
LATER, FAST, SLOW = 40, 1.0, 4.0
PREFILL_S, TOKEN_S = 2e-4, 2e-4
"""Of the fast engine, for a letter of the prompt and a token of the answer; each request takes 0.02 s more."""
ABOUT = {"id": "c", "created": 1, "model": "m"}


class Engine:
    """Its speed depends on when it is first asked; counts its requests."""

    def __init__(self, asked):
        self.num, self.asked = 0, asked

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                length = next(int(line.split(":")[1]) for line in head if line.startswith("content-length:"))
                await self.answer(json.loads(await reader.readexactly(length)), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    async def answer(self, body, writer):
        if self not in self.asked:
            self.asked.append(self)
        self.num += 1
        factor = FAST if (self.asked[0] is self) == FIRST_IS_FAST else SLOW
        num, prompt = body["max_tokens"], body["messages"][0]["content"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num, "total_tokens": len(prompt) + num}
        await asyncio.sleep(factor * (0.02 + PREFILL_S * len(prompt)))
        if not body.get("stream"):
            await asyncio.sleep(factor * TOKEN_S * num)
            choice = {"index": 0, "message": {"role": "assistant", "content": "a " * num}, "finish_reason": "length"}
            data = json.dumps({**ABOUT, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            return writer.write(head.encode() + data)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        about = {**ABOUT, "object": "chat.completion.chunk"}
        for i in range(num):
            choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "length" if i == num - 1 else None}
            self.send(writer, json.dumps({**about, "choices": [choice]}))
            await asyncio.sleep(factor * TOKEN_S)
        self.send(writer, json.dumps({**about, "choices": [], "usage": usage}))
        self.send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def send(self, writer, text):
        data = f"data: {text}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def ask(call, is_first, **where):
    prompt, num = ("a" * (2000 if is_first else 20), 10) if IS_STREAM else ("a" * 20, 1 if is_first else 100)
    messages = [{"role": "user", "content": prompt}]
    answer = await call(messages=messages, max_tokens=num, stream=IS_STREAM, **where)
    if IS_STREAM:
        async for _ in answer:
            pass


async def main():
    engines = []
    asked = []
    for _ in range(3):
        engine = Engine(asked if len(engines) < 2 else [])
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        engines.append((engine, server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"))
    for _ in range(2):  # not by the router, to a third engine: the first call of a process is slow
        await ask(litellm.acompletion, False, model="openai/m", api_key="x", api_base=engines[2][2])
    parameters = [{"model": "openai/m", "api_key": "x", "api_base": url} for _, _, url in engines[:2]]
    models = [{"model_name": "m", "litellm_params": each} for each in parameters]
    router = litellm.Router(model_list=models, routing_strategy="latency-based-routing")
    for i in range(2):
        await ask(router.acompletion, i == 0, model="m")
        for _ in range(100):  # until the router has taken note of it, which it does in the background
            await asyncio.sleep(0.1)
            if len(asked) == i + 1 and sum(map(any, latencies(router))) == i + 1:
                break
        else:
            sys.exit(f"the router asked {len(asked)} engines, and knows {latencies(router)}")
    first, second = (engine.num for engine in asked)
    for _ in range(LATER):
        await ask(router.acompletion, False, model="m")
    first, second = asked[0].num - first, asked[1].num - second
    print(f"{sys.argv[1]}, the {sys.argv[2]} one is asked first: {first} / {second} of the {LATER} requests after two")
    for _, server, _ in engines:
        server.close()
    return first, second


def latencies(router):
    """What the router knows of each engine."""
    return [each.get("latency_normalized", []) for each in (router.cache.get_cache("m_map") or {}).values()]


counts = asyncio.run(main())
sys.stdout.flush()
raise SystemExit(0 if counts == (0, LATER) else "CHANGED: not what was seen with LiteLLM 1.110.2")
PYTHON
export LITELLM_LOCAL_MODEL_COST_MAP=True
for kind in whole stream; do
    for first in fast slow; do
        "$folder/venv/bin/python" "$folder/trial.py" "$kind" "$first" 2> "$folder/log" || { tail -5 "$folder/log" >&2; exit 1; }
    done
done
echo "as seen"
