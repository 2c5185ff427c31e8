"""The best plan whose rehearsal meets the target, its alternatives, and the confidence in its thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from msgspec import Struct, field, structs

from headway.catalog.coefficients import PoolCalibration
from headway.config import strict_yaml
from headway.config.scenario import StepTimes, assemble, with_absolute_paths
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.metrics.seeds import Estimate, estimate_of
from headway.planning.cascade.candidates import plans
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, cached_latencies
from headway.planning.cascade.planners import EFFORT, alternatives
from headway.planning.cascade.problem import CascadePlan, Floats, QualityFloor, Target
from headway.planning.cascade.regret import Regret, regrets
from headway.planning.cascade.rehearsal import (
    RehearsedPlan,
    best_or_nearest,
    planned_document,
    rehearse,
    tighten_until_met,
)
from headway.planning.cascade.request import PlanningRequest
from headway.planning.rehearsals import Resources
from headway.workload.quality import Scores
from headway.workload.random_streams import stream

DRAWS = 400
LEVELS = 101
"""Number of thresholds tried for each stage, evenly from 0 to 100."""
QUANTILES = (0.025, 0.975)
Interval = tuple[float, float]
"""A 95% interval: from, to."""


class PlanConfidence(Struct, frozen=True, forbid_unknown_fields=True):
    """95% intervals over bootstrap draws of the requests on which a plan was made."""

    quality: Interval
    """Quality at the plan's thresholds."""
    processing_ratios: tuple[Interval, ...]
    """Share of the requests that reach each stage, at the plan's thresholds."""
    thresholds: tuple[Interval | None, ...]
    """Holds, for each stage except the last, the lowest threshold that reaches the plan's quality, with the other
    thresholds as planned; None if some draws have none."""


class FreshDraws(Struct, frozen=True, forbid_unknown_fields=True):
    """Rehearsals of a plan on unseen requests: the scenario's requests with other seeds."""

    seeds: tuple[int, ...]
    p95_s: Estimate | None
    """The mean over the draws, with its 95% interval; None if no request of some draw finished."""
    quality: Estimate | None
    num_met: int
    """Number of draws on which the target is met."""


class CascadeAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan, alternative uses of the GPUs, and quality against latency."""

    target: Target
    chosen: RehearsedPlan
    alternatives: tuple[RehearsedPlan, ...]
    curve: tuple[RehearsedPlan, ...]
    """Plans for qualities from low to high."""
    confidence: PlanConfidence | None
    """Confidence in the chosen plan's thresholds; None for one model or a pre-routed plan."""
    fresh: FreshDraws | None
    """Results on fresh draws; None if fewer than two draws were requested."""
    num_simulated: int
    num_cached: int = field(name="num_found")
    regrets: tuple[Regret, ...] = ()
    """Losses of plans under each judge error."""
    pools: tuple[PoolCalibration, ...] = ()
    """Holds, for each pool of the plan, whether its step times were measured on its GPU and engine."""


def plan(request: PlanningRequest, resources: Resources) -> CascadeAnswer:
    """The best plan whose rehearsal meets the target; where none does, the one that comes nearest.

    If the problem offers combos, a plan without combos is made too, and the better plan is chosen. The best of many
    plans is the best partly by chance, so its p95 is lower on the planned requests than on others.
    """
    options, progress = request.options, resources.progress
    compare = options.alternatives
    with cached_latencies(request, resources.cache_dir) as latencies:
        latencies.progress = progress and (lambda num: progress(num, num))
        without_combos: tuple[RehearsedPlan, ...] = ()
        if request.problem.combo_kinds:
            pools_alone = replace(request, problem=replace(request.problem, combo_kinds={}))
            best, _ = _best(pools_alone, latencies, compare)
            name = f"{best.plan.planner} without combos"
            without_combos = (structs.replace(best, plan=structs.replace(best.plan, planner=name)),)
        chosen, alternative = _best(request, latencies, compare, without_combos)
        pareto = _curve(request, latencies, options.curve) if options.curve else ()
        regret = regrets(request, latencies, options.errors) if options.errors else ()
    certainty: PlanConfidence | None = None
    if len(chosen.plan.stages) > 1 and not chosen.plan.pre_routed:
        models = [stage.model for stage in chosen.plan.stages]
        certainty = confidence(request.problem.scores.stages(models), chosen.plan.thresholds)
    return CascadeAnswer(
        request.problem.target,
        chosen,
        (*without_combos, *alternative),
        curve=pareto,
        confidence=certainty,
        fresh=fresh(request, chosen.plan, options.fresh_draws),
        num_simulated=latencies.num_evaluated,
        num_cached=latencies.num_cached,
        regrets=regret,
        pools=_pools(request, chosen),
    )


