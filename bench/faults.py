"""What clients see while engines fail: `python bench/faults.py [CASE ...] [--write]`.

Each case starts three engines of `faulty_engine.py` and a gateway with its default settings but `hold_s: 30`, lets
clients stream answers one after the other, and breaks one engine (or all) after a second. Every answer is compared
with what it must be, token by token, and the engines count how often each request was begun. The table is part of
docs/reliability.md (`--write`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any
from uuid import uuid4

import click
from click import echo
from faulty_engine import MODEL, POISON, text_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reliability.md"
MARKS = "<!-- faults: made by bench/faults.py -->\n", "<!-- end of faults -->\n"
NUM_ENGINES, NUM_CLIENTS = 3, 12
NUM_TOKENS = 25
INTERVAL_S = 0.01
BEFORE_S = 1.0
"""Time before the fault."""
KEY = "of the administrator"
FLEET = {
    "fleet": [{"name": "pool", "model": MODEL, "gpu": "h100", "engine": "vllm-0.15"}],
    "gateway": {"admin_keys": [hashlib.sha256(KEY.encode()).hexdigest()], "timeout_s": 60.0, "hold_s": 30.0},
}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def send(port: int, method: str, path: str, body: Any = None, headers: str = "") -> tuple[int, bytes, float]:
    """Status and body of an answer, and the longest time without a byte of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        received, longest_s, last_s = b"", 0.0, time.perf_counter()
        while part := await reader.read(1 << 16):
            now = time.perf_counter()
            longest_s, last_s = max(longest_s, now - last_s), now
            received += part
            if received.endswith(b"0\r\n\r\n") or _is_whole(received):
                break
    finally:
        writer.close()
    status, _, rest = received.partition(b"\r\n\r\n")
    return int(status.split(b" ")[1]), rest, longest_s


def _is_whole(received: bytes) -> bool:
    """Whether an answer is as long as it says."""
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return length is not None and len(body) >= int(length[1])


def _text(stream: bytes) -> tuple[str, bool, bool]:
    """The text of a stream, whether it ended well, and whether it has an error event."""
    text, has_error = "", False
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                event = json.loads(line[6:])
            except ValueError:  # passed on as it came
                continue
            has_error |= "error" in event
            text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    return text, b"data: [DONE]" in stream, has_error


@dataclass
class Seen:
    """What the clients of one case saw."""

    num_whole: int = 0
    num_errors: int = 0
    """Answers that are an error, or end with one."""
    num_wrong: int = 0
    """Answers that are not what they must be, and do not say so."""
    errors: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    pause_s: float = 0.0
    """The longest time without a byte of an answer."""
    found_s: float | None = None
    """From the fault until the gateway sends the engine no more requests."""
    most_executions: int = 0
    """Of one request, by engines that still live."""
    num_dead: int = 0

    def row(self, name: str) -> str:
        errors = ", ".join(f"{num} {code}" for code, num in self.errors.items()) or "–"
        found = "–" if self.found_s is None else f"{self.found_s:.1f} s"
        return (
            f"| {name} | {self.num_whole + self.num_errors + self.num_wrong} | {self.num_whole} | {errors} "
            f"| {self.num_wrong} | {self.most_executions} | {found} | {self.pause_s:.1f} s | {self.slowest_s:.1f} s |"
        )


