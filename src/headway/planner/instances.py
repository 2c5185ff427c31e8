"""SageServe's program over regions as the planner of a scaler that runs: pools in, replicas by pool out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.view import PoolView
from headway.planner.regions import TOLERANCE, Demand, Have, Kind, Problem
from headway.planner.regions_program import plan


class RegionProgram:
    """`core.policy.InstancePlanner`: the cheapest change of instances for the next hour, GPU limits included.

    `tps` are the input tokens per second that one replica serves, by model; pools of other models stay as they are,
    and keep their GPUs. `gpu_limits` are as a fleet's: (region, GPU, how many). A model has one pool for a type of GPU
    in a region. Demand from where there are no pools is spread over the regions evenly.
    """

    def __init__(
        self,
        tps: Mapping[str, float],
        epsilon: float = 1.0,
        startup_s: float = 60.0,
        gpu_limits: Sequence[tuple[str, str, int]] = (),
        time_limit_s: float = 10.0,
        gap: float = 0.01,
    ) -> None:
        self._tps = dict(tps)
        self._epsilon, self._startup_s = epsilon, startup_s
        self._gpu_limits = tuple(gpu_limits)
        self._time_limit_s, self._gap = time_limit_s, gap

    def instances(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], pools: Sequence[PoolView]
    ) -> Mapping[str, int]:
        """As the Protocol says."""
        planned = [pool for pool in pools if pool.model in self._tps]
        names: dict[tuple[str, str, str], str] = {}
        for pool in planned:
            other = names.setdefault((pool.model, pool.region, pool.gpu), pool.name)
            if other != pool.name:
                raise HeadwayError(f"pools {other} and {pool.name} are of one model, region and GPU; expected one pool")
        if not planned:
            return {}
        regions = tuple(dict.fromkeys(pool.region for pool in planned))
        problem = Problem(
            kinds=self._kinds(planned),
            regions=regions,
            demand=(self._demand(demand_tps, {pool.model for pool in planned}, regions),),
            have=tuple(Have(pool.model, pool.region, pool.gpu, _number(pool)) for pool in planned),
            limits=self._left(pools, regions),
            epsilon=self._epsilon,
            least=min(pool.min_replicas for pool in planned),
        )
        after = plan(problem, self._time_limit_s, self._gap).after()
        return {
            pool.name: min(max(after.get((pool.model, pool.region, pool.gpu), 0), pool.min_replicas), pool.max_replicas)
            for pool in planned
        }

    def _kinds(self, planned: Sequence[PoolView]) -> tuple[Kind, ...]:
        kinds = {
            (pool.model, pool.gpu): Kind(
                pool.model, pool.gpu, self._tps[pool.model], pool.usd_per_hour, self._startup_s, pool.gpus[pool.gpu]
            )
            for pool in planned
        }
        return tuple(kinds.values())

    def _left(self, pools: Sequence[PoolView], regions: Sequence[str]) -> dict[str, dict[str, int]]:
        """GPUs for what is planned: those of other pools are taken."""
        limits: dict[str, dict[str, int]] = {}
        for region, gpu, count in self._gpu_limits:
            if region in regions:
                others = [pool for pool in pools if pool.region == region and pool.model not in self._tps]
                taken = sum(_number(pool) * pool.gpus.get(gpu, 0) for pool in others)
                limits.setdefault(region, {})[gpu] = max(count - taken, 0)
        return limits

    def _demand(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], models: Set[str], regions: Sequence[str]
    ) -> Demand:
        num_windows = max(map(len, demand_tps.values()), default=0)
        sums = {model: {region: np.zeros(num_windows) for region in regions} for model in sorted(models)}
        for (model, region), windows in demand_tps.items():
            if model in sums:
                to = [region] if region in regions else regions
                for each in to:
                    sums[model][each] += np.asarray(windows) / len(to)
        for model, by_region in sums.items():
            for tps in by_region.values():
                tps[tps < TOLERANCE * self._tps[model]] = 0.0  # nothing that a replica notices
        return {model: {region: tuple(tps.tolist()) for region, tps in of.items()} for model, of in sums.items()}


def _number(pool: PoolView) -> int:
    return pool.num_serving + pool.num_starting
