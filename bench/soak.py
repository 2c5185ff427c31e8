"""Does the gateway stay small? `python bench/soak.py [MINUTES] [--records]`: ten minutes of mixed load on two emulated
engines.

Streams and whole answers of several tiers, sessions and regions; clients that leave, clients that read slowly; and
every half minute one of the engines is killed, and started again. With `--records`, records are written every second,
and made one part a minute: ten times as often as by default. `--streams 300 --speed 0.1` has 300 clients of engines
that are slow enough for so many on few cores. Said at the end: resident memory after the warm-up, its median, and its
slope from then on (the median of the slopes between all pairs of samples), open files, what is in flight once nobody
asks any more, and what became of the requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import click
from click import echo

GATEWAY, ENGINES = 9310, (9311, 9312)
SAMPLE_S = 5.0
KILL_S = 30.0
FLEET = """
fleet:
  - {name: chat, model: qwen3-8b, gpu: h100, engine: vllm-0.15, endpoints: [%s]}
policies: {routing: headway, ordering: priority, ordering_at: gateway, window: 16, migration: headway}
gateway: {scrape_period_s: 0.5, explain: true, dashboard: open, records_period_s: 1}
"""


def engine(port: int, speed: float) -> subprocess.Popen[bytes]:
    """One emulated."""
    options = f"--model qwen3-8b --gpu h100 --speed {speed:g} --reasoning-tokens 20 --output-tokens 80"
    return _started("emulate", *options.split(), "--port", str(port))


def _started(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "headway", *command], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)  # fmt: skip


class Load:
    """Clients, until they are told to stop."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.is_over = False

    async def client(self) -> None:
        """One request after the other."""
        while not self.is_over:
            try:
                self.ended[await self._one()] += 1
            except (OSError, EOFError, ValueError, IndexError) as error:
                self.ended[f"no answer: {type(error).__name__}"] += 1
            await asyncio.sleep(self._draw.expovariate(4.0))

    async def _one(self) -> str:
        draw = self._draw
        stream, leaves, is_slow = draw.random() < 0.7, draw.random() < 0.15, draw.random() < 0.1
        content = " ".join(f"w{draw.randrange(10**6)}" for _ in range(draw.randrange(1, 400)))
        body = json.dumps({
            "model": "qwen3-8b", "stream": stream, "max_tokens": draw.randrange(1, 120), "priority": draw.randrange(4),
            "messages": [{"role": "user", "content": content}],
        }).encode()  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            f"x-session-id: s{draw.randrange(10**6)}\r\nx-headway-region: r{draw.randrange(5)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", GATEWAY)
        try:
            writer.write(head.encode() + body)
            if leaves:
                await asyncio.sleep(draw.random() * 0.5)
                return "left"
            return await self._read(reader, is_slow)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, is_slow: bool) -> str:
        parts = []
        while part := await reader.read(256 if is_slow else 1 << 16):
            parts.append(part)
            if is_slow:
                await asyncio.sleep(0.05)
        body = b"".join(parts)
        status = int(body.split(b" ", 2)[1])
        if b'"error":{' in body:
            code = body.split(b'"code":"')[1].split(b'"')[0]
            return f"{status} {code.decode()}"
        return f"{status} {'streamed' if b'data: [DONE]' in body else 'whole'}"


async def trouble(engines: list[subprocess.Popen[bytes]], speed: float, load: Load) -> None:
    """Kill an engine now and then, and start it again."""
    turn = 0
    while not load.is_over:
        await asyncio.sleep(KILL_S)
        engines[turn].kill()
        engines[turn].wait()
        await asyncio.sleep(3.0)
        engines[turn] = engine(ENGINES[turn], speed)
        turn = 1 - turn


async def samples(pid: int, began_s: float, load: Load) -> list[tuple[float, float, int]]:
    """(minutes, resident KiB, open files), every few seconds."""
    found = []
    while not load.is_over:
        await asyncio.sleep(SAMPLE_S)
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        minutes = (time.monotonic() - began_s) / 60
        found.append((minutes, pages * os.sysconf("SC_PAGE_SIZE") / 1024, len(os.listdir(f"/proc/{pid}/fd"))))
    return found


async def answers() -> None:
    """Wait until both engines are up."""
    while True:
        try:
            if await gauge("replica_up") == len(ENGINES):
                return
        except OSError:
            pass
        await asyncio.sleep(0.5)


async def gauge(name: str) -> float:
    """The sum of one of the gateway's metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", GATEWAY)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"headway_{name}{{"))


def slope(points: list[tuple[float, float]]) -> float:
    """Theil and Sen's: the median slope of all pairs."""
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
    return median(pairs)


async def soak(
    pid: int, engines: list[subprocess.Popen[bytes]], minutes: float, streams: int, speed: float, warm_minutes: float
) -> None:
    """All of it, and the figures."""
    await answers()
    load, began_s = Load(0), time.monotonic()
    clients = [asyncio.create_task(load.client()) for _ in range(streams)]
    troubles = asyncio.create_task(trouble(engines, speed, load))
    watching = asyncio.create_task(samples(pid, began_s, load))
    await asyncio.sleep(60 * minutes)
    load.is_over = True
    troubles.cancel()
    taken = await watching
    await asyncio.gather(*clients)
    await asyncio.sleep(2.0)
    warm = [(at, kib) for at, kib, _ in taken if at >= warm_minutes or minutes <= 1.5 * warm_minutes]
    rss = [kib for _, kib in warm]
    echo(f"{sum(load.ended.values()):,} requests in {minutes:g} minutes")
    for what, num in load.ended.most_common():
        echo(f"  {num:7,} {what}")
    echo(f"resident: {rss[0]:,.0f} KiB at minute {warm_minutes:g}, median {median(rss):,.0f}, most {max(rss):,.0f}, "
         f"at the end {rss[-1]:,.0f}; slope {slope(warm):+.1f} KiB/min, "
         f"in the second half {slope(warm[len(warm) // 2 :]):+.1f}")  # fmt: skip
    echo(f"open files: {taken[0][2]} at first, most {max(files for _, _, files in taken)}, "
         f"now {len(os.listdir(f'/proc/{pid}/fd'))}")  # fmt: skip
    echo(f"in flight: {await gauge('requests_in_flight'):g}, held: {await gauge('requests_held'):g}")


@click.command()
@click.argument("minutes", type=click.FloatRange(0.2), default=10.0)
@click.option("--records", is_flag=True, help="Write records.")
@click.option("--streams", type=click.IntRange(1), default=24, show_default=True, help="Clients at a time.")
@click.option("--speed", type=click.FloatRange(0.01), default=4.0, show_default=True, help="Of the engines.")
@click.option("--warm", type=click.FloatRange(0.0), default=1.0, show_default=True, help="Minutes that do not count.")
def main(minutes: float, records: bool, streams: int, speed: float, warm: float) -> None:
    """Start everything, load it, stop everything."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(FLEET % ", ".join(f'"http://127.0.0.1:{port}"' for port in ENGINES))
        engines = [engine(port, speed) for port in ENGINES]
        options = ("--records", str(Path(folder) / "records")) if records else ()
        gateway = _started("serve", str(fleet), "--port", str(GATEWAY), "--restarts", "0", *options)
        try:
            asyncio.run(soak(gateway.pid, engines, minutes, streams, speed, warm))
        finally:
            for process in (gateway, *engines):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
