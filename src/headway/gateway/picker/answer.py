"""An engine's answer on its way through Envoy: its tokens are counted as it passes, and it is accounted for at its
end."""

from __future__ import annotations

import logging

from headway.gateway.gateway import Gateway
from headway.gateway.picker.usage_hider import UsageHider
from headway.gateway.relay.engine_stream import EngineStream
from headway.gateway.relay.failover import failure_of, is_failed, is_replicas_fault
from headway.gateway.relay.partial_answer import PartialAnswer
from headway.gateway.relay.request import ClientRequest
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.upstream.errors import EngineError, RefusedError, UnreachableError

log = logging.getLogger("headway.gateway")
_EVENTS = "text/event-stream"
_MAX_WHOLE_BYTES = 64 << 20
"""Longer answers that are not streamed pass without token counts."""
_LOCAL_REPLIES = (b"upstream connect error", b"no healthy upstream", b"upstream request timeout")
"""First words of Envoy's own answers when it could not reach an engine."""


class Answer:
    """The answer to one request, in the parts that Envoy reports: headers, body parts and end."""

    def __init__(self, gateway: Gateway, request: ClientRequest, in_flight: InFlightRequest, hides_usage: bool) -> None:
        """`hides_usage`: whether only the picker, and not the client, asked the engine for token counts."""
        self._gateway, self._request, self._in_flight = gateway, request, in_flight
        self._hides_usage = hides_usage
        self._partial = PartialAnswer(request, in_flight, gateway.driver)
        self._stream: EngineStream | None = None
        self._hider = UsageHider()
        self._whole: list[bytes] | None = []
        """The body so far of an answer that is not streamed; None if it is too long or encoded."""
        self._num_bytes = 0
        self.status = 0
        self._has_failed = False
        self._is_json = True

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Take the answer's headers."""
        self.status = status
        is_events = headers.get("content-type", _EVENTS).partition(";")[0].strip().lower() == _EVENTS
        if headers.get("content-encoding", "identity") != "identity":
            self._whole, self._hides_usage = None, False
        elif status == 200 and self._request.stream and is_events:
            self._stream = EngineStream(
                self._partial,
                self._in_flight,
                self._gateway.driver,
                None,
                True,
                lambda data: True,
                has_begun=True,
            )
        self._hides_usage &= self._stream is not None
        self._is_json = "json" in headers.get("content-type", "json").lower()

    def feed(self, data: bytes, is_last: bool) -> bytes:
        """Count the tokens of a body part, and return the bytes that are passed on in its place."""
        stream = self._stream
        if stream is not None:
            self._meter_stream(stream, data, is_last)
        elif self._whole is not None:
            self._whole.append(data)
            self._num_bytes += len(data)
            if self._num_bytes > _MAX_WHOLE_BYTES:
                self._whole = None
        if self._hides_usage:
            data = self._hider.feed(data)
        if is_last:
            data += self.end()
        return data

    def _meter_stream(self, stream: EngineStream, data: bytes, is_last: bool) -> None:
        if self._has_failed or stream.is_done:
            return
        try:
            stream.feed([data])
            if is_last and not stream.is_done:
                stream.end()
                if self._request.needs_end and not stream.has_ended(self._request.num_sequences):
                    raise EngineError("ended its stream without [DONE]")
            if stream.error is not None:
                self._failed(stream.error)
        except EngineError as error:
            self._failed(error)
        if self._in_flight.prefill_leg is not None and self._in_flight.live.generated_tokens:
            self._gateway.driver.prefill_leg_done(self._in_flight)

    def _failed(self, error: EngineError) -> None:
        """Report the replica's failure once. Later parts are not counted."""
        replica = self._in_flight.replica
        if not self._has_failed and replica is not None:
            self._has_failed = True
            log.warning("%s %s", replica.name, error)
            if is_replicas_fault(failure_of(error)):
                error.after_tokens = self._in_flight.live.generated_tokens
                self._gateway.health.failed(replica, error)

    def end(self) -> bytes:
        """End the answer: take the request off its replica. Later calls do nothing. Returns the bytes that are still to
        be passed on."""
        self._release()
        return self._hider.rest()

    def _release(self) -> None:
        in_flight, driver = self._in_flight, self._gateway.driver
        replica = in_flight.replica
        if in_flight.outcome is not None or replica is None:
            return
        body = b"" if self._whole is None else b"".join(self._whole)
        if self.status < 300 and self._stream is None and body:
            try:
                self._partial.measure_unstreamed(body, self._is_json)
            except EngineError as error:
                self._failed(error)
        if is_failed(self.status, has_begun=False):
            is_local = self.status in (503, 504) and body.startswith(_LOCAL_REPLIES)
            self._failed(
                UnreachableError("cannot be reached by Envoy") if is_local else RefusedError(self.status, body)
            )
        if in_flight.prefill_leg is not None:
            driver.prefill_leg_done(in_flight)
        is_refused = self._has_failed or self.status >= 300
        driver.release(in_flight, ReleaseReason.REFUSED if is_refused else ReleaseReason.FINISHED)
        if not self._has_failed:
            self._gateway.health.succeeded(replica)
            self._gateway.quarantine.answered(self._request.raw)
