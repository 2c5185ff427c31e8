"""K-tier Llumnix made anew: the paper's arithmetic, what is measured, and that every row gets an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.report.run import Run
from headway_papers.reproduce import ktier
from headway_papers.reproduce.findings import Figure, Findings, PaperTable
from headway_papers.reproduce.ktier import burst as ktier_burst
from headway_papers.reproduce.ktier import parity, phases, runs, sustained, sweep
from headway_papers.reproduce.ktier.claims import (
    CLAIMS,
    LATENCIES,
    MIXES,
    PRINTED,
    READINGS,
    TABLE_TIERS,
    cost_improvement,
    share_of_printed,
)
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import SimulationTask


def simulated(document: Mapping[str, Any], seed: int = 0) -> Run:
    return scenario.run(scenario.assemble(deepcopy({**document, "seed": seed}), Places(), Path()))


def small(policies: Mapping[str, Any], engine: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """The paper's burst, with a tenth of the requests."""
    return runs.scenario(policies, engine, 1500, **given)


# The paper's tables.


def test_cost_per_latency_is_what_the_tail_saves_in_all_rows_but_one() -> None:
    off = {where: abs(cost_improvement(row.e2e_p99) - row.cost) for where, row in PRINTED.items()}
    assert [where for where, by in off.items() if by >= 0.01] == [("gaussian", "15k", 5)]
    by_mean = sum(abs(cost_improvement(row.e2e_mean) - row.cost) < 0.01 for row in PRINTED.values())
    assert by_mean < 6, "the mean explains fewer of them"


def rule(id: str) -> Any:
    (claim,) = (claim for claim in CLAIMS if claim.id == id)
    return claim.rule


@pytest.mark.parametrize("reading", READINGS)
def test_the_tables_are_one_finding(reading: str) -> None:
    printed = {(*key, metric): PRINTED[key].value(metric) for key in PRINTED for metric in LATENCIES}
    none, squared = ({key: value**power for key, value in printed.items()} for power in (0, 3))
    swapped = {key: 1 / value for key, value in printed.items()}
    shares = [share_of_printed(each) for each in (printed, none, swapped, squared)]
    assert shares == pytest.approx([1, 0, -1, 3])
    assert [rule(f"tables{reading}").judge([share] * 2).holds for share in shares] == [True, False, False, False]
    assert len(printed) == 72


def test_speed_ups_of_the_paper_fall_with_the_load_by_more_than_saturation_explains() -> None:
    falls = [
        PRINTED[mix, "10k", k].value(metric) / PRINTED[mix, "15k", k].value(metric)
        for mix in MIXES
        for k in TABLE_TIERS
        for metric in LATENCIES
    ]
    assert (len(falls), round(min(falls), 2), round(max(falls), 2)) == (36, 1.23, 1.79)
    assert geometric_mean(falls) == pytest.approx(1 / 0.65, abs=0.01)


# What is measured.


@pytest.mark.parametrize("num_tiers", [1, 3])
def test_measurements_are_those_of_the_summary(num_tiers: int) -> None:
    document = small(runs.ktier_policies(num_tiers), runs.LLUMLET, num_tiers=num_tiers)
    run = simulated(document)
    found, summary = runs.measure_curves(run), run.summary
    assert summary.ttft_s and summary.e2e_s
    assert found["prefill"]["mean"] == pytest.approx(summary.ttft_s.mean)
    assert found["e2e"]["p99"] == pytest.approx(summary.e2e_s.p99)
    assert found["decode"]["mean"] == pytest.approx(summary.e2e_s.mean - summary.ttft_s.mean)
    assert found["moves"] == summary.moves
    assert sorted(found["tiers"]) == sorted(found["curves"]) == [str(tier) for tier in range(num_tiers)]
    for tier, metrics in summary.tiers.items():
        assert metrics.ttft_s and metrics.itl_s
        assert found["tiers"][tier]["prefill"]["p50"] == pytest.approx(metrics.ttft_s.p50)
        middle = len(runs.FRACTIONS) // 2
        assert found["curves"][tier]["ttft"][middle] == pytest.approx(metrics.ttft_s.p50)
        assert found["curves"][tier]["tbt"][middle] == pytest.approx(metrics.itl_s.p50, rel=0.02)
    json.dumps(found)


def test_tiers_do_not_change_what_arrives() -> None:
    one, ten = (simulated(small(runs.INFAAS, runs.VLLM, num_tiers=k)).records for k in (1, 10))
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert np.array_equal(one.workload[column], ten.workload[column])
    assert np.array_equal(one.requests["end_s"], ten.requests["end_s"]), "and tiers are nothing to the baseline"


def test_order_decides_who_waits_not_how_long_all_wait() -> None:
    documents = [
        runs.scenario(policies, runs.LLUMLET, 5000, num_tiers=4, quick=True)
        for policies in (runs.INFAAS, runs.ktier_policies(4))
    ]
    first, tiers = (runs.measure(simulated(document)) for document in documents)
    assert tiers["e2e"]["mean"] == pytest.approx(first["e2e"]["mean"], rel=0.05)
    assert tiers["tiers"]["0"]["prefill"]["mean"] < 0.7 * first["tiers"]["0"]["prefill"]["mean"]


