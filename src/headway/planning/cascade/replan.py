"""`cascade.replan` of a scenario file: the pools that plans may use, the planner, and the policies that follow it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace

from headway.catalog.coefficients import Coefficients, corrected
from headway.config.scenario import Scenario, StepTimes
from headway.config.spec import CascadeSpec, PoolSpec, Replan, Spec
from headway.config.strict_yaml import Key, Places
from headway.config.user_modules import loader_of
from headway.control.policies import CascadeConfig, Policies
from headway.core.fleet import Combo, Fleet, Parallel, Pool, unit_of
from headway.core.task import InlineTask, TaskFactory
from headway.planning.cascade.candidates import candidates, total_latency_s
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import StageSimulator, num_repeats
from headway.planning.cascade.latency_bounds import StepTimeBounds
from headway.planning.cascade.planners import EFFORT, MAX_CANDIDATES
from headway.planning.cascade.problem import (
    CascadePlan,
    CascadeProblem,
    ComboShapes,
    HandoverSettings,
    QualityFloor,
    Replicas,
    coefficients_key,
)
from headway.planning.cascade.replanning import CascadeSetup, ModelUnit, Period, Replanner, planning_target, unit
from headway.planning.cascade.replica_sets import ReplicaSets, StageSets, Unit, all_sets, feasible_shapes, with_units
from headway.planning.cascade.search import Search
from headway.planning.combos.problem import Offer
from headway.policies import resolve
from headway.policies.cascade.replanned import ReplannedCascade
from headway.policies.resolve import PolicyChoice
from headway.policies.scaling.replanned import ReplannedScaler
from headway.workload.arrivals import Deterministic, Gamma, Poisson
from headway.workload.quality import Scores
from headway.workload.quality_source import score_table
from headway.workload.spec import WorkloadSpec

AT = ("cascade", "replan")


def with_empty_pools(spec: Spec, fleet: Fleet, places: Places) -> Spec:
    """The specification with an empty pool for each further shape that plans may start of the cascade's models.

    The pool copies the first pool of its model on its type of GPU. Combos stay unchanged: plans choose only their
    number. Raises HeadwayError if the fleet does not support plans.
    """
    if spec.cascade is None or spec.cascade.replan is None:
        return spec
    config, own = spec.cascade.replan, _cascade_fleet(spec.cascade, fleet)
    _check(spec, fleet, config, own, places)
    specs = [
        replace(each, min_replicas=0) if pool in own.pools else each
        for each, pool in zip(spec.fleet, fleet.pools, strict=True)
    ]
    combos = [
        replace(each, min_replicas=0) if combo in own.combos else each
        for each, combo in zip(spec.combos, fleet.combos, strict=True)
    ]
    existing = _by_unit(own)
    for pool in {(pool.model.name, pool.gpu.name): pool for pool in reversed(own.pools)}.values():
        like = spec.fleet[fleet.pools.index(pool)]
        for shape in _possible_shapes(like, pool, config, own):
            if (pool.model.name, unit(shape.tp, shape.pp, _named(pool.gpu.name, own))) not in existing:
                name = f"{pool.name}-tp{shape.tp}" + (f"-pp{shape.pp}" if shape.pp > 1 else "")
                specs.append(
                    replace(
                        like, name=name, tp=shape.tp, pp=shape.pp, replicas=0, min_replicas=0, kv_capacity_tokens=None
                    )
                )
    return replace(spec, fleet=tuple(specs), combos=tuple(combos))


def add_replanning(scenario: Scenario, policies: Policies, tasks: TaskFactory | None) -> Policies:
    """The policies with a cascade and a scaler that follow the plans of a `Replanner`.

    `tasks` runs the planner. None, as in a simulation: plans take `planning_s`. Raises HeadwayError if the workload has
    no scores.
    """
    spec, places, cascade = scenario.spec, scenario.places, policies.cascade
    assert spec.cascade is not None and spec.cascade.replan is not None and cascade is not None
    config, own = spec.cascade.replan, _cascade_fleet(spec.cascade, scenario.fleet)
    pools, gpus = own.all_pools, _gpus(config, own)
    problem = _problem(config, cascade, own, gpus)
    coefficients = StepTimes(scenario).coefficients
    with places.at("workload", "quality"):
        expected = _expected(spec.workload, cascade.models, scenario.base_dir)
    by_unit = _by_unit(own)
    most = {deployment.name: deployment.max_replicas for deployment in _deployments(own)}
    keys = {
        pool.name: coefficients_key(pool.model, "" if pool.gpu.name == next(iter(gpus)) else pool.gpu.name)
        for pool in pools
    }
    planner = UnrehearsedPlanner(
        problem,
        replace(policies, cascade=None, scaler=None, migration=None, admission=None),
        {keys[pool.name]: coefficients[pool.name] for pool in reversed(pools)},
        spec.seed,
        {
            name: {parts: most[pool] for (model, parts), pool in by_unit.items() if model == name}
            for name in dict.fromkeys(pool.model.name for pool in pools)
        },
        HandoverSettings(
            pools[0].network_bytes_per_s, *(part.handover for combo in own.combos[:1] for part in combo.parts[:1])
        ),
        keys,
    )
    counts = {each.name: each.replicas for each in _deployments(own)}
    setup = CascadeSetup(_thresholds(spec.cascade, places, scenario.base_dir), counts)
    replanner = Replanner(
        cascade.models,
        by_unit,
        setup,
        expected,
        (tasks or InlineTask)(planner),
        config,
        spec.seed,
        planning_s=0.0 if tasks else config.planning_s,
    )
    return following(policies, cascade, replanner, gpus)


def _problem(
    config: Replan, cascade: CascadeConfig, own: Fleet, gpus: Mapping[str, int]
) -> Callable[..., CascadeProblem]:
    """Creates the problem of observed scores at an observed rate, on the cascade's own GPUs."""
    pools = own.all_pools
    models = {pool.model.name: pool.model for pool in pools}
    by_name = {pool.gpu.name: pool.gpu for pool in pools}
    first, *others = (Offer(by_name[name], count, None, config.gpus_per_server) for name, count in gpus.items())
    return partial(
        CascadeProblem,
        models=tuple(models[name] for name in cascade.models),
        gpu=first.gpu,
        engine=pools[0].engine,
        num_gpus=first.limit or 0,
        target=planning_target(config),
        gpus_per_server=config.gpus_per_server,
        judge_s=cascade.judge_s,
        max_kinds=1,
        span_s=config.every_s,
        other_offers=tuple(others),
        combo_kinds=_combo_kinds(own),
    )


