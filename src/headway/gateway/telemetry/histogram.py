"""The gateway's histogram: counts by bin, for the Prometheus metrics and the rolling statistics."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate


class Histogram:
    """Counts of observations by bin, and their sum.

    `bounds` are the inclusive upper bounds of the bins, in ascending order; one more bin is open at the top. Only bins
    that hold an observation take memory, so that fine bins are cheap.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts: defaultdict[int, int] = defaultdict(int)
        self.total = 0.0

    def observe(self, value: float, num: int = 1) -> int:
        """Count one value `num` times, and return its bin."""
        index = bisect_left(self._bounds, value)
        self.counts[index] += num
        self.total += value * num
        return index

    def merge(self, counts: Mapping[int, int], total: float) -> None:
        """Add the counts and the sum of another histogram that has the same bounds."""
        for index, num in counts.items():
            self.counts[index] += num
        self.total += total

    def clear(self) -> None:
        self.counts.clear()
        self.total = 0.0

    def cumulative(self) -> list[int]:
        """The number of observations in each bin and all lower bins."""
        return list(accumulate(self.counts.get(index, 0) for index in range(len(self._bounds) + 1)))

    def quantile(self, share: float) -> float | None:
        """The geometric middle of the bin that holds this quantile; None without observations."""
        rank, so_far = math.ceil(share * sum(self.counts.values())), 0
        for index in sorted(self.counts):
            so_far += self.counts[index]
            if so_far >= rank:
                low, high = self._bounds[max(index - 1, 0)], self._bounds[min(index, len(self._bounds) - 1)]
                return math.sqrt(low * high)
        return None
