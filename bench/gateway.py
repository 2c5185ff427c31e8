"""What the gateway adds: latency alone, requests a second, streams a second, delay of chunks at many streams.

`python bench/gateway.py`: two mock engines, one gateway process and the client share the machine, so requests a
second are also given per second of the gateway's own CPU time. With `--peers` or `--peer NAME=COMMAND`, other gateways
are measured in the same run (`peers.py`).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import httptools
import uvloop
from click import echo

HERE = Path(__file__).parent
GATEWAY, MOCKS = 9300, (9301, 9302)
BODY = b'{"model":"qwen3-8b","messages":[{"role":"user","content":"say hello"}],"max_tokens":100%s}'
FLEET = """
fleet:
  - {name: mock, model: qwen3-8b, gpu: h100, api: %s, endpoints: [%s]}
"""


class Client(asyncio.Protocol):
    """One connection, one request at a time; notes when each piece of a body came."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._done: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("cut off"))

    def on_body(self, body: bytes) -> None:
        self.came_s.append(time.perf_counter())
        self.num_events += body.count(b"data: {")

    def on_message_complete(self) -> None:
        if self._done is not None:
            self._done.set_result(None)

    async def ask(self, stream: bool) -> None:
        """Send a request and wait for all of the answer."""
        body = BODY % (b',"stream":true' if stream else b"")
        self._parser = httptools.HttpResponseParser(self)
        self.came_s: list[float] = []
        self.num_events = 0
        self._done = asyncio.get_running_loop().create_future()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await self._done
        assert self._parser.get_status_code() == 200


async def connect(port: int) -> Client:
    """A connection."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def alone(port: int, num: int) -> list[float]:
    """Seconds of requests one after the other, sorted."""
    client = await connect(port)
    took = []
    for i in range(num + 100):
        began_s = time.perf_counter()
        await client.ask(False)
        if i >= 100:
            took.append(time.perf_counter() - began_s)
    return sorted(took)


async def together(port: int, clients: int, seconds: float, stream: bool) -> float:
    """Requests a second of so many clients, each with one after the other."""
    end_s = time.perf_counter() + seconds
    num = 0

    async def one() -> None:
        nonlocal num
        client = await connect(port)
        while time.perf_counter() < end_s:
            await client.ask(stream)
            num += 1

    began_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return num / (time.perf_counter() - began_s)


async def paced(port: int, streams: int) -> list[float]:
    """Seconds by which events come late at so many streams at once, sorted: against each stream's own least delay."""

    async def one(i: int) -> list[float]:
        await asyncio.sleep(i * 0.002)
        client = await connect(port)
        await client.ask(True)
        came = client.came_s[5:-5]
        offsets = [at - k * INTERVAL_S for k, at in enumerate(came)]
        first = min(offsets)
        return [offset - first for offset in offsets]

    late = [s for some in await asyncio.gather(*(one(i) for i in range(streams))) for s in some]
    return sorted(late)


INTERVAL_S = 0.05


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def with_cpu(pid: int, what: Callable[[], Awaitable[float]], seconds: float) -> tuple[float, float]:
    """A rate, and the same per second of a process's CPU."""
    before = cpu_s(pid)
    rate = await what()
    used = cpu_s(pid) - before
    return rate, rate * seconds / used if used else 0.0


async def measure(gateway_pid: int) -> None:
    """All figures."""
    straight, through = await alone(MOCKS[0], 2000), await alone(GATEWAY, 2000)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        at = int(share * 2000)
        added = 1e3 * (through[at] - straight[at])
        echo(f"one client, {name}: {1e3 * straight[at]:.3f} ms straight, {1e3 * through[at]:.3f} ms, added {added:.3f}")
    rate, per_core = await with_cpu(gateway_pid, lambda: together(GATEWAY, 64, 8, False), 8)
    echo(f"64 clients: {rate:,.0f} requests/s, {per_core:,.0f} per CPU second of the gateway")
    rate, per_core = await with_cpu(gateway_pid, lambda: together(GATEWAY, 64, 8, True), 8)
    echo(f"64 clients: {rate:,.0f} streams/s of 100 chunks, {per_core:,.0f} per CPU second of the gateway")


async def measure_paced() -> None:
    """Delay of chunks."""
    for name, port in (("straight", MOCKS[0]), ("through", GATEWAY)):
        late = await paced(port, 500)
        echo(f"500 streams of 20 chunks/s, {name}: late by p50 {1e3 * late[len(late) // 2]:.2f} ms, "
              f"p99 {1e3 * late[int(0.99 * len(late))]:.2f} ms")  # fmt: skip


@click.command()
@click.argument("api", default="openai")
@click.option("--peers", "known", is_flag=True, help="Beside those of the known other gateways that are on PATH.")
@click.option("--peer", "named", multiple=True, metavar="NAME=COMMAND", help="Beside this one.")
def main(api: str, known: bool, named: tuple[str, ...]) -> None:
    """Start everything, measure, stop everything."""
    if known or named:
        import peers

        peers.compare(peers.chosen(named, known))
        return
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(FLEET % (api, ", ".join(f'"http://127.0.0.1:{port}"' for port in MOCKS)))
        for chunks, interval_s in ((100, 0.0), (100, INTERVAL_S)):
            commands = [[str(HERE / "mock_engine.py"), str(port), str(chunks), str(interval_s)] for port in MOCKS]
            commands.append(["-m", "headway", "serve", str(fleet), "--port", str(GATEWAY)])
            started = [subprocess.Popen([sys.executable, *command]) for command in commands]
            try:
                time.sleep(4)
                uvloop.run(measure_paced() if interval_s else measure(started[-1].pid))
            finally:
                for process in started:
                    process.kill()
                    process.wait()


if __name__ == "__main__":
    main()
