"""A wall clock that jumps, forth and back: no batch ends, no budget counts twice, and nothing else looks at it."""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headway
import serving

pytest.importorskip("httptools")
pytest.importorskip("aiosqlite")

from gateway_in_process import Inside
from headway.gateway.accounts.budgets import Accounts, Charge
from headway.gateway.accounts.store import StoredKey
from headway.gateway.accounts.stores import account_store
from headway.gateway.batch import queue
from headway.gateway.batch.queue import Line
from headway.gateway.batch.service import BatchService
from headway.gateway.errors import ApiError
from headway.gateway.settings import Batches, KeyStoreSettings, Settings
from headway.limits.budgets import Budget
from headway.limits.calendar import Today
from scripted import GatedEngine

HOUR_S = 3600.0
_READS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("date", "today"), ("datetime", "utcnow")}
MAY_READ = {
    "gateway/accounts/budgets.py": "the day of a budget, by `Today`; Retry-After",
    "gateway/accounts/store.py": "stamp: when a key was made",
    "gateway/auth/keys.py": "the last day of a key",
    "gateway/batch/files.py": "stamp: when a file was made",
    "gateway/batch/queue.py": "stamps, and until when a new batch is to be done",
    "gateway/batch/service.py": "how long a batch has left, at the first look at it",
    "gateway/fleet/lease.py": "stamp; who holds it is decided by the monotonic clock",
    "gateway/fleet/scaling.py": "the time of day of scheduled minimums, anew at each tick",
    "gateway/run_telemetry.py": "stamp: the begin of the decision log",
    "gateway/kv_events/chat_template.py": "the date that templates write into prompts",
    "gateway/metrics_page.py": "stamps of exemplars",
    "gateway/peers/peers.py": "a number of the run",
    "gateway/relay/tracing.py": "stamps of spans",
    "gateway/reload.py": "stamp: when the file was read",
    "gateway/server/access_log.py": "stamp of a line",
    "gateway/server/dashboard.py": "stamp of the page",
    "gateway/telemetry/drift.py": "stamp: since when an engine is slower than its profile",
    "gateway/telemetry/recording.py": "stamp: the begin of a run",
    "gateway/upstream/kv_snapshot.py": "the age of files that killed gateways left, and that nobody has locked",
    "serving/autopilot.py": "the time of day, and when a change began",
    "serving/shadow_comparison.py": "stamp of a line",
    "serving/demand_history.py": "until when demand is read, once at the start",
}


def _reads(file: Path) -> bool:
    """Whether code of this file reads the wall clock."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for each in node.names
        if each.name in ("time", "time_ns")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in _READS:
                return True
        elif isinstance(node, ast.Name) and node.id in imported:
            return True
    return False


@pytest.mark.ci
def test_the_wall_clock_is_read_for_stamps_and_days_only() -> None:
    root = Path(headway.__file__).parent
    folders = ("gateway", "serving", "control", "policies", "limits", "core", "records")
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    assert {file.relative_to(root).as_posix() for file in files if _reads(file)} == set(MAY_READ)


class Wall:
    """A wall clock that somebody sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset_s, self._time = 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: self._time() + self.offset_s)


class Endless:
    """A relay whose engine does not answer."""

    in_flight: Any = None

    async def run(self) -> None:
        await asyncio.Event().wait()


