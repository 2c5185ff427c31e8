"""A plan as a scenario, and what that comes to when it is simulated as a whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, structs

from headway.config import scenario
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.core.fleet import Handover
from headway.core.record import Outcome, Records
from headway.metrics.cascade import answers
from headway.metrics.latency import distribution, sample
from headway.metrics.usage import usage
from headway.planning.cascade.bounds import of_type
from headway.planning.cascade.plan import CascadePlan, StagePlan
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import Cheapest, LatencyBudget, Replicas, Target
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
    e2e_s, given, num = distribution(counted.e2e_s), answers(records, counted), int(counted.finished.sum())
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
