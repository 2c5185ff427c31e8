"""What a plan loses whose judge is wrong: in quality, and in seconds.

Three planners, each of which searches, rehearses and asks for more until it believes that the quality is reached:

- *by judge* takes the judge's scores for the truth, when it sets thresholds and when it looks at answers;
- *by truth* plans with true scores, for a judge without error;
- *knowing* decides by what the judge says, and knows how good the answers are: the best to be had with that judge.

All of their plans are then run with the judge as it is, and their quality told by true scores. What the judge says of
an answer is drawn once, whatever plan is run (common random numbers).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.perf.params import weights_bytes
from headway.planning.cascade.deployment import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT, Make, Searched
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import QualityFloor
from headway.planning.cascade.rehearsal import Option, Rehearsed, Trials, believed, nearest, rehearse, tried
from headway.planning.cascade.routing import Routings, cascades, of_routes
from headway.planning.cascade.search import Search
from headway.workload.quality import Scores
from headway.workload.random_streams import stream


class Off(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a judge is off, in points: on average, and the standard deviation about that."""

    bias: float
    noise: float

    def __post_init__(self) -> None:
        if not -100 <= self.bias <= 100 or not 0 <= self.noise <= 100:
            raise ValueError(f"bias {self.bias:g}, noise {self.noise:g}; expected -100 to 100, and 0 to 100")


class Outcome(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, run with the judge as it is, its quality by true scores."""

    plan: CascadePlan
    rehearsed: Rehearsed
    short_points: float
    """Of quality that it lacks: up to what was asked for, as far as any plan that was run reaches it."""
    slower_s: float
    """In p95, than the fastest plan that was run with as much quality, up to what was asked for."""


class Regret(Struct, frozen=True, forbid_unknown_fields=True):
    """The three planners' plans with one judge."""

    off: Off
    by_judge: Outcome
    by_truth: Outcome
    knowing: Outcome


def regrets(asked: PlanningRequest, latencies: Latencies, errors: Sequence[Off]) -> tuple[Regret, ...]:
    """For each judge. HeadwayError unless a quality was asked for."""
    if not isinstance(asked.problem.target, QualityFloor):
        raise HeadwayError("regret: expected a quality to reach, and no latency")
    by_truth = _best(tried(Trials(_judged_by(asked, Off(0.0, 0.0)), latencies, _searched())), asked.problem.target)
    return tuple(_regret(asked, latencies, off, by_truth.plan) for off in errors)


def _regret(asked: PlanningRequest, latencies: Latencies, off: Off, by_truth: CascadePlan) -> Regret:
    target, real = asked.problem.target, _judged_by(asked, off)
    assert isinstance(target, QualityFloor)
    truth = asked.problem.scores
    judged = erring(truth, off, asked.seed)
    misled = replace(real, problem=replace(real.problem, scores=judged))
    by_judge = _best(tried(Trials(misled, latencies, _searched(), believed)), target).plan
    known = tried(Trials(real, latencies, _searched(_knowing(truth, judged, asked))))
    runs = [(each, rehearse(real, each)) for each in (by_judge, by_truth)]
    runs.append((_best(known, target).plan, _best(known, target).rehearsed))
    every = [done for _, done in runs] + [each.rehearsed for each in known]
    return Regret(off, *(_outcome(plan, done, every, target.q_min) for plan, done in runs))


def _best(options: list[Option], target: QualityFloor) -> Option:
    return nearest(target, options)


def _outcome(plan: CascadePlan, done: Rehearsed, every: Sequence[Rehearsed], q_min: float) -> Outcome:
    own = min(done.quality or 0.0, q_min)
    reached = max(min(each.quality or 0.0, q_min) for each in every)
    fastest_s = min(each.p95_s or inf for each in every if (each.quality or 0.0) >= own)
    return Outcome(plan, done, reached - own, (done.p95_s or inf) - fastest_s)


def _judged_by(asked: PlanningRequest, off: Off) -> PlanningRequest:
    """The scenario with this judge."""
    document: dict[str, Any] = copy.deepcopy(asked.document)
    document["cascade"] = {**document.get("cascade", {}), "judge_bias": off.bias, "judge_noise": off.noise}
    return replace(asked, document=document)


def erring(scores: Scores, off: Off, seed: int) -> Scores:
    """The table as the judge has it. The same draw for every judge: a larger spread is the same one, larger."""
    noise = stream(seed, "judge").normal(0.0, 1.0, scores.scores.shape)
    return replace(scores, scores=np.clip(scores.scores + off.bias + off.noise * noise, 0, 100))


def _knowing(truth: Scores, judged: Scores, asked: PlanningRequest) -> Routings:
    """Routings by what the judge says, with the quality that they have."""
    weights = [weights_bytes(model) for model in asked.problem.models]
    seen = cascades(judged, weights)
    final = np.stack([judged.final_stage(levels) for levels in seen.thresholds.tolist()]).astype("i1")
    return of_routes(truth, seen.thresholds, seen.reached, final, weights)


def _searched(routings: Routings | None = None) -> Make:
    return Searched(lambda problem, latencies, bounds: Search(problem, latencies, bounds, EFFORT, routings), "cascadia")
