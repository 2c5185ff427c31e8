"""The gateway's HTTP beside uvicorn's two: whole requests of the same bytes, as an application gets them.

All three get a stream and call the same application. Either they pass it the same requests, or one of them refuses, and
where the gateway is the one that does not, the reason is listed.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("httptools")

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from attacking import SCALE
from headway.gateway.server.http_protocol import HttpProtocol
from http_streams import random_stream
from odd_requests import REFUSED, UNUSUAL, VERSION, chat
from wire import Wire

NUM_CASES = 200 * SCALE
TURNS = 8
"""Of the event loop, in which an application answers, and the next request begins."""
STRICTER = {
    "bad Content-Length": "a length of more than 20 digits, most of them zeros",
    "Missing mandatory Host: header": "no Host: engines answer such requests",
    "no request line received": "several blank lines before a request",
    "illegal request line": "several spaces in the request line",
}
"""What h11 refuses and the gateway serves: the start of h11's reason, and what the request has."""
Request = tuple[str, bytes, bytes, str, list[tuple[bytes, bytes]], bytes]
"""Method, path, query, version, headers and body."""


class _ByH11(H11Protocol):
    reason = ""
    """Why it has refused a request."""

    def send_400_response(self, msg: str) -> None:
        self.reason = str(sys.exception())
        super().send_400_response(msg)


class _Served:
    """What a server makes of a stream: the requests that its application got whole, and the bytes of the answers."""

    def __init__(self, kind: type[Any]) -> None:
        self.requests: list[Request] = []
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            log_level="critical",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            ws="none",
        )
        config.load()
        self._state, self._wire = ServerState(), Wire()
        self._protocol = kind(config, self._state, {}, asyncio.get_running_loop())

    async def run(self, segments: Iterable[bytes]) -> None:
        self._protocol.connection_made(self._wire)
        for segment in segments:
            if not self._wire.is_closed:
                self._protocol.data_received(segment)
                for _ in range(TURNS if self._state.tasks else 1):
                    await asyncio.sleep(0)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self._protocol.connection_lost(None)
        while self._state.tasks:
            await asyncio.sleep(0)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            if message["type"] != "http.request":
                return
            body, is_whole = body + message["body"], not message["more_body"]
        line = scope["method"], scope["raw_path"], scope["query_string"], scope["http_version"]
        self.requests.append((*line, list(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    @property
    def has_refused(self) -> bool:
        """The last answer is that of the server, which has closed the connection."""
        last = re.findall(rb"HTTP/1\.1 (\d{3}) ", self._wire.written)[-1:]
        return last >= [b"400"] and (self._wire.is_closed or self._wire.has_ended)

    @property
    def reason(self) -> str:
        return str(getattr(self._protocol, "reason", ""))


async def _served(kind: type[Any], segments: Iterable[bytes]) -> _Served:
    made = _Served(kind)
    await made.run(segments)
    return made


def _without_trailers(request: Request, other: Request) -> Request:
    """The request without headers after those of the other one: uvicorn has trailers there."""
    return (*request[:4], [(name, value.rstrip(b" \t")) for name, value in request[4][: len(other[4])]], request[5])


def _of_path(request: Request) -> Request:
    """The request with the path of its target: h11 leaves a host before it and a fragment after it."""
    method, path, query, *rest = request
    path = re.sub(rb"^http://[^/]*", b"", path)
    return (method, path, query.partition(b"#")[0], *rest)  # type: ignore[return-value]


async def _compare(data: bytes, kinds: Counter[str]) -> None:
    ours, by_httptools, by_h11 = [await _served(kind, [data]) for kind in (HttpProtocol, HttpToolsProtocol, _ByH11)]
    if len(ours.requests) > len(by_httptools.requests):
        # It refuses a request before it has answered those before: here they come one byte at a time.
        by_httptools = await _served(HttpToolsProtocol, [bytes((byte,)) for byte in data])
    num = min(len(ours.requests), len(by_httptools.requests))
    theirs = [_without_trailers(*each) for each in zip(by_httptools.requests[:num], ours.requests, strict=False)]
    assert ours.requests == theirs, data
    num = min(len(ours.requests), len(by_h11.requests))
    assert ours.requests[:num] == [_of_path(each) for each in by_h11.requests[:num]], data
    if len(ours.requests) > num:
        assert by_h11.reason.startswith(tuple(STRICTER)), (by_h11.reason, data)
        kinds["only h11 refuses"] += 1
    elif len(ours.requests) < max(len(by_h11.requests), len(by_httptools.requests)):
        assert ours.has_refused, data
        kinds["only the gateway refuses"] += 1
    else:
        kinds["alike"] += 1


def _run(streams: Iterable[bytes]) -> Counter[str]:
    kinds: Counter[str] = Counter()

    async def story() -> None:
        for data in streams:
            await _compare(data, kinds)

    asyncio.run(story())
    print(dict(kinds))  # noqa: T201  # shown by pytest -s, and if the test fails
    return kinds


def test_random_streams_are_the_same_requests_or_refused() -> None:
    chosen = random.Random(37)
    kinds = _run(random_stream(chosen) for _ in range(NUM_CASES))
    assert kinds["alike"] > NUM_CASES / 2 and len(kinds) == 3


RARE = {
    "spaces around values": chat(b"Content-Length: 0", b"X-A: \t a \t ", b"X-B:b", b"X-C:", b"X-D: \t ", body=b""),
    "names in capitals": chat(b"CONTENT-LENGTH: 1", b"X-UP: Up", body=b"a"),
    "a header twice": chat(b"Content-Length: 0", b"X-A: a", b"X-A: b", body=b""),
    "bytes above 127": chat(b"Content-Length: 0", b"X-A: \xe9\xff", body=b""),
}


@pytest.mark.parametrize(
    "corpus", [REFUSED, {name: data for name, (data, _) in UNUSUAL.items()}, RARE], ids=["refused", "unusual", "rare"]
)
def test_odd_requests_are_the_same_or_refused(corpus: dict[str, bytes]) -> None:
    _run(data + VERSION for data in corpus.values())
