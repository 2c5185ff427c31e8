"""`cascade.replan` of a scenario: what it does to the run, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places, parse
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.planning.cascade.problem import QualityFloor
from headway.planning.cascade.replan import replanner_of
from headway.planning.cascade.request import CascadeOptions, make_request
from headway.planning.rehearsals import Source
from headway.report.run import Run
from headway.scenario import Simulator

SMALL, LARGE = "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b"
GPU = {"gpu": "h100-80gb-sxm", "engine": "sglang"}


def document(rates: list[float], **replan: Any) -> dict[str, Any]:
    return {
        "workload": {
            "quality": {"trace": 3, "models": [SMALL, LARGE]},
            "arrivals": {"kind": "curve", "step_s": 180, "rates": rates},
            "duration_s": 180 * len(rates),
        },
        "fleet": [
            {"name": "small", "model": SMALL, "replicas": 2, **GPU},
            {"name": "large", "model": LARGE, "tp": 2, "replicas": 3, **GPU},
        ],
        "cascade": {
            "models": [SMALL, LARGE],
            "policy": {"name": "thresholds", "thresholds": 60},
            "replan": {"quality": 75, "every_s": 60, "audit_share": 0.2, "num_gpus": 8, **replan},
        },
    }


def run(made: dict[str, Any]) -> Run:
    return scenario.run(scenario.assemble(copy.deepcopy(made), Places(), Path()))


def spans(records: Records) -> dict[str, list[tuple[float, float]]]:
    """When each pool's replicas were there."""
    found: dict[str, list[tuple[float, float]]] = {}
    for replica in records.replicas:
        found.setdefault(replica.pool, []).append((replica.up[0][0], replica.up[-1][1]))
    return found


def example() -> dict[str, Any]:
    """That of docs/cascades.md."""
    page = (Path(__file__).parents[3] / "docs" / "cascades.md").read_text(encoding="utf-8")
    data, _ = parse(page[page.index("# rising.yaml") :].split("```")[0], "rising.yaml")
    return data


@pytest.fixture(scope="module")
def rising() -> Run:
    return run(example())


@pytest.mark.ci
def test_what_comes_changes_and_so_does_the_plan(rising: Run) -> None:
    plans = [note for note in rising.notes if note.startswith("planned anew")]
    assert plans and "(rate: +" in plans[0] and plans[0].startswith("planned anew at 740 s")
    there = spans(rising.records)
    assert set(there) > {"small", "large"}, "replicas of other shapes have come"
    assert all(start_s == 0 or start_s >= 740 for each in there.values() for start_s, _ in each)
    assert rising.summary.quality is not None and rising.summary.quality > 75
    assert rising.summary.num_completed == rising.summary.num_requests


@pytest.mark.ci
def test_gpus_are_never_more_than_there_are(rising: Run) -> None:
    events = [
        (at_s, sign * replica.num_gpus)
        for replica in rising.records.replicas
        for at_s, sign in ((replica.up[0][0], 1), (replica.up[-1][1], -1))
    ]
    used = most = 0
    for _, change in sorted(events):
        used += change
        most = max(most, used)
    assert most == 8


@pytest.mark.ci
def test_the_same_again(rising: Run) -> None:
    again = run(example())
    assert again.notes == rising.notes
    for name, column in rising.records.requests.items():
        assert np.array_equal(column, again.records.requests[name], equal_nan=True), name


def test_nothing_changes_while_nothing_does() -> None:
    calm = run(document([6.0, 6.0]))
    assert not [note for note in calm.notes if "plan" in note]
    assert set(spans(calm.records)) == {"small", "large"}
    fixed = document([6.0, 6.0])
    del fixed["cascade"]["replan"]
    assert spans(calm.records).keys() == spans(run(fixed).records).keys()


def test_only_replicas_that_change_are_touched() -> None:
    """Those of pools that the first plan has nothing to say of are there until there is a second, and none besides."""
    kept = run(document([3.0, 9.0], num_gpus=9))
    first, *others = (note for note in kept.notes if note.startswith("planned anew"))
    until_s = float(others[0].split()[3].replace(",", "")) if others else math.inf
    changed = dict(part.split() for part in first.partition("; ")[2].split(", "))
    assert changed
    for pool, each in spans(kept.records).items():
        first_s, last_s = max(start_s for start_s, _ in each), min(end_s for _, end_s in each)
        assert pool in changed or (first_s == 0 and last_s >= until_s) or first_s >= until_s
        assert changed.get(pool, "-")[0] == "-" or first_s >= 240


def test_a_day_without_a_table_begins_with_what_it_is_like() -> None:
    made = document([6.0])
    chosen = scenario.assemble(made, Places(), Path())
    planner = replanner_of(scenario.policies_of(chosen))
    assert planner is not None and planner.expected is not None and planner.expected.rate_rps is None
    made = document([6.0])
    made["workload"]["arrivals"] = 6
    planner = replanner_of(scenario.policies_of(scenario.assemble(made, Places(), Path())))
    assert planner is not None and planner.expected is not None and planner.expected.rate_rps == 6.0


