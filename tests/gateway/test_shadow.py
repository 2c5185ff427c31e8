"""`headway serve --shadow`: a candidate decides beside the real policies; it is seen, and has no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from headway.core.errors import HeadwayError
from headway.serving.reload import FleetFile
from keys import ADMIN, digest
from serving import chat, metric, send

pytest.importorskip("httptools")

LAST = """
from headway.core.decision import Placement

class Last:
    def __init__(self):
        self.num = 0

    def route(self, request, view):
        self.num += 1
        if self.num == 3:
            raise ValueError("a fault of the candidate")
        return Placement(max(replica.id for replica in view.replicas))
"""
FIRST = LAST.replace("Last", "First").replace("max(", "min(").replace("self.num == 3", "False")


def candidate(fleet: Path, /, **sections: Any) -> Path:
    """A copy of the fleet file with other sections."""
    path = fleet.with_name("candidate.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(fleet.read_text()) | sections))
    return path


def test_both_choices_are_in_the_log_the_metrics_and_the_workers_and_no_request_is_harmed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LAST + FIRST)
    engines = [serving.emulator(), serving.emulator()]
    path = serving.fleet_file(
        tmp_path,
        [each.url for each in engines],
        policies={"routing": "own:First"},
        gateway={"admin_keys": [digest("root")]},
    )
    other = candidate(path, policies={"routing": "own:Last", "migration": "llumnix"})
    log = tmp_path / "decisions.jsonl"
    front = serving.gateway(path, "--shadow", str(other), "--decisions", str(log))
    with serving.closing(*engines, front):
        serving.all_up(front, 2)
        assert all(chat(front, max_tokens=2).json()["choices"] for _ in range(5))
        workers = {each["id"]: each["shadow"] for each in send(front, "/workers", headers=ADMIN).json()["data"]}
        assert workers == {0: {"placed": 5, "candidate": 0}, 1: {"placed": 0, "candidate": 4}}
        (shown,) = send(front, "/dashboard/data", headers=ADMIN).json()["shadow"]
        assert (shown["kind"], shown["agreed"], shown["differed"], shown["failed"]) == ("routing", 0, 4, 1)
        assert metric(front, "headway_shadow_decisions_total") == 5 and metric(front, "headway_shadow_agreement") == 0
        written = front.stop()
        assert front.process.returncode == 0
    assert written.count("the candidate's decision failed: candidate.yaml: routing for qwen3-8b") == 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    placed = [(line["choice"], line.get("shadow")) for line in lines if line["what"] == "placed"]
    assert placed == [(0, 1), (0, 1), (0, None), (0, 1), (0, 1)]


POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("real", "other", "kinds"),
    [
        ({"routing": "round-robin"}, {"routing": "least-loaded"}, ("routing",)),
        (
            {"ordering": "fcfs", "ordering_at": "gateway"},
            {"ordering": "edf", "ordering_at": "gateway", "admission": "queue-manager"},
            ("ordering", "admission"),
        ),
    ],
)
def test_what_differs_is_compared(
    real: dict[str, Any], other: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [POOL], "policies": real}))
    found, notes = FleetFile(path, lambda read: read).candidate(candidate(path, policies=other))
    assert (found.kinds, notes) == (kinds, [])


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({}, "nothing to compare: its routing, ordering and admission are those of the fleet"),
        ({"policies": {"migration": "llumnix"}}, "nothing to compare: migration: not compared live"),
        ({"fleet": [POOL | {"model": "llama-3.1-8b"}]}, "serves .*; expected the models of fleet.yaml"),
        ({"policies": {"routing": "leastloaded"}}, "least-loaded"),
    ],
)
def test_a_candidate_without_anything_to_compare_is_refused(
    sections: dict[str, Any], what: str, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [POOL]}))
    with pytest.raises(HeadwayError, match=what):
        FleetFile(path, lambda read: read).candidate(candidate(path, **sections))
