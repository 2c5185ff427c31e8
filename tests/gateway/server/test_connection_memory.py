"""What a connection holds, whatever its client sends, leaves out and does not read: in bytes, without a network."""

from __future__ import annotations

import asyncio
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import uvicorn
from uvicorn.server import ServerState

from certificates import new_certificate
from headway.gateway.errors import ApiError
from headway.gateway.framing import MAX_HEAD_BYTES, RequestFraming
from headway.gateway.relay.writer import write_error
from headway.gateway.server.http_cycle import MAX_HELD_BYTES, MAX_UNREAD_BYTES, READ_BYTES, ConnectionMemory, HttpCycle
from headway.gateway.server.http_protocol import HttpProtocol
from wire import Timers, UnreadWire

KIB = 1 << 10
WRITE_BYTES = 100 * KIB
"""The longest part of an answer that is written at a time."""
HEAD_BYTES = 6 * MAX_HEAD_BYTES
"""Of a request's head: as it came, as headers, and as text of up to four bytes a character."""

HOST, END = b" HTTP/1.1\r\nHost: h\r\n", b"\r\n"


def _post(path: bytes, length: int) -> bytes:
    return b"POST " + path + HOST + b"Content-Length: %d\r\n\r\n" % length + b"x" * length


def _chunked(path: bytes) -> bytes:
    return b"POST " + path + HOST + b"Transfer-Encoding: chunked\r\n\r\n"


CLIENTS: dict[str, tuple[bytes, bytes]] = {
    "refused requests": (b"", _post(b"/refused", 0)),
    "refused requests with bodies": (b"", _post(b"/refused", 300)),
    "held requests": (b"", _post(b"/held", 3)),
    "held requests of 20 KiB": (b"", _post(b"/held", 20 * KIB)),
    "held requests of 200 KiB": (b"", _post(b"/held", 200 * KIB)),
    "read part by part": (b"", _post(b"/parts", 70 * KIB)),
    "long answers": (b"", _post(b"/long", 0)),
    "streams": (b"", _post(b"/stream", 1)),
    "a head without end": (b"POST /held" + HOST + b"X: ", b"y"),
    "a target without end": (b"GET /", b"y"),
    "a wide target": (b"", b"GET /%F0%9F%98%80" + b"a" * (60 * KIB) + HOST + b"\r\n"),
    "short headers": (b"POST /held" + HOST, b"a:b\r\n"),
    "long headers": (b"", b"GET /refused" + HOST + b"".join(b"a%d: %0240d\r\n" % (i, 1) for i in range(250)) + END),
    "a body without end": (b"POST /parts" + HOST + b"Content-Length: 1000000000\r\n\r\n", b"x"),
    "a body that nobody reads": (b"POST /held" + HOST + b"Content-Length: 1000000000\r\n\r\n", b"x"),
    "a body after its refusal": (b"POST /refused" + HOST + b"Content-Length: 1000000000\r\n\r\n", b"x"),
    "chunks of a byte": (_chunked(b"/parts"), b"1\r\nx\r\n"),
    "chunks of two bytes": (_chunked(b"/held"), b"2\r\nxx\r\n"),
    "chunks of 60 bytes": (_chunked(b"/held"), b"3c\r\n" + b"x" * 60 + b"\r\n"),
    "chunks of 20 KiB": (_chunked(b"/parts"), b"5000\r\n" + b"x" * 0x5000 + b"\r\n"),
    "trailers without end": (_chunked(b"/held") + b"0\r\n", b"T: u\r\n"),
    "bodies with chunks": (b"", _chunked(b"/held") + b"2\r\nxx\r\n0\r\n\r\n"),
    "line ends": (b"", b"\r\n"),
    "no HTTP": (b"", b"\x16\x03\x01\x02"),
}


