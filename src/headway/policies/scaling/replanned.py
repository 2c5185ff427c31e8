"""The fleet of a plan that is recomputed during serving, rolled out one replica at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headway.core.policy import CascadeReplanner
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least


class ReplannedScaler:
    """Follows a planner (Cascadia, section 4.4, appendix G): replicas common to both plans stay.

    The others change one after the other. An added replica starts as soon as there are GPUs for it. A dropped replica
    drains when the next addition needs its GPUs, and the last replica of a model not before another one serves.
    """

    def __init__(self, planner: CascadeReplanner, num_gpus: int, interval_s: float = 2.0) -> None:
        require_at_least(1, num_gpus=num_gpus)
        require_above(0, interval_s=interval_s)
        self.interval_s = interval_s
        self._planner, self._num_gpus = planner, num_gpus

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        planned = self._planner.replicas(view.now)
        pools = [pool for pool in view.pools if pool.name in planned]
        wanted = {pool.name: min(max(planned[pool.name], pool.min_replicas), pool.max_replicas) for pool in pools}
        counts = {pool.name: pool.num_serving + pool.num_starting for pool in pools}
        needed = {pool.model for pool in pools if wanted[pool.name]}
        if needed <= {pool.model for pool in pools if pool.num_serving}:
            self._planner.adopt()
        free = self._num_gpus - sum(_gpus(pool) * (_num_up(pool) + pool.num_starting + pool.num_down) for pool in pools)
        missing = [pool for pool in pools if counts[pool.name] < wanted[pool.name]]
        staying: Counter[str] = Counter()
        for pool in pools:
            staying[pool.model] += min(counts[pool.name], wanted[pool.name])
        for pool in sorted(missing, key=lambda each: (staying[each.model] > 0, _gpus(each))):
            while counts[pool.name] < wanted[pool.name] and _gpus(pool) <= free:
                counts[pool.name] += 1
                free -= _gpus(pool)
        short = min((_gpus(pool) for pool in missing if counts[pool.name] < wanted[pool.name]), default=None)
        self._drop(pools, wanted, counts, needed, free, short)
        return counts

    def _drop(
        self,
        pools: Sequence[PoolView],
        wanted: Mapping[str, int],
        counts: dict[str, int],
        needed: set[str],
        free: int,
        short: int | None,
    ) -> None:
        """Drain replicas until the next addition has room; without a pending addition, drain all redundant ones."""
        coming = free + sum(_gpus(pool) * (_num_up(pool) - pool.num_serving) for pool in pools)
        serving = {model: sum(pool.num_serving for pool in pools if pool.model == model) for model in needed}
        surplus = [pool for pool in pools if counts[pool.name] > wanted[pool.name]]
        changing = coming > free or any(counts[pool.name] > pool.num_serving for pool in pools)
        for last in (False,) if changing else (False, True):
            for pool in surplus:
                while counts[pool.name] > wanted[pool.name] and (short is None or coming < short):
                    if not last and serving.get(pool.model, 2) < 2:
                        break
                    counts[pool.name] -= 1
                    serving[pool.model] = serving.get(pool.model, 1) - 1
                    coming += _gpus(pool)
            if short is None:
                return


def _num_up(pool: PoolView) -> int:
    """Replicas that are up, draining ones included."""
    return len({replica.combo for replica in pool.replicas})


def _gpus(pool: PoolView) -> int:
    return sum(pool.gpus.values())
