"""Records of a run that is under way, as parts on disk, and how they become the records of a run that has ended.

A part is a folder `parts/NUMBER` with three tables, written whole or not at all: `arrivals` (requests as they arrived),
`requests` and `segments` (as in `core.record`). Ids and times are the gateway's own: times are seconds since its start,
and the metadata has the wall-clock time of the start. Gateways that were killed and started again with one folder leave
parts of several runs. `join` puts their requests one after the other.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, structs
from pyarrow import compute, parquet

from headway.core.errors import HeadwayError
from headway.core.record import (
    DURATIONS,
    LONGEST_GAP,
    MOVE_COLUMNS,
    OPTIONAL_COLUMNS,
    REQUEST_ID,
    RESUMED,
    STRETCH_COLUMNS,
    Columns,
    Records,
    ReplicaRecord,
)
from headway.records import parquet as parquet_files
from headway.records.folder import BEGAN_S, set_aside
from headway.records.parquet import METADATA
from headway.workload.table import LENGTH, NAMED, QUALITY, Workload, default_of, dtype_of

FOLDER = "parts"
_TABLES = ("arrivals", "requests", "segments")
_NUMBER = re.compile(r"\d{6,}")
_BY_MODEL = pa.list_(pa.struct([("model", pa.string()), ("value", pa.float64())]))
ARRIVAL_FIELDS = pa.schema([
    ("request", pa.int64()), ("arrival_s", pa.float64()), ("prompt_tokens", pa.int32()), ("output_tokens", pa.int32()),
    ("model", pa.string()), ("tier", pa.int16()), ("reasoning_tokens", pa.int32()), ("region", pa.string()),
    ("session_id", pa.int64()), ("slo_ttft_s", pa.float64()), ("slo_tpot_s", pa.float64()), ("tenant", pa.string()),
    ("scores", _BY_MODEL), ("lengths", _BY_MODEL), ("lora", pa.string()), (REQUEST_ID, pa.string()),
    (LONGEST_GAP, pa.float64()), (RESUMED, pa.float64()),
])  # fmt: skip
"""A request as it arrived; `scores` and `lengths` are those of a cascade's answers, by model. The last two columns are
outcomes that control does not know."""
_LATER_TEXTS, _LATER_SECONDS = ("tenant", "lora", REQUEST_ID), (LONGEST_GAP, RESUMED)
"""Columns that parts of older versions lack."""
ByModel = tuple[tuple[str, float], ...]
Arrival = tuple[
    int, float, int, int, str, int, int, str, int, float, float, str, ByModel, ByModel, str, str, float, float
]
Tables = dict[str, pa.Table]
_BATCH_ROWS = 1 << 16
_MAX_RUN = 1 << 40
"""Requests of one run, at most: run and id make one number."""


class RunState(Struct, frozen=True):
    """The run that a part is of, at the time of the part."""

    started_s: float
    """Wall-clock time at the gateway's time 0."""
    end_s: float
    judge_usd: float
    replicas: tuple[ReplicaRecord, ...]
    num_lost: int = 0
    """Requests of which no record could be written so far."""
    first: int = 0
    """Number of the first of the parts that this one is made of; 0: it is one of its own."""
    provenance: dict[str, Any] = {}


class Rows(Struct, frozen=True):
    """Requests that have ended, and the segments since the last part."""

    arrivals: list[Arrival]
    requests: Columns
    segments: Columns
    state: RunState

    def tables(self) -> Tables:
        columns = list(zip(*self.arrivals, strict=True)) or [()] * len(ARRIVAL_FIELDS)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, ARRIVAL_FIELDS, strict=True)]
        return {
            "arrivals": pa.Table.from_arrays(arrays, schema=ARRIVAL_FIELDS),
            "requests": pa.table({name: np.ascontiguousarray(column) for name, column in self.requests.items()}),
            "segments": pa.table({name: np.ascontiguousarray(column) for name, column in self.segments.items()}),
        }


def numbers(folder: Path) -> list[int]:
    """The numbers of the parts in a records folder, in order."""
    parts = folder / FOLDER
    return sorted(int(each.name) for each in parts.iterdir() if _NUMBER.fullmatch(each.name)) if parts.is_dir() else []


def write(folder: Path, number: int, tables: Tables, state: RunState) -> None:
    """Write a part. OSError if it cannot be written; then nothing of it is left."""
    with _new_part(folder, number) as beside:
        for name, table in tables.items():
            described = table.replace_schema_metadata(_metadata(state))
            parquet.write_table(described, beside / f"{name}.parquet", compression="zstd")


def combine(folder: Path, chosen: Sequence[int], state: RunState) -> None:
    """Make one part of several of the same run, with the memory of one of them. OSError or ArrowException if they
    cannot be read or written; then the parts stay as they were."""
    sources = [folder / FOLDER / f"{number:06d}" for number in chosen]
    with _new_part(folder, chosen[-1] + 1) as beside:
        for name in _TABLES:
            _concatenate([each / f"{name}.parquet" for each in sources], beside / f"{name}.parquet", state, chosen[0])
    for each in sources:
        shutil.rmtree(each, ignore_errors=True)


