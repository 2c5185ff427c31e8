"""Engines and gateways as processes of their own, and a client that speaks HTTP with them over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

import forking

MODEL = "qwen3-8b"
PATIENCE_S = 60.0


class Process:
    """`python ...`, on a port that it tells. It is waited for when it is first asked for that, so that several start at
    the same time."""

    patience_s = PATIENCE_S

    def __init__(self, *args: str) -> None:
        self.process = forking.Forked(args) if forking.can_fork(args) else self._started(args)
        self._port: int | None = None
        self._asking = threading.Lock()

    def _started(self, args: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command(args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)

    @staticmethod
    def _command(args: Sequence[str]) -> list[str]:
        return [sys.executable, *args]

    @property
    def port(self) -> int:
        """Once it listens there."""
        with self._asking:
            if self._port is None:
                self._port = int(self._line_with("://127.0.0.1:").split("://127.0.0.1:")[1])
            return self._port

    def _line_with(self, text: str) -> str:
        assert self.process.stdout is not None
        end_s = time.monotonic() + self.patience_s
        while time.monotonic() < end_s:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                line = self.process.stdout.readline().decode()
                if text in line:
                    return line
            if self.process.poll() is not None:
                break
        assert self.process.stderr is not None
        self._end()
        written = self.process.stderr.read().decode()
        self.close()
        raise AssertionError(written)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """It has listened by then, if it could."""
        if self.process.poll() is None:
            with suppress(AssertionError):
                _ = self.port
        self._end()

    def wait_for(self, *texts: str) -> None:
        """Read what it writes to stderr, until all of these have come."""
        assert self.process.stderr is not None
        end_s, read = time.monotonic() + PATIENCE_S, ""
        while not all(text in read for text in texts):
            assert time.monotonic() < end_s and self.process.poll() is None, read
            if select.select([self.process.stderr], [], [], 0.2)[0]:
                read += self.process.stderr.readline().decode()

    def stop(self) -> str:
        """End it politely; what it wrote to stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, written = self.process.communicate(timeout=PATIENCE_S)
        return written.decode()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def emulator(*options: str, port: int = 0) -> Process:
    """An engine without a GPU."""
    return Process("-m", "headway", "emulate", "--model", MODEL, "--gpu", "h100", "--port", str(port), *options)


def slow_emulator(port: int = 0) -> Process:
    """An engine without a GPU whose answers take long enough to be interrupted: 300 tokens, 60 of them reasoning."""
    return emulator("--reasoning-tokens", "60", "--output-tokens", "300", "--speed", "3", port=port)


def fleet_file(folder: Path, engines: list[str], **changes: Any) -> Path:
    """A fleet of one pool; `changes` are sections of the file, or keys of the pool."""
    pool = {"name": "pool", "model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": engines}
    pool |= changes.pop("pool", {})
    data = {"fleet": [pool], "gateway": {"scrape_period_s": 0.1, **changes.pop("gateway", {})}, **changes}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def gateway(path: Path, *options: str) -> Process:
    """A gateway whose engines are all up, if they are there; in one process unless `--restarts` says otherwise."""
    supervision = () if "--restarts" in options else ("--restarts", "0")
    return Process("-m", "headway", "serve", str(path), "--port", "0", *supervision, *options)


@contextmanager
def closing(*processes: Process) -> Iterator[None]:
    """No process outlives the test."""
    try:
        yield
    finally:
        for process in processes:
            process.close()


@contextmanager
def up(front: Process, num: int, *others: Process) -> Iterator[Process]:
    """A gateway, or a picker, once so many replicas are up. It ends with the test, and so do the others."""
    with closing(front, *others):
        all_up(front, num)
        yield front


class Reply:
    """An answer as it comes."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response = connection.getresponse()
        self.status = self._response.status
        self.headers = {name.lower(): value for name, value in self._response.getheaders()}

    def json(self) -> Any:
        try:
            return json.loads(self._response.read())
        finally:
            self.close()

    def text(self) -> str:
        try:
            return self._response.read().decode()
        finally:
            self.close()

    def events(self) -> Iterator[Any]:
        """Each event's value; "[DONE]" as such."""
        while line := self._response.readline():
            if line.startswith(b"data: "):
                payload = line[6:].strip()
                yield "[DONE]" if payload == b"[DONE]" else json.loads(payload)
        self.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def send(
    process: Process, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Reply:
    """Send a request; a body that is no bytes is JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=PATIENCE_S)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    kind = {} if data is body else {"content-type": "application/json"}
    connection.request(method or ("GET" if data is None else "POST"), path, data, {**kind, **(headers or {})})
    return Reply(connection)


def chat(
    process: Process, content: str = "hello there", headers: dict[str, str] | None = None, **options: Any
) -> Reply:
    """One message."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}
    return send(process, "/v1/chat/completions", body, headers)


def answer_text(events: list[Any], key: str = "content") -> str:
    """All text of a chat's stream."""
    deltas = [choice["delta"] for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    return "".join(delta.get(key) or "" for delta in deltas)


def metric(process: Process, name: str) -> float:
    """The sum of a metric's samples."""
    lines = send(process, "/metrics").text().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def until(true: Any, patience_s: float = PATIENCE_S) -> None:
    """Wait for something to hold."""
    end_s = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.02)


async def eventually(true: Callable[[], Any]) -> None:
    """Wait for something to hold, in an event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.001)


def all_up(process: Process, num: int) -> None:
    """Wait for so many replicas."""
    until(lambda: send(process, "/health").json()["up"] == num)


assert os.name == "posix"


RESTLESS_POLICY = """
from headway.core.decision import Move


class Restless:
    interval_s = None

    def moves(self, view):
        return []

    def at_phase(self, request, view):
        return Move(request.id, next(r.id for r in view.replicas if r.id != request.replica))
"""
"""A policy file whose migration moves a request to another replica at each phase."""
