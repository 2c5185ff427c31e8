"""The share of time for which a change is tried: the smallest that permits a judgement in the given time."""

from __future__ import annotations

from math import ceil, sqrt

from msgspec import Struct

from headway.autopilot.evidence import pairs_needed
from headway.core.errors import HeadwayError

LEAST_COUNTED = 50
"""Minimum number of counted requests in a period."""
OVERDISPERSION = 4.0
"""Variance of a period's SLO attainment over the variance for independent requests. Requests affect each other's
waits."""
MOST_REST = 8.0
"""Longest rest after a pair, in period lengths, so that a change runs at least a tenth of the time."""
_LONGER = 1.5


class Staging(Struct, frozen=True):
    """Pairs of periods, one with the change and one without it, each followed by a rest without the change."""

    settle_s: float
    """The first part of each period, which is not counted because requests of the previous period are still served."""
    counted_s: float
    rest_s: float
    most_pairs: int

    @property
    def period_s(self) -> float:
        return self.settle_s + self.counted_s

    @property
    def share(self) -> float:
        """Share of the time, and so of the traffic, in which the change runs."""
        return self.period_s / (2 * self.period_s + self.rest_s)


def staging(
    gain: float, attainment: float, requests_per_s: float, e2e_s: float, time_s: float, alpha: float
) -> Staging:
    """The schedule to test a change with the expected `gain` of SLO attainment.

    `attainment`: today's value. `e2e_s`: near the longest duration of a request, after which earlier requests have
    ended. Periods are as short as possible, because short pairs follow the load. Raises HeadwayError if the time is too
    short for a verdict.
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
