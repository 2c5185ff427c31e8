"""A timetable of replicas planned with the whole trace known: close to the most that a forecast could gain.

Demand is known by quarters of an hour, for every model and region. SageServe's program (or its greedy form, where the
program does not take the pools) turns it into numbers of instances, from the rate that each serves in time; batch work
that is due within the run fills the valleys of demand. The resulting timetable is simulated with real start-up times,
and the search finds the least headroom with which it serves the trace in time, as `planning.gpu_hours_bound` defines.
The timetable is not proved optimal: its GPU-hours lie between those of real scalers and the lower bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from msgspec import Struct, structs

from headway.config.scenario import Scenario, StepTimes, variants
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Pool
from headway.core.policy import Floats
from headway.metrics.usage import usage
from headway.planning.gpu_hours_bound import serves
from headway.planning.regions.long_term import Cell, ScenarioDemand, ScenarioPlanner
from headway.planning.rehearsals import Simulator
from headway.policies.scaling.hourly_plan import Planning
from headway.sim.replica_resources import start_up_s

STEP_S = 900.0
HEADROOMS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.35, 1.6, 2.0, 2.7, 4.0, 6.0)
"""Multiples of demand to plan for."""
COVERED = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4)
"""Multiples of demand that timetables cover, for the timetables that are shown beside scalers."""
_EVERYTHING = 1 << 30


class OracleTimetable(Struct, frozen=True):
    """The timetable with the fewest GPU-hours of those that served the trace in time."""

    gpu_hours: float
    headroom: float
    ahead_s: float
    counts: dict[str, list[int]]
    """Replicas by pool, one number for each quarter of an hour."""
    simulated: int
    """Number of simulated timetables."""

    @property
    def scaler(self) -> dict[str, Any]:
        """The scaler that follows the timetable, as in a scenario."""
        return _scaler(self.counts, self.ahead_s)


@dataclass(frozen=True)
class _PlannedPool:
    """A pool with a planned number of replicas. Implements `PoolCounts`."""

    name: str
    model: str
    gpu: str
    region: str
    usd_per_hour: float
    gpus: Mapping[str, int]
    min_replicas: int
    max_replicas: int
    num_serving: int
    num_starting: int = 0
    num_down: int = 0


def best_timetable(
    scenario: Scenario, simulator: Simulator, tps: Mapping[str, float] | None = None
) -> OracleTimetable | None:
    """The best timetable for a scenario's first variant; None if no headroom serves the trace in time.

    `tps`: input tokens per second that a replica serves in time, by pool or model; else the scaler's own, or a
    simulation measures it. Takes about ten simulations of the scenario. Raises HeadwayError for a fleet with combos, or
    a model without requests.
    """
    chosen = variants(scenario)[0]
    if chosen.fleet.combos:
        raise HeadwayError("the clairvoyant plan: expected pools; combos are not planned for")
    scaling = chosen.spec.policies.scaling
    own_tps = scaling.get("plan", {}).get("tps", {}) if isinstance(scaling, dict) else {}
    plan = _planner(chosen, tps or own_tps)
    gpu_hours: dict[tuple[float, float], float | None] = {}
    timetables: dict[float, dict[str, list[int]]] = {}

    def serves_in_time(headroom: float, ahead_s: float) -> bool:
        if (headroom, ahead_s) not in gpu_hours:
            timetables.setdefault(headroom, plan(headroom))
            gpu_hours[headroom, ahead_s] = _gpu_hours(chosen, simulator, timetables[headroom], ahead_s)
        return gpu_hours[headroom, ahead_s] is not None

    for ahead_s in _lead_times_s(chosen):
        low, high = -1, len(HEADROOMS) - 1
        if not serves_in_time(HEADROOMS[high], ahead_s):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if serves_in_time(HEADROOMS[middle], ahead_s) else (middle, high)
    in_time = [(hours, settings) for settings, hours in gpu_hours.items() if hours is not None]
    if not in_time:
        return None
    best, (headroom, ahead_s) = min(in_time)
    return OracleTimetable(best, headroom, ahead_s, timetables[headroom], len(gpu_hours))


def timetables(scenario: Scenario, tps: Mapping[str, float]) -> list[tuple[str, dict[str, Any]]]:
    """Scalers that follow timetables planned with the trace known, each with the multiple of demand that its timetable
    covers.

    Replicas are requested as long before a step as the slowest of them take to start. For a fleet of pools.
    """
    plan, ahead_s = _planner(scenario, tps), _lead_times_s(scenario)[-1]
    return [(f"x{headroom:g}", _scaler(plan(headroom), ahead_s)) for headroom in COVERED]


def served_tps(scenario: Scenario) -> tuple[dict[str, float], Sequence[str]]:
    """Input tokens per second that one unit of each pool or combo serves in time, by simulation; and notes on them."""
    demand = ScenarioDemand(scenario, StepTimes(scenario))
    units: list[Pool | Combo] = [*scenario.fleet.pools, *scenario.fleet.combos]
    return {unit.name: demand.served_tps(unit) for unit in units}, demand.notes


def _scaler(counts: Mapping[str, list[int]], ahead_s: float) -> dict[str, Any]:
    return {"name": "timetable", "counts": dict(counts), "step_s": STEP_S, "ahead_s": ahead_s}


def _gpu_hours(
    scenario: Scenario, simulator: Simulator, counts: Mapping[str, list[int]], ahead_s: float
) -> float | None:
    """GPU-hours of a simulated timetable; None if it does not serve the trace in time."""
    policies = structs.replace(scenario.spec.policies, scaling=_scaler(counts, ahead_s))
    spec = structs.replace(scenario.spec, policies=policies, variants=[])
    records, simulation = simulator.records(dataclasses.replace(scenario, spec=spec)), spec.simulation
    is_served = serves(
        scenario.fleet,
        records,
        warmup_s=simulation.warmup_s,
        slo=spec.slo,
        to_the_end=simulation.until_s is None,
    )
    return float(usage(records, simulation.warmup_s).gpu_hours.sum()) if is_served else None


def _lead_times_s(scenario: Scenario) -> list[float]:
    """Times before a step at which replicas are requested. With provisioning there are two: for reclaimed replicas, and
    for redeployed or acquired ones."""
    provisioning = scenario.fleet.provisioning
    new_s = max(start_up_s(pool) for pool in scenario.fleet.pools)
    if provisioning is None:
        return [new_s]
    acquire_s = new_s if provisioning.acquire_s is None else provisioning.acquire_s
    return sorted({provisioning.reclaim_s, max(provisioning.redeploy_s, acquire_s)})


def _planner(scenario: Scenario, tps: Mapping[str, float]) -> Callable[[float], dict[str, list[int]]]:
    """A function from a headroom to a timetable."""
    spec, fleet = scenario.spec, scenario.fleet
    config = Planning(tps=dict(tps), step_s=STEP_S)
    demand = ScenarioDemand(scenario, StepTimes(scenario))
    try:
        planner = ScenarioPlanner("ilp", config, demand)
    except HeadwayError:  # pools that its program cannot express
        planner = ScenarioPlanner("greedy", config, demand)
    rates = _rates(demand, config, spec.simulation.until_s)
    num_steps = max(map(len, rates.values()))

    def timetable(headroom: float) -> dict[str, list[int]]:
        counts: dict[str, list[int]] = {pool.name: [] for pool in fleet.pools}
        for k in range(num_steps):
            pools = [_planned_pool(pool, counts[pool.name][-1] if k else pool.replicas) for pool in fleet.pools]
            demand_tps = {cell: (headroom * float(rate[k]),) for cell, rate in rates.items()}
            instances = planner.instances(demand_tps, pools)
            for pool in pools:
                counts[pool.name].append(instances.get(pool.name, pool.num_serving))
        return counts

    return timetable


def _planned_pool(pool: Pool, num_serving: int) -> _PlannedPool:
    return _PlannedPool(
        name=pool.name,
        model=pool.model.name,
        gpu=pool.gpu.name,
        region=pool.region,
        usd_per_hour=pool.usd_per_hour,
        gpus={pool.gpu.name: pool.parallel.num_gpus},
        min_replicas=pool.min_replicas,
        max_replicas=_EVERYTHING if pool.max_replicas is None else pool.max_replicas,
        num_serving=num_serving,
    )


def _rates(demand: ScenarioDemand, config: Planning, until_s: float | None) -> dict[Cell, Floats]:
    """Input tokens per second: interactive requests as they arrive, and due batch work in the times of low demand
    between them."""
    interactive = demand.own(config)
    everything = demand.own(structs.replace(config, batch_tier=_EVERYTHING))
    deadline_s = demand.table.columns.get("deadline_s")
    is_due = until_s is None or (deadline_s is not None and bool((np.asarray(deadline_s) <= until_s).any()))
    num = len(next(iter(everything.values()))) if until_s is None else ceil(until_s / config.step_s)
    rates = {}
    for cell, rate in everything.items():
        own = _padded(interactive.get(cell, np.zeros(0)), num)
        batch = float(_padded(rate, num).sum() - own.sum()) if is_due else 0.0
        rates[cell] = np.maximum(own, _fill_level(own, batch))
    return rates


def _padded(values: Floats, num: int) -> Floats:
    """The first `num` values, with zeros for missing ones."""
    return np.pad(values[:num], (0, max(num - len(values), 0)))


def _fill_level(own: Floats, batch: float) -> float:
    """The level to which demand `own` rises where `batch` work fills its valleys."""
    heights = np.sort(own)
    filled = np.arange(1, len(heights) + 1) * heights - np.cumsum(heights)
    num = int(np.searchsorted(filled, batch, "right"))
    return float((batch + heights[:num].sum()) / num) if num else 0.0
