"""Delays of the gateway's event loops. A loop that is busy, or whose process waits for a CPU, reads tokens late. The
measured token times then describe the gateway, not the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from headway.gateway.clock import Clock

PERIOD_S = 0.1
"""Time between two samples of a loop, and the resolution of the stored delays."""
KEPT_S = 900.0
"""Time for which delays are kept."""
RECENT_S = 60.0
"""Window of the longest delay that is shown."""
LEAST_S = 0.002
"""Minimum delay that counts. Shorter delays are normal for a timer."""

Delay = tuple[float, float]
"""(time at which a callback was due, in seconds on the gateway's clock; seconds by which it ran later)."""


class LoopDelay:
    """The delays of one event loop, and the delays that workers report of their loops."""

    def __init__(self, clock: Clock, num_taken: int = 0) -> None:
        """`num_taken`: number of delays of this loop that are kept for the next call of `take`."""
        self._clock = clock
        self._worst_s: dict[int, float] = {}
        """Maps each sampling period to the longest delay that overlaps it."""
        self._untaken: deque[Delay] = deque(maxlen=num_taken)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sample this loop from now on."""
        self._timer = self._clock.at(self._clock.now + PERIOD_S, self._sample, None)

    def stop(self) -> None:
        """Cancel the next sample. Collected delays stay."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self, due_s: float, _: object) -> None:
        delay = due_s, self._clock.now - due_s
        if delay[1] >= LEAST_S:
            self.add((delay,))
            self._untaken.append(delay)
        self.start()

    def take(self) -> list[Delay]:
        """The delays of this loop since the last call."""
        taken = list(self._untaken)
        self._untaken.clear()
        return taken

    def add(self, delays: Iterable[Delay]) -> None:
        """Add delays of this loop, or of another loop on the same clock."""
        worst_s = self._worst_s
        for due_s, late_s in delays:
            first = max(due_s - PERIOD_S, due_s + late_s - KEPT_S)
            for period in range(int(first / PERIOD_S), int((due_s + late_s) / PERIOD_S) + 1):
                worst_s[period] = max(worst_s.get(period, 0.0), late_s)
        if len(worst_s) > 2 * KEPT_S / PERIOD_S:
            oldest = (self._clock.now - KEPT_S) / PERIOD_S
            self._worst_s = {period: late_s for period, late_s in worst_s.items() if period >= oldest}

    def at(self, time_s: float) -> float:
        """The delay in seconds with which the gateway may have seen an event at this time; 0 if none counts."""
        return self._worst_s.get(int(time_s / PERIOD_S), 0.0)

    def recent_s(self) -> float:
        """The longest delay of the last `RECENT_S`, in seconds."""
        last = int(self._clock.now / PERIOD_S)
        known = self._worst_s
        return max((known.get(period, 0.0) for period in range(last - int(RECENT_S / PERIOD_S), last + 1)), default=0.0)
