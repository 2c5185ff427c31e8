"""Limits of requests: bodies that do not come, headers without end, and bodies of any shape."""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

import serving
from headway.gateway.errors import ApiError
from headway.gateway.relay.json_body import LONG_BYTES
from headway.gateway.relay.writer import AsgiWriter
from headway.gateway.server.bodies import BodyMemory, read_body
from headway.gateway.settings import Settings
from keys import ADMIN, digest
from serving import send, until


def _read(
    messages: Sequence[dict[str, Any]], headers: dict[str, str], memory: BodyMemory | None = None, **settings: Any
) -> bytes | None:
    left = list(messages)

    async def receive() -> Any:
        return left.pop(0) if left else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    memory = memory or BodyMemory()
    before = memory.num_bytes
    body: bytes | None = None
    try:
        body = asyncio.run(read_body(AsgiWriter(receive, send), receive, headers, Settings(**settings), memory))
    finally:
        assert memory.num_bytes == before + len(body or b""), "the caller frees it"
    return body


def _part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_is_read_part_by_part_up_to_its_limit() -> None:
    parts = [_part(b"ab"), _part(b"c"), _part(b"", more=False)]
    assert _read(parts, {}, max_body_bytes=3) == b"abc"
    for headers in ({}, {"content-length": "3"}, {"content-length": "9" * 30}):
        with pytest.raises(ApiError) as error:
            _read(parts, headers, max_body_bytes=2)
        assert error.value.status == 413 and "longer than 2 bytes" in error.value.message


def test_a_body_of_short_parts_takes_no_multiple_of_its_length() -> None:
    num = 50_000
    parts = (_part(bytes((97, i % 251))) for i in range(num))

    async def receive() -> Any:
        return next(parts, _part(b"", more=False))

    async def story() -> int:
        tracemalloc.start()
        body = await read_body(AsgiWriter(receive, receive), receive, {}, Settings(), BodyMemory())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert body is not None and len(body) == 2 * num
        return peak

    assert asyncio.run(story()) < 5 * 2 * num


def test_long_bodies_share_a_bound_and_a_single_one_may_reach_it() -> None:
    memory, size = BodyMemory(), 2 * LONG_BYTES
    parts = [_part(b"a" * LONG_BYTES), _part(b"b" * LONG_BYTES, more=False)]
    limits = {"max_body_bytes": size, "max_bodies_bytes": size + LONG_BYTES}
    assert len(_read(parts, {}, memory, max_body_bytes=size, max_bodies_bytes=1) or b"") == size
    for headers in ({}, {"content-length": str(size)}):
        with pytest.raises(ApiError) as error:
            _read(parts, headers, memory, **limits)
        assert error.value.status == 503 and error.value.retry_after_s == 1
    assert _read([_part(b"short", more=False)], {}, memory, **limits) == b"short", "long ones keep no short ones out"
    memory.free(size)
    assert len(_read(parts, {}, memory, **limits) or b"") == size
    memory.free(len(b"short"))
    memory.free(size)
    assert memory.num_bytes == 0


def test_a_body_that_stops_is_refused_and_one_whose_client_leaves_is_none() -> None:
    with pytest.raises(ApiError) as error:
        _read([_part(b"ab")], {}, body_timeout_s=0.01)
    assert error.value.status == 408 and "within 0.01 s" in error.value.message
    assert _read([_part(b"ab"), {"type": "http.disconnect"}], {}) is None


def test_a_body_that_does_not_come_times_out(keyed_front: serving.Process) -> None:
    with socket.create_connection(("127.0.0.1", keyed_front.port), timeout=serving.PATIENCE_S) as made:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer free\r\nContent-Length: 99\r\n\r\n"
        )
        made.sendall(head + b'{"model"')
        assert made.recv(4096).startswith(b"HTTP/1.1 408")


def test_headers_without_end_are_refused(keyed_front: serving.Process) -> None:
    """Many headers and one endless header are refused; long headers are served, also twice on one connection."""
    for filler in (b"X-%d: y\r\n", b"%d"):
        with socket.create_connection(("127.0.0.1", keyed_front.port), timeout=serving.PATIENCE_S) as made:
            answer = b""
            with suppress(ConnectionError):  # it closes while we go on
                made.sendall(b"GET /version HTTP/1.1\r\nHost: h\r\nX: ")
                for i in range(30_000):
                    made.sendall(filler % i)
            with suppress(ConnectionError):
                answer = made.recv(4096)
            assert answer.startswith(b"HTTP/1.1 431") or not answer
    connection = http.client.HTTPConnection("127.0.0.1", keyed_front.port, timeout=serving.PATIENCE_S)
    for _ in range(2):
        connection.request("GET", "/version", headers={"X-Long": "x" * 40_000})
        with connection.getresponse() as answered:
            assert answered.status == 200 and answered.read()
    connection.close()


_ODD: list[Any] = [None, True, -1, 1e300, "", "\0", "é" * 99, [], [{}], {}, {"a": None}, "24h", "pool", "http://a:1"]


def test_no_body_makes_the_gateway_fail(tmp_path: Path) -> None:
    made = serving.gateway(
        serving.fleet_file(tmp_path, ["http://127.0.0.1:9"], gateway={"admin_keys": [digest("root")], "batches": {}})
    )
    draw = random.Random(7)
    names = ("input_file_id", "endpoint", "completion_window", "metadata", "pool", "url")
    with serving.closing(made):
        until(lambda: send(made, "/v1/batches").json().get("object") == "list")
        for path in ("/v1/batches", "/v1/files", "/workers", "/v1/batches/x/cancel", "/workers/0/drain"):
            for _ in range(25):
                odd = {name: draw.choice(_ODD) for name in names if draw.random() < 0.7}
                reply = send(made, path, odd if draw.random() < 0.9 else draw.choice(_ODD), ADMIN)
                assert reply.status < 500, (path, odd)
                reply.json()
