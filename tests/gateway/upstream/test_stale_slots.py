"""Files that gateways leave in the middle of a move: nobody's are removed, and those of others stay."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import serving
from serving import until

pytest.importorskip("httptools")
from headway.gateway.clock import Clock
from headway.gateway.upstream import kv_snapshot
from headway.gateway.upstream.kv_snapshot import STALE_S, KvSnapshot, delete_stale


def _left(folder: Path, age_s: float, name: str = "") -> Path:
    """A file that was written so long ago."""
    file = folder / (name or f"headway-{uuid4().hex}")
    file.write_bytes(b"kv")
    os.utime(file, (time.time() - age_s, time.time() - age_s))
    return file


def test_a_gateway_removes_what_one_that_was_killed_has_left(tmp_path: Path) -> None:
    """And nothing that is fresh, held by another gateway, or not called as gateways call them."""
    folder = tmp_path / "slots"
    folder.mkdir()
    left, fresh, held = _left(folder, STALE_S + 60), _left(folder, 5), _left(folder, STALE_S + 60)
    others = [_left(folder, 1e6, name) for name in ("headway-mine", "slot0", f"headway-{uuid4().hex}.bin")]
    pool = {"engine": "llama.cpp", "slots": str(folder)}
    front_file = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], pool=pool)
    with held.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)  # as the gateway that is moving it has it
        front = serving.gateway(front_file)
        with serving.closing(front):
            until(lambda: not left.exists())
            assert set(folder.iterdir()) == {fresh, held, *others}
            assert f"{left.name} was left by a gateway that is gone" in front.stop()


def test_what_was_fresh_at_the_start_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_snapshot, "STALE_S", 0.2)
    file = _left(tmp_path, 0)

    async def story() -> None:
        delete_stale({tmp_path, tmp_path / "nowhere"}, Clock(asyncio.get_running_loop()))
        assert file.exists()
        async with asyncio.timeout(serving.PATIENCE_S):
            while file.exists():
                await asyncio.sleep(0.01)

    asyncio.run(story())


class Server:
    """Saves and restores slots, one token long."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.restored: list[str] = []

    async def fetch(self, path: str, timeout_s: float, body: bytes = b"") -> tuple[int, bytes]:
        name = body.decode().partition('"filename":"')[2].partition('"')[0]
        if path.endswith("save"):
            (self._folder / name).write_bytes(b"qsgg" + struct.pack("<IIi", 2, 1, 7))
        elif path.endswith("restore"):
            self.restored.append(name)
        return 200, b'{"content": "so"}'


def test_what_a_gateway_is_moving_is_no_other_s_to_remove_however_long_it_takes(tmp_path: Path) -> None:
    async def story() -> None:
        server, clock = Server(tmp_path), Clock(asyncio.get_running_loop())
        engine: Any = type("Here", (), {"name": "here", "kv_folder": tmp_path, "client": server})()
        snapshot = KvSnapshot()
        assert await snapshot.save(engine, 0, 1, "so") == [7]
        (file,) = tmp_path.iterdir()
        os.utime(file, (0, 0))
        delete_stale({tmp_path}, clock)
        assert file.exists()
        await snapshot.restore(engine, 0)
        assert server.restored == [file.name] and not list(tmp_path.iterdir())

    asyncio.run(story())
