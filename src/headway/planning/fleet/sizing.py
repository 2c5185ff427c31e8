"""The number of GPUs of one kind that serves all requests of one model within the SLOs, by the search of `plan
capacity`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from headway.catalog.load import coefficients_in
from headway.config.fleet import own_of
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.planning.capacity.plan import CapacityOptions
from headway.planning.capacity.plan import plan as plan_capacity
from headway.planning.capacity.problem import (
    CandidateBounds,
    CandidateResult,
    CapacityCandidate,
    CapacityProblem,
    RehearsalMetrics,
    Situation,
    Targets,
)
from headway.planning.capacity.rehearsal import CapacityRehearsal
from headway.planning.capacity.search import cheapest_fleet
from headway.planning.combos.candidates import Efficiencies, enumerate_combos, usd_per_hour
from headway.planning.combos.problem import (
    ComboService,
    Counts,
    GpuCombo,
    Group,
    Offer,
    ServiceSlo,
    WorkloadPattern,
)
from headway.planning.fleet.problem import FleetPart, SizedOption
from headway.planning.fleet.rehearsal import FleetTemplate, calibrated, until_missed
from headway.planning.rehearsals import Rehearsals, Resources, Simulator, Source
from headway.workload.files import from_parquet

MOST_UNITS = 64
SPLITS = 3
"""Pairs of GPU types that are tried for prefill and decode, the best by estimated tokens per dollar."""
COUNTS = Counts(prefill=(1, 2), decode=(1, 2, 3, 4, 6), aggregated=())


@dataclass(frozen=True)
class SizingTask:
    """A model's requests and the GPUs to try, in any process."""

    template: FleetTemplate
    model: str
    requests: Path
    """Requests of this model only."""
    offers: tuple[Offer, ...]
    is_split: bool
    """Whether to size separate prefill and decode replicas on pairs of the offers, and not replicas of one type."""
    tps: tuple[int, ...]
    attainment: float
    routing: str
    simulator: Simulator
    cache_dir: Path | None


@dataclass(frozen=True)
class SizedOptions:
    options: tuple[SizedOption, ...]
    num_simulated: int
    num_found: int


def size(task: SizingTask) -> SizedOptions:
    return _split(task) if task.is_split else _together(task)


def _together(task: SizingTask) -> SizedOptions:
    """The fewest GPUs of the only offer, by `plan capacity`."""
    offer, template = task.offers[0], task.template
    unknown_unit = GpuCombo(task.model, offer.price, aggregated=Group(offer.gpu.name))
    tps = tuple(tp for tp in task.tps if tp <= min(offer.server, offer.limit or offer.server))
    pool = {**template.pools[task.model], "gpu": offer.gpu.name, **template.step_times(offer.gpu.name)}
    document = {
        **template.document,
        "workload": {"trace": {"path": str(task.requests.absolute())}},
        "fleet": [pool],
        "policies": {"routing": task.routing},
    }
    options = CapacityOptions(
        gpus=(offer.gpu.name,),
        tps=tps or (1,),
        targets=Targets(attainment=task.attainment),
        situations=(),
        max_replicas=min(MOST_UNITS, 4 * (offer.limit or MOST_UNITS)),
    )
    try:
        source, resources = Source(document, Places(), template.base_dir), Resources(task.simulator, task.cache_dir)
        best, done = plan_capacity(source, options, resources, stops=True)
        reached = _reached(best.options, done) if best.choice is None else None
    except HeadwayError as error:
        return SizedOptions((SizedOption(task.model, unknown_unit, None, None, str(error)),), 0, 0)
    if best.choice is None or best.measured is None:
        reason = best.options[0].reason if best.options else "no shape is possible"
        sized = SizedOption(task.model, unknown_unit, None, reached, reason)
    else:
        group = Group(offer.gpu.name, best.choice.candidate.parallel.tp)
        price = usd_per_hour((group,), {offer.gpu.name: offer})
        unit = GpuCombo(task.model, price, aggregated=group)
        sized = SizedOption(
            task.model, unit, best.choice.replicas, best.measured.attainment, uncalibrated=best.choice.uncalibrated
        )
    return SizedOptions((sized,), done.rehearsals.num_simulated, done.rehearsals.num_found)


