"""SageServe's evaluation made anew: scenarios hold together, runs are reduced to what records say, signs are right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from headway import scenario
from headway.report.run import Run
from headway.reproduce import sageserve
from headway.reproduce.experiment import Experiment
from headway.reproduce.sageserve import runs
from headway.reproduce.sageserve.outcomes import Outcomes
from headway.reproduce.tasks import Call, Simulation
from headway.userfile import Places

SEEDS = (0, 1)


def assembled(document: dict[str, Any]) -> scenario.Scenario:
    return scenario.assemble(copy.deepcopy(document), Places(), Path())


@pytest.mark.parametrize("strategy", runs.STRATEGIES)
def test_every_strategy_starts_with_as_many_instances(strategy: str) -> None:
    chosen = assembled(runs.day(strategy, 500.0, 8.0))
    assert sum(pool.replicas for pool in chosen.fleet.pools) == runs.START * len(runs.REGIONS)
    assert all(pool.min_replicas == runs.LEAST for pool in chosen.fleet.pools)
    assert scenario.policies_of(chosen).scaler is not None


@pytest.mark.parametrize("ordering", runs.ORDERINGS)
def test_orderings_are_compared_on_a_fleet_that_stays(ordering: str) -> None:
    assert scenario.policies_of(assembled(runs.ordered(ordering))).scaler is None


@pytest.fixture(scope="module")
def short() -> Run:
    document = runs.day(runs.REACTIVE, 500.0, 1.2)
    document["workload"] |= {"scale": 0.1}
    return scenario.run(assembled(document))


def test_a_run_is_reduced_to_what_its_records_say(short: Run) -> None:
    found = runs.measure(short)
    replicas, end_s = short.records.replicas, short.records.end_s
    paid_s = sum(max(to - max(since, runs.WARMUP_S), 0.0) for r in replicas for since, to in r.up)
    assert found["instance_hours"] == pytest.approx(paid_s / 3600)
    bins = found["instances"]
    whole_s = sum(max(min(to, len(bins) * runs.BIN_S) - since, 0.0) for r in replicas for since, to in r.up)
    assert sum(mean for _, mean in bins) * runs.BIN_S == pytest.approx(whole_s)
    assert len(bins) == end_s // runs.BIN_S
    assert found["ttft_p75_s"] <= found["ttft_p90_s"] <= found["ttft_p95_s"] <= found["ttft_p99_s"]


def test_who_still_waits_has_waited_so_far(short: Run) -> None:
    ended = short.records.requests
    waits = runs._waits_s(short.records, 0.0, short.records.end_s)
    interactive = short.records.workload["tier"][ended["request"]] < runs.BATCH
    assert len(waits) == interactive.sum()
    assert (waits >= 0).all()


def day(hours: float, **more: float) -> dict[str, Any]:
    base = {"instance_hours": hours, "spot_hours": 10.0, "wasted_hours": 1.0, "starts": 5, "kv_use": 0.4}
    tails = {f"ttft_p{q}_s": 1.0 for q in (75, 90, 95, 99)}
    return {**base, **tails, "instances": [[0.0, 3.0]], **more}


def made(name: str, **more: float) -> dict[tuple[Any, ...], Any]:
    """Runs in which all is alike, but for one strategy."""
    found: dict[tuple[Any, ...], Any] = {}
    for seed in SEEDS:
        for each in runs.STRATEGIES:
            found["day", each, seed] = day(100.0) | (more if each == name else {})
        for each in (runs.LT_I, runs.LT_U, runs.LT_UA):
            found["burst", each, seed] = {"ttft_p95_s": 8.0, "instances": [[0.0, 1.0]]}
        for i, each in enumerate(("fcfs", "edf", "dpa", "pf")):
            found["order", each, seed] = {"violations": {"0": 0.4 - 0.05 * i, "1": 0.2 + 0.1 * i}}
    return found


def test_a_value_for_every_claim_and_seed() -> None:
    outcomes = Outcomes(made(runs.REACTIVE), SEEDS, 500.0).outcomes()
    assert set(outcomes) == {claim.id for claim in sageserve.CLAIMS}
    assert all(len(outcome.values) == len(SEEDS) for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("name", "more", "claim", "value"),
    [
        (runs.SILOED, {"instance_hours": 200.0}, "unified-hours", 0.5),
        (runs.SILOED, {"ttft_p95_s": 0.5}, "unified-tail", 1.0),
        (runs.SILOED, {"spot_hours": 5.0}, "unified-spot", 1.0),
        (runs.LT_U, {"instance_hours": 75.0}, "lt-u-hours", 0.25),
        (runs.LT_UA, {"wasted_hours": 0.2}, "lt-ua-waste", 0.8),
        (runs.LT_I, {"ttft_p90_s": 6.0}, "lt-i-tail", 5.0),
        (runs.CHIRON, {"instance_hours": 300.0}, "chiron-hours", 3.0),
    ],
)
def test_signs(name: str, more: dict[str, float], claim: str, value: float) -> None:
    assert Outcomes(made(name, **more), SEEDS, 500.0).outcomes()[claim].values == pytest.approx([value, value])


def test_orderings_trade_the_tiers_as_the_paper_has_it() -> None:
    found = Outcomes(made(runs.REACTIVE), SEEDS, 500.0).outcomes()
    assert found["pf-fast"].values == pytest.approx([0.15, 0.15])
    assert found["pf-normal"].values == pytest.approx([0.3, 0.3])
    assert found["order-fast"].values == found["order-normal"].values == [True, True]


def test_only_what_is_asked_for_is_run() -> None:
    asked: list[Any] = []

    class Dry(Experiment):
        def run(self, tasks: Any) -> Any:
            asked.extend(tasks.values())
            return {key: {"tps": 500.0} if isinstance(task, Call) else self.made[key] for key, task in tasks.items()}

        made = made(runs.REACTIVE)

    findings = sageserve.run(Dry(SEEDS, claims=frozenset({"pf-fast"})))
    assert "pf-fast" in findings.outcomes
    assert sum(isinstance(task, Simulation) for task in asked) == len(SEEDS) * len(runs.ORDERINGS)
