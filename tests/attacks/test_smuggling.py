"""Requests that hide another one, and requests that a web page sends: one answer, and no engine gets them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools")

import serving
from attacking import answers, memory_ceiling
from keys import bearer, digest
from scripted import WELL, ScriptedEngine
from serving import MODEL

HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
CHAT = b"POST /v1/chat/completions" + HOST
BODY = b'{"model":"%s","messages":[{"role":"user","content":"a"}]}' % MODEL.encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
HIDDEN = CHAT + LENGTH + b"\r\n" + BODY
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
PEAK_MIB = 30.0


@pytest.fixture(scope="module")
def front(script: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    with serving.up(serving.gateway(serving.fleet_file(tmp_path_factory.mktemp("fleet"), [script.url])), 1) as made:
        yield made


@pytest.fixture(scope="module")
def keyed(script: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    keys = {"api_keys": [digest("right")]}
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path_factory.mktemp("fleet"), [script.url], gateway=keys)), 1
    ) as made:
        yield made


def _statuses(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_an_upgrade_with_a_body_is_refused_and_its_body_is_no_request(
    front: serving.Process, script: ScriptedEngine, num_pieces: int
) -> None:
    script.reply, script.request = WELL, b""
    head = b"POST /v1/models" + HOST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(HIDDEN)
    pieces = [[head + HIDDEN], [head, HIDDEN], [head, HIDDEN[:60], HIDDEN[60:]]][num_pieces - 1]
    assert _statuses(answers(front, *pieces)) == [400]
    assert not script.request


REFUSED = {
    "two hosts": (CHAT + b"Host: localhost\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "two keys": (CHAT + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "a host that was rebound": (CHAT.replace(b"localhost", b"evil.example") + LENGTH + b"\r\n" + BODY, 421),
    "a target of another host": (b"POST http://evil.example/v1/chat/completions" + HOST + LENGTH + b"\r\n" + BODY, 421),
    "a page of another host": (CHAT + b"Origin: http://evil.example\r\n" + LENGTH + b"\r\n" + BODY, 403),
    "a sandboxed page": (CHAT + b"Origin: null\r\n" + LENGTH + b"\r\n" + BODY, 403),
    "a post without preflight": (CHAT + b"Content-Type: text/plain;charset=UTF-8\r\n" + LENGTH + b"\r\n" + BODY, 415),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
def test_what_a_page_may_have_sent_is_refused_without_keys(
    front: serving.Process, script: ScriptedEngine, data: bytes, status: int
) -> None:
    script.reply, script.request = WELL, b""
    assert _statuses(answers(front, data + HIDDEN)) == [status]
    assert not script.request


def _num_refused(front: serving.Process) -> dict[str, float]:
    """Requests that no application has seen, by status."""
    page = serving.send(front, "/metrics").text()
    return {
        labels: float(num)
        for labels, num in re.findall(r"^headway_responses_total\{(.*)\} (\S+)$", page, re.MULTILINE)
        if 'path=""' in labels
    }


def test_workers_refuse_the_same_and_count_it(script: ScriptedEngine, tmp_path: Path) -> None:
    script.reply, script.request = WELL, b""
    with serving.up(serving.gateway(serving.fleet_file(tmp_path, [script.url]), "--workers", "2"), 1) as made:
        for data, status in REFUSED.values():
            assert _statuses(answers(made, data + HIDDEN)) == [status]
        assert not script.request
        all_refused = [status for _, status in REFUSED.values()]
        expected = {f'path="",status="{status}"': float(num) for status, num in Counter(all_refused).items()}
        serving.until(lambda: _num_refused(made) == expected)  # both workers' counts, added up
        close = HIDDEN.replace(b"Host: ", b"Connection: close\r\nHost: ")
        assert _statuses(answers(made, close)) == [200]


def test_with_keys_any_host_is_served(keyed: serving.Process, script: ScriptedEngine) -> None:
    script.reply = WELL
    close = b"Connection: close\r\nAuthorization: %s\r\n" % bearer("right")["Authorization"].encode()
    data = CHAT.replace(b"localhost", b"gateway.example") + close + LENGTH + b"\r\n" + BODY
    assert _statuses(answers(keyed, data)) == [200]


def test_a_key_in_a_trailer_is_none(keyed: serving.Process, script: ScriptedEngine) -> None:
    script.reply, script.request = WELL, b""
    body = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer right\r\n\r\n" % (len(BODY), BODY)
    assert _statuses(answers(keyed, CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + body)) == [401]
    assert not script.request


def test_long_trailers_and_long_chunk_headers_are_refused(front: serving.Process) -> None:
    chunked = CHAT + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    megabyte = b"y" * (1 << 20)
    with memory_ceiling(front, PEAK_MIB):
        for framing in (b"0\r\nT: ", b"1;", b"0\r\n" + b"T: u\r\n" * 20_000):
            assert _statuses(answers(front, chunked + framing, *[megabyte] * 20)) in ([431], [])


def test_long_names_are_not_repeated(front: serving.Process) -> None:
    long = b"n" * 400
    body = BODY.replace(MODEL.encode(), long)
    data = CHAT + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    got = answers(front, data)
    assert _statuses(got) == [404] and long[:70] not in got and b"unknown model 'nnn" in got
    path = b"p" * 60_000
    got = answers(front, b"GET /" + path + HOST + b"Connection: close\r\n\r\n")
    assert _statuses(got) == [404] and len(got) < 2000
    got = answers(front, b"GET /health/" + HOST.replace(b"localhost", b"a.localhost") + b"Connection: close\r\n\r\n")
    assert _statuses(got) == [404] and b"a.localhost" not in got
