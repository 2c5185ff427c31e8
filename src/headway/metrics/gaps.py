"""A large weighted sample of durations, kept as arithmetic runs.

The gaps between the ticks of a stretch are `first, first + step, ...`, and every request in the batch sees
each of them. One run with a weight stands for all of these tokens. Percentiles are exact, as of the sample
written out: a histogram finds the bins that hold a quantile, and only what lies in these is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

import numpy as np
import numpy.typing as npt

from headway.metrics.columns import Floats, Ints

Counts = npt.NDArray[np.int32]

Part = tuple[Floats, Floats, Counts, Counts]
"""(first, step, count, weight) of some runs. Steps are not negative."""

SHIFT = 40
"""Bits of a double that a bin leaves out: 12 bits of the mantissa stay, so a bin is 0.025% wide."""
SAMPLES = 8
NARROW = 4
"""Bins that a run may reach over and be counted whole."""
PIECES = 16
"""In which longer ones are counted."""
SHORT_ROWS = 1 << 14
"""Parts with fewer runs are put together."""
LOWEST = int(np.float64(2.0**-40).view(np.int64)) >> SHIFT
BINS = (int(np.float64(2.0**30).view(np.int64)) >> SHIFT) - LOWEST


class Tally:
    """What one reading of a sample tells: how many durations lie in each bin, and what they add up to."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._sums_s: list[float] = []
        self._started, self._completed, self._over = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)
        for each in parts:
            self.count(each)

    def count(self, runs: Part) -> None:
        """Some more of the sample."""
        first, step, count, weight = runs
        if not len(first):
            return
        last = first + step * (count - 1)
        size = count.astype(np.int64) * weight
        # Not a dot product, which may round by the number of threads.
        self._sums_s.append(float(((first + last) / 2 * size).sum()))
        from_bin, to_bin = _bins(first), _bins(last)
        wide = to_bin - from_bin > NARROW
        _add(self._over, to_bin, size)
        _add(self._started, from_bin[~wide], size[~wide])
        _add(self._completed, to_bin[~wide], size[~wide])
        if wide.any():
            self._split(first[wide], step[wide], count[wide].astype(np.int64), weight[wide])

    def _split(self, first: Floats, step: Floats, count: Ints, weight: Counts) -> None:
        """Runs over many bins, piece by piece: then few values lie in the bins that a quantile may be in."""
        for piece in range(PIECES):
            begin, end = count * piece // PIECES, count * (piece + 1) // PIECES
            size = (end - begin) * weight
            _add(self._started, _bins(first + step * begin), size)
            _add(self._completed, _bins(first + step * np.maximum(end - 1, begin)), size)

    def add(self, other: Tally) -> None:
        """Another sample is part of this one."""
        self._started += other._started
        self._completed += other._completed
        self._over += other._over
        self._sums_s += other._sums_s

    @property
    def total(self) -> int:
        """How many durations there are."""
        return int(self._started.sum())

    @property
    def mean_s(self) -> float:
        """NaN for an empty sample."""
        return fsum(self._sums_s) / self.total if self.total else float("nan")

    def reached(self) -> tuple[Ints, Ints, Ints]:
        """By bin, the durations of the pieces that begin up to it, of those that end, and of whole runs that end."""
        started, completed, over = (a.cumsum().astype(np.int64) for a in (self._started, self._completed, self._over))
        return started, completed, over


Window = tuple[float, float]
"""Seconds, the upper end not included."""


class Quantiles:
    """The second reading: picks out what lies in the bins that hold the durations asked for.

    Interpolated between order statistics, as `numpy.quantile` does on the sample written out.
    """

    def __init__(self, tally: Tally, fractions: Sequence[float] | Floats) -> None:
        total = tally.total
        started, completed, over = tally.reached()
        self._position = (total - 1) * np.asarray(fractions, dtype=np.float64)
        self._low = np.floor(self._position).astype(np.int64)
        self._high = np.minimum(self._low + 1, total - 1)
        self._ranks = np.unique(np.concatenate([self._low, self._high]))
        low = np.searchsorted(started, self._ranks + 1).tolist()
        high = np.searchsorted(completed, self._ranks + 1).tolist()
        self._of_rank = list(zip(low, high, strict=True))
        self._before = {(a, b): int(over[a - 1]) if a else 0 for a, b in self._of_rank}
        self.windows: dict[tuple[int, int], Window] = {bins: _window_s(*bins) for bins in sorted(self._before)}
        self._found: dict[tuple[int, int], list[tuple[Floats, Counts]]] = {bins: [] for bins in self.windows}

    def read(self, runs: Part) -> None:
        """Some of the sample. What reaches into none of the windows may be left out."""
        if not len(runs[0]):
            return
        for bins, (low_s, high_s) in self.windows.items():
            below, values, weights = _written_out(runs, low_s, high_s)
            self._before[bins] += below
            self._found[bins].append((values, weights))

    def values_s(self) -> Floats:
        """By fraction, once all has been read."""
        values = np.empty(len(self._ranks))
        for bins in self.windows:
            inside = np.array([each == bins for each in self._of_rank])
            values[inside] = self._in_order(bins, self._ranks[inside])
        at_low = values[np.searchsorted(self._ranks, self._low)]
        at_high = values[np.searchsorted(self._ranks, self._high)]
        return np.asarray(at_low + (at_high - at_low) * (self._position - self._low))

    def _in_order(self, bins: tuple[int, int], ranks: Ints) -> Floats:
        """The durations in these bins with so many others before them."""
        values, weights = (np.concatenate(columns) for columns in zip(*self._found[bins], strict=True))
        order = np.argsort(values)
        reached = self._before[bins] + np.cumsum(weights[order], dtype=np.int64)
        return np.asarray(values[order][np.searchsorted(reached, ranks + 1)])


def _window_s(low: int, high: int) -> Window:
    """What bins `low` to `high` hold; the outermost ones hold all beyond them, too."""
    low_s = -np.inf if low == 0 else float(_edges_s(np.array(low)))
    high_s = np.inf if high >= BINS - 1 else float(_edges_s(np.array(high + 1)))
    return low_s, high_s


class Gaps:
    """Runs `first + step*k`, k = 0..count-1, each value `weight` times."""

    def __init__(self, parts: Iterable[Part]) -> None:
        found = [each for each in parts if len(each[0])]
        self.tally = Tally(found)
        self.parts = _joined(found)

    @property
    def total(self) -> int:
        """How many durations there are."""
        return self.tally.total

    def mean_s(self) -> float:
        """NaN for an empty sample."""
        return self.tally.mean_s

    def quantiles_s(self, fractions: Sequence[float] | Floats) -> Floats:
        """Exact; NaN for an empty sample."""
        if not self.total:
            return np.full(len(fractions), np.nan)
        found = Quantiles(self.tally, fractions)
        for each in self.parts:
            found.read(each)
        return found.values_s()

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
    return int((begin * weight).sum()), values, np.repeat(weight, lengths)


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


def _add(histogram: Floats, bins: Ints, sizes: Floats | Ints | Counts) -> None:
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
