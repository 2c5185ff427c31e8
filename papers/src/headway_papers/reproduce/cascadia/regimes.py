"""Plans for the most throughput, compared with the sustained rates of plans for the lowest latency.

Among all routings of the required quality and all allocations of the GPUs, a plan for the most throughput has the
largest rate of its scarcest stage: capacity over the share of requests that reach it. A replica's capacity is measured
by `sustained_rps`. CascadeServe takes the routing with the least work. Its GPUs are divided in the same way, or each of
its models gets the same number of GPUs and the same parallelism, because section 2 says that it adapts neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from headway.core.errors import HeadwayError
from headway.perf.params import weights_bytes
from headway.planning.cascade import planners
from headway.planning.cascade.allocation import Ints
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import evaluator_of
from headway.planning.cascade.latency_bounds import Bounds
from headway.planning.cascade.planners import CascadePlanner
from headway.planning.cascade.problem import (
    CascadePlan,
    CascadeProblem,
    Floats,
    QualityFloor,
    Replicas,
    ReplicaSet,
    StagePlan,
)
from headway.planning.cascade.rehearsal import Trials, best_or_nearest
from headway.planning.cascade.replica_sets import ReplicaSets, all_sets, uniform_sets
from headway.planning.cascade.request import PlanningRequest
from headway.planning.cascade.routing import Routings, cascades
from headway_papers.reproduce.cascadia.runs import run
from headway_papers.reproduce.cascadia.setup import planning_case
from headway_papers.reproduce.tasks import Measurement

RATE_RPS = 3.0
"""Rate at which plans are rehearsed and judged, with each request of a table once. Shares, quality and capacities do
not depend on it."""
SYSTEMS = ("cascadia", "stand-alone", "cascade-serve", "cascade-serve-uniform")


def alone_in(q_min: float) -> int:
    """The stage of the stand-alone model in a case of DeepSeek's: 671B for 85 and 90, 70B below."""
    return 2 if q_min >= 85 else 1


@dataclass(frozen=True, eq=False)
class Capacities:
    """The most requests per second that the replica sets of each model complete, by number of GPUs."""

    sets: tuple[ReplicaSets, ...]
    """Replica sets by stage."""
    rps: tuple[Floats, ...]
    """Rate of each set, by stage."""
    num_gpus: int
    server: int

    def best(self, stage: int, uniform: bool = False) -> tuple[Ints, Floats]:
        """By number of GPUs, from 0: the set with the highest rate on at most that many GPUs (-1: none), and its
        rate."""
        sets, rps = self.sets[stage], self.rps[stage]
        rows = np.argsort(rps, kind="stable")
        if uniform:
            known = {tuple(row) for row in uniform_sets(sets.shapes, self.num_gpus, self.server).counts.tolist()}
            rows = np.array([row for row in rows.tolist() if tuple(sets.counts[row].tolist()) in known], "i8")
        chosen = np.full(self.num_gpus + 1, -1)
        chosen[sets.cells[rows]] = rows  # for each size the last one, which has the highest rate
        most = np.where(chosen >= 0, rps[chosen], 0.0)
        for size in range(1, self.num_gpus + 1):
            if most[size - 1] >= most[size]:
                chosen[size], most[size] = chosen[size - 1], most[size - 1]
        return chosen, most


def measure_shapes(cascade: str, trace: int) -> Measurement:
    """Requests per second that one replica of each model and shape completes of a trace, whatever the quality."""
    case = planning_case(cascade, trace, 80.0, RATE_RPS)
    problem, stage = _of_any_size(case), evaluator_of(case)
    every, rps = all_sets(problem), Measurement()
    for i, model in enumerate(problem.models):
        lengths = problem.lengths(i, np.ones(len(problem.scores), bool))
        rps[model.name] = [
            stage.sustained_rps(model, ReplicaSet((Replicas(shape.tp, shape.pp, 1),)), lengths)
            for shape in every(i, ()).shapes
        ]
    return rps


def capacities(case: PlanningRequest, shapes: Measurement) -> Capacities:
    """The capacity of every set from its shapes' (`measure_shapes`): those of its replicas add up."""
    problem = _of_any_size(case)
    sets = tuple(all_sets(problem)(i, ()) for i in range(len(problem.models)))
    rates = (each.counts @ np.array(shapes[name]) for each, name in zip(sets, problem.names, strict=True))
    return Capacities(sets, tuple(map(np.asarray, rates)), problem.num_gpus, problem.server)


def _of_any_size(case: PlanningRequest) -> CascadeProblem:
    return replace(case.problem, use_all=False)


def scarcest(ratios: Floats, capacity: Sequence[Floats], divisions: Ints) -> tuple[Floats, Ints]:
    """Maps each routing to the highest rate that its scarcest stage allows, and the row of `divisions` that reaches
    it."""
    most, best = np.zeros(len(ratios)), np.zeros(len(ratios), "i8")
    for row, division in enumerate(divisions):
        served = np.array([capacity[i][num] for i, num in enumerate(division)])
        with np.errstate(divide="ignore", invalid="ignore"):
            rps = np.where(ratios > 0, served / ratios, inf).min(axis=1)
        better = rps > most
        most[better], best[better] = rps[better], row
    return most, best


def divisions_of(num_gpus: int, stages: int) -> Ints:
    """All divisions of the GPUs among the stages."""
    rows = [each for each in product(range(num_gpus + 1), repeat=stages - 1) if sum(each) <= num_gpus]
    return np.array([(*each, num_gpus - sum(each)) for each in rows], "i8")


