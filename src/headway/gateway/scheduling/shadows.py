"""Shadow policies of a candidate beside a gateway's policies: their decisions are counted, and have no effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import ceil
from random import Random
from time import process_time, thread_time
from typing import Annotated

from msgspec import Meta, Struct

from headway.control.assembly import held_ordering
from headway.control.policies import Policies
from headway.control.shadow import Kind, Shadow, ShadowPlan
from headway.core.policy import SharingOrdering
from headway.gateway.telemetry.metrics import Metric, Sample

log = logging.getLogger("headway.gateway")
MOST_SHARE = 0.02
"""Largest share of the process's CPU time for a candidate's router. Its views and the counting take additional time."""
_Num = Annotated[int, Meta(ge=0)]
NAMES: dict[Kind, str] = {"routing": "router", "ordering": "ordering", "admission": "admission"}
"""The kinds that can be compared, with their names in `Policies`."""


class ShadowedDecisions(Struct, forbid_unknown_fields=True):
    """Decisions of the candidate of `--shadow`, of one kind and for one model."""

    model: str
    kind: str
    agreed: _Num
    """Number of decisions equal to the real decisions."""
    differed: _Num
    failed: _Num
    """Number of decisions in which the candidate raised an error, or chose a replica that was not offered."""
    agreement: float | None
    """Share of decisions equal to the real decisions; null without decisions."""


class ShadowPlacements(Struct, forbid_unknown_fields=True):
    """Requests that a replica got since the start, and requests that the candidate of `--shadow` would have sent
    there."""

    placed: _Num
    candidate: _Num


def comparable(real: Policies, candidate: Policies) -> tuple[tuple[Kind, ...], list[str]]:
    """The kinds of policy that differ between candidate and present policies and can be compared; for other kinds that
    differ, the reason why they cannot be compared live."""
    kinds, notes = list[Kind](), list[str]()
    for kind, name in NAMES.items():
        if getattr(real, name) == getattr(candidate, name) and kind != "ordering":
            continue
        if kind == "ordering":
            if held_ordering(real) == held_ordering(candidate) and real.ordering == candidate.ordering:
                continue
            if why := _why_no_order(real, candidate):
                notes.append(f"ordering: not compared live: {why}")
                continue
        kinds.append(kind)
    if real.migration != candidate.migration:
        notes.append("migration: not compared live: its moves would change what later decisions see")
    if str(real.scaler) != str(candidate.scaler):
        notes.append("scaling: not compared live: its replicas would change what later decisions see")
    return tuple(kinds), notes


def _why_no_order(real: Policies, candidate: Policies) -> str:
    if "replica" in (real.ordering_at, candidate.ordering_at):
        return "it acts in the engines' queues"
    if isinstance(held_ordering(candidate)(), SharingOrdering) or isinstance(held_ordering(real)(), SharingOrdering):
        return "an ordering that shares service counts what it was followed in"
    return ""


class Shadows:
    """The candidate's policies of all models."""

    def __init__(self, plan: ShadowPlan, seed: int) -> None:
        self.plan, self._seed = plan, seed
        self.of: dict[str, Shadow] = {}
        """Shadows by model."""
        self.gain: dict[str, dict[str, float]] = {}
        """Gains in the last rehearsal: `attainment` and `usd_per_hour`, each with mean, low and high."""
        self._told = set[tuple[str, Kind]]()
        self._seen: dict[Shadow, tuple[float, float]] = {}
        """(seconds of the candidate, CPU seconds of the process) when the pace was last set."""

    def new(self, model: str) -> Shadow:
        """The candidate's policies for another model."""
        policies, kinds = self.plan.policies, self.plan.kinds
        admission = policies.admission

        def failed(kind: Kind, what: str, error: Exception | None) -> None:
            if (model, kind) not in self._told:
                self._told.add((model, kind))
                where = f"{self.plan.name}: {kind} for {model}"
                log.warning("the candidate's decision failed: %s: %s", where, what or repr(error), exc_info=error)

        self.of[model] = shadow = Shadow(
            policies.router() if "routing" in kinds else None,
            held_ordering(policies)() if "ordering" in kinds else None,
            admission() if admission is not None and "admission" in kinds else None,
            "admission" in kinds,
            Random(f"{self._seed}/shadow/{model}"),
            failed,
            thread_time,
            self._pace,
        )
        self._seen[shadow] = 0.0, process_time()
        return shadow

    def _pace(self, shadow: Shadow) -> None:
        """Let a candidate that takes more than `MOST_SHARE` of the CPU time decide on fewer placements."""
        spent_s, cpu_s = self._seen[shadow]
        self._seen[shadow] = shadow.spent_s, process_time()
        share = (shadow.spent_s - spent_s) / max(self._seen[shadow][1] - cpu_s, 1e-9)
        shadow.every = max(ceil(shadow.every * share / MOST_SHARE), 1)

    def decisions(self) -> list[ShadowedDecisions]:
        return [
            ShadowedDecisions(model, kind, each.agreed, each.differed, each.failed, each.agreement)
            for model, shadow in self.of.items()
            for kind, each in shadow.counts.items()
        ]

    def placements(self, model: str, replica: int) -> ShadowPlacements | None:
        """The placements of a replica; None if routing is not compared."""
        shadow = self.of.get(model)
        if shadow is None or "routing" not in shadow.counts:
            return None
        return ShadowPlacements(shadow.placed.get(replica, 0), shadow.chosen.get(replica, 0))

    def metrics(self) -> Iterator[Metric]:
        results: list[Sample] = [
            ({"model": each.model, "kind": each.kind, "result": result}, float(getattr(each, result)))
            for each in self.decisions()
            for result in ("agreed", "differed", "failed")
        ]
        yield "headway_shadow_decisions_total", results
        agreement: list[Sample] = [
            ({"model": each.model, "kind": each.kind}, each.agreement)
            for each in self.decisions()
            if each.agreement is not None
        ]
        yield "headway_shadow_agreement", agreement
        gains: list[Sample] = [
            ({"quantity": quantity, "bound": bound}, value)
            for quantity, bounds in self.gain.items()
            for bound, value in bounds.items()
        ]
        yield "headway_shadow_gain", gains
