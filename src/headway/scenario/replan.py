"""`cascade.replan` of a scenario file: the pools that plans may use, the planner, and the policies that follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace

from headway.catalog.coefficients import Coefficients
from headway.config.scenario import Scenario, StepTimes
from headway.config.spec import CascadeSpec, PoolSpec, Replan, Spec
from headway.config.strict_yaml import Key, Places
from headway.control.policies import CascadeConfig, Policies
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.task import InlineTask, TaskFactory
from headway.planning.cascade.bounds import StepTimeBounds
from headway.planning.cascade.cascadia import candidates, total_latency_s
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT, MAX_CANDIDATES
from headway.planning.cascade.problem import CascadeProblem, QualityFloor
from headway.planning.cascade.replanning import CascadeSetup, ModelShape, Period, Replanner, planning_target
from headway.planning.cascade.replica_sets import ReplicaSets, StageSets, all_sets, feasible_shapes, with_shapes
from headway.planning.cascade.search import Search
from headway.planning.cascade.stage_simulator import StageSimulator, num_repeats
from headway.policies import resolve
from headway.policies.cascade.replanned import ReplannedCascade
from headway.policies.resolve import PolicyChoice
from headway.policies.scaling.replanned import ReplannedScaler
from headway.scenario.user_modules import loader_of
from headway.workload.arrivals import Deterministic, Gamma, Poisson
from headway.workload.quality import Scores
from headway.workload.quality_source import score_table
from headway.workload.spec import WorkloadSpec

AT = ("cascade", "replan")


def with_empty_pools(spec: Spec, fleet: Fleet, places: Places) -> Spec:
    """The specification with an empty pool for each further shape in which plans may start the cascade's models.

    The pool is like the first pool of its model. HeadwayError where plans cannot be made for the fleet.
    """
    if spec.cascade is None or spec.cascade.replan is None:
        return spec
    config, pools = spec.cascade.replan, _cascade_pools(spec.cascade, fleet)
    _check(spec, fleet, config, pools, places)
    specs = [
        replace(each, min_replicas=0) if pool in pools else each
        for each, pool in zip(spec.fleet, fleet.pools, strict=True)
    ]
    existing = _by_shape(pools)
    for pool in {pool.model.name: pool for pool in reversed(pools)}.values():
        like = spec.fleet[fleet.pools.index(pool)]
        shapes = _possible_shapes(like, pool, config, pools)
        for shape in shapes:
            if (pool.model.name, shape.tp, shape.pp) not in existing:
                name = f"{pool.name}-tp{shape.tp}" + (f"-pp{shape.pp}" if shape.pp > 1 else "")
                specs.append(replace(like, name=name, tp=shape.tp, pp=shape.pp, replicas=0, min_replicas=0,
                                     kv_capacity_tokens=None))  # fmt: skip
    return replace(spec, fleet=tuple(specs))


def add_replanning(scenario: Scenario, policies: Policies, tasks: TaskFactory | None) -> Policies:
    """The policies with a cascade and a scaler that follow the plans of a `Replanner`.

    `tasks` runs the planner. None, as in a simulation: plans take `planning_s`. HeadwayError where the workload's
    scores cannot be had.
    """
    spec, places, cascade = scenario.spec, scenario.places, policies.cascade
    assert spec.cascade is not None and spec.cascade.replan is not None and cascade is not None
    config, own = spec.cascade.replan, _cascade_pools(spec.cascade, scenario.fleet)
    num_gpus, models = _num_gpus(config, own), {pool.model.name: pool.model for pool in own}
    problem = partial(
        CascadeProblem, models=tuple(models[name] for name in cascade.models), gpu=own[0].gpu, engine=own[0].engine,
        num_gpus=num_gpus, target=planning_target(config), gpus_per_server=config.gpus_per_server,
        judge_s=cascade.judge_s, max_kinds=1, span_s=config.every_s,
    )  # fmt: skip
    coefficients = StepTimes(scenario).coefficients
    with places.at("workload", "quality"):
        expected = _expected(spec.workload, cascade.models, scenario.base_dir)
    planner = UnrehearsedPlanner(
        problem,
        replace(policies, cascade=None, scaler=None, migration=None, admission=None),
        {pool.model.name: coefficients[pool.name] for pool in reversed(own)},
        spec.seed,
        {name: tuple(pool.parallel for pool in own if pool.model.name == name) for name in models},
    )
    first = CascadeSetup(
        _thresholds(spec.cascade, places, scenario.base_dir), {pool.name: pool.replicas for pool in own}
    )  # fmt: skip
    replanner = Replanner(
        cascade.models, _by_shape(own), first, expected, (tasks or InlineTask)(planner), config, spec.seed,
        planning_s=0.0 if tasks else config.planning_s,
    )  # fmt: skip
    return following(policies, cascade, replanner, num_gpus)


@dataclass(frozen=True)
class UnrehearsedPlanner:
    """Plans for observed scores and an observed rate. Plans are not rehearsed: that takes too long while serving.

    Of the candidates that reach a quality, the one with the least latency over all stages of a request.
    """

    problem: Callable[..., CascadeProblem]
    """Takes `scores` and `rate_rps`."""
    policies: Policies
    """Of the simulations of one stage."""
    coefficients: Mapping[str, Coefficients]
    """Of step times, by model."""
    seed: int = 0
    shapes: Mapping[str, tuple[Parallel, ...]] | None = None
    """The shapes that replicas may have, by model; None: any."""

    def __call__(self, scores: Scores, rate_rps: float) -> CascadePlan:
        problem = self.problem(scores=scores, rate_rps=rate_rps)
        num = num_repeats(problem)
        stage = StageSimulator(problem.gpu, problem.engine, self.policies, self.seed, num, self.coefficients)
        bounds = StepTimeBounds(problem.gpu, problem.engine, num, self.coefficients)
        sets_of: StageSets | None = None
        if (shapes := self.shapes) is not None:
            every = all_sets(problem)

            def sets_of(stage: int, used: tuple[bool, ...]) -> ReplicaSets:
                return with_shapes(every(stage, used), shapes[problem.names[stage]])

        search = Search(problem, StageLatencies(stage), bounds, EFFORT, sets_of=sets_of)
        plans = candidates(search, search.run(problem.target), "cascadia", MAX_CANDIDATES)
        feasible = [plan for plan in plans if plan.status != "infeasible"]
        if not feasible or not isinstance(problem.target, QualityFloor):
            return plans[0]
        # The candidate with the least maximum gives each stage as few GPUs as the slowest stage's latency allows, and
        # the latencies of the stages of a request add up.
        return min(feasible, key=total_latency_s)


def following(policies: Policies, cascade: CascadeConfig, planner: Replanner, num_gpus: int) -> Policies:
    """The policies with a cascade and a scaler that follow a planner."""
    accept = PolicyChoice("replanned", ReplannedCascade, {"planner": planner})
    arguments = {"planner": planner, "num_gpus": num_gpus, "interval_s": planner.config.interval_s}
    scaler = PolicyChoice("replanned", ReplannedScaler, arguments)
    return structs.replace(policies, cascade=structs.replace(cascade, policy=accept), scaler=scaler)


def replanner_of(policies: Policies) -> Replanner | None:
    """The planner that the policies follow."""
    chosen = None if policies.cascade is None else policies.cascade.policy
    planner = chosen.arguments.get("planner") if isinstance(chosen, PolicyChoice) else None
    return planner if isinstance(planner, Replanner) else None


def can_reshape(spec: PoolSpec) -> tuple[bool, bool]:
    """Whether replicas with other tensor parallelism, and with more or fewer stages, can be started for the pool.

    A simulation can start any. Processes can where `{tp}` or `{pp}` is in their command or environment.
    """
    if spec.endpoints or spec.kubernetes is not None:
        return False, False
    if spec.processes is None:
        return True, True
    words = (*spec.processes.command, *spec.processes.env.values())
    return any("{tp}" in word for word in words), any("{pp}" in word for word in words)


def start_notes(spec: Spec, fleet: Fleet) -> list[str]:
    """What a gateway prints at its start: the target of plans, and the pools whose replicas keep their shape."""
    if spec.cascade is None or spec.cascade.replan is None:
        return []
    config, pools = spec.cascade.replan, _cascade_pools(spec.cascade, fleet)
    aim = f"quality {config.quality:g}" if config.quality is not None else f"a p95 latency of {config.latency_s:g} s"
    notes = [f"planned anew every {config.every_s:g} s if need be, for {aim} on {_num_gpus(config, pools)} GPUs"]
    for pool_spec, pool in zip(spec.fleet, fleet.pools, strict=True):
        if pool in pools and pool.replicas:
            words = ("{tp}", "{pp}")
            fixed = [word for word, can in zip(words, can_reshape(pool_spec), strict=True) if not can]
            if fixed:
                verb = "are" if len(fixed) > 1 else "is"
                processes = f"as {' and '.join(fixed)} {verb} nowhere in its `processes`"
                why = processes if pool_spec.processes else "as pods do"
                notes.append(f"replicas of {pool.name} keep their {' and '.join(word[1:3] for word in fixed)}, {why}")
    return notes


def _cascade_pools(cascade: CascadeSpec, fleet: Fleet) -> list[Pool]:
    return [pool for pool in fleet.pools if not set(cascade.models).isdisjoint(pool.model.names)]


def _num_gpus(config: Replan, pools: list[Pool]) -> int:
    return config.num_gpus or sum(pool.replicas * pool.parallel.num_gpus for pool in pools)


def _by_shape(pools: list[Pool]) -> dict[ModelShape, str]:
    return {(pool.model.name, pool.parallel.tp, pool.parallel.pp): pool.name for pool in pools}


def _possible_shapes(spec: PoolSpec, pool: Pool, config: Replan, pools: list[Pool]) -> list[Parallel]:
    """Shapes in which a replica of the pool could be started."""
    other_tp, other_pp = can_reshape(spec)
    server = config.gpus_per_server or pool.gpu.gpus_per_node
    shapes, _ = feasible_shapes(
        pool.model, pool.gpu, pool.engine, _num_gpus(config, pools), server, CascadeProblem.max_pp
    )
    own = pool.parallel
    return [each for each in shapes if (other_tp or each.tp == own.tp) and (other_pp or each.pp == own.pp)]


def _thresholds(cascade: CascadeSpec, places: Places, base_dir: Path) -> tuple[float, ...]:
    """The thresholds of the scenario, which hold until the first new plan."""
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
    """The requests that the scenario's own thresholds and replicas are for, as far as the workload describes them."""
    if workload.quality is None:
        return None
    scores = score_table(workload.quality, base_dir).stages(models)
    arrivals = workload.arrivals
    rate_rps = arrivals.rate if isinstance(arrivals, Poisson | Gamma | Deterministic) else arrivals
    constant = float(rate_rps) if isinstance(rate_rps, int | float) else None
    return Period(constant, tuple(scores.prompt_tokens.astype("f8").tolist()), scores)


