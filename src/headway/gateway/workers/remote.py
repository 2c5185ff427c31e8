"""A worker's side of the scheduler: exchanges tell it what they would tell control, and it passes that on.

What streams bring is told every few hundredths of a second, for all of them together. When the scheduler is gone, or
hangs, streams go on to their end, and nothing else does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from headway.control.live import NEVER, WAITING, Live
from headway.core.record import Outcome
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.relay.request import ClientRequest
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scorer import AnswerScorer, Confidence
from headway.gateway.scheduling.sglang_disaggregation import PrefillLeg
from headway.gateway.telemetry.histogram import Histogram
from headway.gateway.telemetry.metrics import RequestMetrics
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.workers import protocol
from headway.gateway.workers.protocol import Heard, Link, Released, RequestState

log = logging.getLogger("headway.gateway")
_PERIOD_S = 0.02
_STREAM_S = 50e-6
"""What streams have brought is told at these intervals, for each stream that has brought anything: the scheduler's time
for it stays within bounds."""
_NOWHERE = -2
"""Which model of a cascade has a request before control has said so."""
_CHOKED_S = 0.5
"""A scheduler that does not read is told no more of streams than there is room for."""
_LOST = ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)
_HANGS = ApiError(503, "the scheduler does not answer", "unavailable", retry_after_s=5)


class PendingRequest(InFlightRequest):
    """A ticket whose seat is the scheduler's."""

    def __init__(self, live: Live, request_id: str, scheduler: RemoteScheduler) -> None:
        super().__init__(live, request_id)
        self._scheduler = scheduler
        self.verdict: asyncio.Future[None] | None = None
        """Whether it is taken, or its answer will do."""
        self.is_judged = self.has_news = False
        self.slot: int | None = None
        self.waits = False

    # As the seat that it is to its exchange.

    def produced(self, tokens: int) -> None:
        """Tokens have come."""
        if not self.has_news:
            self._scheduler.brought(self)

    def requeue(self) -> None:
        """What has come may be of another phase; that is told with the tokens."""

    def give_up(self) -> None:
        """The stream is closed; that is told by who knows why."""

    def heard(self) -> Heard:
        """What has come so far."""
        live = self.live
        return Heard(
            live.generated_tokens, live.prompt_tokens, live.reasoning_tokens, live.phase, live.first_token_s,
            live.answer_s, live.reasoning_end_s,
        )  # fmt: skip

    def stands(self, standing: RequestState, replica: EngineEndpoint | None) -> None:
        """It is so, as control has it; None: it waits."""
        live = self.live
        if standing.stage_index != live.stage_index:
            live.generated_tokens = live.reasoning_tokens = 0  # type: ignore[misc]  # of a frozen base, thawed here
            live.first_token_s = live.answer_s = live.reasoning_end_s = NEVER
            live.prompt_tokens, live.phase = standing.prompt_tokens, standing.phase  # type: ignore[misc]
            live.arrival_s, live.model = standing.arrival_s, standing.model  # type: ignore[misc]
            live.stage_index, self.is_judged = standing.stage_index, standing.is_judged
        live.tier, live.attempt, live.moves = standing.tier, standing.attempt, standing.moves  # type: ignore[misc]
        live.placed_s, live.enqueued_s = standing.placed_s, standing.enqueued_s
        live.enter(WAITING)
        self.is_split, self.is_kept = standing.is_split, standing.is_kept
        if replica is not None:
            self.replica, self.seat = replica, self
        self.settled(None)
        self.wake()

    def settled(self, error: ApiError | None) -> None:
        """Whoever waits to hear what becomes of it need not wait."""
        verdict, self.verdict = self.verdict, None
        if verdict is not None and not verdict.done():
            if error is None:
                verdict.set_result(None)
            else:
                verdict.set_exception(error)

    def ends(self, outcome: Outcome) -> None:
        """It has ended, and is at no replica any more."""
        self.stop("the request is over")
        self.leave()
        self.outcome = outcome
        if self.judgement is not None:
            self.judgement.cancel()
        self.settled(None)
        self.wake()


