"""A worker's client of the scheduler: forwards the relays' calls, and applies the scheduler's messages.

The progress of all streams is reported together, every few hundredths of a second. If the scheduler is gone or hangs,
running streams continue to their end, and no new requests are accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from msgspec import structs

from headway.control.fallback import FellBack
from headway.control.live import NEVER, WAITING, Live
from headway.core.record import Outcome
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError, scheduler_hangs
from headway.gateway.kv_events.prompts import PromptBlocks
from headway.gateway.relay.request import ClientRequest
from headway.gateway.scheduling.in_flight import RESUMES, InFlightRequest, PrefillLeg, ReleaseReason, State
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.scheduling.stream_copy import StreamCopy
from headway.gateway.telemetry.loop_delay import LoopDelay
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint, count_prompt
from headway.gateway.upstream.errors import EngineError, ExhaustedError
from headway.gateway.upstream.health import Refusals
from headway.gateway.workers import protocol
from headway.gateway.workers.protocol import Link, Released, ReportedError

log = logging.getLogger("headway.gateway")
_REPORT_PERIOD_S = 0.02
_REPORT_S_PER_STREAM = 50e-6
"""Minimum reporting period per stream with new tokens. It limits the scheduler's load."""
_BACKED_UP_PAUSE_S = 0.5
_NUM_DELAYS = 600
"""Maximum number of delays of the event loop that wait for the next report."""
"""Pause between reports while the scheduler does not read."""
_SUCCESS_PERIOD_S = 0.02
"""Minimum time between two reports of a replica's successes."""
_NO_STAGE = -2
"""Stage index of a request that the scheduler has not assigned yet. -1 means a request without a cascade."""


class PendingRequest(InFlightRequest):
    """A worker's request. The object is its own reservation, because the replica's counts are in the scheduler's
    process."""

    def __init__(self, live: Live, request_id: str, on_progress: Callable[[PendingRequest], None]) -> None:
        super().__init__(live, request_id)
        self._on_progress = on_progress
        self.reply: asyncio.Future[None] | None = None
        """Completed by the scheduler's next message about the request."""
        self.has_progress = False
        self.slot: int | None = None
        self.waits_for_slot = False

    def count_tokens(self, tokens: int) -> None:
        """Report the progress with the next report."""
        if not self.has_progress:
            self._on_progress(self)

    def free(self) -> None:
        """Do nothing: `Released` is sent when the reason is known."""

    def update(self, state: protocol.Assigned, replica: EngineEndpoint | None) -> None:
        """Take over the scheduler's state; `replica` is None while the request is held."""
        live, schedule = self.live, state.schedule
        if schedule.stage_index != live.stage_index:
            live.generated_tokens = live.reasoning_tokens = live.cached_tokens = 0
            live.first_token_s = live.answer_s = live.reasoning_end_s = NEVER
        protocol.apply(schedule, live)
        if state.fallback is None:
            live.fallback = None
        elif live.fallback is None or (live.fallback.model, live.fallback.why) != state.fallback:
            live.fallback = FellBack(*state.fallback, 0, 0, None)
        live.stage = WAITING
        self.slot, self.assignment, self.needs_score = state.slot, state.assignment, state.needs_score
        if replica is not None:
            self.enter(State.PLACED)
            self.replica, self.reservation = replica, self
        self.complete_reply(None)
        self.wake()

    def complete_reply(self, error: ApiError | None) -> None:
        reply, self.reply = self.reply, None
        if reply is not None and not reply.done():
            if error is None:
                reply.set_result(None)
            else:
                reply.set_exception(error)

    def end(self, outcome: Outcome) -> None:
        """Leave the replica, and wake the relay."""
        self.abort("the request is over")
        self.detach()
        self.complete_reply(None)
        super().end(outcome)


