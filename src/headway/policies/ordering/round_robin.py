"""Time-sharing in token quanta."""

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
