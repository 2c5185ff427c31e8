"""Virtual time: events in the total order (time, priority, key, sequence), followed by the scheduling of replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, Final, Protocol

from headway.control.changes import Changes

# Priorities at equal times, first one first. Scheduling follows all of them.
FINISH: Final = 0
COMMAND: Final = 1
ARRIVAL: Final = 2
TICK: Final = 3
BEFORE: Final = 1 << 40
"""Offset subtracted from replica keys, so that they precede request keys."""


class Schedulable(Protocol):
    """A replica that decides its next iteration after all events of this instant."""

    id: int

    def decide(self, now: float) -> None: ...


Action = Callable[[float, Any], object]
Event = tuple[Any, ...]
"""(time, priority, key, sequence, action, argument). Not typed by place: compiled code would take the whole tuple apart
to read one value."""


_AN_ARRIVAL: Final[Event] = (0.0, ARRIVAL, 0, 0, None, None)
_NEVER_S: Final = float("inf")


class Kernel:
    """The event loop. `key` breaks ties between entities, so the order never depends on who pushed first."""

    __slots__ = (
        "_sequence",
        "arrival_s",
        "arrive",
        "changes",
        "deciding",
        "event",
        "heap",
        "now",
        "num_rounds",
        "push",
        "settled_s",
        "undecided",
    )

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[Event] = []
        self._sequence = 0
        self.arrival_s = _NEVER_S
        """The time of the next arrival, which is not in the heap: only one is known at a time."""
        self.arrive: Callable[[float], object] | None = None
        """Called at `arrival_s`, with the priority `ARRIVAL`. It sets the next time."""
        self.undecided: list[Schedulable] = []
        """Replicas that decide at the end of this instant. Each appends itself once."""
        self.changes = Changes()
        self.push: Callable[[Event], None] = partial(heappush, self.heap)
        """Add an event with the caller's own sequence number, unique per (priority, key)."""
        self.event: Event | None = None
        """The latest event."""
        self.deciding = -1
        """The replica that is deciding now; -1: none."""
        self.settled_s = -1.0
        """The latest instant in which replicas decided."""
        self.num_rounds = 0
        """Number of decision rounds begun in that instant."""

    def at(self, time_s: float, priority: int, key: int, action: Action, argument: Any = None) -> None:
        """Call `action(time_s, argument)` at `time_s`."""
        self._sequence += 1
        heappush(self.heap, (time_s, priority, key, self._sequence, action, argument))

    def run(self, until_s: float = _NEVER_S) -> None:
        """Run until there are no more events, or the next one is after `until_s`."""
        heap, undecided, pop = self.heap, self.undecided, heappop
        self._settle()
        while (heap or self.arrival_s < _NEVER_S) and (now := self.next_s()) <= until_s:
            self.now = now
            if self.arrival_s == now and self._arrival_is_first(now):
                self._arrive(now)
            else:
                self.event = event = pop(heap)
                event[4](event[0], event[5])
            if undecided and self.next_s() > now:
                self._settle()

    def next_s(self) -> float:
        """The time of the next event or arrival; infinite if there is none."""
        if self.heap:
            event_s: float = self.heap[0][0]
            if event_s < self.arrival_s:
                return event_s
        return self.arrival_s

    def _arrival_is_first(self, now: float) -> bool:
        """Whether an arrival at this instant precedes all events."""
        if not self.heap or self.heap[0][0] != now:
            return True
        priority: int = self.heap[0][1]
        return priority > ARRIVAL

    def _arrive(self, now: float) -> None:
        assert self.arrive is not None
        self.event, self.arrival_s = _AN_ARRIVAL, _NEVER_S
        self.arrive(now)

    def _settle(self) -> None:
        """Let due replicas decide; repeat while their decisions make other replicas due."""
        undecided = self.undecided
        if self.settled_s != self.now:
            self.settled_s, self.num_rounds = self.now, 0
        while undecided and self.next_s() > self.now:
            due = sorted(undecided, key=attrgetter("id")) if len(undecided) > 1 else undecided[:]
            undecided.clear()
            self.num_rounds += 1
            for replica in due:
                self.deciding = replica.id
                replica.decide(self.now)
        self.deciding = -1
