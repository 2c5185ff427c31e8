"""Rehearsals: a scenario's workload on a fleet of equal replicas, simulated and cached by content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from msgspec import structs

from headway import catalog
from headway.config import strict_yaml
from headway.config.scenario import Scenario, StepTimes, assemble
from headway.config.spec import Spec
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Fault
from headway.core.record import Records
from headway.metrics.columns import Floats, Mask
from headway.metrics.latency import SLO_KINDS, slo_masks
from headway.metrics.usage import usage
from headway.planning.capacity.problem import (
    CapacityCandidate,
    RehearsalMetrics,
    Situation,
    Targets,
    misses,
    stopped,
)
from headway.planning.rehearsals import (
    Rehearsal,
    Rehearsals,
    content_key,
    counted,
    error_class_of,
    model_keys,
    scenario_key,
)
from headway.planning.verdicts import TargetMissedError, watched
from headway.report.model_error import longest
from headway.workload.sources import RequestSource
from headway.workload.spec import WorkloadSpec

FRACTION = 0.99


def rehearsal(chosen: Scenario, targets: Targets, stops: bool) -> Rehearsal[RehearsalMetrics]:
    """The rehearsal of a scenario. `stops`: end as soon as a target is certain to be missed, with `stopped`."""
    watch = partial(_watch, chosen.spec, targets) if stops and chosen.spec.simulation.until_s is None else None
    return Rehearsal(chosen, _metrics, RehearsalMetrics, failed=stopped_by, failures=TargetMissedError, watch=watch)


def _watch(spec: Spec, targets: Targets, source: RequestSource) -> RequestSource:
    by_kind = {kind: getattr(targets, f"{kind}_p99_s") for kind in SLO_KINDS}
    limits = {kind: (FRACTION, limit_s) for kind, limit_s in by_kind.items() if limit_s is not None}
    return watched(source, limits, targets.attainment, spec.simulation.warmup_s, spec.slo)


def stopped_by(error: HeadwayError) -> RehearsalMetrics:
    assert isinstance(error, TargetMissedError)
    return stopped(error.num_requests)


@dataclass
class CapacityRehearsal:
    """The evaluator: finds rehearsals in the cache, or simulates them."""

    document: dict[str, Any]
    places: Places
    base_dir: Path
    targets: Targets
    regions: tuple[str, ...]
    span_s: float
    rehearsals: Rehearsals
    _read: dict[CapacityCandidate, Scenario] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock)
    """Held while a scenario is made, because a search may rehearse in several threads that wait for workers."""

    def __call__(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        """Simulate `replicas` replicas of a candidate in a situation (`CapacityEvaluator`)."""
        return self._rehearsed(candidate, replicas, situation, stops=False)

    def until_missed(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        """As a call; but a run that misses a target ends as soon as that is certain, with `stopped`."""
        return self._rehearsed(candidate, replicas, situation, stops=True)

    def meets_targets(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> bool:
        """Whether the metrics would meet all targets. A run that misses one ends as soon as that is certain."""
        return self.if_met(candidate, replicas, situation) is not None

    def if_met(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics | None:
        """The metrics of a run that meets all targets; None if it misses one, as in `meets_targets`."""
        measured = self._rehearsed(candidate, replicas, situation, stops=True)
        return None if misses(measured, self.targets) else measured

    def _rehearsed(
        self, candidate: CapacityCandidate, replicas: int, situation: Situation, stops: bool
    ) -> RehearsalMetrics:
        """The metrics from the cache or a run.

        A user's own policies are not cached, because their code is not part of the key.
        """
        with self._lock:
            chosen = self.scenario(candidate, replicas, situation)
        wanted = rehearsal(chosen, self.targets, stops)
        if ":" in candidate.policy or not self.rehearsals.keeps:
            return self.rehearsals.simulate(wanted)
        key = scenario_key(chosen)
        found: RehearsalMetrics | None = self.rehearsals.known(key, RehearsalMetrics)
        if found is None and stops:
            found = self.rehearsals.known(self._missed_key(key), RehearsalMetrics)
        if found is not None:
            return found
        measured = self.rehearsals.simulate(wanted)
        self.rehearsals.keep(self._missed_key(key) if stops and measured.is_stopped else key, measured)
        return measured

    def _missed_key(self, key: str) -> str:
        """The key of runs that ended early, for these targets."""
        return content_key([key, self.targets, "missed"])

    @property
    def num_requests(self) -> int | None:
        """Requests of a rehearsal; None for a trace or a duration, which cannot be extended."""
        workload = self.document["workload"]
        return None if "trace" in workload or "duration_s" in workload else workload.get("num_requests")

    def longer(self, factor: int) -> CapacityRehearsal:
        """These rehearsals with `factor` times the requests."""
        num = (self.num_requests or 0) * factor
        document = {**self.document, "workload": {**self.document["workload"], "num_requests": num}}
        return replace(self, document=document, span_s=self.span_s * factor)

    def lengthen(self, factor: int) -> None:
        """Rehearse with `factor` times the requests from now on."""
        more = self.longer(factor)
        self.document, self.span_s, self._read = more.document, more.span_s, {}

    def scenario(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> Scenario:
        """The candidate's scenario with so many replicas in a situation, changed by value; its document stays."""
        base = self._one_of(candidate)
        shares = _shares(replicas, len(self.regions)) or [replicas]
        in_regions = sum(shares[: situation.lost_regions])
        lost = range(min(replicas, max(situation.lost_replicas, in_regions)))
        at_s = self.span_s / 2 / (situation.load if "trace" in self.document["workload"] else 1.0)
        sizes = [(i, num) for i, num in enumerate(shares) if num]
        spec = structs.replace(
            base.spec,
            fleet=tuple([structs.replace(base.spec.fleet[i], replicas=num) for i, num in sizes]),
            workload=self._loaded(base, situation.load),
            faults=tuple([Fault(at_s, i) for i in lost]),
        )
        pools = tuple([structs.replace(base.fleet.pools[i], replicas=num) for i, num in sizes])
        return replace(base, spec=spec, fleet=structs.replace(base.fleet, pools=pools))

    def _one_of(self, candidate: CapacityCandidate) -> Scenario:
        """The candidate's scenario with one replica, or one per region; it is read once."""
        found = self._read.get(candidate)
        if found is None:
            document = fleet_document(self.document, candidate, len(self.regions) or 1, self.regions)
            found = self._read[candidate] = assemble(document, self.places, self.base_dir)
        return found

    def _loaded(self, base: Scenario, load: float) -> WorkloadSpec:
        """The workload with `load` times as many requests per second."""
        if load == 1:
            return base.spec.workload
        changed = with_load(self.document["workload"], load)
        return strict_yaml.convert(changed, WorkloadSpec, self.places, ("workload",))


