"""Both ends of a link say again and again that they are there, so that each notices when the other one hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.gateway.workers.protocol import Beat, Link

BEATS = 5
"""As many times is the other end not heard before it counts as hanging."""
_START = 5
"""So many times longer may pass before it is first heard: a process has to start."""


class Heartbeat:
    """One end's. It counts its own beats: an end that did not run itself, as its machine slept, blames nobody."""

    def __init__(
        self, link: Link, hang_s: float, silent: Callable[[], None], back: Callable[[], None] = lambda: None
    ) -> None:
        """`silent` is called when nothing has been heard for `hang_s`, `back` when something is heard after that."""
        self._link, self._period_s = link, hang_s / BEATS
        self._silent, self._back = silent, back
        self._num_unheard = -_START * BEATS
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on."""
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._beat)
        self._link.say(Beat())

    def stop(self) -> None:
        """No longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self.start()
        is_heard, self._link.is_heard = self._link.is_heard, False
        was_silent = self._num_unheard >= BEATS
        self._num_unheard = 0 if is_heard else self._num_unheard + 1
        if is_heard and was_silent:
            self._back()
        elif self._num_unheard == BEATS:
            self._silent()
