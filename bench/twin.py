"""One workload, lived through and simulated: emulated engines behind the gateway, then the same day again.

`python bench/twin.py [FLEET] [SECONDS] [RATE] [SPEED]`: what ran is recorded, simulated with the same fleet file, and
compared. FLEET is `pool` (two engines, the least loaded one first), `pair` (one prefills for two) or `in-place` (the
same, and whoever is idle does all of a request). SECONDS and RATE (requests per second) are of the day; at a SPEED of
0.5 it takes twice as long to live through, and what the processes take themselves counts half.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast
from urllib.request import urlopen

import httptools
import msgspec
import numpy as np
import uvloop
import yaml
from click import echo

from headway import records, scenario
from headway.core.record import Records

PORTS, GATEWAY = (9401, 9402, 9403), 9400
GBPS = 10
"""Between engines of a combo: slow enough to be seen."""
SCRAPE_S = 0.1
PROMPT_TOKENS, ANSWER_TOKENS = (50, 1500), (10, 60)


def _side(gpu: str, *ports: int) -> dict[str, Any]:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    return {
        "model": "qwen3-8b", "gpu": gpu, "engine": "vllm-0.15", "endpoints": urls,
        "network_bytes_per_s": GBPS * 1e9 / 8,
    }  # fmt: skip


def _pair(within: str) -> dict[str, Any]:
    combo = {
        "name": "twin", "prefill": _side("l40s", PORTS[0]), "decode": _side("l4", *PORTS[1:]),
        "handover": {"first_token": "decode"},
    }  # fmt: skip
    return {"combos": [combo], "policies": {"routing": {"name": "cauchy", "within": within}}}


class Fleet(NamedTuple):
    """What is served."""

    file: dict[str, Any]
    gpus: tuple[str, ...]
    """The engines'."""
    seconds: float
    rate: float
    speed: float
    """Without being told otherwise."""


_POOL = {"fleet": [{"name": "twin", **_side("h100", *PORTS[:2])}], "policies": {"routing": "least-loaded"}}
_GPUS = ("l40s", "l4", "l4")
FLEETS = {
    "pool": Fleet(_POOL, ("h100", "h100"), 80.0, 12.0, 0.5),
    "pair": Fleet(_pair("strict"), _GPUS, 60.0, 1.5, 0.5),
    "in-place": Fleet(_pair("opportunistic"), _GPUS, 300.0, 2.0, 1.0),
}


class Client(asyncio.Protocol):
    """One request."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(self._body)
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(head + self._body)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.done.set_result(self._parser.get_status_code())
        self._transport.close()


async def live(seconds: float, rate: float) -> int:
    """Requests at random moments, of random lengths, for so many seconds on the wall; how many there were."""
    draw = Random(1)
    loop = asyncio.get_running_loop()

    async def one() -> None:
        prompt = [draw.randrange(3, 30_000) for _ in range(draw.randrange(*PROMPT_TOKENS))]
        body = {"model": "qwen3-8b", "prompt": prompt, "max_tokens": draw.randrange(*ANSWER_TOKENS), "stream": True}
        _, client = await loop.create_connection(lambda: Client(msgspec.json.encode(body)), "127.0.0.1", GATEWAY)
        assert await client.done == 200

    tasks, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*tasks)
    return len(tasks)


def means(ran: Records, speed: float) -> dict[str, float]:
    """TTFT, TPOT and E2E in seconds; which share of the requests was handed over to nobody, and who answered."""
    rows = ran.requests
    arrival_s = ran.workload["arrival_s"][rows["request"]]
    first_s, end_s, tokens = rows["first_token_s"], rows["end_s"], rows["generated_tokens"]
    return {
        "TTFT": float(np.mean(first_s - arrival_s)) * speed,
        "TPOT": float(np.mean((end_s - first_s) / (tokens - 1))) * speed,
        "E2E": float(np.mean(end_s - arrival_s)) * speed,
        "share in place": float(np.mean(rows["moves"] == 0)),
        **{f"share of replica {i}": float(np.mean(rows["replica"] == i)) for i in range(len(ran.replicas))},
    }


def lived(fleet: Fleet, folder: Path, seconds: float, rate: float, speed: float) -> int:
    """Have requests served; how many there were."""
    file, num = folder / "fleet.yaml", len(fleet.gpus)
    file.write_text(yaml.safe_dump({**fleet.file, "gateway": {"scrape_period_s": SCRAPE_S / speed}}))
    headway = [sys.executable, "-m", "headway"]
    emulate = [*headway, "emulate", "--model", "qwen3-8b", "--kv-gbps", str(GBPS), "--speed", str(speed)]
    engines = [
        subprocess.Popen([*emulate, "--gpu", gpu, "--port", str(port)])
        for gpu, port in zip(fleet.gpus, PORTS, strict=False)
    ]  # fmt: skip
    front = subprocess.Popen([*headway, "serve", str(file), "--port", str(GATEWAY), "--records", str(folder / "ran")])
    try:
        wait(num)
        asked = uvloop.run(live(seconds / speed, rate * speed))
        front.send_signal(signal.SIGTERM)
        front.wait()
    finally:
        for process in (*engines, front):
            process.kill()
            process.wait()
    return asked


def foreseen(fleet: Fleet, folder: Path, speed: float) -> Records:
    """The same day, simulated."""
    trace = {"path": str(folder / "ran/requests.parquet"), "rate_scale": 1 / speed}
    again = folder / "again.yaml"
    again.write_text(yaml.safe_dump({**fleet.file, "observe": {"period_s": SCRAPE_S}, "workload": {"trace": trace}}))
    return scenario.run(scenario.load(again)).records


def wait(num: int) -> None:
    """Until so many replicas are up."""
    while True:
        time.sleep(0.2)
        with suppress(OSError), urlopen(f"http://127.0.0.1:{GATEWAY}/health") as health:
            if msgspec.json.decode(health.read())["up"] == num:
                return


def main() -> None:
    """Live, simulated, compared."""
    fleet = FLEETS[sys.argv[1] if len(sys.argv) > 1 else "pool"]
    seconds, rate, speed = (*map(float, sys.argv[2:]), *(fleet.seconds, fleet.rate, fleet.speed)[len(sys.argv[2:]) :])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num = lived(fleet, folder, seconds, rate, speed)
        ran, again = records.load(folder / "ran")[0], foreseen(fleet, folder, speed)
    echo(f"{num} requests in {seconds:g} s, at {speed:g} times the speed")
    before, after = means(ran, speed), means(again, 1.0)
    for key, value in before.items():
        apart = 100 * (after[key] - value)
        text = f"{apart:+.1f} points" if key.startswith("share") else f"{apart / value:+.1f}%"
        echo(f"{key}: lived {value:.4f}, simulated {after[key]:.4f}, {text}")
    order, again_order = np.argsort(ran.requests["request"]), np.argsort(again.requests["request"])
    same = ran.requests["replica"][order] == again.requests["replica"][again_order]
    echo(f"answered by the same replica: {np.mean(same):.1%}")


if __name__ == "__main__":
    main()
