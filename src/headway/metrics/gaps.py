"""A large weighted sample of durations, kept as arithmetic runs.

The gaps between the ticks of a stretch are `first, first + step, ...`, and every request in the batch sees each of
them. One run with a weight represents all of these tokens. Percentiles are exact, as for the expanded sample: a
histogram finds the bins that hold a quantile, and only the runs in these bins are expanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

import numpy as np
import numpy.typing as npt

from headway.metrics.columns import Floats, Ints, Mask, ranges

Counts = npt.NDArray[np.int32]
Codes = npt.NDArray[np.generic]
"""A code for each element, such as its replica."""

GapRuns = tuple[Floats, Floats, Counts, Counts]
"""(first, step, count, weight) of some runs. Steps are not negative."""

SHIFT = 40
"""Bits of a double that a bin drops. The mantissa keeps 12 bits, so a bin is 0.025% wide."""
SAMPLES = 8
NARROW = 4
"""Maximum number of bins of a run that is counted as a whole."""
PIECES = 16
"""Number of pieces for longer runs."""
FEW_GAPS = 1 << 12
"""A sample of at most this many durations is expanded completely."""
SHORT_ROWS = 1 << 14
"""Parts with fewer runs are concatenated."""
LOWEST = int(np.float64(2.0**-40).view(np.int64)) >> SHIFT
STARTED, COMPLETED, OVER = range(3)
"""Rows of a histogram: durations of pieces that began in a bin, of pieces that ended in it, and of whole runs that
ended in it."""
MARGIN = 512
"""Bins kept on both sides of the counted bins, because later runs may use them."""
BINS = (int(np.float64(2.0**30).view(np.int64)) >> SHIFT) - LOWEST


class GapHistogram:
    """First pass over a sample: the number of durations in each bin, and their sum."""

    def __init__(self, parts: Iterable[GapRuns] = ()) -> None:
        self.total = 0
        self._sums_s: list[float] = []
        self._waiting: list[GapRuns] = []
        """Runs that are not counted yet: many short parts are counted together, and a small sample is never counted."""
        self._num_waiting = 0
        self._counts = np.zeros((3, 0))
        """Counts by row and bin."""
        self._lowest = 0
        """The first kept bin. A sample lies in few of all bins."""
        for each in parts:
            self.count(each)

    def count(self, runs: GapRuns, part: Codes | None = None) -> None:
        """`part`: a code for each run. The runs of one code are consecutive, and are counted as if each code came in a
        separate call."""
        first, step, count, weight = runs
        if not len(first):
            return
        last = first + step * (count - 1)
        size = count.astype(np.int64) * weight
        self.total += int(size.sum())
        # no dot product, because its rounding may depend on the number of threads
        sums_s = (first + last) / 2 * size
        if part is None or part[0] == part[-1]:
            self._sums_s.append(float(sums_s.sum()))
        else:
            self._sums_s += sums_by_part(sums_s, part)[1].tolist()
        self._wait([runs])

    def _wait(self, parts: Sequence[GapRuns]) -> None:
        self._waiting += parts
        self._num_waiting += sum(len(each[0]) for each in parts)
        if self._num_waiting >= SHORT_ROWS:
            self._put_into_bins()

    def _put_into_bins(self) -> None:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        for each in merged(waiting):
            self._put(each)

    def _put(self, runs: GapRuns) -> None:
        first, step, count, weight = runs
        last = first + step * (count - 1)
        size = count.astype(np.int64) * weight
        from_bin, to_bin = _bins(first), _bins(last)
        self._cover(int(from_bin.min()), int(to_bin.max()) + 1)
        wide = to_bin - from_bin > NARROW
        self._add(OVER, to_bin, size)
        self._add(STARTED, from_bin[~wide], size[~wide])
        self._add(COMPLETED, to_bin[~wide], size[~wide])
        if wide.any():
            self._split(first[wide], step[wide], count[wide].astype(np.int64), weight[wide])

    def _split(self, first: Floats, step: Floats, count: Ints, weight: Counts) -> None:
        """Count runs that span many bins in pieces, so that few values lie in the bins of a quantile."""
        for piece in range(PIECES):
            begin, end = count * piece // PIECES, count * (piece + 1) // PIECES
            size = (end - begin) * weight
            self._add(STARTED, _bins(first + step * begin), size)
            self._add(COMPLETED, _bins(first + step * np.maximum(end - 1, begin)), size)

    def _cover(self, lowest: int, end: int) -> None:
        """Keep the bins `lowest` to `end` in addition to the bins already kept."""
        num = self._counts.shape[1]
        if num and self._lowest <= lowest and end <= self._lowest + num:
            return
        lowest, end = max(lowest - MARGIN, 0), min(end + MARGIN, BINS)
        if num:
            lowest, end = min(lowest, self._lowest), max(end, self._lowest + num)
        counts = np.zeros((3, end - lowest))
        counts[:, self._lowest - lowest : self._lowest - lowest + num] = self._counts
        self._counts, self._lowest = counts, lowest

    def _add(self, row: int, bins: Ints, sizes: Ints) -> None:
        _add(self._counts[row], bins - self._lowest, sizes)

    def add(self, other: GapHistogram) -> None:
        num = other._counts.shape[1]
        if num:
            self._cover(other._lowest, other._lowest + num)
            start = other._lowest - self._lowest
            self._counts[:, start : start + num] += other._counts
        self._sums_s += other._sums_s
        self.total += other.total
        self._wait(other._waiting)

    @property
    def mean_s(self) -> float:
        """The mean; NaN for an empty sample."""
        return fsum(self._sums_s) / self.total if self.total else float("nan")

    def reached(self) -> tuple[int, Ints, Ints, Ints]:
        """The lowest kept bin, and the cumulated counts of each row from this bin on."""
        self._put_into_bins()
        started, completed, over = (each.cumsum().astype(np.int64) for each in self._counts)
        return self._lowest, started, completed, over


Window = tuple[float, float]
"""Range in seconds, without the upper end."""


class QuantileReader:
    """Second pass over a sample: collects the durations in the bins that hold the requested quantiles.

    Interpolates between order statistics, as `numpy.quantile` does on the expanded sample.
    """

    def __init__(self, tally: GapHistogram, fractions: Sequence[float] | Floats) -> None:
        total = tally.total
        lowest, started, completed, over = tally.reached()
        self._position = (total - 1) * np.asarray(fractions, dtype=np.float64)
        self._low = np.floor(self._position).astype(np.int64)
        self._high = np.minimum(self._low + 1, total - 1)
        self._ranks = np.unique(np.concatenate([self._low, self._high]))
        low = (lowest + np.searchsorted(started, self._ranks + 1)).tolist()
        high = (lowest + np.searchsorted(completed, self._ranks + 1)).tolist()
        self._of_rank = list(zip(low, high, strict=True))
        self._before = {(a, b): int(over[a - lowest - 1]) if a > lowest else 0 for a, b in self._of_rank}
        self.windows: dict[tuple[int, int], Window] = {bins: _window_s(*bins) for bins in sorted(self._before)}
        self._collected: dict[tuple[int, int], list[tuple[Floats, Counts | Ints]]] = {bins: [] for bins in self.windows}

    def read(self, runs: GapRuns) -> None:
        """Read runs of the sample. Runs outside all windows may be omitted."""
        if not len(runs[0]):
            return
        for bins, (low_s, high_s) in self.windows.items():
            below, values, weights = _expanded(runs, low_s, high_s)
            self._before[bins] += below
            self._collected[bins].append(_weighted(values, weights) if len(values) > FEW_GAPS else (values, weights))

    def values_s(self) -> Floats:
        """The quantile of each fraction, after all runs were read."""
        values = np.empty(len(self._ranks))
        for bins in self.windows:
            inside = np.array([each == bins for each in self._of_rank])
            values[inside] = self._in_order(bins, self._ranks[inside])
        at_low = values[np.searchsorted(self._ranks, self._low)]
        at_high = values[np.searchsorted(self._ranks, self._high)]
        return np.asarray(at_low + (at_high - at_low) * (self._position - self._low))

    def _in_order(self, bins: tuple[int, int], ranks: Ints) -> Floats:
        """The durations with these ranks, which lie in these bins."""
        values, weights = (np.concatenate(columns) for columns in zip(*self._collected[bins], strict=True))
        order = np.argsort(values)
        reached = self._before[bins] + np.cumsum(weights[order], dtype=np.int64)
        return np.asarray(values[order][np.searchsorted(reached, ranks + 1)])


def _window_s(low: int, high: int) -> Window:
    """The range of bins `low` to `high`. The outermost bins are unbounded."""
    low_s = -np.inf if low == 0 else float(_edges_s(np.array(low)))
    high_s = np.inf if high >= BINS - 1 else float(_edges_s(np.array(high + 1)))
    return low_s, high_s


class Gaps:
    """Runs `first + step*k`, k = 0..count-1, each value `weight` times."""

    def __init__(self, parts: Iterable[GapRuns]) -> None:
        non_empty = [runs for runs in parts if len(runs[0])]
        self.histogram = GapHistogram(non_empty)
        self.parts = merged(non_empty)

    @property
    def total(self) -> int:
        return self.histogram.total

    def quantiles_s(self, fractions: Sequence[float] | Floats) -> Floats:
        """Exact quantiles; NaN for an empty sample."""
        if not self.total:
            return np.full(len(fractions), np.nan)
        if self.total <= FEW_GAPS:
            runs = _concatenated(self.parts)
            of_run, totals = np.zeros(len(runs[0]), np.int64), np.array([self.total])
            return np.asarray(_expanded_quantiles_s(runs, of_run, totals, np.asarray(fractions))[0])
        reader = QuantileReader(self.histogram, fractions)
        for runs in self.parts:
            reader.read(runs)
        return reader.values_s()

    def curve_s(self, fractions: Floats) -> Floats:
        """Approximate quantiles from a histogram of `SAMPLES` values of each run, for charts."""
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


def merged(parts: Iterable[GapRuns]) -> list[GapRuns]:
    """The same runs in fewer parts: each part costs some calls, even a short one."""
    long: list[GapRuns] = []
    short: list[GapRuns] = []
    num_rows = 0
    for each in parts:
        if len(each[0]) >= SHORT_ROWS:
            long.append(each)
            continue
        short.append(each)
        num_rows += len(each[0])
        if num_rows >= SHORT_ROWS:
            long.append(_concatenated(short))
            short, num_rows = [], 0
    return [*long, _concatenated(short)] if short else long


class SmallSamples:
    """Many samples at once: those of at most `FEW_GAPS` durations with a weight, which are expanded."""

    def __init__(self, parts: Sequence[tuple[GapRuns, Codes]]) -> None:
        """`parts`: runs, and the code of each run's sample. The runs of one code are consecutive in a part, and give
        the same results as if each sample were a `Gaps` of its own."""
        code = np.concatenate([codes for _, codes in parts])
        size = np.concatenate([count.astype(np.int64) * weight for (_, _, count, weight), _ in parts])
        codes, of_run = np.unique(code, return_inverse=True)
        totals = np.bincount(of_run, size, len(codes)).astype(np.int64)
        expanded = np.bincount(of_run, np.concatenate([count for (_, _, count, _), _ in parts]), len(codes))
        is_small = expanded <= FEW_GAPS
        self.large = codes[~is_small]
        """Codes of larger samples."""
        self.codes, self.totals, self._expanded = codes[is_small], totals[is_small], expanded[is_small]
        kept = is_small[of_run]
        self._runs = _selected(_concatenated([runs for runs, _ in parts]), kept)
        self._of_run = np.searchsorted(self.codes, code[kept])
        self._sums_s = np.zeros((len(parts), len(self.codes)))
        for each, ((first, step, count, weight), own) in enumerate(parts):
            if len(own):
                sums_s = (first + (first + step * (count - 1))) / 2 * (count.astype(np.int64) * weight)
                found, sums_of = sums_by_part(sums_s, own)
                known = np.isin(found, self.codes)
                self._sums_s[each, np.searchsorted(self.codes, found[known])] = sums_of[known]

    def means_s(self) -> list[float]:
        return [
            fsum(sums_s) / total for sums_s, total in zip(self._sums_s.T.tolist(), self.totals.tolist(), strict=True)
        ]

    def quantiles_s(self, fractions: Sequence[float] | Floats) -> Floats:
        """Exact quantiles, one row for each sample."""
        rows = [np.empty((0, len(fractions)))]
        at, ends = 0, np.cumsum(self._expanded)
        while at < len(ends):
            before = ends[at - 1] if at else 0
            end = max(int(np.searchsorted(ends, before + _MOST_EXPANDED, side="right")), at + 1)
            own = (self._of_run >= at) & (self._of_run < end)
            runs, of_run = _selected(self._runs, own), self._of_run[own] - at
            rows.append(_expanded_quantiles_s(runs, of_run, self.totals[at:end], np.asarray(fractions)))
            at = end
        return np.concatenate(rows)


_MOST_EXPANDED = 1 << 17
"""Maximum number of durations that are expanded at once, beyond one sample."""


def _expanded_quantiles_s(runs: GapRuns, of_run: Ints, totals: Ints, fractions: Floats) -> Floats:
    """Quantiles as from a `QuantileReader`, for samples that are small enough to be expanded: one row for each sample.
    `of_run`: position of each run's sample in `totals`."""
    first, step, counts, weights = runs
    count = counts.astype(np.int64)
    values = np.repeat(first, count) + np.repeat(step, count) * ranges(np.zeros(len(count), np.int64), count)
    order = np.lexsort((values, np.repeat(of_run, count)))
    values, reached = values[order], np.cumsum(np.repeat(weights, count)[order], dtype=np.int64)
    position = (totals[:, None] - 1) * fractions
    low = np.floor(position).astype(np.int64)
    ranks = np.stack([low, np.minimum(low + 1, totals[:, None] - 1)]) + (np.cumsum(totals) - totals)[:, None]
    at_low, at_high = values[np.searchsorted(reached, ranks + 1)]
    return np.asarray(at_low + (at_high - at_low) * (position - low))


