"""`headway plan combos`: profiles by simulation, their cache, the plan as a fleet that keeps what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from headway.cli import main
from headway.scenario import load, run

SCENARIO = {
    "name": "chat",
    "workload": {"prompt_tokens": 300, "output_tokens": 60, "arrivals": 20, "num_requests": 200},
    "slo": {"ttft_s": 2, "tpot_s": 0.05},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h800-80gb-sxm", "engine": "vllm-v1"}],
}
GPUS = "h800:2:2.8,h20:3:1.5"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(SCENARIO))
    return file


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code and what was printed."""
    code = main(["plan", "combos", *map(str, arguments), "--no-progress"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_plan_is_a_fleet_that_serves_its_demand(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, out, page = tmp_path / "cache", tmp_path / "plan.yaml", tmp_path / "plan.html"
    asked = [scenario, "--gpus", GPUS, "--rps", 90, "--sizes", 1, "--cache", cache, "--profile-requests", 150]
    code, text, err = plan(capsys, *asked, "--json", "-o", out, "--html", page)
    assert code == 0, err
    answer = json.loads(text)
    found = answer["plan"]
    assert found["status"] == "optimal" and found["gap"] == pytest.approx(0, abs=1e-9)
    assert found["services"][0]["goodput_rps"] >= 90
    assert all(found["gpus"].get(name, 0) <= most for name, most in (("h800-80gb-sxm", 2), ("h20-96gb", 3)))
    assert set(answer["others"]) == {"mc", "mce"}
    assert answer["others"]["mc"]["usd_per_hour"] <= found["usd_per_hour"] + 1e-9
    # What is planned does what it was profiled to do, at the rate that was asked for.
    document = yaml.safe_load(out.read_text())
    document["workload"] |= {"arrivals": 90, "num_requests": 600}
    out.write_text(yaml.safe_dump(document))
    done = run(load(out)).summary
    assert done.slo_attainment is not None and done.slo_attainment >= 0.85
    assert "<1 x" in page.read_text() and "goodput" in page.read_text()
    # The same again costs no simulation.
    again = plan(capsys, *asked, "--json")
    assert json.loads(again[1])["plan"] == found
    assert "0 simulations" in again[2]


def test_a_demand_beyond_the_gpus_is_told(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [scenario, "--gpus", "h20:1", "--rps", 5000, "--sizes", 1, "--no-cache", "--profile-requests", 60]
    code, text, _ = plan(capsys, *asked)
    assert code == 3
    assert "at most" in text and "needs 5000" in text


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"slo": {}}, (), "slo: expected ttft_s, tpot_s, or both"),
        ({"fleet": [], "combos": []}, (), "no replicas"),
        ({}, ("--gpus", "h900:1"), "--gpus: .*h900"),
        ({}, ("--gpus", "h20:many"), "expected type:count:price"),
        ({}, ("--rps", "1,2"), "expected 1 numbers"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    change: dict[str, object], arguments: tuple[str, ...], message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "asked.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **change}))
    options = arguments if "--gpus" in arguments else ("--gpus", "h20:1", *arguments)
    code, _, err = plan(capsys, file, "--no-cache", *options)
    assert code == 1 or code == 2
    assert re.search(message, err), err
