"""Requests of a running or killed run: the parts on disk, read as a trace.

A part is a folder `parts/NUMBER` with three tables, written atomically: `arrivals` (arrived requests), `requests` and
`segments` (as in `core.record`). Ids and times are the gateway's own: times are seconds since its start, and the
metadata has the wall-clock time of the start. A gateway that was killed and restarted with the same folder leaves parts
of several runs, whose requests follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct
from pyarrow import compute, parquet

from headway.core.errors import HeadwayError
from headway.core.record import (
    DURATIONS,
    LONGEST_GAP,
    NUM_SEQUENCES,
    OPTIONAL_COLUMNS,
    REQUEST_ID,
    RESUMED,
    Columns,
    ReplicaRecord,
)
from headway.workload.readers.shared import REQUESTS
from headway.workload.table import LENGTH, NAMED, QUALITY, Workload, default_of, dtype_of

METADATA = b"headway"
"""Key of Headway's own metadata in a Parquet file."""
FOLDER = "parts"
TABLES = ("arrivals", "requests", "segments")
_NUMBER = re.compile(r"\d{6,}")
_BY_MODEL = pa.list_(pa.struct([("model", pa.string()), ("value", pa.float64())]))
ARRIVAL_FIELDS = pa.schema([
    ("request", pa.int64()), ("arrival_s", pa.float64()), ("prompt_tokens", pa.int32()), ("output_tokens", pa.int32()),
    ("model", pa.string()), ("tier", pa.int16()), ("reasoning_tokens", pa.int32()), ("region", pa.string()),
    ("session_id", pa.int64()), ("slo_ttft_s", pa.float64()), ("slo_tpot_s", pa.float64()), ("tenant", pa.string()),
    ("scores", _BY_MODEL), ("lengths", _BY_MODEL), ("lora", pa.string()), (REQUEST_ID, pa.string()),
    (LONGEST_GAP, pa.float64()), (RESUMED, pa.float64()), (NUM_SEQUENCES, pa.int32()),
])  # fmt: skip
"""The row of an arrived request. `scores` and `lengths` are those of a cascade's answers, by model. Control does not
know the columns of seconds after the request's id, which are outcomes."""
_LATER_TEXTS, _LATER_SECONDS = ("tenant", "lora", REQUEST_ID), (LONGEST_GAP, RESUMED)
"""Columns that parts of older versions lack, as they lack `num_sequences`."""
_OF_REQUESTS = (*_LATER_SECONDS, NUM_SEQUENCES)
"""Columns of the records' `requests`, not of a workload."""
ByModel = tuple[tuple[str, float], ...]
Arrival = tuple[
    int, float, int, int, str, int, int, str, int, float, float, str, ByModel, ByModel, str, str, float, float, int
]
Tables = dict[str, pa.Table]
_MAX_RUN = 1 << 40
"""Largest number of requests of a run. The number of a run and the id of a request are combined into one number."""


class RunState(Struct, frozen=True):
    """The state of the part's run when the part was written."""

    started_s: float
    """Wall-clock time at the gateway's time 0."""
    end_s: float
    judge_usd: float
    replicas: tuple[ReplicaRecord, ...]
    num_lost: int = 0
    """Requests so far for which no record could be written."""
    first: int = 0
    """Number of the first part that was merged into this one; 0 if no parts were merged."""
    provenance: dict[str, Any] = {}


def numbers(folder: Path) -> list[int]:
    """The numbers of the parts in a records folder, in order."""
    parts = folder / FOLDER
    return sorted(int(each.name) for each in parts.iterdir() if _NUMBER.fullmatch(each.name)) if parts.is_dir() else []


def read_all(folder: Path) -> list[tuple[Tables, RunState]]:
    """The parts in a records folder, in order. Raises HeadwayError for a damaged part."""
    parts: list[tuple[Tables, RunState]] = []
    covered_from: int | None = None
    for number in reversed(numbers(folder)):
        if covered_from is not None and number >= covered_from:
            continue  # it was merged into the next part, and not deleted in time
        tables = _read(folder / FOLDER / f"{number:06d}")
        state = _state(folder, tables["requests"])
        parts.append((tables, state))
        covered_from = state.first or number
    return parts[::-1]


