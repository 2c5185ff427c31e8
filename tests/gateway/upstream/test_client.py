"""The HTTP client: kept connections, bodies in every framing, and every way in which a connection fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import httptools

from headway.core.errors import HeadwayError
from headway.gateway.upstream import client as client_module
from headway.gateway.upstream.client import Client, Connection
from headway.gateway.upstream.errors import BrokenOffError, EngineError, UnreachableError
from in_memory import InMemoryTransport
from scripted import Exchange

URL = "http://engine:8000/v1"


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(10):
            return await story

    return asyncio.run(limited())


def client_of(serve: Callable[[Exchange], Any]) -> tuple[Client, InMemoryTransport]:
    async def serve_soon(exchange: Exchange) -> None:
        result = serve(exchange)
        if result is not None:
            await result

    transport = InMemoryTransport(serve_soon)
    return Client(URL, transport=transport), transport


def raw(*pieces: bytes, close: bool = False) -> Callable[[Exchange], Any]:
    """Answers each request with these pieces, each read by itself."""

    async def serve(exchange: Exchange) -> None:
        for piece in pieces:
            exchange.send(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if close:
            exchange.close()

    return serve


def test_a_request_has_the_path_the_headers_and_the_body() -> None:
    seen: list[Exchange] = []

    async def story() -> None:
        client, _ = client_of(lambda exchange: (seen.append(exchange), exchange.answer(b"[]"))[1])
        assert await client.fetch("/v1/models?all=1", 5.0, b"{}") == (200, b"[]")

    run(story())
    (exchange,) = seen
    assert (exchange.path, exchange.body) == ("/v1/models?all=1", b"{}")
    assert exchange.headers == {"host": "engine:8000", "content-length": "2", "content-type": "application/json"}


def test_a_connection_is_kept_for_the_next_request_once_its_response_is_complete() -> None:
    async def story() -> None:
        client, transport = client_of(lambda exchange: exchange.answer(b"{}"))
        for _ in range(3):
            await client.fetch("/health", 5.0)
        assert transport.num_connections == 1
        connection = await client.request("GET", "/health")
        client.release(connection)  # the response has not been read
        await client.fetch("/health", 5.0)
        assert transport.num_connections == 2

    run(story())


def test_a_burst_of_requests_leaves_a_bounded_number_of_idle_connections() -> None:
    num, most = 300, client_module._MAX_IDLE_CONNECTIONS

    async def story() -> None:
        client, transport = client_of(lambda exchange: exchange.answer(b"{}"))
        connections = [await client.request("GET", "/health") for _ in range(num)]
        for connection in connections:
            await connection.read(100)
            client.release(connection)
        await asyncio.sleep(0)
        assert sum(connection.is_lost for connection in connections) == num - most
        for connection in [await client.request("GET", "/health") for _ in range(most)]:
            await connection.read(100)
            client.release(connection)
        assert transport.num_connections == num

    run(story())


def test_a_request_on_an_idle_connection_that_the_server_closes_is_sent_again() -> None:
    async def story() -> None:
        requests = 0

        def serve(exchange: Exchange) -> None:
            nonlocal requests
            requests += 1
            if requests == 2:
                exchange.close()
            else:
                exchange.answer(b"{}")

        client, transport = client_of(serve)
        await client.fetch("/health", 5.0)
        assert await client.fetch("/health", 5.0) == (200, b"{}")
        assert (requests, transport.num_connections) == (3, 2)

    run(story())


async def _after_one_answer(
    serve: Callable[[Exchange], Any], **options: Any
) -> tuple[Client, InMemoryTransport, Coroutine[Any, Any, Connection]]:
    """A client with a kept connection, and a request that `serve` handles."""
    requests = 0

    def serve_later(exchange: Exchange) -> Any:
        nonlocal requests
        requests += 1
        return exchange.answer(b"{}") if requests == 1 else serve(exchange)

    client, transport = client_of(serve_later)
    await client.fetch("/health", 5.0)
    return client, transport, client.request("POST", "/", body=b"{}", **options)


def test_a_request_is_sent_again_once_and_on_a_new_connection() -> None:
    async def story() -> None:
        seen: list[Exchange] = []
        _, transport, request = await _after_one_answer(lambda exchange: (seen.append(exchange), exchange.close()))
        with pytest.raises(BrokenOffError):
            await request
        assert (len(seen), transport.num_connections) == (2, 2)

    run(story())


@pytest.mark.parametrize("how", ["later", "aborted", "after a byte", "not allowed"])
def test_a_request_that_the_server_may_process_is_not_sent_again(how: str) -> None:
    """The failures of a kept connection that was not closed before the request came."""

    async def story() -> None:
        seen: list[Exchange] = []
        used: list[Connection] = []

        async def serve(exchange: Exchange) -> None:
            seen.append(exchange)
            if how == "aborted":
                used[-1].abort("does not answer any more")
            elif how == "later":
                await asyncio.sleep(0.06)
            elif how == "after a byte":
                exchange.send(b"H")
                await asyncio.sleep(0)
            exchange.close()

        *_, request = await _after_one_answer(serve, on_connection=used.append, may_resend=lambda: how != "not allowed")
        with pytest.raises(EngineError):
            await request
        assert len(seen) == 1

    run(story())


def test_a_refused_reconnection_is_a_failure_of_the_request_that_was_sent() -> None:
    """It is no failure to connect, which would not count as an attempt."""

    class Once(InMemoryTransport):
        async def connect(self) -> Connection:
            if self.num_connections:
                raise ConnectionRefusedError("refused")
            return await super().connect()

    async def story() -> None:
        async def serve(exchange: Exchange) -> None:
            exchange.answer(b"{}") if exchange.path == "/health" else exchange.close()

        client = Client(URL, transport=Once(serve))
        await client.fetch("/health", 5.0)
        with pytest.raises(BrokenOffError, match="broke off the connection, and cannot be reached") as caught:
            await client.request("POST", "/", body=b"{}")
        assert not caught.value.is_untouched

    run(story())


def test_a_new_connection_that_the_server_closes_is_an_error() -> None:
    client, transport = client_of(lambda exchange: exchange.close())
    with pytest.raises(BrokenOffError, match="broke off the connection"):
        run(client.fetch("/health", 5.0))
    assert transport.num_connections == 1


@pytest.mark.parametrize(
    ("pieces", "close"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", b"so", b"on"], False),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nso\r\n", b"2\r\non\r\n0\r\n\r\n"], False),
        ([b"HTTP/1.1 200 OK\r\n\r\nso", b"on"], True),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsoon"], False),
    ],
    ids=["length", "chunked", "until close", "after an interim response"],
)
def test_bodies_of_every_framing(pieces: list[bytes], close: bool) -> None:
    client, _ = client_of(raw(*pieces, close=close))
    assert run(client.fetch("/", 5.0)) == (200, b"soon")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"hello\r\n\r\n"], "spoke no HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nso"], "broke off the connection"),
        ([b"HTTP/1.1 200 OK\r\n"] + 70 * [b"A: " + 4096 * b"x" + b"\r\n"], "headers without end|spoke no HTTP"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"], "another protocol"),
    ],
    ids=["no HTTP", "cut off", "endless headers", "upgrade"],
)
def test_invalid_responses(pieces: list[bytes], message: str) -> None:
    client, _ = client_of(raw(*pieces, close=True))
    with pytest.raises(EngineError, match=message):
        run(client.fetch("/", 5.0))


def test_bytes_after_the_response_close_the_connection_but_do_not_spoil_the_response() -> None:
    async def story() -> None:
        response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nso"
        client, transport = client_of(raw(response, response))
        for _ in range(2):
            assert await client.fetch("/", 5.0) == (200, b"so")
            for _ in range(4):
                await asyncio.sleep(0)
        assert transport.num_connections == 2

    run(story())


def test_a_body_beyond_the_limit_is_an_error() -> None:
    async def story() -> None:
        client, _ = client_of(lambda exchange: exchange.answer(b"x" * 100))
        connection = await client.request("GET", "/")
        with pytest.raises(EngineError, match="more than 99 bytes"):
            await connection.read(99)

    run(story())


def test_no_answer_in_time_is_an_error_and_closes_the_connection() -> None:
    async def story() -> None:
        closed = asyncio.Event()

        async def serve(exchange: Exchange) -> None:
            await exchange.left()
            closed.set()

        client, _ = client_of(serve)
        with pytest.raises(EngineError, match=r"no answer to /health within 0.01 s"):
            await client.fetch("/health", 0.01)
        await closed.wait()

    run(story())


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), OSError("no route")])
def test_a_server_that_accepts_no_connection_is_unreachable(error: OSError) -> None:
    class Refusing:
        async def connect(self) -> Connection:
            raise error

    with pytest.raises(UnreachableError, match="cannot be reached") as caught:
        run(Client(URL, transport=Refusing()).fetch("/", 5.0))
    assert caught.value.is_untouched


def test_a_connection_that_takes_too_long_is_unreachable() -> None:
    class Slow:
        async def connect(self) -> Connection:
            await asyncio.sleep(60)
            raise AssertionError

    with pytest.raises(UnreachableError, match=r"within 0.01 s"):
        run(Client(URL, connect_s=0.01, transport=Slow()).fetch("/", 5.0))


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "http://", "http://engine?x=1", "http://me@engine"])
def test_urls_that_are_no_addresses(url: str) -> None:
    with pytest.raises(HeadwayError, match="is no address of an engine"):
        Client(url)


def test_a_stream_goes_to_a_callback_until_the_callback_stops_it() -> None:
    async def story() -> None:
        pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *4 * [b"1\r\nx\r\n"], b"0\r\n\r\n"]
        client, _ = client_of(raw(*pieces))
        connection = await client.request("GET", "/")
        seen: list[bytes] = []

        def stop_after_two(parts: list[bytes]) -> bool:
            seen.extend(parts)
            return len(seen) < 2

        assert await connection.stream_to(stop_after_two) is True
        assert seen == [b"x", b"x"]
        assert await connection.stream_to(lambda parts: seen.extend(parts) is None) is False
        assert b"".join(seen) == b"xxxx" and connection.is_reusable

    run(story())


def test_an_error_of_the_callback_reaches_the_caller() -> None:
    def fails(parts: list[bytes]) -> bool:
        raise ValueError("no")

    async def story() -> None:
        client, _ = client_of(lambda exchange: exchange.answer(b"so"))
        connection = await client.request("GET", "/")
        with pytest.raises(ValueError, match="no"):
            await connection.stream_to(fails)

    run(story())


def test_an_aborted_request_fails_with_the_reason() -> None:
    async def story() -> None:
        connections: list[Connection] = []
        client, _ = client_of(lambda exchange: connections[0].abort("the client has left"))
        with pytest.raises(EngineError, match="the client has left"):
            await client.request("GET", "/", on_connection=connections.append)

    run(story())


def test_reading_pauses_while_nobody_takes_the_body() -> None:
    """The server's bytes are delivered again once the body so far has been read."""

    async def story() -> None:
        body = b"x" * (1 << 16)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (16 * len(body))
        client, _ = client_of(raw(head, *16 * [body]))
        connection = await client.request("GET", "/")
        for _ in range(80):
            await asyncio.sleep(0)
        first = await connection.read_part()
        assert 1 << 18 < len(first) < 16 * len(body)
        assert len(first) + len(await connection.read(1 << 30)) == 16 * len(body)

    run(story())


