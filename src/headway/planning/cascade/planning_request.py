"""What a scenario asks of the cascade planner."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from headway import catalog
from headway.catalog.coefficients import Coefficients
from headway.config import scenario
from headway.config.fleet import coefficients_of
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Fleet, Pool
from headway.planning.cascade.problem import Handing, Problem, Target, of_type
from headway.planning.cascade.replica_sets import offered
from headway.planning.combos.problem import Offer
from headway.planning.simulator import Simulator
from headway.workload.generate import generate
from headway.workload.quality import Scores
from headway.workload.quality_source import score_table

HELD_OUT = 0.5
"""The share of the score table that a plan is not made on."""


@dataclass(frozen=True)
class PlanningRequest:
    """One scenario: what is planned for, and what is rehearsed."""

    problem: Problem
    """With the part of the table that plans are made on."""
    simulator: Simulator
    held_out: Scores
    document: dict[str, Any]
    base_dir: Path
    policies: Policies
    seed: int
    entries: Mapping[str, int]
    """The pool of the document that a model's new pools are made after, by model: its own, else the first. On further
    types of GPU, by `of_type`: where no pool has the GPU, there is none."""
    coefficients: Mapping[str, Coefficients]
    """Of the step-time model, by the same: those of the same pool."""
    handing: Handing = field(default_factory=Handing)
    """Of combos: as the first pool's network, and as the document's first combo has it."""
    replan: Any = None
    """What the document said of planning anew; what is rehearsed stays as it is planned."""


def ask(
    document: dict[str, Any],
    places: Places,
    base_dir: Path,
    target: Target,
    simulator: Simulator,
    *,
    num_gpus: int | None = None,
    gpus: Sequence[Offer] = (),
    gpus_per_server: int | None = None,
    rps: float | None = None,
    combos: bool = False,
) -> PlanningRequest:
    """What a scenario asks for. HeadwayError where its workload has no scores or its fleet no pool.

    GPUs are the fleet's, or `num_gpus` of the first pool's type, or `gpus`. `combos`: models are offered them, too.
    """
    document = copy.deepcopy(document)
    replan = document["cascade"].pop("replan", None) if isinstance(document.get("cascade"), dict) else None
    if combos and replan is not None:
        raise places.error(("cascade", "replan"), "plans anew with pools alone; leave it out, or plan without --combos")
    if rps is not None:
        document.setdefault("workload", {})["arrivals"] = rps
    chosen = scenario.assemble(document, places, base_dir)
    spec, pools = chosen.spec, _flat(document, chosen.fleet)
    if spec.workload.quality is None or spec.workload.arrivals is None:
        raise places.error(("workload",), "expected arrivals, and quality: what each model's answers score")
    with places.at("workload", "quality"):
        scores = score_table(spec.workload.quality, base_dir)
    models = tuple(catalog.model(name) for name in _stages(spec.cascade, scores, places))
    own, held_out = scores.stages([model.name for model in models]).split(1 - HELD_OUT, spec.seed)
    first, (num, span_s) = pools[0], _arrivals(chosen, places)
    of_fleet = _offers(pools, gpus_per_server)
    if num_gpus:
        of_fleet = (structs.replace(of_fleet[0], limit=num_gpus),)
    offers = _given(gpus, of_fleet, document, pools) if gpus else of_fleet
    problem = Problem(
        models=models,
        gpu=offers[0].gpu,
        engine=first.engine,
        num_gpus=offers[0].limit or 0,
        rate_rps=num / span_s,
        scores=own,
        target=target,
        gpus_per_server=gpus_per_server,
        span_s=span_s,
        judge_s=0.27 if spec.cascade is None else spec.cascade.judge_s,
        use_all=len(offers) < 2,
        max_kinds=1,  # with two, the same effort finds the same plans, in two to four times as long
        others=offers[1:],
        usd_per_gpu_hour=offers[0].usd_per_hour,
    )
    policies = structs.replace(simulator.policies(chosen), cascade=None)
    entries = _entries(problem, pools)
    known = coefficients_of(spec, chosen.fleet, base_dir, places)
    coefficients = {name: known[pools[i].name] for name, i in entries.items()}
    if combos:
        problem = _with_combos(problem, coefficients, first.network_bytes_per_s)
    handing = _handing(chosen.fleet, first)
    return PlanningRequest(
        problem, simulator, held_out, document, base_dir, policies, spec.seed, entries, coefficients, handing, replan
    )


def _flat(document: dict[str, Any], fleet: Fleet) -> tuple[Pool, ...]:
    """The pools, and the parts of combos as if they were pools, which is what the document then says."""
    found, said = list(fleet.pools), document.pop("combos", [])
    document.setdefault("fleet", [])
    for combo, each in zip(fleet.combos, said, strict=True):
        found += [structs.replace(part, replicas=part.replicas * combo.replicas, role="mixed") for part in combo.parts]
        document["fleet"] += [each[role] for role in ("prefill", "decode", "aggregated") if role in each]
    return tuple(found)


def _handing(fleet: Fleet, first: Pool) -> Handing:
    split = [combo.parts[0].handover for combo in fleet.combos if len(combo.parts) > 1]
    return Handing(first.network_bytes_per_s, *split[:1])


def _with_combos(problem: Problem, coefficients: Mapping[str, Coefficients], network_bytes_per_s: float) -> Problem:
    splits = offered(problem, coefficients, network_bytes_per_s)
    if not any(splits.values()):
        raise HeadwayError(
            f"--combos: on {problem.hardware} no model has room for two replicas that hold the longest request"
        )
    return replace(problem, splits=splits)


def _stages(said: Any, scores: Scores, places: Places) -> tuple[str, ...]:
    """The cascade's models, else the table's."""
    names = scores.models if said is None else said.models
    for i, name in enumerate(names):
        if name not in scores.models:
            raise unknown("model", name, scores.models, places.where(("cascade", "models", i)))
    return tuple(names)


def _arrivals(chosen: Scenario, places: Places) -> tuple[int, float]:
    """How many gaps between requests, and how long they take together."""
    rows = generate(chosen.spec.workload, chosen.spec.seed, chosen.base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    if span_s <= 0:
        raise places.error(("workload",), "expected two requests or more, at different times")
    return len(rows) - 1, span_s


def _offers(pools: tuple[Pool, ...], gpus_per_server: int | None) -> tuple[Offer, ...]:
    """The GPUs of a fleet by type, the first pool's first, each at the price of its first pool."""
    found = dict[str, Offer]()
    for pool in pools:
        known = found.get(pool.gpu.name) or Offer(pool.gpu, 0, pool.usd_per_gpu_hour, gpus_per_server)
        num_gpus = (known.limit or 0) + pool.replicas * pool.parallel.num_gpus
        found[pool.gpu.name] = structs.replace(known, limit=num_gpus)
    return tuple(found.values())


