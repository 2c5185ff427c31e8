"""Plans combos for demand that varies over time: static plans for quantiles of the rate, or Algorithm 1 with reserve
capacity, by rehearsal.

A plan for the mean of a demand curve is late in every peak, and one for its highest rate pays for the peak all day.
Between them there are two ways: rent for a quantile of the rate, or scale. Algorithm 1 (Cauchy 3.5.1) tolerates a rate
20% above the assumed goodput, averages two minutes, and starts in 90 s, so it needs a reserve: at size k it assumes a
kth of every goodput. The curve determines which quantile and which k suffice, and which costs less. Each way is
therefore rehearsed from its smallest size, on all of the scenario's own arrivals, until enough requests are in time.
Then the same size must suffice for other arrivals of the same curve. The cheapest size that meets both is planned, by
its cost while requests arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, structs

from headway.config import strict_yaml
from headway.config.scenario import Scenario, assemble, with_absolute_paths
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.metrics.arriving import while_arriving
from headway.metrics.columns import floats
from headway.metrics.latency import DefaultSlo, slo_masks
from headway.planning.combos.plan import ComboOptions, problem_of, profiled
from headway.planning.combos.problem import RESTART_S, ComboCandidate, ComboPlan, Selection, ServiceDemand, ServiceSlo
from headway.planning.combos.rehearsal import ServiceScenario, fleet_sections
from headway.planning.combos.search import deploy
from headway.planning.combos.uncertainty import UncertainDemand
from headway.planning.rehearsals import Rehearsal, Rehearsals, Resources, counted
from headway.planning.stability import stability
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Quantiles of the rate: sizes of a static plan."""
BEYOND = (1.15, 1.3, 1.5)
"""Multiples of the highest rate: further sizes of a static plan, because goodput is measured at a steady rate."""
SIZES = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5)
"""Values of k: sizes of a scaled plan."""
WINDOW_S = 120.0
"""Window over which rates are counted, as in Algorithm 1; shorter if the curve has fewer than ten windows."""
MOST_KINDS = 6
"""Combos from which the autoscaler chooses: those of the plan, and the best others."""
OTHER = 1
"""Added to the scenario's seed to draw other arrivals of the same curve."""
Way = Literal["static", "scaled"]


class Kept(Struct, frozen=True, forbid_unknown_fields=True):
    """Attainment and cost of a fleet over one run of the curve, while requests arrive."""

    num_requests: int
    attainment: float
    attainment_low: float
    """Lower end of the 95% interval of the attainment, by batch means."""
    attainment_high: float
    usd_per_hour: float
    tokens_per_usd: float | None


