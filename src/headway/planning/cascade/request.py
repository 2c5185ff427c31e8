"""Turns a scenario into a cascade planning problem, with the data for rehearsals of its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from headway import catalog
from headway.catalog.coefficients import Coefficients
from headway.config import scenario
from headway.config.fleet import own_of
from headway.config.scenario import Scenario, StepTimes
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Fleet, Pool
from headway.planning.cascade.problem import CascadeProblem, HandoverSettings, JudgeError, Target, coefficients_key
from headway.planning.cascade.replica_sets import combo_kinds_of
from headway.planning.combos.problem import Offer
from headway.planning.rehearsals import Simulator, Source
from headway.workload.generate import generate
from headway.workload.quality import Scores
from headway.workload.quality_source import score_table
from headway.workload.readers.shared import ReadOptions

HELD_OUT = 0.5
"""The share of the score table that is held out from planning."""


class CascadeOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    target: Target
    num_gpus: int | None = None
    """Number of GPUs of the first pool's type; None: the fleet's GPUs, or `gpus`."""
    gpus: tuple[Offer, ...] = ()
    gpus_per_server: int | None = None
    rps: float | None = None
    """Requests per second; None: the scenario's."""
    combos: bool = False
    """Whether models may have combos."""
    prefix_hit_rate: float = 0.0
    """The share of prompt tokens in prefix caches (appendix M). Stages are planned with it; rehearsals compute whole
    prompts."""
    alternatives: bool = True
    """Plan the alternatives; one that is better is chosen."""
    curve: int = 0
    """Number of plans from low to high quality."""
    errors: tuple[JudgeError, ...] = ()
    """Judge errors for `regrets`."""
    fresh_draws: int = 5
    """Draws of the requests on which the chosen plan is rehearsed once more."""


@dataclass(frozen=True)
class PlanningRequest:
    """A problem, and the scenario that its plans are rehearsed in."""

    problem: CascadeProblem
    """Contains the part of the score table on which plans are made."""
    options: CascadeOptions
    simulator: Simulator
    held_out: Scores
    document: dict[str, Any]
    base_dir: Path
    policies: Policies
    seed: int
    template_pools: Mapping[str, int]
    """The index in the document's `fleet` of the pool from which a model's new pools copy keys: the model's own pool,
    otherwise the first. Keyed by model, and on further types of GPU by `coefficients_key`. A GPU without a pool has no
    entry."""
    coefficients: Mapping[str, Coefficients]
    """Step-time coefficients of the template pools, by the same keys."""
    handover_settings: HandoverSettings = field(default_factory=HandoverSettings)
    """Settings of combos: the first pool's network, and the hand-over of the document's first combo."""
    replan: Any = None
    """The document's `cascade.replan`. Rehearsals do not replan."""


def make_request(source: Source, options: CascadeOptions, simulator: Simulator) -> PlanningRequest:
    """The planning request of a document. Raises HeadwayError if its workload has no scores or its fleet no pool.

    A workload that is the `trace` of a served day has that day's scores and rate.
    """
    places, base_dir = source.places, source.base_dir
    document = _with_served_day(*source)
    cascade, replan = document.get("cascade"), None
    if isinstance(cascade, dict):
        replan = cascade.get("replan")
        document = {**document, "cascade": {name: cascade[name] for name in cascade if name != "replan"}}
    if options.rps is not None:
        document = {**document, "workload": {**document.get("workload", {}), "arrivals": options.rps}}
    chosen = scenario.assemble(document, places, base_dir)
    pools, entries = _flat_pools(chosen.document, chosen.fleet)
    scores, held_out = _score_tables(chosen)
    offers = _fleet_offers(pools, options.gpus_per_server)
    if options.num_gpus:
        offers = (structs.replace(offers[0], limit=options.num_gpus),)
    if options.gpus:
        offers = _priced(options.gpus, offers)
        entries = _at_prices(entries, pools, offers)
    problem = _problem(chosen, scores, offers, options, pools[0])
    templates = _template_pools(problem, pools)
    coefficients = _coefficients(problem, templates, pools, chosen)
    if options.combos:
        problem = replace(problem, combo_kinds=combo_kinds_of(problem, coefficients, pools[0].network_bytes_per_s))
        if not any(problem.combo_kinds.values()):
            raise HeadwayError(
                f"--combos: on {problem.hardware} no model has room for two replicas that hold the longest request"
            )
    without_combos = {name: value for name, value in chosen.document.items() if name != "combos"}
    handovers = [combo.parts[0].handover for combo in chosen.fleet.combos if len(combo.parts) > 1]
    return PlanningRequest(
        problem,
        options,
        simulator,
        held_out,
        {**without_combos, "fleet": entries},
        base_dir,
        policies=structs.replace(simulator.policies(chosen), cascade=None),
        seed=chosen.spec.seed,
        template_pools=templates,
        coefficients=coefficients,
        handover_settings=HandoverSettings(pools[0].network_bytes_per_s, *handovers[:1]),
        replan=replan,
    )


