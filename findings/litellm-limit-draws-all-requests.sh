#!/usr/bin/env bash
# LiteLLM 1.110.2, its Router with the default `routing_strategy: simple-shuffle`, two equal engines, 60 requests one after the other.
#
# Expected: `rpm: 10` on one engine is a limit, as its name says: that engine gets at most ten requests a minute, and the
# engine without a limit gets the others. `weight: 1` on one engine alone changes nothing, as the
# other one's weight is the default.
#
# Seen: the engine with the limit gets ALL requests, within seconds, and the engine without a limit none. For this strategy `rpm`,
# `tpm` and `weight` are all weights (so its page says), none is enforced, and whichever engine lacks the first of them that
# any has (in the order weight, rpm, tpm) has weight 0. So a limit for the weak engine makes it the only one, a new engine that is
# added without the field is never used, and one with `tpm` beside one with `rpm` is not used either. No warning, as
# long as the engine answers. Under `usage-based-routing-v2` the same `rpm` is a limit.
#
# strategy                  first engine    second engine    requests of 60: to the first / to the second
# simple-shuffle            rpm 10          -                60 / 0
# simple-shuffle            -               tpm 1000         0 / 60
# simple-shuffle            weight 1        -                60 / 0
# simple-shuffle            rpm 10          tpm 100000       60 / 0
# simple-shuffle            rpm 10          rpm 30           12 / 48 (random)
# usage-based-routing-v2    rpm 10          -                9 / 51
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

litellm.suppress_debug_info = True
STRATEGY, FIRST, SECOND = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
NUM = 60
ANSWER = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}).encode()


class Engine:
    """Answers at once; counts its requests."""

    num = 0

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                self.num += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def main():
    engines = [Engine(), Engine()]
    deployments = []
    for i, (engine, fields) in enumerate(zip(engines, (FIRST, SECOND))):
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        params = {"model": "openai/m", "api_base": url, "api_key": "none", **fields}
        deployments.append({"model_name": "m", "litellm_params": params, "model_info": {"id": f"engine {i}"}})
    router = litellm.Router(model_list=deployments, routing_strategy=STRATEGY, num_retries=0)
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    for _ in range(NUM):
        await router.acompletion("m", [{"role": "user", "content": "hello"}])
    print(json.dumps([*(each.num for each in engines), loop.time() - begin_s]), flush=True)


asyncio.run(main())
PYTHON

cd "$folder" && venv/bin/python - <<'PYTHON'
import json
import os
import subprocess
import sys
import time

SHUFFLE, USAGE = "simple-shuffle", "usage-based-routing-v2"
CASES = [
    (SHUFFLE, {"rpm": 10}, {}, (60, 60)), (SHUFFLE, {}, {"tpm": 1000}, (0, 0)), (SHUFFLE, {"weight": 1}, {}, (60, 60)),
    (SHUFFLE, {"rpm": 10}, {"tpm": 100_000}, (60, 60)), (SHUFFLE, {"rpm": 10}, {"rpm": 30}, (3, 30)), (USAGE, {"rpm": 10}, {}, (1, 10)),
]
"""Strategy, fields of the two engines, and how many requests the first one gets, from and to."""
env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
as_seen = True
for strategy, first, second, (least, most) in CASES:
    if strategy == USAGE and time.time() % 60 > 40:
        time.sleep(61 - time.time() % 60)  # its limit is for minutes of the clock
    words = [strategy, json.dumps(first), json.dumps(second)]
    done = subprocess.run(["venv/bin/python", "trial.py", *words], capture_output=True, text=True, env=env, timeout=300)
    if done.returncode:
        sys.exit(f"LiteLLM failed:\n{done.stderr[-3000:]}")
    *num, took_s = json.loads(done.stdout.splitlines()[-1])
    print(f"{strategy:24}{str(first or '-'):16}{str(second or '-'):18}{num[0]:2} / {num[1]:2} in {took_s:.1f} s", flush=True)
    as_seen &= sum(num) == 60 and least <= num[0] <= most and took_s < 50
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with LiteLLM 1.110.2")
PYTHON
echo "as seen"
