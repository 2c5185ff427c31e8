"""Reasoning before answering: PASCAL's queues within a replica."""

from __future__ import annotations

from headway.core.request import Phase
from headway.core.view import RequestView
from headway.policies.arguments import require_at_least


class PascalOrdering:
    """Requests that reason, then those that answer; each of the two queues takes turns of `quantum_tokens`.

    A request that reasons with more than `demotion_tokens` of KV cache (prompt and output) stands with those that
    answer, so that one long chain of thought does not take the memory of them all. Source: PASCAL, section IV-C;
    the defaults are those of section V-A.

    With `by_quanta`, turns are not circular: in each queue, whoever has used up fewer quanta there goes first, and
    of equals, who came first. So an answer that has just begun is not behind all others, as the paper says of
    those within their first quantum (section IV-B, on Algorithm 2).
    """

    num_queues: int = 2
    preemptive: bool = True

    def __init__(self, quantum_tokens: int = 500, demotion_tokens: int = 5000, by_quanta: bool = False) -> None:
        require_at_least("quantum_tokens", quantum_tokens, 1)
        require_at_least("demotion_tokens", demotion_tokens, 0)
        self.quantum: int | None = None if by_quanta else quantum_tokens
        self._quantum_tokens = quantum_tokens
        self._demotion_tokens = demotion_tokens

    def queue(self, request: RequestView) -> int:
        """0: the high priority queue."""
        return 0 if request.phase is Phase.REASONING and self._left(request) >= 0 else 1

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float]:
        turn = self._served(request) // self._quantum_tokens if self.quantum is None else request.turn
        return self.queue(request), turn, request.arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        demoted = self._left(request) + 1 if self.queue(request) == 0 else None
        if self.quantum is not None:
            return demoted
        used_up = self._quantum_tokens - self._served(request) % self._quantum_tokens
        return used_up if demoted is None else min(used_up, demoted)

    def _served(self, request: RequestView) -> int:
        """Tokens that the request has gained in its present queue."""
        if request.phase is Phase.ANSWERING:
            return request.answer_tokens
        left = self._left(request)
        return request.generated_tokens if left >= 0 else min(request.generated_tokens, -left - 1)

    def _left(self, request: RequestView) -> int:
        """KV tokens until the request is demoted."""
        return self._demotion_tokens - request.prompt_tokens - request.generated_tokens
