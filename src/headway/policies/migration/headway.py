"""Headway's own migration: PASCAL's when reasoning ends, Llumnix's in between."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.decision import Move
from headway.core.view import FleetView, RequestView
from headway.policies.migration.llumnix import Llumnix
from headway.policies.migration.pascal import Pascal


class Headway:
    """An answer begins where the fewest reason; every `interval_s`, requests leave full and draining replicas.

    The first is PASCAL's Algorithm 2, with room in host memory counted, the second K-tier Llumnix's 3.5 with headroom for
    `num_tiers` tiers. See `pascal` and `llumnix`, which do either alone.
    """

    def __init__(self, interval_s: float = 1.0, num_tiers: int = 4) -> None:
        self._phases = Pascal(host_counts=True)
        self._tiers = Llumnix(interval_s=interval_s, num_tiers=num_tiers)
        self.interval_s: float | None = interval_s

    def moves(self, view: FleetView) -> Sequence[Move]:
        return self._tiers.moves(view)

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        return self._phases.at_phase(request, view)
