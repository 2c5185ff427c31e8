"""The decision log: JSON lines in a file, written at once or by a background thread."""

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
_MAX_QUEUED = 1 << 14
"""Lines that may wait for the disk."""
_PAUSE_S = 0.1


class DroppedLines(Struct, frozen=True, tag_field="what", tag="dropped"):
    """A line of the log in place of lines that were dropped because the disk was too slow."""

    num: int
    """Number of dropped lines."""


class DecisionFile:
    """A new log file. HeadwayError if it cannot be written.

    With `max_bytes`, a file that reaches this size is renamed to `FILE.1`, replacing an earlier one.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._encoder = msgspec.json.Encoder()
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("wb", buffering=1 << 16)
        except OSError as error:
            raise self._write_error(error) from None

    def write(self, line: Struct) -> None:
        data = self._encoder.encode(line)
        try:
            if self._max_bytes is not None and self._size and self._size + len(data) >= self._max_bytes:
                self._file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._file, self._size = self.path.open("wb", buffering=1 << 16), 0
            self._file.write(data + b"\n")
        except OSError as error:
            raise self._write_error(error) from None
        self._size += len(data) + 1

    def flush(self) -> None:
        """Make all lines readable for other processes."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._write_error(error) from None

    def _write_error(self, error: OSError) -> HeadwayError:
        return HeadwayError(f"{self.path}: cannot be written: {error.strerror}")


class BackgroundDecisionFile:
    """Writes lines from its own thread, so that `write` never waits for the disk.

    Lines that arrive faster than the disk accepts them are dropped and counted. An error of the disk ends the log only.
    """

    def __init__(self, file: DecisionFile, max_queued: int = _MAX_QUEUED) -> None:
        self._file, self._max_queued = file, max_queued
        self._queue: deque[Struct] = deque()
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decisions", daemon=True)
        self._thread.start()

    def write(self, line: Struct) -> None:
        """Queue a line, or drop it if the queue is full."""
        if len(self._queue) < self._max_queued:
            self._queue.append(line)
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Write the queued lines and end the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(_PAUSE_S):
                self._drain()
            self._drain()
            self._file.close()
        except HeadwayError as error:
            self._max_queued = 0
            self._queue.clear()
            log.error("%s; decisions are no longer logged", error)

    def _drain(self) -> None:
        while self._queue:
            self._file.write(self._queue.popleft())
        if self._num_dropped:
            num, self._num_dropped = self._num_dropped, 0
            self._file.write(DroppedLines(num))
        self._file.flush()
