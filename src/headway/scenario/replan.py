"""`cascade.replan` of a scenario file: which pools plans may use, what cannot be planned, and the planner itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from headway.catalog.coefficients import Coefficients
from headway.config.spec import CascadeSpec, PoolSpec, Replan, Spec
from headway.config.strict_yaml import Key, Places
from headway.control.policies import CascadeConfig, Policies
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.task import InlineTask, TaskFactory
from headway.planning.cascade.periods import Period
from headway.planning.cascade.problem import Problem
from headway.planning.cascade.replanning import Replanner, Shape, Standing, target_of
from headway.planning.cascade.shapes import shapes as shapes_of
from headway.policies import resolve
from headway.scenario.replan_search import Work, following
from headway.workload.arrivals import Deterministic, Gamma, Poisson
from headway.workload.quality_source import score_table
from headway.workload.spec import WorkloadSpec

AT = ("cascade", "replan")


def expanded(spec: Spec, fleet: Fleet, places: Places) -> Spec:
    """With a pool, empty at first, for each further shape that plans may give a replica of the cascade's models.

    It is as the first pool of its model, which has to have one.
    """
    if spec.cascade is None or spec.cascade.replan is None:
        return spec
    config, own = spec.cascade.replan, _own(spec.cascade, fleet)
    _check(spec, fleet, config, own, places)
    made = [replace(said, min_replicas=0) if pool in own else said for said, pool in _pairs(spec, fleet)]
    there = _shapes(own)
    for pool in {pool.model.name: pool for pool in reversed(own)}.values():
        said = spec.fleet[fleet.pools.index(pool)]
        shapes = _possible(said, pool, config, own)
        made += [_of_shape(said, pool, each) for each in shapes if (pool.model.name, each.tp, each.pp) not in there]
    return replace(spec, fleet=tuple(made))


def follow(
    spec: Spec, fleet: Fleet, base_dir: Path, places: Places, policies: Policies, cascade: CascadeConfig,
    known: Mapping[str, Coefficients], desk: TaskFactory | None,
) -> Policies:  # fmt: skip
    """The policies of an expanded scenario, whose cascade and fleet follow plans made at the `desk`.

    Without a desk, as in a simulation, plans take `planning_s`. HeadwayError where its workload's scores cannot be had.
    """
    assert spec.cascade is not None and spec.cascade.replan is not None
    config, own = spec.cascade.replan, _own(spec.cascade, fleet)
    first, pools = own[0], _shapes(own)
    models = {pool.model.name: pool.model for pool in own}
    ask = partial(
        Problem, models=tuple(models[name] for name in cascade.models), gpu=first.gpu, engine=first.engine,
        num_gpus=_num_gpus(config, own), target=target_of(config), gpus_per_server=config.gpus_per_server,
        judge_s=cascade.judge_s, max_kinds=1, span_s=config.every_s,
    )  # fmt: skip
    by_model = {pool.model.name: known[pool.name] for pool in reversed(own)}
    allowed = {name: tuple(pool.parallel for pool in own if pool.model.name == name) for name in models}
    with places.at("workload", "quality"):
        expected = _expected(spec.workload, cascade.models, base_dir)
    alone = replace(policies, cascade=None, scaler=None, migration=None, admission=None)
    work = Work(ask, alone, by_model, spec.seed, shapes=allowed)
    standing = Standing(_thresholds(spec.cascade, places), {pool.name: pool.replicas for pool in own})
    planner = Replanner(
        cascade.models, pools, standing, expected, (desk or InlineTask)(work), config, spec.seed,
        planning_s=0.0 if desk else config.planning_s,
    )  # fmt: skip
    return following(policies, cascade, planner, _num_gpus(config, own))


def can_reshape(said: PoolSpec) -> tuple[bool, bool]:
    """Whether replicas with other tensor parallelism, and with more or fewer stages, can be started as the pool says.

    A simulation can; processes can where their command, or environment, is told.
    """
    if said.endpoints or said.kubernetes is not None:
        return False, False
    if said.processes is None:
        return True, True
    words = (*said.processes.command, *said.processes.env.values())
    return any("{tp}" in word for word in words), any("{pp}" in word for word in words)


def told(spec: Spec, fleet: Fleet) -> list[str]:
    """What is planned anew, and what is not done, for who starts a gateway."""
    if spec.cascade is None or spec.cascade.replan is None:
        return []
    config, own = spec.cascade.replan, _own(spec.cascade, fleet)
    aim = f"quality {config.quality:g}" if config.quality is not None else f"a p95 latency of {config.latency_s:g} s"
    lines = [f"planned anew every {config.every_s:g} s if need be, for {aim} on {_num_gpus(config, own)} GPUs"]
    for said, pool in _pairs(spec, fleet):
        if pool in own and pool.replicas:
            words = ("{tp}", "{pp}")
            fixed = [word for word, can in zip(words, can_reshape(said), strict=True) if not can]
            if fixed:
                verb = "are" if len(fixed) > 1 else "is"
                why = f"as {' and '.join(fixed)} {verb} nowhere in its `processes`" if said.processes else "as pods do"
                lines.append(f"replicas of {pool.name} keep their {' and '.join(word[1:3] for word in fixed)}, {why}")
    return lines


def _pairs(spec: Spec, fleet: Fleet) -> Iterator[tuple[PoolSpec, Pool]]:
    return zip(spec.fleet, fleet.pools, strict=True)


def _own(cascade: CascadeSpec, fleet: Fleet) -> list[Pool]:
    """The pools of the cascade's models."""
    named = set(cascade.models)
    return [
        pool for pool in fleet.pools if named & {pool.model.name, pool.model.hf_id, *pool.model.aliases}
    ]  # fmt: skip