class Application:
    """Refuses, holds requests until `release`, reads bodies part by part, streams, and gives long answers."""

    takes_writer = True

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_released = 0

    async def wait(self) -> None:
        await self.release.wait()

    async def __call__(self, scope: Any, receive: Any, send: Any, writer: Any) -> None:
        path = scope["path"]
        if path == "/held":
            await self.wait()
            writer.take_body()
        elif path == "/parts":
            while (await receive()).get("more_body"):
                await self.wait()
        if path == "/stream":
            writer.start(200, [])
            for _ in range(20):
                writer.write(b"x" * WRITE_BYTES, more=True)
                if writer.is_full:
                    await writer.drain()
            writer.write(b"")
        elif path == "/long":
            writer.start(200, [(b"content-length", b"%d" % WRITE_BYTES)])
            writer.write(b"x" * WRITE_BYTES)
        else:
            await write_error(writer, ApiError(401, "no", "invalid_api_key"))


class _Socket:
    """Of a client that is there."""

    def getsockopt(self, level: int, name: int) -> int:
        return 0

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname


class CountingWire(UnreadWire):
    """Keeps the number of bytes that are written, not the bytes."""

    num_written = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket() if name == "socket" else default

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        self.note_write()

    def get_write_buffer_size(self) -> int:
        return self.num_written - self.num_read


def held_objects(of: object, seen: dict[int, int]) -> None:
    """The sizes of all texts that an object of the connection keeps alive, by their id."""
    if isinstance(of, bytes | bytearray | str):
        seen[id(of)] = sys.getsizeof(of)
    elif isinstance(of, memoryview):
        held_objects(of.obj, seen)
    elif isinstance(of, dict):
        for key, value in of.items():
            held_objects(key, seen)
            held_objects(value, seen)
    elif isinstance(of, list | tuple):
        for each in of:
            held_objects(each, seen)
    elif isinstance(of, HttpProtocol | HttpCycle | ConnectionMemory | RequestFraming) and id(of) not in seen:
        seen[id(of)] = 0
        held_objects(list(_attributes(of)), seen)


def _attributes(of: Any) -> Iterator[Any]:
    names = getattr(type(of), "__mypyc_attrs__", None) or vars(of)
    return (
        getattr(of, name)
        for name in names
        if name not in ("_app_state", "_default_headers", "_state", "_app") and hasattr(of, name)
    )


def _protocol(app: Application, loop: Any) -> HttpProtocol:
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", proxy_headers=False)
    config.load()
    return HttpProtocol(config, ServerState(), {}, loop)


class Connection:
    """A client that goes on as one of `CLIENTS`, and its connection."""

    def __init__(self, name: str) -> None:
        self.app, self.timers = Application(), Timers(asyncio.get_running_loop())
        self.protocol = _protocol(self.app, self.timers)
        self.wire = CountingWire(self.protocol)
        self.protocol.connection_made(self.wire)  # type: ignore[arg-type]
        self._left, self._repeated = CLIENTS[name]
        self.has_ended = False

    @property
    def is_read(self) -> bool:
        wire = self.wire
        return not (wire.is_paused or wire.is_closed or wire.is_aborted or self.has_ended)

    async def send(self, num: int) -> None:
        """One read of the event loop, if it reads."""
        if self.is_read:
            lacking = num - len(self._left)
            self._left += self._repeated * -(-lacking // len(self._repeated)) if lacking > 0 else b""
            self.protocol.data_received(self._left[:num])
            self._left = self._left[num:]

    async def read(self, num: int) -> None:
        self.wire.read(num)

    async def release(self, turns: int) -> None:
        """Let the application go on for so many turns of the loop."""
        self.app.release.set()
        await self.settle(turns)
        self.app.release.clear()

    async def settle(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: int) -> None:
        if not self.wire.is_aborted:
            self.timers.advance(float(seconds))

    async def end(self, _: int) -> None:
        """The client closes its side."""
        if self.is_read and not self.wire.has_ended:
            self.has_ended = True
            self.protocol.eof_received()

    def check(self) -> None:
        protocol, seen = self.protocol, dict[int, int]()
        held_objects(protocol, seen)
        total = sum(seen.values()) + self.wire.get_write_buffer_size()
        memory = protocol._memory
        assert memory.num_bytes <= MAX_HELD_BYTES + READ_BYTES + MAX_UNREAD_BYTES + WRITE_BYTES
        assert total <= memory.num_bytes + HEAD_BYTES, "all that is kept is counted"
        assert memory.num_ahead == len(protocol._waiting)
        assert self.wire.is_paused == (memory.num_ahead + memory.num_body > MAX_HELD_BYTES)

    async def check_goes_on(self) -> None:
        """Once the client reads and the application goes on, requests are answered, or the connection reads again."""
        state, wire, memory = self.protocol._state, self.wire, self.protocol._memory
        before, num_bytes = state.total_requests, memory.num_bytes
        for _ in range(30):
            await self.read(1 << 30)
            await self.release(8)
        is_over = wire.is_closed or wire.is_aborted
        assert is_over or not wire.is_paused or state.total_requests > before or memory.num_bytes < num_bytes


ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.one_of(st.integers(1, 2000), st.just(READ_BYTES), st.integers(1, READ_BYTES))),
    st.tuples(st.just("send"), st.just(READ_BYTES)),
    st.tuples(st.just("read"), st.one_of(st.integers(1, 2000), st.integers(1, 1 << 20))),
    st.tuples(st.just("release"), st.integers(1, 40)),
    st.tuples(st.just("settle"), st.integers(1, 200)),
    st.tuples(st.just("pass_time"), st.integers(1, 70)),
    st.tuples(st.just("end"), st.just(0)),
)


