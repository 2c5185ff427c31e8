"""Three gateways of one fleet against one, and against three that tell each other nothing, live and simulated.

`python bench/several_gateways.py [--router NAME] [--live NAME] [--seconds S] [--speed S] [--seeds N] [--write]`: four
emulated engines, requests with short and long prompts, each to a gateway at random; in one case the store is gone for a
third of the time. The same requests are simulated with `observe: schedulers:`, and N other draws of them. At a speed of
0.5 the live run takes twice as long, and what the machine takes for itself counts half. The table is part of
docs/high-availability.md (`--write`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.request import urlopen

import click
import numpy as np
import yaml
from click import echo

import headway as hw
from gateway import free_ports

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import postgres

PAGE = Path(__file__).parent.parent / "docs" / "high-availability.md"
MARKS = "<!-- several gateways: made by bench/several_gateways.py -->\n", "<!-- end of several gateways -->\n"
MODEL, GPU, NUM_ENGINES = "qwen3-8b", "l40s", 4
SCRAPE_S = 1.0
RATE_RPS = 11.0
SLO_S = 1.0
"""Requests with a first token by then count as goodput."""
WORKLOAD = {
    "arrivals": RATE_RPS, "mix": [
        {"share": 0.85, "prompt_tokens": 300, "output_tokens": 60},
        {"share": 0.15, "prompt_tokens": 6000, "output_tokens": 60},
    ],
}  # fmt: skip
KNOWN = {"period_s": 0.05, "lease_s": 2.0}


class Case(NamedTuple):
    name: str
    num: int
    shares: bool
    has_outage: bool = False


CASES = (
    Case("one gateway", 1, False),
    Case("three over one store", 3, True),
    Case("three, the store gone for the second third", 3, True, True),
    Case("three that share nothing", 3, False),
)


class Answers(NamedTuple):
    """When requests arrived, and how long their first tokens took (`inf`: none came)."""

    arrival_s: Any
    ttft_s: Any

    def within(self, start_s: float, end_s: float) -> Answers:
        chosen = (self.arrival_s >= start_s) & (self.arrival_s < end_s)
        return Answers(self.arrival_s[chosen], self.ttft_s[chosen])

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.ttft_s, 0.99, method="lower"))

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.ttft_s))

    @property
    def in_time(self) -> float:
        return float(np.mean(self.ttft_s <= SLO_S))


def scenario(router: str, seconds: float, seed: int, case: Case) -> dict[str, Any]:
    schedulers: dict[str, Any] = {}
    if case.num > 1:
        away = [[seconds / 3, 2 * seconds / 3]] if case.has_outage else []
        schedulers = {"schedulers": {"num": case.num, "delay_s": 0.002, "shared": case.shares, "away": away, **KNOWN}}
    return {
        "seed": seed, "workload": {**WORKLOAD, "duration_s": seconds},
        "fleet": [{"name": "pool", "model": MODEL, "gpu": GPU, "engine": "vllm-0.15", "replicas": NUM_ENGINES}],
        "policies": {"routing": router}, "observe": {"period_s": SCRAPE_S, **schedulers},
    }  # fmt: skip


def simulated(router: str, seconds: float, seed: int, case: Case) -> Answers:
    rows = hw.simulate(scenario(router, seconds, seed, case)).records
    arrival_s = rows.workload["arrival_s"][rows.requests["request"]]
    return Answers(arrival_s, rows.requests["first_token_s"] - arrival_s)


# Live.


class Fleet:
    """Engines and gateways as processes, and the store."""

    def __init__(self, folder: Path, router: str, case: Case, speed: float, store: postgres.Server | None) -> None:
        ports = free_ports(NUM_ENGINES + case.num)
        self.engines, self.gateways = ports[:NUM_ENGINES], ports[NUM_ENGINES:]
        pool = {
            "name": "pool", "model": MODEL, "gpu": GPU, "engine": "vllm-0.15",
            "endpoints": [f"http://127.0.0.1:{port}" for port in self.engines],
        }  # fmt: skip
        settings: dict[str, Any] = {"scrape_period_s": SCRAPE_S / speed}
        if case.shares:
            assert store is not None
            settings["peers"] = {"store": store.url, **{key: each_s / speed for key, each_s in KNOWN.items()}}
        file = folder / "fleet.yaml"
        file.write_text(yaml.safe_dump({"fleet": [pool], "policies": {"routing": router}, "gateway": settings}))
        headway = [sys.executable, "-m", "headway"]
        emulate = [*headway, "emulate", "--model", MODEL, "--gpu", GPU, "--speed", str(speed), "--port"]
        serve = [*headway, "serve", str(file), "--restarts", "0", "--port"]
        commands = [[*emulate, str(port)] for port in self.engines] + [[*serve, str(port)] for port in self.gateways]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._processes = [subprocess.Popen(command, **quiet) for command in commands]  # type: ignore[call-overload]
        self._num_peers = case.num - 1 if case.shares else None

    def wait(self) -> None:
        """Until every gateway has all engines, and knows the others."""
        for port in self.gateways:
            self._wait_for(port)

    def _wait_for(self, port: int) -> None:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health") as answer:
                found = json.load(answer)
                if found["up"] == NUM_ENGINES and self._num_peers in (None, found.get("peers")):
                    return
            time.sleep(0.2)
        raise TimeoutError(f"the gateway at port {port} does not start")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


async def ttft_s(port: int, prompt: list[int], num_tokens: int) -> float:
    """Time until the first token of a streamed answer, which is read to its end; `inf`: it failed."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    data, start_s, first_s = json.dumps(body).encode(), time.monotonic(), float("inf")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        received = b""
        while part := await reader.read(1 << 16):
            received = received[-64:] + part
            if first_s == float("inf") and b'data: {"' in received:
                first_s = time.monotonic() - start_s
    finally:
        writer.close()
    return first_s if b"[DONE]" in received else float("inf")


