"""Decisions as JSON lines in a file: at once, or behind the back of whoever must not wait for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from headway.core.errors import HeadwayError

log = logging.getLogger("headway.decisions")
_MOST_WAITING = 1 << 14
"""Lines that may wait for the disk."""
_PAUSE_S = 0.1


class Dropped(Struct, frozen=True, tag_field="what", tag="dropped"):
    """Stands where the disk could not keep up."""

    num: int
    """Lines that are missing."""


class DecisionFile:
    """One file, begun anew. HeadwayError where it cannot be written.

    With `max_bytes`, a file that is so long becomes `FILE.1`, in the place of an earlier one, and another is begun.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._encoder = msgspec.json.Encoder()
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("wb", buffering=1 << 16)
        except OSError as error:
            raise self._cannot(error) from None

    def write(self, line: Struct) -> None:
        """One more."""
        data = self._encoder.encode(line)
        try:
            if self._max_bytes is not None and self._size and self._size + len(data) >= self._max_bytes:
                self._file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._file, self._size = self.path.open("wb", buffering=1 << 16), 0
            self._file.write(data + b"\n")
        except OSError as error:
            raise self._cannot(error) from None
        self._size += len(data) + 1

    def flush(self) -> None:
        """What is written can be read."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._cannot(error) from None

    def close(self) -> None:
        """That was all."""
        try:
            self._file.close()
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> HeadwayError:
        return HeadwayError(f"{self.path}: cannot be written: {error.strerror}")


class Behind:
    """Writes from a thread of its own: to tell it something takes no longer than to remember it. What comes faster than
    the disk takes it is dropped, and counted; a disk that fails ends the log, and nothing else."""

    def __init__(self, file: DecisionFile, most_waiting: int = _MOST_WAITING) -> None:
        self._file, self._most = file, most_waiting
        self._waiting: deque[Struct] = deque()
        self._num_dropped = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decisions", daemon=True)
        self._thread.start()

    def write(self, line: Struct) -> None:
        """One more, if there is room."""
        if len(self._waiting) < self._most:
            self._waiting.append(line)
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Write what waits, and end."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_PAUSE_S):
                self._drain()
            self._drain()
            self._file.close()
        except HeadwayError as error:
            self._most = 0
            self._waiting.clear()
            log.error("%s; decisions are not logged any more", error)

    def _drain(self) -> None:
        while self._waiting:
            self._file.write(self._waiting.popleft())
        if self._num_dropped:
            num, self._num_dropped = self._num_dropped, 0
            self._file.write(Dropped(num))
        self._file.flush()
