"""A service's hold queue: requests that wait for room at a replica, sorted by an ordering."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush, nsmallest
from operator import itemgetter
from typing import Any, TypeGuard

from headway.control.live import HELD, Live
from headway.core.policy import MovingOrdering, Ordering, SharingOrdering

_MIN_STALE = 64
"""Minimum number of outdated entries before a rebuild, so that a few shares do not cause frequent rebuilds."""
_MOST_TRIED = 8
"""Number of shares to check, when the first request finds no room, for a share below its fair part. Such shares rank
first."""


def is_sharing(ordering: object) -> TypeGuard[SharingOrdering]:
    """Whether an ordering implements `SharingOrdering`. Python's own check takes 10 us, as long as a request."""
    return hasattr(ordering, "headroom") and isinstance(ordering, SharingOrdering)


def hold_queue(ordering: Ordering) -> HoldQueue:
    """An empty queue in this order."""
    kind = SharedHoldQueue if is_sharing(ordering) else HoldQueue
    return kind(ordering)


class HoldQueue:
    """A heap of held requests. The heap may contain requests that are no longer held; `first` removes such requests
    from the front."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._has_moving_ranks = hasattr(ordering, "next_change") and isinstance(ordering, MovingOrdering)
        self._heap: list[tuple[Any, int, Live]] = []
        self.num = 0
        """`len` of the queue, as an attribute because it is faster to read."""

    def __len__(self) -> int:
        """Number of requests in the heap, including some that are no longer held."""
        return self.num

    def push(self, live: Live, now: float) -> None:
        live.rank = self._ordering.rank(live, now)
        heappush(self._heap, (live.rank, live.id, live))
        self.num += 1

    def first(self, now: float) -> Live | None:
        """The held request with the first rank."""
        if self._has_moving_ranks and self._heap:
            self._heap = [(self._ordering.rank(live, now), live.id, live) for _, _, live in self._heap]
            heapify(self._heap)
        while self._heap:
            live = self._heap[0][2]
            if live.stage is HELD:
                return live
            self.pop(now)
        return None

    def pop(self, now: float) -> None:
        """Remove the request returned by `first`."""
        heappop(self._heap)
        self.num -= 1

    def next_below_share(self) -> Live | None:
        """A held request of the first request's tier that may use the room reserved for shares below their fair
        part."""
        return None

    def remove(self, live: Live, now: float) -> None:
        """Remove the request returned by `next_below_share`."""

    def rerank(self, live: Live, now: float) -> None:
        """Update ranks after the ordering counted a request's start or learned from its end."""

    def requests(self) -> list[Live]:
        """The held requests, unsorted."""
        return [live for _, _, live in self._heap if live.stage is HELD]

    def num_before(self, live: Live, now: float) -> int:
        """Number of held requests that rank before this request, which is not held itself. Linear in the queue's
        length."""
        rank = self._ordering.rank(live, now)
        return sum(each[0] <= rank for each in self._heap)

    def oldest_s(self, live: Live, now: float) -> float:
        """Seconds for which the first request of this request's share has waited."""
        first = self.first(now)
        return 0.0 if first is None else now - first.arrival_s

    def is_full(self, live: Live, most: int) -> bool:
        """Whether the queue has `most` requests already, so that this request must not be held."""
        if self.num < most:
            return False
        self._remove_ended()
        return self.num >= most

    def _remove_ended(self) -> None:
        """Remove the requests that are no longer held."""
        self._heap = [entry for entry in self._heap if entry[2].stage is HELD]
        heapify(self._heap)
        self.num = len(self._heap)


