"""Plans of GPU combos for scenarios, and each service's part of a plan as a scenario file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from headway import catalog
from headway.config import strict_yaml
from headway.config.scenario import assemble, variants, with_absolute_paths
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.combos.candidates import Directions, select
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
    ServiceSlo,
    WorkloadPattern,
)
from headway.planning.combos.rehearsal import (
    ATTAINMENT,
    MOST_REQUESTS,
    GoodputProfiler,
    Progress,
    ServiceScenario,
    fleet_sections,
)
from headway.planning.combos.search import deploy
from headway.planning.combos.verify import verify
from headway.planning.rehearsals import RehearsalCache, Simulator
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved

OBJECTIVES: tuple[Objective, ...] = ("co", "mc", "mce")


class ComboOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    offers: tuple[Offer, ...]
    counts: Counts
    objective: Objective = "co"
    efficiency: Efficiency = "served"
    attainment: float = ATTAINMENT
    num_requests: int = MOST_REQUESTS
    per_pair: int | None = 2
    """Sizes of each pair of GPU types that are profiled, the likeliest ones; None: all."""
    directions: Directions = "estimate"
    """How the better direction of a pair of types is chosen."""


class ComboAnswer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    plan: ComboPlan
    selection: Selection
    others: dict[str, ComboPlan]
    num_simulated: int
    num_found: int


def offer_of(text: str, per_server: int | None = None) -> Offer:
    """The offer of "type", "type:count", "type:count:price" or "type:count:price:interruptions"."""
    name, *rest = text.strip().split(":")
    count, price, interruptions, *surplus = *rest, *("" for _ in range(3 - len(rest)))
    try:
        if surplus:
            raise ValueError("too many parts")
        gpu = catalog.gpu(name)
        usd = float(price) if price else None
        return Offer(gpu, int(count) if count else None, usd, per_server, float(interruptions or 0))
    except HeadwayError:
        raise
    except ValueError as error:
        raise HeadwayError(f"{text.strip()!r}; expected type:count:price:interruptions ({error})") from None


def service_scenario(
    document: Mapping[str, Any], places: Places, base_dir: Path, simulator: Simulator, rps: float | None = None
) -> ServiceScenario:
    """The service of a scenario, and its demand: `rps`, or the rate of its arrivals.

    HeadwayError where the scenario has no SLO, no rate, or nothing to plan.
    """
    document = dict(document)
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
    if workload.arrivals is None or workload.sessions is not None or workload.concurrency is not None:
        raise places.error(("workload",), "expected arrivals at a rate, without sessions or concurrency")
    pool = scenario.fleet.pools[0]
    prompt, output, rate = _means(workload, spec.seed, base_dir)
    pattern, slo = WorkloadPattern(spec.name, prompt, output), ServiceSlo(spec.slo.ttft_s, spec.slo.tpot_s)
    service = ComboService(spec.name, pool.model, pool.engine, pattern, slo, pool.network_bytes_per_s)
    document["workload"] = strict_yaml.plain(workload)
    for name in ("variants", "faults", "roles", "combos"):
        document.pop(name, None)
    return ServiceScenario(service, document, base_dir, rate if rps is None else rps, handover)


def _means(workload: WorkloadSpec, seed: int, base_dir: Path) -> tuple[float, float, float]:
    """Mean prompt and output tokens, and requests per second."""
    rows = generate(workload, seed, base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    rate = (len(rows) - 1) / span_s if span_s > 0 else 0.0
    return float(rows.prompt_tokens.mean()), float(rows.output_tokens.mean()), rate


def plan(
    scenarios: Sequence[ServiceScenario],
    options: ComboOptions,
    simulator: Simulator,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> ComboAnswer:
    cache = RehearsalCache(cache_dir)
    profiler = GoodputProfiler(
        {each.service.name: each for each in scenarios}, simulator, cache, options.attainment, options.num_requests,
        progress,
    )  # fmt: skip
    services = [each.service for each in scenarios]
    selection = select(services, options.offers, profiler, options.counts, None, options.per_pair, options.directions)
    problem = problem_of(scenarios, selection.candidates, options)
    others: dict[str, ComboPlan] = {}
    for objective in OBJECTIVES:
        if objective != options.objective:
            other = structs.replace(problem, objective=objective)
            try:
                others[objective] = deploy(other, explain=False)
            except HeadwayError:
                continue  # mce cannot weigh a combo without a price or a limit
            verify(other, others[objective])
    best = deploy(problem)
    verify(problem, best)
    return ComboAnswer(
        plan=best,
        selection=selection,
        others=others,
        num_simulated=profiler.num_simulated,
        num_found=cache.num_found,
    )


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
    """One service's part of the plan, as a scenario file. HeadwayError if the plan has nothing for it."""
    planned = [each for each in answer.plan.combos if each.service == chosen.service.name]
    if not planned:
        raise HeadwayError(f"{chosen.service.name}: the plan has nothing for it")
    named = [(each.combo, each.count, each.goodput_rps, f"combo-{i}") for i, each in enumerate(planned)]
    usd = sum(each.usd_per_hour * each.count for each in planned)
    head = f"# Planned by headway plan combos: ${usd:,.2f} an hour for {chosen.rps:.4g} requests/s\n"
    document = {**chosen.document, **fleet_sections(chosen, named)}
    return head + strict_yaml.dump(with_absolute_paths(document, chosen.base_dir))
