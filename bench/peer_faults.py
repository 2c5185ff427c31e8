"""Faults of engines behind Headway and behind other gateways: `python bench/peer_faults.py [FAULT ...]`.

Compares Headway with those of vllm-router and smg that are on PATH (`pip install vllm-router==0.1.17 smg==1.13`), each
with its default settings, and for each fault with processes of their own. Six clients stream answers of 25 tokens at
10 ms a token, one after the other, from before the fault until `--seconds` after it. A cell says how many answers were
whole (all tokens, in order, each once), how many were refused with a status or an error event, how many broke off or
took longer than 10 s, and how long the slowest took. `--write` puts the table into docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

import click
from faults import PAGE, send
from faulty_engine import MODEL, text_of

HERE = Path(__file__).parent
MARKS = "<!-- peer faults: made by bench/peer_faults.py -->\n", "<!-- end of peer faults -->\n"
NUM_TOKENS, NUM_CLIENTS = 25, 6
BEFORE_S, LIMIT_S, START_S = 0.5, 10.0, 60.0
GATEWAYS = {
    "headway": f"{shlex.quote(sys.executable)} -m headway serve {{fleet}} --port {{port}}",
    "vllm-router": "vllm-router --host 127.0.0.1 --port {port} --worker-urls {first} {second} --policy round_robin"
    " --prometheus-port {free} --log-level error",
    "smg": "smg launch --host 127.0.0.1 --port {port} --worker-urls {first} {second} --policy round_robin"
    " --prometheus-port {free} --log-level error",
}
FAULTS: dict[str, tuple[str, dict[str, Any] | str]] = {
    "503": ("one engine answers 503", {"name": "status", "status": 503}),
    "429": ("one answers 429", {"name": "status", "status": 429}),
    "400": ("one answers 400, the other does not", {"name": "status", "status": 400}),
    "close": ("one closes each connection first", {"name": "close"}),
    "cut": ("one breaks its streams after 5 tokens", {"name": "cut", "after": 5}),
    "error": ("one reports an error after 5 tokens", {"name": "error event", "after": 5}),
    "no done": ("one ends after 5 tokens without [DONE]", {"name": "no done", "after": 5}),
    "no JSON": ("one sends an event that is no JSON", {"name": "garbage event", "after": 5}),
    "hang": ("one generates nothing", {"name": "hang"}),
    "stall": ("one stalls after 5 tokens", {"name": "stall", "after": 5}),
    "sick": ("one fails its health checks, and answers 503", {"name": "sick"}),
    "leave": ("clients leave after 5 tokens", "leave"),
    "all dead": ("both engines are killed", "kill"),
}


class Seen:
    """What the clients of one gateway saw."""

    def __init__(self) -> None:
        self.num_whole = self.num_late = 0
        self.refused: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.engines_left: tuple[int, int] | None = None
        """Streams that clients left, and those whose engines noticed it."""

    def cell(self) -> str:
        if self.engines_left is not None:
            return f"{self.engines_left[1]} of {self.engines_left[0]} aborted at the engine"
        parts = [f"{self.num_whole} whole"] if self.num_whole else []
        parts += [f"{num} {code}" for code, num in sorted(self.refused.items())]
        parts += [f"{self.num_late} broken or late"] if self.num_late else []
        return f"{', '.join(parts)}; {self.slowest_s:.1f} s"


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _judge(seen: Seen, status: int, data: bytes) -> None:
    text, has_error = "", False
    for line in data.replace(b"\r", b"").split(b"\n"):
        if line.startswith(b"data: {"):
            with suppress(ValueError, AttributeError):
                event = json.loads(line[6:])
                has_error |= "error" in event
                text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    if status != 200:
        seen.refused[str(status)] += 1
    elif has_error:
        seen.refused["error event"] += 1
    elif text == text_of(NUM_TOKENS) and b"[DONE]" in data:
        seen.num_whole += 1
    else:
        seen.num_late += 1


async def _request(port: int, seen: Seen) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": NUM_TOKENS}
    start_s = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S):
            status, data, _ = await send(port, "POST", "/v1/chat/completions", body)
        _judge(seen, status, data)
    except (TimeoutError, OSError, IndexError, ValueError):
        seen.num_late += 1
    seen.slowest_s = max(seen.slowest_s, time.perf_counter() - start_s)


async def _client(port: int, seen: Seen, end_s: float) -> None:
    while time.perf_counter() < end_s:
        before_s = time.perf_counter()
        await _request(port, seen)
        await asyncio.sleep(max(0.05 - (time.perf_counter() - before_s), 0))


async def _leave(port: int, engines: list[int]) -> tuple[int, int]:
    """Streams that clients left after some tokens, and those whose engines noticed it within 2 s."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True,
                       "max_tokens": 1000}).encode()  # fmt: skip
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b" w5")
        writer.transport.abort()
    await asyncio.sleep(2.0)
    gone = [json.loads((await send(engine, "GET", "/gone"))[1]) for engine in engines]
    return 10, sum(gone)


