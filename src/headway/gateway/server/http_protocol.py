"""HTTP/1.1 towards clients: uvicorn's protocol, with limits on all that is outside bodies, and with a direct writer.

An application with `takes_writer` is called with a `TransportWriter` as a fourth argument: one write to the connection
for each part of an answer, and no task that waits for the client to leave.

Requests of one connection are parsed one at a time: what follows a request waits until its answer is complete.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway.gateway.errors import ApiError
from headway.gateway.server.framing import END, HEAD, RequestFraming
from headway.gateway.server.hosts import ExpectedHosts
from headway.gateway.server.transport_writer import TransportWriter, begin_response

_ASGI: Any = {"version": "3.0", "spec_version": "2.3"}
_MAX_HEADERS = 256
_HEAD_TIMEOUT_S = 30.0
_SINGLE_HEADERS = frozenset((b"host", b"authorization", b"x-api-key", b"content-type", b"origin", b"transfer-encoding"))
"""Two of them are refused: a proxy in front may have read the other one."""
_LINGER_S = 5.0
_LINGER_BYTES = 64 << 20
"""After the last answer on a connection, so much of the request's rest is read and dropped. A connection that is closed
with unread bytes is reset, and its client may lose the answer."""
_COPIED_BYTES = 1 << 14
"""Shorter segments are divided by copies, which take less time than views."""
_MAX_UNPARSED_BYTES = 1 << 16
"""Of further requests, before the answer to the present one; then reading pauses."""


class _Cycle(RequestResponseCycle):
    """uvicorn's request and response, which closes the connection if the request's body has not been read."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            begin_response(self, message["status"])
        await super().send(message)


