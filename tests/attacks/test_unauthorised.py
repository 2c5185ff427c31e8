"""Requests without a valid key: they cost no lasting memory, whatever their headers, trailers and bodies."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("httptools")

import serving
from attacking import SCALE, attack, memory_ceiling
from keys import digest

FLAT_MIB = 5.0
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n"
LONG = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(60))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    keys = {"api_keys": [digest("right")], "admin_keys": [digest("root")]}
    made = serving.gateway(serving.fleet_file(tmp_path_factory.mktemp("fleet"), ["http://127.0.0.1:9"], gateway=keys))
    with serving.closing(made):
        yield made


def _long_headers(number: int) -> list[bytes]:
    return [HEAD + LONG + b"Content-Length: 2\r\n\r\n{}"]


def _admin(number: int) -> list[bytes]:
    return [b"GET /workers HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n" + LONG + b"\r\n"]


def _trailers(number: int) -> list[bytes]:
    body = b"2\r\n{}\r\n0\r\n" + b"".join(b"T-%d: %s\r\n" % (index, b"z" * 1000) for index in range(40))
    return [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", body + b"\r\n"]


def _slow_body(number: int) -> list[bytes]:
    return [HEAD + b"Content-Length: 1000\r\n\r\n", *[b"x"] * 4]


def _mixed(number: int) -> list[bytes]:
    return (_long_headers, _admin, _trailers, _slow_body)[number % 4](number)


@pytest.mark.parametrize("make", [_long_headers, _admin, _trailers, _slow_body])
def test_each_kind_of_request_is_refused_and_forgotten(front: serving.Process, make: object) -> None:
    assert callable(make)
    attack(front, make, 100)
    with memory_ceiling(front, peak_mib=40.0, growth_mib=FLAT_MIB):
        statuses = attack(front, make, 400)
    assert set(statuses) <= {0, 401} and statuses[401] > 300, statuses


def test_slow_bodies_do_not_hold_their_connections(front: serving.Process) -> None:
    """The answer comes at once and ends the connection, though the body goes on."""
    port = front.port
    serving.send(front, "/health").text()  # the event loop has opened its files by then
    files = Path(f"/proc/{front.process.pid}/fd")
    before = len(list(files.iterdir()))
    with ExitStack() as held:
        made = [held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(50)]
        for each in made:
            each.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
            with each.makefile("rb") as answer:
                assert answer.read().startswith(b"HTTP/1.1 401")

        def are_closed() -> bool:
            for each in made:
                with suppress(OSError):
                    each.sendall(b"x")
            time.sleep(0.2)
            return len(list(files.iterdir())) <= before

        serving.until(are_closed)


def test_memory_is_flat_over_many_unauthorised_requests(front: serving.Process) -> None:
    attack(front, _mixed, 400)
    with memory_ceiling(front, peak_mib=40.0, growth_mib=FLAT_MIB):
        statuses = attack(front, _mixed, 1000 * SCALE)
    assert set(statuses) <= {0, 401}, statuses
