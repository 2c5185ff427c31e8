"""Reasoning before answering: PASCAL's queues within a replica."""

from __future__ import annotations

from headway.core.request import Phase
from headway.core.view import RequestView
from headway.policies.arguments import at_least


class Pascal:
    """Requests that reason, then those that answer; each of the two queues takes turns of `quantum_tokens`.

    A request that reasons with more than `demotion_tokens` of KV cache (prompt and output) stands with those that
    answer, so that one long chain of thought does not take the memory of them all. Source: PASCAL, section IV-C;
    the defaults are those of section V-A.
    """

    num_queues: int = 2
    preemptive: bool = True

    def __init__(self, quantum_tokens: int = 500, demotion_tokens: int = 5000) -> None:
        at_least("quantum_tokens", quantum_tokens, 1)
        at_least("demotion_tokens", demotion_tokens, 0)
        self.quantum: int | None = quantum_tokens
        self._demotion_tokens = demotion_tokens

    def queue(self, request: RequestView) -> int:
        """0: the high priority queue."""
        return 0 if request.phase is Phase.REASONING and self._left(request) >= 0 else 1

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float]:
        return self.queue(request), request.turn, request.arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return self._left(request) + 1 if self.queue(request) == 0 else None

    def _left(self, request: RequestView) -> int:
        """KV tokens until the request is demoted."""
        return self._demotion_tokens - request.prompt_tokens - request.generated_tokens
