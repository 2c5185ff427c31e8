"""The response headers that tell clients about the rates of their key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headway.limits.rates import RateLimit

Headers = Sequence[tuple[bytes, bytes]]


def limit_headers(limits: Iterable[RateLimit]) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*` headers. For each quantity: the limit, the remaining amount, and the time until the full
    limit is available again."""
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
    """A duration in OpenAI's format: `120ms`, `8.64s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s"
