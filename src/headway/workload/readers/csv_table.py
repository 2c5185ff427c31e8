"""Reads CSV into typed columns: fast for blocks of valid lines, exact about the line and cell of an error."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv as arrow_csv

from headway.core.errors import HeadwayError
from headway.workload.readers.shared import ReadOptions, blocks, first_line, open_unpacked
from headway.workload.table import MAX_TOKENS

Check = Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]
WHOLE = re.compile(r"[ \t]*[+-]?[0-9]+[ \t]*")
TIMESTAMP = re.compile(r"\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d(:?\d\d)?)?\s*")


@dataclass(frozen=True, eq=False)
class CellType:
    """The type of a column's cells: how Arrow reads it, which values are valid, and the text for error messages."""

    arrow: Any
    expected: str
    is_valid: Check
    is_valid_text: Callable[[str], bool]
    """`is_valid` for the text of one cell."""
    empty_value: float | int | None = None
    """The value of an empty cell. If None, an empty cell is an error."""
    is_text: bool = False

    def all_valid(self, column: pa.ChunkedArray) -> bool:
        if self.is_text:
            return True
        if self.empty_value is None and column.null_count:
            return False
        return bool(self.is_valid(self.to_numpy(column)).all())

    def to_numpy(self, column: pa.ChunkedArray) -> npt.NDArray[Any]:
        """The column as int32, int64 or float64. Times are in nanoseconds."""
        if pa.types.is_timestamp(self.arrow):
            column = column.cast(pa.int64())
        if column.null_count:
            column = column.fill_null(self.empty_value)
        return numbers(column)


