"""The best plan found by one who knows the whole trace: what a forecast could gain at most, near enough.

Demand is known by quarters of an hour, for every model and region; SageServe's program (or its greedy form, where a
fleet is no grid) says how many instances that takes, each with what it serves in time; batch work that is due within
the run fills the valleys. The timetable that comes of it is simulated, with start-up times as they are, and the search
is for the least headroom with which it serves the trace in time, as `yardsticks` says. Nothing proves it the best there
is; it stands between what scalers take and what no plan goes below.
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
from headway.core.fleet import Pool
from headway.core.forecast import Floats
from headway.core.view import ReplicaView
from headway.planning.gpu_hours_bound import serves
from headway.policies.endpoints import within_bounds
from headway.policies.scaling.hourly_plan import Planning
from headway.scenario.long_term import Cell, ScenarioDemand, ScenarioPlanner
from headway.scenario.run import run
from headway.sim.replica_resources import start_up_s

STEP_S = 900.0
HEADROOMS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.35, 1.6, 2.0, 2.7, 4.0, 6.0)
"""Of demand, to plan for."""
_EVERYTHING = 1 << 30


class Found(Struct, frozen=True):
    """The best of those that served the trace in time."""

    gpu_hours: float
    headroom: float
    ahead_s: float
    counts: dict[str, list[int]]
    """Replicas by pool, one for each quarter of an hour."""
    simulated: int
    """How many plans were tried."""

    @property
    def timetable(self) -> dict[str, Any]:
        """The scaler that acts it out, as a scenario has it."""
        return _timetable(self.counts, self.ahead_s)


@dataclass(frozen=True)
class _Standing:
    """A pool, as a planner sees it: with so many replicas."""

    pool: Pool
    num_serving: int
    num_starting: int = 0
    num_queued: int = 0
    num_down: int = 0
    num_failed: int = 0
    goodput_rps: float | None = None
    replicas: Sequence[ReplicaView] = ()

    @property
    def name(self) -> str:
        """As in the fleet."""
        return self.pool.name

    @property
    def model(self) -> str:
        """Its name."""
        return self.pool.model.name

    @property
    def gpu(self) -> str:
        """Its name."""
        return self.pool.gpu.name

    @property
    def region(self) -> str:
        """Where it stands."""
        return self.pool.region

    @property
    def usd_per_hour(self) -> float:
        """Of a replica."""
        return self.pool.usd_per_hour

    @property
    def gpus(self) -> Mapping[str, int]:
        """Of a replica."""
        return {self.pool.gpu.name: self.pool.parallel.num_gpus}

    @property
    def min_replicas(self) -> int:
        """Of scaling."""
        return self.pool.min_replicas

    @property
    def max_replicas(self) -> int:
        """Of scaling."""
        return _EVERYTHING if self.pool.max_replicas is None else self.pool.max_replicas


def find(scenario: Scenario, tps: Mapping[str, float] | None = None) -> Found | None:
    """The best timetable for a scenario's first variant, its scaler replaced; None where no headroom serves in time.

    `tps`: input tokens per second that a replica serves in time, by pool or model; else that is simulated. Takes some
    ten simulations of the scenario. HeadwayError where it has combos, or where a model is asked for by nobody.
    """
    chosen = variants(scenario)[0]
    if chosen.fleet.combos:
        raise HeadwayError("the clairvoyant plan: expected pools; combos are not planned for")
    planned = _planner(chosen, tps or _said_tps(chosen))
    tried: dict[tuple[float, float], float | None] = {}
    tables: dict[float, dict[str, list[int]]] = {}

    def hours(headroom: float, ahead_s: float) -> float | None:
        """GPU-hours, if it serves."""
        if (headroom, ahead_s) not in tried:
            tables.setdefault(headroom, planned(headroom))
            tried[headroom, ahead_s] = _simulated(chosen, tables[headroom], ahead_s)
        return tried[headroom, ahead_s]

    for ahead_s in _aheads_s(chosen):
        low, high = -1, len(HEADROOMS) - 1
        if hours(HEADROOMS[high], ahead_s) is None:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if hours(HEADROOMS[middle], ahead_s) is None else (low, middle)
    found = [(taken, at) for at, taken in tried.items() if taken is not None]
    if not found:
        return None
    best, (headroom, ahead_s) = min(found)
    return Found(best, headroom, ahead_s, tables[headroom], len(tried))


def _timetable(counts: Mapping[str, list[int]], ahead_s: float) -> dict[str, Any]:
    return {"name": "timetable", "counts": dict(counts), "step_s": STEP_S, "ahead_s": ahead_s}


def _simulated(scenario: Scenario, counts: Mapping[str, list[int]], ahead_s: float) -> float | None:
    policies = structs.replace(scenario.spec.policies, scaling=_timetable(counts, ahead_s))
    spec = structs.replace(scenario.spec, policies=policies, variants=[])
    done, simulation = run(dataclasses.replace(scenario, spec=spec)), spec.simulation
    is_served = serves(
        scenario.fleet, done.records, warmup_s=simulation.warmup_s, slo=spec.slo,
        to_the_end=simulation.until_s is None,
    )  # fmt: skip
    return done.summary.gpu_hours if is_served else None


def _aheads_s(scenario: Scenario) -> list[float]:
    """How long before its step a replica may have to be asked for, whether the quickest source has one or not."""
    provisioning = scenario.fleet.provisioning
    new_s = max(start_up_s(pool) for pool in scenario.fleet.pools)
    if provisioning is None:
        return [new_s]
    acquire_s = new_s if provisioning.acquire_s is None else provisioning.acquire_s
    return sorted({provisioning.reclaim_s, max(provisioning.redeploy_s, acquire_s)})


def _said_tps(scenario: Scenario) -> dict[str, float]:
    """What the scenario's own scaler reckons with."""
    said = scenario.spec.policies.scaling
    plan = said.get("plan", {}) if isinstance(said, dict) else {}
    return dict(plan.get("tps", {}))


