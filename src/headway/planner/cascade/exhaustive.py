"""Every routing, every allocation, every set of replicas (appendix J): the oracle for cases that are small enough."""

from __future__ import annotations

from itertools import product
from math import inf

from headway.core.errors import HeadwayError
from headway.planner.cascade.bilevel import Effort, Looked, Search, Solved
from headway.planner.cascade.bounds import NoBounds
from headway.planner.cascade.cascadia import made
from headway.planner.cascade.deployment import Deployment
from headway.planner.cascade.latencies import Latencies
from headway.planner.cascade.plan import CascadePlan
from headway.planner.cascade.problem import Problem, ReplicaSet
from headway.planner.cascade.routing import Routings

Best = dict[int, tuple[float, ReplicaSet | None]]
"""Of one stage, by its number of GPUs: the least latency, and with which replicas."""


def exhaustive(problem: Problem, latencies: Latencies, routings: Routings | None = None) -> CascadePlan:
    """The best plan there is, by asking for everything; no bound, no program, no proposal."""
    search = Search(problem, latencies, NoBounds(), Effort(stable_rounds=None, gap=0.0), routings)
    for i in range(len(search.known)):
        found = _deployed(search, i)
        search.solved[i] = Solved(found, inf if found is None else found.latency_s)
    objective = search.objective(problem.target)
    best = search.best(objective)
    deployment = None if best is None else search.solved[best].deployment
    if best is None or deployment is None:
        raise HeadwayError(f"{problem.num_gpus} x {problem.gpu.name}: no routing can be deployed")
    looked = Looked(objective, (), True, latencies.num_asked, latencies.num_found)
    return made(search, best, deployment, looked, "exhaustive")


def _deployed(search: Search, routing: int) -> Deployment | None:
    """The best of all allocations of a routing."""
    problem, known = search.problem, search.known
    used = tuple(known.reached[routing].any(axis=1).tolist())
    stages = [_stage(search, i, routing, used) for i in range(len(used))]
    best: Deployment | None = None
    for gpus in product(*stages):
        if sum(gpus) > problem.num_gpus or (problem.use_all and sum(gpus) < problem.num_gpus):
            continue
        times = tuple(stage[f][0] for stage, f in zip(stages, gpus, strict=True))
        if max(times) < (inf if best is None else best.latency_s):
            sets = tuple(stage[f][1] for stage, f in zip(stages, gpus, strict=True))
            best = Deployment(gpus, sets, times, max(times), max(times))
    return best


def _stage(search: Search, stage: int, routing: int, used: tuple[bool, ...]) -> Best:
    if not used[stage]:
        return {0: (0.0, None)}
    problem, reached = search.problem, search.known.reached[routing, stage]
    model, lengths, sets = problem.models[stage], problem.lengths(stage, reached), search.of_stage(stage, used)
    rate_rps = problem.rate_rps * len(lengths) / len(reached)
    judge_s = problem.judge_s if stage < len(problem.models) - 1 else 0.0
    best: Best = {}
    for i in range(len(sets)):
        replicas = sets[i]
        latency_s = judge_s + search.latencies.p95_s(model, replicas, rate_rps, lengths)
        if latency_s < best.get(replicas.num_gpus, (inf, None))[0]:
            best[replicas.num_gpus] = (latency_s, replicas)
    return best
