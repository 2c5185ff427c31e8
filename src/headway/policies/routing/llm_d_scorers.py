"""The scorers of llm-d's inference scheduler: filter, score, pick."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.decision import Placement
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least


class LlmDScorersRouter:
    """The replica with the highest weighted sum of three scores from 0 to 1.

    Prefix: the share of the request's tokens that the replica has cached. Queue: 1 for the shortest queue of all
    replicas, 0 for the longest. KV: the share of free KV blocks. One of the best replicas is drawn at random, as in
    llm-d's picker.

    First, replicas with more than `max_waiting` waiting requests, or more than `max_kv` of their KV blocks in use, are
    left out, unless no replica would remain. Source: the inference scheduler of llm-d and the Gateway API Inference
    Extension (kubernetes-sigs): prefix-cache, queue and kv-cache-utilization scorers with the weights of its guides.
    """

    def __init__(
        self,
        prefix_weight: float = 3.0,
        queue_weight: float = 2.0,
        kv_weight: float = 2.0,
        max_waiting: int | None = None,
        max_kv: float = 1.0,
    ) -> None:
        require_at_least(0, prefix_weight=prefix_weight, queue_weight=queue_weight, kv_weight=kv_weight, max_kv=max_kv)
        if max_waiting is not None:
            require_at_least(0, max_waiting=max_waiting)
        self._weights = prefix_weight, queue_weight, kv_weight
        self._max_waiting, self._max_kv = max_waiting, max_kv

    def route(self, request: RequestView, view: FleetView) -> Placement:
        replicas, waiting, used = view.replicas, view.map(_num_waiting), view.map(_use)
        if self._max_waiting is not None or self._max_kv < 1:
            able = [i for i in range(len(replicas)) if self._has_room(waiting[i], used[i])]
            if able:
                replicas, waiting, used = (
                    [replicas[i] for i in able],
                    [waiting[i] for i in able],
                    [used[i] for i in able],
                )
        scores = self._scores(request, replicas, waiting, used)
        best = max(scores)
        chosen = replicas[view.random.choice([i for i, score in enumerate(scores) if score == best])].id
        if not view.wants_scores:
            return Placement(chosen)
        ids = [replica.id for replica in replicas]
        return Placement(chosen, scores=tuple(zip(ids, scores, strict=True)))

    def _has_room(self, waiting: int, used: float) -> bool:
        if self._max_waiting is not None and waiting > self._max_waiting:
            return False
        return self._max_kv >= 1 or used <= self._max_kv

    def _scores(
        self, request: RequestView, replicas: Sequence[ReplicaView], waiting: Sequence[int], used: Sequence[float]
    ) -> list[float]:
        longest, spread = max(waiting), max(waiting) - min(waiting)
        prefix_weight, queue_weight, kv_weight = self._weights
        tokens = max(request.prompt_tokens, 1)
        cached = [replica.cached_tokens(request) for replica in replicas] if request.prefix else [0] * len(replicas)
        return [
            prefix_weight * hit / tokens
            + queue_weight * ((longest - num) / spread if spread else 1.0)
            + kv_weight * (1 - use)
            for hit, num, use in zip(cached, waiting, used, strict=True)
        ]


def _num_waiting(replica: ReplicaView) -> int:
    return replica.num_waiting


def _use(replica: ReplicaView) -> float:
    return replica.kv_blocks_used / max(replica.kv_blocks_total, 1)