def _read(part: Path) -> Tables:
    try:
        return {name: parquet.read_table(part / f"{name}.parquet", memory_map=False) for name in TABLES}
    except (pa.ArrowException, OSError) as error:
        raise HeadwayError(f"{part}: cannot be read as a part of records ({str(error).splitlines()[0]})") from None


def _state(folder: Path, table: pa.Table) -> RunState:
    try:
        return msgspec.json.decode((table.schema.metadata or {})[METADATA], type=RunState)
    except (KeyError, msgspec.MsgspecError):
        raise HeadwayError(f"{folder / FOLDER}: not the parts of a run") from None


# From parts to a trace.


@dataclass(frozen=True)
class Arrivals:
    """The requests of all parts in order of their arrival. Time starts with the first."""

    workload: Workload
    ids: npt.NDArray[np.int64]
    """Ids that the other tables of `JoinedParts` use."""
    first_s: float
    """Time of the first arrival, on the clock of `JoinedParts`."""
    outcomes: dict[str, npt.NDArray[Any]]
    """Columns of `requests` that parts keep with the arrivals."""
    request_ids: pa.ChunkedArray


class JoinedParts:
    """The parts of one or more runs on one clock, with unique ids."""

    def __init__(self, parts: Sequence[tuple[Tables, RunState]]) -> None:
        self._parts = [
            ({**tables, "arrivals": _with_later_columns(tables["arrivals"])}, state) for tables, state in parts
        ]
        runs = list(dict.fromkeys(state.started_s for _, state in parts))
        last = {state.started_s: state for _, state in parts}
        self.runs = [last[run] for run in runs]
        """Each run's state in its last part."""
        self.offsets_s = _offsets_s(self.runs)
        """Start of each run on the common clock."""
        self._of_run = [runs.index(state.started_s) for _, state in parts]

    def columns(self, name: str, bases: Sequence[int], *left_out: str) -> Columns:
        """One table of all parts, with ids, times and replicas made unique across runs.

        `bases`: number of replicas in all earlier runs.
        """
        each = [
            _numbered(_numpy(tables[name], left_out), run, self.offsets_s[run], bases[run])
            for (tables, _), run in zip(self._parts, self._of_run, strict=True)
        ]
        for more in OPTIONAL_COLUMNS if name == "requests" else ():
            if any(more in one for one in each):  # some runs may not have the column
                each = [{**one, more: one.get(more, np.zeros(len(one["request"]), np.int8))} for one in each]
        return {column: np.concatenate([one[column] for one in each]) for column in each[0]}

    def arrivals(self) -> Arrivals:
        found = self.columns("arrivals", [0] * len(self.runs), *NAMED, "scores", "lengths", REQUEST_ID)
        order = np.argsort(found["request"], kind="stable")
        table = pa.concat_tables([tables["arrivals"] for tables, _ in self._parts])
        outcomes = {name: found.pop(name)[order] for name in _OF_REQUESTS}
        workload = _workload(found, table, order)
        first_s = float(workload.pop("first_s"))
        ids: npt.NDArray[np.int64] = found["request"][order].astype(np.int64)
        request_ids = table[REQUEST_ID].take(pa.array(order))
        return Arrivals(Workload(**workload).validate(), ids, first_s, outcomes, request_ids)


def is_under_way(path: Path) -> bool:
    """Whether a folder has parts of a run and no files of an ended run."""
    return not (path / REQUESTS).is_file() and bool(numbers(path))


def read_requests(folder: Path) -> Workload:
    """Read the requests of a running or killed run. Raises HeadwayError for a damaged part."""
    return JoinedParts(read_all(folder)).arrivals().workload


