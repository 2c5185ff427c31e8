"""Fallback pools, live: a hosted service answers while the fleet's own engine cannot, and no longer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from scripted import Exchange, ScriptedEngine, running

pytest.importorskip("httptools")
OWN_KEY, CLIENT_KEY, ENGINE_KEY = "of-the-service", "of-the-client", "of-the-engine"
HOSTED = "house-model"


class Service(ScriptedEngine):
    """Somebody's hosted model. It keeps the headers and bodies of all that it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str], Any]] = []

    def _keep(self, exchange: Exchange) -> None:
        self.seen.append((exchange.path, exchange.headers, exchange.json() if exchange.body else None))

    async def get(self, exchange: Exchange) -> None:
        self._keep(exchange)
        exchange.answer({"object": "list", "data": [{"id": "another"}, {"id": HOSTED}]})

    async def complete(self, exchange: Exchange) -> None:
        self._keep(exchange)
        if not exchange.json().get("stream"):
            exchange.chat(HOSTED)
            return
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for delta in ({"role": "assistant", "content": "hel"}, {"content": "lo"}):
            chunk = {"id": "s", "object": "chat.completion.chunk", "created": 1, "model": HOSTED}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": None}]
            exchange.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        exchange.send(b"data: [DONE]\n\n")
        exchange.close()


@pytest.fixture
def service() -> Iterator[Service]:
    with running(Service()) as made:
        yield made


def fleet(folder: Path, engine: str, service: Service, **changes: Any) -> Path:
    own = {
        "name": "chat",
        "model": serving.MODEL,
        "endpoints": [engine],
        "api": "vllm",
        "api_key": ENGINE_KEY,
        "fallback": ["hosted"],
    }
    hosted = {
        "name": "hosted",
        "model": HOSTED,
        "endpoints": [f"{service.url}/v1"],
        "hosted": {},
        "api_key": OWN_KEY,
        "usd_per_million_input_tokens": 1.0,
        "usd_per_million_output_tokens": 2.0,
    }
    keys = [{"sha256": sha256(CLIENT_KEY.encode()).hexdigest(), "name": "team"}]
    settings = {"scrape_period_s": 0.1, "api_keys": keys}
    data = {"fleet": [{**own, **changes.pop("own", {})}, hosted], "gateway": settings, **changes}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


HEADERS = {"Authorization": f"Bearer {CLIENT_KEY}"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hosted_service_answers_while_the_pool_is_down(workers: int, service: Service, tmp_path: Path) -> None:
    engine = serving.emulator("--output-tokens", "3", "--speed", "100")
    log, decisions = tmp_path / "access.jsonl", tmp_path / "decisions.jsonl"
    path = fleet(tmp_path, engine.url, service)
    options = ("--workers", str(workers), "--access-log", str(log), "--decisions", str(decisions))
    with serving.up(serving.gateway(path, *options), 2, engine) as front:
        home = serving.chat(front, headers=HEADERS)
        assert home.headers["x-headway-replica"] == "chat/0" and "x-headway-fallback" not in home.headers
        assert home.json()["model"] == serving.MODEL

        # One answer of 500: no other replica is left, so the service answers at once.
        serving.send(engine, "/emulator/failures", [500], method="PUT").text()
        again = serving.chat(front, headers=HEADERS)
        assert (again.headers["x-headway-replica"], again.headers["x-headway-fallback"]) == ("hosted/1", "rejects")
        assert again.json()["model"] == HOSTED

        port = engine.port
        engine.kill()
        away = serving.chat(front, headers=HEADERS)
        assert (away.headers["x-headway-replica"], away.headers["x-headway-fallback"]) == ("hosted/1", "down")
        assert away.headers["x-headway-model"] == HOSTED
        answer = away.json()
        assert answer["model"] == HOSTED and answer["choices"][0]["message"]["content"] == "hello"
        streamed = serving.chat(front, headers=HEADERS, stream=True)
        assert streamed.headers["x-headway-fallback"] == "down"
        events = list(streamed.events())
        assert serving.answer_text(events) == "hello" and events[-1] == "[DONE]"
        assert {event["model"] for event in events[:-1]} == {HOSTED}
        assert serving.metric(front, "headway_fallbacks_total") == 3

        engine = serving.emulator("--output-tokens", "3", "--speed", "100", port=port)
        with serving.closing(engine):
            serving.all_up(front, 2)
            back = serving.chat(front, headers=HEADERS)
            assert back.headers["x-headway-replica"] == "chat/0" and back.json()["model"] == serving.MODEL
        front.stop()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked = [(each["model"], each["answered_by"], each["fallback"]) for each in lines if each["path"].endswith("tions")]
    own, away = (serving.MODEL, None, None), (serving.MODEL, HOSTED, "down")
    expected = Counter([own, (serving.MODEL, HOSTED, "rejects"), away, away, own])
    assert Counter(asked) == expected, "workers write their lines when they come to it"
    logged = [json.loads(line) for line in decisions.read_text().splitlines()]
    fell = [(each["model"], each["why"]) for each in logged if each["what"] == "fallback"]
    assert fell == [(HOSTED, f"{serving.MODEL}: {why}") for why in ("rejects", "down", "down")]
    seen = service.seen
    posts = [(path, headers, body) for path, headers, body in seen if body is not None]
    assert len(posts) == 3 and {path for path, _, _ in posts} == {"/v1/chat/completions"}
    assert {body["model"] for _, _, body in posts} == {HOSTED}
    assert all(headers["authorization"] == f"Bearer {OWN_KEY}" for _, headers, _ in seen)
    assert CLIENT_KEY not in str(seen) and ENGINE_KEY not in str(seen)
