"""Batches, as OpenAI's own client makes them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import MODEL

openai = pytest.importorskip("openai")
_clients: list[Any] = []


def closed() -> Iterator[None]:
    """No client is left open."""
    yield
    while _clients:
        _clients.pop().close()


def client(front: serving.Process, key: str = "any") -> Any:
    _clients.append(openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0))
    return _clients[-1]


def line(name: str, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"tell me of {name}"}], "max_tokens": 3, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def begin(who: Any, content: bytes, **options: Any) -> Any:
    """A batch of these lines."""
    file = who.files.create(file=("work.jsonl", content), purpose="batch")
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return who.batches.create(input_file_id=file.id, **asked)


def ended(who: Any, batch: Any) -> Any:
    """The batch, when nothing more will happen to it."""
    end_s = time.monotonic() + serving.PATIENCE_S
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < end_s, batch
        time.sleep(0.05)
        batch = who.batches.retrieve(batch.id)
    return batch


def answers(who: Any, file: str | None) -> list[dict[str, Any]]:
    """Lines of an output or error file."""
    return [json.loads(each) for each in who.files.content(file).text.splitlines()] if file else []


def slow(engine: serving.Process, folder: Path, **batches: Any) -> Path:
    """A fleet whose batches take their time: one line each 50 ms, 100 tokens each."""
    folder.mkdir(exist_ok=True)
    return serving.fleet_file(
        folder,
        [engine.url],
        policies={"admission": {"name": "queue-manager", "interval_s": 0.05}, "window": 4},
        gateway={"batches": {"max_open": 10, **batches}},
    )


def num_completed(front: serving.Process, batch: str) -> int:
    return int(client(front).batches.retrieve(batch).request_counts.completed)