def _given(
    gpus: Sequence[Offer], of_fleet: Sequence[Offer], document: dict[str, Any], pools: tuple[Pool, ...]
) -> tuple[Offer, ...]:
    """GPUs that were asked for: at the fleet's price, unless one was given, which then holds for the fleet's pools."""
    known, found = {offer.gpu.name: offer for offer in of_fleet}, list[Offer]()
    for offer in gpus:
        if offer.limit is None:
            raise HeadwayError(f"GPUs: {offer.gpu.name}: expected how many there are")
        if offer.usd_per_hour is None and offer.gpu.name in known:
            offer = structs.replace(offer, usd_per_hour=known[offer.gpu.name].usd_per_hour)
        found.append(offer)
        for entry, pool in zip(document["fleet"], pools, strict=True):
            if pool.gpu == offer.gpu and offer.usd_per_hour is not None:
                entry["usd_per_gpu_hour"] = offer.usd_per_hour
    return tuple(found)


def _entries(problem: Problem, pools: tuple[Pool, ...]) -> dict[str, int]:
    """Of the pools with the planner's GPUs and engine."""
    found = dict[str, int]()
    for t, offer in enumerate(problem.offers):
        own = [i for i, pool in enumerate(pools) if (pool.gpu, pool.engine) == (offer.gpu, problem.engine)]
        for model in problem.models if own else ():
            key = of_type(model, offer.gpu.name if t else "")
            found[key] = next((i for i in own if pools[i].model.name == model.name), own[0])
    return found


def at_rate(asked: PlanningRequest, rate_rps: float) -> PlanningRequest:
    """The same requests, arriving at another rate."""
    document = copy.deepcopy(asked.document)
    document["workload"]["arrivals"] = rate_rps
    problem = asked.problem
    span_s = problem.span_s * problem.rate_rps / rate_rps
    return replace(asked, document=document, problem=replace(problem, rate_rps=rate_rps, span_s=span_s))
