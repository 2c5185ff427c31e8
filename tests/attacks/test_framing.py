"""Framing against parsers: a request that two of them divide differently is refused, and nothing after it is served.

The references are the parser by itself, which gets all bytes at once and no help, and h11, which shares no code with
it.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("httptools")

import h11
import httptools
import uvicorn
from uvicorn.server import ServerState

from attacking import SCALE
from headway.gateway.framing import END, RequestFraming
from headway.gateway.server.http_cycle import HttpCycle
from headway.gateway.server.http_protocol import HttpProtocol
from http_streams import random_stream
from wire import Wire

NUM_CASES = 1000 * SCALE
Request = tuple[bytes, bytes, bytes]
"""Method, target and body."""


class _Parsed:
    """The requests that the parser finds in a stream, up to what it refuses."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[Request] = []
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        with suppress(httptools.HttpParserError):
            self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.requests.append((self._parser.get_method(), self._url, self._body))


_STRICTER = {
    "bad Content-Length": "a length of more than 20 digits, most of them zeros",
    "Missing mandatory Host: header": "no Host: engines answer such requests",
    "no request line received": "several blank lines before a request",
    "illegal request line": "several spaces in the request line",
}
"""What h11 refuses and the gateway serves: the start of h11's reason, and what the request has."""


class _ParsedByH11:
    """The requests that h11 finds in a stream, up to what it refuses, and why it does."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[Request] = []
        self.reason = ""
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=len(data) + 1)
        self._connection.receive_data(data)
        with suppress(_IncompleteError):
            try:
                while True:
                    self.requests.append(self._next_request())
            except h11.RemoteProtocolError as error:
                self.reason = str(error)

    def _next_request(self) -> Request:
        method = target = body = b""
        while not isinstance(event := self._connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                method, target = event.method, event.target
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                raise _IncompleteError
        self._connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        self._connection.send(h11.EndOfMessage())
        if self._connection.our_state is h11.DONE:
            self._connection.start_next_cycle()
        return bytes(method), bytes(target), bytes(body)


class _IncompleteError(Exception):
    """More bytes are needed."""


class _Served(HttpProtocol):
    """A connection whose requests are answered at once; `requests` are those that were served whole."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config, ServerState(), {}, _NoLoop())  # type: ignore[arg-type]
        self.requests: list[Request] = []
        self.connection_made(wire := Wire())  # type: ignore[arg-type]
        self.wire = wire

    def _start_new(self) -> None:
        cycle = self._cycle
        if cycle is not None and self._framing.part == END and not cycle.is_complete:
            self._note(cycle)

    def _note(self, cycle: HttpCycle) -> None:
        scope: Any = cycle.scope
        body = cycle.take_body() or b""
        self.requests.append((scope["method"].encode(), self._url, body))
        cycle.start(200, [(b"content-length", b"0")])
        cycle.write(b"")


class _NoLoop:
    """Runs at once what is called soon; no time passes."""

    def call_soon(self, callback: Any, *args: Any) -> None:
        callback(*args)

    def call_later(self, delay_s: float, callback: Any, *args: Any) -> _NoLoop:
        return self

    def time(self) -> float:
        return 0.0

    def cancel(self) -> None:
        """Nothing was to be called."""


def _served(config: uvicorn.Config, segments: list[bytes]) -> list[Request]:
    protocol = _Served(config)
    for segment in segments:
        if segment and not protocol.wire.is_closed:
            protocol.data_received(segment)
    return protocol.requests


@pytest.fixture(scope="module")
def config() -> uvicorn.Config:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("requests are answered without it")

    made = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", proxy_headers=False)
    made.load()
    return made


def test_requests_are_those_of_the_parser_or_refused(config: uvicorn.Config) -> None:
    """Of random streams, as they come and in segments: what is served is what the parser finds, in its order."""
    chosen = random.Random(35)
    num_whole = num_refused = 0
    for _ in range(NUM_CASES):
        data = random_stream(chosen)
        found, served = _Parsed(data).requests, _served(config, [data])
        assert served == found[: len(served)], data
        num_whole += bool(found) and served == found
        num_refused += served != found
        cut = chosen.randrange(len(data) + 1)
        assert _served(config, [data[:cut], data[cut:]]) == served, (data, cut)
    assert num_whole > NUM_CASES / 3 and num_refused > NUM_CASES / 50  # neither is rare


def test_requests_are_those_of_another_parser_or_one_of_the_two_refuses(config: uvicorn.Config) -> None:
    """No stream is two different requests, and what only h11 refuses is of a kind that is known."""
    chosen = random.Random(36)
    kinds = set()
    for _ in range(NUM_CASES):
        data = random_stream(chosen)
        found, served = _ParsedByH11(data), _served(config, [data])
        num = min(len(served), len(found.requests))
        assert served[:num] == found.requests[:num], data
        if len(served) > num:
            kind = next((start for start in _STRICTER if found.reason.startswith(start)), None)
            assert kind is not None, (found.reason, data)
            kinds.add(kind)
    assert kinds


@pytest.mark.parametrize(("version", "status"), [("0.9", 400), ("1.0", 200), ("1.1", 200), ("2.0", 400)])
def test_versions(config: uvicorn.Config, version: str, status: int) -> None:
    protocol = _Served(config)
    protocol.data_received(b"GET /a HTTP/%s\r\nHost: h\r\n\r\n" % version.encode())
    assert protocol.wire.written.startswith(b"HTTP/1.1 %d" % status)


SIZES = {
    "16 digits": (b"0" * 15 + b"3", True),
    "17 digits": (b"0" * 16 + b"3", False),
    "24 digits": (b"0" * 23 + b"3", False),
}


@pytest.mark.parametrize(("size", "is_served"), SIZES.values(), ids=SIZES)
def test_a_chunk_size_is_read_whole_or_refused(config: uvicorn.Config, size: bytes, is_served: bool) -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + size + b"\r\nabc\r\n0\r\n\r\n" + b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n"
    expected = [(b"POST", b"/a", b"abc"), (b"GET", b"/b", b"")] if is_served else []
    assert _served(config, [data]) == expected
    protocol = _Served(config)
    protocol.data_received(data)
    assert protocol.wire.written.startswith(b"HTTP/1.1 200" if is_served else b"HTTP/1.1 400")


def test_framing_does_not_accept_what_the_parser_found_elsewhere() -> None:
    """Each end that only one of the two sees is a disagreement, as is another number of bytes of the body."""
    head = b"POST /a HTTP/1.1\r\n\r\n"
    for ends, part in ((True, 0), (False, 1)):
        framing = RequestFraming()
        if part:
            framing.begin_body({b"content-length": b"3"}, "1.1", is_upgrade=False)
        data = head if ends else head[:-1]
        assert not framing.agrees(0, data, 0, len(data), False, 0)
    framing = RequestFraming()
    framing.begin_body({b"content-length": b"3"}, "1.1", is_upgrade=False)
    assert not framing.agrees(1, b"abc", 0, 3, False, 3)
    framing.begin_body({b"content-length": b"3"}, "1.1", is_upgrade=False)
    assert not framing.agrees(1, b"ab", 0, 2, True, 2)
    framing.begin_body({b"content-length": b"3"}, "1.1", is_upgrade=False)
    assert not framing.agrees(1, b"abc", 0, 3, True, 2)
    framing.begin_body({b"content-length": b"3"}, "1.1", is_upgrade=False)
    assert framing.agrees(1, b"abc", 0, 3, True, 3)
