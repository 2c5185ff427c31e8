"""Requests leave no reference cycles, however they end: those, with bodies and connections, would stay in memory until
the garbage collector comes by, which it seldom does."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

import uvicorn
from uvicorn.server import ServerState

import serving
from gateway_in_process import Inside
from headway.gateway.blocking import OneAtATime, in_thread
from headway.gateway.server.http_protocol import HttpProtocol
from reference_cycles import left_over
from scripted import CHUNK, DONE, OK, framed, whole
from workers_in_process import hire

START = OK + framed(CHUNK)
FAILURE = framed(b'data: {"error":{"message":"no","code":500}}\n\n')


def _refusal(status: int) -> bytes:
    body = b'{"error":{"message":"no"}}'
    return b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


ENDS: dict[str, tuple[list[bytes], str]] = {
    "a whole answer": ([whole()], "keep"),
    "its connection is closed": ([whole()], "close"),
    "a stream": ([START, DONE], "keep"),
    "no answer": ([], "close"),
    "half of a head": ([OK[:20]], "close"),
    "no HTTP": ([b"SSH-2.0-x\r\n"], "close"),
    "more than an answer": ([whole() + b"HTTP/1.1 200 OK\r\n\r\n"], "close"),
    "a broken stream": ([START], "close"),
    "a stream that is reset": ([START], "reset"),
    "an error first": ([OK + FAILURE], "close"),
    "an error in a stream": ([START + FAILURE], "close"),
    "an answer that is shorter than its length": ([whole()[:-5]], "close"),
    "400": ([_refusal(400)], "keep"),
    "404": ([_refusal(404)], "keep"),
    "429": ([_refusal(429)], "keep"),
    "500": ([_refusal(500)], "keep"),
    "silence": ([], "stall"),
    "silence in a stream": ([START], "stall"),
}
"""What engines do."""


def _request(stream: bool, **more: Any) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": serving.MODEL, "messages": messages, "stream": stream, **more}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def _gateway(folder: Path) -> Iterator[Inside]:
    gateway = {"scrape_period_s": 3600.0, "timeout_s": 0.5}
    made = Inside(folder, num_engines=3, pool={"api": "openai"}, gateway=gateway)
    try:
        yield made
    finally:
        made.close()


async def _ask(inside: Inside, data: bytes, leaves: bool = False) -> bytes:
    """What the gateway answers on a connection of its own, until it is told to close, or has closed it."""
    config = uvicorn.Config(inside.app, log_level="warning", access_log=False, lifespan="off", proxy_headers=False)
    config.load()
    made: Any = lambda: HttpProtocol(config, ServerState(), {})  # noqa: E731 (has all that a protocol has)
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        writer.write(data)
        if leaves:
            await asyncio.sleep(0.01)
            return b""
        writer.write(b"GET /version HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        return await reader.read()
    finally:
        writer.close()
        server.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("end", ENDS)
def test_no_end_of_a_request_leaves_a_cycle(tmp_path: Path, end: str, stream: bool) -> None:
    """An engine answers like this, and another one where it is asked, too; then the client leaves meanwhile."""
    with _gateway(tmp_path) as inside:
        for engine in inside.engines:
            engine.reply, engine.then = ENDS[end]
        left_over()
        for leaves in (False, True):
            inside.run(_ask(inside, _request(stream), leaves))
            inside.run(inside.until(lambda: not inside.num_in_flight and not inside.gateway.driver.requests))
            inside.run(asyncio.sleep(0.01))  # connections are closed in the loop's next turns
            assert not left_over()


@pytest.mark.parametrize(
    "data",
    [
        _request(False)[:40],
        _request(False)[:-5],
        _request(False, model="x"),
        b"GET / HTTP/9\r\n\r\n",
        _request(False, max_tokens=10**6),
        _request(False, messages=3),
    ],
    ids=["half of a head", "half of a body", "no model", "no version", "too long", "no messages"],
)
def test_requests_that_no_engine_gets_leave_none(tmp_path: Path, data: bytes) -> None:
    with _gateway(tmp_path) as inside:
        left_over()
        inside.run(_ask(inside, data))
        assert not left_over()


def test_engines_that_cannot_be_reached_leave_none(tmp_path: Path) -> None:
    with _gateway(tmp_path) as inside:
        for engine in inside.engines:
            inside.run(engine.stop())
        left_over()
        for stream in (False, True):
            assert b"HTTP/1.1 50" in inside.run(_ask(inside, _request(stream)))
            assert not left_over()


def test_refusals_by_workers_leave_none(tmp_path: Path) -> None:
    with _gateway(tmp_path) as inside:
        workers = hire(inside, 2)
        left_over()
        for _ in range(2):
            assert inside.chat(model="x").status == 404
        assert not left_over()
        for worker in workers:
            inside.run(worker.stop())


def test_calls_in_threads_that_fail_leave_none() -> None:
    """Their futures, exceptions and frames would name each other."""
    found: list[int] = []

    def fail() -> None:
        raise OSError("no such file")

    async def story() -> None:
        calls = OneAtATime()
        for call in (in_thread, calls.call):
            for _ in range(3):
                with pytest.raises(OSError, match="no such file") as raised:
                    await call(fail)
                assert raised.traceback[-1].name == "fail"
                del raised
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.append(sum(isinstance(each, OSError) for each in gc.garbage))
        gc.set_debug(0)
        gc.garbage.clear()

    asyncio.run(story())
    assert found == [0]
