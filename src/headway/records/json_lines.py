"""Log files of JSON lines, such as the decision log. A file is written directly or by a background thread."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import msgspec
from msgspec import Struct

from headway.core.errors import HeadwayError

log = logging.getLogger("headway.records")
_MAX_QUEUED = 1 << 14
"""Maximum number of lines that wait for the disk."""
_PAUSE_S = 0.1
_FAILED_PAUSE_S = 1.0
_BUFFER_BYTES = 1 << 16


class DroppedLines(Struct, frozen=True, tag_field="what", tag="dropped"):
    """A log line that stands for lines that were dropped because the disk was too slow."""

    num: int
    """Number of dropped lines."""


class JsonLinesFile:
    """A log file. Raises HeadwayError if it cannot be written.

    After an error `write` and `flush` can be called again: unwritten data is kept and written first, so that no line is
    torn. With `max_bytes`, a file that reaches this size is renamed to `FILE.1`; an earlier `FILE.1` is replaced.
    """

    def __init__(
        self, path: Path, max_bytes: int | None = None, is_continued: bool = False, is_shared: bool = False
    ) -> None:
        """`is_continued`: append to an existing file. `is_shared`: other processes append to the file, too, and a new
        file begins when log rotation has renamed the file."""
        self.path, self._max_bytes, self._is_shared = path, max_bytes, is_shared
        self._encoder = msgspec.json.Encoder()
        self._unwritten = bytearray()
        self._size = 0
        """Size of the file in bytes, including unwritten bytes."""
        self._file: IO[bytes] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._write_error(error) from None
        self._open("ab" if is_continued or is_shared else "wb")

    def _open(self, mode: str = "wb") -> None:
        try:
            self._file = cast(IO[bytes], self.path.open(mode, buffering=0))
            self._size = self._file.tell()
        except OSError as error:
            raise self._write_error(error) from None

    def write(self, line: Struct) -> None:
        data = self._encoder.encode(line)
        if self._max_bytes is not None and self._size and self._size + len(data) >= self._max_bytes:
            self._rotate()
        if len(self._unwritten) >= _BUFFER_BYTES:
            self.flush()
        self._unwritten += data + b"\n"
        self._size += len(data) + 1

    def _rotate(self) -> None:
        self.flush()
        try:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        except OSError as error:
            raise self._write_error(error) from None
        self.close()
        self._size = 0
        self._open()

    def flush(self) -> None:
        """Make all lines readable for other processes."""
        if self._is_shared and self._file is not None and self._is_renamed(self._file):
            self._file.close()
            self._file = None
        if self._file is None:
            self._open("ab" if self._is_shared else "wb")
        assert self._file is not None
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            raise self._write_error(error) from None

    def _is_renamed(self, file: IO[bytes]) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except OSError:
            return True

    def close(self) -> None:
        self.flush()
        file, self._file = self._file, None
        assert file is not None
        try:
            file.close()
        except OSError as error:
            raise self._write_error(error) from None

    def _write_error(self, error: OSError) -> HeadwayError:
        return HeadwayError(f"{self.path}: cannot be written: {error.strerror}")


class BackgroundJsonLines:
    """Writes lines from its own thread, so that `write` never waits for the disk.

    Lines are dropped and counted if they arrive faster than the disk accepts them, or while it is full. When the disk
    has room again, the log goes on.
    """

    def __init__(self, file: JsonLinesFile, max_queued: int = _MAX_QUEUED, what: str = "decisions") -> None:
        """`what`: the name of the lines, for messages."""
        self._file, self._max_queued, self._what = file, max_queued, what
        self._queue: deque[Struct] = deque()
        self._num_dropped = 0
        self._is_failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
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
        while not self._closing.wait(_FAILED_PAUSE_S if self._is_failing else _PAUSE_S):
            self._try_drain()
        if not self._try_drain():
            num = len(self._queue) + self._num_dropped
            log.error("%s: the last %d %s are lost", self._file.path, num, self._what)
        with suppress(HeadwayError):
            self._file.close()

    def _try_drain(self) -> bool:
        """Write the queue. False if the disk does not accept it."""
        num_dropped = self._num_dropped
        try:
            self._drain()
        except HeadwayError as error:
            if not self._is_failing:
                self._is_failing = True
                log.error("%s; %s are dropped until it can", error, self._what)
            return False
        if self._is_failing:
            self._is_failing = False
            log.warning("%s is written again; %d %s were dropped", self._file.path, num_dropped, self._what)
        return True

    def _drain(self) -> None:
        self._file.flush()
        while self._queue:
            self._file.write(self._queue[0])
            self._queue.popleft()
        if self._num_dropped:
            num = self._num_dropped
            self._file.write(DroppedLines(num))
            self._num_dropped -= num
        self._file.flush()
