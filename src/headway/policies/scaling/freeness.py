"""Scaling by the mean freeness of a pool (K-tier Llumnix, section 3.6)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from headway.core.errors import HeadwayError
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.freeness import free_share, freeness


class FreenessScaler:
    """Adds a replica while a pool's mean normal freeness is below `out_below`; removes one while it is above
    `in_above`.

    Freeness is in KV blocks per running request, without headroom; the thresholds -0.5 and 1.5 are the paper's. Taken
    literally they fill caches completely: a replica with 10,000 blocks and 100 running requests is above 1.5 until
    98.5% of its blocks are used, and below -0.5 only when its first waiting request lacks 50 blocks. With `normalised`
    (Headway's own), freeness is the free share of the cache, and the thresholds default to 0.1 and 0.6: removing one of
    two replicas that are 40% full leaves one that is 80% full, which does not trigger a new replica. A pool takes no
    step while replicas start or within `cooldown_s` of its last step, and removes none while one drains. Draining
    replicas do not count in the mean. A pool keeps at least one replica, because an empty pool has no freeness.
    """

    live_settings = frozenset(("out_below", "in_above", "interval_s", "cooldown_s", "normalised"))

    def __init__(
        self,
        out_below: float | None = None,
        in_above: float | None = None,
        interval_s: float = 1.0,
        cooldown_s: float = 10.0,
        normalised: bool = False,
    ) -> None:
        require_above(0, interval_s=interval_s)
        require_at_least(0, cooldown_s=cooldown_s)
        low, high = (0.1, 0.6) if normalised else (-0.5, 1.5)
        self._out_below = low if out_below is None else out_below
        self._in_above = high if in_above is None else in_above
        if not self._out_below < self._in_above:
            raise HeadwayError(f"out_below: expected less than in_above ({self._in_above}), got {self._out_below}")
        self.interval_s = interval_s
        self._cooldown_s = cooldown_s
        self._freeness = free_share if normalised else freeness
        self._stepped_s: dict[str, float] = {}

    def go_on(self, before: FreenessScaler) -> None:
        self._stepped_s = before._stepped_s

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        wanted = {}
        for pool in view.pools:
            last_s = self._stepped_s.get(pool.name)
            if pool.num_starting or (last_s is not None and view.now - last_s < self._cooldown_s):
                continue
            staying = sum(not replica.is_draining for replica in pool.replicas)
            number = min(max(staying + self._step(pool), pool.min_replicas, 1), pool.max_replicas)
            if number != staying:
                wanted[pool.name] = number
                self._stepped_s[pool.name] = view.now
        return wanted

    def _step(self, pool: PoolView) -> int:
        """The step: +1, 0 or -1 replicas."""
        staying = [self._freeness(replica) for replica in pool.replicas if not replica.is_draining]
        if not staying:
            return 0
        mean = fmean(staying)
        if mean < self._out_below:
            return 1
        return -1 if mean > self._in_above and len(staying) == len(pool.replicas) else 0
