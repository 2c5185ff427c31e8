"""`headway plan cascade`: what a plan promises, the scenario that is written of it keeps."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from msgspec import structs

import headway as hw
from headway import catalog, scenario
from headway.cli import main
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.cascade.candidates import plan_of
from headway.planning.cascade.deployment import Deployment, StageLatencies
from headway.planning.cascade.latency import StageSimulator, evaluator_of
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.plan import confidence
from headway.planning.cascade.plan import plan as make_plan
from headway.planning.cascade.problem import Cheapest, LatencyBudget, Lengths, QualityFloor, Replicas, ReplicaSet
from headway.planning.cascade.rehearsal import RehearsalResult, planned_document, rehearse, tighten_until_met
from headway.planning.cascade.replica_sets import all_sets
from headway.planning.cascade.request import CascadeOptions, make_request
from headway.planning.cascade.search import Search
from headway.planning.combos.problem import Offer
from headway.planning.rehearsals import Resources, Source
from headway.report.page import library_name
from headway.scenario import Simulator
from headway.workload.files import to_parquet
from headway.workload.generate import generate
from headway.workload.quality import Scores
from headway.workload.quality_source import QualitySpec, score_table
from headway.workload.quality_traces import generate_scores
from headway.workload.table import Workload

SCENARIO: dict[str, Any] = {
    "name": "chat",
    "workload": {
        "arrivals": 6,
        "num_requests": 150,
        "quality": {"trace": 1, "cascade": "llama", "num_requests": 100},
    },
    "fleet": [{"model": "llama-3-70b", "gpu": "h100-80gb-sxm", "tp": 4, "replicas": 2}],
}


H100, A100 = (Offer(catalog.gpu(name), 2) for name in ("h100-80gb-sxm", "a100-80gb"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "chat.yaml"
    found.write_text(yaml.safe_dump(SCENARIO))
    return found


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    code = main(["plan", "cascade", *map(str, arguments), "--json", "--no-progress"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if code in (0, 3) else None, printed.err


@pytest.mark.ci
def test_a_plan_keeps_its_promise_as_a_scenario(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, out = tmp_path / "cache", tmp_path / "plan.yaml"
    code, answer, err = plan(capsys, file, "--quality", 78, "--cache", cache, "-o", out)
    assert code == 0, err
    chosen = answer["chosen"]
    assert chosen["kept"] and sum(stage["num_gpus"] for stage in chosen["plan"]["stages"]) <= 8
    assert chosen["plan"]["held_out"]["num_requests"] == 50
    done = scenario.run(scenario.load(out)).summary
    assert done.e2e_s is not None
    assert done.quality == pytest.approx(chosen["rehearsed"]["quality"]) and done.quality >= 78
    assert done.e2e_s.p95 == pytest.approx(chosen["rehearsed"]["p95_s"])
    # Each model alone, and each part of the planner left out.
    names = {each["plan"]["planner"] for each in answer["alternatives"]}
    assert names == {
        "stand-alone llama-3-8b",
        "stand-alone llama-3-70b",
        "uniform parallelism",
        "uniform allocation",
        "cascade-serve",
    }
    # On other draws of the requests, with an interval.
    fresh = answer["fresh"]
    assert len(fresh["seeds"]) == 5 and 0 <= fresh["num_met"] <= 5
    assert fresh["p95_s"]["low"] < fresh["p95_s"]["mean"] < fresh["p95_s"]["high"]
    # The same again simulates no stage anew.
    again = plan(capsys, file, "--quality", 78, "--cache", cache)
    assert again[1]["chosen"]["plan"]["stages"] == chosen["plan"]["stages"]
    assert again[1]["chosen"]["rehearsed"] == chosen["rehearsed"] and again[1]["num_simulated"] == 0


@pytest.mark.ci
def test_a_latency_budget_holds_for_all_stages_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [file, "--no-cache", "--no-alternatives", "--latency"]
    code, answer, _ = plan(capsys, *asked, 12)
    assert code == 0 and answer["chosen"]["rehearsed"]["p95_s"] <= 12
    code, answer, _ = plan(capsys, *asked, 0.1)
    assert code == 3 and not answer["chosen"]["kept"] and "out of reach" in answer["chosen"]["plan"]["why"]


def test_a_plan_says_what_each_p95_is_of() -> None:
    made = hw.plan_cascade(SMALL, quality=40.0, fresh_draws=2, alternatives=False)
    rehearsed, estimated, fresh, *_ = made.sentences
    assert f"at a p95 of {made.answer.chosen.rehearsed.p95_s:.4g} s" in rehearsed and rehearsed.startswith("rehearsed")
    assert estimated == f"estimated stage by stage before: {made.answer.chosen.plan.why}"
    assert fresh.startswith("on 2 fresh draws of the requests: p95 ")


SMALL: dict[str, Any] = {
    "name": "small",
    "workload": {
        "arrivals": 3,
        "num_requests": 48,
        "quality": {"trace": 1, "cascade": "llama", "num_requests": 24},
    },
    "fleet": [{"model": "llama-3-70b", "gpu": "h100-80gb-sxm", "tp": 4}],
}


@cache
def every_rehearsal(use_all: bool = True, q_min: float = 0.0) -> list[RehearsalResult]:
    """Every routing of the small scenario on every set of replicas, of all GPUs or fewer, simulated as a whole.

    Of those whose thresholds reach `q_min` on the requests that plans are made on.
    """
    asked = make_request(Source(SMALL, Places(), Path()), CascadeOptions(target=QualityFloor(0.0)), Simulator())
    search = Search(asked.problem, StageLatencies(evaluator_of(asked)), NoBounds())
    sets, result, found = all_sets(asked.problem), search.run(QualityFloor(0.0)), list[RehearsalResult]()
    for i, ratios in enumerate(search.routings.ratios.tolist()):
        if search.routings.quality[i] < q_min:
            continue
        used = tuple(ratio > 0 for ratio in ratios)
        each = [sets(stage, used) if there else None for stage, there in enumerate(used)]
        for chosen in product(*([None] if of is None else [of[j] for j in range(len(of))] for of in each)):
            gpus = tuple(0 if replicas is None else replicas.num_gpus for replicas in chosen)
            if sum(gpus) == 4 or (sum(gpus) < 4 and not use_all):
                deployment = Deployment(gpus, chosen, (0.0,) * len(gpus), 0.0, None)
                found.append(rehearse(asked, plan_of(search, i, deployment, result, "every")))
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("budget_s", [22.0, 20.0, 21.0, 27.0, 34.0])
def test_within_a_time_the_quality_is_that_of_all_plans_rehearsed(budget_s: float) -> None:
    """Against every threshold on every set of replicas, each of them simulated as a whole."""
    asked = make_request(Source(SMALL, Places(), Path()), CascadeOptions(target=LatencyBudget(budget_s)), Simulator())
    best = max((done.quality or 0.0 for done in every_rehearsal() if done.meets(asked.problem.target)), default=None)
    assert best is not None
    found = tighten_until_met(asked, StageLatencies(evaluator_of(asked)))
    assert found.is_met and found.rehearsed.quality is not None
    assert best - 0.5 <= found.rehearsed.quality <= best + 1e-9


@pytest.mark.ci
@pytest.mark.parametrize(("q_min", "within_s"), [(55.0, 6.0), (70.0, 22.0), (75.0, 28.0)])
def test_the_cheapest_plan_is_that_of_all_plans_rehearsed(q_min: float, within_s: float) -> None:
    """Against every threshold on every set of replicas, fewer than all GPUs included."""
    target = Cheapest(q_min, within_s)
    asked = make_request(Source(SMALL, Places(), Path()), CascadeOptions(target=target), Simulator())
    usd = [done.usd_per_request or 0.0 for done in every_rehearsal(False, q_min) if done.meets(target)]
    found = tighten_until_met(asked, StageLatencies(evaluator_of(asked)))
    assert found.is_met and found.rehearsed.usd_per_request is not None
    assert min(usd) - 1e-12 <= found.rehearsed.usd_per_request <= 1.05 * min(usd)


UNLIKE = "h100-80gb-sxm:2,a100-80gb:4:1.5,l40s:2"


@pytest.mark.ci
def test_unlike_gpus_are_planned_together(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "plan.yaml", tmp_path / "plan.html"
    asked = [file, "--quality", 75, "--gpus", UNLIKE, "--no-alternatives", "--cache", tmp_path / "cache"]
    code, answer, err = plan(capsys, *asked, "-o", out, "--html", html)
    assert code == 0, err
    chosen, taken = answer["chosen"], dict[str, int]()
    for part in (part for stage in chosen["plan"]["stages"] for part in stage["replicas"]):
        taken[part["gpu"]] = taken.get(part["gpu"], 0) + part["tp"] * part["pp"] * part["count"]
    assert all(num <= {"h100-80gb-sxm": 2, "a100-80gb": 4, "l40s": 2}[name] for name, num in taken.items())
    alone = plan(capsys, file, "--quality", 75, "--gpus", "a100-80gb:4:1.5", "--no-cache", "--no-alternatives")[1]
    assert not alone["chosen"]["kept"] or chosen["rehearsed"]["p95_s"] <= alone["chosen"]["rehearsed"]["p95_s"]
    names = set(taken)
    assert len(names) > 1 and all(name in html.read_text() for name in names)
    assert html.with_name(library_name()).exists()
    written = yaml.safe_load(out.read_text())["fleet"]
    assert {pool["gpu"] for pool in written} == names
    assert all(pool["usd_per_gpu_hour"] == 1.5 for pool in written if pool["gpu"] == "a100-80gb")
    done = scenario.run(scenario.load(out)).summary
    assert done.e2e_s is not None and done.e2e_s.p95 == pytest.approx(chosen["rehearsed"]["p95_s"])
    usd = (done.usd + done.judge_usd) / done.num_completed
    assert (done.quality, usd) == pytest.approx(
        (chosen["rehearsed"]["quality"], chosen["rehearsed"]["usd_per_request"])
    )
    assert main(["plan", "cascade", *map(str, asked), "--no-progress"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_own_gpus_are_planned_with_and_marked(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fleet's GPU is measured; one of our own, which is like it, is not."""
    gpus, out, html = tmp_path / "gpu.yaml", tmp_path / "plan.yaml", tmp_path / "plan.html"
    gpus.write_text(yaml.safe_dump({"name": "mine", "like": "h100", "usd_per_hour": 0.5}))
    asked = ["--quality", 70, "--no-cache", "--no-alternatives"]
    code, answer, err = plan(capsys, file, *asked, "--gpus", 8)
    assert code == 0, err
    assert answer["pools"] and all(each["gpu"] == "h100-80gb-sxm" for each in answer["pools"])
    before = {each["calibrated"] for each in answer["pools"]}
    code, answer, err = plan(capsys, file, *asked, "--gpus", "mine:8", "--gpu-file", gpus, "-o", out, "--html", html)
    assert code == 0, err
    assert {each["gpu"] for each in answer["pools"]} == {"mine"} and not any(e["calibrated"] for e in answer["pools"])
    assert all("kernels of h100-80gb-sxm" in each["uncalibrated"] for each in answer["pools"]) and before
    assert "on mine are not calibrated (kernels of h100-80gb-sxm" in html.read_text()
    assert scenario.run(scenario.load(out)).summary.num_completed == 150


