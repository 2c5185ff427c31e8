"""Answers of every shape that engines send: clients get them as they would without a gateway, and no engine fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

import serving
from gateway_in_process import Inside, Reply
from headway.gateway.relay.request_reader import read_request
from scripted import OK, framed, whole
from workers_in_process import has_heard, hire

WORDS = ("One", " two", " three.")
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "workers"])
def inside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """Two engines, of which one alone may be taken out. Requests come in by workers, or by the gateway itself."""
    pool = {"api": "openai"}
    made = Inside(tmp_path_factory.mktemp("fleet"), 2, pool=pool, gateway={"scrape_period_s": 3600.0})
    app = made.app
    made.workers = hire(made, request.param) if request.param else []  # type: ignore[attr-defined]
    yield made
    for worker in made.workers:  # type: ignore[attr-defined]
        made.run(worker.stop())
    made.app = app
    made.close()


def _data(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def _chunk(**choice: Any) -> dict[str, Any]:
    choices = [{"index": 0, "finish_reason": None, **choice}]
    return {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}


_USAGE = {"prompt_tokens": 1000, "completion_tokens": 3, "total_tokens": 1003}
ROLE, FINISH = _data(_chunk(delta={"role": "assistant", "content": ""})), _data(_chunk(delta={}, finish_reason="stop"))
SAID = [_data(_chunk(delta={"content": word})) for word in WORDS]
END = _data({**_chunk(), "choices": [], "usage": _USAGE})
DONE = b"data: [DONE]\n\n"


def _streamed(*events: bytes) -> list[bytes]:
    return [OK, *map(framed, events), b"0\r\n\r\n"]


def _ask(inside: Inside, reply: list[bytes], path: str = CHAT, stream: bool = True, **fields: Any) -> Reply:
    for engine in inside.engines:
        engine.reply, engine.then = reply, "keep"
        engine.bodies.clear()
    body = {
        "model": serving.MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "max_tokens": 99,
        "stream": stream,
        **fields,
    }
    reply: Reply = inside.run(inside.post(body, path))
    workers = inside.workers  # type: ignore[attr-defined]
    inside.run(inside.until(lambda: has_heard(inside, workers)))
    return reply


def _metric(inside: Inside, text: str) -> float:
    page = "\n".join(inside.gateway.metrics.lines())
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("headway_") and text in line
    )


def _check_well(inside: Inside, num_executions: int = 1) -> None:
    """No engine has failed, and each execution was needed."""
    monitor = inside.gateway.health
    assert [monitor.is_up(replica) for replica in inside.gateway.replicas] == [True, True]
    assert all(breaker.num_failures == 0 for breaker in monitor.breakers.values())
    assert sum(len(engine.bodies) for engine in inside.engines) == num_executions and not inside.faults
    assert inside.num_in_flight == 0


def _odd(event: bytes) -> list[bytes]:
    return [ROLE, SAID[0], event, *SAID[1:], FINISH, END, DONE]


STREAMS: dict[str, tuple[list[bytes], int]] = {
    "choices null": ([ROLE, *SAID, FINISH, _data({**_chunk(), "choices": None, "usage": _USAGE}), DONE], 1000),
    "content in parts": (_odd(_data(_chunk(delta={"content": [{"type": "thinking", "thinking": "hm"}]}))), 1000),
    "null": (_odd(_data(b"null")), 1000),
    "an array": (_odd(_data(b"[1, 2]")), 1000),
    "a number": (_odd(_data(b"7")), 1000),
    "no JSON": (_odd(_data(b'{"choices": [{"ind')), 1000),
    "not UTF-8": (_odd(_data(b'{"note": "\xff"}')), 1000),
    "NaN": (_odd(_data(b'{"choices": [{"index": 0, "delta": {}, "logprobs": {"x": NaN}}]}')), 1000),
    "a type of its own": (_odd(_data({"type": "progress", "percent": 7})), 1000),
    "a named event": (_odd(b"event: progress\nid: 7\ndata: {}\n\n"), 1000),
    "a comment": (_odd(b": processing\n\n"), 1000),
    "empty data": (_odd(b"data:\n\n"), 1000),
    "error null": (_odd(_data({**_chunk(delta={"content": ""}), "error": None})), 1000),
    "delta null": (_odd(_data(_chunk(delta=None))), 1000),
    "usage null field": ([ROLE, *SAID, FINISH, _data({"choices": [], "usage": {**_USAGE, "completion_tokens": None}}),
                          DONE], 1000),
    "usage of zeros first": ([_data({**_chunk(delta={"content": WORDS[0]}), "usage": {"prompt_tokens": 0,
                              "completion_tokens": 0}}), *SAID[1:], FINISH, END, DONE], 1000),
    "usage in the choice": ([ROLE, *SAID, _data(_chunk(delta={}, finish_reason="stop", usage=_USAGE)), DONE], 1000),
    "usage by other names": ([ROLE, *SAID, FINISH, _data({"choices": [], "usage": {"input_tokens": 1000,
                              "output_tokens": 3}}), DONE], 1000),
    "done with a space": ([ROLE, *SAID, FINISH, END, b"data: [DONE] \n\n"], 1000),
    "done without one": ([ROLE, *SAID, FINISH, END, b"data:[DONE]\n\n"], 1000),
    "no done": ([ROLE, *SAID, FINISH, END], 1000),
    "no blank line at the end": ([ROLE, *SAID, FINISH, END, b"data: [DONE]"], 1000),
    "CRLF": ([event.replace(b"\n", b"\r\n") for event in (ROLE, *SAID, FINISH, END, DONE)], 1000),
    "CR": ([event.replace(b"\n", b"\r") for event in (ROLE, *SAID, FINISH, END, DONE)], 1000),
    "data in lines": ([ROLE, *SAID[:2], b'data: {"id": "a", "choices":\ndata: [{"index": 0, "delta": {"content": '
                       b'" three."}}]}\n\n', FINISH, END, DONE], 1000),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"logprobs": True}], ids=["plain", "logprobs"])
@pytest.mark.parametrize(("events", "prompt_tokens"), STREAMS.values(), ids=STREAMS)
def test_chunks(inside: Inside, events: list[bytes], prompt_tokens: int, options: dict[str, Any]) -> None:
    """Everything that was sent is there, in order, and the tokens are counted."""
    before = _metric(inside, 'kind="input"'), _metric(inside, 'kind="output"')
    reply = _ask(inside, _streamed(*events), stream_options={"include_usage": True}, **options)
    assert reply.status == 200 and b'"error": {' not in reply.body and b"engine_error" not in reply.body
    sent = b"".join(events).replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"[DONE] ", b"[DONE]")
    sent = sent.replace(b"data:[DONE]", b"data: [DONE]").rstrip(b"\n")
    assert reply.body == (sent if b"[DONE]" in sent else sent + b"\n\ndata: [DONE]") + b"\n\n"
    _check_well(inside)
    after = _metric(inside, 'kind="input"'), _metric(inside, 'kind="output"')
    assert after == (before[0] + prompt_tokens, before[1] + 3)


def test_what_cannot_be_read_is_counted_and_named(inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    before = _metric(inside, "unread_total")
    workers = inside.workers  # type: ignore[attr-defined]
    for replica in (*inside.gateway.replicas, *(each for one in workers for each in one.scheduler._replicas.values())):
        replica.noted.clear()
    for _ in range(4):
        _ask(inside, _streamed(*_odd(_data(b"[1]"))))
    assert _metric(inside, "unread_total") == before + 4
    named = [each.getMessage() for each in caplog.records if "passed on and not read" in each.getMessage()]
    assert 1 <= len(named) <= 2 * max(len(workers), 1) and "JSON that is no object" in named[0]


WHOLES = [
    b'{"choices":[{"index":0,"message":{"content":[{"type":"text","text":"a"}]}}],"usage":{"prompt_tokens":9.0}}',
    b'{"choices":null}',
    b"[]",
    b"null",
    b"<html>busy</html>",
    b'{"choices":[{"logprobs":NaN}]}',
    b"\xff",
    b"",
    b'{"error":null,"id":7}',
]


_WHOLE_PATHS = (
    CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings", "/rerank", "/v2/rerank", "/pooling", "/classify",
    "/tokenize", "/v1/messages/count_tokens", "/score",
)  # fmt: skip


@pytest.mark.parametrize("path", _WHOLE_PATHS)
def test_whole_answers(inside: Inside, path: str) -> None:
    for body in WHOLES:
        reply = _ask(inside, [whole(body)], path, stream=False, query="q", documents=["d"])
        assert (reply.status, reply.body) == (200, body)
        _check_well(inside)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "audio/wav",
        "text/html; charset=utf-8",
        "application/octet-stream",
        "text/plain",
        "application/x-ndjson",
        "application/json",
    ],
)
def test_other_content_types(inside: Inside, kind: str, stream: bool) -> None:
    data = bytes(range(256)) * 40
    for path in (CHAT, "/v1/audio/speech", "/v1/embeddings"):
        for head in (b"Content-Length: %d\r\n\r\n" % len(data), b"Transfer-Encoding: chunked\r\n\r\n"):
            body = data if b"Length" in head else framed(data[:100]) + framed(data[100:]) + b"0\r\n\r\n"
            reply = _ask(
                inside, [b"HTTP/1.1 200 OK\r\nContent-Type: " + kind.encode() + b"\r\n" + head, body], path, stream
            )
            assert (reply.status, reply.headers["content-type"], reply.body) == (200, kind, data) and reply.is_whole
            _check_well(inside)


REFUSALS: dict[str, bytes] = {
    "vllm": b'{"error": {"message": "too long by test", "type": "BadRequestError", "param": null, "code": 400}}',
    "a code in text": b'{"error": {"message": "too long by test", "type": "x", "code": "400"}}',
    "a name": b'{"error": {"message": "too long by test", "type": "invalid_request_error", "code": null}}',
    "the object": b'{"object": "error", "message": "too long by test", "type": "BadRequestError", "code": 400}',
    "tgi": b'{"error": "too long by test", "error_type": "validation"}',
    "anthropic": b'{"type": "error", "error": {"type": "invalid_request_error", "message": "too long by test"}}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_in_an_answer_is_one(inside: Inside, refusal: bytes, path: str) -> None:
    """Streamed, after events without tokens, and whole. At most one peer confirms it."""
    first = {
        CHAT: ROLE,
        COMPLETIONS: _data(_chunk(text="")),
        RESPONSES: _data({"type": "response.created"}),
        MESSAGES: _data({"type": "message_start", "message": {}}),
    }[path]
    named = b"event: error\ndata: " + refusal + b"\n\n"
    for reply in (
        _streamed(_data(refusal), DONE),
        _streamed(first, _data(refusal), DONE),
        _streamed(named),
        _streamed(b"error: " + refusal + b"\n\n"),
        [whole(refusal)],
    ):
        got = _ask(inside, reply, path, stream=len(reply) > 1)
        assert got.status == 400 and json.loads(got.body)["error"]["message"] == "too long by test", got.body
        num = sum(len(engine.bodies) for engine in inside.engines)
        assert num <= 2
        _check_well(inside, num)


def test_a_refusal_that_a_peer_does_not_confirm_is_the_replicas(inside: Inside) -> None:
    bad = _streamed(_data(REFUSALS["vllm"]), DONE)
    _ask(inside, _streamed(ROLE, *SAID, FINISH, DONE))
    for _ in range(3):  # until the first one is asked first
        inside.engines[0].reply, inside.engines[1].reply = bad, _streamed(ROLE, *SAID, FINISH, DONE)
        for engine in inside.engines:
            engine.bodies.clear()
        body = {"model": serving.MODEL, "messages": [{"role": "user", "content": "y"}], "stream": True}
        reply = inside.run(inside.post(body, CHAT))
        assert reply.status in (200, 400)
    assert inside.gateway.health.is_up(inside.gateway.replicas[1])


def test_an_error_in_mid_stream_ends_the_answer(inside: Inside) -> None:
    """One with a status below 500 is the request's, and reaches the client; no other engine is asked."""
    reply = _ask(inside, _streamed(ROLE, SAID[0], _data(REFUSALS["vllm"]), DONE), n=1)
    events = reply.events()
    assert events[-1] == "[DONE]" and events[-2]["error"]["message"] == "too long by test"
    _check_well(inside)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_an_error_event_of_an_answer_that_is_passed_on_comes_as_it_is(inside: Inside, path: str) -> None:
    kind = "response.output_text.delta" if path == RESPONSES else "content_block_delta"
    error = b'event: error\ndata: {"type": "error", "error": {"type": "api_error", "message": "died"}}\n\n'
    events = [_data({"type": kind, "delta": "a"}), error]
    reply = _ask(inside, _streamed(*events), path)
    assert reply.body == b"".join(events)
    failures = [breaker.num_failures for breaker in inside.gateway.health.breakers.values()]
    assert sum(failures) == 1
    for replica in inside.gateway.replicas:
        inside.gateway.health.succeeded(replica)