def test_few_idle_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_IDLE_CONNECTIONS", 2)

    async def story() -> None:
        client, transport = client_of(lambda exchange: exchange.answer(b"{}"))
        connections = [await client.request("GET", "/") for _ in range(4)]
        for each in connections:
            await each.read(10)
            client.release(each)
        await asyncio.sleep(0.01)
        assert [each.is_lost for each in connections] == [False, False, True, True]
        for _ in range(2):
            await client.request("GET", "/")
        assert transport.num_connections == 4

    run(story())


@pytest.mark.parametrize("has_closed", [False, True])
def test_an_abort_after_the_server_has_closed_the_connection_is_a_break(has_closed: bool) -> None:
    """Whoever asks for the abort has learnt of the server's end before the event loop has read it here."""

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = Client(f"http://127.0.0.1:{server.getsockname()[1]}")
            connection = await client.connect()
            connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
            accepted, _ = server.accept()
            waiting = asyncio.ensure_future(connection.wait())
            with accepted:
                if has_closed:
                    accepted.close()
                connection.abort("the replica does not answer any more")
            await waiting
            with pytest.raises(EngineError, match="does not answer any more") as failure:
                connection.wait()
            assert isinstance(failure.value, BrokenOffError) == has_closed

    run(story())


_HEAD = b"HTTP/1.1 %d OK\r\nServer: s\r\nContent-Length:%b\r\nX: y\r\n\r\n%b"
_RESPONSES = [
    *(_HEAD % (200, b" %d" % num, b"z" * num) for num in (1, 9, 10, 12, 300)),
    _HEAD % (500, b" 12", b"e" * 12),
    _HEAD % (200, b"12", b"b" * 12),
    _HEAD % (200, b" 012", b"l" * 12),
    _HEAD % (200, b" 0", b""),
    b"HTTP/1.1 204 No\r\nX: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + _HEAD % (200, b" 3", b"abc"),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
]
_BROKEN = [
    _HEAD % (200, b" 3", b"abcd"),
    _HEAD % (200, b" 3", b"abcHTTP/1.1 200 OK\r\n\r\n"),
    _HEAD % (200, b" +3", b"abc"),
    _HEAD % (200, b" 5", b"abc"),
    b"HTTP/1.1 200 OK\r\nServer: s\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
]


