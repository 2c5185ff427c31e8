"""The gateway as its clients see it, in front of two emulated engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import serving
from serving import MODEL, answer_text, chat, metric, send, until

pytest.importorskip("httptools")


@pytest.fixture(scope="module")
def front(engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    path = serving.fleet_file(
        tmp_path_factory.mktemp("fleet"), [engine.url for engine in engines], gateway={"max_body_bytes": 1 << 20}
    )
    with serving.up(serving.gateway(path), 2) as made:
        yield made


def test_an_answer_is_the_engines_own(front: serving.Process, engines: list[serving.Process]) -> None:
    through = chat(front, max_tokens=7)
    answer = through.json()
    straight = chat(engines[0], max_tokens=7).json()
    assert through.status == 200 and through.headers["x-headway-replica"].startswith("pool/")
    assert answer["choices"] == straight["choices"] and answer["usage"] == straight["usage"]


def test_a_stream_comes_token_by_token_and_ends_with_done(front: serving.Process) -> None:
    reply = chat(front, max_tokens=20, stream=True)
    events = list(reply.events())
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"  # a busy engine sends several tokens in one event
    assert answer_text(events) == chat(front, max_tokens=20).json()["choices"][0]["message"]["content"]
    heads = {(event["id"], event["created"], event["model"]) for event in events[:-1]}
    assert len(heads) == 1
    assert not any("usage" in event for event in events[:-1])
    assert not any("token_ids" in choice for event in events[:-1] for choice in event["choices"])


def test_usage_comes_last_on_request(front: serving.Process) -> None:
    events = list(chat(front, max_tokens=5, stream=True, stream_options={"include_usage": True}).events())
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 5


def test_completions_have_token_ids_on_request(front: serving.Process) -> None:
    body = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 4, "stream": True, "return_token_ids": True}
    events = list(send(front, "/v1/completions", body).events())
    assert sum(len(choice["token_ids"]) for event in events[:-1] for choice in event["choices"]) == 4
    text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
    whole = send(front, "/v1/completions", {**body, "stream": False}).json()
    assert whole["choices"][0]["text"] == text and whole["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", b'{"model"', 400, "not valid JSON"),
        ("/v1/chat/completions", b"[1]", 400, "JSON object"),
        ("/v1/chat/completions", {"model": 3, "messages": [{}]}, 400, "'model' must be of type string"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{}], "n": "two"}, 400, "'n' must be of type integer"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{}], "stream": "yes"}, 400, "stream"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{}], "priority": -1}, 400, "tier"),
        ("/v1/chat/completions", {"model": "qwen3-9b", "messages": [{}]}, 404, f"did you mean '{MODEL}'?"),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 50_000}, 400, "50,000 prompt tokens and"),
        ("/v1/completions", b'{"model": "' + b"x" * (1 << 20) + b'"}', 413, "longer than"),
        ("/v1/nothing", {}, 404, "there is no /v1/nothing"),
        ("/chat/completions", {}, 404, "there is no /chat/completions; did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", {}, 404, "did you mean /v1/chat/completions?"),
        ("/" + "v" * 200, {}, 404, "v" * 200),
        ("/v1/chat/completions", None, 405, "GET"),
    ],
)
def test_errors_are_openais_error_objects(
    front: serving.Process, path: str, body: Any, status: int, words: str
) -> None:
    reply = send(front, path, body)
    error = reply.json()["error"]
    assert reply.status == status and words in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["code"], str)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": []}, 200),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, 200),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{}], "max_tokens": 0}, 200),
        ("/v1/chat/completions", {"model": MODEL, "messages": [3]}, 400),
        ("/v1/completions", {"model": MODEL, "prompt": {"a": 1}}, 400),
    ],
)
def test_what_the_gateway_need_not_know_is_judged_by_the_engine(
    front: serving.Process, engines: list[serving.Process], path: str, body: dict[str, Any], status: int
) -> None:
    through, straight = send(front, path, body), send(engines[0], path, body)
    assert through.headers["x-headway-replica"].startswith("pool/")
    assert through.status == straight.status == status
    answer, expected = through.json(), straight.json()
    assert [answer.get(key) for key in ("error", "choices")] == [expected.get(key) for key in ("error", "choices")]


def test_models_version_and_ids(front: serving.Process) -> None:
    assert [model["id"] for model in send(front, "/v1/models").json()["data"]] == [MODEL]
    assert send(front, "/version").json()["version"]
    assert _request_id(front, "abc-1") == "abc-1"
    assert _request_id(front, "a b") != "a b" and len(_request_id(front, "a b")) == 32


def _request_id(front: serving.Process, given: str) -> str:
    reply = chat(front, max_tokens=1, headers={"X-Request-Id": given})
    reply.json()
    return reply.headers["x-request-id"]


def test_a_client_that_leaves_stops_its_engine(front: serving.Process, engines: list[serving.Process]) -> None:
    reply = chat(front, max_tokens=30_000, ignore_eos=True, stream=True)
    next(iter(reply.events()))
    assert sum(metric(engine, "vllm:num_requests_running") for engine in engines) == 1
    reply.close()
    until(lambda: not any(metric(engine, "vllm:num_requests_running") for engine in engines))
    until(lambda: metric(front, "headway_requests_in_flight") == 0)
    cancelled = 'headway_requests_total{model="qwen3-8b",pool="pool",tier="0",outcome="cancelled"}'
    assert f"{cancelled} " in send(front, "/metrics").text()


def test_a_client_that_leaves_before_the_first_byte_stops_its_engine(
    front: serving.Process, engines: list[serving.Process]
) -> None:
    connection = serving.http.client.HTTPConnection("127.0.0.1", front.port)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 30_000}
    connection.request("POST", "/v1/chat/completions", serving.json.dumps(body))
    until(lambda: sum(metric(engine, "vllm:num_requests_running") for engine in engines) == 1)
    connection.close()
    until(lambda: not any(metric(engine, "vllm:num_requests_running") for engine in engines))
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_concurrent_requests_are_spread_evenly(front: serving.Process) -> None:
    replies = [chat(front, max_tokens=300, stream=True) for _ in range(8)]
    where = [reply.headers["x-headway-replica"] for reply in replies]
    assert sorted(where) == ["pool/0"] * 4 + ["pool/1"] * 4
    readers = [threading.Thread(target=list, args=(reply.events(),)) for reply in replies]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_an_engines_refusal_is_relayed(front: serving.Process) -> None:
    reply = chat(front, max_tokens=3, n=500)
    assert reply.status == 400 and "n must be" in reply.json()["error"]["message"]
    until(lambda: metric(front, "headway_requests_in_flight") == 0)
