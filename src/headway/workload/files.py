"""Reads and writes Headway's own workload files in Parquet and CSV. Writes are atomic.

A Parquet file has one column per table column, names as dictionary columns, and prefixes as two list columns. A run's
records are such a file. A CSV file has columns named as in the table, empty cells for missing values, `model`,
`region`, `tenant` and `lora` as names, and `prefix` as `id:tokens` pairs separated by spaces; `arrival_s` is optional,
or replaced by `arrival_ms` or `timestamp`. Epochs and dates are read as seconds from the first arrival.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import structs
from pyarrow import compute, parquet
from pyarrow import csv as arrow_csv

from headway.core.errors import HeadwayError, unknown
from headway.core.record import OPTIONAL_COLUMNS, REQUEST_COLUMNS, REQUEST_ID, Prefixes
from headway.workload.atomic_file import open_atomic
from headway.workload.readers import csv_table, run_parts
from headway.workload.readers.arrival_times import from_first_arrival
from headway.workload.readers.csv_table import CellType, CsvTable, header_of, read_table
from headway.workload.readers.shared import NO_ARRIVALS, REQUESTS, ReadOptions, first_line, open_unpacked, trace_file
from headway.workload.table import (
    DTYPES,
    LENGTH,
    NAMED,
    QUALITY,
    REQUIRED,
    Prefix,
    Workload,
    default_of,
    dtype_of,
    is_column,
)

NOTES = b"headway.notes"
PREFIX_COLUMNS = ("prefix_ids", "prefix_tokens")
CSV_ROWS = 1 << 18
CSV_REQUIRED = ("prompt_tokens", "output_tokens")
ARRIVALS = {"arrival_s": 1.0, "arrival_ms": 1e3, "timestamp": 1.0}
"""Arrival-time columns, and how many of their units make a second. Each column may hold ISO 8601 times instead."""
CELL_TYPES: dict[str, CellType] = {
    "arrival_s": csv_table.SECONDS,
    "tier": csv_table.SMALL,
    **dict.fromkeys(("prompt_tokens", "output_tokens", "reasoning_tokens"), csv_table.TOKENS),
    **dict.fromkeys((*NAMED, "prefix"), csv_table.TEXT),
    **dict.fromkeys(("session_id", "output_id"), csv_table.ID),
}


def to_parquet(workload: Workload, path: Path) -> None:
    table = _arrow(workload)
    if workload.prefix is not None:
        for name, lists in prefix_lists(workload.prefix).items():
            table = table.append_column(name, lists)
    table = table.replace_schema_metadata({NOTES: "\n".join(workload.notes)})
    with open_atomic(path) as file:
        parquet.write_table(table, file, compression="zstd")


def from_parquet(path: Path) -> Workload:
    """Read a file that `to_parquet` wrote. Columns of a run's records are ignored; other columns are errors."""
    path = path.parent if path.name == REQUESTS and not path.is_file() else path
    if run_parts.is_under_way(path):
        return run_parts.read_requests(path)
    path = trace_file(path)
    if not path.is_file():
        raise HeadwayError(f"{path}: no such file")
    try:
        file = parquet.ParquetFile(path)
        names = _workload_columns(file.schema_arrow.names, path)
        table = file.read(columns=names)
    except pa.ArrowException as error:
        raise HeadwayError(f"{path}: not readable as Parquet: {error}") from None
    columns = {n: table[n] for n in table.column_names if is_column(n)}
    named = {n: _decode(columns.pop(n)) for n in NAMED if n in columns}
    arrays = {n: _numbers(c, n) for n, c in columns.items()} | {n: codes for n, (codes, _) in named.items()}
    notes = (file.schema_arrow.metadata or {}).get(NOTES, b"").decode().split("\n")
    return Workload(
        arrays,
        prefix=read_prefix(table),
        notes=tuple(note for note in notes if note),
        **{NAMED[column]: names for column, (_, names) in named.items()},
    )


def prefix_lists(prefix: Prefix | Prefixes) -> dict[str, pa.Array]:
    """Prefixes as two list columns, keyed by column name."""
    offsets = pa.array(prefix.offsets, pa.int64())
    return {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(values))
        for name, values in zip(PREFIX_COLUMNS, (prefix.ids, prefix.tokens), strict=True)
    }


