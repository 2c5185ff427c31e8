"""CSV to typed columns: fast where the lines are good, exact about the line that is not."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv as arrow_csv

from headway.core.errors import HeadwayError
from headway.workload.readers import kinds
from headway.workload.readers.blocks import blocks, first_line, reading
from headway.workload.readers.kinds import Kind
from headway.workload.readers.options import Options


@dataclass
class CsvTable:
    """Columns of one file, in the order of its lines. Text columns are codes into `names`."""

    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def header_of(line: str) -> list[str]:
    """The names in a header line."""
    return [name.strip() for name in next(csv.reader([line]), [])]


def read_table(path: Path, columns: Mapping[str, Kind], arrival: str, options: Options) -> CsvTable:
    """The named columns. Bad lines, and arrivals out of order, are errors as `options` say.

    `arrival` is the column that must not fall from one line to the next.
    """
    header = header_of(first_line(path))
    missing = [name for name in columns if name not in header]
    if missing:
        raise HeadwayError(f"{path}: line 1: the column {missing[0]!r} is missing; found {', '.join(header)}")
    scan = _Scan(path, header, _with_time_zone(path, columns), arrival, options)
    parts = list(scan.parts())
    if not parts:
        raise HeadwayError(f"{path}: no requests in the file, only a header")
    table = CsvTable(notes=scan.notes())
    for name, kind in columns.items():
        pieces = [part[name] for part in parts]
        if kind.is_text:
            table.columns[name], table.names[name] = _encode(pieces)
        else:
            table.columns[name] = np.concatenate([kind.to_numpy(piece) for piece in pieces])
    return table


def _with_time_zone(path: Path, columns: Mapping[str, Kind]) -> dict[str, Kind]:
    """Timestamps with or without a zone, whichever the first of them has."""
    if kinds.TIME not in columns.values():
        return dict(columns)
    with reading(path) as file:
        lines = [line.decode("utf-8", "replace") for line in islice(file, 1, 100)]
    cells = (cell for line in lines for cell in line.split(",") if kinds.TIMESTAMP.fullmatch(cell))
    zoned = kinds.has_zone(next(cells, ""))
    return {n: (kinds.ZONED_TIME if zoned and k is kinds.TIME else k) for n, k in columns.items()}


class _Scan:
    """One pass over a file, with what it skipped."""

    def __init__(self, path: Path, header: list[str], columns: dict[str, Kind], arrival: str, options: Options) -> None:
        self.path, self.header, self.columns, self.arrival, self.options = (
            path,
            header,
            columns,
            arrival,
            options,
        )
        self.num_skipped = 0
        self.first_skipped = ""
        self.last: Any = None

    def notes(self) -> list[str]:
        """What was skipped, in words."""
        if not self.num_skipped:
            return []
        return [f"{self.num_skipped} bad lines skipped; the first: {self.first_skipped}"]

    def parts(self) -> Iterator[pa.Table]:
        """Tables of good rows, in order."""
        left = self.options.limit
        for number, block in blocks(self.path, 1):
            if left is not None and left <= 0:
                return
            part = self._part(number, block, left)
            if part is not None and part.num_rows:
                left = None if left is None else left - part.num_rows
                yield part

    def _part(self, number: int, block: bytes, limit: int | None) -> pa.Table | None:
        if limit is not None and not self.options.skip_bad:
            # What lies behind the limit is not read, so it cannot be bad either.
            block = _lines(block, limit)
        part = self._parse(block)
        if part is None:
            block = self._sift(number, block)
            part = self._parse(block) if block else None
            if part is None and block:
                raise HeadwayError(f"{self.path}: lines from {number} on: not the CSV that was expected")
        if part is not None:
            part = part.slice(0, limit)
            self._check_order(part, number, block)
        return part

    def _parse(self, block: bytes) -> pa.Table | None:
        """The block as a table, or None where any line of it is bad."""
        if not block.strip():
            return None
        read = arrow_csv.ReadOptions(column_names=self.header, use_threads=False, block_size=max(len(block), 1))
        types = {name: kind.arrow for name, kind in self.columns.items()}
        convert = arrow_csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=False
        )
        try:
            part = arrow_csv.read_csv(pa.py_buffer(block), read_options=read, convert_options=convert)
        except pa.ArrowInvalid:
            return None
        good = all(kind.all_good(part[name]) for name, kind in self.columns.items())
        return part if good else None

    def _sift(self, number: int, block: bytes) -> bytes:
        """The good lines of the block; the first bad one is an error unless bad lines are to be skipped."""
        good = []
        for at, line in enumerate(block.split(b"\n"), number):
            if not line.strip():
                continue
            problem = self._problem(line)
            if problem is None:
                good.append(line)
            elif not self.options.skip_bad:
                raise HeadwayError(f"{self.path}: line {at}: {problem}; --skip-bad leaves bad lines out")
            else:
                self.num_skipped += 1
                self.first_skipped = self.first_skipped or f"line {at}: {problem}"
        return b"\n".join(good)

    def _problem(self, line: bytes) -> str | None:
        try:
            cells = next(csv.reader([line.decode("utf-8").rstrip("\r")]))
        except (UnicodeDecodeError, csv.Error):
            return "not readable as CSV in UTF-8"
        if len(cells) != len(self.header):
            return f"{len(cells)} columns; expected {len(self.header)}: {','.join(self.header)}"
        for name, cell in zip(self.header, cells, strict=True):
            kind = self.columns.get(name)
            if kind is not None and not kind.good_cell(cell):
                return f"column {name}: {cell!r}; expected {kind.expected}"
        return None

    def _check_order(self, part: pa.Table, number: int, block: bytes) -> None:
        if self.options.sort or not part.num_rows:
            return
        times = self.columns[self.arrival].to_numpy(part[self.arrival])
        if self.last is None:
            self.last = times[0]
        falls = np.flatnonzero(np.diff(times, prepend=self.last) < 0)
        self.last = times[-1]
        if len(falls):
            lines = [at for at, line in enumerate(block.split(b"\n"), number) if line.strip()]
            raise HeadwayError(
                f"{self.path}: line {lines[int(falls[0])]}: column {self.arrival}: arrives before the line"
                " above it; say sort=True (--sort) to sort by arrival"
            )


def _lines(block: bytes, num: int) -> bytes:
    """The block up to its `num`-th line that is not empty."""
    if block.count(b"\n") < num:
        return block
    lines = block.split(b"\n")
    full = (at for at, line in enumerate(lines, 1) if line.strip())
    return b"\n".join(lines[: next(islice(full, num - 1, None), len(lines))])


def _encode(pieces: list[pa.ChunkedArray]) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Text as codes and names."""
    joined = pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], type=pa.string())
    encoded = joined.dictionary_encode().unify_dictionaries()
    names = encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else []
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    return codes, tuple(names)
