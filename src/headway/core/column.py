"""A growing column of records: in memory, and beyond some size in a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = bytearray | memoryview
SPILL_BYTES = 1 << 21
"""Column size in bytes from which values are moved to a file."""
_WIDENED_ROWS = 1 << 20
"""Number of rows widened at a time."""


class Spill(Protocol):
    """Column bytes kept in a file instead of memory."""

    def append(self, data: Bytes) -> None:
        """Append bytes. Raises HeadwayError if the disk is full."""

    def mapped(self) -> memoryview:
        """All bytes, memory-mapped. After this call, nothing can be appended."""


MakeSpill = Callable[[], Spill]


class Column:
    """The values of one column. While all are equal, only their number is stored."""

    def __init__(self, dtype: np.dtype[Any], make_spill: MakeSpill | None = None) -> None:
        """`make_spill`: creates the file for a column of `SPILL_BYTES` or more; None: columns stay in memory."""
        self._dtype = dtype
        self._value = np.empty(0, dtype)
        self._num_same = 0
        self._rows = bytearray()
        """The values that are not yet in `_spill`."""
        self._make_spill = make_spill
        self._spill: Spill | None = None

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Append values; widens the column's type if they do not fit."""
        if not len(values):
            return
        if values.dtype.itemsize > self._dtype.itemsize:
            if not _fits(values, self._dtype):
                self._widen(values.dtype)
            values = values.astype(self._dtype)
        rows = values.tobytes()
        if not self._rows and self._spill is None:
            first = self._value.tobytes() if self._num_same else rows[: values.itemsize]
            if rows == first * len(values):  # bits: NaN equals NaN, and 0 differs from -0
                if not self._num_same:
                    self._value = values[:1].copy()
                self._num_same += len(values)
                return
            self._rows += first * self._num_same
        self._rows += rows
        if self._make_spill is not None and len(self._rows) >= SPILL_BYTES:
            if self._spill is None:
                self._spill = self._make_spill()
            self._spill.append(self._rows)
            self._rows = bytearray()

    def _widen(self, dtype: np.dtype[Any]) -> None:
        if self._spill is not None:
            assert self._make_spill is not None
            spilled, self._spill = np.frombuffer(self._spill.mapped(), self._dtype), self._make_spill()
            for at in range(0, len(spilled), _WIDENED_ROWS):
                self._spill.append(spilled[at : at + _WIDENED_ROWS].astype(dtype).data)
        self._rows = bytearray(np.frombuffer(self._rows, self._dtype).astype(dtype).data)
        self._value = self._value.astype(dtype)
        self._dtype = dtype

    def values(self) -> npt.NDArray[Any]:
        """All values, not to be changed. After this call, nothing can be appended."""
        if self._num_same and not self._rows and self._spill is None:
            same: npt.NDArray[Any] = np.ndarray(self._num_same, self._value.dtype, self._value, strides=(0,))
            same.flags.writeable = False  # as of `np.broadcast_to`, which takes 14 us
            return same
        if self._spill is None:
            return np.frombuffer(self._rows, self._dtype)
        if self._rows:
            self._spill.append(self._rows)
            self._rows = bytearray()
        return np.frombuffer(self._spill.mapped(), self._dtype)


def _fits(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= values.min() and values.max() <= limits.max)
