"""What long-term scalers are handed: forecasters of a scenario's demand, and a planner of instances.

Nothing is drawn, fitted or simulated before a run asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Model, Pool
from headway.core.forecast import Floats, Forecaster
from headway.core.policy import InstancePlanner, Scaler
from headway.core.task import TaskFactory
from headway.core.view import PoolCounts
from headway.forecast.methods import LEAK, make
from headway.forecast.naive import LastValue
from headway.metrics.columns import floats, ints
from headway.planning.regions.problem import Have, Kind, Problem
from headway.planning.regions.search import plan
from headway.policies import resolve
from headway.policies.cover import HOUR_S, Cover
from headway.policies.hourly import DAY_S, Planning
from headway.policies.ordering.fcfs import Fcfs
from headway.policies.resolve import Choice
from headway.policies.routing.jsq_tokens import JsqTokens
from headway.sim.cluster import simulate
from headway.sim.timeline import Line
from headway.workload.generate import generate
from headway.workload.sources import TraceSource
from headway.workload.spec import WorkloadSpec, resolved
from headway.workload.table import Workload

TRIAL_REQUESTS = 800
"""Of one simulation of what an instance serves."""
IN_TIME = 0.95
"""Share of first tokens that have to be in time: SageServe's SLA is a 95th percentile (2.2)."""
PATIENCE_S = 1.0
"""First tokens are to be there by then where the workload promises nothing: the fast tier's SLA (2.2)."""
PRECISION = 1.05
"""Between a rate that is served and one that is not, where the search stops."""
_OTHER_SEED = 1 << 20
Cell = tuple[str, str]


class ForecasterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What stands under `forecaster`."""

    name: str
    """As `headway forecast evaluate` knows it; with `-leak` at its end it is fitted on the run's own demand."""
    past_hours: Annotated[float, Meta(ge=0)] = 0.0
    """Demand known before the run begins, drawn anew from what the workload says of those hours."""


class PlannerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What stands under `planner`."""

    name: Literal["ilp", "greedy"] = "ilp"


@dataclass(frozen=True)
class Setting:
    """The scenario around a scaler."""

    workload: WorkloadSpec
    seed: int
    base_dir: Path
    fleet: Fleet
    line: Callable[[Pool], Line]
    """The step-time model of a pool."""


def scaler(said: str | Mapping[str, Any], setting: Setting, desk: TaskFactory | None = None) -> Choice[Scaler]:
    """The scaler that a spec asks for, with the forecaster and the planner that it names, which work at the desk."""
    given = {} if isinstance(said, str) else dict(said)
    handed = {key: _named(given.pop(key)) for key in ("forecaster", "planner") if key in given}
    choice = resolve.scaler(given or said)
    takes = signature(choice.made_by).parameters
    if desk is not None and "desk" in takes:
        choice = replace(choice, arguments={**choice.arguments, "desk": desk})
    if not handed:
        return choice
    for key in handed:
        if key not in takes:
            raise HeadwayError(f"scaler {choice.name}: takes no {key}; lt-i, lt-u and lt-ua do")
    config: Planning = choice.arguments.get("plan") or Planning()
    demand = Demanded(setting)
    planned = _convert("planner", handed.get("planner", {}), PlannerSpec)
    made: dict[str, Any] = {"planner": Instances(planned.name, config, demand)}
    if "forecaster" in handed:
        made["forecaster"] = Forecasts(_convert("forecaster", handed["forecaster"], ForecasterSpec), config, demand)
    return replace(choice, arguments={**choice.arguments, **made})


def cheats(choice: Choice[Scaler] | None) -> bool:
    """Its forecaster knows the future."""
    return choice is not None and getattr(choice.arguments.get("forecaster"), "cheats", False)


def _named(said: Any) -> Any:
    return {"name": said} if isinstance(said, str) else said


def _convert(key: str, said: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise HeadwayError(f"{key}: {error}") from None


class Demanded:
    """What a scenario's workload asks for."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._theta: dict[str, float] = {}

    @cached_property
    def table(self) -> Workload:
        """The run's own requests."""
        return generate(self.setting.workload, self.setting.seed, self.setting.base_dir)

    def check(self, past_hours: float) -> None:
        """HeadwayError where there is no such past."""
        spec = resolved(self.setting.workload)
        if past_hours and spec.demand is None:
            raise HeadwayError("forecaster: past_hours: goes with a workload of demand")
        if past_hours > (spec.start_hour or 0.0):
            raise HeadwayError(
                f"forecaster: past_hours: {past_hours:g}, but the workload begins at hour {spec.start_hour or 0:g};"
                " a later start_hour has more of a past"
            )

    def past(self, hours: float, config: Planning) -> dict[Cell, Floats]:
        """Interactive input tokens per second before the run. Drawn with another seed: it is another week's chance."""
        if not hours:
            return {}
        spec, span_s = resolved(self.setting.workload), hours * HOUR_S
        before = structs.replace(
            spec, start_hour=(spec.start_hour or 0.0) - hours, duration_s=span_s, num_requests=None, surges=None
        )
        return self._series(generate(before, self.setting.seed + _OTHER_SEED, self.setting.base_dir), span_s, config)

    def own(self, config: Planning) -> dict[Cell, Floats]:
        """Of the run itself: what only a cheat knows."""
        last_s = float(self.table.arrival_s[-1])
        return self._series(self.table, (last_s // config.step_s + 1) * config.step_s, config)

    def _series(self, table: Workload, span_s: float, config: Planning) -> dict[Cell, Floats]:
        steps = round(span_s / config.step_s)
        at = np.minimum((table.arrival_s // config.step_s).astype(np.int64), steps - 1)
        model, region, tier = (ints({name: table.column(name)}, name) for name in ("model", "region", "tier"))
        num_regions = int(region.max(initial=0)) + 1
        pair = model * num_regions + region
        rows = tier < config.batch_tier
        size = (int(pair.max(initial=0)) + 1) * steps
        tokens = np.bincount((pair * steps + at)[rows], table.prompt_tokens[rows], size).reshape(-1, steps)
        found: dict[Cell, Floats] = {}
        for each in np.flatnonzero(np.bincount(pair)):
            m, r = divmod(int(each), num_regions)
            cell = self._cell(table.models[m] if table.models else "", table.regions[r] if table.regions else "")
            found[cell] = found.get(cell, 0.0) + tokens[each] / config.step_s
        return found

    def _cell(self, model: str, region: str) -> Cell:
        """By the names that the fleet has for them; where it has one only, by that one."""
        pools = self.setting.fleet.all_pools
        named = {name: pool.model.name for pool in pools for name in _names(pool.model)}
        models, regions = {pool.model.name for pool in pools}, {pool.region for pool in pools}
        return (
            next(iter(models)) if len(models) == 1 else named.get(model, model),
            next(iter(regions)) if len(regions) == 1 else region,
        )

    def tps(self, pool: Pool) -> float:
        """theta: input tokens per second of interactive work that one replica serves in time, by simulation."""
        key = repr(structs.replace(pool, name="", region="", replicas=1, min_replicas=1, max_replicas=None))
        if key not in self._theta:
            self._theta[key] = _served(structs.replace(pool, replicas=1), self._rows(pool), self.setting.line)
        return self._theta[key]

    def _rows(self, pool: Pool) -> Workload:
        """Some of the requests for a pool's model, those of interactive tiers."""
        table = self.table
        mine = [i for i, name in enumerate(table.models) if self._cell(name, "")[0] == pool.model.name]
        chosen = table.column("tier") < 2
        if table.models:
            chosen &= np.isin(table.column("model"), mine)
        rows = np.flatnonzero(chosen)
        if not len(rows):
            raise HeadwayError(f"plan: tps: nobody asks for {pool.model.name}; say how much a replica of it serves")
        few = rows[:: max(len(rows) // TRIAL_REQUESTS, 1)][:TRIAL_REQUESTS]
        kept = {name: table.columns[name][few] for name in ("prompt_tokens", "output_tokens")}
        slo = table.columns.get("slo_ttft_s", np.full(1, np.nan))[few if "slo_ttft_s" in table.columns else [0]]
        limit_s = PATIENCE_S if np.isnan(slo).all() else float(np.nanmin(slo))
        return Workload(
            {"arrival_s": np.arange(len(few), dtype="f8"), **kept, "slo_ttft_s": np.full(len(few), limit_s)}
        )


def _served(pool: Pool, rows: Workload, line: Callable[[Pool], Line]) -> float:
    """Input tokens per second at the highest rate that is in time: doubling, then bisection."""
    gaps = np.random.Generator(np.random.PCG64(0)).exponential(1.0, len(rows))
    per_request = float(rows.prompt_tokens.mean())

    def in_time(rate: float) -> bool:
        source = TraceSource(rows.with_columns({"arrival_s": np.cumsum(gaps) / rate}))
        records = simulate(Fleet((pool,)), source, Policies(JsqTokens, Fcfs), seed=0, line=line)
        request = ints(records.requests, "request")
        waits_s = floats(records.requests, "first_token_s") - floats(records.workload, "arrival_s", request)
        good = waits_s <= floats(records.workload, "slo_ttft_s", request)
        return bool(good.mean() >= IN_TIME)

    low, high = 0.0, 1 / 16
    while in_time(high):
        low, high = high, 2 * high
    if not low:
        raise HeadwayError(f"plan: tps: a replica of {pool.name} serves next to nothing in time; say its tps")
    while high / low > PRECISION:
        middle = sqrt(low * high)
        low, high = (middle, high) if in_time(middle) else (low, middle)
    return low * per_request


class Forecasts:
    """Makes the forecaster of a model and a region."""

    def __init__(self, spec: ForecasterSpec, config: Planning, demand: Demanded) -> None:
        self._spec, self._config, self._demand = spec, config, demand
        self.cheats = spec.name.endswith(LEAK)
        self._season = max(round(DAY_S / config.step_s), 1)
        if not self.cheats:
            make(spec.name, self._season)  # say now if there is none such
        demand.check(spec.past_hours)

    @cached_property
    def _past(self) -> dict[Cell, Floats]:
        return self._demand.past(self._spec.past_hours, self._config)

    @cached_property
    def _own(self) -> dict[Cell, Floats]:
        return self._demand.own(self._config)

    def __call__(self, model: str, region: str) -> Forecaster:
        past = self._past.get((model, region))
        if past is None:
            past = np.zeros(round(self._spec.past_hours * HOUR_S / self._config.step_s))
        if not self.cheats:
            return After(past, make(self._spec.name, self._season))
        whole = np.concatenate([past, self._own[model, region]])
        return After(past, Until(len(whole), make(self._spec.name, self._season, whole)))

    def __str__(self) -> str:
        return self._spec.name


class After:
    """A forecaster that knows what was before the run began."""

    def __init__(self, past: Floats, inner: Forecaster) -> None:
        self._past, self._inner = past, inner
        self.cheats = inner.cheats

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """As the Protocol says."""
        return self._inner.forecast(np.concatenate([self._past, history]), steps, quantiles)


class Until:
    """A forecaster that knows a series, and the last value where that ends."""

    cheats = True

    def __init__(self, length: int, inner: Forecaster) -> None:
        self._length, self._inner = length, inner

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """As the Protocol says."""
        inside = len(history) + steps <= self._length
        return (self._inner if inside else LastValue()).forecast(history, steps, quantiles)


class Instances:
    """Plans with what the pools serve: as `plan.tps` says or, where it says nothing at all, as simulated.

    `ilp` is SageServe's program, with the fleet's GPU limits, less what pools have that are not planned for, and each
    pool's least replicas; `greedy` knows no GPU limits.
    """

    def __init__(self, name: str, config: Planning, demand: Demanded) -> None:
        self._name, self._config, self._demand = name, config, demand
        self._pools = {pool.name: pool for pool in demand.setting.fleet.pools}
        places = {(pool.model.name, pool.gpu.name, pool.region) for pool in self._pools.values()}
        kinds = {place[:2] for place in places}
        grid = len(kinds) * len({pool.region for pool in self._pools.values()})
        if name == "ilp" and not len(self._pools) == len(places) == grid:
            raise HeadwayError(
                "planner: ilp: expected one pool of each model and type of GPU in every region; greedy takes any fleet"
            )

    @cached_property
    def _tps(self) -> dict[str, float]:
        said = self._config.tps
        if not said:
            return {name: self._demand.tps(pool) for name, pool in self._pools.items()}
        found = {name: said.get(name, said.get(pool.model.name)) for name, pool in self._pools.items()}
        return {name: tps for name, tps in found.items() if tps is not None}

    def instances(self, demand_tps: Mapping[Cell, Sequence[float]], pools: Sequence[PoolCounts]) -> Mapping[str, int]:
        """As the Protocol says."""
        known = [pool for pool in pools if pool.name in self._tps]
        if self._name == "greedy":
            return self._greedy.instances(demand_tps, known)
        problem = self._problem(demand_tps, known, [pool for pool in pools if pool.name not in self._tps])
        found = plan(problem).after()
        return {pool.name: found.get((pool.model, pool.region, pool.gpu), 0) for pool in known}

    @cached_property
    def _greedy(self) -> InstancePlanner:
        return Cover(self._tps, self._config.epsilon, self._config.startup_s)

    def _problem(
        self, demand_tps: Mapping[Cell, Sequence[float]], pools: Sequence[PoolCounts], others: Sequence[PoolCounts]
    ) -> Problem:
        kinds: dict[tuple[str, str], Kind] = {}
        regions = tuple(dict.fromkeys(pool.region for pool in pools))
        for pool in pools:
            kinds[pool.model, pool.gpu] = Kind(
                pool.model,
                pool.gpu,
                self._tps[pool.name],
                pool.usd_per_hour,
                self._config.startup_s,
                pool.gpus[pool.gpu],
            )
        demand: dict[str, dict[str, tuple[float, ...]]] = {}
        for (model, region), windows in demand_tps.items():
            if any(pool.model == model for pool in pools):
                # Who comes from where nothing stands is served by the first region.
                at, there = region if region in regions else regions[0], demand.setdefault(model, {})
                before = there.get(at, (0.0,) * len(windows))
                there[at] = tuple(map(sum, zip(before, windows, strict=True)))
        limits: dict[str, dict[str, int]] = {}
        for region, gpu, count in self._demand.setting.fleet.gpu_limits:
            if region not in regions:
                continue
            taken = sum(p.gpus.get(gpu, 0) * (p.num_serving + p.num_starting) for p in others if p.region == region)
            taken += sum(p.gpus.get(gpu, 0) * p.num_down for p in (*pools, *others) if p.region == region)
            limits.setdefault(region, {})[gpu] = max(count - taken, 0)
        least: dict[str, dict[str, int]] = {}
        for pool in pools:
            at_least = least.setdefault(pool.model, {})
            at_least[pool.region] = at_least.get(pool.region, 0) + max(pool.min_replicas, 1)
        have = tuple(Have(p.model, p.region, p.gpu, p.num_serving + p.num_starting) for p in pools)
        return Problem(
            tuple(kinds.values()), regions, (demand,), have, limits, self._config.epsilon, least_at=least
        )  # fmt: skip

    def __str__(self) -> str:
        return self._name


def _names(model: Model) -> tuple[str, ...]:
    return (model.name, model.hf_id, *model.aliases)
