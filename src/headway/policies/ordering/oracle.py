"""Orderings by remaining length, which only an oracle knows."""

from __future__ import annotations

from typing import cast

from headway.core.view import OracleRequestView, RequestView


class ShortestRemainingOrdering:
    """Orders requests by remaining output tokens, which only an oracle knows, and by arrival among equals.

    With `preemptive`, a short waiting request takes the place of a longer running one. This gives the lowest mean
    latency that known output lengths allow, at the expense of the longest requests.
    """

    oracle = True
    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        oracle_view = cast(OracleRequestView, request)
        return oracle_view.output_tokens - oracle_view.generated_tokens, oracle_view.tier_since_s


class ShortestToAnswerOrdering:
    """Orders requests by output tokens until the answer begins; answering requests go last, by remaining output tokens.

    Only an oracle knows these lengths. Equals are ordered by arrival. If users do not see the reasoning, known lengths
    allow no lower mean time to the first answering token. Long chains of thought and answers that have begun pay for
    it.
    """

    oracle = True
    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[bool, int, float]:
        oracle_view = cast(OracleRequestView, request)
        to_answer = self.next_change_tokens(request)
        left = oracle_view.output_tokens - oracle_view.generated_tokens if to_answer is None else to_answer
        return to_answer is None, left, oracle_view.tier_since_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        oracle_view = cast(OracleRequestView, request)
        to_answer = oracle_view.reasoning_tokens + 1 - oracle_view.generated_tokens
        return to_answer if to_answer > 0 else None