def _concatenate(sources: Sequence[Path], target: Path, state: RunState, first: int) -> None:
    """Write the rows of one table of several parts. Arrow's own threads would keep memory for as long as they live."""
    schema = parquet.read_schema(sources[0]).with_metadata(_metadata(structs.replace(state, first=first)))
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for source in sources:
            with parquet.ParquetFile(source, pre_buffer=False) as file:
                for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                    writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _metadata(state: RunState) -> dict[bytes, bytes]:
    return {METADATA: msgspec.json.encode(state)}


@contextmanager
def _new_part(folder: Path, number: int) -> Iterator[Path]:
    """A folder that becomes the part at the end of the block, unless the block fails."""
    parts = folder / FOLDER
    parts.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=parts, prefix=".writing-"))
    try:
        yield beside
        os.replace(beside, parts / f"{number:06d}")
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def join(folder: Path) -> Records | None:
    """The records of all parts in a records folder; None if there is none. HeadwayError for a damaged part."""
    parts = read_all(folder)
    return assemble(parts) if parts else None


def snapshot(folder: Path, target: Path, last_s: float) -> None:
    """Write the requests that arrived in the last seconds of a run under way, as the records of a run that has ended.

    HeadwayError if the folder has no parts, or a damaged one.
    """
    found = read_all(folder)
    if not found:
        raise HeadwayError(f"{folder}: no run is under way there: it has no {FOLDER}/")
    from_s = max(state.started_s + state.end_s for _, state in found) - last_s
    kept = [
        (
            {**tables, "arrivals": tables["arrivals"].filter(
                compute.greater_equal(tables["arrivals"]["arrival_s"], from_s - state.started_s)
            )},
            state,
        )
        for tables, state in found
    ]  # fmt: skip
    parquet_files.save(assemble(kept), target, _provenance(kept))


def read_all(folder: Path) -> list[tuple[Tables, RunState]]:
    """The parts in a records folder, in order. HeadwayError for a damaged part."""
    parts: list[tuple[Tables, RunState]] = []
    covered_from: int | None = None
    for number in reversed(numbers(folder)):
        if covered_from is not None and number >= covered_from:
            continue  # it was made a part of the one after it, and not deleted in time
        tables = _read(folder / FOLDER / f"{number:06d}")
        state = _state(folder, tables["requests"])
        parts.append((tables, state))
        covered_from = state.first or number
    return parts[::-1]


def load(folder: Path) -> tuple[Records, dict[str, Any]]:
    """The records in a folder and their provenance, of a run that has ended or of one that left parts.

    HeadwayError for a missing or damaged file.
    """
    found = read_all(folder)
    return (assemble(found), _provenance(found)) if found else parquet_files.load(folder)


def _provenance(found: Sequence[tuple[Tables, RunState]]) -> dict[str, Any]:
    """That of the last part, with the wall-clock time of the first arrival."""
    provenance = dict(found[-1][1].provenance)
    arrivals_s = [state.started_s + compute.min(tables["arrivals"]["arrival_s"]).as_py()
                  for tables, state in found if tables["arrivals"].num_rows]  # fmt: skip
    if arrivals_s:
        provenance[BEGAN_S] = min(arrivals_s)
    return provenance


def finish(folder: Path) -> Records | None:
    """Replace the parts in a records folder by the files of a run that has ended; None if there are no parts.

    Files of an earlier run are set aside. HeadwayError if nothing can be written: the parts stay.
    """
    found = read_all(folder)
    if not found:
        return None
    records = assemble(found)
    try:
        set_aside(folder)
    except OSError as error:
        raise HeadwayError(f"{folder}: records cannot be written ({error.strerror or error})") from None
    parquet_files.save(records, folder, _provenance(found))
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return records


def _read(part: Path) -> Tables:
    try:
        return {name: parquet.read_table(part / f"{name}.parquet", memory_map=False) for name in _TABLES}
    except (pa.ArrowException, OSError) as error:
        raise HeadwayError(f"{part}: cannot be read as a part of records ({str(error).splitlines()[0]})") from None


def _state(folder: Path, table: pa.Table) -> RunState:
    try:
        return msgspec.json.decode((table.schema.metadata or {})[METADATA], type=RunState)
    except (KeyError, msgspec.MsgspecError):
        raise HeadwayError(f"{folder / FOLDER}: not the parts of a run") from None


# From parts to records.


