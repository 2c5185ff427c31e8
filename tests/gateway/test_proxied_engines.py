"""Engines that are merely proxied: any model name, no GPU, and a key of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from headway import scenario
from headway import serving as composition
from headway.core.errors import HeadwayError
from scripted import Exchange, ScriptedEngine, running

pytest.importorskip("httptools")
KEY = "of the engine"


class Guarded(ScriptedEngine):
    """An engine that answers nobody without its key, and keeps the keys that it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, list[str]]] = []

    async def get(self, exchange: Exchange) -> None:
        exchange.answer({"object": "list", "data": [{"id": "house-model"}]})

    async def complete(self, exchange: Exchange) -> None:
        self.seen.append({name: exchange.fields(name) for name in ("authorization", "x-api-key")})
        if exchange.headers.get("authorization") == f"Bearer {KEY.replace(' ', '-')}":
            exchange.chat("house-model")
        else:
            exchange.answer({"error": {"message": "who are you?"}}, 401)


@pytest.fixture
def engine() -> Iterator[Guarded]:
    with running(Guarded()) as made:
        yield made


def fleet(folder: Path, engine: Guarded, **pool: Any) -> Path:
    (folder / "key").write_text(KEY.replace(" ", "-") + "\n")
    entry = {"model": "house-model", "endpoints": [engine.url], "api_key": "${file:key}"}
    document = {"fleet": [{**entry, **pool}], "gateway": {"api_keys": ["${CLIENT_SUM}"]}}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_gets_its_own_key_and_never_the_clients(
    workers: int, engine: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_SUM", sha256(b"mine").hexdigest())
    front = serving.gateway(fleet(tmp_path, engine), "--workers", str(workers))
    with serving.closing(front):
        serving.until(lambda: serving.send(front, "/health", None).json()["up"] == 1)
        headers = {"Authorization": "Bearer mine"}
        body = {"model": "house-model", "messages": [{"role": "user", "content": "hi"}]}
        reply = serving.send(front, "/v1/chat/completions", body, headers)
        assert reply.status == 200 and reply.json()["choices"][0]["message"]["content"] == "hello"
        assert serving.send(front, "/v1/chat/completions", body, {}).status == 401
        listed = serving.send(front, "/v1/models", None, headers).json()["data"]
        assert [each["id"] for each in listed] == ["house-model"]
    expected = {"authorization": [f"Bearer {KEY.replace(' ', '-')}"], "x-api-key": []}
    assert engine.seen and all(each == expected for each in engine.seen)


def test_a_key_is_in_no_document(engine: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_SUM", sha256(b"mine").hexdigest())
    chosen, plan = composition.load(fleet(tmp_path, engine))
    assert plan.pools[0].api_key == "of-the-engine" and plan.settings.api_keys == (sha256(b"mine").hexdigest(),)
    text = json.dumps(chosen.document)
    assert "of-the-engine" not in text and sha256(b"mine").hexdigest() not in text and "${CLIENT_SUM}" in text


def test_what_is_only_proxied_cannot_be_simulated(engine: Guarded, tmp_path: Path) -> None:
    path = fleet(tmp_path, engine)
    chosen = scenario.load(path, {("workload",): ("", {"builtin": "chat", "num_requests": 10})})
    with pytest.raises(HeadwayError, match=r"fleet\[0\]\.gpu: missing; expected a GPU"):
        scenario.run(chosen)


def test_a_pool_without_a_gpu_needs_endpoints(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("fleet: [{model: house-model, replicas: 2}]\nworkload: {builtin: chat}\n")
    with pytest.raises(HeadwayError, match=r"fleet\[0\]\.gpu: missing; expected a GPU, or `endpoints`"):
        scenario.load(path)


@pytest.mark.parametrize("key", ["${NO_SUCH_KEY}", "two\nlines", "${file:nowhere}"])
def test_keys_that_cannot_be_used(key: str, engine: Guarded, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CLIENT_SUM", sha256(b"mine").hexdigest())
    with pytest.raises(HeadwayError, match=r"fleet\[0\]\.api_key: "):
        composition.load(fleet(tmp_path, engine, api_key=key))
