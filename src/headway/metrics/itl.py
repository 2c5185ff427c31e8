"""Inter-token latencies of many sets of requests at once.

The records are read in two passes. The first pass counts gaps into bins; the counts give the bins in which the
percentiles of each set lie. The second pass collects the gaps in these bins. No data is kept per stretch, and the ticks
of a replica are computed twice for any number of sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headway.core.record import Records
from headway.metrics.columns import Mask, Rows, rows_by_code
from headway.metrics.gaps import Codes, GapHistogram, GapRuns, QuantileReader, Window, merged, single_gaps
from headway.metrics.latency import QUANTILES, Distribution, gap_distributions
from headway.metrics.tokens import (
    NearRows,
    SegmentEnds,
    TickClock,
    TokenSegments,
    joint_clocks,
    segment_parts,
    tick_span,
)

SetCodes = npt.NDArray[np.integer]
"""Set number by request id; negative means in no set."""
Key = tuple[int, int]
"""(number of the grouping, number of the set)."""
_MOST_KEPT = 1 << 18
"""Gap runs that the first pass keeps for the second, 24 bytes each."""


def itl_distributions(records: Records, wanted: Mask, groupings: Sequence[SetCodes]) -> dict[Key, Distribution]:
    """Distributions for the requests in the mask `wanted`, for each set of each grouping."""
    span = tick_span(records)
    segments = TokenSegments(records.segments, wanted, span)
    ends = SegmentEnds(segments)
    histograms: dict[Key, GapHistogram] = {}
    kept = _KeptRuns()
    for replicas, clock in joint_clocks(records.stretches, span):
        rows = segments.during(replicas, clock)
        if not len(rows):
            continue
        ends.add(clock, replicas)
        for set_rows, keys in _rows_by_set(segments, rows, groupings):
            here, parts = GapHistogram(), segment_parts(clock, segments, set_rows)
            for runs, replica in parts:
                here.count(runs, replica)
            for key in keys:
                histograms.setdefault(key, GapHistogram()).add(here)
                kept.add(key, [runs for runs, _ in parts if len(runs[0])])
    over = _resumed(ends, groupings)
    for key, each in over.items():
        histograms.setdefault(key, GapHistogram()).count(each)
    quantiles = {key: QuantileReader(each, QUANTILES) for key, each in histograms.items() if each.total}
    if kept.is_whole:
        kept.read(quantiles)
    else:
        _read_near(records, segments, groupings, quantiles, span)
    for key in quantiles.keys() & over.keys():
        quantiles[key].read(over[key])
    return {key: _distribution(histograms[key], reader) for key, reader in quantiles.items()}


def itl_by_replica(records: Records, wanted: Mask) -> dict[int, Distribution | None]:
    """Distributions for the requests in the mask `wanted`, by replica. Only gaps within segments count, not gaps over
    preemptions and crashes."""
    span = tick_span(records)
    segments = TokenSegments(records.segments, wanted, span)
    found: dict[int, Distribution | None] = {}
    histograms: dict[int, GapHistogram] = {}
    """Of replicas with too many stretches to read at once."""
    for replicas, clock in joint_clocks(records.stretches, span):
        present = [replica for replica in replicas if replica in segments.by_replica]
        parts = _replica_parts(segments, clock, present)
        if clock.is_whole:
            found |= dict.fromkeys(present)
            found |= gap_distributions(parts)
        for replica in () if clock.is_whole else present:
            histogram = histograms.setdefault(replica, GapHistogram())
            for runs, _ in parts:
                histogram.count(runs)
    readers = {replica: QuantileReader(each, QUANTILES) for replica, each in histograms.items() if each.total}
    for replicas, clock in joint_clocks(records.stretches, span) if readers else ():
        for replica in () if clock.is_whole else readers.keys() & set(replicas):
            near = clock.near(_disjoint(list(readers[replica].windows.values())))
            for runs, _ in _replica_parts(segments, clock, [replica], near):
                readers[replica].read(runs)
    return found | {replica: _distribution(histograms[replica], reader) for replica, reader in readers.items()}


def _replica_parts(
    segments: TokenSegments, clock: TickClock, replicas: Sequence[int], near: NearRows | None = None
) -> list[tuple[GapRuns, Codes]]:
    rows = segments.during(replicas, clock)
    return segment_parts(clock, segments, rows, near)


def _distribution(histogram: GapHistogram, reader: QuantileReader) -> Distribution:
    return Distribution(histogram.total, histogram.mean_s, *reader.values_s().tolist())


class _KeptRuns:
    """The first pass's gaps by set. If there are too many, the second pass computes them again."""

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


def _rows_by_set(
    segments: TokenSegments, rows: Rows, groupings: Sequence[SetCodes]
) -> Iterator[tuple[Rows, list[Key]]]:
    """The rows of each set, with the set's (grouping, code). All sets that contain every row share one entry."""
    request = segments.table["request"][rows]
    whole: list[Key] = []
    for which, group in enumerate(groupings):
        code = group[request]
        if code.min() == code.max():
            if code[0] >= 0:
                whole.append((which, int(code[0])))
            continue
        for one in np.unique(code).tolist():
            if one >= 0:
                yield rows[code == one], [(which, one)]
    if whole:
        yield rows, whole


def _resumed(ends: SegmentEnds, groupings: Sequence[SetCodes]) -> dict[Key, GapRuns]:
    """Gaps over preemptions and crashes, by set."""
    gaps_s, requests = ends.resumptions()
    by_set: dict[Key, GapRuns] = {}
    for which, group in enumerate(groupings):
        code = group[requests]
        by_set |= {(which, one): single_gaps(gaps_s[rows]) for one, rows in rows_by_code(code, code >= 0).items()}
    return by_set


def _read_near(
    records: Records,
    segments: TokenSegments,
    groupings: Sequence[SetCodes],
    quantiles: dict[Key, QuantileReader],
    span: int,
) -> None:
    """The second pass: read the gaps near the quantiles of each set."""
    for replicas, clock in joint_clocks(records.stretches, span):
        rows = segments.during(replicas, clock)
        if not len(rows):
            continue
        for set_rows, keys in _rows_by_set(segments, rows, groupings):
            known = [key for key in keys if key in quantiles]
            near = clock.near(_disjoint([window for key in known for window in quantiles[key].windows.values()]))
            for each in merged(runs for runs, _ in segment_parts(clock, segments, set_rows, near)):
                for key in known:
                    quantiles[key].read(each)


def _disjoint(windows: Sequence[Window]) -> list[Window]:
    """The union of the windows as disjoint windows."""
    disjoint: list[Window] = []
    for low_s, high_s in sorted(windows):
        if disjoint and low_s <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(high_s, disjoint[-1][1])
        else:
            disjoint.append((low_s, high_s))
    return disjoint
