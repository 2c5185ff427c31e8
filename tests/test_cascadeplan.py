"""`headway plan cascade`: what a plan promises, the scenario that is written of it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway import cascadeplan, scenario
from headway.cascadeplan import answers
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.planner.cascade.problem import LatencyBudget, Lengths, QualityFloor, Replicas, ReplicaSet
from headway.userfile import Places
from headway.workload.quality_spec import QualitySpec, table
from headway.workload.spec import generate

SCENARIO: dict[str, Any] = {
    "name": "chat",
    "workload": {
        "arrivals": 6,
        "num_requests": 150,
        "quality": {"trace": 1, "cascade": "llama", "num_requests": 100},
    },
    "fleet": [{"model": "llama-3-70b", "gpu": "h100-80gb-sxm", "tp": 4, "replicas": 2}],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "chat.yaml"
    found.write_text(yaml.safe_dump(SCENARIO))
    return found


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    code = main(["plan", "cascade", *map(str, arguments), "--json", "--no-progress"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if code in (0, 3) else None, printed.err


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
    # The same again simulates no stage anew.
    again = plan(capsys, file, "--quality", 78, "--cache", cache)
    assert again[1]["chosen"]["plan"]["stages"] == chosen["plan"]["stages"]
    assert again[1]["chosen"]["rehearsed"] == chosen["rehearsed"] and again[1]["num_simulated"] == 0


def test_a_latency_budget_holds_for_all_stages_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [file, "--no-cache", "--no-alternatives", "--latency"]
    code, answer, _ = plan(capsys, *asked, 12)
    assert code == 0 and answer["chosen"]["rehearsed"]["p95_s"] <= 12
    code, answer, _ = plan(capsys, *asked, 0.1)
    assert code == 3 and not answer["chosen"]["kept"] and "out of reach" in answer["chosen"]["plan"]["why"]


@pytest.mark.parametrize(("exponent", "asked_for"), [(1.0, [6.0]), (2.0, [10.0, 3.4, 5.8, 7.6, 6.7, 6.2])])
def test_a_budget_that_became_too_strict_is_loosened_again(
    exponent: float, asked_for: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that take `asked ** 2 / 3.6` seconds, or as long as was asked, and are the better the longer they take."""
    budget = asked_for[0]
    asked, seen = cascadeplan.ask(SCENARIO, Places(), Path(), LatencyBudget(budget)), list[float]()

    def make(problem: Any, *_: Any) -> list[Any]:
        seen.append(problem.target.latency_s)
        return 2 * [SimpleNamespace(status="optimal", stages=(1, 2), asked_s=seen[-1])]

    def option(_: Any, plan: Any) -> Any:
        p95_s = plan.asked_s**exponent / (3.6 if exponent > 1 else 1.0)
        return SimpleNamespace(
            plan=plan, kept=p95_s <= budget, rehearsed=SimpleNamespace(p95_s=p95_s, quality=plan.asked_s)
        )

    monkeypatch.setattr(answers, "_option", option)
    monkeypatch.setattr(answers, "with_held_out", lambda plan, _: plan)
    best: Any = answers.kept(asked, None, make)  # type: ignore[arg-type]
    assert seen == pytest.approx(asked_for, abs=0.1)
    assert best.plan.asked_s == max(each for each in seen if each**exponent / (3.6 if exponent > 1 else 1) <= budget)


def test_a_quality_that_no_model_has_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer, _ = plan(capsys, file, "--quality", 99, "--no-cache", "--no-alternatives")
    assert code == 3 and "at most" in answer["chosen"]["plan"]["why"]


def test_one_model_left_makes_a_scenario_without_a_cascade() -> None:
    asked = cascadeplan.ask(SCENARIO, Places(), Path(), QualityFloor(1.0))
    answer = cascadeplan.plan(asked, compare=False)
    document = cascadeplan.document_of(asked, answer.chosen.plan)
    assert "cascade" not in document and list(document["workload"]["quality"]["models"]) == ["llama-3-8b"]
    assert answer.chosen.kept


def test_a_stage_alone_has_the_same_arrivals_whatever_serves_it() -> None:
    asked = cascadeplan.ask(SCENARIO, Places(), Path(), QualityFloor(80.0))
    problem = asked.problem
    found = cascadeplan.Simulated(problem.gpu, problem.engine, asked.policies)
    scores = problem.scores
    lengths = Lengths(scores.prompt_tokens.astype("f8"), scores.prompt_tokens.astype("f8"),
                      scores.output_tokens[:, 1].astype("f8"))  # fmt: skip
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
        cascadeplan.ask({**SCENARIO, **change}, Places(), Path(), QualityFloor(80.0))


def test_a_workload_carries_the_rows_of_its_table(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text(
        "request,model,score,output_tokens\n"
        + "".join(f"{i},{model},{10 * i + more},{50 + i}\n" for i in range(4) for model, more in (("s", 0), ("l", 50)))
    )
    spec = QualitySpec(path="scores.csv", models={"s": "llama-3-8b", "l": "llama-3-70b"})
    assert table(spec, tmp_path).models == ("llama-3-8b", "llama-3-70b")
    document = {**SCENARIO, "workload": {"arrivals": 5, "num_requests": 8, "quality": {"path": "scores.csv"}}}
    document["workload"]["quality"] |= {"models": spec.models}
    rows = generate(scenario.assemble(document, Places(), tmp_path).spec.workload, 0, tmp_path)
    assert sorted(rows.column("quality:llama-3-70b")) == [50, 50, 60, 60, 70, 70, 80, 80]
    assert rows.output_tokens.tolist() == (50 + rows.column("quality:llama-3-8b") / 10).tolist()
