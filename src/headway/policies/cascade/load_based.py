"""Thresholds that fall with the load of the next model."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.view import CascadeView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.cascade.thresholds import require_thresholds, threshold_at


class LoadBasedCascade:
    """Like `thresholds`, but accepts lower scores while the next model is busy.

    After CascadeServe, which selects one of several gears by load. The load is the next stage's requests in flight over
    the sum of its replicas' `max_num_seqs`. As the load rises from `calm` to `full`, the threshold falls from
    `threshold` (one number for all stages, or a list as in `thresholds`) to `lowest`.
    """

    def __init__(
        self, threshold: float | list[float] = 80.0, lowest: float = 0.0, calm: float = 0.5, full: float = 1.0
    ) -> None:
        require_thresholds(threshold=threshold)
        require_between(0, min(threshold) if isinstance(threshold, list) else threshold, lowest=lowest)
        require_at_least(0, calm=calm)
        require_above(calm, full=full)
        self._threshold, self._lowest = threshold, lowest
        self._calm, self._full = calm, full

    def enter(self, request: RequestView, view: CascadeView) -> int:
        threshold_at(self._threshold, 0, view)
        return 0

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        busy = (_load(view.stages[view.stage + 1].replicas) - self._calm) / (self._full - self._calm)
        share = min(max(busy, 0.0), 1.0)
        threshold = threshold_at(self._threshold, view.stage, view)
        return score >= threshold + share * (self._lowest - threshold)


def _load(replicas: Sequence[ReplicaView]) -> float:
    """Requests in flight over `max_num_seqs`, of all replicas together; infinite without replicas."""
    seats = sum(replica.max_num_seqs for replica in replicas)
    return sum(replica.num_in_flight for replica in replicas) / seats if seats else float("inf")
