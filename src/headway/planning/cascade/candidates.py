"""Cascadia's planner: optimises deployment and routing together (3), for one target or several.

The search minimises the largest p95 of any stage (3.2). An escalated request passes several stages, whose latencies add
up. `candidates` therefore returns several plans of one search, each to be rehearsed as a whole: the plans with the
least maximum, those with the least sum over the stages, and the best plan's replicas with other thresholds of about the
same quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.planning.cascade.allocation import budget_of, least_sum
from headway.planning.cascade.deployment import Deployment, StageLatencies, deployment_of
from headway.planning.cascade.latency_bounds import Bounds
from headway.planning.cascade.problem import (
    CascadePlan,
    CascadeProblem,
    Floats,
    HeldOut,
    LatencyBudget,
    ReplicaSet,
    StagePlan,
    Target,
)
from headway.planning.cascade.routing import Objective
from headway.planning.cascade.search import Effort, Search, SearchResult
from headway.workload.quality import Scores

RARE = 0.05
"""Share of requests. A stage that fewer requests reach has less weight in a p95 over all requests."""
MIN_DISTANCE = 0.02
"""Minimum distance between candidates: the difference in the share of requests that some stage processes."""
NEAR = 0.5
"""Points of quality by which candidates with the best plan's replicas may exceed it."""
EVALUATIONS, PRICED_EVALUATIONS = 12, 4
"""Rounds of the search for a routing's deployment with the smallest sum of latencies; and rounds for each price of a
second."""
USD_PER_S = 0.03, 300.0
"""Range of the price of a second in a sum of cost and latencies, $/h: from cost alone to latency alone."""
NUM_PRICES = 12


