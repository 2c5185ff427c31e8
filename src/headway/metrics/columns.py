"""Typed reading of a record's columns, without a copy where the type is right already."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headway.core.record import Columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Whole = npt.NDArray[np.integer]
"""Integers as narrow as they were recorded."""
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.integer]
"""Row numbers, in 32 bits where that is enough."""


def floats(columns: Columns, name: str, rows: Rows | Mask | slice = slice(None)) -> Floats:
    """A column, or some of its rows, in double precision."""
    return columns[name][rows].astype(np.float64, copy=False)


def ints(columns: Columns, name: str, rows: Rows | Mask | slice = slice(None)) -> Ints:
    """A column, or some of its rows, as 64-bit integers."""
    return columns[name][rows].astype(np.int64, copy=False)


def whole(columns: Columns, name: str, rows: Rows | Ints | slice = slice(None)) -> Whole:
    """A column of integers, or some of its rows, in the type that it has."""
    column = columns[name][rows]
    return column if np.issubdtype(column.dtype, np.integer) else column.astype(np.int64)  # type: ignore[return-value]


AT_ONCE = 1 << 20
"""Rows put in order together, which limits the memory that it takes."""


def rows_by_code(column: npt.NDArray[np.generic], among: Mask | None = None) -> dict[int, Rows]:
    """Row numbers of each code, in their order in the table; of all rows, or only of those `among` which to look.

    For columns of few codes, as replicas, tiers or models: takes time in proportion to the rows, and 4 bytes of each.
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
    some = np.flatnonzero(sizes)
    return dict(zip((some + low).tolist(), np.split(rows, ends[some[:-1]]), strict=True)) if len(some) else {}


def _blocks(column: npt.NDArray[np.generic], low: int, among: Mask | None) -> Iterator[tuple[Ints, Ints]]:
    """Row numbers, and codes less the lowest, of some rows at a time."""
    for at in range(0, len(column), AT_ONCE):
        block = slice(at, at + AT_ONCE)
        inside = np.arange(len(column[block])) if among is None else np.flatnonzero(among[block])
        yield inside + at, column[block][inside].astype(np.int64) - low
