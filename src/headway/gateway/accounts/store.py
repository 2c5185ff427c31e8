"""The interface of a store of keys, teams and their spending."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headway.core.errors import HeadwayError, unknown
from headway.gateway.settings import Key, key_id
from headway.limits.budgets import Budget

GROUPS = ("key", "team", "model", "day")
"""Columns by which a spending report can group."""


class StoredKey(Struct, frozen=True):
    """A key of the database."""

    sha256: str
    name: str
    team: str
    budget: Budget
    weight: float = 1.0
    tier: int = 0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    expires: date | None = None
    created_ns: int = 0
    revoked_ns: int | None = None

    @property
    def id(self) -> str:
        return key_id(self.sha256)

    def key(self) -> Key:
        """The key as a gateway checks it. All keys of a team are one tenant."""
        return Key(
            sha256=self.sha256,
            name=self.team or self.name,
            weight=self.weight,
            tier=self.tier,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            expires=self.expires,
        )


class Use(Struct, frozen=True):
    """A key's use of a model on one day."""

    sha256: str
    team: str
    day: str
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    usd: float


Spent = dict[str, tuple[int, float]]
"""Tokens and dollars, by key or by team."""


class AccountStore(ABC):
    """A store of keys that several gateways and `headway keys` may share. Every method except `find` is one
    transaction, and raises an error of `database.UNAVAILABLE` if the store cannot be used."""

    num_opened = 0
    """Number of times that the store was opened. Increases when another store has taken its place."""

    @abstractmethod
    async def open(self) -> None:
        """Make sure that the store can be used. Called repeatedly while the store is in use."""

    @abstractmethod
    async def close(self) -> None: ...

    # Keys and teams.

    @abstractmethod
    async def num_changes(self) -> int:
        """A number that grows with each change of a key or a team."""

    @abstractmethod
    async def keys(self, with_revoked: bool = False) -> list[StoredKey]:
        """The keys, in order of creation."""

    @abstractmethod
    async def teams(self) -> dict[str, Budget]:
        """The teams, in order of name."""

    @abstractmethod
    async def add_key(self, key: StoredKey) -> None:
        """Add a new key. Raises HeadwayError if there is no such team, or the key exists."""

    @abstractmethod
    async def change_key(self, key: StoredKey) -> None:
        """Write a key's current properties. Raises HeadwayError if there is no such team."""

    @abstractmethod
    async def replace_key(self, old: StoredKey, new: StoredKey) -> None:
        """Write the current properties of the old key, and add the new key in its place."""

    @abstractmethod
    async def set_team(self, name: str, budget: Budget) -> None:
        """Add a team, or change its budget."""

    async def find(self, text: str) -> StoredKey:
        """The key with this name, id, or first digits of its hash. A revoked key is found only by its id. Raises
        HeadwayError if no key or several keys match."""
        keys = await self.keys(with_revoked=True)
        found = [key for key in keys if key.name == text and key.revoked_ns is None]
        found = found or [key for key in keys if len(text) >= 4 and key.sha256.startswith(text)]
        if not found:
            raise unknown("key", text, [name for key in keys if key.revoked_ns is None for name in (key.name, key.id)])
        if len(found) > 1:
            raise HeadwayError(f"several keys are {text!r}: {', '.join(key.id for key in found)}; expected one")
        return found[0]

    # Use.

    @abstractmethod
    async def exchange(self, uses: Sequence[Use], today: str) -> tuple[Spent, Spent]:
        """Add the use, and return today's spending by key and by team."""

    @abstractmethod
    async def spent(self, since: str, before: str) -> tuple[Spent, Spent]:
        """The spending by key and by team from day `since` until before day `before`."""

    @abstractmethod
    async def report(self, by: Iterable[str], since: str, until: str) -> list[dict[str, Any]]:
        """The use between two days, grouped by some of `GROUPS`."""


def stamped(key: StoredKey) -> StoredKey:
    """The key with the time of its creation."""
    return key if key.created_ns else replace(key, created_ns=time.time_ns())