def began_s(parts: Sequence[tuple[Tables, RunState]]) -> float | None:
    """The wall-clock time of the first arrival; None without arrivals."""
    arrivals_s = [
        state.started_s + compute.min(tables["arrivals"]["arrival_s"]).as_py()
        for tables, state in parts
        if tables["arrivals"].num_rows
    ]
    return min(arrivals_s, default=None)


def _with_later_columns(arrivals: pa.Table) -> pa.Table:
    """Arrivals with empty columns in place of those that an older version did not write."""
    for names, kind, nothing in (
        (_LATER_TEXTS, pa.string(), ""),
        (_LATER_SECONDS, pa.float64(), float("nan")),
        ((NUM_SEQUENCES,), pa.int32(), 0),
    ):
        for name in names:
            if name not in arrivals.column_names:
                arrivals = arrivals.append_column(name, pa.repeat(pa.scalar(nothing, kind), len(arrivals)))
    return arrivals.select(ARRIVAL_FIELDS.names)


def _offsets_s(runs: Sequence[RunState]) -> list[float]:
    """Start of each run in seconds since the first run's start, never before the end of the previous run, whatever the
    wall clock said."""
    offsets = [0.0]
    for before, run in pairwise(runs):
        offsets.append(max(run.started_s - runs[0].started_s, offsets[-1] + before.end_s))
    return offsets


def _numpy(table: pa.Table, left_out: Sequence[str]) -> Columns:
    return {name: table[name].to_numpy() for name in table.column_names if name not in left_out}


def _numbered(columns: Columns, run: int, offset_s: float, base: int) -> Columns:
    """Columns with numbers that are unique across runs, and times on one clock."""
    changed: Columns = dict(columns)
    changed["request"] = columns["request"].astype(np.int64) + run * _MAX_RUN
    for name, column in columns.items():
        if name.endswith("_s") and not name.startswith("slo_") and name not in DURATIONS:
            changed[name] = column.astype(np.float64) + offset_s
    if "replica" in columns:
        replica = columns["replica"].astype(np.int32)
        changed["replica"] = np.where(replica < 0, replica, replica + base)
    return changed


def _workload(arrivals: Columns, table: pa.Table, order: npt.NDArray[np.intp]) -> dict[str, Any]:
    """Arguments of `Workload`, and `first_s`, the first arrival."""
    arrival_s = arrivals["arrival_s"][order].astype(np.float64)
    first_s = float(arrival_s[0]) if len(arrival_s) else 0.0
    columns: dict[str, Any] = {
        name: column[order] for name, column in arrivals.items() if name not in ("request", "arrival_s")
    }
    columns["arrival_s"] = np.maximum.accumulate(arrival_s - first_s) if len(arrival_s) else arrival_s
    named: dict[str, tuple[str, ...]] = {}
    for name, attribute in NAMED.items():
        coded = table[name].combine_chunks().dictionary_encode()
        coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
        names = tuple(coded.dictionary.to_pylist())
        if name in ("tenant", "lora") and not any(names):
            continue
        columns[name], named[attribute] = coded.indices.to_numpy()[order], names
    for field, prefix in (("scores", QUALITY), ("lengths", LENGTH)):
        columns |= _by_model(table[field], prefix, order)
    return {"columns": columns, **named, "first_s": first_s}


def _by_model(column: pa.ChunkedArray, prefix: str, order: npt.NDArray[np.intp]) -> Columns:
    """The columns `quality:MODEL` or `output_tokens:MODEL`, from the answers of each model."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    rows = np.repeat(
        np.arange(len(lists)), compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    )
    values = lists.flatten()
    position = np.empty(len(lists), np.intp)
    position[order] = np.arange(len(lists))
    found: Columns = {}
    for row, each in zip(position[rows].tolist(), values.to_pylist(), strict=True):
        name = prefix + each["model"]
        if name not in found:
            found[name] = np.full(len(lists), default_of(name), dtype=dtype_of(name))
        found[name][row] = each["value"]
    return found