def test_one_model_on_two_types_is_a_pool_of_each() -> None:
    asked = make_request(
        Source(SMALL, Places(), Path()), CascadeOptions(target=QualityFloor(60.0), gpus=(H100, A100)), Simulator()
    )
    first = asked.problem.models[0]
    parts = (Replicas(1, 1, 1, "a100-80gb"), Replicas(1, 1, 1, "h100-80gb-sxm"))
    search = Search(asked.problem, StageLatencies(evaluator_of(asked)), NoBounds())
    result = search.run(QualityFloor(0.0))
    found = plan_of(
        search, search.least, Deployment((0, 0), (ReplicaSet(parts), None), (1.0, 0.0), 1.0, None), result, "x"
    )
    pools = planned_document(asked, found)["fleet"]
    assert [(pool["gpu"], pool["model"], pool["replicas"]) for pool in pools] == [
        ("a100-80gb", first.name, 1),
        ("h100-80gb-sxm", first.name, 1),
    ]
    both, one = (
        rehearse(asked, found),
        rehearse(
            asked,
            structs.replace(found, stages=(structs.replace(found.stages[0], replicas=parts[:1]), found.stages[1])),
        ),
    )
    assert both.num_completed == both.num_requests and both.p95_s < one.p95_s  # type: ignore[operator]


