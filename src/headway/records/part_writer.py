"""Writes the parts of a run's records from its own thread, and goes on when a full disk has room again."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.records import parts
from headway.records.folder import FolderLock, set_aside
from headway.records.parts import Rows
from headway.workload.readers import run_parts
from headway.workload.readers.run_parts import RunState

log = logging.getLogger("headway.records")
MAX_WAITING = 100_000
"""Maximum number of requests kept in memory while they cannot be written. Records of further requests are lost and
counted."""
HINT = "`python -m headway.records FOLDER` makes them files of a run that has ended"
_PAUSE_S = 1.0
"""Time between two attempts to write."""
_MAX_PARTS = 60
"""Number of parts that are merged into one part, so that a long run has few files."""


class PartWriter:
    """Writes rows to a folder as parts, in the order of the rows."""

    def __init__(
        self, folder: Path, provenance: Mapping[str, Any], max_waiting: int = MAX_WAITING, pause_s: float = _PAUSE_S
    ) -> None:
        """Raises HeadwayError if the folder cannot be written to now, or another gateway writes to it.

        The files of an earlier ended run are set aside.
        """
        self._folder, self._provenance = folder, dict(provenance)
        self._max_waiting, self._pause_s = max_waiting, pause_s
        self._queue: deque[Rows] = deque()
        self._num_waiting = 0
        self.num_lost = 0
        """Number of requests whose records are lost."""
        try:
            (folder / run_parts.FOLDER).mkdir(parents=True, exist_ok=True)
            self._folder_lock = FolderLock(folder)
            if (earlier := set_aside(folder)) is not None:
                log.info("%s: the records of the run before are in %s", folder, earlier)
        except OSError as error:
            raise HeadwayError(f"{folder}: records cannot be written ({error.strerror})") from None
        self._next = max(run_parts.numbers(folder), default=0) + 1
        self._small: list[int] = []
        """Numbers of this run's parts that are not merged yet."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_closing = self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def write(self, rows: Rows) -> None:
        """Queue rows for the thread. Their records are lost if too many already wait."""
        num = len(rows.arrivals)
        with self._lock:
            if self._num_waiting and self._num_waiting + num > self._max_waiting:
                if not self.num_lost:
                    log.error("%s: records are lost, as no more can wait in memory", self._folder)
                self.num_lost += num
                return
            self._queue.append(rows)
            self._num_waiting += num
        self._changed.set()

    def close(self) -> None:
        """Write the queued rows, and release the folder. Rows that cannot be written at once are lost."""
        self._end_thread()
        self._folder_lock.release()

    def _end_thread(self) -> None:
        self._is_closing = True
        self._changed.set()
        self._thread.join()

    def finish(self) -> str:
        """Close, and turn all parts into the records of an ended run. Returns the records.

        Raises HeadwayError if there is no room: the parts stay, and `python -m headway.records` can finish them later.
        """
        self._end_thread()
        try:
            return self._finish()
        finally:
            self._folder_lock.release()

    def _finish(self) -> str:
        lost = f"; those of {self.num_lost:,} are lost, as they could not be written" if self.num_lost else ""
        try:
            records = parts.finish(self._folder)
        except HeadwayError as error:
            raise HeadwayError(f"{error}; they stay as parts{lost}: {HINT}") from None
        return (
            f"wrote {0 if records is None else len(records.workload['arrival_s']):,} requests to {self._folder}{lost}"
        )

    def _run(self) -> None:
        while True:
            self._changed.wait(self._pause_s if self._queue else None)
            self._changed.clear()
            while self._queue and self._write_first():
                pass
            if self._is_closing:
                self.num_lost += self._num_waiting
                return

    def _write_first(self) -> bool:
        """Write the first queued rows. Returns False if they cannot be written now."""
        rows = self._queue[0]
        state = structs.replace(rows.state, num_lost=self.num_lost, provenance=self._provenance)
        try:
            parts.write(self._folder, self._next, rows.tables(), state)
        except (OSError, pa.ArrowException) as error:
            if not self._is_failing:
                self._is_failing = True
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                what = "they wait in memory until they can be, those of %d requests at most"
                log.error("%s: records cannot be written (%s); " + what, self._folder, reason, self._max_waiting)
            return False
        with self._lock:
            self._queue.popleft()
            self._num_waiting -= len(rows.arrivals)
        if self._is_failing:
            self._is_failing = False
            log.warning("%s: records are written again; those of %d requests are lost", self._folder, self.num_lost)
        self._small.append(self._next)
        self._next += 1
        self._combine(state)
        return True

    def _combine(self, state: RunState) -> None:
        """Merge many small parts. If there is no room, the parts stay unchanged."""
        if len(self._small) < _MAX_PARTS:
            return
        with suppress(OSError, pa.ArrowException, HeadwayError):
            parts.combine(self._folder, self._small, state)
            self._small, self._next = [], self._next + 1
