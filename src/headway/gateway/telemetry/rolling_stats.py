"""The last minutes for the dashboard: rates and latencies by tier in slots of a few seconds, and decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated

from msgspec import Meta, Struct, field

from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.telemetry.histogram import Histogram
from headway.gateway.telemetry.metrics import LAST_TIER, latencies_s

SLOT_S = 5.0
NUM_SLOTS = 60
"""Five minutes."""
_RATE_WINDOW_S = 30.0
_NUM_DECISIONS = 60
_COLLECT_S = 15.0
"""Decisions are collected for so long after the last reader asked."""
_BIN_WIDTH = math.log(1.04)
"""Bins are 4% wide, so that latencies are right to 2%."""
_BOUNDS_S = tuple(math.exp((index + 0.5) * _BIN_WIDTH) for index in range(-352, 353))
"""From a microsecond to eleven days."""

_LATENCIES = ("e2e_s", "ttft_s", "tpot_s")
"""In the order of `latencies_s`."""

Num = Annotated[int, Meta(ge=0)]
_Rate = Annotated[float, Meta(ge=0)]


class LatencyQuantiles(Struct, forbid_unknown_fields=True):
    """In seconds; null without observations."""

    p50: float | None
    p95: float | None
    p99: float | None


class TierStats(Struct, forbid_unknown_fields=True):
    """One tier over the last minutes."""

    tier: Num
    num: Num
    failed: Num
    ttft_s: LatencyQuantiles
    tpot_s: LatencyQuantiles
    e2e_s: LatencyQuantiles


class RecentRates(Struct, forbid_unknown_fields=True):
    """Rates over the last half minute."""

    requests_per_s: _Rate
    failed_per_s: _Rate
    tokens_per_s: _Rate


class SlotSeries(Struct, forbid_unknown_fields=True):
    """The last minutes, slot by slot; latencies are medians by tier and metric."""

    slot_s: float
    requests: list[Num]
    tokens: list[Num]
    failed: list[Num]
    tiers: dict[str, dict[str, list[float | None]]]


class _TierSlot(Struct):
    """One tier in one slot."""

    num: int = 0
    failed: int = 0
    tokens: int = 0
    latencies: dict[str, Histogram] = field(default_factory=lambda: {one: Histogram(_BOUNDS_S) for one in _LATENCIES})


_Slots = list[dict[int, _TierSlot]]
"""Each slot's tiers; the last slot is the present one."""


class RollingStats:
    """Counts and latencies of requests that ended in the last minutes."""

    def __init__(self, decisions: DecisionObserver) -> None:
        self._slots: deque[tuple[int, dict[int, _TierSlot]]] = deque(maxlen=NUM_SLOTS + 1)
        self._decisions: deque[Decision] = deque(maxlen=_NUM_DECISIONS)
        self._source = decisions
        self._collects_until_s = float("-inf")

    def count_end(self, live: Live, outcome: Outcome, now: float) -> None:
        """Count a request that has ended, in `LAST_TIER` at most."""
        tier = self._slot(now).setdefault(min(live.tier, LAST_TIER), _TierSlot())
        tier.num += 1
        tier.tokens += live.generated_tokens
        if outcome is not Outcome.FINISHED:
            tier.failed += outcome is not Outcome.CANCELLED
            return
        for latency, seconds in zip(_LATENCIES, latencies_s(live, now), strict=True):
            if seconds is not None:
                tier.latencies[latency].observe(seconds)

    def _slot(self, now: float) -> dict[int, _TierSlot]:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, {}))
            if now > self._collects_until_s and self._decisions.append in self._source.listeners:
                self._source.listeners.remove(self._decisions.append)
        return self._slots[-1][1]

    def collect_decisions(self, now: float) -> None:
        """Collect decisions from now on; without a further call, for 15 seconds."""
        if self._decisions.append not in self._source.listeners:
            self._source.listeners.append(self._decisions.append)
        self._collects_until_s = now + _COLLECT_S

    @property
    def decisions(self) -> list[Decision]:
        return list(reversed(self._decisions))

    def rates(self, now: float) -> RecentRates:
        """Over the present slot and the whole ones before it."""
        recent = self._window(now)[-int(_RATE_WINDOW_S / SLOT_S) :]
        length_s = min((len(recent) - 1) * SLOT_S + now % SLOT_S, now) or SLOT_S
        slots = [tier for slot in recent for tier in slot.values()]
        return RecentRates(
            requests_per_s=sum(slot.num for slot in slots) / length_s,
            failed_per_s=sum(slot.failed for slot in slots) / length_s,
            tokens_per_s=sum(slot.tokens for slot in slots) / length_s,
        )

    def tiers(self, now: float) -> Iterator[TierStats]:
        """Each tier over the whole window. Requests may end meanwhile."""
        window = self._window(now)
        for tier in _tiers(window):
            slots = [slot[tier] for slot in window if tier in slot]
            num, failed = sum(slot.num for slot in slots), sum(slot.failed for slot in slots)
            latencies = {name: _quantiles(slot.latencies[name] for slot in slots) for name in _LATENCIES}
            yield TierStats(tier=tier, num=num, failed=failed, **latencies)

    def medians(self, now: float) -> Iterator[tuple[str, dict[str, list[float | None]]]]:
        """Each tier, and its metrics' medians over the whole window, slot by slot. Requests may end meanwhile."""
        window = self._window(now)
        for tier in _tiers(window):
            yield str(tier), _medians(tier, window)

    def series(self, now: float, medians: dict[str, dict[str, list[float | None]]]) -> SlotSeries:
        """The whole window, slot by slot, with the medians of `medians`."""
        window = self._window(now)
        return SlotSeries(
            slot_s=SLOT_S,
            requests=[sum(tier.num for tier in slot.values()) for slot in window],
            tokens=[sum(tier.tokens for tier in slot.values()) for slot in window],
            failed=[sum(tier.failed for tier in slot.values()) for slot in window],
            tiers=medians,
        )

    def _window(self, now: float) -> _Slots:
        last = int(now // SLOT_S)
        slots = dict(self._slots)
        return [slots.get(number, {}) for number in range(last - NUM_SLOTS + 1, last + 1)]


def _tiers(window: _Slots) -> list[int]:
    return sorted({tier for slot in window for tier in slot})


def _quantiles(histograms: Iterable[Histogram]) -> LatencyQuantiles:
    merged = Histogram(_BOUNDS_S)
    for histogram in histograms:
        merged.merge(histogram.counts, histogram.total)
    return LatencyQuantiles(merged.quantile(0.5), merged.quantile(0.95), merged.quantile(0.99))


def _medians(tier: int, window: _Slots) -> dict[str, list[float | None]]:
    """Each metric's median, slot by slot."""
    return {
        metric: [slot[tier].latencies[metric].quantile(0.5) if tier in slot else None for slot in window]
        for metric in _LATENCIES
    }
