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
        return request.turn, request.tier_since_s


class QuantumLevel:
    """The number of quanta that a request has used, with at most `levels` distinguished; None = no limit."""

    def __init__(self, quantum_tokens: int, levels: int | None) -> None:
        require_at_least(1, quantum_tokens=quantum_tokens)
        if levels is not None:
            require_at_least(1, levels=levels)
        self._quantum_tokens = quantum_tokens
        self._last = levels and levels - 1

    def at(self, tokens: int) -> int:
        """The level of a request that has received this many tokens."""
        used = tokens // self._quantum_tokens
        return used if self._last is None else min(used, self._last)

    def tokens_left(self, tokens: int) -> int:
        """Tokens left in the current quantum."""
        return self._quantum_tokens - tokens % self._quantum_tokens


class FewestQuantaOrdering:
    """Orders requests by the number of quanta of `quantum_tokens` output tokens already used, and in turn among equals.

    In `round-robin` a new request goes behind all waiting requests; here it goes before all requests that have used up
    a quantum. Among requests with the same number of quanta, the one that reached this number first goes first, so that
    no peer interrupts a quantum. The PASCAL paper describes its round-robin baseline this way: each used quantum lowers
    a request's priority, so that a long request loses against a later short one (sections II-C and V-B). The default
    quantum is the paper's. Long requests may starve. `levels` limits the distinguished numbers of quanta: with 2,
    requests in their first quantum go before all others, and the others take turns. None = no limit.
    """

    quantum: int | None = None
    preemptive: bool = True

    def __init__(self, quantum_tokens: int = 500, levels: int | None = None) -> None:
        self._level = QuantumLevel(quantum_tokens, levels)

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float]:
        return self._level.at(request.generated_tokens), request.turn, request.tier_since_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return self._level.tokens_left(request.generated_tokens)
