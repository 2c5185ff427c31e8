"""Real engines on a CPU, with a model of random weights, and what differs between them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import serving

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "of the tests"
ADMIN = {"authorization": f"Bearer {KEY}"}
STREAM = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


class Group(serving.Process):
    """One that has processes of its own, and takes its time to start."""

    patience_s = 400.0

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class WithFiles(serving.Process):
    """One that removes its files when it is ended politely."""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
        super().close()


@dataclass(frozen=True)
class Kind:
    """One engine."""

    name: str
    """As the catalog calls it."""
    command: tuple[str, ...]
    running: str
    """The metric of requests that run."""
    thinks: dict[str, Any]
    """What makes a chat reason, and end that early."""
    process: type[serving.Process] = serving.Process

    def start(self, *options: str) -> serving.Process:
        """A server on a port that is free."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return self.process(*self.command, str(port), *options)

    def busy(self, engine: serving.Process) -> float:
        """Requests that it runs."""
        return serving.metric(engine, self.running)


THINKS = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"258": 15}}
LLAMA = Kind("llama.cpp", (str(EXAMPLES / "tiny_llama.py"),), "llamacpp:requests_processing", THINKS, WithFiles)
VLLM = Kind(
    "vllm-0.15",
    (str(Path(__file__).parent / "vllm_server.py"), os.environ.get("HEADWAY_VLLM", "")),
    "vllm:num_requests_running",
    THINKS,
    Group,
)
NO_LLAMA = find_spec("xllamacpp") is None or find_spec("gguf") is None
KINDS = [
    pytest.param(
        LLAMA,
        id="llama.cpp",
        marks=pytest.mark.skipif(NO_LLAMA, reason="pip install xllamacpp gguf"),
    ),
    pytest.param(
        VLLM,
        id="vllm",
        marks=pytest.mark.skipif("HEADWAY_VLLM" not in os.environ, reason="HEADWAY_VLLM names no vllm program"),
    ),
]


@contextmanager
def gateways(folder: Path, **pool: str) -> Iterator[Callable[..., serving.Process]]:
    """Starts gateways before engines, with options and sections of the fleet file; they end with the test."""
    with ExitStack() as started:

        def start(engines: list[serving.Process], *options: str, **sections: Any) -> serving.Process:
            path = serving.fleet_file(
                folder,
                [engine.url for engine in engines],
                pool=pool,
                gateway={"admin_keys": [sha256(KEY.encode()).hexdigest()]},
                **sections,
            )
            front = serving.gateway(path, *options)
            started.enter_context(serving.closing(front))
            serving.all_up(front, len(engines))
            return front

        yield start


def words(text: str) -> list[str]:
    """What the model says are words such as "DabCeg", each of them a token."""
    assert re.fullmatch("([A-J][a-j]{2})*", text), text
    return re.findall("...", text)
