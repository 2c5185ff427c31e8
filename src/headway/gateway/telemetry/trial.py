"""SLO attainment of the requests that arrived in a period, and its dollars, while a change is tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.telemetry.metrics import has_slo, latencies_s, met_slos

_NUM_RECENT = 2000


class Period:
    """Requests with SLOs that arrived in a period, counted as they end."""

    def __init__(self, from_s: float, to_s: float) -> None:
        self.from_s, self.to_s = from_s, to_s
        self.num = self.num_met = 0
        self.usd_per_s = 0.0
        """The fleet's cost."""

    def close(self, in_flight: Iterable[Live]) -> None:
        """Count the requests in flight as misses."""
        self.num += sum(self.from_s <= live.arrival_s < self.to_s and has_slo(live) for live in in_flight)

    @property
    def attainment(self) -> float | None:
        """Share of the requests that met their SLOs. None without requests."""
        return self.num_met / self.num if self.num else None


class Trial:
    """Counts requests by the period of their arrival."""

    def __init__(self) -> None:
        self.periods: list[Period] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)
        """(end time, duration) of each of the last requests."""
        self.num, self.num_met = 0, 0
        """(number of ended requests with SLOs, number of those that met their SLOs)."""

    def ended(self, live: Live, outcome: Outcome, now: float) -> None:
        """Count a request that has ended."""
        latencies = latencies_s(live, now)
        self._recent.append((now, latencies[0]))
        if not has_slo(live):
            return
        is_met = outcome is Outcome.FINISHED and met_slos(live, *latencies)
        self.num, self.num_met = self.num + 1, self.num_met + is_met
        for period in self.periods:
            if period.from_s <= live.arrival_s < period.to_s:
                period.num, period.num_met = period.num + 1, period.num_met + is_met

    def requests_per_s(self, now: float) -> float:
        """Rate of the last ended requests."""
        if len(self._recent) < 2:
            return 0.0
        return len(self._recent) / max(now - self._recent[0][0], 1e-9)

    def longest_s(self) -> float:
        """The time within which 99% of the last requests ended; 0 without requests."""
        taken_s = sorted(each for _, each in self._recent)
        return taken_s[int(0.99 * (len(taken_s) - 1))] if taken_s else 0.0
