"""Time-sharing that favours whoever has had the least."""

from __future__ import annotations

from headway.core.view import RequestView
from headway.policies.arguments import require_at_least


class FewestQuantaOrdering:
    """Whoever has used up fewer quanta of `quantum_tokens` output tokens goes first; of equals, who came first.

    In `round-robin` a new request goes behind all who wait; here it takes the place of those that are past their
    first quantum. It is how the PASCAL paper describes its round-robin baseline: with each quantum used up a request's
    priority falls, so that a long one loses against a short one that came later (sections II-C and V-B). The default
    quantum is the paper's. Long requests may starve.
    """

    quantum: int | None = None
    preemptive: bool = True

    def __init__(self, quantum_tokens: int = 500) -> None:
        require_at_least("quantum_tokens", quantum_tokens, 1)
        self._quantum_tokens = quantum_tokens

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.generated_tokens // self._quantum_tokens, request.arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return self._quantum_tokens - request.generated_tokens % self._quantum_tokens
