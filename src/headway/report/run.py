"""One run, as the input of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway.catalog.coefficients import PoolCalibration
from headway.catalog.errors import Band
from headway.core.record import Records
from headway.metrics.latency import DefaultSlo
from headway.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class Run:
    """A run under one combination of policies. `simulate_s` and `total_s` are wall seconds."""

    name: str
    policies: dict[str, str]
    """Policy name by kind, such as {"routing": "round-robin"}."""
    records: Records
    summary: Summary
    simulate_s: float
    total_s: float
    calibrated: bool
    """Whether the step times come from measurements of this GPU and engine."""
    notes: tuple[str, ...] = ()
    uncalibrated: tuple[str, ...] = ()
    """The pools whose step times were not measured on their GPU and engine, and the substitutes."""
    pools: tuple[PoolCalibration, ...] = ()
    """Holds, for each pool, whether its step times were measured on its GPU and engine."""
    slo: DefaultSlo | None = None
    """SLOs of requests without their own."""
    bands: dict[str, Band] = field(default_factory=dict)
    """Bands of predicted latencies, by summary key."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Scenario, seed, version and command of the runs."""

    scenario_yaml: str
    seed: int
    version: str
    command: str | None = None


def named_by_policies(runs: Sequence[Run]) -> list[Run]:
    """Name the runs by the policies in which they differ, such as "least-loaded + fcfs"."""
    kinds = dict.fromkeys(kind for run in runs for kind in run.policies)
    differing = [kind for kind in kinds if len({run.policies.get(kind) for run in runs}) > 1]
    names = [" + ".join(run.policies.get(kind, "none") for kind in differing) for run in runs]
    if len(set(names)) < len(runs):
        return list(runs)
    return [replace(run, name=name or run.name) for run, name in zip(runs, names, strict=True)]
