"""A plan replaces a model's only replica by one of another shape, with and without GPUs for both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import processes
import serving
from processes import running
from serving import chat, until

pytest.importorskip("httptools")

SCRIPTED = """
import pathlib


class Scripted:
    interval_s = 0.1

    def __init__(self, folder):
        self._go = pathlib.Path(folder, "go")

    def scale(self, view):
        return {"one": 0, "other": 1} if self._go.exists() else {"one": 1, "other": 0}
"""
SLOW = """
import subprocess, sys, time
time.sleep(2.0)
sys.exit(subprocess.call(sys.argv[1:]))
"""


def _front(folder: Path, num_gpus: int, hold_s: float, *options: str) -> tuple[serving.Process, int, int]:
    """A gateway before one replica, and its ports: the one's, the other's."""
    (folder / "scripted.py").write_text(SCRIPTED)
    (folder / "slow.py").write_text(SLOW)
    first, last = processes.ports(2)

    def alone(name: str, port: int, replicas: int) -> dict[str, Any]:
        how = processes.how([port, port])
        how["command"] = [sys.executable, str(folder / "slow.py"), *how["command"]]
        part = {"model": serving.MODEL, "gpu": "h100", "engine": "vllm-0.15", "processes": how}
        return {"name": name, "aggregated": part, "replicas": replicas, "min_replicas": 0}

    made = {
        "combos": [alone("one", first, 1), alone("other", last, 0)],
        "gpu_limits": [{"gpu": "h100", "count": num_gpus}],
        "policies": {"routing": "cauchy", "scaling": {"name": "scripted:Scripted", "folder": str(folder)}},
        "gateway": {"scrape_period_s": 0.1, "hold_s": hold_s},
    }
    (folder / "fleet.yaml").write_text(yaml.safe_dump(made))
    front = serving.gateway(folder / "fleet.yaml", *options)
    serving.all_up(front, 1)
    return front, first, last


def test_a_replica_of_another_shape_starts_first_if_there_are_gpus_for_both(tmp_path: Path) -> None:
    """The old one is empty again and again, and is used until the new one is up."""
    front, first, last = _front(tmp_path, 2, 0.0)
    with serving.closing(front):
        (tmp_path / "go").touch()

        def answered_by() -> str:
            reply = chat(front, max_tokens=2)
            assert reply.status == 200, reply.text()
            reply.close()
            return reply.headers["x-headway-replica"]

        until(lambda: answered_by().startswith("other-"))
        until(lambda: list(running(first, last)) == [last])
        assert "its last replica goes" not in front.stop()


@pytest.mark.ci
@pytest.mark.parametrize("workers", ["1", "2"])
def test_without_gpus_for_both_clients_get_a_retry_time(tmp_path: Path, workers: str) -> None:
    decisions = tmp_path / "decisions.jsonl"
    front, first, last = _front(tmp_path, 1, 0.2, "--decisions", str(decisions), "--workers", workers)
    with serving.closing(front):
        (tmp_path / "go").touch()
        until(lambda: first not in running(first, last))
        refused = chat(front, max_tokens=2)
        assert refused.status == 503 and refused.json()["error"]["code"] == "no_capacity"
        assert int(refused.headers["retry-after"]) >= 2, "starts take longer"
        until(lambda: list(running(first, last)) == [last])
        serving.all_up(front, 1)
        assert chat(front, max_tokens=2).json()["choices"]
        assert f"{serving.MODEL}: its last replica stops before another one is up: requests wait" in front.stop()
    lines = [json.loads(line) for line in decisions.read_text().splitlines()]
    (refusal,) = [line for line in lines if line["what"] == "refused"]
    assert refusal["why"] == "no replica is up" and refusal["held_s"] >= 0.2 and refusal["request"]
