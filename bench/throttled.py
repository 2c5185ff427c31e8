"""A GPU is throttled to half its speed: who notices? Emulated engines behind the gateway, and the same simulated.

`python bench/throttled.py [SECONDS] [RATE] [SET...]`: two H100 and two A100 servers serve a 70B model. After a
minute the iterations of the first one take twice as long; SECONDS (120) follow. RATE is requests per second (4). Each
set of policies (`preset`, `least-loaded`) gets the same requests, and is simulated with the requests that it got.
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
from typing import Any

import msgspec
import numpy as np
import uvloop
import yaml
from click import echo
from twin import GATEWAY, Client, wait

from headway import records, scenario
from headway.core.record import Records

PORTS = (9411, 9412, 9413, 9414)
MODEL, GPUS = "llama-3.1-70b", ("h100-80gb-sxm", "h100-80gb-sxm", "a100-80gb", "a100-80gb")
TP = 4
AT_S, SLOWDOWN, SETTLE_S = 60.0, 2.0, 15.0
"""The throttling; requests count from `SETTLE_S` after it."""
START_S = 25.0
"""From the start of the engines to the first request."""
SETS: dict[str, Any] = {"preset": {"preset": "headway"}, "least-loaded": {"routing": "least-loaded"}}
PROMPT_TOKENS, ANSWER_TOKENS = (500, 5000), (10, 60)
SCRAPE_S = 0.25


def document(policies: Any) -> dict[str, Any]:
    """The fleet file."""
    pools = [
        {"name": name, "model": MODEL, "gpu": gpu, "tp": TP, "engine": "vllm-0.15",
         "endpoints": [f"http://127.0.0.1:{port}" for port in ports]}
        for name, gpu, ports in (("fast", GPUS[0], PORTS[:2]), ("cheap", GPUS[2], PORTS[2:]))
    ]  # fmt: skip
    return {"fleet": pools, "policies": policies, "slo": {"ttft_s": 5.0, "tpot_s": 0.2}}


async def generate_load(seconds: float, rate: float) -> None:
    """Requests at random moments, of random lengths: the same for every set."""
    draw, loop, tasks = Random(1), asyncio.get_running_loop(), []
    begin_s = time.monotonic()
    at_s = draw.expovariate(rate)

    async def one(body: dict[str, Any]) -> None:
        _, client = await loop.create_connection(lambda: Client(msgspec.json.encode(body)), "127.0.0.1", GATEWAY)
        assert await client.done == 200

    while at_s < seconds:
        await asyncio.sleep(begin_s + at_s - time.monotonic())
        prompt = [draw.randrange(3, 30_000) for _ in range(draw.randrange(*PROMPT_TOKENS))]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": draw.randrange(*ANSWER_TOKENS), "stream": True}
        tasks.append(asyncio.create_task(one(body)))
        at_s += draw.expovariate(rate)
    await asyncio.gather(*tasks)


def live(folder: Path, policies: Any, seconds: float, rate: float) -> Records:
    """What the gateway recorded."""
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({**document(policies), "gateway": {"scrape_period_s": SCRAPE_S}}))
    headway = [sys.executable, "-m", "headway"]
    began_s = time.monotonic()
    engines = []
    for i, (gpu, port) in enumerate(zip(GPUS, PORTS, strict=True)):
        throttle = ["--throttle", f"{START_S + AT_S}:{SLOWDOWN}"] if i == 0 else []
        emulate = [*headway, "emulate", "--model", MODEL, "--gpu", gpu, "--tp", str(TP), "--port", str(port), *throttle]
        engines.append(subprocess.Popen(emulate, stdout=subprocess.DEVNULL))
    front = subprocess.Popen([*headway, "serve", str(file), "--port", str(GATEWAY), "--records", str(folder / "ran")])
    try:
        wait(len(GPUS))
        time.sleep(max(0.0, began_s + START_S - time.monotonic()))
        uvloop.run(generate_load(AT_S + seconds, rate))
        front.send_signal(signal.SIGTERM)
        front.wait()
    finally:
        for process in (*engines, front):
            process.kill()
            process.wait()
    return records.load(folder / "ran")[0]


def simulated(folder: Path, policies: Any) -> Records:
    """The same requests with the same policies."""
    again = folder / "again.yaml"
    fault = {"at_s": AT_S, "replica": 0, "slowdown": SLOWDOWN}
    trace = {"trace": {"path": str(folder / "ran/requests.parquet")}}
    again.write_text(
        yaml.safe_dump({**document(policies), "observe": {"period_s": SCRAPE_S}, "workload": trace, "faults": [fault]})
    )
    return scenario.run(scenario.load(again)).records


def row(ran: Records) -> str:
    """Shares of the requests, and TTFT, after the throttling."""
    rows = ran.requests
    arrival_s = ran.workload["arrival_s"][rows["request"]]
    counted = arrival_s - arrival_s.min() >= AT_S + SETTLE_S
    replica, ttft_s = rows["replica"][counted], (rows["first_token_s"] - arrival_s)[counted]
    shares = "/".join(f"{100 * np.mean(replica == i):.0f}" for i in range(len(GPUS)))
    before = np.mean(rows["replica"][arrival_s - arrival_s.min() < AT_S] == 0)
    return (
        f"{int(counted.sum())} requests; shares {shares}% (replica 0 before: {100 * before:.0f}%); "
        f"TTFT mean {np.mean(ttft_s):.2f} s, P99 {np.quantile(ttft_s, 0.99):.2f} s"
    )


def main() -> None:
    """Every set live and simulated."""
    seconds, rate = (float(sys.argv[i]) if len(sys.argv) > i else value for i, value in ((1, 120.0), (2, 4.0)))
    for name in sys.argv[3:] or SETS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            echo(f"{name}, live: {row(live(folder, SETS[name], seconds, rate))}")
            echo(f"{name}, simulated: {row(simulated(folder, SETS[name]))}")


if __name__ == "__main__":
    main()
