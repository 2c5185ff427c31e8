"""Bodies that are costly to read: they are refused, or read beside the event loop, in a bounded amount of memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("httptools")

import serving
from attacking import SCALE, answers, longest_turn_s, memory_ceiling, turn_is_short
from gateway_in_process import Inside
from scripted import WELL, ScriptedEngine, started
from serving import MODEL

MIB = 1 << 20
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
CLOSED = CHAT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def _body(field: bytes, size: int = 30 * MIB) -> bytes:
    """A chat of this size, whose `x` is `field` with its middle part, between asterisks, repeated."""
    head = b'{"model":"%s","messages":[{"role":"user","content":"a"}],"x":' % MODEL.encode()
    before, repeated, after = field.split(b"*")
    return head + before + repeated * ((size - len(head)) // len(repeated)) + after + b"}"


BODIES = {
    "empty arrays": (b"[*[],*1]", 400),
    "empty objects": (b"[*{},*1]", 400),
    "numbers": (b"[*1,*1]", 400),
    "deep arrays": (b"*[*", 400),
    "short texts": (b'[*"a",*1]', 400),
    "keys": (b'{*"a":1,*"b":1}', 400),
    "a long text": (b'"*x*"', 200),
    "a text of escapes": (b'"*\\n*"', 200),
    "a text of symbols": (b'"*\xc3\xa9*"', 200),
    "a text of wide symbols": (b'"*x*\xf0\x9f\x98\x80"', 200),
    "a long number": (b"*1*", 400),
    "spaces": (b"* *1", 200),
}


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    made = Inside(tmp_path_factory.mktemp("fleet"), gateway={"scrape_period_s": 3600.0})
    made.engines[0].keeps_bodies = False
    yield made
    made.close()


@pytest.mark.parametrize(("field", "status"), BODIES.values(), ids=BODIES)
def test_no_body_stops_the_event_loop(inside: Inside, field: bytes, status: int) -> None:
    inside.run(inside.until(lambda: inside.gateway.num_up == 1))
    turns_s = []
    for _ in range(1 if SCALE == 1 else 3):  # another process can only lengthen them
        longest_s, replies = inside.run(longest_turn_s([inside.post(_body(field))]))
        assert [reply.status for reply in replies] == [status]
        turns_s.append(longest_s)
    assert turn_is_short(min(turns_s))


@pytest.fixture(scope="module")
def front(script: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    with serving.up(serving.gateway(serving.fleet_file(tmp_path_factory.mktemp("fleet"), [script.url])), 1) as made:
        yield made


@pytest.mark.parametrize("name", ["empty arrays", "keys", "a long text", "a text of wide symbols"])
def test_a_body_takes_a_bounded_multiple_of_its_length(
    front: serving.Process, script: ScriptedEngine, name: str
) -> None:
    script.reply = WELL
    field, status = BODIES[name]
    body = _body(field)
    with memory_ceiling(front, peak_mib=260.0):
        got = answers(front, CLOSED % len(body), body)
    assert got.startswith(b"HTTP/1.1 %d" % status)


def test_four_bodies_at_once_do_not_take_four_times_the_time(inside: Inside) -> None:
    inside.run(inside.until(lambda: inside.gateway.num_up == 1))
    field, status = BODIES["empty arrays"]
    longest_s, replies = inside.run(longest_turn_s([inside.post(_body(field)) for _ in range(4)]))
    assert [reply.status for reply in replies] == [status] * 4 and turn_is_short(longest_s)


@pytest.mark.parametrize("length", [100 * MIB, 1 << 62])
def test_a_body_that_is_too_long_is_refused_before_it_comes(front: serving.Process, length: int) -> None:
    with memory_ceiling(front, peak_mib=20.0):
        got = answers(front, CHAT % length, *[b"x" * MIB] * 40)
    assert got.startswith(b"HTTP/1.1 413") and b"connection: close" in got


def test_chunks_beyond_the_limit_are_refused(front: serving.Process) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with memory_ceiling(front, peak_mib=140.0):
        got = answers(front, head, *[b"%x\r\n%s\r\n" % (MIB, b"x" * MIB)] * 40)
    assert got.startswith(b"HTTP/1.1 413") and b"connection: close" in got


def test_bodies_that_are_served_at_once_take_three_and_a_half_times_their_length(tmp_path: Path) -> None:
    engine, num, size = started(then="stall"), 4, 12 * MIB
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url]))
    head = b'{"model":"%s","messages":[{"role":"user","content":"' % MODEL.encode()
    body = head + b"x" * (size - len(head) - 4) + b'"}]}'
    with serving.closing(front), ExitStack() as stack:
        serving.all_up(front, 1)
        with memory_ceiling(front, peak_mib=24.0 + 3.5 * num * size / MIB):
            for _ in range(num):
                client = stack.enter_context(
                    socket.create_connection(("127.0.0.1", front.port), timeout=serving.PATIENCE_S)
                )
                client.sendall(CHAT % size + body)
            serving.until(lambda: serving.metric(front, "headway_requests_in_flight") == num)
    engine.close()


def test_many_bodies_at_once_share_a_bound(script: ScriptedEngine, tmp_path: Path) -> None:
    """Of 40 bodies of 8 MiB that come slowly, so many are held as fit; short requests are served meanwhile."""
    script.reply = WELL
    file = serving.fleet_file(tmp_path, [script.url], gateway={"max_bodies_bytes": 64 * MIB})
    front = serving.gateway(file)
    with serving.closing(front), ExitStack() as stack:
        serving.all_up(front, 1)
        with memory_ceiling(front, peak_mib=130.0):
            clients = [
                stack.enter_context(socket.create_connection(("127.0.0.1", front.port), timeout=serving.PATIENCE_S))
                for _ in range(40)
            ]
            refused = []
            for client in clients:
                with suppress(OSError):  # a refused one is closed
                    client.sendall(CHAT % (8 * MIB) + b"x" * (8 * MIB - 1))
            for client in clients:
                client.settimeout(0.2)
                with suppress(OSError):
                    refused.append(client.recv(1 << 16))
            assert len(refused) >= 40 - 9 and all(each.startswith(b"HTTP/1.1 503") for each in refused)
            assert all(b"retry-after: 1" in each for each in refused)
            body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "a"}]})
            assert answers(front, CLOSED % len(body), body).startswith(b"HTTP/1.1 200")
