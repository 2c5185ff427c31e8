"""Scaling to a target load, like Kubernetes' horizontal pod autoscaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from headway.core.errors import HeadwayError
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.endpoints import fullest_use


class TargetUtilizationScaler:
    """Each pool gets `ceil(serving * load / target)` replicas or combos, for the target that requires the most.

    Loads are the share of KV blocks in use, with target `kv_use`, and requests in flight per replica or combo, with
    target `in_flight`; a target of None is ignored. While requests wait in front of full replicas, the pool counts as
    full at any KV use, and the waiting requests count as in flight. The KV use of a combo is the KV use of its fullest
    role. A pool does not change while load and target differ by less than `tolerance` of the target, or within
    `cooldown_s` of its last step. It shrinks to the highest number that was needed within the last `stabilization_s`.
    Draining replicas do not count. All defaults but that of `kv_use` are Kubernetes' own.
    """

    live_settings = frozenset(("kv_use", "in_flight", "tolerance", "stabilization_s", "cooldown_s", "interval_s"))

    def __init__(
        self,
        kv_use: float | None = 0.7,
        in_flight: float | None = None,
        tolerance: float = 0.1,
        stabilization_s: float = 300.0,
        cooldown_s: float = 0.0,
        interval_s: float = 15.0,
    ) -> None:
        for name, target in (("kv_use", kv_use), ("in_flight", in_flight)):
            if target is not None:
                require_above(0, **{name: target})
        if kv_use is None and in_flight is None:
            raise HeadwayError("kv_use, in_flight: expected a target for at least one of them")
        require_at_least(0, tolerance=tolerance, stabilization_s=stabilization_s, cooldown_s=cooldown_s)
        require_above(0, interval_s=interval_s)
        self.interval_s = interval_s
        self._kv_use, self._in_flight = kv_use, in_flight
        self._tolerance, self._stabilization_s, self._cooldown_s = tolerance, stabilization_s, cooldown_s
        self._recent: dict[str, list[tuple[float, int]]] = {}
        """(time, needed replicas) by pool."""
        self._stepped_s: dict[str, float] = {}

    def go_on(self, before: TargetUtilizationScaler) -> None:
        self._recent, self._stepped_s = before._recent, before._stepped_s

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        wanted = {}
        queued = _queued(view.pools)
        for pool in view.pools:
            now, number = view.now, pool.num_serving + pool.num_starting
            lately = [one for one in self._recent.get(pool.name, ()) if one[0] > now - self._stabilization_s]
            needed = self._needed(pool, number, queued[pool.name])
            self._recent[pool.name] = lately = [*lately, (now, needed)]
            if needed < number:
                needed = min(max(most for _, most in lately), number)
            needed = min(max(needed, pool.min_replicas, 1), pool.max_replicas)
            last_s = self._stepped_s.get(pool.name)
            if needed != number and (last_s is None or now - last_s >= self._cooldown_s):
                wanted[pool.name] = needed
                self._stepped_s[pool.name] = now
        return wanted

    def _needed(self, pool: PoolView, number: int, queued: float) -> int:
        """The number of replicas for the current load; the current number if the load is within the tolerance."""
        staying = [replica for replica in pool.replicas if not replica.is_draining]
        if not staying:
            return number
        num = sum(replica.num_in_flight for replica in staying)
        ratios = []
        if self._kv_use is not None:
            full = (num + queued) / num if num else 1.0
            ratios.append((full if queued else fullest_use(staying)) / self._kv_use)
        if self._in_flight is not None:
            ratios.append((num + queued) / pool.num_serving / self._in_flight)
        ratio = max(ratios)
        return number if abs(ratio - 1.0) <= self._tolerance else ceil(pool.num_serving * ratio)


def _queued(pools: Sequence[PoolView]) -> dict[str, float]:
    """Returns, for each pool, its share of the requests that wait in front, in proportion to its model's serving
    replicas."""
    serving: dict[str, int] = {}
    for pool in pools:
        serving[pool.model] = serving.get(pool.model, 0) + pool.num_serving
    return {pool.name: pool.num_queued * pool.num_serving / max(serving[pool.model], 1) for pool in pools}
