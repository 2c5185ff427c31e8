"""What the gateway adds: latency alone, requests a second, streams a second, delay of chunks at many streams.

`python bench/gateway.py`: two mock engines, the gateway and the client share the machine, so what a request takes is
also given in CPU time, of all processes of the gateway. `--workers 1 --workers 2` measures one gateway after the other.
`--streams 9500 --interval-s 0.5` measures the delay of chunks at so many streams alone, each with a chunk at that
interval. With `--peers` or `--peer NAME=COMMAND`, other gateways are measured in the same run (`peers.py`).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import click
import httptools
import uvloop
from click import echo

HERE = Path(__file__).parent
NUM_CHUNKS, INTERVAL_S = 100, 0.05
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
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def send(self, stream: bool) -> None:
        """Send a request and wait for all of the answer."""
        body = BODY % (b',"stream":true' if stream else b"")
        self._parser = httptools.HttpResponseParser(self)
        self.came_s: list[float] = []
        self.num_events = 0
        self._done = asyncio.get_running_loop().create_future()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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
        await client.send(False)
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
            await client.send(stream)
            num += 1

    began_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return num / (time.perf_counter() - began_s)


async def paced(port: int, streams: int, interval_s: float = INTERVAL_S) -> list[float]:
    """Seconds by which events come late at so many streams at once, sorted: against each stream's own least delay."""

    async def one(i: int) -> list[float]:
        await asyncio.sleep(i * 0.002)
        client = await connect(port)
        await client.send(True)
        came = client.came_s[5:-5]
        offsets = [at - k * interval_s for k, at in enumerate(came)]
        first = min(offsets)
        return [offset - first for offset in offsets]

    late = [s for some in await asyncio.gather(*(one(i) for i in range(streams))) for s in some]
    return sorted(late)


def free_ports(num: int) -> list[int]:
    """Ports that nobody has."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(num)]


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def workers(pid: int) -> list[int]:
    """Processes that a gateway has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and int(_stat(int(entry.name))[1]) == pid:
                found.append(int(entry.name))
    return found


async def with_cpu(name: str, pid: int, what: Callable[[], Awaitable[float]], seconds: float) -> None:
    """A rate, and the CPU time of the gateway for each one of what is counted."""
    others = workers(pid)
    before = cpu_s(pid), sum(map(cpu_s, others))
    rate = await what()
    num = rate * seconds
    own, of_workers = 1e6 * (cpu_s(pid) - before[0]) / num, 1e6 * (sum(map(cpu_s, others)) - before[1]) / num
    parts = f" (scheduler {own:,.0f}, workers {of_workers:,.0f})" if others else ""
    echo(f"64 clients: {rate:,.0f} {name}, {own + of_workers:,.0f} us of CPU each{parts}")


async def measure(pid: int, port: int, mock: int) -> None:
    """What requests take."""
    straight, through = await alone(mock, 2000), await alone(port, 2000)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        at = int(share * 2000)
        added = 1e3 * (through[at] - straight[at])
        echo(f"one client, {name}: {1e3 * straight[at]:.3f} ms straight, {1e3 * through[at]:.3f} ms, added {added:.3f}")
    await with_cpu("requests/s", pid, lambda: together(port, 64, 8, False), 8)
    await with_cpu("streams/s of 100 chunks", pid, lambda: together(port, 64, 8, True), 8)


async def measure_paced(pid: int, port: int, mock: int, streams: int, interval_s: float) -> None:
    """Delay of chunks."""
    for name, where in (("straight", mock), ("through", port)):
        before_s = sum(map(cpu_s, (pid, *workers(pid))))
        late = await paced(where, streams, interval_s)
        own = 1e6 * (sum(map(cpu_s, (pid, *workers(pid)))) - before_s) / (streams * NUM_CHUNKS)
        p50_ms, p99_ms = (1e3 * late[int(share * len(late))] for share in (0.5, 0.99))
        echo(f"{streams:,} streams of {1 / interval_s:g} chunks/s, {name}: late by p50 {p50_ms:.2f} ms, "
             f"p99 {p99_ms:.2f} ms; {own:.0f} us of the gateway's CPU a chunk")  # fmt: skip


def wait_for(port: int, num: int, tls: ssl.SSLContext | None = None) -> None:
    """Until a gateway has so many replicas."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            if tls is not None:
                connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=tls)
            connection.request("GET", "/health")
            if json.loads(connection.getresponse().read()).get("up") == num:
                return
        time.sleep(0.2)
    raise TimeoutError("the gateway is not up")


def one(api: str, num_workers: int, streams: int, interval_s: float, is_paced_only: bool) -> None:
    """Start everything, measure, stop everything."""
    port, *mocks = free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(FLEET % (api, ", ".join(f'"http://127.0.0.1:{each}"' for each in mocks)))
        for pace_s in (interval_s,) if is_paced_only else (0.0, interval_s):
            commands = [[str(HERE / "mock_engine.py"), str(each), str(NUM_CHUNKS), str(pace_s)] for each in mocks]
            served = ["--port", str(port), "--workers", str(num_workers), "--restarts", "0"]
            serve = ["-m", "headway", "serve", str(fleet), *served]
            started = [subprocess.Popen([sys.executable, *command]) for command in (*commands, serve)]
            try:
                wait_for(port, 2)
                pid = started[-1].pid
                if pace_s:
                    uvloop.run(measure_paced(pid, port, mocks[0], streams, interval_s))
                else:
                    uvloop.run(measure(pid, port, mocks[0]))
            finally:
                for process in reversed(started):
                    process.kill()
                    process.wait()


@click.command()
@click.argument("api", default="openai")
@click.option("--workers", "numbers", type=click.IntRange(1), multiple=True, default=(1,), help="Of the gateway.")
@click.option("--streams", type=click.IntRange(1), help="Measure the delay of chunks alone, at so many streams.")
@click.option("--interval-s", default=INTERVAL_S, show_default=True, help="Between the chunks of a paced stream.")
@click.option("--peers", "known", is_flag=True, help="Beside those of the known other gateways that are on PATH.")
@click.option("--peer", "named", multiple=True, metavar="NAME=COMMAND", help="Beside this one.")
def main(
    api: str, numbers: tuple[int, ...], streams: int | None, interval_s: float, known: bool, named: tuple[str, ...]
) -> None:
    """Start everything, measure, stop everything."""
    if known or named:
        import peers

        peers.compare(peers.chosen(named, known))
        return
    for num_workers in numbers:
        echo(f"workers: {num_workers}")
        one(api, num_workers, streams or 500, interval_s, streams is not None)


if __name__ == "__main__":
    main()
