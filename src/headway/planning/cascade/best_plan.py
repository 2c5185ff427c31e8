"""The best plan that keeps its promise when it is rehearsed, beside others that could be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.planning.cascade.cascadia import plans
from headway.planning.cascade.deployment import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT, alternatives
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import Floats, QualityFloor, Target
from headway.planning.cascade.regret import Off, Regret, regrets
from headway.planning.cascade.rehearsal import Option, document_of, nearest, option_of, tighten_until_met
from headway.planning.cascade.stage_simulator import Known, bounds
from headway.workload.quality import Scores
from headway.workload.random_streams import stream

DRAWS = 400
LEVELS = 101
"""Thresholds that are looked at for each stage, evenly from 0 to 100."""
ENDS = (0.025, 0.975)
Interval = tuple[float, float]
"""95%: from, to."""


class Confidence(Struct, frozen=True, forbid_unknown_fields=True):
    """95% intervals over draws of the requests that a plan was made on."""

    quality: Interval
    """At the plan's thresholds."""
    processing_ratios: tuple[Interval, ...]
    """The share of the requests that reaches each stage, at the plan's thresholds."""
    thresholds: tuple[Interval | None, ...]
    """Of each stage but the last: the lowest that reaches the plan's quality, the others as they are; None: in some
    draws none does."""


def confidence(scores: Scores, thresholds: Sequence[float], seed: int = 0) -> Confidence:
    """Of a cascade's thresholds on the requests that they were chosen on."""
    final = scores.final_stage(thresholds)
    num, stages = len(scores), len(scores.models)
    drawn = stream(seed, "draws of requests").integers(0, num, (DRAWS, num))
    given = _given(scores, final)
    quality = np.nanmean(given[drawn], axis=1)
    ratios = [(final >= stage)[drawn].mean(axis=1) for stage in range(stages)]
    wanted = float(np.nanmean(given))
    return Confidence(
        _interval(quality),
        tuple(_interval(each) for each in ratios),
        tuple(_of_threshold(scores, thresholds, stage, drawn, wanted) for stage in range(stages - 1)),
    )


def _of_threshold(
    scores: Scores, thresholds: Sequence[float], stage: int, drawn: np.ndarray, wanted: float
) -> Interval | None:
    """Where the lowest threshold of a stage lies that keeps the quality."""
    levels = np.unique(np.append(np.linspace(0.0, 100.0, LEVELS), thresholds[stage]))
    lowest = np.full(len(drawn), np.nan)
    for level in levels[::-1].tolist():
        own = [*thresholds[:stage], level, *thresholds[stage + 1 :]]
        found = np.nanmean(_given(scores, scores.final_stage(own))[drawn], axis=1)
        lowest = np.where(found >= wanted - 1e-9, level, lowest)
    return None if np.isnan(lowest).any() else _interval(lowest)


def _given(scores: Scores, final: np.ndarray) -> Floats:
    found: Floats = scores.scores[np.arange(len(scores)), final]
    return found


def _interval(values: Floats) -> Interval:
    low, high = np.quantile(values, ENDS).tolist()
    return low, high


Tell = Callable[[int], None]


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan, what else could be done with the GPUs, and quality against latency."""

    target: Target
    chosen: Option
    alternatives: tuple[Option, ...]
    curve: tuple[Option, ...]
    """Plans for qualities from low to high."""
    confidence: Confidence | None
    """How sure the chosen plan's thresholds are; None: it is one model, or routed beforehand."""
    num_simulated: int
    num_found: int
    regrets: tuple[Regret, ...] = ()
    """What plans lose whose judge is off by so much."""


def plan(
    asked: PlanningRequest, folder: Path | None = None, tell: Tell | None = None, compare: bool = True, curve: int = 0,
    errors: Sequence[Off] = (),
) -> Answer:  # fmt: skip
    """The best plan that keeps its promise when it is rehearsed; where none does, the one that comes nearest.

    Where combos are offered, the plan without them is made, too, and taken where it is better. `compare`: plan the
    alternatives; one that turns out better is chosen. `curve`: so many plans from low to high quality. `errors`: of
    judges, for each of which what is lost is told.
    """
    known = Known(asked, folder)
    known.latencies.tell = tell
    try:
        others = _without_combos(asked, known.latencies, compare)
        chosen, more = _best(asked, known.latencies, compare, others)
        others = (*others, *more)
        line = _curve(asked, known.latencies, curve) if curve else ()
        lost = regrets(asked, known.latencies, errors) if errors else ()
    finally:
        known.write()
    sure, latencies = _sure(asked, chosen.plan), known.latencies
    return Answer(asked.problem.target, chosen, others, line, sure, latencies.num_asked, latencies.num_found, lost)


def _sure(asked: PlanningRequest, found: CascadePlan) -> Confidence | None:
    if len(found.stages) < 2 or found.pre_routed:
        return None
    return confidence(asked.problem.scores.stages([stage.model for stage in found.stages]), found.thresholds)


def _best(
    asked: PlanningRequest, latencies: Latencies, compare: bool, beside: tuple[Option, ...] = ()
) -> tuple[Option, tuple[Option, ...]]:
    """The best of the search's plan, the alternatives and what else there is; and the alternatives."""
    found = tighten_until_met(asked, latencies)
    others = _others(asked, latencies) if compare else ()
    return nearest(asked.problem.target, (found, *beside, *others)), others


def _without_combos(asked: PlanningRequest, latencies: Latencies, compare: bool) -> tuple[Option, ...]:
    """The plan that there would be if none were offered: so that those who are, have none that is worse."""
    if not asked.problem.splits:
        return ()
    found, _ = _best(replace(asked, problem=replace(asked.problem, splits={})), latencies, compare)
    return (structs.replace(found, plan=structs.replace(found.plan, planner=f"{found.plan.planner} without combos")),)


def _others(asked: PlanningRequest, latencies: Latencies) -> tuple[Option, ...]:
    """What each of the alternatives comes to, made stricter and rehearsed in the same way."""
    found = list[Option]()
    for make in alternatives(asked.problem):
        with suppress(HeadwayError):  # what cannot be planned so is no alternative
            found.append(tighten_until_met(asked, latencies, make))
    return tuple(found)


def _curve(asked: PlanningRequest, latencies: Latencies, num: int) -> tuple[Option, ...]:
    """Quality against latency, from the first model's quality to nearly the last one's."""
    scores = asked.problem.scores
    ends = [float(np.nanmean(scores.scores[:, i])) for i in (0, -1)]
    targets = [QualityFloor(float(q)) for q in np.linspace(min(ends), max(ends) - 0.5, num)]
    return tuple(option_of(asked, each) for each in plans(asked.problem, targets, latencies, bounds(asked), EFFORT))


def scenario_yaml(answer: Answer, asked: PlanningRequest) -> str:
    """The plan as a scenario file."""
    found, done = answer.chosen.plan, answer.chosen.rehearsed
    head = f"# Planned by headway plan cascade: quality {done.quality or 0:.4g}, p95 latency {done.p95_s or 0:.4g} s\n"
    document = document_of(asked, found)
    if asked.replan is not None and "cascade" in document:
        document["cascade"]["replan"] = asked.replan
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
