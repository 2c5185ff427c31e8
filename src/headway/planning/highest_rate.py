"""Finds the highest rate that is served in time in few trials, each of which is a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log

Strains = Sequence[float]
"""Holds, for each limit, the logarithm of load over limit, 0 at the limit, positive beyond. The order is fixed."""
Trial = tuple[float, Strains]
"""The logarithm of a rate, and its strains."""
MOST = log(4.0)
"""Bound of a strain in both directions, because larger values do not show the distance to the limit."""
FARTHEST = log(1.35)
"""Longest step while all trials are on one side of the limit."""
LEAST_SLOPE, SLOPE, MOST_SLOPE = 2.0, 4.0, 20.0
"""Slope of a strain over the logarithm of the rate: its bounds, and the assumption for the first trial."""
EDGE = 0.25
"""Share of an interval that a trial keeps away from either end."""


def highest(strains: Callable[[float], Strains], start: float, floor: float, ceiling: float, precision: float) -> float:
    """The rate at which the first strain rises above 0, to within `precision`.

    The search assumes that strains are straight lines over the logarithm of the rate. The result is where the first
    line crosses 0: between two trials that are `precision` apart, or beside a trial so near that the slope hardly
    matters. Each trial lies half the precision to one side of the estimated crossing, so that two trials suffice if the
    estimate is right. A strain that is flat up to the limit bends there, and estimates would approach it slowly: after
    two trials on one side of the limit, the interval is therefore halved. 0 if even `floor` is too high; at most
    `ceiling`.
    """
    width, lowest, uppermost = log(precision), log(floor), log(ceiling)
    at = min(max(log(start), lowest), uppermost)
    low: Trial | None = None
    high: Trial | None = None
    before: Trial | None = None
    while True:
        here = (at, strains(exp(at)))
        is_same_side = before is not None and (max(before[1]) <= 0) == (max(here[1]) <= 0)
        if max(here[1]) <= 0:
            low = here
            if at >= uppermost:
                return exp(at)
        else:
            high = here
            if at <= lowest:
                return 0.0
        if low is not None and high is not None and high[0] - low[0] <= width * (1 + 1e-9):
            return exp(low[0] + _share(low, high) * (high[0] - low[0]))
        if abs(max(here[1])) <= width / 2:
            return exp(at + _step(here, before))
        if low is None or high is None:
            at = _beyond(here, before, width)
        elif is_same_side:
            at = (low[0] + high[0]) / 2
        else:
            at = _between(low, high, width)
        before, at = here, min(max(at, lowest), uppermost)


def _beyond(here: Trial, before: Trial | None, width: float) -> float:
    """The next trial, beyond the estimated limit."""
    step = _step(here, before) + (width / 2 if max(here[1]) <= 0 else -width / 2)
    return here[0] + min(max(step, -FARTHEST), FARTHEST)


def _step(here: Trial, before: Trial | None) -> float:
    steps = []
    for i, strain in enumerate(here[1]):
        slope = SLOPE
        if before is not None:
            slope = (_bounded(strain) - _bounded(before[1][i])) / (here[0] - before[0])
        steps.append(-_bounded(strain) / min(max(slope, LEAST_SLOPE), MOST_SLOPE))
    return min(steps)


def _between(low: Trial, high: Trial, width: float) -> float:
    """The next trial: offset by half the precision from the estimated limit towards the farther end, and not close to
    an end."""
    gap, share = high[0] - low[0], _share(low, high)
    at = low[0] + share * gap + (width / 2 if share < 0.5 else -width / 2)
    return min(max(at, low[0] + EDGE * gap), high[0] - EDGE * gap)


def _share(low: Trial, high: Trial) -> float:
    """The estimated position of the first limit, as a share of the interval."""
    pairs = [(_bounded(under), _bounded(over)) for under, over in zip(low[1], high[1], strict=True) if over > 0]
    return min(-under / (over - under) for under, over in pairs)


def _bounded(strain: float) -> float:
    return min(max(strain, -MOST), MOST)
