"""Engines that a gateway has started: which there are, by what the system says."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any


def ports(num: int) -> list[int]:
    """The first and the last of so many that are free, next to each other.

    Test processes that run side by side have ranges of their own: a port that one has chosen is free until it is used.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = 20_000 + 4_000 * (worker % 3)  # below the ports that the system gives out
    for first in range(begin + os.getpid() % 2_000, begin + 4_000 - num, num):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + num):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return [first, first + num - 1]
    raise AssertionError("no ports are free")


def how(ports: list[int], *options: str) -> dict[str, Any]:
    """Emulated engines that the gateway starts on these ports, the first to the last."""
    command = [sys.executable, "-m", "headway", "emulate", "--model", "qwen3-8b", "--gpu", "h100", "--port", "{port}"]
    return {"command": [*command, *options], "ports": ports, "stop_s": 2.0, "keep_env": ["PYTHONPATH"]}


def pool(num: int, *options: str, **changes: Any) -> dict[str, Any]:
    """A pool of them."""
    return {"endpoints": [], "processes": how(ports(num), *options) | changes.pop("processes", {}), **changes}


def running(first: int, last: int) -> dict[int, int]:
    """Process ids by port, of processes whose command line ends with one of these ports and what follows it."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if any("keeper.py" in word for word in words):
            continue
        for port in range(first, last + 1):
            if str(port) in words:
                found[port] = int(folder.name)
    return found
