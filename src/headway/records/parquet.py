"""Save the records of a run as Parquet files, and load them.

A folder holds five tables. `requests.parquet` is the workload with the outcomes, row i = request i; it is a workload
file, so a run can be replayed. The other tables are as in `core.record`. The metadata of each file has the run's
provenance.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from headway.core.errors import HeadwayError
from headway.core.record import (
    DRAFT_COLUMNS,
    OPTIONAL_COLUMNS,
    REQUEST_COLUMNS,
    REQUEST_ID,
    Columns,
    Prefixes,
    Records,
    ReplicaPower,
    ReplicaRecord,
)
from headway.workload.files import PREFIX_COLUMNS, prefix_lists, read_prefix
from headway.workload.readers.run_parts import METADATA
from headway.workload.table import NAMED

_TOKEN_PRICES = ("usd_per_million_input_tokens", "usd_per_million_output_tokens")
_CACHED_PRICE = "usd_per_million_cached_tokens"
_GROUP_ROWS = 1 << 20
"""Rows that are written at once."""
TABLES = ("requests", "segments", "stretches", "moves", "replicas")
DRAFTS = "drafts"
"""A sixth table, for runs with speculating replicas."""


class RunMetadata(msgspec.Struct, forbid_unknown_fields=True):
    provenance: dict[str, Any]
    end_s: float
    models: tuple[str, ...]
    regions: tuple[str, ...]
    num_rows: dict[str, int]
    judge_usd: float = 0.0
    tenants: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Omitted if no request names its tenant."""
    loras: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Omitted if no request uses an adapter."""


def save(records: Records, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write the tables into `folder`, which is created if missing. Each file is written atomically.

    `provenance` is JSON-like: the scenario's text, seed and version of the run. Raises HeadwayError if the folder
    cannot be written.
    """
    row_of = _row_of_id(records)
    rows: dict[str, tuple[int, Callable[[slice], pa.Table]]] = {
        "requests": (len(row_of), lambda part: _requests_part(records, row_of, part)),
        "segments": _rows_of(records.segments),
        "stretches": _rows_of(records.stretches),
        "moves": _rows_of(records.moves),
        "replicas": (len(records.replicas), lambda part: replicas_table(records.replicas[part])),
    }
    if records.drafts:
        rows[DRAFTS] = _rows_of(records.drafts)
    num_rows = {name: num for name, (num, _) in rows.items()}
    run = RunMetadata(
        dict(provenance),
        records.end_s,
        records.models,
        records.regions,
        num_rows,
        records.judge_usd,
        records.tenants or msgspec.UNSET,
        records.loras or msgspec.UNSET,
    )
    metadata = {METADATA: msgspec.json.encode(run)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as beside:
            for name, (num, part_of) in rows.items():
                _write(Path(beside) / name, num, part_of, metadata)
            for name in rows:
                os.replace(Path(beside) / name, folder / f"{name}.parquet")
    except OSError as error:
        raise HeadwayError(f"{folder}: records cannot be written ({error.strerror or error})") from None


def _rows_of(columns: Columns) -> tuple[int, Callable[[slice], pa.Table]]:
    """The number of rows of a table, and a function that returns some of them."""
    num = len(next(iter(columns.values()), ()))
    return num, lambda part: pa.table({name: column[part] for name, column in columns.items()})


def _write(path: Path, num_rows: int, part_of: Callable[[slice], pa.Table], metadata: dict[bytes, bytes]) -> None:
    """Write a table one group of rows at a time; bounds memory."""
    first = part_of(slice(0, _GROUP_ROWS)).replace_schema_metadata(metadata)
    with parquet.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for start in range(_GROUP_ROWS, num_rows, _GROUP_ROWS):
            writer.write_table(part_of(slice(start, start + _GROUP_ROWS)))


def load(folder: Path) -> tuple[Records, dict[str, Any]]:
    """Load records that `save` wrote, and their provenance. Requests are in order of `end_s`, then of id.

    Raises HeadwayError for a missing or damaged file, or files of different runs.
    """
    tables = {name: _read(folder / f"{name}.parquet") for name in TABLES}
    run = _metadata(folder / "requests.parquet", tables["requests"])
    if DRAFTS in run.num_rows:
        tables[DRAFTS] = _read(folder / f"{DRAFTS}.parquet")
    for name, table in tables.items():
        if _metadata(folder / f"{name}.parquet", table) != run or table.num_rows != run.num_rows[name]:
            raise HeadwayError(f"{folder}: {name}.parquet and requests.parquet are not of the same run")
    requests = tables["requests"]
    workload = {
        name: _codes(requests[name], getattr(run, NAMED[name]) or ()) if name in NAMED else _numpy(requests[name])
        for name in requests.column_names
        if name not in (*REQUEST_COLUMNS, *OPTIONAL_COLUMNS, REQUEST_ID, *PREFIX_COLUMNS)
    }
    prefix = read_prefix(requests)
    records = Records(
        workload=workload,
        models=run.models,
        regions=run.regions,
        tenants=run.tenants or (),
        loras=run.loras or (),
        requests=_outcomes(requests),
        segments={name: _numpy(tables["segments"][name]) for name in tables["segments"].column_names},
        stretches={name: _numpy(tables["stretches"][name]) for name in tables["stretches"].column_names},
        replicas=msgspec.convert(tables["replicas"].to_pylist(), tuple[ReplicaRecord, ...]),
        end_s=run.end_s,
        judge_usd=run.judge_usd,
        moves={name: _numpy(tables["moves"][name]) for name in tables["moves"].column_names},
        drafts={name: _numpy(tables[DRAFTS][name]) for name in DRAFT_COLUMNS} if DRAFTS in tables else {},
        prefixes=None if prefix is None else Prefixes(prefix.offsets, prefix.ids, prefix.tokens),
        request_ids=requests[REQUEST_ID] if REQUEST_ID in requests.column_names else None,
    )
    return records, run.provenance


def requests_table(records: Records) -> pa.Table:
    """The workload's columns and the outcomes; null in rows that were never issued."""
    return _requests_part(records, _row_of_id(records), slice(None))


def _row_of_id(records: Records) -> npt.NDArray[np.signedinteger[Any]]:
    """The row of each request in `records.requests`, by its id; -1 if it was never issued."""
    ids = records.requests["request"]
    found: npt.NDArray[np.signedinteger[Any]]
    found = np.full(len(records.workload["arrival_s"]), -1, np.int32 if len(ids) < 2**31 else np.int64)
    for start in range(0, len(ids), _GROUP_ROWS):
        part = ids[start : start + _GROUP_ROWS]
        found[part] = np.arange(start, start + len(part))
    return found


def _requests_part(records: Records, row_of: npt.NDArray[np.integer], part: slice) -> pa.Table:
    """The requests whose ids are in `part`."""
    arrays: dict[str, pa.Array] = {}
    for name, whole in records.workload.items():
        column = whole[part]
        names = getattr(records, NAMED[name]) if name in NAMED else ()
        codes = pa.array(column.astype(np.int32)) if names else pa.array(column)
        arrays[name] = pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string())) if names else codes
    if records.prefixes is not None:
        arrays |= {name: lists[part] for name, lists in prefix_lists(records.prefixes).items()}
    if records.request_ids is not None:
        arrays[REQUEST_ID] = records.request_ids[part]
    rows = row_of[part]
    absent = rows < 0
    for name in _present(records.requests):
        column = records.requests[name]
        placed = np.zeros(len(rows), dtype=column.dtype)
        placed[~absent] = column[rows[~absent]]
        arrays[name] = pa.array(placed, mask=absent) if absent.any() else pa.array(placed)
    return pa.table(arrays)