def _weighted(values: Floats, weights: Counts) -> tuple[Floats, Ints]:
    """Each value once, with the sum of its weights, so that a sample of few values takes little memory."""
    values, of_value = np.unique(values, return_inverse=True)
    return values, np.bincount(of_value, weights).astype(np.int64)


def _selected(runs: GapRuns, rows: Mask) -> GapRuns:
    first, step, count, weight = runs
    return first[rows], step[rows], count[rows], weight[rows]


def _concatenated(parts: Sequence[GapRuns]) -> GapRuns:
    first, step, count, weight = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return first, step, count, weight


def _expanded(runs: GapRuns, low_s: float, high_s: float) -> tuple[int, Floats, Counts]:
    """(number of durations before, values, weights) of the runs that overlap [low_s, high_s)."""
    first, step, count, weight = runs
    rows = np.flatnonzero((first < high_s) & (first + step * (count - 1) >= low_s))
    first, step, count, weight = first[rows], step[rows], count[rows], weight[rows]
    slope = np.where(step > 0, step, 1.0)
    with np.errstate(over="ignore"):
        to_low, to_high = (np.where(step > 0, (at - first) / slope, 0.0) for at in (low_s, high_s))
    # one extra value on either side, so that rounding loses none
    begin = np.clip(np.floor(to_low) - 1, 0, count).astype(np.int64)
    end = np.clip(np.floor(to_high) + 2, begin, count).astype(np.int64)
    end = np.where(step > 0, end, count)
    lengths = end - begin
    k = ranges(begin, lengths)
    values = np.repeat(first, lengths) + np.repeat(step, lengths) * k
    return int((begin * weight).sum()), values, np.repeat(weight, lengths)


