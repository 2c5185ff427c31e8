"""A request on its way to a fallback: its model fails or refuses it, but never in the middle of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway_in_process import Inside
from headway import serving as composition
from scripted import whole

pytest.importorskip("httptools")
CHAT = "qwen3-8b"
SERVICE = whole(
    b'{"id":"s","created":1,"model":"big-1","choices":[{"index":0,"message":{"content":"hosted"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}'
)
TOO_LONG = (
    b'{"error":{"message":"This model\'s maximum context length is 4096 tokens. However, you requested 9000",'
    b'"type":"BadRequestError","param":null,"code":400}}'
)


def refusal(status: int, body: bytes = b'{"error":{"message":"no"}}') -> list[bytes]:
    head = b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    return [head % (status, len(body), body)]


def event(content: str) -> bytes:
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": CHAT,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": content}}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def stream(*contents: str, done: bool = True) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    return [head, *map(event, contents), *([b"data: [DONE]\n\n"] if done else [])]


def write(folder: Path, urls: list[str], **sections: Any) -> Path:
    """Engine 0 is the model's own, 1 a hosted service, 2 (if there is one) stands by for the model."""
    own = {
        "name": "chat",
        "model": CHAT,
        "api": "vllm",
        "endpoints": urls[:1],
        "fallback": ["hosted", "spare"][: len(urls) - 1],
    }
    hosted = {"name": "hosted", "model": "big", "served_name": "big-1", "hosted": {}, "endpoints": urls[1:2]}
    spare = {"name": "spare", "model": CHAT, "api": "vllm", "endpoints": urls[2:]}
    data = {"fleet": [own, hosted, spare][: len(urls)], "gateway": {"scrape_period_s": 0.1}, **sections}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


Make = Callable[..., Inside]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Inside] = []

    def inside(num_engines: int = 2, **sections: Any) -> Inside:
        made.append(Inside(tmp_path, num_engines, write, **sections))
        made[0].engines[1].reply = [SERVICE]
        return made[0]

    yield inside
    made[0].close()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_fallback_answers_when_every_attempt_has_failed(make: Make, status: int) -> None:
    inside = make()
    inside.engines[0].reply = refusal(status)
    reply = inside.chat()
    assert reply.status == 200 and json.loads(reply.body)["model"] == "big-1"
    assert reply.headers["x-headway-fallback"] in ("rejects", "down") and reply.headers["x-headway-model"] == "big"
    assert inside.engines[1].bodies[0]["model"] == "big-1" and inside.num_in_flight == 0


@pytest.mark.parametrize("when", [[], ["slow"]])
def test_without_it_the_client_gets_the_engines_error(make: Make, when: list[str]) -> None:
    inside = make(policies={"fallback": {"when": when}})
    inside.engines[0].reply = refusal(500)
    reply = inside.chat()
    assert reply.status == 502 and inside.engines[1].bodies == []


def test_a_fallback_answers_what_the_engine_finds_too_long(make: Make) -> None:
    inside = make()
    inside.engines[0].reply = refusal(400, TOO_LONG)
    reply = inside.chat()
    assert reply.status == 200 and reply.headers["x-headway-fallback"] == "rejects"
    assert len(inside.engines[0].bodies) == 1
    inside.engines[1].reply = refusal(400, TOO_LONG.replace(b"4096", b"8192"))
    again = inside.chat()
    assert again.status == 400 and "8192" in again.error()["message"], "the last one's own words"


def test_other_refusals_are_the_requests_fault(make: Make) -> None:
    inside = make()
    inside.engines[0].reply = refusal(400)
    assert inside.chat().status == 400 and inside.engines[1].bodies == []


