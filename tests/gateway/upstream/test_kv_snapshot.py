"""Requests that move between llama.cpp's servers with their KV caches, and snapshots that are left behind."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import serving
from engines import ADMIN, LLAMA, NO_LLAMA, STREAM, gateways
from headway import serving as composition
from headway.core.errors import HeadwayError
from serving import Process, answer_text, chat, metric, send, until

pytest.importorskip("httptools")
from headway.gateway.clock import Clock
from headway.gateway.upstream import kv_snapshot
from headway.gateway.upstream.kv_snapshot import STALE_S, KvSnapshot, StaleSnapshots, delete_stale, tokens_of
from in_memory import answering
from relay_alone import OrderedScheduler, chat_request, engine, relay_of

pytestmark = pytest.mark.slow
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


def _computed(engine: Process) -> float:
    """Prompt tokens that the server computed, not counting cached ones."""
    return metric(engine, "llamacpp:prompt_tokens_total")


def _text(events: list[Any]) -> str:
    assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1])
    return f"{answer_text(events, 'reasoning_content')}|{answer_text(events)}"


def _drained(front: Process, reply: serving.Reply, after: int) -> list[Any]:
    """The stream's events. Its replica is drained after this many."""
    left = reply.headers["x-headway-replica"].removeprefix("pool/")
    events = []
    for event in reply.events():
        events.append(event)
        if len(events) == after:
            send(front, f"/workers/{left}/drain", {}, ADMIN).json()
    send(front, f"/workers/{left}/undrain", {}, ADMIN).json()
    return events


@llama
@pytest.mark.parametrize("thinks", [{}, LLAMA.thinks], ids=["answer", "after reasoning"])
def test_a_move_computes_one_token_anew(
    thinks: dict[str, Any], engines: list[Process], serve: Callable[..., Process], folder: Path
) -> None:
    """The text is that of an uninterrupted stream, even if the engine hides tokens from clients (</think>)."""
    options = {**STREAM, **thinks, "max_tokens": 800}
    alone = _text(list(chat(engines[0], **options).events()))
    front = serve(engines)
    reply = chat(front, **options)
    target = engines[1 - int(reply.headers["x-headway-replica"].removeprefix("pool/"))]
    before = _computed(target)
    events = _drained(front, reply, 500)
    assert _text(events) == alone
    assert events[-2]["usage"]["completion_tokens"] == 800
    assert _computed(target) - before == 1
    assert list(folder.iterdir()) == []


@llama
def test_moves_of_a_policy(engines: list[Process], serve: Callable[..., Process], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "restless.py").write_text(serving.RESTLESS_POLICY)
    options = {**STREAM, **LLAMA.thinks, "max_tokens": 300}
    alone = _text(list(chat(engines[0], **options).events()))
    front = serve(engines, policies={"migration": "restless:Restless"})
    before = sum(map(_computed, engines))
    reply = chat(front, **options)
    assert _text(list(reply.events())) == alone
    prompt = sum(map(_computed, engines)) - before
    assert prompt <= 31, "the prompt, and one token per move"
    assert list(folder.iterdir()) == []


@llama
@pytest.mark.parametrize("workers", ["1", "2"])
def test_more_streams_than_slots_all_move(
    workers: str, engines: list[Process], serve: Callable[..., Process], folder: Path
) -> None:
    """Streams wait for slots in turn; none is lost or mixed up with another one."""
    prompts = [f"{i} hellos" for i in range(12)]
    options = {**STREAM, "max_tokens": 150}
    alone = [_text(list(chat(engines[i % 2], text, **options).events())) for i, text in enumerate(prompts)]
    front = serve(engines, "--workers", workers)

    def stream(i: int) -> str:
        reply = chat(front, prompts[i], **options)
        assert reply.status == 200, reply.text()
        return _text(_drained(front, reply, 40) if i == 3 else list(reply.events()))

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(stream, range(len(prompts)))) == alone
    until(lambda: metric(front, "headway_requests_in_flight") == 0)
    assert list(folder.iterdir()) == []


@llama
@pytest.mark.parametrize("killed", [False, True], ids=["no folder", "killed"])
def test_without_a_snapshot_the_tokens_are_replayed(
    killed: bool, engines: list[Process], serve: Callable[..., Process]
) -> None:
    """One server has no folder for slots; one is killed before it can save them."""
    options = {**STREAM, "content": f"is it {killed}?", "max_tokens": 600}
    other = LLAMA.start()
    with serving.closing(other):
        alone = _text(list(chat(other, **options).events()))
        front = serve([other, engines[0]])
        send(front, "/workers/1/drain", {}, ADMIN).json()
        reply = chat(front, **options)
        send(front, "/workers/1/undrain", {}, ADMIN).json()
        before = _computed(engines[0])
        events = []
        for event in reply.events():
            events.append(event)
            if len(events) == 200 and killed:
                other.kill()
            elif len(events) == 200:
                send(front, "/workers/0/drain", {}, ADMIN).json()
        assert _text(events) == alone
        assert _computed(engines[0]) - before > 200
        assert killed or "slot" in front.stop()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"engine": "llama.cpp", "slots": "nowhere"}, "expected the engines' --slot-save-path"),
        ({"slots": "."}, "engines that speak vllm have no slots"),
    ],
)
def test_invalid_folders(pool: dict[str, str], message: str, tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], pool=pool)
    with pytest.raises(HeadwayError, match=f"fleet.0..slots.*{message}"):
        composition.load(path)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [([5, 6, 7], [5, 6, 7]), ([-1, 1, 2, 8, 9, 0], [8, 9]), ([-1, 1], []), ([], []), ([5, -3], [])],
)
def test_tokens_of_saved_slots(values: list[int], tokens: list[int], tmp_path: Path) -> None:
    """In the format of older servers, of newer ones, and in no known format."""
    file = tmp_path / "slot"
    file.write_bytes(b"qsgg" + struct.pack("<II", 2, len(values)) + struct.pack(f"<{len(values)}i", *values) + b"kv")
    assert tokens_of(file) == tokens
    file.write_bytes(b"more" + file.read_bytes())
    assert tokens_of(file) == []


