"""Statistics of the last minutes for the dashboard: rates and latencies by tier in slots of a few seconds, and
decisions."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

from msgspec import Meta, Struct, field

from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.names import KnownNames
from headway.gateway.telemetry.metrics import LAST_TIER, Histogram, has_slo, latencies_s, met_slos

SLOT_S = 5.0
NUM_SLOTS = 60
"""Slots of five minutes."""
_RATE_WINDOW_S = 30.0
_NUM_DECISIONS = 12
_MAX_TENANTS = 200
"""Maximum number of tenants counted by name. Other tenants are counted together."""
_COLLECT_S = 15.0
"""Time for which decisions are collected after the last read."""
_BIN_WIDTH = math.log(1.04)
"""Bins are 4% wide, so that latencies are accurate to 2%."""
_BOUNDS_S = tuple(math.exp((index + 0.5) * _BIN_WIDTH) for index in range(-352, 353))
"""Bin bounds from a microsecond to eleven days."""

_LATENCIES = ("e2e_s", "ttft_s", "tpot_s")
"""Latencies in the order of `latencies_s`."""

Num = Annotated[int, Meta(ge=0)]
_Rate = Annotated[float, Meta(ge=0)]


class LatencyQuantiles(Struct, forbid_unknown_fields=True):
    """Quantiles in seconds; null without observations."""

    p50: float | None
    p95: float | None
    p99: float | None


class SloCounts(Struct, forbid_unknown_fields=True):
    """Ended requests with SLOs, and how many of them met all their SLOs."""

    num: Num = 0
    met: Num = 0


class TenantStats(Struct, forbid_unknown_fields=True):
    """One tenant over the last minutes; "" stands for requests without a tenant."""

    tenant: str
    num: Num
    failed: Num
    tokens: Num
    """Prompt and output tokens."""
    slo: SloCounts


class Cost(Struct, forbid_unknown_fields=True):
    """The fleet's cost, by the prices of its pools."""

    usd_per_hour: float
    """Cost of the current replicas per hour, without the token charges of hosted replicas."""
    usd: float
    """Cost since the gateway's start."""
    usd_per_million_output_tokens: float | None
    """Cost over the last minutes; null without output."""


class TierStats(Struct, forbid_unknown_fields=True):
    """One tier over the last minutes."""

    tier: Num
    num: Num
    failed: Num
    slo: SloCounts
    ttft_s: LatencyQuantiles
    tpot_s: LatencyQuantiles
    e2e_s: LatencyQuantiles


class RecentRates(Struct, forbid_unknown_fields=True):
    """Rates over the last half minute."""

    requests_per_s: _Rate
    failed_per_s: _Rate
    tokens_per_s: _Rate
    decisions_per_s: dict[str, _Rate]
    """Decisions per second by kind, while decisions are collected."""


class SlotSeries(Struct, forbid_unknown_fields=True):
    """The last minutes, slot by slot; latencies are medians by tier and metric."""

    slot_s: float
    requests: list[Num]
    tokens: list[Num]
    failed: list[Num]
    slo: list[SloCounts]
    tiers: dict[str, dict[str, list[float | None]]]


class _TierSlot(Struct):
    """One tier in one slot."""

    num: int = 0
    failed: int = 0
    tokens: int = 0
    slo: SloCounts = field(default_factory=SloCounts)
    latencies: dict[str, Histogram] = field(default_factory=lambda: {one: Histogram(_BOUNDS_S) for one in _LATENCIES})


class _Slot(Struct):
    """All requests that ended in one slot."""

    start_usd: float
    """The fleet's cost when the first request of the slot ended."""
    tiers: dict[int, _TierSlot] = field(default_factory=dict)
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)


_Slots = list[dict[int, _TierSlot]]
"""Each slot's tiers. The last slot is the current one."""


