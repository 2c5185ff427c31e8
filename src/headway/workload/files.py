"""The workload table on disk. A file appears whole or not at all."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet
from pyarrow import csv as arrow_csv

from headway.core.errors import HeadwayError, unknown
from headway.core.record import REQUEST_COLUMNS, Prefixes
from headway.workload.readers.own_csv import prefix_text
from headway.workload.table import DTYPES, LENGTH, QUALITY, REQUIRED, Prefix, Workload, default_of, dtype_of, is_column
from headway.workload.whole_file import whole

NOTES = b"headway.notes"
PREFIX_COLUMNS = ("prefix_ids", "prefix_tokens")
CSV_ROWS = 1 << 18


def to_parquet(workload: Workload, path: Path) -> None:
    """Write the table: names as dictionary columns, prefixes as two list columns."""
    table = _arrow(workload)
    if workload.prefix is not None:
        for name, lists in prefix_lists(workload.prefix).items():
            table = table.append_column(name, lists)
    table = table.replace_schema_metadata({NOTES: "\n".join(workload.notes)})
    with whole(path) as file:
        parquet.write_table(table, file, compression="zstd")


def from_parquet(path: Path) -> Workload:
    """Read what `to_parquet` wrote. Columns of a run's records are left out; any other is an error."""
    if not path.is_file():
        raise HeadwayError(f"{path}: no such file")
    try:
        file = parquet.ParquetFile(path)
        names = _known(file.schema_arrow.names, path)
        table = file.read(columns=names)
    except pa.ArrowException as error:
        raise HeadwayError(f"{path}: not readable as Parquet: {error}") from None
    columns = {n: table[n] for n in table.column_names if is_column(n)}
    named = {n: _decode(columns.pop(n)) for n in ("model", "region") if n in columns}
    arrays = {n: _numbers(c, n) for n, c in columns.items()} | {n: codes for n, (codes, _) in named.items()}
    notes = (file.schema_arrow.metadata or {}).get(NOTES, b"").decode().split("\n")
    return Workload(
        arrays,
        named["model"][1] if "model" in named else (),
        named["region"][1] if "region" in named else (),
        read_prefix(table),
        tuple(note for note in notes if note),
    )


def prefix_lists(prefix: Prefix | Prefixes) -> dict[str, pa.Array]:
    """Prefixes as two list columns, by name."""
    offsets = pa.array(prefix.offsets, pa.int64())
    return {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(values))
        for name, values in zip(PREFIX_COLUMNS, (prefix.ids, prefix.tokens), strict=True)
    }


def read_prefix(table: pa.Table) -> Prefix | None:
    """What `prefix_lists` wrote, where the table has it."""
    if not set(PREFIX_COLUMNS) <= set(table.column_names):
        return None
    lists = [table[name].combine_chunks() for name in PREFIX_COLUMNS]
    ids, tokens = (item.chunk(0) if isinstance(item, pa.ChunkedArray) else item for item in lists)
    counts = compute.fill_null(compute.list_value_length(ids), 0).to_numpy()
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("i8")
    return Prefix(offsets, ids.flatten().to_numpy(), tokens.flatten().to_numpy().astype("i4"))


def to_csv(workload: Workload, path: Path) -> None:
    """Write the table with columns by name; gzip if the name ends in .gz."""
    with whole(path) as raw:
        file = gzip.GzipFile(path.name, "wb", 6, raw, mtime=0) if path.suffix == ".gz" else raw
        for start in range(0, max(len(workload), 1), CSV_ROWS):
            part = workload.slice(start, min(start + CSV_ROWS, len(workload)))
            table = _arrow(part, empty_for_none=True)
            texts = prefix_text(part)
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
        if name in ("model", "region"):
            names = workload.models if name == "model" else workload.regions
            coded = pa.DictionaryArray.from_arrays(pa.array(column.astype("i4")), pa.array(names, pa.string()))
            arrays[name] = coded.cast(pa.string()) if empty_for_none else coded
        elif empty_for_none and name.endswith("_id"):
            arrays[name] = pa.array(column, mask=column < 0)
        else:
            arrays[name] = pa.array(column, from_pandas=empty_for_none)
    return pa.table(arrays)


def _known(names: list[str], path: Path) -> list[str]:
    """The workload's own columns among `names`."""
    for name in REQUIRED:
        if name not in names:
            raise HeadwayError(f"{path}: the column {name!r} is missing; found {', '.join(names)}")
    known = [name for name in names if is_column(name) or name in PREFIX_COLUMNS]
    for name in names:
        if name not in known and name not in REQUEST_COLUMNS:
            raise unknown("column", name, [*DTYPES, *PREFIX_COLUMNS, f"{QUALITY}MODEL", f"{LENGTH}MODEL"], str(path))
    return known


def _numbers(column: pa.ChunkedArray, name: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise HeadwayError(f"column {name}: {column.type}; expected numbers")
    if column.null_count:
        column = column.fill_null(default_of(name))
    values = column.to_numpy()
    if dtype_of(name).startswith("i") and values.dtype.kind == "f":
        raise HeadwayError(f"column {name}: {column.type}; expected whole numbers")
    limit = np.iinfo(dtype_of(name)).max if dtype_of(name).startswith("i") else None
    if limit is not None and len(values) and (values.max() > limit or values.min() < -limit):
        raise HeadwayError(f"column {name}: {values[np.abs(values).argmax()]}; expected at most {limit:,}")
    return values  # type: ignore[no-any-return]


def _decode(column: pa.ChunkedArray) -> tuple[np.ndarray[tuple[int], np.dtype[np.generic]], tuple[str, ...]]:
    text = compute.fill_null(column.cast(pa.string()), "")
    coded = text.combine_chunks().dictionary_encode()
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    return coded.indices.to_numpy(), tuple(coded.dictionary.to_pylist())
