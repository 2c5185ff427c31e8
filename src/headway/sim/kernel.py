"""Virtual time: events in the total order (time, priority, key, sequence), then the scheduling of replicas."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol


FINISH, COMMAND, ARRIVAL, TICK = range(4)
"""Who goes first at equal times. Scheduling comes after all of them."""


class Schedulable(Protocol):
    """A replica that decides its next batch once everything else at this instant has happened."""

    id: int

    def schedule(self, now: float) -> None: ...


Action = Callable[[float, Any], None]


class Kernel:
    """The event loop. `key` breaks ties between entities, so that the order never depends on who pushed first."""

    __slots__ = ("_due", "_heap", "_sequence", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, int, Action, Any]] = []
        self._sequence = 0
        self._due: list[Schedulable] = []

    def at(self, time_s: float, priority: int, key: int, action: Action, argument: Any = None) -> None:
        """Call `action(time_s, argument)` then."""
        self._sequence += 1
        heappush(self._heap, (time_s, priority, key, self._sequence, action, argument))

    def due(self, replica: Schedulable) -> None:
        """Schedule this replica at the end of the present instant. The caller asks once per instant."""
        self._due.append(replica)

    def is_settled(self, now: float) -> bool:
        """Nothing else happens at this instant, and nobody else is due."""
        heap = self._heap
        return not self._due and (not heap or heap[0][0] > now)

    @property
    def num_events(self) -> int:
        """Events that stand."""
        return len(self._heap) + len(self._due)

    def run(self, until_s: float = float("inf")) -> None:
        """Run until nothing is left, or the next event lies after `until_s`."""
        heap = self._heap
        while True:
            while self._due and (not heap or heap[0][0] > self.now):
                self._schedule_due()
            if not heap or heap[0][0] > until_s:
                return
            time_s, _, _, _, action, argument = heappop(heap)
            self.now = time_s
            action(time_s, argument)

    def _schedule_due(self) -> None:
        due = self._due
        self._due = []
        if len(due) > 1:
            due.sort(key=_by_id)
        for replica in due:
            replica.schedule(self.now)


def _by_id(replica: Schedulable) -> int:
    return replica.id
