"""What a connection keeps is bounded, whatever its client sends and does not read; who half-closes it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("httptools")

import uvicorn
from uvicorn.server import ServerState

import serving
from headway.gateway.errors import ApiError
from headway.gateway.relay.writer import write_error
from headway.gateway.server import http_protocol
from headway.gateway.server.http_protocol import HttpProtocol
from wire import Timers, UnreadWire, Wire

KIB = 1 << 10
REFUSED = b"POST /refused HTTP/1.1\r\nHost: h\r\n\r\n"
HELD = b"POST /held HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
ANSWERED = b"HTTP/1.1 200 OK\r\n"
HIGH_WATER = 64 * KIB


class Application:
    """Refuses as the gateway does, holds requests until `release`, and streams to /stream."""

    takes_writer = True

    def __init__(self) -> None:
        self.num_begun = self.num_left = 0
        self.connections: list[HttpProtocol] = []
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any, writer: Any) -> None:
        if scope["type"] != "http":
            return
        self.num_begun += 1
        if scope["path"] == "/refused":
            await write_error(writer, ApiError(401, "no", "invalid_api_key"))
            return
        body = writer.take_body()
        assert body is not None
        gone = asyncio.Event()
        writer.watch(gone.set)
        if scope["path"] == "/stream":
            writer.start(200, [])
            writer.write(b"begun", more=True)
        waiting = [asyncio.ensure_future(event.wait()) for event in (gone, self.release)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        self.num_left += gone.is_set()
        if scope["path"] != "/stream":
            writer.start(200, [(b"content-length", b"%d" % len(body))])
        writer.write(body)
        await writer.drain()


Story = Callable[[Application, HttpProtocol, UnreadWire, Timers], Coroutine[Any, Any, None]]


def run(story: Story) -> None:
    async def connected() -> None:
        app, timers = Application(), Timers(asyncio.get_running_loop())
        protocol = _protocol(app, timers)
        wire = UnreadWire(protocol)
        protocol.connection_made(wire)  # type: ignore[arg-type]
        await story(app, protocol, wire, timers)
        protocol.connection_lost(None)
        await _settle()

    asyncio.run(connected())


def _protocol(app: Application, loop: Any = None) -> HttpProtocol:
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", proxy_headers=False)
    config.load()
    app.connections.append(HttpProtocol(config, ServerState(), {}, loop))
    return app.connections[-1]


async def _settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def _send(protocol: HttpProtocol, wire: Wire, data: bytes, num: int) -> int:
    """Send a segment up to `num` times, while the connection is read; how often it was."""
    for sent in range(num):
        if wire.is_paused:
            return sent
        protocol.data_received(data)
        await _settle()
    return num


def test_refusals_that_are_not_read_stop_the_next_request() -> None:
    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        segment = REFUSED * 200
        sent = await _send(protocol, wire, segment, 100)
        await _settle(5000)
        assert sent < 100 and wire.get_write_buffer_size() < HIGH_WATER + KIB
        begun = app.num_begun
        await _settle(100)
        assert app.num_begun == begun < 200 * sent
        while app.num_begun < 200 * sent:
            assert wire.get_write_buffer_size() < HIGH_WATER + KIB
            wire.read(HIGH_WATER)
            await _settle(100)
        assert wire.written.count(b"HTTP/1.1 401") == 200 * sent

    run(story)


@pytest.mark.parametrize("size", [1 * KIB, 256 * KIB])
def test_requests_sent_ahead_are_bounded_also_while_others_are_answered(size: int) -> None:
    """Each answer frees its own request, and no room for more than one read besides."""

    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        segment = HELD * (size // len(HELD))
        sent, done = await _send(protocol, wire, segment, 1000) * len(segment), 0
        for _ in range(50):
            assert sent - done <= 64 * KIB + len(segment) + len(HELD)
            app.release.set()
            await _settle(4)
            app.release = asyncio.Event()
            done = wire.written.count(ANSWERED) * len(HELD)
            sent += await _send(protocol, wire, segment, 1000) * len(segment)

    run(story)


def test_requests_sent_ahead_are_answered_in_turn_once_the_client_reads() -> None:
    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        app.release.set()
        targets = [b"%d" % number for number in range(2000)]
        data = b"\r\n".join(HELD.replace(b"abc", target.zfill(3)[:3]) for target in targets)
        for start in range(0, len(data), 50 * KIB):
            while wire.is_paused:
                wire.read(HIGH_WATER)
                await _settle()
            protocol.data_received(data[start : start + 50 * KIB])
        while app.num_begun < len(targets):
            wire.read(HIGH_WATER)
            await _settle(1000)
        answers = wire.written.split(ANSWERED)[1:]
        assert [answer[-3:] for answer in answers] == [target.zfill(3)[:3] for target in targets]

    run(story)


class _Counted(bytes):
    """Counts the bytes that are copied of it."""

    num_copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            _Counted.num_copied += len(found)
            return _Counted(found)
        return found

    def lstrip(self, *args: Any) -> bytes:
        found = super().lstrip(*args)
        _Counted.num_copied += len(found)
        return _Counted(found)


@pytest.mark.parametrize("before", [b"", b"\r\n"])
def test_the_bytes_of_requests_are_copied_a_few_times_however_many_follow(before: bytes) -> None:
    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        app.release.set()
        num = 64 * KIB // len(before + HELD)
        data = _Counted(num * (before + HELD))
        _Counted.num_copied = 0
        protocol.data_received(data)
        while app.num_begun < num:
            wire.read(HIGH_WATER)
            await _settle(1000)
        assert _Counted.num_copied < 4 * len(data)

    run(story)


@pytest.mark.parametrize("is_closed", [False, True], ids=["a connection that goes on", "one that is to be closed"])
def test_a_client_that_reads_nothing_is_let_go_and_a_slow_one_is_not(is_closed: bool) -> None:
    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        await _send(protocol, wire, REFUSED * 1000, 1)
        await _settle(5000)
        if is_closed:
            protocol.shutdown()
            assert wire.is_closed
        for _ in range(2):
            wire.read(20 * KIB)
            timers.advance(61.0)
            assert not wire.is_aborted
        timers.advance(61.0)
        assert wire.is_aborted

    run(story)


@pytest.mark.parametrize("size", [0, 9], ids=["that comes", "that has begun"])
def test_a_server_that_ends_waits_for_a_request(size: int) -> None:
    """Another process listens at the address, and would answer the same request on another connection."""

    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        app.release.set()
        await _send(protocol, wire, HELD[:size], 1)
        protocol.shutdown()
        timers.advance(1.0)
        assert not wire.is_closed and not wire.written
        await _send(protocol, wire, HELD[size:], 1)
        await _settle()
        assert wire.written.startswith(ANSWERED) and b"connection: close" in wire.written.lower()
        assert wire.written.endswith(b"abc") and wire.is_closed

    run(story)


@pytest.mark.parametrize("part", [b"", HELD[:9]])
def test_a_server_that_ends_does_not_wait_long_for_a_request(part: bytes) -> None:
    async def story(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        protocol.shutdown()
        timers.advance(1.5)
        await _send(protocol, wire, part, 1)
        assert not (wire.is_closed or wire.has_ended)
        timers.advance(2.0)
        assert (wire.has_ended and b" 408 " in wire.written) if part else (wire.is_closed and not wire.written)

    run(story)


# Half-closed connections, over real ones: whether a client is gone is the system's to say.


def over_sockets(story: Callable[[Application, asyncio.StreamReader, asyncio.StreamWriter], Any]) -> None:
    async def connected() -> None:
        app = Application()
        server = await asyncio.get_running_loop().create_server(lambda: _protocol(app), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        async with asyncio.timeout(60):
            await story(app, reader, writer)
        writer.close()
        server.close()

    asyncio.run(connected())


def _without_interim(data: bytes) -> bytes:
    return data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


@pytest.mark.parametrize("num", [1, 3])
def test_a_client_that_has_closed_its_side_gets_its_answers(num: int) -> None:
    async def story(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELD * num)
        writer.write_eof()
        await serving.eventually(lambda: app.num_begun == 1)
        interim = await reader.readuntil(b"\r\n\r\n")
        assert interim.startswith(b"HTTP/1.1 100")
        await asyncio.sleep(0.1)  # longer than until the first look whether the client is there
        app.release.set()
        got = _without_interim(await reader.read())
        assert got.count(ANSWERED) == got.count(b"abc") == num and got.endswith(b"abc") and app.num_left == 0

    over_sockets(story)


def test_a_stream_goes_on_after_its_client_has_closed_its_side() -> None:
    async def story(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELD.replace(b"/held", b"/stream"))
        await reader.readuntil(b"begun")
        writer.write_eof()
        await asyncio.sleep(0.1)
        app.release.set()
        assert (await reader.read()).endswith(b"3\r\nabc\r\n0\r\n\r\n") and app.num_left == 0

    over_sockets(story)


@pytest.mark.parametrize("path", [b"/held", b"/stream"])
def test_a_client_that_is_gone_is_noticed(path: bytes) -> None:
    async def story(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELD.replace(b"/held", path))
        await serving.eventually(lambda: app.num_begun == 1)
        if path == b"/stream":
            await reader.readuntil(b"begun")
        writer.close()
        await serving.eventually(lambda: app.num_left == 1)

    over_sockets(story)


def test_half_a_request_ends_with_its_clients_side() -> None:
    async def story(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELD[:30])
        writer.write_eof()
        assert await reader.read() == b""

    over_sockets(story)


@pytest.mark.parametrize("has_sent", [True, False])
def test_a_server_that_ends_answers_what_it_has_not_read_yet_and_closes_idle_connections(has_sent: bool) -> None:
    async def story(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.release.set()
        writer.write(HELD)
        assert (await reader.readuntil(b"abc")).startswith(ANSWERED)
        if has_sent:
            writer.write(HELD)  # at once, and the event loop reads it later
        app.connections[0].shutdown()
        answer = await reader.read()
        assert answer.startswith(ANSWERED) is has_sent and (b"connection: close" in answer.lower()) is has_sent

    over_sockets(story)


def test_the_rest_of_a_request_that_is_answered_early_is_dropped_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread, up to a number of bytes, and for a time."""
    monkeypatch.setattr(http_protocol, "_LINGER_BYTES", 10 * KIB)
    head = REFUSED.removesuffix(b"\r\n") + b"Content-Length: 1000000\r\n\r\n"

    async def by_bytes(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        protocol.data_received(head + b"x" * 10)
        await _settle()
        assert b"HTTP/1.1 401" in wire.written and not wire.is_closing()
        for _ in range(10):
            protocol.data_received(b"x" * KIB)
        assert not wire.is_closing()
        protocol.data_received(b"x")
        assert wire.is_closing()

    async def by_time(app: Application, protocol: HttpProtocol, wire: UnreadWire, timers: Timers) -> None:
        protocol.data_received(head + b"x" * 10)
        await _settle()
        timers.advance(http_protocol._LINGER_S - 0.1)
        assert not wire.is_closing()
        timers.advance(0.2)
        assert wire.is_closing()

    run(by_bytes)
    run(by_time)