def test_a_fleet_of_several_types_is_planned_with_all_of_them() -> None:
    first = SCENARIO["fleet"][0]
    more = [
        {"model": "llama-3-8b", "gpu": "l40s", "replicas": 3, "usd_per_gpu_hour": 1.1},
        {"model": "llama-3-8b", "gpu": "h100-80gb-sxm", "replicas": 1},
    ]
    asked = make_request(
        Source({**SCENARIO, "fleet": [first, *more]}, Places(), Path()),
        CascadeOptions(target=QualityFloor(75.0)),
        Simulator(),
    )
    offers = [(offer.gpu.name, offer.limit, offer.usd_per_hour) for offer in asked.problem.offers]
    assert offers == [("h100-80gb-sxm", 9, None), ("l40s", 3, 1.1)] and not asked.problem.use_all
    assert asked.problem.hardware == "9 x h100-80gb-sxm + 3 x l40s"
    assert asked.template_pools == {
        "llama-3-8b": 2,
        "llama-3-70b": 0,
        "llama-3-8b on l40s": 1,
        "llama-3-70b on l40s": 1,
    }
    alone = make_request(
        Source(SCENARIO, Places(), Path()), CascadeOptions(target=QualityFloor(75.0)), Simulator()
    ).problem
    assert alone.other_offers == () and alone.use_all and alone.num_gpus == 8


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("h100", "expected how many there are"),
        ("h100:2,h100:3", "each type once"),
        ("h99:2", "unknown GPU 'h99'"),
        ("h100:x", "expected type:count"),
        ("0", "GPU"),
    ],
)
def test_gpus_that_make_no_sense_are_told(
    file: Path, capsys: pytest.CaptureFixture[str], gpus: str, message: str
) -> None:
    code, _, err = plan(capsys, file, "--quality", 75, "--gpus", gpus)
    assert code == 2 and message in err