def test_every_run_has_a_planner_of_its_own() -> None:
    chosen = scenario.assemble(document([3.0]), Places(), Path())
    first, second = (replanner_of(scenario.policies_of(chosen)) for _ in range(2))
    assert first is not second


def test_a_scenario_can_be_planned_and_rehearsed_as_it_stands_and_keeps_the_key() -> None:
    made = document([6.0])
    made["workload"] |= {"arrivals": 6, "num_requests": 200}
    asked = make_request(
        Source(made, Places(), Path()), CascadeOptions(target=QualityFloor(75.0), num_gpus=8), Simulator()
    )
    assert asked.policies.scaler is None and asked.problem.num_gpus == 8
    assert asked.replan == made["cascade"]["replan"] and "replan" not in asked.document["cascade"]


def test_the_work_can_be_sent_to_another_process() -> None:
    planner = replanner_of(scenario.policies_of(scenario.assemble(document([3.0]), Places(), Path())))
    assert planner is not None and planner.expected is not None
    work = planner.task._function  # type: ignore[attr-defined]
    here, there = (
        each(planner.expected.scores.take(np.arange(40)), 6.0) for each in (work, pickle.loads(pickle.dumps(work)))
    )
    assert here == there
    slow = work(planner.expected.scores.take(np.arange(40)), 6.0, {"small": (2.0, 2.0), "large": (2.0, 2.0)})
    assert slow.latency_s > 1.5 * here.latency_s  # engines are half as fast as their profile


@pytest.mark.parametrize(
    ("processes", "shapes"),
    [
        (None, None),
        (["engine", "--port", "{port}"], {"small", "large"}),
        (
            ["engine", "--port", "{port}", "--tp", "{tp}"],
            {"small", "small-tp2", "small-tp4", "large", "large-tp4", "large-tp8"},
        ),
        (["engine", "{port}", "{tp}", "{pp}"], None),
    ],
)
def test_shapes_are_those_that_can_be_started(processes: list[str] | None, shapes: set[str] | None) -> None:
    """Also in the simulation: what is rehearsed is what runs."""
    made = document([3.0])
    if processes is not None:
        for i, pool in enumerate(made["fleet"]):
            pool["processes"] = {"command": processes, "ports": [9000 + 100 * i, 9007 + 100 * i]}
    names = {pool.name for pool in scenario.assemble(made, Places(), Path()).fleet.pools}
    if shapes is None:
        assert names > {"small", "large", "small-tp2", "small-tp1-pp2", "large-tp4"}
    else:
        assert names == shapes


TEXT = f"""
workload: {{quality: {{trace: 3, models: [{SMALL}, {LARGE}]}}, arrivals: 3, num_requests: 100}}
fleet:
  - {{name: small, model: {SMALL}, gpu: h100-80gb-sxm, engine: sglang}}
  - {{name: large, model: {LARGE}, gpu: h100-80gb-sxm, engine: sglang, tp: 2, EXTRA}}
cascade:
  models: [{SMALL}, {LARGE}]
  policy: POLICY
  replan: {{REPLAN}}
"""
KEEP = "quality: 80"
LIKE = f"}}\n  - {{model: {LARGE}, gpu: h100-80gb-sxm, engine: sglang, tp: 2"