def assemble(parts: Sequence[tuple[Tables, RunState]]) -> Records:
    """The records of all parts, in their order. Requests are numbered by arrival, and time starts with the first."""
    parts = [({**tables, "arrivals": _with_later_columns(tables["arrivals"])}, state) for tables, state in parts]
    runs = list(dict.fromkeys(state.started_s for _, state in parts))
    last = {state.started_s: state for _, state in parts}
    offsets = _offsets_s([last[run] for run in runs])
    bases = list(accumulate((len(last[run].replicas) for run in runs), initial=0))
    of_run = [runs.index(state.started_s) for _, state in parts]

    def columns(name: str, *left_out: str) -> Columns:
        """One table of all parts: ids with their run, times and replicas of all runs."""
        each = [_numbered(_numpy(tables[name], left_out), run, offsets[run], bases[run])
                for (tables, _), run in zip(parts, of_run, strict=True)]  # fmt: skip
        for more in OPTIONAL_COLUMNS if name == "requests" else ():
            if any(more in one for one in each):  # some runs may not have had it
                each = [{**one, more: one.get(more, np.zeros(len(one["request"]), np.int8))} for one in each]
        return {column: np.concatenate([one[column] for one in each]) for column in each[0]}

    arrivals = columns("arrivals", *NAMED, "scores", "lengths", REQUEST_ID)
    order = np.argsort(arrivals["request"], kind="stable")
    table = pa.concat_tables([tables["arrivals"] for tables, _ in parts])
    later = {name: arrivals.pop(name)[order].astype(np.float64) for name in _LATER_SECONDS}
    workload = _workload(arrivals, table, order)
    first_s = float(workload.pop("first_s"))
    ids: npt.NDArray[np.int64] = arrivals["request"][order].astype(np.int64)
    end_s = offsets[-1] + last[runs[-1]].end_s - first_s
    replicas = [_shifted(each, bases[i], offsets[i]) for i, run in enumerate(runs) for each in last[run].replicas]
    done = Workload(**workload).validate()
    requests, request_ids = _rows_of(ids, columns("requests"), first_s), table[REQUEST_ID].take(pa.array(order))
    has_ids = compute.any(compute.not_equal(request_ids, "")).as_py()
    for name, column in later.items():
        requests[name] = (column if name in DURATIONS else column - first_s)[requests["request"]]
    return Records(
        workload=done.columns, models=done.models, regions=done.regions, tenants=done.tenants,
        loras=done.loras,
        requests=requests, segments=_rows_of(ids, columns("segments"), first_s),
        stretches=no_rows(STRETCH_COLUMNS), moves=no_rows(MOVE_COLUMNS), replicas=tuple(replicas), end_s=end_s,
        judge_usd=last[runs[-1]].judge_usd, request_ids=request_ids if has_ids else None,
    )  # fmt: skip


def _with_later_columns(arrivals: pa.Table) -> pa.Table:
    """Arrivals with the columns that an older version did not write, empty."""
    for names, kind, nothing in ((_LATER_TEXTS, pa.string(), ""), (_LATER_SECONDS, pa.float64(), float("nan"))):
        for name in names:
            if name not in arrivals.column_names:
                arrivals = arrivals.append_column(name, pa.repeat(pa.scalar(nothing, kind), len(arrivals)))
    return arrivals.select(ARRIVAL_FIELDS.names)


def no_rows(names: Sequence[str]) -> Columns:
    """A table without rows: an engine's iterations and copies are unknown."""
    return {name: np.empty(0, np.float64 if name.endswith("_s") else np.int32) for name in names}


def _offsets_s(runs: Sequence[RunState]) -> list[float]:
    """When each run began, in seconds since the first one's start; not before the end of the one before, whatever the
    wall clock said."""
    offsets = [0.0]
    for before, run in pairwise(runs):
        offsets.append(max(run.started_s - runs[0].started_s, offsets[-1] + before.end_s))
    return offsets


def _numpy(table: pa.Table, left_out: Sequence[str]) -> Columns:
    return {name: table[name].to_numpy() for name in table.column_names if name not in left_out}


def _numbered(columns: Columns, run: int, offset_s: float, base: int) -> Columns:
    """Columns with numbers that are unique among all runs, and times on one clock."""
    changed: Columns = dict(columns)
    changed["request"] = columns["request"].astype(np.int64) + run * _MAX_RUN
    for name, column in columns.items():
        if name.endswith("_s") and not name.startswith("slo_") and name not in DURATIONS:
            changed[name] = column.astype(np.float64) + offset_s
    if "replica" in columns:
        replica = columns["replica"].astype(np.int32)
        changed["replica"] = np.where(replica < 0, replica, replica + base)
    return changed


def _rows_of(ids: npt.NDArray[np.int64], rows: Columns, first_s: float) -> Columns:
    """The rows of the requests `ids`, in sorted order, by their positions, with times since `first_s`."""
    known = np.isin(rows["request"], ids)
    found: Columns = {name: column[known] for name, column in rows.items()}
    found["request"] = np.searchsorted(ids, found["request"].astype(np.int64))
    for name in found:
        if name.endswith("_s"):
            found[name] = found[name].astype(np.float64) - first_s
    return found


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
    """`quality:MODEL` or `output_tokens:MODEL`, from the answers of each model."""
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


def _shifted(replica: ReplicaRecord, base: int, offset_s: float) -> ReplicaRecord:
    def moved(spans: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        return tuple((start_s + offset_s, end_s + offset_s) for start_s, end_s in spans)

    names = ("up", "down", "for_prefill", "for_decode")
    spans: Mapping[str, Any] = {name: moved(getattr(replica, name)) for name in names}
    return structs.replace(replica, id=replica.id + base, **spans)
