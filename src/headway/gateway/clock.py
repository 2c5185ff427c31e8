"""The time that control is told: seconds since the gateway started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any


class Clock:
    """Seconds since the gateway started. Event loops round theirs to milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_s: float | None = None) -> None:
        self._loop = loop
        self.start_s = monotonic() if start_s is None else start_s
        """On the clock that all processes of a machine share."""

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.start_s

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> asyncio.TimerHandle:
        """Call `action(time_s, argument)` at a time on this clock."""
        return self._loop.call_later(max(time_s - self.now, 0.0), action, time_s, argument)
