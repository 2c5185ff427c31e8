"""Fleets of several models as scenarios, simulated and cached by content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, structs

from headway.config.scenario import Scenario, StepTimes, assemble
from headway.config.spec import Spec
from headway.config.strict_yaml import Places
from headway.core.fleet import pool_name
from headway.core.record import Records
from headway.metrics.columns import floats
from headway.metrics.latency import Sample, slo_masks
from headway.metrics.usage import ReplicaUsage, usage
from headway.planning.capacity.problem import RehearsalMetrics, stopped
from headway.planning.capacity.rehearsal import stopped_by
from headway.planning.combos.problem import Group, Offer
from headway.planning.fleet.problem import FleetPart, FleetRun
from headway.planning.rehearsals import (
    OF_SHAPE,
    Rehearsal,
    counted,
    error_class_of,
    model_keys,
)
from headway.planning.stability import stability
from headway.planning.verdicts import TargetMissedError, watched
from headway.report.model_error import longest
from headway.workload.sources import RequestSource

FORMAT = "headway-parquet"
"""Format of the files of requests."""
HANDOVER = {"mode": "layerwise", "degree": 8}
"""Hand-over from prefill to decode replicas, unless the scenario sets its own."""


class FleetTemplate(Struct, frozen=True):
    """The parts of a scenario that stay the same for all planned fleets."""

    document: dict[str, Any]
    """The document without fleet, combos and policies."""
    pools: dict[str, dict[str, Any]]
    """A pool for each model. Plans use the pool's keys of model and engine."""
    prices: dict[str, float]
    """Price of a GPU-hour, if it differs from the catalog's."""
    base_dir: Path
    coefficients: dict[str, str] = {}
    """File of step-time coefficients by GPU, if they are not the catalog's."""

    def fleet(self, parts: Sequence[FleetPart], policies: Mapping[str, Any]) -> dict[str, Any]:
        """The sections of a scenario for these parts."""
        fleet, combos, names = [], [], set[str]()
        for part in parts:
            groups, name = part.unit.groups, f"{part.model}-{part.unit.groups[0].gpu}"
            if part.unit.aggregated is not None:
                pool = self._pool(part.model, groups[0])
                fleet.append({"name": pool_name(name, names), **pool, "replicas": part.count * groups[0].instances})
            else:
                roles = {
                    role: {**self._pool(part.model, group), "replicas": group.instances}
                    for role, group in zip(("prefill", "decode"), groups, strict=True)
                }
                name = f"{name}-{groups[1].gpu}-{groups[0].num_gpus}to{groups[1].num_gpus}"
                combos.append({"name": pool_name(name, names), "replicas": part.count, **roles, "handover": HANDOVER})
        sections: dict[str, Any] = {"fleet": fleet}
        if combos:
            sections["combos"] = combos
        return {**sections, "policies": dict(policies)}

    def _pool(self, model: str, group: Group) -> dict[str, Any]:
        price = {"usd_per_gpu_hour": self.prices[group.gpu]} if group.gpu in self.prices else {}
        own = model_keys(self.pools[model], without=OF_SHAPE)
        return {**own, "gpu": group.gpu, "tp": group.tp, **price, **self.step_times(group.gpu)}

    def step_times(self, gpu: str) -> dict[str, str]:
        """The key of a pool on this GPU that names its coefficients; empty for the catalog's."""
        return {"coefficients": self.coefficients[gpu]} if gpu in self.coefficients else {}

    def scenario(self, parts: Sequence[FleetPart], policies: Mapping[str, Any], requests: Path) -> Scenario:
        """The fleet with the requests of a file."""
        document = {
            **self.document,
            **self.fleet(parts, policies),
            "workload": {"trace": {"path": str(requests.absolute()), "format": FORMAT}},
        }
        return assemble(document, Places(), self.base_dir)


def prices_of(offers: Sequence[Offer]) -> dict[str, float]:
    return {offer.gpu.name: offer.usd_per_hour for offer in offers if offer.usd_per_hour is not None}


def rehearsal(scenario: Scenario) -> Rehearsal[FleetRun]:
    return Rehearsal(scenario, fleet_run, FleetRun, ("fleet",))


def until_missed(scenario: Scenario, attainment: float) -> Rehearsal[RehearsalMetrics]:
    """The attainment in the rehearsal of a fleet for one model, which ends as soon as it is certain to miss
    `attainment`."""
    spec = scenario.spec
    watch = None if spec.simulation.until_s is not None else partial(_watch, spec, attainment)
    facts = ("fleet", "attainment", attainment)
    return Rehearsal(
        scenario, _worst, RehearsalMetrics, facts, failed=stopped_by, failures=TargetMissedError, watch=watch
    )


def _watch(spec: Spec, attainment: float, source: RequestSource) -> RequestSource:
    return watched(source, {}, attainment, spec.simulation.warmup_s, spec.slo, counts_all=True)


def _worst(scenario: Scenario, records: Records) -> RehearsalMetrics:
    run = fleet_run(scenario, records)
    return structs.replace(stopped(run.num_requests), attainment=run.worst)


def calibrated(template: FleetTemplate, parts: Sequence[FleetPart], requests: Path) -> tuple[FleetPart, ...]:
    """The parts, each with its unmeasured step times."""
    marked = []
    for part in parts:
        alone = template.scenario([part], {"routing": "least-loaded"}, requests)
        used = StepTimes(alone).coefficients.values()
        missing = tuple(dict.fromkeys(what for each in used for what in each.estimated))
        is_measured = all(each.calibrated for each in used)
        marked.append(FleetPart(part.model, part.unit, part.count, is_measured, missing))
    return tuple(marked)


def fleet_run(scenario: Scenario, records: Records, used: ReplicaUsage | None = None) -> FleetRun:
    """The metrics of a fleet. `used`: the usage of its replicas, if it is known."""
    warmup_s = scenario.spec.simulation.warmup_s
    measured = counted(records, warmup_s, scenario.spec.slo)
    has, met = slo_masks(measured)["all"]
    in_time = np.where(has, met, measured.finished)
    arrival_s = floats(records.workload, "arrival_s", measured.id)
    whole = stability(arrival_s, measured.ttft_s, in_time)
    used = used or usage(records, warmup_s)
    factors = longest(error_class_of(scenario, records, used, measured))
    in_time_if_longest = np.where(has, slo_masks(measured, factors)["all"][1], measured.finished)
    return FleetRun(
        attainment=float(in_time.mean()),
        by_model=_by_model(measured, in_time),
        ttft_p99_s=_p99(measured.ttft_s),
        tpot_p99_s=_p99(measured.tpot_s),
        e2e_p99_s=_p99(measured.e2e_s),
        num_requests=len(measured),
        is_growing=whole.is_growing,
        kwh_per_day=used.kwh_per_day(records.end_s - warmup_s),
        longest=factors,
        by_model_if_longest=_by_model(measured, in_time_if_longest) if factors else {},
    )


def _by_model(measured: Sample, in_time: Any) -> dict[str, float]:
    records = measured.records
    codes = records.workload["model"][measured.id]
    num, good = (np.bincount(each, minlength=len(records.models)).tolist() for each in (codes, codes[in_time]))
    return {name: good[code] / num[code] for code, name in enumerate(records.models) if num[code]}


def _p99(values_s: Any) -> float | None:
    known = values_s[~np.isnan(values_s)]
    return float(np.quantile(known, 0.99)) if len(known) else None
