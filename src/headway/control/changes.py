"""Caches per-replica values that a router reads, until the replicas change.

A router that reads hundreds of replicas per request takes several times as long as the simulation of the request,
although few replicas have changed since the last request. A simulated replica notes its changes here. For a value that
changes with time, such as KV blocks in use, the replica also states the time until which the value holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, Final

from headway.core.view import ReplicaView

KEPT_FROM: Final = 24
"""With fewer replicas, reading all of them is faster."""
_MOST_NOTES: Final = 1 << 14
_MOST_ENTRIES: Final = 8
"""Heap entries per value above which a heap is rebuilt."""


class Changes:
    """The replicas that have changed, in order, with duplicates."""

    __slots__ = ("generation", "ids", "is_read")

    def __init__(self) -> None:
        self.is_read = False
        """Whether a reader caches values, so that changes must be noted."""
        self.ids: list[int] = []
        self.generation = 0
        """Cached values of an earlier generation are invalid."""

    def limit(self) -> None:
        """Discard the notes when there are too many. Call at intervals."""
        if len(self.ids) > _MOST_NOTES:
            self.ids.clear()
            self.generation += 1


class ChangeReader:
    """Reports the positions of replicas that have changed since the last call."""

    __slots__ = (
        "_calls", "_changes", "_cursor", "_ends", "_ends_s", "_generation", "_positions", "_reported", "_reports_ends",
        "replicas",
    )  # fmt: skip

    def __init__(self, changes: Changes, reports_ends: bool) -> None:
        """`reports_ends`: a replica whose value, as `read` returned it, no longer holds is reported as changed."""
        self._changes, self._reports_ends = changes, reports_ends
        self.replicas: Sequence[ReplicaView] = ()
        self._ends_s: list[float] = []
        """Maps each position to the time until which the value holds unless the replica changes."""
        self._ends: list[tuple[float, int]] = []
        """Heap of (end time, position), if ends are reported; may contain outdated entries with times before those in
        `_ends_s`."""
        self._positions: dict[int, int] = {}
        """Replica id to position."""
        self._calls = 0
        self._reported: list[int] = []
        """Maps each position to the last call of `changed` that has reported it."""
        self._generation = -1
        self._cursor = 0

    def follows(self, replicas: Sequence[ReplicaView]) -> bool:
        """Whether these replicas are already tracked; if not, start to track them."""
        if replicas is self.replicas:
            return True
        self.replicas, self._generation = replicas, -1
        return False

    def is_void(self) -> bool:
        """Whether a replica may have changed unnoticed. Then call `begin` and recompute every value."""
        return self._generation != self._changes.generation

    def begin(self) -> None:
        """Start noting changes, and read from here on."""
        changes = self._changes
        changes.is_read = True
        self._generation, self._cursor = changes.generation, len(changes.ids)
        self._positions = {replica.id: position for position, replica in enumerate(self.replicas)}
        self._ends_s, self._ends = [inf] * len(self.replicas), []
        self._calls, self._reported = 0, [0] * len(self.replicas)

    def read(self, position: int, key: Callable[[Any], Any]) -> Any:
        """The value of `key` for a replica."""
        replica: Any = self.replicas[position]
        replica.holds_until_s = inf
        value = key(replica)
        self._ends_s[position] = end_s = replica.holds_until_s
        if end_s != inf and self._reports_ends:
            heappush(self._ends, (end_s, position))
        return value

    def has_ended(self, position: int, now: float) -> bool:
        """Whether the value that `read` returned may have changed by itself."""
        return self._ends_s[position] <= now

    def position(self, replica: int) -> int:
        """The position of a tracked replica."""
        return self._positions[replica]

    def changed(self, now: float) -> list[int]:
        """The positions of the replicas that have changed since the last call, without duplicates."""
        ids, positions, reported, found = self._changes.ids, self._positions, self._reported, list[int]()
        self._calls = call = self._calls + 1
        for i in range(self._cursor, len(ids)):
            position = positions.get(ids[i], -1)
            if position >= 0 and reported[position] != call:
                reported[position] = call
                found.append(position)
        self._cursor, ends = len(ids), self._ends
        while ends and ends[0][0] <= now:
            end_s, position = heappop(ends)
            if self._ends_s[position] == end_s and reported[position] != call:
                reported[position] = call
                found.append(position)
        return found


class KeptValues:
    """Caches `key(replica)` for each replica and recomputes it only for replicas that may have changed."""

    __slots__ = ("_entered", "_key", "_order", "_reader", "_values")

    def __init__(self, key: Callable[[Any], Any], changes: Changes, grows: bool = False) -> None:
        """`grows`: values do not fall by ticks, and only the least one is asked for (`first_least`)."""
        # A value that has grown is at most the current value, and `_order` corrects it.
        self._key, self._reader = key, ChangeReader(changes, reports_ends=not grows)
        self._values: list[Any] = []
        self._order: list[tuple[Any, int]] = []
        """Heap of (value, position), if the least value is asked for. A value that grew is corrected only when it
        reaches the top of the heap, so few updates change the heap."""
        self._entered: list[Any] = []
        """Maps each position to its value in the heap (the least, if it has several entries); at most the current
        value."""

    def values(self, replicas: Sequence[ReplicaView], now: float) -> Sequence[Any]:
        """The values at `now`, in the order of `replicas`."""
        # These replicas may be asked for only once, such as the replicas with room: cache their values from the second
        # use on.
        if not self._reader.follows(replicas):
            key = self._key
            return [key(replica) for replica in replicas]
        self._update(now)
        return self._values

    def first_least(self, replicas: Sequence[ReplicaView], now: float) -> int:
        """The position of the first replica with the least value at `now`; -1 if these replicas are not cached yet."""
        if not self._reader.follows(replicas):
            return -1
        self._update(now)
        order, values = self._order, self._values
        if not order or len(order) > _MOST_ENTRIES * len(values):
            self._order = order = [(value, position) for position, value in enumerate(values)]
            self._entered = values.copy()
            heapify(order)
        entered, latest = self._entered, -1
        while True:
            value, position = order[0]
            if entered[position] is not value:
                heappop(order)
            elif position != latest and self._reader.has_ended(position, now):
                latest = position
                self._compute(position)
            elif values[position] is value:
                return position
            else:
                entered[position] = values[position]
                heapreplace(order, (values[position], position))

    def _update(self, now: float) -> None:
        """Recompute the values of replicas that may have changed."""
        if self._reader.is_void():
            self._fill()
            return
        for position in self._reader.changed(now):
            self._compute(position)

    def _fill(self) -> None:
        self._reader.begin()
        num = len(self._reader.replicas)
        self._values, self._order = [None] * num, []
        for position in range(num):
            self._compute(position)

    def _compute(self, position: int) -> None:
        self._values[position] = value = self._reader.read(position, self._key)
        if self._order and value < self._entered[position]:
            self._entered[position] = value
            heappush(self._order, (value, position))
