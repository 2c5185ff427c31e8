"""Gateways with several workers: their processes, and counts that must agree with the engines'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import serving
from serving import Reply, chat, metric, until

LONG = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
Stream = tuple[Reply, Iterator[Any]]


def gateway_with_workers(path: Path, num: int, *options: str) -> serving.Process:
    """A gateway whose workers have all started."""
    made = serving.gateway(path, "--workers", str(num), *options)
    until(lambda: len(worker_pids(made)) == num)
    return made


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def worker_pids(front: serving.Process) -> list[int]:
    """Process ids of the workers that have received their configuration."""
    found = []
    for child in children(front.process.pid):
        with suppress(OSError):
            if "headway.gateway.workers.worker" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
    return found


def is_alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def num_in_flight(front: serving.Process) -> int:
    return int(metric(front, "headway_requests_in_flight"))


def num_at_engines(engines: list[serving.Process]) -> int:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return int(sum(metric(engine, name) for engine in engines for name in names))


def wait_until_counts_agree(front: serving.Process, engines: list[serving.Process], num: int) -> None:
    """Wait until the gateway and its engines count so many requests."""
    until(lambda: num_in_flight(front) == num == num_at_engines(engines))


def started_stream(front: serving.Process, headers: dict[str, str] | None = None, **options: Any) -> Stream:
    """A stream that has brought its first event."""
    reply = chat(front, headers=headers, **{**LONG, **options})
    events = reply.events()
    next(events)
    return reply, events
