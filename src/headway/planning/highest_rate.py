"""The highest rate that is served in time, in few trials, each of which is a simulation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log

Strains = Sequence[float]
"""Logarithms of how near each limit is at a rate: 0 at it, more beyond. The number and order are always the same."""
Trial = tuple[float, Strains]
"""The logarithm of a rate, and what was found there."""
MOST = log(4.0)
"""Beyond it, either way, a strain says little about how far away the limit is."""
FARTHEST = log(1.35)
"""A step may go, while nothing is known on the other side."""
LEAST_SLOPE, SLOPE, MOST_SLOPE = 2.0, 4.0, 20.0
"""Of a strain over the logarithm of the rate: bounds, and what is taken before two trials tell it."""
EDGE = 0.25
"""Of an interval, that a trial keeps away from either end."""


def highest(strains: Callable[[float], Strains], start: float, floor: float, ceiling: float, precision: float) -> float:
    """The rate at which the first strain rises above 0, to within `precision`.

    Strains are taken to be straight lines over the logarithm of the rate. The answer is where they cross 0: between
    two trials that are `precision` apart, or next to one that is so near that the slope hardly matters. Each trial is
    set half the precision to one side of where they seem to cross, so that two are enough where that is right.
    0: not even `floor` will do; at `ceiling` the search ends.
    """
    width, lowest, uppermost = log(precision), log(floor), log(ceiling)
    at = min(max(log(start), lowest), uppermost)
    low: Trial | None = None
    high: Trial | None = None
    before: Trial | None = None
    while True:
        here = (at, strains(exp(at)))
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
        at = _beyond(here, before, width) if low is None or high is None else _between(low, high, width)
        before, at = here, min(max(at, lowest), uppermost)


def _beyond(here: Trial, before: Trial | None, width: float) -> float:
    """On the other side of the first limit, as seen from one side."""
    step = _step(here, before) + (width / 2 if max(here[1]) <= 0 else -width / 2)
    return here[0] + min(max(step, -FARTHEST), FARTHEST)


def _step(here: Trial, before: Trial | None) -> float:
    """To the first limit."""
    steps = []
    for i, strain in enumerate(here[1]):
        slope = SLOPE
        if before is not None:
            slope = (_bounded(strain) - _bounded(before[1][i])) / (here[0] - before[0])
        steps.append(-_bounded(strain) / min(max(slope, LEAST_SLOPE), MOST_SLOPE))
    return min(steps)


def _between(low: Trial, high: Trial, width: float) -> float:
    """Half a precision off where the first limit is, towards the farther end; never close to an end."""
    gap, share = high[0] - low[0], _share(low, high)
    at = low[0] + share * gap + (width / 2 if share < 0.5 else -width / 2)
    return min(max(at, low[0] + EDGE * gap), high[0] - EDGE * gap)


def _share(low: Trial, high: Trial) -> float:
    """Of the way between the two, where the first limit is."""
    pairs = [(_bounded(under), _bounded(over)) for under, over in zip(low[1], high[1], strict=True) if over > 0]
    return min(-under / (over - under) for under, over in pairs)


def _bounded(strain: float) -> float:
    return min(max(strain, -MOST), MOST)
