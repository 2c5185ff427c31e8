"""Thresholds of a plan that is recomputed at run time."""

from __future__ import annotations

from headway.core.policy import CascadeReplanner
from headway.core.record import Ended
from headway.core.view import CascadeView, RequestView


class ReplannedCascade:
    """Like `thresholds`, with the thresholds of a planner that observes the workload (Cascadia, section 4.4).

    A request that the planner audits goes through all models that have replicas. If the next model has no replica, any
    answer is accepted.
    """

    def __init__(self, planner: CascadeReplanner) -> None:
        self._planner = planner

    def enter(self, request: RequestView, view: CascadeView) -> int:
        self._planner.arrived(request, view.now)
        return 0

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        self._planner.scored(request.id, view.stage, score)
        following = view.stage + 1
        if following == len(view.stages) or all(each.is_draining for each in view.stages[following].replicas):
            return True
        return not self._planner.audits(request.id) and score >= self._planner.thresholds()[view.stage]

    def judges_last(self, request: RequestView) -> bool:
        return self._planner.audits(request.id)

    def learn(self, record: Ended) -> None:
        self._planner.ended(record)
