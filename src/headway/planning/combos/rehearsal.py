"""Measures the goodput of combos by simulation: the highest rate at which enough requests of a service are in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from headway import catalog
from headway.config.scenario import Scenario, assemble
from headway.config.strict_yaml import Places
from headway.core.fleet import Gpu
from headway.core.record import Records
from headway.metrics.latency import DefaultSlo, Sample
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import ComboService, GpuCombo, Group, ServiceSlo, WorkloadPattern
from headway.planning.highest_rate import SLOPE, Strains, highest
from headway.planning.rehearsals import OF_SHAPE, Rehearsal, Rehearsals, counted, model_keys, scenario_key
from headway.planning.solver import Floats
from headway.planning.stability import LENGTHEN

HORIZON_S = 10.0
"""Minimum duration of arrivals in one simulation of a profile, as far as `MOST_REQUESTS` permits."""
LIVES = 4
"""Duration of a profile in lifetimes of a request that is as slow as its SLO allows. The first lifetime is not counted.
In a shorter run fewer requests wait and decode than in the long term, so any rate looks sustainable."""
PATIENCE_S = 0.05
"""Seconds per token in a request's lifetime, if the SLO has no limit per token."""
MOST_REQUESTS = 6000
FEWEST_REQUESTS = 150
ATTAINMENT = 0.9
"""Share of requests in time at which a rate still counts as served, as in DistServe."""
START, LOWEST, HIGHEST = 0.97, 1 / 16, 2.0
"""First, lowest and highest rate of a profile, as shares of the fluid estimate."""
PRECISION = 1.06
"""A profile stops when the ratio of an unserved rate to a served one is below this."""
GROWTH, LASTING_GROWTH = 0.02, 0.005
"""Growth of waits, in seconds per second, up to which a rate counts as sustained, in a short and in a long profile. The
growth is about the share by which the rate exceeds the served rate."""
NEGLIGIBLE_S = 0.05
"""Growth of waits that is ignored."""


@dataclass
class ServiceScenario:
    """A service, its demand, and the scenario simulated by profiles."""

    service: ComboService
    document: dict[str, Any]
    base_dir: Path
    rps: float
    handover: dict[str, Any]
    most_requests: int | None = None
    """Maximum number of requests of a simulation; None: unlimited. A trace has a fixed number."""
    find_gpu: Callable[[str], Gpu] = catalog.gpu
    """Looks up a GPU in the scenario, then in the catalog."""


def _rate_strains(slo: ServiceSlo, attainment: float, growth: float, _: Scenario, records: Records) -> Strains:
    end_s = float(records.workload["arrival_s"][-1])
    measured = counted(records, end_s / LIVES, DefaultSlo(slo.ttft_s, slo.tpot_s))
    return strains(measured, end_s, attainment, growth)