async def drive(
    ports: Sequence[int], table: Any, speed: float, events: Sequence[tuple[float, Callable[[], None]]]
) -> Answers:
    """Send the table's requests at their times, each to a gateway at random."""
    draw, begin_s = Random(0), time.monotonic() + 0.5
    prompts = [[draw.randrange(3, 30_000) for _ in range(num)] for num in map(int, table["prompt_tokens"])]

    async def send(row: int) -> float:
        await asyncio.sleep(begin_s + table["arrival_s"][row] / speed - time.monotonic())
        return await ttft_s(ports[chosen[row]], prompts[row], int(table["output_tokens"][row]))

    async def happen(at_s: float, what: Callable[[], None]) -> None:
        await asyncio.sleep(begin_s + at_s / speed - time.monotonic())
        await asyncio.to_thread(what)

    chosen = [draw.randrange(len(ports)) for _ in prompts]
    tasks = [asyncio.create_task(happen(*event)) for event in events]
    found = await asyncio.gather(*(send(row) for row in range(len(prompts))))
    await asyncio.gather(*tasks)
    return Answers(np.asarray(table["arrival_s"]), np.asarray(found) * speed)


def live(router: str, seconds: float, speed: float, case: Case) -> Answers:
    table = hw.simulate(scenario(router, seconds, 0, CASES[0])).records.workload
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = stack.enter_context(postgres.server()) if case.shares else None
        fleet = Fleet(Path(folder), router, case, speed, store)
        stack.callback(fleet.close)
        fleet.wait()
        events: list[tuple[float, Callable[[], None]]] = []
        if case.has_outage:
            assert store is not None
            events = [(seconds / 3, store.stop), (2 * seconds / 3, store.start)]
        return asyncio.run(drive(fleet.gateways, table, speed, events))


# The table.


def cells(found: Sequence[Answers], seconds: float) -> list[str]:
    """Goodput, P99 and mean TTFT, and the mean TTFT of the last two thirds."""

    def pooled(start_s: float, end_s: float) -> Answers:
        parts = [each.within(start_s, end_s) for each in found]
        return Answers(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    every = pooled(0, seconds)
    goodput_rps = every.in_time * len(every.ttft_s) / seconds / len(found)
    thirds = [pooled(seconds * i / 3, seconds * (i + 1) / 3).mean_s for i in (1, 2)]
    return [f"{goodput_rps:.2f}", f"{every.p99_s:.2f}", *(f"{1e3 * each:.0f}" for each in (every.mean_s, *thirds))]


def table(router: str, seconds: float, speed: float, seeds: int, is_live: bool) -> list[str]:
    lines = [
        f"| `{router}` | | goodput, requests/s | P99 TTFT, s | mean TTFT, ms | second third | last third |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        rows = {f"simulated, {seeds} draws": [simulated(router, seconds, 1 + seed, case) for seed in range(seeds)]}
        rows = {"simulated": [simulated(router, seconds, 0, case)], **rows}
        if is_live:
            rows = {"live": [live(router, seconds, speed, case)], **rows}
        for name, found in rows.items():
            lines.append(f"| {' | '.join([case.name, name, *cells(found, seconds)])} |")
            echo(lines[-1], err=True)
    return lines


@click.command()
@click.option("--router", "routers", multiple=True, default=("least-loaded", "headway"), show_default=True)
@click.option("--seconds", default=90.0, show_default=True, help="Of each run.")
@click.option("--seeds", default=5, show_default=True)
@click.option("--live", multiple=True, default=("least-loaded",), show_default=True, help="Routers that run live, too.")
@click.option("--speed", default=0.5, show_default=True, help="Of the live runs.")
@click.option("--write", is_flag=True, help="Put the table into docs/high-availability.md.")
def main(
    routers: tuple[str, ...], live: tuple[str, ...], seconds: float, speed: float, seeds: int, write: bool
) -> None:
    tables = [table(router, seconds, speed, seeds, router in live) for router in routers]
    text = "\n\n".join("\n".join(lines) for lines in tables) + "\n"
    echo(text)
    if write:
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
