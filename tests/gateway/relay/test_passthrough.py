"""Endpoints whose answers are passed on unchanged, called by OpenAI's own client if it has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batching
import serving
from batching import client
from scripted import OK, ScriptedEngine, framed
from serving import MODEL, metric, send, until

pytest.importorskip("httptools")
openai = pytest.importorskip("openai")
_closed = pytest.fixture(autouse=True)(batching.closed)


@pytest.fixture(scope="module")
def front(script: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [script.url])
    with serving.up(serving.gateway(path, "--records", str(path.parent / "records")), 1) as made:
        yield made


def _whole(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _streamed(events: list[dict[str, Any]]) -> bytes:
    chunks = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    return OK + b"".join(framed(chunk) for chunk in chunks) + b"0\r\n\r\n"


def _received(script: ScriptedEngine) -> tuple[str, dict[str, Any]]:
    head, _, body = script.request.partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), json.loads(body)


def _tokens(front: serving.Process, kind: str) -> float:
    lines = send(front, "/metrics").text().splitlines()
    start = f'headway_tokens_total{{model="{MODEL}",kind="{kind}"}}'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


def test_embeddings(front: serving.Process, script: ScriptedEngine) -> None:
    data = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    script.reply = _whole({"object": "list", "model": MODEL, "data": data, "usage": usage})
    before = _tokens(front, "input"), _tokens(front, "output")
    got = client(front).embeddings.create(model=MODEL, input=["a b", "c d"], encoding_format="float")
    assert got.data[0].embedding == [0.5, -1.0]
    path, body = _received(script)
    assert path == "/v1/embeddings" and body["input"] == ["a b", "c d"]
    assert (_tokens(front, "input"), _tokens(front, "output")) == (before[0] + 4, before[1])


RESPONSE: dict[str, Any] = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": "completed", "output": [],
    "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    "usage": {
        "input_tokens": 3, "output_tokens": 7, "total_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 2},
    },
}  # fmt: skip


def _response_events(deltas: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The events of a response without its last one."""
    events = [{"type": "response.created", "response": {**RESPONSE, "status": "in_progress", "usage": None}}]
    events += [
        {"type": f"response.{kind}.delta", "delta": text, "item_id": "i", "output_index": 0, "content_index": 0}
        for kind, text in deltas
    ]
    return [{**each, "sequence_number": i} for i, each in enumerate(events)]


DONE = {"type": "response.completed", "response": RESPONSE, "sequence_number": 9}


def test_responses(front: serving.Process, script: ScriptedEngine) -> None:
    openai_client = client(front)
    script.reply = _whole(RESPONSE)
    before = _tokens(front, "output")
    assert openai_client.responses.create(model=MODEL, input="hello").usage.output_tokens == 7
    path, body = _received(script)
    assert path == "/v1/responses" and body == {"model": MODEL, "input": "hello"}
    script.reply = _streamed(
        [*_response_events([("reasoning_text", "hm"), ("output_text", "so"), ("output_text", " it")]), DONE]
    )
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    events = list(openai_client.responses.create(model=MODEL, input=messages, stream=True))
    assert [event.type for event in events][-1] == "response.completed" and len(events) == 5
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "so it"
    assert _received(script)[1]["input"] == messages and "stream_options" not in _received(script)[1]
    assert _tokens(front, "output") == before + 14
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_messages_of_anthropics_clients(front: serving.Process, script: ScriptedEngine) -> None:
    start = {"id": "msg_1", "type": "message", "role": "assistant", "usage": {"input_tokens": 5, "output_tokens": 1}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "so"}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
    script.reply = _streamed([{"type": "message_start", "message": start}, delta, delta, end, {"type": "message_stop"}])
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "system": "be brief",
        "stream": True,
        "messages": [{"role": "user", "content": "hi"}],
    }
    before = _tokens(front, "input"), _tokens(front, "output")
    reply = send(front, "/v1/messages", body, {"x-api-key": "k", "anthropic-version": "2023-06-01"})
    assert reply.status == 200
    types = [event["type"] for event in reply.events()]
    assert types == ["message_start", "content_block_delta", "content_block_delta", "message_delta", "message_stop"]
    assert b"x-api-key: k" in script.request and b"anthropic-version: 2023-06-01" in script.request
    assert _received(script)[1] == body
    assert (_tokens(front, "input"), _tokens(front, "output")) == (before[0] + 5, before[1] + 2)


def test_a_stream_that_breaks_ends_with_an_error_event_of_its_endpoint(
    front: serving.Process, script: ScriptedEngine
) -> None:
    script.reply = _streamed(_response_events([("output_text", "so")]))
    events = list(send(front, "/v1/responses", {"model": MODEL, "input": "a", "stream": True}).events())
    assert events[-1]["type"] == "error" and events[-1]["error"]["code"] == "engine_error"
    assert "[DONE]" not in events
    script.reply = _whole(RESPONSE)
    until(lambda: send(front, "/v1/responses", {"model": MODEL, "input": "a"}).json().get("id") == "resp_1")
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_an_engines_404_reaches_the_client(front: serving.Process, script: ScriptedEngine) -> None:
    script.reply = b'HTTP/1.1 404 Not Found\r\nContent-Length: 21\r\n\r\n{"detail":"Not Found"}'[:-1]
    with pytest.raises(openai.NotFoundError):
        client(front).responses.create(model=MODEL, input="hello")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"model": 7}, "'model'"),
        ("/v1/responses", {"model": MODEL, "input": "a", "priority": -1}, "tier"),
        ("/v1/messages", {"model": "no", "messages": [{}]}, "model"),
    ],
)
def test_invalid_requests(front: serving.Process, path: str, body: Any, words: str) -> None:
    reply = send(front, path, body)
    assert 400 <= reply.status < 500 and words in reply.json()["error"]["message"]


def test_passed_on_answers_are_recorded(front: serving.Process, script: ScriptedEngine, tmp_path: Path) -> None:
    from headway import records

    folder = tmp_path / "records"
    with serving.up(serving.gateway(serving.fleet_file(tmp_path, [script.url]), "--records", str(folder)), 1) as made:
        script.reply = _whole(RESPONSE)
        send(made, "/v1/responses", {"model": MODEL, "input": "a"}).json()
        made.stop()
    ran, _ = records.load(folder)
    assert ran.requests["generated_tokens"].tolist() == [7] and ran.workload["prompt_tokens"].tolist() == [3]
