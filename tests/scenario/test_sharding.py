"""Runs in shards: the records of models that do not affect each other are those of one process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from headway.config.scenario import Scenario, StepTimes
from headway.config.strict_yaml import Places
from headway.control.decisions import DecisionObserver
from headway.core import column as growing
from headway.core.record import Records
from headway.scenario import assemble, run, sharding
from headway.scenario.policies import policies_of
from headway.scenario.run import _simulate, _source, _with_sequence_lengths
from headway.sim import row_order, shards
from headway.workload import spill

MODELS = ("llama-3.1-8b", "qwen3-8b", "llama-3.2-3b")


def _fleet(draw: Random) -> list[dict[str, Any]]:
    """One to three replicas of each model, some in two regions, some with a cache that is too small."""
    fleet = []
    for model in MODELS[: draw.choice([2, 3])]:
        pool = {"name": model, "model": model, "gpu": "l4", "replicas": draw.choice([1, 2])}
        if draw.random() < 0.4:
            pool["kv_capacity_tokens"] = draw.choice([2000, 9000])
        fleet.append(pool)
        if draw.random() < 0.3:
            pool["region"] = "west"
            fleet.append({**pool, "name": f"{model}-east", "region": "east", "replicas": 1})
    if any("region" in pool for pool in fleet):
        fleet = [{"region": "west", **pool} for pool in fleet]
    return fleet


def _workload(draw: Random, models: list[str], file: Path) -> dict[str, Any]:
    """Drawn arrivals; or a trace whose times are whole tenths of seconds, so that many events fall on one instant."""
    num = draw.choice([3, 60, 150])
    if draw.random() < 0.5:
        rows = sorted(
            (round(draw.uniform(0, num / 15), 1), draw.choice([1, 400, 2500]), draw.choice([1, 9, 60]), each)
            for each in draw.choices(models, k=num)
        )
        lines = ["arrival_s,prompt_tokens,output_tokens,model", *(",".join(map(str, row)) for row in rows)]
        file.write_text("\n".join(lines) + "\n")
        workload: dict[str, Any] = {"trace": {"path": str(file)}}
    else:
        workload = {
            "num_requests": num,
            "arrivals": {"kind": "gamma", "rate": 20, "cv": draw.choice([1.0, 4.0])},
            "prompt_tokens": {"kind": "lognormal", "mean": 500, "cv": 1},
            "output_tokens": draw.choice([1, 20, {"kind": "lognormal", "mean": 40, "cv": 1}]),
            "models": {name: draw.choice([1, 3]) for name in models},
        }
        if draw.random() < 0.3:
            workload["prefixes"] = {"num_groups": 3, "prefix_tokens": 200}
    if draw.random() < 0.4:
        workload["timeout_s"] = draw.choice([0.5, 3.0])
    if draw.random() < 0.3:
        workload["tiers"] = [{"tier": 0, "ttft_s": 0.3}, {"tier": 1}]
    return workload


def _document(draw: Random, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    fleet = _fleet(draw)
    workload = _workload(draw, list(dict.fromkeys(pool["model"] for pool in fleet)), folder / "trace.csv")
    policies: dict[str, Any] = {
        "routing": draw.choice(["round-robin", "random", "least-kv", "power-of-two", "prefix-affinity"]),
        "ordering": draw.choice(["fcfs", "priority"]),
        "ordering_at": draw.choice(["replica", "both"]),
    }
    document = {"workload": workload, "fleet": fleet, "policies": policies, "seed": draw.randrange(9)}
    if draw.random() < 0.3:
        document["simulation"] = {"until_s": draw.choice([0.5, 2.0])}
    if draw.random() < 0.3:
        document["network"] = {"inter_region_s": 0.05}
    return document


def _whole(scenario: Scenario) -> Records:
    return _simulate(scenario, policies_of(scenario), _source(scenario), StepTimes(scenario))


def _in_shards(scenario: Scenario, folder: Path, most: int = 2) -> Records | None:
    """As of `simulate_apart`, in this process."""
    rows = _source(scenario).workload  # type: ignore[attr-defined]
    split = sharding.split(scenario, rows, most)
    if split is None:
        return None
    tasks = [sharding._Shard(scenario, folder / str(i), len(ids)) for i, ids in enumerate(split)]
    for task, ids in zip(tasks, split, strict=True):
        task.write(rows, ids)
    parts = [task.read(task.simulate()) for task in tasks]
    return shards.merged(parts, rows, scenario.spec.simulation.until_s is not None)


def _assert_same(found: Records, expected: Records) -> None:
    for name in ("workload", "requests", "segments", "stretches", "moves"):
        one, other = getattr(found, name), getattr(expected, name)
        assert list(one) == list(other), name
        for key, column in other.items():
            assert one[key].dtype == column.dtype and one[key].shape == column.shape, (name, key)
            assert one[key].tobytes() == column.tobytes(), (name, key)
    for name in ("models", "regions", "tenants", "loras", "replicas", "end_s", "judge_usd"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.prefixes is None) == (expected.prefixes is None)
    if found.prefixes is not None and expected.prefixes is not None:
        for name in ("offsets", "ids", "tokens"):
            assert (getattr(found.prefixes, name) == getattr(expected.prefixes, name)).all()


@pytest.mark.ci
@pytest.mark.parametrize("block_rows", [7, shards.BLOCK_ROWS])
def test_records_are_those_of_one_process(block_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some, rows are split and merged in blocks, and columns and places leave memory, as in a run of millions."""
    if block_rows < 100:
        for module in (shards, sharding, spill):
            monkeypatch.setattr(module, "BLOCK_ROWS", block_rows)
        monkeypatch.setattr(spill, "LONG_ROWS", 2 * block_rows)
        monkeypatch.setattr(growing, "SPILL_BYTES", 100 * block_rows)
        monkeypatch.setattr(row_order, "_FLUSH_ROWS", 10 * block_rows)
    draw, num_merged, num_shared = Random(block_rows), 0, 0
    for i in range(30):
        scenario = _with_sequence_lengths(assemble(_document(draw, tmp_path / f"{i} trace"), Places(), Path()))
        assert sharding.what_couples(scenario, policies_of(scenario)) is None
        expected, found = _whole(scenario), _in_shards(scenario, tmp_path / str(i), draw.choice([2, 3]))
        if found is None:
            continue
        _assert_same(found, expected)
        num_merged += 1
        ends_s = expected.requests["end_s"]
        num_shared += len(np.unique(ends_s)) < len(ends_s)
    assert num_merged > 20 and num_shared > 5


