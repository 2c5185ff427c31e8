"""Files and databases that hang: the event loop, and so all streams, goes on meanwhile."""

from __future__ import annotations

import asyncio
import builtins
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving as processes
from headway.gateway.clock import Clock
from headway.gateway.gateway import Gateway
from headway.gateway.reload import Reloader
from headway.gateway.telemetry.recording import Recording
from headway.serving.reload import FleetFile

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
from headway.gateway.accounts.stores import account_store
from headway.gateway.batch.store import BatchStore
from headway.gateway.blocking import in_thread
from headway.gateway.upstream.client import TcpTransport
from headway.gateway.upstream.kv_snapshot import KvSnapshot, StaleSnapshots

POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://127.0.0.1:1"]}
_GIVEN_UP_S = 10.0
"""Time after which a call that blocks the loop itself, which could not end it, returns."""


class Hanging:
    """A function that hangs until `go`; `took_loop` if it was called where nobody could end it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.called, self.go = threading.Event(), threading.Event()
        self.took_loop = False

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        return lambda *arguments, **named: self(*([] if owner is None else [owner]), *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.called.set()
        try:
            asyncio.get_running_loop()
            self.took_loop = True
        except RuntimeError:
            self.took_loop |= not self.go.wait(_GIVEN_UP_S)
        return self._function(*arguments, **named)


async def _turns_until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(processes.PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.001)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [POOL]}))
    return path


def test_a_fleet_file_that_hangs_is_read_once_it_answers(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the look at it every few seconds nor a reload that is asked for takes the loop, or a second thread."""

    async def story() -> None:
        file = FleetFile(fleet, lambda read: read)
        gateway = Gateway(file.plan, Recording(enabled=False))
        reloader = Reloader(gateway, file.read_again, file.signature, poll_s=0.01, read_s=0.05)
        hanging = Hanging(Path.read_text)
        monkeypatch.setattr(Path, "read_text", hanging)
        reloader.start()
        threads = threading.active_count()
        await _turns_until(hanging.called.is_set)
        reload = await reloader.reload("request")
        assert reload.outcome == "failed" and "not read within 0.05 s" in reload.error
        assert threading.active_count() <= threads + 1
        reloader._read_s = processes.PATIENCE_S
        monkeypatch.undo()
        fleet.write_text(yaml.safe_dump({"fleet": [POOL], "gateway": {"timeout_s": 9}}))
        hanging.go.set()
        await _turns_until(lambda: gateway.settings.timeout_s == 9)
        reloader.close()
        assert not hanging.took_loop

    asyncio.run(story())


class Slots:
    """A llama.cpp server that saves slots, with its folder."""

    name = "slots"

    def __init__(self, folder: Path) -> None:
        self.kv_folder, self.client = folder, self

    async def fetch(self, path: str, timeout_s: float, body: bytes = b"") -> tuple[int, bytes]:
        name = body.decode().partition('"filename":"')[2].partition('"')[0]
        await in_thread((self.kv_folder / name).write_bytes, b"qsgg" + bytes(8))
        return 200, b"{}"


async def _opens_key_store(folder: Path) -> None:
    store = account_store(str(folder / "keys.sqlite"))
    for _ in range(2):
        await store.open()
    await store.close()


async def _runs_batches(folder: Path) -> None:
    store = BatchStore(str(folder / "batches.sqlite"))
    await store.open()
    assert await store.acquire_lock()
    await store.close()


async def _saves_and_restores_a_slot(folder: Path) -> None:
    engine: Any = Slots(folder)
    snapshot = KvSnapshot()
    await snapshot.save(engine, 0, 1, "so")
    await snapshot.delete()


async def _deletes_stale_snapshots(folder: Path) -> None:
    await in_thread((folder / "headway-0123456789abcdef0123456789abcdef").touch)
    stale = StaleSnapshots({folder}, Clock(asyncio.get_running_loop()))
    assert stale._deleting is not None
    await stale._deleting


@pytest.mark.parametrize(
    "work", [_opens_key_store, _runs_batches, _saves_and_restores_a_slot, _deletes_stale_snapshots]
)
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Path, "open"), (Path, "stat"), (Path, "unlink"), (Path, "iterdir"), (os, "open"), (builtins, "open")],
)
def test_no_call_of_a_file_takes_the_loop(
    work: Callable[[Path], Awaitable[None]], owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them hangs, until a turn of the loop lets it go on."""

    async def story() -> None:
        hanging = Hanging(getattr(owner, name))
        monkeypatch.setattr(owner, name, hanging)
        working = asyncio.ensure_future(work(tmp_path))
        await _turns_until(lambda: hanging.called.is_set() or working.done())
        hanging.go.set()
        await working
        monkeypatch.undo()
        assert not hanging.took_loop

    asyncio.run(story())


def test_a_look_up_of_a_name_that_hangs_takes_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hanging = Hanging(socket.getaddrinfo)
        monkeypatch.setattr(socket, "getaddrinfo", hanging)
        connecting = asyncio.ensure_future(TcpTransport("localhost", 1).connect())
        await _turns_until(hanging.called.is_set)
        hanging.go.set()
        with pytest.raises(OSError):
            await connecting
        monkeypatch.undo()
        assert not hanging.took_loop

    asyncio.run(story())