class Sizing(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet for the curve and its results."""

    way: Way
    k: float
    """Planned rate over the mean rate."""
    quantile: float | None
    """Quantile of the rate, for a static plan."""
    planned_rps: float
    chance: float
    """Share of the time in which demand does not exceed the initial fleet's goodput."""
    plan: ComboPlan
    """The initial fleet."""
    run: Kept
    other: Kept | None = None
    """Results on other arrivals; None if the first run misses."""
    is_met: bool = False
    """Whether enough requests of both runs are in time."""


class CurveAnswer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    service: str
    mean_rps: float
    peak_rps: float
    """The highest rate of any window."""
    window_s: float
    sizings: tuple[Sizing, ...]
    """All rehearsed sizes, by way and size."""
    best: int | None
    """Index of the cheapest met sizing in `sizings`; None if no sizing is met."""
    selection: Selection
    num_simulated: int
    num_found: int

    @property
    def chosen(self) -> Sizing | None:
        return None if self.best is None else self.sizings[self.best]


def plan_curve(chosen: ServiceScenario, options: ComboOptions, resources: Resources) -> CurveAnswer:
    """The cheapest fleet for a scenario's own arrivals, static or scaled. Raises HeadwayError where the arrivals have
    no curve."""
    profiler, selection = profiled([chosen], options, resources)
    rates, window_s = window_rates(chosen)
    rehearsed = CurveRehearsal(chosen, options, selection.candidates, rates, Rehearsals(resources))
    sizings = (*rehearsed.static(), *rehearsed.scaled())
    met = [i for i, each in enumerate(sizings) if each.is_met]
    return CurveAnswer(
        service=chosen.service.name,
        mean_rps=float(rates.mean()),
        peak_rps=float(rates.max()),
        window_s=window_s,
        sizings=sizings,
        best=min(met, key=lambda i: _usd(sizings[i])) if met else None,
        selection=selection,
        num_simulated=profiler.rehearsals.num_simulated + rehearsed.rehearsals.num_simulated,
        num_found=profiler.rehearsals.num_found + rehearsed.rehearsals.num_found,
    )


def _usd(sizing: Sizing) -> float:
    return sizing.run.usd_per_hour if sizing.other is None else sizing.other.usd_per_hour


def window_rates(chosen: ServiceScenario) -> tuple[np.ndarray, float]:
    """Requests per second of each full window of the scenario's arrivals, and the windows' length."""
    workload = msgspec.convert(chosen.document["workload"], WorkloadSpec)
    rows = generate(workload, int(chosen.document.get("seed", 0)), chosen.base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) else 0.0
    if span_s <= 0:
        raise HeadwayError(f"{chosen.service.name}: workload: expected arrivals over some time")
    window_s = min(WINDOW_S, span_s / 10)
    num = int(span_s // window_s)
    counts = np.bincount(((rows.arrival_s - rows.arrival_s[0]) // window_s).astype(int), minlength=num)[:num]
    return counts / window_s, window_s


@dataclass
class CurveRehearsal:
    chosen: ServiceScenario
    options: ComboOptions
    candidates: Sequence[ComboCandidate]
    rates: np.ndarray
    """Requests per second of each window."""
    rehearsals: Rehearsals

    def static(self) -> tuple[Sizing, ...]:
        """Static plans for increasing quantiles of the rate, until one is met. Equal plans are tried once."""
        demand = self._demand()
        sizes = [(q, demand.at(q)) for q in QUANTILES] + [(1.0, factor * demand.at(1.0)) for factor in BEYOND]
        return tuple(self._until_met(("static", q, rps) for q, rps in sizes))

    def scaled(self) -> tuple[Sizing, ...]:
        """Plans of increasing size that Algorithm 1 scales, until one is met."""
        mean_rps = float(self.rates.mean())
        return tuple(self._until_met(("scaled", None, k * mean_rps) for k in SIZES))

    def _demand(self) -> UncertainDemand:
        rates = np.sort(self.rates)
        at = np.arange(len(rates)) / max(len(rates) - 1, 1)
        return UncertainDemand(self.chosen.service.name, tuple(at.tolist()), tuple(rates.tolist()))

    def _until_met(self, sizes: Iterator[tuple[Way, float | None, float]]) -> Iterator[Sizing]:
        last: ComboPlan | None = None
        for way, quantile, rps in sizes:
            found = self._deployed(rps)
            is_same = last is not None and last.counts == found.counts
            if found.status == "short" or not found.combos or (way == "static" and is_same):
                continue
            last = found
            sizing = self._rehearsed(way, quantile, rps, found)
            yield sizing
            if sizing.is_met:
                return

    def _deployed(self, rps: float) -> ComboPlan:
        problem = problem_of([self.chosen], self.candidates, self.options)
        demands = tuple(ServiceDemand(each.service, rps, each.tokens_per_request) for each in problem.demands)
        return deploy(structs.replace(problem, demands=demands), explain=False)

    def _rehearsed(self, way: Way, quantile: float | None, rps: float, found: ComboPlan) -> Sizing:
        k = rps / float(self.rates.mean())
        document = sized_document(self.chosen, found, self.candidates, self.options, way, k)
        goodput_rps = sum(each.count * each.goodput_rps for each in found.combos)
        run = self._run(document, 0)
        is_met = run.attainment >= self.options.attainment
        other = self._run(document, OTHER) if is_met else None
        return Sizing(
            way=way,
            k=k,
            quantile=quantile,
            planned_rps=rps,
            chance=self._demand().chance(goodput_rps),
            plan=found,
            run=run,
            other=other,
            is_met=other is not None and other.attainment >= self.options.attainment,
        )

    def _run(self, document: dict[str, Any], seed: int) -> Kept:
        seeded = {**document, "seed": int(document.get("seed", 0)) + seed}
        scenario = assemble(seeded, Places(), self.chosen.base_dir)
        return self.rehearsals.one(Rehearsal(scenario, partial(_kept, self.chosen.service.slo), Kept, ("curve", seed)))


def _kept(slo: ServiceSlo, _: Scenario, records: Records) -> Kept:
    measured = counted(records, 0.0, DefaultSlo(slo.ttft_s, slo.tpot_s))
    in_time = slo_masks(measured)["all"][1]
    arrival_s = floats(records.workload, "arrival_s", measured.id)
    found, served = stability(arrival_s, measured.ttft_s, in_time), while_arriving(measured, in_time)
    return Kept(
        found.num_requests,
        found.attainment,
        found.attainment_low,
        found.attainment_high,
        served.usd_per_hour,
        served.tokens_per_usd,
    )


def sized_document(
    chosen: ServiceScenario,
    found: ComboPlan,
    candidates: Sequence[ComboCandidate],
    options: ComboOptions,
    way: Way,
    k: float,
) -> dict[str, Any]:
    """The scenario with a fleet of size k. If scaled, it includes the best other combos, with no initial instances."""
    kinds = [(each.combo, each.count, each.goodput_rps) for each in found.combos]
    if way == "static":
        named = [(combo, count, goodput_rps, f"combo-{i}") for i, (combo, count, goodput_rps) in enumerate(kinds)]
        return {**chosen.document, **fleet_sections(chosen, named, options.routings[0])}
    planned = {combo.label for combo, _, _ in kinds}
    kinds += [(each.combo, 0, each.goodput_rps) for each in candidates if each.combo.label not in planned]
    kinds = kinds[: max(MOST_KINDS, len(planned))]
    named = [(combo, count, goodput_rps / k, f"combo-{i}") for i, (combo, count, goodput_rps) in enumerate(kinds)]
    sections = fleet_sections(chosen, named, options.routings[0], pools=False)
    for each in sections["combos"]:
        each["min_replicas"] = 0
        for role in ("prefill", "decode", "aggregated"):
            if role in each:
                each[role] = {"start_s": RESTART_S, **each[role]}
    used = {gpu for combo, _, _ in kinds for gpu in combo.gpus}
    limits = {each.gpu.name: each.limit for each in options.offers if each.limit is not None and each.gpu.name in used}
    usd = {f"combo-{i}": combo.usd_per_hour for i, (combo, _, _) in enumerate(kinds)}
    scaling: dict[str, Any] = {"name": "combos", "gpu_limits": limits}
    if options.objective == "co" and all(usd.values()):
        scaling["cost_efficiency"] = {name: round(goodput_rps / usd[name], 6) for _, _, goodput_rps, name in named}
    policies = {**sections["policies"], "scaling": scaling}
    return {**chosen.document, **sections, "policies": policies}


def curve_yaml(answer: CurveAnswer, chosen: ServiceScenario, options: ComboOptions) -> str:
    """The planned fleet as a scenario file. Raises HeadwayError if no size is met."""
    best = answer.chosen
    if best is None:
        raise HeadwayError(f"{chosen.service.name}: no size keeps enough requests in time")
    kept = best.other or best.run
    head = (
        f"# Planned by headway plan combos --curve: {best.way}, k {best.k:.3g}; ${kept.usd_per_hour:,.2f} an hour, "
        f"{kept.attainment:.1%} in time\n"
    )
    document = sized_document(chosen, best.plan, answer.selection.candidates, options, best.way, best.k)
    return head + strict_yaml.dump(with_absolute_paths(document, chosen.base_dir))
