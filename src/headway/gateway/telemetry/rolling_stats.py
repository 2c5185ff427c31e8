"""What the dashboard shows of the last minutes: rates and latencies by tier in slots of a few seconds, decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from headway.control.decisions import Decision, Decisions
from headway.control.live import Live
from headway.core.record import Outcome

SLOT_S = 5.0
NUM_SLOTS = 60
"""Five minutes."""
_RECENT_S = 30.0
"""Rates are over so long."""
_NUM_DECISIONS = 60
_LISTENS_S = 15.0
"""After the last look, decisions are still collected for so long."""
_BIN = math.log(1.04)
"""Latencies are kept to 2%: in bins that are 4% wide."""
_LEAST_S = 1e-6
METRICS = ("ttft_s", "tpot_s", "e2e_s")
Bins = dict[int, int]


class _Tier(Struct):
    """One tier in one slot."""

    num: int = 0
    failed: int = 0
    tokens: int = 0
    latencies: tuple[Bins, Bins, Bins] = field(default_factory=lambda: ({}, {}, {}))


class RollingStats:
    """One gateway's."""

    def __init__(self, decisions: Decisions) -> None:
        self._slots: deque[tuple[int, dict[int, _Tier]]] = deque(maxlen=NUM_SLOTS + 1)
        self._decisions: deque[Decision] = deque(maxlen=_NUM_DECISIONS)
        self._source = decisions
        self._listens_until_s = float("-inf")

    def ended(self, live: Live, outcome: Outcome, now: float, is_whole: bool) -> None:
        """A request has. `is_whole`: its tokens all came at once."""
        tier = self._slot(now).setdefault(live.tier, _Tier())
        tier.num += 1
        tier.tokens += live.generated_tokens
        if outcome is not Outcome.FINISHED:
            tier.failed += outcome is not Outcome.CANCELLED
            return
        first_s = live.first_token_s
        ttft, tpot, e2e = tier.latencies
        _count(e2e, now - live.arrival_s)
        if first_s == first_s:
            _count(ttft, first_s - live.arrival_s)
            if live.generated_tokens > 1 and now > first_s and not is_whole:
                _count(tpot, (now - first_s) / (live.generated_tokens - 1))

    def _slot(self, now: float) -> dict[int, _Tier]:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, {}))
            self._rest(now)
        return self._slots[-1][1]

    def looked_at(self, now: float) -> None:
        """Somebody looks: decisions are collected from now on, and for a while."""
        if self._decisions.append not in self._source.listeners:
            self._source.listeners.append(self._decisions.append)
        self._listens_until_s = now + _LISTENS_S

    def _rest(self, now: float) -> None:
        """Collect decisions no longer, if nobody looks."""
        if now > self._listens_until_s and self._decisions.append in self._source.listeners:
            self._source.listeners.remove(self._decisions.append)

    def shown(self, now: float) -> dict[str, Any]:
        """All of it, as JSON will have it."""
        last = int(now // SLOT_S)
        known = {number: tiers for number, tiers in self._slots if number > last - NUM_SLOTS}
        slots = [known.get(number, {}) for number in range(last - NUM_SLOTS + 1, last + 1)]
        tiers = sorted({tier for slot in slots for tier in slot})
        return {
            "window_s": SLOT_S * NUM_SLOTS,
            "rates": _rates(slots, now),
            "tiers": [_row(tier, [slot[tier] for slot in slots if tier in slot]) for tier in tiers],
            "series": {
                "slot_s": SLOT_S,
                "requests": [sum(tier.num for tier in slot.values()) for slot in slots],
                "tokens": [sum(tier.tokens for tier in slot.values()) for slot in slots],
                "failed": [sum(tier.failed for tier in slot.values()) for slot in slots],
                "tiers": {str(tier): _lines(tier, slots) for tier in tiers},
            },
            "decisions": [msgspec.to_builtins(decision) for decision in reversed(self._decisions)],
        }


def _rates(slots: list[dict[int, _Tier]], now: float) -> dict[str, float]:
    """Over the last seconds: the present slot, and whole ones before it."""
    recent = slots[-int(_RECENT_S / SLOT_S) :]
    length_s = min((len(recent) - 1) * SLOT_S + now % SLOT_S, now) or SLOT_S
    parts = [tier for slot in recent for tier in slot.values()]
    return {
        "requests_per_s": sum(part.num for part in parts) / length_s,
        "failed_per_s": sum(part.failed for part in parts) / length_s,
        "tokens_per_s": sum(part.tokens for part in parts) / length_s,
    }


def _row(tier: int, parts: list[_Tier]) -> dict[str, Any]:
    """One tier over the whole window."""
    row: dict[str, Any] = {"tier": tier, "num": sum(part.num for part in parts)}
    row["failed"] = sum(part.failed for part in parts)
    for i, metric in enumerate(METRICS):
        bins = _sum(part.latencies[i] for part in parts)
        row[metric] = {"p50": quantile(bins, 0.5), "p95": quantile(bins, 0.95), "p99": quantile(bins, 0.99)}
    return row


def _lines(tier: int, slots: list[dict[int, _Tier]]) -> dict[str, list[float | None]]:
    """Each metric's median, slot by slot."""
    return {
        metric: [quantile(slot[tier].latencies[i], 0.5) if tier in slot else None for slot in slots]
        for i, metric in enumerate(METRICS)
    }


def _count(bins: Bins, value_s: float) -> None:
    number = round(math.log(max(value_s, _LEAST_S)) / _BIN)
    bins[number] = bins.get(number, 0) + 1


def _sum(parts: Iterable[Bins]) -> Bins:
    total: Bins = {}
    for part in parts:
        for number, count in part.items():
            total[number] = total.get(number, 0) + count
    return total


def quantile(bins: Bins, share: float) -> float | None:
    """The value that this share of the observations does not exceed, to 2%; None: there are none."""
    rank, so_far = math.ceil(share * sum(bins.values())), 0
    for number in sorted(bins):
        so_far += bins[number]
        if so_far >= rank:
            return math.exp(number * _BIN)
    return None
