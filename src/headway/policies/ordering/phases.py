"""Orderings that run reasoning before answering: the queues of PASCAL, alone and within tiers of service."""

from __future__ import annotations

from collections.abc import Collection

from headway.core.errors import HeadwayError
from headway.core.request import Phase
from headway.core.view import RequestView
from headway.policies.arguments import MOST_TIERS, require_at_least, require_between
from headway.policies.ordering.time_sharing import QuantumLevel


class PascalOrdering:
    """Reasoning requests before answering ones; each of the two queues is time-shared in quanta of `quantum_tokens`.

    A reasoning request with more than `demotion_tokens` of KV cache (prompt and output) moves to the queue of the
    answering requests, so that one long chain of thought does not take the memory of all others. Source: PASCAL,
    section IV-C; the defaults are those of section V-A.

    With `by_quanta`, the request that has used the fewest quanta in its queue goes first. A new answer therefore goes
    before older ones, as in the paper for answers within their first quantum (section IV-B, on Algorithm 2). Among
    equals, the request that reached this number first goes first, so that no peer interrupts a quantum. `levels` limits
    the distinguished numbers of quanta: with 2, requests in their first quantum go before all others, and the others
    take turns. None = no limit.
    """

    num_queues: int = 2
    reasoning_queues: Collection[int] = (0,)
    preemptive: bool = True

    def __init__(
        self,
        quantum_tokens: int = 500,
        demotion_tokens: int = 5000,
        by_quanta: bool = False,
        levels: int | None = None,
    ) -> None:
        require_at_least(1, quantum_tokens=quantum_tokens)
        require_at_least(0, demotion_tokens=demotion_tokens)
        if levels is not None and not by_quanta:
            raise HeadwayError("levels: expected by_quanta: true, as queues in a circle tell no quanta apart")
        self.quantum: int | None = None if by_quanta else quantum_tokens
        self._demotion_tokens = demotion_tokens
        self._level = QuantumLevel(quantum_tokens, levels)

    def queue(self, request: RequestView) -> int:
        """The queue of the request; 0 has the higher priority."""
        return 0 if request.phase is Phase.REASONING and self._left(request) >= 0 else 1

    def rank(self, request: RequestView, now: float) -> tuple[int, int, int, float]:
        level = self._level.at(self._served(request)) if self.quantum is None else 0
        return self.queue(request), level, request.turn, request.tier_since_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        demoted = self._left(request) + 1 if self.queue(request) == 0 else None
        if self.quantum is not None:
            return demoted
        used_up = self._level.tokens_left(self._served(request))
        return used_up if demoted is None else min(used_up, demoted)

    def _served(self, request: RequestView) -> int:
        if request.phase is Phase.ANSWERING:
            return request.answer_tokens
        left = self._left(request)
        return request.generated_tokens if left >= 0 else min(request.generated_tokens, -left - 1)

    def _left(self, request: RequestView) -> int:
        """KV tokens that the request may still gain before its demotion; negative after its demotion."""
        return self._demotion_tokens - request.prompt_tokens - request.generated_tokens


class TiersAndPhasesOrdering:
    """Orders requests by tier, and within a tier by the queues of `pascal`: reasoning, then answering, each
    time-shared.

    This combines the orderings of K-tier Llumnix and PASCAL: two queues for each of `num_tiers` tiers; further tiers
    share the last one's. A tier is a contract and a phase a matter of efficiency, so an answer of tier 0 goes before
    the reasoning of tier 1: customers of tier 0 never wait for other customers' reasoning, and a late tier may starve.
    With `phases_first`, all reasoning goes before all answers, ordered by tier within. `by_quanta` and `levels` are as
    in `pascal`.
    """

    preemptive: bool = True

    def __init__(
        self,
        num_tiers: int = 4,
        quantum_tokens: int = 500,
        demotion_tokens: int = 5000,
        phases_first: bool = False,
        by_quanta: bool = False,
        levels: int | None = None,
    ) -> None:
        require_between(1, MOST_TIERS, num_tiers=num_tiers)
        self._phases = PascalOrdering(quantum_tokens, demotion_tokens, by_quanta, levels)
        self.quantum = self._phases.quantum
        self.num_queues = self._phases.num_queues * num_tiers
        self.reasoning_queues: Collection[int] = (
            range(num_tiers) if phases_first else range(0, self.num_queues, self._phases.num_queues)
        )
        self._num_tiers = num_tiers
        self._phases_first = phases_first

    def queue(self, request: RequestView) -> int:
        phase, tier = self._phases.queue(request), min(request.tier, self._num_tiers - 1)
        return phase * self._num_tiers + tier if self._phases_first else tier * self._phases.num_queues + phase

    def rank(self, request: RequestView, now: float) -> tuple[int, int, int, float]:
        _, level, turn, since_s = self._phases.rank(request, now)
        return self.queue(request), level, turn, since_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return self._phases.next_change_tokens(request)
