"""Keeps the minimum number of replicas."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.view import PoolsView
from headway.policies.arguments import require_above
from headway.policies.endpoints import within_bounds


class MinimumScaler:
    """Each pool has its minimum number of replicas: `min_replicas`, or the current value of `scheduled_min_replicas`.

    For fleets that only follow a schedule, in the form that `headway plan capacity --demand` writes.
    """

    def __init__(self, interval_s: float = 30.0) -> None:
        require_above(0, interval_s=interval_s)
        self.interval_s = interval_s

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        return {pool.name: within_bounds(pool, pool.min_replicas) for pool in view.pools}