class SharedHoldQueue(HoldQueue):
    """One first-come-first-served line of requests per share; only the heads of the lines are ranked.

    Each operation takes logarithmic time, even if the start of a request changes many ranks.
    """

    _ordering: Any

    def __init__(self, ordering: Ordering) -> None:
        super().__init__(ordering)
        self._lines: dict[Hashable, list[tuple[float, int, Live]]] = {}
        """Maps each share to a heap of (arrival, id, request)."""
        self._heads: list[tuple[Any, int, Hashable]] = []
        """Heap of (rank, id, share); may contain outdated entries."""
        self._ranked: dict[Hashable, tuple[Any, int, Hashable]] = {}
        """Maps each share to its current entry in `_heads`."""

    def push(self, live: Live, now: float) -> None:
        share = self._ordering.share(live)
        line = self._lines.setdefault(share, [])
        heappush(line, (live.tier_since_s, live.id, live))
        self.num += 1
        if line[0][2] is live:
            self._rank(share, line, now)

    def _rank(self, share: Hashable, line: list[tuple[float, int, Live]], now: float) -> None:
        """Rank the head of a share's line again."""
        live = line[0][2]
        live.rank = self._ordering.rank(live, now)
        self._ranked[share] = entry = (live.rank, live.id, share)
        if len(self._heads) > 2 * len(self._ranked) + _MIN_STALE:
            self._heads = list(self._ranked.values())
            heapify(self._heads)
        else:
            heappush(self._heads, entry)

    def first(self, now: float) -> Live | None:
        while self._heads:
            entry = self._heads[0]
            share = entry[2]
            if self._ranked.get(share) != entry:  # not `is`: compiled tuples have no identity
                heappop(self._heads)
                continue
            live = self._lines[share][0][2]
            if live.stage is HELD:
                return live
            self.pop(now)
        return None

    def pop(self, now: float) -> None:
        self._pop_from(heappop(self._heads)[2], now)

    def _pop_from(self, share: Hashable, now: float) -> None:
        """Remove the head of a share's line."""
        line = self._lines[share]
        heappop(line)
        self.num -= 1
        if line:
            self._rank(share, line, now)
        else:
            del self._lines[share], self._ranked[share]

    def next_below_share(self) -> Live | None:
        lines = self._lines
        if len(lines) > 1:
            first, *others = nsmallest(_MOST_TRIED, self._ranked.values())
            tier = lines[first[2]][0][2].tier
            for _, _, share in others:
                live = lines[share][0][2]
                if live.tier == tier and live.stage is HELD and self._ordering.is_below_share(live):
                    return live
        return None

    def remove(self, live: Live, now: float) -> None:
        self._pop_from(self._ordering.share(live), now)

    def rerank(self, live: Live, now: float) -> None:
        if not self._lines:
            return
        share = self._ordering.share(live)
        if (line := self._lines.get(share)) is not None:
            self._rank(share, line, now)

    def requests(self) -> list[Live]:
        return [live for line in self._lines.values() for _, _, live in line if live.stage is HELD]

    def num_before(self, live: Live, now: float) -> int:
        """Estimated number of held requests that rank before this request: all of its own line, all of more urgent
        tiers, and from each other line of its tier about as many as from its own."""
        own, rank, tier = self._ordering.share(live), self._ordering.rank(live, now), live.tier
        num = len(self._lines.get(own, ()))
        most, found = num + 1, num
        for share, line in self._lines.items():
            head = line[0][2]
            if head.tier < tier:
                found += len(line)
            elif share != own and head.tier == tier:
                found += min(len(line), most if head.rank <= rank else num)
        return found

    def oldest_s(self, live: Live, now: float) -> float:
        line = self._lines.get(self._ordering.share(live))
        return now - line[0][0] if line else 0.0

    def is_full(self, live: Live, most: int) -> bool:
        """As in `HoldQueue`, but a share with less than an equal part of `most` may still add requests."""
        if self.num < most or not super().is_full(live, most):
            return False
        line = self._lines.get(self._ordering.share(live), [])
        return len(line) * (len(self._lines) + (not line)) >= most

    def _remove_ended(self) -> None:
        held = {share: [entry for entry in line if entry[2].stage is HELD] for share, line in self._lines.items()}
        self._lines = {share: line for share, line in held.items() if line}
        self.num = sum(map(len, self._lines.values()))
        for line in self._lines.values():
            heapify(line)
        # The head of a line may have been removed; the new head has the same rank except for its arrival.
        self._ranked = {share: (self._ranked[share][0], line[0][1], share) for share, line in self._lines.items()}
        self._heads = sorted(self._ranked.values(), key=itemgetter(0, 1))
