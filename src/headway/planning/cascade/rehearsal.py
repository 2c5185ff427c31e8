"""Rehearsals: simulates a plan as a complete scenario, and tightens plans until one meets the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field, structs

from headway.config import scenario
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.core.fleet import Handover, pool_name
from headway.core.record import Outcome, Records
from headway.metrics.cascade import answer_metrics
from headway.metrics.latency import distribution
from headway.metrics.usage import usage
from headway.planning.cascade.candidates import with_held_out
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of
from headway.planning.cascade.latency_bounds import Bounds
from headway.planning.cascade.planners import CascadePlanner, SearchPlanner
from headway.planning.cascade.problem import (
    CascadePlan,
    Cheapest,
    LatencyBudget,
    QualityFloor,
    Replicas,
    StagePlan,
    Target,
    coefficients_key,
)
from headway.planning.cascade.request import PlanningRequest
from headway.planning.cascade.search import Search
from headway.planning.rehearsals import counted
from headway.workload.quality_judges import noisy_score
from headway.workload.quality_source import QualitySpec, restricted_to
from headway.workload.table import QUALITY

INHERITED_KEYS = ("gpu", "engine", "usd_per_gpu_hour", "coefficients", "start_s")
"""Keys that a model's new pools copy from their template pool."""
ROUNDS = 6
"""Maximum number of rounds of tightening the target."""
LEADING = 3
"""This many leading plans of a search must meet the target: the one with the smallest maximum and those with the least
work, because a single plan may have favourable requests by chance."""
MARGIN = 0.05
"""In points: quality that the next plan must gain beyond the shortfall. As a share: latencies that differ by less are
near enough."""
GROWTH = 1.5
"""Growth factor of the latency allowed for each stage, until a plan is not in time."""
HALVINGS = 8
CLOSE = 0.25
"""The search ends at this distance, in points of quality, between plans in time and not in time."""