def plan(
    problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> CascadePlan:
    """The plan for the problem's target."""
    return plans(problem, [problem.target], latencies, bounds, effort)[0]


def plans(
    problem: CascadeProblem,
    targets: Sequence[Target],
    latencies: StageLatencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
) -> tuple[CascadePlan, ...]:
    """A plan for each target, from one search. A looser target never has a worse plan.

    The plans of qualities from low to high form the Pareto curve.
    """
    search = Search(problem, latencies, bounds, effort)
    strictest_first = sorted(targets, key=lambda t: t.latency_s if isinstance(t, LatencyBudget) else -t.q_min)
    results = {target: search.run(target) for target in strictest_first}
    return tuple(best_plan_of(search, results[target], "cascadia") for target in targets)


def with_held_out(plan: CascadePlan, scores: Scores) -> CascadePlan:
    """The plan, with quality and ratios of its thresholds on held-out requests."""
    if plan.pre_routed or any(stage.threshold is None for stage in plan.stages[:-1]):
        raise HeadwayError(f"{plan.planner}: only the thresholds of a cascade hold for other requests")
    own = scores.stages([stage.model for stage in plan.stages])
    held_out = HeldOut(len(own), own.ratios(plan.thresholds), own.quality(plan.thresholds))
    return structs.replace(plan, held_out=held_out)


# From a search's result to plans.


def best_plan_of(search: Search, result: SearchResult, planner: str) -> CascadePlan:
    """The best plan of a search. Raises HeadwayError if no routing can be deployed."""
    best = search.best(result.objective)
    if best is None:
        problem = search.problem
        raise HeadwayError(
            f"{problem.hardware}: no set of replicas serves {problem.rate_rps:g} requests/s of "
            f"{problem.names[0]}, however few go on to larger models"
        )
    evaluated, cached = search.latencies.num_evaluated, search.latencies.num_cached
    plan = plan_of(search, best, search.with_spare_gpus(best), result, planner)
    return structs.replace(
        plan,
        num_evaluations=plan.num_evaluations + search.latencies.num_evaluated - evaluated,
        num_remembered=plan.num_remembered + search.latencies.num_cached - cached,
    )


def plan_of(search: Search, routing: int, deployment: Deployment, result: SearchResult, planner: str) -> CascadePlan:
    """The plan of a routing and its deployment."""
    objective, quality = result.objective, float(search.routings.quality[routing])
    is_met = objective.met(deployment.minimised, quality)
    is_optimal = result.complete and search.effort.max_evaluations is None
    return CascadePlan(
        status="infeasible" if not is_met else "optimal" if is_optimal else "converged",
        planner=planner,
        target=objective.target,
        stages=_stages(search, routing, deployment),
        num_gpus=search.problem.total_gpus,
        gpus_used=sum(each.num_gpus for each in deployment.sets if each is not None),
        latency_s=deployment.latency_s,
        bound_s=deployment.bound_s,
        quality=quality,
        objective=objective(deployment.minimised, quality),
        utopia_quality=objective.utopia,
        nadir_quality=objective.nadir,
        rounds=result.rounds,
        num_evaluations=result.num_evaluated,
        num_remembered=result.num_cached,
        num_sets=search.num_sets,
        why=_explanation(search, routing, deployment, objective, is_met),
    )


def _stages(search: Search, routing: int, deployment: Deployment) -> tuple[StagePlan, ...]:
    problem, routings, stages = search.problem, search.routings, []
    for i, name in enumerate(problem.names):
        replicas, ratio, gpus = deployment.sets[i], float(routings.ratios[routing, i]), deployment.gpus[i]
        stages.append(
            StagePlan(
                model=name,
                num_gpus=gpus if isinstance(search.gpus, int) else sum(search.gpus.vector(gpus)),
                replicas=() if replicas is None else replicas.parts,
                threshold=float(routings.thresholds[routing, i]) if i < routings.thresholds.shape[1] else None,
                processing_ratio=ratio,
                rate_rps=problem.rate_rps * ratio,
                p95_latency_s=None if replicas is None else deployment.latencies_s[i],
            )
        )
    return tuple(stages)


def _explanation(search: Search, routing: int, deployment: Deployment, objective: Objective, is_met: bool) -> str:
    """A sentence on the stage that limits the plan, or on the target that is out of reach."""
    slowest = search.problem.names[int(np.argmax(deployment.latencies_s))]
    quality, latency_s = float(search.routings.quality[routing]), deployment.latency_s
    reached = f"quality {quality:.4g} at a p95 of {latency_s:.4g} s, held by {slowest}"
    if deployment.usd_per_hour is not None:
        reached += f", for ${deployment.usd_per_hour:.4g}/h"
    if is_met:
        return reached
    if isinstance(objective.target, LatencyBudget):
        return f"a p95 of {objective.target.latency_s:g} s is out of reach on these GPUs; the nearest is {reached}"
    q_min, most = objective.target.q_min, float(search.routings.quality.max())
    if most < q_min:
        return f"no thresholds reach a quality of {q_min:g} on this sample: {most:.4g} at most; this plan has {reached}"
    return f"thresholds could reach a quality of {q_min:g}, but not on these GPUs or at this price; {reached}"


# Several plans from one search.


def candidates(search: Search, result: SearchResult, planner: str, most: int) -> tuple[CascadePlan, ...]:
    """The best plan of a search, and about `most` others: half by objective or sum, half near the best."""
    best_plan = best_plan_of(search, result, planner)
    best = search.best(result.objective)
    assert best is not None  # otherwise `best_plan_of` raises
    deployed = [*_least_work(search, result), *_by_objective_and_sum(search, result, most // 2)]
    deployed += _neighbours(search, best, most - most // 2)
    further = [plan_of(search, i, deployment, result, planner) for i, deployment in deployed]
    different = {(each.thresholds, each.stages): each for each in (best_plan, *further)}
    return tuple(different.values())


def _least_work(search: Search, result: SearchResult) -> Iterator[tuple[int, Deployment]]:
    """The routings of the required quality with the least work. A search with a gap may have skipped them.

    Work is computed from the sample's answers, and from mean answers, because the lengths of few requests may favour a
    routing by chance.
    """
    target, routings = result.objective.target, search.routings
    if isinstance(target, LatencyBudget):
        return
    good = np.flatnonzero(routings.quality >= target.q_min - 1e-9)
    if len(good):
        least = (int(good[work[good].argmin()]) for work in (routings.work, search.mean_work))
        for i in dict.fromkeys(least):
            if search.solve(i).deployment is not None:
                yield i, search.with_spare_gpus(i)


def _by_objective_and_sum(search: Search, result: SearchResult, most: int) -> Iterator[tuple[int, Deployment]]:
    solved = {i: each.deployment for i, each in search.solved.items() if each.deployment is not None}
    quality, objective = search.routings.quality, result.objective
    by_objective = sorted(solved, key=lambda i: (objective(solved[i].minimised, float(quality[i])), i))
    for i in _distant(search, by_objective, most // 2 + 1)[1:]:
        yield i, search.with_spare_gpus(i)
    by_sum = sorted(solved, key=lambda i: (*_sum_order(search, result, i, solved[i]), i))
    for i in _distant(search, by_sum, most - most // 2):
        if search.cheapest is not None:
            yield from ((i, deployment) for deployment in cheap_to_fast(search, i))
        elif deployment := _least_cost_sum(search, i, lambda weight, p95_s: weight * p95_s, EVALUATIONS):
            yield i, deployment


def _neighbours(search: Search, best: int, most: int) -> Iterator[tuple[int, Deployment]]:
    """The replicas of the best routing under other routings of similar quality, each with the least work."""
    routings, deployment = search.routings, search.with_spare_gpus(best)
    used = routings.ratios > 0
    same_stages = np.all(used == used[best], axis=1)
    good = (routings.quality >= routings.quality[best]) & (routings.quality <= routings.quality[best] + NEAR)
    similar = np.flatnonzero(same_stages & good)
    shares = routings.ratios[similar, 1] if routings.ratios.shape[1] > 1 else np.zeros(len(similar))
    ends = np.quantile(shares, np.linspace(0, 1, most + 1))
    for low, high in pairwise(ends.tolist()):
        group = similar[(shares >= low) & (shares <= high)]
        i = int(group[routings.work[group].argmin()]) if len(group) else best
        if i != best:
            yield i, search.redeployed(i, deployment)


def _distant(search: Search, routings: Sequence[int], most: int) -> list[int]:
    """The first routings with a minimum distance between them."""
    ratios, chosen = search.routings.ratios, list[int]()
    for i in routings:
        if all(np.abs(ratios[i] - ratios[other]).max() >= MIN_DISTANCE for other in chosen):
            chosen.append(i)
        if len(chosen) == most:
            break
    return chosen


def _sum_order(search: Search, result: SearchResult, routing: int, deployment: Deployment) -> tuple[bool, float]:
    """A sort key: whether the sum over the stages misses the target, then the plan's objective."""
    total_s = float(stage_weights(search, routing) @ np.asarray(deployment.latencies_s))
    quality, target = float(search.routings.quality[routing]), result.objective.target
    is_missed = not result.objective.met(total_s, quality)
    return is_missed, -quality if isinstance(target, LatencyBudget) and not is_missed else total_s


def stage_weights(search: Search, routing: int) -> Floats:
    """The approximate contribution of a second at each stage to a p95 over all requests."""
    return np.asarray(np.clip(search.routings.ratios[routing] / RARE, 1e-9, 1.0))


def total_latency_s(plan: CascadePlan) -> float:
    """The approximate p95 of a plan over all requests: the weighted sum of its stages' p95."""
    return sum(min(stage.processing_ratio / RARE, 1.0) * (stage.p95_latency_s or 0.0) for stage in plan.stages)


def cheap_to_fast(search: Search, routing: int) -> list[Deployment]:
    """Deployments of a routing from cheap to fast: minimal price plus weighted sum of p95 (Lagrangian relaxation).

    The price of a second rises from one to the next. The sum exceeds a p95 over all requests, so a rehearsal must find
    the deployments that are in time.
    """
    usd, by_sets = budget_of(search.problem).usd, dict[tuple[ReplicaSet | None, ...], Deployment]()
    for usd_per_s in np.geomspace(*USD_PER_S, NUM_PRICES).tolist():

        def cost(weight: float, p95_s: Floats, usd_per_s: float = usd_per_s) -> Floats:
            return usd + usd_per_s * weight * p95_s

        if deployment := _least_cost_sum(search, routing, cost, PRICED_EVALUATIONS):
            price = float(usd[list(deployment.gpus)].sum())
            by_sets[deployment.sets] = structs.replace(deployment, usd_per_hour=price)
    return list(by_sets.values())


def _least_cost_sum(
    search: Search, routing: int, cost: Callable[[float, Floats], Floats], max_evaluations: int
) -> Deployment | None:
    """The deployment with the smallest sum of `cost(stage's weight, p95 by GPUs)`; None if none is known."""
    tables, weights = search.tables(routing), stage_weights(search, routing).tolist()
    use_all = search.problem.use_all and search.cheapest is None

    def allocate(columns: Sequence[Floats]) -> tuple[int, ...] | None:
        return least_sum([cost(w, column) for w, column in zip(weights, columns, strict=True)], search.gpus, use_all)

    for _ in range(max_evaluations):
        gpus = allocate([table.estimate for table in tables])
        open_ = [] if gpus is None else [(t, f) for t, f in zip(tables, gpus, strict=True) if t.estimate[f] < t.best[f]]
        if not open_:
            break
        for table, f in open_:
            table.evaluate(f)
    gpus = allocate([table.best for table in tables])
    return None if gpus is None else deployment_of(tables, gpus, None)
