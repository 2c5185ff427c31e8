"""Rolls out the fleet of a plan that is recomputed at run time, one replica at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from headway.core.policy import CascadeReplanner, Scaler
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least


class ReplannedScaler:
    """Follows a planner (Cascadia, section 4.4, appendix G): replicas common to both plans stay.

    The other replicas change one after the other. An added replica starts as soon as GPUs of its types are free. A
    dropped replica drains when the next addition needs its GPUs; the last replica of a model waits until another one
    serves. A combo counts as one replica. `gpus`: the GPUs that plans divide, by type.

    `scaler`: creates a scaler for all pools; without one, plans alone decide. Once the newest plan is rolled out, the
    scaler may add replicas of the plan's pools while GPUs are free, and may remove all but one of each pool. A plan
    with other replicas overrides its changes. Pools outside of plans always follow the scaler.
    """

    def __init__(
        self,
        planner: CascadeReplanner,
        gpus: Mapping[str, int],
        interval_s: float = 2.0,
        scaler: Callable[[], Scaler] | None = None,
    ) -> None:
        for count in gpus.values():
            require_at_least(1, gpus=count)
        require_above(0, interval_s=interval_s)
        self._scaler = None if scaler is None else scaler()
        self._scaler_next_s = 0.0
        self.interval_s = interval_s if self._scaler is None else min(interval_s, self._scaler.interval_s)
        self._planner, self._gpus = planner, dict(gpus)
        self._planned: dict[str, int] = {}
        self._scaled: dict[str, int] = {}
        """Replicas by pool, where they differ from the newest plan."""

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        planned = dict(self._planner.replicas(view.now))
        if planned != self._planned:
            self._planned, self._scaled = planned, {}
        pools = [pool for pool in view.pools if pool.name in planned]
        counts = {pool.name: pool.num_serving + pool.num_starting for pool in pools}
        free = Counter(self._gpus)
        for pool in pools:
            _take(free, pool, _num_up(pool) + pool.num_starting + pool.num_down)
        scaled = self._run_scaler(view)
        if self._wanted(pools) == counts:
            self._scale_between_plans(pools, scaled, counts, free)
        wanted = self._wanted(pools)
        needed = {pool.model for pool in pools if wanted[pool.name]}
        if needed <= {pool.model for pool in pools if pool.num_serving}:
            self._planner.adopt()
        missing = [pool for pool in pools if counts[pool.name] < wanted[pool.name]]
        staying: Counter[str] = Counter()
        for pool in pools:
            staying[pool.model] += min(counts[pool.name], wanted[pool.name])
        for pool in sorted(missing, key=lambda each: (staying[each.model] > 0, _num_gpus(each))):
            while counts[pool.name] < wanted[pool.name] and _has_room(free, [pool]):
                counts[pool.name] += 1
                _take(free, pool, 1)
        pending = [pool for pool in missing if counts[pool.name] < wanted[pool.name]]
        self._drop(pools, wanted, counts, needed, free, pending)
        return {**{name: num for name, num in scaled.items() if name not in planned}, **counts}

    def _run_scaler(self, view: PoolsView) -> Mapping[str, int]:
        """The scaler's replicas by pool, if it is due."""
        if self._scaler is None or view.now < self._scaler_next_s:
            return {}
        self._scaler_next_s = view.now + self._scaler.interval_s
        return self._scaler.scale(view)

    def _wanted(self, pools: Sequence[PoolView]) -> dict[str, int]:
        """Replicas by pool in the newest plan, with the scaler's later changes."""
        return {
            pool.name: min(
                max(self._scaled.get(pool.name, self._planned[pool.name]), pool.min_replicas), pool.max_replicas
            )
            for pool in pools
        }

    def _scale_between_plans(
        self, pools: Sequence[PoolView], scaled: Mapping[str, int], counts: Mapping[str, int], free: Counter[str]
    ) -> None:
        """Apply the scaler's numbers for the plan's pools, as far as GPUs are free."""
        left = Counter(free)
        for pool in pools:
            num, goal = counts[pool.name], max(scaled.get(pool.name, 0), 1)
            if pool.name not in scaled or not self._planned[pool.name]:
                continue
            while num < goal and _has_room(left, [pool]):
                num += 1
                _take(left, pool, 1)
            self._scaled[pool.name] = min(num, goal)

    def _drop(
        self,
        pools: Sequence[PoolView],
        wanted: Mapping[str, int],
        counts: dict[str, int],
        needed: set[str],
        free: Counter[str],
        pending: Sequence[PoolView],
    ) -> None:
        """Drain replicas until a pending addition has room; without one, drain all redundant ones."""
        coming = Counter(free)
        for pool in pools:
            _take(coming, pool, pool.num_serving - _num_up(pool))
        serving = {model: sum(pool.num_serving for pool in pools if pool.model == model) for model in needed}
        surplus = [pool for pool in pools if counts[pool.name] > wanted[pool.name]]
        changing = coming != free or any(counts[pool.name] > pool.num_serving for pool in pools)
        for last in (False,) if changing else (False, True):
            for pool in surplus:
                while counts[pool.name] > wanted[pool.name] and not (pending and _has_room(coming, pending)):
                    if not last and serving.get(pool.model, 2) < 2:
                        break
                    counts[pool.name] -= 1
                    serving[pool.model] = serving.get(pool.model, 1) - 1
                    _take(coming, pool, -1)
            if not pending:
                return


def _num_up(pool: PoolView) -> int:
    """Replicas that are up, including draining ones."""
    return len({replica.combo for replica in pool.replicas})


def _num_gpus(pool: PoolView) -> int:
    return sum(pool.gpus.values())


def _take(free: Counter[str], pool: PoolView, num: int) -> None:
    """Take the GPUs of `num` replicas from the free ones; negative: return them."""
    for gpu, count in pool.gpus.items():
        free[gpu] -= num * count


def _has_room(free: Mapping[str, int], pools: Iterable[PoolView]) -> bool:
    """Whether there is room for one more replica of one of the pools."""
    return any(all(free.get(gpu, 0) >= count for gpu, count in pool.gpus.items()) for pool in pools)
