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

    __slots__ = ("_changes", "_cursor", "_generation", "_positions", "replicas")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.replicas: Sequence[ReplicaView] = ()
        self._positions: dict[int, int] = {}
        """Replica id to position."""
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

    def changed(self) -> list[int]:
        """The positions of the replicas that have changed since the last call, without duplicates."""
        ids, cursor = self._changes.ids, self._cursor
        if cursor == len(ids):
            return []
        self._cursor = len(ids)
        positions = self._positions
        return [positions[replica] for replica in set(ids[cursor:]) if replica in positions]


class KeptValues:
    """Caches `key(replica)` for each replica and recomputes it only for replicas that may have changed."""

    __slots__ = ("_ends", "_ends_s", "_entered", "_grows", "_key", "_order", "_reader", "_values")

    def __init__(self, key: Callable[[Any], Any], changes: Changes, grows: bool = False) -> None:
        """`grows`: values do not fall by ticks, and only the least one is asked for (`first_least`)."""
        self._key, self._reader, self._grows = key, ChangeReader(changes), grows
        self._values: list[Any] = []
        self._ends_s: list[float] = []
        """Maps each position to the time until which the value holds unless the replica changes."""
        self._ends: list[tuple[float, int]] = []
        """Heap of (end time, position); may contain outdated entries with times before those in `_ends_s`. Empty with
        `grows`: an outdated value is then at most the current value, and `_order` corrects it."""
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
            elif self._ends_s[position] <= now and position != latest:
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
        for position in self._reader.changed():
            self._compute(position)
        ends = self._ends
        while ends and ends[0][0] <= now:
            end_s, position = heappop(ends)
            if self._ends_s[position] == end_s:
                self._compute(position)

    def _fill(self) -> None:
        self._reader.begin()
        num = len(self._reader.replicas)
        self._values, self._ends_s, self._ends = [None] * num, [inf] * num, []
        self._order = []
        for position in range(num):
            self._compute(position)

    def _compute(self, position: int) -> None:
        replica: Any = self._reader.replicas[position]
        replica.holds_until_s = inf
        self._values[position] = value = self._key(replica)
        if self._order and value < self._entered[position]:
            self._entered[position] = value
            heappush(self._order, (value, position))
        self._ends_s[position] = end_s = replica.holds_until_s
        if end_s != inf and not self._grows:
            heappush(self._ends, (end_s, position))
