"""The gateway's clock: seconds since the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Any, Final, Protocol

Action = Callable[[float, Any], None]
_MIN_OVER: Final = 64
"""Number of expired deadlines that are always kept, so that few requests do not cause frequent rebuilds."""


class Clock:
    """Seconds since the gateway started: the `now` of control, of policies and of records.

    More precise than an event loop's clock, which is rounded to milliseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, start_s: float | None = None) -> None:
        """`start_s`: the start on the machine's monotonic clock, by default now. A worker gets the scheduler's
        start."""
        self._loop = loop
        self.start_s = monotonic() if start_s is None else start_s

    @property
    def now(self) -> float:
        """Seconds since the start. Equal in all processes of a gateway, because they share the monotonic clock."""
        return monotonic() - self.start_s

    def at(self, time_s: float, action: Action, argument: Any) -> asyncio.TimerHandle:
        """Call `action(time_s, argument)` at a time on this clock, or as soon as possible if the time has passed. The
        action gets the scheduled time, which is a little before `now`.
        """
        return self._loop.call_later(max(time_s - self.now, 0.0), action, time_s, argument)


class HasNow(Protocol):
    """The part of a clock that gives the time."""

    @property
    def now(self) -> float: ...


class TimedCalls(Protocol):
    """The part of a clock that calls actions."""

    def at(self, time_s: float, action: Action, argument: Any) -> object: ...


class Deadlines:
    """The deadlines of many requests, most of which end earlier, with a single timer of the event loop.

    Setting and cancelling a timer for each request would take several times as long.
    """

    def __init__(self, clock: TimedCalls, running: Container[int]) -> None:
        """`running`: the numbers of unfinished requests."""
        self._clock, self._running = clock, running
        self._heap: list[tuple[float, int, int, Action, Any]] = []
        """Heap of (time, number of the call of `add`, request id, action, request)."""
        self._order = count()
        self._next_s = float("inf")
        """The time of the earliest timer that is set."""
        self._max_size = _MIN_OVER

    def __len__(self) -> int:
        """Number of stored deadlines, including those of finished requests."""
        return len(self._heap)

    def add(self, time_s: float, action: Action, request: Any) -> None:
        """Call `action(time_s, request)` at that time, unless the request has ended before."""
        heap = self._heap
        if len(heap) >= self._max_size:
            heap[:] = [entry for entry in heap if entry[2] in self._running]
            heapify(heap)
            self._max_size = 2 * len(heap) + _MIN_OVER
        heappush(heap, (time_s, next(self._order), request.id, action, request))
        if time_s < self._next_s:
            self._set_timer(time_s)

    def _set_timer(self, time_s: float) -> None:
        self._next_s = time_s
        self._clock.at(time_s, self._expire, None)

    def _expire(self, now: float, _: object) -> None:
        """Call the actions that are due, and set the timer for the next deadline."""
        if now > self._next_s:
            return  # an earlier timer has taken this timer's place
        self._next_s = float("inf")
        heap = self._heap
        try:
            while heap and (heap[0][0] <= now or heap[0][2] not in self._running):
                time_s, _, number, action, argument = heappop(heap)
                if number in self._running:
                    action(time_s, argument)
        finally:
            if heap and heap[0][0] < self._next_s:
                self._set_timer(heap[0][0])
