"""Plans for forecast demand, rehearsed: more growth or less certainty never takes fewer GPUs, and costs add up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from msgspec import structs

import headway as hw
from headway.cli import main
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.forecast.demand import DemandForecast, forecast_days
from headway.planning.capacity.plan import CapacityOptions
from headway.planning.capacity.problem import Targets
from headway.planning.demand.answer import report
from headway.planning.demand.plan import DemandPlanOptions, plan
from headway.planning.demand.problem import DemandPlan, DemandPrices
from headway.planning.demand.text import sentences, weeks_table
from headway.planning.rehearsals import Resources, Source
from headway.report.render import page
from headway.scenario import Simulator
from headway.workload.files import to_parquet
from headway.workload.table import Workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days of 200 requests, of which 100 come within one hour's first two minutes; and a cache."""
    made = tmp_path_factory.mktemp("days")
    for i in range(2):
        random = np.random.default_rng(i)
        at = np.sort(np.concatenate([random.random(100) * 86000, 36000 + random.random(100) * 120]))
        at[-1] = 86399.0
        tokens = {"prompt_tokens": random.integers(800, 1600, 200), "output_tokens": random.integers(50, 150, 200)}
        to_parquet(Workload({"arrival_s": at, **tokens}), made / f"day{i}.parquet")
    return made


def forecast(folder: Path, growth: float = 2.0, days: int = 2, **more: Any) -> DemandForecast:
    paths = [folder / f"day{i}.parquet" for i in range(days)]
    return forecast_days(paths, growth_per_month=growth, months=0.5, **more)


def planned(folder: Path, demand: DemandForecast, chance: float = 0.8, **prices: float) -> DemandPlan:
    options = DemandPlanOptions(
        capacity=CapacityOptions(
            gpus=("l40s",), tps=(1,), max_replicas=12, targets=Targets(ttft_p99_s=1.0, tpot_p99_s=0.06)
        ),
        chance=chance,
        prices=DemandPrices(**prices),
    )
    document = {"workload": {}, "fleet": [{"model": "llama-3.1-8b", "engine": "vllm-0.15"}]}
    source = Source(document, Places(), Path())
    found, _ = plan(demand, source, options, Resources(Simulator(), folder / "cache"))
    return found


def replicas(found: DemandPlan) -> list[int]:
    return [99 if week.replicas is None else week.replicas for week in found.weeks]


def wide(demand: DemandForecast, by: float) -> DemandForecast:
    """The same median, and every quantile so many times as far from it."""
    rows = np.array(demand.total.requests_per_s)
    median = rows[demand.quantiles.index(0.5)]
    rows = median * (rows / np.maximum(median, 1e-12)) ** by
    return structs.replace(demand, total=structs.replace(demand.total, requests_per_s=tuple(map(tuple, rows))))


def test_more_growth_and_wider_intervals_and_more_chance_never_take_fewer(folder: Path) -> None:
    demand = forecast(folder)
    found = planned(folder, demand)
    assert found.status == "met" and all(week.chance and week.chance >= 0.8 - 1e-6 for week in found.weeks)
    for more in (
        planned(folder, forecast(folder, growth=40.0)),
        planned(folder, wide(demand, 4.0)),
        planned(folder, demand, chance=0.85),
    ):
        assert all(a <= b for a, b in zip(replicas(found), replicas(more), strict=True))
    assert replicas(planned(folder, forecast(folder, growth=40.0)))[-1] > replicas(found)[-1]


def test_the_weeks_agree_with_what_was_rehearsed(folder: Path) -> None:
    demand = forecast(folder, growth=30.0)
    found = planned(folder, demand, reserved_usd_per_gpu_hour=0.9)
    served = dict(found.served)
    for week in found.weeks:
        assert week.replicas is not None and served[week.replicas] >= week.planned_requests_per_s * (1 - 1e-4)
        if week.replicas > 1:
            assert served[week.replicas - 1] < week.planned_requests_per_s
    assert [each.replicas for each in found.due] == sorted({each.replicas for each in found.due})
    assert found.due[-1].replicas == max(replicas(found)) and len(found.due) > 1
    reserve = found.reserve
    assert reserve is not None and reserve.break_even_utilisation is not None
    hours = 730 * reserve.num_reserved_gpus * 0.9
    rented = reserve.rented_gpu_hours * 2 * reserve.on_demand_usd_per_gpu_hour  # half a month was forecast
    assert reserve.usd_per_month == pytest.approx(hours + rented)
    assert reserve.usd_per_month <= reserve.usd_per_month_all_on_demand
    assert all(each.replicas > reserve.reserved_replicas for each in reserve.schedule)
    shown = page(report(found, demand), "headway plan capacity")
    assert "due" in " ".join(sentences(found)) and weeks_table(found).rows[0][0] in shown


