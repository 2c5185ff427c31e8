"""Inter-token latencies of many sets of requests at once.

The records are read twice. The first reading counts gaps into bins, and from the counts follows in which bins the
percentiles of each set lie; the second picks out what lies in these. So nothing is kept of a stretch, of which there
are several for each request, and a replica's ticks are worked out twice, however many sets there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.core.record import Records
from headway.metrics.columns import Mask, Rows
from headway.metrics.gaps import Gaps, Part, Quantiles, Tally, Window, single
from headway.metrics.latency import FRACTIONS, Distribution, gap_distribution
from headway.metrics.tokens import Ends, Stays, clocks, stay_parts

Codes = npt.NDArray[np.integer]
"""A set by request id; negative: in none."""
Key = tuple[int, int]
"""(which grouping, set)."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """What was asked for."""

    groups: dict[Key, Distribution]
    replicas: dict[int, Distribution | None]
    """Within the stays at each: gaps over preemptions and crashes are left out."""


def latencies(records: Records, wanted: Mask, groupings: Sequence[Codes]) -> Latencies:
    """Of the requests `wanted`, by replica and by the sets of each grouping."""
    stays = Stays(records.segments, wanted)
    ends = Ends(stays)
    tallies: dict[Key, Tally] = {}
    replicas: dict[int, Distribution | None] = {}
    for replica, clock in clocks(records.stretches):
        rows = stays.by_replica.get(replica)
        if rows is None:
            continue
        ends.note(clock, replica)
        here = Gaps(stay_parts(clock, stays, rows))
        replicas[replica] = gap_distribution(here)
        for key, some in _sets(stays, rows, groupings).items():
            tally = tallies.setdefault(key, Tally())
            if some is None:
                tally.add(here.tally)
            else:
                for each in stay_parts(clock, stays, some):
                    tally.count(each)
    over = _resumed(ends, groupings)
    for key, each in over.items():
        tallies.setdefault(key, Tally()).count(each)
    return Latencies(_second(records, stays, groupings, tallies, over), replicas)


def _sets(stays: Stays, rows: Rows, groupings: Sequence[Codes]) -> dict[Key, Rows | None]:
    """The sets to which a replica's stays belong, with the rows of each; None: all of them."""
    request = stays.segments["request"][rows]
    found: dict[Key, Rows | None] = {}
    for which, group in enumerate(groupings):
        code = group[request]
        codes = np.unique(code).tolist()
        for one in codes:
            if one >= 0:
                found[which, one] = None if len(codes) == 1 else rows[code == one]
    return found


def _resumed(ends: Ends, groupings: Sequence[Codes]) -> dict[Key, Part]:
    """Gaps over preemptions and crashes, by set."""
    gaps_s, requests = ends.resumptions()
    found: dict[Key, Part] = {}
    for which, group in enumerate(groupings):
        code = group[requests]
        for one in np.unique(code[code >= 0]).tolist():
            found[which, one] = single(gaps_s[code == one])
    return found


def _second(
    records: Records, stays: Stays, groupings: Sequence[Codes], tallies: dict[Key, Tally], over: dict[Key, Part]
) -> dict[Key, Distribution]:
    """The second reading."""
    quantiles = {key: Quantiles(tally, (*FRACTIONS, 1.0)) for key, tally in tallies.items() if tally.total}
    for replica, clock in clocks(records.stretches):
        rows = stays.by_replica.get(replica)
        if rows is None:
            continue
        sets = {key: some for key, some in _sets(stays, rows, groupings).items() if key in quantiles}
        near = clock.near(_apart([window for key in sets for window in quantiles[key].windows.values()]))
        for key, some in sets.items():
            for each in stay_parts(clock, stays, rows if some is None else some, near):
                quantiles[key].read(each)
    for key in quantiles.keys() & over.keys():
        quantiles[key].read(over[key])
    return {key: _distribution(tallies[key], found) for key, found in quantiles.items()}


def _distribution(tally: Tally, found: Quantiles) -> Distribution:
    p50, p90, p95, p99, top = found.values_s().tolist()
    return Distribution(tally.total, tally.mean_s, p50, p90, p95, p99, top)


def _apart(windows: Sequence[Window]) -> list[Window]:
    """The same seconds in windows that do not overlap."""
    found: list[Window] = []
    for low_s, high_s in sorted(windows):
        if found and low_s <= found[-1][1]:
            found[-1] = found[-1][0], max(high_s, found[-1][1])
        else:
            found.append((low_s, high_s))
    return found