def _metrics(chosen: Scenario, records: Records) -> RehearsalMetrics:
    """The metrics of records. Percentiles count an unfinished request as infinitely late."""
    warmup_s = chosen.spec.simulation.warmup_s
    measured = counted(records, warmup_s, chosen.spec.slo)
    tpot_s = np.where(measured.finished & np.isnan(measured.tpot_s), 0.0, measured.tpot_s)
    attained = slo_masks(measured)
    has, good = attained["all"]
    window_s = records.end_s - warmup_s
    used = usage(records, warmup_s)
    wanted = error_class_of(chosen, records, used, measured)
    factors = longest(wanted)
    num_good = int((good if has.any() else measured.finished).sum())
    return RehearsalMetrics(
        ttft_p99_s=_p99(np.where(measured.finished, measured.ttft_s, inf)),
        tpot_p99_s=_p99(np.where(measured.finished, tpot_s, inf)),
        e2e_p99_s=_p99(np.where(measured.finished, measured.e2e_s, inf)),
        attainment=_attainment(attained) if has.any() else None,
        goodput_rps=num_good / window_s if window_s > 0 else None,
        busy_share=used.busy_share(list(range(len(records.replicas)))),
        num_requests=len(measured),
        num_completed=int(measured.finished.sum()),
        calibrated=all(each.calibrated for each in StepTimes(chosen).pools),
        wait_growth=_growth(np.where(measured.finished, measured.ttft_s, inf)),
        load=wanted.load,
        longest=factors,
        attainment_if_longest=_attainment(slo_masks(measured, factors)) if factors and has.any() else None,
        kwh_per_day=used.kwh_per_day(window_s),
    )


