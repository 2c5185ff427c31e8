"""Combos that the gateway starts: whole ones come and go, and what ends by itself is put back in its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import processes
import serving
from headway import records
from headway.core.errors import HeadwayError
from headway.serving import load
from processes import running
from serving import MODEL, all_up, ask, chat, metric, until

SCALING = {"name": "combos", "local_window_s": 1, "global_window_s": 600, "grace_s": 0.5, "interval_s": 0.2}


def _file(folder: Path, first: int, **changes: Any) -> Path:
    """One combo at first, and at most two; each side has two ports."""

    def side(ports: list[int]) -> dict[str, Any]:
        how = processes.how(ports)
        return {"model": MODEL, "gpu": "h100", "engine": "vllm-v1", "processes": how}

    combo = {
        "name": "pair", "prefill": side([first, first + 1]), "decode": side([first + 2, first + 3]),
        "goodput_rps": 1.0, "handover": {"first_token": "decode"}, **changes.pop("combo", {}),
    }  # fmt: skip
    policies = {"routing": {"name": "cauchy", "within": "strict"}, "scaling": SCALING, **changes.pop("policies", {})}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"combos": [combo], "policies": policies, "gateway": {"scrape_period_s": 0.1}}))
    return path


def test_whole_combos_come_with_the_load_and_go_with_it(tmp_path: Path) -> None:
    first, last = processes.ports(4)
    front = serving.gateway(_file(tmp_path, first), "--records", str(tmp_path / "ran"))
    with serving.closing(front):
        all_up(front, 2)
        assert len(running(first, last)) == 2

        def busy() -> bool:
            replies = [chat(front, "hello " * 50, stream=True, max_tokens=5) for _ in range(3)]
            names = {reply.headers["x-headway-replica"] for reply in replies}
            assert all(serving.said(list(reply.events())) for reply in replies)
            return len({name for name in names if name.startswith("pair-decode/")}) == 2

        until(busy, 60)
        assert ask(front, "/health").json()["up"] == 4
        decode = next(pid for port, pid in running(first, last).items() if port > first + 1)
        os.kill(decode, signal.SIGKILL)
        until(lambda: ask(front, "/health").json()["up"] == 4 and decode not in running(first, last).values(), 60)
        until(busy, 60)
        until(lambda: len(running(first, last)) == 2 and ask(front, "/health").json()["replicas"] == 2, 60)
        reply = chat(front, "hello " * 50, stream=True, max_tokens=5)
        assert reply.headers["x-headway-replica"].startswith("pair-decode/")
        assert serving.said(list(reply.events()))
        assert metric(front, "headway_requests_in_flight") == 0
        front.stop()
        until(lambda: not running(first, last))
    ran, _ = records.load(tmp_path / "ran")
    assert sorted(replica.pool for replica in ran.replicas) == ["pair-decode"] * 3 + ["pair-prefill"] * 2
    assert [replica.origin for replica in ran.replicas].count("initial") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"combo": {"replicas": 3}}, "3; expected 2 at most, as many as `processes.ports` of combos[0].prefill"),
        ({"combo": {"max_replicas": 4}}, "4; expected 2 at most"),
    ],
)
def test_there_are_no_more_combos_than_ports(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwayError) as told:
        load(_file(tmp_path, 9_000, **changes))
    assert words in str(told.value)


def test_a_combo_is_limited_by_its_part_with_the_fewest_ports(tmp_path: Path) -> None:
    _, plan = load(_file(tmp_path, 9_000))
    assert {served.combo.max_replicas for served in plan.pools if served.combo is not None} == {2}
    assert len({id(served.combo) for served in plan.pools}) == 1


def test_cheaper_combos_take_the_place_of_dearer_ones(tmp_path: Path) -> None:
    """Algorithm 1's refinement: what is new serves before what it replaces goes."""
    first, last = processes.ports(2)

    def alone(name: str, port: int, usd: float, replicas: int) -> dict[str, Any]:
        part = {"model": MODEL, "gpu": "h100", "engine": "vllm-v1", "usd_per_gpu_hour": usd}
        part["processes"] = processes.how([port, port])
        return {"name": name, "aggregated": part, "goodput_rps": 5.0, "replicas": replicas, "min_replicas": 0}

    made = {
        "combos": [alone("dear", first, 9.0, 1), alone("thrifty", last, 1.0, 0)],
        "policies": {"routing": "cauchy", "scaling": {**SCALING, "global_window_s": 3}},
        "gateway": {"scrape_period_s": 0.1},
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(made))
    front = serving.gateway(tmp_path / "fleet.yaml")
    with serving.closing(front):
        all_up(front, 1)
        assert list(running(first, last)) == [first]
        until(lambda: list(running(first, last)) == [last], 60)
        assert ask(front, "/health").json()["up"] == 1
        reply = chat(front, max_tokens=5)
        assert reply.headers["x-headway-replica"].startswith("thrifty-") and reply.json()["choices"]
        assert "a plan was made in" in front.stop()