def read_prefix(table: pa.Table) -> Prefix | None:
    """Read the columns of `prefix_lists`. None if the table does not have them."""
    if not set(PREFIX_COLUMNS) <= set(table.column_names):
        return None
    lists = [table[name].combine_chunks() for name in PREFIX_COLUMNS]
    ids, tokens = (item.chunk(0) if isinstance(item, pa.ChunkedArray) else item for item in lists)
    counts = compute.fill_null(compute.list_value_length(ids), 0).to_numpy()
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("i8")
    return Prefix(offsets, ids.flatten().to_numpy(), tokens.flatten().to_numpy().astype("i4"))


def to_csv(workload: Workload, path: Path) -> None:
    """Write the table as CSV, compressed if the name of the file ends in .gz."""
    with open_atomic(path) as raw:
        file = gzip.GzipFile(path.name, "wb", 6, raw, mtime=0) if path.suffix == ".gz" else raw
        for start in range(0, max(len(workload), 1), CSV_ROWS):
            part = workload.slice(start, min(start + CSV_ROWS, len(workload)))
            table = _arrow(part, empty_for_none=True)
            texts = _prefix_text(part)
            if texts is not None:
                table = table.append_column("prefix", pa.array(texts, pa.string()))
            if start == 0:
                file.write((",".join(table.column_names) + "\n").encode())
            arrow_csv.write_csv(table, file, arrow_csv.WriteOptions(include_header=False, quoting_style="needed"))
        if file is not raw:
            file.close()


def _arrow(workload: Workload, empty_for_none: bool = False) -> pa.Table:
    arrays = {}
    for name, column in workload.columns.items():
        if name in NAMED:
            names = workload.names(name)
            coded = pa.DictionaryArray.from_arrays(_array(column.astype("i4")), _texts(names))
            arrays[name] = coded.cast(pa.string()) if empty_for_none else coded
        elif empty_for_none and name.endswith("_id"):
            arrays[name] = pa.array(column, mask=column < 0)
        else:
            arrays[name] = pa.array(column, from_pandas=True) if empty_for_none else _array(column)
    return pa.table(arrays)


def _array(column: npt.NDArray[Any]) -> pa.Array:
    """Without `pa.array`, which imports pandas if it is installed: a tenth of a small plan."""
    rows = pa.py_buffer(np.ascontiguousarray(column))
    return pa.Array.from_buffers(pa.from_numpy_dtype(column.dtype), len(column), [None, rows])


