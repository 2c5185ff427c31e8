"""Headway's own migration: PASCAL's at phase changes, Llumnix's away from full or draining replicas."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.decision import Move
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.migration.pascal import PascalMigration


class HeadwayMigration:
    """Answers start where the fewest requests reason; every `interval_s`, requests leave full or draining replicas.

    The first part is PASCAL's Algorithm 2 with `host_counts`. The second part is the pairing of `llumnix` with headroom
    for `num_tiers` tiers, restricted to sources that drain or that lack KV blocks or sequences for their first waiting
    request, the latter to targets without waiting requests. Between replicas with room, a request gains nothing from a
    move; between replicas without, it undoes what the router decided.
    """

    def __init__(self, interval_s: float = 1.0, num_tiers: int = 4) -> None:
        self._phases = PascalMigration(host_counts=True)
        self._tiers = LlumnixMigration(interval_s=interval_s, num_tiers=num_tiers)
        self.interval_s: float | None = interval_s

    def moves(self, view: FleetView) -> Sequence[Move]:
        pressed = [replica for replica in view.replicas if replica.is_draining or _is_full(replica)]
        if not pressed or len(view.replicas) == 1:
            return ()
        leaving = {request.id for replica in pressed if replica.is_draining for request in replica.requests}
        theirs = {request.id for replica in pressed for request in replica.requests}
        has_room = {replica.id for replica in view.replicas if not replica.num_waiting}
        return [
            move for move in self._tiers.moves(view)
            if move.request in leaving or (move.request in theirs and move.target in has_room)
        ]  # fmt: skip

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        return self._phases.at_phase(request, view)


def _is_full(replica: ReplicaView) -> bool:
    if not replica.num_waiting:
        return False
    free_blocks = replica.kv_blocks_total - replica.kv_blocks_used
    return replica.head_demand_blocks > free_blocks or replica.num_running >= replica.max_num_seqs
