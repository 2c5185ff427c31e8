"""Chiron's scaling of instances, as a baseline of SageServe (section 7.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from operator import attrgetter

from headway.core.view import PoolsView, PoolView, ReplicaView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.endpoints import Silos, grouped, within_bounds


class ChironScaler:
    """Interactive back-pressure sizes interactive and mixed pools; the batch queue sizes batch pools.

    Pools whose names end in `interactive_suffix` or `batch_suffix` are of that kind, and all other pools are mixed; use
    the router `sageserve` with the same suffixes. Each model is scaled by itself in each region. Interactive
    back-pressure is the share of interactive and mixed replicas that have an interactive request (tier below
    `batch_tier`). Above `theta` one replica is added; one is removed if the back-pressure without it is at most
    `theta`. Interactive pools change before mixed ones. Steps are `cooldown_s` apart. Starting replicas count, and none
    is removed while one starts.

    The number of batch replicas is such that the batch requests placed on them and on mixed replicas finish within
    `batch_deadline_s`, at `batch_request_s` each. No batch replica is removed while such requests exist. Without such
    requests, all are removed.

    After Chiron (arXiv 2501.08090). Chiron also sets each instance's batch size, which the engine does here. The
    default of 0.6 is SageServe's, whose pools start with 10 interactive, 5 mixed and 5 batch replicas.
    `batch_request_s` is Headway's.
    """

    live_settings = frozenset(("theta", "cooldown_s", "batch_request_s", "batch_deadline_s", "interval_s"))

    def __init__(
        self,
        theta: float = 0.6,
        cooldown_s: float = 15.0,
        batch_request_s: float = 10.0,
        batch_deadline_s: float = 86_400.0,
        batch_tier: int = 2,
        interactive_suffix: str = "-interactive",
        batch_suffix: str = "-batch",
        interval_s: float = 5.0,
    ) -> None:
        require_above(0, theta=theta, batch_deadline_s=batch_deadline_s, interval_s=interval_s)
        require_between(0, 1, theta=theta)
        require_at_least(0, cooldown_s=cooldown_s, batch_request_s=batch_request_s)
        self.interval_s = interval_s
        self._theta, self._cooldown_s = theta, cooldown_s
        self._replicas_per_batch_request = batch_request_s / batch_deadline_s
        self._silos = Silos(batch_tier, interactive_suffix, batch_suffix)
        self._stepped_s: dict[tuple[str, str], float] = {}

    def go_on(self, before: ChironScaler) -> None:
        self._stepped_s = before._stepped_s

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        endpoints = grouped(view.pools, attrgetter("model", "region"))
        wanted: dict[str, int] = {}
        for endpoint, pools in endpoints.items():
            last_s = self._stepped_s.get(endpoint)
            if last_s is None or view.now - last_s >= self._cooldown_s:
                step = self._interactive(pools)
                if step:
                    self._stepped_s[endpoint] = view.now
                wanted |= step
            wanted |= self._batch(pools)
        return wanted

    def _interactive(self, pools: Sequence[PoolView]) -> dict[str, int]:
        """Add or remove one replica in an endpoint's interactive or mixed pools."""
        own = [pool for pool in pools if self._silos.serves(pool.name, is_batch=False)]
        own.sort(key=lambda pool: self._silos.serves(pool.name, is_batch=True))  # mixed pools last
        busy = sum(self._num(r, batch=False) > 0 for pool in own for r in pool.replicas if not r.is_draining)
        num = sum(map(_number, own))
        if busy > self._theta * num:
            growing = [pool for pool in own if _number(pool) < pool.max_replicas]
            return {growing[0].name: within_bounds(growing[0], _number(growing[0]) + 1)} if growing else {}
        if busy <= self._theta * (num - 1) and not any(pool.num_starting for pool in own):
            shrinking = [pool for pool in own if _number(pool) > within_bounds(pool, 0)]
            return {shrinking[0].name: _number(shrinking[0]) - 1} if shrinking else {}
        return {}

    def _batch(self, pools: Sequence[PoolView]) -> dict[str, int]:
        shared = [pool for pool in pools if self._silos.serves(pool.name, is_batch=True)]
        own = [pool for pool in shared if not self._silos.serves(pool.name, is_batch=False)]
        requests = sum(self._num(replica, batch=True) for pool in shared for replica in pool.replicas)
        needed = ceil(requests * self._replicas_per_batch_request)
        wanted = {}
        for pool in own:
            number = min(max(needed, pool.min_replicas), pool.max_replicas)
            if number > _number(pool) or (not requests and number < _number(pool)):
                wanted[pool.name] = number
            needed = max(needed - max(number, _number(pool)), 0)
        return wanted

    def _num(self, replica: ReplicaView, batch: bool) -> int:
        return sum(num for tier, num in replica.num_by_tier.items() if self._silos.is_batch_tier(tier) == batch)


def _number(pool: PoolView) -> int:
    return pool.num_serving + pool.num_starting
