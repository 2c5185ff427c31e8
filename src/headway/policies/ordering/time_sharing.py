"""Orderings that share time in quanta of output tokens."""

from __future__ import annotations

from headway.core.view import RequestView
from headway.policies.arguments import require_at_least


class RoundRobinOrdering:
    """Time-sharing in quanta of `quantum_tokens` output tokens; after a quantum a request goes behind the waiting ones.

    The default quantum is that of the PASCAL paper's baseline.
    """

    preemptive: bool = True

    def __init__(self, quantum_tokens: int = 500) -> None:
        require_at_least(1, quantum_tokens=quantum_tokens)
        self.quantum: int | None = quantum_tokens

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.turn, request.arrival_s


class FewestQuantaOrdering:
    """By the number of quanta of `quantum_tokens` output tokens already used, and by arrival among equals.

    In `round-robin` a new request goes behind all waiting requests; here it goes before all that have used up a
    quantum. The PASCAL paper describes its round-robin baseline this way: each used quantum lowers a request's
    priority, so that a long request loses against a short one that came later (sections II-C and V-B). The default
    quantum is the paper's. Long requests may starve.
    """

    quantum: int | None = None
    preemptive: bool = True

    def __init__(self, quantum_tokens: int = 500) -> None:
        require_at_least(1, quantum_tokens=quantum_tokens)
        self._quantum_tokens = quantum_tokens

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.generated_tokens // self._quantum_tokens, request.arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return self._quantum_tokens - request.generated_tokens % self._quantum_tokens
