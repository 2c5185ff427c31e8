"""Declared pools: parts of combos, limits by ports, and sections that cannot be served."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway import serving
from headway.core.errors import HeadwayError
from headway.serving import gateway
from headway.serving.pools import DeclaredPool, bounded_combos, declared_pools, uses_engine_priority, without_engine

POOL = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}
COMMAND = {"command": [sys.executable, "{port}"], "ports": [9000, 9005]}


def _declared(folder: Path, **document: Any) -> list[DeclaredPool]:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    return declared_pools(serving.read(path))


def test_pools_come_before_the_parts_of_combos(tmp_path: Path) -> None:
    urls = {"endpoints": ["http://a:1"]}
    combo = {"name": "pair", "prefill": {**POOL, **urls}, "decode": {**POOL, **urls}}
    one, prefill, decode = _declared(tmp_path, fleet=[{**POOL, **urls, "name": "one"}], combos=[combo])
    assert [each.where for each in (one, prefill, decode)] == ["fleet[0]", "combos[0].prefill", "combos[0].decode"]
    assert one.combo is None and prefill.combo is decode.combo and decode.pool.role == "decode"
    assert one.locations == ["endpoints"] and one.start is None and one.num_ports is None
    assert {each.adapter.api for each in (one, prefill, decode)} == {"vllm"}


def test_replicas_are_limited_by_ports(tmp_path: Path) -> None:
    (pool,) = _declared(tmp_path, fleet=[{**POOL, "processes": COMMAND}])
    assert pool.num_ports == 6 and pool.bounded().max_replicas == 6
    (pool,) = _declared(tmp_path, fleet=[{**POOL, "processes": COMMAND, "max_replicas": 4}])
    assert pool.bounded().max_replicas == 4
    decode = {**POOL, "replicas": 2, "processes": {**COMMAND, "ports": [9010, 9013]}}
    combo = {"name": "pair", "prefill": {**POOL, "processes": COMMAND}, "decode": decode}
    assert bounded_combos(_declared(tmp_path, combos=[combo]))["pair"].max_replicas == 2


def test_the_pools_of_a_model_may_each_give_it_a_name(tmp_path: Path) -> None:
    """Clients may ask for all names; they see the given ones, then the model's own."""
    path = tmp_path / "fleet.yaml"
    named = [{**POOL, "endpoints": [f"http://{name}:1"], "served_name": name} for name in ("one", "two")]
    other = {"model": "qwen3-8b", "gpu": "h100", "endpoints": ["http://c:1"]}
    path.write_text(yaml.safe_dump({"fleet": [*named, other]}))
    plan = gateway.load(path)[1]
    assert {"one", "two", "llama-3.1-8b"} <= {*plan.names["llama-3.1-8b"]} and plan.names.keys() == {
        "llama-3.1-8b", "qwen3-8b",
    }  # fmt: skip
    assert plan.listed == ("one", "two", "llama-3.1-8b", "qwen3-8b")


def test_engines_order_by_tier_unless_the_gateway_does(tmp_path: Path) -> None:
    for policies, expected in (
        ({"ordering": "priority"}, True),
        ({"ordering": {"name": "priority"}}, True),
        ({"ordering": "fcfs"}, False),
        ({"ordering": "priority", "ordering_at": "gateway"}, False),
    ):
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump({"fleet": [POOL], "policies": policies}))
        assert uses_engine_priority(serving.read(path).spec) == expected


@pytest.mark.parametrize(
    ("engine", "expected"), [({}, ["chat"]), ({"engine": "vllm-0.15"}, []), ({"api": "openai"}, [])]
)
def test_a_pool_that_does_not_say_its_engine_is_named(
    tmp_path: Path, engine: dict[str, str], expected: list[str]
) -> None:
    """Its queues and KV caches are not read, and simulations have no prefix cache."""
    path = tmp_path / "fleet.yaml"
    bare = {"name": "chat", "model": POOL["model"], "gpu": "h100", "endpoints": ["http://a:1"]}
    path.write_text(yaml.safe_dump({"fleet": [{**bare, **engine}]}))
    assert without_engine(serving.read(path)) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "fleet[0].endpoints: missing"),
        ({"endpoints": ["http://a:1"], "processes": COMMAND}, "the pool has `endpoints`, too"),
        ({"endpoints": ["a:1"]}, "expected http://host:port"),
        ({"processes": {**COMMAND, "ports": [9, 8]}}, "9 to 8; expected the lower one first"),
        ({"processes": COMMAND, "replicas": 7}, "7; expected 6 at most"),
        ({"processes": {**COMMAND, "command": ["python"]}}, "has no {port}"),
        ({"endpoints": ["http://a:1"], "slots": "."}, "have no slots"),
        (
            {"endpoints": ["http://a:1"], "kv_events": {"tokenizer": "models/none"}},
            "fleet[0].kv_events.tokenizer: {folder}/models/none: no such file; expected a tokenizer.json",
        ),
    ],
)
def test_invalid_sections_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [{**POOL, **changes}]}))
    with pytest.raises(HeadwayError) as error:
        serving.load(path)
    assert words.replace("{folder}", str(tmp_path)) in str(error.value) and str(path) in str(error.value)


def test_the_path_of_a_tokenizer_begins_at_the_fleet_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from tokenizing import write_model

    write_model(tmp_path / "model")
    path = tmp_path / "fleet.yaml"
    pool = {**POOL, "endpoints": ["http://a:1"], "kv_events": {"tokenizer": "model"}}
    path.write_text(yaml.safe_dump({"fleet": [pool]}))
    _, plan = serving.load(path)
    assert plan.pools[0].kv_events is not None
    assert plan.pools[0].kv_events.tokenizer == str(tmp_path / "model")


def test_two_pools_cannot_share_ports(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    pools = [{**POOL, "name": name, "processes": {**COMMAND}} for name in ("one", "two")]
    path.write_text(yaml.safe_dump({"fleet": pools}))
    with pytest.raises(HeadwayError, match=r"9000 is fleet\[0\]'s, too"):
        serving.load(path)
