"""Engines that send invalid bytes: clients get an answer or an error, and the next request is served."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import serving
from gateway_in_process import Inside, Reply
from headway.gateway.upstream import health
from scripted import DONE, GOOD_WHOLE, OK, framed, whole

WORDS = ["so", " it", " gö", " on"]


def _chunk(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, **more}
    value = {"id": "c", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


STREAM = OK + b"".join(framed(_chunk(word)) for word in WORDS) + DONE


def _gateway(folder: Path, **settings: Any) -> Iterator[Inside]:
    """A gateway with one engine, whose breaker never opens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "MAX_FAILURES", 1 << 30)
        quiet = {"scrape_period_s": 3600.0, "max_attempts": 1, **settings}
        made = Inside(folder, pool={"api": "openai"}, gateway=quiet)
        yield made
        made.close()


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    yield from _gateway(tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Inside]:
    """A gateway with a short request timeout."""
    yield from _gateway(tmp_path, timeout_s=0.3)


def _script(inside: Inside, *scripted: bytes, then: str = "close") -> None:
    inside.engines[0].reply, inside.engines[0].then = scripted, then


def _check(inside: Inside, reply: Reply, stream: bool) -> None:
    """The response is valid, nothing is left in flight, and the next request gets its own answer."""
    assert reply.is_whole and reply.status in (200, 204, 400, 404, 422, 502, 503, 504), reply.status
    assert not any(url.removeprefix("http://").encode() in reply.body for url in inside.urls)
    if reply.status not in (200, 204):
        assert reply.error()["message"]
    elif "content-length" not in reply.headers:
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.body.endswith(b"data: [DONE]\n\n")
    else:
        assert int(reply.headers["content-length"]) == len(reply.body)
    assert inside.num_in_flight == 0 and not inside.gateway.driver.requests
    inside.run(inside.until(lambda: inside.engines[0].num_open == 0))
    _script(inside, whole(), then="keep")
    assert inside.chat().body == GOOD_WHOLE
    assert not inside.faults


def _text(reply: Reply) -> str:
    events = [event for event in reply.events() if event != "[DONE]" and "choices" in event]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


@pytest.mark.ci
@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_stream_that_is_cut_off_at_any_byte_ends_with_an_error(inside: Inside, then: str) -> None:
    text = "".join(WORDS)
    done = STREAM.index(b"[DONE]\n\n") + len(b"[DONE]\n\n")
    for end in range(0, len(STREAM), 3 if then == "reset" else 1):
        _script(inside, STREAM[:end], then=then)
        reply = inside.chat(stream=True)
        if reply.status == 200:
            events = reply.events()
            assert text.startswith(_text(reply)) and events[-1] == "[DONE]"
            assert end >= done or events[-2]["error"]["code"] == "engine_error"
            assert end < done or _text(reply) == text
        else:
            assert reply.status == 502, (end, STREAM[:end][-30:])
            assert end < STREAM.index(b"\n\n\r\n") + 2
        assert inside.num_in_flight == 0
    _check(inside, reply, True)


def test_a_stream_may_be_cut_into_any_pieces(inside: Inside) -> None:
    for size in (1, 2, 3, 7, 64):
        _script(inside, *(STREAM[i : i + size] for i in range(0, len(STREAM), size)), then="keep")
        reply = inside.chat(stream=True)
        assert _text(reply) == "".join(WORDS) and reply.events()[-1] == "[DONE]" and "error" not in str(reply.events())
    _check(inside, reply, True)


def test_an_answer_that_is_cut_off_at_any_byte_is_an_error(inside: Inside) -> None:
    for end in range(len(whole())):
        _script(inside, whole()[:end])
        assert inside.chat().status == 502
    _check(inside, inside.chat(), False)


def _with(status: str, *headers: str, body: bytes = b"{}") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


