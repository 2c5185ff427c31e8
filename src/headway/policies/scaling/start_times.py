"""Start times of replicas, from the counts that a scaler sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headway.core.view import PoolView

MOST_SAMPLES = 9
QUANTILE = 0.75
"""Quantile of a pool's recent start times, because a plan that relies on the median is late half of the time."""


class StartTimes:
    """Start times of pools, in seconds. Units are assumed to come up in the order of their requests.

    A start begins when `num_starting` rises and ends when it falls, so its duration is known to within the time between
    two calls. Failed starts do not count. An unfinished start that already took longer than all before counts with its
    time so far.
    """

    def __init__(self, prior_s: float) -> None:
        self._prior_s = prior_s
        self._pools: dict[str, _Starts] = {}
        self._recent_s: deque[float] = deque(maxlen=MOST_SAMPLES)
        """Recent start times of all pools: the best estimate for a pool without starts."""

    def update(self, pools: Iterable[PoolView], now: float) -> None:
        for pool in pools:
            starts = self._pools.get(pool.name)
            if starts is None:
                self._pools[pool.name] = starts = _Starts(pool.num_failed, now)
            self._recent_s.extend(starts.observe(pool.num_starting, pool.num_failed, now))

    def lead_s(self, pool: PoolView, now: float) -> float:
        """Seconds until a unit requested now serves."""
        starts = self._pools[pool.name]
        samples = starts.taken_s or self._recent_s
        expected_s = _upper(samples) if samples else self._prior_s
        return max(expected_s, now - starts.since_s[0]) if starts.since_s else expected_s

    def elapsed_s(self, pool: PoolView, now: float) -> float:
        """Total time for which the currently starting units have been starting."""
        return sum(now - since_s for since_s in self._pools[pool.name].since_s)


class _Starts:
    def __init__(self, num_failed: int, now: float) -> None:
        self.taken_s: deque[float] = deque(maxlen=MOST_SAMPLES)
        self.since_s: deque[float] = deque()
        """Times at which the currently starting units were requested."""
        self._failed, self._seen_s = num_failed, now

    def observe(self, num_starting: int, num_failed: int, now: float) -> list[float]:
        """The durations of the starts that ended since the last call."""
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
