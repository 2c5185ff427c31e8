"""Typed access to columns of records, without a copy if the type is already right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headway.core.record import Columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
"""Integers of the recorded width."""
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.integer]
"""Row numbers, in 32 bits if they suffice."""


def floats(columns: Columns, name: str, rows: Rows | Mask | slice = slice(None)) -> Floats:
    """A column, or some of its rows, in double precision."""
    return columns[name][rows].astype(np.float64, copy=False)


def ints(columns: Columns, name: str, rows: Rows | Mask | slice = slice(None)) -> Ints:
    """A column, or some of its rows, as 64-bit integers."""
    return columns[name][rows].astype(np.int64, copy=False)


def integers(columns: Columns, name: str, rows: Rows | Ints | slice = slice(None)) -> Integers:
    """A column of integers, or some of its rows, in its own type."""
    column = columns[name][rows]
    return column if column.dtype.kind in "iu" else column.astype(np.int64)  # type: ignore[return-value]


BLOCK_ROWS = 1 << 18
"""Rows sorted together; bounds memory."""


def rows_by_code(column: npt.NDArray[np.generic], among: Mask | None = None) -> dict[int, Rows]:
    """Row numbers of each code, in table order, over all rows or those in the mask `among`.

    For columns with few codes, such as replicas or tiers. Time is proportional to the rows, memory 4 bytes each.
    """
    if not len(column):
        return {}
    low, high = int(column.min()), int(column.max())
    sizes = np.zeros(high - low + 1, dtype=np.int64)
    for _, codes in _blocks(column, low, among):
        sizes += np.bincount(codes, minlength=len(sizes))
    ends = np.cumsum(sizes)
    free = ends - sizes
    rows: Rows = np.empty(int(ends[-1]), dtype=np.int32 if len(column) < 2**31 else np.int64)
    for numbers, codes in _blocks(column, low, among):
        here = np.bincount(codes, minlength=len(sizes))
        before = np.cumsum(here) - here
        order = np.argsort(codes.astype(np.int16) if len(sizes) < 2**15 else codes, kind="stable")
        rows[np.arange(len(codes)) + np.repeat(free - before, here)] = numbers[order]
        free += here
    present = np.flatnonzero(sizes)
    return dict(zip((present + low).tolist(), np.split(rows, ends[present[:-1]]), strict=True)) if len(present) else {}


def _blocks(column: npt.NDArray[np.generic], low: int, among: Mask | None) -> Iterator[tuple[Ints, Ints]]:
    """Yield (row numbers, codes minus the lowest code) of one block of rows at a time."""
    for at in range(0, len(column), BLOCK_ROWS):
        block = slice(at, at + BLOCK_ROWS)
        inside = np.arange(len(column[block])) if among is None else np.flatnonzero(among[block])
        yield inside + at, column[block][inside].astype(np.int64) - low


def ranges(first: Ints, count: Ints) -> Ints:
    """Concatenate `first, first + 1, ...` with `count` numbers for each pair."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(first - (ends - count), count))