def test_more_chance_than_the_step_times_leave_is_said(folder: Path) -> None:
    found = planned(folder, forecast(folder), chance=0.99)
    assert found.status == "infeasible" and "headway calibrate" in " ".join(found.notes)


def test_records_that_are_gone_are_named(folder: Path) -> None:
    demand = forecast(folder)
    gone = structs.replace(demand, busiest=structs.replace(demand.busiest, path=str(folder / "gone.parquet")))
    with pytest.raises(HeadwayError, match=r"gone\.parquet: the recorded hour"):
        planned(folder, gone)


def test_the_command_the_front_door_and_the_written_scenario_agree(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    demand = "forecast demand day0.parquet day1.parquet --growth 30 --months 0.3 --begins 2026-03-02 -o d.parquet"
    assert main(demand.split()) == 0 and "assumed:" in capsys.readouterr().out
    asked = "--gpus l40s --tp 1 --ttft-p99 1 --tpot-p99 0.06 --max-replicas 12 --reserved-usd 0.9"
    line = f"plan capacity --demand d.parquet --model llama-3.1-8b --engine vllm-0.15 {asked}"
    assert main([*line.split(), *"--jobs 1 --cache cache --json --out m.yaml --html m.html".split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = hw.plan_capacity(
        {"fleet": [{"model": "llama-3.1-8b", "engine": "vllm-0.15"}]},
        gpus=["l40s"],
        tps=[1],
        ttft_p99_s=1,
        tpot_p99_s=0.06,
        max_replicas=12,
        reserved_usd=0.9,
        demand="d.parquet",
        cache="cache",
    )
    assert [*found.rows] == printed["weeks"] == msgspec.to_builtins([*found.answer.weeks])
    assert found.is_met and "reserve" in found._repr_html_().lower()
    written = yaml.safe_load((folder / "m.yaml").read_text())
    assert written["fleet"][0]["max_replicas"] == max(week["replicas"] for week in printed["weeks"])
    result = hw.simulate(folder / "m.yaml")
    assert result.metrics["num_requests"] == forecast(folder).busiest.num_requests
    assert main(f"{line} --rate 3".split()) == 2 and "--rate: not with --demand" in capsys.readouterr().err


def test_prices_go_with_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan capacity --builtin chat --reserved-usd 1".split()) == 2
    assert "--reserved-usd: goes with --demand" in capsys.readouterr().err


@pytest.mark.ci
def test_the_page_shows_what_its_commands_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file and the commands of docs/plan-scaling.md, as printed, but for a cache of their own."""
    text = (Path(__file__).parents[3] / "docs" / "plan-scaling.md").read_text(encoding="utf-8")
    section = text.partition("## Next month from recorded days")[2]
    monkeypatch.chdir(tmp_path)
    Path("days.yaml").write_text(section.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    commands = section.split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    for line in commands.strip().splitlines():
        program, *words = line.split()
        own = ["--cache", "cache"] if words[:2] == ["plan", "capacity"] else []
        assert program == "headway" and main([*words, *own]) == 0, line
    shown = capsys.readouterr().out
    said = " ".join(section.split())
    assert "3 L4 at first, 4 from 27 March; one of them reserved" in said
    assert "l4 tp 1: 3 replicas now, 4 at most" in shown and "Reserve 1 GPU " in shown
    assert "The next replica is due: 4 from 2026-03-27." in shown
    usd = re.search(r"A month costs \$([\d,.]+); .* cost \$([\d,.]+)\.", shown)
    assert usd is not None
    month, always = (round(float(each.replace(",", ""))) for each in usd.groups())
    assert f"${month:,} a month in place of ${always:,}" in said
    assert Path("month.html").stat().st_size > 0


def test_a_chance_and_a_price_that_are_none_are_errors() -> None:
    with pytest.raises(HeadwayError, match="less than 0"):
        DemandPlanOptions(chance=0.4)
    with pytest.raises(HeadwayError, match="spot_usd_per_gpu_hour: -1; expected dollars from 0"):
        DemandPrices(spot_usd_per_gpu_hour=-1)
