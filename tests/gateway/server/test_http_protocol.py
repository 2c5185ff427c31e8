"""Answers written directly to connections: one write for each part, pipelining, back-pressure, and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("httptools")

import uvicorn
from uvicorn.server import ServerState

import serving
from gateway_in_process import Inside
from headway.gateway.server.http_cycle import ConnectionMemory, HttpCycle
from headway.gateway.server.http_protocol import HttpProtocol
from scripted import DONE, GOOD_WHOLE, OK, chunk, framed, whole

PADDING = b"x" * 8000


def _chunk(text: str) -> bytes:
    return b"data: " + json.dumps(chunk(text)).encode() + b"\n\n"


def _request(stream: bool = False, content: str = "hello", version: bytes = b"1.1", more: bytes = b"") -> bytes:
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": serving.MODEL, "messages": messages, "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/%b\r\nHost: h\r\nContent-Length: %d\r\n%b\r\n" % (version, len(body), more)
    return head + body


class Front:
    """Connections to the gateway, with a record of each write to them."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside
        self.written: list[bytes] = []

    @asynccontextmanager
    async def connected(self) -> Any:
        """A client's reader and writer."""
        config = uvicorn.Config(
            self.inside.app, log_level="warning", access_log=False, lifespan="off", proxy_headers=False
        )
        config.load()
        front = self

        class Noted:
            def __init__(self) -> None:
                self._served = HttpProtocol(config, ServerState(), {})

            def __getattr__(self, name: str) -> Any:
                return getattr(self._served, name)

            def connection_made(self, transport: Any) -> None:
                plain = transport.write

                def write(data: bytes) -> None:
                    front.written.append(data)
                    plain(data)

                transport.write = write
                self._served.connection_made(transport)

        made: Any = Noted  # has all that a protocol has
        server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2], limit=1 << 12)
        try:
            yield reader, writer
        finally:
            writer.close()
            server.close()

    async def asked(self, data: bytes, until: bytes, num: int = 1) -> bytes:
        """The response to `data`, until `until` has come `num` times."""
        async with self.connected() as (reader, writer):
            writer.write(data)
            got = b""
            while got.count(until) < num and (more := await reader.read(1 << 16)):
                got += more
            return got


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    inside = Inside(tmp_path_factory.mktemp("fleet"), pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0})
    yield Front(inside)
    inside.close()


@pytest.fixture(autouse=True)
def quiet(front: Front) -> Iterator[None]:
    front.inside.engines[0].reply, front.inside.engines[0].then = [whole()], "keep"
    front.written.clear()
    yield
    front.inside.run(front.inside.until(lambda: not front.inside.num_in_flight))
    assert not front.inside.gateway.driver.requests and not front.inside.faults


def test_a_whole_answer_is_one_write(front: Front) -> None:
    got = front.inside.run(front.asked(_request(), GOOD_WHOLE))
    assert front.written == [got]
    assert got.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\ncontent-length: %d\r\n" % len(GOOD_WHOLE) in got
    assert got.count(b"\r\n\r\n") == 1


def test_headers_and_end_of_a_stream_share_a_write_with_its_events(front: Front) -> None:
    words = [_chunk(word) for word in ("so", " it", " goes")]
    front.inside.engines[0].reply = [OK + framed(words[0]), framed(words[1]), framed(words[2]), DONE]
    got = front.inside.run(front.asked(_request(stream=True), b"0\r\n\r\n"))
    first, *_, last = front.written
    assert b"".join(front.written) == got
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and words[0] in first
    assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(front.written) <= 4


def test_pipelined_requests_are_answered_in_order(front: Front) -> None:
    front.inside.engines[0].reply = [OK + framed(_chunk("so")) + DONE]
    asked = _request(stream=True) + _request(version=b"1.1", more=b"X-Request-Id: second\r\n", stream=True)
    got = front.inside.run(front.asked(asked, b"0\r\n\r\n", num=2))
    assert got.count(b"HTTP/1.1 200 OK") == 2 and got.count(b"[DONE]") == 2
    assert b"x-request-id: second" in got[got.rindex(b"HTTP/1.1") :]


def test_connections_are_closed_on_request(front: Front) -> None:
    for version, more in ((b"1.0", b""), (b"1.1", b"Connection: close\r\n")):
        got = front.inside.run(front.asked(_request(version=version, more=more), b"never"))
        assert got.endswith(GOOD_WHOLE) and b"\r\nconnection: close\r\n" in got


def test_expect_100_continue_is_answered(front: Front) -> None:
    got = front.inside.run(front.asked(_request(more=b"Expect: 100-continue\r\n"), GOOD_WHOLE))
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and got.endswith(GOOD_WHOLE)


def test_a_disconnect_after_a_long_request_is_noticed(front: Front) -> None:
    engine = front.inside.engines[0]
    engine.reply, engine.then = [OK + framed(_chunk("so"))], "stall"

    async def leave() -> None:
        async with front.connected() as (reader, writer):
            writer.write(_request(stream=True, content="long " * 20_000))
            await reader.readuntil(b'"so"')
            assert engine.num_open == front.inside.num_in_flight == 1
        await front.inside.until(lambda: not engine.num_open)

    front.inside.run(leave())


def test_an_engine_waits_for_a_client_that_does_not_read(front: Front) -> None:
    num_sent, num = 0, 3000

    def reply() -> Iterator[bytes]:
        nonlocal num_sent
        yield OK
        for num_sent in range(1, num + 1):  # noqa: B007  # looked at while it goes on
            yield framed(_chunk(PADDING.decode()))
        yield DONE

    front.inside.engines[0].reply = reply()  # type: ignore[assignment]

    async def slowly() -> bytes:
        async with front.connected() as (reader, writer):
            writer.write(_request(stream=True))
            before = -1
            while num_sent != before:  # until it has to wait
                before = num_sent
                await asyncio.sleep(0.1)
            assert 0 < num_sent < num
            got = bytearray()
            while not got.endswith(b"0\r\n\r\n"):
                got += await reader.read(1 << 20)
            return bytes(got)

    assert front.inside.run(slowly()).count(PADDING) == num


@pytest.mark.parametrize("value", [b"a\nb", b"a\r\nSet-Cookie: b", b"a\rb", b"a\x00b", b"a\x7f"])
def test_a_header_with_control_characters_is_refused(value: bytes) -> None:
    scope = {"type": "http", "method": "GET", "path": "/"}
    memory = ConnectionMemory(asyncio.Transport())  # not over TLS
    cycle = HttpCycle(None, None, memory, scope, [(b"date", b"today")], False, True)  # type: ignore[arg-type]  # nothing is sent
    with pytest.raises(ValueError, match="line of text"):
        cycle.start(200, [(b"content-type", b"text/plain"), (b"x-headway-model", value)])
    assert not cycle.has_begun
    cycle.start(200, [(b"content-type", "text/plain; a=\xe9\tb".encode("latin-1"))])
    assert cycle.has_begun