@given(st.lists(st.tuples(st.sampled_from(_RESPONSES), st.floats(0.0, 1.0)), max_size=8), st.sampled_from(_BROKEN))
@settings(max_examples=100, deadline=None, database=None)
def test_a_response_is_read_as_on_a_connection_of_its_own(responses: list[tuple[bytes, float]], last: bytes) -> None:
    """Also if its head repeats that of an earlier response, and however it is divided into two reads."""

    async def read(client: Client) -> Any:
        try:
            connection = await client.request("GET", "/v1/models")
            data = await connection.read(1000)
        except EngineError as error:
            return type(error)
        client.release(connection)
        return connection.status, connection.headers, data, connection.is_longer

    def divided(response: bytes, share: float) -> list[bytes]:
        at = int(share * len(response))
        return [piece for piece in (response[:at], response[at:]) if piece]

    async def story() -> None:
        sent = [raw(*divided(*each)) for each in responses] + [raw(last, close=True)]
        following = iter(sent)
        shared, transport = client_of(lambda exchange: next(following)(exchange))
        for serve in sent:
            alone, _ = client_of(serve)
            assert await read(shared) == await read(alone)
        assert transport.num_connections == 1

    run(story())


def _framed(content: bytes, size: bytes = b"%x", end: bytes = b"\r\n") -> bytes:
    return size % len(content) + b"\r\n" + content + end