def test_a_quality_that_no_model_has_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer, _ = plan(capsys, file, "--quality", 99, "--no-cache", "--no-alternatives")
    assert code == 3 and "at most" in answer["chosen"]["plan"]["why"]


def test_one_model_left_makes_a_scenario_without_a_cascade() -> None:
    options = CascadeOptions(target=QualityFloor(1.0), alternatives=False, fresh_draws=0)
    asked = make_request(Source(SCENARIO, Places(), Path()), options, Simulator())
    answer = make_plan(asked, Resources(Simulator()))
    document = planned_document(asked, answer.chosen.plan)
    assert "cascade" not in document and list(document["workload"]["quality"]["models"]) == ["llama-3-8b"]
    assert answer.chosen.is_met


def test_a_stage_alone_has_the_same_arrivals_whatever_serves_it() -> None:
    asked = make_request(Source(SCENARIO, Places(), Path()), CascadeOptions(target=QualityFloor(80.0)), Simulator())
    problem = asked.problem
    found = StageSimulator(problem.gpu, problem.engine, asked.policies)
    scores = problem.scores
    lengths = Lengths(
        scores.prompt_tokens.astype("f8"), scores.prompt_tokens.astype("f8"), scores.output_tokens[:, 1].astype("f8")
    )
    one, two = (ReplicaSet((Replicas(4, 1, count),)) for count in (1, 2))
    slow, fast = (found.p95_latency_s(problem.models[1], each, 8.0, lengths) for each in (one, two))
    assert fast < slow
    assert slow == found.p95_latency_s(problem.models[1], one, 8.0, lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": {"arrivals": 6, "num_requests": 9, "prompt_tokens": 5, "output_tokens": 5}}, "quality"),
        ({"workload": {**SCENARIO["workload"], "prompt_tokens": 5}}, "prompt_tokens: not with quality"),
        ({"workload": {**SCENARIO["workload"], "quality": {"trace": 7}}}, "expected 1, 2 or 3"),
        ({"workload": {**SCENARIO["workload"], "quality": {}}}, "expected trace or path"),
        ({"fleet": []}, "no replicas"),
    ],
)
def test_what_cannot_be_planned_is_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        make_request(
            Source({**SCENARIO, **change}, Places(), Path()), CascadeOptions(target=QualityFloor(80.0)), Simulator()
        )


