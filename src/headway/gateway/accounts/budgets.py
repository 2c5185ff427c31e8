"""Budgets while a gateway runs: what is spent, reserved and left, and the exchange with the database.

A request reserves its prompt and `max_tokens` at its admission, and is charged with what it has used at its end. What
was used is written to the database every `refresh_s`, where it is added to what other gateways have written, and the
sums are read back in the same transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headway.gateway.accounts.store import Spent, StoredKey, Use
from headway.gateway.accounts.stores import account_store
from headway.gateway.database import UNAVAILABLE
from headway.gateway.errors import ApiError, line_of, logged
from headway.gateway.settings import KeyStoreSettings
from headway.limits.budgets import Account, Budget
from headway.limits.calendar import Today

log = logging.getLogger("headway.gateway")
_CLOSED_DAYS_S = 60.0
"""Time after which sums of days before today are read again: a gateway may have written late."""
_NOTHING = (0, 0.0)
QUOTA_CODE, UNAVAILABLE_CODE = "insufficient_quota", "key_store_unavailable"


class StoredAccount(Account):
    """One key's, or one team's, budget in the database. What is used here and not in the database yet is `used`."""

    def __init__(self, what: str, budget: Budget) -> None:
        """`what`: "key" or "team", for messages."""
        super().__init__(budget)
        self.what = what
        self.before_today = self.today = _NOTHING
        """What the database knows of this period: tokens and dollars."""

    def spent(self) -> tuple[int, float]:
        tokens = self.before_today[0] + self.today[0] + self.used_tokens
        return tokens, self.before_today[1] + self.today[1] + self.used_usd

    def check(self, tokens: int, usd: float, today: date) -> None:
        """ApiError (429) if the budget has no room for this."""
        lacked, budget = self.lacks(tokens, usd), self.budget
        if lacked:
            raise self._error(f"{budget.tokens:,} tokens" if lacked == "tokens" else f"${budget.usd:,.2f}", today)

    def _error(self, amount: str, today: date) -> ApiError:
        end = self.budget.end(today)
        again = "" if end is None else f"; the next period begins on {end.isoformat()} (UTC)"
        each = "in all" if end is None else f"a {self.budget.period}"
        retry_s = None if end is None else max(int((_midnight(end) - datetime.now(UTC)).total_seconds()), 1)
        message = f"the budget of this {self.what}, {amount} {each}, has no room for this request{again}"
        return ApiError(429, message, QUOTA_CODE, retry_after_s=retry_s, reason=f"{self.what}_budget")


def utc_today() -> Today:
    """The day in UTC. If it came twice, what a budget had spent the day before would count again."""
    return Today(lambda: datetime.now(UTC).date())


class Charge(Struct, frozen=True):
    """What a request has used of one model."""

    model: str
    input_tokens: int
    output_tokens: int
    usd: float


class BudgetHold:
    """A request's share of its accounts, from its admission to its end."""

    __slots__ = ("accounts", "owner", "team", "tokens", "usd")

    def __init__(self, owner: str, team: str, accounts: Sequence[Account], tokens: int, usd: float) -> None:
        self.owner, self.team, self.accounts, self.tokens, self.usd = owner, team, accounts, tokens, usd
        for account in accounts:
            account.reserve(tokens, usd)

    def raise_to(self, tokens: int, usd: float) -> None:
        """Hold so much, as the request has used it already."""
        more_tokens, more_usd = max(tokens - self.tokens, 0), max(usd - self.usd, 0.0)
        if more_tokens or more_usd:
            for account in self.accounts:
                account.reserve(more_tokens, more_usd)
            self.tokens, self.usd = self.tokens + more_tokens, self.usd + more_usd


