"""One run, as a report takes it."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.record import Records
from headway.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class Run:
    """A run under one combination of policies. `simulate_s` and `total_s` are wall seconds."""

    name: str
    policies: dict[str, str]
    """Kind of policy -> its name, as in {"routing": "round-robin"}."""
    records: Records
    summary: Summary
    simulate_s: float
    total_s: float
    calibrated: bool
    """Whether the step times come from measurements of this GPU and engine."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made the runs."""

    scenario_yaml: str
    seed: int
    version: str
    command: str | None = None
