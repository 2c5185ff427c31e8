"""Parts of long-term scalers: forecasters of a scenario's demand, and a planner of instances.

Demand is generated, fitted and simulated only when a run needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from math import ceil, sqrt
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from headway.config.scenario import Scenario
from headway.config.user_modules import loader_of
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Fleet, Pool, unit_of
from headway.core.policy import Floats, Forecaster, Scaler
from headway.core.record import Outcome, Records
from headway.core.task import TaskFactory
from headway.core.view import PoolCounts
from headway.forecast.methods import LEAK, make
from headway.forecast.naive import LastValue
from headway.metrics.columns import floats, ints
from headway.planning.regions.problem import InstanceBounds, InstanceKind, PresentInstances, RegionProblem
from headway.planning.regions.search import plan
from headway.policies import resolve
from headway.policies.endpoints import fewest_and_most, grouped, within_bounds
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.resolve import PolicyChoice
from headway.policies.routing.jsq_tokens import JsqTokensRouter
from headway.policies.scaling.cover import HOUR_S, GreedyCover
from headway.policies.scaling.hourly_plan import DAY_S, Planning
from headway.sim.cluster import simulate
from headway.sim.replica_resources import Line
from headway.workload.generate import generate
from headway.workload.sources import TraceSource
from headway.workload.spec import TraceSpec, WorkloadSpec, resolved
from headway.workload.table import Workload

TRIAL_REQUESTS = 800
"""Minimum number of requests of one simulation that measures the rate a replica serves in time."""
TRIAL_SLOS = 10.0
"""Length of a trial, as a multiple of the TTFT SLO: at a tenth over capacity, the queue then exceeds the SLO."""
MOST_TRIAL_REQUESTS = 20_000
IN_TIME = 0.95
"""Required share of first tokens in time: SageServe's SLA is a 95th percentile (2.2)."""
DEFAULT_TTFT_S = 1.0
"""TTFT SLO if the workload has none: that of SageServe's fast tier (2.2)."""
PRECISION = 1.05
"""The search for the highest rate in time ends when its two bounds differ by at most this factor."""
_OTHER_SEED = 1 << 20
_NO_TIER = _UNLIMITED = 1 << 30
Cell = tuple[str, str]
"""A model and a region."""


class ForecasterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a scaler's `forecaster`."""

    name: str
    """A name that `headway forecast evaluate` accepts; a name ending in `-leak` is fitted to the run's own demand."""
    past_hours: Annotated[float, Meta(ge=0)] = 0.0
    """Hours of demand known before the run, generated from the workload's description; for a trace, the hours before
    its `from_s`."""


class PlannerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a scaler's `planner`."""

    name: Literal["ilp", "greedy"] = "ilp"


def scaler(
    spec: str | Mapping[str, Any], scenario: Scenario, line: Callable[[Pool], Line], tasks: TaskFactory | None = None
) -> PolicyChoice[Scaler]:
    """The scaler of a specification, with its forecaster and planner. `tasks` runs the planner."""
    arguments = {} if isinstance(spec, str) else dict(spec)
    tools = {key: arguments.pop(key) for key in ("forecaster", "planner") if key in arguments}
    choice = resolve.scaler(arguments or spec, loader_of(scenario.base_dir))
    parameters = signature(choice.made_by).parameters
    if tasks is not None and "tasks" in parameters:
        choice = replace(choice, arguments={**choice.arguments, "tasks": tasks})
    if "planner" in parameters:
        _refuse_batch_pools(choice, scenario)
    if not tools:
        return choice
    for key in tools:
        if key not in parameters:
            raise HeadwayError(f"scaler {choice.name}: takes no {key}; lt-i, lt-u and lt-ua do")
    config = _planning(choice)
    demand = ScenarioDemand(scenario, line)
    made: dict[str, Any] = {}
    if "planner" in parameters:
        planner = _convert("planner", tools.get("planner", {}), PlannerSpec)
        made["planner"] = ScenarioPlanner(planner.name, config, demand)
    if "forecaster" in tools:
        made["forecaster"] = Forecasters(_convert("forecaster", tools["forecaster"], ForecasterSpec), config, demand)
    return replace(choice, arguments={**choice.arguments, **made})