INVALID = {
    "redirect": (_with("302 Found", "Location: http://elsewhere/"), 502),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", 502),
    "upgrade": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + b"x" * 9, 502),
    "100, then an answer": (b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + whole(), 200),
    "103, then an answer": (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + whole(), 200),
    "endless 100": (b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, 502),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 60_000, 502),
    "one endless header": (b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 400_000, 502),
    "endless trailers": (OK + framed(_chunk("a")) + b"0\r\n" + b"X-A: b\r\n" * 60_000, 502),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 502),
    "length and chunks": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 502),
    "more than its length": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + GOOD_WHOLE, 502),
    "negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}", 502),
    "length over 64 bits": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n{}", 502),
    "chunk over 64 bits": (OK + b"FFFFFFFFFFFFFFFFFF\r\n{}", 502),
    "negative chunk": (OK + b"-2\r\n{}", 502),
    "long chunk extension": (OK + b"2;" + b"x" * 2_000_000 + b"\r\n{}\r\n0\r\n\r\n", 502),
    "gzip": (_with("200 OK", "Content-Encoding: gzip", body=gzip.compress(GOOD_WHOLE)), 200),
    "not JSON": (_with("200 OK", body=b"<html>"), 200),
    "a number": (_with("200 OK", body=b"7"), 200),
    "not UTF-8": (_with("200 OK", body=b'{"id":"\xc3"}'), 200),
    "deep JSON": (_with("200 OK", body=b'{"a":' + b"[" * 50_000), 200),
    "error with status 200": (_with("200 OK", body=b'{"error":{"message":"out of memory"}}'), 502),
    "empty": (_with("200 OK", body=b""), 200),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204),
    "status 999": (_with("999 Beyond"), 502),
    "status 7": (_with("7 Low"), 502),
    "refusal with detail": (_with("422 No", body=b'{"detail":"no such thing"}'), 422),
    "refusal that is not UTF-8": (_with("400 No", body=b"\xff\xfe"), 400),
    "refusal with deep JSON": (_with("400 No", body=b'{"error":' + b"[" * 50_000), 400),
    "negative usage": (
        _with("200 OK", body=GOOD_WHOLE[:-1] + b',"usage":{"prompt_tokens":-1000000,"completion_tokens":-5}}'),
        200,
    ),
    "two answers": (whole() + _with("200 OK", body=b'{"secret":1}'), 200),
    "bytes after the answer": (whole() + b"\x00\xff anything", 200),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("scripted", "status"), INVALID.values(), ids=INVALID)
def test_invalid_responses(inside: Inside, scripted: bytes, status: int, stream: bool) -> None:
    _script(inside, scripted)
    reply = inside.chat(stream=stream)
    expected = {status, 502} if stream else {status}
    is_stream = stream or scripted.startswith(OK)  # whatever was asked for
    assert reply.status in expected or (is_stream and reply.status == 200), reply.body
    assert b"secret" not in reply.body
    if reply.status == 422:
        assert reply.error()["message"] == "no such thing"
    _check(inside, reply, stream)


def test_a_stalled_engine_is_waited_for_until_the_request_times_out(impatient: Inside) -> None:
    for scripted in (b"", OK[:30], OK, OK + framed(_chunk("so")), whole()[:-4]):
        _script(impatient, scripted, then="stall")
        reply = impatient.chat(stream=True)
        error = reply.events()[-2]["error"] if reply.status == 200 else reply.error()
        assert error["code"] == "timeout"
    assert impatient.num_in_flight == 0 and not impatient.faults


_FRAGMENTS = [
    OK, STREAM, whole(), _chunk("x"), framed(_chunk("x")), framed(b"data: [DONE]\n\n"), b"0\r\n\r\n", b"data: ",
    b"\n\n", b"\r\n", b"\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 ", b"200 OK\r\n", b": comment\n\n",
    framed(b"event: x\nid: 7\n\n"), framed(b"data: {\n\n"), framed(b'data: {"choices":[{"index":"a"}]}\n\n'),
    framed(b'data: {"usage":{"completion_tokens":-7}}\n\n'),
    framed(b'data: {"usage":{"completion_tokens":1e400}}\n\n'),
    framed(b'data: {"usage":{"prompt_tokens":99999999999999}}\n\n'), framed(b'data: {"choices":null}\n\n'),
    framed(b'data: {"choices":[{"delta":{"content":"\xc3"}}]}\n\n'), framed(b'data: {"error":{"message":"x"}}\n\n'),
    framed(b'data: {"choices":[{"token_ids":[1,2],"x":"\xff"}],"token_ids":1}\n\n'),
    framed(b'data: {"choices":[{"logprobs":' + b"[" * 3000 + b"]" * 3000 + b"}]}\n\n"),
    framed(b'data: {"token_ids":[1],"x":' + b"[" * 3000 + b"]" * 3000 + b"}\n\n"),
    framed(b'data: {"id":"\\ud800"}\n\n'), framed(b"data: \xff\n\n"), framed(b"data:[DONE]\n\n"),
    framed(b"data: [DONE]\r\n\r\n"), framed(b"data: [DO"), b"Content-Length: 5\r\n", b"X: \x00\r\n",
]  # fmt: skip
_PIECES = st.lists(st.one_of(st.sampled_from(_FRAGMENTS), st.binary(max_size=12)), max_size=8)


@given(_PIECES, st.booleans(), st.booleans(), st.sampled_from(["close", "reset"]))
@settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_bytes(inside: Inside, pieces: list[bytes], begins: bool, stream: bool, then: str) -> None:
    _script(inside, *([OK] if begins else []), *pieces, then=then)
    _check(inside, inside.chat(stream=stream), stream)


@given(
    st.lists(st.sampled_from(_FRAGMENTS), max_size=6), st.sampled_from(["/v1/responses", "/v1/messages"]), st.booleans()
)
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_bytes_of_passed_on_answers(inside: Inside, pieces: list[bytes], path: str, stream: bool) -> None:
    _script(inside, OK, *pieces)
    body = {"model": serving.MODEL, "input": "a", "messages": [{"content": "a"}], "stream": stream}
    reply = inside.run(inside.post(body, path))
    assert reply.is_whole and reply.status in (200, 502)
    assert inside.num_in_flight == 0 and not inside.faults
