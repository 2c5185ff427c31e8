"""Cauchy made anew: the paper's arithmetic, what is searched and planned, and that every row gets an answer."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.planning.combos.problem import ComboCandidate, ComboPlan, GpuCombo, Group
from headway_papers.reproduce import cauchy
from headway_papers.reproduce.cauchy import beyond, demand, model, overall, scheduling, setup, sizing, transfer
from headway_papers.reproduce.cauchy.claims import CLAIMS, GROUPS, TABLE_3, WORKLOADS
from headway_papers.reproduce.cauchy.setup import LIMITS, Market
from headway_papers.reproduce.findings import Figure, Findings, PaperTable
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call

H800, A800, H20 = setup.GPUS.values()
TOKENS = 457
USD = {H800: 2.69, A800: 1.19, H20: 1.5}


def candidate(goodput_rps: float, *groups: Group, eq_15: float = 1.0) -> ComboCandidate:
    """Of ShareGPT, with what it serves for a dollar; `eq_15`: its CE by Eq. 15."""
    usd = sum(USD[each.gpu] * each.num_gpus for each in groups)
    parts = dict(zip(("prefill", "decode"), groups, strict=True)) if len(groups) > 1 else {"aggregated": groups[0]}
    combo = GpuCombo(setup.MODEL, usd, **parts)
    return ComboCandidate("any", combo, goodput_rps, 3600 * goodput_rps * TOKENS / usd, eq_15)


CANDIDATES = (
    candidate(30.0, Group(H800), Group(A800), eq_15=5.0),
    candidate(31.0, Group(A800), Group(H800), eq_15=4.5),
    candidate(20.0, Group(A800), Group(H20), eq_15=6.0),
    candidate(45.0, Group(A800), Group(H20, instances=3), eq_15=6.0),
    candidate(27.0, Group(H800), eq_15=4.0),
    candidate(9.0, Group(A800), eq_15=3.0),
    candidate(8.0, Group(H20), eq_15=2.0),
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
        task = transfer.tasks()["transfer", transfer.SHOWN[-1], degree]
        seconds[degree] = task.measure(Path())["transfer_s"]
    assert seconds[0] == pytest.approx(0.625, rel=0.01) and seconds[8] == pytest.approx(0.085, rel=0.02)
    assert seconds[8] < min(seconds[4], seconds[16])


def test_prefill_is_a_small_part_of_a_request_that_is_alone() -> None:
    for workload in WORKLOADS:
        prefill_s, decode_s = model.unloaded_s(workload)
        assert 0 < prefill_s < 0.1 * decode_s
        assert prefill_s / (prefill_s + decode_s) < model.prefill_share(workload) < 1, "a full GPU shares its decoding"


# Searches and plans.


@pytest.mark.ci
def test_a_goodput_is_where_requests_begin_to_be_late() -> None:
    combos = [setup.split("pair", "h800-h20")]
    routing = {"within": "opportunistic"}
    found = setup.goodput("longwriter", combos, routing, 0, 2.5, quick=True)["rps"]
    below, above = (
        max(setup.strains_at("longwriter", combos, routing, 0, share * found, quick=True)) for share in (0.97, 1.15)
    )
    assert below <= 0 < above


def test_eq_15_decides_directions_and_order_and_goodput_the_size_of_a_pair() -> None:
    labels = [each.combo.label for each in market().candidates]
    one = f"1 x {A800}"
    assert labels[:3] == [f"<{one}, 3 x {H20}>", f"<1 x {H800}, {one}>", f"<1 x {H800}>"]
    assert len(labels) == setup.TOP and f"<{one}, 1 x {H800}>" not in labels, (
        "the other direction serves more for a dollar"
    )
    assert [each.combo.label for each in market().aggregated] == [f"<1 x {H800}>", f"<{one}>", f"<1 x {H20}>"]


def test_demand_is_a_third_of_what_the_cluster_can_serve() -> None:
    assert market().demand_rps == pytest.approx(100.0)
    objectives: tuple[Any, ...] = ("co", "mc", "mce")
    for objective in objectives:
        plan = market().plan(objective)
        assert plan.services[0].goodput_rps >= 100 and _within(plan)
    plain = market().plan(aggregated=True)
    assert all(each.combo.aggregated for each in plain.combos)
    assert market().plan("mc").usd_per_hour <= plain.usd_per_hour + 1e-9
    assert market().plan("mce").gpus != LIMITS, "the most efficient plan is not the whole cluster"
    assert market().reachable_rps > 200


def test_melange_serves_the_same_demand_with_aggregated_gpus() -> None:
    plan = sizing.melange_plan(market(), market().demand_rps)
    assert plan.status in ("optimal", "feasible") and _within(plan)
    assert all(each.combo.aggregated for each in plan.combos)
    assert plan.services[0].shortfall_rps == pytest.approx(0, abs=1e-6)
    # Profiles by bucket are scaled so that on the whole mix they say what was simulated.
    scaled = sizing.ScaledEstimate(market())
    service = market().service
    for each in market().aggregated:
        assert scaled.goodput_rps(each.combo, service.pattern, service.slo) == pytest.approx(each.goodput_rps)


def _within(plan: ComboPlan) -> bool:
    return all(num <= LIMITS[gpu] for gpu, num in plan.gpus.items())


@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_systems_see_the_same_demand_and_begin_with_their_plans(workload: str) -> None:
    systems: tuple[sizing.System, ...] = ("melange", "star", "static", "cauchy")
    given = {name: sizing.sized(market(workload), demand.OWN, name, 1.3, 0.04) for name in systems}
    assert len({json.dumps(each["workload"]) for each in given.values()}) == 1
    assert np.mean(demand.CURVE) == pytest.approx(1.0)
    assert [name for name, each in given.items() if "scaling" in each["policies"]] == ["star", "cauchy"]
    at_first = {name: [c for c in each["combos"] if c["replicas"]] for name, each in given.items()}
    assert at_first["static"] == [c for c in given["cauchy"]["combos"] if c["replicas"]]
    for name in ("melange", "star"):
        assert all("aggregated" in each for each in given[name]["combos"])
    for each in given.values():
        scenario.assemble(deepcopy(each), Places(), Path())


def test_a_size_is_room_in_the_plan_and_in_what_the_scaler_counts_on() -> None:
    one, two = (sizing.kinds_of(market(), "cauchy", k) for k in (1.0, 2.0))
    assert sum(count * rps for _, count, rps in one) >= market().demand_rps
    assert sum(count * 2 * rps for _, count, rps in two) >= 2 * market().demand_rps
    rates = [{what.label: rps for what, _, rps in kinds} for kinds in (one, two)]
    assert all(rates[0][label] == pytest.approx(2 * rates[1][label]) for label in rates[0])


def test_the_smallest_size_that_is_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measured(document: dict[str, float], seed: int) -> dict[str, float]:
        asked.append(document["size"])
        return {
            "attainment": 0.95 if document["size"] >= 1.5 else document["size"] / 2,
            "usd_per_hour": document["size"],
        }

    monkeypatch.setattr(sizing, "measured", measured)
    documents = {f"{k:g}": {"size": k} for k in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8)}
    found = sizing.first_in_time(documents, 0)
    assert found["k"] == "1.5" and asked == [1.0, 1.4, 1.8, 1.6, 1.5], "every fourth, and then by halves"
    assert set(found["tried"]) == {"1", "1.4", "1.8", "1.6", "1.5"}
    assert sizing.first_in_time(dict(list(documents.items())[5:]), 0)["k"] == "1.5", "the first of all is enough"
    asked.clear()
    late = {f"{i}": {"size": 0.5 if i < 8 else 0.4} for i in range(9)}
    assert sizing.first_in_time(late, 0)["k"] == "0" and asked == [0.5, 0.4], "equal fleets are rehearsed once"
    assert sizing.largest_for(documents, 1.55, 0)["k"] == "1.5" and sizing.largest_for(documents, 0.5, 0)["k"] is None


def test_the_azure_hour_is_counted_by_the_minute(tmp_path: Path) -> None:
    file = tmp_path / demand.TRACE.removesuffix(".gz")
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        seconds = [*range(0, 60, 2), *range(60, 120), 125]
        rows.writerows([f"2023-11-16 18:{s // 60:02}:{s % 60:02}.0000000", 10, 10] for s in seconds)
    hour = demand.azure(file)
    assert hour is not None and hour.shares == pytest.approx((2 / 3, 4 / 3), rel=1e-3), (
        "the rest of a minute is left out"
    )
    assert hour.arrivals(30.0, 0.1)["rates"] == pytest.approx([20, 40], rel=1e-3)
    assert hour.duration_s(0.1) == pytest.approx(12.0) and demand.azure(None) is None


def test_autoscaling_stays_within_the_cluster_and_loses_nobody() -> None:
    given = sizing.sized(market(), demand.OWN, "cauchy", 1.0, pace=0.012)
    run = scenario.run(scenario.assemble(given, Places(), Path()))
    assert run.summary.num_completed == run.summary.num_requests > 3000
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
    every = Market("sharegpt", _profile("sharegpt"), "estimate")
    for factor in beyond.FACTORS:
        some = beyond.repriced(every, H20, factor)
        usd.append(beyond.cheapest(every, some).usd_per_hour)
        assert (beyond.saving(every, some) or 0.0) >= -1e-9
    assert usd == sorted(usd)
    same = beyond.repriced(every, H20, 1.0)
    pairs = zip(same, every.candidates, strict=True)
    assert [new.tokens_per_usd / old.tokens_per_usd for new, old in pairs] == pytest.approx(  # type: ignore[operator]
        [every.tokens / TOKENS] * len(same)
    )


# Every row gets an answer, and every row can fail.


@dataclass
class Pretending(Runner):
    """Makes measurements up, of the right form: of all systems from one distribution."""

    worse: float = 1.0
    """Factor on what the paper's own systems serve for a dollar, and over what their latencies are."""

    def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self._pretend(key, task) for key, task in tasks.items()}

    def _pretend(self, key: Any, task: Any) -> Any:
        random = np.random.default_rng(crc32(f"{self.worse} {key}".encode()))
        factor = self.worse if any(each in OWN for each in map(str, key)) else 1.0
        if key[0] == "profiles":
            return _profile(key[1])
        if key[0] == "transfer":
            degree = 8 if key[2] == "less" else key[2]
            return {"transfer_s": 0.3 / degree + 0.005 * degree if degree else 0.5}
        assert isinstance(task, Call)
        if task.function is setup.goodput:
            return {"rps": 20.0 * factor + random.uniform(-0.2, 0.2)}
        found = _measured(random, factor)
        if key[0] == "size":
            return {"k": "1.15", "tried": {"1": found, "1.15": found}}
        return {"k": "1.3", **found} if key[0] == "spend" else found


