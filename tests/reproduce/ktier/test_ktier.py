"""K-tier Llumnix made anew: the paper's arithmetic, what is measured, and that every row gets an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.report.run import Run
from headway.reproduce import ktier
from headway.reproduce.findings import Figure, Findings, PaperTable
from headway.reproduce.ktier import burst as ktier_burst
from headway.reproduce.ktier import parity, phases, runs, sustained
from headway.reproduce.ktier.claims import CLAIMS, METRICS, MIXES, PRINTED, SCALES, TABLE_TIERS, cost_improvement
from headway.reproduce.runner import Runner
from headway.reproduce.tasks import SimulationTask


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


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("metric", METRICS)
def test_a_table_claim_holds_for_the_printed_number_and_not_without_an_effect(
    mix: str, scale: str, metric: str
) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == f"{mix}-{scale}-{metric}")
    printed = PRINTED[mix, scale, 4].value(metric)
    assert claim.rule.judge([printed, printed]).holds
    no_effect = 0.0 if metric == "cost" else 1.0
    assert claim.rule.judge([no_effect, no_effect]).holds is False
    assert f"{SCALES[scale]:,} requests, K=4" in claim.claim


@pytest.mark.parametrize("mix", MIXES)
def test_a_peak_claim_asks_for_half_of_the_printed_lead(mix: str) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == f"{mix}-peak")
    three, four, five = (PRINTED[mix, "10k", k].e2e_p99 for k in TABLE_TIERS)
    lead = four - max(three, five)
    assert claim.rule.judge([0.6 * lead] * 2).holds
    assert claim.rule.judge([0.4 * lead] * 2).holds is False


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
    for task in {json.dumps(task.content): task for task in made}.values():
        scenario.assemble(deepcopy(dict(task.content)), Places(), Path())


# Every row gets an answer.


class Pretending(Runner):
    """Makes measurements up, of the right form."""

    def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self._pretend(key, task) for key, task in tasks.items()}

    def _pretend(self, key: Any, task: Any) -> Any:
        random = np.random.default_rng(abs(hash(json.dumps(task.content, sort_keys=True))) % 2**32)
        if key[0] == "setting":
            return {"attainment": 1 - 0.5 / key[1] + random.uniform(0, 0.001)}
        if key[0] == "phases":
            return {tier: dict.fromkeys(("begins", "answers", "ends"), 1.0) for tier in "01"}
        num_tiers = task.content["workload"]["tiers"]["num_tiers"]
        return {
            **self._latencies(random),
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
    found = ktier.run(Pretending(seeds=(0, 1, 2), quick=quick))
    assert isinstance(found, Findings)
    assert set(found.outcomes) == {claim.id for claim in CLAIMS}
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        outcome = found.outcomes[claim.id]
        assert len(outcome.values) == 3 and outcome.why
        claim.rule.judge(outcome.values)
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
    assert [row[3::2] for row in rows] == [
        [PRINTED["gaussian", scale, k].value(metric) for metric in ktier_burst.METRICS]
        for scale in SCALES
        for k in TABLE_TIERS
    ]


@pytest.mark.parametrize("claim", ["parity-p99", "headroom-tier0", "gaussian-10k-cost"])
def test_one_claim_runs_its_part_alone(claim: str) -> None:
    asked: list[Any] = []

    class Counting(Pretending):
        def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
            asked.extend(tasks)
            return super().run(tasks)

    found = ktier.run(Counting(seeds=(0, 1), claims=frozenset({claim})))
    assert claim in found.outcomes
    assert {key[0] for key in asked} <= {"parity"} or {key[0] for key in asked} <= {"load"} or claim.startswith("g")
    assert not {"setting", "phases"} & {key[0] for key in asked}
