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
        ({"batches": {"max_line": 1}}, "did you mean 'max_lines'?"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, gateway: dict[str, Any], words: str) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway)
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value)


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