def _at_prices(
    entries: Sequence[dict[str, Any]], pools: Sequence[Pool], offers: Sequence[Offer]
) -> list[dict[str, Any]]:
    """The pools' entries in the document, at the offers' prices."""
    prices = {offer.gpu.name: offer.usd_per_hour for offer in offers if offer.usd_per_hour is not None}
    return [
        {**entry, "usd_per_gpu_hour": prices[pool.gpu.name]} if pool.gpu.name in prices else entry
        for entry, pool in zip(entries, pools, strict=True)
    ]


def _coefficients(
    problem: CascadeProblem, templates: Mapping[str, int], pools: Sequence[Pool], chosen: Scenario
) -> dict[str, Coefficients]:
    """Step-time coefficients of the template pools, and of the scenario's own GPUs that no pool has."""
    by_pool, own = StepTimes(chosen).coefficients, own_of(chosen.spec, chosen.places)
    found = {name: by_pool[pools[i].name] for name, i in templates.items()}
    for model, offer in product(problem.models, problem.other_offers):
        if offer.gpu.name in own.gpus:
            used = own.coefficients(offer.gpu.name, problem.engine.name, problem.engine.version)
            found.setdefault(coefficients_key(model, offer.gpu.name), used)
    return found


def _with_served_day(document: Mapping[str, Any], places: Places, base_dir: Path) -> Mapping[str, Any]:
    """The document, with a `trace` of a served cascade replaced by its scores and its mean rate."""
    workload = document.get("workload")
    trace = workload.get("trace") if isinstance(workload, dict) else None
    path = trace.get("path") if isinstance(trace, dict) else trace
    if not isinstance(workload, dict) or not isinstance(path, str) or not path.endswith(".parquet"):
        return document
    others = [
        name for name in (*workload, *(trace if isinstance(trace, dict) else ())) if name not in ("trace", "path")
    ]
    if others:
        what = f"{', '.join(others)}: a day's records are planned for as they are; expected `trace` with a path alone"
        raise places.error(("workload",), what)
    from headway.workload.files import read_parquet  # imports pyarrow; a simulation does not need it

    rows = read_parquet(base_dir / path, ReadOptions(sort=True))
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    if span_s <= 0:
        raise places.error(("workload", "trace"), f"{path}: expected two requests or more, at different times")
    as_scores = {"arrivals": (len(rows) - 1) / span_s, "num_requests": len(rows), "quality": {"path": path}}
    return {**document, "workload": as_scores}


def _score_tables(chosen: Scenario) -> tuple[Scores, Scores]:
    """The scores of the stages' models: the requests for planning, and the held-out requests."""
    workload, places = chosen.spec.workload, chosen.places
    if workload.quality is None or workload.arrivals is None:
        raise places.error(("workload",), "expected arrivals, and quality: what each model's answers score")
    with places.at("workload", "quality"):
        scores = score_table(workload.quality, chosen.base_dir)
    names = scores.models if chosen.spec.cascade is None else chosen.spec.cascade.models
    for i, name in enumerate(names):
        if name not in scores.models:
            raise unknown("model", name, scores.models, places.where(("cascade", "models", i)))
    stages = [catalog.find_model(name, chosen.base_dir).name for name in names]
    return scores.stages(stages).split(1 - HELD_OUT, chosen.spec.seed)