class RemoteScheduler:
    """The scheduler in another process. Implements `scheduler.Scheduler`. Belongs to one event loop."""

    def __init__(
        self,
        clock: Clock,
        scorer: AnswerScorer | None,
        on_lost: Callable[[], None],
        handlers: Mapping[type[Any], Callable[[Any], None]] = MappingProxyType({}),
    ) -> None:
        """`handlers` get the messages that concern neither a request nor a replica."""
        self.clock, self.scorer, self._on_lost = clock, scorer, on_lost
        self.link = Link(protocol.FromScheduler, self._receive, self._link_lost)
        self.is_gone = self.is_silent = False
        self.requests: dict[int, PendingRequest] = {}
        """Requests that the scheduler knows, or will know soon."""
        self._replicas: dict[int, EngineEndpoint] = {}
        self._numbers = count()
        self.metrics = PrometheusMetrics()
        self.loop_delay = LoopDelay(clock, _NUM_DELAYS)
        self._with_progress: list[PendingRequest] = []
        """Requests with new tokens since the last report."""
        self._prompt_blocks = PromptBlocks()
        self._is_report_due = False
        self._next_report_s = 0.0
        """Earliest time of the next report, on the event loop's clock."""
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            protocol.ReplicaInfo: self._update_replica,
            protocol.ReplicaRemoved: self._remove_replica,
            protocol.Heartbeat: lambda message: None,
            **handlers,
        }
        self._request_handlers: dict[type[Any], Callable[[PendingRequest, Any], None]] = {
            protocol.Assigned: self._assigned,
            protocol.RequestRefused: self._refused,
            protocol.RequestEnded: self._ended,
            protocol.AbortRequest: self._abort,
            protocol.StreamRestored: self._restored,
        }

    @property
    def now(self) -> float:
        return self.clock.now

    async def submit(self, client_request: ClientRequest, owner: str, request_id: str) -> PendingRequest:
        """Let the scheduler accept a request. Raises ApiError if it does not accept it."""
        if self.is_silent:
            raise scheduler_hangs()
        engines = [
            each
            for each in self._replicas.values()
            if client_request.model in (each.model, each.reported_model, *(each.listed_loras or ()))
        ]
        await self._prompt_blocks.name(client_request, engines)
        if client_request.prompt_ids is None and client_request.counted_tokens is None:
            client_request.counted_tokens = await count_prompt(
                client_request.body, len(client_request.text), client_request.max_tokens or 1, engines
            )
        if self.is_silent:  # since the engines were asked
            raise scheduler_hangs()
        number, now = next(self._numbers), self.now
        live = Live(
            number,
            now,
            0,
            client_request.max_tokens or 1,
            client_request.model,
            client_request.tier,
        )
        features = client_request.features(now, bool(owner))
        live.stage_index, live.num_sequences = _NO_STAGE, features.num_sequences
        request = self.requests[number] = PendingRequest(live, request_id, self._report_progress)
        request.copy = None if client_request.stream_key is None else StreamCopy()
        self.link.send(
            protocol.RequestArrived(
                number,
                request_id,
                owner,
                client_request.stream and client_request.can_resume,
                features,
                client_request.stream,
                client_request.stream_key,
            )
        )
        try:
            await self._reply(request)
        except ApiError:
            self.requests.pop(number, None)
            raise
        except asyncio.CancelledError:
            self.release(request, ReleaseReason.CANCELLED)
            raise
        return request

    async def _reply(self, request: PendingRequest) -> None:
        if self.is_gone or self.is_silent:
            raise _scheduler_gone() if self.is_gone else scheduler_hangs()
        request.reply = asyncio.get_running_loop().create_future()
        await request.reply

    # Calls of relays.

    async def accept_or_escalate(self, request: InFlightRequest, score: float | None) -> None:
        pending, live = self.requests[request.live.id], request.live
        request.enter(State.HELD)
        if score is not None:
            live.quality += ((live.model, score),)
        self.link.send(protocol.AnswerScored(live.id, score))
        await self._reply(pending)

    def phase_changed(self, live: Live) -> None:
        """Do nothing: the phase is reported with the tokens."""

    def prefill_leg_done(self, request: InFlightRequest) -> None:
        if request.end_prefill_leg() is not None:
            self.link.send(protocol.PrefillLegDone(request.live.id))

    def release(self, request: InFlightRequest, reason: ReleaseReason) -> None:
        """Detach the request, and send `Released`. Without a scheduler, a request that would continue is rejected."""
        if reason in RESUMES:
            request.leave()
        elif reason is not ReleaseReason.CANCELLED:
            request.detach()
        if request.outcome is not None:
            return
        pending = self.requests[request.live.id]
        match reason:
            case ReleaseReason.FINISHED if pending.needs_score:
                request.enter(State.SCORED)
                self._send_released(pending, reason)
            case ReleaseReason.FINISHED:
                self._end(pending, Outcome.FINISHED, reason)
            case ReleaseReason.REFUSED:
                self._end(pending, Outcome.REJECTED, reason)
            case ReleaseReason.CANCELLED:
                self._end(pending, Outcome.CANCELLED, reason)
            case _:
                request.move_target = None
                if self.is_gone or self.is_silent:
                    self._end(pending, Outcome.REJECTED, ReleaseReason.REFUSED)
                else:
                    self._send_released(pending, reason)

    def drop(self, request: InFlightRequest) -> None:
        request.detach()
        self.release(request, ReleaseReason.CANCELLED)

    def _end(self, request: PendingRequest, outcome: Outcome, reason: ReleaseReason) -> None:
        request.end(outcome)
        del self.requests[request.live.id]
        self._send_released(request, reason)

    def _send_released(self, request: PendingRequest, reason: ReleaseReason) -> None:
        self._send_copied(request)
        live = request.live
        self.link.send(Released(live.id, reason, protocol.progress_of(live), request.answer))
        self.link.flush()  # before the client has its answer, because the client may then ask for metrics

    def _send_copied(self, request: PendingRequest) -> None:
        """Send the data that the client received since the last message, for a retry."""
        if request.copy is not None and request.copy.data:
            self.link.send(protocol.StreamSent(request.live.id, request.copy.take()))

    # Reports.

    def _report_progress(self, request: PendingRequest) -> None:
        request.has_progress = True
        self._with_progress.append(request)
        self.schedule_report()

    def schedule_report(self) -> None:
        """Schedule a report of the data since the last report."""
        if not self._is_report_due:
            self._is_report_due = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time() + _REPORT_PERIOD_S, self._next_report_s), self._report)

    def _report(self) -> None:
        if self.link.is_backed_up:
            asyncio.get_running_loop().call_later(_BACKED_UP_PAUSE_S, self._report)
            return
        requests, self._with_progress, self._is_report_due = self._with_progress, [], False
        self._next_report_s = asyncio.get_running_loop().time() + len(requests) * _REPORT_S_PER_STREAM
        for request in requests:
            request.has_progress = False
            if request.reservation is not None:
                live = request.live
                self.link.send(protocol.ProgressReport(live.id, protocol.progress_of(live), request.answer))
                self._send_copied(request)
        counts, responses, delays = self.metrics.drain(), self.metrics.drain_responses(), self.loop_delay.take()
        if counts or responses or delays:
            self.link.send(protocol.MetricsReport(counts, responses, delays))

    # Messages of the scheduler.

    def _receive(self, messages: list[protocol.FromScheduler]) -> None:
        for message in messages:
            if (handle := self._request_handlers.get(type(message))) is None:
                self._handlers[type(message)](message)
            elif (request := self.requests.get(message.number)) is not None:  # type: ignore[union-attr]
                handle(request, message)

    def _assigned(self, request: PendingRequest, message: protocol.Assigned) -> None:
        prefill = message.prefill_replica
        request.prefill_leg = None if prefill is None else PrefillLeg(self._replicas[prefill])
        request.update(message, None if message.replica is None else self._replicas[message.replica])

    def _restored(self, request: PendingRequest, message: protocol.StreamRestored) -> None:
        request.restored = message.part
        if request.copy is not None:
            request.copy.go_on_after(message.part)

    def _refused(self, request: PendingRequest, message: protocol.RequestRefused) -> None:
        request.complete_reply(ApiError(*structs.astuple(message.error)))

    def _ended(self, request: PendingRequest, message: protocol.RequestEnded) -> None:
        request.retry_after_s, request.is_shed = message.retry_after_s, message.is_shed
        self._end(request, message.outcome, ReleaseReason.ACKNOWLEDGED)

    def _abort(self, request: PendingRequest, message: protocol.AbortRequest) -> None:
        if message.is_prefill_leg_only:
            request.abort_prefill_leg(message.why)
        elif message.target is None:
            request.abort(message.why)
        elif request.state is State.STREAMING:
            request.enter(State.MOVING)
            request.move_target = self._replicas[message.target]
            request.abort(message.why)

    def _update_replica(self, info: protocol.ReplicaInfo) -> None:
        replica, state = self._replicas.get(info.id), info.state
        if replica is None:
            replica = self._replicas[info.id] = EngineEndpoint(
                info.id,
                info.pool,
                info.model,
                info.url,
                ADAPTERS[info.api],
                state.max_context_tokens,
                api_key=info.api_key,
                is_hosted=info.is_hosted,
            )
            replica.kv_folder = None if info.kv_folder is None else Path(info.kv_folder)
        protocol.apply(state, replica)
        replica.listed_loras = frozenset(info.loras)
        self._prompt_blocks.prepare(replica)

    def _remove_replica(self, message: protocol.ReplicaRemoved) -> None:
        if (replica := self._replicas.pop(message.id, None)) is not None:
            replica.client.close()

    # Loss, silence and return of the scheduler.

    def _link_lost(self) -> None:
        self.is_gone = True
        self._reject_waiting(_scheduler_gone)
        self._on_lost()

    def set_silent(self) -> None:
        log.error("the scheduler does not answer: requests are rejected until it does")
        self.is_silent = True
        self._reject_waiting(scheduler_hangs)

    def set_responsive(self) -> None:
        log.warning("the scheduler answers again")
        self.is_silent = False

    def _reject_waiting(self, new_error: Callable[[], ApiError]) -> None:
        for request in list(self.requests.values()):
            request.complete_reply(new_error())
            if request.reservation is None:
                self._end(request, Outcome.REJECTED, ReleaseReason.REFUSED)

    def close(self) -> None:
        self.loop_delay.stop()
        self.link.close()
        for replica in self._replicas.values():
            replica.client.close()
        if self.scorer is not None:
            self.scorer.close()


def _scheduler_gone() -> ApiError:
    return ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)


class RemoteHealth:
    """Reports the outcome of requests to the scheduler's health monitor. Implements `relay.Health`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._refusals = Refusals()
        self._reported_s: dict[int, float] = {}
        """Maps each replica to the time at which its success was last reported. A replica that fails is removed."""

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None:
        if isinstance(error, ExhaustedError):
            return
        self._reported_s.pop(replica.id, None)
        self._link.send(protocol.RequestFailed(replica.id, ReportedError.of(error)))

    def has_other(self, replica: EngineEndpoint) -> bool:
        return True  # only the scheduler knows the other replicas

    def needs_confirmation(self, replica: EngineEndpoint, status: int) -> bool:
        return self._refusals.needs_confirmation(replica, status)

    def refusal_confirmed(self, replica: EngineEndpoint) -> None:
        self._refusals.confirmed(replica)

    def succeeded(self, replica: EngineEndpoint) -> None:
        now = monotonic()
        if now - self._reported_s.get(replica.id, 0.0) >= _SUCCESS_PERIOD_S:
            self._reported_s[replica.id] = now
            self._link.send(protocol.RequestSucceeded(replica.id))