def _present(columns: Container[str]) -> list[str]:
    """The columns of outcomes. Optional columns are included only if they are present."""
    return [*REQUEST_COLUMNS, *(name for name in OPTIONAL_COLUMNS if name in columns)]


def replicas_table(replicas: tuple[ReplicaRecord, ...]) -> pa.Table:
    """The replicas. Names, power, and prices of tokens and cached tokens are included only if some replica has them."""
    intervals = pa.list_(pa.list_(pa.float64()))
    kinds: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64(), str: pa.string(), float | None: pa.float64()}
    power = [(each.name, kinds.get(each.type, intervals)) for each in msgspec.structs.fields(ReplicaPower)]
    kinds[ReplicaPower | None] = pa.struct(power)
    is_priced = any(each.usd_per_million_input_tokens or each.usd_per_million_output_tokens for each in replicas)
    left_out = set() if is_priced else {*_TOKEN_PRICES}
    if all(each.usd_per_million_cached_tokens is None for each in replicas):
        left_out.add(_CACHED_PRICE)
    if not any(each.name for each in replicas):
        left_out.add("name")
    if all(each.power is None for each in replicas):
        left_out.add("power")
    fields = [field for field in msgspec.structs.fields(ReplicaRecord) if field.name not in left_out]
    schema = pa.schema([(field.name, kinds.get(field.type, intervals)) for field in fields])
    return pa.Table.from_pylist([msgspec.to_builtins(replica) for replica in replicas], schema=schema)


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        raise HeadwayError(f"{path}: no such file; expected the records of a run")
    try:
        return parquet.read_table(path, memory_map=False)
    except (pa.ArrowException, OSError) as error:
        raise HeadwayError(f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]})") from None


def _metadata(path: Path, table: pa.Table) -> RunMetadata:
    try:
        return msgspec.json.decode((table.schema.metadata or {})[METADATA], type=RunMetadata)
    except (KeyError, msgspec.MsgspecError):
        raise HeadwayError(f"{path}: not the records of a run") from None


def _numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = column.to_numpy()
    return array


def _codes(column: pa.ChunkedArray, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Names as codes into `names`, independent of the order of the file's dictionary."""
    if not names:
        return _numpy(column)
    code_of = {name: code for code, name in enumerate(names)}
    parts = []
    for chunk in column.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        own = np.array([code_of[name] for name in coded.dictionary.to_pylist()], dtype=np.int16)
        parts.append(own[coded.indices.to_numpy()])
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int16)


def _outcomes(requests: pa.Table) -> Columns:
    rows, names = np.flatnonzero(~np.asarray(requests["request"].is_null())), _present(requests.column_names)
    if len(rows) == requests.num_rows:
        columns = {name: _numpy(requests[name]) for name in names}
    else:
        columns = {name: _numpy(requests[name].take(pa.array(rows))) for name in names}
    order = np.argsort(columns["end_s"], kind="stable")
    return {name: column[order] for name, column in columns.items()}
