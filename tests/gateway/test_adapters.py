"""LoRA adapters of engines: found at /v1/models, listed, routed by name, loaded and unloaded while the gateway runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import serving
from headway.records.parquet import load
from scripted import ScriptedEngine
from serving import MODEL, Process, metric, send, until

pytest.importorskip("httptools")
OPENAI = b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\nConnection: close\r\n\r\n" + b'{"choices":[]}'
SETTINGS = {"models_period_s": 0.1, "explain": True}
AFFINITY = {"routing": {"name": "lora-affinity"}}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Process]]:
    """The first has an adapter of its own, the second another, and both a third."""
    made = [
        serving.emulator("--lora", own, "--lora", "both", "--max-loras", "2", "--speed", "20") for own in ("sql", "law")
    ]
    with serving.closing(*made):
        yield made


@contextmanager
def loaded(engines: list[Process], *names: str) -> Iterator[None]:
    """These engines have these adapters for as long."""
    each = [(engine, name) for engine in engines for name in names]
    for engine, name in each:
        assert status(engine, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "p"}) == 200
    try:
        yield
    finally:
        for engine, name in each:
            assert status(engine, "/v1/unload_lora_adapter", {"lora_name": name}) == 200


def names(front: Process) -> dict[str, str | None]:
    return {each["id"]: each.get("parent") for each in send(front, "/v1/models").json()["data"]}


def status(process: Process, path: str, body: Any = None) -> int:
    reply = send(process, path, body)
    reply.close()
    return reply.status


def complete(process: Process, model: str) -> tuple[int, str, Any]:
    """Status, replica and answer."""
    reply = send(process, "/v1/completions", {"model": model, "prompt": "tell me", "max_tokens": 4})
    return reply.status, reply.headers.get("x-headway-replica", ""), reply.json()


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_go_to_the_engines_that_list_the_adapter(engines: list[Process], tmp_path: Path, workers: int) -> None:
    path = serving.fleet_file(tmp_path, [each.url for each in engines], gateway=SETTINGS, policies=AFFINITY)
    with serving.up(
        serving.gateway(path, "--workers", str(workers), "--records", str(tmp_path / "records")), 2
    ) as front:
        assert names(front) == {MODEL: None, "both": MODEL, "law": MODEL, "sql": MODEL}
        assert send(front, "/v1/models/sql").json()["parent"] == MODEL
        assert status(front, "/v1/models/poetry") == 404
        for adapter, replicas in (("sql", {"pool/0"}), ("law", {"pool/1"}), ("both", {"pool/0", "pool/1"})):
            for _ in range(3):
                code, replica, answer = complete(front, adapter)
                assert (code, answer["model"]) == (200, adapter) and replica in replicas
        assert complete(front, MODEL)[2]["model"] == MODEL
        code, _, refused = complete(front, "poetry")
        assert code == 404 and "poetry" in refused["error"]["message"]
        body = {"model": "law", "prompt": "tell me", "max_tokens": 4, "stream": True}
        events = list(send(front, "/v1/completions", body).events())
        assert events[-1] == "[DONE]" and events[0]["model"] == "law"
        front.stop()
    records, _ = load(tmp_path / "records")
    assert [records.loras[code] for code in records.workload["lora"]] == [
        *["sql"] * 3,
        *["law"] * 3,
        *["both"] * 3,
        "",
        "law",
    ]


def test_an_adapter_is_used_from_when_an_engine_loads_it_until_it_unloads_it(
    engines: list[Process], tmp_path: Path
) -> None:
    path = serving.fleet_file(tmp_path, [each.url for each in engines], gateway=SETTINGS, policies=AFFINITY)
    front = serving.gateway(path)
    body = {"lora_name": "new", "lora_path": "/adapters/new"}
    with serving.closing(front):
        serving.all_up(front, 2)
        assert complete(front, "new")[0] == 404
        assert send(engines[1], "/v1/load_lora_adapter", body).text().startswith("Success")
        assert status(engines[1], "/v1/load_lora_adapter", body) == 400
        until(lambda: "new" in names(front))
        assert {complete(front, "new")[1] for _ in range(4)} == {"pool/1"}
        assert status(engines[1], "/v1/unload_lora_adapter", {"lora_name": "new"}) == 200
        assert status(engines[1], "/v1/unload_lora_adapter", {"lora_name": "new"}) == 404
        until(lambda: "new" not in names(front))
        assert complete(front, "new")[0] == 404


def test_an_engine_counts_its_adapters_as_vllm_does(engines: list[Process]) -> None:
    reply = send(engines[0], "/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 4000, "stream": True})
    events = reply.events()
    next(events)
    page = send(engines[0], "/metrics").text()
    reply.close()
    found = re.search(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", page, re.MULTILINE)
    assert found is not None and float(found[2]) > 1e9
    assert dict(re.findall(r'(\w+)="([^"]*)"', found[1])) == {
        "max_lora": "2",
        "running_lora_adapters": "sql",
        "waiting_lora_adapters": "",
    }
    assert complete(engines[0], "poetry")[0] == 404


def test_adapters_stay_where_they_are_loaded(engines: list[Process], tmp_path: Path) -> None:
    """One slot each: with affinity, two adapters settle at two replicas."""
    path = serving.fleet_file(
        tmp_path,
        [each.url for each in engines],
        gateway=SETTINGS,
        policies=AFFINITY,
        pool={"lora": {"max_loras": 1}},
    )
    front = serving.gateway(path)
    with loaded(engines, "x", "y"), serving.closing(front):
        serving.all_up(front, 2)
        homes = {name: {complete(front, name)[1] for _ in range(6)} for name in ("x", "y")}
        assert all(len(places) == 1 for places in homes.values())
        assert metric(front, "headway_requests_total") == 12


def test_declared_adapters_are_served_by_engines_that_list_none(script: ScriptedEngine, tmp_path: Path) -> None:
    script.reply = OPENAI
    front = serving.gateway(
        serving.fleet_file(tmp_path, [script.url], pool={"lora": {"adapters": [{"name": "mine"}]}, "api": "openai"})
    )
    with serving.closing(front):
        serving.all_up(front, 1)
        assert names(front) == {MODEL: None, "mine": MODEL}
        assert complete(front, "mine")[0] == 200
    assert b'"model":"mine"' in script.request.replace(b": ", b":")
