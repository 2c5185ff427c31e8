"""Rates of a key as token buckets, and the response headers that tell clients about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

Quantity = Literal["requests", "tokens"]
"""What a rate limits."""
Headers = Sequence[tuple[bytes, bytes]]


class RateLimit(Struct, frozen=True, array_like=True, gc=False):
    """One limit of a key at one moment."""

    quantity: Quantity
    limit: int
    """Per minute."""
    remaining: int
    """What a request may still use now, 0 if nothing or less than nothing."""
    reset_s: float
    """Time until all of the limit is there again, if nothing is used meanwhile."""


class TokenBucket:
    """A bucket that fills at a steady rate, up to a minute's worth. Its level may become negative."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._capacity, self._per_s = per_minute, per_minute / 60.0
        self._level, self._at_s = per_minute, now

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at_s) * self._per_s, self._capacity)
        self._at_s = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until this amount is there; more than the capacity waits for a full bucket."""
        self._fill(now)
        return max(min(amount, self._capacity) - self._level, 0.0) / self._per_s

    def withdraw(self, amount: float, now: float) -> None:
        """Withdraw an amount; a negative one is a deposit."""
        self._fill(now)
        self._level = min(self._level - amount, self._capacity)

    def state(self, quantity: Quantity, now: float) -> RateLimit:
        self._fill(now)
        reset_s = (self._capacity - self._level) / self._per_s
        return RateLimit(quantity, math.floor(self._capacity), max(math.floor(self._level + 1e-9), 0), reset_s)

    def change(self, per_minute: float, now: float) -> None:
        """Fill at another rate from now on. What was withdrawn stays withdrawn."""
        self._fill(now)
        self._level += per_minute - self._capacity
        self._capacity, self._per_s = per_minute, per_minute / 60.0


def limit_headers(limits: Iterable[RateLimit]) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*` headers."""
    headers: list[tuple[bytes, bytes]] = []
    for each in limits:
        quantity = each.quantity.encode()
        headers += [
            (b"x-ratelimit-limit-" + quantity, b"%d" % each.limit),
            (b"x-ratelimit-remaining-" + quantity, b"%d" % each.remaining),
            (b"x-ratelimit-reset-" + quantity, _duration(each.reset_s).encode()),
        ]
    return headers


def _duration(seconds: float) -> str:
    """A time as OpenAI writes it: `120ms`, `8.64s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s"
