"""Every planner ends on few requests, and gives no verdict where nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.config import strict_yaml
from headway.planning.regions import long_term
from headway.scenario import Simulator

MOST_SIMULATIONS = 150
LENGTHS = {"prompt_tokens": 300, "output_tokens": 20}
WORKLOADS: dict[str, dict[str, Any]] = {
    "1 request": {**LENGTHS, "arrivals": 2, "num_requests": 1},
    "2 requests": {**LENGTHS, "arrivals": 2, "num_requests": 2},
    "20 requests": {**LENGTHS, "arrivals": 2, "num_requests": 20},
    "one second": {**LENGTHS, "arrivals": 9, "duration_s": 1},
    "no time": {"trace": {"path": "at-once.csv"}},
}
TIERS = {"tiers": [{"tier": 0, "share": 0.5, "ttft_s": 1}, {"tier": 1, "share": 0.5, "ttft_s": 5}]}
PLANNERS: dict[str, tuple[str, ...]] = {
    "scaling": ("--startup-s", "30", "--scalers", "headway,lt-i"),
    "capacity": ("--gpus", "h100", "--tp", "1", "--num-requests", ""),
    "fleet": ("--have", "h100:4", "--tp", "1", "--seeds", "2", "--routing", "least-loaded", "--no-split"),
    "combos": ("--gpus", "h100:4:3", "--aggregated-only", "--profile-requests", "20"),
    "curve": ("--gpus", "h100:4:3", "--aggregated-only", "--profile-requests", "20", "--curve"),
    "tiers": ("--tiers", "1,2", "--decay", "1", "--seeds", "2"),
}

UNKNOWN = {
    ("combos", "1 request"): "their rate is unknown",
    ("curve", "1 request"): "their rate is unknown",
    ("combos", "no time"): "expected arrivals at a rate",
    ("curve", "no time"): "expected arrivals at a rate",
    ("tiers", "1 request"): "of one class",
    ("tiers", "2 requests"): "of one class",
    ("tiers", "no time"): "of one class",
}
"""What cannot be answered, and why."""


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No planner simulates more often than `MOST_SIMULATIONS`; a search without a bound fails instead of lasting."""
    left = [MOST_SIMULATIONS]

    def counting(simulate: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            assert left[0] >= 0, "the search has no bound"
            return simulate(*arguments, **named)

        return counted

    monkeypatch.setattr(long_term, "TRIAL_REQUESTS", 60)
    monkeypatch.setattr(Simulator, "records", counting(Simulator.records))
    monkeypatch.setattr(long_term, "simulate", counting(long_term.simulate))


def planned(
    folder: Path, planner: str, workload: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str, **keys: Any
) -> tuple[int, str, str]:
    (folder / "at-once.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,300,20\n" * 20)
    made = {
        "workload": {**workload, **(TIERS if planner == "tiers" and "trace" not in workload else {})},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "max_replicas": 3}],
        "slo": {"ttft_s": 2},
        **keys,
    }
    path = folder / "few.yaml"
    path.write_text(strict_yaml.dump(made))
    options = [*PLANNERS[planner], *more]
    if "--num-requests" in options:  # the command's default is more
        at = options.index("--num-requests")
        options[at : at + 2] = ["--num-requests", str(workload["num_requests"])] if "num_requests" in workload else []
    command = ["plan", "combos" if planner == "curve" else planner, str(path), *options, "--no-progress"]
    code = main(command if planner == "tiers" else [*command, "--no-cache"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_ends(planner: str, workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = planned(tmp_path, planner, WORKLOADS[workload], capsys)
    if (planner, workload) in UNKNOWN:
        assert code == 2 and UNKNOWN[planner, workload] in err
    else:
        assert code in (0, 3) and out, err
    assert "nan" not in out.lower().split()


@pytest.mark.parametrize("planner", ["scaling", "capacity", "fleet", "tiers"])
def test_no_verdict_on_requests_of_the_warm_up_alone(
    planner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = WORKLOADS["20 requests"]
    code, out, err = planned(tmp_path, planner, few, capsys, simulation={"warmup_s": 1000})
    assert code == 2 and not out
    assert "nothing is measured: all requests arrived in the first" in err and "warm-up of 1000 s" in err


def test_a_trial_that_never_fills_a_replica_ends_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_term, "MOST_TRIAL_REQUESTS", 40)
    tiny = {"prompt_tokens": 1, "output_tokens": 1, "arrivals": 2, "num_requests": 3}
    code, out, _ = planned(tmp_path, "scaling", tiny, capsys, slo={"ttft_s": 30})
    assert code == 0 and "may serve more: 40 requests, the longest trial, do not fill it" in out


@pytest.mark.parametrize("planner", ["scaling", "capacity", "fleet"])
def test_which_of_several_sets_of_policies_is_planned_for_is_told(
    planner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [{"name": "even", "routing": "round-robin"}, {"name": "free", "routing": "least-loaded"}]
    code, out, _ = planned(tmp_path, planner, WORKLOADS["20 requests"], capsys, variants=variants)
    told = "policies are left out" if planner == "fleet" else "this plan is for the first, even"
    assert code == 0 and told in " ".join(out.split())


def test_tiers_of_requests_of_one_class_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = planned(tmp_path, "tiers", {"trace": {"path": "at-once.csv"}}, capsys)
    assert code == 2 and "all requests are of one class" in err and "a trace with a column `tier`" in err


def test_requests_that_no_replica_takes_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The guess of what a replica serves has no other reason to be none."""
    workload = {**WORKLOADS["20 requests"], "prompt_tokens": 300_000}
    code, _, err = planned(tmp_path, "scaling", workload, capsys)
    assert code == 2 and "100% of the requests are longer, prompt and output, than one of" in err


def test_a_rate_that_is_unknown_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = planned(tmp_path, "combos", WORKLOADS["1 request"], capsys)
    assert code == 2 and "requests arrive at one time (1 of them), so their rate is unknown; expected --rps" in err
