"""SageServe's reactive scaling (section 4), the baseline for its forecasts."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.endpoints import fullest_use, within_bounds


class ReactiveRule:
    """Grow above one utilisation and shrink below another, one replica at a time, with a cool-down between steps.

    With `pending_guard`, starting replicas count as if they carried their part of the load, and no replica is removed
    while one starts.
    """

    def __init__(self, out_above: float, in_below: float, cooldown_s: float, pending_guard: bool) -> None:
        require_between(0, 1, out_above=out_above)
        require_between(0, out_above, in_below=in_below)
        require_at_least(0, cooldown_s=cooldown_s)
        self._out_above, self._in_below = out_above, in_below
        self._cooldown_s = cooldown_s
        self._guard = pending_guard
        self._stepped_s: dict[str, float] = {}

    def go_on(self, before: ReactiveRule) -> None:
        self._stepped_s = before._stepped_s

    def direction(self, pool: PoolView) -> int:
        """The step by memory use alone: +1, 0 or -1 replicas."""
        use = self._use(pool, pool.num_serving)
        if use is None:
            return 0
        if use > self._out_above:
            return 1
        return -1 if use < self._in_below and self.may_shrink(pool) else 0

    def may_grow(self, pool: PoolView) -> bool:
        """Whether the pool would still be used enough with one more replica, and starting replicas do not suffice."""
        if self._guard and pool.num_starting:
            return self.direction(pool) > 0
        use = self._use(pool, pool.num_serving + 1)
        return use is not None and use >= self._in_below

    def may_shrink(self, pool: PoolView) -> bool:
        if self._guard and pool.num_starting:
            return False
        use = self._use(pool, pool.num_serving - 1)
        return use is not None and use <= self._out_above

    def step(self, pool: PoolView, step: int, now: float) -> dict[str, int]:
        """The pool's new count after `step` more replicas, within bounds; empty during the cool-down or without a
        change."""
        last_s = self._stepped_s.get(pool.name)
        number = pool.num_serving + pool.num_starting
        wanted = within_bounds(pool, number + step)
        if wanted == number or (last_s is not None and now - last_s < self._cooldown_s):
            return {}
        self._stepped_s[pool.name] = now
        return {pool.name: wanted}

    def _use(self, pool: PoolView, num_serving: int) -> float | None:
        """Utilisation if `num_serving` replicas (and, with the guard, the starting ones) carried the load; None if none
        serves."""
        if not pool.num_serving:
            return None
        use = fullest_use(replica for replica in pool.replicas if not replica.is_draining)
        num = num_serving + (pool.num_starting if self._guard else 0)
        return use * pool.num_serving / num if num > 0 else 1.0


class ReactiveScaler:
    """Adds a replica while a pool's memory utilisation is above `out_above`; removes one while it is below `in_below`.

    Utilisation is KV blocks in use over KV blocks, of the replicas that do not drain. Steps of a pool are `cooldown_s`
    apart. With `pending_guard`, which the paper does not have, starting replicas count as if they carried their part of
    the load, so that one rise does not add replicas until the first one is up, and no replica is removed while one
    starts. The paper checks at each request; this scaler checks every `interval_s`.
    """

    live_settings = frozenset(("out_above", "in_below", "cooldown_s", "pending_guard", "interval_s"))

    def __init__(
        self,
        out_above: float = 0.7,
        in_below: float = 0.3,
        cooldown_s: float = 15.0,
        pending_guard: bool = True,
        interval_s: float = 5.0,
    ) -> None:
        require_above(0, interval_s=interval_s)
        self.interval_s = interval_s
        self._reaction = ReactiveRule(out_above, in_below, cooldown_s, pending_guard)

    def go_on(self, before: ReactiveScaler) -> None:
        self._reaction.go_on(before._reaction)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        wanted: dict[str, int] = {}
        for pool in view.pools:
            wanted |= self._reaction.step(pool, self._reaction.direction(pool), view.now)
        return wanted
