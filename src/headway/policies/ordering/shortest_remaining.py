"""Shortest remaining output first."""

from __future__ import annotations

from typing import cast

from headway.core.view import OracleRequestView, RequestView


class ShortestRemainingOrdering:
    """By output tokens still to come, as only an oracle knows them, and by arrival among equals.

    With `preemptive`, a short request that waits takes the place of longer ones that run. The best mean
    latency that knowing output lengths can bring, at the price of the longest requests.
    """

    oracle = True
    quantum: int | None = None

    def __init__(self, preemptive: bool = True) -> None:
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        known = cast(OracleRequestView, request)
        return known.output_tokens - known.generated_tokens, known.arrival_s