def _refuse_batch_pools(choice: PolicyChoice[Scaler], scenario: Scenario) -> None:
    """Raise HeadwayError if interactive demand would be planned for pools that the router reserves for batch work."""
    routing: Any = scenario.spec.policies.routing
    suffix = routing.get("batch_suffix") if isinstance(routing, Mapping) else None
    tps = (choice.arguments.get("plan") or Planning()).tps
    for pool in scenario.fleet.pools:
        if suffix and pool.name.endswith(suffix) and (not tps or tps.keys() & {pool.name, pool.model.name}):
            raise HeadwayError(
                f"scaler {choice.name}: plans instances for interactive work, but router {routing['name']} keeps"
                f" {pool.name} to batch work; expected pools for all tiers, or scaling by reactive or chiron"
            )


def _planning(choice: PolicyChoice[Scaler]) -> Planning:
    """The demand that a scaler forecasts, described by its `plan` or by its own `step_s` and `batch_tier`."""
    plan: Planning | None = choice.arguments.get("plan")
    step_s = signature(choice.made_by).parameters.get("step_s")
    if plan is not None or step_s is None:
        return plan or Planning()
    own_s, batch_tier = choice.arguments.get("step_s", step_s.default), choice.arguments.get("batch_tier")
    try:
        return Planning(step_s=own_s, period_s=own_s, batch_tier=_NO_TIER if batch_tier is None else batch_tier)
    except ValueError as error:
        raise HeadwayError(f"scaler {choice.name}: {error}") from None


def _convert(key: str, spec: Any, kind: type[Any]) -> Any:
    """The specification; a bare name is shorthand for a mapping with this name."""
    try:
        return msgspec.convert({"name": spec} if isinstance(spec, str) else spec, kind)
    except msgspec.ValidationError as error:
        raise HeadwayError(f"{key}: {error}") from None


