"""A large weighted sample of durations, kept as arithmetic runs.

The gaps between the ticks of a stretch are `first, first + step, ...`, and every request in the batch sees
each of them. One run with a weight stands for all of these tokens. Percentiles are exact, as of the sample
written out: a histogram finds the bins that hold a quantile, and only what lies in these is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headway.metrics.columns import Floats, Ints

Counts = npt.NDArray[np.int32]

Part = tuple[Floats, Floats, Counts, Counts]
"""(first, step, count, weight) of some runs. Steps are not negative."""

SHIFT = 40
"""Bits of a double that a bin leaves out: 12 bits of the mantissa stay, so a bin is 0.025% wide."""
SAMPLES = 8
SHORT_ROWS = 1 << 14
"""Parts with fewer runs are put together."""
LOWEST = int(np.float64(2.0**-40).view(np.int64)) >> SHIFT
BINS = (int(np.float64(2.0**30).view(np.int64)) >> SHIFT) - LOWEST


class Gaps:
    """Runs `first + step*k`, k = 0..count-1, each value `weight` times."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = [found for found in parts if len(found[0])]
        self.sum_s = 0.0
        started, completed = np.zeros(BINS), np.zeros(BINS)
        for first, step, count, weight in self.parts:
            size = count.astype(np.float64) * weight
            last = first + step * (count - 1)
            self.sum_s += float(np.dot((first + last) / 2, size))
            _add(started, _bins(first), size)
            _add(completed, _bins(last), size)
        self.parts = _joined(self.parts)
        self._started: Ints = np.cumsum(started).astype(np.int64)
        self._completed: Ints = np.cumsum(completed).astype(np.int64)

    @property
    def total(self) -> int:
        """How many durations there are."""
        return int(self._started[-1])

    def mean_s(self) -> float:
        """NaN for an empty sample."""
        return self.sum_s / self.total if self.total else float("nan")

    def quantiles_s(self, fractions: Sequence[float] | Floats) -> Floats:
        """Interpolated between order statistics, as `numpy.quantile` does on the sample written out."""
        if not self.total:
            return np.full(len(fractions), np.nan)
        position = (self.total - 1) * np.asarray(fractions, dtype=np.float64)
        low = np.floor(position).astype(np.int64)
        high = np.minimum(low + 1, self.total - 1)
        ranks = np.unique(np.concatenate([low, high]))
        values = self._order_statistics(ranks)
        at_low, at_high = values[np.searchsorted(ranks, low)], values[np.searchsorted(ranks, high)]
        return np.asarray(at_low + (at_high - at_low) * (position - low))

    def curve_s(self, fractions: Floats) -> Floats:
        """Quantiles off a histogram of `SAMPLES` values of each run: near enough for a chart, and quick."""
        if not self.total:
            return np.full(len(fractions), np.nan)
        histogram = np.zeros(BINS)
        for first, step, count, weight in self.parts:
            alone = count == 1
            _add(histogram, _bins(first[alone]), weight[alone])
            first, step, several, weight = (column[~alone] for column in (first, step, count, weight))
            size = several * (weight / SAMPLES)
            for k in range(SAMPLES):
                _add(histogram, _bins(first + step * ((several - 1) * (k + 0.5) / SAMPLES)), size)
        reached = np.cumsum(histogram)
        wanted = np.clip(np.asarray(fractions) * reached[-1], 0.5, reached[-1] - 0.5)
        index = np.searchsorted(reached, wanted)
        return (_edges_s(index) + _edges_s(index + 1)) / 2

    def _order_statistics(self, ranks: Ints) -> Floats:
        """The durations with this many others before them."""
        low = np.searchsorted(self._started, ranks + 1)
        high = np.searchsorted(self._completed, ranks + 1)
        values = np.empty(len(ranks))
        for window in sorted(set(zip(low.tolist(), high.tolist(), strict=True))):
            inside = (low == window[0]) & (high == window[1])
            values[inside] = self._within(*window, ranks[inside])
        return values

    def _within(self, low: int, high: int, ranks: Ints) -> Floats:
        """Write out what lies in bins `low` to `high`, which hold the durations of these ranks."""
        low_s = -np.inf if low == 0 else float(_edges_s(np.array(low)))
        high_s = np.inf if high >= BINS - 1 else float(_edges_s(np.array(high + 1)))
        before = int(self._completed[low - 1]) if low else 0
        found = [_written_out(part, low_s, high_s) for part in self.parts]
        before += sum(below for below, _, _ in found)
        values = np.concatenate([v for _, v, _ in found])
        weights = np.concatenate([w for _, _, w in found])
        order = np.argsort(values)
        reached = before + np.cumsum(weights[order], dtype=np.int64)
        return np.asarray(values[order][np.searchsorted(reached, ranks + 1)])


