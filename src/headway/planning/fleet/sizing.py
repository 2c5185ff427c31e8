"""The number of GPUs of one kind that serves all requests of one model within the SLOs, by rehearsals in any
process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from msgspec import structs

from headway.catalog.load import coefficients_in
from headway.config.fleet import own_of
from headway.config.scenario import Scenario, StepTimes
from headway.core.errors import HeadwayError
from headway.planning.capacity.bounds import lower_bounds
from headway.planning.capacity.plan import arriving
from headway.planning.capacity.problem import RehearsalMetrics, Targets
from headway.planning.capacity.rehearsal import rehearsal as of_capacity
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
from headway.planning.fleet.problem import FleetPart
from headway.planning.fleet.rehearsal import FleetTemplate, calibrated, until_missed
from headway.planning.fleet.sizes import Kind, Sizes, UnitSizes
from headway.planning.rehearsals import Rehearsals, Resources, Simulator
from headway.workload.read import read
from headway.workload.table import Workload

MOST_UNITS = 64
SPLITS = 3
"""Pairs of GPU types that are tried for prefill and decode, the best by estimated tokens per dollar."""
COUNTS = Counts(prefill=(1, 2), decode=(1, 2, 3, 4, 6), aggregated=())


@dataclass(frozen=True)
class SizingTask:
    """A model's requests and the GPUs to try, in any process."""

    template: FleetTemplate
    model: str
    rate: float
    """Requests of this model per second."""
    requests: Path
    """Requests of this model only."""
    offers: tuple[Offer, ...]
    has_split: bool
    """Whether to size separate prefill and decode replicas, too."""
    tps: tuple[int, ...]
    attainment: float
    routing: str
    simulator: Simulator
    cache_dir: Path | None
    kinds: tuple[Kind, ...] = ()
    """What is known; empty: nothing."""
    wanted: tuple[int, ...] = ()
    """The kinds to make exact; none: the cheapest one."""


@dataclass(frozen=True)
class ModelSizes:
    """The kinds of GPUs for a model, as far as they are known."""

    kinds: tuple[Kind, ...] = ()
    num_simulated: int = 0
    num_found: int = 0


def size(task: SizingTask) -> ModelSizes:
    """Rehearse until the wanted kinds are exact."""
    trials = _Trials(task)
    kinds = task.kinds or tuple(_kinds(task))
    sizes = Sizes(kinds, trials, task.attainment)
    for i in task.wanted:
        sizes.size(kinds[i])
    if not task.wanted:
        sizes.cheapest()
    for kind in kinds:
        if kind.reached is None and not kind.is_split and kind.best is None and not kind.open:
            kind.reached = trials.reached(kind)
    return ModelSizes(kinds, trials.rehearsals.num_simulated, trials.rehearsals.num_found)


class _Trials:
    """Rehearses units of a model."""

    def __init__(self, task: SizingTask) -> None:
        self.task = task
        self.rehearsals = Rehearsals(Resources(task.simulator, task.cache_dir))
        self._one: dict[GpuCombo, Scenario] = {}

    def __call__(self, unit: GpuCombo, number: int) -> RehearsalMetrics:
        """As in `Evaluate`. Requests without an SLO count only for separate prefill and decode replicas."""
        if unit.aggregated is None:
            return self.rehearsals.one(until_missed(self._scenario(unit, number), self.task.attainment))
        return self._alone(unit, number, stops=True)

    def _alone(self, unit: GpuCombo, number: int, stops: bool) -> RehearsalMetrics:
        targets = Targets(attainment=self.task.attainment)
        wanted = of_capacity(self._scenario(unit, number), targets, stops)
        return self.rehearsals.one(replace(wanted, facts=("until missed", self.task.attainment) if stops else ()))

    def reached(self, kind: Kind) -> float | None:
        """The highest attainment of any unit with the most that were tried, which none of them meets."""
        tried = [self._alone(each.unit, max(each.measured), stops=False) for each in kind.units if each.measured]
        return max((each.attainment for each in tried if each.attainment is not None), default=None)

    def _scenario(self, unit: GpuCombo, number: int) -> Scenario:
        """The scenario of so many replicas, read once for any number; or of so many combos."""
        if unit.aggregated is None:
            return _scenario(self.task, unit, number)
        if unit not in self._one:
            self._one[unit] = _scenario(self.task, unit)
        one = self._one[unit]
        pools = tuple([structs.replace(each, replicas=number) for each in one.fleet.pools])
        fleet = tuple([structs.replace(each, replicas=number) for each in one.spec.fleet])
        return replace(one, spec=structs.replace(one.spec, fleet=fleet), fleet=structs.replace(one.fleet, pools=pools))


