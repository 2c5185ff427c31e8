"""The scheduler's side of a worker. Control treats the worker's requests like its own, although their streams are in
the worker.

A request counts at its replica from before the worker receives it until the worker reports the closed connection or is
gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from headway.control.live import DECODING, Live
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.gateway.auth.keys import Caller, unknown_key
from headway.gateway.errors import ApiError, internal_error, logged, policy_error
from headway.gateway.gateway import Gateway
from headway.gateway.relay.failover import reason_here
from headway.gateway.scheduling.in_flight import RESUMES, InFlightRequest, ReleaseReason
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.workers import protocol
from headway.gateway.workers.protocol import Assigned, Link, ProgressReport, Released

log = logging.getLogger("headway.gateway")


class RemoteRequest(InFlightRequest):
    """A request whose connections belong to a worker."""

    def __init__(self, session: WorkerSession, message: protocol.RequestArrived, live: Live) -> None:
        super().__init__(live, message.request_id, message.is_streamed, is_movable=message.can_move)
        self._session = session
        self.number = message.number
        self.is_assigned = False
        """Whether the worker has sent the request to a replica, or will do so."""
        self.awaits_end = False
        """Whether the worker expects a message when control ends the request."""

    def abort(self, why: str) -> None:
        if self.is_assigned:
            if self.move_target is not None:
                self._session.send_replica(self.move_target)
            target = None if self.move_target is None else self.move_target.id
            self._session.link.send(protocol.AbortRequest(self.number, why, target))

    def abort_prefill_leg(self, why: str) -> None:
        if self.is_assigned:
            message = protocol.AbortRequest(self.number, why, None, is_prefill_leg_only=True)
            self._session.link.send(message)

    def wake(self) -> None:
        """Tell the worker that control has placed or ended the request."""
        if self.outcome is not None:
            if self.awaits_end:
                self._session.send_end(self)
        elif self.reservation is not None and not self.reservation.waits_for_slot:
            self.is_assigned = True
            self.send()
            self._session.send_assigned(self)

    def detach(self) -> None:
        """Leave the replica. While the worker's connection is open, the reservation is kept."""
        if not self.is_assigned:
            super().detach()