class Accounts:
    """The accounts of one gateway's callers. Belongs to one event loop."""

    def __init__(
        self,
        settings: KeyStoreSettings,
        on_keys: Callable[[Sequence[StoredKey]], None],
        today: Callable[[], date] | None = None,
    ) -> None:
        """`on_keys` gets all keys of the database, first and after each change. `today`: by default `utc_today()`."""
        self._settings, self._on_keys, self._today = settings, on_keys, today or utc_today()
        self.store = account_store(settings.store)
        self._keys: dict[str, StoredKey] = {}
        self._key_accounts: dict[str, StoredAccount] = {}
        self._team_accounts: dict[str, StoredAccount] = {}
        self._uses: dict[tuple[str, str, str, str], Use] = {}
        """Not written yet, by key, team, day and model."""
        self._read_state: tuple[int, int] | None = None
        """Of the keys that were read last: how often the database was opened, and its number of changes. None: none
        were read."""
        self._closed: tuple[date, float] | None = None
        """For which day, and when, sums of the days before were read."""
        self._task: asyncio.Task[None] | None = None
        self.is_up = False
        """The last exchange with the database succeeded."""
        self.num_errors = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the spending since the last exchange, and close the key store."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(*UNAVAILABLE):
            await self.exchange()
        if self._uses:
            log.error("the key store cannot be used: the spending of %d keys since is lost", len(self._uses))
        with suppress(*UNAVAILABLE):
            await self.store.close()

    # Requests.

    def reserve(self, owner: str, tokens: int, usd: float) -> BudgetHold:
        """Reserve a request's tokens in its key's and team's budgets. ApiError if they have no room.

        A key that is not in the database has no budget, and what it uses is recorded.
        """
        key = self._keys.get(owner)
        if key is None:
            return BudgetHold(owner, "", (), tokens, usd)
        if not self.is_up and self._settings.on_failure == "refuse":
            raise unavailable()
        found = (self._key_accounts.get(owner), self._team_accounts.get(key.team))
        accounts = [account for account in found if account is not None]
        for account in accounts:
            account.check(tokens, usd, self._today())
        return BudgetHold(owner, key.team, accounts, tokens, usd)

    def give_back(self, hold: BudgetHold) -> None:
        for account in hold.accounts:
            account.reserve(-hold.tokens, -hold.usd)

    def settle(self, hold: BudgetHold, charges: Sequence[Charge]) -> None:
        """Charge the accounts with what the request has used, in place of its hold."""
        self.give_back(hold)
        day = self._today().isoformat()
        for i, charge in enumerate(charges):
            for account in hold.accounts:
                account.use(charge.input_tokens + charge.output_tokens, charge.usd)
            self._add(
                Use(
                    hold.owner,
                    hold.team,
                    day,
                    charge.model,
                    int(i == len(charges) - 1),
                    charge.input_tokens,
                    charge.output_tokens,
                    charge.usd,
                )
            )

    def _add(self, use: Use) -> None:
        key = use.sha256, use.team, use.day, use.model
        before = self._uses.get(key)
        if before is not None:
            names = ("requests", "input_tokens", "output_tokens", "usd")
            use = replace(use, **{name: getattr(use, name) + getattr(before, name) for name in names})
        self._uses[key] = use

    # The exchange.

    async def _run(self) -> None:
        while True:
            try:
                await self.exchange()
                if not self.is_up and self.num_errors:
                    log.warning("the key store is used again")
                self.is_up = True
            except UNAVAILABLE as error:
                self.num_errors += 1
                if self.is_up or self.num_errors == 1:
                    log.error("the key store cannot be used: %s", line_of(error))
                self.is_up = False
            except Exception:  # a defect must not stop later exchanges
                self.num_errors += 1
                self.is_up = False
                log.exception("the key store")
            await asyncio.sleep(self._settings.refresh_s)

    async def exchange(self) -> None:
        """Write what was used, and read keys, teams and what was spent by all gateways. One of `UNAVAILABLE` if the
        database cannot be used: then everything is kept for the next time."""
        await self.store.open()
        state = self.store.num_opened, await self.store.num_changes()
        has_changed = state != self._read_state
        if has_changed:
            await self._read_keys()
        today, loop = self._today(), asyncio.get_running_loop()
        await self._write(today)
        is_new_day = self._closed is None or self._closed[0] != today
        if has_changed or is_new_day or loop.time() - self._closed[1] > _CLOSED_DAYS_S:  # type: ignore[index]
            await self._read_closed(today)
            self._closed = today, loop.time()
        if has_changed:
            self._read_state = state
            with logged("the keys could not be used"):
                self._on_keys(list(self._keys.values()))

    async def _write(self, today: date) -> None:
        """Write what was used, and read what was spent today."""
        taken, self._uses = self._uses, {}
        pending = [(each, each.used_tokens, each.used_usd) for each in self._accounts()]
        try:
            by_key, by_team = await self.store.exchange(list(taken.values()), today.isoformat())
        except BaseException:
            for use in taken.values():
                self._add(use)
            raise
        for account, tokens, usd in pending:
            account.use(-tokens, -usd)
        _assign(self._key_accounts, by_key, "today")
        _assign(self._team_accounts, by_team, "today")

    def _accounts(self) -> list[StoredAccount]:
        return [*self._key_accounts.values(), *self._team_accounts.values()]

    async def _read_keys(self) -> None:
        keys, teams = await self.store.keys(), await self.store.teams()
        self._keys = {key.sha256: key for key in keys}
        budgets = {key.sha256: key.budget for key in keys}
        self._key_accounts = _updated(self._key_accounts, "key", budgets)
        self._team_accounts = _updated(self._team_accounts, "team", teams)

    async def _read_closed(self, today: date) -> None:
        """Read what was spent in each period before this day."""
        for start in {account.budget.start(today) for account in self._accounts()}:
            by_key, by_team = await self.store.spent(start.isoformat(), today.isoformat())
            for accounts, spent in ((self._key_accounts, by_key), (self._team_accounts, by_team)):
                same = {name: each for name, each in accounts.items() if each.budget.start(today) == start}
                _assign(same, spent, "before_today")


def _assign(accounts: dict[str, StoredAccount], spent: Spent, attribute: str) -> None:
    for name, account in accounts.items():
        setattr(account, attribute, spent.get(name, _NOTHING))


def _updated(accounts: dict[str, StoredAccount], what: str, budgets: dict[str, Budget]) -> dict[str, StoredAccount]:
    """Accounts for those that have a budget; those that had one keep what is reserved and pending."""
    found: dict[str, Any] = {}
    for name, budget in budgets.items():
        if budget:
            found[name] = accounts.get(name) or StoredAccount(what, budget)
            found[name].budget = budget
    return found


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def unavailable() -> ApiError:
    """The error of a request whose key cannot be checked."""
    return ApiError(503, "the key store cannot be used", UNAVAILABLE_CODE, retry_after_s=2, reason="key_store")