class Stand:
    """Engines, a gateway and clients."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        """`options` of `headway serve`, with which clients also retry under the name of their request."""
        self._retries = bool(options)
        self.ports = [_free_port() for _ in range(NUM_ENGINES)]
        self.engines = [self.start(port) for port in self.ports]
        self.seen = Seen()
        fleet = json.loads(json.dumps(FLEET))
        fleet["fleet"][0]["endpoints"] = [f"http://127.0.0.1:{port}" for port in self.ports]
        (folder / "fleet.yaml").write_text(json.dumps(fleet))
        self.port = _free_port()
        command = [sys.executable, "-m", "headway", "serve", str(folder / "fleet.yaml"), "--port", str(self.port)]
        self._gateway = Popen([*command, *options], cwd=folder, stdout=DEVNULL, stderr=DEVNULL)

    def gateway_processes(self) -> list[int]:
        """Process ids: the one that schedules, then its workers."""
        scheduler = _children(self._gateway.pid)[0]
        return [scheduler, *_children(scheduler)]

    def start(self, port: int) -> Popen[bytes]:
        command = [sys.executable, str(HERE / "faulty_engine.py"), "--port", str(port)]
        return Popen([*command, "--interval-s", str(INTERVAL_S)], stdout=DEVNULL, stderr=DEVNULL)

    async def fail(self, name: str, **how: Any) -> None:
        """Set the first engine's fault."""
        await send(self.ports[0], "PUT", "/fault", {"name": name, **how} if name else {})

    async def restart(self, which: int) -> None:
        """Kill an engine and start it again."""
        self.engines[which].kill()
        self.engines[which].wait()
        await asyncio.sleep(0.2)
        self.engines[which] = self.start(self.ports[which])

    async def up(self, num: int = NUM_ENGINES) -> None:
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError, ValueError, IndexError):
                    if json.loads((await send(self.port, "GET", "/health"))[1])["up"] >= num:
                        return
                await asyncio.sleep(0.1)

    async def client(self, end_s: float) -> None:
        """Stream answers, one after the other."""
        while time.perf_counter() < end_s:
            await self.request("tell me a story")

    async def request(self, content: str) -> None:
        began_s, seen = time.perf_counter(), self.seen
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": NUM_TOKENS}
        name = f"X-Request-Id: {uuid4().hex}\r\n" if self._retries else ""
        for attempts_left in reversed(range(_MAX_RETRIES if self._retries else 1)):
            try:
                status, data, pause_s = await send(self.port, "POST", "/v1/chat/completions", body, name)
                if not attempts_left or b"[DONE]" in data or (status != 503 and status != 200):
                    break
            except (OSError, IndexError, ValueError) as error:
                if not attempts_left:
                    seen.num_wrong += 1
                    seen.errors[repr(error)] += 1
                    return
            await asyncio.sleep(0.1)
        text, is_done, has_error = _text(data)
        if status != 200 or has_error:
            seen.num_errors += 1
            code = data.partition(b'"code":"')[2].partition(b'"')[0].decode()
            seen.errors[code or str(status)] += 1
        elif is_done and text == text_of(NUM_TOKENS) and data.count(b"[DONE]") == 1:
            seen.num_whole += 1
        else:
            seen.num_wrong += 1
        seen.slowest_s = max(seen.slowest_s, time.perf_counter() - began_s)
        seen.pause_s = max(seen.pause_s, pause_s)

    async def watch(self, fault_s: float) -> None:
        """Note when the first engine gets no more requests."""
        while self.seen.found_s is None:
            _, data, _ = await send(self.port, "GET", "/workers/0", headers=f"Authorization: Bearer {KEY}\r\n")
            if time.perf_counter() > fault_s and json.loads(data)["status"] != "up":
                self.seen.found_s = time.perf_counter() - fault_s
            await asyncio.sleep(0.05)

    async def count_executions(self) -> None:
        total: Counter[str] = Counter()
        for port, engine in zip(self.ports, self.engines, strict=True):
            engine.send_signal(signal.SIGCONT)
            with suppress(OSError, IndexError):
                total.update(json.loads((await send(port, "GET", "/executions"))[1]))
            self.seen.num_dead += engine.poll() is not None
        # Canaries of the gateway have no id.
        self.seen.most_executions = max((num for id, num in total.items() if id), default=0)

    def stop(self) -> None:
        for process in (self._gateway, *self.engines):
            process.kill()
            process.wait()


Fault = Callable[[Stand], Awaitable[None]]


def _named(name: str, **how: Any) -> Fault:
    return lambda stand: stand.fail(name, **how)


def _signalled(number: signal.Signals) -> Fault:
    async def fault(stand: Stand) -> None:
        stand.engines[0].send_signal(number)

    return fault


async def _restarts(stand: Stand) -> None:
    for which in range(2 * NUM_ENGINES):
        await stand.restart(which % NUM_ENGINES)
        await asyncio.sleep(0.7)


async def _all_dead(stand: Stand) -> None:
    for engine in stand.engines:
        engine.kill()
        engine.wait()
    await asyncio.sleep(2.0)
    stand.engines = [stand.start(port) for port in stand.ports]