class WorkerSession:
    """The scheduler's end of one worker's link."""

    def __init__(
        self,
        gateway: Gateway,
        on_started: Callable[[], None],
        on_leaving: Callable[[], None],
        on_idle: Callable[[], None],
        config: protocol.WorkerConfig | None = None,
    ) -> None:
        """`config` is the first message to a starting process. `on_started` is called when it has started, `on_leaving`
        when it accepts no more connections or is gone, and `on_idle` when it drains and has no requests left."""
        self._gateway, self._driver = gateway, gateway.driver
        self._on_started, self._on_leaving, self._on_idle = on_started, on_leaving, on_idle
        self.link = Link(protocol.FromWorker, self._receive, self._link_lost, config)
        self.has_started = False
        self.is_idle = False
        """Whether the worker drains and has no requests left."""
        self.why_not_started = ""
        """The worker's reason for not starting."""
        self._requests: dict[int, RemoteRequest] = {}
        self._arriving: dict[int, asyncio.Task[None]] = {}
        """Tasks that ask the gateways' store for named streams, by request."""
        self._sent_replicas: dict[int, protocol.ReplicaInfo] = {}
        """The last information sent to the worker, by replica."""
        self._unapplied: deque[asyncio.Future[None]] = deque()
        """Changes sent to the worker that it has not confirmed yet, in order."""
        gateway.fleet.on_removed.append(self._replica_removed)
        gateway.on_replica_up.append(self._replica_up)
        gateway.on_reconfigured.append(self._reconfigured)
        gateway.quarantine.listeners.append(self._quarantined)
        if gateway.admission.is_closing:
            self._reconfigured()
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            protocol.RequestArrived: self._take_arrival,
            protocol.RequestFailed: self._failed,
            protocol.RequestSucceeded: self._succeeded,
            protocol.MetricsReport: self._take_metrics,
            protocol.WorkerLeaving: lambda message: self._on_leaving(),
            protocol.WorkerIdle: self._idle,
            protocol.ChangeApplied: self._change_applied,
            protocol.Heartbeat: self._take_heartbeat,
            protocol.StartFailed: self._take_failure,
            protocol.BodyQuarantined: lambda message: gateway.quarantine.hold(message.digest, message.until_s),
        }
        self._request_handlers: dict[type[Any], Callable[[RemoteRequest, Any], None]] = {
            protocol.ProgressReport: self._apply,
            protocol.StreamSent: self._sent,
            protocol.Released: self._released,
            protocol.AnswerScored: self._scored,
            protocol.PrefillLegDone: lambda request, message: self._driver.prefill_leg_done(request),
        }

    def _idle(self, _: protocol.WorkerIdle) -> None:
        self.is_idle = True
        self._on_idle()

    # To the worker.

    def send_assigned(self, request: RemoteRequest) -> None:
        assert request.replica is not None and request.reservation is not None
        self.send_replica(request.replica)
        message = self._assigned(request, request.replica.id)
        message.slot = request.reservation.slot
        if request.prefill_leg is not None:
            self.send_replica(request.prefill_leg.replica)
            message.prefill_replica = request.prefill_leg.replica.id
        self.link.send(message)

    def _send_held(self, request: RemoteRequest) -> None:
        """Tell the worker that the request is held, unless it has been placed or has ended."""
        if request.outcome is None and (request.reservation is None or request.reservation.waits_for_slot):
            self.link.send(self._assigned(request, None))

    def send_end(self, request: RemoteRequest) -> None:
        assert request.outcome is not None
        live = request.live
        retry_after_s = self._gateway.scaling.retry_after_s(live) if request.outcome is Outcome.REJECTED else 1
        self.link.send(protocol.RequestEnded(request.number, request.outcome, retry_after_s, live.shed_s > 0))

    def send_replica(self, replica: EngineEndpoint) -> None:
        """Send a replica's data if the worker does not have them."""
        info = protocol.ReplicaInfo(
            replica.id,
            replica.pool,
            replica.model,
            replica.url,
            replica.api_key,
            replica.is_hosted,
            protocol.engine_state_of(replica),
            replica.adapter.api,
            kv_folder=None if replica.kv_folder is None else str(replica.kv_folder),
            loras=tuple(sorted(replica.listed_loras or ())) if replica.event_block_tokens else (),
        )
        if self._sent_replicas.get(replica.id) != info:
            self._sent_replicas[replica.id] = info
            self.link.send(info)

    def _reconfigured(self) -> None:
        gateway = self._gateway
        sends_priority, stored = gateway.plan.sends_priority, gateway.keys.stored
        self.link.send(protocol.Reconfigured(gateway.settings, sends_priority, gateway.admission.is_closing, stored))
        change = asyncio.get_running_loop().create_future()
        self._unapplied.append(change)
        gateway.unapplied.add(change)
        change.add_done_callback(gateway.unapplied.discard)

    def _change_applied(self, _: protocol.ChangeApplied) -> None:
        self._unapplied.popleft().set_result(None)

    def _quarantined(self, digest: bytes, until_s: float) -> None:
        self.link.send(protocol.BodyQuarantined(digest, until_s))

    def _replica_up(self, replica: LiveReplica) -> None:
        """Tell the worker how to name prompt blocks, if the engine's events are read. Sent before the first prompt
        comes."""
        if replica.event_block_tokens:
            self.send_replica(replica)

    def _replica_removed(self, replica: LiveReplica) -> None:
        if self._sent_replicas.pop(replica.id, None) is not None:
            self.link.send(protocol.ReplicaRemoved(replica.id))

    def _assigned(self, request: RemoteRequest, replica: int | None) -> Assigned:
        live = request.live
        request.needs_score = self._driver.needs_score(live)
        return Assigned(
            request.number,
            replica,
            protocol.schedule_of(live),
            request.assignment,
            request.needs_score,
            fallback=None if live.fallback is None else (live.fallback.model, live.fallback.why),
        )

    def _send_limits(self, caller: Caller) -> None:
        if caller.is_limited:
            self.link.send(protocol.KeyLimits(caller.owner, caller.limits()))

    # From the worker.

    def _take_metrics(self, message: protocol.MetricsReport) -> None:
        telemetry = self._gateway.telemetry
        telemetry.metrics.merge(message.counts, message.responses)
        telemetry.loop_delay.add(message.delays)

    def _take_heartbeat(self, message: protocol.Heartbeat) -> None:
        if not self.has_started:
            self.has_started = True
            for held in self._gateway.quarantine.held():
                self._quarantined(*held)
            for replica in self._gateway.fleet.present():
                self._replica_up(replica)
            self._on_started()

    def _take_failure(self, message: protocol.StartFailed) -> None:
        self.why_not_started = message.why

    def _receive(self, messages: list[Any]) -> None:
        for message in messages:
            with logged(f"a worker's {type(message).__name__} message could not be handled"):
                if (handle := self._handlers.get(type(message))) is not None:
                    handle(message)
                elif (request := self._requests.get(message.number)) is not None:
                    self._request_handlers[type(message)](request, message)
                elif (arriving := self._arriving.pop(message.number, None)) is not None:
                    arriving.cancel()  # the client has left

    def _take_arrival(self, message: protocol.RequestArrived) -> None:
        has_stream = message.stream_key is not None and self._gateway.peers is not None
        id = message.features.response_id
        if not has_stream and (id is None or self._gateway.responses.holder(id) is not None):
            self._arrived(message)
        else:
            self._arriving[message.number] = asyncio.create_task(self._restore_first(message))

    async def _restore_first(self, message: protocol.RequestArrived) -> None:
        if message.stream_key is not None and self._gateway.peers is not None:
            with logged("peers: a stream could not be read from the store"):
                await self._gateway.peers.restore(message.stream_key)
        if message.features.response_id is not None:
            with logged("a response could not be looked for"):
                await self._gateway.response_holder(message.features.response_id, message.owner)
        del self._arriving[message.number]
        with logged("a worker's RequestArrived message could not be handled"):
            self._arrived(message)

    def _arrived(self, message: protocol.RequestArrived) -> None:
        number, gateway = message.number, self._gateway
        key = gateway.stream_key(message.stream_key, message.features.model)
        copy, restored = gateway.copies.begin(key)
        caller = gateway.keys.caller_of(message.owner)

        def make(live: Live) -> RemoteRequest:
            self._requests[number] = request = RemoteRequest(self, message, live)
            request.stream_key, request.copy = key, copy
            if restored is not None:
                live.generated_tokens = restored.tokens
                self.link.send(protocol.StreamRestored(number, restored))
            self._send_limits(caller)
            return request

        try:
            if message.owner and not caller.owner:  # the key was removed after the worker's check
                raise unknown_key()
            gateway.admission.admit(message.features, make, caller)
        except Exception as error:  # without an error, the client would wait forever
            self._requests.pop(number, None)
            self._send_limits(caller)
            gateway.copies.end(key, copy, is_finished=False)
            self._refuse(number, _answer_to(error))
            if not isinstance(error, ApiError):
                raise
        else:
            request = self._requests[number]
            request.awaits_end = True
            if request.outcome is not None:
                request.wake()
            self._send_held(request)

    def _refuse(self, number: int, answer: ApiError) -> None:
        self.link.send(protocol.RequestRefused(number, protocol.client_error_of(answer)))

    def _apply(self, request: RemoteRequest, message: ProgressReport | Released) -> None:
        """Update the request, unless it has ended or is not at a replica."""
        live, reservation, progress = request.live, request.reservation, message.progress
        if request.outcome is not None or reservation is None:
            return
        request.answer = message.answer
        live.keeps_model |= progress.keeps_model
        if progress.prompt_tokens not in (0, live.prompt_tokens):
            request.counted_prompt_tokens = progress.prompt_tokens
            live.prompt_tokens = progress.prompt_tokens
        live.cached_tokens = progress.cached_tokens
        tokens = progress.generated_tokens - live.generated_tokens
        has_changed = tokens != 0 or progress.phase is not live.phase
        live.first_token_s = progress.first_token_s
        if tokens:
            live.generated_tokens += tokens
            live.stage = DECODING
            request.begin_answer()
        live.reasoning_tokens = progress.reasoning_tokens
        live.phase, live.answer_s = progress.phase, progress.answer_s
        if has_changed:
            reservation.count_tokens(tokens)
        if progress.reasoning_end_s == progress.reasoning_end_s and live.reasoning_end_s != live.reasoning_end_s:
            live.reasoning_end_s = progress.reasoning_end_s
            self._driver.phase_changed(live)

    def _sent(self, request: RemoteRequest, message: protocol.StreamSent) -> None:
        if request.copy is not None:
            request.copy.extend(message.part)

    def _released(self, request: RemoteRequest, message: Released) -> None:
        self._apply(request, message)
        request.is_assigned = False
        is_scored = message.reason is ReleaseReason.FINISHED and request.needs_score and request.outcome is None
        request.awaits_end = is_scored or message.reason in RESUMES
        try:
            self._release(request, message.reason)
            if request.reservation is not None and not request.is_assigned:
                request.wake()  # the request continues at the same replica
        finally:
            if not request.awaits_end:
                del self._requests[message.number]
                self._drop(request)

    def _release(self, request: RemoteRequest, reason: ReleaseReason) -> None:
        if request.outcome is not None:
            self._driver.release(request, ReleaseReason.ACKNOWLEDGED)
            self._gateway.fleet.remove_empty()
            return
        self._driver.release(request, reason_here(reason, request.move_target is not None))

    def _drop(self, request: RemoteRequest) -> None:
        try:
            self._driver.drop(request)
        finally:
            self._gateway.end(request)

    def _scored(self, request: RemoteRequest, message: protocol.AnswerScored) -> None:
        if request.outcome is not None:
            return
        self._driver.scored(request, message.score)
        self._send_held(request)

    def _failed(self, message: protocol.RequestFailed) -> None:
        self._gateway.health.failed(self._gateway.replicas[message.replica], message.error.error())

    def _succeeded(self, message: protocol.RequestSucceeded) -> None:
        self._gateway.health.succeeded(self._gateway.replicas[message.replica])

    def _link_lost(self) -> None:
        """The worker and all its connections are gone: cancel its requests."""
        self._gateway.fleet.on_removed.remove(self._replica_removed)
        self._gateway.on_replica_up.remove(self._replica_up)
        self._gateway.on_reconfigured.remove(self._reconfigured)
        self._gateway.quarantine.listeners.remove(self._quarantined)
        while self._unapplied:
            self._unapplied.popleft().set_result(None)
        for arriving in self._arriving.values():
            arriving.cancel()
        # Held requests first, so that no held request is placed in the room freed by the other requests.
        requests = sorted(self._requests.values(), key=lambda request: request.reservation is not None)
        self._requests = {}
        for request in requests:
            request.is_assigned = request.awaits_end = False
            had_ended = request.outcome is not None
            with logged("a request of a worker that is gone could not be cancelled"):
                self._drop(request)
                if had_ended:
                    self._release(request, ReleaseReason.ACKNOWLEDGED)
        self._on_leaving()


def _answer_to(error: Exception) -> ApiError:
    """The client's error for an exception."""
    if isinstance(error, ApiError):
        return error
    return policy_error() if isinstance(error, HeadwayError) else internal_error()