def _attainment(attained: Mapping[str, tuple[Mask, Mask]]) -> float:
    has, good = attained["all"]
    return float(good.sum() / has.sum())


def fleet_document(
    document: Mapping[str, Any], candidate: CapacityCandidate, replicas: int, regions: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A scenario's document with this fleet and these policies in place of its own."""
    first = document["fleet"][0]
    common = model_keys(first)
    if candidate.speculates is False:
        common.pop("speculative", None)
    if candidate.gpu in (first["gpu"], _catalog_name(first["gpu"])):
        common |= {name: first[name] for name in ("usd_per_gpu_hour", "coefficients") if name in first}
    pool = {**common, "gpu": candidate.gpu, "tp": candidate.parallel.tp}
    if regions:
        shares = zip(regions, _shares(replicas, len(regions)), strict=True)
        fleet = [{"name": region, **pool, "replicas": n, "region": region} for region, n in shares if n]
    else:
        fleet = [{"name": "planned", **pool, "replicas": replicas}]
    policies = {**document.get("policies", {}), "routing": candidate.routing, "ordering": candidate.ordering}
    return {**document, "fleet": fleet, "policies": policies}


def _catalog_name(gpu: str) -> str | None:
    """The catalog's name of a GPU; None for the scenario's own GPU."""
    try:
        return catalog.gpu(gpu).name
    except HeadwayError:
        return None


def with_load(workload: Mapping[str, Any], load: float) -> dict[str, Any]:
    """A workload section with `load` times the requests per second of the same kind."""
    changed = dict(workload)
    if load == 1:
        return changed
    if "trace" in workload:
        trace = workload["trace"]
        trace = {"path": trace} if isinstance(trace, str) else trace
        changed["trace"] = {**trace, "rate_scale": trace.get("rate_scale", 1.0) * load}
    elif "concurrency" in workload:
        changed["concurrency"] = max(1, round(workload["concurrency"] * load))
    else:
        arrivals = workload["arrivals"]
        if isinstance(arrivals, int | float):
            changed["arrivals"] = arrivals * load
        elif "rates" in arrivals:
            changed["arrivals"] = {**arrivals, "rates": [rate * load for rate in arrivals["rates"]]}
        else:
            name = "rate" if "rate" in arrivals else "rate_scale"
            changed["arrivals"] = {**arrivals, name: arrivals.get(name, 1.0) * load}
    if "num_requests" in workload:
        changed["num_requests"] = ceil(workload["num_requests"] * load)
    return changed


def _shares(replicas: int, parts: int) -> list[int]:
    """Replicas by region, divided as evenly as possible; the first regions get the remainder."""
    return [replicas // parts + (i < replicas % parts) for i in range(parts)] if parts else []


def _growth(ttft_s: Floats) -> float | None:
    """Mean of the last third over the mean of the middle third, in order of arrival."""
    third = len(ttft_s) // 3
    middle, last = ttft_s[third : 2 * third], ttft_s[2 * third :]
    if not third or not np.isfinite(middle).all() or not middle.mean():
        return None
    return float(last.mean() / middle.mean()) if np.isfinite(last).all() else None


def _p99(values: Floats) -> float | None:
    """The 99th percentile, interpolated as in the metrics; None if infinite or without values."""
    if not len(values):
        return None
    values = np.sort(values)
    rank = FRACTION * (len(values) - 1)
    low, high = values[int(rank)], values[ceil(rank)]
    return None if high == inf else float(low + (rank - int(rank)) * (high - low))
