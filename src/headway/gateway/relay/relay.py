"""The relay: sends one client request to engines, passes the response back, and continues it elsewhere after failures.

From top to bottom, the steps of a request: `run` answers it, `_answer` waits for a replica, `_attempt` has the request
for the replica's engine made, `_exchange` sends it, `_relay_stream` passes the response back. Each read of a stream is
split, metered and rewritten by `EngineStream`, and written to the client.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from mypy_extensions import mypyc_attr

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.gateway.errors import ApiError, policy_error, rejected_error
from headway.gateway.relay.engine_request import (
    CannotResumeError,
    EngineRequest,
    build,
    learn_end_of_reasoning,
    learn_prompt,
)
from headway.gateway.relay.engine_stream import EngineStream
from headway.gateway.relay.failover import (
    Attempts,
    Failure,
    Situation,
    error_of_end,
    failure_of,
    is_failed,
    is_replicas_fault,
)
from headway.gateway.relay.partial_answer import PartialAnswer
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.response import ClientResponse
from headway.gateway.relay.writer import BufferedWriter, ResponseWriter
from headway.gateway.scheduling import vllm_disaggregation
from headway.gateway.scheduling.in_flight import InFlightRequest, PrefillLeg, ReleaseReason, RequestEndedError, State
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.scheduling.sglang_disaggregation import DualDispatch, PrefillLegError, PrefillRejectedError
from headway.gateway.scheduling.stream_copy import StreamPart
from headway.gateway.upstream import sse
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import (
    EngineError,
    RefusedError,
    ReportedRefusalError,
    TooLongError,
    UnconfirmedRefusalError,
    exhausted,
    is_too_long,
    without_frames,
)
from headway.gateway.upstream.health import HealthReports
from headway.gateway.upstream.kv_snapshot import KvSnapshot
from headway.gateway.upstream.loose_json import OTHER_TYPE

log = logging.getLogger("headway.gateway")
# Module-level names: reading a member from its enum class takes as long as a dozen other steps.
_FINISHED: Final = ReleaseReason.FINISHED
_PLACED: Final = State.PLACED
_SCORED: Final = State.SCORED
_ENDED: Final = State.ENDED
_MAX_RESPONSE_BYTES: Final = 256 << 20
_SETTLE_S, _SETTLE_STEP_S = 0.3, 0.02
"""Longest pause after a second engine has broken, because the next attempt may be the last."""
_MAX_REFUSAL_BYTES = 1 << 20
_KEPT_HEADERS = ("content-encoding", "content-disposition")
_TAIL_S = 1.0
"""Maximum time from [DONE] to the end of the response with which the connection is kept."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Relay:
    """One client request, from its arrival to its end, with its response."""

    # Initial values are set in the class, because most requests keep them.
    _is_cut_off = False
    _has_client_left = False
    _snapshot: KvSnapshot | None = None
    _dispatch: DualDispatch | None = None
    _sent: EngineRequest | None = None
    """The request of the last attempt."""
    _is_prefill = False
    """Whether the last attempt computes the prompt for another replica."""
    _kv_params: vllm_disaggregation.Params | None = None
    """Location of the KV cache at the prefill replica."""
    keep_alive_s: float | None = None
    """Interval of comments to the client of a stream that receives nothing else; None: no comments."""

    def __init__(
        self,
        request: ClientRequest,
        in_flight: InFlightRequest,
        scheduler: Scheduler,
        health: HealthReports,
        client: ResponseWriter,
        max_attempts: int,
        sends_priority: bool,
        quarantine: Quarantine,
    ) -> None:
        self._request, self._live, self.in_flight = request, in_flight.live, in_flight
        self._scheduler, self._health = scheduler, health
        self._response = ClientResponse(request, in_flight, client)
        self._quarantine = quarantine
        self._attempts = Attempts()
        self._attempts.max_attempts = max_attempts
        self._models = {self._live.model}
        """The models that were asked so far."""
        self._headers = (
            f"Content-Type: {request.content_type}\r\nX-Request-Id: {in_flight.request_id}\r\n{request.engine_headers}"
        )
        self.partial = PartialAnswer(request, in_flight, scheduler)
        self._sends_priority = sends_priority
        if in_flight.needs_score:
            self._response.begin_model(is_buffered=True)

    def _start_next_stage(self) -> None:
        """Forget the previous model's response."""
        if self.partial.rendering is not None:  # by the other model's template
            self.partial.rendering.cancel()
        self.partial = PartialAnswer(self._request, self.in_flight, self._scheduler)
        self._sent = self._kv_params = None
        self._response.begin_model(is_buffered=self.in_flight.needs_score)

    def _start_fallback(self) -> None:
        """Begin the attempts at a fallback model. Only the same model can continue an answer."""
        self._models.add(self._live.model)
        self._attempts.start_model()
        if not self._response.has_begun and not self.partial.tokens:
            self._start_next_stage()

    async def run(self) -> None:
        """Write the whole response, or the error."""
        if self.keep_alive_s is not None and self._request.stream:
            self._response.keep_alive(self.keep_alive_s)
        try:
            error = await self._respond()  # written here, because compiled code must not await in a handler
            if self._has_client_left:
                return  # an error that no client reads is not counted as an answer
            if error is not None:
                await self._response.write_error(error, self.partial.passthrough is not None)
        finally:
            if self.keep_alive_s is not None:
                self._response.stop()
            if self._snapshot is not None:
                self._snapshot.abandon()
            if self.partial.rendering is not None:
                self.partial.rendering.cancel()
            if self.in_flight.state is not _ENDED:
                self._scheduler.drop(self.in_flight)

    async def _respond(self) -> ApiError | RefusedError | None:
        """Write the whole response. Returns an error that the caller must write in place of the response or at its
        end."""
        try:
            if self.in_flight.restored is not None:
                self._replay(self.in_flight.restored)
            await self._answer()
            while self.in_flight.state is _SCORED:
                await self._judge()
                if self.in_flight.outcome is None:
                    await self._answer()
            writer, client = self._response.writer, self._response.client
            if writer is not client and isinstance(writer, BufferedWriter):
                await writer.copy_to(client)
            await client.drain()
        except RequestEndedError as ended:
            if ended.outcome is Outcome.REJECTED:
                rejection = rejected_error(self.in_flight.is_shed, self.in_flight.retry_after_s)
                return self._attempts.or_refusal(rejection if self._attempts.error is None else self._failure())
            return error_of_end(ended.outcome, self._is_cut_off)
        except ApiError as error:
            self._scheduler.release(self.in_flight, ReleaseReason.REFUSED)
            return self._attempts.or_refusal(error)
        except HeadwayError as error:
            log.error("%s", error)
            return policy_error()
        return None

    def _replay(self, part: StreamPart) -> None:
        """Send the data that the client had received before its connection broke. The answer continues after it."""
        self.partial.restore(part)
        self._response.start()
        self._response.writer.write(part.data, more=True)

    async def _answer(self) -> None:
        """Relay one model's answer, from as many replicas as needed."""
        while not self._response.is_complete:
            replica = await self.in_flight.wait_for_replica()
            if self._live.model not in self._models:
                self._start_fallback()
            self._attempts.tokens_at_start = self._live.generated_tokens
            error: EngineError | None = None
            try:
                if self._snapshot is not None:
                    await self._snapshot.restore(replica, self.in_flight.engine_slot)
                await self._attempt(replica)
            except EngineError as failure:
                error = without_frames(failure)  # handled below, because compiled code must not await in a handler
            if error is None:
                continue
            if self.in_flight.move_target is not None and self.in_flight.outcome is None:
                await self._save_kv(replica)
            if self._attempts.waits_for_others(failure_of(error)):
                await self._settle(replica)
            self._release_failed(replica, error)

    async def _settle(self, replica: EngineEndpoint) -> None:
        """Wait until engines that were killed together are known to be down, for at most `_SETTLE_S`."""
        for _ in range(round(_SETTLE_S / _SETTLE_STEP_S)):
            if not self._health.has_other(replica):
                return
            await asyncio.sleep(_SETTLE_STEP_S)

    async def _judge(self) -> None:
        """Score the answer, and let the cascade accept it or escalate to the next model."""
        in_flight, partial = self.in_flight, self.partial
        scorer = self._scheduler.scorer
        assert scorer is not None
        score = await scorer.score(in_flight, self._request.text, partial.scored_text(), partial.confidence)
        in_flight.raise_if_ended()
        await self._scheduler.accept_or_escalate(in_flight, score)
        if in_flight.outcome is None:
            self._start_next_stage()

    def client_disconnected(self) -> None:
        """End the request, because its client has left."""
        self._has_client_left = True
        self._scheduler.release(self.in_flight, ReleaseReason.CANCELLED)
        self._response.flush()

    def cut_off(self) -> None:
        """End the request, because the gateway ends."""
        self._is_cut_off = True
        self._scheduler.release(self.in_flight, ReleaseReason.CANCELLED)
        self._response.flush()

    # Sending the request to an engine.

    async def _attempt(self, replica: EngineEndpoint) -> None:
        """Send the request to a replica and relay its response. Raises EngineError if the replica fails."""
        request, partial = self._request, self.partial
        if replica.adapter.template is not None and request.is_chat and partial.prompt is None:
            await learn_prompt(request, partial, replica)
        try:
            if partial.reasoning:
                await learn_end_of_reasoning(partial, replica)
            now = self._scheduler.clock.now
            self._sent = sent = build(
                request, partial, self.in_flight, replica, self._kv_params, self._sent, self._sends_priority, now
            )
        except CannotResumeError:
            raise self._failure() from None
        self._is_prefill = sent is not None and sent.is_prefill
        if sent is None:
            self._finish_stream(partial.closing_events(self._live.prompt_tokens))
            return
        if request.received_s is not None:
            self._scheduler.metrics.count_send(self.in_flight, request.received_s, now)
            request.received_s = None
        if self.in_flight.prefill_leg is not None:
            await self._dispatch_to_pair(self.in_flight.prefill_leg, replica, sent.path, sent.body)
        else:
            await self._exchange(replica, sent.path, request.encoded(sent.body))

    async def _dispatch_to_pair(
        self, leg: PrefillLeg, replica: EngineEndpoint, path: str, body: dict[str, Any]
    ) -> None:
        """Send the request to a prefill and a decode replica at the same time, and relay the decode replica's
        response."""
        tokens_before = self.partial.tokens
        self._dispatch = DualDispatch(
            self.in_flight,
            leg,
            lambda: self.partial.tokens > tokens_before or self._response.is_complete,
            self._scheduler.prefill_leg_done,
            self._attempts.may_resend,
        )
        try:
            await self._dispatch.send(self._exchange, replica, path, self._headers, body)
        except PrefillRejectedError as error:
            self._scheduler.release(self.in_flight, ReleaseReason.REFUSED)
            self._response.write_refusal(error.status, error.body)
        finally:
            self._dispatch = None

    async def _exchange(self, replica: EngineEndpoint, path: str, data: bytes) -> None:
        """Send the request's bytes, and relay the response by its kind."""
        connection = await replica.client.request(
            "POST", path, self._headers, data, self._set_connection, self._attempts.may_resend
        )
        status = connection.status
        if status != 200:
            if is_failed(status, self._response.has_begun):
                raise RefusedError(status, await connection.read(1 << 16))
            if status >= 400 and self._needs_confirmation(replica, status):
                raise UnconfirmedRefusalError(status, await connection.read(_MAX_REFUSAL_BYTES))
        try:
            is_well = await self._relay_by_kind(connection)
        except ReportedRefusalError as error:
            status = error.status
            if is_failed(status, self._response.has_begun):
                raise
            if self._needs_confirmation(replica, status):
                raise UnconfirmedRefusalError(status, error.body) from None
            self._refuse(status, error.body)
            is_well = True
        if is_well:
            self._health.succeeded(replica)
            if status < 400:
                self._quarantine.answered(self._request.raw)

    async def _relay_by_kind(self, connection: Connection) -> bool:
        """Relay the response by its kind. False if the engine ended it with an error that the client has received."""
        status, headers = connection.status, connection.headers
        if status != 200 or (self._is_prefill and "content-encoding" not in headers):
            await (self._take_prefill(connection) if status == 200 else self._relay_whole(connection))
            return True
        has_begun, is_open = self._response.has_begun, self._response.is_open
        content_type = headers.get("content-type", "").lower()
        if headers.get("content-encoding", "identity") != "identity":
            if self._is_prefill or has_begun or is_open:
                raise EngineError("encoded its answer as nobody had asked for")
            await self._relay_bytes(connection, "an encoded answer")
        elif "event-stream" in content_type or (self._request.stream and (has_begun or not content_type)):
            return await self._relay_stream(connection)
        elif not content_type or "json" in content_type:
            await self._relay_whole(connection)
        elif has_begun or (is_open and not content_type.startswith("text/")):
            raise EngineError(f"continued a stream with {content_type}")
        elif content_type.startswith("text/") and not self._request.stream:
            await self._relay_whole(connection)
        else:
            await self._relay_bytes(connection, "" if self._request.may_be_bytes else OTHER_TYPE)
        return True

    def _needs_confirmation(self, replica: EngineEndpoint, status: int) -> bool:
        """Whether another replica must confirm that the request caused the refusal."""
        in_flight, assignment = self.in_flight, self.in_flight.assignment
        is_whole = in_flight.prefill_leg is None and not self._is_prefill and not assignment.has_stored_kv
        may_confirm = self._attempts.may_confirm(is_whole, assignment.has_alternative, self._response.has_begun)
        return may_confirm and self._health.needs_confirmation(replica, status)

    def _settle_refusal(self, status: int) -> None:
        """Evaluate a refusal after a second replica has answered or refused the request."""
        if self._attempts.refusal is None:
            return
        (refusing, error), self._attempts.refusal = self._attempts.refusal, None
        replica = self.in_flight.replica
        if status < 400:
            self._health.failed(refusing, error)
        elif replica is not None:
            self._health.refusal_confirmed(refusing)
            self._health.refusal_confirmed(replica)

    def _set_connection(self, connection: Connection) -> None:
        if self.in_flight.outcome is not None or (self._dispatch is not None and self._dispatch.has_failed):
            connection.abort("the request is over")
        elif self.in_flight.abort_reason is not None:
            connection.abort(self.in_flight.abort_reason)
        else:
            self.in_flight.connection = connection
            if self.in_flight.state is _PLACED:  # else it is sent a second time, after a lost connection
                self.in_flight.send()

    # Relaying the response to the client.

    async def _relay_stream(self, connection: Connection) -> bool:
        """Pass a stream on: the data of each read at once. The last bytes are sent with the end of the response.

        False if the engine ended it with an error that the client has received.
        """
        stream = EngineStream(
            self.partial,
            self.in_flight,
            self._scheduler,
            self._sent,
            self._request.wants_usage,
            self._write_events,
            self._write_tokens if self._response.is_paced else None,
            self._response.has_begun,
        )
        while await connection.stream_to(stream.feed) and not (stream.is_done or stream.is_too_long):
            await self._wait_for_client()
        if stream.is_too_long:
            self._end_too_long()
            return True
        if not stream.is_done:
            stream.end()
            if not stream.has_ended(self._request.num_sequences) and self._request.needs_end:
                raise EngineError("ended its stream without [DONE]")
            if self.partial.passthrough is None and not stream.is_done:
                stream.last_events += sse.DONE
        if not connection.is_complete or (self._dispatch is not None and self._dispatch.is_pending):
            self._write_events(stream.last_events)
            stream.last_events = b""
            await connection.read_tail(_TAIL_S)
            if self._dispatch is not None:
                await self._dispatch.wait_for_prefill(_TAIL_S)
        if stream.error is None:
            self._finish_stream(stream.last_events)
            return True
        stream.error.after_tokens = self._live.generated_tokens
        if self.in_flight.replica is not None and not isinstance(stream.error, RefusedError):
            self._health.failed(self.in_flight.replica, stream.error)
        self._finish_stream(stream.last_events, ReleaseReason.REFUSED)
        return False

    async def _relay_bytes(self, connection: Connection, what: str) -> None:
        """Pass on an answer without reading its content. `what`: the kind of the answer, if the engine should not have
        sent this kind."""
        self.partial.note_unread(what)
        headers = connection.headers
        self._settle_refusal(200)
        self._response.is_opaque = True
        content_type = headers.get("content-type", "application/octet-stream").encode("latin-1")
        length = headers.get("content-length")
        extra = [(name.encode(), headers[name].encode("latin-1")) for name in _KEPT_HEADERS if name in headers]
        is_known = length is not None and length.isdigit()
        self._response.start(200, content_type, int(length or 0) if is_known else None, extra)
        self.in_flight.answer.is_unstreamed = True
        self._live.first_token_s = self._live.answer_s = self._scheduler.clock.now
        while part := await connection.read_part():
            self._response.writer.write(part, more=True)
            if self._response.writer.is_full:
                await self._wait_for_client()
        self._response.is_complete = True
        self._scheduler.release(self.in_flight, _FINISHED)
        self._response.writer.write(b"")

    def _end_too_long(self) -> None:
        """End a stream that is too long, because its engine does not end it, and abort the request at the engine.
        Raises EngineError for an API in which only the engine can end the answer."""
        replica = self.in_flight.replica
        name = "the replica" if replica is None else replica.name
        log.warning("%s generates more tokens than request %s allows", name, self.in_flight.request_id)
        if self.partial.passthrough is not None:
            raise EngineError("generates more tokens than the request allows")
        self._finish_stream(self.partial.closing_events(self._live.prompt_tokens))

    async def _wait_for_client(self) -> None:
        """Wait until the client has read enough. Meanwhile the engine is not blamed for its silence."""
        self._set_waits_for_client(True)
        try:
            await self._response.writer.drain()
        finally:
            self._set_waits_for_client(False)

    def _set_waits_for_client(self, waits: bool) -> None:
        in_flight = self.in_flight
        in_flight.answer.waits_for_client = waits
        if in_flight.reservation is not None and self._live.generated_tokens:
            in_flight.reservation.count_tokens(0)  # reports the wait if the scheduler is another process

    async def _relay_whole(self, connection: Connection) -> None:
        """Pass on an answer that is not streamed, or a refusal."""
        partial, status = self.partial, connection.status
        data = await connection.read(_MAX_RESPONSE_BYTES)
        if status >= 300:
            self._refuse(status, data)
            return
        if self._response.has_begun:  # comments were sent while the request waited
            raise EngineError("answered a stream as a whole")
        content_type = connection.headers.get("content-type", "application/json")
        is_json = "json" in content_type.lower()
        if connection.is_longer and is_json and not sse.is_json(data):
            raise EngineError("said more than the length of its answer")
        partial.measure_unstreamed(data, is_json and bool(data))
        if not is_json and not self._request.may_be_bytes:
            partial.note_unread(OTHER_TYPE)
        if self._attempts.refusal is not None:
            self._settle_refusal(status)
        if self._dispatch is not None:
            await self._dispatch.wait_for_prefill(_TAIL_S)
        self._scheduler.release(self.in_flight, _FINISHED)
        if partial.hides_logprobs and partial.head and isinstance(answer := sse.decoded(data), dict):
            sse.remove_fields(("logprobs",), answer)
            data = sse.encoded(answer)
        self._response.write_whole(status, data, content_type)

    def _refuse(self, status: int, data: bytes) -> None:
        """Give the client the engine's refusal. TooLongError if a fallback may succeed."""
        if self.in_flight.assignment.has_fallback and self._dispatch is None and is_too_long(status, data):
            raise TooLongError(status, data)
        self._settle_refusal(status)
        self._scheduler.release(self.in_flight, ReleaseReason.REFUSED)
        self._response.write_refusal(status, data)

    async def _take_prefill(self, connection: Connection) -> None:
        """Keep a prefill replica's report on its KV cache for the request to the decode replica."""
        answer = vllm_disaggregation.read_prefill_answer(await connection.read(_MAX_RESPONSE_BYTES))
        self.partial.set_prompt_tokens(answer.prompt_tokens - self.partial.tokens)
        self._kv_params = answer.kv_transfer_params
        is_stored = answer.kv_transfer_params is not None
        reason = ReleaseReason.PREFILLED if is_stored else ReleaseReason.PREFILL_NOT_STORED
        self._scheduler.release(self.in_flight, reason)

    def _write_events(self, data: bytes) -> bool:
        """Write a part of a stream. False if the client reads slowly."""
        if not self._response.has_begun:
            self._start_stream()
        return self._response.write_events(data, self.partial)

    def _write_tokens(self, event: bytes, num_tokens: int) -> bool:
        """Write an event with this many answer tokens at their pace. False if the client reads slowly."""
        if not self._response.has_begun:
            self._start_stream()
        return self._response.write_tokens(event, num_tokens, self.partial)

    def _start_stream(self) -> None:
        if self._attempts.refusal is not None:
            self._settle_refusal(200)
        self._response.start()

    def _finish_stream(self, data: bytes, reason: ReleaseReason = _FINISHED) -> None:
        response = self._response
        response.is_complete = True
        if self.in_flight.copy is not None:
            response.copy(data.removesuffix(sse.DONE), self.partial)
        self._scheduler.release(self.in_flight, reason)
        if not response.has_begun:
            self._start_stream()
        response.writer.write(data)

    # After a failure.

    def _release_failed(self, replica: EngineEndpoint, error: EngineError) -> None:
        """Release the request after a failed attempt, so that it is placed again. Raises ApiError if the client gets
        the failure."""
        in_flight, attempts, partial, response = self.in_flight, self._attempts, self.partial, self._response
        in_flight.raise_if_ended()
        is_moving, is_prefill_leg = in_flight.move_target is not None, False
        if isinstance(error, PrefillLegError):
            replica, error, is_prefill_leg = error.replica, without_frames(error.cause), True
        failure = failure_of(error)
        if not is_moving:
            self._note_failure(replica, error, failure)
        breaks_off = failure is Failure.BROKEN_OFF and not is_moving and not response.is_opaque
        may_break = breaks_off and not self._quarantine.is_harmless(self._request.raw)
        if may_break:
            self._quarantine.check(self._request.raw, self._scheduler.clock.now)
        has_output = partial.tokens > 0 or partial.passthrough is not None
        situation = Situation(
            is_moving=is_moving,
            is_opaque=response.is_opaque,
            has_begun=response.has_begun,
            has_output=has_output,
            can_resume=self._request.can_resume,
            has_fallback=in_flight.assignment.has_fallback,
            is_prefill=self._is_prefill,
            is_prefill_leg=is_prefill_leg,
            may_break=may_break,
        )
        reason = attempts.after(failure, situation, replica.name, self._live.generated_tokens)
        if failure is Failure.NO_DESCRIPTOR and reason is None:
            raise exhausted()
        if reason is None:
            if attempts.is_quarantined:
                log.warning("request %s is quarantined: %s", in_flight.request_id, self._failure().message)
                self._quarantine.add(self._request.raw, self._scheduler.clock.now)
            raise self._failure()
        if reason is ReleaseReason.PREFILL_FAILED:
            log.warning("%s did not prefill: %s", replica.name, error)
        self._scheduler.release(in_flight, reason)

    def _note_failure(self, replica: EngineEndpoint, error: EngineError, failure: Failure) -> None:
        """Keep the failure for the client, and report it if the replica caused it."""
        attempts = self._attempts
        error.after_tokens = max(self._live.generated_tokens - attempts.tokens_at_start, 0)
        if failure in (Failure.TOO_LONG, Failure.UNCONFIRMED):
            assert isinstance(error, RefusedError)
            attempts.refusal = replica, error
        if failure not in (Failure.TOO_LONG, Failure.NO_DESCRIPTOR):
            attempts.error = error
        if is_replicas_fault(failure):
            self._health.failed(replica, error)

    async def _save_kv(self, replica: EngineEndpoint) -> None:
        """Save the KV cache of a request that moves. If it is not saved, the next replica recomputes the tokens."""
        if self._snapshot is not None:  # the snapshot of a move whose target failed before the restore
            await self._snapshot.delete()
        self._snapshot = KvSnapshot()
        partial = self.partial
        tokens = await self._snapshot.save(replica, self.in_flight.engine_slot, partial.seen_tokens, partial.last_text)
        if tokens:
            partial.set_token_ids(tokens)

    def _failure(self) -> ApiError:
        """The client's error for the failure of the last attempt."""
        replica = self.in_flight.replica
        return self._attempts.client_error("the replica" if replica is None else replica.name)
