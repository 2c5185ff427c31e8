"""The decision log: every decision is logged as it was made, and logging changes none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from full_disk import full_disk
from headway import catalog
from headway.control.decisions import Decision, DecisionObserver
from headway.control.policies import Policies
from headway.core.decision import Move, Placement
from headway.core.fleet import Engine, Fault, Fleet, Pool
from headway.core.record import Outcome, Records
from headway.core.view import FleetView, RequestView
from headway.policies import resolve
from headway.records.json_lines import BackgroundJsonLines, JsonLinesFile
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from serving import until

NUM_REQUESTS = 200


class Scoring:
    """Least loaded, and says by how much."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        scores = tuple((replica.id, float(-replica.num_in_flight)) for replica in view.replicas)
        return Placement(max(scores, key=lambda each: each[1])[0], scores=scores)


class Restless:
    """Moves whatever runs at replica 0."""

    interval_s = 0.5

    def moves(self, view: FleetView) -> Sequence[Move]:
        return [Move(request.id, 1) for request in view.replicas[0].requests]

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        return None


def workload(**columns: Any) -> Workload:
    rng = np.random.default_rng(2)
    made = {
        "arrival_s": np.cumsum(rng.exponential(0.02, NUM_REQUESTS)),
        "prompt_tokens": rng.integers(50, 900, NUM_REQUESTS),
        "output_tokens": rng.integers(5, 200, NUM_REQUESTS),
        "tier": rng.integers(0, 3, NUM_REQUESTS),
    }
    return Workload(made | columns)


def run(table: Workload, policies: Policies, listens: bool = True, **more: Any) -> tuple[Records, list[Decision]]:
    engine = Engine("simulated", max_num_seqs=8, max_num_batched_tokens=1024)
    pool = Pool(
        "main", catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb"), engine, replicas=3, kv_capacity_tokens=16_000
    )
    decisions, listed = DecisionObserver(), []
    if listens:
        decisions.listeners.append(listed.append)
    return simulate(Fleet((pool,)), TraceSource(table), policies, seed=1, decisions=decisions, **more), listed


def policies(**more: Any) -> Policies:
    return Policies(Scoring, resolve.ordering("priority"), "both", window=6, **more)


@pytest.mark.parametrize("migration", [None, Restless])
@pytest.mark.parametrize("faults", [(), (Fault(at_s=1.0, replica=1, down_s=2.0),)])
def test_logged_decisions_match_the_records(migration: Any, faults: tuple[Fault, ...]) -> None:
    records, decisions = run(workload(), policies(migration=migration), faults=faults)
    silent, nothing = run(workload(), policies(migration=migration), listens=False, faults=faults)
    for name, column in records.requests.items():
        np.testing.assert_array_equal(column, silent.requests[name])
    assert nothing == []
    placed = [one for one in decisions if one.what == "placed"]
    attempts = dict(zip(records.requests["request"], records.requests["attempts"], strict=True))
    for request in range(NUM_REQUESTS):
        own = [one.attempt for one in placed if one.request == str(request)]
        assert own == list(range(attempts[request]))
    assert bool(faults) == (len(placed) > NUM_REQUESTS)
    moved = [one for one in decisions if one.what == "moved"]
    assert bool(migration) == bool(moved) and len(moved) >= records.requests["moves"].sum()
    assert all((one.source, one.choice) == (0, 1) for one in moved)
    last = {one.request: one.choice for one in decisions}
    if not migration:
        ended = zip(records.requests["request"], records.requests["replica"], strict=True)
        assert all(last[str(request)] == replica for request, replica in ended)
    assert [one.time_s for one in decisions] == sorted(one.time_s for one in decisions)


def test_scores_loads_and_waits_are_those_at_the_time() -> None:
    table = workload()
    records, decisions = run(table, policies())
    started = dict(zip(records.requests["request"], records.requests["placed_s"], strict=True))
    arrived = table.columns["arrival_s"]
    assert len(decisions) == NUM_REQUESTS
    for one in decisions:
        request = int(one.request)
        assert one.time_s == started[request]
        assert one.held_s == pytest.approx(one.time_s - arrived[request], abs=1e-9)
        assert bool(one.why) == (one.held_s > 0)
        assert one.scores == tuple((each.replica, float(-each.in_flight)) for each in one.replicas)
        assert all(each.in_flight < 6 and each.age_s == 0 and 0 <= each.kv_share <= 1 for each in one.replicas)
        assert one.tier == table.columns["tier"][request]
    assert {one.why for one in decisions} == {"", "no replica has room", "others come first"}


def test_held_and_refused_requests_are_logged() -> None:
    prompts = np.full(NUM_REQUESTS, 300)
    prompts[7] = 20_000
    manager = resolve.admission({"name": "queue-manager", "interval_s": 0.5, "batch_tier": 2})
    records, decisions = run(workload(prompt_tokens=prompts), policies(admission=manager))
    refused = [one for one in decisions if one.what == "refused"]
    assert [(one.request, one.choice) for one in refused] == [("7", None)] and "longer" in refused[0].why
    assert list(records.requests["request"][records.requests["outcome"] == Outcome.REJECTED]) == [7]
    kept = [one for one in decisions if one.why == "kept by the admission policy"]
    assert kept and all(one.tier == 2 and one.held_s > 0 for one in kept)


class Line(msgspec.Struct):
    number: int
    text: str = "x" * 100


def test_the_log_goes_on_when_a_full_disk_has_room_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No line is torn, and what is missing is counted."""
    path = tmp_path / "decisions.jsonl"
    writer = BackgroundJsonLines(JsonLinesFile(path), max_queued=50)
    writer.write(Line(0))
    until(lambda: path.stat().st_size > 0)
    with full_disk(path.stat().st_size + 150):  # one line more, and a half
        for number in range(1, 200):
            writer.write(Line(number))
        until(lambda: "decisions are dropped until it can" in caplog.text)
    until(lambda: "is written again" in caplog.text)
    writer.write(Line(1000))
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    dropped = sum(line["num"] for line in lines if line.get("what") == "dropped")
    numbers = [line["number"] for line in lines if "number" in line]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 1000
    assert dropped and len(numbers) + dropped == 201
