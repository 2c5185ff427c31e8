"""Both ends of a link send heartbeats, so that each notices when the other one hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.gateway.workers.protocol import Heartbeat, Link

MAX_MISSED = 5
"""Periods without a message after which the other end counts as hanging."""
_START_FACTOR = 5
"""So many times longer may pass before the first message, as a process has to start."""


class HeartbeatMonitor:
    """One end's heartbeats. Periods are counted rather than timed: after a pause of the whole machine, neither end is
    taken to hang."""

    def __init__(
        self,
        link: Link,
        hang_s: float,
        on_silent: Callable[[], None],
        on_responsive: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_silent` is called after `hang_s` without a message, `on_responsive` at the first message after that."""
        self._link, self._period_s = link, hang_s / MAX_MISSED
        self._on_silent, self._on_responsive = on_silent, on_responsive
        self._num_missed = -_START_FACTOR * MAX_MISSED
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._beat)
        self._link.send(Heartbeat())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self.start()
        has_received, self._link.has_received = self._link.has_received, False
        was_silent = self._num_missed >= MAX_MISSED
        self._num_missed = 0 if has_received else self._num_missed + 1
        if has_received and was_silent:
            self._on_responsive()
        elif self._num_missed == MAX_MISSED:
            self._on_silent()