def _reached(options: Sequence[CandidateResult], rehearsal: CapacityRehearsal) -> float | None:
    """The highest attainment of any candidate with the most replicas that were tried, which none of them meets."""
    tried = [(each.candidate, each.points[-1].replicas) for each in options if each.points]
    reached = [rehearsal(*each, Situation()).attainment for each in tried]
    return max((each for each in reached if each is not None), default=None)


def _split(task: SizingTask) -> SizedOptions:
    """The fewest units of the most promising pairs of GPU types, by the search of `plan capacity`."""
    units = list(_likely_units(task))
    if not units:
        return SizedOptions((), 0, 0)
    by_label = {unit.label: unit for unit in units}
    rehearsals = Rehearsals(Resources(task.simulator, task.cache_dir))

    def evaluate(candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        part = FleetPart(task.model, by_label[candidate.gpu], replicas)
        scenario = task.template.scenario([part], {"routing": task.routing}, task.requests)
        return rehearsals.one(until_missed(scenario, task.attainment))

    candidates = tuple(
        CapacityCandidate(unit.label, Parallel(1), task.routing, max(unit.usd_per_hour, 1e-9)) for unit in units
    )
    most = max(_most_units(unit, task.offers) for unit in units)
    problem = CapacityProblem(candidates, Targets(attainment=task.attainment), max_replicas=most)
    found = cheapest_fleet(problem, [CandidateBounds()] * len(units), evaluate)
    options = []
    for each in found.options:
        unit = by_label[each.candidate.gpu]
        used = calibrated(task.template, [FleetPart(task.model, unit, 1)], task.requests)[0].uncalibrated
        point = next((p.measured.attainment for p in each.points if p.replicas == each.replicas), None)
        options.append(SizedOption(task.model, unit, each.replicas, point, each.reason, used))
    return SizedOptions(tuple(options), rehearsals.num_simulated, rehearsals.num_found)


def _most_units(unit: GpuCombo, offers: Sequence[Offer]) -> int:
    limits = {offer.gpu.name: offer.limit for offer in offers}
    most = [limit // num for gpu, num in unit.gpus.items() if (limit := limits[gpu]) is not None]
    return max(1, min([MOST_UNITS, *most]))


def _likely_units(task: SizingTask) -> Iterator[GpuCombo]:
    """The unit with the most estimated tokens per dollar for each pair of types; the best pairs first."""
    service = _service(task)
    if service is None:
        return
    combos, _ = enumerate_combos(service.model, service.engine, task.offers, COUNTS)
    efficiencies = Efficiencies(service, task.offers)
    best: dict[tuple[str, ...], tuple[float, GpuCombo]] = {}
    for combo in combos:
        served = efficiencies.estimated(combo)
        value = float("inf") if served is None else served
        pair = tuple(group.gpu for group in combo.groups)
        if value > 0 and value > best.get(pair, (0.0, combo))[0]:
            best[pair] = (value, combo)
    ranked = sorted(best.values(), key=lambda each: -each[0])
    for _, combo in ranked[:SPLITS]:
        yield structs.replace(combo, model=task.model)


def _service(task: SizingTask) -> ComboService | None:
    """The model's requests as a service of mean lengths; None if the model fits into no offer."""
    rows = from_parquet(task.requests)
    pattern = WorkloadPattern(None, float(rows.prompt_tokens.mean()), float(rows.output_tokens.mean()))
    some = _some_scenario(task)
    if some is None:
        return None
    pool, own = some.fleet.pools[0], own_of(some.spec, some.places)
    names = [offer.gpu.name for offer in task.offers]
    files, engine = task.template.coefficients, pool.engine
    used = {
        name: coefficients_in(Path(files[name]), name, engine.name)
        if name in files
        else own.coefficients(name, engine.name, engine.version)
        for name in names
    }
    slo = task.template.document.get("slo") or {}
    limits = ServiceSlo(slo.get("ttft_s"), slo.get("tpot_s"))
    return ComboService(task.model, pool.model, pool.engine, pattern, limits, pool.network_bytes_per_s, used)


def _some_scenario(task: SizingTask) -> Scenario | None:
    """The model on any offer and shape that holds it."""
    for offer in task.offers:
        for tp in task.tps:
            unit = GpuCombo(task.model, 0.0, aggregated=Group(offer.gpu.name, tp))
            try:
                part = FleetPart(task.model, unit, 1)
                return task.template.scenario([part], {"routing": task.routing}, task.requests)
            except HeadwayError:
                continue
    return None
