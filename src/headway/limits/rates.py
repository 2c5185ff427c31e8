"""Rates of a key or a tenant as token buckets."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

Quantity = Literal["requests", "tokens"]
"""The quantities that a rate limits."""
_LIMITED: tuple[Quantity, Quantity] = ("requests", "tokens")


class RateLimit(Struct, frozen=True, array_like=True, gc=False):
    """The state of one limit of a key."""

    quantity: Quantity
    limit: int
    """Amount per minute."""
    remaining: int
    """Amount that a request may use now; at least 0."""
    reset_s: float
    """Time until the whole limit is available again, if nothing more is used."""


class TokenBucket:
    """A bucket that fills at a steady rate, to at most a minute's amount. Its level may become negative."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._capacity, self._per_s = per_minute, per_minute / 60.0
        self._level, self._at_s = per_minute, now

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at_s) * self._per_s, self._capacity)
        self._at_s = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until this amount is available. An amount above the capacity waits for a full bucket."""
        self._fill(now)
        return max(min(amount, self._capacity) - self._level, 0.0) / self._per_s

    def withdraw(self, amount: float, now: float) -> None:
        """Withdraw an amount; a negative amount is a deposit."""
        self._fill(now)
        self._level = min(self._level - amount, self._capacity)

    def state(self, quantity: Quantity, now: float) -> RateLimit:
        self._fill(now)
        reset_s = (self._capacity - self._level) / self._per_s
        return RateLimit(quantity, math.floor(self._capacity), max(math.floor(self._level + 1e-9), 0), reset_s)

    def change(self, per_minute: float, now: float) -> None:
        """Use another rate from now on. Withdrawn amounts stay withdrawn."""
        self._fill(now)
        self._level += per_minute - self._capacity
        self._capacity, self._per_s = per_minute, per_minute / 60.0


class Rates:
    """The rates of one key or tenant. A rate of None does not limit."""

    def __init__(self) -> None:
        self._buckets: dict[Quantity, TokenBucket] = {}

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def change(self, requests_per_minute: float | None, tokens_per_minute: float | None, now: float) -> None:
        """Use these rates from now on. Withdrawn amounts stay withdrawn."""
        before, self._buckets = self._buckets, {}
        for quantity, per_minute in zip(_LIMITED, (requests_per_minute, tokens_per_minute), strict=True):
            if per_minute is not None:
                bucket = self._buckets[quantity] = before.get(quantity) or TokenBucket(per_minute, now)
                bucket.change(per_minute, now)

    def reserve(self, tokens: int, now: float) -> tuple[Quantity, float] | None:
        """Withdraw one request and its tokens. If a rate does not allow it, return that rate's quantity and the seconds
        to wait."""
        amounts = {"requests": 1, "tokens": tokens}
        for quantity, bucket in self._buckets.items():
            wait_s = bucket.wait_s(amounts[quantity], now)
            if wait_s > 0:
                return quantity, wait_s
        for quantity, bucket in self._buckets.items():
            bucket.withdraw(amounts[quantity], now)
        return None

    def give_back(self, tokens: int, now: float) -> None:
        """Return reserved tokens; negative: withdraw more. The request stays counted."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.withdraw(-tokens, now)

    def state(self, now: float) -> tuple[RateLimit, ...]:
        return tuple(bucket.state(quantity, now) for quantity, bucket in self._buckets.items())
