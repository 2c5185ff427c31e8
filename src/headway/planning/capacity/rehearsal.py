"""Rehearsals: a scenario's workload on a fleet of equal replicas, simulated, and kept by content in a cache."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import ceil, inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from headway import __version__, catalog, scenario
from headway.config.strict_yaml import Places
from headway.metrics.columns import Floats
from headway.metrics.latency import sample, slo_masks
from headway.planning.capacity.problem import Candidate, Measured, Situation, Targets
from headway.workload.atomic_file import write_text

FRACTION = 0.99


@dataclass
class Rehearsal:
    """The evaluator: simulates, or finds in the cache what was simulated before."""

    document: dict[str, Any]
    places: Places
    base_dir: Path
    targets: Targets
    regions: tuple[str, ...]
    span_s: float
    folder: Path | None
    """Of the cache; None = no cache."""
    num_simulated: int = 0
    num_found: int = 0

    def __call__(self, candidate: Candidate, replicas: int, situation: Situation) -> Measured:
        """As `Evaluator` says."""
        chosen = self.scenario(candidate, replicas, situation)
        key = _key(chosen, self.base_dir) if self.folder is not None and ":" not in candidate.policy else None
        file = self.folder / f"{key}.json" if self.folder is not None and key else None
        if file is not None and (known := _cached(file)) is not None:
            self.num_found += 1
            return known
        self.num_simulated += 1
        found = _measured(chosen)
        if file is not None:
            write_text(file, msgspec.json.encode(found).decode())
        return found

    def scenario(self, candidate: Candidate, replicas: int, situation: Situation) -> scenario.Scenario:
        """What is simulated."""
        document = fleet_of(self.document, candidate, replicas, self.regions)
        _loaded(document["workload"], situation.load)
        in_regions = sum(_shares(replicas, len(self.regions))[: situation.lost_regions])
        lost = range(min(replicas, max(situation.lost_replicas, in_regions)))
        at_s = self.span_s / 2 / (situation.load if "trace" in document["workload"] else 1.0)
        document["faults"] = [{"at_s": at_s, "replica": i} for i in lost]
        return scenario.assemble(document, copy.deepcopy(self.places), self.base_dir)


def fleet_of(
    document: dict[str, Any], candidate: Candidate, replicas: int, regions: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A scenario's document with this fleet and these policies in place of its own."""
    made = copy.deepcopy(document)
    first = made["fleet"][0]
    kept = {name: first[name] for name in ("model", "engine", "pp", "ep", "dp") if name in first}
    if catalog.gpu(first["gpu"]).name == candidate.gpu:
        kept |= {name: first[name] for name in ("usd_per_gpu_hour", "coefficients") if name in first}
    pool = {**kept, "gpu": candidate.gpu, "tp": candidate.parallel.tp}
    if regions:
        shares = zip(regions, _shares(replicas, len(regions)), strict=True)
        made["fleet"] = [{"name": at, **pool, "replicas": n, "region": at} for at, n in shares if n]
    else:
        made["fleet"] = [{"name": "planned", **pool, "replicas": replicas}]
    made["policies"] = {**made.get("policies", {}), "routing": candidate.routing, "ordering": candidate.ordering}
    return made


def _loaded(workload: dict[str, Any], load: float) -> None:
    """The same kind of requests, so many times as many per second. Changes the section."""
    if load == 1:
        return
    if "trace" in workload:
        trace = workload["trace"]
        trace = {"path": trace} if isinstance(trace, str) else trace
        workload["trace"] = {**trace, "rate_scale": trace.get("rate_scale", 1.0) * load}
    elif "concurrency" in workload:
        workload["concurrency"] = max(1, round(workload["concurrency"] * load))
    else:
        arrivals = workload["arrivals"]
        if isinstance(arrivals, int | float):
            workload["arrivals"] = arrivals * load
        elif "rates" in arrivals:
            workload["arrivals"] = {**arrivals, "rates": [rate * load for rate in arrivals["rates"]]}
        else:
            name = "rate" if "rate" in arrivals else "rate_scale"
            workload["arrivals"] = {**arrivals, name: arrivals.get(name, 1.0) * load}
    if "num_requests" in workload:
        workload["num_requests"] = ceil(workload["num_requests"] * load)


