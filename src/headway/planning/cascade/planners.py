"""Cascadia's planner and the baselines of its evaluation (4.1, 4.3, appendix I), and planners for rehearsals.

Each baseline uses the same evaluator, bounds and search for the parts that it optimises; the other parts are fixed
here. Among the baselines, only a stand-alone model may have combos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError, unknown
from headway.perf.params import weights_bytes
from headway.planning.cascade.candidates import best_plan_of, candidates, plan_of
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import Bounds
from headway.planning.cascade.problem import CascadePlan, CascadeProblem, Cheapest, QualityFloor
from headway.planning.cascade.replica_sets import NO_SETS, ReplicaSets, StageSets, across_types, all_sets, uniform_sets
from headway.planning.cascade.routing import Routings, of_routes
from headway.planning.cascade.search import Effort, Search, SearchResult
from headway.workload.quality import Scores

EFFORT = Effort(stable_rounds=3, gap=0.05, max_evaluations=10, num_refined=1)
"""Effort of every search for a planner of this module."""
MAX_CANDIDATES = 6
"""Plans of one search that are rehearsed."""
CascadePlanner = Callable[[CascadeProblem, StageLatencies, Bounds], Sequence[CascadePlan]]
"""Returns the plans of one planner for a problem, the best by its own measure first."""


def stand_alone(
    problem: CascadeProblem,
    model: str,
    latencies: StageLatencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
) -> CascadePlan:
    """One model for all requests, its replicas tuned by the same search."""
    if model not in problem.names:
        raise unknown("model", model, problem.names, "stand-alone")
    alone = replace(problem, models=(problem.models[problem.names.index(model)],))
    search = Search(alone, latencies, bounds, effort)
    return best_plan_of(search, search.run(alone.target), f"stand-alone {model}")


def uniform_parallelism(
    problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> Search:
    """Cascadia with tensor parallelism within servers and replicas across them, for every model (4.3)."""
    problem = replace(problem, use_all=False)
    every = all_sets(replace(problem, combo_kinds={}))
    sets = [every(i, ()) for i in range(len(problem.models))]
    uniform = [_uniform(problem, each) if each.shapes else each for each in sets]
    return Search(problem, latencies, bounds, effort, sets_of=lambda stage, used: uniform[stage])


def _uniform(problem: CascadeProblem, sets: ReplicaSets) -> ReplicaSets:
    """Uniform sets on each type of GPU."""
    if sets.budget is None:
        return uniform_sets(sets.shapes, problem.num_gpus, problem.server)
    by_type = []
    for t, offer in enumerate(problem.offers):
        shapes = [shape for shape, its_type in zip(sets.shapes, sets.types, strict=True) if its_type == t]
        by_type.append(uniform_sets(shapes, offer.limit or 0, offer.server) if shapes else NO_SETS)
    return across_types(by_type, sets.type_names, sets.budget, problem.max_types)


def uniform_allocation(
    problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds | None = None, effort: Effort | None = None
) -> Search:
    """Cascadia with the same number of GPUs for every model in use (4.3)."""
    problem = replace(problem, use_all=False)
    return Search(problem, latencies, bounds, effort, sets_of=_within_shares(problem))


def _within_shares(problem: CascadeProblem, uniform: bool = False) -> StageSets:
    """The sets of each stage that fit into its equal share of the GPUs; those of one parallelism if `uniform`."""
    every = all_sets(replace(problem, combo_kinds={}))

    def within_share(stage: int, used: tuple[bool, ...]) -> ReplicaSets:
        sets = every(stage, used)
        shares = [equal_shares(offer.limit or 0, used)[stage] for offer in problem.offers]
        within = sets.select((sets.vectors <= shares).all(axis=1))
        if not uniform:
            return within
        known = set(map(tuple, _uniform(problem, within).counts.tolist()))
        return within.select(np.array([tuple(row) in known for row in within.counts.tolist()], bool))

    return within_share


def equal_shares(num_gpus: int, used: tuple[bool, ...]) -> tuple[int, ...]:
    """GPUs dealt out in pairs, the rest to the largest models: 32 GPUs for three models become 10, 10 and 12, as in
    4.3."""
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
    problem: CascadeProblem,
    latencies: StageLatencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
    equal: bool = False,
    uniform: bool = False,
) -> CascadePlan:
    """CascadeServe as the paper describes it (2, 4.1, 4.2): it plans by load alone.

    The thresholds reach the quality with the least work. The deployment is tuned for each model's requests per second,
    but every request has the lengths of the average request of the average model. The replicas of a model are equal.
    The plan's latencies are computed for the real requests. `equal`: every model in use has the same number of GPUs.
    `uniform`: with `equal`, its replicas have one parallelism, tensor parallelism within servers.
    """
    scores = problem.scores
    outputs = np.full_like(scores.output_tokens, max(1, round(float(scores.output_tokens.mean()))))
    prompts = np.full_like(scores.prompt_tokens, max(1, round(float(scores.prompt_tokens.mean()))))
    problem = replace(problem, combo_kinds={})
    average = replace(problem, scores=replace(scores, output_tokens=outputs, prompt_tokens=prompts), max_kinds=1)
    if equal:
        average = replace(average, use_all=False)
    tuned = Search(average, latencies, bounds, effort, sets_of=_within_shares(average, uniform) if equal else None)
    real = Search(problem, latencies, bounds, effort, tuned.routings)
    return _least_work_plan(tuned, real, "cascade-serve")


def route_llm(
    problem: CascadeProblem,
    predicted: Scores,
    latencies: StageLatencies,
    bounds: Bounds | None = None,
    effort: Effort | None = None,
) -> CascadePlan:
    """A router in front of the models, after RouteLLM (appendix I): each request goes to one model and is not judged.

    The request goes to the smallest model whose predicted score reaches the threshold, or else to the largest model.
    The threshold reaches the quality with the least work, at any latency; the same search tunes the deployment.
    `predicted`: the scores that the router predicts for the problem's requests, row by row.
    """
    if len(predicted) != len(problem.scores):
        raise HeadwayError(f"route-llm: {len(predicted)} predictions for {len(problem.scores)} requests")
    routed = replace(problem, judge_s=0.0)
    search = Search(routed, latencies, bounds, effort, _pre_routings(routed, predicted.stages(problem.names)))
    return structs.replace(_least_work_plan(search, search, "route-llm"), pre_routed=True)


def _pre_routings(problem: CascadeProblem, predicted: Scores) -> Routings:
    """Routings with one threshold for all models. A model without a predicted score is skipped."""
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


def _least_work_plan(tuned: Search, real: Search, planner: str) -> CascadePlan:
    """The first routing, by quality and then work, that can be deployed.

    `tuned` chooses the deployment, and `real` has the requests for the plan's latencies; both have the same routings. A
    routing is skipped if it sends at least as many requests to every stage as one that cannot be deployed.
    """
    evaluated, cached = real.latencies.num_evaluated, real.latencies.num_cached
    routings, target = real.routings, real.problem.target
    if not isinstance(target, QualityFloor):
        raise HeadwayError(f"{planner}: plans without latencies; expected a quality to reach, not a latency budget")
    shortfall = np.maximum(target.q_min - 1e-9 - routings.quality, 0.0)
    unservable = np.zeros(len(routings), np.bool_)
    for i in np.lexsort((routings.work, shortfall)).tolist():
        if unservable[i]:
            continue
        if tuned.solve(i).deployment is None:
            unservable |= (routings.ratios >= routings.ratios[i]).all(axis=1)
            continue
        deployment = tuned.with_spare_gpus(i)
        if tuned is not real:
            deployment = real.redeployed(i, deployment)
        objective = real.objective(target)
        counts = (real.latencies.num_evaluated - evaluated, real.latencies.num_cached - cached)
        return plan_of(real, i, deployment, SearchResult(objective, (), False, *counts), planner)
    raise HeadwayError(f"{planner}: no routing can be deployed on {real.problem.total_gpus} GPUs")


# Planners for rehearsals.


@dataclass
class SearchPlanner:
    """Plans one problem for several targets in turn, with one search that keeps its deployments."""

    new_search: Callable[[CascadeProblem, StageLatencies, Bounds, Effort], Search]
    name: str
    search: Search | None = None

    def __call__(self, problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds) -> Sequence[CascadePlan]:
        """Use all GPUs if the problem requires it and such an allocation exists; otherwise as many as help.

        If no plan meets the latency of a `Cheapest` target, return the fastest plans with its quality.
        """
        target = problem.target
        if isinstance(target, Cheapest):
            problem = replace(problem, use_all=False)
        search = self.search = self.search or self.new_search(problem, latencies, bounds, EFFORT)
        try:
            return candidates(search, search.run(target), self.name, MAX_CANDIDATES)
        except HeadwayError:
            if not search.problem.use_all and not isinstance(target, Cheapest):
                raise
        if isinstance(target, Cheapest):
            target = QualityFloor(target.q_min)
        else:
            search = self.search = self.new_search(replace(problem, use_all=False), latencies, bounds, EFFORT)
        return candidates(search, search.run(target), self.name, MAX_CANDIDATES)


def single(plan: Callable[..., CascadePlan]) -> CascadePlanner:
    """A planner that returns one plan."""
    return lambda problem, latencies, bounds: [plan(problem, latencies=latencies, bounds=bounds, effort=EFFORT)]


def cascade_of(names: Sequence[str]) -> CascadePlanner:
    """Cascadia's planner for some of the models, which may exclude the smallest."""

    def new_search(problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds, effort: Effort) -> Search:
        models = tuple(model for model in problem.models if model.name in names)
        return Search(replace(problem, models=models), latencies, bounds, effort)

    return SearchPlanner(new_search, f"cascade of {', '.join(names)}")


def model_subsets(problem: CascadeProblem) -> Iterator[tuple[str, ...]]:
    """Shorter cascades that keep the largest models; the routings of the whole cascade cover the others."""
    names = problem.names
    for num in range(2, len(names)):
        for subset in combinations(names, num):
            if subset != names[:num]:
                yield subset


def alternatives(problem: CascadeProblem) -> list[CascadePlanner]:
    """Each model alone, shorter cascades, and the cascade with one part of its planning left out.

    The last group has no combos, so it is omitted if the problem offers combos.
    """
    planners: list[CascadePlanner] = [single(partial(stand_alone, model=name)) for name in problem.names]
    planners += [cascade_of(names) for names in model_subsets(problem)]
    if problem.combo_kinds:
        return planners
    planners.append(SearchPlanner(uniform_parallelism, "uniform parallelism"))
    planners.append(SearchPlanner(uniform_allocation, "uniform allocation"))
    return [*planners, single(cascade_serve)] if isinstance(problem.target, QualityFloor) else planners