OWN = ("cauchy", "star", "opportunistic", "empty", "goodput", "h800-h20", "h800-a800", "a800-h20", "0.05", "0.1", "0.2")


def _measured(random: np.random.Generator, factor: float) -> dict[str, float]:
    more, less = (random.normal(1, 0.01) * each for each in (factor, 1 / factor))
    found = {name: 3e7 * more for name in ("tokens_per_usd", "in_time_per_usd")}
    found |= {name: less for name in ("e2e_s", "p90_s", "ttft_s", "tbt_s", "usd_per_hour", "joules_per_token")}
    return found | {"attainment": 0.93, "moved": 0.5}


def _profile(workload: str) -> dict[str, Any]:
    some = [msgspec.structs.replace(each, service=workload) for each in CANDIDATES]
    return {"candidates": msgspec.to_builtins(some), "capacity_rps": 300.0}


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes, and each of Melange's plans once."""
    monkeypatch.setattr(overall, "SIZES", (1.0, 1.15))
    for module in (overall, sizing):
        monkeypatch.setattr(module, "melange_plan", _melange_plan)


_MELANGE_PLAN = sizing.melange_plan
_PLANS: dict[tuple[str, float], ComboPlan] = {}


def _melange_plan(market: Market, rps: float) -> ComboPlan:
    key = market.workload, rps
    if key not in _PLANS:
        _PLANS[key] = _MELANGE_PLAN(market, rps)
    return _PLANS[key]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with an hour of two minutes."""
    lines = "".join(f"2023-11-16 18:{m:02}:{s:02}.0000000,10,10\n" for m in range(3) for s in range(0, 60, 2 + m))
    with gzip.open(tmp_path / demand.TRACE, "wt") as opened:
        opened.write(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{lines}")
    return tmp_path


@pytest.mark.parametrize(
    "quick", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.ci)]
)
def test_every_claim_has_a_value_a_seed_and_a_reason(quick: bool, data: Path) -> None:
    ids = frozenset(claim.id for claim in CLAIMS) - (cauchy.FULL_ONLY if quick else set())
    found = cauchy.run(Pretending(seeds=(0, 1, 2), quick=quick, data=data, claims=ids))
    assert isinstance(found, Findings)
    assert ids <= set(found.outcomes) <= {claim.id for claim in CLAIMS}
    for claim in (claim for claim in CLAIMS if claim.id in ids):
        outcome = found.outcomes[claim.id]
        repeats = 20 if claim.id.startswith("fig9-") and not quick else 3
        assert len(outcome.values) in (1, repeats) and outcome.why
        claim.rule.judge(outcome.values)
        is_left = quick and claim.id.endswith("-curve")
        assert (outcome.values[0] is None) == is_left and is_left == ("A quick run" in outcome.why)
    labels = list(dict.fromkeys(exhibit.label for exhibit in found.exhibits if not exhibit.label.startswith("Headway")))
    order = ["Figure 1", "Figure 4", "Figure 2", "Figure 6", "Figure 7", "Figure 8", "Figure 9", "Table 3", "Figure 10"]
    left = {"Figure 2", "Figure 9", "Table 3"} if quick else set()
    assert labels == [*(label for label in order if label not in left), "Figure 11", "Equation 18"]
    assert all(isinstance(each, Figure | PaperTable) for each in found.exhibits)


@pytest.mark.ci
def test_without_a_trace_the_own_curve_is_judged() -> None:
    ids = frozenset(claim.id for claim in CLAIMS) - cauchy.FULL_ONLY
    found = cauchy.run(Pretending(seeds=(0, 1, 2), quick=True, claims=ids)).outcomes
    for name in ("overall", "in_time", "estimated", "for_mean", "by_ranking", "autoscaling"):
        assert all(found[claim.id].values[0] is None and "--data" in found[claim.id].why for claim in GROUPS[name])
    judged = [claim.id for claim in GROUPS["own_curve"] if claim.id not in cauchy.FULL_ONLY]
    assert judged and all(found[id].values[0] is not None for id in judged)


FOR_MEAN = {claim.id for name in ("for_mean", "by_ranking") for claim in GROUPS[name]}


@pytest.mark.parametrize("worse", [1.0, 0.7])
def test_fleets_for_the_mean_run_alone_and_can_fail(worse: float, data: Path) -> None:
    """They need no sizes; no claim of theirs holds where systems are equal or swapped, and lateness decides none."""
    asked: list[Any] = []

    class Counting(Pretending):
        def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Any]:
            asked.extend(tasks)
            found: dict[Any, Any] = super().run(tasks)
            return {key: each | {"attainment": 0.5} if "attainment" in each else each for key, each in found.items()}

    runner = Counting(seeds=tuple(range(6)), data=data, worse=worse, claims=frozenset(FOR_MEAN))
    found = cauchy.run(runner).outcomes
    assert {key[0] for key in asked} == {"profiles", "overall"}
    assert {key[2] for key in asked if key[0] == "overall"} == {"-mean", "-mean-filter", "-mean-ranking"}
    assert all(None not in found[id].values and found[id].why for id in FOR_MEAN)
    assert not {claim.id for claim in CLAIMS if claim.id in FOR_MEAN and claim.rule.judge(found[claim.id].values).holds}


@pytest.mark.parametrize(("worse", "all_hold"), [(1.0, False), (0.92, False), (1.085, True), (1.3, False)])
def test_thresholds_are_judged_by_all_three_gains(worse: float, all_hold: bool) -> None:
    """None holds where schedulers are equal or swapped, or where the effect is far beyond the paper's."""
    ids = frozenset(claim.id for claim in GROUPS["thresholds"])
    found = cauchy.run(Pretending(seeds=tuple(range(6)), worse=worse, claims=ids)).outcomes
    rules = {claim.id: claim.rule for claim in CLAIMS if claim.id in ids}
    assert {rule.judge(found[id].values).holds for id, rule in rules.items()} == {all_hold}
    assert all(found[id].why for id in ids)