def _shares(replicas: int, parts: int) -> list[int]:
    """So many replicas over the regions, the first ones getting what is left over."""
    return [replicas // parts + (i < replicas % parts) for i in range(parts)] if parts else []


def _measured(chosen: scenario.Scenario) -> Measured:
    """Simulate and look. A request that did not finish never got there."""
    run = scenario.run(chosen)
    found = sample(run.records, chosen.spec.simulation.warmup_s, chosen.spec.slo)
    tpot_s = np.where(found.finished & np.isnan(found.tpot_s), 0.0, found.tpot_s)
    has, good = slo_masks(found)["all"]
    goodput = run.summary.goodput_rps if has.any() else run.summary.throughput_rps
    return Measured(
        ttft_p99_s=_p99(np.where(found.finished, found.ttft_s, inf)),
        tpot_p99_s=_p99(np.where(found.finished, tpot_s, inf)),
        e2e_p99_s=_p99(np.where(found.finished, found.e2e_s, inf)),
        attainment=float(good.sum() / has.sum()) if has.any() else None,
        goodput_rps=goodput,
        busy_share=run.summary.busy_share,
        num_requests=run.summary.num_requests,
        num_completed=run.summary.num_completed,
        calibrated=run.calibrated,
    )


def _p99(values: Floats) -> float | None:
    """Interpolated as in the metrics; None where it is infinite or there is nothing."""
    if not len(values):
        return None
    values = np.sort(values)
    at = FRACTION * (len(values) - 1)
    low, high = values[int(at)], values[ceil(at)]
    return None if high == inf else float(low + (at - int(at)) * (high - low))


def _cached(file: Path) -> Measured | None:
    """What the cache holds; None where that is nothing, or cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return None


def _key(chosen: scenario.Scenario, base_dir: Path) -> str:
    """Of everything that a rehearsal depends on: the scenario, the catalog's facts, files, and the code."""
    pools = chosen.fleet.pools
    facts = [catalog.coefficients(pool.gpu.name, pool.engine.name) for pool in pools]
    spec = structs.replace(chosen.spec, name="")
    digest = hashlib.sha256(msgspec.json.encode([__version__, code(), spec, chosen.fleet, facts]))
    for path in _paths(msgspec.to_builtins([chosen.spec.workload, chosen.spec.fleet])):
        digest.update((base_dir / path).read_bytes())
    return digest.hexdigest()[:32]


def _paths(section: Any) -> Iterator[str]:
    """Files that a workload and a fleet are read from."""
    if isinstance(section, list | tuple):
        for each in section:
            yield from _paths(each)
    elif isinstance(section, dict):
        for name, value in section.items():
            if isinstance(value, str) and name in ("path", "trace", "config", "coefficients"):
                yield value
            else:
                yield from _paths(value)


OTHER = ("cli", "report", "reproduce")
"""Of Headway's code, what no simulation depends on."""


@cache
def code() -> str:
    """A digest of the source that simulates: what was simulated by other code does not count."""
    digest = hashlib.sha256()
    for entry in _entries(files("headway")):
        if entry.name not in OTHER:
            for text in _sources(entry):
                digest.update(text)
    return digest.hexdigest()


def _sources(entry: Traversable) -> Iterator[bytes]:
    if entry.is_dir():
        for inner in _entries(entry):
            yield from _sources(inner)
    elif entry.name.endswith((".py", ".json", ".yaml", ".csv")):
        yield entry.read_bytes()


def _entries(folder: Traversable) -> list[Traversable]:
    return sorted(folder.iterdir(), key=lambda each: each.name)
