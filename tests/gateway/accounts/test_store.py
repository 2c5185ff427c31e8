"""The database of keys: what is written is read back, sums are exact, and mistakes are named."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import date, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("sqlalchemy")

from headway.core.errors import HeadwayError
from headway.gateway.accounts.store import AccountStore, StoredKey, Use
from headway.gateway.accounts.stores import account_store
from headway.gateway.database import UNAVAILABLE, Database
from headway.limits.budgets import Budget
from keys import digest


def run(location: str, work: Callable[[AccountStore], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        store = account_store(location)
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(within())


def key(name: str, **properties: Any) -> StoredKey:
    return StoredKey(digest(name), name, **{"team": "", "budget": Budget(), "created_ns": 5, **properties})


def test_keys_and_teams_are_read_as_they_were_written(location: str) -> None:
    full = key(
        "full",
        team="readers",
        budget=Budget(10**12, 2.5, "week"),
        weight=3.0,
        tier=2,
        requests_per_minute=10.0,
        tokens_per_minute=1e6,
        expires=date(2031, 1, 2),
    )

    async def work(store: AccountStore) -> None:
        changes = [await store.num_changes()]
        for change in (
            store.set_team("readers", Budget(100, None, "day")),
            store.add_key(full),
            store.add_key(key("bare", created_ns=6)),
        ):
            await change
            changes.append(await store.num_changes())
        assert changes == sorted(set(changes))
        assert await store.keys() == [full, key("bare", created_ns=6)]
        assert await store.teams() == {"readers": Budget(100, None, "day")}
        await store.set_team("readers", Budget(None, 9.0))
        assert await store.teams() == {"readers": Budget(None, 9.0)}
        revoked = replace(full, revoked_ns=9)
        await store.change_key(revoked)
        assert await store.keys() == [key("bare", created_ns=6)]
        assert await store.find(full.id) == revoked and (await store.find("bare")).name == "bare"
        with pytest.raises(HeadwayError, match="unknown key 'bear'; did you mean 'bare'"):
            await store.find("bear")
        with pytest.raises(HeadwayError, match="already"):
            await store.add_key(key("bare"))
        with pytest.raises(HeadwayError, match="unknown team 'writers'"):
            await store.add_key(key("new", team="writers"))

    run(location, work)


def test_what_several_gateways_use_is_added(location: str) -> None:
    """Each writes at the same time as the others, in transactions of many rows."""

    def uses(i: int) -> list[Use]:
        return [Use(f"k{k}", "t", "2026-01-05", f"m{m}", 1, 10, i, 0.5) for k in range(5) for m in range(3)]

    async def work(store: AccountStore) -> None:
        others = [account_store(location) for _ in range(3)]
        await asyncio.gather(*(each.exchange(uses(i), "2026-01-05") for i, each in enumerate([store, *others] * 3)))
        for other in others:
            await other.close()
        by_key, by_team = await store.exchange([], "2026-01-05")
        tokens = 3 * sum(10 + i for i in range(12))
        assert by_key["k4"] == (tokens, pytest.approx(18.0)) and by_team["t"] == (5 * tokens, pytest.approx(90.0))
        assert await store.spent("2026-01-06", "2026-02-01") == ({}, {})
        rows = await store.report(["team", "day"], "2026-01-01", "2026-01-31")
        assert [(row["requests"], row["input_tokens"]) for row in rows] == [(180, 1800)]
        assert len(await store.report(["key", "model"], "2026-01-05", "2026-01-05")) == 15
        (total,) = await store.report([], "2026-03-01", "2026-03-31")
        assert (total["requests"], total["usd"]) == (0, 0.0)

    run(location, work)


def test_a_key_is_replaced_and_its_successor_is_new(location: str) -> None:
    async def work(store: AccountStore) -> None:
        old, new = key("old", created_ns=7), key("successor", created_ns=8)
        await store.add_key(old)
        leaving = replace(old, expires=date(2031, 1, 2))
        await store.replace_key(leaving, new)
        assert [await store.find(each.id) for each in (old, new)] == [leaving, new]
        await store.change_key(key("never added"))
        with pytest.raises(HeadwayError, match="unknown key"):
            await store.find("never added")

    run(location, work)


def test_what_is_spent_in_a_period_is_the_sum_of_its_days(location: str) -> None:
    """Whole months and single days, in any combination, by the same days that a report adds up."""
    first = date(2025, 11, 20)
    days = [(first + timedelta(days=7 * i)).isoformat() for i in range(30)]
    ends = [date.min.isoformat(), "2025-12-01", "2025-12-04", "2026-01-01", "2026-02-28", "2026-03-01", "2026-06-09"]

    async def work(store: AccountStore) -> None:
        uses = [Use("summed", "sum", day, f"m{i % 2}", 1, 2**i, 3, 0.25 * i) for i, day in enumerate(days)]
        await store.exchange(uses, days[-1])
        for since, before in combinations(ends, 2):
            by_key, by_team = await store.spent(since, before)
            inside = [use for use in uses if since <= use.day < before]
            tokens, usd = sum(use.input_tokens + 3 for use in inside), sum(use.usd for use in inside)
            expected = (tokens, pytest.approx(usd)) if inside else (0, 0.0)
            assert by_key.get("summed", (0, 0.0)) == by_team.get("sum", (0, 0.0)) == expected
        rows = await store.report(["model", "key"], days[3], days[8])
        assert [(row["model"], row["requests"]) for row in rows if row["key"] == "summed"] == [("m0", 3), ("m1", 3)]
        by_key, _ = await store.exchange([], days[-1])
        assert by_key["summed"] == (2**29 + 3, pytest.approx(0.25 * 29))

    run(location, work)


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        ("day", date(2026, 12, 31), date(2027, 1, 1)),
        ("week", date(2026, 12, 28), date(2027, 1, 4)),
        ("month", date(2026, 12, 1), date(2027, 1, 1)),
        ("total", date.min, None),
    ],
)
def test_periods_are_those_of_the_calendar(period: Any, start: date, end: date | None) -> None:
    budget = Budget(1, None, period)
    assert (budget.start(date(2026, 12, 31)), budget.end(date(2026, 12, 31))) == (start, end)


def _replaced(path: Path, backup: Path) -> None:
    os.replace(backup, path)


def _overwritten(path: Path, backup: Path) -> None:
    path.write_bytes(backup.read_bytes())


def _deleted_and_copied(path: Path, backup: Path) -> None:
    path.unlink()
    shutil.copy(backup, path)


def _names(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as database:
        return [name for (name,) in database.execute("SELECT name FROM headway_keys ORDER BY name")]


@pytest.mark.parametrize("restore", [_replaced, _overwritten, _deleted_and_copied])
def test_a_backup_in_the_files_place_is_what_is_read_and_written(
    file: str, tmp_path: Path, restore: Callable[[Path, Path], None]
) -> None:
    """And nothing of the write-ahead log of the database that it replaces."""
    backup = tmp_path / "backup.sqlite"

    async def work(store: AccountStore) -> None:
        await store.add_key(key("kept"))
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as copy:
            source.backup(copy)
        for i in range(3):
            await store.add_key(key(f"lost {i}"))
        await store.open()
        restore(Path(file), backup)
        await store.open()
        assert [each.name for each in await store.keys()] == ["kept"]
        await store.add_key(key("new"))
        assert store.num_opened == 2

    run(file, work)
    assert _names(Path(file)) == ["kept", "new"]


def test_no_connection_is_left_open_where_the_file_changes_during_a_transaction(file: str) -> None:
    """As another gateway's checkpoint changes it, or a backup in its place."""

    async def work(store: AccountStore) -> None:
        assert isinstance(store, Database)
        async with store.begin():
            os.utime(file)
            opening = asyncio.create_task(store.open())
            await asyncio.sleep(0.1)
        await opening
        await store.add_key(key("later"))
        assert [each.name for each in await store.keys()] == ["later"]

    run(file, work)
    gc.collect()  # a connection that was not closed warns, which is an error here


def test_a_file_that_is_moved_away_is_complete_and_can_come_back(file: str, tmp_path: Path) -> None:
    away = tmp_path / "away.sqlite"

    async def work(store: AccountStore) -> None:
        await store.add_key(key("first"))
        os.rename(file, away)
        with pytest.raises(UNAVAILABLE):  # no empty database is made in its place
            await store.open()
        assert not Path(file).exists()
        Path(file).touch()
        await store.open()
        assert await store.keys() == [] and _names(away) == ["first"]
        os.replace(away, file)
        await store.open()
        assert [each.name for each in await store.keys()] == ["first"]

    run(file, work)
