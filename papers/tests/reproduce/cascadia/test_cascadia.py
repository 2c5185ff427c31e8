"""Reproducing Cascadia: the cases, what the claims make of measurements, the loop against exhaustive search."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest

from headway.catalog import coefficients
from headway.core.fleet import Parallel
from headway.perf.step import StepModel
from headway.planning.cascade import candidates, planners
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.problem import CascadePlan
from headway.planning.cascade.rehearsal import simulated
from headway.planning.cascade.replica_sets import all_sets
from headway.workload.quality_traces import TABLE_2
from headway_papers.reproduce.cascadia import (
    CLAIMS,
    claims,
    outcomes,
    paper_plans,
    parts,
    regimes,
    runs,
    setup,
    studies,
)
from headway_papers.reproduce.findings import Finding, PaperTable
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Measurement

SEEDS = (0, 1)
NUM_JUDGED = len(SEEDS) * outcomes.JUDGED_FACTOR


def measured(large: int, share: float, quality: float) -> Measurement:
    """A case in which other systems are slower than Cascadia, and have less throughput, as the paper says."""

    def runs_of(p95_s: float) -> list[Measurement]:
        return [
            {"p95_s": p95_s, "mean_s": 1.0, "quality": quality, "throughput_rps": 100 / p95_s}
            for _ in range(NUM_JUDGED)
        ]

    factor = {"cascadia": 1.0, "stand-alone": 2.8, runs.NO_JUDGE: 0.98, "uniform parallelism": 1.4}
    factor |= dict.fromkeys(("cascade-serve", *outcomes.READINGS, "uniform allocation"), 1.7)
    plan = {
        "thresholds": [70.0, 60.0],
        "ratios": [1.0, 0.6, share],
        "gpus": [4, 28 - large, large],
        "labels": ["a"] * 3,
    }
    return {
        "runs": {name: runs_of(10.0 * times) for name, times in factor.items()},
        "plans": dict.fromkeys(factor, plan),
        "rehearsed": {"p95_s": 10.0, "quality": quality},
        "plan_s": 12.0,
    }


def cases(quality: float | None = None) -> dict[outcomes.Case, Measurement]:
    shares = {(90.0, 1): (20, 0.5), (85.0, 1): (16, 0.21), (80.0, 1): (12, 0.11), (80.0, 2): (8, 0.03)}
    return {
        case: measured(*shares.get((case[2], case[1]), (0, 0.0)), case[2] if quality is None else quality)
        for case in claims.ALL_CASES
    }


def judged(found: dict[str, Finding]) -> dict[str, bool | None]:
    by_id = {claim.id: claim for claim in CLAIMS}
    return {name: by_id[name].rule.judge(each.values).holds for name, each in found.items()}


def test_the_cases_are_those_of_table_2_and_of_figure_5() -> None:
    assert {(trace, q_min) for _, trace, q_min in claims.CASES} == {(row.trace, row.q_min) for row in TABLE_2}
    assert len(claims.ALL_CASES) == 12 and set(claims.CASES) < set(claims.ALL_CASES)
    case = setup.planning_case("deepseek", 1, 85.0)
    assert case.problem.num_gpus == 32 and case.problem.server == 8 and len(case.problem.models) == 3
    assert len(setup.planning_case("llama", 2, 80.0).problem.models) == 2


def found_in(made: dict[outcomes.Case, Measurement]) -> dict[str, bool | None]:
    of_ablations = [{"runs": {name: made[case]["runs"][name] for name in outcomes.ABLATIONS}} for case in claims.CASES]
    runner = Runner(SEEDS)
    runner.run = lambda tasks: dict(zip(tasks, of_ablations, strict=True))  # type: ignore[method-assign]
    rates = {(case[0], case[1]): {"rate_rps": 30.0, "lone_s": 5.0} for case in made}
    parts = outcomes._ablations(runner, made, rates).outcomes
    return judged(outcomes._end_to_end(made, range(NUM_JUDGED)) | outcomes._single_cases(made) | dict(parts))


def test_claims_hold_where_everything_is_as_the_paper_says() -> None:
    found = found_in(cases())
    most = {"slo-most", "throughput-most"}  # 2.8 times in every case is not 4 or 5 in one
    assert {name for name, holds in found.items() if not holds} <= most
    expected = {claim.id for claim in (*claims.END_TO_END, *claims.ABLATIONS, *claims.JUDGE)} - {"judge-gpus"}
    assert set(found) == expected


def test_a_quality_that_is_missed_by_more_than_a_point_fails() -> None:
    assert not found_in(cases(quality=88.0))["quality"]


def test_what_table_2_allows() -> None:
    caps = list(outcomes.caps_of_table_2().values())
    assert caps == pytest.approx([1.25, 2.38, 0.81, 1.61, 1.90, 5.00], abs=0.005)


def _rated_fast(**arguments: object) -> Measurement:
    return {"rate_rps": 30.0, "capacity_rps": 32.0, "lone_s": 5.0, "lone": {"a": [1.0, 50.0], "b": [2.0, 60.0]}}


def test_the_papers_plans_use_the_gpus_and_models_that_it_says() -> None:
    for row, (_, trace, q_min) in enumerate(claims.CASES):
        case = setup.planning_case("deepseek", trace, q_min)
        plan = paper_plans.plan_of_tables(case, row)
        assert sum(stage.num_gpus for stage in plan.stages) == 32
        assert [sum(part.num_gpus for part in stage.replicas) for stage in plan.stages] == list(TABLE_2[row].gpus)
        assert len(plan.thresholds) == sum(bool(stage.replicas) for stage in plan.stages) - 1


def test_the_scarcest_stage_serves_as_much_as_in_any_division() -> None:
    """Against all divisions of eight GPUs by hand, for routings that leave out a stage, too."""
    random = np.random.default_rng(0)
    capacity = [np.maximum.accumulate(np.concatenate([[0.0], random.uniform(0, 9, 8)])) for _ in range(3)]
    ratios = np.array([[1.0, 0.6, 0.2], [1.0, 0.3, 0.0], [1.0, 0.9, 0.9]])
    most, best = regimes.scarcest(ratios, capacity, divisions := regimes.divisions_of(8, 3))
    for row, shares in enumerate(ratios.tolist()):

        def served(division: tuple[int, ...], shares: list[float] = shares) -> float:
            return min(
                capacity[i][num] / share for i, (num, share) in enumerate(zip(division, shares, strict=True)) if share
            )

        every = [each for each in product(range(9), repeat=3) if sum(each) == 8]
        assert most[row] == pytest.approx(max(map(served, every)))
        assert served(tuple(divisions[best[row]].tolist())) == pytest.approx(most[row])


def test_plans_for_throughput_keep_the_quality_and_cascade_serve_shares_its_gpus_equally() -> None:
    """Where a GPU completes one request a second whatever its replica."""
    case = setup.planning_case("deepseek", 1, 85.0)
    problem = dataclasses.replace(case.problem, use_all=False, max_kinds=2)
    sets = tuple(all_sets(problem)(i, ()) for i in range(3))
    rps = tuple(each.cells.astype("f8") for each in sets)
    capacity = regimes.Capacities(sets, rps, problem.num_gpus, problem.server)
    plans = {
        name: regimes.for_throughput(capacity, name)(problem, StageLatencies(evaluator_of(case)), bounds_of(case))[0]
        for name in regimes.SYSTEMS
        if name != "stand-alone"
    }

    def lasting_rps(plan: CascadePlan) -> float:
        return min(each.num_gpus / each.processing_ratio for each in plan.stages if each.processing_ratio > 0)

    for plan in plans.values():
        assert plan.gpus_used <= 32 and plan.quality >= 85.0
        assert all(bool(each.replicas) == (each.processing_ratio > 0) for each in plan.stages)
    ours, serve, uniform = map(lasting_rps, plans.values())
    assert ours >= serve > uniform
    shares = planners.equal_shares(
        32, tuple(each.processing_ratio > 0 for each in plans["cascade-serve-uniform"].stages)
    )
    for stage, share in zip(plans["cascade-serve-uniform"].stages, shares, strict=True):
        assert stage.num_gpus <= share
    alone = regimes.alone_for_throughput(capacity, 2)(problem, StageLatencies(evaluator_of(case)), bounds_of(case))[0]
    assert [(each.model, each.num_gpus) for each in alone.stages] == [(problem.names[2], 32)]


@pytest.mark.long
def test_what_lasts_is_below_a_rate_at_which_queues_grow() -> None:
    """At 90% of what a plan sustains, answers late in a run take no longer than early ones; at 130% they do."""
    case = setup.planning_case("llama", 1, 80.0, 40.0)
    plan = candidates.plan(case.problem, StageLatencies(evaluator_of(case)), bounds_of(case), planners.EFFORT)
    _, records = simulated(case, plan, 0)
    lasting_rps = runs.sustained_rps(case, records, plan)
    growth = []
    for share in (0.9, 1.3):
        _, records = simulated(setup.planning_case("llama", 1, 80.0, share * lasting_rps), plan, 0)
        order = records.requests["request"].argsort()
        latency_s = records.requests["end_s"][order] - records.workload["arrival_s"]
        third = len(latency_s) // 3
        growth.append(float(latency_s[-third:].mean() / latency_s[third : 2 * third].mean()))
    assert growth[0] < 1.25 < growth[1]


def test_exhibits_have_a_row_for_every_case() -> None:
    rates = {("deepseek", trace): {"rate_rps": 50.0, "lone_s": 5.0} for trace in (1, 2, 3)}
    plans = cases()
    for each in plans.values():
        each["plans"]["cascadia"]["p95_s"] = [1.0, 2.0, 3.0]
    tables = [each for each in outcomes._exhibits(plans, rates) if hasattr(each, "rows")]
    assert [len(each.rows) for each in tables] == [12, 12, 12]


@pytest.mark.slow
@pytest.mark.ci
def test_the_loop_is_near_what_exhaustive_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "ARRIVALS_S", 10.0)
    monkeypatch.setattr(runs, "NUM_ROUTINGS", 4)
    found = runs.optimality(seed=0, num_gpus=4, rate_rps=40.0)
    ours, every = found["searches"]["ours"], found["searches"]["exhaustive"]
    assert -1e-9 <= ours["latency_s"] / every["latency_s"] - 1 <= 0.06 and ours["evaluations"] < every["evaluations"]


def test_only_what_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "optimality", _fast)
    monkeypatch.setattr(runs, "rate", _rated_fast)
    found = outcomes.findings(Runner(SEEDS, claims=frozenset({"optimality"})))
    assert set(found.outcomes) == {"optimality", "search-effort"}
    assert found.outcomes["search-effort"].values == [20.0] * 2 * len(SEEDS)


def _fast(seed: int, num_gpus: int, rate_rps: float) -> Measurement:
    ours = {"latency_s": 1.0, "evaluations": 5.0, "cpu_s": 0.1}
    return {"searches": {"ours": ours, "exhaustive": ours | {"evaluations": 100.0}}, "num_requests": 200}


def test_a_model_that_is_slower_is_so_in_every_iteration() -> None:
    case = setup.planning_case("deepseek", 1, 85.0)
    large, gpu, engine = case.problem.models[-1], case.problem.gpu, case.problem.engine
    known = coefficients(gpu.name, engine.name)
    plain = StepModel(large, gpu, engine, Parallel(8), known).line
    slow = StepModel(large, gpu, engine, Parallel(8), setup.slowed(known, 2.0)).line
    for num in (1, 64, 256):
        assert slow(num, 300 * num)[0] == pytest.approx(2 * plain(num, 300 * num)[0], rel=0.02)
    # Plans are made, rehearsed and written with it.
    factor = case.coefficients[large.name].overhead.step_s / case.coefficients[case.problem.names[0]].overhead.step_s
    assert factor == pytest.approx(setup.AWQ_SLOWER)
    assert [case.template_pools[name] for name in case.problem.names] == [0, 1, 2]


def test_weaker_judges_are_compared_with_the_reference() -> None:
    of = {"share": 0.5, "latency_s": 10.0, "quality": 80.0}
    plans = {
        "gpt-4o": of,
        "gpt-4o-mini": of | {"share": 0.55},
        "gpt-4o-mini, known": of,
        "llama-3.1-70b": of | {"latency_s": 10.5, "quality": 79.0},
        "llama-3.1-70b, known": of | {"share": 0.6},
        "gpt-4o-mini, less": of,
        "llama-3.1-70b, less": of,
        "bias alone": of,
    }
    found = studies._weaker_judges([{"plans": plans, "most": dict.fromkeys(plans, 84.0)}])
    values = {name: each.values[0] for name, each in found.outcomes.items()}
    assert values == pytest.approx(
        {
            "judge-mini-routing": 0.1,
            "judge-mini-latency": 0.0,
            "judge-llama-routing": 0.0,
            "judge-llama-latency": 0.05,
            "judge-mini-routing-known": 0.0,
            "judge-mini-latency-known": 0.0,
            "judge-llama-routing-known": 0.2,
            "judge-llama-latency-known": 0.0,
            "judge-weak-quality": -1.0,
        }
    )


def test_errors_of_table_1_are_those_after_one_factor() -> None:
    exact = {" ".join(map(str, shape)): {"rps": 40 * real} for shape, real in parts.TABLE_1.items()}
    measured = studies._table_1([{"shapes": exact}], {"shapes": exact})
    (table,) = measured.exhibits
    assert isinstance(table, PaperTable)
    assert measured.outcomes["simulator"].values == pytest.approx([0.0]) and len(table.rows) == 7
    off = exact | {"1 4 1": {"rps": 2 * exact["1 4 1"]["rps"]}}
    doubled = studies._table_1([{"shapes": off}], {"shapes": exact}).outcomes["simulator"].values[0]
    assert doubled is not None and doubled > 0.1


def test_one_shape_for_all_workloads_loses_where_the_best_differs() -> None:
    alike = {"a, long": {"(8, 1, 1)": 4.0, "(1, 8, 1)": 2.0}, "b, long": {"(8, 1, 1)": 8.0, "(4, 2, 1)": 6.0}}
    assert studies._loss_of_one(alike) == 1.0
    assert studies._loss_of_one(alike | {"b, long": {"(8, 1, 1)": 5.0, "(1, 8, 1)": 6.0}}) == pytest.approx(1.2)