def _problem(
    chosen: Scenario,
    scores: Scores,
    offers: tuple[Offer, ...],
    options: CascadeOptions,
    first: Pool,
) -> CascadeProblem:
    rows = generate(chosen.spec.workload, chosen.spec.seed, chosen.base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    if first.engine.drafts is not None:
        raise chosen.places.error(("fleet", 0, "speculative"), "a cascade's plan has none; expected no such key")
    if span_s <= 0:
        raise chosen.places.error(("workload",), "expected two requests or more, at different times")
    return CascadeProblem(
        models=tuple(catalog.find_model(name, chosen.base_dir) for name in scores.models),
        gpu=offers[0].gpu,
        engine=first.engine,
        num_gpus=offers[0].limit or 0,
        rate_rps=(len(rows) - 1) / span_s,
        scores=scores,
        target=options.target,
        gpus_per_server=options.gpus_per_server,
        prefix_hit_rate=options.prefix_hit_rate,
        span_s=span_s,
        judge_s=0.27 if chosen.spec.cascade is None else chosen.spec.cascade.judge_s,
        use_all=len(offers) < 2,
        max_kinds=1,  # two kinds find the same plans in two to four times the time
        other_offers=offers[1:],
        usd_per_gpu_hour=offers[0].usd_per_hour,
    )


def with_rate(request: PlanningRequest, rate_rps: float) -> PlanningRequest:
    """The planning request at another arrival rate."""
    document = {**request.document, "workload": {**request.document["workload"], "arrivals": rate_rps}}
    problem = request.problem
    span_s = problem.span_s * problem.rate_rps / rate_rps
    return replace(request, document=document, problem=replace(problem, rate_rps=rate_rps, span_s=span_s))


def _flat_pools(document: dict[str, Any], fleet: Fleet) -> tuple[tuple[Pool, ...], list[dict[str, Any]]]:
    """All pools and parts of combos, as mixed pools; and their entries in the document."""
    pools, entries = list(fleet.pools), list(document.get("fleet", []))
    for combo, spec in zip(fleet.combos, document.get("combos", []), strict=True):
        pools += [structs.replace(part, replicas=part.replicas * combo.replicas, role="mixed") for part in combo.parts]
        entries += [spec[role] for role in ("prefill", "decode", "aggregated") if role in spec]
    return tuple(pools), entries


def _fleet_offers(pools: tuple[Pool, ...], gpus_per_server: int | None) -> tuple[Offer, ...]:
    """The GPUs of a fleet by type, the first pool's type first, each at the price of its first pool."""
    offers = dict[str, Offer]()
    for pool in pools:
        offer = offers.get(pool.gpu.name) or Offer(pool.gpu, 0, pool.usd_per_gpu_hour, gpus_per_server)
        num_gpus = (offer.limit or 0) + pool.replicas * pool.parallel.num_gpus
        offers[pool.gpu.name] = structs.replace(offer, limit=num_gpus)
    return tuple(offers.values())


def _priced(gpus: Sequence[Offer], fleet_offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The offers; an offer without a price gets the fleet's price. Raises HeadwayError if an offer does not say how
    many GPUs there are."""
    by_name, priced = {offer.gpu.name: offer for offer in fleet_offers}, list[Offer]()
    for offer in gpus:
        if offer.limit is None:
            raise HeadwayError(f"GPUs: {offer.gpu.name}: expected how many there are")
        if offer.usd_per_hour is None and offer.gpu.name in by_name:
            offer = structs.replace(offer, usd_per_hour=by_name[offer.gpu.name].usd_per_hour)
        priced.append(offer)
    return tuple(priced)


def _template_pools(problem: CascadeProblem, pools: tuple[Pool, ...]) -> dict[str, int]:
    """`PlanningRequest.template_pools` for the pools with the problem's GPUs and engine."""
    templates = dict[str, int]()
    for t, offer in enumerate(problem.offers):
        own = [i for i, pool in enumerate(pools) if (pool.gpu, pool.engine) == (offer.gpu, problem.engine)]
        for model in problem.models if own else ():
            key = coefficients_key(model, offer.gpu.name if t else "")
            templates[key] = next((i for i in own if pools[i].model.name == model.name), own[0])
    return templates
