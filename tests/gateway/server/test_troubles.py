"""What the dashboard calls trouble, and the words for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.server.schema import EngineLoad, HeldRequests, PrefixCacheState, ReplicaRow
from headway.gateway.server.troubles import troubles
from headway.gateway.telemetry.drift import PredictionRatio


def _row(id: int = 0, **changes: Any) -> ReplicaRow:
    row: dict[str, Any] = {
        "id": id, "name": f"p/{id}", "pool": "p", "model": "m", "url": "http://h:1", "status": "up", "combo": None,
        "role": "mixed", "in_flight": 2, "empty": False, "engine": EngineLoad(2, 0, 0.1), "why": None,
        "prediction": None, "prefix_cache": None, "shadow": None, "gpu": "g", "region": "", "most_in_flight": 4,
        "kv_share": 0.1, "by_tier": {}, "age_s": 0.5,
    }  # fmt: skip
    return ReplicaRow(**row | changes)


def _late(delay_s: float) -> Any:
    return SimpleNamespace(loop_delay=SimpleNamespace(recent_s=lambda: delay_s))


def _found(rows: list[ReplicaRow], *queues: HeldRequests, **parts: Any) -> list[tuple[str, str, bool]]:
    return [(each.where, each.what, each.is_severe) for each in _troubles(rows, *queues, **parts)]


def _troubles(rows: list[ReplicaRow], *queues: HeldRequests, **parts: Any) -> list[Any]:
    gateway: Any = SimpleNamespace(
        **{
            "reloads": SimpleNamespace(last=None),
            "charges": None,
            "peers": None,
            "fleet": SimpleNamespace(failed=lambda: []),
            "settings": SimpleNamespace(stale_s=5.0),
            "telemetry": _late(0.1),
        }
        | parts
    )
    return troubles(gateway, rows, queues)


def test_a_fleet_that_is_well_has_none() -> None:
    brief = HeldRequests(model="m", tier=0, held=3, oldest_s=0.2)
    quick = _row(3, prediction=PredictionRatio(1.05, 1.5, "correct it"))
    others = [_row(4, status=status) for status in ("starting", "draining", "leaving")]
    assert _troubles([_row(), _row(1, in_flight=4), quick, *others], brief) == []


def test_replicas_without_requests_are_named_with_what_went_wrong() -> None:
    """The loss of a model's last replica is severe, and comes first."""
    down = _row(1, status="down", why="cannot be reached: Connection refused", model="other")
    ejected = _row(2, status="ejected", why="5 failures in a row")
    found = _troubles([_row(), ejected, down])
    assert [(each.where, each.is_severe) for each in found] == [("p/1", True), ("p/2", False)]
    assert "Connection refused" in found[0].why and "5 failures in a row" in found[1].why
    assert _found([_row(), _row(1, status="down")]) == [("p/1", "down", False)]
    assert _found([_row(1, status="down")]) == [("p/1", "down", True)]


@pytest.mark.parametrize(
    ("changes", "what", "words"),
    [
        ({"kv_share": 0.97}, "full", "97% full"),
        ({"engine": EngineLoad(2, 1, 0.1)}, "full", "1 request waits in the engine's own queue"),
        ({"engine": EngineLoad(2, 1200, 0.1)}, "full", "1,200 requests wait"),
        ({"prediction": PredictionRatio(None, 0.5, "correct it")}, "slow", "2 times as long between tokens"),
        ({"prediction": PredictionRatio(0.4, 1.0, "correct it")}, "slow", "2.5 times as long to the first token"),
        ({"age_s": 31.0}, "not current", "31 s ago"),
        ({"prefix_cache": PrefixCacheState("degraded", "lost 3", 1, 1, 3, 9.0)}, "not current", "lost 3"),
    ],
)
def test_a_replica_that_serves_badly_is_named_with_the_reason(changes: dict[str, Any], what: str, words: str) -> None:
    (found,) = _troubles([_row(**changes)])
    assert (found.where, found.what, found.is_severe) == ("p/0", what, False) and words in found.why
    assert _found([_row(**changes, status="down")]) == [("p/0", "down", True)], "it serves nothing"


def test_the_correction_is_told_once_for_each_pool() -> None:
    slow = PredictionRatio(None, 0.5, "calibrate p")
    found = _troubles([_row(0, prediction=slow), _row(1, prediction=slow), _row(2, prediction=slow, pool="q")])
    assert ["calibrate" in each.why for each in found] == [True, False, True]


def test_held_requests_are_severe_when_no_replica_has_room() -> None:
    held = [
        HeldRequests(model="m", tier=0, held=3, oldest_s=2.5),
        HeldRequests(model="m", tier=2, held=9, oldest_s=1.0),
    ]
    full, free = _row(0, in_flight=4), _row(1)
    (found,) = _troubles([full, _row(1, in_flight=4)], *held)
    assert found.is_severe and found.where == "m" and "12 requests are held, the oldest for 2.5 s" in found.why
    assert "2 replicas up, all with as many requests as they may have (8)" in found.why
    assert _found([full, free], *held) == [("m", "waits", False)]
    assert _found([_row(0, status="starting")], *held) == [("m", "waits", True)]


def test_parts_of_the_gateway_that_fail_are_named() -> None:
    away, reload = SimpleNamespace(is_up=False), SimpleNamespace(outcome="failed", error="f.yaml:3: no")
    parts = {
        "charges": SimpleNamespace(accounts=away),
        "peers": away,
        "reloads": SimpleNamespace(last=reload),
        "fleet": SimpleNamespace(failed=lambda: [("spare", 2, "no such file")]),
        "telemetry": _late(1.5),
    }
    found = {each.where: each.why for each in _troubles([_row()], **parts)}
    assert list(found) == ["key store", "gateway", "fleet file", "peer store", "spare"]
    assert "f.yaml:3" in found["fleet file"] and found["spare"] == "2 replicas wanted here fail to start: no such file"
    assert "up to 1.5 s late" in found["gateway"]
