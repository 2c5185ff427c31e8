"""The best plan that keeps its promise when it is rehearsed, beside others that could be had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf, sqrt
from pathlib import Path

import numpy as np
import yaml
from msgspec import Struct, structs

from headway.cascadeplan.asked import Asked
from headway.cascadeplan.rehearsed import Rehearsed, document_of, rehearse
from headway.cascadeplan.stages import Known, bounds
from headway.core.errors import HeadwayError
from headway.planner.cascade.cascadia import plans, with_held_out
from headway.planner.cascade.confidence import Confidence, confidence
from headway.planner.cascade.latencies import Latencies
from headway.planner.cascade.plan import CascadePlan
from headway.planner.cascade.problem import LatencyBudget, QualityFloor, Target
from headway.planner.cascade.search import EFFORT, Make, alternatives, cascadia

Tell = Callable[[int], None]
ROUNDS = 6
"""How often the target is made stricter at most, until a plan keeps the promise."""
LEADING = 2
"""So many of the plans of a search must keep the promise before it is enough: the one with the least maximum, and the
one with the least work. By chance, one may have a better sample of the requests than the other."""
MARGIN = 0.05
"""Points of quality beyond a shortfall, and the share of the time beyond an excess, that the next plan is asked for."""


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, and its rehearsal."""

    plan: CascadePlan
    rehearsed: Rehearsed
    kept: bool
    """Whether the rehearsal is what was asked for."""


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


def plan(
    asked: Asked, folder: Path | None = None, tell: Tell | None = None, compare: bool = True, curve: int = 0
) -> Answer:
    """The best plan that keeps its promise when it is rehearsed; where none does, the one that comes nearest.

    `compare`: plan the alternatives, too; one that turns out better is chosen. `curve`: so many plans from low to
    high quality.
    """
    known = Known(asked, folder)
    known.latencies.tell = tell
    try:
        chosen = kept(asked, known.latencies)
        others = _others(asked, known.latencies) if compare else ()
        chosen = min((chosen, *others), key=lambda each: _missing(asked.problem.target, each))
        line = _curve(asked, known.latencies, curve) if curve else ()
    finally:
        known.write()
    sure, latencies = _sure(asked, chosen.plan), known.latencies
    return Answer(asked.problem.target, chosen, others, line, sure, latencies.num_asked, latencies.num_found)


def _sure(asked: Asked, found: CascadePlan) -> Confidence | None:
    if len(found.stages) < 2 or found.pre_routed:
        return None
    return confidence(asked.problem.scores.stages([stage.model for stage in found.stages]), found.thresholds)


def kept(asked: Asked, latencies: Latencies, make: Make | None = None) -> Option:
    """Plan, rehearse the few best, and ask for more by as much as the leading ones are short of.

    A latency budget that was made too strict on the way is loosened again, halfway to the last that was not kept.
    """
    wanted = target = asked.problem.target
    tried, make = list[Option](), make or cascadia()
    held: Target | None = None
    missed: Target | None = None
    for _ in range(ROUNDS):
        found = make(asked.problem.asking(target), latencies, bounds(asked))
        options = [_option(asked, with_held_out(each, asked.held_out)) for each in found]
        tried += options
        short = [each for each in options[:LEADING] if not each.kept]
        if options[0].plan.status == "infeasible" or (short and len(options[0].plan.stages) == 1):
            break
        if short:
            missed = target
            furthest = max(short, key=lambda each: _missing(wanted, each))
            following = _stricter(target, wanted, furthest.rehearsed)
        else:
            held = following = target
        if isinstance(held, LatencyBudget) and isinstance(missed, LatencyBudget):
            following = _between(held, missed)
        if following == target:
            break
        target = following
    return _nearest(asked, tried)


def _between(held: LatencyBudget, missed: LatencyBudget) -> LatencyBudget:
    """Halfway; the one that was kept where they are close."""
    close = missed.latency_s < (1 + 2 * MARGIN) * held.latency_s
    return held if close else structs.replace(held, latency_s=sqrt(held.latency_s * missed.latency_s))


def _nearest(asked: Asked, options: list[Option]) -> Option:
    return min(options, key=lambda each: _missing(asked.problem.target, each))


def _stricter(target: Target, wanted: Target, found: Rehearsed) -> Target:
    if isinstance(target, LatencyBudget):
        assert isinstance(wanted, LatencyBudget)
        return structs.replace(target, latency_s=target.latency_s * wanted.latency_s / (found.p95_s or inf) * 0.95)
    assert isinstance(wanted, QualityFloor)
    short = wanted.q_min - (wanted.q_min if found.quality is None else found.quality)
    return structs.replace(target, q_min=min(100.0, target.q_min + max(short, 0.0) + MARGIN))


def _missing(target: Target, option: Option) -> tuple[bool, float]:
    found = option.rehearsed
    if isinstance(target, LatencyBudget):
        return (not option.kept, -(found.quality or 0.0) if option.kept else found.p95_s or inf)
    return (not option.kept, (found.p95_s or inf) if option.kept else -(found.quality or 0.0))


def _option(asked: Asked, found: CascadePlan) -> Option:
    rehearsed = rehearse(asked, found)
    return Option(found, rehearsed, rehearsed.keeps(asked.problem.target))


def _others(asked: Asked, latencies: Latencies) -> tuple[Option, ...]:
    """What each of the alternatives comes to, made stricter and rehearsed in the same way."""
    found = list[Option]()
    for make in alternatives(asked.problem):
        with suppress(HeadwayError):  # what cannot be planned so is no alternative
            found.append(kept(asked, latencies, make))
    return tuple(found)


def _curve(asked: Asked, latencies: Latencies, num: int) -> tuple[Option, ...]:
    """Quality against latency, from the first model's quality to nearly the last one's."""
    scores = asked.problem.scores
    ends = [float(np.nanmean(scores.scores[:, i])) for i in (0, -1)]
    targets = [QualityFloor(float(q)) for q in np.linspace(min(ends), max(ends) - 0.5, num)]
    return tuple(_option(asked, each) for each in plans(asked.problem, targets, latencies, bounds(asked), EFFORT))


def scenario_yaml(answer: Answer, asked: Asked) -> str:
    """The plan as a scenario file."""
    found, done = answer.chosen.plan, answer.chosen.rehearsed
    head = f"# Planned by headway plan cascade: quality {done.quality or 0:.4g}, p95 latency {done.p95_s or 0:.4g} s\n"
    document = document_of(asked, found)
    if asked.replan is not None and "cascade" in document:
        document["cascade"]["replan"] = asked.replan
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