async def _ready(port: int) -> bool:
    end_s = time.perf_counter() + START_S
    while time.perf_counter() < end_s:
        seen = Seen()
        await _request(port, seen)
        if seen.num_whole:
            return True
        await asyncio.sleep(0.3)
    return False


async def _measure(command: str, fault: dict[str, Any] | str, seconds: float, folder: Path) -> Seen | None:
    ports, port = [_port(), _port()], _port()
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "start_new_session": True}
    engines = [
        subprocess.Popen(
            [sys.executable, str(HERE / "faulty_engine.py"), "--port", str(each), "--interval-s", "0.01"], **options
        )
        for each in ports
    ]
    fleet = folder / "fleet.yaml"
    fleet.write_text(json.dumps({"fleet": [{"name": "a", "model": MODEL, "engine": "vllm-0.15", "endpoints": urls}]}))
    started = list(engines)
    try:
        await asyncio.sleep(1.0)
        words = shlex.split(command.format(port=port, free=_port(), first=urls[0], second=urls[1], fleet=fleet))
        started.append(subprocess.Popen(words, **options))
        if not await _ready(port):
            return None
        await asyncio.sleep(1.0)
        seen = Seen()
        if fault == "leave":
            seen.engines_left = await _leave(port, ports)
            return seen
        end_s = time.perf_counter() + BEFORE_S + seconds
        clients = [asyncio.create_task(_client(port, seen, end_s)) for _ in range(NUM_CLIENTS)]
        await asyncio.sleep(BEFORE_S)
        if fault == "kill":
            for engine in engines:
                engine.kill()
        else:
            await send(ports[0], "PUT", "/fault", fault)
        await asyncio.gather(*clients)
        return seen
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(name: str, fault: str, seconds: float = 4.0) -> Seen | None:
    """What clients of a gateway see; None: it did not start."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(GATEWAYS[name], FAULTS[fault][1], seconds, Path(folder)))


@click.command()
@click.argument("faults", nargs=-1, type=click.Choice(list(FAULTS)))
@click.option("--seconds", default=4.0, help="Length of the load after the fault.")
@click.option("--write", is_flag=True, help="Replace the table of docs/reliability.md.")
def main(faults: tuple[str, ...], seconds: float, write: bool) -> None:
    """Run the faults, and print what clients saw behind each gateway."""
    names = [name for name in GATEWAYS if name == "headway" or which(name)]
    rows = [f"| fault | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    click.echo("\n".join(rows))
    for fault in faults or FAULTS:
        found = [measure(name, fault, seconds) for name in names]
        cells = ["did not start" if seen is None else seen.cell() for seen in found]
        rows.append(f"| {FAULTS[fault][0]} | {' | '.join(cells)} |")
        click.echo(rows[-1])
    if write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(before + MARKS[0] + "\n" + "\n".join(rows) + "\n\n" + MARKS[1] + after)


if __name__ == "__main__":
    main()
