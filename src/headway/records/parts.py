"""Records of a running run, as parts on disk, and their conversion into the records of an ended run.

`workload.readers.run_parts` defines and reads parts. `join` concatenates the requests of several runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, structs
from pyarrow import compute, parquet

from headway.core.errors import HeadwayError
from headway.core.record import MOVE_COLUMNS, RESUMED, STRETCH_COLUMNS, Columns, Records, ReplicaRecord
from headway.records import parquet as parquet_files
from headway.records.folder import BEGAN_S, set_aside
from headway.workload.readers import run_parts
from headway.workload.readers.run_parts import (
    ARRIVAL_FIELDS,
    FOLDER,
    METADATA,
    TABLES,
    Arrival,
    JoinedParts,
    RunState,
    Tables,
    read_all,
)

_BATCH_ROWS = 1 << 16


class Rows(Struct, frozen=True):
    """Ended requests, and segments since the last part."""

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


def write(folder: Path, number: int, tables: Tables, state: RunState) -> None:
    """Write a part. Raises OSError if the part cannot be written; then no file of the part remains."""
    with _new_part(folder, number) as beside:
        for name, table in tables.items():
            described = table.replace_schema_metadata(_metadata(state))
            parquet.write_table(described, beside / f"{name}.parquet", compression="zstd")


def combine(folder: Path, chosen: Sequence[int], state: RunState) -> None:
    """Merge several parts of one run. Takes as much memory as one part. OSError or ArrowException if they cannot be
    read or written; the parts then stay unchanged."""
    sources = [folder / FOLDER / f"{number:06d}" for number in chosen]
    with _new_part(folder, chosen[-1] + 1) as beside:
        for name in TABLES:
            _concatenate([each / f"{name}.parquet" for each in sources], beside / f"{name}.parquet", state, chosen[0])
    for each in sources:
        shutil.rmtree(each, ignore_errors=True)


def _concatenate(sources: Sequence[Path], target: Path, state: RunState, first: int) -> None:
    """Write the rows of one table of several parts. Arrow's own threads are not used, because they would keep memory
    for their lifetime."""
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
    """The records of all parts in a records folder; None if there is none. Raises HeadwayError for a damaged part."""
    parts = read_all(folder)
    return assemble(parts) if parts else None


def snapshot(folder: Path, target: Path, last_s: float) -> None:
    """Write the requests of the last seconds of a running run, as the records of an ended run.

    Raises HeadwayError if the folder has no parts, or a damaged one.
    """
    found = read_all(folder)
    if not found:
        raise HeadwayError(f"{folder}: no run is under way there: it has no {FOLDER}/")
    from_s = max(state.started_s + state.end_s for _, state in found) - last_s
    kept = [
        (
            {
                **tables,
                "arrivals": tables["arrivals"].filter(
                    compute.greater_equal(tables["arrivals"]["arrival_s"], from_s - state.started_s)
                ),
            },
            state,
        )
        for tables, state in found
    ]
    parquet_files.save(assemble(kept), target, _provenance(kept))


def load(folder: Path) -> tuple[Records, dict[str, Any]]:
    """(records, provenance) of a folder: of an ended run, or of a run that left parts. Raises HeadwayError for a
    missing or damaged file.
    """
    found = read_all(folder)
    return (assemble(found), _provenance(found)) if found else parquet_files.load(folder)


def _provenance(found: Sequence[tuple[Tables, RunState]]) -> dict[str, Any]:
    """The provenance of the last part, with the wall-clock time of the first arrival."""
    began_s = run_parts.began_s(found)
    return dict(found[-1][1].provenance) | ({} if began_s is None else {BEGAN_S: began_s})


def finish(folder: Path) -> Records | None:
    """Replace the parts in a records folder by the files of an ended run; None if there are no parts.

    Files of an earlier run are set aside. Raises HeadwayError if nothing can be written: the parts stay.
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


# From parts to records.


def assemble(parts: Sequence[tuple[Tables, RunState]]) -> Records:
    """The records of all parts, in their order. Requests are numbered by arrival, and time 0 is the first arrival."""
    joined = JoinedParts(parts)
    bases = list(accumulate((len(run.replicas) for run in joined.runs), initial=0))
    arrived, last = joined.arrivals(), joined.runs[-1]
    done, first_s = arrived.workload, arrived.first_s
    replicas = [
        _shifted(each, base, offset_s)
        for run, base, offset_s in zip(joined.runs, bases, joined.offsets_s, strict=False)
        for each in run.replicas
    ]
    requests = _rows_of(arrived.ids, joined.columns("requests", bases), first_s)
    has_ids = compute.any(compute.not_equal(arrived.request_ids, "")).as_py()
    for name, column in arrived.outcomes.items():
        requests[name] = (column - first_s if name == RESUMED else column)[requests["request"]]
    return Records(
        workload=done.columns,
        models=done.models,
        regions=done.regions,
        tenants=done.tenants,
        loras=done.loras,
        requests=requests,
        segments=_rows_of(arrived.ids, joined.columns("segments", bases), first_s),
        stretches=no_rows(STRETCH_COLUMNS),
        moves=no_rows(MOVE_COLUMNS),
        replicas=tuple(replicas),
        end_s=joined.offsets_s[-1] + last.end_s - first_s,
        judge_usd=last.judge_usd,
        request_ids=arrived.request_ids if has_ids else None,
    )


def no_rows(names: Sequence[str]) -> Columns:
    """A table without rows, because an engine's iterations and copies are unknown."""
    return {name: np.empty(0, np.float64 if name.endswith("_s") else np.int32) for name in names}


def _rows_of(ids: npt.NDArray[np.int64], rows: Columns, first_s: float) -> Columns:
    """The rows of the requests `ids`, sorted by their positions, with times since `first_s`."""
    known = np.isin(rows["request"], ids)
    found: Columns = {name: column[known] for name, column in rows.items()}
    found["request"] = np.searchsorted(ids, found["request"].astype(np.int64))
    for name in found:
        if name.endswith("_s"):
            found[name] = found[name].astype(np.float64) - first_s
    return found


def _shifted(replica: ReplicaRecord, base: int, offset_s: float) -> ReplicaRecord:
    def moved(spans: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        return tuple((start_s + offset_s, end_s + offset_s) for start_s, end_s in spans)

    names = ("up", "down", "for_prefill", "for_decode")
    spans: Mapping[str, Any] = {name: moved(getattr(replica, name)) for name in names}
    return structs.replace(replica, id=replica.id + base, **spans)