def _joined(parts: Sequence[Part]) -> list[Part]:
    """The same runs in fewer parts, as each costs some calls however short it is; what is long stays as it is."""
    found: list[Part] = []
    short: list[Part] = []
    num_rows = 0
    for each in parts:
        if len(each[0]) >= SHORT_ROWS:
            found.append(each)
            continue
        short.append(each)
        num_rows += len(each[0])
        if num_rows >= SHORT_ROWS:
            found.append(_in_one(short))
            short, num_rows = [], 0
    return [*found, _in_one(short)] if short else found


def _in_one(parts: Sequence[Part]) -> Part:
    first, step, count, weight = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return first, step, count, weight


def _written_out(runs: Part, low_s: float, high_s: float) -> tuple[int, Floats, Counts]:
    """(how many come before, values, weights) of the runs that reach into [low_s, high_s)."""
    first, step, count, weight = runs
    rows = np.flatnonzero((first < high_s) & (first + step * (count - 1) >= low_s))
    first, step, count, weight = first[rows], step[rows], count[rows], weight[rows]
    slope = np.where(step > 0, step, 1.0)
    with np.errstate(over="ignore"):
        to_low, to_high = (np.where(step > 0, (at - first) / slope, 0.0) for at in (low_s, high_s))
    # One value more on either side than the division says, so that rounding loses none.
    begin = np.clip(np.floor(to_low) - 1, 0, count).astype(np.int64)
    end = np.clip(np.floor(to_high) + 2, begin, count).astype(np.int64)
    end = np.where(step > 0, end, count)
    lengths = end - begin
    k = _ramps(lengths) + np.repeat(begin, lengths)
    values = np.repeat(first, lengths) + np.repeat(step, lengths) * k
    return int(np.dot(begin, weight)), values, np.repeat(weight, lengths)


def part(first: Floats, step: Floats, count: Ints, weight: Ints) -> Part:
    """Runs as `Gaps` takes them: those without weight left out, falling ones turned round."""
    keep = (weight > 0) & (count > 0)
    first, step = first[keep].astype(np.float64), step[keep].astype(np.float64)
    counts, weights = count[keep].astype(np.int32), weight[keep].astype(np.int32)
    falling = step < 0
    if falling.any():
        first = np.where(falling, first + step * (counts - 1), first)
        step = np.abs(step)
    return first, step, counts, weights


def single(values: Floats, weight: Ints | None = None) -> Part:
    """Durations on their own, each `weight` times (once, if None). A weight of 0 leaves one out."""
    if weight is not None:
        keep = weight > 0
        values, weights = values[keep], weight[keep].astype(np.int32)
    else:
        weights = np.broadcast_to(np.int32(1), len(values))
    return values, np.broadcast_to(0.0, len(values)), np.broadcast_to(np.int32(1), len(values)), weights


def _bins(values: Floats) -> Ints:
    """A positive double's leading bits grow with its value."""
    bits = np.maximum(values, 0.0).view(np.int64) >> SHIFT
    return np.clip(bits - LOWEST, 0, BINS - 1, out=bits)


def _edges_s(bins: npt.NDArray[np.integer]) -> Floats:
    """The lower edges."""
    return ((bins.astype(np.int64) + LOWEST) << SHIFT).view(np.float64)


def _add(histogram: Floats, bins: Ints, sizes: Floats | Counts) -> None:
    if not len(bins):
        return
    lowest = int(bins.min())
    counts = np.bincount(bins - lowest, sizes)
    histogram[lowest : lowest + len(counts)] += counts


def _ramps(lengths: Ints) -> Ints:
    """0..n-1 for each n, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) - np.repeat(ends - lengths, lengths))
