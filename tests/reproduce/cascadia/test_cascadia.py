"""Reproducing Cascadia: the cases, what the claims make of measurements, the loop against exhaustive search."""

from __future__ import annotations

import pytest

from headway.catalog import coefficients
from headway.core.fleet import Parallel
from headway.perf.step import StepModel
from headway.reproduce.cascadia import CLAIMS, claims, outcomes, parts, runs, setup, studies
from headway.reproduce.findings import Finding, PaperTable
from headway.reproduce.runner import Runner
from headway.reproduce.tasks import Measurement
from headway.workload.quality_traces import TABLE_2

SEEDS = (0, 1)


def measured(large: int, share: float, slower: float, quality: float = 91.0) -> Measurement:
    """A case in which every other system is so many times slower than Cascadia."""

    def runs_of(p95_s: float) -> list[Measurement]:
        return [{"p95_s": p95_s, "mean_s": 1.0, "quality": quality, "throughput_rps": 100 / p95_s} for _ in SEEDS]

    names = (*outcomes.SYSTEMS, *outcomes.ABLATIONS)
    plan = {
        "thresholds": [70.0, 60.0],
        "ratios": [1.0, 0.6, share],
        "gpus": [4, 28 - large, large],
        "labels": ["a"] * 3,
    }
    return {
        "runs": {name: runs_of(10.0 if name == "cascadia" else 10.0 * slower) for name in names},
        "plans": {name: plan for name in names},
        "plan_s": 30.0,
        "search_s": 12.0,
        "no judge": [9.8, 9.8],
    }


def cases(slower: float = 2.0) -> dict[outcomes.Case, Measurement]:
    shares = ((20, 0.5), (16, 0.21), (12, 0.11), (8, 0.03), (0, 0.0), (0, 0.0))
    return {case: measured(*each, slower) for case, each in zip(claims.CASES, shares, strict=True)}


def judged(found: dict[str, Finding]) -> dict[str, bool | None]:
    by_id = {claim.id: claim for claim in CLAIMS}
    return {name: by_id[name].rule.judge(each.values).holds for name, each in found.items()}


def test_the_cases_are_those_of_table_2() -> None:
    assert {(trace, q_min) for _, trace, q_min in claims.CASES} == {(row.trace, row.q_min) for row in TABLE_2}
    case = setup.planning_case("deepseek", 1, 85.0, True)
    assert case.problem.num_gpus == 32 and case.problem.server == 8 and len(case.problem.models) == 3
    assert len(setup.planning_case("llama", 2, 80.0, True).problem.models) == 2


def test_claims_hold_where_everything_is_as_the_paper_says() -> None:
    found = judged(outcomes._end_to_end(cases(), SEEDS))
    assert set(found) == {claim.id for claim in (*claims.END_TO_END, *claims.JUDGE)}
    assert all(found.values())


def test_claims_do_not_hold_where_a_baseline_is_as_good() -> None:
    found = judged(outcomes._end_to_end(cases(1.0), SEEDS))
    kept = {name for name, holds in found.items() if holds}
    assert kept == {"quality", "plans-move", "no-largest", "plan-time", "judge-time"}


def test_a_quality_that_is_missed_once_is_told() -> None:
    made = cases()
    made[claims.CASES[0]] = measured(20, 0.5, 2.0, quality=89.5)
    found = outcomes._end_to_end(made, SEEDS)["quality"]
    assert list(found.values) == pytest.approx([-0.5, -0.5])


def test_exhibits_have_a_row_for_every_case() -> None:
    rates = {("deepseek", trace): {"rate_rps": 50.0, "lone_s": 5.0} for trace in (1, 2, 3)}
    plans = cases()
    for each in plans.values():
        each["plans"]["cascadia"]["p95_s"] = [1.0, 2.0, 3.0]
    tables = [each for each in outcomes._exhibits(plans, rates) if hasattr(each, "rows")]
    assert [len(each.rows) for each in tables] == [6, 6]


def test_the_loop_is_near_what_exhaustive_search_finds() -> None:
    found = runs.optimality(seed=0, num_rows=4)
    assert -1e-9 <= found["gap"] <= 0.06 and found["evaluations"] < found["all_evaluations"]


def test_only_what_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "optimality", _fast)
    found = outcomes.findings(Runner(SEEDS, quick=True, claims=frozenset({"optimality"})))
    assert set(found.outcomes) == {"optimality", "search-effort"}
    assert found.outcomes["search-effort"].values == [20.0, 20.0]


def _fast(seed: int, num_rows: int) -> Measurement:
    return {"gap": 0.0, "evaluations": 5, "all_evaluations": 100, "plan_s": 0.1, "exhaustive_s": 2.0}


def test_a_model_that_is_slower_is_so_in_every_iteration() -> None:
    case = setup.planning_case("deepseek", 1, 85.0, True)
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
    one = {
        "gpt-4o": of,
        "gpt-4o-mini": of | {"share": 0.55},
        "llama-3.1-70b": of | {"latency_s": 10.5, "quality": 79.0},
    }
    found = studies._weaker([one])
    values = {name: each.values[0] for name, each in found.outcomes.items()}
    assert values == pytest.approx({
        "judge-mini-routing": 0.1, "judge-mini-latency": 0.0, "judge-llama-routing": 0.0, "judge-llama-latency": 0.05,
        "judge-weak-quality": -1.0,
    })  # fmt: skip


def test_errors_of_table_1_are_those_after_one_factor() -> None:
    exact = {" ".join(map(str, shape)): 40 * real for shape, real in parts.TABLE_1.items()}
    measured = studies._table_1([exact])
    (table,) = measured.exhibits
    assert isinstance(table, PaperTable)
    assert measured.outcomes["simulator"].values == pytest.approx([0.0]) and len(table.rows) == 7
    off = exact | {"1 4 1": exact["1 4 1"] * 2}
    doubled = studies._table_1([off]).outcomes["simulator"].values[0]
    assert doubled is not None and doubled > 0.1