def for_throughput(capacity: Capacities, system: str) -> CascadePlanner:
    """The planner of `cascadia`, `cascade-serve` or `cascade-serve-uniform` for the most throughput."""
    uniform = system == "cascade-serve-uniform"
    by_stage = [capacity.best(i, uniform) for i in range(len(capacity.sets))]
    most, everyway = [rps for _, rps in by_stage], divisions_of(capacity.num_gpus, len(by_stage))

    def plans(problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds) -> Sequence[CascadePlan]:
        routings = cascades(problem.scores, [weights_bytes(model) for model in problem.models])
        kept = _that_keep(routings, problem)
        if system == "cascadia":
            rps, best = scarcest(routings.ratios[kept], most, everyway)
            at = int(np.lexsort((-routings.quality[kept], -rps))[0])
            return [_plan(problem, routings, int(kept[at]), everyway[best[at]], capacity, by_stage, system)]
        for row in kept[np.argsort(routings.work[kept], kind="stable")].tolist():
            used = tuple((routings.ratios[row] > 0).tolist())
            ways = np.array([planners.equal_shares(problem.num_gpus, used)]) if uniform else everyway
            rps, best = scarcest(routings.ratios[[row]], most, ways)
            if rps[0] > 0:
                return [_plan(problem, routings, row, ways[best[0]], capacity, by_stage, system)]
        raise HeadwayError(f"{system}: no routing can be deployed on {problem.num_gpus} GPUs")

    return plans


def _that_keep(routings: Routings, problem: CascadeProblem) -> Ints:
    """Routings of the required quality; if there are none, those with the highest quality."""
    assert isinstance(problem.target, QualityFloor)
    floor = min(problem.target.q_min, float(routings.quality.max()))
    return np.flatnonzero(routings.quality >= floor - 1e-9)


def _plan(
    problem: CascadeProblem,
    routings: Routings,
    row: int,
    division: Ints,
    capacity: Capacities,
    by_stage: Sequence[tuple[Ints, Floats]],
    system: str,
) -> CascadePlan:
    """A plan without latencies, which do not matter for throughput."""
    ratios, stages = routings.ratios[row].tolist(), list[StagePlan]()
    last = max(i for i, ratio in enumerate(ratios) if ratio > 0)
    for i, name in enumerate(problem.names):
        chosen = int(by_stage[i][0][division[i]]) if ratios[i] > 0 else -1
        parts = () if chosen < 0 else capacity.sets[i][chosen].parts
        threshold = None
        if i + 1 < len(ratios):  # without replicas, the next model gets no request at any score
            threshold = float(routings.thresholds[row, i]) if i < last else 0.0
        stages.append(
            StagePlan(
                name, sum(p.num_gpus for p in parts), parts, threshold, ratios[i], ratios[i] * problem.rate_rps, None
            )
        )
    return plan_of_stages(problem, stages, float(routings.quality[row]), f"{system}, most throughput")


def plan_of_stages(problem: CascadeProblem, stages: Sequence[StagePlan], quality: float, name: str) -> CascadePlan:
    """A plan with unknown latencies and bounds."""
    return CascadePlan(
        status="converged", planner=name, target=problem.target, stages=tuple(stages), num_gpus=problem.num_gpus,
        gpus_used=sum(each.num_gpus for each in stages), latency_s=0.0, bound_s=None, quality=quality, objective=0.0,
        utopia_quality=100.0, nadir_quality=0.0, rounds=(), num_evaluations=0, num_remembered=0, num_sets=0, why=name,
    )  # fmt: skip


def alone_for_throughput(capacity: Capacities, stage: int) -> CascadePlanner:
    """One model on the replicas with the highest rate."""

    def plans(problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds) -> Sequence[CascadePlan]:
        row = int(capacity.best(stage)[0][problem.num_gpus])
        parts = capacity.sets[stage][row].parts
        size, name = sum(part.num_gpus for part in parts), problem.names[stage]
        alone = StagePlan(name, size, parts, None, 1.0, problem.rate_rps, None)
        return [plan_of_stages(problem, [alone], 0.0, f"{name}, most throughput")]

    return plans


def measure_throughput(cascade: str, trace: int, q_min: float, seeds: list[int], shapes: Measurement) -> Measurement:
    """Plans of every system for the most throughput, and their sustained rates on unseen tables."""
    case = planning_case(cascade, trace, q_min, RATE_RPS)
    capacity, latencies = capacities(case, shapes), StageLatencies(evaluator_of(case))
    by_system = {name: for_throughput(capacity, name) for name in SYSTEMS if name != "stand-alone"}
    by_system["stand-alone"] = alone_for_throughput(capacity, alone_in(q_min))
    return _judged(case, latencies, by_system, seeds)


def _judged(
    case: PlanningRequest,
    latencies: StageLatencies,
    by_system: Mapping[str, CascadePlanner],
    seeds: Sequence[int],
) -> Measurement:
    runs, plans = Measurement(), Measurement()
    for name, planner in by_system.items():
        chosen = best_or_nearest(case.problem.target, Trials(case, latencies, planner).run()).plan
        runs[name] = [run(case, chosen, seed) for seed in seeds]
        plans[name] = [[each.shapes, each.processing_ratio] for each in chosen.stages]
    return {"runs": runs, "plans": plans}
