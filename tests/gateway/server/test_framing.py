"""The same bytes are the same requests, with the same answers, however they are divided into segments."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import uvicorn
from uvicorn.server import ServerState

from headway.gateway.framing import MAX_FRAMING_BYTES, MAX_HEAD_BYTES
from headway.gateway.relay.writer import AsgiWriter
from headway.gateway.server.hosts import ExpectedHosts
from headway.gateway.server.http_cycle import TEXT_HEADERS
from headway.gateway.server.http_protocol import HttpProtocol
from wire import Wire


async def _echo(scope: Any, receive: Any, send: Any, writer: Any = None) -> None:
    """Answer with the request's target, header names and body; a path of /early gets a 401 before its body is read."""
    if scope["type"] != "http":
        return
    writer, body = writer or AsgiWriter(receive, send), b""
    is_early = scope["path"] == "/early"
    if not is_early and (body := writer.take_body() or b"") == b"":
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            return
    names = b",".join(name for name, _ in scope["headers"])
    echo = b"%s %s %s %s" % (scope["method"].encode(), scope["raw_path"], names, body)
    writer.start(401 if is_early else 200, [(b"content-length", b"%d" % len(echo))])
    writer.write(echo)
    await writer.drain()


async def _direct(scope: Any, receive: Any, send: Any, writer: Any = None) -> None:
    await _echo(scope, receive, send, writer)


_direct.takes_writer = True  # type: ignore[attr-defined]


def _protocol(app: Any) -> HttpProtocol:
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", proxy_headers=False)
    config.load()
    return HttpProtocol(config, ServerState(), {}, hosts=ExpectedHosts("127.0.0.1", ()))


def answers(app: Any, segments: Sequence[bytes]) -> bytes:
    """What is written for these segments."""

    async def story() -> bytes:
        protocol, wire = _protocol(app), Wire()
        protocol.connection_made(wire)  # type: ignore[arg-type]
        for segment in segments:
            if segment and not wire.is_closed:
                protocol.data_received(segment)
            for _ in range(8):
                await asyncio.sleep(0)
        while wire.is_paused and not wire.is_closed:
            await asyncio.sleep(0)
        for _ in range(8 * (len(segments) + b"".join(segments).count(b" HTTP/1."))):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        return wire.written

    return asyncio.run(story())


HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
NEXT = b"GET /next" + HOST + b"\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"POST /a" + HOST + CHUNKED + b"\r\n"
STREAMS = {
    "two requests": b"POST /a" + HOST + b"Content-Length: 3\r\n\r\nabc" + NEXT + NEXT,
    "chunks and trailers": CHUNKS + b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\nX-Api-Key: k\r\nT: u\r\n\r\n" + NEXT,
    "lines before a request": b"\r\n\r\n\r\n" + NEXT + b"\r\n" + NEXT,
    "a body that asks for another protocol": b"POST /a" + HOST + UPGRADE + b"Content-Length: 42\r\n\r\n" + NEXT + NEXT,
    "chunks that ask for another protocol": b"POST /a" + HOST + UPGRADE + CHUNKED + b"\r\n0\r\n\r\n" + NEXT,
    "no body that asks for another protocol": b"GET /a" + HOST + UPGRADE + b"\r\n" + NEXT,
    "a websocket": b"GET /a" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + NEXT,
    "an early error": b"POST /early" + HOST + b"Content-Length: 30\r\n\r\n" + b"x" * 30 + NEXT,
    "an early error in chunks": b"POST /early" + HOST + CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n" + NEXT,
    "an early error without a body": b"GET /early" + HOST + b"\r\n" + NEXT,
    "two hosts": b"GET /a" + HOST + b"Host: localhost\r\n\r\n" + NEXT,
    "two keys": b"GET /a" + HOST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n" + NEXT,
    "another host": b"GET /a HTTP/1.1\r\nHost: evil.example\r\n\r\n" + NEXT,
    "a page of another host": b"POST /a" + HOST + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}" + NEXT,
    "plain text": b"POST /a" + HOST + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}" + NEXT,
    "two lengths": b"POST /a" + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab" + NEXT,
    "a length and chunks": b"POST /a" + HOST + CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n" + NEXT,
    "chunks in HTTP/1.0": b"POST /a HTTP/1.0\r\n" + CHUNKED + b"\r\n1\r\na\r\n0\r\n\r\n" + NEXT,
    "another coding": b"POST /a" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n" + NEXT,
    "a chunk that is too long": b"POST /a" + HOST + CHUNKED + b"\r\n1\r\nabc\r\n0\r\n\r\n" + NEXT,
    "nonsense after a request": NEXT + b"nonsense\r\n\r\n" + NEXT,
    "HTTP/1.0": b"GET /a HTTP/1.0\r\n\r\n" + NEXT,
    "a request to wait": b"POST /a" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}" + NEXT,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("app", [_echo, _direct], ids=["asgi", "direct"])
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_two_segments_have_the_answers_of_one(stream: bytes, app: Any) -> None:
    expected = _without_interim(answers(app, [stream]))
    assert expected
    for at in range(1, len(stream)):
        assert _without_interim(answers(app, [stream[:at], stream[at:]])) == expected, stream[:at]


