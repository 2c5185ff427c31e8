"""What a plan of a cascade loses whose judge is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from headway.cli import main
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import evaluator_of
from headway.planning.cascade.plan import plan as make_plan
from headway.planning.cascade.problem import JudgeError, LatencyBudget, QualityFloor
from headway.planning.cascade.regret import Regret, judged_scores, regrets
from headway.planning.cascade.rehearsal import rehearse, rehearse_by_judge
from headway.planning.cascade.request import CascadeOptions, make_request
from headway.planning.rehearsals import Resources, Source
from headway.scenario import Simulator
from headway.workload.quality_judges import noisy_score

SCENARIO: dict[str, Any] = {
    "name": "chat",
    "workload": {
        "arrivals": 3,
        "num_requests": 100,
        "quality": {"trace": 1, "cascade": "llama", "num_requests": 100},
    },
    "fleet": [{"model": "llama-3-70b", "gpu": "h100-80gb-sxm", "tp": 4}],
}
ERRORS = (JudgeError(0.0, 0.0), JudgeError(-12.0, 5.0), JudgeError(12.0, 5.0), JudgeError(0.0, 15.0))


@pytest.fixture(scope="module")
def lost() -> tuple[Regret, ...]:
    asked = make_request(Source(SCENARIO, Places(), Path()), CascadeOptions(target=QualityFloor(75.0)), Simulator())
    return regrets(asked, StageLatencies(evaluator_of(asked)), ERRORS)


@pytest.mark.ci
def test_a_judge_without_error_loses_nothing(lost: tuple[Regret, ...]) -> None:
    none = lost[0]
    for each in (none.by_judge, none.by_truth, none.informed):
        assert (each.short_points, each.slower_s) == (0.0, 0.0)
        assert each.plan.stages == none.informed.plan.stages and each.rehearsed == none.informed.rehearsed


@pytest.mark.ci
def test_nothing_is_lost_against_the_best_that_was_run(lost: tuple[Regret, ...]) -> None:
    for each in lost:
        found = (each.by_judge, each.by_truth, each.informed)
        for one in found:
            assert one.short_points >= 0 and one.slower_s >= 0
            for other in found:
                good = min(one.rehearsed.quality or 0.0, 75.0)
                if (other.rehearsed.quality or 0.0) >= good:
                    assert (one.rehearsed.p95_s or 0.0) - one.slower_s <= (other.rehearsed.p95_s or 0.0) + 1e-9
                assert good + one.short_points >= min(other.rehearsed.quality or 0.0, 75.0) - 1e-9


@pytest.mark.ci
def test_a_kind_judge_costs_quality_and_a_strict_one_time(lost: tuple[Regret, ...]) -> None:
    _, strict, kind, _ = lost
    assert kind.by_judge.short_points > 1 and kind.by_judge.short_points >= kind.informed.short_points
    assert strict.by_judge.rehearsed.quality > 75.0  # type: ignore[operator]
    assert strict.by_judge.slower_s >= 0 and kind.by_judge.rehearsed.p95_s < strict.by_judge.rehearsed.p95_s  # type: ignore[operator]


def test_what_a_judge_believes_is_the_truth_without_error_and_off_by_its_bias() -> None:
    options = CascadeOptions(target=QualityFloor(75.0), alternatives=False, fresh_draws=0)
    asked = make_request(Source(SCENARIO, Places(), Path()), options, Simulator())
    found = make_plan(asked, Resources(Simulator())).chosen.plan
    regret = rehearse_by_judge(asked, found)
    assert regret.quality == pytest.approx(rehearse(asked, found).quality)
    document = {**asked.document, "cascade": {"judge_bias": -3.0}}
    low = replace(asked, document=document)
    true = rehearse(low, found).quality
    assert true is not None and rehearse_by_judge(low, found).quality == pytest.approx(true - 3.0, abs=0.3)


def test_the_same_draw_for_every_judge() -> None:
    scores = make_request(
        Source(SCENARIO, Places(), Path()), CascadeOptions(target=QualityFloor(75.0)), Simulator()
    ).problem.scores
    one, two = (judged_scores(scores, JudgeError(0.0, noise), 1).scores - scores.scores for noise in (2.0, 4.0))
    inside = (judged_scores(scores, JudgeError(0.0, 4.0), 1).scores > 0) & (
        judged_scores(scores, JudgeError(0.0, 4.0), 1).scores < 100
    )
    assert inside.mean() > 0.5 and two[inside] == pytest.approx(2 * one[inside])
    assert (judged_scores(scores, JudgeError(0.0, 0.0), 1).scores == scores.scores).all()
    drawn = np.array([noisy_score(50.0, 1.0, 5.0, 0, i, 0) for i in range(400)])
    assert drawn.mean() == pytest.approx(51.0, abs=1.0) and drawn.std() == pytest.approx(5.0, rel=0.15)
    assert noisy_score(99.0, 5.0, 0.0, 0, 0, 0) == 100.0 and noisy_score(50.0, 0.0, 5.0, 0, 7, 1) == noisy_score(
        50.0, 0.0, 5.0, 0, 7, 1
    )


@pytest.mark.ci
def test_the_command_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, html = tmp_path / "chat.yaml", tmp_path / "plan.html"
    file.write_text(yaml.safe_dump(SCENARIO))
    asked = [
        "plan",
        "cascade",
        str(file),
        "--quality",
        "75",
        "--no-alternatives",
        "--no-progress",
        "--cache",
        str(tmp_path / "cache"),
    ]
    assert main([*asked, "--regret=12:5", "--html", str(html)]) == 0
    assert "+12, sd 5" in capsys.readouterr().out and "knowing it" in html.read_text()
    assert main([*asked, "--regret=12:5", "--json"]) == 0
    (regret,) = json.loads(capsys.readouterr().out)["regrets"]
    assert regret["off"] == {"bias": 12.0, "noise": 5.0} and regret["by_judge"]["short_points"] > 0
    assert main([*asked, "--regret=much"]) == 2 and "expected points as in -9:8" in capsys.readouterr().err
    assert main([*asked, "--regret=0:-1"]) == 2
    late = make_request(Source(SCENARIO, Places(), Path()), CascadeOptions(target=LatencyBudget(9.0)), Simulator())
    with pytest.raises(HeadwayError, match="expected a quality"):
        regrets(late, StageLatencies(evaluator_of(late)), ERRORS)