def test_quick_halves_fleet_and_load_alike() -> None:
    whole, half = (runs.scenario({}, {}, 10_000, quick=quick) for quick in (False, True))
    assert whole["workload"]["num_requests"] == 2 * half["workload"]["num_requests"]
    assert whole["workload"]["arrivals"]["rate"] == 2 * half["workload"]["arrivals"]["rate"]
    assert whole["fleet"][0]["replicas"] == 2 * half["fleet"][0]["replicas"]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_attainment_is_of_the_classes_not_of_the_tiers(k: int) -> None:
    found = sustained.attainment(k, 1.0, seed=0, num_requests=300)["attainment"]
    assert 0.0 < found <= 1.0
    assert found == sustained.attainment(k, 1.0, seed=0, num_requests=300)["attainment"]


def test_one_run_serves_all_mixes_without_tiers() -> None:
    tasks = ktier_burst.tasks((0,), quick=False)
    without = [key for key in tasks if key[0] == "ktier" and key[3] == 1]
    assert without == [("ktier", "uniform", "10k", 1, 0)]
    shown = [key for key, task in tasks.items() if task.function is runs.measure_curves]
    assert sorted(key[3] for key in shown) == [1, 3, 3, 3, 5, 5, 5]


def test_every_scenario_can_be_read() -> None:
    made: list[SimulationTask] = []
    for part in (ktier_burst.tasks, parity.tasks, sustained.load_tasks, phases.tasks):
        made += part((0,), True).values()
    made += sweep.tasks((0,), True, 300.0).values()
    for task in {json.dumps(task.content): task for task in made}.values():
        scenario.assemble(deepcopy(dict(task.content)), Places(), Path())


# Every row gets an answer.


class Pretending(Runner):
    """Makes measurements up, of the right form."""

    def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self._pretend(key, task) for key, task in tasks.items()}

    def _pretend(self, key: Any, task: Any) -> Any:
        random = np.random.default_rng(crc32(json.dumps(task.content, sort_keys=True).encode()))
        if isinstance(key, tuple) and key[0] == "setting":
            return {"attainment": 1 - 0.5 / key[1] + random.uniform(0, 0.001)}
        if isinstance(key, tuple) and key[0] == "phases":
            return {tier: dict.fromkeys(("begins", "answers", "ends"), 1.0) for tier in "01"}
        tiers = task.content["workload"]["tiers"]
        num_tiers = len(tiers) if isinstance(tiers, list) else tiers["num_tiers"]
        assert isinstance(task, SimulationTask)
        return {
            **self._latencies(random),
            "end_s": 30.0,
            "moves": 1,
            "tiers": {str(tier): self._latencies(random) for tier in range(num_tiers)},
            "curves": {
                str(tier): {name: sorted(random.uniform(0, 1, 9).tolist()) for name in ("ttft", "tbt", "e2e")}
                for tier in range(num_tiers)
            },
        }

    @staticmethod
    def _latencies(random: Any) -> dict[str, Any]:
        return {
            name: dict(zip(("mean", "p50", "p90", "p99"), random.uniform(1, 2, 4).tolist(), strict=True))
            for name in ("prefill", "e2e", "decode")
        }


@pytest.mark.parametrize("quick", [False, True])
def test_every_claim_has_a_value_a_seed_and_a_reason(quick: bool) -> None:
    ids = frozenset(claim.id for claim in CLAIMS) - (ktier.FULL_ONLY if quick else set())
    found = ktier.run(Pretending(seeds=(0, 1, 2), quick=quick, claims=ids))
    assert isinstance(found, Findings)
    assert set(found.outcomes) == ids
    for claim in (claim for claim in CLAIMS if claim.id in ids):
        outcome = found.outcomes[claim.id]
        assert len(outcome.values) == 3 and outcome.why
        claim.rule.judge(outcome.values)
        assert None not in outcome.values
    labels = [exhibit.label for exhibit in found.exhibits]
    papers = [label for label in dict.fromkeys(labels) if not label.startswith("Headway")]
    order = ["Figure 5", "Figure 6", "Figure 7", "Table 2", "Figure 8", "Figure 9", "Table 3", "Table 4"]
    assert papers == order
    for exhibit in found.exhibits:
        if isinstance(exhibit, Figure):
            json.dumps(exhibit.chart, allow_nan=False)
        else:
            assert isinstance(exhibit, PaperTable)
            assert all(len(row) == len(exhibit.heads) for row in exhibit.rows)


def test_tables_hold_the_papers_numbers_beside_ours() -> None:
    burst = ktier_burst.BurstRuns(Pretending(seeds=(0,)).run(ktier_burst.tasks((0,), False)), (0,), False)
    rows = burst.table("gaussian").rows
    assert [row[4::2] for row in rows] == [
        [PRINTED[mix, scale, k].value(metric) for metric in ktier_burst.METRICS]
        for reading in READINGS
        for mix, scale, k in ktier_burst._settings(reading)
        if mix == "gaussian"
    ]


PART_OF = {
    "parity-p99": {"parity"},
    "headroom-tier0": {"load"},
    "headroom-tier0-rare": {"rare"},
    "tick-shorter": {"tick"},
    "seats-same-prefill-mean": {"part", "seats"},
}


@pytest.mark.parametrize("claim", [*PART_OF, "tables"])
def test_one_claim_runs_its_part_alone(claim: str) -> None:
    asked: list[Any] = []

    class Counting(Pretending):
        def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
            asked.extend(tasks)
            return super().run(tasks)

    found = ktier.run(Counting(seeds=(0, 1), claims=frozenset({claim})))
    assert claim in found.outcomes
    assert claim == "tables" or {key[0] for key in asked} == PART_OF[claim]
    assert not {"setting", "phases"} & {key[0] for key in asked}