def _snapshot(folder: Path, age_s: float, name: str = "") -> Path:
    """A snapshot's file of this age."""
    file = folder / (name or f"headway-{uuid4().hex}")
    file.write_bytes(b"kv")
    os.utime(file, (time.time() - age_s, time.time() - age_s))
    return file


def test_a_gateway_deletes_the_snapshots_of_a_killed_one(tmp_path: Path) -> None:
    """Fresh files, locked files and files with other names stay."""
    folder = tmp_path / "slots"
    folder.mkdir()
    stale, fresh, held = _snapshot(folder, STALE_S + 60), _snapshot(folder, 5), _snapshot(folder, STALE_S + 60)
    others = [_snapshot(folder, 1e6, name) for name in ("headway-mine", "slot0", f"headway-{uuid4().hex}.bin")]
    pool = {"engine": "llama.cpp", "slots": str(folder)}
    front_file = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], pool=pool)
    with held.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)  # as a gateway does during a move
        front = serving.gateway(front_file)
        with serving.closing(front):
            until(lambda: not stale.exists())
            assert set(folder.iterdir()) == {fresh, held, *others}
            assert f"{stale.name} was left by a gateway that is gone" in front.stop()


def test_one_file_that_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one from the future is left over as well: the clock was set back since."""
    files = [_snapshot(tmp_path, age_s) for age_s in (STALE_S + 60, STALE_S + 60, -1e6)]
    unlink, refused = Path.unlink, []

    def refuse_one(file: Path, missing_ok: bool = False) -> None:
        if not refused or file in refused:
            refused.append(file)
            raise PermissionError(1, "not permitted")
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse_one)
    delete_stale({tmp_path})
    assert list(tmp_path.iterdir()) == refused and set(refused) < set(files)
    assert "cannot be removed" in caplog.text


def test_a_move_whose_target_fails_leaves_no_snapshot(tmp_path: Path) -> None:
    """The request moves again before the snapshot was restored."""

    async def story() -> None:
        server = SlotServer(tmp_path)
        request = chat_request(stream=True)
        relay, _, _ = relay_of(request, OrderedScheduler([engine(0, answering({}))]))
        source: Any = type("Here", (), {"name": "here", "kv_folder": tmp_path, "client": server})()
        assert relay.in_flight.reservation is not None
        relay.in_flight.reservation.slot = 0  # type: ignore[misc]
        for _ in range(3):
            await relay._save_kv(source)
        assert len(list(tmp_path.iterdir())) <= 1

    asyncio.run(story())


def test_stale_snapshots_are_deleted_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_snapshot, "STALE_S", 0.2)
    file = _snapshot(tmp_path, 0)

    async def story() -> None:
        kept = StaleSnapshots({tmp_path, tmp_path / "nowhere"}, Clock(asyncio.get_running_loop()))
        assert kept and file.exists()
        async with asyncio.timeout(serving.PATIENCE_S):
            while file.exists():
                await asyncio.sleep(0.01)

    asyncio.run(story())


class SlotServer:
    """Saves and restores slots of one token."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.restored: list[str] = []

    async def fetch(self, path: str, timeout_s: float, body: bytes = b"") -> tuple[int, bytes]:
        name = body.decode().partition('"filename":"')[2].partition('"')[0]
        if path.endswith("save"):
            (self._folder / name).write_bytes(b"qsgg" + struct.pack("<IIi", 2, 1, 7))
        elif path.endswith("restore"):
            self.restored.append(name)
        elif path == "/tokenize":
            return 200, b'{"tokens": [8]}' if b'"so"' in body else b'{"tokens": [8, 9]}'
        return 200, b'{"content": "so"}'


def test_a_snapshot_in_use_is_not_stale_however_old(tmp_path: Path) -> None:
    async def story() -> None:
        server = SlotServer(tmp_path)
        engine: Any = type("Here", (), {"name": "here", "kv_folder": tmp_path, "client": server})()
        snapshot = KvSnapshot()
        assert await snapshot.save(engine, 0, 1, "so") == [7]
        (file,) = tmp_path.iterdir()
        os.utime(file, (0, 0))
        delete_stale({tmp_path})
        assert file.exists()
        await snapshot.restore(engine, 0)
        assert server.restored == [file.name] and not list(tmp_path.iterdir())

    asyncio.run(story())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("seen_tokens", "last_text", "tokens"),
    [(1, "so", [7]), (2, "so", [7, 8]), (2, "and so", []), (3, "so", [])],
    ids=["whole", "the last token is not in the slot", "not one token", "two are missing"],
)
def test_a_slot_may_lack_the_token_that_was_streamed_last(
    seen_tokens: int, last_text: str, tokens: list[int], tmp_path: Path
) -> None:
    """llama.cpp streams a token one pass before its slot holds it."""
    engine: Any = type("Here", (), {"name": "here", "kv_folder": tmp_path, "client": SlotServer(tmp_path)})()

    async def story() -> None:
        snapshot = KvSnapshot()
        assert await snapshot.save(engine, 0, seen_tokens, last_text) == tokens
        await snapshot.delete()

    asyncio.run(story())
    assert not list(tmp_path.iterdir())
