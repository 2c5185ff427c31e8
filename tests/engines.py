"""Real engines on a CPU, with a model of random weights, and what differs between them."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import serving

EXAMPLES = Path(__file__).parent.parent / "examples"


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

    def start(self, *options: str) -> serving.Process:
        """A server on a port that is free."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return serving.Process(*self.command, str(port), *options)

    def busy(self, engine: serving.Process) -> float:
        """Requests that it runs."""
        return serving.metric(engine, self.running)


LLAMA = Kind(
    "llama.cpp",
    (str(EXAMPLES / "tiny_llama.py"),),
    "llamacpp:requests_processing",
    {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"258": 15}},
)
NO_LLAMA = find_spec("xllamacpp") is None or find_spec("gguf") is None
KINDS = [
    pytest.param(
        LLAMA,
        id="llama.cpp",
        marks=pytest.mark.skipif(NO_LLAMA, reason="pip install xllamacpp gguf"),
    )
]


def words(text: str) -> list[str]:
    """What the model says are words such as "DabCeg", each of them a token."""
    assert re.fullmatch("([A-J][a-j]{2})*", text), text
    return re.findall("...", text)