def test_an_engine_that_breaks_before_its_first_token_loses_the_request(make: Make) -> None:
    inside = make()
    inside.engines[0].reply, inside.engines[0].then = [], "reset"
    inside.engines[1].reply, inside.engines[1].then = stream("from", " afar"), "close"
    reply = inside.chat(stream=True)
    assert reply.headers["x-headway-replica"] == "hosted/1"
    assert [each["choices"][0]["delta"]["content"] for each in reply.events()[:-1]] == ["from", " afar"]


def test_another_model_never_goes_on_in_the_middle_of_an_answer(make: Make) -> None:
    inside = make(gateway={"scrape_period_s": 0.1, "hold_s": 0.2})
    inside.engines[0].reply, inside.engines[0].then = stream("some words", done=False), "reset"
    reply = inside.chat(stream=True)
    assert "x-headway-fallback" not in reply.headers
    assert "error" in reply.events()[-2] and inside.engines[1].bodies == []


def test_a_pool_that_stands_by_goes_on_where_the_model_broke(make: Make) -> None:
    inside = make(3)
    inside.engines[0].reply, inside.engines[0].then = stream("some words", done=False), "reset"
    inside.engines[2].reply, inside.engines[2].then = stream(" and more"), "close"
    reply = inside.chat(stream=True)
    contents = [each["choices"][0]["delta"].get("content") for each in reply.events()[:-1] if each.get("choices")]
    assert "".join(filter(None, contents)) == "some words and more"
    assert inside.engines[1].bodies == [] and len(inside.engines[2].bodies) == 1


def test_an_embedding_of_another_model_is_no_answer(make: Make) -> None:
    inside = make(3)
    inside.engines[0].reply = refusal(500)
    inside.engines[2].reply = [whole(b'{"data":[{"embedding":[1.0]}],"model":"qwen3-8b"}')]
    reply = inside.run(inside.post({"model": CHAT, "input": "hi"}, "/v1/embeddings"))
    assert reply.status == 200 and reply.headers["x-headway-replica"] == "spare/2"
    assert reply.headers["x-headway-model"] == f"{CHAT}@spare" and inside.engines[1].bodies == []


def test_a_hosted_service_gets_no_clients_key(make: Make) -> None:
    """Also where the fleet's own engines do, as the gateway has no keys of its own."""
    inside = make()
    inside.engines[0].reply = refusal(500)
    assert inside.chat(headers=[("authorization", "Bearer mine"), ("x-api-key", "mine")]).status == 200
    assert b"mine" in b"".join(inside.engines[0].heads)
    assert inside.engines[1].bodies and b"mine" not in b"".join(inside.engines[1].heads)


def test_a_fallback_is_asked_by_its_own_name(make: Make) -> None:
    inside = make(3)
    listed = json.loads(inside.run(inside.post(b"", "/v1/models", method="GET")).body)["data"]
    assert {each["id"] for each in listed} == {CHAT, "big", f"{CHAT}@spare"}
    reply = inside.chat(model=f"{CHAT}@spare")
    assert reply.headers["x-headway-replica"] == "spare/2" and "x-headway-fallback" not in reply.headers


def test_fallbacks_change_with_the_fleet_file(make: Make, tmp_path: Path) -> None:
    inside = make(policies={"fallback": {"when": []}})
    inside.engines[0].reply = refusal(429)
    assert inside.chat().status == 429
    urls = [replica.url for replica in inside.gateway.replicas]

    async def reconfigure(path: Path) -> list[str]:
        return inside.gateway.reconfigure(composition.load(path)[1])

    assert inside.run(reconfigure(write(tmp_path, urls))) == ["policies: fallback changed"]
    assert inside.chat().headers["x-headway-fallback"] == "rejects"
    document = yaml.safe_load((tmp_path / "fleet.yaml").read_text())
    document["fleet"][0]["fallback"] = []
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(document))
    assert inside.run(reconfigure(tmp_path / "fleet.yaml")) == ["fleet: other fallbacks"]
    assert inside.chat().status == 429
    assert [replica.url for replica in inside.gateway.fleet.present()] == urls, "no replica was replaced"