@pytest.mark.parametrize(
    ("replan", "policy", "extra", "words"),
    [
        ("qualty: 80", "thresholds", "", ":9: cascade.replan.qualty: unknown key 'qualty'; did you mean 'quality'?"),
        ("", "thresholds", "", "expected quality or latency_s, and not both"),
        ("quality: 80, latency_s: 3", "thresholds", "", "expected quality or latency_s, and not both"),
        ("quality: 101", "thresholds", "", ":9: cascade.replan.quality"),
        ("quality: 80, audit_share: 0", "thresholds", "", ":9: cascade.replan.audit_share"),
        ("quality: 80, num_gpus: 2", "thresholds", "", ":9: cascade.replan.num_gpus: 2; expected 3 or more"),
        (KEEP, "deadline-aware", "", ":8: cascade.policy: deadline-aware; expected thresholds"),
        (KEEP, "{name: thresholds, thresholds: [1, 2]}", "", ":8: cascade.policy: 2 thresholds; expected 1"),
        (KEEP, "thresholds", "region: west", ":5: fleet[1]: large: expected the engine and region of small"),
        (
            "quality: 80, num_gpus: 9",
            "thresholds",
            f"}}\n  - {{name: old, model: {LARGE}, gpu: a100-80gb, engine: sglang, tp: 2",
            "replan.num_gpus: h100-80gb-sxm, a100-80gb are in the fleet; expected no num_gpus",
        ),
        (KEEP, "thresholds", LIKE, ":6: fleet[2]: pool-2: like large"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_line(replan: str, policy: str, extra: str, words: str) -> None:
    text = TEXT.replace("EXTRA", extra).replace("POLICY", policy).replace("REPLAN", replan)
    data, places = parse(text, "chat.yaml")
    with pytest.raises(HeadwayError) as error:
        scenario.assemble(data, places, Path())
    assert words in str(error.value) and str(error.value).startswith("chat.yaml")


# Mixed fleets, combos, scaled pools.


def changed_pools(done: Run) -> dict[str, int]:
    """By pool: replicas that all new plans together added (below 0: removed)."""
    changes: dict[str, int] = {}
    for note in done.notes:
        if note.startswith("planned anew") and "the same replicas" not in note:
            for part in note.partition("; ")[2].split(", "):
                name, _, num = part.rpartition(" ")
                changes[name] = changes.get(name, 0) + int(num)
    return changes


@pytest.mark.ci
@pytest.mark.slow
def test_a_fleet_of_two_types_of_gpu_is_planned_anew_within_each() -> None:
    made = document([4.0, 14.0])
    made["fleet"] = [
        {"name": "small", "model": SMALL, "replicas": 2, "engine": "sglang", "gpu": "a100-80gb"},
        {"name": "large", "model": LARGE, "tp": 2, "replicas": 3, **GPU},
        {"name": "large-old", "model": LARGE, "tp": 4, "replicas": 1, "engine": "sglang", "gpu": "a100-80gb"},
    ]
    del made["cascade"]["replan"]["num_gpus"]
    done = run(made)
    assert [note for note in done.notes if note.startswith("planned anew")], done.notes
    limits = {"a100-80gb": 6, "h100-80gb-sxm": 6}
    for gpu, most in limits.items():
        events = sorted(
            (at_s, sign * replica.num_gpus)
            for replica in done.records.replicas
            if replica.gpu == gpu
            for at_s, sign in ((replica.up[0][0], 1), (replica.up[-1][1], -1))
        )
        assert max(np.cumsum([change for _, change in events])) <= most
    assert done.summary.num_completed == done.summary.num_requests


@pytest.mark.ci
@pytest.mark.slow
def test_combos_are_planned_anew_as_whole_units() -> None:
    made = document([3.0, 14.0])
    made["fleet"] = [made["fleet"][0]]
    part = {"model": LARGE, "tp": 2, **GPU}
    made["combos"] = [
        {"name": "large", "prefill": {**part, "replicas": 1}, "decode": {**part, "replicas": 1}, "replicas": 1}
    ]
    made["cascade"]["replan"]["num_gpus"] = 16
    done = run(made)
    assert [note for note in done.notes if note.startswith("planned anew")], done.notes
    assert changed_pools(done).get("large", 0) >= 1
    assert done.summary.num_completed == done.summary.num_requests


@pytest.mark.ci
def test_the_scenarios_own_scaling_keeps_the_other_pools() -> None:
    made = document([6.0, 12.0])
    made["fleet"].append({"name": "chat", "model": "llama-3.1-8b", "replicas": 1, "max_replicas": 3, **GPU})
    made["policies"] = {"scaling": {"name": "reactive"}}
    done = run(made)
    assert [note for note in done.notes if note.startswith("planned anew")], done.notes
    assert "chat" not in changed_pools(done)


@pytest.mark.ci
def test_scaling_moves_the_cascades_own_replicas_between_plans() -> None:
    """Answers of the small model pile up: it gets the GPUs that are free, and loses them when it is idle again."""
    made = document([2.0, 16.0, 2.0], every_s=1000)
    scaling = {"name": "target-utilization", "kv_use": None, "in_flight": 20, "stabilization_s": 30}
    made["policies"] = {"scaling": scaling}
    done = run(made)
    assert not [note for note in done.notes if note.startswith("planned anew")]
    there = spans(done.records)
    assert set(there) == {"small", "large"}, "shapes that the plan does not have stay away"
    assert any(180 <= start_s < 360 for start_s, _ in there["small"])
    assert most_gpus(done.records) <= 8
    last_s = float(done.records.requests["end_s"].max())
    assert sum(end_s >= last_s for _, end_s in there["small"]) < len(there["small"])


def most_gpus(records: Records) -> int:
    """The most GPUs in use at a time."""
    events = sorted(
        (at_s, sign * replica.num_gpus)
        for replica in records.replicas
        for at_s, sign in ((replica.up[0][0], 1), (replica.up[-1][1], -1))
    )
    used = np.cumsum([change for _, change in events])
    return int(used.max())


def test_plans_keep_the_limits_of_pools() -> None:
    made = document([4.0, 12.0])
    made["fleet"][0]["max_replicas"] = 2
    made["fleet"][1]["max_replicas"] = 3
    chosen = scenario.assemble(made, Places(), Path())
    planner = replanner_of(scenario.policies_of(chosen))
    assert planner is not None and planner.expected is not None
    found = planner.task._function(planner.expected.scores, 12.0)  # type: ignore[attr-defined]
    counts = {(stage.model, part.tp, part.pp): part.count for stage in found.stages for part in stage.replicas}
    assert counts.get((SMALL, 1, 1), 0) <= 2 and counts.get((LARGE, 2, 1), 0) <= 3
