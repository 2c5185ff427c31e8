"""Cascadia's planner: deployment and routing together (3), for one target or for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.planning.cascade.bilevel import Effort, Looked, Search
from headway.planning.cascade.bounds import Bounds, StepBounds
from headway.planning.cascade.deployment import Deployment
from headway.planning.cascade.latencies import Latencies
from headway.planning.cascade.plan import CascadePlan, HeldOut, StagePlan
from headway.planning.cascade.problem import LatencyBudget, Problem, Target
from headway.planning.cascade.routing import Objective
from headway.workload.quality import Scores


def plan(
    problem: Problem, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> CascadePlan:
    """The plan for the problem's target. `bounds`: None = those of the step-time model, for an evaluator that plays
    lengths once."""
    return plans(problem, [problem.target], latencies, bounds, effort)[0]


def plans(
    problem: Problem,
    targets: Sequence[Target],
    latencies: Latencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
) -> tuple[CascadePlan, ...]:
    """A plan for each target. What is found for one counts for all: a looser target never has a worse plan.

    The plans of qualities from low to high are the Pareto curve.
    """
    search = Search(problem, latencies, bounds or StepBounds(problem.gpu, problem.engine), effort or Effort())
    looked = {target: search.look(target) for target in sorted(targets, key=_strictness)}
    return tuple(answer(search, looked[target], "cascadia") for target in targets)


def _strictness(target: Target) -> float:
    return target.latency_s if isinstance(target, LatencyBudget) else -target.q_min


def answer(search: Search, looked: Looked, planner: str) -> CascadePlan:
    """The best plan of a search. HeadwayError where no routing can be deployed."""
    best = search.best(looked.objective)
    if best is None:
        problem = search.problem
        raise HeadwayError(
            f"{problem.hardware}: no set of replicas serves {problem.rate_rps:g} requests/s of "
            f"{problem.names[0]}, however few go on to larger models"
        )
    asked, found = search.latencies.num_asked, search.latencies.num_found
    done = made(search, best, search.spread(best), looked, planner)
    return structs.replace(
        done,
        num_evaluations=done.num_evaluations + search.latencies.num_asked - asked,
        num_remembered=done.num_remembered + search.latencies.num_found - found,
    )


def made(search: Search, routing: int, deployment: Deployment, looked: Looked, planner: str) -> CascadePlan:
    """A routing and its deployment as values."""
    problem, known, objective = search.problem, search.known, looked.objective
    quality = float(known.quality[routing])
    met = objective.met(deployment.minimised, quality)
    complete = looked.complete and search.effort.asks is None
    return CascadePlan(
        status="infeasible" if not met else "optimal" if complete else "converged",
        planner=planner,
        target=objective.target,
        stages=_stages(search, routing, deployment),
        num_gpus=problem.total_gpus,
        gpus_used=sum(each.num_gpus for each in deployment.sets if each is not None),
        latency_s=deployment.latency_s,
        bound_s=deployment.bound_s,
        quality=quality,
        objective=objective(deployment.minimised, quality),
        utopia_quality=objective.utopia,
        nadir_quality=objective.nadir,
        rounds=looked.rounds,
        num_evaluations=looked.num_asked,
        num_remembered=looked.num_found,
        num_sets=search.num_sets,
        why=_why(search, routing, deployment, objective, met),
    )


def _stages(search: Search, routing: int, deployment: Deployment) -> tuple[StagePlan, ...]:
    problem, known = search.problem, search.known
    found = []
    for i, name in enumerate(problem.names):
        replicas, ratio = deployment.sets[i], float(known.ratios[routing, i])
        found.append(
            StagePlan(
                model=name,
                num_gpus=_num_gpus(search, deployment.gpus[i]),
                replicas=() if replicas is None else replicas.parts,
                threshold=float(known.thresholds[routing, i]) if i < known.thresholds.shape[1] else None,
                processing_ratio=ratio,
                rate_rps=problem.rate_rps * ratio,
                p95_latency_s=None if replicas is None else deployment.latencies_s[i],
            )
        )
    return tuple(found)


def _num_gpus(search: Search, gpus: int) -> int:
    """Of all types."""
    return gpus if isinstance(search.gpus, int) else sum(search.gpus.vector(gpus))


def _why(search: Search, routing: int, deployment: Deployment, objective: Objective, met: bool) -> str:
    """In a sentence: what holds it, or what is out of reach."""
    slowest = search.problem.names[int(np.argmax(deployment.latencies_s))]
    quality, latency_s = float(search.known.quality[routing]), deployment.latency_s
    reached = f"quality {quality:.4g} at a p95 of {latency_s:.4g} s, held by {slowest}"
    if deployment.usd_per_hour is not None:
        reached += f", for ${deployment.usd_per_hour:.4g}/h"
    if met:
        return reached
    if isinstance(objective.target, LatencyBudget):
        return f"a p95 of {objective.target.latency_s:g} s is out of reach on these GPUs; the nearest is {reached}"
    q_min, most = objective.target.q_min, float(search.known.quality.max())
    if most < q_min:
        return f"no thresholds reach a quality of {q_min:g} on this sample: {most:.4g} at most; this plan has {reached}"
    return f"thresholds could reach a quality of {q_min:g}, but not on these GPUs or at this price; {reached}"


def calibrated(
    problem: Problem,
    latencies: Latencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
    share: float = 0.5,
    seed: int = 0,
) -> CascadePlan:
    """The plan for a part of the requests, with its shares and quality on the others reported beside."""
    first, second = problem.scores.split(share, seed)
    found = plan(replace(problem, scores=first), latencies, bounds, effort)
    return with_held_out(found, second)


def with_held_out(found: CascadePlan, scores: Scores) -> CascadePlan:
    """The plan, and what its thresholds do to other requests."""
    levels = [each.threshold for each in found.stages[:-1]]
    if found.pre_routed or any(level is None for level in levels):
        raise HeadwayError(f"{found.planner}: only the thresholds of a cascade hold for other requests")
    thresholds = [level for level in levels if level is not None]
    own = scores.stages([stage.model for stage in found.stages])
    reported = HeldOut(len(own), own.ratios(thresholds), own.quality(thresholds))
    return structs.replace(found, held_out=reported)
