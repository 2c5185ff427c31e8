"""PASCAL's Algorithm 2 chooses the replica for the answer; adaptive migration may cancel the move."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.decision import Move
from headway.core.request import Phase
from headway.core.view import MigrationView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.endpoints import footprint


class PascalMigration:
    """When its reasoning ends, a request moves to the replica with the fewest reasoning requests.

    Only replicas whose answers keep their pace are eligible. Reasoning requests of all tiers count, without those that
    the ordering has demoted (see the ordering `pascal`). If no replica's answers keep their pace, all replicas are
    eligible, and answers that have not used up their first `quantum_tokens`, or that are in transfer to the replica,
    count too. Requests that are held since they were paused count at the replica where they were. With `adaptive`, a
    request stays if its own replica has a free KV block and the selected one lacks room for the request's KV cache and
    one more block. Among equals, the request's own replica wins, then the lowest id. Source: PASCAL, Algorithm 2 and
    Fig. 7.

    With `host_counts`, blocks in a replica's host memory count as used, as in Algorithm 1's footprint: a replica that
    has swapped requests out has no memory to offer, whatever blocks are free at the moment. Paused requests count, too.
    """

    interval_s: float | None = None

    def __init__(self, adaptive: bool = True, quantum_tokens: int = 500, host_counts: bool = False) -> None:
        require_at_least(1, quantum_tokens=quantum_tokens)
        self._adaptive = adaptive
        self._host_counts = host_counts
        self._quantum_tokens = quantum_tokens

    def moves(self, view: MigrationView) -> Sequence[Move]:
        return ()

    def at_phase(self, request: RequestView, view: MigrationView) -> Move | None:
        own = request.replica
        eligible = [i for i in view.replicas if i.answers_on_pace]
        if eligible:
            load = {i.id: view.num_reasoning(i) for i in eligible}
        else:
            load = {i.id: view.num_reasoning(i) + self._fresh(i, request.id) for i in view.replicas}
        selected = min(load, key=lambda i: (load[i], i != own, i))
        if selected == own or (self._adaptive and self._stays(request, view.replicas, selected)):
            return None
        return Move(request.id, selected, scores=tuple(load.items()))

    def _fresh(self, replica: ReplicaView, excluded: int) -> int:
        """Answers within their first quantum at a replica, and requests in transfer to the replica."""
        there = [one for one in replica.requests if one.id != excluded and not one.is_moving]
        return replica.num_arriving + sum(
            one.phase is Phase.ANSWERING and one.answer_tokens < self._quantum_tokens
            for one in (*there, *replica.paused)
        )

    def _stays(self, request: RequestView, replicas: Sequence[ReplicaView], selected: int) -> bool:
        """Whether the request's replica has room for it and the selected replica has none."""
        free = {i.id: i.kv_blocks_total - footprint(i, self._host_counts) for i in replicas}
        block = next(i.block_size_tokens for i in replicas if i.id == selected)
        needed = -(-(request.prompt_tokens + request.generated_tokens) // block) + 1
        return free[request.replica] >= 1 and free[selected] < needed
