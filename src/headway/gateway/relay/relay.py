"""One request between its client and the engines: forwarded, passed back event by event, continued where one breaks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.gateway.errors import ApiError
from headway.gateway.relay.buffer import Buffer
from headway.gateway.relay.continuation import CannotGoOnError, ResumedStream, without
from headway.gateway.relay.headers import headers
from headway.gateway.relay.metering import ItlMeter, ResponseMeter
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.stream import Stream
from headway.gateway.relay.writer import ResponseWriter, answer
from headway.gateway.scheduling import vllm_disaggregation
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason, RequestEndedError
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.scheduling.sglang_disaggregation import DualDispatch, PrefillLegError, PrefillRejectedError
from headway.gateway.upstream import sse
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import (
    EngineError,
    RefusedError,
    UnreachableError,
    client_error,
    is_retryable,
    openai_error,
)
from headway.gateway.upstream.kv_snapshot import KvSnapshot

log = logging.getLogger("headway.gateway")
_LONGEST_ANSWER_BYTES = 256 << 20
_PROGRESS_TOKENS = 8
"""An engine that breaks off after fewer has failed as one that says nothing: else one that never gets further would be
asked for ever."""
_TAIL_S = 1.0
"""After [DONE], an engine has so long to end its answer, else its connection is not kept."""


class Health(Protocol):
    """Who keeps count of what replicas do."""

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None: ...
    def succeeded(self, replica: EngineEndpoint) -> None: ...


class Relay:
    """One request's way."""

    def __init__(
        self,
        ask: ClientRequest,
        ticket: InFlightRequest,
        driver: Scheduler,
        health: Health,
        reply: ResponseWriter,
        request_id: str,
        max_attempts: int,
        tell_priority: bool,
    ) -> None:
        self._ask, self._ticket, self._live = ask, ticket, ticket.live
        self._driver, self._health = driver, health
        self._out = Buffer(reply)
        self._max_attempts, self._tell_priority = max_attempts, tell_priority
        self._id = request_id.encode("latin-1")
        self._headers = f"Content-Type: application/json\r\nX-Request-Id: {request_id}\r\n{ask.passed_on}"
        self._trouble: EngineError | None = None
        self._used_tokens = 0
        self._snapshot = KvSnapshot()
        self._num_failed = self._tokens_before = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing has been said yet: at the start, and for each further model of a cascade."""
        self._listener = ResponseMeter(self._ask, self._ticket, self._driver)
        self._said = self._listener.said
        self._continued: ResumedStream | None = None
        self._hides: tuple[str, ...] = ()
        """What chunks have only because Headway asked for it."""
        self._prefills = False
        """It is sent to have its prompt computed, and nothing else."""
        self._kv: vllm_disaggregation.Params | None = None
        self._both: DualDispatch | None = None
        """Another replica computes its prompt at the same time."""
        self._has_begun = self._is_done = False
        """The client has had the first bytes; the last event has come."""
        if self._driver.needs_score(self._live):
            self._out.hold()

    @property
    def ticket(self) -> InFlightRequest:
        """What control knows it by."""
        return self._ticket

    @property
    def prompt_tokens(self) -> int | None:
        """As the engine counted them."""
        return self._listener.prompt_tokens

    @property
    def used_tokens(self) -> int:
        """Of prompt and answer, of all models that were asked."""
        return self._used_tokens + self._live.prompt_tokens + self._live.generated_tokens

    async def run(self) -> None:
        """To the end, whichever it is."""
        ticket = self._ticket
        try:
            await self._answer()
            while ticket.awaits_score:
                await self._judge()
                if ticket.outcome is None:
                    await self._answer()
            await self._out.let_go()
        except RequestEndedError as over:
            await self._tell(self._why(over.outcome))
        except ApiError as error:
            self._driver.release(ticket, ReleaseReason.REFUSED)
            await self._tell(error)
        except HeadwayError as error:
            log.error("%s", error)
            await self._tell(ApiError(500, "a policy failed", "policy_error"))
        finally:
            self._snapshot.delete()
            self._driver.drop(ticket)

    async def _answer(self) -> None:
        """One model's, whoever of its replicas gives it."""
        while not self._is_done:
            replica = await self._ticket.wait_for_replica()
            try:
                await self._snapshot.restore(replica, self._slot)
                await self._attempt(replica)
            except EngineError as error:
                if self._ticket.move_target is not None and self._ticket.outcome is None:
                    said = self._said
                    if tokens := await self._snapshot.save(replica, self._slot, said.seen_tokens, said.last):
                        said.learn(tokens)
                self._after(replica, error)

    @property
    def _slot(self) -> int | None:
        return None if self._ticket.reservation is None else self._ticket.reservation.slot

    async def _judge(self) -> None:
        """Will the answer do? If not, the next model gives another."""
        ticket, live = self._ticket, self._live
        used = live.prompt_tokens + live.generated_tokens
        score = await self._driver.score(ticket, self._ask.text, self._said.answer(), self._listener.confidence)
        if ticket.outcome is not None:
            raise RequestEndedError(ticket.outcome)
        await self._driver.accept_or_escalate(ticket, score)
        if ticket.outcome is None:
            self._used_tokens += used
            self._out.drop()
            self._begin_anew()

    def gone(self) -> None:
        """The client is."""
        self._driver.release(self._ticket, ReleaseReason.CANCELLED)

    def _after(self, replica: EngineEndpoint, error: EngineError) -> None:
        """An attempt has failed: what now? ApiError where nothing is left to try."""
        ticket = self._ticket
        if ticket.outcome is not None:
            raise RequestEndedError(ticket.outcome)
        if ticket.move_target is not None:
            self._driver.release(ticket, ReleaseReason.MOVED)
            return
        by_half = isinstance(error, PrefillLegError)
        if isinstance(error, PrefillLegError):
            replica, error = error.replica, error.cause
        self._health.failed(replica, error)
        self._trouble = error
        self._count(error)
        if self._num_failed >= self._max_attempts:
            raise self._failure()
        if self._has_begun and (self._said.tokens or self._listener.opaque) and not self._ask.can_go_on:
            raise self._failure()
        if by_half:
            self._driver.release(ticket, ReleaseReason.PREFILL_LEG_FAILED)
        elif self._prefills:
            log.warning("%s did not prefill: %s", replica.name, error)
            self._driver.release(ticket, ReleaseReason.PREFILL_FAILED)
        else:
            reason = ReleaseReason.FAILED_BEFORE_FETCH if error.is_untouched else ReleaseReason.FAILED
            self._driver.release(ticket, reason)

    def _count(self, error: EngineError) -> None:
        """Failures in a row, without much of an answer in between. What could not be sent did not fail."""
        tokens = self._live.generated_tokens
        if tokens >= self._tokens_before + _PROGRESS_TOKENS:
            self._num_failed = 0
        self._tokens_before = tokens
        self._num_failed += not isinstance(error, UnreachableError)

    def _failure(self) -> ApiError:
        """What the client is told of an engine's trouble."""
        replica = self._ticket.replica
        return client_error("the replica" if replica is None else replica.name, self._trouble)

    def _why(self, outcome: Outcome) -> ApiError | None:
        """What to tell a client whose request has ended so."""
        if outcome is Outcome.FINISHED:
            return None
        if outcome is Outcome.REJECTED:
            if self._trouble is not None:
                return self._failure()
            told = "no replica of the model can take the request now"
            return ApiError(503, told, "no_capacity", retry_after_s=self._ticket.retry_after_s)
        return ApiError(504, "the request took too long", "timeout")

    # To an engine.

    async def _attempt(self, replica: EngineEndpoint) -> None:
        """Send the request, and pass the answer back. EngineError where it fails."""
        said = self._said
        if said.tokens and said.ids is None and said.prompt is None and replica.adapter.template is not None:
            said.prompt = await replica.render_chat(self._ask.body)
        path, body = self._request(replica)
        if not body:
            self._end_stream(sse.DONE)
            return
        ask = self._ask
        if ask.read_s is not None:
            self._driver.sending(self._ticket, ask.read_s)
            ask.read_s = None
        half = self._ticket.prefill_leg
        if half is None:
            await self._send(replica, path, ask.raw if body == ask.body else msgspec.json.encode(body))
            return
        before = self._said.tokens
        self._both = both = DualDispatch(
            self._ticket, half, lambda: self._said.tokens > before or self._is_done, self._driver.prefill_leg_done
        )
        try:
            await both.send(self._send, replica, path, self._headers, body)
        except PrefillRejectedError as error:
            self._driver.release(self._ticket, ReleaseReason.REFUSED)
            self._answer_whole(error.status, openai_error(error.status, error.body), "application/json")
        finally:
            self._both = None

    async def _send(self, replica: EngineEndpoint, path: str, data: bytes) -> None:
        """Ask the replica that is to answer, and pass its answer back."""
        ask = self._ask
        connection = await replica.client.request("POST", path, self._headers, data, self._opened)
        if is_retryable(connection.status) or (self._has_begun and connection.status != 200):
            raise RefusedError(connection.status, await connection.read(1 << 16))
        if connection.headers.get("content-encoding", "identity") != "identity":
            raise EngineError("encoded its answer as nobody had asked for")
        if self._prefills and connection.status == 200:
            await self._prefilled(connection)
        elif ask.stream and connection.status == 200:
            await self._stream(connection)
        else:
            await self._whole(connection)
        self._health.succeeded(replica)

    async def _wait_for_prefill(self) -> None:
        """Give the prefill replica of a dual dispatch a moment to end its answer."""
        if self._both is not None:
            await self._both.wait_for_prefill(_TAIL_S)

    def _opened(self, connection: Connection) -> None:
        if self._ticket.outcome is not None or (self._both is not None and self._both.has_failed):
            connection.abort("the request is over")
        else:
            self._ticket.connection = connection

    async def _prefilled(self, connection: Connection) -> None:
        """Who decodes is sent the request next, and what the prefill replica says of where its KV cache is."""
        said = vllm_disaggregation.read_prefill_answer(await connection.read(_LONGEST_ANSWER_BYTES))
        self._listener.counted(said.prompt_tokens - self._said.tokens)
        self._kv = said.kv_transfer_params
        is_stored = self._kv is not None
        self._driver.release(self._ticket, ReleaseReason.PREFILLED if is_stored else ReleaseReason.PREFILL_NOT_STORED)

    def _split(self, body: dict[str, Any]) -> dict[str, Any]:
        """What of the request is for a replica that may be of a combo."""
        ticket = self._ticket
        self._prefills = ticket.is_prefill_only and vllm_disaggregation.can_be_split(self._ask)
        return (
            vllm_disaggregation.prefill_body(body)
            if self._prefills
            else vllm_disaggregation.decode_body(body, self._kv if ticket.has_stored_kv else None)
        )

    def _request(self, replica: EngineEndpoint) -> tuple[str, dict[str, Any]]:
        """Path and body for this replica; no body: there is nothing more to ask for."""
        ask, said, adapter = self._ask, self._said, replica.adapter
        path, body = ask.path, dict(ask.body)
        self._continued, self._hides, self._prefills = None, (), False
        self._listener.before = said.tokens
        if said.tokens:
            if said.finish is not None or said.left(replica.max_context_tokens, self._live.prompt_tokens) <= 0:
                return path, {}
            try:
                path, body = said.go_on(adapter, replica.max_context_tokens, self._live.prompt_tokens)
            except CannotGoOnError:
                raise self._failure() from None
        if said.head:
            self._continued = ResumedStream(ask, said, path)
        body["model"] = replica.reported_model or ask.model
        if self._ticket.reservation is not None and self._ticket.reservation.slot is not None:
            body["id_slot"] = self._ticket.reservation.slot
        body.pop("priority", None)
        if self._tell_priority and adapter.priority_sign is not None:
            body["priority"] = adapter.priority_sign * self._live.tier
        if self._listener.confidence is not None and path == ask.path:
            body["logprobs"] = body.get("logprobs") or (True if ask.is_chat else 1)
        if ask.stream and not ask.is_opaque:
            body["stream"] = True
            body["stream_options"] = {**(ask.body.get("stream_options") or {}), "include_usage": True}
            if ask.can_go_on:
                body |= adapter.token_options
                if not any(ask.body.get(name) for name in adapter.token_options):
                    self._hides = adapter.token_fields
        return path, self._split(body) if adapter.transfers_kv else body

    # Back to the client.

    async def _whole(self, connection: Connection) -> None:
        data = await connection.read(_LONGEST_ANSWER_BYTES)
        kind = connection.headers.get("content-type", "application/json")
        if connection.status < 300:
            self._check_whole(data)
            self._listener.whole(data)
            await self._wait_for_prefill()
            self._driver.release(self._ticket, ReleaseReason.FINISHED)
        else:
            self._driver.release(self._ticket, ReleaseReason.REFUSED)
            data, kind = openai_error(connection.status, data), "application/json"
        if self._listener.hides_logprobs and self._said.head:
            data = without(("logprobs",), data)
        self._answer_whole(connection.status, data, kind)

    def _answer_whole(self, status: int, data: bytes, kind: str) -> None:
        self._begin(status, kind.encode("latin-1"), len(data))
        self._is_done = True
        self._out.write(data)

    def _check_whole(self, data: bytes) -> None:
        """EngineError where a status of 200 comes with what is no answer."""
        if self._listener.opaque is None and (error := sse.decode_object(data).get("error")):
            raise sse.reported(error)

    async def _stream(self, connection: Connection) -> None:
        pace = ItlMeter(self._ticket, self._driver)
        stream = Stream(self._listener, pace, self._continued, self._hides, self._ask.wants_usage)

        def pass_on(data: bytes) -> bool:
            """To the client, at once; but what ends the stream goes with the end of the answer."""
            try:
                stream.feed(data)
            finally:  # what was heard before a mistake has been counted, and is told
                if stream.told and not stream.is_done:
                    self._forward(stream.take())
            return not (stream.is_done or self._out.is_full)

        while await connection.stream_to(pass_on) and not stream.is_done:
            await self._out.drain()
        if not stream.is_over:
            raise EngineError("ended its stream without [DONE]")
        if not connection.is_complete or (self._both is not None and self._both.is_pending):
            self._forward(stream.take())
            await self._tail(connection)
            await self._wait_for_prefill()
        self._end_stream(stream.take())

    def _forward(self, data: bytes) -> None:
        if not self._has_begun:
            self._begin(200, b"text/event-stream", None)
        self._out.write(data, more=True)

    @staticmethod
    async def _tail(connection: Connection) -> None:
        """Let the answer end, so that its connection can be kept."""
        try:
            async with asyncio.timeout(_TAIL_S):
                while await connection.read_part():
                    pass
        except (TimeoutError, EngineError):
            return

    def _end_stream(self, last: bytes) -> None:
        self._is_done = True
        self._driver.release(self._ticket, ReleaseReason.FINISHED)
        if not self._has_begun:
            self._begin(200, b"text/event-stream", None)
        self._out.write(last)

    def _begin(self, status: int, kind: bytes, length: int | None) -> None:
        self._has_begun = True
        self._out.start(status, headers(self._ticket, self._id, kind, length, self._ask.explains))

    async def _tell(self, error: ApiError | None) -> None:
        """Tell the client of an error: as an answer, or as the last events of its stream."""
        if error is None:
            return
        if self._out.drop():
            self._has_begun = False
        if self._has_begun:
            last = (
                sse.encode_event(error.body()) + sse.DONE
                if self._listener.opaque is None
                else self._listener.opaque.error(error)
            )
            self._out.write(last)
            await self._out.drain()
        else:
            await answer(self._out, error, self._id)