def _several(*events: tuple[int | None, Any]) -> list[bytes]:
    """Chunks of choices: (index or None, text or usage)."""
    made = []
    for index, what in events:
        chunk = _chunk() | {"choices": []}
        if index is not None:
            choice: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": None}
            if what == "end":
                choice["finish_reason"] = "length"
            elif isinstance(what, str):
                choice["delta"] = {"content": what}
            chunk["choices"] = [choice]
        if isinstance(what, dict):
            chunk |= what
        made.append(_data(chunk))
    return made


def _of(tokens: int, timed: bool = False) -> dict[str, Any]:
    timings = {"timings": {"prompt_n": 1, "predicted_n": tokens}} if timed else {}
    return {"usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}, **timings}


SEVERAL: dict[str, tuple[list[tuple[int | None, Any]], int]] = {
    "total at the end": ([(0, "a"), (1, "b"), (0, "end"), (1, "end"), (None, _of(40))], 40),
    "each at its end": ([(0, "a"), (0, "end"), (None, _of(20)), (1, "b"), (1, "end"), (None, _of(20))], 40),
    "each at its end, timed": ([(0, "a"), (0, "end"), (1, "end"), (None, _of(20, True)), (None, _of(20, True))], 40),
    "with each chunk, then the total": ([(0, _of(10)), (1, _of(12)), (0, "end"), (1, "end"), (None, _of(22))], 22),
    "with each chunk": ([(0, _of(10)), (1, _of(12)), (0, _of(11)), (1, _of(13)), (0, "end"), (1, "end")], 24),
    "none": ([(0, "a"), (1, "b"), (0, "c"), (0, "end"), (1, "end")], 3),
    "the total twice": ([(0, "a"), (1, "b"), (0, "end"), (1, "end"), (None, _of(40)), (None, _of(40))], 40),
}


@pytest.mark.parametrize(("events", "tokens"), SEVERAL.values(), ids=SEVERAL)
def test_tokens_of_several_choices(inside: Inside, events: list[tuple[int | None, Any]], tokens: int) -> None:
    before = _metric(inside, 'kind="output"')
    assert _ask(inside, _streamed(*_several(*events), DONE), n=2).status == 200
    assert _metric(inside, 'kind="output"') == before + tokens


@pytest.mark.parametrize(
    ("more", "tokens"), [(_of(20, True), 40), (_of(40), 40), ({**_of(20), "timings": {"predicted_n": 9}}, 20)]
)
def test_tokens_of_several_whole_choices(inside: Inside, more: dict[str, Any], tokens: int) -> None:
    """llama.cpp's usage is one choice's, as its timings show."""
    before = _metric(inside, 'kind="output"')
    choices = [{"index": i, "message": {"content": "a"}, "finish_reason": "length"} for i in range(2)]
    assert _ask(inside, [whole(json.dumps({"choices": choices, **more}).encode())], stream=False, n=2).status == 200
    assert _metric(inside, 'kind="output"') == before + tokens


def test_choices_are_not_compared_with_the_times_of_one_sequence(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are counted together, so they would seem to decode as many times as fast: to the drift, and beside
    the peers of their replica."""
    compared: list[str] = []
    stalls = inside.gateway._stalls
    monkeypatch.setattr(inside.gateway.telemetry.drift, "add", lambda *args: compared.append("drift"))
    monkeypatch.setattr(stalls._outliers, "observe", lambda replica, kind, *args: compared.append(kind))
    stalls._num_learnt.clear()  # few answers a second are learned from
    assert _ask(inside, _streamed(*SAID, FINISH, END, DONE)).status == 200
    assert sorted(compared) == ["between tokens", "drift", "first token"]
    compared.clear()
    stalls._num_learnt.clear()
    assert _ask(inside, _streamed(*_several((0, "a"), (1, "b"), (0, "end"), (1, "end")), DONE), n=2).status == 200
    assert compared == ["first token"]


def test_a_fleet_of_one_model_needs_no_name(inside: Inside) -> None:
    reply = _ask(inside, [whole()], stream=False, model=None)
    assert reply.status == 200 and sum(len(engine.bodies) for engine in inside.engines) == 1


@pytest.mark.parametrize("num_workers", [0, 2], ids=["one process", "workers"])
def test_an_engine_whose_stream_breaks_has_to_show_a_longer_one(tmp_path: Path, num_workers: int) -> None:
    made = Inside(tmp_path, 2, pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0})
    app = made.app
    workers = hire(made, num_workers) if num_workers else []
    broken, sound = made.engines
    broken.reply, broken.then = [OK, framed(ROLE), *map(framed, SAID)], "reset"
    sound.reply = _streamed(ROLE, *SAID, FINISH, END, DONE)
    body = {"model": serving.MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    while not broken.bodies:
        assert made.run(made.post(body, CHAT)).events()[-1] == "[DONE]"
    made.run(made.until(lambda: made.gateway.health.breakers[0].canary_tokens > len(SAID)))
    made.run(made.until(lambda: has_heard(made, workers)))
    for worker in workers:
        made.run(worker.stop())
    made.app = app
    made.close()


# Responses that engines keep.


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "random"])
def test_a_response_is_continued_where_it_was_made(tmp_path: Path, routing: str) -> None:
    made = Inside(
        tmp_path, 4, pool={"api": "openai"}, policies={"routing": routing}, gateway={"scrape_period_s": 3600.0}
    )
    for i, engine in enumerate(made.engines):
        engine.reply = [whole(b'{"object":"response","id":"resp_%d","status":"completed","error":null}' % i)]
    body = {"model": serving.MODEL, "input": "hello", "store": True}
    for _ in range(6):
        first = json.loads(made.run(made.post(body, RESPONSES)).body)["id"]
        again = made.run(made.post({**body, "previous_response_id": first}, RESPONSES))
        assert json.loads(again.body)["id"] == first
    keeper = made.engines[int(first[5:])]
    made.run(made.post(b"", f"{RESPONSES}/{first}/cancel"))
    assert any(head.startswith(b"GET") or b"cancel" in head for head in keeper.heads)
    keeper.reply = [b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"]
    num = sum(len(engine.bodies) for engine in made.engines)
    assert made.run(made.post({**body, "previous_response_id": first}, RESPONSES)).status == 404
    assert sum(len(engine.bodies) for engine in made.engines) == num + 1  # no other engine can know it
    made.close()


def test_what_a_response_continues_is_reserved(tmp_path: Path) -> None:
    """Its tokens as the engine counted them, which the body of the next request does not have."""
    made = Inside(tmp_path, pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0})
    made.engines[0].reply = [
        whole(
            b'{"object":"response","id":"resp_1","status":"completed","error":null,'
            b'"usage":{"input_tokens":9000,"output_tokens":700,"total_tokens":9700}}'
        )
    ]
    body = {"model": serving.MODEL, "input": "hello", "store": True, "max_output_tokens": 5}
    assert made.run(made.post(body, RESPONSES)).status == 200

    def most_input(**fields: str) -> int:
        raw = json.dumps({**body, **fields}).encode()
        return made.gateway.admission.most_tokens(read_request(RESPONSES, raw, {}).features(0.0)).input

    alone, more = most_input(), most_input(previous_response_id="resp_1")
    assert alone < 20 and 9700 <= more < 9720 and most_input(previous_response_id="resp_2") < 40
    made.close()


def test_a_response_that_is_not_known_is_looked_for_at_all_engines(tmp_path: Path) -> None:
    made = Inside(tmp_path, 3, pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0})
    made.engines[2].kept = {"/v1/responses/resp_x": b'{"object":"response","id":"resp_x"}'}
    for engine in made.engines:
        engine.reply = [whole(b'{"object":"response","id":"resp_y"}')]
    body = {"model": serving.MODEL, "input": "and?", "previous_response_id": "resp_x"}
    assert made.run(made.post(body, RESPONSES)).status == 200
    assert [len(engine.bodies) for engine in made.engines] == [0, 0, 1]
    got = made.run(made.post(b"", f"{RESPONSES}/resp_x", method="GET"))
    assert (got.status, json.loads(got.body)["id"]) == (200, "resp_x")
    assert made.run(made.post(b"", f"{RESPONSES}/resp_z", method="GET")).status == 404
    made.close()
