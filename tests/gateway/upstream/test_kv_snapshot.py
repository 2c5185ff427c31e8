"""Requests that move between llama.cpp's servers with their KV caches, through a folder that the servers share."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import serving
from engines import ADMIN, LLAMA, NO_LLAMA, STREAM, gateways
from headway import serving as composition
from headway.core.errors import HeadwayError
from serving import Process, ask, chat, metric, said, until

pytest.importorskip("httptools")
from headway.gateway.upstream.kv_snapshot import tokens_of

llama = pytest.mark.skipif(NO_LLAMA, reason="pip install xllamacpp gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[list[Process]]:
    pair = [LLAMA.start(str(folder)), LLAMA.start(str(folder))]
    with serving.closing(*pair):
        yield pair


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with gateways(tmp_path, engine="llama.cpp", slots=str(folder)) as start:
        yield start


def _anew(engine: Process) -> float:
    """Tokens of prompts that the server had to compute."""
    return metric(engine, "llamacpp:prompt_tokens_total")


def _text(events: list[Any]) -> str:
    assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1])
    return f"{said(events, 'reasoning_content')}|{said(events)}"


def _drained(front: Process, reply: serving.Reply, after: int) -> list[Any]:
    """The stream's events, of whose replica everything is moved out after so many."""
    left = reply.headers["x-headway-replica"].removeprefix("pool/")
    events = []
    for event in reply.events():
        events.append(event)
        if len(events) == after:
            ask(front, f"/workers/{left}/drain", {}, ADMIN).json()
    ask(front, f"/workers/{left}/undrain", {}, ADMIN).json()
    return events


@llama
@pytest.mark.parametrize("thinks", [{}, LLAMA.thinks], ids=["answer", "after reasoning"])
def test_one_token_is_computed_anew(
    thinks: dict[str, Any], engines: list[Process], serve: Callable[..., Process], folder: Path
) -> None:
    """And nothing is said otherwise, even where the engine keeps tokens from clients (</think>)."""
    options = {**STREAM, **thinks, "max_tokens": 800}
    alone = _text(list(chat(engines[0], **options).events()))
    front = serve(engines)
    reply = chat(front, **options)
    target = engines[1 - int(reply.headers["x-headway-replica"].removeprefix("pool/"))]
    before = _anew(target)
    events = _drained(front, reply, 500)
    assert _text(events) == alone
    assert events[-2]["usage"]["completion_tokens"] == 800
    assert _anew(target) - before == 1
    assert list(folder.iterdir()) == []


@llama
def test_moves_of_a_policy(engines: list[Process], serve: Callable[..., Process], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "restless.py").write_text(RESTLESS)
    options = {**STREAM, **LLAMA.thinks, "max_tokens": 300}
    alone = _text(list(chat(engines[0], **options).events()))
    front = serve(engines, policies={"migration": "restless:Restless"})
    before = sum(map(_anew, engines))
    reply = chat(front, **options)
    assert _text(list(reply.events())) == alone
    prompt = sum(map(_anew, engines)) - before
    assert prompt <= 31, "the prompt, and one for a move or two"
    assert list(folder.iterdir()) == []


@llama
@pytest.mark.parametrize("workers", ["1", "2"])
def test_more_streams_than_slots_all_move(
    workers: str, engines: list[Process], serve: Callable[..., Process], folder: Path
) -> None:
    """They wait for slots in turn; none is lost, mixed up with another, or left behind."""
    prompts = [f"{i} hellos" for i in range(12)]
    options = {**STREAM, "max_tokens": 150}
    alone = [_text(list(chat(engines[i % 2], text, **options).events())) for i, text in enumerate(prompts)]
    front = serve(engines, "--workers", workers)

    def stream(i: int) -> str:
        reply = chat(front, prompts[i], **options)
        return _text(_drained(front, reply, 40) if i == 3 else list(reply.events()))

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(stream, range(len(prompts)))) == alone
    until(lambda: metric(front, "headway_requests_in_flight") == 0)
    assert list(folder.iterdir()) == []


@llama
@pytest.mark.parametrize("killed", [False, True], ids=["saves nothing", "killed"])
def test_without_a_saved_slot_its_tokens_have_to_do(
    killed: bool, engines: list[Process], serve: Callable[..., Process]
) -> None:
    """One server has no folder, and one that is killed saves nothing any more."""
    options = {**STREAM, "content": f"is it {killed}?", "max_tokens": 600}
    other = LLAMA.start()
    with serving.closing(other):
        alone = _text(list(chat(other, **options).events()))
        front = serve([other, engines[0]])
        ask(front, "/workers/1/drain", {}, ADMIN).json()
        reply = chat(front, **options)
        ask(front, "/workers/1/undrain", {}, ADMIN).json()
        before = _anew(engines[0])
        events = []
        for event in reply.events():
            events.append(event)
            if len(events) == 200 and killed:
                other.kill()
            elif len(events) == 200:
                ask(front, "/workers/0/drain", {}, ADMIN).json()
        assert _text(events) == alone
        assert _anew(engines[0]) - before > 200
        assert killed or "slot" in front.stop()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"engine": "llama.cpp", "slots": "nowhere"}, "expected the one that is the engines' --slot-save-path"),
        ({"slots": "."}, "engines that speak vllm have no slots"),
    ],
)
def test_folders_that_are_none(pool: dict[str, str], message: str, tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], pool=pool)
    with pytest.raises(HeadwayError, match=f"fleet.0..slots.*{message}"):
        composition.load(path)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [([5, 6, 7], [5, 6, 7]), ([-1, 1, 2, 8, 9, 0], [8, 9]), ([-1, 1], []), ([], []), ([5, -3], [])],
)
def test_tokens_of_saved_slots(values: list[int], tokens: list[int], tmp_path: Path) -> None:
    """As older servers write them, as newer ones do, and otherwise."""
    file = tmp_path / "slot"
    file.write_bytes(b"qsgg" + struct.pack("<II", 2, len(values)) + struct.pack(f"<{len(values)}i", *values) + b"kv")
    assert tokens_of(file) == tokens
    file.write_bytes(b"more" + file.read_bytes())
    assert tokens_of(file) == []


RESTLESS = """
from headway.core.decision import Move


class Restless:
    interval_s = None

    def moves(self, view):
        return []

    def at_phase(self, request, view):
        return Move(request.id, next(r.id for r in view.replicas if r.id != request.replica))
"""