async def _poison(stand: Stand) -> None:
    for _ in range(3):  # as clients repeat a request by themselves
        await stand.request(f"some {POISON}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _signalled_gateway(number: signal.Signals, which: int, for_s: float | None = None) -> Fault:
    async def fault(stand: Stand) -> None:
        pid = stand.gateway_processes()[which]
        os.kill(pid, number)
        if for_s is not None:
            await asyncio.sleep(for_s)
            os.kill(pid, signal.SIGCONT)

    return fault


async def _full_disk(stand: Stand) -> None:
    """No file of the gateway may grow for 3 s."""
    pid = stand.gateway_processes()[0]
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    await asyncio.sleep(3.0)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


OPTIONS = {
    **dict.fromkeys(("worker", "scheduler", "hung scheduler"), ("--workers", "2")),
    "gateway": ("--restarts", "5"),
    "disk": ("--records", "records", "--decisions", "decisions.jsonl"),
}
"""Of `headway serve`, for the faults of the gateway itself; in these cases clients retry."""
_MAX_RETRIES = 100

CASES: dict[str, tuple[str, Fault]] = {
    "killed": ("one engine is killed", _signalled(signal.SIGKILL)),
    "stopped": ("one engine is stopped (SIGSTOP)", _signalled(signal.SIGSTOP)),
    "hang": ("it generates nothing, and its health checks pass", _named("hang")),
    "stall": ("its streams stall after 5 tokens", _named("stall", after=5)),
    "trickle": ("it sends a token every 0.3 s", _named("trickle", interval_s=0.3)),
    "cut": ("its streams break after 5 tokens", _named("cut", after=5)),
    "garbage": ("it answers with random bytes", _named("garbage")),
    "event": ("its streams hold an event that is no JSON", _named("garbage event", after=5)),
    "short": ("its answers are shorter than their Content-Length", _named("short")),
    "long": ("its answers are longer than their Content-Length", _named("long")),
    "500": ("it answers 500", _named("status", status=500)),
    "401": ("it answers 401 at once", _named("status", status=401)),
    "400": ("it answers 400 at once", _named("status", status=400)),
    "endless": ("it ignores `max_tokens`", _named("endless")),
    "after": ("it goes on after [DONE]", _named("after done")),
    "poison": ("a prompt, sent three times, ends any engine that runs it", _poison),
    "restarts": ("each engine is killed and restarted twice, in turn", _restarts),
    "worker": ("a worker of the gateway is killed; clients retry", _signalled_gateway(signal.SIGKILL, 1)),
    "scheduler": ("the scheduler is killed; clients retry", _signalled_gateway(signal.SIGKILL, 0)),
    "gateway": ("a gateway in one process is killed; clients retry", _signalled_gateway(signal.SIGKILL, 0)),
    "hung scheduler": ("the scheduler is stopped for 3 s", _signalled_gateway(signal.SIGSTOP, 0, 3.0)),
    "disk": ("the disk is full for 3 s, with records and decisions", _full_disk),
    "all": ("all are killed at once, and back after 2 s", _all_dead),
}


async def _run(case: str, seconds: float) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(Path(folder), OPTIONS.get(case, ()))
        try:
            await stand.up()
            end_s = time.perf_counter() + BEFORE_S + seconds
            clients = [asyncio.create_task(stand.client(end_s)) for _ in range(NUM_CLIENTS)]
            await asyncio.sleep(BEFORE_S)
            watcher = asyncio.create_task(stand.watch(time.perf_counter()))
            await CASES[case][1](stand)
            await asyncio.gather(*clients)
            watcher.cancel()
            await stand.count_executions()
        finally:
            stand.stop()
        return stand.seen


def run(case: str, seconds: float = 8.0) -> Seen:
    """What clients see in a case, whose load goes on for so long after the fault."""
    return asyncio.run(_run(case, seconds))


COLUMNS = (
    "fault", "requests", "answered in full", "errors", "wrong", "most executions", "found after", "longest pause",
    "slowest answer",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
@click.option("--seconds", default=8.0, help="Length of the load after the fault.")
@click.option("--write", is_flag=True, help="Replace the table of docs/reliability.md.")
def main(cases: tuple[str, ...], seconds: float, write: bool) -> None:
    """Run the cases, and print what clients saw."""
    echo(HEAD, nl=False)
    rows = []
    for case in cases or CASES:
        rows.append(run(case, seconds).row(CASES[case][0]))
        echo(rows[-1])
    if write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(before + MARKS[0] + "\n" + HEAD + "\n".join(rows) + "\n\n" + MARKS[1] + after)


if __name__ == "__main__":
    main()