class RehearsalResult(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan simulated as a whole: the scenario's own requests, from stage to stage."""

    quality: float | None
    p95_s: float | None
    """p95 latency of finished requests, over all of their stages and judges."""
    mean_s: float | None
    num_requests: int
    num_completed: int
    usd_per_request: float | None
    """Cost of the GPUs while they are up, and of the judge."""

    def meets(self, target: Target) -> bool:
        """Whether all requests finished and the target is met."""
        if self.num_completed < self.num_requests or self.quality is None or self.p95_s is None:
            return False
        if isinstance(target, LatencyBudget):
            return self.p95_s <= target.latency_s
        if isinstance(target, Cheapest) and self.p95_s > target.latency_s:
            return False
        return self.quality >= target.q_min


class RehearsedPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan and its rehearsal."""

    plan: CascadePlan
    rehearsed: RehearsalResult
    is_met: bool = field(name="kept")
    """Whether the rehearsal meets the target."""


def rehearse(
    request: PlanningRequest, plan: CascadePlan, seed: int | None = None, policy: Mapping[str, Any] | None = None
) -> RehearsalResult:
    """Simulate a plan, as `headway simulate` would with the plan's scenario file.

    `policy`: keys of the cascade's policy, in place of the plan's.
    """
    return result_of(*simulated(request, plan, seed, policy))


def rehearse_by_judge(request: PlanningRequest, plan: CascadePlan) -> RehearsalResult:
    """The result with the quality as seen by the scenario's judge."""
    chosen, records = simulated(request, plan)
    models = [pool.model.name for pool in chosen.fleet.all_pools]
    cascade, requests = chosen.spec.cascade, records.requests
    stages = list(cascade.models) if cascade is not None else models[:1]
    bias, noise = (0.0, 0.0) if cascade is None else (cascade.judge_bias, cascade.judge_noise)
    scores = []
    finished = requests["outcome"] == Outcome.FINISHED
    for row, replica in zip(*(requests[name][finished].tolist() for name in ("request", "replica")), strict=True):
        model = records.replicas[replica].model
        score = float(records.workload[f"{QUALITY}{model}"][row])
        scores.append(noisy_score(score, bias, noise, chosen.spec.seed, row, stages.index(model)))
    return structs.replace(result_of(chosen, records), quality=float(np.nanmean(scores)) if scores else None)


def simulated(
    request: PlanningRequest, plan: CascadePlan, seed: int | None = None, policy: Mapping[str, Any] | None = None
) -> tuple[Scenario, Records]:
    """The scenario of a plan and its records. The arguments are as in `rehearse`."""
    document = planned_document(request, plan, policy) | ({} if seed is None else {"seed": seed})
    chosen = scenario.assemble(document, Places(), request.base_dir)
    return chosen, request.simulator.records(chosen)


def result_of(chosen: Scenario, records: Records) -> RehearsalResult:
    """The result of a run. A summary would also compute token times, which takes longer than the run."""
    warmup_s = chosen.spec.simulation.warmup_s
    measured = counted(records, warmup_s, None)
    e2e_s, given = distribution(measured.e2e_s), answer_metrics(records, measured)
    num = int(measured.finished.sum())
    usd = float(usage(records, warmup_s).usd.sum()) + given.judge_usd
    return RehearsalResult(
        quality=given.quality,
        p95_s=None if e2e_s is None else e2e_s.p95,
        mean_s=None if e2e_s is None else e2e_s.mean,
        num_requests=len(measured),
        num_completed=num,
        usd_per_request=usd / num if num else None,
    )


# A plan as a scenario.


def planned_document(
    request: PlanningRequest, plan: CascadePlan, policy: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The scenario with the plan's pools and, if more than one model is used, with its thresholds or `policy`."""
    used = [stage for stage in plan.stages if stage.replicas]
    names: set[str] = set()
    fleet = [
        {"name": pool_name(f"{stage.model}-{i}", names), **_pool(request, stage.model, part)}
        for stage in used
        for i, part in enumerate(stage.replicas)
        if part.role == "mixed"
    ]
    combos = [combo for stage in used if (combo := _combo(request, stage, names))]
    dropped = ("variants", "faults", "roles")
    document = {name: value for name, value in request.document.items() if name not in dropped}
    models = tuple(stage.model for stage in used)
    quality = restricted_to(msgspec.convert(document["workload"]["quality"], QualitySpec), models)
    keys = {name: value for name, value in msgspec.to_builtins(quality).items() if value is not None}
    document |= {"workload": {**document["workload"], "quality": keys}, "fleet": fleet}
    document |= {"combos": combos} if combos else {}
    cascade = document.pop("cascade", {})
    if len(used) > 1:
        levels = [stage.threshold for stage in used[:-1]]
        own: dict[str, Any] = {"name": "thresholds", "thresholds": levels}
        if plan.pre_routed:
            own = {"name": "pre-routed", "threshold": levels[0]}
        document["cascade"] = {**cascade, "models": list(models), "policy": dict(policy or own)}
    return document


def _pool(request: PlanningRequest, model: str, part: Replicas) -> dict[str, Any]:
    shape = {"model": model, "tp": part.tp, "pp": part.pp, "replicas": part.count}
    return {**_inherited(request, model, part.gpu), **shape}


def _combo(request: PlanningRequest, stage: StagePlan, names: set[str]) -> dict[str, Any]:
    """The stage's replicas with roles, as a combo with a name that is not in `names`; empty without any."""
    first, defaults = request.document["fleet"][0], msgspec.to_builtins(Handover())
    network = {name: first[name] for name in ("network_bytes_per_s",) if name in first}
    parts: dict[str, Any] = {
        part.role: _pool(request, stage.model, part) | network for part in stage.replicas if part.role != "mixed"
    }
    handover = msgspec.to_builtins(request.handover_settings.handover)
    changed = {name: value for name, value in handover.items() if value != defaults[name]}
    if not parts:
        return {}
    return {"name": pool_name(f"{stage.model}-combo", names), **parts, "handover": changed}


def _inherited(request: PlanningRequest, model: str, gpu: str) -> dict[str, Any]:
    """Keys from a model's template pool; for a GPU without a pool, from its offer."""
    problem, fleet = request.problem, request.document["fleet"]
    others = {offer.gpu.name: offer for offer in problem.other_offers}
    key = coefficients_key(problem.models[problem.names.index(model)], gpu if gpu in others else "")
    template = request.template_pools.get(key)
    if template is not None:
        return {name: fleet[template][name] for name in INHERITED_KEYS if name in fleet[template]}
    offer = others.get(gpu, problem.offers[0])
    keys = {"gpu": offer.gpu.name} | {name: fleet[0][name] for name in ("engine",) if name in fleet[0]}
    return keys | ({} if offer.usd_per_hour is None else {"usd_per_gpu_hour": offer.usd_per_hour})


# Search for plans whose rehearsal meets the target.


def tighten_until_met(
    request: PlanningRequest,
    latencies: StageLatencies,
    planner: CascadePlanner | None = None,
    bounds: Bounds | None = None,
) -> RehearsedPlan:
    """The best plan whose rehearsal meets the target; otherwise the nearest plan."""
    return best_or_nearest(request.problem.target, Trials(request, latencies, planner, bounds=bounds).run())


class Trials:
    """The plans of one planner for successive targets, each rehearsed once."""

    def __init__(
        self,
        request: PlanningRequest,
        latencies: StageLatencies,
        planner: CascadePlanner | None = None,
        rehearsal: Callable[[PlanningRequest, CascadePlan], RehearsalResult] = rehearse,
        bounds: Bounds | None = None,
    ) -> None:
        """`bounds`: None = `bounds_of` the request. They remember, so that several planners should share them."""
        self.request, self.latencies, self.rehearsal = request, latencies, rehearsal
        self.bounds: Bounds = bounds or bounds_of(request)
        self.planner: CascadePlanner = planner or SearchPlanner(Search, "cascadia")
        self.results: list[RehearsedPlan] = []
        self._rehearsed: dict[object, RehearsalResult] = {}

    def run(self) -> list[RehearsedPlan]:
        """All plans that were rehearsed to find the best plan for the request's target."""
        target = self.request.problem.target
        if isinstance(target, LatencyBudget):
            self._most_quality(target)
        elif isinstance(target, Cheapest):
            self._least_cost(target)
        else:
            self._reach_quality(target)
        return self.results

    def plan(self, target: Target) -> list[RehearsedPlan]:
        """The planner's plans for a target, rehearsed."""
        plans = self.planner(self.request.problem.with_target(target), self.latencies, self.bounds)
        rehearsed = [self._rehearse(with_held_out(each, self.request.held_out)) for each in plans]
        self.results += rehearsed
        return rehearsed

    def _rehearse(self, plan: CascadePlan) -> RehearsedPlan:
        key = (plan.pre_routed, plan.thresholds, tuple((stage.model, stage.replicas) for stage in plan.stages))
        if key not in self._rehearsed:
            self._rehearsed[key] = self.rehearsal(self.request, plan)
        return RehearsedPlan(plan, self._rehearsed[key], self._rehearsed[key].meets(self.request.problem.target))

    def _most_quality(self, target: LatencyBudget) -> None:
        """Maximise the quality within a latency, among plans for various qualities: higher quality takes longer.

        A search with a latency budget limits the largest p95 of a stage. Escalated requests pass several stages,
        however, and only few requests may escalate. Its plans are therefore only the first attempts. Then the planner
        plans for qualities by bisection between a plan in time and a plan not in time.
        """
        first = self.plan(target)[0].plan
        if first.status == "infeasible" or len(first.stages) == 1:
            return
        low, high = sorted((first.nadir_quality, first.utopia_quality))
        for _ in range(HALVINGS):
            low = max([low, *(each.plan.quality for each in self.results if each.is_met)])
            if high - low < CLOSE:
                return
            middle = (low + high) / 2
            if any(each.is_met for each in self.plan(QualityFloor(middle))):
                low = middle
            else:
                high = middle

    def _least_cost(self, target: Cheapest) -> None:
        """Minimise the cost: start from the fastest plan with the quality, and allow each stage more and more time, so
        fewer GPUs.

        The latencies of an escalated request add up over its stages, so a plan whose stages are each in time may still
        be late. Conversely, a stage that few requests reach need not be in time. The latency per stage is found by
        bisection between a plan in time and a plan not in time.
        """
        fastest, q_min = self._reach_quality(QualityFloor(target.q_min))
        low, high, within_s = fastest.latency_s, inf, target.latency_s
        for _ in range(ROUNDS):
            plans = self.plan(structs.replace(target, q_min=q_min, latency_s=within_s))
            if plans[0].is_met:
                low = within_s
            else:
                high = within_s
            if len(fastest.stages) == 1 or low * (1 + MARGIN) >= high:
                return
            within_s = low * GROWTH if high == inf else sqrt(low * high)

    def _reach_quality(self, target: QualityFloor) -> tuple[CascadePlan, float]:
        """Plan, rehearse the few best plans, and raise the quality by the shortfall of the leading ones.

        Returns the last plan and the quality for which it was planned.
        """
        stricter = target
        for _ in range(ROUNDS):
            plans = self.plan(stricter)
            short = [each.rehearsed for each in plans[:LEADING] if not each.rehearsed.meets(target)]
            if plans[0].plan.status == "infeasible" or (short and len(plans[0].plan.stages) == 1) or not short:
                break
            worst = min(short, key=lambda each: each.quality or 0.0)
            shortfall = target.q_min - (target.q_min if worst.quality is None else worst.quality)
            stricter = structs.replace(stricter, q_min=min(100.0, stricter.q_min + max(shortfall, 0.0) + MARGIN))
        return plans[0].plan, stricter.q_min


def best_or_nearest(target: Target, plans: Sequence[RehearsedPlan]) -> RehearsedPlan:
    """The best plan that meets the target; if none does, the plan with the smallest shortfall."""

    def order(plan: RehearsedPlan) -> tuple[bool, float, float]:
        result = plan.rehearsed
        p95_s, quality = result.p95_s or inf, result.quality or 0.0
        if isinstance(target, LatencyBudget):
            return (False, -quality, p95_s) if plan.is_met else (True, p95_s, -quality)
        if isinstance(target, Cheapest):
            if plan.is_met:
                return False, result.usd_per_request or inf, p95_s
            return True, max(0.0, target.q_min - quality), p95_s
        return (False, p95_s, -quality) if plan.is_met else (True, -quality, p95_s)

    return min(plans, key=order)
