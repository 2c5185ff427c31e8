"""Typed reading of a record's columns, without a copy where the type is right already."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.core.record import Columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Whole = npt.NDArray[np.integer]
"""Integers as narrow as they were recorded."""
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


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