def test_a_workload_carries_the_rows_of_its_table(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text(
        "request,model,score,output_tokens\n"
        + "".join(f"{i},{model},{10 * i + more},{50 + i}\n" for i in range(4) for model, more in (("s", 0), ("l", 50)))
    )
    spec = QualitySpec(path="scores.csv", models={"s": "llama-3-8b", "l": "llama-3-70b"})
    assert score_table(spec, tmp_path).models == ("llama-3-8b", "llama-3-70b")
    document = {**SCENARIO, "workload": {"arrivals": 5, "num_requests": 8, "quality": {"path": "scores.csv"}}}
    document["workload"]["quality"] |= {"models": spec.models}
    rows = generate(scenario.assemble(document, Places(), tmp_path).spec.workload, 0, tmp_path)
    assert sorted(rows.column("quality:llama-3-70b")) == [50, 50, 60, 60, 70, 70, 80, 80]
    assert rows.output_tokens.tolist() == (50 + rows.column("quality:llama-3-8b") / 10).tolist()


def test_the_more_requests_the_surer_a_threshold() -> None:
    few, many = (confidence(generate_scores(1, num), (74.0, 64.0)) for num in (100, 1600))
    for narrow, wide in zip(
        (many.quality, *many.processing_ratios[1:]), (few.quality, *few.processing_ratios[1:]), strict=True
    ):
        assert narrow[1] - narrow[0] < 0.5 * (wide[1] - wide[0])
    scores = generate_scores(1, 1600)
    assert many.quality[0] < (scores.quality((74.0, 64.0)) or 0.0) < many.quality[1]
    assert many.processing_ratios[0] == (1.0, 1.0)
    first = many.thresholds[0]
    assert first is not None and first[0] <= 74.0 <= first[1]


def test_a_threshold_that_does_not_matter_is_as_low_as_can_be() -> None:
    same = np.full((50, 2), 80.0)
    tokens = np.ones((50, 2), "i8")
    found = confidence(Scores(("a", "b"), same, tokens, tokens[:, 0]), (90.0,))
    assert found.quality == (80.0, 80.0) and found.thresholds == ((0.0, 0.0),)


# A served day.


def served_day(path: Path, audited: float = 0.2, threshold: float = 75.0) -> Scores:
    """The records of a cascade that was served: easy requests have no answer of the larger model, and that model's
    answers are judged in audits alone. Returns the table that they were drawn from."""
    table = generate_scores(1, 600, cascade="llama")
    small, large = table.models
    random = np.random.default_rng(0)
    is_audited = random.random(len(table)) < audited
    is_escalated = (table.scores[:, 0] < threshold) | is_audited
    rows = Workload(
        {
            "arrival_s": np.sort(random.random(len(table))) * 100.0,
            "prompt_tokens": table.prompt_tokens,
            "output_tokens": np.where(is_escalated, table.output_tokens[:, 1], table.output_tokens[:, 0]),
            f"quality:{small}": table.scores[:, 0],
            f"quality:{large}": np.where(is_audited, table.scores[:, 1], np.nan),
            f"output_tokens:{small}": table.output_tokens[:, 0].astype("i4"),
            f"output_tokens:{large}": np.where(is_escalated, table.output_tokens[:, 1], -1).astype("i4"),
        }
    )
    to_parquet(rows, path)
    return table


@pytest.mark.ci
def test_a_served_day_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = served_day(tmp_path / "requests.parquet")
    file, out = tmp_path / "day.yaml", tmp_path / "plan.yaml"
    document = SCENARIO | {"workload": {"trace": "requests.parquet"}}
    document["fleet"] = [{**SCENARIO["fleet"][0], "model": name, "replicas": 1} for name in table.models]
    document["cascade"] = {"models": list(table.models)}
    file.write_text(yaml.safe_dump(document))
    code, answer, err = plan(capsys, file, "--quality", 78, "--no-alternatives", "-o", out)
    assert code == 0, err
    chosen = answer["chosen"]["plan"]
    assert 0 < chosen["stages"][-1]["rate_rps"] < 6.0 == pytest.approx(chosen["stages"][0]["rate_rps"], rel=0.05)
    thresholds = [stage["threshold"] for stage in chosen["stages"][:-1]]
    assert table.quality(thresholds) == pytest.approx(78, abs=3), "on all answers, which the records do not have"
    assert scenario.run(scenario.load(out)).summary.num_completed > 0


def test_a_table_of_a_served_day_has_the_first_scores_of_all_requests(tmp_path: Path) -> None:
    table = served_day(tmp_path / "requests.parquet")
    found = score_table(QualitySpec(path="requests.parquet", models=table.models), tmp_path)
    assert not np.isnan(found.scores).any() and 80 < len(found) < 160
    assert found.scores[:, 0].mean() == pytest.approx(table.scores[:, 0].mean(), abs=1.5)
    assert "600 requests have a score of every model" in found.notes[0]


@pytest.mark.parametrize(
    ("workload", "audited", "words"),
    [
        ({"trace": "requests.parquet"}, 0.0, "audit_share"),
        ({"trace": {"path": "requests.parquet", "from_s": 5}}, 0.2, "from_s: a day's records are planned for as"),
        ({"trace": "requests.parquet", "seed": 2}, 0.2, "workload"),
    ],
)
def test_a_served_day_that_cannot_be_planned_for_is_refused(
    workload: dict[str, Any], audited: float, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served_day(tmp_path / "requests.parquet", audited)
    (tmp_path / "day.yaml").write_text(yaml.safe_dump(SCENARIO | {"workload": workload}))
    code, _, err = plan(capsys, tmp_path / "day.yaml", "--quality", 78)
    assert code == 2 and err.count("\n") == 1 and words in err


def test_prefix_caches_shorten_prompts_in_plans(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def p95_s(rate: float) -> float:
        code, answer, err = plan(capsys, file, "--quality", 78, "--no-alternatives", "--prefix-hit-rate", rate)
        assert code == 0, err
        return max(stage["p95_latency_s"] for stage in answer["chosen"]["plan"]["stages"])

    assert p95_s(0.9) < p95_s(0.0)