def fresh(request: PlanningRequest, plan: CascadePlan, num: int) -> FreshDraws | None:
    """Rehearsals of the plan with the `num` seeds that follow the scenario's; None for fewer than two."""
    if num < 2:
        return None
    seeds = tuple(range(request.seed + 1, request.seed + 1 + num))
    found = [rehearse(request, plan, seed) for seed in seeds]
    met = sum(each.meets(request.problem.target) for each in found)
    return FreshDraws(
        seeds, _estimate([each.p95_s for each in found]), _estimate([each.quality for each in found]), met
    )


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [each for each in values if each is not None]
    return estimate_of(known) if len(known) == len(values) else None


def _pools(request: PlanningRequest, chosen: RehearsedPlan) -> tuple[PoolCalibration, ...]:
    document = planned_document(request, chosen.plan)
    return StepTimes(assemble(document, Places(), request.base_dir)).pools


def scenario_yaml(answer: CascadeAnswer, request: PlanningRequest) -> str:
    """The plan as a scenario file."""
    result = answer.chosen.rehearsed
    quality, p95_s = result.quality or 0, result.p95_s or 0
    head = f"# Planned by headway plan cascade: quality {quality:.4g}, p95 latency {p95_s:.4g} s\n"
    document = planned_document(request, answer.chosen.plan)
    if request.replan is not None and "cascade" in document:
        document["cascade"]["replan"] = request.replan
    document = with_absolute_paths(document, request.base_dir)
    return head + strict_yaml.dump(document)


def _best(
    request: PlanningRequest, latencies: StageLatencies, compare: bool, rivals: tuple[RehearsedPlan, ...] = ()
) -> tuple[RehearsedPlan, list[RehearsedPlan]]:
    """The best of the search's plan, the alternatives and rival plans; and the alternatives."""
    bounds = bounds_of(request)
    searched, rehearsed = tighten_until_met(request, latencies, bounds=bounds), list[RehearsedPlan]()
    for planner in alternatives(request.problem) if compare else ():
        with suppress(HeadwayError):  # a planner without a plan gives no alternative
            rehearsed.append(tighten_until_met(request, latencies, planner, bounds))
    return best_or_nearest(request.problem.target, (searched, *rivals, *rehearsed)), rehearsed


def _curve(request: PlanningRequest, latencies: StageLatencies, num: int) -> tuple[RehearsedPlan, ...]:
    """Quality against latency, from the first model's quality to nearly the last one's."""
    scores = request.problem.scores
    ends = [float(np.nanmean(scores.scores[:, i])) for i in (0, -1)]
    targets = [QualityFloor(float(q)) for q in np.linspace(min(ends), max(ends) - 0.5, num)]
    rehearsed = []
    for each in plans(request.problem, targets, latencies, bounds_of(request), EFFORT):
        result = rehearse(request, each)
        rehearsed.append(RehearsedPlan(each, result, result.meets(request.problem.target)))
    return tuple(rehearsed)


def confidence(scores: Scores, thresholds: Sequence[float]) -> PlanConfidence:
    """The confidence in a cascade's thresholds, from the requests on which they were chosen."""
    final = scores.final_stage(thresholds)
    num, stages = len(scores), len(scores.models)
    drawn = stream(0, "draws of requests").integers(0, num, (DRAWS, num))
    given = _given_scores(scores, final)
    ratios = [(final >= stage)[drawn].mean(axis=1) for stage in range(stages)]
    reached = float(np.nanmean(given))
    return PlanConfidence(
        _interval(np.nanmean(given[drawn], axis=1)),
        tuple(_interval(each) for each in ratios),
        tuple(_threshold_interval(scores, thresholds, stage, drawn, reached) for stage in range(stages - 1)),
    )


def _threshold_interval(
    scores: Scores, thresholds: Sequence[float], stage: int, drawn: np.ndarray, quality: float
) -> Interval | None:
    """The interval of a stage's lowest threshold that reaches a quality."""
    levels = np.unique(np.append(np.linspace(0.0, 100.0, LEVELS), thresholds[stage]))
    lowest = np.full(len(drawn), np.nan)
    for level in levels[::-1].tolist():
        own = [*thresholds[:stage], level, *thresholds[stage + 1 :]]
        reached = np.nanmean(_given_scores(scores, scores.final_stage(own))[drawn], axis=1)
        lowest = np.where(reached >= quality - 1e-9, level, lowest)
    return None if np.isnan(lowest).any() else _interval(lowest)


def _given_scores(scores: Scores, final: np.ndarray) -> Floats:
    """The scores of the delivered answers."""
    return np.asarray(scores.scores[np.arange(len(scores)), final])


def _interval(values: Floats) -> Interval:
    low, high = np.quantile(values, QUANTILES).tolist()
    return low, high