def _check(spec: Spec, fleet: Fleet, config: Replan, pools: list[Pool], places: Places) -> None:
    """HeadwayError where plans cannot be made for the scenario."""
    if spec.combos:
        raise places.error(AT, "plans have pools alone; expected `fleet` without `combos`")
    scalings = [spec.policies.scaling, *(variant.scaling for variant in spec.variants)]
    if any(scaling is not None for scaling in scalings):
        raise places.error(AT, "sets the number of replicas, as `scaling` does; expected one of the two")
    used = sum(pool.replicas * pool.parallel.num_gpus for pool in pools)
    if config.num_gpus is not None and config.num_gpus < used:
        raise places.error((*AT, "num_gpus"), f"{config.num_gpus}; expected {used} or more, as many as `fleet` has")
    seen: dict[ModelShape, str] = {}
    for i, (pool_spec, pool) in enumerate(zip(spec.fleet, fleet.pools, strict=True)):
        if pool in pools:
            _check_pool(pool_spec, pool, pools[0], seen, ("fleet", i), places)


def _check_pool(spec: PoolSpec, pool: Pool, first: Pool, seen: dict[ModelShape, str], at: Key, places: Places) -> None:
    """HeadwayError where a pool has a shape that plans do not have, or the shape of an earlier pool."""
    if (pool.gpu, pool.engine, pool.region) != (first.gpu, first.engine, first.region):
        raise places.error(at, f"{pool.name}: expected the GPU, engine and region of {first.name}, as `replan` plans")
    if spec.max_replicas is not None:
        raise places.error((*at, "max_replicas"), "plans set the number of replicas; expected no max_replicas")
    if pool.parallel.dp > 1 or pool.parallel.ep:
        raise places.error(at, f"{pool.name}: `dp` and `ep` are no part of what `replan` plans; expected tp and pp")
    shape = (pool.model.name, pool.parallel.tp, pool.parallel.pp)
    if shape in seen:
        raise places.error(at, f"{pool.name}: like {seen[shape]}; expected one pool for each model and shape")
    seen[shape] = pool.name
