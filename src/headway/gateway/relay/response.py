"""The response to a client: its headers, a stream's bytes, comments while it waits, and its end or error."""

from __future__ import annotations

import asyncio

from headway.gateway.errors import ApiError
from headway.gateway.relay.continuation import PartialResponse
from headway.gateway.relay.paced import PacedWriter
from headway.gateway.relay.passthrough import error_event
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.writer import BufferedWriter, Headers, ResponseWriter, TokenWriter, write_error
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream import sse
from headway.gateway.upstream.errors import RefusedError, openai_error


class ClientResponse:
    """One request's response, and what its client was sent so far."""

    # What a response starts with is set in the class: most responses leave it as it is.
    has_begun = False
    """The response was started."""
    is_complete = False
    """The response's last byte was written."""
    is_open = False
    """Comments were sent before the response: status and headers cannot change any more."""
    is_opaque = False
    """The response has begun with bytes that mean nothing here: nothing can be added to them."""
    _timer: asyncio.TimerHandle | None = None
    """Until the next comment."""
    _draining: asyncio.Task[None] | None = None
    """Sends the last comment."""
    _has_written = False
    """The client has been sent something since the timer was set."""

    def __init__(self, request: ClientRequest, in_flight: InFlightRequest, client: ResponseWriter) -> None:
        self._request, self._in_flight = request, in_flight
        self.client = self.writer = client
        """`writer` is where the present model's answer goes: to the client, or to a buffer until it is accepted."""
        self.is_paced = isinstance(client, PacedWriter)
        """The client gets answering tokens one by one, at their pace."""

    def begin_model(self, is_buffered: bool) -> None:
        """Begin the response of a cascade's next model, or of a fallback."""
        self.writer = BufferedWriter() if is_buffered else self.client
        self.has_begun = self.is_complete = False

    # Waiting.

    def keep_alive(self, seconds: float) -> None:
        """Send the client of a stream a comment whenever it has got nothing for so long."""
        self._has_written = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._comment, seconds)

    def _comment(self, seconds: float) -> None:
        """Send a comment if the client has got nothing for so long, as the request waits."""
        is_silent = not self._has_written and self.writer is self.client and not self.client.is_full
        if is_silent and not self.is_complete and not self.is_opaque and self._in_flight.outcome is None:
            if not self.has_begun and not self.is_open:
                self.is_open = True
                self.client.start(
                    200,
                    [
                        (b"content-type", b"text/event-stream"),
                        (b"cache-control", b"no-cache"),
                        (b"x-request-id", self._in_flight.request_id.encode("latin-1")),
                        (b"x-accel-buffering", b"no"),
                    ],
                )
            self.client.write(b": waiting\n\n", more=True)
            self._draining = asyncio.create_task(self.client.drain())
        self.keep_alive(seconds)

    def stop(self) -> None:
        """Send no more comments: the request has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def flush(self) -> None:
        """Send what waits for its pace, as the request has ended."""
        if isinstance(self.client, PacedWriter):
            self.client.flush()

    # A stream.

    def start(
        self,
        status: int = 200,
        content_type: bytes = b"text/event-stream",
        length: int | None = None,
        extra: Headers = (),
    ) -> None:
        """Start the response with the headers known now; by default a stream of events. `length` None: a stream."""
        self.has_begun = True
        in_flight, live = self._in_flight, self._in_flight.live
        replica = in_flight.replica
        live.keeps_model = True
        if self.is_open and self.writer is self.client:
            return
        headers = [(b"content-type", content_type), (b"x-request-id", in_flight.request_id.encode("latin-1"))]
        if replica is not None:
            headers.append((b"x-headway-replica", replica.name.encode("latin-1", "replace")))
            if live.fallback is not None:
                headers += [
                    (b"x-headway-fallback", live.fallback.why.encode()),
                    (b"x-headway-model", live.model.encode("latin-1", "replace")),
                ]
            if self._request.wants_explanation:
                headers += [
                    (b"x-headway-held-s", b"%.6f" % (live.placed_s - live.arrival_s)),
                    (b"x-headway-attempts", b"%d" % (live.attempt + 1)),
                    (b"x-headway-tier", b"%d" % live.tier),
                ]
                if live.fallback is None:
                    headers.append((b"x-headway-model", live.model.encode("latin-1", "replace")))
        if in_flight.restored is not None:
            headers.append((b"x-headway-replayed-tokens", b"%d" % in_flight.restored.tokens))
        if length is None:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", b"%d" % length))
        self.writer.start(status, [*headers, *extra] if extra else headers)

    def write_events(self, data: bytes, partial: PartialResponse) -> bool:
        """Write a part of a stream, after which the answer is `partial`. False: the client reads slowly."""
        self._has_written = True
        self.writer.write(data, more=True)
        if self._in_flight.copy is not None:
            self.copy(data, partial)
        return not self.writer.is_full

    def write_tokens(self, event: bytes, num_tokens: int, partial: PartialResponse) -> bool:
        """Write an event with so many answering tokens, at their pace. False: the client reads slowly."""
        assert isinstance(self.writer, TokenWriter)
        self._has_written = True
        self.writer.write_tokens(event, num_tokens)
        self.copy(event, partial)
        return not self.writer.is_full

    def copy(self, data: bytes, partial: PartialResponse) -> None:
        """Keep what the client is sent, for its retry."""
        if self._in_flight.copy is not None and self.writer is self.client:
            self._in_flight.copy.append(data, partial)

    # A whole answer, or an error.

    def write_whole(self, status: int, data: bytes, content_type: str) -> None:
        """Write a whole response; as a stream's only event if comments were sent before."""
        if self.is_open:
            self.is_complete = self.has_begun = True
            end = b"" if self._request.is_passthrough else sse.DONE
            self.writer.write(b"data: " + b" ".join(data.splitlines()) + b"\n\n" + end)
            return
        self.start(status, content_type.encode("latin-1"), len(data))
        self.is_complete = True
        self.writer.write(data)

    async def write_refusal(self, error: RefusedError) -> None:
        """Write a refusal that no other replica could confirm, or do without."""
        self.write_whole(error.status, openai_error(error.status, error.body), "application/json")
        await self.client.drain()

    async def write_error(self, error: ApiError, is_passthrough: bool) -> None:
        """Write an error as the response, or as the last events of a stream that has begun."""
        if self.is_opaque:
            return  # the connection is closed, which marks the response as incomplete
        if (self.has_begun or self.is_open) and self.writer is self.client:
            self.client.write(error_event(error) if is_passthrough else sse.encode_event(error.body()) + sse.DONE)
            await self.client.drain()
        else:
            await write_error(self.client, error, self._in_flight.request_id.encode("latin-1"))
