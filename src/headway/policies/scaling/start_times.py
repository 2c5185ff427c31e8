"""How long replicas take to start, from the counts that a scaler sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headway.core.view import PoolView

MOST_SAMPLES = 9
QUANTILE = 0.75
"""Of the recent start times of a pool: a plan that relies on the median is late every other time."""


class StartTimes:
    """Start times of pools, in seconds. Units are taken to come up in the order in which they were requested.

    A start is seen when `num_starting` rises and its end when it falls, so each is known to within the time between two
    calls. What fails to start is no sample. A start that lasts longer than all before counts as long as it lasts.
    """

    def __init__(self, prior_s: float) -> None:
        self._prior_s = prior_s
        self._pools: dict[str, _Starts] = {}
        self._recent_s: deque[float] = deque(maxlen=MOST_SAMPLES)
        """Of all pools: the best guess for a pool that has not started anything."""

    def update(self, pools: Iterable[PoolView], now: float) -> None:
        for pool in pools:
            starts = self._pools.get(pool.name)
            if starts is None:
                self._pools[pool.name] = starts = _Starts(pool.num_failed, now)
            self._recent_s.extend(starts.observe(pool.num_starting, pool.num_failed, now))

    def lead_s(self, pool: PoolView, now: float) -> float:
        """Seconds until a unit that is requested now serves."""
        starts = self._pools[pool.name]
        samples = starts.taken_s or self._recent_s
        expected_s = _upper(samples) if samples else self._prior_s
        return max(expected_s, now - starts.since_s[0]) if starts.since_s else expected_s

    def elapsed_s(self, pool: PoolView, now: float) -> float:
        """For how long the units that start now have been starting, in sum."""
        return sum(now - since_s for since_s in self._pools[pool.name].since_s)


class _Starts:
    def __init__(self, num_failed: int, now: float) -> None:
        self.taken_s: deque[float] = deque(maxlen=MOST_SAMPLES)
        self.since_s: deque[float] = deque()
        """When the units that start now were requested."""
        self._failed, self._seen_s = num_failed, now

    def observe(self, num_starting: int, num_failed: int, now: float) -> list[float]:
        """The durations of starts that have ended since the last call."""
        ended: list[float] = []
        failures = max(num_failed - self._failed, 0)
        while len(self.since_s) > num_starting:
            taken_s = now - self.since_s.popleft()
            if failures:
                failures -= 1
            else:
                ended.append(taken_s)
        while len(self.since_s) < num_starting:
            self.since_s.append(self._seen_s)  # requested at the end of the last call
        self._failed, self._seen_s = num_failed, now
        self.taken_s.extend(ended)
        return ended


def _upper(samples: Iterable[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(int(QUANTILE * len(ordered)), len(ordered) - 1)]
