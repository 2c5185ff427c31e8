"""The response to a client: its headers, a stream's bytes, comments while it waits, and its end or error."""

from __future__ import annotations

import asyncio

from headway.gateway.errors import ApiError
from headway.gateway.relay.paced import PacedWriter
from headway.gateway.relay.partial_answer import PartialAnswer
from headway.gateway.relay.passthrough import error_event
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.writer import BufferedWriter, Headers, ResponseWriter, TokenWriter, write_error
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream import sse
from headway.gateway.upstream.errors import RefusedError, openai_error


class ClientResponse:
    """One request's response, and the data that its client has received."""

    # Initial values are set in the class, because most responses keep them.
    has_begun = False
    """Whether the response was started."""
    is_complete = False
    """Whether the response's last byte was written."""
    is_open = False
    """Whether comments were sent before the response, so that status and headers can no longer change."""
    is_opaque = False
    """Whether the response has begun with bytes of unknown format, to which nothing can be added."""
    _timer: asyncio.TimerHandle | None = None
    """Timer of the next comment."""
    _draining: asyncio.Task[None] | None = None
    """Task that sends the last comment."""
    _has_written = False
    """Whether data was sent to the client since the timer was set."""

    def __init__(self, request: ClientRequest, in_flight: InFlightRequest, client: ResponseWriter) -> None:
        self._request, self._in_flight = request, in_flight
        self.client = self.writer = client
        """`writer` is the destination of the current model's answer: the client, or a buffer until the answer is
        accepted."""
        self.is_paced = isinstance(client, PacedWriter)
        """Whether the client gets the answer tokens at a fixed pace."""

    def begin_model(self, is_buffered: bool) -> None:
        """Begin the response of a cascade's next model, or of a fallback."""
        self.writer = BufferedWriter() if is_buffered else self.client
        self.has_begun = self.is_complete = False

    # Waiting.

    def keep_alive(self, seconds: float) -> None:
        """Send the client of a stream a comment whenever it has received nothing for this time."""
        self._has_written = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._comment, seconds)

    def _comment(self, seconds: float) -> None:
        """Send a comment if the client has received nothing for this time, because the request waits."""
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
        """Send no more comments, because the request has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def flush(self) -> None:
        """Send the data that waits for its pace, because the request has ended."""
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

    def write_events(self, data: bytes, partial: PartialAnswer) -> bool:
        """Write a part of a stream; `partial`: the answer so far, including this part. Returns False if the client
        reads slowly."""
        self._has_written = True
        self.writer.write(data, more=True)
        if self._in_flight.copy is not None:
            self.copy(data, partial)
        return not self.writer.is_full

    def write_tokens(self, event: bytes, num_tokens: int, partial: PartialAnswer) -> bool:
        """Write an event with this many answer tokens at their pace. False if the client reads slowly."""
        assert isinstance(self.writer, TokenWriter)
        self._has_written = True
        self.writer.write_tokens(event, num_tokens)
        self.copy(event, partial)
        return not self.writer.is_full

    def copy(self, data: bytes, partial: PartialAnswer) -> None:
        """Copy data sent to the client, for its retry."""
        if self._in_flight.copy is not None and self.writer is self.client:
            self._in_flight.copy.append(data, partial)

    # A whole answer, or an error.

    def write_whole(self, status: int, data: bytes, content_type: str) -> None:
        """Write a whole response. If comments were sent before, write it as the stream's only event."""
        if self.is_open:
            self.is_complete = self.has_begun = True
            end = b"" if self._request.is_passthrough else sse.DONE
            self.writer.write(b"data: " + b" ".join(data.splitlines()) + b"\n\n" + end)
            return
        self.start(status, content_type.encode("latin-1"), len(data))
        self.is_complete = True
        self.writer.write(data)

    def write_refusal(self, status: int, body: bytes) -> None:
        """Write an engine's refusal, as OpenAI's API words it."""
        self.write_whole(status, openai_error(status, body), "application/json")

    async def write_error(self, error: ApiError | RefusedError, is_passthrough: bool) -> None:
        """Write an error as the response, or as the last events of a stream that has begun. A refusal is written that
        no other replica confirmed and no fallback replaced."""
        if isinstance(error, RefusedError):
            self.write_refusal(error.status, error.body)
            await self.client.drain()
            return
        if self.is_opaque:
            return  # the connection is closed, which marks the response as incomplete
        if (self.has_begun or self.is_open) and self.writer is self.client:
            self.client.write(error_event(error) if is_passthrough else sse.encode_event(error.body()) + sse.DONE)
            await self.client.drain()
        else:
            await write_error(self.client, error, self._in_flight.request_id.encode("latin-1"))
