"""A greedy solution of SageServe's program (section 5): the cheapest instances that cover a forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headway.core.errors import unknown
from headway.core.view import PoolCounts
from headway.policies.endpoints import within_bounds

_LITTLE = 1e-9
HOUR_S = 3600.0


@dataclass
class _Place:
    name: str
    model: str
    region: str
    tps: float
    usd_per_hour: float
    now: int
    most: int
    num: int

    @property
    def capacity_tps(self) -> float:
        return self.tps * self.num


class GreedyCover:
    """The cheapest instances with which each region covers `epsilon` of its own peak, and all regions the total peak.

    `tps` has the input tokens per second that one replica serves, by pool or by model; pools without a value are not
    planned. A replica that exists costs its price for an hour, a new one its start-up time in addition. Replicas are
    added one at a time, where a token per second costs least, and among equals in the region with the largest deficit.
    If a model has one pool in each region and all serve equally much, this is the optimum, GPU limits aside.
    """

    def __init__(self, tps: Mapping[str, float], epsilon: float, startup_s: float) -> None:
        self._tps = tps
        self._epsilon = epsilon
        self._startup_hours = startup_s / HOUR_S

    def instances(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], pools: Sequence[PoolCounts]
    ) -> Mapping[str, int]:
        self._check(pools)
        places = [self._place(pool) for pool in pools if self._tps_of(pool)]
        for model in dict.fromkeys(place.model for place in places):
            own = [place for place in places if place.model == model]
            demand = {region: windows for (name, region), windows in demand_tps.items() if name == model}
            peaks = {region: max(windows, default=0.0) for region, windows in demand.items()}
            for region, peak in peaks.items():
                self._add([place for place in own if place.region == region], self._epsilon * peak, peaks)
            self._add(own, max(map(sum, zip(*demand.values(), strict=True)), default=0.0), peaks)
        return {place.name: place.num for place in places}

    def _add(self, places: Sequence[_Place], tps: float, peaks: Mapping[str, float]) -> None:
        """Add replicas until the places serve `tps`, or until none may be added."""
        while _capacity(places) < tps * (1 - _LITTLE):
            growing = [place for place in places if place.num < place.most]
            if not growing:
                return
            deficits = {p.region: peaks.get(p.region, 0.0) - _capacity(q for q in places if q.region == p.region)
                     for p in growing}  # fmt: skip
            min(growing, key=lambda place: (self._usd_per_tps(place), -deficits[place.region], place.name)).num += 1

    def _usd_per_tps(self, place: _Place) -> float:
        """The price of a token per second with one more replica."""
        hours = 1.0 if place.num < place.now else 1.0 + self._startup_hours
        return place.usd_per_hour * hours / place.tps

    def _place(self, pool: PoolCounts) -> _Place:
        now = pool.num_serving + pool.num_starting
        return _Place(
            pool.name, pool.model, pool.region, self._tps_of(pool), pool.usd_per_hour, now, pool.max_replicas,
            within_bounds(pool, 0),
        )  # fmt: skip

    def _tps_of(self, pool: PoolCounts) -> float:
        return self._tps.get(pool.name, self._tps.get(pool.model, 0.0))

    def _check(self, pools: Sequence[PoolCounts]) -> None:
        names = {name for pool in pools for name in (pool.name, pool.model)}
        for name in self._tps:
            if name not in names:
                raise unknown("pool or model", name, names, "tps")


def _capacity(places: Iterable[_Place]) -> float:
    return sum(place.capacity_tps for place in places)
