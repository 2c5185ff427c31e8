"""The scheduler's interface for relays. Control is in the same process (`driver.Driver`) or in another process."""

from __future__ import annotations

from typing import Protocol

from headway.control.live import Live
from headway.gateway.clock import HasNow
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.telemetry.metrics import PrometheusMetrics


class Scheduler(Protocol):
    """Places requests and follows their progress."""

    @property
    def metrics(self) -> PrometheusMetrics:
        """Metrics of this process."""

    @property
    def clock(self) -> HasNow:
        """Seconds since the gateway started."""

    @property
    def scorer(self) -> AnswerScorer | None:
        """Scores a cascade's answers; None without cascades."""

    async def accept_or_escalate(self, request: InFlightRequest, score: float | None) -> None:
        """Let the cascade accept the answer, or place the request at the next model."""

    def phase_changed(self, live: Live) -> None:
        """Report that reasoning has ended and the answer begins."""

    def prefill_leg_done(self, request: InFlightRequest) -> None:
        """Report that the prefill replica of a dual dispatch has sent the KV cache to the decode replica."""

    def release(self, request: InFlightRequest, reason: ReleaseReason) -> None:
        """Take the request off its replica. Control ends it or places it again, depending on the reason."""

    def drop(self, request: InFlightRequest) -> None:
        """Free everything that the request still holds. A request that has not ended counts as cancelled."""
