"""SageServe's reactive rule: one replica more when memory is full, one less when it is empty (section 4)."""

from __future__ import annotations

from headway.core.view import PoolCounts, PoolView
from headway.policies.arguments import at_least, between
from headway.policies.endpoints import fullest_use


class Reaction:
    """Out above one effective memory utilisation, in below another, a pool at a time, with a cool-down between steps.

    With the guard, replicas that are starting count as if they were up and took their part of the load, and none is
    given back while any starts.
    """

    def __init__(self, out_above: float, in_below: float, cooldown_s: float, pending_guard: bool) -> None:
        between("out_above", out_above, 0, 1)
        between("in_below", in_below, 0, out_above)
        at_least("cooldown_s", cooldown_s, 0)
        self._out_above, self._in_below = out_above, in_below
        self._cooldown_s = cooldown_s
        self._guard = pending_guard
        self._stepped_s: dict[str, float] = {}

    def direction(self, pool: PoolView) -> int:
        """+1, 0 or -1 replicas, as far as memory says."""
        use = self._use(pool, pool.num_serving)
        if use is None:
            return 0
        if use > self._out_above:
            return 1
        return -1 if use < self._in_below and self.may_shrink(pool) else 0

    def may_grow(self, pool: PoolView) -> bool:
        """With one more it would not be empty, and those that are starting would not do."""
        if self._guard and pool.num_starting:
            return self.direction(pool) > 0
        use = self._use(pool, pool.num_serving + 1)
        return use is not None and use >= self._in_below

    def may_shrink(self, pool: PoolView) -> bool:
        """With one less it would not be full."""
        if self._guard and pool.num_starting:
            return False
        use = self._use(pool, pool.num_serving - 1)
        return use is not None and use <= self._out_above

    def step(self, pool: PoolView, step: int, now: float) -> dict[str, int]:
        """So many replicas more or less, within bounds, unless the pool has just stepped; what a scaler says."""
        last_s = self._stepped_s.get(pool.name)
        number = pool.num_serving + pool.num_starting
        wanted = bounded(pool, number + step)
        if wanted == number or (last_s is not None and now - last_s < self._cooldown_s):
            return {}
        self._stepped_s[pool.name] = now
        return {pool.name: wanted}

    def _use(self, pool: PoolView, num_serving: int) -> float | None:
        """If so many carried the load, with the guard's helpers; None: nobody does."""
        if not pool.num_serving:
            return None
        use = fullest_use(replica for replica in pool.replicas if not replica.is_draining)
        num = num_serving + (pool.num_starting if self._guard else 0)
        return use * pool.num_serving / num if num > 0 else 1.0


def bounded(pool: PoolCounts, number: int) -> int:
    """Within the pool's bounds, and never none: an empty pool says nothing of its load."""
    return min(max(number, pool.min_replicas, 1), pool.max_replicas)
