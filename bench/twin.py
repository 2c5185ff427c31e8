"""One workload, lived through and simulated: two emulated engines behind the gateway, then the same day again.

`python bench/twin.py [SECONDS] [RATE]`: what ran is recorded, simulated with the same fleet file, and compared.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import cast

import httptools
import msgspec
import numpy as np
import uvloop
import yaml
from click import echo

from headway import records, scenario
from headway.core.record import Records

PORTS, GATEWAY = (9401, 9402), 9400
FLEET = {
    "fleet": [
        {
            "name": "twin", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-v1",
            "endpoints": [f"http://127.0.0.1:{port}" for port in PORTS],
        },
    ],
    "policies": {"routing": "least-loaded"},
}  # fmt: skip


class Client(asyncio.Protocol):
    """One request."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(self._body)
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(head + self._body)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.done.set_result(self._parser.get_status_code())
        self._transport.close()


async def live(seconds: float, rate: float) -> int:
    """Requests at random moments, of random lengths; how many there were."""
    draw = Random(1)
    loop = asyncio.get_running_loop()

    async def one() -> None:
        prompt = [draw.randrange(3, 30_000) for _ in range(draw.randrange(50, 1500))]
        body = {"model": "qwen3-8b", "prompt": prompt, "max_tokens": draw.randrange(20, 250), "stream": True}
        _, client = await loop.create_connection(lambda: Client(msgspec.json.encode(body)), "127.0.0.1", GATEWAY)
        assert await client.done == 200

    tasks, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*tasks)
    return len(tasks)


def means(ran: Records) -> dict[str, float]:
    """TTFT, TPOT and E2E in seconds, and the first replica's share of the requests."""
    rows = ran.requests
    arrival_s = ran.workload["arrival_s"][rows["request"]]
    first_s, end_s, tokens = rows["first_token_s"], rows["end_s"], rows["generated_tokens"]
    return {
        "TTFT": float(np.mean(first_s - arrival_s)),
        "TPOT": float(np.mean((end_s - first_s) / (tokens - 1))),
        "E2E": float(np.mean(end_s - arrival_s)),
        "share of replica 0": float(np.mean(rows["replica"] == 0)),
    }


def main() -> None:
    """Live, simulated, compared."""
    seconds, rate = (float(value) for value in (*sys.argv[1:3], "40", "6")[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "fleet.yaml"
        file.write_text(yaml.safe_dump(FLEET))
        headway = [sys.executable, "-m", "headway"]
        engines = [
            subprocess.Popen([*headway, "emulate", "--model", "qwen3-8b", "--gpu", "h100", "--port", str(port)])
            for port in PORTS
        ]
        front = subprocess.Popen(
            [*headway, "serve", str(file), "--port", str(GATEWAY), "--records", str(folder / "ran")]
        )
        try:
            time.sleep(5)
            num = uvloop.run(live(seconds, rate))
            front.send_signal(signal.SIGTERM)
            front.wait()
        finally:
            for process in (*engines, front):
                process.kill()
                process.wait()
        lived = means(records.load(folder / "ran")[0])
        again = folder / "again.yaml"
        again.write_text(yaml.safe_dump({**FLEET, "workload": {"trace": str(folder / "ran/requests.parquet")}}))
        simulated = means(scenario.run(scenario.load(again)).records)
    echo(f"{num} requests in {seconds:g} s")
    for key, value in lived.items():
        echo(f"{key}: lived {value:.4f}, simulated {simulated[key]:.4f}, {100 * (simulated[key] / value - 1):+.1f}%")


if __name__ == "__main__":
    main()