@dataclass(frozen=True)
class UnrehearsedPlanner:
    """Plans for observed scores and an observed rate. Plans are not rehearsed, because that takes too long while
    serving.

    Among candidates that reach a quality, it chooses the one with the least sum of stage latencies.
    """

    problem: Callable[..., CascadeProblem]
    """Creates a problem from `scores` and `rate_rps`."""
    policies: Policies
    """Policies in the simulations of one stage."""
    coefficients: Mapping[str, Coefficients]
    """Step-time coefficients by model."""
    seed: int = 0
    units: Mapping[str, Mapping[Unit, int | None]] | None = None
    """Maps each model to the units that plans may start, with maximum numbers; None: replicas of any shape."""
    handover_settings: HandoverSettings = field(default_factory=HandoverSettings)
    keys: Mapping[str, str] = field(default_factory=dict)
    """Maps each pool to the key of its step times in `coefficients`."""

    def __call__(
        self, scores: Scores, rate_rps: float, corrections: Mapping[str, tuple[float, float]] | None = None
    ) -> CascadePlan:
        """`corrections`: maps each pool to the ratio of measured to expected prefill time, and the same for decode."""
        by_key = {self.keys[pool]: factors for pool, factors in (corrections or {}).items() if pool in self.keys}
        if by_key:
            known = {
                key: corrected(each, *by_key[key]) if key in by_key else each for key, each in self.coefficients.items()
            }
            return dataclasses.replace(self, coefficients=known)(scores, rate_rps)
        problem = self.problem(scores=scores, rate_rps=rate_rps)
        num, others = num_repeats(problem), {offer.gpu.name: offer.gpu for offer in problem.other_offers}
        stage = StageSimulator(
            problem.gpu,
            problem.engine,
            self.policies,
            self.seed,
            num,
            self.coefficients,
            others,
            self.handover_settings,
        )
        in_place = bool(getattr(self.policies.router(), "pairs", False))
        bounds = StepTimeBounds(problem.gpu, problem.engine, num, self.coefficients, others, in_place=in_place)
        sets_of: StageSets | None = None
        if (units := self.units) is not None:
            every = all_sets(problem)
            allowed = [with_units(every(i, ()), units[name]) for i, name in enumerate(problem.names)]

            def sets_of(stage: int, used: tuple[bool, ...]) -> ReplicaSets:
                return allowed[stage]

        search = Search(problem, StageLatencies(stage), bounds, EFFORT, sets_of=sets_of)
        plans = candidates(search, search.run(problem.target), "cascadia", MAX_CANDIDATES)
        feasible = [plan for plan in plans if plan.status != "infeasible"]
        if not feasible or not isinstance(problem.target, QualityFloor):
            return plans[0]
        # The candidate with the least maximum gives each stage only the GPUs that the slowest stage's latency
        # justifies, but a request waits for the sum of its stages' latencies.
        return min(feasible, key=total_latency_s)


