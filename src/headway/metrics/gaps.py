"""A large weighted sample of durations, kept as arithmetic runs.

The gaps between the ticks of a stretch are `first, first + step, ...`, and every request in the batch sees
each of them. One run with a weight stands for all of these tokens; percentiles are exact, as of the sample
written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headway.metrics.columns import Floats, Ints

LONGEST_RUN = 16
"""Longer runs are cut, so that few of them straddle a quantile."""

Part = tuple[Floats, Floats, npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""(first, step, count, weight) of some runs."""


class Gaps:
    """Runs `first + step*k`, k = 0..count-1, each value `weight` times. Steps are not negative."""

    def __init__(self, parts: Iterable[Part]) -> None:
        first, step, count, weight = _cut(_concatenated(list(parts)))
        order = np.argsort(first)
        self.first, self.step = first[order], step[order]
        self.count, self.weight = count[order], weight[order]
        del first, step, count, weight, order
        last = self.first + self.step * (self.count - 1)
        sizes = self.count.astype(np.int64) * self.weight
        self.started: Ints = np.cumsum(sizes)
        self.widest_s = float((last - self.first).max()) if len(last) else 0.0
        if self.widest_s > 0.0:
            order = np.argsort(last)
            self.last, self.completed = last[order], np.cumsum(sizes[order])
        else:
            self.last, self.completed = self.first, self.started

    @property
    def total(self) -> int:
        """How many durations there are."""
        return int(self.started[-1]) if len(self.started) else 0

    def mean_s(self) -> float:
        """NaN for an empty sample."""
        if not self.total:
            return float("nan")
        count = self.count.astype(np.float64)
        sums = count * self.first + self.step * (count * (count - 1) / 2)
        return float(np.dot(sums, self.weight)) / self.total

    def quantiles_s(self, fractions: Sequence[float] | Floats) -> Floats:
        """Interpolated between order statistics, as `numpy.quantile` does on the sample written out."""
        if not self.total:
            return np.full(len(fractions), np.nan)
        position = (self.total - 1) * np.asarray(fractions, dtype=np.float64)
        low = np.floor(position).astype(np.int64)
        high = np.minimum(low + 1, self.total - 1)
        ranks = np.unique(np.concatenate([low, high]))
        values = np.array([self._order_statistic(int(rank)) for rank in ranks])
        at_low, at_high = values[np.searchsorted(ranks, low)], values[np.searchsorted(ranks, high)]
        return np.asarray(at_low + (at_high - at_low) * (position - low))

    def _order_statistic(self, rank: int) -> float:
        """The duration with `rank` others before it."""
        wanted = rank + 1
        low = float(self.first[np.searchsorted(self.started, wanted)])
        high = float(self.last[np.searchsorted(self.completed, wanted)])
        if low >= high:
            return high
        return self._between(low, high, wanted)

    def _between(self, low: float, high: float, wanted: int) -> float:
        """Write out only the runs that reach into [low, high], which holds the wanted duration."""
        below = int(np.searchsorted(self.last, low))
        before = int(self.completed[below - 1]) if below else 0
        near = slice(
            int(np.searchsorted(self.first, low - 2 * self.widest_s)),
            int(np.searchsorted(self.first, high, side="right")),
        )
        rows = np.flatnonzero(self.first[near] + self.step[near] * (self.count[near] - 1) >= low) + near.start
        count = self.count[rows]
        values = np.repeat(self.first[rows], count) + np.repeat(self.step[rows], count) * _ramps(count)
        weights = np.repeat(self.weight[rows], count)
        order = np.argsort(values)
        reached = before + np.cumsum(weights[order], dtype=np.int64)
        return float(values[order][np.searchsorted(reached, wanted)])


def part(first: Floats, step: Floats, count: Ints, weight: Ints) -> Part:
    """Runs in the types that `Gaps` keeps: those without weight left out, falling ones turned round."""
    keep = (weight > 0) & (count > 0)
    first, step = first[keep].astype(np.float64), step[keep].astype(np.float64)
    counts, weights = count[keep].astype(np.int32), weight[keep].astype(np.int32)
    falling = step < 0
    if falling.any():
        first = np.where(falling, first + step * (counts - 1), first)
        step = np.abs(step)
    return first, step, counts, weights


def single(values: Floats) -> Part:
    """Durations that occur once each."""
    ones = np.ones(len(values), dtype=np.int32)
    return values, np.zeros(len(values)), ones, ones


def _concatenated(parts: list[Part]) -> Part:
    if not parts:
        empty = np.empty(0, dtype=np.int32)
        return np.empty(0), np.empty(0), empty, empty
    first, step, count, weight = zip(*parts, strict=True)
    return np.concatenate(first), np.concatenate(step), np.concatenate(count), np.concatenate(weight)


def _cut(runs: Part) -> Part:
    first, step, count, weight = runs
    long = np.flatnonzero(count > LONGEST_RUN)
    if not len(long):
        return runs
    pieces = -(-count[long] // LONGEST_RUN)
    offset = _ramps(pieces) * LONGEST_RUN
    counts = np.minimum(np.repeat(count[long], pieces) - offset, LONGEST_RUN).astype(np.int32)
    steps = np.repeat(step[long], pieces)
    firsts = np.repeat(first[long], pieces) + steps * offset
    short = count <= LONGEST_RUN
    return (
        np.concatenate([first[short], firsts]),
        np.concatenate([step[short], steps]),
        np.concatenate([count[short], counts]),
        np.concatenate([weight[short], np.repeat(weight[long], pieces)]),
    )


def _ramps(counts: npt.NDArray[np.int32]) -> Ints:
    """0..n-1 for each n, one after the other."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)
