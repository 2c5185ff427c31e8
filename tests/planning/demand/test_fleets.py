"""Fleets of two models for the weeks of a forecast: rates by model, costs, and what more demand takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import headway as hw
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.workload.files import to_parquet
from headway.workload.table import Workload

HAVE = ["l40s:12:1.86"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days of 160 requests for two models, of which 80 come within a minute."""
    made = tmp_path_factory.mktemp("fleets")
    for i in range(2):
        random = np.random.default_rng(i)
        at = np.sort(np.concatenate([random.random(80) * 86000, 36000 + random.random(80) * 60]))
        at[-1] = 86399.0
        columns = {
            "arrival_s": at,
            "prompt_tokens": random.integers(400, 900, 160),
            "output_tokens": random.integers(20, 60, 160),
            "model": random.integers(0, 2, 160),
        }
        to_parquet(Workload(columns, ("llama-3.1-8b", "qwen3-8b")), made / f"day{i}.parquet")
    return made


def planned(folder: Path, growth: float, **more: float) -> hw.Plan:
    days = [folder / f"day{i}.parquet" for i in range(2)]
    demand = hw.forecast_demand(days, growth=growth, months=0.35, begins="2026-03-02")
    return hw.plan_fleet(
        None, HAVE, demand=demand, slo={"ttft_s": 1, "tpot_s": 0.1}, tps=[1], routings=["least-loaded"], split=False,
        seeds=1, engine="vllm-0.15", attainment=0.95, cache=folder / "cache", **more,
    )  # fmt: skip


def test_more_growth_never_costs_less_and_rates_add_up(folder: Path) -> None:
    found, more = planned(folder, 2.0), planned(folder, 1e5)
    assert found.is_met and more.is_met
    for week, later in zip(found.answer.weeks, more.answer.weeks, strict=True):
        assert week.usd_per_hour <= later.usd_per_hour
        assert sum(week.by_model_requests_per_s.values()) == pytest.approx(week.planned_requests_per_s)
    costs = [week.usd_per_hour for week in more.answer.weeks]
    assert costs == sorted(costs) and costs[-1] > costs[0]
    hours = sum(week.num_hours for week in more.answer.weeks)
    reserved = sum(more.answer.always.values()) * hours
    rented = sum(more.answer.rented_gpu_hours.values())
    assert more.answer.usd_per_month == pytest.approx((reserved + rented) * 1.86 * 730 / hours)
    assert more.scenario().fleet.pools


def test_the_command_agrees_and_says_what_does_not_go_together(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    forecast = "forecast demand day0.parquet day1.parquet --growth 2 --months 0.35 --begins 2026-03-02 -o d.parquet"
    assert main(forecast.split()) == 0
    line = "plan fleet --demand d.parquet --have l40s:12:1.86 --slo ttft=1,tpot=0.1 --tp 1 --routing least-loaded"
    line += " --no-split --seeds 1 --engine vllm-0.15 --attainment 0.95"
    capsys.readouterr()
    assert main(f"{line} --cache cache --jobs 1 --json".split()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["weeks"] == [*planned(folder, 2.0).rows]
    assert main(f"{line} --limit 3".split()) == 2 and "--limit: not with --demand" in capsys.readouterr().err
    assert main("plan fleet --have l40s:1".split()) == 2 and "expected a TRACE" in capsys.readouterr().err
    with pytest.raises(HeadwayError, match="chance"):
        planned(folder, 2.0, chance=0.2)