class RemoteScheduler:
    """Satisfies `scheduler.Scheduler`. Belongs to one event loop."""

    def __init__(self, clock: Clock, jury: AnswerScorer | None, lost: Callable[[], None]) -> None:
        self._clock, self._jury = clock, jury
        self._on_lost = lost
        self.link = Link(protocol.FromScheduler, self._hear, self._lost)
        self.is_lost = self.is_silent = False
        """The scheduler is gone; or it hangs."""
        self.errands: dict[int, PendingRequest] = {}
        """Requests that the scheduler knows, or is about to."""
        self._replicas: dict[int, EngineEndpoint] = {}
        self._numbers = count()
        self._telemetry = RequestMetrics()
        self._news: list[PendingRequest] = []
        """Those of which something has come since that was last told."""
        self._is_telling = False
        self._not_before_s = 0.0

    @property
    def now(self) -> float:
        """Seconds since the gateway started."""
        return self._clock.now

    async def take(self, ask: ClientRequest, owner: str, request_id: str) -> PendingRequest:
        """Have a request taken. ApiError where it is not."""
        if self.is_silent:
            raise _HANGS
        number, now = next(self._numbers), self.now
        live = Live(number, now, 0, ask.max_tokens or 1, ask.model, ask.tier, stage_index=_NOWHERE)
        errand = self.errands[number] = PendingRequest(live, request_id, self)
        can_move = ask.stream and ask.can_go_on
        self.link.say(protocol.Arrived(number, request_id, owner, can_move, ask.features(now)))
        try:
            await self._verdict(errand)
        except ApiError:
            self.errands.pop(number, None)
            raise
        except asyncio.CancelledError:
            self.gave_up(errand)
            raise
        return errand

    async def _verdict(self, errand: PendingRequest) -> None:
        if self.is_lost or self.is_silent:
            raise _LOST if self.is_lost else _HANGS
        errand.verdict = verdict = asyncio.get_running_loop().create_future()
        await verdict

    # What exchanges tell.

    def judges(self, live: Live) -> bool:
        """Its present model's answer will be judged."""
        errand = self.errands.get(live.id)
        return errand is not None and errand.is_judged

    def confidence(self) -> Confidence | None:
        """What listens to how sure a model is, if that is what answers are judged by."""
        return None if self._jury is None else self._jury.confidence()

    async def score(
        self, ticket: InFlightRequest, question: str, answer: str, confidence: Confidence | None
    ) -> float | None:
        """What an answer is worth, 0 to 100; None: no judge could tell, or nobody waits for it any more."""
        assert self._jury is not None
        return await self._jury.rate(ticket, question, answer, confidence)

    async def judged(self, ticket: InFlightRequest, score: float | None) -> None:
        """Its score, if there is one: it will do, or the next model answers."""
        errand, live = self.errands[ticket.live.id], ticket.live
        ticket.is_unjudged = False
        if score is not None:
            live.quality += ((live.model, score),)  # type: ignore[misc]
        self.link.say(protocol.Judged(live.id, score))
        await self._verdict(errand)

    def sending(self, ticket: InFlightRequest, read_s: float) -> None:
        """It goes to a replica for the first time; its last byte had come by `read_s`."""
        self._telemetry.count_send(ticket, read_s, self.now)
        self._tell_soon()

    def gaps(self, ticket: InFlightRequest) -> Histogram:
        """Where its times between tokens are counted."""
        return self._telemetry.inter_token(ticket)

    def phase_changed(self, live: Live) -> None:
        """Its reasoning is over; that is told with the tokens."""

    def finished(self, ticket: InFlightRequest) -> None:
        """Its answer is out, or its client has been told why there is none."""
        ticket.leave()
        if ticket.outcome is not None:
            return
        errand = self.errands[ticket.live.id]
        if errand.is_judged:
            ticket.is_unjudged = True
            self._say_left(errand, protocol.FINISHED)
        else:
            self._end(errand, Outcome.FINISHED, protocol.FINISHED)

    def prefilled(self, ticket: InFlightRequest, kept: bool) -> None:
        """Its prompt is computed for another replica, and its KV cache kept; or not, and who decodes does it all."""
        self._goes_on(ticket, protocol.PREFILLED if kept else protocol.NOT_KEPT)

    def unprefilled(self, ticket: InFlightRequest) -> None:
        """Its prefill replica failed it: who was to decode does all of it, else it is placed anew."""
        self._goes_on(ticket, protocol.UNPREFILLED)

    def computed(self, ticket: InFlightRequest) -> None:
        """Who computed its prompt at the same time as another waited for it is done."""
        half, ticket.half = ticket.half, None
        if half is not None:
            half.leave(ticket.live)
            self.link.say(protocol.Computed(ticket.live.id))

    def half_failed(self, ticket: InFlightRequest) -> None:
        """Who was to compute its prompt at the same time as another waited for it is not: it is placed anew."""
        self._goes_on(ticket, protocol.HALF_FAILED)

    def failed(self, ticket: InFlightRequest, again: bool, untouched: bool = False) -> None:
        """Its replica failed it: it is placed anew, or turned away. `untouched`: what was kept for it still is."""
        if again:
            self._goes_on(ticket, protocol.FAILED_UNTOUCHED if untouched else protocol.FAILED)
        else:
            self.refused(ticket)

    def refused(self, ticket: InFlightRequest) -> None:
        """Nobody will have it."""
        ticket.leave()
        if ticket.outcome is None:
            self._end(self.errands[ticket.live.id], Outcome.REJECTED, protocol.REFUSED)

    def gave_up(self, ticket: InFlightRequest) -> None:
        """Its client is gone."""
        if ticket.outcome is None:
            self._end(self.errands[ticket.live.id], Outcome.CANCELLED, protocol.GAVE_UP)

    def landed(self, ticket: InFlightRequest) -> None:
        """It was to move, and has left its replica."""
        self._goes_on(ticket, protocol.LANDED)

    def _goes_on(self, ticket: InFlightRequest, why: int) -> None:
        """It has left its replica, and waits to hear where to go."""
        ticket.leave()
        ticket.moving_to = None
        if self.is_lost or self.is_silent:
            self.refused(ticket)
        elif ticket.outcome is None:
            self._say_left(self.errands[ticket.live.id], why)

    def forget(self, ticket: InFlightRequest) -> None:
        """Nobody waits for it any more."""
        ticket.leave()
        self.gave_up(ticket)

    def _end(self, errand: PendingRequest, outcome: Outcome, why: int) -> None:
        """That is the last that the scheduler hears of it."""
        errand.ends(outcome)
        del self.errands[errand.live.id]
        self._say_left(errand, why)

    def _say_left(self, errand: PendingRequest, why: int) -> None:
        self.link.say(Released(errand.live.id, why, errand.is_whole, errand.heard()))
        self.link.flush()  # before the client has its answer, and asks how things are

    # News.

    def brought(self, errand: PendingRequest) -> None:
        """Some of a stream has come."""
        errand.has_news = True
        self._news.append(errand)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time() + _PERIOD_S, self._not_before_s), self._tell)

    def _tell(self) -> None:
        if self.link.is_choked:
            asyncio.get_running_loop().call_later(_CHOKED_S, self._tell)
            return
        news, self._news, self._is_telling = self._news, [], False
        self._not_before_s = asyncio.get_running_loop().time() + len(news) * _STREAM_S
        for errand in news:
            errand.has_news = False
            if errand.seat is not None:
                self.link.say(protocol.Progress(errand.live.id, errand.heard()))
        counts = self._telemetry.drain()
        if counts:
            self.link.say(protocol.Counted(counts))

    # What the scheduler says.

    def _hear(self, messages: list[protocol.FromScheduler]) -> None:
        for message in messages:
            _HEARD[type(message)](self, message)

    def _stands(self, told: protocol.Assigned) -> None:
        errand = self.errands.get(told.number)
        if errand is not None:
            errand.slot = told.slot
            errand.half = None if told.half < 0 else PrefillLeg(self._replicas[told.half])
            errand.stands(told.standing, None if told.replica < 0 else self._replicas[told.replica])

    def _refused(self, refused: protocol.Refused) -> None:
        errand = self.errands.get(refused.number)
        if errand is not None:
            errand.settled(ApiError(
                refused.status, refused.message, refused.code, refused.param, refused.retry_after_s
            ))  # fmt: skip

    def _over(self, over: protocol.Over) -> None:
        errand = self.errands.get(over.number)
        if errand is not None:
            errand.retry_after_s = over.retry_after_s
            self._end(errand, over.outcome, protocol.CLOSED)

    def _stop(self, stop: protocol.Stop) -> None:
        errand = self.errands.get(stop.number)
        if errand is not None and stop.is_single_phase:
            errand.stop_half(stop.why)
        elif errand is not None and errand.is_streaming:
            errand.moving_to = self._replicas[stop.target] if stop.target >= 0 else None
            errand.stop(stop.why)

    def _known(self, known: protocol.ReplicaInfo) -> None:
        replica = self._replicas.get(known.id)
        if replica is None:
            adapter = ADAPTERS[known.api]
            replica = EngineEndpoint(known.id, known.pool, known.model, known.url, adapter, known.max_context_tokens)
            replica.kv_folder = None if known.kv_folder is None else Path(known.kv_folder)
            self._replicas[known.id] = replica
        replica.reported_model, replica.max_context_tokens = known.served, known.max_context_tokens
        replica.bootstrap_port = known.bootstrap_port

    def _gone(self, gone: protocol.Gone) -> None:
        replica = self._replicas.pop(gone.id, None)
        if replica is not None:
            replica.client.close()

    def _lost(self) -> None:
        self.is_lost = True
        self._turn_away(_LOST)
        self._on_lost()

    def silent(self) -> None:
        """The scheduler hangs."""
        log.error("the scheduler does not answer: clients are turned away until it does")
        self.is_silent = True
        self._turn_away(_HANGS)

    def back(self) -> None:
        """It goes on."""
        log.warning("the scheduler answers again")
        self.is_silent = False

    def _turn_away(self, why: ApiError) -> None:
        """All that wait to hear of it."""
        for errand in list(self.errands.values()):
            errand.settled(why)
            if errand.seat is None:
                self._end(errand, Outcome.REJECTED, protocol.REFUSED)

    def close(self) -> None:
        """Close all connections."""
        self.link.close()
        for replica in self._replicas.values():
            replica.client.close()
        if self._jury is not None:
            self._jury.close()


_HEARD: dict[type[Any], Callable[[RemoteScheduler, Any], None]] = {
    protocol.Assigned: RemoteScheduler._stands,
    protocol.Refused: RemoteScheduler._refused,
    protocol.Over: RemoteScheduler._over,
    protocol.Stop: RemoteScheduler._stop,
    protocol.ReplicaInfo: RemoteScheduler._known,
    protocol.Gone: RemoteScheduler._gone,
    protocol.Beat: lambda scheduler, beat: None,
}