class _CycleTransport:
    """A cycle's view of the connection: closing it waits for the rest of the request."""

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing
        self.close = protocol.close_after_response


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the time and the length of all that is outside bodies."""

    _timer: asyncio.TimerHandle | None = None
    _deadline_s: float | None = None
    """On the event loop's clock: for the next head, or for its rest. None during a request."""
    _is_in_head = False
    """A part of a head has come."""
    _takes_headers = True
    """What the parser calls headers are no trailers."""
    _linger_timer: asyncio.TimerHandle | None = None
    _writer: TransportWriter | None = None
    _unparsed = b""
    """Of the next requests."""
    _num_lingered = 0
    _accepted: tuple[bytes | None, ...] = ()
    """Host and media type of a request that was served before."""
    _refusal: ApiError | None = None
    """Why the request whose headers were parsed last is not served."""
    cycle: _Cycle

    def __init__(self, *args: Any, hosts: ExpectedHosts | None = None, **kwargs: Any) -> None:
        """`hosts`: the hosts that are served; None for all."""
        super().__init__(*args, **kwargs)
        self._hosts = hosts
        self._framing = RequestFraming()
        self._takes_writer = getattr(self.app, "takes_writer", False)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it, too
        super().connection_made(transport)
        self._cycle_transport: Any = _CycleTransport(self)
        self._set_deadline(_HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._cycle_transport.close = self.transport.close  # ends the reference cycle between the two
        if self._writer is not None:
            self._writer.disconnected()
            self._writer = None

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._num_lingered += len(data)
            if self._num_lingered > _LINGER_BYTES:
                self.transport.close()
        elif self._framing.part == END:
            self._unparsed += data
            if len(self._unparsed) > _MAX_UNPARSED_BYTES:
                self.flow.pause_reading()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse one request, part by part; what follows it is parsed after its answer."""
        framing, start = self._framing, 0
        if framing.part == HEAD and not framing.num_outside:
            data = data.lstrip(b"\r\n")  # allowed before a request
        size = len(data)
        parts = data if size < _COPIED_BYTES else memoryview(data)
        while start < size:
            part, end = framing.part, framing.end_of_part(data, start)
            try:
                self.parser.feed_data(parts[start:end])
            except httptools.HttpParserUpgrade:
                pass  # the server may ignore a request to change the protocol
            except httptools.HttpParserError:
                self._refuse(self._refusal or ApiError(400, "Invalid HTTP request received.", "invalid_http"))
                return
            if self._refusal is not None:
                self._refuse(self._refusal)
                return
            if framing.part == END:
                self._unparsed = data[end:]
                return
            if framing.part == part:
                framing.passed(data, start, end)
                if framing.is_too_long:
                    self._refuse(_too_long(part))
                    return
            start = end
        if framing.part == HEAD and not self._is_in_head:
            self._is_in_head = True
            self._set_deadline(_HEAD_TIMEOUT_S, is_sooner=True)

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.url, self.headers = b"", []
        scope: Any = {  # the rest follows with the end of the head
            "type": "http", "asgi": _ASGI, "server": self.server, "client": self.client, "scheme": self.scheme,
            "root_path": "", "headers": self.headers, "state": self.app_state.copy(),
        }  # fmt: skip
        self.scope = scope

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._takes_headers:  # else it is a trailer: whoever checked the headers has not seen it
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """As uvicorn's, without other protocols than HTTP, and for one request at a time."""
        self._is_in_head = self._takes_headers = False
        self._deadline_s = None
        version, scope = self.parser.get_http_version(), self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        found = dict(self.headers)
        if len(found) != len(self.headers) or len(found) > _MAX_HEADERS:
            self._refusal = self._check_headers(found)
        if self._hosts is not None and self._refusal is None:
            origin = found.get(b"origin"), found.get(b"host"), url.host, found.get(b"content-type")
            if origin != self._accepted:
                self._refusal = self._check_origin(self._hosts, *origin)
                self._accepted = origin if self._refusal is None else ()
        if self._refusal is None:
            self._refusal = self._begin_body(found, version)
        if self._refusal is not None:
            return
        expects_100_continue = b"expect" in found and found[b"expect"].lower() == b"100-continue"
        keeps_alive = version != "1.0" and self.parser.should_keep_alive()
        self.cycle = cycle = _Cycle(  # by position, as names take longer than all else here
            scope, self._cycle_transport, self.flow, self.logger, self.access_logger, self.access_log,
            self.server_state.default_headers, asyncio.Event(), expects_100_continue, keeps_alive,
            self.on_response_complete,
        )  # fmt: skip
        self._start_asgi_task(cycle, self.app)

    def _check_headers(self, found: dict[bytes, bytes]) -> ApiError | None:
        """Why the request is not served, by the number of its headers."""
        if len(found) != len(self.headers):
            names = [name for name, _ in self.headers]
            repeated = sorted(name.decode() for name in _SINGLE_HEADERS.intersection(found) if names.count(name) > 1)
            if repeated:
                return ApiError(400, f"the header {repeated[0]} occurs more than once", "repeated_header", repeated[0])
        if len(self.headers) > _MAX_HEADERS:
            return ApiError(431, f"more than {_MAX_HEADERS} headers", "headers_too_long")
        return None

    @staticmethod
    def _check_origin(
        hosts: ExpectedHosts,
        origin: bytes | None,
        host: bytes | None,
        target_host: bytes | None,
        media_type: bytes | None,
    ) -> ApiError | None:
        """Why a request without a key is not served, by what pages of other hosts cannot choose."""
        if (host and not hosts.accepts(host)) or (target_host and not hosts.accepts(target_host)):
            what = "this gateway has no api_keys and does not serve this host; gateway.hosts names those it serves"
            return ApiError(421, what, "unknown_host")
        if origin is not None and not hosts.accepts_origin(origin):
            what = (
                "this gateway has no api_keys and serves no pages of other hosts; gateway.hosts names those it serves"
            )
            return ApiError(403, what, "unknown_origin")
        if media_type is not None and media_type.lower().startswith(b"text/plain"):
            return ApiError(415, "expected content-type: application/json", "unsupported_media_type")
        return None

    def _begin_body(self, found: dict[bytes, bytes], version: str) -> ApiError | None:
        """Prepare for the body; why the request is not served, by the body's framing."""
        coding, length = found.get(b"transfer-encoding"), int(found.get(b"content-length", 0))
        if self.parser.should_upgrade() and (coding is not None or length):
            return ApiError(
                400, "a request with a body cannot change the protocol; expected no Upgrade", "invalid_http"
            )
        if coding is None:
            self._framing.begin_body(length)
        elif coding.lower() != b"chunked" or version == "1.0":
            return ApiError(400, "expected transfer-encoding: chunked, with HTTP/1.1", "invalid_http")
        else:
            self._framing.begin_chunks()
        return None

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._framing.part = END
        if self._refusal is None:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # Responses.

    def _start_asgi_task(self, cycle: _Cycle, app: Any) -> None:  # type: ignore[override]  # this class makes them
        if self._takes_writer:
            self._writer = TransportWriter(self.transport, self.flow, cycle)
            app = partial(app, writer=self._writer)
        self.tasks.add(self.loop.create_task(self._run(cycle, app)))

    async def _run(self, cycle: _Cycle, app: Any) -> None:
        try:
            await cycle.run_asgi(app)
        finally:
            self.tasks.discard(asyncio.current_task())

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        self.flow.resume_reading()
        if self._unparsed:
            self.loop.call_soon(self._parse_next)
        else:
            self._begin_head()
            self._set_deadline(self.timeout_keep_alive)

    def _begin_head(self) -> None:
        self._framing.begin_head()
        self._takes_headers = True

    def _parse_next(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self._begin_head()
        if not self.transport.is_closing():
            self._parse(data)

    def close_after_response(self) -> None:
        """Close the connection after its last answer. If more may come, it is read and dropped for a while."""
        if self._framing.part == END and not self._unparsed:
            self.transport.close()
            return
        self._deadline_s = None
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)
        self._unparsed = b""
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _set_deadline(self, timeout_s: float, is_sooner: bool = False) -> None:
        """Time out unless the next head is complete by then. A timer that is due before is kept, and set again then.
        `is_sooner`: it may be due later."""
        self._deadline_s = self.loop.time() + timeout_s
        if is_sooner and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_later(timeout_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline_s is not None:
            left_s = self._deadline_s - self.loop.time()
            if left_s > 0:
                self._timer = self.loop.call_later(left_s, self._check_deadline)
            else:
                self._time_out()

    def _time_out(self) -> None:
        if self._framing.num_outside:
            self._refuse(ApiError(408, "the request was not there in time", "timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that is not passed on, or whose body cannot be parsed, and close the connection."""
        cycle, self._refusal = self.cycle, None
        is_begun = False
        if cycle is not None and not cycle.response_complete:
            is_begun = cycle.response_started
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
            if self._writer is not None:
                self._writer.disconnected()
                self._writer = None
        if not is_begun:
            body = error.json()
            head = b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._framing.part = HEAD
        self.close_after_response()


def _too_long(part: int) -> ApiError:
    if part == HEAD:
        return ApiError(431, "the headers are too long", "headers_too_long")
    return ApiError(431, "the body's chunk headers and trailers are too long", "framing_too_long")
