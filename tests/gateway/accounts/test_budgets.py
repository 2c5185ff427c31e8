"""Budgets in one process: reserved, charged, exchanged with the database, and kept while that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from headway.gateway.accounts.budgets import Accounts, Charge
from headway.gateway.accounts.store import StoredKey
from headway.gateway.accounts.stores import account_store
from headway.gateway.database import UNAVAILABLE
from headway.gateway.errors import ApiError
from headway.gateway.settings import KeyStoreSettings
from headway.limits.budgets import Budget
from keys import Place

DAY = date(2026, 11, 22)


class Clock:
    today = DAY


def run(
    location: str, keys: dict[str, tuple[str, Budget]], work: Callable[..., Awaitable[Any]], **settings: Any
) -> None:
    """`work(accounts, clock)` with a database of these keys, by name their team and budget."""

    async def within() -> None:
        store, clock = account_store(location), Clock()
        await store.open()
        for team in {team for team, _ in keys.values() if team}:
            await store.set_team(team, Budget(1000, None, "week"))
        for name, (team, budget) in keys.items():
            await store.add_key(StoredKey(name, name, team, budget))
        accounts = Accounts(KeyStoreSettings(store=location, **settings), lambda keys: None, lambda: clock.today)
        await accounts.exchange()
        accounts.is_up = True
        try:
            await work(accounts, clock)
        finally:
            await accounts.stop()
            await store.close()

    asyncio.run(within())


def code(accounts: Accounts, key: str, tokens: int, usd: float = 0.0) -> str:
    """ "" if a request may begin, which then holds its tokens; else the reason against it."""
    try:
        accounts.reserve(key, tokens, usd)
    except ApiError as error:
        assert error.status == 429 and error.type == error.code == "insufficient_quota" and error.retry_after_s
        return error.reason
    return ""


def test_what_is_in_flight_counts_and_what_is_not_used_comes_back(place: Place) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        first = accounts.reserve("a", 60, 0.0)
        assert code(accounts, "a", 50) == "key_budget"
        accounts.settle(first, [Charge("m", 5, 5, 0.0)])
        await accounts.exchange()
        second = accounts.reserve("a", 90, 0.0)
        assert code(accounts, "a", 1) == "key_budget"
        accounts.give_back(second)
        assert code(accounts, "a", 90) == ""

    run(place.location, {"a": ("", Budget(100, None, "day"))}, work)


def test_dollars_are_a_budget_too(place: Place) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        hold = accounts.reserve("a", 10, 0.9)
        assert code(accounts, "a", 10, 0.2) == "key_budget"
        accounts.settle(hold, [Charge("small", 3, 3, 0.1), Charge("large", 3, 3, 0.9)])  # more than was reserved
        assert code(accounts, "a", 10) == "key_budget"  # even if free: all is spent
        await accounts.exchange()
        (row,) = await accounts.store.report(["key"], DAY.isoformat(), DAY.isoformat())
        assert (row["requests"], row["input_tokens"], row["usd"]) == (1, 6, pytest.approx(1.0))

    run(place.location, {"a": ("", Budget(None, 1.0, "month"))}, work)


def test_a_team_shares_its_budget_and_periods_begin_anew(place: Place) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        accounts.settle(accounts.reserve("a", 600, 0.0), [Charge("m", 600, 0, 0.0)])
        assert code(accounts, "b", 500) == "team_budget"
        await accounts.exchange()
        assert code(accounts, "b", 500) == "team_budget" and code(accounts, "a", 500) == "team_budget"
        clock.today = date(2026, 11, 23)  # a Monday
        await accounts.exchange()
        assert code(accounts, "b", 500) == ""

    run(place.location, {"a": ("ml", Budget()), "b": ("ml", Budget())}, work)


def test_days_of_a_period_add_up(place: Place) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        for day in range(16, 20):
            clock.today = date(2026, 11, day)
            accounts.settle(accounts.reserve("a", 20, 0.0), [Charge("m", 20, 0, 0.0)])
        clock.today = date(2026, 11, 20)
        await accounts.exchange()
        assert code(accounts, "a", 21) == "key_budget" and code(accounts, "a", 20) == ""

    run(place.location, {"a": ("", Budget(100, None, "week"))}, work)


def test_what_another_gateway_spends_counts_after_an_exchange(place: Place) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        other = Accounts(KeyStoreSettings(store=place.location), lambda keys: None, lambda: clock.today)
        await other.exchange()
        other.is_up = True
        other.settle(other.reserve("a", 90, 0.0), [Charge("m", 90, 0, 0.0)])
        hold = accounts.reserve("a", 90, 0.0)  # nobody knows yet: that is the overshoot
        await other.exchange()
        await accounts.exchange()
        assert code(accounts, "a", 1) == "key_budget"
        accounts.settle(hold, [Charge("m", 1, 0, 0.0)])
        await accounts.exchange()
        await other.exchange()
        assert code(other, "a", 9) == "" and code(accounts, "a", 10) == "key_budget"
        await other.stop()

    run(place.location, {"a": ("", Budget(100, None, "day"))}, work)


@pytest.mark.parametrize("on_failure", ["serve", "refuse"])
def test_a_database_that_is_away_loses_nothing(place: Place, on_failure: str) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        hold = accounts.reserve("a", 50, 0.0)
        if "://" not in place.location:
            await accounts.store.close()
        with place.away():
            with pytest.raises(UNAVAILABLE):
                await accounts.exchange()
            accounts.is_up = False
            accounts.settle(hold, [Charge("m", 50, 0, 0.0)])
            accounts.settle(accounts.reserve("other", 5, 0.0), [Charge("m", 5, 0, 0.0)])  # a key of the fleet file
            if on_failure == "serve":
                assert code(accounts, "a", 51) == "key_budget" and code(accounts, "a", 50) == ""
            else:
                with pytest.raises(ApiError, match="cannot be used") as error:
                    accounts.reserve("a", 1, 0.0)
                assert (error.value.status, error.value.code) == (503, "key_store_unavailable")
        await accounts.exchange()
        rows = await accounts.store.report(["key"], DAY.isoformat(), DAY.isoformat())
        assert {row["key"]: row["input_tokens"] for row in rows} == {"a": 50, "other": 5}

    run(place.location, {"a": ("", Budget(100, None, "day"))}, work, on_failure=on_failure)


def test_a_changed_budget_holds_at_once_and_keeps_what_is_reserved(place: Place) -> None:
    async def work(accounts: Accounts, clock: Clock) -> None:
        hold = accounts.reserve("a", 50, 0.0)
        key = await accounts.store.find("a")
        await accounts.store.change_key(StoredKey(key.sha256, key.name, "", Budget(60, None, "day")))
        await accounts.exchange()
        assert code(accounts, "a", 11) == "key_budget" and code(accounts, "a", 10) == ""
        accounts.settle(hold, [Charge("m", 0, 0, 0.0)])
        assert code(accounts, "a", 50) == ""

    run(place.location, {"a": ("", Budget(100, None, "day"))}, work)


def test_an_error_without_words_ends_no_later_exchange(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a server takes connections and does not answer."""

    async def work(accounts: Accounts, clock: Clock) -> None:
        errors = [TimeoutError(), TimeoutError()]
        opened = accounts.store.open

        async def open() -> None:
            if errors:
                raise errors.pop()
            await opened()

        monkeypatch.setattr(accounts.store, "open", open)
        accounts.is_up = False
        accounts.start()
        while not accounts.is_up:
            assert accounts._task is not None and not accounts._task.done()
            await asyncio.sleep(0.001)
        assert accounts.num_errors == 2

    run(file, {}, work, refresh_s=0.001)