def _texts(names: Sequence[str]) -> pa.Array:
    encoded = [name.encode() for name in names]
    ends = np.cumsum([0, *map(len, encoded)], dtype="i4")
    return pa.StringArray.from_buffers(len(names), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def _workload_columns(names: list[str], path: Path) -> list[str]:
    """The columns among `names` that belong to a workload."""
    for name in REQUIRED:
        if name not in names:
            raise HeadwayError(f"{path}: the column {name!r} is missing; found {', '.join(names)}")
    known = [name for name in names if is_column(name) or name in PREFIX_COLUMNS]
    for name in names:
        if name not in known and name not in (*REQUEST_COLUMNS, *OPTIONAL_COLUMNS, REQUEST_ID):
            raise unknown("column", name, [*DTYPES, *PREFIX_COLUMNS, f"{QUALITY}MODEL", f"{LENGTH}MODEL"], str(path))
    return known


def _numbers(column: pa.ChunkedArray, name: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if name == "arrival_s" and pa.types.is_timestamp(column.type):
        nanoseconds = column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
        return nanoseconds.to_numpy() / 1e9  # type: ignore[no-any-return]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise HeadwayError(f"column {name}: {column.type}; expected numbers")
    if column.null_count:
        column = column.fill_null(default_of(name))
    values = csv_table.numbers(column)
    if dtype_of(name).startswith("i") and values.dtype.kind == "f":
        raise HeadwayError(f"column {name}: {column.type}; expected whole numbers")
    limit = np.iinfo(dtype_of(name)).max if dtype_of(name).startswith("i") else None
    if limit is not None and len(values) and (values.max() > limit or values.min() < -limit):
        raise HeadwayError(f"column {name}: {values[np.abs(values).argmax()]}; expected at most {limit:,}")
    return values


def _decode(column: pa.ChunkedArray) -> tuple[np.ndarray[tuple[int], np.dtype[np.generic]], tuple[str, ...]]:
    text = column.cast(pa.string())
    if text.null_count:
        text = compute.fill_null(text, "")
    coded = text.combine_chunks().dictionary_encode()
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    return csv_table.numbers(coded.indices), tuple(coded.dictionary.to_pylist())


def _prefix_text(workload: Workload) -> list[str] | None:
    prefix = workload.prefix
    if prefix is None:
        return None
    pairs = [f"{i}:{t}" for i, t in zip(prefix.ids.tolist(), prefix.tokens.tolist(), strict=True)]
    ends = prefix.offsets.tolist()
    return [" ".join(pairs[a:b]) for a, b in pairwise(ends)]


def read_parquet(path: Path, options: ReadOptions) -> Workload:
    """Read and validate a Parquet file. Bad rows cannot be skipped: they are errors."""
    workload = from_parquet(path)
    if options.sort:
        workload = workload.sorted()
    if options.limit is not None:
        workload = workload.head(options.limit)
    return from_first_arrival(workload).validate(str(path))


def read_csv(path: Path, options: ReadOptions) -> Workload:
    header = header_of(first_line(path))
    for name in header:
        if name != "prefix" and name not in ARRIVALS and not is_column(name):
            raise unknown("column", name, [*DTYPES, *ARRIVALS, "prefix", f"{QUALITY}MODEL"], f"{path}: line 1")
    arrivals = [name for name in header if name in ARRIVALS]
    if len(arrivals) > 1:
        raise HeadwayError(f"{path}: line 1: {' and '.join(arrivals)}: expected one column of arrival times")
    timed = bool(arrivals)
    columns = {name: CELL_TYPES.get(name, csv_table.OPTIONAL) for name in [*CSV_REQUIRED, *header]}
    per_s = 1.0
    for name in arrivals:
        columns[name], per_s = _arrival_cells(path, name, header)
    order = structs.replace(options, sort=options.sort or not timed)
    table = read_table(path, columns, arrivals[0] if arrivals else "arrival_s", order)
    codes = table.columns.pop("prefix", None)
    arrival_s = table.columns.pop(arrivals[0]) / per_s if arrivals else np.zeros(len(table))
    workload = Workload(
        {"arrival_s": arrival_s, **table.columns},
        prefix=None if codes is None else _parse_prefix(path, table, codes.tolist()),
        notes=tuple(table.notes) if timed else (*table.notes, NO_ARRIVALS),
        **{attribute: table.names.get(column, ()) for column, attribute in NAMED.items()},
    )
    ordered = workload.sorted() if options.sort else workload
    return from_first_arrival(ordered).validate(str(path))


def _arrival_cells(path: Path, name: str, header: list[str]) -> tuple[CellType, float]:
    """The cell type of an arrival-time column, and how many of its units make a second."""
    with open_unpacked(path) as file:
        lines = (line.decode("utf-8", "replace").strip() for line in islice(file, 1, 100))
        cells = header_of(next((line for line in lines if line), ""))
    at = header.index(name)
    if at < len(cells) and csv_table.TIMESTAMP.fullmatch(cells[at]):
        return csv_table.TIME, 1e9
    return csv_table.SECONDS, ARRIVALS[name]


def _parse_prefix(path: Path, table: CsvTable, codes: Iterable[int]) -> Prefix:
    parsed = []
    for text in table.names["prefix"]:
        try:
            parsed.append([(int(i), int(t)) for i, t in (pair.split(":") for pair in text.split())])
        except ValueError:
            raise HeadwayError(f"{path}: column prefix: {text!r}; expected id:tokens pairs, as in 7:512 8:40") from None
    rows = [parsed[code] for code in codes]
    pairs = np.array([pair for row in rows for pair in row], "i8").reshape(-1, 2)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype("i8")
    return Prefix(offsets, pairs[:, 0].copy(), pairs[:, 1].astype("i4"))