def test_eq_15_leaves_fewer_candidates_the_more_of_it_is_used() -> None:
    """As a filter of directions, as a ranking of pairs, and with the first four alone."""
    rankings: tuple[setup.Ranking, ...] = ("filter", "ranking", "closed-form")
    profile = {"candidates": msgspec.to_builtins(CANDIDATES), "capacity_rps": 300.0}
    left = [{each.combo for each in Market("sharegpt", profile, ranking).candidates} for ranking in rankings]
    assert left[0] > left[1] and left[1] >= left[2] and len(left[2]) <= setup.TOP


def test_melange_by_whole_mixes_pays_no_more_than_any_single_type() -> None:
    plan = market().whole_mix_plan(market().demand_rps)
    assert plan.services[0].goodput_rps >= market().demand_rps - 1e-6
    alone = [each for each in market().profiled if each.combo.aggregated]
    enough = [n * each.combo.usd_per_hour for each in alone if (n := ceil(market().demand_rps / each.goodput_rps)) <= 8]
    assert enough and plan.usd_per_hour <= min(enough) + 1e-9


@pytest.mark.ci
def test_late_systems_are_not_compared_by_their_dollars(data: Path) -> None:
    runner = Late(seeds=(0, 1, 2), data=data)
    outcomes = cauchy.run(runner).outcomes
    assert outcomes["fig7-sharegpt"].values == [None] * 3
    claim = next(claim for claim in CLAIMS if claim.id == "in-time-sharegpt")
    assert claim.rule.judge(outcomes["in-time-sharegpt"].values).holds is False


class Late(Pretending):
    def _pretend(self, key: Any, task: Any) -> Any:
        found = super()._pretend(key, task)
        return found | {"attainment": 0.5} if key[0] == "overall" and key[3] == "melange" else found


def test_token_turns_are_in_proportion_to_what_is_left() -> None:
    """The reproduction's own policy, as a scenario names it."""
    combos = [setup.combo(f"combo-{i}", each.combo, 1, each.goodput_rps) for i, each in enumerate(CANDIDATES[:3])]
    policies = {"routing": scheduling.TURNS}
    contents = setup.document("sharegpt", 5.0, 200, fleet=[], combos=combos, policies=policies)
    run = scenario.run(scenario.assemble(contents, Places(), Path()))
    used = {
        replica.pool.rsplit("-", 1)[0]
        for replica in run.records.replicas
        if replica.id in run.records.segments["replica"]
    }
    assert used == {"combo-0", "combo-1", "combo-2"}