@dataclass
class GoodputProfiler:
    """A `Profiler` that simulates. It finds services by `WorkloadPattern.name`.

    Several threads may use it at a time.
    """

    services: dict[str, ServiceScenario]
    rehearsals: Rehearsals
    attainment: float = ATTAINMENT
    num_requests: int = MOST_REQUESTS

    def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        """The highest served rate; 0 if none. Without a name, all requests have the workload's mean lengths."""
        return self._known_rps(self._service(combo, workload, slo), combo, None)

    def lasting_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        """As `goodput_rps`, with `LENGTHEN` times the requests, where waits may grow by at most `LASTING_GROWTH`.

        In a short profile a slowly growing queue stays within the SLO, so the goodput may be too high.
        """
        short_rps = self.goodput_rps(combo, workload, slo)
        return self._known_rps(self._service(combo, workload, slo), combo, short_rps) if short_rps > 0 else 0.0

    def _known_rps(self, chosen: ServiceScenario, combo: GpuCombo, short_rps: float | None) -> float:
        """A goodput from the cache or by a search. `short_rps`: the short profile's goodput, from which a long profile
        starts."""
        is_long = short_rps is not None
        scenario = assemble(self._document(chosen, combo, 1.0), Places(), chosen.base_dir)
        facts = (self.attainment, self.num_requests, is_long)
        key = scenario_key(scenario, *facts, of_code=self.rehearsals.stores)
        known: float | None = self.rehearsals.known(key, float)
        if known is None:
            known = self._search(chosen, combo, short_rps)
            self.rehearsals.keep(key, known)
        return known

    def _service(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> ServiceScenario:
        if workload.name is not None:
            return self.services[workload.name]
        like = next(each for each in self.services.values() if each.service.model.name == combo.model)
        lengths = {"prompt_tokens": round(workload.prompt_tokens), "output_tokens": round(workload.output_tokens)}
        service = structs.replace(like.service, pattern=workload, slo=slo)
        return replace(like, service=service, document={**like.document, "workload": lengths})

    def _search(self, chosen: ServiceScenario, combo: GpuCombo, short_rps: float | None) -> float:
        """A search around the fluid estimate, or around a short profile's goodput. All rates use the same requests."""
        service, longer, growth = chosen.service, 1, GROWTH
        if short_rps is not None:
            longer, growth = LENGTHEN, LASTING_GROWTH
        gpus = {group.gpu: chosen.find_gpu(group.gpu) for group in combo.groups}
        fluid = FluidEstimate(
            {service.model.name: service.model},
            gpus,
            service.engine,
            service.network_bytes_per_s,
            service.coefficients_on,
        )
        most = fluid.goodput_rps(combo, service.pattern, service.slo)
        if most <= 0:
            return 0.0

        strains_at = partial(self.strains, chosen, combo, longer=longer, growth=growth)
        return highest(strains_at, short_rps or START * most, LOWEST * most, HIGHEST * most, PRECISION)

    def strains(
        self, chosen: ServiceScenario, combo: GpuCombo, rate: float, longer: int = 1, growth: float = GROWTH
    ) -> Strains:
        """How near a rate is to the limit, by a simulation of a profile with `longer` times the requests."""
        scenario = assemble(self._document(chosen, combo, rate, longer), Places(), chosen.base_dir)
        measure = partial(_rate_strains, chosen.service.slo, self.attainment, growth)
        return self.rehearsals.simulate(Rehearsal(scenario, measure, Strains))

    def _document(self, chosen: ServiceScenario, combo: GpuCombo, rate: float, longer: int = 1) -> dict[str, Any]:
        num = min(max(round(rate * span_s(chosen.service)), FEWEST_REQUESTS), self.num_requests) * longer
        num = min(num, chosen.most_requests or num)
        workload = {**chosen.document["workload"], "arrivals": rate, "num_requests": num}
        workload.pop("duration_s", None)
        fleet = fleet_sections(chosen, [(combo, 1, None, "profiled")])
        return {**chosen.document, "workload": workload, **fleet}


def span_s(service: ComboService) -> float:
    decode_s = service.pattern.output_tokens * (service.slo.tpot_s or PATIENCE_S)
    return max(HORIZON_S, LIVES * ((service.slo.ttft_s or 0.0) + decode_s))


def strains(measured: Sample, end_s: float, attainment: float, most_growth: float = GROWTH) -> Strains:
    """How near a run is to the limit of a served rate, by three strains: all latencies, TTFT alone, and growth of
    waits.

    A latency counts as a share of its SLO at the quantile `attainment`; the first strain takes the worst latency of
    each request. Growing waits reveal a rate that is too high before SLOs are missed. `end_s`: the end of arrivals.
    `most_growth`: the growth of waits at the limit. The first lifetime is not counted.
    """
    ttft = _log_ratio(measured.ttft_s, measured.slo_s("ttft"))
    tpot = _log_ratio(measured.tpot_s, measured.slo_s("tpot"))
    e2e = _log_ratio(measured.e2e_s, measured.slo_s("e2e"))
    worst = np.maximum(ttft, np.maximum(tpot, e2e))
    worst[~measured.finished] = inf
    late = [float(np.quantile(each, attainment, method="inverted_cdf")) for each in (worst, ttft)]
    waits_s = measured.ttft_s[np.argsort(measured.id)]
    quarter = len(waits_s) // 4
    grown_s = float(np.nanmedian(waits_s[-quarter:]) - np.nanmedian(waits_s[quarter : 2 * quarter]))
    growth = (grown_s - NEGLIGIBLE_S) / (end_s * (1 - 1 / LIVES) / 2)
    excess = growth - most_growth
    # Above the limit, growth shows by which share the rate is too high; below it, growth shows little.
    return (*late, SLOPE * excess if excess > 0 else SLOPE * GROWTH * excess / most_growth)


def _log_ratio(values_s: Floats, limits_s: Floats) -> Floats:
    """Logarithm of each value over its limit; -inf if either is missing."""
    with np.errstate(divide="ignore"):
        ratios = np.log(values_s / limits_s)
    return np.asarray(np.where(np.isnan(ratios), -inf, ratios))


def fleet_sections(
    chosen: ServiceScenario,
    combos: Sequence[tuple[GpuCombo, int, float | None, str]],
    routing: str = "cauchy",
    pools: bool = True,
) -> dict[str, Any]:
    """The sections `fleet`, `combos` and routing of a scenario, from (combo, count, goodput of one, name).

    An aggregated combo alone becomes a pool, which the gateway can serve. Beside other combos it becomes a combo with a
    goodput, so that routing gives it its share of the requests. Without `pools` it always becomes a combo, so that it
    can be scaled.
    """
    fleet, sections = [], []
    for combo, count, goodput_rps, name in combos:
        group = combo.aggregated
        if pools and group is not None and len(combos) == 1:
            fleet.append({**_pool(chosen, group), "replicas": count * group.instances, "name": name})
        else:
            roles = ("aggregated",) if group is not None else ("prefill", "decode")
            parts = {role: _pool(chosen, each) for role, each in zip(roles, combo.groups, strict=True)}
            rate: dict[str, Any] = {} if goodput_rps is None else {"goodput_rps": round(goodput_rps, 4)}
            handover = {} if group is not None else {"handover": chosen.handover}
            sections.append({"name": name, "replicas": count, **parts, **rate, **handover})
    return {"fleet": fleet, "combos": sections, "policies": {"routing": routing}}


def _pool(chosen: ServiceScenario, group: Group) -> dict[str, Any]:
    first = chosen.document["fleet"][0]
    common = model_keys(first, without=OF_SHAPE)
    if "coefficients" in first and group.gpu == chosen.find_gpu(first["gpu"]).name:
        common["coefficients"] = first["coefficients"]
    return {**common, "gpu": group.gpu, "tp": group.tp, "replicas": group.instances}