@pytest.mark.parametrize("name", CLIENTS)
@settings(max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=8, max_size=40))
def test_a_connection_holds_a_bounded_number_of_bytes(name: str, actions: list[tuple[str, int]]) -> None:
    async def story() -> None:
        connection = Connection(name)
        for kind, value in actions:
            await getattr(connection, kind)(value)
            connection.check()
        await connection.check_goes_on()
        connection.protocol.connection_lost(None)
        await connection.release(20)

    asyncio.run(story())


class TlsClient:
    """Sends requests over TLS and reads as told, through the event loop's own TLS, without a network."""

    def __init__(self, folder: Path) -> None:
        loop, self._into, self._out = asyncio.get_running_loop(), ssl.MemoryBIO(), ssl.MemoryBIO()
        served, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        served.load_cert_chain(*new_certificate(folder))
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        self.protocol = _protocol(Application(), loop)
        self._server = SSLProtocol(loop, self.protocol, served, loop.create_future(), server_side=True)
        self.wire = UnreadWire(self._server)
        self._tls = trusted.wrap_bio(self._into, self._out)
        self._left = b""
        self.num_sent = 0
        """Bytes of requests."""
        self._server.connection_made(self.wire)

    async def connect(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._deliver()
                await asyncio.sleep(0)
                self._take(1 << 30)

    def send(self, data: bytes) -> None:
        if not self._left:
            self._tls.write(data)
            self._left = self._out.read()
            self.num_sent += len(data)
        self._deliver()

    def _deliver(self) -> None:
        self._left += self._out.read()
        while self._left and not self.wire.is_paused:
            part = self._left[:READ_BYTES]
            self._server.get_buffer(-1)[: len(part)] = part
            self._server.buffer_updated(len(part))
            self._left = self._left[len(part) :]

    @property
    def num_unread(self) -> int:
        """Bytes of answers."""
        return self.protocol._memory.num_unread + self.wire.get_write_buffer_size()

    def close(self) -> None:
        self.protocol._transport.abort()
        self._server.connection_lost(None)

    def _take(self, num: int) -> None:
        start = self.wire.num_read
        self.wire.read(num)
        self._into.write(self.wire.written[start : self.wire.num_read])


@pytest.mark.skipif(which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("path", [b"/refused", b"/long"])
def test_a_connection_with_tls_holds_a_bounded_number_of_bytes(path: bytes, tmp_path: Path) -> None:
    """A client that sends requests and reads nothing: the limits of TLS's own buffers are those of the connection."""

    async def story() -> None:
        client, segment = TlsClient(tmp_path), 500 * _post(path, 0)
        await client.connect()
        for _ in range(300):
            client.send(segment)
            for _ in range(20):
                await asyncio.sleep(0)
        held = client.num_sent - client.protocol._state.total_requests * len(_post(path, 0))
        assert held <= 2 * (MAX_HELD_BYTES + READ_BYTES) + len(segment)
        assert client.num_unread <= 2 * (MAX_UNREAD_BYTES + WRITE_BYTES)
        client.close()

    asyncio.run(story())