class ScenarioDemand:
    """The demand of a scenario's workload, and the part that one replica serves in time."""

    def __init__(self, scenario: Scenario, line: Callable[[Pool], Line]) -> None:
        self.scenario, self._line = scenario, line
        self._served_tps: dict[str, float] = {}
        self.notes: list[str] = []
        """Notes on incomplete knowledge."""

    @cached_property
    def table(self) -> Workload:
        return self._generate(self.scenario.spec.workload)

    def _generate(self, workload: WorkloadSpec, seed_offset: int = 0) -> Workload:
        return generate(workload, self.scenario.spec.seed + seed_offset, self.scenario.base_dir)

    def check_past(self, past_hours: float) -> None:
        """Raise HeadwayError if the workload does not describe this many hours before the run."""
        spec = resolved(self.scenario.spec.workload)
        if not past_hours:
            return
        trace = _own_times(spec)
        if trace is not None:
            known_hours = trace.from_s / trace.rate_scale / HOUR_S
            if past_hours > known_hours:
                raise HeadwayError(
                    f"forecaster: past_hours: {past_hours:g}, but the run begins {known_hours:g} hours after the"
                    f" trace's; expected trace.from_s of {past_hours * HOUR_S * trace.rate_scale:g} or more"
                )
            return
        if spec.demand is None:
            raise HeadwayError("forecaster: past_hours: goes with a workload of demand, or a trace with its own times")
        if past_hours > (spec.start_hour or 0.0):
            raise HeadwayError(
                f"forecaster: past_hours: {past_hours:g}, but the workload begins at hour {spec.start_hour or 0:g};"
                " a later start_hour has more of a past"
            )

    def past(self, hours: float, config: Planning) -> dict[Cell, Floats]:
        """Interactive input tokens per second before the run.

        For a trace, they are its own hours before `from_s`. For a demand workload, they are drawn with another seed
        than the run's, like another week.
        """
        if not hours:
            return {}
        spec, span_s = resolved(self.scenario.spec.workload), hours * HOUR_S
        if (trace := _own_times(spec)) is not None:
            # Times in the file, before `rate_scale` shortens them.
            from_s = max(trace.from_s - span_s * trace.rate_scale, 0.0)
            known = structs.replace(trace, from_s=from_s, to_s=trace.from_s, limit=None)
            table = self._generate(structs.replace(spec, trace=known, num_requests=None, duration_s=None))
            return self._series(table, span_s, config)
        before = structs.replace(
            spec, start_hour=(spec.start_hour or 0.0) - hours, duration_s=span_s, num_requests=None, surges=None
        )
        return self._series(self._generate(before, _OTHER_SEED), span_s, config)

    def own(self, config: Planning) -> dict[Cell, Floats]:
        """As `past`, for the run itself; only leaking forecasters read it."""
        last_s = float(self.table.arrival_s[-1])
        return self._series(self.table, (last_s // config.step_s + 1) * config.step_s, config)

    def _series(self, table: Workload, span_s: float, config: Planning) -> dict[Cell, Floats]:
        steps = round(span_s / config.window_s)
        at = np.minimum((table.arrival_s // config.window_s).astype(np.int64), steps - 1)
        model, region, tier = (ints({name: table.column(name)}, name) for name in ("model", "region", "tier"))
        num_regions = int(region.max(initial=0)) + 1
        pair = model * num_regions + region
        rows = tier < config.batch_tier
        size = (int(pair.max(initial=0)) + 1) * steps
        tokens = np.bincount((pair * steps + at)[rows], table.prompt_tokens[rows], size).reshape(-1, steps)
        series: dict[Cell, Floats] = {}
        for each in np.flatnonzero(np.bincount(pair)):
            m, r = divmod(int(each), num_regions)
            cell = self._cell(table.models[m] if table.models else "", table.regions[r] if table.regions else "")
            series[cell] = series.get(cell, 0.0) + tokens[each] / config.window_s
        return {cell: config.by_step(tps) for cell, tps in series.items()}

    def _cell(self, model: str, region: str) -> Cell:
        """The fleet's names for a workload's model and region; a single model or region serves all requests."""
        pools = self.scenario.fleet.all_pools
        named = {name: pool.model.name for pool in pools for name in pool.model.names}
        models, regions = {pool.model.name for pool in pools}, {pool.region for pool in pools}
        return (
            next(iter(models)) if len(models) == 1 else named.get(model, model),
            next(iter(regions)) if len(regions) == 1 else region,
        )

    def served_tps(self, unit: Pool | Combo) -> float:
        """SageServe's theta: interactive input tokens per second that one replica or combo serves in time,
        simulated."""
        parts = [structs.replace(part, name="", region="", min_replicas=1, max_replicas=None) for part in unit_of(unit)]
        if isinstance(unit, Pool):
            parts = [structs.replace(parts[0], replicas=1)]
        key = repr(parts)
        if key not in self._served_tps:
            one = structs.replace(unit, replicas=1)
            alone = Fleet((), (one,)) if isinstance(one, Combo) else Fleet((one,))
            tps, is_limit = _served_tps(unit.name, alone, self._trial(unit_of(unit)[0]), self._line)
            self._served_tps[key] = tps
            if not is_limit:
                self.notes.append(
                    f"one of {unit.name} serves {tps:,.0f} input tokens a second in time, and may serve more: "
                    f"{MOST_TRIAL_REQUESTS:,} requests, the longest trial, do not fill it"
                )
        return self._served_tps[key]

    def _trial(self, pool: Pool) -> Workload:
        """A sample of the interactive requests for a pool's model."""
        table = self.table
        codes = [i for i, name in enumerate(table.models) if self._cell(name, "")[0] == pool.model.name]
        chosen = table.column("tier") < 2
        if table.models:
            chosen &= np.isin(table.column("model"), codes)
        rows = np.flatnonzero(chosen)
        if not len(rows):
            raise HeadwayError(f"plan: tps: no request is for {pool.model.name}; set what a replica of it serves")
        few = rows[:: max(len(rows) // TRIAL_REQUESTS, 1)][:TRIAL_REQUESTS]
        lengths = {name: table.columns[name][few] for name in ("prompt_tokens", "output_tokens")}
        slo = table.columns.get("slo_ttft_s", np.full(1, np.nan))[few if "slo_ttft_s" in table.columns else [0]]
        default_s = self.scenario.spec.slo.ttft_s or DEFAULT_TTFT_S
        limit_s = default_s if np.isnan(slo).all() else float(np.nanmin(slo))
        return Workload(
            {"arrival_s": np.arange(len(few), dtype="f8"), **lengths, "slo_ttft_s": np.full(len(few), limit_s)}
        )


def _own_times(spec: WorkloadSpec) -> TraceSpec | None:
    """The trace, if requests arrive at the trace's own times."""
    if spec.trace is None or spec.arrivals is not None:
        return None
    return TraceSpec(path=spec.trace) if isinstance(spec.trace, str) else spec.trace


def _served_tps(name: str, alone: Fleet, rows: Workload, line: Callable[[Pool], Line]) -> tuple[float, bool]:
    """Input tokens per second at the highest rate in time, by doubling and bisection; and whether that is the limit.

    A trial repeats the rows until it is long enough to show a growing queue. If the longest trial arrives within one
    SLO and is still in time, higher rates show nothing new, and the true limit may be higher.
    """
    per_request, limit_s = float(rows.prompt_tokens.mean()), float(rows.columns["slo_ttft_s"][0])

    def ran(rate: float) -> Records:
        num = min(max(TRIAL_REQUESTS, ceil(TRIAL_SLOS * limit_s * rate)), MOST_TRIAL_REQUESTS)
        repeated = rows.take(np.arange(num) % len(rows))
        gaps = np.random.Generator(np.random.PCG64(0)).exponential(1.0, num)
        source = TraceSource(repeated.with_columns({"arrival_s": np.cumsum(gaps) / rate}))
        return simulate(alone, source, Policies(JsqTokensRouter, FcfsOrdering), seed=0, line=line)

    def in_time(rate: float) -> bool:
        records = ran(rate)
        request = ints(records.requests, "request")
        waits_s = floats(records.requests, "first_token_s") - floats(records.workload, "arrival_s", request)
        good = waits_s <= floats(records.workload, "slo_ttft_s", request)
        return bool(good.mean() >= IN_TIME)

    low, high = 0.0, 1 / 16
    while in_time(high):
        low, high = high, 2 * high
        if low * limit_s >= MOST_TRIAL_REQUESTS:
            return low * per_request, False
    if not low:
        rejected = float((ran(high).requests["outcome"] == Outcome.REJECTED).mean())
        if rejected > 1 - IN_TIME:
            what = f"{rejected:.0%} of the requests are longer, prompt and output, than one of {name} takes"
            raise HeadwayError(f"plan: tps: {what}; set its tps, or leave such requests out")
        raise HeadwayError(f"plan: tps: one of {name} serves hardly any request in time; set its tps")
    while high / low > PRECISION:
        middle = sqrt(low * high)
        low, high = (middle, high) if in_time(middle) else (low, middle)
    return low * per_request, True


class Forecasters:
    """Creates the forecaster of a model and a region."""

    def __init__(self, spec: ForecasterSpec, config: Planning, demand: ScenarioDemand) -> None:
        self._spec, self._config, self._demand = spec, config, demand
        self.cheats = spec.name.endswith(LEAK)
        self._season = max(round(DAY_S / config.step_s), 1)
        if not self.cheats:
            make(spec.name, self._season)  # raise for an unknown name now
        demand.check_past(spec.past_hours)

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
            return ForecasterWithPast(past, make(self._spec.name, self._season))
        series = np.concatenate([past, self._own[model, region]])
        return ForecasterWithPast(past, make(self._spec.name, self._season, series), len(series))

    def __str__(self) -> str:
        return self._spec.name


class ForecasterWithPast:
    """A forecaster whose history begins before the run.

    `num_known`: number of values to which the forecaster was fitted. The forecaster is used up to the last of these
    values; a forecast beyond repeats the last value of the history.
    """

    def __init__(self, past: Floats, inner: Forecaster, num_known: int | None = None) -> None:
        self._past, self._inner, self._num_known = past, inner, num_known
        self.cheats = num_known is not None or inner.cheats

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        history = np.concatenate([self._past, history])
        is_beyond = self._num_known is not None and len(history) + steps > self._num_known
        return (LastValue() if is_beyond else self._inner).forecast(history, steps, quantiles)


class ScenarioPlanner:
    """Plans instances from the rate of a replica of each pool, or of a combo: `plan.tps`, or a simulated rate if
    `plan.tps` is empty.

    `ilp` solves SageServe's program with the pools' bounds and the fleet's GPU limits, less the GPUs of unplanned
    pools. Pools of one model, GPU type and region are an endpoint's deployments, and share its instances. `greedy`
    ignores GPU limits.
    """

    def __init__(self, name: str, config: Planning, demand: ScenarioDemand) -> None:
        self._name, self._config, self._demand = name, config, demand
        fleet = demand.scenario.fleet
        self._units: dict[str, Pool | Combo] = {pool.name: pool for pool in fleet.pools}
        self._units |= {combo.name: combo for combo in fleet.combos}
        if name == "ilp":
            if fleet.combos:
                what = f"{fleet.combos[0].name} has GPUs of several replicas, and may have them of several types"
                raise HeadwayError(f"planner: ilp: {what}; expected pools alone; greedy takes any fleet")
            _same_of_each_kind(fleet.pools, lambda pool: f"{pool.parallel.num_gpus} GPUs a replica")
            if config.tps:
                _same_of_each_kind(fleet.pools, lambda pool: _served(self._tps.get(pool.name)))

    @cached_property
    def _tps(self) -> dict[str, float]:
        by_name = self._config.tps
        if not by_name:
            measured = {name: self._demand.served_tps(unit) for name, unit in self._units.items()}
            if self._name == "ilp":
                _same_of_each_kind(self._demand.scenario.fleet.pools, lambda pool: _served(measured[pool.name]))
            return measured
        models = {name: unit_of(unit)[0].model.name for name, unit in self._units.items()}
        tps = {name: by_name.get(name, by_name.get(model)) for name, model in models.items()}
        return {name: each for name, each in tps.items() if each is not None}

    def instances(self, demand_tps: Mapping[Cell, Sequence[float]], pools: Sequence[PoolCounts]) -> Mapping[str, int]:
        planned = [pool for pool in pools if pool.name in self._tps]
        if self._name == "greedy":
            return GreedyCover(self._tps, self._config.epsilon, self._config.startup_s).instances(demand_tps, planned)
        if not planned:
            return {}
        found = plan(self._problem(demand_tps, planned, [pool for pool in pools if pool.name not in self._tps])).after()
        counts: dict[str, int] = {}
        for place, deployments in grouped(planned, _place).items():
            counts |= _shared(found.get(place, 0), deployments)
        return counts

    def _problem(
        self, demand_tps: Mapping[Cell, Sequence[float]], pools: Sequence[PoolCounts], unplanned: Sequence[PoolCounts]
    ) -> RegionProblem:
        kinds = {
            (pool.model, pool.gpu): InstanceKind(
                pool.model,
                pool.gpu,
                self._tps[pool.name],
                pool.usd_per_hour,
                self._config.startup_s,
                pool.gpus[pool.gpu],
            )
            for pool in pools
        }
        regions = tuple(dict.fromkeys(pool.region for pool in pools))
        endpoints = grouped(pools, _place)
        have = tuple(PresentInstances(*place, sum(map(_number, own))) for place, own in endpoints.items())
        bounds = [_endpoint_bounds(place, own) for place, own in endpoints.items()]
        bounds += [
            InstanceBounds(model, region, gpu, 0, 0)
            for model, gpu in kinds
            for region in regions
            if (model, region, gpu) not in endpoints
        ]
        return RegionProblem(
            tuple(kinds.values()),
            regions,
            (_demand_by_model(demand_tps, pools),),
            have,
            self._gpu_limits(regions, pools, unplanned),
            self._config.epsilon,
            bounds=tuple(bounds),
        )

    def _gpu_limits(
        self, regions: Sequence[str], pools: Sequence[PoolCounts], unplanned: Sequence[PoolCounts]
    ) -> dict[str, dict[str, int]]:
        """Maps each region and GPU to the fleet's limit less the GPUs of unplanned pools and failed replicas, but at
        least the GPUs of the planned pools' minimums."""
        limits: dict[str, dict[str, int]] = {}
        for region, gpu, count in self._demand.scenario.fleet.gpu_limits:
            if region in regions:
                held = [(p, _number(p)) for p in unplanned]
                held += [(p, p.num_down) for p in (*pools, *unplanned)]
                taken = sum(p.gpus.get(gpu, 0) * num for p, num in held if p.region == region)
                fewest = sum(p.gpus.get(gpu, 0) * fewest_and_most(p)[0] for p in pools if p.region == region)
                limits.setdefault(region, {})[gpu] = max(count - taken, fewest)
        return limits

    def __str__(self) -> str:
        return self._name


def _place(pool: PoolCounts) -> tuple[str, str, str]:
    return pool.model, pool.region, pool.gpu


def _number(pool: PoolCounts) -> int:
    return pool.num_serving + pool.num_starting


def _served(tps: float | None) -> str:
    return "no tps" if tps is None else f"{tps:g} tokens/s a replica"


def _same_of_each_kind(pools: Iterable[Pool], what: Callable[[Pool], str]) -> None:
    """Raise HeadwayError if pools of one model and GPU type differ in a value of which the program has only one."""
    for (model, gpu), own in grouped(pools, lambda pool: (pool.model.name, pool.gpu.name)).items():
        first = own[0]
        for other in own[1:]:
            if what(other) != what(first):
                raise HeadwayError(
                    f"planner: ilp: {model} on {gpu} has {what(first)} in {first.name}, {what(other)} in {other.name};"
                    " expected the same of each model and GPU type; greedy takes any fleet"
                )


def _endpoint_bounds(place: tuple[str, str, str], deployments: Sequence[PoolCounts]) -> InstanceBounds:
    fewest, most = zip(*map(fewest_and_most, deployments), strict=True)
    return InstanceBounds(*place, sum(fewest), sum(most) if max(most) < _UNLIMITED else None)


def _shared(number: int, deployments: Sequence[PoolCounts]) -> dict[str, int]:
    """An endpoint's instances by deployment, each within its bounds, with as few starts and stops as possible.

    An instance is added to the smallest deployment with room, or taken from the largest one above its minimum.
    """
    bounds = {pool.name: fewest_and_most(pool) for pool in deployments}
    counts = {pool.name: within_bounds(pool, _number(pool)) for pool in deployments}
    while sum(counts.values()) < number:
        able = [name for name, count in counts.items() if count < bounds[name][1]]
        smallest = min(able, key=lambda name: counts[name])
        counts[smallest] += 1
    while sum(counts.values()) > number:
        able = [name for name, count in counts.items() if count > bounds[name][0]]
        counts[max(able, key=lambda name: counts[name])] -= 1
    return counts


def _demand_by_model(
    demand_tps: Mapping[Cell, Sequence[float]], pools: Sequence[PoolCounts]
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Demand by model and region. A model's first region serves demand from regions without its pools."""
    regions: dict[str, list[str]] = {}
    for pool in pools:
        regions.setdefault(pool.model, []).append(pool.region)
    demand: dict[str, dict[str, tuple[float, ...]]] = {}
    for (model, region), windows in demand_tps.items():
        if model in regions:
            at = region if region in regions[model] else regions[model][0]
            by_region = demand.setdefault(model, {})
            by_region[at] = tuple(map(sum, zip(by_region.get(at, (0.0,) * len(windows)), windows, strict=True)))
    return demand
