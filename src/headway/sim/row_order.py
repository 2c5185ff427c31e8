"""The place of each row of a run's tables in the order of events, used to merge rows of several runs.

Events are totally ordered by keys of requests and replicas (`kernel`). Suppose several runs simulate parts of a fleet
that share nothing, with the numbers of the whole. Together they have the events of the whole run. A row's place is its
time, and a code for what happened at that instant:

    scheduling rounds done before | scheduling, not an event | priority, key; or the deciding replica

An event added by another one at the same instant comes after it, whatever its key. So codes may decrease within an
instant, and the place of a row is the largest code so far (`sim.shards`).
"""

from __future__ import annotations

from array import array
from typing import Protocol

import numpy as np

from headway.core.column import Column
from headway.core.record import Columns
from headway.sim.kernel import ARRIVAL, Kernel
from headway.workload.spill import SpillFile

KEY_OFFSET = 1 << 40
_KEY_BITS, _SETTLE_BIT, _ROUND_BITS = 41, 43, 44
_FLUSH_ROWS = 1 << 16
"""Number of rows moved to columns at a time."""
AT_THE_END = float("inf")
"""Time of rows written after the last event, in the order of replicas or requests."""


class NumberedSource(Protocol):
    last_id: int
    """Id of the latest arrival."""


class RowOrder:
    """The places of the rows of three tables."""

    def __init__(self, source: NumberedSource) -> None:
        self._source = source
        self._kernel: Kernel | None = None
        self._is_over = False
        self.requests = RowPlaces(self)
        self.segments = RowPlaces(self)
        self.stretches = RowPlaces(self)

    def follow(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def end(self) -> None:
        """Mark the end of all events: rows that are noted later belong to no event."""
        self._is_over = True

    def place(self) -> tuple[float, int]:
        """The time and the code of the current event."""
        kernel = self._kernel
        if kernel is None or self._is_over:
            return AT_THE_END, 0
        rounds = kernel.num_rounds if kernel.settled_s == kernel.now else 0
        if kernel.deciding >= 0:
            return kernel.now, (rounds - 1) << _ROUND_BITS | 1 << _SETTLE_BIT | kernel.deciding
        key = self._source.last_id if kernel.priority == ARRIVAL else kernel.key
        return kernel.now, rounds << _ROUND_BITS | kernel.priority << _KEY_BITS | (key + KEY_OFFSET)


class RowPlaces:
    """The places of all rows of one table."""

    def __init__(self, order: RowOrder) -> None:
        self._order = order
        self._times_s, self._codes = array("d"), array("q")
        """The latest rows; earlier ones are in the columns."""
        self._columns = {
            "times_s": Column(np.dtype(np.float64), SpillFile),
            "codes": Column(np.dtype(np.int64), SpillFile),
        }
        self.num_rows = 0

    def note(self) -> None:
        """Record the place of a row that is being written."""
        time_s, code = self._order.place()
        self._times_s.append(time_s)
        self._codes.append(code)
        self.num_rows += 1
        if len(self._codes) == _FLUSH_ROWS:
            self._flush()

    def columns(self) -> Columns:
        """`times_s` and `codes` of all rows. Nothing can be noted afterwards."""
        self._flush()
        return {name: column.values() for name, column in self._columns.items()}

    def _flush(self) -> None:
        if self._codes:
            self._columns["times_s"].extend(np.array(self._times_s))
            self._columns["codes"].extend(np.array(self._codes))
            self._times_s, self._codes = array("d"), array("q")
