"""Inter-token latencies of many sets of requests at once.

The records are read in two passes. The first pass counts gaps into bins; the counts give the bins in which the
percentiles of each set lie. The second pass collects the gaps in these bins. So no data is kept per stretch, and the
ticks of a replica are computed twice, whatever the number of sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.core.record import Records
from headway.metrics.columns import Mask, Rows, rows_by_code
from headway.metrics.gaps import GapHistogram, GapRuns, Gaps, QuantileReader, Window, merged, single_gaps
from headway.metrics.latency import QUANTILES, Distribution, gap_distribution
from headway.metrics.tokens import SegmentEnds, TokenSegments, clocks, segment_parts

Codes = npt.NDArray[np.integer]
"""Set number by request id; negative: in no set."""
Key = tuple[int, int]
"""(number of the grouping, number of the set)."""
_MOST_KEPT = 1 << 18
"""Runs of gaps that are kept from the first pass for the second, 24 bytes each."""


@dataclass(frozen=True, slots=True)
class ItlDistributions:
    """Inter-token latencies by set of requests and by replica."""

    groups: dict[Key, Distribution]
    replicas: dict[int, Distribution | None]
    """Gaps within segments only; gaps over preemptions and crashes are excluded."""


def itl_distributions(records: Records, wanted: Mask, groupings: Sequence[Codes]) -> ItlDistributions:
    """Distributions for the requests in the mask `wanted`, by replica and by the sets of each grouping."""
    segments = TokenSegments(records.segments, wanted)
    ends = SegmentEnds(segments)
    histograms: dict[Key, GapHistogram] = {}
    kept = _KeptRuns()
    replicas: dict[int, Distribution | None] = {}
    for replica, clock in clocks(records.stretches):
        rows = segments.by_replica.get(replica)
        if rows is None:
            continue
        ends.add(clock, replica)
        here = Gaps(segment_parts(clock, segments, rows))
        replicas[replica] = gap_distribution(here)
        for key, set_rows in _rows_by_set(segments, rows, groupings).items():
            histogram = histograms.setdefault(key, GapHistogram())
            if set_rows is None:
                histogram.add(here.histogram)
                kept.add(key, here.parts)
            else:
                parts = segment_parts(clock, segments, set_rows)
                for each in parts:
                    histogram.count(each)
                kept.add(key, parts)
    over = _resumed(ends, groupings)
    for key, each in over.items():
        histograms.setdefault(key, GapHistogram()).count(each)
    quantiles = {key: QuantileReader(each, QUANTILES) for key, each in histograms.items() if each.total}
    if kept.is_whole:
        kept.read(quantiles)
    else:
        _read_near(records, segments, groupings, quantiles)
    for key in quantiles.keys() & over.keys():
        quantiles[key].read(over[key])
    groups = {
        key: Distribution(histograms[key].total, histograms[key].mean_s, *reader.values_s().tolist())
        for key, reader in quantiles.items()
    }
    return ItlDistributions(groups, replicas)


class _KeptRuns:
    """The gaps of the first pass by set, unless there are many: then the second pass computes them again."""

    def __init__(self) -> None:
        self.is_whole = True
        self._num_runs = 0
        self._by_set: dict[Key, list[GapRuns]] = {}

    def add(self, key: Key, parts: Sequence[GapRuns]) -> None:
        self._num_runs += sum(len(each[0]) for each in parts)
        self.is_whole = self._num_runs <= _MOST_KEPT
        if self.is_whole:
            self._by_set.setdefault(key, []).extend(parts)
        else:
            self._by_set.clear()

    def read(self, quantiles: dict[Key, QuantileReader]) -> None:
        for key, parts in self._by_set.items():
            if key in quantiles:
                for each in merged(parts):
                    quantiles[key].read(each)


def _rows_by_set(segments: TokenSegments, rows: Rows, groupings: Sequence[Codes]) -> dict[Key, Rows | None]:
    """The rows of a replica's segments by set; None: all rows."""
    request = segments.table["request"][rows]
    by_set: dict[Key, Rows | None] = {}
    for which, group in enumerate(groupings):
        code = group[request]
        is_one = len(code) > 0 and code.min() == code.max()
        codes = code[:1].tolist() if is_one else np.unique(code).tolist()
        for one in codes:
            if one >= 0:
                by_set[which, one] = None if len(codes) == 1 else rows[code == one]
    return by_set


def _resumed(ends: SegmentEnds, groupings: Sequence[Codes]) -> dict[Key, GapRuns]:
    """Gaps over preemptions and crashes, by set."""
    gaps_s, requests = ends.resumptions()
    by_set: dict[Key, GapRuns] = {}
    for which, group in enumerate(groupings):
        code = group[requests]
        by_set |= {(which, one): single_gaps(gaps_s[rows]) for one, rows in rows_by_code(code, code >= 0).items()}
    return by_set


def _read_near(
    records: Records, segments: TokenSegments, groupings: Sequence[Codes], quantiles: dict[Key, QuantileReader]
) -> None:
    """The second pass: read the gaps near the quantiles of each set."""
    for replica, clock in clocks(records.stretches):
        rows = segments.by_replica.get(replica)
        if rows is None:
            continue
        sets = {key: set_rows for key, set_rows in _rows_by_set(segments, rows, groupings).items() if key in quantiles}
        near = clock.near(_disjoint([window for key in sets for window in quantiles[key].windows.values()]))
        for key, set_rows in sets.items():
            for each in merged(segment_parts(clock, segments, rows if set_rows is None else set_rows, near)):
                quantiles[key].read(each)


def _disjoint(windows: Sequence[Window]) -> list[Window]:
    """The union of the windows as windows that do not overlap."""
    disjoint: list[Window] = []
    for low_s, high_s in sorted(windows):
        if disjoint and low_s <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(high_s, disjoint[-1][1])
        else:
            disjoint.append((low_s, high_s))
    return disjoint
