"""How many requests come, over sliding windows."""

from __future__ import annotations

from bisect import bisect_right


class Arrivals:
    """Counts of arrivals since the start, as seen now and then; remembered for `longest_s`."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._times_s: list[float] = []
        self._counts: list[int] = []

    def push(self, now: float, count: int) -> None:
        """So many have come by now."""
        self._times_s.append(now)
        self._counts.append(count)
        # What was seen last before the window is its beginning.
        old = bisect_right(self._times_s, now - self._longest_s) - 1
        if old > 0:
            del self._times_s[:old], self._counts[:old]

    def rate_rps(self, window_s: float) -> float:
        """Mean over the last `window_s`, or as far back as can be seen."""
        first = max(bisect_right(self._times_s, self._times_s[-1] - window_s) - 1, 0)
        elapsed_s = self._times_s[-1] - self._times_s[first]
        return (self._counts[-1] - self._counts[first]) / elapsed_s if elapsed_s > 0 else 0.0
