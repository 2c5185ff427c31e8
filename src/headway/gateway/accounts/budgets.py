"""Budgets in a running gateway: spent, reserved and free amounts, and the exchange with the database.

A request reserves its prompt and `max_tokens` at its admission, and is charged for its use at its end. Every
`refresh_s` one transaction adds the use to the database, beside the use of other gateways, and reads the sums back.
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
"""Time after which the sums of days before today are read again, because a gateway may have written late."""
_NOTHING = (0, 0.0)
QUOTA_CODE, UNAVAILABLE_CODE = "insufficient_quota", "key_store_unavailable"


class StoredAccount(Account):
    """The budget of one key or one team in the database. The inherited `used` counts only the use that is not in the
    database yet."""

    def __init__(self, what: str, budget: Budget) -> None:
        """`what`: "key" or "team", for messages."""
        super().__init__(budget)
        self.what = what
        self.before_today = self.today = _NOTHING
        """Tokens and dollars of this period in the database."""

    def spent(self) -> tuple[int, float]:
        tokens = self.before_today[0] + self.today[0] + self.used_tokens
        return tokens, self.before_today[1] + self.today[1] + self.used_usd

    def check(self, tokens: int, usd: float, today: date) -> None:
        """Raise ApiError (429) if the budget has no room for this use."""
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
    """The current day in UTC. A clock set back past midnight does not repeat a day, so no use is charged twice."""
    return Today(lambda: datetime.now(UTC).date())


class Charge(Struct, frozen=True):
    """One request's use of one model."""

    model: str
    input_tokens: int
    output_tokens: int
    usd: float


class BudgetHold:
    """A request's reservation in the budgets of its key and team, from its admission to its end."""

    __slots__ = ("accounts", "owner", "team", "tokens", "usd")

    def __init__(self, owner: str, team: str, accounts: Sequence[Account], tokens: int, usd: float) -> None:
        self.owner, self.team, self.accounts, self.tokens, self.usd = owner, team, accounts, tokens, usd
        for account in accounts:
            account.reserve(tokens, usd)

    def raise_to(self, tokens: int, usd: float) -> None:
        """Raise the hold to the use that the request already has."""
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
        """Use that is not written yet, by key, team, day and model."""
        self._read_state: tuple[int, int] | None = None
        """State of the last read of the keys: how often the database was opened, and its number of changes. None before
        the first read."""
        self._closed: tuple[date, float] | None = None
        """The day for which the sums of earlier days were read, and the time of that read."""
        self._task: asyncio.Task[None] | None = None
        self.is_up = False
        """Whether the last exchange with the database succeeded."""
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
        """Reserve a request's tokens in the budgets of its key and team. Raises ApiError if a budget has no room. A key
        that is not in the database has no budget, but its use is recorded."""
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
        """Charge a request's use to the accounts, in place of its hold."""
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
        """Write the use since the last exchange; read the keys, teams and spending of all gateways. Raises one of
        `UNAVAILABLE` if the database cannot be used; the use is then kept for the next exchange."""
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
        """Write the use, and read today's spending."""
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
        """Read the spending before today in each period."""
        for start in {account.budget.start(today) for account in self._accounts()}:
            by_key, by_team = await self.store.spent(start.isoformat(), today.isoformat())
            for accounts, spent in ((self._key_accounts, by_key), (self._team_accounts, by_team)):
                same = {name: each for name, each in accounts.items() if each.budget.start(today) == start}
                _assign(same, spent, "before_today")


def _assign(accounts: dict[str, StoredAccount], spent: Spent, attribute: str) -> None:
    for name, account in accounts.items():
        setattr(account, attribute, spent.get(name, _NOTHING))


def _updated(accounts: dict[str, StoredAccount], what: str, budgets: dict[str, Budget]) -> dict[str, StoredAccount]:
    """Accounts for the keys or teams that have a budget. Existing accounts keep their reserved and pending amounts."""
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