def _scenario(task: SizingTask, unit: GpuCombo, number: int = 1) -> Scenario:
    return task.template.scenario([FleetPart(task.model, unit, number)], {"routing": task.routing}, task.requests)


def _kinds(task: SizingTask) -> Iterator[Kind]:
    """A kind for each type of GPU, and one for each of the most promising pairs of types."""
    table = read(task.requests)
    service = _service(task, table)
    efficiencies = None if service is None else Efficiencies(service, task.offers)
    likely = partial(_likely, task, efficiencies)
    for offer in task.offers:
        tps = tuple(tp for tp in task.tps if tp <= min(offer.server, offer.limit or offer.server)) or (1,)
        yield Kind([_replica(task, offer, tp, table, likely) for tp in tps])
    pairs = list(_likely_units(task, efficiencies)) if task.has_split and efficiencies is not None else []
    most = max((_most_units(unit, task.offers) for unit in pairs), default=0)
    for unit in pairs:
        used = calibrated(task.template, [FleetPart(task.model, unit, 1)], task.requests)[0].uncalibrated
        yield Kind([UnitSizes(unit, likely(unit), most, uncalibrated=used)])


def _replica(
    task: SizingTask, offer: Offer, tp: int, table: Workload, likely: Callable[[GpuCombo], float]
) -> UnitSizes:
    """One replica on GPUs of one type; or why no number of them is enough."""
    group = Group(offer.gpu.name, tp)
    unit = GpuCombo(task.model, usd_per_hour((group,), {offer.gpu.name: offer}), aggregated=group)
    most = min(MOST_UNITS, 4 * (offer.limit or MOST_UNITS))
    try:
        one = _scenario(task, unit)
        task.simulator.policies(one)
    except HeadwayError as error:
        return UnitSizes(unit, inf, most, str(error).rpartition("fleet[0]: ")[2])
    pool, used = one.fleet.pools[0], next(iter(StepTimes(one).coefficients.values()))
    requests, _ = arriving(one.spec, table)
    bounds = lower_bounds(pool, requests, Targets(attainment=task.attainment), used)
    if bounds.reason is not None:
        return UnitSizes(unit, inf, most, bounds.reason)
    return UnitSizes(unit, likely(unit), most, uncalibrated=used.estimated)


def _likely(task: SizingTask, efficiencies: Efficiencies | None, unit: GpuCombo) -> float:
    """The number of units that the requests need by the step-time model; infinite if it is unknown."""
    if efficiencies is None:
        return inf
    try:
        goodput_rps = efficiencies.goodput_rps(unit)
    except HeadwayError:
        return inf
    return task.rate / goodput_rps if goodput_rps > 0 else inf


def _most_units(unit: GpuCombo, offers: Sequence[Offer]) -> int:
    limits = {offer.gpu.name: offer.limit for offer in offers}
    most = [limit // num for gpu, num in unit.gpus.items() if (limit := limits[gpu]) is not None]
    return max(1, min([MOST_UNITS, *most]))


def _likely_units(task: SizingTask, efficiencies: Efficiencies) -> Iterator[GpuCombo]:
    """The unit with the most estimated tokens per dollar for each pair of types; the best pairs first."""
    combos, _ = enumerate_combos(efficiencies.service.model, efficiencies.service.engine, task.offers, COUNTS)
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


def _service(task: SizingTask, rows: Workload) -> ComboService | None:
    """The model's requests as a service of mean lengths; None if the model fits into no offer."""
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
