"""Which scaler: the choice, the frontier, what is written, and what is read as demand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.browser import opened

from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.rehearsals import Resources
from headway.planning.scaling.answer import report, sentences
from headway.planning.scaling.candidates import FAMILIES
from headway.planning.scaling.demand import csv_series, prometheus_series, with_demand
from headway.planning.scaling.plan import (
    Rehearsed,
    ScalerResult,
    ScalingOptions,
    ScalingPlan,
    StartUpCase,
    cheapest,
    compared,
    comparisons,
    hours_at,
    is_on_frontier,
    plan,
    scenario_yaml,
    sufficient,
    with_start,
)
from headway.report.page import write_page
from headway.report.render import page
from headway.scenario import Scenario, Simulator, run
from headway.scenario.run import assemble
from headway.serving.export.autoscalers import autoscalers

RATES = [0.4, 0.4, 0.4, 2.0, 2.0, 2.0, 0.4, 0.4]
DOCUMENT: dict[str, Any] = {
    "name": "steps",
    "workload": {
        "prompt_tokens": 800, "output_tokens": 120, "duration_s": 960,
        "arrivals": {"kind": "curve", "step_s": 120, "rates": RATES},
    },
    "fleet": [{"name": "main", "model": "llama-3.1-70b", "gpu": "a100-80gb", "tp": 4, "engine": "vllm-0.15",
               "kv_capacity_tokens": 12000, "max_replicas": 6}],
    "slo": {"ttft_s": 2},
    "policies": {"routing": "least-loaded"},
}  # fmt: skip


def assembled(document: Mapping[str, Any]) -> Scenario:
    return assemble(document, Places(), Path())


def result(family: str, gpu_hours: float, late: float, *by_seed: tuple[float, float]) -> ScalerResult:
    """`by_seed`: GPU-hours and lateness; by default, one seed with the means."""
    each = tuple(Rehearsed(*pair, 100, 3) for pair in by_seed or ((gpu_hours, late),))
    return ScalerResult(
        family=family,
        setting="x",
        scaling={"name": "reactive"},
        is_oracle=False,
        gpu_hours=gpu_hours,
        late=late,
        starts=3.0,
        by_seed=each,
    )


def test_the_cheapest_of_those_that_are_late_seldom_enough() -> None:
    results = [result("headway", 10, 0.01), result("HPA", 10.4, 0.01), result("reactive", 5, 0.2)]
    assert cheapest(results, 0.01) == 0
    assert cheapest(results, 0.5) == 2
    assert cheapest(results, 0.001) is None
    assert sufficient(results, 0, 0.01) == 1
    assert sufficient([results[0], result("HPA", 10.6, 0.01)], 0, 0.01) is None


def test_the_frontier_has_what_nothing_beats_in_both() -> None:
    results = [result("a", 10, 0.01), result("b", 8, 0.03), result("c", 9, 0.04), result("d", 10, 0.01)]
    assert [is_on_frontier(each, results) for each in results] == [True, True, False, True]


def test_hours_of_a_plan_that_is_as_seldom_late_lie_between_its_settings() -> None:
    results = [result("x", 10, 0.04), result("x", 20, 0.0), result("x", 15, 0.9)]
    assert hours_at(results, 0.02) == 15.0
    assert hours_at(results, 0.05) == 10.0
    assert hours_at(results[:1], 0.01) is None


def test_scalers_are_compared_seed_by_seed_where_they_are_as_seldom_late() -> None:
    own = result("headway", 11, 0.02, (10, 0.02), (12, 0.02))
    others = [result("HPA", 10, 0.04, (8, 0.04), (12, 0.04)), result("HPA", 14, 0.0, (12, 0.0), (16, 0.0))]
    never = result("keda", 5, 0.5, (5, 0.5), (5, 0.5))
    (found,) = comparisons(own, [own, *others, never])
    assert found.family == "HPA" and found.ratio == pytest.approx((10 / 10 + 12 / 14) / 2)
    assert found.interval is not None and found.interval[0] < found.ratio < found.interval[1]
    one_seed = compared(result("headway", 11, 0.02), [result("HPA", 22, 0.02)])
    assert one_seed is not None and (one_seed.ratio, one_seed.interval) == (0.5, None)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> ScalingPlan:
    options = ScalingOptions(scalers=("headway", "hpa"), startup_s=(60.0,), max_late=0.5)
    folder = tmp_path_factory.mktemp("cache")
    planned = partial(plan, DOCUMENT, options, assembled, Resources(Simulator(), folder))
    first = planned()
    again = planned()
    assert (again.num_simulated, again.num_found) == (0, first.num_simulated)
    assert again.plans == first.plans
    return first


@pytest.mark.ci
def test_a_plan_of_all_parts(answer: ScalingPlan, tmp_path: Path) -> None:
    (one,) = answer.plans
    assert one.startup_s == 60.0 and one.chosen is not None
    best = one.results[one.chosen]
    assert best.late <= 0.5 and best.on_frontier
    assert one.bound_gpu_hours is None or one.bound_gpu_hours < min(each.gpu_hours for each in one.results)
    assert {each.family for each in one.results} == {"headway", "HPA"} and len(one.clairvoyant) == 7
    text = scenario_yaml(one, DOCUMENT, Path())
    made = yaml.safe_load(text)
    assert made["fleet"][0]["start_s"] == 60.0
    (tmp_path / "chosen.yaml").write_text(text)
    done = run(assemble(made, Places(), tmp_path))
    assert done.summary.gpu_hours == pytest.approx(best.gpu_hours)


@pytest.mark.ci
def test_the_page_draws_a_frontier(answer: ScalingPlan, tmp_path: Path) -> None:
    file = tmp_path / "scaling.html"
    text = page(report(answer), "headway plan scaling s.yaml")
    assert all(line.split(":")[0] in text for line in sentences(answer.plans[0]))
    write_page(file, text)
    with opened(file.as_uri(), tmp_path) as shown:
        shown.value("new Promise(done => setTimeout(done, 300))")
        drawn = shown.value("document.querySelectorAll('#frontier0 .scatterlayer .point').length")
    (one,) = answer.plans
    assert drawn == len(one.results) + len(one.clairvoyant) + 1  # the chosen one has a star, too


def test_every_family_has_a_ladder_that_can_be_assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.planning.scaling.plan.served_tps", lambda scenario: ({"main": 900.0}, ()))
    options = ScalingOptions(scalers=tuple(FAMILIES), clairvoyant=False)
    case = StartUpCase(DOCUMENT, None, options, assembled)
    assert {each.family.lower() for each in case.candidates} == set(FAMILIES)
    for candidate in case.candidates:
        assemble({**DOCUMENT, "policies": {"scaling": candidate.scaling}}, Places(), Path())


def test_start_times_are_those_of_every_pool_and_side() -> None:
    document = {
        "fleet": [{"model": "m"}],
        "combos": [{"prefill": {"model": "m"}, "decode": {"model": "m"}}],
        "provisioning": {"reclaim_s": 1},
        "variants": [{"name": "x", "routing": "random", "scaling": "lt-i"}],
    }
    made = with_start(document, 155.0)
    assert made["fleet"][0]["start_s"] == made["combos"][0]["decode"]["start_s"] == 155.0
    assert "provisioning" not in made and made["policies"] == {"routing": "random"}


def test_rates_of_a_csv_become_a_curve(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("time,rate\n2026-01-31T09:00:00,60\n2026-01-31T09:05:00,120\n")
    made = with_demand({"workload": {"prompt_tokens": 5, "num_requests": 9}}, str(file), 60.0)
    assert made["workload"] == {
        "prompt_tokens": 5,
        "duration_s": 600.0,
        "arrivals": {"kind": "curve", "step_s": 300.0, "rates": [1.0, 2.0]},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate\n1\n", "expected a column `time`"),
        ("time,a,b\n1,2,3\n", "one column of rates"),
        ("time,rate\n0,1,2\n", "2: 3 columns"),
        ("time,rate\nnoon,1\n", "2: time: 'noon'"),
        ("time,rate\n0,-1\n", "2: rate: '-1'"),
    ],
)
def test_a_csv_that_cannot_be_read_says_where(text: str, words: str) -> None:
    with pytest.raises(HeadwayError, match=words):
        csv_series(text, "r.csv")


def test_uneven_steps_and_requests_of_its_own_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("time,rate\n0,1\n60,1\n200,1\n")
    with pytest.raises(HeadwayError, match="value 3 is 140 s after"):
        with_demand({}, str(file), 1.0)
    with pytest.raises(HeadwayError, match="requests of its own"):
        with_demand({"workload": {"builtin": "chat"}}, str(file), 1.0)


def matrix(*series: list[list[Any]], **more: Any) -> bytes:
    data = {"resultType": "matrix", "result": [{"metric": {}, "values": values} for values in series]}
    return json.dumps({"status": "success", "data": data, **more}).encode()


def test_series_of_prometheus_are_added_and_gaps_filled() -> None:
    answer = matrix([[0, "1"], [60, "2"], [180, "4"]], [[60, "3"]])
    assert prometheus_series(answer, "p") == ([0.0, 60.0, 120.0, 180.0], [1.0, 5.0, 5.0, 4.0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{}", "not the answer of a Prometheus range query"),
        (b'{"status": "error", "error": "parse error"}', "answered error: parse error"),
        (b'{"status": "success", "data": {"resultType": "vector", "result": []}}', "type vector; expected matrix"),
        (matrix([[0, "NaN"]]), "'NaN' at 0"),
    ],
)
def test_other_answers_of_prometheus_are_refused(text: bytes, words: str) -> None:
    with pytest.raises(HeadwayError, match=words):
        prometheus_series(text, "p")


def test_autoscalers_have_the_settings_that_were_simulated() -> None:
    scenario = assemble(DOCUMENT, Places(), Path())
    (hpa,) = yaml.safe_load_all(autoscalers(scenario, {"name": "target-utilization", "kv_use": 0.55}))
    (metric,) = hpa["spec"]["metrics"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "550m"}
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (1, 6)
    (keda,) = yaml.safe_load_all(autoscalers(scenario, {"name": "keda", "threshold": 12.0, "metric": "waiting"}))
    trigger = keda["spec"]["triggers"][0]["metadata"]
    assert trigger["threshold"] == "12" and "waiting" in trigger["query"] and "running" not in trigger["query"]
    assert keda["spec"]["pollingInterval"] == 30
    with pytest.raises(HeadwayError, match="no autoscaler of Kubernetes"):
        autoscalers(scenario, {"name": "headway"})
