"""Preemption in front of the replicas: a running request is paused for a held one that ranks before it.

A paused request leaves its replica, is held, and continues from its tokens at any replica with room, which recomputes
its KV cache. The engines need not know the ordering: PASCAL's queues (IV-C) thus work in front of
first-come-first-served engines.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from typing import cast

from headway.control.live import DECODING, Live
from headway.control.service import Service
from headway.core.policy import QueuedOrdering, SteppedOrdering

Pause = Callable[[Live, float], None]
"""`Effects.pause`: (request, now)."""
_TURNS_PER_S = 1000


class Preemptions:
    """One service's preemptions; it checks every `interval_s`. Turns are counted in milliseconds."""

    def __init__(self, service: Service, interval_s: float, pause: Pause) -> None:
        self.service, self.interval_s, self._pause = service, interval_s, pause
        ordering = service.hold_ordering
        self._ordering = ordering
        self._queued = ordering if isinstance(ordering, QueuedOrdering) else None
        self._stepped = ordering if isinstance(ordering, SteppedOrdering) else None
        self._turns: dict[int, tuple[int, int | None]] = {}
        """Maps each request to (its queue, its token count at the end of its turn)."""
        self._pausing: set[int] = set()

    def enter(self, live: Live, now: float) -> None:
        """A request is held. Its turn begins now, unless the request has a turn already, because it was paused."""
        if live.id not in self._turns:
            self._begin_turn(live, now)

    def paused(self, live: Live) -> None:
        """A request has left its replica."""
        self._pausing.discard(live.id)

    def tick(self, now: float) -> None:
        """Pause running requests that rank last, one for each held request that ranks before the running request."""
        service, queue = self.service, self.service.hold_queue
        if not queue.num or not service.is_full:
            return
        running = [cast(Live, live) for view in service.up_views() for live in view.requests]
        held = queue.requests()
        present = {live.id for live in running}
        self._pausing &= present
        present.update(live.id for live in held)
        self._turns = {id: turn for id, turn in self._turns.items() if id in present}
        for live in running:
            self._advance(live, now)
        able = [live for live in running if live.stage is DECODING and live.move is None]
        last = sorted(
            ((self._ordering.rank(live, now), live.id, live) for live in able if live.id not in self._pausing),
            reverse=True,
        )
        num = len(self._pausing)
        ranked = [(self._ordering.rank(live, now), live.id) for live in held if service.fits(live)]
        first = nsmallest(num + len(last), ranked)[num:]
        for (held_rank, _), (rank, _, live) in zip(first, last, strict=False):
            if not held_rank < rank:
                break
            self._pausing.add(live.id)
            self._pause(live, now)

    def _advance(self, live: Live, now: float) -> None:
        """Begin a new turn if the last one has ended or the request changed its queue."""
        turn = self._turns.get(live.id)
        if turn is None:
            self._begin_turn(live, live.placed_s)
            return
        queue, ends_at = turn
        if queue != self._queue(live) or (ends_at is not None and live.generated_tokens >= ends_at):
            self._begin_turn(live, now)

    def _begin_turn(self, live: Live, now: float) -> None:
        tokens: int | None = self._ordering.quantum
        if self._stepped is not None:
            stepped = self._stepped.next_change_tokens(live)
            tokens = stepped if tokens is None or stepped is None else min(tokens, stepped)
            tokens = self._ordering.quantum if stepped is None else tokens
        self._turns[live.id] = self._queue(live), None if tokens is None else live.generated_tokens + tokens
        live.turn = int(now * _TURNS_PER_S)

    def _queue(self, live: Live) -> int:
        return 0 if self._queued is None else self._queued.queue(live)
