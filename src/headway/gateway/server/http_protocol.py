"""HTTP/1.1 for clients, with limits on everything outside of bodies.

An application with `takes_writer` gets the request's cycle as a fourth argument, and writes to the cycle directly.

Requests of one connection are parsed one at a time: the next request waits until the client has read the last answer,
and reading pauses. The memory of a connection is therefore bounded for any client (`ConnectionMemory`).
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from headway.gateway.errors import ApiError
from headway.gateway.framing import BODY, END, HEAD, MAX_HEADERS, RepeatedHead, RequestFraming
from headway.gateway.server.hosts import ExpectedHosts
from headway.gateway.server.http_cycle import MAX_HELD_BYTES, TEXT_HEADERS, ConnectionMemory, HttpCycle

_ASGI: Any = {"version": "3.0", "spec_version": "2.3"}
_HEAD_TIMEOUT_S = 30.0
_IDLE_S = 1.0
"""Idle time after which a connection is closed if other connections wait."""
_LAST_REQUEST_S = 2.0
"""Longest time for which an ending server waits for a request that is on its way."""
_SINGLE_HEADERS = frozenset((b"host", b"authorization", b"x-api-key", b"content-type", b"origin", b"transfer-encoding"))
"""A request that repeats one of these headers is refused, because a proxy in front may have read the other value."""
_LINGER_S = 5.0
_LINGER_BYTES = 64 << 20
"""Maximum number of bytes of a request that are read and dropped after the last answer on a connection. If a connection
is closed with unread bytes, it is reset, and the client may lose the answer."""
_COPIED_BYTES: Final = 1 << 14
"""Length below which a segment is divided by copying. For short segments, copies are faster than views."""
_UNREAD_TIMEOUT_S = 60.0
_LEAST_READ_BYTES = 1 << 14
"""Minimum number of unread answer bytes that a client must read within `_UNREAD_TIMEOUT_S`."""
_FIRST_PROBE_S, _PROBE_PERIOD_S = 0.05, 2.0
"""Times of the probes of clients that have closed the connection or their side of it."""
_MAX_KEPT_TARGET: Final = 256
"""Longest target of a request that its connection keeps for the next request."""
_LINE_ENDS = re.compile(rb"[\r\n]*")


class HttpProtocol(asyncio.Protocol):
    """One connection of a client. Implements `ServedConnection`, and the protocol interface of uvicorn's server."""

    # Set once the connection is open.
    _transport: asyncio.Transport
    _memory: ConnectionMemory

    _server: Any = None
    _client: Any = None
    _scheme = "http"

    # The current request.
    _url = b""
    _is_in_head = False
    """Whether a part of a head has come."""
    _refusal: ApiError | None = None
    """The reason why the last request with parsed headers is refused."""
    _cycle: HttpCycle | None = None
    _is_new = False
    """Whether the cycle's application must still be started."""
    _is_whole = False
    """Whether the parser has found the request's end. `_num_body`: number of body bytes that the parser has found."""
    _num_body = 0

    # An earlier head.
    _is_repeated = False
    """Whether the current request has the kept head, so that the parser does not see it."""
    _kept_scope: Any = None
    """The ASGI scope of the request with the kept head."""
    _length_at = 0
    """Index of its content-length."""
    _may_keep_head = False
    """Whether the last request's head may be kept."""

    # The target of the last request, kept because the next request mostly has the same target.
    _last_target = b""
    _last_url: Any = None

    # The next requests.
    _waiting = b""
    """Bytes that contain the next requests, from `_waiting_start` on."""
    _waiting_start = 0
    _is_next_due = False
    """Whether the next request waits only for the client to read enough of a complete answer."""
    _has_ended = False
    """Whether the client will send nothing more."""
    _is_ending = False
    """Whether the server is ending. The next request is then the connection's last."""

    # Times.
    _timer: asyncio.TimerHandle | None = None
    _deadline_s: float | None = None
    """Deadline for the next head or its rest, on the event loop's clock. None during a request."""
    _linger_timer: asyncio.TimerHandle | None = None
    _num_lingered = 0
    _unread_timer: asyncio.TimerHandle | None = None
    _num_unread = 0
    """Number of answer bytes that the client had not read when the timer was set."""
    _probe_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        hosts: ExpectedHosts | None = None,
        count_refused: Callable[[int], None] | None = None,
    ) -> None:
        """`hosts`: the hosts that are served; None for all. `count_refused(status)` is called for each answer to a
        request that the application does not see. The other arguments are uvicorn's."""
        self._app: Any = config.loaded_app
        self._takes_writer = bool(getattr(self._app, "takes_writer", False))
        self._loop = _loop or asyncio.get_running_loop()
        self._keep_alive_s = float(config.timeout_keep_alive)
        self._state, self._app_state, self._hosts = server_state, app_state, hosts
        self._count_refused = count_refused
        self._framing, self._repeated = RequestFraming(), RepeatedHead()
        self._parser: Any = httptools.HttpRequestParser(self)
        # Data after a request that closes the connection is dropped.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._headers: list[tuple[bytes, bytes]] = []
        self._accepted: tuple[bytes | None, ...] = ()
        """Host and media type of an earlier request that was served."""

    # Called by the event loop, and by uvicorn's server.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)
        self._state.connections.add(cast(Any, self))
        self._transport, self._memory = made, ConnectionMemory(made)
        self._server, self._client = get_local_addr(made), get_remote_addr(made)
        self._scheme = "https" if is_ssl(made) else "http"
        self._set_deadline(_HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        for timer in (self._timer, self._linger_timer, self._unread_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._linger_timer = self._unread_timer = self._probe_timer = None
        cycle, self._cycle = self._cycle, None
        self._waiting = b""
        if cycle is not None and not cycle.is_complete:
            cycle.disconnect()
        self._memory.resume_writing()
        if exc is None:
            self._transport.close()
        self._parser = None  # ends the reference cycle between parser and connection

    def eof_received(self) -> bool:
        """The client will send nothing more. Received requests are answered, unless the client is gone."""
        if self._has_ended:
            return True
        self._has_ended, cycle = True, self._cycle
        is_whole = self._framing.part == END and cycle is not None and self._linger_timer is None
        if not is_whole or cycle is None or self._scheme == "https":  # the event loop closes TLS connections
            self._close()
            return False
        if not cycle.is_complete:
            if not self._waiting:
                cycle.shut_down()
            self._probe(cycle, _FIRST_PROBE_S, -1)
        return True

    def _probe(self, cycle: HttpCycle, wait_s: float, num_written: int) -> None:
        """Find out whether the client has closed the whole connection or only its side. On a closed connection, the
        client's system reports the closing when data is sent. Therefore an interim response is sent if the response has
        not begun. A response whose number of written parts is still `num_written` ends here."""
        self._probe_timer = None
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        elif cycle.num_written == num_written > 0 or not (cycle.has_begun or cycle.send_interim()):
            self._close()
        elif cycle is self._cycle and not cycle.is_complete:
            wait_s = _PROBE_PERIOD_S if cycle.has_begun else wait_s
            num = cycle.num_written
            self._probe_timer = self._loop.call_later(wait_s, self._probe, cycle, _PROBE_PERIOD_S, num)

    def pause_writing(self) -> None:
        self._memory.pause_writing()
        self._expect_reads()

    def resume_writing(self) -> None:
        self._memory.resume_writing()
        if self._unread_timer is not None and not self._transport.is_closing():
            self._unread_timer.cancel()
            self._unread_timer = None
        if self._is_next_due:
            self._is_next_due = False
            self._await_next()

    def _expect_reads(self) -> None:
        """Abort the connection unless the client goes on reading its answers."""
        if self._unread_timer is None:
            self._num_unread = self._memory.num_unread
            self._unread_timer = self._loop.call_later(_UNREAD_TIMEOUT_S, self._check_reads)

    def _check_reads(self) -> None:
        self._unread_timer = None
        num_unread = self._memory.num_unread
        if num_unread and self._num_unread - num_unread < _LEAST_READ_BYTES:
            self._transport.abort()
        else:
            self._expect_reads()

    def shutdown(self) -> None:
        """Close the connection after the response to the current request or to one on its way."""
        self._is_ending = True
        if self._cycle is not None and not self._cycle.is_complete:
            self._cycle.shut_down()
        elif self._deadline_s is not None and self._expects_request():
            self._set_deadline(min(_LAST_REQUEST_S, self._deadline_s - self._loop.time()), is_sooner=True)
        else:
            self._close()

    def _expects_request(self) -> bool:
        """Whether a request is expected: on a new connection always, later once a part of the next request has come."""
        if self._cycle is None or self._framing.num_outside:
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def make_room(self) -> None:
        """Make room for waiting connections: close this connection after the current answer, or now if it has been idle
        for a while."""
        cycle, framing = self._cycle, self._framing
        if cycle is not None and not cycle.is_complete:
            cycle.shut_down()
        elif framing.part == HEAD and not framing.num_outside and self._deadline_s is not None:
            left_s = self._deadline_s - self._loop.time()
            if left_s < (_HEAD_TIMEOUT_S if cycle is None else self._keep_alive_s) - _IDLE_S:
                self._close()

    def _close(self) -> None:
        """Close the connection when the client has read its answers or stops reading them."""
        self._transport.close()
        if self._unread_timer is None and self._memory.num_unread:
            self._expect_reads()

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._num_lingered += len(data)
            if self._num_lingered > _LINGER_BYTES:
                self._close()
        elif self._framing.part == END:
            if self._waiting:
                data = self._waiting[self._waiting_start :] + data
            self._keep_waiting(data, 0)
        else:
            self._parse(data, 0)
            self._start_new()

    def _keep_waiting(self, data: bytes, start: int) -> None:
        """Keep the bytes of the next requests: `data[start:]`."""
        if len(data) - start <= MAX_HELD_BYTES < len(data):
            data, start = data[start:], 0  # earlier bytes are no longer needed
        self._waiting, self._waiting_start = data, start
        self._memory.keep_ahead(len(data))

    def _parse(self, data: bytes, start: int) -> None:
        """Parse one request of `data[start:]`, part by part. Later data is parsed after its answer."""
        framing, size = self._framing, len(data)
        if framing.part == HEAD and not framing.num_outside and start < size and data[start] in b"\r\n":
            found = _LINE_ENDS.match(data, start)  # blank lines are allowed before a request
            start = size if found is None else found.end()
        parts = data if size < _COPIED_BYTES else memoryview(data)
        while start < size:
            part, end = framing.part, framing.end_of_part(data, start)
            if part == BODY and self._is_repeated and self._cycle is not None:
                framing.count_body(end - start)
                self._cycle.add_body(data[start:end])
                if framing.part == END:
                    self._cycle.end_body()
                    if end < size:
                        self._keep_waiting(data, end)
                    return
                start = end
                continue
            is_first = part == HEAD and not framing.num_outside
            if is_first and self._repeated.is_known and (length := self._repeated.body_length(data, start, end)):
                start = end + length
                self._begin_repeated(length, data[end:start] if start <= size else b"")
                if framing.part == END:
                    if start < size:
                        self._keep_waiting(data, start)
                    return
                start = end
                continue
            try:
                self._parser.feed_data(parts[start:end])
            except httptools.HttpParserUpgrade:
                pass  # the server may ignore a request to change the protocol
            except httptools.HttpParserError:
                self._refuse(self._refusal or _invalid())
                return
            if self._refusal is not None:
                self._refuse(self._refusal)
                return
            if not framing.agrees(part, data, start, end, self._is_whole, self._num_body):
                self._refuse(_invalid())
                return
            if framing.part == END:
                if self._cycle is not None:
                    self._cycle.end_body()
                if end < size:
                    self._keep_waiting(data, end)
                return
            if framing.part != BODY and framing.is_too_long:
                self._refuse(_too_long(part))
                return
            if is_first and framing.part == BODY:
                self._keep_head(data, start, end)
            start = end
        if self._has_ended:
            self._close()
        elif framing.part == HEAD and not self._is_in_head:
            self._is_in_head = True
            self._set_deadline(_LAST_REQUEST_S if self._is_ending else _HEAD_TIMEOUT_S, is_sooner=True)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._framing.part != HEAD:
            self._refusal = _invalid()  # the parser found the end of a request where there is none
        self._url, self._headers = b"", []
        self._is_whole, self._num_body, self._is_repeated = False, 0, False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._framing.part == HEAD:  # otherwise the field is a trailer, which the check of the headers has not seen
            if value and value[-1] in b" \t":
                value = value.rstrip(b" \t")  # the parser leaves this white space, which is not part of the value
            self._headers.append((name.lower(), value))
            if len(self._headers) > MAX_HEADERS:
                self._refusal = _too_many_headers()
                self._headers.pop()

    def on_headers_complete(self) -> None:
        """Check the request. If it is served, its application starts once these bytes are parsed."""
        self._is_in_head = False
        self._deadline_s = None
        version = self._parser.get_http_version()
        url = self._last_url if self._url == self._last_target else self._parse_url()
        found = dict(self._headers)
        if len(found) != len(self._headers) and self._refusal is None:
            self._refusal = self._check_repeated(found)
        if self._hosts is not None and self._refusal is None:
            origin = found.get(b"origin"), found.get(b"host"), url.host, found.get(b"content-type")
            if origin != self._accepted:
                self._refusal = self._check_origin(self._hosts, *origin)
                self._accepted = origin if self._refusal is None else ()
        if self._refusal is None:
            why = self._framing.begin_body(found, version, bool(self._parser.should_upgrade()))
            self._refusal = None if why is None else ApiError(400, why, "invalid_http")
        if self._refusal is not None:
            return
        path = url.path.decode("ascii")
        scope: Any = {
            "type": "http",
            "asgi": _ASGI,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "root_path": "",
            "headers": self._headers,
            "state": self._app_state.copy(),
            "method": self._parser.get_method().decode("ascii"),
            "http_version": version,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        expects_100_continue = b"expect" in found and found[b"expect"].lower() == b"100-continue"
        keeps_alive = version != "1.0" and bool(self._parser.should_keep_alive())
        self._may_keep_head = keeps_alive and not expects_100_continue
        default_headers, keeps_alive = self._state.default_headers, keeps_alive and not self._is_ending
        self._cycle = HttpCycle(
            self, self._transport, self._memory, scope, default_headers, expects_100_continue, keeps_alive
        )
        self._is_new = True

    # Heads that repeat an earlier head of the connection.

    def _keep_head(self, data: bytes, start: int, end: int) -> None:
        """Keep the head `data[start:end]` of a request with a body, if a later head may be compared with it."""
        length = dict(self._headers).get(b"content-length", b"")
        if self._cycle is None or not self._may_keep_head or not self._repeated.learn(data, start, end, length):
            return
        text = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._headers}
        self._kept_scope = {**self._cycle.scope, "headers": self._headers.copy(), TEXT_HEADERS: text}
        self._length_at = self._headers.index((b"content-length", length))

    def _begin_repeated(self, length: int, body: bytes) -> None:
        """Begin a request whose head repeats the kept one but for the length of its body. `body`: all of the body, if
        it has come."""
        self._is_in_head, self._is_repeated, self._deadline_s = False, True, None
        if body:
            self._framing.num_outside, self._framing.part = 0, END
        else:
            self._framing.begin_known_body(length)
        scope, digits = self._kept_scope.copy(), b"%d" % length
        headers, text = scope["headers"].copy(), scope[TEXT_HEADERS].copy()
        headers[self._length_at], text["content-length"] = (b"content-length", digits), digits.decode()
        scope["headers"], scope[TEXT_HEADERS], scope["state"] = headers, text, self._app_state.copy()
        default_headers, keeps_alive = self._state.default_headers, not self._is_ending
        self._cycle = HttpCycle(self, self._transport, self._memory, scope, default_headers, False, keeps_alive, body)
        self._is_new = True

    def _parse_url(self) -> Any:
        """The parts of the request's target; the host may be None. A short target is cached."""
        parsed = httptools.parse_url(self._url)
        if len(self._url) <= _MAX_KEPT_TARGET:
            self._last_target, self._last_url = self._url, parsed
        return parsed

    def _check_repeated(self, found: dict[bytes, bytes]) -> ApiError | None:
        """The error if a header must not occur more than once; None otherwise."""
        names = [name for name, _ in self._headers]
        repeated = sorted(name.decode() for name in _SINGLE_HEADERS.intersection(found) if names.count(name) > 1)
        if repeated:
            return ApiError(400, f"the header {repeated[0]} occurs more than once", "repeated_header", repeated[0])
        return None

    @staticmethod
    def _check_origin(
        hosts: ExpectedHosts,
        origin: bytes | None,
        host: bytes | None,
        target_host: bytes | None,
        media_type: bytes | None,
    ) -> ApiError | None:
        """The error if a request without a key may come from another host's page. Only headers that pages cannot set
        are judged. None otherwise."""
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

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if self._cycle is not None:
            self._cycle.add_body(body)

    def on_message_complete(self) -> None:
        self._is_whole = True

    # Responses.

    def _start_new(self) -> None:
        """Start the application if a head has come. If the body has come, too, the application gets both."""
        cycle = self._cycle
        if self._is_new and cycle is not None:
            self._is_new = False
            tasks = self._state.tasks
            # Not by the loop's method, which has every task numbered.
            cycle.task = asyncio.Task(cycle.run(self._app, self._takes_writer, tasks), name="request")
            tasks.add(cycle.task)

    def end_response(self, cycle: HttpCycle) -> None:
        self._state.total_requests += 1
        self._url, self._headers = b"", []
        if cycle is not self._cycle or self._transport.is_closing() or self._linger_timer is not None:
            return
        if self._memory.write_paused:
            self._is_next_due = True
        elif self._waiting or self._has_ended:
            self._await_next()
        else:
            self._framing.begin_head()
            self._set_deadline(self._keep_alive_s)

    def _await_next(self) -> None:
        """Begin the next request once the client has read almost all of the last answer."""
        if self._waiting:
            self._loop.call_soon(self._parse_next)
        elif self._has_ended:
            self._close()
        else:
            self._framing.begin_head()
            self._set_deadline(self._keep_alive_s)

    def _parse_next(self) -> None:
        data, start = self._waiting, self._waiting_start
        self._waiting, self._waiting_start = b"", 0
        self._framing.begin_head()
        if not self._transport.is_closing():
            self._parse(data, start)
            self._start_new()
            if not self._waiting:
                self._memory.keep_ahead(0)

    def close_after_response(self) -> None:
        """Close the connection after its last answer. Further data is read and dropped for a while."""
        if self._cycle is not None:
            self._cycle.take_parts()
        if self._has_ended or (self._framing.part == END and not self._waiting):
            self._close()
            return
        self._deadline_s = None
        self._linger_timer = self._loop.call_later(_LINGER_S, self._close)
        self._waiting, self._waiting_start = b"", 0
        self._memory.keep_ahead(0)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _set_deadline(self, timeout_s: float, is_sooner: bool = False) -> None:
        """Time out unless the next head is complete in `timeout_s`. An earlier timer is kept, and set again when it
        fires. `is_sooner`: whether the new deadline may be before the current timer."""
        self._deadline_s = self._loop.time() + timeout_s
        if is_sooner and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline_s is not None:
            left_s = self._deadline_s - self._loop.time()
            if left_s > 0:
                self._timer = self._loop.call_later(left_s, self._check_deadline)
            else:
                self._time_out()

    def _time_out(self) -> None:
        if self._framing.num_outside:
            self._refuse(ApiError(408, "the request was not there in time", "timeout"))
        else:
            self._close()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that is not passed on, or whose body cannot be parsed, and close the connection."""
        cycle, is_new, self._refusal, self._is_new = self._cycle, self._is_new, None, False
        is_begun = is_seen = False
        if cycle is not None and not cycle.is_complete:
            is_begun, is_seen = cycle.has_begun, not is_new
            cycle.refuse(error.status)
        if not is_begun:
            if self._count_refused is not None and not is_seen:
                self._count_refused(error.status)
            body = error.json()
            head = b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
            self._transport.write(STATUS_LINE[error.status] + head + body)
        self._framing.part = HEAD
        self.close_after_response()


def _invalid() -> ApiError:
    return ApiError(400, "Invalid HTTP request received.", "invalid_http")


def _too_many_headers() -> ApiError:
    return ApiError(431, f"more than {MAX_HEADERS} headers", "headers_too_long")


def _too_long(part: int) -> ApiError:
    if part == HEAD:
        return ApiError(431, "the headers are too long", "headers_too_long")
    return ApiError(431, "the body's chunk headers and trailers are too long", "framing_too_long")
