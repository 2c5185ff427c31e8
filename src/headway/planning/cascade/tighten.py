"""Plans that keep their promise when they are rehearsed: asked for more, or less, until they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, sqrt

from msgspec import Struct, structs

from headway.planning.cascade.cascadia import with_held_out
from headway.planning.cascade.latencies import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import Make, cascadia
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import Cheapest, LatencyBudget, QualityFloor, Target
from headway.planning.cascade.rehearsal import Rehearsed, rehearse
from headway.planning.cascade.stage_latencies import bounds

ROUNDS = 6
"""How often the target is made stricter at most, until a plan keeps the promise."""
LEADING = 2
"""So many of the plans of a search must keep the promise before it is enough: the one with the least maximum, and the
one with the least work. By chance, one may have a better sample of the requests than the other."""
MARGIN = 0.05
"""Points of quality beyond a shortfall that the next plan is asked for; shares of a time that are near enough."""
GROWTH = 1.5
"""By which the time for each stage grows, until a plan is not in time."""
HALVINGS = 8
CLOSE = 0.25
"""Points of quality between what is in time and what is not: near enough."""


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, and its rehearsal."""

    plan: CascadePlan
    rehearsed: Rehearsed
    kept: bool
    """Whether the rehearsal is what was asked for."""


def tighten_until_met(asked: PlanningRequest, latencies: Latencies, make: Make | None = None) -> Option:
    """The best plan that a rehearsal says is what was asked for; else the one that comes nearest."""
    return nearest(asked.problem.target, tried(Trials(asked, latencies, make or cascadia())))


def tried(trials: Trials) -> list[Option]:
    """All that were rehearsed on the way to the best plan."""
    target = trials.asked.problem.target
    if isinstance(target, LatencyBudget):
        _within(trials, target)
    elif isinstance(target, Cheapest):
        _cheapest(trials, target)
    else:
        _good_enough(trials, target)
    return trials.tried


Rehearse = Callable[[PlanningRequest, CascadePlan], Rehearsed]


class Trials:
    """The plans that one planner made, for one target after the other, each rehearsed once."""

    def __init__(
        self, asked: PlanningRequest, latencies: Latencies, make: Make, rehearsal: Rehearse = rehearse
    ) -> None:
        self.asked, self.latencies, self.make, self.rehearsal = asked, latencies, make, rehearsal
        self.tried: list[Option] = []
        self._rehearsed: dict[object, Rehearsed] = {}

    def of(self, target: Target) -> list[Option]:
        """The candidates for a target."""
        found = self.make(self.asked.problem.asking(target), self.latencies, bounds(self.asked))
        options = [self._option(with_held_out(each, self.asked.held_out)) for each in found]
        self.tried += options
        return options

    def _option(self, plan: CascadePlan) -> Option:
        key = (plan.pre_routed, plan.thresholds, tuple((stage.model, stage.replicas) for stage in plan.stages))
        if key not in self._rehearsed:
            self._rehearsed[key] = self.rehearsal(self.asked, plan)
        return option_of(self.asked, plan, self._rehearsed[key])


def option_of(asked: PlanningRequest, plan: CascadePlan, rehearsed: Rehearsed | None = None) -> Option:
    """A plan, rehearsed."""
    done = rehearsed or rehearse(asked, plan)
    return Option(plan, done, done.keeps(asked.problem.target))


def _within(trials: Trials, wanted: LatencyBudget) -> None:
    """The most quality in a time: along the plans for qualities, of which each more takes longer.

    A search within a time holds the largest p95 of a stage to it, where requests that are sent on go through several
    stages, and few may be sent on. So its plans are only the first that are tried. Then the planner is asked for
    qualities, half-way each time between what is known to be in time and what is not.
    """
    first = trials.of(wanted)[0].plan
    if first.status == "infeasible" or len(first.stages) == 1:
        return
    low, high = sorted((first.nadir_quality, first.utopia_quality))
    for _ in range(HALVINGS):
        low = max([low, *(each.plan.quality for each in trials.tried if each.kept)])
        if high - low < CLOSE:
            return
        middle = (low + high) / 2
        if any(each.kept for each in trials.of(QualityFloor(middle))):
            low = middle
        else:
            high = middle


def _cheapest(trials: Trials, wanted: Cheapest) -> None:
    """The least cost: from the fastest plan that is good enough, ever more time for each stage, and so fewer GPUs.

    The times at the stages of a request that is sent on add up, so that a plan whose stages are each in time need not
    be; nor need a stage be that few requests see. How much each may take is looked for, half-way each time between what
    was in time and what was not.
    """
    fastest, q_min = _good_enough(trials, QualityFloor(wanted.q_min))
    low, high, within_s = fastest.latency_s, inf, wanted.latency_s
    for _ in range(ROUNDS):
        options = trials.of(structs.replace(wanted, q_min=q_min, latency_s=within_s))
        if options[0].kept:
            low = within_s
        else:
            high = within_s
        if len(fastest.stages) == 1 or low * (1 + MARGIN) >= high:
            return
        within_s = low * GROWTH if high == inf else sqrt(low * high)


def _good_enough(trials: Trials, wanted: QualityFloor) -> tuple[CascadePlan, float]:
    """Plan, rehearse the few best, and ask for more by as much as the leading ones are short of.

    The plan and the quality that was asked for last.
    """
    target = wanted
    for _ in range(ROUNDS):
        options = trials.of(target)
        short = [each.rehearsed for each in options[:LEADING] if not each.rehearsed.keeps(wanted)]
        if options[0].plan.status == "infeasible" or (short and len(options[0].plan.stages) == 1) or not short:
            break
        target = _stricter(target, wanted, min(short, key=lambda each: each.quality or 0.0))
    return options[0].plan, target.q_min


def _stricter(target: QualityFloor, wanted: QualityFloor, found: Rehearsed) -> QualityFloor:
    short = wanted.q_min - (wanted.q_min if found.quality is None else found.quality)
    return structs.replace(target, q_min=min(100.0, target.q_min + max(short, 0.0) + MARGIN))


def nearest(target: Target, options: Sequence[Option]) -> Option:
    """The best that keeps the promise; where none does, the one that is least short of it."""
    return min(options, key=lambda each: missing(target, each))


def missing(target: Target, option: Option) -> tuple[bool, float, float]:
    """For an order: first whether the promise is kept, then how good the plan is, or by how much it is short."""
    found = option.rehearsed
    p95_s, quality = found.p95_s or inf, found.quality or 0.0
    if isinstance(target, LatencyBudget):
        return (False, -quality, p95_s) if option.kept else (True, p95_s, -quality)
    if isinstance(target, Cheapest):
        if option.kept:
            return False, found.usd_per_request or inf, p95_s
        return True, max(0.0, target.q_min - quality), p95_s
    return (False, p95_s, -quality) if option.kept else (True, -quality, p95_s)
