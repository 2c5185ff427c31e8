"""Engines that send invalid answers, clients that read slowly, and a gateway that shuts down."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import serving
from scripted import CHUNK, DONE, OK, WELL, ScriptedEngine, framed
from serving import chat, metric, until

pytest.importorskip("httptools")


@pytest.fixture(scope="module")
def front(script: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [script.url], gateway={"hold_s": 5.0})
    with serving.up(serving.gateway(path), 1) as made:
        yield made


def _check_recovery(front: serving.Process, script: ScriptedEngine) -> None:
    """An engine whose streams broke after tokens gets requests again once it has streamed more of them."""
    script.reply = OK + framed(CHUNK) * 16 + DONE
    serving.all_up(front, 1)
    script.reply = WELL
    assert chat(front).json() == {} and metric(front, "headway_requests_in_flight") == 0


INVALID_ANSWERS = {
    "hangs up": b"",
    "hangs up in its headers": OK[:40],
    "hangs up before its first event": OK,
    "speaks no HTTP": b"+OK hello\r\n\r\n" * 20,
    "cuts its first event off": OK + framed(CHUNK[:50]),
    "streams what is no JSON": OK + framed(b"data: {oops\n\n"),
    "streams what is no chunk": OK + framed(b'data: {"choices": 3}\n\n'),
    "ends at once": OK + b"0\r\n\r\n",
    "reports an error": OK + framed(b'data: {"error": {"message": "out of memory"}}\n\n') + b"0\r\n\r\n",
}


@pytest.mark.parametrize("scripted", INVALID_ANSWERS.values(), ids=INVALID_ANSWERS)
def test_an_invalid_answer_before_the_first_byte_is_one_error(
    front: serving.Process, script: ScriptedEngine, scripted: bytes
) -> None:
    serving.all_up(front, 1)
    script.reply = scripted
    reply = chat(front, stream=True)
    error = reply.json()["error"]
    assert reply.status == 502 and error["code"] == "engine_error" and "pool/0" in error["message"]
    _check_recovery(front, script)


@pytest.mark.parametrize(
    "rest",
    [b"", b"0\r\n\r\n", framed(b'data: {"error": {"message": "gone"}}\n\n')],
    ids=["hangs up", "ends without done", "error"],
)
def test_a_break_or_an_error_event_ends_the_stream_with_an_error_and_done(
    front: serving.Process, script: ScriptedEngine, rest: bytes
) -> None:
    serving.all_up(front, 1)
    script.reply = OK + framed(CHUNK) + rest
    events = list(chat(front, stream=True).events())
    assert events[0]["choices"][0]["delta"]["content"] == "so"
    assert set(events[-2]) == {"error"} and events[-1] == "[DONE]"
    _check_recovery(front, script)


def test_an_event_that_is_no_json_is_passed_on_and_counted(front: serving.Process, script: ScriptedEngine) -> None:
    serving.all_up(front, 1)
    before = metric(front, "headway_unread_total")
    script.reply = OK + framed(CHUNK) + framed(b"data: nonsense\n\n") + framed(CHUNK) + DONE
    body = chat(front, stream=True).text().encode()
    assert [event[:14] for event in body.split(b"\n\n")] == [
        CHUNK[:14],
        b"data: nonsense",
        CHUNK[:14],
        b"data: [DONE]",
        b"",
    ]
    assert metric(front, "headway_unread_total") == before + 1
    _check_recovery(front, script)


def test_streamed_tool_calls_are_relayed(front: serving.Process, script: ScriptedEngine) -> None:
    serving.all_up(front, 1)
    calls = b'[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":"{}"}}]'
    event = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":%s}}]}\n\n' % calls
    script.reply = OK + framed(event) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    events = list(chat(front, stream=True, tools=[{"type": "function", "function": {"name": "f"}}]).events())
    assert events[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "f" and events[-1] == "[DONE]"
    assert len(events) == 2
    _check_recovery(front, script)


def test_keys_and_traces_reach_the_engine_and_other_headers_do_not(
    front: serving.Process, script: ScriptedEngine
) -> None:
    serving.all_up(front, 1)
    script.reply = WELL
    headers = {"Authorization": "Bearer k", "traceparent": "00-1-2-01", "X-Request-Id": "id-7", "Cookie": "secret"}
    assert chat(front, headers=headers).json() == {}
    head = script.request.split(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert {"authorization: bearer k", "traceparent: 00-1-2-01", "x-request-id: id-7"} <= set(head)
    assert "secret" not in "".join(head)


def test_clients_need_one_of_the_keys_and_engines_do_not_see_it(script: ScriptedEngine, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"open sesame").hexdigest()
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [script.url], gateway={"api_keys": ["0" * 64, digest]})), 1
    ) as front:
        script.reply = WELL
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open sesame"}):
            reply = chat(front, headers=headers)
            assert reply.status == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert chat(front, headers={"Authorization": "Bearer open sesame"}).json() == {}
        assert b"sesame" not in script.request


def test_a_stream_may_end_during_shutdown(tmp_path: Path) -> None:
    engine = serving.emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url]))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        events = chat(front, max_tokens=150, stream=True).events()
        next(events)
        front.process.terminate()
        rest = list(events)
        assert len(serving.answer_text(rest).split()) > 100 and rest[-1] == "[DONE]"
        front.process.wait(serving.PATIENCE_S)


def test_a_client_that_does_not_read_makes_the_engine_wait(front: serving.Process, script: ScriptedEngine) -> None:
    """The gateway does not buffer an answer without limit. Tokens are long, as the engine may generate only so many."""
    serving.all_up(front, 1)
    script.reply = OK + framed(CHUNK.replace(b"so", b"so" * 1000)) * 30_000
    before = _resident_bytes(front.process.pid)
    reply = chat(front, stream=True)
    sent = -1
    while script.num_sent != sent:  # until the engine has to wait
        sent = script.num_sent
        time.sleep(1)
    assert 0 < sent < len(script.reply)
    assert _resident_bytes(front.process.pid) - before < 0.3 * len(script.reply)
    assert metric(front, "headway_requests_in_flight") == 1
    reply.close()
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
