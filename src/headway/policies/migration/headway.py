"""Headway's own migration: PASCAL's moves at phase changes, and Llumnix's moves away from full or draining replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.core.decision import Move
from headway.core.view import MigrationView, PlacedRequestView, ReplicaView, RequestView, UnkeptValues
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.migration.pascal import PascalMigration


class HeadwayMigration:
    """Answers start where the fewest requests reason; every `interval_s`, requests leave full or draining replicas.

    The first part is PASCAL's Algorithm 2 with `host_counts`, among replicas of one role whose engines are equally
    fast: between other replicas, counts of requests say little. The second part is the pairing of `llumnix` with
    headroom for `num_tiers` tiers. Its sources drain, or lack KV blocks or sequences for their first waiting request. A
    source that lacks room sends only decoding requests, to targets without waiting requests, because an answer's length
    was unknown when it was placed. Waiting requests stay, because the router knew the queue and weighed times, SLOs and
    caches, which free blocks do not reflect. Between replicas with room, a move gains nothing.
    """

    def __init__(self, interval_s: float = 1.0, num_tiers: int = 4) -> None:
        self._phases = PascalMigration(host_counts=True)
        self._relief = _Relief(interval_s=interval_s, num_tiers=num_tiers)
        self.interval_s: float | None = interval_s

    def moves(self, view: MigrationView) -> Sequence[Move]:
        if len(view.replicas) == 1 or not any(replica.is_draining or _is_full(replica) for replica in view.replicas):
            return ()
        return self._relief.moves(view)

    def at_phase(self, request: RequestView, view: MigrationView) -> Move | None:
        alike = _Alike(request.replica, view)
        return self._phases.at_phase(request, alike) if len(alike.replicas) > 1 else None


class _Alike(UnkeptValues):
    """A view of a replica and the equally fast replicas with the same role. Implements `MigrationView`."""

    def __init__(self, replica: int, view: MigrationView) -> None:
        self.now, self.random, self.wants_scores = view.now, view.random, view.wants_scores
        own = next(each for each in view.replicas if each.id == replica)
        self.num_reasoning = view.num_reasoning
        self.replicas = [each for each in view.replicas if each.times is own.times and each.role == own.role]


class _Relief(LlumnixMigration):
    """Llumnix's pairs, limited to decoding requests that leave full replicas."""

    def _leaving(self, source: ReplicaView, target: ReplicaView) -> Iterable[PlacedRequestView]:
        if target.num_waiting or not _is_full(source):
            return ()
        return [request for request in source.requests if request.is_running]


def _is_full(replica: ReplicaView) -> bool:
    if not replica.num_waiting:
        return False
    free_blocks = replica.kv_blocks_total - replica.kv_blocks_used
    return replica.head_demand_blocks > free_blocks or replica.num_running >= replica.max_num_seqs
