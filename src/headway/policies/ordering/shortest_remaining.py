"""Shortest remaining output first."""

from __future__ import annotations

from typing import cast

from headway.core.view import OracleRequestView, RequestView


class ShortestRemainingOrdering:
    """By remaining output tokens, which only an oracle knows, and by arrival among equals.

    With `preemptive`, a short waiting request takes the place of a longer running one. This gives the lowest mean
    latency that known output lengths allow, at the expense of the longest requests.
    """

    oracle = True
    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        oracle_view = cast(OracleRequestView, request)
        return oracle_view.output_tokens - oracle_view.generated_tokens, oracle_view.arrival_s
