"""The gateway's clock: seconds since the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any


class Clock:
    """Seconds since the gateway started. More precise than an event loop's clock, which is rounded to milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_s: float | None = None) -> None:
        self._loop = loop
        self.start_s = monotonic() if start_s is None else start_s
        """The start on the machine's monotonic clock, which all its processes share."""

    @property
    def now(self) -> float:
        return monotonic() - self.start_s

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> asyncio.TimerHandle:
        """Call `action(time_s, argument)` at a time on this clock."""
        return self._loop.call_later(max(time_s - self.now, 0.0), action, time_s, argument)