def _planner(scenario: Scenario, tps: Mapping[str, float]) -> Callable[[float], dict[str, list[int]]]:
    """From a headroom to a timetable."""
    spec, fleet = scenario.spec, scenario.fleet
    config = Planning(tps=dict(tps), step_s=STEP_S)
    demand = ScenarioDemand(scenario, StepTimes(scenario))
    planner = _instances(config, demand)
    rates = _rates(demand, config, spec.simulation.until_s)
    num_steps = max(map(len, rates.values()))

    def timetable(headroom: float) -> dict[str, list[int]]:
        counts: dict[str, list[int]] = {pool.name: [] for pool in fleet.pools}
        for k in range(num_steps):
            pools = [_Standing(pool, counts[pool.name][-1] if k else pool.replicas) for pool in fleet.pools]
            asked = {cell: (headroom * float(rate[k]),) for cell, rate in rates.items()}
            found = planner.instances(asked, pools)
            for pool in pools:
                counts[pool.name].append(within_bounds(pool, found.get(pool.name, pool.num_serving)))
        return counts

    return timetable


def _instances(config: Planning, demand: ScenarioDemand) -> ScenarioPlanner:
    try:
        return ScenarioPlanner("ilp", config, demand)
    except HeadwayError:  # no grid of models and regions
        return ScenarioPlanner("greedy", config, demand)


def _rates(demand: ScenarioDemand, config: Planning, until_s: float | None) -> dict[Cell, Floats]:
    """Input tokens per second: interactive ones as they come, with those of batch work that is due in the valleys."""
    interactive = demand.own(config)
    everything = demand.own(structs.replace(config, batch_tier=_EVERYTHING))
    deadline_s = demand.table.columns.get("deadline_s")
    is_due = until_s is None or (deadline_s is not None and bool((np.asarray(deadline_s) <= until_s).any()))
    num = len(next(iter(everything.values()))) if until_s is None else ceil(until_s / config.step_s)
    found = {}
    for cell, rate in everything.items():
        own = _cut(interactive.get(cell, np.zeros(0)), num)
        batch = float(_cut(rate, num).sum() - own.sum()) if is_due else 0.0
        found[cell] = np.maximum(own, _level(own, batch))
    return found


def _cut(values: Floats, num: int) -> Floats:
    return np.pad(values[:num], (0, max(num - len(values), 0)))


def _level(own: Floats, batch: float) -> float:
    """Up to where so much fills the valleys."""
    heights = np.sort(own)
    filled = np.arange(1, len(heights) + 1) * heights - np.cumsum(heights)
    num = int(np.searchsorted(filled, batch, "right"))
    return float((batch + heights[:num].sum()) / num) if num else 0.0
