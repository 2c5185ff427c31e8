"""Shortest way to the first answering token first."""

from __future__ import annotations

from typing import cast

from headway.core.view import OracleRequestView, RequestView


class ShortestToAnswerOrdering:
    """By output tokens still to come before the answer begins; those that answer go last, by what is left of it.

    As only an oracle knows, and by arrival among equals. Where users see nothing of the reasoning, this is what
    `shortest-remaining` is to end-to-end latency: the best mean time to the first answering token that knowing
    lengths can bring, at the price of long chains of thought and of answers that have begun.
    """

    oracle = True
    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[bool, int, float]:
        known = cast(OracleRequestView, request)
        to_answer = self.next_change_tokens(request)
        left = known.output_tokens - known.generated_tokens if to_answer is None else to_answer
        return to_answer is None, left, known.arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        known = cast(OracleRequestView, request)
        to_answer = known.reasoning_tokens + 1 - known.generated_tokens
        return to_answer if to_answer > 0 else None