def test_batches_go_on_when_the_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And expire when their time is over, whatever the clock says by then."""
    wall, left_s = Wall(monkeypatch), []

    def relay(request: Any, caller: Any, answer: Any, id: str, seconds: float) -> Any:
        left_s.append(seconds)
        return Endless()

    async def story() -> None:
        settings = Settings(batches=Batches(store=str(tmp_path / "batches.sqlite")))
        caller: Any = type("Caller", (), {"tier": 0})()
        service = BatchService(settings, relay, lambda in_flight: None, lambda owner: caller)
        store = service.store
        await store.open()
        batch = await queue.create_batch(store, "me", "file", "/v1/chat/completions", "30m", 1800, None)
        body = b'{"model": "m", "messages": []}'
        await queue.add_lines(store, [Line(batch.id, i, f"{i}", body) for i in (1, 2)])
        await queue.start_batch(store, batch.id, 2)

        async def status() -> str:
            await service._pass()
            found = await queue.find_batch(store, "me", batch.id)
            assert found is not None
            return found.status

        assert await status() == "in_progress"
        for offset_s in (HOUR_S, -HOUR_S, 0.0):
            wall.offset_s = offset_s
            assert await status() == "in_progress"
        while len(left_s) < 2:
            await asyncio.sleep(0)
        assert all(0 < each <= 1800 for each in left_s)
        wall.offset_s = -HOUR_S
        passed = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: passed() + 1800)
        assert await status() == "expired"
        await service._drop_lines()
        await store.close()

    asyncio.run(story())


def _with_clock(file: Path, work: Callable[[Accounts, Callable[[datetime], None]], Awaitable[None]]) -> None:
    """`work(accounts, set)` with a key `a` of 100 tokens a day; `set` sets the wall clock."""

    async def story() -> None:
        store, now = account_store(str(file)), [datetime(2026, 11, 27, 12, tzinfo=UTC)]
        await store.open()
        await store.add_key(StoredKey("a", "a", "", Budget(100, None, "day")))
        accounts = Accounts(KeyStoreSettings(store=str(file)), lambda keys: None, Today(lambda: now[0].date()))
        await accounts.exchange()
        accounts.is_up = True
        await work(accounts, lambda time: now.__setitem__(0, time))
        await accounts.stop()
        await store.close()

    asyncio.run(story())


def _has_room(accounts: Accounts, tokens: int) -> bool:
    try:
        accounts.give_back(accounts.reserve("a", tokens, 0.0))
    except ApiError:
        return False
    return True


def test_what_was_spent_yesterday_does_not_count_again(tmp_path: Path) -> None:
    async def work(accounts: Accounts, set_clock: Callable[[datetime], None]) -> None:
        accounts.settle(accounts.reserve("a", 90, 0.0), [Charge("m", 90, 0, 0.0)])
        await accounts.exchange()
        midnight = datetime(2026, 11, 28, tzinfo=UTC)
        for minutes in (10, -50, 20, -40, 30):
            set_clock(midnight + timedelta(minutes=minutes))
            await accounts.exchange()
            assert _has_room(accounts, 95)
        set_clock(midnight + timedelta(minutes=-30))
        accounts.settle(accounts.reserve("a", 60, 0.0), [Charge("m", 60, 0, 0.0)])
        for minutes in (-20, 40):
            set_clock(midnight + timedelta(minutes=minutes))
            await accounts.exchange()
            assert _has_room(accounts, 40) and not _has_room(accounts, 41)

    _with_clock(tmp_path / "keys.sqlite", work)


def test_a_clock_that_was_days_ahead_is_followed_back() -> None:
    days = iter([date(2026, 11, 27), date(2027, 1, 1), date(2026, 11, 27), date(2026, 11, 28), date(2026, 11, 27)])
    today = Today(lambda: next(days))
    assert [today().isoformat() for _ in range(5)] == [
        "2026-11-27",
        "2027-01-01",
        "2026-11-27",
        "2026-11-28",
        "2026-11-28",
    ]


def test_streams_and_held_requests_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one engine's window a stream takes all; the next request is held until it ends."""
    wall, engine = Wall(monkeypatch), GatedEngine()
    policies = {"ordering": "fcfs", "ordering_at": "gateway", "window": 1}
    gateway = {"hold_s": 30.0, "timeout_s": 30.0, "limits": {"silence_s": 30.0}}

    def write(folder: Path, urls: Sequence[str], **sections: Any) -> Path:
        return serving.fleet_file(folder, [engine.url], **sections)

    inside = Inside(tmp_path, num_engines=1, write=write, policies=policies, gateway=gateway)

    async def story() -> list[Any]:
        body = {"model": serving.MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True}
        asked = [asyncio.create_task(inside.post(body)) for _ in range(2)]
        await inside.until(lambda: len(inside.gateway.driver.requests) == 2)
        for offset_s in (HOUR_S, -HOUR_S, 0.0):
            wall.offset_s = offset_s
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in asked)
        engine.gate.set()
        return await asyncio.gather(*asked)

    try:
        for reply in inside.run(story()):
            assert reply.status == 200 and [e if e == "[DONE]" else "so" for e in reply.events()] == [
                "so",
                "so",
                "[DONE]",
            ]
    finally:
        engine.close()
        inside.close()
