"""The requests that wait at a replica: on their way to its scheduler, or in the scheduler's queue.

A request is first on its way (the engine's frontend takes time), then in the queue by its rank.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from headway.control.live import WAITING, Live
from headway.core.policy import MovingOrdering, Ordering, QueuedOrdering, SteppedOrdering

Entry = tuple[object, int, Live]
"""(rank, id, request)."""


class WaitingQueue:
    """One replica's waiting requests, and the properties of its ordering."""

    __slots__ = (
        "entries",
        "has_moving_ranks",
        "inbox",
        "moving_ordering",
        "preemptive",
        "quantum",
        "queued_ordering",
        "rank",
        "set_aside",
        "stepped_ordering",
    )

    def __init__(self, ordering: Ordering) -> None:
        self.rank = ordering.rank
        self.quantum, self.preemptive = ordering.quantum, ordering.preemptive
        # Protocol checks take 30 us in total, and few orderings have these attributes.
        moves, steps = hasattr(ordering, "next_change"), hasattr(ordering, "next_change_tokens")
        self.moving_ordering = ordering if moves and isinstance(ordering, MovingOrdering) else None
        self.stepped_ordering = ordering if steps and isinstance(ordering, SteppedOrdering) else None
        has_queues = hasattr(ordering, "num_queues")
        self.queued_ordering = ordering if has_queues and isinstance(ordering, QueuedOrdering) else None
        self.has_moving_ranks = ordering.quantum is not None or self.moving_ordering is not None
        """Whether ranks change while requests wait."""
        self.clear()

    def clear(self) -> None:
        """Remove all requests, on their way and in the queue."""
        self.inbox: list[Live] = []
        """Requests on their way to the scheduler, which sees them from `Live.ready_s` on."""
        self.entries: list[Entry] = []
        """Heap. May contain requests that no longer wait."""
        self.set_aside: list[Entry] = []
        """Entries skipped while requests behind them are admitted."""

    def push(self, live: Live, now: float) -> None:
        """Put a request into the queue."""
        live.rank = rank = self.rank(live, now)
        heappush(self.entries, (rank, live.id, live))

    def first(self) -> Live | None:
        """The request that ranks first."""
        entries = self.entries
        while entries:
            live = entries[0][2]
            if live.stage is WAITING:
                return live
            heappop(entries)
        return None

    def pop(self) -> None:
        """Remove the request returned by `first`."""
        heappop(self.entries)

    def requests(self) -> list[Live]:
        """The requests in the queue and on their way to it, unsorted."""
        return [*self.queued_requests(), *self.inbox]

    def queued_requests(self) -> list[Live]:
        """The requests in the queue, unsorted."""
        return [entry[2] for entry in self.entries if entry[2].stage is WAITING]

    def leave_inbox(self, live: Live) -> None:
        """Remove a request that is on its way. A request in the queue is skipped later, by its stage."""
        self.inbox = [other for other in self.inbox if other is not live]

    def delete(self, live: Live) -> None:
        """Delete a request's entry, so that the request can be queued again."""
        self.leave_inbox(live)
        self.entries = [entry for entry in self.entries if entry[2] is not live]
        heapify(self.entries)

    def pass_over(self) -> None:
        """Set the first entry aside until `take_back`."""
        self.set_aside.append(heappop(self.entries))

    def take_back(self) -> None:
        """Put the skipped entries back into the queue."""
        for entry in self.set_aside:
            heappush(self.entries, entry)
        self.set_aside.clear()

    def take_ready(self, seen_s: float, now: float) -> None:
        """Queue the requests that were ready at `seen_s`."""
        later = []
        for live in self.inbox:
            if live.ready_s > seen_s:
                later.append(live)
            else:
                self.push(live, now)
        self.inbox = later

    def rerank(self, now: float) -> None:
        """Recompute the rank of every request in the queue."""
        self.entries = [(self.rank(live, now), live.id, live) for live in self.queued_requests()]
        for rank, _, live in self.entries:
            live.rank = rank
        heapify(self.entries)
