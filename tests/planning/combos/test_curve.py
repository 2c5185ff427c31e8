"""`headway plan combos --curve`: sizes for demand that moves, by rehearsal."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import yaml

import headway as hw
from headway.cli import main
from headway.scenario.run import load, run

CURVE = {"kind": "curve", "rates": [10, 20, 60, 60, 20, 10], "step_s": 20}
SCENARIO = {
    "name": "day",
    "workload": {"prompt_tokens": 300, "output_tokens": 40, "arrivals": CURVE, "duration_s": 120},
    "slo": {"ttft_s": 2, "tpot_s": 0.05},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "a800-pcie", "engine": "vllm-0.15"}],
}
ASKED = ("--gpus", "a800-pcie:4", "--aggregated-only", "--sizes", "1", "--profile-requests", "150", "--curve")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """The answer, the plan and the page."""
    folder = tmp_path_factory.mktemp("curve")
    file, out, page = (folder / name for name in ("day.yaml", "plan.yaml", "plan.html"))
    file.write_text(yaml.safe_dump(SCENARIO))
    options = [*ASKED, "--cache", str(folder / "cache"), "--no-progress", "-o", str(out), "--html", str(page), "--json"]
    printed = BytesIO()
    with redirect_stdout(TextIOWrapper(printed, write_through=True)):
        assert main(["plan", "combos", str(file), *options]) == 0
        found = json.loads(printed.getvalue())
    return found, out, page


@pytest.mark.ci
def test_each_way_is_sized_until_it_is_in_time(planned: tuple[dict[str, Any], Path, Path]) -> None:
    answer, _, _ = planned
    assert answer["mean_rps"] == pytest.approx(30, rel=0.1) and answer["peak_rps"] > 45
    for way in ("static", "scaled"):
        some = [each for each in answer["sizings"] if each["way"] == way]
        assert some and [each["k"] for each in some] == sorted(each["k"] for each in some)
        assert not any(each["is_met"] for each in some[:-1]), "the smallest size that is in time ends the search"
        for each in some:
            assert (each["other"] is not None) == (each["run"]["attainment"] >= 0.9)
            assert each["is_met"] == (each["other"] is not None and each["other"]["attainment"] >= 0.9)
    # A plan for the median is late in the peak; one for the peak pays for it all the time.
    static = [each for each in answer["sizings"] if each["way"] == "static"]
    assert static[0]["quantile"] == 0.5 and not static[0]["is_met"] and static[0]["chance"] < 1


@pytest.mark.ci
def test_the_cheapest_of_what_is_met_is_planned_and_does_what_it_did(
    planned: tuple[dict[str, Any], Path, Path],
) -> None:
    answer, out, page = planned
    best = answer["sizings"][answer["best"]]
    met = [each for each in answer["sizings"] if each["is_met"]]
    assert best["other"]["usd_per_hour"] == min(each["other"]["usd_per_hour"] for each in met)
    document = yaml.safe_load(out.read_text())
    assert ("scaling" in document["policies"]) == (best["way"] == "scaled")
    summary = run(load(out)).summary
    assert summary.slo_attainment == pytest.approx(best["run"]["attainment"])
    assert f"k {best['k']:.3g}" in page.read_text()


@pytest.mark.ci
def test_what_cannot_be_planned_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "day.yaml"
    file.write_text(yaml.safe_dump(SCENARIO))
    assert main(["plan", "combos", str(file), *ASKED, "--rps", "3", "--no-progress"]) == 2
    assert "--curve: expected one SCENARIO" in capsys.readouterr().err
    assert main(["plan", "combos", str(file), str(file), *ASKED, "--no-progress"]) == 2
    assert "--curve: expected one SCENARIO" in capsys.readouterr().err
    few = [*ASKED, "--no-cache", "--no-progress", "-o", str(tmp_path / "plan.yaml")]
    few[1] = "a800-pcie:1"
    assert main(["plan", "combos", str(file), *few]) == 3
    said = capsys.readouterr()
    assert "no size keeps enough requests in time" in said.out and not (tmp_path / "plan.yaml").exists()
    assert f"not written: {tmp_path / 'plan.yaml'}" in said.err


def test_python_plans_for_a_curve_as_the_command_does(planned: tuple[dict[str, Any], Path, Path]) -> None:
    found, out, _ = planned
    plan = hw.plan_combos(
        SCENARIO,
        ["a800-pcie:4"],
        curve=True,
        sizes=1,
        profile_requests=150,
        aggregated_only=True,
        cache=out.parent / "cache",
    )
    assert plan.is_met and yaml.safe_load(plan.yaml()) == yaml.safe_load(out.read_text())
    assert plan.answer.num_simulated == 0, "the command's rehearsals are found in the cache"
    ways = plan.to_arrow()
    assert ways.num_rows == len(found["sizings"]) and sum(ways["planned"].to_pylist()) == 1
    with pytest.raises(hw.HeadwayError, match="curve, rps: expected one of them"):
        hw.plan_combos(SCENARIO, ["a800-pcie:4"], curve=True, rps=3)
