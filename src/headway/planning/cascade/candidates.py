"""Several plans of one search, for whoever can try each of them as a whole.

What is minimised is the largest p95 of any stage (3.2). A request that is sent on goes through several stages, and
their times add up. So beside the plans with the least maximum stand those with the least sum along the way, and the
best one's replicas with other thresholds of about the same quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from msgspec import structs

from headway.planning.cascade.allocation import Gpus
from headway.planning.cascade.baselines import served_by
from headway.planning.cascade.bilevel import Looked, Search, as_room
from headway.planning.cascade.cascadia import answer, made
from headway.planning.cascade.deployment import Deployment
from headway.planning.cascade.gpu_budget import Room, split
from headway.planning.cascade.latencies import Table
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import Floats, LatencyBudget, ReplicaSet

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
        gpus = _allocated([cost(w, table.guess) for w, table in zip(of, tables, strict=True)], gpus_there, use_all)
        open_ = [] if gpus is None else [(t, f) for t, f in zip(tables, gpus, strict=True) if t.guess[f] < t.best[f]]
        if not open_:
            break
        for table, f in open_:
            table.ask(f)
    gpus = _allocated([cost(w, table.best) for w, table in zip(of, tables, strict=True)], gpus_there, use_all)
    return None if gpus is None else _deployment(tables, gpus)


def _deployment(tables: Sequence[Table], gpus: tuple[int, ...]) -> Deployment:
    times = tuple(float(table.best[f]) for table, f in zip(tables, gpus, strict=True))
    return Deployment(gpus, tuple(t.chosen[f] for t, f in zip(tables, gpus, strict=True)), times, max(times), None)


def _allocated(costs: Sequence[Floats], num_gpus: Gpus, use_all: bool) -> tuple[int, ...] | None:
    """One number for each stage, `num_gpus` in all or at most, with the least sum of costs; None: none is finite."""
    if isinstance(num_gpus, Room):
        of_types = split([num_gpus.of(cost) for cost in costs], np.add)
        return None if of_types is None else tuple(int(num_gpus.cells(np.array(each))) for each in of_types[1])
    total, chosen = np.zeros(1), list[np.ndarray]()
    for cost in costs:
        added = np.full((num_gpus + 1, len(cost)), np.inf)
        for f, each in enumerate(cost.tolist()):
            ends = min(len(total), num_gpus + 1 - f)
            added[f : f + ends, f] = total[:ends] + each
        chosen.append(added.argmin(axis=1))
        total = added.min(axis=1)
    left = num_gpus if use_all else int(total.argmin())
    if not np.isfinite(total[left]):
        return None
    found: list[int] = []
    for each in reversed(chosen):
        found.append(int(each[left]))
        left -= found[-1]
    return tuple(reversed(found))
