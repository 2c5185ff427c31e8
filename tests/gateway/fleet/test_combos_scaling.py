"""Combos of local processes: scaling, limits, and parts that end or fail to start."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import processes
import serving
from headway import records
from headway.core.errors import HeadwayError
from headway.serving.gateway import load
from processes import running
from serving import MODEL, all_up, chat, metric, send, until

SCALING = {"name": "combos", "local_window_s": 1, "global_window_s": 600, "grace_s": 0.5, "interval_s": 0.2}


def _file(folder: Path, first: int, **changes: Any) -> Path:
    """One combo at first, and at most two; each side has two ports."""

    def side(ports: list[int]) -> dict[str, Any]:
        how = processes.how(ports)
        return {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "processes": how}

    combo = {
        "name": "pair",
        "prefill": side([first, first + 1]),
        "decode": side([first + 2, first + 3]),
        "goodput_rps": 1.0,
        "handover": {"first_token": "decode"},
        **changes.pop("combo", {}),
    }
    policies = {"routing": {"name": "cauchy", "within": "strict"}, "scaling": SCALING, **changes.pop("policies", {})}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"combos": [combo], "policies": policies, "gateway": {"scrape_period_s": 0.1}}))
    return path


@pytest.mark.ci
def test_combos_of_processes_scale_with_the_load(tmp_path: Path) -> None:
    first, last = processes.ports(4)
    front = serving.gateway(_file(tmp_path, first), "--records", str(tmp_path / "ran"))
    with serving.closing(front):
        all_up(front, 2)
        assert len(running(first, last)) == 2

        def busy() -> bool:
            replies = [chat(front, "hello " * 50, stream=True, max_tokens=5) for _ in range(3)]
            names = {reply.headers["x-headway-replica"] for reply in replies}
            assert all(serving.answer_text(list(reply.events())) for reply in replies)
            return len({name for name in names if name.startswith("pair-decode/")}) == 2

        until(busy, 60)
        assert send(front, "/health").json()["up"] == 4
        decode = next(pid for port, pid in running(first, last).items() if port > first + 1)
        os.kill(decode, signal.SIGKILL)
        # Under load, as the scaler would otherwise remove a combo before the process is up again.
        until(lambda: decode not in running(first, last).values(), 60)
        until(lambda: busy() and send(front, "/health").json()["up"] == 4, 60)
        until(lambda: len(running(first, last)) == 2 and send(front, "/health").json()["replicas"] == 2, 60)
        reply = chat(front, "hello " * 50, stream=True, max_tokens=5)
        assert reply.headers["x-headway-replica"].startswith("pair-decode/")
        assert serving.answer_text(list(reply.events()))
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
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
def test_ports_limit_the_number_of_combos(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwayError) as error:
        load(_file(tmp_path, 9_000, **changes))
    assert words in str(error.value)


def test_a_combo_is_limited_by_its_part_with_the_fewest_ports(tmp_path: Path) -> None:
    _, plan = load(_file(tmp_path, 9_000))
    assert {served.combo.max_replicas for served in plan.pools if served.combo is not None} == {2}
    assert len({id(served.combo) for served in plan.pools}) == 1


@pytest.mark.ci
def test_cheaper_combos_replace_more_expensive_ones(tmp_path: Path) -> None:
    """Algorithm 1's refinement: what is new serves before what it replaces goes."""
    first, last = processes.ports(2)

    def alone(name: str, port: int, usd: float, replicas: int) -> dict[str, Any]:
        part = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "usd_per_gpu_hour": usd}
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
        assert send(front, "/health").json()["up"] == 1
        reply = chat(front, max_tokens=5)
        assert reply.headers["x-headway-replica"].startswith("thrifty-") and reply.json()["choices"]
        assert "a plan was made in" in front.stop()


FLAWED = """
import pathlib, subprocess, sys
if not pathlib.Path(sys.argv[1]).exists():
    sys.exit("something is missing")
sys.exit(subprocess.call(sys.argv[2:]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("num_gpus", [3, 2])
def test_scaling_does_not_wait_for_a_combo_with_a_failed_part(tmp_path: Path, num_gpus: int) -> None:
    """A dearer one is started. With GPUs for both, the first is tried on; else its other part gives its GPU back."""
    (tmp_path / "flawed.py").write_text(FLAWED)
    key, (first, last) = tmp_path / "what is missing", processes.ports(3)

    def side(port: int, **how: Any) -> dict[str, Any]:
        made = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "usd_per_gpu_hour": 1.0}
        return {**made, "processes": {**processes.how([port, port]), "tries": 2, **how}}

    command = [sys.executable, str(tmp_path / "flawed.py"), str(key), *processes.how([first, first])["command"]]
    pair = {"name": "pair", "prefill": side(first, command=command), "decode": side(first + 1)}
    alone = {"name": "alone", "aggregated": {**side(last), "usd_per_gpu_hour": 9.0}, "replicas": 0, "min_replicas": 0}
    handover = {"handover": {"first_token": "decode"}}
    made = {
        "combos": [{**pair, **handover, "goodput_rps": 5.0, "min_replicas": 0}, {**alone, "goodput_rps": 5.0}],
        "gpu_limits": [{"gpu": "h100", "count": num_gpus}],
        "policies": {"routing": "cauchy", "scaling": SCALING},
        "gateway": {"scrape_period_s": 0.1, "hold_s": 0.1, "admin_keys": [hashlib.sha256(b"key").hexdigest()]},
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(made))
    front = serving.gateway(tmp_path / "fleet.yaml")
    with serving.closing(front):

        def answered() -> bool:
            reply = chat(front, max_tokens=2)
            reply.close()
            return reply.status == 200 and reply.headers["x-headway-replica"].startswith("alone-")

        until(answered, 60)
        failed = send(front, "/workers", headers={"authorization": "Bearer key"}).json()["failed"]
        if num_gpus == 2:
            until(lambda: list(running(first, last)) == [last])
            assert failed == [] and metric(front, "headway_replicas_failed") == 0
        else:
            assert failed == [{"pool": "pair-prefill", "replicas": 1, "why": "has ended"}]
            key.touch()
            until(lambda: set(running(first, last)) == {first, first + 1, last}, 60)
            until(lambda: metric(front, "headway_replicas_failed") == 0)
        assert "pair-prefill: 2 starts have failed" in front.stop()