def _without_interim(data: bytes) -> bytes:
    """A client that sends its body at once may get no 100 Continue."""
    return data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


_LONG = (
    [b"GET /a" + HOST + b"X: " + b"y" * (MAX_HEAD_BYTES - 41 + more) + b"\r\n\r\n" + NEXT for more in range(-3, 4)]
    + [
        CHUNKS + b"1\r\na\r\n0\r\nT: " + b"u" * (MAX_FRAMING_BYTES - 20 + more) + b"\r\n\r\n" + NEXT
        for more in range(0, 12, 2)
    ]
    + [
        CHUNKS + b"1;" + b"x" * (MAX_FRAMING_BYTES - 10 + more) + b"\r\na\r\n0\r\n\r\n" + NEXT
        for more in range(0, 8, 2)
    ]
    + [CHUNKS + b"1\r\na\r\n" * num + b"0\r\n\r\n" + NEXT for num in (13_000, 14_000)]
)


@pytest.mark.ci
@given(
    st.one_of(st.sampled_from(list(STREAMS.values())), st.sampled_from(_LONG)),
    st.lists(st.floats(0.0, 1.0), max_size=6),
    st.sampled_from([_echo, _direct]),
)
@settings(max_examples=150, deadline=None, database=None)
def test_any_segments_have_the_answers_of_one(stream: bytes, cuts: list[float], app: Any) -> None:
    places = [0, *sorted(int(cut * len(stream)) for cut in cuts), len(stream)]
    segments = [stream[start:end] for start, end in pairwise(places)]
    assert _without_interim(answers(app, segments)) == _without_interim(answers(app, [stream]))


