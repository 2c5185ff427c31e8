"""Merges the records of runs of parts of a workload into the records of a single run, bit for bit.

Each part ran on the whole fleet, with the request ids of the whole workload, and used replicas that no other part used.
So its events are the single run's events for these requests, and only the order of rows must be restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.core.column import Column
from headway.core.record import Columns, Prefixes, Records, ReplicaRecord
from headway.sim.row_order import AT_THE_END
from headway.workload.spill import SpillFile
from headway.workload.table import Workload

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BLOCK_ROWS = 1 << 20
"""Approximate number of rows merged at a time."""
TABLES = {"requests": "request", "segments": "replica", "stretches": "replica"}
"""The merged tables -> the column that orders rows written after all events."""


@dataclass(frozen=True)
class PlacedRows:
    """One part's rows of a table: its columns, and each row's time and code as in `row_order`."""

    columns: Columns
    times_s: Floats
    codes: Longs


@dataclass(frozen=True)
class ShardRecords:
    """The records of one part of a workload."""

    tables: Mapping[str, PlacedRows]
    """Maps each table of `TABLES` to the part's rows."""
    moves: Columns
    replicas: tuple[ReplicaRecord, ...]
    num_issued: int
    end_s: float


def merged(parts: Sequence[ShardRecords], workload: Workload, is_cut: bool) -> Records | None:
    """The records of one run. `is_cut`: all parts stopped at the same given time.

    None if the parts cannot tell: an uncut run continues until every part has ended, which matters to a request that
    never ends.
    """
    if any(len(part.moves.get("request", ())) for part in parts):
        return None
    late = (bool((rows.times_s == AT_THE_END).any()) for part in parts for rows in part.tables.values())
    if not is_cut and any(late):
        return None
    tables = {name: _merged_table([part.tables[name] for part in parts], key) for name, key in TABLES.items()}
    issued = workload.head(sum(part.num_issued for part in parts))
    last = max(parts, key=lambda part: part.end_s)
    return Records(
        workload=issued.columns,
        models=issued.models,
        regions=issued.regions,
        tenants=issued.tenants,
        loras=issued.loras,
        requests=tables["requests"],
        segments=tables["segments"],
        stretches=tables["stretches"],
        replicas=last.replicas,
        end_s=last.end_s,
        moves=parts[0].moves,
        prefixes=None if (p := issued.prefix) is None else Prefixes(p.offsets, p.ids, p.tokens),
    )


def _merged_table(parts: Sequence[PlacedRows], key_at_the_end: str) -> Columns:
    codes = [_places(part, key_at_the_end) for part in parts]
    made = {
        name: Column(np.result_type(*[part.columns[name] for part in parts]), SpillFile) for name in parts[0].columns
    }
    for slices in _blocks([part.times_s for part in parts]):
        times_s = np.concatenate([part.times_s[rows] for part, rows in zip(parts, slices, strict=True)])
        code = np.concatenate([each[rows] for each, rows in zip(codes, slices, strict=True)])
        order = np.lexsort((code, times_s))
        for name, column in made.items():
            values = [part.columns[name][rows] for part, rows in zip(parts, slices, strict=True)]
            column.extend(np.concatenate(values)[order])
    return {name: column.values() for name, column in made.items()}


def _places(part: PlacedRows, key_at_the_end: str) -> Longs:
    """The code that orders each row within its instant: the largest so far."""
    times_s, codes = part.times_s, part.codes
    last = np.flatnonzero(times_s == AT_THE_END)
    falling = np.flatnonzero((times_s[1:] == times_s[:-1]) & (codes[1:] < codes[:-1])) + 1
    if not len(last) and not len(falling):
        return codes
    codes = codes.copy()
    codes[last] = part.columns[key_at_the_end][last]
    for i in falling.tolist():
        while i < len(codes) and times_s[i] == times_s[i - 1] < AT_THE_END and codes[i] < codes[i - 1]:
            codes[i] = codes[i - 1]
            i += 1
    return codes


def _blocks(times_s: Sequence[Floats]) -> Iterator[list[slice]]:
    """Rows of each part by time span, in order. Each instant lies within one span."""
    starts = [0] * len(times_s)
    while any(start < len(each) for start, each in zip(starts, times_s, strict=True)):
        bounds = [
            each[start + BLOCK_ROWS]
            for start, each in zip(starts, times_s, strict=True)
            if start + BLOCK_ROWS < len(each)
        ]
        if bounds:
            ends = [int(np.searchsorted(each, min(bounds), "right")) for each in times_s]
        else:
            ends = [len(each) for each in times_s]
        yield [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        starts = ends
