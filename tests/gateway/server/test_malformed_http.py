"""Clients that mean ill, byte by byte on the socket: what is no HTTP is refused, and nothing is asked twice."""

from __future__ import annotations

import http.client
import io
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import serving
from odd_requests import BODY, CHAT, CHUNKED, LENGTH, REFUSED, UNUSUAL, VERSION, chat
from scripted import CHUNK, OK, WELL, ScriptedEngine, framed
from serving import metric, send, until


@pytest.fixture(scope="module")
def front(script: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    """Afterwards, nothing in its log is a fault of its own."""
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [script.url], gateway={"body_timeout_s": 1.0})
    with serving.up(serving.gateway(path), 1) as made:
        yield made
        until(lambda: metric(made, "headway_requests_in_flight") == 0)
        log = made.stop()
        assert "Traceback" not in log and "Exception" not in log, log


def _sent(front: serving.Process, data: bytes, half: bool = False) -> bytes:
    """All that comes back until the gateway closes; `half`: nothing more will be sent."""
    with socket.create_connection(("127.0.0.1", front.port), timeout=serving.PATIENCE_S) as made:
        parts = []
        with suppress(ConnectionError):
            made.sendall(data)
            if half:
                made.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while part := made.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)


class _Kept(io.BytesIO):
    def makefile(self, *args: object) -> io.BytesIO:
        return self

    def close(self) -> None:
        """Answers follow each other in it."""


def _answers(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer, which are all whole."""
    stream, found = _Kept(data), []
    while stream.tell() < len(data):
        answer = http.client.HTTPResponse(stream)  # type: ignore[arg-type]
        answer.begin()
        found.append((answer.status, answer.read()))
    return found


def _num_responses(front: serving.Process) -> Counter[tuple[str, int]]:
    """Answers so far, by path and status."""
    page = send(front, "/metrics").text()
    found = re.findall(r'^headway_responses_total\{path="(.*)",status="(.*)"\} (\d+)$', page, re.MULTILINE)
    return Counter({(path, int(status)): int(num) for path, status, num in found})


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_no_http_is_refused_once_and_asked_of_nobody(
    front: serving.Process, script: ScriptedEngine, data: bytes
) -> None:
    """And what might be a second request in it is none. The answer is counted once."""
    script.reply, script.request = WELL, b""
    before = _num_responses(front)
    answers = _answers(_sent(front, data))
    assert [status for status, _ in answers] == [400], answers
    assert b'"type":"invalid_request_error"' in answers[0][1]
    assert not script.request
    assert _num_responses(front) - before == {("", 400): 1}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (chat(*([b"X: 1"] * 300)), 431),
        (CHAT + b"X: " + b"y" * 70_000, 431),
        (chat(b"Origin: https://elsewhere.example", LENGTH), 403),
        (chat(LENGTH, b"Host: elsewhere.example"), 400),
    ],
    ids=["many headers", "long headers", "another page", "two hosts"],
)
def test_refused_heads_are_counted_by_status(front: serving.Process, data: bytes, status: int) -> None:
    before = _num_responses(front)
    assert [found for found, _ in _answers(_sent(front, data))] == [status]
    assert _num_responses(front) - before == {("", status): 1}


def test_a_body_that_goes_wrong_later_is_counted_as_what_its_client_was_told(front: serving.Process) -> None:
    """The endpoint waits for it by then: the client has not left, it was refused."""
    before = _num_responses(front)
    with socket.create_connection(("127.0.0.1", front.port), timeout=serving.PATIENCE_S) as made:
        made.sendall(chat(CHUNKED, b"Expect: 100-continue", body=b""))
        assert made.recv(100).startswith(b"HTTP/1.1 100 ")  # the endpoint has asked for the body
        made.sendall(b"zz\r\n")
        assert made.recv(100).startswith(b"HTTP/1.1 400 ")
    until(lambda: _num_responses(front) - before == {("/v1/chat/completions", 400): 1})


def test_folded_headers_reach_no_engine_as_two(front: serving.Process, script: ScriptedEngine) -> None:
    script.reply, script.request = WELL, b""
    answers = _answers(_sent(front, chat(LENGTH, b"traceparent: 00-1\r\n x-evil: 1", b"Connection: close")))
    assert answers[0][0] in (200, 400) and len(answers) == 1
    assert b"\nx-evil" not in script.request and b"\n x-evil" not in script.request


@pytest.mark.parametrize(("data", "status"), UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_unusual_is_answered(front: serving.Process, script: ScriptedEngine, data: bytes, status: int) -> None:
    serving.all_up(front, 1)
    script.reply = WELL
    answers = _answers(_sent(front, data).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"))
    assert [found for found, _ in answers] == [status], answers


def test_a_socket_that_wants_to_be_another_is_answered_as_http(front: serving.Process, script: ScriptedEngine) -> None:
    script.reply = WELL
    upgrade = b"GET /version HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    answers = _answers(_sent(front, upgrade, half=True))
    assert [status for status, _ in answers] in ([200], [])


def test_requests_sent_at_once_are_answered_in_turn(front: serving.Process, script: ScriptedEngine) -> None:
    serving.all_up(front, 1)
    script.reply = WELL
    last = VERSION.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
    answers = _answers(_sent(front, VERSION + chat(LENGTH) + VERSION + chat(LENGTH) + last))
    assert [status for status, _ in answers] == [200] * 5
    assert [body for _, body in answers][1::2] == [b"{}", b"{}"] and b"version" in answers[4][1]


def test_who_will_send_no_more_leaves_nothing_behind(front: serving.Process, script: ScriptedEngine) -> None:
    """Half a request, half a body, or a whole one whose answer is still coming."""
    serving.all_up(front, 1)
    script.reply = OK + framed(CHUNK)
    streamed = BODY[:-1] + b',"stream":true}'
    whole = chat(b"Content-Length: %d" % len(streamed), body=streamed)
    for end in range(1, len(whole), 9):
        _sent(front, whole[:end], half=True)
    script.reply = WELL
    _sent(front, whole, half=True)
    until(lambda: metric(front, "headway_requests_in_flight") == 0)
    serving.all_up(front, 1)


_BITS = [
    CHAT, VERSION, BODY, LENGTH, CHUNKED, b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\0", b":", b"0\r\n\r\n",
    b"Content-Length: ", b"Transfer-Encoding: ", b"GET ", b"POST /v1/files ", b"HTTP/1.1\r\n", b"Host: localhost\r\n",
    b"Connection: close\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"5\r\n",
    b"x" * 3000, b"X: " + b"y" * 30_000 + b"\r\n", b"/openapi.json ", b"%", b"\xff", b"Authorization: Bearer \xff\r\n",
    b"X-Request-Id: \xe9\r\n", b"x-headway-tier: 1e9\r\n", b"x-llm-d-slo-ttft-ms: nan\r\n", b"traceparent: \xff-\r\n",
]  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(_BITS), st.binary(max_size=8)), min_size=1, max_size=10), st.booleans())
@settings(
    max_examples=250,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_bytes(front: serving.Process, script: ScriptedEngine, pieces: list[bytes], begins: bool) -> None:
    script.reply = WELL
    answers = _sent(front, (CHAT if begins else b"") + b"".join(pieces), half=True)
    if not answers.startswith(b"HTTP/1.1 100"):
        assert all(status in (200, 400, 404, 405, 408, 421, 431) for status, _ in _answers(answers)), answers
    assert send(front, "/version").json()["version"]
