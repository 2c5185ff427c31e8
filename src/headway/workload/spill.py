"""Keeps columns of long runs in a temporary file, whose pages the system reads on demand.

The pages are a cache, which the system drops when memory is short. The file has no name, and its disk space is freed
with the columns.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.column import Bytes, Column
from headway.core.errors import HeadwayError

LONG_ROWS = 1 << 22
"""Maximum number of rows of a workload that is made at once, in memory."""
BLOCK_ROWS = 1 << 20
"""Rows of a longer workload that are made at once; fewer than `LONG_ROWS`."""


class SpillFile:
    """Bytes appended to a temporary file in `TMPDIR`."""

    def __init__(self) -> None:
        """Raises HeadwayError if no file can be created."""
        with _disk_errors():
            self._file = tempfile.TemporaryFile(prefix="headway-", buffering=0)  # noqa: SIM115  (it outlives this call)

    def append(self, data: Bytes) -> None:
        """Append bytes. Raises HeadwayError if the disk is full."""
        rest = memoryview(data).cast("B")
        with _disk_errors():
            while rest:
                rest = rest[self._file.write(rest) :]

    def mapped(self) -> memoryview:
        """All bytes so far, as a read-only memory map. Nothing can be appended afterwards.

        Raises HeadwayError if the system allows no more maps.
        """
        with _disk_errors():
            found = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()
        return memoryview(found)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"columns of a long run cannot be kept there ({error.strerror})"
        raise HeadwayError(f"{tempfile.gettempdir()}: {what}; expected room, or TMPDIR set elsewhere") from None


def taken(column: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The values of these rows, in their order; in a file if there are many.

    Raises HeadwayError if the disk is full.
    """
    if len(rows) <= LONG_ROWS:
        return np.asarray(column[rows])
    found = Column(column.dtype, SpillFile)
    for start in range(0, len(rows), BLOCK_ROWS):
        found.extend(column[rows[start : start + BLOCK_ROWS]])
    return found.values()
