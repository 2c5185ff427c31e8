"""A plan as a scenario, and what that comes to when it is simulated as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, structs

from headway.config import scenario
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.core.fleet import Handover
from headway.core.record import Outcome, Records
from headway.metrics.cascade import answer_metrics
from headway.metrics.latency import distribution, sample
from headway.metrics.usage import usage
from headway.planning.cascade.cascadia import with_held_out
from headway.planning.cascade.deployment import Latencies
from headway.planning.cascade.plan import CascadePlan, StagePlan
from headway.planning.cascade.planners import Make, cascadia
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import Cheapest, LatencyBudget, QualityFloor, Replicas, Target, of_type
from headway.planning.cascade.stage_simulator import bounds
from headway.workload.quality_judges import noisy_score
from headway.workload.quality_source import QualitySpec, restricted_to
from headway.workload.table import QUALITY

AS_IT_WAS = ("gpu", "engine", "usd_per_gpu_hour", "coefficients", "start_s")
"""What a model's new pools have from the one that they are made after."""


class Rehearsed(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan came to, simulated as a whole: the scenario's own requests, from stage to stage."""

    quality: float | None
    p95_s: float | None
    """Of finished requests, over all their stages and judges."""
    mean_s: float | None
    num_requests: int
    num_completed: int
    usd_per_request: float | None
    """Of the GPUs for as long as they are there, and of the judge."""

    def keeps(self, target: Target) -> bool:
        """Whether it is what was asked for, for all requests."""
        if self.num_completed < self.num_requests or self.quality is None or self.p95_s is None:
            return False
        if isinstance(target, LatencyBudget):
            return self.p95_s <= target.latency_s
        if isinstance(target, Cheapest) and self.p95_s > target.latency_s:
            return False
        return self.quality >= target.q_min


def rehearse(asked: PlanningRequest, found: CascadePlan, seed: int | None = None) -> Rehearsed:
    """Simulate a plan as `headway simulate` would the scenario that is written of it."""
    return measured(*_simulated(asked, found, seed))


def believed(asked: PlanningRequest, found: CascadePlan) -> Rehearsed:
    """The same with the quality that the scenario's judge sees in the answers that were given."""
    chosen, records = _simulated(asked, found, None)
    done = measured(chosen, records)
    models = [pool.model.name for pool in chosen.fleet.all_pools]
    cascade, requests = chosen.spec.cascade, records.requests
    stages = list(cascade.models) if cascade is not None else models[:1]
    bias, noise = (0.0, 0.0) if cascade is None else (cascade.judge_bias, cascade.judge_noise)
    scores = []
    finished = requests["outcome"] == Outcome.FINISHED
    for request, replica in zip(*(requests[name][finished].tolist() for name in ("request", "replica")), strict=True):
        model = records.replicas[replica].model
        score = float(records.workload[f"{QUALITY}{model}"][request])
        scores.append(noisy_score(score, bias, noise, chosen.spec.seed, request, stages.index(model)))
    return structs.replace(done, quality=float(np.nanmean(scores)) if scores else None)


def _simulated(asked: PlanningRequest, found: CascadePlan, seed: int | None) -> tuple[Scenario, Records]:
    document = document_of(asked, found) | ({} if seed is None else {"seed": seed})
    chosen = scenario.assemble(document, Places(), asked.base_dir)
    return chosen, asked.simulator.records(chosen)


def measured(chosen: Scenario, records: Records) -> Rehearsed:
    """What a run came to; a summary has token times, too, which take longer than the run."""
    warmup_s = chosen.spec.simulation.warmup_s
    counted = sample(records, warmup_s, None)
    e2e_s, given, num = distribution(counted.e2e_s), answer_metrics(records, counted), int(counted.finished.sum())
    usd = float(usage(records, warmup_s).usd.sum()) + given.judge_usd
    return Rehearsed(
        quality=given.quality,
        p95_s=None if e2e_s is None else e2e_s.p95,
        mean_s=None if e2e_s is None else e2e_s.mean,
        num_requests=len(counted),
        num_completed=num,
        usd_per_request=usd / num if num else None,
    )


def document_of(asked: PlanningRequest, found: CascadePlan) -> dict[str, Any]:
    """The plan as a scenario: its pools, and its thresholds where more than one model is left."""
    used = [stage for stage in found.stages if stage.replicas]
    fleet = [
        {"name": f"{stage.model}-{i}", **_pool(asked, stage.model, part)}
        for stage in used
        for i, part in enumerate(stage.replicas)
        if part.role == "mixed"
    ]
    combos = [combo for stage in used if (combo := _combo(asked, stage))]
    document = {
        name: value
        for name, value in copy.deepcopy(asked.document).items()
        if name not in ("variants", "faults", "roles")
    }
    models = tuple(stage.model for stage in used)
    quality = restricted_to(msgspec.convert(document["workload"]["quality"], QualitySpec), models)
    said = {name: value for name, value in msgspec.to_builtins(quality).items() if value is not None}
    document |= {"workload": {**document["workload"], "quality": said}, "fleet": fleet}
    document |= {"combos": combos} if combos else {}
    cascade = document.pop("cascade", {})
    if len(used) > 1:
        document["cascade"] = {**cascade, "models": list(models), "policy": _policy(found, used)}
    return document


def _pool(asked: PlanningRequest, model: str, part: Replicas) -> dict[str, Any]:
    said = {"model": model, "tp": part.tp, "pp": part.pp, "replicas": part.count}
    return {**_kept(asked, model, part.gpu), **said}


def _combo(asked: PlanningRequest, stage: StagePlan) -> dict[str, Any]:
    """The stage's replicas that have roles; empty where none have."""
    first, usual = asked.document["fleet"][0], msgspec.to_builtins(Handover())
    network = {name: first[name] for name in ("network_bytes_per_s",) if name in first}
    parts: dict[str, Any] = {
        part.role: _pool(asked, stage.model, part) | network for part in stage.replicas if part.role != "mixed"
    }
    handover = msgspec.to_builtins(asked.handing.handover)
    said = {name: value for name, value in handover.items() if value != usual[name]}
    return {"name": f"{stage.model}-combo", **parts, "handover": said} if parts else {}


def _kept(asked: PlanningRequest, model: str, gpu: str) -> dict[str, Any]:
    """What a model's pool has from the one that it is made after; of a GPU that no pool has, what was said of it."""
    problem, fleet = asked.problem, asked.document["fleet"]
    place = problem.names.index(model)
    others = {offer.gpu.name: offer for offer in problem.others}
    at = asked.entries.get(of_type(problem.models[place], gpu if gpu in others else ""))
    if at is not None:
        return {name: fleet[at][name] for name in AS_IT_WAS if name in fleet[at]}
    offer = others.get(gpu, problem.offers[0])
    said = {"gpu": offer.gpu.name} | {name: fleet[0][name] for name in ("engine",) if name in fleet[0]}
    return said | ({} if offer.usd_per_hour is None else {"usd_per_gpu_hour": offer.usd_per_hour})


def _policy(found: CascadePlan, used: Sequence[Any]) -> dict[str, Any]:
    levels = [stage.threshold for stage in used[:-1]]
    if found.pre_routed:
        return {"name": "pre-routed", "threshold": levels[0]}
    return {"name": "thresholds", "thresholds": levels}


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