def _num_gpus(config: Replan, own: list[Pool]) -> int:
    return config.num_gpus or sum(pool.replicas * pool.parallel.num_gpus for pool in own)


def _shapes(own: list[Pool]) -> dict[Shape, str]:
    return {(pool.model.name, pool.parallel.tp, pool.parallel.pp): pool.name for pool in own}


def _possible(said: PoolSpec, pool: Pool, config: Replan, own: list[Pool]) -> list[Parallel]:
    """Shapes that a replica like the pool's could be started in."""
    other_tp, other_pp = can_reshape(said)
    server = config.gpus_per_server or pool.gpu.gpus_per_node
    found, _ = shapes_of(pool.model, pool.gpu, pool.engine, _num_gpus(config, own), server, Problem.max_pp)
    here = pool.parallel
    return [each for each in found if (other_tp or each.tp == here.tp) and (other_pp or each.pp == here.pp)]


def _of_shape(said: PoolSpec, pool: Pool, shape: Parallel) -> PoolSpec:
    name = f"{pool.name}-tp{shape.tp}" + (f"-pp{shape.pp}" if shape.pp > 1 else "")
    return replace(
        said, name=name, tp=shape.tp, pp=shape.pp, replicas=0, min_replicas=0, kv_capacity_tokens=None,
    )  # fmt: skip


def _thresholds(cascade: CascadeSpec, places: Places) -> tuple[float, ...]:
    """Of the first plan."""
    choice = resolve.cascade(cascade.policy)
    if choice.name != "thresholds":
        raise places.error(("cascade", "policy"), f"{choice.name}; expected thresholds, which `replan` changes")
    given, num = choice.arguments.get("thresholds", 80.0), len(cascade.models) - 1
    levels = tuple(given) if isinstance(given, list) else (given,) * num
    if len(levels) != num:
        raise places.error(("cascade", "policy"), f"{len(levels)} thresholds; expected {num}, one fewer than models")
    return levels


def _expected(workload: WorkloadSpec, models: tuple[str, ...], base_dir: Path) -> Period | None:
    """What the first plan was made for, as far as the scenario says it."""
    if workload.quality is None:
        return None
    scores = score_table(workload.quality, base_dir).stages(models)
    arrivals = workload.arrivals
    rate_rps = arrivals.rate if isinstance(arrivals, Poisson | Gamma | Deterministic) else arrivals
    known = float(rate_rps) if isinstance(rate_rps, int | float) else None
    return Period(known, tuple(scores.prompt_tokens.astype("f8").tolist()), scores)


def _check(spec: Spec, fleet: Fleet, config: Replan, own: list[Pool], places: Places) -> None:
    """What plans cannot be made for."""
    if spec.combos:
        raise places.error(AT, "plans have pools alone; expected `fleet` without `combos`")
    said = [spec.policies.scaling, *(variant.scaling for variant in spec.variants)]
    if any(scaling is not None for scaling in said):
        raise places.error(AT, "says how many replicas there are, as `scaling` does; expected one of the two")
    used = sum(pool.replicas * pool.parallel.num_gpus for pool in own)
    if config.num_gpus is not None and config.num_gpus < used:
        raise places.error((*AT, "num_gpus"), f"{config.num_gpus}; expected {used} or more, as many as `fleet` has")
    seen: dict[Shape, str] = {}
    for i, (pool_said, pool) in enumerate(_pairs(spec, fleet)):
        if pool in own:
            _check_pool(pool_said, pool, own[0], seen, ("fleet", i), places)


def _check_pool(said: PoolSpec, pool: Pool, first: Pool, seen: dict[Shape, str], at: Key, places: Places) -> None:
    """It has a shape that plans can give, and is not like another one."""
    if (pool.gpu, pool.engine, pool.region) != (first.gpu, first.engine, first.region):
        raise places.error(at, f"{pool.name}: expected the GPU, engine and region of {first.name}, as `replan` plans")
    if said.max_replicas is not None:
        raise places.error((*at, "max_replicas"), "plans say how many replicas there are; leave it out")
    if pool.parallel.dp > 1 or pool.parallel.ep:
        raise places.error(at, f"{pool.name}: `dp` and `ep` are no part of what `replan` plans; expected tp and pp")
    shape = (pool.model.name, pool.parallel.tp, pool.parallel.pp)
    if shape in seen:
        raise places.error(at, f"{pool.name}: like {seen[shape]}; expected one pool for each model and shape")
    seen[shape] = pool.name
