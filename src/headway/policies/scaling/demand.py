"""Rates of arrivals from cumulative counts."""

from __future__ import annotations

from bisect import bisect_right


class ArrivalCounts:
    """Cumulative counts of arrivals, kept for `longest_s`."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._times_s: list[float] = []
        self._counts: list[int] = []

    def push(self, now: float, count: int) -> None:
        """Record the count since the start."""
        self._times_s.append(now)
        self._counts.append(count)
        # What was seen last before the window is its beginning.
        old = bisect_right(self._times_s, now - self._longest_s) - 1
        if old > 0:
            del self._times_s[:old], self._counts[:old]

    def rate_rps(self, window_s: float) -> float:
        """The mean rate over the last `window_s`, or since the oldest count."""
        first = max(bisect_right(self._times_s, self._times_s[-1] - window_s) - 1, 0)
        elapsed_s = self._times_s[-1] - self._times_s[first]
        return (self._counts[-1] - self._counts[first]) / elapsed_s if elapsed_s > 0 else 0.0


class StepRates:
    """Mean rates over equal time steps, from cumulative counts since the start.

    Between two counts the growth is taken to be linear.
    """

    def __init__(self, step_s: float, nothing_until_s: float = 0.0) -> None:
        self.step_s = step_s
        self.rates: list[float] = []
        """Per second, of each completed step."""
        self._seen_s, self._count = 0.0, 0.0
        self._count_at_step = 0.0
        self.push(nothing_until_s, 0)

    def push(self, now: float, count: float) -> None:
        """Record the count since the start."""
        while (end_s := (len(self.rates) + 1) * self.step_s) <= now:
            share = (end_s - self._seen_s) / (now - self._seen_s) if now > self._seen_s else 1.0
            at_end = self._count + share * (count - self._count)
            self.rates.append((at_end - self._count_at_step) / self.step_s)
            self._count_at_step = at_end
        self._seen_s, self._count = now, count
