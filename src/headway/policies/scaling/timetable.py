"""Replicas by the clock: a plan made beforehand."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.errors import unknown
from headway.core.view import PoolsView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.endpoints import within_bounds


class TimetableScaler:
    """A given number of replicas for each time step; the last step's number after the last step.

    `counts` has the replicas by pool, one number for each `step_s` since the start; pools without an entry are not
    scaled. An increase is requested `ahead_s` early, so that the replicas are up when the step begins.
    """

    def __init__(
        self,
        counts: dict[str, list[int]] | None = None,
        step_s: float = 3600.0,
        ahead_s: float = 0.0,
        interval_s: float = 5.0,
    ) -> None:
        for name, steps in (counts or {}).items():
            require_at_least(1, **{f"counts: {name}: steps": len(steps)})
            for number in steps:
                require_at_least(0, **{f"counts: {name}": number})
        require_above(0, step_s=step_s, interval_s=interval_s)
        require_at_least(0, ahead_s=ahead_s)
        self.interval_s = interval_s
        self._counts = counts or {}
        self._step_s, self._ahead_s = step_s, ahead_s

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        pools = {pool.name: pool for pool in view.pools}
        wanted = {}
        for name, counts in self._counts.items():
            if name not in pools:
                raise unknown("pool", name, pools, "counts")
            now, soon = (int(at_s // self._step_s) for at_s in (view.now, view.now + self._ahead_s))
            wanted[name] = within_bounds(pools[name], max(counts[min(now, len(counts) - 1) : soon + 1]))
        return wanted
