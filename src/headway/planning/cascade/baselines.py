"""What Cascadia is compared with, as planners with the same result (4.1, 4.3, appendix I).

Every one of them gets the same evaluator, bounds and search for whatever it does optimise; what it does not, is fixed
here. Only one model alone is offered combos.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError, unknown
from headway.perf.params import weights_bytes
from headway.planning.cascade.bounds import Bounds, StepBounds
from headway.planning.cascade.cascadia import answer, made, served_by
from headway.planning.cascade.deployment import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import Problem, QualityFloor
from headway.planning.cascade.replica_sets import Sets, SetsOf, all_sets, uniform_sets, unlike
from headway.planning.cascade.routing import Routings, of_routes
from headway.planning.cascade.search import Effort, Looked, Search
from headway.workload.quality import Scores


def stand_alone(
    problem: Problem, model: str, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> CascadePlan:
    """One model for all requests, its replicas tuned by the same search. Its quality is what it is."""
    if model not in problem.names:
        raise unknown("model", model, problem.names, "stand-alone")
    alone = replace(problem, models=(problem.models[problem.names.index(model)],))
    search = _search(alone, latencies, bounds, effort)
    return answer(search, search.look(alone.target), f"stand-alone {model}")


def uniform_parallelism(
    problem: Problem, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> CascadePlan:
    """As Cascadia, but with tensor parallelism within servers and replicas across them, for every model (4.3)."""
    search = uniform_parallelism_search(problem, latencies, bounds, effort)
    return answer(search, search.look(problem.target), "uniform parallelism")


def uniform_parallelism_search(
    problem: Problem, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> Search:
    """Over those sets only."""
    every = all_sets(replace(problem, splits={}))
    sets = [every(i, ()) for i in range(len(problem.models))]
    flat = [_uniform(problem, each) if each.shapes else each for each in sets]
    return _search(problem, latencies, bounds, effort, sets_of=lambda stage, used: flat[stage])


def _uniform(problem: Problem, sets: Sets) -> Sets:
    """Uniform on each type of GPU."""
    if sets.room is None:
        return uniform_sets(sets.shapes, problem.num_gpus, problem.server)
    by_type = []
    for t, offer in enumerate(problem.offers):
        of = [shape for shape, kind in zip(sets.shapes, sets.kinds, strict=True) if kind == t]
        by_type.append(uniform_sets(of, offer.limit or 0, offer.server) if of else Sets((), np.zeros((0, 0), "i8")))
    return unlike(by_type, sets.names, sets.room, problem.max_types)


def uniform_allocation(
    problem: Problem, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> CascadePlan:
    """As Cascadia, but with as many GPUs for every model that is used (4.3)."""
    search = uniform_allocation_search(problem, latencies, bounds, effort)
    return answer(search, search.look(problem.target), "uniform allocation")


def uniform_allocation_search(
    problem: Problem, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> Search:
    """Over those sets only."""
    every = all_sets(replace(problem, splits={}))

    def at_most(stage: int, used: tuple[bool, ...]) -> Sets:
        sets = every(stage, used)
        shares = [equal_shares(offer.limit or 0, used)[stage] for offer in problem.offers]
        return sets.some((sets.vectors <= shares).all(axis=1))

    return _search(problem, latencies, bounds, effort, sets_of=at_most)


def equal_shares(num_gpus: int, used: tuple[bool, ...]) -> tuple[int, ...]:
    """GPUs dealt out in pairs, what is left over to the largest models: 32 for three are 10, 10 and 12, as in 4.3."""
    num = sum(used)
    pairs, odd = divmod(num_gpus, 2)
    each, more = divmod(pairs, num)
    shares, rank = [], 0
    for is_used in used:
        rank += is_used
        shares.append(2 * (each + (rank > num - more)) if is_used else 0)
    last = max(i for i, is_used in enumerate(used) if is_used)
    shares[last] += odd
    return tuple(shares)


def cascade_serve(
    problem: Problem, latencies: Latencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> CascadePlan:
    """By load alone, after CascadeServe as the paper describes it (2, 4.1, 4.2).

    Thresholds are those that reach the quality with the least work. The deployment is tuned for the requests per
    second that each model then gets, but all requests look alike to it: they have the lengths of the average request
    of the average model. Replicas of a model are alike. The latencies reported are those of the real requests.
    """
    _quality_target(problem, "cascade-serve")
    scores = problem.scores
    outputs = np.full_like(scores.output_tokens, max(1, round(float(scores.output_tokens.mean()))))
    prompts = np.full_like(scores.prompt_tokens, max(1, round(float(scores.prompt_tokens.mean()))))
    problem = replace(problem, splits={})
    seen = replace(problem, scores=replace(scores, output_tokens=outputs, prompt_tokens=prompts), max_kinds=1)
    blind = _search(seen, latencies, bounds, effort)
    real = _search(problem, latencies, bounds, effort, blind.known)
    return _deployed_by(blind, real, "cascade-serve")


def route_llm(
    problem: Problem,
    predicted: Scores,
    latencies: Latencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
) -> CascadePlan:
    """A router in front of the models, after RouteLLM (appendix I): each request goes to one model, unjudged.

    That is the smallest model whose predicted score reaches the threshold, else the largest. The threshold reaches the
    quality with the least work, whatever that does to the system; the deployment is tuned by the same search.
    `predicted`: what the router expects of the answers to the problem's requests, row by row.
    """
    _quality_target(problem, "route-llm")
    if len(predicted) != len(problem.scores):
        raise HeadwayError(f"route-llm: {len(predicted)} predictions for {len(problem.scores)} requests")
    routed = replace(problem, judge_s=0.0)
    routings = _pre_routings(routed, predicted.stages(problem.names))
    search = _search(routed, latencies, bounds, effort, routings)
    return structs.replace(_deployed_by(search, search, "route-llm"), pre_routed=True)


def _search(
    problem: Problem,
    latencies: Latencies,
    bounds: Bounds | None,
    effort: Effort | None,
    routings: Routings | None = None,
    sets_of: SetsOf | None = None,
) -> Search:
    bounds = bounds or StepBounds(problem.gpu, problem.engine)
    return Search(problem, latencies, bounds, effort or Effort(), routings, sets_of)


def _quality_target(problem: Problem, planner: str) -> None:
    if not isinstance(problem.target, QualityFloor):
        raise HeadwayError(f"{planner}: does not look at latency, so it needs a quality to reach, not a latency budget")


def _by_quality_and_work(routings: Routings, problem: Problem) -> list[int]:
    """Routings that reach the quality by their work, the least first; then the others, by how near they come."""
    assert isinstance(problem.target, QualityFloor)
    short = np.maximum(problem.target.q_min - 1e-9 - routings.quality, 0.0)
    order: list[int] = np.lexsort((routings.work, short)).tolist()
    return order


def _pre_routings(problem: Problem, predicted: Scores) -> Routings:
    """One threshold for all models; whose score is not predicted is not accepted."""
    last = len(problem.models) - 1
    levels = np.unique(np.concatenate([[0.0, 100.0], predicted.scores[:, :-1].ravel()]))
    levels = levels[~np.isnan(levels)]
    with np.errstate(invalid="ignore"):
        final = np.stack([predicted.final_stage([level] * last) for level in levels.tolist()]).astype("i1")
    _, first = np.unique(final, axis=0, return_index=True)
    final = final[np.sort(first)]
    reached = final[:, None, :] == np.arange(last + 1, dtype="i1")[:, None]
    thresholds = np.repeat(levels[np.sort(first)][:, None], last, axis=1)
    return of_routes(problem.scores, thresholds, reached, final, [weights_bytes(model) for model in problem.models])


def _deployed_by(seen: Search, real: Search, planner: str) -> CascadePlan:
    """The first routing, by quality and work, that can be deployed: as seems best to one search, judged by another.

    Both know the same routings, though the first may see other requests. What sends no less to every stage than a
    routing that cannot be deployed is not tried.
    """
    asked, found = real.latencies.num_asked, real.latencies.num_found
    ratios = real.known.ratios
    hopeless = np.zeros(len(ratios), np.bool_)
    for i in _by_quality_and_work(real.known, real.problem):
        if hopeless[i]:
            continue
        if seen.solve(i).deployment is None:
            hopeless |= (ratios >= ratios[i]).all(axis=1)
            continue
        deployment = seen.spread(i)
        if seen is not real:
            deployment = served_by(real, i, deployment)
        objective = real.objective(real.problem.target)
        counted = (real.latencies.num_asked - asked, real.latencies.num_found - found)
        return made(real, i, deployment, Looked(objective, (), False, *counted), planner)
    raise HeadwayError(f"{planner}: no routing can be deployed on {real.problem.total_gpus} GPUs")
