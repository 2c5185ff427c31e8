"""Tiers of service, and within each tier reasoning before answering."""

from __future__ import annotations

from headway.core.view import RequestView
from headway.policies.arguments import require_at_least
from headway.policies.ordering.pascal import PascalOrdering


class TiersAndPhasesOrdering:
    """By tier, and within a tier by the queues of `pascal`: reasoning, then answering, each time-shared.

    This combines the orderings of K-tier Llumnix and PASCAL: two queues for each of `num_tiers` tiers; further tiers
    share the last one's. A tier is a contract and a phase a matter of efficiency, so an answer of tier 0 goes before
    the reasoning of tier 1: customers of tier 0 never wait for other customers' reasoning, and a late tier may starve.
    With `phases_first`, all reasoning goes before all answers, ordered by tier within. `by_quanta` is as in `pascal`.
    """

    preemptive: bool = True

    def __init__(
        self,
        num_tiers: int = 4,
        quantum_tokens: int = 500,
        demotion_tokens: int = 5000,
        phases_first: bool = False,
        by_quanta: bool = False,
    ) -> None:
        require_at_least(1, num_tiers=num_tiers)
        self._phases = PascalOrdering(quantum_tokens, demotion_tokens, by_quanta)
        self.quantum = self._phases.quantum
        self.num_queues = self._phases.num_queues * num_tiers
        self._num_tiers = num_tiers
        self._phases_first = phases_first

    def queue(self, request: RequestView) -> int:
        phase, tier = self._phases.queue(request), min(request.tier, self._num_tiers - 1)
        return phase * self._num_tiers + tier if self._phases_first else tier * self._phases.num_queues + phase

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float]:
        _, turn, arrival_s = self._phases.rank(request, now)
        return self.queue(request), turn, arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return self._phases.next_change_tokens(request)
