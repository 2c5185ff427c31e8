"""Requests of odd shapes, sent to a real llama.cpp server directly and through the gateway: the same answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import serving
from engines import LLAMA, NO_LLAMA

pytest.importorskip("httptools")
pytestmark = pytest.mark.skipif(NO_LLAMA, reason="pip install xllamacpp gguf")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAY = {"messages": [{"role": "user", "content": "hi"}]}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]}]}
ENDLESS = {"logit_bias": {"256": -100}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, SAY), (CHAT, {**SAY, "stream": True}), (CHAT, {**SAY, **USAGE}), (CHAT, PARTS), (CHAT, {**PARTS, **USAGE}),
    (CHAT, {**SAY, "n": 2, **ENDLESS}), (CHAT, {**SAY, "n": 1, "max_tokens": None, "stop": ["a", "b"]}),
    (CHAT, {**SAY, "n": 0}),
    (CHAT, {**SAY, "max_completion_tokens": 3, "max_tokens": None}), (CHAT, {**SAY, "max_tokens": 0}),
    (CHAT, {**SAY, "max_tokens": -1, "stop": ["a"]}), (CHAT, {**SAY, "max_tokens": 100_000, "stop": ["a", "b"]}),
    (CHAT, {**SAY, "logprobs": True, "top_logprobs": 2}), (CHAT, {**SAY, **USAGE, "logprobs": True}),
    (CHAT, {**SAY, "response_format": SCHEMA, "max_tokens": 4}), (CHAT, {**SAY, "response_format": {"type": "odd"}}),
    (CHAT, {**SAY, "tools": [TOOL]}), (CHAT, {**SAY, "tools": [TOOL], **USAGE}),
    (CHAT, {**SAY, "grammar": 'root ::= "Jc"'}),
    (CHAT, {**SAY, "service_tier": None, "user": "me", "metadata": {"a": 1}, "x": [None]}), (CHAT, {"messages": []}),
    (CHAT, {}), (CHAT, {"messages": "hi"}), (CHAT, {"messages": [{"role": "user"}]}), (CHAT, {"messages": [7]}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}), (CHAT, {**SAY, "stream_options": {}}),
    (CHAT, {**SAY, "temperature": "hot"}), (COMPLETIONS, {"prompt": "hi"}), (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": ["hi", "you"], **ENDLESS}), (COMPLETIONS, {"prompt": [300, 301]}), (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": [300, "hi"]}), (COMPLETIONS, {"prompt": "hi", "max_tokens": 0, "echo": True}),
    (COMPLETIONS, {"prompt": "hi", "stream": True}), (COMPLETIONS, {"prompt": "hi", "logprobs": 1}),
    (COMPLETIONS, {"prompt": "hi", "suffix": "you"}), ("/tokenize", {"content": "hi", "add_special": True}),
    ("/detokenize", {"tokens": [300, 301]}), ("/v1/embeddings", {"input": "hi"}), ("/v1/rerank", {"query": "a"}),
    ("/v1/messages", {**SAY}), ("/v1/messages/count_tokens", SAY), ("/v1/responses", {"input": "hi"}),
]  # fmt: skip
SHARED = {"model": "tiny-llama", "temperature": 0, "seed": 1, "cache_prompt": False, "max_tokens": 6}


@pytest.fixture(scope="module")
def engine() -> Iterator[serving.Process]:
    made = LLAMA.start()
    with serving.closing(made):
        yield made


@pytest.fixture(scope="module")
def front(engine: serving.Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    fleet = [{"name": "a", "model": "tiny-llama", "engine": "llama.cpp", "endpoints": [engine.url]}]
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    path.write_text(json.dumps({"fleet": fleet}))
    with serving.up(serving.gateway(path), 1) as made:
        yield made


_OWN = ("id", "created", "created_at", "completed_at", "item_id", "timings", "encrypted_content")
"""Ids and times. The timings at the end of a stream are with a chunk that only comes if the usage is asked for."""


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(each) for name, each in value.items() if name not in _OWN}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


def _answer(process: serving.Process, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=serving.PATIENCE_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    with closing(connection), connection.getresponse() as reply:
        data, kind = reply.read(), (reply.getheader("content-type") or "").partition(";")[0]
    if kind != "text/event-stream":
        return reply.status, kind, _without_ids(json.loads(data))
    events = [event for event in data.decode().split("\n\n") if event]
    return (
        reply.status,
        kind,
        [
            [
                line if not line.startswith("data: {") else _without_ids(json.loads(line[6:]))
                for line in event.split("\n")
            ]
            for event in events
        ],
    )


def test_answers_are_those_of_the_engine(engine: serving.Process, front: serving.Process) -> None:
    """Also of requests that it refuses. Choices of one answer may come in any order."""
    for path, fields in REQUESTS:
        body = {**SHARED, **fields}
        straight, through = _answer(engine, path, body), _answer(front, path, body)
        assert through == straight, (path, fields)
    assert len(REQUESTS) >= 40
    page = serving.send(front, "/metrics").text()
    assert "headway_ejections_total{" not in page


def test_each_choice_is_counted(front: serving.Process) -> None:
    def output_tokens() -> float:
        lines = serving.send(front, "/metrics").text().splitlines()
        counts = [line for line in lines if "tokens_total{" in line and 'kind="output"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in counts)

    before = output_tokens()
    for stream in (False, True):
        for path, prompt in ((CHAT, SAY), (COMPLETIONS, {"prompt": ["hi", "you"]})):
            body = {**SHARED, **prompt, **ENDLESS, "max_tokens": 10, "stream": stream, "n": 2 if path == CHAT else None}
            assert _answer(front, path, body)[0] == 200
    assert output_tokens() == before + 4 * 20
