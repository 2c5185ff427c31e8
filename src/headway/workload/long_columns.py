"""Columns of long workloads, which are made in blocks and kept in a temporary file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.column import Column
from headway.workload.spill import SpillFile

LONG_ROWS = 1 << 22
"""Maximum number of rows of a workload that is made at once, in memory."""
BLOCK_ROWS = 1 << 20


def column_of(num: int, dtype: str, make: Callable[[int], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """A column of `num` values. `make(n)` returns the next n values: those of a random stream, for example.

    Raises HeadwayError if a long column does not fit on the disk.
    """
    if num <= LONG_ROWS:
        return make(num).astype(dtype, copy=False)
    column = Column(np.dtype(dtype), SpillFile)
    for start in range(0, num, BLOCK_ROWS):
        column.extend(make(min(BLOCK_ROWS, num - start)).astype(dtype, copy=False))
    return column.values()


def constant(num: int, value: float) -> npt.NDArray[np.float64]:
    """A column of `num` equal values."""
    return np.full(num, value) if num <= LONG_ROWS else np.broadcast_to(np.float64(value), num)