def following(policies: Policies, cascade: CascadeConfig, planner: Replanner, gpus: Mapping[str, int]) -> Policies:
    """The policies with a cascade and a scaler that follow a planner.

    The policies' own scaler keeps the other pools, and scales the plan's pools until the next plan.
    """
    accept = PolicyChoice("replanned", ReplannedCascade, {"planner": planner})
    arguments = {"planner": planner, "gpus": gpus, "interval_s": planner.config.interval_s, "scaler": policies.scaler}
    scaler = PolicyChoice("replanned", ReplannedScaler, arguments)
    return structs.replace(policies, cascade=structs.replace(cascade, policy=accept), scaler=scaler)


def replanner_of(policies: Policies) -> Replanner | None:
    """The planner that the policies follow."""
    chosen = None if policies.cascade is None else policies.cascade.policy
    planner = chosen.arguments.get("planner") if isinstance(chosen, PolicyChoice) else None
    return planner if isinstance(planner, Replanner) else None


def can_reshape(spec: PoolSpec) -> tuple[bool, bool]:
    """Whether replicas with other tensor parallelism, and with other pipeline stages, can be started for the pool.

    A simulation can start any. Processes can if `{tp}` or `{pp}` is in their command or environment.
    """
    if spec.endpoints or spec.kubernetes is not None:
        return False, False
    if spec.processes is None:
        return True, True
    words = (*spec.processes.command, *spec.processes.env.values())
    return any("{tp}" in word for word in words), any("{pp}" in word for word in words)


def start_notes(spec: Spec, fleet: Fleet) -> list[str]:
    """A gateway's start messages: the plans' target, and the pools whose replicas keep their shape."""
    if spec.cascade is None or spec.cascade.replan is None:
        return []
    config, own = spec.cascade.replan, _cascade_fleet(spec.cascade, fleet)
    aim = f"quality {config.quality:g}" if config.quality is not None else f"a p95 latency of {config.latency_s:g} s"
    by_type = _gpus(config, own)
    gpus = " + ".join(f"{num} {name}" for name, num in by_type.items()) if len(by_type) > 1 else sum(by_type.values())
    notes = [f"planned anew every {config.every_s:g} s if need be, for {aim} on {gpus} GPUs"]
    for pool_spec, pool in zip(spec.fleet, fleet.pools, strict=True):
        if pool in own.pools and pool.replicas:
            words = ("{tp}", "{pp}")
            fixed = [word for word, can in zip(words, can_reshape(pool_spec), strict=True) if not can]
            if fixed:
                verb = "are" if len(fixed) > 1 else "is"
                processes = f"as {' and '.join(fixed)} {verb} nowhere in its `processes`"
                why = processes if pool_spec.processes else "as pods do"
                notes.append(f"replicas of {pool.name} keep their {' and '.join(word[1:3] for word in fixed)}, {why}")
    return notes


def _cascade_fleet(cascade: CascadeSpec, fleet: Fleet) -> Fleet:
    """The pools and combos that serve the cascade's models."""
    models = set(cascade.models)
    pools = tuple(pool for pool in fleet.pools if not models.isdisjoint(pool.model.names))
    return Fleet(pools, tuple(combo for combo in fleet.combos if not models.isdisjoint(combo.parts[0].model.names)))


def _deployments(own: Fleet) -> list[Pool | Combo]:
    return [*own.pools, *own.combos]


def _gpus(config: Replan, own: Fleet) -> dict[str, int]:
    """The GPUs available to plans by type, with the first pool's type first."""
    counts = dict.fromkeys((pool.gpu.name for pool in own.all_pools), 0)
    for deployment in _deployments(own):
        for part in unit_of(deployment):
            counts[part.gpu.name] += deployment.replicas * part.parallel.num_gpus
    return dict.fromkeys(counts, config.num_gpus) if config.num_gpus else counts


def _named(gpu: str, own: Fleet) -> str:
    """The name of a GPU type in plans; empty if the fleet has only one type."""
    return gpu if len({pool.gpu.name for pool in own.all_pools}) > 1 else ""


def _by_unit(own: Fleet) -> dict[ModelUnit, str]:
    """The name of each pool and combo by its unit."""
    names = {
        (pool.model.name, unit(pool.parallel.tp, pool.parallel.pp, _named(pool.gpu.name, own))): pool.name
        for pool in own.pools
    }
    for combo in own.combos:
        parts = tuple(
            Replicas(part.parallel.tp, part.parallel.pp, part.replicas, _named(part.gpu.name, own), part.role)
            for part in combo.parts
        )
        names[combo.parts[0].model.name, parts] = combo.name
    return names


