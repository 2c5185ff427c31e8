"""Virtual time: events in the total order (time, priority, key, sequence), followed by the scheduling of replicas."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, Final

from mypy_extensions import mypyc_attr

from headway.control.changes import Changes
from headway.sim.tournament import IS_COMPILED, InterpretedTournament, Tournament

# Priorities at equal times, first one first. Scheduling follows all of them.
FINISH: Final = 0
COMMAND: Final = 1
ARRIVAL: Final = 2
TICK: Final = 3
_ROOM: Final = 8
"""Numbers of replicas for which room is made at once."""
BEFORE: Final = 1 << 40
"""Offset subtracted from replica keys, so that they precede request keys."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Sleeper:
    """A replica: it sleeps until a boundary, and decides its next iteration after all events of an instant."""

    __slots__ = ("id",)

    id: int

    def wake(self, now: float) -> None:
        """Handle the boundary."""
        raise NotImplementedError

    def decide(self, now: float) -> None:
        """Decide the next iteration."""
        raise NotImplementedError


Action = Callable[[float, Any], object]
Event = tuple[Any, ...]
"""(time, priority, key, sequence, action, argument). Not typed by place: compiled code would take the whole tuple apart
to read one value."""


class Kernel:
    """The event loop. `key` breaks ties between entities, so the order never depends on who pushed first."""

    __slots__ = (
        "_heap",
        "_sequence",
        "_sleepers",
        "arrival_s",
        "arrive",
        "boundaries",
        "changes",
        "deciding",
        "event_s",
        "key",
        "now",
        "num_rounds",
        "priority",
        "settled_s",
        "undecided",
    )

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Event] = []
        self.event_s = inf
        """The time of the first event in the heap."""
        self._sequence = 0
        self._sleepers: list[Sleeper] = []
        self.boundaries = Tournament() if IS_COMPILED else InterpretedTournament()
        """When each replica wakes, by the number from `add`: an event with the priority `FINISH` and the replica's
        id as its key."""
        self.arrival_s = inf
        """The time of the next arrival, which is not in the heap: only one is known at a time."""
        self.arrive: Callable[[float], object] | None = None
        """Called at `arrival_s`, with the priority `ARRIVAL`. It sets the next time."""
        self.undecided: list[int] = []
        """The numbers of replicas that decide at the end of this instant, each once."""
        self.changes = Changes()
        self.priority = self.key = 0
        """Of the latest event."""
        self.deciding = -1
        """The replica that is deciding now; -1: none."""
        self.settled_s = -1.0
        """The latest instant in which replicas decided."""
        self.num_rounds = 0
        """Number of decision rounds begun in that instant."""

    def add(self, sleeper: Sleeper) -> int:
        """The number of one more replica. Call it in order of ids."""
        assert not self._sleepers or self._sleepers[-1].id < sleeper.id
        number = len(self._sleepers)
        if not number % _ROOM:
            self.boundaries.extend_to(number + _ROOM)
        self._sleepers.append(sleeper)
        return number

    def at(self, time_s: float, priority: int, key: int, action: Action, argument: Any = None) -> None:
        """Call `action(time_s, argument)` at `time_s`. The priority is not `FINISH`."""
        self._sequence += 1
        heappush(self._heap, (time_s, priority, key, self._sequence, action, argument))
        if time_s < self.event_s:
            self.event_s = time_s

    def run(self, until_s: float = inf) -> None:
        """Run until there are no more events, or the next one is after `until_s`."""
        boundaries, sleepers, undecided = self.boundaries, self._sleepers, self.undecided
        self._settle()
        while True:
            now = boundaries.least
            if self.event_s < now:
                now = self.event_s
            if self.arrival_s < now:
                now = self.arrival_s
            if now > until_s or now == inf:
                return
            self.now = now
            if boundaries.least == now:
                sleeper = sleepers[boundaries.pop()]
                self.priority, self.key = FINISH, sleeper.id
                sleeper.wake(now)
            elif self.event_s == now and (self.arrival_s > now or self._heap[0][1] < ARRIVAL):
                self._happen()
            else:
                self._arrive(now)
            if undecided and self.next_s() > now:
                self._settle()

    def close(self) -> None:
        """Let go of the replicas and of the driver, which refer to the kernel."""
        self._sleepers.clear()
        self._heap.clear()
        self.arrive = None

    def next_s(self) -> float:
        """The time of the next event; infinite if there is none."""
        next_s = self.boundaries.least
        if self.event_s < next_s:
            next_s = self.event_s
        if self.arrival_s < next_s:
            next_s = self.arrival_s
        return next_s

    def _happen(self) -> None:
        event = heappop(self._heap)
        self.event_s = self._heap[0][0] if self._heap else inf
        self.priority, self.key = event[1], event[2]
        event[4](event[0], event[5])

    def _arrive(self, now: float) -> None:
        assert self.arrive is not None
        self.priority, self.key, self.arrival_s = ARRIVAL, 0, inf
        self.arrive(now)

    def _settle(self) -> None:
        """Let due replicas decide; repeat while their decisions make other replicas due."""
        undecided = self.undecided
        if self.settled_s != self.now:
            self.settled_s, self.num_rounds = self.now, 0
        while undecided and self.next_s() > self.now:
            due = sorted(undecided) if len(undecided) > 1 else undecided[:]
            undecided.clear()
            self.num_rounds += 1
            for number in due:
                replica = self._sleepers[number]
                self.deciding = replica.id
                replica.decide(self.now)
        self.deciding = -1