def _statuses(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def test_limits_are_exact() -> None:
    found = [_statuses(answers(_echo, [stream])) for stream in _LONG]
    assert found[:7] == [[200, 200]] * 4 + [[431]] * 3
    assert set(map(tuple, found[7:])) == {(200, 200), (431,)}


def test_trailers_are_no_headers_and_an_upgrade_with_a_body_is_no_request() -> None:
    got = answers(_echo, [STREAMS["chunks and trailers"]])
    assert b"POST /a host,transfer-encoding abc" in got and b"GET /next" in got
    assert _statuses(answers(_echo, [STREAMS["a body that asks for another protocol"]])) == [400]
    assert _statuses(answers(_echo, [STREAMS["chunks that ask for another protocol"]])) == [400]
    assert _statuses(answers(_echo, [STREAMS["no body that asks for another protocol"]])) == [200, 200]


EXPECTED = {
    "an early error": [401], "an early error in chunks": [401], "an early error without a body": [401, 200],
    "two hosts": [400], "two keys": [400], "another host": [421], "a page of another host": [403], "plain text": [415],
    "chunks in HTTP/1.0": [400], "another coding": [400], "nonsense after a request": [200, 400], "HTTP/1.0": [200],
    "lines before a request": [200, 200], "two requests": [200, 200, 200],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_what_cannot_be_trusted_ends_the_connection(name: str) -> None:
    assert _statuses(answers(_direct, [STREAMS[name]])) == EXPECTED[name]


@pytest.mark.parametrize("app", [_echo, _direct], ids=["asgi", "direct"])
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_lost_connection_is_freed_without_a_collection(stream: bytes, app: Any) -> None:
    async def story() -> weakref.ref[Wire]:
        protocol, wire = _protocol(app), Wire()
        protocol.connection_made(wire)  # type: ignore[arg-type]
        protocol.data_received(stream)
        for _ in range(30):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        return weakref.ref(wire)  # which the protocol holds

    gc.disable()
    try:
        assert asyncio.run(story())() is None
    finally:
        gc.enable()


class _Kept:
    """What an application puts into a request's scope."""


@pytest.mark.parametrize("is_cut", [False, True], ids=["one read", "two reads"])
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_an_idle_connection_holds_nothing_of_its_last_request(stream: bytes, is_cut: bool) -> None:
    kept: list[weakref.ref[_Kept]] = []

    async def app(scope: Any, receive: Any, send: Any, writer: Any) -> None:
        scope["kept"] = one = _Kept()
        kept.append(weakref.ref(one))
        writer.start(200, [(b"content-length", b"0")])
        writer.write(b"")

    app.takes_writer = True  # type: ignore[attr-defined]

    async def story() -> None:
        protocol, wire = _protocol(app), Wire()
        protocol.connection_made(wire)  # type: ignore[arg-type]
        for part in (stream[:9], stream[9:]) if is_cut else (stream,):
            protocol.data_received(part)
        for _ in range(30):
            await asyncio.sleep(0)
        assert [one() for one in kept] == [None] * len(kept)

    gc.disable()
    try:
        asyncio.run(story())
    finally:
        gc.enable()


def _post(length: bytes, body: bytes = b"", path: bytes = b"/a", more: bytes = b"") -> bytes:
    return b"POST " + path + HOST + more + b"Content-Length:" + length + b"\r\nX: y\r\n\r\n" + body


SERVED = [
    *(_post(b" %d" % num, b"z" * num) for num in (1, 9, 10, 12, 300)),
    _post(b"12", b"b" * 12),
    _post(b"\t 12 ", b"t" * 12),
    _post(b" 003", b"abc"),
    _post(b" 0"),
    _post(b" 3", b"abc", b"/b"),
    _post(b" 3", b"abc", more=b"Z: Content-Length: 7\r\n"),
    _post(b" 3", b"abc", more=b"Expect: 100-continue\r\n"),
    _post(b" 6", b"\r\n\r\nab"),
    CHUNKS + b"2\r\nab\r\n0\r\n\r\n",
    NEXT,
]
NOT_KEPT = [
    b"",
    _post(b" +3", b"abc"),
    _post(b" 3_0", b"abc"),
    _post(b" 3", b"abc", more=b"Host: localhost\r\n"),
    _post(b" 3", b"abc", more=b"Content-Length: 3\r\n"),
    _post(b" 3", b"abc", more=b"Connection: close\r\n"),
    _post(b" 3", b"abc", more=CHUNKED),
    _post(b" 99999999999999999999999", b"abc"),
    b"POST /a HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 3\r\nX: y\r\n\r\nabc",
]


@pytest.mark.parametrize("app", [_echo, _direct], ids=["asgi", "direct"])
@given(
    st.lists(st.sampled_from(SERVED), min_size=2, max_size=10),
    st.sampled_from(NOT_KEPT),
    st.lists(st.floats(0.0, 1.0), max_size=4),
)
@settings(max_examples=40, deadline=None, database=None)
def test_a_request_has_the_answer_of_a_connection_of_its_own(
    app: Any, served: list[bytes], last: bytes, cuts: list[float]
) -> None:
    """Also if its head repeats that of an earlier request."""
    stream = b"".join(served) + last
    places = [0, *sorted(int(cut * len(stream)) for cut in cuts), len(stream)]
    segments = [stream[start:end] for start, end in pairwise(places)]
    alone = b"".join(answers(app, [each]) for each in (*served, last) if each)
    assert _without_interim(answers(app, segments)) == _without_interim(alone)


def test_the_headers_of_a_repeated_head_have_the_length_of_their_own_body() -> None:
    seen = []

    async def noted(scope: Any, receive: Any, send: Any, writer: Any = None) -> None:
        seen.append((dict(scope["headers"]), scope.get(TEXT_HEADERS), scope["path"]))
        await _direct(scope, receive, send, writer)

    noted.takes_writer = True  # type: ignore[attr-defined]
    answers(noted, [_post(b" %d" % num, b"z" * num) for num in (3, 20, 100)])
    for (headers, text, path), length in zip(seen, (b"3", b"20", b"100"), strict=True):
        assert path == "/a" and headers == {b"host": b"localhost", b"content-length": length, b"x": b"y"}
        repeats = length != b"3"
        assert text == ({name.decode(): value.decode() for name, value in headers.items()} if repeats else None)
