"""The gateway's clock: seconds since the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any


class Clock:
    """Seconds since the gateway started: the `now` of control, of policies and of records.

    More precise than an event loop's clock, which is rounded to milliseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, start_s: float | None = None) -> None:
        """`start_s` is the start on the machine's monotonic clock, by default now. A worker gets the scheduler's."""
        self._loop = loop
        self.start_s = monotonic() if start_s is None else start_s

    @property
    def now(self) -> float:
        """Seconds since the start: the same in all processes of a gateway, as they share the monotonic clock."""
        return monotonic() - self.start_s

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> asyncio.TimerHandle:
        """Call `action(time_s, argument)` at a time on this clock, or as soon as possible if that has passed.

        The action gets the time for which it was scheduled, which is a little before `now`.
        """
        return self._loop.call_later(max(time_s - self.now, 0.0), action, time_s, argument)