class RollingStats:
    """Counts and latencies of requests that ended in the last minutes."""

    def __init__(self, decisions: DecisionObserver, usd: Callable[[], float]) -> None:
        """`usd()`: the fleet's cost so far."""
        self._slots: deque[tuple[int, _Slot]] = deque(maxlen=NUM_SLOTS + 1)
        self._decisions: deque[Decision] = deque(maxlen=_NUM_DECISIONS)
        self._source, self._usd = decisions, usd
        self._tenants = KnownNames(_MAX_TENANTS)
        self._collects, self._collects_from_s, self._collects_until_s = False, 0.0, 0.0

    def count_end(self, live: Live, outcome: Outcome, now: float) -> None:
        """Count a request that has ended. Tiers above `LAST_TIER` are counted as `LAST_TIER`."""
        if self._collects and now > self._collects_until_s:
            self._collects = False
            self._source.listeners.remove(self._note_decision)
        slot = self._slot(now)
        tier, tenant = slot.tiers.setdefault(min(live.tier, LAST_TIER), _TierSlot()), self._tenants.known(live.tenant)
        served = slot.tenants.get(tenant)
        if served is None:
            served = slot.tenants[tenant] = TenantStats(tenant, 0, 0, 0, SloCounts())
        tier.num += 1
        served.num += 1
        tier.tokens += live.generated_tokens
        served.tokens += live.prompt_tokens + live.generated_tokens
        is_finished = outcome is Outcome.FINISHED
        is_failed = not is_finished and outcome is not Outcome.CANCELLED
        tier.failed += is_failed
        served.failed += is_failed
        latencies = latencies_s(live, now)
        if has_slo(live):
            is_met = is_finished and met_slos(live, *latencies)
            for slo in (tier.slo, served.slo):
                slo.num += 1
                slo.met += is_met
        if is_finished:
            for latency, seconds in zip(_LATENCIES, latencies, strict=True):
                if seconds is not None:
                    tier.latencies[latency].observe(seconds)

    def _slot(self, now: float) -> _Slot:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, _Slot(self._usd())))
        return self._slots[-1][1]

    def _note_decision(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._slot(decision.time_s - self._source.start_s).decisions[decision.what] += 1

    def collect_decisions(self, now: float) -> None:
        """Collect decisions for the next 15 seconds."""
        if not self._collects:
            self._collects, self._collects_from_s = True, now
            self._source.listeners.append(self._note_decision)
        self._collects_until_s = now + _COLLECT_S

    @property
    def decisions(self) -> list[Decision]:
        return list(reversed(self._decisions))

    def rates(self, now: float) -> RecentRates:
        """Rates over the current slot and the complete slots before it."""
        num_recent = int(_RATE_WINDOW_S / SLOT_S)
        recent = self._window(now)[-num_recent:]
        length_s = min((num_recent - 1) * SLOT_S + now % SLOT_S, now) or SLOT_S
        slots = [tier for slot in recent for tier in slot.values()]
        decisions: Counter[str] = Counter()
        for number, slot in self._slots:
            if number > int(now // SLOT_S) - num_recent:
                decisions.update(slot.decisions)
        return RecentRates(
            requests_per_s=sum(slot.num for slot in slots) / length_s,
            failed_per_s=sum(slot.failed for slot in slots) / length_s,
            tokens_per_s=sum(slot.tokens for slot in slots) / length_s,
            decisions_per_s={
                what: num / min(length_s, max(now - self._collects_from_s, 1.0))
                for what, num in decisions.most_common()
            },
        )

    def tenants(self, now: float) -> list[TenantStats]:
        """Tenants over the whole window, by number of tokens, largest first."""
        found: dict[str, TenantStats] = {}
        for slot in self._recent(now):
            for tenant, part in slot.tenants.items():
                total = found.setdefault(tenant, TenantStats(tenant, 0, 0, 0, SloCounts()))
                total.num, total.failed, total.tokens = (
                    total.num + part.num,
                    total.failed + part.failed,
                    total.tokens + part.tokens,
                )
                total.slo.num, total.slo.met = total.slo.num + part.slo.num, total.slo.met + part.slo.met
        return sorted(found.values(), key=lambda each: -each.tokens)

    def cost(self, now: float, usd_per_hour: float) -> Cost:
        """`usd_per_hour`: cost of the current replicas."""
        slots, usd = self._recent(now), self._usd()
        tokens = sum(tier.tokens for slot in slots for tier in slot.tiers.values())
        spent_usd = usd - slots[0].start_usd if slots else 0.0
        return Cost(usd_per_hour, usd, spent_usd / tokens * 1e6 if tokens else None)

    def _recent(self, now: float) -> list[_Slot]:
        """The window's slots in which a request ended."""
        first = int(now // SLOT_S) - NUM_SLOTS
        return [slot for number, slot in self._slots if number > first]

    def tiers(self, now: float) -> Iterator[TierStats]:
        """Each tier over the whole window. Requests may end during the iteration."""
        window = self._window(now)
        for tier in _tiers(window):
            slots = [slot[tier] for slot in window if tier in slot]
            num, failed = sum(slot.num for slot in slots), sum(slot.failed for slot in slots)
            latencies = {name: _quantiles(slot.latencies[name] for slot in slots) for name in _LATENCIES}
            yield TierStats(tier=tier, num=num, failed=failed, slo=_total(slot.slo for slot in slots), **latencies)

    def medians(self, now: float) -> Iterator[tuple[str, dict[str, list[float | None]]]]:
        """Each tier, with the medians of its metrics by slot over the whole window. Requests may end during the
        iteration."""
        window = self._window(now)
        for tier in _tiers(window):
            yield str(tier), _medians(tier, window)

    def series(self, now: float, medians: dict[str, dict[str, list[float | None]]]) -> SlotSeries:
        """The whole window by slot, with these medians."""
        window = self._window(now)
        return SlotSeries(
            slot_s=SLOT_S,
            requests=[sum(tier.num for tier in slot.values()) for slot in window],
            tokens=[sum(tier.tokens for tier in slot.values()) for slot in window],
            failed=[sum(tier.failed for tier in slot.values()) for slot in window],
            slo=[_total(tier.slo for tier in slot.values()) for slot in window],
            tiers=medians,
        )

    def _window(self, now: float) -> _Slots:
        last = int(now // SLOT_S)
        slots = {number: slot.tiers for number, slot in self._slots}
        return [slots.get(number, {}) for number in range(last - NUM_SLOTS + 1, last + 1)]


def _tiers(window: _Slots) -> list[int]:
    return sorted({tier for slot in window for tier in slot})


def _total(counts: Iterable[SloCounts]) -> SloCounts:
    total = SloCounts()
    for each in counts:
        total.num, total.met = total.num + each.num, total.met + each.met
    return total


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
