"""A greedy solution of SageServe's program (section 5): the cheapest instances that cover a forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headway.core.errors import unknown
from headway.core.view import PoolCounts
from headway.policies.endpoints import fewest_and_most

_LITTLE = 1e-9
HOUR_S = 3600.0


class GreedyCover:
    """The cheapest instances with which each region covers `epsilon` of its own peak, and all regions the total peak.

    `tps` gives the input tokens per second that one replica serves, by pool or by model; pools without a value are not
    planned. An existing replica costs its price for an hour; a new replica also costs its start-up time. Replicas are
    added one at a time where a token per second is cheapest, and among equals in the region with the largest deficit.
    If each model has one pool per region and all replicas serve the same rate, the result is optimal apart from GPU
    limits.
    """

    def __init__(self, tps: Mapping[str, float], epsilon: float, startup_s: float) -> None:
        self._tps = tps
        self._epsilon = epsilon
        self._startup_hours = startup_s / HOUR_S

    def instances(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], pools: Sequence[PoolCounts]
    ) -> Mapping[str, int]:
        self._check(pools)
        planned = [pool for pool in pools if self._tps_of(pool)]
        counts = {pool.name: fewest_and_most(pool)[0] for pool in planned}
        for model in dict.fromkeys(pool.model for pool in planned):
            own = [pool for pool in planned if pool.model == model]
            demand = {region: windows for (name, region), windows in demand_tps.items() if name == model}
            peaks = {region: max(windows, default=0.0) for region, windows in demand.items()}
            for region, peak in peaks.items():
                self._add([pool for pool in own if pool.region == region], self._epsilon * peak, peaks, counts)
            self._add(own, max(map(sum, zip(*demand.values(), strict=True)), default=0.0), peaks, counts)
        return counts

    def _add(self, pools: Sequence[PoolCounts], tps: float, peaks: Mapping[str, float], counts: dict[str, int]) -> None:
        """Add replicas until the pools serve `tps`, or no more may be added."""

        def capacity_tps(pools: Iterable[PoolCounts]) -> float:
            return sum(self._tps_of(pool) * counts[pool.name] for pool in pools)

        while capacity_tps(pools) < tps * (1 - _LITTLE):
            growing = [pool for pool in pools if counts[pool.name] < pool.max_replicas]
            if not growing:
                return
            deficits = {
                p.region: peaks.get(p.region, 0.0) - capacity_tps(q for q in pools if q.region == p.region)
                for p in growing
            }
            cheapest = min(growing, key=lambda p: (self._usd_per_tps(p, counts[p.name]), -deficits[p.region], p.name))
            counts[cheapest.name] += 1

    def _usd_per_tps(self, pool: PoolCounts, count: int) -> float:
        """The price of a token per second with one more replica than `count`."""
        hours = 1.0 if count < pool.num_serving + pool.num_starting else 1.0 + self._startup_hours
        return pool.usd_per_hour * hours / self._tps_of(pool)

    def _tps_of(self, pool: PoolCounts) -> float:
        return self._tps.get(pool.name, self._tps.get(pool.model, 0.0))

    def _check(self, pools: Sequence[PoolCounts]) -> None:
        names = {name for pool in pools for name in (pool.name, pool.model)}
        for name in self._tps:
            if name not in names:
                raise unknown("pool or model", name, names, "tps")
