"""Tries every routing, allocation and set of replicas (appendix J): the oracle for small cases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf

import numpy as np

from headway.core.errors import HeadwayError
from headway.planning.cascade.candidates import plan_of
from headway.planning.cascade.deployment import Deployment, StageLatencies
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.problem import CascadePlan, CascadeProblem, ReplicaSet
from headway.planning.cascade.routing import Routings
from headway.planning.cascade.search import Effort, Search, SearchResult, SolvedRouting

Best = dict[tuple[int, ...], tuple[float, ReplicaSet | None]]
"""The lowest latency of one stage by its GPUs of each type, and its replicas."""


def exhaustive(problem: CascadeProblem, latencies: StageLatencies, routings: Routings | None = None) -> CascadePlan:
    """The best plan, by evaluating everything, without bounds, MILP or proposals."""
    search = Search(problem, latencies, NoBounds(), Effort(stable_rounds=None, gap=0.0), routings)
    search.set_target(problem.target)
    for i in range(len(search.routings)):
        option = _best_deployment(search, i)
        search.solved[i] = SolvedRouting(option, inf if option is None else option.minimised)
    objective = search.objective(problem.target)
    best = search.best(objective)
    deployment = None if best is None else search.solved[best].deployment
    if best is None or deployment is None:
        raise HeadwayError(f"{problem.hardware}: no routing can be deployed")
    result = SearchResult(objective, (), True, latencies.num_evaluated, latencies.num_cached)
    return plan_of(search, best, deployment, result, "exhaustive")


def _best_deployment(search: Search, routing: int) -> Deployment | None:
    """The best deployment of all allocations of a routing."""
    problem, routings = search.problem, search.routings
    used = tuple(routings.reached[routing].any(axis=1).tolist())
    stages = [_stage(search, i, routing, used) for i in range(len(used))]
    best: Deployment | None = None
    for vectors in product(*stages):
        total = np.sum(vectors, axis=0)
        limits = [offer.limit or 0 for offer in problem.offers]
        if (total > limits).any() or (problem.use_all and (total < limits).any()):
            continue
        deployment = _deployment(search, [stage[each] for stage, each in zip(stages, vectors, strict=True)], vectors)
        if deployment is not None and deployment.minimised < (inf if best is None else best.minimised):
            best = deployment
    return best


def _deployment(
    search: Search, stages: Sequence[tuple[float, ReplicaSet | None]], vectors: Sequence[tuple[int, ...]]
) -> Deployment | None:
    """The deployment of these stages; None if it exceeds the latency limit."""
    problem, times = search.problem, tuple(latency_s for latency_s, _ in stages)
    gpus = tuple(
        sum(each) if isinstance(search.gpus, int) else int(search.gpus.cells(np.array(each))) for each in vectors
    )
    usd: float | None = None
    if search.cheapest is not None:
        if max(times) > search.cheapest.latency_s:
            return None
        prices = [offer.price for offer in problem.offers]
        usd = float(np.dot(np.sum(vectors, axis=0), prices))
    return Deployment(gpus, tuple(each for _, each in stages), times, max(times), max(times), usd)


def _stage(search: Search, stage: int, routing: int, used: tuple[bool, ...]) -> Best:
    if not used[stage]:
        return {(0,) * len(search.problem.offers): (0.0, None)}
    problem, reached = search.problem, search.routings.reached[routing, stage]
    model, lengths, sets = problem.models[stage], problem.lengths(stage, reached), search.sets_of(stage, used)
    rate_rps = problem.rate_rps * len(lengths) / len(reached)
    judge_s = problem.judge_s if stage < len(problem.models) - 1 else 0.0
    best: Best = {}
    for i in range(len(sets)):
        replicas = sets[i]
        latency_s = judge_s + search.latencies.p95_s(model, replicas, rate_rps, lengths)
        vector = tuple(sets.vectors[i].tolist())
        if latency_s < best.get(vector, (inf, None))[0]:
            best[vector] = (latency_s, replicas)
    return best