def numbers(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[Any]:
    """A column without missing values. Arrow's `to_numpy` imports pandas if it is installed, which takes as long as a
    comparison."""
    joined = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values: npt.NDArray[Any] = np.from_dlpack(joined)
    return values


def _whole_between(low: int, high: int) -> Callable[[str], bool]:
    return lambda cell: WHOLE.fullmatch(cell) is not None and low <= int(cell) <= high


def _number(is_valid: Callable[[float], bool], empty: bool) -> Callable[[str], bool]:
    def check(cell: str) -> bool:
        if not cell:
            return empty
        try:
            return is_valid(float(cell))
        except ValueError:
            return False

    return check


def _is_time(cell: str) -> bool:
    """Whether a cell is a valid date and time of day."""
    if TIMESTAMP.fullmatch(cell) is None:
        return False
    try:
        datetime.fromisoformat(cell.strip()[:19])
    except ValueError:
        return False
    return True


def _has_zone(cell: str) -> bool:
    match = TIMESTAMP.fullmatch(cell)
    return match is not None and match[2] is not None


def _between(low: int, high: int) -> Check:
    return lambda values: (values >= low) & (values <= high)


TOKENS = CellType(
    pa.int32(),
    f"a whole number of tokens, 0 to {MAX_TOKENS:,}",
    _between(0, MAX_TOKENS),
    _whole_between(0, MAX_TOKENS),
)
ID = CellType(
    pa.int64(),
    "an id from 0, or nothing",
    _between(-1, 2**63 - 1),
    lambda cell: not cell or _whole_between(-1, 2**63 - 1)(cell),
    empty_value=-1,
)
SMALL = CellType(pa.int16(), "a whole number from 0 to 32767", _between(0, 32767), _whole_between(0, 32767))
SECONDS = CellType(
    pa.float64(),
    "seconds, 0 or more",
    lambda v: np.isfinite(v) & (v >= 0),
    _number(lambda v: 0 <= v < float("inf"), empty=False),
)
OPTIONAL = CellType(
    pa.float64(),
    "a number, or nothing",
    lambda v: ~np.isinf(v),
    _number(lambda v: abs(v) != float("inf"), empty=True),
    empty_value=float("nan"),
)
TIME = CellType(
    pa.timestamp("ns"),
    "a time such as 2023-11-16 18:15:46.6805900",
    lambda v: v == v,
    lambda cell: _is_time(cell) and not _has_zone(cell),
)
ZONED_TIME = CellType(
    pa.timestamp("ns", "UTC"),
    "a time with its zone, such as 2024-05-10 00:00:00.009930+00:00",
    lambda v: v == v,
    lambda cell: _is_time(cell) and _has_zone(cell),
)
TEXT = CellType(pa.string(), "text", lambda v: v == v, lambda cell: True, is_text=True)


@dataclass
class CsvTable:
    """The columns of one file, in the order of its lines. Text columns are codes into `names`."""

    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def header_of(line: str) -> list[str]:
    """The names in a header; empty if the line is not CSV, for example because it contains a carriage return."""
    try:
        return [name.strip() for name in next(csv.reader([line]), [])]
    except csv.Error:
        return []


def read_table(path: Path, columns: Mapping[str, CellType], arrival: str, options: ReadOptions) -> CsvTable:
    """Read the named columns. `options` decide whether bad lines and unsorted arrivals are errors.

    `arrival` names the column whose values must not fall from one line to the next.
    """
    header = header_of(first_line(path))
    missing = [name for name in columns if name not in header]
    if missing:
        raise HeadwayError(f"{path}: line 1: the column {missing[0]!r} is missing; found {', '.join(header)}")
    if twice := [name for name in columns if header.count(name) > 1]:
        raise HeadwayError(f"{path}: line 1: the column {twice[0]!r} is there {header.count(twice[0])} times")
    scan = _Scan(path, header, _with_time_zone(path, columns), arrival, options)
    parts = list(scan.parts())
    if not parts:
        raise HeadwayError(f"{path}: no requests in the file, only a header")
    table = CsvTable(notes=scan.notes())
    for name, cell_type in columns.items():
        pieces = [part[name] for part in parts]
        if cell_type.is_text:
            table.columns[name], table.names[name] = _encode(pieces)
        else:
            table.columns[name] = np.concatenate([cell_type.to_numpy(piece) for piece in pieces])
    return table


def _with_time_zone(path: Path, columns: Mapping[str, CellType]) -> dict[str, CellType]:
    """Replace TIME by ZONED_TIME if the first timestamp of the file has a time zone."""
    if TIME not in columns.values():
        return dict(columns)
    with open_unpacked(path) as file:
        lines = [line.decode("utf-8", "replace") for line in islice(file, 1, 100)]
    cells = (cell for line in lines for cell in line.split(",") if TIMESTAMP.fullmatch(cell))
    zoned = _has_zone(next(cells, ""))
    return {n: (ZONED_TIME if zoned and k is TIME else k) for n, k in columns.items()}


class _Scan:
    """One pass over a file that counts the lines it skips."""

    def __init__(
        self, path: Path, header: list[str], columns: dict[str, CellType], arrival: str, options: ReadOptions
    ) -> None:
        self.path, self.header, self.columns = path, header, columns
        self.arrival, self.options = arrival, options
        self.num_skipped = 0
        self.first_skipped = ""
        self.last: Any = None

    def notes(self) -> list[str]:
        if not self.num_skipped:
            return []
        return [f"{self.num_skipped} bad lines skipped; the first: {self.first_skipped}"]

    def parts(self) -> Iterator[pa.Table]:
        num_left = self.options.limit
        for number, block in blocks(self.path, 1):
            if num_left is not None and num_left <= 0:
                return
            part = self._part(number, block, num_left)
            if part is not None and part.num_rows:
                num_left = None if num_left is None else num_left - part.num_rows
                yield part

    def _part(self, number: int, block: bytes, limit: int | None) -> pa.Table | None:
        if limit is not None and not self.options.skip_bad:
            # Lines after the limit are not read, so errors in them do not count.
            block = _first_lines(block, limit)
        part = self._parse(block)
        if part is None:
            block = self._valid_lines(number, block)
            part = self._parse(block) if block else None
            if part is None and block:
                raise HeadwayError(f"{self.path}: lines from {number} on: not the CSV that was expected")
        if part is not None:
            part = part.slice(0, limit)
            self._check_order(part, number, block)
        return part

    def _parse(self, block: bytes) -> pa.Table | None:
        """The block as a table, or None if any line is bad."""
        if not block.strip():
            return None
        read = arrow_csv.ReadOptions(column_names=self.header, use_threads=False, block_size=max(len(block), 1))
        types = {name: cell_type.arrow for name, cell_type in self.columns.items()}
        convert = arrow_csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=False
        )
        try:
            part = arrow_csv.read_csv(pa.py_buffer(block), read_options=read, convert_options=convert)
        except pa.ArrowInvalid:
            return None
        valid = all(cell_type.all_valid(part[name]) for name, cell_type in self.columns.items())
        return part if valid else None

    def _valid_lines(self, number: int, block: bytes) -> bytes:
        """The valid lines of the block. A bad line is an error unless `options.skip_bad`."""
        valid = []
        for at, line in enumerate(block.split(b"\n"), number):
            if not line.strip():
                continue
            problem = self._problem(line)
            if problem is None:
                valid.append(line)
            elif not self.options.skip_bad:
                raise HeadwayError(f"{self.path}: line {at}: {problem}; --skip-bad leaves bad lines out")
            else:
                self.num_skipped += 1
                self.first_skipped = self.first_skipped or f"line {at}: {problem}"
        return b"\n".join(valid)

    def _problem(self, line: bytes) -> str | None:
        try:
            cells = next(csv.reader([line.decode("utf-8").rstrip("\r")]))
        except (UnicodeDecodeError, csv.Error):
            return "not readable as CSV in UTF-8"
        if len(cells) != len(self.header):
            return f"{len(cells)} columns; expected {len(self.header)}: {','.join(self.header)}"
        for name, cell in zip(self.header, cells, strict=True):
            cell_type = self.columns.get(name)
            if cell_type is not None and not cell_type.is_valid_text(cell):
                return f"column {name}: {cell!r}; expected {cell_type.expected}"
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


def _first_lines(block: bytes, num: int) -> bytes:
    """The block up to its `num`-th non-empty line."""
    if block.count(b"\n") < num:
        return block
    lines = block.split(b"\n")
    full = (at for at, line in enumerate(lines, 1) if line.strip())
    return b"\n".join(lines[: next(islice(full, num - 1, None), len(lines))])


def _encode(pieces: list[pa.ChunkedArray]) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Text as codes into a tuple of names."""
    joined = pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], type=pa.string())
    encoded = joined.dictionary_encode().unify_dictionaries()
    names = encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else []
    codes = np.concatenate([np.from_dlpack(chunk.indices) for chunk in encoded.chunks])
    return codes, tuple(names)
