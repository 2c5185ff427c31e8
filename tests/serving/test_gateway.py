"""A fleet file's settings: what `headway serve` refuses before it listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

import serving
from headway import serving as composition
from headway.core.errors import HeadwayError


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({"api_keys": ["secret"]}, "api_keys[0]"),
        ({"api_keys": [{"sha256": "0" * 64, "tiers": 1}]}, "did you mean 'tier'?"),
        ({"api_keys": [{"sha256": "0" * 64, "tokens_per_minute": 0}]}, "tokens_per_minute"),
        ({"batches": {"store": "mysql://a/b"}}, "'mysql' is not a known database"),
        ({"batches": {"store": "postgresql://a:b:c/d"}}, "not a database address"),
        ({"batches": {"store": "postgresql://a/b?user=c"}}, "only sslmode"),
        ({"batches": {"store": "no/such/folder/a.sqlite"}}, "is no folder"),
        ({"batches": {"store": "redis://db/0"}}, "gateway.batches.store: batches are not kept in Valkey or Redis"),
        ({"key_store": {"store": "redis://db/x"}}, "'x' is no number of a database"),
        ({"peers": {"store": "valkeys://db?prefx=a"}}, "did you mean 'prefix'"),
        ({"peers": {"store": "peers.sqlite"}}, "expected postgresql:// or redis://host/database"),
        ({"batches": {"max_line": 1}}, "did you mean 'max_lines'?"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, gateway: dict[str, Any], words: str) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway)
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("store", "extra"), [("valkey://db/0", "valkey"), ("rediss://db/0", "valkey"), ("postgresql://db/a", "postgres")]
)
def test_a_client_that_is_missing_is_named_with_what_installs_it(
    tmp_path: Path, store: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = ("redis", "asyncpg")
    found = composition.gateway.find_spec
    monkeypatch.setattr(composition.gateway, "find_spec", lambda name: None if name in clients else found(name))
    for gateway in ({"key_store": {"store": store}}, {"peers": {"store": store}}):
        path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway)
        with pytest.raises(HeadwayError, match=rf"is not installed; try: pip install 'headway\[{extra}\]'"):
            composition.load(path)


PODS = {"name": "chat", "kind": "StatefulSet"}
SCALING = {"scaling": "target-utilization"}


@pytest.mark.parametrize(
    ("pool", "leader", "words"),
    [
        (
            {"processes": {"command": ["true", "{port}"], "ports": [9000, 9001]}},
            "store",
            "which no other gateway of `gateway.peers`",
        ),
        ({"kubernetes": PODS}, "store", "expected Deployment"),
        ({"endpoints": ["http://engine:8000"]}, "kubernetes", "no pool has `kubernetes`"),
    ],
)
def test_replicas_that_several_gateways_cannot_share_are_refused(
    tmp_path: Path, pool: dict[str, Any], leader: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("asyncpg")
    kubernetes = pytest.importorskip("headway.gateway.fleet.kubernetes")
    monkeypatch.setattr(kubernetes, "check", lambda _: None)  # there is no cluster
    peers = {"store": "postgresql://db/headway", "leader": leader}
    policies = SCALING if "kubernetes" in pool else {}
    path = serving.fleet_file(tmp_path, [], gateway={"peers": peers}, pool={"endpoints": [], **pool}, policies=policies)
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value)
