"""Replicas by the clock, from a plan made beforehand."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.errors import HeadwayError, unknown
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least


class TimetableScaler:
    """A given number of replicas for each time step; the last step's number after the last step.

    `counts` gives the replicas by pool, one number for each `step_s` since the start; pools without an entry are not
    scaled. An increase is requested `ahead_s` early, so that the replicas are up when the step begins. Numbers beyond a
    pool's bounds are an error.
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
        self._is_checked = False

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        if not self._is_checked:
            self._check({pool.name: pool for pool in view.pools})
            self._is_checked = True
        now, soon = (int(at_s // self._step_s) for at_s in (view.now, view.now + self._ahead_s))
        return {name: max(counts[min(now, len(counts) - 1) : soon + 1]) for name, counts in self._counts.items()}

    def _check(self, pools: Mapping[str, PoolView]) -> None:
        for name, counts in self._counts.items():
            if name not in pools:
                raise unknown("pool", name, pools, "counts")
            fewest, most = pools[name].min_replicas, pools[name].max_replicas
            for step, number in enumerate(counts):
                if not fewest <= number <= most:
                    raise HeadwayError(f"counts: {name}: step {step} has {number}; expected {fewest} to {most}")
