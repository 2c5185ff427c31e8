"""ASGI applications get the requests, and clients the responses, that uvicorn's own protocol would pass on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("httptools")

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from headway.gateway.server.http_protocol import HttpProtocol
from wire import Wire

App = Callable[[Any, Any, Any], Awaitable[None]]


def _start(status: int = 200, **headers: str) -> dict[str, Any]:
    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": names}


def _body(body: bytes = b"", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _sends(*messages: dict[str, Any], error: Exception | None = None) -> App:
    """An application that sends these messages, and fails after them."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    return app


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the messages that come, until all of the request has come."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b"gone"))
        if not message.get("more_body"):
            break
    body = b"|".join([scope["method"].encode(), scope["path"].encode(), scope["query_string"], b"".join(parts)])
    await send(_start(content_length=str(len(body))))
    await send(_body(body))


async def _early(scope: Any, receive: Any, send: Any) -> None:
    """Answer before the body has come."""
    await send(_start(413, content_length="4"))
    await send(_body(b"long"))


async def _late(scope: Any, receive: Any, send: Any) -> None:
    """Wait for what comes after the response."""
    await receive()
    await send(_start(content_length="2"))
    await send(_body(b"ok"))
    assert (await receive())["type"] == "http.disconnect"


WHOLE = _sends(_start(content_length="5"), _body(b"hello"))
PARTS = _sends(_start(content_type="text/plain"), _body(b"he", True), _body(b"", True), _body(b"llo", True), _body())
GET = b"GET /a?b=c HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD = b"HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /%C3%A9 HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nabcde"
CHUNKS = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
WAITS = b"POST /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
CASES: dict[str, tuple[App, list[bytes]]] = {
    "whole": (WHOLE, [GET]),
    "twice": (WHOLE, [GET + GET]),
    "parts": (PARTS, [GET]),
    "empty": (_sends(_start(content_length="0"), _body()), [GET]),
    "names in capitals": (_sends(_start(Content_Length="5", X_Other="a"), _body(b"hello")), [GET]),
    "chunked by itself": (_sends(_start(transfer_encoding="chunked"), _body(b"hello")), [GET]),
    "HEAD": (WHOLE, [HEAD]),
    "HEAD of parts": (PARTS, [HEAD]),
    "no content": (_sends(_start(204), _body()), [GET]),
    "not modified": (_sends(_start(304), _body()), [GET + GET]),
    "asks to close": (_sends(_start(connection="close", content_length="5"), _body(b"hello")), [GET]),
    "is asked to close": (WHOLE, [GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")]),
    "asks to keep what closes": (
        _sends(_start(connection="keep-alive", content_length="5"), _body(b"hello")),
        [GET.replace(b"1.1", b"1.0")],
    ),
    "HTTP/1.0": (WHOLE, [GET.replace(b"1.1", b"1.0")]),
    "a body": (_echo, [POST]),
    "a body in segments": (_echo, [POST[:-3], POST[-3:-1], POST[-1:]]),
    "a body in chunks": (_echo, [CHUNKS]),
    "chunks in segments": (_echo, [CHUNKS[i : i + 7] for i in range(0, len(CHUNKS), 7)]),
    "waits to be asked": (_echo, [WAITS, b"abcde"]),
    "a wait after the response": (_late, [GET + GET]),
    "early": (_early, [POST[:-3]]),
    "fails at once": (_sends(error=ValueError("no")), [GET]),
    "fails in its body": (_sends(_start(), _body(b"he", True), error=ValueError("no")), [GET]),
    "fails at the end": (_sends(_start(content_length="5"), _body(b"hello"), error=ValueError("no")), [GET]),
    "no response": (_sends(), [GET]),
    "no end": (_sends(_start(), _body(b"he", True)), [GET]),
    "a body before the head": (_sends(_body(b"hello")), [GET]),
}


class Responses:
    """The responses in what was written: their statuses, headers and bodies."""

    def __init__(self, data: bytes, methods: list[str]) -> None:
        self.all: list[tuple[int, dict[str, str], bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = b""
        if methods == ["HEAD"]:  # the parser cannot know that no body follows
            head, _, rest = data.partition(b"\r\n\r\n")
            assert not rest
            data = b"\r\n".join(
                line for line in head.split(b"\r\n") if not line.lower().startswith((b"content-l", b"tran"))
            )
            data += b"\r\ncontent-length: 0\r\n\r\n"
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.all.append((self._parser.get_status_code(), self._headers, self._body))
        self._headers, self._body = {}, b""


def _answered(made: Callable[..., Any], app: App, segments: list[bytes]) -> tuple[bytes, bool]:
    """What is written, and whether the connection was closed."""

    async def story() -> tuple[bytes, bool]:
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", proxy_headers=False)
        config.load()
        protocol, wire = made(config, ServerState(), {}), Wire()
        protocol.connection_made(wire)
        for segment in segments:
            if not wire.is_closed:
                protocol.data_received(segment)
            for _ in range(20):
                await asyncio.sleep(0)
        was_closed = wire.is_closed
        protocol.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        return wire.written, was_closed

    return asyncio.run(story())


@pytest.mark.parametrize("name", CASES)
def test_responses_are_uvicorns(name: str) -> None:
    app, segments = CASES[name]
    written, is_closed = _answered(HttpProtocol, app, segments)
    expected, expected_closed = _answered(HttpToolsProtocol, app, segments)
    methods = [segments[0].split(b" ")[0].decode()]
    ours, theirs = Responses(written, methods).all, Responses(expected, methods).all
    if name == "early":  # uvicorn keeps the connection; ours drops the rest of the body, and then closes it
        assert ours[0][1].pop("connection") == "close"
    elif name != "fails at the end":  # uvicorn closes the connection, on which the next request may have begun
        assert is_closed == expected_closed
    if name in ("HTTP/1.0", "asks to keep what closes"):  # uvicorn 0.30 closes the connection and does not say so
        theirs[-1][1]["connection"] = "close"
    assert ours == theirs
    assert ours or name in ("no end", "fails in its body")


@pytest.mark.parametrize("body", [b"hell", b"hello!"], ids=["short", "long"])
def test_a_body_of_another_length_than_announced_is_not_sent(body: bytes) -> None:
    written, _ = _answered(HttpProtocol, _sends(_start(content_length="5"), _body(body)), [GET])
    ((status, _, sent),) = Responses(written, ["GET"]).all
    assert (status, sent) == (500, b"Internal Server Error")


def test_a_stream_of_another_length_than_announced_ends_the_connection() -> None:
    app = _sends(_start(content_length="5"), _body(b"hel", True), _body(b"lo!"))
    written, is_closed = _answered(HttpProtocol, app, [GET])
    assert written.endswith(b"\r\n\r\nhel") and is_closed


def test_a_client_that_leaves_ends_the_wait_for_its_body() -> None:
    came: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append(await receive())
        came.append(await receive())
        await send(_start())  # nobody reads it

    written, _ = _answered(HttpProtocol, app, [POST[:-3]])
    assert [each["type"] for each in came] == ["http.request", "http.disconnect"] and not written
    assert came[0]["body"] == b"ab" and came[0]["more_body"]
