"""As many replicas as their mean freeness asks for (K-tier Llumnix, section 3.6)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from headway.core.errors import HeadwayError
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.freeness import free_share, normal_freeness


class FreenessScaler:
    """One replica more while a pool's mean normal freeness is below `out_below`, one less above `in_above`.

    Freeness is in KV blocks per running request, without headroom, and the thresholds -0.5 and 1.5 are the paper's.
    Taken literally they run caches to the brim: a replica with 10,000 blocks and 100 running requests is
    above 1.5 until 98.5% of its blocks are used, and below -0.5 only when its first in line lacks 50 blocks. With
    `normalised`, freeness is the share of the cache that is free (Headway's own; the thresholds are then 0.1
    and 0.6 unless given: one replica less of two that are 40% full leaves 80%, which asks for none back). A pool
    takes no step while replicas start or within `cooldown_s` of its last, and none down while one drains, which
    does not count in the mean. It never leaves a pool empty: freeness could not bring it back.
    """

    def __init__(
        self,
        out_below: float | None = None,
        in_above: float | None = None,
        interval_s: float = 1.0,
        cooldown_s: float = 10.0,
        normalised: bool = False,
    ) -> None:
        require_above("interval_s", interval_s, 0)
        require_at_least("cooldown_s", cooldown_s, 0)
        low, high = (0.1, 0.6) if normalised else (-0.5, 1.5)
        self._out_below = low if out_below is None else out_below
        self._in_above = high if in_above is None else in_above
        if not self._out_below < self._in_above:
            raise HeadwayError(f"out_below: expected less than in_above ({self._in_above}), got {self._out_below}")
        self.interval_s = interval_s
        self._cooldown_s = cooldown_s
        self._freeness = free_share if normalised else normal_freeness
        self._stepped_s: dict[str, float] = {}

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
        """+1, 0 or -1 replicas."""
        staying = [self._freeness(replica) for replica in pool.replicas if not replica.is_draining]
        if not staying:
            return 0
        mean = fmean(staying)
        if mean < self._out_below:
            return 1
        return -1 if mean > self._in_above and len(staying) == len(pool.replicas) else 0