_FRAMES = st.one_of(
    st.builds(_framed, st.binary(min_size=1, max_size=40), st.sampled_from((b"%x", b"%X", b"00%x", b"%x;a=b", b"%x "))),
    st.sampled_from(
        (
            b"\r\n",
            b"g\r\n",
            b"5",
            _framed(b"a", end=b"\n"),
            _framed(b"a", end=b"xx"),
            b"0\r\n\r\n",
            b"0\r\nT: u\r\n\r\n",
        )
    ),
)


class Aborted(asyncio.Transport):
    """A transport of which only the abort is used."""

    def abort(self) -> None:
        pass


def _reference(data: bytes) -> tuple[bytes, bool, bool]:
    """(body, whether it is complete, whether it is valid so far) by the parser alone."""
    body, is_complete, is_valid = bytearray(), False, True

    class Reader:
        def on_body(self, part: bytes) -> None:
            nonlocal body
            body += b"" if is_complete else part

        def on_message_complete(self) -> None:
            nonlocal is_complete
            is_complete = True

    try:
        httptools.HttpResponseParser(Reader()).feed_data(data)
    except httptools.HttpParserError:
        is_valid = is_complete
    return bytes(body), is_complete, is_valid


async def _read(reads: list[bytes]) -> tuple[bytes, bool, bool]:
    """The same by a connection."""
    connection, parts = Connection(), b""
    connection.connection_made(Aborted())
    for data in reads:
        if data and connection._error is None:
            connection.data_received(data)
            parts += connection.take_parts()
    return parts, connection.is_complete, connection._error is None


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(st.lists(_FRAMES, max_size=8), st.booleans(), st.lists(st.floats(0.0, 1.0), max_size=6))
@settings(max_examples=300, deadline=None, database=None)
def test_chunks_are_read_as_by_the_parser_alone(frames: list[bytes], ends: bool, cuts: list[float]) -> None:
    """However they are divided into reads."""
    data = _CHUNKED + b"".join(frames) + (b"0\r\n\r\n" if ends else b"")
    places = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    assert run(_read([data[start:end] for start, end in pairwise(places)])) == _reference(data)


def test_chunks_are_read_alike_in_any_three_reads() -> None:
    data = _CHUNKED + b"".join(map(_framed, (b"abc", b"d", b"ef\r\nghijklmnopqrst"))) + b"0\r\n\r\n"

    async def story() -> None:
        expected, start = _reference(data), len(_CHUNKED)
        for first in range(start - 2, len(data)):
            for second in range(first, len(data)):
                assert await _read([data[:first], data[first:second], data[second:]]) == expected
        assert await _read([data[i : i + 1] for i in range(len(data))]) == expected

    run(story())
