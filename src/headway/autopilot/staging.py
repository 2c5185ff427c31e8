"""For which share of the time a change is tried: the smallest with which it can be judged in the time given."""

from __future__ import annotations

from math import ceil, sqrt

from msgspec import Struct

from headway.autopilot.evidence import pairs_needed
from headway.core.errors import HeadwayError

LEAST_COUNTED = 50
"""Requests of a period that count, at least."""
OVERDISPERSION = 4.0
"""The variance of a period's SLO attainment over that of independent requests: requests wait for each other."""
MOST_REST = 8.0
"""Times the length of a period: the longest rest after a pair, so that a change serves a tenth of the time at least."""
_LONGER = 1.5


class Staging(Struct, frozen=True):
    """Pairs of periods, one with the change and one without it, and a rest without it after each pair."""

    settle_s: float
    """Of each period, the first part, whose requests do not count: those before it are still served."""
    counted_s: float
    rest_s: float
    most_pairs: int

    @property
    def period_s(self) -> float:
        return self.settle_s + self.counted_s

    @property
    def share(self) -> float:
        """Of the time, and so of the traffic, that the change serves."""
        return self.period_s / (2 * self.period_s + self.rest_s)


def staging(
    gain: float, attainment: float, requests_per_s: float, e2e_s: float, time_s: float, alpha: float
) -> Staging:
    """How a change is tried that is to add `gain` to the SLO attainment.

    `attainment`: today's. `e2e_s`: nearly the longest time of a request, after which those of before are over. Periods
    are as short as they may be: short pairs follow the load. HeadwayError if the time is too short to tell.
    """
    if gain <= 0 or requests_per_s <= 0:
        raise HeadwayError("the change is not to add to the SLO attainment, by which changes are judged")
    met = min(max(attainment, 0.02), 0.98)
    counted_s = max(LEAST_COUNTED / requests_per_s, e2e_s)
    while 2 * (e2e_s + counted_s) <= time_s:
        deviation = sqrt(2 * OVERDISPERSION * met * (1 - met) / (counted_s * requests_per_s))
        pairs, period_s = pairs_needed(gain, deviation, alpha), e2e_s + counted_s
        if 2 * period_s * pairs <= time_s:
            rest_s = min(time_s / ceil(pairs) - 2 * period_s, MOST_REST * period_s)
            rest_s = max(rest_s, 0.0)
            return Staging(e2e_s, counted_s, rest_s, max(ceil(pairs), int(time_s / (2 * period_s + rest_s))))
        counted_s *= _LONGER
    points, hours = 100 * gain, time_s / 3600
    raise HeadwayError(
        f"a gain of {points:.1f} points cannot be told within {hours:.3g} h at {requests_per_s:.3g} requests/s"
    )
