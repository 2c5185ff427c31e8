"""One HTTP request between Envoy and the picker: Envoy's messages, and the picker's answers.

Read from top to bottom: `run` takes the messages, `_pick` lets control choose a replica once the body is complete,
`_take_answer` counts the tokens of the engine's answer.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from os import urandom
from typing import Any, Protocol
from urllib.parse import urlsplit

from headway.control.live import Live
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.gateway.auth.keys import Caller
from headway.gateway.auth.limits import limit_headers
from headway.gateway.errors import ApiError, internal_error, policy_error, rejected_error
from headway.gateway.gateway import Gateway
from headway.gateway.names import cut, is_request_id
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker import messages
from headway.gateway.picker.answer import Answer
from headway.gateway.picker.bodies import Bodies
from headway.gateway.picker.messages import invalid_message
from headway.gateway.relay.request import PATHS, ClientRequest
from headway.gateway.relay.request_reader import checked_model
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason, RequestEndedError
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.hints import add_order

log = logging.getLogger("headway.gateway")
_NUM_FALLBACKS = 2
"""Number of further addresses after the chosen one. Envoy tries them in turn if its route retries."""
_RETRY_S = 1.0
"""Time in which Envoy should notice a dead engine and try another one."""
_MAX_PARTS = 64
"""A body in more parts is joined, because short parts take several times their length."""
_KEY_HEADERS = ("authorization", "x-api-key")
_PICKING_MODES = (pb.BUFFERED, pb.FULL_DUPLEX_STREAMED)


class Rpc(Protocol):
    """One call of `Process`: a stream of messages each way."""

    async def read(self) -> pb.ProcessingRequest | None:
        """The next message; None if Envoy has ended the call."""

    async def write(self, data: bytes) -> None: ...


class PickedRequest(InFlightRequest):
    """A request whose engine is reached through Envoy."""

    def __init__(self, live: Live, request_id: str, is_streamed: bool, exchange: Exchange) -> None:
        super().__init__(live, request_id, is_streamed)
        self._exchange = exchange

    def abort(self, why: str) -> None:
        """Make Envoy abort the request: its engine is given up, or it has taken too long."""
        self._exchange.abort(why)

    def abort_prefill_leg(self, why: str) -> None:
        """Do nothing: the sidecar of the decode replica handles the prefill replica."""


def address(replica: EngineEndpoint) -> str:
    """`ip:port` of an engine, as Envoy writes it."""
    return _netloc(replica.url)


@lru_cache(maxsize=4096)
def _netloc(url: str) -> str:
    return urlsplit(url).netloc


def _is_settled(in_flight: PickedRequest, replica: object, answer: Answer) -> bool:
    """Whether a request need not be aborted at `replica`: it is at another replica, its answer has begun, or it has
    ended without being cancelled."""
    if in_flight.outcome is None:
        return in_flight.replica is not replica or answer.status > 0
    return in_flight.outcome is not Outcome.CANCELLED


class Exchange:
    """One HTTP request between Envoy and the picker."""

    def __init__(self, gateway: Gateway, bodies: Bodies, rpc: Rpc) -> None:
        self._gateway, self._bodies, self._rpc = gateway, bodies, rpc
        self._headers: dict[str, str] = {}
        self._caller: Caller | None = None
        self._request_mode = self._answer_mode = pb.FULL_DUPLEX_STREAMED
        self._subset: frozenset[str] | None = None
        self._body: list[bytes | bytearray] = []
        self._num_bytes = 0
        self._is_compressed = False
        self._has_headers = self._is_whole = False
        """Whether the headers, and the whole body, have come."""
        self._passes = False
        """Whether the request is passed on without a decision of control, because it has no body or its endpoint is
        unknown."""
        self._in_flight: PickedRequest | None = None
        self._answer: Answer | None = None
        self._request_id = ""
        self._reading: asyncio.Task[pb.ProcessingRequest | None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._is_refused = False
        self._whole_by_s: float | None = None
        """Deadline for the request's headers and body, on the event loop's clock; None once they are complete."""

    async def run(self) -> None:
        """Handle Envoy's messages until Envoy ends the call or must answer with an error."""
        self._whole_by_s = asyncio.get_running_loop().time() + self._gateway.settings.body_timeout_s
        try:
            error = await self._take_all()
            if error is not None:
                await self._refuse(error)  # here, because compiled code must not await in a handler
        finally:
            self._end()

    async def _take_all(self) -> ApiError | None:
        """Handle Envoy's messages. Returns the error that Envoy must answer with."""
        try:
            while not self._is_refused and (message := await self._read()) is not None:
                await self._take(message)
        except ApiError as error:
            return error
        except HeadwayError as error:
            log.error("%s", error)
            return policy_error()
        except Exception as error:
            log.error("request %s", self._request_id, exc_info=error)
            return internal_error()
        return None

    async def _read(self) -> pb.ProcessingRequest | None:
        reading, self._reading = self._reading, None
        if reading is not None:
            return await reading
        if self._whole_by_s is None:
            return await self._rpc.read()
        try:
            async with asyncio.timeout_at(self._whole_by_s):
                return await self._rpc.read()
        except TimeoutError:
            what = f"the body was not there within {self._gateway.settings.body_timeout_s:g} s"
            raise ApiError(408, what, "body_timeout") from None

    async def _write(self, *parts: bytes) -> None:
        await self._write_each(parts)

    async def _write_each(self, parts: Iterable[bytes]) -> None:
        async with self._writing:  # an abort may write at the same time as `run`
            for data in parts:
                await self._rpc.write(data)

    async def _refuse(self, error: ApiError) -> None:
        """Make Envoy answer with an error."""
        self._is_refused = True
        await self._write(messages.refusal(error, self._request_id))

    def abort(self, why: str) -> None:
        """Make Envoy abort the request, with an error if its answer has not begun."""
        if self._aborting is None and not self._is_refused:
            self._aborting = asyncio.create_task(self._write_abort(why))

    async def _write_abort(self, why: str) -> None:
        in_flight, answer = self._in_flight, self._answer
        assert in_flight is not None
        replica = in_flight.replica
        if in_flight.outcome is None and answer is not None and not answer.status:
            await asyncio.sleep(_RETRY_S)
            if _is_settled(in_flight, replica, answer):
                self._aborting = None
                return
        if in_flight.outcome is Outcome.CANCELLED:
            error = ApiError(504, "the request took too long", "timeout")
        else:
            name = "the replica" if in_flight.replica is None else in_flight.replica.name
            error = ApiError(502, f"{name} {why}", "engine_error")
            self._gateway.driver.release(in_flight, ReleaseReason.REFUSED)
        await self._refuse(error)

    def _end(self) -> None:
        """Handle the end of the call: the answer is complete, or the client, the engine or Envoy has aborted it."""
        if self._reading is not None:
            self._reading.cancel()
        self._is_refused = True  # nothing can be sent any more
        if self._aborting is not None:
            self._aborting.cancel()
        if self._caller is not None:
            self._bodies.free(self._num_bytes, self._caller.owner)
        in_flight, answer = self._in_flight, self._answer
        self._in_flight = self._answer = None  # references to this exchange would keep the body in memory
        if in_flight is None:
            return
        if answer is not None and self._answer_mode == pb.NONE and answer.status:
            answer.end()
        try:
            self._gateway.driver.drop(in_flight)
        finally:
            self._gateway.end(in_flight)

    # Envoy's messages.

    async def _take(self, message: pb.ProcessingRequest) -> None:
        kind = message.WhichOneof("request")
        if (kind == "request_headers") == self._has_headers or (kind == "request_body" and self._is_whole):
            raise invalid_message(f"{kind or 'a message of no kind'} is out of order")
        match kind:
            case "request_headers":
                await self._take_headers(message)
            case "request_body":
                await self._take_body(message.request_body)
            case "request_trailers":
                if not self._is_whole and not self._passes:
                    await self._pick(is_last=False)
                await self._write(messages.CONTINUE_REQUEST_TRAILERS)
            case "response_headers":
                await self._take_answer(message)
            case "response_body":
                await self._take_part(message.response_body)
            case "response_trailers":
                rest = b"" if self._answer is None else self._answer.end()
                if rest and self._answer_mode == pb.FULL_DUPLEX_STREAMED:
                    await self._write(messages.streamed(rest, False))
                await self._write(messages.CONTINUE_RESPONSE_TRAILERS)

    async def _take_headers(self, message: pb.ProcessingRequest) -> None:
        self._has_headers = True
        headers = self._headers = messages.request_headers_of(message.request_headers.headers)
        request_id = headers.get("x-request-id", "")
        self._request_id = request_id if is_request_id(request_id) else urandom(16).hex()
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        self._subset = messages.subset_of(message)
        gateway = self._gateway
        if gateway.admission.is_closing:
            raise ApiError(503, "the picker is shutting down", "shutting_down", retry_after_s=1)
        self._caller = gateway.keys.authenticate(headers)
        path = headers.get(":path", "").partition("?")[0]
        if message.request_headers.end_of_stream or headers.get(":method") != "POST" or path not in PATHS:
            await self._pass_on(message.request_headers.end_of_stream)
            return
        if self._request_mode not in _PICKING_MODES:
            mode = messages.mode_name(self._request_mode)
            what = (
                f"Envoy's ext_proc filter has the request_body_mode {mode}; expected FULL_DUPLEX_STREAMED or BUFFERED"
            )
            log.error("%s", what)
            raise ApiError(500, what, "ext_proc_mode")
        self._bodies.check_length(headers)
        if self._request_mode != pb.FULL_DUPLEX_STREAMED:
            await self._write(messages.CONTINUE_HEADERS)

    async def _take_body(self, body: pb.HttpBody) -> None:
        if self._passes:
            await self._write_each(messages.passed_on(body.body, body.end_of_stream, self._request_mode))
            return
        assert self._caller is not None
        self._num_bytes = self._bodies.take(self._num_bytes, len(body.body), self._caller.owner)
        self._body.append(body.body)
        if len(self._body) > _MAX_PARTS:
            first, *others = self._body
            joined = first if isinstance(first, bytearray) else bytearray(first)
            joined += b"".join(others)
            self._body = [joined]
        if body.end_of_stream:
            await self._pick(is_last=True)

    # Routing.

    async def _pass_on(self, has_ended: bool) -> None:
        """Send a request without a prompt, such as a list of models, to the least busy replica."""
        self._passes, self._whole_by_s = True, None
        health, allowed = self._gateway.health, self._allowed()
        up = [each for each in self._gateway.fleet.present() if health.is_up(each)]
        able = [each for each in up if allowed is None or each.id in allowed]
        if not able:
            raise ApiError(503, "no replica is up", "no_capacity", retry_after_s=1)
        replica = min(able, key=lambda each: (each.num_in_flight, each.id))
        await self._write(messages.sent_to(address(replica), *self._key_headers(replica)))

    def _allowed(self) -> frozenset[int] | None:
        """The replicas in the subset that Envoy allows; None if all are allowed."""
        subset = self._subset
        if subset is None:
            return None
        return frozenset(each.id for each in self._gateway.fleet.present() if address(each) in subset)

    async def _pick(self, is_last: bool) -> None:
        """Let control choose a replica, and send Envoy its address. `is_last`: the request ends with its body."""
        self._is_whole, self._whole_by_s = True, None
        gateway, raw = self._gateway, b"".join(self._body)
        received_s, self._body = gateway.clock.now, []
        assert self._caller is not None
        request = await self._bodies.read(self._headers, raw)
        self._is_compressed = request.raw is not raw and request.form is None
        self._apply_headers(request)
        in_flight = await self._admit(request, self._caller)
        hides_usage = self._answer_mode in (pb.STREAMED, pb.FULL_DUPLEX_STREAMED) and not request.wants_usage
        hides_usage &= request.stream and not request.is_passthrough and not self._is_compressed
        self._answer = Answer(gateway, request, in_flight, hides_usage)
        replica = await self._placed(in_flight)
        in_flight.send()
        gateway.telemetry.metrics.count_send(in_flight, received_s, gateway.clock.now)
        body = raw if self._is_compressed else self._engine_body(request, in_flight, replica, hides_usage)
        headers, removed = self._key_headers(replica)
        if self._headers.get("x-request-id") != self._request_id:
            headers.append(("x-request-id", self._request_id))
        if in_flight.prefill_leg is not None:
            headers.append((messages.PREFILLER, address(in_flight.prefill_leg.replica)))
        else:
            removed.append(messages.PREFILLER)
        endpoints = ",".join([address(replica), *(address(each) for each in self._others(in_flight, replica))])
        is_duplex = self._request_mode == pb.FULL_DUPLEX_STREAMED
        await self._write_each(messages.picked(endpoints, headers, removed, body, body is not raw, is_duplex, is_last))

    def _apply_headers(self, request: ClientRequest) -> None:
        """Apply the model in the headers, and the tier of the objective in the headers, limited by the key."""
        if not self._is_compressed and (model := messages.header_of(self._headers, messages.MODEL_REWRITE)):
            request.model = checked_model(model)
        objective = self._gateway.settings.objectives.get(messages.header_of(self._headers, messages.OBJECTIVE))
        if objective is not None:
            request.tier = objective
        assert self._caller is not None
        request.tier = max(request.tier, self._caller.tier)
        request.can_resume = False  # no other replica can continue a request that Envoy has sent

    async def _admit(self, request: ClientRequest, caller: Caller) -> PickedRequest:
        features, allowed = await self._gateway.admission.features(request), self._allowed()
        if allowed is not None and not any(self._gateway.health.is_up(self._gateway.replicas[id]) for id in allowed):
            raise ApiError(503, "no endpoint of the subset is ready", "no_capacity", retry_after_s=1)
        tenant = cut(messages.header_of(self._headers, messages.FAIRNESS_ID))

        def new_request(live: Live) -> PickedRequest:
            live.allowed = allowed
            if not caller.owner and tenant:
                live.tenant = tenant
            self._in_flight = PickedRequest(live, self._request_id, request.stream, self)
            if self._answer_mode == pb.NONE:
                # The request's tokens are not seen, so silence is no sign of a failure.
                self._in_flight.answer.waits_for_client = True
            return self._in_flight

        self._gateway.admission.admit(features, new_request, caller)
        assert self._in_flight is not None
        return self._in_flight

    async def _placed(self, in_flight: PickedRequest) -> LiveReplica:
        """The replica that control chooses, as soon as a replica has room. Raises ApiError if control rejects the
        request."""
        try:
            if in_flight.reservation is None and in_flight.outcome is None:
                await self._wait_for_replica(in_flight)
            replica = await in_flight.wait_for_replica()
        except RequestEndedError as ended:
            raise self._error_of(in_flight, ended.outcome) from None
        assert isinstance(replica, LiveReplica)
        return replica

    async def _wait_for_replica(self, in_flight: PickedRequest) -> None:
        """Wait until a replica is chosen or the client leaves."""
        if self._request_mode != pb.FULL_DUPLEX_STREAMED:
            await self._write(messages.wait_longer(self._gateway.settings.timeout_s))
        self._reading = asyncio.ensure_future(self._rpc.read())
        placing = asyncio.ensure_future(in_flight.wait_for_replica())
        try:
            await asyncio.wait({placing, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done() and self._reading.result() is None:
                self._gateway.driver.release(in_flight, ReleaseReason.CANCELLED)
            await placing
        finally:
            placing.cancel()

    def _error_of(self, in_flight: PickedRequest, outcome: Outcome) -> ApiError:
        """The client's error for a request that control ended before a replica was chosen."""
        if outcome is Outcome.REJECTED:
            retry_after_s, live = in_flight.retry_after_s, in_flight.live
            is_up = self._gateway.driver.services[live.model].any_up
            if is_up and live.allowed is None and not in_flight.is_shed:
                message = "no replica of the model has room for the request now"
                return ApiError(429, message, "shed", retry_after_s=retry_after_s)
            return rejected_error(in_flight.is_shed, retry_after_s)
        return ApiError(504, "the request took too long", "timeout")

    def _others(self, in_flight: PickedRequest, replica: LiveReplica) -> Sequence[LiveReplica]:
        """Replicas that may serve the request if Envoy cannot reach the chosen one, the least busy first."""
        live = in_flight.live
        if in_flight.prefill_leg is not None:
            return ()
        tokens = live.prompt_tokens + live.output_tokens
        able = [
            self._gateway.replicas[member.view.id]
            for member in self._gateway.driver.services[live.model].members
            if member.view.id != replica.id
            and member.can_serve(tokens, live.lora)
            and member.view.role == replica.role
            and (live.allowed is None or member.view.id in live.allowed)
        ]
        return heapq.nsmallest(_NUM_FALLBACKS, able, key=lambda each: (each.num_in_flight, each.id))

    def _engine_body(
        self, request: ClientRequest, in_flight: PickedRequest, replica: LiveReplica, reports_usage: bool
    ) -> bytes:
        """The request's body for this engine, with the engine's name of the model, the tier, and a request for token
        counts."""
        body, live = dict(request.body), in_flight.live
        body["model"] = live.lora or replica.reported_model or request.model
        add_order(body, request, live, replica, self._gateway.plan.sends_priority, 0, self._gateway.clock.now)
        if reports_usage:
            body["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
        return request.encoded(body)

    def _key_headers(self, replica: LiveReplica) -> tuple[list[tuple[str, str]], list[str]]:
        """Headers to set and to remove: no engine sees the key of a client, and each engine gets its own key."""
        removed = list(_KEY_HEADERS) if self._gateway.settings.needs_key or replica.api_key else []
        if not replica.api_key:
            return [], removed
        return [("authorization", f"Bearer {replica.api_key}")], removed[1:]

    # The engine's answer.

    async def _take_answer(self, message: pb.ProcessingRequest) -> None:
        headers = messages.headers_of(message.response_headers.headers)
        in_flight, answer = self._in_flight, self._answer
        added: list[tuple[str, str]] = []
        if in_flight is not None and answer is not None and in_flight.replica is not None:
            self._note_served(in_flight, messages.served_of(message))
            answer.begin(messages.status_of(headers), headers)
            added = [("x-headway-replica", in_flight.replica.name), ("x-request-id", self._request_id)]
            if self._caller is not None and self._caller.is_limited:
                limits = limit_headers(self._caller.limits())
                added += [(name.decode(), value.decode()) for name, value in limits]
            if message.response_headers.end_of_stream:
                answer.end()
        await self._write(messages.response_headers(added))

    def _note_served(self, in_flight: PickedRequest, served: str | None) -> None:
        """Move the request to the replica that Envoy sent it to, if Envoy did not use the chosen one."""
        if served is None or in_flight.replica is None or in_flight.outcome is not None:
            return
        if served == address(in_flight.replica):
            return
        others: list[Any] = [each for each in self._gateway.fleet.present() if address(each) == served]
        if others:
            self._gateway.driver.served_by(in_flight, others[0])

    async def _take_part(self, part: pb.HttpBody) -> None:
        data, answer = part.body, self._answer
        if answer is not None:
            data = answer.feed(data, part.end_of_stream)
        if self._answer_mode == pb.FULL_DUPLEX_STREAMED:
            if data or part.end_of_stream:
                await self._write(messages.streamed(data, part.end_of_stream))
        elif data == part.body:
            await self._write(messages.CONTINUE_RESPONSE_BODY)
        else:
            await self._write(messages.replaced(data))