def _combo_kinds(own: Fleet) -> dict[str, tuple[ComboShapes, ...]]:
    """The kinds of the fleet's combos by model, each with its own ratio of prefill to decode replicas."""
    kinds: dict[str, tuple[ComboShapes, ...]] = {}
    for combo in own.combos:
        prefill, decode = sorted(combo.parts, key=lambda part: part.role, reverse=True)
        ratio = prefill.replicas / decode.replicas
        kind = ComboShapes(
            prefill.parallel, decode.parallel, ratio, ratio, _named(prefill.gpu.name, own), _named(decode.gpu.name, own)
        )
        name = prefill.model.name
        kinds[name] = (*kinds.get(name, ()), kind)
    return kinds


def _possible_shapes(spec: PoolSpec, pool: Pool, config: Replan, own: Fleet) -> list[Parallel]:
    """The shapes in which the pool's replicas could be started."""
    other_tp, other_pp = can_reshape(spec)
    server, num_gpus = config.gpus_per_server or pool.gpu.gpus_per_node, _gpus(config, own)[pool.gpu.name]
    shapes, _ = feasible_shapes(pool.model, pool.gpu, pool.engine, num_gpus, server, CascadeProblem.max_pp)
    first = pool.parallel
    return [each for each in shapes if (other_tp or each.tp == first.tp) and (other_pp or each.pp == first.pp)]


def _thresholds(cascade: CascadeSpec, places: Places, base_dir: Path) -> tuple[float, ...]:
    """The scenario's thresholds, valid until the first new plan."""
    choice = resolve.cascade(cascade.policy, loader_of(base_dir))
    if choice.name != "thresholds":
        raise places.error(("cascade", "policy"), f"{choice.name}; expected thresholds, which `replan` changes")
    levels, num = choice.arguments.get("thresholds", 80.0), len(cascade.models) - 1
    thresholds = tuple(levels) if isinstance(levels, list) else (levels,) * num
    if len(thresholds) != num:
        raise places.error(
            ("cascade", "policy"), f"{len(thresholds)} thresholds; expected {num}, one fewer than models"
        )
    return thresholds


def _expected(workload: WorkloadSpec, models: tuple[str, ...], base_dir: Path) -> Period | None:
    """The requests for which the scenario's thresholds and replicas were planned; None if the workload has no scores.
    The rate is None if it is not constant."""
    if workload.quality is None:
        return None
    scores = score_table(workload.quality, base_dir).stages(models)
    arrivals = workload.arrivals
    rate_rps = arrivals.rate if isinstance(arrivals, Poisson | Gamma | Deterministic) else arrivals
    constant = float(rate_rps) if isinstance(rate_rps, int | float) else None
    return Period(constant, tuple(scores.prompt_tokens.astype("f8").tolist()), scores)


def _check(spec: Spec, fleet: Fleet, config: Replan, own: Fleet, places: Places) -> None:
    """Raise HeadwayError if the scenario does not support plans."""
    gpus = _gpus(structs.replace(config, num_gpus=None), own)
    if config.num_gpus is not None and len(gpus) > 1:
        what = f"{', '.join(gpus)} are in the fleet; expected no num_gpus, as plans divide those of each type"
        raise places.error((*AT, "num_gpus"), what)
    if config.num_gpus is not None and config.num_gpus < (used := sum(gpus.values())):
        raise places.error((*AT, "num_gpus"), f"{config.num_gpus}; expected {used} or more, as many as `fleet` has")
    seen: dict[ModelUnit, str] = {}
    first = own.all_pools[0]
    for i, pool in enumerate(fleet.pools):
        if pool in own.pools:
            _check_pool(pool, first, ("fleet", i), places)
            key = pool.model.name, unit(pool.parallel.tp, pool.parallel.pp, _named(pool.gpu.name, own))
            if key in seen:
                what = f"{pool.name}: like {seen[key]}; expected one pool for each model and shape"
                raise places.error(("fleet", i), what)
            seen[key] = pool.name
    for i, combo in enumerate(fleet.combos):
        if combo in own.combos:
            if len(combo.parts) != 2:
                raise places.error(("combos", i), f"{combo.name}: expected prefill and decode, as `replan` plans")
            for part in combo.parts:
                _check_pool(part, first, ("combos", i), places)


def _check_pool(pool: Pool, first: Pool, at: Key, places: Places) -> None:
    """Raise HeadwayError if a pool differs from the pools that plans start."""
    if (pool.engine, pool.region) != (first.engine, first.region):
        raise places.error(at, f"{pool.name}: expected the engine and region of {first.name}, as `replan` plans")
    if pool.parallel.dp > 1 or pool.parallel.ep:
        raise places.error(at, f"{pool.name}: `dp` and `ep` are no part of what `replan` plans; expected tp and pp")