@pytest.mark.ci
def test_the_command_uses_processes(tmp_path: Path) -> None:
    document = _document(Random(1), tmp_path / "trace")
    scenario = assemble(document, Places(), Path())
    apart = run(scenario, jobs=2)
    _assert_same(apart.records, run(scenario).records)
    assert not any("one process" in note for note in apart.notes)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"policies": {"routing": "round-robin", "scaling": "reactive"}}, "policies.scaling"),
        ({"policies": {"routing": "round-robin", "migration": "llumnix"}}, "policies.migration"),
        ({"faults": [{"at_s": 1.0, "replica": 0}]}, "faults"),
        ({"observe": {"period_s": 0.5}}, "observe"),
        ({"policies": {"routing": "round-robin", "ordering": "fair", "ordering_at": "gateway"}}, "a policy that"),
    ],
)
def test_what_is_shared_keeps_one_process(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    scenario = assemble({**_document(Random(1), tmp_path / "trace"), **more}, Places(), Path())
    found = sharding.what_couples(scenario, policies_of(scenario))
    assert found is not None and found.startswith(reason)
    why = f"{found} may let models affect each other"
    assert sharding.simulate_apart(scenario, policies_of(scenario), _source(scenario), 2) == why


def test_a_run_that_was_to_be_split_says_why_it_was_not(tmp_path: Path) -> None:
    workload = {"num_requests": 20, "arrivals": 5.0, "prompt_tokens": 100, "output_tokens": 5}
    fleet = [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": 2}]
    document = {"workload": workload, "fleet": fleet, "policies": {"routing": "round-robin"}}
    one = assemble(document, Places(), Path())
    assert "simulated in one process: its requests are for one model, or name none" in run(one, jobs=2).notes
    looped = assemble({**document, "workload": {**workload, "concurrency": 2}}, Places(), Path())
    assert "simulated in one process: its requests depend on answers" in run(looped, jobs=2).notes
    recorded = run(one, decisions=DecisionObserver(), jobs=2)
    assert "simulated in one process: its decisions are recorded" in recorded.notes
    for jobs in (None, 1):
        assert not any("one process" in note for note in run(one, jobs=jobs).notes)
