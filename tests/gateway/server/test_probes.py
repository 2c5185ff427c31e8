"""The port apart for probes: it answers however many connections keep it busy, and keeps few of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from headway.core.errors import HeadwayError
from headway.gateway.server.probes import ProbeServer
from serving import PATIENCE_S


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    runner = asyncio.Runner()

    async def made() -> ProbeServer:
        return ProbeServer(0, lambda: (True, {"status": "ok"}), hang_s=1e9)

    probes = runner.run(made())
    yield probes
    probes.close()
    runner.close()


def _asked(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as made:
        made.sendall(request)
        with made.makefile("rb") as answer:
            return answer.read()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"GET /livez", 200), (b"GET /readyz?full", 200), (b"GET /elsewhere", 404), (b"POST /livez", 405)],
)
def test_probes_are_answered(server: ProbeServer, request_line: bytes, status: int) -> None:
    got = _asked(server.port, request_line + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"Content-Length: %d" % len(body) in head


def test_connections_that_ask_nothing_keep_no_probe_out(server: ProbeServer) -> None:
    """They are closed for newer ones, and need no thread each."""
    num_threads = threading.active_count()
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
            for _ in range(100)
        ]
        for each in idle:
            each.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        assert _asked(server.port, b"GET /livez HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert threading.active_count() == num_threads
        with suppress(ConnectionResetError):  # what it had sent was not read yet
            assert idle[0].recv(1) == b""


def test_a_head_without_end_ends_its_connection(server: ProbeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as made:
        made.sendall(b"GET /livez HTTP/1.1\r\nX: " + b"y" * (40 << 10))
        with suppress(ConnectionResetError):
            assert made.recv(1) == b""


def test_a_port_that_is_taken_is_an_error(server: ProbeServer) -> None:
    async def second() -> None:
        ProbeServer(server.port, lambda: (True, {}), hang_s=1.0)

    with pytest.raises(HeadwayError, match=f"probe_port {server.port}"):
        asyncio.run(second())
