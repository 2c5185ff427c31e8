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
from headway.planning.cascade.confidence import Confidence, confidence
from headway.planning.cascade.latencies import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT, alternatives
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import QualityFloor, Target
from headway.planning.cascade.regret import Off, Regret, regrets
from headway.planning.cascade.rehearsal import document_of
from headway.planning.cascade.stage_latencies import Known, bounds
from headway.planning.cascade.tighten import Option, nearest, option_of, tighten_until_met

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
