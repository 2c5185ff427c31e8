"""Cauchy made anew: the paper's arithmetic, what is searched and planned, and that every row gets an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.planning.combos.problem import ComboCandidate, ComboPlan, GpuCombo, Group
from headway.reproduce import cauchy
from headway.reproduce.cauchy import beyond, model, overall, scheduling, setup, transfer
from headway.reproduce.cauchy.claims import CLAIMS, TABLE_3, WORKLOADS
from headway.reproduce.cauchy.setup import LIMITS, Market
from headway.reproduce.findings import Figure, Findings, PaperTable
from headway.reproduce.runner import Runner
from headway.reproduce.tasks import Call, SimulationTask

H800, A800, H20 = setup.GPUS.values()
TOKENS = 457
USD = {H800: 2.69, A800: 1.19, H20: 1.5}


def candidate(goodput_rps: float, *groups: Group) -> ComboCandidate:
    """Of ShareGPT, with what it serves for a dollar."""
    usd = sum(USD[each.gpu] * each.num_gpus for each in groups)
    parts = dict(zip(("prefill", "decode"), groups, strict=True)) if len(groups) > 1 else {"aggregated": groups[0]}
    combo = GpuCombo(setup.MODEL, usd, **parts)
    return ComboCandidate("any", combo, goodput_rps, 3600 * goodput_rps * TOKENS / usd)


CANDIDATES = (
    candidate(30.0, Group(H800), Group(A800)),
    candidate(20.0, Group(A800), Group(H20)),
    candidate(27.0, Group(H800)),
    candidate(9.0, Group(A800)),
    candidate(8.0, Group(H20)),
)


@cache
def market(workload: str = "sharegpt") -> Market:
    some = [msgspec.structs.replace(each, service=workload) for each in CANDIDATES]
    return Market(workload, {"candidates": msgspec.to_builtins(some), "capacity_rps": 300.0})


# The paper's own numbers.


def test_the_papers_rates_do_not_fit_its_goodputs() -> None:
    """Table 3 says 2.14 requests/s for a pair with an H800; 4.1 asks for 50/s of eight H800."""
    assert 50 / TABLE_3[1][0][0] > 23 > setup.NUM_GPUS


def test_table_3_is_of_longer_answers_than_it_says() -> None:
    """Mean E2E, TTFT and TBT of its first row."""
    tokens = (22.03 - 0.237) / 0.01592
    assert tokens == pytest.approx(1370, rel=0.01) and tokens > 6 * 207


def test_table_3_pays_the_prices_of_table_1() -> None:
    """Tokens per request that follow from CE, goodput and prices are the same in all of its rows."""
    sizes = []
    for num, (goodputs, efficiencies, _) in TABLE_3.items():
        usd = USD[H800] + num * USD[H20]
        sizes += [1e3 * ce * usd / 3600 / rps for rps, ce in zip(goodputs, efficiencies, strict=True)]
    assert max(sizes) / min(sizes) < 1.02


def test_transfers_meet_both_figures_that_they_were_fitted_to_and_are_best_with_eight() -> None:
    seconds = {}
    for degree in (0, 4, 8, 16):
        task = transfer.tasks()["transfer", transfer.FITTED, degree]
        seconds[degree] = task.measure(Path())["transfer_s"]
    assert seconds[0] == pytest.approx(0.625, rel=0.01) and seconds[8] == pytest.approx(0.085, rel=0.02)
    assert seconds[8] < min(seconds[4], seconds[16])


def test_prefill_is_a_small_part_of_a_request_that_is_alone() -> None:
    for workload in WORKLOADS:
        prefill_s, decode_s = model.alone(workload)
        assert 0 < prefill_s < 0.1 * decode_s
        assert prefill_s / (prefill_s + decode_s) < model.busy(workload) < 1, "a full GPU shares its decoding"


# Searches and plans.


def test_a_goodput_is_where_requests_begin_to_be_late() -> None:
    combos = [setup.split("pair", "h800-h20")]
    for start_rps in (2.5, 4.5):
        found = setup.goodput("longwriter", combos, "opportunistic", 0, start_rps, quick=True)["rps"]
        below, above = (
            max(setup.near("longwriter", combos, "opportunistic", 0, share * found, quick=True))
            for share in (0.97, 1.15)
        )
        assert below <= 0 < above


def test_demand_is_a_third_of_what_the_cluster_can_serve() -> None:
    assert market().demand_rps == pytest.approx(100.0)
    for objective in overall.OBJECTIVES:
        plan = market().plan(objective)
        assert plan.services[0].goodput_rps >= 100 and _within(plan)
    plain = market().plan(aggregated=True)
    assert all(each.combo.aggregated for each in plain.combos)
    assert market().plan("mc").usd_per_hour <= plain.usd_per_hour + 1e-9


def test_melange_serves_the_same_demand_with_aggregated_gpus() -> None:
    plan = overall.melange_plan(market())
    assert plan.status in ("optimal", "feasible") and _within(plan)
    assert all(each.combo.aggregated for each in plan.combos)
    assert plan.services[0].shortfall_rps == pytest.approx(0, abs=1e-6)
    # Profiles by bucket are scaled so that on the whole mix they say what was simulated.
    scaled = overall.ScaledEstimate(market())
    service = market().service
    for each in market().aggregated:
        assert scaled.goodput_rps(each.combo, service.pattern, service.slo) == pytest.approx(each.goodput_rps)


def _within(plan: ComboPlan) -> bool:
    return all(num <= LIMITS[gpu] for gpu, num in plan.gpus.items())


@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_systems_see_the_same_demand_and_begin_with_their_plans(workload: str) -> None:
    given = overall.systems(market(workload), quick=True)
    assert len({json.dumps(each["workload"]) for each in given.values()}) == 1
    assert np.mean(overall.CURVE) == pytest.approx(1.0)
    assert [name for name, each in given.items() if "scaling" in each["policies"]] == ["star", "cauchy"]
    at_first = {name: [c for c in each["combos"] if c["replicas"]] for name, each in given.items()}
    assert at_first["static"] == [c for c in given["cauchy"]["combos"] if c["replicas"]]
    for name in ("melange", "star"):
        assert all("aggregated" in each for each in given[name]["combos"])
    for each in given.values():
        scenario.assemble(deepcopy(each), Places(), Path())


def test_autoscaling_stays_within_the_cluster_and_loses_nobody() -> None:
    given = overall.systems(market(), quick=True)["cauchy"]
    given["workload"]["num_requests"] = 4000
    run = scenario.run(scenario.assemble(given, Places(), Path()))
    assert run.summary.num_completed == 4000
    changes: dict[str, list[tuple[float, int]]] = {}
    for replica in run.records.replicas:
        for start_s, end_s in replica.up:
            changes.setdefault(replica.gpu, []).extend([(start_s, replica.num_gpus), (end_s, -replica.num_gpus)])
    assert changes, "somebody was there"
    for name, some in changes.items():
        at_once = np.cumsum([num for _, num in sorted(some)])
        assert at_once.max() <= LIMITS[name]


def test_a_dearer_gpu_makes_plans_no_cheaper_and_mixing_never_costs() -> None:
    usd = []
    for factor in beyond.FACTORS:
        some = beyond.repriced(market(), H20, factor)
        usd.append(beyond.cheapest(market(), some).usd_per_hour)
        assert (beyond.saving(market(), some) or 0.0) >= -1e-9
    assert usd == sorted(usd)
    same = beyond.repriced(market(), H20, 1.0)
    shares = [new.tokens_per_usd / old.tokens_per_usd for new, old in zip(same, CANDIDATES, strict=True)]
    assert shares == pytest.approx([market().tokens / TOKENS] * len(shares))


# Every row gets an answer.


class Pretending(Runner):
    """Makes measurements up, of the right form."""

    def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self._pretend(key, task) for key, task in tasks.items()}

    def _pretend(self, key: Any, task: Any) -> Any:
        random = np.random.default_rng(abs(hash(json.dumps(task.content, sort_keys=True))) % 2**32)
        if key[0] == "profiles":
            some = [msgspec.structs.replace(each, service=key[1]) for each in CANDIDATES]
            return {"candidates": msgspec.to_builtins(some), "capacity_rps": 300.0}
        if isinstance(task, Call):
            return {"rps": 20.0 + random.uniform()}
        if key[0] == "transfer":
            return {"transfer_s": 0.5 if key[2] == 0 else 0.3 / key[2] + 0.005 * key[2]}
        assert isinstance(task, SimulationTask)
        names = ("tokens_per_usd", "usd_per_hour", "gpu_hours", "attainment", "e2e_s", "p90_s", "ttft_s", "tbt_s")
        return {name: random.uniform(0.5, 1) for name in (*names, "joules_per_token", "moved")}


@pytest.mark.parametrize("quick", [False, True])
def test_every_claim_has_a_value_a_seed_and_a_reason(quick: bool) -> None:
    found = cauchy.run(Pretending(seeds=(0, 1, 2), quick=quick))
    assert isinstance(found, Findings)
    assert set(found.outcomes) == {claim.id for claim in CLAIMS}
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        outcome = found.outcomes[claim.id]
        repeats = 20 if claim.id.startswith("fig9-") and not quick else 3
        assert len(outcome.values) in (1, repeats) and outcome.why
        claim.rule.judge(outcome.values)
    labels = list(dict.fromkeys(exhibit.label for exhibit in found.exhibits if not exhibit.label.startswith("Headway")))
    order = ["Figure 1", "Figure 4", "Figure 2", "Figure 6", "Figure 7", "Figure 8", "Figure 9", "Table 3", "Figure 10"]
    assert labels == [*order, "Figure 11", "Equation 18"]
    for exhibit in found.exhibits:
        if isinstance(exhibit, Figure):
            json.dumps(exhibit.chart, allow_nan=False)
        else:
            assert isinstance(exhibit, PaperTable)
            assert all(len(row) == len(exhibit.heads) for row in exhibit.rows)


@pytest.mark.parametrize(
    ("claim", "kinds"), [("eq18-8b", set()), ("fig11-degree", {"transfer"}), ("fig8-mc-sharegpt", {"profiles"})]
)
def test_one_claim_runs_its_part_alone(claim: str, kinds: set[str]) -> None:
    asked: list[Any] = []

    class Counting(Pretending):
        def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
            asked.extend(tasks)
            return super().run(tasks)

    found = cauchy.run(Counting(seeds=(0, 1), claims=frozenset({claim})))
    assert claim in found.outcomes and {key[0] for key in asked} == kinds


def test_every_scenario_of_the_schedulers_can_be_read() -> None:
    pretend = Pretending(seeds=(0,))
    first = pretend.run(scheduling.searches((0,), True, True, True, True))
    for task in scheduling.runs(first, (0,), (0,), True, True, True).values():
        scenario.assemble(deepcopy(dict(task.content)), Places(), Path())