def gap_runs(first: Floats, step: Floats, count: Ints, weight: Ints) -> GapRuns:
    """Prepare runs for `Gaps`: drop runs without weight, and reverse descending runs."""
    keep = (weight > 0) & (count > 0)
    first, step = first[keep].astype(np.float64), step[keep].astype(np.float64)
    counts, weights = count[keep].astype(np.int32), weight[keep].astype(np.int32)
    falling = step < 0
    if falling.any():
        first = np.where(falling, first + step * (counts - 1), first)
        step = np.abs(step)
    return first, step, counts, weights


def single_gaps(values: Floats, weight: Ints | None = None) -> GapRuns:
    """Single durations, each `weight` times (once, if None). A weight of 0 drops the duration."""
    if weight is not None:
        keep = weight > 0
        values, weights = values[keep], weight[keep].astype(np.int32)
    else:
        weights = np.broadcast_to(np.int32(1), len(values))
    return values, np.broadcast_to(0.0, len(values)), np.broadcast_to(np.int32(1), len(values)), weights


def sums_by_part(values: Floats, part: Codes) -> tuple[Codes, Floats]:
    """The codes, and the sum of the values of each code, rounded like the sum of a separate array (so without
    `np.add.reduceat`)."""
    starts = np.flatnonzero(np.append(True, part[1:] != part[:-1]))
    lengths = np.diff(np.append(starts, len(part)))
    sums = np.empty(len(starts))
    for length in np.unique(lengths).tolist():
        of_length = lengths == length
        sums[of_length] = values[starts[of_length][:, None] + np.arange(length)].sum(axis=1)
    return part[starts], sums


def _bins(values: Floats) -> Ints:
    """Bin numbers. The leading bits of a positive double grow with its value."""
    bits = np.maximum(values, 0.0).view(np.int64) >> SHIFT
    return np.clip(bits - LOWEST, 0, BINS - 1, out=bits)


def _edges_s(bins: npt.NDArray[np.integer]) -> Floats:
    return ((bins.astype(np.int64) + LOWEST) << SHIFT).view(np.float64)


def _add(histogram: Floats, bins: Ints, sizes: Floats | Ints | Counts) -> None:
    if not len(bins):
        return
    lowest = int(bins.min())
    counts = np.bincount(bins - lowest, sizes)
    histogram[lowest : lowest + len(counts)] += counts
