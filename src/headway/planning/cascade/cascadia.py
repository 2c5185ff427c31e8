"""Cascadia's planner: deployment and routing together (3), for one target or for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.planning.cascade.allocation import as_room, least_sum_allocation
from headway.planning.cascade.bounds import Bounds, StepBounds
from headway.planning.cascade.deployment import Deployment, Latencies, Table
from headway.planning.cascade.plan import CascadePlan, HeldOut, StagePlan
from headway.planning.cascade.problem import Floats, LatencyBudget, Problem, ReplicaSet, Target
from headway.planning.cascade.routing import Objective
from headway.planning.cascade.search import Effort, Looked, Search
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


RARE = 0.05
"""Of the requests: stages that fewer reach count for less in a p95 over all of them."""
APART = 0.02
"""By how much, in the share of requests that some stage processes, candidates differ."""
NEAR = 0.5
"""Points of quality above the best plan's, up to which other thresholds are looked at."""
ASKS, FEWER = 12, 4
"""Evaluations for a deployment with the least sum, after which the best known will do; for each of several."""
WORTH = 0.03, 300.0
"""Of a second of the sum, $/h: from where price alone counts to where time alone does."""
VALUES = 12


def candidates(search: Search, looked: Looked, planner: str, most: int) -> tuple[CascadePlan, ...]:
    """The answer of the search, and about `most` others: a half by its objective or the sum, a half near it."""
    found = [answer(search, looked, planner)]
    best = search.best(looked.objective)
    assert best is not None  # else there is no answer
    others = [*_least_work(search, looked), *_others(search, looked, most // 2)]
    others += _near(search, best, most - most // 2)
    found += [made(search, i, deployment, looked, planner) for i, deployment in others]
    different = {(each.thresholds, each.stages): each for each in found}
    return tuple(different.values())


def _least_work(search: Search, looked: Looked) -> Iterator[tuple[int, Deployment]]:
    """The routing with the least work that has the quality, which a search that allows a gap may have left out."""
    target, known = looked.objective.target, search.known
    if isinstance(target, LatencyBudget):
        return
    good = np.flatnonzero(known.quality >= target.q_min - 1e-9)
    if len(good):
        i = int(good[known.work[good].argmin()])
        if search.solve(i).deployment is not None:
            yield i, search.spread(i)


def _others(search: Search, looked: Looked, most: int) -> Iterator[tuple[int, Deployment]]:
    solved = {i: each.deployment for i, each in search.solved.items() if each.deployment is not None}
    quality, objective = search.known.quality, looked.objective
    by_score = sorted(solved, key=lambda i: (objective(solved[i].minimised, float(quality[i])), i))
    for i in _apart(search, by_score, most // 2 + 1)[1:]:
        yield i, search.spread(i)
    by_sum = sorted(solved, key=lambda i: (*_along(search, looked, i, solved[i]), i))
    for i in _apart(search, by_sum, most - most // 2):
        if search.cheapest is not None:
            yield from ((i, deployment) for deployment in worthwhile(search, i))
        elif (deployment := least_sum(search, i)) is not None:
            yield i, deployment


def _near(search: Search, best: int, most: int) -> Iterator[tuple[int, Deployment]]:
    """The replicas of the best routing under others that send on more here and less there, with the least work each."""
    known, deployment = search.known, search.spread(best)
    used = known.ratios > 0
    alike = np.all(used == used[best], axis=1)
    good = (known.quality >= known.quality[best]) & (known.quality <= known.quality[best] + NEAR)
    same = np.flatnonzero(alike & good)
    shares = known.ratios[same, 1] if known.ratios.shape[1] > 1 else np.zeros(len(same))
    ends = np.quantile(shares, np.linspace(0, 1, most + 1))
    for low, high in pairwise(ends.tolist()):
        group = same[(shares >= low) & (shares <= high)]
        i = int(group[known.work[group].argmin()]) if len(group) else best
        if i != best:
            yield i, served_by(search, i, deployment)


def _along(search: Search, looked: Looked, routing: int, deployment: Deployment) -> tuple[bool, float]:
    """For an order: whether the target is missed along the whole way, and how good the plan is in what it leaves."""
    total_s = float(weights(search, routing) @ np.asarray(deployment.latencies_s))
    quality, target = float(search.known.quality[routing]), looked.objective.target
    missed = not looked.objective.met(total_s, quality)
    return missed, -quality if isinstance(target, LatencyBudget) and not missed else total_s


def weights(search: Search, routing: int) -> Floats:
    """What a second at each stage is to a p95 over all requests, about."""
    found: Floats = np.clip(search.known.ratios[routing] / RARE, 1e-9, 1.0)
    return found


def along_s(found: CascadePlan) -> float:
    """About the p95 of a plan over all requests: the sum of its stages', as far as many requests reach them."""
    return sum(min(stage.processing_ratio / RARE, 1.0) * (stage.p95_latency_s or 0.0) for stage in found.stages)


def _apart(search: Search, routings: Sequence[int], most: int) -> list[int]:
    """The first ones of which no two are alike."""
    found: list[int] = []
    for i in routings:
        ratios = search.known.ratios
        if all(np.abs(ratios[i] - ratios[other]).max() >= APART for other in found):
            found.append(i)
        if len(found) == most:
            break
    return found


def least_sum(search: Search, routing: int) -> Deployment | None:
    """The deployment of a routing with the least weighted sum of the stages' p95; None: none is known."""
    return _least(search, routing, lambda weight, p95_s: weight * p95_s, ASKS)


def worthwhile(search: Search, routing: int) -> list[Deployment]:
    """Deployments of a routing from cheap to fast: the least of price and weighted sum of p95 together.

    What a second is worth rises from one to the next ("Lagrangian relaxation"); the sum is more than a p95 over all
    requests, so that which of them is in time, a rehearsal has to say.
    """
    room, found = as_room(search.problem), dict[tuple[ReplicaSet | None, ...], Deployment]()
    for worth in np.geomspace(*WORTH, VALUES).tolist():
        each = _least(search, routing, partial(_priced, room.usd, worth), FEWER)
        if each is not None:
            usd = float(room.usd[list(each.gpus)].sum())
            found[each.sets] = structs.replace(each, usd_per_hour=usd)
    return list(found.values())


def _priced(usd: Floats, worth: float, weight: float, p95_s: Floats) -> Floats:
    return usd + worth * weight * p95_s


def _least(search: Search, routing: int, cost: Callable[[float, Floats], Floats], asks: int) -> Deployment | None:
    """The deployment with the least sum of costs, each of a stage's weight and its p95 by GPUs; None: none is known."""
    tables, of = search.tables(routing), weights(search, routing).tolist()
    gpus_there, use_all = search.gpus, search.problem.use_all and search.cheapest is None
    for _ in range(asks):
        gpus = least_sum_allocation(
            [cost(w, table.guess) for w, table in zip(of, tables, strict=True)], gpus_there, use_all
        )
        open_ = [] if gpus is None else [(t, f) for t, f in zip(tables, gpus, strict=True) if t.guess[f] < t.best[f]]
        if not open_:
            break
        for table, f in open_:
            table.ask(f)
    gpus = least_sum_allocation([cost(w, table.best) for w, table in zip(of, tables, strict=True)], gpus_there, use_all)
    return None if gpus is None else _deployment(tables, gpus)


def _deployment(tables: Sequence[Table], gpus: tuple[int, ...]) -> Deployment:
    times = tuple(float(table.best[f]) for table, f in zip(tables, gpus, strict=True))
    return Deployment(gpus, tuple(t.chosen[f] for t, f in zip(tables, gpus, strict=True)), times, max(times), None)


def served_by(search: Search, routing: int, found: Deployment) -> Deployment:
    """The same replicas with the latencies of the search's own requests under any routing."""
    latencies = [0.0 if each is None else search.latency_s(routing, i, each) for i, each in enumerate(found.sets)]
    return Deployment(found.gpus, found.sets, tuple(latencies), max(latencies, default=inf), None)
