"""Records of long runs outside of memory: bytes in a temporary file, which the system reads when they are needed.

The pages of such a file are a cache, which the system drops when memory is short. The file has no name, and its room is
free again when the records are.
"""

from __future__ import annotations

import mmap
import tempfile

from headway.control.column import Bytes
from headway.core.errors import HeadwayError


class SpillFile:
    """Bytes appended to a temporary file in `TMPDIR`."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="headway-", buffering=0)  # noqa: SIM115  (it outlives this call)

    def append(self, data: Bytes) -> None:
        """HeadwayError where there is no room."""
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            what = f"the records of a long run cannot be written ({error.strerror})"
            raise HeadwayError(f"{tempfile.gettempdir()}: {what}; expected room, or TMPDIR set elsewhere") from None

    def mapped(self) -> memoryview:
        """All bytes so far, read-only and mapped from the file, which takes no more."""
        found = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()
        return memoryview(found)

    def __del__(self) -> None:
        self._file.close()
