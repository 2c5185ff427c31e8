"""The share of time for which a change is tried: the smallest that permits a judgement in the given time."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, sqrt

from msgspec import Struct

from headway.autopilot.evidence import pairs_needed
from headway.core.errors import HeadwayError

LEAST_COUNTED = 50
"""Minimum number of counted requests in a period."""
OVERDISPERSION = 4.0
"""Variance of a period's SLO attainment over the variance for independent requests: misses come in groups of about this
size, because requests affect each other's waits."""
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
    found = _shortest(lambda num: pairs_needed(gain, _deviation(attainment, num), alpha), requests_per_s, e2e_s, time_s)
    if found is None:
        raise HeadwayError(f"a gain of {100 * gain:.1f} points {_not_told(requests_per_s, time_s)}")
    return found


def staging_for_dollars(
    least: float, most_lost: float, attainment: float, requests_per_s: float, e2e_s: float, time_s: float, alpha: float
) -> Staging:
    """The schedule to test whether a change saves at least the share `least` of the dollars, and loses at most
    `most_lost` of the SLO attainment. The rest is as in `staging`.

    The change is expected to save twice as much, to lose nothing, and savings to vary by `least` from pair to pair.
    """
    if most_lost <= 0 or least <= 0 or requests_per_s <= 0:
        raise HeadwayError("the change is to lose more SLO attainment than its saving is worth")
    for_saving = pairs_needed(least, least, alpha)

    def pairs(num: float) -> float:
        known = most_lost - OVERDISPERSION / num
        return max(pairs_needed(known, _deviation(attainment, num), alpha), for_saving) if known > 0 else inf

    found = _shortest(pairs, requests_per_s, e2e_s, time_s)
    if found is None:
        what = f"a saving of {least:.1%} that costs at most {100 * most_lost:.2f} points of SLO attainment"
        raise HeadwayError(f"{what} {_not_told(requests_per_s, time_s)}")
    return found


def _deviation(attainment: float, num: float) -> float:
    """The standard deviation of a pair's gain, with `num` requests in each period."""
    met = min(max(attainment, 0.02), 0.98)
    return sqrt(2 * OVERDISPERSION * met * (1 - met) / num)


def _shortest(pairs: Callable[[float], float], requests_per_s: float, settle_s: float, time_s: float) -> Staging | None:
    """The shortest periods that are enough: `pairs(num)` are needed with `num` counted requests in each period. None if
    the time is too short."""
    counted_s = max(LEAST_COUNTED / requests_per_s, settle_s)
    while 2 * (settle_s + counted_s) <= time_s:
        needed, period_s = pairs(counted_s * requests_per_s), settle_s + counted_s
        if 2 * period_s * needed <= time_s:
            rest_s = min(time_s / ceil(needed) - 2 * period_s, MOST_REST * period_s)
            rest_s = max(rest_s, 0.0)
            return Staging(settle_s, counted_s, rest_s, max(ceil(needed), int(time_s / (2 * period_s + rest_s))))
        counted_s *= _LONGER
    return None


def _not_told(requests_per_s: float, time_s: float) -> str:
    return f"cannot be told within {time_s / 3600:.3g} h at {requests_per_s:.3g} requests/s"
