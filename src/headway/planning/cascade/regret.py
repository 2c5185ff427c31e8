"""The loss of a plan under a wrong judge, in quality and in seconds.

Three planners, each of which searches, rehearses and tightens until it believes that the quality is reached:

- *by judge* takes the judge's scores for the truth, both for the thresholds and in its rehearsals;
- *by truth* plans with true scores, for a judge without error;
- *informed* decides by the judge's scores and knows the true ones: the best plan with that judge.

All of their plans are then run with the judge as it is, and their quality is measured by true scores. The judge's score
of an answer is drawn once, whatever plan runs (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
from msgspec import Struct, field

from headway.core.errors import HeadwayError
from headway.perf.params import weights_bytes
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.planners import SearchPlanner
from headway.planning.cascade.problem import CascadePlan, JudgeError, QualityFloor
from headway.planning.cascade.rehearsal import (
    RehearsalResult,
    Trials,
    best_or_nearest,
    rehearse,
    rehearse_by_judge,
)
from headway.planning.cascade.request import PlanningRequest
from headway.planning.cascade.routing import Routings, cascades, of_routes
from headway.planning.cascade.search import Search
from headway.workload.quality import Scores
from headway.workload.random_streams import stream


class JudgedPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan run with the real judge, with its quality by true scores."""

    plan: CascadePlan
    rehearsed: RehearsalResult
    short_points: float
    """The shortfall in quality from the target, or from the best run plan if no plan reaches the target."""
    slower_s: float
    """The p95 minus the p95 of the fastest plan with at least the same quality, up to the target."""


class Regret(Struct, frozen=True, forbid_unknown_fields=True):
    """The three planners' plans with one judge."""

    judge_error: JudgeError = field(name="off")
    by_judge: JudgedPlan
    by_truth: JudgedPlan
    informed: JudgedPlan = field(name="knowing")


def regrets(request: PlanningRequest, latencies: StageLatencies, errors: Sequence[JudgeError]) -> tuple[Regret, ...]:
    """The regret for each judge. Raises HeadwayError unless the target is a quality."""
    target, without_error = request.problem.target, _with_judge(request, JudgeError(0.0, 0.0))
    if not isinstance(target, QualityFloor):
        raise HeadwayError("regret: expected a quality to reach, and no latency")
    by_truth = best_or_nearest(target, Trials(without_error, latencies).run())
    return tuple(_regret(request, latencies, error, by_truth.plan, target) for error in errors)


def _regret(
    request: PlanningRequest,
    latencies: StageLatencies,
    error: JudgeError,
    by_truth: CascadePlan,
    target: QualityFloor,
) -> Regret:
    real, truth = _with_judge(request, error), request.problem.scores
    judged = judged_scores(truth, error, request.seed)
    misled = replace(real, problem=replace(real.problem, scores=judged))
    by_judge = best_or_nearest(target, Trials(misled, latencies, rehearsal=rehearse_by_judge).run()).plan
    new_search = partial(Search, routings=informed_routings(truth, judged, request))
    informed = Trials(real, latencies, SearchPlanner(new_search, "cascadia")).run()
    runs = [(plan, rehearse(real, plan)) for plan in (by_judge, by_truth)]
    best = best_or_nearest(target, informed)
    runs.append((best.plan, best.rehearsed))
    every = [result for _, result in runs] + [each.rehearsed for each in informed]
    return Regret(error, *(_judged_plan(plan, result, every, target.q_min) for plan, result in runs))


def _judged_plan(
    plan: CascadePlan, result: RehearsalResult, every: Sequence[RehearsalResult], q_min: float
) -> JudgedPlan:
    own = min(result.quality or 0.0, q_min)
    reached = max(min(each.quality or 0.0, q_min) for each in every)
    fastest_s = min(each.p95_s or inf for each in every if (each.quality or 0.0) >= own)
    return JudgedPlan(plan, result, reached - own, (result.p95_s or inf) - fastest_s)


def _with_judge(request: PlanningRequest, error: JudgeError) -> PlanningRequest:
    judge = {"judge_bias": error.bias, "judge_noise": error.noise}
    cascade = {**request.document.get("cascade", {}), **judge}
    return replace(request, document={**request.document, "cascade": cascade})


def judged_scores(scores: Scores, error: JudgeError, seed: int) -> Scores:
    """The scores that the judge gives. The same random numbers are used for every judge, and are multiplied by its
    noise."""
    noise = stream(seed, "judge").normal(0.0, 1.0, scores.scores.shape)
    return replace(scores, scores=np.clip(scores.scores + error.bias + error.noise * noise, 0, 100))


def informed_routings(truth: Scores, judged: Scores, request: PlanningRequest) -> Routings:
    """The routings whose thresholds apply to the judge's scores, with their quality by true scores."""
    weights = [weights_bytes(model) for model in request.problem.models]
    routings = cascades(judged, weights)
    final = np.stack([judged.final_stage(levels) for levels in routings.thresholds.tolist()]).astype("i1")
    return of_routes(truth, routings.thresholds, routings.reached, final, weights)
