"""Who places requests, as an exchange sees it: control in this process (`driver.Driver`), or in another one."""

from __future__ import annotations

from typing import Protocol

from headway.control.live import Live
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scorer import Confidence
from headway.gateway.telemetry.histogram import Histogram


class Scheduler(Protocol):
    """What exchanges tell, and ask."""

    @property
    def now(self) -> float:
        """Seconds since the gateway started."""

    def judges(self, live: Live) -> bool:
        """Its present model's answer will be judged."""

    def confidence(self) -> Confidence | None:
        """What listens to how sure a model is, if that is what answers are judged by."""

    async def score(
        self, ticket: InFlightRequest, question: str, answer: str, confidence: Confidence | None
    ) -> float | None:
        """What an answer is worth, 0 to 100; None: no judge could tell, or nobody waits for it any more."""

    async def judged(self, ticket: InFlightRequest, score: float | None) -> None:
        """Its score, if there is one: it will do, or the next model answers."""

    def sending(self, ticket: InFlightRequest, read_s: float) -> None:
        """It goes to a replica for the first time; its last byte had come by `read_s`."""

    def gaps(self, ticket: InFlightRequest) -> Histogram:
        """Where its times between tokens are counted."""

    def phase_changed(self, live: Live) -> None:
        """Its reasoning is over."""

    def finished(self, ticket: InFlightRequest) -> None:
        """Its answer is out, or its client has been told why there is none."""

    def prefilled(self, ticket: InFlightRequest, kept: bool) -> None:
        """Its prompt is computed for another replica, and its KV cache kept; or not, and who decodes does it all."""

    def unprefilled(self, ticket: InFlightRequest) -> None:
        """Its prefill replica failed it: who was to decode does all of it, else it is placed anew."""

    def computed(self, ticket: InFlightRequest) -> None:
        """Who computed its prompt at the same time as another waited for it is done."""

    def half_failed(self, ticket: InFlightRequest) -> None:
        """Who was to compute its prompt at the same time as another waited for it is not: it is placed anew."""

    def failed(self, ticket: InFlightRequest, again: bool, untouched: bool = False) -> None:
        """Its replica failed it: it is placed anew, or turned away. `untouched`: what was kept for it still is."""

    def refused(self, ticket: InFlightRequest) -> None:
        """Nobody will have it."""

    def gave_up(self, ticket: InFlightRequest) -> None:
        """Its client is gone."""

    def landed(self, ticket: InFlightRequest) -> None:
        """It was to move, and has left its replica."""

    def forget(self, ticket: InFlightRequest) -> None:
        """Nobody waits for it any more."""
