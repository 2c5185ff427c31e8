"""Plans of GPU combos for scenarios, and each service's part of a plan as a scenario file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from headway import catalog
from headway.config import strict_yaml
from headway.config.fleet import own_of, with_unmeasured
from headway.config.own_hardware import own_hardware
from headway.config.scenario import StepTimes, assemble, variants, with_absolute_paths
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.metrics.latency import nothing_measured
from headway.planning.combos.candidates import Directions, Efficiencies, Ranking, select
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboPlan,
    ComboProblem,
    ComboService,
    Counts,
    Efficiency,
    Objective,
    Offer,
    Selection,
    ServiceDemand,
    ServiceGoodput,
    ServiceRehearsal,
    ServiceSlo,
    WorkloadPattern,
)
from headway.planning.combos.rehearsal import (
    ATTAINMENT,
    MOST_REQUESTS,
    GoodputProfiler,
    ServiceScenario,
)
from headway.planning.combos.search import deploy
from headway.planning.combos.verify import verify
from headway.planning.combos.whole import WholeRehearsal, planned_document
from headway.planning.rehearsals import Rehearsals, Resources, Simulator, Source
from headway.planning.together import Together, together_in
from headway.workload.arrivals import Replay
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved

OBJECTIVES: tuple[Objective, ...] = ("co", "mc", "mce")
ROUTINGS: tuple[str, ...] = ("cauchy", "least-loaded", "least-kv")
"""Routers rehearsed with a plan; among equals, the first is chosen."""
LONGEST = 16
"""The longest rehearsal of a plan, as a multiple of `ComboOptions.num_requests`."""
MOST_PLANS = 12
"""Maximum number of plans that are rehearsed until one lasts."""
MOST_RPS = 1e6
"""Maximum rate of one service. At higher rates, one combo would serve too small a share of the demand."""
ABOVE = 1 + 1e-6
"""Factor on the goodput that a plan had, because the next plan must have more."""


class ComboOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    offers: tuple[Offer, ...]
    counts: Counts
    objective: Objective = "co"
    efficiency: Efficiency = "served"
    attainment: float = ATTAINMENT
    num_requests: int = MOST_REQUESTS
    per_pair: int | None = 2
    """Profiled sizes for each pair of GPU types, those with the highest estimate; None: all."""
    directions: Directions = "estimate"
    """How to choose the better direction of a pair of types."""
    ranking: Ranking = "goodput"
    top: int | None = None
    """Candidates for planning per service, the best by `ranking`; None: all."""
    routings: tuple[str, ...] = ROUTINGS

    def __post_init__(self) -> None:
        """Raises HeadwayError for an invalid value."""
        if not 0 < self.attainment <= 1:
            raise HeadwayError(f"attainment: {self.attainment:g}; expected more than 0, 1 at most")
        if not self.routings:
            raise HeadwayError("routings: expected one or more")


class ComboAnswer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    plan: ComboPlan
    selection: Selection
    others: dict[str, ComboPlan]
    """Plans for the other objectives, from short profiles and without rehearsal."""
    rehearsals: dict[str, ServiceRehearsal] = {}
    """Rehearsals of the plan by service; empty if the plan is short."""
    num_simulated: int
    num_found: int


def own_gpus(documents: Sequence[Mapping[str, Any]], places: Places) -> Callable[[str], Gpu]:
    """A lookup of GPUs: first in the `gpus` sections of documents, then in the catalog."""
    entries = {each.get("name", i): each for document in documents for i, each in enumerate(document.get("gpus") or ())}
    return own_hardware(list(entries.values()), (), (), places).gpu


def offer_of(text: str, per_server: int | None = None, find: Callable[[str], Gpu] = catalog.gpu) -> Offer:
    """The offer written as "type", "type:count", "type:count:price" or "type:count:price:interruptions"."""
    name, *rest = text.strip().split(":")
    count, price, interruptions, *surplus = *rest, *("" for _ in range(3 - len(rest)))
    try:
        if surplus:
            raise ValueError("too many parts")
        gpu = find(name)
        usd = float(price) if price else None
        return Offer(gpu, int(count) if count else None, usd, per_server, float(interruptions or 0))
    except HeadwayError:
        raise
    except ValueError as error:
        # Python's messages for invalid numbers
        is_text = str(error).startswith(("invalid literal", "could not convert"))
        why = "" if is_text else f" ({error})"
        raise HeadwayError(f"{text.strip()!r}; expected type:count:price:interruptions{why}") from None


def service_scenario(source: Source, simulator: Simulator, rps: float | None = None) -> ServiceScenario:
    """The service of a scenario, and its demand: `rps`, or the rate of its arrivals.

    Raises HeadwayError if the scenario has no SLO, no rate or nothing to plan, or `rps` is invalid.
    """
    if rps is not None and not 0 < rps <= MOST_RPS:
        raise HeadwayError(f"rps: {rps:g}; expected more than 0 requests per second, {MOST_RPS:g} at most")
    document, places, base_dir = dict(source.document), source.places, source.base_dir
    handover = document.pop("handover", {"mode": "layerwise", "degree": 8})
    scenario = assemble(document, places, base_dir)
    for variant in variants(scenario):
        simulator.policies(variant)
    spec = scenario.spec
    if not spec.fleet:
        raise places.error(("fleet",), "expected a pool; its model and engine are planned for")
    if spec.slo.ttft_s is None and spec.slo.tpot_s is None:
        raise places.error(("slo",), "expected ttft_s, tpot_s, or both: goodput is what is served in time")
    workload = resolved(spec.workload)
    if workload.arrivals is None or workload.reacts:
        raise places.error(("workload",), "expected arrivals at a rate, without sessions, agents or concurrency")
    pool = scenario.fleet.pools[0]
    if pool.engine.drafts is not None:
        raise places.error(("fleet", 0, "speculative"), "a plan of combos has none; expected no such key")
    prompt, output, rate, num = _means(workload, spec.seed, base_dir)
    pattern, slo = WorkloadPattern(spec.name, prompt, output), ServiceSlo(spec.slo.ttft_s, spec.slo.tpot_s)
    own = own_of(spec, places)
    first, names = spec.fleet[0], list(own.gpus)
    if pool.engine.name in own.engines or first.quantization is not None or first.speculative is not None:
        names += [each.name for each in catalog.gpus()]
    used = {
        name: with_unmeasured(own.coefficients(name, pool.engine.name, pool.engine.version), first) for name in names
    }
    used[pool.gpu.name] = StepTimes(scenario).coefficients[pool.name]
    if not rate and rps is None:
        raise places.error(
            ("workload",),
            f"requests arrive at one time ({num} of them), so their rate is unknown; expected --rps, or more arrivals",
        )
    service = ComboService(spec.name, pool.model, pool.engine, pattern, slo, pool.network_bytes_per_s, used)
    document["workload"] = strict_yaml.plain(workload if rps is None else structs.replace(workload, arrivals=rps))
    is_recorded = workload.trace is not None or isinstance(workload.arrivals, Replay)
    for name in ("variants", "faults", "roles", "combos"):
        document.pop(name, None)
    most = num if is_recorded else None
    return ServiceScenario(service, document, base_dir, rate if rps is None else rps, handover, most, own.gpu)


def _means(workload: WorkloadSpec, seed: int, base_dir: Path) -> tuple[float, float, float, int]:
    """Mean prompt and output tokens, requests per second, and the number of requests."""
    rows = generate(workload, seed, base_dir)
    if not len(rows):
        raise HeadwayError(nothing_measured(rows.arrival_s, 0.0))
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    rate = (len(rows) - 1) / span_s if span_s > 0 else 0.0
    return float(rows.prompt_tokens.mean()), float(rows.output_tokens.mean()), rate, len(rows)


def plan(scenarios: Sequence[ServiceScenario], options: ComboOptions, resources: Resources) -> ComboAnswer:
    """The plan for the objective of `options`, and plans for the other objectives.

    A plan must last: its combos are profiled over more requests, and each service's part of it is rehearsed whole. If a
    service falls behind, it is planned again with more goodput than that plan had.
    """
    profiler, selection = profiled(scenarios, options, resources)
    done = profiler.rehearsals
    whole = WholeRehearsal(done, options.attainment, options.num_requests, LONGEST * options.num_requests)
    best, selection, rehearsals = _lasting(scenarios, options, selection, profiler, whole)
    if any(each.document.get("policies") for each in scenarios):
        routers = ", ".join(options.routings)
        note = f"the scenarios' own policies are left out: the plan is rehearsed with the routers {routers} (--routing)"
        best = structs.replace(best, notes=(*best.notes, note))
    return ComboAnswer(
        plan=best,
        selection=selection,
        others=_others(problem_of(scenarios, selection.candidates, options)),
        rehearsals=rehearsals,
        num_simulated=done.num_simulated,
        num_found=done.num_found,
    )


def profiled(
    scenarios: Sequence[ServiceScenario], options: ComboOptions, resources: Resources
) -> tuple[GoodputProfiler, Selection]:
    """The profiler, and the candidates with brief profiles."""
    profiler = GoodputProfiler(
        {each.service.name: each for each in scenarios},
        Rehearsals(resources, remembers=True),
        options.attainment,
        options.num_requests,
    )
    selection = select(
        [each.service for each in scenarios],
        options.offers,
        profiler,
        counts=options.counts,
        top=options.top,
        per_pair=options.per_pair,
        directions=options.directions,
        together=together_in(resources.pool),
        ranking=options.ranking,
    )
    return profiler, selection


def _others(problem: ComboProblem) -> dict[str, ComboPlan]:
    others: dict[str, ComboPlan] = {}
    for objective in OBJECTIVES:
        if objective != problem.objective:
            other = structs.replace(problem, objective=objective)
            try:
                others[objective] = deploy(other, explain=False)
            except HeadwayError:
                continue  # mce needs a price and a limit for each combo
            verify(other, others[objective])
    return others


def _lasting(
    scenarios: Sequence[ServiceScenario],
    options: ComboOptions,
    selection: Selection,
    profiler: GoodputProfiler,
    whole: WholeRehearsal,
) -> tuple[ComboPlan, Selection, dict[str, ServiceRehearsal]]:
    """A plan in which every service's part lasts, the candidates with long profiles of its combos, and the
    rehearsals."""
    asked = list(scenarios)
    for round_ in range(MOST_PLANS):
        best, selection = _profiled(asked, options, selection, profiler, whole.together)
        if best.status == "short":
            return _as_demanded(best, scenarios, asked), selection, {}
        parts = {each.service.name: [p for p in best.combos if p.service == each.service.name] for each in scenarios}
        planned = [each for each in scenarios if parts[each.service.name]]
        rehearsals = [partial(whole.rehearse, each, parts[each.service.name], options.routings) for each in planned]
        names = [each.service.name for each in planned]
        found: dict[str, ServiceRehearsal] = dict(zip(names, whole.together(rehearsals), strict=True))
        missed = {name for name, each in found.items() if not each.is_met}
        if not missed or round_ == MOST_PLANS - 1:
            break
        reached = {each.service: each.goodput_rps for each in best.services}
        asked = [
            replace(each, rps=reached[each.service.name] * ABOVE) if each.service.name in missed else each
            for each in asked
        ]
    for each in planned:
        name = each.service.name
        found[name] = whole.compared(each, parts[name], found[name], options.routings)
    return _as_demanded(best, scenarios, asked), selection, found


def _profiled(
    asked: Sequence[ServiceScenario],
    options: ComboOptions,
    selection: Selection,
    profiler: GoodputProfiler,
    together: Together,
) -> tuple[ComboPlan, Selection]:
    """A plan of combos with long profiles.

    Short profiles can only be too high, so a plan whose combos all have long profiles is the best plan.
    """
    efficiencies = {each.service.name: Efficiencies(each.service, options.offers) for each in asked}
    while True:
        problem = problem_of(asked, selection.candidates, options)
        best = deploy(problem)
        verify(problem, best)
        planned = set(best.counts)
        unsure = [c for c in selection.candidates if (c.service, c.combo.label) in planned and not c.is_lasting]
        if not unsure:
            return best, selection
        sure: dict[ComboCandidate, ComboCandidate] = {}
        of = [efficiencies[each.service].service for each in unsure]
        profiles = [
            partial(profiler.lasting_rps, each.combo, s.pattern, s.slo) for each, s in zip(unsure, of, strict=True)
        ]
        for each, goodput in zip(unsure, together(profiles), strict=True):
            sure[each] = structs.replace(efficiencies[each.service].candidate(each.combo, goodput), is_lasting=True)
        candidates = tuple(sure.get(each, each) for each in selection.candidates)
        selection = structs.replace(selection, candidates=tuple(c for c in candidates if c.goodput_rps > 0))


def _as_demanded(best: ComboPlan, scenarios: Sequence[ServiceScenario], asked: Sequence[ServiceScenario]) -> ComboPlan:
    """The plan stated for the services' own demands, with a note for each service that needs more goodput than its
    demand."""
    demand = {each.service.name: each.rps for each in scenarios}
    notes = []
    for each in asked:
        name = each.service.name
        if each.rps > demand[name]:
            notes.append(f"{name}: a plan for {demand[name]:.4g}/s does not last; this one is for {each.rps:.4g}/s")
    services = tuple(
        ServiceGoodput(
            each.service,
            demand[each.service],
            each.goodput_rps,
            max(0.0, demand[each.service] - each.goodput_rps) if each.shortfall_rps else 0.0,
        )
        for each in best.services
    )
    return structs.replace(best, services=services, notes=(*best.notes, *notes))


def problem_of(
    scenarios: Sequence[ServiceScenario], candidates: Sequence[ComboCandidate], options: ComboOptions
) -> ComboProblem:
    demands = []
    for each in scenarios:
        pattern = each.service.pattern
        demands.append(ServiceDemand(each.service.name, each.rps, pattern.prompt_tokens + pattern.output_tokens))
    limits = {offer.gpu.name: offer.limit for offer in options.offers if offer.limit is not None}
    return ComboProblem(tuple(demands), tuple(candidates), limits, options.objective, options.efficiency)


def scenario_yaml(answer: ComboAnswer, chosen: ServiceScenario) -> str:
    """One service's part of the plan as a scenario file. Raises HeadwayError if the plan has no combos for it."""
    planned = [each for each in answer.plan.combos if each.service == chosen.service.name]
    if not planned:
        raise HeadwayError(f"{chosen.service.name}: the plan has nothing for it")
    usd = sum(each.usd_per_hour * each.count for each in planned)
    head = f"# Planned by headway plan combos: ${usd:,.2f} an hour for {chosen.rps:.4g} requests/s\n"
    found = answer.rehearsals.get(chosen.service.name)
    document = planned_document(chosen, planned, ROUTINGS[0] if found is None else found.routing)
    return head + strict_yaml.dump(with_absolute_paths(document, chosen.base_dir))
